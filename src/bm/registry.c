// SPDX-License-Identifier: Apache-2.0
#include "registry.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/random.h>

#include "base/error.h"
#include "base/log.h"
#include "events.h"
#include "memory.h"

#define MIN_TABLE_BITS 10

int kvbm_registry_create(const struct kvbm_registry_opts *opts, struct kvbm_registry **ret)
{
    uint32_t key_len = KV_OPT(opts, key_len, 8);
    struct kvbm_registry *r;
    pthread_mutexattr_t attr;

    if (!ret || key_len < 4 || key_len > KVBM_MAX_KEY)
        return -EINVAL;
    r = calloc(1, sizeof(*r));
    if (!r)
        return -ENOMEM;
    r->key_len = key_len;
    r->entry_bytes = (uint32_t)(sizeof(struct kvbm_entry) + (key_len + 3) / 4 * 4);
    r->entry_bytes = KV_MAX(r->entry_bytes, (uint32_t)KVBM_LINE);
    r->events = KV_OPT(opts, events, NULL);
    if (getrandom(&r->seed, sizeof(r->seed), GRND_NONBLOCK) < 0)
        r->seed = (uint64_t)(uintptr_t)r;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_settype(&attr, PTHREAD_MUTEX_ADAPTIVE_NP); /* held for a microsecond */
    pthread_mutex_init(&r->lock, &attr);
    pthread_mutexattr_destroy(&attr);
    if (r->events)
        kvbm_events_use(r->events, true);
    *ret = r;
    return 0;
}

void kvbm_publish(struct kvbm_registry *r, const struct kvbm_event *event)
{
    if (!r->publishing)
        kvbm_events_begin(r->events);
    r->publishing = true;
    kvbm_events_put(r->events, event);
}

void kvbm_unlock(struct kvbm_registry *r)
{
    uint32_t dead = r->dead;

    if (r->publishing)
        kvbm_events_end(r->events);
    r->publishing = false;
    r->dead = 0;
    if (KV_UNLIKELY(dead))
        kvbm_destroy_dead(r, dead); /* lets the lock go in between */
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
    pthread_mutex_destroy(&r->lock);
    kvbm_unmap(r->entries, r->entries_mapped);
    kvbm_unmap(r->table, r->table_mapped);
    free(r->attachments);
    if (r->events)
        kvbm_events_use(r->events, false);
    free(r);
    return 0;
}

/* ---- the table ---- */

/* The cell that names a key, or the empty one where it is to be named. */
static inline __attribute__((always_inline)) struct kvbm_cell *
table_find(const struct kvbm_registry *r, uint32_t group, const void *key, uint32_t tag)
{
    uint32_t at = kvbm_home(r, tag);

    for (; r->table[at].entry; at = (at + 1) & r->table_mask) {
        if (r->table[at].tag == tag && kvbm_is_key(r, r->table[at].entry, group, key))
            break;
    }
    return &r->table[at];
}

static void table_insert(struct kvbm_registry *r, uint32_t tag, uint32_t entry)
{
    uint32_t at = kvbm_home(r, tag);

    while (r->table[at].entry)
        at = (at + 1) & r->table_mask;
    r->table[at] = (struct kvbm_cell){tag, entry};
}

/* Close the gap: whatever probed past it moves up, so that no marker of deletion is needed. */
static void table_remove(struct kvbm_registry *r, uint32_t tag, uint32_t entry)
{
    uint32_t gap = kvbm_home(r, tag), at;

    while (r->table[gap].entry != entry)
        gap = (gap + 1) & r->table_mask;
    for (at = (gap + 1) & r->table_mask; r->table[at].entry; at = (at + 1) & r->table_mask) {
        uint32_t home = kvbm_home(r, r->table[at].tag);

        if (((at - home) & r->table_mask) < ((at - gap) & r->table_mask))
            continue; /* its home lies behind the gap */
        r->table[gap] = r->table[at];
        gap = at;
    }
    r->table[gap].entry = 0;
}

static int table_resize(struct kvbm_registry *r, uint32_t bits)
{
    size_t n = (size_t)1 << bits, old_n = r->table ? (size_t)1 << r->table_bits : 0;
    struct kvbm_cell *old = r->table, *table;
    size_t old_mapped = r->table_mapped;

    if (bits > 32) /* the tag has no more */
        return -ENOMEM;
    table = kvbm_map(n * sizeof(*table), &r->table_mapped);
    if (!table)
        return -ENOMEM;
    r->table = table;
    r->table_bits = bits;
    r->table_mask = (uint32_t)(n - 1);
    r->table_shift = 32 - bits;
    for (size_t i = 0; i < old_n; i++) {
        if (old[i].entry)
            table_insert(r, old[i].tag, old[i].entry);
    }
    kvbm_unmap(old, old_mapped);
    return 0;
}

/* At most 7 of 8 cells are full. */
static uint32_t bits_for(uint64_t n)
{
    uint32_t bits = MIN_TABLE_BITS;

    while (((UINT64_C(1) << bits) - (UINT64_C(1) << bits) / 8) < n)
        bits++;
    return bits;
}

uint64_t kvbm_entries_for(const struct kvbm_registry *r, uint64_t n_blocks)
{
    /* Numbers that were given out once stay in use, also when a pool has gone. */
    return KV_MAX(2 * (r->n_blocks + n_blocks) + 1, (uint64_t)r->max_entries);
}

/*
 * The table starts with room for one entry a block and a third more; ghosts beyond that make it grow
 * when they come.
 */
int kvbm_registry_grow(struct kvbm_registry *r, uint64_t n_blocks)
{
    uint64_t blocks = r->n_blocks + n_blocks, entries = kvbm_entries_for(r, n_blocks);
    uint32_t bits = bits_for(blocks + blocks / 3);
    size_t mapped = 0;
    uint8_t *memory;

    if (entries >= UINT32_MAX || bits > 32)
        return -EINVAL;
    if (bits > r->table_bits && table_resize(r, bits) < 0)
        return -ENOMEM;
    if (entries > r->max_entries) {
        memory = kvbm_map((entries + 1) * r->entry_bytes, &mapped);
        if (!memory)
            return -ENOMEM;
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
    return table_find(r, group, key, tag)->entry;
}

/* ---- entries ---- */

int kvbm_reserve(struct kvbm_registry *r, size_t n)
{
    uint64_t full = (uint64_t)r->live_entries + n;
    uint32_t bits = r->table_bits;

    if (KV_LIKELY(full <= (UINT64_C(7) << bits) / 8))
        return 0;
    return table_resize(r, KV_MAX(bits_for(full), bits + 1));
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
    struct kvbm_cell *cell = table_find(r, group, key, tag);
    struct kvbm_entry *e;

    if (cell->entry)
        return cell->entry;
    *cell = (struct kvbm_cell){tag, entry_new(r)};
    r->live_entries++;
    e = kvbm_entry(r, cell->entry);
    memset(e, 0, sizeof(*e));
    if (r->key_len == 8)
        memcpy(e->key, key, 8);
    else
        memcpy(e->key, key, r->key_len);
    e->tag = tag;
    e->group = (uint8_t)group;
    return cell->entry;
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
    e->parent = 0; /* a ghost, if it stays: it is its children's, and has no parent */
    if (!e->n_children)
        entry_free(r, i);
    if (!parent)
        return;
    e = kvbm_entry(r, parent);
    if (--e->n_children == 0 && e->n_slots == 0)
        entry_free(r, parent);
}
