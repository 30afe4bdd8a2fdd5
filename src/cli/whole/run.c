// SPDX-License-Identifier: Apache-2.0
/* The run itself: requests are routed by what the indexer answers, and the workers' answers counted. */
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <signal.h>
#include <string.h>
#include <sys/wait.h>

#include "base/core/clock.h"
#include "cli/replay/random.h"
#include "cli/whole/whole.h"

#define TICK_MS 20
#define AWAY_MS 500

static uint64_t gcd(uint64_t a, uint64_t b)
{
    while (b) {
        uint64_t rest = a % b;

        a = b;
        b = rest;
    }
    return a;
}

/*
 * Return the request of the trace that is number @number of the run: its own order in the first round,
 * and in the others an order that follows from the seed. In the trace's own order least recently used
 * tiers that are smaller than a round would find nothing.
 */
static uint64_t place(const struct kc_whole *w, uint64_t number)
{
    uint64_t n = w->opts.requests, round = number / n, step = kc_mix(w->opts.seed + round) | 1;

    if (round == 0)
        return number;
    while (gcd(step % n, n) != 1)
        step++;
    return number % n * (step % n) % n; /* n is at most 10^7: no overflow */
}

uint32_t kc_run_tokens(struct kc_whole *w, uint64_t number, struct kc_request_message *ret)
{
    uint64_t in_round = place(w, number);
    const struct kc_request *request = &w->trace.requests[in_round % w->trace.n_requests];
    uint32_t most = (uint32_t)(w->opts.max_tokens / w->plan.per_id);

    ret->number = number;
    ret->pass = in_round / w->trace.n_requests;
    ret->n = KV_MIN(request->n, most);
    memcpy(ret->ids, w->trace.ids + request->first, ret->n * sizeof(*ret->ids));
    return kc_plan_tokens(&w->plan, ret->ids, ret->n, ret->pass, w->tokens);
}

/* ---- routing ---- */

/* Ask the indexer who holds the prompt. Without an answer nobody does, for a while. */
static void ask(struct kc_whole *w, uint32_t n_tokens)
{
    struct kv_error error = {0};
    uint64_t ns = 0;
    int rc;

    memset(w->beliefs, 0, w->plan.n_workers * sizeof(*w->beliefs));
    if (kv_now_ns() < w->away_until_ns) {
        w->totals.unanswered++;
        return;
    }
    rc = kc_client_query(w->client, w->tokens, n_tokens, w->beliefs, &ns, &error);
    if (rc < 0) {
        w->totals.unanswered++;
        w->away_until_ns = kv_now_ns() + AWAY_MS * KV_NS_PER_MS;
        memset(w->beliefs, 0, w->plan.n_workers * sizeof(*w->beliefs));
        return;
    }
    w->totals.queries++;
    w->query_sum_ns += ns;
    w->query_n++;
    kc_hist_record(&w->latency, ns);
}

/* Return the cost of a request at a worker, in blocks: loading one from a lower tier counts a quarter. */
static double cost_of(const struct kc_whole *w, uint32_t worker, uint32_t n_blocks)
{
    const struct kc_belief *belief = &w->beliefs[worker];
    uint32_t longest = KV_MIN(belief->longest, n_blocks), near = KV_MIN(belief->overlap, longest);
    double backlog = (double)w->members[worker].queued_blocks;

    if (w->opts.policy == KC_ROUTE_LEAST)
        return backlog;
    return (double)(n_blocks - longest) + 0.25 * (double)(longest - near) + backlog;
}

static bool has_room(const struct kc_member *m)
{
    return m->pid > 0 && m->n_queued < KC_QUEUE;
}

/* Choose a worker that has room. Returns n_workers: none has. */
static uint32_t choose(const struct kc_whole *w, uint32_t n_blocks)
{
    uint32_t n = w->plan.n_workers, best = n;
    double least = 0;

    for (uint32_t i = 0; i < n; i++) {
        uint32_t worker = (uint32_t)((w->routed + i) % n);
        double cost = cost_of(w, worker, n_blocks);

        if (!has_room(&w->members[worker]))
            continue;
        if (w->opts.policy == KC_ROUTE_ROUND_ROBIN)
            return worker;
        if (best == n || cost < least) {
            best = worker;
            least = cost;
        }
    }
    return best;
}

static bool next_number(struct kc_whole *w, uint64_t *ret)
{
    if (w->n_again > 0) {
        *ret = w->again[--w->n_again];
        return true;
    }
    if (w->next >= w->limit)
        return false;
    *ret = w->next++;
    return true;
}

static bool anybody_has_room(const struct kc_whole *w)
{
    for (uint32_t i = 0; i < w->plan.n_workers; i++)
        if (has_room(&w->members[i]))
            return true;
    return false;
}

static void dispatch(struct kc_whole *w)
{
    uint32_t page = w->plan.shape.page_size, n_blocks, worker;
    uint64_t number;

    while (anybody_has_room(w) && next_number(w, &number)) {
        struct kc_member *m;

        w->message->kind = KC_MESSAGE_SERVE;
        n_blocks = kc_run_tokens(w, number, &w->message->serve) / page;
        ask(w, n_blocks * page);
        worker = choose(w, n_blocks);
        m = &w->members[worker];
        if (kc_message_send(m->fd, w->message) < 0) { /* it has just died: collect notices */
            w->again[w->n_again++] = number;
            return;
        }
        if (m->n_queued == 0)
            m->since_ns = kv_now_ns();
        m->queue[m->n_queued++] = number;
        m->queued_blocks += n_blocks;
        w->routed++;
    }
}

/* ---- answers ---- */

/* Add what has been counted since the last message of the same process. */
static void add_counters(struct kc_totals *t, const struct kc_done_message *d,
                         const struct kc_done_message *last)
{
    for (size_t i = 0; i < KC_N_PATHS; i++)
        t->path_bytes[i] += d->path_bytes[i] - last->path_bytes[i];
    for (size_t i = 0; i < KC_N_PHASES; i++)
        t->phase_ns[i] += d->phase_ns[i] - last->phase_ns[i];
    for (size_t i = 0; i < 3; i++) {
        t->bad[i] += d->bad[i] - last->bad[i];
        t->dropped[i] += d->dropped[i] - last->dropped[i];
    }
    t->events_dropped += d->events_dropped - last->events_dropped;
    t->cpu_ns += d->cpu_ns - last->cpu_ns;
}

static void count(struct kc_whole *w, const struct kc_done_message *d)
{
    struct kc_totals *t = &w->totals;
    uint64_t page = w->plan.shape.page_size, hit = d->n - d->from[KC_FROM_NOWHERE];
    double prefill = (double)(hit * page) / (double)w->opts.prefill;

    t->requests++;
    t->failed += d->status < 0;
    t->n_blocks += d->n;
    for (size_t i = 0; i < KC_N_SOURCES; i++)
        t->blocks[i] += d->from[i];
    t->checked += d->bytes_checked;
    if (d->rows_wrong > 0 && t->rows_wrong == 0)
        memcpy(t->wrong, d->wrong, sizeof(t->wrong));
    t->rows_wrong += d->rows_wrong;
    t->onboard_ns += d->onboard_ns;
    if (hit > d->from[KC_FROM_G1]) {
        t->loaded_tokens += (hit - d->from[KC_FROM_G1]) * page;
        t->load_ns += d->onboard_ns;
    }
    t->tokens += d->n * page;
    t->hit_tokens += hit * page;
    /* an engine that computes while it loads has its first token by whichever is done first */
    t->saved_seconds += KV_MAX(prefill - (double)d->onboard_ns / 1e9, 0.0);
    t->slow_loads += hit > 0 && prefill < (double)d->onboard_ns / 1e9;
}

static void finish_one(struct kc_whole *w, uint32_t number, const struct kc_done_message *d)
{
    struct kc_member *m = &w->members[number];

    add_counters(&w->totals, d, &m->last);
    count(w, d);
    m->last = *d;
    m->since_ns = kv_now_ns();
    m->queued_blocks -= KV_MIN(m->queued_blocks, (uint64_t)d->n);
    if (m->n_queued > 0)
        memmove(m->queue, m->queue + 1, --m->n_queued * sizeof(*m->queue));
    if (d->registered_ns)
        kc_probe_offer(w, d->number, number, d->registered_ns);
}

/* A worker has ended: start it again; others, or it, serve its requests. */
static int replace(struct kc_whole *w, uint32_t number, struct kv_error *error)
{
    struct kc_member *m = &w->members[number];

    kill(m->pid, SIGKILL);
    waitpid(m->pid, NULL, 0);
    m->pid = 0;
    close(m->fd);
    m->fd = -1;
    if (!m->killed)
        return kv_fail(error, -ECHILD, 0, "worker %u ended by itself; see its log in %s (--dir)",
                       number, w->plan.dir);
    while (m->n_queued > 0) {
        w->again[w->n_again++] = m->queue[--m->n_queued];
        w->totals.again++;
    }
    m->queued_blocks = 0;
    m->killed = false;
    return kc_crew_restart(w, number, error);
}

static int take(struct kc_whole *w, uint32_t number, struct kv_error *error)
{
    int rc = kc_message_receive(w->members[number].fd, w->message);

    if (rc < 0)
        return replace(w, number, error);
    if (w->message->kind != KC_MESSAGE_DONE)
        return kv_fail(error, -EPROTO, 0, "worker %u sent message %u", number, w->message->kind);
    finish_one(w, number, &w->message->done);
    return 0;
}

int kc_run_collect(struct kc_whole *w, int ms, struct kv_error *error)
{
    struct pollfd fds[KC_PLAN_WORKERS];
    int rc = 0;

    for (uint32_t i = 0; i < w->plan.n_workers; i++)
        fds[i] = (struct pollfd){.fd = w->members[i].fd, .events = POLLIN};
    if (poll(fds, w->plan.n_workers, ms) < 0)
        return 0; /* a signal */
    for (uint32_t i = 0; i < w->plan.n_workers && rc == 0; i++)
        if (fds[i].revents)
            rc = take(w, i, error);
    return rc;
}

static bool is_busy(const struct kc_whole *w)
{
    for (uint32_t i = 0; i < w->plan.n_workers; i++)
        if (w->members[i].n_queued > 0 || w->members[i].killed)
            return true;
    return w->n_again > 0;
}

/* True while there is something to serve. Faults for which the run was too short get another round. */
static bool goes_on(struct kc_whole *w, uint64_t end_ns)
{
    if (w->interrupted || kv_now_ns() >= end_ns)
        w->limit = w->next;
    else if (w->next >= w->limit && kc_fault_left(w))
        w->limit += w->opts.requests;
    return is_busy(w) || w->next < w->limit;
}

int kc_run(struct kc_whole *w, struct kv_error *error)
{
    uint64_t end_ns = w->start_ns + w->opts.duration_ms * KV_NS_PER_MS;
    int rc = 0;

    while (rc == 0 && goes_on(w, end_ns)) {
        w->interrupted = kc_whole_interrupted();
        if (w->interrupted) {
            w->n_again = 0;
            kc_fault_end(w); /* a worker that is frozen would never answer */
        } else {
            rc = kc_fault_tick(w, error);
        }
        dispatch(w);
        if (rc == 0)
            rc = kc_run_collect(w, TICK_MS, error);
        if (rc == 0)
            rc = kc_crew_watch(w, error);
        kc_sample_tick(w, false);
    }
    kc_fault_end(w);
    w->end_ns = kv_now_ns();
    kc_sample_tick(w, true);
    return rc;
}
