// SPDX-License-Identifier: Apache-2.0
/* Storages: each kind, its refusals, and their leftovers: none. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/error.h"
#include "bm/storage/storage.h"
#include "index/random.h"
#include "kvbm.h"
#include "skip.h"
#include "starve.h"
#include "support.h"

#define MIB (UINT64_C(1) << 20)

static char folder[64]; /* each test's own, empty at its beginning and at its end */

static int make_folder(void **state)
{
    (void)state;
    return temp_dir(folder, sizeof(folder));
}

static int n_files(void)
{
    DIR *dir = opendir(folder);
    int n = 0;

    assert_non_null(dir);
    for (struct dirent *entry; (entry = readdir(dir));)
        n += entry->d_name[0] != '.';
    closedir(dir);
    return n;
}

static int drop_folder(void **state)
{
    (void)state;
    return rmdir(folder); /* which fails when something was left */
}

static const char *in_folder(const char *name)
{
    static char path[128];

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    return path;
}

static struct kvbm_storage_opts options(enum kvbm_storage_kind kind, uint64_t bytes)
{
    return (struct kvbm_storage_opts){
        .size = sizeof(struct kvbm_storage_opts), .kind = kind, .bytes = bytes};
}

static struct kvbm_storage *create(const struct kvbm_storage_opts *opts)
{
    struct kvbm_storage *storage = NULL;

    assert_int_equal(kvbm_storage_create(opts, &storage), 0);
    assert_int_equal(kvbm_storage_bytes(storage), opts->bytes);
    return storage;
}

static void refused(const struct kvbm_storage_opts *opts, int error)
{
    struct kvbm_storage *storage = NULL;

    assert_int_equal(kvbm_storage_create(opts, &storage), error);
    assert_null(storage);
}

/* Zeroed at first; what is written anywhere is read there, beside a plain array. */
static void check_contents(struct kvbm_storage *storage)
{
    size_t bytes = (size_t)kvbm_storage_bytes(storage);
    struct rng rng = {test_seed()};
    char *model = calloc(1, bytes), *got = malloc(bytes);

    assert_true(model && got);
    assert_int_equal(kvbm_storage_read(storage, 0, got, bytes), 0);
    assert_memory_equal(got, model, bytes);
    for (int i = 0; i < 100; i++) {
        size_t at = rng_below(&rng, (uint32_t)bytes);
        size_t len = rng_below(&rng, (uint32_t)KV_MIN(bytes - at, (size_t)20000) + 1);

        memset(model + at, i + 1, len);
        assert_int_equal(kvbm_storage_write(storage, at, model + at, len), 0);
        at = rng_below(&rng, (uint32_t)bytes);
        len = rng_below(&rng, (uint32_t)(bytes - at) + 1);
        assert_int_equal(kvbm_storage_read(storage, at, got, len), 0);
        assert_memory_equal(got, model + at, len);
    }
    assert_int_equal(kvbm_storage_read(storage, bytes, got, 1), -ERANGE);
    assert_int_equal(kvbm_storage_write(storage, bytes - 1, got, 2), -ERANGE);
    assert_int_equal(kvbm_storage_read(storage, UINT64_MAX, got, 2), -ERANGE);
    assert_int_equal(kvbm_storage_read(storage, 1, got, SIZE_MAX), -ERANGE);
    assert_int_equal(kvbm_storage_read(storage, bytes, NULL, 0), 0);
    assert_int_equal(kvbm_storage_read(storage, 0, NULL, 1), -EINVAL);
    free(model);
    free(got);
}

/* ---- options ---- */

static void test_options(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_SYSTEM, 100);
    struct kvbm_storage *storage;
    (void)state;

    assert_int_equal(kvbm_storage_create(NULL, &storage), -EINVAL);
    assert_int_equal(kvbm_storage_create(&opts, NULL), -EINVAL);
    opts.bytes = 0;
    refused(&opts, -EINVAL);
    opts.bytes = (UINT64_C(1) << 62) + 1;
    refused(&opts, -EINVAL);
    opts = options((enum kvbm_storage_kind)0, 100);
    refused(&opts, -EINVAL);
    opts = options((enum kvbm_storage_kind)7, 100);
    refused(&opts, -EINVAL);
    opts = options(KVBM_STORAGE_SYSTEM, 100);
    opts.size = 8;
    refused(&opts, -EINVAL);
    opts.size = offsetof(struct kvbm_storage_opts, huge_pages); /* an older caller */
    opts.use_numa = true;
    opts.numa_node = 1000;
    kvbm_storage_destroy(create(&opts));
    kvbm_storage_destroy(NULL);
}

/* ---- system ---- */

static void test_system(void **state)
{
    static const uint64_t sizes[] = {1, 4095, 4096, 4097, 100000, 5 * MIB + 1};
    (void)state;

    for (size_t i = 0; i < KV_COUNT(sizes); i++) {
        struct kvbm_storage_opts opts = options(KVBM_STORAGE_SYSTEM, sizes[i]);
        struct kvbm_storage *storage = create(&opts);

        assert_int_equal(kvbm_storage_get_kind(storage), KVBM_STORAGE_SYSTEM);
        assert_int_equal(kvbm_storage_device_id(storage), 0);
        assert_ptr_equal(kvbm_storage_host_memory(storage),
                         (void *)(uintptr_t)kvbm_storage_addr(storage));
        check_contents(storage);
        kvbm_storage_destroy(storage);
    }
}

/* Pages of a range that are in memory now. */
static size_t resident(const struct kvbm_storage *storage)
{
    size_t n = (size_t)(kvbm_storage_bytes(storage) + 4095) / 4096, present = 0;
    unsigned char *pages = malloc(n);

    assert_non_null(pages);
    assert_int_equal(mincore(kvbm_storage_host_memory(storage), n * 4096, pages), 0);
    for (size_t i = 0; i < n; i++)
        present += pages[i] & 1;
    free(pages);
    return present;
}

/* None of it is there before it is used, and all of it when threads have touched it. */
static void test_first_touch(void **state)
{
    static const uint32_t threads[] = {1, 2, 3, 8, 1000};
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_SYSTEM, 40 * MIB + 12345);
    struct kvbm_storage *storage = create(&opts);
    (void)state;

    assert_int_equal(resident(storage), 0);
    kvbm_storage_destroy(storage);
    for (size_t i = 0; i < KV_COUNT(threads); i++) {
        opts.touch_threads = threads[i];
        storage = create(&opts);
        assert_int_equal(resident(storage), (opts.bytes + 4095) / 4096);
        kvbm_storage_destroy(storage);
    }
}

/* Asked for huge pages, it begins where one may, and the kernel has been told. */
static void test_huge_pages(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_SYSTEM, 5 * MIB);
    struct kvbm_storage *storage;
    char line[512];
    bool here = false, told = false;
    FILE *maps;
    (void)state;

    opts.huge_pages = true;
    storage = create(&opts);
    assert_int_equal(kvbm_storage_addr(storage) % (2 * MIB), 0);
    check_contents(storage);
    maps = fopen("/proc/self/smaps", "r");
    assert_non_null(maps);
    while (fgets(line, sizeof(line), maps)) {
        unsigned long from, to;

        if (sscanf(line, "%lx-%lx ", &from, &to) == 2 && strchr(line, '-') < strchr(line, ' '))
            here = from <= kvbm_storage_addr(storage) && kvbm_storage_addr(storage) < to;
        else if (here && !strncmp(line, "VmFlags:", 8) && strstr(line, " hg"))
            told = true;
    }
    fclose(maps);
    kvbm_storage_destroy(storage);
    if (!told && access("/sys/kernel/mm/transparent_hugepage/enabled", R_OK) < 0)
        skip_because("the kernel has no transparent huge pages");
    assert_true(told);
}

static void test_numa(void **state)
{
    static const uint32_t absent[] = {500, 1022, 1023, 1024, UINT32_MAX};
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_SYSTEM, MIB);
    struct kvbm_storage *storage;
    (void)state;

    opts.use_numa = true;
    opts.touch_threads = 2;
    storage = create(&opts); /* node 0 is everywhere */
    check_contents(storage);
    kvbm_storage_destroy(storage);
    for (size_t i = 0; i < KV_COUNT(absent); i++) {
        opts.numa_node = absent[i];
        refused(&opts, -ENODEV);
    }
}

/* A system call that fails, of madvise only for one advice. */
struct forbidden {
    int call;
    int advice; /* 0: whatever it is called with */
    int error;
};

/* In this process, for ever. Returns 0 or -errno. */
static int forbid(const struct forbidden *one)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)one->call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[2])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)one->advice, 0, one->advice ? 1 : 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (uint32_t)one->error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = KV_COUNT(filter), .filter = filter};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) < 0)
        return -errno;
    return 0;
}

/* A storage and a pool that want what the kernel refuses: without it they work all the same. */
static void live_without(void)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_SYSTEM, 5 * MIB);
    struct kvbm_pool_opts pool_opts = {
        .size = sizeof(pool_opts), .n_blocks = 200000, .block_size = 16};
    struct kvbm_storage *storage;
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;

    opts.huge_pages = opts.use_numa = true;
    opts.touch_threads = 2;
    storage = create(&opts);
    check_contents(storage);
    kvbm_storage_destroy(storage);
    assert_int_equal(kvbm_registry_create(NULL, &registry), 0);
    assert_int_equal(kvbm_pool_create(registry, &pool_opts, &pool), 0);
    assert_int_equal(kvbm_registry_check(registry), 0);
    assert_int_equal(kvbm_pool_destroy(pool), 0);
    assert_int_equal(kvbm_registry_destroy(registry), 0);
}

/* Sandboxes forbid mbind, kernels are built without NUMA or huge pages, old ones can't populate. */
static void test_refusing_kernels(void **state)
{
    static const struct forbidden kernels[] = {{SYS_mbind, 0, EPERM},
                                               {SYS_mbind, 0, ENOSYS},
                                               {SYS_madvise, MADV_HUGEPAGE, EINVAL},
                                               {SYS_madvise, 23, EINVAL} /* POPULATE_WRITE */};
    (void)state;

    for (size_t i = 0; i < KV_COUNT(kernels); i++) {
        pid_t pid = fork();
        int status;

        assert_true(pid >= 0);
        if (pid == 0) {
            if (forbid(&kernels[i]) < 0)
                _exit(77);
            live_without();
            _exit(0);
        }
        assert_int_equal(waitpid(pid, &status, 0), pid);
        assert_true(WIFEXITED(status));
        if (WEXITSTATUS(status) == 77)
            skip_because("no seccomp filters to play another kernel with");
        assert_int_equal(WEXITSTATUS(status), 0);
    }
}

/* More than the machine has, or than this process may have, is refused and not promised. */
static void test_too_much_memory(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_SYSTEM, UINT64_C(1) << 62);
    struct sysinfo info;
    (void)state;

    refused(&opts, -ENOMEM);
    opts.huge_pages = true;
    refused(&opts, -ENOMEM);
    assert_int_equal(sysinfo(&info), 0);
    opts.bytes = ((uint64_t)info.totalram + info.totalswap) * info.mem_unit + MIB;
    refused(&opts, -ENOMEM);
    opts.huge_pages = false;
    refused(&opts, -ENOMEM);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) /* whose shadow is in it */
    struct rlimit old, little = {256 * MIB, RLIM_INFINITY};

    assert_int_equal(getrlimit(RLIMIT_AS, &old), 0);
    little.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_AS, &little), 0);
    opts.bytes = 512 * MIB;
    refused(&opts, -ENOMEM);
    assert_int_equal(setrlimit(RLIMIT_AS, &old), 0);
#endif
}

/* ---- disk ---- */

static uint64_t file_bytes(const char *path)
{
    struct stat st;

    return stat(path, &st) < 0 ? UINT64_MAX : (uint64_t)st.st_size;
}

/* No name, no matter how it ends; its room is reserved. */
static void test_disk_nameless(void **state)
{
    (void)state;
    for (int direct = 0; direct < 2; direct++) {
        struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 3 * MIB + 77);
        struct kvbm_storage *storage;
        struct stat st;

        opts.directory = folder;
        opts.direct = direct;
        storage = create(&opts);
        assert_int_equal(n_files(), 0);
        assert_int_equal(kvbm_storage_get_kind(storage), KVBM_STORAGE_DISK);
        assert_int_equal(kvbm_storage_addr(storage), 0);
        assert_null(kvbm_storage_host_memory(storage));
        assert_int_equal(fstat((int)kvbm_storage_device_id(storage), &st), 0);
        assert_true(st.st_size >= 3 * (off_t)MIB + 77 && st.st_blocks * 512 >= st.st_size);
        if (direct && !storage->direct)
            print_message("no direct I/O in /tmp\n");
        check_contents(storage);
        kvbm_storage_destroy(storage);
        assert_int_equal(n_files(), 0);
    }
}

static void test_disk_directories(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 5000);
    char link[64], target[256];
    (void)state;

    setenv("KVBM_DISK_DIR", folder, 1);
    for (int named = 0; named < 2; named++) {
        struct kvbm_storage *storage;
        ssize_t n;

        opts.directory = named ? "/dev/shm" : NULL;
        storage = create(&opts);
        snprintf(link, sizeof(link), "/proc/self/fd/%d", storage->fd);
        n = readlink(link, target, sizeof(target) - 1);
        assert_true(n > 0);
        target[n] = 0;
        assert_int_equal(strncmp(target, named ? "/dev/shm" : folder, named ? 8 : strlen(folder)),
                         0);
        kvbm_storage_destroy(storage);
    }
    setenv("KVBM_DISK_DIR", in_folder("absent"), 1);
    opts.directory = NULL;
    refused(&opts, -ENOENT);
    unsetenv("KVBM_DISK_DIR");
}

/* Removed at the end, or kept with what is in it and taken up again. */
static void test_disk_keep(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 10000);
    struct kvbm_storage *storage;
    char got[5];
    (void)state;

    for (int direct = 0; direct < 2; direct++) {
        opts.path = in_folder("cache");
        opts.direct = direct;
        opts.keep = true;
        opts.bytes = 10000;
        storage = create(&opts);
        assert_int_equal(kvbm_storage_write(storage, 9995, "hello", 5), 0);
        kvbm_storage_destroy(storage);
        assert_true(file_bytes(opts.path) >= 10000);
        opts.keep = false;
        opts.bytes = 20000; /* grows, and keeps what it has */
        storage = create(&opts);
        assert_int_equal(kvbm_storage_read(storage, 9995, got, 5), 0);
        assert_memory_equal(got, "hello", 5);
        assert_int_equal(kvbm_storage_read(storage, 15000, got, 5), 0);
        assert_memory_equal(got, "\0\0\0\0\0", 5);
        kvbm_storage_destroy(storage);
        assert_int_equal(n_files(), 0);
    }
}

/* Reading a part that was cut off the file is an error, not zeros. */
static void test_disk_cut_short(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 20000);
    struct kvbm_storage *storage;
    char got[5];
    (void)state;

    for (int direct = 0; direct < 2; direct++) {
        opts.path = in_folder("cut");
        opts.direct = direct;
        storage = create(&opts);
        assert_int_equal(kvbm_storage_write(storage, 15000, "hello", 5), 0);
        assert_int_equal(truncate(opts.path, 8192), 0);
        assert_int_equal(kvbm_storage_read(storage, 15000, got, 5), -EIO);
        assert_int_equal(kvbm_storage_read(storage, 8190, got, 5), -EIO);
        assert_int_equal(kvbm_storage_read(storage, 8180, got, 5), 0);
        kvbm_storage_destroy(storage);
    }
}

/* Two storages over one file would write over each other. */
static void test_disk_file_in_use(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 10000);
    struct kvbm_allocator allocator;
    struct kvbm_storage *storage, *second = NULL;
    (void)state;

    opts.path = in_folder("cache");
    storage = create(&opts);
    refused(&opts, -EBUSY);
    allocator = kvbm_allocator_of(&opts);
    assert_int_equal(allocator.allocate(allocator.arg, 10000, &second), -EBUSY);
    assert_true(file_bytes(opts.path) >= 10000); /* and still in use by the first */
    kvbm_storage_destroy(storage);
    assert_int_equal(allocator.allocate(allocator.arg, 12345, &second), 0);
    assert_int_equal(kvbm_storage_bytes(second), 12345);
    kvbm_storage_destroy(second);
}

/* Hook that runs between a storage's open of its file and its lock; set for the next lock. */
static void (*before_lock)(void);
static struct kvbm_storage_opts meanwhile_opts;
static struct kvbm_storage *meanwhile;

/* Instead of the C library's: the storage's calls are in this program. */
int flock(int fd, int operation)
{
    void (*before)(void) = before_lock;

    before_lock = NULL;
    if (before)
        before();
    return (int)syscall(SYS_flock, fd, operation);
}

static void another_locks(void)
{
    meanwhile = create(&meanwhile_opts);
}

static void another_ends(void)
{
    kvbm_storage_destroy(meanwhile);
}

/* A storage that made the file, but was second to lock it, leaves the file to the first. */
static void test_disk_second_to_lock(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 10000);
    (void)state;

    opts.path = in_folder("cache");
    meanwhile_opts = opts;
    before_lock = another_locks;
    refused(&opts, -EBUSY);
    assert_null(before_lock);
    assert_int_equal(file_bytes(opts.path), 10000); /* there, under its name */
    refused(&opts, -EBUSY);
    assert_int_equal(kvbm_storage_write(meanwhile, 9000, "hello", 5), 0);
    kvbm_storage_destroy(meanwhile);
    assert_int_equal(n_files(), 0);
}

/* A storage whose file is removed between open and lock fails: no other storage would see its
 * file. */
static void test_disk_removed_before_lock(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 10000);
    (void)state;

    opts.path = in_folder("cache");
    meanwhile = create(&opts);
    before_lock = another_ends;
    refused(&opts, -EBUSY);
    assert_null(before_lock);
    assert_int_equal(n_files(), 0);
    kvbm_storage_destroy(create(&opts));
}

static void test_disk_errors(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 10000);
    char too_long[300];
    (void)state;

    opts.path = in_folder("absent/cache");
    refused(&opts, -ENOENT);
    opts.path = folder;
    refused(&opts, -EISDIR);
    memset(too_long, 'x', sizeof(too_long) - 1);
    too_long[sizeof(too_long) - 1] = 0;
    opts.path = too_long;
    refused(&opts, -ENAMETOOLONG);
    opts.path = NULL;
    opts.directory = in_folder("absent");
    refused(&opts, -ENOENT);
    opts.directory = "/dev/null";
    refused(&opts, -ENOTDIR);
    assert_int_equal(n_files(), 0);
}

/* A file beyond what this process may write: an error, no signal, and no file left. */
static void test_disk_file_limit(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 2 * MIB);
    struct rlimit old, little;
    struct kvbm_storage *storage;
    int err;
    (void)state;

    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    little = (struct rlimit){MIB, old.rlim_max};
    opts.path = in_folder("cache");
    opts.keep = true;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &little), 0); /* SIGXFSZ would end this program */
    refused(&opts, -EFBIG);
    assert_int_equal(n_files(), 0);
    opts.bytes = MIB;
    kvbm_storage_destroy(create(&opts));
    opts.bytes = 2 * MIB;
    refused(&opts, -EFBIG);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(file_bytes(opts.path), MIB); /* as it was */
    opts.keep = false;
    storage = create(&opts);
    kvbm_storage_destroy(storage);
    opts.bytes = UINT64_C(1) << 62; /* no file system has such files; tmpfs says -ENOSPC */
    err = kvbm_storage_create(&opts, &storage);
    assert_true(err == -EFBIG || err == -ENOSPC);
}

/* A full disk: told at once, and what was begun is gone. */
static void test_disk_full(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_DISK, 0);
    char path[64];
    struct statvfs fs;
    (void)state;

    if (statvfs("/dev/shm", &fs) < 0 || !fs.f_blocks ||
        fs.f_blocks * fs.f_frsize > 1024 * 1024 * MIB)
        skip_because("no tmpfs of limited size in /dev/shm");
    snprintf(path, sizeof(path), "/dev/shm/kvbm-storage-%d", (int)getpid());
    opts.bytes = fs.f_blocks * fs.f_frsize + MIB;
    opts.path = path;
    opts.keep = true;
    refused(&opts, -ENOSPC);
    assert_int_equal(file_bytes(path), UINT64_MAX);
    opts.bytes = 5000;
    opts.direct = true; /* which tmpfs may not have */
    kvbm_storage_destroy(create(&opts));
    opts.bytes = fs.f_blocks * fs.f_frsize + MIB;
    refused(&opts, -ENOSPC);
    assert_true(file_bytes(path) <= 8192); /* an old file stays, and as it was */
    assert_int_equal(unlink(path), 0);
}

/* ---- others ---- */

static void test_external(void **state)
{
    static char memory[30000];
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_EXTERNAL, sizeof(memory));
    struct kvbm_storage *storage;
    (void)state;

    refused(&opts, -EINVAL);
    opts.memory = memory;
    storage = create(&opts);
    assert_int_equal(kvbm_storage_get_kind(storage), KVBM_STORAGE_SYSTEM);
    assert_ptr_equal(kvbm_storage_host_memory(storage), memory);
    check_contents(storage);
    kvbm_storage_destroy(storage);
    memory[5] = 5; /* still ours */
    opts.of = KVBM_STORAGE_PINNED;
    storage = create(&opts);
    assert_int_equal(kvbm_storage_get_kind(storage), KVBM_STORAGE_PINNED);
    assert_ptr_equal(kvbm_storage_host_memory(storage), memory);
    kvbm_storage_destroy(storage);
    opts.of = KVBM_STORAGE_DEVICE;
    opts.device_id = 3;
    storage = create(&opts);
    assert_int_equal(kvbm_storage_get_kind(storage), KVBM_STORAGE_DEVICE);
    assert_int_equal(kvbm_storage_device_id(storage), 3);
    assert_null(kvbm_storage_host_memory(storage));
    kvbm_storage_destroy(storage);
    opts.of = KVBM_STORAGE_DISK;
    refused(&opts, -EINVAL);
    opts.of = KVBM_STORAGE_NULL;
    refused(&opts, -EINVAL);
    opts.of = KVBM_STORAGE_SYSTEM;
    opts.memory = (void *)UINTPTR_MAX;
    refused(&opts, -EINVAL);
}

static void test_null(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_NULL, UINT64_C(1) << 62);
    struct kvbm_storage *storage = create(&opts);
    char byte = 0;
    (void)state;

    assert_null(kvbm_storage_host_memory(storage));
    assert_int_not_equal(kvbm_storage_addr(storage), 0);
    assert_int_equal(kvbm_storage_read(storage, 0, &byte, 1), -ENXIO);
    assert_int_equal(kvbm_storage_write(storage, 0, &byte, 1), -ENXIO);
    assert_int_equal(kvbm_storage_write(storage, opts.bytes, &byte, 1), -ERANGE);
    kvbm_storage_destroy(storage);
}

/* Memory of a GPU, or an ordinary error that says that there is none. */
static void test_gpu(void **state)
{
    static const enum kvbm_storage_kind kinds[] = {KVBM_STORAGE_PINNED, KVBM_STORAGE_DEVICE};
    bool any = false;
    (void)state;

    for (size_t i = 0; i < 2; i++) {
        struct kvbm_storage_opts opts = options(kinds[i], 3 * MIB + 5);
        struct kvbm_storage *storage = NULL;
        int rc = kvbm_storage_create(&opts, &storage);

        assert_true(rc == 0 || rc == -ENODEV);
        opts.device_id = 63; /* no machine has so many */
        refused(&opts, -ENODEV);
        opts.device_id = UINT32_MAX;
        refused(&opts, -ENODEV);
        if (rc == 0)
            check_contents(storage);
        kvbm_storage_destroy(storage);
        any = any || rc == 0;
    }
    if (!any)
        skip_because("no CUDA: pinned and device memory were only refused");
}

/* ---- registrations ---- */

static char released[16];

static void release(void *arg)
{
    size_t n = strlen(released);

    released[n] = *(char *)arg;
    released[n + 1] = 0;
}

static void test_registrations(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_NULL, 100);
    struct kvbm_storage *storage = create(&opts);
    char names[4][2] = {"a", "b", "c", "d"};
    (void)state;

    released[0] = 0;
    for (int i = 0; i < 4; i++)
        assert_int_equal(kvbm_storage_register(storage, names[i], release, names[i]), 0);
    assert_int_equal(kvbm_storage_register(storage, "b", release, names[0]), -EEXIST);
    assert_ptr_equal(kvbm_storage_registration(storage, "b"), names[1]);
    assert_null(kvbm_storage_registration(storage, "x"));
    assert_int_equal(kvbm_storage_unregister(storage, "x"), -ENOENT);
    assert_string_equal(released, "");
    assert_int_equal(kvbm_storage_unregister(storage, "b"), 0);
    assert_int_equal(kvbm_storage_unregister(storage, "b"), -ENOENT);
    assert_null(kvbm_storage_registration(storage, "b"));
    assert_string_equal(released, "b");
    assert_int_equal(kvbm_storage_register(storage, "b", release, names[1]), 0);
    assert_int_equal(kvbm_storage_register(storage, "e", NULL, NULL), -EINVAL);
    assert_int_equal(kvbm_storage_register(storage, NULL, release, NULL), -EINVAL);
    assert_int_equal(kvbm_storage_register(NULL, "e", release, NULL), -EINVAL);
    kvbm_storage_destroy(storage);
    assert_string_equal(released, "bbdca"); /* last registered first */
}

static int n_alive;

/* Stand for an RDMA registration: use the memory, or the file. */
static void use_storage(void *arg)
{
    const struct kvbm_storage *storage = arg;
    char byte = 1;

    n_alive += kvbm_storage_read(storage, kvbm_storage_bytes(storage) - 1, &byte, 1) == 0 && !byte;
}

/* Registrations go while what they were for is still there, also those of a layout's storages. */
static void test_registrations_go_first(void **state)
{
    static const enum kvbm_storage_kind kinds[] = {KVBM_STORAGE_SYSTEM, KVBM_STORAGE_DISK};
    struct kvbm_layout_config config = {.size = sizeof(config),
                                        .kind = KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS,
                                        .num_blocks = 4,
                                        .num_layers = 3,
                                        .outer_dim = 2,
                                        .page_size = 16,
                                        .inner_dim = 64};
    (void)state;

    n_alive = 0;
    for (size_t i = 0; i < KV_COUNT(kinds); i++) {
        struct kvbm_storage_opts opts = options(kinds[i], 2 * MIB);
        struct kvbm_storage *storage = create(&opts);
        struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
        struct kvbm_layout *layout;

        assert_int_equal(kvbm_storage_register(storage, "a", use_storage, storage), 0);
        assert_int_equal(kvbm_storage_register(storage, "b", use_storage, storage), 0);
        kvbm_storage_destroy(storage);
        assert_int_equal(n_alive, 5 * i + 2);
        assert_int_equal(kvbm_layout_allocate(&config, &allocator, &layout), 0);
        for (uint32_t layer = 0; layer < 3; layer++) {
            storage = kvbm_layout_storage(layout, layer);
            assert_int_equal(kvbm_storage_register(storage, "a", use_storage, storage), 0);
        }
        kvbm_layout_destroy(layout);
        assert_int_equal(n_alive, 5 * i + 5);
    }
}

static _Atomic int n_released;

static void count(void *arg)
{
    (void)arg;
    n_released++;
}

static void *register_many(void *arg)
{
    static _Atomic int n_threads;
    struct kvbm_storage *storage = arg;
    int thread = n_threads++; /* a later thread may have the stack of one that has ended */
    char name[32];

    for (int i = 0; i < 200; i++) {
        snprintf(name, sizeof(name), "%d-%d", thread, i);
        if (kvbm_storage_register(storage, name, count, name) ||
            kvbm_storage_registration(storage, name) != name ||
            kvbm_storage_register(storage, "everybody's", count, NULL) == -ENOMEM ||
            (i % 2 && kvbm_storage_unregister(storage, name)))
            return storage;
    }
    return NULL;
}

static void test_registrations_threads(void **state)
{
    struct kvbm_storage_opts opts = options(KVBM_STORAGE_NULL, 100);
    struct kvbm_storage *storage = create(&opts);
    pthread_t threads[4];
    (void)state;

    n_released = 0;
    for (int i = 0; i < 4; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, register_many, storage), 0);
    for (int i = 0; i < 4; i++) {
        void *wrong;

        assert_int_equal(pthread_join(threads[i], &wrong), 0);
        assert_null(wrong);
    }
    assert_int_equal(n_released, 4 * 100);
    kvbm_storage_destroy(storage);
    assert_int_equal(n_released, 4 * 200 + 1);
}

/* ---- without memory ---- */

static void starve_create(const struct kvbm_storage_opts *opts, long want)
{
    struct kvbm_storage *storage = NULL;
    long n = 0;
    int rc;

    do {
        starve_at(++n);
        rc = kvbm_storage_create(opts, &storage);
        assert_int_equal(rc, starved() ? -ENOMEM : 0);
        starve_at(0);
        assert_true(rc == 0 || (!storage && n_files() == 0));
    } while (rc);
    assert_int_equal(n, want + 1);
    do {
        starve_at(1);
        rc = kvbm_storage_register(storage, "name", release, NULL);
        assert_int_equal(rc, -ENOMEM);
        assert_null(kvbm_storage_registration(storage, "name"));
        starve_at(0);
    } while (!rc);
    kvbm_storage_destroy(storage);
}

static void test_starved(void **state)
{
    struct kvbm_storage_opts system = options(KVBM_STORAGE_SYSTEM, 10000);
    struct kvbm_storage_opts disk = options(KVBM_STORAGE_DISK, 10000);
    struct kvbm_storage_opts null = options(KVBM_STORAGE_NULL, 10000);
    struct kvbm_storage *storage;
    char byte = 0;
    (void)state;

    starve_create(&null, 1);
    starve_create(&system, 2);
    disk.path = in_folder("cache");
    starve_create(&disk, 2);
    disk.direct = true;
    storage = create(&disk);
    starve_at(1); /* the bounce buffer */
    assert_int_equal(kvbm_storage_read(storage, 5, &byte, 1), storage->direct ? -ENOMEM : 0);
    starve_at(0);
    kvbm_storage_destroy(storage);
}

#define in_own_folder(test) cmocka_unit_test_setup_teardown(test, make_folder, drop_folder)

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_system),
        cmocka_unit_test(test_first_touch),
        cmocka_unit_test(test_huge_pages),
        cmocka_unit_test(test_numa),
        cmocka_unit_test(test_refusing_kernels),
        cmocka_unit_test(test_too_much_memory),
        in_own_folder(test_disk_nameless),
        in_own_folder(test_disk_directories),
        in_own_folder(test_disk_keep),
        in_own_folder(test_disk_cut_short),
        in_own_folder(test_disk_file_in_use),
        in_own_folder(test_disk_second_to_lock),
        in_own_folder(test_disk_removed_before_lock),
        in_own_folder(test_disk_errors),
        in_own_folder(test_disk_file_limit),
        cmocka_unit_test(test_disk_full),
        cmocka_unit_test(test_external),
        cmocka_unit_test(test_null),
        cmocka_unit_test(test_gpu),
        cmocka_unit_test(test_registrations),
        cmocka_unit_test(test_registrations_go_first),
        cmocka_unit_test(test_registrations_threads),
        in_own_folder(test_starved),
    };

    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)test_seed());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
