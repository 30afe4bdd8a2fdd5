// SPDX-License-Identifier: Apache-2.0
/* Endpoints of registrations, workers and peers, and the listener controls for tests. */
#include <inttypes.h>
#include <string.h>

#include "base/json/json.h"
#include "indexer/api/body_groups.h"
#include "indexer/api/explain.h"
#include "indexer/model/lookup.h"
#include "indexer/service.h"

/* -- registrations ----------------------------------------------------------------------------- */

static unsigned status_of(int rc)
{
    switch (rc) {
    case -EINVAL:
        return 400;
    case -EACCES:
        return 403;
    case -ENOENT:
        return 404;
    case -EEXIST:
    case -EALREADY:
        return 409;
    case -ENOSPC:
    case -ENOMEM:
        return 503;
    default:
        return 500;
    }
}

static void reply_result(struct kh_reply *reply, int rc, unsigned status,
                         const struct kv_error *error)
{
    if (rc == 0)
        ki_reply_ok(reply, status);
    else
        kh_reply_error(reply, status_of(rc), "%s", error->text);
}

static struct ki_habits habits_of(const struct ki_body *body)
{
    struct ki_habits habits = {
        .eagle_drop = body->present & KI_EAGLE_DROP && body->eagle_drop,
        .groups = body->groups,
        .silent_windows = body->present & KI_SILENT_WINDOWS && body->silent_windows,
    };

    if (body->report_mode)
        (void)ki_report_mode_parse(body->report_mode, strlen(body->report_mode),
                                   &habits.report_mode);
    if (body->eagle_groups)
        (void)ki_groups_parse(body->eagle_groups, strlen(body->eagle_groups), &habits.eagle_groups);
    return habits;
}

static int register_worker(struct ki_service *service, const struct ki_body *body,
                           const struct ki_registration *registration, struct kv_error *error)
{
    int rc;

    if (body->block_size > KI_MAX_BLOCK_SIZE)
        return kv_fail(error, -EINVAL, 0, "block_size must be at most %d", KI_MAX_BLOCK_SIZE);
    if (body->hash_lookahead > KI_MAX_LOOKAHEAD)
        return kv_fail(error, -EINVAL, 0, "hash_lookahead is above %d", KI_MAX_LOOKAHEAD);
    if (body->report_mode && !registration->habits.report_mode)
        return kv_fail(error, -EINVAL, 0, "kv_cache_report_mode is neither full nor incremental");
    if (body->eagle_groups && !registration->habits.eagle_groups)
        return kv_fail(error, -EINVAL, 0, "eagle_groups are no numbers from 0 to 63 and commas");
    if (body->eagle_groups && !registration->habits.eagle_drop)
        return kv_fail(error, -EINVAL, 0, "eagle_groups needs eagle_drop");
    rc = ki_told_check(&body->groups, (uint32_t)body->block_size, error);
    if (rc < 0)
        return rc;
    rc = ki_registry_register(service->registry, registration, error);
    if (rc == 0 && (body->present & KI_HASH_LOOKAHEAD))
        ki_registry_note_forms(service->registry, registration->model, registration->tenant,
                               KI_FORM(body->hash_lookahead, false));
    return rc;
}

/*
 * Check the name in a request about a registered instance, and note it for answers. The number may be
 * of another name: there is no such instance then. Returns 0, -ENOENT or -ENOMEM with @error.
 */
static int find_named(struct ki_service *service, const struct ki_body *body,
                      struct kv_error *error)
{
    int rc =
        ki_registry_name_instance(service->registry, body->instance_id, body->instance_name, error);

    return rc == -EEXIST
               ? kv_fail(error, -ENOENT, 0, "instance %.60s not found", body->instance_name)
               : rc;
}

void ki_api_register(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_scratch *scratch = ki_scratch_take(service, reply);
    struct kv_error error = {0};

    if (!scratch)
        return;
    if (ki_read_body(request, reply, KI_INSTANCE_ID | KI_ENDPOINT | KI_MODEL_NAME | KI_BLOCK_SIZE,
                     KI_TENANT_ID | KI_DP_RANK | KI_REPLAY_ENDPOINT | KI_NUM_BLOCKS |
                         KI_HASH_LOOKAHEAD | KI_EAGLE_DROP | KI_EAGLE_GROUPS | KI_GROUPS |
                         KI_SILENT_WINDOWS | KI_REPORT_MODE,
                     scratch)) {
        const struct ki_body *body = &scratch->body;
        const struct ki_registration registration = {
            .instance = body->instance_id,
            .name = body->instance_name,
            .rank = (uint32_t)body->dp_rank,
            .block_size = (uint32_t)body->block_size,
            .endpoint = body->endpoint,
            .replay_endpoint = body->replay_endpoint,
            .num_blocks = body->present & KI_NUM_BLOCKS ? body->num_blocks : 0,
            .habits = habits_of(body),
            .model = body->model_name,
            .tenant = body->tenant_id ? body->tenant_id : "default",
        };

        /*
         * The worker's old blocks are being removed, which may take seconds: wait on a slow thread.
         */
        if (!request->may_wait && ki_registry_is_leaving(service->registry, body->instance_id))
            reply->rerun = true;
        else
            reply_result(reply, register_worker(service, body, &registration, &error), 201, &error);
    }
    ki_scratch_give(service, scratch);
}

static int unregister_worker(struct ki_service *service, const struct ki_body *body,
                             struct kv_error *error)
{
    const uint32_t rank = (uint32_t)body->dp_rank;
    bool one_rank = body->tenant_id && (body->present & KI_DP_RANK);
    int rc = find_named(service, body, error);

    if (rc < 0)
        return rc;
    return ki_registry_unregister(service->registry, body->instance_id, body->model_name,
                                  body->tenant_id, one_rank ? &rank : NULL, error);
}

/*
 * Unregister. Without a tenant the whole instance goes, whatever dp_rank says, as in the original.
 * Removing millions of blocks takes seconds; the reply follows the removal.
 */
void ki_api_unregister(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_scratch *scratch;
    struct kv_error error = {0};

    if (!request->may_wait) {
        reply->rerun = true;
        return;
    }
    scratch = ki_scratch_take(service, reply);
    if (!scratch)
        return;
    if (ki_read_body(request, reply, KI_INSTANCE_ID | KI_MODEL_NAME, KI_TENANT_ID | KI_DP_RANK,
                     scratch)) {
        const struct ki_body *body = &scratch->body;
        reply_result(reply, unregister_worker(service, body, &error), 200, &error);
    }
    ki_scratch_give(service, scratch);
}

/* -- workers ----------------------------------------------------------------------------------- */

/* Return the status of an instance: that of the rank that most needs attention. */
static enum ki_listener_status worst(const struct ki_worker_info *infos, long n)
{
    static const int order[] = {
        [KI_PAUSED] = 0, [KI_ACTIVE] = 1, [KI_REPLAYING] = 2, [KI_PENDING] = 3, [KI_FAILED] = 4};
    enum ki_listener_status status = infos[0].status;

    for (long i = 1; i < n; i++)
        if (order[infos[i].status] > order[status])
            status = infos[i].status;
    return status;
}

/* Write what arrived and doesn't count, where there is any. */
static void write_left_out(struct kv_json_writer *w, const struct ki_worker_info *info)
{
    if (info->malformed)
        kv_json_member_u64(w, "malformed", info->malformed);
    if (info->unnumbered)
        kv_json_member_bool(w, "unnumbered", true);
    if (info->event_block_size)
        kv_json_member_u64(w, "event_block_size", info->event_block_size);
    ki_explain_skipped(w, info->skipped, &info->unknown_media);
}

static void write_listener(struct kv_json_writer *w, const struct ki_worker_info *info)
{
    kv_json_begin_object(w);
    kv_json_member_str(w, "endpoint", info->endpoint);
    if (info->replay_endpoint)
        kv_json_member_str(w, "replay_endpoint", info->replay_endpoint);
    kv_json_member_str(w, "status", ki_listener_status_name(info->status));
    kv_json_member_bool(w, "connected", info->connected);
    if (!info->connected)
        kv_json_member_u64(w, "disconnected_ms", info->absent_ms);
    if (info->last_error)
        kv_json_member_str(w, "last_error", info->last_error);
    if (info->has_sequence)
        kv_json_member_u64(w, "last_seq", info->last_sequence);
    kv_json_member_u64(w, "blocks", info->held);
    kv_json_member_u64(w, "batches", info->batches);
    kv_json_member_u64(w, "gaps", info->gaps);
    kv_json_member_u64(w, "missed_batches", info->missed_batches);
    kv_json_member_bool(w, "partial", info->reasons != 0);
    if (info->reasons) {
        kv_json_key(w, "partial_reasons");
        ki_reasons_write(w, info->reasons);
    }
    if (info->n_groups) {
        kv_json_key(w, "groups");
        ki_groups_write(info->groups, info->n_groups, info->block_size, w);
    }
    write_left_out(w, info);
    kv_json_end_object(w);
}

static void write_worker(struct kv_json_writer *w, const struct ki_worker_info *infos, long n)
{
    kv_json_begin_object(w);
    if (infos->name)
        kv_json_member_str(w, "instance_id", infos->name);
    else
        kv_json_member_u64(w, "instance_id", infos->instance);
    kv_json_member_str(w, "source", "zmq");
    kv_json_member_str(w, "status", ki_listener_status_name(worst(infos, n)));
    kv_json_member_str(w, "model_name", infos->model);
    kv_json_member_str(w, "tenant_id", infos->tenant);
    kv_json_member_str(w, "routing_group", infos->tenant);
    kv_json_member_u64(w, "block_size", infos->block_size);
    kv_json_key(w, "endpoints");
    kv_json_begin_object(w);
    for (long i = 0; i < n; i++) {
        kv_json_key_u64(w, infos[i].rank);
        kv_json_put_str(w, infos[i].endpoint);
    }
    kv_json_end_object(w);
    kv_json_key(w, "listeners");
    kv_json_begin_object(w);
    for (long i = 0; i < n; i++) {
        kv_json_key_u64(w, infos[i].rank);
        write_listener(w, &infos[i]);
    }
    kv_json_end_object(w);
    kv_json_end_object(w);
}

static bool passes(const struct kh_request *request, const char *param, const char *value)
{
    struct kv_str wanted;

    return !kh_request_param(request, param, &wanted) || kv_str_eq(wanted, value);
}

/* routing_group overrides tenant_id, as in bodies. */
static bool passes_tenant(const struct kh_request *request, const char *tenant)
{
    struct kv_str unused;
    bool group = kh_request_param(request, "routing_group", &unused);

    return passes(request, group ? "routing_group" : "tenant_id", tenant);
}

void ki_api_workers(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_worker_info *infos;
    struct kv_json_writer w;
    long n = ki_registry_workers(service->registry, &infos);

    if (n < 0) {
        kh_reply_error(reply, 503, "out of memory");
        return;
    }
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_array(&w);
    for (long i = 0, end; i < n; i = end) {
        end = i + 1;
        while (end < n && infos[end].instance == infos[i].instance)
            end++;
        if (passes(request, "model_name", infos[i].model) &&
            passes_tenant(request, infos[i].tenant))
            write_worker(&w, &infos[i], end - i);
    }
    kv_json_end_array(&w);
    ki_worker_infos_free(infos, n);
}

/* -- peers ------------------------------------------------------------------------------------- */

static void change_peers(struct ki_service *service, struct kh_request *request,
                         struct kh_reply *reply, bool add)
{
    struct ki_scratch *scratch = ki_scratch_take(service, reply);
    int rc;

    if (!scratch)
        return;
    if (ki_read_body(request, reply, KI_URL, 0, scratch)) {
        rc = add ? ki_peers_add(service->peers, scratch->body.url)
                 : ki_peers_remove(service->peers, scratch->body.url);
        if (rc == 0)
            ki_reply_ok(reply, add ? 201 : 200);
        else if (rc == -ENOENT)
            kh_reply_error(reply, 404, "peer not found");
        else if (rc == -EINVAL)
            kh_reply_error(reply, 400, "url: expected " KI_PEER_URL_FORM);
        else if (rc == -EMSGSIZE)
            kh_reply_error(reply, 422, "field 'url': string is too long");
        else
            kh_reply_error(reply, 503, "%s", rc == -ENOSPC ? "too many peers" : "out of memory");
    }
    ki_scratch_give(service, scratch);
}

void ki_api_register_peer(void *service, struct kh_request *request, struct kh_reply *reply)
{
    change_peers(service, request, reply, true);
}

void ki_api_deregister_peer(void *service, struct kh_request *request, struct kh_reply *reply)
{
    change_peers(service, request, reply, false);
}

void ki_api_peers(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct kv_json_writer w;
    char **urls;
    long n = ki_peers_list(service->peers, &urls);

    (void)request;
    if (n < 0) {
        kh_reply_error(reply, 503, "out of memory");
        return;
    }
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_array(&w);
    for (long i = 0; i < n; i++)
        kv_json_put_str(&w, urls[i]);
    kv_json_end_array(&w);
    ki_peers_free(urls, n);
}

/* -- listener controls, for tests -------------------------------------------------------------- */

static void control(struct ki_service *service, struct kh_request *request, struct kh_reply *reply,
                    int (*act)(struct ki_registry *, uint64_t, const uint32_t *), const char *state)
{
    struct ki_scratch *scratch = ki_scratch_take(service, reply);
    char text[KI_INSTANCE_TEXT];
    struct kv_error error = {0};
    uint32_t rank;
    int rc;

    if (!scratch)
        return;
    if (ki_read_body(request, reply, KI_INSTANCE_ID, KI_DP_RANK, scratch)) {
        const struct ki_body *body = &scratch->body;

        rank = (uint32_t)body->dp_rank;
        rc = find_named(service, body, &error);
        ki_registry_instance_text(service->registry, body->instance_id, text);
        if (rc == 0)
            rc = act(service->registry, body->instance_id,
                     body->present & KI_DP_RANK ? &rank : NULL);
        if (rc == -EALREADY)
            (void)kv_fail(&error, rc, 0, "instance %.60s: listener is %s", text, state);
        else if (rc == -ENOENT && !error.code)
            (void)kv_fail(&error, rc, 0, "instance %.60s not found", text);
        else if (rc < 0 && !error.code)
            (void)kv_fail(&error, rc, 0, "out of memory");
        reply_result(reply, rc, 200, &error);
    }
    ki_scratch_give(service, scratch);
}

void ki_api_pause(void *service, struct kh_request *request, struct kh_reply *reply)
{
    control(service, request, reply, ki_registry_pause, "paused already");
}

void ki_api_resume(void *service, struct kh_request *request, struct kh_reply *reply)
{
    control(service, request, reply, ki_registry_resume, "not paused");
}
