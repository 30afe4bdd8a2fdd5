// SPDX-License-Identifier: Apache-2.0
/**
 * A client of kv-indexer: which workers hold most of a prompt, by the keys of its blocks. Answers are
 * hints: the index may lag, and its workers may be none of ours.
 *
 *   indexer.c        options, requests, breaker
 *   indexer_wire.c   the request, and the parser of the answer
 *
 * Requests run on the callers' threads, several at a time. None takes longer than its deadline. The
 * breaker opens when the indexer doesn't answer in time, and after three other failures in a row:
 * nothing is asked then but a probe after 1 s, 2 s, and so on up to 30 s.
 */
#ifndef KVBM_PEER_DIRECTORY_INDEXER_H
#define KVBM_PEER_DIRECTORY_INDEXER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"

#define KVBM_INDEXER_MAX_ANSWER (4u << 20) /* bytes */

struct kvbm_indexer;

struct kvbm_indexer_opts {
    const char *url;        /* required: http://HOST:PORT or https://HOST:PORT */
    const char *model;      /* required: as the workers are registered */
    const char *tenant;     /* NULL: default */
    const char *token_file; /* the first line is sent as a bearer token; NULL: none */
    const char *tls_ca;     /* https: PEM file; NULL: the system's authorities */
    uint32_t timeout_ms;    /* of a request; 0: 100 */
    uint32_t max_requests;  /* at a time; 0: 4 */
};

/**
 * Make a client. Doesn't connect. Returns 0; -EINVAL (url, model); -ENOTSUP (no libkvbm_http);
 * -ENOMEM; -EMFILE; an error of reading the token. The log says why.
 */
int kvbm_indexer_open(const struct kvbm_indexer_opts *opts, struct kvbm_indexer **ret);

/** Free a client that no thread uses. NULL is a no-op. */
void kvbm_indexer_close(struct kvbm_indexer *indexer);

/** A worker that holds blocks of a prompt, in any tier. */
struct kvbm_holding {
    uint64_t worker;
    uint64_t tokens; /* of the prompt's beginning, 1 or more */
};

/**
 * Ask who holds the prompt whose consecutive blocks have the @n keys. Waits until @deadline_ns, and
 * at most timeout_ms. ret[0..@max) become the workers with the longest match, longest first; of equal
 * ones another process has another order. Returns their number, 0 when nobody holds a block, or
 *   -EHOSTDOWN  the breaker is open
 *   -EAGAIN     max_requests are under way
 *   -ETIMEDOUT  no answer in time
 *   -ECANCELED  kvbm_indexer_interrupt
 *   -EPROTO     an answer that makes no sense
 *   -EIO        the connection failed, or the indexer refused
 *   -ENOMEM
 */
long kvbm_indexer_ask(struct kvbm_indexer *indexer, const void *keys, uint32_t key_len, size_t n,
                      uint64_t deadline_ns, struct kvbm_holding *ret, size_t max);

/** End requests under way with -ECANCELED, and refuse new ones so, while @on. NULL is a no-op. */
void kvbm_indexer_interrupt(struct kvbm_indexer *indexer, bool on);

struct kvbm_indexer_stats {
    uint64_t asked, failed; /* requests; those without an answer, or with one that makes no sense */
    uint64_t opened;        /* the breaker, times */
    bool down;              /* the breaker is open */
};
void kvbm_indexer_get_stats(struct kvbm_indexer *indexer, struct kvbm_indexer_stats *ret);

/* ---- the wire ---- */

/** Append the body of a request for @n keys: of each the hash that its events carry. */
void kvbm_indexer_write(struct kv_buf *out, const char *model, const char *tenant, const void *keys,
                        uint32_t key_len, size_t n);

/**
 * Read an answer: the @max workers with the longest match, longest first; of equal ones @salt chooses.
 * Returns their number; -EPROTO (no such answer); -ENOMEM.
 */
long kvbm_indexer_read(const void *json, size_t len, uint64_t salt, struct kvbm_holding *ret,
                       size_t max);

#endif
