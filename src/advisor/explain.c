// SPDX-License-Identifier: Apache-2.0
#include "advisor/explain.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { CHAIN = 16, TEXT = 400 };

static int digit_of(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                  : -1;
}

bool kva_parse_key(struct kv_str text, uint8_t ret[KVA_KEY])
{
    if (text.len != 2 * (size_t)KVA_KEY)
        return false;
    for (size_t i = 0; i < KVA_KEY; i++) {
        int high = digit_of(text.p[2 * i]), low = digit_of(text.p[2 * i + 1]);

        if (high < 0 || low < 0)
            return false;
        ret[i] = (uint8_t)(high * 16 + low);
    }
    return true;
}

static void put_key(struct kv_json_writer *w, const uint8_t key[KVA_KEY])
{
    char text[2 * KVA_KEY + 1];

    for (size_t i = 0; i < KVA_KEY; i++)
        snprintf(text + 2 * i, 3, "%02x", key[i]);
    kv_json_put_str(w, text);
}

static void put_places(const struct kva_volumes *v, const struct kva_block *b,
                       struct kv_json_writer *w)
{
    kv_json_key(w, "in");
    kv_json_begin_array(w);
    for (size_t m = 0; m < v->config.n_members; m++)
        if (b->have >> m & 1)
            kv_json_put_str(w, v->config.members[m].name);
    kv_json_end_array(w);
    kv_json_member_str(w, "wanted_in", v->config.members[b->want].name);
}

/* Name the packs that have the blob. */
static void put_packs(struct kva_volumes *v, const struct kva_block *b, struct kv_json_writer *w)
{
    kv_json_key(w, "packs");
    kv_json_begin_array(w);
    for (size_t m = 0; m < v->config.n_members; m++) {
        struct trd_packs *packs = trd_catalog_hold(&v->packs[m]);
        struct trd_packed place;
        size_t at = 0;

        while (packs && trd_packs_next(packs, b->key, KVA_KEY, &at, &place)) {
            char name[TRD_PACK_NAME];

            trd_pack_write_name(&place.pack->name, name);
            kv_json_begin_object(w);
            kv_json_member_str(w, "member", v->config.members[m].name);
            kv_json_member_str(w, "pack", name);
            kv_json_member_u64(w, "entry", place.entry);
            kv_json_end_object(w);
        }
        trd_packs_release(packs);
    }
    kv_json_end_array(w);
    kv_json_member_bool(w, "packed_alone", (b->flags & KVA_PACKED) != 0);
}

static void put_chain(const struct kva_index *index, const struct kva_block *b,
                      struct kv_json_writer *w)
{
    kv_json_key(w, "parents");
    kv_json_begin_array(w);
    for (int i = 0; i < CHAIN && (b = kva_parent(index, b)); i++)
        put_key(w, b->key);
    kv_json_end_array(w);
}

/* Return the first member that blobs are moved to. */
static size_t fastest(const struct kva_volumes *v)
{
    size_t m = 0;

    while (m + 1 < v->config.n_members && (v->config.members[m].read_only || !v->stores[m]))
        m++;
    return m;
}

static void put_why(const struct kva_volumes *v, const struct kva_index_stats *stats,
                    const char *policy, const struct kva_block *b, struct kv_json_writer *w)
{
    const char *here = v->config.members[b->want].name, *fast = v->config.members[fastest(v)].name;
    uint64_t limit = stats->members[b->want].limit;
    char text[TEXT];

    if (b->want != fastest(v))
        snprintf(text, sizeof(text),
                 "%s: the policy %s keeps other blobs in the faster members, whose limits are full",
                 b->count ? "used before, and not of late" : "no use is known", policy);
    else if (limit == UINT64_MAX)
        snprintf(text, sizeof(text), "%s is the fastest member, and has no limit", here);
    else
        snprintf(text, sizeof(text), "the policy %s keeps it among the %" PRIu64 " bytes of %s",
                 policy, limit, here);
    kv_json_member_str(w, "why", text);
    if (b->want != fastest(v))
        snprintf(text, sizeof(text), "a use moves it to %s", fast);
    else if (limit == UINT64_MAX)
        snprintf(text, sizeof(text), "nothing");
    else
        snprintf(text, sizeof(text),
                 "uses of other blobs: %s keeps %" PRIu64 " bytes, and %" PRIu64
                 " are wanted there",
                 here, limit, stats->members[b->want].want_bytes);
    kv_json_member_str(w, "what_would_move_it", text);
}

static const char *step_of(const struct kva_block *b)
{
    uint16_t want = (uint16_t)(1u << b->want);

    if (!b->have)
        return "told of, and not found in a member yet";
    if (!(b->have & want))
        return "waits to be copied to where it is wanted";
    if (b->have != want)
        return b->flags & KVA_LINGER ? "copied; the other copy is removed after the store's linger"
                                     : "in several members; one copy stays";
    return "none: it is where it is wanted";
}

bool kva_explain(struct kva_volumes *volumes, const struct kva_index *index, const char *policy,
                 const uint8_t key[KVA_KEY], uint32_t now_s, struct kv_json_writer *w)
{
    const struct kva_block *b = kva_index_find(index, key);
    struct kva_index_stats stats;

    if (!b)
        return false;
    kva_index_get_stats(index, &stats);
    kv_json_begin_object(w);
    kv_json_key(w, "hash");
    put_key(w, b->key);
    kv_json_member_u64(w, "bytes", (uint64_t)b->units * KVA_UNIT);
    put_places(volumes, b, w);
    put_packs(volumes, b, w);
    kv_json_member_str(w, "step", step_of(b));
    put_why(volumes, &stats, policy, b, w);
    kv_json_member_u64(w, "uses", b->count);
    kv_json_member_double(w, "heat", kva_heat(index, b, now_s));
    kv_json_key(w, "seconds_since_use");
    if (b->used_s && b->used_s <= now_s)
        kv_json_put_u64(w, now_s - b->used_s);
    else
        kv_json_put_null(w);
    kv_json_member_u64(w, "references_since_use", (uint32_t)(kva_clock(index) - b->stamp));
    kv_json_member_u64(w, "publishers", (uint64_t)__builtin_popcount(b->told));
    kv_json_member_bool(w, "removed_by_publishers", (b->flags & KVA_LEFT) != 0);
    put_chain(index, b, w);
    kv_json_end_object(w);
    return true;
}
