// SPDX-License-Identifier: Apache-2.0
/**
 * Client of a kv-indexer, as a router uses it: register workers, ask which of them hold a prompt.
 * Worker w of N has instance_id first_instance + w and rank 0. All workers and queries are of one
 * tenant, which no other client uses. Thread-confined, like its connection.
 */
#ifndef KV_CLI_CLIENT_CLIENT_H
#define KV_CLI_CLIENT_CLIENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/error.h"
#include "cli/client/http.h"

struct kc_client_opts {
    const char *url;
    const char *token;  /* bearer token; NULL: none */
    const char *cacert; /* PEM authorities of an https indexer; NULL: the system's */
    const char *model;
    const char *tenant;
    uint64_t first_instance; /* below 2^53: JSON numbers of any reader hold it */
    uint32_t block_size;
    uint32_t n_workers;
    bool msgpack; /* token ids as one binary instead of JSON */
};

/** The indexer's answer about one worker. */
struct kc_belief {
    uint32_t overlap; /* leading blocks of the prompt in device memory */
    uint32_t longest; /* leading blocks of the prompt in any tier */
    uint64_t blocks;  /* all its blocks; known only with an overlap */
};

struct kc_client;

int kc_client_create(const struct kc_client_opts *opts, struct kc_client **ret,
                     struct kv_error *error);
void kc_client_destroy(struct kc_client *client);
struct kc_http *kc_client_http(struct kc_client *client);

/**
 * Wait until /health answers. A request is given up after @request_ms, the last one perhaps behind
 * the deadline. Returns 0, -ETIMEDOUT, or -EINTR when *@stop becomes true.
 */
int kc_client_wait_healthy(struct kc_client *client, uint64_t deadline_ns, uint64_t request_ms,
                           const _Atomic bool *stop, struct kv_error *error);

/**
 * Register one worker. Replaces a registration of the same tenant, which an indexer may have from
 * its peer. -EEXIST: another client's worker has the instance_id; it is left alone.
 */
int kc_client_register(struct kc_client *client, uint32_t worker, const char *endpoint,
                       const char *replay_endpoint, struct kv_error *error);

/** Unregister one worker. -ENOENT: it isn't registered for the tenant. */
int kc_client_unregister(struct kc_client *client, uint32_t worker, struct kv_error *error);

/**
 * Ask about a prompt; @ret has room for all workers. *@ret_ns (may be NULL) is the time from the
 * first byte sent to the last received. Returns 0; -ENOENT when the indexer doesn't know the model
 * (it was restarted); -ECONNREFUSED and other errors of kc_http_request; -EPROTO.
 */
int kc_client_query(struct kc_client *client, const uint32_t *tokens, size_t n,
                    struct kc_belief *ret, uint64_t *ret_ns, struct kv_error *error);

#endif
