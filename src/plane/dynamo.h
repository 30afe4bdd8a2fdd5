// SPDX-License-Identifier: Apache-2.0
/**
 * Records of Dynamo's discovery: who publishes events, and where (docs/event-plane.md).
 *
 *   EventSource    a publisher, and the worker and rank whose events it may tell
 *   EventChannel   the address of a publisher's ZMQ socket; publishers on NATS have none
 *
 * A record's key is "v1/event_sources/NAME" or "v1/event_channels/NAME", with the NAME
 * "namespace/NS/component/COMP/endpoint/EP/topic/kv-events/PUBLISHER" (hexadecimal). Source of the
 * formats: Dynamo 1.6.1.
 */
#ifndef KV_PLANE_DYNAMO_H
#define KV_PLANE_DYNAMO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"

#define KVP_DYNAMO_SOURCES "v1/event_sources/"
#define KVP_DYNAMO_CHANNELS "v1/event_channels/"
#define KVP_DYNAMO_BOTH "v1/event_" /* both begin so */

#define KVP_DYNAMO_NAME_MAX 127     /* bytes of a namespace, a component, an endpoint's name */
#define KVP_DYNAMO_ADDRESS_MAX 1023 /* bytes of a ZMQ address */
#define KVP_DYNAMO_KEY_MAX 511      /* bytes of a key */

/** An endpoint of Dynamo, whose workers' events these are. */
struct kvp_dynamo_endpoint {
    char ns[KVP_DYNAMO_NAME_MAX + 1];
    char component[KVP_DYNAMO_NAME_MAX + 1];
    char name[KVP_DYNAMO_NAME_MAX + 1];
};

struct kvp_dynamo_source {
    struct kvp_dynamo_endpoint of;
    uint64_t publisher;
    uint64_t worker;
    uint32_t rank;
};

struct kvp_dynamo_channel {
    struct kvp_dynamo_endpoint of;
    uint64_t publisher;
    char address[KVP_DYNAMO_ADDRESS_MAX + 1]; /* "tcp://HOST:PORT"; empty: of another kind */
};

/**
 * Read "NS.COMP.EP" or "NS/COMP/EP". Names have letters, digits, '-' and '_'. Returns 0 or -EINVAL.
 */
int kvp_dynamo_endpoint_parse(const char *text, struct kvp_dynamo_endpoint *ret);

/** Append the NAME of a publisher's records. */
void kvp_dynamo_put_name(struct kv_buf *out, const struct kvp_dynamo_endpoint *of,
                         uint64_t publisher);

/** Append a record, byte for byte as Dynamo writes it. */
void kvp_dynamo_write_source(struct kv_buf *out, const struct kvp_dynamo_source *source);
void kvp_dynamo_write_channel(struct kv_buf *out, const struct kvp_dynamo_channel *channel);

/**
 * Read a record. Returns 0; -EPROTO (no such JSON, another topic or scope, a member that is missing or
 * too long); -ENOMEM.
 */
int kvp_dynamo_read_source(const void *json, size_t len, struct kvp_dynamo_source *ret);
int kvp_dynamo_read_channel(const void *json, size_t len, struct kvp_dynamo_channel *ret);

/**
 * Names of files: each byte of @name that is no letter or digit as "%2F". kvp_dynamo_file_name appends
 * to @out; kvp_dynamo_from_file_name appends what such a name stands for, and returns 0 or -EPROTO.
 */
void kvp_dynamo_file_name(struct kv_buf *out, const char *name, size_t len);
int kvp_dynamo_from_file_name(struct kv_buf *out, const char *name);

#endif
