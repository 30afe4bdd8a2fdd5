// SPDX-License-Identifier: Apache-2.0
#include "s3/seen.h"

#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/xxh.h"

#define SLOTS 16384
#define SEEN_NS (600 * KV_NS_PER_S) /* far less than any sweep's minimum age */

/* Direct-mapped by the chunk's hash. */
struct s3_seen {
    pthread_mutex_t lock;
    struct {
        XXH128_hash_t hash;
        uint64_t since_ns;
        enum s3_known known;
    } slots[SLOTS];
};

struct s3_seen *s3_seen_create(void)
{
    struct s3_seen *seen = calloc(1, sizeof(*seen));

    if (seen)
        pthread_mutex_init(&seen->lock, NULL);
    return seen;
}

void s3_seen_destroy(struct s3_seen *seen)
{
    if (!seen)
        return;
    pthread_mutex_destroy(&seen->lock);
    free(seen);
}

void s3_seen_note(struct s3_seen *seen, const uint8_t *hash, size_t hash_len, enum s3_known known)
{
    XXH128_hash_t key = XXH3_128bits(hash, hash_len);
    size_t i = key.low64 % SLOTS;

    pthread_mutex_lock(&seen->lock);
    if (known != S3_UNKNOWN || XXH128_isEqual(seen->slots[i].hash, key)) {
        seen->slots[i].hash = key;
        seen->slots[i].since_ns = kv_now_ns();
        seen->slots[i].known = known;
    }
    pthread_mutex_unlock(&seen->lock);
}

enum s3_known s3_seen_find(struct s3_seen *seen, const uint8_t *hash, size_t hash_len)
{
    XXH128_hash_t key = XXH3_128bits(hash, hash_len);
    size_t i = key.low64 % SLOTS;
    enum s3_known known = S3_UNKNOWN;

    pthread_mutex_lock(&seen->lock);
    if (XXH128_isEqual(seen->slots[i].hash, key) &&
        (seen->slots[i].known == S3_BAD || kv_now_ns() - seen->slots[i].since_ns < SEEN_NS))
        known = seen->slots[i].known;
    pthread_mutex_unlock(&seen->lock);
    return known;
}
