// SPDX-License-Identifier: Apache-2.0
/**
 * The selector of the service: for each model a fleet, with the books of libkvselect.
 *
 *     registry of streams ──┐ revision changes
 *                           ├──► ksel_sync ──► fleets: workers, trust, books
 *     records of workers ───┘
 *
 * Lock order: admin, then lock. admin serialises changes of workers; lock guards fleets, records, books
 * and cache, and is held for microseconds.
 */
#ifndef KV_SELECTOR_SELECTOR_H
#define KV_SELECTOR_SELECTOR_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "indexer/service.h"
#include "kv_select.h"
#include "selector/body.h"
#include "selector/cache.h"
#include "selector/decision_log.h"
#include "selector/options.h"
#include "selector/peers.h"
#include "selector/record.h"

#define KSEL_ADDRESS 300 /* bytes of "host:port" */

/** A rank of a fleet that may be chosen, or drains. */
struct ksel_member {
    struct kv_holder holder;
    const struct ksel_record *record; /* or NULL */
    bool odd;                         /* by the views: without a live stream, or withdrawn */
    char address[KSEL_ADDRESS];       /* host:port, where Envoy reaches it; empty: not known */
};

/** A model and routing group with one block size. */
struct ksel_fleet {
    char *model, *group;
    uint32_t block_size;
    struct kvsel *books;
    struct ksel_member *members; /* by holder */
    size_t n_members;
    size_t n_odd;               /* members with odd set */
    struct ksel_member *before; /* those before the sync, while it lasts; else NULL */
    size_t n_before;
    struct ksel_fleet *next;
};

/** Buffers of one request. */
struct ksel_scratch {
    struct ki_scratch *indexer;
    struct ksel_body body;
    struct kv_buf sequence; /* raw uint64_t: sequence hashes of the prompt */
    struct kv_buf texts;    /* const char *: required labels */
    struct kv_buf preferred;
    struct kv_buf candidates; /* struct kvsel_candidate */
    struct kv_buf avoided;    /* struct kv_holder */
    struct ksel_scratch *next;
};

struct ksel {
    struct ki_service *service;
    const struct ksel_options *options;
    pthread_mutex_t admin;
    pthread_mutex_t lock; /* guards all below */
    struct ksel_fleet *fleets;
    struct ksel_record **records; /* by worker */
    size_t n_records;
    uint64_t revision; /* of the registry, at the last sync */
    bool dirty;        /* records have changed since */
    struct ksel_cache cache;
    uint64_t shed;        /* requests refused because of --max-waiting */
    struct ksel_log *log; /* NULL: none */
    struct ksel_scratch *scratch;
    struct ksel_envoy *envoy; /* NULL: no --ext-proc */
    struct ksel_peers peers;
};

/** Return the selector of a handler's argument. */
struct ksel *ksel_of(void *service);

/** The addition to the service (indexer/service.h). */
extern const struct ki_addition ksel_addition;

struct ksel_scratch *ksel_scratch_take(struct ksel *s, struct kh_reply *reply);
void ksel_scratch_give(struct ksel *s, struct ksel_scratch *scratch);

/** Bring the fleets up to the registry and the records, if these have changed. The caller holds lock. */
void ksel_sync(struct ksel *s);

/** Find the fleet of a model and group; NULL: none. The caller holds lock, and has synced. */
struct ksel_fleet *ksel_fleet_find(struct ksel *s, const char *model, const char *group);

/** Find or make the fleet of a model, group and block size. NULL: out of memory. The caller holds lock. */
struct ksel_fleet *ksel_fleet_make(struct ksel *s, const char *model, const char *group,
                                   uint32_t block_size);

/** Find the fleet that has a booking of this id, with *@ret; NULL: none. The caller holds lock. */
struct ksel_fleet *ksel_fleet_booked(struct ksel *s, const char *id, size_t len,
                                     struct kvsel_booking *ret);

/** Set the trust of the fleet's workers by @views, struct ki_view of its model. The caller holds lock. */
void ksel_fleet_trust(struct ksel *s, struct ksel_fleet *fleet, const struct kv_buf *views);

/** Find a member; NULL: none. The caller holds lock. */
struct ksel_member *ksel_fleet_member(const struct ksel_fleet *fleet, struct kv_holder holder);

/**
 * Book as kvsel_book does, and tell the peers, unless any fleet has a booking of this id: -EEXIST. The caller
 * holds lock.
 */
int ksel_book(struct ksel *s, struct ksel_fleet *fleet, const char *id, size_t len,
              const struct kvsel_request *request, const struct kvsel_choice *choice,
              uint64_t now_ns);

/*
 * Note a booking's progress and end; the decision log and the peers are told, too. They take the lock. Return 0 or
 * -ENOENT.
 */
int ksel_first_token(struct ksel *s, const char *id, size_t len);
/** @tokens 0: a block. */
int ksel_output(struct ksel *s, const char *id, size_t len, uint64_t tokens);
int ksel_free(struct ksel *s, const char *id, size_t len, bool lost);

/** Return where the record of a worker is, or belongs. The caller holds lock or admin. */
size_t ksel_record_place(const struct ksel *s, uint64_t worker);

/** Find the record of a worker; NULL: none. The caller holds lock or admin. */
struct ksel_record *ksel_record_find(const struct ksel *s, uint64_t worker);

/** Return the number of workers that may be chosen. The caller holds lock, and has synced. */
uint64_t ksel_n_schedulable(const struct ksel *s);

/** Write a worker's id as its clients call it. */
void ksel_put_worker(struct ksel *s, struct kv_json_writer *w, uint64_t worker);

/** Return true when the body is said to be JSON; else @reply has the 415. */
bool ksel_is_json(const struct kh_request *request, struct kh_reply *reply);
/** Return true when a body was read (@rc is 0); else @reply has the error: 400, 422, 503. */
bool ksel_is_read(int rc, const struct kv_error *error, struct kh_reply *reply);
/** Read the request's body. Returns false when @reply has the error, one of those above. */
bool ksel_read_body(struct kh_request *request, struct kh_reply *reply,
                    struct ksel_scratch *scratch);

/** Tell in @reply why there is no booking: -EEXIST, -ENOENT, -ENOSPC, or out of memory. */
void ksel_refuse_booking(int rc, const char *id, struct kh_reply *reply);

/* Handlers; @service is a struct ki_service. */
void ksel_api_select(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_select_and_reserve(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_potential_loads(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_overlap_scores(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_reserve(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_reservations(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_prefill_complete(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_output_block(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_free(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_loads(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_health(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_ready(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_add_worker(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_patch_worker(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_delete_worker(void *service, struct kh_request *request, struct kh_reply *reply);
void ksel_api_replica_sync(void *service, struct kh_request *request, struct kh_reply *reply);

/* Parts of GET /workers and /metrics (struct ki_addition). */
void ksel_write_one(struct ki_service *service, const struct ki_worker_info *infos, long n,
                    struct kv_json_writer *w);
void ksel_write_others(struct ki_service *service, const struct kh_request *request,
                       const struct ki_worker_info *infos, long n, struct kv_json_writer *w);
void ksel_render(struct ki_service *service, struct kv_buf *out);

#endif
