// SPDX-License-Identifier: Apache-2.0
#include "bm/events/chains.h"

#include <stdlib.h>

#include "base/core/error.h"
#include "base/core/xxh.h"

#define FIRST_BITS 10

uint64_t kvbm_chain_id(uint32_t group, const void *key, uint32_t len)
{
    uint64_t id = kv_xxh64(key, len, group);

    return id ? id : 1;
}

static size_t mask_of(const struct kvbm_chains *chains)
{
    return ((size_t)1 << chains->bits) - 1;
}

/* Return the slot of @id, or the empty one where it would go. */
static size_t slot_of(const struct kvbm_chains *chains, uint64_t id)
{
    size_t mask = mask_of(chains), i = id & mask;

    while (chains->slots[i].id && chains->slots[i].id != id)
        i = (i + 1) & mask;
    return i;
}

const struct kvbm_chain_of *kvbm_chains_find(const struct kvbm_chains *chains, uint64_t id)
{
    const struct kvbm_chain_of *slot;

    if (!chains->slots)
        return NULL;
    slot = &chains->slots[slot_of(chains, id)];
    return slot->id ? slot : NULL;
}

static bool grow(struct kvbm_chains *chains)
{
    struct kvbm_chains larger = {.bits = chains->slots ? chains->bits + 1 : FIRST_BITS};

    larger.slots = calloc((size_t)1 << larger.bits, sizeof(*larger.slots));
    if (!larger.slots)
        return false;
    for (size_t i = 0; chains->slots && i <= mask_of(chains); i++) {
        if (chains->slots[i].id)
            larger.slots[slot_of(&larger, chains->slots[i].id)] = chains->slots[i];
    }
    free(chains->slots);
    chains->slots = larger.slots;
    chains->bits = larger.bits;
    return true;
}

struct kvbm_chain_of *kvbm_chains_enter(struct kvbm_chains *chains, uint64_t id)
{
    struct kvbm_chain_of *slot = chains->slots ? &chains->slots[slot_of(chains, id)] : NULL;

    if (slot && slot->id) {
        slot->seen = chains->sweep;
        return slot;
    }
    if (chains->n >= chains->max)
        return NULL;
    if (!slot || (chains->n + 1) * 4 > (mask_of(chains) + 1) * 3) {
        if (!grow(chains))
            return NULL;
        slot = &chains->slots[slot_of(chains, id)];
    }
    slot->id = id;
    slot->seen = chains->sweep;
    chains->n++;
    return slot;
}

bool kvbm_chains_take(struct kvbm_chains *chains, uint64_t id, struct kvbm_chain_of *ret)
{
    size_t mask, gap, i;

    if (!chains->slots)
        return false;
    mask = mask_of(chains);
    gap = slot_of(chains, id);
    if (!chains->slots[gap].id)
        return false;
    *ret = chains->slots[gap];
    chains->n--;
    for (i = (gap + 1) & mask; chains->slots[i].id; i = (i + 1) & mask) {
        size_t home = chains->slots[i].id & mask;

        /* an entry may move to the gap unless its home lies behind the gap */
        if (((i - home) & mask) < ((i - gap) & mask))
            continue;
        chains->slots[gap] = chains->slots[i];
        gap = i;
    }
    chains->slots[gap] = (struct kvbm_chain_of){0};
    return true;
}

void kvbm_chains_begin_sweep(struct kvbm_chains *chains)
{
    chains->sweep++;
}

void kvbm_chains_see(struct kvbm_chains *chains, uint64_t id)
{
    struct kvbm_chain_of *slot = chains->slots ? &chains->slots[slot_of(chains, id)] : NULL;

    if (slot && slot->id)
        slot->seen = chains->sweep;
}

void kvbm_chains_sweep(struct kvbm_chains *chains, size_t *at, size_t n)
{
    size_t end = chains->slots ? KV_MIN(*at + n, mask_of(chains) + 1) : 0, i = *at;
    struct kvbm_chain_of gone;

    while (i < end) {
        const struct kvbm_chain_of *slot = &chains->slots[i];

        /* a removal fills its slot from behind: look at it again */
        if (!slot->id || slot->seen == chains->sweep || !kvbm_chains_take(chains, slot->id, &gone))
            i++;
    }
    *at = chains->slots && i <= mask_of(chains) ? i : 0;
}

void kvbm_chains_clear(struct kvbm_chains *chains)
{
    free(chains->slots);
    *chains = (struct kvbm_chains){.max = chains->max};
}

void kvbm_chains_fini(struct kvbm_chains *chains)
{
    free(chains->slots);
    *chains = (struct kvbm_chains){0};
}
