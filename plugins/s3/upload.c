// SPDX-License-Identifier: Apache-2.0
/* Put an object: in one piece, or a large value in parts. */
#include <stdio.h>
#include <string.h>

#include "base/core/log.h"
#include "s3/object.h"
#include "s3/sign.h"
#include "s3/xml.h"

#define MAX_PARTS 10000

static int start_parts(struct s3_client *client, const char *path, const char *sum, char *ret_id,
                       size_t size)
{
    struct s3_request request = {
        .method = "POST", .path = strdup(path), .query = strdup("uploads=")};
    int error = request.path && request.query ? 0 : -ENOMEM;

    snprintf(request.sum, sizeof(request.sum), "%s", sum);
    if (!error)
        error = s3_run(client, &request);
    if (!error && s3_read_element(request.data, request.data_len, "UploadId", ret_id, size))
        error = -EPROTO;
    s3_request_fini(&request);
    return error;
}

static char *part_query(size_t number, const char *id)
{
    struct kv_buf query = KV_BUF_INIT;

    if (number)
        kv_buf_printf(&query, "partNumber=%zu&", number);
    kv_buf_puts(&query, "uploadId=");
    s3_encode(&query, id, strlen(id), 0);
    return s3_take_text(&query);
}

static int send_parts(struct s3_client *client, const char *path, const char *id, const void *data,
                      size_t len, size_t part, struct s3_request *parts, size_t n)
{
    int error = 0;
    size_t sent = 0;

    for (; sent < n && !error; sent++) {
        struct s3_request *at = &parts[sent];

        at->method = "PUT";
        at->path = strdup(path);
        at->query = part_query(sent + 1, id);
        at->body = (const char *)data + sent * part;
        at->len = KV_MIN(part, len - sent * part);
        if (!at->path || !at->query) {
            error = -ENOMEM;
            break;
        }
        s3_submit(client, at);
    }
    for (size_t i = 0; i < sent; i++) {
        int one = s3_wait(client, &parts[i]);

        error = error ? error : one;
    }
    return error;
}

static int finish_parts(struct s3_client *client, const char *path, const char *id,
                        const struct s3_request *parts, size_t n, bool if_none_match)
{
    struct s3_request request = {.method = "POST",
                                 .path = strdup(path),
                                 .root = "CompleteMultipartUploadResult",
                                 .query = part_query(0, id),
                                 .if_none_match = if_none_match};
    struct kv_buf body = KV_BUF_INIT;
    int error;

    kv_buf_puts(&body, "<CompleteMultipartUpload>");
    for (size_t i = 0; i < n; i++)
        kv_buf_printf(&body, "<Part><PartNumber>%zu</PartNumber><ETag>%s</ETag></Part>", i + 1,
                      parts[i].etag);
    kv_buf_puts(&body, "</CompleteMultipartUpload>");
    request.body = body.data;
    request.len = body.len;
    error = body.error ? body.error : request.path && request.query ? 0 : -ENOMEM;
    if (!error)
        error = s3_run(client, &request);
    kv_buf_fini(&body);
    s3_request_fini(&request);
    return error;
}

static void abort_parts(struct s3_client *client, const char *path, const char *id)
{
    struct s3_request request = {
        .method = "DELETE", .path = strdup(path), .query = part_query(0, id)};

    if (request.path && request.query && s3_run(client, &request))
        kv_log_warn("s3", "an upload could not be aborted; a lifecycle rule should", "path=%s",
                    path);
    s3_request_fini(&request);
}

static int put_parts(struct s3_client *client, const struct s3_config *config, const char *path,
                     const void *data, size_t len, bool if_none_match, const char *sum)
{
    size_t part = KV_MAX((size_t)config->part_bytes, len / (MAX_PARTS - 1) + 1);
    size_t n = (len + part - 1) / part;
    struct s3_request *parts = calloc(n, sizeof(*parts));
    char id[1024] = "";
    int error = parts ? start_parts(client, path, sum, id, sizeof(id)) : -ENOMEM;

    if (!error)
        error = send_parts(client, path, id, data, len, part, parts, n);
    if (!error) {
        error = finish_parts(client, path, id, parts, n, if_none_match);
        /* After a lost answer a completed upload looks like one that never was: the caller looks. */
        if (error == -ENOENT) {
            error = 0;
            id[0] = '\0';
        }
    }
    if (error && id[0])
        abort_parts(client, path, id);
    for (size_t i = 0; parts && i < n; i++)
        s3_request_fini(&parts[i]);
    free(parts);
    return error;
}

static int send(struct s3_client *client, const struct s3_config *config, const char *path,
                const void *data, size_t len, const struct s3_put_try *put)
{
    struct s3_request request = {.method = "PUT",
                                 .path = strdup(path),
                                 .if_none_match = put->if_none_match,
                                 .body = data,
                                 .len = len};
    int error = -ENOMEM;

    memcpy(request.sum, put->sum, sizeof(request.sum));
    if (request.path)
        error = len > S3_LARGE
                    ? put_parts(client, config, path, data, len, put->if_none_match, put->sum)
                    : s3_run(client, &request);
    s3_request_fini(&request);
    return error;
}

int s3_put(struct s3_client *client, const struct s3_config *config, char *path, const void *data,
           size_t len, bool if_none_match)
{
    struct s3_put_try put = {.if_none_match = if_none_match, .began_s = s3_client_now_s(client)};
    int error = path ? 0 : -ENOMEM, kept = -EAGAIN;

    s3_sum(data, len, put.sum);
    for (int i = 0; i < 2 && !error && kept; i++) {
        error = send(client, config, path, data, len, &put);
        if (error && error != -EEXIST)
            break;
        put.refused = error == -EEXIST;
        kept = s3_confirm(client, path, &put);
        if (kept) {
            /* Send it again once: refused without an object, or dropped, maybe by a deletion that
             * another thread began before the look. */
            put.if_none_match &= !put.refused;
            error = i == 0 ? 0 : kept;
        }
    }
    free(path);
    return error;
}
