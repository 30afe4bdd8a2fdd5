// SPDX-License-Identifier: Apache-2.0
/**
 * Metrics in Prometheus text format 0.0.4. Families are declared once in a registry; a series of a
 * family is one label combination, made on first use (bounded per family: beyond the bound its
 * updates go to one series whose label values are "other") and then updated without locks or
 * allocation. Label sets appear only after first use.
 */
#ifndef KV_BASE_METRICS_H
#define KV_BASE_METRICS_H

#include <stddef.h>
#include <stdint.h>

#include "base/buf.h"

enum kv_metric_type { KV_METRIC_COUNTER, KV_METRIC_GAUGE, KV_METRIC_HISTOGRAM };
#define KV_METRIC_MAX_LABELS 4
#define KV_METRIC_MAX_SERIES 4096

struct kv_metrics; /* a registry */
struct kv_metric;  /* a family */
struct kv_series;  /* one label combination; lives as long as the registry */

/** The definition row from which exposition and docs derive. */
struct kv_metric_def {
    const char *name; /* complete, with _total and unit */
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

/** The series of these label values (as many as the family has labels). Never NULL. Locks. */
struct kv_series *kv_metric_get(struct kv_metric *metric, const char *const *values);

void kv_series_add(struct kv_series *series, uint64_t n);       /* counters */
void kv_series_set(struct kv_series *series, double value);     /* gauges */
void kv_series_observe(struct kv_series *series, double value); /* histograms */

/**
 * Drop all series of a gauge family before filling it anew (workers come and go). Pointers to them
 * stay good but may be given to other labels: get them again. One thread fills a family at a time.
 */
void kv_metric_reset(struct kv_metric *metric);

/** Append the exposition. Families without series are left out, but unlabelled ones show 0. */
void kv_metrics_render(struct kv_metrics *metrics, struct kv_buf *out);

#endif
