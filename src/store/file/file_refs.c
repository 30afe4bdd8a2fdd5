// SPDX-License-Identifier: Apache-2.0
/**
 * .kvasir/refs/NAME: the chunks put or hit by the handles that published manifest NAME. By this
 * list a collector keeps the chunks that a manifest of unknown format may need. The file only grows
 * (a union): consumers publish the same empty manifest again and again and never name a chunk in
 * it.
 *
 * Records: length (1 byte, not 0), key, 4 bytes of XXH3-64 of both. A reader that finds no valid
 * record at an offset tries the next byte, and calls the list incomplete: a damaged record may have
 * named a chunk that is needed. A record of length 0 says the same of a manifest that another
 * program once published. A record NOTHING, without a key, makes a list without keys complete while
 * the manifest is empty: its handle had put and hit nothing. A manifest with bytes may then name any
 * chunk, so its list is missing.
 *
 * A crash leaves the beginning of a record, or zeros, at the end. They belong to a publication that
 * never ended, so the next one cuts them off, and the list is complete again.
 *
 * Locks: two flocks. refs/ is locked while one of its files changes. The `house` (.kvasir) is
 * locked shared from noting chunks until the manifest is visible, and exclusively to remove
 * records: the record of a chunk that isn't in place may belong to a publication still under way.
 * The house is waited for only with refs/ locked, so that a stream of publications can't delay a
 * deletion for ever.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/core/buf.h"
#include "base/core/xxh.h"
#include "base/file/write_all.h"
#include "store/file/file_impl.h"

enum {
    CHECK = 4,
    RECORD_MAX = 1 + KVS_FILE_KEY_MAX + CHECK,
    NOTHING = 255, /* in place of a length */
    COMPACT_FROM = 64 * 1024,
    READ_MAX = 256 << 20 /* of a file; longer ones are not ours */
};

static void add_record(struct kv_buf *buf, uint8_t kind, const uint8_t *key, size_t len)
{
    uint8_t record[RECORD_MAX];
    uint64_t check;

    record[0] = kind;
    if (len)
        memcpy(record + 1, key, len);
    check = kv_xxh64(record, 1 + len, 0);
    for (int i = 0; i < CHECK; i++)
        record[1 + len + (size_t)i] = (uint8_t)(check >> 8 * i);
    kv_buf_append(buf, record, 1 + len + CHECK);
}

void kvs_file_add_record(struct kv_buf *buf, const uint8_t *key, size_t len)
{
    add_record(buf, (uint8_t)len, key, len);
}

static size_t record_bytes(int kind)
{
    return 1 + (kind == NOTHING ? 0 : (size_t)kind) + CHECK;
}

/* Return the key length of the record at @at, or NOTHING; -1 when there is none. */
static int record_at(const uint8_t *at, size_t left)
{
    size_t len = at[0] == NOTHING ? 0 : at[0];
    uint64_t check;

    if (len > KVS_FILE_KEY_MAX || left < 1 + len + CHECK)
        return -1;
    check = kv_xxh64(at, 1 + len, 0);
    for (int i = 0; i < CHECK; i++) {
        if (at[1 + len + (size_t)i] != (uint8_t)(check >> 8 * i))
            return -1;
    }
    return at[0];
}

/* Read a file from its beginning. */
static int read_fd(int fd, struct kv_buf *buf)
{
    char piece[16384];
    ssize_t n;

    while ((n = pread(fd, piece, sizeof(piece), (off_t)buf->len)) > 0 ||
           (n < 0 && errno == EINTR)) {
        if (n > 0)
            kv_buf_append(buf, piece, (size_t)n);
        if (buf->error || buf->len > READ_MAX)
            return buf->error ? buf->error : -ENOENT;
    }
    return n < 0 ? -errno : 0;
}

static int read_all(int at, const char *file, struct kv_buf *buf)
{
    struct stat st;
    int fd = at < 0 ? -ENOENT : kvs_file_open_read(at, file, &st), rc;

    if (fd < 0)
        return fd == -EBADMSG ? -ENOENT : fd; /* not a file: no chunk was noted */
    rc = st.st_size > READ_MAX ? -ENOENT : read_fd(fd, buf);
    close(fd);
    return rc;
}

/* Call @each for all keys. @empty: the manifest has no bytes. Returns -ENOENT at the end when the
 * list isn't known to be complete; one without any record was cut. */
static int each_record(const struct kv_buf *buf, bool empty, kv_store_each_fn each, void *arg)
{
    const uint8_t *data = (const uint8_t *)buf->data;
    bool incomplete = false, known = false;
    int rc = 0;

    for (size_t i = 0; i < buf->len && rc == 0;) {
        int len = record_at(data + i, buf->len - i);
        kv_store_entry entry = {.size = sizeof(entry), .hash = data + i + 1, .len = UINT64_MAX};

        entry.hash_len = (size_t)len;
        incomplete |= len <= 0;
        known |= len != NOTHING || empty;
        if (len > 0 && len != NOTHING)
            rc = each(arg, &entry);
        i += len >= 0 ? record_bytes(len) : 1;
    }
    return rc == 0 && (incomplete || !known) ? -ENOENT : rc;
}

/* -- Compaction -------------------------------------------------------------------------------- */

struct compaction {
    kv_store_v1 *h;
    bool alone; /* no publication is under way that noted chunks not yet in place */
    struct kvs_file_map seen;
    struct kv_buf out;
};

static int keep_once(void *arg, const kv_store_entry *entry)
{
    struct compaction *c = arg;
    struct kvs_file_pending *e;
    uint8_t present = 1;

    if (kvs_file_map_reserve(&c->seen) < 0)
        return -ENOMEM;
    if (kvs_file_map_find(&c->seen, entry->hash, entry->hash_len))
        return 0;
    /* a chunk of which nothing can be said now keeps its record */
    if (c->alone && kvs_file_exists(c->h, entry->hash, entry->hash_len, 1, &present) == 0 &&
        !present)
        return 0; /* evicted: a save that puts it again notes it again */
    e = kvs_file_pending_new(entry->hash, entry->hash_len);
    if (!e)
        return -ENOMEM;
    kvs_file_map_add(&c->seen, e);
    kvs_file_add_record(&c->out, entry->hash, entry->hash_len);
    return c->out.error;
}

static int replace(kv_store_v1 *h, const char *file, const struct kv_buf *buf)
{
    char name[KVS_FILE_TMP];
    int fd, rc;

    kvs_file_tmp_name(h, name, atomic_fetch_add(&h->next_tmp, 1));
    fd = openat(h->tmp, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    rc = kv_write_all(fd, buf->data, buf->len);
    if (rc == 0 && fsync(fd) < 0)
        rc = -errno;
    close(fd);
    if (rc == 0)
        rc = kvs_file_rename(h, h->tmp, name, h->refs, file);
    if (rc < 0)
        unlinkat(h->tmp, name, 0);
    return rc;
}

/* Rewrite the file without records of chunks that are gone. A failure leaves the longer file, which
 * is as good. */
static void compact(kv_store_v1 *h, const char *file, bool alone)
{
    struct compaction c = {.h = h, .alone = alone, .out = KV_BUF_INIT};
    struct kv_buf buf = KV_BUF_INIT;
    int rc = read_all(h->refs, file, &buf);

    if (rc == 0)
        rc = each_record(&buf, true, keep_once, &c);
    if (rc == -ENOENT && buf.len) { /* stays incomplete */
        kvs_file_add_record(&c.out, NULL, 0);
        rc = c.out.error;
    }
    if (rc == 0 && replace(h, file, &c.out) == 0)
        h->refs_unsynced = kvs_file_sync_dir(h, h->refs) < 0;
    for (size_t i = 0; i < c.seen.n_buckets; i++) {
        for (struct kvs_file_pending *e = c.seen.buckets[i], *next; e; e = next) {
            next = e->next;
            free(e);
        }
    }
    free(c.seen.buckets);
    kv_buf_fini(&c.out);
    kv_buf_fini(&buf);
}

/* -- Noting and listing ------------------------------------------------------------------------ */

/* True when the file's length doubled: compacting then costs a constant share of appending. */
static bool doubled(uint64_t before, uint64_t after)
{
    uint64_t mark = COMPACT_FROM;

    while (mark <= before)
        mark *= 2;
    return mark <= after;
}

/* True when a file ends with a record, as far as its last @n bytes tell. */
static bool ends_with_record(const uint8_t *tail, size_t n)
{
    for (size_t len = 0; len <= KVS_FILE_KEY_MAX && 1 + len + CHECK <= n; len++) {
        size_t bytes = 1 + len + CHECK;
        int kind = record_at(tail + n - bytes, bytes);

        if (kind >= 0 && record_bytes(kind) == bytes)
            return true;
    }
    return false;
}

/* True for what a crash leaves behind a record of @before bytes (0: none): too few bytes, or zeros.
 * A damaged record has all its bytes, as many as the one before; its length may be what is wrong. */
static bool is_torn(const uint8_t *rest, size_t n, size_t before)
{
    size_t zeros = 0;

    while (zeros < n && rest[zeros] == 0)
        zeros++;
    return zeros == n || (before && n != before && rest[0] && rest[0] <= KVS_FILE_KEY_MAX &&
                          n < 1u + rest[0] + CHECK);
}

/* Cut off the torn record at the end of a file of @size bytes. Damage of another kind stays. */
static int cut_torn_end(int fd, off_t size)
{
    size_t n = (size_t)KV_MIN(size, (off_t)RECORD_MAX), end = 0, last = 0;
    struct kv_buf buf = KV_BUF_INIT;
    uint8_t tail[RECORD_MAX];
    const uint8_t *data;
    int rc;

    if (n == 0 || (pread(fd, tail, n, size - (off_t)n) == (ssize_t)n && ends_with_record(tail, n)))
        return 0;
    rc = size > READ_MAX ? -ENOENT : read_fd(fd, &buf);
    data = (const uint8_t *)buf.data;
    for (size_t i = 0; rc == 0 && i < buf.len;) {
        int len = record_at(data + i, buf.len - i);
        size_t bytes = len >= 0 ? record_bytes(len) : 1;

        i += bytes;
        if (len >= 0) {
            end = i;
            last = bytes;
        }
    }
    if (rc == 0 && end < buf.len && is_torn(data + end, buf.len - end, last))
        rc = ftruncate(fd, (off_t)end) < 0 ? -errno : 0;
    kv_buf_fini(&buf);
    return rc == -ENOENT ? 0 : rc;
}

/* Append records, NOTHING to an empty list when there are none, without a sync; sync the name of a
 * new file. When another entry had to be moved away from that name, earlier notes are lost, so mark
 * the list as incomplete. */
static int append(kv_store_v1 *h, const char *file, struct kv_buf *buf, int *ret_fd)
{
    bool moved = false;
    int fd = kvs_file_open_own(h, h->refs, file, O_RDWR | O_APPEND | O_CREAT, &moved), rc;
    struct stat st = {0};

    if (fd < 0)
        return fd;
    if (moved)
        kvs_file_add_record(buf, NULL, 0);
    rc = fstat(fd, &st) < 0 ? -errno : cut_torn_end(fd, st.st_size);
    if (rc == 0 && fstat(fd, &st) < 0)
        rc = -errno;
    if (rc == 0 && buf->len == 0 && st.st_size == 0)
        add_record(buf, NOTHING, NULL, 0);
    if (rc == 0)
        rc = buf->error ? buf->error : kv_write_all(fd, buf->data, buf->len);
    if (rc == 0 && (st.st_size == 0 || h->refs_unsynced))
        rc = kvs_file_sync_dir(h, h->refs);
    h->refs_unsynced &= rc < 0;
    h->refs_grown = rc == 0 && doubled((uint64_t)st.st_size, (uint64_t)st.st_size + buf->len);
    if (rc < 0)
        close(fd);
    else
        *ret_fd = fd;
    return rc;
}

void kvs_file_refs_lock(kv_store_v1 *h)
{
    kvs_file_lock(h->refs, LOCK_EX);
    kvs_file_lock(h->house, LOCK_EX);
}

void kvs_file_refs_unlock(kv_store_v1 *h)
{
    flock(h->house, LOCK_UN);
    flock(h->refs, LOCK_UN);
}

int kvs_file_note_refs(kv_store_v1 *h, const char *file, bool empty, struct kv_buf *records,
                       int *ret_fd)
{
    int rc = 0;

    kvs_file_lock(h->refs, LOCK_EX);
    kvs_file_lock(h->house, LOCK_SH);
    if (kvs_file_is_ours(h, file) == 0)
        kvs_file_add_record(records, NULL, 0);
    rc = records->error;
    if (rc == 0 && (records->len || empty))
        rc = append(h, file, records, ret_fd);
    flock(h->refs, LOCK_UN);
    return rc < 0 ? kvs_file_fail(h, -rc, "can't note the chunks of a manifest", file) : 0;
}

void kvs_file_refs_done(kv_store_v1 *h, const char *file)
{
    bool alone;

    flock(h->house, LOCK_UN);
    if (!h->refs_grown)
        return;
    h->refs_grown = false;
    kvs_file_lock(h->refs, LOCK_EX);
    alone = flock(h->house, LOCK_EX | LOCK_NB) == 0;
    compact(h, file, alone);
    if (alone)
        flock(h->house, LOCK_UN);
    flock(h->refs, LOCK_UN);
}

void kvs_file_forget_refs(kv_store_v1 *h, const char *file)
{
    unlinkat(h->refs, file, 0);
}

int kvs_file_list_refs(kv_store_v1 *h, const char *name, kv_store_each_fn each, void *arg)
{
    struct kv_buf buf = KV_BUF_INIT;
    char file[KVS_FILE_NAME];
    struct stat st = {0};
    int rc = h && name && each ? 0 : -EINVAL;

    if (rc == 0)
        rc = kvs_file_begin(h);
    if (rc == 0)
        rc = kvs_file_name_encode(file, name);
    if (rc == 0)
        /* another program's manifest: earlier notes don't cover it */
        rc = kvs_file_is_ours(h, file);
    if (rc >= 0)
        rc = rc ? read_all(h->refs, file, &buf) : -ENOENT;
    if (rc == 0)
        rc = kvs_file_stat(h->root, file, &st);
    if (rc >= 0)
        rc = each_record(&buf, rc && st.st_size == 0, each, arg);
    kv_buf_fini(&buf);
    return rc;
}
