// SPDX-License-Identifier: Apache-2.0
/**
 * kv_select.h: choose the worker for a prompt, and book it.
 *
 * A selector knows the workers of one model, the requests that run on them (bookings), and a policy
 * that weighs them. The caller asks an index who holds the prompt and gives the matches. The
 * selector adds what it has sent to each worker, and chooses.
 *
 *     kvi_find() --> kvsel_select() --> kvsel_book() --> send the prompt to the worker
 *                                           |
 *          first token: kvsel_first_token() |  answer over: kvsel_free()
 *
 * - Waiting tokens of a worker: tokens to compute of all prompts sent to it that have no first
 *   token yet. Context: tokens of all its running requests.
 * - Prediction: a booked worker counts as holding the prompt until its events say so, 2 s at most.
 *   Prompts that share a prefix and come at once so meet at one worker.
 * - Speed: a worker that computes fewer tokens a second than the others is charged for it.
 * - A removed worker's bookings stay. Registered again, it has its load back.
 *
 * The library is pure: no sockets, no threads, no clock. Every time is given by the caller, in
 * nanoseconds of any clock that doesn't go back. The same calls with the same seed give the same
 * choices.
 *
 * Threads: one call at a time for each selector; the caller has the lock. Selectors are independent
 * of one another.
 *
 * Errors are negative errno values. A failing call leaves the selector as it was. Texts are UTF-8 or
 * any other bytes without NUL; ids of bookings may have any bytes. The selector copies all it keeps.
 */
#ifndef KV_SELECT_H
#define KV_SELECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_index.h"
#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Send all log lines of libkvselect to @fn (kv_log_fn); NULL: errors and warnings to stderr. */
KV_API void kvsel_set_log(kv_log_fn fn, void *arg);

/** A selector: the workers of one model, their bookings, a policy. */
struct kvsel;

/* ---------------------------------------------------------------------------------------------
 * Policies
 */

/**
 * Return the name of policy @i, NULL when there are fewer: adaptive (the default), dynamo, least,
 * round-robin, scored, prefix, cache-aware. Each header in src/select/policy has its formula.
 */
KV_API const char *kvsel_policy_name(size_t i);

/**
 * Numbers in the policies' formulas; set size to sizeof(struct kvsel_params). 0: the default; a
 * negative number: 0. Infinite ones and NaN, here and in requests, are -EINVAL.
 */
struct kvsel_params {
    size_t size;
    /* Cost of loading a token from a tier, as a share of computing it; 0, .25, .75, .75. */
    double tier_cost[KV_N_TIERS];
    double own_weight;     /* adaptive: weight of the request's own uncovered tokens; 0: by load */
    double max_own_weight; /* adaptive: upper limit of the weight by load; 6 */
    double context_weight; /* adaptive: cost of a running token; 0.05 */
    double lora_tokens;    /* all: cost of loading an adapter, in tokens to compute; 2048 */
    /* all: cost of a preferred label that a worker lacks, times its weight; 1024 */
    double preference_tokens;
    double overlap_credit;   /* dynamo: credit of a held token on the device; 1 */
    double prefill_scale;    /* dynamo: weight of tokens to compute; 1 */
    double request_weight;   /* dynamo: blocks that a running request weighs; 0 */
    double temperature;      /* all: softmax of normalised costs; 0: least cost */
    double prefix_weight;    /* scored: share of the prompt's blocks that is held; 2 */
    double queue_weight;     /* scored: few requests without a first token; 1 */
    double use_weight;       /* scored: free room in the worker's cache; 1 */
    double lora_weight;      /* scored: adapter loaded 1, room .8, else 0; 1 */
    double match_threshold;  /* cache-aware: share of the prompt that decides; 0.3 */
    double balance_absolute; /* cache-aware: requests apart, beyond which load decides; 64 */
    double balance_relative; /* cache-aware: and largest to smallest number of requests; 1.5 */
};
#define KVSEL_PARAMS_INIT KV_INIT_(kvsel_params)

/** Order of a queue. */
enum kvsel_order {
    KVSEL_FCFS = 0,    /* first come, first served */
    KVSEL_SHORTEST = 1 /* fewest uncovered tokens first; requests older than queue_age_ns before */
};

/** Options; set size to sizeof(struct kvsel_opts), zero means the default. */
struct kvsel_opts {
    size_t size;
    const char *policy;                /* adaptive */
    const struct kvsel_params *params; /* NULL: defaults */
    uint64_t seed;                     /* of ties and temperatures */
    uint32_t block_size;               /* tokens of a block; 16 */
    /* Blocks per entry of the tables of predicted and running blocks: prefixes count in steps of it; 4.
     * Smaller: exact, slower. */
    uint32_t stride;
    uint64_t predict_ns;   /* time that a prediction lasts; 2 s. UINT64_MAX: no predictions */
    uint64_t expiry_ns;    /* age without progress at which a booking expires; 300 s */
    uint64_t max_bookings; /* 2^20; beyond: -ENOSPC */
    uint64_t max_workers;  /* 2^16; beyond: -ENOSPC */
    uint64_t session_ns;   /* time that a session stays at its worker after a use; 0: no affinity */
    uint64_t max_sessions; /* 2^18; beyond: the oldest is forgotten */
    uint64_t
        session_waiting; /* waiting tokens beyond which a worker's sessions go elsewhere; 32768 */
    uint64_t
        queue_waiting; /* waiting tokens of every worker at which requests are held; 0: never */
    enum kvsel_order queue_order;
    uint64_t queue_age_ns;      /* see KVSEL_SHORTEST; 5 s */
    uint64_t queue_max;         /* requests held; 4096. Beyond: -ENOBUFS, the caller answers 429 */
    uint64_t queue_max_tokens;  /* their uncovered tokens; 2^26. Beyond: -ENOBUFS */
    uint64_t queue_max_wait_ns; /* longest hold, see kvsel_queue_late; 60 s */
    bool equal_speed;           /* don't learn the workers' speeds */
};
#define KVSEL_OPTS_INIT KV_INIT_(kvsel_opts)

/**
 * Create a selector without workers. @opts may be NULL. The caller owns *@ret and frees it with
 * kvsel_destroy. Returns 0; -EINVAL (also for an unknown policy); -ENOMEM.
 */
KV_API int kvsel_create(const struct kvsel_opts *opts, struct kvsel **ret);

/** Free the selector and all its bookings. NULL is a no-op. */
KV_API void kvsel_destroy(struct kvsel *selector);

/* ---------------------------------------------------------------------------------------------
 * Workers
 */

/** Roles of a worker, as bits; 0: both. */
#define KVSEL_PREFILL UINT32_C(1)
#define KVSEL_DECODE UINT32_C(2)

/** A worker, one of its ranks; set size to sizeof(struct kvsel_worker). */
struct kvsel_worker {
    size_t size;
    struct kv_holder holder;
    uint32_t roles;        /* KVSEL_PREFILL | KVSEL_DECODE; 0: both */
    uint32_t max_requests; /* running requests at which it takes no more; 0: no limit */
    uint32_t max_loras; /* adapters that it has room for; 0: no limit, the latest 1024 are noted */
    bool draining;      /* takes no new requests */
    double speed;       /* prompt tokens a second, if known; 0: learned */
    double trust; /* share of its matches that counts, less for one without a live stream; 0: 1 */
    uint64_t capacity; /* tokens of its cache; 0: unknown */
    /* Labels, such as "gpu=h100" or "zone=a": taints and topology. */
    const char *const *labels;
    size_t n_labels;
    const char *const *loras; /* adapters that it has loaded */
    size_t n_loras;
};
#define KVSEL_WORKER_INIT KV_INIT_(kvsel_worker)

/**
 * Add a worker, or replace what is known of it. Bookings, learned speed and predictions stay.
 * Returns 0; -EINVAL; -ENOSPC (max_workers); -ENOMEM.
 */
KV_API int kvsel_set_worker(struct kvsel *selector, const struct kvsel_worker *worker);

/**
 * Remove a worker: it is chosen no more, and its predictions end. Its bookings stay until they are
 * freed or expire. Returns 0; -ENOENT.
 */
KV_API int kvsel_remove_worker(struct kvsel *selector, struct kv_holder holder);

/**
 * Leave a worker out of choices until @until_ns: it refused a request or a connection. Its
 * predictions end. 0: it is well again. Returns 0; -ENOENT.
 */
KV_API int kvsel_fail_worker(struct kvsel *selector, struct kv_holder holder, uint64_t until_ns);

/** Set the share of a worker's matches that counts, 0 to 1. Returns 0; -ENOENT; -EINVAL. */
KV_API int kvsel_trust_worker(struct kvsel *selector, struct kv_holder holder, double trust);

/**
 * Note whether a worker has the adapter @lora loaded. Bookings with an adapter note it by
 * themselves. Returns 0; -ENOENT; -ENOMEM.
 */
KV_API int kvsel_set_lora(struct kvsel *selector, struct kv_holder holder, const char *lora,
                          bool loaded);

/** Load of one worker. */
struct kvsel_load {
    struct kv_holder holder;
    uint64_t waiting;  /* tokens to compute, of requests without a first token */
    uint64_t context;  /* tokens of all running requests */
    uint64_t blocks;   /* distinct blocks of running requests; stride tells how exactly */
    uint32_t requests; /* running */
    uint32_t queued;   /* of them: without a first token */
    double speed;      /* prompt tokens a second, stated or learned; 0: not known */
    double factor;     /* what its tokens cost beside those of others: 1, more for slow ones */
    bool known;        /* false: removed, or not registered yet; bookings are left */
    bool reserved[7];
};

/** Read a worker's load. Returns 0; -ENOENT. */
KV_API int kvsel_get_load(const struct kvsel *selector, struct kv_holder holder,
                          struct kvsel_load *ret);

/**
 * Write the loads of all workers to @ret, at most @max of them. Returns the number of workers.
 */
KV_API size_t kvsel_get_loads(const struct kvsel *selector, struct kvsel_load *ret, size_t max);

/* ---------------------------------------------------------------------------------------------
 * Choices
 */

/** A label that a request prefers. */
struct kvsel_preference {
    const char *label;
    double weight; /* 1: preference_tokens are charged to a worker without it */
};

/** Work that a request brings. */
enum kvsel_stage {
    KVSEL_WHOLE = 0, /* one worker computes the prompt and decodes */
    KVSEL_PAIR =
        1 /* a worker that decodes, and one that computes the prompt where that is worth it */
};

/** A request; set size to sizeof(struct kvsel_request). Pointers are read during the call only. */
struct kvsel_request {
    size_t size;
    uint64_t tokens; /* of the prompt */
    /* Sequence hashes of its leading full blocks (kve_sequence_hashes), for predictions and for the
     * distinct blocks of running requests. None: the prompt is shared with no other. */
    const uint64_t *hashes;
    size_t n_hashes;
    const struct kvi_match *matches; /* kvi_find's; unknown holders are passed over */
    size_t n_matches;
    const char *policy;                /* NULL: the selector's */
    const struct kvsel_params *params; /* NULL: the selector's */
    const char *lora;                  /* adapter, or NULL */
    const char *session;               /* name of its session, or NULL; at most 256 bytes */
    const struct kv_holder *pinned;    /* the only worker and rank, or NULL */
    const uint64_t *allowed;           /* the workers (all ranks) that may be chosen; NULL: all */
    size_t n_allowed;
    const struct kv_holder *avoided; /* workers that have failed this request */
    size_t n_avoided;
    const char *const *required; /* labels that a worker has to have */
    size_t n_required;
    const struct kvsel_preference *preferred;
    size_t n_preferred;
    enum kvsel_stage stage;
    uint32_t priority; /* larger ones leave the queue first */
    /* Pair: the prefix of a label, such as "zone=", that both workers should share. The weight is
     * that of a preference; 0: required. NULL: any two. */
    const char *domain;
    double domain_weight;
    /* Pair: up to so many uncovered tokens the decoding worker computes them itself; 0: 512. */
    uint64_t whole_tokens;
    double jump_s; /* seconds by which it counts as older in the queue */
    bool
        released; /* kvsel_queue_next gave it back, or it mustn't wait: the queue doesn't hold it */
    uint64_t origin, stamp; /* the caller's own numbers for its booking (kvsel_booking has them) */
};
#define KVSEL_REQUEST_INIT KV_INIT_(kvsel_request)

/** Reason of a choice. */
enum kvsel_why {
    KVSEL_BY_COST = 0,    /* the policy's least cost */
    KVSEL_BY_TIE = 1,     /* drawn among several of least cost */
    KVSEL_BY_PIN = 2,     /* the request named it */
    KVSEL_BY_SESSION = 3, /* its session is there */
    KVSEL_BY_CHANCE = 4   /* drawn by temperature */
};

/** A choice; set size to sizeof(struct kvsel_choice). */
struct kvsel_choice {
    size_t size;
    struct kv_holder worker;  /* that serves the request; of a pair the one that decodes */
    struct kv_holder prefill; /* of a pair: that computes the prompt */
    bool paired;              /* prefill is another worker */
    enum kvsel_why why;
    const char *policy;
    uint64_t
        held[KV_N_TIERS]; /* tokens that the computing worker holds, cumulative by tier (reach) */
    uint64_t predicted;   /* tokens that it holds by prediction; 0 where held has more */
    uint64_t uncovered;   /* tokens to compute, loads counted as tier_cost says, rounded */
    double cost;          /* by the policy, its unit */
    uint64_t blocks;      /* of prompts running on worker, with this one's */
    uint32_t candidates;  /* workers weighed */
    uint32_t left_out;    /* workers left out */
};
#define KVSEL_CHOICE_INIT KV_INIT_(kvsel_choice)

/** Reason why a worker is left out of a choice. */
enum kvsel_reason {
    KVSEL_FITS = 0,
    KVSEL_GONE = 1,     /* removed or never registered, with bookings */
    KVSEL_DRAINING = 2, /* kvsel_worker.draining */
    KVSEL_FAILED = 3,   /* kvsel_fail_worker */
    KVSEL_FULL = 4,     /* max_requests */
    KVSEL_ROLE = 5,     /* its role is the other one */
    KVSEL_PINNED = 6,   /* the request is pinned to another */
    KVSEL_DENIED = 7,   /* not in the list of allowed ones */
    KVSEL_AVOIDED = 8,  /* has failed this request */
    KVSEL_LABEL = 9,    /* lacks a required label */
    KVSEL_DOMAIN = 10,  /* in another domain than the decoding worker */
    KVSEL_N_REASONS = 11
};

/** Return the word for a reason, such as "draining"; "fits" for none; NULL for an unknown one. */
KV_API const char *kvsel_reason_name(enum kvsel_reason reason);

/** Return the word for a choice's reason: cost, tie, pin, session or chance; NULL for an unknown one. */
KV_API const char *kvsel_why_name(enum kvsel_why why);

/** A worker as a decision saw it: the terms of its cost. */
struct kvsel_candidate {
    struct kv_holder holder;
    enum kvsel_reason reason; /* KVSEL_FITS: it was weighed */
    uint32_t queued;
    double cost;      /* by the policy; infinite where left out */
    double uncovered; /* tokens to compute here, loads counted as tier_cost says */
    double waiting;   /* tokens */
    double context;   /* tokens */
    double requests;
    double blocks;      /* of prompts running here, with this request's new ones */
    double factor;      /* see kvsel_load */
    double extra;       /* tokens charged for an adapter, preferred labels and the domain */
    uint64_t held;      /* tokens held, any tier, as the matches say */
    uint64_t predicted; /* tokens held by prediction */
};

/**
 * Choose a worker. Nothing is booked, but a session that moves is noted (at kvsel_book).
 *
 * Returns 0; -EINVAL; -EHOSTUNREACH: no worker fits, with the reasons by kvsel_explain; -EAGAIN: all
 * that fit have queue_waiting tokens or others are held already (kvsel_queue_put); -ENOMEM.
 */
KV_API int kvsel_select(struct kvsel *selector, const struct kvsel_request *request,
                        uint64_t now_ns, struct kvsel_choice *ret);

/**
 * Choose as kvsel_select does, and tell how. Writes all workers of the decision to @candidates, at
 * most @max of them. Of a pair: those that decode, or, where the prompt is worth another worker, those
 * that compute it. Returns the number of workers, also when *@ret has none (candidates 0); -EINVAL; -EAGAIN;
 * -ENOMEM.
 */
KV_API long kvsel_explain(struct kvsel *selector, const struct kvsel_request *request,
                          uint64_t now_ns, struct kvsel_choice *ret,
                          struct kvsel_candidate *candidates, size_t max);

/**
 * Tell of all workers as kvsel_explain does, without a choice: nothing is counted, no turn and no smoothed
 * share moves, and the cost of workers that fit is 0. For those who watch the loads. Returns the number of
 * workers; -EINVAL; -ENOMEM.
 */
KV_API long kvsel_look(struct kvsel *selector, const struct kvsel_request *request, uint64_t now_ns,
                       struct kvsel_candidate *candidates, size_t max);

/**
 * Reckon what @holder would have to do for @request, whether or not it fits: a choice that is made
 * elsewhere (by a peer, by the client), for kvsel_book. An unknown holder holds nothing. Returns 0;
 * -EINVAL; -ENOMEM.
 */
KV_API int kvsel_reckon(struct kvsel *selector, const struct kvsel_request *request,
                        struct kv_holder holder, uint64_t now_ns, struct kvsel_choice *ret);

/* ---------------------------------------------------------------------------------------------
 * Books
 */

/**
 * Book @request under @id (@id_len bytes, any, also none; not NULL) at @choice's workers. Workers that the
 * selector doesn't know are booked, too: their registration may come later.
 *
 * Returns 0; -EEXIST: the id is in use; -ENOSPC (max_bookings, max_workers); -EINVAL; -ENOMEM.
 */
KV_API int kvsel_book(struct kvsel *selector, const char *id, size_t id_len,
                      const struct kvsel_request *request, const struct kvsel_choice *choice,
                      uint64_t now_ns);

/**
 * Note a request's first token: its prompt is computed. The worker's speed is learned. A second time
 * changes nothing. Returns 0; -ENOENT.
 */
KV_API int kvsel_first_token(struct kvsel *selector, const char *id, size_t id_len,
                             uint64_t now_ns);

/**
 * Note @n further tokens of output, also 0: progress, which puts off its expiry. Returns 0; -ENOENT.
 */
KV_API int kvsel_output(struct kvsel *selector, const char *id, size_t id_len, uint64_t n,
                        uint64_t now_ns);

/** How a request ended. */
enum kvsel_end {
    KVSEL_DONE = 0, /* its prediction stays */
    KVSEL_LOST = 1  /* the worker didn't compute it: its prediction ends */
};

/** Free a booking. Returns 0; -ENOENT: unknown, freed or expired. */
KV_API int kvsel_free(struct kvsel *selector, const char *id, size_t id_len, enum kvsel_end end,
                      uint64_t now_ns);

/**
 * Note an event: @holder has announced the block of sequence hash @hash. Predictions that this block
 * completes (the last of a prompt's stride-th blocks) end: the index tells from here on. kvsel_select
 * ends predictions by itself where matches cover them. Returns how many ended.
 */
KV_API size_t kvsel_announced(struct kvsel *selector, struct kv_holder holder, uint64_t hash);

/** A booking; set size to sizeof(struct kvsel_booking). */
struct kvsel_booking {
    size_t size;
    const char *id; /* the selector's, until its next call; no NUL behind it */
    size_t id_len;
    struct kv_holder worker, prefill;
    bool paired;                        /* until the first token */
    bool first_token;                   /* has come */
    uint64_t tokens, uncovered, output; /* tokens */
    uint64_t created_ns, progress_ns;
    /* Every stride-th sequence hash of its prompt: those behind blocks stride, 2 * stride, ... */
    const uint64_t *hashes;
    size_t n_hashes;
    uint64_t origin, stamp; /* the request's */
};
#define KVSEL_BOOKING_INIT KV_INIT_(kvsel_booking)

/** Read a booking. Returns 0; -ENOENT; -EINVAL. */
KV_API int kvsel_get_booking(const struct kvsel *selector, const char *id, size_t id_len,
                             struct kvsel_booking *ret);

/** Receives a booking. Must not call the selector. */
typedef void (*kvsel_booking_fn)(void *arg, const struct kvsel_booking *booking);

/** Call @fn for each booking, the one with the oldest progress first. Returns their number. */
KV_API size_t kvsel_each_booking(const struct kvsel *selector, kvsel_booking_fn fn, void *arg);

/**
 * Free the bookings without progress for expiry_ns, and end predictions that are over. Calls @fn (may
 * be NULL) for each booking before it is freed. Returns the number of bookings freed.
 */
KV_API size_t kvsel_expire(struct kvsel *selector, uint64_t now_ns, kvsel_booking_fn fn, void *arg);

/** Counts since creation; set size to sizeof(struct kvsel_stats). */
struct kvsel_stats {
    size_t size;
    uint64_t bookings, workers, sessions, queued; /* now */
    uint64_t queued_tokens;                       /* now: uncovered, of requests held */
    uint64_t predictions;                         /* now */
    uint64_t choices, ties, unfit;                /* kvsel_select: made, drawn, -EHOSTUNREACH */
    uint64_t booked, freed, lost, expired;
    uint64_t duplicates, unknown; /* ids: -EEXIST, -ENOENT */
    uint64_t announced, outlived; /* predictions ended by an event or a match; by their time */
    uint64_t held, shed, late;    /* requests: put into the queue, -ENOBUFS, kvsel_queue_late */
    double busy;                  /* share of workers with waiting tokens, smoothed */
    double missing; /* share of prompts' tokens left to compute, smoothed; 1 at first */
};
#define KVSEL_STATS_INIT KV_INIT_(kvsel_stats)

/** Read the counts. Returns 0; -EINVAL. */
KV_API int kvsel_get_stats(const struct kvsel *selector, struct kvsel_stats *ret);

/* ---------------------------------------------------------------------------------------------
 * The queue in front
 */

/**
 * Hold @request, for which kvsel_select returned -EAGAIN, under the caller's number @ticket. The
 * caller keeps the request. Returns 0; -ENOBUFS: the queue is full, the caller answers 429; -EEXIST;
 * -EINVAL; -ENOMEM.
 */
KV_API int kvsel_queue_put(struct kvsel *selector, uint64_t ticket,
                           const struct kvsel_request *request, uint64_t now_ns);

/**
 * Take the next request from the queue, if a worker has room: larger priority first, then by the
 * queue's order. Call it after kvsel_first_token, kvsel_free, kvsel_expire and changes of workers,
 * until it returns -EAGAIN; select and book the request (released) before the next call. Returns 0
 * and *@ticket; -EAGAIN.
 */
KV_API int kvsel_queue_next(struct kvsel *selector, uint64_t now_ns, uint64_t *ticket);

/** Take a request from the queue that has waited for queue_max_wait_ns. Returns 0; -EAGAIN. */
KV_API int kvsel_queue_late(struct kvsel *selector, uint64_t now_ns, uint64_t *ticket);

/** Take a request from the queue: its client is gone. Returns 0; -ENOENT. */
KV_API int kvsel_queue_drop(struct kvsel *selector, uint64_t ticket);

#ifdef __cplusplus
}
#endif
#endif
