// SPDX-License-Identifier: Apache-2.0
/** Moving pending chunks into place; commit/commit.c explains pins and flocks. */
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "store/file/file_impl.h"

/* Read and verify the whole chunk in place. Returns 1: good; 0: not; negative: a failure hides the
 * answer. */
static int good_in_place(kv_store_v1 *h, const struct kvs_file_pending *e, const char *hex)
{
    int fan = h->fan[kvs_file_fan(e->key)], rc;
    struct kvs_file_seen seen;
    struct stat st;

    if (fstatat(fan, hex, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode)) {
        seen = kvs_file_see(&st);
        if (kvs_file_known(h, e->key, e->key_len, &seen))
            return 1;
    }
    rc = kvs_file_verify(h, fan, hex, kvs_file_owner(e->key, e->key_len, false), &st);
    return kvs_file_passing(rc) ? rc : rc == 0;
}

/* Note that the file in tmp/ is gone, so that only the chunk in place is left. */
static void unpin(kv_store_v1 *h, struct kvs_file_pending *e)
{
    pthread_mutex_lock(&h->lock);
    e->pinned = false;
    pthread_mutex_unlock(&h->lock);
}

/* True when a hit's file is worth linking into place again; false when it has gone bad since, which
 * may be why it isn't in place. */
static int is_worth(kv_store_v1 *h, const struct kvs_file_pending *e, const char *tmp,
                    const char *hex)
{
    char side_car[KVS_FILE_HEX + 8];
    uint8_t *data;
    struct stat st;
    size_t len;
    int rc;

    if (e->state == KVS_FILE_PUT)
        return 0;
    kvs_file_chunk_side_car(side_car, hex);
    rc = kvs_file_read(h, h->tmp, tmp, side_car, kvs_file_owner(e->key, e->key_len, false), &data,
                       &len, &st);
    if (rc == 0)
        free(data);
    return rc;
}

/* Move the checksum before the file: the chunk is a miss until the file follows. No other process
 * changes this key. */
static int move_side_car(kv_store_v1 *h, const char *tmp, const char *hex)
{
    char from[KVS_FILE_TMP + 8], to[KVS_FILE_HEX + 8];
    int rc;

    if (!atomic_load_explicit(&h->side_car, memory_order_relaxed))
        return 0;
    snprintf(from, sizeof(from), "tmp/%s.s", tmp);
    kvs_file_chunk_side_car(to, hex);
    rc = kvs_file_rename(h, h->tmp, strchr(from, '/') + 1, h->sums, strchr(to, '/') + 1);
    return rc == -ENOENT ? 0 : rc;
}

static void drop_side_car(kv_store_v1 *h, const char *tmp)
{
    char from[KVS_FILE_TMP + 8];

    if (!atomic_load_explicit(&h->side_car, memory_order_relaxed))
        return;
    snprintf(from, sizeof(from), "%s.s", tmp);
    unlinkat(h->tmp, from, 0);
}

/* Rename @twin to @to. When that fails remove @twin, which would be in the way of the next try. */
static int rename_twin(kv_store_v1 *h, const char *twin, int at, const char *to)
{
    int rc = kvs_file_rename(h, h->tmp, twin, at, to);

    if (rc < 0)
        unlinkat(h->tmp, twin, 0);
    return rc;
}

/* Another writer put the chunk first: keep its file and pin that instead of ours. A file that can't
 * be pinned is young enough, since it came after our put. Exception: our copy of a chunk that could
 * be neither pinned nor touched replaces the file. */
static int keep_theirs(kv_store_v1 *h, struct kvs_file_pending *e, const char *tmp, const char *hex)
{
    int fan = h->fan[kvs_file_fan(e->key)];
    char twin[KVS_FILE_TMP + 4];
    int rc;

    snprintf(twin, sizeof(twin), "%s.p", tmp);
    if (linkat(fan, hex, h->tmp, twin, 0) == 0) {
        rc = rename_twin(h, twin, h->tmp, tmp);
        if (rc == 0)
            drop_side_car(h, tmp);
        return rc;
    }
    if (!kvs_file_no_link(errno))
        return errno == ENOENT ? -EAGAIN : -errno;
    if (!e->copy || move_side_car(h, tmp, hex) < 0 ||
        /* a sticky directory: the file can't be replaced at all */
        kvs_file_rename(h, h->tmp, tmp, fan, hex) < 0)
        unlinkat(h->tmp, tmp, 0);
    drop_side_car(h, tmp);
    unpin(h, e);
    return 0;
}

static int put_ours(kv_store_v1 *h, struct kvs_file_pending *e, const char *tmp, const char *hex)
{
    int fan = h->fan[kvs_file_fan(e->key)], rc = move_side_car(h, tmp, hex);
    char twin[KVS_FILE_TMP + 4];

    if (rc < 0)
        return rc;
    snprintf(twin, sizeof(twin), "%s.p", tmp);
    if (linkat(h->tmp, tmp, h->tmp, twin, 0) == 0)
        return rename_twin(h, twin, fan, hex);
    if (!kvs_file_no_link(errno))
        return -errno;
    rc = kvs_file_rename(h, h->tmp, tmp, fan, hex);
    if (rc < 0)
        return rc;
    unpin(h, e);
    return 0;
}

/* Decide about a file that is in place under this chunk's name: our own, another writer's good one,
 * or a bad one. */
static int settle(kv_store_v1 *h, struct kvs_file_pending *e, const char *tmp, const char *hex)
{
    struct stat a, b;
    int rc;

    if (fstatat(h->tmp, tmp, &a, AT_SYMLINK_NOFOLLOW) < 0)
        return -errno;
    if (fstatat(h->fan[kvs_file_fan(e->key)], hex, &b, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? -EAGAIN : -errno;
    if (a.st_ino == b.st_ino)
        return 0;
    rc = good_in_place(h, e, hex);
    if (rc != 0)
        return rc < 0 ? rc : keep_theirs(h, e, tmp, hex);
    rc = is_worth(h, e, tmp, hex);
    return rc < 0 ? rc : put_ours(h, e, tmp, hex);
}

/* Link a chunk into its place, which was empty. -EEXIST: another writer has put it meanwhile. */
static int link_in(kv_store_v1 *h, struct kvs_file_pending *e, const char *tmp, const char *hex)
{
    int rc = is_worth(h, e, tmp, hex);

    if (rc == 0)
        rc = move_side_car(h, tmp, hex);
    if (rc < 0)
        return rc;
    if (linkat(h->tmp, tmp, h->fan[kvs_file_fan(e->key)], hex, 0) == 0)
        return 0;
    return kvs_file_no_link(errno) ? put_ours(h, e, tmp, hex) : -errno;
}

static int place_linked(kv_store_v1 *h, struct kvs_file_pending *e, const char *tmp,
                        const char *hex)
{
    int rc = -EAGAIN;

    /* Give a chunk that comes back a new time, so that notes about it become invalid
     * (file_known.c). */
    if (e->state == KVS_FILE_HIT)
        utimensat(h->tmp, tmp, NULL, AT_SYMLINK_NOFOLLOW);
    for (int i = 0; i < 100 && rc == -EAGAIN; i++) {
        rc = settle(h, e, tmp, hex);
        if (rc == -EAGAIN)
            rc = link_in(h, e, tmp, hex);
        if (rc == -EEXIST)
            rc = -EAGAIN;
    }
    return rc;
}

/* Rename a new chunk into place: one change to the directories where link and unlink are two.
 * -EEXIST: a file may be in place (also where the file system can't tell), so look at it first. */
static int move_in(kv_store_v1 *h, struct kvs_file_pending *e, const char *tmp, const char *hex)
{
    int fan = h->fan[kvs_file_fan(e->key)];

    if (atomic_load_explicit(&h->side_car, memory_order_relaxed))
        return -EEXIST; /* a chunk in place may need the side-car in place */
    if (renameat2(h->tmp, tmp, fan, hex, RENAME_NOREPLACE) < 0) {
        int error = errno;

        if (error == EINVAL || error == ENOSYS)
            return -EEXIST;
        if (error == ENOENT && faccessat(fan, hex, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
            return 0;
        return -error;
    }
    unpin(h, e);
    return 0;
}

/* True when a reader found the chunk damaged while the publication ran. */
static bool is_lost(kv_store_v1 *h, const struct kvs_file_pending *e)
{
    bool lost;

    pthread_mutex_lock(&h->lock);
    lost = e->state == KVS_FILE_LOST;
    pthread_mutex_unlock(&h->lock);
    return lost;
}

/* Check that the file that was hit is still in place and can be read. A changed file is
 * verified: a publication or reader marked it as used, or it was damaged. -EEXIST: another file;
 * -EBADMSG: bad. */
static int still_there(kv_store_v1 *h, struct kvs_file_pending *e, const char *hex)
{
    struct kvs_file_seen now;
    struct stat st;
    int rc;

    if (!e->seen.ino || fstatat(h->fan[kvs_file_fan(e->key)], hex, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return -EEXIST;
    now = kvs_file_see(&st);
    if (now.ino != e->seen.ino)
        return -EEXIST;
    e->same = kvs_file_unchanged(&now, &e->seen);
    e->seen.ctime_ns = now.ctime_ns;
    rc = e->same ? 1 : good_in_place(h, e, hex);
    return rc < 0 ? rc : rc ? 0 : -EBADMSG;
}

/* Place a chunk that only its lease protected, or its age where there are no hard links. */
static int place_unpinned(kv_store_v1 *h, struct kvs_file_pending *e, const char *hex)
{
    int rc = e->state == KVS_FILE_HIT ? still_there(h, e, hex) : -EEXIST;

    if (rc == -EEXIST) {
        if (faccessat(h->fan[kvs_file_fan(e->key)], hex, F_OK, AT_SYMLINK_NOFOLLOW) < 0)
            return -errno;
        rc = good_in_place(h, e, hex);
        rc = rc < 0 ? rc : rc ? 0 : -EBADMSG;
    }
    return rc;
}

/* Place a chunk. Returns 0 when the chunk in place is verified. */
static int place(kv_store_v1 *h, struct kvs_file_pending *e, const char *hex)
{
    char tmp[KVS_FILE_TMP];
    int rc;

    if (is_lost(h, e))
        return -EIO;
    if (!e->pinned)
        return place_unpinned(h, e, hex);
    kvs_file_tmp_name(h, tmp, e->tmp);
    if (e->state == KVS_FILE_PUT)
        rc = move_in(h, e, tmp, hex);
    else
        rc = still_there(h, e, hex);
    return rc == -EEXIST ? place_linked(h, e, tmp, hex) : rc;
}

/* Set the chunk's time of use: pin and lease end with this publication, and a sweep that marked
 * before it decides by age, in seconds. A chunk that is to be noted gets a time that we choose,
 * unless the file belongs to another owner. A lease has set the time already. */
static void note_use(const kv_store_v1 *h, struct kvs_file_pending *e, const char *hex)
{
    int fan = h->fan[kvs_file_fan(e->key)];
    struct timespec times[2];
    struct stat st;

    if (clock_gettime(CLOCK_REALTIME, &times[0]) == 0) {
        /* sweeps compare whole seconds, so a lease's time within this second is enough */
        e->sure =
            e->leased && e->same && e->seen.mtime_ns / (int64_t)KV_NS_PER_S == times[0].tv_sec;
        e->seen.last = e->sure && !e->pinned; /* the end of a pin changes ctime */
        if (e->sure)
            return;
        times[1] = times[0];
        e->sure = utimensat(fan, hex, times, AT_SYMLINK_NOFOLLOW) == 0;
    }
    if (!e->sure) {
        utimensat(fan, hex, NULL, AT_SYMLINK_NOFOLLOW);
        return;
    }
    if (!e->same) {
        e->sure = fstatat(fan, hex, &st, AT_SYMLINK_NOFOLLOW) == 0;
        e->seen = kvs_file_see(&st);
    }
    e->seen.mtime_ns = (int64_t)kv_timespec_ns(&times[0]);
}

int kvs_file_place(kv_store_v1 *h, struct kvs_file_pending *e)
{
    char hex[KVS_FILE_HEX];
    int rc;

    e->same = e->sure = false;
    kvs_file_hex(hex, e->key, e->key_len);
    rc = place(h, e, hex);
    if (rc == 0)
        note_use(h, e, hex);
    return rc;
}
