// SPDX-License-Identifier: Apache-2.0
/** Parse the Prometheus text format, as far as the indexer's own page uses it. */
#ifndef KV_CLI_CLIENT_PROM_H
#define KV_CLI_CLIENT_PROM_H

#include <stdbool.h>
#include <stddef.h>

#include "base/json/json.h" /* struct kv_str */

struct kc_prom {
    const char *p, *end;
};

struct kc_sample {
    struct kv_str name;
    struct kv_str labels; /* text between the braces; empty without */
    double value;
};

void kc_prom_init(struct kc_prom *prom, const char *text, size_t len);

/** Read the next sample; pass over comments and invalid lines. Returns false at the end. */
bool kc_prom_next(struct kc_prom *prom, struct kc_sample *ret);

/**
 * Copy the value of one label, escapes resolved, cut to @size. Returns false when there is no such
 * label.
 */
bool kc_sample_label(const struct kc_sample *sample, const char *name, char *ret, size_t size);

#endif
