// SPDX-License-Identifier: Apache-2.0
/*
 * Saving an object: cut, name each chunk by its bytes, put it, and publish the manifest last, so
 * that a reader sees the object whole or not at all. One chunk is in memory at a time besides the
 * window it is cut from; the manifest, 20 bytes per chunk, is held to the end.
 */
#include "base/clock.h"
#include "base/log.h"
#include "store/cut.h"

struct saving {
    struct kvs_store *store;
    const char *name;
    const struct kvs_save_opts *opts;
    struct kvs_cutter cutter;
    struct kvs_manifest manifest;
    struct kvs_result result;
};

static int refuse(const struct saving *save, int rc, const char *what)
{
    char name[256];

    kv_log_error("store", what, "object=%s chunk=%zu error=%d",
                 kv_log_quote(name, sizeof(name), save->name), save->manifest.n_chunks, -rc);
    return rc;
}

static int put(struct saving *save, const uint8_t *data, size_t len)
{
    uint8_t key[16];
    int rc;

    kvs_chunk_key(data, len, key);
    rc = kvs_put_chunk(save->store, key, sizeof(key), data, len);
    if (rc < 0)
        return refuse(save, rc, "a chunk can't be stored");
    if (rc == 0) {
        save->result.new_chunks++;
        save->result.new_bytes += len;
    }
    return kvs_manifest_add(&save->manifest, key, (uint32_t)len);
}

static int put_all(struct saving *save)
{
    kvs_progress_fn progress = KV_OPT(save->opts, progress, NULL);
    void *arg = KV_OPT(save->opts, progress_arg, NULL);
    uint64_t total = KV_OPT(save->opts, total_bytes, 0);

    for (;;) {
        const uint8_t *data;
        size_t len;
        int rc = kvs_cutter_next(&save->cutter, &save->manifest, &data, &len);

        if (rc < 0)
            return refuse(save, rc, "the object can't be read");
        if (rc == 0)
            return 0;
        rc = put(save, data, len);
        if (rc)
            return rc;
        if (progress && progress(arg, save->manifest.bytes, total))
            return -ECANCELED;
    }
}

static int publish(struct saving *save)
{
    const char *fingerprint = KV_OPT(save->opts, fingerprint, NULL);
    struct kv_buf bytes = KV_BUF_INIT;
    int rc;

    save->manifest.format = save->cutter.format;
    save->manifest.created_s = kv_wall_ns() / KV_NS_PER_S;
    save->manifest.fingerprint = fingerprint ? strdup(fingerprint) : NULL;
    rc = fingerprint && !save->manifest.fingerprint ? -ENOMEM : 0;
    if (!rc)
        rc = kvs_manifest_encode(&save->manifest, &bytes);
    if (!rc) {
        save->result.manifest_bytes = bytes.len;
        rc = kvs_put_manifest(save->store, save->name, bytes.data, bytes.len);
    }
    kv_buf_fini(&bytes);
    return rc < 0 ? refuse(save, rc, "the object can't be published") : 0;
}

static void tell(const struct saving *save, struct kvs_result *ret)
{
    struct kvs_result result = save->result;

    if (!ret)
        return;
    result.size = ret->size;
    result.bytes = save->manifest.bytes;
    result.n_chunks = save->manifest.n_chunks;
    result.format = save->manifest.format;
    memcpy(ret, &result, KV_MIN(ret->size, sizeof(result)));
}

int kvs_save(struct kvs_store *store, const char *name, kvs_read_fn read, void *arg,
             const struct kvs_save_opts *opts, struct kvs_result *ret)
{
    struct saving save = {.store = store, .name = name, .opts = opts};
    const char *fingerprint = KV_OPT(opts, fingerprint, NULL);
    int rc;

    if (!store || !name || !read ||
        (fingerprint && strnlen(fingerprint, KVS_FINGERPRINT_MAX + 1) > KVS_FINGERPRINT_MAX))
        return -EINVAL;
    rc = kvs_cutter_init(&save.cutter, opts, read, arg);
    if (rc)
        refuse(&save, rc, "the object can't be read, or the options are out of range");
    if (!rc)
        rc = put_all(&save);
    if (!rc)
        rc = publish(&save);
    if (!rc)
        tell(&save, ret);
    kvs_cutter_fini(&save.cutter);
    free(save.manifest.fingerprint);
    free(save.manifest.chunks);
    free(save.manifest.weaves);
    return rc;
}
