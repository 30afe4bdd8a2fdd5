// SPDX-License-Identifier: Apache-2.0
/*
 * Log hook of the Python package: keeps the reason of a failing call for its exception.
 *
 * A hook written in Python would need the interpreter's lock on the libraries' own threads, and hang
 * them while the interpreter ends.
 */
#include "reason.h"

#include "base/core/log_bound.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

enum { REASON_LEN = 1024, WARNING = 1 };

/* Errors and warnings of the running call, a line each, the latest that fit: causes before effects. */
static _Thread_local char reason[REASON_LEN];
static _Thread_local bool inside;  /* between kvpy_begin and kvpy_end */
static atomic_int shown = WARNING; /* lines up to this level go to stderr */

/* Add a line to the reason; the earliest lines make room. */
static void note(const char *line)
{
    size_t len = strlen(reason), more = strnlen(line, REASON_LEN - 2);

    while (len + more + 2 > REASON_LEN) {
        const char *end = strchr(reason, '\n');
        size_t gone = end ? (size_t)(end + 1 - reason) : len;

        memmove(reason, reason + gone, len - gone + 1);
        len -= gone;
    }
    snprintf(reason + len, REASON_LEN - len, "%s%.*s", len ? "\n" : "", (int)more, line);
}

/* Print a line to stderr, unless there were too many of its kind. */
static void print(int level, const char *line)
{
    unsigned long left_out = 0;

    if (level <= WARNING && !kv_log_bound(line, &left_out))
        return;
    if (left_out)
        fprintf(stderr, "%s left_out=%lu\n", line, left_out);
    else
        fprintf(stderr, "%s\n", line);
}

void kvpy_log(void *arg, int level, const char *line)
{
    (void)arg;
    if (inside && level <= WARNING)
        note(line);
    else if (level <= atomic_load_explicit(&shown, memory_order_relaxed))
        print(level, line);
}

void kvpy_show(int level)
{
    atomic_store_explicit(&shown, level, memory_order_relaxed);
}

void kvpy_begin(void)
{
    reason[0] = '\0';
    inside = true;
}

const char *kvpy_end(int failed)
{
    inside = false;
    if (!failed && reason[0] && atomic_load_explicit(&shown, memory_order_relaxed) >= WARNING)
        print(WARNING, reason);
    return reason;
}
