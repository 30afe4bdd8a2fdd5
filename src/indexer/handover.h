// SPDX-License-Identifier: Apache-2.0
/**
 * State that a stream has beside the index, and where it stood then: a replica goes on with it, so that
 * batches mean there what they mean here. In dumps (docs/formats.md), and beside the position of a
 * worker that isn't registered yet.
 */
#ifndef KV_INDEXER_HANDOVER_H
#define KV_INDEXER_HANDOVER_H

#include "base/json.h"
#include "indexer/registry.h"

struct ki_listener;

struct ki_handover {
    uint64_t instance;
    uint32_t rank;     /* of the registration */
    uint64_t sequence; /* of the last batch applied */
    double timestamp;
    bool has_windows; /* see struct ki_applier */
    bool partial;     /* watermarks said so at that moment */
    bool has_reports; /* the stream has shown one */
    bool suspects;    /* there were events that may have been reports; not told: true */
    enum ki_report_mode report_mode; /* as registered, or as the stream has shown */
    bool unusable; /* read from a dump, but no stream of this version can be in that state */
    struct kve_reader *reader; /* a copy: event/reader_state.h */
};

/** Returns 0 or -ENOMEM; free *@ret with ki_handover_free. */
int ki_handover_create(struct ki_handover **ret);
void ki_handover_free(struct ki_handover *h);
int ki_handover_copy(const struct ki_handover *h, struct ki_handover **ret);

/** Take what @l knows, at one moment. Returns 0, -ENOMEM, or -ENODATA: it has no position. */
int ki_handover_take(struct ki_listener *l, struct ki_handover **ret);
/** @l, which was seeded and hasn't started, knows the same. Seeded with another position it is torn. */
void ki_handover_give(struct ki_handover *h, struct ki_listener *l);

/** Write one as the members of the object that @w is in, all but the salts (event/reader_state.h). */
void ki_handover_write(const struct ki_handover *h, struct kv_json_writer *w);
/** Read such an object; one that makes no sense here is unusable. Other text is @json's error. */
void ki_handover_read(struct ki_handover *h, struct kv_json *json);

/** By instance and rank, for qsort of pointers. */
int ki_handover_compare(const void *a, const void *b);
/**
 * Give positions what their handovers say, which may be newer; both are of one dump. A position whose
 * handover is unusable or older is torn: its stream has to be read from the beginning. Sorts
 * @handovers, and frees all but the newest of each stream. Returns how many are left.
 */
size_t ki_handover_note(struct ki_handover **handovers, size_t n, struct ki_watermark *marks,
                        size_t n_marks);

typedef int (*ki_handover_fn)(void *arg, const struct ki_handover *h);
/** Return a copy of each stream that feeds @model, also of workers known only from a peer's dump, to @fn,
 * one after the other. A non-zero return stops. Returns that, 0 or -ENOMEM. */
int ki_registry_handovers(struct ki_registry *registry, const struct ki_model *model,
                          ki_handover_fn fn, void *arg);
/** Give them to the streams that ki_registry_adopt has just seeded, or keep them for workers that may
 * register. Takes over what it uses, which is NULL afterwards. The registry must still be held. */
void ki_registry_hand_over(struct ki_registry *registry, const char *model, const char *tenant,
                           struct ki_handover **handovers, size_t n);

#endif
