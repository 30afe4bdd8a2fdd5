// SPDX-License-Identifier: Apache-2.0
/**
 * Errors and ownership, the two idioms that hold everywhere.
 *
 * Errors: functions return 0 (or a count) on success and a negative errno on failure; outputs are
 * written on success only. The first function that knows the cause of a failure logs it, or fills a
 * struct kv_error when its caller shows it to a person; everybody above just hands the value on.
 *
 * Cleanup: constructors with several resources use one `goto fail` exit that calls the destructor
 * (destructors cope with half-built objects).
 */
#ifndef KV_BASE_ERROR_H
#define KV_BASE_ERROR_H

#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define KV_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define KV_LIKELY(x) __builtin_expect(!!(x), 1)
#define KV_UNLIKELY(x) __builtin_expect(!!(x), 0)
/*
 * Smaller and larger one of two values, each evaluated once. Types as those of a comparison; not
 * for constant expressions.
 */
#define KV_MIN(a, b) KV_PICK_(<, a, b, __COUNTER__)
#define KV_MAX(a, b) KV_PICK_(>, a, b, __COUNTER__)
#define KV_PICK_(op, a, b, n) KV_PICK_NAMED_(op, a, b, KV_JOIN_(kv_a_, n), KV_JOIN_(kv_b_, n))
/* Names differ per use, so that uses within uses don't shadow each other. */
#define KV_PICK_NAMED_(op, a, b, x, y) \
    __extension__({                    \
        __typeof__((a) + 0) x = (a);   \
        __typeof__((b) + 0) y = (b);   \
        x op y ? x : y;                \
    })
#define KV_JOIN_(a, b) KV_JOINED_(a, b)
#define KV_JOINED_(a, b) a##b
#define KV_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/** A failure told to a person: the code, where in the input it was noticed, and a sentence. */
struct kv_error {
    int code;      /* negative errno */
    size_t offset; /* byte offset in the input; 0 when it has none */
    char text[200];
};

/** Fill @error (may be NULL) and return @code, so that `return kv_fail(...)` reads well. */
int kv_fail(struct kv_error *error, int code, size_t offset, const char *fmt, ...) KV_PRINTF(4, 5);

/** Hands a pointer on and forgets it. */
#define KV_STEAL(p)                     \
    __extension__({                     \
        __typeof__(p) kv_stolen_ = (p); \
        (p) = NULL;                     \
        kv_stolen_;                     \
    })

/**
 * The options pattern: structs that start with `size_t size`. KV_OPT reads a field of a caller who
 * may have been built against an older, shorter struct (or passes NULL): @fallback then, and also
 * when the field is zero.
 */
#define KV_OPT(opts, field, fallback)                                                        \
    ((opts) != NULL &&                                                                       \
             (opts)->size >= offsetof(__typeof__(*(opts)), field) + sizeof((opts)->field) && \
             (opts)->field                                                                   \
         ? (opts)->field                                                                     \
         : (fallback))

/**
 * The same for what is told: KV_GIVE writes @from, a struct of today, into a caller's as far as
 * that reaches, and no further. His size stays; what a newer one has that the library doesn't know
 * keeps its value.
 */
#define KV_GIVE(to, from)                                                        \
    memcpy((char *)(to) + sizeof(size_t), (const char *)(from) + sizeof(size_t), \
           KV_MIN((to)->size, sizeof(*(from))) - sizeof(size_t))

/**
 * The one rule for structs that begin with their size, checked by each function that takes one: the
 * size is at least that of a struct with one field and at most KV_MAX_STRUCT. A size of 0
 * (forgotten), of a pointer, or of garbage is refused with one log line that names @name, the
 * struct.
 */
#define KV_MAX_STRUCT ((size_t)1 << 16)
bool kv_refuse_size(const char *name, size_t size); /* logs; returns false */

/** Whether @s is there and has a believable size. NULL: false, without a log line. */
static inline bool kv_sized(const void *s, const char *name)
{
    size_t size;

    if (!s)
        return false;
    memcpy(&size, s, sizeof(size));
    return (size >= 2 * sizeof(size) && size <= KV_MAX_STRUCT) || kv_refuse_size(name, size);
}

/** The same for a struct that may be left out: NULL is true. */
static inline bool kv_sized_or_null(const void *s, const char *name)
{
    return !s || kv_sized(s, name);
}

#endif
