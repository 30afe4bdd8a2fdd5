// SPDX-License-Identifier: Apache-2.0
/*
 * Blocks of a peer that a load leaves where they are, and what may come between prepare_load and the
 * job's end: their lease ends, the owner writes over them, is killed, frozen, started again.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <signal.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/core/error.h"
#include "base/unit.h"
#include "tier/kitchen.h"
#include "tier/manager/state/manager.h"

#define N 8u
#define OWNED (8 * N) /* blocks of an owner, so that N of them may be leased in place */

static struct node owner;
static struct world reader;

static void reader_init(const char *at)
{
    world_init(&reader, 2 * N);
    reader.opts.peers = at;
    reader.opts.peer_timeout_ms = 500;
    world_start(&reader);
    world_attach(&reader, false);
    wait_for_peers(&reader, 1);
}

static void reader_fini(void)
{
    wait_until(!world_stats(&reader).pins_now); /* a fetch that nobody waits for holds its pin */
    assert_int_equal(reader.m->pins.n_leased, 0);
    world_fini(&reader);
}

/* Lease N blocks in place. */
static struct kvbm_pin *prepare(void)
{
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .in_place = true};
    uint64_t keys[N];
    const struct kvbm_chain chain = world_chain(keys);
    struct kvbm_pin *pin;

    world_keys(1000, keys, N);
    for (;; usleep(10000)) { /* "absent" is believed for a second */
        assert_true(kvbm_manager_prepare_load(reader.m, &chain, N, &opts, &pin) >= 0);
        assert_int_equal(kvbm_pin_wait(pin, 60000), 0);
        if (kvbm_pin_state(pin, NULL) == N && reader.m->pins.n_leased == N)
            return pin;
        kvbm_pin_release(pin);
        (void)kvbm_pool_reset_inactive(kvbm_manager_pool(reader.m, KV_TIER_HOST));
    }
}

struct load {
    uint32_t blocks[N];
    uint8_t ok[1];
    int64_t id;
};

/* Submit a load of a pin. @ready: an eventfd, before which nothing is copied; 0: none. */
static void submit(struct load *load, struct kvbm_pin *pin, int ready, uint64_t deadline_ns)
{
    struct kvbm_job job = {.size = sizeof(job),
                           .pin = pin,
                           .cache = reader.cache,
                           .blocks = load->blocks,
                           .ready_fd = ready,
                           .deadline_ns = deadline_ns,
                           .ok = load->ok};

    for (uint32_t i = 0; i < N; i++)
        load->blocks[i] = i;
    load->ok[0] = 0;
    world_wipe(&reader);
    load->id = kvbm_manager_submit(reader.m, &job);
    assert_true(load->id > 0);
}

/* Wait for a load: what it calls right is right, and all of @expected is. */
static struct kvbm_done finish(struct load *load, uint8_t expected)
{
    struct kvbm_done done;

    assert_int_equal(kvbm_manager_wait(reader.m, (uint64_t)load->id, 60000, &done), 0);
    assert_int_equal(load->ok[0], expected);
    assert_int_equal(done.n_ok, __builtin_popcount(expected));
    for (uint32_t i = 0; i < N; i++) {
        if (load->ok[0] >> i & 1)
            assert_true(world_holds(&reader, i, 1000 + i));
    }
    return done;
}

/* Have the owner end all leases, and write over its blocks but the first @kept of the leased ones. */
static void overwrite(uint32_t kept)
{
    kvbm_blockset_destroy(owner.set);
    assert_true(kvbm_pool_reset_inactive(kvbm_manager_pool(owner.w.m, KV_TIER_HOST)) > 0);
    for (uint64_t first = 5000; first < 5000 + OWNED; first += 2 * N)
        assert_int_equal(world_store(&owner.w, first, 2 * N), 2 * N);
    assert_int_equal(kvbm_pool_reset_inactive(kvbm_manager_pool(owner.w.m, KV_TIER_HOST)), OWNED);
    if (kept)
        assert_int_equal(world_store(&owner.w, 1000, kept), kept);
    node_export(&owner, 100);
    wait_for_peers(&reader, 1);
}

static void begin(void)
{
    node_init(&owner, "owner", OWNED, NULL, true, NULL);
    kvbm_blockset_destroy(owner.set);
    world_stop(&owner.w); /* the disk would bring the blocks back */
    owner.w.opts.disk = NULL;
    owner.w.opts.disk_bytes = 0;
    world_start(&owner.w);
    world_attach(&owner.w, false);
    node_export(&owner, 100);
    assert_int_equal(world_store(&owner.w, 1000, N), N);
    reader_init(owner.at);
}

/* ---- leases that end ---- */

/* Before the job, and between its begin and its first byte. */
static void test_overwritten(void **state)
{
    (void)state;
    for (int way = 0; way < 4; way++) {
        bool late = way % 2;                  /* the job has begun */
        uint32_t kept = way / 2 ? N - 2u : 0; /* blocks that the owner has anew */
        int ready = late ? eventfd(0, EFD_CLOEXEC) : 0;
        struct kvbm_pin *pin;
        struct load load;

        begin();
        pin = prepare();
        if (late)
            submit(&load, pin, ready, 0);
        overwrite(kept);
        if (!late)
            submit(&load, pin, 0, 0);
        else
            assert_int_equal(eventfd_write(ready, 1), 0);
        assert_int_equal(finish(&load, (uint8_t)((1u << kept) - 1)).status, kept ? 0 : -ENOENT);
        assert_int_equal(world_stats(&reader).host.blocks_in, kept); /* got as without the option */
        kvbm_pin_release(pin);
        if (late)
            close(ready);
        reader_fini();
        node_fini(&owner);
    }
}

/* Two jobs of one pin: one copies while the other finds that the lease has ended. */
static void test_two_jobs(void **state)
{
    int ready = eventfd(0, EFD_CLOEXEC);
    struct kvbm_pin *pin;
    struct load early, late;
    struct kvbm_done done;

    (void)state;
    begin();
    pin = prepare();
    submit(&early, pin, ready, 0);
    overwrite(N);
    submit(&late, pin, 0, 0);
    assert_int_equal(kvbm_manager_wait(reader.m, (uint64_t)late.id, 60000, &done), 0);
    assert_int_equal(late.ok[0], 0xff);
    assert_int_equal(eventfd_write(ready, 1), 0);
    finish(&early, 0xff);
    kvbm_pin_release(pin);
    close(ready);
    reader_fini();
    node_fini(&owner);
}

/* A pin is held for longer than the owner leases. */
static void test_longer_than_a_lease(void **state)
{
    struct kvbm_block_source source;
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .max_lease_ms = 20};
    struct kvbm_pin *pin;
    struct load load;

    (void)state;
    begin();
    kvbm_blockset_destroy(owner.set);
    source = kvbm_manager_source(owner.w.m);
    what.layout = kvbm_manager_host_layout(owner.w.m);
    what.source = &source;
    what.shared = kvbm_manager_shared(owner.w.m);
    assert_int_equal(kvbm_blockset_export(owner.agent, &what, &owner.set), 0);
    wait_for_peers(&reader, 1);
    pin = prepare();
    wait_until(!world_stats(&owner.w).pins_now); /* the owner takes its blocks back */
    assert_int_equal(kvbm_pin_state(pin, NULL), N);
    submit(&load, pin, 0, 0);
    finish(&load, 0xff);
    assert_int_equal(world_stats(&reader).host.blocks_in, N);
    kvbm_pin_release(pin);
    reader_fini();
    node_fini(&owner);
}

/* ---- the caller ends ---- */

static void test_cancelled(void **state)
{
    int ready = eventfd(0, EFD_CLOEXEC);
    struct kvbm_pin *pin;
    struct load load;

    (void)state;
    begin();
    pin = prepare();
    submit(&load, pin, ready, 0);
    kvbm_pin_release(pin);
    assert_int_equal(kvbm_manager_cancel(reader.m, (uint64_t)load.id), 0);
    assert_int_equal(finish(&load, 0).status, -ECANCELED);
    pin = prepare();
    submit(&load, pin, ready, kv_now_ns() + 50 * KV_NS_PER_MS);
    kvbm_pin_release(pin);
    assert_int_equal(finish(&load, 0).status, -ETIMEDOUT);
    assert_int_equal(reader.m->pins.n_leased, 0);
    for (uint32_t i = 0; i < N; i++)
        assert_true(world_holds(&reader, i, ~UINT64_C(0)));
    close(ready);
    /* While the owner doesn't answer, a job that has to fetch again is cancelled, and ends in time. */
    for (int way = 0; way < 2; way++) {
        pin = prepare();
        overwrite(N);
        submit(&load, pin, 0, way ? kv_now_ns() + KV_NS_PER_MS : 0);
        kvbm_pin_release(pin);
        if (!way)
            (void)kvbm_manager_cancel(reader.m, (uint64_t)load.id);
        assert_int_equal(
            kvbm_manager_wait(reader.m, (uint64_t)load.id, 60000, &(struct kvbm_done){0}), 0);
        for (uint32_t i = 0; i < N; i++) {
            if (load.ok[0] >> i & 1)
                assert_true(world_holds(&reader, i, 1000 + i));
        }
    }
    reader_fini();
    node_fini(&owner);
}

/* A manager is destroyed while a job copies in place. */
static void test_destroyed(void **state)
{
    int ready = eventfd(0, EFD_CLOEXEC);
    struct kvbm_pin *pin;
    struct load load;

    (void)state;
    begin();
    pin = prepare();
    assert_int_equal(kvbm_manager_destroy(reader.m, 0), -EBUSY); /* the pin is held */
    submit(&load, pin, ready, 0);
    kvbm_pin_release(pin);
    assert_int_equal(world_destroy(&reader, 0), 0);
    close(ready);
    world_fini(&reader);
    node_fini(&owner);
}

/* ---- the owner ends ---- */

/* A process that becomes an owner when it is told to. */
struct child {
    pid_t pid;
    int go, there; /* pipes to and from it */
};

static void be_owner(const char *dir)
{
    char at[96];
    const char *listen = at;
    const struct kvbm_agent_opts opts = {.size = sizeof(opts),
                                         .name = "owner",
                                         .fingerprint = "test",
                                         .worker = 100,
                                         .listen = &listen,
                                         .n_listen = 1};

    memset(&owner, 0, sizeof(owner));
    world_init(&owner.w, OWNED);
    (void)rmdir(owner.w.dir);
    owner.w.opts.host_shared = true;
    world_start(&owner.w);
    world_attach(&owner.w, false);
    (void)world_store(&owner.w, 1000, N);
    snprintf(at, sizeof(at), "unix:%s/owner", dir);
    (void)unlink(at + strlen("unix:")); /* of the owner before */
    assert_int_equal(kvbm_agent_create(&opts, &owner.agent), 0);
    node_export(&owner, 100);
}

/* Fork a child: before this process has threads, which sanitizers want. */
static struct child child_fork(const char *dir)
{
    struct child child;
    int go[2], there[2];
    char byte = 0;

    assert_int_equal(pipe(go), 0);
    assert_int_equal(pipe(there), 0);
    child.pid = fork();
    assert_true(child.pid >= 0);
    if (child.pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        (void)setenv("CMOCKA_TEST_ABORT", "1", 1);
        if (read(go[0], &byte, 1) == 1)
            be_owner(dir);
        (void)!write(there[1], &byte, 1);
        for (;;)
            pause();
    }
    child.go = go[1];
    child.there = there[0];
    close(go[0]);
    close(there[1]);
    return child;
}

static void child_start(const struct child *child)
{
    char byte = 0;

    assert_int_equal(write(child->go, &byte, 1), 1);
    assert_int_equal(read(child->there, &byte, 1), 1);
}

static void child_kill(const struct child *child)
{
    assert_int_equal(kill(child->pid, SIGKILL), 0);
    assert_int_equal(waitpid(child->pid, NULL, 0), child->pid);
    close(child->go);
    close(child->there);
}

/* Load what was leased before something happened to its owner, twice. */
static void load_leased(struct kvbm_pin *pin)
{
    struct load load;

    for (int turn = 0; turn < 2; turn++) {
        submit(&load, pin, 0, turn ? 0 : kv_now_ns() + 60 * KV_NS_PER_S);
        finish(&load, 0xff);
    }
    assert_int_equal(world_stats(&reader).host.blocks_in, 0);
    kvbm_pin_release(pin);
    assert_int_equal(reader.m->pins.n_leased, 0);
}

/* Killed, killed and started again, and frozen: what was leased before is right, also from a dead
 * owner's memory. What comes after is right or a miss. */
static void test_owner_ends(void **state)
{
    char dir[64], at[96];
    struct child children[3];
    struct kvbm_pin *pin;

    (void)state;
    assert_int_equal(temp_dir(dir, sizeof(dir)), 0);
    snprintf(at, sizeof(at), "unix:%s/owner", dir);
    for (int i = 0; i < 3; i++)
        children[i] = child_fork(dir);
    child_start(&children[0]);
    reader_init(at);
    pin = prepare();
    child_kill(&children[0]);
    load_leased(pin);
    child_start(&children[1]);
    wait_for_peers(&reader, 1);
    pin = prepare();
    child_kill(&children[1]);
    child_start(&children[2]);
    load_leased(pin);
    wait_for_peers(&reader, 1);
    pin = prepare();
    unit_freeze(children[2].pid);
    load_leased(pin);
    reader.in_place = true; /* a frozen owner leases nothing: misses after 500 ms, its time */
    assert_int_equal(world_load(&reader, 1000, N), 0);
    child_kill(&children[2]);
    reader_fini();
    (void)remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_owner_ends), /* forks, so before any thread has begun */
        cmocka_unit_test(test_overwritten),         cmocka_unit_test(test_two_jobs),
        cmocka_unit_test(test_longer_than_a_lease), cmocka_unit_test(test_cancelled),
        cmocka_unit_test(test_destroyed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
