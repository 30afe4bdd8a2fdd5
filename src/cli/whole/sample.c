// SPDX-License-Identifier: Apache-2.0
/* Figures over time: for the plots, and for the line of progress. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/show/bar.h"
#include "cli/show/format.h"
#include "cli/whole/whole.h"

static uint64_t resident(pid_t pid)
{
    char path[48];
    unsigned long pages = 0;
    FILE *file;

    snprintf(path, sizeof(path), "/proc/%d/statm", (int)pid);
    file = pid > 0 ? fopen(path, "re") : NULL;
    if (!file)
        return 0;
    if (fscanf(file, "%*u %lu", &pages) != 1) // NOLINT(cert-err34-c)
        pages = 0;
    fclose(file);
    return pages * (uint64_t)sysconf(_SC_PAGESIZE);
}

static double mean(uint64_t sum, uint64_t n, double unit)
{
    return n ? (double)sum / (double)n / unit : -1;
}

static void take(struct kc_whole *w, struct kc_sample *s)
{
    const struct kc_totals *t = &w->totals;

    *s = (struct kc_sample){.seconds = (double)(kv_now_ns() - w->start_ns) / 1e9,
                            .requests = t->requests,
                            .checked = t->checked,
                            .saved_seconds = t->saved_seconds};
    memcpy(s->blocks, t->blocks, sizeof(s->blocks));
    memcpy(s->path_bytes, t->path_bytes, sizeof(s->path_bytes));
    s->lag_ms = mean(atomic_exchange(&w->lag_sum_ns, 0), atomic_exchange(&w->lag_n, 0), 1e6);
    s->query_us = mean(w->query_sum_ns, w->query_n, 1e3);
    w->query_sum_ns = w->query_n = 0;
    for (uint32_t i = 0; i < w->plan.n_workers; i++)
        s->worker_bytes += resident(w->members[i].pid);
    s->indexer_bytes = resident(kc_child_pid(w->child));
}

/* Keep every second sample: the plots stay as fine as a screen can show. */
static void thin_out(struct kc_whole *w)
{
    for (size_t i = 1; 2 * i < w->n_samples; i++)
        w->samples[i] = w->samples[2 * i];
    w->n_samples = (w->n_samples + 1) / 2;
    w->sample_every_ns *= 2;
}

void kc_sample_tick(struct kc_whole *w, bool last)
{
    uint64_t now = kv_now_ns();

    if (!w->opts.quiet)
        kc_sample_show(w, last);
    if (!last && now < w->next_sample_ns)
        return;
    if (w->n_samples == w->sample_capacity)
        thin_out(w);
    take(w, &w->samples[w->n_samples++]);
    w->next_sample_ns = now + w->sample_every_ns;
}

/* ---- progress ---- */

static double share(const struct kc_totals *t, enum kc_source source)
{
    return t->n_blocks ? 100.0 * (double)t->blocks[source] / (double)t->n_blocks : 0;
}

static void draw(const struct kc_whole *w, double seconds)
{
    const struct kc_totals *t = &w->totals;
    double by_time = seconds * 1000 / (double)w->opts.duration_ms;
    double by_count = w->limit == UINT64_MAX ? 0 : (double)t->requests / (double)w->limit;
    double done = KV_MIN(KV_MAX(by_time, by_count), 1.0);

    fprintf(
        stderr,
        "%s %3.0f %%  %s req  %s checked, %s/s  G1 %.0f G2 %.0f G3 %.0f peers %.0f G4 %.0f %%",
        kc_bar_text(done).s, done * 100, kc_count(t->requests).s, kc_bytes((double)t->checked).s,
        kc_bytes((double)t->checked / (seconds > 0 ? seconds : 1)).s, share(t, KC_FROM_G1),
        share(t, KC_FROM_G2), share(t, KC_FROM_G3), share(t, KC_FROM_PEER), share(t, KC_FROM_G4));
    if (t->rows_wrong)
        fprintf(stderr, "  %s rows WRONG", kc_count(t->rows_wrong).s);
}

void kc_sample_show(struct kc_whole *w, bool final)
{
    static uint64_t next_ns; /* only one thread draws */

    if (final) {
        kc_bar_clear();
        return;
    }
    if (!kc_bar_is_due(&next_ns))
        return;
    kc_bar_begin();
    draw(w, (double)(kv_now_ns() - w->start_ns) / 1e9);
    kc_bar_end();
}

/* ---- the machine's own rate ---- */

#define COPY_BYTES ((size_t)64 << 20)
#define COPY_ROUNDS 4

static void *copy(void *arg)
{
    char *from = malloc(COPY_BYTES), *to = malloc(COPY_BYTES);
    double *rate = arg;
    uint64_t begun;

    if (from && to) {
        memset(from, 1, COPY_BYTES);
        memset(to, 2, COPY_BYTES);
        begun = kv_now_ns();
        for (int i = 0; i < COPY_ROUNDS; i++) {
            memcpy(to, from, COPY_BYTES);
            __asm__ volatile("" : : "r"(to) : "memory"); /* no copy is left out */
        }
        *rate = 2.0 * COPY_ROUNDS * (double)COPY_BYTES / ((double)(kv_now_ns() - begun) / 1e9);
    }
    free(from);
    free(to);
    return NULL;
}

double kc_memory_rate(void)
{
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    pthread_t threads[16];
    double rates[16] = {0}, sum = 0;
    long n = 0, most = KV_MIN(cores, 16l);

    while (n < most && pthread_create(&threads[n], NULL, copy, &rates[n]) == 0)
        n++;
    for (long i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        sum += rates[i];
    }
    return sum;
}
