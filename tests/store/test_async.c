// SPDX-License-Identifier: Apache-2.0
/*
 * Requests on threads: what each chunk's result is on all kinds of backends, against a naive model;
 * limits, order, cancelling and closing with a backend that stops at a gate; a storm of threads.
 * Nothing here depends on how fast the machine is: gates, not pauses, make the order.
 */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/wait.h>

#include "backends.h"
#include "base/core/error.h"
#include "kv_store_async.h"

enum { KEY = 8, KEYS = 300, LEN = 3000, LONG_MS = 100000 };

static uint8_t keys[KEYS][KEY], values[KEYS][LEN], room[KEYS][LEN];
static struct iovec parts[KEYS][2], wide[KEYS][2];
static uint32_t two[KEYS];
static int64_t each[KEYS];

/* -- a gate ------------------------------------------------------------------------------------ */

static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool closed_for_gets, closed_for_puts;
    unsigned waiting, passed;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static void pass(const bool *closed)
{
    pthread_mutex_lock(&gate.lock);
    gate.waiting++;
    pthread_cond_broadcast(&gate.changed);
    while (*closed)
        pthread_cond_wait(&gate.changed, &gate.lock);
    gate.waiting--;
    gate.passed++;
    pthread_mutex_unlock(&gate.lock);
}

static void set_gate(bool gets, bool puts)
{
    pthread_mutex_lock(&gate.lock);
    gate.closed_for_gets = gets;
    gate.closed_for_puts = puts;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
}

static void wait_for_waiters(unsigned n)
{
    pthread_mutex_lock(&gate.lock);
    while (gate.waiting < n)
        pthread_cond_wait(&gate.changed, &gate.lock);
    pthread_mutex_unlock(&gate.lock);
}

static int gated_get(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                     const struct iovec *to, size_t n, size_t *len)
{
    pass(&gate.closed_for_gets);
    return memory_get_parts(self, hash, hash_len, to, n, len);
}

static int gated_put(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                     const struct iovec *from, size_t n)
{
    pass(&gate.closed_for_puts);
    return memory_put_parts(self, hash, hash_len, from, n);
}

static int gated_flush(kv_store_v1 *self)
{
    (void)self;
    pass(&gate.closed_for_puts);
    return 0;
}

static struct kvs_store *open_gated(void)
{
    static kv_store_ext ext;
    struct kvs_store *store;

    ext = *memory_ext();
    ext.get_parts = gated_get;
    ext.put_parts = gated_put;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://gated", false, &store), 0);
    set_gate(false, false);
    gate.passed = 0;
    return store;
}

/* -- requests ---------------------------------------------------------------------------------- */

static struct kvs_async *open_queue(struct kvs_store *store, uint32_t threads, uint32_t max)
{
    struct kvs_async_opts opts = KVS_ASYNC_OPTS_INIT;
    struct kvs_async *async;

    opts.threads = threads;
    opts.max_requests = max;
    assert_int_equal(kvs_async_open(store, &opts, &async), 0);
    return async;
}

/* Chunks [first, first + n): from values, or into room. */
static struct kvs_request request(enum kvs_op op, size_t first, size_t n)
{
    struct kvs_request r = KVS_REQUEST_INIT;

    r.op = op;
    r.hashes = keys[first];
    r.hash_len = KEY;
    r.n = n;
    r.parts = op == KVS_OP_PUT ? parts[first] : op == KVS_OP_GET ? wide[first] : NULL;
    r.n_parts = two;
    r.ret_each = each + first;
    r.tag = 1000 + first;
    return r;
}

static struct kvs_done take(struct kvs_async *async)
{
    struct pollfd fd = {.fd = kvs_async_fd(async), .events = POLLIN};
    struct kvs_done done = {.id = 0};

    assert_int_equal(poll(&fd, 1, LONG_MS), 1);
    assert_int_equal(kvs_async_poll(async, &done, 1), 1);
    return done;
}

static struct kvs_done run(struct kvs_async *async, const struct kvs_request *r)
{
    int64_t id = kvs_async_submit(async, r);
    struct kvs_done done;

    assert_true(id > 0);
    done = take(async);
    assert_int_equal(done.id, id);
    assert_int_equal(done.tag, r->tag);
    assert_int_equal(done.op, r->op);
    assert_int_equal(done.n, r->n);
    return done;
}

static int set_up(void **state)
{
    uint64_t rng = unit_seed();

    for (size_t k = 0; k < KEYS; k++) {
        size_t len = unit_below(&rng, LEN + 1), cut = unit_below(&rng, len + 1);

        backends_key(keys[k], k);
        for (size_t i = 0; i < LEN; i++)
            values[k][i] = (uint8_t)unit_random(&rng);
        parts[k][0] = (struct iovec){values[k], cut};
        parts[k][1] = (struct iovec){values[k] + cut, len - cut};
        cut = unit_below(&rng, LEN + 1);
        wide[k][0] = (struct iovec){room[k], cut};
        wide[k][1] = (struct iovec){room[k] + cut, LEN - cut};
        two[k] = 2;
    }
    memset(room, 0, sizeof(room));
    return backends_set_up(state);
}

static size_t len_of(size_t k)
{
    return parts[k][0].iov_len + parts[k][1].iov_len;
}

/* -- results ----------------------------------------------------------------------------------- */

static void check_got(size_t first, size_t n, const bool *there)
{
    for (size_t k = first; k < first + n; k++) {
        assert_int_equal(each[k], there[k] ? (int64_t)len_of(k) : -ENOENT);
        if (there[k])
            assert_memory_equal(room[k], values[k], len_of(k));
    }
}

/* Random requests one after the other: a model of which keys are there says each result. */
static void run_model(enum backend which)
{
    struct kvs_store *store = backends_open(which);
    struct kvs_async *async = open_queue(store, 3, 0);
    uint64_t rng = unit_seed();
    bool there[KEYS] = {false};

    for (size_t i = 0; i < unit_rounds(60); i++) {
        enum kvs_op op = (enum kvs_op)(KVS_OP_GET + unit_below(&rng, 5));
        size_t first = unit_below(&rng, KEYS), n = unit_below(&rng, KEYS - first + 1), ok = 0;
        struct kvs_request r = request(op, first, op == KVS_OP_FLUSH ? 0 : n);
        struct kvs_done done;
        bool lacks = which == BARE && (op == KVS_OP_EXISTS || op == KVS_OP_DELETE);

        r.flush = unit_below(&rng, 4) == 0;
        memset(room, 0, sizeof(room));
        done = run(async, &r);
        assert_int_equal(done.status, lacks && n ? -ENOTSUP : 0);
        for (size_t k = first; k < first + r.n; k++) {
            ok += op == KVS_OP_PUT || op == KVS_OP_DELETE || there[k];
            if (lacks)
                assert_int_equal(each[k], -ENOTSUP);
            else if (op == KVS_OP_PUT || op == KVS_OP_EXISTS)
                assert_int_equal(each[k], there[k]);
            else if (op == KVS_OP_DELETE)
                assert_int_equal(each[k], 0);
            if (!lacks && (op == KVS_OP_PUT || op == KVS_OP_DELETE))
                there[k] = op == KVS_OP_PUT;
        }
        if (op == KVS_OP_GET)
            check_got(first, r.n, there);
        assert_int_equal(done.n_ok, lacks ? 0 : ok);
    }
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

static void test_model(void **state)
{
    (void)state;
    for (enum backend which = FILES; which < N_BACKENDS; which++)
        run_model(which);
}

/* Many at once: each result comes once, and the descriptor is readable exactly while there are any. */
static void test_many_at_once(void **state)
{
    struct kvs_store *store = backends_open(FILES);
    struct kvs_async *async = open_queue(store, 0, 0);
    struct pollfd fd = {.fd = kvs_async_fd(async), .events = POLLIN};
    struct kvs_done done[KEYS];
    bool there[KEYS], seen[KEYS + 1] = {false};
    uint64_t bytes = 0, want = 0;
    (void)state;

    assert_int_equal(poll(&fd, 1, 0), 0);
    for (size_t k = 0; k < KEYS; k++) {
        struct kvs_request r = request(KVS_OP_PUT, k, 1);

        assert_int_equal(kvs_async_submit(async, &r), k + 1);
        want += len_of(k);
        there[k] = true;
    }
    assert_int_equal(kvs_async_drain(async, LONG_MS), 0);
    assert_int_equal(poll(&fd, 1, 0), 1);
    assert_int_equal(kvs_async_poll(async, done, 100), 100);
    assert_int_equal(poll(&fd, 1, 0), 1);
    assert_int_equal(kvs_async_poll(async, done + 100, KEYS), KEYS - 100);
    assert_int_equal(poll(&fd, 1, 0), 0);
    assert_int_equal(kvs_async_poll(async, done, 1), 0);
    for (size_t k = 0; k < KEYS; k++) {
        assert_int_equal(done[k].status, 0);
        assert_false(seen[done[k].id]);
        seen[done[k].id] = true;
        assert_int_equal(done[k].tag, 1000 + done[k].id - 1);
        bytes += done[k].bytes;
    }
    assert_int_equal(bytes, want);
    for (size_t k = 0; k < KEYS; k += 10) {
        struct kvs_request r = request(KVS_OP_GET, k, 10);

        assert_true(kvs_async_submit(async, &r) > 0);
    }
    assert_int_equal(kvs_async_drain(async, LONG_MS), 0);
    check_got(0, KEYS, there);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

/* flush makes a put durable before it is done: another handle has its chunks then. */
static void test_flush(void **state)
{
    struct kvs_store *store = backends_open(FILES), *other = backends_open(FILES);
    struct kvs_async *async = open_queue(store, 2, 0);
    struct kvs_request put = request(KVS_OP_PUT, 0, 10), none = request(KVS_OP_PUT, 0, 0),
                       flush = request(KVS_OP_FLUSH, 0, 0);
    uint8_t present[20];
    (void)state;

    run(async, &put);
    assert_int_equal(kvs_exists(other, keys, KEY, 10, present), 0);
    assert_int_equal(present[0], 0);
    none.flush = true;
    assert_int_equal(run(async, &none).status, 0);
    assert_int_equal(kvs_exists(other, keys, KEY, 10, present), 0);
    for (int i = 0; i < 10; i++)
        assert_int_equal(present[i], 1);
    put = request(KVS_OP_PUT, 10, 5);
    put.flush = true;
    run(async, &put);
    put = request(KVS_OP_PUT, 15, 5);
    run(async, &put);
    assert_int_equal(run(async, &flush).status, 0);
    assert_int_equal(kvs_exists(other, keys, KEY, 20, present), 0);
    for (int i = 0; i < 20; i++)
        assert_int_equal(present[i], 1);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
    kvs_close(other);
}

/* A put that finds no folder, and can't make one, has failed; the other operations miss. */
static void test_no_folder(void **state)
{
    struct kvs_store *store = backends_open(FILES);
    struct kvs_async *async = open_queue(store, 2, 0);
    struct kvs_request put = request(KVS_OP_PUT, 0, 10), get = request(KVS_OP_GET, 10, 5);
    char from[400], to[400];

    (void)state;
    snprintf(from, sizeof(from), "%s/files/.kvasir/tmp", backends_dir);
    snprintf(to, sizeof(to), "%s/files/.kvasir/gone", backends_dir);
    assert_int_equal(rename(from, to), 0);
    assert_int_equal(rmdir(to), 0);
    assert_int_equal(close(open(from, O_WRONLY | O_CREAT, 0600)), 0); /* none can be made */
    assert_int_equal(run(async, &get).status, 0);
    assert_int_equal(run(async, &put).status, -ENOTDIR);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

/* Change the length of the file of key @k. */
static void damage(size_t k)
{
    char path[512];
    int at = snprintf(path, sizeof(path), "%s/files/chunks/%x/", backends_dir, keys[k][0] >> 4);

    for (int i = 0; i < KEY; i++)
        at += snprintf(path + at, sizeof(path) - (size_t)at, "%02x", keys[k][i]);
    assert_int_equal(truncate(path, (off_t)len_of(k) + 1), 0);
}

static void test_failures(void **state)
{
    struct kvs_store *store = backends_open(FILES);
    struct kvs_async *async = open_queue(store, 2, 0);
    struct kvs_request put = request(KVS_OP_PUT, 0, 200), get = request(KVS_OP_GET, 0, 210);
    struct kvs_done done;
    (void)state;

    put.flush = true;
    assert_int_equal(run(async, &put).n_ok, 200);
    damage(100);
    done = run(async, &get); /* missing ones are no failure, damaged ones are */
    assert_int_equal(done.status, -EBADMSG);
    assert_int_equal(done.n_ok, 199);
    for (int k = 0; k < 210; k++)
        assert_int_equal(each[k], k == 100 ? -EBADMSG : k >= 200 ? -ENOENT : (int64_t)len_of(k));
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);

    store = backends_open(PARTS); /* a full disk in mid-batch */
    async = open_queue(store, 1, 0);
    memory_space("memory://parts")->fail_puts_after = 100;
    memory_space("memory://parts")->fail_puts = -ENOSPC;
    done = run(async, &put);
    assert_int_equal(done.status, -ENOSPC);
    assert_int_equal(done.n_ok, 100);
    for (int k = 0; k < 200; k++)
        assert_int_equal(each[k], k < 100 ? 0 : -ENOSPC);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

static _Atomic unsigned n_calls;

static int dead_delete(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    (void)self, (void)hash, (void)hash_len;
    n_calls++;
    return -ETIMEDOUT;
}

static int dead_get(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const struct iovec *to,
                    size_t n, size_t *len)
{
    (void)to, (void)n, (void)len;
    return dead_delete(self, hash, hash_len);
}

static int dead_put(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                    const struct iovec *from, size_t n)
{
    (void)from, (void)n;
    return dead_delete(self, hash, hash_len);
}

static int dead_exists(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                       uint8_t *ret)
{
    (void)n, (void)ret;
    return dead_delete(self, hashes, hash_len);
}

/* A dead server is asked once for a request, not once for each chunk or claim. */
static void test_outage(void **state)
{
    static const enum kvs_op ops[] = {KVS_OP_GET, KVS_OP_PUT, KVS_OP_EXISTS, KVS_OP_DELETE};
    static kv_store_ext ext;
    struct kvs_store *store;
    struct kvs_async *async;
    (void)state;

    ext = *memory_ext();
    ext.get_parts = dead_get;
    ext.put_parts = dead_put;
    ext.exists_chunks = dead_exists;
    ext.delete_chunk = dead_delete;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://dead", false, &store), 0);
    async = open_queue(store, 1, 0);
    for (size_t i = 0; i < KV_COUNT(ops); i++) {
        struct kvs_request r = request(ops[i], 0, KEYS);
        struct kvs_done done;

        n_calls = 0;
        done = run(async, &r);
        assert_int_equal(done.status, -ETIMEDOUT);
        assert_int_equal(done.n_ok, 0);
        for (int k = 0; k < KEYS; k++)
            assert_int_equal(each[k], -ETIMEDOUT);
        assert_int_equal(n_calls, 1);
    }
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

static int refuse_third(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                        const uint8_t *const *data, const size_t *len, int *ret_each)
{
    int rc = memory_ext()->put_chunks(self, hashes, hash_len, n, data, len, ret_each);

    ret_each[2] = -EINVAL;
    return rc;
}

/* -EINVAL of a backend for one chunk is the result of that chunk. */
static void test_one_refused(void **state)
{
    static kv_store_ext ext;
    struct kvs_store *store;
    struct kvs_async *async;
    struct kvs_request put = request(KVS_OP_PUT, 0, 10);
    struct kvs_done done;
    (void)state;

    ext = *memory_ext();
    ext.get_parts = NULL;
    ext.put_parts = NULL;
    ext.put_chunks = refuse_third;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://third", false, &store), 0);
    async = open_queue(store, 1, 0);
    done = run(async, &put);
    assert_int_equal(done.status, -EINVAL);
    assert_int_equal(done.n_ok, 9);
    for (int k = 0; k < 10; k++)
        assert_int_equal(each[k], k == 2 ? -EINVAL : 0);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

/* -- limits and order -------------------------------------------------------------------------- */

static void test_arguments(void **state)
{
    struct kvs_store *store = backends_open(FILES);
    struct kvs_async_opts opts = KVS_ASYNC_OPTS_INIT;
    struct kvs_async *async;
    struct kvs_request r;
    (void)state;

    opts.threads = 65;
    assert_int_equal(kvs_async_open(store, &opts, &async), -EINVAL);
    assert_int_equal(kvs_async_open(NULL, NULL, &async), -EINVAL);
    assert_int_equal(kvs_async_open(store, NULL, NULL), -EINVAL);
    async = open_queue(store, 1, 0);
    r = request(KVS_OP_GET, 0, 3);
    r.op = (enum kvs_op)0;
    assert_int_equal(kvs_async_submit(async, &r), -EINVAL);
    r = request(KVS_OP_GET, 0, (1 << 20) + 1);
    assert_int_equal(kvs_async_submit(async, &r), -EINVAL);
    r = request(KVS_OP_GET, 0, 3);
    r.parts = NULL;
    assert_int_equal(kvs_async_submit(async, &r), -EINVAL);
    r = request(KVS_OP_EXISTS, 0, 3);
    r.hash_len = 0;
    assert_int_equal(kvs_async_submit(async, &r), -EINVAL);
    assert_int_equal(kvs_async_submit(NULL, &r), -EINVAL);
    r = request(KVS_OP_GET, 0, 0);
    assert_int_equal(run(async, &r).status, 0);
    assert_int_equal(kvs_async_cancel(async, 12345), -ENOENT);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    assert_int_equal(kvs_async_close(NULL, 0), 0);
    kvs_close(store);
}

/* Results that nobody takes count: the queue is bounded. */
static void test_limit(void **state)
{
    struct kvs_store *store = backends_open(FILES);
    struct kvs_async *async = open_queue(store, 1, 2);
    struct kvs_request r = request(KVS_OP_EXISTS, 0, 1);
    (void)state;

    assert_true(kvs_async_submit(async, &r) > 0);
    assert_true(kvs_async_submit(async, &r) > 0);
    assert_int_equal(kvs_async_drain(async, LONG_MS), 0);
    assert_int_equal(kvs_async_submit(async, &r), -EAGAIN);
    take(async);
    assert_true(kvs_async_submit(async, &r) > 0);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

static void test_priority(void **state)
{
    struct kvs_store *store = open_gated();
    struct kvs_async *async = open_queue(store, 1, 0);
    struct kvs_request first = request(KVS_OP_GET, 0, 1), low = request(KVS_OP_GET, 1, 1),
                       high = request(KVS_OP_GET, 2, 1), older = request(KVS_OP_GET, 3, 1);
    static const uint64_t order[] = {1000, 1002, 1003, 1001};
    (void)state;

    high.priority = older.priority = 5;
    set_gate(true, true);
    assert_true(kvs_async_submit(async, &first) > 0);
    wait_for_waiters(1);
    assert_true(kvs_async_submit(async, &low) > 0);
    assert_true(kvs_async_submit(async, &high) > 0);
    assert_true(kvs_async_submit(async, &older) > 0);
    set_gate(false, false);
    for (size_t i = 0; i < KV_COUNT(order); i++)
        assert_int_equal(take(async).tag, order[i]);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

/* Puts that hang occupy half of the threads: a get goes on. */
static void test_gets_beside_hanging_puts(void **state)
{
    struct kvs_store *store = open_gated();
    struct kvs_async *async = open_queue(store, 2, 0);
    struct kvs_request get = request(KVS_OP_GET, 5, 1);
    (void)state;

    set_gate(false, true);
    for (size_t k = 0; k < 4; k++) {
        struct kvs_request put = request(KVS_OP_PUT, k, 1);

        assert_true(kvs_async_submit(async, &put) > 0);
    }
    wait_for_waiters(1);
    assert_int_equal(run(async, &get).status, 0);
    set_gate(false, false);
    for (size_t k = 0; k < 4; k++)
        assert_int_equal(take(async).n_ok, 1);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

/* -- the end ----------------------------------------------------------------------------------- */

/* One thread has claimed the first 64 of 200 chunks and begun one: that ends, the others are left
 * out. */
static void test_cancel(void **state)
{
    struct kvs_store *store = open_gated();
    struct kvs_async *async = open_queue(store, 1, 0);
    struct kvs_request put = request(KVS_OP_PUT, 0, 200), queued = request(KVS_OP_GET, 200, 50);
    int64_t id, other;
    struct kvs_done done;
    (void)state;

    set_gate(true, true);
    id = kvs_async_submit(async, &put);
    wait_for_waiters(1);
    other = kvs_async_submit(async, &queued);
    assert_int_equal(kvs_async_cancel(async, (uint64_t)other), 0);
    done = take(async); /* at once: nothing of it had begun */
    assert_int_equal(done.id, other);
    assert_int_equal(done.status, -ECANCELED);
    for (int k = 200; k < 250; k++)
        assert_int_equal(each[k], -ECANCELED);
    assert_int_equal(kvs_async_cancel(async, (uint64_t)other), -ENOENT);
    assert_int_equal(kvs_async_cancel(async, (uint64_t)id), 0);
    set_gate(false, false);
    done = take(async);
    assert_int_equal(done.status, -ECANCELED);
    assert_int_equal(done.n_ok, 1);
    for (int k = 0; k < 200; k++)
        assert_int_equal(each[k], k < 1 ? 0 : -ECANCELED);
    assert_int_equal(gate.passed, 1);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

static struct kvs_store *open_with_flush(int (*flush)(kv_store_v1 *))
{
    static kv_store_ext ext;
    struct kvs_store *store;

    ext = *memory_ext();
    ext.flush = flush;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://flush", false, &store), 0);
    return store;
}

/* A cancellation during the flush is too late: the chunks are durable, and the status is 0. */
static void test_cancel_during_flush(void **state)
{
    struct kvs_store *store = open_with_flush(gated_flush);
    struct kvs_async *async = open_queue(store, 1, 0);
    struct kvs_request put = request(KVS_OP_PUT, 0, 10), flush = request(KVS_OP_FLUSH, 0, 0);
    struct kvs_done done;
    int64_t id;
    (void)state;

    put.flush = true;
    for (int only = 0; only < 2; only++) {
        set_gate(true, true);
        id = kvs_async_submit(async, only ? &flush : &put);
        wait_for_waiters(1);
        assert_int_equal(kvs_async_cancel(async, (uint64_t)id), 0);
        set_gate(false, false);
        done = take(async);
        assert_int_equal(done.status, 0);
        assert_int_equal(done.n_ok, only ? 0 : 10);
    }
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

static atomic_bool flush_fails;

/* Tell of lost chunks once, as a file store does to each thread. */
static int telling_flush(kv_store_v1 *self)
{
    (void)self;
    return atomic_exchange(&flush_fails, false) ? -EIO : 0;
}

/* A flush that fails is about all that was put before, though a later one succeeds. */
static void test_flush_of_another_fails(void **state)
{
    static kv_store_ext ext;
    struct kvs_request put = request(KVS_OP_PUT, 0, 1), flush = request(KVS_OP_FLUSH, 0, 0);
    struct kvs_request loose = request(KVS_OP_PUT, 5, 1);
    struct kvs_store *store;
    struct kvs_async *async;
    (void)state;

    ext = *memory_ext();
    ext.put_parts = gated_put;
    ext.flush = telling_flush;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://tells", false, &store), 0);
    async = open_queue(store, 4, 0);
    put.flush = true;
    set_gate(false, true);
    assert_true(kvs_async_submit(async, &put) > 0);
    wait_for_waiters(1);
    flush_fails = true;
    assert_int_equal(run(async, &flush).status, -EIO);
    set_gate(false, false);
    assert_int_equal(take(async).status, -EIO); /* it had begun */
    assert_int_equal(run(async, &put).status, 0);
    assert_int_equal(run(async, &loose).status, 0);
    flush_fails = true;
    assert_int_equal(run(async, &put).status, -EIO); /* told to this one, of the other */
    assert_int_equal(run(async, &put).status, 0);
    assert_int_equal(run(async, &flush).status, -EIO);
    assert_int_equal(run(async, &flush).status, 0);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

static unsigned n_flushes;

static int counted_flush(kv_store_v1 *self)
{
    (void)self;
    n_flushes++;
    return 0;
}

/* A put cancelled while it puts its last chunk isn't flushed, and its status says so. */
static void test_cancel_before_flush(void **state)
{
    static kv_store_ext ext;
    struct kvs_store *store;
    struct kvs_async *async;
    struct kvs_request put = request(KVS_OP_PUT, 0, 1);
    struct kvs_done done;
    int64_t id;
    (void)state;

    ext = *memory_ext();
    ext.put_parts = gated_put;
    ext.flush = counted_flush;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://gated", false, &store), 0);
    async = open_queue(store, 1, 0);
    put.flush = true;
    n_flushes = 0;
    set_gate(true, true);
    id = kvs_async_submit(async, &put);
    wait_for_waiters(1);
    assert_int_equal(kvs_async_cancel(async, (uint64_t)id), 0);
    set_gate(false, false);
    done = take(async);
    assert_int_equal(done.status, -ECANCELED);
    assert_int_equal(done.n_ok, 1);
    assert_int_equal(each[0], 0);
    assert_int_equal(n_flushes, 0);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

/* A store that hangs: close says so, and ends later. Memory is the caller's again when it is 0. */
static void test_close_under_way(void **state)
{
    struct kvs_store *store = open_gated();
    struct kvs_async *async = open_queue(store, 1, 0);
    struct kvs_request get = request(KVS_OP_GET, 0, 100), flush = request(KVS_OP_FLUSH, 0, 0);
    (void)state;

    set_gate(true, true);
    assert_true(kvs_async_submit(async, &get) > 0);
    wait_for_waiters(1);
    assert_int_equal(kvs_async_drain(async, 0), -ETIMEDOUT);
    assert_int_equal(kvs_async_close(async, 0), -ETIMEDOUT);
    assert_int_equal(kvs_async_submit(async, &flush), -ESHUTDOWN);
    assert_int_equal(each[99], -ECANCELED);
    set_gate(false, false);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    assert_int_equal(each[0], -ENOENT);
    assert_int_equal(each[1], -ECANCELED); /* claimed with the first, and not begun */
    kvs_close(store);
}

static void test_fork(void **state)
{
    struct kvs_store *store = open_gated();
    struct kvs_async *async = open_queue(store, 2, 0);
    struct kvs_request get = request(KVS_OP_GET, 0, 1);
    struct kvs_done done;
    int status;
    pid_t child;
    (void)state;

    set_gate(true, true);
    assert_true(kvs_async_submit(async, &get) > 0);
    wait_for_waiters(1);
    child = fork();
    if (child == 0)
        _exit(kvs_async_submit(async, &get) != -ECHILD ||
              kvs_async_poll(async, &done, 1) != -ECHILD || kvs_async_cancel(async, 1) != -ECHILD ||
              kvs_async_drain(async, 1) != -ECHILD || kvs_async_fd(async) != -ECHILD ||
              kvs_async_close(async, LONG_MS) != 0);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    set_gate(false, false);
    assert_int_equal(take(async).status, 0);
    assert_int_equal(kvs_async_close(async, LONG_MS), 0);
    kvs_close(store);
}

/* -- a storm ----------------------------------------------------------------------------------- */

static struct {
    struct kvs_async *async;
    _Atomic unsigned submitted, taken;
} storm;

static void *storm_thread(void *arg)
{
    size_t slot = (size_t)arg; /* its own keys: the memory of two requests may not overlap */
    uint64_t rng = slot + 1;

    for (size_t i = 0; i < unit_rounds(150); i++) {
        struct kvs_request r = request((enum kvs_op)(KVS_OP_GET + unit_below(&rng, 5)),
                                       slot * 50 + unit_below(&rng, 40), unit_below(&rng, 10));
        struct kvs_done done[4];
        int64_t id;
        long n;

        r.ret_each = NULL;
        if (r.op == KVS_OP_GET) /* two gets of one thread may run at once */
            r.op = KVS_OP_EXISTS;
        id = kvs_async_submit(storm.async, &r);
        if (id > 0)
            storm.submitted++;
        else
            assert_int_equal(id, -EAGAIN);
        if (id > 0 && unit_below(&rng, 4) == 0)
            kvs_async_cancel(storm.async, (uint64_t)id);
        n = kvs_async_poll(storm.async, done, 4);
        assert_true(n >= 0);
        storm.taken += (unsigned)n;
    }
    return NULL;
}

static void test_storm(void **state)
{
    struct kvs_store *store = backends_open(FILES);
    pthread_t threads[4];
    struct kvs_done done;
    (void)state;

    storm.async = open_queue(store, 4, 20);
    storm.submitted = storm.taken = 0;
    for (size_t i = 0; i < KV_COUNT(threads); i++)
        assert_int_equal(pthread_create(&threads[i], NULL, storm_thread, (void *)i), 0);
    for (size_t i = 0; i < KV_COUNT(threads); i++)
        pthread_join(threads[i], NULL);
    assert_int_equal(kvs_async_drain(storm.async, LONG_MS), 0);
    while (kvs_async_poll(storm.async, &done, 1) == 1)
        storm.taken++;
    assert_int_equal(storm.taken, storm.submitted);
    assert_int_equal(kvs_async_close(storm.async, LONG_MS), 0);
    kvs_close(store);
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, set_up, backends_tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_model),
        TEST(test_many_at_once),
        TEST(test_flush),
        TEST(test_no_folder),
        TEST(test_failures),
        TEST(test_outage),
        TEST(test_one_refused),
        TEST(test_flush_of_another_fails),
        TEST(test_cancel_during_flush),
        TEST(test_cancel_before_flush),
        TEST(test_arguments),
        TEST(test_limit),
        TEST(test_priority),
        TEST(test_gets_beside_hanging_puts),
        TEST(test_cancel),
        TEST(test_close_under_way),
        TEST(test_fork),
        TEST(test_storm),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
