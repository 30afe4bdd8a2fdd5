// SPDX-License-Identifier: Apache-2.0
/**
 * Progress of long work on standard error: on a terminal one line that is redrawn, elsewhere (a log
 * file, a pipe) a line every ten seconds.
 */
#ifndef KV_CLI_SHOW_BAR_H
#define KV_CLI_SHOW_BAR_H

#include <stdbool.h>
#include <stdint.h>

#define KC_BAR_WIDTH 24

/** Text of a bar: "[######......]" for @fraction 0..1. */
struct kc_bar_text {
    char s[KC_BAR_WIDTH + 3];
};
struct kc_bar_text kc_bar_text(double fraction);

/** Return true when a line is due, and set the time of the next one in *@next_ns (0 at first). */
bool kc_bar_is_due(uint64_t *next_ns);
/** Begin and end the text of a line. */
void kc_bar_begin(void);
void kc_bar_end(void);
/** Remove the line from the terminal. */
void kc_bar_clear(void);

/** Progress of a save, restore or verification, in bytes or items. Used by one thread. */
struct kc_bar {
    const char *label; /* "saving" */
    const char *unit;  /* "chunks"; NULL: bytes */
    bool quiet;
    bool drawn;
    uint64_t start_ns, next_ns;
};
/**
 * Show progress, as a kvs_progress_fn with a struct kc_bar as @arg. @total 0: unknown. Returns
 * non-zero after ^C.
 */
int kc_bar_progress(void *arg, uint64_t done, uint64_t total);
void kc_bar_finish(struct kc_bar *bar);

/** Catch ^C and SIGTERM: the first makes kc_bar_progress return non-zero, the second kills. */
void kc_bar_catch_signals(void);
bool kc_bar_interrupted(void);

#endif
