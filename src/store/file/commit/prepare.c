// SPDX-License-Identifier: Apache-2.0
/**
 * Before a publication's barrier: list the files to sync, write those anew whose sync failed, and
 * look for copies of chunks whose bytes are lost.
 */
#include <stdio.h>
#include <unistd.h>

#include "store/file/commit/commit.h"

bool kvs_file_is_skipped(kv_store_v1 *h, const struct kvs_file_pending *e)
{
    bool ret;

    pthread_mutex_lock(&h->lock);
    ret = e->state == KVS_FILE_LOST && !e->needed;
    pthread_mutex_unlock(&h->lock);
    return ret;
}

void kvs_file_lose(kv_store_v1 *h, struct kvs_file_pending *e)
{
    pthread_mutex_lock(&h->lock);
    e->state = KVS_FILE_LOST;
    pthread_mutex_unlock(&h->lock);
}

/* Write a file whose sync failed anew, from the bytes that can still be read. */
static int renew(kv_store_v1 *h, struct kvs_file_pending *e)
{
    uint64_t owner = kvs_file_owner(e->key, e->key_len, false), n, old = e->tmp;
    char name[KVS_FILE_TMP], side_car[KVS_FILE_TMP + 8];
    struct kvs_file_sum sum;
    uint8_t *data;
    struct stat st;
    size_t len;
    int fd = -1, rc;

    kvs_file_tmp_name(h, name, old);
    snprintf(side_car, sizeof(side_car), "tmp/%s.s", name);
    rc = kvs_file_read(h, h->tmp, name, side_car, owner, &data, &len, &st);
    if (rc == -ENOENT || rc == -EBADMSG || rc == -EIO)
        kvs_file_lose(h, e);
    if (rc < 0)
        return kvs_file_fail(h, rc == -EBADMSG ? EIO : -rc,
                             "a chunk whose sync failed can't be read", name);
    rc = kvs_file_write_tmp(h, owner, data, len, true, &n, &sum, &fd);
    free(data);
    if (rc < 0)
        return rc;
    if (e->fd >= 0) {
        close(e->fd);
        atomic_fetch_sub(&h->kept_fds, 1);
    }
    pthread_mutex_lock(&h->lock);
    e->tmp = n;
    e->fd = fd;
    e->sum = sum;
    e->state = KVS_FILE_PUT;
    pthread_mutex_unlock(&h->lock);
    kvs_file_drop_tmp(h, old);
    return 0;
}

/* True when the chunk in place carries our checksum, which says that it was synced as well. */
static bool is_marked(kv_store_v1 *h, const struct kvs_file_pending *e, const char *hex,
                      const char *side_car)
{
    uint64_t owner = kvs_file_owner(e->key, e->key_len, false);
    struct stat st;
    int fd = kvs_file_open_read(h->fan[kvs_file_fan(e->key)], hex, &st);
    struct kvs_file_sum sum;
    bool marked = fd >= 0 && kvs_file_load_sum(h, fd, side_car, 0, owner, &sum) == 0;

    if (fd >= 0)
        close(fd);
    return marked;
}

/* Look for a good copy of a lost chunk in place, written by another process. */
static int find_lost(kv_store_v1 *h, struct kvs_file_pending *e)
{
    uint64_t owner = kvs_file_owner(e->key, e->key_len, false);
    struct kvs_file_pending found = {.fd = -1};
    char hex[KVS_FILE_HEX], side_car[KVS_FILE_HEX + 8];
    uint8_t *data = NULL;
    struct stat st;
    size_t len;
    int rc;

    kvs_file_hex(hex, e->key, e->key_len);
    kvs_file_chunk_side_car(side_car, hex);
    rc = kvs_file_pin(h, e->key, hex, &found);
    if (rc == 0 && !is_marked(h, e, hex, side_car))
        rc = -ENOENT;
    if (rc == 0)
        rc = kvs_file_read(h, h->fan[kvs_file_fan(e->key)], hex, side_car, owner, &data, &len, &st);
    if (rc < 0) {
        if (found.pinned)
            kvs_file_drop_tmp(h, found.tmp);
        return kvs_file_fail(h, EIO, "a chunk of this save is lost: put it again", hex);
    }
    free(data);
    if (e->pinned)
        kvs_file_drop_tmp(h, e->tmp);
    pthread_mutex_lock(&h->lock);
    e->tmp = found.tmp;
    e->pinned = found.pinned;
    e->state = KVS_FILE_HIT;
    pthread_mutex_unlock(&h->lock);
    return 0;
}

int kvs_file_commit_prepare(kv_store_v1 *h, struct kvs_file_commit *c)
{
    int rc = 0;

    for (size_t i = 0; i < c->n && rc == 0; i++) {
        struct kvs_file_pending *e = c->entries[i];

        if (e->state == KVS_FILE_SUSPECT)
            rc = renew(h, e);
        if (kvs_file_is_skipped(h, e)) {
            rc = 0;
            continue;
        }
        if (e->state == KVS_FILE_LOST)
            rc = find_lost(h, e);
        /* entries in other states are in place and synced */
        if (e->state == KVS_FILE_PUT && e->pinned) {
            c->fds[c->n_sync] = e->fd;
            c->tmps[c->n_sync++] = e->tmp;
            c->bytes += e->sum.stored;
        }
    }
    return rc;
}
