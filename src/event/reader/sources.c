// SPDX-License-Identifier: Apache-2.0
#include "event/reader/sources.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/cache_group.h"
#include "base/core/utf8.h"
#include "base/core/xxh.h"
#include "event/wire/media.h"

#define HASH_DIGITS 16

_Static_assert(KVE_MAX_TOLD <= 32, "kve_sources.differs has a bit for each");

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
                     const struct kve_group *known, const struct kve_told_group *told,
                     uint32_t block_size)
{
    uint64_t size = ev->type == KVE_RAW_STORED ? ev->block_size : 0;

    if (!size && !known && told)
        size = told->block_size;
    g->parts = 1;
    if (!size) {
        g->stride = known ? known->stride : 1;
        g->parts = known ? known->parts : 1;
    } else if (size % block_size == 0) {
        g->stride = size / block_size <= UINT32_MAX ? (uint32_t)(size / block_size) : 0;
    } else if (block_size % size == 0 && block_size / size <= KVE_MAX_PARTS) {
        g->stride = 1;
        g->parts = (uint32_t)(block_size / size);
    }
}

/* Return how many blocks before a position its attention reads, at least 1. */
static uint32_t need_of(uint64_t window, uint64_t block)
{
    uint64_t need = kv_window_blocks(window, KV_MAX(block, 1u));

    return (uint32_t)KV_MIN(KV_MAX(need, 1u), (uint64_t)UINT32_MAX - 1);
}

/* Return true for an event about blocks of the device. */
static bool is_device(const struct kve_raw_event *ev)
{
    return kve_medium_is_device(ev->medium);
}

/* Describe full attention: the main group, or one that a match needs as a whole beside it. */
static void describe_full(struct kve_group *g, bool is_main)
{
    g->is_main = is_main;
    g->is_window = !is_main && g->stride > 0;
    g->needs = g->is_window ? KV_NEEDS_ALL : KV_NEEDS_RUN;
    g->need = g->is_window;
}

static void describe_sliding(struct kve_group *g, uint64_t window, uint64_t size)
{
    g->is_window = g->stride > 0;
    g->window = (uint32_t)window;
    g->need = g->stride ? need_of(window, size) : 0;
}

/* Describe chunks of @chunk tokens: what a match needs begins with the chunk's first block. */
static void describe_chunks(struct kve_group *g, uint32_t chunk, uint64_t size)
{
    if (!g->stride || g->parts != 1 || !chunk || chunk % size)
        return;
    g->is_window = true;
    g->needs = KV_NEEDS_CHUNK;
    g->window = chunk;
    g->need = (uint32_t)(chunk / size);
}

/* Note whether events tell a group otherwise than the registration. */
static void compare(struct kve_sources *sources, const struct kve_raw_event *ev,
                    const struct kve_told_group *told)
{
    if (!told || ev->type != KVE_RAW_STORED || !is_device(ev))
        return;
    if ((!ev->kind.len || kve_kind_of(ev->kind) == told->kind) &&
        (!ev->window || !told->window || ev->window == told->window) &&
        (!ev->block_size || !told->block_size || ev->block_size == told->block_size))
        return;
    sources->differs |= 1u << (told - sources->told.items);
}

/* Classify the event's group: by what the event tells, else by what the registration does. */
static struct kve_group described(struct kve_sources *sources, uint32_t rank,
                                  const struct kve_raw_event *ev, const struct kve_group *known,
                                  const struct kve_told_group *told, uint32_t block_size)
{
    struct kve_group g = {.rank = rank, .group = (uint32_t)ev->group};
    enum kve_kind kind = told && !ev->kind.len ? (enum kve_kind)told->kind : kve_kind_of(ev->kind);
    uint64_t window = ev->window || !told ? ev->window : told->window, size;

    set_size(&g, ev, known, told, block_size);
    g.kind = kind;
    size = (uint64_t)g.stride * block_size / g.parts;
    if (kve_kind_is_full(kind)) {
        describe_full(&g, !ev->has_group || !has_other_main(sources, rank, g.group));
    } else if (kve_kind_is_sliding(kind) && window && window <= UINT32_MAX) {
        describe_sliding(&g, window, size);
    } else if (kind == KVE_KIND_MAMBA) {
        g.is_window = g.stride > 0;
        g.needs = KV_NEEDS_STATE;
        g.need = 1;
    } else if (kind == KVE_KIND_CHUNKED && told) {
        describe_chunks(&g, told->chunk, size);
    }
    return g;
}

static bool same_group(const struct kve_group *a, const struct kve_group *b)
{
    return a->is_main == b->is_main && a->is_window == b->is_window && a->window == b->window &&
           a->need == b->need && a->needs == b->needs && a->stride == b->stride &&
           a->parts == b->parts && a->kind == b->kind;
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

/* Tokens of one block of a group, 0: unknown. */
static uint64_t size_of(const struct kve_group *g, uint32_t block_size)
{
    return g ? (uint64_t)g->stride * block_size / KV_MAX(g->parts, 1u) : 0;
}

/*
 * Return true for a key inside of a block. Where groups have blocks of several sizes, vLLM gives the
 * last block of a prompt, which isn't full, a key of the hash unit: its event has one hash, and the
 * unit's tokens. A key as long as a registered block may be all that the group has shown: then it
 * counts as one of the group's blocks, until a larger one comes.
 */
static bool is_inner_key(const struct kve_sources *sources, uint32_t rank,
                         const struct kve_raw_event *ev, const struct kve_group *known,
                         uint32_t block_size)
{
    enum kve_kind kind;

    if (ev->type != KVE_RAW_STORED || !ev->has_group || ev->n_hashes != 1 || !ev->block_size ||
        ev->n_tokens != ev->block_size)
        return false;
    kind = kve_kind_of(ev->kind);
    if (known)
        return !known->is_main && ev->block_size < size_of(known, block_size) &&
               (kve_kind_is_full(kind) || kind == KVE_KIND_MAMBA);
    return ev->block_size < block_size && kve_kind_is_full(kind) &&
           has_other_main(sources, rank, (uint32_t)ev->group);
}

/* Return the group of an event: by its kind, else as learned, else by its number. */
static struct kve_group group_of(struct kve_sources *sources, uint32_t rank,
                                 const struct kve_raw_event *ev, const struct kve_group *known,
                                 uint32_t block_size)
{
    const struct kve_told_group *told =
        ev->has_group && sources->told.n
            ? kve_told_find(&sources->told, ev->group, kve_kind_of(ev->kind))
            : NULL;

    compare(sources, ev, told);
    if (ev->kind.len || (told && told->kind && !known)) {
        struct kve_group g = described(sources, rank, ev, known, told, block_size);

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

/* Insert a group into a sorted list. */
static void insert(struct kve_listed_group *list, uint32_t n, const struct kve_group *group,
                   bool seen)
{
    for (; n && list[n - 1].is.group > group->group; n--)
        list[n] = list[n - 1];
    list[n] = (struct kve_listed_group){*group, seen};
}

uint32_t kve_sources_list(struct kve_sources *sources, uint32_t rank, uint32_t block_size,
                          struct kve_listed_group ret[KVE_MAX_LISTED])
{
    const struct kve_group_rank *of = kve_groups_find_rank(&sources->groups, rank);
    uint32_t n = 0;

    for (uint32_t i = of ? of->first : 0; i; i = sources->groups.items[i - 1].next)
        insert(ret, n++, &sources->groups.items[i - 1], true);
    for (uint32_t i = 0; i < sources->told.n; i++) {
        const struct kve_told_group *told = &sources->told.items[i];
        const struct kve_raw_event ev = {
            .type = KVE_RAW_REMOVED, .has_group = true, .group = told->group};

        if (told->group != KVE_ANY_GROUP && !kve_groups_find(&sources->groups, rank, told->group)) {
            struct kve_group group = described(sources, rank, &ev, NULL, told, block_size);

            insert(ret, n++, &group, false);
        }
    }
    return n;
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
           a->need == b->need && a->needs == b->needs && a->stride == b->stride &&
           a->parts == b->parts && strcmp(a->owner, b->owner) == 0;
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
    const struct kve_group *known =
        ev->has_group ? kve_groups_find(&sources->groups, rank, (uint32_t)ev->group) : NULL;
    bool is_inner = is_inner_key(sources, rank, ev, known, block_size);
    struct kve_source source;
    struct kve_group g;

    if (is_inner && ev->block_size < block_size) {
        /*
         * Beside states the engine resumes at such keys. Of a group that has shown nothing else, it may
         * be a block.
         */
        sources->unfollowed |= !known || known->needs == KV_NEEDS_STATE;
        return -KVE_SKIP_RC(BLOCK_SIZE);
    }
    g = is_inner ? *known : group_of(sources, rank, ev, known, block_size);
    /* A state that ends inside of a registered block: the engine resumes there, and no answer tells it. */
    if (g.parts > 1 && g.needs == KV_NEEDS_STATE && ev->type == KVE_RAW_STORED)
        sources->unfollowed |= ev->n_tokens % block_size > 0;
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
                                 .parts = g.parts,
                                 .needs = g.needs};
    put_owner(source.owner, owner_of(ev));
    return number_of(sources, &source);
}
