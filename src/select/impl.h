// SPDX-License-Identifier: Apache-2.0
/**
 * A selector's parts. Workers are slots: columns of numbers that policies read (policy.h), and a
 * struct of what they don't. A slot lives as long as its worker is registered or has bookings.
 *
 *     select.c    options; creation and destruction; counts
 *     workers.c   slots: found by holder, registered, removed, failed; adapters; loads
 *     books.c     bookings from kvsel_book to their end; expiry
 *     soon.c      predictions
 *     terms.c     what a request means for each slot: reasons, tokens held, extra costs
 *     choose.c    a decision; explain
 *     speed.c     speeds learned from first tokens
 *     queue.c     requests held in front
 */
#ifndef KV_SELECT_IMPL_H
#define KV_SELECT_IMPL_H

#include "base/core/error.h"
#include "kv_select.h"
#include "select/claims.h"
#include "select/names.h"
#include "select/policy/policy.h"
#include "select/speed.h"

#define KVSEL_NO_SLOT UINT32_MAX
#define KVSEL_BOTH (KVSEL_PREFILL | KVSEL_DECODE)
#define KVSEL_MAX_SESSION 256 /* bytes of a session's name */
#define KVSEL_KEPT_LORAS 1024 /* adapters noted of a worker that has no limit */

/** Copy a caller's struct, which may be older or newer, over @to, a zeroed one of this version. */
#define KVSEL_READ(to, from) memcpy((to), (from), KV_MIN((from)->size, sizeof(*(to))))

/** Texts that the owner has copied. */
struct kvsel_texts {
    char **items;
    size_t n;
};

/** The hashes of a prompt, every stride-th one; shared by a booking and its predictions. */
struct kvsel_chain {
    uint32_t refs;
    uint32_t n;
    uint64_t hashes[];
};

/** A prediction: @slot holds the prompt of @chain until @until_ns. */
struct kvsel_soon {
    struct kvsel_chain *chain;
    struct kvsel_soon **owner;        /* the booking's pointer to it; NULL: the booking is gone */
    struct kvsel_soon *older, *newer; /* all predictions, by time */
    struct kvsel_soon *slot_older, *slot_newer; /* those of the slot */
    uint64_t until_ns;
    uint32_t slot;
};

struct kvsel_slot {
    struct kv_holder holder;
    bool used;  /* else: free, next_free is set */
    bool known; /* registered */
    bool draining;
    uint32_t roles, max_requests, max_loras;
    uint32_t next_free;
    uint32_t n_bookings;      /* legs of bookings here */
    uint64_t failed_until_ns; /* 0: well */
    double trust;
    struct kvsel_speed speed;
    struct kvsel_texts labels;
    struct kvsel_texts loras; /* loaded adapters, used last at the end */
    struct kvsel_soon *soon_newest;
};

struct kvsel_book {
    struct kvsel_name name;   /* its id; first */
    uint32_t worker, prefill; /* slots; equal unless it is a pair */
    bool first_token;
    uint64_t tokens, output;
    double uncovered; /* counts as waiting at prefill until the first token */
    double ahead;     /* waiting tokens there once this one was booked: for its speed */
    double tail;      /* blocks at worker that no entry of its claims has */
    uint64_t created_ns, progress_ns;
    uint64_t origin, stamp; /* kvsel_request's */
    struct kvsel_chain *chain;
    struct kvsel_soon *soon[2]; /* at worker, at prefill; NULL: none or over */
};

struct kvsel_session {
    struct kvsel_name name; /* first */
    uint64_t used_ns;
    struct kv_holder holder; /* its worker */
};

struct kvsel_held; /* queue.c */

struct kvsel_queue {
    struct kvsel_held **heap; /* n of them, the next one first */
    size_t n, capacity;
    struct kvsel_held *oldest, *newest; /* by time of arrival */
    double tokens;
};

struct kvsel {
    struct kvsel_opts opts; /* every number final; its pointers aren't used */
    struct kvsel_params params;
    const struct kvsel_policy *policy;

    /* Slots. */
    struct kvsel_slot *slots;
    uint32_t n_slots, max_slots, free_slot; /* free_slot: KVSEL_NO_SLOT: none */
    uint32_t n_used, n_known;
    uint32_t *table; /* of holders: 1 + slot; 0: empty; table_mask + 1 of them */
    uint32_t table_mask;
    double *waiting, *context, *requests, *queued, *blocks, *capacity, *factor;
    uint8_t *state;  /* KVSEL_FITS, KVSEL_GONE, KVSEL_DRAINING, KVSEL_FAILED */
    uint32_t n_up;   /* slots whose state is KVSEL_FITS */
    uint32_t n_busy; /* of them: with waiting tokens */
    uint32_t n_failed, n_limited, n_partial; /* failed; max_requests; one role alone */
    double busy;                             /* n_busy / n_up, smoothed over decisions */
    double asked, computed; /* a prompt's tokens; those left to compute at its worker; smoothed */
    uint64_t turn;

    /* A decision's columns, as long as the slots'. */
    double *uncovered, *held, *shared, *extra, *lora, *cost;
    uint32_t *match; /* 1 + place of the slot's match, 0: none */
    uint8_t *reason, *seen;
    struct kvsel_found *found;
    uint64_t *strided;
    size_t strided_max, n_strided;

    struct kvsel_names books, sessions;
    struct kvsel_claims claims;
    struct kvsel_soon *soon_oldest, *soon_newest;
    double fleet_speed; /* median of all samples, tracked; 0: none yet */
    struct kvsel_queue queue;
    struct kvsel_stats stats;
    uint64_t random;
};

/** A request as the other functions need it: the caller's, with defaults filled in. */
struct kvsel_ask {
    struct kvsel_request r;
    struct kvsel_params params;
    const struct kvsel_policy *policy;
    uint64_t now_ns;
};

/* select.c */

/** Return a random number below @n, 1 or more. */
uint64_t kvsel_random(struct kvsel *s, uint64_t n);
/** Read @request. Returns 0 or -EINVAL. */
int kvsel_ask(const struct kvsel *s, const struct kvsel_request *request, uint64_t now_ns,
              struct kvsel_ask *ret);

/* workers.c */

/** Return the slot of @holder, or KVSEL_NO_SLOT. */
uint32_t kvsel_slot_find(const struct kvsel *s, struct kv_holder holder);
/** Return the slot of @holder, made if need be: 0; -ENOSPC; -ENOMEM. A new one is KVSEL_GONE. */
int kvsel_slot_make(struct kvsel *s, struct kv_holder holder, uint32_t *ret);
/** Free a slot that is neither known nor has bookings. */
void kvsel_slot_drop(struct kvsel *s, uint32_t slot);
/** Add @tokens, also less than 0, to a slot's waiting ones. */
void kvsel_slot_wait(struct kvsel *s, uint32_t slot, double tokens);
/** Make workers well whose failure is over. */
void kvsel_slots_heal(struct kvsel *s, uint64_t now_ns);
bool kvsel_texts_have(const struct kvsel_texts *texts, const char *text);
/** Note that a slot has @lora loaded; the one used longest ago goes when there are too many. */
int kvsel_lora_use(struct kvsel *s, uint32_t slot, const char *lora);
void kvsel_workers_fini(struct kvsel *s);

/* soon.c */

/** Predict @chain at @slot; room for the claims has been reserved. Returns 0 or -ENOMEM. */
int kvsel_soon_add(struct kvsel *s, uint32_t slot, struct kvsel_chain *chain, uint64_t until_ns,
                   struct kvsel_soon **owner);
/** End a prediction. NULL is a no-op. */
void kvsel_soon_end(struct kvsel *s, struct kvsel_soon *soon);
/** End all predictions of a slot. */
void kvsel_soon_end_slot(struct kvsel *s, uint32_t slot);
/** End the predictions that are over. */
void kvsel_soon_expire(struct kvsel *s, uint64_t now_ns);
/** End predictions of @slot that prefixes of the strided hashes up to @n complete: the index tells. */
void kvsel_soon_covered(struct kvsel *s, uint32_t slot, size_t n);
struct kvsel_chain *kvsel_chain_make(const uint64_t *hashes, size_t n);
void kvsel_chain_drop(struct kvsel_chain *chain);

/* terms.c */

/** Take every stride-th hash of the request into s->strided. Returns 0 or -ENOMEM. */
int kvsel_stride(struct kvsel *s, const struct kvsel_request *r);
/** Fill the columns of a decision for workers of all of @roles. */
void kvsel_terms(struct kvsel *s, const struct kvsel_ask *ask, uint32_t roles);
/** Return the share of prompts' tokens that their workers had to compute; 1 before any choice. */
double kvsel_missing(const struct kvsel *s);
/** The view of these columns. */
struct kvsel_view kvsel_view_of(const struct kvsel *s, const struct kvsel_ask *ask);

/* books.c */

void kvsel_books_fini(struct kvsel *s);
/** Return the slot that a session stays at, or KVSEL_NO_SLOT. */
uint32_t kvsel_session_slot(struct kvsel *s, const char *session, uint64_t now_ns);

/* queue.c */

void kvsel_queue_fini(struct kvsel *s);

#endif
