// SPDX-License-Identifier: Apache-2.0
/*
 * Saving and restoring objects, each figure beside a yardstick of the same run. Durable saves: one
 * sequential write and fdatasync of the same bytes (the disk's limit), and a loop that syncs each
 * file (common practice). Restores: memcpy, and read alone.
 *
 * A disk's speed changes over times longer than a save. So each save has its yardstick in the same
 * round, directly before or after it in turn. The printed ratio is the median of the rounds' own
 * ratios, with the least and the greatest.
 *
 * Nothing is deleted before the end, as deletions disturb later figures: ext4 avoids freed inodes
 * for five seconds, and discards blocks during other programs' syncs. So the benchmark needs 6 GiB
 * of disk.
 *
 * Works in $KV_BENCH_DIR, else $TMPDIR, else the current directory. On tmpfs nothing is durable and
 * the figures of saves are meaningless; each line has the file system's type. Arguments choose
 * among "saves", "restores", "llama" and "redis".
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

enum {
    WARM_SAVES = 3,      /* per round; one more goes first, unmeasured */
    EACH_ROUNDS = 3,     /* the slow file-by-file loop runs in one of so many rounds */
    PAUSE_US = 50 * 1000 /* after a sync, for the disk's work behind it */
};

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
        bench_die(path, -errno);
    return fd;
}

static void write_all(int fd, const uint8_t *data, size_t len)
{
    while (len) {
        ssize_t n = write(fd, data, len);

        if (n < 0)
            bench_die("write", -errno);
        data += n;
        len -= (size_t)n;
    }
}

/* -- Yardsticks -------------------------------------------------------------------------------- */

/* Wait until earlier figures' data is written. */
static void settle(void)
{
    sync();
    usleep(PAUSE_US);
}

/* Write one new file with one barrier. */
static double raw_sequential(const struct load *load)
{
    char path[PATH_MAX], name[64];
    uint64_t begin;
    double ns;
    int fd;

    snprintf(name, sizeof(name), "raw-%zu-%llu", load->n, (unsigned long long)load->round);
    path_in(path, name);
    begin = kv_now_ns();
    fd = create(path);
    for (size_t i = 0; i < load->n; i++)
        write_all(fd, load->data + i * load->len, load->len);
    if (fdatasync(fd) < 0)
        bench_die("fdatasync", -errno);
    ns = (double)(kv_now_ns() - begin);
    close(fd);
    return ns;
}

/* Write a file for each chunk, each durable before the next. */
static double file_each(const struct load *load)
{
    char path[PATH_MAX], tmp[PATH_MAX], name[64], tmp_name[72];
    uint64_t begin;
    double ns;
    int dir_fd;

    snprintf(name, sizeof(name), "each-%zu-%llu", load->n, (unsigned long long)load->round);
    path_in(path, name);
    if (mkdir(path, 0700) < 0)
        bench_die(path, -errno);
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
            bench_die("fsync loop", -errno);
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

/* Read the same bytes from files into new buffers, unverified. */
static double read_all(const struct load *load, int fd)
{
    uint64_t begin = kv_now_ns();

    for (size_t i = 0; i < load->n; i++) {
        uint8_t *to = malloc(load->len);

        if (pread(fd, to, load->len, (off_t)(i * load->len)) != (ssize_t)load->len)
            bench_die("pread", -errno);
        free(to);
    }
    return (double)(kv_now_ns() - begin);
}

/* -- Figures ----------------------------------------------------------------------------------- */

static struct kvs_store *open_store(const char *name, const char *options)
{
    char uri[PATH_MAX + 64], path[PATH_MAX];
    struct kvs_store *store;
    int rc;

    path_in(path, name);
    snprintf(uri, sizeof(uri), "%s%s", path, options);
    rc = kvs_open(uri, &store);
    if (rc < 0)
        bench_die(uri, rc);
    return store;
}

static void head(const char *figure, const struct load *load)
{
    bench_begin("store", "'figure':'%s','chunks':%zu,'chunk_bytes':%zu,'median_of':%d", figure,
                load->n, load->len, FILE_ROUNDS);
}

static void print_ratio(const char *name, struct bench_samples *ratio)
{
    double middle = bench_middle(ratio);

    bench_more("'%s':%.3f,'%s_min':%.3f,'%s_max':%.3f", name, middle, name, ratio->of[0], name,
               ratio->of[ratio->n - 1]);
}

struct saves {
    struct bench_samples cold, warm, raw, each, x_raw, of_cold, each_x_raw;
};

static void print_saves(const char *options, const struct load *load, struct saves *s)
{
    head("file: durable cold save", load);
    bench_more("'fs':'%s','options':'%s','ms':%.2f,'raw_sequential_ms':%.2f", fs_type(), options,
               bench_middle(&s->cold) / 1e6, bench_middle(&s->raw) / 1e6);
    print_ratio("x_raw", &s->x_raw);
    bench_more("'fsync_each_ms':%.2f", bench_middle(&s->each) / 1e6);
    print_ratio("fsync_each_x_raw", &s->each_x_raw);
    bench_end();
    head("file: warm save", load);
    bench_more("'fs':'%s','options':'%s','ms':%.2f", fs_type(), options,
               bench_middle(&s->warm) / 1e6);
    print_ratio("of_cold", &s->of_cold);
    bench_end();
}

/* Save existing chunks again on one handle: the median of several saves. */
static double warm_saves(const struct load *load, const char *options)
{
    struct kvs_store *store = open_store("kv", options);
    struct bench_samples ns = {0};

    for (int i = -1; i < WARM_SAVES; i++) {
        size_t hits;
        double one;

        settle();
        one = load_save(store, load, &hits);
        if (hits != load->n)
            bench_die("a warm save wrote chunks", -EIO);
        if (i >= 0)
            bench_sample(&ns, one);
    }
    kvs_close(store);
    return bench_middle(&ns);
}

static double cold_save(const struct load *load, const char *options)
{
    struct kvs_store *store = open_store("kv", options);
    size_t hits;
    double ns;

    settle();
    ns = load_save(store, load, &hits);
    kvs_close(store);
    if (hits)
        bench_die("a cold save found chunks", -EIO);
    return ns;
}

/* The store's directories exist already, as in a store in use. */
static void bench_saves(size_t n, size_t len, const char *options)
{
    struct saves s = {0};
    struct load load;

    load_init(&load, n, len);
    for (int round = -1; round < FILE_ROUNDS; round++) { /* the first round warms up */
        double cold = 0, raw = 0, warm;

        load_next(&load);
        for (int turn = 0; turn < 2; turn++) {
            if ((round + turn) % 2) {
                cold = cold_save(&load, options);
            } else {
                settle();
                raw = raw_sequential(&load);
            }
        }
        warm = warm_saves(&load, options);
        if (round < 0)
            continue;
        bench_sample(&s.raw, raw);
        bench_sample(&s.cold, cold);
        bench_sample(&s.warm, warm);
        bench_sample(&s.x_raw, cold / raw);
        bench_sample(&s.of_cold, warm / cold);
        if (round % EACH_ROUNDS == 0) {
            settle();
            bench_sample(&s.each, file_each(&load));
            bench_sample(&s.each_x_raw, s.each.of[s.each.n - 1] / raw);
        }
    }
    print_saves(options, &load, &s);
    load_fini(&load);
}

static void bench_restore(size_t n, size_t len, const char *options)
{
    struct bench_samples ours = {0}, copied = {0}, fresh = {0}, read = {0}, of_memcpy = {0};
    struct kvs_store *store = open_store("kv-restore", options);
    char path[PATH_MAX], name[64];
    struct load load;
    size_t hits;
    int fd;

    load_init(&load, n, len);
    load_next(&load);
    load_save(store, &load, &hits);
    snprintf(name, sizeof(name), "raw-read-%zu", n);
    path_in(path, name);
    fd = create(path);
    write_all(fd, load.data, n * len);
    close(fd);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    for (int round = -1; round < FILE_ROUNDS; round++) {
        double ours_ns = load_restore(store, &load), copied_ns = copy_all(&load, false);
        double fresh_ns = copy_all(&load, true), read_ns = read_all(&load, fd);

        load_get_all(store, &load, true);
        if (round < 0)
            continue;
        bench_sample(&ours, ours_ns);
        bench_sample(&copied, copied_ns);
        bench_sample(&fresh, fresh_ns);
        bench_sample(&read, read_ns);
        bench_sample(&of_memcpy, copied_ns / ours_ns);
    }
    close(fd);
    kvs_close(store);
    {
        double bytes = (double)(n * len);

        head("file: restore from page cache, verified", &load);
        bench_more("'fs':'%s','options':'%s','gb_per_s':%.2f,'memcpy_gb_per_s':%.2f", fs_type(),
                   options, bytes / bench_middle(&ours), bytes / bench_middle(&copied));
        print_ratio("of_memcpy", &of_memcpy);
        bench_more("'memcpy_to_new_buffers_gb_per_s':%.2f,'read_alone_gb_per_s':%.2f",
                   bytes / bench_middle(&fresh), bytes / bench_middle(&read));
        bench_end();
    }
    load_fini(&load);
}

/* Measure growth. The last range is nearly full, so growth rewrites all of it: the worst case. The
 * yardstick is cutting by content alone. */
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

int main(int argc, char **argv)
{
    const char *where = getenv("KV_BENCH_DIR");

    bench_usage(argc, argv, "[saves|restores|llama|redis]...");
    if (!where)
        where = getenv("TMPDIR");
    snprintf(dir, sizeof(dir), "%s/kvs-bench-XXXXXX", where ? where : ".");
    if (!mkdtemp(dir))
        bench_die(dir, -errno);
    kvs_set_log(quiet, NULL);
    if (bench_chosen(argc, argv, "saves")) {
        bench_saves(96, 1 << 20, "");
        bench_saves(1000, 64 << 10, "");
    }
    if (bench_chosen(argc, argv, "restores")) {
        bench_restore(96, 1 << 20, "");
        bench_restore(1000, 64 << 10, "");
    }
    if (bench_chosen(argc, argv, "llama"))
        bench_growth(8440);
    if (bench_chosen(argc, argv, "redis"))
        bench_redis(dir);
    remove_tree(dir);
    return 0;
}
