// SPDX-License-Identifier: Apache-2.0
/* Messages of the event plane as JSON: the same fields as the binary form has. Keys and hashes are
 * hexadecimal, since readers of JSON lose digits of large numbers. */
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "base/json/json.h"
#include "plane/record.h"

static const char *const kinds[] = {
    [KVP_EVENTS] = "events", [KVP_SNAPSHOT] = "snapshot", [KVP_ALIVE] = "alive"};
static const char *const events[] = {[KVP_STORE] = "store", [KVP_REMOVE] = "remove"};
static const char *const tiers[] = {"device", "host", "disk", "external"};

/* ---- writing ---- */

static void put_bytes(struct kv_json_writer *w, const char *name, const void *data, size_t len)
{
    static const char digits[] = "0123456789abcdef";
    const uint8_t *bytes = data;
    char text[2 * KVP_MAX_KEY];

    for (size_t i = 0; i < len; i++) {
        text[2 * i] = digits[bytes[i] >> 4];
        text[2 * i + 1] = digits[bytes[i] & 15];
    }
    kv_json_key(w, name);
    kv_json_put_strn(w, text, 2 * len);
}

static void put_hex(struct kv_json_writer *w, const char *name, uint64_t value)
{
    uint8_t bytes[8];

    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(value >> (56 - 8 * i));
    put_bytes(w, name, bytes, sizeof(bytes));
}

static void write_record(void *arg, const struct kvp_header *header,
                         const struct kvp_record *record)
{
    struct kv_json_writer *w = arg;

    (void)header;
    kv_json_begin_object(w);
    kv_json_member_str(w, "event_type", events[record->event]);
    put_bytes(w, "sequence_hash", record->key, record->key_len);
    if (record->has_prefix)
        put_hex(w, "prefix_hash", record->prefix);
    kv_json_member_u64(w, "block_size", record->block_bytes);
    put_hex(w, "storage_location", record->volume);
    kv_json_key(w, "extra_metadata");
    kv_json_begin_object(w);
    kv_json_member_str(w, "tier", tiers[record->tier]);
    kv_json_member_u64(w, "group", record->group);
    kv_json_member_u64(w, "position", record->position);
    if (record->parent)
        put_bytes(w, "parent", record->parent, record->key_len);
    if (record->has_tokens_hash)
        put_hex(w, "tokens_hash", record->tokens_hash);
    if (record->first)
        kv_json_member_bool(w, "first", true);
    if (record->last)
        kv_json_member_bool(w, "last", true);
    kv_json_end_object(w);
    kv_json_end_object(w);
}

int kvp_to_json(const void *data, size_t len, struct kv_buf *out)
{
    struct kvp_header header = KVP_HEADER_INIT;
    struct kv_json_writer w;
    int err = kvp_read(data, len, &header, NULL, NULL);

    if (err < 0)
        return err;
    kv_buf_clear(out);
    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "kind", kinds[header.kind]);
    kv_json_member_str(&w, "publisher", header.publisher);
    put_hex(&w, "incarnation", header.incarnation);
    kv_json_member_u64(&w, "sequence", header.sequence);
    if (header.kind == KVP_SNAPSHOT) {
        kv_json_member_u64(&w, "part", header.part);
        kv_json_member_bool(&w, "last", header.last);
        put_hex(&w, "request", header.request);
    }
    kv_json_member_u64(&w, "time_ns", header.time_ns);
    put_bytes(&w, "fingerprint", header.fingerprint, sizeof(header.fingerprint));
    kv_json_key(&w, "events");
    kv_json_begin_array(&w);
    err = kvp_read(data, len, NULL, write_record, &w);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    return err < 0 ? err : out->error;
}

/* ---- reading ---- */

/* Read a word of a table. Returns its index, or 0 with the reader's error set. */
static unsigned read_word(struct kv_json *j, struct kv_buf *scratch, const char *const *words,
                          unsigned n)
{
    struct kv_str text = kv_json_str(j, scratch);

    for (unsigned i = 0; i < n; i++) {
        if (words[i] && kv_str_eq(text, words[i]))
            return i;
    }
    kv_json_fail(j, -EBADMSG, "unknown word");
    return 0;
}

static int digit_of(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Read hexadecimal digits, at least @min bytes and at most @max. Returns the bytes. */
static uint32_t read_bytes(struct kv_json *j, struct kv_buf *scratch, uint8_t *ret, size_t min,
                           size_t max)
{
    struct kv_str text = kv_json_str(j, scratch);
    size_t n = text.len / 2;

    if (text.len % 2 || n < min || n > max) {
        kv_json_fail(j, -EBADMSG, "not the digits of a hash");
        return 0;
    }
    for (size_t i = 0; i < n; i++) {
        int high = digit_of(text.p[2 * i]), low = digit_of(text.p[2 * i + 1]);

        if (high < 0 || low < 0) {
            kv_json_fail(j, -EBADMSG, "not the digits of a hash");
            return 0;
        }
        ret[i] = (uint8_t)(high << 4 | low);
    }
    return (uint32_t)n;
}

static uint64_t read_hex(struct kv_json *j, struct kv_buf *scratch)
{
    uint8_t bytes[8] = {0};
    uint64_t value = 0;

    (void)read_bytes(j, scratch, bytes, 8, 8);
    for (int i = 0; i < 8; i++)
        value = value << 8 | bytes[i];
    return value;
}

/* A record with the memory of its keys. */
struct reading {
    struct kvp_record record;
    uint8_t key[KVP_MAX_KEY], parent[KVP_MAX_KEY];
    uint32_t parent_len;
    bool has_tier;
};

static void read_metadata(struct kv_json *j, struct kv_buf *scratch, struct reading *r)
{
    struct kv_str name;

    kv_json_object(j);
    while (kv_json_next_key(j, &name)) {
        if (kv_str_eq(name, "tier")) {
            r->record.tier = read_word(j, scratch, tiers, KV_COUNT(tiers));
            r->has_tier = true;
        } else if (kv_str_eq(name, "group")) {
            r->record.group = (uint32_t)kv_json_u64(j, UINT32_MAX);
        } else if (kv_str_eq(name, "position")) {
            r->record.position = (uint32_t)kv_json_u64(j, UINT32_MAX);
        } else if (kv_str_eq(name, "parent")) {
            r->parent_len = read_bytes(j, scratch, r->parent, 4, KVP_MAX_KEY);
            r->record.parent = r->parent;
        } else if (kv_str_eq(name, "tokens_hash")) {
            r->record.tokens_hash = read_hex(j, scratch);
            r->record.has_tokens_hash = true;
        } else if (kv_str_eq(name, "first")) {
            r->record.first = kv_json_bool(j);
        } else if (kv_str_eq(name, "last")) {
            r->record.last = kv_json_bool(j);
        } else {
            kv_json_skip(j);
        }
    }
}

static void read_one(struct kv_json *j, struct kv_buf *scratch, struct reading *r)
{
    struct kv_str name;

    memset(r, 0, sizeof(*r));
    r->record.key = r->key;
    kv_json_object(j);
    while (kv_json_next_key(j, &name)) {
        if (kv_str_eq(name, "event_type")) {
            r->record.event = read_word(j, scratch, events, KV_COUNT(events));
        } else if (kv_str_eq(name, "sequence_hash")) {
            r->record.key_len = read_bytes(j, scratch, r->key, 4, KVP_MAX_KEY);
        } else if (kv_str_eq(name, "prefix_hash")) {
            r->record.prefix = read_hex(j, scratch);
            r->record.has_prefix = true;
        } else if (kv_str_eq(name, "block_size")) {
            r->record.block_bytes = kv_json_u64(j, UINT64_MAX);
        } else if (kv_str_eq(name, "storage_location")) {
            r->record.volume = read_hex(j, scratch);
        } else if (kv_str_eq(name, "extra_metadata")) {
            read_metadata(j, scratch, r);
        } else {
            kv_json_skip(j);
        }
    }
    if (!kv_json_failed(j) && (!r->has_tier || !kvp_record_is_valid(&r->record) ||
                               (r->record.parent && r->parent_len != r->record.key_len)))
        kv_json_fail(j, -EBADMSG, "not a record");
}

/* Read the array of records. Returns their number. */
static uint32_t read_records(struct kv_json *j, struct kv_buf *scratch,
                             const struct kvp_header *header, kvp_record_fn fn, void *arg)
{
    struct reading r;
    uint32_t n = 0;

    kv_json_array(j);
    for (; kv_json_next_item(j); n++) {
        read_one(j, scratch, &r);
        if (fn && !kv_json_failed(j))
            fn(arg, header, &r.record);
    }
    return n;
}

static void read_publisher(struct kv_json *j, struct kv_buf *scratch, struct kvp_header *header)
{
    struct kv_str text = kv_json_str(j, scratch);

    if (!kvp_is_subject(text.p, text.len)) {
        kv_json_fail(j, -EBADMSG, "not a publisher");
        return;
    }
    memcpy(header->publisher, text.p, text.len);
    header->publisher[text.len] = '\0';
}

/* Read a whole message. @fn NULL: fill @header; else hand out the records, with @header. */
static int read_message(const void *data, size_t len, struct kvp_header *header, kvp_record_fn fn,
                        void *arg)
{
    struct kv_buf scratch = KV_BUF_INIT;
    struct kvp_header again = KVP_HEADER_INIT;
    struct kvp_header *to = fn ? &again : header;
    unsigned n_arrays = 0;
    struct kv_str name;
    struct kv_json j;
    int err;

    scratch.limit = KVP_MAX_SUBJECT;
    kv_json_init(&j, data, len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &name)) {
        if (kv_str_eq(name, "kind"))
            to->kind = read_word(&j, &scratch, kinds, KV_COUNT(kinds));
        else if (kv_str_eq(name, "publisher"))
            read_publisher(&j, &scratch, to);
        else if (kv_str_eq(name, "incarnation"))
            to->incarnation = read_hex(&j, &scratch);
        else if (kv_str_eq(name, "sequence"))
            to->sequence = kv_json_u64(&j, UINT64_MAX);
        else if (kv_str_eq(name, "part"))
            to->part = kv_json_u64(&j, UINT64_MAX);
        else if (kv_str_eq(name, "last"))
            to->last = kv_json_bool(&j);
        else if (kv_str_eq(name, "request"))
            to->request = read_hex(&j, &scratch);
        else if (kv_str_eq(name, "time_ns"))
            to->time_ns = kv_json_u64(&j, UINT64_MAX);
        else if (kv_str_eq(name, "fingerprint"))
            (void)read_bytes(&j, &scratch, to->fingerprint, 16, 16);
        else if (kv_str_eq(name, "events") && n_arrays++ == 0)
            to->n_records = read_records(&j, &scratch, header, fn, arg);
        else
            kv_json_skip(&j);
    }
    err = kv_json_finish(&j);
    kv_buf_fini(&scratch);
    return err < 0 || !to->kind || !*to->publisher || n_arrays != 1 || !kvp_header_is_valid(to)
               ? -EBADMSG
               : 0;
}

int kvp_read_json(const void *data, size_t len, struct kvp_header *ret, kvp_record_fn fn, void *arg)
{
    struct kvp_header header = KVP_HEADER_INIT;
    int err = read_message(data, len, &header, NULL, NULL);

    if (err == 0 && fn)
        err = read_message(data, len, &header, fn, arg);
    if (err == 0 && ret)
        KV_GIVE(ret, &header);
    return err;
}
