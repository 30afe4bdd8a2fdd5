// SPDX-License-Identifier: Apache-2.0
/*
 * A server that isn't etcd, or one that lies: answers cut short, endless, wrong, too many, late or
 * never. The directory says that it can't be read, keeps what it knew, and closes soon.
 */
#include <arpa/inet.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/socket.h>

#include "base/core/buf.h"
#include "base/stalls.h"
#include "base/unit.h"
#include "directory_unit.h"
#include "peer/directory/peer_record.h"

/* ---- the servers ---- */

enum lie {
    HONEST, /* and, once watched, one peer a byte at a time */
    SILENT,
    NOT_HTTP,
    NOT_JSON,
    CUT,
    STATUS,
    ERROR,
    ERROR_V2, /* as a gateway of the second generation says it (etcd 3.6, Debian's 3.5) */
    NO_LEASE,
    MANY,
    ENDLESS,
    WATCH_ENDS,
    WATCH_COMPACTED,
    WATCH_ERROR,
    WATCH_NONSENSE,
    WATCH_ENDLESS,
    N_LIES
};

/* A server for each lie, so that all are told at a time. */
static struct server {
    int listener;
    atomic_int lie;
    char where[64];
} servers[N_LIES];
static atomic_bool over;
static char letters[65536]; /* a piece of an endless answer */
static pthread_mutex_t given_lock = PTHREAD_MUTEX_INITIALIZER;
static struct kvbm_directory_peer given; /* whose endpoints all peers have, if there are any */

/* Endpoints for all peers; NULL: their own again. A connection of an earlier test may still read. */
static void give(const struct kvbm_directory_peer *endpoints)
{
    pthread_mutex_lock(&given_lock);
    given = endpoints ? *endpoints : (struct kvbm_directory_peer){0};
    pthread_mutex_unlock(&given_lock);
}

static bool send_all(int fd, const char *data, size_t len)
{
    while (len && !atomic_load(&over)) {
        ssize_t n = send(fd, data, len, MSG_NOSIGNAL | MSG_DONTWAIT);
        struct pollfd p = {.fd = fd, .events = POLLOUT};

        if (n < 0 && errno != EAGAIN)
            return false;
        if (n > 0) {
            data += n;
            len -= (size_t)n;
        } else {
            (void)poll(&p, 1, 20);
        }
    }
    return len == 0;
}

static void say(int fd, const char *text)
{
    (void)send_all(fd, text, strlen(text));
}

static void answer(int fd, const char *json)
{
    char head[128];

    snprintf(head, sizeof(head), "HTTP/1.1 200 OK\r\nContent-Length: %zu\r\n\r\n", strlen(json));
    say(fd, head);
    say(fd, json);
}

static void put_kv(struct kv_buf *out, const char *name, uint64_t incarnation)
{
    struct kvbm_directory_peer peer = peer_named(name, incarnation);
    struct kv_buf request = KV_BUF_INIT, value = KV_BUF_INIT;
    char own[KVBM_MAX_PEER_KEY + 1], key[sizeof(own) + 3];

    pthread_mutex_lock(&given_lock);
    if (given.n_endpoints) {
        peer.n_endpoints = given.n_endpoints;
        memcpy(peer.endpoints, given.endpoints, sizeof(peer.endpoints));
    }
    pthread_mutex_unlock(&given_lock);
    etcd_key(&peer, own);
    snprintf(key, sizeof(key), "/p/%s", own);
    etcd_write_peer(&value, &peer);
    etcd_write_put(&request, key, value.data, value.len,
                   1); /* {"key":..,"value":..,"lease":".."} */
    kv_buf_append(out, request.data, request.len);
    kv_buf_fini(&request);
    kv_buf_fini(&value);
}

static void answer_range(int fd, bool many)
{
    struct kv_buf text = KV_BUF_INIT;

    kv_buf_puts(&text, "{\"header\":{\"revision\":\"5\"},\"kvs\":[");
    put_kv(&text, "self", 1);
    for (unsigned i = 0; i < (many ? 300 : 1); i++) {
        char name[16];

        snprintf(name, sizeof(name), "peer%03u", i);
        kv_buf_putc(&text, ',');
        put_kv(&text, name, 9);
    }
    kv_buf_puts(&text, "],\"more\":true}");
    answer(fd, kv_buf_cstr(&text));
    kv_buf_fini(&text);
}

static void answer_watch(struct server *server, int fd, enum lie how)
{
    struct kv_buf event = KV_BUF_INIT;

    say(fd, "HTTP/1.1 200 OK\r\n\r\n");
    say(fd, "{\"result\":{\"header\":{\"revision\":\"5\"},\"created\":true}}\n");
    if (how == WATCH_COMPACTED)
        say(fd, "{\"result\":{\"canceled\":true,\"compact_revision\":\"3\"}}\n");
    if (how == WATCH_ERROR)
        say(fd, "{\"error\":{\"grpc_code\":14,\"message\":\"no leader\\n\"}}\n");
    if (how == WATCH_NONSENSE)
        say(fd, "{\"result\":{\"events\":[{\"type\":7}]}}\n");
    while (how == WATCH_ENDLESS && send_all(fd, letters, sizeof(letters)))
        ;
    if (how != HONEST)
        return;
    kv_buf_puts(&event, "\n{\"result\":{\"events\":[{\"kv\":");
    put_kv(&event, "late", 9);
    kv_buf_puts(&event, "},{\"type\":\"DELETE\",\"kv\":{\"key\":\"L3AvbmV2ZXIvMDA=\"}}]}}\n\n");
    for (size_t i = 0; i < event.len; i++)
        (void)send_all(fd, event.data + i, 1);
    kv_buf_fini(&event);
    while (!atomic_load(&over) && atomic_load(&server->lie) == HONEST)
        usleep(2000);
}

/* Answer a request on @path. */
static void serve(struct server *server, int fd, const char *path)
{
    enum lie how = (enum lie)atomic_load(&server->lie);
    static const char junk[] = "\x00\xff nonsense \r\n\r\n";

    switch (how) {
    case SILENT:
        while (!atomic_load(&over) && atomic_load(&server->lie) == SILENT)
            usleep(2000);
        return;
    case NOT_HTTP:
        (void)send_all(fd, junk, sizeof(junk));
        return;
    case NOT_JSON:
        answer(fd, "<html>");
        return;
    case CUT:
        say(fd, "HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"header\":");
        return;
    case STATUS:
        say(fd, "HTTP/1.1 503 No\r\nContent-Length: 2\r\n\r\n{}");
        return;
    case ERROR:
        answer(fd, "{\"error\":\"etcdserver: permission denied\\u0007\",\"code\":7}");
        return;
    case ERROR_V2:
        say(fd, "HTTP/1.1 400 No\r\nContent-Length: 50\r\n\r\n"
                "{\"code\":3,\"message\":\"etcdserver: no\",\"details\":[]}");
        return;
    case ENDLESS:
        say(fd, "HTTP/1.1 200 OK\r\n\r\n");
        while (send_all(fd, letters, sizeof(letters)))
            ;
        return;
    default:
        break;
    }
    if (strstr(path, "/watch"))
        answer_watch(server, fd, how);
    else if (strstr(path, "/range"))
        answer_range(fd, how == MANY);
    else
        answer(fd, how == NO_LEASE ? "{\"header\":{}}" : "{\"ID\":7,\"result\":{\"TTL\":\"2\"}}");
}

struct connection {
    struct server *server;
    int fd;
};

static void *talk(void *arg)
{
    struct connection c = *(struct connection *)arg;
    char text[8192] = "", *end = NULL;
    size_t len = 0;
    ssize_t n = 1;

    free(arg);
    while (!end && n > 0 && len < sizeof(text) - 1) {
        n = recv(c.fd, text + len, sizeof(text) - 1 - len, 0);
        len += n > 0 ? (size_t)n : 0;
        text[len] = '\0';
        end = strstr(text, "\r\n\r\n");
    }
    text[strcspn(text, "\r")] = '\0';
    if (end)
        serve(c.server, c.fd, text);
    shutdown(c.fd, SHUT_WR);
    while (recv(c.fd, text, sizeof(text), MSG_DONTWAIT) > 0)
        ;
    close(c.fd);
    return NULL;
}

static void take(struct server *server)
{
    struct connection *c = malloc(sizeof(*c));
    pthread_t thread;

    if (!c)
        return;
    *c = (struct connection){server, accept(server->listener, NULL, NULL)};
    if (c->fd >= 0 && pthread_create(&thread, NULL, talk, c) == 0)
        pthread_detach(thread);
    else
        free(c);
}

static void *serve_all(void *arg)
{
    struct pollfd p[N_LIES];

    (void)arg;
    for (int i = 0; i < N_LIES; i++)
        p[i] = (struct pollfd){.fd = servers[i].listener, .events = POLLIN};
    while (!atomic_load(&over)) {
        (void)poll(p, N_LIES, 20);
        for (int i = 0; i < N_LIES; i++) {
            if (p[i].revents)
                take(&servers[i]);
        }
    }
    return NULL;
}

static bool server_open(struct server *server)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof(at);

    server->listener = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(server->listener, (struct sockaddr *)&at, len) < 0 ||
        listen(server->listener, 64) < 0 ||
        getsockname(server->listener, (struct sockaddr *)&at, &len) < 0)
        return false;
    snprintf(server->where, sizeof(server->where), "etcd://127.0.0.1:%u/p", ntohs(at.sin_port));
    return true;
}

/* ---- the directory ---- */

static struct kvbm_directory_peer self;

static struct kvbm_directory *open_directory(const struct server *server, struct seen *seen)
{
    struct kvbm_directory_opts opts = {.size = sizeof(opts),
                                       .peers = server->where,
                                       .changed = seen_changed,
                                       .arg = seen,
                                       .self = &self,
                                       .max_peers = 40,
                                       .ttl_s = 2,
                                       .timeout_ms = 400};
    struct kvbm_directory *d = NULL;

    seen_init(seen);
    assert_int_equal(kvbm_directory_open(&opts, &d), 0);
    return d;
}

/* Each lie, after the truth: it counts as a failure, the peers stay, and the truth is heard again. */
static void test_lies(void **state)
{
    static struct seen seen[N_LIES];
    struct kvbm_directory *d[N_LIES];
    uint64_t failures[N_LIES];

    (void)state;
    for (int i = SILENT; i < N_LIES; i++)
        d[i] = open_directory(&servers[i], &seen[i]);
    for (int i = SILENT; i < N_LIES; i++) {
        wait_until(seen_find(&seen[i], "late", NULL) && seen_find(&seen[i], "peer000", NULL));
        failures[i] = info_of(d[i]).failures;
        atomic_store(&servers[i].lie, i);
    }
    for (int i = SILENT; i < N_LIES; i++) {
        if (i == MANY) { /* more than there is room for: the first, by their keys */
            wait_until(info_of(d[i]).left_out >= 260 && seen_find(&seen[i], "peer030", NULL));
            assert_int_equal(info_of(d[i]).n_peers, 40);
            continue;
        }
        wait_until(info_of(d[i]).failures > failures[i] + 1); /* one is the watch that ends */
        assert_true(seen_find(&seen[i], "peer000", NULL));
    }
    wait_until(strstr(info_of(d[ERROR]).error, "permission denied"));
    wait_until(strstr(info_of(d[ERROR_V2]).error, "etcdserver: no"));
    for (int i = SILENT; i < N_LIES; i++)
        atomic_store(&servers[i].lie, HONEST);
    for (int i = SILENT; i < N_LIES; i++) {
        wait_until(info_of(d[i]).current && info_of(d[i]).registered);
        kvbm_directory_close(d[i]);
        assert_true(seen_calls(&seen[i]) < 1000000);
    }
}

/* Closing has its limit, whatever the server does. */
static void test_close(void **state)
{
    static const enum lie lies[] = {SILENT, ENDLESS, WATCH_ENDLESS};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(lies); i++) {
        struct kvbm_directory *d;
        static struct seen seen;
        uint64_t began;

        d = open_directory(&servers[HONEST], &seen);
        wait_until(info_of(d).registered);
        atomic_store(&servers[HONEST].lie, lies[i]);
        began = kv_now_ns();
        kvbm_directory_close(d);
        assert_true(kv_now_ns() - began < 30 * KV_NS_PER_S);
        atomic_store(&servers[HONEST].lie, HONEST);
    }
}

/* A follower closes within one attempt at an endpoint, however many a peer has that don't answer. */
static void test_follower(void **state)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    const struct kvbm_directory_opts directory = {.size = sizeof(directory),
                                                  .peers = servers[HONEST].where};
    const struct kvbm_follow_opts opts = {
        .size = sizeof(opts), .directory = &directory, .open_ms = 3000};
    const struct kvbm_agent_opts what = {.size = sizeof(what), .name = "reader"};
    struct kvbm_directory_peer silent = {.n_endpoints = KVBM_MAX_PEER_ENDPOINTS};
    struct pollfd begun = {.fd = socket(AF_INET, SOCK_STREAM, 0), .events = POLLIN};
    socklen_t len = sizeof(at);
    struct kvbm_follower *follower;
    struct kvbm_agent *agent;
    struct stalls stalled;
    uint64_t began;

    (void)state;
    assert_int_equal(bind(begun.fd, (struct sockaddr *)&at, len), 0);
    assert_int_equal(listen(begun.fd, 64), 0);
    assert_int_equal(getsockname(begun.fd, (struct sockaddr *)&at, &len), 0);
    for (uint32_t i = 0; i < silent.n_endpoints; i++)
        snprintf(silent.endpoints[i], sizeof(silent.endpoints[i]), "tcp:127.0.0.1:%u",
                 ntohs(at.sin_port));
    give(&silent);
    assert_int_equal(kvbm_agent_create(&what, &agent), 0);
    assert_int_equal(kvbm_agent_follow(agent, &opts, &follower), 0);
    assert_int_equal(poll(&begun, 1, 60000), 1);
    stalled = stalls_so_far();
    began = kv_now_ns();
    assert_int_equal(kvbm_follower_close(follower), 0);
    assert_true(stalls_lateness(began, &stalled) < 10 * KV_NS_PER_S); /* of 8 attempts: 24 s */
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    close(begun.fd);
    give(NULL);
}

/* Each node has its agent at the same path: a peer's unix endpoint leads to the reader itself, and
 * its tcp endpoint to the peer. */
static void test_follower_of_equal_paths(void **state)
{
    const struct kvbm_directory_opts directory = {.size = sizeof(directory),
                                                  .peers = servers[HONEST].where};
    const struct kvbm_follow_opts opts = {.size = sizeof(opts), .directory = &directory};
    char path[64];
    const char *at = path, *tcp = "tcp:127.0.0.1:0";
    const struct kvbm_agent_opts what = {
        .size = sizeof(what), .name = "reader", .listen = &at, .n_listen = 1};
    const struct kvbm_agent_opts other = {.size = sizeof(other),
                                          .name = "peer000",
                                          .worker = 10, /* as peer_named */
                                          .listen = &tcp,
                                          .n_listen = 1};
    struct kvbm_follower_info info = KVBM_FOLLOWER_INFO_INIT;
    struct kvbm_directory_peer both = {.n_endpoints = 2};
    struct kvbm_follower *follower;
    struct kvbm_agent *agent, *peer;

    (void)state;
    snprintf(path, sizeof(path), "unix:/tmp/kvbm-equal-%d", (int)getpid());
    assert_int_equal(kvbm_agent_create(&what, &agent), 0);
    assert_int_equal(kvbm_agent_create(&other, &peer), 0);
    strcpy(both.endpoints[0], path);
    assert_true(kvbm_agent_endpoint(peer, 0, both.endpoints[1], sizeof(both.endpoints[1]), NULL) >
                0);
    give(&both);
    assert_int_equal(kvbm_agent_follow(agent, &opts, &follower), 0);
    wait_until(kvbm_follower_get_info(follower, &info) == 0 && info.n_open == 1);
    assert_int_equal(kvbm_follower_close(follower), 0);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
    assert_int_equal(kvbm_agent_destroy(peer), 0);
    give(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lies),
        cmocka_unit_test(test_close),
        cmocka_unit_test(test_follower),
        cmocka_unit_test(test_follower_of_equal_paths),
    };
    pthread_t thread;
    int failed;

    self = peer_named("self", 1);
    memset(letters, 'x', sizeof(letters));
    for (int i = 0; i < N_LIES; i++) {
        if (!server_open(&servers[i]))
            return 1;
    }
    if (pthread_create(&thread, NULL, serve_all, NULL) != 0)
        return 1;
    stalls_begin();
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    atomic_store(&over, true);
    pthread_join(thread, NULL);
    usleep(50000); /* threads of connections see it */
    return failed;
}
