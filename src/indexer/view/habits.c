// SPDX-License-Identifier: Apache-2.0
/*
 * Habits as registrations write them (habits.h). Invariant: what is written reads back as the same
 * habits, since replicas register what they read from each other.
 */
#include "indexer/view/habits.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/core/error.h"

bool ki_habits_equal(const struct ki_habits *a, const struct ki_habits *b)
{
    return a->eagle_drop == b->eagle_drop && a->eagle_groups == b->eagle_groups &&
           a->silent_windows == b->silent_windows && a->report_mode == b->report_mode &&
           a->groups.n == b->groups.n &&
           memcmp(a->groups.items, b->groups.items, a->groups.n * sizeof(a->groups.items[0])) == 0;
}

/* An empty list is refused: 0 would mean every group, which nobody writes as none. */
int ki_groups_parse(const char *text, size_t len, uint64_t *ret)
{
    uint64_t groups = 0;

    for (size_t i = 0; i <= len; i++) {
        unsigned group = 0, digits = 0;

        for (; i < len && text[i] >= '0' && text[i] <= '9' && digits < 3; i++, digits++)
            group = 10 * group + (unsigned)(text[i] - '0');
        if (!digits || group > 63 || (i < len && text[i] != ','))
            return -EINVAL;
        groups |= UINT64_C(1) << group;
    }
    *ret = groups;
    return 0;
}

const char *ki_groups_format(uint64_t groups, char *text)
{
    size_t at = 0;

    text[0] = '\0';
    for (unsigned group = 0; group < 64; group++)
        if (groups >> group & 1)
            at += (size_t)snprintf(text + at, KI_GROUPS_TEXT - at, "%s%u", at ? "," : "", group);
    return text;
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
