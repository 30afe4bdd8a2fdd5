// SPDX-License-Identifier: Apache-2.0
/*
 * A block set as bytes (docs/formats.md, "Block sets"): little-endian, fixed width,
 *
 *   magic, version, length | numbers | name | fingerprint | transports | layout | XXH3-64
 *
 * Each part behind the numbers is padded with zeros to a multiple of 8. A reader refuses whatever
 * a writer of the same version wouldn't write, so that equal sets have equal bytes.
 */
#include "base/core/le.h"
#include "base/core/utf8.h"
#include "base/core/xxh.h"
#include "peer/set/blockset.h"

#define MAGIC "KVBMSET\n"
#define VERSION 1
#define FRAME_BYTES 16
#define HEAD_BYTES 96
#define SUM_BYTES 8
#define WRITABLE 1u

/* ---- writing ---- */

static void put(struct kv_buf *to, uint64_t value, size_t bytes)
{
    uint8_t le[8];

    kv_put_le64(le, value);
    kv_buf_append(to, le, bytes);
}

static void put_padding(struct kv_buf *to, size_t len)
{
    put(to, 0, -len & 7);
}

static void put_padded(struct kv_buf *to, const void *data, size_t len)
{
    kv_buf_append(to, data, len);
    put_padding(to, len);
}

static int put_layout(struct kv_buf *to, const struct kvbm_layout *layout, size_t len)
{
    int err = kv_buf_reserve(to, len + 8);
    long rc = err < 0 ? err : kvbm_layout_serialise(layout, to->data + to->len, len, NULL);

    if (rc < 0)
        return (int)rc;
    to->len += len;
    put_padding(to, len);
    return to->error;
}

static void put_head(struct kv_buf *to, const struct kvbm_facts *facts, size_t layout_len)
{
    const uint32_t words[] = {facts->id,
                              facts->writable ? WRITABLE : 0,
                              facts->key_len,
                              facts->shard.axis,
                              facts->shard.rank,
                              facts->shard.n_ranks,
                              facts->shard.first_head,
                              facts->shard.total_heads,
                              (uint32_t)strlen(facts->agent),
                              (uint32_t)strlen(facts->fingerprint),
                              facts->n_transports,
                              (uint32_t)layout_len};

    kv_buf_append(to, MAGIC, 8);
    put(to, VERSION, 4);
    put(to, 0, 4); /* the length, once it is known */
    put(to, facts->worker, 8);
    put(to, facts->incarnation, 8);
    put(to, facts->generation, 8);
    put(to, facts->lifetime_ms, 8);
    for (size_t i = 0; i < KV_COUNT(words); i++)
        put(to, words[i], 4);
}

int kvbm_facts_write(const struct kvbm_facts *facts, const struct kvbm_layout *layout,
                     struct kv_buf *to)
{
    size_t layout_len;
    uint8_t le[8];
    int err;

    (void)kvbm_layout_serialise(layout, NULL, 0, &layout_len);
    put_head(to, facts, layout_len);
    put_padded(to, facts->agent, strlen(facts->agent));
    put_padded(to, facts->fingerprint, strlen(facts->fingerprint));
    for (uint32_t i = 0; i < facts->n_transports; i++) {
        put(to, facts->transports[i].transport, 4);
        put(to, facts->transports[i].len, 4);
        put_padded(to, facts->transports[i].key, facts->transports[i].len);
    }
    err = put_layout(to, layout, layout_len);
    if (err < 0)
        return err;
    kv_put_le64(le, to->len + SUM_BYTES);
    memcpy(to->data + 12, le, 4);
    put(to, kv_xxh64(to->data, to->len, 0), 8);
    return to->error;
}

/* ---- reading ---- */

/* Bytes not yet read. Takes from the front; a take beyond the end returns NULL and ends all. */
struct reader {
    const uint8_t *at;
    size_t left;
    bool bad;
};

static const uint8_t *take(struct reader *r, size_t len)
{
    const uint8_t *ret = r->at;

    if (r->bad || len > r->left) {
        r->bad = true;
        return NULL;
    }
    r->at += len;
    r->left -= len;
    return ret;
}

static uint64_t take_number(struct reader *r, size_t bytes)
{
    const uint8_t *at = take(r, bytes);

    return at ? kv_get_le(at, bytes) : 0;
}

static const uint8_t *take_padded(struct reader *r, size_t len)
{
    const uint8_t *ret = take(r, len), *padding = take(r, -len & 7);

    for (size_t i = 0; padding && i < (-len & 7); i++)
        r->bad = r->bad || padding[i];
    return r->bad ? NULL : ret;
}

/* Read text of @len bytes, without a NUL within, into @ret of @size bytes. */
static void take_text(struct reader *r, size_t len, char *ret, size_t size)
{
    const uint8_t *text = len < size ? take_padded(r, len) : NULL;

    if (!text || memchr(text, 0, len)) {
        r->bad = true;
        return;
    }
    memcpy(ret, text, len);
    ret[len] = '\0';
}

static void take_transports(struct reader *r, struct kvbm_facts *facts, uint32_t n)
{
    r->bad = r->bad || n > KVBM_MAX_TRANSPORTS;
    for (uint32_t i = 0; !r->bad && i < n; i++) {
        struct kvbm_transport_key *key = &facts->transports[i];

        key->transport = (uint32_t)take_number(r, 4);
        key->len = (uint32_t)take_number(r, 4);
        r->bad = r->bad || key->transport == 0 || key->len > KVBM_MAX_TRANSPORT_KEY;
        key->key = take_padded(r, key->len);
        for (uint32_t j = 0; j < i; j++)
            r->bad = r->bad || facts->transports[j].transport == key->transport;
    }
    facts->n_transports = n;
}

static int check_frame(const uint8_t *data, size_t len)
{
    uint64_t version;

    if (len < FRAME_BYTES || memcmp(data, MAGIC, 8) != 0)
        return -EPROTO;
    version = kv_get_le(data + 8, 4);
    if (version > VERSION) /* a newer version: only its number is understood */
        return -EPROTONOSUPPORT;
    if (version != VERSION || kv_get_le(data + 12, 4) != len || len < HEAD_BYTES + SUM_BYTES ||
        len > KVBM_MAX_SET_BYTES || len % 8)
        return -EPROTO;
    return kv_xxh64(data, len - SUM_BYTES, 0) == kv_get_le64(data + len - SUM_BYTES) ? 0 : -EPROTO;
}

/* Read all but the frame. The words are in the order of put_head. */
static int read_facts(struct reader *r, struct kvbm_facts *facts)
{
    uint32_t words[12];
    const uint8_t *layout;
    int err;

    facts->worker = take_number(r, 8);
    facts->incarnation = take_number(r, 8);
    facts->generation = take_number(r, 8);
    facts->lifetime_ms = take_number(r, 8);
    for (size_t i = 0; i < KV_COUNT(words); i++)
        words[i] = (uint32_t)take_number(r, 4);
    facts->id = words[0];
    facts->writable = words[1] == WRITABLE;
    facts->key_len = words[2];
    facts->shard = (struct kvbm_shard){.axis = words[3],
                                       .rank = words[4],
                                       .n_ranks = words[5],
                                       .first_head = words[6],
                                       .total_heads = words[7]};
    take_text(r, words[8], facts->agent, sizeof(facts->agent));
    take_text(r, words[9], facts->fingerprint, sizeof(facts->fingerprint));
    take_transports(r, facts, words[10]);
    layout = take_padded(r, words[11]);
    if (r->bad || r->left || words[1] > WRITABLE || !facts->incarnation || !facts->generation ||
        facts->key_len < 4 || facts->key_len > 64 ||
        !kvbm_agent_name_is_valid(facts->agent, words[8]) || !kv_utf8_valid(facts->fingerprint))
        return -EPROTO;
    err = kvbm_layout_deserialise(layout, words[11], &facts->layout);
    if (err < 0)
        return err;
    return kvbm_shard_fits(&facts->shard, &facts->layout->config) ? 0 : -EPROTO;
}

int kvbm_facts_parse(const void *data, size_t len, struct kvbm_facts **ret)
{
    struct kvbm_facts *facts;
    struct reader r;
    int err = check_frame(data, len);

    if (err < 0)
        return err;
    facts = calloc(1, sizeof(*facts));
    if (!facts)
        return -ENOMEM;
    atomic_init(&facts->references, 1);
    facts->bytes = malloc(len);
    facts->len = len;
    err = -ENOMEM;
    if (!facts->bytes)
        goto fail;
    memcpy(facts->bytes, data, len);
    r = (struct reader){.at = facts->bytes + FRAME_BYTES, .left = len - FRAME_BYTES - SUM_BYTES};
    err = read_facts(&r, facts);
    if (err < 0)
        goto fail;
    *ret = facts;
    return 0;

fail:
    kvbm_facts_put(facts);
    return err;
}
