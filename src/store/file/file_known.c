// SPDX-License-Identifier: Apache-2.0
/**
 * Chunks in place whose whole content was verified. A save that hits a chunk must know that the
 * chunk can be read again, and should not read it to find out. So a publication notes each chunk
 * that it wrote or verified, made durable and gave its time of last use:
 *
 *     key, inode, size, mtime (to the nanosecond, as the publication set it), time of the note,
 *     ctime at the note: the chunk's or its side-car's, whichever is later
 *     whether it had no side-car: then the file holds its checksum, and a side-car that comes later
 *     counts no more than before, so nobody looks for one
 *
 * The note is valid while inode, size, mtime and ctime are equal: a write sets both times to the
 * kernel's clock, and setting mtime back changes ctime. Pins and touches by other handles also end a
 * note; they note the chunk anew, or the next hit verifies it once more. Bits that rot on the disk
 * change no time, so readers verify every chunk. A handle forgets the note of one that it can't read.
 *
 * Since Linux 6.13 each change behind a look at ctime changes it. Before, a change within the same
 * tick of the clock (1 to 10 ms) as the note isn't seen, if it also sets mtime back.
 *
 *     .kvasir/verified   records of all processes, appended, one write each publication
 *                        (formats.md)
 *     the table          of this handle: sets of WAYS places; a new note replaces the oldest of its set
 *
 * A handle that doesn't know a chunk reads the records that other handles appended. The file is a
 * hint: it is never synced, and without it chunks are verified. A handle that finds it longer than
 * MAX_BYTES replaces it by the notes of its own table.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/le.h"
#include "base/core/xxh.h"
#include "base/file/write_all.h"
#include "store/file/file_impl.h"

enum {
    SETS = 4096,
    WAYS = 8, /* 2 MiB of table, allocated at the first note */
    RECORD = 64,
    MAX_BYTES = 4 << 20,
    TORN_MAX = 64 * 1024 /* bytes in a row that are no record, after which reading gives up */
};

struct kvs_file_known {
    XXH128_hash_t key;
    uint64_t ino, size; /* ino 0: the place is free */
    int64_t mtime_ns, ctime_ns, noted_ns;
    bool inside; /* kvs_file_seen */
};

#define INSIDE (UINT64_C(1) << 63) /* in a record's size */

struct kvs_file_table {
    int fd;      /* .kvasir/verified; -1: none */
    uint64_t at; /* bytes read so far */
    struct kvs_file_known places[SETS * WAYS];
};

static int64_t ns_of(const struct timespec *t)
{
    return (int64_t)kv_timespec_ns(t);
}

struct kvs_file_seen kvs_file_see(const struct stat *st)
{
    return (struct kvs_file_seen){.ino = st->st_ino,
                                  .size = (uint64_t)st->st_size,
                                  .mtime_ns = ns_of(&st->st_mtim),
                                  .ctime_ns = ns_of(&st->st_ctim)};
}

bool kvs_file_unchanged(const struct kvs_file_seen *a, const struct kvs_file_seen *b)
{
    return a->ino == b->ino && a->size == b->size && a->mtime_ns == b->mtime_ns;
}

/* -- The table, under known_lock --------------------------------------------------------------- */

static struct kvs_file_known *find(struct kvs_file_table *table, const XXH128_hash_t *key)
{
    struct kvs_file_known *set = table->places + key->low64 % SETS * WAYS;

    for (int i = 0; i < WAYS; i++) {
        if (set[i].ino && XXH128_isEqual(set[i].key, *key))
            return &set[i];
    }
    return NULL;
}

/* Enter a note in its own place, a free one, or that of the set's oldest note. */
static void enter(struct kvs_file_table *table, const struct kvs_file_known *note)
{
    struct kvs_file_known *set = table->places + note->key.low64 % SETS * WAYS;
    struct kvs_file_known *place = find(table, &note->key);

    for (int i = 0; i < WAYS && !place; i++) {
        if (!set[i].ino)
            place = &set[i];
    }
    if (!place) {
        place = &set[0];
        for (int i = 1; i < WAYS; i++) {
            if (set[i].noted_ns < place->noted_ns)
                place = &set[i];
        }
    }
    *place = *note;
}

/* -- Records ----------------------------------------------------------------------------------- */

static void encode(uint8_t *out, const struct kvs_file_known *note)
{
    const uint64_t words[] = {note->key.low64,
                              note->key.high64,
                              note->ino,
                              note->size | (note->inside ? INSIDE : 0),
                              (uint64_t)note->mtime_ns,
                              (uint64_t)note->noted_ns,
                              (uint64_t)note->ctime_ns};

    _Static_assert(sizeof(words) == RECORD - 8, "the sum is the last word");
    for (size_t i = 0; i < KV_COUNT(words); i++)
        kv_put_le64(out + 8 * i, words[i]);
    kv_put_le64(out + sizeof(words), kv_xxh64(out, sizeof(words), 0));
}

static bool decode(struct kvs_file_known *ret, const uint8_t in[RECORD])
{
    if (kv_get_le64(in + RECORD - 8) != kv_xxh64(in, RECORD - 8, 0))
        return false;
    *ret = (struct kvs_file_known){.key = {kv_get_le64(in), kv_get_le64(in + 8)},
                                   .ino = kv_get_le64(in + 16),
                                   .size = kv_get_le64(in + 24) & ~INSIDE,
                                   .inside = kv_get_le64(in + 24) & INSIDE,
                                   .mtime_ns = (int64_t)kv_get_le64(in + 32),
                                   .noted_ns = (int64_t)kv_get_le64(in + 40),
                                   .ctime_ns = (int64_t)kv_get_le64(in + 48)};
    return ret->ino != 0;
}

/* Returns how many bytes were used up. A torn record costs only its own bytes. */
static size_t take_records(struct kvs_file_table *table, const uint8_t *data, size_t len)
{
    struct kvs_file_known note;
    size_t at = 0, torn = 0;

    while (at + RECORD <= len && torn < TORN_MAX) {
        if (decode(&note, data + at)) {
            enter(table, &note);
            at += RECORD;
            torn = 0;
        } else {
            at++;
            torn++;
        }
    }
    return torn < TORN_MAX ? at : len;
}

/* -- The file, under known_lock ---------------------------------------------------------------- */

/* True when another handle has replaced the file of notes. */
static bool is_replaced(const struct stat *st)
{
    return st->st_nlink == 0;
}

static int open_file(kv_store_v1 *h, struct stat *st)
{
    struct kvs_file_table *t = h->known;

    if (t->fd >= 0 && (fstat(t->fd, st) < 0 || is_replaced(st))) {
        close(t->fd);
        t->fd = -1;
    }
    if (t->fd < 0) {
        t->at = 0;
        t->fd = h->house < 0
                    ? -1
                    : kvs_file_open_own(
                          h, h->house, "verified",
                          O_RDWR | O_APPEND | (kvs_file_deletable(h) == 0 ? O_CREAT : 0), NULL);
    }
    return t->fd < 0 || fstat(t->fd, st) < 0 ? -ENOENT : 0;
}

/* Read the records that other handles appended since the last call. */
static void catch_up(kv_store_v1 *h)
{
    struct kvs_file_table *t = h->known;
    uint64_t end;
    struct stat st;
    uint8_t *data;
    ssize_t n;

    if (open_file(h, &st) < 0)
        return;
    end = KV_MIN((uint64_t)st.st_size, (uint64_t)2 * MAX_BYTES);
    if (end < t->at) /* the file was cut */
        t->at = 0;
    if (end < t->at + RECORD)
        return;
    data = malloc(end - t->at);
    if (!data)
        return;
    n = pread(t->fd, data, end - t->at, (off_t)t->at);
    if (n > 0)
        t->at += take_records(t, data, (size_t)n);
    free(data);
}

/* Replace a file that grew too long by the notes of this handle's table. */
static void replace(kv_store_v1 *h)
{
    struct kvs_file_table *t = h->known;
    struct kv_buf buf = KV_BUF_INIT;
    char name[KVS_FILE_TMP];
    uint8_t record[RECORD];
    int fd, rc;

    for (size_t i = 0; i < (size_t)SETS * WAYS; i++) {
        if (!t->places[i].ino)
            continue;
        encode(record, &t->places[i]);
        kv_buf_append(&buf, record, RECORD);
    }
    kvs_file_tmp_name(h, name, atomic_fetch_add(&h->next_tmp, 1));
    fd = openat(h->tmp, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    rc = fd < 0 ? -errno : buf.error;
    if (rc == 0)
        rc = kv_write_all(fd, buf.data, buf.len);
    if (fd >= 0)
        close(fd);
    if (rc == 0)
        rc = kvs_file_rename(h, h->tmp, name, h->house, "verified");
    if (rc < 0 && fd >= 0)
        unlinkat(h->tmp, name, 0);
    kv_buf_fini(&buf);
}

static void append(kv_store_v1 *h, const struct kv_buf *records)
{
    struct kvs_file_table *t = h->known;
    struct stat st;

    if (kvs_file_deletable(h) < 0 || open_file(h, &st) < 0)
        return;
    if ((uint64_t)st.st_size + records->len > MAX_BYTES) {
        if (flock(t->fd, LOCK_EX | LOCK_NB) < 0)
            return; /* another handle is replacing it */
        catch_up(h);
        replace(h);
        close(t->fd); /* releases the flock */
        t->fd = -1;
        return;
    }
    (void)!write(t->fd, records->data, records->len); /* a hint: without it, chunks are verified */
}

/* -- Asking and noting ------------------------------------------------------------------------- */

/* Find the side-car of a chunk. True when it has none for sure; else *ctime_ns becomes the later
 * one of itself and the side-car's. */
static bool no_side_car(const kv_store_v1 *h, const uint8_t *key, size_t key_len, int64_t *ctime_ns)
{
    char hex[KVS_FILE_HEX], path[KVS_FILE_HEX + 8];
    const char *name = path;
    struct stat st;
    int at;

    kvs_file_hex(hex, key, key_len);
    kvs_file_chunk_side_car(path, hex);
    at = kvs_file_side_dir(h, &name);
    if (at < 0)
        return true;
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT;
    *ctime_ns = KV_MAX(*ctime_ns, ns_of(&st.st_ctim));
    return false;
}

/* True when @note is about the file as @now tells it; under known_lock. */
static bool holds(const kv_store_v1 *h, const struct kvs_file_known *note, const uint8_t *key,
                  size_t key_len, const struct kvs_file_seen *now)
{
    int64_t ctime_ns = now->ctime_ns;

    if (!note || note->ino != now->ino || note->size != now->size ||
        note->mtime_ns != now->mtime_ns)
        return false;
    if (!note->inside)
        no_side_car(h, key, key_len, &ctime_ns);
    return note->ctime_ns == ctime_ns;
}

static bool have_table(kv_store_v1 *h)
{
    if (h->known)
        return true;
    h->known = calloc(1, sizeof(*h->known));
    if (h->known)
        h->known->fd = -1;
    return h->known;
}

bool kvs_file_known(kv_store_v1 *h, const uint8_t *key, size_t key_len, struct kvs_file_seen *seen)
{
    XXH128_hash_t hash = XXH3_128bits(key, key_len);
    const struct kvs_file_known *note;
    bool known = false;

    pthread_mutex_lock(&h->known_lock);
    if (have_table(h)) {
        note = find(h->known, &hash);
        known = holds(h, note, key, key_len, seen);
        if (!known) {
            catch_up(h);
            note = find(h->known, &hash);
            known = holds(h, note, key, key_len, seen);
        }
        seen->inside = known && note->inside;
    }
    pthread_mutex_unlock(&h->known_lock);
    return known;
}

void kvs_file_forget(kv_store_v1 *h, const uint8_t *key, size_t key_len)
{
    XXH128_hash_t hash = XXH3_128bits(key, key_len);
    struct kvs_file_known *note;

    pthread_mutex_lock(&h->known_lock);
    if (have_table(h)) {
        catch_up(h); /* a record read later would be believed again */
        note = find(h->known, &hash);
        if (note)
            note->ino = 0;
    }
    pthread_mutex_unlock(&h->known_lock);
}

/* Look at a chunk whose note doesn't say what its file is like after our last change. Returns false
 * when it is no longer the file that was verified. */
static bool look_again(const kv_store_v1 *h, const struct kvs_file_note *note,
                       struct kvs_file_seen *seen)
{
    char hex[KVS_FILE_HEX];
    struct stat st;

    kvs_file_hex(hex, note->key, note->key_len);
    if (fstatat(h->fan[kvs_file_fan(note->key)], hex, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return false;
    *seen = kvs_file_see(&st);
    seen->inside = note->seen.inside;
    return kvs_file_unchanged(seen, &note->seen);
}

/* Make the note of a chunk. Returns false when its file is no longer the one that was verified. */
static bool make_note(const kv_store_v1 *h, const struct kvs_file_note *note, int64_t now_ns,
                      struct kvs_file_known *ret)
{
    struct kvs_file_seen seen = note->seen;

    if (!seen.last && !look_again(h, note, &seen))
        return false;
    if (!seen.inside)
        seen.inside = no_side_car(h, note->key, note->key_len, &seen.ctime_ns);
    *ret = (struct kvs_file_known){
        .key = XXH3_128bits(note->key, note->key_len),
        .ino = seen.ino,
        .size = seen.size,
        .mtime_ns = seen.mtime_ns,
        .ctime_ns = seen.ctime_ns,
        .noted_ns = now_ns,
        .inside = seen.inside,
    };
    return true;
}

void kvs_file_remember(kv_store_v1 *h, const struct kvs_file_note *notes, size_t n)
{
    struct timespec now;
    struct kv_buf records = KV_BUF_INIT;
    uint8_t record[RECORD];

    if (n == 0 || clock_gettime(CLOCK_REALTIME, &now) < 0)
        return;
    pthread_mutex_lock(&h->known_lock);
    for (size_t i = 0; i < n && have_table(h); i++) {
        struct kvs_file_known note;

        if (!make_note(h, &notes[i], ns_of(&now), &note))
            continue;
        enter(h->known, &note);
        encode(record, &note);
        kv_buf_append(&records, record, RECORD);
    }
    if (h->known && records.len && !records.error)
        append(h, &records);
    pthread_mutex_unlock(&h->known_lock);
    kv_buf_fini(&records);
}

void kvs_file_known_free(struct kvs_file_table *table)
{
    if (table && table->fd >= 0)
        close(table->fd);
    free(table);
}
