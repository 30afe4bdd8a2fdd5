// SPDX-License-Identifier: Apache-2.0
/* Read a decision log. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/xxh.h"
#include "base/json/json.h"
#include "cli/select/select.h"

/* A line as it is read. */
struct line {
    char event[16];
    double time;
    bool has_id, booked, has_worker;
    uint64_t id, model;
    struct kc_select_decision decision;
};

void kc_select_log_fini(struct kc_select_log *log)
{
    kv_buf_fini(&log->decisions);
    kv_buf_fini(&log->candidates);
    kv_buf_fini(&log->hashes);
    kv_buf_fini(&log->models);
}

static uint64_t hash_of(struct kv_str text)
{
    return kv_xxh64(text.p ? text.p : "", text.len, 0);
}

/* Read a worker's id: a number or a name. */
static uint64_t read_worker(struct kv_json *j, struct kv_buf *scratch)
{
    uint64_t number = 0;
    struct kv_str text;

    if (kv_json_peek(j) != KV_JSON_STRING)
        return kv_json_u64(j, UINT64_MAX);
    text = kv_json_str(j, scratch);
    if (!kv_json_failed(j) && kv_instance_parse(text.p, text.len, &number, NULL) < 0)
        kv_json_fail(j, -EINVAL, "no worker id");
    return number;
}

static void read_reach(struct kv_json *j, uint32_t reach[KV_N_TIERS])
{
    uint32_t most = 0;
    size_t n = 0;

    kv_json_array(j);
    while (kv_json_next_item(j)) {
        uint32_t blocks = (uint32_t)kv_json_u64(j, UINT32_MAX);

        most = KV_MAX(most, blocks); /* cumulative: kv_index.h */
        if (n < KV_N_TIERS)
            reach[n++] = most;
    }
}

static void read_candidate(struct kv_json *j, struct kv_buf *scratch, struct kc_select_log *log)
{
    struct kc_select_candidate c = {0};
    struct kv_str key;

    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        if (kv_str_eq(key, "worker_id"))
            c.holder.worker = read_worker(j, scratch);
        else if (kv_str_eq(key, "dp_rank"))
            c.holder.rank = (uint32_t)kv_json_u64(j, UINT32_MAX);
        else if (kv_str_eq(key, "reason"))
            c.fits = kv_str_eq(kv_json_str(j, scratch), "fits");
        else if (kv_str_eq(key, "waiting"))
            c.waiting = kv_json_double(j);
        else if (kv_str_eq(key, "uncovered"))
            c.uncovered = kv_json_double(j);
        else if (kv_str_eq(key, "reach"))
            read_reach(j, c.reach);
        else
            kv_json_skip(j);
    }
    kv_buf_append(&log->candidates, &c, sizeof(c));
}

static void read_choice(struct kv_json *j, struct kv_str key, struct kv_buf *scratch,
                        struct kc_select_log *log, struct line *line)
{
    struct kc_select_decision *d = &line->decision;

    if (kv_str_eq(key, "worker_id") && !kv_json_null(j)) {
        d->worker.worker = read_worker(j, scratch);
        line->has_worker = true;
    } else if (kv_str_eq(key, "dp_rank")) {
        d->worker.rank = (uint32_t)kv_json_u64(j, UINT32_MAX);
    } else if (kv_str_eq(key, "tokens")) {
        d->tokens = kv_json_u64(j, UINT64_C(1) << 40);
    } else if (kv_str_eq(key, "block_size")) {
        d->block_size = (uint32_t)kv_json_u64(j, 1 << 20);
    } else if (kv_str_eq(key, "booked")) {
        line->booked = kv_json_bool(j);
    } else if (kv_str_eq(key, "hashes")) {
        d->n_hashes = kv_json_bits64_array(j, &log->hashes);
    } else if (kv_str_eq(key, "candidates")) {
        kv_json_array(j);
        while (kv_json_next_item(j)) {
            read_candidate(j, scratch, log);
            d->n_candidates++;
        }
    } else if (!kv_str_eq(key, "worker_id")) {
        kv_json_skip(j);
    }
}

/* Read one line. Returns 0 or a negative errno. */
static int read_line(struct kv_str text, struct kv_buf *scratch, struct kc_select_log *log,
                     struct line *line)
{
    struct kv_json j;
    struct kv_str key;

    *line = (struct line){.decision = {.first = -1, .end = -1}};
    kv_json_init(&j, text.p, text.len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        if (kv_str_eq(key, "event")) {
            kv_json_copy_str(&j, scratch, line->event, sizeof(line->event));
        } else if (kv_str_eq(key, "time")) {
            line->time = kv_json_double(&j);
        } else if (kv_str_eq(key, "id")) {
            line->id = hash_of(kv_json_str(&j, scratch));
            line->has_id = true;
        } else if (kv_str_eq(key, "model_name") || kv_str_eq(key, "routing_group")) {
            line->model = line->model * 31 + hash_of(kv_json_str(&j, scratch));
        } else {
            read_choice(&j, key, scratch, log, line);
        }
    }
    return kv_json_finish(&j);
}

/* Return the number of a model, which is noted when it is new. */
static uint32_t model_of(struct kc_select_log *log, uint64_t model)
{
    size_t n = log->models.len / sizeof(model);
    const uint64_t *models = (const uint64_t *)(const void *)log->models.data;

    for (size_t i = 0; i < n; i++)
        if (models[i] == model)
            return (uint32_t)i;
    kv_buf_append(&log->models, &model, sizeof(model));
    return (uint32_t)n;
}

/* Note the time of an event at the latest decision of its id. */
static void note_event(struct kc_select_log *log, const struct line *line)
{
    struct kc_select_decision *d = (struct kc_select_decision *)(void *)log->decisions.data;

    for (size_t i = log->n; i > 0; i--) {
        if (d[i - 1].id != line->id)
            continue;
        if (strcmp(line->event, "first_token") == 0)
            d[i - 1].first = line->time;
        else if (d[i - 1].end < 0)
            d[i - 1].end = line->time;
        return;
    }
}

static void take_line(struct kc_select_log *log, struct kv_str text, struct kv_buf *scratch)
{
    const size_t candidates = log->candidates.len, hashes = log->hashes.len;
    struct line line;
    int rc = read_line(text, scratch, log, &line);
    bool decision = rc == 0 && strcmp(line.event, "decision") == 0;

    log->lines++;
    if (decision && line.booked && line.has_worker && line.has_id && line.decision.block_size) {
        line.decision.time = line.time;
        line.decision.id = line.id;
        line.decision.model = model_of(log, line.model);
        line.decision.first_candidate = candidates / sizeof(struct kc_select_candidate);
        line.decision.first_hash = hashes / sizeof(uint64_t);
        kv_buf_append(&log->decisions, &line.decision, sizeof(line.decision));
        log->n++;
        return;
    }
    log->candidates.len = candidates;
    log->hashes.len = hashes;
    if (decision)
        log->unbooked++;
    else if (rc < 0 || !line.has_id)
        log->unread++;
    else
        note_event(log, &line);
}

static int compare(const void *a, const void *b)
{
    double x = ((const struct kc_select_decision *)a)->time,
           y = ((const struct kc_select_decision *)b)->time;

    return (x > y) - (x < y);
}

/* Sort by time, which several threads' lines may miss by little, and count from the first one. */
static void set_times(struct kc_select_log *log)
{
    struct kc_select_decision *d = (struct kc_select_decision *)(void *)log->decisions.data;
    double start;

    if (!log->n)
        return;
    qsort(d, log->n, sizeof(*d), compare);
    start = d[0].time;
    for (size_t i = 0; i < log->n; i++) {
        d[i].time -= start;
        d[i].first = d[i].first < 0 ? -1 : KV_MAX(d[i].first - start, d[i].time);
        d[i].end = d[i].end < 0 ? -1 : KV_MAX(d[i].end - start, d[i].time);
    }
}

int kc_select_log_read(const char *path, struct kc_select_log *ret, struct kv_error *error)
{
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "r");
    struct kv_buf scratch = KV_BUF_INIT;
    char *text = NULL;
    size_t size = 0;
    ssize_t n;
    int rc = 0;

    *ret = (struct kc_select_log){0};
    if (!file)
        return kv_fail(error, -errno, 0, "%.200s: %s", path, strerror(errno));
    while ((n = getline(&text, &size, file)) > 0)
        take_line(ret, (struct kv_str){text, (size_t)n}, &scratch);
    if (ferror(file))
        rc = kv_fail(error, -EIO, 0, "%.200s can't be read", path);
    else if (ret->decisions.error || ret->candidates.error || ret->hashes.error)
        rc = kv_fail(error, -ENOMEM, 0, "out of memory");
    if (file != stdin)
        (void)fclose(file);
    free(text);
    kv_buf_fini(&scratch);
    if (rc == 0)
        set_times(ret);
    return rc;
}

int kc_select_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

double kc_select_log_speed(const struct kc_select_log *log)
{
    const struct kc_select_decision *d =
        (const struct kc_select_decision *)(const void *)log->decisions.data;
    const struct kc_select_candidate *c =
        (const struct kc_select_candidate *)(const void *)log->candidates.data;
    double *speeds = calloc(log->n + 1, sizeof(*speeds)), median = 0;
    size_t n = 0;

    for (size_t i = 0; speeds && i < log->n; i++)
        for (size_t k = 0; k < d[i].n_candidates && d[i].first > d[i].time; k++) {
            const struct kc_select_candidate *at = &c[d[i].first_candidate + k];

            if (at->holder.worker == d[i].worker.worker && at->holder.rank == d[i].worker.rank &&
                at->waiting + at->uncovered >= 64) /* of less, a step's overhead is most */
                speeds[n++] = (at->waiting + at->uncovered) / (d[i].first - d[i].time);
        }
    if (n) {
        qsort(speeds, n, sizeof(*speeds), kc_select_by_value);
        median = speeds[n / 2];
    }
    free(speeds);
    return median;
}
