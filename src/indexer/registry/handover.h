// SPDX-License-Identifier: Apache-2.0
/**
 * A stream's state (stream/state.h) and its reader: what a replica needs beside the index to continue.
 * Part of dumps (docs/formats.md); kept beside the position of a worker that isn't registered yet.
 */
#ifndef KV_INDEXER_REGISTRY_HANDOVER_H
#define KV_INDEXER_REGISTRY_HANDOVER_H

#include "base/json.h"
#include "indexer/registry/registry.h"
#include "indexer/view/overlap.h"

struct ki_listener;

struct ki_handover {
    uint64_t instance;
    uint32_t rank; /* rank of the registration */
    struct ki_state state;
    bool unusable; /* read from a dump, but no stream of this version can have such a state */
    struct kve_reader *reader; /* a copy: event/reader/reader_state.h */
    bool has_ends;             /* the dump tells the copies of the stream's blocks at its end: */
    struct kv_buf ends;        /* struct ki_end_copies */
    struct ki_end_doubts doubts;
};

/** Returns 0 or -ENOMEM; free *@ret with ki_handover_free. */
int ki_handover_create(struct ki_handover **ret);
void ki_handover_free(struct ki_handover *h);
int ki_handover_copy(const struct ki_handover *h, struct ki_handover **ret);

/** Copy @l's state at one moment. Returns 0, -ENOMEM, or -ENODATA without a position. */
int ki_handover_take(struct ki_listener *l, struct ki_handover **ret);
/**
 * Give @l, which was seeded and hasn't started, this state. When @l was seeded with another
 * position, it becomes torn.
 */
void ki_handover_give(struct ki_handover *h, struct ki_listener *l);

/**
 * Write the state except the salts (event/reader/reader_state.h), as members of the object that @w is in.
 */
void ki_handover_write(const struct ki_handover *h, struct kv_json_writer *w);
/**
 * Read such an object. A state that is impossible here is unusable. Malformed text sets @json's
 * error.
 */
void ki_handover_read(struct ki_handover *h, struct kv_json *json);

/** Compare by instance and rank, for qsort of pointers. */
int ki_handover_compare(const void *a, const void *b);
/**
 * Update positions from their handovers of the same dump, which may be newer. A position whose
 * handover is unusable or older is torn: its stream must be read from the beginning. Sorts
 * @handovers, and frees all but the newest of each stream. Returns how many are left.
 */
size_t ki_handover_note(struct ki_handover **handovers, size_t n, struct ki_mark *marks,
                        size_t n_marks);

typedef int (*ki_handover_fn)(void *arg, const struct ki_handover *h);
/**
 * Pass a copy of each stream that feeds @model to @fn, one after the other; also streams of workers
 * known only from a peer's dump. A non-zero return of @fn stops. Returns that value, 0 or -ENOMEM.
 */
int ki_registry_handovers(struct ki_registry *registry, const struct ki_model *model,
                          ki_handover_fn fn, void *arg);
/**
 * Give the handovers to the streams that ki_registry_adopt has just seeded, or keep them for
 * workers that may register. Used handovers are taken over and become NULL. The registry must still
 * be held.
 */
void ki_registry_hand_over(struct ki_registry *registry, const char *model, const char *tenant,
                           struct ki_handover **handovers, size_t n);

#endif
