// SPDX-License-Identifier: Apache-2.0
/* Directories from a list and from a file, and the options of all kinds. */
#include "base/unit.h"
#include "directory_unit.h"
#include "kvbm.h"

static struct seen seen;
static char path[] = "/tmp/kv-peers-XXXXXX";
static char where[64];

static struct kvbm_directory *
open_directory(const char *peers, const struct kvbm_directory_peer *self, uint32_t max_peers)
{
    struct kvbm_directory_opts opts = {.size = sizeof(opts),
                                       .peers = peers,
                                       .changed = seen_changed,
                                       .arg = &seen,
                                       .self = self,
                                       .max_peers = max_peers,
                                       .reread_ms = 5};
    struct kvbm_directory *d = NULL;

    seen_init(&seen);
    assert_int_equal(kvbm_directory_open(&opts, &d), 0);
    return d;
}

/* Replace the file at once, as careful programs do. */
static void write_file(const char *text)
{
    char next[sizeof(path) + 8];
    FILE *file;

    snprintf(next, sizeof(next), "%s.new", path);
    file = fopen(next, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(next, path), 0);
}

static void test_list(void **state)
{
    struct kvbm_directory_peer self = peer_named("me", 1), found = {0};
    struct kvbm_directory *d = open_directory(
        " tcp:10.0.0.2:7000, unix:/run/b.sock,,tcp:[fd00::1]:1\t unix:/run/me.sock", &self, 0);

    (void)state;
    wait_until(info_of(d).current);
    assert_int_equal(seen_count(&seen), 3); /* without itself */
    assert_true(seen_find(&seen, "tcp:10.0.0.2:7000", &found));
    assert_true(!*found.name && found.n_endpoints == 1 && !found.worker);
    assert_true(seen_find(&seen, "unix:/run/b.sock", NULL));
    assert_true(seen_find(&seen, "tcp:[fd00::1]:1", NULL));
    kvbm_directory_close(d);
    assert_int_equal(seen_count(&seen), 3); /* closing tells nothing */
}

static char last_line[1024];
static pthread_mutex_t line_lock = PTHREAD_MUTEX_INITIALIZER;

static void keep_line(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    pthread_mutex_lock(&line_lock);
    if (strstr(line, "not an endpoint of a peer"))
        snprintf(last_line, sizeof(last_line), "%s", line);
    pthread_mutex_unlock(&line_lock);
}

static bool logged(const char *what)
{
    bool found;

    pthread_mutex_lock(&line_lock);
    found = strstr(last_line, what) != NULL;
    pthread_mutex_unlock(&line_lock);
    return found;
}

static void test_file(void **state)
{
    struct kvbm_directory *d;
    uint64_t calls;

    (void)state;
    write_file("# who is there\n\n  tcp:10.0.0.2:7000  # the first\r\nunix:/run/b.sock");
    d = open_directory(where, NULL, 0);
    wait_until(seen_count(&seen) == 2);
    assert_true(seen_find(&seen, "tcp:10.0.0.2:7000", NULL));
    calls = seen_calls(&seen);
    write_file("unix:/run/b.sock\nunix:/run/c.sock\n"); /* one goes, one comes, one stays */
    wait_until(seen_find(&seen, "unix:/run/c.sock", NULL) && seen_count(&seen) == 2);
    assert_int_equal(seen_calls(&seen), calls + 2);
    write_file("unix:/run/b.sock\n# x\nnonsense\nunix:/run/c.sock\nunix:/run/e.sock\n");
    wait_until(seen_count(&seen) == 3);
    wait_until(info_of(d).left_out == 1);
    assert_true(logged("line=3") && logged(path));
    /* a file that is gone changes nothing, until it is back */
    assert_int_equal(unlink(path), 0);
    wait_until(info_of(d).failures >= 2);
    assert_true(!info_of(d).current && *info_of(d).error);
    assert_int_equal(seen_count(&seen), 3);
    write_file("");
    wait_until(seen_count(&seen) == 0);
    wait_until(info_of(d).current);
    assert_true(!*info_of(d).error && info_of(d).n_peers == 0);
    kvbm_directory_close(d);
}

/* Many peers: those beyond the limit are left out and counted; places that become free are taken. */
static void test_limit(void **state)
{
    struct kvbm_directory *d;
    FILE *file = fopen(path, "w");

    (void)state;
    assert_non_null(file);
    for (int i = 0; i < 500; i++)
        fprintf(file, "tcp:10.0.%d.%d:7000\n", i / 250, i % 250);
    fclose(file);
    d = open_directory(where, NULL, 40);
    wait_until(info_of(d).left_out == 460);
    assert_int_equal(info_of(d).n_peers, 40);
    assert_int_equal(seen_count(&seen), 40);
    write_file("tcp:10.0.1.249:7000\n");
    wait_until(seen_count(&seen) == 1 && info_of(d).left_out == 0);
    assert_true(seen_find(&seen, "tcp:10.0.1.249:7000", NULL));
    kvbm_directory_close(d);
}

static int refused(struct kvbm_directory_opts opts)
{
    struct kvbm_directory *d = NULL;
    int err = kvbm_directory_open(&opts, &d);

    assert_null(d);
    return err;
}

static void test_refusals(void **state)
{
    static const char *const bad[] = {
        "nonsense",
        "tcp:host",
        "tcp:*:1",
        "tcp:host:0",
        "tcp://host:1",
        "unix:relative",
        "etcd://",
        "etcd:///prefix",
        "etcd://host:1",
        "etcd://host:1/",
        "etcd://host/prefix",
        "etcd://host:0/prefix",
        "etcd://host:1,/prefix",
        "etcd://a:1,a:2,a:3,a:4,a:5,a:6,a:7,a:8,a:9/prefix",
        "etcds://[::1/prefix",
        "etcd://user@host:1/prefix",
    };
    struct kvbm_directory_opts opts = {.size = sizeof(opts), .changed = seen_changed, .arg = &seen};
    struct kvbm_directory_peer self = peer_named("me", 1);
    struct kvbm_directory_info info = KVBM_DIRECTORY_INFO_INIT;

    (void)state;
    assert_int_equal(refused(opts), -EINVAL);
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        opts.peers = bad[i];
        if (refused(opts) != -EINVAL)
            fail_msg("%s", bad[i]);
    }
    opts.peers = "file:/nonexistent/peers";
    assert_int_equal(refused(opts), -ENOENT);
    opts.peers = "file:/";
    assert_int_equal(refused(opts), -EISDIR);
    opts.peers = "etcd://127.0.0.1:1/prefix";
    opts.user = "root";
    assert_int_equal(refused(opts), -EINVAL);
    opts.password_file = "/nonexistent/password";
    assert_int_equal(refused(opts), -ENOENT);
    opts.user = opts.password_file = NULL;
    opts.ttl_s = 3601;
    assert_int_equal(refused(opts), -EINVAL);
    opts.ttl_s = 0;
    opts.max_peers = 65537;
    assert_int_equal(refused(opts), -EINVAL);
    opts.max_peers = 0;
    opts.self = &self;
    self.incarnation = 0;
    assert_int_equal(refused(opts), -EINVAL);
    self = peer_named("me/you", 1);
    assert_int_equal(refused(opts), -EINVAL);
    self = peer_named("me", 1);
    self.n_endpoints = 9;
    assert_int_equal(refused(opts), -EINVAL);
    self.n_endpoints = 0;
    assert_int_equal(refused(opts), -EINVAL);
    opts.changed = NULL;
    assert_int_equal(refused(opts), -EINVAL);
    assert_int_equal(kvbm_directory_get_info(NULL, &info), -EINVAL);
    kvbm_directory_close(NULL);
}

/* A machine without libkvbm_http: lists and files work, etcd says what it needs. */
static void test_without_http(void **state)
{
    struct kvbm_directory_opts opts = {.size = sizeof(opts),
                                       .peers = "etcd://127.0.0.1:1/prefix",
                                       .changed = seen_changed,
                                       .arg = &seen};

    (void)state;
    setenv("KVBM_HTTP_LIBRARY", "/nonexistent/libkvbm_http.so.0", 1);
    assert_int_equal(refused(opts), -ENOTSUP);
    assert_int_equal(refused(opts), -ENOTSUP);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_list),     cmocka_unit_test(test_file),
        cmocka_unit_test(test_limit),    cmocka_unit_test(test_without_http),
        cmocka_unit_test(test_refusals),
    };
    int fd = mkstemp(path), failed;

    assert_true(fd >= 0);
    close(fd);
    snprintf(where, sizeof(where), "file:%s", path);
    kvbm_set_log(keep_line, NULL);
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    unlink(path);
    return failed;
}
