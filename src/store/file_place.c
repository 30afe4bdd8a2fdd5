// SPDX-License-Identifier: Apache-2.0
/** Moving pending chunks into place; the rules of pins and flocks are told in file_commit.c. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "store/file_impl.h"

static bool good_in_place(kv_store_v1 *h, const struct kvs_file_pending *e, const char *hex)
{
    char side_car[KVS_FILE_HEX + 8];
    struct kvs_file_sum sum;
    struct stat st;
    int fd = openat(h->fan[kvs_file_fan(e->key)], hex, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    bool good;

    if (fd < 0)
        return false;
    kvs_file_chunk_side_car(side_car, hex);
    good = fstat(fd, &st) == 0 && kvs_file_load_sum(h, fd, side_car, &sum) == 0 &&
           sum.stored == (uint64_t)st.st_size &&
           sum.owner == kvs_file_owner(e->key, e->key_len, false);
    close(fd);
    return good;
}

/* Something is there under our name: ours already, another writer's good one, or a bad one. */
static int settle(kv_store_v1 *h, const struct kvs_file_pending *e, const char *tmp,
                  const char *hex)
{
    int fan = h->fan[kvs_file_fan(e->key)];
    char twin[KVS_FILE_TMP + 4];
    struct stat a, b;

    if (fstatat(h->tmp, tmp, &a, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    if (fstatat(fan, hex, &b, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? -EAGAIN : -errno;
    if (a.st_ino == b.st_ino)
        return 0;
    snprintf(twin, sizeof(twin), "%s.p", tmp);
    if (good_in_place(h, e, hex)) { /* first come, first kept: pin theirs instead of ours */
        if (linkat(fan, hex, h->tmp, twin, 0) < 0)
            return errno == ENOENT ? -EAGAIN : -errno;
        return renameat(h->tmp, twin, h->tmp, tmp) < 0 ? -errno : 0;
    }
    if (linkat(h->tmp, tmp, h->tmp, twin, 0) < 0)
        return -errno;
    return renameat(h->tmp, twin, fan, hex) < 0 ? -errno : 0;
}

static int place_linked(kv_store_v1 *h, const struct kvs_file_pending *e, const char *tmp,
                        const char *hex)
{
    int rc = -EAGAIN;

    for (int i = 0; i < 100 && rc == -EAGAIN; i++) {
        if (linkat(h->tmp, tmp, h->fan[kvs_file_fan(e->key)], hex, 0) == 0)
            return 0;
        rc = errno == EEXIST ? settle(h, e, tmp, hex) : -errno;
    }
    return rc;
}

/* A new chunk moves: one change to the directories instead of two. -EEXIST: look at what is there. */
static int move_in(kv_store_v1 *h, struct kvs_file_pending *e, const char *tmp, const char *hex)
{
    int fan = h->fan[kvs_file_fan(e->key)];

    if (renameat2(h->tmp, tmp, fan, hex, RENAME_NOREPLACE) < 0) {
        if (errno != EINVAL && errno != ENOSYS)
            return errno == ENOENT && faccessat(fan, hex, F_OK, 0) == 0 ? 0 : -errno;
        if (!atomic_load_explicit(&h->no_links, memory_order_relaxed))
            return -EEXIST; /* the file system can't: link it then */
        if (renameat(h->tmp, tmp, fan, hex) < 0)
            return errno == ENOENT && faccessat(fan, hex, F_OK, 0) == 0 ? 0 : -errno;
    }
    pthread_mutex_lock(&h->lock);
    e->pinned = false;
    pthread_mutex_unlock(&h->lock);
    return 0;
}

int kvs_file_place(kv_store_v1 *h, struct kvs_file_pending *e)
{
    char tmp[KVS_FILE_TMP], hex[KVS_FILE_HEX], from[KVS_FILE_TMP + 8], to[KVS_FILE_HEX + 8];
    int fan = h->fan[kvs_file_fan(e->key)], rc;

    kvs_file_hex(hex, e->key, e->key_len);
    if (!e->pinned) /* no hard links here: nothing kept it but its age */
        return faccessat(fan, hex, F_OK, 0) < 0 ? -errno : 0;
    kvs_file_tmp_name(h, tmp, e->tmp);
    if (e->state == KVS_FILE_PUT && atomic_load_explicit(&h->side_car, memory_order_relaxed)) {
        snprintf(from, sizeof(from), "tmp/%s.s", tmp);
        kvs_file_chunk_side_car(to, hex);
        if (renameat(h->house, from, h->house, to) < 0 && errno != ENOENT)
            return -errno;
    }
    if (e->state == KVS_FILE_PUT)
        rc = move_in(h, e, tmp, hex);
    else
        rc = -EEXIST;
    return rc == -EEXIST ? place_linked(h, e, tmp, hex) : rc;
}
