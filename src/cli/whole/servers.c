// SPDX-License-Identifier: Apache-2.0
/* The run's directory, its janitor, and the servers beside the indexer. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/whole/whole.h"

#define START_MS 20000

/* ---- directory ---- */

static int remove_one(const char *path, const struct stat *stat, int kind, struct FTW *ftw)
{
    (void)stat;
    (void)kind;
    (void)ftw;
    return remove(path) < 0 && errno != ENOENT ? -1 : 0;
}

/*
 * Wait until the director closes its end of the pipe, by death or on purpose, then remove the
 * directory. Workers die with the director, and may still write for a moment: try again.
 */
static _Noreturn void be_janitor(int fd, const char *dir)
{
    const struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    char byte;

    setsid();
    signal(SIGINT, SIG_IGN);
    signal(SIGTERM, SIG_IGN);
    while (read(fd, &byte, 1) < 0 && errno == EINTR)
        ;
    (void)umount2(dir, MNT_DETACH); /* --full-disk: the run's tmpfs */
    for (int i = 0;
         i < 100 && nftw(dir, remove_one, 32, FTW_DEPTH | FTW_PHYS) != 0 && access(dir, F_OK) == 0;
         i++)
        nanosleep(&pause, NULL);
    _exit(0);
}

static int start_janitor(struct kc_whole *w)
{
    int ends[2];

    if (pipe2(ends, O_CLOEXEC) < 0)
        return -errno;
    w->janitor = fork();
    if (w->janitor == 0) {
        close(ends[1]);
        be_janitor(ends[0], w->plan.dir);
    }
    close(ends[0]);
    w->janitor_fd = ends[1];
    return w->janitor < 0 ? -errno : 0;
}

/* Take the folder of --dir, by its absolute path: sockets and the store have no other names. */
static int use_dir(struct kc_whole *w, struct kv_error *error)
{
    char path[PATH_MAX];

    if (mkdir(w->opts.dir, 0700) == 0)
        w->new_dir = true;
    else if (errno != EEXIST)
        return kv_fail(error, -errno, 0, "%.120s: %s", w->opts.dir, strerror(errno));
    if (!realpath(w->opts.dir, path))
        return kv_fail(error, -errno, 0, "%.120s: %s", w->opts.dir, strerror(errno));
    if (snprintf(w->plan.dir, sizeof(w->plan.dir), "%s", path) > 80)
        return kv_fail(error, -ENAMETOOLONG, 0,
                       "--dir: at most 80 bytes, because sockets lie in it");
    return 0;
}

int kc_dir_make(struct kc_whole *w, struct kv_error *error)
{
    const char *tmp = getenv("TMPDIR");
    int rc = 0;

    w->janitor_fd = -1;
    if (w->opts.dir)
        return use_dir(w, error);
    if (!tmp || *tmp != '/' || strlen(tmp) > 60)
        tmp = "/tmp";
    snprintf(w->plan.dir, sizeof(w->plan.dir), "%s/kvasir-replay-XXXXXX", tmp);
    w->new_dir = mkdtemp(w->plan.dir) != NULL;
    rc = w->new_dir ? start_janitor(w) : -errno;
    if (rc == 0)
        kc_small_disk_mount(w);
    return rc < 0 ? kv_fail(error, rc, 0, "%s: %s", w->plan.dir, strerror(-rc)) : 0;
}

void kc_dir_remove(struct kc_whole *w)
{
    if (w->janitor_fd >= 0)
        close(w->janitor_fd);
    if (w->janitor > 0)
        waitpid(w->janitor, NULL, 0);
}

/* ---- servers ---- */

static uint32_t free_port(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof(at);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    if (fd < 0 || bind(fd, (struct sockaddr *)&at, len) < 0 ||
        getsockname(fd, (struct sockaddr *)&at, &len) < 0)
        at.sin_port = 0;
    if (fd >= 0)
        close(fd);
    return ntohs(at.sin_port);
}

static bool answers(uint32_t port)
{
    struct sockaddr_in at = {.sin_family = AF_INET,
                             .sin_port = htons((uint16_t)port),
                             .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    bool yes = fd >= 0 && connect(fd, (struct sockaddr *)&at, sizeof(at)) == 0;

    if (fd >= 0)
        close(fd);
    return yes;
}

static _Noreturn void become_server(const struct kc_server *server, const char *dir, pid_t parent)
{
    int null = open("/dev/null", O_RDWR);
    sigset_t none;

    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    setpgid(0, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() == parent && null >= 0 && dup2(null, 0) >= 0 && dup2(null, 1) >= 0 &&
        dup2(null, 2) >= 0 && chdir(dir) == 0)
        for (const char *const *program = server->programs; *program; program++)
            execvp(*program, (char *const *)server->argv);
    _exit(127);
}

int kc_server_run(struct kc_server *server, const char *dir, struct kv_error *error)
{
    const struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};
    uint64_t deadline_ns = kv_now_ns() + START_MS * KV_NS_PER_MS;
    pid_t parent = getpid();

    server->pid = fork();
    if (server->pid == 0)
        become_server(server, dir, parent);
    while (server->pid > 0 && !answers(server->port)) {
        nanosleep(&pause, NULL);
        if (waitpid(server->pid, NULL, WNOHANG) == server->pid)
            server->pid = 0;
        else if (kv_now_ns() > deadline_ns)
            kc_server_stop(server);
    }
    return server->pid > 0
               ? 0
               : kv_fail(error, -ECHILD, 0, "%s doesn't start; is it installed?", server->argv[0]);
}

void kc_server_stop(struct kc_server *server)
{
    if (server->pid <= 0)
        return;
    kill(server->pid, SIGKILL);
    waitpid(server->pid, NULL, 0);
    server->pid = 0;
}

static int start_redis(struct kc_whole *w, struct kv_error *error)
{
    static char port[8];
    /* Debian's redis-tools has the server under the name of its checker alone: argv[0] decides. */
    static const char *const programs[] = {"redis-server", "valkey-server", "redis-check-rdb",
                                           NULL};
    /* Blocks survive a kill -9 of the server: the kernel has its append-only file. */
    static const char *const argv[] = {"redis-server", "--port",        port, "--bind",
                                       "127.0.0.1",    "--save",        "",   "--appendonly",
                                       "yes",          "--appendfsync", "no", NULL};

    w->redis = (struct kc_server){.port = free_port(), .programs = programs, .argv = argv};
    snprintf(port, sizeof(port), "%u", w->redis.port);
    snprintf(w->plan.store, sizeof(w->plan.store), "redis://127.0.0.1:%u", w->redis.port);
    return kc_server_run(&w->redis, w->plan.dir, error);
}

static int start_nats(struct kc_whole *w, struct kv_error *error)
{
    static char port[8];
    static const char *const programs[] = {"nats-server", "/usr/sbin/nats-server", NULL};
    static const char *const argv[] = {"nats-server", "-a", "127.0.0.1", "-p", port, NULL};

    w->nats = (struct kc_server){.port = free_port(), .programs = programs, .argv = argv};
    snprintf(port, sizeof(port), "%u", w->nats.port);
    snprintf(w->plan.nats, sizeof(w->plan.nats), "nats://127.0.0.1:%u", w->nats.port);
    return kc_server_run(&w->nats, w->plan.dir, error);
}

int kc_servers_start(struct kc_whole *w, struct kv_error *error)
{
    const char *store = w->opts.store;
    int rc = 0;

    if (!store)
        snprintf(w->plan.store, sizeof(w->plan.store), "%.200s/store", w->plan.dir);
    else if (strcmp(store, "redis") == 0)
        rc = start_redis(w, error);
    else if (strcmp(store, "none") != 0 && snprintf(w->plan.store, sizeof(w->plan.store), "%s",
                                                    store) >= (int)sizeof(w->plan.store))
        return kv_fail(error, -ENAMETOOLONG, 0, "--store: at most %zu bytes",
                       sizeof(w->plan.store) - 1);
    if (rc == 0 && w->opts.nats)
        rc = start_nats(w, error);
    return rc;
}
