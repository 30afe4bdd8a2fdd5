// SPDX-License-Identifier: Apache-2.0
/**
 * Messages of the event plane as bytes (docs/formats.md, "Event plane"). kvp_read of kv_plane.h
 * reads them.
 *
 *   ┌────────────┬──────────────┬───────────┬──────────┬─────┐
 *   │ fixed part │ publisher, 0s│ record    │ record   │ ... │    everything in steps of 8 bytes
 *   └────────────┴──────────────┴───────────┴──────────┴─────┘
 */
#ifndef KV_PLANE_RECORD_H
#define KV_PLANE_RECORD_H

#include "base/core/buf.h"
#include "kv_plane.h"

#define KVP_MAGIC "KVEV"
#define KVP_VERSION 1
#define KVP_FIXED 96  /* bytes of a message before its publisher */
#define KVP_RECORD 48 /* bytes of a record before its keys */
#define KVP_MAX_KEY 64
#define KVP_MAX_RECORD (KVP_RECORD + 2 * KVP_MAX_KEY)

enum { /* flags of a record */
       KVP_FIRST = 1,
       KVP_LAST = 2,
       KVP_PARENT = 4,
       KVP_PREFIX = 8,
       KVP_TOKENS = 16,
       KVP_KNOWN = 31
};

/** Begin a message in @out, which is emptied; n_records is filled in by kvp_end. */
void kvp_begin(struct kv_buf *out, const struct kvp_header *header);
/** Append a record, which must be valid. */
void kvp_put(struct kv_buf *out, const struct kvp_record *record);
/** Mark the message as the last part of a snapshot; before kvp_end. */
void kvp_set_last(struct kv_buf *out);
/** End a message of @n records: fill in their number and the checksum. Returns 0 or out's error. */
int kvp_end(struct kv_buf *out, uint32_t n);

/**
 * Read the header of a message alone, without its checksum: to decide what to do with a message that
 * kvp_read then checks. Returns as kvp_read.
 */
int kvp_peek(const void *data, size_t len, struct kvp_header *ret);

/** Write the binary message @data, which must be valid, as JSON to @out. Returns 0 or an error. */
int kvp_to_json(const void *data, size_t len, struct kv_buf *out);

/** Read a JSON message as kvp_read does. */
int kvp_read_json(const void *data, size_t len, struct kvp_header *ret, kvp_record_fn fn,
                  void *arg);

/** True when @text may be a publisher's subject: printable, no wildcard, not too long. */
bool kvp_is_subject(const char *text, size_t len);

/** True when the fields of a header go together: only a snapshot has parts. */
bool kvp_header_is_valid(const struct kvp_header *header);
/** True when a record can be written: known enums, lengths, flags. */
bool kvp_record_is_valid(const struct kvp_record *record);

#endif
