// SPDX-License-Identifier: Apache-2.0
/** A peer that hangs, fails and lies as its test tells it: an agent with a source of its own. */
#ifndef KV_TEST_SHAKY_PEER_H
#define KV_TEST_SHAKY_PEER_H

#include <pthread.h>

#include "support.h"
#include "tier/kitchen.h"

#define SHAKY_BLOCKS 16u
#define SHAKY_HELD 64u

enum shaky_mode {
    SHAKY_GOOD,    /* key 1000 * k + i is in block i */
    SHAKY_LIES,    /* has every key, and gives none */
    SHAKY_HANGS,   /* a hold is answered when the mode changes */
    SHAKY_FAILS,   /* a hold fails */
    SHAKY_REFUSES, /* a hold fails with -EINVAL */
    SHAKY_COUNTS,  /* blocks beyond the set */
    SHAKY_HALF,    /* gives every second block */
    SHAKY_DEAF,    /* a lookup is answered when the mode changes */
    SHAKY_N_MODES
};

struct shaky_peer {
    struct kvbm_agent *agent;
    struct kvbm_blockset *set;
    struct kvbm_layout *layout;
    pthread_mutex_t lock;
    enum shaky_mode mode;
    uint32_t n_hanging, n_holds;
    struct {
        kvbm_held_fn held;
        void *to;
    } hanging[SHAKY_HELD];
};

/** Block @i of a peer holds key @first + @i, for a lease that asks for those keys. */
static void shaky_hold(void *arg, uint32_t group, const void *keys, size_t n, kvbm_held_fn held,
                       void *to)
{
    struct shaky_peer *peer = arg;
    uint32_t blocks[SHAKY_BLOCKS];
    enum shaky_mode mode;
    bool hangs = false;

    (void)group;
    pthread_mutex_lock(&peer->lock);
    mode = peer->mode;
    if (mode == SHAKY_HANGS && peer->n_hanging < SHAKY_HELD) {
        peer->hanging[peer->n_hanging].held = held;
        peer->hanging[peer->n_hanging++].to = to;
        hangs = true;
    }
    peer->n_holds += !hangs && mode != SHAKY_FAILS && mode != SHAKY_REFUSES;
    pthread_mutex_unlock(&peer->lock);
    if (hangs)
        return;
    for (size_t i = 0; i < n && i < SHAKY_BLOCKS; i++) {
        uint64_t key;

        memcpy(&key, (const uint8_t *)keys + i * 8, 8);
        blocks[i] = mode == SHAKY_LIES                  ? UINT32_MAX
                    : mode == SHAKY_COUNTS              ? SHAKY_BLOCKS + 1000
                    : mode == SHAKY_HALF && key % 2 > 0 ? UINT32_MAX
                                                        : (uint32_t)(key % 1000 % SHAKY_BLOCKS);
    }
    held(to, mode == SHAKY_FAILS ? -EIO : mode == SHAKY_REFUSES ? -EINVAL : 0, blocks, peer);
}

static void shaky_lookup(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers)
{
    struct shaky_peer *peer = arg;
    enum shaky_mode mode;

    (void)group;
    do {
        pthread_mutex_lock(&peer->lock);
        mode = peer->mode;
        pthread_mutex_unlock(&peer->lock);
    } while (mode == SHAKY_DEAF && usleep(1000) == 0);
    for (size_t i = 0; i < n; i++) {
        uint64_t key;

        memcpy(&key, (const uint8_t *)keys + i * 8, 8);
        tiers[i] = key / 1000 == 1 ? KV_TIER_HOST : KVBM_NO_TIER;
    }
}

static void shaky_unhold(void *arg, void *hold)
{
    struct shaky_peer *peer = arg;

    (void)hold;
    pthread_mutex_lock(&peer->lock);
    peer->n_holds--;
    pthread_mutex_unlock(&peer->lock);
}

/** Change the mode; what hangs fails now. */
static void shaky_be(struct shaky_peer *peer, enum shaky_mode mode)
{
    for (;;) {
        kvbm_held_fn held = NULL;
        void *to = NULL;

        pthread_mutex_lock(&peer->lock);
        peer->mode = mode;
        if (peer->n_hanging) {
            held = peer->hanging[--peer->n_hanging].held;
            to = peer->hanging[peer->n_hanging].to;
        }
        pthread_mutex_unlock(&peer->lock);
        if (!held)
            return;
        held(to, -EIO, NULL, NULL);
    }
}

/** Begin a good peer that listens at @at. Its block i has the bytes of key @first + i. */
static void shaky_init(struct shaky_peer *peer, const char *at, const uint64_t *keys)
{
    const struct kvbm_agent_opts who = {
        .size = sizeof(who), .name = "shaky", .fingerprint = "test", .listen = &at, .n_listen = 1};
    struct kvbm_block_source source = {.size = sizeof(source),
                                       .arg = peer,
                                       .lookup = shaky_lookup,
                                       .hold = shaky_hold,
                                       .unhold = shaky_unhold};
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    const struct kvbm_layout_config config = world_block_of(SHAKY_BLOCKS);
    struct kvbm_blockset_opts what = {
        .size = sizeof(what), .id = 1, .source = &source, .lease_share = 100};
    struct world w;

    memset(peer, 0, sizeof(*peer));
    pthread_mutex_init(&peer->lock, NULL);
    assert_int_equal(kvbm_layout_allocate(&config, &allocator, &peer->layout), 0);
    w.layout = peer->layout;
    for (uint32_t i = 0; i < SHAKY_BLOCKS; i++)
        world_fill(&w, i, keys[i]);
    what.layout = peer->layout;
    assert_int_equal(kvbm_agent_create(&who, &peer->agent), 0);
    assert_int_equal(kvbm_blockset_export(peer->agent, &what, &peer->set), 0);
}

static void shaky_fini(struct shaky_peer *peer)
{
    shaky_be(peer, SHAKY_FAILS);
    kvbm_blockset_destroy(peer->set);
    assert_int_equal(peer->n_holds, 0);
    assert_int_equal(kvbm_agent_destroy(peer->agent), 0);
    kvbm_layout_destroy(peer->layout);
    pthread_mutex_destroy(&peer->lock);
}

#endif
