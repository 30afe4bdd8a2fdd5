// SPDX-License-Identifier: Apache-2.0
/*
 * A part of a chunk is a GET with Range. Where the caller knows the object's ETag, If-Match goes with it, so
 * that parts of two objects are never taken for one. Nothing that the answer says is believed unseen:
 * the status must be 206, Content-Range and the body's length those asked for, and the ETag the same.
 */
#include "s3/range.h"

#include "base/core/log.h"
#include "s3/store.h"

#define AT_ONCE 64u /* requests handed to the client at once */

/* Take the part from a chunk that this handle has put and not yet stored. */
static int take_pending(kv_store_v1 *self, kv_store_range *range)
{
    uint8_t *data;
    size_t len;
    int rc = s3_pending_take(self->pending, range->hash, range->hash_len, &data, &len);

    if (rc)
        return rc;
    if (range->tag[0])
        rc = -ESTALE;
    else if (range->offset > len || range->len > len - range->offset)
        rc = -ERANGE;
    for (size_t i = 0, at = range->offset; rc == 0 && i < range->n_parts; i++) {
        if (range->parts[i].iov_len)
            memcpy(range->parts[i].iov_base, data + at, range->parts[i].iov_len);
        at += range->parts[i].iov_len;
    }
    free(data);
    return rc;
}

static void begin(kv_store_v1 *self, kv_store_range *range, struct s3_request *request)
{
    range->rc = s3_pending_has(self->pending, range->hash, range->hash_len)
                    ? take_pending(self, range)
                    : -ENOENT;
    if (range->rc != -ENOENT)
        return;
    *request =
        (struct s3_request){.method = "GET",
                            .path = s3_chunk_path(&self->config, range->hash, range->hash_len),
                            .range_at = range->offset,
                            .range_len = range->len,
                            .parts = range->parts,
                            .n_parts = range->n_parts,
                            .max_body = range->len};
    memcpy(request->if_match, range->tag, sizeof(request->if_match));
    if (request->path)
        s3_submit(self->client, request);
    else
        range->rc = -ENOMEM;
}

/* Log once in a while that a server doesn't do what its answer claims. */
static int distrust(const struct s3_request *request, const char *what, int error)
{
    static struct kv_log_rate rate;
    char path[200];

    if (kv_log_allowed(&rate, 10))
        kv_log_error("s3", what, "path=%s status=%d",
                     kv_log_quote(path, sizeof(path), request->path), request->status);
    return error;
}

/* Judge the answer. Returns 0 when it is the part asked for. */
static int judge(const kv_store_range *range, const struct s3_request *request)
{
    if (request->error == -EEXIST) /* 412 to If-Match */
        return -ESTALE;
    if (request->error == -EFBIG) /* the whole object */
        return distrust(request, "the server ignores Range", -ENOTSUP);
    if (request->error)
        return request->error;
    if (request->status != 206)
        return distrust(request, "the server ignores Range", -ENOTSUP);
    if (request->got_at != range->offset)
        return distrust(request, "the server sent another part than asked for", -EIO);
    if (request->got_end - request->got_at + 1 < range->len)
        return -ERANGE;
    if (request->got_end - request->got_at + 1 != range->len || request->data_len != range->len)
        return distrust(request, "the server sent another part than asked for", -EIO);
    if (!request->etag[0])
        return distrust(request, "a part of an object came without its ETag", -ENOTSUP);
    return range->tag[0] && strcmp(range->tag, request->etag) != 0 ? -ESTALE : 0;
}

static void end(kv_store_v1 *self, kv_store_range *range, struct s3_request *request)
{
    s3_wait(self->client, request);
    range->rc = judge(range, request);
    if (range->rc == 0) {
        memcpy(range->tag, request->etag, sizeof(range->tag));
        s3_count(self, READ, range->len);
    }
    s3_request_fini(request);
}

int s3_get_ranges(kv_store_v1 *self, kv_store_range *ranges, size_t n)
{
    struct s3_request requests[AT_ONCE];
    int found = 0;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    for (size_t i = 0; i < n; i++)
        if (s3_bad_hash(ranges[i].hash, ranges[i].hash_len) || !ranges[i].parts || !ranges[i].len)
            return -EINVAL;
    for (size_t at = 0; at < n; at += AT_ONCE) {
        size_t some = KV_MIN(AT_ONCE, n - at);

        memset(requests, 0, sizeof(requests));
        for (size_t i = 0; i < some; i++)
            begin(self, &ranges[at + i], &requests[i]);
        for (size_t i = 0; i < some; i++) {
            if (requests[i].path)
                end(self, &ranges[at + i], &requests[i]);
            found += ranges[at + i].rc == 0;
            s3_count(self, GETS, 1);
            s3_count(self, MISSES, ranges[at + i].rc == -ENOENT);
            if (ranges[at + i].rc != -ERANGE && ranges[at + i].rc != -ESTALE)
                s3_failed(self, ranges[at + i].rc);
        }
    }
    return found;
}
