// SPDX-License-Identifier: Apache-2.0
/*
 * The directory of peers' sets: generations, restarts, names taken twice, staleness of lists. A
 * random walk runs beside a naive model.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "base/unit.h"
#include "index/random.h"
#include "peer_unit.h"

static void owner_export(struct owner *o, uint32_t id, bool writable, uint64_t lifetime_ms)
{
    struct kvbm_blockset_opts opts = {.size = sizeof(opts),
                                      .id = id,
                                      .layout = o->layout,
                                      .writable = writable,
                                      .lifetime_ms = lifetime_ms};

    if (o->set && kvbm_blockset_update(o->set, &opts) == 0) {
        o->len = bytes_of(o->set, o->bytes);
        return;
    }
    kvbm_blockset_destroy(o->set);
    assert_int_equal(kvbm_blockset_export(o->agent, &opts, &o->set), 0);
    o->len = bytes_of(o->set, o->bytes);
}

static void owner_init(struct owner *o, const char *name, uint64_t worker)
{
    memset(o, 0, sizeof(*o));
    o->agent = agent_named(name, worker);
    o->layout = small_layout();
    owner_export(o, 0, false, 0);
}

static int import(struct kvbm_agent *reader, const struct owner *o)
{
    return kvbm_blockset_import(reader, o->bytes, o->len, NULL);
}

static void test_refusals(void **state)
{
    struct kvbm_agent_opts other = {.size = sizeof(other), .name = "r", .worker = 1};
    struct kvbm_agent *reader;
    struct owner o;

    (void)state;
    owner_init(&o, "owner", 7);
    assert_int_equal(import(o.agent, &o), -ELOOP);
    reader = agent_named("owner", 8);
    assert_int_equal(import(reader, &o), -ELOOP);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    reader = agent_named("other", 7);
    assert_int_equal(import(reader, &o), -ELOOP);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    other.fingerprint = "another model";
    assert_int_equal(kvbm_agent_create(&other, &reader), 0);
    assert_int_equal(import(reader, &o), -EMEDIUMTYPE);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    other.fingerprint = "model";
    other.key_len = 16;
    assert_int_equal(kvbm_agent_create(&other, &reader), 0);
    assert_int_equal(import(reader, &o), -EMEDIUMTYPE);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    assert_int_equal(kvbm_blockset_import(NULL, o.bytes, o.len, NULL), -EINVAL);
    assert_int_equal(kvbm_blockset_import(o.agent, NULL, o.len, NULL), -EINVAL);
    owner_fini(&o);
}

static void test_generations(void **state)
{
    const struct kvbm_block_at at[] = {{7, 0, 3}, {7, 0, 5}, {7, 0, 3}};
    struct kvbm_agent *reader = agent_named("reader", 1);
    struct kvbm_remote_blocks *first = NULL, *second = NULL;
    struct kvbm_view view;
    struct owner o, old;

    (void)state;
    owner_init(&o, "owner", 7);
    assert_int_equal(import(reader, &o), 0);
    assert_int_equal(import(reader, &o), -EEXIST);
    assert_int_equal(kvbm_remote_blocks_mutable(reader, at, 2, &first), -EPERM);
    assert_int_equal(kvbm_remote_blocks_immutable(reader, at, 3, &first), 0);
    assert_int_equal(kvbm_remote_blocks_view(first, 2, 0, 0, &view), 0);
    assert_int_equal(kvbm_remote_blocks_view(first, 3, 0, 0, &view), -ERANGE);
    assert_int_equal(kvbm_remote_blocks_view(first, 0, 2, 0, &view), -ERANGE);
    old = o;
    owner_export(&o, 0, true, 0);
    assert_int_equal(kvbm_blockset_generation(o.set), 2);
    assert_int_equal(kvbm_remote_blocks_check(first), 0); /* not yet told */
    assert_int_equal(import(reader, &o), 0);
    assert_int_equal(kvbm_remote_blocks_check(first), -ESTALE);
    assert_int_equal(kvbm_remote_blocks_view(first, 0, 0, 0, &view), -ESTALE);
    assert_int_equal(import(reader, &old), -ESTALE);                               /* replayed */
    assert_int_equal(kvbm_remote_blocks_mutable(reader, at, 3, &second), -EINVAL); /* 3 twice */
    assert_int_equal(kvbm_remote_blocks_mutable(reader, at, 2, &second), 0);
    assert_int_equal(kvbm_agent_forget(reader, "owner"), 1);
    assert_int_equal(kvbm_agent_forget(reader, "owner"), 0);
    assert_int_equal(kvbm_remote_blocks_check(second), -ESTALE);
    assert_int_equal(kvbm_agent_destroy(reader), -EBUSY);
    kvbm_remote_blocks_destroy(first);
    kvbm_remote_blocks_destroy(second);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
}

/* A set that is exported again under its id begins above what peers may know. */
static void test_withdrawn(void **state)
{
    struct owner o;

    (void)state;
    owner_init(&o, "owner", 7);
    owner_export(&o, 0, false, 0);
    assert_int_equal(kvbm_agent_destroy(o.agent), -EBUSY);
    kvbm_blockset_destroy(o.set);
    o.set = NULL;
    owner_export(&o, 0, false, 0);
    assert_int_equal(kvbm_blockset_generation(o.set), 3);
    owner_fini(&o);
}

static void test_lists(void **state)
{
    const struct kvbm_block_at at[] = {{7, 0, 5}, {7, 1, 5}, {8, 0, 5}, {7, 0, 6}};
    struct kvbm_agent *reader = agent_named("reader", 1);
    struct kvbm_remote_blocks *list = NULL;
    struct owner o;

    (void)state;
    owner_init(&o, "owner", 7);
    assert_int_equal(import(reader, &o), 0);
    assert_int_equal(kvbm_remote_blocks_immutable(reader, at, 0, &list), -EINVAL);
    assert_int_equal(kvbm_remote_blocks_immutable(reader, at, 2, &list), -EXDEV);
    assert_int_equal(kvbm_remote_blocks_immutable(reader, at, 3, &list), -EXDEV);
    assert_int_equal(kvbm_remote_blocks_immutable(reader, at + 1, 1, &list), -ENOENT);
    assert_int_equal(kvbm_remote_blocks_immutable(reader, at + 2, 1, &list), -ENOENT);
    assert_int_equal(kvbm_remote_blocks_immutable(reader, at + 3, 1, &list), -ERANGE);
    assert_int_equal(kvbm_remote_blocks_check(NULL), -EINVAL);
    kvbm_remote_blocks_destroy(NULL);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
}

static void test_expiry(void **state)
{
    const struct kvbm_block_at at = {7, 0, 3};
    struct kvbm_agent *reader = agent_named("reader", 1);
    struct kvbm_remote_blocks *list = NULL;
    struct owner o;
    int rc = 0;

    (void)state;
    owner_init(&o, "owner", 7);
    owner_export(&o, 0, false, 200);
    assert_int_equal(import(reader, &o), 0);
    if (kvbm_remote_blocks_immutable(reader, &at, 1, &list) == 0) { /* within 200 ms */
        while ((rc = kvbm_remote_blocks_check(list)) == 0)
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        assert_int_equal(rc, -ESTALE);
        kvbm_remote_blocks_destroy(list);
    }
    assert_int_equal(kvbm_remote_blocks_immutable(reader, &at, 1, &list), -ESTALE);
    owner_export(&o, 0, false, UINT64_MAX);
    assert_int_equal(import(reader, &o), 0); /* renewed, for longer than there are nanoseconds */
    assert_int_equal(kvbm_remote_blocks_immutable(reader, &at, 1, &list), 0);
    assert_int_equal(kvbm_remote_blocks_check(list), 0);
    kvbm_remote_blocks_destroy(list);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
}

/* A restarted peer, and one that takes another's name or worker. */
static void test_restarts(void **state)
{
    struct kvbm_agent *reader = agent_named("reader", 1);
    struct kvbm_remote_set *set = NULL;
    struct owner first, again, name, worker;

    (void)state;
    owner_init(&first, "owner", 7);
    owner_init(&again, "owner", 7);
    owner_init(&name, "owner", 8);
    owner_init(&worker, "another", 7);
    assert_int_equal(kvbm_blockset_import(reader, first.bytes, first.len, &set), 0);
    assert_int_equal(import(reader, &again), -EEXIST);
    assert_int_equal(import(reader, &name), -EEXIST);
    assert_int_equal(import(reader, &worker), -EEXIST);
    kvbm_remote_set_invalidate(set);
    kvbm_remote_set_invalidate(NULL);
    assert_int_equal(import(reader, &first), -ESTALE); /* replayed */
    assert_int_equal(import(reader, &again), -EEXIST);
    assert_int_equal(kvbm_agent_forget(reader, "owner"), 0);
    assert_int_equal(import(reader, &again), 0);
    assert_int_equal(import(reader, &first), -EEXIST); /* the old one, replayed */
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&first);
    owner_fini(&again);
    owner_fini(&name);
    owner_fini(&worker);
}

/* Sets are bounded by bytes, too; a new generation takes the place of the old one's. */
static void test_bytes(void **state)
{
    struct kvbm_agent_opts opts = {
        .size = sizeof(opts), .name = "reader", .worker = 1, .fingerprint = "model"};
    struct kvbm_agent *reader = NULL;
    struct kvbm_remote_set *set = NULL;
    struct owner a, b;

    (void)state;
    owner_init(&a, "a", 7);
    owner_init(&b, "b", 8);
    opts.max_bytes = a.len + b.len - 1;
    assert_int_equal(kvbm_agent_create(&opts, &reader), 0);
    assert_int_equal(kvbm_blockset_import(reader, a.bytes, a.len, &set), 0);
    assert_int_equal(import(reader, &b), -ENOSPC);
    owner_export(&a, 0, true, 0);
    assert_int_equal(kvbm_blockset_import(reader, a.bytes, a.len, &set), 0);
    kvbm_remote_set_invalidate(set);
    assert_int_equal(import(reader, &b), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&a);
    owner_fini(&b);
}

/* Agents that were given no worker draw one, and so don't take each other for themselves. */
static void test_drawn_worker(void **state)
{
    struct kvbm_agent *reader = agent_named("reader", 0);
    struct owner o;

    (void)state;
    owner_init(&o, "owner", 0);
    assert_int_equal(import(reader, &o), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&o);
}

/* ---- beside a naive model ---- */

#define PEERS 4
#define IDS 3
#define LISTS 8
#define MAX_SETS 7

static struct {
    struct kvbm_agent *reader;
    struct owner owners[PEERS];
    uint64_t latest[PEERS][IDS];              /* generation of the owner's bytes; 0: none */
    uint64_t known[PEERS][IDS];               /* generation that the reader has had; 0: none */
    struct kvbm_remote_set *sets[PEERS][IDS]; /* NULL: invalidated, or never there */
    struct {
        struct kvbm_remote_blocks *list;
        int peer, id;
        uint64_t generation;
        bool gone; /* the set was forgotten since */
    } lists[LISTS];
} m;

static int n_known(void)
{
    int n = 0;

    for (int p = 0; p < PEERS; p++) {
        for (int i = 0; i < IDS; i++)
            n += m.known[p][i] != 0;
    }
    return n;
}

/* Export the next generation of a set and import it, or one of an earlier time. */
static void model_import(struct rng *rng)
{
    static struct {
        uint8_t bytes[SET_CAP];
        size_t len;
    } kept[PEERS][IDS][4]; /* of generations modulo 4 */
    int p = (int)rng_below(rng, PEERS), i = (int)rng_below(rng, IDS), expected;
    struct owner *o = &m.owners[p];
    uint64_t g = m.latest[p][i];

    if (g == 0 || rng_below(rng, 2)) {
        kvbm_blockset_destroy(o->set);
        o->set = NULL;
        owner_export(o, (uint32_t)i, rng_below(rng, 2), 0);
        g = ++m.latest[p][i];
        assert_int_equal(kvbm_blockset_generation(o->set), g);
        memcpy(kept[p][i][g % 4].bytes, o->bytes, o->len);
        kept[p][i][g % 4].len = o->len;
    } else {
        g -= KV_MIN(g - 1, (uint64_t)rng_below(rng, 4));
    }
    if (m.known[p][i] == 0)
        expected = n_known() < MAX_SETS ? 0 : -ENOSPC;
    else if (g > m.known[p][i])
        expected = 0;
    else
        expected = g == m.known[p][i] && m.sets[p][i] ? -EEXIST : -ESTALE;
    assert_int_equal(kvbm_blockset_import(m.reader, kept[p][i][g % 4].bytes, kept[p][i][g % 4].len,
                                          &m.sets[p][i]),
                     expected);
    if (expected == 0)
        m.known[p][i] = g;
}

static void model_forget(struct rng *rng)
{
    int p = (int)rng_below(rng, PEERS);
    const char name[] = {(char)('a' + p), '\0'};
    long n = 0;

    for (int i = 0; i < IDS; i++)
        n += m.sets[p][i] != NULL;
    assert_int_equal(kvbm_agent_forget(m.reader, name), n);
    memset(m.known[p], 0, sizeof(m.known[p]));
    memset(m.sets[p], 0, sizeof(m.sets[p]));
    for (int l = 0; l < LISTS; l++)
        m.lists[l].gone = m.lists[l].gone || m.lists[l].peer == p;
}

static void model_invalidate(struct rng *rng)
{
    int p = (int)rng_below(rng, PEERS), i = (int)rng_below(rng, IDS);

    kvbm_remote_set_invalidate(m.sets[p][i]);
    m.sets[p][i] = NULL;
    for (int l = 0; l < LISTS; l++)
        m.lists[l].gone = m.lists[l].gone || (m.lists[l].peer == p && m.lists[l].id == i);
}

static void model_list(struct rng *rng)
{
    int l = (int)rng_below(rng, LISTS), p = (int)rng_below(rng, PEERS);
    int i = (int)rng_below(rng, IDS);
    const struct kvbm_block_at at = {10 + (uint64_t)p, (uint32_t)i, rng_below(rng, 8)};
    int rc;

    kvbm_remote_blocks_destroy(m.lists[l].list);
    m.lists[l].list = NULL;
    rc = kvbm_remote_blocks_immutable(m.reader, &at, 1, &m.lists[l].list);
    assert_int_equal(rc, !m.sets[p][i] ? -ENOENT : at.block >= 6 ? -ERANGE : 0);
    m.lists[l].peer = p;
    m.lists[l].id = i;
    m.lists[l].generation = m.known[p][i];
    m.lists[l].gone = false;
}

static void model_check(void)
{
    for (int l = 0; l < LISTS; l++) {
        bool fresh =
            !m.lists[l].gone && m.lists[l].generation == m.known[m.lists[l].peer][m.lists[l].id];

        if (m.lists[l].list)
            assert_int_equal(kvbm_remote_blocks_check(m.lists[l].list), fresh ? 0 : -ESTALE);
    }
}

static void test_model(void **state)
{
    struct kvbm_agent_opts opts = {.size = sizeof(opts),
                                   .name = "reader",
                                   .worker = 1,
                                   .fingerprint = "model",
                                   .max_sets = MAX_SETS};
    struct rng rng = {test_seed()};

    (void)state;
    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)rng.state);
    assert_int_equal(kvbm_agent_create(&opts, &m.reader), 0);
    for (int p = 0; p < PEERS; p++) {
        m.owners[p].agent = agent_named((const char[]){(char)('a' + p), '\0'}, 10 + (uint64_t)p);
        m.owners[p].layout = small_layout();
    }
    for (long round = test_rounds(20000); round > 0; round--) {
        uint32_t what = rng_below(&rng, 10);

        if (what < 5)
            model_import(&rng);
        else if (what < 8)
            model_list(&rng);
        else if (what < 9)
            model_invalidate(&rng);
        else
            model_forget(&rng);
        model_check();
    }
    for (int l = 0; l < LISTS; l++)
        kvbm_remote_blocks_destroy(m.lists[l].list);
    for (int p = 0; p < PEERS; p++)
        owner_fini(&m.owners[p]);
    assert_int_equal(kvbm_agent_destroy(m.reader), 0);
}

/* ---- many threads ---- */

static struct owner shared;
static atomic_bool over;

static void *use_lists(void *arg)
{
    const struct kvbm_block_at at = {7, 0, 3};
    struct kvbm_agent *reader = arg;
    struct kvbm_remote_blocks *list;
    struct kvbm_view view;

    while (!atomic_load(&over)) {
        list = NULL;
        if (kvbm_remote_blocks_immutable(reader, &at, 1, &list) != 0)
            continue;
        if (kvbm_remote_blocks_view(list, 0, 1, 1, &view) == 0 && view.len == 0)
            fail_msg("a view of nothing");
        kvbm_remote_blocks_destroy(list);
    }
    return NULL;
}

static void test_threads(void **state)
{
    struct kvbm_agent *reader = agent_named("reader", 1);
    pthread_t threads[3];

    (void)state;
    owner_init(&shared, "owner", 7);
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, use_lists, reader), 0);
    for (long round = test_rounds(2000); round > 0; round--) {
        owner_export(&shared, 0, false, 0);
        assert_int_equal(import(reader, &shared), 0);
        if (round % 10 == 0)
            assert_int_equal(kvbm_agent_forget(reader, "owner"), 1);
    }
    atomic_store(&over, true);
    for (int i = 0; i < 3; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    owner_fini(&shared);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refusals),  cmocka_unit_test(test_generations),
        cmocka_unit_test(test_withdrawn), cmocka_unit_test(test_lists),
        cmocka_unit_test(test_expiry),    cmocka_unit_test(test_restarts),
        cmocka_unit_test(test_bytes),     cmocka_unit_test(test_drawn_worker),
        cmocka_unit_test(test_model),     cmocka_unit_test(test_threads),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
