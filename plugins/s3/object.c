// SPDX-License-Identifier: Apache-2.0
#include "s3/object.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/core/xxh.h"

void s3_sum(const void *data, size_t len, char ret[64])
{
    XXH128_hash_t sum = XXH3_128bits(data ? data : "", len);

    snprintf(ret, 64, "1-%zu-%016" PRIx64 "%016" PRIx64, len, (uint64_t)sum.high64,
             (uint64_t)sum.low64);
}

bool s3_is_whole(const struct s3_request *request)
{
    char sum[64], *end;
    uint64_t len;

    if (strcmp(request->method, "HEAD") != 0) {
        s3_sum(request->data, request->data_len, sum);
        return strcmp(sum, request->got_sum) == 0;
    }
    if (strncmp(request->got_sum, "1-", 2) != 0)
        return false;
    len = strtoull(request->got_sum + 2, &end, 10);
    return *end == '-' && len == request->length;
}

int s3_get(struct s3_client *client, char *path, uint8_t **ret, size_t *ret_len)
{
    struct s3_request request = {.method = "GET", .path = path, .max_body = S3_MAX_BODY};
    int error = path ? 0 : -ENOMEM;

    for (int i = 0; i < 2 && !error; i++) {
        s3_request_reset(&request);
        error = s3_run(client, &request);
        if (error)
            break;
        if (s3_is_whole(&request)) {
            *ret = KV_STEAL(request.data);
            *ret_len = request.data_len;
            break;
        }
        if (i == 1) {
            error = -EBADMSG;
            kv_log_error("s3", "an object's bytes are not those that were stored",
                         "path=%s len=%zu", request.path, request.data_len);
        }
    }
    s3_request_fini(&request);
    return error;
}

/* -- Whether a put is kept ------------------------------------------------------------------- */

bool s3_is_kept(const struct s3_put_try *put, const struct s3_request *head)
{
    if (head->error || !s3_is_whole(head))
        return false;
    /* times have whole seconds, of several machines */
    return put->if_none_match || strcmp(head->got_sum, put->sum) == 0 ||
           head->modified_s + 2 >= put->began_s;
}

bool s3_look_again(const struct s3_put_try *put, struct s3_request *head, unsigned n)
{
    if (put->refused || head->error != -ENOENT || n >= S3_LOOKS)
        return false;
    s3_request_reset(head);
    head->due_ns = kv_now_ns() + (UINT64_C(50) << 2 * n) * KV_NS_PER_MS; /* 0.2, 0.8 s */
    return true;
}

int s3_not_kept(const struct s3_put_try *put, const struct s3_request *head)
{
    static struct kv_log_rate rate;
    char path[200];

    if (head->error && head->error != -ENOENT)
        return head->error; /* the client has logged it */
    if (put->refused)
        return -ENOENT;
    if (kv_log_allowed(&rate, 10))
        kv_log_error("s3", "the server took an object and doesn't have it", "path=%s found=%s",
                     kv_log_quote(path, sizeof(path), head->path),
                     head->error ? "nothing" : "\"another one\"");
    return -EIO;
}

int s3_confirm(struct s3_client *client, const char *path, const struct s3_put_try *put)
{
    struct s3_request head = {.method = "HEAD", .path = strdup(path)};
    unsigned n = 0;
    int error;

    if (!head.path)
        return -ENOMEM;
    do
        s3_run(client, &head);
    while (s3_look_again(put, &head, ++n));
    error = s3_is_kept(put, &head) ? 0 : s3_not_kept(put, &head);
    s3_request_fini(&head);
    return error;
}

int s3_delete(struct s3_client *client, char *path)
{
    struct s3_request request = {.method = "DELETE", .path = path};
    int error = path ? s3_run(client, &request) : -ENOMEM;

    s3_request_fini(&request);
    return error == -ENOENT ? 0 : error;
}

static int delete_as_read(struct s3_client *client, struct s3_request *got)
{
    struct s3_request request = {.method = "DELETE", .path = got->path};
    int error;

    got->path = NULL;
    memcpy(request.if_match, got->etag, sizeof(request.if_match));
    error = s3_run(client, &request);
    s3_request_fini(&request);
    if (error == -ENOENT || error == -EEXIST)
        return 0;
    return error ? error : 1;
}

int s3_delete_if(struct s3_client *client, char *path, const void *data, size_t len)
{
    struct s3_request got = {.method = "GET", .path = path, .max_body = S3_MAX_BODY};
    int ret = path ? s3_run(client, &got) : -ENOMEM;

    if (ret == 0 && !got.etag[0])
        ret = -ENOTSUP;
    if (ret == 0 && s3_is_whole(&got) && got.data_len == len &&
        (len == 0 || memcmp(got.data, data, len) == 0))
        ret = delete_as_read(client, &got);
    s3_request_fini(&got);
    return ret == -ENOENT ? 0 : ret;
}

int s3_renew(struct s3_client *client, const struct s3_config *config, char *path, const char *sum)
{
    struct s3_request request = {.method = "PUT", .path = path, .root = "CopyObjectResult"};
    int error = path ? 0 : -ENOMEM;

    /* The path of a bucket in the host's name lacks the bucket; a copy's source must have it. */
    if (!error &&
        asprintf(&request.copy_source, "%s%s%s", strcmp(config->root, "/") == 0 ? "/" : "",
                 strcmp(config->root, "/") == 0 ? config->bucket : "", path) < 0) {
        request.copy_source = NULL;
        error = -ENOMEM;
    }
    if (!error) {
        snprintf(request.sum, sizeof(request.sum), "%s", sum);
        error = s3_run(client, &request);
    }
    s3_request_fini(&request);
    return error;
}
