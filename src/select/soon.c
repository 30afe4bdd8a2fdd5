// SPDX-License-Identifier: Apache-2.0
/* Predictions. All last equally long, so the list by time is the list by age. */
#include "select/impl.h"

#define COVERED_MAX 32 /* predictions of a slot that one choice looks at */

struct kvsel_chain *kvsel_chain_make(const uint64_t *hashes, size_t n)
{
    struct kvsel_chain *chain = malloc(sizeof(*chain) + n * sizeof(uint64_t));

    if (!chain)
        return NULL;
    chain->refs = 1;
    chain->n = (uint32_t)n;
    if (n)
        memcpy(chain->hashes, hashes, n * sizeof(uint64_t));
    return chain;
}

void kvsel_chain_drop(struct kvsel_chain *chain)
{
    if (chain && --chain->refs == 0)
        free(chain);
}

int kvsel_soon_add(struct kvsel *s, uint32_t slot, struct kvsel_chain *chain, uint64_t until_ns,
                   struct kvsel_soon **owner)
{
    struct kvsel_slot *at = &s->slots[slot];
    struct kvsel_soon *soon = malloc(sizeof(*soon));

    if (!soon)
        return -ENOMEM;
    *soon = (struct kvsel_soon){.chain = chain,
                                .owner = owner,
                                .older = s->soon_newest,
                                .slot_older = at->soon_newest,
                                .until_ns = until_ns,
                                .slot = slot};
    chain->refs++;
    *owner = soon;
    if (s->soon_newest)
        s->soon_newest->newer = soon;
    else
        s->soon_oldest = soon;
    s->soon_newest = soon;
    if (at->soon_newest)
        at->soon_newest->slot_newer = soon;
    at->soon_newest = soon;
    kvsel_claims_add(&s->claims, KVSEL_SOON, slot, chain->hashes, chain->n);
    s->stats.predictions++;
    return 0;
}

void kvsel_soon_end(struct kvsel *s, struct kvsel_soon *soon)
{
    if (!soon)
        return;
    kvsel_claims_take(&s->claims, KVSEL_SOON, soon->slot, soon->chain->hashes, soon->chain->n);
    if (soon->older)
        soon->older->newer = soon->newer;
    else
        s->soon_oldest = soon->newer;
    if (soon->newer)
        soon->newer->older = soon->older;
    else
        s->soon_newest = soon->older;
    if (soon->slot_older)
        soon->slot_older->slot_newer = soon->slot_newer;
    if (soon->slot_newer)
        soon->slot_newer->slot_older = soon->slot_older;
    else
        s->slots[soon->slot].soon_newest = soon->slot_older;
    if (soon->owner)
        *soon->owner = NULL;
    kvsel_chain_drop(soon->chain);
    free(soon);
    s->stats.predictions--;
}

void kvsel_soon_end_slot(struct kvsel *s, uint32_t slot)
{
    while (s->slots[slot].soon_newest)
        kvsel_soon_end(s, s->slots[slot].soon_newest);
}

void kvsel_soon_expire(struct kvsel *s, uint64_t now_ns)
{
    while (s->soon_oldest && s->soon_oldest->until_ns <= now_ns) {
        kvsel_soon_end(s, s->soon_oldest);
        s->stats.outlived++;
    }
}

void kvsel_soon_covered(struct kvsel *s, uint32_t slot, size_t n)
{
    struct kvsel_soon *soon = s->slots[slot].soon_newest, *older;

    for (int i = 0; soon && i < COVERED_MAX; i++, soon = older) {
        size_t len = soon->chain->n;

        older = soon->slot_older;
        if (len > n || soon->chain->hashes[len - 1] != s->strided[len - 1])
            continue;
        kvsel_soon_end(s, soon);
        s->stats.announced++;
    }
}

size_t kvsel_announced(struct kvsel *s, struct kv_holder holder, uint64_t hash)
{
    uint32_t slot = kvsel_slot_find(s, holder);
    uint32_t depth = slot == KVSEL_NO_SLOT ? 0 : kvsel_claims_depth(&s->claims, slot, hash);
    struct kvsel_soon *older;
    size_t ended = 0;

    if (!depth)
        return 0;
    for (struct kvsel_soon *soon = s->slots[slot].soon_newest; soon; soon = older) {
        older = soon->slot_older;
        if (soon->chain->n != depth || soon->chain->hashes[depth - 1] != hash)
            continue;
        kvsel_soon_end(s, soon);
        ended++;
    }
    s->stats.announced += ended;
    return ended;
}
