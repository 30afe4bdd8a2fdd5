// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "base/core/clock.h"
#include "cli/client/prom.h"
#include "cli/doctor/doctor.h"

/* -- its port ---------------------------------------------------------------------------------- */

static void note_trouble(struct kc_doctor *doctor, const struct kv_error *error)
{
    static const enum kc_finding findings[] = {
        [KC_HTTP_NAME] = KC_FINDING_indexer_name,
        [KC_HTTP_REFUSED] = KC_FINDING_indexer_refused,
        [KC_HTTP_HUNG_UP] = KC_FINDING_indexer_hangs_up,
        [KC_HTTP_SILENT] = KC_FINDING_indexer_silent,
        [KC_HTTP_TLS] = KC_FINDING_indexer_tls,
        [KC_HTTP_NO_HTTP] = KC_FINDING_indexer_other,
        [KC_HTTP_FAILED] = KC_FINDING_indexer_other,
    };

    kc_found(&doctor->report, findings[kc_http_trouble(doctor->http)], "%s", error->text);
}

/* GET @path. Returns the status, or -EPROTO when no answer came: it was noted why. */
static int get(struct kc_doctor *doctor, const char *path, const struct kv_buf **ret)
{
    struct kv_error error = {0};
    int status = kc_http_request(doctor->http, path, KC_BODY_NONE, NULL, 0, ret, &error);

    if (status < 0) {
        note_trouble(doctor, &error);
        return -EPROTO;
    }
    return status;
}

/* Compare the Date of the last answer with this machine's clock. */
static void check_clock(struct kc_doctor *doctor)
{
    int64_t date = kc_http_date(doctor->http);
    double skew =
        (double)date - (double)kv_wall_ns() / 1e9 + 0.5; /* Date is cut to whole seconds */

    if (date < 0)
        return;
    if (fabs(skew) > KC_CLOCK_SECONDS)
        kc_found(&doctor->report, KC_FINDING_indexer_clock, "its Date is %.0f s %s this machine's",
                 fabs(skew), skew > 0 ? "ahead of" : "behind");
    else
        kc_well(&doctor->report, "kv-indexer's clock agrees within %.0f s", KC_CLOCK_SECONDS);
}

/* Returns whether kv-indexer answers. */
static bool ask_about(struct kc_doctor *doctor)
{
    const struct kv_buf *body;
    struct kc_about about;
    int status = get(doctor, "/", &body);

    if (status < 0)
        return false;
    if (status == 401 || status == 403) {
        kc_found(&doctor->report, KC_FINDING_indexer_token, "GET / answers %d%s", status,
                 kc_http_advice(doctor->http, status));
        return false;
    }
    if (status != 200 || kc_about_read(body->data, body->len, &about) < 0 ||
        strcmp(about.service, "kv-indexer") != 0) {
        kc_found(&doctor->report, KC_FINDING_indexer_other,
                 "GET / answers status %d, and doesn't call itself kv-indexer", status);
        return false;
    }
    memcpy(doctor->version, about.version, sizeof(doctor->version));
    if (strcmp(about.version, KV_VERSION) != 0)
        kc_found(&doctor->report, KC_FINDING_indexer_version,
                 "kv-indexer is version %s, this kvasir %s", about.version, KV_VERSION);
    else
        kc_well(&doctor->report, "kv-indexer %s answers, of the same version as this kvasir",
                about.version);
    check_clock(doctor);
    return true;
}

static void ask_ready(struct kc_doctor *doctor)
{
    const struct kv_buf *body;
    int status = get(doctor, "/ready", &body);

    if (status == 200)
        kc_well(&doctor->report, "kv-indexer is ready");
    else if (status > 0)
        kc_found(&doctor->report, KC_FINDING_indexer_not_ready, "GET /ready answers %d: %.*s",
                 status, (int)KV_MIN(body->len, (size_t)200), body->data ? body->data : "");
}

/* -- its limits -------------------------------------------------------------------------------- */

struct limits {
    double registrations, connections;         /* now */
    double max_registrations, max_connections; /* 0: not told */
    double wanted_registrations, wanted_connections, max_fds, left_out;
};

static void read_sample(const struct kc_sample *sample, struct limits *ret)
{
    char option[32] = "";

    kc_sample_label(sample, "option", option, sizeof(option));
    if (kv_str_eq(sample->name, "kv_indexer_http_connections"))
        ret->connections = sample->value;
    else if (kv_str_eq(sample->name, "kv_indexer_stream_left_out") ||
             kv_str_eq(sample->name, "kv_indexer_stream_rejected_total"))
        ret->left_out += sample->value;
    else if (kv_str_eq(sample->name, "process_max_fds"))
        ret->max_fds = sample->value;
    else if (kv_str_eq(sample->name, "kv_indexer_limit") && strcmp(option, "max-connections") == 0)
        ret->max_connections = sample->value;
    else if (kv_str_eq(sample->name, "kv_indexer_limit") &&
             strcmp(option, "max-registrations") == 0)
        ret->max_registrations = sample->value;
    else if (kv_str_eq(sample->name, "kv_indexer_limit_wanted") &&
             strcmp(option, "max-connections") == 0)
        ret->wanted_connections = sample->value;
    else if (kv_str_eq(sample->name, "kv_indexer_limit_wanted") &&
             strcmp(option, "max-registrations") == 0)
        ret->wanted_registrations = sample->value;
}

static void judge_limits(struct kc_report *report, const struct limits *l)
{
    bool well = true;

    if (l->max_registrations < l->wanted_registrations ||
        l->max_connections < l->wanted_connections) {
        well = false;
        kc_found(report, KC_FINDING_descriptors,
                 "%.0f descriptors allow %.0f registrations of %.0f, and %.0f connections of %.0f",
                 l->max_fds, l->max_registrations, l->wanted_registrations, l->max_connections,
                 l->wanted_connections);
    }
    if (l->max_registrations > 0 && l->registrations >= 0.9 * l->max_registrations) {
        well = false;
        kc_found(report, KC_FINDING_registrations_full, "%.0f of %.0f registrations are taken",
                 l->registrations, l->max_registrations);
    }
    /* From 7 of 8 on kv-indexer closes those that are idle. */
    if (l->max_connections > 0 && l->connections >= 0.875 * l->max_connections) {
        well = false;
        kc_found(report, KC_FINDING_connections_full, "%.0f of %.0f HTTP connections are open",
                 l->connections, l->max_connections);
    }
    if (l->left_out > 0) {
        well = false;
        kc_found(report, KC_FINDING_blocks_left_out, "%.0f operations or blocks were refused",
                 l->left_out);
    }
    if (well && l->max_registrations > 0)
        kc_well(report, "limits: %.0f of %.0f registrations, %.0f of %.0f HTTP connections",
                l->registrations, l->max_registrations, l->connections, l->max_connections);
}

static void ask_limits(struct kc_doctor *doctor)
{
    struct limits limits = {.registrations = (double)doctor->listeners.n};
    const struct kv_buf *body;
    struct kc_sample sample;
    struct kc_prom prom;

    if (get(doctor, "/metrics?detail=true", &body) != 200)
        return;
    kc_prom_init(&prom, body->data, body->len);
    while (kc_prom_next(&prom, &sample))
        read_sample(&sample, &limits);
    judge_limits(&doctor->report, &limits);
}

int kc_read_listeners(struct kc_doctor *doctor)
{
    const struct kv_buf *body;
    int status = get(doctor, "/workers", &body);

    if (status != 200)
        return -EPROTO;
    return kc_listeners_read(body->data, body->len, &doctor->listeners);
}

int kc_ask_indexer(struct kc_doctor *doctor)
{
    int rc;

    doctor->indexer_answers = ask_about(doctor);
    if (!doctor->indexer_answers)
        return 0;
    ask_ready(doctor);
    rc = kc_read_listeners(doctor);
    if (rc == 0)
        ask_limits(doctor);
    return rc == -ENOMEM ? rc : 0;
}
