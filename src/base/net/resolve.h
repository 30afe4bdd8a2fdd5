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
    char text[64]; /* numeric, without brackets; an IPv6 address with its zone */
    int family;    /* AF_INET or AF_INET6 */
};

struct kv_addresses {
    unsigned n;
    struct kv_address items[KV_RESOLVE_MAX]; /* IPv4 first, then in the resolver's order */
};

/**
 * Look @host up, however long that takes. Returns 0, -ENOENT (no such name), -EAGAIN (no answer) or
 * another errno.
 */
typedef int (*kv_lookup_fn)(void *arg, const char *host, struct kv_addresses *ret);

struct kv_resolver_opts {
    uint32_t threads;     /* lookups at the same time; 0: 64 */
    uint32_t max_names;   /* names remembered or being looked up; 0: 4096 */
    uint64_t deadline_ms; /* limit of one lookup in milliseconds, queueing included; 0: 5000 */
    /* Pause before a failed name is looked up again, in milliseconds; 0: 1000 */
    uint64_t failed_ms;
    kv_lookup_fn lookup; /* NULL: getaddrinfo. Must outlive the process's last lookup. */
    void *lookup_arg;
};

struct kv_resolver;

int kv_resolver_create(const struct kv_resolver_opts *opts,
                       struct kv_resolver **ret);       /* @opts may be NULL */
void kv_resolver_destroy(struct kv_resolver *resolver); /* NULL is a no-op */

/**
 * Ask for addresses of @host that are at most @max_age_ms (at least 1000) old. Never waits. Returns
 *   0             *@ret is filled; with older addresses while the name servers don't answer;
 *   -EINPROGRESS  ask again later;
 *   -ENOENT       there is no such name;
 *   -ETIMEDOUT    no answer within the deadline;
 *   -EAGAIN       the name servers failed;
 *   -ENOSPC       too many names; -ENOMEM.
 */
int kv_resolver_ask(struct kv_resolver *resolver, const char *host, uint64_t max_age_ms,
                    struct kv_addresses *ret);

/**
 * Ask like kv_resolver_ask, and wait for the answer until @deadline_ns (monotonic), then
 * -ETIMEDOUT.
 */
int kv_resolver_wait(struct kv_resolver *resolver, const char *host, uint64_t max_age_ms,
                     uint64_t deadline_ns, struct kv_addresses *ret);

/**
 * Return the resolver that the whole library or program shares, with default options. It is made at
 * first use and never destroyed, so the library that uses it must not be unloaded (-z nodelete).
 * NULL: out of memory.
 */
struct kv_resolver *kv_resolver_shared(void);

/** Describe an error of kv_resolver_ask or kv_resolver_wait in words. */
const char *kv_resolver_strerror(int rc);

/** Look @host up with getaddrinfo, as a kv_lookup_fn. @arg is unused. */
int kv_lookup_system(void *arg, const char *host, struct kv_addresses *ret);

#endif
