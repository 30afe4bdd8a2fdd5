// SPDX-License-Identifier: Apache-2.0
/* Peers' lists of registrations, and the thread that asks for them, beside a listening socket that
 * counts as a peer. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "http/auth.h"
#include "indexer/registry/registry.h"
#include "indexer/registry/tables.h"
#include "indexer/replica/follow.h"
#include "indexer/replica/peers.h"

#define ROUNDS 5
#define AGAIN_MS 300 /* until a list with refused entries is read again */

/* -- lists ------------------------------------------------------------------------------------- */

/* A peer's GET /registrations. */
struct list {
    char text[4096];
    size_t len, n_removed;
    uint64_t begun_us; /* versions count from here */
};

static void add(struct list *l, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    l->len += (size_t)vsnprintf(l->text + l->len, sizeof(l->text) - l->len, format, args);
    va_end(args);
    assert_true(l->len < sizeof(l->text));
}

static void list_begin(struct list *l)
{
    if (!l->begun_us)
        l->begun_us = kv_wall_ns() / 1000;
    l->len = 0;
    add(l, "{\"id\":5,\"revision\":7,\"registrations\":[");
}

static void has(struct list *l, unsigned instance, unsigned rank, const char *model,
                unsigned block_size, uint64_t at)
{
    add(l,
        "%s{\"instance_id\":%u,\"dp_rank\":%u,\"model_name\":\"%s\",\"tenant_id\":\"t\","
        "\"block_size\":%u,\"endpoint\":\"ipc:///nobody/%u\",\"version\":%" PRIu64 "}",
        l->text[l->len - 1] == '[' ? "" : ",", instance, rank, model, block_size, rank,
        l->begun_us + at);
}

static void removed(struct list *l, unsigned instance, unsigned rank, uint64_t at)
{
    add(l, "%s{\"instance_id\":%u,\"dp_rank\":%u,\"version\":%" PRIu64 "}",
        l->n_removed++ ? "," : "],\"removed\":[", instance, rank, l->begun_us + at);
}

static int merge(struct ki_registry *r, struct list *l)
{
    uint64_t id = 0, revision = 0;
    struct kv_json json;
    int rc;

    add(l, "]}");
    kv_json_init(&json, l->text, l->len);
    rc = ki_follow_read(r, &json, &id, &revision);
    assert_int_equal(id, 5);
    assert_int_equal(revision, 7);
    l->n_removed = 0;
    list_begin(l);
    return rc;
}

static struct ki_registry *new_registry(const struct kv_arg_list *allow)
{
    struct ki_registry_opts opts = {.threads = 1, .start_held = true, .allow = allow};
    struct ki_registry *r;

    kv_log_set_level(KV_LOG_ERROR); /* a line for each entry that is refused */
    assert_int_equal(ki_registry_create(&opts, &r), 0);
    return r;
}

static bool follows(struct ki_registry *r, unsigned instance, unsigned rank, const char *model,
                    unsigned block_size)
{
    const struct ki_listener *l = ki_listener_find(r, instance, rank);

    return l && strcmp(l->model->name, model) == 0 && l->model->block_size == block_size;
}

/* All ranks of an instance move to another model between two questions. */
static void an_instance_moves(void **state)
{
    struct ki_registry *r = new_registry(NULL);
    struct list l = {0};

    (void)state;
    list_begin(&l);
    for (unsigned rank = 0; rank < 3; rank++)
        has(&l, 1, rank, "m", 4, 1);
    assert_int_equal(merge(r, &l), 0);
    for (unsigned rank = 0; rank < 3; rank++)
        has(&l, 1, rank, "m2", 4, 3);
    for (unsigned rank = 0; rank < 3; rank++)
        removed(&l, 1, rank, 2);
    assert_int_equal(merge(r, &l), 0);
    for (unsigned rank = 0; rank < 3; rank++)
        assert_true(follows(r, 1, rank, "m2", 4));
    /* The last one doesn't move, but leaves. */
    has(&l, 1, 0, "m", 4, 5);
    has(&l, 1, 1, "m", 4, 5);
    removed(&l, 1, 2, 4);
    assert_int_equal(merge(r, &l), 0);
    assert_true(follows(r, 1, 0, "m", 4) && follows(r, 1, 1, "m", 4));
    assert_null(ki_listener_find(r, 1, 2));
    ki_registry_destroy(r);
}

/* All instances of a model get another block size between two questions. */
static void a_fleet_moves(void **state)
{
    struct ki_registry *r = new_registry(NULL);
    struct list l = {0};

    (void)state;
    list_begin(&l);
    for (unsigned i = 1; i <= 3; i++)
        has(&l, i, 0, "m", 4, 1);
    assert_int_equal(merge(r, &l), 0);
    for (unsigned i = 1; i <= 3; i++)
        has(&l, i, 0, "m", 8, 2);
    assert_int_equal(merge(r, &l), 0);
    for (unsigned i = 1; i <= 3; i++)
        assert_true(follows(r, i, 0, "m", 8));
    ki_registry_destroy(r);
}

/* A worker that left and came back the same between two questions keeps its blocks. */
static void the_same_again(void **state)
{
    struct ki_registry *r = new_registry(NULL);
    struct ki_listener *listener;
    struct list l = {0};

    (void)state;
    list_begin(&l);
    has(&l, 1, 0, "m", 4, 1);
    assert_int_equal(merge(r, &l), 0);
    listener = ki_listener_find(r, 1, 0);
    assert_non_null(listener);
    has(&l, 1, 0, "m", 4, 3);
    removed(&l, 1, 0, 2);
    assert_int_equal(merge(r, &l), 0);
    assert_ptr_equal(ki_listener_find(r, 1, 0), listener);
    ki_registry_destroy(r);
}

/* Refusals that may pass are told from those that the configuration decides. */
static void refused_entries(void **state)
{
    const struct kv_arg_list allow = {.items = {"ipc:///nobody/*"}, .n = 1};
    struct ki_registry *r = new_registry(&allow);
    struct ki_registration ours = {
        .instance = 1, .block_size = 4, .endpoint = "ipc:///nobody/0", .model = "m", .tenant = "t"};
    struct kv_error error;
    struct list l = {0};

    (void)state;
    assert_int_equal(ki_registry_register(r, &ours, &error), 0);
    list_begin(&l);
    has(&l, 2, 0, "m", 4, 1);
    l.text[strstr(l.text, "nobody") - l.text] = 'b'; /* not allowed */
    assert_int_equal(merge(r, &l), 0);
    has(&l, 2, 0, "m", 8, 1);
    assert_int_equal(merge(r, &l), 1);
    has(&l, 2, 0, "m2", 8, UINT64_C(2) * 86400 * 1000000);
    assert_int_equal(merge(r, &l), 1);
    assert_int_equal(ki_registry_unregister(r, 1, "m", NULL, NULL, &error), 0);
    has(&l, 2, 0, "m", 8, 1);
    assert_int_equal(merge(r, &l), 0);
    assert_true(follows(r, 2, 0, "m", 8));
    ki_registry_destroy(r);
}

/* -- the thread -------------------------------------------------------------------------------- */

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
    assert_int_equal(kh_auth_create(NULL, false, &opts.auth, NULL), 0);
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
    kh_auth_destroy(opts.auth);
    ki_peers_destroy(opts.peers);
    ki_registry_destroy(opts.registry);
}

/* Answer the next question with @list. Returns the revision that it named. */
static int answer(int fd, const struct list *list)
{
    struct pollfd pfd = {.fd = fd, .events = POLLIN};
    char text[8192], *revision;
    size_t len = 0;
    ssize_t got;
    int client, n;

    assert_int_equal(poll(&pfd, 1, 20000), 1);
    client = accept(fd, NULL, NULL);
    assert_true(client >= 0);
    text[0] = '\0';
    while (!strstr(text, "\r\n\r\n")) {
        got = read(client, text + len, sizeof(text) - 1 - len);
        assert_true(got > 0);
        len += (size_t)got;
        text[len] = '\0';
    }
    revision = strstr(text, "revision=");
    assert_non_null(revision);
    n = atoi(revision + strlen("revision="));
    snprintf(text, sizeof(text), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n%s", list->len,
             list->text);
    assert_int_equal(write(client, text, strlen(text)), strlen(text));
    close(client);
    return n;
}

/* A list with an entry that was refused for now is read again after a while, and not each time. */
static void a_refused_list_is_read_again(void **state)
{
    struct ki_follow_opts opts = {.interval_ms = 10, .age_ms = 1000, .again_ms = AGAIN_MS};
    struct list with = {0}, without = {0};
    struct ki_follow *follow;
    uint64_t begun;
    unsigned port;
    char url[80];
    int fd = listen_somewhere(&port);

    (void)state;
    opts.registry = new_registry(NULL);
    assert_int_equal(ki_peers_create(&opts.peers), 0);
    assert_int_equal(kh_auth_create(NULL, false, &opts.auth, NULL), 0);
    snprintf(url, sizeof(url), "http://127.0.0.1:%u", port);
    assert_int_equal(ki_peers_add(opts.peers, url), 0);
    list_begin(&with);
    has(&with, 1, 0, "m", 4, 1);
    has(&with, 2, 0, "m", 8, 1); /* refused: another block size */
    add(&with, "]}");
    list_begin(&without);
    add(&without, "]}");
    assert_int_equal(ki_follow_create(&opts, &follow), 0);
    begun = kv_now_ns();
    assert_int_equal(answer(fd, &with), 0);
    while (answer(fd, &without) == 7)
        ;
    assert_true(kv_now_ns() - begun >= AGAIN_MS * KV_NS_PER_MS);
    /* Nothing was refused this time. */
    begun = kv_now_ns();
    while (kv_now_ns() - begun < 2 * AGAIN_MS * KV_NS_PER_MS)
        assert_int_equal(answer(fd, &without), 7);
    ki_follow_destroy(follow);
    close(fd);
    kh_auth_destroy(opts.auth);
    ki_peers_destroy(opts.peers);
    ki_registry_destroy(opts.registry);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_instance_moves),
        cmocka_unit_test(a_fleet_moves),
        cmocka_unit_test(the_same_again),
        cmocka_unit_test(refused_entries),
        cmocka_unit_test(a_refused_list_is_read_again),
        cmocka_unit_test(many_peers_come_and_go),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
