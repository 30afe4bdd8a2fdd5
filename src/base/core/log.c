// SPDX-License-Identifier: Apache-2.0
#include "base/core/log.h"

#include <limits.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log_bound.h"
#include "base/core/utf8.h"

_Atomic int kv_log_level_ = KV_LOG_WARN;

static _Atomic int log_format = KV_LOG_LOGFMT;
static kv_log_sink_fn log_sink;
static void *log_sink_arg;

/*
 * Number of lines that the last allowed call site of this thread suppressed. The next line reports
 * it.
 */
static _Thread_local unsigned long pending_suppressed;

static const char *const level_names[] = {"error", "warn", "info", "debug", "trace"};

void kv_log_set_level(enum kv_log_level level)
{
    atomic_store_explicit(&kv_log_level_, (int)level, memory_order_relaxed);
}

void kv_log_set_format(enum kv_log_format format)
{
    atomic_store_explicit(&log_format, (int)format, memory_order_relaxed);
}

void kv_log_set_sink(kv_log_sink_fn sink, void *arg)
{
    log_sink = sink;
    log_sink_arg = arg;
}

static struct {
    kv_log_fn fn;
    void *arg;
} user;

static void to_user(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    char text[KV_LOG_MAX_LINE + 1];
    (void)arg;

    len = KV_MIN(len, sizeof(text) - 1);
    memcpy(text, line, len);
    text[len] = '\0';
    user.fn(user.arg, KV_MIN((int)level, (int)KV_LOG_DEBUG), text);
}

void kv_log_set_user(kv_log_fn fn, void *arg)
{
    user.fn = fn;
    user.arg = arg;
    kv_log_set_sink(fn ? to_user : NULL, NULL);
    kv_log_set_level(fn ? KV_LOG_DEBUG : KV_LOG_WARN);
}

int kv_log_parse_level(const char *name)
{
    for (int i = 0; i < (int)KV_COUNT(level_names); i++)
        if (strcmp(name, level_names[i]) == 0)
            return i;
    return -EINVAL;
}

/* -- one line, of bounded size ----------------------------------------------------------------- */

/* Bytes kept for the end of every line: left_out=N and truncated=true in either format, a brace and
 * a newline. */
#define LINE_RESERVE 64

struct line {
    char data[KV_LOG_MAX_LINE];
    size_t len, limit;
    bool json;
    bool full; /* a pair didn't fit */
};

static void put(struct line *line, const char *text, size_t len)
{
    if (line->full || len > line->limit - line->len) {
        line->full = true;
        return;
    }
    memcpy(line->data + line->len, text, len);
    line->len += len;
}

static void puts_line(struct line *line, const char *text)
{
    put(line, text, strlen(text));
}

/* Return true for U+0080 to U+009F, which terminals obey like escape sequences. */
static bool is_c1(const char *text, int len)
{
    return len == 2 && (unsigned char)text[0] == 0xC2 && (unsigned char)text[1] < 0xA0;
}

/*
 * Write @text between quotes. The escapes of JSON serve logfmt, too. U+FFFD replaces invalid UTF-8.
 */
static void put_quoted(struct line *line, const char *text, size_t len)
{
    const char *end = text + len;

    puts_line(line, "\"");
    while (text < end) {
        unsigned char c = (unsigned char)*text;
        int n = kv_utf8_sequence(text, end);
        char escape[8];

        if (n <= 0) {
            puts_line(line, "\xEF\xBF\xBD");
            n = 1;
        } else if (c == '"' || c == '\\') {
            put(line, (const char[]){'\\', (char)c}, 2);
        } else if (c == '\n' || c == '\t' || c == '\r') {
            put(line, (const char[]){'\\', c == '\n' ? 'n' : c == '\t' ? 't' : 'r'}, 2);
        } else if (c < 0x20 || c == 0x7F) {
            snprintf(escape, sizeof(escape), "\\u%04x", c);
            put(line, escape, 6);
        } else if (is_c1(text, n)) {
            snprintf(escape, sizeof(escape), "\\u%04x", (unsigned char)text[1]);
            put(line, escape, 6);
        } else {
            put(line, text, (size_t)n);
        }
        text += n;
    }
    puts_line(line, "\"");
}

static bool needs_quotes(const char *text, size_t len)
{
    const char *end = text + len;

    if (len == 0)
        return true;
    while (text < end) {
        unsigned char c = (unsigned char)*text;
        int n = kv_utf8_sequence(text, end);

        if (n <= 0 || c <= ' ' || c == '"' || c == '\\' || c == '=' || c == 0x7F || is_c1(text, n))
            return true;
        text += n;
    }
    return false;
}

/* Return true when the bare word is a JSON literal. */
static bool is_json_literal(const char *p, size_t len)
{
    const char *end = p + len;

    if ((len == 4 && memcmp(p, "true", 4) == 0) || (len == 5 && memcmp(p, "false", 5) == 0))
        return true;
    if (p < end && *p == '-')
        p++;
    if (p == end || *p < '0' || *p > '9' || (*p == '0' && end - p > 1 && p[1] != '.'))
        return false;
    while (p < end && *p >= '0' && *p <= '9')
        p++;
    if (p == end)
        return true;
    if (*p++ != '.' || p == end)
        return false;
    while (p < end && *p >= '0' && *p <= '9')
        p++;
    return p == end;
}

/* Write one pair, or nothing when the pair doesn't fit. @bare: the value came without quotes. */
static void put_pair(struct line *line, const char *key, size_t key_len, const char *value,
                     size_t value_len, bool bare)
{
    size_t before = line->len;
    bool json = line->json;

    if (json) {
        puts_line(line, before > 1 ? "," : "");
        put_quoted(line, key, key_len);
        puts_line(line, ":");
    } else {
        puts_line(line, before > 0 ? " " : "");
        if (needs_quotes(key, key_len))
            put_quoted(line, key, key_len);
        else
            put(line, key, key_len);
        puts_line(line, "=");
    }
    if (json ? bare && is_json_literal(value, value_len) : !needs_quotes(value, value_len))
        put(line, value, value_len);
    else
        put_quoted(line, value, value_len);
    if (line->full)
        line->len = before;
}

static void put_text(struct line *line, const char *key, const char *text)
{
    put_pair(line, key, strlen(key), text, strlen(text), false);
}

/* -- the caller's fields ----------------------------------------------------------------------- */

/* Decode the escape behind a backslash, as kv_log_quote writes it. Returns its length. */
static size_t unescape(const char *p, char *ret)
{
    static const char hex[] = "0123456789abcdef";
    const char *high, *low;

    *ret = *p == 'n' ? '\n' : *p == 't' ? '\t' : *p == 'r' ? '\r' : *p;
    if (strncmp(p, "u00", 3) != 0 || !p[3] || !p[4])
        return 1;
    high = strchr(hex, p[3]);
    low = strchr(hex, p[4]);
    if (!high || !low)
        return 1;
    *ret = (char)((high - hex) << 4 | (low - hex));
    return 5;
}

/*
 * Read the value at @p and unescape it into @out, which has room for all of it. Returns the text
 * behind the value.
 */
static const char *take_value(const char *p, char *out, size_t *ret_len, bool *ret_bare)
{
    size_t len = 0;

    *ret_bare = *p != '"';
    if (*ret_bare) {
        for (; (unsigned char)*p > ' '; p++)
            out[len++] = *p;
        *ret_len = len;
        return p;
    }
    for (p++; *p && *p != '"'; p++) {
        if (*p == '\\' && p[1])
            p += unescape(p + 1, &out[len++]);
        else
            out[len++] = *p;
    }
    *ret_len = len;
    return *p ? p + 1 : p;
}

/* Parse the caller's logfmt pairs again, so that none of them can break the line or its JSON. */
static void put_fields(struct line *line, const char *p)
{
    char value[KV_LOG_MAX_LINE];

    while (*p && !line->full) {
        const char *key;
        size_t key_len, value_len = 4;
        bool bare = true;

        while (*p && (unsigned char)*p <= ' ')
            p++;
        for (key = p; (unsigned char)*p > ' ' && *p != '=' && *p != '"';)
            p++;
        key_len = (size_t)(p - key);
        memcpy(value, "true", 4); /* a word without a value is a flag */
        if (*p == '=')
            p = take_value(p + 1, value, &value_len, &bare);
        else if (*p == '"')
            p++; /* a stray quote */
        if (key_len > 0)
            put_pair(line, key, key_len, value, value_len, bare);
    }
}

static void put_head(struct line *line, enum kv_log_level level, const char *component,
                     const char *message)
{
    uint64_t now = kv_wall_ns();
    time_t seconds = (time_t)(now / KV_NS_PER_S);
    char stamp[40], text[48];
    struct tm tm;

    gmtime_r(&seconds, &tm);
    strftime(stamp, sizeof(stamp), "%Y-%m-%dT%H:%M:%S", &tm);
    snprintf(text, sizeof(text), "%s.%03uZ", stamp, (unsigned)(now / KV_NS_PER_MS % 1000));
    put_text(line, "time", text);
    put_text(line, "level", level_names[level]);
    put_text(line, "component", component);
    put_text(line, "msg", message);
}

/*
 * Write the line to standard error. Repeats short writes, which full pipes cause. @line has room
 * for the newline.
 */
static void write_line(struct line *line)
{
    const char *p = line->data;
    size_t left = line->len + 1;

    line->data[line->len] = '\n';
    while (left > 0) {
        ssize_t n = write(STDERR_FILENO, p, left);

        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return;
        p += n;
        left -= (size_t)n;
    }
}

/* True when a line may go to standard error; says how many of its kind were left out before it. */
static bool is_printed(struct line *line)
{
    unsigned long left_out;
    bool full = line->full;
    char text[24];
    int n;

    line->data[line->len] = '\0'; /* within LINE_RESERVE */
    if (!kv_log_bound(line->data, &left_out))
        return false;
    if (left_out > 0) {
        line->full = false;
        line->limit = KV_LOG_MAX_LINE - LINE_RESERVE / 2;
        n = snprintf(text, sizeof(text), "%lu", left_out);
        put_pair(line, "left_out", strlen("left_out"), text, (size_t)n, true);
        line->full |= full;
    }
    return true;
}

void kv_log_emit(enum kv_log_level level, const char *component, const char *message,
                 const char *fields, ...)
{
    struct line line = {.len = 0, .limit = KV_LOG_MAX_LINE - LINE_RESERVE};
    char text[KV_LOG_MAX_LINE];
    int saved = errno, n;
    va_list args;

    line.json = atomic_load_explicit(&log_format, memory_order_relaxed) == KV_LOG_JSON;
    if (line.json)
        puts_line(&line, "{");
    put_head(&line, level, component, message);
    if (pending_suppressed > 0) {
        n = snprintf(text, sizeof(text), "%lu", pending_suppressed);
        put_pair(&line, "suppressed", strlen("suppressed"), text, (size_t)n, true);
        pending_suppressed = 0;
    }
    if (fields) {
        va_start(args, fields);
        n = vsnprintf(text, sizeof(text), fields, args);
        va_end(args);
        if (n > 0)
            put_fields(&line, text);
        line.full |= n >= (int)sizeof(text);
    }
    if (!log_sink && level <= KV_LOG_WARN && !is_printed(&line)) {
        errno = saved;
        return;
    }
    if (line.full) {
        line.full = false;
        line.limit = KV_LOG_MAX_LINE - 2;
        put_pair(&line, "truncated", strlen("truncated"), "true", 4, true);
    }
    line.limit = KV_LOG_MAX_LINE - 1;
    if (line.json)
        puts_line(&line, "}");
    if (log_sink)
        log_sink(log_sink_arg, level, line.data, line.len);
    else
        write_line(&line);
    errno = saved;
}

const char *kv_log_quote(char *buf, size_t size, const char *text)
{
    struct line line = {.len = 0, .limit = KV_LOG_MAX_LINE};
    size_t len = text ? strlen(text) : 0;

    if (size == 0)
        return buf;
    /* A byte becomes six at most. Cut the text between characters until it fits. */
    for (;;) {
        line.len = 0;
        line.full = false;
        line.limit = KV_MIN(size - 1, sizeof(line.data));
        if (len > 0 && !needs_quotes(text, len))
            put(&line, text, len);
        else
            put_quoted(&line, text, len);
        if (!line.full || len == 0)
            break;
        len = len > line.limit ? line.limit : len - 1;
        while (len > 0 && ((unsigned char)text[len] & 0xC0) == 0x80)
            len--;
    }
    memcpy(buf, line.data, line.full ? 0 : line.len);
    buf[line.full ? 0 : line.len] = '\0';
    return buf;
}

bool kv_log_allowed(struct kv_log_rate *rate, unsigned burst)
{
    enum { COUNT_BITS = 20 };
    const unsigned long count_mask = (1UL << COUNT_BITS) - 1;
    unsigned long second = (unsigned long)(kv_now_ns() / KV_NS_PER_S);
    unsigned long old = atomic_load_explicit(&rate->window, memory_order_relaxed);
    unsigned long next;

    /*
     * Keep the seconds modulo the bits that are left. A window of zero lines differs from one in
     * use.
     */
    second &= ULONG_MAX >> COUNT_BITS;
    burst = KV_MIN(burst, (unsigned)count_mask);
    do {
        unsigned long count = old >> COUNT_BITS == second ? old & count_mask : 0;

        if (count >= burst) {
            atomic_fetch_add_explicit(&rate->suppressed, 1, memory_order_relaxed);
            return false;
        }
        next = second << COUNT_BITS | (count + 1);
    } while (!atomic_compare_exchange_weak_explicit(&rate->window, &old, next, memory_order_relaxed,
                                                    memory_order_relaxed));
    pending_suppressed += atomic_exchange_explicit(&rate->suppressed, 0, memory_order_relaxed);
    return true;
}
