// SPDX-License-Identifier: Apache-2.0
/**
 * A small cache of chunks found in the bucket lately, or found damaged. Bounded: replaced entries
 * are asked for again. Thread-safe.
 */
#ifndef KV_PLUGINS_S3_SEEN_H
#define KV_PLUGINS_S3_SEEN_H

#include <stddef.h>
#include <stdint.h>

enum s3_known { S3_UNKNOWN, S3_SEEN, S3_BAD };

struct s3_seen;
struct s3_seen *s3_seen_create(void); /* NULL: out of memory */
void s3_seen_destroy(struct s3_seen *seen);

void s3_seen_note(struct s3_seen *seen, const uint8_t *hash, size_t hash_len, enum s3_known known);
/** Look a chunk up. S3_SEEN is forgotten after ten minutes. */
enum s3_known s3_seen_find(struct s3_seen *seen, const uint8_t *hash, size_t hash_len);

#endif
