// SPDX-License-Identifier: Apache-2.0
/*
 * Records as files of a folder, as Dynamo's "file" backend has them:
 *
 *     FOLDER/v1/event_sources/namespace%2FNS%2Fcomponent%2F...    the record's JSON
 *
 * The owner of a file sets its time of modification anew every third of 10 s. A follower takes a file
 * for gone when that time hasn't changed for 10 s by the follower's own clock, so that clocks of two
 * machines need not agree. At first sight it believes a file of the last minute.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/file/write_all.h"
#include "plane/discovery/impl.h"

#define LOOK_MS 500
#define EXPIRY_S 10u
#define EXPIRY_NS (EXPIRY_S * KV_NS_PER_S)
#define FIRST_SIGHT_NS ((int64_t)(60 * KV_NS_PER_S))
#define TEMPORARY ".tmp_" /* files that are being written */
#define MAX_PATH 4096

static bool stopped(const struct kvp_discovery *d)
{
    return atomic_load_explicit(&d->stop, memory_order_acquire);
}

static void pause_ms(const struct kvp_discovery *d, int ms)
{
    struct pollfd fd = {.fd = d->wake.fd, .events = POLLIN};

    (void)poll(&fd, 1, ms);
}

static void failed(struct kvp_discovery *d, const char *path, int err)
{
    kvp_discovery_failed(d, path, strerror(err));
}

/* -- follow ------------------------------------------------------------------------------------ */

/* Nanoseconds since the epoch; of times that these can't tell, the nearest second that they can. */
static int64_t ns_of(const struct timespec *t)
{
    const int64_t most = INT64_MAX / (int64_t)KV_NS_PER_S - 1;

    return KV_MAX(KV_MIN((int64_t)t->tv_sec, most), 0) * (int64_t)KV_NS_PER_S + t->tv_nsec;
}

/* Read a file that may be replaced or removed meanwhile. Returns 0, or a negative errno. */
static int read_file(int dir, const char *name, struct kv_buf *ret)
{
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
    ssize_t n = 0;

    if (fd < 0)
        return -errno;
    kv_buf_clear(ret);
    ret->limit = KVP_DISCOVERY_RECORD + 1;
    while (kv_buf_reserve(ret, 4096) == 0 && (n = read(fd, ret->data + ret->len, 4096)) > 0)
        ret->len += (size_t)n;
    close(fd);
    return n < 0 ? -errno : ret->error;
}

/* Note that a file was seen with this time of modification. */
static void see(struct kvp_table *t, struct kvp_entry *e, int64_t mtime_ns)
{
    uint64_t now_ns = kv_now_ns();
    bool expired = e->expired;

    if (!e->changed_ns) {
        expired = (int64_t)kv_wall_ns() - mtime_ns > FIRST_SIGHT_NS;
        e->changed_ns = now_ns;
    } else if (mtime_ns != e->mtime_ns) {
        expired = false;
        e->changed_ns = now_ns;
    } else if (now_ns - e->changed_ns > EXPIRY_NS) {
        expired = true;
    }
    t->changed |= expired != e->expired;
    e->expired = expired;
    e->mtime_ns = mtime_ns;
    e->look = t->look;
}

/* Look at one file. A record whose file can't be read now stays as it was, also in age. */
static void look_at_file(struct kvp_discovery *d, enum kvp_bucket bucket, int dir, const char *file,
                         struct kv_buf *content)
{
    struct kv_buf name = {.limit = KVP_DYNAMO_KEY_MAX};
    struct kvp_entry *e;
    struct stat st;
    int err = 0;

    if (kvp_dynamo_from_file_name(&name, file) < 0 || name.error)
        goto out;
    e = kvp_table_find(&d->table, bucket, kv_buf_cstr(&name));
    err = fstatat(dir, file, &st, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : 0;
    if (err < 0 || !S_ISREG(st.st_mode))
        goto out;
    if (!e || e->mtime_ns != ns_of(&st.st_mtim)) {
        struct kvp_entry before = e ? *e : (struct kvp_entry){0};

        err = read_file(dir, file, content);
        if (err < 0)
            goto out;
        e = kvp_table_put(&d->table, bucket, kv_buf_cstr(&name), content->data, content->len);
        if (e && !e->changed_ns) { /* made anew: its file is known all the same */
            e->changed_ns = before.changed_ns;
            e->expired = before.expired;
            e->mtime_ns = before.mtime_ns;
        }
    }
    if (e)
        see(&d->table, e, ns_of(&st.st_mtim));
out:
    if (err < 0 && err != -ENOENT) { /* not removed meanwhile */
        d->table.left_out++;
        if (e && err != -EMSGSIZE)
            e->look = d->table.look;
    }
    kv_buf_fini(&name);
}

/* Look at all files of a bucket. Returns 0, also when there is no such folder; or a negative errno. */
static int look_at(struct kvp_discovery *d, enum kvp_bucket bucket)
{
    struct kv_buf content = KV_BUF_INIT;
    char path[MAX_PATH];
    struct dirent *file;
    DIR *dir;
    int err;

    snprintf(path, sizeof(path), "%s/%s", d->folder, kvp_bucket_prefix(bucket));
    dir = opendir(path);
    if (!dir && errno == ENOENT)
        return 0;
    if (!dir)
        return -errno;
    while (errno = 0, (file = readdir(dir)))
        if (*file->d_name != '.')
            look_at_file(d, bucket, dirfd(dir), file->d_name, &content);
    err = -errno; /* some files may be left */
    closedir(dir);
    kv_buf_fini(&content);
    return err;
}

void kvp_folder_follow(struct kvp_discovery *d)
{
    while (!stopped(d)) {
        int err = access(d->folder, X_OK) == 0 ? 0 : -errno;

        kvp_table_begin(&d->table);
        for (int bucket = 0; bucket < KVP_N_BUCKETS && err == 0; bucket++)
            err = look_at(d, (enum kvp_bucket)bucket);
        if (err == 0)
            kvp_table_end(&d->table); /* else what was known stays */
        else
            failed(d, d->folder, -err);
        kvp_discovery_is(d, err == 0);
        if (err == 0)
            kvp_discovery_tell(d);
        pause_ms(d, LOOK_MS);
    }
}

/* -- announce ---------------------------------------------------------------------------------- */

/* Make the folders of @path, without its last part. */
static int make_folders(char *path)
{
    for (char *p = strchr(path + 1, '/'); p; p = strchr(p + 1, '/')) {
        int rc;

        *p = '\0';
        rc = mkdir(path, 0777);
        *p = '/';
        if (rc < 0 && errno != EEXIST)
            return -errno;
    }
    return 0;
}

/* Write a file under a temporary name, and rename it: nobody reads half of it. */
static int write_file(const char *folder, const char *name, const struct kv_buf *value)
{
    char path[MAX_PATH], temporary[MAX_PATH];
    int fd, err;

    if (snprintf(path, sizeof(path), "%s%s", folder, name) >= (int)sizeof(path) ||
        snprintf(temporary, sizeof(temporary), "%s" TEMPORARY "%d_%s", folder, (int)getpid(),
                 name) >= (int)sizeof(temporary))
        return -ENAMETOOLONG;
    err = make_folders(path);
    if (err < 0)
        return err;
    fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    err = kv_write_all(fd, value->data, value->len);
    close(fd);
    if (err == 0 && rename(temporary, path) < 0)
        err = -errno;
    if (err < 0)
        unlink(temporary);
    return err;
}

/* Keep a record's file young, or write it when it isn't there. */
static int keep(struct kvp_discovery *d, int bucket)
{
    char folder[MAX_PATH], path[MAX_PATH];

    if (snprintf(folder, sizeof(folder), "%s/%s", d->folder,
                 kvp_bucket_prefix((enum kvp_bucket)bucket)) >= (int)sizeof(folder) ||
        snprintf(path, sizeof(path), "%s%s", folder, kv_buf_cstr(&d->names[bucket])) >=
            (int)sizeof(path))
        return -ENAMETOOLONG;
    if (utimensat(AT_FDCWD, path, NULL, 0) == 0)
        return 0;
    return errno == ENOENT ? write_file(folder, kv_buf_cstr(&d->names[bucket]), &d->values[bucket])
                           : -errno;
}

static void take_away(struct kvp_discovery *d, int bucket)
{
    char path[MAX_PATH];

    if (snprintf(path, sizeof(path), "%s/%s%s", d->folder,
                 kvp_bucket_prefix((enum kvp_bucket)bucket),
                 kv_buf_cstr(&d->names[bucket])) < (int)sizeof(path))
        unlink(path);
}

void kvp_folder_announce(struct kvp_discovery *d)
{
    while (!stopped(d)) {
        int err = 0;

        for (int b = KVP_N_BUCKETS - 1; b >= 0 && err == 0;
             b--) /* the channel first, as Dynamo does */
            err = d->names[b].len ? keep(d, b) : 0;
        if (err < 0)
            failed(d, d->folder, -err);
        kvp_discovery_is(d, err == 0);
        /* followers wait for EXPIRY_S, however long the record may outlive this process */
        pause_ms(d, (int)(err < 0 ? LOOK_MS : KV_MIN(d->ttl_s, EXPIRY_S) * 1000 / 3));
    }
    for (int b = 0; b < KVP_N_BUCKETS; b++)
        if (d->names[b].len)
            take_away(d, b);
}
