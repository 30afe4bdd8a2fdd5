// SPDX-License-Identifier: Apache-2.0
/**
 * Putting and getting chunks. A put of a chunk that is in place (a hit) leases or pins it; a new
 * chunk goes to tmp/.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "store/file/file_impl.h"

enum { TRIES = 4 };

int kvs_file_check(kv_store_v1 *h, const void *key, size_t len)
{
    if (!h || !key || len == 0 || len > KVS_FILE_KEY_MAX)
        return -EINVAL;
    return h->pid == getpid() ? 0 : -ECHILD;
}

void kvs_file_chunk_side_car(char ret[KVS_FILE_HEX + 8], const char *hex)
{
    snprintf(ret, KVS_FILE_HEX + 8, "sums/%s", hex);
}

/* Bytes that are put. */
struct chunk {
    const struct iovec *parts;
    size_t n_parts, len;
};

/* -- Is the chunk in place? -------------------------------------------------------------------- */

/* Store our checksum for a chunk. Skip a file that was replaced, or that has a second name: its
 * checksum may be in the side-car that this call would replace. */
static void mark(kv_store_v1 *h, int fan, const char *hex, int fd, const struct kvs_file_sum *sum)
{
    char side_car[KVS_FILE_HEX + 8];
    struct stat a, b;

    kvs_file_chunk_side_car(side_car, hex);
    pthread_mutex_lock(&h->commit);
    kvs_file_lock(h->fan[fan], LOCK_EX);
    if (fstat(fd, &a) == 0 && fstatat(h->fan[fan], hex, &b, AT_SYMLINK_NOFOLLOW) == 0 &&
        a.st_ino == b.st_ino && a.st_nlink == 1)
        kvs_file_store_sum(h, fd, side_car, sum);
    flock(h->fan[fan], LOCK_UN);
    pthread_mutex_unlock(&h->commit);
}

/* Adopt a file without our checksum when it holds the bytes that are being put: give it our
 * checksum. */
static bool adopt(kv_store_v1 *h, int fd, int fan, const char *hex, uint64_t owner,
                  const struct chunk *chunk, uint64_t size)
{
    size_t len = chunk->len;
    struct kvs_file_sum sum;
    uint8_t hash[16];
    uint8_t *have;
    bool same;

    if (size != len)
        return false;
    have = malloc(len ? len : 1);
    same = have && kvs_file_read_hashed(fd, have, len, hash) == 0 &&
           kvs_parts_equal(chunk->parts, chunk->n_parts, have);
    free(have);
    if (!same)
        return false;
    /* Another program may not have synced the file. The checksum says that the file is durable, so
     * it comes after the fsync. A file that can't be marked is at least durable. */
    if (fsync(fd) < 0)
        return false;
    kvs_file_sum_parts(&sum, owner, chunk->parts, chunk->n_parts, len);
    mark(h, fan, hex, fd, &sum);
    return true;
}

/* Check the chunk in place. Returns 1: all of it verified, *ret_st is its state before the check;
 * 0: it is missing or was deleted meanwhile. */
static int look(kv_store_v1 *h, const uint8_t *key, size_t key_len, const char *hex,
                const struct chunk *chunk, struct stat *ret_st)
{
    int dir = h->fan[kvs_file_fan(key)];
    uint64_t owner = kvs_file_owner(key, key_len, false);
    int rc = kvs_file_verify(h, dir, hex, owner, ret_st), fd = -1;

    /* another program's file; when its bytes differ from the put's, treat it as torn */
    if (rc == -ENODATA) {
        fd = kvs_file_open_read(dir, hex, ret_st);
        rc = fd < 0 ? fd
             : adopt(h, fd, kvs_file_fan(key), hex, owner, chunk, (uint64_t)ret_st->st_size)
                 ? 0
                 : -EBADMSG;
    }
    /* A file that can't be read may be good, and needed by others. It stays until it can be replaced,
     * when the put is published. */
    if (rc == -EBADMSG)
        kvs_file_set_aside(h, dir, hex, ret_st);
    if (fd >= 0)
        close(fd);
    return rc == 0;
}

/* True when link() was refused for a file of our own: then the file system refuses it, not
 * fs.protected_hardlinks. */
static bool never_links(int error, int dir, const char *hex)
{
    struct stat st;

    return error != EMLINK && fstatat(dir, hex, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
           st.st_uid == geteuid();
}

/* Pin: the link keeps the chunk when another process deletes or evicts it before the
 * publication. */
int kvs_file_pin(kv_store_v1 *h, const uint8_t *key, const char *hex, struct kvs_file_pending *e)
{
    int dir = h->fan[kvs_file_fan(key)];
    char tmp[KVS_FILE_TMP];

    if (atomic_load_explicit(&h->no_links, memory_order_relaxed))
        return 0;
    e->tmp = atomic_fetch_add_explicit(&h->next_tmp, 1, memory_order_relaxed);
    kvs_file_tmp_name(h, tmp, e->tmp);
    if (linkat(dir, hex, h->tmp, tmp, 0) == 0) {
        e->pinned = true;
        return 0;
    }
    if (!kvs_file_no_link(errno))
        return -errno;
    if (never_links(errno, dir, hex))
        atomic_store_explicit(&h->no_links, true, memory_order_relaxed);
    return 0;
}

/* Put a copy of a chunk that can be neither pinned nor marked as used, since it may be deleted at
 * any moment. */
static int copy_hit(kv_store_v1 *h, struct kvs_file_pending *e, const char *hex)
{
    uint64_t owner = kvs_file_owner(e->key, e->key_len, false);
    char side_car[KVS_FILE_HEX + 8];
    uint8_t *data;
    struct stat st;
    size_t len;
    int rc;

    kvs_file_chunk_side_car(side_car, hex);
    rc = kvs_file_read(h, h->fan[kvs_file_fan(e->key)], hex, side_car, owner, &data, &len, &st);
    if (rc < 0)
        return rc;
    rc = kvs_file_write_tmp(h, owner, data, len, true, &e->tmp, &e->sum, &e->fd);
    free(data);
    e->pinned = e->copy = rc == 0;
    return rc;
}

/* Returns 1: a hit, @e is leased, pinned, young, or holds a copy. 0: the chunk is missing. */
static int find_hit(kv_store_v1 *h, struct kvs_file_pending *e, const struct chunk *chunk)
{
    int fan = h->fan[kvs_file_fan(e->key)], rc;
    char hex[KVS_FILE_HEX];
    struct stat st;

    kvs_file_hex(hex, e->key, e->key_len);
    if (fstatat(fan, hex, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return 0;
    e->seen = kvs_file_see(&st);
    e->known = S_ISREG(st.st_mode) && kvs_file_known(h, e->key, e->key_len, &e->seen);
    if (!e->known) {
        if (!look(h, e->key, e->key_len, hex, chunk, &st))
            return 0;
        e->seen = kvs_file_see(&st);
    }
    rc = kvs_file_lease(h, e, hex);
    if (rc < 0 && rc != -ENOENT)
        rc = kvs_file_pin(h, e->key, hex, e);
    /* Mark the chunk as used now; a lease or a pin does so until publication. Files of other owners
     * keep their time. */
    if (rc == 0 && !e->leased && !e->pinned && utimensat(fan, hex, NULL, AT_SYMLINK_NOFOLLOW) < 0)
        rc = copy_hit(h, e, hex);
    e->state = e->copy ? KVS_FILE_PUT : KVS_FILE_HIT;
    return rc == 0; /* -ENOENT: the chunk vanished meanwhile */
}

/* -- Put --------------------------------------------------------------------------------------- */

static bool is_pending(kv_store_v1 *h, const uint8_t *key, size_t key_len)
{
    struct kvs_file_pending *e;
    bool there;

    pthread_mutex_lock(&h->lock);
    e = kvs_file_map_find(&h->map, key, key_len);
    there = e && kvs_file_is_held(e);
    if (there) {
        e->puts++;
        e->settled = false;
    }
    pthread_mutex_unlock(&h->lock);
    return there;
}

/* Insert @e into the pending map unless another thread inserted the chunk first. Takes @e. Returns
 * 0: @e was inserted; 1: it was not; -EAGAIN: @turn is over, so begin again. */
static int insert(kv_store_v1 *h, struct kvs_file_pending *e, uint64_t turn)
{
    struct kvs_file_pending *old, *drop = NULL;
    int rc;

    pthread_mutex_lock(&h->lock);
    rc = kvs_file_map_reserve(&h->map);
    if (rc == 0 && atomic_load_explicit(&h->places.turn, memory_order_relaxed) != turn)
        rc = -EAGAIN; /* its file is in a folder that is gone */
    old = kvs_file_map_find(&h->map, e->key, e->key_len);
    e->puts = 1;
    if (rc == 0 && old && !kvs_file_is_held(old)) {
        kvs_file_map_remove(&h->map, old);
        e->puts += old->puts;
        old->gone = true;
        drop = old->busy ? NULL : old; /* a busy entry is freed by its publication */
        old = NULL;
    }
    if (rc == 0 && !old) {
        kvs_file_map_add(&h->map, e);
        e = NULL;
    } else if (old) {
        old->puts++;
        old->settled = false;
        rc = 1;
    }
    pthread_mutex_unlock(&h->lock);
    kvs_file_pending_free(h, drop);
    kvs_file_pending_free(h, e);
    return rc;
}

static int put_once(kv_store_v1 *h, const uint8_t *key, size_t key_len, const struct chunk *chunk)
{
    uint64_t turn = atomic_load_explicit(&h->places.turn, memory_order_relaxed);
    struct kvs_file_pending *e;
    int rc, there;

    if (is_pending(h, key, key_len)) {
        KVS_FILE_ADD(h->put_hits, 1);
        return 1;
    }
    e = kvs_file_pending_new(key, key_len);
    if (!e)
        return -ENOMEM;
    there = find_hit(h, e, chunk);
    if (there <= 0) {
        e->state = KVS_FILE_PUT;
        rc = kvs_file_write_tmp_parts(h, kvs_file_owner(key, key_len, false), chunk->parts,
                                      chunk->n_parts, chunk->len, true, &e->tmp, &e->sum, &e->fd);
        if (rc < 0) {
            free(e);
            return rc;
        }
        e->pinned = true;
    }
    rc = insert(h, e, turn);
    if (rc < 0)
        return rc;
    if (there > 0 || rc > 0) {
        KVS_FILE_ADD(h->put_hits, 1);
        return 1;
    }
    KVS_FILE_ADD(h->puts, 1);
    return 0;
}

static int put_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len, const struct chunk *chunk)
{
    int rc = kvs_file_check(h, key, key_len);

    if (rc < 0)
        return rc;
    kvs_file_history_thread(h);
    rc = -EAGAIN;
    for (int i = 0; i < TRIES && (rc == -EAGAIN || rc == -ENOENT); i++) {
        rc = kvs_file_follow(h, kvs_file_fan(key));
        if (rc < 0)
            break;
        rc = kvs_file_writable(h);
        if (rc < 0)
            return kvs_file_fail(h, -rc, "the store can't be written", NULL);
        rc = put_once(h, key, key_len, chunk);
    }
    return rc == -ENOENT || rc == -EAGAIN ? -EIO : rc;
}

int kvs_file_put_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len, const uint8_t *data,
                       size_t len)
{
    const struct iovec part = {.iov_base = (void *)data, .iov_len = len};
    const struct chunk chunk = {.parts = &part, .n_parts = 1, .len = len};

    return data || !len ? put_chunk(h, key, key_len, &chunk) : -EINVAL;
}

int kvs_file_put_parts(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                       const struct iovec *parts, size_t n_parts)
{
    struct chunk chunk = {.parts = parts, .n_parts = n_parts};

    if ((n_parts && !parts) || !kvs_parts_len(parts, n_parts, SIZE_MAX / 2, &chunk.len))
        return -EINVAL;
    return put_chunk(h, key, key_len, &chunk);
}

/* -- Get --------------------------------------------------------------------------------------- */

/* True when the chunk is pending, so that its bytes are in tmp/; @ret_tmp is the number there. */
static bool pending_tmp(kv_store_v1 *h, const uint8_t *key, size_t key_len, uint64_t *ret_tmp)
{
    struct kvs_file_pending *e;
    bool there;

    pthread_mutex_lock(&h->lock);
    e = kvs_file_map_find(&h->map, key, key_len);
    there = e && e->pinned && e->state != KVS_FILE_LOST;
    if (there)
        *ret_tmp = e->tmp;
    pthread_mutex_unlock(&h->lock);
    return there;
}

/* Mark a pending chunk as lost, since its bytes went bad: a publication that needs it must fail. */
static void lose(kv_store_v1 *h, const uint8_t *key, size_t key_len, uint64_t tmp)
{
    struct kvs_file_pending *e;

    pthread_mutex_lock(&h->lock);
    e = kvs_file_map_find(&h->map, key, key_len);
    if (e && e->tmp == tmp)
        e->state = KVS_FILE_LOST;
    pthread_mutex_unlock(&h->lock);
}

/* Mark a leased hit as lost when its file is missing or bad: the next put stores the chunk anew. */
static void lose_leased(kv_store_v1 *h, const uint8_t *key, size_t key_len)
{
    struct kvs_file_pending *e;

    pthread_mutex_lock(&h->lock);
    e = kvs_file_map_find(&h->map, key, key_len);
    if (e && e->leased && !e->pinned)
        e->state = KVS_FILE_LOST;
    pthread_mutex_unlock(&h->lock);
}

static bool is_in_place(kv_store_v1 *h, const uint8_t *key, const char *hex, const struct stat *st)
{
    struct stat now;

    return fstatat(h->fan[kvs_file_fan(key)], hex, &now, AT_SYMLINK_NOFOLLOW) == 0 &&
           now.st_ino == st->st_ino;
}

/* Mark a chunk as used. It was just verified, so keep its note of verification valid. */
static void note_use(kv_store_v1 *h, const uint8_t *key, size_t key_len, const char *hex,
                     struct stat *st)
{
    struct kvs_file_note note = {.key = key, .key_len = key_len, .seen = kvs_file_see(st)};
    struct kvs_file_seen before = note.seen;

    if (!kvs_file_note_use(h, h->fan[kvs_file_fan(key)], hex, st) ||
        !kvs_file_known(h, key, key_len, &before))
        return;
    note.seen = kvs_file_see(st);
    note.seen.inside = before.inside;
    kvs_file_remember(h, &note, 1);
}

/* Read a value. On a mismatch read it again into memory of our own before the file counts as bad:
 * others may write to the caller's memory, and its parts may overlap. */
static int read_value(kv_store_v1 *h, int dir, const char *name, const char *side_car,
                      uint64_t owner, struct kvs_file_value *value, struct stat *st)
{
    int rc = kvs_file_read_value(h, dir, name, side_car, owner, value, st);
    struct kvs_file_value own = {0};

    if (rc != -EBADMSG || (!value->parts && !value->each))
        return rc;
    rc = kvs_file_read_value(h, dir, name, side_car, owner, &own, st);
    if (rc == 0 && value->parts) {
        value->data = own.data;
        value->len = own.len;
        return kvs_file_value_scatter(value);
    }
    free(own.data);
    return rc == 0 ? -EAGAIN : rc; /* the pieces are handed out anew */
}

/* Read the chunk in place where another process has put it while ours, of the same key, is pending:
 * theirs stays when ours is published. -ENOENT: nobody has; other failures as read_value. */
static int get_theirs(kv_store_v1 *h, const uint8_t *key, size_t key_len, const char *hex,
                      const char *tmp, struct kvs_file_value *value)
{
    int dir = h->fan[kvs_file_fan(key)], rc;
    char side_car[KVS_FILE_HEX + 8];
    struct stat ours, st;

    if (fstatat(dir, hex, &st, AT_SYMLINK_NOFOLLOW) < 0 || !S_ISREG(st.st_mode) ||
        fstatat(h->tmp, tmp, &ours, AT_SYMLINK_NOFOLLOW) < 0 || ours.st_ino == st.st_ino)
        return -ENOENT;
    kvs_file_chunk_side_car(side_car, hex);
    rc = read_value(h, dir, hex, side_car, kvs_file_owner(key, key_len, false), value, &st);
    if (rc == 0)
        note_use(h, key, key_len, hex, &st);
    else if (rc == -EBADMSG)
        kvs_file_set_aside(h, dir, hex, &st);
    return rc;
}

static int get_once(kv_store_v1 *h, const uint8_t *key, size_t key_len, const char *hex,
                    struct kvs_file_value *value)
{
    uint64_t owner = kvs_file_owner(key, key_len, false), n;
    bool pending = pending_tmp(h, key, key_len, &n);
    char tmp[KVS_FILE_TMP], side_car[KVS_FILE_HEX + 8];
    int dir = pending ? h->tmp : h->fan[kvs_file_fan(key)], rc;
    const char *name = pending ? tmp : hex;
    struct stat st;

    kvs_file_chunk_side_car(side_car, hex);
    if (pending) {
        kvs_file_tmp_name(h, tmp, n);
        rc = get_theirs(h, key, key_len, hex, tmp, value);
        /* ours is as good as theirs that is missing, bad, or can't be read */
        if (rc == 0 || rc == -EAGAIN || rc == -ECANCELED || rc == -EMSGSIZE)
            return rc;
        snprintf(side_car, sizeof(side_car), "tmp/%s.s", tmp);
        if (faccessat(h->tmp, side_car + 4, F_OK, AT_SYMLINK_NOFOLLOW) <
            0) /* the link of a chunk that is in place */
            kvs_file_chunk_side_car(side_car, hex);
    }
    rc = read_value(h, dir, name, side_car, owner, value, &st);
    if (rc == -EBADMSG) {
        if (pending)
            lose(h, key, key_len, n);
        /* a hit: tmp/ and chunks/ name the same file */
        if (pending && is_in_place(h, key, hex, &st)) {
            dir = h->fan[kvs_file_fan(key)];
            name = hex;
            unlinkat(h->tmp, tmp, 0);
        }
        if (kvs_file_set_aside(h, dir, name, &st) == -EAGAIN && !pending)
            rc = -EAGAIN;
    }
    if (pending && rc == -ENOENT) { /* a publication has moved the file into place */
        kvs_file_chunk_side_car(side_car, hex);
        rc = read_value(h, h->fan[kvs_file_fan(key)], hex, side_car, owner, value, &st);
        if (rc == -ENOENT)
            rc = -EAGAIN;
    } else if (rc == 0 && !pending) {
        note_use(h, key, key_len, hex, &st);
    } else if (!pending && (rc == -ENOENT || rc == -EBADMSG)) {
        lose_leased(h, key, key_len);
    }
    return rc;
}

int kvs_file_get_chunk(kv_store_v1 *h, const uint8_t *key, size_t key_len,
                       struct kvs_file_value *value)
{
    struct kvs_file_ahead_get ahead;
    char hex[KVS_FILE_HEX];
    struct stat st;
    int rc = kvs_file_check(h, key, key_len);

    if (rc < 0)
        return rc;
    KVS_FILE_ADD(h->gets, 1);
    kvs_file_ahead_begin(h, &ahead, key, key_len);
    kvs_file_hex(hex, key, key_len);
    rc = -EAGAIN;
    if (kvs_file_reader_take(h, key, key_len, &value->data, &value->len, &st)) {
        note_use(h, key, key_len, hex, &st);
        rc = kvs_file_value_scatter(value);
    }
    for (int i = 0; i < TRIES && rc == -EAGAIN; i++) { /* -EAGAIN: published during the look-up */
        rc = get_once(h, key, key_len, hex, value);
        if (rc == -ENOENT && kvs_file_follow(h, kvs_file_fan(key)) > 0)
            rc = -EAGAIN;
    }
    kvs_file_ahead_end(h, &ahead, rc == 0 ? value->len : 0);
    if (rc == -EAGAIN)
        rc = -ENOENT;
    if (rc == -ENOENT || rc == -EBADMSG)
        KVS_FILE_ADD(h->get_misses, 1);
    else if (rc < 0 && rc != -ECANCELED && rc != -EMSGSIZE)
        kvs_file_fail(h, -rc, "can't read a chunk", hex);
    if (rc == -EIO || rc == -EACCES || rc == -EPERM)
        kvs_file_forget(h, key, key_len);
    return rc;
}
