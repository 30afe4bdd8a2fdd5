// SPDX-License-Identifier: Apache-2.0
/*
 * From bytes to operations. One pass over the payload: an event is read into a struct
 * (raw_event.c), the rules below decide what becomes of it, and its blocks are hashed while its
 * tokens are still in the nearest cache. All memory is the reader's and reused.
 *
 *     payload --> raw event --> main group? local? tier? dense? --> salt --> hashes --> op
 *                     |                 |                            |
 *                     `--- skipped and counted by reason ------------'
 *
 * State kept between batches: the kinds of each rank's cache groups, the sources (whose cache an
 * event is about), and the salts of salted chains.
 */
#include "kv_event.h"

#include <stdlib.h>
#include <strings.h>

#include "event/extra_keys.h"
#include "event/reader.h"

#define DEFAULT_MAX_EVENTS 65536
#define DEFAULT_MAX_TOKENS (4u << 20)
#define DEFAULT_MAX_SALTED (1u << 20)
#define KEEP_BYTES (4u << 20) /* memory above this is given back when it isn't needed */

const char *kve_skip_name(enum kve_skip skip)
{
    static const char *const names[KVE_N_SKIPS] = {
        [KVE_SKIP_MALFORMED] = "malformed",
        [KVE_SKIP_UNKNOWN_TYPE] = "unknown_type",
        [KVE_SKIP_BLOCK_SIZE] = "block_size",
        [KVE_SKIP_TOKEN_COUNT] = "token_count",
        [KVE_SKIP_DUPLICATE_HASH] = "duplicate_hash",
        [KVE_SKIP_GROUP] = "group",
        [KVE_SKIP_MEDIUM] = "medium",
        [KVE_SKIP_REMOTE] = "remote",
        [KVE_SKIP_NAMESPACE] = "namespace",
        [KVE_SKIP_TOO_LARGE] = "too_large",
        [KVE_SKIP_SOURCE] = "source",
        [KVE_SKIP_EXTRA_KEYS] = "extra_keys",
    };

    return (unsigned)skip < KVE_N_SKIPS ? names[skip] : "unknown";
}

/* -- life -------------------------------------------------------------------------------------- */

int kve_reader_create(const struct kve_reader_opts *opts, struct kve_reader **ret)
{
    struct kve_reader *reader;

    if (!ret || !kv_sized(opts, "kve_reader_opts") || !KV_OPT(opts, block_size, 0))
        return -EINVAL;
    reader = calloc(1, sizeof(*reader));
    if (!reader)
        return -ENOMEM;
    reader->block_size = opts->block_size;
    reader->rank = KV_OPT(opts, rank, 0);
    reader->max_events = KV_OPT(opts, max_events, DEFAULT_MAX_EVENTS);
    reader->ignore_mm_keys = KV_OPT(opts, ignore_mm_keys, false);
    reader->ignore_mm_offsets = KV_OPT(opts, ignore_mm_offsets, false);
    reader->scratch.max_items = KV_OPT(opts, max_tokens, DEFAULT_MAX_TOKENS);
    kve_unique_init(&reader->unique);
    kve_salts_init(&reader->salts, KV_OPT(opts, max_salted, DEFAULT_MAX_SALTED));
    *ret = reader;
    return 0;
}

void kve_reader_destroy(struct kve_reader *reader)
{
    if (!reader)
        return;
    free(reader->scratch.hashes);
    free(reader->scratch.tokens);
    free(reader->locals);
    free(reader->ops);
    free(reader->starts);
    free(reader->blocks);
    free(reader->remaining);
    kve_unique_fini(&reader->unique);
    kve_salts_fini(&reader->salts);
    free(reader);
}

void kve_reader_reset(struct kve_reader *reader)
{
    kve_sources_reset(&reader->sources);
    kve_salts_reset(&reader->salts);
    reader->saw_salt = reader->saw_adapter = reader->saw_objects = false;
    reader->pool_tiers = 0;
    reader->saw_offload = false;
}

int kve_reader_source(const struct kve_reader *reader, uint32_t i, struct kve_source *ret)
{
    if (i && i >= reader->sources.n)
        return -ENOENT;
    *ret = i ? reader->sources.items[i] : (struct kve_source){.kind = KVE_SOURCE_MAIN, .stride = 1};
    return 0;
}

bool kve_reader_has_main(const struct kve_reader *reader, uint32_t rank)
{
    return kve_sources_has_main(&reader->sources, rank);
}

bool kve_reader_skips_group(const struct kve_reader *reader)
{
    return reader->sources.unfollowed;
}

/* One huge batch must not keep its memory for good. */
static void give_back(void *memory, size_t *capacity, size_t used, size_t bytes)
{
    void *old;

    if (*capacity * bytes <= KEEP_BYTES || used > *capacity / 8)
        return;
    memcpy(&old, memory, sizeof(old));
    free(old);
    old = NULL;
    memcpy(memory, &old, sizeof(old));
    *capacity = 0;
}

static void start_batch(struct kve_reader *reader)
{
    struct kve_scratch *scratch = &reader->scratch;

    give_back(&reader->blocks, &reader->blocks_capacity, reader->n_blocks, sizeof(*reader->blocks));
    give_back(&reader->locals, &reader->locals_capacity, reader->n_blocks, sizeof(*reader->locals));
    give_back(&scratch->hashes, &scratch->hashes_capacity, scratch->n_hashes + reader->n_blocks,
              sizeof(*scratch->hashes));
    give_back(&reader->remaining, &reader->remaining_capacity, scratch->n_hashes,
              sizeof(*reader->remaining));
    give_back(&scratch->tokens, &scratch->tokens_capacity, reader->n_blocks * reader->block_size,
              sizeof(*scratch->tokens));
    give_back(&reader->unique.slots, &reader->unique.capacity, 2 * reader->n_blocks,
              sizeof(*reader->unique.slots));
    reader->n_ops = reader->n_blocks = scratch->n_hashes = 0;
    reader->n_clears = 0;
    reader->pool_began = false;
}

/* The current event's hashes; none were ever there when it is NULL. */
static const uint64_t *event_hashes(const struct kve_reader *reader)
{
    return reader->scratch.hashes ? reader->scratch.hashes + reader->scratch.n_hashes : NULL;
}

/* -- rules ------------------------------------------------------------------------------------- */

static bool str_is(struct kv_str s, const char *text)
{
    return strlen(text) == s.len && strncasecmp(s.p, text, s.len) == 0;
}

/* The tier of a storage medium, by the names that engines have for it; none is the device. */
static int tier_of(struct kv_str medium)
{
    static const struct {
        const char *name;
        enum kv_tier tier;
    } media[] = {
        {"GPU", KV_TIER_DEVICE},       {"CPU", KV_TIER_HOST},        {"CPU_PINNED", KV_TIER_HOST},
        {"CPU_TIER1", KV_TIER_HOST},   {"CPU_TIER2", KV_TIER_DISK},  {"DISK", KV_TIER_DISK},
        {"NVME", KV_TIER_DISK},        {"STORAGE", KV_TIER_DISK},    {"EXTERNAL", KV_TIER_EXTERNAL},
        {"NETWORK", KV_TIER_EXTERNAL}, {"REMOTE", KV_TIER_EXTERNAL}, {"SHARED", KV_TIER_EXTERNAL},
        {"DEVICE", KV_TIER_DEVICE},
    };

    if (!medium.len)
        return KV_TIER_DEVICE;
    for (size_t i = 0; i < KV_COUNT(media); i++) {
        if (str_is(medium, media[i].name))
            return (int)media[i].tier;
    }
    return -1;
}

/* vLLM's names of the tiers below its GPU pool. Its Mooncake connector writes them in small
 * letters. */
static bool is_vllm_tier(struct kv_str medium)
{
    return str_is(medium, "CPU") || str_is(medium, "STORAGE");
}

/*
 * vLLM's clear empties its GPU pool alone; the tiers that it names CPU and STORAGE keep their
 * blocks. Engines that name their tiers otherwise (SGLang) clear them all.
 */
static void note_medium(struct kve_reader *reader, struct kv_str medium, enum kv_tier tier)
{
    if (tier != KV_TIER_DEVICE && !is_vllm_tier(medium))
        reader->engine_tiers |= 1u << tier;
}

/*
 * Note whose pool announces a vLLM tier. SimpleCPUOffloadConnector has a block pool like the
 * device's below it, and calls its blocks LOCAL; other connectors say nothing of their CPU tier.
 * vLLM puts the connector's events behind all those of the device into a batch.
 */
static void note_pool(struct kve_reader *reader, const struct kve_raw_event *ev, enum kv_tier tier)
{
    if (tier == KV_TIER_DEVICE) {
        for (size_t i = 0; reader->n_clears > 1 && i < reader->n_ops; i++) {
            if (reader->ops[i].type != KVE_OP_CLEAR || !reader->ops[i].unsure)
                continue;
            reader->ops[i].tiers = 1u << KV_TIER_DEVICE | reader->engine_tiers;
            reader->ops[i].unsure = false;
        }
        reader->n_clears = 0;
        reader->pool_began = false;
    } else if (is_vllm_tier(ev->medium) && !ev->ownership.len) {
        if (str_is(ev->locality, "LOCAL"))
            reader->pool_tiers |= 1u << tier;
        else
            reader->saw_offload = true;
        reader->pool_began = true;
    }
}

/* Rules that stored and removed events share: source and tier. Returns 0 or KVE_SKIP_RC(...). */
static int common_rules(struct kve_reader *reader, const struct kve_raw_event *ev,
                        struct kve_op *op)
{
    int tier, source;

    if (!ev->has_hashes || (ev->has_group && ev->group > UINT32_MAX))
        return KVE_SKIP_RC(MALFORMED);
    source = kve_sources_of(&reader->sources, op->rank, ev, reader->block_size);
    if (source < 0)
        return -source;
    if (ev->locality.len && !str_is(ev->locality, "LOCAL"))
        return KVE_SKIP_RC(REMOTE);
    tier = tier_of(ev->medium);
    if (tier < 0)
        return KVE_SKIP_RC(MEDIUM);
    if (!source)
        note_medium(reader, ev->medium, (enum kv_tier)tier);
    note_pool(reader, ev, (enum kv_tier)tier);
    op->source = (uint32_t)source;
    op->tier = (enum kv_tier)tier;
    return 0;
}

static bool is_window(const struct kve_reader *reader, const struct kve_op *op)
{
    return op->source && reader->sources.items[op->source].kind == KVE_SOURCE_WINDOW;
}

/* Whether the source is a window beside a main group, whose blocks have salts and places
 * already. */
static bool is_beside_main(const struct kve_reader *reader, const struct kve_op *op)
{
    return is_window(reader, op) && kve_sources_has_main(&reader->sources, op->rank);
}

/*
 * Whether a window's event says where its blocks lie, and nothing else would. Mostly one leaves
 * blocks out, so its tokens don't tell whose they are; its hashes do where a main group has them,
 * too.
 */
static bool places_window(const struct kve_reader *reader, const struct kve_raw_event *ev,
                          const struct kve_op *op)
{
    return is_window(reader, op) && !is_beside_main(reader, op) &&
           ev->block_size == reader->block_size &&
           ev->n_tokens / reader->block_size == ev->n_hashes;
}

/* -- operations -------------------------------------------------------------------------------- */

static int add_op(struct kve_reader *reader, const struct kve_op *op, size_t start)
{
    size_t need = reader->n_ops + 1;

    if (kve_grow(&reader->ops, &reader->ops_capacity, need, sizeof(*reader->ops)) < 0 ||
        kve_grow(&reader->starts, &reader->starts_capacity, need, sizeof(*reader->starts)) < 0)
        return -ENOMEM;
    reader->ops[reader->n_ops] = *op;
    reader->starts[reader->n_ops] = start;
    reader->n_ops = need;
    return 0;
}

/* An operation on hashes as they lie in the scratch, which makes them part of the batch. */
static int add_hashes_op(struct kve_reader *reader, struct kve_op *op, size_t n)
{
    size_t start = reader->scratch.n_hashes;
    int rc;

    if (!n)
        return 0;
    op->n = n;
    rc = add_op(reader, op, start);
    if (!rc)
        reader->scratch.n_hashes += n;
    return rc;
}

static void set_pointers(struct kve_reader *reader)
{
    for (size_t i = 0; i < reader->n_ops; i++) {
        struct kve_op *op = &reader->ops[i];

        if (op->type == KVE_OP_STORE)
            op->blocks = reader->blocks + reader->starts[i];
        else if (op->type != KVE_OP_CLEAR)
            op->hashes = reader->scratch.hashes + reader->starts[i];
        if (op->remaining)
            op->remaining = reader->remaining + reader->starts[i];
    }
}

/* -- salts ------------------------------------------------------------------------------------- */

/* Compute the term that the event's salt adds to its seed, 0 for none. False: the salt is
 * unknown. */
static bool resolve_salt(struct kve_reader *reader, uint32_t rank, const struct kve_raw_event *ev,
                         const uint64_t *hashes, uint64_t *ret)
{
    struct kv_str salt = kve_extra_salt(ev);
    const struct kve_salt_entry *entry;

    *ret = kve_seed(NULL, 0, salt.p, salt.len) - KVE_SEED;
    if (salt.len || !ev->has_parent || !reader->salts.n)
        return true;
    entry = kve_salts_find(&reader->salts, rank, ev->parent);
    if (entry) {
        *ret = entry->salt;
        return !entry->ambiguous;
    }
    /* No salted parent is known, yet the block is: an event in between was lost. */
    for (size_t i = 0; i < ev->n_hashes; i++) {
        if (kve_salts_find(&reader->salts, rank, hashes[i]))
            return false;
    }
    return true;
}

static void remember_salt(struct kve_reader *reader, const struct kve_op *op,
                          const uint64_t *hashes, size_t n, uint64_t salt)
{
    if (!salt && !reader->salts.n)
        return;
    for (size_t i = 0; i < n; i++) {
        if (salt || kve_salts_find(&reader->salts, op->rank, hashes[i]))
            kve_salts_put(&reader->salts, op->rank, hashes[i], salt, op->tier);
    }
}

/* -- stored ------------------------------------------------------------------------------------ */

/* Blocks named without their tokens: known ones are now in this tier too. */
static int store_known(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    const uint64_t *hashes = event_hashes(reader);

    op->type = KVE_OP_STORE_KNOWN;
    op->has_parent = false;
    op->parent = 0;
    for (size_t i = 0; i < ev->n_hashes && reader->salts.n && !is_beside_main(reader, op); i++) {
        const struct kve_salt_entry *entry = kve_salts_find(&reader->salts, op->rank, hashes[i]);

        if (entry)
            kve_salts_put(&reader->salts, op->rank, hashes[i], entry->salt, op->tier);
    }
    return add_hashes_op(reader, op, ev->n_hashes);
}

/* Blocks from the first one on whose keys aren't understood are left out: *@n is the number
 * before. */
static int hash_with_extras(struct kve_reader *reader, const struct kve_raw_event *ev,
                            uint64_t seed, size_t *n, struct kve_op *op)
{
    uint64_t mm[KVE_MAX_MM];
    struct kve_extra_walk walk;

    kve_extra_walk_init(&walk, ev);
    walk.no_ids = reader->ignore_mm_keys;
    walk.no_offsets = reader->ignore_mm_offsets;
    for (size_t i = 0; i < *n; i++) {
        int n_mm = kve_extra_walk_next(&walk, mm);

        if (n_mm < 0) {
            *n = n_mm == -EINVAL ? i : 0;
            return n_mm == -EINVAL ? KVE_SKIP_RC(EXTRA_KEYS) : KVE_SKIP_RC(TOO_LARGE);
        }
        reader->locals[i] = kve_hash_block(seed, reader->scratch.tokens + i * reader->block_size,
                                           reader->block_size + op->lookahead, mm, (size_t)n_mm);
        op->placed = walk.placed;
        reader->saw_objects |= n_mm > 0;
    }
    return 0;
}

/* Returns 0, -ENOMEM, or KVE_SKIP_RC(...) with *@n blocks that may be stored all the same. */
static int hash_blocks(struct kve_reader *reader, const struct kve_raw_event *ev, uint64_t seed,
                       size_t *n, struct kve_op *op)
{
    size_t wanted = *n;
    int rc =
        kve_raw_lookahead(ev, reader->scratch.tokens, wanted, reader->block_size, &op->lookahead);

    *n = 0;
    if (rc)
        return rc;
    if (kve_grow(&reader->locals, &reader->locals_capacity, wanted, sizeof(*reader->locals)) < 0 ||
        kve_grow(&reader->blocks, &reader->blocks_capacity, reader->n_blocks + wanted,
                 sizeof(*reader->blocks)) < 0)
        return -ENOMEM;
    *n = wanted;
    if (ev->extra_keys.p || ev->mm_infos.p)
        return hash_with_extras(reader, ev, seed, n, op);
    kve_hash_tokens(seed, reader->scratch.tokens, wanted * reader->block_size + op->lookahead,
                    reader->block_size, op->lookahead, reader->locals);
    return 0;
}

/*
 * How many of the event's blocks its tokens cover. A few tokens too many (part of a further block)
 * harm nothing; a block's worth and more leaves open which blocks the hashes are: none is taken.
 */
static int covered_blocks(const struct kve_reader *reader, const struct kve_raw_event *ev,
                          size_t *ret)
{
    size_t full = ev->n_tokens / reader->block_size;

    *ret = full > ev->n_hashes ? 0 : full;
    return full == ev->n_hashes ? 0 : KVE_SKIP_RC(TOKEN_COUNT);
}

/* The dense event: seed, hashes, op. Returns 0, KVE_SKIP_RC(...) or -ENOMEM. */
static int store_blocks(struct kve_reader *reader, const struct kve_raw_event *ev,
                        struct kve_op *op, size_t n)
{
    const uint64_t *hashes = event_hashes(reader);
    struct kv_block *blocks;
    struct kv_str adapter = kve_extra_adapter(ev);
    uint64_t salt, seed;
    int skipped, rc;

    if (!resolve_salt(reader, op->rank, ev, hashes, &salt))
        return KVE_SKIP_RC(NAMESPACE);
    rc = salt ? kve_salts_reserve(&reader->salts, n) : 0;
    if (rc)
        return rc == -ENOSPC ? KVE_SKIP_RC(NAMESPACE) : rc;
    reader->saw_salt |= salt != 0;
    reader->saw_adapter |= adapter.len > 0;
    seed = kve_seed(adapter.p, adapter.len, NULL, 0) + salt;
    skipped = hash_blocks(reader, ev, seed, &n, op);
    if (skipped && (skipped < 0 || !n))
        return skipped;
    op->n = n;
    rc = add_op(reader, op, reader->n_blocks);
    if (rc)
        return rc;
    blocks = reader->blocks + reader->n_blocks;
    for (size_t i = 0; i < n; i++)
        blocks[i] = (struct kv_block){hashes[i], reader->locals[i]};
    reader->n_blocks += n;
    remember_salt(reader, op, hashes, n, salt);
    return skipped;
}

/*
 * vLLM's offloading connectors announce blocks in their tiers without extra keys (some without the
 * adapter), salted or not. Their hashes name known blocks then; blocks that aren't known stay out,
 * unless this publisher has shown no salt, no multimodal object and no adapter yet.
 */
static bool hides_namespace(const struct kve_reader *reader, const struct kve_raw_event *ev,
                            const struct kve_op *op)
{
    if (op->tier == KV_TIER_DEVICE || ev->extra_keys.p || ev->cache_salt.len || ev->mm_infos.p ||
        !is_vllm_tier(ev->medium))
        return false;
    return reader->saw_salt || reader->saw_objects || (reader->saw_adapter && !ev->lora_name.len);
}

static int add_stored(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    const uint64_t *hashes = event_hashes(reader);
    int rc = common_rules(reader, ev, op), short_of;
    bool window = !rc && is_window(reader, op) && !places_window(reader, ev, op);
    size_t n;

    if (rc)
        return rc;
    op->type = KVE_OP_STORE;
    op->has_parent = ev->has_parent;
    op->parent = ev->parent;
    if (!window && ev->block_size != reader->block_size && (ev->block_size || ev->n_tokens))
        return KVE_SKIP_RC(BLOCK_SIZE);
    if (!ev->n_hashes)
        return 0;
    rc = kve_unique_check(&reader->unique, ev->has_parent ? &ev->parent : NULL, hashes,
                          ev->n_hashes);
    if (rc <= 0)
        return rc ? rc : KVE_SKIP_RC(DUPLICATE_HASH);
    if (window || !ev->n_tokens || hides_namespace(reader, ev, op))
        return store_known(reader, ev, op);
    short_of = covered_blocks(reader, ev, &n);
    rc = n ? store_blocks(reader, ev, op, n) : 0;
    return rc ? rc : short_of;
}

/* -- removed, cleared -------------------------------------------------------------------------- */

/* The copies that are left, beside the hashes in the scratch. Returns 0, KVE_SKIP_RC(...),
 * -ENOMEM. */
static int take_remaining(struct kve_reader *reader, const struct kve_raw_event *ev,
                          struct kve_op *op)
{
    static const uint32_t told; /* set_pointers puts the place here, which moves until then */
    size_t start = reader->scratch.n_hashes;

    if (!ev->remaining.p || !ev->n_hashes)
        return 0;
    if (kve_grow(&reader->remaining, &reader->remaining_capacity, start + ev->n_hashes,
                 sizeof(*reader->remaining)) < 0)
        return -ENOMEM;
    op->remaining = &told;
    return kve_raw_remaining(ev, reader->remaining + start);
}

static int add_removed(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    const uint64_t *hashes = event_hashes(reader);
    int rc = common_rules(reader, ev, op);

    op->type = KVE_OP_REMOVE;
    if (!rc)
        rc = take_remaining(reader, ev, op);
    if (rc)
        return rc;
    for (size_t i = 0; i < ev->n_hashes && reader->salts.n && !is_beside_main(reader, op); i++)
        kve_salts_remove(&reader->salts, op->rank, hashes[i], op->tier);
    return add_hashes_op(reader, op, ev->n_hashes);
}

/*
 * Whether a clear is the pool's below the device. Behind an event of that pool in the same batch it
 * is. Of several clears in a row the first is the device's; the others may be either's, and
 * *@ret_unsure is set: then the pool's blocks are forgotten rather than claimed.
 */
static bool is_pool_clear(struct kve_reader *reader, bool *ret_unsure)
{
    if (!reader->pool_tiers || reader->saw_offload)
        return false;
    if (reader->pool_began)
        return true;
    *ret_unsure = ++reader->n_clears > 1;
    return *ret_unsure;
}

/* Add a clear: of all tiers for another owner, of the tiers that its engine means for the
 * publisher. */
static int add_cleared(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    int source = kve_sources_owner(&reader->sources, ev->ownership);

    if (source < 0)
        return -source;
    op->type = KVE_OP_CLEAR;
    op->source = (uint32_t)source;
    op->tiers = source ? (1u << KV_N_TIERS) - 1 : 1u << KV_TIER_DEVICE | reader->engine_tiers;
    if (!source && is_pool_clear(reader, &op->unsure))
        op->tiers = reader->pool_tiers;
    else if (!source)
        kve_salts_clear(&reader->salts, op->rank, op->tiers == (1u << KV_N_TIERS) - 1);
    return add_op(reader, op, 0);
}

/* -- batches ----------------------------------------------------------------------------------- */

/* Returns 0, KVE_SKIP_RC(...), -EPROTO (not even msgpack) or -ENOMEM. */
static int read_event(struct kve_reader *reader, struct kv_msgpack *m, uint32_t rank)
{
    const uint8_t *before = m->p;
    struct kve_raw_event ev;
    struct kve_op op = {0};
    int rc = kve_raw_event_read(m, &reader->scratch, &ev);

    if (rc) {
        /* To the end of the event, wherever its reading stopped. */
        m->p = before;
        m->error.code = 0;
        kv_msgpack_skip(m);
        return kv_msgpack_failed(m) ? -EPROTO : rc;
    }
    op.rank = ev.has_rank ? ev.rank : rank;
    switch (ev.type) {
    case KVE_RAW_STORED:
        return add_stored(reader, &ev, &op);
    case KVE_RAW_REMOVED:
        return add_removed(reader, &ev, &op);
    case KVE_RAW_CLEARED:
        return add_cleared(reader, &ev, &op);
    case KVE_RAW_IGNORED:
        return 0;
    case KVE_RAW_UNKNOWN:
        return KVE_SKIP_RC(UNKNOWN_TYPE);
    default:
        return KVE_SKIP_RC(MALFORMED);
    }
}

static int read_events(struct kve_reader *reader, struct kv_msgpack *m, struct kve_batch *batch)
{
    uint32_t n = kv_msgpack_array(m);
    uint32_t rank = batch->has_rank ? batch->rank : reader->rank;

    batch->n_events = n;
    for (uint32_t i = 0; i < n; i++) {
        int rc = KVE_SKIP_RC(TOO_LARGE);

        if (i < reader->max_events)
            rc = read_event(reader, m, rank);
        else
            kv_msgpack_skip(m);
        if (rc < 0)
            return rc;
        if (rc > 0)
            batch->skipped[rc - 1]++;
    }
    return kv_msgpack_failed(m) ? -EPROTO : 0;
}

/* Seconds as a float; whole numbers of today's size are milliseconds. */
static double take_timestamp(struct kv_msgpack *m)
{
    enum kv_msgpack_type type = kv_msgpack_peek(m);
    double value;

    if (type == KV_MSGPACK_NIL || type == KV_MSGPACK_STR) {
        kv_msgpack_skip(m);
        return 0;
    }
    value = kv_msgpack_double(m);
    return type != KV_MSGPACK_FLOAT && value >= 1e11 ? value / 1000 : value;
}

/* nil, or a number that is taken for unsigned (some publishers write a signed 32-bit one). */
static void take_rank(struct kv_msgpack *m, struct kve_batch *batch)
{
    int64_t rank;

    if (kv_msgpack_nil(m))
        return;
    rank = kv_msgpack_i64(m);
    if (rank < INT32_MIN || rank > UINT32_MAX)
        kv_msgpack_fail(m, -EPROTO, "no rank");
    batch->has_rank = true;
    batch->rank = (uint32_t)rank;
}

/*
 * The rank stands behind the events, but is needed for them; reading past them first would cost as
 * much as decoding them. In a batch of three the rank is the last thing, so its bytes can be told
 * from the end: one byte that can't belong to a longer number. When that isn't certain, or the
 * batch has another shape, the events are passed over first.
 */
static bool rank_from_end(const struct kv_msgpack *m, struct kve_batch *batch)
{
    size_t left = (size_t)(m->end - m->p);
    const uint8_t *end = m->end;
    uint8_t last;

    if (left < 10)
        return false;
    last = end[-1];
    if (last != 0xc0 && last >= 0x80)
        return false;
    for (unsigned k = 0; k < 4; k++) {
        uint8_t before = end[-1 - (1 << k)];

        if (before == 0xcc + k || before == 0xd0 + k)
            return false;
    }
    batch->has_rank = last != 0xc0;
    batch->rank = batch->has_rank ? last : 0;
    return true;
}

/* [timestamp, events, rank, ...]. @m is left at the events when they have yet to be read. */
static int read_array_batch(struct kve_reader *reader, struct kv_msgpack *m,
                            struct kve_batch *batch)
{
    uint32_t n = kv_msgpack_array(m);
    const uint8_t *events;
    struct kve_batch told = {0};
    bool early;
    int rc;

    if (n < 2)
        return -EPROTO;
    batch->timestamp = take_timestamp(m);
    events = m->p;
    early = n == 2 || (n == 3 && rank_from_end(m, batch));
    if (early) {
        rc = read_events(reader, m, batch);
        if (rc)
            return rc;
    } else {
        kv_msgpack_skip(m);
    }
    if (n > 2)
        take_rank(m, &told);
    for (uint32_t i = 3; i < n && !kv_msgpack_failed(m); i++)
        kv_msgpack_skip(m);
    if (kv_msgpack_failed(m) || m->p != m->end)
        return -EPROTO;
    if (early)
        return n == 2 || (told.has_rank == batch->has_rank && told.rank == batch->rank) ? 0
                                                                                        : -EPROTO;
    batch->has_rank = told.has_rank;
    batch->rank = told.rank;
    m->p = events;
    return read_events(reader, m, batch);
}

/* {"ts": ..., "events": [...], "data_parallel_rank": ...}, in any order */
static int read_map_batch(struct kve_reader *reader, struct kv_msgpack *m, struct kve_batch *batch)
{
    const uint8_t *events = NULL;

    for (uint32_t n = kv_msgpack_map(m); n && !kv_msgpack_failed(m); n--) {
        struct kv_str key = {"", 0};

        if (kv_msgpack_peek(m) == KV_MSGPACK_STR)
            key = kv_msgpack_str(m);
        else
            kv_msgpack_skip(m);
        if (kv_str_eq(key, "ts")) {
            batch->timestamp = take_timestamp(m);
        } else if (kv_str_eq(key, "data_parallel_rank") || kv_str_eq(key, "dp_rank") ||
                   kv_str_eq(key, "attn_dp_rank")) {
            take_rank(m, batch);
        } else {
            if (kv_str_eq(key, "events"))
                events = m->p;
            kv_msgpack_skip(m);
        }
    }
    if (kv_msgpack_failed(m) || m->p != m->end || !events)
        return -EPROTO;
    m->p = events;
    return read_events(reader, m, batch);
}

int kve_reader_decode(struct kve_reader *reader, const void *payload, size_t len,
                      struct kve_batch *ret)
{
    struct kve_batch batch = {0};
    struct kv_msgpack m;
    int rc = -EPROTO;

    start_batch(reader);
    kv_msgpack_init(&m, payload, len);
    if (kv_msgpack_peek(&m) == KV_MSGPACK_ARRAY)
        rc = read_array_batch(reader, &m, &batch);
    else if (kv_msgpack_peek(&m) == KV_MSGPACK_MAP)
        rc = read_map_batch(reader, &m, &batch);
    if (rc)
        return rc;
    set_pointers(reader);
    batch.ops = reader->ops;
    batch.n_ops = reader->n_ops;
    batch.n_blocks = reader->n_blocks + reader->scratch.n_hashes;
    *ret = batch;
    return 0;
}
