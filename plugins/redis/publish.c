// SPDX-License-Identifier: Apache-2.0
/* Publish: send buffered puts, then a manifest that readers may trust. */
#include "redis/publish.h"

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/file/own_manifest.h"
#include "redis/scripts.h"

#define MAX_ARGS ((size_t)1 << 20) /* of a command, before Redis 7 */
#define SCRIPT_OTHERS 8            /* arguments of a publication beside its chunks */

#define MAX_ATTEMPTS 3 /* a server that evicts may drop chunks just sent */

/* seconds without a put after which a save that can't succeed is dropped */
#define ABANDONED_S 3600

/* -- commands ---------------------------------------------------------------------------------- */

/* Add the chunks of earlier publications of this handle that this manifest may need. */
static int find_more(struct rds_save *save)
{
    if (!save->opaque)
        return 0;
    rds_history_needed(&save->self->history, &save->more);
    for (size_t at = 0; at < save->more.len; at += 1 + (unsigned char)save->more.data[at])
        save->n_more++;
    return save->more.error;
}

void rds_save_more(struct rds_save *save, struct rds_batch *batch)
{
    char key[RDS_KEY_SIZE];
    size_t skip = strlen(save->self->net.uri.prefix) + 2;

    for (size_t at = 0; at < save->more.len;) {
        const uint8_t *hash = (const uint8_t *)save->more.data + at;
        size_t len = rds_chunk_key(save->self, hash + 1, hash[0], key);

        rds_batch_arg(batch, key + skip, len - skip);
        at += 1 + (size_t)hash[0];
    }
}

static void add_script(struct rds_save *save, struct rds_batch *batch)
{
    kv_store_v1 *self = save->self;
    size_t n = self->n_refs, more = save->name ? 1 + (size_t)save->noted : 0;
    char key[RDS_KEY_SIZE];

    rds_batch_begin(batch, 3 + n + more + 2 + save->n_more + (save->name ? 1 : 0));
    rds_batch_word(batch, "EVAL");
    rds_batch_word(batch, RDS_LUA_PUBLISH);
    rds_batch_number(batch, (int64_t)(n + more));
    for (size_t i = 0; i < n; i++)
        rds_batch_key(batch, key,
                      rds_chunk_key(self, self->refs[i]->hash, self->refs[i]->hash_len, key));
    if (save->name)
        rds_batch_key(batch, key, rds_name_key(self, 'm', save->name, key));
    if (save->noted)
        rds_batch_key(batch, key, rds_name_key(self, 'u', save->name, key));
    rds_batch_number(batch, (int64_t)n);
    rds_batch_number(batch, (int64_t)strlen(self->net.uri.prefix) + 3);
    rds_save_more(save, batch);
    if (save->name)
        rds_batch_payload(batch, save->manifest, save->manifest_len);
}

void rds_add_use(kv_store_v1 *self, struct rds_batch *batch, const uint8_t *hash, size_t hash_len)
{
    char key[RDS_KEY_SIZE];

    rds_batch_begin(batch, 4);
    rds_batch_word(batch, "EVAL");
    rds_batch_word(batch, RDS_LUA_USE_ONE);
    rds_batch_word(batch, "1");
    rds_batch_key(batch, key, rds_chunk_key(self, hash, hash_len, key));
}

void rds_save_value(struct rds_batch *batch, const char *key, size_t key_len, const void *value,
                    size_t len)
{
    rds_batch_begin(batch, 3);
    rds_batch_word(batch, "SET");
    rds_batch_key(batch, key, key_len);
    rds_batch_payload(batch, value, len);
}

int rds_save_missing(struct rds_save *save, struct rds_batch *batch)
{
    kv_store_v1 *self = save->self;
    char key[RDS_KEY_SIZE];
    bool gone = false;

    for (size_t i = 0; i < self->n_refs; i++) {
        struct rds_entry *entry = self->refs[i];

        if (!save->missing[i])
            continue;
        entry->gone = !entry->value;
        gone |= entry->gone;
        if (entry->gone)
            continue;
        entry->sent = true;
        rds_stamp(entry->value, entry->len, save->now_s);
        rds_save_value(batch, key, rds_chunk_key(self, entry->hash, entry->hash_len, key),
                       entry->value, entry->len);
    }
    if (gone)
        kv_log_error("redis", "a chunk of this save was stored and is gone: is the server full?",
                     NULL);
    return gone ? -ENOSPC : 0;
}

/* -- replies ----------------------------------------------------------------------------------- */

static bool is_too_large(const struct resp_value *reply)
{
    return rds_reply_is(reply, "ERR Protocol error: invalid bulk length") ||
           rds_reply_is(reply, "ERR string exceeds maximum allowed size");
}

/* Mark the chunks that the server will never take (proto-max-bulk-len). */
static void mark_refused(struct rds_save *save, const struct rds_batch *batch, size_t n)
{
    size_t at = 0;

    for (size_t i = 0; i < save->self->n_refs && at < n; i++)
        if (save->missing[i])
            save->self->refs[i]->refused = is_too_large(&batch->cmds[at++].reply);
}

int rds_save_check(struct rds_save *save, const struct rds_batch *batch, size_t n)
{
    size_t at = 0;

    mark_refused(save, batch, n);
    for (size_t i = 0; i < n; i++)
        if (batch->cmds[i].reply.type != RESP_STATUS)
            return rds_reply_error(&batch->cmds[i].reply, "SET");
    for (size_t i = 0; i < save->self->n_refs && at < n; i++)
        if (save->missing[i]) {
            save->self->stats.bytes_written += save->self->refs[i]->len;
            save->self->stats.puts++;
            at++;
        }
    return 0;
}

/* Read a reply to TIME, two texts. */
int rds_read_time(const struct resp_value *reply, int64_t *ret_us)
{
    if (reply->type != RESP_ARRAY || reply->n != 2 || reply->items[0].type != RESP_BULK ||
        reply->items[1].type != RESP_BULK || reply->items[0].len > 12 || reply->items[1].len > 6)
        return rds_reply_error(reply, "TIME");
    *ret_us =
        strtoll(reply->items[0].str, NULL, 10) * 1000000 + strtoll(reply->items[1].str, NULL, 10);
    return 0;
}

bool rds_no_script(const struct resp_value *reply)
{
    return reply->type == RESP_ERROR && (strncmp(reply->str, "NOPERM", 6) == 0 ||
                                         strncmp(reply->str, "ERR unknown command", 19) == 0);
}

/* Read a script's reply. Returns the number of missing chunks. */
static int64_t read_script(struct rds_save *save, const struct resp_value *reply)
{
    kv_store_v1 *self = save->self;

    memset(save->missing, 0, self->n_refs);
    if (rds_no_script(reply)) {
        self->no_scripts = true;
        save->script = false;
        return -EAGAIN;
    }
    if (reply->type != RESP_ARRAY || reply->n < 1 || reply->items[0].type != RESP_INT ||
        reply->items[0].num < 0)
        return rds_reply_error(reply, "EVAL");
    save->now_s = (uint64_t)reply->items[0].num;
    for (size_t i = 1; i < reply->n; i++) {
        if (reply->items[i].type != RESP_INT || reply->items[i].num < 1 ||
            (uint64_t)reply->items[i].num > self->n_refs)
            return rds_reply_error(reply, "EVAL");
        save->missing[reply->items[i].num - 1] = true;
    }
    return (int64_t)reply->n - 1;
}

void rds_save_hits(struct rds_save *save)
{
    for (size_t i = 0; i < save->self->n_refs - save->n_borrowed; i++)
        save->self->stats.put_hits += !save->missing[i];
}

/* -- by one script ----------------------------------------------------------------------------- */

static int by_script(struct rds_save *save)
{
    kv_store_v1 *self = save->self;
    int64_t n_missing = 0;
    int err = 0;

    for (int attempt = 0; attempt < MAX_ATTEMPTS; attempt++) {
        struct rds_batch batch = {0};
        size_t n_sets = 0;

        err = n_missing > 0 ? rds_save_missing(save, &batch) : 0;
        n_sets = batch.n;
        add_script(save, &batch);
        if (err == 0)
            err = rds_net_run(&self->net, &batch);
        if (err == 0)
            err = rds_save_check(save, &batch, n_sets);
        n_missing = err == 0 ? read_script(save, &batch.cmds[n_sets].reply) : err;
        if (attempt == 0 && n_missing >= 0)
            rds_save_hits(save);
        rds_batch_fini(&batch);
        if (n_missing <= 0)
            return (int)n_missing;
    }
    kv_log_error("redis", "the server doesn't keep what is stored: is it full?", "missing=%lld",
                 (long long)n_missing);
    return -ENOSPC;
}

/* -- the save ---------------------------------------------------------------------------------- */

/* True when all keys lie on one node, as a script needs. */
bool rds_one_node(const kv_store_v1 *self)
{
    const char *open = strchr(self->net.uri.prefix, '{');
    const char *close = open ? strchr(open + 1, '}') : NULL;

    return !self->net.uri.cluster || (close && close > open + 1);
}

static void drop_value(kv_store_v1 *self, struct rds_entry *entry)
{
    if (entry->slab)
        rds_arena_give(&self->arena, entry->slab);
    entry->slab = NULL;
    entry->value = NULL;
}

void rds_forget_chunk(kv_store_v1 *self, struct rds_entry *entry)
{
    if (entry->ref) {
        self->refs[entry->at] = self->refs[--self->n_refs];
        self->refs[entry->at]->at = entry->at;
        self->buffered -= entry->value ? entry->len : 0;
        drop_value(self, entry);
        rds_loss_deleted(&self->loss, entry->hash, entry->hash_len);
    } else if (entry->value) {
        self->cached -= entry->len;
    }
    rds_table_remove(&self->table, entry->hash, entry->hash_len);
}

/* Forget the save after a manifest. After a flush keep its keys. */
static void settle(kv_store_v1 *self, bool published)
{
    for (size_t i = 0; i < self->n_refs; i++) {
        struct rds_entry *entry = self->refs[i];

        drop_value(self, entry);
        entry->known = true;
        entry->bad = entry->gone = false;
        entry->ref = !published;
    }
    self->buffered = 0;
    if (published)
        self->n_refs = 0;
}

/*
 * Add the chunks that a manifest of ours lists and that are not pending. A publication takes those
 * of every thread, and the server may have lost some since: the manifest must not be set then.
 */
static int borrow(struct rds_save *save)
{
    kv_store_v1 *self = save->self;
    struct kv_own_chunks chunks = {0};

    if (save->name)
        kv_own_manifest_chunks(save->manifest, save->manifest_len, &chunks);
    for (size_t i = 0; i < chunks.n; i++) {
        const uint8_t *hash = chunks.first + i * KV_OWN_CHUNK;
        struct rds_entry *entry = rds_table_find(&self->table, hash, KV_OWN_KEY);

        if (entry && entry->ref)
            continue;
        entry = rds_table_add(&self->table, hash, KV_OWN_KEY);
        if (!entry || rds_push_ref(self, entry) < 0)
            return -ENOMEM;
        save->n_borrowed++;
        entry->ref = true;
        if (entry->value) { /* prefetched */
            self->cached -= entry->len;
            free(KV_STEAL(entry->value));
        }
    }
    return 0;
}

/* Undo borrow: the next publication that lists them looks again. */
static void give_back(struct rds_save *save)
{
    for (; save->n_borrowed > 0; save->n_borrowed--) {
        struct rds_entry *entry = save->self->refs[--save->self->n_refs];

        entry->ref = entry->known = entry->gone = false;
    }
}

static bool is_abandoned(const struct rds_entry *entry)
{
    return entry->put_s + ABANDONED_S < kv_now_ns() / KV_NS_PER_S;
}

static bool is_any(const struct rds_entry *entry)
{
    (void)entry;
    return true;
}

static bool is_refused(const struct rds_entry *entry)
{
    return entry->refused;
}

/* Drop the pending chunks for which @drops returns true. Later publications that may need one of
 * them fail. */
static void drop_refs(kv_store_v1 *self, bool (*drops)(const struct rds_entry *entry))
{
    uint64_t newest = kv_thread_newest();
    size_t n_left = 0;

    for (size_t i = 0; i < self->n_refs; i++) {
        struct rds_entry *entry = self->refs[i];

        if (!drops(entry)) {
            entry->at = n_left;
            self->refs[n_left++] = entry;
            continue;
        }
        rds_loss_note(&self->loss, entry->hash, entry->hash_len, newest);
        self->buffered -= entry->value ? entry->len : 0;
        drop_value(self, entry);
        entry->ref = entry->known = entry->gone = entry->refused = false;
    }
    self->n_refs = n_left;
}

/*
 * Drop a save that can't succeed, so that it doesn't burden the next one. Drop all of it when the
 * caller's thread put all of it. Keep recent chunks of several threads, which need not put them
 * again then. @published: put_manifest reports the failure to the caller; later publications that
 * may need dropped chunks fail, too.
 */
static void forget(kv_store_v1 *self, bool published)
{
    uint64_t by = kv_thread_number();
    bool shared = false;

    for (size_t i = 0; i < self->n_refs; i++)
        shared |= self->refs[i]->by != by;
    drop_refs(self, shared ? is_abandoned : is_any);
    for (int kind = 0; kind < RDS_TOLD_KINDS && published; kind++)
        rds_loss_told(&self->loss, kind, by);
}

static int publish(struct rds_save *save)
{
    kv_store_v1 *self = save->self;
    int err = borrow(save);

    save->missing = calloc(self->n_refs + 1, sizeof(*save->missing));
    if (err < 0 || !save->missing || find_more(save) < 0)
        return -ENOMEM;
    /* A manifest with content, on whose handle nothing was put or hit, needs chunks that nobody knows
     * here: without a note collection deletes nothing. */
    save->noted =
        save->opaque && (self->n_refs + save->n_more > 0 || save->manifest_len == RDS_TRAILER);
    save->script = !self->no_scripts && rds_one_node(self) &&
                   self->n_refs + save->n_more + SCRIPT_OTHERS <= MAX_ARGS;
    if (save->script)
        err = by_script(save);
    if (!save->script && (err == 0 || err == -EAGAIN)) /* scripts were refused, now or before */
        err = rds_save_by_steps(save);
    return err;
}

int rds_publish(kv_store_v1 *self, const char *name, const char *manifest, size_t manifest_len)
{
    struct rds_save save = {
        .self = self, .name = name, .manifest = manifest, .manifest_len = manifest_len};
    bool lists_dropped = false;
    int err;

    if (name &&
        rds_loss_refuses(&self->loss, manifest, manifest_len, kv_thread_number(), &lists_dropped)) {
        kv_log_error("redis",
                     "chunks put before this publication were deleted, or dropped: is the server "
                     "full?",
                     NULL);
        if (lists_dropped) /* else they are still to be sent: dropping them would be another loss */
            forget(self, true);
        return -ENOSPC;
    }
    save.opaque = name && !kv_is_own_manifest(manifest, manifest_len);
    err = publish(&save);
    if (err < 0)
        give_back(&save);
    if (err == 0) {
        if (name)
            rds_history_note(&self->history, self->refs, self->n_refs, save.opaque);
        settle(self, name != NULL);
    } else if (err == -ENOSPC) {
        forget(self, name != NULL);
    } else {
        drop_refs(self, is_refused);
    }
    free(save.missing);
    kv_buf_fini(&save.more);
    return err;
}
