// SPDX-License-Identifier: Apache-2.0
#include "s3/object.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/xxh.h"

#define MAX_PARTS 10000
#define MAX_PAGES 1000000
#define KEY_EARNS_NS \
    (5 * KV_NS_PER_MS) /* a listing's time is the server's answers, without the callbacks */

static char *take_text(struct kv_buf *buf)
{
    char *ret = buf->error ? NULL : strdup(kv_buf_cstr(buf));

    kv_buf_fini(buf);
    return ret;
}

char *s3_chunk_path(const struct s3_config *config, const uint8_t *hash, size_t hash_len)
{
    struct kv_buf path = KV_BUF_INIT;

    kv_buf_printf(&path, "%sc/%02x/", config->base, hash[0]);
    s3_hex(&path, hash, hash_len);
    return take_text(&path);
}

/* Append a manifest's name as it appears in keys. */
static void put_name(struct kv_buf *ret, const char *name)
{
    if (name[0] == '.') { /* "." and ".." would mean folders to some proxies */
        kv_buf_puts(ret, "%2E");
        name++;
    }
    s3_encode(ret, name, strlen(name), 0);
}

char *s3_manifest_path(const struct s3_config *config, const char *name)
{
    struct kv_buf key = KV_BUF_INIT, path = KV_BUF_INIT;

    put_name(&key, name);
    kv_buf_printf(&path, "%sm/", config->base);
    s3_encode(&path, kv_buf_cstr(&key), key.len, 0);
    kv_buf_fini(&key);
    return take_text(&path);
}

char *s3_refs_folder(const char *name)
{
    struct kv_buf folder = KV_BUF_INIT;

    kv_buf_puts(&folder, "r/");
    put_name(&folder, name);
    kv_buf_putc(&folder, '/');
    return take_text(&folder);
}

char *s3_refs_path(const struct s3_config *config, const char *name, const char *id)
{
    char *folder = s3_refs_folder(name);
    struct kv_buf path = KV_BUF_INIT;

    if (!folder)
        return NULL;
    kv_buf_puts(&path, config->base);
    s3_encode(&path, folder, strlen(folder), 1);
    s3_encode(&path, id, strlen(id), 0);
    free(folder);
    return take_text(&path);
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

size_t s3_chunk_of_key(const char *key, uint8_t ret[S3_MAX_HASH])
{
    size_t len = strlen(key);

    if (len < 5 || len % 2 == 0 || len - 3 > 2 * S3_MAX_HASH || key[2] != '/' ||
        memcmp(key, key + 3, 2) != 0)
        return 0;
    len = (len - 3) / 2;
    for (size_t i = 0; i < len; i++) {
        int high = digit(key[3 + 2 * i]), low = digit(key[4 + 2 * i]);

        if (high < 0 || low < 0)
            return 0;
        ret[i] = (uint8_t)(high * 16 + low);
    }
    return len;
}

bool s3_name_of_key(char *key)
{
    struct kv_buf again = KV_BUF_INIT;
    char *was = strdup(key);
    bool same = was && s3_decode(key, false) && *key;

    if (same) {
        put_name(&again, key);
        same = !again.error && strcmp(kv_buf_cstr(&again), was) == 0;
    }
    kv_buf_fini(&again);
    free(was);
    return same;
}

/* -- One object ------------------------------------------------------------------------------ */

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

/* -- Values in parts ------------------------------------------------------------------------- */

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
    return take_text(&query);
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

/* True when a completed upload exists. After a lost answer a completed upload looks like one that
 * never was: ask for the object. */
static int is_there(struct s3_client *client, const char *path, const char *sum)
{
    struct s3_request request = {.method = "HEAD", .path = strdup(path)};
    int error = request.path ? s3_run(client, &request) : -ENOMEM;

    if (!error && strcmp(request.got_sum, sum) != 0)
        error = -EIO;
    s3_request_fini(&request);
    return error;
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
        if (error == -ENOENT && is_there(client, path, sum) == 0) {
            error = 0;
            id[0] = 0;
        }
    }
    if (error && id[0])
        abort_parts(client, path, id);
    for (size_t i = 0; parts && i < n; i++)
        s3_request_fini(&parts[i]);
    free(parts);
    return error;
}

int s3_put(struct s3_client *client, const struct s3_config *config, char *path, const void *data,
           size_t len, bool if_none_match)
{
    struct s3_request request = {
        .method = "PUT", .path = path, .if_none_match = if_none_match, .body = data, .len = len};
    int error = -ENOMEM;

    s3_sum(data, len, request.sum);
    if (path)
        error = len > S3_LARGE
                    ? put_parts(client, config, path, data, len, if_none_match, request.sum)
                    : s3_run(client, &request);
    s3_request_fini(&request);
    return error;
}

/* -- Listings -------------------------------------------------------------------------------- */

struct listing {
    const char *start; /* prefix of the keys */
    s3_listed_fn each;
    void *arg;
    uint64_t n_keys;
};

static int on_listed(void *arg, const struct s3_listed *object)
{
    struct listing *listing = arg;
    struct s3_listed copy = *object;
    size_t len = strlen(listing->start);

    if (strncmp(copy.key, listing->start, len) != 0)
        return -EPROTO; /* not requested: the server, or our decoding, is wrong */
    listing->n_keys++;
    memmove(copy.key, copy.key + len, strlen(copy.key + len) + 1);
    return listing->each(listing->arg, &copy);
}

static char *list_query(const char *start, const char *token, unsigned page)
{
    struct kv_buf query = KV_BUF_INIT;

    if (*token) {
        kv_buf_puts(&query, "continuation-token=");
        s3_encode(&query, token, strlen(token), 0);
        kv_buf_putc(&query, '&');
    }
    kv_buf_printf(&query, "encoding-type=url&list-type=2&max-keys=%u&prefix=", page);
    s3_encode(&query, start, strlen(start), 0);
    return take_text(&query);
}

/* List objects. Repeated tokens are found by Brent's method, which compares with a token noted ever
 * more rarely. */
int s3_list(struct s3_client *client, const struct s3_config *config, const char *folder,
            unsigned page, s3_listed_fn each, void *arg)
{
    char token[1100] = "", next[1100] = "", noted[1100] = "";
    unsigned note_at = 1, n_pages = 0;
    struct listing listing = {NULL, each, arg, 0};
    uint64_t spent_ns = 0, begin_ns;
    char *start;
    int error = 0;

    if (asprintf(&start, "%s%s", config->prefix, folder) < 0)
        return -ENOMEM;
    listing.start = start;
    do {
        struct s3_request request = {
            .method = "GET", .path = strdup(config->root), .max_body = S3_MAX_LISTING};

        request.query = list_query(start, token, page);
        begin_ns = kv_now_ns();
        error = request.path && request.query ? s3_run(client, &request) : -ENOMEM;
        spent_ns += kv_now_ns() - begin_ns;
        if (!error)
            error = s3_read_listing(request.data, request.data_len, on_listed, &listing, next,
                                    sizeof(next));
        s3_request_fini(&request);
        if (!error && next[0] && strcmp(next, noted) == 0)
            error = -EPROTO; /* repeats: would never end */
        memcpy(token, next, sizeof(token));
        if (++n_pages == note_at) {
            memcpy(noted, next, sizeof(noted));
            note_at *= 2;
        }
        if (!error && next[0] &&
            spent_ns > config->timeout_ms * KV_NS_PER_MS + listing.n_keys * KEY_EARNS_NS)
            error = -ETIMEDOUT; /* ever new tokens, and almost no object */
        if (!error && next[0] && n_pages == MAX_PAGES)
            error = -E2BIG; /* an incomplete list must not pass for a complete one */
    } while (!error && next[0]);
    free(start);
    return error;
}

int s3_server_time(struct s3_client *client, const struct s3_config *config, int64_t *ret)
{
    struct s3_request request = {
        .method = "GET", .path = strdup(config->root), .max_body = S3_MAX_LISTING};
    int error = -ENOMEM;

    request.query = list_query(config->prefix, "", 1);
    if (request.path && request.query)
        error = s3_run(client, &request);
    if (!error && !request.server_s)
        error = -ENOTSUP;
    if (!error)
        *ret = request.server_s;
    s3_request_fini(&request);
    return error;
}
