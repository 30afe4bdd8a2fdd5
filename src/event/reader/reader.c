// SPDX-License-Identifier: Apache-2.0
/*
 * Turn the bytes of a batch into operations on blocks. One pass over the payload reads each event
 * into a struct (raw_event.c), and applies the rules (reader_rules.c). Stored blocks are hashed
 * while their tokens are still in the nearest cache (reader_stored.c). All memory is the reader's and is
 * used again for the next batch.
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

#include "event/reader/reader.h"
#include "event/router/envelope.h"
#include "event/wire/raw_fields.h"

#define DEFAULT_MAX_EVENTS 65536
#define DEFAULT_MAX_TOKENS (4u << 20)
#define DEFAULT_MAX_SALTED (1u << 20)
#define ALL_TIERS ((1u << KV_N_TIERS) - 1)
#define KEEP_BYTES (4u << 20) /* memory above this is freed when a batch doesn't need it */

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
    kve_router_scratch_fini(&reader->routed);
    kve_unique_fini(&reader->unique);
    kve_groups_fini(&reader->sources.groups);
    kve_salts_fini(&reader->salts);
    free(reader);
}

void kve_reader_reset(struct kve_reader *reader)
{
    kve_sources_reset(&reader->sources);
    kve_salts_reset(&reader->salts);
    reader->saw_salt = reader->saw_adapter = reader->saw_objects = false;
    reader->part_tiers = reader->whole_tiers = 0;
    reader->engine_tiers = reader->pool_tiers = reader->unclear_tiers = 0;
    reader->saw_offload = reader->names_ranks = reader->names_zero = false;
    reader->has_event_id = false;
    reader->components = 0;
    memset(reader->chunk, 0, sizeof(reader->chunk));
}

void kve_reader_renew(struct kve_reader *reader)
{
    kve_reader_reset(reader);
    reader->sources.n = 0;
}

int kve_reader_source(const struct kve_reader *reader, uint32_t i, struct kve_source *ret)
{
    if (i && i >= reader->sources.n)
        return -ENOENT;
    *ret = i ? reader->sources.items[i]
             : (struct kve_source){.kind = KVE_SOURCE_MAIN, .stride = 1, .parts = 1};
    return 0;
}

bool kve_reader_has_main(const struct kve_reader *reader, uint32_t rank)
{
    return kve_sources_has_main(&reader->sources, rank);
}

bool kve_reader_lives_below(const struct kve_reader *reader, uint32_t rank, int64_t group)
{
    return group >= 0 && kve_groups_lives_below(&reader->sources.groups, rank, (uint32_t)group);
}

bool kve_reader_skips_group(const struct kve_reader *reader)
{
    return reader->sources.unfollowed || reader->sources.groups.n_below ||
           reader->sources.groups.n_mixed ||
           (reader->pool_tiers && reader->sources.groups.n_chunked) ||
           (!reader->sources.unnamed && kve_groups_chunked_alone(&reader->sources.groups)) ||
           (reader->part_tiers & ~reader->whole_tiers);
}

bool kve_reader_has_lower(const struct kve_reader *reader)
{
    bool owners = false;

    for (uint32_t i = 1; i < reader->sources.n && !owners; i++)
        owners = reader->sources.items[i].owner[0] != 0;
    return reader->pool_tiers || reader->saw_offload || owners;
}

/* -- operations -------------------------------------------------------------------------------- */

int kve_add_op(struct kve_reader *reader, const struct kve_op *op, size_t start)
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

/* Add an operation on the hashes at the end of the scratch, which become part of the batch. */
int kve_add_hashes_op(struct kve_reader *reader, struct kve_op *op, size_t n)
{
    size_t start = reader->scratch.n_hashes;
    int rc;

    if (!n)
        return 0;
    op->n = n;
    rc = kve_add_op(reader, op, start);
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

/* -- batches ----------------------------------------------------------------------------------- */

static void free_memory(void *memory, size_t *capacity)
{
    void *old;

    memcpy(&old, memory, sizeof(old));
    free(old);
    old = NULL;
    memcpy(memory, &old, sizeof(old));
    *capacity = 0;
}

/* Free the memory of one huge batch when later batches don't need it. */
static inline void give_back(void *memory, size_t *capacity, size_t used, size_t bytes)
{
    if (KV_UNLIKELY(*capacity * bytes > KEEP_BYTES) && used <= *capacity / 8)
        free_memory(memory, capacity);
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
    give_back(&reader->routed.items.data, &reader->routed.items.capacity,
              reader->n_blocks * sizeof(*reader->blocks) + scratch->n_hashes * sizeof(uint64_t), 1);
    give_back(&reader->unique.slots, &reader->unique.capacity, 2 * reader->n_blocks,
              sizeof(*reader->unique.slots));
    reader->n_ops = reader->n_blocks = scratch->n_hashes = 0;
    reader->n_clears = 0;
    reader->pool_began = reader->device_cleared = false;
    reader->n_lost = reader->lost_beyond = 0;
    reader->misses_events = false;
}

void kve_note_lost(struct kve_reader *reader)
{
    const struct kve_lost *event = &reader->event;
    uint32_t i = 0;

    if (!event->tiers)
        return;
    while (i < reader->n_lost &&
           (reader->lost[i].rank != event->rank || reader->lost[i].source != event->source))
        i++;
    if (i < reader->n_lost)
        reader->lost[i].tiers |= event->tiers;
    else if (i < KVE_MAX_LOST)
        reader->lost[reader->n_lost++] = *event;
    else
        reader->lost_beyond |= event->tiers;
}

/*
 * Return true when what an event was about that was left out may be missing. Not of blocks that no
 * query can name, or that are elsewhere; groups that aren't followed are noted by themselves
 * (kve_reader_skips_group).
 */
static bool is_loss(enum kve_skip why)
{
    return why != KVE_SKIP_GROUP && why != KVE_SKIP_REMOTE && why != KVE_SKIP_EXTRA_KEYS;
}

/*
 * Pass over the event at @before, that isn't read or in which reading stopped, and find its rank.
 * Returns false when it has no end.
 */
static bool pass_over(struct kve_reader *reader, struct kv_msgpack *m, const uint8_t *before)
{
    m->p = before;
    m->error.code = 0;
    kv_msgpack_skip(m);
    if (kv_msgpack_failed(m))
        return false;
    (void)kve_raw_find_rank(before, m->p, &reader->event.rank);
    return true;
}

/* Return true, with @ret at its content, when @m stands at msgpack within bytes. */
static bool enter_bytes(struct kv_msgpack *m, struct kv_msgpack *ret)
{
    enum kv_msgpack_type type = kv_msgpack_peek(m);
    struct kv_str bytes;

    if (KV_LIKELY(type != KV_MSGPACK_BIN && type != KV_MSGPACK_STR))
        return false;
    bytes = type == KV_MSGPACK_BIN ? kv_msgpack_bin(m) : kv_msgpack_str(m);
    kv_msgpack_init(ret, bytes.p, bytes.len);
    return true;
}

/*
 * Parents of 0 are roots: some publishers have an unsigned number there. Not where a block has that
 * hash.
 */
static void find_root(struct kve_reader *reader, struct kve_raw_event *ev)
{
    const uint64_t *hashes = kve_event_hashes(reader);

    for (size_t i = 0; i < ev->n_hashes; i++)
        reader->names_zero |= !hashes[i];
    ev->has_parent &= ev->parent || reader->names_zero;
}

/*
 * Read one event and apply the rules. Returns 0, KVE_SKIP_RC(...), -EPROTO (no msgpack) or -ENOMEM.
 */
static int read_event(struct kve_reader *reader, struct kv_msgpack *m, uint32_t rank)
{
    const uint8_t *before = m->p;
    struct kv_msgpack inner;
    struct kve_raw_event ev;
    struct kve_op op = {0};
    int rc;

    if (enter_bytes(m, &inner)) {
        rc =
            kv_msgpack_peek(&inner) == KV_MSGPACK_ARRAY || kv_msgpack_peek(&inner) == KV_MSGPACK_MAP
                ? read_event(reader, &inner, rank)
                : KVE_SKIP_RC(MALFORMED);
        return rc == -EPROTO || (!rc && inner.p != inner.end) ? KVE_SKIP_RC(MALFORMED) : rc;
    }
    rc = kve_raw_event_read(m, &reader->scratch, &ev);
    if (rc)
        return pass_over(reader, m, before) ? rc : -EPROTO;
    op.rank = ev.has_rank ? ev.rank : rank;
    reader->names_ranks |= ev.has_rank;
    reader->event.rank = op.rank;
    if (KV_UNLIKELY(reader->watch))
        reader->watch(reader->watch_arg,
                      &(struct kve_seen){&ev, kve_event_hashes(reader), op.rank, false, 0});
    switch (ev.type) {
    case KVE_RAW_STORED:
        find_root(reader, &ev);
        return kve_add_stored(reader, &ev, &op);
    case KVE_RAW_REMOVED:
        return kve_add_removed(reader, &ev, &op);
    case KVE_RAW_CLEARED:
        return kve_add_cleared(reader, &ev, &op);
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
    uint32_t rank = batch->has_rank ? batch->rank : reader->rank, n;
    struct kv_msgpack inner;

    if (enter_bytes(m, &inner))
        return !kv_msgpack_failed(m) && kv_msgpack_peek(&inner) == KV_MSGPACK_ARRAY
                   ? read_events(reader, &inner, batch)
                   : -EPROTO;
    n = kve_take_array(m);

    batch->n_events = n;
    for (uint32_t i = 0; i < n; i++) {
        int rc = KVE_SKIP_RC(TOO_LARGE);

        reader->event = (struct kve_lost){rank, KVE_ANY_SOURCE, ALL_TIERS};
        if (i < reader->max_events)
            rc = read_event(reader, m, rank);
        else if (!pass_over(reader, m, m->p))
            return -EPROTO;
        if (rc < 0)
            return rc;
        if (rc > 0) {
            batch->skipped[rc - 1]++;
            if (is_loss((enum kve_skip)(rc - 1)))
                kve_note_lost(reader);
        }
    }
    return kv_msgpack_failed(m) ? -EPROTO : 0;
}

/* Read seconds as a float. A large whole number is in milliseconds. */
static double take_timestamp(struct kv_msgpack *m)
{
    enum kv_msgpack_type type;
    double value;

    if (KV_LIKELY(kve_take_float64(m, &value)))
        return value;
    type = kv_msgpack_peek(m);
    if (type == KV_MSGPACK_NIL || type == KV_MSGPACK_STR) {
        kv_msgpack_skip(m);
        return 0;
    }
    value = kv_msgpack_double(m);
    return type != KV_MSGPACK_FLOAT && value >= 1e11 ? value / 1000 : value;
}

/*
 * Read nil or a rank. Some publishers write a rank as a signed 32-bit number: read its bits as
 * unsigned.
 */
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
 * Read the rank of a three-element batch from its end. The events precede the rank but need it, and
 * passing over them first would cost as much as decoding them. The rank is the last byte of the
 * payload, unless that byte may belong to a longer number. Returns false when that isn't certain:
 * the caller then passes over the events first.
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

/* Read [timestamp, events, rank, ...]. */
static int read_array_batch(struct kve_reader *reader, struct kv_msgpack *m,
                            struct kve_batch *batch)
{
    uint32_t n = kve_take_array(m);
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

/* Read {"ts": ..., "events": [...], "data_parallel_rank": ...}, in any order, or an envelope. */
static int read_map_batch(struct kve_reader *reader, struct kv_msgpack *m, struct kve_batch *batch)
{
    const uint8_t *events = NULL, *map = m->p;

    if (kve_envelope_is_likely(map, (size_t)(m->end - map)))
        return kve_read_routed(reader, map, (size_t)(m->end - map), batch);
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
    if (kv_msgpack_failed(m) || m->p != m->end)
        return -EPROTO;
    if (!events) /* an envelope, whose first key is another's */
        return kve_read_routed(reader, map, (size_t)(m->end - map), batch);
    m->p = events;
    return read_events(reader, m, batch);
}

int kve_reader_decode(struct kve_reader *reader, const void *payload, size_t len,
                      struct kve_batch *ret)
{
    struct kve_batch batch = {0};
    struct kv_msgpack m, inner;
    int rc = -EPROTO;

    start_batch(reader);
    kv_msgpack_init(&m, payload, len);
    if (enter_bytes(&m, &inner) && m.p == m.end)
        m = inner;
    if (KV_LIKELY(kve_at_short_array(&m)) || kv_msgpack_peek(&m) == KV_MSGPACK_ARRAY)
        rc = read_array_batch(reader, &m, &batch);
    else if (kv_msgpack_peek(&m) == KV_MSGPACK_MAP)
        rc = read_map_batch(reader, &m, &batch);
    if (rc)
        return rc;
    reader->names_ranks |= batch.has_rank;
    kve_settle_groups(reader);
    set_pointers(reader);
    *ret = batch;
    ret->ops = reader->ops;
    ret->n_ops = reader->n_ops;
    ret->n_blocks = reader->n_blocks + reader->scratch.n_hashes;
    return 0;
}
