// SPDX-License-Identifier: Apache-2.0
/*
 * A block through all of its states, and what the rest of a program sees of it: hashes, events, uses,
 * metrics. docs/kvbm.md has the states and their transitions.
 *
 *     cc -std=gnu11 kvbm_lifecycle.c $(pkg-config --cflags --libs kvbm)
 */
#include <errno.h>
#include <kvbm.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 8, POOL = 16, PROMPT = 2 };

static atomic_int lines, stored, removed, uses; /* counted by callbacks, on threads of their own */

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

/* ---- callbacks ---- */

static void on_line(void *arg, int level, const char *line)
{
    (void)arg;
    atomic_fetch_add(&lines, 1);
    if (level == 0)
        fprintf(stderr, "libkvbm: %s\n", line);
}

static void on_events(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    (void)arg, (void)lost;
    for (size_t i = 0; i < n; i++)
        atomic_fetch_add(events[i].type == KVBM_EVENT_STORED ? &stored : &removed, 1);
}

static void on_touch(void *arg, enum kv_tier tier, uint32_t group, const void *keys, size_t n)
{
    (void)arg, (void)tier, (void)group, (void)keys;
    atomic_fetch_add(&uses, (int)n);
}

/* ---- hashes ---- */

/* Fill a sequence token by token, and compute the hashes of its blocks by hand, too. */
static int hash_by_hand(struct kvbm_sequence *tokens, uint64_t salt)
{
    const struct kvbm_mm_run picture = {.hash = 0x5eed, .start = BLOCK, .n = BLOCK / 2};
    struct kvbm_token_block first, second;
    struct kvbm_hash128 place;
    uint32_t last;

    for (uint32_t i = 0; i < PROMPT * BLOCK + 3; i++)
        must(kvbm_sequence_append(tokens, i), "append");
    must(kvbm_sequence_pop(tokens, &last), "pop"); /* a draft's token that was refused */
    must(kvbm_sequence_truncate(tokens, PROMPT * BLOCK), "truncate");
    must(kvbm_sequence_block(tokens, 0, &first), "block");
    must(kvbm_sequence_block(tokens, 1, &second), "block");
    must(kvbm_positional_hash(second.sequence_hash, second.block_hash, second.position, &place),
         "positional hash");
    /* With a picture in place of half of its tokens the block is another one. */
    return last == PROMPT * BLOCK + 2 && place.low == second.sequence_hash &&
           kvbm_block_hash(salt, kvbm_sequence_tokens(tokens, BLOCK, BLOCK), BLOCK) ==
               second.block_hash &&
           kvbm_sequence_hash(&first.sequence_hash, second.block_hash, salt,
                              KVBM_CHAIN_SEED_ZERO) == second.sequence_hash &&
           kvbm_block_hash_mm(salt, second.tokens, BLOCK, BLOCK, &picture, 1) != second.block_hash;
}

/* ---- states ---- */

/* Begin the first block of a prompt, and write all of its tokens. */
static void fill(const struct kvbm_mutable *block, uint64_t salt)
{
    const struct kvbm_block_start start = {.size = sizeof(start), .salt_hash = salt};
    struct kvbm_fill now;

    must(kvbm_mutable_init_sequence(block, &start), "init_sequence");
    for (uint32_t i = 0; i < BLOCK; i++)
        must(kvbm_mutable_add_token(block, i), "add_token");
    must(kvbm_mutable_fill(block, &now, NULL, 0), "fill");
    printf("block %u: %s, %u tokens\n", block->handle.block, kvbm_state_name(now.state), now.len);
}

/* Take a block as far as Registered, with both ways back to Reset. */
static struct kvbm_immutable live(struct kvbm_pool *pool, uint64_t salt)
{
    struct kvbm_mutable block;
    struct kvbm_complete complete;
    struct kvbm_immutable held;
    struct kvbm_fill now;

    must(kvbm_pool_allocate(pool, 1, &block, NULL), "allocate");
    fill(&block, salt);
    must(kvbm_mutable_reset(&block), "reset"); /* the client has gone */
    fill(&block, salt);
    must(kvbm_mutable_commit(&block, &complete), "commit");
    must(kvbm_complete_reset(&complete, &block), "reset"); /* the kernel has failed */
    fill(&block, salt);
    must(kvbm_mutable_commit(&block, &complete), "commit");
    must(kvbm_complete_fill(&complete, &now, NULL, 0), "fill");
    printf("block %u: %s\n", complete.handle.block, kvbm_state_name(now.state));
    must(kvbm_pool_register(pool, &complete, 1, &held), "register");
    return held;
}

/* Give complete blocks back that nobody shall find: one, and several. */
static void discard(struct kvbm_pool *pool)
{
    static const uint64_t keys[] = {71, 72, 73};
    const struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys, .scattered = true};
    struct kvbm_mutable blocks[3];
    struct kvbm_complete complete[3];

    must(kvbm_pool_allocate(pool, 3, blocks, NULL), "allocate");
    must(kvbm_pool_complete(pool, blocks, 3, &chain, complete), "complete");
    must(kvbm_complete_release(&complete[0]), "release");
    must(kvbm_pool_release_complete(pool, complete + 1, 2), "release");
}

/* ---- all of it ---- */

/* Print the metrics of all registries of the process, as a scrape of /metrics gets them. */
static void print_metrics(struct kvbm_registry *registry)
{
    const struct kvbm_named_registry all[] = {{registry, "example-model"}};
    char text[16384];
    long len = kvbm_metrics(all, 1, text, sizeof(text));

    must(len < (long)sizeof(text) ? len : -ENOSPC, "metrics");
    printf("metrics: %ld bytes, such as %.*s\n", len, (int)strcspn(text, "\n"), text);
}

int main(void)
{
    const uint64_t salt = kvbm_salt_hash("tenant-7", 8);
    const struct kvbm_sequence_opts like = {
        .size = sizeof(like), .block_size = BLOCK, .salt_hash = salt};
    struct kvbm_registry_opts keys = {.size = sizeof(keys)};
    const struct kvbm_pool_opts blocks = {
        .size = sizeof(blocks), .n_blocks = POOL, .block_size = BLOCK};
    struct kvbm_immutable held, again;
    struct kvbm_registry *registry;
    struct kvbm_sequence *tokens;
    struct kvbm_events *events;
    struct kvbm_pool *pool;
    int sink;

    kvbm_set_log(on_line, NULL); /* before any other call */
    must(kvbm_events_create(NULL, &events), "events");
    sink = kvbm_events_add_callback(events, KVBM_EVENTS_CONSOLIDATED, on_events, NULL);
    must(sink, "callback");
    keys.events = events;
    must(kvbm_registry_create(&keys, &registry), "registry");
    must(kvbm_registry_on_touch(registry, on_touch, NULL), "on_touch");
    must(kvbm_pool_create(registry, &blocks, &pool), "pool");
    must(kvbm_sequence_create(&like, &tokens), "sequence");
    if (!hash_by_hand(tokens, salt))
        return 1;

    held = live(pool, salt);
    discard(pool);
    /* Another request begins alike. Its sequence hashes find the block. */
    if (kvbm_pool_match(pool, 0, kvbm_sequence_hashes(tokens), PROMPT, 0, &again) != 1)
        return 1;
    if (kvbm_immutable_try_return(&again) != -EBUSY) /* the first request holds it, too */
        return 1;
    must(kvbm_immutable_release(&again), "release");
    must(kvbm_immutable_try_return(&held), "try_return");
    print_metrics(registry);
    must(kvbm_pool_reset(pool), "reset"); /* new weights: no key means its bytes any more */
    must(kvbm_events_flush(events, 10000), "flush");
    must(kvbm_events_remove_sink(events, sink), "remove_sink");
    printf("%d stored, %d removed, %d uses, %d lines of the log\n", stored, removed, uses, lines);

    kvbm_sequence_clear(tokens); /* for the next request */
    kvbm_sequence_destroy(tokens);
    must(kvbm_pool_destroy(pool), "pool");
    must(kvbm_registry_destroy(registry), "registry");
    must(kvbm_events_destroy(events), "events");
    return stored != 1 || removed != 1 || uses != 1;
}
