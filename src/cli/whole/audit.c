// SPDX-License-Identifier: Apache-2.0
/* The store's books: a manager that knows nothing asks the store for each key; a listing counts. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "cli/whole/whole.h"
#include "kv_store.h"
#include "kvbm_manager.h"

#define AT_ONCE 256u
#define PATIENCE_NS (20 * KV_NS_PER_S)

static int count_chunk(void *arg, const kv_store_entry *entry)
{
    uint64_t *n = arg;

    (void)entry;
    ++*n;
    return 0;
}

static bool any_pending(const uint8_t *where, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (where[i] == KVBM_PENDING || where[i] == KVBM_BUSY)
            return true;
    return false;
}

static int look(struct kvbm_manager *manager, uint32_t group, const uint64_t *keys, size_t n,
                bool *ret)
{
    const struct timespec pause = {.tv_nsec = 1000 * 1000};
    struct kvbm_chain chain = {
        .size = sizeof(chain), .group = group, .keys = keys, .scattered = true};
    uint64_t deadline_ns = kv_now_ns() + PATIENCE_NS;
    uint8_t where[AT_ONCE];
    long rc;

    do {
        rc = kvbm_manager_lookup(manager, &chain, n, where);
        if (rc >= 0 && any_pending(where, n))
            nanosleep(&pause, NULL);
    } while (rc >= 0 && any_pending(where, n) && kv_now_ns() < deadline_ns);
    for (size_t i = 0; i < n && rc >= 0; i++)
        ret[i] = where[i] == KVBM_REMOTE;
    return rc < 0 ? (int)rc : any_pending(where, n) ? -ETIMEDOUT : 0;
}

static int list(const char *uri, uint64_t *ret)
{
    struct kvs_store *store = NULL;
    int rc = kvs_open(uri, &store);

    *ret = 0;
    if (rc < 0)
        return rc;
    rc = kvs_list_chunks(store, count_chunk, ret);
    kvs_close(store);
    return rc;
}

int kc_audit_store(struct kc_whole *w, uint32_t group, const uint64_t *keys, size_t n, bool *ret,
                   uint64_t *ret_chunks)
{
    struct kvbm_layout_config block = kc_shape_layout(&w->plan.shape, 1, false);
    const struct kvbm_manager_opts opts = {.size = sizeof(opts),
                                           .block = &block,
                                           .fingerprint = KC_PLAN_FINGERPRINT,
                                           .staging_blocks = 1,
                                           .object = w->plan.store,
                                           .copy_threads = 1};
    struct kvbm_manager *manager = NULL;
    int rc = kvbm_manager_create(&opts, &manager);

    for (size_t at = 0; at < n && rc == 0; at += AT_ONCE)
        rc = look(manager, group, keys + at, KV_MIN(n - at, (size_t)AT_ONCE), ret + at);
    if (manager)
        kvbm_manager_destroy(manager, 5000);
    return rc == 0 ? list(w->plan.store, ret_chunks) : rc;
}
