// SPDX-License-Identifier: Apache-2.0
#include "redis/resp.h"

#include <stdbool.h>

#include "base/core/error.h"

void resp_init(struct resp_parser *parser)
{
    memset(parser, 0, offsetof(struct resp_parser, line));
}

void resp_fini(struct resp_parser *parser)
{
    resp_value_fini(&parser->root);
    resp_init(parser);
}

/* Recursion is bounded by RESP_MAX_DEPTH. */
void resp_value_fini(struct resp_value *value) // NOLINT(misc-no-recursion)
{
    for (size_t i = 0; i < value->n; i++)
        resp_value_fini(&value->items[i]);
    free(value->items);
    free(value->str);
    memset(value, 0, sizeof(*value));
}

/* Return the place of the value that begins: the root, or the next item of the innermost array. */
static struct resp_value *place(struct resp_parser *p)
{
    struct resp_frame *frame;
    struct resp_value *items;
    size_t capacity;

    if (p->depth == 0)
        return &p->root;
    frame = &p->stack[p->depth - 1];
    if (frame->array->n == frame->capacity) {
        capacity = KV_MIN(KV_MAX(2 * frame->capacity, (size_t)4), frame->wanted);
        items = realloc(frame->array->items, capacity * sizeof(*items));
        if (!items)
            return NULL;
        frame->array->items = items;
        frame->capacity = capacity;
    }
    items = &frame->array->items[frame->array->n++];
    memset(items, 0, sizeof(*items));
    return items;
}

/* Finish a value, and the arrays whose last item it is. Returns 1 at the reply's end. */
static int finish(struct resp_parser *p, struct resp_value *ret)
{
    while (p->depth > 0) {
        struct resp_frame *frame = &p->stack[p->depth - 1];

        if (frame->array->n < frame->wanted)
            return 0;
        p->depth--;
    }
    *ret = p->root;
    resp_init(p);
    return 1;
}

static int parse_number(const char *text, size_t len, int64_t *ret)
{
    bool negative = len > 0 && *text == '-';
    uint64_t value = 0;

    if (negative) {
        text++;
        len--;
    }
    if (len == 0 || len > 18) /* 18 digits can't overflow, and no value here needs more */
        return -EPROTO;
    for (size_t i = 0; i < len; i++) {
        if (text[i] < '0' || text[i] > '9')
            return -EPROTO;
        value = 10 * value + (uint64_t)(text[i] - '0');
    }
    *ret = negative ? -(int64_t)value : (int64_t)value;
    return 0;
}

static int begin_text(struct resp_parser *p, struct resp_value *value, enum resp_type type,
                      const char *text, size_t len)
{
    if (len > RESP_MAX_BULK - p->n_bytes)
        return -EPROTO;
    p->n_bytes += len;
    value->str = malloc(len + 1);
    if (!value->str)
        return -ENOMEM;
    memcpy(value->str, text, len);
    value->str[len] = '\0';
    value->type = type;
    value->len = len;
    return 0;
}

static int begin_bulk(struct resp_parser *p, struct resp_value *value, int64_t len)
{
    if (len == -1)
        return 0; /* RESP_NULL */
    if (len < 0 || (uint64_t)len > RESP_MAX_BULK - p->n_bytes)
        return -EPROTO;
    if (p->room && (uint64_t)len > *p->room) {
        value->type = RESP_SKIPPED;
        value->len = (size_t)len;
        p->skip = (size_t)len + 2;
        return 0;
    }
    p->n_bytes += (size_t)len;
    if (p->room)
        *p->room -= (uint64_t)len;
    value->str = malloc((size_t)len + 2); /* the line end arrives with the payload */
    if (!value->str)
        return -ENOMEM;
    value->type = RESP_BULK;
    value->len = (size_t)len;
    p->bulk = value;
    p->bulk_got = 0;
    return 0;
}

static int begin_array(struct resp_parser *p, struct resp_value *value, int64_t n)
{
    if (n == -1)
        return 0;
    if (n < 0 || (uint64_t)n > RESP_MAX_ITEMS - p->n_items || p->depth == RESP_MAX_DEPTH)
        return -EPROTO;
    value->type = RESP_ARRAY;
    p->n_items += (size_t)n;
    p->stack[p->depth++] = (struct resp_frame){value, (size_t)n, 0};
    return 0;
}

static int parse_line(struct resp_parser *p, const char *line, size_t len, struct resp_value *ret)
{
    struct resp_value *value = place(p);
    int64_t num = 0;
    int err;

    if (!value)
        return -ENOMEM;
    if (len == 0)
        return -EPROTO;
    if (*line == '+' || *line == '-') {
        err = begin_text(p, value, *line == '+' ? RESP_STATUS : RESP_ERROR, line + 1, len - 1);
        return err < 0 ? err : finish(p, ret);
    }
    err = parse_number(line + 1, len - 1, &num);
    if (err < 0)
        return err;
    if (*line == ':') {
        value->type = RESP_INT;
        value->num = num;
    } else if (*line == '$') {
        err = begin_bulk(p, value, num);
    } else if (*line == '*') {
        err = begin_array(p, value, num);
    } else {
        err = -EPROTO;
    }
    return err < 0 || p->bulk || p->skip > 0 ? err : finish(p, ret);
}

/* Collect bytes up to the end of a line, then parse the line. */
static int feed_line(struct resp_parser *p, const char *data, size_t len, size_t *used,
                     struct resp_value *ret)
{
    const char *end = memchr(data, '\n', len);
    size_t take = end ? (size_t)(end - data) + 1 : len, line_len;

    if (take > sizeof(p->line) - p->line_len)
        return -EPROTO;
    memcpy(p->line + p->line_len, data, take);
    p->line_len += take;
    *used += take;
    if (!end)
        return 0;
    line_len = p->line_len;
    p->line_len = 0;
    if (line_len < 2 || p->line[line_len - 2] != '\r')
        return -EPROTO;
    return parse_line(p, p->line, line_len - 2, ret);
}

/* Skip a payload without room; its line end is checked nevertheless. */
static int pass_over(struct resp_parser *p, const char *data, size_t len, size_t *used,
                     struct resp_value *ret)
{
    size_t take = p->skip > 2 ? KV_MIN(p->skip - 2, len) : 1;

    if (p->skip <= 2 && *data != "\r\n"[2 - p->skip])
        return -EPROTO;
    *used += take;
    p->skip -= take;
    return p->skip > 0 ? 0 : finish(p, ret);
}

int resp_feed(struct resp_parser *p, const char *data, size_t len, size_t *ret_used,
              struct resp_value *ret)
{
    int rc = 0;

    *ret_used = 0;
    while (rc == 0 && *ret_used < len) {
        void *to;
        size_t room = resp_direct(p, &to), take = KV_MIN(room, len - *ret_used);

        if (take > 0) {
            memcpy(to, data + *ret_used, take);
            *ret_used += take;
            rc = resp_filled(p, take, ret);
        } else if (p->skip > 0) {
            rc = pass_over(p, data + *ret_used, len - *ret_used, ret_used, ret);
        } else {
            rc = feed_line(p, data + *ret_used, len - *ret_used, ret_used, ret);
        }
    }
    return rc;
}

size_t resp_direct(const struct resp_parser *p, void **ret)
{
    if (!p->bulk)
        return 0;
    *ret = p->bulk->str + p->bulk_got;
    return p->bulk->len + 2 - p->bulk_got;
}

int resp_filled(struct resp_parser *p, size_t len, struct resp_value *ret)
{
    struct resp_value *bulk = p->bulk;

    p->bulk_got += len;
    if (p->bulk_got < bulk->len + 2)
        return 0;
    if (memcmp(bulk->str + bulk->len, "\r\n", 2) != 0)
        return -EPROTO;
    bulk->str[bulk->len] = '\0';
    p->bulk = NULL;
    return finish(p, ret);
}
