// SPDX-License-Identifier: Apache-2.0
/* Directories of agents: options, state, and the thread. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "peer/directory/directory.h"
#include "peer/directory/peer_record.h"
#include "plane/http_abi.h"

#define MAX_PEERS 65536
#define MAX_TTL_S 3600
#define MAX_PASSWORD 4096

/* ---- state ---- */

void directory_failed(struct kvbm_directory *d, const char *what, const char *why)
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
        kv_log_warn("kvbm", "the directory of peers can't be read", "reason=%s",
                    kv_log_quote(quoted, sizeof(quoted), words));
}

void directory_is(struct kvbm_directory *d, bool current, bool registered, uint64_t left_out)
{
    bool first;

    pthread_mutex_lock(&d->lock);
    first = left_out && !d->info.left_out;
    d->info.current = current;
    d->info.registered = registered;
    d->info.n_peers = (uint32_t)d->peers.n;
    d->info.left_out = left_out;
    if (current)
        d->info.error[0] = '\0';
    pthread_mutex_unlock(&d->lock);
    if (first)
        kv_log_warn("kvbm", "peers of a directory are left out", "n=%llu max_peers=%zu",
                    (unsigned long long)left_out, d->peers.max);
}

int kvbm_directory_get_info(struct kvbm_directory *d, struct kvbm_directory_info *ret)
{
    if (!d || !kv_sized(ret, "kvbm_directory_info"))
        return -EINVAL;
    pthread_mutex_lock(&d->lock);
    KV_GIVE(ret, &d->info);
    pthread_mutex_unlock(&d->lock);
    return 0;
}

/* ---- options ---- */

static int refuse(const char *why)
{
    kv_log_error("kvbm", "a directory's options are refused", "why=\"%s\"", why);
    return -EINVAL;
}

static int copy(const char *text, char **ret)
{
    *ret = text ? strdup(text) : NULL;
    return text && !*ret ? -ENOMEM : 0;
}

/* Parse "etcd://HOST:PORT[,HOST:PORT]/PREFIX". */
static int parse_etcd(struct kvbm_directory *d)
{
    const char *why, *slash;
    int err = kvp_etcd_url_parse(d->where, &d->etcd.url, &why);
    size_t len;

    if (err < 0)
        return err == -EINVAL ? refuse(why) : err;
    slash = d->etcd.url.path;
    len = strlen(slash);
    while (len && slash[len - 1] == '/')
        len--;
    if (!len)
        return refuse("etcd://HOST:PORT/PREFIX needs a prefix");
    if (len > ETCD_MAX_PREFIX - 1)
        return refuse("the prefix has more than 254 bytes");
    snprintf(d->etcd.prefix, sizeof(d->etcd.prefix), "%.*s/", (int)len, slash);
    return 0;
}

static int read_password(struct kvbm_directory *d, const char *path)
{
    struct kv_buf text = KV_BUF_INIT;
    int err = peer_file_read(path, MAX_PASSWORD, &text);

    if (err == 0 && text.len)
        text.len = strcspn(kv_buf_cstr(&text), "\r\n");
    if (err == 0 && !text.len)
        err = refuse("the password's file is empty");
    if (err == 0)
        err = copy(kv_buf_cstr(&text), &d->etcd.password);
    if (err < 0 && err != -EINVAL)
        kv_log_error("kvbm", "the password's file can't be read", "error=\"%s\"", strerror(-err));
    if (text.data)
        explicit_bzero(text.data, text.capacity);
    kv_buf_fini(&text);
    return err;
}

static int read_etcd(struct kvbm_directory *d, const struct kvbm_directory_opts *opts)
{
    const char *user = KV_OPT(opts, user, NULL), *file = KV_OPT(opts, password_file, NULL);
    int err;

    d->etcd.ttl_s = KV_OPT(opts, ttl_s, 10);
    d->etcd.timeout_ms = KV_OPT(opts, timeout_ms, 3000);
    if (d->etcd.ttl_s > MAX_TTL_S)
        return refuse("ttl_s is above 3600");
    if (!user != !file)
        return refuse("user and password_file come together");
    if (d->has_self && !etcd_peer_is_valid(&d->self))
        return refuse("self needs a name, an incarnation, and endpoints that are valid");
    err = parse_etcd(d);
    if (err == 0)
        err = copy(KV_OPT(opts, tls_ca, NULL), &d->etcd.tls_ca);
    if (err == 0)
        err = copy(KV_OPT(opts, tls_cert, NULL), &d->etcd.tls_cert);
    if (err == 0)
        err = copy(KV_OPT(opts, tls_key, NULL), &d->etcd.tls_key);
    if (err == 0)
        err = copy(user, &d->etcd.user);
    if (err == 0 && file)
        err = read_password(d, file);
    if (err == 0) {
        d->etcd.http = kvbm_http_load();
        err = d->etcd.http ? 0 : -ENOTSUP;
    }
    return err;
}

static int read_self(struct kvbm_directory *d, const struct kvbm_directory_peer *self)
{
    if (!self)
        return 0;
    if (!kv_sized(self, "kvbm_directory_peer"))
        return -EINVAL;
    if (self->size < sizeof(*self))
        return refuse("self is incomplete");
    d->self = *self;
    d->self.size = sizeof(d->self);
    d->has_self = true;
    return self->n_endpoints <= KVBM_MAX_PEER_ENDPOINTS ? 0 : refuse("self has too many endpoints");
}

static int check_list(const char *list)
{
    for (const char *p = list + strspn(list, ", \t"); *p;) {
        char text[KVBM_MAX_PEER_ENDPOINT + 2];
        size_t len = strcspn(p, ", \t");
        const char *why;

        snprintf(text, sizeof(text), "%.*s", (int)KV_MIN(len, sizeof(text)), p);
        if (!peer_endpoint_is_valid(text, &why))
            return refuse(why);
        p += len + strspn(p + len, ", \t");
    }
    return 0;
}

static int read_opts(struct kvbm_directory *d, const struct kvbm_directory_opts *opts)
{
    size_t max = KV_OPT(opts, max_peers, 1024);
    int err;

    if (max > MAX_PEERS)
        return refuse("max_peers is above 65536");
    peer_list_init(&d->peers, max, KV_OPT(opts, changed, NULL), KV_OPT(opts, arg, NULL));
    d->reread_ms = KV_OPT(opts, reread_ms, 1000);
    err = read_self(d, KV_OPT(opts, self, NULL));
    if (err == 0)
        err = copy(opts->peers, &d->where);
    if (err < 0)
        return err;
    if (kvp_etcd_url_is(d->where)) {
        d->kind = DIRECTORY_ETCD;
        return read_etcd(d, opts);
    }
    if (strncmp(d->where, "file:", 5) == 0) {
        struct kv_buf text = KV_BUF_INIT;

        d->kind = DIRECTORY_FILE;
        memmove(d->where, d->where + 5, strlen(d->where + 5) + 1);
        err = peer_file_read(d->where, 1u << 20, &text);
        kv_buf_fini(&text);
        if (err < 0)
            kv_log_error("kvbm", "the file of peers can't be read", "error=\"%s\"", strerror(-err));
        return err;
    }
    return check_list(d->where);
}

/* ---- directories ---- */

static void *run(void *arg)
{
    struct kvbm_directory *d = arg;

    if (d->kind == DIRECTORY_ETCD)
        etcd_run(d);
    else
        peer_file_run(d);
    return NULL;
}

static void destroy(struct kvbm_directory *d)
{
    kvp_etcd_url_fini(&d->etcd.url);
    if (d->etcd.password)
        explicit_bzero(d->etcd.password, strlen(d->etcd.password));
    free(d->etcd.password);
    free(d->etcd.user);
    free(d->etcd.tls_ca);
    free(d->etcd.tls_cert);
    free(d->etcd.tls_key);
    free(d->where);
    peer_list_fini(&d->peers);
    kv_wake_close(&d->wake);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

int kvbm_directory_open(const struct kvbm_directory_opts *opts, struct kvbm_directory **ret)
{
    struct kvbm_directory *d;
    int err;

    if (!ret || !kv_sized(opts, "kvbm_directory_opts") ||
        opts->size < offsetof(struct kvbm_directory_opts, arg) || !opts->peers || !opts->changed)
        return -EINVAL;
    d = calloc(1, sizeof(*d));
    if (!d)
        return -ENOMEM;
    d->wake.fd = -1;
    d->info.size = sizeof(d->info);
    pthread_mutex_init(&d->lock, NULL);
    err = read_opts(d, opts);
    if (err == 0)
        err = kv_wake_open(&d->wake);
    if (err == 0)
        err = kv_thread_start(&d->thread, "kvbm-directory", run, d);
    if (err < 0)
        destroy(d);
    else
        *ret = d;
    return err;
}

bool directory_is_own_thread(const struct kvbm_directory *d)
{
    return pthread_equal(d->thread, pthread_self());
}

void kvbm_directory_close(struct kvbm_directory *d)
{
    if (!d)
        return;
    if (directory_is_own_thread(d)) {
        kv_log_error("kvbm", "a directory can't be closed by its own callback: it goes on", NULL);
        return;
    }
    atomic_store_explicit(&d->stop, true, memory_order_release);
    kv_wake_signal(&d->wake);
    pthread_join(d->thread, NULL);
    destroy(d);
}
