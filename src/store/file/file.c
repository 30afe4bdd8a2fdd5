// SPDX-License-Identifier: Apache-2.0
/** The file store's tables. */
#include "store/file/file_impl.h"

static int put_manifest(kv_store_v1 *h, const char *name, const uint8_t *data, size_t len)
{
    return name ? kvs_file_publish(h, name, data, len) : -EINVAL;
}

static int get_chunk(kv_store_v1 *h, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
                     size_t *out_len)
{
    struct kvs_file_value value = {0};
    int rc = out_data && out_len ? kvs_file_get_chunk(h, hash, hash_len, &value) : -EINVAL;

    if (rc == 0) {
        *out_data = value.data;
        *out_len = value.len;
    }
    return rc;
}

const kv_store_vtable *kvs_file_vtable(void)
{
    static const kv_store_vtable table = {
        .version = KV_STORE_VERSION_2,
        .open = kvs_file_open,
        .close = kvs_file_close,
        .put_chunk = kvs_file_put_chunk,
        .get_chunk = get_chunk,
        .put_manifest = put_manifest,
        .get_manifest = kvs_file_get_manifest,
        .delete_manifest = kvs_file_delete_manifest,
        .prefetch_chunks = kvs_file_prefetch,
    };

    return &table;
}

static int flush(kv_store_v1 *h)
{
    return kvs_file_publish(h, NULL, NULL, 0);
}

static int get_chunks(kv_store_v1 *h, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t **out_data, size_t *out_len)
{
    int found = 0, rc = 0;

    for (size_t i = 0; i < n; i++)
        out_data[i] = NULL;
    for (size_t i = 0; i < n && rc == 0; i++) {
        rc = get_chunk(h, hashes + i * hash_len, hash_len, &out_data[i], &out_len[i]);
        found += rc == 0;
        if (rc == -ENOENT || rc == -EBADMSG) {
            out_len[i] = rc == -EBADMSG ? KV_STORE_LEN_BAD : 0;
            rc = 0;
        }
    }
    for (size_t i = 0; i < n && rc < 0; i++) {
        free(out_data[i]);
        out_data[i] = NULL;
    }
    return rc < 0 ? rc : found;
}

struct pieces {
    kv_store_piece_fn each;
    void *arg;
    int stopped; /* error that each() returned, as opposed to an error of the file */
};

static int give_piece(void *arg, uint64_t offset, const uint8_t *piece, size_t len)
{
    struct pieces *p = arg;

    p->stopped = p->each(p->arg, offset, piece, len);
    return p->stopped ? -ECANCELED : 0;
}

static int stream_chunk(kv_store_v1 *h, const uint8_t *hash, size_t hash_len, uint8_t *buf,
                        size_t room, kv_store_piece_fn each, void *arg)
{
    struct pieces pieces = {.each = each, .arg = arg};
    struct kvs_file_value value = {.each = give_piece, .arg = &pieces, .buf = buf, .room = room};
    int rc = buf && room && each ? kvs_file_get_chunk(h, hash, hash_len, &value) : -EINVAL;

    /* true unless the value was handed out in pieces */
    if (rc == 0 && (value.data || value.len == 0))
        rc = give_piece(&pieces, 0, value.data ? value.data : buf, value.len);
    free(value.data);
    return pieces.stopped ? pieces.stopped : rc;
}

static int get_parts(kv_store_v1 *h, const uint8_t *hash, size_t hash_len,
                     const struct iovec *parts, size_t n_parts, size_t *out_len)
{
    static const struct iovec none;
    /* a value without a list of parts is returned in memory of its own */
    struct kvs_file_value value = {.parts = n_parts ? parts : &none, .n_parts = n_parts};
    int rc = -EINVAL;

    if (out_len && (parts || !n_parts) && kvs_parts_len(parts, n_parts, SIZE_MAX / 2, &value.room))
        rc = kvs_file_get_chunk(h, hash, hash_len, &value);
    if (rc == 0 || rc == -EMSGSIZE)
        *out_len = value.len;
    return rc;
}

static int put_chunks(kv_store_v1 *h, const uint8_t *hashes, size_t hash_len, size_t n,
                      const uint8_t *const *data, const size_t *data_len, int *ret_each)
{
    int rc = 0;

    for (size_t i = 0; i < n && rc >= 0; i++) {
        rc = kvs_file_put_chunk(h, hashes + i * hash_len, hash_len, data[i], data_len[i]);
        if (ret_each)
            ret_each[i] = rc;
    }
    return KV_MIN(rc, 0);
}

const kv_store_ext *kvs_file_ext(void)
{
    static const kv_store_ext table = {
        .size = sizeof(table),
        .version = KV_STORE_EXT_VERSION,
        .exists_chunks = kvs_file_exists,
        .get_chunks = get_chunks,
        .put_chunks = put_chunks,
        .delete_chunk = kvs_file_delete_chunk,
        .delete_chunk_if = kvs_file_delete_chunk_if,
        .list_manifests = kvs_file_list_manifests,
        .list_chunks = kvs_file_list_chunks,
        .list_refs = kvs_file_list_refs,
        .touch_chunks = kvs_file_touch,
        .flush = flush,
        .sweep_chunks = kvs_file_sweep,
        .stats = kvs_file_stats,
        .stream_chunk = stream_chunk,
        .get_parts = get_parts,
        .put_parts = kvs_file_put_parts,
        .get_ranges = kvs_file_get_ranges,
    };

    return &table;
}
