// SPDX-License-Identifier: Apache-2.0
#include "indexer/habits.h"

#include <errno.h>
#include <string.h>

#include "base/error.h"

bool ki_habits_equal(const struct ki_habits *a, const struct ki_habits *b)
{
    return a->eagle_drop == b->eagle_drop && a->silent_windows == b->silent_windows &&
           a->report_mode == b->report_mode;
}

static const char *const names[] = {
    [KI_REPORTS_INCREMENTAL] = "incremental",
    [KI_REPORTS_FULL] = "full",
};

const char *ki_report_mode_name(enum ki_report_mode mode)
{
    return names[mode];
}

int ki_report_mode_parse(const char *name, size_t len, enum ki_report_mode *ret)
{
    for (size_t i = KI_REPORTS_INCREMENTAL; i < KV_COUNT(names); i++) {
        if (strlen(names[i]) != len || memcmp(names[i], name, len) != 0)
            continue;
        *ret = (enum ki_report_mode)i;
        return 0;
    }
    return -EINVAL;
}
