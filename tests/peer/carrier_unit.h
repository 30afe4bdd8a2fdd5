// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the tests of carriers: reads that compare every byte, owners in processes of their own,
 * and the lines of the log. Before the header: CARRIER, the option and field (ucx), and
 * CARRIER_REQUIRED, its value.
 */
#ifndef KV_TEST_CARRIER_UNIT_H
#define KV_TEST_CARRIER_UNIT_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/core/log.h"
#include "lend_unit.h"
#include "peer/lease/lease_wire.h"
#include "support.h"

#define KIB64 512  /* inner_dim of blocks of 64 KiB */
#define MIB2 16384 /* of 2 MiB */
#define MAX_READ 16u
#define LEASE_MS 2000 /* also of leases that a thawed owner grants to calls that were given up */

static const char *self; /* beside which the library is looked for */

/* Blocks of 128 * @inner bytes: 64 of 64 KiB, or 16 of 2 MiB. */
static inline struct kvbm_layout_config config_of(enum kvbm_layout_kind kind, uint32_t inner)
{
    struct kvbm_layout_config config = small_config();

    config.kind = kind;
    config.num_blocks = inner == KIB64 ? N_BLOCKS : MAX_READ;
    config.page_size = 16;
    config.inner_dim = inner;
    return config;
}

static inline struct kvbm_agent_opts carried_opts(const char *name, const char *const *endpoint)
{
    struct kvbm_agent_opts opts = session_opts(name, endpoint);

    opts.CARRIER = CARRIER_REQUIRED;
    return opts;
}

static inline struct kvbm_agent *carried_agent(const char *name, const char *endpoint)
{
    struct kvbm_agent_opts opts = carried_opts(name, &endpoint);

    return agent_of(&opts);
}

static inline void lend_carried(struct lending *l, const char *name,
                                struct kvbm_layout_config config)
{
    const char *endpoint = "tcp:127.0.0.1:0";
    struct kvbm_agent_opts opts = carried_opts(name, &endpoint);

    lend_init_with(l, &opts, config, false);
}

static inline uint64_t pushes_of(const struct lending *l)
{
    struct kvbm_lender_stats stats;

    kvbm_lender_get_stats(l->agent->lender, &stats);
    return stats.pushes;
}

static inline bool is_carried(struct kvbm_session *session)
{
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;

    assert_int_equal(kvbm_session_get_info(session, &info), 0);
    return info.CARRIER;
}

/** A read of keys @first, first + 7 ... into the blocks of @to from the last on. */
struct reading {
    struct kvbm_session *session;
    struct kvbm_layout *to;
    uint64_t first;
    uint32_t n;
    uint64_t deadline_ns;
    bool no_checksums;
    uint8_t ok[(MAX_READ + 7) / 8];
};

static inline uint64_t key_of(const struct reading *r, uint32_t i)
{
    return 1 + (r->first + i * 7) % r->to->config.num_blocks;
}

static inline uint32_t block_of(const struct reading *r, uint32_t i)
{
    return (uint32_t)r->to->config.num_blocks - 1 - i;
}

/* Lease and read. Returns what kvbm_lease_read does, or the error of the lease. */
static inline long read_keys(struct reading *r)
{
    struct kvbm_lease_read_opts opts = {.size = sizeof(opts),
                                        .to = r->to,
                                        .n = r->n,
                                        .deadline_ns = r->deadline_ns,
                                        .ok = r->ok,
                                        .no_checksums = r->no_checksums};
    uint64_t keys[MAX_READ];
    uint32_t blocks[MAX_READ];
    struct kvbm_lease *lease;
    long rc;

    memset(r->ok, 0, sizeof(r->ok));
    for (uint32_t i = 0; i < r->n; i++) {
        keys[i] = key_of(r, i);
        blocks[i] = block_of(r, i);
    }
    opts.to_blocks = blocks;
    rc = kvbm_session_lease(r->session, 1, 0, keys, r->n, LEASE_MS, r->deadline_ns, &lease);
    if (rc < 0)
        return rc;
    rc = kvbm_lease_read(lease, &opts);
    kvbm_lease_release(lease);
    return rc;
}

/* Read behind a read that was given up: its blocks may be leased until the owner has noticed. */
static inline long read_at_last(struct reading *r)
{
    long rc;

    do {
        r->deadline_ns = soon();
        rc = read_keys(r);
    } while (rc == -ENOSPC);
    return rc;
}

/* Count the blocks that a read calls right; each must be. */
static inline uint32_t right_blocks(const struct reading *r)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < r->n; i++) {
        if (!(r->ok[i / 8] >> i % 8 & 1))
            continue;
        n++;
        assert_true(lend_holds(r->to, block_of(r, i), key_of(r, i)));
    }
    return n;
}

static inline void *memory_of_layout(const struct kvbm_layout *layout, size_t *len)
{
    struct kvbm_view first, last;

    assert_int_equal(layout->n, 1);
    assert_int_equal(kvbm_layout_block(layout, 0, &first), 0);
    assert_int_equal(kvbm_layout_block(layout, (uint32_t)layout->config.num_blocks - 1, &last), 0);
    *len = last.addr + last.len - first.addr;
    return (void *)(uintptr_t)first.addr;
}

/**
 * Open a session over which a read's blocks have come by the carrier. On a machine with other work the
 * first ones may take longer than a new connection is given; another session asks anew.
 */
static inline void open_carried(struct kvbm_agent *agent, const char *endpoint, struct reading *r)
{
    for (uint64_t end = soon();;) {
        assert_int_equal(open_with(agent, endpoint, 0, NULL, &r->session), 0);
        r->deadline_ns = soon();
        assert_int_equal(read_keys(r), r->n);
        assert_int_equal(right_blocks(r), r->n);
        if (is_carried(r->session))
            return;
        assert_true(kv_now_ns() < end);
        assert_int_equal(kvbm_session_close(r->session), 0);
    }
}

/* ---- owners that die or freeze ---- */

/* Lend blocks of 2 MiB, as a program of its own: @to gets the endpoint. */
static inline _Noreturn void owner_main(int to)
{
    char endpoint[128] = "";
    struct lending l;

    (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
    (void)setenv("CMOCKA_TEST_ABORT", "1", 1);
    lend_carried(&l, "owner", config_of(KVBM_FULLY_CONTIGUOUS, MIB2));
    assert_true(kvbm_agent_endpoint(l.agent, 0, endpoint, sizeof(endpoint), NULL) > 0);
    assert_int_equal(write(to, endpoint, sizeof(endpoint)), sizeof(endpoint));
    for (;;)
        pause();
}

/* Start an owner. By exec, since carriers in this process have threads, which fork() doesn't copy. */
static inline pid_t start_owner(char endpoint[128])
{
    char number[16];
    int pipes[2];
    pid_t pid;

    assert_int_equal(pipe(pipes), 0);
    snprintf(number, sizeof(number), "%d", pipes[1]);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        (void)execl("/proc/self/exe", self, "owner", number, NULL);
        _exit(127);
    }
    close(pipes[1]);
    assert_int_equal(read(pipes[0], endpoint, 128), 128);
    close(pipes[0]);
    return pid;
}

struct watched {
    struct kvbm_agent *agent;
    struct reading r;
    pid_t owner;
    uint8_t *memory;
    size_t len;
    int signal; /* that a thread sends to the owner */
    unsigned rounds;
    uint64_t hit_ns;
};

static inline void watch_init(struct watched *w)
{
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, MIB2);
    char endpoint[128];

    memset(w, 0, sizeof(*w));
    w->owner = start_owner(endpoint);
    w->agent = carried_agent("reader", NULL);
    w->r.n = 4;
    w->r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    w->memory = memory_of_layout(w->r.to, &w->len);
    open_carried(w->agent, endpoint, &w->r);
}

static inline void watch_fini(struct watched *w)
{
    if (w->owner) {
        assert_int_equal(kill(w->owner, SIGKILL), 0);
        assert_int_equal(waitpid(w->owner, NULL, 0), w->owner);
    }
    assert_int_equal(kvbm_session_close(w->r.session), 0);
    assert_int_equal(kvbm_agent_destroy(w->agent), 0);
    kvbm_layout_destroy(w->r.to);
}

static inline bool is_poisoned(const struct watched *w)
{
    for (size_t i = 0; i < w->len; i++) {
        if (w->memory[i] != 0x5a)
            return false;
    }
    return true;
}

/* Send @signal to the owner in the midst of reads. */
static inline void *hit_later(void *arg)
{
    struct watched *w = arg;

    usleep(3000 + w->rounds++ % 4 * 700);
    w->hit_ns = kv_now_ns();
    (void)kill(w->owner, w->signal);
    return NULL;
}

/* ---- lines of the log ---- */

static char lines[4096];
static pthread_mutex_t lines_lock = PTHREAD_MUTEX_INITIALIZER; /* both agents' threads log */

static inline void keep_line(void *arg, int level, const char *text)
{
    size_t used;

    (void)arg, (void)level;
    pthread_mutex_lock(&lines_lock);
    used = strlen(lines);
    snprintf(lines + used, sizeof(lines) - used, "%s\n", text);
    pthread_mutex_unlock(&lines_lock);
}

static inline unsigned lines_with(const char *words)
{
    unsigned n = 0;

    pthread_mutex_lock(&lines_lock);
    for (const char *at = lines; (at = strstr(at, words)); at++)
        n++;
    pthread_mutex_unlock(&lines_lock);
    return n;
}

/* Read from @l as an agent of @opts: through the session, whatever both sides wanted. */
static inline void reads_by_session(struct lending *l, const struct kvbm_agent_opts *opts)
{
    const struct kvbm_layout_config config = config_of(KVBM_FULLY_CONTIGUOUS, KIB64);
    struct kvbm_agent *agent = agent_of(opts);
    struct reading r = {.n = 16};

    r.to = allocate(&config, KVBM_STORAGE_SYSTEM);
    r.session = open_session(agent, l->agent, 0);
    for (r.first = 0; r.first < 2; r.first++) {
        r.deadline_ns = soon();
        assert_int_equal(read_keys(&r), 16);
        assert_int_equal(right_blocks(&r), 16);
    }
    assert_false(is_carried(r.session));
    assert_int_equal(kvbm_session_close(r.session), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    kvbm_layout_destroy(r.to);
}

/* Prepare a test that needs libkvbm_ucx. Returns false, with a line, where @has tells that there is none. */
static inline bool begin_with_ucx(bool has)
{
#ifdef __SANITIZE_THREAD__
    /* UCX's hooks of mmap and the sanitizer's overwrite each other */
    setenv("UCX_MEM_EVENTS", "no", 0);
#endif
    kv_log_set_user(keep_line, NULL);
    if (!has)
        printf("skipped: this build has no libkvbm_ucx (libucx-dev)\n");
    return has;
}

#endif
