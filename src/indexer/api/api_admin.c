// SPDX-License-Identifier: Apache-2.0
/* Endpoints of registrations, workers and peers, and the listener controls for tests. */
#include <inttypes.h>
#include <string.h>

#include "base/json/json.h"
#include "indexer/api/body_groups.h"
#include "indexer/api/body_registration.h"
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

static int register_worker(struct ki_service *service, const struct ki_body *body,
                           struct kv_error *error)
{
    struct ki_registration registration;
    int rc = ki_body_registration(body, &registration, error);

    if (rc == 0)
        rc = ki_registry_register(service->registry, &registration, error);
    if (rc == 0 && (body->present & KI_HASH_LOOKAHEAD))
        ki_registry_note_forms(service->registry, registration.model, registration.tenant,
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
                     KI_REGISTRATION_OPTIONAL, scratch)) {
        const struct ki_body *body = &scratch->body;

        /*
         * The worker's old blocks are being removed, which may take seconds: wait on a slow thread.
         */
        if (!request->may_wait && ki_registry_is_leaving(service->registry, body->instance_id))
            reply->rerun = true;
        else
            reply_result(reply, register_worker(service, body, &error), 201, &error);
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
