// SPDX-License-Identifier: Apache-2.0
/* Publish step by step, where no script may run or the keys lie on several nodes. */
#include "redis/publish.h"

/* Without scripts a chunk with an older stamp is sent again, which renews the stamp. */
#define STALE_S 3600
#define NAMES_EACH 1000 /* names in one command */

/* Ask for each chunk by a script, which also sets its stamp. */
static int ask_each(struct rds_save *save, struct rds_batch *batch)
{
    kv_store_v1 *self = save->self;
    int err;

    for (size_t i = 0; i < self->n_refs; i++)
        rds_add_use(self, batch, self->refs[i]->hash, self->refs[i]->hash_len);
    err = rds_net_run(&self->net, batch);
    for (size_t i = 0; err == 0 && i < self->n_refs; i++) {
        const struct resp_value *reply = &batch->cmds[i].reply;

        if (rds_no_script(reply)) {
            self->no_scripts = true;
            return -EAGAIN;
        }
        if (reply->type != RESP_INT)
            return rds_reply_error(reply, "EVAL");
        save->missing[i] = reply->num < 0;
        save->now_s = KV_MAX(save->now_s, (uint64_t)(reply->num < 0 ? -reply->num : reply->num));
    }
    return err;
}

/* Ask for each chunk without a script. One with an old stamp counts as missing. */
static int look_at_each(struct rds_save *save, struct rds_batch *batch)
{
    kv_store_v1 *self = save->self;
    char key[RDS_KEY_SIZE];
    int64_t now_us = 0;
    int err;

    for (size_t i = 0; i < self->n_refs; i++) {
        rds_batch_begin(batch, 4);
        rds_batch_word(batch, "GETRANGE");
        rds_batch_key(batch, key,
                      rds_chunk_key(self, self->refs[i]->hash, self->refs[i]->hash_len, key));
        rds_batch_number(batch, -RDS_CHUNK_TRAILER);
        rds_batch_number(batch, -1);
    }
    rds_batch_begin(batch, 1);
    rds_batch_word(batch, "TIME");
    err = rds_net_run(&self->net, batch);
    if (err == 0)
        err = rds_read_time(&batch->cmds[self->n_refs].reply, &now_us);
    save->now_s = (uint64_t)now_us / 1000000;
    for (size_t i = 0; err == 0 && i < self->n_refs; i++) {
        const struct resp_value *reply = &batch->cmds[i].reply;
        uint64_t stamp_s = 0;

        if (reply->type == RESP_ERROR && strncmp(reply->str, "WRONGTYPE", 9) != 0)
            return rds_reply_error(reply, "GETRANGE");
        save->missing[i] = reply->type != RESP_BULK ||
                           (self->refs[i]->bad && self->refs[i]->value) ||
                           !rds_stamp_of(reply->str, reply->len, &stamp_s) ||
                           (self->refs[i]->value && stamp_s + STALE_S < save->now_s);
    }
    return err;
}

static int find_missing(struct rds_save *save)
{
    kv_store_v1 *self = save->self;
    struct rds_batch batch = {0};
    int err = self->no_scripts ? -EAGAIN : ask_each(save, &batch);

    if (err == -EAGAIN && self->no_scripts) {
        rds_batch_fini(&batch);
        err = look_at_each(save, &batch);
    }
    if (err == 0)
        rds_save_hits(save);
    rds_batch_fini(&batch);
    return err;
}

static int send_missing(struct rds_save *save)
{
    struct rds_batch batch = {0};
    int err = rds_save_missing(save, &batch);

    if (err == 0 && batch.n > 0)
        err = rds_net_run(&save->self->net, &batch);
    if (err == 0)
        err = rds_save_check(save, &batch, batch.n);
    rds_batch_fini(&batch);
    return err;
}

static void begin_names(struct rds_save *save, struct rds_batch *batch, size_t n)
{
    char key[RDS_KEY_SIZE];

    rds_batch_begin(batch, 2 + n);
    rds_batch_word(batch, "SADD");
    rds_batch_key(batch, key, rds_name_key(save->self, 'u', save->name, key));
}

/* Add to the set that earlier publications noted. An empty name in it says that the set is
 * complete. */
static void add_names(struct rds_save *save, struct rds_batch *batch)
{
    kv_store_v1 *self = save->self;
    size_t skip = strlen(self->net.uri.prefix) + 2;
    char key[RDS_KEY_SIZE];

    begin_names(save, batch, 1 + save->n_more);
    rds_batch_arg(batch, "", 0);
    rds_save_more(save, batch);
    for (size_t i = 0; i < self->n_refs; i++) {
        const struct rds_entry *entry = self->refs[i];
        size_t len = rds_chunk_key(self, entry->hash, entry->hash_len, key);

        if (i % NAMES_EACH == 0)
            begin_names(save, batch, KV_MIN(self->n_refs - i, (size_t)NAMES_EACH));
        rds_batch_arg(batch, key + skip, len - skip);
    }
}

/* Store the names before the manifest: with a new manifest and old names, chunks would count as
 * unused. */
static int set_manifest(struct rds_save *save)
{
    struct rds_batch batch = {0};
    char key[RDS_KEY_SIZE];
    int err = 0;

    if (save->noted) {
        add_names(save, &batch);
        err = rds_net_run(&save->self->net, &batch);
        for (size_t i = 0; err == 0 && i < batch.n; i++)
            if (batch.cmds[i].reply.type != RESP_INT)
                err = rds_reply_error(&batch.cmds[i].reply, "SADD");
        rds_batch_fini(&batch);
    }
    if (err < 0)
        return err;
    rds_save_value(&batch, key, rds_name_key(save->self, 'm', save->name, key), save->manifest,
                   save->manifest_len);
    err = rds_net_run(&save->self->net, &batch);
    if (err == 0 && batch.cmds[0].reply.type != RESP_STATUS)
        err = rds_reply_error(&batch.cmds[0].reply, "SET");
    rds_batch_fini(&batch);
    return err;
}

int rds_save_by_steps(struct rds_save *save)
{
    int err = save->self->n_refs > 0 ? find_missing(save) : 0;

    if (err == 0)
        err = send_missing(save);
    if (err == 0 && save->name)
        err = set_manifest(save);
    return err;
}
