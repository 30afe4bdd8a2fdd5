// SPDX-License-Identifier: Apache-2.0
/**
 * Records of agents in etcd:
 *
 *   key     /PREFIX/NAME/INCARNATION (16 hexadecimal digits), under the agent's lease
 *   value   {"v":1,"name":"a","worker":7,"incarnation":81985529216486895,"endpoints":["tcp:..."]}
 */
#ifndef KVBM_PEER_DIRECTORY_PEER_RECORD_H
#define KVBM_PEER_DIRECTORY_PEER_RECORD_H

#include "base/core/buf.h"
#include "peer/directory/directory.h"

#define ETCD_MAX_VALUE 4096 /* bytes of a peer's value */

/** Write a peer's key, without the prefix. */
void etcd_key(const struct kvbm_directory_peer *peer, char ret[KVBM_MAX_PEER_KEY + 1]);

/** Append a peer's value. */
void etcd_write_peer(struct kv_buf *out, const struct kvbm_directory_peer *peer);

/** Read a peer's value. Returns 0; -EPROTO; -ENOMEM. */
int etcd_read_peer(const void *json, size_t len, struct kvbm_directory_peer *ret);

/** Check that @peer can be registered: a name, an incarnation, valid endpoints. */
bool etcd_peer_is_valid(const struct kvbm_directory_peer *peer);

/** Take what a server says about a key within the prefix: see etcd_tell_peer. */
typedef void (*etcd_peer_fn)(void *arg, const char *key, const struct kvbm_directory_peer *peer,
                             bool deleted);

/**
 * Call @fn for the key and value of a server: with the key within @prefix, and the peer; NULL when it
 * was deleted, or its value makes no sense. Not for keys that no agent has written. Returns 0 or
 * -ENOMEM.
 */
int etcd_tell_peer(const char *prefix, struct kv_str key, struct kv_str value, bool deleted,
                   etcd_peer_fn fn, void *arg);

#endif
