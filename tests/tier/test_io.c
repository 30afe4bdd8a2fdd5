// SPDX-License-Identifier: Apache-2.0
/* The executor: every test runs with io_uring and with threads. Each file has a model; concurrent
 * requests touch different pages. */
#include "base/unit.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/io_uring.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/hash/hash.h"
#include "skip.h"
#include "tier/transfer/io.h"

#define PAGE 4096

static struct kvbm_aio *create(enum kvbm_io io, uint32_t depth)
{
    struct kvbm_aio_opts opts = {.size = sizeof(opts), .io = io, .depth = depth};
    struct kvbm_aio *aio = NULL;
    int rc = kvbm_aio_create(&opts, &aio);

    if (rc == -ENOTSUP && io == KVBM_IO_URING)
        skip_because("io_uring is refused here");
    assert_int_equal(rc, 0);
    assert_int_equal(kvbm_aio_kind(aio), io);
    return aio;
}

static const char *folder(void)
{
    return getenv("KV_BUILD_DIR") ? getenv("KV_BUILD_DIR") : "/tmp";
}

/* A nameless file; direct where the file system has it. */
static int open_file(bool direct)
{
    int fd = open(folder(), O_RDWR | O_TMPFILE | O_CLOEXEC | (direct ? O_DIRECT : 0), 0600);

    if (fd < 0 && direct)
        return open_file(false);
    assert_true(fd >= 0);
    return fd;
}

static void *pages(size_t n)
{
    void *memory = NULL;

    assert_int_equal(posix_memalign(&memory, PAGE, n * PAGE), 0);
    memset(memory, 0, n * PAGE);
    return memory;
}

static void count_down(struct kvbm_aio_req *req)
{
    sem_post(req->arg);
}

static void wait_for(sem_t *sem, size_t n)
{
    struct timespec until;

    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 60;
    for (size_t i = 0; i < n; i++)
        assert_int_equal(sem_timedwait(sem, &until), 0);
}

/* Submit one and wait for it. */
static int one(struct kvbm_aio *aio, struct kvbm_aio_req req)
{
    sem_t sem;

    sem_init(&sem, 0, 0);
    req.done = count_down;
    req.arg = &sem;
    req.status = 12345;
    kvbm_aio_submit(aio, &req);
    wait_for(&sem, 1);
    sem_destroy(&sem);
    return req.status;
}

/* ---- bytes ---- */

enum { FILE_PAGES = 512, MAX_PAGES = 40 };

static void random_work(enum kvbm_io io, bool direct)
{
    uint64_t random = unit_seed();
    struct kvbm_aio *aio = create(io, 1 + (uint32_t)unit_below(&random, 20));
    uint8_t *model = pages(FILE_PAGES), *memory = pages(FILE_PAGES);
    int fd = open_file(direct);
    sem_t sem;

    sem_init(&sem, 0, 0);
    assert_int_equal(ftruncate(fd, (off_t)FILE_PAGES * PAGE), 0);
    for (size_t round = unit_rounds(60); round > 0; round--) {
        struct kvbm_aio_req reqs[FILE_PAGES], *list = NULL;
        uint8_t sums[FILE_PAGES][16], sum[16];
        size_t n = 0, at = 0;

        while (at < FILE_PAGES) { /* pieces that don't meet */
            size_t some = 1 + unit_below(&random, MAX_PAGES);
            size_t len = KV_MIN(some, FILE_PAGES - at);
            struct kvbm_aio_req *req = &reqs[n];

            *req = (struct kvbm_aio_req){.op = (enum kvbm_aio_op)unit_below(&random, 3),
                                         .sum = unit_below(&random, 4) ? sums[n] : NULL,
                                         .sum_len = unit_below(&random, len * PAGE + 1),
                                         .cached = unit_below(&random, 2),
                                         .urgent = unit_below(&random, 2),
                                         .fd = fd,
                                         .data = memory + at * PAGE,
                                         .len = len * PAGE,
                                         .offset = at * PAGE,
                                         .status = 12345,
                                         .done = count_down,
                                         .arg = &sem,
                                         .next = list};
            list = req;
            n++;
            if (req->op == KVBM_AIO_WRITE) {
                for (size_t i = 0; i < req->len; i += 8)
                    *(uint64_t *)(memory + req->offset + i) = unit_random(&random);
                memcpy(model + req->offset, memory + req->offset, req->len);
            } else {
                memset(memory + req->offset, 0xee, req->len);
            }
            at += len;
        }
        kvbm_aio_submit(aio, list);
        wait_for(&sem, n);
        for (size_t i = 0; i < n; i++) {
            assert_int_equal(reqs[i].status, 0);
            if (reqs[i].op == KVBM_AIO_READ)
                assert_memory_equal(reqs[i].data, model + reqs[i].offset, reqs[i].len);
            if (io != KVBM_IO_THREADS || !reqs[i].sum || reqs[i].op == KVBM_AIO_SYNC)
                continue;
            kv_hash(reqs[i].data, reqs[i].sum_len, sum);
            assert_memory_equal(reqs[i].sum, sum, sizeof(sum));
        }
    }
    kvbm_aio_destroy(aio);
    sem_destroy(&sem);
    close(fd);
    free(model);
    free(memory);
}

static void test_random_work(void **state)
{
    (void)state;
    random_work(KVBM_IO_THREADS, true);
    random_work(KVBM_IO_THREADS, false);
    random_work(KVBM_IO_URING, true);
    random_work(KVBM_IO_URING, false);
}

/* ---- registered memory ---- */

enum { REGION_PAGES = 300, AROUND = 8 }; /* pages before and behind that aren't registered */

static struct kvbm_aio *create_registered(uint8_t *memory)
{
    struct kvbm_aio_opts opts = {.size = sizeof(opts),
                                 .io = KVBM_IO_URING,
                                 .depth = 8,
                                 .memory = memory + (size_t)AROUND * PAGE,
                                 .memory_bytes = (uint64_t)REGION_PAGES * PAGE};
    struct kvbm_aio *aio = NULL;
    int rc = kvbm_aio_create(&opts, &aio);

    if (rc == -ENOTSUP)
        skip_because("io_uring is refused here");
    assert_int_equal(rc, 0);
    return aio;
}

static struct kvbm_aio_stats stats_of(struct kvbm_aio *aio)
{
    struct kvbm_aio_stats stats;

    kvbm_aio_get_stats(aio, &stats);
    return stats;
}

static bool is_inside(uint64_t page, uint64_t n)
{
    return page >= AROUND && page + n <= AROUND + REGION_PAGES;
}

/* Pieces inside, outside and across the ends of what is registered: all the same bytes, and only
 * the first are counted. */
static void test_registered(void **state)
{
    enum { PAGES = REGION_PAGES + 2 * AROUND };
    uint64_t random = unit_seed(), fixed = 0;
    uint8_t *memory = pages(PAGES), *model = pages(FILE_PAGES);
    struct kvbm_aio *aio = create_registered(memory);
    int fd = open_file(true);

    (void)state;
    assert_int_equal(ftruncate(fd, (off_t)FILE_PAGES * PAGE), 0);
    if (!stats_of(aio).registered_bytes)
        skip_because("no memory can be registered here (RLIMIT_MEMLOCK)");
    assert_int_equal(stats_of(aio).registered_bytes, (uint64_t)REGION_PAGES * PAGE);
    for (size_t round = unit_rounds(2000); round > 0; round--) {
        uint64_t n = 1 + unit_below(&random, 2 * AROUND), at = unit_below(&random, PAGES - n + 1);
        uint64_t offset = unit_below(&random, FILE_PAGES - n + 1) * PAGE;
        bool writing = unit_below(&random, 2);
        uint8_t *data = memory + at * PAGE;

        for (size_t i = 0; i < n * PAGE; i += 8)
            *(uint64_t *)(data + i) = unit_random(&random);
        if (writing)
            memcpy(model + offset, data, n * PAGE);
        assert_int_equal(
            one(aio, (struct kvbm_aio_req){.op = writing ? KVBM_AIO_WRITE : KVBM_AIO_READ,
                                           .fd = fd,
                                           .data = data,
                                           .len = n * PAGE,
                                           .offset = offset}),
            0);
        assert_memory_equal(data, model + offset, n * PAGE);
        fixed += is_inside(at, n);
        assert_int_equal(stats_of(aio).fixed, fixed);
    }
    assert_true(fixed > 0);
    kvbm_aio_destroy(aio);
    close(fd);
    free(model);
    free(memory);
}

/* Two gigabytes of addresses, of one and the same few megabytes. */
static uint8_t *map_over_and_over(uint64_t bytes)
{
    const uint64_t each = UINT64_C(32) << 20;
    uint8_t *memory =
        mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    int fd = memfd_create("registered", MFD_CLOEXEC);

    assert_ptr_not_equal(memory, MAP_FAILED);
    assert_int_equal(ftruncate(fd, (off_t)each), 0);
    for (uint64_t at = 0; at < bytes; at += each)
        assert_ptr_not_equal(mmap(memory + at, KV_MIN(each, bytes - at), PROT_READ | PROT_WRITE,
                                  MAP_SHARED | MAP_FIXED, fd, 0),
                             MAP_FAILED);
    close(fd);
    return memory;
}

/* More than the gigabyte that one registered buffer may have: several. */
static void test_registered_large(void **state)
{
    const uint64_t piece = UINT64_C(1) << 30, at[] = {0, piece - PAGE, piece, 2 * piece};
    uint64_t bytes = 2 * piece + 2 * (uint64_t)PAGE;
    uint8_t *memory = map_over_and_over(bytes);
    struct kvbm_aio_opts opts = {.size = sizeof(opts),
                                 .io = KVBM_IO_URING,
                                 .depth = 8,
                                 .memory = memory,
                                 .memory_bytes = bytes};
    struct kvbm_aio *aio = NULL;
    int fd = open_file(false), rc = kvbm_aio_create(&opts, &aio);

    (void)state;
    if (rc == -ENOTSUP)
        skip_because("io_uring is refused here");
    assert_int_equal(rc, 0);
    if (!stats_of(aio).registered_bytes)
        skip_because("two gigabytes can't be registered here (RLIMIT_MEMLOCK)");
    for (size_t i = 0; i < KV_COUNT(at); i++) {
        uint64_t before = stats_of(aio).fixed;
        struct kvbm_aio_req req = {
            .op = KVBM_AIO_WRITE, .fd = fd, .data = memory + at[i], .len = 2L * PAGE};

        memset(req.data, 'a' + (int)i, req.len);
        assert_int_equal(one(aio, req), 0);
        memset(req.data, 0, req.len);
        req.op = KVBM_AIO_READ;
        assert_int_equal(one(aio, req), 0);
        for (size_t k = 0; k < req.len; k++)
            assert_int_equal(((char *)req.data)[k], 'a' + (int)i);
        /* across the end of a buffer: as any other memory */
        assert_int_equal(stats_of(aio).fixed - before, i == 1 ? 0 : 2);
    }
    kvbm_aio_destroy(aio);
    munmap(memory, bytes);
    close(fd);
}

/* ---- errors ---- */

static void errors(enum kvbm_io io)
{
    struct kvbm_aio *aio = create(io, 4);
    int fd = open_file(false), pipes[2];
    char *memory = pages(2);
    struct rlimit old, small = {.rlim_cur = PAGE, .rlim_max = RLIM_INFINITY};

    memset(memory, 'x', 2L * PAGE);
    assert_int_equal(
        one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_WRITE, .fd = fd, .data = memory, .len = 100}),
        0);
    /* the file ends before: what was there isn't taken for all */
    assert_int_equal(
        one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_READ, .fd = fd, .data = memory, .len = 101}),
        -EIO);
    assert_int_equal(
        one(aio,
            (struct kvbm_aio_req){
                .op = KVBM_AIO_READ, .fd = fd, .data = memory, .len = 1, .offset = 100}),
        -EIO);
    assert_int_equal(
        one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_READ, .fd = fd, .data = memory, .len = 100}),
        0);
    assert_int_equal(
        one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_READ, .fd = 9999, .data = memory, .len = 1}),
        -EBADF);
    assert_int_equal(one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_SYNC, .fd = 9999}), -EBADF);
    assert_int_equal(one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_FLUSH, .fd = fd}), 0);
    assert_int_equal(one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_FLUSH, .fd = 9999}), -EBADF);
    assert_int_equal(pipe(pipes), 0);
    assert_int_equal(one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_SYNC, .fd = pipes[0]}), -EINVAL);
    assert_int_equal(one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_FLUSH, .fd = pipes[0]}),
                     -ESPIPE);
    /* beyond a limit: an error and no signal; the part before it is written */
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    small.rlim_max = old.rlim_max;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_int_equal(one(aio,
                         (struct kvbm_aio_req){
                             .op = KVBM_AIO_WRITE, .fd = fd, .data = memory, .len = 2L * PAGE}),
                     -EFBIG);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    close(pipes[0]);
    close(pipes[1]);
    close(fd);
    free(memory);
    kvbm_aio_destroy(aio);
}

static void test_errors(void **state)
{
    (void)state;
    errors(KVBM_IO_THREADS);
    errors(KVBM_IO_URING);
}

static void test_refuses_nonsense(void **state)
{
    struct kvbm_aio *aio = NULL;
    struct kvbm_aio_opts opts = {.size = sizeof(opts), .io = (enum kvbm_io)7};

    (void)state;
    assert_int_equal(kvbm_aio_create(&opts, &aio), -EINVAL);
    opts = (struct kvbm_aio_opts){.size = sizeof(opts), .depth = 5000};
    assert_int_equal(kvbm_aio_create(&opts, &aio), -EINVAL);
    opts = (struct kvbm_aio_opts){.size = sizeof(opts), .depth = 4, .n_threads = 5};
    assert_int_equal(kvbm_aio_create(&opts, &aio), -EINVAL);
    assert_null(aio);
    kvbm_aio_destroy(NULL);
    assert_int_equal(kvbm_aio_create(NULL, &aio), 0); /* all defaults, and nothing to do */
    kvbm_aio_destroy(aio);
}

/* ---- order ---- */

enum { N_ORDER = 64 };

struct order {
    pthread_mutex_t lock;
    struct kvbm_aio_req *ended[4 * N_ORDER];
    size_t n;
    sem_t sem;
};

static void note_order(struct kvbm_aio_req *req)
{
    struct order *order = req->arg;

    pthread_mutex_lock(&order->lock);
    order->ended[order->n++] = req;
    pthread_mutex_unlock(&order->lock);
    sem_post(&order->sem);
}

/* One at a time, all queued at once: urgent ones overtake, and the others have their turn all the
 * same. */
static void ordered(enum kvbm_io io)
{
    struct kvbm_aio *aio = create(io, 1);
    static struct order order;
    static struct kvbm_aio_req reqs[2 * N_ORDER];
    char *memory = pages(1);
    int fd = open_file(false);
    size_t urgent_before = 0, rest_before = 0;

    order = (struct order){.n = 0};
    pthread_mutex_init(&order.lock, NULL);
    sem_init(&order.sem, 0, 0);
    assert_int_equal(ftruncate(fd, PAGE), 0);
    for (size_t i = 0; i < 2 * N_ORDER; i++) {
        reqs[i] = (struct kvbm_aio_req){.op = i < N_ORDER ? KVBM_AIO_WRITE : KVBM_AIO_READ,
                                        .urgent = i >= N_ORDER,
                                        .fd = fd,
                                        .data = memory,
                                        .len = PAGE,
                                        .done = note_order,
                                        .arg = &order,
                                        .next = i + 1 < 2 * N_ORDER ? &reqs[i + 1] : NULL};
    }
    kvbm_aio_submit(aio, reqs);
    wait_for(&order.sem, 2L * N_ORDER);
    for (size_t i = 0; i < N_ORDER; i++) /* within a kind: as they came */
        urgent_before += order.ended[i]->urgent;
    assert_in_range(urgent_before, N_ORDER - N_ORDER / 7, N_ORDER - N_ORDER / 9);
    for (size_t i = 0, last[2] = {0, 0}; i < 2 * N_ORDER; i++) {
        size_t index = (size_t)(order.ended[i] - reqs), kind = order.ended[i]->urgent;

        assert_true(index >= last[kind]);
        last[kind] = index;
        rest_before += !kind;
    }
    assert_int_equal(rest_before, N_ORDER);
    kvbm_aio_destroy(aio);
    close(fd);
    free(memory);
    sem_destroy(&order.sem);
    pthread_mutex_destroy(&order.lock);
}

static void test_order(void **state)
{
    (void)state;
    ordered(KVBM_IO_THREADS);
    ordered(KVBM_IO_URING);
}

/* ---- many threads, callbacks that submit, an end with work under way ---- */

struct chain {
    struct kvbm_aio *aio;
    struct kvbm_aio_req req;
    _Atomic uint32_t left;
    atomic_uint *ended;
};

static void next_of_chain(struct kvbm_aio_req *req)
{
    struct chain *chain = req->arg;

    if (req->status < 0 || atomic_fetch_sub(&chain->left, 1) == 1)
        atomic_fetch_add(chain->ended, 1);
    else
        kvbm_aio_submit(chain->aio, req);
}

struct producer {
    struct kvbm_aio *aio;
    struct chain chains[8];
    int fd;
};

static void *produce(void *arg)
{
    struct producer *p = arg;

    for (size_t i = 0; i < KV_COUNT(p->chains); i++)
        kvbm_aio_submit(p->aio, &p->chains[i].req);
    return NULL;
}

static void many_threads(enum kvbm_io io)
{
    enum { N = 6 };
    static struct producer producers[N];
    struct kvbm_aio *aio = create(io, 8);
    uint32_t length = (uint32_t)unit_rounds(200);
    pthread_t threads[N];
    char *memory = pages(N * 8);
    int fd = open_file(false);
    atomic_uint ended = 0;

    assert_int_equal(ftruncate(fd, (off_t)N * 8 * PAGE), 0);
    for (size_t i = 0; i < N; i++) {
        producers[i].aio = aio;
        for (size_t j = 0; j < 8; j++) {
            struct chain *chain = &producers[i].chains[j];

            chain->aio = aio;
            chain->ended = &ended;
            chain->left = length;
            chain->req = (struct kvbm_aio_req){.op = j < 4   ? KVBM_AIO_READ
                                                     : j < 7 ? KVBM_AIO_WRITE
                                                             : KVBM_AIO_SYNC,
                                               .urgent = j % 2,
                                               .fd = fd,
                                               .data = memory + (i * 8 + j) * PAGE,
                                               .len = PAGE,
                                               .offset = (i * 8 + j) * PAGE,
                                               .done = next_of_chain,
                                               .arg = chain};
        }
        assert_int_equal(pthread_create(&threads[i], NULL, produce, &producers[i]), 0);
    }
    for (size_t i = 0; i < N; i++)
        pthread_join(threads[i], NULL);
    kvbm_aio_destroy(aio); /* waits: callbacks go on submitting meanwhile */
    assert_int_equal(ended, N * 8);
    for (size_t i = 0; i < N * 8; i++)
        assert_int_equal(producers[i / 8].chains[i % 8].req.status, 0);
    close(fd);
    free(memory);
}

static void test_many_threads(void **state)
{
    (void)state;
    many_threads(KVBM_IO_THREADS);
    many_threads(KVBM_IO_URING);
}

/* ---- a kernel that refuses ---- */

static void install(struct sock_filter *code, unsigned short n)
{
    struct sock_fprog program = {.len = n, .filter = code};

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 ||
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program) != 0)
        _exit(77);
}

/* From here on this process has no such system call. */
static void forbid(long call)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };

    install(code, KV_COUNT(code));
}

/* The same of those calls whose second argument is this. */
static void forbid_of(long call, uint32_t argument)
{
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, argument, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };

    install(code, KV_COUNT(code));
}

static unsigned lines;

static void count_lines(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg, (void)level, (void)len;
    lines += strstr(line, "io_uring") != NULL;
}

static int in_child(int (*body)(void))
{
    pid_t pid = fork();
    int status;

    assert_true(pid >= 0);
    if (pid == 0)
        _exit(body());
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    if (WEXITSTATUS(status) == 77)
        skip_because("no seccomp filters here");
    return WEXITSTATUS(status);
}

static bool writes_and_reads(struct kvbm_aio *aio)
{
    char text[8] = "abcdefg", back[8] = "";
    int fd = open_file(false);
    bool good =
        one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_WRITE, .fd = fd, .data = text, .len = 8}) ==
            0 &&
        one(aio, (struct kvbm_aio_req){.op = KVBM_AIO_SYNC, .fd = fd}) == 0 &&
        one(aio,
            (struct kvbm_aio_req){
                .op = KVBM_AIO_READ, .urgent = true, .fd = fd, .data = back, .len = 8}) == 0 &&
        !memcmp(text, back, 8);

    close(fd);
    return good;
}

static int without_uring(void)
{
    struct kvbm_aio_opts opts = {.size = sizeof(opts), .io = KVBM_IO_URING};
    struct kvbm_aio *aio = NULL;

    kv_log_set_sink(count_lines, NULL);
    forbid(SYS_io_uring_setup);
    if (kvbm_aio_create(&opts, &aio) != -ENOTSUP || aio || lines)
        return 1;
    opts.io = KVBM_IO_AUTO;
    for (int i = 0; i < 3; i++) {
        if (kvbm_aio_create(&opts, &aio) != 0 || kvbm_aio_kind(aio) != KVBM_IO_THREADS)
            return 2;
        if (!writes_and_reads(aio))
            return 3;
        kvbm_aio_destroy(aio);
    }
    return lines == 1 ? 0 : 4; /* said once */
}

static void test_refused(void **state)
{
    (void)state;
    assert_int_equal(in_child(without_uring), 0);
}

/* A sandbox that closes while the ring is in use. */
static int closing(void)
{
    struct kvbm_aio *aio = create(KVBM_IO_URING, 4);

    kv_log_set_sink(count_lines, NULL);
    if (!writes_and_reads(aio))
        return 1;
    forbid(SYS_io_uring_enter);
    for (int i = 0; i < 3; i++)
        if (!writes_and_reads(aio))
            return 2;
    kvbm_aio_destroy(aio);
    return lines == 1 ? 0 : 3;
}

static void test_closed_later(void **state)
{
    (void)state;
    kvbm_aio_destroy(create(KVBM_IO_URING, 4)); /* or skip */
    assert_int_equal(in_child(closing), 0);
}

/* Memory that can't be registered is used as any other, and the log says so. */
static int without_registering(void (*refuse)(void))
{
    uint8_t *memory = pages(REGION_PAGES + 2L * AROUND), *data = memory + (size_t)AROUND * PAGE;
    struct kvbm_aio *aio;
    int fd = open_file(false);
    bool good;

    kv_log_set_sink(count_lines, NULL);
    refuse();
    aio = create_registered(memory);
    memset(data, 'x', PAGE);
    good =
        one(aio,
            (struct kvbm_aio_req){.op = KVBM_AIO_WRITE, .fd = fd, .data = data, .len = PAGE}) == 0;
    memset(data, 0, PAGE);
    good = good && one(aio, (struct kvbm_aio_req){
                                .op = KVBM_AIO_READ, .fd = fd, .data = data, .len = PAGE}) == 0;
    if (!good || data[0] != 'x' || data[PAGE - 1] != 'x')
        return 1;
    if (stats_of(aio).registered_bytes || stats_of(aio).fixed)
        return 2;
    kvbm_aio_destroy(aio);
    return lines == 1 ? 0 : 3;
}

/* Limit the memory that may be locked, also for root. */
static void limit_locked(rlim_t bytes)
{
    const struct rlimit limit = {.rlim_cur = bytes, .rlim_max = bytes};
    struct __user_cap_header_struct head = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];

    if (setrlimit(RLIMIT_MEMLOCK, &limit) < 0 || syscall(SYS_capget, &head, data) < 0)
        _exit(77);
    data[0].effective &= ~(1u << CAP_IPC_LOCK);
    data[0].permitted &= ~(1u << CAP_IPC_LOCK);
    if (syscall(SYS_capset, &head, data) < 0)
        _exit(77);
}

static void room_for_the_ring(void)
{
    limit_locked(128L * PAGE); /* and not for the region */
}

static int registering_too_much(void)
{
    return without_registering(room_for_the_ring);
}

/* Some kernels count the ring itself as locked memory: threads, then. */
static int no_room_for_the_ring(void)
{
    struct kvbm_aio *aio = NULL;

    limit_locked(0);
    kv_log_set_sink(count_lines, NULL);
    if (kvbm_aio_create(NULL, &aio) != 0)
        return 1;
    if (kvbm_aio_kind(aio) == KVBM_IO_THREADS && lines != 1)
        return 2;
    if (!writes_and_reads(aio))
        return 3;
    kvbm_aio_destroy(aio);
    return 0;
}

static void forbid_registering(void)
{
    forbid_of(SYS_io_uring_register, IORING_REGISTER_BUFFERS);
}

static int registering_forbidden(void)
{
    return without_registering(forbid_registering);
}

static void test_not_registered(void **state)
{
    (void)state;
    kvbm_aio_destroy(create(KVBM_IO_URING, 4)); /* or skip */
    assert_int_equal(in_child(no_room_for_the_ring), 0);
    assert_int_equal(in_child(registering_too_much), 0);
    assert_int_equal(in_child(registering_forbidden), 0);
}

/* ---- fork ---- */

static struct kvbm_aio *inherited;

static int use_inherited(void)
{
    char byte = 0;
    sem_t sem;
    struct kvbm_aio_req req = {
        .op = KVBM_AIO_READ, .data = &byte, .len = 1, .done = count_down, .arg = &sem};

    sem_init(&sem, 0, 0);
    kvbm_aio_submit(inherited, &req);
    if (sem_trywait(&sem) != 0 || req.status != -ESHUTDOWN)
        return 1;
    kvbm_aio_destroy(inherited); /* doesn't hang */
    return 0;
}

static void forked(enum kvbm_io io)
{
    inherited = create(io, 4);
    assert_int_equal(in_child(use_inherited), 0);
    assert_true(writes_and_reads(inherited));
    kvbm_aio_destroy(inherited);
}

static void test_fork(void **state)
{
    (void)state;
    forked(KVBM_IO_THREADS);
    forked(KVBM_IO_URING);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_work),      cmocka_unit_test(test_errors),
        cmocka_unit_test(test_refuses_nonsense), cmocka_unit_test(test_order),
        cmocka_unit_test(test_many_threads),     cmocka_unit_test(test_refused),
        cmocka_unit_test(test_closed_later),     cmocka_unit_test(test_fork),
        cmocka_unit_test(test_registered),       cmocka_unit_test(test_registered_large),
        cmocka_unit_test(test_not_registered),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
