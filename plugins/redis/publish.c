// SPDX-License-Identifier: Apache-2.0
/* From buffered puts to a manifest that readers may trust. */
#include "base/log.h"
#include "redis/store.h"

#define MAX_ATTEMPTS 3 /* a server that evicts may take back what was just sent */

/*
 * KEYS: chunks, then (maybe) the manifest and its list of chunks; ARGV: how many chunks, the
 * manifest's value, the list's. Returns which chunks (from 1) have no value that ends as ours do;
 * sets the manifest when there are none. GETRANGE also counts as a use for LRU.
 */
static const char script[] =
    "local missing, n = {}, tonumber(ARGV[1]) "
    "for i = 1, n do "
    "local tail = redis.pcall('GETRANGE', KEYS[i], -32, -1) "
    "if type(tail) ~= 'string' or string.sub(tail, 1, 8) ~= '" RDS_MAGIC "' then "
    "missing[#missing + 1] = i end end "
    "if #missing == 0 and #KEYS > n then "
    "redis.call('SET', KEYS[n + 2], ARGV[2]) redis.call('SET', KEYS[n + 1], ARGV[3]) end "
    "return missing";

struct save {
    kv_store_v1 *self;
    const char *name; /* NULL: no manifest */
    const char *manifest;
    size_t manifest_len;
    struct kv_buf list; /* the chunks' names, for list_refs */
    bool *missing;      /* of refs, by number */
    bool script;        /* else step by step */
};

static int chunk_list(struct save *save)
{
    kv_store_v1 *self = save->self;

    for (size_t i = 0; i < self->n_refs; i++) {
        kv_buf_putc(&save->list, (char)self->refs[i]->hash_len);
        kv_buf_append(&save->list, self->refs[i]->hash, self->refs[i]->hash_len);
    }
    if (kv_buf_reserve(&save->list, RDS_TRAILER) < 0)
        return save->list.error;
    rds_seal(save->list.data, save->list.len, save->name, strlen(save->name));
    save->list.len += RDS_TRAILER;
    return 0;
}

/* -- commands ---------------------------------------------------------------------------------- */

static void add_script(struct save *save, struct rds_batch *batch)
{
    kv_store_v1 *self = save->self;
    size_t n = self->n_refs, more = save->name ? 2 : 0;
    char key[RDS_KEY_SIZE];

    rds_batch_begin(batch, 3 + n + more + 1 + more);
    rds_batch_word(batch, "EVAL");
    rds_batch_word(batch, script);
    rds_batch_number(batch, (int64_t)(n + more));
    for (size_t i = 0; i < n; i++)
        rds_batch_key(batch, key,
                      rds_chunk_key(self, self->refs[i]->hash, self->refs[i]->hash_len, key));
    if (save->name) {
        rds_batch_key(batch, key, rds_name_key(self, 'm', save->name, key));
        rds_batch_key(batch, key, rds_name_key(self, 'r', save->name, key));
    }
    rds_batch_number(batch, (int64_t)n);
    if (save->name) {
        rds_batch_arg(batch, save->list.data, save->list.len);
        rds_batch_payload(batch, save->manifest, save->manifest_len);
    }
}

static void add_set(struct rds_batch *batch, const char *key, size_t key_len, const void *value,
                    size_t len)
{
    rds_batch_begin(batch, 3);
    rds_batch_word(batch, "SET");
    rds_batch_key(batch, key, key_len);
    rds_batch_payload(batch, value, len);
}

static int add_missing(struct save *save, struct rds_batch *batch)
{
    kv_store_v1 *self = save->self;
    char key[RDS_KEY_SIZE];

    for (size_t i = 0; i < self->n_refs; i++) {
        struct rds_entry *entry = self->refs[i];

        if (!save->missing[i])
            continue;
        if (!entry->value) {
            kv_log_error("redis", "a chunk of this save was sent and is gone: is the server full?",
                         NULL);
            return -ENOSPC;
        }
        add_set(batch, key, rds_chunk_key(self, entry->hash, entry->hash_len, key), entry->value,
                entry->len);
    }
    return 0;
}

/* -- replies ----------------------------------------------------------------------------------- */

static int check_sets(struct save *save, const struct rds_batch *batch, size_t n)
{
    size_t at = 0;

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

/* Returns how many chunks are missing. */
static int64_t read_script(struct save *save, const struct resp_value *reply)
{
    kv_store_v1 *self = save->self;

    memset(save->missing, 0, self->n_refs);
    if (reply->type == RESP_ERROR && (strncmp(reply->str, "NOPERM", 6) == 0 ||
                                      strncmp(reply->str, "ERR unknown command", 19) == 0)) {
        self->no_scripts = true;
        save->script = false;
        return -EAGAIN;
    }
    if (reply->type != RESP_ARRAY)
        return rds_reply_error(reply, "EVAL");
    for (size_t i = 0; i < reply->n; i++) {
        if (reply->items[i].type != RESP_INT || reply->items[i].num < 1 ||
            (uint64_t)reply->items[i].num > self->n_refs)
            return rds_reply_error(reply, "EVAL");
        save->missing[reply->items[i].num - 1] = true;
    }
    return (int64_t)reply->n;
}

/* -- all at once ------------------------------------------------------------------------------- */

static int by_script(struct save *save)
{
    kv_store_v1 *self = save->self;
    int64_t n_missing = 0;
    int err = 0;

    for (int attempt = 0; attempt < MAX_ATTEMPTS; attempt++) {
        struct rds_batch batch = {0};
        size_t n_sets = 0;

        err = n_missing > 0 ? add_missing(save, &batch) : 0;
        n_sets = batch.n;
        add_script(save, &batch);
        if (err == 0)
            err = rds_net_run(&self->net, &batch);
        if (err == 0)
            err = check_sets(save, &batch, n_sets);
        n_missing = err == 0 ? read_script(save, &batch.cmds[n_sets].reply) : err;
        if (attempt == 0 && n_missing >= 0)
            self->stats.put_hits += self->n_refs - (size_t)n_missing;
        rds_batch_fini(&batch);
        if (n_missing <= 0)
            return (int)n_missing;
    }
    kv_log_error("redis", "the server doesn't keep what is stored: is it full?", "missing=%lld",
                 (long long)n_missing);
    return -ENOSPC;
}

/* -- step by step ------------------------------------------------------------------------------ */

static int find_missing(struct save *save)
{
    kv_store_v1 *self = save->self;
    struct rds_batch batch = {0};
    char key[RDS_KEY_SIZE];
    int err;

    for (size_t i = 0; i < self->n_refs; i++) {
        rds_batch_begin(&batch, 4);
        rds_batch_word(&batch, "GETRANGE");
        rds_batch_key(&batch, key,
                      rds_chunk_key(self, self->refs[i]->hash, self->refs[i]->hash_len, key));
        rds_batch_number(&batch, -RDS_TRAILER);
        rds_batch_number(&batch, -1);
    }
    err = rds_net_run(&self->net, &batch);
    for (size_t i = 0; err == 0 && i < self->n_refs; i++) {
        const struct resp_value *reply = &batch.cmds[i].reply;

        if (reply->type == RESP_ERROR && strncmp(reply->str, "WRONGTYPE", 9) != 0)
            err = rds_reply_error(reply, "GETRANGE");
        save->missing[i] = reply->type != RESP_BULK || reply->len != RDS_TRAILER ||
                           memcmp(reply->str, RDS_MAGIC, 8) != 0;
        self->stats.put_hits += !save->missing[i];
    }
    rds_batch_fini(&batch);
    return err;
}

static int send_missing(struct save *save)
{
    struct rds_batch batch = {0};
    int err = add_missing(save, &batch);

    if (err == 0 && batch.n > 0)
        err = rds_net_run(&save->self->net, &batch);
    if (err == 0)
        err = check_sets(save, &batch, batch.n);
    rds_batch_fini(&batch);
    return err;
}

static int set_manifest(struct save *save)
{
    struct rds_batch batch = {0};
    char key[RDS_KEY_SIZE];
    int err = 0;

    /* The list first: with an old list and a new manifest, chunks would count as not needed. */
    for (int i = 0; err == 0 && i < 2; i++) {
        add_set(&batch, key, rds_name_key(save->self, i == 0 ? 'r' : 'm', save->name, key),
                i == 0 ? save->list.data : save->manifest,
                i == 0 ? save->list.len : save->manifest_len);
        err = rds_net_run(&save->self->net, &batch);
        if (err == 0 && batch.cmds[0].reply.type != RESP_STATUS)
            err = rds_reply_error(&batch.cmds[0].reply, "SET");
        rds_batch_fini(&batch);
    }
    return err;
}

static int by_steps(struct save *save)
{
    int err = save->self->n_refs > 0 ? find_missing(save) : 0;

    if (err == 0)
        err = send_missing(save);
    if (err == 0 && save->name)
        err = set_manifest(save);
    return err;
}

/* -- the save ---------------------------------------------------------------------------------- */

/* A script sees one node: all keys must lie there. */
static bool one_slot(const kv_store_v1 *self)
{
    const char *open = strchr(self->net.uri.prefix, '{');
    const char *close = open ? strchr(open + 1, '}') : NULL;

    return close && close > open + 1;
}

static void drop_value(kv_store_v1 *self, struct rds_entry *entry)
{
    if (entry->slab)
        rds_arena_give(&self->arena, entry->slab);
    entry->slab = NULL;
    entry->value = NULL;
}

/* After a manifest nothing of the save is held any more; after a flush the names are. */
static void settle(kv_store_v1 *self, bool published)
{
    for (size_t i = 0; i < self->n_refs; i++) {
        struct rds_entry *entry = self->refs[i];

        drop_value(self, entry);
        entry->known = true;
        entry->ref = !published;
    }
    self->buffered = 0;
    if (published)
        self->n_refs = 0;
}

/* The save can't succeed: nothing of it stays to burden the next one. */
static void forget(kv_store_v1 *self)
{
    for (size_t i = 0; i < self->n_refs; i++) {
        struct rds_entry *entry = self->refs[i];

        drop_value(self, entry);
        entry->ref = entry->known = false;
    }
    self->n_refs = 0;
    self->buffered = 0;
}

int rds_publish(kv_store_v1 *self, const char *name, const char *manifest, size_t manifest_len)
{
    struct save save = {.self = self, .name = name, .manifest = manifest};
    int err = 0;

    if (name && self->broken) { /* a part of it was refused before: told then, and now */
        self->broken = false;
        forget(self);
        return -ENOSPC;
    }
    save.manifest_len = manifest_len;
    save.missing = calloc(self->n_refs + 1, sizeof(*save.missing));
    save.script = !self->no_scripts && (!self->net.uri.cluster || one_slot(self));
    if (!save.missing || (name && chunk_list(&save) < 0))
        err = -ENOMEM;
    if (err == 0 && save.script)
        err = by_script(&save);
    if (!save.script &&
        (err == 0 || err == -EAGAIN)) /* the script was refused just now, or never asked */
        err = by_steps(&save);
    if (err == 0) {
        settle(self, name != NULL);
    } else if (err == -ENOSPC) {
        forget(self);
        self->broken = !name;
    }
    free(save.missing);
    kv_buf_fini(&save.list);
    return err;
}
