// SPDX-License-Identifier: Apache-2.0
/* Statistics of a pool: counters after known operations, Prometheus text, the dump, leaks. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "base/unit.h"
#include "cli/client/prom.h"
#include "kvbm.h"

#define BLOCK 4
#define CODE_PAGE \
    4096 /* the functions that acquire start on one each: an address tells which it was */
#define ACQUIRES __attribute__((noinline, aligned(CODE_PAGE)))

struct world {
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
};

static struct kvbm_pool *add_pool(struct kvbm_registry *registry, struct kvbm_pool_opts opts)
{
    struct kvbm_pool *pool = NULL;

    opts.size = sizeof(opts);
    opts.n_blocks = opts.n_blocks ? opts.n_blocks : 8;
    opts.block_size = BLOCK;
    assert_int_equal(kvbm_pool_create(registry, &opts, &pool), 0);
    return pool;
}

static struct world open_world(struct kvbm_pool_opts opts)
{
    struct world world = {0};

    assert_int_equal(kvbm_registry_create(NULL, &world.registry), 0);
    world.pool = add_pool(world.registry, opts);
    return world;
}

static void close_world(struct world *world)
{
    assert_int_equal(kvbm_registry_check(world->registry), 0);
    assert_int_equal(kvbm_pool_destroy(world->pool), 0);
    assert_int_equal(kvbm_registry_destroy(world->registry), 0);
}

static void complete(struct kvbm_pool *pool, const uint64_t *keys, size_t n,
                     struct kvbm_complete *ret)
{
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = keys};
    struct kvbm_mutable blocks[128];

    assert_int_equal(kvbm_pool_allocate(pool, n, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_complete(pool, blocks, n, &chain, ret), 0);
}

static void put(struct kvbm_pool *pool, const uint64_t *keys, size_t n, struct kvbm_immutable *ret)
{
    struct kvbm_complete blocks[128];

    complete(pool, keys, n, blocks);
    assert_int_equal(kvbm_pool_register(pool, blocks, n, ret), 0);
}

/* ---- counters ---- */

static const uint64_t keys[] = {0x11, 0x12, 0x13, 0x14, 0x15, 0x16};

/* A life of which each step is known; the world is left with something of every kind. */
static void live(struct kvbm_pool *pool, struct kvbm_mutable *partial, struct kvbm_complete *staged,
                 struct kvbm_immutable held[6])
{
    const uint64_t other = 0x99, absent[2] = {0x11, 0xbad};
    const uint32_t tokens[3] = {1, 2, 3};
    struct kvbm_mutable none[9];
    struct kvbm_immutable found[6], copy;

    put(pool, keys, 3, held);                              /* 3 of 8 */
    assert_int_equal(kvbm_pool_release(pool, held, 3), 0); /* 3 inactive */
    assert_int_equal(kvbm_pool_match(pool, 0, keys, 6, 0, found), 3);
    copy = found[2];
    assert_int_equal(kvbm_pool_release(pool, &found[2], 1), 0);
    assert_int_equal(kvbm_immutable_release(&copy), -ESTALE); /* its last handle is gone */
    assert_int_equal(kvbm_pool_match_scattered(pool, 0, absent, 2, 0, held), 1);
    assert_int_equal(kvbm_pool_allocate(pool, 9, none, NULL), -ENOSPC);
    put(pool, keys, 1, held + 1);                           /* a duplicate of held[0] */
    assert_int_equal(kvbm_pool_release(pool, found, 2), 0); /* 0x11 held twice, 0x12 inactive */
    complete(pool, &other, 1, staged);
    assert_int_equal(kvbm_pool_allocate(pool, 1, partial, NULL), 0);
    assert_int_equal(kvbm_mutable_init_sequence(partial, NULL), 0);
    assert_int_equal(kvbm_mutable_add_tokens(partial, tokens, 3), 3);
    assert_int_equal(kvbm_pool_allocate(pool, 3, none, NULL), 0); /* 2 free ones, 1 evicted: 0x13 */
    assert_int_equal(kvbm_pool_release_mutable(pool, none, 3), 0);
}

static void end(struct kvbm_pool *pool, struct kvbm_mutable *partial, struct kvbm_complete *staged,
                struct kvbm_immutable held[6])
{
    assert_int_equal(kvbm_mutable_release(partial), 0);
    assert_int_equal(kvbm_complete_release(staged), 0);
    assert_int_equal(kvbm_pool_release(pool, held, 2), 0);
}

static void test_counters(void **state)
{
    struct world world = open_world((struct kvbm_pool_opts){.name = "p"});
    struct kvbm_mutable partial;
    struct kvbm_complete staged;
    struct kvbm_immutable held[6];
    struct kvbm_pool_stats s = {.size = sizeof(s)};

    (void)state;
    kvbm_pool_get_stats(world.pool, &s);
    assert_int_equal(s.total_blocks, 8);
    assert_int_equal(s.reset_pool_size, 8);
    assert_int_equal(s.allocations + s.registrations + s.match_hashes_requested, 0);
    live(world.pool, &partial, &staged, held);
    kvbm_pool_get_stats(world.pool, &s);
    assert_int_equal(s.allocations, 3 + 1 + 1 + 1 + 3);
    assert_int_equal(s.allocations_from_reset, 8);
    assert_int_equal(s.evictions, 1);
    assert_int_equal(s.allocation_failures, 1);
    assert_int_equal(s.stagings, 3 + 1 + 1);
    assert_int_equal(s.registrations, 3);
    assert_int_equal(s.registration_dedup, 1);
    assert_int_equal(s.duplicate_blocks, 1);
    assert_int_equal(s.match_hashes_requested, 6);
    assert_int_equal(s.match_blocks_returned, 3);
    assert_int_equal(s.scan_hashes_requested, 2);
    assert_int_equal(s.scan_blocks_returned, 1);
    assert_int_equal(s.stale_handles, 1);
    assert_int_equal(s.total_blocks, 8);
    assert_int_equal(s.reset_pool_size, 3);
    assert_int_equal(s.inflight_mutable, 2);
    assert_int_equal(s.inflight_immutable, 2);
    assert_int_equal(s.inactive_pool_size, 1);
    end(world.pool, &partial, &staged, held);
    close_world(&world);
}

static void test_rejected_duplicates(void **state)
{
    struct world world = open_world((struct kvbm_pool_opts){.reject_duplicates = true});
    struct kvbm_immutable held[2];
    struct kvbm_pool_stats s = {.size = sizeof(s)};

    (void)state;
    put(world.pool, keys, 1, &held[0]);
    put(world.pool, keys, 1, &held[1]);
    kvbm_pool_get_stats(world.pool, &s);
    assert_int_equal(s.registrations, 1);
    assert_int_equal(s.registration_dedup, 1);
    assert_int_equal(s.duplicate_blocks, 0);
    assert_int_equal(s.inflight_immutable, 1);
    assert_int_equal(s.reset_pool_size, 7);
    assert_int_equal(kvbm_pool_release(world.pool, held, 2), 0);
    close_world(&world);
}

/* ---- Prometheus ---- */

static char *metrics(struct kvbm_registry *registry)
{
    long len = kvbm_registry_metrics(registry, NULL, 0);
    char *text = malloc((size_t)len + 1);

    assert_non_null(text);
    assert_true(len > 0);
    assert_int_equal(kvbm_registry_metrics(registry, text, (size_t)len + 1), len);
    assert_int_equal(strlen(text), len);
    return text;
}

/* The format's own rules: HELP, TYPE, then all samples of the family, each series once, a last
 * newline. */
static size_t check_format(const char *text)
{
    char family[64] = "", seen[128][160];
    size_t n_seen = 0;

    assert_int_equal(text[strlen(text) - 1], '\n');
    for (const char *line = text, *next; *line; line = next) {
        size_t len = strcspn(line, "\n"), n = strlen(family);
        char name[64], type[16];
        const char *value;

        next = line + len + 1;
        if (!strncmp(line, "# HELP ", 7)) {
            assert_int_equal(sscanf(line, "# HELP %63s", family), 1);
            assert_int_equal(sscanf(next, "# TYPE %63s %15s", name, type), 2);
            assert_string_equal(name, family);
            assert_true(!strcmp(type, "gauge") || !strcmp(type, "counter"));
            assert_int_equal(!strcmp(family + strlen(family) - 6, "_total"), *type == 'c');
            for (size_t i = 0; i < n_seen; i++) /* a family comes once */
                assert_true(strncmp(seen[i], family, strlen(family)) != 0 ||
                            seen[i][strlen(family)] != '{');
            next = strchr(next, '\n') + 1;
            continue;
        }
        assert_true(n && !strncmp(line, family, n) && line[n] == '{');
        value = memrchr(line, ' ', len);
        assert_true(value && strspn(value + 1, "0123456789") == len - (size_t)(value + 1 - line));
        assert_true(n_seen < KV_COUNT(seen));
        snprintf(seen[n_seen], sizeof(seen[0]), "%.*s", (int)(value - line), line);
        for (size_t i = 0; i < n_seen; i++)
            assert_string_not_equal(seen[i], seen[n_seen]);
        n_seen++;
    }
    return n_seen;
}

/* The value of a series, by the reader that `kvasir top` has. -1: not there. */
static double value_of(const char *text, const char *name, const char *pool)
{
    struct kc_prom prom;
    struct kc_sample sample;
    char label[64];

    kc_prom_init(&prom, text, strlen(text));
    while (kc_prom_next(&prom, &sample)) {
        if (sample.name.len == strlen(name) && !memcmp(sample.name.p, name, sample.name.len) &&
            kc_sample_label(&sample, "pool", label, sizeof(label)) && !strcmp(label, pool))
            return sample.value;
    }
    return -1;
}

static void test_metrics(void **state)
{
    static const struct {
        const char *name;
        double value;
    } wanted[] = {
        {"kvbm_allocations_total", 9},
        {"kvbm_allocations_from_reset_total", 8},
        {"kvbm_evictions_total", 1},
        {"kvbm_registrations_total", 3},
        {"kvbm_duplicate_blocks_total", 1},
        {"kvbm_registration_dedup_total", 1},
        {"kvbm_stagings_total", 5},
        {"kvbm_match_hashes_requested_total", 6},
        {"kvbm_match_blocks_returned_total", 3},
        {"kvbm_scan_hashes_requested_total", 2},
        {"kvbm_scan_blocks_returned_total", 1},
        {"kvbm_inflight_mutable", 2},
        {"kvbm_inflight_immutable", 2},
        {"kvbm_reset_pool_size", 3},
        {"kvbm_inactive_pool_size", 1},
        {"kvbm_total_blocks", 8},
        {"kvbm_allocation_failures_total", 1},
        {"kvbm_stale_handles_total", 1},
    };
    const char *name = "a \"quoted\\name\"\nof 2 lines";
    struct world world = open_world((struct kvbm_pool_opts){.name = name});
    struct kvbm_pool *host =
        add_pool(world.registry, (struct kvbm_pool_opts){.tier = KV_TIER_HOST, .n_blocks = 3});
    struct kvbm_mutable partial;
    struct kvbm_complete staged;
    struct kvbm_immutable held[6];
    char *text;

    (void)state;
    live(world.pool, &partial, &staged, held);
    text = metrics(world.registry);
    assert_int_equal(check_format(text) % 2, 0);
    for (size_t i = 0; i < KV_COUNT(wanted); i++) {
        assert_true(value_of(text, wanted[i].name, name) == wanted[i].value);
        assert_true(value_of(text, wanted[i].name, "host") >= 0);
    }
    assert_true(value_of(text, "kvbm_total_blocks", "host") == 3);
    assert_true(value_of(text, "kvbm_metadata_bytes", name) >= 8 * 48);
    free(text);
    end(world.pool, &partial, &staged, held);
    assert_int_equal(kvbm_pool_destroy(host), 0);
    close_world(&world);
}

static void test_metrics_cut_short(void **state)
{
    struct world world = open_world((struct kvbm_pool_opts){0});
    char *text = metrics(world.registry), *cut = malloc(strlen(text) + 1);
    long len = (long)strlen(text);

    (void)state;
    for (size_t cap = 0; cap <= (size_t)len; cap += cap < 3 ? 1 : 97) {
        memset(cut, 'x', (size_t)len + 1);
        assert_int_equal(kvbm_registry_metrics(world.registry, cut, cap), len);
        assert_int_equal(cut[cap], 'x');
        if (cap) {
            assert_int_equal(strlen(cut), cap - 1);
            assert_memory_equal(cut, text, cap - 1);
        }
    }
    assert_int_equal(kvbm_registry_metrics(NULL, cut, 1), -EINVAL);
    assert_int_equal(kvbm_registry_metrics(world.registry, NULL, 1), -EINVAL);
    free(cut);
    free(text);
    close_world(&world);
}

static double value_in(const char *text, const char *name, const char *registry, const char *pool)
{
    struct kc_prom prom;
    struct kc_sample sample;
    char label[64], other[64];

    kc_prom_init(&prom, text, strlen(text));
    while (kc_prom_next(&prom, &sample)) {
        if (sample.name.len == strlen(name) && !memcmp(sample.name.p, name, sample.name.len) &&
            kc_sample_label(&sample, "pool", label, sizeof(label)) && !strcmp(label, pool) &&
            kc_sample_label(&sample, "registry", other, sizeof(other)) && !strcmp(other, registry))
            return sample.value;
    }
    return -1;
}

/* One text for all registries of a process: each heading once, each series once. */
static void test_metrics_of_several(void **state)
{
    struct world worlds[3];
    struct kvbm_named_registry all[3] = {
        {.name = "model-a"}, {.name = "b \"quoted\\\"\n"}, {.name = ""}};
    char text[32768], one[16384], cut[100];
    struct kvbm_mutable blocks[3];
    long len;
    (void)state;

    for (size_t i = 0; i < 3; i++) {
        worlds[i] = open_world((struct kvbm_pool_opts){.n_blocks = 10 + (uint32_t)i});
        all[i].registry = worlds[i].registry;
        assert_int_equal(kvbm_pool_allocate(worlds[i].pool, i, blocks, NULL), 0);
        assert_int_equal(kvbm_pool_release_mutable(worlds[i].pool, blocks, i), 0);
    }
    len = kvbm_metrics(all, 3, text, sizeof(text));
    assert_int_equal(len, strlen(text));
    assert_int_equal(kvbm_metrics(all, 3, NULL, 0), len);
    assert_true(kvbm_registry_metrics(all[0].registry, one, sizeof(one)) < (long)sizeof(one));
    assert_int_equal(check_format(text), 3 * check_format(one));
    for (size_t i = 0; i < 3; i++) {
        assert_true(value_in(text, "kvbm_total_blocks", all[i].name, "device") == 10.0 + (double)i);
        assert_true(value_in(text, "kvbm_allocations_total", all[i].name, "device") == (double)i);
    }
    memset(cut, 'x', sizeof(cut));
    assert_int_equal(kvbm_metrics(all, 3, cut, 60), len);
    assert_int_equal(strlen(cut), 59);
    assert_memory_equal(cut, text, 59);
    assert_true(kvbm_metrics(NULL, 0, text, sizeof(text)) > 0);
    assert_int_equal(check_format(text), 0);
    assert_int_equal(kvbm_metrics(NULL, 1, text, sizeof(text)), -EINVAL);
    assert_int_equal(kvbm_metrics(all, 3, NULL, 1), -EINVAL);
    all[1].name = "not \xff";
    assert_int_equal(kvbm_metrics(all, 3, text, sizeof(text)), -EINVAL);
    all[1].name = NULL;
    assert_int_equal(kvbm_metrics(all, 3, text, sizeof(text)), -EINVAL);
    all[1].name = "model-a";
    assert_int_equal(kvbm_metrics(all, 3, text, sizeof(text)), -EINVAL);
    for (size_t i = 0; i < 3; i++)
        close_world(&worlds[i]);
}

/* Two pools under one label would be one series with two values. */
static void test_names_differ(void **state)
{
    struct world world = open_world((struct kvbm_pool_opts){.groups = 1});
    struct kvbm_pool *second = add_pool(world.registry, (struct kvbm_pool_opts){.groups = 6});
    struct kvbm_pool_opts same = {.size = sizeof(same),
                                  .name = "device-g1",
                                  .tier = KV_TIER_HOST,
                                  .n_blocks = 1,
                                  .block_size = BLOCK};
    struct kvbm_pool *none = NULL;
    char *text = metrics(world.registry);

    (void)state;
    check_format(text);
    assert_true(value_of(text, "kvbm_total_blocks", "device-g0") == 8);
    assert_true(value_of(text, "kvbm_total_blocks", "device-g1") == 8);
    free(text);
    assert_int_equal(kvbm_pool_create(world.registry, &same, &none), -EEXIST);
    same.name = "\xff";
    assert_int_equal(kvbm_pool_create(world.registry, &same, &none), -EINVAL);
    assert_null(none);
    assert_int_equal(kvbm_pool_destroy(second), 0);
    close_world(&world);
}

/* ---- the dump ---- */

static char *dump(struct kvbm_pool *pool, size_t max_blocks)
{
    char *text = NULL;
    size_t len;
    FILE *to = open_memstream(&text, &len);

    assert_non_null(to);
    assert_int_equal(kvbm_pool_dump(pool, to, max_blocks), 0);
    fclose(to);
    return text;
}

static void test_dump(void **state)
{
    static const char *const wanted[] = {
        "pool p: 8 blocks of 4 tokens, tier device, all groups, LRU eviction\n",
        "3 free, 2 mutable, 2 immutable, 1 inactive\n",
        "9 blocks: 8 free ones, 1 evicted; 1 allocations refused\n",
        "4 keys, 1 of them again, 1 kept as duplicates\n",
        "3 of 6 keys by prefix (50 %), 1 of 2 one by one (50 %)\n",
        "     block  state       handles  group  position  key\n",
        ("         0  registered        1      0         0  0000000000000011  1 duplicates  also "
         "in "
         "host\n"),
        "         1  inactive          0      0         1  0000000000000012  priority 80\n",
        "         3  duplicate         1      0         0  0000000000000011  of block 0",
        "         4  complete          1      0         0  0000000000000099\n",
        "         5  partial           1  3 of 4 tokens\n",
    };
    struct world world = open_world((struct kvbm_pool_opts){.name = "p"});
    struct kvbm_pool *host =
        add_pool(world.registry, (struct kvbm_pool_opts){.tier = KV_TIER_HOST});
    struct kvbm_mutable partial;
    struct kvbm_complete staged;
    struct kvbm_immutable held[6], copy;
    char *text, *at;

    (void)state;
    live(world.pool, &partial, &staged, held);
    put(host, keys, 1, &copy);
    assert_int_equal(kvbm_pool_retain(world.pool, 0, &keys[1], 1, 80, 0), 1);
    text = dump(world.pool, SIZE_MAX);
    at = text;
    for (size_t i = 0; i < KV_COUNT(wanted); i++) { /* in this order */
        char *cut = strstr(text, "  acquired at ");

        while (cut) { /* a debug build knows */
            char *rest = strchr(cut, '\n');

            memmove(cut, rest, strlen(rest) + 1);
            cut = strstr(text, "  acquired at ");
        }
        at = strstr(at, wanted[i]);
        if (!at)
            fail_msg("no \"%s\" in its place in:\n%s", wanted[i], text);
    }
    assert_null(strstr(text, "more that"));
    free(text);
    assert_int_equal(kvbm_pool_retain(world.pool, 0, &keys[1], 1, 35, 3600000), 1);
    text = dump(world.pool, 2);
    assert_non_null(strstr(text, "0000000000000012  priority 35 for 3"));
    assert_null(strstr(text, "duplicate  "));
    assert_non_null(strstr(text, " and 3 more that aren't free\n"));
    free(text);
    end(world.pool, &partial, &staged, held);
    assert_int_equal(kvbm_immutable_release(&copy), 0);
    assert_int_equal(kvbm_pool_destroy(host), 0);
    close_world(&world);
}

/* A terminal that needs the pool itself before it takes a line: with the lock held it would never
 * return. */
static ssize_t write_slowly(void *arg, const char *data, size_t len)
{
    struct kvbm_mutable block;

    (void)data;
    if (kvbm_pool_allocate(arg, 1, &block, NULL) < 0 || kvbm_mutable_release(&block) < 0)
        return -1;
    return (ssize_t)len;
}

static void test_a_dump_stops_nobody(void **state)
{
    struct world world = open_world((struct kvbm_pool_opts){.n_blocks = 100});
    cookie_io_functions_t io = {.write = write_slowly};
    struct kvbm_immutable held[90];
    uint64_t many[90];
    FILE *to;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(many); i++)
        many[i] = i + 1;
    put(world.pool, many, KV_COUNT(many), held);
    to = fopencookie(world.pool, "w", io);
    assert_non_null(to);
    setvbuf(to, NULL, _IONBF, 0);
    assert_int_equal(kvbm_pool_dump(world.pool, to, SIZE_MAX), 0);
    fclose(to);
    assert_int_equal(kvbm_pool_release(world.pool, held, KV_COUNT(many)), 0);
    close_world(&world);
}

/* ---- leaks ---- */

static char lines[160][1024];
static size_t n_lines;
static struct kvbm_pool *logged; /* asked while a line is taken: the lock isn't held */

static void record(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    struct kvbm_pool_stats stats = {.size = sizeof(stats)};

    (void)arg;
    kvbm_pool_get_stats(logged, &stats);
    assert_int_equal(level, KV_LOG_WARN);
    assert_true(n_lines < KV_COUNT(lines));
    snprintf(lines[n_lines++], sizeof(lines[0]), "%.*s", (int)len, line);
}

static void try_destroy(struct kvbm_pool *pool)
{
    n_lines = 0;
    logged = pool;
    kv_log_set_sink(record, NULL);
    assert_int_equal(kvbm_pool_destroy(pool), -EBUSY);
    kv_log_set_sink(NULL, NULL);
}

/* Called through pointers that the compiler can't see through, so that each stays a function. */
static ACQUIRES void by_allocate(struct kvbm_pool *pool, struct kvbm_mutable *ret)
{
    assert_int_equal(kvbm_pool_allocate(pool, 1, ret, NULL), 0);
}

static ACQUIRES void by_register(struct kvbm_pool *pool, struct kvbm_complete *block,
                                 struct kvbm_immutable *ret)
{
    assert_int_equal(kvbm_pool_register(pool, block, 1, ret), 0);
}

static ACQUIRES void by_match(struct kvbm_pool *pool, uint64_t key, struct kvbm_immutable *ret)
{
    assert_int_equal(kvbm_pool_match(pool, 0, &key, 1, 0, ret), 1);
}

static ACQUIRES void by_clone(const struct kvbm_immutable *block, struct kvbm_immutable *ret)
{
    assert_int_equal(kvbm_immutable_clone(block, ret), 0);
}

static ACQUIRES void by_upgrade(const struct kvbm_weak *block, struct kvbm_immutable *ret)
{
    assert_int_equal(kvbm_weak_upgrade(block, ret), 0);
}

/* Line @i tells of @block, acquired in the function at @code. */
static void check_leak(size_t i, unsigned block, const char *what, const void *code)
{
    extern const char __executable_start;
    char wanted[80];
    const char *at;
    uintptr_t offset;

    snprintf(wanted, sizeof(wanted), "pool=p block=%u %s", block, what);
    if (!strstr(lines[i], wanted))
        fail_msg("no \"%s\" in: %s", wanted, lines[i]);
    at = strstr(lines[i], "acquired=");
    assert_non_null(at);
    assert_non_null(strstr(at, "test-bm-stats(+0x"));
    offset = (uintptr_t)strtoull(strstr(at, "(+0x") + 2, NULL, 16);
    assert_true((uintptr_t)&__executable_start + offset - (uintptr_t)code < CODE_PAGE);
}

static void test_leaks_are_named(void **state)
{
    struct world world = open_world((struct kvbm_pool_opts){.name = "p", .track_handles = true});
    struct kvbm_mutable fresh;
    struct kvbm_complete full[4];
    struct kvbm_immutable held[4], more[4];
    struct kvbm_weak weak;
    char *text;

    (void)state;
    by_allocate(world.pool, &fresh); /* block 0 */
    for (size_t i = 0; i < 4; i++)
        complete(world.pool, &keys[i], 1, &full[i]); /* blocks 1 to 4 */
    for (size_t i = 0; i < 4; i++)
        by_register(world.pool, &full[i], &held[i]);
    by_match(world.pool, keys[1], &more[1]);
    by_clone(&held[2], &more[2]);
    assert_int_equal(kvbm_immutable_downgrade(&held[3], &weak), 0);
    by_upgrade(&weak, &more[3]);
    try_destroy(world.pool);
    assert_int_equal(n_lines, 6);
    assert_non_null(strstr(lines[0], "pool=p mutable=1 immutable=4"));
    check_leak(1, 0, "state=reset handles=1 key=-", (const void *)by_allocate);
    check_leak(2, 1, "state=registered handles=1 key=0000000000000011", (const void *)by_register);
    check_leak(3, 2, "state=registered handles=2", (const void *)by_match);
    check_leak(4, 3, "state=registered handles=2", (const void *)by_clone);
    check_leak(5, 4, "state=registered handles=2", (const void *)by_upgrade);
    text = dump(world.pool, 1);
    assert_non_null(strstr(text, "acquired at "));
    assert_non_null(strstr(text, "test-bm-stats(+0x"));
    free(text);
    /* Nothing was done to the pool. */
    assert_int_equal(kvbm_mutable_release(&fresh), 0);
    assert_int_equal(kvbm_pool_release(world.pool, held, 4), 0);
    assert_int_equal(kvbm_pool_release(world.pool, more + 1, 3), 0);
    close_world(&world);
}

/* A debug build knows who it was without being asked; another says that nobody looked. */
static void test_leaks_of_debug_builds(void **state)
{
    struct world world = open_world((struct kvbm_pool_opts){.name = "p"});
    struct kvbm_mutable fresh;
    char *text;

    (void)state;
    by_allocate(world.pool, &fresh);
    try_destroy(world.pool);
    assert_int_equal(n_lines, 2);
    text = dump(world.pool, 1);
#ifdef NDEBUG
    assert_non_null(
        strstr(lines[1], "pool=p block=0 state=reset handles=1 key=- acquired=untracked"));
    assert_null(strstr(text, "acquired"));
#else
    check_leak(1, 0, "state=reset handles=1 key=-", (const void *)by_allocate);
    assert_non_null(strstr(text, "acquired at "));
#endif
    free(text);
    assert_int_equal(kvbm_mutable_release(&fresh), 0);
    close_world(&world);
}

static void test_many_leaks(void **state)
{
    struct world world = open_world((struct kvbm_pool_opts){.n_blocks = 40000});
    struct kvbm_mutable *all = calloc(40000, sizeof(*all));

    (void)state;
    assert_non_null(all);
    assert_int_equal(kvbm_pool_allocate(world.pool, 40000, all, NULL), 0);
    assert_int_equal(kvbm_pool_release_mutable(world.pool, all, 39880), 0);
    try_destroy(world.pool); /* 120, at the far end */
    assert_int_equal(n_lines, 1 + 100);
    assert_non_null(strstr(lines[1], " block=39880 "));
    assert_non_null(strstr(lines[100], " block=39979 "));
    assert_int_equal(kvbm_pool_release_mutable(world.pool, all + 39880, 120), 0);
    free(all);
    close_world(&world);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counters),
        cmocka_unit_test(test_rejected_duplicates),
        cmocka_unit_test(test_metrics),
        cmocka_unit_test(test_metrics_cut_short),
        cmocka_unit_test(test_metrics_of_several),
        cmocka_unit_test(test_names_differ),
        cmocka_unit_test(test_dump),
        cmocka_unit_test(test_a_dump_stops_nobody),
        cmocka_unit_test(test_leaks_are_named),
        cmocka_unit_test(test_leaks_of_debug_builds),
        cmocka_unit_test(test_many_leaks),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
