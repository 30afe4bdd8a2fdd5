// SPDX-License-Identifier: Apache-2.0
#include "event/reader/reader_state.h"

#include <stdlib.h>
#include <string.h>

#include "event/reader/reader.h"

#define SALTS 512u /* slots that one call visits */

enum { FLAG_AMBIGUOUS = 1, FLAG_LOWER = 2 };

static const char *const kinds[] = {"other", "main", "window"};

struct kve_reader *kve_reader_copy(const struct kve_reader *reader)
{
    struct kve_reader *copy = calloc(1, sizeof(*copy));

    if (!copy)
        return NULL;
    copy->sources = reader->sources;
    if (kve_groups_copy(&reader->sources.groups, &copy->sources.groups) < 0) {
        free(copy);
        return NULL;
    }
    copy->saw_salt = reader->saw_salt;
    copy->saw_adapter = reader->saw_adapter;
    copy->saw_objects = reader->saw_objects;
    copy->engine_tiers = reader->engine_tiers;
    copy->pool_tiers = reader->pool_tiers;
    copy->saw_offload = reader->saw_offload;
    copy->unclear_tiers = reader->unclear_tiers;
    copy->names_ranks = reader->names_ranks;
    copy->names_zero = reader->names_zero;
    copy->components = reader->components;
    memcpy(copy->chunk, reader->chunk, sizeof(copy->chunk));
    copy->salts = reader->salts;
    if (reader->salts.capacity) {
        size_t bytes = reader->salts.capacity * sizeof(*reader->salts.slots);

        copy->salts.slots = malloc(bytes);
        if (!copy->salts.slots) {
            kve_groups_fini(&copy->sources.groups);
            free(copy);
            return NULL;
        }
        memcpy(copy->salts.slots, reader->salts.slots, bytes);
    }
    return copy;
}

/* Return true when the groups have whole numbers of blocks in one of @block_size tokens. */
static bool fits(const struct kve_sources *sources, uint32_t block_size)
{
    for (size_t i = 0; i < sources->groups.n; i++)
        if (block_size % sources->groups.items[i].parts)
            return false;
    for (uint32_t i = 0; i < sources->n; i++)
        if (block_size % sources->items[i].parts)
            return false;
    return true;
}

int kve_reader_take_over(struct kve_reader *reader, struct kve_reader *from)
{
    size_t limit = reader->salts.limit;

    if (!fits(&from->sources, reader->block_size))
        return -EPROTO;
    from->sources.told = reader->sources.told;
    from->sources.differs = reader->sources.differs;
    kve_salts_fini(&reader->salts);
    kve_groups_fini(&reader->sources.groups);
    reader->sources = from->sources;
    reader->saw_salt = from->saw_salt;
    reader->saw_adapter = from->saw_adapter;
    reader->saw_objects = from->saw_objects;
    reader->engine_tiers = from->engine_tiers;
    reader->pool_tiers = from->pool_tiers;
    reader->saw_offload = from->saw_offload;
    reader->unclear_tiers = from->unclear_tiers;
    reader->names_ranks = from->names_ranks;
    reader->names_zero = from->names_zero;
    reader->components = from->components;
    memcpy(reader->chunk, from->chunk, sizeof(reader->chunk));
    reader->salts = from->salts;
    reader->salts.limit = limit;
    kve_salts_init(&from->salts, from->salts.limit);
    memset(&from->sources, 0, sizeof(from->sources));
    kve_reader_reset(from);
    return 0;
}

size_t kve_reader_salt_bytes(const struct kve_reader *reader)
{
    return reader->salts.capacity * sizeof(*reader->salts.slots);
}

/* -- writing ----------------------------------------------------------------------------------- */

/* Write what tells a window, and what a match needs of it: finish_window has the rule. */
static void write_window(struct kv_json_writer *w, const struct kve_source *window)
{
    kv_json_member_u64(w, "window", window->window);
    kv_json_member_u64(w, "need", window->needs == KV_NEEDS_ALL ? UINT32_MAX : window->need);
    kv_json_member_u64(w, "stride", window->stride);
    if (window->parts > 1)
        kv_json_member_u64(w, "parts", window->parts);
    if (window->needs == KV_NEEDS_CHUNK)
        kv_json_member_bool(w, "chunked", true);
}

static void write_sources(const struct kve_sources *sources, struct kv_json_writer *w)
{
    kv_json_key(w, "sources");
    kv_json_begin_array(w);
    for (uint32_t i = 1; i < sources->n; i++) {
        const struct kve_source *source = &sources->items[i];

        kv_json_begin_object(w);
        kv_json_member_str(w, "owner", source->owner);
        if (source->kind == KVE_SOURCE_WINDOW) {
            kv_json_member_u64(w, "group", source->group);
            write_window(w, source);
        }
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

static void write_groups(const struct kve_sources *sources, struct kv_json_writer *w)
{
    kv_json_key(w, "groups");
    kv_json_begin_array(w);
    for (size_t i = 0; i < sources->groups.n; i++) {
        const struct kve_group *g = &sources->groups.items[i];

        kv_json_begin_object(w);
        kv_json_member_u64(w, "dp_rank", g->rank);
        kv_json_member_u64(w, "group", g->group);
        kv_json_member_str(w, "kind", kinds[g->is_main ? 1 : g->is_window ? 2 : 0]);
        write_window(w, &(struct kve_source){.window = g->window,
                                             .need = g->need,
                                             .stride = g->stride,
                                             .parts = g->parts,
                                             .needs = g->needs});
        if (g->below || g->home) { /* readers that know no homes are partial */
            kv_json_member_bool(w, "below", true);
            kv_json_member_u64(w, "tier", g->below + g->home);
            kv_json_member_bool(w, "home", g->home > 0);
        }
        if (g->offloads)
            kv_json_member_bool(w, "offloads", true);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

void kve_reader_write(const struct kve_reader *reader, struct kv_json_writer *w)
{
    write_sources(&reader->sources, w);
    write_groups(&reader->sources, w);
    kv_json_member_bool(w, "unnamed_main", reader->sources.unnamed);
    kv_json_member_bool(w, "skips_group", reader->sources.unfollowed);
    kv_json_member_bool(w, "saw_salt", reader->saw_salt);
    kv_json_member_bool(w, "saw_adapter", reader->saw_adapter);
    kv_json_member_bool(w, "saw_objects", reader->saw_objects);
    kv_json_member_u64(w, "engine_tiers", reader->engine_tiers);
    kv_json_member_u64(w, "pool_tiers", reader->pool_tiers);
    kv_json_member_bool(w, "saw_offload", reader->saw_offload);
    kv_json_member_u64(w, "unclear_tiers", reader->unclear_tiers);
    kv_json_member_bool(w, "names_ranks", reader->names_ranks);
    kv_json_member_bool(w, "names_zero", reader->names_zero);
    kv_json_member_u64(w, "components", reader->components);
    kv_json_key(w, "chunks");
    kv_json_begin_array(w);
    for (int t = 0; t < KV_N_TIERS; t++)
        kv_json_put_u64(w, reader->chunk[t]);
    kv_json_end_array(w);
}

static void write_salt(const struct kve_salt_entry *entry, bool lower, struct kv_json_writer *w)
{
    kv_json_begin_array(w);
    kv_json_put_u64(w, entry->hash);
    kv_json_put_u64(w, entry->salt);
    kv_json_put_u64(w, entry->rank);
    kv_json_put_u64(w, (entry->ambiguous ? FLAG_AMBIGUOUS : 0u) | (lower ? FLAG_LOWER : 0u));
    for (int t = 0; t < KV_N_TIERS; t++)
        kv_json_put_u64(w, entry->copies[t]);
    kv_json_end_array(w);
}

bool kve_reader_write_salts(const struct kve_reader *reader, size_t *at, struct kv_json_writer *w)
{
    const struct kve_salts *salts = &reader->salts;
    size_t end = KV_MIN(salts->capacity, *at + SALTS);

    for (; *at < end; ++*at) {
        const struct kve_salt_entry *slot = &salts->slots[*at];

        /* Skip stale entries, which a clear has left behind. */
        if (slot->state == KVE_SALT_BLOCK && kve_salts_find(salts, slot->rank, slot->hash) == slot)
            write_salt(slot, kve_salts_saw_lower(salts, slot->rank), w);
    }
    return *at < salts->capacity;
}

/* -- reading ----------------------------------------------------------------------------------- */

/* Read a member of a window. Returns false for any other member. */
static bool read_window(struct kv_json *json, struct kv_str key, struct kve_source *ret)
{
    uint32_t *to = kv_str_eq(key, "window")   ? &ret->window
                   : kv_str_eq(key, "need")   ? &ret->need
                   : kv_str_eq(key, "stride") ? &ret->stride
                   : kv_str_eq(key, "parts")  ? &ret->parts
                                              : NULL;

    if (to)
        *to = (uint32_t)kv_json_u64(json, UINT32_MAX);
    else if (kv_str_eq(key, "chunked") && kv_json_bool(json))
        ret->needs = KV_NEEDS_CHUNK;
    return to != NULL || kv_str_eq(key, "chunked");
}

/* Find out what a match needs of a window that was read. */
static void finish_window(struct kve_source *window)
{
    if (window->need == UINT32_MAX) {
        window->needs = KV_NEEDS_ALL;
        window->need = 1;
    } else if (window->needs != KV_NEEDS_CHUNK && !window->window) {
        window->needs = KV_NEEDS_STATE;
    }
}

/* False: no reader keeps such a name. */
static bool read_owner(struct kv_json *json, char to[KVE_MAX_OWNER + 1])
{
    struct kv_buf scratch = {.limit = 64u * KVE_MAX_OWNER};
    struct kv_str owner = kv_json_str(json, &scratch);
    bool fits = owner.len <= KVE_MAX_OWNER;

    if (fits && owner.len)
        memcpy(to, owner.p, owner.len);
    kv_buf_fini(&scratch);
    return fits;
}

/* Readers of items. Each returns 0, or -EPROTO for an item that no reader can have. */

static int read_source(struct kve_sources *sources, struct kv_json *json)
{
    struct kve_source source = {.kind = KVE_SOURCE_OWNER, .stride = 1, .parts = 1};
    bool usable = true;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "owner")) {
            usable = read_owner(json, source.owner);
        } else if (kv_str_eq(key, "group")) {
            source.group = (uint32_t)kv_json_u64(json, UINT32_MAX);
            source.kind = KVE_SOURCE_WINDOW;
        } else if (!read_window(json, key, &source)) {
            kv_json_skip(json);
        }
    }
    if (source.kind == KVE_SOURCE_WINDOW)
        finish_window(&source);
    usable = usable && kve_is_size(source.stride, source.parts, 0) &&
             (source.kind == KVE_SOURCE_WINDOW ? source.need > 0 : source.owner[0] != '\0');
    return usable && kve_sources_add(sources, &source) == 0 ? 0 : -EPROTO;
}

static void read_kind(struct kv_json *json, struct kve_group *g)
{
    struct kv_buf scratch = {.limit = 64};
    struct kv_str kind = kv_json_str(json, &scratch);

    g->is_main = kv_str_eq(kind, kinds[1]);
    g->is_window = kv_str_eq(kind, kinds[2]);
    kv_buf_fini(&scratch);
}

/*
 * Return true when a group can be of that size: one that isn't followed, or full attention, may have
 * blocks of no whole number of registered ones (stride 0).
 */
static bool can_be(const struct kve_group *g)
{
    if (!g->stride && !g->is_window)
        return g->parts == 1;
    return kve_is_size(g->stride, g->parts, 0) && (!g->is_window || g->need);
}

static int read_group(struct kve_sources *sources, struct kv_json *json)
{
    struct kve_source window = {.parts = 1};
    struct kve_group g = {0};
    struct kv_str key;
    bool below = false, home = false;
    uint32_t tier = KV_TIER_HOST;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "below"))
            below = kv_json_bool(json);
        else if (kv_str_eq(key, "home"))
            home = kv_json_bool(json);
        else if (kv_str_eq(key, "tier"))
            tier = (uint32_t)kv_json_u64(json, KV_N_TIERS - 1);
        else if (kv_str_eq(key, "offloads"))
            g.offloads = kv_json_bool(json);
        else if (kv_str_eq(key, "dp_rank"))
            g.rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
        else if (kv_str_eq(key, "group"))
            g.group = (uint32_t)kv_json_u64(json, UINT32_MAX);
        else if (kv_str_eq(key, "kind"))
            read_kind(json, &g);
        else if (!read_window(json, key, &window))
            kv_json_skip(json);
    }
    if (g.is_window)
        finish_window(&window);
    g.window = window.window;
    g.need = window.need;
    g.stride = window.stride;
    g.parts = window.parts;
    g.needs = window.needs;
    g.on_device = !below;
    g.waits = below && !home;
    g.home = below && home ? tier : 0;
    g.below = g.waits ? tier : 0;
    return can_be(&g) && (tier || !below) && kve_groups_restore(&sources->groups, &g) == 0
               ? 0
               : -EPROTO;
}

static int read_salt(struct kve_salts *salts, struct kv_json *json)
{
    static const uint64_t max[4 + KV_N_TIERS] = {UINT64_MAX, UINT64_MAX, UINT32_MAX, 3,
                                                 UINT8_MAX,  UINT8_MAX,  UINT8_MAX,  UINT8_MAX};
    struct kve_salt_entry entry = {.state = KVE_SALT_BLOCK};
    uint64_t value[KV_COUNT(max)] = {0};
    size_t n = 0;

    kv_json_array(json);
    while (kv_json_next_item(json)) {
        if (n < KV_COUNT(max)) {
            value[n] = kv_json_u64(json, max[n]);
            n++;
        } else {
            kv_json_skip(json);
        }
    }
    if (kv_json_failed(json))
        return 0;
    if (n < KV_COUNT(max))
        return -EPROTO;
    entry.hash = value[0];
    entry.salt = value[1];
    entry.rank = (uint32_t)value[2];
    entry.ambiguous = value[3] & FLAG_AMBIGUOUS;
    entry.lower = value[3] & FLAG_LOWER;
    for (int t = 0; t < KV_N_TIERS; t++)
        entry.copies[t] = (uint8_t)value[4 + t];
    return kve_salts_restore(salts, &entry) < 0 ? -EPROTO : 0;
}

static bool read_flag(struct kve_reader *reader, struct kv_json *json, struct kv_str key)
{
    bool *to = kv_str_eq(key, "unnamed_main")  ? &reader->sources.unnamed
               : kv_str_eq(key, "skips_group") ? &reader->sources.unfollowed
               : kv_str_eq(key, "saw_salt")    ? &reader->saw_salt
               : kv_str_eq(key, "saw_adapter") ? &reader->saw_adapter
               : kv_str_eq(key, "saw_objects") ? &reader->saw_objects
               : kv_str_eq(key, "saw_offload") ? &reader->saw_offload
               : kv_str_eq(key, "names_ranks") ? &reader->names_ranks
               : kv_str_eq(key, "names_zero")  ? &reader->names_zero
                                               : NULL;

    if (to)
        *to = kv_json_bool(json);
    return to != NULL;
}

static void read_chunks(struct kve_reader *reader, struct kv_json *json)
{
    size_t t = 0;

    kv_json_array(json);
    while (kv_json_next_item(json)) {
        uint32_t chunk = (uint32_t)kv_json_u64(json, UINT32_MAX);

        if (t < KV_N_TIERS)
            reader->chunk[t++] = chunk;
    }
}

int kve_reader_read(struct kve_reader *reader, struct kv_json *json, struct kv_str key)
{
    int rc = 0;

    if (kv_str_eq(key, "sources")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            rc |= read_source(&reader->sources, json);
    } else if (kv_str_eq(key, "groups")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            rc |= read_group(&reader->sources, json);
    } else if (kv_str_eq(key, "salts")) {
        kv_json_array(json);
        while (kv_json_next_item(json))
            rc |= read_salt(&reader->salts, json);
    } else if (kv_str_eq(key, "engine_tiers")) {
        reader->engine_tiers = (uint32_t)kv_json_u64(json, (1u << KV_N_TIERS) - 1);
    } else if (kv_str_eq(key, "pool_tiers")) {
        reader->pool_tiers = (uint32_t)kv_json_u64(json, (1u << KV_N_TIERS) - 1);
    } else if (kv_str_eq(key, "unclear_tiers")) {
        reader->unclear_tiers = (uint32_t)kv_json_u64(json, (1u << KV_N_TIERS) - 1);
    } else if (kv_str_eq(key, "components")) {
        reader->components = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "chunks")) {
        read_chunks(reader, json);
    } else {
        return read_flag(reader, json, key);
    }
    return rc ? rc : 1;
}
