// SPDX-License-Identifier: Apache-2.0
/* Layouts in the store, roots and keys. */
#include "base/core/le.h"
#include "base/core/log.h"
#include "llama/cache.h"

enum { LAYOUT_BYTES_MAX = 1 << 16 };

static void put_u64(struct kv_buf *buf, uint64_t value)
{
    uint8_t bytes[8];

    kv_put_le64(bytes, value);
    kv_buf_append(buf, bytes, sizeof(bytes));
}

/* Begin what is hashed: a purpose, fingerprint, block size, form. */
static void begin(const struct kvl_cache *c, const char purpose[8], uint64_t form,
                  struct kv_buf *ret)
{
    kv_buf_append(ret, purpose, 8);
    put_u64(ret, strlen(c->fingerprint));
    kv_buf_puts(ret, c->fingerprint);
    put_u64(ret, c->block_tokens);
    put_u64(ret, form);
}

static int end(struct kv_buf *buf, uint8_t ret[KV_PREFIX_HASH])
{
    int rc = buf->error;

    if (!rc)
        kv_prefix_sum(buf->data, buf->len, ret);
    kv_buf_fini(buf);
    return rc;
}

/* Compute a root of a pair: 0 and 1 of its caches, 2 of its tails. Returns 0 or -ENOMEM. */
static int pair_root(const struct kvl_cache *c, const struct kvl_layout *layout, uint64_t number,
                     uint8_t ret[KV_PREFIX_HASH])
{
    struct kv_buf buf = KV_BUF_INIT;

    begin(c, "kvl-pair", 0, &buf);
    put_u64(&buf, number);
    put_u64(&buf, layout->span);
    kvl_shape_identity(&layout->shape, &buf);
    kvl_shape_identity(&layout->second, &buf);
    return end(&buf, ret);
}

/* Compute the roots of a layout. Returns 0 or -ENOMEM. */
static int make_root(const struct kvl_cache *c, struct kvl_layout *layout)
{
    struct kv_buf buf = KV_BUF_INIT;
    int rc;

    switch (layout->cut) {
    case KVL_CUT_PAIR:
        rc = pair_root(c, layout, 0, layout->root);
        rc = rc ? rc : pair_root(c, layout, 1, layout->second_root);
        return rc ? rc : pair_root(c, layout, 2, layout->tail_root);
    case KVL_CUT_SNAPSHOT:
        begin(c, "kvl-whol", layout->form, &buf);
        kv_buf_append(&buf, layout->whole, layout->whole_len);
        return end(&buf, layout->root);
    case KVL_CUT_BLOCKS:
        break;
    }
    begin(c, "kvl-root", 0, &buf); /* blocks are the same in both forms */
    kvl_shape_identity(&layout->shape, &buf);
    return end(&buf, layout->root);
}

static int layout_key(const struct kvl_cache *c, enum kvl_form form, size_t number,
                      uint8_t ret[KV_PREFIX_KEY])
{
    struct kv_buf buf = KV_BUF_INIT;
    uint8_t hash[KV_PREFIX_HASH];
    int rc;

    begin(c, "kvl-layo", form, &buf);
    put_u64(&buf, number);
    rc = end(&buf, hash);
    if (!rc)
        kv_prefix_key(KV_PREFIX_LAYOUT, hash, ret);
    return rc;
}

void kvl_block_keys(const struct kvl_cache *c, const uint8_t root[KV_PREFIX_HASH],
                    const int32_t *tokens, size_t n, uint8_t *ret)
{
    uint8_t text[KV_PREFIX_HASH + 4 * KVL_BLOCK_TOKENS_MAX], hash[KV_PREFIX_HASH];

    for (size_t i = 0; i < n; i++) {
        const int32_t *own = tokens + i * c->block_tokens;

        memcpy(text, kvl_parent(root, ret, i), KV_PREFIX_HASH);
        for (size_t j = 0; j < c->block_tokens; j++)
            kvl_put_token(text + KV_PREFIX_HASH + 4 * j, own[j]);
        kv_prefix_sum(text, KV_PREFIX_HASH + 4 * (size_t)c->block_tokens, hash);
        kv_prefix_key(KV_PREFIX_BLOCK, hash, ret + i * KV_PREFIX_KEY);
    }
}

/* -- encoding ---------------------------------------------------------------------------------- */

/* Append a pair: tokens of the window, bytes of the first shape, both shapes. */
static void encode_pair(const struct kvl_layout *layout, struct kv_buf *ret)
{
    struct kv_buf first = KV_BUF_INIT;

    kvl_shape_encode(&layout->shape, &first);
    kvl_put_u32(ret, layout->span);
    kvl_put_u32(ret, (uint32_t)first.len);
    kv_buf_append(ret, first.data, first.len);
    kvl_shape_encode(&layout->second, ret);
    ret->error = first.error ? first.error : ret->error;
    kv_buf_fini(&first);
}

static void encode_cut(const struct kvl_layout *layout, struct kv_buf *ret)
{
    kv_buf_putc(ret, (char)layout->cut);
    switch (layout->cut) {
    case KVL_CUT_BLOCKS:
        kvl_shape_encode(&layout->shape, ret);
        break;
    case KVL_CUT_SNAPSHOT:
        kv_buf_append(ret, layout->whole, layout->whole_len);
        break;
    case KVL_CUT_PAIR:
        encode_pair(layout, ret);
        break;
    }
}

static int encode(const struct kvl_layout *layout, const uint8_t key[KV_PREFIX_KEY],
                  struct kv_buf *ret)
{
    struct kv_prefix_header h = {0};
    struct kv_buf payload = KV_BUF_INIT;
    uint8_t header[KV_PREFIX_HEADER + KV_PREFIX_HASH];

    encode_cut(layout, &payload);
    if (payload.error) {
        kv_buf_fini(&payload);
        return -ENOMEM;
    }
    memcpy(h.key, key, sizeof(h.key));
    h.payload_bytes = payload.len;
    kv_prefix_sum(payload.data, payload.len, h.payload_sum);
    kv_prefix_encode(&h, NULL, header);
    kv_buf_append(ret, header, sizeof(header));
    kv_buf_append(ret, payload.data, payload.len);
    kv_buf_fini(&payload);
    return ret->error;
}

/* Read what encode_pair wrote. Returns 0; -EBADMSG; -ENOMEM. */
static int decode_pair(const uint8_t *data, size_t len, struct kvl_layout *ret)
{
    size_t first;
    int rc;

    if (len < 8)
        return -EBADMSG;
    ret->span = (uint32_t)kv_get_le(data, 4);
    first = (size_t)kv_get_le(data + 4, 4);
    if (ret->span < 2 || first > len - 8)
        return -EBADMSG;
    rc = kvl_shape_decode(data + 8, first, ret->form, &ret->shape);
    if (rc)
        return rc;
    rc = kvl_shape_decode(data + 8 + first, len - 8 - first, ret->form, &ret->second);
    if (rc)
        kvl_shape_fini(&ret->shape);
    return rc;
}

/* Read a layout's payload and make its roots. Returns 0; -EBADMSG; -ENOMEM. */
static int decode_cut(const struct kvl_cache *c, const uint8_t *data, size_t len,
                      struct kvl_layout *ret)
{
    int rc = -EBADMSG;

    switch (*data) {
    case KVL_CUT_BLOCKS:
        rc = kvl_shape_decode(data + 1, len - 1, ret->form, &ret->shape);
        break;
    case KVL_CUT_SNAPSHOT:
        ret->whole = data + 1;
        ret->whole_len = len - 1;
        rc = 0;
        break;
    case KVL_CUT_PAIR:
        rc = decode_pair(data + 1, len - 1, ret);
        break;
    default: /* of a later version, or not ours */
        break;
    }
    if (rc)
        return rc;
    ret->cut = (enum kvl_cut) * data;
    rc = make_root(c, ret);
    ret->whole = NULL;
    return rc;
}

static int decode(const struct kvl_cache *c, enum kvl_form form, const uint8_t *data, size_t len,
                  struct kvl_layout *ret)
{
    size_t header = KV_PREFIX_HEADER + KV_PREFIX_HASH;

    if (len > LAYOUT_BYTES_MAX || kv_prefix_check(ret->key, data, len) < 0 || len == header)
        return -EBADMSG;
    ret->form = form;
    return decode_cut(c, data + header, len - header, ret);
}

/* -- in the store ------------------------------------------------------------------------------ */

static void layout_fini(struct kvl_layout *layout)
{
    kvl_shape_fini(&layout->shape);
    kvl_shape_fini(&layout->second);
}

void kvl_layouts_fini(struct kvl_layouts *l)
{
    for (size_t i = 0; i < l->n; i++)
        layout_fini(&l->at[i]);
    l->n = 0;
}

/* Take over what was got for one number. Returns 0 or -ENOMEM. */
static int take_layout(struct kvl_cache *c, enum kvl_form form, struct kvl_layouts *l,
                       const uint8_t *key, const void *data, size_t len)
{
    struct kvl_layout layout = {0};
    int rc = -EBADMSG;

    if (!data && len != KVS_LEN_BAD)
        return 0;
    memcpy(layout.key, key, sizeof(layout.key));
    if (data)
        rc = decode(c, form, data, len, &layout);
    if (rc)
        layout_fini(&layout);
    else
        l->at[l->n++] = layout;
    if (rc == -EBADMSG)
        kvl_drop_damaged(c, key);
    return rc == -ENOMEM ? rc : 0;
}

int kvl_layouts_read(struct kvl_cache *c, enum kvl_form form, struct kvl_layouts *ret)
{
    uint8_t keys[KVL_LAYOUTS_MAX * KV_PREFIX_KEY];
    void *data[KVL_LAYOUTS_MAX] = {NULL};
    size_t len[KVL_LAYOUTS_MAX] = {0};
    int rc = 0;

    ret->n = 0;
    for (size_t i = 0; i < KVL_LAYOUTS_MAX && !rc; i++)
        rc = layout_key(c, form, i, keys + i * KV_PREFIX_KEY);
    if (!rc)
        rc = kvs_get_chunks(c->store, keys, KV_PREFIX_KEY, KVL_LAYOUTS_MAX, data, len);
    if (rc < 0)
        return rc;
    rc = 0;
    for (size_t i = 0; i < KVL_LAYOUTS_MAX; i++) {
        if (!rc)
            rc = take_layout(c, form, ret, keys + i * KV_PREFIX_KEY, data[i], len[i]);
        free(data[i]);
    }
    if (rc)
        kvl_layouts_fini(ret);
    return rc;
}

/* Find @layout in @l: states put together by either must be the same bytes. NULL: isn't there. */
static const struct kvl_layout *find_same(const struct kvl_layouts *l,
                                          const struct kvl_layout *layout)
{
    for (size_t i = 0; i < l->n; i++) {
        const struct kvl_layout *is = &l->at[i];

        if (!memcmp(is->root, layout->root, KV_PREFIX_HASH) && is->cut == layout->cut &&
            (is->cut == KVL_CUT_SNAPSHOT ||
             (is->shape.prefix_len == layout->shape.prefix_len &&
              is->shape.has_rotations == layout->shape.has_rotations)))
            return is;
    }
    return NULL;
}

/*
 * Put the layout under the first free number after @skip others. Returns 0; an error; 1 when a chunk
 * is there: another came first, or it is damaged and this store can't delete.
 */
static int put_layout(struct kvl_cache *c, struct kvl_layout *layout,
                      const struct kvl_layouts *there, int skip)
{
    uint8_t *key = layout->key;
    struct kv_buf buf = KV_BUF_INIT;
    int rc;

    for (size_t i = 0; i < KVL_LAYOUTS_MAX; i++) {
        bool taken = false;

        rc = layout_key(c, layout->form, i, key);
        if (rc)
            return rc;
        for (size_t j = 0; j < there->n; j++)
            taken = taken || !memcmp(there->at[j].key, key, KV_PREFIX_KEY);
        if (taken || skip-- > 0)
            continue;
        rc = encode(layout, key, &buf);
        if (!rc)
            rc = kvs_put_chunk(c->store, key, KV_PREFIX_KEY, buf.data, buf.len);
        kv_buf_fini(&buf);
        return rc;
    }
    kv_log_error("llama", "no room for another layout with this fingerprint", "layouts=%d",
                 KVL_LAYOUTS_MAX);
    return -ENOSPC;
}

int kvl_layout_note(struct kvl_cache *c, struct kvl_layout *layout)
{
    const struct kvl_layout *same;
    struct kvl_layouts there;
    int rc = make_root(c, layout);

    /* Each turn sees a layout more, or passes over a number, so these suffice. */
    for (int turn = 0; turn <= KVL_LAYOUTS_MAX && !rc; turn++) {
        rc = kvl_layouts_read(c, layout->form, &there);
        if (rc)
            return rc;
        same = find_same(&there, layout);
        if (same) { /* only this one is used: others may expire */
            memcpy(layout->key, same->key, sizeof(layout->key));
            kvs_touch(c->store, layout->key, KV_PREFIX_KEY, 1);
        } else {
            rc = put_layout(c, layout, &there, turn);
            layout->is_new = rc == 0;
        }
        kvl_layouts_fini(&there);
        if (!rc)
            return 0;
        rc = rc == 1 ? 0 : rc;
    }
    return rc ? rc : -EIO;
}
