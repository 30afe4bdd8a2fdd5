// SPDX-License-Identifier: Apache-2.0
#include "extproc/subset.h"

#include "base/core/ascii.h"
#include "extproc/stream.h"

static void add(struct kx_subset *subset, const char *p, size_t len)
{
    while (len > 0 && kv_is_space(*p))
        p++, len--;
    while (len > 0 && kv_is_space(p[len - 1]))
        len--;
    if (len == 0 || len > 255 || memchr(p, 0, len) || subset->n >= KX_MAX_CANDIDATES)
        return;
    kv_buf_append(&subset->texts, p, len);
    kv_buf_putc(&subset->texts, 0);
    subset->n += !subset->texts.error;
}

static void add_text(struct kx_subset *subset, ProtobufCBinaryData text)
{
    const char *p = (const char *)text.data, *end = p + text.len;

    while (p < end) {
        const char *comma = memchr(p, ',', (size_t)(end - p));

        if (!comma)
            comma = end;
        add(subset, p, (size_t)(comma - p));
        p = comma + (comma < end);
    }
}

static void add_value(struct kx_subset *subset, const Kx__HintValue *value)
{
    if (!value || (value->kind_case != KX__HINT_VALUE__KIND_STRING_VALUE &&
                   value->kind_case != KX__HINT_VALUE__KIND_LIST_VALUE))
        return;
    subset->limited = true;
    if (value->kind_case == KX__HINT_VALUE__KIND_STRING_VALUE) {
        add_text(subset, value->string_value);
        return;
    }
    for (size_t i = 0; i < value->list_value->n_values; i++) {
        const Kx__HintItem *item = value->list_value->values[i];

        if (item->kind_case == KX__HINT_ITEM__KIND_STRING_VALUE)
            add_text(subset, item->string_value);
    }
}

int kx_subset_read(struct kx_subset *subset, const Kx__Metadata *metadata)
{
    for (size_t i = 0; metadata && i < metadata->n_filter_metadata; i++) {
        const Kx__Metadata__FilterMetadataEntry *entry = metadata->filter_metadata[i];

        if (strcmp(entry->key, "envoy.lb.subset_hint") != 0 || !entry->value)
            continue;
        for (size_t k = 0; k < entry->value->n_fields; k++) {
            const Kx__HintStruct__FieldsEntry *field = entry->value->fields[k];

            if (strcmp(field->key, "x-gateway-destination-endpoint-subset") == 0)
                add_value(subset, field->value);
        }
    }
    return subset->texts.error ? -ENOMEM : 0;
}

int kx_subset_list(const struct kx_subset *subset, struct kv_buf *ret)
{
    const char *p = subset->texts.data;

    for (size_t i = 0; i < subset->n; i++) {
        kv_buf_append(ret, &p, sizeof(p));
        p += strlen(p) + 1;
    }
    return ret->error ? -ENOMEM : 0;
}
