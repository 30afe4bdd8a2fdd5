// SPDX-License-Identifier: Apache-2.0
/*
 * A node for test_kvbm_indexer.py: a manager that lends its blocks, publishes their events, and loads
 * from peers. kvbm_node WORKER ENDPOINT PEERS INDEXER ("-": none). The first line of its output has
 * the endpoints of its events. Each line of its input is a command; its answer is one line:
 *
 *   store FIRST N    store keys FIRST on; says how many
 *   load FIRST N     load them, compare their bytes; "PREFIX MILLISECONDS"
 *   stats            "PEERS HITS ASKED FAILED NAMED DOWN": of peers, then of the indexer
 */
#include <inttypes.h>

#include "base/core/clock.h"
#include "tier/kitchen.h"

#define HOST_BLOCKS 1024u

static struct {
    struct world w;
    struct kvbm_events *events;
    struct kve_publisher *publisher;
    struct kvbm_agent *agent;
    struct kvbm_blockset *set;
} node;

static void start(char **argv)
{
    const char *at = argv[2];
    char name[32];
    const struct kvbm_agent_opts who = {.size = sizeof(who),
                                        .name = name,
                                        .worker = strtoull(argv[1], NULL, 10),
                                        .fingerprint = "test",
                                        .listen = &at,
                                        .n_listen = 1};
    const struct kve_publisher_opts socket = {.size = sizeof(socket),
                                              .endpoint = "tcp://127.0.0.1:*",
                                              .replay_endpoint = "tcp://127.0.0.1:*"};
    const struct kvbm_zmq_opts zmq = {
        .size = sizeof(zmq), .publisher = &socket, .block_size = PAGE};

    snprintf(name, sizeof(name), "node-%s", argv[1]);
    world_init(&node.w, HOST_BLOCKS);
    assert_int_equal(kvbm_agent_create(&who, &node.agent), 0);
    assert_int_equal(kvbm_events_create(NULL, &node.events), 0);
    assert_true(kvbm_events_add_zmq(node.events, &zmq, &node.publisher) > 0);
    node.w.opts.agent = node.agent;
    node.w.opts.events = node.events;
    node.w.opts.host_shared = true;
    node.w.opts.peers = strcmp(argv[3], "-") != 0 ? argv[3] : NULL;
    node.w.opts.peer_timeout_ms = 60000;
    if (strcmp(argv[4], "-") != 0) {
        node.w.opts.indexer = argv[4];
        node.w.opts.indexer_model = "m";
    }
    world_start(&node.w);
    world_attach(&node.w, false);
}

static void lend(void)
{
    struct kvbm_block_source source = kvbm_manager_source(node.w.m);
    const struct kvbm_blockset_opts what = {.size = sizeof(what),
                                            .id = 1,
                                            .layout = kvbm_manager_host_layout(node.w.m),
                                            .source = &source,
                                            .shared = kvbm_manager_shared(node.w.m)};

    assert_int_equal(kvbm_blockset_export(node.agent, &what, &node.set), 0);
}

static void end(void)
{
    kvbm_blockset_destroy(node.set);
    assert_int_equal(world_stats(&node.w).pins_now, 0);
    world_stop(&node.w);
    assert_int_equal(kvbm_agent_destroy(node.agent), 0);
    assert_int_equal(kvbm_events_destroy(node.events), 0);
    world_fini(&node.w);
}

/* Store keys with tokens, from which the indexer learns which prompt they are. */
static long store(uint64_t first, uint32_t n)
{
    uint64_t keys[CACHE_BLOCKS];
    uint32_t blocks[CACHE_BLOCKS], tokens[CACHE_BLOCKS * PAGE];
    struct kvbm_chain chain = world_chain(keys);
    long stored;

    world_keys(first, keys, n);
    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = i;
        world_fill(&node.w, i, keys[i]);
    }
    for (uint32_t i = 0; i < n * PAGE; i++)
        tokens[i] = (uint32_t)first * 1000 + i;
    chain.tokens = tokens;
    stored = kvbm_cache_store(node.w.cache, &chain, n, blocks, 60000);
    assert_int_equal(kvbm_events_flush(node.events, 60000), 0);
    return stored;
}

/* Read the two numbers of a command. Returns false for another command. */
static bool numbers(const char *line, const char *command, uint64_t *first, uint32_t *n)
{
    size_t len = strlen(command);
    char *end;

    if (strncmp(line, command, len) != 0)
        return false;
    *first = strtoull(line + len, &end, 10);
    *n = (uint32_t)strtoul(end, NULL, 10);
    return *n <= CACHE_BLOCKS;
}

static void obey(const char *line)
{
    struct kvbm_manager_stats stats = world_stats(&node.w);
    uint64_t first, begun = kv_now_ns();
    uint32_t n;

    if (numbers(line, "store", &first, &n)) {
        printf("%ld\n", store(first, n));
    } else if (numbers(line, "load", &first, &n)) {
        long prefix = world_load(&node.w, first, n);

        printf("%ld %" PRIu64 "\n", prefix, (kv_now_ns() - begun) / KV_NS_PER_MS);
    } else {
        printf("%u %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %d\n", stats.peers_now,
               stats.peer.hits, stats.indexer_asked, stats.indexer_failed, stats.indexer_named,
               stats.indexer_down);
    }
    fflush(stdout);
}

int main(int argc, char **argv)
{
    char line[64];

    if (argc != 5)
        return 2;
    start(argv);
    lend();
    printf("%s %s\n", kve_publisher_endpoint(node.publisher),
           kve_publisher_replay_endpoint(node.publisher));
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin))
        obey(line);
    end();
    return 0;
}
