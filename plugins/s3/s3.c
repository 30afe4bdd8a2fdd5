// SPDX-License-Identifier: Apache-2.0
/* The plugin's tables. Before a chunk is sent the server is asked for it (HEAD), many at once where
 * a call names many. Missing ones are uploaded in the background with If-None-Match, and
 * put_manifest waits for the uploads. Existing chunks older than RENEW_S are copied to themselves:
 * a sweep decides by age, and must keep chunks that a running save has hit. */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/file/own_manifest.h"
#include "s3/list.h"
#include "s3/range.h"
#include "s3/store.h"

#define RENEW_S (6 * 3600)
#define BATCH 256u /* requests handed to the client at once */

/* -- Life ------------------------------------------------------------------------------------ */

static void s3_close(kv_store_v1 *self)
{
    if (!self)
        return;
    if (s3_in_child(self)) { /* leave the rest: there is no thread to stop, and locks may be held */
        s3_config_fini(&self->config);
        free(self);
        return;
    }
    if (self->pending)
        s3_pending_flush(self->pending, false);
    s3_client_destroy(self->client);
    s3_pending_destroy(self->pending);
    s3_seen_destroy(self->seen);
    s3_refs_destroy(self->refs);
    s3_config_fini(&self->config);
    free(self);
}

static int on_probe(void *arg, const struct s3_listed *object)
{
    (void)arg;
    (void)object;
    return 1; /* stop after the first page */
}

static kv_store_v1 *s3_open(const char *uri)
{
    kv_store_v1 *self = calloc(1, sizeof(*self));
    struct kv_error why = {0};
    char text[256];
    int error;

    if (!self)
        return NULL;
    self->pid = getpid();
    error = s3_config_read(uri, &self->config, &why);
    if (error) {
        kv_log_error("s3", "the store can't be opened", "why=%s",
                     kv_log_quote(text, sizeof(text), why.text));
        free(self);
        errno = -error;
        return NULL;
    }
    self->seen = s3_seen_create();
    error = self->seen ? s3_client_create(&self->config, &self->client) : -ENOMEM;
    if (!error)
        error = s3_pending_create(self->client, &self->config, self->seen, &self->pending);
    if (!error) {
        self->refs = s3_refs_create(self->client, &self->config);
        error = self->refs ? 0 : -ENOMEM;
    }
    /* report wrong keys, bucket, region, endpoint or clock now, not in the first save */
    if (!error)
        error = s3_list(self->client, &self->config, "", 1, on_probe, NULL);
    if (error < 0) {
        kv_log_error("s3", "the bucket can't be listed", "endpoint=%s bucket=%s region=%s error=%d",
                     self->config.endpoint, self->config.bucket, self->config.region, -error);
        s3_close(self);
        errno = -error;
        return NULL;
    }
    return self;
}

/* -- Which chunks exist ------------------------------------------------------------------------ */

/* Results of a look for a chunk; negative: unknown. */
enum { MISSING, PRESENT, DAMAGED = KV_STORE_PRESENT_BAD };

/* Judge the answer to a HEAD that was sent at the moment @asked. */
static int judge_head(kv_store_v1 *self, struct s3_request *head, const uint8_t *hash,
                      size_t hash_len, bool renew, uint64_t asked)
{
    /* the clock that set the age */
    int64_t now_s = head->server_s ? head->server_s : s3_client_now_s(self->client);
    int error = head->error;

    if (!error && !s3_is_whole(head)) {
        s3_seen_bad(self->seen, hash, hash_len);
        return DAMAGED;
    }
    if (!error && renew && head->modified_s && now_s - head->modified_s > RENEW_S) {
        error = s3_renew(self->client, &self->config, s3_chunk_path(&self->config, hash, hash_len),
                         head->got_sum);
        /* the server has no copies: send the chunk again, which renews it as well */
        if (error == -ENOTSUP) {
            s3_seen_bad(self->seen, hash, hash_len);
            return MISSING;
        }
    }
    /* A "seen" chunk's next put skips the HEAD, and so the renewal. Note only chunks too young to
     * need one. */
    if (error)
        s3_seen_forget(self->seen, hash, hash_len, false);
    else if (renew || (head->modified_s && now_s - head->modified_s <= RENEW_S))
        s3_seen_found(self->seen, hash, hash_len, asked);
    return error == -ENOENT ? MISSING : error ? error : PRESENT;
}

/* Look for at most BATCH chunks at once. */
static int find_batch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      bool renew, int *ret)
{
    struct s3_request *heads = calloc(n, sizeof(*heads));
    uint64_t asked = s3_seen_moment(self->seen);
    int error = 0;

    if (!heads)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++) {
        const uint8_t *hash = hashes + i * hash_len;
        enum s3_known known = s3_seen_find(self->seen, hash, hash_len);

        ret[i] = known == S3_SEEN || s3_pending_has(self->pending, hash, hash_len) ? PRESENT
                 : known == S3_BAD                                                 ? DAMAGED
                                                                                   : MISSING;
        if (ret[i] != MISSING)
            continue;
        heads[i].method = "HEAD";
        heads[i].path = s3_chunk_path(&self->config, hash, hash_len);
        if (heads[i].path)
            s3_submit(self->client, &heads[i]);
        else
            ret[i] = error = -ENOMEM;
    }
    for (size_t i = 0; i < n; i++)
        if (heads[i].path)
            s3_wait(self->client, &heads[i]);
    for (size_t i = 0; i < n; i++) {
        if (heads[i].path)
            ret[i] = judge_head(self, &heads[i], hashes + i * hash_len, hash_len, renew, asked);
        if (ret[i] < 0)
            error = ret[i];
        s3_request_fini(&heads[i]);
    }
    free(heads);
    return error;
}

static int s3_exists_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                            uint8_t *ret_present)
{
    int found[BATCH], error = 0;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (n && (s3_bad_hash(hashes, hash_len) || !ret_present))
        return -EINVAL;
    for (size_t at = 0; at < n && !error; at += BATCH) {
        size_t some = KV_MIN(BATCH, n - at);

        error = find_batch(self, hashes + at * hash_len, hash_len, some, false, found);
        for (size_t i = 0; i < some && !error; i++)
            ret_present[at + i] = (uint8_t)found[i];
    }
    return s3_failed(self, error);
}

static int s3_touch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    int found[BATCH], error = 0, there = 0;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (n && s3_bad_hash(hashes, hash_len))
        return -EINVAL;
    for (size_t i = 0; i < n; i++) /* ask for "seen" chunks too, since their age is needed */
        s3_seen_forget(self->seen, hashes + i * hash_len, hash_len, true);
    for (size_t at = 0; at < n && !error; at += BATCH) {
        size_t some = KV_MIN(BATCH, n - at);

        error = find_batch(self, hashes + at * hash_len, hash_len, some, true, found);
        for (size_t i = 0; i < some && !error; i++)
            there += found[i] == PRESENT;
    }
    return error ? s3_failed(self, error) : there;
}

/* -- Chunks ---------------------------------------------------------------------------------- */

static int send_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                      size_t len)
{
    uint64_t asked = s3_seen_moment(self->seen);
    bool replace = s3_seen_find(self->seen, hash, hash_len) == S3_BAD;
    int ret;

    if (len <= S3_BUFFERED)
        return s3_pending_put(self->pending, hash, hash_len, data, len, replace);
    ret = s3_put(self->client, &self->config, s3_chunk_path(&self->config, hash, hash_len), data,
                 len, !replace);
    if (ret == 0 || ret == -EEXIST)
        s3_seen_found(self->seen, hash, hash_len, asked);
    return ret == -EEXIST ? 1 : ret;
}

/* True when send_chunk sent an earlier copy of chunk @i of a batch. Don't ask the cache instead: an
 * older answer to another thread may have noted there a chunk that find_batch has just missed. */
static bool was_sent(const uint8_t *hashes, size_t hash_len, size_t i, const bool *sent)
{
    for (size_t j = 0; j < i; j++)
        if (sent[j] && memcmp(hashes + j * hash_len, hashes + i * hash_len, hash_len) == 0)
            return true;
    return false;
}

/* Send a chunk of a batch. *@refused: error of an earlier one for which there was no room; the rest
 * would each wait as long for it. */
static int send_of_batch(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                         const uint8_t *data, size_t len, int *refused)
{
    int ret = *refused;

    if (ret && len <= S3_BUFFERED)
        return ret;
    ret = send_chunk(self, hash, hash_len, data, len);
    if (ret < 0 && len <= S3_BUFFERED)
        *refused = ret;
    return ret;
}

static int put_batch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                     const uint8_t *const *data, const size_t *data_len, int *ret_each)
{
    int found[BATCH] = {0}, refused = 0, error;
    bool sent[BATCH] = {false};

    error = find_batch(self, hashes, hash_len, n, true, found);
    for (size_t i = 0; i < n; i++) {
        if (found[i] == MISSING || found[i] == DAMAGED) {
            found[i] = was_sent(hashes, hash_len, i, sent)
                           ? 1
                           : send_of_batch(self, hashes + i * hash_len, hash_len, data[i],
                                           data_len[i], &refused);
            sent[i] = found[i] >= 0;
        }
        if (found[i] == 0)
            s3_count(self, WRITTEN, data_len[i]);
        if (found[i] >= 0) {
            s3_count(self, found[i] ? PUT_HITS : PUTS, 1);
            s3_refs_add(self->refs, hashes + i * hash_len, hash_len);
        } else
            error = s3_failed(self, found[i]);
        if (ret_each)
            ret_each[i] = found[i];
    }
    return error;
}

static int s3_put_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                         const uint8_t *const *data, const size_t *data_len, int *ret_each)
{
    int error = 0;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (n && (s3_bad_hash(hashes, hash_len) || !data || !data_len))
        return -EINVAL;
    for (size_t i = 0; i < n; i++)
        if ((!data[i] && data_len[i]) || data_len[i] > S3_MAX_BODY)
            return -EINVAL;
    for (size_t at = 0; at < n; at += BATCH) {
        int one = put_batch(self, hashes + at * hash_len, hash_len, KV_MIN(BATCH, n - at),
                            data + at, data_len + at, ret_each ? ret_each + at : NULL);

        error = error ? error : one;
    }
    return error;
}

static int s3_put_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                        const uint8_t *data, size_t data_len)
{
    int each = -EINVAL;
    int error = s3_put_chunks(self, hash, hash_len, 1, &data, &data_len, &each);

    return error ? error : each;
}

static int s3_get_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
                        size_t *out_len)
{
    int error;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (s3_bad_hash(hash, hash_len) || !out_data || !out_len)
        return -EINVAL;
    s3_count(self, GETS, 1);
    error = s3_pending_take(self->pending, hash, hash_len, out_data, out_len);
    if (error == -ENOENT)
        error =
            s3_get(self->client, s3_chunk_path(&self->config, hash, hash_len), out_data, out_len);
    if (!error)
        s3_count(self, READ, *out_len);
    if (error == -ENOENT)
        s3_count(self, MISSES, 1);
    if (error == -EBADMSG) { /* the next put of it on this handle replaces it */
        s3_count(self, BAD, 1);
        s3_seen_bad(self->seen, hash, hash_len);
    } else if (error == -ENOENT) {
        s3_seen_forget(self->seen, hash, hash_len, false);
    }
    return s3_failed(self, error);
}

static int s3_prefetch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (n == 0)
        return 0;
    if (s3_bad_hash(hashes, hash_len))
        return -EINVAL;
    s3_pending_fetch(self->pending, hashes, hash_len, n);
    return 0;
}

static int s3_get_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                         uint8_t **out_data, size_t *out_len)
{
    int found = 0, error = 0;
    size_t ahead = 0;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (n && (s3_bad_hash(hashes, hash_len) || !out_data || !out_len || n > INT32_MAX))
        return -EINVAL;
    for (size_t i = 0; i < n; i++) {
        /* prefetch half of the room at a time, so that fetching continues during the gets */
        if (i == ahead) {
            ahead = KV_MIN(n, i + BATCH / 4);
            s3_pending_fetch(self->pending, hashes + i * hash_len, hash_len,
                             KV_MIN(BATCH / 2, n - i));
        }
        out_data[i] = NULL;
        out_len[i] = 0;
        error = s3_get_chunk(self, hashes + i * hash_len, hash_len, &out_data[i], &out_len[i]);
        if (error == -EBADMSG)
            out_len[i] = KV_STORE_LEN_BAD;
        if (error && error != -ENOENT && error != -EBADMSG) {
            for (size_t j = 0; j < i; j++) {
                free(out_data[j]);
                out_data[j] = NULL;
            }
            return error;
        }
        found += !error;
    }
    return found;
}

/* After a deletion that may have happened, the next put asks the server for the chunk. A bad value
 * stays noted: where it wasn't deleted, that put must replace it. */
static int forget_seen(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, int rc)
{
    s3_pending_settle(self->pending, hash, hash_len);
    s3_seen_forget(self->seen, hash, hash_len, true);
    return rc;
}

int s3_delete_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    int rc;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (s3_bad_hash(hash, hash_len))
        return -EINVAL;
    s3_pending_drop(self->pending, hash, hash_len);
    rc = s3_delete(self->client, s3_chunk_path(&self->config, hash, hash_len));
    return s3_failed(self, forget_seen(self, hash, hash_len, rc));
}

static int s3_delete_chunk_if(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                              const uint8_t *data, size_t len)
{
    uint8_t *fetched;
    size_t fetched_len;
    int rc;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (s3_bad_hash(hash, hash_len))
        return -EINVAL;
    if (s3_pending_has(self->pending, hash, hash_len))
        return 0;
    if (s3_pending_take(self->pending, hash, hash_len, &fetched, &fetched_len) == 0)
        free(fetched); /* fetched before it went */
    rc = s3_delete_if(self->client, s3_chunk_path(&self->config, hash, hash_len), data, len);
    forget_seen(self, hash, hash_len, rc);
    return rc == -ENOTSUP ? rc : s3_failed(self, rc);
}

/* -- Manifests ------------------------------------------------------------------------------- */

static int s3_flush(kv_store_v1 *self)
{
    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    return s3_failed(self, s3_pending_flush(self->pending, true));
}

/* Store chunks and notes first, all at once; then the manifest. */
static int s3_put_manifest(kv_store_v1 *self, const char *name, const uint8_t *data,
                           size_t data_len)
{
    struct s3_noting noting;
    bool opaque;
    int error;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (s3_bad_name(name) || (!data && data_len))
        return -EINVAL;
    opaque = !kv_is_own_manifest(data, data_len);
    s3_refs_begin(self->refs, name, opaque, data_len == 0, &noting);
    error = s3_pending_flush(self->pending, true);
    if (error)
        kv_log_error("s3", "chunks are missing: the manifest is not published", "error=%d", -error);
    else
        error = s3_refs_wait(self->refs, &noting);
    if (!error)
        error = s3_put(self->client, &self->config, s3_manifest_path(&self->config, name), data,
                       data_len, false);
    s3_refs_end(self->refs, &noting, !error);
    return s3_failed(self, error);
}

static int s3_get_manifest(kv_store_v1 *self, const char *name, uint8_t **out_data, size_t *out_len)
{
    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (s3_bad_name(name) || !out_data || !out_len)
        return -EINVAL;
    return s3_failed(
        self, s3_get(self->client, s3_manifest_path(&self->config, name), out_data, out_len));
}

static int s3_delete_manifest(kv_store_v1 *self, const char *name)
{
    int error;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (s3_bad_name(name))
        return -EINVAL;
    error = s3_delete(self->client, s3_manifest_path(&self->config, name));
    if (!error)
        error = s3_refs_forget(self->refs, name);
    return s3_failed(self, error);
}

/* -- Statistics and tables --------------------------------------------------------------------- */

static int s3_stats(kv_store_v1 *self, kv_store_stats *ret)
{
    kv_store_stats stats = {.n_chunks = UINT64_MAX, .n_manifests = UINT64_MAX, .bytes = UINT64_MAX};
    uint64_t *const slots[N_COUNTERS] = {
        [PUTS] = &stats.puts,       [PUT_HITS] = &stats.put_hits,
        [GETS] = &stats.gets,       [MISSES] = &stats.get_misses,
        [BAD] = &stats.bad_chunks,  [WRITTEN] = &stats.bytes_written,
        [READ] = &stats.bytes_read, [ERRORS] = &stats.errors};

    if (!ret || ret->size < sizeof(size_t))
        return -EINVAL;
    for (size_t i = 0; i < N_COUNTERS; i++)
        *slots[i] = atomic_load_explicit(&self->counters[i], memory_order_relaxed);
    stats.round_trips = s3_client_trips(self->client);
    stats.size = KV_MIN(ret->size, sizeof(stats));
    memcpy(ret, &stats, stats.size);
    return 0;
}

const kv_store_vtable *kv_store_get_vtable(void)
{
    static const kv_store_vtable table = {.version = KV_STORE_VERSION_2,
                                          .open = s3_open,
                                          .close = s3_close,
                                          .put_chunk = s3_put_chunk,
                                          .get_chunk = s3_get_chunk,
                                          .put_manifest = s3_put_manifest,
                                          .get_manifest = s3_get_manifest,
                                          .delete_manifest = s3_delete_manifest,
                                          .prefetch_chunks = s3_prefetch_chunks};

    return &table;
}

const kv_store_ext *kv_store_get_ext(void)
{
    static const kv_store_ext table = {.size = sizeof(table),
                                       .version = KV_STORE_EXT_VERSION,
                                       .exists_chunks = s3_exists_chunks,
                                       .get_chunks = s3_get_chunks,
                                       .put_chunks = s3_put_chunks,
                                       .delete_chunk = s3_delete_chunk,
                                       .delete_chunk_if = s3_delete_chunk_if,
                                       .list_manifests = s3_list_manifests,
                                       .list_chunks = s3_list_chunks,
                                       .list_refs = s3_list_refs,
                                       .touch_chunks = s3_touch_chunks,
                                       .flush = s3_flush,
                                       .sweep_chunks = s3_sweep_chunks,
                                       .stats = s3_stats,
                                       .get_ranges = s3_get_ranges};

    return &table;
}
