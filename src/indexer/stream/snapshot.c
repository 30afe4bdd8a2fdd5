// SPDX-License-Identifier: Apache-2.0
/*
 * Snapshots: taken from a listener, written into a dump, read from one, and given to the replica's
 * listener. The state's members are those of state.c.
 *
 * Invariant: a listener takes either all of a snapshot, or its position alone. The second is so where
 * blocks may be missing (torn), or where a dump named a reader's state that this version doesn't know
 * (unusable): the listener then reads the stream from the beginning.
 */
#include "indexer/stream/snapshot.h"

#include <errno.h>
#include <stdlib.h>

#include "event/reader/reader_state.h"
#include "indexer/stream/listener.h"

/* Most bytes of each list of a snapshot that is read. */
#define MAX_RANK_BYTES (KI_MAX_RANKS * sizeof(uint32_t))
#define MAX_RANGE_BYTES (KI_MAX_RANGES * sizeof(struct ki_range))

int ki_snapshot_create(struct ki_snapshot **ret)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 1};
    struct ki_snapshot *s = calloc(1, sizeof(*s));

    if (!s)
        return -ENOMEM;
    if (kve_reader_create(&opts, &s->reader) < 0) {
        free(s);
        return -ENOMEM;
    }
    s->ranks.limit = MAX_RANK_BYTES;
    s->ranges.limit = MAX_RANGE_BYTES;
    s->state.facts = KI_FACT_SUSPECTS; /* assume so until the text says otherwise */
    s->state.reasons = KI_BECAUSE(PEER);
    *ret = s;
    return 0;
}

void ki_snapshot_free(struct ki_snapshot *s)
{
    if (!s)
        return;
    kve_reader_destroy(s->reader);
    kv_buf_fini(&s->ranks);
    kv_buf_fini(&s->ranges);
    free(s);
}

/* Copy a snapshot whose reader and lists are still those of @s. */
static int copy(const struct ki_snapshot *s, const uint32_t *ranks, size_t n_ranks,
                const struct kve_reader *reader, struct ki_snapshot **ret)
{
    struct ki_snapshot *made = calloc(1, sizeof(*made));

    if (!made)
        return -ENOMEM;
    *made = *s;
    made->ranks = made->ranges = (struct kv_buf)KV_BUF_INIT;
    made->reader = kve_reader_copy(reader);
    kv_buf_append(&made->ranks, ranks, n_ranks * sizeof(*ranks));
    if (!made->reader || made->ranks.error) {
        ki_snapshot_free(made);
        return -ENOMEM;
    }
    *ret = made;
    return 0;
}

int ki_snapshot_copy(const struct ki_snapshot *s, struct ki_snapshot **ret)
{
    int rc = copy(s, (const uint32_t *)(const void *)s->ranks.data, ki_snapshot_n_ranks(s),
                  s->reader, ret);

    if (rc)
        return rc;
    kv_buf_append(&(*ret)->ranges, s->ranges.data, s->ranges.len);
    if (!(*ret)->ranges.error)
        return 0;
    ki_snapshot_free(*ret);
    return -ENOMEM;
}

/* -- between listeners ------------------------------------------------------------------------- */

int ki_snapshot_take(const struct ki_listener *l, struct ki_snapshot **ret)
{
    const struct ki_applier *a = &l->applier;
    struct ki_snapshot s = {.instance = l->instance,
                            .rank = l->rank,
                            .has_position = ki_stream_has_position(&l->stream)};
    int rc;

    if (!ki_stream_has_blocks(&l->stream))
        return -ENODATA;
    ki_state_take(l, &s.state);
    rc = copy(&s, a->ranks, a->n_ranks, a->reader, ret);
    if (!rc)
        ki_ranges_tell(&a->ranges, &(*ret)->ranges);
    if (rc || !(*ret)->ranges.error)
        return rc;
    ki_snapshot_free(*ret);
    return -ENOMEM;
}

static void give_ranges(const struct ki_snapshot *s, struct ki_applier *a)
{
    for (size_t i = 0; i < ki_snapshot_n_ranges(s); i++)
        ki_ranges_restore(&a->ranges, ki_snapshot_range(s, i));
    a->ranges.n_real = s->state.n_real;
}

/* Ranks that other streams bring, too, are among them: a restart of this one's engine forgets all. */
static bool give_ranks(const struct ki_snapshot *s, struct ki_applier *a)
{
    bool fit = true;

    for (size_t i = 0; i < ki_snapshot_n_ranks(s); i++)
        if (ki_snapshot_rank(s, i) != a->rank)
            fit &= ki_applier_note_rank(a, ki_snapshot_rank(s, i));
    return fit;
}

void ki_snapshot_give(struct ki_snapshot *s, struct ki_listener *l)
{
    bool adrift = s->state.facts & KI_FACT_ADRIFT;

    pthread_mutex_lock(&l->lock);
    ki_stream_seed(&l->stream, s->state.sequence, s->state.timestamp, s->state.reasons != 0);
    l->stream.reasons |= adrift ? KI_BECAUSE(UNPROVED) : 0;
    s->torn |= !give_ranks(s, &l->applier);
    ki_listener_name_rank(l);
    if (!s->unusable) {
        ki_state_give(&s->state, l);
        give_ranges(s, &l->applier);
    } else {
        l->applier.reports.suspects = true; /* the history of its blocks is unknown */
    }
    if (s->torn || s->unusable || kve_reader_take_over(l->applier.reader, s->reader) < 0)
        ki_stream_seed_torn(&l->stream);
    ki_listener_unlock(l);
}

/* -- in dumps ---------------------------------------------------------------------------------- */

void ki_snapshot_write(const struct ki_snapshot *s, struct kv_json_writer *w)
{
    kv_json_member_u64(w, "worker_id", s->instance);
    kv_json_member_u64(w, "dp_rank", s->rank);
    kv_json_key(w, "ranks");
    kv_json_begin_array(w);
    for (size_t i = 0; i < ki_snapshot_n_ranks(s); i++)
        kv_json_put_u64(w, ki_snapshot_rank(s, i));
    kv_json_end_array(w);
    if (!s->has_position)
        return;
    ki_state_write(&s->state, w);
    kve_reader_write(s->reader, w);
}

void ki_snapshot_write_range(const struct ki_range *range, struct kv_json_writer *w)
{
    kv_json_begin_object(w);
    kv_json_member_u64(w, "dp_rank", range->rank);
    kv_json_member_u64(w, "block_hash", range->hash);
    kv_json_member_u64(w, "window", range->window);
    kv_json_member_u64(w, "more", range->more);
    kv_json_member_u64(w, "fewer", range->fewer);
    kv_json_member_bool(w, "open", range->open);
    if (range->more && !range->window)
        kv_json_member_u64(w, "tokens_hash", range->tokens_hash);
    if (range->has_parent)
        kv_json_member_u64(w, "parent_hash", range->parent);
    kv_json_end_object(w);
}

static void read_ranks(struct ki_snapshot *s, struct kv_json *json)
{
    kv_json_array(json);
    while (kv_json_next_item(json)) {
        uint32_t rank = (uint32_t)kv_json_u64(json, UINT32_MAX);

        kv_buf_append(&s->ranks, &rank, sizeof(rank));
    }
    if (s->ranks.error)
        kv_json_fail(json, s->ranks.error, "too many ranks of a stream");
}

/* Read a number of copies, at most so many that none of the later counts overflows. */
static uint32_t read_copies(struct kv_json *json)
{
    return (uint32_t)KV_MIN(kv_json_u64(json, UINT32_MAX), (uint64_t)INT32_MAX);
}

static void read_range(struct ki_snapshot *s, struct kv_json *json)
{
    struct ki_range range = {.rank = 0};
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "dp_rank")) {
            range.rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
        } else if (kv_str_eq(key, "block_hash")) {
            range.hash = kv_json_u64(json, UINT64_MAX);
        } else if (kv_str_eq(key, "window")) {
            range.window = (uint8_t)kv_json_u64(json, KVI_MAX_WINDOWS);
        } else if (kv_str_eq(key, "more")) {
            range.more = read_copies(json);
        } else if (kv_str_eq(key, "fewer")) {
            range.fewer = read_copies(json);
        } else if (kv_str_eq(key, "open")) {
            range.open = kv_json_bool(json);
        } else if (kv_str_eq(key, "tokens_hash")) {
            range.tokens_hash = kv_json_u64(json, UINT64_MAX);
        } else if (kv_str_eq(key, "parent_hash")) {
            range.parent = kv_json_u64(json, UINT64_MAX);
            range.has_parent = true;
        } else {
            kv_json_skip(json);
        }
    }
    if (range.more || range.fewer)
        kv_buf_append(&s->ranges, &range, sizeof(range));
    if (s->ranges.error)
        kv_json_fail(json, s->ranges.error, "too many ranges of a stream");
}

bool ki_snapshot_read(struct ki_snapshot *s, struct kv_json *json, struct kv_str key)
{
    bool is_position = kv_str_eq(key, "seq"); /* reading the value may overwrite the key */
    int rc;

    if (kv_str_eq(key, "worker_id")) {
        s->instance = kv_json_u64(json, UINT64_MAX);
    } else if (kv_str_eq(key, "dp_rank")) {
        s->rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "ranks")) {
        read_ranks(s, json);
    } else if (kv_str_eq(key, "ranges")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            read_range(s, json);
    } else if (ki_state_read(&s->state, json, key)) {
        s->has_position |= is_position;
    } else {
        rc = kve_reader_read(s->reader, json, key);
        s->unusable |= rc < 0;
        return rc != 0;
    }
    return true;
}

int ki_snapshot_compare(const void *a, const void *b)
{
    const struct ki_snapshot *x = *(struct ki_snapshot *const *)a;
    const struct ki_snapshot *y = *(struct ki_snapshot *const *)b;

    if (x->instance != y->instance)
        return x->instance < y->instance ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

struct ki_snapshot *ki_snapshot_find(struct ki_snapshot *const *snapshots, size_t n,
                                     uint64_t instance, uint32_t rank)
{
    const struct ki_snapshot key = {.instance = instance, .rank = rank}, *wanted = &key;
    struct ki_snapshot *const *found =
        n ? bsearch(&wanted, snapshots, n, sizeof(*snapshots), ki_snapshot_compare) : NULL;

    return found ? *found : NULL;
}
