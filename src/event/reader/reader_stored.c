// SPDX-License-Identifier: Apache-2.0
/* Stored events: find the salt of the chain, hash the blocks, add an operation. */
#include "event/reader/reader.h"

#include "event/wire/extra_keys.h"

/* -- salts ------------------------------------------------------------------------------------- */

/*
 * Compute the term that the event's salt adds to its seed, 0 for none. Returns false when the salt
 * is unknown.
 */
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
    /* The parent has no known salt, but a block has: an event in between was lost. */
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

/* -- blocks ------------------------------------------------------------------------------------ */

/* Add blocks without tokens: the index adds this tier to the ones it knows. */
static int store_known(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    const uint64_t *hashes = kve_event_hashes(reader);

    op->type = KVE_OP_STORE_KNOWN;
    if (kve_is_window(reader, op) && reader->sources.items[op->source].parts > 1) {
        /*
         * An event that tells no kind of cache counts as one of the group's own. If the size of its
         * blocks isn't the group's, it is about none of them: n_covered stays 0.
         */
        if (ev->block_size &&
            ev->block_size * reader->sources.items[op->source].parts == reader->block_size)
            op->n_covered = ev->n_tokens / ev->block_size;
        op->lookahead = ev->lookahead.p != NULL;
    } else {
        op->has_parent = false;
        op->parent = 0;
    }
    for (size_t i = 0; i < ev->n_hashes && reader->salts.n && !kve_is_beside_main(reader, op);
         i++) {
        const struct kve_salt_entry *entry = kve_salts_find(&reader->salts, op->rank, hashes[i]);

        if (entry)
            kve_salts_put(&reader->salts, op->rank, hashes[i], entry->salt, op->tier);
    }
    return kve_add_hashes_op(reader, op, ev->n_hashes);
}

/*
 * Hash blocks with extra keys. Stops at the first block with a key of unknown meaning: *@n is the
 * number of blocks before it. Where there are more blocks than entries, or an entry without a block,
 * nothing tells which belong together: *@n is 0.
 */
static int hash_with_extras(struct kve_reader *reader, const struct kve_raw_event *ev,
                            uint64_t seed, size_t *n, struct kve_op *op)
{
    uint64_t mm[KVE_MAX_MM];
    struct kve_extra_walk walk;

    kve_extra_walk_init(&walk, ev);
    if (walk.left < ev->n_hashes) {
        *n = 0;
        return KVE_SKIP_RC(MALFORMED);
    }
    walk.no_ids = reader->ignore_mm_keys;
    walk.no_offsets = reader->ignore_mm_offsets;
    for (size_t i = 0; i < *n; i++) {
        int n_mm = kve_extra_walk_next(&walk, mm);

        if (n_mm < 0) {
            *n = n_mm == -E2BIG ? 0 : i;
            return n_mm == -E2BIG    ? KVE_SKIP_RC(TOO_LARGE)
                   : n_mm == -EINVAL ? KVE_SKIP_RC(EXTRA_KEYS)
                                     : KVE_SKIP_RC(MALFORMED);
        }
        reader->locals[i] = kve_hash_block(seed, reader->scratch.tokens + i * reader->block_size,
                                           reader->block_size + op->lookahead, mm, (size_t)n_mm);
        op->placed = walk.placed;
        reader->saw_objects |= n_mm > 0;
    }
    if (*n < ev->n_hashes || kve_extra_walk_is_over(&walk))
        return 0;
    *n = 0;
    return KVE_SKIP_RC(MALFORMED);
}

/*
 * Hash the event's blocks. Returns 0, -ENOMEM, or KVE_SKIP_RC(...) with *@n blocks that may still
 * be stored.
 */
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
 * Compute how many of the event's blocks its tokens cover. Tokens of a further, incomplete block
 * are ignored. With a whole block too many, the hashes' blocks are ambiguous: *@ret is 0.
 */
static int covered_blocks(const struct kve_reader *reader, const struct kve_raw_event *ev,
                          size_t *ret)
{
    size_t full = ev->n_tokens / reader->block_size;

    *ret = full > ev->n_hashes ? 0 : full;
    return full == ev->n_hashes ? 0 : KVE_SKIP_RC(TOKEN_COUNT);
}

/*
 * Store blocks with tokens: find the salt, hash, add the operation. Returns 0, KVE_SKIP_RC(...) or
 * -ENOMEM.
 */
static int store_blocks(struct kve_reader *reader, const struct kve_raw_event *ev,
                        struct kve_op *op, size_t n)
{
    const uint64_t *hashes = kve_event_hashes(reader);
    struct kv_block *blocks;
    struct kv_str adapter = kve_extra_adapter(ev);
    uint64_t salt, seed;
    int skipped, rc;

    if (ev->has_adapter && !adapter.len) { /* nothing tells which adapter's blocks these are */
        reader->saw_adapter = true;
        return KVE_SKIP_RC(NAMESPACE);
    }
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
    rc = kve_add_op(reader, op, reader->n_blocks);
    if (rc)
        return rc;
    blocks = reader->blocks + reader->n_blocks;
    for (size_t i = 0; i < n; i++)
        blocks[i] = (struct kv_block){hashes[i], reader->locals[i]};
    reader->n_blocks += n;
    remember_salt(reader, op, hashes, n, salt);
    return skipped;
}

/* Return true for blocks that a connector has told, not the pool in which a group lives. */
static bool is_connectors(const struct kve_raw_event *ev, const struct kve_op *op)
{
    return op->tier != KV_TIER_DEVICE && kve_is_connector_tier(kve_medium_find(ev->medium));
}

/*
 * Return true when the event may lack the keys of its blocks. vLLM's offloading connectors announce
 * blocks without a list of extra keys (some without the adapter), salted or not. Such an event only
 * adds a tier to known blocks, unless the publisher has shown no salt, multimodal object or adapter
 * so far.
 */
static bool hides_namespace(const struct kve_reader *reader, const struct kve_raw_event *ev,
                            const struct kve_op *op)
{
    if (ev->lists_extra_keys || ev->cache_salt.len || ev->mm_infos.p || !is_connectors(ev, op))
        return false;
    return reader->saw_salt || reader->saw_objects || (reader->saw_adapter && !ev->lora_name.len);
}

/*
 * Note blocks of another size than the registered one. vLLM with windows of smaller blocks announces
 * parts of its other blocks, too: these serve no prompt by themselves. Where no whole one comes, the
 * registration is wrong.
 */
static void note_other_size(struct kve_reader *reader, const struct kve_raw_event *ev)
{
    reader->other_block_size = ev->block_size;
    if (!ev->block_size || reader->block_size % ev->block_size)
        return;
    reader->part_tiers |= reader->event.tiers;
    reader->event.tiers = 0;
}

/* Show a window that has kept no block of the event's: matches need some all the same. */
static int show_window(struct kve_reader *reader, struct kve_op *op)
{
    op->type = KVE_OP_STORE_KNOWN;
    op->has_parent = false;
    op->parent = 0;
    return kve_add_op(reader, op, reader->scratch.n_hashes);
}

/*
 * Note which components the publisher's blocks have. Where a new one appears, those before may lack
 * it.
 */
static void note_components(struct kve_reader *reader, const struct kve_raw_event *ev,
                            struct kve_op *op)
{
    if (!ev->components || op->source)
        return;
    if (reader->components && ev->components & ~reader->components)
        kve_note_lost(reader);
    reader->components |= ev->components;
    op->single = true;
    op->incomplete = ev->components != reader->components;
}

/*
 * Note how many blocks an offloading connector's event has: it tells a chunk by its blocks, without
 * a list of their extra keys. A connector with a block pool (LOCAL) has no chunks.
 */
static void note_chunk(struct kve_reader *reader, const struct kve_raw_event *ev,
                       const struct kve_op *op)
{
    uint32_t *chunk = &reader->chunk[op->tier], n = (uint32_t)ev->n_hashes;
    bool tells = ev->kind.len && ev->has_group && !ev->lists_extra_keys && !ev->locality.len;

    if (!ev->n_tokens || kve_is_window(reader, op) || !is_connectors(ev, op))
        return;
    if (!*chunk && tells)
        *chunk = n;
    if (*chunk == n || (*chunk <= 1 && !tells)) /* other blocks beside chunks count one by one */
        return;
    *chunk = KVE_CHUNK_VARIES;
    kve_note_lost(reader);
}

int kve_add_stored(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    const uint64_t *hashes = kve_event_hashes(reader);
    int rc = kve_apply_rules(reader, ev, op), short_of;
    bool window = !rc && kve_is_window(reader, op) && !kve_places_window(reader, ev, op);
    size_t n;

    if (rc)
        return rc;
    note_components(reader, ev, op);
    op->type = KVE_OP_STORE;
    op->has_parent = ev->has_parent;
    op->parent = ev->parent;
    if (!window && ev->block_size != reader->block_size && (ev->block_size || ev->n_tokens)) {
        note_other_size(reader, ev);
        return KVE_SKIP_RC(BLOCK_SIZE);
    }
    if (ev->block_size == reader->block_size && !kve_is_window(reader, op))
        reader->whole_tiers |= 1u << op->tier;
    if (!ev->n_hashes)
        return kve_is_window(reader, op) ? show_window(reader, op) : 0;
    note_chunk(reader, ev, op);
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
