// SPDX-License-Identifier: Apache-2.0
#include "starve.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

static _Thread_local long left;
static _Thread_local bool happened;

void starve_at(long n)
{
    left = n;
    happened = false;
}

bool starved(void)
{
    return happened;
}

static bool refuse(void)
{
    if (left == 0 || --left > 0)
        return false;
    happened = true;
    errno = ENOMEM;
    return true;
}

/* The linker calls these for the functions (--wrap), and the functions themselves __real_. */
// NOLINTBEGIN
void *__real_malloc(size_t size);
void *__wrap_malloc(size_t size);
void *__wrap_malloc(size_t size)
{
    return refuse() ? NULL : __real_malloc(size);
}

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size)
{
    return refuse() ? NULL : __real_calloc(n, size);
}

void *__real_realloc(void *old, size_t size);
void *__wrap_realloc(void *old, size_t size);
void *__wrap_realloc(void *old, size_t size)
{
    return refuse() ? NULL : __real_realloc(old, size);
}

void *__real_reallocarray(void *old, size_t n, size_t size);
void *__wrap_reallocarray(void *old, size_t n, size_t size);
void *__wrap_reallocarray(void *old, size_t n, size_t size)
{
    return refuse() ? NULL : __real_reallocarray(old, n, size);
}

char *__real_strdup(const char *text);
char *__wrap_strdup(const char *text);
char *__wrap_strdup(const char *text)
{
    return refuse() ? NULL : __real_strdup(text);
}

int __real_posix_memalign(void **ret, size_t alignment, size_t size);
int __wrap_posix_memalign(void **ret, size_t alignment, size_t size);
int __wrap_posix_memalign(void **ret, size_t alignment, size_t size)
{
    return refuse() ? ENOMEM : __real_posix_memalign(ret, alignment, size);
}

void *__real_mmap(void *at, size_t len, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t len, int prot, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t len, int prot, int flags, int fd, off_t offset)
{
    return refuse() ? MAP_FAILED : __real_mmap(at, len, prot, flags, fd, offset);
}
// NOLINTEND
