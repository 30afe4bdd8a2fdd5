// SPDX-License-Identifier: Apache-2.0
/*
 * Leases between two agents of one process: lookup, lease, read by shared memory, unix socket and
 * tcp; leases that end in every way; peers that lie. Blocks' bytes follow from their keys, so a block
 * that is called right is compared byte by byte.
 */
#include <fcntl.h>
#include <stdatomic.h>
#include <sys/mman.h>

#include "base/core/log.h"
#include "base/unit.h"
#include "lend_unit.h"
#include "peer/lease/lease_wire.h"

enum way { SHARED, UNIX, TCP, N_WAYS };

static struct {
    struct lending owner;
    struct kvbm_agent *reader;
    struct kvbm_session *session;
    struct kvbm_layout *to; /* the reader's */
    enum way way;
} t;

static void begin_with(enum way way, enum kvbm_layout_kind from, enum kvbm_layout_kind to)
{
    const char *endpoint = way == TCP ? "tcp:127.0.0.1:0" : unix_endpoint();
    const struct kvbm_agent_opts opts = session_opts("owner", &endpoint);
    const struct kvbm_layout_config config = lend_config(to);

    memset(&t, 0, sizeof(t));
    t.way = way;
    lend_init(&t.owner, &opts, from, way == SHARED);
    t.reader = agent_at("reader", NULL);
    t.session = open_session(t.reader, t.owner.agent, way == TCP);
    t.to = allocate(&config, KVBM_STORAGE_SYSTEM);
}

static void begin(enum way way)
{
    begin_with(way, KVBM_FULLY_CONTIGUOUS, KVBM_FULLY_CONTIGUOUS);
}

static void end(void)
{
    assert_int_equal(kvbm_session_close(t.session), 0);
    lend_wait_idle(&t.owner);
    lend_fini(&t.owner);
    assert_int_equal(kvbm_agent_destroy(t.reader), 0);
    kvbm_layout_destroy(t.to);
}

/* Run a check between an owner and a reader of each way. */
static void each_way(void (*check)(void))
{
    for (enum way way = 0; way < N_WAYS; way++) {
        begin(way);
        check();
        end();
    }
}

static struct kvbm_lease *lease_keys(const uint64_t *keys, size_t n, uint32_t time_ms)
{
    struct kvbm_lease *lease = NULL;

    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, n, time_ms, soon(), &lease), 0);
    assert_int_equal(kvbm_lease_is_shared(lease), t.way == SHARED);
    return lease;
}

/* Read keys [0, n) of a lease into blocks [0, n), wiped before. */
static long read_all(struct kvbm_lease *lease, uint32_t n, uint8_t *ok)
{
    uint32_t blocks[N_BLOCKS];
    struct kvbm_lease_read_opts opts = {.size = sizeof(opts),
                                        .to = t.to,
                                        .to_blocks = blocks,
                                        .n = n,
                                        .deadline_ns = soon(),
                                        .ok = ok};

    for (uint32_t i = 0; i < n; i++) {
        blocks[i] = i;
        lend_fill(t.to, i, UINT64_MAX);
    }
    return kvbm_lease_read(lease, &opts);
}

/* ---- what works ---- */

static void check_lookup(const uint64_t *keys, size_t n)
{
    uint8_t tiers[N_BLOCKS];

    assert_int_equal(kvbm_session_lookup(t.session, 1, 0, keys, n, soon(), tiers), 0);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(tiers[i], keys[i] <= N_BLOCKS ? KV_TIER_HOST : KVBM_NO_TIER);
}

static void check_lease_and_read(void)
{
    const uint64_t keys[] = {5, 6, 999, 7, 64, 1, 1000, 1001};
    struct kvbm_block_at at;
    struct kvbm_lease *lease;
    uint8_t ok[1] = {0xff};

    check_lookup(keys, KV_COUNT(keys));
    lease = lease_keys(keys, KV_COUNT(keys), 0);
    assert_int_equal(kvbm_lease_count(lease), 6); /* up to the last that the owner has */
    assert_int_equal(lend_pinned(&t.owner), 5);
    assert_true(kvbm_lease_expires(lease) > kv_now_ns());
    assert_int_equal(kvbm_lease_block(lease, 2, &at), -ENOENT);
    assert_int_equal(kvbm_lease_block(lease, 6, &at), -ERANGE);
    for (size_t i = 0; i < 6; i++) {
        if (keys[i] == 999)
            continue;
        assert_int_equal(kvbm_lease_block(lease, i, &at), 0);
        assert_true(lend_holds(t.owner.layout, at.block, keys[i]));
    }
    assert_int_equal(read_all(lease, 6, ok), 5);
    assert_int_equal(ok[0], 0x3b);
    for (uint32_t i = 0; i < 6; i++)
        assert_int_equal(lend_holds(t.to, i, keys[i]), keys[i] != 999);
    assert_int_equal(kvbm_lease_renew(lease, 20000, soon()), 0);
    kvbm_lease_release(lease);
    check_lookup(keys, 1); /* answered after the release, on the same session */
    assert_int_equal(lend_pinned(&t.owner), 0);
}

static void test_lookup_lease_read(void **state)
{
    static const enum kvbm_layout_kind kinds[] = {KVBM_FULLY_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS,
                                                  KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS};

    (void)state;
    for (enum way way = 0; way < N_WAYS; way++) {
        for (size_t i = 0; i < KV_COUNT(kinds); i++) {
            begin_with(way, kinds[i], kinds[(i + way) % KV_COUNT(kinds)]);
            check_lease_and_read();
            end();
        }
    }
}

/* Some keys, in another order, each block once more, with and without checksums. */
static void check_parts_of_a_lease(void)
{
    const uint64_t keys[] = {1, 2, 3, 4, 5, 6};
    const uint32_t places[] = {4, 0, 4, 2}, blocks[] = {9, 8, 7, 6};
    struct kvbm_lease_read_opts opts = {.size = sizeof(opts), .n = 4};
    struct kvbm_lease *lease;

    lease = lease_keys(keys, 6, 0);
    opts.keys = places;
    opts.to = t.to;
    opts.to_blocks = blocks;
    for (int with = 0; with < 4; with++) {
        opts.no_checksums = with & 1;
        opts.no_shared = with & 2;
        for (uint32_t i = 0; i < 4; i++)
            lend_fill(t.to, blocks[i], UINT64_MAX);
        assert_int_equal(kvbm_lease_read(lease, &opts), 4);
        for (uint32_t i = 0; i < 4; i++)
            assert_true(lend_holds(t.to, blocks[i], keys[places[i]]));
    }
    kvbm_lease_release(lease);
}

static void test_parts_of_a_lease(void **state)
{
    (void)state;
    each_way(check_parts_of_a_lease);
}

static void test_share(void **state)
{
    struct kvbm_mutable blocks[N_BLOCKS];
    uint64_t keys[N_BLOCKS];
    struct kvbm_lease *lease, *more = NULL;

    (void)state;
    begin(UNIX);
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        keys[i] = i + 1;
    lease = lease_keys(keys, N_BLOCKS, 0);
    assert_int_equal(kvbm_lease_count(lease), N_LEASABLE);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, 1, 0, soon(), &more), -ENOSPC);
    assert_int_equal(lend_pinned(&t.owner), N_LEASABLE);
    assert_int_equal(kvbm_pool_allocate(t.owner.pool, N_BLOCKS - N_LEASABLE + 1, blocks, NULL),
                     -ENOSPC);
    assert_int_equal(kvbm_pool_allocate(t.owner.pool, N_BLOCKS - N_LEASABLE, blocks, NULL), 0);
    assert_int_equal(kvbm_pool_release_mutable(t.owner.pool, blocks, N_BLOCKS - N_LEASABLE), 0);
    kvbm_lease_release(lease);
    end();
}

/* Where the share has room for one key only, a key without a block hides none behind it. */
static void test_share_behind_a_hole(void **state)
{
    const uint64_t asked[] = {999, N_LEASABLE + 1};
    uint64_t keys[N_LEASABLE - 1];
    struct kvbm_lease *lease, *none;
    struct kvbm_block_at at;

    (void)state;
    begin(UNIX);
    for (uint32_t i = 0; i < KV_COUNT(keys); i++)
        keys[i] = i + 1;
    lease = lease_keys(keys, KV_COUNT(keys), 0);
    none = lease_keys(asked, 2, 0);
    assert_int_equal(kvbm_lease_count(none), 1);
    assert_int_equal(kvbm_lease_block(none, 0, &at), -ENOENT);
    assert_int_equal(read_all(none, 1, NULL), 0);
    kvbm_lease_release(lease_keys(asked + 1, 1, 0)); /* the empty lease takes no room */
    kvbm_lease_release(none);
    none = NULL;
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, asked, 1, 0, soon(), &none), -ENOENT);
    kvbm_lease_release(lease);
    end();
}

static void test_arguments(void **state)
{
    const uint64_t key = 1, none = 12345;
    const uint32_t one = 1, beyond = N_BLOCKS, blocks[] = {0};
    struct kvbm_lease_read_opts opts = {.size = sizeof(opts), .n = 1, .to_blocks = blocks};
    struct kvbm_layout_config config;
    struct kvbm_lease *lease = NULL;
    struct kvbm_layout *other;
    uint8_t tier;

    (void)state;
    begin(UNIX);
    assert_int_equal(kvbm_session_lookup(NULL, 1, 0, &key, 1, soon(), &tier), -EINVAL);
    assert_int_equal(kvbm_session_lookup(t.session, 1, 0, &key, 0, soon(), &tier), -EINVAL);
    assert_int_equal(kvbm_session_lookup(t.session, 1, 64, &key, 1, soon(), &tier), -EINVAL);
    assert_int_equal(kvbm_session_lookup(t.session, 2, 0, &key, 1, soon(), &tier), -ENOENT);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, &key, 16385, 0, soon(), &lease), -EINVAL);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, &none, 1, 0, soon(), &lease), -ENOENT);
    assert_null(lease);
    lease = lease_keys(&key, 1, 0);
    assert_int_equal(kvbm_lease_read(lease, &opts), -EINVAL); /* no layout */
    opts.to = t.to;
    opts.keys = &one;
    assert_int_equal(kvbm_lease_read(lease, &opts), -ERANGE);
    opts.keys = NULL;
    opts.to_blocks = &beyond;
    assert_int_equal(kvbm_lease_read(lease, &opts), -ERANGE);
    opts.to_blocks = blocks;
    config = lend_config(KVBM_FULLY_CONTIGUOUS);
    config.order = KVBM_ORDER_HND;
    other = allocate(&config, KVBM_STORAGE_SYSTEM);
    opts.to = other;
    assert_int_equal(kvbm_lease_read(lease, &opts), -EINVAL); /* blocks of another order */
    kvbm_layout_destroy(other);
    kvbm_lease_release(lease);
    kvbm_lease_release(NULL);
    end();
}

/* ---- ends ---- */

/* A lease that its time ends: the reader knows, and the owner has its blocks again. */
static void check_time_is_over(void)
{
    const uint64_t keys[] = {1, 2, 3};
    struct kvbm_lease *lease;
    uint8_t ok[1];

    lease = lease_keys(keys, 3, 20);
    lend_wait_idle(&t.owner);
    assert_true(lend_store(&t.owner, 500, N_BLOCKS)); /* overwrites all */
    while (kv_now_ns() < kvbm_lease_expires(lease))
        usleep(1000);
    assert_int_equal(read_all(lease, 3, ok), 0);
    assert_int_equal(ok[0], 0);
    assert_int_equal(kvbm_lease_renew(lease, 1000, soon()), -ESTALE);
    kvbm_lease_release(lease);
}

static void test_time_is_over(void **state)
{
    (void)state;
    each_way(check_time_is_over);
}

/* The owner withdraws the set long before the lease's end: what it overwrites is never called right. */
static void check_reader_believes_longer_than_the_owner(void)
{
    const uint64_t keys[] = {1, 2, 3, 4};
    struct kvbm_lease *lease;
    uint8_t ok[1];

    lease = lease_keys(keys, 4, 60000);
    assert_int_equal(read_all(lease, 4, ok), 4);
    kvbm_blockset_destroy(t.owner.set);
    t.owner.set = NULL;
    assert_int_equal(lend_pinned(&t.owner), 0);
    assert_true(lend_store(&t.owner, 700, N_BLOCKS));
    assert_int_equal(read_all(lease, 4, ok), 0);
    assert_int_equal(ok[0], 0);
    kvbm_lease_release(lease);
}

static void test_reader_believes_longer_than_the_owner(void **state)
{
    (void)state;
    each_way(check_reader_believes_longer_than_the_owner);
}

/* A new generation of a set ends its leases; block numbers of the old one mean nothing in it. */
static void test_update_ends_leases(void **state)
{
    const struct kvbm_block_source source = {0};
    struct kvbm_blockset_opts opts = {.size = sizeof(opts), .id = 1};
    struct kvbm_block_source pool;
    const uint64_t key = 1;
    struct kvbm_lease *lease;
    uint8_t ok[1];

    (void)state;
    begin(SHARED);
    pool = kvbm_pool_source(t.owner.pool);
    lease = lease_keys(&key, 1, 60000);
    opts.layout = t.owner.layout;
    opts.shared = t.owner.shared;
    opts.source = &source;
    assert_int_equal(kvbm_blockset_update(t.owner.set, &opts), -EINVAL); /* no functions */
    assert_int_equal(read_all(lease, 1, ok), 1);
    opts.source = &pool;
    assert_int_equal(kvbm_blockset_update(t.owner.set, &opts), 0);
    assert_int_equal(lend_pinned(&t.owner), 0);
    assert_int_equal(read_all(lease, 1, ok), 0);
    kvbm_lease_release(lease);
    end();
}

static void check_session_ends(void)
{
    const uint64_t keys[] = {1, 2, 3, 4};
    struct kvbm_lease *lease;
    uint8_t ok[1];

    lease = lease_keys(keys, 4, 60000);
    assert_int_equal(kvbm_session_close(t.session), 0);
    t.session = NULL;
    lend_wait_idle(&t.owner); /* long before the lease's end */
    assert_true(lend_store(&t.owner, 300, N_BLOCKS));
    assert_int_equal(read_all(lease, 4, ok), 0);
    kvbm_lease_release(lease);
}

/* Calls in a session that has ended are -EPIPE, also once its sets are forgotten. */
static void check_asked_too_late(void)
{
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;
    struct kvbm_remote_set *set;
    struct kvbm_lease *lease;
    const uint64_t key = 1;
    uint8_t tier;

    assert_int_equal(kvbm_session_get_info(t.session, &info), 0);
    kvbm_session_abort(t.session, -EPIPE, "the test ends it");
    for (uint64_t until = soon(); kvbm_remote_set_find(t.reader, info.worker, 1, &set) == 0;) {
        kvbm_remote_set_release(set);
        assert_true(kv_now_ns() < until);
    }
    assert_int_equal(kvbm_session_lookup(t.session, 1, 0, &key, 1, soon(), &tier), -EPIPE);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, &key, 1, 0, soon(), &lease), -EPIPE);
}

static void test_session_ends(void **state)
{
    (void)state;
    each_way(check_session_ends);
    each_way(check_asked_too_late);
}

/* ---- an owner that overwrites while readers copy ---- */

static atomic_bool stop;
static atomic_long right_blocks, old_blocks;

/* Lease for moments, read again and again also after the end, compare what is called right. */
static void *read_slowly(void *arg)
{
    const struct kvbm_layout_config config = lend_config(KVBM_FULLY_CONTIGUOUS);
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_SYSTEM};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    struct kvbm_layout *to = NULL;
    uint64_t keys[4];
    const uint32_t blocks[] = {0, 1, 2, 3};
    unsigned turn = (unsigned)(uintptr_t)arg;

    if (kvbm_layout_allocate(&config, &allocator, &to) < 0)
        return NULL;
    while (!atomic_load(&stop)) {
        struct kvbm_lease_read_opts opts = {
            .size = sizeof(opts), .to = to, .to_blocks = blocks, .n = 4, .deadline_ns = soon()};
        struct kvbm_lease *lease = NULL;
        uint8_t ok[1];

        for (uint32_t i = 0; i < 4; i++)
            keys[i] = 1 + (turn * 7 + i * 3) % (2 * N_BLOCKS);
        turn++;
        opts.ok = ok;
        /* Every other lease is over soon; the rest last, however slow the machine is. */
        if (kvbm_session_lease(t.session, 1, 0, keys, 4, turn % 2 ? 1 + turn % 4 : 30000, soon(),
                               &lease) < 0)
            continue;
        opts.n = (uint32_t)kvbm_lease_count(lease);
        for (int again = 0; again < 6; again++) {
            if (kvbm_lease_read(lease, &opts) < 0)
                atomic_fetch_add(&old_blocks, 1000);
            for (uint32_t i = 0; i < opts.n; i++) {
                if (!(ok[0] >> i & 1))
                    continue;
                atomic_fetch_add(&right_blocks, 1);
                if (!lend_holds(to, i, keys[i]))
                    atomic_fetch_add(&old_blocks, 1);
            }
        }
        kvbm_lease_release(lease);
    }
    kvbm_layout_destroy(to);
    return NULL;
}

static void check_never_old_bytes_as_new(void)
{
    pthread_t threads[2];
    uint64_t key = 1;

    atomic_store(&stop, false);
    atomic_store(&right_blocks, 0);
    for (uintptr_t i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, read_slowly, (void *)(i * 1000)), 0);
    for (uint64_t begun = kv_now_ns(), end = soon();
         kv_now_ns() < begun + 300 * KV_NS_PER_MS || atomic_load(&right_blocks) < 50;) {
        assert_true(kv_now_ns() < end);
        assert_true(lend_store(&t.owner, key, 1)); /* evicts the oldest that nobody leases */
        key = key % (2 * N_BLOCKS) + 1;
    }
    atomic_store(&stop, true);
    for (int i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(atomic_load(&old_blocks), 0);
    assert_true(kvbm_session_is_open(t.session)); /* slow readers aren't cut off at once */
}

static void test_never_old_bytes_as_new(void **state)
{
    (void)state;
    each_way(check_never_old_bytes_as_new);
}

/* ---- peers that ask nonsense ---- */

static int32_t asked(uint16_t type, const void *body, size_t len)
{
    struct kvbm_reply reply = {.fd = -1};
    int32_t status;

    assert_int_equal(kvbm_session_call(t.session, type, body, len, -1, soon(), &reply), 0);
    status = reply.status;
    kvbm_reply_fini(&reply);
    return status;
}

static int32_t asked_for(uint16_t type, uint32_t set, uint32_t n, uint64_t generation, size_t cut)
{
    const uint64_t keys[4] = {1, 2, 3, 4};
    struct kvbm_asked ask = {
        .set = set, .n = KV_MIN(n, 4u), .generation = generation, .keys = (const uint8_t *)keys};
    struct kv_buf body = KV_BUF_INIT;
    int32_t status;

    kvbm_asked_write(&body, &ask, 8);
    memcpy(body.data + 16, &n, 4);
    status = asked(type, body.data, body.len - cut);
    kv_buf_fini(&body);
    return status;
}

static int32_t want(uint64_t id, uint32_t place, uint32_t n, size_t cut)
{
    struct kv_buf body = KV_BUF_INIT;
    int32_t status;

    kvbm_wanted_write(&body, id, true, &place, 1);
    memcpy(body.data + 12, &n, 4);
    status = asked(KVBM_ASK_READ, body.data, body.len - cut);
    kv_buf_fini(&body);
    return status;
}

static void test_requests_that_lie(void **state)
{
    const uint64_t key = 1;
    struct kvbm_lease *lease;
    uint8_t zeros[64] = {0};

    (void)state;
    begin(UNIX);
    lease = lease_keys(&key, 1, 60000);
    for (uint16_t type = KVBM_ASK_LOOKUP; type <= KVBM_ASK_MEMORY; type++) {
        assert_int_equal(asked(type, NULL, 0), -EPROTO);
        assert_int_equal(asked(type, zeros, 7), -EPROTO);
        assert_int_equal(asked(type, zeros, sizeof(zeros)), -EPROTO);
    }
    for (uint16_t type = KVBM_ASK_LOOKUP; type <= KVBM_ASK_LEASE; type++) {
        assert_int_equal(asked_for(type, 1, 4, 1, 1), -EPROTO);
        assert_int_equal(asked_for(type, 1, 0, 1, 0), -EPROTO);
        assert_int_equal(asked_for(type, 1, 1u << 29, 1, 0), -EPROTO);
        assert_int_equal(asked_for(type, 1, UINT32_MAX, 1, 0), -EPROTO);
        assert_int_equal(asked_for(type, 2, 4, 1, 0), -ENOENT);
        assert_int_equal(asked_for(type, 1, 4, 2, 0), -ESTALE);
        assert_int_equal(asked_for(type, 1, 4, 1, 0), 0);
    }
    assert_int_equal(want(UINT64_MAX, 0, 1, 0), -ESTALE);
    assert_int_equal(want(0, 0, 1, 0), -ESTALE);
    assert_int_equal(want(1, 0, 1, 4), -EPROTO);
    assert_int_equal(want(1, 0, 2, 0), -EPROTO);
    assert_int_equal(want(1, 0, UINT32_MAX, 0), -EPROTO);
    kvbm_lease_release(lease);
    end();
}

/* ---- owners that lie ---- */

static struct {
    uint16_t type;
    uint8_t body[4096];
    size_t len;
    int32_t status;
    int fd;
} lie;

static void serve_lie(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    (void)arg;
    if (request->id)
        (void)kvbm_session_reply(session, request->id, lie.status, lie.body, lie.len, lie.fd);
}

/* From now on, the owner answers requests of a type with what lie holds. */
static void lie_about(uint16_t type)
{
    assert_int_equal(kvbm_agent_serve(t.owner.agent, type, NULL, NULL), 0);
    assert_int_equal(kvbm_agent_serve(t.owner.agent, type, serve_lie, NULL), 0);
    memset(&lie, 0, sizeof(lie));
    lie.type = type;
    lie.fd = -1;
}

static void lie_lease(uint32_t n, uint32_t block, size_t len)
{
    struct kv_buf body = KV_BUF_INIT;

    kvbm_told_write(&body, 77, 1000, n);
    for (uint32_t i = 0; i < 2 * KV_MIN(n, 8u); i++)
        kvbm_put32(&body, 1);
    for (uint32_t i = 0; i < KV_MIN(n, 8u); i++)
        kvbm_put32(&body, block);
    assert_true(body.len <= sizeof(lie.body));
    memcpy(lie.body, body.data, body.len);
    lie.len = len ? len : body.len;
    kv_buf_fini(&body);
}

static void test_leases_that_lie(void **state)
{
    const uint64_t keys[] = {1, 2, 3, 4};
    struct kvbm_lease *lease = NULL;

    (void)state;
    begin(UNIX);
    lie_about(KVBM_ASK_LEASE);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, 4, 0, soon(), &lease), -EPROTO);
    lie_lease(0, 0, 0);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, 4, 0, soon(), &lease), -EPROTO);
    lie_lease(5, 0, 0);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, 4, 0, soon(), &lease), -EPROTO);
    lie_lease(UINT32_MAX, 0, 0);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, 4, 0, soon(), &lease), -EPROTO);
    lie_lease(4, N_BLOCKS, 0);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, 4, 0, soon(), &lease), -EPROTO);
    lie_lease(4, 0, 60);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, 4, 0, soon(), &lease), -EPROTO);
    lie_lease(4, 0, 0);
    assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, 4, 0, soon(), &lease), 0);
    kvbm_lease_release(lease);
    lie_about(KVBM_ASK_LOOKUP);
    lie.len = 3;
    assert_int_equal(kvbm_session_lookup(t.session, 1, 0, keys, 4, soon(), lie.body), -EPROTO);
    end();
}

/* Bytes that aren't those of the block, too few, too many: a miss each time. */
static void test_bytes_that_lie(void **state)
{
    const struct kvbm_layout_shape *shape;
    const uint64_t keys[] = {1, 2};
    struct kvbm_lease *lease;
    uint8_t ok[1];
    size_t len;

    (void)state;
    begin(TCP);
    shape = kvbm_layout_get_shape(t.to);
    len = 2 * (shape->natural_block_bytes + KVBM_SUM_BYTES);
    assert_true(len + 1 <= sizeof(lie.body));
    lease = lease_keys(keys, 2, 60000);
    lie_about(KVBM_ASK_READ);
    lie.len = len; /* zeros, whose sums aren't zero */
    assert_int_equal(read_all(lease, 2, ok), 0);
    kv_hash(lie.body + 2 * KVBM_SUM_BYTES, shape->natural_block_bytes, lie.body);
    assert_int_equal(read_all(lease, 2, ok), 1); /* the first is as its owner says */
    assert_int_equal(ok[0], 1);
    lie.len = len - 1;
    assert_int_equal(read_all(lease, 2, ok), 0);
    lie.len = len + 1;
    assert_int_equal(read_all(lease, 2, ok), 0);
    lie.len = 0;
    assert_int_equal(read_all(lease, 2, ok), 0);
    lie.len = len;
    lie.status = -EIO;
    assert_int_equal(read_all(lease, 2, ok), 0);
    kvbm_lease_release(lease);
    end();
}

/* Descriptors in place of shared memory: refused, and the bytes come through the session. */
static void test_descriptors_that_lie(void **state)
{
    const uint64_t keys[] = {1, 2, 3};

    (void)state;
    for (int i = 0; i < 3; i++) {
        struct kvbm_lease *lease = NULL;
        uint8_t ok[1];

        begin(SHARED);
        lie_about(KVBM_ASK_MEMORY);
        if (i == 1)
            lie.fd = open("/dev/zero", O_RDWR | O_CLOEXEC);
        if (i == 2) {
            lie.fd = memfd_create("liar", MFD_CLOEXEC | MFD_ALLOW_SEALING); /* it can shrink */
            assert_true(write(lie.fd, t.owner.shared->memory, t.owner.shared->mapped) > 0);
        }
        assert_int_equal(kvbm_session_lease(t.session, 1, 0, keys, 3, 0, soon(), &lease), 0);
        assert_false(kvbm_lease_is_shared(lease));
        assert_int_equal(read_all(lease, 3, ok), 3);
        for (uint32_t k = 0; k < 3; k++)
            assert_true(lend_holds(t.to, k, keys[k]));
        kvbm_lease_release(lease);
        if (lie.fd >= 0)
            close(lie.fd);
        end();
    }
}

/* ---- a source that takes its time ---- */

static struct {
    kvbm_held_fn held;
    void *to;
    atomic_int n_held, n_unheld;
} slow;

static void slow_lookup(void *arg, uint32_t group, const void *keys, size_t n, uint8_t *tiers)
{
    (void)arg, (void)group, (void)keys;
    memset(tiers, KV_TIER_DISK, n);
}

static void slow_hold(void *arg, uint32_t group, const void *keys, size_t n, kvbm_held_fn held,
                      void *to)
{
    (void)arg, (void)group, (void)keys, (void)n;
    slow.held = held;
    slow.to = to;
    atomic_fetch_add(&slow.n_held, 1);
}

static void slow_unhold(void *arg, void *hold)
{
    (void)arg;
    assert_ptr_equal(hold, &slow);
    atomic_fetch_add(&slow.n_unheld, 1);
}

static void *finish_hold(void *arg)
{
    const uint32_t block = 3;

    wait_until(atomic_load(&slow.n_held));
    if (arg)
        slow.held(slow.to, 0, &block, &slow);
    else
        slow.held(slow.to, -EIO, NULL, NULL);
    return NULL;
}

static void *hang_up(void *arg)
{
    (void)arg;
    wait_until(atomic_load(&slow.n_held));
    assert_int_equal(kvbm_session_close(t.session), 0);
    t.session = NULL;
    return NULL;
}

/* Blocks on the owner's disk are there later; the session may have ended by then. */
static void test_slow_source(void **state)
{
    const struct kvbm_block_source source = {
        .size = sizeof(source), .lookup = slow_lookup, .hold = slow_hold, .unhold = slow_unhold};
    struct kvbm_blockset_opts opts = {.size = sizeof(opts), .id = 1, .source = &source};
    const uint64_t key = 1;

    (void)state;
    for (int how = 0; how < 3; how++) { /* held, failed, held when the session has ended */
        struct kvbm_lease *lease = NULL;
        pthread_t thread;
        int err;

        memset(&slow, 0, sizeof(slow));
        begin(UNIX);
        opts.layout = t.owner.layout;
        assert_int_equal(kvbm_blockset_update(t.owner.set, &opts), 0);
        assert_int_equal(kvbm_session_close(t.session), 0);
        t.session = open_session(t.reader, t.owner.agent, 0); /* which knows the update */
        assert_int_equal(pthread_create(&thread, NULL, how == 2 ? hang_up : finish_hold,
                                        how == 0 ? &slow : NULL),
                         0);
        err = kvbm_session_lease(t.session, 1, 0, &key, 1, 0, soon(), &lease);
        pthread_join(thread, NULL);
        if (how == 2)
            finish_hold(&slow);
        assert_int_equal(err, how == 0 ? 0 : how == 1 ? -EIO : -EPIPE);
        kvbm_lease_release(lease);
        kvbm_blockset_destroy(t.owner.set);
        t.owner.set = NULL;
        assert_int_equal(atomic_load(&slow.n_unheld), how != 1);
        end();
    }
}

/* ---- calls beside each other ---- */

static void *tell_gone(void *arg)
{
    const uint64_t keys[] = {1, 2, 3};

    while (!atomic_load(&stop))
        assert_int_equal(kvbm_blockset_gone(t.owner.set, 0, keys, 3), 0);
    return arg;
}

/* A set is updated while another thread says that keys of it are gone. */
static void test_gone_beside_updates(void **state)
{
    struct kvbm_blockset_opts opts = {.size = sizeof(opts), .id = 1};
    struct kvbm_block_source pool;
    const uint64_t key = 1;
    pthread_t thread;
    uint8_t tier;

    (void)state;
    begin(UNIX);
    pool = kvbm_pool_source(t.owner.pool);
    opts.layout = t.owner.layout;
    opts.source = &pool;
    assert_int_equal(kvbm_session_lookup(t.session, 1, 0, &key, 1, soon(), &tier), 0);
    atomic_store(&stop, false);
    assert_int_equal(pthread_create(&thread, NULL, tell_gone, NULL), 0);
    for (long i = test_rounds(500); i > 0; i--)
        assert_int_equal(kvbm_blockset_update(t.owner.set, &opts), 0);
    atomic_store(&stop, true);
    pthread_join(thread, NULL);
    end();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lookup_lease_read),
        cmocka_unit_test(test_parts_of_a_lease),
        cmocka_unit_test(test_share),
        cmocka_unit_test(test_share_behind_a_hole),
        cmocka_unit_test(test_arguments),
        cmocka_unit_test(test_time_is_over),
        cmocka_unit_test(test_reader_believes_longer_than_the_owner),
        cmocka_unit_test(test_update_ends_leases),
        cmocka_unit_test(test_session_ends),
        cmocka_unit_test(test_never_old_bytes_as_new),
        cmocka_unit_test(test_requests_that_lie),
        cmocka_unit_test(test_leases_that_lie),
        cmocka_unit_test(test_bytes_that_lie),
        cmocka_unit_test(test_descriptors_that_lie),
        cmocka_unit_test(test_slow_source),
        cmocka_unit_test(test_gone_beside_updates),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
