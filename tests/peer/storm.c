// SPDX-License-Identifier: Apache-2.0
#include "storm.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/stalls.h"

/* Deadlines of a reader's calls: shorter than most freezes, and long enough for any machine. */
#define SHORT_MS 30
#define LONG_MS 20000

struct storm *storm;

/* Begin a child: it ends with its parent, and at a failed assertion, instead of testing on. */
static void begin_child(int net)
{
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)setenv("CMOCKA_TEST_ABORT", "1", 1);
    assert_true(net == 0 || setns(net, CLONE_NEWNET) == 0);
}

static struct kvbm_agent_opts agent_opts(const char *name, const char *const *endpoint)
{
    struct kvbm_agent_opts opts = session_opts(name, endpoint);

    opts.keepalive_ms = storm->keepalive_ms;
    opts.unprotected = true; /* of a network of the test's own */
    opts.ucx = storm->ucx;
    opts.nixl = storm->nixl;
    return opts;
}

static const char *tcp_endpoint(void)
{
    static char text[64];

    snprintf(text, sizeof(text), "tcp:%s:%d", storm->host, atomic_load(&storm->port));
    return text;
}

/* Listen where the owner before listened. Its port may have become somebody else's meanwhile. */
static void choose_port(void)
{
    struct kvbm_agent *agent = NULL;
    const char *endpoint = tcp_endpoint();
    struct kvbm_agent_opts opts = agent_opts("port", &endpoint);

    if (kvbm_agent_create(&opts, &agent) != 0) {
        atomic_store(&storm->port, 0);
        (void)tcp_endpoint(); /* writes the same text */
        agent = agent_of(&opts);
    }
    atomic_store(&storm->port, atoi(strrchr(endpoint_of(agent), ':') + 1));
    assert_int_equal(kvbm_agent_destroy(agent), 0);
}

/* ---- the owner ---- */

/* Overwrite blocks, as fast as leases allow, until the end; then wait until nothing is leased. */
static void run_owner(uint64_t seed)
{
    const char *endpoints[] = {storm->unix_endpoint, NULL};
    struct kvbm_agent_opts opts = agent_opts("owner", NULL);
    struct rng rng = {seed};
    struct lending owner;

    begin_child(storm->owner_net);
    (void)unlink(storm->unix_endpoint + strlen("unix:"));
    choose_port();
    endpoints[1] = tcp_endpoint();
    opts.listen = endpoints;
    opts.n_listen = 2;
    opts.worker = 7;
    lend_init(&owner, &opts, KVBM_FULLY_CONTIGUOUS, true);
    while (!atomic_load(&storm->stop)) {
        (void)lend_store(&owner, 1 + rng_below(&rng, STORM_KEYS), 1);
        atomic_fetch_add(&storm->owner_turns, 1);
        atomic_store(&storm->owner_pinned, lend_pinned(&owner));
        if (rng_below(&rng, 50) == 0)
            (void)kvbm_pool_reset_inactive(owner.pool);
        usleep(rng_below(&rng, 200));
    }
    lend_wait_idle(&owner); /* the readers are gone, or will be at their leases' end */
    atomic_store(&storm->pinned_at_end, 1 + lend_pinned(&owner));
    lend_fini(&owner);
    _exit(0);
}

/* ---- readers ---- */

struct reader {
    struct kvbm_agent *agent;
    struct kvbm_session *session;
    struct kvbm_layout *to;
    struct rng rng;
    bool tcp;
};

static uint64_t some_deadline(struct reader *r)
{
    return kv_now_ns() + (rng_below(&r->rng, 2) ? SHORT_MS : LONG_MS) * KV_NS_PER_MS;
}

/* A call has ended, which began when @lost was counted: compare with its deadline. */
static void check_time(uint64_t deadline, const struct stalls *lost)
{
    uint64_t late = stalls_lateness(deadline, lost);

    for (uint64_t worst = atomic_load(&storm->latest_ns);
         late > worst && !atomic_compare_exchange_weak(&storm->latest_ns, &worst, late);)
        ;
    atomic_fetch_add(&storm->late_calls, late > STALLS_LATE_NS);
}

static bool connect_again(struct reader *r)
{
    struct kvbm_session_opts opts = {.size = sizeof(opts), .timeout_ms = storm->open_ms};

    (void)kvbm_session_close(r->session);
    r->session = NULL;
    r->tcp = storm->only_tcp || rng_below(&r->rng, 2);
    opts.n_data = r->tcp;
    if (kvbm_session_open(r->agent, r->tcp ? tcp_endpoint() : storm->unix_endpoint, &opts,
                          &r->session) == 0)
        return true;
    usleep(2000);
    return false;
}

/* Poison the memory that was read to, and look whether anything still arrives. */
static void watch_poison(struct reader *r, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        lend_fill(r->to, i, UINT64_MAX - 1);
    usleep(rng_below(&r->rng, 3) ? 0 : 2000);
    for (uint32_t i = 0; i < n; i++) {
        if (!lend_holds(r->to, i, UINT64_MAX - 1))
            atomic_fetch_add(&storm->late_bytes, 1);
    }
}

static bool is_carried(const struct reader *r)
{
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;

    return kvbm_session_get_info(r->session, &info) == 0 && (info.ucx || info.nixl);
}

static void read_lease(struct reader *r, struct kvbm_lease *lease, const uint64_t *keys)
{
    const uint32_t blocks[] = {0, 1, 2, 3, 4, 5, 6, 7};
    uint8_t ok[1] = {0};
    struct kvbm_lease_read_opts opts = {.size = sizeof(opts),
                                        .to = r->to,
                                        .to_blocks = blocks,
                                        .n = (uint32_t)kvbm_lease_count(lease),
                                        .deadline_ns = some_deadline(r),
                                        .ok = ok,
                                        .no_shared = storm->no_shared || rng_below(&r->rng, 2)};
    bool shared = kvbm_lease_is_shared(lease) && !opts.no_shared, carried = is_carried(r);
    struct stalls lost = stalls_so_far();
    long n = kvbm_lease_read(lease, &opts);

    check_time(opts.deadline_ns, &lost);
    carried = carried && !shared && is_carried(r);
    if (n < 0)
        atomic_fetch_add(&storm->odd_errors, 1);
    for (uint32_t i = 0; i < opts.n; i++) {
        if (!(ok[0] >> i & 1))
            atomic_fetch_add(&storm->misses, 1);
        else if (!lend_holds(r->to, i, keys[i]))
            atomic_fetch_add(&storm->wrong, 1);
        else
            atomic_fetch_add(shared ? &storm->shared_right : &storm->sent_right, 1);
        atomic_fetch_add(&storm->carried_right, carried && ok[0] >> i & 1);
    }
    atomic_fetch_add(&storm->reads, 1);
    watch_poison(r, opts.n);
}

/* Returns false when the session is of no use any more. */
static bool read_once(struct reader *r)
{
    uint64_t keys[8], deadline = some_deadline(r);
    struct stalls lost = stalls_so_far();
    struct kvbm_lease *lease = NULL;
    int err;

    for (uint32_t i = 0; i < 8; i++)
        keys[i] = 1 + rng_below(&r->rng, STORM_KEYS);
    err = kvbm_session_lease(r->session, 1, 0, keys, 8, rng_below(&r->rng, 2) ? 3 : 30000, deadline,
                             &lease);
    check_time(deadline, &lost);
    if (err < 0)
        return err == -ENOENT || err == -ENOSPC;
    for (uint32_t again = rng_below(&r->rng, 3) + 1; again > 0; again--)
        read_lease(r, lease, keys);
    kvbm_lease_release(lease);
    return true;
}

static void run_reader(int i, uint64_t seed)
{
    const struct kvbm_layout_config config =
        lend_config(i % 2 ? KVBM_FULLY_CONTIGUOUS : KVBM_LAYER_SEPARATE_OUTER_CONTIGUOUS);
    struct reader r = {.rng = {seed}};
    struct kvbm_agent_opts opts;
    char name[40];

    begin_child(storm->reader_net);
    stalls_begin();
    snprintf(name, sizeof(name), "reader%d-%d", i, (int)getpid());
    opts = agent_opts(name, NULL);
    r.agent = agent_of(&opts);
    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    while (!atomic_load(&storm->stop)) {
        if ((!r.session && !connect_again(&r)) || !read_once(&r) || rng_below(&r.rng, 40) == 0) {
            (void)kvbm_session_close(r.session);
            r.session = NULL;
        }
    }
    (void)kvbm_session_close(r.session);
    _exit(kvbm_agent_destroy(r.agent) == 0 ? 0 : 3);
}

/* ---- all of them ---- */

void storm_init(void)
{
    storm = mmap(NULL, sizeof(*storm), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(storm != MAP_FAILED);
    snprintf(storm->unix_endpoint, sizeof(storm->unix_endpoint), "%s", unix_endpoint());
    storm->host = "127.0.0.1";
    storm->keepalive_ms = storm->open_ms = SOON_NS / KV_NS_PER_MS;
}

pid_t storm_start_owner(struct rng *rng)
{
    uint64_t seed = rng_next(rng);
    pid_t pid;

    atomic_store(&storm->owner_turns, 0);
    pid = fork();
    if (pid == 0)
        run_owner(seed);
    assert_true(pid > 0);
    return pid;
}

pid_t storm_start_reader(int i, struct rng *rng)
{
    uint64_t seed = rng_next(rng);
    pid_t pid = fork();

    if (pid == 0)
        run_reader(i, seed);
    assert_true(pid > 0);
    return pid;
}

void storm_kill(pid_t pid)
{
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void freeze(pid_t pid, struct rng *rng)
{
    assert_int_equal(kill(pid, SIGSTOP), 0);
    usleep(1000 * (1 + rng_below(rng, rng_below(rng, 4) ? 120 : 600)));
    assert_int_equal(kill(pid, SIGCONT), 0);
}

void storm_disturb(pid_t *owner, pid_t *readers, uint32_t n, bool freezes, struct rng *rng)
{
    uint32_t i = rng_below(rng, n);

    switch (rng_below(rng, freezes ? 5 : 2)) {
    case 0:
        storm_kill(*owner);
        usleep(1000 * rng_below(rng, 20));
        *owner = storm_start_owner(rng);
        return;
    case 1:
        storm_kill(readers[i]);
        readers[i] = storm_start_reader((int)i, rng);
        return;
    case 2:
        freeze(readers[i], rng);
        return;
    default:
        freeze(*owner, rng);
    }
}

void storm_let_read(uint64_t more)
{
    uint64_t from = atomic_load(&storm->reads);

    wait_until(atomic_load(&storm->reads) >= from + more);
}

static int exit_of(pid_t pid)
{
    int status = -1;

    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + status;
}

void storm_end(pid_t owner, const pid_t *readers, int n)
{
    atomic_store(&storm->stop, true);
    for (int i = 0; i < n; i++)
        assert_int_equal(exit_of(readers[i]), 0);
    assert_int_equal(exit_of(owner), 0);
    assert_int_equal(storm->pinned_at_end, 1);
}

void storm_fini(void)
{
    print_message("reads %lu right %lu shared, %lu sent (%lu by a carrier); misses %lu; "
                  "latest answer %.1f ms after its deadline\n",
                  (unsigned long)storm->reads, (unsigned long)storm->shared_right,
                  (unsigned long)storm->sent_right, (unsigned long)storm->carried_right,
                  (unsigned long)storm->misses, (double)storm->latest_ns / (double)KV_NS_PER_MS);
    assert_int_equal(storm->wrong, 0);
    assert_int_equal(storm->late_bytes, 0);
    assert_int_equal(storm->late_calls, 0);
    assert_int_equal(storm->odd_errors, 0);
    (void)unlink(storm->unix_endpoint + strlen("unix:"));
    munmap(storm, sizeof(*storm));
    storm = NULL;
}
