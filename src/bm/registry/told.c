// SPDX-License-Identifier: Apache-2.0
/*
 * Tokens of keys, and which copies have been told with them.
 *
 * Followers place a block by its tokens. An event without tokens points at a block that they know. So a
 * key is told once with its tokens, and untold copies are told again when the tokens become known:
 *
 *   stored without tokens ──► untold tier ──── tokens become known ───► told again, with tokens
 *                                  └── removed ──► forgotten
 *
 * With kvbm_registry_keep_tokens the registry keeps tokens as long as a block names the key. The disk
 * tier's records have them from there, so that a restarted manager tells its disk's blocks by itself.
 */
#include <errno.h>
#include <string.h>

#include "bm/registry/registry.h"
#include "bm/storage/memory.h"

int kvbm_registry_keep_tokens(struct kvbm_registry *r, uint32_t n)
{
    int err;

    kvbm_lock(r);
    err = r->pools ? -EBUSY : 0;
    if (err == 0)
        r->kept_tokens = n;
    kvbm_unlock(r);
    return err;
}

int kvbm_tokens_grow(struct kvbm_registry *r, uint64_t entries)
{
    size_t each = r->kept_tokens * sizeof(*r->tokens), mapped;
    uint32_t *tokens;

    if (!each || (entries + 1) * each <= r->tokens_mapped)
        return 0;
    tokens = kvbm_map_dense((entries + 1) * each, 0, &mapped);
    if (!tokens)
        return -ENOMEM;
    if (r->tokens)
        memcpy(tokens, r->tokens, ((size_t)r->n_entries + 1) * each);
    kvbm_unmap(r->tokens, r->tokens_mapped);
    r->tokens = tokens;
    r->tokens_mapped = mapped;
    return 0;
}

static void keep(struct kvbm_registry *r, uint32_t i, const uint32_t *tokens, uint32_t n)
{
    struct kvbm_entry *e = kvbm_entry(r, i);

    if (n != r->kept_tokens || e->flags & KVBM_HAS_TOKENS)
        return;
    memcpy(r->tokens + (size_t)i * n, tokens, n * sizeof(*tokens));
    e->flags |= KVBM_HAS_TOKENS;
}

/* Write a second event of a copy that was told without tokens. */
static void tell_again(struct kvbm_registry *r, const struct kvbm_entry *e, enum kv_tier tier,
                       const uint32_t *tokens, uint32_t n)
{
    const struct kvbm_event event = {
        .type = KVBM_EVENT_STORED,
        .tier = tier,
        .again = true,
        .group = e->group,
        .key_len = r->key_len,
        .key = e->key,
        .parent = e->parent ? kvbm_entry(r, e->parent)->key : NULL,
        .position = e->position,
        .n_tokens = n,
        .tokens = tokens,
    };

    kvbm_publish(r, &event);
}

static void set_untold(struct kvbm_registry *r, struct kvbm_entry *e, uint8_t untold)
{
    r->n_untold += (uint32_t)(untold != 0) - (uint32_t)(e->untold != 0);
    e->untold = untold;
}

void kvbm_learn_tokens(struct kvbm_registry *r, uint32_t i, const uint32_t *tokens, uint32_t n)
{
    struct kvbm_entry *e = kvbm_entry(r, i);

    keep(r, i, tokens, n);
    e->flags |= KVBM_TOLD;
    for (int tier = 0; e->untold && tier < KV_N_TIERS; tier++) {
        if (e->untold >> tier & 1)
            tell_again(r, e, (enum kv_tier)tier, tokens, n);
    }
    set_untold(r, e, 0);
}

void kvbm_note_untold(struct kvbm_registry *r, uint32_t i, enum kv_tier tier)
{
    struct kvbm_entry *e = kvbm_entry(r, i);

    if (!(e->flags & KVBM_TOLD))
        set_untold(r, e, (uint8_t)(e->untold | 1u << tier));
}

void kvbm_note_left(struct kvbm_registry *r, struct kvbm_entry *e, enum kv_tier tier)
{
    set_untold(r, e, (uint8_t)(e->untold & ~(1u << tier)));
    if (!e->tiers)
        e->flags &= (uint8_t)~KVBM_TOLD;
}

void kvbm_registry_tell(struct kvbm_registry *r, const struct kvbm_chain *chain, size_t n,
                        uint32_t n_tokens)
{
    const uint32_t *tokens = KV_OPT(chain, tokens, NULL);
    const uint8_t *keys = chain->keys;

    if (!r->events || !tokens || !n_tokens)
        return;
    kvbm_lock(r);
    for (size_t k = 0; k < n && r->n_untold; k++) {
        const uint8_t *key = keys + k * r->key_len;
        uint32_t i = kvbm_find(r, chain->group, key, kvbm_tag(r, chain->group, key));

        if (i && kvbm_entry(r, i)->untold)
            kvbm_learn_tokens(r, i, tokens + k * n_tokens, n_tokens);
    }
    kvbm_unlock(r);
}

bool kvbm_registry_tokens(struct kvbm_registry *r, uint32_t group, const void *key, uint32_t *ret)
{
    const uint32_t *tokens;
    uint32_t i;

    kvbm_lock(r);
    i = kvbm_find(r, group, key, kvbm_tag(r, group, key));
    tokens = i ? kvbm_kept_tokens(r, i) : NULL;
    if (tokens)
        memcpy(ret, tokens, r->kept_tokens * sizeof(*ret));
    kvbm_unlock(r);
    return tokens != NULL;
}
