// SPDX-License-Identifier: Apache-2.0
#include "plane/dynamo.h"

#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/core/error.h"
#include "base/json/json.h"

#define TOPIC "kv-events"
#define MAX_RECORD 65536

/* -- endpoints, names -------------------------------------------------------------------------- */

static bool is_alnum(char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

/* Copy a name from @p to the next separator. Returns the end, NULL for no valid name. */
static const char *take_name(const char *p, char ret[KVP_DYNAMO_NAME_MAX + 1])
{
    size_t len = 0;

    for (; is_alnum(p[len]) || p[len] == '-' || p[len] == '_'; len++)
        if (len == KVP_DYNAMO_NAME_MAX)
            return NULL;
    memcpy(ret, p, len);
    ret[len] = '\0';
    return len ? p + len : NULL;
}

int kvp_dynamo_endpoint_parse(const char *text, struct kvp_dynamo_endpoint *ret)
{
    struct kvp_dynamo_endpoint of = {0};
    char *names[] = {of.ns, of.component, of.name};
    const char *p = text;

    for (size_t i = 0; i < KV_COUNT(names); i++) {
        p = take_name(p, names[i]);
        if (!p || (i < 2 && *p != '.' && *p != '/') || (i == 2 && *p))
            return -EINVAL;
        p++;
    }
    *ret = of;
    return 0;
}

void kvp_dynamo_put_name(struct kv_buf *out, const struct kvp_dynamo_endpoint *of,
                         uint64_t publisher)
{
    kv_buf_printf(out, "namespace/%s/component/%s/endpoint/%s/topic/" TOPIC "/%" PRIx64, of->ns,
                  of->component, of->name, publisher);
}

void kvp_dynamo_file_name(struct kv_buf *out, const char *name, size_t len)
{
    for (size_t i = 0; i < len; i++) {
        if (is_alnum(name[i]))
            kv_buf_putc(out, name[i]);
        else
            kv_buf_printf(out, "%%%02X", (unsigned char)name[i]);
    }
}

static int nibble(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

int kvp_dynamo_from_file_name(struct kv_buf *out, const char *name)
{
    for (const char *p = name; *p; p++) {
        int high, low;

        if (*p != '%') {
            kv_buf_putc(out, *p);
            continue;
        }
        high = nibble(p[1]);
        low = high < 0 ? -1 : nibble(p[2]);
        if (low < 0)
            return -EPROTO;
        kv_buf_putc(out, (char)(high << 4 | low));
        p += 2;
    }
    return 0;
}

/* -- writing ----------------------------------------------------------------------------------- */

static void put_endpoint(struct kv_json_writer *w, const struct kvp_dynamo_endpoint *of)
{
    kv_json_begin_object(w);
    kv_json_member_str(w, "namespace", of->ns);
    kv_json_member_str(w, "component", of->component);
    kv_json_member_str(w, "name", of->name);
    kv_json_end_object(w);
}

static void begin_record(struct kv_json_writer *w, const char *type,
                         const struct kvp_dynamo_endpoint *of)
{
    kv_json_begin_object(w);
    kv_json_member_str(w, "type", type);
    kv_json_key(w, "scope");
    kv_json_begin_object(w);
    kv_json_member_str(w, "kind", "endpoint");
    kv_json_key(w, "endpoint");
    put_endpoint(w, of);
    kv_json_end_object(w);
    kv_json_member_str(w, "topic", TOPIC);
}

void kvp_dynamo_write_source(struct kv_buf *out, const struct kvp_dynamo_source *source)
{
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    begin_record(&w, "EventSource", &source->of);
    kv_json_member_u64(&w, "publisher_id", source->publisher);
    kv_json_key(&w, "metadata");
    kv_json_begin_object(&w);
    kv_json_key(&w, "kv_state_endpoint");
    put_endpoint(&w, &source->of);
    kv_json_key(&w, "worker");
    kv_json_begin_object(&w);
    kv_json_member_u64(&w, "worker_id", source->worker);
    kv_json_member_u64(&w, "dp_rank", source->rank);
    kv_json_end_object(&w);
    kv_json_member_u64(&w, "publisher_id", source->publisher);
    kv_json_end_object(&w);
    kv_json_end_object(&w);
}

void kvp_dynamo_write_channel(struct kv_buf *out, const struct kvp_dynamo_channel *channel)
{
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    begin_record(&w, "EventChannel", &channel->of);
    kv_json_member_u64(&w, "instance_id", channel->publisher);
    kv_json_key(&w, "transport");
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "kind", "Zmq");
    kv_json_key(&w, "config");
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "endpoint", channel->address);
    kv_json_end_object(&w);
    kv_json_end_object(&w);
    kv_json_end_object(&w);
}

/* -- reading ----------------------------------------------------------------------------------- */

/* Members of a record of either type, as far as they were found. */
struct record {
    struct kv_json j;
    struct kv_buf text;
    enum { OTHER, SOURCE, CHANNEL } type;
    bool is_endpoint, is_topic, has_publisher, has_worker, has_rank, is_zmq;
    struct kvp_dynamo_endpoint of;
    uint64_t publisher, worker;
    uint32_t rank;
    char address[KVP_DYNAMO_ADDRESS_MAX + 1];
};

static bool is_text(struct record *r, const char *want)
{
    return kv_str_eq(kv_json_str(&r->j, &r->text), want);
}

static void read_endpoint(struct record *r)
{
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "namespace"))
            kv_json_copy_str(&r->j, &r->text, r->of.ns, sizeof(r->of.ns));
        else if (kv_str_eq(key, "component"))
            kv_json_copy_str(&r->j, &r->text, r->of.component, sizeof(r->of.component));
        else if (kv_str_eq(key, "name"))
            kv_json_copy_str(&r->j, &r->text, r->of.name, sizeof(r->of.name));
        else
            kv_json_skip(&r->j);
    }
}

static void read_scope(struct record *r)
{
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "kind"))
            r->is_endpoint = is_text(r, "endpoint");
        else if (kv_str_eq(key, "endpoint") && kv_json_peek(&r->j) == KV_JSON_OBJECT)
            read_endpoint(r);
        else
            kv_json_skip(&r->j);
    }
}

static void read_worker(struct record *r)
{
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "worker_id")) {
            r->worker = kv_json_u64(&r->j, UINT64_MAX);
            r->has_worker = true;
        } else if (kv_str_eq(key, "dp_rank")) {
            r->rank = (uint32_t)kv_json_u64(&r->j, UINT32_MAX);
            r->has_rank = true;
        } else {
            kv_json_skip(&r->j);
        }
    }
}

static void read_metadata(struct record *r)
{
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "worker"))
            read_worker(r);
        else
            kv_json_skip(&r->j);
    }
}

static void read_transport(struct record *r)
{
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "kind")) {
            r->is_zmq = is_text(r, "Zmq");
        } else if (kv_str_eq(key, "config") && kv_json_peek(&r->j) == KV_JSON_OBJECT) {
            kv_json_object(&r->j);
            while (kv_json_next_key(&r->j, &key)) {
                if (kv_str_eq(key, "endpoint"))
                    kv_json_copy_str(&r->j, &r->text, r->address, sizeof(r->address));
                else
                    kv_json_skip(&r->j);
            }
        } else {
            kv_json_skip(&r->j);
        }
    }
}

static void read_type(struct record *r)
{
    struct kv_str type = kv_json_str(&r->j, &r->text);

    r->type = kv_str_eq(type, "EventSource")    ? SOURCE
              : kv_str_eq(type, "EventChannel") ? CHANNEL
                                                : OTHER;
}

static void read_members(struct record *r)
{
    struct kv_str key;

    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        if (kv_str_eq(key, "type")) {
            read_type(r);
        } else if (kv_str_eq(key, "scope")) {
            read_scope(r);
        } else if (kv_str_eq(key, "topic")) {
            r->is_topic = is_text(r, TOPIC);
        } else if (kv_str_eq(key, "publisher_id") || kv_str_eq(key, "instance_id")) {
            r->publisher = kv_json_u64(&r->j, UINT64_MAX);
            r->has_publisher = true;
        } else if (kv_str_eq(key, "metadata") && kv_json_peek(&r->j) == KV_JSON_OBJECT) {
            read_metadata(r);
        } else if (kv_str_eq(key, "transport")) {
            read_transport(r);
        } else {
            kv_json_skip(&r->j);
        }
    }
}

/* Read a record of @type. Returns 0, -EPROTO or -ENOMEM. */
static int read_record(const void *json, size_t len, int type, struct record *r)
{
    int err;

    *r = (struct record){.text = {.limit = MAX_RECORD}};
    if (len > MAX_RECORD)
        return -EPROTO;
    kv_json_init(&r->j, json, len);
    read_members(r);
    err = kv_json_finish_foreign(&r->j);
    kv_buf_fini(&r->text);
    if (err < 0)
        return err;
    return (int)r->type == type && r->is_endpoint && r->is_topic && r->has_publisher && *r->of.ns &&
                   *r->of.component && *r->of.name
               ? 0
               : -EPROTO;
}

int kvp_dynamo_read_source(const void *json, size_t len, struct kvp_dynamo_source *ret)
{
    struct record r;
    int err = read_record(json, len, SOURCE, &r);

    if (err == 0 && (!r.has_worker || !r.has_rank))
        err = -EPROTO;
    if (err == 0)
        *ret = (struct kvp_dynamo_source){
            .of = r.of, .publisher = r.publisher, .worker = r.worker, .rank = r.rank};
    return err;
}

int kvp_dynamo_read_channel(const void *json, size_t len, struct kvp_dynamo_channel *ret)
{
    struct record r;
    int err = read_record(json, len, CHANNEL, &r);

    if (err == 0 && r.is_zmq && !*r.address)
        err = -EPROTO;
    if (err < 0)
        return err;
    *ret = (struct kvp_dynamo_channel){.of = r.of, .publisher = r.publisher};
    if (r.is_zmq)
        memcpy(ret->address, r.address, sizeof(r.address));
    return 0;
}
