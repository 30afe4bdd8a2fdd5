// SPDX-License-Identifier: Apache-2.0
/** Real nats-servers of a test's own, each in a process of its own, on free ports of loopback. */
#ifndef KV_TEST_PLANE_NATS_UNIT_H
#define KV_TEST_PLANE_NATS_UNIT_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "loopback.h"
#include "plane/nats.h"
#include "skip.h"
#include "support.h"

struct nats_server {
    char folder[300];
    char url[64];
    unsigned port, route; /* of clients; of the cluster's other servers */
    pid_t pid;            /* 0: none runs */
};

static inline bool nats_is_here(void)
{
#ifdef HAS_NATS
    return system("command -v nats-server >/dev/null") == 0;
#else
    return false;
#endif
}

/** End the test, skipped with the reason, where there is no server or no client. */
static inline void nats_or_skip(void)
{
    if (!nats_is_here())
        skip_because("no nats-server (nats-server), or no libkv_nats (libnats-dev)");
}

/** Write a server's configuration: its ports, and the lines of @more. */
static inline void nats_configure(struct nats_server *server, const char *more)
{
    char path[400];
    FILE *file;

    snprintf(path, sizeof(path), "%.299s/nats.conf", server->folder);
    file = fopen(path, "w");
    assert_non_null(file);
    fprintf(file, "listen: 127.0.0.1:%u\nserver_name: n%u\n%s\n", server->port, server->port, more);
    assert_int_equal(fclose(file), 0);
}

/** Choose ports and a folder. */
static inline void nats_make(struct nats_server *server, const char *more)
{
    assert_int_equal(temp_dir(server->folder, sizeof(server->folder)), 0);
    server->port = free_port();
    server->route = free_port();
    snprintf(server->url, sizeof(server->url), "nats://127.0.0.1:%u", server->port);
    nats_configure(server, more);
}

/** The same, of a server with JetStream. */
static inline void nats_make_streams(struct nats_server *server)
{
    char config[400];

    nats_make(server, "");
    snprintf(config, sizeof(config), "jetstream { store_dir: \"%.299s\" }", server->folder);
    nats_configure(server, config);
}

/** Start a server, and wait until it listens. */
static inline void nats_start(struct nats_server *server)
{
    char config[400];

    snprintf(config, sizeof(config), "%.299s/nats.conf", server->folder);
    server->pid = fork();
    assert_true(server->pid >= 0);
    if (server->pid == 0) {
        int log = open("/dev/null", O_WRONLY | O_CLOEXEC);

        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        dup2(log, 1);
        dup2(log, 2);
        execlp("nats-server", "nats-server", "-c", config, (char *)NULL);
        _exit(127);
    }
    wait_until(port_answers(server->port));
}

static inline void nats_kill(struct nats_server *server)
{
    assert_int_equal(kill(server->pid, SIGKILL), 0);
    assert_int_equal(waitpid(server->pid, NULL, 0), server->pid);
    server->pid = 0;
}

/** Let a server read its configuration again. */
static inline void nats_reload(struct nats_server *server)
{
    assert_int_equal(kill(server->pid, SIGHUP), 0);
}

static inline void nats_end(struct nats_server *server)
{
    if (server->pid)
        nats_kill(server);
    if (*server->folder)
        (void)remove_dir(server->folder);
    memset(server, 0, sizeof(*server));
}

static inline bool nats_connected(struct kvp_nats *nats)
{
    struct kvp_nats_stats stats;

    kvp_nats_get_stats(nats, &stats);
    return stats.connected;
}

/** Start a client of @server that tries again every 20 ms. */
static inline struct kvp_nats *nats_client(const struct nats_server *server)
{
    struct kvp_nats_opts opts = {.size = sizeof(opts), .url = server->url, .reconnect_ms = 20};
    struct kvp_nats *nats;

    assert_int_equal(kvp_nats_open(&opts, NULL, NULL, &nats), 0);
    return nats;
}

/** Ask JetStream about stream EVENTS, in its API's words; the answer must have @expect in it. */
static inline void nats_ask_stream(struct kvp_nats *nats, const char *what, const char *json,
                                   const char *expect)
{
    char subject[64];
    size_t len = 0;
    char *answer = NULL;
    int err;

    snprintf(subject, sizeof(subject), "$JS.API.STREAM.%s.EVENTS", what);
    do /* nobody answers until JetStream has started */
        err = kvp_nats_request(nats, subject, json, strlen(json), 30000, (void **)&answer, &len);
    while (err == -ENOENT);
    assert_int_equal(err, 0);
    answer[len] = '\0'; /* the client leaves room for it */
    if (!strstr(answer, expect))
        fail_msg("no %s in %s", expect, answer);
    free(answer);
}

#endif
