// SPDX-License-Identifier: Apache-2.0
/* The thread that asks peers, beside a listening socket that counts as one. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <poll.h>
#include <stdio.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/log.h"
#include "indexer/auth.h"
#include "indexer/follow.h"
#include "indexer/peers.h"
#include "indexer/registry.h"

#define ROUNDS 5

static int listen_somewhere(unsigned *ret_port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(address);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_int_equal(bind(fd, (struct sockaddr *)&address, len), 0);
    assert_int_equal(listen(fd, 16), 0);
    assert_int_equal(getsockname(fd, (struct sockaddr *)&address, &len), 0);
    *ret_port = ntohs(address.sin_port);
    return fd;
}

/* Wait until the peer is asked, and hang up. */
static void is_asked(int fd)
{
    struct pollfd pfd = {.fd = fd, .events = POLLIN};
    int client;

    assert_int_equal(poll(&pfd, 1, 20000), 1);
    client = accept(fd, NULL, NULL);
    assert_true(client >= 0);
    close(client);
}

/* More peers come and go than are remembered at a time: the next one is asked all the same. */
static void many_peers_come_and_go(void **state)
{
    struct ki_registry_opts registry_opts = {.threads = 1};
    struct ki_follow_opts opts = {.interval_ms = 1, .age_ms = 1000};
    struct ki_follow *follow;
    char url[80];

    (void)state;
    kv_log_set_level(KV_LOG_ERROR); /* a line for each peer that doesn't answer */
    assert_int_equal(ki_registry_create(&registry_opts, &opts.registry), 0);
    assert_int_equal(ki_peers_create(&opts.peers), 0);
    assert_int_equal(ki_auth_create(NULL, false, &opts.auth, NULL), 0);
    assert_int_equal(ki_follow_create(&opts, &follow), 0);
    for (int round = 0; round < ROUNDS; round++) {
        unsigned port;
        int fd = listen_somewhere(&port);

        /* Nobody listens there. The last one is asked after all others. */
        for (int i = 0; i < KI_MAX_PEERS - 1; i++) {
            snprintf(url, sizeof(url), "http://127.0.0.1:1/%d/%d", round, i);
            assert_int_equal(ki_peers_add(opts.peers, url), 0);
        }
        snprintf(url, sizeof(url), "http://127.0.0.1:%u", port);
        assert_int_equal(ki_peers_add(opts.peers, url), 0);
        is_asked(fd);
        assert_int_equal(ki_peers_remove(opts.peers, url), 0);
        for (int i = 0; i < KI_MAX_PEERS - 1; i++) {
            snprintf(url, sizeof(url), "http://127.0.0.1:1/%d/%d", round, i);
            assert_int_equal(ki_peers_remove(opts.peers, url), 0);
        }
        close(fd);
    }
    ki_follow_destroy(follow);
    ki_auth_destroy(opts.auth);
    ki_peers_destroy(opts.peers);
    ki_registry_destroy(opts.registry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(many_peers_come_and_go),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
