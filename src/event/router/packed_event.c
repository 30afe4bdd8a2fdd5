// SPDX-License-Identifier: Apache-2.0
#include "event/router/packed_event.h"

#include <assert.h>
#include <endian.h>
#include <string.h>

enum flags { PARENT = 1, REPEAT = 2, ALL_FLAGS = 3 };

struct header {
    uint64_t worker, parent;
    uint32_t rank;
    uint16_t n;
    uint8_t tier, flags;
};
_Static_assert(sizeof(struct header) == KVE_PACKED_HEADER, "the header has no padding");
_Static_assert(sizeof(struct kv_block) == 16, "blocks lie in memory as in a record");

/* -- writing ----------------------------------------------------------------------------------- */

static bool is_repeat(const struct kve_packed *p, const struct kve_router_event *event)
{
    return event->n <= p->n &&
           memcmp(p->blocks[p->last], event->blocks, event->n * sizeof(event->blocks[0])) == 0;
}

static void put_blocks(struct kve_packed *p, struct kv_buf *out, const struct kv_block *blocks,
                       size_t n)
{
    p->n = n;
    memcpy(p->blocks[p->last], blocks, n * sizeof(blocks[0]));
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    kv_buf_append(out, blocks, n * sizeof(blocks[0]));
#else
    for (size_t i = 0; i < n; i++) {
        struct kv_block le = {htole64(blocks[i].hash), htole64(blocks[i].tokens_hash)};

        kv_buf_append(out, &le, sizeof(le));
    }
#endif
}

void kve_packed_write(struct kve_packed *p, struct kv_buf *out,
                      const struct kve_router_event *event)
{
    bool repeat = is_repeat(p, event);
    struct header h = {.worker = htole64(event->holder.worker),
                       .parent = htole64(event->has_parent ? event->parent : 0),
                       .rank = htole32(event->holder.rank),
                       .n = htole16((uint16_t)event->n),
                       .tier = (uint8_t)event->tier,
                       .flags =
                           (uint8_t)((event->has_parent ? PARENT : 0) | (repeat ? REPEAT : 0))};

    assert(event->type == KVE_OP_STORE && event->n && event->n <= KVE_PACKED_BLOCKS);
    kv_buf_append(out, &h, sizeof(h));
    if (!repeat)
        put_blocks(p, out, event->blocks, event->n);
}

void kve_packed_end(struct kv_buf *out)
{
    struct header h = {.n = 0};

    kv_buf_append(out, &h, sizeof(h));
}

/* -- reading ----------------------------------------------------------------------------------- */

static int fail(struct kv_json *json, const char *text)
{
    kv_json_fail(json, -EPROTO, text);
    return json->error.code;
}

static int take_blocks(struct kve_packed *p, struct kv_json *json, size_t n)
{
    struct kv_block *blocks = p->blocks[!p->last];
    const void *bytes = kv_json_raw_take(json, n * sizeof(blocks[0]));

    if (!bytes)
        return json->error.code;
    p->n = n;
    p->last = !p->last;
    memcpy(blocks, bytes, n * sizeof(blocks[0]));
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    for (size_t i = 0; i < n; i++)
        blocks[i] = (struct kv_block){le64toh(blocks[i].hash), le64toh(blocks[i].tokens_hash)};
#endif
    return 0;
}

int kve_packed_read(struct kve_packed *p, struct kv_json *json, struct kve_router_event *ret)
{
    const void *bytes = kv_json_raw_take(json, KVE_PACKED_HEADER);
    struct header h;
    size_t n;
    int rc;

    if (!bytes)
        return json->error.code;
    memcpy(&h, bytes, sizeof(h));
    n = le16toh(h.n);
    if (n > KVE_PACKED_BLOCKS || h.tier >= KV_N_TIERS || h.flags & ~ALL_FLAGS)
        return fail(json, "a packed event that makes no sense");
    if (n == 0)
        return 0;
    if (h.flags & REPEAT) {
        if (n > p->n)
            return fail(json, "a packed event repeats blocks that aren't there");
    } else {
        rc = take_blocks(p, json, n);
        if (rc < 0)
            return rc;
    }
    *ret = (struct kve_router_event){
        .holder = {.worker = le64toh(h.worker), .rank = le32toh(h.rank)},
        .type = KVE_OP_STORE,
        .tier = (enum kv_tier)h.tier,
        .has_parent = h.flags & PARENT,
        .parent = le64toh(h.parent),
        .blocks = p->blocks[p->last],
        .n = n,
    };
    return 1;
}
