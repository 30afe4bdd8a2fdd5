// SPDX-License-Identifier: Apache-2.0
/*
 * Keys are collected first, since a listing's callback may not call the backend. Each chunk is then
 * read and checked against its key and its checksums; of a snapshot, the parts must be there.
 */
#include "store/object/verify_prefix.h"

#include <stdio.h>

#include "base/core/buf.h"
#include "base/hash/prefix_block.h"
#include "store/object/fetch.h"

struct prefixes {
    struct kvs_store *store;
    kvs_report_fn report;
    void *arg;
    struct kvs_verify_result *result;
    int denied; /* error of the last chunk or listing that this user may not read; 0 */
};

static int note_key(void *arg, const kv_store_entry *entry)
{
    struct kv_buf *keys = arg;

    if (entry->hash && kv_prefix_is_key(entry->hash, entry->hash_len))
        kv_buf_append(keys, entry->hash, KV_PREFIX_KEY);
    return keys->error;
}

static void describe(const struct prefixes *v, const uint8_t *key, const char *problem,
                     const char *reason)
{
    char hex[2 * KV_PREFIX_KEY + 1], line[200];

    if (!v->report)
        return;
    for (size_t i = 0; i < KV_PREFIX_KEY; i++)
        snprintf(hex + 2 * i, 3, "%02x", key[i]);
    snprintf(line, sizeof(line), "prefix cache: chunk %s %s (%s)", hex, problem, reason);
    v->report(v->arg, line);
}

/* True for errors that end the verification: they say nothing of the chunk. */
static bool ends_it(int rc)
{
    return rc == -ENOMEM || kvs_is_outage(rc);
}

/* Return 1 when all parts of a checked snapshot are there, 0 when not, or an error. A part that can't
 * be read is there, and a problem of its own. */
static int has_parts(const struct prefixes *v, const void *data, size_t len)
{
    struct kv_prefix_parts parts;
    int rc = kv_prefix_parts(data, len, &parts) == 0;

    for (size_t i = 0; i < parts.n && rc == 1; i++) {
        uint8_t key[KV_PREFIX_KEY], present = 0;

        kv_prefix_key(KV_PREFIX_PART, parts.first + i * KV_PREFIX_PART_REF, key);
        rc = kvs_exists(v->store, key, sizeof(key), 1, &present);
        rc = rc < 0 ? (ends_it(rc) ? rc : 1) : present;
    }
    return rc;
}

/* Check a chunk that could be read. */
static int check(const struct prefixes *v, const uint8_t *key, const void *data, size_t len)
{
    int rc = kv_prefix_check(key, data, len);

    if (rc < 0) {
        v->result->bad_prefix_chunks++;
        describe(v, key, "is damaged", strerror(-rc));
        return 0;
    }
    v->result->bytes += len;
    rc = key[3] == KV_PREFIX_SNAPSHOT ? has_parts(v, data, len) : 1;
    if (rc == 0) {
        v->result->missing_chunks++;
        describe(v, key, "is a snapshot that lacks a part", "evicted, or deleted");
    }
    return KV_MIN(rc, 0);
}

static int verify_one(struct prefixes *v, const uint8_t *key)
{
    void *data = NULL;
    size_t len = 0;
    int rc = kvs_get_chunk(v->store, key, KV_PREFIX_KEY, &data, &len);

    if (rc == -ENOENT) /* deleted after it was listed */
        return 0;
    if (ends_it(rc))
        return rc;
    if (kvs_is_denied(rc)) {
        v->denied = rc;
        describe(v, key, "can't be read", strerror(-rc));
        return 0;
    }
    v->result->prefix_chunks++;
    if (rc < 0) {
        v->result->bad_prefix_chunks++;
        describe(v, key, rc == -EBADMSG ? "is damaged" : "is unreadable", strerror(-rc));
        return 0;
    }
    rc = check(v, key, data, len);
    free(data);
    return rc;
}

/* List the keys. Those listed before a refusal are verified all the same. */
static int list_keys(struct prefixes *v, struct kv_buf *ret)
{
    int rc = kvs_list_chunks(v->store, note_key, ret);
    char line[200];

    if (!kvs_is_denied(rc))
        return rc;
    v->denied = rc;
    snprintf(line, sizeof(line), "prefix cache: some chunks can't be listed (%s)", strerror(-rc));
    if (v->report)
        v->report(v->arg, line);
    return 0;
}

int kvs_verify_prefixes(struct kvs_store *store, kvs_report_fn report, kvs_progress_fn progress,
                        void *arg, struct kvs_verify_result *ret, int *ret_denied)
{
    struct prefixes v = {store, report, arg, ret, 0};
    struct kv_buf keys = KV_BUF_INIT;
    int rc = list_keys(&v, &keys);

    for (size_t at = 0; at < keys.len && rc >= 0; at += KV_PREFIX_KEY) {
        rc = verify_one(&v, (const uint8_t *)keys.data + at);
        if (rc >= 0 && progress && progress(arg, ret->bytes, 0))
            rc = -ECANCELED;
    }
    kv_buf_fini(&keys);
    if (v.denied)
        *ret_denied = v.denied;
    return rc == -ENOTSUP ? 0 : KV_MIN(rc, 0);
}
