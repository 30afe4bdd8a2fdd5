// SPDX-License-Identifier: Apache-2.0
/*
 * Remove keys from every tier: the lowest tier first, so that no fetch brings a block back from
 * below.
 *
 *   object store   a batch of deletes; the call waits for it
 *   disk           the pool forgets them; then the slots that still hold one of them, and that
 *                  neither the pool nor a move uses for it, are forgotten
 *   host           the pool forgets them
 *
 * More slots than the pool's may hold a key: blocks that were evicted, or dropped as duplicates,
 * leave their records behind until their slots are written again. A restart would find these. So it
 * would records that a failed write has left in the file: every removal tries to zero them again.
 */
#include <errno.h>
#include <semaphore.h>
#include <stdlib.h>
#include <string.h>

#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/presence.h"
#include "tier/manager/state/manager.h"

#define SOME 256  /* keys or slots at a time */
#define RUN 65536 /* keys for which the disk's index is searched once */

/* ---- keys ---- */

/* Keys, each once, and a table to find them: open addressing, 0 or 1 + a key's index. */
struct keys {
    uint32_t group, key_len, n, mask;
    uint8_t *keys;
    uint32_t *table;
};

/* Return the cell of a key, or the empty one where it belongs. Half the table is empty: an end. */
static uint32_t *cell_of(const struct keys *k, const void *key)
{
    uint32_t at = (uint32_t)kv_xxh64(key, k->key_len, k->group);

    while (k->table[at & k->mask] &&
           memcmp(k->keys + (size_t)(k->table[at & k->mask] - 1) * k->key_len, key, k->key_len) !=
               0)
        at++;
    return &k->table[at & k->mask];
}

static bool has_key(const void *arg, const void *key)
{
    return *cell_of(arg, key) != 0;
}

static void keys_fini(struct keys *k)
{
    free(k->keys);
    free(k->table);
}

/* Returns 0 or -ENOMEM. */
static int keys_init(struct keys *k, uint32_t group, uint32_t key_len, const uint8_t *keys,
                     size_t n)
{
    *k = (struct keys){.group = group, .key_len = key_len, .mask = 1};
    while (k->mask < 2 * n)
        k->mask *= 2;
    k->keys = malloc(n * key_len);
    k->table = calloc(k->mask--, sizeof(*k->table));
    if (!k->keys || !k->table) {
        keys_fini(k);
        return -ENOMEM;
    }
    for (size_t i = 0; i < n; i++) {
        uint32_t *cell = cell_of(k, keys + i * key_len);

        if (*cell)
            continue;
        memcpy(k->keys + (size_t)k->n * key_len, keys + i * key_len, key_len);
        *cell = ++k->n;
    }
    return 0;
}

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

/*
 * Delete keys from the object store, and wait: a caller that removes a tenant's blocks must know
 * that they are gone. Each call ends by its deadline, so the wait does, and @d outlives the batch.
 */
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

/*
 * Have a pool forget keys, SOME per lock. A promise holds its block, so it ends first: the caller
 * who was promised a key takes it back.
 */
static void from_pool(struct kvbm_manager *m, struct kvbm_pool *pool, const struct keys *k,
                      uint64_t *ret_n, struct kvbm_remove_result *ret)
{
    for (uint32_t i = 0; i < k->n; i += SOME) {
        struct kvbm_reset_result reset = {0};

        kvbm_manager_enter(m); /* others' keep_used() holds blocks for a moment */
        if (pool == m->host)
            kvbm_promise_forget(m, k->group, k->keys + (size_t)i * k->key_len,
                                KV_MIN(k->n - i, (uint32_t)SOME));
        kvbm_pool_reset_keys(pool, k->group, k->keys + (size_t)i * k->key_len,
                             KV_MIN(k->n - i, (uint32_t)SOME), &reset);
        kvbm_manager_leave(m);
        *ret_n += reset.reset;
        ret->held += reset.held;
    }
}

/* Slots that hold keys to be removed. */
struct slots {
    struct kvbm_disk_found found[SOME];
    uint8_t keys[SOME * KVBM_MAX_KEY];
    struct kvbm_immutable held[SOME];
    uint32_t slots[SOME];
    uint64_t commits[SOME];
};

/* True when a move is about to make the key findable in that slot. With the lock. */
static bool is_moving(const struct kvbm_manager *m, uint32_t group,
                      const struct kvbm_disk_found *found)
{
    for (const struct kvbm_move *move = m->offload.moves; move; move = move->next) {
        for (uint32_t k = 0; k < move->n && move->to == KV_TIER_DISK; k++)
            if (move->target[k].handle.block == found->slot && move->info[k].group == group &&
                memcmp(move->info[k].key, found->key, m->key_len) == 0)
                return true;
    }
    return false;
}

/*
 * Choose which of the @n slots found are to be forgotten: s->slots. Returns their number. With the
 * lock. Left out are slots whose key is in use:
 *
 *   the pool finds it there    somebody holds the block, or has stored it again during the call
 *   a move writes it there     it is stored again
 *
 * Slots with an unknown record are chosen: kvbm_disk_forget waits for the write under way there,
 * and leaves the slot alone if the write succeeded.
 */
static size_t keep_used(struct kvbm_manager *m, uint32_t group, struct slots *s, size_t n)
{
    size_t n_unused = 0, n_known = 0;

    for (size_t i = 0; i < n; i++) {
        if (s->found[i].commit == KVBM_DISK_UNKNOWN) {
            s->slots[n_unused] = s->found[i].slot;
            s->commits[n_unused++] = KVBM_DISK_UNKNOWN;
        } else {
            s->found[n_known++] = s->found[i];
        }
    }
    n = n_known;
    for (size_t i = 0; i < n; i++)
        memcpy(s->keys + i * m->key_len, s->found[i].key, m->key_len);
    memset(s->held, 0, sizeof(s->held));
    kvbm_pool_match_scattered(m->disk, group, s->keys, n, KVBM_MATCH_NO_TOUCH, s->held);
    for (size_t i = 0; i < n; i++) {
        const struct kvbm_handle *handle = &s->held[i].handle;
        bool used = handle->pool && handle->block == s->found[i].slot;

        if (handle->pool)
            kvbm_immutable_release(&s->held[i]);
        if (used || is_moving(m, group, &s->found[i]))
            continue;
        s->slots[n_unused] = s->found[i].slot;
        s->commits[n_unused++] = s->found[i].commit;
    }
    return n_unused;
}

/*
 * Forget keys on the disk. The pool comes first, so that no lookup finds a key whose slot is being
 * invalidated. Between the search of slots and their end, the lock is free: a slot may be written
 * again. Its commit tells, and kvbm_disk_forget leaves it alone.
 */
static int from_disk(struct kvbm_manager *m, const struct keys *k, struct kvbm_remove_result *ret)
{
    struct slots *s = malloc(sizeof(*s));
    size_t n = SOME, n_unused;
    uint32_t slot = 0;
    int rc = 0, err;

    if (!s)
        return -ENOMEM;
    from_pool(m, m->disk, k, &ret->disk, ret);
    while (n == SOME) {
        n = kvbm_disk_find(m->disk_store, k->group, has_key, k, &slot, s->found, SOME);
        kvbm_manager_enter(m);
        n_unused = keep_used(m, k->group, s, n);
        kvbm_manager_leave(m);
        err = kvbm_disk_forget(m->disk_store, s->slots, s->commits, n_unused);
        rc = rc ? rc : err;
    }
    free(s);
    return rc;
}

/* Remove at most RUN keys. An error of one tier doesn't keep the others from removing theirs. */
static int remove_run(struct kvbm_manager *m, uint32_t group, const uint8_t *keys, size_t n,
                      uint64_t deadline_ns, struct kvbm_remove_result *ret)
{
    struct keys k;
    int rc = keys_init(&k, group, m->key_len, keys, n), err;

    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < k.n && m->object_store; i += SOME) {
        err = from_object(m, group, k.keys + (size_t)i * k.key_len, KV_MIN(k.n - i, (uint32_t)SOME),
                          deadline_ns, ret);
        rc = rc ? rc : err;
    }
    if (m->disk_store) {
        err = from_disk(m, &k, ret);
        rc = rc ? rc : err;
    }
    if (!kvbm_staging(m))
        from_pool(m, m->host, &k, &ret->host, ret);
    keys_fini(&k);
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
    for (size_t i = 0; i < n; i += RUN) {
        int err = remove_run(m, group, (const uint8_t *)keys + i * m->key_len,
                             KV_MIN(n - i, (size_t)RUN), deadline, &sum);

        rc = rc ? rc : err;
    }
    if (ret)
        KV_GIVE(ret, &sum);
    return rc;
}
