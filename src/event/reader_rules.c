// SPDX-License-Identifier: Apache-2.0
/* Rules for stored and removed events: whose cache an event is about, and in which tier. */
#include "base/ascii.h"
#include "event/reader.h"

static bool str_is(struct kv_str s, const char *text)
{
    return strlen(text) == s.len && kv_ncasecmp(s.p, text, s.len) == 0;
}

/*
 * Return the tier of a storage medium, by the engines' names for it. An empty name is the device;
 * -1: unknown.
 */
static int tier_of(struct kv_str medium)
{
    static const struct {
        const char *name;
        enum kv_tier tier;
    } media[] = {
        {"GPU", KV_TIER_DEVICE},       {"CPU", KV_TIER_HOST},        {"CPU_PINNED", KV_TIER_HOST},
        {"CPU_TIER1", KV_TIER_HOST},   {"CPU_TIER2", KV_TIER_DISK},  {"DISK", KV_TIER_DISK},
        {"NVME", KV_TIER_DISK},        {"STORAGE", KV_TIER_DISK},    {"EXTERNAL", KV_TIER_EXTERNAL},
        {"NETWORK", KV_TIER_EXTERNAL}, {"REMOTE", KV_TIER_EXTERNAL}, {"SHARED", KV_TIER_EXTERNAL},
        {"DEVICE", KV_TIER_DEVICE},
    };

    if (!medium.len || kv_str_eq(medium, "GPU"))
        return KV_TIER_DEVICE;
    for (size_t i = 0; i < KV_COUNT(media); i++) {
        if (str_is(medium, media[i].name))
            return (int)media[i].tier;
    }
    return -1;
}

/* vLLM's Mooncake connector writes the names in small letters. */
bool kve_is_vllm_tier(struct kv_str medium)
{
    return str_is(medium, "CPU") || str_is(medium, "STORAGE");
}

/*
 * Note tiers that the publisher's clear empties, too. vLLM's clear empties only its GPU pool; the
 * tiers that it names CPU and STORAGE keep their blocks. Engines with other tier names (SGLang)
 * clear all tiers.
 */
static void note_medium(struct kve_reader *reader, struct kv_str medium, enum kv_tier tier)
{
    if (tier != KV_TIER_DEVICE && !kve_is_vllm_tier(medium))
        reader->engine_tiers |= 1u << tier;
}

/*
 * Note which pool announces a vLLM tier. SimpleCPUOffloadConnector has a block pool like the
 * device's below the device and marks its blocks LOCAL; other connectors give no locality. vLLM
 * puts the connector's events behind all device events of a batch.
 */
static void note_pool(struct kve_reader *reader, const struct kve_raw_event *ev, enum kv_tier tier)
{
    if (tier == KV_TIER_DEVICE) {
        for (size_t i = 0; reader->n_clears && i < reader->n_ops; i++) {
            if (reader->ops[i].type != KVE_OP_CLEAR || !reader->ops[i].unsure)
                continue;
            reader->ops[i].tiers = 1u << KV_TIER_DEVICE | reader->engine_tiers;
            reader->ops[i].unsure = false; /* the pool's come behind all of the device's */
            reader->device_cleared = true;
        }
        reader->n_clears = 0;
        reader->pool_began = false;
    } else if (kve_is_vllm_tier(ev->medium) && !ev->ownership.len) {
        if (str_is(ev->locality, "LOCAL"))
            reader->pool_tiers |= 1u << tier;
        else
            reader->saw_offload = true;
        reader->pool_began = true;
    }
}

int kve_apply_rules(struct kve_reader *reader, const struct kve_raw_event *ev, struct kve_op *op)
{
    int tier, source;

    if (!ev->has_hashes || (ev->has_group && ev->group > UINT32_MAX))
        return KVE_SKIP_RC(MALFORMED);
    source = kve_sources_of(&reader->sources, op->rank, ev, reader->block_size);
    if (source < 0)
        return -source;
    if (ev->locality.len && !str_is(ev->locality, "LOCAL"))
        return KVE_SKIP_RC(REMOTE);
    tier = tier_of(ev->medium);
    if (tier < 0)
        return KVE_SKIP_RC(MEDIUM);
    if (!source)
        note_medium(reader, ev->medium, (enum kv_tier)tier);
    note_pool(reader, ev, (enum kv_tier)tier);
    if (ev->type == KVE_RAW_STORED && ev->has_group && !ev->ownership.len)
        kve_groups_note_tier(&reader->sources.groups, op->rank, (uint32_t)ev->group,
                             tier == KV_TIER_DEVICE);
    op->source = (uint32_t)source;
    op->tier = (enum kv_tier)tier;
    reader->event.source = op->source;
    reader->event.tiers = 1u << tier;
    return 0;
}

bool kve_is_beside_main(const struct kve_reader *reader, const struct kve_op *op)
{
    return kve_is_window(reader, op) && kve_sources_has_main(&reader->sources, op->rank);
}

/*
 * A group that leaves blocks out gives no usable tokens. Its hashes place its blocks where a main
 * group has the same hashes.
 */
bool kve_places_window(const struct kve_reader *reader, const struct kve_raw_event *ev,
                       const struct kve_op *op)
{
    return kve_is_window(reader, op) && !kve_is_beside_main(reader, op) &&
           ev->block_size == reader->block_size &&
           ev->n_tokens / reader->block_size == ev->n_hashes;
}
