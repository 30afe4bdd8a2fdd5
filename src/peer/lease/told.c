// SPDX-License-Identifier: Apache-2.0
/* Keys that peers were told about. told.h has the drawing. */
#include "peer/lease/told.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "peer/lease/lend.h"

#define MAX_LENDERS 16 /* of one registry; readers of further ones find out by themselves */

struct kvbm_told {
    _Atomic uint32_t references; /* the lender's, and one of each key */
    pthread_mutex_t lock;
    struct kvbm_lender *lender; /* NULL: ended */
};

/* Attached to a key. */
struct told_key {
    struct kvbm_told *told;
    const struct kvbm_registry *registry;
    uint32_t group;
    uint8_t key[];
};

/*
 * Guards which values a key has, and the told of each. A value that the registry names under this
 * lock isn't freed before the lock is released: gone() takes it, too.
 */
static pthread_mutex_t values_lock = PTHREAD_MUTEX_INITIALIZER;

static void put(struct kvbm_told *told)
{
    if (atomic_fetch_sub_explicit(&told->references, 1, memory_order_acq_rel) != 1)
        return;
    pthread_mutex_destroy(&told->lock);
    free(told);
}

/* The key of an attachment is in no tier any more. */
static void gone(void *value)
{
    struct told_key *key = value;
    struct kvbm_told *told;

    pthread_mutex_lock(&values_lock);
    told = key->told;
    pthread_mutex_unlock(&values_lock);
    pthread_mutex_lock(&told->lock);
    if (told->lender)
        kvbm_lender_gone_from(told->lender, key->registry, key->group, key->key);
    pthread_mutex_unlock(&told->lock);
    put(told);
    free(key);
}

struct kvbm_told *kvbm_told_create(struct kvbm_lender *lender)
{
    struct kvbm_told *told = calloc(1, sizeof(*told));

    if (!told)
        return NULL;
    atomic_init(&told->references, 1);
    pthread_mutex_init(&told->lock, NULL);
    told->lender = lender;
    return told;
}

void kvbm_told_end(struct kvbm_told *told)
{
    if (!told)
        return;
    pthread_mutex_lock(&told->lock);
    told->lender = NULL;
    pthread_mutex_unlock(&told->lock);
    put(told);
}

int kvbm_told_type(struct kvbm_registry *registry, uint32_t *ret)
{
    return kvbm_attachment_type(registry, "kvbm.told", true, gone, ret);
}

static bool has_ended(struct kvbm_told *told)
{
    bool ended;

    pthread_mutex_lock(&told->lock);
    ended = !told->lender;
    pthread_mutex_unlock(&told->lock);
    return ended;
}

/*
 * Find out, with values_lock, whether a key has a value of this lender, or can't take one. A value of
 * a lender that has ended becomes this one's: a registry may outlive many. *@freed: that lender's.
 */
static bool has_value(struct kvbm_told *told, struct kvbm_registry *registry, uint32_t type,
                      uint32_t group, const void *key, struct kvbm_told **freed)
{
    void *values[MAX_LENDERS];
    long n = kvbm_registry_attachments(registry, group, key, type, values, MAX_LENDERS);

    for (long i = 0; i < n && i < MAX_LENDERS; i++) {
        const struct told_key *value = values[i];

        if (value->told == told)
            return true;
    }
    for (long i = 0; i < n && i < MAX_LENDERS; i++) {
        struct told_key *value = values[i];

        if (!has_ended(value->told))
            continue;
        *freed = value->told;
        value->told = told;
        return true;
    }
    return n < 0 || n >= MAX_LENDERS;
}

static struct told_key *value_of(struct kvbm_told *told, const struct kvbm_registry *registry,
                                 uint32_t group, const void *key, uint32_t key_len)
{
    struct told_key *value = malloc(sizeof(*value) + key_len);

    if (!value)
        return NULL;
    *value = (struct told_key){.told = told, .registry = registry, .group = group};
    memcpy(value->key, key, key_len);
    return value;
}

void kvbm_told_key(struct kvbm_told *told, struct kvbm_registry *registry, uint32_t type,
                   uint32_t group, const void *key, uint32_t key_len)
{
    struct kvbm_told *freed = told; /* the reference of a value that isn't made */
    struct told_key *value;

    atomic_fetch_add_explicit(&told->references, 1, memory_order_relaxed);
    pthread_mutex_lock(&values_lock);
    if (!has_value(told, registry, type, group, key, &freed)) {
        value = value_of(told, registry, group, key, key_len);
        if (value && kvbm_registry_attach(registry, group, key, type, value) == 0)
            freed = NULL;
        else
            free(value); /* gone meanwhile */
    }
    pthread_mutex_unlock(&values_lock);
    if (freed)
        put(freed);
}
