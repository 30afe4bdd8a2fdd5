// SPDX-License-Identifier: Apache-2.0
#include "cli/top/top.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/utf8.h"
#include "base/json/json.h"
#include "cli/client/prom.h"
#include "cli/show/format.h"

/* Widths of the instances' column where their names need no more. */
#define WIDE_INSTANCE 9
#define NARROW_INSTANCE 8
/* Width from which on the table shows all of its columns. */
#define WIDE 118
#define NARROW 70
/* Widths of the models' column at these widths. */
#define WIDE_MODEL 18
#define NARROW_MODEL 10

/* -- reading ---------------------------------------------------------------------------------- */

static void copy_str(char *ret, size_t size, struct kv_str text)
{
    size_t n = KV_MIN(text.len, size - 1);

    memcpy(ret, text.p, n);
    ret[n] = '\0';
    /* Replace control characters, because the text goes to a terminal. */
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)ret[i] < ' ' || ret[i] == 0x7f)
            ret[i] = '?';
}

/* Read an instance as text into a row. Returns false when it is none. */
static bool set_instance(struct kc_top_row *row, struct kv_str text)
{
    int kind = kv_instance_parse(text.p, text.len, &row->instance, NULL);

    if (kind == KV_INSTANCE_NAME)
        copy_str(row->name, sizeof(row->name), text);
    return kind >= 0;
}

static void read_instance(struct kv_json *j, struct kc_top_row *row, struct kv_buf *scratch)
{
    struct kv_str text;

    if (kv_json_peek(j) != KV_JSON_STRING) {
        row->instance = kv_json_u64(j, UINT64_MAX);
        return;
    }
    text = kv_json_str(j, scratch);
    if (!kv_json_failed(j) && !set_instance(row, text))
        kv_json_fail(j, -EPROTO, "instance_id: neither a number nor a name");
}

static struct kc_top_row *add_row(struct kc_top *top)
{
    struct kc_top_row *rows;

    if (top->n_rows == top->capacity) {
        size_t capacity = top->capacity ? 2 * top->capacity : 16;

        rows = realloc(top->rows, capacity * sizeof(*rows));
        if (!rows)
            return NULL;
        top->rows = rows;
        top->capacity = capacity;
    }
    memset(&top->rows[top->n_rows], 0, sizeof(*rows));
    return &top->rows[top->n_rows++];
}

/* Join the names of an array with commas. */
static void read_reasons(struct kv_json *j, char *ret, size_t size, struct kv_buf *scratch)
{
    size_t used = 0;

    kv_json_array(j);
    while (kv_json_next_item(j)) {
        if (used && used + 1 < size)
            ret[used++] = ',';
        copy_str(ret + used, size - used, kv_json_str(j, scratch));
        used += strlen(ret + used);
    }
}

static void read_listener(struct kv_json *j, struct kc_top_row *row, struct kv_buf *scratch)
{
    struct kv_str key;

    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        if (kv_str_eq(key, "status"))
            copy_str(row->status, sizeof(row->status), kv_json_str(j, scratch));
        else if (kv_str_eq(key, "last_error"))
            copy_str(row->last_error, sizeof(row->last_error), kv_json_str(j, scratch));
        else if (kv_str_eq(key, "partial_reasons"))
            read_reasons(j, row->reasons, sizeof(row->reasons), scratch);
        else if (kv_str_eq(key, "blocks"))
            row->blocks = kv_json_u64(j, UINT64_MAX);
        else
            kv_json_skip(j);
    }
}

/* Read {"<rank>": {...}}: one row each. */
static int read_listeners(struct kv_json *j, struct kc_top *top, struct kv_buf *scratch)
{
    struct kv_str key;

    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        struct kc_top_row *row = add_row(top);
        char rank[12];

        if (!row)
            return -ENOMEM;
        copy_str(rank, sizeof(rank), key);
        row->rank = (uint32_t)strtoul(rank, NULL, 10);
        read_listener(j, row, scratch);
    }
    return 0;
}

/* Read one element of /workers. Its rows are complete only when all its fields are known. */
static int read_worker(struct kv_json *j, struct kc_top *top, struct kv_buf *scratch)
{
    struct kc_top_row common = {0};
    size_t first = top->n_rows;
    struct kv_str key;
    int rc = 0;

    kv_json_object(j);
    while (rc == 0 && kv_json_next_key(j, &key)) {
        if (kv_str_eq(key, "instance_id"))
            read_instance(j, &common, scratch);
        else if (kv_str_eq(key, "model_name"))
            copy_str(common.model, sizeof(common.model), kv_json_str(j, scratch));
        else if (kv_str_eq(key, "listeners"))
            rc = read_listeners(j, top, scratch);
        else
            kv_json_skip(j);
    }
    for (size_t i = first; i < top->n_rows; i++) {
        top->rows[i].instance = common.instance;
        memcpy(top->rows[i].name, common.name, sizeof(common.name));
        memcpy(top->rows[i].model, common.model, sizeof(common.model));
    }
    return rc;
}

static int read_workers(const struct kv_buf *body, struct kc_top *top, struct kv_error *error)
{
    struct kv_buf scratch = KV_BUF_INIT;
    struct kv_json j;
    int rc = 0;

    kv_json_init(&j, body->data, body->len);
    kv_json_array(&j);
    while (rc == 0 && kv_json_next_item(&j))
        rc = read_worker(&j, top, &scratch);
    if (rc == 0 && kv_json_finish(&j) < 0)
        rc = kv_fail(error, -EPROTO, j.error.offset, "GET /workers: %.120s", j.error.text);
    kv_buf_fini(&scratch);
    return rc;
}

static int compare_rows(const void *a, const void *b)
{
    const struct kc_top_row *x = a, *y = b;
    int order = strcmp(x->name, y->name); /* numbers have none, and come first */

    if (order)
        return order;
    if (x->instance != y->instance)
        return x->instance < y->instance ? -1 : 1;
    return x->rank < y->rank ? -1 : x->rank > y->rank;
}

static struct kc_top_row *find_row(const struct kc_top *top, const struct kc_top_row *key)
{
    return top->n_rows == 0
               ? NULL
               : bsearch(key, top->rows, top->n_rows, sizeof(*top->rows), compare_rows);
}

#define STREAM "kv_indexer_stream_"

static void read_stream_sample(struct kc_top *top, const struct kc_sample *sample)
{
    struct kc_top_row key = {0}, *row;
    char text[KV_INSTANCE_NAME_MAX + 2]; /* too long a name stays too long */

    if (!kc_sample_label(sample, "instance", text, sizeof(text)) ||
        !set_instance(&key, (struct kv_str){text, strlen(text)}))
        return;
    if (kc_sample_label(sample, "dp_rank", text, sizeof(text)))
        key.rank = (uint32_t)strtoul(text, NULL, 10);
    row = find_row(top, &key);
    if (!row)
        return;
    if (kv_str_eq(sample->name, STREAM "last_seq")) {
        row->last_seq = sample->value;
        row->has_seq = true;
    } else if (kv_str_eq(sample->name, STREAM "last_event_age_seconds")) {
        row->age = sample->value;
        row->has_age = true;
    } else if (kv_str_eq(sample->name, STREAM "events_total")) {
        row->events = sample->value;
    } else if (kv_str_eq(sample->name, STREAM "blocks_total")) {
        row->changes = sample->value;
    } else if (kv_str_eq(sample->name, STREAM "gaps_total")) {
        row->gaps = sample->value;
    } else if (kv_str_eq(sample->name, STREAM "missed_batches_total")) {
        row->missed = sample->value;
    } else if (kv_str_eq(sample->name, STREAM "replayed_batches_total")) {
        row->replayed = sample->value;
    } else if (kv_str_eq(sample->name, STREAM "restarts_total")) {
        row->restarts = sample->value;
    }
}

static void read_sample(struct kc_top *top, const struct kc_sample *sample)
{
    const struct {
        const char *name;
        double *sum;
    } sums[] = {
        {"dynamo_kvindexer_models", &top->models},
        {"dynamo_kvindexer_workers", &top->workers},
        {"kv_indexer_index_blocks", &top->index_blocks},
        {"kv_indexer_index_holder_blocks", &top->holder_blocks},
        {"kv_indexer_index_bytes", &top->index_bytes},
        {"kv_indexer_queries_total", &top->queries},
        {"kv_indexer_query_blocks_total", &top->query_blocks},
        {"kv_indexer_query_matched_blocks_total", &top->matched_blocks},
    };

    if (sample->name.len > sizeof(STREAM) - 1 &&
        memcmp(sample->name.p, STREAM, sizeof(STREAM) - 1) == 0) {
        read_stream_sample(top, sample);
        return;
    }
    for (size_t i = 0; i < KV_COUNT(sums); i++)
        if (kv_str_eq(sample->name, sums[i].name))
            *sums[i].sum += sample->value;
}

int kc_top_read(const struct kv_buf *workers, const struct kv_buf *metrics, struct kc_top *ret,
                struct kv_error *error)
{
    struct kc_top_row *rows = ret->rows;
    size_t capacity = ret->capacity;
    struct kc_sample sample;
    struct kc_prom prom;
    int rc;

    memset(ret, 0, sizeof(*ret));
    ret->rows = rows;
    ret->capacity = capacity;
    rc = read_workers(workers, ret, error);
    if (rc < 0)
        return rc;
    if (ret->n_rows > 0)
        qsort(ret->rows, ret->n_rows, sizeof(*ret->rows), compare_rows);
    kc_prom_init(&prom, metrics->data, metrics->len);
    while (kc_prom_next(&prom, &sample))
        read_sample(ret, &sample);
    return 0;
}

void kc_top_fini(struct kc_top *top)
{
    free(top->rows);
    memset(top, 0, sizeof(*top));
}

/* -- showing ---------------------------------------------------------------------------------- */

static double per_second(const struct kc_top *top, const struct kc_top *before, double now,
                         double then)
{
    double seconds = before ? (double)(top->at_ns - before->at_ns) / 1e9 : 0;

    return seconds > 0 && now > then ? (now - then) / seconds : 0;
}

static void print_head(const struct kc_top *top, const struct kc_top *before, const char *url,
                       size_t columns, FILE *out)
{
    double asked = top->query_blocks - (before ? before->query_blocks : 0);
    double matched = top->matched_blocks - (before ? before->matched_blocks : 0);

    fprintf(out, "kv-indexer at %s: %.0f model%s, %.0f worker%s, %zu stream%s\n", url, top->models,
            top->models == 1 ? "" : "s", top->workers, top->workers == 1 ? "" : "s", top->n_rows,
            top->n_rows == 1 ? "" : "s");
    fprintf(out, "index    %s holder-blocks, %s distinct, %s",
            kc_count((uint64_t)top->holder_blocks).s, kc_count((uint64_t)top->index_blocks).s,
            kc_bytes(top->index_bytes).s);
    if (top->holder_blocks > 0)
        fprintf(out, " (%.1f bytes %s)", top->index_bytes / top->holder_blocks,
                columns < WIDE ? "each" : "per holder-block");
    fprintf(out, "\nqueries  %s", kc_count((uint64_t)top->queries).s);
    if (before)
        fprintf(out, ", %s/s", kc_scaled(per_second(top, before, top->queries, before->queries)).s);
    if (asked > 0)
        fprintf(out, ", of the blocks asked for %.1f %% found", 100 * matched / asked);
    fputs("\n\n", out);
}

/* Return the place behind the letter at @text, which is UTF-8. */
static const char *next_letter(const char *text, const char *end)
{
    int n = kv_utf8_sequence(text, end);

    return text + KV_MAX(n, 1);
}

static size_t n_letters(const char *text)
{
    const char *end = text + strlen(text);
    size_t n = 0;

    for (; text < end; n++)
        text = next_letter(text, end);
    return n;
}

static bool has_notes(const struct kc_top_row *row)
{
    return row->reasons[0] || row->last_error[0];
}

/* Print why a view is partial, and the last error: behind the row, or on narrow terminals below. */
static void print_notes(const struct kc_top_row *row, size_t used, size_t columns, FILE *out)
{
    char text[sizeof(row->last_error) + sizeof(row->reasons) + 16];
    size_t room;

    if (has_notes(row) && columns < WIDE) {
        fprintf(out, "\n%13s", "");
        used = 13;
    }
    room = columns > used + 2 ? columns - used - 2 : 0;
    snprintf(text, sizeof(text), "%s%s%s%s", row->reasons[0] ? "partial: " : "", row->reasons,
             row->reasons[0] && row->last_error[0] ? "  " : "", row->last_error);
    if (text[0] && room)
        fprintf(out, "  %.*s", (int)KV_MIN(room, sizeof(text)), text);
    fputc('\n', out);
}

/* Widths of a line, and of the columns of names. */
struct widths {
    size_t columns;
    int instance, model;
};

/*
 * Return the widths of the longest names, as far as the lines have room. Instances come first: pods
 * of one deployment differ in their last letters alone.
 */
static struct widths widths_of(const struct kc_top *top, size_t columns)
{
    size_t instance = columns < WIDE ? NARROW_INSTANCE : WIDE_INSTANCE, longest = instance;
    size_t model = columns < WIDE ? NARROW_MODEL : WIDE_MODEL, longest_model = model;
    size_t room = columns < NARROW ? 0 : columns - (columns < WIDE ? NARROW : WIDE - 1), more;

    for (size_t i = 0; i < top->n_rows; i++) {
        longest = KV_MAX(longest, n_letters(top->rows[i].name));
        longest_model = KV_MAX(longest_model, strlen(top->rows[i].model));
    }
    more = KV_MIN(longest - instance, room);
    return (struct widths){.columns = columns,
                           .instance = (int)(instance + more),
                           .model = (int)KV_MIN(longest_model, model + room - more)};
}

/* Print an instance at the right of @width columns: of too long a name the end, behind two dots. */
static int print_instance(const struct kc_top_row *row, int width, FILE *out)
{
    char digits[KV_INSTANCE_DIGITS];
    const char *text = kv_instance_text(row->instance, row->name[0] ? row->name : NULL, digits);
    const char *end = text + strlen(text);
    int n = (int)n_letters(text);
    bool cut = n > width && row->name[0];

    for (; cut && n > width - 2; n--)
        text = next_letter(text, end);
    if (fprintf(out, "%*s%s%s", KV_MAX(width - n - 2 * cut, 0), "", cut ? ".." : "", text) < 0)
        return 0;
    return KV_MAX(n + 2 * cut, width);
}

static void print_row(const struct kc_top *top, const struct kc_top *before,
                      const struct kc_top_row *row, const struct widths *widths, FILE *out)
{
    const struct kc_top_row *old = before ? find_row(before, row) : NULL;
    struct kc_text seq = {"-"}, age = {"-"}, rate = {"-"};
    int used, rest, width = widths->model;

    if (row->has_seq)
        seq = kc_count((uint64_t)row->last_seq);
    if (row->has_age)
        age = kc_span(row->age);
    if (old)
        rate = kc_scaled(per_second(top, before, row->changes, old->changes));
    used = print_instance(row, widths->instance, out);
    if (widths->columns < WIDE)
        rest = fprintf(out, " %4" PRIu32 " %-*.*s %-8.8s %9s %7s %8s %6.0f", row->rank, width,
                       width, row->model, row->status, seq.s, age.s,
                       kc_scaled((double)row->blocks).s, row->missed);
    else
        rest = fprintf(out, " %4" PRIu32 "  %-*.*s %-9s %10s %8s %9s %9s %6.0f %7.0f %9.0f",
                       row->rank, width, width, row->model, row->status, seq.s, age.s,
                       kc_scaled((double)row->blocks).s, rate.s, row->gaps, row->missed,
                       row->replayed);
    print_notes(row, (size_t)used + (size_t)KV_MAX(rest, 0), widths->columns, out);
}

void kc_top_print(const struct kc_top *top, const struct kc_top *before, const char *url,
                  size_t max_lines, size_t columns, FILE *out)
{
    struct widths widths = widths_of(top, columns);
    size_t n = 0;

    print_head(top, before, url, columns, out);
    if (columns < WIDE)
        fprintf(out, "%*s %4s %-*s %-8s %9s %7s %8s %6s\n", widths.instance, "INSTANCE", "RANK",
                widths.model, "MODEL", "STATUS", "LAST SEQ", "LAST", "BLOCKS", "MISSED");
    else
        fprintf(out, "%*s %4s  %-*s %-9s %10s %8s %9s %9s %6s %7s %9s\n", widths.instance,
                "INSTANCE", "RANK", widths.model, "MODEL", "STATUS", "LAST SEQ", "LAST", "BLOCKS",
                "CHANGES/s", "GAPS", "MISSED", "REPLAYED");
    for (size_t lines = 0; n < top->n_rows; n++) {
        lines += columns < WIDE && has_notes(&top->rows[n]) ? 2 : 1;
        if (lines > max_lines)
            break;
        print_row(top, before, &top->rows[n], &widths, out);
    }
    if (n < top->n_rows)
        fprintf(out, "  ... and %zu more\n", top->n_rows - n);
    if (top->n_rows == 0)
        fputs("  no workers are registered; POST /register adds one\n", out);
}

/* -- for programs ------------------------------------------------------------------------------ */

/* Write the names, which commas separate, as an array. */
static void write_reasons(struct kv_json_writer *w, const char *names)
{
    kv_json_key(w, "partial_reasons");
    kv_json_begin_array(w);
    while (*names) {
        size_t n = strcspn(names, ",");

        kv_json_put_strn(w, names, n);
        names += n + (names[n] != '\0');
    }
    kv_json_end_array(w);
}

static void write_row(const struct kc_top *top, const struct kc_top *before,
                      const struct kc_top_row *row, struct kv_json_writer *w)
{
    const struct kc_top_row *old = before ? find_row(before, row) : NULL;

    kv_json_begin_object(w);
    if (row->name[0])
        kv_json_member_str(w, "instance_id", row->name);
    else
        kv_json_member_u64(w, "instance_id", row->instance);
    kv_json_member_u64(w, "dp_rank", row->rank);
    kv_json_member_str(w, "model_name", row->model);
    kv_json_member_str(w, "status", row->status);
    kv_json_member_str(w, "last_error", row->last_error);
    kv_json_member_bool(w, "partial", row->reasons[0]);
    write_reasons(w, row->reasons);
    if (row->has_seq)
        kv_json_member_double(w, "last_seq", row->last_seq);
    if (row->has_age)
        kv_json_member_double(w, "last_event_age_seconds", row->age);
    kv_json_member_double(w, "events", row->events);
    kv_json_member_u64(w, "blocks", row->blocks);
    kv_json_member_double(w, "changes", row->changes);
    if (old)
        kv_json_member_double(w, "changes_per_second",
                              per_second(top, before, row->changes, old->changes));
    kv_json_member_double(w, "gaps", row->gaps);
    kv_json_member_double(w, "missed_batches", row->missed);
    kv_json_member_double(w, "replayed_batches", row->replayed);
    kv_json_member_double(w, "restarts", row->restarts);
    kv_json_end_object(w);
}

void kc_top_write_json(const struct kc_top *top, const struct kc_top *before, struct kv_buf *out)
{
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_double(&w, "models", top->models);
    kv_json_member_double(&w, "workers", top->workers);
    kv_json_member_double(&w, "index_blocks", top->index_blocks);
    kv_json_member_double(&w, "index_holder_blocks", top->holder_blocks);
    kv_json_member_double(&w, "index_bytes", top->index_bytes);
    kv_json_member_double(&w, "queries", top->queries);
    kv_json_member_double(&w, "query_blocks", top->query_blocks);
    kv_json_member_double(&w, "query_matched_blocks", top->matched_blocks);
    kv_json_key(&w, "streams");
    kv_json_begin_array(&w);
    for (size_t i = 0; i < top->n_rows; i++)
        write_row(top, before, &top->rows[i], &w);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    kv_buf_putc(out, '\n');
}
