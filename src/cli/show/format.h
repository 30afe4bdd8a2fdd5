// SPDX-License-Identifier: Apache-2.0
/** Format figures for people. */
#ifndef KV_CLI_SHOW_FORMAT_H
#define KV_CLI_SHOW_FORMAT_H

#include <stdint.h>

/** Text by value, so that several fit into one printf. */
struct kc_text {
    char s[48];
};

struct kc_text kc_count(uint64_t n);     /* 1,234,567 */
struct kc_text kc_bytes(double n);       /* 1.2 MiB */
struct kc_text kc_duration(uint64_t ns); /* 310 us, 4.2 ms, 12.3 s */
struct kc_text kc_span(double seconds);  /* 45 s, 59 min, 3.2 h */
struct kc_text kc_scaled(double n);      /* 950, 12.3 k, 147.7 M */

#endif
