// SPDX-License-Identifier: Apache-2.0
/*
 * A storm of loads through managers that follow two owners, which are killed, frozen and started
 * again at random moments. One owner lends shared memory over a unix socket, the other one is read
 * over tcp. Readers are frozen and killed, too.
 *
 * Every block that a job calls right is compared byte by byte with what its key says. The readers'
 * host tiers are small, so that blocks are evicted and their memory is written again all the time:
 * bytes that arrive late would make later blocks wrong.
 *
 * Readers know the owners from a list, or from an etcd, which is disturbed, too, and may lose its data.
 *
 * Every call comes back by its deadline + 100 ms, stalls aside (base/stalls.h).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/stalls.h"
#include "index/random.h"
#include "kvbm_directory.h"
#include "peer/etcd_unit.h"
#include "skip.h"
#include "tier/kitchen.h"

#define N_OWNERS 2
#define N_READERS 3
#define N_PROMPTS 24u
#define OWNER_BLOCKS 64u /* an eighth may be leased in place: a prompt */
#define MAX_LENGTH 8u
#define SHORT_MS 30
#define LONG_MS 20000

/* Seen by all processes. */
static struct {
    char dir[64];
    char directory[96]; /* etcd that owners are in; "": readers get a list */
    atomic_int port;
    atomic_bool stop, readers_gone;
    atomic_uint_fast64_t loads, right, from_peers, in_place, misses, wrong, late, pins_left, faults;
    atomic_uint_fast64_t latest_ns; /* longest time after a deadline, less that of stalls */
} * all;

static void begin_child(void)
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)setenv("CMOCKA_TEST_ABORT", "1", 1);
}

static uint64_t soon(void)
{
    return kv_now_ns() + 120 * KV_NS_PER_S;
}

static void fault_unless(bool good)
{
    atomic_fetch_add(&all->faults, !good);
}

/* ---- owners ---- */

static void endpoint_of(int i, char to[96])
{
    if (i == 0)
        snprintf(to, 96, "unix:%s/owner", all->dir);
    else
        snprintf(to, 96, "tcp:127.0.0.1:%d", atomic_load(&all->port));
}

/* Listen where the owner before listened. */
static struct kvbm_agent *listen_again(int i, char at[96])
{
    char name[32];
    const char *endpoint = at;
    struct kvbm_agent_opts opts = {
        .size = sizeof(opts), .name = name, .fingerprint = "test", .listen = &endpoint};
    struct kvbm_agent *agent = NULL;

    opts.n_listen = 1;
    opts.worker = 100 + (uint64_t)i;
    snprintf(name, sizeof(name), "owner%d", i);
    endpoint_of(i, at);
    for (uint64_t end = soon(); kvbm_agent_create(&opts, &agent) < 0; usleep(10000))
        assert_true(kv_now_ns() < end); /* the dead one's port may be in use for a moment */
    if (i == 1) {
        char bound[96];

        assert_true(kvbm_agent_endpoint(agent, 0, bound, sizeof(bound), NULL) > 0);
        atomic_store(&all->port, atoi(strrchr(bound, ':') + 1));
    }
    return agent;
}

static void ignore(void *arg, const struct kvbm_directory_peer *peer, bool there)
{
    (void)arg, (void)peer, (void)there;
}

/* Register an owner where readers look for it. Returns NULL when they have a list. */
static struct kvbm_directory *register_owner(int i, const char *at, struct rng *rng)
{
    struct kvbm_directory_peer self = KVBM_DIRECTORY_PEER_INIT;
    const struct kvbm_directory_opts opts = {.size = sizeof(opts),
                                             .peers = all->directory,
                                             .changed = ignore,
                                             .self = &self,
                                             .ttl_s = 2,
                                             .timeout_ms = 500};
    struct kvbm_directory *directory = NULL;

    if (!*all->directory)
        return NULL;
    snprintf(self.name, sizeof(self.name), "owner%d", i);
    snprintf(self.endpoints[0], sizeof(self.endpoints[0]), "%s", at);
    self.n_endpoints = 1;
    self.worker = 100 + (uint64_t)i;
    self.incarnation = rng_next(rng);
    assert_int_equal(kvbm_directory_open(&opts, &directory), 0);
    return directory;
}

/* Store random prompts until the end; evictions make room. */
static void run_owner(int i, uint64_t seed)
{
    struct rng rng = {seed};
    struct kvbm_block_source source;
    struct kvbm_blockset_opts what = {.size = sizeof(what), .id = 1, .lease_share = 50};
    struct kvbm_directory *directory;
    struct kvbm_blockset *set;
    struct kvbm_agent *agent;
    struct world w;
    char at[96];

    begin_child();
    world_init(&w, OWNER_BLOCKS);
    (void)rmdir(w.dir);
    w.opts.host_shared = i == 0;
    world_start(&w);
    world_attach(&w, false);
    if (i == 0) {
        endpoint_of(0, at);
        (void)unlink(at + strlen("unix:"));
    }
    agent = listen_again(i, at);
    source = kvbm_manager_source(w.m);
    what.layout = kvbm_manager_host_layout(w.m);
    what.source = &source;
    what.shared = kvbm_manager_shared(w.m);
    assert_int_equal(kvbm_blockset_export(agent, &what, &set), 0);
    endpoint_of(i, at);
    directory = register_owner(i, at, &rng);
    while (!atomic_load(&all->readers_gone)) {
        (void)world_store(&w, 1000 * (1 + rng_below(&rng, N_PROMPTS)),
                          1 + rng_below(&rng, MAX_LENGTH));
        if (rng_below(&rng, 100) == 0)
            (void)kvbm_pool_reset_inactive(kvbm_manager_pool(w.m, KV_TIER_HOST));
        usleep(rng_below(&rng, 500));
    }
    for (uint64_t end = soon(); world_stats(&w).pins_now && kv_now_ns() < end;)
        usleep(1000);
    atomic_fetch_add(&all->pins_left, world_stats(&w).pins_now);
    kvbm_directory_close(directory);
    kvbm_blockset_destroy(set);
    fault_unless(kvbm_agent_destroy(agent) == 0);
    world_stop(&w);
    _exit(0);
}

/* ---- readers ---- */

/* Check that a call which has come back now, and began when @lost was counted, is in time. */
static void check_time(uint64_t deadline, const struct stalls *lost)
{
    uint64_t late = stalls_lateness(deadline, lost), most = atomic_load(&all->latest_ns);

    while (late > most && !atomic_compare_exchange_weak(&all->latest_ns, &most, late))
        ;
    atomic_fetch_add(&all->late, late > STALLS_LATE_NS);
}

/* Load a prompt, or scattered keys, by a deadline. */
static void load_once(struct world *w, struct rng *rng)
{
    uint64_t keys[MAX_LENGTH], begun = kv_now_ns();
    struct stalls lost = stalls_so_far();
    uint64_t deadline = begun + (rng_below(rng, 2) ? SHORT_MS : LONG_MS) * KV_NS_PER_MS;
    uint32_t blocks[MAX_LENGTH], n = 1 + rng_below(rng, MAX_LENGTH);
    const struct kvbm_pin_opts opts = {.size = sizeof(opts),
                                       .deadline_ns = deadline,
                                       .priority = (int32_t)rng_below(rng, 3),
                                       .in_place = rng_below(rng, 2)};
    uint8_t ok[1] = {0};
    struct kvbm_job job = {.size = sizeof(job), .cache = w->cache, .blocks = blocks, .ok = ok};
    struct kvbm_chain chain = world_chain(keys);
    struct kvbm_done done;
    int64_t id;

    world_keys(1000 * (1 + rng_below(rng, N_PROMPTS)), keys, n);
    for (uint32_t i = 0; i < n; i++)
        blocks[i] = i;
    world_wipe(w);
    fault_unless(kvbm_manager_prepare_load(w->m, &chain, n, &opts, &job.pin) >= 0);
    check_time(begun, &lost);
    job.deadline_ns = deadline;
    id = kvbm_manager_submit(w->m, &job);
    kvbm_pin_release(job.pin);
    fault_unless(id > 0);
    if (rng_below(rng, 16) == 0)
        (void)kvbm_manager_cancel(w->m, (uint64_t)id);
    fault_unless(kvbm_manager_wait(w->m, (uint64_t)id, 60000, &done) == 0);
    check_time(deadline, &lost);
    for (uint32_t i = 0; i < n; i++) {
        if (!(ok[0] >> i & 1))
            atomic_fetch_add(&all->misses, 1);
        else
            atomic_fetch_add(world_holds(w, i, keys[i]) ? &all->right : &all->wrong, 1);
    }
    atomic_fetch_add(&all->loads, 1);
}

static void run_reader(uint64_t seed)
{
    struct rng rng = {seed};
    struct kvbm_manager_stats seen = {.size = 0};
    char peers[256], at[N_OWNERS][96];
    struct world w;

    begin_child();
    stalls_begin();
    for (int i = 0; i < N_OWNERS; i++)
        endpoint_of(i, at[i]);
    snprintf(peers, sizeof(peers), "%s, %s", at[0], at[1]);
    world_init(&w, 12);
    (void)rmdir(w.dir);
    w.opts.peers = *all->directory ? all->directory : peers;
    w.opts.peer_timeout_ms = 500;
    world_start(&w);
    world_attach(&w, false);
    while (!atomic_load(&all->stop)) {
        struct kvbm_manager_stats stats;

        load_once(&w, &rng);
        stats = world_stats(&w);
        atomic_fetch_add(&all->from_peers, stats.peer.blocks_out - seen.peer.blocks_out);
        atomic_fetch_add(&all->in_place, stats.peer.blocks_out - stats.host.blocks_in -
                                             (seen.peer.blocks_out - seen.host.blocks_in));
        seen = stats;
        if (rng_below(&rng, 4) == 0)
            (void)world_where(&w, 1000 * (1 + rng_below(&rng, N_PROMPTS)), 3);
    }
    for (uint64_t end = soon(); world_stats(&w).pins_now && kv_now_ns() < end;)
        usleep(1000);
    atomic_fetch_add(&all->pins_left, world_stats(&w).pins_now);
    fault_unless(kvbm_registry_check(kvbm_manager_registry(w.m)) == 0);
    world_stop(&w);
    _exit(0);
}

/* ---- the storm ---- */

static pid_t start(int i, struct rng *rng)
{
    uint64_t seed = rng_next(rng);
    pid_t pid = fork();

    if (pid == 0 && i < N_OWNERS)
        run_owner(i, seed);
    if (pid == 0)
        run_reader(seed);
    assert_true(pid > 0);
    return pid;
}

static void kill_and_reap(pid_t pid)
{
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void freeze(pid_t pid, uint32_t ms)
{
    assert_int_equal(kill(pid, SIGSTOP), 0);
    usleep(1000 * ms);
    assert_int_equal(kill(pid, SIGCONT), 0);
}

/* Wait until readers have loaded so much more, and that many blocks from peers. */
static void let_load(uint64_t more)
{
    uint64_t loads = atomic_load(&all->loads), blocks = atomic_load(&all->from_peers);

    for (uint64_t end = soon();
         atomic_load(&all->loads) < loads + more || atomic_load(&all->from_peers) < blocks + more;
         usleep(1000))
        assert_true(kv_now_ns() < end);
}

/* Kill etcd and start it again, perhaps without what it knew, or freeze it: beyond the leases, too. */
static void disturb_etcd(struct rng *rng)
{
    if (rng_below(rng, 2)) {
        freeze(etcd.pid, 1 + rng_below(rng, rng_below(rng, 2) ? 300 : 3500));
        return;
    }
    etcd_kill();
    usleep(1000 * rng_below(rng, rng_below(rng, 2) ? 20 : 1000));
    if (rng_below(rng, 2))
        etcd_forget();
    etcd_start();
}

static void disturb(pid_t *pids, struct rng *rng)
{
    uint32_t i = rng_below(rng, N_OWNERS + N_READERS);

    if (*all->directory && rng_below(rng, 2)) {
        disturb_etcd(rng);
        return;
    }
    if (rng_below(rng, 3) == 0) {
        kill_and_reap(pids[i]);
        usleep(1000 * rng_below(rng, 20));
        pids[i] = start((int)i, rng);
    } else {
        freeze(pids[i], 1 + rng_below(rng, rng_below(rng, 4) ? 120 : 1200));
    }
}

static void end(pid_t *pids)
{
    int status;

    atomic_store(&all->stop, true);
    for (int i = N_OWNERS; i < N_OWNERS + N_READERS; i++) {
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
    atomic_store(&all->readers_gone, true);
    for (int i = 0; i < N_OWNERS; i++) {
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
}

static void begin(struct rng *rng, pid_t *pids)
{
    pids[0] = start(0, rng);
    pids[1] = start(1, rng);
    for (uint64_t until = soon(); !atomic_load(&all->port); usleep(1000))
        assert_true(kv_now_ns() < until);
    for (int i = N_OWNERS; i < N_OWNERS + N_READERS; i++)
        pids[i] = start(i, rng);
    let_load(50);
}

static void check_all(void)
{
    print_message("loads %lu, right %lu, from peers %lu, in place %lu, misses %lu, latest %lu ms\n",
                  (unsigned long)all->loads, (unsigned long)all->right,
                  (unsigned long)all->from_peers, (unsigned long)all->in_place,
                  (unsigned long)all->misses, (unsigned long)(all->latest_ns / KV_NS_PER_MS));
    assert_int_equal(all->wrong, 0);
    assert_int_equal(all->late, 0);
    assert_int_equal(all->pins_left, 0);
    assert_int_equal(all->faults, 0);
    assert_true(all->right > 0);
    assert_true(all->in_place > 0);
}

/* @directory: of the owners, or "". */
static void run_storm(const char *directory, long rounds)
{
    struct rng rng = {test_seed()};
    pid_t pids[N_OWNERS + N_READERS];

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)rng.state);
    all = mmap(NULL, sizeof(*all), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(all != MAP_FAILED);
    snprintf(all->directory, sizeof(all->directory), "%s", directory);
    assert_int_equal(temp_dir(all->dir, sizeof(all->dir)), 0);
    begin(&rng, pids);
    for (long i = 0; i < rounds; i++) {
        disturb(pids, &rng);
        let_load(30);
    }
    end(pids);
    check_all();
    (void)remove_dir(all->dir);
    munmap(all, sizeof(*all));
}

static void test_storm(void **state)
{
    (void)state;
    run_storm("", test_rounds(25));
}

static void test_etcd(void **state)
{
    char directory[96];

    (void)state;
    if (!etcd_is_here())
        skip_because("no etcd (Debian: etcd-server) here");
    assert_non_null(mkdtemp(etcd.folder));
    etcd_choose_ports();
    etcd_start();
    snprintf(directory, sizeof(directory), "etcd://127.0.0.1:%u/kvasir/storm", etcd.ports[0]);
    run_storm(directory, test_rounds(20));
    etcd_kill();
    etcd_forget();
    assert_int_equal(rmdir(etcd.folder), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_storm),
        cmocka_unit_test(test_etcd),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
