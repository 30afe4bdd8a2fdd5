// SPDX-License-Identifier: Apache-2.0
/* A host whose signal handlers interrupt system calls: the store waits for locks nevertheless. */
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/time.h>

#include "store/file_unit.h"

enum { HELD_US = 150 * 1000, TICK_US = 2000 };

static const char text[] = "content";
static _Atomic int n_signals;
static _Atomic bool held;

static void count_signal(int number)
{
    (void)number;
    n_signals++;
}

/* As another process' sweep, deletion or publication: @arg is a descriptor that the handle has not. */
static void *let_go_later(void *arg)
{
    usleep(HELD_US);
    atomic_store(&held, false);
    close((int)(intptr_t)arg);
    return NULL;
}

static void hold(const char *where, pthread_t *ret)
{
    char path[512];
    sigset_t alarm, before;
    int fd;

    snprintf(path, sizeof(path), "%s/%s", unit_dir, where);
    fd = open(path, O_RDONLY);
    assert_true(fd >= 0);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    atomic_store(&held, true);
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    pthread_sigmask(SIG_BLOCK, &alarm, &before); /* they are for whoever waits */
    assert_int_equal(pthread_create(ret, NULL, let_go_later, (void *)(intptr_t)fd), 0);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void tick(suseconds_t us)
{
    const struct itimerval every = {{0, us}, {0, us}};

    assert_int_equal(setitimer(ITIMER_REAL, &every, NULL), 0);
}

static int publish(kv_store_v1 *h)
{
    return unit_publish(h, "m", "x");
}

static int delete (kv_store_v1 *h)
{
    return kvs_file_vtable()->delete_manifest(h, "m");
}

static int sweep(kv_store_v1 *h)
{
    kv_store_swept swept = {.size = sizeof(swept)};

    return kvs_file_ext()->sweep_chunks(h, 1000, NULL, NULL, &swept);
}

static int evict(kv_store_v1 *h)
{
    char big[2000] = "big";

    assert_int_equal(unit_put(h, 90, big, sizeof(big)), 0);
    return unit_publish_own(h, "big");
}

static int delete_chunk(kv_store_v1 *h)
{
    uint8_t key[8];

    unit_key(key, 2);
    return kvs_file_ext()->delete_chunk(h, key, 8);
}

static void locks_are_waited_for(void **state)
{
    static const struct {
        const char *where;
        int (*call)(kv_store_v1 *h);
    } cases[] = {
        {NULL, publish},      {".kvasir/refs", publish}, {".kvasir", publish}, {"", publish},
        {"", delete},         {".kvasir/refs", delete},  {".kvasir", delete},  {NULL, sweep},
        {NULL, delete_chunk}, {".kvasir/used", evict},
    };
    (void)state;

    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        kv_store_v1 *h = unit_open("?limit=1000");
        char chunk[512];
        pthread_t holder;

        assert_int_equal(unit_put(h, 2, text, sizeof(text)), 0);
        assert_int_equal(unit_publish(h, "m", "x"), 0);
        unit_path(chunk, 2);
        *strrchr(chunk, '/') = '\0'; /* the folder that it is in */
        assert_int_equal(unit_put(h, 2, text, sizeof(text)), 1);
        hold(cases[i].where ? cases[i].where : chunk + strlen(unit_dir) + 1, &holder);
        n_signals = 0;
        tick(TICK_US);
        assert_int_equal(cases[i].call(h), 0);
        if (atomic_load(&held))
            fail_msg("case %zu did not wait", i);
        tick(0);
        assert_true(n_signals > 0);
        pthread_join(holder, NULL);
        unit_key((uint8_t *)chunk, 2);
        assert_int_equal(kvs_file_ext()->delete_chunk(h, (uint8_t *)chunk, 8), 0);
        kvs_file_vtable()->close(h);
    }
}

static int setup(void **state)
{
    const struct sigaction action = {.sa_handler = count_signal}; /* without SA_RESTART */

    assert_int_equal(sigaction(SIGALRM, &action, NULL), 0);
    return unit_make_dir(state);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(locks_are_waited_for),
    };

    return cmocka_run_group_tests(tests, setup, unit_rm_dir);
}
