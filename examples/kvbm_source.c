// SPDX-License-Identifier: Apache-2.0
/*
 * An engine that keeps its own table of blocks lends them without pools of libkvbm: a source of its
 * own says which keys it has and holds blocks that peers read. One process plays the reader, too.
 *
 *     cc -std=gnu11 kvbm_source.c $(pkg-config --cflags --libs kvbm)
 */
#include <errno.h>
#include <kvbm.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { BLOCKS = 8, SET = 1 };

/* The engine's table. Threads of the agent look into it. */
struct table {
    pthread_mutex_t lock;
    uint64_t key[BLOCKS]; /* of each block; 0: free */
    uint32_t held;        /* holds of peers: no block is evicted meanwhile */
};

static void must(long rc, const char *what)
{
    if (rc >= 0)
        return;
    fprintf(stderr, "%s: %s\n", what, strerror((int)-rc));
    exit(1);
}

static uint64_t seconds_from_now(uint64_t s)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return ((uint64_t)now.tv_sec + s) * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- the source ---- */

/* Return the block of a key, or UINT32_MAX. The caller holds the lock. */
static uint32_t find(const struct table *t, const void *keys, size_t i)
{
    uint64_t key;

    memcpy(&key, (const char *)keys + i * sizeof(key), sizeof(key));
    for (uint32_t block = 0; block < BLOCKS; block++)
        if (t->key[block] == key)
            return block;
    return UINT32_MAX;
}

static void lookup(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers)
{
    struct table *t = arg;

    (void)group; /* this engine has one */
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < n; i++)
        tiers[i] = find(t, keys, i) == UINT32_MAX ? KVBM_NO_TIER : KV_TIER_HOST;
    pthread_mutex_unlock(&t->lock);
}

static void hold(void *arg, uint32_t group, const void *keys, size_t n, kvbm_held_fn held, void *to)
{
    uint32_t *blocks = malloc(n * sizeof(*blocks));
    struct table *t = arg;

    (void)group;
    if (!blocks) {
        held(to, -ENOMEM, NULL, NULL);
        return;
    }
    pthread_mutex_lock(&t->lock);
    for (size_t i = 0; i < n; i++)
        blocks[i] = find(t, keys, i);
    t->held++;
    pthread_mutex_unlock(&t->lock);
    held(to, 0, blocks, t); /* a table that can fetch from a disk calls this later */
    free(blocks);
}

static void unhold(void *arg, void *held)
{
    struct table *t = arg;

    (void)held;
    pthread_mutex_lock(&t->lock);
    t->held--;
    pthread_mutex_unlock(&t->lock);
}

/* ---- the engine ---- */

/* Give a block another use. Returns false while peers read. */
static bool evict(struct table *t, struct kvbm_blockset *set, uint32_t block)
{
    uint64_t key = 0;

    pthread_mutex_lock(&t->lock);
    if (!t->held) {
        key = t->key[block];
        t->key[block] = 0;
    }
    pthread_mutex_unlock(&t->lock);
    if (key) /* peers that know of the key needn't ask for it in vain */
        must(kvbm_blockset_gone(set, 0, &key, 1), "gone");
    return key != 0;
}

static struct kvbm_layout *make_layout(void)
{
    const struct kvbm_layout_config config = {.size = sizeof(config),
                                              .kind = KVBM_FULLY_CONTIGUOUS,
                                              .num_blocks = BLOCKS,
                                              .num_layers = 2,
                                              .outer_dim = 2,
                                              .page_size = 16,
                                              .inner_dim = 64};
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    struct kvbm_layout *layout;

    must(kvbm_layout_allocate(&config, &allocator, &layout), "layout");
    return layout;
}

static struct kvbm_agent *make_agent(const char *name, const char *endpoint)
{
    const struct kvbm_agent_opts who = {.size = sizeof(who),
                                        .name = name,
                                        .fingerprint = "example",
                                        .listen = &endpoint,
                                        .n_listen = endpoint != NULL};
    struct kvbm_agent *agent;

    must(kvbm_agent_create(&who, &agent), "agent");
    return agent;
}

/* ---- the reader ---- */

/* Lease two keys and read their blocks. Returns how many have come. */
static long read_two(struct kvbm_session *session, const struct kvbm_layout *to,
                     const uint64_t *keys)
{
    const uint32_t to_blocks[] = {0, 1};
    uint8_t ok[1];
    struct kvbm_lease_read_opts what = {
        .size = sizeof(what), .to = to, .to_blocks = to_blocks, .ok = ok};
    struct kvbm_lease *lease;
    long n;

    must(kvbm_session_lease(session, SET, 0, keys, 2, 5000, seconds_from_now(30), &lease), "lease");
    what.n = (uint32_t)kvbm_lease_count(lease);
    n = kvbm_lease_read(lease, &what);
    must(n, "read");
    kvbm_lease_release(lease);
    return n;
}

int main(void)
{
    const uint64_t keys[] = {71, 72};
    const struct timespec pause = {.tv_nsec = 1000000};
    struct table table = {.lock = PTHREAD_MUTEX_INITIALIZER, .key = {71, 72, 73}};
    const struct kvbm_block_source source = {
        .size = sizeof(source), .arg = &table, .lookup = lookup, .hold = hold, .unhold = unhold};
    struct kvbm_layout *layout = make_layout(), *copy = make_layout();
    const struct kvbm_blockset_opts what = {
        .size = sizeof(what), .id = SET, .layout = layout, .source = &source};
    struct kvbm_agent *owner = make_agent("owner", "tcp:127.0.0.1:0");
    struct kvbm_agent *reader = make_agent("reader", NULL);
    struct kvbm_session *session;
    struct kvbm_blockset *set;
    char endpoint[64];
    uint8_t tiers[2];
    long n;

    must(kvbm_blockset_export(owner, &what, &set), "export");
    must(kvbm_agent_endpoint(owner, 0, endpoint, sizeof(endpoint), NULL), "endpoint");
    must(kvbm_session_open(reader, endpoint, NULL, &session), "session");
    n = read_two(session, copy, keys);
    while (!evict(&table, set, 0)) /* until the lease is given back */
        (void)nanosleep(&pause, NULL);
    must(kvbm_session_lookup(session, SET, 0, keys, 2, seconds_from_now(30), tiers), "lookup");
    printf("%ld of 2 blocks read; then key 71 is %s, key 72 is %s\n", n,
           tiers[0] == KVBM_NO_TIER ? "gone" : "there",
           tiers[1] == KVBM_NO_TIER ? "gone" : "there");
    must(kvbm_session_close(session), "close");
    kvbm_blockset_destroy(set);
    must(kvbm_agent_destroy(reader), "agent");
    must(kvbm_agent_destroy(owner), "agent");
    kvbm_layout_destroy(copy);
    kvbm_layout_destroy(layout);
    return n != 2 || tiers[0] != KVBM_NO_TIER || tiers[1] != KV_TIER_HOST;
}
