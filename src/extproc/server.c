// SPDX-License-Identifier: Apache-2.0
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/random.h>

#include "base/core/clock.h"
#include "base/json/json.h" /* struct kv_str */
#include "ext_proc.pb-c.h"
#include "extproc/arena.h"
#include "extproc/stream.h"

#define PROCESSOR "envoy.service.ext_proc.v3.ExternalProcessor"

struct kx_scratch *kx_scratch_take(struct kx_server *server)
{
    struct kx_scratch *scratch;

    pthread_mutex_lock(&server->lock);
    scratch = server->scratch;
    if (scratch)
        server->scratch = scratch->next;
    pthread_mutex_unlock(&server->lock);
    if (scratch)
        return scratch;
    scratch = calloc(1, sizeof(*scratch));
    if (scratch)
        kx_arena_init(&scratch->arena);
    return scratch;
}

static void shrink(struct kv_buf *buf)
{
    if (buf->capacity > KX_ARENA_LIMIT / 4)
        kv_buf_fini(buf);
}

void kx_scratch_give(struct kx_server *server, struct kx_scratch *scratch)
{
    kx_arena_reset(&scratch->arena);
    shrink(&scratch->prompt.tokens);
    shrink(&scratch->prompt.request);
    pthread_mutex_lock(&server->lock);
    scratch->next = server->scratch;
    server->scratch = scratch;
    pthread_mutex_unlock(&server->lock);
}

/* -- grpc.health.v1 ------------------------------------------------------------------------------ */

static bool health_begin(void *server, struct kg_call *call)
{
    (void)server, (void)call;
    return true;
}

/* "" and liveness: the server answers. readiness and the processor: a worker can be chosen. */
static void answer_health(struct kx_server *server, struct kg_call *call, struct kv_str service)
{
    Kx__HealthCheckResponse answer = KX__HEALTH_CHECK_RESPONSE__INIT;
    uint8_t *room;

    if (kv_str_eq(service, "readiness") || kv_str_eq(service, PROCESSOR)) {
        answer.status = server->picker.ready(server->picker.arg) ? 1 : 2;
    } else if (!service.len || kv_str_eq(service, "liveness")) {
        answer.status = 1;
    } else {
        kg_call_finish(call, KG_NOT_FOUND, "unknown service");
        return;
    }
    room = kg_call_send(call, kx__health_check_response__get_packed_size(&answer));
    if (room)
        kx__health_check_response__pack(&answer, room);
    kg_call_finish(call, KG_OK, NULL);
}

static void health_message(void *server, struct kg_call *call, const void *data, size_t len)
{
    struct kx_scratch *scratch = kx_scratch_take(server);
    Kx__HealthCheckRequest *message;

    if (!scratch) {
        kg_call_finish(call, KG_EXHAUSTED, "out of memory");
        return;
    }
    message = kx__health_check_request__unpack(&scratch->arena.allocator, len, data);
    if (message)
        answer_health(server, call,
                      (struct kv_str){(const char *)message->service.data, message->service.len});
    else
        kg_call_finish(call, KG_INVALID, "not a HealthCheckRequest");
    kx_scratch_give(server, scratch);
}

static void health_half_close(void *server, struct kg_call *call)
{
    (void)server;
    kg_call_finish(call, KG_INVALID, "no message");
}

static void health_end(void *server, struct kg_call *call)
{
    (void)server, (void)call;
}

/* -- start and stop ------------------------------------------------------------------------------ */

static int set_opts(struct kx_server *server, const struct kx_opts *opts)
{
    struct kx_opts *o = &server->opts;
    size_t n = opts->tokenize ? strlen(opts->tokenize) : 0;
    uint64_t random;

    *o = *opts;
    server->picker = *opts->picker;
    o->tokenize_ms = o->tokenize_ms ? o->tokenize_ms : 200;
    o->max_body = o->max_body ? o->max_body : (size_t)8 << 20;
    o->max_bodies = o->max_bodies ? o->max_bodies : (size_t)512 << 20;
    if (getrandom(&random, sizeof(random), 0) != (ssize_t)sizeof(random))
        return -errno;
    snprintf(server->prefix, sizeof(server->prefix), "%016" PRIx64, random);
    while (n > 0 && opts->tokenize[n - 1] == '/')
        n--;
    if (opts->tokenize) {
        server->tokenize = strndup(opts->tokenize, n);
        if (!server->tokenize)
            return -ENOMEM;
    }
    if (!server->tokenize && !server->picker.engine)
        return 0;
    return kx_tokenizer_create(&server->tokenizer);
}

void kx_methods(struct kx_server *server)
{
    server->methods[0] = (struct kg_method){.path = "/" PROCESSOR "/Process",
                                            .arg = server,
                                            .begin = kx_stream_begin,
                                            .message = kx_stream_message,
                                            .half_close = kx_stream_half_close,
                                            .end = kx_stream_end};
    server->methods[1] = (struct kg_method){.path = "/grpc.health.v1.Health/Check",
                                            .arg = server,
                                            .begin = health_begin,
                                            .message = health_message,
                                            .half_close = health_half_close,
                                            .end = health_end};
}

static int start_grpc(struct kx_server *server, struct kv_error *error)
{
    const struct kx_opts *o = &server->opts;
    struct kg_opts opts = {.host = o->host,
                           .port = o->port,
                           .methods = server->methods,
                           .n_methods = KV_COUNT(server->methods),
                           .drain_ms = o->drain_ms};

    kx_methods(server);
    return kg_server_start(&opts, &server->grpc, error);
}

int kx_server_start(const struct kx_opts *opts, struct kx_server **ret, struct kv_error *error)
{
    struct kx_server *server = calloc(1, sizeof(*server));
    int rc;

    if (!server)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    pthread_mutex_init(&server->lock, NULL);
    rc = set_opts(server, opts);
    if (rc == 0)
        rc = kx_metrics_create(server);
    if (rc < 0)
        kv_fail(error, rc, 0, "can't prepare external processing: %s", strerror(-rc));
    else
        rc = start_grpc(server, error);
    if (rc < 0) {
        kx_server_stop(server);
        return rc;
    }
    *ret = server;
    return 0;
}

uint16_t kx_server_port(const struct kx_server *server)
{
    return kg_server_port(server->grpc);
}

void kx_server_stop(struct kx_server *server)
{
    if (!server)
        return;
    if (server->grpc)
        kg_server_stop(server->grpc);
    kx_tokenizer_destroy(server->tokenizer); /* its last answers are posts without a call */
    kg_server_destroy(server->grpc);
    while (server->scratch) {
        struct kx_scratch *scratch = server->scratch;

        server->scratch = scratch->next;
        kx_arena_fini(&scratch->arena);
        kx_prompt_fini(&scratch->prompt);
        kv_buf_fini(&scratch->candidates);
        free(scratch);
    }
    kv_metrics_destroy(server->metrics);
    pthread_mutex_destroy(&server->lock);
    free(server->tokenize);
    free(server);
}
