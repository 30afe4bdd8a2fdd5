// SPDX-License-Identifier: Apache-2.0
#include "event/reader/sources.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/utf8.h"
#include "base/core/xxh.h"
#include "event/wire/media.h"

#define HASH_DIGITS 16

void kve_sources_reset(struct kve_sources *sources)
{
    kve_groups_reset(&sources->groups);
    sources->unnamed = sources->unfollowed = false;
}

bool kve_sources_has_main(const struct kve_sources *sources, uint32_t rank)
{
    return sources->unnamed || kve_groups_may_have_main(&sources->groups, rank);
}

int64_t kve_sources_main_group(const struct kve_sources *sources, uint32_t rank)
{
    const struct kve_group *main = kve_groups_main(&sources->groups, rank);

    if (main)
        return main->group;
    return sources->unnamed ? 0 : -1;
}

bool kve_is_size(uint32_t stride, uint32_t parts, uint32_t block_size)
{
    return stride && parts && parts <= KVE_MAX_PARTS && (stride == 1 || parts == 1) &&
           block_size % parts == 0;
}

/* -- groups ------------------------------------------------------------------------------------ */

static bool is_main_kind(struct kv_str kind)
{
    return kv_str_eq(kind, "full_attention") || kv_str_eq(kind, "mla_attention") ||
           kv_str_eq(kind, "sink_full_attention");
}

static bool is_window_kind(struct kv_str kind)
{
    return kv_str_eq(kind, "sliding_window") || kv_str_eq(kind, "sliding_window_mla");
}

/* Return true when another group of @rank was learned as full attention before @group. */
static bool has_other_main(const struct kve_sources *sources, uint32_t rank, uint32_t group)
{
    const struct kve_group *main = kve_groups_main(&sources->groups, rank);

    return main && main->group != group;
}

/*
 * How many blocks of the registered size one block of the group spans, or how many of its blocks one
 * of the registered size has; stride 0 when neither is a whole number. An event without tokens has no
 * block size, and is of the size learned before, or of the usual one.
 */
static void set_size(struct kve_group *g, const struct kve_raw_event *ev,
                     const struct kve_group *known, uint32_t block_size)
{
    uint64_t size = ev->block_size;

    g->parts = 1;
    if (ev->type != KVE_RAW_STORED || !size) {
        g->stride = known ? known->stride : 1;
        g->parts = known ? known->parts : 1;
    } else if (size % block_size == 0) {
        g->stride = size / block_size <= UINT32_MAX ? (uint32_t)(size / block_size) : 0;
    } else if (block_size % size == 0 && block_size / size <= KVE_MAX_PARTS) {
        g->stride = 1;
        g->parts = (uint32_t)(block_size / size);
    }
}

/*
 * Compute ceil((window - 1) / block), at least 1: the blocks before a position that its attention
 * reads.
 */
static uint32_t need_of(uint64_t window, uint64_t block)
{
    uint64_t need = window > 1 ? (window - 2) / KV_MAX(block, 1u) + 1 : 1;

    return need < KVE_NEED_ALL ? (uint32_t)need : KVE_NEED_ALL - 1;
}

/* Classify the event's group by the kind that the event names. */
static struct kve_group described(struct kve_sources *sources, uint32_t rank,
                                  const struct kve_raw_event *ev, const struct kve_group *known,
                                  uint32_t block_size)
{
    struct kve_group g = {.rank = rank, .group = (uint32_t)ev->group};

    set_size(&g, ev, known, block_size);
    if (is_main_kind(ev->kind)) {
        g.is_main = !ev->has_group || !has_other_main(sources, rank, g.group);
        g.is_window = !g.is_main && g.stride > 0 && g.parts == 1;
        g.need = g.is_window ? KVE_NEED_ALL : 0;
    } else if (is_window_kind(ev->kind) && ev->window && ev->window <= UINT32_MAX) {
        g.is_window = g.stride > 0;
        g.window = (uint32_t)ev->window;
        g.need = g.stride ? need_of(ev->window, (uint64_t)g.stride * block_size / g.parts) : 0;
    } else if (kv_str_eq(ev->kind, "mamba")) {
        g.is_window = g.stride > 0 && g.parts == 1;
        g.need = 1;
    }
    return g;
}

/* Return true for an event about blocks of the device. */
static bool is_device(const struct kve_raw_event *ev)
{
    return kve_medium_is_device(ev->medium);
}

static bool same_group(const struct kve_group *a, const struct kve_group *b)
{
    return a->is_main == b->is_main && a->is_window == b->is_window && a->window == b->window &&
           a->need == b->need && a->stride == b->stride && a->parts == b->parts;
}

/* Learn a group. Offloaded blocks may have another size: they don't change what the device showed. */
static void learn(struct kve_sources *sources, const struct kve_group *known,
                  const struct kve_group *g, bool device)
{
    if (known && (!device || same_group(known, g)))
        return;
    if (kve_groups_learn(&sources->groups, g) < 0) /* its removals won't tell what it is */
        sources->unfollowed = true;
}

/* Return the group of an event: by its kind, else as learned, else by its number. */
static struct kve_group group_of(struct kve_sources *sources, uint32_t rank,
                                 const struct kve_raw_event *ev, uint32_t block_size)
{
    const struct kve_group *known =
        ev->has_group ? kve_groups_find(&sources->groups, rank, (uint32_t)ev->group) : NULL;

    if (ev->kind.len) {
        struct kve_group g = described(sources, rank, ev, known, block_size);

        if (ev->has_group && ev->type == KVE_RAW_STORED)
            learn(sources, known, &g, is_device(ev));
        return g;
    }
    if (known)
        return *known;
    return (struct kve_group){.rank = rank,
                              .group = (uint32_t)ev->group,
                              .parts = 1,
                              .is_main = !ev->has_group || ev->group == 0};
}

/* -- sources ----------------------------------------------------------------------------------- */

/*
 * Return the length in bytes of the longest beginning of @owner that is UTF-8 without NUL, at most
 * @max.
 */
static size_t text_length(struct kv_str owner, size_t max)
{
    size_t len = 0;
    int n;

    while (len < owner.len && owner.p[len]) {
        n = kv_utf8_sequence(owner.p + len, owner.p + owner.len);
        if (n <= 0 || len + (size_t)n > max)
            break;
        len += (size_t)n;
    }
    return len;
}

/*
 * Copy an owner's name as it is kept and dumped. A name that isn't text, or is too long, is cut and
 * ends in the hash of the whole.
 */
static void put_owner(char to[KVE_MAX_OWNER + 1], struct kv_str owner)
{
    size_t len = text_length(owner, KVE_MAX_OWNER);

    if (len < owner.len)
        len = text_length(owner, KVE_MAX_OWNER - HASH_DIGITS);

    memset(to, 0, KVE_MAX_OWNER + 1);
    if (len)
        memcpy(to, owner.p, len);
    if (len < owner.len)
        snprintf(to + len, HASH_DIGITS + 1, "%016" PRIx64, kv_xxh64(owner.p, owner.len, 0));
}

static bool same_source(const struct kve_source *a, const struct kve_source *b)
{
    return a->kind == b->kind && a->group == b->group && a->window == b->window &&
           a->need == b->need && a->stride == b->stride && a->parts == b->parts &&
           strcmp(a->owner, b->owner) == 0;
}

int kve_sources_add(struct kve_sources *sources, const struct kve_source *source)
{
    if (!sources->n)
        sources->items[sources->n++] =
            (struct kve_source){.kind = KVE_SOURCE_MAIN, .stride = 1, .parts = 1};
    if (sources->n == KVE_MAX_SOURCES)
        return -ENOSPC;
    sources->items[sources->n++] = *source;
    return 0;
}

static int number_of(struct kve_sources *sources, const struct kve_source *source)
{
    for (uint32_t i = 0; i < sources->n; i++) {
        if (same_source(&sources->items[i], source))
            return (int)i;
    }
    return kve_sources_add(sources, source) ? -KVE_SKIP_RC(SOURCE) : (int)sources->n - 1;
}

bool kve_sources_has_owner(const struct kve_sources *sources, struct kv_str owner)
{
    char name[KVE_MAX_OWNER + 1];

    put_owner(name, owner);
    for (uint32_t i = 1; i < sources->n; i++)
        if (strcmp(sources->items[i].owner, name) == 0)
            return true;
    return false;
}

int kve_sources_owner(struct kve_sources *sources, struct kv_str owner)
{
    struct kve_source source;

    if (KV_LIKELY(!owner.len))
        return 0;
    source = (struct kve_source){.kind = KVE_SOURCE_OWNER, .stride = 1, .parts = 1};
    put_owner(source.owner, owner);
    return number_of(sources, &source);
}

/*
 * Return the owner of an event's blocks; empty: the publisher. Old arrays have the publisher's kind
 * in the owner's place; an owner of device blocks is such a kind, since secondary tiers hold no
 * device blocks.
 */
static struct kv_str owner_of(const struct kve_raw_event *ev)
{
    return !ev->is_map && is_device(ev) ? (struct kv_str){"", 0} : ev->ownership;
}

int kve_sources_of(struct kve_sources *sources, uint32_t rank, const struct kve_raw_event *ev,
                   uint32_t block_size)
{
    struct kve_group g = group_of(sources, rank, ev, block_size);
    struct kve_source source;

    if (g.is_main && ev->type == KVE_RAW_STORED && !(ev->kind.len && ev->has_group))
        sources->unnamed = true;
    if (g.is_main)
        return kve_sources_owner(sources, owner_of(ev));
    if (!g.is_window) {
        sources->unfollowed |= ev->type == KVE_RAW_STORED;
        return -KVE_SKIP_RC(GROUP);
    }
    source = (struct kve_source){.kind = KVE_SOURCE_WINDOW,
                                 .group = g.group,
                                 .window = g.window,
                                 .need = g.need,
                                 .stride = g.stride,
                                 .parts = g.parts};
    put_owner(source.owner, owner_of(ev));
    return number_of(sources, &source);
}
