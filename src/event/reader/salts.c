// SPDX-License-Identifier: Apache-2.0
#include "event/reader/salts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/mix.h"
#include "event/wire/unique.h"

#define MIN_CAPACITY 64
#define MIN_SWEEP ((size_t)32768) /* new blocks between sweeps, while there is room */
/*
 * Slots that a slice of a sweep visits: a millisecond or two, and for each new block so many that a
 * sweep of a crowded table ends before the table is full.
 */
#define SLICE ((size_t)8192)
#define SLOTS_PER_BLOCK ((size_t)32)

void kve_salts_init(struct kve_salts *salts, size_t limit)
{
    *salts = (struct kve_salts){.limit = limit, .secret = kv_secret(), .rank_secret = kv_secret()};
}

void kve_salts_fini(struct kve_salts *salts)
{
    free(salts->slots);
    salts->slots = NULL;
    salts->n = salts->n_ranks = salts->used = salts->capacity = 0;
    salts->generation = 0;
    salts->cleared = salts->sweeping = false;
    salts->n_new = salts->n_kept = 0;
}

static size_t home(const struct kve_salts *salts, uint32_t rank, uint64_t hash)
{
    return kve_slot_of(hash * salts->secret + rank * salts->rank_secret, salts->capacity);
}

static size_t after(const struct kve_salts *salts, size_t i)
{
    return (i + 1) & (salts->capacity - 1);
}

/*
 * Return true for a rank slot. It has the rank in place of the hash, and the number of blocks in
 * place of the salt.
 */
static bool is_rank_slot(const struct kve_salt_entry *entry)
{
    return entry->state == KVE_SALT_RANK;
}

/* Return the slot of a key, stale or not, or the free slot that ends the search. */
static struct kve_salt_entry *slot_of(const struct kve_salts *salts, bool is_rank, uint32_t rank,
                                      uint64_t hash)
{
    size_t i = home(salts, rank, hash);

    for (; salts->slots[i].state; i = after(salts, i)) {
        struct kve_salt_entry *entry = &salts->slots[i];

        if (entry->hash == hash && entry->rank == rank && is_rank_slot(entry) == is_rank)
            return entry;
    }
    return &salts->slots[i];
}

static struct kve_salt_entry *rank_slot_of(const struct kve_salts *salts, uint32_t rank)
{
    return slot_of(salts, true, 0, rank);
}

/* Find the slot of a rank. NULL: the rank has no blocks. */
static struct kve_salt_entry *find_rank(const struct kve_salts *salts, uint32_t rank)
{
    struct kve_salt_entry *slot = salts->n ? rank_slot_of(salts, rank) : NULL;

    return slot && slot->state ? slot : NULL;
}

struct kve_salt_entry *kve_salts_find(const struct kve_salts *salts, uint32_t rank, uint64_t hash)
{
    const struct kve_salt_entry *of_rank = find_rank(salts, rank);
    struct kve_salt_entry *entry;

    if (!of_rank)
        return NULL;
    entry = slot_of(salts, false, rank, hash);
    return entry->state && entry->generation == of_rank->generation ? entry : NULL;
}

static bool is_live(const struct kve_salts *salts, const struct kve_salt_entry *entry)
{
    const struct kve_salt_entry *of_rank;

    if (is_rank_slot(entry))
        return entry->salt > 0;
    of_rank = find_rank(salts, entry->rank);
    return of_rank && of_rank->generation == entry->generation;
}

/* Copy all live slots of @old, with one generation for all, into the table's empty slots. */
static void copy_live(struct kve_salts *salts, const struct kve_salts *old)
{
    salts->used = 0;
    salts->generation = 0;
    salts->cleared = false;
    salts->moves += old->capacity;
    for (size_t i = 0; i < old->capacity; i++) {
        const struct kve_salt_entry *entry = &old->slots[i];
        struct kve_salt_entry *slot;

        if (!entry->state || !is_live(old, entry))
            continue;
        slot = slot_of(salts, is_rank_slot(entry), entry->rank, entry->hash);
        *slot = *entry;
        slot->generation = 0;
        salts->used++;
    }
}

/* Build the table anew without stale slots. */
static int rebuild(struct kve_salts *salts, size_t capacity)
{
    struct kve_salts old = *salts;

    salts->slots = calloc(capacity, sizeof(*salts->slots));
    if (!salts->slots) {
        *salts = old;
        return -ENOMEM;
    }
    salts->capacity = capacity;
    salts->n_swept = 0;
    copy_live(salts, &old);
    free(old.slots);
    return 0;
}

/*
 * The blocks may bring a rank slot. Counting the coming slots, a new table is at most 5/8 full: an
 * eighth of its slots away from the next rebuild.
 */
int kve_salts_reserve(struct kve_salts *salts, size_t n)
{
    size_t capacity = MIN_CAPACITY;

    if (n > salts->limit - salts->n) {
        salts->n_new += n;
        return -ENOSPC;
    }
    if (salts->cleared && salts->generation < UINT16_MAX) {
        salts->generation++;
        salts->cleared = false;
    }
    if (!salts->cleared && (salts->used + n + 1) * 4 <= salts->capacity * 3)
        return 0;
    while ((salts->n + salts->n_ranks + n + 1) * 8 > capacity * 5)
        capacity *= 2;
    return rebuild(salts, capacity);
}

void kve_salts_put(struct kve_salts *salts, uint32_t rank, uint64_t hash, uint64_t salt,
                   enum kv_tier tier)
{
    struct kve_salt_entry *of_rank = rank_slot_of(salts, rank), *entry;
    uint16_t generation;

    if (!of_rank->state) {
        *of_rank = (struct kve_salt_entry){
            .hash = rank, .state = KVE_SALT_RANK, .generation = salts->generation};
        salts->n_ranks++;
        salts->used++;
    }
    of_rank->lower |= tier != KV_TIER_DEVICE;
    generation = of_rank->generation;
    entry = slot_of(salts, false, rank, hash);
    if (!entry->state || entry->generation != generation) {
        salts->used += !entry->state;
        *entry = (struct kve_salt_entry){.hash = hash,
                                         .salt = salt,
                                         .rank = rank,
                                         .state = KVE_SALT_BLOCK,
                                         .generation = generation};
        salts->n++;
        salts->n_new++;
        of_rank->salt++;
    }
    if (entry->copies[tier] < UINT8_MAX)
        entry->copies[tier]++;
    entry->ambiguous |= entry->salt != salt;
}

int kve_salts_restore(struct kve_salts *salts, const struct kve_salt_entry *told)
{
    int rc = kve_salts_reserve(salts, 1);
    struct kve_salt_entry *entry;

    if (rc)
        return rc;
    kve_salts_put(salts, told->rank, told->hash, told->salt, KV_TIER_DEVICE);
    entry = kve_salts_find(salts, told->rank, told->hash);
    if (!entry) /* impossible: the block was put */
        return -ENOENT;
    memcpy(entry->copies, told->copies, sizeof(entry->copies));
    entry->ambiguous |= told->ambiguous;
    rank_slot_of(salts, told->rank)->lower |= told->lower;
    return 0;
}

bool kve_salts_saw_lower(const struct kve_salts *salts, uint32_t rank)
{
    const struct kve_salt_entry *of_rank = find_rank(salts, rank);

    return of_rank && of_rank->lower;
}

/*
 * Free a slot. Move up each entry behind it, up to the next free slot, whose home isn't between the
 * hole and itself.
 */
static void free_slot(struct kve_salts *salts, const struct kve_salt_entry *slot)
{
    size_t mask = salts->capacity - 1, hole = (size_t)(slot - salts->slots);

    for (size_t i = after(salts, hole); salts->slots[i].state; i = after(salts, i)) {
        size_t wanted = home(salts, salts->slots[i].rank, salts->slots[i].hash);

        if (((i - wanted) & mask) >= ((i - hole) & mask)) {
            salts->slots[hole] = salts->slots[i];
            hole = i;
        }
    }
    salts->slots[hole].state = 0;
    salts->used--;
}

/* Stale slots without a live rank slot stay stale for ever. */
static void free_rank_slot(struct kve_salts *salts, const struct kve_salt_entry *of_rank)
{
    free_slot(salts, of_rank);
    salts->n_ranks--;
    if (!salts->n)
        kve_salts_fini(salts);
}

/* Forget a block, and its rank with the last one. */
static void forget(struct kve_salts *salts, const struct kve_salt_entry *entry)
{
    uint32_t rank = entry->rank;
    struct kve_salt_entry *of_rank;

    free_slot(salts, entry);
    of_rank = rank_slot_of(salts, rank); /* the slot may have moved */
    salts->n--;
    if (--of_rank->salt == 0)
        free_rank_slot(salts, of_rank);
}

void kve_salts_remove(struct kve_salts *salts, uint32_t rank, uint64_t hash, enum kv_tier tier)
{
    struct kve_salt_entry *entry = kve_salts_find(salts, rank, hash);

    if (!entry)
        return;
    if (entry->copies[tier] && entry->copies[tier] < UINT8_MAX)
        entry->copies[tier]--;
    for (int t = 0; t < KV_N_TIERS; t++) {
        if (entry->copies[t])
            return;
    }
    forget(salts, entry);
}

void kve_salts_clear(struct kve_salts *salts, uint32_t rank, bool all_tiers)
{
    const struct kve_salt_entry *of_rank = find_rank(salts, rank);

    if (!of_rank || (of_rank->lower && !all_tiers))
        return;
    salts->n -= of_rank->salt;
    salts->cleared = true;
    free_rank_slot(salts, of_rank);
}

void kve_salts_reset(struct kve_salts *salts)
{
    kve_salts_fini(salts);
}

/* -- sweeps ------------------------------------------------------------------------------------ */

bool kve_salts_are_crowded(const struct kve_salts *salts)
{
    return salts->n >= salts->limit - salts->limit / 8;
}

bool kve_salts_want_sweep(const struct kve_salts *salts)
{
    return salts->sweeping ||
           (salts->n &&
            salts->n_new >= (kve_salts_are_crowded(salts) ? salts->limit / 8 + 1
                                                          : KV_MAX(salts->n_kept, MIN_SWEEP)));
}

/* Begin to count anew, and to sweep if there may be something to find. */
static void begin_sweep(struct kve_salts *salts, uint64_t n_held)
{
    salts->n_kept = salts->n;
    salts->n_new = salts->n_paid = 0;
    salts->n_swept = 0;
    salts->sweeping = salts->n && (salts->n > n_held || kve_salts_are_crowded(salts));
}

/* Visit a slot. Returns true when another entry may be in it now. */
static bool visit(struct kve_salts *salts, size_t i, kve_salts_held_fn held, void *arg)
{
    const struct kve_salt_entry *entry = &salts->slots[i];

    if (entry->state != KVE_SALT_BLOCK)
        return false;
    if (!is_live(salts, entry))
        free_slot(salts, entry);
    else if (held(arg, entry->rank, entry->hash))
        return false;
    else
        forget(salts, entry);
    return true;
}

/*
 * Upwards, as an entry moves down into a slot that becomes free: it is visited there. One that moves
 * over the place of the sweep, into the slot of a rank or between two slices, waits for the next sweep.
 */
void kve_salts_sweep(struct kve_salts *salts, uint64_t n_held, kve_salts_held_fn held, void *arg)
{
    size_t visits;

    if (!salts->sweeping)
        begin_sweep(salts, n_held);
    visits = SLICE + SLOTS_PER_BLOCK * (salts->n_new - salts->n_paid);
    salts->n_paid = salts->n_new;
    while (salts->sweeping && visits--) {
        if (visit(salts, salts->n_swept, held, arg))
            continue;
        if (++salts->n_swept == salts->capacity) {
            salts->sweeping = false;
            salts->n_kept = salts->n;
            salts->n_new = 0;
        }
    }
}
