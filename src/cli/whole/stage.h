// SPDX-License-Identifier: Apache-2.0
/**
 * Stage of a worker's work, in a page of a file that it shares with the director: a worker that hangs
 * can't answer. The worker's thread writes, the director reads at any time.
 */
#ifndef KV_CLI_WHOLE_STAGE_H
#define KV_CLI_WHOLE_STAGE_H

#include <stddef.h>
#include <stdint.h>

enum kc_stage {
    KC_STAGE_NONE, /* the process has not come to its first stage */
    KC_STAGE_OPEN,
    KC_STAGE_TIERS,
    KC_STAGE_WAIT,
    KC_STAGE_LOAD,
    KC_STAGE_COMPARE,
    KC_STAGE_COMPUTE,
    KC_STAGE_DECODE,
    KC_STAGE_RELEASE,
    KC_STAGE_SETTLE,
    KC_STAGE_BOOKS,
    KC_STAGE_END,
    KC_N_STAGES
};

struct kc_stage_page {
    _Atomic uint64_t stage;
    _Atomic uint64_t request;  /* number of the request of LOAD to RELEASE */
    _Atomic uint64_t since_ns; /* CLOCK_MONOTONIC */
};

/** Map the page of worker @number of a run in @dir. Returns 0 or a negative errno. */
int kc_stage_open(const char *dir, uint32_t number, struct kc_stage_page **ret);
/** Unmap it. NULL is a no-op. */
void kc_stage_close(struct kc_stage_page *page);
/** Enter a stage. @page may be NULL. */
void kc_stage_enter(struct kc_stage_page *page, enum kc_stage stage, uint64_t request);
/** Write in words what worker @number did last to @to. */
void kc_stage_tell(const char *dir, uint32_t number, char *to, size_t size);

#endif
