// SPDX-License-Identifier: Apache-2.0
/* A server that a benchmark starts as a process of its own, beside others, and whose CPU time it reads. */
#ifndef KV_BENCH_SERVER_H
#define KV_BENCH_SERVER_H

#include <netinet/in.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>

#include "http_load.h"

enum { PATIENCE_S = 120 }; /* with whatever a server is waited for */

struct server {
    char name[32];
    const char *command; /* of the shell, with {port}; NULL: a process that runs already */
    pid_t pid;
    uint16_t port;
    clockid_t clock; /* clock of its CPU time */
};

static inline uint16_t server_free_port(void)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    require(fd >= 0 && bind(fd, (struct sockaddr *)&address, len) == 0 &&
                getsockname(fd, (struct sockaddr *)&address, &len) == 0,
            "a free port");
    close(fd);
    return ntohs(address.sin_port);
}

static inline void server_run(const struct server *x)
{
    struct kv_buf text = KV_BUF_INIT;
    const char *at = strstr(x->command, "{port}");

    require(at != NULL, "{port} in a command");
    kv_buf_printf(&text, "exec %.*s%u%s >/dev/null 2>&1", (int)(at - x->command), x->command,
                  x->port, at + strlen("{port}"));
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    execl("/bin/sh", "sh", "-c", kv_buf_cstr(&text), NULL);
    _exit(127);
}

/* Start it, unless it runs already, and wait until /health answers. */
static inline void server_start(struct server *x)
{
    uint64_t until = kv_now_ns() + PATIENCE_S * KV_NS_PER_S;
    struct request request = {.text = KV_BUF_INIT};
    struct kv_buf reply = KV_BUF_INIT;

    if (x->command) {
        x->port = server_free_port();
        x->pid = fork();
        require(x->pid >= 0, "fork");
        if (x->pid == 0)
            server_run(x);
    }
    kv_buf_puts(&request.text, "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    while (http_ask(x->port, &request, &reply) != 200) {
        require(kv_now_ns() < until && (!x->command || waitpid(x->pid, NULL, WNOHANG) == 0),
                "the start of a server");
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    require(clock_getcpuclockid(x->pid, &x->clock) == 0, "the CPU clock of a server");
    kv_buf_fini(&request.text);
    kv_buf_fini(&reply);
}

static inline void server_stop(struct server *x)
{
    if (!x->command)
        return;
    kill(x->pid, SIGTERM);
    for (int i = 0; waitpid(x->pid, NULL, WNOHANG) == 0; i++) {
        if (i == 1000)
            kill(x->pid, SIGKILL);
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
}

static inline double server_cpu_us(const struct server *x)
{
    struct timespec ts;

    require(clock_gettime(x->clock, &ts) == 0, "the CPU time of a server");
    return (double)ts.tv_sec * 1e6 + (double)ts.tv_nsec / 1e3;
}

#endif
