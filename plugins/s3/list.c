// SPDX-License-Identifier: Apache-2.0
#include "s3/list.h"

#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "s3/keys.h"
#include "s3/sign.h"

#define MAX_PAGES 1000000
#define KEY_EARNS_NS \
    (5 * KV_NS_PER_MS) /* a listing's time is the server's answers, without the callbacks */

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
    return s3_take_text(&query);
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
