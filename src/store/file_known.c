// SPDX-License-Identifier: Apache-2.0
/**
 * What a handle knows of chunks in place. Saves of a conversation hit the same chunks again and
 * again; opening each, reading its checksum and samples of its bytes costs more than all the rest.
 * So a publication remembers the hits that it verified, made durable and gave their time of last
 * use: while inode, size and that very time (nanoseconds) stay, nobody else wrote to or used the
 * file, and the bytes put now are compared with samples of those put then.
 *
 * The table is made of sets of a few places. In a full set somebody has to go, and is looked at
 * again, no more.
 */
#include "base/xxh.h"
#include "store/file_impl.h"

enum { SETS = 4096, WAYS = 4, SAMPLE = 256 }; /* 1 MiB, once there is a hit */

struct kvs_file_known {
    XXH128_hash_t key;
    struct kvs_file_seen seen; /* ino 0: free */
};

static uint64_t taste(const uint8_t *data, size_t len)
{
    size_t piece = KV_MIN(len, (size_t)SAMPLE);
    uint64_t sum = 0;

    if (!piece)
        return 0;
    sum = kv_xxh64(data, piece, sum);
    sum = kv_xxh64(data + (len - piece) / 2, piece, sum);
    return kv_xxh64(data + len - piece, piece, sum);
}

struct kvs_file_seen kvs_file_see(const struct stat *st, const uint8_t *data, size_t len)
{
    return (struct kvs_file_seen){.ino = st->st_ino,
                                  .size = (uint64_t)st->st_size,
                                  .mtime = st->st_mtim,
                                  .len = len,
                                  .taste = taste(data, len)};
}

/* The place of a chunk in its set, or NULL. */
static struct kvs_file_known *find(struct kvs_file_known *table, const XXH128_hash_t *key)
{
    struct kvs_file_known *set = table + key->low64 % SETS * WAYS;

    for (int i = 0; i < WAYS; i++) {
        if (set[i].seen.ino && XXH128_isEqual(set[i].key, *key))
            return &set[i];
    }
    return NULL;
}

/* A free one, else any. */
static struct kvs_file_known *make_place(struct kvs_file_known *table, const XXH128_hash_t *key)
{
    struct kvs_file_known *set = table + key->low64 % SETS * WAYS;

    for (int i = 0; i < WAYS; i++) {
        if (!set[i].seen.ino)
            return &set[i];
    }
    return &set[key->high64 % WAYS];
}

bool kvs_file_unchanged(const struct kvs_file_seen *a, const struct kvs_file_seen *b)
{
    return a->ino == b->ino && a->size == b->size && a->mtime.tv_sec == b->mtime.tv_sec &&
           a->mtime.tv_nsec == b->mtime.tv_nsec;
}

bool kvs_file_known(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                    const struct kvs_file_seen *now)
{
    XXH128_hash_t hash = XXH3_128bits(key, key_len);
    struct kvs_file_seen then = {0};
    struct kvs_file_known *place;

    pthread_mutex_lock(&h->lock);
    place = h->known ? find(h->known, &hash) : NULL;
    if (place)
        then = place->seen;
    pthread_mutex_unlock(&h->lock);
    return place && kvs_file_unchanged(&then, now) && then.len == now->len &&
           then.taste == now->taste;
}

void kvs_file_remember(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                       const struct kvs_file_seen *seen)
{
    XXH128_hash_t hash = XXH3_128bits(key, key_len);

    struct kvs_file_known *place;

    if (!h->known)
        h->known = calloc((size_t)SETS * WAYS, sizeof(*h->known));
    if (!h->known)
        return;
    place = find(h->known, &hash);
    if (!place)
        place = make_place(h->known, &hash);
    *place = (struct kvs_file_known){hash, *seen};
}
