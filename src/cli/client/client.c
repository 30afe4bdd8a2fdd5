// SPDX-License-Identifier: Apache-2.0
#include "cli/client/client.h"

#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/json/json.h"
#include "base/json/msgpack.h"

struct kc_client {
    struct kc_client_opts opts;
    struct kc_http *http;
    struct kv_buf body;
};

int kc_client_create(const struct kc_client_opts *opts, struct kc_client **ret,
                     struct kv_error *error)
{
    struct kc_client *client = calloc(1, sizeof(*client));
    int rc;

    if (!client)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    client->opts = *opts;
    rc = kc_http_create(opts->url, opts->token, &client->http);
    if (rc == 0 && opts->cacert)
        kc_http_set_cacert(client->http, opts->cacert);
    if (rc < 0) {
        free(client);
        return kv_fail(error, rc, 0,
                       rc == -EINVAL ? "not a usable URL: %.100s" : "no memory for %s", opts->url);
    }
    *ret = client;
    return 0;
}

void kc_client_destroy(struct kc_client *client)
{
    if (!client)
        return;
    kc_http_destroy(client->http);
    kv_buf_fini(&client->body);
    free(client);
}

struct kc_http *kc_client_http(struct kc_client *client)
{
    return client->http;
}

int kc_client_wait_healthy(struct kc_client *client, uint64_t deadline_ns, uint64_t request_ms,
                           const _Atomic bool *stop, struct kv_error *error)
{
    const struct timespec pause = {.tv_nsec = 20 * 1000 * 1000};
    const struct kv_buf *body;
    int rc = 0;

    kc_http_set_timeout(client->http, request_ms);
    while (kc_http_request(client->http, "/health", KC_BODY_NONE, NULL, 0, &body, error) != 200) {
        if (atomic_load_explicit(stop, memory_order_relaxed))
            rc = -EINTR;
        else if (kv_now_ns() >= deadline_ns)
            rc = -ETIMEDOUT;
        if (rc < 0)
            break;
        nanosleep(&pause, NULL);
    }
    kc_http_set_timeout(client->http, KC_HTTP_TIMEOUT_MS);
    return rc;
}

/* Fail with @status and the server's text. */
static int refused(const struct kc_client *client, const char *path, int status,
                   const struct kv_buf *answer, struct kv_error *error)
{
    return kv_fail(error,
                   status == 409   ? -EEXIST
                   : status == 404 ? -ENOENT
                                   : -EPROTO,
                   0, "%s: status %d: %.*s%s", path, status, (int)KV_MIN(answer->len, (size_t)120),
                   answer->data ? answer->data : "", kc_http_advice(client->http, status));
}

/* POST client->body. A status other than 2xx becomes an error with the server's text. */
static int post(struct kc_client *client, const char *path, struct kv_error *error)
{
    const struct kv_buf *answer;
    int status;

    if (client->body.error)
        return kv_fail(error, client->body.error, 0, "out of memory");
    status = kc_http_request(client->http, path, KC_BODY_JSON, client->body.data, client->body.len,
                             &answer, error);
    if (status < 0 || (status >= 200 && status < 300))
        return status < 0 ? status : 0;
    return refused(client, path, status, answer, error);
}

/* Begin a body: {"instance_id": .., "model_name": "..", "tenant_id": "..", */
static void begin_worker(struct kc_client *client, struct kv_json_writer *w, uint32_t worker)
{
    kv_buf_clear(&client->body);
    kv_json_writer_init(w, &client->body);
    kv_json_begin_object(w);
    kv_json_member_u64(w, "instance_id", client->opts.first_instance + worker);
    kv_json_member_str(w, "model_name", client->opts.model);
    kv_json_member_str(w, "tenant_id", client->opts.tenant);
}

static int register_once(struct kc_client *client, uint32_t worker, const char *endpoint,
                         const char *replay_endpoint, struct kv_error *error)
{
    struct kv_json_writer w;

    begin_worker(client, &w, worker);
    kv_json_member_u64(&w, "block_size", client->opts.block_size);
    kv_json_member_str(&w, "endpoint", endpoint);
    kv_json_member_str(&w, "replay_endpoint", replay_endpoint);
    kv_json_end_object(&w);
    return post(client, "/register", error);
}

int kc_client_register(struct kc_client *client, uint32_t worker, const char *endpoint,
                       const char *replay_endpoint, struct kv_error *error)
{
    int rc = register_once(client, worker, endpoint, replay_endpoint, error);

    if (rc != -EEXIST)
        return rc;
    /* The indexer unregisters an instance only for the tenant that it is registered for. */
    rc = kc_client_unregister(client, worker, error);
    if (rc == -ENOENT)
        return kv_fail(error, -EEXIST, 0,
                       "instance_id %" PRIu64 " is taken by a worker that this run didn't "
                       "register; it is left as it is. Run it again: instance_ids are random",
                       client->opts.first_instance + worker);
    return rc < 0 ? rc : register_once(client, worker, endpoint, replay_endpoint, error);
}

int kc_client_unregister(struct kc_client *client, uint32_t worker, struct kv_error *error)
{
    struct kv_json_writer w;

    begin_worker(client, &w, worker);
    kv_json_end_object(&w);
    return post(client, "/unregister", error);
}

/* Append "1,22,333": the hot loop of a JSON query on the client's side. */
static void put_tokens_json(struct kv_buf *out, const uint32_t *tokens, size_t n)
{
    char *p;

    if (kv_buf_reserve(out, n * 11) < 0)
        return;
    p = out->data + out->len;
    for (size_t i = 0; i < n; i++) {
        char digits[10];
        size_t k = sizeof(digits);
        uint32_t x = tokens[i];

        do {
            digits[--k] = (char)('0' + x % 10);
            x /= 10;
        } while (x);
        memcpy(p, digits + k, sizeof(digits) - k);
        p += sizeof(digits) - k;
        *p++ = ',';
    }
    out->len = (size_t)(p - out->data) - (n > 0);
}

static void write_query(struct kc_client *client, const uint32_t *tokens, size_t n)
{
    struct kv_buf *body = &client->body;
    struct kv_json_writer w;

    kv_buf_clear(body);
    if (client->opts.msgpack) {
        kv_msgpack_put_map(body, 3);
        kv_msgpack_put_str(body, "model_name");
        kv_msgpack_put_str(body, client->opts.model);
        kv_msgpack_put_str(body, "tenant_id");
        kv_msgpack_put_str(body, client->opts.tenant);
        kv_msgpack_put_str(body, "token_ids"); /* little-endian, like this machine */
        kv_msgpack_put_bin(body, tokens, n * sizeof(*tokens));
        return;
    }
    kv_buf_puts(body, "{\"model_name\":");
    kv_json_writer_init(&w, body);
    kv_json_put_str(&w, client->opts.model);
    kv_buf_puts(body, ",\"tenant_id\":");
    kv_json_writer_init(&w, body);
    kv_json_put_str(&w, client->opts.tenant);
    kv_buf_puts(body, ",\"token_ids\":[");
    put_tokens_json(body, tokens, n);
    kv_buf_puts(body, "]}");
}

/* Parse an object key as a decimal number; UINT64_MAX when it is none. */
static uint64_t key_number(struct kv_str key)
{
    uint64_t value = 0;

    if (key.len == 0 || key.len > 19)
        return UINT64_MAX;
    for (size_t i = 0; i < key.len; i++) {
        if (key.p[i] < '0' || key.p[i] > '9')
            return UINT64_MAX;
        value = value * 10 + (uint64_t)(key.p[i] - '0');
    }
    return value;
}

/*
 * Read {"<instance>": {"<rank>": number}}: rank 0 of our workers, into overlap (tokens) or blocks.
 */
static void read_by_worker(struct kv_json *j, const struct kc_client_opts *opts,
                           struct kc_belief *beliefs, bool is_score)
{
    struct kv_str key;

    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        uint64_t worker = key_number(key) - opts->first_instance;

        kv_json_object(j);
        while (kv_json_next_key(j, &key)) {
            bool ours = worker < opts->n_workers && kv_str_eq(key, "0");
            uint64_t value = kv_json_u64(j, UINT64_MAX);

            if (ours && is_score)
                beliefs[worker].overlap = (uint32_t)KV_MIN(value, UINT32_MAX);
            else if (ours)
                beliefs[worker].blocks = value;
        }
    }
}

/* Read {"<instance>": {"longest_matched": tokens, ...}} of our workers. */
static void read_longest(struct kv_json *j, const struct kc_client_opts *opts,
                         struct kc_belief *beliefs)
{
    struct kv_str key;

    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        uint64_t worker = key_number(key) - opts->first_instance;

        kv_json_object(j);
        while (kv_json_next_key(j, &key)) {
            if (worker < opts->n_workers && kv_str_eq(key, "longest_matched"))
                beliefs[worker].longest = (uint32_t)kv_json_u64(j, UINT32_MAX);
            else
                kv_json_skip(j);
        }
    }
}

static int read_answer(const struct kc_client *client, const struct kv_buf *body,
                       struct kc_belief *ret, struct kv_error *error)
{
    struct kv_str key;
    struct kv_json j;

    memset(ret, 0, client->opts.n_workers * sizeof(*ret));
    kv_json_init(&j, body->data, body->len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        if (kv_str_eq(key, "scores"))
            read_by_worker(&j, &client->opts, ret, true);
        else if (kv_str_eq(key, "tree_sizes"))
            read_by_worker(&j, &client->opts, ret, false);
        else if (kv_str_eq(key, "instances"))
            read_longest(&j, &client->opts, ret);
        else
            kv_json_skip(&j);
    }
    if (kv_json_finish(&j) < 0)
        return kv_fail(error, -EPROTO, j.error.offset, "/query answered something else: %.100s",
                       j.error.text);
    for (uint32_t w = 0; w < client->opts.n_workers; w++) {
        ret[w].overlap /= client->opts.block_size;
        ret[w].longest /= client->opts.block_size;
    }
    return 0;
}

int kc_client_query(struct kc_client *client, const uint32_t *tokens, size_t n,
                    struct kc_belief *ret, uint64_t *ret_ns, struct kv_error *error)
{
    const struct kv_buf *answer;
    uint64_t started;
    int status;

    write_query(client, tokens, n);
    if (client->body.error)
        return kv_fail(error, client->body.error, 0, "out of memory");
    started = kv_now_ns();
    status = kc_http_request(client->http, "/query",
                             client->opts.msgpack ? KC_BODY_MSGPACK : KC_BODY_JSON,
                             client->body.data, client->body.len, &answer, error);
    if (status < 0)
        return status;
    if (ret_ns)
        *ret_ns = kv_now_ns() - started;
    if (status != 200)
        return refused(client, "/query", status, answer, error);
    return read_answer(client, answer, ret, error);
}
