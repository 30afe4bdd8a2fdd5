// SPDX-License-Identifier: Apache-2.0
/*
 * Strangers that connect to a listener and say nothing, or begin and go no further, while honest peers
 * take their time between the steps of their handshakes. Between two steps comes a number of strangers:
 * what a thousand a second are in 60 ms, and more.
 */
#include <arpa/inet.h>
#include <netinet/in.h>

#include "base/core/log.h"
#include "base/unit.h"
#include "certificates.h"
#include "peer/session/net.h"
#include "raw_peer.h"
#include "skip.h"

#define HONEST 12u
#define BETWEEN_STEPS 90u /* of 128 places, HONEST of which are taken */
#define CROWD 400u

static struct certificates pem;
static int crowd[CROWD];
static uint32_t n_crowd; /* ever; the last CROWD are open */

static void set_port(struct sockaddr_in *at, const struct kvbm_agent *agent)
{
    at->sin_port = htons((uint16_t)strtoul(strrchr(endpoint_of(agent), ':') + 1, NULL, 10));
}

/* Connect from an address of this machine. */
static int connect_from(const struct kvbm_agent *to, const char *from)
{
    struct sockaddr_in at = {.sin_family = AF_INET}, mine = {.sin_family = AF_INET};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    assert_true(fd >= 0);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    set_port(&at, to);
    assert_int_equal(inet_pton(AF_INET, from, &mine.sin_addr), 1);
    assert_int_equal(bind(fd, (struct sockaddr *)&mine, sizeof(mine)), 0);
    assert_int_equal(connect(fd, (struct sockaddr *)&at, sizeof(at)), 0);
    return fd;
}

/* Add @n strangers, each of which says @words. */
static void strangers(const struct kvbm_agent *to, const char *from, uint32_t n, const void *words,
                      size_t len)
{
    for (; n > 0; n--) {
        int *fd = &crowd[n_crowd % CROWD];

        if (n_crowd++ >= CROWD)
            close(*fd);
        *fd = connect_from(to, from);
        if (len)
            (void)!send(*fd, words, len, MSG_NOSIGNAL);
    }
}

static void end_crowd(void)
{
    for (uint32_t i = 0; i < KV_MIN(n_crowd, CROWD); i++)
        close(crowd[i]);
    n_crowd = 0;
}

/* Let the listener take all that have connected: a round of its loop takes 64. */
static void settle(struct raw *raw)
{
    for (int i = 0; i < 8; i++) {
        raw_say(raw, KVBM_PING, 0, NULL, 0);
        assert_true(raw_until(raw, KVBM_PONG));
    }
}

/*
 * Open sessions in four steps, all of them side by side, from @honest; between the steps come strangers
 * from @stranger that say @words.
 */
static void open_beside(const char *honest, const char *stranger, uint32_t n_strangers,
                        const void *words, size_t len)
{
    static struct raw raw[HONEST], first;
    struct kvbm_agent *owner = agent_at("owner", "tcp:127.0.0.1:0");
    const uint8_t mac[KVBM_MAC_BYTES] = {0};
    struct kvbm_hello hello = raw_who("first", 99);

    first.fd = connect_from(owner, honest);
    raw_hello(&first, KVBM_HELLO, &hello, NULL, 0);
    assert_true(raw_until(&first, KVBM_CHALLENGE));
    raw_say(&first, KVBM_PROOF, 0, mac, sizeof(mac));
    raw_say(&first, KVBM_READY, 0, NULL, 0);
    assert_true(raw_until(&first, KVBM_SETS_TOLD));
    strangers(owner, stranger, 3 * BETWEEN_STEPS, words, len);
    for (uint32_t i = 0; i < HONEST; i++)
        raw[i].fd = connect_from(owner, honest);
    strangers(owner, stranger, n_strangers, words, len);
    settle(&first);
    for (uint32_t i = 0; i < HONEST; i++) {
        hello = raw_who("honest", 100 + i);
        snprintf(hello.who.name, sizeof(hello.who.name), "honest%u", i);
        raw_hello(&raw[i], KVBM_HELLO, &hello, NULL, 0);
        assert_true(raw_until(&raw[i], KVBM_CHALLENGE));
    }
    strangers(owner, stranger, n_strangers, words, len);
    settle(&first);
    for (uint32_t i = 0; i < HONEST; i++) {
        raw_say(&raw[i], KVBM_PROOF, 0, mac, sizeof(mac));
        assert_true(raw_until(&raw[i], KVBM_WELCOME));
    }
    strangers(owner, stranger, n_strangers, words, len);
    settle(&first);
    for (uint32_t i = 0; i < HONEST; i++) {
        raw_say(&raw[i], KVBM_READY, 0, NULL, 0);
        assert_true(raw_until(&raw[i], KVBM_SETS_TOLD));
        close(raw[i].fd);
    }
    close(first.fd);
    end_crowd();
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

static const char half[] = "KVP\1\1\0";

/* From the honest ones' own address, and at that it may be as many as they like from another one. */
static void test_silent(void **state)
{
    (void)state;
    open_beside("127.0.0.1", "127.0.0.1", BETWEEN_STEPS, NULL, 0);
    open_beside("127.0.0.1", "127.0.0.2", 3 * BETWEEN_STEPS, NULL, 0);
}

/* Strangers that begin, too. */
static void test_begun(void **state)
{
    (void)state;
    open_beside("127.0.0.1", "127.0.0.2", 3 * BETWEEN_STEPS, half, sizeof(half) - 1);
}

/* ---- TLS: an honest opener's packets pass through a relay, which lets strangers go first ---- */

struct relay {
    struct kvbm_agent *owner, *opener;
    int fd; /* listens; then the opener's connection */
    char at[64];
    int err;
    pthread_t carries, opens;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint32_t n_holding, n_over, n_turns; /* under lock */

/* Hold what an opener has said until the strangers had their turn. */
static void hold(void)
{
    uint32_t turn;

    pthread_mutex_lock(&lock);
    turn = n_turns;
    n_holding++;
    pthread_cond_broadcast(&changed);
    while (n_turns == turn)
        pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void *carry(void *arg)
{
    const struct relay *r = arg;
    int opener = accept(r->fd, NULL, NULL);
    struct pollfd polled[2] = {{.fd = opener, .events = POLLIN},
                               {.fd = connect_from(r->owner, "127.0.0.1"), .events = POLLIN}};
    ssize_t n = 1;

    while (n > 0 && poll(polled, 2, -1) > 0) {
        for (int i = 0; i < 2 && n > 0; i++) {
            static _Thread_local char bytes[65536];

            if (!polled[i].revents)
                continue;
            n = recv(polled[i].fd, bytes, sizeof(bytes), 0);
            if (n > 0 && i == 0)
                hold();
            if (n > 0)
                (void)!send(polled[1 - i].fd, bytes, (size_t)n, MSG_NOSIGNAL);
        }
    }
    close(polled[0].fd);
    close(polled[1].fd);
    pthread_mutex_lock(&lock);
    n_over++;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return NULL;
}

static void *open_one(void *arg)
{
    struct relay *r = arg;
    struct kvbm_session *session = NULL;

    r->err = open_with(r->opener, r->at, 0, NULL, &session);
    if (r->err == 0)
        (void)kvbm_session_close(session);
    return NULL;
}

static void secure(struct kvbm_agent_opts *opts)
{
    opts->tls_cert = pem.cert;
    opts->tls_key = pem.key;
    opts->tls_ca = pem.ca;
}

static void begin_relay(struct relay *r, struct kvbm_agent *owner, uint32_t number)
{
    char name[32];
    struct kvbm_agent_opts opts = session_opts(name, NULL);
    struct sockaddr_in here = {.sin_family = AF_INET};
    socklen_t len = sizeof(here);

    snprintf(name, sizeof(name), "honest%u", number);
    secure(&opts);
    *r = (struct relay){.owner = owner,
                        .opener = agent_of(&opts),
                        .fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    assert_int_equal(bind(r->fd, (struct sockaddr *)&here, sizeof(here)), 0);
    assert_int_equal(listen(r->fd, 1), 0);
    assert_int_equal(getsockname(r->fd, (struct sockaddr *)&here, &len), 0);
    snprintf(r->at, sizeof(r->at), "tcp:127.0.0.1:%u", ntohs(here.sin_port));
    assert_int_equal(pthread_create(&r->carries, NULL, carry, r), 0);
    assert_int_equal(pthread_create(&r->opens, NULL, open_one, r), 0);
}

/* Let strangers come whenever all openers have said something, until all have ended. */
static void let_strangers_first(struct kvbm_agent *owner, struct kvbm_session *settled)
{
    for (;;) {
        struct kvbm_reply reply;
        bool over;

        pthread_mutex_lock(&lock);
        while (n_holding + n_over < HONEST)
            pthread_cond_wait(&changed, &lock);
        over = n_over == HONEST;
        pthread_mutex_unlock(&lock);
        if (over)
            return;
        strangers(owner, "127.0.0.1", BETWEEN_STEPS, NULL, 0);
        for (int i = 0; i < 4; i++) { /* a round of the listener takes 64 of them */
            assert_int_equal(kvbm_session_call(settled, ECHO, NULL, 0, -1, soon(), &reply), 0);
            kvbm_reply_fini(&reply);
        }
        pthread_mutex_lock(&lock);
        n_holding = 0;
        n_turns++;
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&lock);
    }
}

static void test_tls(void **state)
{
    static const char *const at = "tcp:127.0.0.1:0";
    static struct relay relays[HONEST];
    struct kvbm_agent_opts opts = session_opts("owner", &at);
    struct kvbm_agent *owner, *first;
    struct kvbm_session *session;

    (void)state;
    if (!certificates_make(&pem))
        skip_because("openssl makes no certificates here");
    secure(&opts);
    owner = agent_of(&opts);
    opts = session_opts("first", NULL);
    secure(&opts);
    first = agent_of(&opts);
    session = open_session(first, owner, 0);
    strangers(owner, "127.0.0.1", 3 * BETWEEN_STEPS, NULL, 0);
    for (uint32_t i = 0; i < HONEST; i++)
        begin_relay(&relays[i], owner, i);
    let_strangers_first(owner, session);
    for (uint32_t i = 0; i < HONEST; i++) {
        pthread_join(relays[i].carries, NULL);
        pthread_join(relays[i].opens, NULL);
        assert_int_equal(relays[i].err, 0);
        assert_int_equal(kvbm_agent_destroy(relays[i].opener), 0);
        close(relays[i].fd);
    }
    end_crowd();
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(first), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
    certificates_remove(&pem);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_silent),
        cmocka_unit_test(test_begun),
        cmocka_unit_test(test_tls),
    };

    kv_log_set_level(KV_LOG_ERROR);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
