// SPDX-License-Identifier: Apache-2.0
/** Shared by the files of a connection: sub.c (states and timers) and sub_read.c (bytes). */
#ifndef KV_INDEXER_ZMQ_SUB_IMPL_H
#define KV_INDEXER_ZMQ_SUB_IMPL_H

#include "base/core/clock.h"
#include "indexer/zmq/sub.h"

/** Pause after the first breach of the protocol; doubles until a message comes. */
#define KI_SUB_BROKEN_DELAY_NS KV_NS_PER_S

#define KI_SUB_WAS_LOST "the connection was lost"

/** Close the connection, and try again later; much later when the publisher has @broken a rule. */
void ki_sub_lose(struct ki_sub *sub, const char *problem, bool broken, uint64_t now_ns);
/** CONNECTING: go on to SHAKING when the attempt has succeeded, or lose it when it has failed. */
void ki_sub_finish_connect(struct ki_sub *sub, uint64_t now_ns);
/** SHAKING: note the end of the handshake. */
void ki_sub_shaken(struct ki_sub *sub, uint64_t now_ns);
/** Free the memory of its own, and give its bytes back to the limit. */
void ki_sub_free_own(struct ki_sub *sub);
/** Send what waits in sub->zmtp.out, as much as there is room for. */
void ki_sub_flush(struct ki_sub *sub);

#endif
