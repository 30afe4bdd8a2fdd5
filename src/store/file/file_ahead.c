// SPDX-License-Identifier: Apache-2.0
/**
 * Reading ahead. Announcing a file to the kernel takes an open, a call and a close. That costs a
 * quarter of a read from page cache and gains much only when the file must come from a disk. So a
 * prefetch announces the first few files and notes the other keys. While reads are slow, gets
 * announce the noted keys as they come near:
 *
 *     keys of a prefetch:   0 1 2 3 4 5 6 7 8 9       gets come from the left, mostly
 *                           - - - a a a a . . .       - passed   a announced, AHEAD at most   .
 *                             noted
 *
 * STREAMS prefetches are noted at a time, one for each restore under way; a new one replaces the
 * one used longest ago. A get whose key isn't among the next NEAR keys announces nothing.
 */
#include <fcntl.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "store/file/file_impl.h"

enum { STREAMS = 8, KEYS = 4096, AHEAD = 32, NEAR = 64 /* how far a get looks for its key */ };

/* A read that takes longer is slow: page cache gives a byte in a tenth of a nanosecond, disks need
 * this long to begin. */
#define SLOW_NS (100 * UINT64_C(1000))

struct stream {
    uint8_t *keys; /* NULL: this stream is free */
    size_t key_len, n, first, announced;
    uint64_t used; /* value of the use counter at the last use */
};

struct kvs_file_ahead {
    struct stream streams[STREAMS];
    uint64_t uses;
};

static void announce(kv_store_v1 *h, const uint8_t *key, size_t len)
{
    char hex[KVS_FILE_HEX];
    int fd;

    kvs_file_hex(hex, key, len);
    fd = openat(h->fan[kvs_file_fan(key)], hex, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return;
    posix_fadvise(fd, 0, 0, POSIX_FADV_WILLNEED);
    close(fd);
}

/* Announce up to AHEAD of the next chunks of stream @i that were not announced yet. */
static void announce_some(kv_store_v1 *h, int i)
{
    uint8_t keys[AHEAD][KVS_FILE_KEY_MAX];
    size_t n = 0, len = 0;

    pthread_mutex_lock(&h->lock);
    if (h->ahead && h->ahead->streams[i].keys) {
        struct stream *s = &h->ahead->streams[i];
        size_t to = KV_MIN(s->first + AHEAD, s->n);

        len = s->key_len;
        for (s->announced = KV_MAX(s->announced, s->first); s->announced < to; s->announced++)
            memcpy(keys[n++], s->keys + s->announced * len, len);
    }
    pthread_mutex_unlock(&h->lock);
    for (size_t k = 0; k < n; k++)
        announce(h, keys[k], len);
}

static int oldest(const struct kvs_file_ahead *a)
{
    int found = 0;

    for (int i = 1; i < STREAMS; i++) {
        if (a->streams[found].keys &&
            (!a->streams[i].keys || a->streams[i].used < a->streams[found].used))
            found = i;
    }
    return found;
}

/* Note the keys of a prefetch. Returns the stream, or -ENOMEM. */
static int note(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n)
{
    struct stream s = {.key_len = key_len, .n = KV_MIN(n, (size_t)KEYS)};
    int i = -ENOMEM;

    s.keys = malloc(s.n * key_len);
    if (!s.keys)
        return -ENOMEM;
    memcpy(s.keys, keys, s.n * key_len);
    pthread_mutex_lock(&h->lock);
    if (!h->ahead)
        h->ahead = calloc(1, sizeof(*h->ahead));
    if (h->ahead) {
        i = oldest(h->ahead);
        free(h->ahead->streams[i].keys);
        s.used = ++h->ahead->uses;
        h->ahead->streams[i] = s;
        s.keys = NULL;
    }
    pthread_mutex_unlock(&h->lock);
    free(s.keys);
    return i;
}

int kvs_file_prefetch(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n)
{
    int rc = n ? kvs_file_check(h, keys, key_len) : 0;

    if (rc == 0 && n)
        rc = note(h, keys, key_len, n);
    if (rc < 0 || n == 0)
        return rc;
    announce_some(h, rc);
    kvs_file_reader_begin(h, keys, key_len, n);
    return 0;
}

/* True when @key is among the next NEAR keys of the stream, which then moves behind it. */
static bool passes(struct stream *s, const uint8_t *key, size_t key_len)
{
    if (!s->keys || s->key_len != key_len)
        return false;
    for (size_t i = s->first; i < s->n && i < s->first + NEAR; i++) {
        if (memcmp(s->keys + i * key_len, key, key_len) != 0)
            continue;
        s->first = i + 1;
        if (s->first == s->n) {
            free(s->keys);
            s->keys = NULL;
        }
        return true;
    }
    return false;
}

void kvs_file_ahead_begin(kv_store_v1 *h, struct kvs_file_ahead_get *ret, const uint8_t *key,
                          size_t key_len)
{
    *ret = (struct kvs_file_ahead_get){0};
    pthread_mutex_lock(&h->lock);
    for (int i = 0; h->ahead && i < STREAMS && !ret->begin_ns; i++) {
        if (passes(&h->ahead->streams[i], key, key_len)) {
            h->ahead->streams[i].used = ++h->ahead->uses;
            ret->begin_ns = kv_now_ns();
            ret->stream = i;
        }
    }
    pthread_mutex_unlock(&h->lock);
}

void kvs_file_ahead_end(kv_store_v1 *h, const struct kvs_file_ahead_get *get, size_t len)
{
    if (get->begin_ns && kv_now_ns() - get->begin_ns > SLOW_NS + len)
        announce_some(h, get->stream);
}

void kvs_file_ahead_free(struct kvs_file_ahead *a)
{
    for (int i = 0; a && i < STREAMS; i++)
        free(a->streams[i].keys);
    free(a);
}
