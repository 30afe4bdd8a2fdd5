// SPDX-License-Identifier: Apache-2.0
/*
 * Directories in a real etcd: registration and watch while registrants are killed, and while etcd is
 * killed, restarted, emptied, frozen and compacted.
 */
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "base/unit.h"
#include "directory_unit.h"
#include "etcd_unit.h"
#include "skip.h"

/* POST to etcd's gateway, past the library. Returns whether the answer is HTTP 200. */
static bool post(const char *path, const char *json)
{
    char command[1024];

    snprintf(
        command, sizeof(command),
        "curl -skf --noproxy '*' --max-time 30 -o /dev/null -d '%s' http%s://127.0.0.1:%u/v3/%s",
        json, etcd.tls ? "s" : "", etcd.ports[0], path);
    return system(command) == 0;
}

/* ---- directories ---- */

static char where[96];

static struct kvbm_directory *open_directory(struct seen *seen,
                                             const struct kvbm_directory_peer *self)
{
    struct kvbm_directory_opts opts = {.size = sizeof(opts),
                                       .peers = where,
                                       .changed = seen_changed,
                                       .arg = seen,
                                       .self = self,
                                       .ttl_s = 2};
    struct kvbm_directory *d = NULL;

    seen_init(seen);
    assert_int_equal(kvbm_directory_open(&opts, &d), 0);
    return d;
}

static bool have_etcd(void)
{
    return etcd_is_here() && system("command -v curl >/dev/null") == 0;
}

/* Begin a test: with an etcd of its own. */
static void begin(void)
{
    if (!have_etcd())
        skip_because("no etcd (Debian: etcd-server) or no curl here");
    assert_int_equal(etcd.pid, 0);
    etcd_choose_ports();
    /* nobody listens at the first server's address */
    snprintf(where, sizeof(where), "etcd://127.0.0.1:%u,127.0.0.1:%u/kvasir/test/", free_port(),
             etcd.ports[0]);
    etcd_start();
}

/* A process that registers itself, and is killed. */
static pid_t registrant(const char *name, uint64_t incarnation)
{
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0) {
        struct kvbm_directory_peer self = peer_named(name, incarnation);
        static struct seen seen;

        prctl(PR_SET_PDEATHSIG, SIGKILL);
        open_directory(&seen, &self);
        for (;;)
            pause();
    }
    return pid;
}

static void test_life(void **state)
{
    struct kvbm_directory_peer a = peer_named("a", 11), b = peer_named("b", UINT64_MAX),
                               found = {0};
    struct seen seen_a, seen_b, seen_c;
    struct kvbm_directory *da, *db, *dc;
    pid_t pid;

    (void)state;
    begin();
    pid = registrant("k", 5); /* before this process has threads */
    da = open_directory(&seen_a, &a);
    wait_until(info_of(da).registered);
    db = open_directory(&seen_b, &b);
    wait_until(seen_find(&seen_a, "b", &found));
    assert_true(found.incarnation == UINT64_MAX && found.worker == 0 && found.n_endpoints == 2);
    assert_string_equal(found.endpoints[1], b.endpoints[1]);
    wait_until(seen_find(&seen_b, "a", NULL) && seen_find(&seen_b, "k", NULL));
    wait_until(seen_find(&seen_a, "k", NULL));
    assert_int_equal(seen_count(&seen_a), 2); /* without itself */
    dc = open_directory(&seen_c, NULL);       /* only looks */
    wait_until(seen_count(&seen_c) == 3);
    /* nonsense below the prefix, and a peer under another's key, are left out */
    assert_true(post("kv/put", "{\"key\":\"L2t2YXNpci90ZXN0L3g=\",\"value\":\"bm9uc2Vuc2U=\"}"));
    /* a registrant that dies is removed by its lease */
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
    wait_until(!seen_find(&seen_a, "k", NULL) && !seen_find(&seen_c, "k", NULL));
    /* one that leaves, at once */
    kvbm_directory_close(db);
    wait_until(!seen_find(&seen_a, "b", NULL) && seen_count(&seen_c) == 1);
    wait_until(info_of(dc).left_out == 1);
    /* somebody removes all keys: those who live come back */
    assert_true(post("kv/deleterange", "{\"key\":\"AA==\",\"range_end\":\"AA==\"}"));
    wait_until(seen_find(&seen_c, "a", NULL) && info_of(da).registered);
    kvbm_directory_close(da);
    wait_until(seen_count(&seen_c) == 0);
    assert_true(seen_calls(&seen_c) < 1000000 && seen_calls(&seen_a) < 1000000);
    kvbm_directory_close(dc);
}

static void test_restarts(void **state)
{
    struct kvbm_directory_peer a = peer_named("a", 1), b = peer_named("b", 2);
    struct seen seen_a, seen_b;
    struct kvbm_directory *da, *db;
    uint64_t failures;

    (void)state;
    begin();
    da = open_directory(&seen_a, &a);
    db = open_directory(&seen_b, &b);
    wait_until(seen_find(&seen_a, "b", NULL) && seen_find(&seen_b, "a", NULL));
    /* killed: what was known stays */
    etcd_kill();
    failures = info_of(da).failures;
    wait_until(info_of(da).failures > failures + 1 && !info_of(da).current);
    assert_true(seen_find(&seen_a, "b", NULL));
    etcd_start();
    wait_until(info_of(da).registered && info_of(db).registered);
    wait_until(seen_find(&seen_a, "b", NULL) && seen_find(&seen_b, "a", NULL));
    /* another etcd in its place, which knows nothing: revisions begin again */
    etcd_kill();
    etcd_forget();
    wait_until(!info_of(da).current && !info_of(db).current);
    etcd_start();
    wait_until(info_of(da).registered && info_of(db).registered);
    wait_until(seen_find(&seen_a, "b", NULL) && seen_find(&seen_b, "a", NULL));
    kvbm_directory_close(db);
    wait_until(seen_count(&seen_a) == 0);
    kvbm_directory_close(da);
}

/* Frozen beyond the deadlines and the leases; thawed, with changes compacted meanwhile. */
static void test_frozen(void **state)
{
    struct kvbm_directory_peer a = peer_named("a", 1), b = peer_named("b", 2);
    struct seen seen_a, seen_b;
    struct kvbm_directory *da, *db;
    uint64_t began;

    (void)state;
    begin();
    da = open_directory(&seen_a, &a);
    db = open_directory(&seen_b, &b);
    wait_until(seen_find(&seen_a, "b", NULL) && seen_find(&seen_b, "a", NULL));
    assert_int_equal(kill(etcd.pid, SIGSTOP), 0);
    wait_until(!info_of(da).current && !info_of(db).current);
    began = kv_now_ns();
    kvbm_directory_close(db); /* can't say goodbye, and doesn't wait long for it */
    assert_true(kv_now_ns() - began < 30 * KV_NS_PER_S);
    assert_int_equal(kill(etcd.pid, SIGCONT), 0);
    wait_until(post("kv/put", "{\"key\":\"eA==\",\"value\":\"eA==\"}"));
    wait_until(post("kv/compaction", "{\"revision\":\"4\"}"));
    wait_until(info_of(da).registered);
    wait_until(!seen_find(&seen_a, "b", NULL)); /* by its lease */
    db = open_directory(&seen_b, &b);
    wait_until(seen_find(&seen_a, "b", NULL) && seen_find(&seen_b, "a", NULL));
    kvbm_directory_close(da);
    kvbm_directory_close(db);
}

/* Run a command in the test's folder. */
static void run(const char *what)
{
    char command[512];

    snprintf(command, sizeof(command), "cd %s && %s", etcd.folder, what);
    assert_int_equal(system(command), 0);
}

/* TLS with an authority of one's own; users with passwords. */
static void test_secure(void **state)
{
    struct kvbm_directory_peer a = peer_named("a", 1);
    struct seen seen_a, seen_b;
    char ca[64], password[64];
    struct kvbm_directory_opts opts = {.size = sizeof(opts),
                                       .peers = where,
                                       .changed = seen_changed,
                                       .arg = &seen_a,
                                       .self = &a,
                                       .ttl_s = 2,
                                       .tls_ca = ca};
    struct kvbm_directory *da = NULL, *db = NULL;

    (void)state;
    if (!have_etcd() || system("command -v openssl >/dev/null") != 0)
        skip_because("no etcd (Debian: etcd-server), curl or openssl here");
    run("openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
        "-subj /CN=kv -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem "
        "2>/dev/null && echo secret >password && echo wrong >wrong");
    snprintf(ca, sizeof(ca), "%s/cert.pem", etcd.folder);
    etcd.tls = true;
    begin();
    memmove(where + 5, where + 4, strlen(where + 4) + 1);
    where[4] = 's';
    assert_true(post("auth/user/add", "{\"name\":\"root\",\"password\":\"secret\"}"));
    assert_true(post("auth/role/add", "{\"name\":\"root\"}"));
    assert_true(post("auth/user/grant", "{\"user\":\"root\",\"role\":\"root\"}"));
    assert_true(post("auth/enable", "{}"));
    seen_init(&seen_a);
    seen_init(&seen_b);
    assert_int_equal(kvbm_directory_open(&opts, &da), 0); /* without a user */
    wait_until(strstr(info_of(da).error, "user name is empty"));
    kvbm_directory_close(da);
    opts.user = "root";
    opts.password_file = password;
    snprintf(password, sizeof(password), "%s/wrong", etcd.folder);
    assert_int_equal(kvbm_directory_open(&opts, &da), 0);
    wait_until(strstr(info_of(da).error, "authentication failed"));
    kvbm_directory_close(da);
    snprintf(password, sizeof(password), "%s/password", etcd.folder);
    opts.tls_ca = NULL; /* an authority that the system doesn't know */
    assert_int_equal(kvbm_directory_open(&opts, &da), 0);
    wait_until(strstr(info_of(da).error, "certificate"));
    kvbm_directory_close(da);
    opts.tls_ca = ca;
    assert_int_equal(kvbm_directory_open(&opts, &da), 0);
    opts.self = NULL;
    opts.arg = &seen_b;
    assert_int_equal(kvbm_directory_open(&opts, &db), 0);
    wait_until(seen_find(&seen_b, "a", NULL));
    wait_until(info_of(da).registered);
    kvbm_directory_close(da);
    wait_until(!seen_find(&seen_b, "a", NULL));
    kvbm_directory_close(db);
    run("rm -f key.pem cert.pem password wrong");
}

static int teardown(void **state)
{
    etcd.tls = false;
    (void)state;
    if (etcd.pid) {
        kill(etcd.pid, SIGCONT);
        etcd_kill();
    }
    etcd_forget();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_teardown(test_life, teardown),
        cmocka_unit_test_teardown(test_restarts, teardown),
        cmocka_unit_test_teardown(test_frozen, teardown),
        cmocka_unit_test_teardown(test_secure, teardown),
    };
    int failed;

    if (!mkdtemp(etcd.folder))
        return 1;
    failed = cmocka_run_group_tests(tests, NULL, NULL);
    rmdir(etcd.folder);
    return failed;
}
