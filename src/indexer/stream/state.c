// SPDX-License-Identifier: Apache-2.0
/*
 * A stream's state: copied from a listener, given to one, written to a dump and read from it.
 *
 *     listener ── take ──► ki_state ── write ──► dump ── read ──► ki_state ── give ──► replica's
 *
 * Invariant: one table names the facts for all four, so none can be told and not be read back.
 */
#include "indexer/stream/state.h"

#include <stddef.h>

#include "indexer/stream/listener.h"

/*
 * Where a fact lies in a listener. ADRIFT lies nowhere: it follows from the connection. BEHIND follows
 * from the backlog, too: a replica's own connection may be younger than the batches that wait here.
 */
static const struct {
    enum ki_fact fact;
    const char *name;
    size_t offset; /* of a bool; 0: none */
} facts[] = {
    {KI_FACT_WINDOWS, "has_windows", offsetof(struct ki_listener, applier.has_windows)},
    {KI_FACT_HEALED, "healed", offsetof(struct ki_listener, stream.healed)},
    {KI_FACT_REPORTS, "has_reports", offsetof(struct ki_listener, applier.reports.seen)},
    {KI_FACT_SUSPECTS, "suspects_reports", offsetof(struct ki_listener, applier.reports.suspects)},
    {KI_FACT_TRUSTED, "trusts_copies", offsetof(struct ki_listener, applier.reports.trusted)},
    {KI_FACT_RETAINS, "retains", offsetof(struct ki_listener, applier.retains)},
    {KI_FACT_BEHIND, "behind", offsetof(struct ki_listener, stream.behind)},
    {KI_FACT_ADRIFT, "adrift", 0},
};

void ki_state_take(const struct ki_listener *l, struct ki_state *ret)
{
    *ret = (struct ki_state){
        .sequence = l->stream.position,
        .timestamp = l->stream.timestamp,
        .reasons = ki_listener_reasons_of_replicas(l),
        .facts = (l->stream.contact != KI_CONTACT_MET ? KI_FACT_ADRIFT : 0) |
                 (!STAILQ_EMPTY(&l->backlog.items) ? KI_FACT_BEHIND : 0),
        .report_mode = l->applier.reports.mode,
        .n_real = l->applier.ranges.n_real,
    };
    for (size_t i = 0; i < KV_COUNT(facts); i++)
        if (facts[i].offset && *(const bool *)((const char *)l + facts[i].offset))
            ret->facts |= facts[i].fact;
}

void ki_state_give(const struct ki_state *state, struct ki_listener *l)
{
    for (size_t i = 0; i < KV_COUNT(facts); i++)
        if (facts[i].offset)
            *(bool *)((char *)l + facts[i].offset) = state->facts & facts[i].fact;
    if (l->applier.reports.mode == KI_REPORTS_UNKNOWN)
        l->applier.reports.mode = state->report_mode;
    /* HEALED was said of the ranks that came with the dump: only a further one is a new one. */
    l->applier.n_cleared = ki_applier_n_brought(&l->applier);
}

/* -- in dumps ---------------------------------------------------------------------------------- */

void ki_state_write(const struct ki_state *state, struct kv_json_writer *w)
{
    kv_json_member_u64(w, "seq", state->sequence);
    kv_json_member_double(w, "timestamp", state->timestamp);
    kv_json_key(w, "reasons");
    ki_reasons_write(w, state->reasons);
    kv_json_key(w, "facts");
    kv_json_begin_array(w);
    for (size_t i = 0; i < KV_COUNT(facts); i++)
        if (state->facts & facts[i].fact)
            kv_json_put_str(w, facts[i].name);
    kv_json_end_array(w);
    if (state->report_mode)
        kv_json_member_str(w, "report_mode", ki_report_mode_name(state->report_mode));
    if (state->n_real)
        kv_json_member_u64(w, "real_copies", state->n_real);
}

/* Names of other versions are passed over. */
static unsigned read_facts(struct kv_json *json)
{
    struct kv_buf scratch = {.limit = 64};
    unsigned read = 0;

    kv_json_array(json);
    while (kv_json_next_item(json)) {
        struct kv_str name = kv_json_str(json, &scratch);

        for (size_t i = 0; i < KV_COUNT(facts); i++)
            read |= kv_str_eq(name, facts[i].name) ? facts[i].fact : 0;
    }
    kv_buf_fini(&scratch);
    return read;
}

static enum ki_report_mode read_report_mode(struct kv_json *json)
{
    enum ki_report_mode mode = KI_REPORTS_UNKNOWN;
    struct kv_buf scratch = {.limit = 64};
    struct kv_str name = kv_json_str(json, &scratch);

    (void)ki_report_mode_parse(name.p, name.len, &mode);
    kv_buf_fini(&scratch);
    return mode;
}

bool ki_state_read(struct ki_state *state, struct kv_json *json, struct kv_str key)
{
    if (kv_str_eq(key, "seq"))
        state->sequence = kv_json_u64(json, UINT64_MAX);
    else if (kv_str_eq(key, "timestamp"))
        state->timestamp = kv_json_null(json) ? 0 : kv_json_double(json);
    else if (kv_str_eq(key, "reasons"))
        state->reasons = ki_reasons_read(json);
    else if (kv_str_eq(key, "facts"))
        state->facts = read_facts(json);
    else if (kv_str_eq(key, "report_mode"))
        state->report_mode = read_report_mode(json);
    else if (kv_str_eq(key, "real_copies"))
        state->n_real = (uint32_t)kv_json_u64(json, UINT32_MAX);
    else
        return false;
    return true;
}
