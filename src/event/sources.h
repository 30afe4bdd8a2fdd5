// SPDX-License-Identifier: Apache-2.0
/**
 * Whose cache an event is about.
 *
 * A publisher announces several caches under the same hashes: its own full attention (source 0),
 * the other cache groups of a hybrid model, and caches of other owners (a secondary offloading
 * tier). Each combination of group and owner is a source, numbered in order of first appearance.
 *
 * Stored events carry a group's kind and window and teach them per rank; removals only name the
 * group. An event without a kind: no group is full attention, a learned group is what it was
 * learned to be, group 0 is full attention unless learned otherwise.
 *
 * Of several full-attention groups the first one learned, per rank, is source 0. A match needs its
 * blocks in the others, too: they count as windows without an end.
 */
#ifndef KV_EVENT_SOURCES_H
#define KV_EVENT_SOURCES_H

#include "event/raw_event.h"

/** Groups of all ranks; events of groups beyond are skipped unless they name a kind or group 0. */
#define KVE_MAX_GROUPS 256

/** Sources of a reader, number 0 included; events of sources beyond are skipped. */
#define KVE_MAX_SOURCES 64

/** A cache group of one rank, as its stored events describe it. */
struct kve_group {
    uint32_t rank, group;
    bool is_main, is_window;       /* neither: a kind that can't be followed */
    uint32_t window, need, stride; /* of a window: as in struct kve_source */
};

struct kve_sources {
    struct kve_group groups[KVE_MAX_GROUPS];
    size_t n_groups;
    struct kve_source items[KVE_MAX_SOURCES];
    uint32_t n;      /* item 0 is the main cache; 0 items before an event of another source */
    bool unnamed;    /* stored events that name no kind were of the main cache */
    bool unfollowed; /* there were stored events of a group that can't be followed */
};

/**
 * The source of an event of @rank; learns from stored events. @block_size is the reader's; the
 * event's group fits 32 bits. Returns its number, or -KVE_SKIP_RC(GROUP) for a group that can't be
 * followed, -KVE_SKIP_RC(SOURCE) beyond KVE_MAX_SOURCES.
 */
int kve_sources_of(struct kve_sources *sources, uint32_t rank, const struct kve_raw_event *ev,
                   uint32_t block_size);

/** Whether a main group of @rank is known. */
bool kve_sources_has_main(const struct kve_sources *sources, uint32_t rank);

/** The number of the source whose owner is @owner's main cache; 0 without a name; as above. */
int kve_sources_owner(struct kve_sources *sources, struct kv_str owner);

/** Add a source, with the next number, as another reader has it. Returns 0; -ENOSPC beyond
 * KVE_MAX_SOURCES. */
int kve_sources_add(struct kve_sources *sources, const struct kve_source *source);

/** Forget all groups. Sources keep their numbers: what was announced under them may still be held. */
void kve_sources_reset(struct kve_sources *sources);

#endif
