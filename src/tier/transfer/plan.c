// SPDX-License-Identifier: Apache-2.0
/* The plan of a job: check the transfer, cut it into chunks, walk its pieces. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "bm/ids.h"
#include "tier/transfer/cuda.h"

/* some 200 us of a thread: the longest wait of an urgent job */
#define CHUNK_BYTES (UINT64_C(2) << 20)
#define LAUNCH_BYTES (UINT64_C(4) << 20) /* a GPU's kernel takes microseconds to start */
/* Smaller pieces are a kernel's: copy engines, which start each one, take 2.5 times as long for 16
 * KiB, up to 1.4 times for 32 KiB. From 64 KiB on they are as fast. Unlike a kernel they slow
 * nothing that runs beside (docs/benchmarks.md). */
#ifndef TIER_KERNEL_BYTES /* a benchmark varies it */
#define TIER_KERNEL_BYTES (UINT64_C(32) << 10)
#endif
#define KERNEL_BYTES_SINGLE (UINT64_C(256) << 10) /* with a call for each piece of the engines */

static int refuse(int err, const char *reason)
{
    kv_log_warn("kvbm", "transfer refused", "reason=\"%s\"", reason);
    return err;
}

/* ---- do both layouts hold the same blocks? ---- */

/* Set p->bits when elements are copied unchanged. An unknown dtype counts as the other layout's. */
static int check_elements(const struct kvbm_layout_config *s, const struct kvbm_layout_config *d,
                          struct tier_plan *p)
{
    p->bits = s->dtype_width_bytes == d->dtype_width_bytes &&
              (s->dtype == d->dtype || !s->dtype || !d->dtype);
    if (p->bits)
        return 0;
    if (!s->dtype || !d->dtype)
        return refuse(-EINVAL, "elements of different widths, and a dtype isn't known");
    if (!kvbm_dtype_is_float(s->dtype) || !kvbm_dtype_is_float(d->dtype))
        return refuse(-ENOTSUP, "integers aren't converted");
    return 0;
}

static int check_layers(const struct kvbm_transfer *t, struct tier_plan *p)
{
    uint32_t all = p->src->config.num_layers;

    if (all != p->dst->config.num_layers || p->src->config.outer_dim != p->dst->config.outer_dim ||
        p->src->config.page_size != p->dst->config.page_size)
        return refuse(-EINVAL, "blocks of other layers, outers or pages");
    if (t->first_layer >= all || t->n_layers > all - t->first_layer)
        return refuse(-EINVAL, "layers out of range");
    p->first_layer = t->first_layer;
    p->n_layers = t->n_layers ? t->n_layers : all - t->first_layer;
    return 0;
}

static bool heads_fit(const struct kvbm_layout_config *c, uint32_t first, uint32_t n)
{
    return first < c->num_heads && n <= c->num_heads - first;
}

static int check_heads(const struct kvbm_transfer *t, struct tier_plan *p)
{
    const struct kvbm_layout_config *s = &p->src->config, *d = &p->dst->config;

    p->src_head = t->src_head;
    p->dst_head = t->dst_head;
    p->n_heads = t->n_heads;
    if (!t->n_heads) {
        if (t->src_head || t->dst_head || s->inner_dim != d->inner_dim)
            return refuse(-EINVAL, "all heads are asked for, and they aren't equally many");
        if (s->num_heads && d->num_heads && s->num_heads != d->num_heads)
            return refuse(-EINVAL, "heads of different sizes");
        return 0;
    }
    if (!heads_fit(s, t->src_head, t->n_heads) || !heads_fit(d, t->dst_head, t->n_heads))
        return refuse(-EINVAL, "heads out of range");
    if (s->inner_dim / s->num_heads != d->inner_dim / d->num_heads)
        return refuse(-EINVAL, "heads of different sizes");
    if (t->n_heads == s->num_heads && t->n_heads == d->num_heads)
        p->n_heads = 0;
    return 0;
}

/* ---- choosing the lane ---- */

static bool host(enum kvbm_storage_kind kind)
{
    return kind == KVBM_STORAGE_SYSTEM || kind == KVBM_STORAGE_PINNED;
}

/* True when one GPU's kernel can address both sides: no pageable memory, and no other GPU's
 * memory. */
static bool one_gpu_reaches(const struct tier_plan *p)
{
    const struct kvbm_place *s = &p->src->places[0], *d = &p->dst->places[0];

    if (s->kind == KVBM_STORAGE_SYSTEM || d->kind == KVBM_STORAGE_SYSTEM)
        return false;
    return s->kind != d->kind || s->device_id == d->device_id;
}

static int find_lane(enum kvbm_flow flow, struct tier_plan *p)
{
    enum kvbm_storage_kind s = p->src->places[0].kind, d = p->dst->places[0].kind;

    if (!p->src->places[0].storage || !p->dst->places[0].storage)
        return refuse(-EINVAL, "a layout of another process");
    if ((s == KVBM_STORAGE_NULL) != (d == KVBM_STORAGE_NULL))
        return refuse(-ENOTSUP, "one of the two has no memory");
    if (s == KVBM_STORAGE_NULL || (host(s) && host(d)))
        p->lane = TIER_MEMORY;
    else if ((host(s) && d == KVBM_STORAGE_DISK) || (s == KVBM_STORAGE_DISK && host(d)))
        p->lane = flow == KVBM_ONBOARD ? TIER_FILE : TIER_FILE_LATER;
    else if (s == KVBM_STORAGE_DISK || d == KVBM_STORAGE_DISK)
        return refuse(-ENOTSUP, "files are copied to and from host memory");
    else
        p->lane = d == KVBM_STORAGE_DEVICE ? TIER_IN : TIER_OUT;
    p->reached = (p->lane == TIER_IN || p->lane == TIER_OUT) && one_gpu_reaches(p);
    return 0;
}

/* ---- choosing the grain ---- */

static bool outers_together(const struct kvbm_layout *l)
{
    return l->config.outer_dim == 1 || l->shape.outer_stride == l->shape.region_bytes;
}

/* True when both orders give the same bytes: with one head, or one token. */
static bool same_order(const struct tier_plan *p)
{
    const struct kvbm_layout_config *s = &p->src->config, *d = &p->dst->config;

    return s->order == d->order || s->page_size == 1 ||
           (s->num_heads <= 1 && d->num_heads <= 1 && (s->num_heads || d->num_heads));
}

static int find_grain(struct tier_plan *p)
{
    const struct kvbm_layout_config *s = &p->src->config, *d = &p->dst->config;
    uint64_t dim = d->num_heads ? d->inner_dim / d->num_heads : 0;
    uint64_t head = dim * d->page_size * d->dtype_width_bytes;

    p->region_bytes = p->n_heads ? head * p->n_heads : p->dst->shape.region_bytes;
    if (p->src->places[0].kind == KVBM_STORAGE_NULL) {
        p->grain = TIER_NOTHING;
    } else if (p->bits && same_order(p) && !p->n_heads) {
        bool whole = p->src->n == 1 && p->dst->n == 1;

        p->grain = !outers_together(p->src) || !outers_together(p->dst) ? TIER_REGION
                   : whole                                              ? TIER_BLOCK
                                                                        : TIER_LAYER;
    } else if (p->bits && s->order == KVBM_ORDER_HND && d->order == KVBM_ORDER_HND) {
        p->grain = TIER_REGION; /* heads lie one behind the other */
        p->src_skip = head * p->src_head;
        p->dst_skip = head * p->dst_head;
    } else {
        p->grain = TIER_CONVERT;
        if (p->n_heads && p->dst->places[0].kind == KVBM_STORAGE_DISK)
            return refuse(-ENOTSUP, "some heads of a file's blocks can't be written");
        if (s->num_blocks > INT32_MAX || d->num_blocks > INT32_MAX)
            return refuse(-ENOTSUP, "more blocks than a conversion can name");
    }
    return 0;
}

/* ---- chunks ---- */

static bool on_file(const struct tier_plan *p)
{
    return p->lane == TIER_FILE || p->lane == TIER_FILE_LATER;
}

static bool on_device(const struct tier_plan *p)
{
    return p->lane == TIER_OUT || p->lane == TIER_IN;
}

/* Decide whether a GPU's kernel copies instead of the copy engines: small pieces, and both sides
 * addressable. */
static void choose_kernel(struct tier_plan *p)
{
    uint64_t piece = p->region_bytes * (p->grain == TIER_LAYER ? p->dst->config.outer_dim : 1);
    kvx_cache_desc_t src, dst;

    if (!on_device(p) || (p->grain != TIER_LAYER && p->grain != TIER_REGION) ||
        piece >= (tier_cuda_batches() ? TIER_KERNEL_BYTES : KERNEL_BYTES_SINGLE) || !p->reached ||
        p->src->config.num_blocks > INT32_MAX || p->dst->config.num_blocks > INT32_MAX)
        return;
    p->kernel = tier_plan_caches(p, p->first_layer, &src, &dst) == 0;
}

/* Cut into chunks of whole blocks, or of some layers where blocks are large. */
static void cut(struct tier_plan *p)
{
    bool launch = on_device(p) && (p->kernel || p->grain == TIER_CONVERT);
    uint64_t most = launch ? LAUNCH_BYTES : CHUNK_BYTES, layers = p->n_layers;
    uint64_t layer = p->region_bytes * p->dst->config.outer_dim;

    if (on_file(p) && p->grain == TIER_CONVERT) /* a buffer holds a chunk in the file's layout */
        layer = KV_MAX(layer, p->src->shape.region_bytes * p->dst->config.outer_dim);
    if (layer * layers > most) {
        uint64_t n = KV_MAX(most / layer, UINT64_C(1)), groups = (layers + n - 1) / n;

        layers = (layers + groups - 1) / groups; /* of equal size */
    }
    p->layers = (uint32_t)layers;
    p->pairs =
        (uint32_t)KV_MIN(KV_MAX(most / (layer * layers), UINT64_C(1)), (uint64_t)TIER_CHUNK_PAIRS);
    p->n_groups = (p->n_layers + p->layers - 1) / p->layers;
    p->n_chunks = (uint64_t)((p->n - 1) / p->pairs + 1) * p->n_groups;
}

int tier_plan_make(const struct kvbm_transfer *t, struct tier_plan *ret)
{
    struct tier_plan p = {.src = t->src, .dst = t->dst, .n = t->n};
    int err;

    if (!t->src || !t->dst || !t->src_blocks || !t->dst_blocks || !t->n || t->n >= TIER_FAILED)
        return refuse(-EINVAL, "layouts or blocks are missing");
    if ((unsigned)t->flow > KVBM_ONBOARD)
        return refuse(-EINVAL, "no such flow");
    err = check_layers(t, &p);
    if (err == 0)
        err = check_elements(&t->src->config, &t->dst->config, &p);
    if (err == 0)
        err = check_heads(t, &p);
    if (err == 0)
        err = find_lane(t->flow, &p);
    if (err == 0)
        err = find_grain(&p);
    if (err == 0 && p.grain == TIER_CONVERT && !on_file(&p)) {
        kvx_cache_desc_t src, dst;

        err = tier_plan_caches(&p, p.first_layer, &src, &dst);
    }
    if (err < 0)
        return err;
    choose_kernel(&p);
    cut(&p);
    *ret = p;
    return 0;
}

/* ---- block ids ---- */

int tier_plan_check(const struct tier_plan *p, const uint32_t *src, const uint32_t *dst,
                    uint32_t *table)
{
    size_t slots = kvbm_ids_slots(p->n);

    kvbm_ids_clear(table, slots);
    for (uint32_t i = 0; i < p->n; i++) {
        if (src[i] >= p->src->config.num_blocks || dst[i] >= p->dst->config.num_blocks ||
            dst[i] == UINT32_MAX)
            return refuse(-EINVAL, "block out of range");
        if (!kvbm_ids_add(table, slots, dst[i]))
            return refuse(-EINVAL, "a target twice");
    }
    for (uint32_t i = 0; p->src == p->dst && i < p->n; i++) {
        if (kvbm_ids_has(table, slots, src[i]))
            return refuse(-EINVAL, "a target that is a source");
    }
    return 0;
}

/* ---- pieces ---- */

void tier_walk_begin(struct tier_walk *walk, const struct tier_chunk *chunk, uint64_t limit)
{
    const struct tier_job *job = chunk->job;

    *walk = (struct tier_walk){.plan = &job->plan,
                               .src = job->src,
                               .dst = job->dst,
                               .chunk = *chunk,
                               .limit = limit ? limit : UINT64_MAX,
                               .layer = chunk->first_layer,
                               .pair = chunk->first};
}

static uint64_t address(const struct kvbm_layout *l, uint32_t block, uint32_t layer, uint32_t outer,
                        uint32_t *place)
{
    *place = l->n == 1 ? 0 : layer;
    return l->places[*place].addr + block * l->shape.block_stride + layer * l->shape.layer_stride +
           outer * l->shape.outer_stride;
}

static void look(const struct tier_walk *w, struct tier_piece *ret)
{
    const struct tier_plan *p = w->plan;
    uint64_t regions = p->grain == TIER_REGION ? 1 : p->dst->config.outer_dim;

    if (p->grain == TIER_BLOCK)
        regions *= w->chunk.n_layers;
    ret->src = address(p->src, w->src[w->pair], w->layer, w->outer, &ret->src_place) + p->src_skip;
    ret->dst = address(p->dst, w->dst[w->pair], w->layer, w->outer, &ret->dst_place) + p->dst_skip;
    ret->len = p->region_bytes * regions;
    ret->first = w->pair;
    ret->n = 1;
}

/* Step to the next pair. Pairs are innermost, so that consecutive blocks of a layer become one
 * piece. */
static void step(struct tier_walk *w)
{
    if (++w->pair < w->chunk.first + w->chunk.n)
        return;
    w->pair = w->chunk.first;
    if (w->plan->grain == TIER_REGION && ++w->outer < w->plan->dst->config.outer_dim)
        return;
    w->outer = 0;
    w->ended =
        w->plan->grain == TIER_BLOCK || ++w->layer == w->chunk.first_layer + w->chunk.n_layers;
}

static bool join(struct tier_piece *piece, const struct tier_piece *next, uint64_t limit)
{
    if (piece->src_place != next->src_place || piece->dst_place != next->dst_place ||
        piece->src + piece->len != next->src || piece->dst + piece->len != next->dst ||
        piece->len + next->len > limit)
        return false;
    if (next->first < piece->first) { /* the next outer or layer of the same blocks */
        piece->n = piece->first + piece->n - next->first;
        piece->first = next->first;
    }
    piece->n = KV_MAX(piece->n, next->first + 1 - piece->first);
    piece->len += next->len;
    return true;
}

bool tier_walk_next(struct tier_walk *walk, struct tier_piece *ret)
{
    struct tier_piece next;

    if (walk->ended)
        return false;
    look(walk, ret);
    for (step(walk); !walk->ended; step(walk)) {
        look(walk, &next);
        if (!join(ret, &next, walk->limit))
            break;
    }
    return true;
}

/* ---- conversions ---- */

static kvx_tensor_desc_t tensor(const struct tier_side *side, uint32_t outer)
{
    const struct kvbm_layout_config *c = side->config;
    uint32_t width = side->bits ? 1 : c->dtype_width_bytes;
    int64_t heads = side->n_heads, page = c->page_size;
    int64_t dim = (int64_t)(c->inner_dim / side->n_heads) * (c->dtype_width_bytes / width);
    bool hnd = c->order == KVBM_ORDER_HND;

    return (kvx_tensor_desc_t){
        .size = sizeof(kvx_tensor_desc_t),
        .dtype = side->bits ? KVX_DTYPE_F8_E4M3 : c->dtype,
        .layout = hnd ? KVX_LAYOUT_BLOCK_HND : KVX_LAYOUT_BLOCK_NHD,
        .memory = side->memory,
        .ndim = 4,
        .shape = {side->n_blocks, hnd ? heads : page, hnd ? page : heads, dim},
        .stride = {(int64_t)(side->block_stride / width), (hnd ? page : heads) * dim, dim, 1},
        .data = (void *)(uintptr_t)(side->addr + outer * side->outer_stride),
    };
}

/*
 * True when the one tensor of layouts with one outer dimension (MLA) is described as K and V of
 * half the dims each: described as both, every element would be moved twice. The halves of rows
 * must be aligned on both sides.
 */
static bool in_halves(const struct tier_plan *p, uint64_t head_dim)
{
    const struct kvbm_layout_config *s = &p->src->config, *d = &p->dst->config;
    uint64_t width = KV_MIN(s->dtype_width_bytes, d->dtype_width_bytes);

    return d->outer_dim == 1 && head_dim % 2 == 0 && head_dim / 2 * width % 16 == 0;
}

static void halve(kvx_cache_desc_t *cache)
{
    cache->k.shape[3] = cache->v.shape[3] = cache->k.shape[3] / 2;
    cache->v.data = (char *)cache->v.data + cache->k.shape[3] * kvx_dtype_size(cache->k.dtype);
}

int tier_side_cache(const struct tier_side *side, kvx_cache_desc_t *ret)
{
    const struct kvbm_layout_config *c = side->config;
    kvx_cache_desc_t cache = {
        .size = sizeof(cache),
        .num_blocks = side->n_blocks,
        .block_size = c->page_size,
        .num_kv_heads = side->n_heads,
    };

    if (!side->bits && (side->block_stride % c->dtype_width_bytes))
        return refuse(-ENOTSUP, "blocks aren't aligned to their elements");
    cache.k = tensor(side, 0);
    cache.v = tensor(side, c->outer_dim - 1);
    if (side->halves)
        halve(&cache);
    if (cache.k.shape[3] > INT32_MAX)
        return refuse(-ENOTSUP, "rows too long for a conversion");
    cache.head_dim = (uint32_t)cache.k.shape[3];
    if (kvx_validate_cache_desc(&cache) != KVX_STATUS_OK)
        return refuse(-ENOTSUP, "KVX has no caches of this layout");
    *ret = cache;
    return 0;
}

void tier_plan_side(const struct tier_plan *p, bool target, uint32_t layer, struct tier_side *ret)
{
    const struct kvbm_layout *l = target ? p->dst : p->src, *other = target ? p->src : p->dst;
    const struct kvbm_place *place = &l->places[l->n == 1 ? 0 : layer];
    uint32_t known = l->config.num_heads ? l->config.num_heads : other->config.num_heads;
    uint32_t heads = known ? known : 1;

    *ret = (struct tier_side){
        .config = &l->config,
        .addr = place->addr + layer * l->shape.layer_stride,
        .block_stride = l->shape.block_stride,
        .outer_stride = l->shape.outer_stride,
        .n_blocks = (uint32_t)l->config.num_blocks,
        .n_heads = heads,
        .memory = place->kind == KVBM_STORAGE_DEVICE ? KVX_MEMORY_DEVICE : KVX_MEMORY_HOST,
        .bits = p->bits,
        .halves = in_halves(p, l->config.inner_dim / heads),
    };
    /* A GPU that converts must be able to address the host side: pinned memory. */
    if (place->kind == KVBM_STORAGE_PINNED && (p->lane == TIER_OUT || p->lane == TIER_IN))
        ret->memory = KVX_MEMORY_UNIFIED;
}

int tier_plan_caches(const struct tier_plan *p, uint32_t layer, kvx_cache_desc_t *src,
                     kvx_cache_desc_t *dst)
{
    struct tier_side s, d;
    int err;

    tier_plan_side(p, false, layer, &s);
    tier_plan_side(p, true, layer, &d);
    if ((p->lane == TIER_OUT || p->lane == TIER_IN) && !p->reached)
        return refuse(-ENOTSUP, "a GPU converts its own memory and pinned memory");
    err = tier_side_cache(&s, src);
    return err < 0 ? err : tier_side_cache(&d, dst);
}

static int kvx_error(kvx_status_t status)
{
    switch (status) {
    case KVX_STATUS_OK:
        return 0;
    case KVX_STATUS_UNSUPPORTED:
        return -ENOTSUP;
    case KVX_STATUS_INVALID_ARGUMENT:
        return -EINVAL;
    default:
        return -EIO;
    }
}

/* The pairs of a chunk, as KVX takes them. */
static kvx_block_copy_t copy_of(const struct tier_plan *p, const uint32_t *src_blocks,
                                const uint32_t *dst_blocks, uint32_t n)
{
    return (kvx_block_copy_t){
        .size = sizeof(kvx_block_copy_t),
        .index_dtype = KVX_DTYPE_S32, /* no converted layout has more blocks */
        .count = n,
        .src_head = p->src_head,
        .dst_head = p->dst_head,
        .num_heads = p->n_heads,
        .src_blocks = src_blocks,
        .dst_blocks = dst_blocks,
    };
}

int tier_convert_caches(const struct tier_plan *p, const kvx_cache_desc_t *src,
                        const kvx_cache_desc_t *dst, const uint32_t *src_blocks,
                        const uint32_t *dst_blocks, uint32_t n)
{
    kvx_block_copy_t copy = copy_of(p, src_blocks, dst_blocks, n);
    kvx_options_t options = {.size = sizeof(options), .phase = KVX_PHASE_PREFILL};

    return kvx_error(kvx_copy_blocks(src, dst, &copy, &options, NULL));
}

enum { LAYERS_EACH = 32 }; /* KVX launches no more of them together */

int tier_convert_layers(const struct tier_plan *p, uint32_t first, uint32_t n_layers,
                        const uint32_t *src_blocks, const uint32_t *dst_blocks, uint32_t n,
                        void *stream)
{
    kvx_block_copy_t copy = copy_of(p, src_blocks, dst_blocks, n);
    bool bus = p->src->places[0].kind != p->dst->places[0].kind;
    kvx_options_t options = {.size = sizeof(options),
                             .phase = stream && bus ? KVX_PHASE_TRANSFER : KVX_PHASE_PREFILL};
    int err = 0;

    for (uint32_t i = 0; err == 0 && i < n_layers; i += LAYERS_EACH) {
        const uint32_t some = KV_MIN(n_layers - i, (uint32_t)LAYERS_EACH);
        kvx_cache_desc_t caches[2][LAYERS_EACH];
        const kvx_cache_desc_t *srcs[LAYERS_EACH], *dsts[LAYERS_EACH];
        const kvx_block_copy_t *copies[LAYERS_EACH];

        for (uint32_t k = 0; err == 0 && k < some; k++) {
            err = tier_plan_caches(p, first + i + k, &caches[0][k], &caches[1][k]);
            srcs[k] = &caches[0][k];
            dsts[k] = &caches[1][k];
            copies[k] = &copy;
        }
        if (err == 0)
            err = kvx_error(kvx_copy_blocks_layers(srcs, dsts, copies, some, &options, stream));
    }
    return err;
}
