// SPDX-License-Identifier: Apache-2.0
/* Play a decision log with a policy. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "cli/select/select.h"

#define MAX_WORKERS 65536

/* A worker of one model in the play. */
struct worker {
    struct kv_holder holder;
    uint32_t model;
    double busy_until; /* seconds: it has computed all that was sent */
    double computed;   /* tokens */
};

/* An event of the play to come: a first token or an end. */
struct due {
    double time;
    size_t decision;
    bool end;
};

struct play {
    const struct kc_select_log *log;
    const struct kc_select_decision *decisions;
    const struct kc_select_candidate *candidates;
    const struct kc_select_settings *settings;
    struct kvsel **books; /* by model */
    size_t n_models;
    struct worker *workers;
    size_t n_workers;
    struct due *due; /* a heap, the next one first */
    size_t n_due;
    double *ttft;
    double answer; /* seconds of an answer whose end isn't in the log */
    double asked, computed;
    struct kv_buf hashes, matches, avoided;
};

/* -- events to come ------------------------------------------------------------------------------ */

static void due_push(struct play *p, struct due due)
{
    size_t at = p->n_due++;

    for (; at > 0 && p->due[(at - 1) / 2].time > due.time; at = (at - 1) / 2)
        p->due[at] = p->due[(at - 1) / 2];
    p->due[at] = due;
}

static struct due due_pop(struct play *p)
{
    struct due first = p->due[0], last = p->due[--p->n_due];
    size_t at = 0;

    for (size_t child; (child = 2 * at + 1) < p->n_due; at = child) {
        child += child + 1 < p->n_due && p->due[child + 1].time < p->due[child].time;
        if (last.time <= p->due[child].time)
            break;
        p->due[at] = p->due[child];
    }
    p->due[at] = last;
    return first;
}

static uint64_t ns_of(double seconds)
{
    return (uint64_t)(seconds * 1e9);
}

/* A booking's id: the number of its decision. */
static size_t id_of(size_t decision, char ret[24])
{
    return (size_t)snprintf(ret, 24, "%zu", decision);
}

static void run_until(struct play *p, double time)
{
    char id[24];

    while (p->n_due && p->due[0].time <= time) {
        struct due due = due_pop(p);
        struct kvsel *books = p->books[p->decisions[due.decision].model];
        size_t len = id_of(due.decision, id);

        if (due.end)
            (void)kvsel_free(books, id, len, KVSEL_DONE, ns_of(due.time));
        else
            (void)kvsel_first_token(books, id, len, ns_of(due.time));
    }
}

/* -- workers --------------------------------------------------------------------------------------- */

static struct worker *worker_of(struct play *p, uint32_t model, struct kv_holder holder)
{
    struct worker *workers;

    for (size_t i = 0; i < p->n_workers; i++)
        if (p->workers[i].model == model && p->workers[i].holder.worker == holder.worker &&
            p->workers[i].holder.rank == holder.rank)
            return &p->workers[i];
    if (p->n_workers == MAX_WORKERS)
        return NULL;
    workers = realloc(p->workers, (p->n_workers + 1) * sizeof(*workers));
    if (!workers)
        return NULL;
    p->workers = workers;
    workers[p->n_workers] = (struct worker){.holder = holder, .model = model};
    return &workers[p->n_workers++];
}

static int add_workers(struct play *p)
{
    for (size_t i = 0; i < p->log->n; i++)
        for (size_t k = 0; k < p->decisions[i].n_candidates; k++) {
            struct kvsel_worker worker = KVSEL_WORKER_INIT;
            const struct kc_select_decision *d = &p->decisions[i];
            size_t known = p->n_workers;

            worker.holder = p->candidates[d->first_candidate + k].holder;
            if (!worker_of(p, d->model, worker.holder))
                return -ENOMEM;
            if (p->n_workers > known && kvsel_set_worker(p->books[d->model], &worker) < 0)
                return -ENOMEM;
        }
    return 0;
}

static int make_books(struct play *p, const char *policy)
{
    p->n_models = p->log->models.len / sizeof(uint64_t);
    p->books = calloc(p->n_models + 1, sizeof(struct kvsel *));
    if (!p->books)
        return -ENOMEM;
    for (size_t i = 0; i < p->log->n; i++) {
        const struct kc_select_decision *d = &p->decisions[i];
        struct kvsel_opts opts = KVSEL_OPTS_INIT;
        int rc;

        if (p->books[d->model])
            continue;
        opts.policy = policy;
        opts.seed = p->settings->seed;
        opts.block_size = d->block_size;
        opts.stride = KC_SELECT_STRIDE;
        opts.predict_ns =
            p->settings->predict_ms ? p->settings->predict_ms * KV_NS_PER_MS : UINT64_MAX;
        opts.expiry_ns = UINT64_MAX;
        opts.equal_speed = true;
        rc = kvsel_create(&opts, &p->books[d->model]);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* -- decisions --------------------------------------------------------------------------------------- */

/* Make the request that was logged. Those of its workers that were left out are avoided. */
static int make_request(struct play *p, const struct kc_select_decision *d,
                        struct kvsel_request *ret)
{
    const uint64_t *strided = (const uint64_t *)(const void *)p->log->hashes.data;
    const uint64_t none = 0;

    kv_buf_clear(&p->hashes);
    kv_buf_clear(&p->matches);
    kv_buf_clear(&p->avoided);
    for (size_t i = 0; i < d->n_hashes * KC_SELECT_STRIDE; i++) /* the others aren't read */
        kv_buf_append(&p->hashes,
                      (i + 1) % KC_SELECT_STRIDE ? &none
                                                 : &strided[d->first_hash + i / KC_SELECT_STRIDE],
                      sizeof(none));
    for (size_t i = 0; i < d->n_candidates; i++) {
        const struct kc_select_candidate *c = &p->candidates[d->first_candidate + i];
        struct kvi_match match = {.holder = c->holder};

        memcpy(match.reach, c->reach, sizeof(match.reach));
        if (match.reach[KV_N_TIERS - 1])
            kv_buf_append(&p->matches, &match, sizeof(match));
        if (!c->fits)
            kv_buf_append(&p->avoided, &c->holder, sizeof(c->holder));
    }
    *ret = (struct kvsel_request)KVSEL_REQUEST_INIT;
    ret->tokens = d->tokens;
    ret->hashes = (const uint64_t *)(const void *)p->hashes.data;
    ret->n_hashes = p->hashes.len / sizeof(uint64_t);
    ret->matches = (const struct kvi_match *)(const void *)p->matches.data;
    ret->n_matches = p->matches.len / sizeof(struct kvi_match);
    ret->avoided = (const struct kv_holder *)(const void *)p->avoided.data;
    ret->n_avoided = p->avoided.len / sizeof(struct kv_holder);
    return p->hashes.error || p->matches.error || p->avoided.error ? -ENOMEM : 0;
}

/* Let the chosen worker compute the prompt, and note what is to come. */
static int compute(struct play *p, size_t number, const struct kvsel_choice *choice)
{
    const struct kc_select_decision *d = &p->decisions[number];
    struct worker *w = worker_of(p, d->model, choice->worker);
    double first;

    if (!w)
        return -ENOMEM;
    first = KV_MAX(w->busy_until, d->time) + (double)choice->uncovered / p->settings->speed;
    w->busy_until = first;
    w->computed += (double)choice->uncovered;
    p->asked += (double)d->tokens;
    p->computed += (double)choice->uncovered;
    p->ttft[number] = first - d->time;
    due_push(p, (struct due){first, number, false});
    due_push(p, (struct due){
                    first + (d->first >= 0 && d->end >= d->first ? d->end - d->first : p->answer),
                    number, true});
    return 0;
}

static int decide(struct play *p, size_t number, bool logged, struct kc_select_result *ret)
{
    const struct kc_select_decision *d = &p->decisions[number];
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct kvsel_request request;
    char id[24];
    int rc;

    run_until(p, d->time);
    rc = make_request(p, d, &request);
    if (rc == 0 && logged)
        rc = kvsel_reckon(p->books[d->model], &request, d->worker, ns_of(d->time), &choice);
    else if (rc == 0)
        rc = kvsel_select(p->books[d->model], &request, ns_of(d->time), &choice);
    if (rc == 0)
        rc = kvsel_book(p->books[d->model], id, id_of(number, id), &request, &choice,
                        ns_of(d->time));
    if (rc == 0)
        rc = compute(p, number, &choice);
    ret->same +=
        rc == 0 && choice.worker.worker == d->worker.worker && choice.worker.rank == d->worker.rank;
    return rc;
}

/* -- figures ------------------------------------------------------------------------------------------ */

/* Return the median duration of the log's answers; 0: none has both ends. */
static double median_answer(const struct play *p, double *scratch)
{
    size_t n = 0;

    for (size_t i = 0; i < p->log->n; i++)
        if (p->decisions[i].first >= 0 && p->decisions[i].end >= p->decisions[i].first)
            scratch[n++] = p->decisions[i].end - p->decisions[i].first;
    qsort(scratch, n, sizeof(*scratch), kc_select_by_value);
    return n ? scratch[n / 2] : 0;
}

static void sum_up(struct play *p, struct kc_select_result *ret)
{
    double total = 0, most = 0;

    for (size_t i = 0; i < p->log->n; i++)
        total += p->ttft[i];
    qsort(p->ttft, p->log->n, sizeof(*p->ttft), kc_select_by_value);
    ret->n = p->log->n;
    ret->mean_ttft = total / (double)p->log->n;
    ret->p99_ttft = p->ttft[(size_t)((double)(p->log->n - 1) * 0.99)];
    ret->computed = p->asked > 0 ? p->computed / p->asked : 0;
    total = 0;
    for (size_t i = 0; i < p->n_workers; i++) {
        total += p->workers[i].computed;
        most = KV_MAX(most, p->workers[i].computed);
    }
    ret->imbalance = total > 0 ? most * (double)p->n_workers / total : 1;
}

static void play_fini(struct play *p)
{
    for (size_t i = 0; p->books && i < p->n_models; i++)
        kvsel_destroy(p->books[i]);
    free(p->books);
    free(p->workers);
    free(p->due);
    free(p->ttft);
    kv_buf_fini(&p->hashes);
    kv_buf_fini(&p->matches);
    kv_buf_fini(&p->avoided);
}

int kc_select_play(const struct kc_select_log *log, const char *policy,
                   const struct kc_select_settings *settings, struct kc_select_result *ret)
{
    struct play p = {
        .log = log,
        .decisions = (const struct kc_select_decision *)(const void *)log->decisions.data,
        .candidates = (const struct kc_select_candidate *)(const void *)log->candidates.data,
        .settings = settings,
    };
    int rc = -ENOMEM;

    *ret = (struct kc_select_result){0};
    if (!log->n)
        return -ENODATA;
    p.due = calloc(2 * log->n, sizeof(*p.due));
    p.ttft = calloc(log->n, sizeof(*p.ttft));
    if (p.due && p.ttft) {
        p.answer = median_answer(&p, p.ttft);
        rc = make_books(&p, policy);
    }
    if (rc == 0)
        rc = add_workers(&p);
    for (size_t i = 0; i < log->n && rc == 0; i++)
        rc = decide(&p, i, policy == NULL, ret);
    if (rc == 0)
        sum_up(&p, ret);
    play_fini(&p);
    return rc;
}
