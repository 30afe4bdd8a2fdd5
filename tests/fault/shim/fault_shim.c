// SPDX-License-Identifier: Apache-2.0
/*
 * Preloaded into a process (LD_PRELOAD), makes its Nth file call of one kind fail, be short, or be
 * the last thing it does. Only calls on files below one directory are counted, so N means the same
 * in every run of the same work. The tests ask for N = 1, 2, 3, ... until nothing was injected.
 *
 *   KVF_DIR     where calls count
 *   KVF_CALL    open, read, write, sync, rename, link, unlink, mkdir, truncate, xattr, or any
 *   KVF_NTH     which one (1: the first)
 *   KVF_DO      ENOSPC, EIO, EINTR, EROFS, EMFILE, EDQUOT; short (half of a read or write);
 *               skip (a sync that only says so); kill (SIGKILL before the call) or kill-after
 *   KVF_MORE    set: all later ones too
 *   KVF_REPORT  a file that gets one line when it happened
 *   KVF_SWITCH  a file that is read at each such call and says what becomes of it from then on,
 *               instead of the four above: "read EIO", "write ENOSPC", "any slow:200"
 *               (milliseconds). Not there or empty: nothing
 *   KVF_CLOCK   N:SECONDS: wall-clock time jumps by that much at its Nth reading
 *
 * A program that sets the shim's variable kvf_ahead_s moves its monotonic clock by so many seconds.
 *
 * Own calls go by syscall(): they must not be counted.
 */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define REAL(name) ((__typeof__(&(name)))dlsym(RTLD_NEXT, #name))

enum verdict { GO_ON, FAIL, HALF, SKIP, KILL_AFTER };

static struct {
    const char *dir, *call, *what, *report, *switch_;
    long nth;
    bool more;
    int error;
    long clock_nth, clock_jump_s;
} plan;
static atomic_long n_calls, n_clocks;

static int error_of(const char *name)
{
    static const struct {
        const char *name;
        int number;
    } errors[] = {{"ENOSPC", ENOSPC}, {"EIO", EIO},       {"EINTR", EINTR},
                  {"EROFS", EROFS},   {"EMFILE", EMFILE}, {"EDQUOT", EDQUOT}};

    for (size_t i = 0; i < sizeof(errors) / sizeof(errors[0]); i++)
        if (!strcmp(errors[i].name, name))
            return errors[i].number;
    return 0;
}

__attribute__((constructor)) static void read_plan(void)
{
    const char *nth = getenv("KVF_NTH"), *clock_plan = getenv("KVF_CLOCK");

    plan.dir = getenv("KVF_DIR");
    plan.call = getenv("KVF_CALL");
    plan.what = getenv("KVF_DO");
    plan.report = getenv("KVF_REPORT");
    plan.more = getenv("KVF_MORE") != NULL;
    plan.nth = nth ? atol(nth) : 0;
    plan.switch_ = getenv("KVF_SWITCH");
    plan.error = plan.what ? error_of(plan.what) : 0;
    if (!plan.dir || !plan.call || !plan.what)
        plan.nth = 0;
    if (plan.switch_ && plan.dir)
        plan.nth = 1;
    if (clock_plan) {
        plan.clock_nth = strtol(clock_plan, (char **)&clock_plan, 10);
        plan.clock_jump_s = *clock_plan == ':' ? atol(clock_plan + 1) : 0;
    }
}

static void report(const char *call, long number)
{
    char line[128];
    int len = snprintf(line, sizeof(line), "%s %s %ld\n", plan.what, call, number);
    long fd;

    if (!plan.report)
        return;
    fd = syscall(SYS_openat, AT_FDCWD, plan.report, O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (fd < 0)
        return;
    syscall(SYS_write, fd, line, len);
    syscall(SYS_close, fd);
}

static bool below(const char *path)
{
    size_t len = strlen(plan.dir);

    return !strncmp(path, plan.dir, len) && (path[len] == '/' || !path[len]);
}

static bool fd_below(int fd)
{
    char link[64], path[PATH_MAX];
    long len;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
    len = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof(path) - 1);
    if (len < 0)
        return false;
    path[len] = 0;
    return below(path);
}

/* As the switch says at this moment. */
static enum verdict ask_switch(const char *call)
{
    char text[64], kind[16], what[16];
    long fd = syscall(SYS_openat, AT_FDCWD, plan.switch_, O_RDONLY), len;

    if (fd < 0)
        return GO_ON;
    len = syscall(SYS_read, fd, text, sizeof(text) - 1);
    syscall(SYS_close, fd);
    text[len > 0 ? len : 0] = 0;
    if (sscanf(text, "%15s %15s", kind, what) != 2 || (strcmp(kind, "any") && strcmp(kind, call)))
        return GO_ON;
    if (!strncmp(what, "slow:", 5)) {
        const long ms = atol(what + 5);
        const struct timespec pause = {ms / 1000, ms % 1000 * 1000000};

        nanosleep(&pause, NULL);
        return GO_ON;
    }
    errno = error_of(what);
    return FAIL;
}

/* Decide the outcome of one call on a file that the faults are for. */
static enum verdict decide(const char *call)
{
    long number;

    if (plan.switch_)
        return ask_switch(call);

    if (strcmp(plan.call, "any") && strcmp(plan.call, call))
        return GO_ON;
    number = atomic_fetch_add(&n_calls, 1) + 1;
    if (number < plan.nth || (number > plan.nth && !plan.more))
        return GO_ON;
    if (!strcmp(plan.what, "short") && strcmp(call, "read") && strcmp(call, "write"))
        return GO_ON;
    report(call, number);
    if (!strcmp(plan.what, "kill"))
        syscall(SYS_kill, getpid(), SIGKILL);
    if (!strcmp(plan.what, "kill-after"))
        return KILL_AFTER;
    if (!strcmp(plan.what, "short"))
        return HALF;
    if (!strcmp(plan.what, "skip"))
        return SKIP;
    errno = plan.error;
    return FAIL;
}

static enum verdict on_fd(const char *call, int fd)
{
    return plan.nth && fd_below(fd) ? decide(call) : GO_ON;
}

static enum verdict on_path(const char *call, int dir_fd, const char *path)
{
    if (!plan.nth || !path)
        return GO_ON;
    return path[0] == '/' ? (below(path) ? decide(call) : GO_ON) : on_fd(call, dir_fd);
}

static void end(enum verdict verdict)
{
    if (verdict == KILL_AFTER)
        syscall(SYS_kill, getpid(), SIGKILL);
}

/* A whole function: fails, does nothing, or does the real call. */
#define WRAP(type, name, params, args, verdict_of) \
    EXPORT type name params                        \
    {                                              \
        enum verdict verdict = (verdict_of);       \
        type result = verdict == SKIP ? 0 : -1;    \
                                                   \
        if (verdict != FAIL && verdict != SKIP)    \
            result = REAL(name) args;              \
        end(verdict);                              \
        return result;                             \
    }

/* Likewise for a transfer of len bytes, which may be cut in two. */
#define WRAP_IO(name, params, args, call)       \
    EXPORT ssize_t name params                  \
    {                                           \
        enum verdict verdict = on_fd(call, fd); \
        ssize_t result = -1;                    \
                                                \
        if (verdict == HALF)                    \
            len = (len + 1) / 2;                \
        if (verdict != FAIL)                    \
            result = REAL(name) args;           \
        end(verdict);                           \
        return result;                          \
    }

static mode_t mode_of(int flags, va_list ap)
{
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(ap, mode_t) : 0;
}

#define WRAP_OPEN(name, params, args, dir_fd)                 \
    EXPORT int name params                                    \
    {                                                         \
        enum verdict verdict = on_path("open", dir_fd, path); \
        int result = -1;                                      \
        mode_t mode;                                          \
        va_list ap;                                           \
                                                              \
        va_start(ap, flags);                                  \
        mode = mode_of(flags, ap);                            \
        va_end(ap);                                           \
        if (verdict != FAIL)                                  \
            result = REAL(name) args;                         \
        end(verdict);                                         \
        return result;                                        \
    }

WRAP_OPEN(open, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
WRAP_OPEN(open64, (const char *path, int flags, ...), (path, flags, mode), AT_FDCWD)
WRAP_OPEN(openat, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)
WRAP_OPEN(openat64, (int at, const char *path, int flags, ...), (at, path, flags, mode), at)

WRAP_IO(read, (int fd, void *buf, size_t len), (fd, buf, len), "read")
WRAP_IO(pread, (int fd, void *buf, size_t len, off_t at), (fd, buf, len, at), "read")
WRAP_IO(pread64, (int fd, void *buf, size_t len, off64_t at), (fd, buf, len, at), "read")
WRAP_IO(write, (int fd, const void *buf, size_t len), (fd, buf, len), "write")
WRAP_IO(pwrite, (int fd, const void *buf, size_t len, off_t at), (fd, buf, len, at), "write")
WRAP_IO(pwrite64, (int fd, const void *buf, size_t len, off64_t at), (fd, buf, len, at), "write")
WRAP(ssize_t, writev, (int fd, const struct iovec *v, int n), (fd, v, n), on_fd("write", fd))
WRAP(ssize_t, pwritev, (int fd, const struct iovec *v, int n, off_t at), (fd, v, n, at),
     on_fd("write", fd))

WRAP(int, fsync, (int fd), (fd), on_fd("sync", fd))
WRAP(int, fdatasync, (int fd), (fd), on_fd("sync", fd))
WRAP(int, syncfs, (int fd), (fd), on_fd("sync", fd))
WRAP(int, sync_file_range, (int fd, off64_t at, off64_t len, unsigned flags), (fd, at, len, flags),
     on_fd("sync", fd))

WRAP(int, rename, (const char *from, const char *to), (from, to), on_path("rename", AT_FDCWD, to))
WRAP(int, renameat, (int from_fd, const char *from, int to_fd, const char *to),
     (from_fd, from, to_fd, to), on_path("rename", to_fd, to))
WRAP(int, renameat2, (int from_fd, const char *from, int to_fd, const char *to, unsigned flags),
     (from_fd, from, to_fd, to, flags), on_path("rename", to_fd, to))
WRAP(int, link, (const char *from, const char *to), (from, to), on_path("link", AT_FDCWD, to))
WRAP(int, linkat, (int from_fd, const char *from, int to_fd, const char *to, int flags),
     (from_fd, from, to_fd, to, flags), on_path("link", to_fd, to))
WRAP(int, unlink, (const char *path), (path), on_path("unlink", AT_FDCWD, path))
WRAP(int, unlinkat, (int at, const char *path, int flags), (at, path, flags),
     on_path("unlink", at, path))
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), on_path("mkdir", AT_FDCWD, path))
WRAP(int, mkdirat, (int at, const char *path, mode_t mode), (at, path, mode),
     on_path("mkdir", at, path))

WRAP(int, ftruncate, (int fd, off_t len), (fd, len), on_fd("truncate", fd))
WRAP(int, ftruncate64, (int fd, off64_t len), (fd, len), on_fd("truncate", fd))
WRAP(int, fallocate, (int fd, int mode, off_t at, off_t len), (fd, mode, at, len),
     on_fd("truncate", fd))
WRAP(int, fallocate64, (int fd, int mode, off64_t at, off64_t len), (fd, mode, at, len),
     on_fd("truncate", fd))

WRAP(int, fsetxattr, (int fd, const char *name, const void *value, size_t size, int flags),
     (fd, name, value, size, flags), on_fd("xattr", fd))
WRAP(int, setxattr, (const char *path, const char *name, const void *value, size_t size, int flags),
     (path, name, value, size, flags), on_path("xattr", AT_FDCWD, path))
WRAP(ssize_t, fgetxattr, (int fd, const char *name, void *value, size_t size),
     (fd, name, value, size), on_fd("xattr", fd))
WRAP(ssize_t, getxattr, (const char *path, const char *name, void *value, size_t size),
     (path, name, value, size), on_path("xattr", AT_FDCWD, path))

/* Names that _FORTIFY_SOURCE gives some of these calls. */
EXPORT ssize_t __read_chk(int fd, void *buf, size_t len, size_t cap);
EXPORT ssize_t __pread_chk(int fd, void *buf, size_t len, off_t at, size_t cap);
EXPORT ssize_t __pread64_chk(int fd, void *buf, size_t len, off64_t at, size_t cap);
EXPORT int __open_2(const char *path, int flags);
EXPORT int __openat_2(int at, const char *path, int flags);

ssize_t __read_chk(int fd, void *buf, size_t len, size_t cap)
{
    return len > cap ? abort(), -1 : read(fd, buf, len);
}

ssize_t __pread_chk(int fd, void *buf, size_t len, off_t at, size_t cap)
{
    return len > cap ? abort(), -1 : pread(fd, buf, len, at);
}

ssize_t __pread64_chk(int fd, void *buf, size_t len, off64_t at, size_t cap)
{
    return len > cap ? abort(), -1 : pread64(fd, buf, len, at);
}

int __open_2(const char *path, int flags)
{
    return open(path, flags);
}

int __openat_2(int at, const char *path, int flags)
{
    return openat(at, path, flags);
}

/* -- Clocks ------------------------------------------------------------------------------------ */

EXPORT atomic_long kvf_ahead_s;

static long jump_s(void)
{
    return plan.clock_jump_s && atomic_fetch_add(&n_clocks, 1) + 1 >= plan.clock_nth
               ? plan.clock_jump_s
               : 0;
}

EXPORT int clock_gettime(clockid_t clock, struct timespec *ret)
{
    int rc = (int)syscall(SYS_clock_gettime, clock, ret);

    if (!rc && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        ret->tv_sec += jump_s();
    if (!rc && clock == CLOCK_MONOTONIC)
        ret->tv_sec += kvf_ahead_s;
    return rc;
}

EXPORT time_t time(time_t *ret)
{
    struct timespec now;

    clock_gettime(CLOCK_REALTIME, &now);
    if (ret)
        *ret = now.tv_sec;
    return now.tv_sec;
}

EXPORT int gettimeofday(struct timeval *restrict ret, void *restrict zone)
{
    struct timespec now;

    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    *ret = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
    return 0;
}
