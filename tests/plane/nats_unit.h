// SPDX-License-Identifier: Apache-2.0
/** Real nats-servers of a test's own, each in a process of its own, on free ports of loopback. */
#ifndef KV_TEST_PLANE_NATS_UNIT_H
#define KV_TEST_PLANE_NATS_UNIT_H

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "plane/nats.h"
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

static inline unsigned nats_free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    assert_int_equal(bind(fd, (struct sockaddr *)&at, len), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&at, &len), 0);
    close(fd);
    return ntohs(at.sin_port);
}

static inline bool nats_answers(unsigned port)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_addr = {htonl(INADDR_LOOPBACK)},
                             .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    bool ok = connect(fd, (struct sockaddr *)&at, sizeof(at)) == 0;

    close(fd);
    return ok;
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
    server->port = nats_free_port();
    server->route = nats_free_port();
    snprintf(server->url, sizeof(server->url), "nats://127.0.0.1:%u", server->port);
    nats_configure(server, more);
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
    wait_until(nats_answers(server->port));
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

#endif
