// SPDX-License-Identifier: Apache-2.0
/**
 * Records of block managers (kv_plane.h), into the index: which blobs they have in their object tiers,
 * and which they use.
 *
 *     STORE, external   the publisher has the blob: told, and a use unless it was told before
 *     STORE, elsewhere  a block that has a blob came into memory or onto a disk. Where the record says
 *                       that it was in a tier before, it was read back: a use
 *     REMOVE, external  the publisher has forgotten the blob, or deleted it
 *
 * A block's key in the store follows from the fingerprint in the message's header, its group, key and
 * size (docs/formats.md, "Object tier").
 *
 * Threads: a feed is one thread's, and the index belongs to the caller meanwhile.
 */
#ifndef KV_ADVISOR_FEED_H
#define KV_ADVISOR_FEED_H

#include "advisor/index/index.h"
#include "kv_plane.h"

struct kva_feed;

int kva_feed_create(struct kva_index *index, struct kva_feed **ret); /* 0; -ENOMEM */
void kva_feed_destroy(struct kva_feed *feed);

struct kva_advice;
/** Tell @advice of all references from here on; it is borrowed until the feed's end. */
void kva_feed_set_advice(struct kva_feed *feed, struct kva_advice *advice);

/** A publisher has been heard at @now_ns (kv_now_ns). */
void kva_feed_heard(struct kva_feed *feed, const char *publisher, uint64_t now_ns);
/** Forget what a publisher has told: a snapshot follows. */
void kva_feed_reset(struct kva_feed *feed, const char *publisher);
/**
 * Take a record. A few records wait, so that memory is fetched meanwhile, for those behind them, for any
 * other call, or for kva_feed_flush.
 */
void kva_feed_take(struct kva_feed *feed, const struct kvp_header *header,
                   const struct kvp_record *record);
void kva_feed_flush(struct kva_feed *feed);
/** The publisher's blobs are all told, or may not be. */
void kva_feed_whole(struct kva_feed *feed, const char *publisher, bool whole);

/**
 * Forget publishers that were not heard for @silence_ns. Writes the subject of one of them to @ret, for
 * its follower to forget; returns false when there was none.
 */
bool kva_feed_silent(struct kva_feed *feed, uint64_t now_ns, uint64_t silence_ns,
                     char ret[KVP_MAX_SUBJECT]);
/** Count no publisher as silent: the server was away. None is whole until it is heard again. */
void kva_feed_all_heard(struct kva_feed *feed, uint64_t now_ns);
/** True when all that publishers have is told: then a removal by all of them means that none has it. */
bool kva_feed_is_whole(const struct kva_feed *feed);

struct kva_feed_stats {
    uint64_t records, stores, uses, removals, unsized; /* unsized: without size or fingerprint */
    uint32_t publishers, whole;
};
void kva_feed_get_stats(const struct kva_feed *feed, struct kva_feed_stats *ret);

#endif
