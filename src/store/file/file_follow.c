// SPDX-License-Identifier: Apache-2.0
/**
 * The store's folders, when somebody removes, moves or replaces them beneath an open handle.
 *
 *     rm -rf DIR, DIR/x          the folders are made again; what was stored is missing
 *     mv DIR OLD; mkdir DIR       the handle goes on in the new DIR, where its path leads
 *     mv DIR OLD                  nothing is at the path: the handle goes on in OLD, and says so
 *
 * A handle works with descriptors. Each folder that was opened again takes the number of its
 * old descriptor (dup3): other threads use the numbers without a lock. `commit` is held, so no publication, sweep or eviction of this handle is under way, and none holds a flock. A
 * put under way that wrote into the old tmp/ notices by the turn, and begins again.
 *
 * Pending chunks whose files are gone are forgotten. A manifest that names one finds it missing. A
 * flush, or a manifest that may need any chunk, fails once for each thread. Threads that came after the
 * loss can only end a save that another one began: they are told for a moment, and not for an hour, as
 * a program may have a thread for each save.
 */
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/core/xxh.h"
#include "base/thread/thread.h"
#include "store/file/file_impl.h"

#define TRIES 8
#define TOLD_S 3600 /* later publications hear nothing of a loss; */
#define YOUNG_S 10  /* nor do, so long after it, those of threads that came after it */

/* -- Noticing ---------------------------------------------------------------------------------- */

/* True when the folder, or file, of @fd was removed. */
static bool is_gone(int fd)
{
    struct stat st;

    return fd >= 0 && (fstat(fd, &st) < 0 ? errno == ESTALE : st.st_nlink == 0);
}

/* Device and inode in one number, so that other threads read it without a lock. */
static uint64_t id_of(const struct stat *st)
{
    uint64_t both[2] = {st->st_dev, st->st_ino};

    return XXH3_64bits(both, sizeof(both)) | 1;
}

static void note(int at, const char *name, _Atomic uint64_t *ret)
{
    struct stat st;
    bool there = at >= 0 && fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0;

    atomic_store_explicit(ret, there ? id_of(&st) : 0, memory_order_relaxed);
}

void kvs_file_places_note(kv_store_v1 *h)
{
    note(h->root, ".", &h->places.root);
    note(h->root, "chunks", &h->places.chunks);
    note(h->root, ".kvasir", &h->places.house);
}

/* True when folder @name of the root is missing or another one. */
static bool is_other(kv_store_v1 *h, const char *name, const _Atomic uint64_t *id)
{
    uint64_t known = atomic_load_explicit(id, memory_order_relaxed);
    struct stat st;

    if (!known)
        return false;
    if (fstatat(h->root, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT || errno == ESTALE;
    return id_of(&st) != known;
}

/* Say once that the path leads nowhere, while the folder lives on under another name. */
static void tell_moved(kv_store_v1 *h)
{
    char where[512];

    if (!atomic_exchange_explicit(&h->places.told_moved, true, memory_order_relaxed))
        kv_log_warn("store",
                    "the store's folder was moved: this handle goes on in it, others will make a "
                    "new one",
                    "dir=%s", kv_log_quote(where, sizeof(where), h->dir));
}

/* True when the path leads to another folder, or to none while the handle's was removed. */
static bool root_strayed(kv_store_v1 *h)
{
    uint64_t known = atomic_load_explicit(&h->places.root, memory_order_relaxed);
    struct stat st;
    bool gone;

    if (!known)
        return false;
    if (stat(h->path, &st) == 0)
        return S_ISDIR(st.st_mode) && id_of(&st) != known;
    gone = errno == ENOENT && is_gone(h->root);
    if (errno == ENOENT && !gone)
        tell_moved(h);
    return gone;
}

static bool strayed(kv_store_v1 *h, int fan)
{
    const int fds[] = {h->tmp, h->writers, h->bad, h->refs, h->sums};
    bool gone = root_strayed(h) || is_other(h, "chunks", &h->places.chunks) ||
                is_other(h, ".kvasir", &h->places.house) || is_gone(h->tmp);

    if (fan >= 0)
        return gone || is_gone(h->fan[fan]);
    for (size_t i = 0; i < KV_COUNT(fds) && !gone; i++)
        gone = is_gone(fds[i]);
    if (!gone && atomic_load_explicit(&h->refuses, memory_order_acquire) == 0)
        gone = is_gone(h->writer_fd);
    for (int i = 0; i < KVS_FILE_FANS && !gone; i++)
        gone = is_gone(h->fan[i]);
    return gone;
}

/* -- Pending chunks ---------------------------------------------------------------------------- */

/* Forget the pending chunks whose files are gone: all when tmp/ is another one, else the hits that
 * have no file there. Returns their number. */
static size_t forget_pending(kv_store_v1 *h, bool all)
{
    struct kvs_file_pending *gone = NULL;
    size_t n = 0;

    pthread_mutex_lock(&h->lock);
    for (size_t i = 0; i < h->map.n_buckets; i++) {
        for (struct kvs_file_pending *e = h->map.buckets[i], *next; e; e = next) {
            next = e->next;
            if (!all && e->pinned)
                continue;
            kvs_file_map_remove(&h->map, e);
            e->next = gone;
            gone = e;
            n++;
        }
    }
    atomic_fetch_add_explicit(&h->places.turn, 1, memory_order_relaxed);
    pthread_mutex_unlock(&h->lock);
    for (struct kvs_file_pending *next; gone; gone = next) {
        next = gone->next;
        kvs_file_pending_free(h, gone);
    }
    return n;
}

bool kvs_file_owes(kv_store_v1 *h)
{
    struct kvs_file_places *p = &h->places;
    uint64_t thread = kv_thread_number(), told_s = thread > p->newest ? YOUNG_S : TOLD_S;
    size_t i = 0;

    if (!p->lost || kv_now_ns() - p->lost_ns > told_s * KV_NS_PER_S)
        return false;
    while (i < KVS_FILE_TOLD && p->told[i].thread != thread)
        i++;
    if (i < KVS_FILE_TOLD && p->told[i].turn == p->lost)
        return false;
    if (i == KVS_FILE_TOLD)
        i = p->next++ % KVS_FILE_TOLD;
    p->told[i].thread = thread;
    p->told[i].turn = p->lost;
    return true;
}

/* -- Opening again ----------------------------------------------------------------------------- */

/* Move descriptor *@from onto number *@to. What was missing when the handle was opened stays so. */
static void take(int *to, int *from)
{
    if (*from < 0)
        return;
    while (*to >= 0 && dup3(*from, *to, O_CLOEXEC) < 0 && (errno == EINTR || errno == EBUSY))
        ;
    close(*from);
    *from = -1;
}

/* True when this handle's file in writers/ is still there. */
static bool is_writer(const kv_store_v1 *h, const kv_store_v1 *fresh)
{
    struct stat a, b;

    return h->writer_fd >= 0 && fstat(h->writer_fd, &a) == 0 &&
           fstatat(fresh->writers, h->writer, &b, AT_SYMLINK_NOFOLLOW) == 0 &&
           a.st_ino == b.st_ino && a.st_dev == b.st_dev;
}

/* Become a writer of the fresh folders, under the same id: other threads read it without a lock. */
static int claim(kv_store_v1 *h, kv_store_v1 *fresh)
{
    int rc;

    if (fresh->refuses || is_writer(h, fresh))
        return 0;
    memcpy(fresh->writer, h->writer, sizeof(fresh->writer));
    rc = kvs_file_become_writer(fresh);
    if (rc == 0 && !h->writer[0])
        memcpy(h->writer, fresh->writer, sizeof(h->writer));
    return rc;
}

static bool tmp_differs(const kv_store_v1 *h, const kv_store_v1 *fresh)
{
    struct stat a, b;

    return h->tmp < 0 || fresh->tmp < 0 || fstat(h->tmp, &a) < 0 || fstat(fresh->tmp, &b) < 0 ||
           a.st_ino != b.st_ino || a.st_dev != b.st_dev;
}

static void take_all(kv_store_v1 *h, kv_store_v1 *fresh)
{
    int *const to[] = {&h->root, &h->house, &h->tmp, &h->writers, &h->bad, &h->refs, &h->sums};
    int *const from[] = {&fresh->root, &fresh->house, &fresh->tmp, &fresh->writers,
                         &fresh->bad,  &fresh->refs,  &fresh->sums};

    for (size_t i = 0; i < KV_COUNT(to); i++)
        take(to[i], from[i]);
    if (h->writer_fd >= 0)
        take(&h->writer_fd, &fresh->writer_fd);
    else /* the disk was full when the handle was opened */
        h->writer_fd = fresh->writer_fd;
    fresh->writer_fd = -1;
    pthread_mutex_lock(&h->lease_lock);
    for (int i = 0; i < KVS_FILE_FANS; i++) {
        take(&h->fan[i], &fresh->fan[i]);
        if (h->lease_fan[i] >= 0)
            close(h->lease_fan[i]);
        h->lease_fan[i] = -1;
    }
    pthread_mutex_unlock(&h->lease_lock);
    if (h->used_fd >= 0)
        close(h->used_fd);
    h->used_fd = -1;
    h->syncfs_tells = fresh->syncfs_tells;
    atomic_store_explicit(&h->refuses, fresh->refuses, memory_order_release);
    kvs_file_places_note(h);
}

/* Open the folders into @fresh, and make this handle a writer there. */
static int open_again(kv_store_v1 *h, kv_store_v1 *fresh)
{
    int rc;

    fresh->pid = h->pid;
    fresh->opts = h->opts;
    fresh->dir = h->dir;
    fresh->path = h->path;
    fresh->told_names = h->told_names;
    kvs_file_no_folders(fresh);
    rc = -ENOENT;
    for (int i = 0; i < TRIES && rc == -ENOENT; i++) { /* somebody may still be removing folders */
        kvs_file_close_folders(fresh);
        kvs_file_no_folders(fresh);
        fresh->refuses = 0;
        rc = kvs_file_open_folders(fresh);
        if (rc == 0 && fresh->refuses && i + 1 < TRIES)
            rc = -ENOENT;
        if (rc == 0)
            rc = claim(h, fresh);
    }
    h->told_names |= fresh->told_names;
    return rc;
}

static const char *what_happened(bool another, bool refuses)
{
    if (refuses)
        return another ? "the store's path leads to another folder, which can't be written to: "
                         "reading that one from now on"
                       : "the store's folders were removed, and can't be made again: nothing is "
                         "stored until they can";
    return another ? "the store's path leads to another folder: using that one from now on"
                   : "the store's folders were removed: they are made again";
}

static int again(kv_store_v1 *h)
{
    kv_store_v1 *fresh = calloc(1, sizeof(*fresh));
    bool another = root_strayed(h) && !is_gone(h->root), all;
    char where[512];
    size_t n;
    int rc;

    if (!fresh)
        return -ENOMEM;
    rc = open_again(h, fresh);
    if (rc == 0) {
        all = tmp_differs(h, fresh);
        take_all(h, fresh);
        n = forget_pending(h, all);
        if (n) {
            h->places.lost = atomic_load_explicit(&h->places.turn, memory_order_relaxed);
            h->places.lost_ns = kv_now_ns();
            h->places.newest = kv_thread_newest();
        }
        kv_log_warn("store", what_happened(another, fresh->refuses != 0), "dir=%s chunks_lost=%zu",
                    kv_log_quote(where, sizeof(where), h->dir), n);
    } else {
        kvs_file_fail(h, -rc, "the store's folders are gone and can't be made again", NULL);
    }
    kvs_file_close_folders(fresh);
    free(fresh);
    return rc < 0 ? rc : 1;
}

int kvs_file_follow(kv_store_v1 *h, int fan)
{
    int rc = 0;

    if (!strayed(h, fan))
        return 0;
    pthread_mutex_lock(&h->commit);
    if (strayed(h, fan))
        rc = again(h);
    else
        rc = 1; /* another thread did it */
    pthread_mutex_unlock(&h->commit);
    if (rc == 1)
        kvs_file_reader_forget(h);
    return rc;
}

int kvs_file_begin(kv_store_v1 *h)
{
    return h->pid == getpid() ? KV_MIN(kvs_file_follow(h, -1), 0) : -ECHILD;
}
