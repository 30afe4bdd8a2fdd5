// SPDX-License-Identifier: Apache-2.0
/* The hashes of tokens (formulas: kvbm_tokens.h). */
#include <errno.h>
#include <string.h>

#include "base/core/buf.h"
#include "base/core/error.h"
#include "base/core/utf8.h"
#include "base/core/xxh.h"
#include "base/json/json.h"
#include "kvbm_tokens.h"

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__,
               "tokens are hashed as they lie in memory");

uint64_t kvbm_salt_hash(const void *salt, size_t len)
{
    return kv_xxh64(len && salt ? salt : "", salt ? len : 0, 0);
}

uint64_t kvbm_block_hash(uint64_t salt_hash, const uint32_t *tokens, size_t n)
{
    return tokens || !n ? kv_xxh64(tokens, n * sizeof(*tokens), salt_hash) : 0;
}

static inline uint64_t chain(uint64_t parent, uint64_t block_hash, uint64_t seed)
{
    uint64_t both[2] = {parent, block_hash};

    return kv_xxh64(both, sizeof(both), seed);
}

uint64_t kvbm_sequence_hash(const uint64_t *parent, uint64_t block_hash, uint64_t salt_hash,
                            enum kvbm_chain_seed seed)
{
    return parent ? chain(*parent, block_hash, seed == KVBM_CHAIN_SEED_SALT ? salt_hash : 0)
                  : block_hash;
}

size_t kvbm_hash_tokens(const uint32_t *tokens, size_t n, uint32_t block_size, uint64_t salt_hash,
                        enum kvbm_chain_seed chain_seed, const uint64_t *parent,
                        uint64_t *block_hashes, uint64_t *sequence_hashes)
{
    uint64_t seed = chain_seed == KVBM_CHAIN_SEED_SALT ? salt_hash : 0;
    uint64_t above = parent ? *parent : 0;
    bool first = !parent;
    size_t n_blocks = block_size && tokens ? n / block_size : 0;

    for (size_t i = 0; i < n_blocks; i++, first = false) {
        uint64_t hash = kvbm_block_hash(salt_hash, tokens + i * block_size, block_size);

        above = first ? hash : chain(above, hash, seed);
        if (block_hashes)
            block_hashes[i] = hash;
        if (sequence_hashes)
            sequence_hashes[i] = above;
    }
    return n_blocks;
}

/* ---- multimodal ---- */

#define FRAME 13
#define FRAMES 64 /* runs hashed at a time */

static void frame(uint8_t *to, uint8_t kind, uint32_t number, uint64_t hash)
{
    to[0] = kind;
    memcpy(to + 1, &number, sizeof(number));
    memcpy(to + 5, &hash, sizeof(hash));
}

/* True when no position from @at on is in the run; a run of no tokens has none. */
static inline bool over(const struct kvbm_mm_run *run, uint64_t at)
{
    return !run->n || (at >= run->start && at - run->start >= run->n);
}

uint64_t kvbm_block_hash_mm(uint64_t salt_hash, const uint32_t *tokens, size_t n, uint64_t first,
                            const struct kvbm_mm_run *runs, size_t n_runs)
{
    uint8_t frames[FRAMES * FRAME];
    XXH3_state_t state;

    if (!tokens || !runs)
        n_runs = 0;
    for (; n_runs && over(runs, first); n_runs--)
        runs++;
    if (!n_runs || (runs->start > first && runs->start - first >= n))
        return kvbm_block_hash(salt_hash, tokens, n);
    XXH3_INITSTATE(&state);
    XXH3_64bits_reset_withSeed(&state, salt_hash);
    for (size_t done = 0, some; done < n; done += some) {
        some = KV_MIN(n - done, (size_t)FRAMES);
        for (size_t i = 0; i < some; i++) {
            uint64_t at = first + done + i;

            for (; n_runs && over(runs, at); n_runs--)
                runs++;
            if (n_runs && at >= runs->start)
                frame(frames + i * FRAME, 1, (uint32_t)(at - runs->start), runs->hash);
            else
                frame(frames + i * FRAME, 0, tokens[done + i], 0);
        }
        XXH3_64bits_update(&state, frames, some * FRAME);
    }
    return XXH3_64bits_digest(&state);
}

/* ---- positional ---- */

int kvbm_positional_hash(uint64_t sequence_hash, uint64_t block_hash, uint64_t position,
                         struct kvbm_hash128 *ret)
{
    static const uint8_t widths[4] = {8, 16, 24, 31};
    uint32_t mode = 0;
    uint32_t hash_bits;

    if (!ret || position >= UINT64_C(1) << 31)
        return -EINVAL;
    while (position >> widths[mode])
        mode++;
    hash_bits = 62 - widths[mode];
    ret->high = (uint64_t)mode << 62 | position << hash_bits |
                (block_hash & ((UINT64_C(1) << hash_bits) - 1));
    ret->low = sequence_hash;
    return 0;
}

/* ---- salts as JSON ---- */

int kvbm_salt_hash_json(const char *salt, const char *lora_name, uint64_t *ret)
{
    struct kv_buf out = KV_BUF_INIT;
    struct kv_json_writer json;
    int err;

    if (!ret || (salt && !kv_utf8_valid(salt)) || (lora_name && !kv_utf8_valid(lora_name)))
        return -EINVAL;
    kv_json_writer_init(&json, &out);
    kv_json_begin_object(&json);
    if (salt && *salt) {
        kv_json_member_str(&json, "salt", salt);
    }
    if (lora_name && *lora_name) {
        kv_json_member_str(&json, "lora_name", lora_name);
    }
    kv_json_end_object(&json);
    err = out.error;
    if (err == 0)
        *ret = kvbm_salt_hash(out.data, out.len);
    kv_buf_fini(&out);
    return err;
}
