// SPDX-License-Identifier: Apache-2.0
/**
 * A bound for lines on standard error: a fault that repeats thousands of times a second (a full disk,
 * a server that is down) must not fill it.
 *
 * Lines are of one kind when component and msg are equal, and what they are about: store, folder,
 * volume, server, worker and the like. Of a kind 10 lines pass in 10 s; after a time in which more
 * came, one in 10 s until it is quiet. The next line of the kind says how many were left out.
 *
 * Used by base/core/log.c and by the Python package's hook, which print; hooks of other programs get
 * every line.
 */
#ifndef KV_BASE_LOG_BOUND_H
#define KV_BASE_LOG_BOUND_H

#include <stdbool.h>

/**
 * True when @line, in logfmt or JSON, may be printed; *@ret_left_out then gets the number of lines
 * of its kind that were left out before it. Any thread.
 */
bool kv_log_bound(const char *line, unsigned long *ret_left_out);

#endif
