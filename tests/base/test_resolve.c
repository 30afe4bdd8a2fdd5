// SPDX-License-Identifier: Apache-2.0
/* The resolver, with a name server whose answers and silences the tests choose. */
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/net/resolve.h"
#include "base/thread/thread.h"
#include "base/unit.h"

/*
 * "ok..." resolves to 10.0.0.N, N the number of the lookup; "none..." isn't a name; "fail..."
 * fails; "dead..." is silent until it is released, then fails; what `mute` says is silent, too.
 */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int lookups, silent, most_silent;
    bool released, fail_all, mute_failed;
} server = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

static int lookup(void *arg, const char *host, struct kv_addresses *ret)
{
    int rc = 0, number;

    (void)arg;
    pthread_mutex_lock(&server.lock);
    number = ++server.lookups;
    if (strncmp(host, "dead", 4) == 0 || (strncmp(host, "fail", 4) == 0 && server.mute_failed)) {
        server.silent++;
        if (server.silent > server.most_silent)
            server.most_silent = server.silent;
        pthread_cond_broadcast(&server.changed);
        while (!server.released)
            pthread_cond_wait(&server.changed, &server.lock);
        server.silent--;
        pthread_cond_broadcast(&server.changed);
        rc = -EAGAIN;
    }
    if (strncmp(host, "fail", 4) == 0 || server.fail_all)
        rc = -EAGAIN;
    if (strncmp(host, "none", 4) == 0)
        rc = -ENOENT;
    pthread_mutex_unlock(&server.lock);
    if (rc < 0)
        return rc;
    ret->n = 1;
    ret->items[0].family = AF_INET;
    snprintf(ret->items[0].text, sizeof(ret->items[0].text), "10.0.0.%d", number);
    return 0;
}

static void set(bool *flag, bool value)
{
    pthread_mutex_lock(&server.lock);
    *flag = value;
    pthread_cond_broadcast(&server.changed);
    pthread_mutex_unlock(&server.lock);
}

static int get(const int *number)
{
    int value;

    pthread_mutex_lock(&server.lock);
    value = *number;
    pthread_mutex_unlock(&server.lock);
    return value;
}

static void wait_silent(int n)
{
    pthread_mutex_lock(&server.lock);
    while (server.silent != n)
        pthread_cond_wait(&server.changed, &server.lock);
    pthread_mutex_unlock(&server.lock);
}

static int reset(void **state)
{
    (void)state;
    server.lookups = server.most_silent = 0;
    server.released = server.fail_all = server.mute_failed = false;
    return 0;
}

/* Threads that outlive their resolver end now: sanitizers see what they did wrong. */
static int release_all(void **state)
{
    (void)state;
    set(&server.released, true);
    wait_silent(0);
    usleep(20000);
    return 0;
}

static struct kv_resolver *make(uint32_t threads, uint64_t deadline_ms, uint64_t failed_ms)
{
    const struct kv_resolver_opts opts = {.threads = threads,
                                          .max_names = 64,
                                          .deadline_ms = deadline_ms,
                                          .failed_ms = failed_ms,
                                          .lookup = lookup};
    struct kv_resolver *r;

    assert_int_equal(kv_resolver_create(&opts, &r), 0);
    return r;
}

static int wait_for(struct kv_resolver *r, const char *host, uint64_t max_age_ms,
                    struct kv_addresses *ret)
{
    return kv_resolver_wait(r, host, max_age_ms, kv_now_ns() + 20 * KV_NS_PER_S, ret);
}

static void answers_are_kept(void **state)
{
    struct kv_resolver *r = make(2, 10000, 60000);
    struct kv_addresses a = {0};
    int rc;

    (void)state;
    rc = kv_resolver_ask(r, "ok", 60000, &a);
    assert_true(rc == -EINPROGRESS || rc == 0);
    assert_int_equal(wait_for(r, "ok", 60000, &a), 0);
    assert_int_equal(a.n, 1);
    assert_string_equal(a.items[0].text, "10.0.0.1");
    for (int i = 0; i < 100; i++)
        assert_int_equal(kv_resolver_ask(r, "ok", 60000, &a), 0);
    assert_int_equal(get(&server.lookups), 1);
    assert_int_equal(kv_resolver_ask(r, "10.1.2.3", 1, &a), 0); /* no name */
    assert_string_equal(a.items[0].text, "10.1.2.3");
    assert_int_equal(kv_resolver_ask(r, "fd00::1", 1, &a), 0);
    assert_int_equal(get(&server.lookups), 1);
    /* failures are, too, for a shorter time */
    assert_int_equal(wait_for(r, "none", 60000, &a), -ENOENT);
    assert_int_equal(wait_for(r, "fail", 60000, &a), -EAGAIN);
    assert_int_equal(kv_resolver_ask(r, "none", 60000, &a), -ENOENT);
    assert_int_equal(get(&server.lookups), 3);
    kv_resolver_destroy(r);
    kv_resolver_destroy(NULL);
}

static void old_answers_are_asked_for_again(void **state)
{
    struct kv_resolver *r = make(2, 10000, 1);
    struct kv_addresses a;
    uint64_t until;

    (void)state;
    assert_int_equal(wait_for(r, "ok", 60000, &a), 0);
    until = kv_now_ns() + 1100 * KV_NS_PER_MS;
    while (kv_now_ns() < until)
        usleep(10000);
    assert_int_equal(kv_resolver_ask(r, "ok", 60000, &a), 0); /* others are content with it */
    assert_string_equal(a.items[0].text, "10.0.0.1");
    assert_int_equal(wait_for(r, "ok", 1, &a), 0);
    assert_string_equal(a.items[0].text, "10.0.0.2");
    /* a server that fails doesn't make the old answer wrong, one that knows no such name does */
    set(&server.fail_all, true);
    until = kv_now_ns() + 1100 * KV_NS_PER_MS;
    while (kv_now_ns() < until)
        usleep(10000);
    assert_int_equal(wait_for(r, "ok", 1, &a), 0);
    assert_string_equal(a.items[0].text, "10.0.0.2");
    assert_true(get(&server.lookups) >= 3);
    kv_resolver_destroy(r);
}

static void a_deadline_for_silence(void **state)
{
    struct kv_resolver *r = make(2, 50, 1);
    uint64_t start = kv_now_ns();
    struct kv_addresses a;

    (void)state;
    assert_int_equal(wait_for(r, "dead", 60000, &a), -ETIMEDOUT);
    assert_true(kv_now_ns() - start >= 50 * KV_NS_PER_MS);
    wait_silent(1); /* a busy machine may begin it after its deadline */
    assert_int_equal(kv_resolver_ask(r, "dead", 60000, &a), -ETIMEDOUT);
    assert_int_equal(get(&server.lookups), 1); /* one lookup, however often it is asked for */
    assert_int_equal(kv_resolver_wait(r, "dead2", 60000, kv_now_ns() + 5 * KV_NS_PER_MS, &a),
                     -ETIMEDOUT);
    wait_silent(2);
    kv_resolver_destroy(r); /* with both lookups still under way */
}

static void dead_names_hold_up_nobody_else(void **state)
{
    struct kv_resolver *r = make(8, 10000, 1);
    struct kv_addresses a;
    char host[16];

    (void)state;
    for (int i = 0; i < 30; i++) { /* names that have failed before ... */
        snprintf(host, sizeof(host), "fail%d", i);
        assert_int_equal(wait_for(r, host, 60000, &a), -EAGAIN);
    }
    set(&server.mute_failed, true);
    usleep(2000);
    for (int i = 0; i < 30; i++) { /* ... have three quarters of the threads at most */
        snprintf(host, sizeof(host), "fail%d", i);
        assert_int_equal(kv_resolver_ask(r, host, 60000, &a), -EINPROGRESS);
    }
    wait_silent(6);
    for (int i = 0; i < 20; i++) {
        snprintf(host, sizeof(host), "ok%d", i);
        assert_int_equal(wait_for(r, host, 60000, &a), 0);
    }
    assert_int_equal(get(&server.most_silent), 6);
    kv_resolver_destroy(r);
}

static void names_are_bounded(void **state)
{
    struct kv_resolver *r = make(4, 10000, 60000);
    struct kv_addresses a;
    char host[16];

    (void)state;
    for (int i = 0; i < 200; i++) {
        snprintf(host, sizeof(host), "ok%d", i);
        assert_int_equal(wait_for(r, host, 60000, &a), 0);
    }
    assert_int_equal(kv_resolver_ask(r, "ok199", 60000, &a), 0);
    assert_int_equal(get(&server.lookups), 200);
    assert_int_equal(wait_for(r, "ok0", 60000, &a), 0); /* forgotten, asked for again */
    assert_int_equal(get(&server.lookups), 201);
    for (int i = 0; i < 64; i++) {
        snprintf(host, sizeof(host), "dead%d", i);
        assert_int_equal(kv_resolver_ask(r, host, 60000, &a), -EINPROGRESS);
    }
    assert_int_equal(kv_resolver_ask(r, "ok0", 60000, &a), -ENOSPC);
    wait_silent(4);
    kv_resolver_destroy(r);
}

static void *ask_many(void *arg)
{
    uint64_t seed = (uint64_t)(uintptr_t)&seed;
    struct kv_addresses a;
    char host[16];

    for (int i = 0; i < 300; i++) {
        static const char *const kinds[] = {"ok", "none", "fail"};
        static const int wanted[] = {0, -ENOENT, -EAGAIN};
        uint64_t kind = unit_below(&seed, 3);

        snprintf(host, sizeof(host), "%s%d", kinds[kind], (int)unit_below(&seed, 12));
        if (wait_for(arg, host, 60000, &a) != wanted[kind])
            return "wrong answer";
    }
    return NULL;
}

static void many_threads(void **state)
{
    struct kv_resolver *r = make(4, 20000, 1);
    pthread_t threads[8];
    void *problem;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(threads); i++)
        assert_int_equal(kv_thread_start(&threads[i], "ask", ask_many, r), 0);
    for (size_t i = 0; i < KV_COUNT(threads); i++) {
        pthread_join(threads[i], &problem);
        assert_null(problem);
    }
    kv_resolver_destroy(r);
}

static void the_system_knows_this_machine(void **state)
{
    struct kv_resolver *r;
    struct kv_addresses a;

    (void)state;
    assert_int_equal(kv_resolver_create(NULL, &r), 0);
    assert_int_equal(wait_for(r, "localhost", 60000, &a), 0);
    assert_true(a.n > 0);
    assert_true(strcmp(a.items[0].text, "127.0.0.1") == 0 || strcmp(a.items[0].text, "::1") == 0);
    kv_resolver_destroy(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(answers_are_kept, reset, release_all),
        cmocka_unit_test_setup_teardown(old_answers_are_asked_for_again, reset, release_all),
        cmocka_unit_test_setup_teardown(a_deadline_for_silence, reset, release_all),
        cmocka_unit_test_setup_teardown(dead_names_hold_up_nobody_else, reset, release_all),
        cmocka_unit_test_setup_teardown(names_are_bounded, reset, release_all),
        cmocka_unit_test_setup_teardown(many_threads, reset, release_all),
        cmocka_unit_test(the_system_knows_this_machine),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
