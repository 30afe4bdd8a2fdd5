// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/net/bind.h"
#include "grpc/impl.h"

static int open_listener(struct kg_server *server, struct kv_error *error)
{
    int rc = kv_bind(server->opts.host, server->opts.port, &server->listener, &server->port, error);

    if (rc == 0 && listen(server->listener, 1024) < 0)
        rc =
            kv_fail(error, -errno, 0, "can't listen on port %u: %s", server->port, strerror(errno));
    return rc;
}

static void set_opts(struct kg_server *server, const struct kg_opts *opts)
{
    struct kg_opts *o = &server->opts;

    *o = *opts;
    o->threads = KV_MIN(o->threads ? o->threads : 2, (uint32_t)KG_MAX_LOOPS);
    o->max_connections = o->max_connections ? o->max_connections : 1024;
    o->max_calls = o->max_calls ? o->max_calls : 16384;
    o->max_message = o->max_message ? o->max_message : (size_t)4 << 20;
    o->max_incomplete = o->max_incomplete ? o->max_incomplete : (size_t)256 << 20;
    o->max_answers = o->max_answers ? o->max_answers : (size_t)256 << 20;
    o->drain_ms = o->drain_ms ? o->drain_ms : 5000;
}

static int start_loops(struct kg_server *server)
{
    int rc = 0;

    for (uint32_t i = 0; i < server->opts.threads && rc == 0; i++) {
        rc = kg_loop_create(server, i, &server->loops[i]);
        server->n_loops += rc == 0;
    }
    for (uint32_t i = 0; i < server->n_loops && rc == 0; i++) {
        char name[16];

        snprintf(name, sizeof(name), "kv-grpc-%u", i % 100);
        rc = kv_thread_start(&server->loops[i]->thread, name, kg_loop_run, server->loops[i]);
        server->loops[i]->started = rc == 0;
    }
    return rc;
}

int kg_server_start(const struct kg_opts *opts, struct kg_server **ret, struct kv_error *error)
{
    struct kg_server *server = calloc(1, sizeof(*server));
    int rc;

    if (!server)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    server->listener = -1;
    set_opts(server, opts);
    rc = kg_conn_callbacks(server);
    if (rc < 0)
        kv_fail(error, rc, 0, "out of memory");
    else
        rc = open_listener(server, error);
    if (rc == 0) {
        *ret = server; /* callbacks may begin before this call returns, and post */
        rc = start_loops(server);
        if (rc < 0)
            kv_fail(error, rc, 0, "can't start the threads: %s", strerror(-rc));
    }
    if (rc < 0) {
        kg_server_stop(server);
        kg_server_destroy(server);
        *ret = NULL;
        return rc;
    }
    return 0;
}

uint16_t kg_server_port(const struct kg_server *server)
{
    return server->port;
}

void kg_server_stop(struct kg_server *server)
{
    atomic_store_explicit(&server->stop, true, memory_order_release);
    for (uint32_t i = 0; i < server->n_loops; i++)
        kv_wake_signal(&server->loops[i]->wake);
    for (uint32_t i = 0; i < server->n_loops; i++) {
        if (server->loops[i]->started)
            pthread_join(server->loops[i]->thread, NULL);
        server->loops[i]->started = false;
    }
    if (server->listener >= 0)
        close(server->listener);
    server->listener = -1;
}

void kg_server_destroy(struct kg_server *server)
{
    if (!server)
        return;
    for (uint32_t i = 0; i < server->n_loops; i++)
        kg_loop_destroy(server->loops[i]);
    nghttp2_session_callbacks_del(server->callbacks);
    nghttp2_option_del(server->option);
    free(server);
}

void kg_server_get_stats(struct kg_server *server, struct kg_stats *ret)
{
    ret->connections = atomic_load_explicit(&server->connections, memory_order_relaxed);
    ret->answer_bytes = atomic_load_explicit(&server->answers, memory_order_relaxed);
    ret->calls = atomic_load_explicit(&server->calls, memory_order_relaxed);
}
