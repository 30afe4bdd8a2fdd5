// SPDX-License-Identifier: Apache-2.0
/*
 * The thread of this file reads the child's stderr through a pipe. It finds the line with the
 * address, and keeps the last few kilobytes for error reports.
 */
#include "cli/replay/child.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/thread/thread.h"

#define START_MS 20000
#define STOP_MS 5000
#define TAIL ((size_t)4096)

struct kc_child {
    pid_t pid;
    int status; /* status from waitpid, once pid is 0 */
    int log_fd;
    pthread_t reader;
    bool has_reader;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    char url[256]; /* empty until the child listens */
    bool log_ended;
    char tail[TAIL];
    size_t tail_len;
};

static void keep(struct kc_child *child, const char *line, size_t len)
{
    len = KV_MIN(len, TAIL - 1);
    if (child->tail_len + len > TAIL - 1) {
        size_t drop = child->tail_len + len - (TAIL - 1);

        memmove(child->tail, child->tail + drop, child->tail_len - drop);
        child->tail_len -= drop;
    }
    memcpy(child->tail + child->tail_len, line, len);
    child->tail_len += len;
}

/* Find the address in a log line: level=info ... msg=listening url=http://127.0.0.1:8090 ... */
static void look_for_url(struct kc_child *child, const char *line)
{
    const char *url = strstr(line, "listening") ? strstr(line, "http://") : NULL;
    size_t len = url ? strcspn(url, " \"\n,}") : 0;

    if (len == 0 || len >= sizeof(child->url) || child->url[0])
        return;
    memcpy(child->url, url, len);
    child->url[len] = '\0';
    pthread_cond_broadcast(&child->changed);
}

static void *read_log(void *arg)
{
    struct kc_child *child = arg;
    FILE *log = fdopen(child->log_fd, "r");
    char line[2048];

    while (log && fgets(line, sizeof(line), log)) {
        pthread_mutex_lock(&child->lock);
        keep(child, line, strlen(line));
        look_for_url(child, line);
        pthread_mutex_unlock(&child->lock);
    }
    if (log)
        fclose(log);
    pthread_mutex_lock(&child->lock);
    child->log_ended = true;
    pthread_cond_broadcast(&child->changed);
    pthread_mutex_unlock(&child->lock);
    return NULL;
}

/*
 * Find "kv-indexer" in the folder of this program; else leave the bare name, for the PATH. The Python
 * package runs in an interpreter, whose folder may hold another version: it puts its own into the PATH.
 */
static void find_indexer(char *path, size_t size)
{
    ssize_t len = readlink("/proc/self/exe", path, size - 16);
    char *slash = NULL;

    if (len > 0) {
        path[len] = '\0';
        slash = strrchr(path, '/');
    }
    if (slash && strcmp(slash + 1, "kvasir") == 0) {
        strcpy(slash + 1, "kv-indexer");
        if (access(path, X_OK) == 0)
            return;
    }
    strcpy(path, "kv-indexer");
}

/* True for a variable of this host's other indexers: limits, token files, logs. */
static bool is_of_indexers(const char *entry)
{
    return strncmp(entry, "KV_INDEXER_", 11) == 0 || strncmp(entry, "DYN_", 4) == 0;
}

/* Copy the environment without such variables. The strings stay the program's; NULL: no memory. */
static char **make_environment(void)
{
    size_t n = 0, kept = 0;
    char **ret;

    while (environ[n])
        n++;
    ret = calloc(n + 1, sizeof(*ret));
    for (size_t i = 0; ret && i < n; i++)
        if (!is_of_indexers(environ[i]))
            ret[kept++] = environ[i];
    return ret;
}

#define FIXED_ARGS 9
#define MORE_ARGS 16

/* Command line of the indexer. */
struct command {
    char port[16];
    const char *argv[FIXED_ARGS + MORE_ARGS + 1];
};

static void make_command(const struct kc_child_opts *opts, struct command *ret)
{
    const char *const fixed[FIXED_ARGS] = {"kv-indexer", "--host",       "127.0.0.1",
                                           "--port",     ret->port,      "--log-level",
                                           "info",       "--log-format", "text"};

    snprintf(ret->port, sizeof(ret->port), "%u", opts->port);
    memset(ret->argv, 0, sizeof(ret->argv));
    memcpy(ret->argv, fixed, sizeof(fixed));
    for (size_t i = 0; opts->more && opts->more[i] && i < MORE_ARGS; i++)
        ret->argv[FIXED_ARGS + i] = opts->more[i];
}

/* Run the indexer in the child. Only calls that are safe between fork and exec. */
static _Noreturn void become_indexer(const char *path, const struct command *command,
                                     char **environment, int log_fd, int error_fd, pid_t parent)
{
    int null = open("/dev/null", O_RDWR);
    sigset_t none;
    int rc;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    /* Leave the process group: ^C must not reach the indexer, which the replay stops later. */
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() == parent && null >= 0 && dup2(null, 0) >= 0 && dup2(null, 1) >= 0 &&
        dup2(log_fd, 2) >= 0)
        execvpe(path, (char *const *)command->argv, environment);
    rc = errno;
    if (write(error_fd, &rc, sizeof(rc)) < 0)
        _exit(126);
    _exit(127);
}

/* Start the process; a pipe brings an error of its exec back. Returns 0 or a negative errno. */
static int spawn(struct kc_child *child, const char *path, const struct command *command,
                 char **environment)
{
    int log_pipe[2], error_pipe[2], failed = 0;
    pid_t parent = getpid();

    if (pipe2(log_pipe, O_CLOEXEC) < 0)
        return -errno;
    if (pipe2(error_pipe, O_CLOEXEC) < 0) {
        failed = errno;
        close(log_pipe[0]);
        close(log_pipe[1]);
        return -failed;
    }
    child->pid = fork();
    if (child->pid == 0)
        become_indexer(path, command, environment, log_pipe[1], error_pipe[1], parent);
    if (child->pid < 0)
        failed = errno;
    close(log_pipe[1]);
    close(error_pipe[1]);
    if (child->pid > 0 && read(error_pipe[0], &failed, sizeof(failed)) != sizeof(failed))
        failed = 0;
    close(error_pipe[0]);
    child->log_fd = log_pipe[0];
    return -failed;
}

static bool reap(struct kc_child *child, int flags)
{
    if (child->pid > 0 && waitpid(child->pid, &child->status, flags) == child->pid)
        child->pid = 0;
    return child->pid <= 0;
}

static int wait_for_url(struct kc_child *child, const char *path, struct kv_error *error)
{
    uint64_t deadline_ns = kv_now_ns() + START_MS * KV_NS_PER_MS;
    int rc = 0;

    pthread_mutex_lock(&child->lock);
    while (!child->url[0] && !child->log_ended && rc == 0)
        rc = kv_cond_wait_until(&child->changed, &child->lock, deadline_ns);
    rc = child->url[0]
             ? 0
             : kv_fail(error, -ETIMEDOUT, 0, "%s did not start listening; its log ends: %.*s", path,
                       (int)KV_MIN(child->tail_len, (size_t)100),
                       child->tail + child->tail_len - KV_MIN(child->tail_len, (size_t)100));
    pthread_mutex_unlock(&child->lock);
    return rc;
}

int kc_child_start(const struct kc_child_opts *opts, struct kc_child **ret, struct kv_error *error)
{
    struct kc_child *child = calloc(1, sizeof(*child));
    const char *path = opts->path;
    char found[4096], **environment;
    struct command command;
    int rc;

    if (!child)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    pthread_mutex_init(&child->lock, NULL);
    kv_cond_init(&child->changed);
    child->log_fd = -1;
    if (!path) {
        find_indexer(found, sizeof(found));
        path = found;
    }
    make_command(opts, &command);
    environment = make_environment();
    rc = environment ? spawn(child, path, &command, environment) : -ENOMEM;
    free(environment);
    if (rc < 0) {
        if (rc == -ENOENT)
            kv_fail(error, rc, 0, "no kv-indexer %s%s; name one: --indexer PATH",
                    strchr(path, '/') ? "at " : "next to this program or on the PATH",
                    strchr(path, '/') ? path : "");
        else
            kv_fail(error, rc, 0, "can't start %.120s: %s", path, strerror(-rc));
        goto fail;
    }
    rc = kv_thread_start(&child->reader, "child-log", read_log, child);
    if (rc < 0) {
        kv_fail(error, rc, 0, "can't start a thread: %s", strerror(-rc));
        goto fail;
    }
    child->has_reader = true;
    rc = wait_for_url(child, path, error);
    if (rc < 0)
        goto fail;
    *ret = child;
    return 0;

fail:
    kc_child_stop(child);
    return rc;
}

const char *kc_child_url(const struct kc_child *child)
{
    return child->url;
}

int kc_child_pid(const struct kc_child *child)
{
    return child->pid;
}

bool kc_child_alive(struct kc_child *child, struct kv_error *error)
{
    if (!reap(child, WNOHANG))
        return true;
    if (WIFSIGNALED(child->status))
        kv_fail(error, -ECHILD, 0, "kv-indexer was ended by signal %d (%s)",
                WTERMSIG(child->status), strsignal(WTERMSIG(child->status)));
    else
        kv_fail(error, -ECHILD, 0, "kv-indexer ended by itself with status %d",
                WEXITSTATUS(child->status));
    return false;
}

void kc_child_log(struct kc_child *child, char *buf, unsigned long size)
{
    size_t n;

    pthread_mutex_lock(&child->lock);
    n = KV_MIN(child->tail_len, size - 1);
    memcpy(buf, child->tail + child->tail_len - n, n);
    buf[n] = '\0';
    pthread_mutex_unlock(&child->lock);
}

void kc_child_stop(struct kc_child *child)
{
    const struct timespec pause = {.tv_nsec = 10 * 1000 * 1000};
    uint64_t deadline_ns = kv_now_ns() + STOP_MS * KV_NS_PER_MS;

    if (!child)
        return;
    if (child->pid > 0)
        kill(child->pid, SIGTERM);
    while (!reap(child, WNOHANG) && kv_now_ns() < deadline_ns)
        nanosleep(&pause, NULL);
    if (child->pid > 0) {
        kill(child->pid, SIGKILL);
        reap(child, 0);
    }
    if (child->has_reader)
        pthread_join(child->reader, NULL);
    else if (child->log_fd >= 0)
        close(child->log_fd);
    pthread_cond_destroy(&child->changed);
    pthread_mutex_destroy(&child->lock);
    free(child);
}
