// SPDX-License-Identifier: Apache-2.0
/** Findings of `kvasir doctor`: a row of findings.def each, with what was measured. */
#ifndef KV_CLI_DOCTOR_FINDINGS_H
#define KV_CLI_DOCTOR_FINDINGS_H

#include <stdbool.h>
#include <stddef.h>

#include "base/core/error.h"

enum kc_finding {
#define KC_FINDING(name, severity, words, remedy) KC_FINDING_##name,
#include "cli/doctor/findings.def"
#undef KC_FINDING
    KC_N_FINDINGS
};

enum kc_severity { KC_SEVERITY_UNASKED, KC_SEVERITY_FAULT, KC_SEVERITY_WARNING };

/** A row of the table. */
struct kc_finding_row {
    const char *name;
    enum kc_severity severity;
    const char *words;  /* what is wrong, a sentence */
    const char *remedy; /* what to do, one sentence or more */
};
extern const struct kc_finding_row kc_finding_rows[KC_N_FINDINGS];

enum { KC_MEASURED_MAX = 400, KC_NOTE_MAX = 300, KC_NOTES = 32 };

/** All that one run has found. Zero-initialise. */
struct kc_report {
    unsigned times[KC_N_FINDINGS]; /* 0: not found */
    char measured[KC_N_FINDINGS][KC_MEASURED_MAX];
    char notes[KC_NOTES][KC_NOTE_MAX]; /* what is well, one line each */
    size_t n_notes;
};

/**
 * Note a finding, and what was measured, as a printf format without a full stop. Further times its text
 * goes behind that of the first, as far as there is room.
 */
void kc_found(struct kc_report *report, enum kc_finding finding, const char *fmt, ...)
    KV_PRINTF(3, 4);
/** Note what was measured and is well. Notes above KC_NOTES are dropped. */
void kc_well(struct kc_report *report, const char *fmt, ...) KV_PRINTF(2, 3);

/** Return the finding of that name, of @len bytes; KC_N_FINDINGS: there is none. */
enum kc_finding kc_finding_named(const char *name, size_t len);

/** Return the number of findings. */
size_t kc_report_count(const struct kc_report *report);
/** Return an exit status: 0 all is well, 1 findings, 2 where one of them is a question not asked. */
int kc_report_status(const struct kc_report *report);

#endif
