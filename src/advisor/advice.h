// SPDX-License-Identifier: Apache-2.0
/**
 * Advice on room from live events, that is what more of it would buy: miss-ratio curves (curve.h) of the blobs' references, of all
 * publishers together and of each model and tenant by itself.
 *
 * A reference is a blob that a block manager stores, or reads back. What it finds in its own memory isn't told,
 * so the curves are those of the store. Each event is a request of one block.
 *
 * Threads: the feed's, under the world's lock; kva_advice_copy, too. A copy is its owner's.
 */
#ifndef KV_ADVISOR_ADVICE_H
#define KV_ADVISOR_ADVICE_H

#include "advisor/volumes.h"
#include "advisor/worth/worth.h"
#include "base/json/json.h"

/** Curves: of all, and of so many models and tenants; later ones count in the first alone. */
enum { KVA_CURVES = 16, KVA_CURVE_NAME = 200, KVA_ALL = 0 };

struct kva_advice;

/** @samples: keys that each curve follows. Returns 0 or -ENOMEM. */
int kva_advice_create(uint32_t samples, struct kva_advice **ret);
void kva_advice_destroy(struct kva_advice *advice); /* NULL is a no-op; also for a copy */

/** Number of the curve of a publisher's model and tenant, by its subject; KVA_ALL: none of its own. */
uint8_t kva_advice_group(struct kva_advice *advice, const char *subject);
/** A blob of @bytes was used at @now_s, in seconds of a clock. The curve of a group begins when there is a second one. */
void kva_advice_use(struct kva_advice *advice, uint8_t group, uint64_t key, uint64_t bytes,
                    uint64_t now_s);

/** Copy the curves, without what they need to grow. Returns 0 or -ENOMEM. */
int kva_advice_copy(const struct kva_advice *advice, struct kva_advice **ret);

struct kva_advice_terms {
    double prefill;      /* prompt tokens that a GPU computes in a second */
    double gpu_hour;     /* price; 0: none */
    double block_tokens; /* of a blob */
    unsigned share;      /* percent of a member's capacity */
};
/** Write a copy as members of an object, with the members of the store that have a capacity as tiers. */
void kva_advice_json(const struct kva_advice *copy, const struct kva_volumes *volumes,
                     const struct kva_advice_terms *terms, struct kv_json_writer *w);

#endif
