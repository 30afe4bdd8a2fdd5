// SPDX-License-Identifier: Apache-2.0
/** Progress of long work on standard error: on a terminal one line that is redrawn, elsewhere (a log
 * file, a pipe) a line every ten seconds. */
#ifndef KV_CLI_BAR_H
#define KV_CLI_BAR_H

#include <stdbool.h>
#include <stdint.h>

#define KC_BAR_WIDTH 24

/** "[######......]" for @fraction 0..1. */
struct kc_bar_text {
    char s[KC_BAR_WIDTH + 3];
};
struct kc_bar_text kc_bar_text(double fraction);

/** Whether a line is due now, given when the last one was (*@next_ns, 0 at first). */
bool kc_bar_is_due(uint64_t *next_ns);
/** Before and after the text of a line. */
void kc_bar_begin(void);
void kc_bar_end(void);
/** Take the line off the terminal. */
void kc_bar_clear(void);

/** Bytes of a save, restore or verification, or a number of things. Used by one thread. */
struct kc_bar {
    const char *label; /* "saving" */
    const char *unit;  /* "chunks"; NULL: bytes */
    bool quiet;
    bool drawn;
    uint64_t start_ns, next_ns;
};
/** A kvs_progress_fn, @arg a struct kc_bar. @total 0: unknown. Non-zero after ^C. */
int kc_bar_progress(void *arg, uint64_t done, uint64_t total);
void kc_bar_finish(struct kc_bar *bar);

/** From now on ^C (and SIGTERM) make kc_bar_progress say stop; a second one kills. */
void kc_bar_catch_signals(void);
bool kc_bar_interrupted(void);

#endif
