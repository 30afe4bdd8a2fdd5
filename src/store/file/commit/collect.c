// SPDX-License-Identifier: Apache-2.0
/** The chunks of a publication: which it puts into place, which it needs, and which it releases. */
#include <fcntl.h>
#include <unistd.h>

#include "store/file/commit/commit.h"

/* True for manifests that say what they need. Those of our own format that name no chunk are how
 * callers with keys of their own publish (the object tier), so they need all. */
static bool names_chunks(const struct kvs_manifest *m)
{
    return m && m->n_chunks > 0;
}

/* Add a chunk that is named and not pending: another publication of this handle has released it, or
 * it was never put here. */
static int add_named(struct kvs_file_commit *c, const uint8_t *key, size_t len)
{
    struct kvs_file_pending *e;

    if (kvs_file_map_find(&c->named, key, len))
        return 0;
    e = kvs_file_map_reserve(&c->named) < 0 ? NULL : kvs_file_pending_new(key, len);
    if (!e)
        return -ENOMEM;
    e->state = KVS_FILE_HIT;
    e->needed = e->busy = e->gone = true;
    kvs_file_map_add(&c->named, e);
    c->entries[c->n++] = e;
    c->fans[kvs_file_fan(key)] = true;
    return 0;
}

/* Mark, under `lock`, the pending chunks that the manifest names; others are of other saves. */
static int mark_named(kv_store_v1 *h, struct kvs_file_commit *c, const struct kvs_manifest *m)
{
    int rc = 0;

    for (size_t i = 0; i < m->n_chunks && rc == 0; i++) {
        const uint8_t *key = m->chunks[i].key;
        struct kvs_file_pending *e = kvs_file_map_find(&h->map, key, sizeof(m->chunks[i].key));

        if (e) {
            e->needed = true;
            e->taken += e->taken < e->puts;
        } else {
            rc = add_named(c, key, sizeof(m->chunks[i].key));
        }
    }
    return rc;
}

/* Take, under `lock`, a pending chunk that the publication needs, or that isn't durable yet; a flush
 * takes a leased one, too, unless an earlier flush couldn't link it. */
static void take(struct kvs_file_commit *c, struct kvs_file_pending *e)
{
    bool wanted = c->flush ? e->leased && !e->tried : e->needed;

    if (!wanted && e->settled && e->state == KVS_FILE_HIT)
        return;
    e->busy = true;
    e->tried = e->settled = false; /* settled again once this publication has ended well */
    c->entries[c->n++] = e;
    c->fans[kvs_file_fan(e->key)] = true;
}

static int collect(kv_store_v1 *h, struct kvs_file_commit *c, const struct kvs_manifest *m)
{
    bool all = !names_chunks(m);
    int rc = 0;

    h->releases += all && !c->flush;
    for (size_t i = 0; i < h->map.n_buckets; i++) {
        for (struct kvs_file_pending *e = h->map.buckets[i]; e; e = e->next) {
            e->needed = all;
            e->taken = all && !c->flush ? e->puts : 0;
        }
    }
    if (!all)
        rc = mark_named(h, c, m);
    for (size_t i = 0; i < h->map.n_buckets && rc == 0; i++) {
        for (struct kvs_file_pending *e = h->map.buckets[i]; e; e = e->next)
            take(c, e);
    }
    return rc;
}

/* Note the state of a chunk that is in place and was verified since it changed, as a put does. */
static void look(kv_store_v1 *h, struct kvs_file_pending *e)
{
    int fan = h->fan[kvs_file_fan(e->key)];
    char hex[KVS_FILE_HEX];
    struct stat st;

    kvs_file_hex(hex, e->key, e->key_len);
    if (kvs_file_stat(fan, hex, &st) <= 0)
        return;
    e->seen = kvs_file_see(&st);
    e->known = kvs_file_known(h, e->key, e->key_len, &e->seen);
    if (!e->known)
        e->seen = (struct kvs_file_seen){0};
}

/* Make room, under `lock`, for all entries. A file of notes and the manifest are synced, too. */
static int reserve(const kv_store_v1 *h, struct kvs_file_commit *c, size_t n_named)
{
    size_t n = h->map.n + n_named + 2;

    *c = (struct kvs_file_commit){.refs_fd = -1};
    c->entries = malloc(n * sizeof(struct kvs_file_pending *));
    c->fds = malloc(n * sizeof(*c->fds));
    c->tmps = malloc(n * sizeof(*c->tmps));
    return c->entries && c->fds && c->tmps ? 0 : -ENOMEM;
}

/* Call @each for the named chunks that aren't pending. It may free them. */
static void each_named(kv_store_v1 *h, const struct kvs_file_commit *c,
                       void (*each)(kv_store_v1 *h, struct kvs_file_pending *e))
{
    for (size_t i = 0; i < c->named.n_buckets; i++) {
        for (struct kvs_file_pending *e = c->named.buckets[i], *next; e; e = next) {
            next = e->next;
            each(h, e);
        }
    }
}

int kvs_file_commit_collect(kv_store_v1 *h, struct kvs_file_commit *c, const struct kvs_manifest *m,
                            bool flush)
{
    int rc;

    pthread_mutex_lock(&h->lock);
    rc = reserve(h, c, m ? m->n_chunks : 0);
    c->flush = flush;
    if (rc == 0)
        rc = collect(h, c, m);
    pthread_mutex_unlock(&h->lock);
    each_named(h, c, rc == 0 ? look : kvs_file_pending_free);
    return rc;
}
