// SPDX-License-Identifier: Apache-2.0
/** A set of the keys of chunks, as the records of an object of notes (refs.h). */
#ifndef S3_REF_KEYS_H
#define S3_REF_KEYS_H

#include "base/core/buf.h"

/* Records as in the object, and an open-addressed table of their offsets. */
struct s3_ref_keys {
    struct kv_buf records;
    uint32_t *slots; /* offset + 1; 0: free */
    size_t n, capacity;
    bool overflow; /* some keys had no room */
};

/** Free a set and what it has. NULL is a no-op. */
void s3_ref_keys_free(struct s3_ref_keys *keys);

/** Add the record at @record, of 1 + record[0] bytes. Without room, the set notes its overflow. */
void s3_ref_keys_add(struct s3_ref_keys *keys, const uint8_t *record);

/** Add all records of @more. */
void s3_ref_keys_merge(struct s3_ref_keys *keys, const struct s3_ref_keys *more);

/** Number of bytes of the records in @keys that @in lacks. */
size_t s3_ref_keys_fresh_bytes(const struct s3_ref_keys *keys, const struct s3_ref_keys *in);

/** Number of bytes of memory that a set takes. */
size_t s3_ref_keys_bytes(const struct s3_ref_keys *keys);

#endif
