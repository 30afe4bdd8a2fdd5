// SPDX-License-Identifier: Apache-2.0
/**
 * A second reader: a thread of the handle that reads and verifies chunks of the latest prefetch
 * while the caller's gets do the same. Used on machines with more than one processor.
 *
 *     keys of the prefetch:   0 1 2 3 4 5 6 7 8 9       . not yet read
 *                             - - g . . . r r w .       - got   g being got   r read   w being read
 *
 * The reader keeps LEAD keys ahead of the gets. A get takes a chunk that the reader has read, and
 * reads any other itself. Neither waits for the other: a get of the chunk that the reader is
 * reading reads it, too, and the reader then moves ahead again. Chunks that the reader can't read
 * or verify are left to the gets, which set bad files aside.
 *
 * The reader's heap keeps the room of what was read ahead, 16 MiB and two chunks at most, until the
 * store is closed: the next restore finds its pages there.
 *
 * All state is under reader_lock, which is never held during I/O.
 */
#include <sched.h>

#include "base/thread/thread.h"
#include "store/file/file_impl.h"

enum {
    LEAD = 8,
    READY = 32,
    KEYS = 4096,
    MIN_KEYS = 3 * LEAD, /* fewer keys are read before a thread has started */
    NEAR = 64            /* number of next keys among which a get looks for its own */
};
#define ROOM_MAX ((size_t)4 << 20)   /* the heap of a thread has 64 MiB */
#define MAX_BYTES ((size_t)16 << 20) /* bytes read and not yet taken, without the last chunk */

struct ready {
    size_t index; /* index of the key */
    uint8_t *data;
    size_t len;
    struct stat st;
};

struct kvs_file_reader {
    kv_store_v1 *h;
    pthread_t thread;
    pthread_cond_t work;
    bool stop, idle;
    uint64_t serial; /* number of the prefetch: chunks of an earlier one are dropped */
    uint8_t *keys;
    size_t key_len, n, first, next, bytes;
    size_t roomy; /* chunk length for which the allocator has room */
    void *guard;
    struct ready ready[READY]; /* at index % READY; data NULL: empty */
};

static void drop(struct kvs_file_reader *r, struct ready *ready)
{
    if (ready->data)
        r->bytes -= ready->len;
    free(ready->data);
    ready->data = NULL;
}

static void drop_all(struct kvs_file_reader *r)
{
    for (size_t i = 0; i < READY; i++)
        drop(r, &r->ready[i]);
    free(r->keys);
    r->keys = NULL;
    r->n = r->first = r->next = 0;
    r->serial++;
}

/* Choose the next key to read into @next. Returns false when there is none. */
static bool pick(struct kvs_file_reader *r)
{
    if (r->next <= r->first)
        r->next = r->first + LEAD;
    return r->next < r->n && r->next < r->first + READY && r->bytes < MAX_BYTES;
}

static int read_one(kv_store_v1 *h, const uint8_t *key, size_t key_len, struct ready *ret)
{
    char hex[KVS_FILE_HEX], side_car[KVS_FILE_HEX + 8];

    kvs_file_hex(hex, key, key_len);
    kvs_file_chunk_side_car(side_car, hex);
    return kvs_file_read(h, h->fan[kvs_file_fan(key)], hex, side_car,
                         kvs_file_owner(key, key_len, false), &ret->data, &ret->len, &ret->st);
}

/* Make room in this thread's heap for all chunks that are read ahead, below a guard block. Without
 * it glibc returns the pages to the kernel whenever the heap's last chunk is freed. The kernel then
 * clears them anew, which costs as much as reading them. */
static void make_room(struct kvs_file_reader *r, size_t len)
{
    size_t n = len ? KV_MIN((size_t)READY, MAX_BYTES / len + 2) : 0;
    void *volatile pages; /* gcc would leave both calls out */
    void *pieces[READY];
    void *guard;

    if (len <= r->roomy || len > ROOM_MAX)
        return;
    pages =
        malloc(len); /* glibc gives long values pages of their own until one of them was freed */
    free(pages);
    for (size_t i = 0; i < n; i++)
        pieces[i] = malloc(len);
    guard = malloc(1);
    for (size_t i = 0; i < n; i++)
        free(pieces[i]);
    free(r->guard);
    r->guard = guard;
    r->roomy = len;
}

/* Read the next chunk. Called and left with the lock held; releases it during I/O. */
static void read_next(struct kvs_file_reader *r)
{
    struct ready one = {.index = r->next++};
    uint8_t key[KVS_FILE_KEY_MAX];
    size_t key_len = r->key_len;
    uint64_t serial = r->serial;

    memcpy(key, r->keys + one.index * key_len, key_len);
    pthread_mutex_unlock(&r->h->reader_lock);
    if (read_one(r->h, key, key_len, &one) < 0)
        one.data = NULL;
    else
        make_room(r, one.len);
    pthread_mutex_lock(&r->h->reader_lock);
    if (!one.data || serial != r->serial || one.index < r->first) {
        free(one.data);
        return;
    }
    drop(r, &r->ready[one.index % READY]);
    r->ready[one.index % READY] = one;
    r->bytes += one.len;
}

static void *run(void *arg)
{
    struct kvs_file_reader *r = arg;

    pthread_mutex_lock(&r->h->reader_lock);
    while (!r->stop) {
        if (pick(r)) {
            read_next(r);
            continue;
        }
        r->idle = true;
        pthread_cond_wait(&r->work, &r->h->reader_lock);
        r->idle = false;
    }
    pthread_mutex_unlock(&r->h->reader_lock);
    return NULL;
}

static bool one_processor(void)
{
    cpu_set_t set;

    return sched_getaffinity(0, sizeof(set), &set) == 0 && CPU_COUNT(&set) == 1;
}

/* Start the reader. Returns NULL when there should be none. */
static struct kvs_file_reader *start(kv_store_v1 *h)
{
    struct kvs_file_reader *r = one_processor() ? NULL : calloc(1, sizeof(*r));

    if (!r)
        return NULL;
    r->h = h;
    pthread_cond_init(&r->work, NULL);
    if (kv_thread_start(&r->thread, "kvs-read", run, r) < 0) {
        pthread_cond_destroy(&r->work);
        free(r);
        return NULL;
    }
    return r;
}

void kvs_file_reader_begin(kv_store_v1 *h, const uint8_t *keys, size_t key_len, size_t n)
{
    struct kvs_file_reader *r;

    n = KV_MIN(n, (size_t)KEYS);
    if (n < MIN_KEYS)
        return;
    pthread_mutex_lock(&h->reader_lock);
    if (!h->reader)
        h->reader = start(h);
    r = h->reader;
    if (r) {
        drop_all(r);
        r->keys = malloc(n * key_len);
        if (r->keys) {
            memcpy(r->keys, keys, n * key_len);
            r->key_len = key_len;
            r->n = n;
        }
        pthread_cond_signal(&r->work);
    }
    pthread_mutex_unlock(&h->reader_lock);
}

/* Find @key among the next keys. Returns its index or -1. */
static ssize_t find(const struct kvs_file_reader *r, const uint8_t *key, size_t key_len)
{
    if (!r || r->key_len != key_len)
        return -1;
    for (size_t i = r->first; i < r->n && i < r->first + NEAR; i++) {
        if (memcmp(r->keys + i * key_len, key, key_len) == 0)
            return (ssize_t)i;
    }
    return -1;
}

bool kvs_file_reader_take(kv_store_v1 *h, const uint8_t *key, size_t key_len, uint8_t **ret,
                          size_t *ret_len, struct stat *ret_st)
{
    struct kvs_file_reader *r;
    bool found = false;
    ssize_t at;

    pthread_mutex_lock(&h->reader_lock);
    r = h->reader;
    at = find(r, key, key_len);
    if (at >= 0) {
        struct ready *ready = &r->ready[(size_t)at % READY];

        for (; r->first < (size_t)at; r->first++) /* keys that the gets passed over */
            drop(r, &r->ready[r->first % READY]);
        r->first++;
        found = ready->data && ready->index == (size_t)at;
        if (found) {
            *ret = ready->data;
            *ret_len = ready->len;
            *ret_st = ready->st;
            r->bytes -= ready->len;
            ready->data = NULL;
        }
        if (r->idle && pick(r))
            pthread_cond_signal(&r->work);
    }
    pthread_mutex_unlock(&h->reader_lock);
    return found;
}

void kvs_file_reader_forget(kv_store_v1 *h)
{
    pthread_mutex_lock(&h->reader_lock);
    if (h->reader)
        drop_all(h->reader);
    pthread_mutex_unlock(&h->reader_lock);
}

void kvs_file_reader_stop(kv_store_v1 *h)
{
    struct kvs_file_reader *r = h->reader;

    if (!r)
        return;
    pthread_mutex_lock(&h->reader_lock);
    r->stop = true;
    pthread_cond_signal(&r->work);
    pthread_mutex_unlock(&h->reader_lock);
    pthread_join(r->thread, NULL);
    drop_all(r);
    pthread_cond_destroy(&r->work);
    free(r->guard);
    free(r);
    h->reader = NULL;
}
