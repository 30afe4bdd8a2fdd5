// SPDX-License-Identifier: Apache-2.0
/*
 * etcd://HOST:PORT[,HOST:PORT...]/PREFIX: each key below the prefix is a worker, NAME or NAME:RANK behind
 * it; the value is a JSON object, or ENDPOINT[+REPLAY_ENDPOINT]. Keys under a lease vanish with their
 * worker. plane/etcd.h does all that concerns the server: it looks at all keys, and watches from there on.
 */
#include "plane/etcd.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args/instance.h"
#include "indexer/discover/table.h"
#include "plane/etcd_auth.h"

#define MAX_KEY 512
#define MAX_VALUE 65536
#define MAX_ANSWER ((size_t)64 << 20)
#define TTL_S 10 /* a third of it is the interval of questions that show that the server lives */
#define TIMEOUT_MS 3000 /* of a request */

struct etcd {
    struct ki_source *source;
    struct kvp_etcd_url url;
    char *text; /* owned; prefix and auth point into it */
    const char *prefix;
    struct kvp_etcd_auth auth;
    const struct kvbm_http_abi *http;
    struct ki_table keys;
    struct ki_body body;
};

/* -- the text of the source -------------------------------------------------------------------- */

/* Read "SCHEME//HOST:PORT,.../PREFIX?OPTIONS". */
static int read_place(struct etcd *e, const char *scheme, const char *where, struct kv_error *error)
{
    struct kv_buf url = KV_BUF_INIT;
    const char *why = "";
    int rc;

    e->text = strdup(where);
    if (!e->text)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    rc = kvp_etcd_auth_cut(e->text, &e->auth, error);
    if (rc < 0)
        return rc;
    kv_buf_printf(&url, "%s%s", scheme, e->text);
    rc = kvp_etcd_url_parse(kv_buf_cstr(&url), &e->url, &why);
    kv_buf_fini(&url);
    if (rc < 0)
        return kv_fail(error, rc, 0, "%s", rc == -EINVAL ? why : "out of memory");
    /* e->url.path points into the text that is freed: the same path is the end of e->text. */
    e->prefix = strchr(e->text + strspn(e->text, "/"), '/');
    e->prefix = e->prefix ? e->prefix + 1 : "";
    if (!*e->prefix || strlen(e->prefix) > ETCD_MAX_PREFIX)
        return kv_fail(error, -EINVAL, 0,
                       "a prefix of 1 to %d characters is expected: %s//HOST:PORT/PREFIX",
                       ETCD_MAX_PREFIX, scheme);
    return 0;
}

static void free_place(struct etcd *e)
{
    kvp_etcd_url_fini(&e->url);
    free(e->text);
}

static int check_with(const char *scheme, const char *where, struct kv_error *error)
{
    struct etcd e = {.text = NULL};
    int rc = read_place(&e, scheme, where, error);

    free_place(&e);
    return rc;
}

static int check_plain(const char *where, struct kv_error *error)
{
    return check_with("etcd:", where, error);
}

static int check_tls(const char *where, struct kv_error *error)
{
    return check_with("etcds:", where, error);
}

/* -- keys -------------------------------------------------------------------------------------- */

/* Add a worker whose value is a JSON object. */
static int add_object(struct etcd *e, char *name, struct kv_str value, struct ki_found_set *set,
                      struct kv_error *error)
{
    struct ki_found found = e->source->base;
    char *colon = strrchr(name, ':');
    const char *why = "";
    uint64_t rank = 0;
    int kind;

    if (colon)
        *colon = '\0';
    kind = kv_instance_parse(name, strlen(name), &found.registration.instance, &why);
    if (kind < 0)
        return kv_fail(error, kind, 0, "instance id: %s", why);
    if (colon && (kv_parse_u64(colon + 1, &rank) < 0 || rank > UINT32_MAX))
        return kv_fail(error, -EINVAL, 0, "the rank behind : must be a number below 2^32");
    found.registration.name = kind == KV_INSTANCE_NAME ? name : NULL;
    found.registration.rank = (uint32_t)rank;
    return ki_found_add_json(set, value, KI_ENDPOINT, &found, &e->body, error);
}

/* Add a worker whose value is an endpoint. */
static int add_endpoint(struct etcd *e, const char *name, struct kv_str value,
                        struct ki_found_set *set, struct kv_error *error)
{
    struct kv_buf line = KV_BUF_INIT;
    int rc;

    if (strpbrk(name, ",=") || memchr(value.p, ',', value.len) || memchr(value.p, '\0', value.len))
        return kv_fail(error, -EINVAL, 0, "neither a JSON object nor ENDPOINT[+REPLAY_ENDPOINT]");
    kv_buf_printf(&line, "%s=%.*s", name, (int)value.len, value.p);
    rc = ki_found_add_line(set, kv_buf_cstr(&line), &e->source->base, error);
    kv_buf_fini(&line);
    return rc;
}

static void on_key(void *arg, struct kv_str key, struct kv_str value, bool deleted)
{
    struct etcd *e = arg;
    char name[MAX_KEY + 1], copy[MAX_KEY + 1];
    struct ki_found_set set = {0};
    struct kv_error why = {0};
    size_t skip = strlen(e->prefix), blank = 0;
    int rc;

    if (key.len <= skip || key.len - skip > MAX_KEY || memchr(key.p, '\0', key.len))
        return;
    memcpy(name, key.p + skip, key.len - skip);
    name[key.len - skip] = '\0';
    if (deleted) {
        ki_table_remove(&e->keys, name);
        return;
    }
    while (blank < value.len && strchr(" \t\r\n", value.p[blank]))
        blank++;
    memcpy(copy, name, sizeof(copy));
    if (blank < value.len && value.p[blank] == '{')
        rc = add_object(e, copy, value, &set, &why);
    else
        rc = add_endpoint(e, name, value, &set, &why);
    if (rc < 0) {
        ki_found_set_fini(&set);
        ki_found_leave_out(&set, name, why.text);
    }
    (void)ki_table_put(&e->keys, name, &set); /* ki_table_publish tells of a failure */
}

static void on_look(void *arg, bool begins)
{
    struct etcd *e = arg;

    if (begins)
        ki_table_begin(&e->keys);
    else
        ki_table_end(&e->keys);
}

static bool wants_look(void *arg)
{
    (void)arg;
    return false;
}

static void on_state(void *arg, bool current)
{
    struct etcd *e = arg;

    if (current)
        ki_table_publish(&e->keys, e->source);
}

static void on_failed(void *arg, const char *what, const char *why)
{
    struct etcd *e = arg;

    ki_source_failed(e->source, "%.60s: %.90s", what, why);
}

/* -- life -------------------------------------------------------------------------------------- */

static void run(struct ki_source *source)
{
    struct etcd *e = source->own;
    const struct kvp_etcd_opts opts = {
        .hosts = (const char *const *)e->url.hosts,
        .n_hosts = e->url.n_hosts,
        .user = e->auth.user,
        .password = e->auth.user ? e->auth.password : NULL,
        .tls_ca = e->auth.ca ? e->auth.ca : source->options.cacert,
        .tls_cert = e->auth.cert,
        .tls_key = e->auth.key,
        .ttl_s = TTL_S,
        .timeout_ms = TIMEOUT_MS,
        .http = e->http,
        .prefix = e->prefix,
        .max_keys = KI_MAX_FOUND,
        .max_answer = MAX_ANSWER,
        .limits = {MAX_KEY + ETCD_MAX_PREFIX, MAX_VALUE},
        .stop = &source->stop,
        .wake_fd = source->wake.fd,
        .look = on_look,
        .key = on_key,
        .wants_look = wants_look,
        .state = on_state,
        .failed = on_failed,
        .arg = e,
    };

    kvp_etcd_run(&opts);
}

static int open_etcd(struct ki_source *source, struct kv_error *error)
{
    struct etcd *e = calloc(1, sizeof(*e));
    int rc;

    if (!e)
        return -ENOMEM;
    source->own = e;
    e->source = source;
    e->keys.changed = true; /* also that there is none */
    rc = read_place(e, source->ops->scheme, source->where, error);
    if (rc == 0)
        rc = kvp_etcd_auth_open(&e->auth, error);
    if (rc < 0)
        return rc;
    e->http = kvbm_http_load();
    return e->http ? 0 : kv_fail(error, -ENOTSUP, 0, "etcd needs libkvbm_http");
}

static void close_etcd(struct ki_source *source)
{
    struct etcd *e = source->own;

    if (!e)
        return;
    ki_table_fini(&e->keys);
    ki_body_fini(&e->body);
    kvp_etcd_auth_fini(&e->auth);
    free_place(e);
    free(e);
}

const struct ki_source_ops ki_source_etcd = {.scheme = "etcd:",
                                             .form = "etcd://HOST:PORT/PREFIX",
                                             .check = check_plain,
                                             .open = open_etcd,
                                             .run = run,
                                             .close = close_etcd};
const struct ki_source_ops ki_source_etcds = {.scheme = "etcds:",
                                              .form = "etcds:",
                                              .check = check_tls,
                                              .open = open_etcd,
                                              .run = run,
                                              .close = close_etcd};
