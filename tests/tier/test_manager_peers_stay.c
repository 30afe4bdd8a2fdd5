// SPDX-License-Identifier: Apache-2.0
/* A manager that can't be destroyed, because its disk hangs, still loads from its peers. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <sys/syscall.h>

#include "base/core/clock.h"
#include "shaky_peer.h"

#define N 8u

/* A disk whose writes wait at a gate: pwrite of this program. */
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool shut;
    int n_waiting;
} gate = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};

ssize_t pwrite(int fd, const void *from, size_t len, off_t offset)
{
    pthread_mutex_lock(&gate.lock);
    gate.n_waiting++;
    pthread_cond_broadcast(&gate.changed);
    while (gate.shut)
        pthread_cond_wait(&gate.changed, &gate.lock);
    gate.n_waiting--;
    pthread_mutex_unlock(&gate.lock);
    return syscall(SYS_pwrite64, fd, from, len, offset);
}

static void shut(bool shut)
{
    pthread_mutex_lock(&gate.lock);
    gate.shut = shut;
    pthread_cond_broadcast(&gate.changed);
    pthread_mutex_unlock(&gate.lock);
}

static void wait_for_hung(void)
{
    pthread_mutex_lock(&gate.lock);
    while (!gate.n_waiting)
        pthread_cond_wait(&gate.changed, &gate.lock);
    pthread_mutex_unlock(&gate.lock);
}

static void test_destroy_fails(void **state)
{
    static struct shaky_peer peer;
    uint64_t keys[SHAKY_BLOCKS];
    struct world w;
    char at[96];

    (void)state;
    world_keys(1000, keys, SHAKY_BLOCKS);
    world_init(&w, 32);
    snprintf(at, sizeof(at), "unix:%s/peer", w.dir);
    shaky_init(&peer, at, keys);
    w.opts.fingerprint = "test";
    w.opts.peers = at;
    w.opts.peer_timeout_ms = 60000;
    w.opts.io = KVBM_IO_THREADS;
    world_with_disk(&w, 64);
    world_start(&w);
    world_attach(&w, false);
    shut(true);
    assert_int_equal(world_store(&w, 5000, N), N);
    wait_for_hung();
    for (int i = 0; i < 2; i++) {
        assert_int_equal(kvbm_manager_destroy(w.m, 0), -ETIMEDOUT);
        /* Until the session is open again; a busy machine's peer may also be late once, and rest. */
        wait_until(world_load(&w, 1000 + 8 * (uint64_t)i, N) == (long)N);
    }
    shut(false);
    assert_int_equal(kvbm_manager_drain(w.m, 60000), 0);
    world_fini(&w);
    shaky_fini(&peer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_destroy_fails),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
