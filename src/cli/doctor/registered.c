// SPDX-License-Identifier: Apache-2.0
#include <inttypes.h>
#include <string.h>

#include "cli/doctor/doctor.h"
#include "cli/show/format.h"

/* Return true when a listener is one of those that were asked about. */
static bool is_asked(const struct kc_doctor *doctor, const struct kc_listener *l)
{
    return (!doctor->opts.model || strcmp(l->model, doctor->opts.model) == 0) &&
           (!doctor->opts.tenant || strcmp(l->tenant, doctor->opts.tenant) == 0);
}

void kc_find_registered(struct kc_doctor *doctor)
{
    doctor->registered = NULL;
    for (size_t i = 0; doctor->opts.engine && i < doctor->listeners.n; i++) {
        const struct kc_listener *l = &doctor->listeners.items[i];

        if (strcmp(l->endpoint, doctor->opts.engine) == 0 &&
            (!doctor->registered || (is_asked(doctor, l) && !is_asked(doctor, doctor->registered))))
            doctor->registered = l;
    }
}

/* Compare the model and tenant that a router names with those that are registered. */
static void check_names(struct kc_doctor *doctor)
{
    const char *model = doctor->opts.model, *tenant = doctor->opts.tenant;
    bool has_model = false, has_both = false;

    for (size_t i = 0; i < doctor->listeners.n; i++) {
        const struct kc_listener *l = &doctor->listeners.items[i];
        bool same = !model || strcmp(l->model, model) == 0;

        has_model |= same;
        has_both |= same && (!tenant || strcmp(l->tenant, tenant) == 0);
    }
    if (!doctor->listeners.n)
        kc_found(&doctor->report, KC_FINDING_no_workers, "GET /workers lists none");
    else if (!has_model)
        kc_found(&doctor->report, KC_FINDING_unknown_model,
                 "%zu are registered, the first for model %s, none for %s", doctor->listeners.n,
                 doctor->listeners.items[0].model, model);
    else if (!has_both)
        kc_found(&doctor->report, KC_FINDING_unknown_tenant,
                 "the model has registrations, but none for tenant %s", tenant);
}

static void check_listener(struct kc_doctor *doctor, const struct kc_listener *l)
{
    struct kc_report *report = &doctor->report;

    if (!l->connected)
        kc_found(report, KC_FINDING_disconnected, "worker %s:%" PRIu64 " at %s is %s%s%s",
                 l->instance, l->rank, l->endpoint, l->status, l->last_error[0] ? ": " : "",
                 l->last_error);
    if (l->partial)
        kc_found(report, KC_FINDING_partial, "worker %s:%" PRIu64 ": %s", l->instance, l->rank,
                 l->reasons);
    if (l->event_block_size && l->event_block_size != l->block_size)
        kc_found(report, KC_FINDING_block_size,
                 "worker %s:%" PRIu64 " is registered with %" PRIu64 " tokens a block, its events "
                 "have %" PRIu64,
                 l->instance, l->rank, l->block_size, l->event_block_size);
    if (l->malformed)
        kc_found(report, KC_FINDING_malformed, "kv-indexer got %" PRIu64 " of worker %s:%" PRIu64,
                 l->malformed, l->instance, l->rank);
}

/* Find pairs of instances with one endpoint. Those with a topic share it by intention. */
static void check_twins(struct kc_doctor *doctor)
{
    const struct kc_listeners *all = &doctor->listeners;
    size_t n = KV_MIN(all->n, (size_t)4096);

    for (size_t i = 0; i < n; i++)
        for (size_t j = i + 1; j < n; j++)
            if (all->items[i].endpoint[0] && !strchr(all->items[i].endpoint, '#') &&
                strcmp(all->items[i].instance, all->items[j].instance) != 0 &&
                strcmp(all->items[i].endpoint, all->items[j].endpoint) == 0)
                kc_found(&doctor->report, KC_FINDING_registered_twice,
                         "%s belongs to worker %s:%" PRIu64 " and to %s:%" PRIu64,
                         all->items[i].endpoint, all->items[i].instance, all->items[i].rank,
                         all->items[j].instance, all->items[j].rank);
}

/* Does the registration of this engine say what the engine is? */
static void check_engine(struct kc_doctor *doctor)
{
    const struct kc_listener *l = doctor->registered;
    const struct kc_engine *engine = &doctor->engine;

    if (!l) {
        if (doctor->listeners.n)
            kc_found(&doctor->report, KC_FINDING_not_registered, "%s isn't; the first of %zu is %s",
                     doctor->opts.engine, doctor->listeners.n, doctor->listeners.items[0].endpoint);
        return;
    }
    kc_well(&doctor->report,
            "worker %s:%" PRIu64 " of model %s, tenant %s, is registered with this endpoint",
            l->instance, l->rank, l->model, l->tenant);
    if (doctor->opts.replay && strcmp(l->replay_endpoint, doctor->opts.replay) != 0)
        kc_found(&doctor->report, KC_FINDING_registered_replay, "registered is %s, given was %s",
                 l->replay_endpoint[0] ? l->replay_endpoint : "none", doctor->opts.replay);
    if (engine->block_size && engine->block_size != l->block_size &&
        !doctor->report.times[KC_FINDING_block_size])
        kc_found(&doctor->report, KC_FINDING_block_size,
                 "its events have %" PRIu64 " tokens a block, registered are %" PRIu64,
                 engine->block_size, l->block_size);
    if (engine->has_last && l->connected && (!l->has_seq || l->last_seq < engine->last))
        kc_found(&doctor->report, KC_FINDING_behind,
                 "the engine's newest batch is number %" PRIu64 ", kv-indexer has taken %s "
                 "(the stream is %s)",
                 engine->last, l->has_seq ? kc_count(l->last_seq).s : "none", l->status);
    else if (engine->has_last && l->connected)
        kc_well(&doctor->report, "kv-indexer has taken the engine's newest batch, number %" PRIu64,
                engine->last);
}

int kc_check_registered(struct kc_doctor *doctor)
{
    size_t before = kc_report_count(&doctor->report);

    check_names(doctor);
    for (size_t i = 0; i < doctor->listeners.n; i++)
        if (is_asked(doctor, &doctor->listeners.items[i]))
            check_listener(doctor, &doctor->listeners.items[i]);
    check_twins(doctor);
    if (kc_report_count(&doctor->report) == before)
        kc_well(&doctor->report, "%zu registration%s, all connected, all views whole",
                doctor->listeners.n, doctor->listeners.n == 1 ? "" : "s");
    if (doctor->engine.asked)
        check_engine(doctor);
    return 0;
}
