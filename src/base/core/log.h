// SPDX-License-Identifier: Apache-2.0
/**
 * Levelled, structured logging: a sentence, then key=value pairs.
 *
 *     kv_log_warn("indexer", "gap in the event stream", "worker=%" PRIu64 " missing=%" PRIu64,
 *                 w, n);
 *
 *     time=2026-01-02T03:04:05.678Z level=warn component=indexer msg="gap in ..."
 *     worker=1 missing=7
 *
 * The pairs are logfmt: kv_log_quote quotes values with spaces, quotes or control characters. With
 * JSON output the pairs become members; unquoted numbers, true and false keep their type. A line
 * holds at most KV_LOG_MAX_LINE bytes: pairs that don't fit are left out whole, and the line ends
 * with truncated=true. No line contains a control character or invalid UTF-8, whatever the caller
 * logs. Never log token ids or secrets.
 *
 * Warnings and errors on standard error are bounded by kind (base/core/log_bound.h): left_out=N.
 *
 * Thread-safe: one write per line. A call below the level costs one relaxed load.
 */
#ifndef KV_BASE_LOG_H
#define KV_BASE_LOG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/core/error.h"
#include "kv_types.h"

enum kv_log_level { KV_LOG_ERROR, KV_LOG_WARN, KV_LOG_INFO, KV_LOG_DEBUG, KV_LOG_TRACE };
enum kv_log_format { KV_LOG_LOGFMT, KV_LOG_JSON };

#define KV_LOG_MAX_LINE 4096

extern _Atomic int kv_log_level_; /* default: warn, so that libraries are quiet */

/** Receive one complete line without a newline. The default sink writes to stderr. */
typedef void (*kv_log_sink_fn)(void *arg, enum kv_log_level level, const char *line, size_t len);

void kv_log_set_level(enum kv_log_level level);
void kv_log_set_format(enum kv_log_format format);
void kv_log_set_sink(kv_log_sink_fn sink, void *arg); /* NULL: stderr. Set before threads start. */
/**
 * Hand all lines to @fn, the public hook of a library (kv_log_fn of kv_types.h). NULL: warnings to
 * stderr.
 */
void kv_log_set_user(kv_log_fn fn, void *arg);
int kv_log_parse_level(const char *name); /* returns a level, or -EINVAL */

/** Write one line. @fields is a printf format of logfmt pairs, or NULL. */
void kv_log_emit(enum kv_log_level level, const char *component, const char *message,
                 const char *fields, ...) KV_PRINTF(4, 5);

/** Quote @text for a logfmt value into @buf (truncated to fit); returns @buf. */
const char *kv_log_quote(char *buf, size_t size, const char *text);

/**
 * Return true for at most @burst lines per second of this call site. The next line of this thread
 * reports the number of suppressed ones (suppressed=N), so call this right before logging.
 */
struct kv_log_rate {
    _Atomic unsigned long window; /* second | count, packed */
    _Atomic unsigned long suppressed;
};
bool kv_log_allowed(struct kv_log_rate *rate, unsigned burst);

#define kv_log_(level, component, message, ...)                                         \
    do {                                                                                \
        if ((int)(level) <= atomic_load_explicit(&kv_log_level_, memory_order_relaxed)) \
            kv_log_emit(level, component, message, __VA_ARGS__);                        \
    } while (0)
#define kv_log_error(component, message, ...) kv_log_(KV_LOG_ERROR, component, message, __VA_ARGS__)
#define kv_log_warn(component, message, ...) kv_log_(KV_LOG_WARN, component, message, __VA_ARGS__)
#define kv_log_info(component, message, ...) kv_log_(KV_LOG_INFO, component, message, __VA_ARGS__)
#define kv_log_debug(component, message, ...) kv_log_(KV_LOG_DEBUG, component, message, __VA_ARGS__)

#endif
