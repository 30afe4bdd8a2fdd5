// SPDX-License-Identifier: Apache-2.0
/* `kvasir events tail`. */
#include <inttypes.h>

#include "base/core/clock.h"
#include "cli/events/events.h"
#include "cli/events/source.h"

#define HINT_NS (10 * KV_NS_PER_S) /* without any message, before the first hint */

static int take(void *arg, const struct kc_message *message)
{
    struct kc_events_call *call = arg;
    int rc = kc_events_take(arg, message);

    return rc ? rc : call->opts.batches && call->recorded >= call->opts.batches ? -1 : 0;
}

/* Say on standard error why nothing has come so far. */
static void hint(const struct kc_events_call *call, const struct kc_source *source)
{
    struct kc_source_state state;

    kc_source_state(source, &state);
    if (state.problem)
        kc_events_fail(call, 0, "%s", state.problem);
    else if (state.connected)
        kc_events_fail(call, 0, "%s",
                       "connected, no message so far; `kvasir events stat` says what to look at");
    else
        kc_events_fail(call, 0, "no publisher has connected so far");
}

int kc_events_tail(struct kc_events_call *call)
{
    uint64_t start_ns = kv_now_ns(), hint_ns = start_ns + HINT_NS;
    uint64_t end_ns = call->opts.time_ms ? kv_ns_after(start_ns, call->opts.time_ms) : UINT64_MAX;
    const struct kvp_nats_durable *durable = &call->opts.durable;
    struct kc_source_state state = {0};
    struct kc_source *source;
    struct kv_error error = {0};
    int rc;

    if (!durable->name != !durable->stream)
        return kc_events_fail(call, KC_EVENTS_USAGE, "--durable and --stream go together");
    if (kc_source_open(call->url, &call->opts.nats, durable->name ? durable : NULL, &source,
                       &error) < 0)
        return kc_events_fail_open(call, &error);
    rc = kc_events_begin(call);
    if (rc == 0)
        rc = kc_source_run(source, KV_MIN(end_ns, hint_ns), take, call);
    if (rc == 0 && end_ns > hint_ns && kv_now_ns() >= hint_ns) {
        if (!call->recorded)
            hint(call, source);
        rc = kc_source_run(source, end_ns, take, call);
    }
    kc_source_state(source, &state);
    kc_source_close(source);
    rc = kc_events_end(call, rc < 0 ? 0 : rc);
    if (rc == KC_EVENTS_BAD && !state.ever)
        return kc_events_fail(call, KC_EVENTS_UNREACHED, "%s",
                              state.problem ? state.problem : "no publisher has connected");
    return rc;
}
