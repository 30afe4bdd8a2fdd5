// SPDX-License-Identifier: Apache-2.0
/*
 * Child processes of the checks. fork() of a process with threads copies locks that nobody opens
 * again, and backends may keep threads. So the runner forks a nursery before it opens the backend:
 * a process with one thread that forks each child.
 *
 *     runner ── job ──► nursery ── fork ──► child: opens the backend, puts, is killed
 *            ◄─ status ──       ◄─ wait ──
 */
#include <dirent.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store/conformance/conformance.h"

#define CHILD_S 30 /* until a child that hangs is killed */

/* True when this process has only the calling thread, or can't know. */
static bool is_single_threaded(void)
{
#ifdef __SANITIZE_THREAD__
    enum { MOST = 2 }; /* the sanitizer's own */
#else
    enum { MOST = 1 };
#endif
    DIR *dir = opendir("/proc/self/task");
    const struct dirent *entry;
    size_t n = 0;

    if (!dir)
        return true;
    while ((entry = readdir(dir)))
        n += entry->d_name[0] != '.';
    closedir(dir);
    return n <= MOST;
}

/* Give every signal its default action: a sanitizer, or the host, may have handlers. Ignore ^C,
 * which a terminal sends to all: the runner ends its check first. */
static void reset_signals(void)
{
    for (int i = 1; i < NSIG; i++)
        signal(i, i == SIGINT ? SIG_IGN : SIG_DFL);
}

/* Put and publish as the job says. Never returns. */
static _Noreturn void be_child(const struct kvs_conf *c, const struct kvs_conf_job *job)
{
    kv_store_v1 *h;

    alarm(CHILD_S);
    if (job->kind == KVS_CONF_CLOSE_NULL) {
        c->vt->close(NULL);
        _exit(0);
    }
    h = c->vt->open(c->uri);
    if (!h)
        _exit(KVS_CONF_OPEN_FAILED);
    for (size_t i = 0; i < KVS_CONF_N_JOB_KEYS; i++) {
        size_t len = KVS_CONF_JOB_LENS[i];
        uint8_t *data = malloc(len);

        if (!data)
            _exit(KVS_CONF_PUT_FAILED);
        kvs_conf_fill(data, len, job->seed + i);
        if (c->vt->put_chunk(h, job->keys[i].bytes, job->keys[i].len, data, len) != 0)
            _exit(KVS_CONF_PUT_FAILED);
        free(data);
    }
    if (job->kind == KVS_CONF_DIE_FLUSHED && c->ext->flush(h) < 0)
        _exit(KVS_CONF_PUBLISH_FAILED);
    if ((job->kind == KVS_CONF_SAVE || job->kind == KVS_CONF_DIE_PUBLISHED) &&
        c->vt->put_manifest(h, job->name, (const uint8_t *)job->name, strlen(job->name)) != 0)
        _exit(KVS_CONF_PUBLISH_FAILED);
    if (job->kind != KVS_CONF_SAVE)
        kill(getpid(), SIGKILL);
    c->vt->close(h);
    _exit(0);
}

/* Fork a child for the job and wait for its end. Returns its status, or -1 when there was none. */
static int run_child(const struct kvs_conf *c, const struct kvs_conf_job *job)
{
    pid_t pid = fork();
    int status;

    if (pid == 0)
        be_child(c, job);
    if (pid < 0)
        return -1;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -1;
    return status;
}

/* Run jobs until the runner closes its end. */
static _Noreturn void be_nursery(const struct kvs_conf *c, int fd)
{
    struct kvs_conf_job job;

    reset_signals();
    while (recv(fd, &job, sizeof(job), MSG_WAITALL) == sizeof(job)) {
        int status = run_child(c, &job);

        if (send(fd, &status, sizeof(status), MSG_NOSIGNAL) != sizeof(status))
            break;
    }
    _exit(0);
}

void kvs_conf_start_nursery(struct kvs_conf *c)
{
    int fds[2];

    c->nursery = -1;
    if (!is_single_threaded() || socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) < 0)
        return;
    c->nursery_pid = fork();
    if (c->nursery_pid == 0) {
        close(fds[0]);
        be_nursery(c, fds[1]);
    }
    close(fds[1]);
    if (c->nursery_pid < 0)
        close(fds[0]);
    else
        c->nursery = fds[0];
}

void kvs_conf_end_nursery(struct kvs_conf *c)
{
    if (c->nursery < 0)
        return;
    close(c->nursery);
    while (waitpid(c->nursery_pid, NULL, 0) < 0 && errno == EINTR)
        ;
    c->nursery = -1;
}

enum kvs_verdict kvs_conf_child(struct kvs_conf *c, const struct kvs_conf_job *job, int *ret)
{
    if (c->nursery < 0)
        return kvs_conf_skip(c, "not tried, as the calling program or the backend's library has "
                                "threads, which a child process lacks: a crash may lose data");
    if (send(c->nursery, job, sizeof(*job), MSG_NOSIGNAL) != sizeof(*job) ||
        recv(c->nursery, ret, sizeof(*ret), MSG_WAITALL) != sizeof(*ret) || *ret == -1)
        return kvs_conf_skip(c,
                             "not tried, as there can be no child process: a crash may lose data");
    return KVS_PASS;
}
