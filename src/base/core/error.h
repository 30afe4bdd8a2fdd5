// SPDX-License-Identifier: Apache-2.0
/**
 * Errors and ownership: the two idioms of the whole tree.
 *
 * Errors: functions return 0 (or a count) on success and a negative errno on failure. Outputs are
 * written on success only. The first function that knows the cause of a failure logs it, or fills a
 * struct kv_error when its caller shows it to a person. All callers above hand the value on.
 *
 * Cleanup: constructors with several resources use one `goto fail` exit that calls the destructor.
 * Destructors cope with half-built objects.
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
#ifdef __VERSION__ /* of gcc and clang; check.sh hides it from cppcheck, which misreads these */
#define KV_MIN(a, b) KV_PICK_(<, a, b, __COUNTER__)
#define KV_MAX(a, b) KV_PICK_(>, a, b, __COUNTER__)
#else
#define KV_MIN(a, b) ((a) < (b) ? (a) : (b))
#define KV_MAX(a, b) ((a) > (b) ? (a) : (b))
#endif
#define KV_PICK_(op, a, b, n) KV_PICK_NAMED_(op, a, b, KV_JOIN_(kv_a_, n), KV_JOIN_(kv_b_, n))
/* NOLINTBEGIN(bugprone-macro-parentheses): x and y are names, op is an operator */
/* Names differ per use, so that uses within uses don't shadow each other. */
#define KV_PICK_NAMED_(op, a, b, x, y) \
    __extension__({                    \
        __typeof__((a) + 0) x = (a);   \
        __typeof__((b) + 0) y = (b);   \
        x op y ? x : y;                \
    })
/* NOLINTEND(bugprone-macro-parentheses) */
#define KV_JOIN_(a, b) KV_JOINED_(a, b)
#define KV_JOINED_(a, b) a##b
#define KV_COUNT(array) (sizeof(array) / sizeof((array)[0]))

/** A failure as shown to a person: the code, its place in the input, and a sentence. */
struct kv_error {
    int code;      /* negative errno */
    size_t offset; /* place of the failure in the input, in bytes; 0 when there is no input */
    char text[200];
};

/** Fill @error (may be NULL) and return @code, so that `return kv_fail(...)` reads well. */
int kv_fail(struct kv_error *error, int code, size_t offset, const char *fmt, ...) KV_PRINTF(4, 5);

/** Hand a pointer on and set the variable to NULL. */
#define KV_STEAL(p)                     \
    __extension__({                     \
        __typeof__(p) kv_stolen_ = (p); \
        (p) = NULL;                     \
        kv_stolen_;                     \
    })

/**
 * Read a field of an options struct, which starts with `size_t size`. @fallback is the value when
 * @opts is NULL, when the caller's older struct lacks the field, and when the field is zero.
 */
#define KV_OPT(opts, field, fallback)                                                        \
    ((opts) != NULL &&                                                                       \
             (opts)->size >= offsetof(__typeof__(*(opts)), field) + sizeof((opts)->field) && \
             (opts)->field                                                                   \
         ? (opts)->field                                                                     \
         : (fallback))

/**
 * Write @from, a result struct of this version, into the caller's as far as the caller's size
 * reaches. The caller's size stays; fields that only a newer caller knows keep their values.
 */
#define KV_GIVE(to, from)                                                        \
    memcpy((char *)(to) + sizeof(size_t), (const char *)(from) + sizeof(size_t), \
           KV_MIN((to)->size, sizeof(*(from))) - sizeof(size_t))

/**
 * Check structs that begin with their size: the one rule at every entry. The size is at least that
 * of a struct with one field and at most KV_MAX_STRUCT. Other sizes (0, a pointer, garbage) are
 * refused with one log line that names @name, the struct.
 */
#define KV_MAX_STRUCT ((size_t)1 << 16)
bool kv_refuse_size(const char *name, size_t size); /* logs; returns false */

/**
 * Return true when @s isn't NULL and its size passes the rule. NULL is refused without a log line.
 */
static inline bool kv_sized(const void *s, const char *name)
{
    size_t size;

    if (!s)
        return false;
    memcpy(&size, s, sizeof(size));
    return (size >= 2 * sizeof(size) && size <= KV_MAX_STRUCT) || kv_refuse_size(name, size);
}

/** Return true when @s is NULL or its size passes the rule. */
static inline bool kv_sized_or_null(const void *s, const char *name)
{
    return !s || kv_sized(s, name);
}

#endif
