// SPDX-License-Identifier: Apache-2.0
/**
 * kv_plane.h: the event plane, on which block managers publish the life of their blocks over NATS
 * (docs/event-plane.md).
 *
 * kvbm_events.h publishes; this header holds what publishers and subscribers share.
 *
 * Threads: any function from any thread.
 */
#ifndef KV_PLANE_H
#define KV_PLANE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- servers ---- */

/**
 * Options of a connection to NATS; set size to sizeof(struct kvp_nats_opts), zero means the default.
 * All strings are copied. Of the four credentials (user and password, token, nkey_file, creds_file)
 * one at most may be given. Files are read again at every connection, so that a renewed credential
 * counts without a restart.
 */
struct kvp_nats_opts {
    size_t size;
    /* Required: nats://HOST:PORT or tls://HOST:PORT; of a cluster several, with commas between. */
    const char *url;
    const char *name; /* shown in the server's list of connections; NULL: "kvasir" */

    const char *user, *password;
    const char *token;
    const char *nkey_file;  /* the seed of a user's nkey ("SU...") */
    const char *creds_file; /* a user's JWT and seed, as nsc writes them */

    const char *tls_ca; /* PEM file; NULL: the system's authorities. Giving it demands TLS. */
    const char *tls_cert, *tls_key; /* PEM files of this client; both or none */

    uint64_t queue_bytes;  /* messages that wait for the server; 0: 64 MiB. More are dropped. */
    uint32_t reconnect_ms; /* between attempts to connect; 0: 1000 */
    uint32_t timeout_ms;   /* of one attempt, of a write, of a JetStream acknowledgement; 0: 2000 */
};
#define KVP_NATS_OPTS_INIT KV_INIT_(kvp_nats_opts)

#ifdef __cplusplus
}
#endif
#endif
