// SPDX-License-Identifier: Apache-2.0
/* A sequence driven by a string of operations, compared with an array that is hashed anew at the
 * end. */
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "kvbm_tokens.h"
#include "require.h"

#define MAX_TOKENS 3000

struct world {
    struct kvbm_sequence *sequence;
    struct kvbm_sequence_opts opts;
    uint32_t tokens[MAX_TOKENS];
    size_t len;
    uint32_t next; /* token */
};

static void add(struct world *w, size_t n)
{
    uint32_t size = w->opts.block_size;
    long want = (long)((w->len + n) / size - w->len / size);

    if (n > MAX_TOKENS - w->len) {
        REQUIRE(kvbm_sequence_extend(w->sequence, w->tokens, n) == -ENOSPC);
        return;
    }
    for (size_t i = 0; i < n; i++)
        w->tokens[w->len + i] = w->next = w->next * 1664525 + 1013904223;
    if (n == 1)
        REQUIRE(kvbm_sequence_append(w->sequence, w->tokens[w->len]) == want);
    else
        REQUIRE(kvbm_sequence_extend(w->sequence, w->tokens + w->len, n) == want);
    w->len += n;
}

static void operate(struct world *w, uint8_t what, size_t n)
{
    uint32_t token;

    if (what % 8 < 2) {
        add(w, 1);
    } else if (what % 8 < 5) {
        add(w, n);
    } else if (what % 8 == 5) {
        REQUIRE(kvbm_sequence_pop(w->sequence, &token) == (w->len ? 0 : -ENODATA));
        REQUIRE(!w->len || token == w->tokens[w->len - 1]);
        w->len -= w->len > 0;
    } else if (what % 8 == 6) {
        REQUIRE(kvbm_sequence_unwind(w->sequence, n) == (n > w->len ? -ERANGE : 0));
        w->len -= n > w->len ? 0 : n;
    } else {
        REQUIRE(kvbm_sequence_truncate(w->sequence, n) == (n > w->len ? -ERANGE : 0));
        w->len = KV_MIN(n, w->len);
    }
}

static void check(const struct world *w)
{
    static uint64_t blocks[MAX_TOKENS], hashes[MAX_TOKENS];
    size_t n = kvbm_hash_tokens(w->tokens, w->len, w->opts.block_size, w->opts.salt_hash,
                                w->opts.chain, NULL, blocks, hashes);
    size_t tail;

    REQUIRE(kvbm_sequence_len(w->sequence) == w->len);
    REQUIRE(kvbm_sequence_n_blocks(w->sequence) == n);
    for (size_t i = 0; i < n; i++) {
        struct kvbm_token_block block;

        REQUIRE(kvbm_sequence_block(w->sequence, i, &block) == 0);
        REQUIRE(block.block_hash == blocks[i] && block.sequence_hash == hashes[i]);
        REQUIRE(block.parent == (i ? hashes[i - 1] : 0) && block.position == i);
    }
    REQUIRE(memcmp(kvbm_sequence_tokens(w->sequence, 0, w->len), w->tokens, w->len * 4) == 0);
    (void)kvbm_sequence_tail(w->sequence, &tail);
    REQUIRE(tail == w->len % w->opts.block_size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct world w = {.opts = {.size = sizeof(w.opts), .max_tokens = MAX_TOKENS}};

    if (size < 10)
        return 0;
    w.opts.block_size = 1u << data[0] % 11;
    w.opts.chain = data[1] % 2 ? KVBM_CHAIN_SEED_SALT : KVBM_CHAIN_SEED_ZERO;
    memcpy(&w.opts.salt_hash, data + 2, 8);
    REQUIRE(kvbm_sequence_create(&w.opts, &w.sequence) == 0);
    for (size_t i = 10; i + 2 < size && i < 3000; i += 3) {
        operate(&w, data[i], data[i + 1] | (size_t)(data[i + 2] % 16) << 8);
        if (data[i] >= 240)
            check(&w);
    }
    check(&w);
    kvbm_sequence_destroy(w.sequence);
    return 0;
}
