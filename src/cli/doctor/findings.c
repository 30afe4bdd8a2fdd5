// SPDX-License-Identifier: Apache-2.0
#include "cli/doctor/findings.h"

#include <stdio.h>
#include <string.h>

const struct kc_finding_row kc_finding_rows[KC_N_FINDINGS] = {
#define KC_FINDING(name, severity, words, remedy) {#name, KC_SEVERITY_##severity, words, remedy},
#include "cli/doctor/findings.def"
#undef KC_FINDING
};

void kc_found(struct kc_report *report, enum kc_finding finding, const char *fmt, ...)
{
    char *text = report->measured[finding];
    size_t len = strlen(text);
    va_list args;

    if (report->times[finding]++ && len + 3 < KC_MEASURED_MAX)
        len += (size_t)snprintf(text + len, KC_MEASURED_MAX - len, "; ");
    va_start(args, fmt);
    vsnprintf(text + len, KC_MEASURED_MAX - len, fmt, args);
    va_end(args);
}

void kc_well(struct kc_report *report, const char *fmt, ...)
{
    va_list args;

    if (report->n_notes == KC_NOTES)
        return;
    va_start(args, fmt);
    vsnprintf(report->notes[report->n_notes++], KC_NOTE_MAX, fmt, args);
    va_end(args);
}

enum kc_finding kc_finding_named(const char *name, size_t len)
{
    unsigned i = 0;

    while (i < KC_N_FINDINGS && (strlen(kc_finding_rows[i].name) != len ||
                                 memcmp(kc_finding_rows[i].name, name, len) != 0))
        i++;
    return (enum kc_finding)i;
}

size_t kc_report_count(const struct kc_report *report)
{
    size_t n = 0;

    for (size_t i = 0; i < KC_N_FINDINGS; i++)
        n += report->times[i] > 0;
    return n;
}

int kc_report_status(const struct kc_report *report)
{
    int status = 0;

    for (size_t i = 0; i < KC_N_FINDINGS; i++)
        if (report->times[i])
            status = KV_MAX(status, kc_finding_rows[i].severity == KC_SEVERITY_UNASKED ? 2 : 1);
    return status;
}
