// SPDX-License-Identifier: Apache-2.0
/**
 * kv-advisor: its threads, and what they share.
 *
 *     NATS follower ─► feed ─┐
 *     scan thread ──────────►├─ index ◄── HTTP: /explain, /plan, /metrics
 *     mover ◄────────────────┘
 *
 * The world's lock guards index and feed; nothing waits while it holds that lock.
 */
#ifndef KV_ADVISOR_SERVICE_H
#define KV_ADVISOR_SERVICE_H

#include "advisor/follow.h"
#include "advisor/mover.h"
#include "advisor/options.h"
#include "base/thread/thread.h"
#include "http/access_log.h"
#include "http/auth.h"
#include "http/http.h"
#include "http/tls.h"

struct kva_service {
    const struct kva_options *options;
    struct kva_world world;
    struct kva_volumes volumes;
    struct kva_advice *advice;         /* guarded by the world's lock */
    struct kva_follow *follow;         /* NULL: no --nats */
    struct kva_leader *leader;         /* NULL: no --lock, or --dry-run */
    _Atomic(struct kva_mover *) mover; /* NULL: --dry-run, or not started; HTTP runs before it */
    struct kh_auth *auth;
    struct kh_tls *tls;               /* NULL: plain HTTP */
    struct kh_access_log *access_log; /* NULL: none */
    struct kh_http *http;
    pthread_t scanner;
    bool has_scanner;
    pthread_mutex_t lock; /* guards scan_now */
    pthread_cond_t woken;
    bool scan_now;
    _Atomic uint64_t pause_ns; /* that the last save of the state held up all others */
    atomic_bool stop;
    atomic_bool ready; /* the members have been listed once */
};

/** Run until a signal ends it. Returns 0 or a negative errno with @error. */
int kva_service_run(const struct kva_options *options, struct kv_error *error);
/** Let the scan thread list the members now. */
void kva_service_scan(struct kva_service *service);

/** Routes; handlers get a struct kva_service. */
const struct kh_route *kva_routes(size_t *ret_n);

#endif
