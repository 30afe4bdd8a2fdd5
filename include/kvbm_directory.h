// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_directory.h: who is there. A directory names the agents that a program may open sessions
 * with (kvbm_remote.h): from a list, a file or etcd (docs/kvbm-remote.md).
 *
 *   "tcp:10.0.0.7:7000, unix:/run/kv/a.sock"   a list that doesn't change
 *   "file:/etc/kvasir/peers"                   one endpoint a line, # begins a comment; read again
 *                                              when the file changes
 *   "etcd://10.0.0.1:2379,10.0.0.2:2379/PREFIX"    agents register themselves below PREFIX under a
 *   "etcds://..."                                  lease, and watch the others; etcds: over TLS
 *
 * A directory is soft state and no authority: a peer in it may be dead, and one that isn't in it may
 * live. It never elects, locks or decides; sessions find out who answers. While etcd can't be
 * reached, the peers that were known stay.
 *
 * Errors are negative errno values, with the reason in the log; a failing call changes nothing.
 * Threads: each directory has one thread of its own, which calls the callback. Functions may be
 * called from any thread; nothing may use a directory while another thread closes it.
 */
#ifndef KVBM_DIRECTORY_H
#define KVBM_DIRECTORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_remote.h"

#ifdef __cplusplus
extern "C" {
#endif

/** Endpoints of an agent, and the longest one in bytes. */
#define KVBM_MAX_PEER_ENDPOINTS 8
#define KVBM_MAX_PEER_ENDPOINT 127

/** An agent as a directory knows it. */
struct kvbm_directory_peer {
    size_t size;
    char name[KVBM_MAX_AGENT_NAME + 1]; /* "": lists and files know endpoints only */
    uint64_t worker, incarnation;       /* 0 with the name "" */
    uint32_t n_endpoints;               /* 1 or more */
    char endpoints[KVBM_MAX_PEER_ENDPOINTS]
                  [KVBM_MAX_PEER_ENDPOINT + 1]; /* as of an agent's listen */
};
#define KVBM_DIRECTORY_PEER_INIT KV_INIT_(kvbm_directory_peer)

/**
 * Take a change: @peer is there (new, or with other endpoints than before), or no longer. Runs on
 * the directory's thread; must close neither the directory (which goes on, with an error in the log)
 * nor the follower that calls it (-EDEADLK). @peer is valid until it returns.
 */
typedef void (*kvbm_directory_fn)(void *arg, const struct kvbm_directory_peer *peer, bool there);

/** Options; set size to sizeof(struct kvbm_directory_opts), zero means the default. */
struct kvbm_directory_opts {
    size_t size;
    const char *peers;         /* required: a list, file: or etcd: as above */
    kvbm_directory_fn changed; /* required */
    void *arg;                 /* of changed */
    /* The caller's agent: registered in etcd; left out of what changed gets, everywhere. NULL: only look. */
    const struct kvbm_directory_peer *self;
    uint32_t max_peers;  /* further ones are left out, and counted; 0: 1024, at most 65536 */
    uint32_t ttl_s;      /* etcd: lease; a dead agent is removed after it. 0: 10, at most 3600 */
    uint32_t timeout_ms; /* etcd: of each request; 0: 3000 */
    uint32_t reread_ms;  /* file: how often to look for changes; 0: 1000 */
    /* etcds: PEM files. NULL for tls_ca: the system's authorities. */
    const char *tls_ca, *tls_cert, *tls_key;
    const char *user, *password_file; /* etcd: the first line of the file; both or none */
};
#define KVBM_DIRECTORY_OPTS_INIT KV_INIT_(kvbm_directory_opts)

struct kvbm_directory;

/**
 * Open a directory and start its thread. Doesn't wait for etcd: the thread tries until it is closed.
 * The caller closes *@ret with kvbm_directory_close. Returns 0, or
 *   -EINVAL   peers, self, or an option out of its range
 *   -ENOTSUP  etcd, without libkvbm_http beside libkvbm
 *   -ENOMEM, -EAGAIN (no thread), or an error of reading the file or the password
 */
KV_API int kvbm_directory_open(const struct kvbm_directory_opts *opts, struct kvbm_directory **ret);

/**
 * Take this agent out of etcd (waiting for it at most 1 s), end the thread, free the directory. No
 * callback runs afterwards, and none tells that peers are gone. NULL is a no-op.
 */
KV_API void kvbm_directory_close(struct kvbm_directory *directory);

/** State of a directory. */
struct kvbm_directory_info {
    size_t size;     /* the caller's */
    bool current;    /* the peers are as list, file or etcd say now */
    bool registered; /* etcd: this agent is in it, as far as is known */
    uint32_t n_peers;
    uint64_t left_out; /* peers beyond max_peers at the last look, and entries that make no sense */
    uint64_t failures; /* requests that failed, files that couldn't be read */
    char error[128];   /* the last failure in words; "": none */
};
#define KVBM_DIRECTORY_INFO_INIT KV_INIT_(kvbm_directory_info)

/** Read the state. Returns 0; -EINVAL (NULL, or ret->size). */
KV_API int kvbm_directory_get_info(struct kvbm_directory *directory,
                                   struct kvbm_directory_info *ret);

/* ---------------------------------------------------------------------------------------------
 * Agents that follow a directory.
 */

/** An agent with a session to each peer of a directory. */
struct kvbm_follower;

/** Options; set size to sizeof(struct kvbm_follow_opts), zero means the default. */
struct kvbm_follow_opts {
    size_t size;
    /* Required: peers, and what etcd needs. changed and arg may be NULL; the follower calls changed
     * after it has taken note of a change. Read by kvbm_agent_follow only. */
    const struct kvbm_directory_opts *directory;
    uint32_t open_ms;  /* for one attempt to open a session; 0: 1000 */
    uint32_t retry_ms; /* longest pause between attempts at a peer; 0: 2000 */
    uint32_t n_data;   /* further connections of each session, 0 to 8 */
};
#define KVBM_FOLLOW_OPTS_INIT KV_INIT_(kvbm_follow_opts)

/**
 * Open a session with every peer of a directory, and again when one has ended; close the sessions
 * of peers that leave the directory. unix: endpoints of a peer are tried before tcp: ones. The agent
 * itself is left out. Doesn't wait for sessions. The caller ends *@ret with kvbm_follower_close,
 * before the agent. Returns 0; -EINVAL; -ENOMEM; -EAGAIN (no thread); or as kvbm_directory_open.
 *
 * Up to 8 threads open sessions at the same time, so that peers that don't answer delay others only
 * when there are 8 of them. A session that ends is opened again within 250 ms, or after a pause that
 * grows from 50 ms to retry_ms while attempts fail (eight times that for a peer that doesn't answer,
 * or that doesn't fit this agent).
 */
KV_API int kvbm_agent_follow(struct kvbm_agent *agent, const struct kvbm_follow_opts *opts,
                             struct kvbm_follower **ret);

/**
 * Close the directory and the sessions that the follower has opened, and free it. Waits for
 * attempts under way, at most open_ms. NULL is a no-op. Returns 0; -EDEADLK (called from a callback
 * of the agent, or from `changed` of its directory: nothing is done).
 */
KV_API int kvbm_follower_close(struct kvbm_follower *follower);

/** State of a follower. */
struct kvbm_follower_info {
    size_t size;             /* the caller's */
    uint32_t n_peers;        /* that the directory names, without the agent itself */
    uint32_t n_open;         /* of these, peers with an open session of the follower */
    uint64_t opened, failed; /* attempts */
};
#define KVBM_FOLLOWER_INFO_INIT KV_INIT_(kvbm_follower_info)

/** Read the state. Returns 0; -EINVAL (NULL, or ret->size). */
KV_API int kvbm_follower_get_info(struct kvbm_follower *follower, struct kvbm_follower_info *ret);

#ifdef __cplusplus
}
#endif
#endif
