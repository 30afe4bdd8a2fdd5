// SPDX-License-Identifier: Apache-2.0
/*
 * Read the parts of a plan. Each part has one remote rank:
 *
 *   keys ──► lease ──► shared memory: copier ──► to, then compare generations
 *                  └─► session: staging blocks (verified) ──► copier ──► to
 *
 * A thread takes one part after the other. A part notes which blocks it has placed; a block is right
 * when all parts have.
 */
#include <errno.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/thread/thread.h"
#include "bm/deadline.h"
#include "bm/ids.h"
#include "bm/storage/layout.h"
#include "kvbm_transfer.h"
#include "peer/lease/borrow.h"
#include "peer/plan/plan.h"

#define MAX_THREADS 16
#define MAX_LEASED 1024u       /* keys of a lease */
#define SLICE_BYTES (4u << 20) /* of a copy, unless a block is longer */
#define MAX_SLICE 64u          /* blocks of a copy */
#define DEADLINE_NS (10 * KV_NS_PER_S)
#define MAX_LEASE_MS 60000

struct reading {
    const struct kvbm_plan *plan;
    struct kvbm_plan_read_opts opts;
    size_t bitmap;       /* bytes for a bit of each block */
    uint8_t *placed;     /* [n_parts * bitmap] */
    _Atomic size_t next; /* part that no thread has taken */
};

/* One part, as its thread reads it. */
struct part {
    const struct reading *reading;
    const struct kvbm_plan_part *part;
    const struct plan_side *side; /* its rank's */
    const struct kvbm_plan_source *source;
    struct kvbm_layout *staging; /* NULL: not needed so far */
    uint32_t most;               /* blocks of a slice */
    uint8_t *placed;
};

/* Blocks that are copied together. */
struct slice {
    uint32_t n;
    uint32_t index[MAX_SLICE]; /* among the blocks of the call */
    uint32_t place[MAX_SLICE]; /* among the keys of the lease */
    uint32_t from[MAX_SLICE], to[MAX_SLICE];
};

static bool is_over(const struct reading *r)
{
    return kv_now_ns() >= r->opts.deadline_ns ||
           (r->opts.cancelled && r->opts.cancelled(r->opts.arg));
}

static bool bit(const uint8_t *bits, uint32_t i)
{
    return bits[i / 8] >> i % 8 & 1;
}

/* ---- copies ---- */

/* Submit a job; while the copier has no room, try again. Returns its id or an error. */
static int64_t submit(const struct reading *r, const struct kvbm_transfer *transfer)
{
    int64_t id = kvbm_copier_submit(r->opts.copier, transfer);

    while (id == -EAGAIN && !is_over(r)) {
        usleep(200);
        id = kvbm_copier_submit(r->opts.copier, transfer);
    }
    return id;
}

/* Copy a layout, and fill in what the plan has found out: the heads of its @side, and the @other side's
 * dtype where it has none. A copier guesses neither. */
static struct kvbm_layout *as_planned(const struct kvbm_layout *layout,
                                      const struct plan_side *side, const struct plan_side *other)
{
    size_t bytes = sizeof(*layout) + layout->n * sizeof(layout->places[0]);
    struct kvbm_layout *copy = malloc(bytes);

    if (!copy)
        return NULL;
    memcpy(copy, layout, bytes);
    copy->owns_storages = false;
    copy->config.num_heads = side->config.num_heads;
    if (!copy->config.dtype)
        copy->config.dtype = other->config.dtype;
    return copy;
}

/* Copy the heads of a part from @src to @dst. @ok: which blocks of the slice have them. */
static int copy_between(const struct part *p, const struct kvbm_layout *src,
                        const struct kvbm_layout *dst, const struct slice *s, uint8_t *ok)
{
    const struct reading *r = p->reading;
    const struct kvbm_transfer transfer = {.size = sizeof(transfer),
                                           .src = src,
                                           .dst = dst,
                                           .src_blocks = s->from,
                                           .dst_blocks = s->to,
                                           .n = s->n,
                                           .src_head = p->part->remote_head,
                                           .dst_head = p->part->local_head,
                                           .n_heads = p->part->n_heads,
                                           .flow = KVBM_ONBOARD,
                                           .priority = r->opts.priority,
                                           .deadline_ns = r->opts.deadline_ns,
                                           .ok = ok};
    int64_t id;
    int rc;

    id = submit(r, &transfer);
    if (id < 0)
        return (int)id;
    do /* chunks that have begun write into the caller's blocks */
        rc = kvbm_copier_wait(r->opts.copier, (uint64_t)id, 1000, NULL);
    while (rc == -ETIMEDOUT);
    return rc;
}

static int copy(const struct part *p, const struct kvbm_layout *from, const struct slice *s,
                uint8_t *ok)
{
    const struct plan_side *local = &p->reading->plan->sides[0];
    struct kvbm_layout *src, *dst;
    int rc = -ENOMEM;

    memset(ok, 0, MAX_SLICE / 8);
    if (!s->n)
        return 0;
    src = as_planned(from, p->side, local);
    dst = as_planned(p->reading->opts.to, local, p->side);
    if (src && dst)
        rc = copy_between(p, src, dst, s, ok);
    free(src);
    free(dst);
    return rc;
}

static void note(const struct part *p, uint32_t i)
{
    p->placed[i / 8] |= (uint8_t)(1u << i % 8);
}

static int place_shared(const struct part *p, const struct kvbm_lease *lease, const struct slice *s)
{
    uint8_t ok[MAX_SLICE / 8];
    int rc = copy(p, kvbm_lease_layout(lease), s, ok);

    for (uint32_t k = 0; rc == 0 && k < s->n; k++) {
        if (bit(ok, k) && kvbm_lease_is_intact(lease, s->place[k]))
            note(p, s->index[k]);
    }
    return rc;
}

/* ---- through a session ---- */

static int make_staging(struct part *p)
{
    const struct kvbm_storage_opts storage = {
        .size = sizeof(storage), .kind = KVBM_STORAGE_SYSTEM, .bytes = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&storage);
    struct kvbm_layout_config config = p->side->config;

    if (p->staging)
        return 0;
    config.kind = KVBM_FULLY_CONTIGUOUS;
    config.num_blocks = p->most;
    config.alignment = 64;
    memset(config.tensor_shape, 0, sizeof(config.tensor_shape));
    return kvbm_layout_allocate(&config, &allocator, &p->staging);
}

/* Leave in a slice the blocks that have arrived in staging: block k in staging block k. */
static void keep_arrived(struct slice *s, const uint8_t *arrived)
{
    uint32_t n = 0;

    for (uint32_t k = 0; k < s->n; k++) {
        if (!bit(arrived, k))
            continue;
        s->index[n] = s->index[k];
        s->to[n] = s->to[k];
        s->from[n++] = k;
    }
    s->n = n;
}

static int place_sent(struct part *p, struct kvbm_lease *lease, struct slice *s)
{
    const struct reading *r = p->reading;
    uint8_t arrived[MAX_SLICE / 8], ok[MAX_SLICE / 8];
    uint32_t staging[MAX_SLICE];
    const struct kvbm_lease_read_opts read = {.size = sizeof(read),
                                              .keys = s->place,
                                              .to_blocks = staging,
                                              .n = s->n,
                                              .deadline_ns = r->opts.deadline_ns,
                                              .ok = arrived,
                                              .no_checksums = r->opts.no_checksums,
                                              .no_shared = true};
    struct kvbm_lease_read_opts with = read;
    long n;
    int rc = make_staging(p);

    if (rc < 0)
        return rc;
    with.to = p->staging;
    for (uint32_t k = 0; k < s->n; k++)
        staging[k] = k;
    n = kvbm_lease_read(lease, &with);
    if (n < 0)
        return (int)n;
    keep_arrived(s, arrived);
    rc = copy(p, p->staging, s, ok);
    for (uint32_t k = 0; rc == 0 && k < s->n; k++) {
        if (bit(ok, k))
            note(p, s->index[k]);
    }
    return rc;
}

/* ---- leases ---- */

/* Fill a slice with leased blocks from key *@at of the lease on, which is key @first of the call. */
static void fill(const struct part *p, const struct kvbm_lease *lease, uint32_t first, uint32_t *at,
                 struct slice *s)
{
    s->n = 0;
    for (; *at < kvbm_lease_count(lease) && s->n < p->most; ++*at) {
        struct kvbm_block_at block;

        if (kvbm_lease_block(lease, *at, &block) < 0)
            continue;
        s->index[s->n] = first + *at;
        s->place[s->n] = *at;
        s->from[s->n] = block.block;
        s->to[s->n++] = p->reading->opts.to_blocks[first + *at];
    }
}

/* Place the blocks of a lease on keys from @first on. Returns how many of its keys are done, fewer than
 * it has when it ends too early; or an error. */
static long place_leased(struct part *p, struct kvbm_lease *lease, uint32_t first)
{
    const struct reading *r = p->reading;
    bool shared = kvbm_lease_is_shared(lease) && !r->opts.no_shared;
    struct slice slice;
    uint32_t at = 0, done = 0;
    int rc = 0;

    if (!kvbm_plan_side_fits(p->side, &lease->facts->layout->config, &lease->facts->shard))
        return -ESTALE; /* exported anew, and not as it was planned */
    while (rc == 0 && at < kvbm_lease_count(lease)) {
        if (is_over(r))
            return -ETIMEDOUT;
        fill(p, lease, first, &at, &slice);
        if (slice.n)
            rc = shared ? place_shared(p, lease, &slice) : place_sent(p, lease, &slice);
        if (kv_now_ns() >= kvbm_lease_expires(lease))
            break; /* some of the slice may be missing for that reason */
        done = at;
    }
    return rc < 0 ? rc : (long)done;
}

static uint32_t lease_ms(const struct reading *r)
{
    int64_t left = kv_ms_until(r->opts.deadline_ns, kv_now_ns());

    return (uint32_t)KV_MIN(KV_MAX(2 * left, (int64_t)1000), (int64_t)MAX_LEASE_MS);
}

/* Lease some keys from @first on, and place them. Returns how many are done, or an error. */
static long read_some(struct part *p, uint32_t first)
{
    const struct reading *r = p->reading;
    uint32_t n = KV_MIN(r->opts.n - first, MAX_LEASED);
    uint32_t key_len = kvbm_agent_key_len(kvbm_session_agent(p->source->session));
    const uint8_t *keys = (const uint8_t *)r->opts.keys + (size_t)first * key_len;
    struct kvbm_lease *lease = NULL;
    long done;
    int rc = kvbm_session_lease(p->source->session, p->source->set, r->opts.group, keys, n,
                                lease_ms(r), r->opts.deadline_ns, &lease);

    if (rc == -ENOENT) /* it has none of them */
        return n;
    if (rc < 0)
        return rc;
    done = place_leased(p, lease, first);
    kvbm_lease_release(lease);
    return done ? done : -EAGAIN;
}

static void read_part(struct part *p)
{
    const struct reading *r = p->reading;

    for (uint32_t first = 0; first < r->opts.n && !is_over(r);) {
        long done = read_some(p, first);

        if (done == -ENOSPC ||
            done == -EAGAIN) /* other readers have its share; too short a lease */
            usleep(1000);
        else if (done <= 0)
            break;
        first += (uint32_t)KV_MAX(done, 0l);
    }
    kvbm_layout_destroy(p->staging);
}

/* ---- threads ---- */

static uint32_t blocks_of_slice(const struct plan_side *side)
{
    const struct kvbm_layout_config *c = &side->config;
    uint64_t block = side->shape.region_bytes * c->num_layers * c->outer_dim;

    return (uint32_t)KV_MAX(KV_MIN(SLICE_BYTES / KV_MAX(block, UINT64_C(1)), (uint64_t)MAX_SLICE),
                            UINT64_C(1));
}

static void *read_parts(void *arg)
{
    struct reading *r = arg;
    size_t i;

    while ((i = atomic_fetch_add(&r->next, 1)) < r->plan->n_parts) {
        const struct kvbm_plan_part *part = &r->plan->parts[i];
        const struct plan_side *side = &r->plan->sides[1 + part->rank];
        struct part p = {.reading = r,
                         .part = part,
                         .side = side,
                         .source = &r->opts.sources[part->rank],
                         .most = blocks_of_slice(side),
                         .placed = r->placed + i * r->bitmap};

        if (p.source->session)
            read_part(&p);
    }
    return NULL;
}

/* Read all parts, on threads and on this one. */
static void run(struct reading *r)
{
    pthread_t threads[MAX_THREADS];
    size_t n = KV_MIN(r->plan->n_parts, (size_t)MAX_THREADS) - 1, started = 0;

    while (started < n && kv_thread_start(&threads[started], "kvbm-plan", read_parts, r) == 0)
        started++;
    (void)read_parts(r);
    while (started)
        pthread_join(threads[--started], NULL);
}

/* Count the blocks that every part has placed, and set their bits. */
static long conclude(const struct reading *r)
{
    long right = 0;

    if (r->opts.ok)
        memset(r->opts.ok, 0, r->bitmap);
    for (uint32_t i = 0; i < r->opts.n; i++) {
        bool all = true;

        for (size_t k = 0; all && k < r->plan->n_parts; k++)
            all = bit(r->placed + k * r->bitmap, i);
        right += all;
        if (all && r->opts.ok)
            r->opts.ok[i / 8] |= (uint8_t)(1u << i % 8);
    }
    return right;
}

/* ---- the call ---- */

static int check(const struct reading *r)
{
    const struct kvbm_plan_read_opts *o = &r->opts;

    if (!o->copier || !o->sources || !o->keys || !o->to || !o->to_blocks || !o->n ||
        kvbm_deadline_check(o->deadline_ns) < 0 ||
        !kvbm_same_blocks(&r->plan->sides[0].config, kvbm_layout_get_config(o->to)) ||
        r->plan->sides[0].config.dtype != kvbm_layout_get_config(o->to)->dtype)
        return -EINVAL;
    return kvbm_ids_check(o->to_blocks, o->n, kvbm_layout_get_config(o->to)->num_blocks,
                          KVBM_IDS_ONCE);
}

long kvbm_plan_read(const struct kvbm_plan *plan, const struct kvbm_plan_read_opts *opts)
{
    struct reading r = {.plan = plan};
    long right;
    int err;

    if (!plan || !kv_sized(opts, "kvbm_plan_read_opts"))
        return -EINVAL;
    memcpy(&r.opts, opts, KV_MIN(opts->size, sizeof(r.opts)));
    err = check(&r);
    if (err < 0)
        return err;
    if (!r.opts.deadline_ns)
        r.opts.deadline_ns = kv_now_ns() + DEADLINE_NS;
    r.bitmap = (r.opts.n + 7) / 8;
    r.placed = calloc(plan->n_parts, r.bitmap);
    if (!r.placed)
        return -ENOMEM;
    run(&r);
    right = conclude(&r);
    free(r.placed);
    return right;
}
