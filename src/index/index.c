// SPDX-License-Identifier: Apache-2.0
/* Create and destroy an index, find holders, count. docs/index.md explains the whole. */
#include <string.h>

#include "index/tree/kids.h"
#include "index/tree/windows.h"
#include "index/write/store.h"

#define SOFT_LIMBO ((size_t)64 << 10)
#define HARD_LIMBO ((size_t)64 << 20)
#define MAX_COPIES (UINT32_C(1) << 22)
#define MAX_PARKED (UINT32_C(1) << 21)
#define MAX_PARKED_HOLDER (UINT32_C(1) << 17)

static void free_retired(void *arg, struct kv_retired *object, unsigned kind)
{
    struct kvi_index *ix = arg;
    const struct kvi_page *page;

    switch (kind) {
    case KVI_KIND_CHAIN:
        kvi_chain_free(ix, (struct kvi_chain *)((char *)object - offsetof(struct kvi_chain, link)));
        break;
    case KVI_KIND_EXTENT:
        page = kvi_page_of(object);
        kvi_arena_free(&ix->arena,
                       page->number << KVI_PAGE_SHIFT |
                           (uint32_t)((const uint64_t *)(void *)object - page->engines));
        break;
    default:
        kvi_mem_free(&ix->mem, object);
    }
}

static uint64_t mix_holder(struct kv_holder key)
{
    return kv_mix(kv_mix(key.worker) + key.rank);
}

static uint64_t holder_mix(const void *arg, uint32_t id)
{
    return mix_holder(kvi_holder_at(arg, id)->key);
}

static void holder_prefetch(const void *arg, uint32_t id)
{
    __builtin_prefetch(kvi_holder_at(arg, id));
}

int kvi_create(const struct kvi_opts *opts, struct kvi_index **ret)
{
    struct kvi_mem mem = {0};
    pthread_mutexattr_t attr;
    struct kvi_index *ix;

    if (!ret || !kv_sized_or_null(opts, "kvi_opts"))
        return -EINVAL;
    ix = kvi_mem_alloc_lines(&mem, sizeof(*ix));
    if (!ix)
        return -ENOMEM;
    atomic_store_explicit(&ix->mem.bytes, atomic_load_explicit(&mem.bytes, memory_order_relaxed),
                          memory_order_relaxed);
    ix->max_blocks = KV_OPT(opts, max_blocks, UINT32_MAX - 1);
    ix->max_holder_blocks = KV_OPT(opts, max_holder_blocks, UINT64_MAX);
    ix->copies.max = KV_OPT(opts, max_copies, MAX_COPIES);
    ix->parking.max = KV_OPT(opts, max_parked, MAX_PARKED);
    ix->parking.max_holder = KV_OPT(opts, max_parked_holder, MAX_PARKED_HOLDER);
    /* Writers hold the lock for a microsecond: spinning costs less than sleeping. */
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(&ix->lock, &attr);
    pthread_mutex_init(&ix->gate, &attr);
    pthread_mutexattr_destroy(&attr);
    pthread_cond_init(&ix->cleared, NULL);
    kv_limbo_init(&ix->limbo, SOFT_LIMBO, HARD_LIMBO, free_retired, ix);
    kvi_arena_init(&ix->arena, &ix->mem, &ix->limbo, KVI_KIND_MEMORY);
    kvi_dir_init(&ix->holders, &ix->mem, &ix->limbo, KVI_KIND_MEMORY);
    kvi_dir_init(&ix->tmaps, &ix->mem, &ix->limbo, KVI_KIND_MEMORY);
    ix->scratch = kvi_mem_alloc(&ix->mem, sizeof(*ix->scratch));
    if (!ix->scratch || kvi_names_init(ix, KV_OPT(opts, expected_blocks, 0)) ||
        kvi_copies_init(ix) || kvi_parking_init(ix) ||
        kvi_table_init(&ix->holder_ids, &ix->mem, holder_mix, holder_prefetch, ix)) {
        kvi_destroy(ix);
        return -ENOMEM;
    }
    *ret = ix;
    return 0;
}

static void free_scratch(struct kvi_index *ix)
{
    if (!ix->scratch)
        return;
    kvi_mem_free(&ix->mem, ix->scratch->pieces);
    kvi_mem_free(&ix->mem, ix->scratch->moves);
    kvi_mem_free(&ix->mem, ix->scratch->naming);
    kvi_mem_free(&ix->mem, ix->scratch->seen);
    kvi_mem_free(&ix->mem, ix->scratch->parked);
    kvi_mem_free(&ix->mem, ix->scratch->names);
    kvi_mem_free(&ix->mem, ix->scratch->run);
    kvi_mem_free(&ix->mem, ix->scratch->hanging);
    kvi_mem_free(&ix->mem, ix->scratch->hashes);
    *ix->scratch = (struct kvi_scratch){0};
}

static void free_windows(struct kvi_index *ix)
{
    for (uint32_t i = 0; i < ix->holders.n_used; i++) {
        const struct kvi_holder *holder = kvi_dir_get(&ix->holders, i);

        if (holder)
            kvi_mem_free(&ix->mem, kvi_windows_of(holder));
    }
}

static void free_items(struct kvi_index *ix, struct kvi_dir *dir)
{
    for (uint32_t i = 0; i < dir->n_used; i++)
        kvi_mem_free(&ix->mem, kvi_dir_get(dir, i));
    kvi_dir_fini(dir);
}

void kvi_destroy(struct kvi_index *index)
{
    if (!index)
        return;
    kv_limbo_fini(&index->limbo);
    kvi_table_fini(&index->holder_ids);
    kvi_names_fini(index);
    kvi_copies_fini(index);
    kvi_parking_fini(index);
    kvi_slabs_fini(index);
    kvi_arena_fini(&index->arena);
    free_windows(index);
    free_items(index, &index->holders);
    free_items(index, &index->tmaps);
    free_scratch(index);
    kvi_mem_free(&index->mem, index->scratch);
    kvi_mem_drop_spare(&index->mem);
    pthread_cond_destroy(&index->cleared);
    pthread_mutex_destroy(&index->gate);
    pthread_mutex_destroy(&index->lock);
    free(index);
}

/*
 * Mutexes aren't fair: a thread that unlocks and locks at once wins against sleeping waiters.
 * Waiting threads therefore stand at a gate, which the first of them holds. A thread that passes
 * the gate queues behind that one.
 */
void kvi_lock_in_turn(struct kvi_index *ix)
{
    pthread_mutex_lock(&ix->gate);
    pthread_mutex_lock(&ix->lock);
    pthread_mutex_unlock(&ix->gate);
}

void kvi_lock(struct kvi_index *ix)
{
    if (pthread_mutex_trylock(&ix->lock))
        kvi_lock_in_turn(ix);
}

void kvi_unlock(struct kvi_index *ix)
{
    bool empty;

    kvi_settle(ix);
    atomic_store_explicit(&ix->n_parked, ix->parking.n, memory_order_relaxed);
    atomic_store_explicit(&ix->n_parked_forgotten, ix->parking.forgotten, memory_order_relaxed);
    atomic_store_explicit(&ix->n_copies, ix->copies.n, memory_order_relaxed);
    atomic_store_explicit(&ix->n_copies_uncounted, ix->copies.uncounted, memory_order_relaxed);
    atomic_store_explicit(&ix->n_doubts, ix->copies.doubts, memory_order_relaxed);
    empty = atomic_load_explicit(&ix->n_blocks, memory_order_relaxed) == 0;
    if (empty)
        free_scratch(ix);
    kv_limbo_collect(&ix->limbo, empty);
    kvi_arena_release(&ix->arena, empty ? 0 : 1);
    if (empty)
        kvi_mem_drop_spare(&ix->mem);
    pthread_mutex_unlock(&ix->lock);
    kvi_mem_prepare(&ix->mem);
}

/* -- holders ----------------------------------------------------------------------------------- */

struct kvi_holder *kvi_holder_find(const struct kvi_index *ix, struct kv_holder key)
{
    struct kvi_probe probe;
    uint32_t id;

    kvi_probe_init(&probe, &ix->holder_ids, mix_holder(key));
    while (kvi_probe_next(&probe, &id)) {
        struct kvi_holder *holder = kvi_holder_at(ix, id);

        if (holder->key.worker == key.worker && holder->key.rank == key.rank)
            return holder;
    }
    return NULL;
}

struct kvi_holder *kvi_holder_await(struct kvi_index *ix, struct kv_holder key)
{
    struct kvi_holder *holder;

    while ((holder = kvi_holder_find(ix, key)) != NULL && holder->clearing)
        pthread_cond_wait(&ix->cleared, &ix->lock);
    return holder;
}

int kvi_holder_add(struct kvi_index *ix, struct kv_holder key, struct kvi_holder **ret)
{
    struct kvi_holder *holder = kvi_mem_alloc(&ix->mem, sizeof(*holder));
    int rc;

    if (!holder)
        return -ENOMEM;
    holder->key = key;
    holder->max_blocks = ix->max_holder_blocks;
    rc = kvi_dir_add(&ix->holders, holder, KVI_MAX_HOLDERS, &holder->id);
    if (rc) {
        kvi_mem_free(&ix->mem, holder);
        return rc;
    }
    rc = kvi_table_insert(&ix->holder_ids, mix_holder(key), holder->id);
    if (rc) {
        kvi_dir_remove(&ix->holders, holder->id);
        kvi_mem_free(&ix->mem, holder);
        return rc;
    }
    kvi_count(&ix->n_holders, 1);
    *ret = holder;
    return 0;
}

void kvi_holder_drop(struct kvi_index *ix, struct kvi_holder *holder)
{
    kvi_overlays_drop(ix, holder);
    kvi_table_erase(&ix->holder_ids, mix_holder(holder->key), holder->id);
    kvi_dir_remove(&ix->holders, holder->id);
    kvi_retire_memory(ix, &holder->retired, sizeof(*holder));
    kvi_count(&ix->n_holders, (uint64_t)-1);
}

/* Return the blocks of a holder; without a main group, those of its windows. */
static uint64_t blocks_of(const struct kvi_holder *holder)
{
    return KV_MAX(atomic_load_explicit(&holder->blocks, memory_order_relaxed),
                  kvi_windows_blocks(holder));
}

static uint64_t doubted_of(const struct kvi_holder *holder)
{
    uint64_t doubted = kvi_copies_doubted(holder);
    const struct kvi_holder *overlay;

    KVI_EACH_OVERLAY(kvi_windows_of(holder), overlay)
    doubted += kvi_copies_doubted(overlay);
    return doubted;
}

uint64_t kvi_holder_blocks(struct kvi_index *index, struct kv_holder holder)
{
    const struct kvi_holder *found;
    uint64_t blocks;

    kvi_lock(index);
    found = kvi_holder_find(index, holder);
    blocks = found ? blocks_of(found) : 0;
    pthread_mutex_unlock(&index->lock);
    return blocks;
}

int kvi_get_holder(struct kvi_index *index, struct kv_holder holder, struct kvi_holder_info *ret)
{
    struct kvi_holder_info info = KVI_HOLDER_INFO_INIT;
    const struct kvi_holder *found;

    if (!kv_sized(ret, "kvi_holder_info"))
        return -EINVAL;
    kvi_lock(index);
    found = kvi_holder_find(index, holder);
    if (found) {
        info = (struct kvi_holder_info){
            .blocks = blocks_of(found),
            .parked = found->n_parked,
            .copies = found->n_copies,
            .refused = found->n_refused,
            .lost = found->n_lost,
            .doubted = doubted_of(found),
            .placeless = kvi_windows_placeless(found),
            .moved = found->n_moved,
        };
        for (int t = 0; t < KV_N_TIERS; t++)
            info.tier_blocks[t] = found->tier[t].blocks;
    }
    pthread_mutex_unlock(&index->lock);
    if (!found)
        return -ENOENT;
    KV_GIVE(ret, &info);
    return 0;
}

int kvi_get_stats(struct kvi_index *index, struct kvi_stats *ret)
{
    struct kvi_stats stats;

    if (!index || !kv_sized(ret, "kvi_stats"))
        return -EINVAL;
    stats = (struct kvi_stats){
        .holders = atomic_load_explicit(&index->n_holders, memory_order_relaxed),
        .chains = atomic_load_explicit(&index->n_chains, memory_order_relaxed),
        .blocks = atomic_load_explicit(&index->n_blocks, memory_order_relaxed),
        .holder_blocks = atomic_load_explicit(&index->n_holder_blocks, memory_order_relaxed),
        .bytes = kvi_mem_bytes(&index->mem),
        .refused = atomic_load_explicit(&index->n_refused, memory_order_relaxed),
        .parked = atomic_load_explicit(&index->n_parked, memory_order_relaxed),
        .parked_forgotten = atomic_load_explicit(&index->n_parked_forgotten, memory_order_relaxed),
        .copies = atomic_load_explicit(&index->n_copies, memory_order_relaxed),
        .copies_uncounted = atomic_load_explicit(&index->n_copies_uncounted, memory_order_relaxed),
        .doubts = atomic_load_explicit(&index->n_doubts, memory_order_relaxed),
        .moved = atomic_load_explicit(&index->n_moved, memory_order_relaxed),
    };
    for (int t = 0; t < KV_N_TIERS; t++)
        stats.tier_blocks[t] = atomic_load_explicit(&index->n_tier_blocks[t], memory_order_relaxed);
    KV_GIVE(ret, &stats);
    return 0;
}
