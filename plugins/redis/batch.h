// SPDX-License-Identifier: Apache-2.0
/**
 * A pipeline of commands: all are sent without waiting, then all replies awaited.
 *
 *     rds_batch_begin(&batch, 3); rds_batch_arg(...); rds_batch_key(...); rds_batch_payload(...);
 *
 * One text holds the leading arguments of all commands; a command's last argument may be borrowed
 * bytes.
 * Errors stick (batch.error) until the end.
 */
#ifndef KV_REDIS_BATCH_H
#define KV_REDIS_BATCH_H

#include <stdbool.h>
#include <sys/uio.h>

#include "base/buf.h"
#include "redis/resp.h"

struct rds_cmd {
    size_t head, head_len; /* in the batch's text */
    const void *payload;   /* borrowed; NULL: none */
    size_t payload_len;
    uint16_t slot; /* of its key, in a cluster */
    int16_t node;  /* the one that must answer; -1: the one that has the slot */
    bool fixed;    /* @node was the caller's choice */
    bool asking;   /* in a cluster: preceded by ASKING */
    bool asked;    /* the reply to that has arrived */
    bool done;     /* the reply is here */
    uint64_t line; /* the connection that it came over; no two have one number */
    struct resp_value reply;
};

struct rds_batch {
    struct kv_buf text;
    struct rds_cmd *cmds;
    size_t n, capacity;
    uint64_t *room; /* bytes that payloads of replies may take; NULL: any. Others are skipped */
    int error;
};

void rds_batch_fini(struct rds_batch *batch); /* ready for use again */
void rds_batch_begin(struct rds_batch *batch, size_t n_args);
void rds_batch_arg(struct rds_batch *batch, const void *data, size_t len);
void rds_batch_word(struct rds_batch *batch, const char *word);
void rds_batch_number(struct rds_batch *batch, int64_t number);
void rds_batch_key(struct rds_batch *batch, const void *key, size_t len); /* also routes by it */
void rds_batch_payload(struct rds_batch *batch, const void *data, size_t len); /* the last one */

/** Up to @max pieces of command @i from its byte @offset on; returns how many. */
int rds_batch_pieces(const struct rds_batch *batch, size_t i, size_t offset, struct iovec *iov,
                     int max);
size_t rds_batch_wire_len(const struct rds_batch *batch, size_t i);

/** Where a cluster keeps @key: CRC-16/XMODEM of it, or of what its first {} enclose. */
uint16_t rds_key_slot(const void *key, size_t len);

#endif
