// SPDX-License-Identifier: Apache-2.0
/*
 * Decoding with drafts: a draft model proposes tokens, the engine takes some of them back. A sequence
 * keeps the request's tokens and hashes; the block being written fills token by token; a ring of
 * events tells which blocks other requests can find.
 *
 *     cc -std=c11 kvbm_decode.c $(pkg-config --cflags --libs kvbm)
 */
#include <kvbm.h>
#include <stdio.h>

enum { BLOCK = 8, POOL = 32, PROMPT = 20, DRAFT = 5, STEPS = 30, MAX = 32 };

struct request {
    struct kvbm_pool *pool;
    struct kvbm_sequence *tokens;
    struct kvbm_mutable open;        /* the block being written; no handle: none */
    struct kvbm_immutable full[MAX]; /* registered blocks, in order */
    uint32_t n;
};

/* Begin the next block, below the last registered one. */
static int begin_block(struct request *r, uint64_t salt)
{
    const uint64_t *keys = kvbm_sequence_hashes(r->tokens);
    const struct kvbm_block_start start = {.size = sizeof(start),
                                           .salt_hash = salt,
                                           .parent = r->n ? &keys[r->n - 1] : NULL,
                                           .position = r->n};
    int rc = kvbm_pool_allocate(r->pool, 1, &r->open, NULL);

    return rc < 0 ? rc : kvbm_mutable_init_sequence(&r->open, &start);
}

/* The block is full: commit it under the hash of its tokens, and let others find it. */
static int end_block(struct request *r)
{
    struct kvbm_complete complete;
    int rc = kvbm_mutable_commit(&r->open, &complete);

    if (rc == 0)
        rc = kvbm_pool_register(r->pool, &complete, 1, &r->full[r->n]);
    r->n += rc == 0;
    return rc;
}

/* Write accepted tokens: K and V of each go to its place in block r->open.handle.block. */
static int write_tokens(struct request *r, uint64_t salt, const uint32_t *tokens, size_t n)
{
    for (size_t i = 0; i < n;) {
        struct kvbm_fill fill;
        long taken;
        int rc = r->open.handle.pool ? 0 : begin_block(r, salt);

        if (rc < 0)
            return rc;
        taken = kvbm_mutable_add_tokens(&r->open, tokens + i, n - i);
        if (taken < 0 || kvbm_sequence_extend(r->tokens, tokens + i, (size_t)taken) < 0)
            return -1;
        i += (size_t)taken;
        rc = kvbm_mutable_fill(&r->open, &fill, NULL, 0);
        if (rc == 0 && !fill.remaining)
            rc = end_block(r);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Drafts go into the open block only as far as it has room, so that refused ones can be taken back. */
static int decode(struct request *r, uint64_t salt, uint32_t step)
{
    size_t before, room, refused = step % 3;
    uint32_t draft[DRAFT];

    (void)kvbm_sequence_tail(r->tokens, &before);
    room = BLOCK - before - 1;
    for (uint32_t i = 0; i < DRAFT; i++)
        draft[i] = 1000 * step + i;
    room = room < DRAFT ? room : DRAFT;
    refused = refused < room ? refused : room;
    if (write_tokens(r, salt, draft, room) < 0)
        return -1;
    if (refused && (kvbm_mutable_pop_tokens(&r->open, refused) < 0 ||
                    kvbm_sequence_unwind(r->tokens, refused) < 0))
        return -1;
    return write_tokens(r, salt, (uint32_t[]){7000 + step}, 1); /* the engine's own token */
}

static long count_stored(struct kvbm_events *events, struct kvbm_event_ring *ring)
{
    struct kvbm_event found[MAX];
    long n =
        kvbm_events_flush(events, 10000) < 0 ? 0 : kvbm_event_ring_drain(ring, found, MAX, NULL);
    long stored = 0;

    for (long i = 0; i < n; i++)
        stored += found[i].type == KVBM_EVENT_STORED;
    return stored;
}

int main(void)
{
    struct kvbm_pool_opts pool = {.size = sizeof(pool), .n_blocks = POOL, .block_size = BLOCK};
    struct kvbm_registry_opts registered = {.size = sizeof(registered)};
    struct kvbm_sequence_opts opts = {.size = sizeof(opts), .block_size = BLOCK};
    struct kvbm_immutable again[MAX];
    struct kvbm_registry *registry;
    struct kvbm_event_ring *ring;
    struct kvbm_events *events;
    struct request r = {0};
    uint32_t prompt[PROMPT];
    long found;

    if (kvbm_salt_hash_json("tenant-7", "adapter", &opts.salt_hash) < 0 ||
        kvbm_events_create(NULL, &events) < 0 ||
        kvbm_events_add_ring(events, KVBM_EVENTS_CONSOLIDATED, 0, &ring) < 0)
        return 1;
    registered.events = events;
    if (kvbm_registry_create(&registered, &registry) < 0 ||
        kvbm_pool_create(registry, &pool, &r.pool) < 0 ||
        kvbm_sequence_create(&opts, &r.tokens) < 0)
        return 1;
    for (uint32_t i = 0; i < PROMPT; i++)
        prompt[i] = i;
    if (write_tokens(&r, opts.salt_hash, prompt, PROMPT) < 0)
        return 1;
    for (uint32_t step = 0; step < STEPS && kvbm_sequence_n_blocks(r.tokens) < MAX - 8; step++)
        if (decode(&r, opts.salt_hash, step) < 0)
            return 1;
    /* Another request with the same text finds all full blocks. */
    found = kvbm_pool_match(r.pool, 0, kvbm_sequence_hashes(r.tokens),
                            kvbm_sequence_n_blocks(r.tokens), 0, again);
    printf("%zu tokens, %zu full blocks, %ld found again, %ld announced\n",
           kvbm_sequence_len(r.tokens), kvbm_sequence_n_blocks(r.tokens), found,
           count_stored(events, ring));
    if (found != (long)r.n || found != (long)kvbm_sequence_n_blocks(r.tokens) || found < 4)
        return 1;
    if (r.open.handle.pool)
        kvbm_mutable_release(
            &r.open); /* a block that isn't full has no key: its bytes are dropped */
    kvbm_pool_release(r.pool, again, (size_t)found);
    kvbm_pool_release(r.pool, r.full, r.n);
    kvbm_sequence_destroy(r.tokens);
    return kvbm_pool_destroy(r.pool) || kvbm_registry_destroy(registry) ||
           kvbm_events_destroy(events);
}
