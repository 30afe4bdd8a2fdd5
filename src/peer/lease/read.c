// SPDX-License-Identifier: Apache-2.0
/*
 * The bytes of leased blocks. From shared memory: copy, then look at the block's generation. Through
 * a session or a carrier: several requests under way, each of whole blocks, which are verified once their
 * call has ended and nothing writes there any more.
 */
#include <unistd.h>

#include "base/core/clock.h"
#include "peer/lease/borrow.h"
#include "peer/lease/lease_wire.h"
#include "peer/session/agent.h"

#define UNDER_WAY 4            /* requests at a time */
#define BATCH_BYTES (1u << 20) /* of a request, unless a block is longer or a carrier brings it */
#define MAX_BATCH_PIECES 16384ull /* regions of a request */

static uint32_t place_of(const struct kvbm_reading *reading, uint32_t i)
{
    return reading->places ? reading->places[i] : i;
}

static void mark(const struct kvbm_reading *reading, uint32_t i)
{
    if (reading->ok)
        reading->ok[i / 8] |= (uint8_t)(1u << i % 8);
}

static bool is_contiguous(const struct kvbm_layout *layout)
{
    return layout->shape.kind == KVBM_FULLY_CONTIGUOUS;
}

/* ---- shared memory ---- */

static void copy_block(const struct kvbm_reading *reading, uint32_t from_block, uint32_t to_block)
{
    const struct kvbm_layout *theirs = reading->lease->mapped->layout;
    struct kvbm_view from, to;

    if (is_contiguous(theirs) && is_contiguous(reading->to)) {
        (void)kvbm_layout_block(theirs, from_block, &from);
        (void)kvbm_layout_block(reading->to, to_block, &to);
        memcpy((void *)(uintptr_t)to.addr, (const void *)(uintptr_t)from.addr, to.len);
        return;
    }
    for (uint32_t layer = 0; layer < theirs->config.num_layers; layer++) {
        for (uint32_t outer = 0; outer < theirs->config.outer_dim; outer++) {
            (void)kvbm_layout_region(theirs, from_block, layer, outer, &from);
            (void)kvbm_layout_region(reading->to, to_block, layer, outer, &to);
            memcpy((void *)(uintptr_t)to.addr, (const void *)(uintptr_t)from.addr, to.len);
        }
    }
}

long kvbm_read_shared(const struct kvbm_reading *reading)
{
    const struct kvbm_lease *lease = reading->lease;
    long right = 0;

    for (uint32_t i = 0; i < reading->n && kv_now_ns() < reading->deadline_ns; i++) {
        uint32_t place = place_of(reading, i), block = lease->blocks[place];

        if (block == KVBM_NO_BLOCK)
            continue;
        copy_block(reading, block, reading->to_blocks[i]);
        if (!kvbm_lease_is_intact(lease, place))
            continue;
        mark(reading, i);
        right++;
    }
    return right;
}

/* ---- through the session ---- */

/* A request for some of the blocks. */
struct batch {
    uint32_t first, end; /* of the reading's pairs; those without a block are left out */
    uint32_t n;
    struct kvbm_call *call; /* NULL: none */
    uint32_t *pairs;        /* [max_blocks] */
    uint32_t *places;       /* [max_blocks] */
    uint8_t *sums;          /* [max_blocks * KVBM_SUM_BYTES] */
    struct iovec *pieces;
    struct kvbm_carrier_message *messages; /* [max_blocks]; NULL without a carrier */
    struct kvbm_carrier_receive *receive;  /* NULL: none */
};

static uint32_t blocks_in_batch(const struct kvbm_reading *reading)
{
    const struct kvbm_layout_shape *shape = &reading->to->shape;
    uint64_t regions = (uint64_t)reading->to->config.num_layers * reading->to->config.outer_dim;
    uint64_t bytes = reading->by ? KVBM_MAX_PUSH_BYTES : BATCH_BYTES;
    uint64_t n = bytes / KV_MAX(shape->region_bytes * regions, UINT64_C(1));

    n = KV_MIN(n, MAX_BATCH_PIECES / regions);
    n = KV_MIN(n, (uint64_t)KVBM_MAX_ASKED);
    n = KV_MIN(n, (uint64_t)reading->n);
    return (uint32_t)KV_MAX(n, UINT64_C(1));
}

static size_t add_block(const struct kvbm_layout *to, uint32_t block, struct iovec *pieces)
{
    struct kvbm_view view;
    size_t n = 0;

    if (is_contiguous(to)) {
        (void)kvbm_layout_block(to, block, &view);
        pieces[0] = (struct iovec){(void *)(uintptr_t)view.addr, view.len};
        return 1;
    }
    for (uint32_t layer = 0; layer < to->config.num_layers; layer++) {
        for (uint32_t outer = 0; outer < to->config.outer_dim; outer++) {
            (void)kvbm_layout_region(to, block, layer, outer, &view);
            pieces[n++] = (struct iovec){(void *)(uintptr_t)view.addr, view.len};
        }
    }
    return n;
}

/* Choose the next blocks for a batch, from pair @first on. */
static void choose(const struct kvbm_reading *reading, uint32_t first, uint32_t max,
                   struct batch *batch)
{
    batch->n = 0;
    for (batch->end = first; batch->end < reading->n && batch->n < max; batch->end++) {
        uint32_t place = place_of(reading, batch->end);

        if (reading->lease->blocks[place] == KVBM_NO_BLOCK)
            continue;
        batch->pairs[batch->n] = batch->end;
        batch->places[batch->n++] = place;
    }
}

/* Ask for a batch by a carrier, whose memory is there before the request leaves. */
static int begin_push(const struct kvbm_reading *reading, struct batch *batch)
{
    const struct kvbm_carrier *by = reading->by;
    const struct iovec sums = {batch->sums, (size_t)batch->n * KVBM_SUM_BYTES};
    struct kv_buf body = KV_BUF_INIT;
    struct iovec *pieces = batch->pieces;
    uint64_t tag;
    int err;

    for (uint32_t i = 0; i < batch->n; i++) {
        size_t n = add_block(reading->to, reading->to_blocks[batch->pairs[i]], pieces);

        batch->messages[i] = (struct kvbm_carrier_message){pieces, n};
        pieces += n;
    }
    err = by->abi->receive_start(by->node, batch->messages, batch->n, &tag, &batch->receive);
    if (err < 0)
        return err;
    kvbm_pushed_write(&body, reading->lease->id, reading->sums, tag, batch->places, batch->n);
    err = body.error
              ? body.error
              : kvbm_call_start(reading->lease->session, reading->push, body.data, body.len, -1,
                                reading->sums ? &sums : NULL, reading->sums, &batch->call);
    if (err < 0) {
        (void)by->abi->receive_end(KV_STEAL(batch->receive), false, 0);
        if (by->abi->receive_over) /* nobody was asked */
            by->abi->receive_over(by->node, tag);
    }
    kv_buf_fini(&body);
    return err;
}

/* Ask for a batch. Returns 0 or a negative errno. */
static int begin(const struct kvbm_reading *reading, struct batch *batch)
{
    struct kv_buf body = KV_BUF_INIT;
    size_t n = 0;
    int err;

    kvbm_wanted_write(&body, reading->lease->id, reading->sums, batch->places, batch->n);
    if (reading->sums)
        batch->pieces[n++] = (struct iovec){batch->sums, (size_t)batch->n * KVBM_SUM_BYTES};
    for (uint32_t i = 0; i < batch->n; i++)
        n += add_block(reading->to, reading->to_blocks[batch->pairs[i]], batch->pieces + n);
    err = body.error ? body.error
                     : kvbm_call_start(reading->lease->session, KVBM_ASK_READ, body.data, body.len,
                                       -1, batch->pieces, n, &batch->call);
    kv_buf_fini(&body);
    return err;
}

static bool sum_is_right(const struct kvbm_layout *to, uint32_t block, const uint8_t *sum)
{
    struct kvbm_view view;
    XXH3_state_t state;
    uint8_t got[KVBM_SUM_BYTES];

    if (is_contiguous(to)) {
        (void)kvbm_layout_block(to, block, &view);
        kv_hash((void *)(uintptr_t)view.addr, view.len, got);
        return memcmp(got, sum, sizeof(got)) == 0;
    }
    XXH3_INITSTATE(&state);
    (void)XXH3_128bits_reset(&state);
    for (uint32_t layer = 0; layer < to->config.num_layers; layer++) {
        for (uint32_t outer = 0; outer < to->config.outer_dim; outer++) {
            (void)kvbm_layout_region(to, block, layer, outer, &view);
            kv_hash_update(&state, (void *)(uintptr_t)view.addr, view.len);
        }
    }
    kv_hash_done(&state, got);
    return memcmp(got, sum, sizeof(got)) == 0;
}

/* Wait for the bytes of a batch. Returns 0 when all are here, or why they aren't. */
static int await(const struct kvbm_reading *reading, struct batch *batch)
{
    const struct kvbm_layout_shape *shape = &reading->to->shape;
    uint64_t block_bytes = reading->by ? 0
                                       : shape->region_bytes * reading->to->config.num_layers *
                                             reading->to->config.outer_dim;
    struct kvbm_reply reply = {.fd = -1};
    long len = kvbm_call_wait(KV_STEAL(batch->call), reading->deadline_ns, &reply);
    int err = len < 0 ? (int)len : KV_MIN(reply.status, 0);

    if (len >= 0)
        kvbm_reply_fini(&reply);
    if (err == 0 &&
        (uint64_t)len != batch->n * (block_bytes + (reading->sums ? KVBM_SUM_BYTES : 0)))
        err = -EPROTO;
    if (batch->receive) { /* the owner has answered once all was sent: little is missing */
        int received =
            reading->by->abi->receive_end(KV_STEAL(batch->receive), err == 0, reading->deadline_ns);

        err = err < 0 ? err : received;
    }
    return err;
}

/* Wait for a batch, and verify what it brought. Returns the number of right blocks, or an error. */
static long end(const struct kvbm_reading *reading, struct batch *batch)
{
    int err = await(reading, batch);
    long right = 0;

    for (uint32_t i = 0; i < batch->n && err == 0; i++) {
        uint32_t pair = batch->pairs[i];

        if (reading->sums && !sum_is_right(reading->to, reading->to_blocks[pair],
                                           batch->sums + (size_t)i * KVBM_SUM_BYTES))
            continue;
        mark(reading, pair);
        right++;
    }
    return err < 0 ? err : right;
}

static void free_batches(struct batch *batches)
{
    for (uint32_t i = 0; i < UNDER_WAY; i++) {
        free(batches[i].pairs);
        free(batches[i].places);
        free(batches[i].sums);
        free(batches[i].pieces);
        free(batches[i].messages);
    }
}

static int make_batches(const struct kvbm_reading *reading, uint32_t max, struct batch *batches)
{
    size_t regions = is_contiguous(reading->to)
                         ? 1
                         : (size_t)reading->to->config.num_layers * reading->to->config.outer_dim;

    memset(batches, 0, UNDER_WAY * sizeof(*batches));
    for (uint32_t i = 0; i < UNDER_WAY; i++) {
        batches[i].pairs = malloc(max * sizeof(*batches->pairs));
        batches[i].places = malloc(max * sizeof(*batches->places));
        batches[i].sums = malloc((size_t)max * KVBM_SUM_BYTES);
        batches[i].pieces = malloc((max * regions + 1) * sizeof(*batches->pieces));
        if (reading->by)
            batches[i].messages = malloc(max * sizeof(*batches->messages));
        if (!batches[i].pairs || !batches[i].places || !batches[i].sums || !batches[i].pieces ||
            (reading->by && !batches[i].messages))
            return -ENOMEM;
    }
    return 0;
}

/* Progress of a reading through its batches, which are begun and ended in turn. */
struct progress {
    uint32_t next; /* pair that isn't asked for */
    uint32_t begun, ended;
    int err; /* of the first request that has failed */
    long right;
};

/* Ask for the next blocks. Returns true when there was room: ask again. */
static bool ask_more(const struct kvbm_reading *reading, uint32_t max, struct batch *batches,
                     struct progress *p)
{
    struct batch *batch = &batches[p->begun % UNDER_WAY];
    int err;

    if (p->err < 0 || p->next == reading->n || p->begun - p->ended == UNDER_WAY)
        return false;
    choose(reading, p->next, max, batch);
    err = !batch->n ? 0 : reading->by ? begin_push(reading, batch) : begin(reading, batch);
    if (err == -EAGAIN) { /* others of this process have as many under way as the peer allows */
        if (p->begun == p->ended && kv_now_ns() < reading->deadline_ns)
            usleep(200);
        p->err = kv_now_ns() >= reading->deadline_ns ? -ETIMEDOUT : 0;
        return p->begun == p->ended;
    }
    if (err == -ENOBUFS && p->begun > p->ended)
        return false; /* the carrier has room again once this reading's own requests have ended */
    p->err = KV_MIN(err, 0); /* the session has ended */
    p->next = batch->end;
    p->begun += batch->n && err == 0;
    return true;
}

/* Keep requests under way until all pairs are asked for, or one has failed: *@why. */
static long run_batches(const struct kvbm_reading *reading, uint32_t max, struct batch *batches,
                        int *why)
{
    struct progress p = {0};

    for (;;) {
        struct batch *oldest;
        long n;

        while (ask_more(reading, max, batches, &p))
            ;
        if (p.ended == p.begun) {
            *why = p.err;
            return p.right;
        }
        oldest = &batches[p.ended++ % UNDER_WAY];
        if (p.err < 0)
            kvbm_call_cancel(oldest->call);
        n = end(reading, oldest);
        p.err = p.err < 0 ? p.err : (int)KV_MIN(n, 0l);
        p.right += KV_MAX(n, 0l);
    }
}

long kvbm_read_sent(const struct kvbm_reading *reading, int *why)
{
    uint32_t max = blocks_in_batch(reading);
    struct batch batches[UNDER_WAY];
    int err = 0;
    long rc = make_batches(reading, max, batches);

    if (rc == 0)
        rc = run_batches(reading, max, batches, why ? why : &err);
    free_batches(batches);
    return rc;
}
