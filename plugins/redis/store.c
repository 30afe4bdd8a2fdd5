// SPDX-License-Identifier: Apache-2.0
#include "redis/store.h"

#include "base/core/clock.h"
#include "base/core/log.h"

#define MAX_VALUE (RESP_MAX_BULK - RDS_CHUNK_TRAILER)

int rds_failed(kv_store_v1 *self, int err)
{
    pthread_mutex_lock(&self->lock);
    self->stats.errors++;
    pthread_mutex_unlock(&self->lock);
    return err;
}

/* -- names ------------------------------------------------------------------------------------- */

static size_t begin_key(const kv_store_v1 *self, char kind, char *key)
{
    size_t len = strlen(self->net.uri.prefix);

    memcpy(key, self->net.uri.prefix, len);
    key[len++] = kind;
    key[len++] = ':';
    return len;
}

size_t rds_chunk_key(const kv_store_v1 *self, const uint8_t *hash, size_t hash_len, char *key)
{
    static const char digits[] = "0123456789abcdef";
    size_t len = begin_key(self, 'c', key);

    for (size_t i = 0; i < hash_len; i++) {
        key[len++] = digits[hash[i] >> 4];
        key[len++] = digits[hash[i] & 15];
    }
    return len;
}

size_t rds_name_key(const kv_store_v1 *self, char kind, const char *name, char *key)
{
    size_t len = begin_key(self, kind, key), name_len = strlen(name);

    memcpy(key + len, name, name_len);
    return len + name_len;
}

int rds_check_hash(const uint8_t *hash, size_t hash_len)
{
    if (hash && hash_len >= 1 && hash_len <= RDS_MAX_HASH)
        return 0;
    kv_log_error("redis", "a chunk's key has 1 to 255 bytes", "len=%zu", hash_len);
    return -EINVAL;
}

static int check_name(const char *name)
{
    if (name && name[0] && strlen(name) <= RDS_MAX_NAME)
        return 0;
    kv_log_error("redis", "a manifest's name has 1 to 1024 bytes", NULL);
    return -EINVAL;
}

/* -- open and close ---------------------------------------------------------------------------- */

static void store_close(kv_store_v1 *self)
{
    if (!self)
        return;
    rds_table_purge(&self->table, NULL);
    rds_arena_fini(&self->arena);
    rds_history_fini(&self->history);
    rds_loss_fini(&self->loss);
    free(self->refs);
    rds_net_fini(&self->net);
    pthread_mutex_destroy(&self->lock);
    free(self);
}

static int ping(kv_store_v1 *self)
{
    struct rds_batch batch = {0};
    int err;

    rds_batch_begin(&batch, 1);
    rds_batch_word(&batch, "PING");
    err = rds_net_run(&self->net, &batch);
    if (err == 0 && batch.cmds[0].reply.type != RESP_STATUS)
        err = rds_reply_error(&batch.cmds[0].reply, "PING");
    rds_batch_fini(&batch);
    return err;
}

static kv_store_v1 *store_open(const char *text)
{
    struct kv_error error = {0};
    struct rds_uri uri;
    kv_store_v1 *self;
    int err;

    if (!text || rds_uri_parse(text, &uri, &error) < 0) {
        kv_log_error("redis", "the URI can't be used", "reason=\"%s\"", error.text);
        errno = EINVAL;
        return NULL;
    }
    self = calloc(1, sizeof(*self));
    if (!self)
        return NULL;
    pthread_mutex_init(&self->lock, NULL);
    err = rds_net_init(&self->net, &uri, &error);
    if (err < 0) {
        kv_log_error("redis", "the store can't be opened", "reason=\"%s\"", error.text);
        goto fail;
    }
    self->net.down = true; /* one try, without waiting */
    err = ping(self);
    if (err < 0)
        goto fail;
    return self;
fail:
    store_close(self);
    errno = -err;
    return NULL;
}

/* -- chunks ------------------------------------------------------------------------------------ */

bool rds_idle_name(const struct rds_entry *entry)
{
    return !entry->ref && !entry->value;
}

int rds_push_ref(kv_store_v1 *self, struct rds_entry *entry)
{
    if (self->n_refs == self->refs_capacity) {
        size_t capacity = KV_MAX(2 * self->refs_capacity, (size_t)64);
        struct rds_entry **refs = realloc(self->refs, capacity * sizeof(struct rds_entry *));

        if (!refs)
            return -ENOMEM;
        self->refs = refs;
        self->refs_capacity = capacity;
    }
    entry->at = self->n_refs;
    self->refs[self->n_refs++] = entry;
    return 0;
}

/* Note that the calling thread put a chunk of the save in progress. */
static void note_put(struct rds_entry *entry, bool first)
{
    uint64_t by = kv_thread_number();

    entry->by = first || entry->by == by ? by : 0;
    entry->put_s = kv_now_ns() / KV_NS_PER_S;
}

/* Remember a put. Returns as put_chunk. Takes @value, of @slab, when it returns 0 or 1 and sets
 * *ret_taken. */
static int remember(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, char *value,
                    struct rds_slab *slab, size_t len, bool *ret_taken)
{
    struct rds_entry *entry = rds_table_find(&self->table, hash, hash_len);
    bool again = entry && entry->ref;
    int err;

    /* Don't flush before a repeated put: it may bring back a lost chunk, without which every flush
     * fails. */
    if (!again && self->n_refs > 0 && self->buffered + len > self->net.uri.buffer_bytes) {
        err = rds_publish(self, NULL, NULL, 0);
        if (err < 0)
            return err;
    }
    if (self->table.n >= RDS_MAX_NAMES)
        rds_table_purge(&self->table, rds_idle_name);
    entry = rds_table_add(&self->table, hash, hash_len);
    if (!entry)
        return -ENOMEM;
    again = entry->ref;
    if (!again) {
        err = rds_push_ref(self, entry);
        if (err < 0)
            return err;
    }
    note_put(entry, !again);
    if (again && !entry->gone)
        return 1;
    if (entry->value) { /* prefetched */
        self->cached -= entry->len;
        free(entry->value);
    }
    entry->value = value;
    entry->slab = slab;
    entry->len = self->usual_len = len;
    entry->ref = true;
    entry->gone = entry->sent = false;
    rds_loss_put(&self->loss, hash, hash_len);
    self->buffered += len;
    *ret_taken = true;
    return entry->known ? 1 : 0;
}

static bool is_ref(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    struct rds_entry *entry;
    bool ref;

    pthread_mutex_lock(&self->lock);
    entry = rds_table_find(&self->table, hash, hash_len);
    ref = entry && entry->ref && !entry->gone;
    if (ref)
        note_put(entry, false);
    self->stats.put_hits += ref;
    pthread_mutex_unlock(&self->lock);
    return ref;
}

static int put_chunk(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                     size_t data_len)
{
    struct rds_slab *slab = NULL;
    bool taken = false;
    char *value;
    int err = rds_check_hash(hash, hash_len);

    if (err < 0)
        return rds_failed(self, err);
    if (data_len > MAX_VALUE || (!data && data_len > 0)) {
        kv_log_error("redis", "a chunk is too large", "len=%zu limit=%zu", data_len, MAX_VALUE);
        return rds_failed(self, -EFBIG);
    }
    if (is_ref(self, hash, hash_len))
        return 1;
    pthread_mutex_lock(&self->lock);
    value = rds_arena_take(&self->arena, data_len + RDS_CHUNK_TRAILER, &slab);
    pthread_mutex_unlock(&self->lock);
    if (!value)
        return rds_failed(self, -ENOMEM);
    if (data_len > 0)
        memcpy(value, data, data_len);
    rds_seal_chunk(value, data_len, hash, hash_len);
    pthread_mutex_lock(&self->lock);
    err = remember(self, hash, hash_len, value, slab, data_len + RDS_CHUNK_TRAILER, &taken);
    if (!taken)
        rds_arena_give(&self->arena, slab);
    pthread_mutex_unlock(&self->lock);
    return err < 0 ? rds_failed(self, err) : err;
}

/* -- manifests --------------------------------------------------------------------------------- */

static int put_manifest(kv_store_v1 *self, const char *name, const uint8_t *data, size_t data_len)
{
    char *value;
    int err = check_name(name);

    if (err == 0 && (data_len > MAX_VALUE || (!data && data_len > 0)))
        err = -EFBIG;
    if (err < 0)
        return rds_failed(self, err);
    value = malloc(data_len + RDS_TRAILER);
    if (!value)
        return rds_failed(self, -ENOMEM);
    if (data_len > 0)
        memcpy(value, data, data_len);
    rds_seal(value, data_len, name, strlen(name));
    pthread_mutex_lock(&self->lock);
    err = rds_publish(self, name, value, data_len + RDS_TRAILER);
    pthread_mutex_unlock(&self->lock);
    free(value);
    return err < 0 ? rds_failed(self, err) : 0;
}

static int get_manifest(kv_store_v1 *self, const char *name, uint8_t **out_data, size_t *out_len)
{
    char key[RDS_KEY_SIZE], *value = NULL;
    size_t key_len, len = 0, content = 0;
    int err = check_name(name);

    if (err < 0)
        return rds_failed(self, err);
    key_len = rds_name_key(self, 'm', name, key);
    key[key_len] = '\0';
    pthread_mutex_lock(&self->lock);
    err = rds_get_value(self, key, key_len, &value, &len);
    pthread_mutex_unlock(&self->lock);
    if (err < 0)
        return err == -ENOENT ? err : rds_failed(self, err);
    if (!rds_verify(value, len, name, strlen(name), &content)) {
        kv_log_error("redis", "a manifest's bytes don't verify", "len=%zu", len);
        free(value);
        return rds_failed(self, -EBADMSG);
    }
    *out_data = (uint8_t *)value;
    *out_len = content;
    return 0;
}

/* Delete the keys of @name. @kinds: letters of the kinds of key. */
static int delete_keys(kv_store_v1 *self, const char *kinds, const char *name)
{
    struct rds_batch batch = {0};
    char key[RDS_KEY_SIZE];
    int err;

    rds_batch_begin(&batch, 1 + strlen(kinds));
    rds_batch_word(&batch, "DEL");
    for (; *kinds; kinds++)
        rds_batch_key(&batch, key, rds_name_key(self, *kinds, name, key));
    err = rds_net_run(&self->net, &batch);
    if (err == 0 && batch.cmds[0].reply.type != RESP_INT)
        err = rds_reply_error(&batch.cmds[0].reply, "DEL");
    rds_batch_fini(&batch);
    return err;
}

/* Delete a manifest and its note. One command deletes both, so that a concurrent publication
 * doesn't lose a part of its note. On several nodes the manifest is deleted last: a manifest
 * without a note stops collection from deleting anything. */
static int delete_manifest(kv_store_v1 *self, const char *name)
{
    int err = check_name(name);

    if (err < 0)
        return rds_failed(self, err);
    pthread_mutex_lock(&self->lock);
    if (rds_one_node(self)) {
        err = delete_keys(self, "um", name);
    } else {
        err = delete_keys(self, "u", name);
        if (err == 0)
            err = delete_keys(self, "m", name);
    }
    pthread_mutex_unlock(&self->lock);
    return err < 0 ? rds_failed(self, err) : 0;
}

static const kv_store_vtable table = {
    .version = KV_STORE_VERSION_2,
    .open = store_open,
    .close = store_close,
    .put_chunk = put_chunk,
    .get_chunk = rds_get_chunk,
    .put_manifest = put_manifest,
    .get_manifest = get_manifest,
    .delete_manifest = delete_manifest,
    .prefetch_chunks = rds_prefetch_chunks,
};

const kv_store_vtable *kv_store_get_vtable(void)
{
    return &table;
}
