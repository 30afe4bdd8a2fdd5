// SPDX-License-Identifier: Apache-2.0
/** Reading the Prometheus text format, as much of it as the indexer's own page uses. */
#ifndef KV_CLI_PROM_H
#define KV_CLI_PROM_H

#include <stdbool.h>
#include <stddef.h>

#include "base/json.h" /* struct kv_str */

struct kc_prom {
    const char *p, *end;
};

struct kc_sample {
    struct kv_str name;
    struct kv_str labels; /* between the braces; empty without */
    double value;
};

void kc_prom_init(struct kc_prom *prom, const char *text, size_t len);

/** The next sample; comments and lines that aren't one are passed over. False at the end. */
bool kc_prom_next(struct kc_prom *prom, struct kc_sample *ret);

/** The value of one label, escapes resolved, cut to fit @size. False when it isn't there. */
bool kc_sample_label(const struct kc_sample *sample, const char *name, char *ret, size_t size);

#endif
