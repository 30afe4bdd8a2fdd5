// SPDX-License-Identifier: Apache-2.0
/*
 * How fast objects are kept and come back, each figure beside a yardstick of the same run: durable
 * saves beside one sequential write and fdatasync of the same bytes (what the disk can do) and a
 * loop that syncs each file (what is usually done); restores beside memcpy and beside read alone.
 * Rounds of all kinds alternate, so that the disk's moods hit all of them; medians are printed.
 *
 * Works in $KV_BENCH_DIR, else $TMPDIR, else the current directory: on tmpfs nothing is durable and
 * the figures of saves mean nothing; the file system's type is in each line.
 */
#include <dirent.h>
#include <ftw.h>
#include <limits.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#include "store_llama.h"
#include "store_measure.h"
#include "store_redis.h"

static char dir[PATH_MAX - 128];

static const char *fs_type(void)
{
    static char other[32];
    struct statfs fs;

    if (statfs(dir, &fs) < 0)
        return "unknown";
    switch ((unsigned long)fs.f_type) {
    case EXT4_SUPER_MAGIC:
        return "ext4";
    case XFS_SUPER_MAGIC:
        return "xfs";
    case BTRFS_SUPER_MAGIC:
        return "btrfs";
    case TMPFS_MAGIC:
        return "tmpfs";
    case OVERLAYFS_SUPER_MAGIC:
        return "overlayfs";
    default:
        snprintf(other, sizeof(other), "0x%lx", (unsigned long)fs.f_type);
        return other;
    }
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path);
}

static void remove_tree(const char *path)
{
    nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void path_in(char path[PATH_MAX], const char *name)
{
    snprintf(path, PATH_MAX, "%s/%s", dir, name);
}

static int create(const char *path)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);

    if (fd < 0)
        die(path, 0);
    return fd;
}

static void write_all(int fd, const uint8_t *data, size_t len)
{
    while (len) {
        ssize_t n = write(fd, data, len);

        if (n < 0)
            die("write", 0);
        data += n;
        len -= (size_t)n;
    }
}

/* -- Yardsticks ---------------------------------------------------------------------------------- */

/* One file, one barrier. */
static double raw_sequential(const struct load *load)
{
    char path[PATH_MAX];
    uint64_t begin;
    double ns;
    int fd;

    path_in(path, "raw");
    begin = kv_now_ns();
    fd = create(path);
    for (size_t i = 0; i < load->n; i++)
        write_all(fd, load->data + i * load->len, load->len);
    if (fdatasync(fd) < 0)
        die("fdatasync", 0);
    ns = (double)(kv_now_ns() - begin);
    close(fd);
    unlink(path);
    return ns;
}

/*
 * A file each, each made durable before the next. They are deleted at the very end: for five seconds
 * ext4 walks around inodes that were just freed, and everybody's next files would pay for it.
 */
static double file_each(const struct load *load)
{
    char path[PATH_MAX], tmp[PATH_MAX], name[64], tmp_name[72];
    uint64_t begin;
    double ns;
    int dir_fd;

    snprintf(name, sizeof(name), "each-%zu-%llu", load->n, (unsigned long long)load->round);
    path_in(path, name);
    if (mkdir(path, 0700) < 0)
        die(path, 0);
    dir_fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    snprintf(tmp_name, sizeof(tmp_name), "%s/tmp", name);
    path_in(tmp, tmp_name);
    begin = kv_now_ns();
    for (size_t i = 0; i < load->n; i++) {
        int fd = create(tmp);

        write_all(fd, load->data + i * load->len, load->len);
        snprintf(name, sizeof(name), "%zu", i);
        if (fsync(fd) < 0 || close(fd) < 0 || renameat(dir_fd, "tmp", dir_fd, name) < 0 ||
            fsync(dir_fd) < 0)
            die("fsync loop", 0);
    }
    ns = (double)(kv_now_ns() - begin);
    close(dir_fd);
    return ns;
}

static double copy_all(const struct load *load, bool fresh)
{
    static uint8_t *kept;
    uint64_t begin;

    if (!kept || !fresh)
        kept = realloc(kept, load->len);
    begin = kv_now_ns();
    for (size_t i = 0; i < load->n; i++) {
        uint8_t *to = fresh ? malloc(load->len) : kept;

        memcpy(to, load->data + i * load->len, load->len);
        __asm__ volatile("" ::"r"(to) : "memory");
        if (fresh)
            free(to);
    }
    return (double)(kv_now_ns() - begin);
}

/* The same bytes in files, read into buffers of their own, nothing verified. */
static double read_all(const struct load *load, int fd)
{
    uint64_t begin = kv_now_ns();

    for (size_t i = 0; i < load->n; i++) {
        uint8_t *to = malloc(load->len);

        if (pread(fd, to, load->len, (off_t)(i * load->len)) != (ssize_t)load->len)
            die("pread", 0);
        free(to);
    }
    return (double)(kv_now_ns() - begin);
}

/* -- Figures ------------------------------------------------------------------------------------- */

static struct kvs_store *open_store(const char *name, const char *options)
{
    char uri[PATH_MAX + 64], path[PATH_MAX];
    struct kvs_store *store;
    int rc;

    path_in(path, name);
    snprintf(uri, sizeof(uri), "%s%s", path, options);
    rc = kvs_open(uri, &store);
    if (rc < 0)
        die(uri, rc);
    return store;
}

static void head(const char *figure, const struct load *load)
{
    printf("{\"bench\":\"store\",\"figure\":\"%s\",\"chunks\":%zu,\"chunk_bytes\":%zu,"
           "\"median_of\":%d",
           figure, load->n, load->len, ROUNDS);
}

static void print_saves(const char *options, const struct load *load, double cold, double warm,
                        double raw, double each)
{
    head("file: durable cold save", load);
    printf(
        ",\"fs\":\"%s\",\"options\":\"%s\",\"ms\":%.2f,\"raw_sequential_ms\":%.2f,\"x_raw\":%.2f,"
        "\"fsync_each_ms\":%.2f,\"fsync_each_x_raw\":%.2f}\n",
        fs_type(), options, cold / 1e6, raw / 1e6, cold / raw, each / 1e6, each / raw);
    head("file: warm save", load);
    printf(",\"fs\":\"%s\",\"options\":\"%s\",\"ms\":%.2f,\"cold_ms\":%.2f,\"of_cold\":%.4f}\n",
           fs_type(), options, warm / 1e6, cold / 1e6, warm / cold);
    fflush(stdout);
}

/* The store's directories are there already, as they are in a store in use. */
static void bench_saves(size_t n, size_t len, const char *options)
{
    struct samples cold = {0}, warm = {0}, raw = {0}, each = {0};
    struct load load;
    size_t hits;

    load_init(&load, n, len);
    for (int round = -1; round < ROUNDS; round++) { /* the first warms up */
        struct kvs_store *store = open_store("kv", options);
        double cold_ns, raw_ns, each_ns, warm_ns;

        load_next(&load);
        sync();
        raw_ns = raw_sequential(&load);
        sync();
        cold_ns = load_save(store, &load, &hits);
        kvs_close(store);
        sync();
        store = open_store("kv", options);
        warm_ns = load_save(store, &load, &hits);
        kvs_close(store);
        if (hits != n)
            die("a warm save wrote chunks", -EIO);
        sync();
        each_ns = file_each(&load);
        if (round >= 0) {
            sample(&raw, raw_ns);
            sample(&cold, cold_ns);
            sample(&warm, warm_ns);
            sample(&each, each_ns);
        }
    }
    print_saves(options, &load, median(&cold), median(&warm), median(&raw), median(&each));
    load_fini(&load);
}

static void bench_restore(size_t n, size_t len, const char *options)
{
    struct samples ours = {0}, copied = {0}, fresh = {0}, read = {0};
    struct kvs_store *store = open_store("kv-restore", options);
    char path[PATH_MAX];
    struct load load;
    size_t hits;
    int fd;

    load_init(&load, n, len);
    load_next(&load);
    load_save(store, &load, &hits);
    path_in(path, "raw-read");
    fd = create(path);
    write_all(fd, load.data, n * len);
    close(fd);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    for (int round = -1; round < ROUNDS; round++) {
        double ours_ns = load_restore(store, &load), copied_ns = copy_all(&load, false);
        double fresh_ns = copy_all(&load, true), read_ns = read_all(&load, fd);

        if (round < 0)
            continue;
        sample(&ours, ours_ns);
        sample(&copied, copied_ns);
        sample(&fresh, fresh_ns);
        sample(&read, read_ns);
    }
    close(fd);
    kvs_close(store);
    unlink(path);
    {
        double bytes = (double)(n * len), o = bytes / median(&ours), c = bytes / median(&copied);

        head("file: restore from page cache, verified", &load);
        printf(",\"fs\":\"%s\",\"options\":\"%s\",\"gb_per_s\":%.2f,\"memcpy_gb_per_s\":%.2f,"
               "\"of_memcpy\":%.2f,\"memcpy_to_new_buffers_gb_per_s\":%.2f,"
               "\"read_alone_gb_per_s\":%.2f}\n",
               fs_type(), options, o, c, o / c, bytes / median(&fresh), bytes / median(&read));
    }
    fflush(stdout);
    load_fini(&load);
}

/*
 * The last range is nearly full, so growing rewrites all of it: the worst case. The yardstick is
 * what cutting by content alone would write.
 */
static void bench_growth(uint32_t n_tokens)
{
    struct kvs_store *store = open_store("kv-llama", "");

    bench_llama(store, n_tokens, KVS_FORMAT_AUTO);
    kvs_close(store);
    store = open_store("kv-llama-content", "");
    bench_llama(store, n_tokens, KVS_FORMAT_BYTES);
    kvs_close(store);
}

static void quiet(void *arg, int level, const char *line)
{
    (void)arg;
    if (level == 0)
        fprintf(stderr, "store_bench: %s\n", line);
}

int main(void)
{
    const char *where = getenv("KV_BENCH_DIR");

    if (!where)
        where = getenv("TMPDIR");
    snprintf(dir, sizeof(dir), "%s/kvs-bench-XXXXXX", where ? where : ".");
    if (!mkdtemp(dir))
        die(dir, 0);
    kvs_set_log(quiet, NULL);
    if (getenv("KV_BENCH_ONLY_REDIS")) {
        bench_redis(dir);
        remove_tree(dir);
        return 0;
    }
    bench_saves(96, 1 << 20, "");
    bench_saves(1000, 64 << 10, "");
    bench_restore(96, 1 << 20, "");
    bench_restore(1000, 64 << 10, "");
    bench_growth(8440);
    bench_redis(dir);
    remove_tree(dir);
    return 0;
}
