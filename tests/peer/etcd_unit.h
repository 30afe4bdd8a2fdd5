// SPDX-License-Identifier: Apache-2.0
/**
 * An etcd of a test's own, in a process of its own. The program makes its folder, and removes it.
 */
#ifndef KV_TEST_PEER_ETCD_UNIT_H
#define KV_TEST_PEER_ETCD_UNIT_H

#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "loopback.h"
#include "support.h"

static struct {
    char folder[32];
    unsigned ports[2]; /* clients, peers */
    pid_t pid;         /* 0: none runs */
    bool tls;          /* it listens with the certificate in its folder */
} etcd = {.folder = "/tmp/kv-etcd-XXXXXX"};

static inline bool etcd_is_here(void)
{
    return system("command -v etcd >/dev/null") == 0;
}

static inline void etcd_choose_ports(void)
{
    etcd.ports[0] = free_port();
    etcd.ports[1] = free_port();
}

static inline void etcd_exec(void)
{
    char data[64], client[64], peer[64], cluster[80], cert[64], key[64];
    int log = open("/dev/null", O_WRONLY | O_CLOEXEC);

    snprintf(data, sizeof(data), "%s/data", etcd.folder);
    snprintf(cert, sizeof(cert), "%s/cert.pem", etcd.folder);
    snprintf(key, sizeof(key), "%s/key.pem", etcd.folder);
    snprintf(client, sizeof(client), "http%s://127.0.0.1:%u", etcd.tls ? "s" : "", etcd.ports[0]);
    snprintf(peer, sizeof(peer), "http://127.0.0.1:%u", etcd.ports[1]);
    snprintf(cluster, sizeof(cluster), "default=%s", peer);
    dup2(log, 1);
    dup2(log, 2);
    execlp("etcd", "etcd", "--data-dir", data, "--listen-client-urls", client,
           "--advertise-client-urls", client, "--listen-peer-urls", peer,
           "--initial-advertise-peer-urls", peer, "--initial-cluster", cluster,
           "--heartbeat-interval", "50", "--election-timeout", "500", "--log-level", "panic",
           etcd.tls ? "--cert-file" : NULL, cert, "--key-file", key, (char *)NULL);
}

/** Start etcd, and wait until it listens. */
static inline void etcd_start(void)
{
    etcd.pid = fork();
    assert_true(etcd.pid >= 0);
    if (etcd.pid == 0) {
        (void)prctl(PR_SET_PDEATHSIG, SIGKILL);
        etcd_exec();
        _exit(127);
    }
    wait_until(port_answers(etcd.ports[0]));
}

static inline void etcd_kill(void)
{
    assert_int_equal(kill(etcd.pid, SIGKILL), 0);
    assert_int_equal(waitpid(etcd.pid, NULL, 0), etcd.pid);
    etcd.pid = 0;
}

/** Remove what etcd has stored. */
static inline void etcd_forget(void)
{
    char command[128];

    snprintf(command, sizeof(command), "rm -rf %s/data", etcd.folder);
    assert_int_equal(system(command), 0);
}

#endif
