// SPDX-License-Identifier: Apache-2.0
/**
 * Which cache groups of a publisher are full attention.
 *
 * Hybrid models publish several caches under the same hashes; only full attention says how much of
 * a prompt is there. A kind decides, and a stored event that names one teaches whose group it is,
 * per rank. Without a kind: no group, or a group learned as full attention, or group 0 not learned
 * as anything else.
 */
#ifndef KV_EVENT_GROUPS_H
#define KV_EVENT_GROUPS_H

#include "event/raw_event.h"

/** What is beyond isn't learned, and so is skipped unless it is group 0. */
#define KVE_MAX_GROUPS 256

struct kve_groups {
    struct kve_group {
        uint32_t rank;
        uint32_t group;
        bool is_main;
    } known[KVE_MAX_GROUPS];
    size_t n;
};

/** Whether the event, of @rank, is of a full attention cache; learns from it. Its group fits 32
 * bits. */
bool kve_groups_is_main(struct kve_groups *groups, uint32_t rank, const struct kve_raw_event *ev);

void kve_groups_reset(struct kve_groups *groups);

#endif
