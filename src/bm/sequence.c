// SPDX-License-Identifier: Apache-2.0
/* A sequence: an array of tokens, and arrays of the full blocks' local hashes and sequence hashes.
 * Removing tokens shortens all three; no block is hashed twice. */
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "kvbm_tokens.h"

struct kvbm_sequence {
    uint32_t block_size;
    uint64_t salt_hash;
    enum kvbm_chain_seed chain;
    size_t max_tokens;
    uint32_t *tokens;
    uint64_t *block_hashes;
    uint64_t *hashes;
    size_t len, n_blocks;
    size_t capacity; /* in tokens; the hash arrays have room for capacity / block_size */
};

static bool valid(const struct kvbm_sequence_opts *opts)
{
    uint32_t size = KV_OPT(opts, block_size, 0);

    return size && size <= KVBM_MAX_BLOCK_SIZE && !(size & (size - 1)) &&
           (unsigned)KV_OPT(opts, chain, KVBM_CHAIN_SEED_ZERO) <= KVBM_CHAIN_SEED_SALT;
}

int kvbm_sequence_create(const struct kvbm_sequence_opts *opts, struct kvbm_sequence **ret)
{
    struct kvbm_sequence *s;

    if (!ret || !kv_sized(opts, "kvbm_sequence_opts") || !valid(opts))
        return -EINVAL;
    s = calloc(1, sizeof(*s));
    if (!s)
        return -ENOMEM;
    s->block_size = opts->block_size;
    s->salt_hash = KV_OPT(opts, salt_hash, 0);
    s->chain = KV_OPT(opts, chain, KVBM_CHAIN_SEED_ZERO);
    s->max_tokens = KV_OPT(opts, max_tokens, UINT32_MAX);
    *ret = s;
    return 0;
}

void kvbm_sequence_destroy(struct kvbm_sequence *s)
{
    if (!s)
        return;
    free(s->tokens);
    free(s->block_hashes);
    free(s->hashes);
    free(s);
}

/* ---- growing ---- */

static const uint32_t no_tokens[1]; /* stands for an empty array */

static int reserve(struct kvbm_sequence *s, size_t len)
{
    size_t capacity = s->capacity ? s->capacity : (size_t)s->block_size * 8;
    uint64_t *block_hashes, *hashes;
    uint32_t *tokens;

    if (len <= s->capacity)
        return 0;
    if (len > SIZE_MAX / 2)
        return -ENOMEM;
    while (capacity < len)
        capacity *= 2;
    tokens = reallocarray(s->tokens, capacity, sizeof(*tokens));
    s->tokens = tokens ? tokens : s->tokens; /* keep arrays that have grown, also after a failure */
    block_hashes = reallocarray(s->block_hashes, capacity / s->block_size, sizeof(*block_hashes));
    s->block_hashes = block_hashes ? block_hashes : s->block_hashes;
    hashes = reallocarray(s->hashes, capacity / s->block_size, sizeof(*hashes));
    s->hashes = hashes ? hashes : s->hashes;
    if (!tokens || !block_hashes || !hashes)
        return -ENOMEM;
    s->capacity = capacity;
    return 0;
}

static size_t hash_full_blocks(struct kvbm_sequence *s)
{
    size_t from = s->n_blocks;
    size_t n =
        kvbm_hash_tokens(s->tokens + from * s->block_size, s->len - from * s->block_size,
                         s->block_size, s->salt_hash, s->chain, from ? &s->hashes[from - 1] : NULL,
                         s->block_hashes + from, s->hashes + from);

    s->n_blocks += n;
    return n;
}

long kvbm_sequence_extend(struct kvbm_sequence *s, const uint32_t *tokens, size_t n)
{
    if (!s || (n && !tokens))
        return -EINVAL;
    if (!n)
        return 0;
    if (n > s->max_tokens - s->len)
        return -ENOSPC;
    if (reserve(s, s->len + n) < 0)
        return -ENOMEM;
    memcpy(s->tokens + s->len, tokens, n * sizeof(*tokens));
    s->len += n;
    return (long)hash_full_blocks(s);
}

int kvbm_sequence_append(struct kvbm_sequence *s, uint32_t token)
{
    return (int)kvbm_sequence_extend(s, &token, 1);
}

/* ---- shrinking ---- */

int kvbm_sequence_truncate(struct kvbm_sequence *s, size_t len)
{
    if (!s)
        return -EINVAL;
    if (len > s->len)
        return -ERANGE;
    s->len = len;
    s->n_blocks = len / s->block_size;
    return 0;
}

int kvbm_sequence_unwind(struct kvbm_sequence *s, size_t n)
{
    if (!s)
        return -EINVAL;
    return n > s->len ? -ERANGE : kvbm_sequence_truncate(s, s->len - n);
}

int kvbm_sequence_pop(struct kvbm_sequence *s, uint32_t *ret)
{
    if (!s)
        return -EINVAL;
    if (!s->len)
        return -ENODATA;
    if (ret)
        *ret = s->tokens[s->len - 1];
    return kvbm_sequence_truncate(s, s->len - 1);
}

void kvbm_sequence_clear(struct kvbm_sequence *s)
{
    kvbm_sequence_truncate(s, 0);
}

/* ---- accessors ---- */

size_t kvbm_sequence_len(const struct kvbm_sequence *s)
{
    return s ? s->len : 0;
}

size_t kvbm_sequence_n_blocks(const struct kvbm_sequence *s)
{
    return s ? s->n_blocks : 0;
}

const uint32_t *kvbm_sequence_tail(const struct kvbm_sequence *s, size_t *n)
{
    if (n)
        *n = s ? s->len - s->n_blocks * s->block_size : 0;
    if (!s || !n)
        return NULL;
    return s->tokens ? s->tokens + s->n_blocks * s->block_size : no_tokens;
}

int kvbm_sequence_block(const struct kvbm_sequence *s, size_t i, struct kvbm_token_block *ret)
{
    if (!s || !ret)
        return -EINVAL;
    if (i >= s->n_blocks)
        return -ERANGE;
    *ret = (struct kvbm_token_block){
        .tokens = s->tokens + i * s->block_size,
        .block_hash = s->block_hashes[i],
        .sequence_hash = s->hashes[i],
        .parent = i ? s->hashes[i - 1] : 0,
        .position = i,
    };
    return 0;
}

const uint32_t *kvbm_sequence_tokens(const struct kvbm_sequence *s, size_t start, size_t n)
{
    if (!s || start > s->len || n > s->len - start)
        return NULL;
    return s->tokens ? s->tokens + start : no_tokens;
}

const uint64_t *kvbm_sequence_hashes(const struct kvbm_sequence *s)
{
    return s ? s->hashes : NULL;
}
