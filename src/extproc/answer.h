// SPDX-License-Identifier: Apache-2.0
/** Messages to Envoy. */
#ifndef KV_EXTPROC_ANSWER_H
#define KV_EXTPROC_ANSWER_H

#include <stdbool.h>
#include <stddef.h>

#include "grpc/grpc.h"

#define KX_CHUNK ((size_t)62 << 10) /* bytes of a body in one message */

/** Header and metadata of a choice, and the namespace of the latter. */
#define KX_DESTINATION "x-gateway-destination-endpoint"
#define KX_NAMESPACE "envoy.lb"

/** Side of a request that a message belongs to. */
enum kx_side { KX_REQUEST, KX_RESPONSE };

/** Answer headers: go on; with @endpoints (may be NULL) in header and metadata. */
void kx_answer_headers(struct kg_call *call, enum kx_side side, const char *endpoints);
/** Give a body back in chunks; @last: its end. An empty body with @last is one empty chunk. */
void kx_answer_stream(struct kg_call *call, enum kx_side side, const void *data, size_t len,
                      bool last);
/** Answer a body that Envoy keeps: go on. */
void kx_answer_body(struct kg_call *call, enum kx_side side);
/** Answer trailers: go on. */
void kx_answer_trailers(struct kg_call *call, enum kx_side side);
/** Have Envoy answer the client with @status and an error in OpenAI's form. */
void kx_answer_refusal(struct kg_call *call, unsigned status, const char *text);

#endif
