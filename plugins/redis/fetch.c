// SPDX-License-Identifier: Apache-2.0
/* Getting chunks: from the server, from prefetched values, and from the save in progress. */
#include "base/core/log.h"
#include "redis/scripts.h"
#include "redis/store.h"

/* Delete @key if it still has @value, its time of use apart. Returns 1: deleted; 0; or an error,
 * -ENOTSUP where scripts are forbidden. */
static int remove_same(kv_store_v1 *self, const char *key, size_t key_len, const char *value,
                       size_t len)
{
    struct rds_batch batch = {0};
    const struct resp_value *reply;
    int err;

    rds_batch_begin(&batch, 5);
    rds_batch_word(&batch, "EVAL");
    rds_batch_word(&batch, RDS_LUA_DROP);
    rds_batch_word(&batch, "1");
    rds_batch_key(&batch, key, key_len);
    rds_batch_payload(&batch, value, len);
    err = rds_net_run(&self->net, &batch);
    reply = err == 0 ? &batch.cmds[0].reply : NULL;
    if (reply && rds_no_script(reply)) {
        self->no_scripts = true;
        err = -ENOTSUP;
    } else if (reply) {
        err = reply->type == RESP_INT ? reply->num == 1 : rds_reply_error(reply, "EVAL");
    }
    rds_batch_fini(&batch);
    return err;
}

void rds_drop_bad(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const char *value,
                  size_t len)
{
    char key[RDS_KEY_SIZE], text[300];
    size_t key_len = rds_chunk_key(self, hash, hash_len, key);
    struct rds_entry *entry;

    key[key_len] = '\0';
    kv_log_error("redis", "stored bytes don't verify", "key=%s len=%zu",
                 kv_log_quote(text, sizeof(text), key), len);
    pthread_mutex_lock(&self->lock);
    self->stats.bad_chunks++;
    if (self->table.n >= RDS_MAX_NAMES)
        rds_table_purge(&self->table, rds_idle_name);
    entry = rds_table_add(&self->table, hash, hash_len);
    if (entry) {
        entry->known = false;
        entry->gone = entry->ref && !entry->value; /* a put brings it back */
    }
    if (rds_ends_like_ours(value, len) && remove_same(self, key, key_len, value, len) == -ENOTSUP &&
        entry)
        entry->bad = true;
    pthread_mutex_unlock(&self->lock);
}

/* Take the bytes if the handle has them: a copy, or a prefetched value. Returns 1; 0: not here;
 * -ENOMEM. */
static int take_local(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, char **ret,
                      size_t *ret_len)
{
    struct rds_entry *entry = rds_table_find(&self->table, hash, hash_len);

    if (!entry || !entry->value)
        return 0;
    if (entry->ref) {
        *ret = malloc(entry->len);
        if (!*ret)
            return -ENOMEM;
        memcpy(*ret, entry->value, entry->len);
    } else {
        *ret = KV_STEAL(entry->value);
        self->cached -= entry->len;
    }
    *ret_len = entry->len;
    return 1;
}

/* Get the value of one key. Returns 0, -ENOENT, or another error. */
int rds_get_value(kv_store_v1 *self, const char *key, size_t key_len, char **ret, size_t *ret_len)
{
    struct rds_batch batch = {0};
    struct resp_value *reply;
    int err;

    rds_batch_begin(&batch, 2);
    rds_batch_word(&batch, "GET");
    rds_batch_key(&batch, key, key_len);
    err = rds_net_run(&self->net, &batch);
    if (err == 0) {
        reply = &batch.cmds[0].reply;
        if (reply->type == RESP_BULK) {
            *ret = KV_STEAL(reply->str);
            *ret_len = reply->len;
            self->stats.bytes_read += reply->len;
        } else {
            err = reply->type == RESP_NULL ? -ENOENT : rds_reply_error(reply, "GET");
        }
    }
    rds_batch_fini(&batch);
    return err;
}

/* Note that the server has a verified chunk, so that a put of it is a hit. */
static void note_known(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    struct rds_entry *entry;

    pthread_mutex_lock(&self->lock);
    if (self->table.n >= RDS_MAX_NAMES)
        rds_table_purge(&self->table, rds_idle_name);
    entry = rds_table_add(&self->table, hash, hash_len);
    if (entry && !entry->ref)
        entry->known = true;
    pthread_mutex_unlock(&self->lock);
}

int rds_get_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
                  size_t *out_len)
{
    char key[RDS_KEY_SIZE], *value = NULL;
    size_t key_len, len = 0, content = 0;
    int err = rds_check_hash(hash, hash_len);

    if (err < 0)
        return rds_failed(self, err);
    key_len = rds_chunk_key(self, hash, hash_len, key);
    pthread_mutex_lock(&self->lock);
    self->stats.gets++;
    err = take_local(self, hash, hash_len, &value, &len);
    if (err == 0) {
        err = rds_get_value(self, key, key_len, &value, &len);
        self->stats.get_misses += err == -ENOENT;
    }
    pthread_mutex_unlock(&self->lock);
    if (err < 0)
        return err == -ENOENT ? err : rds_failed(self, err);
    if (!rds_verify_chunk(value, len, hash, hash_len, &content)) {
        rds_drop_bad(self, hash, hash_len, value, len);
        free(value);
        return rds_failed(self, -EBADMSG);
    }
    note_known(self, hash, hash_len);
    *out_data = (uint8_t *)value;
    *out_len = content;
    return 0;
}

/* -- deletion ---------------------------------------------------------------------------------- */

static int delete_same(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                       size_t data_len)
{
    struct rds_entry *entry = rds_table_find(&self->table, hash, hash_len);
    char key[RDS_KEY_SIZE], *value = NULL;
    size_t key_len = rds_chunk_key(self, hash, hash_len, key), len = 0, content = 0;
    int err;

    if (entry && entry->ref) /* of the save in progress */
        return 0;
    err = rds_get_value(self, key, key_len, &value, &len);
    if (err)
        return err == -ENOENT ? 0 : err;
    if (value && rds_verify_chunk(value, len, hash, hash_len, &content) && content == data_len &&
        memcmp(value, data, data_len) == 0)
        err = remove_same(self, key, key_len, value, len);
    if (err == 1 && entry) /* another handle may have put the chunk */
        rds_forget_chunk(self, entry);
    free(value);
    return err;
}

int rds_delete_chunk_if(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                        const uint8_t *data, size_t len)
{
    int err = rds_check_hash(hash, hash_len);

    if (err == 0) {
        pthread_mutex_lock(&self->lock);
        err = self->no_scripts ? -ENOTSUP : delete_same(self, hash, hash_len, data, len);
        pthread_mutex_unlock(&self->lock);
    }
    return err < 0 && err != -ENOTSUP ? rds_failed(self, err) : err;
}

/* -- prefetch ---------------------------------------------------------------------------------- */

static bool cached_value(const struct rds_entry *entry)
{
    return !entry->ref && entry->value;
}

/* Keep a prefetched value, up to the limit. Values of older prefetches are dropped first. */
static void keep(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, struct resp_value *reply)
{
    struct rds_entry *entry;

    if (reply->type != RESP_BULK || reply->len > self->net.uri.cache_bytes - self->cached)
        return;
    entry = rds_table_add(&self->table, hash, hash_len);
    if (!entry || entry->value)
        return;
    entry->value = KV_STEAL(reply->str);
    entry->len = reply->len;
    self->cached += entry->len;
}

/* Prefetch one batch. Returns 1 when there was no more room. */
static int prefetch_some(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    uint64_t room = self->net.uri.cache_bytes - self->cached;
    struct rds_batch batch = {.room = &room};
    char key[RDS_KEY_SIZE];
    bool skipped = false;
    int err;

    for (size_t i = 0; i < n; i++) {
        rds_batch_begin(&batch, 2);
        rds_batch_word(&batch, "GET");
        rds_batch_key(&batch, key, rds_chunk_key(self, hashes + i * hash_len, hash_len, key));
    }
    err = rds_net_run(&self->net, &batch);
    for (size_t i = 0; err == 0 && i < n; i++) {
        struct resp_value *reply = &batch.cmds[i].reply;

        skipped |= reply->type == RESP_SKIPPED;
        if (reply->type != RESP_BULK && reply->type != RESP_SKIPPED)
            continue;
        self->stats.bytes_read += reply->len;
        self->usual_len = reply->len;
        keep(self, hashes + i * hash_len, hash_len, reply);
    }
    rds_batch_fini(&batch);
    return err < 0 ? err : skipped;
}

/* Number of chunks to ask for at once: a value beyond the limit would be transferred and
 * dropped. */
static size_t window(const kv_store_v1 *self)
{
    uint64_t room = self->net.uri.cache_bytes - self->cached;
    uint64_t fit = self->usual_len > 0 ? room / self->usual_len : RDS_BATCH_GETS;

    return (size_t)KV_MIN(fit, (uint64_t)RDS_BATCH_GETS);
}

int rds_prefetch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    int rc = n > 0 ? rds_check_hash(hashes, hash_len) : 0;

    if (rc < 0)
        return rds_failed(self, rc);
    pthread_mutex_lock(&self->lock);
    /* values that earlier restores did not take */
    if (self->cached > self->net.uri.cache_bytes / 2) {
        rds_table_purge(&self->table, cached_value);
        self->cached = 0;
    }
    for (size_t done = 0, some; rc == 0 && done < n; done += some) {
        some = KV_MIN(n - done, window(self));
        if (some == 0)
            break; /* gets fetch the rest one by one */
        rc = prefetch_some(self, hashes + done * hash_len, hash_len, some);
    }
    pthread_mutex_unlock(&self->lock);
    return rc < 0 ? rds_failed(self, rc) : 0;
}
