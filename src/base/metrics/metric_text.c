// SPDX-License-Identifier: Apache-2.0
#include "base/metrics/metric_text.h"

#include <stdbool.h>
#include <string.h>

#include "base/core/error.h"

uint64_t kv_metric_value(const struct kv_metric_field *field, const void *from)
{
    uint64_t value;

    memcpy(&value, (const char *)from + field->offset, sizeof(value));
    return value;
}

static void put_escaped(struct kv_buf *out, const char *text, bool quotes)
{
    for (; *text; text++) {
        if (*text == '\\')
            kv_buf_puts(out, "\\\\");
        else if (*text == '\n')
            kv_buf_puts(out, "\\n");
        else if (*text == '"' && quotes)
            kv_buf_puts(out, "\\\"");
        else
            kv_buf_putc(out, *text);
    }
}

void kv_metric_head(struct kv_buf *out, const char *name, const char *type, const char *help)
{
    kv_buf_printf(out, "# HELP %s ", name);
    put_escaped(out, help, false);
    kv_buf_printf(out, "\n# TYPE %s %s\n", name, type);
}

void kv_metric_label(struct kv_buf *out, const char *name, const char *value)
{
    kv_buf_printf(out, "%s=\"", name);
    put_escaped(out, value, true);
    kv_buf_putc(out, '"');
}

long kv_metric_give(struct kv_buf *text, char *to, size_t cap)
{
    long len = text->error ? text->error : (long)text->len;

    if (len >= 0 && cap) {
        size_t n = KV_MIN((size_t)len, cap - 1);

        if (n)
            memcpy(to, text->data, n);
        to[n] = '\0';
    }
    kv_buf_fini(text);
    return len;
}
