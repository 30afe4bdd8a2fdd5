// SPDX-License-Identifier: Apache-2.0
/**
 * Host names to addresses without waiting: the lookups run on threads of the resolver's own, as
 * many names at a time as it has threads, and askers come back for the answer.
 *
 *     ask ──> known and young enough? ──yes──> addresses
 *              │no
 *              ├── a lookup runs or is queued: -EINPROGRESS, until its deadline has passed
 *              └── queued: names that never failed first, so that dead names hold up each other only
 *
 * getaddrinfo can't be interrupted, and with a name server that doesn't answer it takes tens of
 * seconds. A lookup beyond its deadline goes on in the background, and its answer counts when it
 * comes. kv_resolver_destroy doesn't wait for any: threads own what they use.
 *
 * Thread-safe.
 */
#ifndef KV_BASE_RESOLVE_H
#define KV_BASE_RESOLVE_H

#include <stddef.h>
#include <stdint.h>

#define KV_RESOLVE_MAX 8 /* addresses kept of a name */

struct kv_address {
    char text[64]; /* numeric, without brackets, an IPv6 address with its zone */
    int family;    /* AF_INET or AF_INET6 */
};

struct kv_addresses {
    unsigned n;
    struct kv_address items[KV_RESOLVE_MAX]; /* IPv4 first, then in the resolver's order */
};

/** Look @host up, taking as long as it takes. Returns 0, -ENOENT (no such name), -EAGAIN (no answer), another errno. */
typedef int (*kv_lookup_fn)(void *arg, const char *host, struct kv_addresses *ret);

struct kv_resolver_opts {
    uint32_t threads;     /* lookups at a time; 0: 64 */
    uint32_t max_names;   /* names known or asked for; 0: 4096 */
    uint64_t deadline_ms; /* for one lookup, queueing included; 0: 5000 */
    uint64_t failed_ms;   /* a failed name is looked up again after this time; 0: 1000 */
    kv_lookup_fn lookup;  /* NULL: getaddrinfo. Outlives the process's last lookup. */
    void *lookup_arg;
};

struct kv_resolver;

int kv_resolver_create(const struct kv_resolver_opts *opts,
                       struct kv_resolver **ret);       /* @opts may be NULL */
void kv_resolver_destroy(struct kv_resolver *resolver); /* NULL is a no-op */

/**
 * Addresses of @host that are at most @max_age_ms (no less than 1000) old. Never waits. Returns
 *   0             *@ret is filled; also with older addresses while the name servers don't answer;
 *   -EINPROGRESS  ask again later;
 *   -ENOENT       there is no such name;
 *   -ETIMEDOUT    no answer within the deadline;
 *   -EAGAIN       the name servers failed;
 *   -ENOSPC       too many names; -ENOMEM.
 */
int kv_resolver_ask(struct kv_resolver *resolver, const char *host, uint64_t max_age_ms,
                    struct kv_addresses *ret);

/** The same for callers that may wait, until @deadline_ns (monotonic); then -ETIMEDOUT. */
int kv_resolver_wait(struct kv_resolver *resolver, const char *host, uint64_t max_age_ms,
                     uint64_t deadline_ns, struct kv_addresses *ret);

/** One with default options for the whole library or program, made at its first use and never destroyed. A library that
 * uses it must not be unloaded (-z nodelete). NULL: out of memory. */
struct kv_resolver *kv_resolver_shared(void);

/** Describe a failure of either call in words. */
const char *kv_resolver_strerror(int rc);

/** getaddrinfo as a kv_lookup_fn; @arg is unused. */
int kv_lookup_system(void *arg, const char *host, struct kv_addresses *ret);

#endif
