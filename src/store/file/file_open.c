// SPDX-License-Identifier: Apache-2.0
/**
 * Opening and closing: the store's folders.
 */
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/file/beneath.h"
#include "base/file/sync_dir.h"
#include "store/file/file_impl.h"

/* Open a directory. The path to the store may contain symbolic links; below it, no link is
 * followed. */
static int open_dir(int at, const char *name)
{
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    return fd < 0 ? -errno : fd;
}

int kvs_file_sync_dir(kv_store_v1 *h, int fd)
{
    return kv_sync_dir(fd, &h->told_names, "store", h->dir);
}

static int sync_made(kv_store_v1 *h, int fd, bool made)
{
    return made && fd >= 0 ? kvs_file_sync_dir(h, fd) : 0;
}

/* Make the store's directory and its parents; sync each new directory's entry. */
static int make_root(kv_store_v1 *h, char *dir)
{
    int at = dir[0] == '/' ? open_dir(AT_FDCWD, "/") : open_dir(AT_FDCWD, "."), next;
    char *save = NULL;

    for (char *name = strtok_r(dir, "/", &save); name && at >= 0;
         name = strtok_r(NULL, "/", &save)) {
        next = open_dir(at, name);
        if (next == -ENOENT && mkdirat(at, name, 0777) < 0 && errno != EEXIST) {
            next = -errno;
        } else if (next == -ENOENT) {
            sync_made(h, at, true);
            next = open_dir(at, name);
        }
        close(at);
        at = next;
    }
    return at;
}

static int open_root(kv_store_v1 *h)
{
    char *copy;

    h->root = open_dir(AT_FDCWD, h->path);
    if (h->root != -ENOENT || h->opts.existing)
        return h->root;
    copy = strdup(h->path);
    if (!copy)
        return -ENOMEM;
    h->root = make_root(h, copy);
    free(copy);
    return h->root;
}

/* True for errors that make a store read-only. */
static bool only_refuses(int rc)
{
    return rc == -EROFS || rc == -EACCES || rc == -EPERM || kvs_file_full(-rc);
}

struct tree {
    kv_store_v1 *h;
    mode_t make; /* mode of new folders; 0: make none */
    int rc;      /* first failure other than the file system's refusal to write */
};

/* Open a folder of the store. Returns a descriptor, or the error that reads below it give: -ENOENT
 * when it is missing. */
static int open_folder(struct tree *t, int at, const char *name, bool *made)
{
    int fd = t->rc < 0 ? -ENOENT : at < 0 ? at : kv_beneath_dir(at, name, t->make, made);

    if (fd >= 0)
        return fd;
    if (fd == -ELOOP || fd == -ENOTDIR) {
        char where[512];

        kv_log_error("store", "a link or a file is in the place of the store's folder",
                     "dir=%s name=%s", kv_log_quote(where, sizeof(where), t->h->dir), name);
    }
    if (only_refuses(fd))
        t->h->refuses = -fd;
    else if (fd == -ENOENT)
        t->h->refuses = t->h->refuses ? t->h->refuses : EROFS;
    else
        t->rc = fd;
    return fd == AT_FDCWD ? -EIO : fd;
}

static bool is_store(kv_store_v1 *h)
{
    return faccessat(h->root, "chunks", F_OK, AT_SYMLINK_NOFOLLOW) == 0 ||
           faccessat(h->root, ".kvasir", F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

/* Open the store's folders. In a read-only directory missing folders are tolerated: the store can
 * still be read. */
static int open_tree(kv_store_v1 *h)
{
    static const char *const houses[] = {"tmp", "writers", "bad", "refs", "sums"};
    int *const fds[] = {&h->tmp, &h->writers, &h->bad, &h->refs, &h->sums};
    struct tree t = {.h = h, .make = h->opts.existing && !is_store(h) ? 0 : 0777};
    bool made = false, made_fan = false, made_root = false;
    int chunks = open_folder(&t, h->root, "chunks", &made_root);

    for (int i = 0; i < KVS_FILE_FANS; i++) {
        char digit[2] = {"0123456789abcdef"[i], 0};

        h->fan[i] = open_folder(&t, chunks, digit, &made_fan);
    }
    h->house = open_folder(&t, h->root, ".kvasir", &made_root);
    for (size_t i = 0; i < KV_COUNT(houses); i++)
        *fds[i] = open_folder(&t, h->house, houses[i], &made);
    if (t.rc == 0)
        t.rc = sync_made(h, h->house, made);
    if (t.rc == 0)
        t.rc = sync_made(h, chunks, made_fan);
    if (t.rc == 0)
        t.rc = sync_made(h, h->root, made_root);
    if (chunks >= 0)
        close(chunks);
    if (t.rc == 0 && !h->refuses && faccessat(h->tmp, ".", W_OK, AT_EACCESS) < 0)
        h->refuses = errno;
    return t.rc;
}

/* -- Open, close ------------------------------------------------------------------------------ */

/* True when syncfs makes everything durable and reports failures: known file systems, Linux 5.8. */
static bool syncfs_tells(int root)
{
    static const long known[] = {EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC};
    bool is_known = false;
    struct statfs fs;
    struct utsname name;
    long major, minor;
    char *end;

    if (fstatfs(root, &fs) < 0 || uname(&name) < 0)
        return false;
    for (size_t i = 0; i < KV_COUNT(known); i++)
        is_known |= (long)fs.f_type == known[i];
    if (!is_known)
        return false;
    major = strtol(name.release, &end, 10);
    minor = *end == '.' ? strtol(end + 1, NULL, 10) : 0;
    return major > 5 || (major == 5 && minor >= 8);
}

void kvs_file_no_folders(kv_store_v1 *h)
{
    h->root = h->house = h->tmp = h->writers = h->bad = h->refs = h->sums = -1;
    h->used_fd = h->writer_fd = -1;
    for (int i = 0; i < KVS_FILE_FANS; i++)
        h->fan[i] = h->lease_fan[i] = -1;
}

static kv_store_v1 *new_handle(void)
{
    kv_store_v1 *h = calloc(1, sizeof(*h));

    if (!h)
        return NULL;
    h->pid = getpid();
    kvs_file_no_folders(h);
    pthread_mutex_init(&h->lock, NULL);
    pthread_mutex_init(&h->commit, NULL);
    pthread_mutex_init(&h->known_lock, NULL);
    pthread_mutex_init(&h->lease_lock, NULL);
    pthread_mutex_init(&h->reader_lock, NULL);
    return h;
}

/* Become a writer and sweep the files of dead writers, which on a full file system may free the
 * needed room. */
static int start_writing(kv_store_v1 *h)
{
    int rc = h->refuses ? 0 : kvs_file_become_writer(h);

    if (rc < 0) { /* not joined with the next test: gcc 11 drops this one then */
        if (!only_refuses(rc))
            return rc;
        h->refuses = -rc;
    }
    if (kvs_file_deletable(h) < 0)
        return 0;
    kvs_file_sweep_writers(h);
    kvs_file_writable(h);
    return 0;
}

/* True when no folder of the store is missing. Missing ones can't be made while other threads use
 * the handle. */
static bool is_whole(const kv_store_v1 *h)
{
    bool whole = h->tmp >= 0 && h->writers >= 0 && h->bad >= 0 && h->refs >= 0 && h->sums >= 0;

    for (int i = 0; i < KVS_FILE_FANS; i++)
        whole &= h->fan[i] >= 0;
    return whole;
}

int kvs_file_writable(kv_store_v1 *h)
{
    int refuses = atomic_load_explicit(&h->refuses, memory_order_acquire);

    if (!kvs_file_full(refuses) || !is_whole(h))
        return -refuses;
    pthread_mutex_lock(&h->commit);
    if (h->refuses)
        atomic_store_explicit(&h->refuses, -kvs_file_become_writer(h), memory_order_release);
    refuses = h->refuses;
    pthread_mutex_unlock(&h->commit);
    return -refuses;
}

int kvs_file_deletable(kv_store_v1 *h)
{
    int refuses = atomic_load_explicit(&h->refuses, memory_order_acquire);

    return kvs_file_full(refuses) ? 0 : -refuses;
}

static char *absolute(const char *dir)
{
    char *here = dir[0] == '/' ? NULL : getcwd(NULL, 0), *ret = NULL;

    if (!here)
        return strdup(dir);
    if (asprintf(&ret, "%s/%s", here, dir) < 0)
        ret = NULL;
    free(here);
    return ret;
}

int kvs_file_open_folders(kv_store_v1 *h)
{
    int rc = open_root(h);

    if (rc < 0)
        return rc;
    h->syncfs_tells = syncfs_tells(h->root);
    return open_tree(h);
}

kv_store_v1 *kvs_file_open(const char *uri)
{
    kv_store_v1 *h = uri ? new_handle() : NULL;
    int rc;

    if (!h)
        return NULL;
    rc = kvs_file_options(uri, &h->dir, &h->opts);
    if (rc < 0)
        goto fail;
    h->side_car = h->opts.side_car;
    h->path = absolute(h->dir);
    rc = h->path ? kvs_file_open_folders(h) : -ENOMEM;
    if (rc >= 0)
        rc = start_writing(h);
    kvs_file_places_note(h);
    if (rc < 0) {
        kvs_file_fail(h, -rc, "can't open the store", NULL);
        goto fail;
    }
    return h;
fail:
    kvs_file_close(h);
    errno = -rc; /* kvs_open returns it */
    return NULL;
}

static void drop_pending(kv_store_v1 *h, bool ours)
{
    for (size_t i = 0; i < h->map.n_buckets; i++) {
        for (struct kvs_file_pending *e = h->map.buckets[i], *next; e; e = next) {
            next = e->next;
            if (e->fd >= 0)
                close(e->fd);
            if (e->pinned && ours)
                kvs_file_drop_tmp(h, e->tmp);
            free(e);
        }
    }
    free(h->map.buckets);
    kvs_file_known_free(h->known);
    kvs_file_ahead_free(h->ahead);
}

void kvs_file_close_folders(kv_store_v1 *h)
{
    int fds[] = {h->root, h->house, h->tmp,     h->writers,  h->bad,
                 h->refs, h->sums,  h->used_fd, h->writer_fd};

    for (size_t i = 0; i < KV_COUNT(fds); i++) {
        if (fds[i] >= 0)
            close(fds[i]);
    }
    for (int i = 0; i < KVS_FILE_FANS; i++) {
        if (h->fan[i] >= 0)
            close(h->fan[i]);
        if (h->lease_fan[i] >= 0)
            close(h->lease_fan[i]);
    }
}

void kvs_file_close(kv_store_v1 *h)
{
    /* a forked child closes descriptors and leaves files alone */
    bool ours = h && h->pid == getpid();

    if (!h)
        return;
    if (ours)
        kvs_file_reader_stop(h);
    drop_pending(h, ours);
    kvs_file_history_fini(h);
    if (ours && h->writer_fd >= 0)
        unlinkat(h->writers, h->writer, 0);
    kvs_file_close_folders(h);
    if (ours) {
        pthread_mutex_destroy(&h->lock);
        pthread_mutex_destroy(&h->commit);
        pthread_mutex_destroy(&h->known_lock);
        pthread_mutex_destroy(&h->lease_lock);
        pthread_mutex_destroy(&h->reader_lock);
    }
    free(h->dir);
    free(h->path);
    free(h);
}
