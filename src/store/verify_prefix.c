// SPDX-License-Identifier: Apache-2.0
/*
 * Keys are collected first, since a listing's callback may not call the backend. Each chunk is then
 * read and checked against its key and its checksums; of a snapshot, the parts must be there.
 */
#include "store/verify_prefix.h"

#include <stdio.h>

#include "base/buf.h"
#include "base/prefix_block.h"
#include "store/fetch.h"

struct prefixes {
    struct kvs_store *store;
    kvs_report_fn report;
    void *arg;
    struct kvs_verify_result *result;
};

static int note_key(void *arg, const kv_store_entry *entry)
{
    struct kv_buf *keys = arg;

    if (entry->hash && kv_prefix_is_key(entry->hash, entry->hash_len))
        kv_buf_append(keys, entry->hash, KV_PREFIX_KEY);
    return keys->error;
}

static void describe(const struct prefixes *v, const uint8_t *key, const char *problem)
{
    char hex[2 * KV_PREFIX_KEY + 1], line[200];

    if (!v->report)
        return;
    for (size_t i = 0; i < KV_PREFIX_KEY; i++)
        snprintf(hex + 2 * i, 3, "%02x", key[i]);
    snprintf(line, sizeof(line), "prefix cache: chunk %s is %s", hex, problem);
    v->report(v->arg, line);
}

/* Return 1 when all parts of a checked snapshot are there, 0 when not, or an error. */
static int has_parts(const struct prefixes *v, const void *data, size_t len)
{
    struct kv_prefix_parts parts;
    int rc = kv_prefix_parts(data, len, &parts) == 0;

    for (size_t i = 0; i < parts.n && rc == 1; i++) {
        uint8_t key[KV_PREFIX_KEY], present = 0;

        kv_prefix_key(KV_PREFIX_PART, parts.first + i * KV_PREFIX_PART_REF, key);
        rc = kvs_exists(v->store, key, sizeof(key), 1, &present);
        rc = rc < 0 ? rc : present;
    }
    return rc;
}

static int verify_one(const struct prefixes *v, const uint8_t *key)
{
    void *data = NULL;
    size_t len = 0;
    int rc = kvs_get_chunk(v->store, key, KV_PREFIX_KEY, &data, &len);

    if (rc == -ENOENT) /* deleted after it was listed */
        return 0;
    if (rc < 0 && rc != -EBADMSG)
        return rc;
    v->result->prefix_chunks++;
    if (rc == 0)
        rc = kv_prefix_check(key, data, len);
    if (rc < 0) {
        v->result->bad_prefix_chunks++;
        describe(v, key, "damaged");
        rc = 0;
    } else {
        v->result->bytes += len;
        rc = key[3] == KV_PREFIX_SNAPSHOT ? has_parts(v, data, len) : 1;
        if (rc == 0) {
            v->result->missing_chunks++;
            describe(v, key, "a snapshot that lacks a part (evicted, or deleted)");
        }
    }
    free(data);
    return KV_MIN(rc, 0);
}

int kvs_verify_prefixes(struct kvs_store *store, kvs_report_fn report, kvs_progress_fn progress,
                        void *arg, struct kvs_verify_result *ret)
{
    const struct prefixes v = {store, report, arg, ret};
    struct kv_buf keys = KV_BUF_INIT;
    int rc = kvs_list_chunks(store, note_key, &keys);

    for (size_t at = 0; at < keys.len && rc >= 0; at += KV_PREFIX_KEY) {
        rc = verify_one(&v, (const uint8_t *)keys.data + at);
        if (rc >= 0 && progress && progress(arg, ret->bytes, 0))
            rc = -ECANCELED;
    }
    kv_buf_fini(&keys);
    return rc == -ENOTSUP ? 0 : KV_MIN(rc, 0);
}
