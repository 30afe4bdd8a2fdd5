// SPDX-License-Identifier: Apache-2.0
/**
 * JSON of etcd's gateway (/v3/...): requests that this directory sends, and what it needs of the
 * answers. Keys and values are in base64, 64-bit numbers in strings.
 *
 *   key     /PREFIX/NAME/INCARNATION (16 hexadecimal digits), under the agent's lease
 *   value   {"v":1,"name":"a","worker":7,"incarnation":81985529216486895,"endpoints":["tcp:..."]}
 */
#ifndef KVBM_PEER_DIRECTORY_ETCD_WIRE_H
#define KVBM_PEER_DIRECTORY_ETCD_WIRE_H

#include "base/core/buf.h"
#include "peer/directory/directory.h"

#define ETCD_MAX_VALUE 4096 /* bytes of a peer's value */

/* ---- requests: appended to @out ---- */

void etcd_write_login(struct kv_buf *out, const char *user, const char *password);
void etcd_write_grant(struct kv_buf *out, uint32_t ttl_s);
void etcd_write_lease(struct kv_buf *out, uint64_t lease); /* keepalive, revoke */
void etcd_write_put(struct kv_buf *out, const char *prefix, const struct kvbm_directory_peer *peer,
                    uint64_t lease);
void etcd_write_range(struct kv_buf *out, const char *prefix, uint32_t limit);
void etcd_write_watch(struct kv_buf *out, const char *prefix, uint64_t revision);

/* ---- answers ---- */

/** Contents of an answer; fields that it lacks are 0. */
struct etcd_answer {
    uint64_t revision; /* of the header */
    uint64_t id, ttl;  /* of a lease */
    char token[512];
    char error[96]; /* "": none */
    bool created, canceled, more;
};

/**
 * Take a key (within the prefix) and its peer, NULL when it was deleted or its value makes no sense.
 */
typedef void (*etcd_peer_fn)(void *arg, const char *key, const struct kvbm_directory_peer *peer,
                             bool deleted);

/**
 * Read an answer, or a message of a watch: its header, lease, token, and the peers of "kvs" and
 * "events". Returns 0; -EPROTO (not such JSON); -ENOMEM.
 */
int etcd_read(const void *json, size_t len, const char *prefix, struct etcd_answer *ret,
              etcd_peer_fn fn, void *arg);

/** Write a peer's key, without the prefix. */
void etcd_key(const struct kvbm_directory_peer *peer, char ret[KVBM_MAX_PEER_KEY + 1]);

/** Read a peer's value. Returns 0; -EPROTO; -ENOMEM. */
int etcd_read_peer(const void *json, size_t len, struct kvbm_directory_peer *ret);

/** Check that @peer can be registered: a name, an incarnation, valid endpoints. */
bool etcd_peer_is_valid(const struct kvbm_directory_peer *peer);

/* ---- base64 ---- */

void etcd_put_base64(struct kv_buf *out, const void *data, size_t len);
/** Decode; @ret has room for @len bytes. Returns the length or -EPROTO. */
long etcd_read_base64(const char *text, size_t len, void *ret);

#endif
