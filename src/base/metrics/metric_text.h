// SPDX-License-Identifier: Apache-2.0
/**
 * Pieces of Prometheus text format 0.0.4: for registries of metrics (metrics.h), and for libraries
 * that make such a text of a struct's numbers.
 */
#ifndef KV_BASE_METRIC_TEXT_H
#define KV_BASE_METRIC_TEXT_H

#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"

/** A family whose values are a uint64_t at @offset of some struct. */
struct kv_metric_field {
    const char *name; /* complete, with _total and unit */
    const char *type;
    const char *help;
    size_t offset;
};

/** Return the value of @field in the struct at @from. */
uint64_t kv_metric_value(const struct kv_metric_field *field, const void *from);

/** Append a family's HELP and TYPE lines. */
void kv_metric_head(struct kv_buf *out, const char *name, const char *type, const char *help);

/** Append `name="value"`, escaped. */
void kv_metric_label(struct kv_buf *out, const char *name, const char *value);

/**
 * Copy as much of @text as fits into @to and end it with a NUL (@cap 0: copy nothing), then free
 * @text. Returns the length of the whole text, or the buffer's error.
 */
long kv_metric_give(struct kv_buf *text, char *to, size_t cap);

#endif
