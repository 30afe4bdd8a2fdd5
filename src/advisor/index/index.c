// SPDX-License-Identifier: Apache-2.0
#include "advisor/index/index.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "advisor/index/impl.h"
#include "base/core/error.h"

enum { HALF_LIFE_S = 3600, HEAT_STEPS = 16, GAP_STEPS = 4, GAP_NONE = 255 };
#define OTHERS (UINT32_C(1) << KVA_TELLERS)

/* -- making one -------------------------------------------------------------------------------- */

static uint64_t limit_of(const struct kva_index *index, unsigned member)
{
    uint64_t bytes = index->opts.limit[member], reserved = index->members[member].reserved;

    if (bytes == UINT64_MAX)
        return UINT64_MAX;
    return bytes > reserved ? (bytes - reserved) / KVA_UNIT : 0;
}

static int make_orders(struct kva_index *index)
{
    for (unsigned m = 0; m < index->opts.n_members; m++) {
        struct kva_order *order = &index->orders[m];

        if (!kva_is_fixed(index, m))
            index->places[index->n_places++] = (uint8_t)m;
        order->index = index;
        order->policy = index->opts.policy;
        order->limit = limit_of(index, m);
        order->hand = KVA_NONE;
        for (int i = 0; i < KVA_LISTS; i++)
            order->lists[i].head = order->lists[i].tail = KVA_NONE;
    }
    return index->n_places ? kva_shadows_create(&index->orders[index->places[0]].shadows) : -EINVAL;
}

int kva_index_create(const struct kva_index_opts *opts, struct kva_index **ret)
{
    struct kva_index *index;
    int rc;

    if (!opts->n_members || opts->n_members > KVA_MEMBERS || !opts->policy)
        return -EINVAL;
    index = calloc(1, sizeof(*index));
    if (!index)
        return -ENOMEM;
    index->opts = *opts;
    for (int i = 0; i <= UINT8_MAX; i++)
        index->heats[i] = (float)exp2((double)i / HEAT_STEPS) - 1;
    if (!index->opts.max_blocks || index->opts.max_blocks > UINT32_C(1) << 31)
        index->opts.max_blocks = UINT32_C(1) << 31;
    if (!index->opts.half_life_s)
        index->opts.half_life_s = HALF_LIFE_S;
    index->free = KVA_NONE;
    rc = make_orders(index);
    if (rc < 0) {
        kva_index_destroy(index);
        return rc;
    }
    *ret = index;
    return 0;
}

void kva_index_destroy(struct kva_index *index)
{
    if (!index)
        return;
    for (unsigned m = 0; m < KVA_MEMBERS; m++)
        kva_shadows_destroy(index->orders[m].shadows);
    for (uint32_t i = 0; i < index->n_pages; i++)
        free(index->pages[i]);
    free(index->pages);
    free(index->slots);
    free(index->seen);
    free(index);
}

/* -- places ------------------------------------------------------------------------------------ */

/* Return the writable member behind @member. */
static unsigned slower(const struct kva_index *index, unsigned member)
{
    for (size_t i = 0; i + 1 < index->n_places; i++)
        if (index->places[i] == member)
            return index->places[i + 1];
    return index->places[index->n_places - 1];
}

void kva_unwant(struct kva_index *index, uint32_t at)
{
    struct kva_block *b = kva_block_at(index, at);

    if (!kva_is_sink(index, b->want))
        kva_list_take(&index->orders[b->want], at);
    index->members[b->want].want--;
    index->members[b->want].want_units -= b->units;
}

static void enter(struct kva_index *index, uint32_t at, unsigned member, enum kva_why why)
{
    struct kva_block *b = kva_block_at(index, at);

    b->want = (uint8_t)member;
    index->members[member].want++;
    index->members[member].want_units += b->units;
    if (!kva_is_sink(index, member))
        index->opts.policy->add(&index->orders[member], at, why);
}

/* Pass on what exceeds the limit of a member. */
static void overflow(struct kva_index *index, unsigned member)
{
    struct kva_order *order = &index->orders[member];

    if (kva_is_sink(index, member))
        return;
    while (order->units > order->limit) {
        uint32_t at = index->opts.policy->victim(order);
        struct kva_block *b = kva_block_at(index, at);

        kva_unwant(index, at);
        order->evictions++;
        if (b->flags & KVA_GHOST)
            b->stamp = order->evictions;
        enter(index, at, slower(index, member), KVA_DEMOTED);
        overflow(index, slower(index, member));
    }
}

void kva_want(struct kva_index *index, uint32_t at, unsigned member, enum kva_why why)
{
    enter(index, at, member, why);
    overflow(index, member);
}

void kva_set_have(struct kva_index *index, uint32_t at, unsigned member, bool has)
{
    struct kva_block *b = kva_block_at(index, at);

    if ((b->have >> member & 1) == has)
        return;
    b->have ^= (uint16_t)(1u << member);
    if (has) {
        index->members[member].have++;
        index->members[member].have_units += b->units;
    } else {
        index->members[member].have--;
        index->members[member].have_units -= b->units;
        if (kva_is_sink(index, member))
            b->flags &= (uint8_t)~KVA_PACKED;
    }
}

/* Give a blob its size, which is believed from members rather than from publishers. */
static void set_units(struct kva_index *index, uint32_t at, uint32_t units)
{
    struct kva_block *b = kva_block_at(index, at);
    struct kva_order *order = &index->orders[b->want];
    uint64_t more = (uint64_t)units - b->units; /* modulo 2^64 where it is less */

    for (unsigned m = 0; m < index->opts.n_members; m++)
        index->members[m].have_units += b->have >> m & 1 ? more : 0;
    index->members[b->want].want_units += more;
    if (!kva_is_sink(index, b->want)) {
        order->units += more;
        order->lists[b->list].units += more;
    }
    index->bytes += more * KVA_UNIT;
    b->units = units;
    overflow(index, b->want);
}

void kva_drop(struct kva_index *index, uint32_t at)
{
    struct kva_block *b = kva_block_at(index, at);

    for (unsigned m = 0; m < index->opts.n_members; m++)
        kva_set_have(index, at, m, false);
    kva_unwant(index, at);
    index->bytes -= (uint64_t)b->units * KVA_UNIT;
    kva_table_drop(index, at);
}

void kva_drop_unless_held(struct kva_index *index, uint32_t at)
{
    const struct kva_block *b = kva_block_at(index, at);

    if (!b->have && !b->told)
        kva_drop(index, at);
}

/* -- uses -------------------------------------------------------------------------------------- */

static double heat_at(const struct kva_index *index, const struct kva_block *b, uint32_t now_s)
{
    double heat = index->heats[b->heat];

    if (heat > 0 && now_s > b->used_s)
        heat *= exp2(-(double)(now_s - b->used_s) / index->opts.half_life_s);
    return heat;
}

static void warm(const struct kva_index *index, struct kva_block *b, uint32_t now_s)
{
    double heat = b->heat ? log2(heat_at(index, b, now_s) + 2) * HEAT_STEPS : HEAT_STEPS;

    b->heat = heat > UINT8_MAX ? UINT8_MAX : (uint8_t)lround(heat);
    b->used_s = KV_MAX(b->used_s, now_s); /* a clock that was set back ages nothing */
}

/* 4 * log2, with a straight line between powers of two. */
static uint8_t gap_of(uint32_t references)
{
    unsigned top = 31u - (unsigned)__builtin_clz(references | 1);

    return (uint8_t)(top * GAP_STEPS + ((uint64_t)references * GAP_STEPS >> top) % GAP_STEPS);
}

/* Take note of a use: everything but the place. */
static void note_use(struct kva_index *index, struct kva_block *b, uint32_t now_s)
{
    index->clock++;
    index->references++;
    b->gap = b->count ? gap_of(index->clock - b->stamp) : GAP_NONE;
    b->count += b->count < UINT8_MAX;
    warm(index, b, now_s);
}

static void learn(struct kva_index *index, const struct kva_block *b)
{
    struct kva_order *order = &index->orders[index->places[0]];
    uint64_t key;

    memcpy(&key, b->key, sizeof(key));
    order->bonus = kva_shadows_use(order->shadows, key, b->count > 1, index->clock, order->n);
}

/* Use a blob that has a place. */
static void use(struct kva_index *index, uint32_t at, uint32_t now_s)
{
    struct kva_block *b = kva_block_at(index, at);
    unsigned first = index->places[0];

    note_use(index, b, now_s);
    index->members[b->want].hits++;
    if (b->want != first) {
        kva_unwant(index, at);
        enter(index, at, first, KVA_USED);
    } else if (!kva_is_sink(index, first)) {
        index->opts.policy->use(&index->orders[first], at);
    }
    b->stamp = index->clock;
    learn(index, b);
    overflow(index, first);
}

/* Make a blob, used now. */
static int add_used(struct kva_index *index, const struct kva_told *told, uint32_t *ret)
{
    struct kva_block *b;
    int rc = kva_table_add(index, told->key, ret);

    if (rc < 0)
        return rc;
    b = kva_block_at(index, *ret);
    b->units = kva_units(told->bytes);
    b->flags = KVA_NEW;
    b->gap = GAP_NONE;
    index->bytes += (uint64_t)b->units * KVA_UNIT;
    note_use(index, b, told->now_s);
    enter(index, *ret, index->places[0], KVA_USED);
    b->stamp = index->clock;
    learn(index, b);
    return 0;
}

/* -- events ------------------------------------------------------------------------------------ */

static uint32_t bit_of(uint8_t teller)
{
    return UINT32_C(1) << KV_MIN(teller, (uint8_t)KVA_TELLERS);
}

int kva_index_tell(struct kva_index *index, const struct kva_told *told)
{
    uint32_t at = kva_table_find(index, told->key), bit = bit_of(told->teller);
    bool again = false, fresh = at == KVA_NONE;
    struct kva_block *b;
    int rc = fresh ? add_used(index, told, &at) : 0;

    if (rc < 0)
        return rc;
    b = kva_block_at(index, at);
    again = b->told & bit;
    b->told |= bit;
    b->flags &= (uint8_t)~KVA_LEFT;
    if (told->parent)
        b->parent = kva_table_find(index, told->parent);
    if (told->chain)
        b->chain = told->chain;
    if (!fresh && !again && !told->known)
        use(index, at, told->now_s);
    if (fresh)
        overflow(index, index->places[0]);
    return fresh || (!again && !told->known);
}

int kva_index_use(struct kva_index *index, const uint8_t *key, uint32_t now_s)
{
    uint32_t at = kva_table_find(index, key);

    if (at == KVA_NONE)
        return 0;
    use(index, at, now_s);
    return 1;
}

void kva_index_untell(struct kva_index *index, const uint8_t *key, uint8_t teller, uint32_t now_s)
{
    uint32_t at = kva_table_find(index, key), bit = bit_of(teller);
    struct kva_block *b;

    /* several publishers share the last bit: none of them can take it back */
    if (at == KVA_NONE || bit == OTHERS || !(kva_block_at(index, at)->told & bit))
        return;
    b = kva_block_at(index, at);
    b->told &= ~bit;
    if (!b->told) {
        b->flags |= KVA_LEFT;
        b->used_s = KV_MAX(b->used_s, now_s);
    }
    kva_drop_unless_held(index, at);
}

void kva_index_forget(struct kva_index *index, uint8_t teller)
{
    uint32_t bit = bit_of(teller);

    for (uint32_t at = 0; at < index->n_records; at++) {
        struct kva_block *b = kva_block_at(index, at);

        if (!b->units || !(b->told & bit))
            continue;
        b->told &= ~bit;
        kva_drop_unless_held(index, at);
    }
}

/* -- listings ---------------------------------------------------------------------------------- */

static int add_found(struct kva_index *index, unsigned member, const uint8_t *key, uint64_t bytes,
                     uint32_t *ret)
{
    struct kva_block *b;
    int rc = kva_table_add(index, key, ret);

    if (rc < 0)
        return rc;
    b = kva_block_at(index, *ret);
    b->units = kva_units(bytes);
    b->flags = KVA_NEW;
    b->gap = GAP_NONE;
    b->stamp = index->clock;
    index->bytes += (uint64_t)b->units * KVA_UNIT;
    enter(index, *ret, kva_is_fixed(index, member) ? index->places[index->n_places - 1] : member,
          KVA_COLD);
    return 0;
}

/* Note that a member has a blob, and return the blob's record; KVA_NONE with 0: forgotten meanwhile. */
static int note_found(struct kva_index *index, unsigned member, const uint8_t *key, uint64_t bytes,
                      uint32_t *ret)
{
    uint32_t at = *ret = kva_table_find(index, key);
    int rc = 0;

    if (at == KVA_NONE && bytes == UINT64_MAX)
        return 0; /* forgotten meanwhile */
    if (at == KVA_NONE)
        rc = add_found(index, member, key, bytes, &at);
    else if (bytes != UINT64_MAX)
        set_units(index, at, kva_units(bytes));
    if (rc < 0)
        return rc;
    kva_set_have(index, at, member, true);
    if (index->seen && at < index->n_seen)
        index->seen[at] |= (uint16_t)(1u << member);
    *ret = at;
    return 0;
}

int kva_index_found(struct kva_index *index, unsigned member, const uint8_t *key, uint64_t bytes,
                    uint32_t used_s)
{
    struct kva_block *b;
    uint32_t at;
    int rc = note_found(index, member, key, bytes, &at);

    if (rc < 0 || at == KVA_NONE)
        return rc;
    b = kva_block_at(index, at);
    b->used_s = KV_MAX(b->used_s, used_s);
    if (kva_is_sink(index, member))
        b->flags &= (uint8_t)~KVA_PACKED;
    overflow(index, b->want);
    return 0;
}

/* True when the member is known to have the blob by itself, too: by this scan's listing, if one is under way. */
static bool has_single(const struct kva_index *index, uint32_t at, unsigned member)
{
    const struct kva_block *b = kva_block_at(index, at);

    if (index->seen && at < index->n_seen)
        return index->seen[at] >> member & 1 && !(b->flags & KVA_PACKED);
    return b->have >> member & 1 && !(b->flags & KVA_PACKED);
}

int kva_index_found_packed(struct kva_index *index, unsigned member, const uint8_t *key,
                           uint64_t bytes)
{
    uint32_t at = kva_table_find(index, key);
    bool single = at != KVA_NONE && has_single(index, at, member);
    int rc = note_found(index, member, key, bytes, &at);

    if (rc < 0 || at == KVA_NONE)
        return rc;
    if (kva_is_sink(index, member) && !single)
        kva_block_at(index, at)->flags |= KVA_PACKED;
    overflow(index, kva_block_at(index, at)->want);
    return 0;
}

void kva_index_packed(struct kva_index *index, unsigned member, const uint8_t *key)
{
    uint32_t at = kva_table_find(index, key);

    if (at != KVA_NONE && kva_is_sink(index, member) && kva_block_at(index, at)->have >> member & 1)
        kva_block_at(index, at)->flags |= KVA_PACKED;
}

void kva_index_gone(struct kva_index *index, unsigned member, const uint8_t *key)
{
    uint32_t at = kva_table_find(index, key);

    if (at == KVA_NONE)
        return;
    kva_set_have(index, at, member, false);
    if (index->seen && at < index->n_seen)
        index->seen[at] &= (uint16_t) ~(1u << member);
    kva_drop_unless_held(index, at);
}

void kva_index_reserve(struct kva_index *index, unsigned member, uint64_t bytes)
{
    index->members[member].reserved = bytes;
    index->orders[member].limit = limit_of(index, member);
    overflow(index, member);
}

/* -- questions --------------------------------------------------------------------------------- */

const struct kva_block *kva_index_find(const struct kva_index *index, const uint8_t *key)
{
    uint32_t at = kva_table_find(index, key);

    return at == KVA_NONE ? NULL : kva_block_at(index, at);
}

void kva_index_linger(struct kva_index *index, const uint8_t *key, bool on)
{
    uint32_t at = kva_table_find(index, key);

    if (at != KVA_NONE && on)
        kva_block_at(index, at)->flags |= KVA_LINGER;
    else if (at != KVA_NONE)
        kva_block_at(index, at)->flags &= (uint8_t)~KVA_LINGER;
}

double kva_heat(const struct kva_index *index, const struct kva_block *block, uint32_t now_s)
{
    return heat_at(index, block, now_s);
}

const struct kva_block *kva_parent(const struct kva_index *index, const struct kva_block *block)
{
    const struct kva_block *parent;

    if (block->parent >= index->n_records) /* KVA_NONE, too */
        return NULL;
    parent = kva_block_at(index, block->parent);
    return parent->units && parent != block && parent->chain == block->chain ? parent : NULL;
}
