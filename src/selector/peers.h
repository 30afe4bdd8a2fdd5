// SPDX-License-Identifier: Apache-2.0
/**
 * Replicas that know each other's bookings. Each follows all its peers:
 *
 *     bookings here ──► notices ──► GET /bookings ──► peers        (tell.c)
 *     peers' GET /bookings ──► a thread each ──► bookings here     (peers.c, hear.c)
 *
 * Rules:
 * - The origin of a booking is the replica that made it. A peer's snapshot decides which of its own bookings
 *   live, unless their clients freed them here while it couldn't hear of it (remembered ends).
 * - Of two bookings of one id, all replicas keep that of the origin with the smaller number.
 * - Bookings whose origin is gone stay until they are freed or expire at each replica.
 */
#ifndef KV_SELECTOR_PEERS_H
#define KV_SELECTOR_PEERS_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/core/error.h"
#include "base/thread/thread.h"
#include "http/http.h"
#include "kv_select.h"
#include "selector/notice.h"
#include "selector/notices.h"

struct ksel;
struct ksel_fleet;

#define KSEL_FOLLOWERS_MAX 64 /* peers that follow at a time */
#define KSEL_ENDS 16384       /* remembered ends of peers' bookings */

/** The end of a peer's booking, told by its client here, or by another peer before the booking itself. */
struct ksel_end {
    uint64_t origin, stamp, at_ns;
    char *id; /* NULL: a free place */
    size_t id_len;
    bool lost;
    /* Places plus 1; 0: none. */
    uint32_t first; /* of the chain that has this place's number */
    uint32_t next;  /* of this end's chain */
};

/** A peer that is followed. */
struct ksel_peer {
    struct ksel *s;
    char *url;
    struct kv_wake wake;
    _Atomic int stop;
    pthread_t thread;
    struct ksel_peer *next;
    /* Guarded by the selector's lock: */
    uint64_t origin;    /* of its bookings, while it is followed; else 0 */
    bool in_snapshot;   /* of those, not all have come yet */
    bool tried, failed; /* asked once; the last time in vain */
    /* Used by its thread only: */
    uint64_t offset_ns;      /* to add to its times, modulo 2^64 */
    uint64_t measured_ns;    /* when that was measured last */
    uint64_t snapshot_stamp; /* of the snapshot that is read */
    struct kv_buf seen;      /* uint64_t: stamps of its own bookings in that */
};

struct ksel_peers {
    pthread_t thread; /* starts and stops those of the peers */
    bool running;
    _Atomic int stop;
    struct kv_wake wake;
    struct ksel_notices notices;
    /* Guarded by the selector's lock: */
    uint64_t origin; /* this replica's number, drawn at the start */
    uint64_t stamp;  /* of the last booking */
    bool active;     /* there are, or were, peers or followers: bookings are told */
    struct ksel_peer *list;
    struct ksel_end *ends; /* KSEL_ENDS, the place of the oldest is at next_end; NULL: none yet */
    size_t next_end;
    uint64_t heard, snapshots, conflicts; /* notices of bookings; whole snapshots; ids used twice */
    struct kv_buf line;                   /* a notice being written */
};

/** Start to follow the service's peers, and wait up to a second for their bookings. */
int ksel_peers_start(struct ksel *s, struct kv_error *error);
/** Let the streams to peers end, once they have all. */
void ksel_peers_end(struct ksel *s);
/** Stop to follow. A no-op when it wasn't started. */
void ksel_peers_stop(struct ksel *s);
/** Append the metrics. */
void ksel_peers_render(struct ksel *s, struct kv_buf *out);

/* -- telling (tell.c): the caller holds the selector's lock ------------------------------------- */

/** Tell of a booking that was just made here. */
void ksel_tell_booked(struct ksel *s, const struct ksel_fleet *fleet, const char *id, size_t len,
                      const struct kvsel_request *request, const struct kvsel_choice *choice,
                      uint64_t now_ns);
/** Tell of progress or the end, before it is noted in the books. @output: tokens so far. */
void ksel_tell(struct ksel *s, enum ksel_notice_kind kind, const struct kvsel_booking *booking,
               uint64_t output, bool lost);
/** Remember that a peer's booking ended. */
void ksel_remember_end(struct ksel_peers *p, uint64_t origin, uint64_t stamp, const char *id,
                       size_t len, bool lost);
/** Return true when the end of this booking is remembered. */
bool ksel_has_ended(const struct ksel *s, uint64_t origin, uint64_t stamp);

/** GET /bookings: the stream to a peer. */
void ksel_api_bookings(void *service, struct kh_request *request, struct kh_reply *reply);

/* -- hearing (hear.c) --------------------------------------------------------------------------- */

/** Apply a peer's notice, received at @now_ns. Takes the selector's lock. */
void ksel_hear(struct ksel_peer *peer, const struct ksel_notice *notice, uint64_t now_ns);

#endif
