// SPDX-License-Identifier: Apache-2.0
/*
 * A block manager with a ZMQ sink, for test_kvbm.py: kvbm_engine POLICY SCOPE REPLAY QUEUE_BYTES
 * [DISCOVERY WORKER RANK PLANE], the last four for a second sink, for Dynamo's plane: "zmq" or the URL of
 * a NATS server. Each line is a command. Its answer is some lines, the last of which is a dot:
 *
 *   run SEED STEPS   random steps on two tiers: match, fill, register, hold, release, evict
 *   threads SEED STEPS   the same, by several threads at once
 *   flush            all that was written is handed to ZMQ; says how much was dropped
 *   prompts          "DEVICE FOUND ANY TOKEN..." of each prompt: its prefix in the device's pool;
 *                    with what the host's has behind that, as kvbm_manager_onboard looks; in any
 *   keys             "KEY TIERS" of each block that is somewhere
 *   mark N           register a prompt of its own; "TOKEN..."
 *   dynamo           "PUBLISHER EVENTS MESSAGES LOSSES ANNOUNCED" of that sink
 *   reset            forget everything
 *
 * Policies that evict parents before children: "lfu", and "priority" (LRU with random priorities).
 * "reject": LRU, and no duplicates.
 */
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/unit.h"
#include "kvbm.h"

enum { BLOCK = 4, PROMPTS = 48, DEPTH = 8, HOLDS = 6, TOKENS = DEPTH * BLOCK, THREADS = 3 };

struct prompt {
    uint32_t tokens[TOKENS];
    uint64_t keys[DEPTH];
};

struct hold {
    struct kvbm_pool *pool;
    struct kvbm_immutable blocks[DEPTH];
    size_t n;
};

static struct {
    struct kvbm_events *events;
    struct kve_publisher *publisher;
    struct kvbm_dynamo *dynamo; /* NULL: no such sink */
    struct kvbm_registry *registry;
    struct kvbm_pool *pools[2]; /* device, host */
    struct prompt prompts[PROMPTS];
    struct hold holds[HOLDS];
    bool priorities;
    uint32_t marks; /* numbered from 1 */
} engine;

/* End the program, which its test sees, when something happened that can't. */
static void must(bool true_enough, const char *what)
{
    if (true_enough)
        return;
    fprintf(stderr, "kvbm_engine: %s failed\n", what);
    abort();
}

/* Prompts form a tree: the deeper, the fewer share a block. */
static void make_prompts(void)
{
    for (uint32_t p = 0; p < PROMPTS; p++) {
        struct prompt *prompt = &engine.prompts[p];

        for (uint32_t j = 0; j < DEPTH; j++) {
            uint32_t branch = j < 5 ? p >> (5 - j) : p;

            for (uint32_t t = 0; t < BLOCK; t++)
                prompt->tokens[j * BLOCK + t] = j * 100000 + branch * 16 + t;
        }
        kvbm_hash_tokens(prompt->tokens, TOKENS, BLOCK, 0, 0, NULL, NULL, prompt->keys);
    }
}

static void let_go(struct hold *hold)
{
    must(kvbm_pool_release(hold->pool, hold->blocks, hold->n) == 0, "release");
    hold->n = 0;
}

/* Blocks [from, to) of a prompt by their tokens, one by one. */
static void fill(const struct prompt *prompt, size_t from, size_t to, struct kvbm_mutable *blocks,
                 struct kvbm_complete *ret)
{
    for (size_t i = from; i < to; i++) {
        struct kvbm_block_start start = {.size = sizeof(start),
                                         .parent = i ? &prompt->keys[i - 1] : NULL,
                                         .position = (uint32_t)i};
        struct kvbm_mutable *block = &blocks[i - from];

        must(kvbm_mutable_init_sequence(block, &start) == 0, "init");
        must(kvbm_mutable_add_tokens(block, prompt->tokens + i * BLOCK, BLOCK) == BLOCK, "tokens");
        must(kvbm_mutable_commit(block, &ret[i - from]) == 0, "commit");
    }
}

/* Hold the first @n blocks of a prompt in @pool: those it has, and new ones. False: no room. */
static bool take(struct kvbm_pool *pool, const struct prompt *prompt, size_t n, bool by_tokens,
                 struct hold *ret)
{
    struct kvbm_mutable blocks[DEPTH] = {0};
    struct kvbm_complete complete[DEPTH] = {0};
    long have = kvbm_pool_match(pool, 0, prompt->keys, n, 0, ret->blocks);
    size_t from = (size_t)have;
    struct kvbm_chain chain = {.size = sizeof(chain),
                               .keys = prompt->keys + from,
                               .parent = from ? &prompt->keys[from - 1] : NULL,
                               .position = (uint32_t)from,
                               .tokens = prompt->tokens + from * BLOCK};

    must(have >= 0, "match");
    ret->pool = pool;
    ret->n = from;
    if (from == n)
        return true;
    if (kvbm_pool_allocate(pool, n - from, blocks, NULL) < 0) {
        let_go(ret);
        return false;
    }
    if (by_tokens)
        fill(prompt, from, n, blocks, complete);
    else
        must(kvbm_pool_complete(pool, blocks, n - from, &chain, complete) == 0, "complete");
    must(kvbm_pool_register(pool, complete, n - from, ret->blocks + from) == 0, "register");
    ret->n = n;
    return true;
}

/* @holds: [n_holds], of nobody else. */
static void step(uint64_t *random, struct hold *holds, size_t n_holds)
{
    struct kvbm_pool *pool = engine.pools[unit_below(random, 10) < 3];
    const struct prompt *prompt = &engine.prompts[unit_below(random, PROMPTS)];
    struct hold *hold = &holds[unit_below(random, n_holds)];
    size_t n = 1 + unit_below(random, DEPTH);

    if (hold->n)
        let_go(hold);
    if (unit_below(random, 8) == 0)
        kvbm_pool_touch(pool, 0, prompt->keys, n);
    if (engine.priorities)
        kvbm_pool_retain(pool, 0, prompt->keys + unit_below(random, DEPTH), 1,
                         (uint32_t)unit_below(random, 101), 0);
    if (take(pool, prompt, n, unit_below(random, 2), hold) && unit_below(random, 2))
        let_go(hold);
}

static void run_steps(uint64_t seed, size_t n)
{
    uint64_t random = seed * 2 + 1;

    for (size_t i = 0; i < n; i++)
        step(&random, engine.holds, HOLDS);
    must(kvbm_registry_check(engine.registry) == 0, "check");
}

struct worker {
    pthread_t thread;
    struct hold *holds;
    uint64_t random;
    size_t n_steps;
};

static void *work(void *arg)
{
    struct worker *worker = arg;

    for (size_t i = 0; i < worker->n_steps; i++)
        step(&worker->random, worker->holds, HOLDS / THREADS);
    return NULL;
}

static void run_threads(uint64_t seed, size_t n)
{
    struct worker workers[THREADS];

    for (size_t i = 0; i < THREADS; i++) {
        struct worker *worker = &workers[i];

        *worker = (struct worker){.holds = &engine.holds[i * (HOLDS / THREADS)],
                                  .random = (seed * THREADS + i) * 2 + 1,
                                  .n_steps = n};
        must(pthread_create(&worker->thread, NULL, work, worker) == 0, "thread");
    }
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(workers[i].thread, NULL);
    must(kvbm_registry_check(engine.registry) == 0, "check");
}

static void flush(void)
{
    struct kve_publisher_stats stats = {.size = sizeof(stats)};
    struct kvbm_events_stats mine = {.size = sizeof(mine)};

    must(kvbm_events_flush(engine.events, 60000) == 0, "flush");
    must(kve_publisher_flush(engine.publisher, 60000) == 0, "publisher's flush");
    kve_publisher_get_stats(engine.publisher, &stats);
    kvbm_events_get_stats(engine.events, &mine);
    printf("%" PRIu64 " %" PRIu64 " %" PRIu64 "\n", mine.written, mine.dropped, stats.batches);
}

static struct prompt mark_prompt(uint32_t n)
{
    struct prompt prompt = {.tokens = {4000000000, n, n, n}};

    kvbm_hash_tokens(prompt.tokens, BLOCK, BLOCK, 0, 0, NULL, NULL, prompt.keys);
    return prompt;
}

static void mark(uint32_t n)
{
    struct prompt prompt = mark_prompt(n);
    struct hold hold = {0};

    for (size_t i = 0; i < HOLDS && !take(engine.pools[0], &prompt, 1, true, &hold); i++) {
        if (engine.holds[i].n)
            let_go(&engine.holds[i]);
    }
    must(hold.n == 1, "room for a mark");
    let_go(&hold);
    engine.marks = n;
    printf("%u %u %u %u\n", prompt.tokens[0], n, n, n);
}

static void tiers_of(const struct prompt *prompt, uint8_t *ret)
{
    must(kvbm_registry_locate(engine.registry, 0, prompt->keys, DEPTH, ret) == 0, "locate");
}

static void list_prompts(void)
{
    for (size_t p = 0; p < PROMPTS; p++) {
        const struct prompt *prompt = &engine.prompts[p];
        long device = kvbm_pool_probe(engine.pools[0], 0, prompt->keys, DEPTH), any = 0;
        long host = kvbm_pool_probe(engine.pools[1], 0, prompt->keys + device, DEPTH - device);
        uint8_t tiers[DEPTH];

        tiers_of(prompt, tiers);
        while (any < DEPTH && tiers[any])
            any++;
        printf("%ld %ld %ld", device, device + host, any);
        for (size_t i = 0; i < TOKENS; i++)
            printf(" %u", prompt->tokens[i]);
        printf("\n");
    }
}

static void list_keys(void)
{
    for (size_t p = 0; p < PROMPTS; p++) {
        uint8_t tiers[DEPTH];

        tiers_of(&engine.prompts[p], tiers);
        for (size_t i = 0; i < DEPTH; i++) {
            if (tiers[i])
                printf("%" PRIu64 " %u\n", engine.prompts[p].keys[i], tiers[i]);
        }
    }
    for (uint32_t n = 1; n <= engine.marks; n++) {
        struct prompt prompt = mark_prompt(n);
        uint8_t tiers;

        must(kvbm_registry_locate(engine.registry, 0, prompt.keys, 1, &tiers) == 0, "locate");
        if (tiers)
            printf("%" PRIu64 " %u\n", prompt.keys[0], tiers);
    }
}

static void let_all_go(void)
{
    for (size_t i = 0; i < HOLDS; i++) {
        if (engine.holds[i].n)
            let_go(&engine.holds[i]);
    }
}

static void reset(void)
{
    let_all_go();
    must(kvbm_pool_reset(engine.pools[0]) == 0 && kvbm_pool_reset(engine.pools[1]) == 0, "reset");
}

static void tell_dynamo(void)
{
    struct kvbm_dynamo_stats stats = KVBM_DYNAMO_STATS_INIT;

    must(kvbm_dynamo_get_stats(engine.dynamo, &stats) == 0, "the sink's statistics");
    printf("%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %d\n", stats.publisher, stats.events,
           stats.messages, stats.losses, stats.announced);
}

static void obey(const char *line)
{
    char *rest = strchr(line, ' ');
    uint64_t seed = rest ? strtoull(rest, &rest, 10) : 0;

    if (strncmp(line, "run", 3) == 0)
        run_steps(seed, rest ? strtoul(rest, NULL, 10) : 0);
    else if (strncmp(line, "threads", 7) == 0)
        run_threads(seed, rest ? strtoul(rest, NULL, 10) : 0);
    else if (strncmp(line, "flush", 5) == 0)
        flush();
    else if (strncmp(line, "prompts", 7) == 0)
        list_prompts();
    else if (strncmp(line, "keys", 4) == 0)
        list_keys();
    else if (strncmp(line, "mark", 4) == 0)
        mark((uint32_t)seed);
    else if (strncmp(line, "reset", 5) == 0)
        reset();
    else if (strncmp(line, "dynamo", 6) == 0)
        tell_dynamo();
    printf(".\n");
    fflush(stdout);
}

static void add_dynamo(char **argv, enum kvbm_event_scope scope)
{
    struct kvp_nats_opts nats = {.size = sizeof(nats), .url = argv[3]};
    struct kvbm_dynamo_opts opts = {.size = sizeof(opts),
                                    .discovery = argv[0],
                                    .endpoint = "ns1.backend.generate",
                                    .worker = strtoull(argv[1], NULL, 10),
                                    .rank = (uint32_t)strtoul(argv[2], NULL, 10),
                                    .block_size = BLOCK,
                                    .scope = scope};

    if (strcmp(argv[3], "zmq") == 0)
        opts.address = "tcp://127.0.0.1:*";
    else
        opts.nats = &nats;
    must(kvbm_events_add_dynamo(engine.events, &opts, &engine.dynamo) > 0, "sink for Dynamo");
}

/* Publish on the NATS server at @url, too. */
static void add_nats(const char *url)
{
    struct kvp_nats_opts server = {.size = sizeof(server), .url = url, .reconnect_ms = 50};
    struct kvbm_nats_opts nats = {.size = sizeof(nats),
                                  .server = &server,
                                  .cluster = "c",
                                  .model = "m",
                                  .tenant = "default",
                                  .worker = "1",
                                  .window_ms = 100};

    must(kvbm_events_add_nats(engine.events, &nats, NULL) > 0, "NATS sink");
}

static void start(char **argv)
{
    struct kve_publisher_opts publisher = {.size = sizeof(publisher),
                                           .endpoint = "tcp://127.0.0.1:*"};
    struct kvbm_events_opts events = {.size = sizeof(events),
                                      .queue_bytes = strtoull(argv[4], NULL, 10)};
    struct kvbm_zmq_opts zmq = {.size = sizeof(zmq), .publisher = &publisher, .block_size = BLOCK};
    struct kvbm_registry_opts registry = {.size = sizeof(registry)};
    struct kvbm_pool_opts pool = {.size = sizeof(pool), .block_size = BLOCK};

    publisher.replay_endpoint = strcmp(argv[3], "replay") == 0 ? "tcp://127.0.0.1:*" : NULL;
    zmq.scope =
        strcmp(argv[2], "consolidated") == 0 ? KVBM_EVENTS_CONSOLIDATED : KVBM_EVENTS_PER_TIER;
    pool.eviction = strcmp(argv[1], "lineage") == 0 ? KVBM_EVICT_LINEAGE
                    : strcmp(argv[1], "lfu") == 0   ? KVBM_EVICT_LFU
                                                    : KVBM_EVICT_LRU;
    engine.priorities = strcmp(argv[1], "priority") == 0;
    pool.reject_duplicates = strcmp(argv[1], "reject") == 0;
    must(kvbm_events_create(&events, &engine.events) == 0, "events");
    must(kvbm_events_add_zmq(engine.events, &zmq, &engine.publisher) > 0, "sink");
    if (argv[5] && argv[6])
        add_dynamo(argv + 5, zmq.scope);
    else if (argv[5])
        add_nats(argv[5]);
    registry.events = engine.events;
    must(kvbm_registry_create(&registry, &engine.registry) == 0, "registry");
    pool.n_blocks = 60;
    must(kvbm_pool_create(engine.registry, &pool, &engine.pools[0]) == 0, "device pool");
    pool.tier = KV_TIER_HOST;
    pool.n_blocks = 90;
    must(kvbm_pool_create(engine.registry, &pool, &engine.pools[1]) == 0, "host pool");
    make_prompts();
}

/* Forget everything, with events on their way, and tell it. */
static void end(void)
{
    let_all_go();
    must(kvbm_pool_destroy(engine.pools[0]) == 0, "destroy");
    must(kvbm_pool_destroy(engine.pools[1]) == 0, "destroy");
    must(kvbm_registry_destroy(engine.registry) == 0, "destroy");
    must(kvbm_events_destroy(engine.events) == 0, "destroy");
}

int main(int argc, char **argv)
{
    const char *replay;
    char line[64];

    if (argc != 5 && argc != 6 && argc != 9)
        return 2;
    start(argv);
    replay = kve_publisher_replay_endpoint(engine.publisher);
    printf("%s %s\n", kve_publisher_endpoint(engine.publisher), replay ? replay : "-");
    fflush(stdout);
    while (fgets(line, sizeof(line), stdin))
        obey(line);
    end();
    return 0;
}
