// SPDX-License-Identifier: Apache-2.0
#include "base/core/log.h"
#include "redis/store.h"

static void lock(kv_store_v1 *self)
{
    pthread_mutex_lock(&self->lock);
}

static int unlock(kv_store_v1 *self, int rc)
{
    self->stats.errors += rc < 0;
    pthread_mutex_unlock(&self->lock);
    return rc;
}

/* Add one command per chunk: @word KEY [@tail ...]. */
static void add_each(kv_store_v1 *self, struct rds_batch *batch, const char *word,
                     const uint8_t *hash, size_t hash_len, const char *from, const char *to)
{
    char key[RDS_KEY_SIZE];

    rds_batch_begin(batch, from ? 4 : 2);
    rds_batch_word(batch, word);
    rds_batch_key(batch, key, rds_chunk_key(self, hash, hash_len, key));
    if (from) {
        rds_batch_word(batch, from);
        rds_batch_word(batch, to);
    }
}

/* -- many chunks ------------------------------------------------------------------------------- */

/* Judge the last bytes of a chunk's value on the server. */
static uint8_t judge_tail(const struct resp_value *reply)
{
    bool bulk = reply->type == RESP_BULK;

    if (bulk && reply->len == RDS_TRAILER && memcmp(reply->str, RDS_CHUNK_MAGIC, 8) == 0)
        return 1;
    /* GETRANGE answers an empty text for a missing key, as for an empty value. */
    return (bulk && reply->len == 0) || reply->type == RESP_NULL ? 0 : KV_STORE_PRESENT_BAD;
}

static int exists_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                         uint8_t *ret_present)
{
    struct rds_batch batch = {0};
    int err = n > 0 ? rds_check_hash(hashes, hash_len) : 0;

    if (err < 0)
        return rds_failed(self, err);
    for (size_t i = 0; i < n; i++)
        add_each(self, &batch, "GETRANGE", hashes + i * hash_len, hash_len, "-32", "-1");
    lock(self);
    err = rds_net_run(&self->net, &batch);
    for (size_t i = 0; err == 0 && i < n; i++) {
        const struct resp_value *reply = &batch.cmds[i].reply;
        const struct rds_entry *entry =
            rds_table_find(&self->table, hashes + i * hash_len, hash_len);

        if (reply->type == RESP_ERROR && strncmp(reply->str, "WRONGTYPE", 9) != 0)
            err = rds_reply_error(reply, "GETRANGE");
        ret_present[i] = entry && entry->ref && entry->value ? 1 : judge_tail(reply);
    }
    rds_batch_fini(&batch);
    return unlock(self, err);
}

static int get_some(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                    struct rds_batch *batch)
{
    int err;

    for (size_t i = 0; i < n; i++)
        add_each(self, batch, "GET", hashes + i * hash_len, hash_len, NULL, NULL);
    lock(self);
    err = rds_net_run(&self->net, batch);
    for (size_t i = 0; err == 0 && i < n; i++) {
        const struct resp_value *reply = &batch->cmds[i].reply;

        self->stats.gets++;
        self->stats.get_misses += reply->type == RESP_NULL;
        if (reply->type == RESP_BULK)
            self->stats.bytes_read += reply->len;
        else if (reply->type != RESP_NULL)
            err = rds_reply_error(reply, "GET");
    }
    return unlock(self, err);
}

static int get_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t **out_data, size_t *out_len)
{
    int found = 0, err = n > 0 ? rds_check_hash(hashes, hash_len) : 0;
    size_t done = 0;

    while (err == 0 && done < n) {
        struct rds_batch batch = {0};
        size_t some = KV_MIN(n - done, (size_t)RDS_BATCH_GETS);

        err = get_some(self, hashes + done * hash_len, hash_len, some, &batch);
        for (size_t i = 0; err == 0 && i < some; i++) {
            const uint8_t *hash = hashes + (done + i) * hash_len;
            struct resp_value *reply = &batch.cmds[i].reply;
            size_t content = 0;

            out_data[done + i] = NULL;
            out_len[done + i] = 0;
            if (reply->type == RESP_BULK &&
                rds_verify_chunk(reply->str, reply->len, hash, hash_len, &content)) {
                out_len[done + i] = content;
                out_data[done + i] = (uint8_t *)KV_STEAL(reply->str);
                found++;
            } else if (reply->type == RESP_BULK) {
                out_len[done + i] = KV_STORE_LEN_BAD;
                rds_drop_bad(self, hash, hash_len, reply->str, reply->len);
            } else { /* of the save in progress */
                int rc =
                    rds_get_chunk(self, hash, hash_len, &out_data[done + i], &out_len[done + i]);

                found += rc == 0;
                if (rc < 0)
                    out_len[done + i] = rc == -EBADMSG ? KV_STORE_LEN_BAD : 0;
            }
        }
        rds_batch_fini(&batch);
        done += err == 0 ? some : 0;
    }
    for (size_t i = 0; err < 0 && i < done; i++) {
        free(out_data[i]);
        out_data[i] = NULL;
    }
    return err < 0 ? err : found;
}

static int put_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      const uint8_t *const *data, const size_t *data_len, int *ret_each)
{
    int err = 0;

    for (size_t i = 0; i < n; i++) {
        int rc = kv_store_get_vtable()->put_chunk(self, hashes + i * hash_len, hash_len, data[i],
                                                  data_len[i]);

        if (ret_each)
            ret_each[i] = rc;
        if (rc < 0)
            err = rc;
    }
    return err;
}

static int new_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t *ret_new)
{
    int err = n > 0 ? rds_check_hash(hashes, hash_len) : 0;

    if (err < 0)
        return rds_failed(self, err);
    lock(self);
    for (size_t i = 0; i < n; i++) {
        const struct rds_entry *entry =
            rds_table_find(&self->table, hashes + i * hash_len, hash_len);

        ret_new[i] = !entry || entry->sent || !entry->known;
    }
    return unlock(self, 0);
}

static int delete_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    struct rds_batch batch = {0};
    struct rds_entry *entry;
    int err = rds_check_hash(hash, hash_len);

    if (err < 0)
        return rds_failed(self, err);
    add_each(self, &batch, "DEL", hash, hash_len, NULL, NULL);
    lock(self);
    entry = rds_table_find(&self->table, hash, hash_len);
    if (entry)
        rds_forget_chunk(self, entry);
    err = rds_net_run(&self->net, &batch);
    if (err == 0 && batch.cmds[0].reply.type != RESP_INT)
        err = rds_reply_error(&batch.cmds[0].reply, "DEL");
    rds_batch_fini(&batch);
    return unlock(self, err);
}

static int touch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    struct rds_batch batch = {0};
    int found = 0, err = n > 0 ? rds_check_hash(hashes, hash_len) : 0;

    if (err < 0)
        return rds_failed(self, err);
    for (size_t i = 0; i < n; i++)
        rds_add_use(self, &batch, hashes + i * hash_len, hash_len);
    lock(self);
    err = rds_net_run(&self->net, &batch);
    for (size_t i = 0; err == 0 && i < n; i++) {
        const struct resp_value *reply = &batch.cmds[i].reply;

        if (reply->type != RESP_INT)
            err = rds_no_script(reply) ? -ENOTSUP : rds_reply_error(reply, "EVAL");
        found += reply->num > 0;
    }
    rds_batch_fini(&batch);
    return unlock(self, err < 0 ? err : found);
}

static int flush(kv_store_v1 *self)
{
    int err;

    lock(self);
    err = self->n_refs > 0 ? rds_publish(self, NULL, NULL, 0) : 0;
    if ((err == 0 || err == -ENOSPC) && rds_loss_tell(&self->loss, RDS_FLUSH, kv_thread_number()) &&
        err == 0) {
        kv_log_error("redis", "chunks put before this flush were dropped: is the server full?",
                     NULL);
        err = -ENOSPC;
    }
    return unlock(self, err);
}

/* -- statistics -------------------------------------------------------------------------------- */

static int stats(kv_store_v1 *self, kv_store_stats *ret)
{
    kv_store_stats now;

    lock(self);
    now = self->stats;
    now.round_trips = self->net.round_trips;
    unlock(self, 0);
    now.size = ret->size;
    now.n_chunks = now.n_manifests = now.bytes = UINT64_MAX;
    memcpy(ret, &now, KV_MIN(ret->size, sizeof(now)));
    return 0;
}

static const kv_store_ext table = {
    .size = sizeof(table),
    .version = KV_STORE_EXT_VERSION,
    .exists_chunks = exists_chunks,
    .get_chunks = get_chunks,
    .put_chunks = put_chunks,
    .delete_chunk = delete_chunk,
    .delete_chunk_if = rds_delete_chunk_if,
    .list_manifests = rds_list_manifests,
    .list_chunks = rds_list_chunks,
    .list_refs = rds_list_refs,
    .touch_chunks = touch_chunks,
    .flush = flush,
    .sweep_chunks = rds_sweep_chunks,
    .stats = stats,
    .new_chunks = new_chunks,
};

const kv_store_ext *kv_store_get_ext(void)
{
    return &table;
}
