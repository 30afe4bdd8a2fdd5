// SPDX-License-Identifier: Apache-2.0
#include "s3/seen.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/xxh.h"

#define SLOTS 16384
#define SEEN_NS (600 * KV_NS_PER_S) /* far less than any sweep's minimum age */

struct slot {
    XXH128_hash_t hash;
    uint64_t since_ns;
    uint64_t lost_at; /* moment at which any chunk of the slot was forgotten or noted as damaged */
    enum s3_known known;
};

/* Direct-mapped by the chunk's hash. */
struct s3_seen {
    pthread_mutex_t lock;
    uint64_t moment;
    struct slot slots[SLOTS];
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

uint64_t s3_seen_moment(struct s3_seen *seen)
{
    uint64_t moment;

    pthread_mutex_lock(&seen->lock);
    moment = seen->moment;
    pthread_mutex_unlock(&seen->lock);
    return moment;
}

static void set(struct slot *slot, XXH128_hash_t key, enum s3_known known)
{
    slot->hash = key;
    slot->since_ns = kv_now_ns();
    slot->known = known;
}

void s3_seen_found(struct s3_seen *seen, const uint8_t *hash, size_t hash_len, uint64_t asked)
{
    XXH128_hash_t key = XXH3_128bits(hash, hash_len);
    struct slot *slot = &seen->slots[key.low64 % SLOTS];

    pthread_mutex_lock(&seen->lock);
    if (slot->lost_at <= asked)
        set(slot, key, S3_SEEN);
    pthread_mutex_unlock(&seen->lock);
}

void s3_seen_forget(struct s3_seen *seen, const uint8_t *hash, size_t hash_len, bool keep_bad)
{
    XXH128_hash_t key = XXH3_128bits(hash, hash_len);
    struct slot *slot = &seen->slots[key.low64 % SLOTS];

    pthread_mutex_lock(&seen->lock);
    slot->lost_at = ++seen->moment;
    if (XXH128_isEqual(slot->hash, key) && !(keep_bad && slot->known == S3_BAD))
        set(slot, key, S3_UNKNOWN);
    pthread_mutex_unlock(&seen->lock);
}

void s3_seen_bad(struct s3_seen *seen, const uint8_t *hash, size_t hash_len)
{
    XXH128_hash_t key = XXH3_128bits(hash, hash_len);
    struct slot *slot = &seen->slots[key.low64 % SLOTS];

    pthread_mutex_lock(&seen->lock);
    slot->lost_at = ++seen->moment;
    set(slot, key, S3_BAD);
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
