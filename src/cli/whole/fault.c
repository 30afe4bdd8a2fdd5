// SPDX-License-Identifier: Apache-2.0
/*
 * Faults while the run goes on, evenly spaced: each of the kinds that the options name, then from the
 * first again, `times` times.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "base/core/clock.h"
#include "cli/whole/whole.h"

const char *const kc_fault_names[KC_N_FAULTS] = {
    [KC_FAULT_KILL_WORKER] = "kill worker",     [KC_FAULT_KILL_INDEXER] = "kill indexer",
    [KC_FAULT_KILL_STORE] = "kill store",       [KC_FAULT_KILL_NATS] = "kill nats",
    [KC_FAULT_FREEZE_WORKER] = "freeze worker", [KC_FAULT_FREEZE_INDEXER] = "freeze indexer",
    [KC_FAULT_FULL_DISK] = "full disk",
};

/* Largest file, in bytes, while the disk is "full" without a file system of the run's own. */
#define FULL_BYTES 65536

static uint32_t victim(const struct kc_whole *w)
{
    return w->n_faults_done % w->plan.n_workers;
}

static void set_full(struct kc_whole *w, bool full)
{
    const struct rlimit limit = {full ? FULL_BYTES : RLIM_INFINITY, RLIM_INFINITY};
    bool filled = kc_small_disk_fill(w, full);

    for (uint32_t i = 0; i < w->plan.n_workers && !filled; i++)
        if (w->members[i].pid > 0)
            prlimit(w->members[i].pid, RLIMIT_FSIZE, &limit, NULL);
    w->disk_full = full;
    w->thaw_ns = kv_now_ns() + w->opts.freeze_ms * KV_NS_PER_MS;
}

static void freeze(struct kc_whole *w, pid_t pid)
{
    kill(pid, SIGSTOP);
    w->frozen = pid;
    w->thaw_ns = kv_now_ns() + w->opts.freeze_ms * KV_NS_PER_MS;
}

static int kill_indexer(struct kc_whole *w, struct kv_error *error)
{
    kill(kc_child_pid(w->child), SIGKILL);
    kc_child_stop(w->child);
    w->child = NULL;
    return kc_crew_start_indexer(w, error);
}

static int kill_server(struct kc_whole *w, struct kc_server *server, struct kv_error *error)
{
    kc_server_stop(server);
    return kc_server_run(server, w->plan.dir, error);
}

static int inject(struct kc_whole *w, enum kc_fault fault, struct kv_error *error)
{
    w->faults_injected[fault]++;
    switch (fault) {
    case KC_FAULT_KILL_WORKER: /* its socket's end tells the director */
        w->members[victim(w)].killed = true;
        kill(w->members[victim(w)].pid, SIGKILL);
        return 0;
    case KC_FAULT_FREEZE_WORKER:
        freeze(w, w->members[victim(w)].pid);
        return 0;
    case KC_FAULT_FREEZE_INDEXER:
        freeze(w, kc_child_pid(w->child));
        return 0;
    case KC_FAULT_FULL_DISK:
        set_full(w, true);
        return 0;
    case KC_FAULT_KILL_INDEXER:
        return kill_indexer(w, error);
    case KC_FAULT_KILL_STORE:
        return kill_server(w, &w->redis, error);
    default:
        return kill_server(w, &w->nats, error);
    }
}

/* Return the fault whose turn it is. */
static enum kc_fault nth(uint32_t faults, uint32_t n)
{
    uint32_t at = n % (uint32_t)__builtin_popcount(faults);

    for (uint32_t i = 0; i < KC_N_FAULTS; i++)
        if (faults >> i & 1 && at-- == 0)
            return (enum kc_fault)i;
    return KC_FAULT_KILL_WORKER;
}

void kc_fault_end(struct kc_whole *w)
{
    if (w->frozen > 0)
        kill(w->frozen, SIGCONT);
    if (w->disk_full)
        set_full(w, false);
    w->frozen = 0;
}

/* True when the run has come as far as the next fault: by requests, or by time, if that is further. */
static bool is_due(const struct kc_whole *w, uint64_t n)
{
    double share = (double)(w->n_faults_done + 1) / (double)(n + 1);
    double by_count = w->limit == UINT64_MAX ? 0 : (double)w->totals.requests / (double)w->limit;
    double by_time =
        (double)(kv_now_ns() - w->start_ns) / ((double)w->opts.duration_ms * (double)KV_NS_PER_MS);

    return KV_MAX(by_count, by_time) >= share;
}

static uint64_t n_faults(const struct kc_whole *w)
{
    return (uint64_t)__builtin_popcount(w->opts.faults) * w->opts.times;
}

bool kc_fault_left(const struct kc_whole *w)
{
    return w->n_faults_done < n_faults(w);
}

int kc_fault_tick(struct kc_whole *w, struct kv_error *error)
{
    uint64_t n = n_faults(w);

    if ((w->frozen > 0 || w->disk_full) && kv_now_ns() >= w->thaw_ns)
        kc_fault_end(w);
    if (w->n_faults_done >= n || w->frozen > 0 || w->disk_full || !is_due(w, n))
        return 0;
    return inject(w, nth(w->opts.faults, w->n_faults_done++), error);
}
