// SPDX-License-Identifier: Apache-2.0
/* The file store behind a bad connection; see shaky.h. */
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kv_store_abi.h"
#include "kv_store_ext.h"
#include "store/backend/file.h"
#include "tier/shaky.h"

__attribute__((visibility("default"))) struct shaky shaky;

static bool may_pass(void)
{
    int left = shaky.pass;

    while (left > 0 && !atomic_compare_exchange_weak(&shaky.pass, &left, left - 1))
        ;
    return left > 0;
}

static int begin(_Atomic int *calls, const _Atomic bool *more)
{
    atomic_fetch_add(calls, 1);
    atomic_fetch_add(&shaky.inside, 1);
    if (shaky.delay_us)
        usleep((unsigned)shaky.delay_us);
    while ((shaky.hang || (more && *more)) && !may_pass())
        usleep(1000);
    return shaky.fail_rc;
}

static int answer(int rc)
{
    while (shaky.hang_answers)
        usleep(1000);
    return rc;
}

static int end(int rc)
{
    atomic_fetch_sub(&shaky.inside, 1);
    return rc;
}

static kv_store_v1 *open_shaky(const char *uri)
{
    atomic_fetch_add(&shaky.opens, 1);
    while (shaky.hang_open)
        usleep(1000);
    return shaky.refuse_open ? NULL : kvs_file_vtable()->open(uri + strlen("shaky://"));
}

static void close_shaky(kv_store_v1 *self)
{
    while (shaky.hang_close)
        usleep(1000);
    kvs_file_vtable()->close(self);
    atomic_fetch_add(&shaky.closes, 1);
}

/* Answers every chunk of the same length with the first one that was got. Any thread. */
static void swap_for_first(uint8_t *data, size_t len)
{
    static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    static uint8_t first[1 << 20];
    static size_t first_len;

    pthread_mutex_lock(&mutex);
    if (first_len == len)
        memcpy(data, first, len);
    if (!first_len && len <= sizeof(first)) {
        memcpy(first, data, len);
        first_len = len;
    }
    pthread_mutex_unlock(&mutex);
}

static void lie(uint8_t *data, size_t *len)
{
    int how = shaky.lie; /* the test changes it at any time */

    if (how == 1 && *len)
        data[*len / 2] ^= 4;
    if (how == 2 && *len)
        --*len;
    if (how == 3)
        swap_for_first(data, *len);
}

static int get_one(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                   size_t *len)
{
    int rc = begin(&shaky.gets, NULL);

    if (rc == 0)
        rc = kvs_file_vtable()->get_chunk(self, hash, hash_len, ret, len);
    if (rc == 0)
        lie(*ret, len);
    return end(answer(rc));
}

static int get_many(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                    uint8_t **ret, size_t *len)
{
    int rc;

    shaky.last_get = (int)n;
    rc = begin(&shaky.get_batches, NULL);

    if (rc == 0)
        rc = kvs_file_ext()->get_chunks(self, hashes, hash_len, n, ret, len);
    for (size_t i = 0; i < n && rc > 0; i++)
        if (ret[i])
            lie(ret[i], &len[i]);
    return end(answer(rc));
}

struct stream {
    kv_store_piece_fn each;
    void *arg;
    int n;
};

static int on_piece(void *arg, uint64_t offset, const uint8_t *piece, size_t len)
{
    struct stream *s = arg;
    uint8_t *copy = malloc(len ? len : 1);
    int rc;

    s->n++;
    while (shaky.hang_at == s->n)
        usleep(1000);
    memcpy(copy, piece, len);
    lie(copy, &len);
    rc = s->each(s->arg, offset, copy, len);
    free(copy);
    return rc;
}

static int stream(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t *buf,
                  size_t room, kv_store_piece_fn each, void *arg)
{
    struct stream s = {.each = each, .arg = arg};
    int rc = begin(&shaky.streams, NULL);

    if (rc == 0) /* in small pieces */
        rc = kvs_file_ext()->stream_chunk(self, hash, hash_len, buf, room < 1000 ? room : 1000,
                                          on_piece, &s);
    return end(answer(rc));
}

static int put_one(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                   size_t len)
{
    int rc = begin(&shaky.puts, &shaky.hang_puts);

    rc = rc ? rc : shaky.fail_puts_rc;
    return end(rc ? rc : kvs_file_vtable()->put_chunk(self, hash, hash_len, data, len));
}

static int put_many(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                    const uint8_t *const *data, const size_t *len, int *ret_each)
{
    int rc = begin(&shaky.put_batches, &shaky.hang_puts);

    rc = rc ? rc : shaky.fail_puts_rc;
    if (rc == 0 && n > 0 && shaky.fail_last_rc < 0 && ret_each) {
        ret_each[--n] = shaky.fail_last_rc;
        rc = kvs_file_ext()->put_chunks(self, hashes, hash_len, n, data, len, ret_each);
        return end(rc ? rc : shaky.fail_last_rc);
    }
    return end(rc ? rc
                  : kvs_file_ext()->put_chunks(self, hashes, hash_len, n, data, len, ret_each));
}

static int exists(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n, uint8_t *ret)
{
    int rc = begin(&shaky.exists, &shaky.hang_exists);

    if (rc == 0 && shaky.fail_exists_n > 0 && atomic_fetch_sub(&shaky.fail_exists_n, 1) > 0)
        rc = shaky.fail_exists_rc;
    return end(answer(rc ? rc : kvs_file_ext()->exists_chunks(self, hashes, hash_len, n, ret)));
}

static int prefetch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    int rc = begin(&shaky.prefetches, NULL);

    return end(rc ? rc : kvs_file_vtable()->prefetch_chunks(self, hashes, hash_len, n));
}

static int publish(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    int number = shaky.publications + 1;
    int rc = begin(&shaky.publications,
                   shaky.hang_publications ? &shaky.hang_publications : &shaky.hang_puts);

    while (shaky.hang_publication == number)
        usleep(1000);
    if (rc == 0 && shaky.fail_publications > 0 && atomic_fetch_sub(&shaky.fail_publications, 1) > 0)
        rc = shaky.fail_publications_rc ? shaky.fail_publications_rc : -EIO;
    return end(rc ? rc : kvs_file_vtable()->put_manifest(self, name, data, len));
}

static int delete_one(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    int rc = begin(&shaky.deletes, &shaky.hang_deletes);

    return end(rc ? rc : kvs_file_ext()->delete_chunk(self, hash, hash_len));
}

static int delete_if(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                     size_t len)
{
    int rc = begin(&shaky.deletes, &shaky.hang_deletes);

    return end(rc ? rc : kvs_file_ext()->delete_chunk_if(self, hash, hash_len, data, len));
}

static int touch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    int rc = begin(&shaky.touches, NULL);

    return end(rc ? rc : kvs_file_ext()->touch_chunks(self, hashes, hash_len, n));
}

static int get_ranges(kv_store_v1 *self, kv_store_range *ranges, size_t n)
{
    int found = shaky.fail_rc ? shaky.fail_rc : kvs_file_ext()->get_ranges(self, ranges, n);

    for (size_t i = 0; i < n && found >= 0; i++)
        if (shaky.bad_ranges && ranges[i].hash_len > 9 &&
            (ranges[i].hash[8] | ranges[i].hash[9] << 8) + 1 == shaky.bad_ranges) {
            found -= ranges[i].rc == 0;
            ranges[i].rc = -EIO;
        }
    return found;
}

const kv_store_vtable *kv_store_get_vtable(void)
{
    static kv_store_vtable table;

    table = *kvs_file_vtable();
    table.version = shaky.ext == 3 ? 1 : 2;
    table.open = open_shaky;
    table.close = close_shaky;
    table.get_chunk = get_one;
    table.put_chunk = put_one;
    table.put_manifest = publish;
    table.prefetch_chunks = shaky.ext == 3 ? NULL : prefetch;
    return &table;
}

const kv_store_ext *kv_store_get_ext(void)
{
    static kv_store_ext table;

    if (shaky.ext == 1 || shaky.ext == 3)
        return NULL;
    table = *kvs_file_ext();
    table.get_chunks = shaky.ext == 2 ? NULL : get_many;
    table.put_chunks = shaky.ext == 2 ? NULL : put_many;
    table.exists_chunks = shaky.ext == 2 ? NULL : exists;
    table.delete_chunk = delete_one;
    table.delete_chunk_if = shaky.ext == 2 ? NULL : delete_if;
    table.touch_chunks = touch;
    table.get_ranges = get_ranges;
    table.stream_chunk = shaky.ext == 4 ? stream : NULL;
    return &table;
}
