// SPDX-License-Identifier: Apache-2.0
/*
 * Functions that glibc 2.28 lacks, made of those that it has. The wheel's libraries hold them,
 * hidden (tools/wheel.py). Own names here: the headers of a newer glibc declare the real ones.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
enum { STAT_VERSION = 1 };
#else
enum { STAT_VERSION = 0 };
#endif

#define HIDDEN(name) __asm__(name) __attribute__((visibility("hidden")))
#define HIDDEN_NAME(type, name, args)      \
    type compat_##name args HIDDEN(#name); \
    type compat_##name args

int __fxstatat(int version, int fd, const char *path, struct stat *ret, int flags);
int __fxstat(int version, int fd, struct stat *ret);

int compat_fstatat(int fd, const char *path, struct stat *ret, int flags) HIDDEN("fstatat");
int compat_stat(const char *path, struct stat *ret) HIDDEN("stat");
int compat_lstat(const char *path, struct stat *ret) HIDDEN("lstat");
int compat_fstat(int fd, struct stat *ret) HIDDEN("fstat");
pid_t compat_gettid(void) HIDDEN("gettid");
long compat_strtol(const char *text, char **end, int base) HIDDEN("__isoc23_strtol");
long long compat_strtoll(const char *text, char **end, int base) HIDDEN("__isoc23_strtoll");
unsigned long compat_strtoul(const char *text, char **end, int base) HIDDEN("__isoc23_strtoul");
unsigned long long compat_strtoull(const char *text, char **end, int base)
    HIDDEN("__isoc23_strtoull");
int compat_sscanf(const char *text, const char *format, ...) HIDDEN("__isoc23_sscanf");
int compat_fscanf(FILE *file, const char *format, ...) HIDDEN("__isoc23_fscanf");

/* The forms before C23, by the names that glibc 2.28 exports. */
long old_strtol(const char *text, char **end, int base) __asm__("strtol");
long long old_strtoll(const char *text, char **end, int base) __asm__("strtoll");
unsigned long old_strtoul(const char *text, char **end, int base) __asm__("strtoul");
unsigned long long old_strtoull(const char *text, char **end, int base) __asm__("strtoull");
int old_vsscanf(const char *text, const char *format, va_list args) __asm__("__isoc99_vsscanf");
int old_vfscanf(FILE *file, const char *format, va_list args) __asm__("__isoc99_vfscanf");

int compat_fstatat(int fd, const char *path, struct stat *ret, int flags)
{
    return __fxstatat(STAT_VERSION, fd, path, ret, flags);
}

int compat_stat(const char *path, struct stat *ret)
{
    return __fxstatat(STAT_VERSION, AT_FDCWD, path, ret, 0);
}

int compat_lstat(const char *path, struct stat *ret)
{
    return __fxstatat(STAT_VERSION, AT_FDCWD, path, ret, AT_SYMLINK_NOFOLLOW);
}

int compat_fstat(int fd, struct stat *ret)
{
    return __fxstat(STAT_VERSION, fd, ret);
}

pid_t compat_gettid(void)
{
    return (pid_t)syscall(SYS_gettid);
}

long compat_strtol(const char *text, char **end, int base)
{
    return old_strtol(text, end, base);
}

long long compat_strtoll(const char *text, char **end, int base)
{
    return old_strtoll(text, end, base);
}

unsigned long compat_strtoul(const char *text, char **end, int base)
{
    return old_strtoul(text, end, base);
}

unsigned long long compat_strtoull(const char *text, char **end, int base)
{
    return old_strtoull(text, end, base);
}

int compat_sscanf(const char *text, const char *format, ...)
{
    va_list args;
    int n;

    va_start(args, format);
    n = old_vsscanf(text, format, args);
    va_end(args);
    return n;
}

int compat_fscanf(FILE *file, const char *format, ...)
{
    va_list args;
    int n;

    va_start(args, format);
    n = old_vfscanf(file, format, args);
    va_end(args);
    return n;
}

/* -- for the static libraries of this machine that the wheel's hold -------------------------------- */

HIDDEN_NAME(int, pthread_cond_clockwait,
            (pthread_cond_t * cond, pthread_mutex_t *mutex, clockid_t clock,
             const struct timespec *until))
{
    struct timespec there, here, end = *until;

    clock_gettime(clock, &here);
    clock_gettime(CLOCK_REALTIME, &there);
    end.tv_sec += there.tv_sec - here.tv_sec;
    end.tv_nsec += there.tv_nsec - here.tv_nsec;
    if (end.tv_nsec >= 1000000000) {
        end.tv_nsec -= 1000000000;
        end.tv_sec++;
    } else if (end.tv_nsec < 0) {
        end.tv_nsec += 1000000000;
        end.tv_sec--;
    }
    return pthread_cond_timedwait(cond, mutex, &end);
}

HIDDEN_NAME(size_t, strlcpy, (char *to, const char *from, size_t room))
{
    size_t len = strlen(from);

    if (room) {
        memcpy(to, from, len < room ? len : room - 1);
        to[len < room ? len : room - 1] = '\0';
    }
    return len;
}

HIDDEN_NAME(void, arc4random_buf, (void *to, size_t len))
{
    char *at = to;

    while (len > 0) {
        ssize_t n = getrandom(at, len, 0);

        if (n < 0 && errno != EINTR)
            abort(); /* as glibc does: without random bytes nothing is safe */
        at += n > 0 ? n : 0;
        len -= n > 0 ? (size_t)n : 0;
    }
}

HIDDEN_NAME(uint32_t, arc4random, (void))
{
    uint32_t ret;

    compat_arc4random_buf(&ret, sizeof(ret));
    return ret;
}

/*
 * Data of libc, under the names that tools/wheel.py gives its uses in those libraries: their code
 * isn't position independent enough to reach data of another library.
 */
__attribute__((visibility("hidden"))) FILE *kv_wheel_stdin, *kv_wheel_stdout, *kv_wheel_stderr;
__attribute__((visibility("hidden"))) char kv_wheel___libc_single_threaded; /* 0: not known to be */
__attribute__((visibility("hidden"))) struct in6_addr kv_wheel_in6addr_any;
__attribute__((visibility("hidden"))) struct in6_addr kv_wheel_in6addr_loopback =
    IN6ADDR_LOOPBACK_INIT;

__attribute__((constructor(101))) static void fill(void)
{
    kv_wheel_stdin = stdin;
    kv_wheel_stdout = stdout;
    kv_wheel_stderr = stderr;
}
