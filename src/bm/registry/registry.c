// SPDX-License-Identifier: Apache-2.0
#include "bm/registry/registry.h"

#include <errno.h>
#include <sys/mman.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/core/mix.h"
#include "bm/events/events.h"
#include "bm/storage/memory.h"

#define MIN_TABLE_BITS 10
/* not inlined: the common path then needs fewer registers */
#define APART __attribute__((noinline))
#define UNMAP_BYTES ((size_t)1 << 20)

/* Visit blocks in the order of their numbers. One that is registered behind the walk isn't visited:
 * its event tells of it. */
static size_t walk(struct kvbm_event_source *source, uint32_t *at, struct kvbm_walked *ret)
{
    struct kvbm_registry *r =
        (struct kvbm_registry *)(void *)((char *)source - offsetof(struct kvbm_registry, source));
    uint32_t i = *at ? *at : 1, visited = 0;
    size_t n = 0;

    kvbm_lock(r);
    for (; r->pools && i <= r->n_entries && visited < KVBM_WALK; i++, visited++) {
        const struct kvbm_entry *e = kvbm_entry(r, i);
        struct kvbm_walked *block = &ret[n];

        if (!e->tiers)
            continue;
        n++;
        block->key_len = r->key_len;
        block->group = e->group;
        block->position = e->position;
        block->tiers = e->tiers;
        block->has_parent = e->parent != 0;
        memcpy(block->key, e->key, r->key_len);
        if (e->parent)
            memcpy(block->parent, kvbm_entry(r, e->parent)->key, r->key_len);
    }
    *at = r->pools && i <= r->n_entries ? i : 0;
    kvbm_unlock(r);
    return n;
}

int kvbm_registry_create(const struct kvbm_registry_opts *opts, struct kvbm_registry **ret)
{
    uint32_t key_len = KV_OPT(opts, key_len, 8);
    struct kvbm_registry *r;
    pthread_mutexattr_t attr;

    if (!ret || !kv_sized_or_null(opts, "kvbm_registry_opts") || key_len < 4 ||
        key_len > KVBM_MAX_KEY)
        return -EINVAL;
    r = calloc(1, sizeof(*r));
    if (!r)
        return -ENOMEM;
    r->key_len = key_len;
    r->entry_bytes = (uint32_t)(sizeof(struct kvbm_entry) + (key_len + 3) / 4 * 4);
    r->entry_bytes = KV_MAX(r->entry_bytes, (uint32_t)KVBM_LINE);
    r->events = KV_OPT(opts, events, NULL);
    r->seed = kv_secret();
    pthread_mutexattr_init(&attr);
    /* adaptive, since it is held for a microsecond */
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ADAPTIVE_NP);
    pthread_mutex_init(&r->lock, &attr);
    pthread_mutexattr_destroy(&attr);
    r->source.walk = walk;
    if (r->events)
        kvbm_events_use(r->events, &r->source);
    *ret = r;
    return 0;
}

void kvbm_publish(struct kvbm_registry *r, const struct kvbm_event *event)
{
    if (!r->publishing)
        kvbm_events_begin(r->events);
    r->publishing = true;
#ifdef KVBM_CHECKED
    r->told += event->again ? 0 : event->type == KVBM_EVENT_STORED ? 1 : -1;
#endif
    kvbm_events_put(r->events, event);
}

void kvbm_unlock(struct kvbm_registry *r)
{
    uint32_t dead = r->dead;

#ifdef KVBM_CHECKED
    kvbm_check_call(r);
#endif
    if (r->publishing)
        kvbm_events_end(r->events);
    r->publishing = false;
    r->dead = 0;
    if (KV_UNLIKELY(dead))
        kvbm_destroy_dead(r, dead); /* releases the lock in between */
    else
        pthread_mutex_unlock(&r->lock);
}

int kvbm_registry_destroy(struct kvbm_registry *r)
{
    if (!r)
        return 0;
    kvbm_lock(r);
    if (r->pools) {
        kvbm_unlock(r);
        return -EBUSY;
    }
    kvbm_unlock(r);
    if (r->events)
        kvbm_events_leave(r->events, &r->source);
    pthread_mutex_destroy(&r->lock);
    kvbm_unmap(r->entries, r->entries_mapped);
    kvbm_unmap(r->tokens, r->tokens_mapped);
    kvbm_unmap(r->table, r->table_mapped);
    kvbm_unmap(r->old.memory, r->old.mapped);
    free(r->attachments);
    free(r);
    return 0;
}

/* ---- the table ---- */

static uint32_t next_home(const struct kvbm_registry *r, uint32_t at)
{
    return (at + 1) & r->table_mask;
}

/* Find the entry of a key, or 0; *@where is then the bucket with room for it. */
static inline __attribute__((always_inline)) uint32_t table_find(const struct kvbm_registry *r,
                                                                 uint32_t group, const void *key,
                                                                 uint32_t tag,
                                                                 struct kvbm_bucket **where)
{
    for (uint32_t at = kvbm_home(r, tag);; at = next_home(r, at)) {
        struct kvbm_bucket *bucket = &r->table[at];

        for (uint32_t hits = kvbm_bucket_match(bucket->tag, tag); hits; hits &= hits - 1) {
            uint32_t entry = bucket->entry[__builtin_ctz(hits)];

            if (entry && kvbm_is_key(r, entry, group, key))
                return entry;
        }
        *where = bucket;
        if (KV_LIKELY(kvbm_bucket_empty(bucket)))
            return 0;
    }
}

/* Add an entry to a bucket that has room. */
static inline void bucket_put(struct kvbm_bucket *bucket, uint32_t tag, uint32_t entry)
{
    uint32_t i = (uint32_t)__builtin_ctz(kvbm_bucket_empty(bucket));

    bucket->tag[i] = tag;
    bucket->entry[i] = entry;
}

static void table_insert(struct kvbm_registry *r, uint32_t tag, uint32_t entry)
{
    uint32_t at = kvbm_home(r, tag);

    while (!kvbm_bucket_empty(&r->table[at]))
        at = next_home(r, at);
    bucket_put(&r->table[at], tag, entry);
}

/* ---- the old table, while it exists ---- */

static uint32_t old_home(const struct kvbm_registry *r, uint32_t tag)
{
    return tag >> (32 - r->old.bits + KVBM_BUCKET_BITS);
}

static const struct kvbm_bucket *old_next(const struct kvbm_registry *r,
                                          const struct kvbm_bucket *bucket)
{
    const struct kvbm_bucket *end =
        r->old.buckets + ((size_t)1 << (r->old.bits - KVBM_BUCKET_BITS));

    return bucket + 1 == end ? r->old.buckets : bucket + 1;
}

/* Find the entry with this tag and, unless @key is NULL, this key. */
static uint32_t old_find(const struct kvbm_registry *r, uint32_t group, const void *key,
                         uint32_t tag)
{
    for (const struct kvbm_bucket *b = &r->old.buckets[old_home(r, tag)];; b = old_next(r, b)) {
        for (uint32_t hits = kvbm_bucket_match(b->tag, tag); hits; hits &= hits - 1) {
            uint32_t entry = b->entry[__builtin_ctz(hits)];

            if (entry && entry != KVBM_GONE && (!key || kvbm_is_key(r, entry, group, key)))
                return entry;
        }
        if (kvbm_bucket_empty(b))
            return 0;
    }
}

uint32_t kvbm_guess_old(const struct kvbm_registry *r, uint32_t tag)
{
    return old_find(r, 0, NULL, tag);
}

static void old_remove(struct kvbm_registry *r, uint32_t tag, uint32_t entry)
{
    const struct kvbm_bucket *b = &r->old.buckets[old_home(r, tag)];
    uint32_t hits;

    while (!(hits = kvbm_bucket_match(b->entry, entry)))
        b = old_next(r, b);
    r->old.buckets[b - r->old.buckets].entry[__builtin_ctz(hits)] = KVBM_GONE;
}

/* Move up to @n cells, in whole buckets, which are neighbours in the new table too. */
static void move_cells(struct kvbm_registry *r, size_t n)
{
    struct kvbm_old_table *old = &r->old;
    size_t size = (size_t)1 << old->bits, end = n < size - old->at ? old->at + n : size;

    for (; old->at + KVBM_BUCKET <= end; old->at += KVBM_BUCKET) {
        struct kvbm_bucket *bucket = &old->buckets[old->at / KVBM_BUCKET];

        for (uint32_t i = 0; i < KVBM_BUCKET; i++) {
            if (!bucket->entry[i])
                continue;
            if (bucket->entry[i] != KVBM_GONE)
                table_insert(r, bucket->tag[i], bucket->entry[i]);
            bucket->entry[i] = KVBM_GONE;
        }
    }
    if (end == size)
        old->buckets = NULL;
}

/* Return up to @len bytes of the old table's memory, when all cells have moved. */
static void unmap_some(struct kvbm_registry *r, size_t len)
{
    len = KV_MIN(len, r->old.mapped);
    kvbm_unmap(r->old.memory, len);
    r->old.memory += len;
    r->old.mapped -= len;
}

static void finish_old(struct kvbm_registry *r)
{
    if (r->old.buckets)
        move_cells(r, SIZE_MAX);
    unmap_some(r, SIZE_MAX);
}

/* Do a call's share of moving to the larger table, for up to @n new entries. */
static void work_on_old(struct kvbm_registry *r, size_t n)
{
    if (r->old.buckets)
        move_cells(r, 4 * n + 64);
    else
        unmap_some(r, UNMAP_BYTES);
}

/* ---- both tables ---- */

/* Take an entry out of bucket @at that may move up to bucket @gap: its home isn't behind @gap. */
static bool take_passer(struct kvbm_registry *r, uint32_t at, uint32_t gap)
{
    struct kvbm_bucket *bucket = &r->table[at];

    for (uint32_t i = 0; i < KVBM_BUCKET; i++) {
        uint32_t home = kvbm_home(r, bucket->tag[i]);

        if (!bucket->entry[i] || ((at - home) & r->table_mask) < ((at - gap) & r->table_mask))
            continue;
        bucket_put(&r->table[gap], bucket->tag[i], bucket->entry[i]);
        bucket->entry[i] = 0;
        return true;
    }
    return false;
}

/* Close a gap: bucket @gap was full and isn't any more. Move up entries that had passed it, so that
 * no marker of deletion is needed. They are in the following buckets, up to the first one that
 * isn't full. */
static APART void close_gap(struct kvbm_registry *r, uint32_t gap)
{
    bool full = true;

    for (uint32_t at = next_home(r, gap); full; at = next_home(r, at)) {
        full = !kvbm_bucket_empty(&r->table[at]);
        if (take_passer(r, at, gap))
            gap = at;
    }
}

static void table_remove(struct kvbm_registry *r, uint32_t tag, uint32_t entry)
{
    uint32_t at = kvbm_home(r, tag), hits;
    bool full;

    for (;; at = next_home(r, at)) {
        hits = kvbm_bucket_match(r->table[at].entry, entry);
        full = !kvbm_bucket_empty(&r->table[at]);
        if (KV_LIKELY(hits))
            break;
        if (!full) {
            old_remove(r, tag, entry);
            return;
        }
    }
    r->table[at].entry[__builtin_ctz(hits)] = 0;
    if (KV_UNLIKELY(full))
        close_gap(r, at);
}

/* Make a larger table; the old table's cells move later. */
static int table_resize(struct kvbm_registry *r, uint32_t bits)
{
    struct kvbm_bucket *table;
    size_t mapped;

    if (bits > 32) /* the tag has no more bits */
        return -ENOMEM;
    table = kvbm_map(sizeof(*table) << (bits - KVBM_BUCKET_BITS), &mapped);
    if (!table)
        return -ENOMEM;
    finish_old(r); /* the old table is still moving: pools were added, or many entries at once */
    r->old = (struct kvbm_old_table){.buckets = r->table,
                                     .bits = r->table_bits,
                                     .memory = (char *)r->table,
                                     .mapped = r->table_mapped};
    r->table = table;
    r->table_bits = bits;
    r->table_shift = 32 - bits + KVBM_BUCKET_BITS;
    r->table_mask = UINT32_MAX >> r->table_shift;
    r->table_mapped = mapped;
    return 0;
}

/* Bits for a table in which at most 7 of 8 cells are full. */
static uint32_t bits_for(uint64_t n)
{
    uint32_t bits = MIN_TABLE_BITS;

    while (((UINT64_C(1) << bits) - (UINT64_C(1) << bits) / 8) < n)
        bits++;
    return bits;
}

uint64_t kvbm_entries_for(const struct kvbm_registry *r, uint64_t n_blocks)
{
    /* Entry numbers in use stay valid, also after a pool was destroyed. */
    return KV_MAX(2 * (r->n_blocks + n_blocks) + 1, (uint64_t)r->max_entries);
}

/*
 * Grow the table with a pool: room for one entry a block and a third more. Ghosts beyond that make
 * it grow later.
 */
int kvbm_registry_grow(struct kvbm_registry *r, uint64_t n_blocks, struct kvbm_span fresh[2])
{
    uint64_t blocks = r->n_blocks + n_blocks, entries = kvbm_entries_for(r, n_blocks);
    uint32_t bits = bits_for(blocks + blocks / 3);
    size_t mapped = 0;
    uint8_t *memory;

    if (entries >= UINT32_MAX || bits > 32) {
        kv_log_warn("kvbm", "pool not created",
                    "reason=\"more blocks than a registry can number\"");
        return -EINVAL;
    }
    if (bits > r->table_bits) {
        if (table_resize(r, bits) < 0)
            return -ENOMEM;
        fresh[0] = (struct kvbm_span){r->table, r->table_mapped};
    }
    if (kvbm_tokens_grow(r, entries) < 0)
        return -ENOMEM;
    if (entries > r->max_entries) {
        memory = kvbm_map((entries + 1) * r->entry_bytes, &mapped);
        if (!memory)
            return -ENOMEM;
        fresh[1] = (struct kvbm_span){memory, (blocks + 1) * r->entry_bytes};
        if (r->entries)
            memcpy(memory, r->entries, ((size_t)r->n_entries + 1) * r->entry_bytes);
        kvbm_unmap(r->entries, r->entries_mapped);
        r->entries = memory;
        r->entries_mapped = mapped;
        r->max_entries = (uint32_t)entries;
    }
    r->n_blocks = blocks;
    return 0;
}

uint32_t kvbm_find(const struct kvbm_registry *r, uint32_t group, const void *key, uint32_t tag)
{
    struct kvbm_bucket *where;
    uint32_t i = table_find(r, group, key, tag, &where);

    return KV_UNLIKELY(!i && r->old.buckets) ? old_find(r, group, key, tag) : i;
}

/* ---- entries ---- */

int kvbm_reserve(struct kvbm_registry *r, size_t n)
{
    uint64_t full = (uint64_t)r->live_entries + n;
    uint32_t bits = r->table_bits;

    int err;

    if (KV_UNLIKELY(r->old.mapped))
        work_on_old(r, n);
    if (KV_LIKELY(full <= (UINT64_C(7) << bits) / 8))
        return 0;
    err = table_resize(r, KV_MAX(bits_for(full), bits + 1));
    if (err == 0)
        work_on_old(r, n);
    return err;
}

static uint32_t entry_new(struct kvbm_registry *r)
{
    uint32_t i = r->free_entry;

    if (i)
        r->free_entry = kvbm_entry(r, i)->link;
    else
        i = ++r->n_entries;
    return i;
}

uint32_t kvbm_intern(struct kvbm_registry *r, uint32_t group, const void *key, uint32_t tag)
{
    struct kvbm_bucket *where;
    uint32_t i = table_find(r, group, key, tag, &where);
    struct kvbm_entry *e;

    if (KV_UNLIKELY(!i && r->old.buckets))
        i = old_find(r, group, key, tag);
    if (i)
        return i;
    i = entry_new(r);
    bucket_put(where, tag, i);
    r->live_entries++;
    e = kvbm_entry(r, i);
    memset(e, 0, sizeof(*e));
    if (r->key_len == 8)
        memcpy(e->key, key, 8);
    else
        memcpy(e->key, key, r->key_len);
    e->tag = tag;
    e->group = (uint8_t)group;
    return i;
}

static void entry_free(struct kvbm_registry *r, uint32_t i)
{
    struct kvbm_entry *e = kvbm_entry(r, i);

    table_remove(r, e->tag, i);
    r->live_entries--;
    e->link = r->free_entry;
    r->free_entry = i;
}

void kvbm_entry_drop_unnamed(struct kvbm_registry *r, uint32_t i)
{
    if (i && !kvbm_entry(r, i)->n_slots && !kvbm_entry(r, i)->n_children)
        entry_free(r, i);
}

void kvbm_entry_put(struct kvbm_registry *r, uint32_t i)
{
    struct kvbm_entry *e = kvbm_entry(r, i);
    uint32_t parent = e->parent;

    if (--e->n_slots > 0)
        return;
    e->parent = 0; /* a ghost, if it stays for its children: ghosts have no parent, and no tokens */
    e->flags = 0;
    if (!e->n_children)
        entry_free(r, i);
    if (!parent)
        return;
    e = kvbm_entry(r, parent);
    if (--e->n_children == 0 && e->n_slots == 0)
        entry_free(r, parent);
}
