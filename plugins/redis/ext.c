// SPDX-License-Identifier: Apache-2.0
#include "base/log.h"
#include "redis/store.h"

#define SCAN_COUNT 1000
#define SWEEP_BATCH 1000
#define MAX_LISTED ((size_t)16 << 20) /* names held for one listing */

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

/* One command per chunk: @word KEY [@tail ...]. */
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
        ret_present[i] = (reply->type == RESP_BULK && reply->len == RDS_TRAILER &&
                          memcmp(reply->str, RDS_MAGIC, 8) == 0) ||
                         (entry && entry->ref && entry->value);
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
            char key[RDS_KEY_SIZE];
            size_t key_len = rds_chunk_key(self, hash, hash_len, key);

            key[key_len] = '\0';
            out_data[done + i] = NULL;
            out_len[done + i] = 0;
            if (reply->type == RESP_BULK && rds_verify(reply->str, reply->len, hash, hash_len)) {
                out_len[done + i] = reply->len - RDS_TRAILER;
                out_data[done + i] = (uint8_t *)KV_STEAL(reply->str);
                found++;
            } else if (reply->type == RESP_BULK) {
                rds_drop_bad(self, key, key_len, reply->str, reply->len);
            } else if (kv_store_get_vtable()->get_chunk(self, hash, hash_len, &out_data[done + i],
                                                        &out_len[done + i]) == 0) {
                found++; /* of the save in progress */
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
    if (entry && !entry->ref) { /* a save in progress sends it again */
        self->cached -= entry->value ? entry->len : 0;
        rds_table_remove(&self->table, hash, hash_len);
    }
    err = rds_net_run(&self->net, &batch);
    if (err == 0 && batch.cmds[0].reply.type != RESP_INT)
        err = rds_reply_error(&batch.cmds[0].reply, "DEL");
    rds_batch_fini(&batch);
    return unlock(self, err);
}

/* TOUCH, so that eviction and sweeps see a use. */
static int touch_chunks(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    struct rds_batch batch = {0};
    int found = 0, err = n > 0 ? rds_check_hash(hashes, hash_len) : 0;

    if (err < 0)
        return rds_failed(self, err);
    for (size_t i = 0; i < n; i++)
        add_each(self, &batch, "TOUCH", hashes + i * hash_len, hash_len, NULL, NULL);
    lock(self);
    err = rds_net_run(&self->net, &batch);
    for (size_t i = 0; err == 0 && i < n; i++) {
        if (batch.cmds[i].reply.type != RESP_INT)
            err = rds_reply_error(&batch.cmds[i].reply, "TOUCH");
        found += batch.cmds[i].reply.num == 1;
    }
    rds_batch_fini(&batch);
    return unlock(self, err < 0 ? err : found);
}

static int flush(kv_store_v1 *self)
{
    lock(self);
    return unlock(self, self->n_refs > 0 ? rds_publish(self, NULL, NULL, 0) : 0);
}

/* -- listings ---------------------------------------------------------------------------------- */

/* Names without prefix and kind, each with its length before it. */
struct names {
    struct kv_buf text;
    char **each; /* into text; NUL-terminated there */
    size_t n;
};

static void names_fini(struct names *names)
{
    kv_buf_fini(&names->text);
    free(names->each);
}

static int compare(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* In order, each once: SCAN may tell a name twice. */
static int names_finish(struct names *names)
{
    size_t kept = 0;
    char *at = names->text.data;

    if (names->text.error)
        return names->text.error;
    names->each = malloc((names->n + 1) * sizeof(char *));
    if (!names->each)
        return -ENOMEM;
    for (size_t i = 0; i < names->n; i++, at += strlen(at) + 1)
        names->each[i] = at;
    qsort(names->each, names->n, sizeof(char *), compare);
    for (size_t i = 0; i < names->n; i++)
        if (kept == 0 || strcmp(names->each[kept - 1], names->each[i]) != 0)
            names->each[kept++] = names->each[i];
    names->n = kept;
    return 0;
}

/* The prefix as a pattern that matches only itself, then "kind:" and anything. */
static void put_pattern(const kv_store_v1 *self, char kind, struct kv_buf *pattern)
{
    for (const char *p = self->net.uri.prefix; *p; p++) {
        if (strchr("*?[]^\\-", *p))
            kv_buf_putc(pattern, '\\');
        kv_buf_putc(pattern, *p);
    }
    kv_buf_putc(pattern, kind);
    kv_buf_puts(pattern, ":*");
}

/* One page of one node; @cursor is replaced. */
static int scan_page(kv_store_v1 *self, int16_t node, const struct kv_buf *pattern, char *cursor,
                     size_t cursor_size, struct names *names)
{
    size_t skip = strlen(self->net.uri.prefix) + 2;
    struct rds_batch batch = {0};
    struct resp_value *reply;
    int err;

    rds_batch_begin(&batch, 6);
    rds_batch_word(&batch, "SCAN");
    rds_batch_word(&batch, cursor);
    rds_batch_word(&batch, "MATCH");
    rds_batch_arg(&batch, pattern->data, pattern->len);
    rds_batch_word(&batch, "COUNT");
    rds_batch_number(&batch, SCAN_COUNT);
    if (!batch.error) {
        batch.cmds[0].node = node;
        batch.cmds[0].fixed = true;
    }
    err = rds_net_run(&self->net, &batch);
    reply = err == 0 ? &batch.cmds[0].reply : NULL;
    if (reply && (reply->type != RESP_ARRAY || reply->n != 2 || reply->items[0].type != RESP_BULK ||
                  reply->items[0].len >= cursor_size || reply->items[1].type != RESP_ARRAY))
        err = rds_reply_error(reply, "SCAN");
    if (err == 0 && reply)
        memcpy(cursor, reply->items[0].str, reply->items[0].len + 1);
    for (size_t i = 0; err == 0 && reply && i < reply->items[1].n; i++) {
        const struct resp_value *key = &reply->items[1].items[i];

        if (key->type != RESP_BULK || key->len <= skip || memchr(key->str, '\0', key->len))
            continue; /* somebody else's */
        kv_buf_append(&names->text, key->str + skip, key->len - skip + 1);
        if (++names->n > MAX_LISTED)
            err = -E2BIG;
    }
    rds_batch_fini(&batch);
    return err;
}

static int list(kv_store_v1 *self, char kind, struct names *names)
{
    struct kv_buf pattern = KV_BUF_INIT;
    int16_t owners[RDS_MAX_NODES];
    size_t n = 0;
    int err;

    put_pattern(self, kind, &pattern);
    lock(self);
    err = pattern.error ? pattern.error : rds_net_owners(&self->net, owners, &n);
    for (size_t i = 0; err == 0 && i < n; i++) {
        char cursor[24] = "0";

        do {
            err = scan_page(self, owners[i], &pattern, cursor, sizeof(cursor), names);
        } while (err == 0 && strcmp(cursor, "0") != 0);
    }
    unlock(self, err);
    kv_buf_fini(&pattern);
    return err < 0 ? err : names_finish(names);
}

static int list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    struct names names = {0};
    int rc = list(self, 'm', &names);

    for (size_t i = 0; rc == 0 && i < names.n; i++) {
        kv_store_entry entry = {
            .size = sizeof(entry), .name = names.each[i], .len = UINT64_MAX, .used_s = 0};

        rc = each(arg, &entry);
    }
    names_fini(&names);
    return rc;
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* The key that @hex tells; its length, 0 when it isn't one of ours. */
static size_t parse_hex(const char *hex, uint8_t *hash)
{
    size_t len = strlen(hex);

    if (len % 2 != 0 || len / 2 > RDS_MAX_HASH)
        return 0;
    for (size_t i = 0; i < len / 2; i++) {
        int high = digit(hex[2 * i]), low = digit(hex[2 * i + 1]);

        if (high < 0 || low < 0)
            return 0;
        hash[i] = (uint8_t)(16 * high + low);
    }
    return len / 2;
}

static int list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    struct names names = {0};
    uint8_t hash[RDS_MAX_HASH];
    int rc = list(self, 'c', &names);

    for (size_t i = 0; rc == 0 && i < names.n; i++) {
        kv_store_entry entry = {.size = sizeof(entry), .hash = hash, .len = UINT64_MAX};

        entry.hash_len = parse_hex(names.each[i], hash);
        if (entry.hash_len > 0)
            rc = each(arg, &entry);
    }
    names_fini(&names);
    return rc;
}

/* The list that put_manifest left beside the manifest: length byte and key of each chunk. */
static int list_refs(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg)
{
    struct rds_batch batch = {0};
    char key[RDS_KEY_SIZE];
    const struct resp_value *reply;
    int rc;

    if (!name || !name[0] || strlen(name) > RDS_MAX_NAME)
        return rds_failed(self, -EINVAL);
    rds_batch_begin(&batch, 2);
    rds_batch_word(&batch, "GET");
    rds_batch_key(&batch, key, rds_name_key(self, 'r', name, key));
    lock(self);
    rc = rds_net_run(&self->net, &batch);
    unlock(self, rc);
    reply = rc == 0 ? &batch.cmds[0].reply : NULL;
    if (reply && reply->type != RESP_BULK)
        rc = reply->type == RESP_NULL ? -ENOENT : rds_reply_error(reply, "GET");
    else if (reply && !rds_verify(reply->str, reply->len, name, strlen(name)))
        rc = -EBADMSG;
    for (size_t at = 0; rc == 0 && reply && at < reply->len - RDS_TRAILER;) {
        const uint8_t *hash = (const uint8_t *)reply->str + at;
        kv_store_entry entry = {
            .size = sizeof(entry), .hash = hash + 1, .hash_len = hash[0], .len = UINT64_MAX};

        at += 1 + entry.hash_len;
        rc = at > reply->len - RDS_TRAILER ? -EBADMSG : each(arg, &entry);
    }
    rds_batch_fini(&batch);
    return rc;
}

/* -- sweep ------------------------------------------------------------------------------------- */

/* The server itself compares and deletes, so that a hit in between counts. */
static const char sweep_script[] =
    "local idle = redis.pcall('OBJECT', 'IDLETIME', KEYS[1]) "
    "if type(idle) == 'table' then return idle end "
    "if not idle then return -1 end "
    "if idle < tonumber(ARGV[1]) then return -2 end "
    "local len = redis.call('STRLEN', KEYS[1]) redis.call('DEL', KEYS[1]) return len";

static int sweep_some(kv_store_v1 *self, struct rds_batch *batch, kv_store_swept *ret)
{
    int err;

    lock(self);
    err = rds_net_run(&self->net, batch);
    for (size_t i = 0; err == 0 && i < batch->n; i++) {
        const struct resp_value *reply = &batch->cmds[i].reply;

        if (reply->type == RESP_ERROR && strstr(reply->str, "LFU")) {
            kv_log_error("redis",
                         "under an LFU policy the server doesn't know when a chunk was "
                         "last used",
                         NULL);
            err = -ENOTSUP;
        } else if (reply->type != RESP_INT) {
            ret->errors++;
        } else if (reply->num >= 0) {
            ret->deleted++;
            ret->deleted_bytes += (uint64_t)KV_MAX(reply->num - RDS_TRAILER, 0);
        } else {
            ret->kept += reply->num == -2;
        }
    }
    rds_batch_fini(batch);
    return unlock(self, err);
}

static bool idle_entry(const struct rds_entry *entry)
{
    return !entry->ref;
}

static int sweep_chunks(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                        kv_store_swept *ret)
{
    struct names names = {0};
    struct rds_batch batch = {0};
    kv_store_swept swept = {.size = sizeof(swept)};
    uint8_t hash[RDS_MAX_HASH];
    int err = list(self, 'c', &names);

    for (size_t i = 0; err == 0 && i < names.n; i++) {
        size_t hash_len = parse_hex(names.each[i], hash);
        char key[RDS_KEY_SIZE];

        if (hash_len == 0 || live(arg, hash, hash_len)) {
            swept.kept += hash_len > 0;
            continue;
        }
        rds_batch_begin(&batch, 5);
        rds_batch_word(&batch, "EVAL");
        rds_batch_word(&batch, sweep_script);
        rds_batch_word(&batch, "1");
        rds_batch_key(&batch, key, rds_chunk_key(self, hash, hash_len, key));
        rds_batch_number(&batch, (int64_t)KV_MIN(min_age_s, (uint64_t)INT32_MAX));
        if (batch.n == SWEEP_BATCH)
            err = sweep_some(self, &batch, &swept);
    }
    if (err == 0 && batch.n > 0)
        err = sweep_some(self, &batch, &swept);
    rds_batch_fini(&batch);
    names_fini(&names);
    lock(self);
    rds_table_purge(&self->table, idle_entry); /* what was known may be gone */
    self->cached = 0;
    unlock(self, 0);
    if (err == 0 && ret) {
        swept.size = ret->size;
        memcpy(ret, &swept, KV_MIN(ret->size, sizeof(swept)));
    }
    return err;
}

/* -- figures ----------------------------------------------------------------------------------- */

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
    .list_manifests = list_manifests,
    .list_chunks = list_chunks,
    .list_refs = list_refs,
    .touch_chunks = touch_chunks,
    .flush = flush,
    .sweep_chunks = sweep_chunks,
    .stats = stats,
};

const kv_store_ext *kv_store_get_ext(void)
{
    return &table;
}
