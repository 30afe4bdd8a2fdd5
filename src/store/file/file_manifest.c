// SPDX-License-Identifier: Apache-2.0
/**
 * Manifests in place: published, read, deleted. commit/commit.c explains what must be durable before.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "store/file/file_impl.h"

void kvs_file_manifest_side_car(char ret[KVS_FILE_NAME + 16], const char *file)
{
    snprintf(ret, KVS_FILE_NAME + 16, "sums/m-%s", file);
}

bool kvs_file_manifest_fits(kv_store_v1 *h, const char *file)
{
    char side_car[KVS_FILE_NAME + 16];

    kvs_file_manifest_side_car(side_car, file);
    return !atomic_load_explicit(&h->side_car, memory_order_relaxed) ||
           strlen(strchr(side_car, '/') + 1) < KVS_FILE_NAME;
}

static int replace_side_car(kv_store_v1 *h, uint64_t n, const char *from, const char *file)
{
    char to[KVS_FILE_NAME + 16], name[KVS_FILE_NAME];
    int rc;

    kvs_file_manifest_side_car(to, file);
    kvs_file_name_decode(name, file);
    rc = kvs_file_keep_sum(h, n, file, kvs_file_owner(name, strlen(name), true));
    if (rc < 0)
        return rc;
    rc = kvs_file_rename(h, h->tmp, strchr(from, '/') + 1, h->sums, strchr(to, '/') + 1);
    if (rc < 0)
        return rc;
    return kvs_file_sync_dir(h, h->sums);
}

int kvs_file_reveal(kv_store_v1 *h, uint64_t n, const char *file)
{
    char tmp[KVS_FILE_TMP], from[KVS_FILE_TMP + 8];
    bool two;
    int rc = 0;

    kvs_file_tmp_name(h, tmp, n);
    snprintf(from, sizeof(from), "tmp/%s.s", tmp);
    two = atomic_load_explicit(&h->side_car, memory_order_relaxed) &&
          faccessat(h->tmp, strchr(from, '/') + 1, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
    kvs_file_lock(h->root, two ? LOCK_EX : LOCK_SH); /* side-car and manifest change together */
    if (two)
        rc = replace_side_car(h, n, from, file);
    if (rc == 0 && renameat(h->tmp, tmp, h->root, file) < 0)
        rc = -errno;
    flock(h->root, LOCK_UN);
    if (rc < 0)
        return rc;
    return kvs_file_sync_dir(h, h->root);
}

int kvs_file_get_manifest(kv_store_v1 *h, const char *name, uint8_t **ret, size_t *ret_len)
{
    char file[KVS_FILE_NAME], side_car[KVS_FILE_NAME + 16];
    uint64_t owner;
    struct stat st;
    int fd, rc = !h || !ret || !ret_len ? -EINVAL : h->pid == getpid() ? 0 : -ECHILD;

    if (rc == 0)
        rc = kvs_file_name_encode(file, name);
    if (rc < 0)
        return rc;
    kvs_file_manifest_side_car(side_car, file);
    owner = kvs_file_owner(name, strlen(name), true);
    rc = kvs_file_read(h, h->root, file, side_car, owner, ret, ret_len, &st);
    if (rc == -ENOENT && kvs_file_follow(h, -1) > 0)
        rc = kvs_file_read(h, h->root, file, side_car, owner, ret, ret_len, &st);
    if (rc == -EBADMSG) { /* another process may be replacing its side-car */
        fd = kvs_file_lock_root(h);
        rc = kvs_file_read(h, h->root, file, side_car, owner, ret, ret_len, &st);
        if (fd >= 0)
            close(fd);
    }
    if (rc == -ENOENT && !kvs_file_manifest_fits(h, file)) /* a save asks before it reads */
        return -ENAMETOOLONG;
    if (rc == 0)
        kvs_file_note_use(h, h->root, file, &st);
    /* Leave a damaged manifest where it is: collection must see that it can't be read, and delete
     * nothing. */
    if (rc < 0 && rc != -ENOENT && rc != -EBADMSG)
        return kvs_file_fail(h, -rc, "can't read a manifest", file);
    return rc;
}

static int delete_locked(kv_store_v1 *h, const char *file)
{
    char side_car[KVS_FILE_NAME + 16];
    struct stat st;
    int rc = 0;

    kvs_file_manifest_side_car(side_car, file);
    kvs_file_lock(h->root, LOCK_EX);
    if (fstatat(h->root, file, &st, AT_SYMLINK_NOFOLLOW) < 0)
        rc = -errno;
    else if (!S_ISREG(st.st_mode)) /* not a file: never listed as a manifest, and not the store's */
        rc = -ENOENT;
    else if (unlinkat(h->root, file, 0) < 0)
        rc = -errno;
    else if ((rc = kvs_file_sync_dir(h, h->root)) == 0)
        unlinkat(h->sums, strchr(side_car, '/') + 1, 0);
    flock(h->root, LOCK_UN);
    if (rc == 0)
        kvs_file_forget_refs(h, file);
    return rc == -ENOENT ? 0 : rc;
}

int kvs_file_delete_manifest(kv_store_v1 *h, const char *name)
{
    char file[KVS_FILE_NAME];
    int rc = h ? kvs_file_begin(h) : -EINVAL;

    if (rc == 0)
        rc = kvs_file_name_encode(file, name);
    if (rc < 0)
        return rc;
    rc = kvs_file_deletable(h);
    if (rc < 0)
        return kvs_file_fail(h, -rc, "can't delete a manifest", file);
    pthread_mutex_lock(&h->commit);
    /* a publication of the same name notes its chunks either before or after this deletion */
    kvs_file_refs_lock(h);
    rc = delete_locked(h, file);
    kvs_file_refs_unlock(h);
    pthread_mutex_unlock(&h->commit);
    return rc < 0 ? kvs_file_fail(h, -rc, "can't delete a manifest", file) : 0;
}
