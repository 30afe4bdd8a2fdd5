// SPDX-License-Identifier: Apache-2.0
/*
 * Memory of callers that managers of this process have as their host tiers.
 *
 * Two managers over one range would overwrite each other's blocks with right checksums: a list of
 * the ranges in use refuses the second. After fork the child's list is empty: it has no manager.
 */
#include <errno.h>

#include "base/core/log.h"
#include "tier/manager/state/manager.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvbm_taken *all;

/* ---- forks: a child has no manager ---- */

/* Hold the lock over fork, so that the child's list isn't half changed. */
static void before_fork(void)
{
    pthread_mutex_lock(&lock);
}

static void in_parent(void)
{
    pthread_mutex_unlock(&lock);
}

static void in_child(void)
{
    all = NULL;
    pthread_mutex_unlock(&lock);
}

static void watch_forks(void)
{
    pthread_atfork(before_fork, in_parent, in_child);
}

/* ---- the list ---- */

/* True when two ranges share a byte. Unsigned differences: a range below the other one is
 * far away. */
static bool overlap(const struct kvbm_taken *a, const struct kvbm_taken *b)
{
    return a->begin - b->begin < b->bytes || b->begin - a->begin < a->bytes;
}

int kvbm_memory_take(struct kvbm_manager *m)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    const struct kvbm_taken *other;

    m->taken.begin = (uintptr_t)m->opts.host_memory;
    m->taken.bytes = m->opts.host_bytes;
    pthread_once(&once, watch_forks);
    pthread_mutex_lock(&lock);
    other = all;
    while (other && !overlap(other, &m->taken))
        other = other->next;
    if (!other) {
        m->taken.next = all;
        all = &m->taken;
    }
    pthread_mutex_unlock(&lock);
    if (other)
        kv_log_warn("kvbm", "manager not created: another one has its host_memory", NULL);
    return other ? -EBUSY : 0;
}

void kvbm_memory_return(struct kvbm_manager *m)
{
    struct kvbm_taken **at = &all;

    pthread_mutex_lock(&lock);
    while (*at && *at != &m->taken)
        at = &(*at)->next;
    if (*at)
        *at = m->taken.next;
    pthread_mutex_unlock(&lock);
}
