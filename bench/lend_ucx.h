// SPDX-License-Identifier: Apache-2.0
/**
 * Figures of UCX for lend_bench: as lend.h's tcp, over UCX_TLS=tcp unless the variable is set.
 *
 *   peer_ucx    fetch leased blocks. Yardstick: the raw pair
 *   peer_ends   agent and session; idle; an owner that freezes, and one that dies, also without UCX
 *
 * Each case runs in a process of its own: UCX has threads, which a later fork() wouldn't copy.
 */
#ifndef BENCH_LEND_UCX_H
#define BENCH_LEND_UCX_H

#include "lend.h"

#define LEND_IDLE_S 5
#define LEND_FREEZES 9
#define LEND_PATIENCE_MS 200
#define LEND_LEASE_MS 400 /* of a lease that a frozen owner grants after the reader has given up */

/* Read one batch with a deadline. Returns the blocks that are right. */
static long lend_read_until(struct lend_bench *b, uint64_t deadline_ns)
{
    struct kvbm_lease_read_opts opts = {.size = sizeof(opts),
                                        .to = b->to,
                                        .to_blocks = b->to_blocks,
                                        .n = b->of.batch,
                                        .deadline_ns = deadline_ns};
    struct kvbm_lease *lease;
    long rc = kvbm_session_lease(b->session, 1, 0, b->keys, b->of.batch, LEND_LEASE_MS, deadline_ns,
                                 &lease);

    if (rc < 0)
        return rc;
    rc = kvbm_lease_read(lease, &opts);
    kvbm_lease_release(lease);
    return rc;
}

static void *lend_hit(void *arg)
{
    const void *const *given = arg;

    usleep(5000);
    *(uint64_t *)(uintptr_t)given[2] = kv_now_ns();
    (void)kill(*(const pid_t *)given[0], *(const int *)given[1]);
    return NULL;
}

/* Send a signal to the owner amid reads. Returns nanoseconds from then, or from the deadline. */
static uint64_t lend_until_known(struct lend_bench *b, int signal, uint64_t patience_ms)
{
    uint64_t hit = 0, deadline, now;
    const void *given[3] = {&b->owner, &signal, &hit};
    pthread_t thread;

    if (pthread_create(&thread, NULL, lend_hit, given) != 0)
        bench_die("no thread", 0);
    do {
        deadline = kv_now_ns() + patience_ms * KV_NS_PER_MS;
    } while (lend_read_until(b, deadline) == (long)b->of.batch);
    now = kv_now_ns();
    pthread_join(thread, NULL);
    return now - (signal == SIGKILL ? hit : KV_MIN(deadline, now));
}

static double lend_idle_percent(const struct lend_bench *b)
{
    double before = bench_cpu_ns() + lend_cpu_of(b->owner);

    sleep(LEND_IDLE_S);
    return (bench_cpu_ns() + lend_cpu_of(b->owner) - before) / LEND_IDLE_S / 1e7 / 2;
}

static void lend_ends(struct lend_bench *b, const char *by)
{
    double late[LEND_FREEZES], late_ms, dead, idle = lend_idle_percent(b);

    for (int i = 0; i < LEND_FREEZES; i++) {
        late[i] = (double)lend_until_known(b, SIGSTOP, LEND_PATIENCE_MS) / 1e6;
        (void)kill(b->owner, SIGCONT);
        while (lend_read_until(b, lend_later()) != (long)b->of.batch) {
            if (!kvbm_session_is_open(b->session))
                bench_die("the owner has ended, which was frozen", 0);
        }
    }
    late_ms = bench_median(late, LEND_FREEZES); /* sorts them */
    dead = (double)lend_until_known(b, SIGKILL, 60000) / 1e6;
    bench_line("peer_ends",
               "'by':'%s','agent_and_session_ms':%.1f,'idle_percent_of_core':%.4f,"
               "'frozen_ms_after_deadline':%.2f,'frozen_worst_ms':%.2f,'dead_known_ms':%.2f",
               by, b->setup_ms, idle, late_ms, late[LEND_FREEZES - 1], dead);
}

static void lend_ucx_here(struct lend_case of)
{
    struct lend_bench b = {.of = of};
    struct lend_costs yard = {.gbs = {.n = 0}}, plain = yard, summed = yard;

    b.of.tcp = b.of.ucx = true;
    b.of.n_blocks = (uint32_t)(LEND_BYTES / of.block_bytes);
    lend_open(&b);
    (void)lend_pass_read(&b, true, true);
    (void)lend_pass_raw(&b);
    for (int round = 0; round < LEND_ROUNDS; round++) {
        lend_add(&yard, &b, lend_pass_raw(&b));
        lend_add(&plain, &b, lend_pass_read(&b, false, false));
        lend_add(&summed, &b, lend_pass_read(&b, false, true));
    }
    lend_print_fetch("peer_ucx", getenv("UCX_TLS"), &b, &yard, &plain, &summed);
    lend_ends(&b, getenv("UCX_TLS"));
    lend_close(&b);
}

/* Through a socket, or leases only, with the blocks in shared memory. */
static void lend_ends_of(struct lend_case of, bool tcp)
{
    struct lend_bench b = {.of = of};

    b.of.tcp = tcp;
    b.of.n_blocks = (uint32_t)(LEND_BYTES / of.block_bytes);
    lend_open(&b);
    lend_ends(&b, tcp ? "tcp, no UCX" : "shm, no UCX");
    lend_close(&b);
}

static void lend_ucx(struct lend_case of)
{
    int status = 1;
    pid_t pid;

    fflush(stdout);
    (void)setenv("UCX_TLS", "tcp", 0);
    pid = fork();
    if (pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        lend_ucx_here(of);
        fflush(stdout);
        _exit(0);
    }
    if (pid < 0 || waitpid(pid, &status, 0) != pid || WIFSIGNALED(status))
        bench_die(WIFSIGNALED(status) ? strsignal(WTERMSIG(status)) : "no process for UCX", 0);
    if (status != 0)
        exit(1); /* it has said why */
}

#endif
