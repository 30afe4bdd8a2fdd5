// SPDX-License-Identifier: Apache-2.0
/**
 * JSON of etcd's gateway (/v3/...): requests that the client sends (etcd.h), and what it needs of the
 * answers. Keys and values are in base64, 64-bit numbers in strings.
 */
#ifndef KV_PLANE_ETCD_WIRE_H
#define KV_PLANE_ETCD_WIRE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/json/json.h"

#define ETCD_MAX_PREFIX 255

/* ---- requests: appended to @out ---- */

void etcd_write_login(struct kv_buf *out, const char *user, const char *password);
void etcd_write_grant(struct kv_buf *out, uint32_t ttl_s);
void etcd_write_lease(struct kv_buf *out, uint64_t lease); /* keepalive, revoke */
void etcd_write_put(struct kv_buf *out, const char *key, const void *value, size_t len,
                    uint64_t lease);
/** Of all keys that begin with @prefix: 1 to ETCD_MAX_PREFIX + 1 bytes. */
void etcd_write_range(struct kv_buf *out, const char *prefix, uint32_t limit);
void etcd_write_delete(struct kv_buf *out, const char *key);
/**
 * Write, or only look: if key @guard was created at revision @created (0: there is no such key), put @key; NULL:
 * put nothing. The answer's `succeeded` tells whether it was so.
 */
void etcd_write_put_if(struct kv_buf *out, const char *guard, uint64_t created, const char *key,
                       const void *value, size_t len, uint64_t lease);
void etcd_write_watch(struct kv_buf *out, const char *prefix, uint64_t revision);

/* ---- answers ---- */

/** Contents of an answer; fields that it lacks are 0. */
struct etcd_answer {
    uint64_t revision; /* of the header */
    uint64_t id, ttl;  /* of a lease */
    char token[512];
    char error[96]; /* "": none */
    bool created, canceled, more, succeeded;
};

/** Most bytes of a key and of a value. An answer with longer ones makes no sense. */
struct etcd_limits {
    size_t key, value;
};

/** Take a key and its value, which is empty where the key was deleted. Both may hold any bytes. */
typedef void (*etcd_key_fn)(void *arg, struct kv_str key, struct kv_str value, bool deleted);

/**
 * Read an answer, or a message of a watch: its header, lease, token, and the keys of "kvs" and
 * "events" (@fn may be NULL). Returns 0; -EPROTO (not such JSON); -ENOMEM.
 */
int etcd_read(const void *json, size_t len, const struct etcd_limits *limits,
              struct etcd_answer *ret, etcd_key_fn fn, void *arg);

/* ---- base64 ---- */

void etcd_put_base64(struct kv_buf *out, const void *data, size_t len);
/** Decode; @ret has room for @len bytes. Returns the length or -EPROTO. */
long etcd_read_base64(const char *text, size_t len, void *ret);

#endif
