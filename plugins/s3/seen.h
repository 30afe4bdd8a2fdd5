// SPDX-License-Identifier: Apache-2.0
/**
 * A small cache of chunks found in the bucket lately, or found damaged. Bounded: replaced entries
 * are asked for again. Thread-safe.
 */
#ifndef KV_PLUGINS_S3_SEEN_H
#define KV_PLUGINS_S3_SEEN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum s3_known { S3_UNKNOWN, S3_SEEN, S3_BAD };

struct s3_seen;
struct s3_seen *s3_seen_create(void); /* NULL: out of memory */
void s3_seen_destroy(struct s3_seen *seen);

/**
 * Return the present moment, as the number of chunks forgotten or noted as damaged so far. Take it
 * before you send a request, and pass it to s3_seen_found with the answer.
 */
uint64_t s3_seen_moment(struct s3_seen *seen);
/**
 * Note a chunk as S3_SEEN: the answer to a request sent at @asked says so. Ignored when the chunk
 * was forgotten or noted as damaged after @asked: the answer may be older than that.
 */
void s3_seen_found(struct s3_seen *seen, const uint8_t *hash, size_t hash_len, uint64_t asked);
/** Note a chunk as S3_UNKNOWN: it is absent, or may be. @keep_bad: an S3_BAD chunk stays so. */
void s3_seen_forget(struct s3_seen *seen, const uint8_t *hash, size_t hash_len, bool keep_bad);
/** Note a chunk as S3_BAD: the next put of it replaces it. */
void s3_seen_bad(struct s3_seen *seen, const uint8_t *hash, size_t hash_len);
/** Look a chunk up. S3_SEEN is forgotten after ten minutes. */
enum s3_known s3_seen_find(struct s3_seen *seen, const uint8_t *hash, size_t hash_len);

#endif
