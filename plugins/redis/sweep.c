// SPDX-License-Identifier: Apache-2.0
/* Delete chunks that weren't used for a while. The cutoff is computed once, at the beginning, by
 * the server's clock. Each chunk holds its time of use (scripts.h). The server compares and deletes
 * in one step, so that a hit in between keeps the chunk. */
#include "base/core/clock.h"
#include "base/core/log.h"
#include "redis/scripts.h"
#include "redis/store.h"

#define SWEEP_BATCH 1000

struct sweep {
    kv_store_v1 *self;
    kv_store_live_fn live;
    void *arg;
    int64_t cutoff_s; /* chunks used before are deleted; negative: all are */
    struct rds_batch batch;
    kv_store_swept swept;
};

/* Return the earliest clock of all servers, in microseconds since 1970. */
static int ask_time(kv_store_v1 *self, int64_t *ret_us)
{
    struct rds_batch batch = {0};
    int16_t owners[RDS_MAX_NODES];
    size_t n = 0;
    int err = rds_net_owners(&self->net, owners, &n);

    for (size_t i = 0; i < n; i++) {
        rds_batch_begin(&batch, 1);
        rds_batch_word(&batch, "TIME");
        if (!batch.error) {
            batch.cmds[i].node = owners[i];
            batch.cmds[i].fixed = true;
        }
    }
    if (err == 0)
        err = rds_net_run(&self->net, &batch);
    *ret_us = INT64_MAX;
    for (size_t i = 0; err == 0 && i < n; i++) {
        int64_t us;

        err = rds_read_time(&batch.cmds[i].reply, &us);
        *ret_us = err == 0 ? KV_MIN(*ret_us, us) : 0;
    }
    rds_batch_fini(&batch);
    return err;
}

/* Compute the cutoff, @min_age_s before the call: subtract the time that asking took. */
static int find_cutoff(struct sweep *sweep, uint64_t min_age_s)
{
    uint64_t begin_ns = kv_now_ns();
    int64_t us;
    int err;

    sweep->cutoff_s = -1;
    if (min_age_s == 0)
        return 0;
    pthread_mutex_lock(&sweep->self->lock);
    err = ask_time(sweep->self, &us);
    pthread_mutex_unlock(&sweep->self->lock);
    if (err < 0)
        return rds_failed(sweep->self, err);
    us -= (int64_t)((kv_now_ns() - begin_ns) / 1000 + 1);
    us -= (int64_t)KV_MIN(min_age_s, (uint64_t)INT32_MAX) * 1000000;
    sweep->cutoff_s = us > 0 ? us / 1000000 : 0; /* stamps are rounded down, too */
    return 0;
}

static int run(struct sweep *sweep)
{
    kv_store_v1 *self = sweep->self;
    kv_store_swept *swept = &sweep->swept;
    int err;

    pthread_mutex_lock(&self->lock);
    err = rds_net_run(&self->net, &sweep->batch);
    pthread_mutex_unlock(&self->lock);
    for (size_t i = 0; err == 0 && i < sweep->batch.n; i++) {
        const struct resp_value *reply = &sweep->batch.cmds[i].reply;

        if (rds_no_script(reply)) {
            kv_log_error("redis", "without scripts (EVAL) chunks can't be swept", NULL);
            err = -ENOTSUP;
        } else if (reply->type != RESP_INT) {
            swept->errors++;
        } else if (reply->num >= 0) {
            swept->deleted++;
            swept->deleted_bytes += (uint64_t)reply->num;
        } else {
            swept->kept += reply->num == -2;
        }
    }
    rds_batch_fini(&sweep->batch);
    return err < 0 ? rds_failed(self, err) : 0;
}

static int weigh(void *arg, const char *name)
{
    struct sweep *sweep = arg;
    uint8_t hash[RDS_MAX_HASH];
    size_t hash_len = rds_parse_hex(name, hash);
    char key[RDS_KEY_SIZE];

    if (hash_len == 0)
        return 0;
    if (sweep->live(sweep->arg, hash, hash_len)) {
        sweep->swept.kept++;
        return 0;
    }
    rds_batch_begin(&sweep->batch, 5);
    rds_batch_word(&sweep->batch, "EVAL");
    rds_batch_word(&sweep->batch, RDS_LUA_SWEEP);
    rds_batch_word(&sweep->batch, "1");
    rds_batch_key(&sweep->batch, key, rds_chunk_key(sweep->self, hash, hash_len, key));
    rds_batch_number(&sweep->batch, sweep->cutoff_s);
    return sweep->batch.n == SWEEP_BATCH ? run(sweep) : 0;
}

static bool idle_entry(const struct rds_entry *entry)
{
    return !entry->ref;
}

int rds_sweep_chunks(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                     kv_store_swept *ret)
{
    struct sweep sweep = {
        .self = self, .live = live, .arg = arg, .swept = {.size = sizeof(sweep.swept)}};
    int err = find_cutoff(&sweep, min_age_s);

    if (err == 0)
        err = rds_each_name(self, 'c', weigh, &sweep);
    if (err == 0 && sweep.batch.n > 0)
        err = run(&sweep);
    rds_batch_fini(&sweep.batch);
    pthread_mutex_lock(&self->lock);
    rds_table_purge(&self->table, idle_entry); /* known chunks may have been deleted */
    self->cached = 0;
    pthread_mutex_unlock(&self->lock);
    if (err == 0 && ret) {
        sweep.swept.size = ret->size;
        memcpy(ret, &sweep.swept, KV_MIN(ret->size, sizeof(sweep.swept)));
    }
    return err;
}
