// SPDX-License-Identifier: Apache-2.0
#include "event/router/envelope.h"

#include <errno.h>
#include <string.h>

#include "event/wire/raw_fields.h"

enum member { PUBLISHER, SEQUENCE, PUBLISHED, TOPIC, PAYLOAD, N_MEMBERS };

static const char *const names[N_MEMBERS] = {
    [PUBLISHER] = "publisher_id", [SEQUENCE] = "sequence",
    [PUBLISHED] = "published_at", [TOPIC] = "topic",
    [PAYLOAD] = "payload",
};

/* Read a key. Returns its member; N_MEMBERS for any other. */
static enum member read_key(struct kv_msgpack *m)
{
    struct kv_str key;
    int i = 0;

    if (kv_msgpack_peek(m) != KV_MSGPACK_STR) {
        kv_msgpack_skip(m);
        return N_MEMBERS;
    }
    key = kv_msgpack_str(m);
    while (i < N_MEMBERS && !kv_str_eq(key, names[i]))
        i++;
    return (enum member)i;
}

/* Pass over fixed bytes. Returns false where others stand. */
static inline bool pass(struct kv_msgpack *m, const char *text, size_t len)
{
    if ((size_t)(m->end - m->p) < len || memcmp(m->p, text, len) != 0)
        return false;
    m->p += len;
    return true;
}
#define PASS(m, text) pass(m, text, sizeof(text) - 1)

/* Read an envelope in the form and order that publishers write. Returns false for any other. */
static bool read_usual(const void *data, size_t len, struct kve_envelope *ret)
{
    struct kve_envelope e = {.topic = {KVE_ENVELOPE_TOPIC, sizeof(KVE_ENVELOPE_TOPIC) - 1}};
    struct kv_msgpack m;

    kv_msgpack_init(&m, data, len);
    if (!PASS(&m, "\x85\xacpublisher_id"))
        return false;
    e.publisher = kve_take_u64(&m);
    if (!PASS(&m, "\xa8sequence"))
        return false;
    e.sequence = kve_take_u64(&m);
    if (!PASS(&m, "\xacpublished_at"))
        return false;
    e.published_ms = kve_take_u64(&m);
    if (!PASS(&m, "\xa5topic\xa9" KVE_ENVELOPE_TOPIC "\xa7payload"))
        return false;
    e.payload = kv_msgpack_bin(&m);
    if (kv_msgpack_failed(&m) || m.p != m.end)
        return false;
    *ret = e;
    return true;
}

int kve_envelope_read(const void *data, size_t len, struct kve_envelope *ret)
{
    struct kve_envelope e = {.topic = {"", 0}, .payload = {"", 0}};
    unsigned seen = 0;
    struct kv_msgpack m;

    if (KV_LIKELY(read_usual(data, len, ret)))
        return 0;
    kv_msgpack_init(&m, data, len);
    for (uint32_t n = kv_msgpack_map(&m); n && !kv_msgpack_failed(&m); n--) {
        enum member member = read_key(&m);

        seen |= 1u << member;
        if (member == PUBLISHER)
            e.publisher = kv_msgpack_u64(&m);
        else if (member == SEQUENCE)
            e.sequence = kv_msgpack_u64(&m);
        else if (member == PUBLISHED)
            e.published_ms = kv_msgpack_nil(&m) ? 0 : kv_msgpack_u64(&m);
        else if (member == TOPIC)
            e.topic = kv_msgpack_str(&m);
        else if (member == PAYLOAD)
            e.payload = kv_msgpack_bin(&m);
        else
            kv_msgpack_skip(&m);
    }
    if (kv_msgpack_failed(&m) || m.p != m.end || !(seen & 1u << PUBLISHER) ||
        !(seen & 1u << PAYLOAD))
        return -EPROTO;
    *ret = e;
    return 0;
}

bool kve_envelope_is_likely(const void *data, size_t len)
{
    struct kv_msgpack m;

    kv_msgpack_init(&m, data, len);
    return kv_msgpack_peek(&m) == KV_MSGPACK_MAP && kv_msgpack_map(&m) && read_key(&m) != N_MEMBERS;
}

void kve_envelope_write(struct kv_buf *out, const struct kve_envelope *e)
{
    kv_msgpack_put_map(out, N_MEMBERS);
    kv_msgpack_put_str(out, names[PUBLISHER]);
    kv_msgpack_put_u64(out, e->publisher);
    kv_msgpack_put_str(out, names[SEQUENCE]);
    kv_msgpack_put_u64(out, e->sequence);
    kv_msgpack_put_str(out, names[PUBLISHED]);
    kv_msgpack_put_u64(out, e->published_ms);
    kv_msgpack_put_str(out, names[TOPIC]);
    kv_msgpack_put_strn(out, e->topic.p, e->topic.len);
    kv_msgpack_put_str(out, names[PAYLOAD]);
    kv_msgpack_put_bin(out, e->payload.p, e->payload.len);
}
