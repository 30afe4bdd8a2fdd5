// SPDX-License-Identifier: Apache-2.0
#include "indexer/configured.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/ascii.h"
#include "base/core/log.h"
#include "indexer/api/body_groups.h"
#include "indexer/model/lookup.h"

/* -- at the start ------------------------------------------------------------------------------ */

int ki_configured_habits(const struct ki_options *o, struct ki_habits *ret, struct kv_error *error)
{
    enum ki_report_mode report_mode = KI_REPORTS_UNKNOWN;
    struct kve_told told = {0};
    struct kv_error why = {0};
    uint64_t groups = 0;

    if (o->report_mode)
        (void)ki_report_mode_parse(o->report_mode, strlen(o->report_mode), &report_mode);
    if (o->eagle_groups && !o->eagle_drop)
        return kv_fail(error, -EINVAL, 0, "--eagle-groups needs --eagle-drop");
    if (o->eagle_groups && ki_groups_parse(o->eagle_groups, strlen(o->eagle_groups), &groups) < 0)
        return kv_fail(error, -EINVAL, 0, "--eagle-groups: no numbers from 0 to 63 and commas");
    if (o->groups && ki_told_read_text(o->groups, &told, &why) < 0)
        return kv_fail(error, -EINVAL, 0, "--groups: %.180s", why.text);
    if (ki_told_check(&told, (uint32_t)o->block_size, &why) < 0)
        return kv_fail(error, -EINVAL, 0, "--groups: %.180s", why.text);
    *ret = (struct ki_habits){.eagle_drop = o->eagle_drop,
                              .eagle_groups = groups,
                              .groups = told,
                              .silent_windows = o->silent_windows,
                              .report_mode = report_mode};
    return 0;
}

static struct ki_registration registration_of(const struct ki_options *o,
                                              const struct ki_worker_spec *spec,
                                              const struct ki_habits *habits, uint64_t version)
{
    return (struct ki_registration){
        .instance = spec->instance,
        .name = spec->name,
        .rank = spec->rank,
        .block_size = (uint32_t)o->block_size,
        .endpoint = spec->endpoint,
        .replay_endpoint = spec->replay_endpoint,
        .habits = *habits,
        .model = o->model_name,
        .tenant = o->tenant_id,
        .version = version,
    };
}

static int register_worker(struct ki_service *service, const struct ki_options *o,
                           const struct ki_worker_spec *spec, const struct ki_habits *habits,
                           uint64_t version, struct kv_error *error)
{
    const struct ki_registration registration = registration_of(o, spec, habits, version);
    struct kv_error why = {0};
    int rc = ki_registry_register(service->registry, &registration, &why);

    return rc < 0 ? kv_fail(error, rc, 0, "--workers: %.180s", why.text) : 0;
}

/* Warn of options that describe workers where neither --workers nor --dynamo names any. */
static void warn_of_unused(const struct ki_options *o)
{
    const struct {
        const char *name;
        bool given;
    } options[] = {
        {"block-size", o->block_size > 0 && !o->nats},
        {"model-name", !o->in_section && !o->nats && strcmp(o->model_name, "default") != 0},
        {"tenant-id", !o->nats && strcmp(o->tenant_id, "default") != 0},
        {"hash-lookahead", o->hash_lookahead > 0},
        {"eagle-drop", o->eagle_drop},
        {"eagle-groups", o->eagle_groups},
        {"groups", o->groups},
        {"silent-windows", o->silent_windows},
        {"kv-cache-report-mode", o->report_mode},
    };

    for (size_t i = 0; i < KV_COUNT(options); i++)
        if (options[i].given)
            kv_log_warn("service", "an option has no effect without --workers", "option=--%s",
                        options[i].name);
}

/* Register the workers of @o: the command line's part of the options, or a section. */
static int register_fleet(struct ki_service *service, const struct ki_options *o,
                          struct kv_error *error)
{
    struct ki_worker_spec *specs;
    struct ki_habits habits;
    long n;
    int rc;

    if (!ki_options_have_workers(o)) {
        if (!o->dynamo && !o->discover.n)
            warn_of_unused(o);
        return 0;
    }
    rc = ki_configured_habits(o, &habits, error);
    if (rc < 0)
        return rc;
    n = ki_worker_specs_parse(&o->workers, &specs, error);
    if (n < 0)
        return (int)n;
    for (long i = 0; i < n && rc == 0; i++)
        /* Version 1: configured once, so that news of peers overrides it. */
        rc = register_worker(service, o, &specs[i], &habits, 1, error);
    if (rc == 0 && o->hash_lookahead)
        ki_registry_note_forms(service->registry, o->model_name, o->tenant_id,
                               KI_FORM(o->hash_lookahead, false));
    ki_worker_specs_free(specs, n);
    return rc;
}

int ki_configured_register(struct ki_service *service, struct kv_error *error)
{
    int rc = 0;

    for (const struct ki_options *o = service->options; o && rc == 0; o = o->next)
        rc = register_fleet(service, o, error);
    return rc;
}

/* -- again ------------------------------------------------------------------------------------- */

/* A worker, and the part of the options that tells of it. */
struct told {
    const struct ki_worker_spec *spec;
    const struct ki_options *of;
};

/* Workers of the options outside of sections, or of one section. */
struct part {
    struct ki_worker_spec *specs;
    long n;
};

/* All workers of options and sections. */
struct fleet {
    struct told *items;
    size_t n;
    struct part *parts;
    size_t n_parts;
};

static void fleet_fini(struct fleet *fleet)
{
    for (size_t i = 0; fleet->parts && i < fleet->n_parts; i++)
        ki_worker_specs_free(fleet->parts[i].specs, fleet->parts[i].n);
    free(fleet->parts);
    free(fleet->items);
}

static int add_part(struct fleet *fleet, const struct ki_options *o, struct kv_error *error)
{
    struct part *parts = realloc(fleet->parts, (fleet->n_parts + 1) * sizeof(*parts));
    struct part part = {0};
    struct ki_habits habits;
    struct told *items;
    int rc;

    if (!parts)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    fleet->parts = parts;
    rc = ki_configured_habits(o, &habits, error);
    if (rc < 0)
        return rc;
    part.n = ki_worker_specs_parse(&o->workers, &part.specs, error);
    if (part.n < 0)
        return (int)part.n;
    fleet->parts[fleet->n_parts++] = part;
    items = realloc(fleet->items, (fleet->n + (size_t)part.n + 1) * sizeof(*items));
    if (!items)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    fleet->items = items;
    for (long i = 0; i < part.n; i++)
        items[fleet->n++] = (struct told){&part.specs[i], o};
    return 0;
}

static int fleet_init(struct fleet *fleet, const struct ki_options *options, struct kv_error *error)
{
    int rc = 0;

    *fleet = (struct fleet){0};
    for (const struct ki_options *o = options; o && rc == 0; o = o->next)
        rc = add_part(fleet, o, error);
    if (rc < 0)
        fleet_fini(fleet);
    return rc;
}

static bool is_same(const struct told *a, const struct told *b)
{
    const struct ki_options *x = a->of, *y = b->of;

    return kv_same_text(a->spec->endpoint, b->spec->endpoint) &&
           kv_same_text(a->spec->replay_endpoint, b->spec->replay_endpoint) &&
           kv_same_text(x->model_name, y->model_name) && kv_same_text(x->tenant_id, y->tenant_id) &&
           x->block_size == y->block_size && x->hash_lookahead == y->hash_lookahead &&
           x->eagle_drop == y->eagle_drop && kv_same_text(x->eagle_groups, y->eagle_groups) &&
           kv_same_text(x->groups, y->groups) && x->silent_windows == y->silent_windows &&
           kv_same_text(x->report_mode, y->report_mode);
}

static const struct told *find(const struct fleet *fleet, const struct ki_worker_spec *spec)
{
    for (size_t i = 0; i < fleet->n; i++)
        if (fleet->items[i].spec->instance == spec->instance &&
            fleet->items[i].spec->rank == spec->rank)
            return &fleet->items[i];
    return NULL;
}

/* Check that two workers of one configuration can both be registered. */
static int check_pair(const struct told *a, const struct told *b, struct kv_error *error)
{
    const struct ki_options *x = a->of, *y = b->of;
    bool same_model =
        kv_same_text(x->model_name, y->model_name) && kv_same_text(x->tenant_id, y->tenant_id);
    char digits[KV_INSTANCE_DIGITS];
    const char *text = kv_instance_text(a->spec->instance, a->spec->name, digits);

    if (a->spec->instance == b->spec->instance && a->spec->name && b->spec->name &&
        !kv_same_text(a->spec->name, b->spec->name))
        return kv_fail(error, -EEXIST, 0,
                       "--workers: instances %.60s and %.60s have the same number: rename one",
                       a->spec->name, b->spec->name);
    if (a->spec->instance == b->spec->instance && a->spec->rank == b->spec->rank)
        return kv_fail(error, -EEXIST, 0,
                       "--workers: instance %.60s dp_rank %" PRIu32 " is listed twice", text,
                       a->spec->rank);
    if (a->spec->instance == b->spec->instance && !same_model)
        return kv_fail(error, -EEXIST, 0,
                       "--workers: instance %.60s is listed for model=%.60s and model=%.60s", text,
                       x->model_name, y->model_name);
    if (same_model && x->block_size != y->block_size)
        return kv_fail(error, -EEXIST, 0,
                       "--block-size: %" PRIu64 " and %" PRIu64 " for model=%.60s", x->block_size,
                       y->block_size, x->model_name);
    return 0;
}

/* Check all that can be wrong with the workers of a configuration, before one of the old leaves. */
static int check(struct ki_service *service, const struct fleet *fleet, struct kv_error *error)
{
    int rc = 0;

    for (size_t i = 0; i < fleet->n && rc == 0; i++) {
        const struct told *one = &fleet->items[i];
        struct ki_registration registration;
        struct kv_error why = {0};
        struct ki_habits habits;

        rc = ki_configured_habits(one->of, &habits, error);
        if (rc < 0)
            return rc;
        registration = registration_of(one->of, one->spec, &habits, 0);
        rc = ki_registry_check(service->registry, &registration, &why);
        if (rc < 0)
            return kv_fail(error, rc, 0, "--workers: %.180s", why.text);
        for (size_t j = 0; j < i && rc == 0; j++)
            rc = check_pair(&fleet->items[j], one, error);
    }
    return rc;
}

/* Return true when a client has unregistered the worker, and registered it at another endpoint. */
static bool is_clients(const struct told *told, const struct ki_worker_info *infos, long n)
{
    for (long i = 0; i < n; i++)
        if (infos[i].instance == told->spec->instance && infos[i].rank == told->spec->rank)
            return !kv_same_text(infos[i].endpoint, told->spec->endpoint);
    return false;
}

/* Unregister the workers of @before that @after tells otherwise, or no more. Returns their number. */
static size_t leave(struct ki_service *service, const struct fleet *before,
                    const struct fleet *after)
{
    struct ki_worker_info *infos = NULL;
    long n_infos = ki_registry_workers(service->registry, &infos);
    size_t n = 0;

    for (size_t i = 0; i < before->n; i++) {
        const struct told *old = &before->items[i], *now = find(after, old->spec);
        struct kv_error why = {0};

        if ((now && is_same(old, now)) || is_clients(old, infos, n_infos))
            continue;
        n++;
        if (ki_registry_unregister(service->registry, old->spec->instance, old->of->model_name,
                                   old->of->tenant_id, &old->spec->rank, &why) < 0)
            kv_log_warn("service", "a worker of the old configuration was not unregistered",
                        "reason=\"%s\"", why.text);
    }
    if (n_infos >= 0)
        ki_worker_infos_free(infos, n_infos);
    return n;
}

/* Register the workers that @before told otherwise, or not. Returns their number. */
static size_t join(struct ki_service *service, const struct fleet *before,
                   const struct fleet *after)
{
    size_t n = 0;

    for (size_t i = 0; i < after->n; i++) {
        const struct told *now = &after->items[i], *old = find(before, now->spec);
        struct ki_habits habits;
        struct kv_error why = {0};

        if (old && is_same(old, now))
            continue;
        n++;
        /* The parts were read before: no error. The version is of now, unlike at the start: it is news. */
        if (ki_configured_habits(now->of, &habits, &why) < 0 ||
            register_worker(service, now->of, now->spec, &habits, 0, &why) < 0)
            kv_log_error("service", "a worker of the configuration was not registered",
                         "reason=\"%s\"", why.text);
        else if (now->of->hash_lookahead)
            ki_registry_note_forms(service->registry, now->of->model_name, now->of->tenant_id,
                                   KI_FORM(now->of->hash_lookahead, false));
    }
    return n;
}

static void note_changed(void *arg, const char *name)
{
    struct kv_buf *names = arg;

    if (strcmp(name, "log-level") != 0)
        kv_buf_printf(names, "%s--%s", names->len ? "," : "", name);
}

/* Take over what can change, and tell what can't. */
static void apply(struct ki_service *service, const struct ki_options *after,
                  const struct fleet *old, const struct fleet *new)
{
    struct kv_buf names = KV_BUF_INIT;
    size_t n_left = leave(service, old, new), n_joined = join(service, old, new);

    kv_log_set_level((enum kv_log_level)kv_log_parse_level(after->log_level));
    kv_log_info("service", "configuration read again",
                "workers=%zu registered=%zu unregistered=%zu log_level=%s", new->n, n_joined,
                n_left, after->log_level);
    /* Compare with the start: what needs a restart goes on to need it. */
    ki_options_compare(service->options, after, note_changed, &names);
    if (names.len)
        kv_log_warn("service", "these options have changed and need a restart", "options=%s",
                    kv_buf_cstr(&names));
    kv_buf_fini(&names);
}

/* Compare and take over. Nothing has changed on an error. */
static int take_over(struct ki_service *service, const struct ki_options *after,
                     struct kv_error *error)
{
    const struct ki_options *before = service->reread ? service->reread : service->options;
    struct fleet old, new;
    int rc = fleet_init(&new, after, error);

    if (rc < 0)
        return rc;
    rc = check(service, &new, error);
    if (rc == 0)
        rc = fleet_init(&old, before, error);
    if (rc == 0) {
        apply(service, after, &old, &new);
        fleet_fini(&old);
    }
    fleet_fini(&new);
    return rc;
}

void ki_configured_reload(struct ki_service *service)
{
    const struct ki_options *o = service->options;
    struct ki_options *after = calloc(1, o->program ? o->program->size : sizeof(*after));
    struct kv_error error = {0};
    int rc;

    if (!after) {
        kv_log_error("service", "the configuration was not read again: out of memory", NULL);
        return;
    }
    rc = ki_options_parse(o->program, o->argc, o->argv, after, &error);
    if (rc == 0)
        rc = take_over(service, after, &error);
    if (rc == 0) {
        ki_configured_free(service);
        service->reread = after;
        if (ki_discovery_reload(service->discovery, after, &error) < 0)
            kv_log_error("service", "the sources of workers were not read again; the old ones stay",
                         "reason=\"%s\"", error.text);
        return;
    }
    kv_log_error("service", "the configuration was not read again; the old one stays",
                 "reason=\"%s\"", error.text);
    ki_options_fini(after);
    free(after);
}

void ki_configured_free(struct ki_service *service)
{
    if (!service->reread)
        return;
    ki_options_fini(service->reread);
    free(service->reread);
    service->reread = NULL;
}
