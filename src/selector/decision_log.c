// SPDX-License-Identifier: Apache-2.0
#include "selector/decision_log.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/xxh.h"

struct ksel_log {
    char *path;
    uint64_t sample;
    pthread_mutex_t lock; /* guards fd, torn */
    int fd;
    bool torn; /* the file ends within a line */
    _Atomic uint64_t dropped;
};

static int open_file(const char *path, struct kv_error *error)
{
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0640);

    return fd < 0 ? kv_fail(error, -errno, 0, "--decision-log: %.120s: %s", path, strerror(errno))
                  : fd;
}

int ksel_log_open(const char *path, uint64_t sample, struct ksel_log **ret, struct kv_error *error)
{
    struct ksel_log *log = calloc(1, sizeof(*log));

    if (!log)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    log->sample = sample;
    log->fd = open_file(path, error);
    log->path = strdup(path);
    pthread_mutex_init(&log->lock, NULL);
    if (log->fd < 0 || !log->path) {
        int rc = log->fd < 0 ? log->fd : kv_fail(error, -ENOMEM, 0, "out of memory");

        ksel_log_close(log);
        return rc;
    }
    *ret = log;
    return 0;
}

void ksel_log_close(struct ksel_log *log)
{
    if (!log)
        return;
    if (log->fd >= 0)
        close(log->fd);
    pthread_mutex_destroy(&log->lock);
    free(log->path);
    free(log);
}

int ksel_log_reopen(struct ksel_log *log, struct kv_error *error)
{
    int fd = open_file(log->path, error);

    if (fd < 0)
        return fd;
    pthread_mutex_lock(&log->lock);
    close(log->fd);
    log->fd = fd;
    log->torn = false;
    pthread_mutex_unlock(&log->lock);
    return 0;
}

uint64_t ksel_log_dropped(const struct ksel_log *log)
{
    return atomic_load_explicit(&log->dropped, memory_order_relaxed);
}

bool ksel_log_wants(const struct ksel_log *log, const char *id, size_t len)
{
    if (!log || log->sample == 1)
        return log;
    return kv_xxh64(id, len, 0) % log->sample == 0;
}

/* Take back the first @n bytes of a line, of which the rest found no room. Where that can't be, the next line ends it. */
static void take_back(struct ksel_log *log, size_t n)
{
    struct stat st;

    log->torn = fstat(log->fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size < (off_t)n ||
                ftruncate(log->fd, st.st_size - (off_t)n) < 0;
}

/* Append a line with one write, which no other line divides. Returns whether all of it was written. */
static bool append(struct ksel_log *log, const struct kv_buf *line)
{
    struct iovec parts[] = {{"\n", log->torn}, {line->data, line->len}};
    size_t before = parts[0].iov_len;
    ssize_t n = writev(log->fd, parts, KV_COUNT(parts));

    if (n == (ssize_t)(before + line->len)) {
        log->torn = false;
        return true;
    }
    if (n > (ssize_t)before)
        take_back(log, (size_t)n - before);
    else if (n > 0)
        log->torn = false;
    return false;
}

static void put(struct ksel_log *log, struct kv_buf *line)
{
    bool written = false;

    kv_buf_putc(line, '\n');
    if (!line->error) {
        pthread_mutex_lock(&log->lock);
        written = append(log, line);
        pthread_mutex_unlock(&log->lock);
    }
    if (!written)
        atomic_fetch_add_explicit(&log->dropped, 1, memory_order_relaxed);
    kv_buf_fini(line);
}

static void begin(struct kv_json_writer *w, struct kv_buf *line, const char *event, const char *id,
                  size_t len)
{
    char time[32];
    int n;

    kv_json_writer_init(w, line);
    kv_json_begin_object(w);
    kv_json_member_str(w, "event", event);
    n = snprintf(time, sizeof(time), "%.6f", (double)kv_wall_ns() / 1e9);
    kv_json_key(w, "time");
    kv_json_put_raw(w, time, (size_t)n);
    kv_json_key(w, "id");
    kv_json_put_strn(w, id, len);
}

void ksel_log_event(struct ksel_log *log, const char *event, const char *id, size_t len)
{
    struct kv_buf line = KV_BUF_INIT;
    struct kv_json_writer w;

    if (!ksel_log_wants(log, id, len))
        return;
    begin(&w, &line, event, id, len);
    kv_json_end_object(&w);
    put(log, &line);
}

/* -- a decision -------------------------------------------------------------------------------- */

/* Write a cost with the digits that a reader wants. */
static void member_term(struct kv_json_writer *w, const char *key, double value)
{
    kv_json_member_double(w, key, isfinite(value) ? round(value * 1000) / 1000 : value);
}

static void write_reach(const struct kvsel_request *r, struct kv_holder holder,
                        struct kv_json_writer *w)
{
    for (size_t i = 0; i < r->n_matches; i++) {
        const struct kvi_match *m = &r->matches[i];

        if (m->holder.worker != holder.worker || m->holder.rank != holder.rank)
            continue;
        kv_json_key(w, "reach");
        kv_json_begin_array(w);
        for (int t = 0; t < KV_N_TIERS; t++)
            kv_json_put_u64(w, m->reach[t]);
        kv_json_end_array(w);
        return;
    }
}

static void write_candidate(const struct ksel_decision *d, const struct kvsel_candidate *c,
                            struct kv_json_writer *w)
{
    kv_json_begin_object(w);
    kv_json_key(w, "worker_id");
    d->put_worker(d->arg, w, c->holder.worker);
    kv_json_member_u64(w, "dp_rank", c->holder.rank);
    kv_json_member_str(w, "reason", kvsel_reason_name(c->reason));
    if (c->reason == KVSEL_FITS)
        member_term(w, "cost", c->cost);
    member_term(w, "uncovered", c->uncovered);
    member_term(w, "waiting", c->waiting);
    member_term(w, "context", c->context);
    kv_json_member_u64(w, "requests", (uint64_t)c->requests);
    kv_json_member_u64(w, "queued", c->queued);
    kv_json_member_u64(w, "blocks", (uint64_t)c->blocks);
    member_term(w, "factor", c->factor);
    member_term(w, "extra", c->extra);
    kv_json_member_u64(w, "held", c->held);
    kv_json_member_u64(w, "predicted", c->predicted);
    write_reach(d->request, c->holder, w);
    kv_json_end_object(w);
}

void ksel_decision_write(const struct ksel_decision *d, struct kv_json_writer *w)
{
    kv_json_member_str(w, "policy", d->choice->policy ? d->choice->policy : "");
    kv_json_key(w, "worker_id");
    if (!d->choice->candidates) {
        kv_json_put_null(w);
    } else {
        d->put_worker(d->arg, w, d->choice->worker.worker);
        kv_json_member_u64(w, "dp_rank", d->choice->worker.rank);
        kv_json_member_str(w, "why", kvsel_why_name(d->choice->why));
        member_term(w, "cost", d->choice->cost);
        kv_json_member_u64(w, "uncovered", d->choice->uncovered);
    }
    kv_json_key(w, "candidates");
    kv_json_begin_array(w);
    for (size_t i = 0; i < d->n_candidates; i++)
        write_candidate(d, &d->candidates[i], w);
    kv_json_end_array(w);
}

void ksel_log_decision(struct ksel_log *log, const struct ksel_decision *d)
{
    struct kv_buf line = KV_BUF_INIT;
    struct kv_json_writer w;

    begin(&w, &line, "decision", d->id, d->id_len);
    kv_json_member_str(&w, "model_name", d->model);
    kv_json_member_str(&w, "routing_group", d->group);
    kv_json_member_u64(&w, "block_size", d->block_size);
    kv_json_member_u64(&w, "tokens", d->request->tokens);
    kv_json_member_bool(&w, "booked", d->booked);
    if (d->request->lora)
        kv_json_member_str(&w, "lora_name", d->request->lora);
    kv_json_key(&w, "hashes");
    kv_json_begin_array(&w);
    for (size_t i = KSEL_LOG_STRIDE - 1; i < d->request->n_hashes; i += KSEL_LOG_STRIDE)
        kv_json_put_u64(&w, d->request->hashes[i]);
    kv_json_end_array(&w);
    ksel_decision_write(d, &w);
    kv_json_end_object(&w);
    put(log, &line);
}
