// SPDX-License-Identifier: Apache-2.0
/**
 * Publication. What lies where:
 *
 *     DIR/NAME                  manifests                     .kvasir/tmp/ID.N    new files, pins
 *     DIR/chunks/H/HEX          chunks, H: first hex digit    .kvasir/writers/ID  flock: lives
 *     .kvasir/sums/             checksums without xattrs      .kvasir/bad/        did not verify
 *
 *     put_chunk       tmp/ID.N (its writing begins)     or, when it is there: lease, or link to tmp/ID.N
 *     put_manifest    1 manifest to tmp/                     2 barrier: all new files are on disk
 *                     3 move chunks into place               4 fsync the fan-out directories
 *                     5 rename the manifest, fsync DIR       6 unlink the links in tmp/
 *
 * A power cut before 5 leaves the old manifest; after it, chunks were durable before the name was.
 * A hit of another writer's chunk was synced before that writer linked it, and step 4 makes its
 * name durable too.
 *
 * Leases keep most hits (file_lease.c); pins keep those that can't be leased, and all that a flush
 * leaves pending. A deleter (sweep, eviction, of any process) holds a flock on the fan-out directory
 * and deletes only files with one link. A pinned hit has a second link, in tmp/. From 3 to 5 the
 * publication holds those flocks shared, so no process deletes its chunks in place. A deleter may
 * have looked at a hit just before the pin was made, and deleted it: linking the pin into place
 * brings the chunk back. A manifest's rename holds a flock on DIR, against a process that sets
 * damaged files aside.
 *
 * A failed fsync is never repeated on the same file: Linux may have marked the lost pages clean.
 * The next publication writes such files anew, from bytes that it reads back and verifies; a put
 * that comes earlier brings its own bytes. Chunks that can't be read back are lost. A manifest of
 * our own format that names a lost chunk fails until the chunk is put again. Flushes, manifests of
 * another format, and those of ours that name no chunk may need any chunk, so they fail while a
 * chunk is lost.
 *
 * Several saves may use one handle. Each publication makes all pending chunks durable. A manifest of
 * our own format releases the chunks that it names, as often as it names them; others belong to
 * other saves and stay pinned. A flush releases none, another manifest all. A manifest of ours may
 * then name chunks that are no longer pending: they are looked at like hits.
 */
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/file/own_manifest.h"
#include "store/file/commit/commit.h"

static void commit_fini(struct kvs_file_commit *c)
{
    if (c->refs_fd >= 0)
        close(c->refs_fd);
    kvs_file_map_fini(&c->named);
    free(c->entries);
    free(c->fds);
    free(c->tmps);
}

/* Place all entries. Continue behind a lost chunk, so that the next save learns of all lost chunks
 * at once. */
static int place_each(kv_store_v1 *h, struct kvs_file_commit *c)
{
    bool lost = false;

    for (size_t i = 0; i < c->n; i++) {
        struct kvs_file_pending *e = c->entries[i];
        char hex[KVS_FILE_HEX];
        int rc;

        if (kvs_file_is_skipped(h, e))
            continue;
        rc = kvs_file_place(h, e);
        kvs_file_hex(hex, e->key, e->key_len);
        if (rc == -ENOENT || rc == -EBADMSG) {
            kvs_file_lose(h, e);
            rc = -EIO;
        }
        if (rc == -EIO && kvs_file_is_skipped(h, e))
            continue;
        if (rc == -EIO) {
            lost = true;
            kvs_file_fail(h, EIO, "a chunk of this save can't be read any more", hex);
            continue;
        }
        if (rc < 0)
            return kvs_file_fail(h, -rc, "can't put a chunk into place", hex);
        if (!e->known || !e->same)
            c->sync_fans[kvs_file_fan(e->key)] = true;
        if (e->state == KVS_FILE_PUT)
            c->placed += e->sum.stored;
    }
    return lost ? -EIO : 0;
}

static void lock_fans(kv_store_v1 *h, const struct kvs_file_commit *c, int how)
{
    for (int i = 0; i < KVS_FILE_FANS; i++) {
        if (c->fans[i])
            kvs_file_lock(h->fan[i], how);
    }
}

/* Make the names of this publication durable, and earlier deletions of this handle. */
static int sync_names(kv_store_v1 *h, struct kvs_file_commit *c)
{
    bool deleted = false;
    int rc;

    for (int i = 0; i < KVS_FILE_FANS; i++) {
        c->sync_fans[i] |= h->unsynced[i];
        deleted |= h->unsynced[i];
    }
    if (c->whole_fs && (c->n || deleted) && syncfs(h->root) < 0)
        return kvs_file_fail(h, errno, "can't sync directories", "chunks");
    if (!c->whole_fs && c->n && atomic_load_explicit(&h->side_car, memory_order_relaxed) &&
        (rc = kvs_file_sync_dir(h, h->sums)) < 0)
        return kvs_file_fail(h, -rc, "can't sync a directory", "sums");
    for (int i = 0; i < KVS_FILE_FANS; i++) {
        if (!c->whole_fs && c->sync_fans[i] && (rc = kvs_file_sync_dir(h, h->fan[i])) < 0)
            return kvs_file_fail(h, -rc, "can't sync a directory", "chunks");
        h->unsynced[i] = false;
    }
    return 0;
}

static int place_all(kv_store_v1 *h, struct kvs_file_commit *c)
{
    int rc = place_each(h, c);

    kvs_file_used_add(h, (int64_t)c->placed);
    return rc < 0 ? rc : sync_names(h, c);
}

static bool any_lost(kv_store_v1 *h, const struct kvs_file_commit *c)
{
    bool lost = false;

    pthread_mutex_lock(&h->lock);
    for (size_t i = 0; i < c->n; i++)
        lost |= c->entries[i]->state == KVS_FILE_LOST && c->entries[i]->needed;
    pthread_mutex_unlock(&h->lock);
    return lost;
}

static int note_refs(kv_store_v1 *h, struct kvs_file_commit *c, const char *file, bool empty)
{
    struct kv_buf records = KV_BUF_INIT;
    int rc;

    for (size_t i = 0; i < c->n; i++)
        kvs_file_add_record(&records, c->entries[i]->key, c->entries[i]->key_len);
    kvs_file_history_records(h, &records);
    c->noted = true;
    rc = kvs_file_note_refs(h, file, empty, &records, &c->refs_fd);
    kv_buf_fini(&records);
    return rc;
}

/* Run the steps of a publication. @file: NULL without a manifest, whose tmp file is @n. Sets
 * *suspect when a sync failed, so that synced files can't be trusted. */
static int carry_out(kv_store_v1 *h, struct kvs_file_commit *c, const char *file, uint64_t n,
                     int fd, uint64_t len, bool *suspect)
{
    int rc = kvs_file_commit_prepare(h, c);

    if (rc == 0 && file && c->opaque)
        rc = note_refs(h, c, file, len == 0);
    if (rc < 0)
        return rc;
    if (c->refs_fd >= 0) {
        c->fds[c->n_sync] = c->refs_fd;
        c->tmps[c->n_sync++] = 0;
    }
    if (file) {
        c->fds[c->n_sync] = fd;
        c->tmps[c->n_sync++] = n;
        c->bytes += len;
    }
    rc = kvs_file_barrier(h, c->fds, c->tmps, c->n_sync, c->bytes, &c->whole_fs);
    if (rc < 0) {
        *suspect = true;
        return kvs_file_fail(h, -rc, "can't sync", file);
    }
    rc = kvs_file_make_room(h, c->bytes);
    if (rc < 0)
        return rc;
    /* Chunk and side-car are two files, so only one publication at a time may change them. */
    lock_fans(h, c, atomic_load_explicit(&h->side_car, memory_order_relaxed) ? LOCK_EX : LOCK_SH);
    rc = place_all(h, c);
    if (rc == 0 && any_lost(h, c)) /* a reader found the damage during the publication */
        rc = kvs_file_fail(h, EIO, "a chunk of this save is lost: put it again", file);
    if (rc == 0 && file) {
        rc = kvs_file_reveal(h, n, file);
        if (rc < 0)
            kvs_file_fail(h, -rc, "can't publish a manifest", file);
    }
    kvs_file_commit_pin(h, c, rc < 0);
    lock_fans(h, c, LOCK_UN);
    return rc;
}

static int publish_locked(kv_store_v1 *h, const char *file, uint64_t n, int fd, const void *data,
                          uint64_t len)
{
    bool suspect = false, opaque = !kv_is_own_manifest(data, len);
    struct kvs_manifest *m = NULL;
    struct kvs_file_commit c;
    int rc;

    /* one that can't be decoded may need any chunk; for want of memory nothing is known of it */
    if (!opaque && kvs_manifest_decode(data, len, &m) == -ENOMEM)
        return -ENOMEM;
    if (!(m && m->n_chunks > 0) && kvs_file_owes(h)) {
        kvs_manifest_free(m);
        return kvs_file_fail(h, EIO, "chunks were lost with their folder: put them again", file);
    }
    rc = kvs_file_commit_collect(h, &c, m, !file);
    kvs_manifest_free(m);
    c.opaque = opaque;
    if (rc == 0) {
        rc = carry_out(h, &c, file, n, fd, len, &suspect);
        if (c.noted)
            kvs_file_refs_done(h, file);
        if (rc == 0 && file)
            kvs_file_history_add(h, c.entries, c.n, c.opaque);
        if (rc == 0)
            kvs_file_commit_finish(h, &c);
        else
            kvs_file_commit_give_up(h, &c, suspect);
    }
    commit_fini(&c);
    return rc;
}

static int publish_once(kv_store_v1 *h, const char *name, const void *data, size_t len)
{
    char file[KVS_FILE_NAME];
    struct kvs_file_sum sum;
    uint64_t n = 0;
    int rc = kvs_file_writable(h), fd = -1;

    if (rc < 0)
        return kvs_file_fail(h, -rc, "the store can't be written", name);
    if (name) {
        rc = kvs_file_name_encode(file, name);
        if (rc == 0 && !kvs_file_manifest_fits(h, file))
            rc = -ENAMETOOLONG;
        if (rc < 0)
            return kvs_file_fail(h, -rc, "not a name for a manifest", name);
        rc = kvs_file_write_tmp(h, kvs_file_owner(name, strlen(name), true), data, len, false, &n,
                                &sum, &fd);
    }
    if (rc < 0)
        return rc;
    kvs_file_history_thread(h);
    pthread_mutex_lock(&h->commit);
    rc = publish_locked(h, name ? file : NULL, n, fd, data, len);
    pthread_mutex_unlock(&h->commit);
    if (fd >= 0) {
        close(fd);
        atomic_fetch_sub(&h->kept_fds, 1);
    }
    if (rc < 0 && name)
        kvs_file_drop_tmp(h, n);
    return rc;
}

int kvs_file_publish(kv_store_v1 *h, const char *name, const void *data, size_t len)
{
    int rc = !h || (name && !data && len) ? -EINVAL : h->pid == getpid() ? 0 : -ECHILD;
    uint64_t turn;

    if (rc < 0)
        return rc;
    for (int i = 0; i < 2; i++) {
        rc = kvs_file_follow(h, -1);
        if (rc < 0)
            break;
        turn = atomic_load_explicit(&h->places.turn, memory_order_relaxed);
        rc = publish_once(h, name, data, len);
        if (rc != -ENOENT || (kvs_file_follow(h, -1) == 0 &&
                              turn == atomic_load_explicit(&h->places.turn, memory_order_relaxed)))
            break;
    }
    return rc == -ENOENT ? -EIO : rc; /* nothing that was asked for is missing */
}
