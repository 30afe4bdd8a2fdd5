// SPDX-License-Identifier: Apache-2.0
#include "tiered/pack_format.h"

#include <endian.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/random.h>

#include "base/hash/hash.h"

#define HEAD_MAGIC "KV-PACK\n"
#define END_MAGIC "KV-PEND\n"
#define KEY_MAGIC "kv-pack\1"
#define PACK_NAMES "kv-tiered-pack-"
#define GONE_NAMES "kv-tiered-gone-"

enum { MAGIC = 8, VERSION = 1, SUM = 16, ENTRY_FIXED = 1 + 8 + 4 + SUM, KEY_MAX = 120 };

/* -- numbers ----------------------------------------------------------------------------------- */

static void put_u32(struct kv_buf *buf, uint32_t value)
{
    value = htole32(value);
    kv_buf_append(buf, &value, sizeof(value));
}

static void put_u64(struct kv_buf *buf, uint64_t value)
{
    value = htole64(value);
    kv_buf_append(buf, &value, sizeof(value));
}

static uint32_t get_u32(const uint8_t *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return le32toh(value);
}

static uint64_t get_u64(const uint8_t *at)
{
    uint64_t value;

    memcpy(&value, at, sizeof(value));
    return le64toh(value);
}

/* -- names ------------------------------------------------------------------------------------- */

void trd_pack_key(const uint8_t id[TRD_PACK_ID], uint8_t ret[TRD_PACK_KEY])
{
    memcpy(ret, KEY_MAGIC, MAGIC);
    memcpy(ret + MAGIC, id, TRD_PACK_ID);
}

bool trd_is_pack_key(const void *hash, size_t hash_len)
{
    return hash_len == TRD_PACK_KEY && memcmp(hash, KEY_MAGIC, MAGIC) == 0;
}

static char *write_id(char *at, const char *start, const uint8_t id[TRD_PACK_ID])
{
    at = stpcpy(at, start);
    for (size_t i = 0; i < TRD_PACK_ID; i++)
        at += snprintf(at, 3, "%02x", id[i]);
    return at;
}

/* Read lower-case hex digits, one at least, up to @end. Returns what follows it, or NULL. */
static const char *read_hex(const char *at, char end, uint64_t *ret)
{
    static const char digits[] = "0123456789abcdef";
    size_t n = strspn(at, digits);

    *ret = 0;
    if (n == 0 || n > 16 || at[n] != end || (n > 1 && *at == '0'))
        return NULL;
    for (size_t i = 0; i < n; i++)
        *ret = *ret * 16 + (uint64_t)(strchr(digits, at[i]) - digits);
    return at + n + 1;
}

static const char *read_id(const char *name, const char *start, uint8_t ret[TRD_PACK_ID])
{
    static const char digits[] = "0123456789abcdef";
    const char *at = name + strlen(start);

    if (strncmp(name, start, strlen(start)) != 0 || strspn(at, digits) != 2 * TRD_PACK_ID ||
        at[2 * TRD_PACK_ID] != '-')
        return NULL;
    for (size_t i = 0; i < TRD_PACK_ID; i++, at += 2)
        ret[i] =
            (uint8_t)((strchr(digits, at[0]) - digits) * 16 + (strchr(digits, at[1]) - digits));
    return at + 1;
}

void trd_pack_write_name(const struct trd_pack_name *pack, char ret[TRD_PACK_NAME])
{
    char *at = write_id(ret, PACK_NAMES, pack->id);

    snprintf(at, (size_t)(ret + TRD_PACK_NAME - at), "-%" PRIx64 "-%" PRIx32, pack->len,
             pack->tail_len);
}

bool trd_pack_read_name(const char *name, struct trd_pack_name *ret)
{
    const char *at = read_id(name, PACK_NAMES, ret->id);
    uint64_t tail = 0;

    at = at ? read_hex(at, '-', &ret->len) : NULL;
    at = at ? read_hex(at, '\0', &tail) : NULL;
    if (!at || ret->len > TRD_PACK_MAX || tail > TRD_PACK_TAIL_MAX || tail < TRD_PACK_TRAILER ||
        ret->len < TRD_PACK_HEAD + tail)
        return false;
    ret->tail_len = (uint32_t)tail;
    return true;
}

void trd_gone_write_name(const uint8_t id[TRD_PACK_ID], uint32_t entry, char ret[TRD_PACK_NAME])
{
    char *at = write_id(ret, GONE_NAMES, id);

    snprintf(at, (size_t)(ret + TRD_PACK_NAME - at), "-%" PRIx32, entry);
}

bool trd_gone_read_name(const char *name, uint8_t ret_id[TRD_PACK_ID], uint32_t *ret_entry)
{
    const char *at = read_id(name, GONE_NAMES, ret_id);
    uint64_t entry = 0;

    if (!at || !read_hex(at, '\0', &entry) || entry > UINT32_MAX)
        return false;
    *ret_entry = (uint32_t)entry;
    return true;
}

/* -- reading ----------------------------------------------------------------------------------- */

/* Judge the trailer, behind the checksum that covers it. Returns 0 and the number of entries. */
static int read_trailer(const struct trd_pack_name *pack, const uint8_t *tail, uint32_t *ret_n,
                        uint64_t *ret_created_s)
{
    const uint8_t *at = tail + pack->tail_len - TRD_PACK_TRAILER;
    uint8_t sum[SUM];

    kv_hash(tail, pack->tail_len - SUM, sum);
    if (memcmp(at, END_MAGIC, MAGIC) != 0 ||
        memcmp(sum, tail + pack->tail_len - SUM, sizeof(sum)) != 0)
        return -EBADMSG;
    if (get_u32(at + 8) != VERSION)
        return -EPROTO;
    *ret_n = get_u32(at + 12);
    *ret_created_s = get_u64(at + 32);
    return get_u64(at + 16) == pack->len - pack->tail_len && get_u64(at + 24) == pack->len &&
                   memcmp(at + 40, pack->id, TRD_PACK_ID) == 0
               ? 0
               : -EBADMSG;
}

/* Read one entry at @at of the tail. Returns its length there, or 0 when it can't be one. @end: of the
 * entries; @from: the first byte that its blob may have; @to: the end of the blobs. */
static size_t read_entry(const uint8_t *tail, size_t at, size_t end, uint64_t from, uint64_t to,
                         struct trd_pack_entry *ret)
{
    size_t key_len;

    if (end - at < ENTRY_FIXED)
        return 0;
    key_len = tail[at];
    if (key_len == 0 || key_len > KEY_MAX || end - at < ENTRY_FIXED + key_len)
        return 0;
    ret->at = (uint32_t)at;
    ret->offset = get_u64(tail + at + 1 + key_len);
    ret->len = get_u32(tail + at + 1 + key_len + 8);
    if (ret->offset < from || ret->offset > to || ret->len > to - ret->offset ||
        ret->len > TRD_PACK_BLOB_MAX)
        return 0;
    return ENTRY_FIXED + key_len;
}

static int read_entries(const struct trd_pack_name *pack, struct trd_pack_index *index)
{
    size_t at = 0, end = pack->tail_len - TRD_PACK_TRAILER;
    uint64_t from = TRD_PACK_HEAD;

    if (index->n > end / (ENTRY_FIXED + 1))
        return -EBADMSG;
    index->entries = calloc(index->n + (size_t)1, sizeof(*index->entries));
    if (!index->entries)
        return -ENOMEM;
    for (uint32_t i = 0; i < index->n; i++) {
        struct trd_pack_entry *entry = &index->entries[i];
        size_t len = read_entry(index->tail, at, end, from, pack->len - pack->tail_len, entry);

        if (len == 0)
            return -EBADMSG;
        at += len;
        from = entry->offset + entry->len;
    }
    return at == end ? 0 : -EBADMSG;
}

int trd_pack_index_read(const struct trd_pack_name *pack, uint8_t *tail, struct trd_pack_index *ret)
{
    struct trd_pack_index index = {.tail = tail};
    int rc = read_trailer(pack, tail, &index.n, &index.created_s);

    if (rc == 0)
        rc = read_entries(pack, &index);
    if (rc < 0)
        trd_pack_index_fini(&index);
    else
        *ret = index;
    return rc;
}

void trd_pack_index_fini(struct trd_pack_index *index)
{
    free(index->tail);
    free(index->entries);
    *index = (struct trd_pack_index){0};
}

const uint8_t *trd_pack_entry_key(const struct trd_pack_index *index, uint32_t i, size_t *ret_len)
{
    const uint8_t *at = index->tail + index->entries[i].at;

    *ret_len = *at;
    return at + 1;
}

bool trd_pack_entry_is(const struct trd_pack_index *index, uint32_t i, const void *data)
{
    const struct trd_pack_entry *entry = &index->entries[i];
    const uint8_t *at = index->tail + entry->at;
    uint8_t sum[SUM];

    kv_hash(data, entry->len, sum);
    return memcmp(sum, at + 1 + *at + 12, sizeof(sum)) == 0;
}

bool trd_pack_entries_equal(const struct trd_pack_index *a, uint32_t i,
                            const struct trd_pack_index *b, uint32_t k)
{
    const uint8_t *x = a->tail + a->entries[i].at, *y = b->tail + b->entries[k].at;

    return memcmp(x + 1 + *x + 12, y + 1 + *y + 12, SUM) == 0;
}

/* -- making ------------------------------------------------------------------------------------ */

int trd_pack_begin(struct trd_pack_builder *b)
{
    *b = (struct trd_pack_builder){0};
    if (getrandom(b->name.id, TRD_PACK_ID, 0) != TRD_PACK_ID)
        return -EIO;
    kv_buf_append(&b->bytes, HEAD_MAGIC, MAGIC);
    put_u32(&b->bytes, VERSION);
    put_u32(&b->bytes, 0);
    kv_buf_append(&b->bytes, b->name.id, TRD_PACK_ID);
    return b->bytes.error;
}

bool trd_pack_is_full(const struct trd_pack_builder *b, size_t hash_len)
{
    return b->entries.len + ENTRY_FIXED + hash_len > TRD_PACK_TAIL_MAX - TRD_PACK_TRAILER;
}

void trd_pack_add(struct trd_pack_builder *b, const void *hash, size_t hash_len, const void *data,
                  size_t len)
{
    uint8_t sum[SUM];

    kv_hash(data, len, sum);
    kv_buf_putc(&b->entries, (char)hash_len);
    kv_buf_append(&b->entries, hash, hash_len);
    put_u64(&b->entries, b->bytes.len);
    put_u32(&b->entries, (uint32_t)len);
    kv_buf_append(&b->entries, sum, sizeof(sum));
    kv_buf_append(&b->bytes, data, len);
    b->n++;
}

int trd_pack_end(struct trd_pack_builder *b, uint64_t created_s)
{
    uint64_t index_at = b->bytes.len;
    uint8_t sum[SUM];

    b->name.tail_len = (uint32_t)(b->entries.len + TRD_PACK_TRAILER);
    b->name.len = index_at + b->name.tail_len;
    kv_buf_append(&b->bytes, b->entries.data, b->entries.len);
    kv_buf_append(&b->bytes, END_MAGIC, MAGIC);
    put_u32(&b->bytes, VERSION);
    put_u32(&b->bytes, b->n);
    put_u64(&b->bytes, index_at);
    put_u64(&b->bytes, b->name.len);
    put_u64(&b->bytes, created_s);
    kv_buf_append(&b->bytes, b->name.id, TRD_PACK_ID);
    if (b->bytes.error || b->entries.error)
        return -ENOMEM;
    kv_hash(b->bytes.data + index_at, b->bytes.len - index_at, sum);
    kv_buf_append(&b->bytes, sum, sizeof(sum));
    return b->bytes.error ? -ENOMEM : 0;
}

void trd_pack_builder_fini(struct trd_pack_builder *b)
{
    kv_buf_fini(&b->bytes);
    kv_buf_fini(&b->entries);
    b->n = 0;
}
