// SPDX-License-Identifier: Apache-2.0
/* The workers' processes and the indexer: started, registered, started again, stopped. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/whole/stage.h"
#include "cli/whole/whole.h"

#define STOP_MS 60000

/* Run this program again. Inside of Python, /proc/self/exe is Python, whose path is in KVASIR_PYTHON
 * (python/kvasir/__main__.py): by another path it wouldn't find the package. */
static void run_worker(void)
{
    const char *python = getenv("KVASIR_PYTHON");
    char *const again[] = {(char *)python, "-m", "kvasir", "replay", "--worker", NULL};
    char *const argv[] = {"kvasir", "replay", "--worker", NULL};

    if (python)
        execv(python, again);
    else
        execv("/proc/self/exe", argv);
}

/* Become a worker: this program again, with the socket as its third descriptor. */
static _Noreturn void become_worker(const struct kc_whole *w, uint32_t number, int fd, pid_t parent)
{
    char log[KC_PLAN_PATH + 32];
    int null = open("/dev/null", O_RDWR), out;
    sigset_t none;

    snprintf(log, sizeof(log), "%s/worker-%u.log", w->plan.dir, number);
    out = open(log, O_WRONLY | O_CREAT | O_APPEND, 0600);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent && dup2(fd, 3) == 3 && fcntl(3, F_SETFD, 0) == 0 &&
        dup2(null, 0) >= 0 && dup2(out, 1) >= 0 && dup2(out, 2) >= 0)
        run_worker();
    _exit(127);
}

static int spawn(struct kc_whole *w, uint32_t number)
{
    struct kc_member *m = &w->members[number];
    int pair[2], size = 1 << 20;
    pid_t parent = getpid();

    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0)
        return -errno;
    setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &size, sizeof(size));
    m->pid = fork();
    if (m->pid == 0)
        become_worker(w, number, pair[1], parent);
    close(pair[1]);
    m->fd = pair[0];
    m->starts++;
    memset(&m->last, 0, sizeof(m->last));
    return m->pid < 0 ? -errno : 0;
}

/* Note what a worker did last, and end its process. */
static void end_hung(struct kc_whole *w, uint32_t number)
{
    struct kc_member *m = &w->members[number];
    char stage[100];

    kc_stage_tell(w->plan.dir, number, stage, sizeof(stage));
    snprintf(m->hung, sizeof(m->hung), "Its last stage: %s", stage);
    kill(m->pid, SIGKILL);
    waitpid(m->pid, NULL, 0);
    m->pid = 0;
}

int kc_crew_ask(struct kc_whole *w, uint32_t number, struct kc_message *message)
{
    struct pollfd poll_fd = {.fd = w->members[number].fd, .events = POLLIN};
    int rc = kc_message_send(poll_fd.fd, message);

    if (rc < 0)
        return rc;
    do
        rc = poll(&poll_fd, 1, (int)w->opts.watchdog_ms);
    while (rc < 0 && errno == EINTR);
    if (rc == 0) {
        end_hung(w, number);
        return -ETIMEDOUT;
    }
    return rc < 0 ? -errno : kc_message_receive(poll_fd.fd, message);
}

int kc_crew_watch(struct kc_whole *w, struct kv_error *error)
{
    uint64_t now = kv_now_ns(), most_ns = w->opts.watchdog_ms * KV_NS_PER_MS;

    for (uint32_t i = 0; i < w->plan.n_workers; i++) {
        struct kc_member *m = &w->members[i];

        if (m->pid > 0 && m->pid == w->frozen) /* its time doesn't count */
            m->since_ns = now;
        if (m->pid <= 0 || m->killed || !m->n_queued || now < m->since_ns + most_ns)
            continue;
        end_hung(w, i);
        return kv_fail(error, -ETIMEDOUT, 0,
                       "worker %u hung: no answer for %.0f s (--watchdog), so it was ended. %s", i,
                       (double)w->opts.watchdog_ms / 1e3, m->hung);
    }
    return 0;
}

/* Fail with the end of a worker's log. */
static int fail_of(const struct kc_whole *w, uint32_t number, int rc, struct kv_error *error)
{
    char path[KC_PLAN_PATH + 32], text[121] = "";
    FILE *log;

    if (w->members[number].hung[0])
        return kv_fail(error, rc, 0,
                       "worker %u hung: no answer for %.0f s (--watchdog), so it was ended. %s",
                       number, (double)w->opts.watchdog_ms / 1e3, w->members[number].hung);
    snprintf(path, sizeof(path), "%s/worker-%u.log", w->plan.dir, number);
    log = fopen(path, "re");
    if (log) {
        if (fseek(log, -(long)(sizeof(text) - 1), SEEK_END) != 0)
            rewind(log);
        text[fread(text, 1, sizeof(text) - 1, log)] = '\0';
        fclose(log);
    }
    return kv_fail(error, rc, 0, "worker %u: %s; its log ends: %s", number, strerror(-rc), text);
}

/* Start a process and tell it the plan; note its endpoints. */
static int introduce(struct kc_whole *w, uint32_t number, struct kv_error *error)
{
    struct kc_member *m = &w->members[number];
    struct kc_message *message = w->message;
    int rc = spawn(w, number);

    memset(message, 0, sizeof(*message));
    message->kind = KC_MESSAGE_PLAN;
    message->n = number;
    message->plan = w->plan;
    if (rc == 0)
        rc = kc_crew_ask(w, number, message);
    if (rc == 0 && message->kind == KC_MESSAGE_FAILED)
        return kv_fail(error, -ECHILD, 0, "%.150s", message->failed);
    if (rc < 0)
        return fail_of(w, number, rc, error);
    memcpy(m->agent, message->ready.agent, sizeof(m->agent));
    memcpy(m->events, message->ready.events, sizeof(m->events));
    memcpy(m->replay, message->ready.replay, sizeof(m->replay));
    return 0;
}

/* Write the file that tells workers of each other. */
static int write_peers(const struct kc_whole *w)
{
    char path[KC_PLAN_PATH + 16], next[KC_PLAN_PATH + 16];
    FILE *file;
    int rc;

    snprintf(path, sizeof(path), "%s/peers", w->plan.dir);
    snprintf(next, sizeof(next), "%s/peers.new", w->plan.dir);
    file = fopen(next, "we");
    if (!file)
        return -errno;
    for (uint32_t i = 0; i < w->plan.n_workers; i++)
        if (w->members[i].agent[0])
            fprintf(file, "%s\n", w->members[i].agent);
    rc = fclose(file) == 0 && rename(next, path) == 0 ? 0 : -errno;
    return rc;
}

static int join(struct kc_whole *w, uint32_t number, struct kv_error *error)
{
    const struct kc_member *m = &w->members[number];

    if (m->starts > 1)
        kc_client_unregister(w->client, number, NULL);
    return kc_client_register(w->client, number, m->events, m->replay, error);
}

static int go(struct kc_whole *w, uint32_t number, struct kv_error *error)
{
    int rc;

    w->message->kind = KC_MESSAGE_GO;
    rc = kc_crew_ask(w, number, w->message);
    if (rc == 0)
        rc = w->message->done.status;
    return rc < 0 ? fail_of(w, number, rc, error) : 0;
}

int kc_crew_restart(struct kc_whole *w, uint32_t number, struct kv_error *error)
{
    int rc = introduce(w, number, error);

    if (rc == 0 && (rc = write_peers(w)) < 0)
        return kv_fail(error, rc, 0, "%s/peers: %s", w->plan.dir, strerror(-rc));
    if (rc == 0)
        rc = join(w, number, error);
    return rc == 0 ? go(w, number, error) : rc;
}

/* ---- indexer ---- */

static int make_client(struct kc_whole *w, struct kv_error *error)
{
    const struct kc_client_opts opts = {.url = w->plan.indexer,
                                        .model = KC_PLAN_MODEL,
                                        .tenant = KC_PLAN_TENANT,
                                        .first_instance = KC_PLAN_FIRST_INSTANCE,
                                        .block_size = w->plan.shape.page_size,
                                        .n_workers = w->plan.n_workers};
    int rc = kc_client_create(&opts, &w->client, error);

    if (rc == 0)
        kc_http_set_timeout(kc_client_http(w->client), 2000);
    return rc;
}

int kc_crew_start_indexer(struct kc_whole *w, struct kv_error *error)
{
    char block_size[16];
    const char *const nats[] = {
        "--nats", w->plan.nats, "--nats-cluster", "replay", "--block-size", block_size, NULL};
    const struct kc_child_opts opts = {
        .path = w->opts.indexer, .port = w->indexer_port, .more = w->opts.nats ? nats : NULL};
    int rc;

    snprintf(block_size, sizeof(block_size), "%u", w->plan.shape.page_size);
    rc = kc_child_start(&opts, &w->child, error);
    if (rc < 0)
        return rc;
    if (!w->client) {
        snprintf(w->plan.indexer, sizeof(w->plan.indexer), "%s", kc_child_url(w->child));
        w->indexer_port = (uint32_t)strtoul(strrchr(w->plan.indexer, ':') + 1, NULL, 10);
        return make_client(w, error);
    }
    for (uint32_t i = 0; i < w->plan.n_workers && rc == 0; i++)
        rc = kc_client_register(w->client, i, w->members[i].events, w->members[i].replay, error);
    return rc;
}

/* ---- all ---- */

static int make_dirs(const struct kc_whole *w, struct kv_error *error)
{
    char path[KC_PLAN_PATH + 32];

    for (uint32_t i = 0; i < w->plan.n_workers; i++) {
        snprintf(path, sizeof(path), "%s/disk-%u", w->plan.dir, i);
        if (mkdir(path, 0700) < 0 && errno != EEXIST)
            return kv_fail(error, -errno, 0, "%.120s: %s", path, strerror(errno));
    }
    return 0;
}

int kc_crew_start(struct kc_whole *w, struct kv_error *error)
{
    int rc = make_dirs(w, error);

    if (rc == 0)
        rc = kc_crew_start_indexer(w, error);
    for (uint32_t i = 0; i < w->plan.n_workers && rc == 0; i++)
        rc = introduce(w, i, error);
    if (rc == 0 && (rc = write_peers(w)) < 0)
        return kv_fail(error, rc, 0, "%s/peers: %s", w->plan.dir, strerror(-rc));
    for (uint32_t i = 0; i < w->plan.n_workers && rc == 0; i++)
        rc = join(w, i, error);
    for (uint32_t i = 0; i < w->plan.n_workers && rc == 0; i++)
        rc = go(w, i, error);
    return rc;
}

/* True when a worker has ended; *@clean becomes false when it did so with an error. */
static bool has_ended(struct kc_member *m, bool *clean)
{
    int status = 0;

    if (m->pid > 0 && waitpid(m->pid, &status, WNOHANG) == m->pid) {
        m->pid = 0;
        *clean = *clean && WIFEXITED(status) && WEXITSTATUS(status) == 0;
    }
    return m->pid <= 0;
}

bool kc_crew_stop(struct kc_whole *w)
{
    bool clean = true;
    const struct timespec pause = {.tv_nsec = 5 * 1000 * 1000};
    uint64_t deadline_ns = kv_now_ns() + STOP_MS * KV_NS_PER_MS;

    for (uint32_t i = 0; i < w->plan.n_workers && w->message; i++) {
        w->message->kind = KC_MESSAGE_END;
        if (w->members[i].pid > 0)
            kc_message_send(w->members[i].fd, w->message);
    }
    for (uint32_t i = 0; i < w->plan.n_workers; i++) {
        struct kc_member *m = &w->members[i];

        while (!has_ended(m, &clean) && kv_now_ns() < deadline_ns && !kc_whole_interrupted())
            nanosleep(&pause, NULL);
        if (m->pid > 0) {
            kill(m->pid, SIGKILL);
            waitpid(m->pid, NULL, 0);
            clean = clean && kc_whole_interrupted(); /* else: it hangs */
        }
        if (m->fd > 0)
            close(m->fd);
    }
    kc_client_destroy(w->client);
    kc_child_stop(w->child);
    kc_server_stop(&w->redis);
    kc_server_stop(&w->nats);
    return clean;
}
