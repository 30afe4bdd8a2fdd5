// SPDX-License-Identifier: Apache-2.0
/** Setting aside: move to bad/ files that don't verify, and entries that aren't the store's. */
#include <inttypes.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/file/beneath.h"
#include "store/file/file_impl.h"

static int count_bad(kv_store_v1 *h)
{
    DIR *dir = kvs_file_dir(h->bad);
    int n = 0;

    if (!dir)
        return KVS_FILE_BAD_MAX;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n - 2;
}

/* True when @name is still the same file, neither replaced meanwhile nor set aside by another
 * process. */
static bool is_same(int dirfd, const char *name, const struct stat *st)
{
    struct stat now;

    return fstatat(dirfd, name, &now, AT_SYMLINK_NOFOLLOW) == 0 && now.st_ino == st->st_ino;
}

static int to_bad(kv_store_v1 *h, int dirfd, const char *name)
{
    char aside[KVS_FILE_NAME + 8];

    snprintf(aside, sizeof(aside), "%.200s.%.8s.%" PRIu64, name, *h->writer ? h->writer : "full",
             atomic_fetch_add_explicit(&h->next_tmp, 1, memory_order_relaxed));
    return renameat(dirfd, name, h->bad, aside) < 0 ? -errno : 0;
}

/* Move a damaged file to bad/. Keep entries that aren't files: the store did not make them. */
static void move_aside(kv_store_v1 *h, int dirfd, const char *name, const struct stat *st)
{
    int rc;

    if (S_ISREG(st->st_mode) && count_bad(h) >= KVS_FILE_BAD_MAX)
        rc = unlinkat(dirfd, name, 0) < 0 ? -errno : 0;
    else
        rc = to_bad(h, dirfd, name);
    if (rc < 0)
        kvs_file_fail(h, -rc, "can't move a bad file to bad/", name);
    else if (S_ISREG(st->st_mode) && dirfd != h->root && dirfd != h->tmp)
        kvs_file_used_add(h, -(int64_t)st->st_size);
}

/* Move away @name, which isn't the store's file. Returns 0 when the name is free. */
static int clear_way(kv_store_v1 *h, int dirfd, const char *name)
{
    char where[512], which[512];
    int rc = to_bad(h, dirfd, name);

    if (rc == 0)
        kv_log_warn("store", "moved to bad/: not a file of this store", "dir=%s name=%s",
                    kv_log_quote(where, sizeof(where), h->dir),
                    kv_log_quote(which, sizeof(which), name));
    return rc;
}

int kvs_file_open_own(kv_store_v1 *h, int dirfd, const char *name, int flags, bool *ret_moved)
{
    int fd = kv_beneath_file(dirfd, name, flags, 0666, KV_BENEATH_ANY_OWNER, NULL);

    if (fd != -ELOOP && fd != -EISDIR && fd != -ENXIO && fd != -EMLINK)
        return fd;
    if (kvs_file_deletable(h) < 0 || clear_way(h, dirfd, name) < 0)
        return fd;
    if (ret_moved)
        *ret_moved = true;
    return kv_beneath_file(dirfd, name, flags, 0666, KV_BENEATH_ANY_OWNER, NULL);
}

int kvs_file_rename(kv_store_v1 *h, int from_dir, const char *from, int to_dir, const char *to)
{
    if (renameat(from_dir, from, to_dir, to) == 0)
        return 0;
    if (errno != EISDIR || clear_way(h, to_dir, to) < 0)
        return -errno;
    return renameat(from_dir, from, to_dir, to) < 0 ? -errno : 0;
}

/* True when the file may be good after all. Without our flock, another process may have replaced
 * its side-car between our reads of side-car and file. An entry that can't be read now may be good,
 * too. */
static bool may_be_good(kv_store_v1 *h, int dirfd, const char *name)
{
    char side_car[KVS_FILE_HEX + 8];
    uint8_t key[KVS_FILE_KEY_MAX], *data = NULL;
    int len = dirfd == h->tmp ? -1 : kvs_file_unhex(key, name);
    struct stat st;
    size_t n;
    int rc;

    if (len < 0)
        return false;
    kvs_file_chunk_side_car(side_car, name);
    rc = kvs_file_read(h, dirfd, name, side_car, kvs_file_owner(key, (size_t)len, false), &data, &n,
                       &st);
    free(data);
    return rc == 0 || kvs_file_passing(rc);
}

static int set_aside_locked(kv_store_v1 *h, int dirfd, const char *name, const struct stat *st)
{
    char where[512], which[512];

    if (!is_same(dirfd, name, st) || may_be_good(h, dirfd, name))
        return -EAGAIN;
    KVS_FILE_ADD(h->bad_chunks, 1);
    kv_log_error("store", "stored bytes don't verify", "dir=%s name=%s",
                 kv_log_quote(where, sizeof(where), h->dir),
                 kv_log_quote(which, sizeof(which), name));
    if (kvs_file_deletable(h) == 0)
        move_aside(h, dirfd, name, st);
    return 0;
}

int kvs_file_set_aside(kv_store_v1 *h, int dirfd, const char *name, const struct stat *st)
{
    int rc;

    pthread_mutex_lock(&h->commit); /* flocks belong to the handle, not to the thread */
    kvs_file_lock(dirfd, LOCK_EX);
    rc = set_aside_locked(h, dirfd, name, st);
    flock(dirfd, LOCK_UN);
    pthread_mutex_unlock(&h->commit);
    return rc;
}
