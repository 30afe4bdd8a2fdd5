// SPDX-License-Identifier: Apache-2.0
/*
 * Shadows of an order: what "cost" (policy.h) would keep with other bonuses.
 *
 * Each follows the keys whose mixed bits are below 1 / rate of all, and has room for 1 / rate of the
 * order's blobs: so it has about the order's hit rate (Waldspurger et al., USENIX ATC 2017). A shadow is
 * two lists, of keys used once and again; the older tail leaves, after the bonus.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "advisor/index/policy.h"
#include "base/core/error.h"
#include "base/core/mix.h"

enum {
    SHADOWS = 8,
    RATE = 8,          /* least */
    ROOM = 8192,       /* most keys of a shadow */
    SLOTS = 4 * ROOM,  /* a power of two */
    SAMPLE_LEAST = 64, /* fewer blobs in a shadow say nothing */
    LOOK = 1000        /* references between two choices */
};
#define DECAY 0.99 /* of the hits, at each choice */
#define PREFER 0.004

/* Bonuses, in eighths of the order's blobs. */
static const uint8_t eighths[SHADOWS] = {0, 1, 2, 4, 8, 12, 16, 24};
enum { DEFAULT = 0 };

struct entry {
    uint64_t key;
    uint16_t prev, next; /* NIL: none; next also chains free entries */
    uint32_t stamp;
    uint8_t list;
};
enum { NIL = UINT16_MAX };

struct shadow {
    struct entry entries[ROOM];
    uint16_t slots[SLOTS]; /* NIL: free */
    uint16_t head[2], tail[2], free;
    uint32_t n;
    double hits;
};

struct kva_shadows {
    struct shadow each[SHADOWS];
    uint64_t rate;
    uint32_t looked; /* at that reference */
    unsigned best;
};

static void clear(struct kva_shadows *s)
{
    for (int i = 0; i < SHADOWS; i++) {
        struct shadow *one = &s->each[i];

        memset(one->slots, 0xff, sizeof(one->slots));
        for (unsigned k = 0; k < ROOM; k++)
            one->entries[k].next = (uint16_t)(k + 1 < ROOM ? k + 1 : NIL);
        one->head[0] = one->head[1] = one->tail[0] = one->tail[1] = NIL;
        one->free = 0;
        one->n = 0;
    }
}

int kva_shadows_create(struct kva_shadows **ret)
{
    struct kva_shadows *s = calloc(1, sizeof(*s));

    if (!s)
        return -ENOMEM;
    s->rate = RATE;
    s->best = DEFAULT;
    clear(s);
    *ret = s;
    return 0;
}

void kva_shadows_destroy(struct kva_shadows *shadows)
{
    free(shadows);
}

/* -- one shadow -------------------------------------------------------------------------------- */

static uint32_t home(uint64_t mixed)
{
    return (uint32_t)mixed & (SLOTS - 1);
}

/* Return the slot of @key, or the free one where it would be. */
static uint32_t find(const struct shadow *s, uint64_t key)
{
    uint32_t slot = home(key);

    while (s->slots[slot] != NIL && s->entries[s->slots[slot]].key != key)
        slot = (slot + 1) & (SLOTS - 1);
    return slot;
}

static void clear_slot(struct shadow *s, uint32_t slot)
{
    uint32_t hole = slot, at = slot;

    for (;;) {
        at = (at + 1) & (SLOTS - 1);
        if (s->slots[at] == NIL)
            break;
        if (((at - home(s->entries[s->slots[at]].key)) & (SLOTS - 1)) >=
            ((at - hole) & (SLOTS - 1))) {
            s->slots[hole] = s->slots[at];
            hole = at;
        }
    }
    s->slots[hole] = NIL;
}

static void unlink_entry(struct shadow *s, uint16_t at)
{
    struct entry *e = &s->entries[at];

    *(e->prev == NIL ? &s->head[e->list] : &s->entries[e->prev].next) = e->next;
    *(e->next == NIL ? &s->tail[e->list] : &s->entries[e->next].prev) = e->prev;
}

static void push(struct shadow *s, unsigned list, uint16_t at)
{
    struct entry *e = &s->entries[at];

    e->list = (uint8_t)list;
    e->prev = NIL;
    e->next = s->head[list];
    *(e->next == NIL ? &s->tail[list] : &s->entries[e->next].prev) = at;
    s->head[list] = at;
}

static void evict(struct shadow *s, uint32_t clock, uint32_t bonus)
{
    uint16_t once = s->tail[0], more = s->tail[1], at = once;

    if (once == NIL || (more != NIL && (int64_t)(uint32_t)(clock - s->entries[more].stamp) - bonus >
                                           (int64_t)(uint32_t)(clock - s->entries[once].stamp)))
        at = more;
    unlink_entry(s, at);
    clear_slot(s, find(s, s->entries[at].key));
    s->entries[at].next = s->free;
    s->free = at;
    s->n--;
}

static void use(struct shadow *s, uint64_t key, unsigned list, uint32_t clock, uint32_t bonus,
                uint32_t room)
{
    uint32_t slot = find(s, key);
    uint16_t at = s->slots[slot];

    if (at != NIL) {
        s->hits++;
        unlink_entry(s, at);
    } else {
        while (s->n >= room)
            evict(s, clock, bonus);
        at = s->free;
        s->free = s->entries[at].next;
        s->entries[at].key = key;
        s->slots[find(s, key)] = at;
        s->n++;
    }
    s->entries[at].stamp = clock;
    push(s, list, at);
}

/* -- all --------------------------------------------------------------------------------------- */

static uint32_t bonus_of(unsigned shadow, uint64_t n)
{
    return (uint32_t)KV_MIN(n * eighths[shadow] / 8, (uint64_t)INT32_MAX);
}

static void choose(struct kva_shadows *s, uint32_t clock)
{
    if (clock - s->looked < LOOK)
        return;
    s->looked = clock;
    for (unsigned i = 0; i < SHADOWS; i++)
        if (s->each[i].hits * (1 - PREFER * i) > s->each[s->best].hits * (1 - PREFER * s->best))
            s->best = i;
    for (unsigned i = 0; i < SHADOWS; i++)
        s->each[i].hits *= DECAY;
}

uint32_t kva_shadows_use(struct kva_shadows *s, uint64_t key, bool again, uint32_t clock,
                         uint64_t n)
{
    uint64_t mixed = kv_mix(key);

    while (n / s->rate > ROOM) { /* fewer keys from here on: begin anew */
        s->rate *= 2;
        clear(s);
    }
    if (n / RATE < SAMPLE_LEAST)
        return bonus_of(s->best, n);
    if ((mixed >> 32) % s->rate == 0)
        for (unsigned i = 0; i < SHADOWS; i++)
            use(&s->each[i], mixed, again, clock, bonus_of(i, n),
                (uint32_t)KV_MAX(n / s->rate, (uint64_t)1));
    choose(s, clock);
    return bonus_of(s->best, n);
}
