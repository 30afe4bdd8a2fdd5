// SPDX-License-Identifier: Apache-2.0
/* Ask an engine's HTTP server (vLLM, SGLang) for the tokens of a text, or of messages under its template. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/json/json.h"
#include "cli/doctor/doctor.h"

enum { MAX_FILE = 16 << 20 };

/* Read a file, - for standard input. Returns 0, -ENOMEM, or -EPROTO: it was noted why not. */
static int read_file(struct kc_doctor *doctor, const char *path, struct kv_buf *ret)
{
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
    char chunk[16384];
    size_t n;

    ret->limit = MAX_FILE;
    while (file && (n = fread(chunk, 1, sizeof(chunk), file)) > 0)
        kv_buf_append(ret, chunk, n);
    if (!file || ferror(file) || ret->error)
        kc_found(&doctor->report, KC_FINDING_engine_tokenize, "%.200s can't be read: %s", path,
                 ret->error ? "it is too long" : strerror(errno));
    n = !file || ferror(file) || ret->error;
    if (file && file != stdin)
        fclose(file);
    return n ? -EPROTO : 0;
}

static const char *engine_model(const struct kc_doctor *doctor)
{
    if (doctor->opts.engine_model)
        return doctor->opts.engine_model;
    if (doctor->opts.model)
        return doctor->opts.model;
    return doctor->registered ? doctor->registered->model : NULL;
}

/* Write the request: a prompt, or messages as they stand in the file. */
static int write_request(struct kc_doctor *doctor, struct kv_buf *ret)
{
    struct kv_buf text = KV_BUF_INIT;
    struct kv_json_writer w;
    int rc = read_file(doctor, doctor->opts.chat ? doctor->opts.chat : doctor->opts.text, &text);

    kv_json_writer_init(&w, ret);
    kv_json_begin_object(&w);
    if (engine_model(doctor))
        kv_json_member_str(&w, "model", engine_model(doctor));
    if (rc == 0 && doctor->opts.chat) {
        kv_json_key(&w, "messages");
        kv_json_put_raw(&w, text.data, text.len);
        kv_json_member_bool(&w, "add_generation_prompt", true);
    } else if (rc == 0) {
        kv_json_key(&w, "prompt");
        kv_json_put_strn(&w, text.data ? text.data : "", text.len);
    }
    kv_json_end_object(&w);
    kv_buf_fini(&text);
    return rc < 0 ? rc : ret->error;
}

/* HTTP servers of engines tell the time, too. Events are the better witness: no second finding. */
static void check_clock(struct kc_doctor *doctor)
{
    double skew = (double)kc_http_date(doctor->engine_http) - (double)kv_wall_ns() / 1e9 + 0.5;

    if (kc_http_date(doctor->engine_http) >= 0 && fabs(skew) > KC_CLOCK_SECONDS &&
        !doctor->report.times[KC_FINDING_engine_clock])
        kc_found(&doctor->report, KC_FINDING_engine_clock, "its Date is %.0f s %s this machine's",
                 fabs(skew), skew > 0 ? "ahead of" : "behind");
}

int kc_ask_tokenize(struct kc_doctor *doctor, struct kv_buf *ret)
{
    struct kv_buf body = KV_BUF_INIT;
    const struct kv_buf *answer = NULL;
    struct kv_error error = {0};
    int rc = write_request(doctor, &body), status = 0;

    if (rc == 0)
        status = kc_http_request(doctor->engine_http, "/tokenize", KC_BODY_JSON, body.data,
                                 body.len, &answer, &error);
    kv_buf_fini(&body);
    if (rc < 0)
        return rc;
    if (status < 0 || !answer) {
        kc_found(&doctor->report, KC_FINDING_engine_http, "POST /tokenize: %s", error.text);
        return -EPROTO;
    }
    check_clock(doctor);
    rc = status == 200 ? kc_tokens_read(answer->data, answer->len, ret) : -EPROTO;
    if (rc == -EPROTO)
        kc_found(&doctor->report, KC_FINDING_engine_tokenize, "POST /tokenize answers %d: %.*s",
                 status, (int)KV_MIN(answer->len, (size_t)160), answer->data ? answer->data : "");
    else if (rc == 0)
        kc_well(&doctor->report, "the engine makes %zu tokens of the text",
                ret->len / sizeof(uint32_t));
    return rc;
}
