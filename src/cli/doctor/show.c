// SPDX-License-Identifier: Apache-2.0
#include <inttypes.h>
#include <string.h>

#include "base/json/json.h"
#include "cli/doctor/doctor.h"
#include "cli/show/plain.h"

enum { WIDTH = 96, INDENT = 10 };

static const char *const severity_names[] = {[KC_SEVERITY_UNASKED] = "unasked",
                                             [KC_SEVERITY_FAULT] = "fault",
                                             [KC_SEVERITY_WARNING] = "warning"};
static const char *const colors[] = {[KC_SEVERITY_UNASKED] = "\033[35m",
                                     [KC_SEVERITY_FAULT] = "\033[31m",
                                     [KC_SEVERITY_WARNING] = "\033[33m"};

static const char *status_name(const struct kc_report *report)
{
    static const char *const names[] = {"well", "findings", "unasked"};

    return names[kc_report_status(report)];
}

/* Append text of others, wrapped at words, behind a head of INDENT columns that is written already. */
static void put_wrapped(struct kv_buf *out, const char *text)
{
    struct kv_buf plain = KV_BUF_INIT;
    size_t column = INDENT, len;
    const char *word;

    kc_put_plain(&plain, text, strlen(text));
    word = kv_buf_cstr(&plain);
    for (bool first = true; word && *word; first = false) {
        word += strspn(word, " ");
        len = strcspn(word, " ");
        if (!first && column + 1 + len > WIDTH) {
            kv_buf_printf(out, "\n%*s", INDENT, "");
            column = INDENT;
        } else if (!first && len) {
            kv_buf_putc(out, ' ');
            column++;
        }
        kv_buf_append(out, word, len);
        column += len;
        word += len;
    }
    kv_buf_putc(out, '\n');
    kv_buf_fini(&plain);
}

static void put_finding(const struct kc_report *report, unsigned i, bool color, struct kv_buf *out)
{
    const struct kc_finding_row *row = &kc_finding_rows[i];

    kv_buf_printf(out, "\n%s%-7s%s   %s%s%s\n%*s", color ? colors[row->severity] : "",
                  severity_names[row->severity], color ? "\033[0m" : "", color ? "\033[1m" : "",
                  row->name, color ? "\033[0m" : "", INDENT, "");
    put_wrapped(out, row->words);
    kv_buf_puts(out, "measured  ");
    put_wrapped(out, report->measured[i]);
    kv_buf_puts(out, "do        ");
    put_wrapped(out, row->remedy);
}

void kc_report_text(const struct kc_doctor *doctor, bool color, struct kv_buf *out)
{
    const struct kc_report *report = &doctor->report;
    size_t n = kc_report_count(report);

    for (size_t i = 0; i < report->n_notes; i++) {
        kv_buf_printf(out, "%swell%s      ", color ? "\033[32m" : "", color ? "\033[0m" : "");
        put_wrapped(out, report->notes[i]);
    }
    for (unsigned i = 0; i < KC_N_FINDINGS; i++)
        if (report->times[i])
            put_finding(report, i, color, out);
    if (n)
        kv_buf_printf(out, "\n%zu finding%s\n", n, n == 1 ? "" : "s");
    else
        kv_buf_puts(out, "\nno findings\n");
}

void kc_report_json(const struct kc_doctor *doctor, struct kv_buf *out)
{
    const struct kc_report *report = &doctor->report;
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "status", status_name(report));
    kv_json_member_str(&w, "url", kc_http_url(doctor->http));
    if (doctor->opts.engine)
        kv_json_member_str(&w, "engine", doctor->opts.engine);
    kv_json_key(&w, "well");
    kv_json_begin_array(&w);
    for (size_t i = 0; i < report->n_notes; i++)
        kv_json_put_str(&w, report->notes[i]);
    kv_json_end_array(&w);
    kv_json_key(&w, "findings");
    kv_json_begin_array(&w);
    for (unsigned i = 0; i < KC_N_FINDINGS; i++) {
        if (!report->times[i])
            continue;
        kv_json_begin_object(&w);
        kv_json_member_str(&w, "name", kc_finding_rows[i].name);
        kv_json_member_str(&w, "severity", severity_names[kc_finding_rows[i].severity]);
        kv_json_member_str(&w, "words", kc_finding_rows[i].words);
        kv_json_member_str(&w, "measured", report->measured[i]);
        kv_json_member_str(&w, "remedy", kc_finding_rows[i].remedy);
        kv_json_end_object(&w);
    }
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    kv_buf_putc(out, '\n');
}
