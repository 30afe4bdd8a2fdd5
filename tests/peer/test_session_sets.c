// SPDX-License-Identifier: Apache-2.0
/*
 * Block sets over sessions: those that exist when a session begins, each change after that, and the
 * end of the last session. A random walk runs beside a naive model. Owners that are killed, frozen and
 * restarted are processes of their own.
 */
#include <signal.h>
#include <sys/wait.h>

#include "base/unit.h"
#include "index/random.h"
#include "peer/session/agent.h"
#include "session_unit.h"

#define IDS 5

/* Return the generation of a set that an agent knows; 0: none. */
static uint64_t known(struct kvbm_agent *agent, uint64_t worker, uint32_t id)
{
    const struct kvbm_remote_set *set;
    uint64_t generation;

    pthread_mutex_lock(&agent->lock);
    set = kvbm_find_set(agent, worker, id);
    generation = set ? set->facts->generation : 0;
    pthread_mutex_unlock(&agent->lock);
    return generation;
}

/* Return once the reader has taken all that the peer has sent: the answer comes behind it. */
static void catch_up(struct kvbm_session *session)
{
    struct kvbm_reply reply = {0};

    assert_int_equal(kvbm_session_call(session, ECHO, "x", 1, -1, soon(), &reply), 0);
    kvbm_reply_fini(&reply);
}

static struct kvbm_agent *worker_at(const char *name, uint64_t worker, const char *endpoint)
{
    struct kvbm_agent_opts opts = session_opts(name, &endpoint);
    struct kvbm_agent *agent;

    opts.worker = worker;
    agent = agent_of(&opts);
    assert_int_equal(kvbm_agent_serve(agent, ECHO, serve_echo, NULL), 0);
    return agent;
}

/* ---- beside a naive model ---- */

#define PEERS 2

static struct {
    struct kvbm_agent *agents[PEERS];
    struct kvbm_layout *layout;
    struct kvbm_blockset *sets[PEERS][IDS];
    uint64_t generations[PEERS][IDS]; /* of the latest set */
    struct kvbm_session *sessions[3]; /* of agent 1 with agent 0 */
} m;

static void change(struct rng *rng)
{
    int p = (int)rng_below(rng, PEERS), i = (int)rng_below(rng, IDS);
    struct kvbm_blockset_opts opts = {
        .size = sizeof(opts), .id = (uint32_t)i, .layout = m.layout, .writable = rng_below(rng, 2)};

    if (!m.sets[p][i]) {
        assert_int_equal(kvbm_blockset_export(m.agents[p], &opts, &m.sets[p][i]), 0);
        m.generations[p][i]++;
    } else if (rng_below(rng, 3)) {
        assert_int_equal(kvbm_blockset_update(m.sets[p][i], &opts), 0);
        m.generations[p][i]++;
    } else {
        kvbm_blockset_destroy(m.sets[p][i]);
        m.sets[p][i] = NULL;
    }
}

static void open_or_close(struct rng *rng)
{
    int s = (int)rng_below(rng, KV_COUNT(m.sessions));

    if (m.sessions[s])
        assert_int_equal(kvbm_session_close(m.sessions[s]), 0);
    m.sessions[s] = m.sessions[s] ? NULL : open_session(m.agents[1], m.agents[0], 0);
}

/* Compare what agent 1 knows of agent 0, and the other way round while there is a session. */
static void compare(void)
{
    bool any = false;

    for (size_t s = 0; s < KV_COUNT(m.sessions); s++) {
        if (m.sessions[s])
            catch_up(m.sessions[s]);
        any = any || m.sessions[s];
    }
    for (uint32_t i = 0; i < IDS; i++) {
        assert_int_equal(known(m.agents[1], 10, i), any && m.sets[0][i] ? m.generations[0][i] : 0);
        for (uint64_t deadline = soon(); any; usleep(200)) { /* agent 0 learns by itself */
            if (known(m.agents[0], 11, i) == (m.sets[1][i] ? m.generations[1][i] : 0))
                break;
            assert_true(kv_now_ns() < deadline);
        }
    }
}

static void test_model(void **state)
{
    struct rng rng = {test_seed()};

    (void)state;
    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)rng.state);
    m.layout = small_layout();
    m.agents[0] = worker_at("a", 10, unix_endpoint());
    m.agents[1] = worker_at("b", 11, NULL);
    for (long round = test_rounds(400); round > 0; round--) {
        for (uint32_t n = rng_below(&rng, 4); n > 0; n--)
            change(&rng);
        if (rng_below(&rng, 5) == 0)
            open_or_close(&rng);
        compare();
    }
    for (size_t s = 0; s < KV_COUNT(m.sessions); s++)
        assert_int_equal(kvbm_session_close(m.sessions[s]), 0);
    for (int p = 0; p < PEERS; p++) {
        for (int i = 0; i < IDS; i++)
            kvbm_blockset_destroy(m.sets[p][i]);
        assert_int_equal(kvbm_agent_destroy(m.agents[p]), 0);
    }
    kvbm_layout_destroy(m.layout);
}

/* ---- owners in processes of their own ---- */

#ifndef __SANITIZE_THREAD__

/* Start an owner of sets 0 and 1 at @endpoint. Returns its process once it listens. */
static pid_t start_owner(const char *endpoint)
{
    int ready[2];
    char byte;
    pid_t pid;

    assert_int_equal(pipe(ready), 0);
    pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        struct kvbm_agent *agent = worker_at("owner", 10, endpoint);
        struct kvbm_blockset_opts opts = {.size = sizeof(opts), .layout = small_layout()};
        struct kvbm_blockset *sets[2];

        for (opts.id = 0; opts.id < 2; opts.id++)
            assert_int_equal(kvbm_blockset_export(agent, &opts, &sets[opts.id]), 0);
        if (write(ready[1], "", 1) == 1) {
            for (;;)
                pause(); /* until killed */
        }
        _exit(1);
    }
    close(ready[1]);
    assert_int_equal(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    return pid;
}

static void kill_owner(pid_t pid)
{
    assert_int_equal(kill(pid, SIGKILL), 0);
    assert_int_equal(waitpid(pid, NULL, 0), pid);
}

static void await_unknown(struct kvbm_agent *reader)
{
    wait_until(!known(reader, 10, 0) && !known(reader, 10, 1));
}

/* Killed, then restarted at the same endpoint: the old sets go, the new ones come. */
static void test_kill(void **state)
{
    struct kvbm_session_info info = KVBM_SESSION_INFO_INIT;
    const struct kvbm_block_at at = {.worker = 10, .set = 1, .block = 2};
    struct kvbm_remote_blocks *blocks = NULL;
    struct kvbm_session *session = NULL, *again = NULL;
    const char *endpoint = unix_endpoint();
    uint64_t incarnation;
    struct kvbm_agent *reader;
    pid_t pid = start_owner(endpoint);

    (void)state;
    reader = agent_at("reader", NULL); /* behind the fork: its thread would be lost in the child */
    assert_int_equal(open_with(reader, endpoint, 1, NULL, &session), 0);
    assert_int_equal(known(reader, 10, 0), 1);
    assert_int_equal(kvbm_remote_blocks_immutable(reader, &at, 1, &blocks), 0);
    assert_int_equal(kvbm_session_get_info(session, &info), 0);
    incarnation = info.incarnation;
    kill_owner(pid);
    await_unknown(reader);
    assert_int_equal(kvbm_remote_blocks_check(blocks), -ESTALE);
    pid = start_owner(endpoint);
    assert_int_equal(open_with(reader, endpoint, 0, NULL, &again), 0);
    assert_int_equal(known(reader, 10, 1), 1);
    assert_int_equal(kvbm_remote_blocks_check(blocks), -ESTALE);
    assert_int_equal(kvbm_session_get_info(again, &info), 0);
    assert_true(info.incarnation != incarnation);
    assert_int_equal(kvbm_session_close(session), 0); /* of the old one: the new sets stay */
    assert_int_equal(known(reader, 10, 1), 1);
    kvbm_remote_blocks_destroy(blocks);
    assert_int_equal(kvbm_session_close(again), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    kill_owner(pid);
    unlink(endpoint + strlen("unix:"));
}

/* Frozen: calls end at their deadline. Thawed, the owner answers again, on the same session. */
static void test_freeze(void **state)
{
    const char *endpoint = unix_endpoint();
    struct kvbm_session *session = NULL;
    struct kvbm_reply reply = {0};
    struct kvbm_agent *reader;
    pid_t pid = start_owner(endpoint);
    int status;

    (void)state;
    reader = agent_at("reader", NULL);
    assert_int_equal(open_with(reader, endpoint, 0, NULL, &session), 0);
    catch_up(session);
    assert_int_equal(kill(pid, SIGSTOP), 0);
    assert_int_equal(waitpid(pid, &status, WUNTRACED), pid);
    assert_true(WIFSTOPPED(status));
    for (int i = 0; i < 3; i++)
        assert_int_equal(kvbm_session_call(session, ECHO, "x", 1, -1, in_ms(5), &reply),
                         -ETIMEDOUT);
    assert_int_equal(kill(pid, SIGCONT), 0);
    catch_up(session);
    assert_int_equal(known(reader, 10, 0), 1);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    kill_owner(pid);
    unlink(endpoint + strlen("unix:"));
}

#endif

/* ---- references ---- */

/* A set that a program has found stays, and says that it is gone, whatever ends it. */
static void test_references(void **state)
{
    const struct kvbm_layout_config config = small_config();
    struct kvbm_layout *layout = allocate(&config, KVBM_STORAGE_SYSTEM);
    const struct kvbm_blockset_opts opts = {.size = sizeof(opts), .id = 1, .layout = layout};
    struct kvbm_agent *owner = worker_at("owner", 7, unix_endpoint());
    struct kvbm_agent *reader = worker_at("reader", 8, unix_endpoint());
    struct kvbm_remote_set *first, *second, *other;
    struct kvbm_remote_set_info info = KVBM_REMOTE_SET_INFO_INIT;
    struct kvbm_layout_config theirs = {.size = sizeof(theirs)};
    struct kvbm_session *session = NULL;
    struct kvbm_blockset *set;
    uint8_t key[8];

    (void)state;
    assert_int_equal(kvbm_remote_set_find(reader, 7, 1, &first), -ENOENT);
    assert_int_equal(kvbm_blockset_export(owner, &opts, &set), 0);
    session = open_session(reader, owner, 0);
    assert_int_equal(kvbm_remote_set_find(reader, 7, 1, &first), 0);
    assert_int_equal(kvbm_remote_set_find(reader, 7, 1, &second), 0);
    assert_ptr_equal(first, second);
    assert_int_equal(kvbm_blockset_update(set, &opts), 0);
    catch_up(session);
    assert_int_equal(kvbm_remote_set_get_info(first, &info), 0);
    assert_int_equal(info.generation, 2);
    kvbm_remote_set_release(second);
    kvbm_blockset_destroy(set); /* withdrawn */
    catch_up(session);
    assert_int_equal(kvbm_remote_set_get_info(first, &info), -ESTALE);
    assert_int_equal(kvbm_remote_set_layout(first, &theirs), -ESTALE);
    assert_int_equal(kvbm_remote_set_transport(first, KVBM_TRANSPORT_TCP, key, sizeof(key), NULL),
                     -ESTALE);
    assert_int_equal(kvbm_remote_set_find(reader, 7, 1, &other), -ENOENT);
    assert_int_equal(kvbm_blockset_export(owner, &opts, &set), 0); /* another one of that id */
    catch_up(session);
    assert_int_equal(kvbm_remote_set_find(reader, 7, 1, &other), 0);
    assert_int_equal(kvbm_remote_set_get_info(first, &info), -ESTALE);
    assert_int_equal(kvbm_remote_set_get_info(other, &info), 0);
    assert_int_equal(kvbm_session_close(session), 0);
    assert_int_equal(kvbm_remote_set_get_info(other, &info), -ESTALE);
    kvbm_remote_set_invalidate(other); /* has no effect */
    assert_int_equal(kvbm_agent_destroy(reader), -EBUSY);
    kvbm_remote_set_release(first);
    kvbm_remote_set_release(other);
    kvbm_remote_set_release(NULL);
    assert_int_equal(kvbm_agent_destroy(reader), 0);
    kvbm_blockset_destroy(set);
    assert_int_equal(kvbm_agent_destroy(owner), 0);
    kvbm_layout_destroy(layout);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#ifndef __SANITIZE_THREAD__          /* which allows no thread behind fork */
        cmocka_unit_test(test_kill), /* before any thread of this process */
        cmocka_unit_test(test_freeze),
#endif
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_references),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
