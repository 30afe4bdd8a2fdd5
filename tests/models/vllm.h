// SPDX-License-Identifier: Apache-2.0
/**
 * A model of vLLM's cache: its block pool, its cache groups and its scheduler's use of them, as in
 * vllm/v1/core (block_pool.py, single_type_kv_cache_manager.py, kv_cache_manager.py) of 0.33.
 *
 * - Blocks are cached under (hash, group) as soon as they are full, and never deduplicated: a hash
 *   may have several blocks, each announced, each announced again when it is evicted.
 * - A request's own lookup stops before its last token, so a prompt of exactly full blocks computes
 *   the last one again: another copy.
 * - Freed blocks queue for eviction in the order of their release, last block of a request first.
 * - Groups: full attention; sliding windows, whose blocks outside the window are released early and
 *   left out of events; recurrent state ("mamba", align mode), of which a chunk keeps the last block;
 *   chunked local attention, which needs the blocks from the start of the next token's chunk on. Below the
 *   device it is looked up like a window as long as a chunk.
 * - Sliding windows may have smaller blocks than the other groups (@parts of them make one). Hashes are
 *   those of the smaller blocks; a larger block has the hash of its last part. A match is a whole
 *   number of larger blocks.
 * - With lookahead L a block's hash covers the L tokens after it, and exists only when they do. With
 *   block drop (EAGLE without lookahead hashes) a request's own lookup gives its last block up.
 * - With retention (prefix_cache_retention_interval=0, the default of vllm serve) windows and states keep
 *   only the blocks that serve a match at the end of a prompt, or where another prompt has left it.
 * - A group may live in host memory (HiSparse): its events name that, in one order with the device's,
 *   and a reset tells two clears. (The engine's groups have pools of their own there; what these
 *   evict makes no difference to its events.)
 * - kv_cache_report_mode=full announces the blocks that a request reuses once more.
 *
 * The model's own lookup (model_lookup) is the truth: the longest prefix that every group can serve.
 */
#ifndef KV_TESTS_MODELS_VLLM_H
#define KV_TESTS_MODELS_VLLM_H

#include "base/core/xxh.h"
#include "base/json/msgpack.h"
#include "event/reader/told.h"
#include "models/prompts.h"

#define VLLM_BLOCK 4
#define VLLM_MAX_BLOCKS 160
#define VLLM_MAX_GROUPS 4
#define VLLM_MAX_REQUESTS 5
#define VLLM_MAX_COPYING 8
#define VLLM_MAX_CHAIN (PROMPT_MAX / VLLM_BLOCK)
#define VLLM_NULL UINT16_MAX

enum vllm_kind { VLLM_FULL, VLLM_SLIDING, VLLM_MAMBA, VLLM_CHUNKED };

struct vllm_opts {
    uint16_t n_blocks;
    unsigned n_groups;
    struct vllm_group {
        enum vllm_kind kind;
        uint32_t window; /* tokens; of chunked local attention those of a chunk */
    } groups[VLLM_MAX_GROUPS];
    size_t parts;   /* blocks of a window that make one of another group; 0: 1 */
    bool retention; /* windows and states keep what a replayed prompt can resume from, else all */
    uint32_t lookahead;
    bool eagle_drop;
    uint64_t eagle_groups;        /* bit: the group drops; 0: all do */
    bool report_full, report_all; /* some requests, or all, ask for reports */
    int report_mode;              /* the registered one */
    bool skip_cache;              /* some requests don't look into the cache (prompt logprobs) */
    bool plain_images;            /* images lie over ordinary tokens */
    uint16_t host_blocks;         /* of an offloading tier; 0: none */
    bool host_placeholders;       /* its events carry no tokens */
    bool host_owner;              /* a secondary tier's copies are announced beside it */
    bool host_pool;               /* a block pool of its own, which resets like the device's */
    unsigned lives_below;         /* bit: the group lives in host memory */
    bool names_no_rank; /* as engines with one rank may: then a clear empties all there is */
};

struct vllm_block {
    uint64_t hash; /* 0: not cached */
    unsigned group;
    unsigned refs;
};

struct vllm_request {
    bool used;
    struct prompt prompt;
    size_t n_prompt; /* the rest was generated */
    size_t
        junction; /* retention: hashes up to which full attention had more than the others; 0: none */
    uint16_t blocks[VLLM_MAX_GROUPS][VLLM_MAX_CHAIN + 1]; /* VLLM_NULL: released or never there */
    size_t n_blocks[VLLM_MAX_GROUPS], n_cached[VLLM_MAX_GROUPS];
};

/* A tier below the pool: least recently stored first. */
struct vllm_host {
    struct vllm_copy {
        uint64_t hash;
        unsigned group;
    } items[VLLM_MAX_BLOCKS];
    size_t n;
};

/* A copy to a tier below that isn't done yet: until then the pool can't evict the block. */
struct vllm_copying {
    struct prompt prompt;
    size_t at; /* the block's place in the prompt */
    uint16_t block;
};

struct vllm {
    struct vllm_opts opts;
    struct vllm_block blocks[VLLM_MAX_BLOCKS];
    uint16_t queue[VLLM_MAX_BLOCKS]; /* free blocks, the next victim first */
    size_t n_queue;
    struct vllm_request requests[VLLM_MAX_REQUESTS];
    struct vllm_host host, owner;
    struct vllm_copying copying[VLLM_MAX_COPYING];
    size_t n_copying;
    struct kv_buf events;      /* of the batch to come */
    struct kv_buf host_events; /* of the connector, which follow those of the device */
    uint32_t n_events;
    bool host_used; /* the connector has announced a block */
    bool below;     /* lookups ask the tiers below instead of the pool */
};

static inline void vllm_init(struct vllm *v, const struct vllm_opts *opts)
{
    memset(v, 0, sizeof(*v));
    v->opts = *opts;
    for (uint16_t i = 0; i < opts->n_blocks; i++)
        v->queue[v->n_queue++] = i;
}

static inline void vllm_fini(struct vllm *v)
{
    kv_buf_fini(&v->events);
    kv_buf_fini(&v->host_events);
}

/* Groups that a registration has to tell: those with chunks. */
static inline struct kve_told vllm_told(const struct vllm_opts *opts)
{
    struct kve_told told = {0};

    for (unsigned g = 0; g < opts->n_groups; g++)
        if (opts->groups[g].kind == VLLM_CHUNKED)
            told.items[told.n++] = (struct kve_told_group){
                .group = g, .kind = KVE_KIND_CHUNKED, .chunk = opts->groups[g].window};
    return told;
}

/* -- sizes ------------------------------------------------------------------------------------- */

static inline size_t vllm_parts(const struct vllm *v)
{
    return v->opts.parts ? v->opts.parts : 1;
}

/* Hashes of one block of the group. */
static inline size_t vllm_unit(const struct vllm *v, unsigned group)
{
    return v->opts.groups[group].kind == VLLM_SLIDING ? 1 : vllm_parts(v);
}

static inline size_t vllm_align(const struct vllm *v, size_t n)
{
    return n / vllm_parts(v) * vllm_parts(v);
}

/* Blocks of a window that a match needs before its end, or blocks of a chunk. */
static inline size_t vllm_need(const struct vllm_group *g)
{
    if (g->kind == VLLM_CHUNKED)
        return g->window / VLLM_BLOCK;
    return g->window > 1 ? (g->window - 2) / VLLM_BLOCK + 1 : 1;
}

/* Groups of one description are looked up jointly: one that drops makes all drop. */
static inline bool vllm_drops(const struct vllm *v, unsigned group)
{
    if (!v->opts.eagle_drop)
        return false;
    for (unsigned g = 0; g < v->opts.n_groups; g++)
        if ((!v->opts.eagle_groups || v->opts.eagle_groups >> g & 1) &&
            memcmp(&v->opts.groups[g], &v->opts.groups[group], sizeof(v->opts.groups[0])) == 0)
            return true;
    return false;
}

/* -- hashes ------------------------------------------------------------------------------------ */

static inline bool vllm_has_image(const struct prompt *p, size_t start, size_t end)
{
    return p->image && p->image_start < end && start < p->image_end;
}

/* The chain of a prompt's hashes. Each covers everything before it. Returns their number. */
static inline size_t vllm_hashes(const struct vllm *v, const struct prompt *p, uint64_t *ret)
{
    size_t n = p->n < v->opts.lookahead ? 0 : (p->n - v->opts.lookahead) / VLLM_BLOCK;
    uint64_t last = 0;

    for (size_t i = 0; i < n; i++) {
        size_t start = i * VLLM_BLOCK, end = start + VLLM_BLOCK + v->opts.lookahead;
        bool image = vllm_has_image(p, start, end);
        uint64_t extra[5] = {last, p->lora, i ? 0 : p->salt, image ? p->image : 0,
                             image ? (uint64_t)(p->image_start - start) : 0};

        last = kv_xxh64(p->tokens + start, (end - start) * sizeof(uint32_t),
                        kv_xxh64(extra, sizeof(extra), 1));
        ret[i] = last;
    }
    return n;
}

/* -- events ------------------------------------------------------------------------------------ */

static inline void vllm_put_hashes(struct kv_buf *out, const uint64_t *hashes, size_t n)
{
    kv_msgpack_put_str(out, "block_hashes");
    kv_msgpack_put_array(out, (uint32_t)n);
    kv_msgpack_put_u64s(out, hashes, n);
}

static inline void vllm_put_optional(struct kv_buf *out, const char *key, const char *value)
{
    kv_msgpack_put_str(out, key);
    if (value)
        kv_msgpack_put_str(out, value);
    else
        kv_msgpack_put_nil(out);
}

/* Of one block: adapter, (image, offset), salt in the first block of a chain. */
static inline void vllm_put_extra_keys(const struct vllm *v, struct kv_buf *out,
                                       const struct prompt *p, size_t block, size_t unit)
{
    size_t start = block * unit * VLLM_BLOCK;
    bool image = vllm_has_image(p, start, start + unit * VLLM_BLOCK + v->opts.lookahead);
    bool salt = block == 0 && p->salt;
    uint32_t n = (p->lora > 0) + image + salt;

    if (!n) {
        kv_msgpack_put_nil(out);
        return;
    }
    kv_msgpack_put_array(out, n);
    if (p->lora)
        kv_msgpack_put_str(out, prompt_loras[p->lora]);
    if (image) {
        kv_msgpack_put_array(out, 2);
        kv_msgpack_put_str(out, prompt_images[p->image]);
        kv_msgpack_put_i64(out, (int64_t)p->image_start - (int64_t)start);
    }
    if (salt)
        kv_msgpack_put_str(out, prompt_salts[p->salt]);
}

static inline void vllm_put_kind(const struct vllm *v, struct kv_buf *out, unsigned group)
{
    static const char *const kinds[] = {"full_attention", "sliding_window", "mamba",
                                        "chunked_local_attention"};

    kv_msgpack_put_str(out, "group_idx");
    kv_msgpack_put_u64(out, group);
    kv_msgpack_put_str(out, "kv_cache_spec_kind");
    kv_msgpack_put_str(out, kinds[v->opts.groups[group].kind]);
    if (v->opts.groups[group].kind == VLLM_SLIDING) {
        kv_msgpack_put_str(out, "kv_cache_spec_sliding_window");
        kv_msgpack_put_u64(out, v->opts.groups[group].window);
    }
}

static inline const char *vllm_medium(const struct vllm *v, unsigned group)
{
    return v->opts.lives_below >> group & 1 ? "CPU" : "GPU";
}

/* Which of a request's blocks an event is about: @picked of the range [@from, @to). */
struct vllm_range {
    size_t from, to;
    bool picked[VLLM_MAX_CHAIN];
    size_t n;
};

static inline void vllm_put_lookahead(const struct vllm *v, struct kv_buf *out,
                                      const struct prompt *p, const struct vllm_range *range,
                                      size_t unit)
{
    kv_msgpack_put_str(out, "lookahead_token_ids");
    kv_msgpack_put_array(out, (uint32_t)range->n);
    for (size_t i = range->from; i < range->to; i++) {
        if (!range->picked[i])
            continue;
        kv_msgpack_put_array(out, v->opts.lookahead);
        kv_msgpack_put_u32s(out, p->tokens + (i + 1) * unit * VLLM_BLOCK, v->opts.lookahead);
    }
}

static inline void vllm_stored(struct vllm *v, const struct prompt *p, const uint64_t *hashes,
                               unsigned group, const struct vllm_range *range)
{
    uint64_t named[VLLM_MAX_CHAIN];
    struct kv_buf *out = &v->events;
    size_t unit = vllm_unit(v, group), n = 0,
           n_tokens = (range->to - range->from) * unit * VLLM_BLOCK;

    for (size_t i = range->from; i < range->to; i++) {
        if (range->picked[i])
            named[n++] = hashes[(i + 1) * unit - 1];
    }
    kv_msgpack_put_map(out,
                       11 + (v->opts.groups[group].kind == VLLM_SLIDING) + (v->opts.lookahead > 0));
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockStored");
    vllm_put_hashes(out, named, n);
    kv_msgpack_put_str(out, "parent_block_hash");
    if (range->from)
        kv_msgpack_put_u64(out, hashes[range->from * unit - 1]);
    else
        kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "token_ids");
    kv_msgpack_put_array(out, (uint32_t)n_tokens);
    kv_msgpack_put_u32s(out, p->tokens + range->from * unit * VLLM_BLOCK, n_tokens);
    kv_msgpack_put_str(out, "block_size");
    kv_msgpack_put_u64(out, unit * VLLM_BLOCK);
    kv_msgpack_put_str(out, "lora_id");
    kv_msgpack_put_nil(out);
    vllm_put_optional(out, "medium", vllm_medium(v, group));
    vllm_put_optional(out, "lora_name", prompt_loras[p->lora]);
    kv_msgpack_put_str(out, "extra_keys");
    if (n)
        kv_msgpack_put_array(out, (uint32_t)n);
    else
        kv_msgpack_put_nil(out);
    for (size_t i = range->from; i < range->to; i++) {
        if (range->picked[i])
            vllm_put_extra_keys(v, out, p, i, unit);
    }
    vllm_put_kind(v, out, group);
    if (v->opts.lookahead)
        vllm_put_lookahead(v, out, p, range, unit);
    v->n_events++;
}

static inline void vllm_removed(struct vllm *v, uint64_t hash, unsigned group, const char *medium,
                                const char *owner)
{
    bool host = strcmp(medium, "CPU") == 0 && medium != vllm_medium(v, group),
         local = v->opts.host_pool && host;
    struct kv_buf *out = host ? &v->host_events : &v->events;

    kv_msgpack_put_map(out, 4 + (owner != NULL) + local);
    if (local)
        vllm_put_optional(out, "locality", "LOCAL");
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockRemoved");
    vllm_put_hashes(out, &hash, 1);
    vllm_put_optional(out, "medium", medium);
    kv_msgpack_put_str(out, "group_idx");
    kv_msgpack_put_u64(out, group);
    if (owner)
        vllm_put_optional(out, "ownership", owner);
    v->n_events++;
}

/* The batch so far, as its publisher encodes it; the next one begins. The caller's to free. */
static inline struct kv_buf vllm_take(struct vllm *v)
{
    struct kv_buf payload = KV_BUF_INIT;

    kv_msgpack_put_array(&payload, 3);
    kv_msgpack_put_double(&payload, 1.5);
    kv_msgpack_put_array(&payload, v->n_events);
    if (v->events.len)
        kv_buf_append(&payload, v->events.data, v->events.len);
    if (v->host_events.len)
        kv_buf_append(&payload, v->host_events.data, v->host_events.len);
    if (v->opts.names_no_rank)
        kv_msgpack_put_nil(&payload);
    else
        kv_msgpack_put_u64(&payload, 0);
    kv_buf_clear(&v->events);
    kv_buf_clear(&v->host_events);
    v->n_events = 0;
    return payload;
}

/* -- the tier below ---------------------------------------------------------------------------- */

static inline size_t vllm_host_find(const struct vllm_host *host, uint64_t hash, unsigned group)
{
    size_t i = 0;

    while (i < host->n && (host->items[i].hash != hash || host->items[i].group != group))
        i++;
    return i;
}

static inline void vllm_host_drop(struct vllm *v, struct vllm_host *host, size_t at)
{
    bool owner = host == &v->owner;

    vllm_removed(v, host->items[at].hash, host->items[at].group, "CPU", owner ? "mooncake" : NULL);
    memmove(host->items + at, host->items + at + 1, (--host->n - at) * sizeof(host->items[0]));
}

/* The event of an offloaded block: with its tokens (but no extra keys), or naming it alone. */
static inline void vllm_host_stored(struct vllm *v, const struct prompt *p, const uint64_t *hashes,
                                    size_t block, unsigned group, const char *owner)
{
    bool tokens = !v->opts.host_placeholders && v->opts.groups[group].kind == VLLM_FULL;
    bool kind = v->opts.n_groups > 1, sliding = v->opts.groups[group].kind == VLLM_SLIDING;
    struct kv_buf *out = &v->host_events;

    v->host_used = true;
    kv_msgpack_put_map(out, 9u + (owner != NULL) + v->opts.host_pool + kind + (kind && sliding));
    if (v->opts.host_pool)
        vllm_put_optional(out, "locality", "LOCAL");
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockStored");
    vllm_put_hashes(out, hashes + block, 1);
    kv_msgpack_put_str(out, "parent_block_hash");
    if (tokens && block)
        kv_msgpack_put_u64(out, hashes[block - 1]);
    else
        kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "token_ids");
    kv_msgpack_put_array(out, tokens ? VLLM_BLOCK : 0);
    kv_msgpack_put_u32s(out, p->tokens + block * VLLM_BLOCK, tokens ? VLLM_BLOCK : 0);
    kv_msgpack_put_str(out, "block_size");
    kv_msgpack_put_u64(out, tokens ? VLLM_BLOCK : 0);
    kv_msgpack_put_str(out, "lora_id");
    kv_msgpack_put_nil(out);
    vllm_put_optional(out, "medium", "CPU");
    vllm_put_optional(out, "lora_name", tokens ? prompt_loras[p->lora] : NULL);
    if (kind) {
        vllm_put_kind(v, out, group);
    } else {
        kv_msgpack_put_str(out, "group_idx");
        kv_msgpack_put_u64(out, group);
    }
    if (owner)
        vllm_put_optional(out, "ownership", owner);
    v->n_events++;
}

static inline void vllm_offload(struct vllm *v, struct vllm_host *host, const struct prompt *p,
                                const uint64_t *hashes, size_t block, unsigned group)
{
    if (!v->opts.host_blocks || vllm_host_find(host, hashes[block], group) < host->n)
        return;
    if (host->n == v->opts.host_blocks)
        vllm_host_drop(v, host, 0);
    host->items[host->n++] = (struct vllm_copy){hashes[block], group};
    vllm_host_stored(v, p, hashes, block, group, host == &v->owner ? "mooncake" : NULL);
}

/* -- the pool ---------------------------------------------------------------------------------- */

static inline uint16_t vllm_find(const struct vllm *v, uint64_t hash, unsigned group)
{
    for (uint16_t i = 0; i < v->opts.n_blocks; i++) {
        if (v->blocks[i].hash == hash && v->blocks[i].group == group)
            return i;
    }
    return VLLM_NULL;
}

static inline void vllm_touch(struct vllm *v, uint16_t block)
{
    size_t at = 0;

    if (v->blocks[block].refs++)
        return;
    while (v->queue[at] != block)
        at++;
    memmove(v->queue + at, v->queue + at + 1, (--v->n_queue - at) * sizeof(v->queue[0]));
}

static inline uint16_t vllm_new_block(struct vllm *v)
{
    uint16_t block = v->queue[0];
    struct vllm_block *b = &v->blocks[block];

    memmove(v->queue, v->queue + 1, --v->n_queue * sizeof(v->queue[0]));
    if (b->hash)
        vllm_removed(v, b->hash, b->group, vllm_medium(v, b->group), NULL);
    *b = (struct vllm_block){.refs = 1};
    return block;
}

/* Blocks that nothing can find are used again first, cached ones last. */
static inline void vllm_release(struct vllm *v, uint16_t block)
{
    if (block == VLLM_NULL || --v->blocks[block].refs)
        return;
    if (v->blocks[block].hash) {
        v->queue[v->n_queue++] = block;
    } else {
        memmove(v->queue + 1, v->queue, v->n_queue++ * sizeof(v->queue[0]));
        v->queue[0] = block;
    }
}

/* -- lookup ------------------------------------------------------------------------------------ */

static inline bool vllm_has(const struct vllm *v, uint64_t hash, unsigned group)
{
    if (v->below)
        return vllm_host_find(&v->host, hash, group) < v->host.n ||
               vllm_host_find(&v->owner, hash, group) < v->owner.n;
    return vllm_find(v, hash, group) != VLLM_NULL;
}

/* Groups of one description are looked up jointly. */
static inline bool vllm_all_have(const struct vllm *v, uint64_t hash, unsigned group)
{
    for (unsigned g = 0; g < v->opts.n_groups; g++) {
        if (memcmp(&v->opts.groups[g], &v->opts.groups[group], sizeof(v->opts.groups[0])) == 0 &&
            !vllm_has(v, hash, g))
            return false;
    }
    return true;
}

/* The longest hit of one group within @n hashes, as its manager finds it; with @drop it gives up the
 * last block of it. */
static inline size_t vllm_group_hit(const struct vllm *v, const uint64_t *hashes, size_t n,
                                    unsigned group, bool drop)
{
    const struct vllm_group *g = &v->opts.groups[group];
    size_t unit = vllm_unit(v, group), need = vllm_need(g) + drop, run = 0, i;

    if (g->kind == VLLM_FULL) {
        for (i = 0; i < n / unit && vllm_all_have(v, hashes[(i + 1) * unit - 1], group); i++)
            ;
        return (i - (drop && i)) * unit;
    }
    if (g->kind == VLLM_CHUNKED && !v->below) {
        for (i = n - n % need; i < n && vllm_all_have(v, hashes[i], group); i++)
            ;
        return i;
    }
    if (g->kind == VLLM_MAMBA)
        need = 1;
    for (i = n / unit; i > 0; i--) {
        if (!vllm_all_have(v, hashes[i * unit - 1], group)) {
            run = 0;
            continue;
        }
        if (!run && (i - drop) * unit != vllm_align(v, (i - drop) * unit))
            continue;
        if (++run == need)
            return (i - 1 + need - drop) * unit;
    }
    if (g->kind == VLLM_MAMBA)
        return 0;
    /* A run from the start is a hit, however short. */
    run = vllm_align(v, run);
    return vllm_align(v, run - (drop && run));
}

/* Whether an earlier group has the same description: they are looked up jointly. */
static inline bool vllm_is_joint(const struct vllm *v, unsigned group)
{
    for (unsigned g = 0; g < group; g++)
        if (memcmp(&v->opts.groups[g], &v->opts.groups[group], sizeof(v->opts.groups[0])) == 0)
            return true;
    return false;
}

/* A lookup of at most @n of @all hashes: full attention first, then the others, until all agree. */
struct vllm_lookup {
    const struct vllm *v;
    const uint64_t *hashes;
    size_t all;
    bool verified[VLLM_MAX_GROUPS]; /* has dropped its block already */
    size_t full[VLLM_MAX_GROUPS];   /* hits of full attention + 1 */
};

static inline size_t vllm_ask_group(struct vllm_lookup *l, unsigned g, size_t n)
{
    const struct vllm_opts *opts = &l->v->opts;
    bool drop = vllm_drops(l->v, g) && !l->verified[g],
         beyond = drop && opts->groups[g].kind != VLLM_MAMBA;
    size_t more = n + vllm_unit(l->v, g);
    size_t max = beyond && opts->n_groups > 1 ? KV_MIN(more, l->all) : n, hit;

    if (l->full[g])
        return KV_MIN(n, l->full[g] - 1);
    hit = vllm_group_hit(l->v, l->hashes, max, g, beyond);
    if (drop)
        l->verified[g] = true;
    else if (hit < n)
        memset(l->verified, 0, sizeof(l->verified));
    if (opts->groups[g].kind == VLLM_FULL)
        l->full[g] = hit + 1;
    return hit;
}

/* The longest prefix of at most @n of the prompt's @all hashes that all groups can serve. */
static inline size_t vllm_hit(const struct vllm *v, const uint64_t *hashes, size_t all, size_t n)
{
    struct vllm_lookup l = {.v = v, .hashes = hashes, .all = all};

    for (size_t before = n + 1; n < before;) {
        before = n;
        for (unsigned i = 0; i < 2 * v->opts.n_groups; i++) {
            unsigned g = i % v->opts.n_groups;
            bool is_full = v->opts.groups[g].kind == VLLM_FULL;

            if (is_full == (i < v->opts.n_groups) && !vllm_is_joint(v, g))
                n = vllm_ask_group(&l, g, n);
        }
    }
    return n;
}

/* The truth: blocks of @p that a request for it (and one more token) would find in the pool. */
static inline size_t vllm_lookup(const struct vllm *v, const struct prompt *p)
{
    uint64_t hashes[VLLM_MAX_CHAIN];

    size_t n = vllm_hashes(v, p, hashes);

    return vllm_hit(v, hashes, n, n) / vllm_parts(v);
}

/* ... and how far the tiers below continue it: their lookup begins where the pool's hit ends. */
static inline size_t vllm_host_lookup(const struct vllm *v, const struct prompt *p)
{
    uint64_t hashes[VLLM_MAX_CHAIN];
    size_t n = vllm_hashes(v, p, hashes), hit = vllm_hit(v, hashes, n, n);
    struct vllm below = *v;

    below.below = true;
    return (hit + vllm_hit(&below, hashes + hit, n - hit, n - hit)) / vllm_parts(v);
}

/* -- requests ---------------------------------------------------------------------------------- */

/* The first block that the next token's attention still reads. */
static inline size_t vllm_first_needed(const struct vllm *v, unsigned group, size_t n_tokens)
{
    const struct vllm_group *g = &v->opts.groups[group];
    size_t skipped = 0;

    if (g->kind == VLLM_SLIDING && n_tokens + 1 > g->window)
        skipped = n_tokens + 1 - g->window;
    else if (g->kind == VLLM_MAMBA && n_tokens)
        skipped = n_tokens - 1;
    else if (g->kind == VLLM_CHUNKED)
        skipped = n_tokens - n_tokens % g->window;
    return skipped / VLLM_BLOCK / vllm_unit(v, group);
}

static inline void vllm_skip_blocks(struct vllm *v, struct vllm_request *r, size_t n_tokens)
{
    for (unsigned g = 0; g < v->opts.n_groups; g++) {
        size_t end = vllm_first_needed(v, g, n_tokens);

        for (size_t i = KV_MIN(end, r->n_blocks[g]); i-- > 0;) {
            if (r->blocks[g][i] == VLLM_NULL)
                break;
            vllm_release(v, r->blocks[g][i]);
            r->blocks[g][i] = VLLM_NULL;
        }
    }
}

/* Blocks of the group that may be cached. A group that drops matches one beyond the match. */
static inline size_t vllm_cacheable(const struct vllm *v, unsigned group, size_t n_tokens,
                                    size_t n_hashes)
{
    size_t n = n_tokens / VLLM_BLOCK, most = vllm_align(v, n);

    if (vllm_drops(v, group) && most)
        most = KV_MIN(most + vllm_unit(v, group), n);
    return KV_MIN(most, n_hashes) / vllm_unit(v, group);
}

/* Whether block @i of a window or a state is among the last that a match of @end hashes needs. */
static inline bool vllm_ends(const struct vllm *v, unsigned group, size_t i, size_t end)
{
    const struct vllm_group *g = &v->opts.groups[group];
    size_t drop = vllm_drops(v, group) && g->kind == VLLM_SLIDING;
    size_t need = g->kind == VLLM_SLIDING ? vllm_need(g) + drop : 1;
    size_t to = vllm_align(v, end) / vllm_unit(v, group) + drop;

    return i < to && i + need >= to;
}

/* Whether a later prompt can resume from what block @i ends, as far as the engine knows. */
static inline bool vllm_retains(const struct vllm *v, const struct vllm_request *r, unsigned group,
                                size_t i)
{
    size_t end = (r->n_prompt - 1) / VLLM_BLOCK, parts = vllm_parts(v);

    if (!v->opts.retention || v->opts.groups[group].kind == VLLM_FULL ||
        v->opts.groups[group].kind == VLLM_CHUNKED)
        return true;
    if (!v->opts.eagle_drop)
        return vllm_ends(v, group, i, end) || (r->junction && vllm_ends(v, group, i, r->junction));
    end = vllm_align(v, end);
    return vllm_ends(v, group, i, end - KV_MIN(end, parts)) ||
           (r->junction && vllm_ends(v, group, i, r->junction));
}

/* Whether block @i can serve a match that ends with a larger block: others are left out of events. */
static inline bool vllm_reachable(const struct vllm *v, unsigned group, size_t i)
{
    size_t parts = vllm_parts(v), drop = vllm_drops(v, group);
    size_t need = vllm_need(&v->opts.groups[group]) + drop;

    return vllm_unit(v, group) == parts || need >= parts ||
           (i >= drop && (i - drop) % parts >= parts - need);
}

static inline void vllm_cache_blocks(struct vllm *v, struct vllm_request *r)
{
    uint64_t hashes[VLLM_MAX_CHAIN];
    size_t n = vllm_hashes(v, &r->prompt, hashes);

    for (unsigned g = 0; g < v->opts.n_groups; g++) {
        size_t full = vllm_cacheable(v, g, r->prompt.n, n);
        struct vllm_range range = {.from = r->n_cached[g], .to = full};

        if (range.from >= range.to)
            continue;
        for (size_t i = range.from; i < range.to; i++) {
            uint16_t block = r->blocks[g][i];

            if (block == VLLM_NULL || !vllm_reachable(v, g, i) || !vllm_retains(v, r, g, i))
                continue;
            range.picked[i] = true;
            range.n++;
            v->blocks[block].hash = hashes[(i + 1) * vllm_unit(v, g) - 1];
            v->blocks[block].group = g;
        }
        vllm_stored(v, &r->prompt, hashes, g, &range);
        r->n_cached[g] = full;
    }
}

/* Room for all of the request's tokens. A recurrent state has a block only where a chunk ends. */
static inline void vllm_grow(struct vllm *v, struct vllm_request *r)
{
    for (unsigned g = 0; g < v->opts.n_groups; g++) {
        bool state = v->opts.groups[g].kind == VLLM_MAMBA;
        size_t size = vllm_unit(v, g) * VLLM_BLOCK, n = (r->prompt.n + size - 1) / size;

        for (; r->n_blocks[g] < n; r->n_blocks[g]++) {
            size_t i = r->n_blocks[g];

            r->blocks[g][i] = state && i + 1 < r->prompt.n / size ? VLLM_NULL : vllm_new_block(v);
        }
    }
}

static inline size_t vllm_needed_blocks(const struct vllm *v, const struct prompt *p)
{
    return v->opts.n_groups * ((p->n + VLLM_BLOCK - 1) / VLLM_BLOCK + 2);
}

/* Announce once more the blocks that a request reuses: kv_cache_report_mode=full. Windows are said
 * to have all of them. */
static inline void vllm_report(struct vllm *v, const struct prompt *p, const uint64_t *hashes,
                               size_t hit)
{
    struct vllm_range range = {0};

    memset(range.picked, true, sizeof(range.picked));
    for (unsigned g = 0; hit && g < v->opts.n_groups; g++) {
        range.to = range.n = hit / vllm_unit(v, g);
        vllm_stored(v, p, hashes, g, &range);
    }
}

/*
 * A new request: reuse what is cached unless it @skips that, compute and cache the rest. Returns it, or
 * NULL: no room.
 */
static inline struct vllm_request *vllm_start_any(struct vllm *v, const struct prompt *p,
                                                  bool report, bool skips)
{
    uint64_t hashes[VLLM_MAX_CHAIN];
    struct vllm_request *r = v->requests;
    size_t n = vllm_hashes(v, p, hashes), hit;

    while (r < v->requests + VLLM_MAX_REQUESTS && r->used)
        r++;
    if (r == v->requests + VLLM_MAX_REQUESTS || v->n_queue < vllm_needed_blocks(v, p))
        return NULL;
    *r = (struct vllm_request){.used = true, .prompt = *p, .n_prompt = p->n};
    hit = skips ? 0 : vllm_hit(v, hashes, n, KV_MIN(n, (p->n - 1) / VLLM_BLOCK));
    if (report)
        vllm_report(v, p, hashes, hit);
    for (unsigned g = 0; g < v->opts.n_groups && !skips; g++) {
        size_t most = v->opts.groups[g].kind == VLLM_FULL
                          ? vllm_group_hit(v, hashes, KV_MIN(n, (p->n - 1) / VLLM_BLOCK), g, false)
                          : 0;

        r->junction = most > hit ? most : r->junction;
    }
    for (unsigned g = 0; g < v->opts.n_groups; g++) {
        size_t unit = vllm_unit(v, g), n_hit = hit / unit,
               first = KV_MIN(vllm_first_needed(v, g, hit * VLLM_BLOCK), n_hit);

        for (size_t i = 0; i < n_hit; i++) {
            r->blocks[g][i] = i < first ? VLLM_NULL : vllm_find(v, hashes[(i + 1) * unit - 1], g);
            if (r->blocks[g][i] != VLLM_NULL)
                vllm_touch(v, r->blocks[g][i]);
        }
        r->n_blocks[g] = r->n_cached[g] = n_hit;
    }
    vllm_grow(v, r);
    vllm_cache_blocks(v, r);
    return r;
}

static inline struct vllm_request *vllm_start(struct vllm *v, const struct prompt *p, bool report)
{
    return vllm_start_any(v, p, report, false);
}

/* One more token. False: no room for it. */
static inline bool vllm_generate(struct vllm *v, struct vllm_request *r, uint32_t token)
{
    if (r->prompt.n == PROMPT_MAX || v->n_queue < v->opts.n_groups)
        return false;
    vllm_skip_blocks(v, r, r->prompt.n);
    r->prompt.tokens[r->prompt.n++] = token;
    vllm_grow(v, r);
    vllm_cache_blocks(v, r);
    return true;
}

static inline void vllm_finish(struct vllm *v, struct vllm_request *r)
{
    for (unsigned g = 0; g < v->opts.n_groups; g++) {
        for (size_t i = r->n_blocks[g]; i-- > 0;)
            vllm_release(v, r->blocks[g][i]);
    }
    r->used = false;
}

/* Begin to copy block @at of the prompt to the host. Returns false: no more copies at a time. */
static inline bool vllm_begin_copy(struct vllm *v, const struct prompt *p, size_t at,
                                   uint16_t block)
{
    if (v->n_copying == VLLM_MAX_COPYING)
        return false;
    vllm_touch(v, block);
    v->copying[v->n_copying++] = (struct vllm_copying){*p, at, block};
    return true;
}

/* The oldest copy is done. */
static inline void vllm_end_copy(struct vllm *v)
{
    const struct vllm_copying *copy = &v->copying[0];
    uint64_t hashes[VLLM_MAX_CHAIN];

    (void)vllm_hashes(v, &copy->prompt, hashes);
    vllm_offload(v, &v->host, &copy->prompt, hashes, copy->at, v->blocks[copy->block].group);
    vllm_release(v, copy->block);
    memmove(v->copying, v->copying + 1, --v->n_copying * sizeof(v->copying[0]));
}

/* Copies of a running request's cached blocks go to the tiers below, some of them at once. */
static inline void vllm_offload_request(struct vllm *v, const struct vllm_request *r,
                                        uint64_t *random)
{
    uint64_t hashes[VLLM_MAX_CHAIN];
    size_t n = vllm_hashes(v, &r->prompt, hashes);

    while (v->n_copying && unit_below(random, 4))
        vllm_end_copy(v);
    for (size_t i = 0; i < n; i++) {
        for (unsigned g = 0; g < v->opts.n_groups; g++) {
            if (vllm_has(v, hashes[i], g) && unit_below(random, 8) == 0 &&
                vllm_begin_copy(v, &r->prompt, i, vllm_find(v, hashes[i], g)))
                continue;
            if (vllm_has(v, hashes[i], g) && unit_below(random, 3))
                vllm_offload(v, &v->host, &r->prompt, hashes, i, g);
            if (v->opts.host_owner && vllm_has(v, hashes[i], g) && unit_below(random, 3) == 0)
                vllm_offload(v, &v->owner, &r->prompt, hashes, i, g);
        }
    }
}

static inline void vllm_cleared(struct vllm *v, struct kv_buf *out)
{
    kv_msgpack_put_map(out, 1);
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "AllBlocksCleared");
    v->n_events++;
}

/*
 * reset_connector: the pool of the host forgets everything, whether or not the device's could. Nothing
 * tells that there is such a pool before it has announced a block.
 */
static inline void vllm_reset_host(struct vllm *v)
{
    if (!v->opts.host_pool || !v->host_used)
        return;
    v->host.n = 0;
    vllm_cleared(v, &v->host_events);
}

/*
 * reset_prefix_cache: the pool forgets everything, the tiers below nothing. Only while idle: running
 * requests are preempted before.
 */
static inline void vllm_reset(struct vllm *v)
{
    for (size_t i = 0; i < VLLM_MAX_REQUESTS; i++) {
        if (v->requests[i].used)
            vllm_finish(v, &v->requests[i]);
    }
    while (v->n_copying) /* given up */
        vllm_release(v, v->copying[--v->n_copying].block);
    for (uint16_t i = 0; i < v->opts.n_blocks; i++)
        v->blocks[i].hash = 0;
    vllm_cleared(v, &v->events);
    if (v->opts.lives_below)
        vllm_cleared(v, &v->events);
}

#endif
