// SPDX-License-Identifier: Apache-2.0
#include "plane/discovery/discovery.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/log.h"
#include "plane/discovery/impl.h"

#define FILE_URL "file://"
#define DEFAULT_TTL_S 10
#define MAX_TTL_S 3600
#define TIMEOUT_MS 3000
#define MAX_ANSWER ((size_t)64 << 20)

const char *kvp_bucket_prefix(enum kvp_bucket bucket)
{
    return bucket == KVP_SOURCES ? KVP_DYNAMO_SOURCES : KVP_DYNAMO_CHANNELS;
}

/* -- state ------------------------------------------------------------------------------------- */

void kvp_discovery_failed(struct kvp_discovery *d, const char *what, const char *why)
{
    char words[sizeof(d->info.error)], quoted[2 * sizeof(words)];
    bool again;

    snprintf(words, sizeof(words), "%s: %s", what, why);
    pthread_mutex_lock(&d->lock);
    again = strcmp(words, d->info.error) == 0;
    memcpy(d->info.error, words, sizeof(words));
    d->info.failures++;
    pthread_mutex_unlock(&d->lock);
    if (!again)
        kv_log_warn("plane", "Dynamo's discovery can't be reached", "reason=%s",
                    kv_log_quote(quoted, sizeof(quoted), words));
}

void kvp_discovery_is(struct kvp_discovery *d, bool current)
{
    pthread_mutex_lock(&d->lock);
    d->info.current = current;
    d->info.left_out = d->table.left_out;
    if (current)
        d->info.error[0] = '\0';
    pthread_mutex_unlock(&d->lock);
}

void kvp_discovery_get_info(struct kvp_discovery *d, struct kvp_discovery_info *ret)
{
    pthread_mutex_lock(&d->lock);
    *ret = d->info;
    pthread_mutex_unlock(&d->lock);
}

void kvp_discovery_tell(struct kvp_discovery *d)
{
    if (d->table.changed && kvp_table_tell(&d->table, d->fn, d->arg) < 0)
        kvp_discovery_failed(d, "workers", "no memory");
}

/* -- etcd -------------------------------------------------------------------------------------- */

static void on_look(void *arg, bool begins)
{
    struct kvp_discovery *d = arg;

    if (begins)
        kvp_table_begin(&d->table);
    else
        kvp_table_end(&d->table);
}

/* Find the bucket of a key, and the name within it. Returns false for other keys. */
static bool split_key(struct kv_str key, char name[KVP_DYNAMO_KEY_MAX + 1],
                      enum kvp_bucket *ret_bucket)
{
    for (int bucket = 0; bucket < KVP_N_BUCKETS; bucket++) {
        const char *prefix = kvp_bucket_prefix((enum kvp_bucket)bucket);
        size_t skip = strlen(prefix), len = key.len - skip;

        if (key.len <= skip || memcmp(key.p, prefix, skip) != 0 || len > KVP_DYNAMO_KEY_MAX ||
            memchr(key.p, '\0', key.len))
            continue;
        memcpy(name, key.p + skip, len);
        name[len] = '\0';
        *ret_bucket = (enum kvp_bucket)bucket;
        return true;
    }
    return false;
}

static void on_key(void *arg, struct kv_str key, struct kv_str value, bool deleted)
{
    struct kvp_discovery *d = arg;
    char name[KVP_DYNAMO_KEY_MAX + 1];
    enum kvp_bucket bucket;

    if (!split_key(key, name, &bucket))
        return;
    if (deleted)
        kvp_table_remove(&d->table, bucket, name);
    else
        (void)kvp_table_put(&d->table, bucket, name, value.p, value.len);
}

static bool wants_look(void *arg)
{
    (void)arg;
    return false;
}

static void on_state(void *arg, bool current)
{
    struct kvp_discovery *d = arg;

    kvp_discovery_is(d, current);
    if (current && d->fn)
        kvp_discovery_tell(d);
}

static void on_failed(void *arg, const char *what, const char *why)
{
    kvp_discovery_failed(arg, what, why);
}

static void run_etcd(struct kvp_discovery *d)
{
    char keys[KVP_N_BUCKETS][KVP_DYNAMO_KEY_MAX + 1];
    struct kvp_etcd_record records[KVP_N_BUCKETS];
    struct kvp_etcd_opts opts = {
        .hosts = (const char *const *)d->url.hosts,
        .n_hosts = d->url.n_hosts,
        .user = d->user,
        .password = d->password,
        .tls_ca = d->tls_ca,
        .tls_cert = d->tls_cert,
        .tls_key = d->tls_key,
        .ttl_s = d->ttl_s,
        .timeout_ms = TIMEOUT_MS,
        .http = d->http,
        .records = records,
        .prefix = d->fn ? KVP_DYNAMO_BOTH : NULL,
        .max_keys = KVP_DISCOVERY_MAX,
        .max_answer = MAX_ANSWER,
        .limits = {KVP_DYNAMO_KEY_MAX, KVP_DISCOVERY_RECORD},
        .stop = &d->stop,
        .wake_fd = d->wake.fd,
        .look = on_look,
        .key = on_key,
        .wants_look = wants_look,
        .state = on_state,
        .failed = on_failed,
        .arg = d,
    };

    for (int b = KVP_N_BUCKETS - 1; b >= 0; b--) {
        if (!d->names[b].len)
            continue;
        snprintf(keys[b], sizeof(keys[b]), "%s%s", kvp_bucket_prefix((enum kvp_bucket)b),
                 kv_buf_cstr(&d->names[b]));
        records[opts.n_records++] =
            (struct kvp_etcd_record){keys[b], d->values[b].data, d->values[b].len};
    }
    kvp_etcd_run(&opts);
}

/* -- life -------------------------------------------------------------------------------------- */

static void *run(void *arg)
{
    struct kvp_discovery *d = arg;

    if (!d->folder)
        run_etcd(d);
    else if (d->fn)
        kvp_folder_follow(d);
    else
        kvp_folder_announce(d);
    return NULL;
}

static void destroy(struct kvp_discovery *d)
{
    kvp_table_fini(&d->table);
    kvp_etcd_url_fini(&d->url);
    for (int i = 0; i < KVP_N_BUCKETS; i++) {
        kv_buf_fini(&d->names[i]);
        kv_buf_fini(&d->values[i]);
    }
    if (d->password)
        explicit_bzero(d->password, strlen(d->password));
    free(d->password);
    free(d->folder);
    free(d->user);
    free(d->tls_ca);
    free(d->tls_cert);
    free(d->tls_key);
    kv_wake_close(&d->wake);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static int copy(const char *text, char **ret)
{
    *ret = text ? strdup(text) : NULL;
    return text && !*ret ? -ENOMEM : 0;
}

/* Write what names must begin with: of "/NS/COMP/EP", or of less. Returns false for another path. */
static bool read_path(const char *path, char *ret, size_t size)
{
    static const char *const parts[] = {"namespace", "component", "endpoint"};
    size_t len = 0;

    *ret = '\0';
    for (size_t i = 0; *path && strcmp(path, "/") != 0; i++) {
        size_t n = strcspn(path + 1, "/");

        if (i == KV_COUNT(parts) || !n || n > KVP_DYNAMO_NAME_MAX)
            return false;
        len += (size_t)snprintf(ret + len, size - len, "%s/%.*s/", parts[i], (int)n, path + 1);
        path += n + 1;
    }
    return true;
}

static int read_where(struct kvp_discovery *d, const char *where, struct kv_error *error)
{
    const char *why = "";
    int err;

    if (strncmp(where, FILE_URL, strlen(FILE_URL)) == 0) {
        if (where[strlen(FILE_URL)] != '/')
            return kv_fail(error, -EINVAL, 0, "file:// needs the full path of a folder");
        return copy(where + strlen(FILE_URL), &d->folder);
    }
    if (!kvp_etcd_url_is(where))
        return kv_fail(error, -EINVAL, 0,
                       "neither etcd://HOST:PORT[/NAMESPACE] nor file:///FOLDER");
    err = kvp_etcd_url_parse(where, &d->url, &why);
    if (err == -EINVAL)
        return kv_fail(error, err, 0, "%s", why);
    if (err == 0 && !read_path(d->url.path, d->table.only, sizeof(d->table.only)))
        return kv_fail(error, -EINVAL, 0, "the path is not /NAMESPACE[/COMPONENT[/ENDPOINT]]");
    return err;
}

static int read_opts(struct kvp_discovery *d, const struct kvp_discovery_opts *o,
                     struct kv_error *error)
{
    int err = read_where(d, o->where, error);

    if (o->ttl_s > MAX_TTL_S)
        return kv_fail(error, -EINVAL, 0, "ttl_s is above %d", MAX_TTL_S);
    d->ttl_s = o->ttl_s ? o->ttl_s : DEFAULT_TTL_S;
    if (err == 0)
        err = copy(o->user, &d->user);
    if (err == 0)
        err = copy(o->password, &d->password);
    if (err == 0)
        err = copy(o->tls_ca, &d->tls_ca);
    if (err == 0)
        err = copy(o->tls_cert, &d->tls_cert);
    if (err == 0)
        err = copy(o->tls_key, &d->tls_key);
    if (err < 0 || d->folder)
        return err;
    d->http = kvbm_http_load();
    return d->http ? 0 : kv_fail(error, -ENOTSUP, 0, "etcd needs libkvbm_http");
}

/* Make a discovery without a thread. */
static int make(const struct kvp_discovery_opts *opts, struct kvp_discovery **ret,
                struct kv_error *error)
{
    struct kvp_discovery *d = calloc(1, sizeof(*d));
    int err;

    if (!d)
        return -ENOMEM;
    d->wake.fd = -1;
    pthread_mutex_init(&d->lock, NULL);
    err = read_opts(d, opts, error);
    if (err == 0)
        err = kv_wake_open(&d->wake);
    if (err < 0)
        destroy(d);
    else
        *ret = d;
    return err;
}

static int start(struct kvp_discovery *d, struct kvp_discovery **ret)
{
    int err = kv_thread_start(&d->thread, "kv-discovery", run, d);

    if (err < 0)
        destroy(d);
    else
        *ret = d;
    return err;
}

int kvp_discovery_check(const char *where, struct kv_error *error)
{
    struct kvp_discovery d = {.folder = NULL};
    int err = read_where(&d, where, error);

    free(d.folder);
    kvp_etcd_url_fini(&d.url);
    return err;
}

int kvp_discovery_subject(const char *where, char ret[KVP_DYNAMO_SUBJECT])
{
    static const char *const parts[] = {"namespace", "component", "endpoint"};
    struct kvp_discovery d = {.folder = NULL};
    struct kv_error why = {0};
    int err = read_where(&d, where, &why);
    const char *at = d.url.path ? d.url.path : "";
    size_t len = 0;

    for (size_t i = 0; i < KV_COUNT(parts) && err == 0; i++) {
        size_t n = *at ? strcspn(at + 1, "/") : 0;

        len += (size_t)snprintf(ret + len, KVP_DYNAMO_SUBJECT - len, "%s.%.*s.", parts[i],
                                n ? (int)n : 1, n ? at + 1 : "*");
        at += *at ? n + 1 : 0;
    }
    if (err == 0)
        snprintf(ret + len, KVP_DYNAMO_SUBJECT - len, "kv-events");
    free(d.folder);
    kvp_etcd_url_fini(&d.url);
    return err;
}

int kvp_discovery_follow(const struct kvp_discovery_opts *opts, kvp_discovery_fn fn, void *arg,
                         struct kvp_discovery **ret, struct kv_error *error)
{
    struct kvp_discovery *d;
    int err = make(opts, &d, error);

    if (err < 0)
        return err;
    d->fn = fn;
    d->arg = arg;
    d->table.nats = opts->nats;
    d->table.changed = true; /* tell also that there is none */
    return start(d, ret);
}

/* Note a record to announce. */
static int note(struct kvp_discovery *d, enum kvp_bucket bucket,
                const struct kvp_dynamo_endpoint *of, uint64_t publisher)
{
    struct kv_buf name = KV_BUF_INIT;

    kvp_dynamo_put_name(&name, of, publisher);
    if (d->folder)
        kvp_dynamo_file_name(&d->names[bucket], kv_buf_cstr(&name), name.len);
    else
        kv_buf_append(&d->names[bucket], kv_buf_cstr(&name), name.len);
    kv_buf_fini(&name);
    return d->names[bucket].error ? d->names[bucket].error : d->values[bucket].error;
}

int kvp_discovery_announce(const struct kvp_discovery_opts *opts,
                           const struct kvp_dynamo_source *source,
                           const struct kvp_dynamo_channel *channel, struct kvp_discovery **ret,
                           struct kv_error *error)
{
    struct kvp_discovery *d;
    int err = make(opts, &d, error);

    if (err < 0)
        return err;
    kvp_dynamo_write_source(&d->values[KVP_SOURCES], source);
    err = note(d, KVP_SOURCES, &source->of, source->publisher);
    if (err == 0 && channel) {
        kvp_dynamo_write_channel(&d->values[KVP_CHANNELS], channel);
        err = note(d, KVP_CHANNELS, &channel->of, channel->publisher);
    }
    if (err == 0)
        return start(d, ret);
    destroy(d);
    return err;
}

void kvp_discovery_close(struct kvp_discovery *d)
{
    if (!d)
        return;
    atomic_store_explicit(&d->stop, true, memory_order_release);
    kv_wake_signal(&d->wake);
    pthread_join(d->thread, NULL);
    destroy(d);
}
