// SPDX-License-Identifier: Apache-2.0
/**
 * A pipeline of commands: all are sent without waiting, then all replies are awaited.
 *
 *     rds_batch_begin(&batch, 3); rds_batch_arg(...); rds_batch_key(...); rds_batch_payload(...);
 *
 * One text holds the leading arguments of all commands. A command's last argument may be borrowed
 * bytes. An error (batch.error) stays set until rds_batch_fini.
 */
#ifndef KV_REDIS_BATCH_H
#define KV_REDIS_BATCH_H

#include <stdbool.h>
#include <sys/uio.h>

#include "base/core/buf.h"
#include "redis/resp.h"

struct rds_cmd {
    size_t head, head_len; /* in the batch's text */
    const void *payload;   /* borrowed; NULL: none */
    size_t payload_len;
    uint16_t slot; /* slot of its key, in a cluster */
    int16_t node;  /* node that must answer; -1: the owner of the slot */
    bool fixed;    /* the caller chose @node */
    bool asking;   /* in a cluster: preceded by ASKING */
    bool asked;    /* the reply to ASKING has arrived */
    bool done;     /* the command has its reply */
    bool refused;  /* the reply is a replica's: another server may take the command */
    uint64_t line; /* number of the connection that brought the reply; unique */
    struct resp_value reply;
};

struct rds_batch {
    struct kv_buf text;
    struct rds_cmd *cmds;
    size_t n, capacity;
    /* bytes left for payloads of replies; larger payloads are skipped. NULL: no limit */
    uint64_t *room;
    int error;
};

void rds_batch_fini(struct rds_batch *batch); /* frees; the batch can be used again */
void rds_batch_begin(struct rds_batch *batch, size_t n_args);
void rds_batch_arg(struct rds_batch *batch, const void *data, size_t len);
void rds_batch_word(struct rds_batch *batch, const char *word);
void rds_batch_number(struct rds_batch *batch, int64_t number);
/* also chooses the slot */
void rds_batch_key(struct rds_batch *batch, const void *key, size_t len);
/* the last argument */
void rds_batch_payload(struct rds_batch *batch, const void *data, size_t len);

/** List up to @max pieces of command @i from its byte @offset on. Returns their number. */
int rds_batch_pieces(const struct rds_batch *batch, size_t i, size_t offset, struct iovec *iov,
                     int max);
size_t rds_batch_wire_len(const struct rds_batch *batch, size_t i);

/** Compute the cluster slot of @key: CRC-16/XMODEM of the key, or of the part in its first {}. */
uint16_t rds_key_slot(const void *key, size_t len);

#endif
