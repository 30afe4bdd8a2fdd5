// SPDX-License-Identifier: Apache-2.0
/** Tiers by the names that engines, connectors and stores give them, in any case of letters. */
#ifndef KV_EVENT_WIRE_MEDIA_H
#define KV_EVENT_WIRE_MEDIA_H

#include <stdbool.h>
#include <stdint.h>

#include "base/json/msgpack.h"
#include "kv_types.h"

/** Effect of a clear of the publisher, which names no medium, on the blocks of a medium. */
enum kve_at_clear {
    KVE_CLEARED_TOO,  /* empties them, too: the engine's own lower tiers */
    KVE_KEPT,         /* leaves them: a connector's, which vLLM resets apart */
    KVE_CLEAR_UNKNOWN /* no engine is known by that name */
};

struct kve_medium {
    const char *name;
    enum kv_tier tier;
    enum kve_at_clear at_clear;
};

/** Return the medium of that name; an empty one is the device. NULL: unknown. */
const struct kve_medium *kve_medium_find(struct kv_str name);

/** Return true for a medium of the device. */
bool kve_medium_is_device(struct kv_str name);

/** Most names of unknown media that are counted one by one, and their longest length in bytes. */
#define KVE_MAX_UNKNOWN_MEDIA 8
#define KVE_MAX_MEDIUM 31

/** Events that named unknown media. Zero-initialise. */
struct kve_unknown_media {
    struct kve_unknown_medium {
        char name[KVE_MAX_MEDIUM + 1]; /* printable ASCII; '?' for other bytes */
        uint64_t n;
    } items[KVE_MAX_UNKNOWN_MEDIA];
    uint32_t n_items;
    uint64_t n_others; /* events of further names */
};

void kve_unknown_media_count(struct kve_unknown_media *media, struct kv_str name, uint64_t n);

#endif
