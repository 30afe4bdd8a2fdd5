// SPDX-License-Identifier: Apache-2.0
/** Habits of an engine that its events don't show, or not at once; the registration tells them. */
#ifndef KV_INDEXER_VIEW_HABITS_H
#define KV_INDEXER_VIEW_HABITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "event/reader/told.h"

/** Which requests ask the engine to report the blocks that they reuse (reports.h). */
enum ki_report_mode {
    KI_REPORTS_UNKNOWN,     /* not told: the stream will show it */
    KI_REPORTS_INCREMENTAL, /* none of them */
    KI_REPORTS_FULL         /* some or all */
};

struct ki_habits {
    bool eagle_drop;        /* gives up the last block that it finds: see kvi_set_keeps */
    uint64_t eagle_groups;  /* only these cache groups do: bit 1 << group; 0: all */
    struct kve_told groups; /* cache groups, for what events don't tell of them */
    bool silent_windows;    /* evicts from windows without an event: the view stays partial */
    enum ki_report_mode report_mode;
};

bool ki_habits_equal(const struct ki_habits *a, const struct ki_habits *b);

/** Read numbers of cache groups, 0 to 63, separated by commas, into bits. Returns 0 or -EINVAL. */
int ki_groups_parse(const char *text, size_t len, uint64_t *ret);
/** Write them the same way. @text has room for KI_GROUPS_TEXT bytes. Returns @text. */
const char *ki_groups_format(uint64_t groups, char *text);
#define KI_GROUPS_TEXT 192

/** Name of a mode in registrations; NULL for KI_REPORTS_UNKNOWN. */
const char *ki_report_mode_name(enum ki_report_mode mode);
/** Read the name of a mode into *@ret. Returns 0 or -EINVAL. */
int ki_report_mode_parse(const char *name, size_t len, enum ki_report_mode *ret);

#endif
