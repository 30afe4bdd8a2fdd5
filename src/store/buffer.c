// SPDX-License-Identifier: Apache-2.0
/** Snapshots of one buffer: kvs_save and kvs_restore with callbacks that this file supplies. */
#include "base/core/error.h"
#include "kv_store.h"

struct source {
    const uint8_t *data;
    size_t left;
};

static int64_t read_source(void *arg, void *buf, size_t cap)
{
    struct source *s = arg;
    size_t n = KV_MIN(s->left, cap);

    if (n)
        memcpy(buf, s->data, n);
    s->data += n;
    s->left -= n;
    return (int64_t)n;
}

int kvs_save_buffer(struct kvs_store *store, const char *name, const void *data, size_t len,
                    const struct kvs_save_opts *opts, struct kvs_result *ret)
{
    struct kvs_save_opts own = KVS_SAVE_OPTS_INIT;
    struct source source = {data, len};

    if ((!data && len) || !kv_sized_or_null(opts, "kvs_save_opts"))
        return -EINVAL;
    if (opts)
        memcpy(&own, opts, KV_MIN(opts->size, sizeof(own)));
    own.size = sizeof(own);
    own.total_bytes = len;
    return kvs_save(store, name, read_source, &source, &own, ret);
}

struct sink {
    const struct kvs_restore_opts *opts;
    uint8_t *data; /* NULL until restore finds the object */
    size_t len, at;
    int rc;
};

/* Allocate the buffer when restore reports the object's length (twice the length with
 * verify_first). */
static int begin_sink(void *arg, uint64_t done, uint64_t total)
{
    kvs_progress_fn progress;
    struct sink *s = arg;

    if (!s->data) {
        s->len = KV_OPT(s->opts, verify_first, false) ? total / 2 : total;
        s->data = malloc(KV_MAX(s->len, (size_t)1));
        if (!s->data)
            s->rc = -ENOMEM;
    }
    progress = KV_OPT(s->opts, progress, NULL);
    return s->rc || (progress && progress(KV_OPT(s->opts, progress_arg, NULL), done, total));
}

static int write_sink(void *arg, const void *data, size_t len)
{
    struct sink *s = arg;

    if (len > s->len - s->at)
        return -EPROTO;
    memcpy(s->data + s->at, data, len);
    s->at += len;
    return 0;
}

int kvs_restore_buffer(struct kvs_store *store, const char *name, void **ret, size_t *ret_len,
                       const struct kvs_restore_opts *opts)
{
    struct kvs_restore_opts own = KVS_RESTORE_OPTS_INIT;
    struct sink sink = {.opts = opts};
    int rc;

    if (!ret || !ret_len || !kv_sized_or_null(opts, "kvs_restore_opts"))
        return -EINVAL;
    if (opts)
        memcpy(&own, opts, KV_MIN(opts->size, sizeof(own)));
    own.size = sizeof(own);
    own.progress = begin_sink;
    own.progress_arg = &sink;
    rc = kvs_restore(store, name, write_sink, &sink, &own, NULL);
    if (rc == -ECANCELED && sink.rc)
        rc = sink.rc;
    if (rc) {
        free(sink.data);
        return rc;
    }
    *ret = sink.data;
    *ret_len = sink.at;
    return 0;
}
