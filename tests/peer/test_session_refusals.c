// SPDX-License-Identifier: Apache-2.0
/*
 * Agents that don't fit: each refusal has its error and its words, on the side that opens and in the
 * log of the side that listens. Tokens, TLS on one side, another model, names taken twice, restarts.
 */
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

#include "base/core/log.h"
#include "base/unit.h"
#include "certificates.h"
#include "session_unit.h"
#include "skip.h"

/* ---- the log ---- */

static struct {
    pthread_mutex_t lock;
    char lines[16384];
    size_t len;
} heard = {.lock = PTHREAD_MUTEX_INITIALIZER};

static void hear(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg, (void)level;
    pthread_mutex_lock(&heard.lock);
    if (heard.len + len + 2 < sizeof(heard.lines)) {
        memcpy(heard.lines + heard.len, line, len);
        heard.len += len;
        heard.lines[heard.len++] = '\n';
        heard.lines[heard.len] = '\0';
    }
    pthread_mutex_unlock(&heard.lock);
}

static bool has_heard(const char *words)
{
    bool found;

    pthread_mutex_lock(&heard.lock);
    found = strstr(heard.lines, words) != NULL;
    pthread_mutex_unlock(&heard.lock);
    return found;
}

/* Wait until the log has words: of the other side, which writes them on its own thread. */
static void await_words(const char *words)
{
    uint64_t deadline = soon();

    while (!has_heard(words)) {
        if (kv_now_ns() > deadline)
            fail_msg("\"%s\" isn't in the log:\n%s", words, heard.lines);
        usleep(1000);
    }
}

static int setup(void **state)
{
    (void)state;
    pthread_mutex_lock(&heard.lock);
    heard.len = 0;
    heard.lines[0] = '\0';
    pthread_mutex_unlock(&heard.lock);
    kv_log_set_sink(hear, NULL);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    kv_log_set_sink(NULL, NULL);
    return 0;
}

/* Open a session between agents of these options, which must fail so, with @words in the reason. */
static void expect(const struct kvbm_agent_opts *listener, const struct kvbm_agent_opts *opener,
                   int err, const char *words)
{
    struct kvbm_agent *to = agent_of(listener), *from = agent_of(opener);
    struct kvbm_session *session = NULL;
    char why[256] = "";
    int rc = open_with(from, endpoint_of(to), 0, why, &session);

    if (rc != err || !strstr(why, words))
        fail_msg("%d (%s) instead of %d (%s)", rc, why, err, words);
    assert_null(session);
    assert_int_equal(kvbm_agent_destroy(from), 0);
    assert_int_equal(kvbm_agent_destroy(to), 0);
}

static const char *const tcp = "tcp:127.0.0.1:0";

/* Both sides' logs have the words. The first test: a side writes few such lines a second. */
static void test_logs(void **state)
{
    struct kvbm_agent_opts listener = session_opts("owner", &tcp);
    struct kvbm_agent_opts opener = session_opts("reader", NULL);

    (void)state;
    opener.fingerprint = "another";
    expect(&listener, &opener, -EMEDIUMTYPE, "another model: fingerprint");
    await_words("msg=\"a session is refused\" agent=owner peer=reader");
    await_words("msg=\"no session comes about\" agent=reader");
    await_words("another model: fingerprint");
}

static void test_models(void **state)
{
    struct kvbm_agent_opts listener = session_opts("owner", &tcp);
    struct kvbm_agent_opts opener = session_opts("reader", NULL);
    struct kvbm_layout_config a = small_config(), b = small_config();

    (void)state;
    opener.fingerprint = "another";
    expect(&listener, &opener, -EMEDIUMTYPE, "another model: fingerprint");
    opener.fingerprint = "model";
    opener.key_len = 16;
    expect(&listener, &opener, -EMEDIUMTYPE, "keys of 16 bytes by reader, of 8 by owner");
    opener.key_len = 0;
    listener.layout = &a;
    opener.layout = &b;
    b.page_size *= 2;
    expect(&listener, &opener, -EMEDIUMTYPE, "tokens differ: 8 by reader, 4 by owner");
    b = a;
    b.num_layers = 3;
    expect(&listener, &opener, -EMEDIUMTYPE, "layers differ: 3 by reader, 2 by owner");
    b = a;
    b.outer_dim = 1;
    expect(&listener, &opener, -EMEDIUMTYPE, "parts (K, V) differ: 1 by reader, 2 by owner");
}

static void test_selves(void **state)
{
    struct kvbm_agent_opts listener = session_opts("owner", &tcp);
    struct kvbm_agent_opts opener = session_opts("owner", NULL);

    (void)state;
    expect(&listener, &opener, -ELOOP, "the name or worker of owner");
    opener.name = "reader";
    opener.worker = listener.worker = 5;
    expect(&listener, &opener, -ELOOP, "the name or worker of owner");
}

/* Two peers of one name, and of one worker; the second session of one peer is fine. */
static void test_twice(void **state)
{
    struct kvbm_agent *owner = agent_at("owner", tcp), *first, *again, *same_worker;
    struct kvbm_agent_opts opts = session_opts("reader", NULL);
    struct kvbm_session *session, *second, *none = NULL;
    char why[256];

    (void)state;
    opts.worker = 7;
    first = agent_of(&opts);
    again = agent_of(&opts);
    opts.name = "other";
    same_worker = agent_of(&opts);
    session = open_session(first, owner, 0);
    second = open_session(first, owner, 0);
    assert_int_equal(open_with(again, endpoint_of(owner), 0, why, &none), -EEXIST);
    assert_non_null(strstr(why, "a session of an earlier reader is open"));
    assert_int_equal(open_with(same_worker, endpoint_of(owner), 0, why, &none), -EEXIST);
    assert_non_null(strstr(why, "another peer of owner has that name or worker"));
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_session_close(second), 0);
    for (uint64_t deadline = soon();; usleep(1000)) { /* until the owner has seen the end */
        int rc = open_with(again, endpoint_of(owner), 0, why, &session);

        if (rc == 0)
            break;
        assert_int_equal(rc, -EEXIST);
        assert_true(kv_now_ns() < deadline);
    }
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(first), 0);
    assert_int_equal(kvbm_agent_destroy(again), 0);
    assert_int_equal(kvbm_agent_destroy(same_worker), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

static void test_full(void **state)
{
    struct kvbm_agent_opts opts = session_opts("owner", &tcp);
    struct kvbm_agent *owner, *a = agent_at("a", NULL), *b = agent_at("b", NULL);
    struct kvbm_session *session, *none = NULL;
    char why[256];

    (void)state;
    opts.max_sessions = 1;
    owner = agent_of(&opts);
    session = open_session(a, owner, 0);
    assert_int_equal(open_with(b, endpoint_of(owner), 0, why, &none), -ENOSPC);
    assert_non_null(strstr(why, "owner has 1 sessions, as many as it may"));
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(a), 0);
    assert_int_equal(kvbm_agent_destroy(b), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

/* ---- tokens ---- */

static const char *token_file(const char *name, const char *text, mode_t mode)
{
    static char paths[4][80];
    static int n;
    char *path = paths[n++ % 4];
    FILE *file;

    snprintf(path, sizeof(paths[0]), "/tmp/kvbm-test-%d-%s", (int)getpid(), name);
    unlink(path);
    file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(chmod(path, mode), 0);
    return path;
}

static void test_tokens(void **state)
{
    const char *at = unix_endpoint();
    struct kvbm_agent_opts listener = session_opts("owner", &at);
    struct kvbm_agent_opts opener = session_opts("reader", NULL);
    const char *right = token_file("right", "sixteen bytes or more\n", 0600);
    const char *same = token_file("same", "sixteen bytes or more", 0640);
    const char *wrong = token_file("wrong", "sixteen bytes or Less\n", 0600);
    struct kvbm_agent *owner, *reader;

    (void)state;
    listener.token_file = right;
    expect(&listener, &opener, -EACCES, "the listener has a token, the opener has none");
    opener.token_file = wrong;
    expect(&listener, &opener, -EACCES, "the tokens differ");
    listener.token_file = NULL;
    expect(&listener, &opener, -EACCES, "the opener has a token, the listener has none");
    listener.token_file = right;
    opener.token_file = same;
    owner = agent_of(&listener);
    reader = agent_of(&opener);
    assert_int_equal(kvbm_session_close(open_session(reader, owner, 2)), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
    unlink(right);
    unlink(same);
    unlink(wrong);
}

static void test_token_files(void **state)
{
    struct kvbm_agent_opts opts = session_opts("owner", NULL);
    struct kvbm_agent *agent = NULL;

    (void)state;
    opts.token_file = token_file("open", "sixteen bytes or more", 0644);
    assert_int_equal(kvbm_agent_create(&opts, &agent), -EACCES);
    unlink(opts.token_file);
    opts.token_file = token_file("short", "fifteen bytes..\n", 0600);
    assert_int_equal(kvbm_agent_create(&opts, &agent), -EINVAL);
    unlink(opts.token_file);
    assert_int_equal(kvbm_agent_create(&opts, &agent), -ENOENT);
    opts.token_file = "/dev/null";
    assert_int_equal(kvbm_agent_create(&opts, &agent), -EINVAL);
    assert_null(agent);
    assert_true(has_heard("other users may read or write it"));
    assert_true(has_heard("a token has 16 to 4096 bytes"));
}

/* ---- endpoints ---- */

static void test_endpoints(void **state)
{
    static const struct {
        const char *text;
        int err;
    } cases[] = {{"tcp:0.0.0.0:0", -EPERM},
                 {"tcp:*:0", -EPERM},
                 {"tcp:127.0.0.1", -EINVAL},
                 {"unix:relative", -EINVAL},
                 {"http://a", -EINVAL},
                 {"", -EINVAL},
                 {"tcp:127.0.0.1:99999", -EINVAL},
                 {"unix:/nowhere/at/all", -ENOENT}};
    struct kvbm_agent *agent = NULL;
    char small[4];
    size_t needed = 0;

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct kvbm_agent_opts opts = session_opts("owner", &cases[i].text);

        opts.n_listen = 1;
        assert_int_equal(kvbm_agent_create(&opts, &agent), cases[i].err);
        if (cases[i].err == -EPERM) { /* asked for */
            opts.unprotected = true;
            assert_int_equal(kvbm_agent_create(&opts, &agent), 0);
            assert_int_equal(kvbm_agent_destroy(agent), 0);
        }
    }
    agent = agent_at("owner", tcp);
    assert_int_equal(kvbm_agent_endpoint(agent, 0, small, sizeof(small), &needed), -ENOSPC);
    assert_int_equal(needed, strlen(endpoint_of(agent)) + 1);
    assert_int_equal(kvbm_agent_endpoint(agent, 1, small, sizeof(small), NULL), -ENOENT);
    assert_int_equal(kvbm_agent_destroy(agent), 0);
}

/* The file of a dead process' socket is in nobody's way; that of a living one stays. */
static void test_stale_socket(void **state)
{
    const char *at = unix_endpoint();
    struct kvbm_agent_opts opts = session_opts("owner", &at);
    struct kvbm_agent *owner = agent_of(&opts), *again = NULL;
    char kept[128];

    (void)state;
    assert_int_equal(kvbm_agent_create(&opts, &again), -EADDRINUSE);
    snprintf(kept, sizeof(kept), "%s-kept", at + 5);
    assert_int_equal(link(at + 5, kept), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
    assert_int_equal(access(at + 5, F_OK), -1);
    assert_int_equal(rename(kept, at + 5), 0); /* as after kill -9 */
    owner = agent_of(&opts);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
}

static void test_nobody(void **state)
{
    struct kvbm_agent *reader = agent_at("reader", NULL), *gone = agent_at("gone", tcp);
    struct kvbm_session *session = NULL;
    char at[256], why[256];

    (void)state;
    snprintf(at, sizeof(at), "%s", endpoint_of(gone));
    assert_int_equal(kvbm_agent_destroy(gone), 0);
    assert_int_equal(open_with(reader, at, 0, why, &session), -ECONNREFUSED);
    assert_int_equal(open_with(reader, "unix:/nowhere/at/all", 0, why, &session), -ENOENT);
    assert_int_equal(open_with(reader, "nonsense", 0, NULL, &session), -EINVAL);
    assert_int_equal(kvbm_session_open(reader, at, NULL, NULL), -EINVAL);
    assert_int_equal(kvbm_session_close(NULL), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
}

/* ---- TLS ---- */

static void test_tls(void **state)
{
    struct kvbm_agent_opts listener = session_opts("owner", &tcp);
    struct kvbm_agent_opts opener = session_opts("reader", NULL);
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;
    struct kvbm_agent *owner, *reader;
    struct kvbm_session *session;
    struct certificates c;

    (void)state;
    if (!certificates_make(&c))
        skip_because("openssl makes no certificates here");
    listener.tls_cert = opener.tls_cert = c.cert;
    listener.tls_key = opener.tls_key = c.key;
    listener.tls_ca = opener.tls_ca = c.ca;
    owner = agent_of(&listener);
    reader = agent_of(&opener);
    assert_int_equal(kvbm_agent_serve(owner, ECHO, serve_echo, NULL), 0);
    session = open_session(reader, owner, 1);
    assert_int_equal(kvbm_session_get_info(session, &info), 0);
    assert_true(info.tls);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);

    opener.tls_cert = opener.tls_key = c.other; /* of another authority */
    expect(&listener, &opener, -EACCES, "certificate");
    opener = session_opts("reader", NULL);
    expect(&listener, &opener, -EPROTONOSUPPORT, "the listener wants TLS");
    opener.tls_cert = c.cert;
    opener.tls_key = c.key;
    opener.tls_ca = c.ca;
    listener = session_opts("owner", &tcp);
    expect(&listener, &opener, -EPIPE, "closed during the TLS handshake");
    certificates_remove(&c);
}

/* ---- TLS beside other work ---- */

static atomic_bool enough;

static void serve_slowly(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    usleep(3000);
    serve_echo(arg, session, request);
}

static void *call_until_enough(void *arg)
{
    while (!enough) {
        struct kvbm_reply reply = {.fd = -1};

        assert_int_equal(kvbm_session_call(arg, ECHO, "x", 1, -1, soon(), &reply), 0);
        kvbm_reply_fini(&reply);
    }
    return NULL;
}

/*
 * The listener's thread has other work between its look at the sockets and a handshake's last bytes: what
 * came behind these, in the same read, isn't left lying.
 */
static void test_tls_beside_others(void **state)
{
    const char *endpoints[] = {tcp, unix_endpoint()};
    struct kvbm_agent_opts listener = session_opts("owner", endpoints);
    struct kvbm_agent_opts opener = session_opts("reader", NULL);
    struct kvbm_agent *owner, *reader, *busy;
    struct kvbm_session *calls[3] = {NULL};
    pthread_t threads[3];
    struct certificates c;

    (void)state;
    if (!certificates_make(&c))
        skip_because("openssl makes no certificates here");
    listener.n_listen = 2;
    listener.tls_cert = opener.tls_cert = c.cert;
    listener.tls_key = opener.tls_key = c.key;
    listener.tls_ca = opener.tls_ca = c.ca;
    owner = agent_of(&listener);
    reader = agent_of(&opener);
    busy = agent_at("busy", NULL);
    assert_int_equal(kvbm_agent_serve(owner, ECHO, serve_slowly, NULL), 0);
    enough = false;
    for (size_t i = 0; i < KV_COUNT(calls); i++) {
        assert_int_equal(open_with(busy, endpoints[1], 0, NULL, &calls[i]), 0);
        assert_int_equal(pthread_create(&threads[i], NULL, call_until_enough, calls[i]), 0);
    }
    for (int i = 0; i < 60; i++) {
        struct kvbm_session *session = open_session(reader, owner, 0);

        assert_int_equal(kvbm_session_close(session), 0);
    }
    enough = true;
    for (size_t i = 0; i < KV_COUNT(calls); i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(kvbm_session_close(calls[i]), 0);
    }
    assert_int_equal(kvbm_agent_destroy(busy), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
    certificates_remove(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_logs, setup, teardown),
        cmocka_unit_test_setup_teardown(test_models, setup, teardown),
        cmocka_unit_test_setup_teardown(test_selves, setup, teardown),
        cmocka_unit_test_setup_teardown(test_twice, setup, teardown),
        cmocka_unit_test_setup_teardown(test_full, setup, teardown),
        cmocka_unit_test_setup_teardown(test_tokens, setup, teardown),
        cmocka_unit_test_setup_teardown(test_token_files, setup, teardown),
        cmocka_unit_test_setup_teardown(test_endpoints, setup, teardown),
        cmocka_unit_test_setup_teardown(test_stale_socket, setup, teardown),
        cmocka_unit_test_setup_teardown(test_nobody, setup, teardown),
        cmocka_unit_test_setup_teardown(test_tls, setup, teardown),
        cmocka_unit_test(test_tls_beside_others),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
