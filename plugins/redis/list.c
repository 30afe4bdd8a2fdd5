// SPDX-License-Identifier: Apache-2.0
/* Listings: names by SCAN, and by SSCAN the chunks that a manifest may need. */
#include "base/core/log.h"
#include "redis/scan.h"
#include "redis/store.h"

#define SCAN_COUNT 1000
#define MAX_LISTED ((size_t)16 << 20) /* bytes of names held for one listing */

/* -- names ------------------------------------------------------------------------------------- */

/* Names without prefix and kind, each preceded by its length. */
struct names {
    struct kv_buf text;
    char **each; /* into text, NUL-terminated */
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

/* Sort the names and remove repetitions: SCAN may return a name twice. */
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

/* Write a pattern: the prefix, matching only itself, "kind:", and anything. */
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

/* -- pages ------------------------------------------------------------------------------------- */

/* Run one page: @batch holds SCAN or SSCAN with @scan's cursor. Names longer than @skip are noted
 * without their first @skip bytes. Returns 1 after the last page. Takes the lock for one page only,
 * so that a long listing doesn't block other calls. */
static int take_page(kv_store_v1 *self, struct rds_batch *batch, struct rds_scan *scan, size_t skip,
                     struct names *names)
{
    const struct resp_value *reply, *keys;
    int rc;

    pthread_mutex_lock(&self->lock);
    rc = rds_net_run(&self->net, batch);
    pthread_mutex_unlock(&self->lock);
    if (rc < 0)
        return rc;
    reply = &batch->cmds[0].reply;
    if (reply->type != RESP_ARRAY || reply->n != 2 || reply->items[0].type != RESP_BULK ||
        reply->items[1].type != RESP_ARRAY)
        return rds_reply_error(reply, "SCAN");
    keys = &reply->items[1];
    for (size_t i = 0; i < keys->n; i++) {
        const struct resp_value *key = &keys->items[i];

        if (key->type != RESP_BULK || key->len < skip || key->len >= RDS_KEY_SIZE ||
            memchr(key->str, '\0', key->len))
            continue; /* another program's key */
        kv_buf_append(&names->text, key->str + skip, key->len - skip + 1);
        if (++names->n > MAX_LISTED)
            return -E2BIG;
    }
    rc = rds_scan_next(scan, reply->items[0].str, batch->cmds[0].line);
    if (rc < 0)
        kv_log_error("redis",
                     rc == -ECONNRESET ? "a listing failed: the connection is lost again and again"
                                       : "a listing doesn't end: the server's cursors repeat",
                     "pages=%llu", (unsigned long long)scan->n_pages);
    return rc;
}

static int scan_node(kv_store_v1 *self, int16_t node, const struct kv_buf *pattern,
                     struct names *names)
{
    struct rds_scan scan;
    int rc;

    rds_scan_begin(&scan);
    do {
        struct rds_batch batch = {0};

        rds_batch_begin(&batch, 6);
        rds_batch_word(&batch, "SCAN");
        rds_batch_word(&batch, scan.cursor);
        rds_batch_word(&batch, "MATCH");
        rds_batch_arg(&batch, pattern->data, pattern->len);
        rds_batch_word(&batch, "COUNT");
        rds_batch_number(&batch, SCAN_COUNT);
        if (!batch.error) {
            batch.cmds[0].node = node;
            batch.cmds[0].fixed = true;
        }
        rc = take_page(self, &batch, &scan, strlen(self->net.uri.prefix) + 2, names);
        rds_batch_fini(&batch);
    } while (rc == 0);
    return KV_MIN(rc, 0);
}

static int scan_nodes(kv_store_v1 *self, const struct kv_buf *pattern, struct names *names)
{
    int16_t owners[RDS_MAX_NODES];
    size_t n = 0;
    int err;

    pthread_mutex_lock(&self->lock);
    err = rds_net_owners(&self->net, owners, &n);
    pthread_mutex_unlock(&self->lock);
    for (size_t i = 0; err == 0 && i < n; i++)
        err = scan_node(self, owners[i], pattern, names);
    return err;
}

/* List all names of a kind. A pass misses a key that moves from a node not yet asked to one that
 * was. It moves only once, so a second pass finds it. Manifests need that pass, since a collection
 * deletes by them; a missed chunk merely stays. */
static int list(kv_store_v1 *self, char kind, struct names *names)
{
    struct kv_buf pattern = KV_BUF_INIT;
    int n_passes = self->net.uri.cluster && kind == 'm' ? 2 : 1, err;

    put_pattern(self, kind, &pattern);
    err = pattern.error;
    for (int i = 0; err == 0 && i < n_passes; i++)
        err = scan_nodes(self, &pattern, names);
    kv_buf_fini(&pattern);
    return err < 0 ? rds_failed(self, err) : names_finish(names);
}

int rds_each_name(kv_store_v1 *self, char kind, rds_name_fn each, void *arg)
{
    struct names names = {0};
    int rc = list(self, kind, &names);

    for (size_t i = 0; rc == 0 && i < names.n; i++)
        rc = each(arg, names.each[i]);
    names_fini(&names);
    return rc;
}

/* -- calls of the extension table -------------------------------------------------------------- */

struct visit {
    kv_store_each_fn each;
    void *arg;
};

static int visit_manifest(void *arg, const char *name)
{
    const struct visit *visit = arg;
    kv_store_entry entry = {.size = sizeof(entry), .name = name, .len = UINT64_MAX};

    return name[0] ? visit->each(visit->arg, &entry) : 0;
}

int rds_list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    struct visit visit = {each, arg};

    return rds_each_name(self, 'm', visit_manifest, &visit);
}

static int digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

size_t rds_parse_hex(const char *hex, uint8_t *hash)
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

static int visit_chunk(void *arg, const char *name)
{
    const struct visit *visit = arg;
    uint8_t hash[RDS_MAX_HASH];
    kv_store_entry entry = {.size = sizeof(entry), .hash = hash, .len = UINT64_MAX};

    entry.hash_len = rds_parse_hex(name, hash);
    return entry.hash_len > 0 ? visit->each(visit->arg, &entry) : 0;
}

int rds_list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    struct visit visit = {each, arg};

    return rds_each_name(self, 'c', visit_chunk, &visit);
}

/* Return the length of a manifest's value, with its trailer; 0 without one; or an error. */
static int64_t manifest_len(kv_store_v1 *self, const char *name)
{
    struct rds_batch batch = {0};
    char key[RDS_KEY_SIZE];
    int64_t rc;

    rds_batch_begin(&batch, 2);
    rds_batch_word(&batch, "STRLEN");
    rds_batch_key(&batch, key, rds_name_key(self, 'm', name, key));
    pthread_mutex_lock(&self->lock);
    rc = rds_net_run(&self->net, &batch);
    pthread_mutex_unlock(&self->lock);
    if (rc == 0)
        rc = batch.cmds[0].reply.type == RESP_INT ? batch.cmds[0].reply.num
                                                  : rds_reply_error(&batch.cmds[0].reply, "STRLEN");
    rds_batch_fini(&batch);
    return rc;
}

/* List the set that publications add to: hex of keys, and an empty name since the first
 * publication. */
static int scan_refs(kv_store_v1 *self, const char *name, struct names *names)
{
    struct rds_scan scan;
    char key[RDS_KEY_SIZE];
    int rc;

    rds_scan_begin(&scan);
    do {
        struct rds_batch batch = {0};

        rds_batch_begin(&batch, 5);
        rds_batch_word(&batch, "SSCAN");
        rds_batch_key(&batch, key, rds_name_key(self, 'u', name, key));
        rds_batch_word(&batch, scan.cursor);
        rds_batch_word(&batch, "COUNT");
        rds_batch_number(&batch, SCAN_COUNT);
        rc = take_page(self, &batch, &scan, 0, names);
        rds_batch_fini(&batch);
    } while (rc == 0);
    return rc < 0 ? rc : names_finish(names);
}

int rds_list_refs(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg)
{
    struct visit visit = {each, arg};
    struct names names = {0};
    int rc;

    if (!name || !name[0] || strlen(name) > RDS_MAX_NAME)
        return rds_failed(self, -EINVAL);
    rc = scan_refs(self, name, &names);
    if (rc == 0 && names.n == 0)
        rc = -ENOENT;
    if (rc == 0 && names.n == 1 && !names.each[0][0]) {
        /* Behind the set: a manifest with bytes that has replaced an empty one may need any chunk. */
        int64_t len = manifest_len(self, name);

        rc = len > RDS_TRAILER ? -ENOENT : len < 0 ? (int)len : 0;
    }
    for (size_t i = 0; rc == 0 && i < names.n; i++)
        rc = visit_chunk(&visit, names.each[i]);
    names_fini(&names);
    return rc < 0 && rc != -ENOENT ? rds_failed(self, rc) : rc;
}
