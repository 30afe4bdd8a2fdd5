// SPDX-License-Identifier: Apache-2.0
/*
 * Remove keys from every tier: the lowest tier first, so that no fetch brings a block back from
 * below.
 *
 *   object store   a batch of deletes; the call waits for it
 *   disk           slots are held while their records are zeroed, then the pool forgets them
 *   host           the pool forgets them
 */
#include <errno.h>
#include <semaphore.h>
#include <stdlib.h>

#include "tier/manager/manager.h"

#define SOME 256 /* keys at a time */

/* ---- object store ---- */

struct deletes {
    struct kvbm_object_batch batch; /* first */
    sem_t ended;
    struct kvbm_object_io ios[SOME];
};

static void deleted(struct kvbm_object_batch *batch)
{
    sem_post(&((struct deletes *)(void *)batch)->ended);
}

/* Note what a batch of deletes did. With the lock. */
static int note_deleted(struct kvbm_manager *m, uint32_t group, const struct deletes *d,
                        struct kvbm_remove_result *ret)
{
    int rc = 0;

    for (uint32_t i = 0; i < d->batch.n; i++) {
        int status = d->ios[i].status;

        if (status == 0) {
            struct kvbm_reset_result reset = {0};

            kvbm_pool_reset_keys(m->object, group, d->ios[i].key, 1, &reset);
            kvbm_presence_removed(m, group, d->ios[i].key);
            ret->object += reset.reset;
        } else if (rc == 0) {
            rc = status;
        }
    }
    return rc;
}

static int from_object(struct kvbm_manager *m, uint32_t group, const uint8_t *keys, uint32_t n,
                       uint64_t deadline_ns, struct kvbm_remove_result *ret)
{
    struct deletes *d = calloc(1, sizeof(*d));
    int rc;

    if (!d)
        return -ENOMEM;
    sem_init(&d->ended, 0, 0);
    for (uint32_t i = 0; i < n; i++)
        d->ios[i] = (struct kvbm_object_io){.group = group, .key = keys + (size_t)i * m->key_len};
    d->batch = (struct kvbm_object_batch){.op = KVBM_OBJECT_DELETE,
                                          .flow = KVBM_ONBOARD,
                                          .deadline_ns = deadline_ns,
                                          .ios = d->ios,
                                          .n = n,
                                          .done = deleted};
    rc = kvbm_object_submit(m->object_store, &d->batch);
    if (rc == 0) {
        while (sem_wait(&d->ended) < 0)
            ; /* EINTR */
        kvbm_manager_enter(m);
        rc = note_deleted(m, group, d, ret);
        kvbm_manager_leave(m);
    }
    sem_destroy(&d->ended);
    free(d);
    return rc;
}

/* ---- disk, host ---- */

static void from_pool(struct kvbm_pool *pool, uint32_t group, const void *keys, size_t n,
                      uint64_t *ret_n, struct kvbm_remove_result *ret)
{
    struct kvbm_reset_result reset = {0};

    kvbm_pool_reset_keys(pool, group, keys, n, &reset);
    *ret_n += reset.reset;
    ret->held += reset.held;
}

static int from_disk(struct kvbm_manager *m, uint32_t group, const uint8_t *keys, uint32_t n,
                     struct kvbm_remove_result *ret)
{
    struct kvbm_immutable held[SOME];
    uint32_t slots[SOME], n_slots = 0;
    int rc;

    /* Held slots can't be evicted and written again while their records are zeroed. */
    kvbm_pool_match_scattered(m->disk, group, keys, n, KVBM_MATCH_NO_TOUCH, held);
    for (uint32_t i = 0; i < n; i++) {
        if (held[i].handle.pool)
            slots[n_slots++] = held[i].handle.block;
    }
    rc = kvbm_disk_forget(m->disk_store, slots, n_slots);
    for (uint32_t i = 0; i < n; i++) {
        if (held[i].handle.pool)
            kvbm_immutable_release(&held[i]);
    }
    if (rc == 0)
        from_pool(m->disk, group, keys, n, &ret->disk, ret);
    return rc;
}

static int remove_some(struct kvbm_manager *m, uint32_t group, const uint8_t *keys, uint32_t n,
                       uint64_t deadline_ns, struct kvbm_remove_result *ret)
{
    int rc = m->object_store ? from_object(m, group, keys, n, deadline_ns, ret) : 0, err;

    if (m->disk_store) {
        err = from_disk(m, group, keys, n, ret);
        rc = rc ? rc : err;
    }
    if (!kvbm_staging(m))
        from_pool(m->host, group, keys, n, &ret->host, ret);
    return rc;
}

int kvbm_manager_remove(struct kvbm_manager *m, uint32_t group, const void *keys, size_t n,
                        uint32_t timeout_ms, struct kvbm_remove_result *ret)
{
    uint64_t deadline = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    struct kvbm_remove_result sum = {.size = sizeof(sum)};
    int rc = kvbm_manager_usable(m);

    if (rc < 0)
        return rc;
    if ((n && !keys) || group >= KVBM_MAX_GROUPS || !kv_sized_or_null(ret, "kvbm_remove_result"))
        return -EINVAL;
    for (size_t i = 0; i < n; i += SOME) {
        int err = remove_some(m, group, (const uint8_t *)keys + i * m->key_len,
                              (uint32_t)KV_MIN(n - i, (size_t)SOME), deadline, &sum);

        rc = rc ? rc : err;
    }
    if (ret)
        KV_GIVE(ret, &sum);
    return rc;
}
