// SPDX-License-Identifier: Apache-2.0
/** Figures that the table, the JSON and the page of a run have in common. */
#ifndef KV_CLI_WHOLE_REPORT_H
#define KV_CLI_WHOLE_REPORT_H

#include "cli/whole/whole.h"

struct kc_figures {
    double seconds, hit;
    double checked_rate;   /* bytes compared a second */
    double moved_rate;     /* bytes read and written a second by everything that is counted */
    double of_memory_rate; /* of the machine's memcpy */
    double query_p50_us, query_p99_us, lag_p50_ms, lag_p99_ms;
    double hit_ms, without_ms; /* mean prefill of hit tokens, and of all */
    double saved_ms;           /* mean time to first token saved */
    double load_rate,
        even_rate; /* bytes a second that hits beyond G1 loaded at; as fast as prefill */
    double busy;   /* cores that the workers kept busy */
};

struct kc_figures kc_whole_figures(const struct kc_whole *whole);

extern const char *const kc_source_names[KC_N_SOURCES]; /* in JSON */
extern const char *const kc_source_words[KC_N_SOURCES]; /* for people */
extern const char *const kc_path_names[KC_N_PATHS];

#endif
