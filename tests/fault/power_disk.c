// SPDX-License-Identifier: Apache-2.0
/*
 * A disk with a volatile cache, whose power can be cut: for tests/fault/power_cuts.py.
 *
 *   power_disk DIR IMAGE [lies]
 *       mounts a FUSE file system at DIR (needs root) whose one file, "disk", is IMAGE: to be given to losetup. What is
 *       written stays in a cache until a flush (FUSE_FSYNC, as a loop device makes of each flush request) moves it to
 *       IMAGE. With "lies" a flush does nothing: the control at the disk's side.
 *
 * Commands on standard input, a line each:
 *       cut SEED SECTOR FILE    write to FILE what the disk has after a power cut at this moment: IMAGE, and of what is in
 *                               the cache each SECTOR bytes (512, 4096) of each write, or not, at random. So writes are
 *                               dropped, reordered and torn. Answers "CUT kept of all". The disk goes on
 *       end of file             unmount, exit
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fuse.h>
#include <poll.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

enum { BUFFER = 2 << 20, MAX_WRITE = 1 << 20, ROOT = 1, DISK = 2 };

struct write_ {
    uint64_t at;
    uint32_t len;
    uint8_t *data;
};

static struct {
    int fuse, image, now; /* now: with all that is in the cache */
    uint64_t bytes;
    bool lies;
    struct write_ *cache;
    size_t n, room;
} disk;

static void die(const char *what)
{
    fprintf(stderr, "power_disk: %s: %s\n", what, strerror(errno));
    exit(2);
}

static void put(int fd, const void *data, size_t len, uint64_t at)
{
    for (size_t done = 0; done < len;) {
        ssize_t n = pwrite(fd, (const char *)data + done, len - done, (off_t)(at + done));

        if (n <= 0 && errno != EINTR)
            die("write");
        done += n > 0 ? (size_t)n : 0;
    }
}

/* Data only: images are mostly holes. */
static void copy_image(int from, int to)
{
    static char chunk[1 << 20];
    off_t at = 0;

    if (ftruncate(to, 0) < 0 || ftruncate(to, (off_t)disk.bytes) < 0)
        die("truncate");
    while ((at = lseek(from, at, SEEK_DATA)) >= 0) {
        off_t end = lseek(from, at, SEEK_HOLE);

        while (at < end) {
            size_t want = (size_t)(end - at) < sizeof(chunk) ? (size_t)(end - at) : sizeof(chunk);
            ssize_t n = pread(from, chunk, want, at);

            if (n <= 0)
                die("read");
            put(to, chunk, (size_t)n, (uint64_t)at);
            at += n;
        }
    }
}

/* ---- the cache ---- */

static void cached_write(uint64_t at, const void *data, uint32_t len)
{
    struct write_ *w;

    if (disk.n == disk.room) {
        disk.room = disk.room ? disk.room * 2 : 1024;
        disk.cache = realloc(disk.cache, disk.room * sizeof(*disk.cache));
    }
    if (!disk.cache)
        die("memory");
    w = &disk.cache[disk.n++];
    *w = (struct write_){at, len, malloc(len)};
    if (!w->data)
        die("memory");
    memcpy(w->data, data, len);
    put(disk.now, data, len, at);
}

static void flush_cache(void)
{
    for (size_t i = 0; i < disk.n && !disk.lies; i++) {
        put(disk.image, disk.cache[i].data, disk.cache[i].len, disk.cache[i].at);
        free(disk.cache[i].data);
    }
    disk.n = disk.lies ? disk.n : 0;
}

static uint64_t next_random(uint64_t *state)
{
    *state = *state * UINT64_C(6364136223846793005) + 1442695040888963407u;
    return *state >> 33;
}

static void cut(uint64_t seed, uint32_t sector, const char *path)
{
    static const uint32_t shares[] = {0, 10, 50, 90, 99, 100}; /* per cent that survive */
    int to = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    uint64_t random = seed * 2654435761u + 1, kept = 0, all = 0;
    uint32_t share;

    if (to < 0)
        die(path);
    next_random(&random);
    share = shares[next_random(&random) % (sizeof(shares) / sizeof(shares[0]))];
    copy_image(disk.image, to);
    for (size_t i = 0; i < disk.n; i++) {
        const struct write_ *w = &disk.cache[i];

        for (uint32_t done = 0, some; done < w->len; done += some) {
            some = sector - (uint32_t)((w->at + done) % sector);
            some = some < w->len - done ? some : w->len - done;
            all++;
            if (next_random(&random) % 100 >= share)
                continue;
            put(to, w->data + done, some, w->at + done);
            kept++;
        }
    }
    close(to);
    printf("CUT %" PRIu64 " of %" PRIu64 "\n", kept, all);
    fflush(stdout);
}

/* ---- FUSE, as much of it as a loop device asks for ---- */

static void answer(const struct fuse_in_header *in, int error, const void *body, size_t len)
{
    static uint8_t out[BUFFER];
    struct fuse_out_header header = {.error = error, .unique = in->unique};

    header.len = (uint32_t)(sizeof(header) + (error ? 0 : len));
    memcpy(out, &header, sizeof(header));
    if (!error && len)
        memcpy(out + sizeof(header), body, len);
    if (write(disk.fuse, out, header.len) < 0 && errno != ENOENT)
        die("answer");
}

static struct fuse_attr attributes(uint64_t node)
{
    return (struct fuse_attr){.ino = node,
                              .size = node == DISK ? disk.bytes : 0,
                              .blocks = node == DISK ? disk.bytes / 512 : 0,
                              .mode = node == DISK ? S_IFREG | 0600 : S_IFDIR | 0700,
                              .nlink = node == DISK ? 1 : 2,
                              .blksize = 4096};
}

static void greet(const struct fuse_in_header *in, const struct fuse_init_in *init)
{
    struct fuse_init_out out = {.major = FUSE_KERNEL_VERSION,
                                .minor = FUSE_KERNEL_MINOR_VERSION,
                                .max_readahead = init->max_readahead,
                                .flags = init->flags & (FUSE_BIG_WRITES | FUSE_MAX_PAGES),
                                .max_background = 16,
                                .congestion_threshold = 12,
                                .max_write = MAX_WRITE,
                                .time_gran = 1,
                                .max_pages = MAX_WRITE / 4096};

    out.minor = init->minor < out.minor ? init->minor : out.minor;
    answer(in, 0, &out, sizeof(out));
}

static void look_up(const struct fuse_in_header *in, const char *name)
{
    struct fuse_entry_out out = {.nodeid = DISK, .entry_valid = 3600, .attr_valid = 3600};

    out.attr = attributes(DISK);
    answer(in, strcmp(name, "disk") == 0 ? 0 : -ENOENT, &out, sizeof(out));
}

static void tell_attributes(const struct fuse_in_header *in)
{
    struct fuse_attr_out out = {.attr_valid = 3600, .attr = attributes(in->nodeid)};

    answer(in, 0, &out, sizeof(out));
}

static void read_some(const struct fuse_in_header *in, const struct fuse_read_in *arg)
{
    static uint8_t data[MAX_WRITE];
    uint32_t len = arg->size < sizeof(data) ? arg->size : sizeof(data);
    ssize_t n = pread(disk.now, data, len, (off_t)arg->offset);

    answer(in, n < 0 ? -EIO : 0, data, n < 0 ? 0 : (size_t)n);
}

static void write_some(const struct fuse_in_header *in, const struct fuse_write_in *arg)
{
    struct fuse_write_out out = {.size = arg->size};

    cached_write(arg->offset, arg + 1, arg->size);
    answer(in, 0, &out, sizeof(out));
}

static void serve(const struct fuse_in_header *in)
{
    const void *arg = in + 1;
    struct fuse_open_out opened = {.fh = in->nodeid};
    struct fuse_statfs_out space = {.st = {.bsize = 4096, .namelen = 255, .frsize = 4096}};

    switch (in->opcode) {
    case FUSE_INIT:
        greet(in, arg);
        return;
    case FUSE_LOOKUP:
        look_up(in, arg);
        return;
    case FUSE_GETATTR:
    case FUSE_SETATTR:
        tell_attributes(in);
        return;
    case FUSE_OPEN:
    case FUSE_OPENDIR:
        answer(in, 0, &opened, sizeof(opened));
        return;
    case FUSE_READ:
        read_some(in, arg);
        return;
    case FUSE_WRITE:
        write_some(in, arg);
        return;
    case FUSE_FSYNC:
        flush_cache();
        answer(in, 0, NULL, 0);
        return;
    case FUSE_STATFS:
        answer(in, 0, &space, sizeof(space));
        return;
    case FUSE_FLUSH:
    case FUSE_RELEASE:
    case FUSE_RELEASEDIR:
    case FUSE_READDIR:
        answer(in, 0, NULL, 0);
        return;
    case FUSE_FORGET:
    case FUSE_BATCH_FORGET:
    case FUSE_INTERRUPT:
        return;
    case FUSE_DESTROY:
        answer(in, 0, NULL, 0);
        return;
    default:
        answer(in, -ENOSYS, NULL, 0);
    }
}

/* Returns false at the end of the commands. */
static bool command(void)
{
    char line[4096], *at = line;
    uint64_t seed, sector;

    if (!fgets(line, sizeof(line), stdin))
        return false;
    line[strcspn(line, "\n")] = '\0';
    if (strncmp(line, "cut ", 4) != 0)
        die("no such command");
    seed = strtoull(line + 4, &at, 10);
    sector = strtoull(at, &at, 10);
    if (sector < 512 || sector > 65536 || *at != ' ')
        die("cut SEED SECTOR FILE");
    cut(seed, (uint32_t)sector, at + 1);
    return true;
}

static void open_all(const char *directory, const char *image)
{
    char options[200], scratch[4096];
    struct stat st;

    disk.image = open(image, O_RDWR | O_CLOEXEC);
    if (disk.image < 0 || fstat(disk.image, &st) < 0)
        die(image);
    disk.bytes = (uint64_t)st.st_size;
    snprintf(scratch, sizeof(scratch), "%s.now", image);
    disk.now = open(scratch, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (disk.now < 0)
        die(scratch);
    unlink(scratch);
    copy_image(disk.image, disk.now);
    disk.fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    if (disk.fuse < 0)
        die("/dev/fuse");
    snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other",
             disk.fuse);
    if (mount("power_disk", directory, "fuse.power_disk", MS_NOSUID | MS_NODEV, options) < 0)
        die("mount");
}

int main(int argc, char **argv)
{
    static _Alignas(8) uint8_t request[BUFFER];
    struct pollfd ready[2] = {{.events = POLLIN}, {.fd = STDIN_FILENO, .events = POLLIN}};

    if (argc < 3) {
        fputs("usage: power_disk DIR IMAGE [lies]\n", stderr);
        return 2;
    }
    disk.lies = argc > 3 && strcmp(argv[3], "lies") == 0;
    setvbuf(stdin, NULL, _IONBF, 0); /* what is read is what poll knows of */
    open_all(argv[1], argv[2]);
    puts("READY");
    fflush(stdout);
    ready[0].fd = disk.fuse;
    for (;;) {
        ssize_t n;

        if (poll(ready, 2, -1) < 0 && errno != EINTR)
            die("poll");
        if (ready[1].revents && !command())
            break;
        if (!ready[0].revents)
            continue;
        n = read(disk.fuse, request, sizeof(request));
        if (n < 0 && errno == ENODEV) /* unmounted */
            return 0;
        if (n >= (ssize_t)sizeof(struct fuse_in_header))
            serve((const struct fuse_in_header *)request);
    }
    umount2(argv[1], MNT_DETACH);
    return 0;
}
