// SPDX-License-Identifier: Apache-2.0
/*
 * A registry is a list of families. A family keeps its series in the order of their first use, and
 * in a hash table over their label values. Series are freed only with the registry; a reset puts
 * them aside for other labels. So pointers to series stay valid, updates need no lock, and memory
 * is bounded by the largest number of series at one time. Counters and histogram buckets are
 * relaxed atomic adds: sums that are only displayed need no order. The lock guards lists and
 * labels.
 */
#include "base/metrics/metrics.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>

#include "base/core/xxh.h"
#include "base/metrics/metric_text.h"

#define TABLE_SIZE 256 /* chains of 16 at KV_METRIC_MAX_SERIES */

struct kv_series {
    struct kv_series *next;  /* in order of first use, or in the list of spare ones */
    struct kv_series *chain; /* next series in the same bucket of the table */
    char *labels[KV_METRIC_MAX_LABELS];
    const struct kv_metric_def *def;
    _Atomic uint64_t count;     /* counters */
    _Atomic uint64_t bits;      /* a double: a gauge's value, a histogram's sum */
    _Atomic uint64_t buckets[]; /* histograms: one more than the bounds; not cumulative */
};

struct kv_metric {
    struct kv_metric *next;
    struct kv_metrics *owner;
    const struct kv_metric_def *def;
    struct kv_series *first, **last;
    struct kv_series *spare; /* series that a reset has put aside */
    /* Receives updates beyond the limit. Made with the family, so that it always exists. */
    struct kv_series *other;
    bool other_used;
    size_t n_labels, n_series;
    struct kv_series *table[TABLE_SIZE];
};

struct kv_metrics {
    pthread_mutex_t lock;
    struct kv_metric *first, **last;
};

static uint64_t double_bits(double value)
{
    uint64_t bits;

    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

static double bits_double(uint64_t bits)
{
    double value;

    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void series_free(struct kv_series *series)
{
    if (!series)
        return;
    for (size_t i = 0; i < KV_METRIC_MAX_LABELS; i++)
        free(series->labels[i]);
    free(series);
}

static void list_free(struct kv_series *series)
{
    while (series) {
        struct kv_series *next = series->next;

        series_free(series);
        series = next;
    }
}

static size_t n_buckets(const struct kv_metric_def *def)
{
    return def->type == KV_METRIC_HISTOGRAM ? def->n_buckets + 1 : 0;
}

static struct kv_series *series_new(const struct kv_metric_def *def)
{
    struct kv_series *series;

    series = calloc(1, sizeof(*series) + n_buckets(def) * sizeof(series->buckets[0]));
    if (series)
        series->def = def;
    return series;
}

/* Give @series these labels and set its values to zero. Returns false when out of memory. */
static bool series_name(struct kv_series *series, size_t n_labels, const char *const *values)
{
    for (size_t i = 0; i < n_labels; i++) {
        free(series->labels[i]);
        series->labels[i] = strdup(values[i]);
        if (!series->labels[i])
            return false;
    }
    atomic_store_explicit(&series->count, 0, memory_order_relaxed);
    atomic_store_explicit(&series->bits, double_bits(0), memory_order_relaxed);
    for (size_t i = 0; i < n_buckets(series->def); i++)
        atomic_store_explicit(&series->buckets[i], 0, memory_order_relaxed);
    return true;
}

int kv_metrics_create(struct kv_metrics **ret)
{
    struct kv_metrics *metrics = calloc(1, sizeof(*metrics));

    if (!metrics)
        return -ENOMEM;
    pthread_mutex_init(&metrics->lock, NULL);
    metrics->last = &metrics->first;
    *ret = metrics;
    return 0;
}

static void metric_free(struct kv_metric *metric)
{
    list_free(metric->first);
    list_free(metric->spare);
    series_free(metric->other);
    free(metric);
}

void kv_metrics_destroy(struct kv_metrics *metrics)
{
    if (!metrics)
        return;
    while (metrics->first) {
        struct kv_metric *metric = metrics->first;

        metrics->first = metric->next;
        metric_free(metric);
    }
    pthread_mutex_destroy(&metrics->lock);
    free(metrics);
}

struct kv_metric *kv_metrics_add(struct kv_metrics *metrics, const struct kv_metric_def *def)
{
    static const char *const other[KV_METRIC_MAX_LABELS] = {"other", "other", "other", "other"};
    struct kv_metric *metric = calloc(1, sizeof(*metric));

    if (!metric)
        return NULL;
    metric->owner = metrics;
    metric->def = def;
    metric->last = &metric->first;
    while (metric->n_labels < KV_METRIC_MAX_LABELS && def->labels[metric->n_labels])
        metric->n_labels++;
    metric->other = series_new(def);
    if (!metric->other || !series_name(metric->other, metric->n_labels, other)) {
        metric_free(metric);
        return NULL;
    }
    /* A family without labels has this one series, rendered from the start. */
    metric->other_used = metric->n_labels == 0;
    pthread_mutex_lock(&metrics->lock);
    *metrics->last = metric;
    metrics->last = &metric->next;
    pthread_mutex_unlock(&metrics->lock);
    return metric;
}

static bool series_is(const struct kv_series *series, size_t n_labels, const char *const *values)
{
    for (size_t i = 0; i < n_labels; i++) {
        if (strcmp(series->labels[i], values[i]) != 0)
            return false;
    }
    return true;
}

static struct kv_series **find_chain(struct kv_metric *metric, const char *const *values)
{
    uint64_t hash = 0;

    for (size_t i = 0; i < metric->n_labels; i++)
        hash = kv_xxh64(values[i], strlen(values[i]), hash);
    return &metric->table[hash % TABLE_SIZE];
}

/* Make a series with these labels, not yet in the family. Returns NULL without room or memory. */
static struct kv_series *make_series(struct kv_metric *metric, const char *const *values)
{
    struct kv_series *series = metric->spare;

    if (metric->n_series >= KV_METRIC_MAX_SERIES)
        return NULL;
    if (series)
        metric->spare = series->next;
    else
        series = series_new(metric->def);
    if (!series || series_name(series, metric->n_labels, values))
        return series;
    /* The labels are incomplete, but another try may reuse the memory */
    series->next = metric->spare;
    metric->spare = series;
    return NULL;
}

/* Find the series, or make it while there is room. The caller holds the lock. */
static struct kv_series *find_or_add(struct kv_metric *metric, const char *const *values)
{
    struct kv_series **chain = find_chain(metric, values), *series;

    for (series = *chain; series; series = series->chain) {
        if (series_is(series, metric->n_labels, values))
            return series;
    }
    series = make_series(metric, values);
    if (!series) {
        metric->other_used = true;
        return metric->other;
    }
    series->chain = *chain;
    *chain = series;
    series->next = NULL;
    *metric->last = series;
    metric->last = &series->next;
    metric->n_series++;
    return series;
}

struct kv_series *kv_metric_get(struct kv_metric *metric, const char *const *values)
{
    struct kv_series *series;

    if (metric->n_labels == 0)
        return metric->other;
    pthread_mutex_lock(&metric->owner->lock);
    series = find_or_add(metric, values);
    pthread_mutex_unlock(&metric->owner->lock);
    return series;
}

void kv_series_add(struct kv_series *series, uint64_t n)
{
    atomic_fetch_add_explicit(&series->count, n, memory_order_relaxed);
}

void kv_series_set(struct kv_series *series, double value)
{
    atomic_store_explicit(&series->bits, double_bits(value), memory_order_relaxed);
}

void kv_series_observe(struct kv_series *series, double value)
{
    uint64_t old = atomic_load_explicit(&series->bits, memory_order_relaxed);
    size_t i = 0;

    while (i < series->def->n_buckets && !(value <= series->def->buckets[i]))
        i++;
    atomic_fetch_add_explicit(&series->buckets[i], 1, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&series->bits, &old,
                                                  double_bits(bits_double(old) + value),
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
}

uint64_t kv_series_count(const struct kv_series *series)
{
    return atomic_load_explicit(&series->count, memory_order_relaxed);
}

void kv_series_buckets(const struct kv_series *series, uint64_t *ret)
{
    for (size_t i = 0; i < n_buckets(series->def); i++)
        ret[i] += atomic_load_explicit(&series->buckets[i], memory_order_relaxed);
}

void kv_metric_reset(struct kv_metric *metric)
{
    pthread_mutex_lock(&metric->owner->lock);
    *metric->last = metric->spare;
    metric->spare = metric->first;
    metric->first = NULL;
    metric->last = &metric->first;
    metric->n_series = 0;
    memset(metric->table, 0, sizeof(metric->table));
    metric->other_used = metric->n_labels == 0;
    pthread_mutex_unlock(&metric->owner->lock);
}

/* -- exposition -------------------------------------------------------------------------------- */

static void put_double(struct kv_buf *out, double value)
{
    if (isnan(value))
        kv_buf_puts(out, "NaN");
    else if (isinf(value))
        kv_buf_puts(out, value > 0 ? "+Inf" : "-Inf");
    else
        kv_buf_put_double(out, value);
}

/* name suffix{labels,le="bound"} -- the bound is NULL but for buckets. */
static void put_name(struct kv_buf *out, const struct kv_metric *metric,
                     const struct kv_series *series, const char *suffix, const double *bound)
{
    const char *separator = "{";

    kv_buf_puts(out, metric->def->name);
    kv_buf_puts(out, suffix);
    for (size_t i = 0; i < metric->n_labels; i++) {
        kv_buf_puts(out, separator);
        kv_metric_label(out, metric->def->labels[i], series->labels[i]);
        separator = ",";
    }
    if (bound) {
        kv_buf_printf(out, "%sle=\"", separator);
        put_double(out, *bound);
        kv_buf_putc(out, '"');
        separator = ",";
    }
    if (*separator == ',')
        kv_buf_putc(out, '}');
    kv_buf_putc(out, ' ');
}

static void put_u64_line(struct kv_buf *out, uint64_t value)
{
    kv_buf_put_u64(out, value);
    kv_buf_putc(out, '\n');
}

static void put_histogram(struct kv_buf *out, const struct kv_metric *metric,
                          struct kv_series *series)
{
    static const double infinity = INFINITY;
    size_t n = metric->def->n_buckets;
    /* Serves as the count, too: a scrape between two updates stays consistent */
    uint64_t sum = 0;

    for (size_t i = 0; i <= n; i++) {
        sum += atomic_load_explicit(&series->buckets[i], memory_order_relaxed);
        put_name(out, metric, series, "_bucket", i < n ? &metric->def->buckets[i] : &infinity);
        put_u64_line(out, sum);
    }
    put_name(out, metric, series, "_sum", NULL);
    put_double(out, bits_double(atomic_load_explicit(&series->bits, memory_order_relaxed)));
    kv_buf_putc(out, '\n');
    put_name(out, metric, series, "_count", NULL);
    put_u64_line(out, sum);
}

static void put_series(struct kv_buf *out, const struct kv_metric *metric, struct kv_series *series)
{
    switch (metric->def->type) {
    case KV_METRIC_COUNTER:
        put_name(out, metric, series, "", NULL);
        put_u64_line(out, atomic_load_explicit(&series->count, memory_order_relaxed));
        break;
    case KV_METRIC_GAUGE:
        put_name(out, metric, series, "", NULL);
        put_double(out, bits_double(atomic_load_explicit(&series->bits, memory_order_relaxed)));
        kv_buf_putc(out, '\n');
        break;
    case KV_METRIC_HISTOGRAM:
        put_histogram(out, metric, series);
        break;
    }
}

static void put_family(struct kv_buf *out, const struct kv_metric *metric)
{
    static const char *const types[] = {"counter", "gauge", "histogram"};

    if (!metric->first && !metric->other_used)
        return;
    kv_metric_head(out, metric->def->name, types[metric->def->type], metric->def->help);
    for (struct kv_series *series = metric->first; series; series = series->next)
        put_series(out, metric, series);
    if (metric->other_used)
        put_series(out, metric, metric->other);
}

void kv_metrics_render(struct kv_metrics *metrics, struct kv_buf *out)
{
    pthread_mutex_lock(&metrics->lock);
    for (const struct kv_metric *metric = metrics->first; metric; metric = metric->next)
        put_family(out, metric);
    pthread_mutex_unlock(&metrics->lock);
}
