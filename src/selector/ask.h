// SPDX-License-Identifier: Apache-2.0
/** The question of a request: its prompt looked up, its wishes as libkvselect takes them. */
#ifndef KV_SELECTOR_ASK_H
#define KV_SELECTOR_ASK_H

#include "selector/selector.h"

/** A request on its way. Pointers are into its scratch. */
struct ksel_ask {
    struct ksel_scratch *scratch;
    struct ki_model *model;       /* a reference */
    const char *name, *group;     /* of the model */
    struct kvsel_request request; /* matches, hashes, constraints */
    struct kvsel_params params;   /* request.params, where it has its own */
    struct kv_holder pinned;      /* request.pinned */
};

/**
 * Look up the body's prompt and read its wishes. Returns false when @reply has the error. Release with
 * ksel_ask_end in any case.
 */
bool ksel_ask_begin(struct ksel *s, struct ksel_scratch *scratch, struct ksel_ask *ret,
                    struct kh_reply *reply);
void ksel_ask_end(struct ksel_ask *ask);

/**
 * Take the lock, sync, and find the fleet of the question, with its views. Returns NULL when @reply has the
 * 503: no worker; the lock is free then.
 */
struct ksel_fleet *ksel_ask_lock(struct ksel *s, struct ksel_ask *ask, struct kh_reply *reply);

/**
 * Choose a worker. With @explain all workers of the decision are in scratch->candidates, also where none
 * fits, and @ret_n is their number, else 0. Returns 0; -EHOSTUNREACH: none fits; or what kvsel_select does.
 * The caller holds lock.
 */
int ksel_ask_choose(struct ksel_ask *ask, struct ksel_fleet *fleet, uint64_t now_ns, bool explain,
                    struct kvsel_choice *ret, size_t *ret_n);

/**
 * Tell of all workers in scratch->candidates, without a choice. Returns their number or a negative errno.
 * The caller holds lock.
 */
long ksel_ask_look(struct ksel_ask *ask, struct ksel_fleet *fleet, uint64_t now_ns);

/** Return a decision about the question, of @n candidates; not booked. */
struct ksel_decision ksel_ask_decision(struct ksel *s, const struct ksel_ask *ask, const char *id,
                                       size_t id_len, uint32_t block_size,
                                       const struct kvsel_choice *choice, size_t n);

/** Set @reply to the 503 for a model without workers. */
void ksel_no_workers(const char *name, const char *group, struct kh_reply *reply);

/** Return true when the view of a rank isn't whole: its match may be wrong. */
bool ksel_ask_is_partial(const struct ksel_ask *ask, struct kv_holder holder);

#endif
