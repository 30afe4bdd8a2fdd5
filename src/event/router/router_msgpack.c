// SPDX-License-Identifier: Apache-2.0
/*
 * Publishers write events, and the blocks in them, in one form each. read_usual and read_usual_block
 * read these by comparing the fixed bytes; other forms, and all that is left out, go member by member.
 */
#include "event/router/router_msgpack.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

#include "event/wire/media.h"
#include "event/wire/raw_fields.h"

#define MIN_BLOCK_BYTES 26 /* of the two hashes' names and the shortest numbers */

/* An event being read: skip becomes the first reason for leaving it out. */
struct reading {
    struct kv_msgpack *m;
    struct kve_router_scratch *scratch;
    struct kve_router_event ev;
    int skip;
};

static void leave_out(struct reading *r, int why)
{
    r->skip = r->skip ? r->skip : why;
}

/* Read a key; any other value than a string is passed over. */
static struct kv_str read_key(struct kv_msgpack *m)
{
    struct kv_str none = {"", 0};

    if (KV_LIKELY(kv_msgpack_peek(m) == KV_MSGPACK_STR))
        return kve_take_str(m);
    kv_msgpack_skip(m);
    return none;
}

/* -- blocks ------------------------------------------------------------------------------------ */

static inline bool pass(const uint8_t **p, const char *text, size_t len)
{
    if (memcmp(*p, text, len) != 0)
        return false;
    *p += len;
    return true;
}
#define PASS(p, text) pass(p, text, sizeof(text) - 1)

/* Read a hash in its most frequent forms: 64 bits, or below 128. */
static inline bool take_hash(const uint8_t **p, uint64_t *ret)
{
    if (KV_LIKELY(**p == 0xcf)) {
        memcpy(ret, *p + 1, sizeof(*ret));
        *ret = be64toh(*ret);
        *p += 9;
        return true;
    }
    *ret = **p;
    return *(*p)++ < 0x80;
}

#define USUAL_BLOCK_BYTES 57 /* longest that read_usual_block takes */

static inline bool read_usual_block(struct kv_msgpack *m, struct kv_block *ret)
{
    const uint8_t *p = m->p;
    struct kv_block block;

    if (m->end - p < USUAL_BLOCK_BYTES ||
        !PASS(&p, "\x83\xaa"
                  "block_hash") ||
        !take_hash(&p, &block.hash) ||
        !PASS(&p, "\xab"
                  "tokens_hash") ||
        !take_hash(&p, &block.tokens_hash) ||
        !PASS(&p, "\xad"
                  "mm_extra_info\xc0"))
        return false;
    m->p = p;
    *ret = block;
    return true;
}

static struct kv_block read_block(struct reading *r)
{
    bool has_hash = false, has_tokens = false;
    struct kv_block block = {0};

    for (uint32_t n = kv_msgpack_map(r->m); n && !kv_msgpack_failed(r->m); n--) {
        struct kv_str key = read_key(r->m);

        if (kv_str_eq(key, "block_hash")) {
            block.hash = kv_msgpack_bits64(r->m);
            has_hash = true;
        } else if (kv_str_eq(key, "tokens_hash")) {
            block.tokens_hash = kv_msgpack_bits64(r->m);
            has_tokens = true;
        } else {
            kv_msgpack_skip(r->m);
        }
    }
    if (!has_hash || !has_tokens)
        leave_out(r, KVE_SKIP_RC(MALFORMED));
    return block;
}

/* Make room for @n items of @bytes each. Returns false, with the reason, when there is none. */
static bool reserve(struct reading *r, uint32_t n, size_t bytes)
{
    struct kv_buf *items = &r->scratch->items;

    kv_buf_clear(items);
    if (kv_buf_reserve(items, n * bytes) == 0)
        return true;
    leave_out(r, items->error == -ENOMEM ? -ENOMEM : KVE_SKIP_RC(TOO_LARGE));
    kv_buf_clear(items);
    return false;
}

static void read_blocks(struct reading *r)
{
    uint32_t n = kv_msgpack_array(r->m);
    struct kv_block *blocks;

    if ((size_t)(r->m->end - r->m->p) / MIN_BLOCK_BYTES < n) {
        leave_out(r, KVE_SKIP_RC(MALFORMED));
        return;
    }
    if (!reserve(r, n, sizeof(*blocks)))
        return;
    blocks = (struct kv_block *)(void *)r->scratch->items.data;
    for (uint32_t i = 0; i < n && !kv_msgpack_failed(r->m); i++)
        if (!KV_LIKELY(read_usual_block(r->m, &blocks[i])))
            blocks[i] = read_block(r);
    r->scratch->items.len = n * sizeof(*blocks);
    r->ev.n = n;
}

/* -- data -------------------------------------------------------------------------------------- */

static void read_stored(struct reading *r)
{
    bool has_blocks = false;

    r->ev.type = KVE_OP_STORE;
    for (uint32_t n = kv_msgpack_map(r->m); n && !kv_msgpack_failed(r->m) && !r->skip; n--) {
        struct kv_str key = read_key(r->m);

        if (kv_str_eq(key, "parent_hash")) {
            r->ev.has_parent = !kv_msgpack_nil(r->m);
            r->ev.parent = r->ev.has_parent ? kv_msgpack_bits64(r->m) : 0;
        } else if (kv_str_eq(key, "blocks")) {
            read_blocks(r);
            has_blocks = true;
        } else {
            kv_msgpack_skip(r->m);
        }
    }
    if (!has_blocks)
        leave_out(r, KVE_SKIP_RC(MALFORMED));
}

static void read_hashes(struct reading *r)
{
    uint32_t n = kv_msgpack_array(r->m);
    uint64_t *hashes;

    if (!reserve(r, n, sizeof(*hashes)))
        return;
    hashes = (uint64_t *)(void *)r->scratch->items.data;
    for (uint32_t i = 0; i < n; i++)
        hashes[i] = kv_msgpack_bits64(r->m);
    r->scratch->items.len = n * sizeof(*hashes);
    r->ev.n = n;
}

static void read_removed(struct reading *r)
{
    bool has_hashes = false;

    r->ev.type = KVE_OP_REMOVE;
    for (uint32_t n = kv_msgpack_map(r->m); n && !kv_msgpack_failed(r->m) && !r->skip; n--) {
        if (kv_str_eq(read_key(r->m), "block_hashes")) {
            read_hashes(r);
            has_hashes = true;
        } else {
            kv_msgpack_skip(r->m);
        }
    }
    if (!has_hashes)
        leave_out(r, KVE_SKIP_RC(MALFORMED));
}

/* Read "cleared", or a map of one member: stored, removed or cleared. */
static void read_data(struct reading *r)
{
    bool is_map = kv_msgpack_peek(r->m) == KV_MSGPACK_MAP;
    struct kv_str kind;

    if (is_map && kv_msgpack_map(r->m) != 1) {
        leave_out(r, KVE_SKIP_RC(MALFORMED));
        return;
    }
    kind = kv_msgpack_str(r->m);
    r->ev.type = KVE_OP_CLEAR;
    if (is_map && kv_str_eq(kind, "stored"))
        read_stored(r);
    else if (is_map && kv_str_eq(kind, "removed"))
        read_removed(r);
    else if (!kv_str_eq(kind, "cleared"))
        leave_out(r, kv_msgpack_failed(r->m) ? KVE_SKIP_RC(MALFORMED) : KVE_SKIP_RC(UNKNOWN_TYPE));
    else if (is_map)
        kv_msgpack_skip(r->m);
}

static void read_rank(struct reading *r)
{
    uint64_t rank = kv_msgpack_nil(r->m) ? 0 : kv_msgpack_u64(r->m);

    if (rank > UINT32_MAX)
        leave_out(r, KVE_SKIP_RC(MALFORMED));
    r->ev.holder.rank = (uint32_t)rank;
}

/*
 * Data that can't be used is passed over, so that the rank behind it is read: the caller says whose
 * blocks are in doubt.
 */
static void read_inner(struct reading *r)
{
    bool has_data = false;

    for (uint32_t n = kv_msgpack_map(r->m); n && !kv_msgpack_failed(r->m); n--) {
        struct kv_str key = read_key(r->m);
        struct kv_msgpack before = *r->m;

        if (kv_str_eq(key, "event_id")) {
            r->ev.event_id = kv_msgpack_u64(r->m);
        } else if (kv_str_eq(key, "dp_rank")) {
            read_rank(r);
        } else if (kv_str_eq(key, "data")) {
            has_data = true;
            read_data(r);
            if (r->skip || kv_msgpack_failed(r->m)) {
                leave_out(r, KVE_SKIP_RC(MALFORMED));
                *r->m = before;
                kv_msgpack_skip(r->m);
            }
        } else {
            kv_msgpack_skip(r->m);
        }
    }
    if (!has_data)
        leave_out(r, KVE_SKIP_RC(MALFORMED));
}

/* -- an event ---------------------------------------------------------------------------------- */

static void read_tier(struct reading *r)
{
    const struct kve_medium *medium;
    struct kv_str name;

    r->ev.tier = KV_TIER_DEVICE;
    if (kv_msgpack_nil(r->m))
        return;
    name = kve_take_str(r->m);
    if (KV_LIKELY(kv_str_eq(name, "device")))
        return;
    medium = kve_medium_find(name);
    if (medium)
        r->ev.tier = medium->tier;
    else
        leave_out(r, KVE_SKIP_RC(MEDIUM));
}

static void read_residency(struct reading *r)
{
    if (!kv_msgpack_nil(r->m) && !kv_str_eq(kv_msgpack_str(r->m), "worker"))
        leave_out(r, KVE_SKIP_RC(REMOTE));
}

/* -- the usual form ---------------------------------------------------------------------------- */

/* Pass over fixed bytes. Returns false, at the same place, where others stand. */
static inline bool pass_fixed(struct kv_msgpack *m, const char *text, size_t len)
{
    const uint8_t *p = m->p;

    if ((size_t)(m->end - p) < len || !pass(&p, text, len))
        return false;
    m->p = p;
    return true;
}
#define PASS_FIXED(m, text) pass_fixed(m, text, sizeof(text) - 1)

static inline uint64_t take_u64(struct kv_msgpack *m)
{
    const uint8_t *p = m->p;
    uint64_t value;

    if (m->end - p < 9 || !take_hash(&p, &value))
        return kve_take_u64(m);
    m->p = p;
    return value;
}

/* Read {"stored": ...} or {"removed": ...}, behind the number of their members. */
static bool read_usual_data(struct reading *r)
{
    if (PASS_FIXED(r->m, "\xa7removed\x81\xac"
                         "block_hashes")) {
        r->ev.type = KVE_OP_REMOVE;
        read_hashes(r);
        return true;
    }
    if (!PASS_FIXED(r->m, "\xa6stored\x83\xabparent_hash"))
        return false;
    r->ev.type = KVE_OP_STORE;
    r->ev.has_parent = !kv_msgpack_nil(r->m);
    r->ev.parent = r->ev.has_parent ? take_u64(r->m) : 0;
    if (!PASS_FIXED(r->m, "\xaestart_position\xc0\xa6"
                          "blocks"))
        return false;
    read_blocks(r);
    return true;
}

/* Read a whole event of the form that is written here. Returns false for any other: nothing counts then. */
static bool read_usual(struct reading *r)
{
    if (!PASS_FIXED(r->m, "\x84\xa9worker_id"))
        return false;
    r->ev.holder.worker = take_u64(r->m);
    if (!PASS_FIXED(r->m, "\xacstorage_tier"))
        return false;
    read_tier(r);
    if (!PASS_FIXED(r->m, "\xb0residency_domain\xa6worker\xa5"
                          "event\x83\xa8"
                          "event_id"))
        return false;
    r->ev.event_id = take_u64(r->m);
    if (!PASS_FIXED(r->m, "\xa4"
                          "data\x81") ||
        !read_usual_data(r) ||
        !PASS_FIXED(r->m, "\xa7"
                          "dp_rank"))
        return false;
    read_rank(r);
    return !r->skip && !kv_msgpack_failed(r->m);
}

/* -- an event in any form ---------------------------------------------------------------------- */

static void read_any(struct reading *r)
{
    struct kv_msgpack *m = r->m;
    bool has_worker = false, has_event = false;

    for (uint32_t n = kv_msgpack_map(m); n && !kv_msgpack_failed(m); n--) {
        struct kv_str key = read_key(m);

        if (kv_str_eq(key, "worker_id")) {
            r->ev.holder.worker = kv_msgpack_u64(m);
            has_worker = true;
        } else if (kv_str_eq(key, "storage_tier")) {
            read_tier(r);
        } else if (kv_str_eq(key, "residency_domain")) {
            read_residency(r);
        } else if (kv_str_eq(key, "event")) {
            read_inner(r);
            has_event = true;
        } else {
            kv_msgpack_skip(m);
        }
    }
    if (!has_worker || !has_event || kv_msgpack_failed(m))
        leave_out(r, KVE_SKIP_RC(MALFORMED));
}

int kve_router_event_unpack(struct kv_msgpack *m, struct kve_router_scratch *scratch,
                            struct kve_router_event *ret)
{
    struct reading r = {.m = m, .scratch = scratch};
    const uint8_t *before = m->p;

    if (!KV_LIKELY(read_usual(&r))) {
        if (r.skip == -ENOMEM)
            return -ENOMEM;
        m->p = before;
        m->error.code = 0;
        r = (struct reading){.m = m, .scratch = scratch};
        read_any(&r);
    }
    if (r.ev.type == KVE_OP_STORE)
        r.ev.blocks = (const struct kv_block *)(const void *)scratch->items.data;
    else if (r.ev.type == KVE_OP_REMOVE)
        r.ev.hashes = (const uint64_t *)(const void *)scratch->items.data;
    *ret = r.ev;
    return r.skip;
}

/* -- writing ----------------------------------------------------------------------------------- */

static void pack_stored(struct kv_buf *out, const struct kve_router_event *ev)
{
    kv_msgpack_put_map(out, 1);
    kv_msgpack_put_str(out, "stored");
    kv_msgpack_put_map(out, 3);
    kv_msgpack_put_str(out, "parent_hash");
    if (ev->has_parent)
        kv_msgpack_put_u64(out, ev->parent);
    else
        kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "start_position");
    kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "blocks");
    kv_msgpack_put_array(out, (uint32_t)ev->n);
    for (size_t i = 0; i < ev->n; i++) {
        kv_msgpack_put_map(out, 3);
        kv_msgpack_put_str(out, "block_hash");
        kv_msgpack_put_u64(out, ev->blocks[i].hash);
        kv_msgpack_put_str(out, "tokens_hash");
        kv_msgpack_put_u64(out, ev->blocks[i].tokens_hash);
        kv_msgpack_put_str(out, "mm_extra_info");
        kv_msgpack_put_nil(out);
    }
}

static void pack_removed(struct kv_buf *out, const struct kve_router_event *ev)
{
    kv_msgpack_put_map(out, 1);
    kv_msgpack_put_str(out, "removed");
    kv_msgpack_put_map(out, 1);
    kv_msgpack_put_str(out, "block_hashes");
    kv_msgpack_put_array(out, (uint32_t)ev->n);
    kv_msgpack_put_u64s(out, ev->hashes, ev->n);
}

void kve_router_event_pack(struct kv_buf *out, const struct kve_router_event *ev)
{
    kv_msgpack_put_map(out, 4);
    kv_msgpack_put_str(out, "worker_id");
    kv_msgpack_put_u64(out, ev->holder.worker);
    kv_msgpack_put_str(out, "storage_tier");
    kv_msgpack_put_str(out, kve_tier_name(ev->tier));
    kv_msgpack_put_str(out, "residency_domain");
    kv_msgpack_put_str(out, "worker");
    kv_msgpack_put_str(out, "event");
    kv_msgpack_put_map(out, 3);
    kv_msgpack_put_str(out, "event_id");
    kv_msgpack_put_u64(out, ev->event_id);
    kv_msgpack_put_str(out, "data");
    if (ev->type == KVE_OP_STORE)
        pack_stored(out, ev);
    else if (ev->type == KVE_OP_REMOVE)
        pack_removed(out, ev);
    else
        kv_msgpack_put_str(out, "cleared");
    kv_msgpack_put_str(out, "dp_rank");
    kv_msgpack_put_u64(out, ev->holder.rank);
}
