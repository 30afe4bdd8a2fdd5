// SPDX-License-Identifier: Apache-2.0
/**
 * The handle's entry among the writers, and the files that dead writers left. A writer holds a flock
 * on writers/ID as long as it lives; its files are tmp/ID.N.
 *
 *     ID   BBBBB boot of the kernel   MMMMM machine   DD file system as seen there   RRRR random
 *
 * Whether a flock is seen by others depends on the file system: two hosts that mount a folder may
 * each see their own only. So a flock that can be taken proves its writer dead in two cases: the
 * writer is of the same boot and the same mounted file system; or its machine has been started again
 * since. Files of other writers go when nothing has changed them for a week. Nothing of others is
 * removed sooner either where flocks don't work at all.
 */
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/sysmacros.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/core/xxh.h"
#include "base/file/beneath.h"
#include "store/file/file_impl.h"

struct host {
    unsigned boot, machine, device;
};

/* Read a short file, "" when it can't be read. Returns its length. */
static size_t read_line(const char *path, char *ret, size_t size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? -1 : read(fd, ret, size);

    if (fd >= 0)
        close(fd);
    return n > 0 ? (size_t)n : 0;
}

static void find_host(const kv_store_v1 *h, struct host *ret)
{
    char text[256];
    struct utsname name = {0};
    struct stat st = {0};
    uint64_t device;
    size_t n = read_line("/proc/sys/kernel/random/boot_id", text, sizeof(text));

    if (n == 0 && getrandom(text, 16, 0) == 16)
        n = 16; /* no other handle is of this boot */
    ret->boot = (unsigned)(XXH3_64bits(text, n) & 0xFFFFF);
    uname(&name);
    n = read_line("/etc/machine-id", text, sizeof(text));
    ret->machine = (unsigned)(XXH3_64bits_withSeed(name.nodename, strlen(name.nodename),
                                                   XXH3_64bits(text, n)) &
                              0xFFFFF);
    fstat(h->writers, &st);
    device = st.st_dev;
    ret->device = (unsigned)(XXH3_64bits(&device, sizeof(device)) & 0xFF);
}

/* Make an id: who this is (see above), and 16 random bits. */
static int make_id(kv_store_v1 *h)
{
    struct host us;
    uint16_t random;

    if (getrandom(&random, sizeof(random), 0) != sizeof(random))
        return -EIO;
    find_host(h, &us);
    snprintf(h->writer, sizeof(h->writer), "%05x%05x%02x%04x", us.boot, us.machine, us.device,
             random);
    return 0;
}

/* Check through a second descriptor that this host's own flocks work at all. */
static bool locks_work(kv_store_v1 *h)
{
    int fd = openat(h->writers, h->writer, O_RDWR | O_CLOEXEC | O_NOFOLLOW);
    bool work = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) < 0 && errno == EWOULDBLOCK;

    if (fd >= 0)
        close(fd);
    return work;
}

/* Say that flocks don't work, which deleters and publications of several processes need. */
static void tell_no_locks(kv_store_v1 *h, int error)
{
    char where[512];

    kv_log_warn("store",
                "file locks (flock) don't work on this file system: mount it with locks (Lustre: "
                "-o flock; NFS: a lock daemon), or collect garbage and set a limit only while no "
                "other process uses the store",
                "dir=%s error=\"%s\"", kv_log_quote(where, sizeof(where), h->dir),
                error ? strerror(error) : "a lock excludes nobody");
}

static int try_writer(kv_store_v1 *h)
{
    bool fresh = !h->writer[0];
    int rc = fresh ? make_id(h) : 0;
    struct stat st;

    if (rc < 0)
        return rc;
    h->writer_fd = openat(h->writers, h->writer, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    rc = h->writer_fd < 0 ? -errno : 0;
    if (rc == 0) {
        kvs_file_lease_none(h);
        /* where flocks aren't supported, no other process can sweep this writer's files either */
        rc = kvs_file_lock(h->writer_fd, LOCK_EX);
        h->no_locks = rc < 0 || !locks_work(h);
        if (h->no_locks)
            tell_no_locks(h, -rc);
        if (fstat(h->writer_fd, &st) == 0 && st.st_nlink > 0) {
            h->born_s = st.st_ctime;
            return 0;
        }
        close(h->writer_fd); /* another process swept the file between creation and flock */
        h->writer_fd = -1;
        rc = -EAGAIN;
    }
    if (fresh)
        h->writer[0] = '\0';
    return rc == -EEXIST ? -EAGAIN : rc;
}

int kvs_file_become_writer(kv_store_v1 *h)
{
    int rc = -EAGAIN;

    for (int i = 0; i < 100 && rc == -EAGAIN; i++)
        rc = try_writer(h);
    return rc;
}

/* Read @digits lower-case hexadecimal digits, and pass them. */
static bool read_hex(const char **text, unsigned digits, unsigned *ret)
{
    *ret = 0;
    for (; digits; digits--, ++*text) {
        char c = **text;

        if (!(c >= '0' && c <= '9') && !(c >= 'a' && c <= 'f'))
            return false;
        *ret = *ret << 4 | (unsigned)(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    return true;
}

/* True when the flock of writer @id says whether its process lives. */
static bool lock_tells(kv_store_v1 *h, const char *id)
{
    struct host us, them;

    if (h->no_locks || !read_hex(&id, 5, &them.boot) || !read_hex(&id, 5, &them.machine) ||
        !read_hex(&id, 2, &them.device))
        return false;
    find_host(h, &us);
    if (them.boot == us.boot)
        return them.device == us.device;
    return them.machine == us.machine; /* it has been started again since */
}

/* True when nothing has changed the file for so long, by the file system's own clock, that its
 * writer counts as dead. */
static bool is_old(const kv_store_v1 *h, const struct stat *st)
{
    return h->born_s && st->st_ctime < h->born_s - KVS_FILE_FOREIGN_S;
}

/* True when the writer's process has ended; its file is removed then. Entries that are no writer's
 * file are left alone. */
bool kvs_file_writer_dead(kv_store_v1 *h, const char *id)
{
    struct stat st;
    int fd = kv_beneath_file(h->writers, id, O_RDWR, 0, KV_BENEATH_ANY_OWNER, &st);
    bool dead;

    if (fd < 0)
        return fd == -ENOENT;
    dead = st.st_size == 0 && (lock_tells(h, id) || is_old(h, &st)) &&
           flock(fd, LOCK_EX | LOCK_NB) == 0;
    if (dead)
        unlinkat(h->writers, id, 0);
    close(fd);
    return dead;
}

/* True when @name is a file that may be removed with its dead writer. */
static bool may_go(const kv_store_v1 *h, int at, const char *name, bool known)
{
    struct stat st;

    return fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(st.st_mode) &&
           (known || is_old(h, &st));
}

/* Sweep a dead writer's files: tmp files first, then its file in writers/, so that an interrupted
 * sweep can be repeated. Only names of their form are removed. */
static void sweep_dir(kv_store_v1 *h, int at, bool tmp)
{
    DIR *dir = kvs_file_dir(at);
    char dead[17] = "", alive[17] = "", id[17];

    if (!dir)
        return;
    for (struct dirent *e; (e = readdir(dir));) {
        if (!(tmp ? kvs_file_is_tmp(e->d_name) : kvs_file_is_writer(e->d_name)))
            continue;
        snprintf(id, sizeof(id), "%.16s", e->d_name);
        if (strcmp(id, alive) == 0 || strcmp(id, h->writer) == 0)
            continue;
        if (strcmp(id, dead) != 0) {
            bool gone = kvs_file_writer_dead(h, id);

            memcpy(gone ? dead : alive, id, sizeof(id));
            if (!gone)
                continue;
        }
        if (tmp && may_go(h, at, e->d_name, lock_tells(h, id)))
            unlinkat(at, e->d_name, 0);
    }
    closedir(dir);
}

void kvs_file_sweep_writers(kv_store_v1 *h)
{
    if (h->tmp < 0 || h->writers < 0)
        return;
    sweep_dir(h, h->tmp, true);
    sweep_dir(h, h->writers, false);
}
