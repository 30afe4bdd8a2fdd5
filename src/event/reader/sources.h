// SPDX-License-Identifier: Apache-2.0
/**
 * Find out whose cache an event is about.
 *
 * A publisher announces several caches under the same hashes: its own full attention (source 0),
 * the other cache groups of a hybrid model, and caches of other owners (a secondary offloading
 * tier). Each combination of group and owner is a source, numbered in order of first appearance.
 *
 * Stored events describe a group's kind and window, and the reader learns them per rank. Removals
 * only name the group. For an event without a kind: no group means full attention; a learned group
 * keeps its kind; then counts what the registration tells of it; group 0 is full attention unless
 * learned otherwise. Groups beyond the limits of groups.h aren't learned, and the reader says that it
 * skips some. No event tells a chunk's length: chunked attention is followed where the registration
 * tells it.
 *
 * Of several full-attention groups of a rank, the first one learned is source 0. A match needs its
 * blocks in the others, too: they count as windows without an end.
 */
#ifndef KV_EVENT_READER_SOURCES_H
#define KV_EVENT_READER_SOURCES_H

#include "event/reader/groups.h"
#include "event/reader/told.h"
#include "event/wire/raw_event.h"

/** Most sources of a reader, number 0 included. Events of further sources are skipped. */
#define KVE_MAX_SOURCES 64

struct kve_sources {
    struct kve_groups groups;
    struct kve_source items[KVE_MAX_SOURCES];
    uint32_t n;   /* item 0 is the main cache; 0 items until an event of another source */
    bool unnamed; /* stored events without a kind were of the main cache */
    /* stored events of a group that the reader can't follow, or can't learn, were seen */
    bool unfollowed;
    /* Groups that the registration tells. It outlives resets, and isn't part of the state of replicas. */
    struct kve_told told;
    uint32_t differs; /* bit per told group that events have told otherwise, since the start */
};

/**
 * Return the number of the source of an event of @rank. Learns groups from stored events.
 * @block_size is the reader's; the event's group must fit 32 bits. Returns -KVE_SKIP_RC(GROUP) for
 * a group that can't be followed, -KVE_SKIP_RC(SOURCE) beyond KVE_MAX_SOURCES, -KVE_SKIP_RC(BLOCK_SIZE)
 * for a key inside of a registered block, of which no answer in whole blocks can tell.
 */
int kve_sources_of(struct kve_sources *sources, uint32_t rank, const struct kve_raw_event *ev,
                   uint32_t block_size);

/** Return true when a main group of @rank is known, or was left out for want of room. */
bool kve_sources_has_main(const struct kve_sources *sources, uint32_t rank);

/**
 * Return true when a group's blocks can be of such a size beside registered ones of @block_size
 * tokens; 0: unknown.
 */
bool kve_is_size(uint32_t stride, uint32_t parts, uint32_t block_size);

/** Return the number of the main group of @rank; 0 when events don't tell it; -1: no such group. */
int64_t kve_sources_main_group(const struct kve_sources *sources, uint32_t rank);

/**
 * Return the number of the source of @owner's main cache: 0 for an empty name, -KVE_SKIP_RC(SOURCE)
 * beyond KVE_MAX_SOURCES.
 */
int kve_sources_owner(struct kve_sources *sources, struct kv_str owner);

/** Return true when an event has named @owner. */
bool kve_sources_has_owner(const struct kve_sources *sources, struct kv_str owner);

/**
 * Add a source of another reader under the next number. Returns 0, or -ENOSPC beyond
 * KVE_MAX_SOURCES.
 */
int kve_sources_add(struct kve_sources *sources, const struct kve_source *source);

/** Most groups that kve_sources_list lists. */
#define KVE_MAX_LISTED (KVE_MAX_GROUPS + KVE_MAX_TOLD)

struct kve_listed_group {
    struct kve_group is;
    bool seen; /* events have shown it; false: only the registration tells it */
};

/** List the groups of @rank, by number. Returns how many there are. */
uint32_t kve_sources_list(struct kve_sources *sources, uint32_t rank, uint32_t block_size,
                          struct kve_listed_group ret[KVE_MAX_LISTED]);

/** Forget all groups. Sources keep their numbers: blocks announced under them may still be held. */
void kve_sources_reset(struct kve_sources *sources);

#endif
