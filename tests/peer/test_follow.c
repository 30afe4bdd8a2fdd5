// SPDX-License-Identifier: Apache-2.0
/* Agents that follow a directory: sessions with whoever is in it, and with nobody who has left. */
#include <stdatomic.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "base/unit.h"
#include "kvbm_directory.h"
#include "peer/session/agent.h"
#include "session_unit.h"

static struct kvbm_follower *follow(struct kvbm_agent *agent, const char *peers)
{
    const struct kvbm_directory_opts directory = {
        .size = sizeof(directory), .peers = peers, .reread_ms = 20};
    const struct kvbm_follow_opts opts = {
        .size = sizeof(opts), .directory = &directory, .retry_ms = 100};
    struct kvbm_follower *follower = NULL;

    assert_int_equal(kvbm_agent_follow(agent, &opts, &follower), 0);
    return follower;
}

static struct kvbm_follower_info info_of(struct kvbm_follower *follower)
{
    struct kvbm_follower_info info = KVBM_FOLLOWER_INFO_INIT;

    assert_int_equal(kvbm_follower_get_info(follower, &info), 0);
    return info;
}

static void wait_for(struct kvbm_follower *follower, uint32_t n_peers, uint32_t n_open)
{
    for (uint64_t end = soon();;) {
        struct kvbm_follower_info info = info_of(follower);

        if (info.n_peers == n_peers && info.n_open == n_open)
            return;
        assert_true(kv_now_ns() < end);
        usleep(1000);
    }
}

static bool has_session(struct kvbm_agent *agent, struct kvbm_agent *with)
{
    struct kvbm_session *session = kvbm_session_find(agent, with->worker);

    kvbm_session_put(session);
    return session != NULL;
}

static void write_peers(const char *path, const char *text)
{
    char temporary[96];
    FILE *file;

    snprintf(temporary, sizeof(temporary), "%s.new", path);
    file = fopen(temporary, "we");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(rename(temporary, path), 0);
}

/* Two peers and the agent itself: sessions with the two. One that dies and returns is found again. */
static void test_list(void **state)
{
    char a_at[80], b_at[80], self_at[80], peers[300];
    struct kvbm_agent *a, *b, *self;
    struct kvbm_follower *follower;

    (void)state;
    strcpy(a_at, unix_endpoint());
    strcpy(b_at, unix_endpoint());
    strcpy(self_at, unix_endpoint());
    a = agent_at("a", a_at);
    b = agent_at("b", b_at);
    self = agent_at("self", self_at);
    snprintf(peers, sizeof(peers), "%s, %s, %s", a_at, self_at, b_at);
    follower = follow(self, peers);
    wait_for(follower, 2, 2);
    assert_true(has_session(self, a));
    assert_true(has_session(self, b));
    assert_int_equal(kvbm_agent_destroy(self), -EBUSY); /* its follower has sessions */
    assert_int_equal(kvbm_agent_destroy(b), 0);
    wait_for(follower, 2, 1);
    assert_true(has_session(self, a));
    b = agent_at("b", b_at);
    wait_for(follower, 2, 2);
    assert_true(has_session(self, b));
    assert_int_equal(kvbm_follower_close(follower), 0);
    assert_int_equal(kvbm_agent_destroy(self), 0);
    assert_int_equal(kvbm_agent_destroy(a), 0);
    assert_int_equal(kvbm_agent_destroy(b), 0);
}

/* Peers enter and leave a file. */
static void test_file(void **state)
{
    char a_at[80], b_at[80], path[64], peers[300], text[200];
    struct kvbm_agent *a, *b, *self = agent_at("self", unix_endpoint());
    struct kvbm_follower *follower;

    (void)state;
    strcpy(a_at, unix_endpoint());
    strcpy(b_at, unix_endpoint());
    a = agent_at("a", a_at);
    b = agent_at("b", b_at);
    snprintf(path, sizeof(path), "/tmp/kvbm-test-follow-%d", (int)getpid());
    snprintf(peers, sizeof(peers), "file:%s", path);
    write_peers(path, a_at);
    follower = follow(self, peers);
    wait_for(follower, 1, 1);
    assert_true(has_session(self, a));
    snprintf(text, sizeof(text), "%s\n%s\n", a_at, b_at);
    write_peers(path, text);
    wait_for(follower, 2, 2);
    write_peers(path, b_at);
    wait_for(follower, 1, 1);
    assert_false(has_session(self, a));
    assert_true(has_session(self, b));
    assert_int_equal(kvbm_follower_close(follower), 0);
    assert_false(has_session(self, b));
    assert_int_equal(unlink(path), 0);
    assert_int_equal(kvbm_agent_destroy(self), 0);
    assert_int_equal(kvbm_agent_destroy(a), 0);
    assert_int_equal(kvbm_agent_destroy(b), 0);
}

/* A peer of another model, and one that nobody is at, cost attempts and nothing else. */
static void test_unfit(void **state)
{
    char a_at[80], b_at[80], peers[300];
    const char *endpoint = a_at;
    struct kvbm_agent_opts opts;
    struct kvbm_agent *a, *b, *self = agent_at("self", unix_endpoint());
    struct kvbm_follower *follower;

    (void)state;
    strcpy(a_at, unix_endpoint());
    strcpy(b_at, unix_endpoint());
    opts = session_opts("a", &endpoint);
    opts.fingerprint = "another model";
    a = agent_of(&opts);
    b = agent_at("b", b_at);
    snprintf(peers, sizeof(peers), "%s, unix:/tmp/kvbm-test-nobody-%d, %s", a_at, (int)getpid(),
             b_at);
    follower = follow(self, peers);
    wait_for(follower, 3, 1);
    wait_until(info_of(follower).failed >= 4);
    assert_true(info_of(follower).opened == 1);
    assert_int_equal(kvbm_follower_close(follower), 0);
    assert_int_equal(kvbm_agent_destroy(self), 0);
    assert_int_equal(kvbm_agent_destroy(a), 0);
    assert_int_equal(kvbm_agent_destroy(b), 0);
}

/* ---- callbacks ---- */

static struct {
    struct kvbm_follower *_Atomic follower;
    struct kvbm_directory *_Atomic directory;
    _Atomic int rc, n;
} closing;

/* Closes its follower and its directory, which go on. */
static void close_inside(void *arg, const struct kvbm_directory_peer *peer, bool there)
{
    struct kvbm_follower *follower;

    (void)arg;
    (void)peer;
    (void)there;
    while (!(follower = atomic_load(&closing.follower)) && !atomic_load(&closing.directory))
        usleep(500);
    atomic_store(&closing.rc, kvbm_follower_close(follower));
    kvbm_directory_close(atomic_load(&closing.directory));
    atomic_fetch_add(&closing.n, 1);
}

static void wait_for_callback(void)
{
    wait_until(atomic_load(&closing.n));
}

static void test_close_inside(void **state)
{
    struct kvbm_agent *self = agent_at("self", unix_endpoint()), *a;
    struct kvbm_directory *directory;
    struct kvbm_follower *follower;
    char at[80];
    const struct kvbm_directory_opts who = {
        .size = sizeof(who), .peers = at, .changed = close_inside};
    const struct kvbm_follow_opts opts = {.size = sizeof(opts), .directory = &who};

    (void)state;
    strcpy(at, unix_endpoint());
    a = agent_at("a", at);
    memset(&closing, 0, sizeof(closing));
    assert_int_equal(kvbm_agent_follow(self, &opts, &follower), 0);
    atomic_store(&closing.follower, follower);
    wait_for_callback();
    assert_int_equal(closing.rc, -EDEADLK);
    wait_for(follower, 1, 1);
    assert_int_equal(kvbm_follower_close(follower), 0);
    memset(&closing, 0, sizeof(closing));
    assert_int_equal(kvbm_directory_open(&who, &directory), 0);
    atomic_store(&closing.directory, directory);
    wait_for_callback();
    kvbm_directory_close(directory);
    assert_int_equal(kvbm_agent_destroy(self), 0);
    assert_int_equal(kvbm_agent_destroy(a), 0);
}

/* ---- peers that don't answer ---- */

#define N_SILENT 4
#define N_TURNS 48
#define OPEN_MS 5000

/* Listen at an endpoint, and accept nobody. */
static int listen_silently(char at[80])
{
    struct sockaddr_un where = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    strcpy(at, unix_endpoint());
    snprintf(where.sun_path, sizeof(where.sun_path), "%s", at + strlen("unix:"));
    assert_true(fd >= 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&where, sizeof(where)), 0);
    assert_int_equal(listen(fd, 64), 0);
    return fd;
}

/* A peer among silent ones has its session before any of these is given up. */
static void test_silent_peers(void **state)
{
    char at[N_SILENT][80], a_at[80], peers[500] = "";
    struct kvbm_agent *a, *self = agent_at("self", unix_endpoint());
    const struct kvbm_directory_opts who = {.size = sizeof(who), .peers = peers};
    const struct kvbm_follow_opts opts = {
        .size = sizeof(opts), .directory = &who, .open_ms = OPEN_MS};
    struct kvbm_follower *follower;
    int fds[N_SILENT];

    (void)state;
    strcpy(a_at, unix_endpoint());
    a = agent_at("a", a_at);
    for (int i = 0; i < N_SILENT; i++) {
        fds[i] = listen_silently(at[i]);
        strcat(strcat(peers, i ? ", " : ""), at[i]);
        if (i == N_SILENT / 2)
            strcat(strcat(peers, ", "), a_at);
    }
    assert_int_equal(kvbm_agent_follow(self, &opts, &follower), 0);
    wait_for(follower, N_SILENT + 1, 1);
    assert_int_equal(info_of(follower).failed, 0);
    assert_int_equal(kvbm_follower_close(follower), 0);
    for (int i = 0; i < N_SILENT; i++) {
        close(fds[i]);
        (void)unlink(at[i] + strlen("unix:"));
    }
    assert_int_equal(kvbm_agent_destroy(self), 0);
    assert_int_equal(kvbm_agent_destroy(a), 0);
}

/* Silent peers that are due again and again leave a turn to one whose session ended. */
static void test_silent_peers_take_turns(void **state)
{
    char at[N_TURNS][80], a_at[80], *peers = calloc(N_TURNS + 1, sizeof(at[0]) + 2);
    struct kvbm_agent *a, *self = agent_at("self", unix_endpoint());
    const struct kvbm_directory_opts who = {.size = sizeof(who), .peers = peers};
    const struct kvbm_follow_opts opts = {
        .size = sizeof(opts), .directory = &who, .open_ms = 50, .retry_ms = 10};
    struct kvbm_follower *follower;
    int fds[N_TURNS];

    (void)state;
    strcpy(a_at, unix_endpoint());
    strcpy(peers, a_at); /* the oldest entry */
    a = agent_at("a", a_at);
    for (int i = 0; i < N_TURNS; i++) {
        fds[i] = listen_silently(at[i]);
        strcat(strcat(peers, ", "), at[i]);
    }
    assert_int_equal(kvbm_agent_follow(self, &opts, &follower), 0);
    wait_for(follower, N_TURNS + 1, 1);
    assert_int_equal(kvbm_agent_destroy(a), 0);
    wait_for(follower, N_TURNS + 1, 0);
    a = agent_at("a", a_at);
    wait_for(follower, N_TURNS + 1, 1);
    assert_int_equal(kvbm_follower_close(follower), 0);
    for (int i = 0; i < N_TURNS; i++) {
        close(fds[i]);
        (void)unlink(at[i] + strlen("unix:"));
    }
    assert_int_equal(kvbm_agent_destroy(self), 0);
    assert_int_equal(kvbm_agent_destroy(a), 0);
    free(peers);
}

static void test_misuse(void **state)
{
    struct kvbm_agent *self = agent_at("self", unix_endpoint());
    struct kvbm_directory_opts directory = {.size = sizeof(directory), .peers = "nonsense"};
    struct kvbm_follow_opts opts = {.size = sizeof(opts)};
    struct kvbm_follower *follower = NULL;

    (void)state;
    assert_int_equal(kvbm_agent_follow(NULL, &opts, &follower), -EINVAL);
    assert_int_equal(kvbm_agent_follow(self, NULL, &follower), -EINVAL);
    assert_int_equal(kvbm_agent_follow(self, &opts, &follower), -EINVAL);
    opts.directory = &directory;
    assert_int_equal(kvbm_agent_follow(self, &opts, NULL), -EINVAL);
    assert_int_equal(kvbm_agent_follow(self, &opts, &follower), -EINVAL);
    assert_null(follower);
    assert_int_equal(kvbm_follower_close(NULL), 0);
    assert_int_equal(kvbm_follower_get_info(NULL, NULL), -EINVAL);
    assert_int_equal(kvbm_agent_destroy(self), 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_list),         cmocka_unit_test(test_file),
        cmocka_unit_test(test_unfit),        cmocka_unit_test(test_close_inside),
        cmocka_unit_test(test_silent_peers), cmocka_unit_test(test_silent_peers_take_turns),
        cmocka_unit_test(test_misuse),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
