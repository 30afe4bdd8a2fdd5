// SPDX-License-Identifier: Apache-2.0
/*
 * file:PATH. The folder is watched, not the file: programs that write a new file and rename it over the
 * old one leave a watch of the old one behind. In a Kubernetes ConfigMap the file is a link to a file in
 * a folder that is replaced; that shows in the folder, too. Each event, and each LOOK_MS, the file is
 * looked at, and read when it isn't the one that was read last. So file systems without inotify work, too.
 */
#include <fcntl.h>
#include <libgen.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

#include "indexer/discover/source.h"

#define LOOK_MS 1000
#define MAX_FILE ((size_t)16 << 20)

struct file {
    struct ki_source *source;
    int inotify; /* -1: none */
    int watch;   /* of the folder; -1: none */
    struct stat seen;
    bool has_seen; /* the file with this state was read */
    bool good;     /* and it was valid */
};

static int check(const char *where, struct kv_error *error)
{
    if (!*where)
        return kv_fail(error, -EINVAL, 0, "file: needs the path of a file");
    return 0;
}

static bool is_same(const struct stat *a, const struct stat *b)
{
    return a->st_dev == b->st_dev && a->st_ino == b->st_ino && a->st_size == b->st_size &&
           a->st_mtim.tv_sec == b->st_mtim.tv_sec && a->st_mtim.tv_nsec == b->st_mtim.tv_nsec &&
           a->st_ctim.tv_sec == b->st_ctim.tv_sec && a->st_ctim.tv_nsec == b->st_ctim.tv_nsec;
}

/* Read the open file. Returns 0 or a negative errno. */
static int read_all(int fd, struct kv_buf *ret)
{
    ssize_t n = 0;

    ret->limit = MAX_FILE;
    while (kv_buf_reserve(ret, 65536) == 0 && (n = read(fd, ret->data + ret->len, 65536)) > 0)
        ret->len += (size_t)n;
    return n < 0 ? -errno : ret->error;
}

static void take(struct file *f, const struct kv_buf *text)
{
    struct ki_found_set set = {0};
    struct kv_error why = {0};
    int rc = ki_found_read(&set, (struct kv_str){text->data, text->len}, &f->source->base, &why);

    f->good = rc == 0;
    if (rc == 0)
        ki_source_publish(f->source, &set);
    else
        ki_source_failed(f->source, "%s", why.text);
    ki_found_set_fini(&set);
}

static void look(struct file *f)
{
    int fd = open(f->source->where, O_RDONLY | O_CLOEXEC | O_NONBLOCK), rc;
    struct kv_buf text = KV_BUF_INIT;
    struct stat now;

    if (fd < 0 || fstat(fd, &now) < 0) {
        ki_source_failed(f->source, "%s", strerror(errno));
        f->has_seen = false;
    } else if (!S_ISREG(now.st_mode)) {
        ki_source_failed(f->source, "it is no regular file");
    } else if (f->has_seen && is_same(&now, &f->seen)) {
        if (f->good)
            ki_source_confirm(f->source);
    } else {
        rc = read_all(fd, &text);
        if (rc < 0)
            ki_source_failed(f->source, "%s", strerror(-rc));
        else
            take(f, &text);
        f->has_seen = rc == 0;
        f->seen = now; /* of before: a write meanwhile is another state */
    }
    kv_buf_fini(&text);
    if (fd >= 0)
        close(fd);
}

/* Watch the folder, unless that is done. */
static void watch(struct file *f)
{
    char *path = strdup(f->source->where);

    if (path && f->inotify >= 0 && f->watch < 0)
        f->watch = inotify_add_watch(f->inotify, dirname(path),
                                     IN_CLOSE_WRITE | IN_MOVED_TO | IN_CREATE | IN_DELETE |
                                         IN_MOVED_FROM | IN_ATTRIB | IN_ONLYDIR);
    free(path);
}

/* Read the events away. The folder itself may be gone: it is watched anew then. */
static void drain(struct file *f)
{
    char events[4096] __attribute__((aligned(__alignof__(struct inotify_event))));
    ssize_t n;

    while ((n = read(f->inotify, events, sizeof(events))) > 0)
        for (char *p = events; p < events + n;) {
            const struct inotify_event *e = (const struct inotify_event *)(const void *)p;

            if (e->mask & IN_IGNORED)
                f->watch = -1;
            p += sizeof(*e) + e->len;
        }
}

static void run(struct ki_source *source)
{
    struct file f = {
        .source = source, .inotify = inotify_init1(IN_NONBLOCK | IN_CLOEXEC), .watch = -1};

    while (!ki_source_is_stopped(source)) {
        watch(&f); /* before the look, so that no change falls between */
        look(&f);
        ki_source_wait(source, f.inotify, LOOK_MS);
        if (f.inotify >= 0)
            drain(&f);
    }
    if (f.inotify >= 0)
        close(f.inotify);
}

const struct ki_source_ops ki_source_file = {
    .scheme = "file:", .form = "file:PATH", .check = check, .run = run};
