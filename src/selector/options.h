// SPDX-License-Identifier: Apache-2.0
/** The command line of kv-selector: that of kv-indexer, and options of choices and bookings. */
#ifndef KV_SELECTOR_OPTIONS_H
#define KV_SELECTOR_OPTIONS_H

#include "indexer/options.h"

struct ksel_options {
    struct ki_options indexer; /* first: struct ki_program */
    const char *policy;
    uint64_t partial_trust; /* in 10^-9 */
    uint64_t predict_ms;    /* 0: no predictions */
    uint64_t booking_expiry_ms;
    uint64_t max_bookings;
    uint64_t max_waiting; /* tokens of each worker at which requests get 429; 0: never */
    uint64_t session_ms;  /* 0: no affinity */
    uint64_t cache_ms, cache_entries;
    const char *decision_log; /* NULL: none */
    uint64_t decision_sample;
    const char *ext_proc; /* HOST:PORT; NULL: none */
    bool ext_proc_insecure;
    const char *ext_proc_model; /* NULL: none */
    uint64_t ext_proc_target_port, ext_proc_fallbacks;
    const char *ext_proc_tokenizer;
    uint64_t ext_proc_tokenize_ms;
};

extern const struct ki_program ksel_program;

#endif
