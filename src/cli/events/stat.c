// SPDX-License-Identifier: Apache-2.0
/* `kvasir events stat`: listens, and prints looks. stat_report.c has their form. */
#include "cli/events/stat.h"

#include <stdio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/events/events.h"
#include "cli/show/bar.h"

#define DEFAULT_MS 10000

static int take(void *arg, const struct kc_message *message)
{
    struct kc_events_call *call = arg;

    if (kc_follower_take(&call->follower, message) < 0)
        return kc_events_fail(call, KC_EVENTS_FAILED, "out of memory");
    call->recorded++;
    return call->opts.batches && call->recorded >= call->opts.batches ? -1 : 0;
}

/* Print a look; @redraw: in place of the one before. */
static int show(struct kc_events_call *call, const struct kc_source *source, uint64_t start_ns,
                bool redraw)
{
    struct kc_look look = {.url = call->url,
                           .seconds = (double)(kv_now_ns() - start_ns) / 1e9,
                           .now_ns = kv_wall_ns()};
    struct kv_buf out = KV_BUF_INIT;
    int rc;

    kc_source_state(source, &look.state);
    if (redraw)
        kv_buf_puts(&out, "\033[H\033[J");
    if (call->opts.json)
        kc_stat_json(&out, &call->follower, &look);
    else
        kc_stat_text(&out, &call->follower, &look);
    rc = out.error ? kc_events_fail(call, KC_EVENTS_FAILED, "out of memory") : 0;
    if (rc == 0 && (fwrite(out.data, 1, out.len, stdout) != out.len || fflush(stdout)))
        rc = kc_events_fail(call, KC_EVENTS_FAILED, "can't write standard output");
    kv_buf_fini(&out);
    return rc;
}

static int listen_on(struct kc_events_call *call, struct kc_source *source)
{
    bool redraw = isatty(STDOUT_FILENO) && !call->opts.json;
    uint64_t start_ns = kv_now_ns(), next_ns = start_ns;
    uint64_t end_ns = kv_ns_after(start_ns, call->opts.time_ms ? call->opts.time_ms : DEFAULT_MS);
    int rc = 0, shown = 0;

    while (rc == 0 && shown == 0 && next_ns < end_ns && !kc_bar_interrupted()) {
        next_ns = KV_MIN(next_ns + KV_NS_PER_S, end_ns);
        rc = kc_source_run(source, next_ns, take, call);
        if (rc == 0 && (redraw || call->opts.json) && next_ns < end_ns && !kc_bar_interrupted())
            shown = show(call, source, start_ns, redraw);
    }
    if (rc <= 0 && shown == 0)
        shown = show(call, source, start_ns, redraw);
    return rc > 0 ? rc : shown;
}

int kc_events_stat(struct kc_events_call *call)
{
    struct kc_source_state state;
    struct kc_source *source;
    struct kv_error error = {0};
    int rc;

    if (kc_source_open(call->url, &call->opts.nats, NULL, &source, &error) < 0)
        return kc_events_fail_open(call, &error);
    rc = kc_events_end(call, listen_on(call, source));
    kc_source_state(source, &state);
    kc_source_close(source);
    return rc == KC_EVENTS_BAD && !state.ever ? KC_EVENTS_UNREACHED : rc;
}
