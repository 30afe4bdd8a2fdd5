// SPDX-License-Identifier: Apache-2.0
/**
 * Messages between the director and a worker: structs of one size over a socket that keeps their
 * borders. The worker answers each message of the director with one of its own, in order.
 *
 *     director                                    worker
 *       PLAN ──────────────────────────────────►  events and sockets
 *       ◄────────────────────────────── READY     endpoints of its events
 *       GO ────────────────────────────────────►  tiers: blocks of its disk are published
 *       ◄────────────────────────────── DONE
 *       SERVE, ... ────────────────────────────►  a request
 *       ◄────────────────────────── DONE, ...     where its blocks came from, bytes compared
 *       SETTLE, LOCATE, ... ───────────────────►  finish offloads; which tiers have these keys
 *       ◄────────────────────────── DONE, PLACES
 *       END ───────────────────────────────────►  destroys everything, and ends
 */
#ifndef KV_CLI_WHOLE_MESSAGE_H
#define KV_CLI_WHOLE_MESSAGE_H

#include "cli/whole/plan.h"

enum kc_message_kind {
    KC_MESSAGE_NONE,
    KC_MESSAGE_PLAN,
    KC_MESSAGE_READY,
    KC_MESSAGE_GO,
    KC_MESSAGE_SERVE,
    KC_MESSAGE_DONE,
    KC_MESSAGE_SETTLE,
    KC_MESSAGE_NUDGE, /* store a block and forget it: an event follows whatever was lost */
    KC_MESSAGE_LOCATE,
    KC_MESSAGE_PLACES,
    KC_MESSAGE_END,
    KC_MESSAGE_FAILED
};

/** Places from which the blocks of a request come. */
enum kc_source {
    KC_FROM_G1,
    KC_FROM_G2,
    KC_FROM_G3,
    KC_FROM_PEER,
    KC_FROM_G4,
    KC_FROM_NOWHERE, /* computed */
    KC_N_SOURCES
};

/** Ways on which bytes move, as counted by a worker since its start. */
enum kc_path {
    KC_PATH_WRITE,  /* kvx_write_kv into G1 */
    KC_PATH_GATHER, /* kvx_gather_kv out of G1; all of these are compared */
    KC_PATH_G1_G2,  /* copies from G1 */
    KC_PATH_G2_G1,  /* copies into G1 */
    KC_PATH_TO_G3,
    KC_PATH_FROM_G3,
    KC_PATH_TO_G4,
    KC_PATH_FROM_G4,
    KC_PATH_FROM_PEER,
    KC_N_PATHS
};

/** Parts of a worker's time. */
enum kc_phase {
    KC_PHASE_ONBOARD,
    KC_PHASE_WRITE,
    KC_PHASE_GATHER,
    KC_PHASE_MAKE,    /* making the content that is written */
    KC_PHASE_COMPARE, /* comparing what was gathered */
    KC_PHASE_REST,    /* hashing, allocation, registration, release */
    KC_N_PHASES
};

struct kc_request_message {
    uint64_t number; /* of the request, counted over passes */
    uint64_t pass;
    uint32_t n;
    uint32_t pad;
    uint64_t ids[KC_PLAN_IDS];
};

struct kc_done_message {
    uint64_t number;
    int32_t status; /* 0, or a negative errno: the request wasn't served */
    uint32_t n;     /* blocks of the request */
    uint32_t from[KC_N_SOURCES];
    uint32_t pad;
    uint64_t rows_wrong;    /* rows that didn't compare */
    uint64_t bytes_checked; /* of this request */
    uint64_t registered_ns; /* when its last new block was registered; 0: none was new */
    uint64_t onboard_ns;    /* loading what G1 lacked */
    uint64_t phase_ns[KC_N_PHASES];
    uint64_t path_bytes[KC_N_PATHS]; /* since the worker's start */
    uint64_t bad[3];     /* blocks of disk, store and peers that did not verify, as above */
    uint64_t dropped[3]; /* blocks for host, disk and store without room, as above */
    uint64_t used[4];    /* blocks in G1 to G4 now */
    uint64_t events_dropped;
    uint64_t cpu_ns;
    char wrong[120]; /* the first row that didn't compare */
};

struct kc_message {
    uint32_t kind;
    uint32_t n;     /* LOCATE, PLACES */
    uint32_t group; /* LOCATE */
    union {
        struct kc_plan plan;
        struct {
            char events[96], replay[96], agent[160];
        } ready;
        struct kc_request_message serve;
        struct kc_done_message done;
        uint64_t keys[KC_PLAN_IDS];
        uint8_t places[KC_PLAN_IDS]; /* bit of each tier (1 << enum kv_tier) */
        char failed[200];
    };
};

/** Send a message. Returns 0 or a negative errno. */
int kc_message_send(int fd, const struct kc_message *message);
/** Receive a message, and wait for it. Returns 0; -EPIPE (the other side has ended). */
int kc_message_receive(int fd, struct kc_message *ret);

#endif
