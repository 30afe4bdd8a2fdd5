// SPDX-License-Identifier: Apache-2.0
#include "cli/replay/trace.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/buf.h"
#include "base/json/json.h"
#include "cli/replay/random.h"

void kc_trace_fini(struct kc_trace *trace)
{
    free(trace->requests);
    free(trace->ids);
    memset(trace, 0, sizeof(*trace));
}

/* Make *items hold @want elements of @size bytes, growing by doubling. */
static int grow(void **items, size_t *capacity, size_t want, size_t size)
{
    size_t n = *capacity ? *capacity : 1024;
    void *grown;

    if (want <= *capacity)
        return 0;
    while (n < want)
        n *= 2;
    grown = realloc(*items, n * size);
    if (!grown)
        return -ENOMEM;
    *items = grown;
    *capacity = n;
    return 0;
}

int kc_trace_add(struct kc_trace *trace, const struct kc_request *request, uint64_t **ret_ids)
{
    void *requests = trace->requests, *ids = trace->ids;
    int rc;

    if (trace->n_ids + request->n > KC_TRACE_MAX_IDS)
        return -EMSGSIZE;
    rc = grow(&requests, &trace->request_capacity, trace->n_requests + 1, sizeof(*request));
    trace->requests = requests;
    if (rc == 0)
        rc = grow(&ids, &trace->id_capacity, trace->n_ids + request->n, sizeof(*trace->ids));
    trace->ids = ids;
    if (rc < 0)
        return rc;
    trace->requests[trace->n_requests] = *request;
    trace->requests[trace->n_requests++].first = trace->n_ids;
    *ret_ids = trace->ids + trace->n_ids;
    trace->n_ids += request->n;
    return 0;
}

enum { HAS_TIMESTAMP = 1, HAS_INPUT = 2, HAS_OUTPUT = 4, HAS_IDS = 8, HAS_ALL = 15 };

/*
 * Read the fields of one line; the ids go to @ids as raw u64s. Returns a bit for each field found.
 */
static unsigned parse_fields(struct kv_json *j, struct kc_request *request, struct kv_buf *ids)
{
    struct kv_str key;
    unsigned has = 0;

    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        if (kv_str_eq(key, "timestamp")) {
            /* Some releases write milliseconds with a fraction. */
            double ms = kv_json_double(j);

            if (!(ms >= 0 && ms < 1e15))
                kv_json_fail(j, -EPROTO, "timestamp out of range");
            else
                request->timestamp_ms = (uint64_t)ms;
            has |= HAS_TIMESTAMP;
        } else if (kv_str_eq(key, "input_length")) {
            request->input_length = (uint32_t)kv_json_u64(j, UINT32_MAX);
            has |= HAS_INPUT;
        } else if (kv_str_eq(key, "output_length")) {
            request->output_length = (uint32_t)kv_json_u64(j, UINT32_MAX);
            has |= HAS_OUTPUT;
        } else if (kv_str_eq(key, "hash_ids")) {
            kv_buf_clear(ids);
            request->n = (uint32_t)kv_json_bits64_array(j, ids);
            has |= HAS_IDS;
        } else {
            kv_json_skip(j);
        }
    }
    return has;
}

/* Check a request. Returns 0, or a negative errno with @error. */
static int check_request(const struct kc_trace *trace, const struct kc_request *request,
                         unsigned has, struct kv_error *error)
{
    static const char *const names[] = {"timestamp", "input_length", "output_length", "hash_ids"};
    uint64_t most = (uint64_t)request->input_length / KC_TRACE_BLOCK + 1;

    for (unsigned i = 0; i < KV_COUNT(names); i++)
        if (!(has & (1U << i)))
            return kv_fail(error, -EPROTO, 0, "%s is missing", names[i]);
    if (request->n == 0)
        return kv_fail(error, -EPROTO, 0, "hash_ids is empty");
    if (request->n > most)
        return kv_fail(error, -EPROTO, 0,
                       "%" PRIu32 " hash_ids for %" PRIu32 " tokens (an id stands for %d)",
                       request->n, request->input_length, KC_TRACE_BLOCK);
    if (trace->n_requests > 0 &&
        request->timestamp_ms < trace->requests[trace->n_requests - 1].timestamp_ms)
        return kv_fail(error, -EPROTO, 0, "timestamp goes back");
    return 0;
}

static int parse_line(struct kc_trace *trace, const char *line, size_t len, struct kv_buf *ids,
                      struct kv_error *error)
{
    struct kc_request request = {0};
    struct kv_json j;
    uint64_t *room;
    unsigned has;
    int rc;

    kv_json_init(&j, line, len);
    has = parse_fields(&j, &request, ids);
    rc = kv_json_finish(&j);
    if (rc < 0)
        return kv_fail(error, rc, j.error.offset, "%.150s at byte %zu", j.error.text,
                       j.error.offset);
    if (ids->error)
        return kv_fail(error, ids->error, 0, "out of memory");
    rc = check_request(trace, &request, has, error);
    if (rc < 0)
        return rc;
    rc = kc_trace_add(trace, &request, &room);
    if (rc < 0)
        return kv_fail(error, rc, 0, rc == -ENOMEM ? "out of memory" : "the trace is too long");
    if (request.n > 0) /* without ids there is no buffer */
        memcpy(room, ids->data, request.n * sizeof(*room));
    return 0;
}

int kc_trace_parse_line(struct kc_trace *trace, const char *line, size_t len,
                        struct kv_error *error)
{
    struct kv_buf ids = KV_BUF_INIT;
    int rc = parse_line(trace, line, len, &ids, error);

    kv_buf_fini(&ids);
    return rc;
}

static bool is_blank(const char *line, size_t len)
{
    for (size_t i = 0; i < len; i++)
        if (line[i] != ' ' && line[i] != '\t' && line[i] != '\r')
            return false;
    return true;
}

/*
 * Read one line without its newline into @line. Returns 1, 0 at the end, -EMSGSIZE, or an error of
 * reading.
 */
static int read_line(FILE *file, struct kv_buf *line)
{
    int c;

    kv_buf_clear(line);
    while ((c = getc_unlocked(file)) != EOF && c != '\n')
        kv_buf_putc(line, (char)c);
    if (line->error)
        return line->error;
    if (ferror(file))
        return -EIO;
    return c == '\n' || line->len > 0;
}

static int read_lines(FILE *file, const char *path, struct kc_trace *trace, struct kv_error *error)
{
    struct kv_buf line = {.limit = KC_TRACE_MAX_LINE}, ids = KV_BUF_INIT;
    struct kv_error why = {0};
    uint64_t number = 0;
    int rc;

    while ((rc = read_line(file, &line)) > 0) {
        number++;
        if (is_blank(line.data, line.len))
            continue;
        rc = parse_line(trace, line.data, line.len, &ids, &why);
        if (rc < 0) {
            kv_fail(error, rc, (size_t)number, "%s:%" PRIu64 ": %s", path, number, why.text);
            break;
        }
    }
    if (rc == -EMSGSIZE && !why.code)
        kv_fail(error, rc, (size_t)number + 1, "%s:%" PRIu64 ": line longer than %" PRIu32 " bytes",
                path, number + 1, KC_TRACE_MAX_LINE);
    else if (rc < 0 && !why.code)
        kv_fail(error, rc, 0, "%s: %s", path, strerror(-rc));
    kv_buf_fini(&line);
    kv_buf_fini(&ids);
    return rc;
}

int kc_trace_read(const char *path, struct kc_trace *ret, struct kv_error *error)
{
    struct kc_trace trace = {0};
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
    int rc;

    if (!file)
        return kv_fail(error, -errno, 0, "can't read the trace %s: %s", path, strerror(errno));
    rc = read_lines(file, path, &trace, error);
    if (rc == 0 && trace.n_requests == 0)
        rc = kv_fail(error, -EPROTO, 0, "%s: no requests in it", path);
    if (file != stdin)
        fclose(file);
    if (rc < 0)
        kc_trace_fini(&trace);
    else
        *ret = trace;
    return rc;
}

void kc_trace_chain(const uint64_t *ids, size_t n, uint64_t start, uint64_t *ret)
{
    uint64_t name = start;

    for (size_t i = 0; i < n; i++) {
        name = kc_mix(name + kc_mix(ids[i] + 1));
        ret[i] = name;
    }
}

static int compare_u64(const void *a, const void *b)
{
    uint64_t x, y;

    memcpy(&x, a, sizeof(x));
    memcpy(&y, b, sizeof(y));
    return x < y ? -1 : x > y;
}

/* Count the distinct values among @n, and sort them. */
static uint64_t count_distinct(uint64_t *values, size_t n)
{
    uint64_t distinct = n > 0;

    qsort(values, n, sizeof(*values), compare_u64);
    for (size_t i = 1; i < n; i++)
        distinct += values[i] != values[i - 1];
    return distinct;
}

void kc_trace_names(const struct kc_trace *trace, uint64_t *ret)
{
    for (size_t i = 0; i < trace->n_requests; i++) {
        const struct kc_request *r = &trace->requests[i];

        kc_trace_chain(trace->ids + r->first, r->n, 0, ret + r->first);
    }
}

const char *kc_trace_title(const char *path)
{
    const char *slash = path ? strrchr(path, '/') : NULL;

    if (!path)
        return "a generated workload";
    return strcmp(path, "-") == 0 ? "standard input" : slash ? slash + 1 : path;
}

int kc_trace_measure(const struct kc_trace *trace, struct kc_trace_stats *ret)
{
    struct kc_trace_stats stats = {.requests = trace->n_requests, .ids = trace->n_ids};
    size_t n = trace->n_requests;
    uint64_t *values = malloc((trace->n_ids + n + 1) * sizeof(*values)), *inputs;

    if (!values)
        return -ENOMEM;
    kc_trace_names(trace, values);
    stats.distinct = count_distinct(values, trace->n_ids);
    inputs = values + trace->n_ids;
    for (size_t i = 0; i < n; i++) {
        const struct kc_request *request = &trace->requests[i];

        inputs[i] = request->input_length;
        stats.max_input = KV_MAX(stats.max_input, request->input_length);
        stats.mean_input += request->input_length;
        stats.mean_output += request->output_length;
    }
    if (n > 0) {
        qsort(inputs, n, sizeof(*inputs), compare_u64);
        stats.median_input = (uint32_t)inputs[n / 2];
        stats.mean_input /= (double)n;
        stats.mean_output /= (double)n;
        stats.span_ms = trace->requests[n - 1].timestamp_ms - trace->requests[0].timestamp_ms;
        stats.reuse = (double)(stats.ids - stats.distinct) / (double)stats.ids;
    }
    free(values);
    *ret = stats;
    return 0;
}
