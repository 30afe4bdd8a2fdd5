// SPDX-License-Identifier: Apache-2.0
/**
 * An owner that lends blocks, and two readers that are the fuzzer. The input is a list of steps; the
 * fuzzer keeps what it was told, so that later steps can name leases that there are. The bytes of a
 * block follow from its key:
 *
 *   whatever an answer calls the block of a key has the bytes of that key
 *   once both readers have gone, the owner holds no block for anybody
 */
#ifndef KV_FUZZ_LENDING_H
#define KV_FUZZ_LENDING_H

#include "agents.h"
#include "base/core/le.h"
#include "kvbm_lease.h"
#include "peer/lease/lease_wire.h"
#include "peer/lease/lend.h"

enum {
    LEND_BLOCKS = 16,
    LEND_KEYS = 64,
    LEND_BLOCK_BYTES = 1024,
    LEND_MOST = 8,    /* keys of a lease, places of a read */
    LEND_LEASES = 16, /* that a reader remembers */
    LEND_ASKED = 16   /* requests whose answers it remembers */
};

/** A lease as its reader knows it. */
struct lend_lease {
    uint64_t id;
    uint32_t n;
    uint8_t keys[LEND_MOST]; /* 0: no block */
};

/** A request under way. */
struct lend_asked {
    uint64_t id; /* 0: none */
    uint16_t type;
    bool sums;
    uint32_t n;
    uint8_t keys[LEND_MOST];
};

struct lend_reader {
    int fd;
    uint64_t last_id;
    struct lend_lease leases[LEND_LEASES];
    uint32_t n_leases;
    struct lend_asked asked[LEND_ASKED];
    uint8_t heard[1 << 16];
    size_t n_heard;
};

struct lend {
    struct kvbm_agent *agent;
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    struct kvbm_layout *layout;
    struct kvbm_blockset *set;
    uint64_t generation;
    struct lend_reader readers[2];
};

/** Input that isn't used yet; behind its end are zeros. */
struct lend_input {
    const uint8_t *at, *end;
};

static inline uint8_t lend_next(struct lend_input *in)
{
    return in->at < in->end ? *in->at++ : 0;
}

/* ---- blocks ---- */

static inline uint8_t lend_byte(uint8_t key, size_t i)
{
    return (uint8_t)(key * 37u + i * 3u + (i >> 8) * 11u);
}

static inline bool lend_is_block(uint8_t key, const uint8_t *bytes)
{
    for (size_t i = 0; i < LEND_BLOCK_BYTES; i++) {
        if (bytes[i] != lend_byte(key, i))
            return false;
    }
    return true;
}

/** Store a key, evicting another. Nothing happens when all blocks are leased. */
static inline void lend_store(struct lend *l, uint8_t number)
{
    uint64_t key = number;
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = &key, .scattered = true};
    struct kvbm_mutable block;
    struct kvbm_complete complete;
    struct kvbm_immutable held;
    struct kvbm_view view;

    if (kvbm_pool_allocate(l->pool, 1, &block, NULL) < 0)
        return;
    REQUIRE(kvbm_layout_block(l->layout, block.handle.block, &view) == 0);
    REQUIRE(view.len == LEND_BLOCK_BYTES);
    for (size_t i = 0; i < LEND_BLOCK_BYTES; i++)
        ((uint8_t *)(uintptr_t)view.addr)[i] = lend_byte(number, i);
    REQUIRE(kvbm_pool_complete(l->pool, &block, 1, &chain, &complete) == 0);
    REQUIRE(kvbm_pool_register(l->pool, &complete, 1, &held) == 0);
    (void)kvbm_immutable_release(&held);
}

static inline struct kvbm_blockset_opts lend_what(struct lend *l, struct kvbm_block_source *source)
{
    *source = kvbm_pool_source(l->pool);
    return (struct kvbm_blockset_opts){.size = sizeof(struct kvbm_blockset_opts),
                                       .id = 1,
                                       .layout = l->layout,
                                       .source = source,
                                       .lease_share = 50};
}

static inline void lend_begin(struct lend *l)
{
    const struct kvbm_layout_config config = {.size = sizeof(config),
                                              .kind = KVBM_FULLY_CONTIGUOUS,
                                              .num_blocks = LEND_BLOCKS,
                                              .num_layers = 2,
                                              .outer_dim = 2,
                                              .page_size = 4,
                                              .inner_dim = 32,
                                              .dtype_width_bytes = 2};
    const struct kvbm_storage_opts storage = {.size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM};
    struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_pool_opts pool = {.size = sizeof(pool),
                                  .tier = KV_TIER_HOST,
                                  .n_blocks = LEND_BLOCKS,
                                  .block_size = config.page_size};
    struct kvbm_blockset_opts what;
    struct kvbm_block_source source;

    l->agent = fuzz_agent("owner", 1);
    REQUIRE(kvbm_layout_allocate(&config, &allocator, &l->layout) == 0);
    pool.layout = l->layout;
    REQUIRE(kvbm_registry_create(NULL, &l->registry) == 0);
    REQUIRE(kvbm_pool_create(l->registry, &pool, &l->pool) == 0);
    what = lend_what(l, &source);
    REQUIRE(kvbm_blockset_export(l->agent, &what, &l->set) == 0);
    l->generation = 1;
}

/* ---- what the owner says ---- */

static inline void lend_told(struct lend_reader *r, const struct lend_asked *asked,
                             const uint8_t *body, size_t len)
{
    struct lend_lease *lease = &r->leases[r->n_leases++ % LEND_LEASES];
    struct kvbm_told told;

    REQUIRE(kvbm_told_read(body, len, asked->n, &told) == 0 && told.n <= asked->n);
    *lease = (struct lend_lease){.id = told.id, .n = told.n};
    for (uint32_t i = 0; i < told.n; i++) {
        uint32_t block = (uint32_t)kv_get_le(told.blocks + (size_t)i * 4, 4);

        REQUIRE(block == UINT32_MAX || block < LEND_BLOCKS);
        lease->keys[i] = block == UINT32_MAX ? 0 : asked->keys[i];
    }
}

static inline void lend_got(const struct lend_asked *asked, const uint8_t *body, size_t len)
{
    size_t sums = asked->sums ? (size_t)asked->n * KVBM_SUM_BYTES : 0;

    REQUIRE(len == sums + (size_t)asked->n * LEND_BLOCK_BYTES);
    for (uint32_t i = 0; i < asked->n; i++)
        REQUIRE(lend_is_block(asked->keys[i], body + sums + (size_t)i * LEND_BLOCK_BYTES));
}

/* Take a frame. The owner's replies of this size are whole. */
static inline void lend_frame(struct lend_reader *r, const struct kvbm_frame *frame,
                              const uint8_t *body)
{
    if (!(frame->flags & KVBM_FRAME_REPLY) || !frame->id)
        return;
    for (size_t i = 0; i < LEND_ASKED; i++) {
        struct lend_asked *asked = &r->asked[i];

        if (asked->id != frame->id)
            continue;
        asked->id = 0;
        if (frame->status < 0 || frame->flags & KVBM_FRAME_CUT)
            return;
        REQUIRE(frame->type == asked->type && frame->len == frame->total);
        if (frame->type == KVBM_ASK_LEASE)
            lend_told(r, asked, body, frame->len);
        else if (frame->type == KVBM_ASK_READ)
            lend_got(asked, body, frame->len);
        return;
    }
}

static inline void lend_hear(struct lend *l, struct lend_reader *r)
{
    struct kvbm_frame frame;
    size_t at = 0;

    r->n_heard += fuzz_hear(l->agent, r->fd, r->heard + r->n_heard, sizeof(r->heard) - r->n_heard);
    while (r->n_heard - at >= KVBM_FRAME_BYTES) {
        REQUIRE(kvbm_frame_parse(r->heard + at, &frame) == 0);
        if (r->n_heard - at - KVBM_FRAME_BYTES < frame.len)
            break;
        lend_frame(r, &frame, r->heard + at + KVBM_FRAME_BYTES);
        at += KVBM_FRAME_BYTES + frame.len;
    }
    memmove(r->heard, r->heard + at, r->n_heard - at);
    r->n_heard -= at;
}

/* ---- what a reader says ---- */

static inline struct lend_asked *lend_ask(struct lend_reader *r, uint16_t type)
{
    struct lend_asked *asked = &r->asked[++r->last_id % LEND_ASKED];

    *asked = (struct lend_asked){.id = r->last_id, .type = type};
    return asked;
}

/** Send a request, and forget its body. */
static inline void lend_say(struct lend *l, struct lend_reader *r, uint16_t type,
                            struct kv_buf *body)
{
    REQUIRE(!body->error);
    fuzz_frame(l->agent, r->fd, type, r->last_id, body->data, body->len);
    kv_buf_fini(body);
}

static inline void lend_say_keys(struct lend *l, struct lend_reader *r, uint16_t type,
                                 struct lend_input *in)
{
    struct lend_asked *asked = lend_ask(r, type);
    struct kvbm_asked body = {.set = 1,
                              .n = 1 + lend_next(in) % LEND_MOST,
                              .generation = l->generation,
                              .time_ms = type == KVBM_ASK_LEASE ? 60000 : 0};
    struct kv_buf bytes = KV_BUF_INIT;
    uint8_t keys[LEND_MOST * 8] = {0};

    asked->n = body.n;
    for (uint32_t i = 0; i < body.n; i++)
        keys[i * 8] = asked->keys[i] = (uint8_t)(1 + lend_next(in) % LEND_KEYS);
    body.keys = keys;
    kvbm_asked_write(&bytes, &body, 8);
    lend_say(l, r, type, &bytes);
}

/** Choose one of the leases that a reader knows, perhaps of the other one or with a wrong number. */
static inline struct lend_lease lend_choose(struct lend *l, const struct lend_reader *r,
                                            struct lend_input *in)
{
    uint8_t choice = lend_next(in);
    const struct lend_reader *of = choice & 0x80 ? &l->readers[r == &l->readers[0]] : r;
    struct lend_lease lease = of->leases[choice % LEND_LEASES];

    lease.id += choice & 0x40 ? 1 : 0;
    return lease;
}

static inline void lend_say_lease(struct lend *l, struct lend_reader *r, uint16_t type,
                                  struct lend_input *in)
{
    struct lend_lease lease = lend_choose(l, r, in);
    struct kv_buf bytes = KV_BUF_INIT;

    (void)lend_ask(r, type);
    if (type == KVBM_ASK_RENEW)
        kvbm_renewal_write(&bytes, lease.id, lend_next(in) * 100u);
    else
        kvbm_number_write(&bytes, lease.id);
    lend_say(l, r, type, &bytes);
}

/** Write the places of a read: their keys become those of @asked. Returns their number. */
static inline uint32_t lend_places(const struct lend_lease *lease, struct lend_asked *asked,
                                   uint32_t places[LEND_MOST], struct lend_input *in)
{
    uint32_t n = 1 + lend_next(in) % LEND_MOST;

    asked->n = n;
    for (uint32_t i = 0; i < n; i++) {
        places[i] = lend_next(in) % (LEND_MOST + 1);
        asked->keys[i] = places[i] < LEND_MOST ? lease->keys[places[i]] : 0;
    }
    return n;
}

static inline void lend_say_read(struct lend *l, struct lend_reader *r, struct lend_input *in)
{
    struct lend_lease lease = lend_choose(l, r, in);
    struct lend_asked *asked = lend_ask(r, KVBM_ASK_READ);
    struct kv_buf bytes = KV_BUF_INIT;
    uint32_t places[LEND_MOST], n = lend_places(&lease, asked, places, in);

    asked->sums = lend_next(in) % 2;
    kvbm_wanted_write(&bytes, lease.id, asked->sums, places, n);
    lend_say(l, r, KVBM_ASK_READ, &bytes);
}

/** Say a frame of the fuzzer's own. */
static inline void lend_say_any(struct lend *l, struct lend_reader *r, struct lend_input *in)
{
    uint16_t type = (uint16_t)(1 + lend_next(in) % (KVBM_N_TYPES - 1));
    size_t len = lend_next(in), left = (size_t)(in->end - in->at);
    uint8_t choice = lend_next(in);

    left = (size_t)(in->end - in->at);
    len = KV_MIN(len, left);
    fuzz_frame(l->agent, r->fd, type, choice % 2 ? ++r->last_id : 0, in->at, len);
    in->at += len;
}

/* ---- steps ---- */

static inline void lend_open(struct lend *l, unsigned i)
{
    struct lend_reader *r = &l->readers[i];

    memset(r, 0, offsetof(struct lend_reader, heard));
    r->n_heard = 0;
    r->fd = fuzz_open(l->agent, i ? "second" : "first", 10 + i);
}

static inline void lend_update(struct lend *l)
{
    struct kvbm_block_source source;
    struct kvbm_blockset_opts what = lend_what(l, &source);

    REQUIRE(kvbm_blockset_update(l->set, &what) == 0);
    l->generation++;
    fuzz_turns(l->agent);
}

/** Do one step. */
static inline void lend_step(struct lend *l, struct lend_input *in)
{
    uint8_t step = lend_next(in);
    unsigned i = step >> 4 & 1;
    struct lend_reader *r = &l->readers[i];
    uint64_t back;

    switch (step & 15) {
    case 0:
    case 1:
    case 2:
        lend_say_keys(l, r, KVBM_ASK_LEASE, in);
        break;
    case 3:
        lend_say_keys(l, r, KVBM_ASK_LOOKUP, in);
        break;
    case 4:
    case 5:
    case 6:
        lend_say_read(l, r, in);
        break;
    case 7:
        lend_say_lease(l, r, KVBM_ASK_RELEASE, in);
        break;
    case 8:
        lend_say_lease(l, r, KVBM_ASK_RENEW, in);
        break;
    case 9:
        back = lend_next(in) % 8;
        if (r->last_id > back)
            fuzz_frame(l->agent, r->fd, KVBM_CANCEL, r->last_id - back, NULL, 0);
        break;
    case 10:
    case 11:
        lend_store(l, (uint8_t)(1 + lend_next(in) % LEND_KEYS));
        break;
    case 12:
        lend_update(l);
        break;
    case 13:
        lend_say_any(l, r, in);
        break;
    case 14:
        fuzz_hang_up(l->agent, r->fd);
        lend_open(l, i);
        break;
    default:
        break;
    }
    if (step < 0x80) /* else the answer stays where it is for a while */
        lend_hear(l, r);
}

/** Begin a conversation: both readers are there, and keys 1 to LEND_BLOCKS. */
static inline void lend_start(struct lend *l)
{
    for (uint8_t key = 1; key <= LEND_BLOCKS; key++)
        lend_store(l, key);
    lend_open(l, 0);
    lend_open(l, 1);
}

/** End both readers. */
static inline void lend_hang_up(struct lend *l)
{
    for (unsigned i = 0; i < 2; i++) {
        lend_hear(l, &l->readers[i]);
        fuzz_hang_up(l->agent, l->readers[i].fd);
    }
}

/** Require that the owner holds nothing, once both readers have gone. */
static inline void lend_check(struct lend *l)
{
    struct kvbm_pool_stats stats = KVBM_POOL_STATS_INIT;
    struct kvbm_lender_stats lent;

    kvbm_lender_get_stats(l->agent->lender, &lent);
    REQUIRE(lent.leases_now == 0 && lent.blocks_now == 0);
    REQUIRE(kvbm_pool_get_stats(l->pool, &stats) == 0 && stats.inflight_immutable == 0);
}

#endif
