// SPDX-License-Identifier: Apache-2.0
/** A handle's chunks that wait for publication, by key: a chained hash table. */
#include <unistd.h>

#include "base/core/xxh.h"
#include "store/file/file_impl.h"

static size_t bucket(const struct kvs_file_map *map, const void *key, size_t len)
{
    return kv_xxh64(key, len, 0) & (map->n_buckets - 1);
}

int kvs_file_map_reserve(struct kvs_file_map *map)
{
    struct kvs_file_map larger = {.n_buckets = map->n_buckets ? 2 * map->n_buckets : 64};

    if (map->n < map->n_buckets)
        return 0;
    larger.buckets = calloc(larger.n_buckets, sizeof(struct kvs_file_pending *));
    if (!larger.buckets)
        return -ENOMEM;
    for (size_t i = 0; i < map->n_buckets; i++) {
        for (struct kvs_file_pending *e = map->buckets[i], *next; e; e = next) {
            next = e->next;
            kvs_file_map_add(&larger, e);
        }
    }
    free(map->buckets);
    *map = larger;
    return 0;
}

struct kvs_file_pending *kvs_file_map_find(const struct kvs_file_map *map, const void *key,
                                           size_t len)
{
    struct kvs_file_pending *e = map->n ? map->buckets[bucket(map, key, len)] : NULL;

    while (e && (e->key_len != len || memcmp(e->key, key, len) != 0))
        e = e->next;
    return e;
}

void kvs_file_map_add(struct kvs_file_map *map, struct kvs_file_pending *entry)
{
    struct kvs_file_pending **head = &map->buckets[bucket(map, entry->key, entry->key_len)];

    entry->next = *head;
    *head = entry;
    map->n++;
}

void kvs_file_map_remove(struct kvs_file_map *map, const struct kvs_file_pending *entry)
{
    struct kvs_file_pending **at = &map->buckets[bucket(map, entry->key, entry->key_len)];

    while (*at != entry)
        at = &(*at)->next;
    *at = entry->next;
    map->n--;
}

void kvs_file_map_fini(struct kvs_file_map *map)
{
    free(map->buckets);
    *map = (struct kvs_file_map){0};
}

struct kvs_file_pending *kvs_file_pending_new(const void *key, size_t len)
{
    struct kvs_file_pending *e = calloc(1, sizeof(*e) + len);

    if (!e)
        return NULL;
    e->fd = -1;
    e->key_len = len;
    memcpy(e->key, key, len);
    return e;
}

void kvs_file_unpin(kv_store_v1 *h, struct kvs_file_pending *e)
{
    if (e->pinned)
        kvs_file_drop_tmp(h, e->tmp);
    e->pinned = false;
    kvs_file_lease_end(h, e);
}

void kvs_file_pending_free(kv_store_v1 *h, struct kvs_file_pending *e)
{
    if (!e)
        return;
    if (e->fd >= 0) {
        close(e->fd);
        atomic_fetch_sub(&h->kept_fds, 1);
    }
    kvs_file_unpin(h, e);
    free(e);
}

uint64_t kvs_file_releases(kv_store_v1 *h)
{
    uint64_t releases;

    pthread_mutex_lock(&h->lock);
    releases = h->releases;
    pthread_mutex_unlock(&h->lock);
    return releases;
}

void kvs_file_take_back(kv_store_v1 *h, const uint8_t *key, size_t key_len, uint64_t releases)
{
    struct kvs_file_pending *e = NULL;

    if (kvs_file_check(h, key, key_len) < 0)
        return;
    pthread_mutex_lock(&h->lock);
    if (h->releases == releases)
        e = kvs_file_map_find(&h->map, key, key_len);
    if (e && e->puts)
        e->taken = KV_MIN(e->taken, --e->puts);
    if (e && (e->puts || e->busy)) /* a publication drops a busy one */
        e = NULL;
    if (e)
        kvs_file_map_remove(&h->map, e);
    pthread_mutex_unlock(&h->lock);
    kvs_file_pending_free(h, e);
}
