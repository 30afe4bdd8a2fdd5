// SPDX-License-Identifier: Apache-2.0
/**
 * Opening: directories, and this handle's name among the writers. A writer holds a flock on
 * writers/ID as long as it lives; files tmp/ID.N whose writer's lock can be had are litter.
 */
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "base/log.h"
#include "store/file_impl.h"

static int open_dir(int at, const char *name)
{
    int fd = openat(at, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    return fd < 0 ? -errno : fd;
}

/* The directory @name in @at, made when missing; *made is set when it was. */
static int make_dir(int at, const char *name, bool *made)
{
    int fd = open_dir(at, name);

    if (fd != -ENOENT)
        return fd;
    if (mkdirat(at, name, 0777) < 0 && errno != EEXIST)
        return -errno;
    *made = true;
    return open_dir(at, name);
}

/* mkdir -p; each new directory's entry is made durable. */
static int make_root(char *dir)
{
    int at = dir[0] == '/' ? open_dir(AT_FDCWD, "/") : open_dir(AT_FDCWD, "."), next;
    char *save = NULL;

    for (char *name = strtok_r(dir, "/", &save); name && at >= 0;
         name = strtok_r(NULL, "/", &save)) {
        bool made = false;

        next = make_dir(at, name, &made);
        if (made)
            fsync(at);
        close(at);
        at = next;
    }
    return at;
}

static int open_root(kv_store_v1 *h)
{
    char *copy;

    h->root = open_dir(AT_FDCWD, h->dir);
    if (h->root != -ENOENT)
        return h->root;
    copy = strdup(h->dir);
    if (!copy)
        return -ENOMEM;
    h->root = make_root(copy);
    free(copy);
    return h->root;
}

/* Without a writable directory a store can still be read: then missing folders stay missing. */
static int open_tree(kv_store_v1 *h)
{
    static const char *const houses[] = {"tmp", "writers", "bad", "refs", "sums"};
    int *const fds[] = {&h->tmp, &h->writers, &h->bad, &h->refs, &h->sums};
    bool made = false, made_fan = false, made_root = false;
    int chunks = make_dir(h->root, "chunks", &made_root);

    for (int i = 0; i < KVS_FILE_FANS && chunks >= 0; i++) {
        char digit[2] = {"0123456789abcdef"[i], 0};

        h->fan[i] = make_dir(chunks, digit, &made_fan);
        if (h->fan[i] < 0)
            h->read_only = true;
    }
    h->house = make_dir(h->root, ".kvasir", &made_root);
    for (size_t i = 0; i < KV_COUNT(houses) && h->house >= 0; i++) {
        *fds[i] = make_dir(h->house, houses[i], &made);
        if (*fds[i] < 0)
            h->read_only = true;
    }
    if ((made && fsync(h->house) < 0) || (made_fan && fsync(chunks) < 0) ||
        (made_root && fsync(h->root) < 0)) {
        int rc = -errno;

        close(chunks);
        return rc;
    }
    if (chunks >= 0)
        close(chunks);
    if (chunks < 0 || h->house < 0 || faccessat(h->tmp, ".", W_OK, AT_EACCESS) < 0)
        h->read_only = true;
    return 0;
}

/* -- Writers ---------------------------------------------------------------------------------- */

static int try_writer(kv_store_v1 *h)
{
    unsigned char id[8];
    struct stat st;

    if (getrandom(id, sizeof(id), 0) != sizeof(id))
        return -EIO;
    for (size_t i = 0; i < sizeof(id); i++)
        snprintf(h->writer + 2 * i, 3, "%02x", id[i]);
    h->writer_fd = openat(h->writers, h->writer, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (h->writer_fd < 0)
        return errno == EEXIST ? -EAGAIN : -errno;
    kvs_file_lock(h->writer_fd, LOCK_EX); /* where it isn't supported nobody can sweep us either */
    if (fstat(h->writer_fd, &st) == 0 && st.st_nlink > 0)
        return 0;
    close(h->writer_fd); /* swept between its making and its locking */
    h->writer_fd = -1;
    return -EAGAIN;
}

static int become_writer(kv_store_v1 *h)
{
    int rc = -EAGAIN;

    for (int i = 0; i < 100 && rc == -EAGAIN; i++)
        rc = try_writer(h);
    return rc;
}

/* Whether the writer is gone; its file is removed then. */
static bool writer_dead(kv_store_v1 *h, const char *id)
{
    int fd = openat(h->writers, id, O_RDWR | O_CLOEXEC);
    bool dead;

    if (fd < 0)
        return errno == ENOENT;
    dead = flock(fd, LOCK_EX | LOCK_NB) == 0;
    if (dead)
        unlinkat(h->writers, id, 0);
    close(fd);
    return dead;
}

/* Tmp files go first, then their writer's file: a sweep that is cut short can be repeated. */
static void sweep_dir(kv_store_v1 *h, int at, bool tmp)
{
    DIR *dir = kvs_file_dir(at);
    char dead[17] = "", alive[17] = "", id[17];

    if (!dir)
        return;
    for (struct dirent *e; (e = readdir(dir));) {
        if (e->d_name[0] == '.' || (tmp && strlen(e->d_name) < 18))
            continue;
        snprintf(id, sizeof(id), "%.16s", e->d_name);
        if (strcmp(id, alive) == 0 || strcmp(id, h->writer) == 0)
            continue;
        if (strcmp(id, dead) != 0) {
            bool gone = writer_dead(h, id);

            memcpy(gone ? dead : alive, id, sizeof(id));
            if (!gone)
                continue;
        }
        if (tmp)
            unlinkat(at, e->d_name, 0);
    }
    closedir(dir);
}

/* -- Open, close ------------------------------------------------------------------------------ */

/* Whether syncfs makes all durable and tells when it could not: known file systems, Linux 5.8. */
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

static kv_store_v1 *new_handle(void)
{
    kv_store_v1 *h = calloc(1, sizeof(*h));

    if (!h)
        return NULL;
    h->pid = getpid();
    h->root = h->house = h->tmp = h->writers = h->bad = h->refs = h->sums = -1;
    h->used_fd = h->writer_fd = -1;
    for (int i = 0; i < KVS_FILE_FANS; i++)
        h->fan[i] = -1;
    pthread_mutex_init(&h->lock, NULL);
    pthread_mutex_init(&h->commit, NULL);
    return h;
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
    rc = open_root(h);
    h->syncfs_tells = rc >= 0 && syncfs_tells(h->root);
    if (rc >= 0)
        rc = open_tree(h);
    if (rc >= 0 && !h->read_only) {
        rc = become_writer(h);
        if (rc == -EROFS || rc == -EACCES) {
            h->read_only = true;
            rc = 0;
        }
    }
    if (rc < 0) {
        kvs_file_fail(h, -rc, "can't open the store", NULL);
        goto fail;
    }
    if (!h->read_only) {
        sweep_dir(h, h->tmp, true);
        sweep_dir(h, h->writers, false);
    }
    return h;
fail:
    kvs_file_close(h);
    errno = -rc; /* kvs_open hands it on */
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
    free(h->known);
    kvs_file_ahead_free(h->ahead);
}

void kvs_file_close(kv_store_v1 *h)
{
    bool ours = h && h->pid == getpid(); /* a forked child closes, and leaves the files alone */

    if (!h)
        return;
    drop_pending(h, ours);
    kvs_file_history_fini(h);
    if (ours && h->writer_fd >= 0)
        unlinkat(h->writers, h->writer, 0);
    int fds[] = {h->root, h->house, h->tmp,     h->writers,  h->bad,
                 h->refs, h->sums,  h->used_fd, h->writer_fd};

    for (size_t i = 0; i < KV_COUNT(fds); i++) {
        if (fds[i] >= 0)
            close(fds[i]);
    }
    for (int i = 0; i < KVS_FILE_FANS; i++) {
        if (h->fan[i] >= 0)
            close(h->fan[i]);
    }
    if (ours) {
        pthread_mutex_destroy(&h->lock);
        pthread_mutex_destroy(&h->commit);
    }
    free(h->dir);
    free(h);
}
