// SPDX-License-Identifier: Apache-2.0
/**
 * Metrics in Prometheus text format 0.0.4. A program declares its families once in a registry. A
 * series is one combination of a family's labels, made on first use and then updated without locks
 * or allocation. The number of series per family is bounded: beyond the bound, updates go to one
 * series whose label values are "other".
 */
#ifndef KV_BASE_METRICS_H
#define KV_BASE_METRICS_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"

enum kv_metric_type { KV_METRIC_COUNTER, KV_METRIC_GAUGE, KV_METRIC_HISTOGRAM };
#define KV_METRIC_MAX_LABELS 4
#define KV_METRIC_MAX_SERIES 4096

struct kv_metrics; /* a registry */
struct kv_metric;  /* a family */
struct kv_series;  /* one label combination; lives as long as the registry */

/** Definition of a family, from which exposition and docs derive. */
struct kv_metric_def {
    const char *name; /* complete name, with unit and _total */
    const char *help;
    enum kv_metric_type type;
    const char *labels[KV_METRIC_MAX_LABELS + 1]; /* NULL-terminated */
    const double *buckets; /* histograms: ascending upper bounds, +Inf is implied */
    size_t n_buckets;
};

int kv_metrics_create(struct kv_metrics **ret);
void kv_metrics_destroy(struct kv_metrics *metrics);

/** Declare a family. @def must outlive the registry. NULL when out of memory. */
struct kv_metric *kv_metrics_add(struct kv_metrics *metrics, const struct kv_metric_def *def);

/**
 * Return the series with these label values (as many as the family has labels). Never NULL. Takes a
 * lock.
 */
struct kv_series *kv_metric_get(struct kv_metric *metric, const char *const *values);

void kv_series_add(struct kv_series *series, uint64_t n);       /* counters */
void kv_series_set(struct kv_series *series, double value);     /* gauges */
void kv_series_observe(struct kv_series *series, double value); /* histograms */

/** Return a counter's value. Any thread. */
uint64_t kv_series_count(const struct kv_series *series);
/**
 * Add the observations of a histogram in each bucket to @ret, which has one more than the bounds: beyond
 * the last. Not cumulative. Any thread.
 */
void kv_series_buckets(const struct kv_series *series, uint64_t *ret);

/**
 * Drop all series of a gauge family before filling it anew. Pointers to the dropped series stay
 * valid but may get other labels: get them again. Only one thread may fill a family at a time.
 */
void kv_metric_reset(struct kv_metric *metric);

/**
 * Append the exposition. Unlabelled families without an update show 0; labelled ones are left out.
 */
void kv_metrics_render(struct kv_metrics *metrics, struct kv_buf *out);

#endif
