// SPDX-License-Identifier: Apache-2.0
/* The disk tier's store beside a naive model: damaged files, limits, cancellation and locks. */
#include "tier/disk_unit.h"

#include <pthread.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "tier/disk/format.h"

/* ---- a model beside it ---- */

enum { SLOTS = 61, SLOT_BYTES = 8192, BATCH = 12 };

struct slot_model {
    bool there;
    uint64_t key, parent, len, seed;
    uint32_t group, position, written; /* written: which of all writes, the later the greater */
};

struct model {
    struct slot_model slots[SLOTS];
    uint32_t n_slots, writes;
    uint64_t random;
};

static void model_write(struct model *m, struct kvbm_disk *disk, uint8_t *memory)
{
    struct kvbm_disk_io ios[BATCH];
    struct slot_model news[BATCH];
    uint32_t n = 1 + (uint32_t)unit_below(&m->random, BATCH);
    uint32_t first = (uint32_t)unit_below(&m->random, m->n_slots);

    m->writes++;
    for (uint32_t i = 0; i < n; i++) {
        struct slot_model *s = &news[i];
        /* whole pages at aligned memory, or neither */
        bool odd = unit_below(&m->random, 3) == 0;
        uint64_t pages = 1 + unit_below(&m->random, 2),
                 any = 1 + unit_below(&m->random, SLOT_BYTES);
        uint8_t *data = memory + i * (SLOT_BYTES + 4096) + (odd ? 8 : 0);

        *s = (struct slot_model){.there = true,
                                 .key = unit_random(&m->random),
                                 .parent = unit_below(&m->random, 2) ? unit_random(&m->random) : 0,
                                 .len = odd ? any : pages * 4096,
                                 .seed = unit_random(&m->random),
                                 .group = (uint32_t)unit_below(&m->random, 64),
                                 .position = (uint32_t)unit_random(&m->random),
                                 .written = m->writes};
        disk_fill(data, s->len, s->seed);
        ios[i] = (struct kvbm_disk_io){.slot = (first + i * 5) % m->n_slots,
                                       .group = s->group,
                                       .position = s->position,
                                       .key = &s->key,
                                       .parent = s->parent ? &s->parent : NULL,
                                       .data = data,
                                       .len = s->len,
                                       .status = 1};
        for (uint32_t j = 0; j < i; j++)
            if (ios[j].slot == ios[i].slot) /* a slot once */
                n = i;
    }
    disk_run(disk, true, ios, n);
    for (uint32_t i = 0; i < n; i++) {
        assert_int_equal(ios[i].status, 0);
        m->slots[ios[i].slot] = news[i];
    }
}

static void model_read(struct model *m, struct kvbm_disk *disk, uint8_t *memory)
{
    uint8_t *expected = malloc(SLOT_BYTES);

    for (uint32_t i = 0; i < m->n_slots; i++) {
        const struct slot_model *s = &m->slots[i];
        uint64_t other = s->key + 1;
        struct kvbm_disk_io io = {.slot = i,
                                  .group = s->group,
                                  .key = &s->key,
                                  .data = memory + (unit_below(&m->random, 2) ? 24 : 0),
                                  .len = s->there ? s->len : 100,
                                  .status = 1};

        disk_run(disk, false, &io, 1);
        assert_int_equal(io.status, s->there ? 0 : -ENOENT);
        if (!s->there)
            continue;
        disk_fill(expected, s->len, s->seed);
        assert_memory_equal(io.data, expected, s->len);
        io.key = &other; /* somebody else's */
        disk_run(disk, false, &io, 1);
        assert_int_equal(io.status, -ENOENT);
        io.key = &s->key;
        io.group = (s->group + 1) % 64;
        disk_run(disk, false, &io, 1);
        assert_int_equal(io.status, -ENOENT);
        io.group = s->group;
        io.len = s->len % SLOT_BYTES + 1;
        disk_run(disk, false, &io, 1);
        assert_int_equal(io.status, -EBADMSG);
    }
    free(expected);
}

static void model_forget(struct model *m, struct kvbm_disk *disk)
{
    uint32_t slots[5], n = 1 + (uint32_t)unit_below(&m->random, 5);
    uint32_t first = (uint32_t)unit_below(&m->random, m->n_slots);

    for (uint32_t i = 0; i < n; i++) {
        slots[i] = (first + i) % m->n_slots;
        m->slots[slots[i]].there = false;
        if (i && slots[i] == slots[0])
            n = i;
    }
    assert_int_equal(kvbm_disk_forget(disk, slots, NULL, n), 0);
}

struct seen {
    struct model *m;
    uint32_t n, position, last;
    bool slot[SLOTS];
};

static int compare_record(void *arg, const struct kvbm_disk_record *r)
{
    struct seen *seen = arg;
    const struct slot_model *s = &seen->m->slots[r->slot];

    assert_true(r->slot < seen->m->n_slots);
    assert_true(s->there && !seen->slot[r->slot]);
    seen->slot[r->slot] = true;
    assert_memory_equal(r->key, &s->key, 8);
    assert_int_equal(r->parent != NULL, s->parent != 0);
    if (r->parent)
        assert_memory_equal(r->parent, &s->parent, 8);
    assert_int_equal(r->group, s->group);
    assert_int_equal(r->position, s->position);
    assert_int_equal(r->len, s->len);
    assert_true(s->position > seen->position ||
                (s->position == seen->position && s->written >= seen->last)); /* oldest first */
    seen->position = s->position;
    seen->last = s->written;
    seen->n++;
    return 0;
}

static void model_each(struct model *m, struct kvbm_disk *disk)
{
    struct seen seen = {.m = m};
    uint32_t there = 0;

    for (uint32_t i = 0; i < m->n_slots; i++)
        there += m->slots[i].there;
    assert_int_equal(kvbm_disk_each(disk, compare_record, &seen), there);
    assert_int_equal(seen.n, there);
}

static void run_model(enum kvbm_io io, uint32_t n_volumes, uint32_t n_files, bool buffered,
                      bool volatile_)
{
    struct model m = {.random = unit_seed(), .n_slots = SLOTS};
    struct kvbm_disk_opts opts = disk_opts(n_volumes, SLOTS);
    uint8_t *memory = disk_pages((size_t)BATCH * (SLOT_BYTES + 4096));
    struct kvbm_disk *disk;

    opts.io = io;
    opts.n_files = n_files;
    opts.buffered = buffered;
    opts.volatile_ = volatile_;
    disk = disk_open(&opts);
    for (size_t round = unit_rounds(120); round > 0; round--) {
        uint64_t dice = unit_below(&m.random, 20);

        if (dice < 13) {
            model_write(&m, disk, memory);
        } else if (dice < 16) {
            model_forget(&m, disk);
        } else if (dice < 17) {
            model_read(&m, disk, memory);
        } else {
            kvbm_disk_close(disk);
            if (dice == 19) { /* of another size */
                m.n_slots = SLOTS / 2 + (uint32_t)unit_below(&m.random, SLOTS / 2);
                for (uint32_t i = m.n_slots; i < SLOTS; i++)
                    m.slots[i].there = false;
                opts.n_slots = m.n_slots;
            }
            disk = disk_open(&opts);
            model_each(&m, disk);
        }
    }
    model_read(&m, disk, memory);
    kvbm_disk_close(disk);
    free(memory);
}

static void test_model(void **state)
{
    (void)state;
    run_model(KVBM_IO_AUTO, 1, 1, false, false);
}

static void test_model_volumes(void **state)
{
    (void)state;
    run_model(KVBM_IO_THREADS, 3, 1, false, false);
}

static void test_model_volatile(void **state)
{
    (void)state;
    run_model(KVBM_IO_AUTO, 2, 1, true, true);
}

static void test_model_files(void **state)
{
    (void)state;
    run_model(KVBM_IO_AUTO, 1, 3, false, false);
}

static void test_model_files_volatile(void **state)
{
    (void)state;
    run_model(KVBM_IO_AUTO, 2, 4, true, true);
}

/* ---- limits ---- */

static void test_refuses_nonsense(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 4), good = opts;
    struct kvbm_disk *disk = NULL;
    uint8_t data[16];
    struct kvbm_disk_io io = {.slot = 4, .key = "12345678", .data = data, .len = 16};
    struct kvbm_disk_batch batch = {.ios = &io, .n = 1, .done = disk_done};
    const char *missing = "/nonexistent";

    (void)state;
#define REFUSED(field, value, error)                           \
    do {                                                       \
        opts = good;                                           \
        opts.field = value;                                    \
        assert_int_equal(kvbm_disk_open(&opts, &disk), error); \
    } while (0)
    REFUSED(n_directories, 0, -EINVAL);
    REFUSED(n_directories, 17, -EINVAL);
    REFUSED(name, "a/b", -EINVAL);
    REFUSED(name, "", -EINVAL);
    REFUSED(key_len, 0, -EINVAL);
    REFUSED(key_len, 65, -EINVAL);
    REFUSED(slot_bytes, 0, -EINVAL);
    REFUSED(n_slots, 0, -EINVAL);
    REFUSED(directories, &missing, -ENOENT);
#undef REFUSED
    assert_null(disk);
    disk = disk_open(&good);
    assert_int_equal(kvbm_disk_submit(disk, &batch), -EINVAL); /* slot */
    io.slot = 0;
    io.len = 8193;
    assert_int_equal(kvbm_disk_submit(disk, &batch), -EINVAL);
    io.len = 0;
    assert_int_equal(kvbm_disk_submit(disk, &batch), -EINVAL);
    assert_int_equal(kvbm_disk_forget(disk, (uint32_t[]){4}, NULL, 1), -EINVAL);
    assert_false(kvbm_disk_usable(disk, 4));
    assert_true(kvbm_disk_usable(disk, 3));
    kvbm_disk_close(disk);
    kvbm_disk_close(NULL);
}

static void test_locked(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(2, 4), other;
    struct kvbm_disk *disk = disk_open(&opts), *second = NULL;
    char data[100];

    (void)state;
    assert_int_equal(disk_write(disk, 1, 7, memset(data, 'x', 100), 100), 0);
    assert_int_equal(kvbm_disk_open(&opts, &second), -EBUSY);
    other = opts;
    other.fingerprint = "another"; /* has a subdirectory, at once, whoever has the directory */
    second = disk_open(&other);
    assert_int_equal(disk_read(second, 1, 7, data, 100), -ENOENT);
    kvbm_disk_close(second);
    assert_int_equal(disk_read(disk, 1, 7, data, 100), 0);
    other = opts;
    other.name = "another"; /* has files of its own */
    second = disk_open(&other);
    kvbm_disk_close(second);
    kvbm_disk_close(disk);
    disk = disk_open(&opts);
    assert_int_equal(disk_read(disk, 1, 7, data, 100), 0);
    kvbm_disk_close(disk);
}

/* Files too large for the process's limit, or the disk: an error at open, and what was there stays. */
static void test_no_room(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 16), large = disk_opts(1, 1000);
    struct rlimit old, small;
    struct kvbm_disk *disk = disk_open(&opts);
    char data[100];

    (void)state;
    assert_int_equal(disk_write(disk, 15, 7, memset(data, 'x', 100), 100), 0);
    kvbm_disk_close(disk);
    getrlimit(RLIMIT_FSIZE, &old);
    small = (struct rlimit){.rlim_cur = 1 << 20, .rlim_max = old.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
    assert_int_equal(kvbm_disk_open(&large, &disk), -EFBIG);
    setrlimit(RLIMIT_FSIZE, &old);
    large.n_slots = INT32_MAX;
    large.slot_bytes = 1 << 20; /* 2 PiB: emptied, since slots are of another size; then refused */
    large.name = "large";
    assert_int_equal(kvbm_disk_open(&large, &disk), -ENOSPC);
    disk = disk_open(&opts);
    assert_int_equal(disk_read(disk, 15, 7, data, 100), 0);
    kvbm_disk_close(disk);
}

/* ---- another's files ---- */

static int count_record(void *arg, const struct kvbm_disk_record *record)
{
    (void)record;
    ++*(int *)arg;
    return 0;
}

static int n_records(const struct kvbm_disk_opts *opts)
{
    struct kvbm_disk *disk = disk_open(opts);
    int n = 0;
    long told = kvbm_disk_each(disk, count_record, &n);

    assert_int_equal(told, n);
    kvbm_disk_close(disk);
    return n;
}

static void fill_disk(const struct kvbm_disk_opts *opts)
{
    struct kvbm_disk *disk = disk_open(opts);
    uint8_t *data = disk_pages(opts->slot_bytes);

    for (uint32_t i = 0; i < opts->n_slots; i++) {
        disk_fill(data, 4096, i);
        assert_int_equal(disk_write(disk, i, i + 100, data, 4096), 0);
    }
    kvbm_disk_close(disk);
    free(data);
}

static const char *file_of(uint32_t volume, const char *kind)
{
    static char path[1200];

    snprintf(path, sizeof(path), "%s/kvbm-cache.%s", disk_dirs[volume], kind);
    return path;
}

static void test_another_model(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(2, 20), other;

    (void)state;
    fill_disk(&opts);
    assert_int_equal(n_records(&opts), 20);
    other = opts;
    other.fingerprint = "model2";
    assert_int_equal(n_records(&other), 0);
    fill_disk(&other);
    assert_int_equal(n_records(&opts), 20); /* each has its own */
    assert_int_equal(n_records(&other), 20);
    other = opts;
    other.slot_bytes = 4096;
    assert_int_equal(n_records(&other), 0);
    assert_int_equal(n_records(&opts), 20);
    /* The subdirectory stays the other model's, also when the directory becomes free. */
    for (int i = 0; i < 2; i++) {
        assert_int_equal(unlink(file_of(i, "index")), 0);
        assert_int_equal(unlink(file_of(i, "slots")), 0);
    }
    other = opts;
    other.fingerprint = "model2";
    assert_int_equal(n_records(&other), 20);
    assert_int_equal(n_records(&opts), 0);
}

struct opener {
    const struct kvbm_disk_opts *opts;
    int rc;
    struct kvbm_disk *disk;
};

static void *open_another(void *arg)
{
    struct opener *o = arg;

    o->rc = kvbm_disk_open(o->opts, &o->disk);
    return NULL;
}

/* Two models start at once: the first has its new files, and writes whose they are after a while.
 * The second waits for that, and gets its subdirectory. */
static void test_another_starts(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 20), other = disk_opts(1, 20);
    struct opener o = {.opts = &opts};
    const char *there = disk_dirs[1];
    uint8_t header[4096];
    char path[300];
    pthread_t thread;
    int fd;

    (void)state;
    other.directories = &there; /* the first's header is made here */
    other.fingerprint = "model2";
    kvbm_disk_close(disk_open(&other));
    fd = open(file_of(1, "index"), O_RDONLY | O_CLOEXEC);
    assert_int_equal(read(fd, header, sizeof(header)), sizeof(header));
    close(fd);
    fd = open(file_of(0, "index"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_int_equal(flock(fd, LOCK_EX), 0);
    assert_int_equal(pthread_create(&thread, NULL, open_another, &o), 0);
    usleep(1300000); /* more than the time for which a lock is tried */
    assert_int_equal(write(fd, header, sizeof(header)), sizeof(header));
    pthread_join(thread, NULL);
    assert_int_equal(o.rc, 0);
    kvbm_disk_close(o.disk);
    snprintf(path, sizeof(path), "%s/kvbm-cache.slots", disk_dirs[0]);
    assert_int_equal(access(path, F_OK), -1);
    close(fd);
    assert_int_equal(n_records(&opts), 0); /* in the subdirectory, again */
    assert_int_equal(access(path, F_OK), -1);
}

/* ---- damage ---- */

static void flip(const char *path, off_t at)
{
    int fd = open(path, O_RDWR | O_CLOEXEC);
    uint8_t byte;

    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, at), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, at), 1);
    close(fd);
}

/* Reads all: returns how many came back; none is wrong. */
static uint32_t n_good(const struct kvbm_disk_opts *opts)
{
    struct kvbm_disk *disk = disk_open(opts);
    uint8_t *data = disk_pages(8192), *expected = disk_pages(8192);
    struct kvbm_disk_stats stats;
    uint32_t good = 0, bad = 0;

    for (uint32_t i = 0; i < opts->n_slots; i++) {
        int rc = disk_read(disk, i, i + 100, data, 4096);

        assert_true(rc == 0 || rc == -ENOENT || rc == -EBADMSG);
        disk_fill(expected, 4096, i);
        if (rc == 0)
            assert_memory_equal(data, expected, 4096);
        good += rc == 0;
        bad += rc == -EBADMSG;
        if (rc < 0) { /* can be used again */
            assert_int_equal(disk_write(disk, i, 5000, expected, 4096), 0);
            assert_int_equal(disk_read(disk, i, 5000, data, 4096), 0);
            assert_memory_equal(data, expected, 4096);
        }
    }
    kvbm_disk_get_stats(disk, &stats);
    assert_int_equal(stats.bad, bad);
    kvbm_disk_close(disk);
    free(data);
    free(expected);
    return good;
}

static void test_damage(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 20);

    (void)state;
    fill_disk(&opts);
    flip(file_of(0, "slots"), 4096 + 3 * 8192 + 1234); /* a block */
    assert_int_equal(n_good(&opts), 19);
    fill_disk(&opts);
    for (int at = 0; at < 64; at++) /* every byte of a record */
        flip(file_of(0, "index"), 4096 + 64 * (at % 20) + at);
    assert_int_equal(n_good(&opts), 0);
    fill_disk(&opts);
    flip(file_of(0, "index"), 100); /* a header: all of it goes */
    assert_int_equal(n_good(&opts), 0);
    fill_disk(&opts);
    flip(file_of(0, "slots"), 70);
    assert_int_equal(n_good(&opts), 0);
}

static void test_truncated(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 20);

    (void)state;
    fill_disk(&opts);
    assert_int_equal(truncate(file_of(0, "index"), 4096 + 64 * 7 + 30), 0);
    assert_int_equal(n_good(&opts), 7);
    fill_disk(&opts);
    assert_int_equal(truncate(file_of(0, "slots"), 4096 + 8192 * 5 + 100), 0);
    assert_int_equal(n_good(&opts), 5);
    fill_disk(&opts);
    assert_int_equal(truncate(file_of(0, "slots"), 100), 0);
    assert_int_equal(n_good(&opts), 0);
    fill_disk(&opts);
    assert_int_equal(truncate(file_of(0, "index"), 0), 0);
    assert_int_equal(n_good(&opts), 0);
}

/* While it is open: what was there is bad, the device isn't, and the slots are used again. */
static void test_truncated_while_open(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 20);
    struct kvbm_disk_stats stats;
    struct kvbm_disk *disk;
    uint8_t *data = disk_pages(opts.slot_bytes);

    (void)state;
    fill_disk(&opts);
    disk = disk_open(&opts);
    assert_int_equal(truncate(file_of(0, "slots"), 4096), 0);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(disk_read(disk, i, i + 100, data, 4096), -EBADMSG);
    kvbm_disk_get_stats(disk, &stats);
    assert_int_equal(stats.volumes_down, 0);
    assert_int_equal(stats.bad, 20);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(disk_write(disk, i, i + 200, data, 4096), 0);
    for (uint32_t i = 0; i < 20; i++)
        assert_int_equal(disk_read(disk, i, i + 200, data, 4096), 0);
    kvbm_disk_close(disk);
    free(data);
}

static void test_removed(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(2, 20);

    (void)state;
    fill_disk(&opts);
    assert_int_equal(unlink(file_of(1, "index")), 0);
    assert_int_equal(n_good(&opts), 10); /* the other volume */
    fill_disk(&opts);
    assert_int_equal(unlink(file_of(0, "slots")), 0);
    assert_int_equal(n_good(&opts), 10);
    fill_disk(&opts);
    assert_int_equal(unlink(file_of(0, "slots")), 0);
    assert_int_equal(unlink(file_of(0, "index")), 0);
    assert_int_equal(n_good(&opts), 10);
}

/* A record that was moved, or kept from files before, isn't one. */
static void test_records_out_of_place(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 20);
    uint8_t record[64];
    int fd;

    (void)state;
    fill_disk(&opts);
    fd = open(file_of(0, "index"), O_RDWR | O_CLOEXEC);
    assert_int_equal(pread(fd, record, 64, 4096 + 64 * 3), 64);
    assert_int_equal(pwrite(fd, record, 64, 4096 + 64 * 4), 64);
    close(fd);
    assert_int_equal(n_good(&opts), 19);
    assert_int_equal(truncate(file_of(0, "index"), 0), 0); /* the volume is made anew */
    assert_int_equal(n_records(&opts), 0);
    fd = open(file_of(0, "index"), O_RDWR | O_CLOEXEC);
    assert_int_equal(pwrite(fd, record, 64, 4096 + 64 * 3), 64);
    close(fd);
    assert_int_equal(n_records(&opts), 0);
}

/* ---- cancel, deadlines, closing ---- */

static void test_cancel_and_deadlines(void **state)
{
    enum { N = 2000 };
    struct kvbm_disk_opts opts = disk_opts(1, N);
    static struct kvbm_disk_io ios[N];
    static uint64_t keys[N];
    uint8_t *data = disk_pages(8192);
    sem_t sem;
    struct kvbm_disk_batch batch = {
        .write = true, .ios = ios, .n = N, .done = disk_done, .arg = &sem};

    (void)state;
    opts.io_depth = 1;
    sem_init(&sem, 0, 0);
    for (int round = 0, tries = 0; round < 2; tries++) {
        struct kvbm_disk *disk;
        uint32_t n_left_out = 0;
        char fingerprint[16];

        snprintf(fingerprint, sizeof(fingerprint), "%d", tries);
        opts.fingerprint = fingerprint;
        disk = disk_open(&opts);
        for (uint32_t i = 0; i < N; i++) {
            keys[i] = i;
            ios[i] = (struct kvbm_disk_io){
                .slot = i, .group = 1, .key = &keys[i], .data = data, .len = 8192, .status = 1};
        }
        batch.deadline_ns = round ? kv_now_ns() + 5 * KV_NS_PER_MS : 0;
        assert_int_equal(kvbm_disk_submit(disk, &batch), 0);
        if (!round) {
            usleep(2000);
            kvbm_disk_cancel(disk, &batch);
        }
        disk_await(&sem);
        for (uint32_t i = 0; i < N; i++) {
            assert_true(ios[i].status == 0 || ios[i].status == (round ? -ETIMEDOUT : -ECANCELED));
            n_left_out += ios[i].status != 0;
            if (i % 16 == 0)
                assert_int_equal(disk_read(disk, i, i, data, 8192), ios[i].status ? -ENOENT : 0);
        }
        round += n_left_out > 0; /* else this thread was stopped until all were written */
        assert_true(tries < 20);
        kvbm_disk_close(disk);
    }
    sem_destroy(&sem);
    free(data);
}

/* Closing waits for what runs, and -EAGAIN is told when too much does. */
enum { QUEUED = 60 };

struct queued {
    struct kvbm_disk *disk;
    struct kvbm_disk_batch first, batches[4];
    struct kvbm_disk_io ios[4][QUEUED];
    _Atomic int ended, order[4];
    sem_t sem;
};

static void queued_done(struct kvbm_disk_batch *batch)
{
    struct queued *q = batch->arg;

    q->order[batch - q->batches] = ++q->ended;
    sem_post(&q->sem);
}

/* In the store's thread, which begins none of them before all are there. */
static void queue_all(struct kvbm_disk_batch *batch)
{
    struct queued *q = batch->arg;

    for (int i = 0; i < 4; i++) {
        if (kvbm_disk_submit(q->disk, &q->batches[i]) < 0)
            abort();
    }
    sem_post(&q->sem);
}

static void test_priorities(void **state)
{
    static const int32_t priorities[] = {0, 4, -1, 4};
    static const int order[] = {3, 1, 4, 2};
    struct kvbm_disk_opts opts = disk_opts(1, 4);
    struct queued *q = calloc(1, sizeof(*q));
    uint8_t *data = disk_pages(5ul * 8192);
    uint64_t key = 1;
    (void)state;

    opts.io_depth = 1;
    q->disk = disk_open(&opts);
    sem_init(&q->sem, 0, 0);
    assert_int_equal(disk_write(q->disk, 0, key, data, 8192), 0);
    for (int i = 0; i < 4; i++) {
        for (int k = 0; k < QUEUED; k++)
            q->ios[i][k] = (struct kvbm_disk_io){
                .slot = 0, .group = 1, .key = &key, .data = data + 8192 * i, .len = 8192};
        q->batches[i] = (struct kvbm_disk_batch){.flow = KVBM_ONBOARD,
                                                 .priority = priorities[i],
                                                 .ios = q->ios[i],
                                                 .n = QUEUED,
                                                 .done = queued_done,
                                                 .arg = q};
    }
    q->first = (struct kvbm_disk_batch){
        .flow = KVBM_ONBOARD,
        .ios =
            &(struct kvbm_disk_io){
                .slot = 0, .group = 1, .key = &key, .data = data + 4ul * 8192, .len = 8192},
        .n = 1,
        .done = queue_all,
        .arg = q};
    assert_int_equal(kvbm_disk_submit(q->disk, &q->first), 0);
    for (int i = 0; i < 5; i++)
        disk_await(&q->sem);
    for (int i = 0; i < 4; i++) {
        assert_int_equal(q->order[i], order[i]);
        for (int k = 0; k < QUEUED; k++)
            assert_int_equal(q->ios[i][k].status, 0);
    }
    kvbm_disk_close(q->disk);
    sem_destroy(&q->sem);
    free(data);
    free(q);
}

static void test_full_queue_and_close(void **state)
{
    enum { N = 40000 };
    struct kvbm_disk_opts opts = disk_opts(1, N);
    struct kvbm_disk_io *ios = calloc(2UL * N, sizeof(*ios));
    uint8_t *data = disk_pages(4096);
    uint64_t key = 1;
    sem_t sem;
    struct kvbm_disk_batch batches[2];
    struct kvbm_disk *disk;

    (void)state;
    opts.slot_bytes = 4096;
    opts.volatile_ = true;
    disk = disk_open(&opts);
    sem_init(&sem, 0, 0);
    for (uint32_t i = 0; i < 2 * N; i++)
        ios[i] = (struct kvbm_disk_io){.slot = i % N, .key = &key, .data = data, .len = 4096};
    for (int i = 0; i < 2; i++)
        batches[i] = (struct kvbm_disk_batch){
            .write = true, .ios = ios + (size_t)i * N, .n = N, .done = disk_done, .arg = &sem};
    assert_int_equal(kvbm_disk_submit(disk, &batches[0]), 0);
    assert_int_equal(kvbm_disk_submit(disk, &batches[1]), -EAGAIN);
    usleep(1000);
    kvbm_disk_cancel(disk, &batches[0]);
    kvbm_disk_close(disk);
    assert_int_equal(sem_trywait(&sem), 0);
    assert_int_equal(sem_trywait(&sem), -1);
    for (uint32_t i = 0; i < N; i++)
        assert_true(ios[i].status == 0 || ios[i].status == -ECANCELED);
    sem_destroy(&sem);
    free(ios);
    free(data);
}

/* ---- group commit ---- */

static void test_barriers_are_shared(void **state)
{
    enum { N = 64 };
    struct kvbm_disk_opts opts = disk_opts(1, N);
    struct kvbm_disk *disk;
    struct kvbm_disk_io ios[N];
    uint64_t keys[N];
    uint8_t *data = disk_pages(8192);
    struct kvbm_disk_batch batches[N];
    struct kvbm_disk_stats stats;
    uint64_t n_barriers, until_ns = kv_now_ns() + 60 * KV_NS_PER_S;
    sem_t sem;

    (void)state;
    opts.io_depth = 64;
    disk = disk_open(&opts);
    for (uint32_t i = 0; i < N; i++) {
        keys[i] = i;
        ios[i] = (struct kvbm_disk_io){.slot = i, .key = &keys[i], .data = data, .len = 8192};
    }
    disk_run(disk, true, ios, N); /* one batch: one commit */
    kvbm_disk_get_stats(disk, &stats);
    assert_int_equal(stats.writes, N);
    assert_in_range(stats.barriers, 2, 4);
    sem_init(&sem, 0, 0);
    do { /* as often as it takes: this thread may lose its core between two batches */
        uint64_t before = stats.barriers;

        for (uint32_t i = 0; i < N; i++) { /* one each, at the same time */
            batches[i] = (struct kvbm_disk_batch){
                .write = true, .ios = &ios[i], .n = 1, .done = disk_done, .arg = &sem};
            assert_int_equal(kvbm_disk_submit(disk, &batches[i]), 0);
        }
        for (uint32_t i = 0; i < N; i++)
            disk_await(&sem);
        kvbm_disk_get_stats(disk, &stats);
        n_barriers = stats.barriers - before;
        assert_true(n_barriers >= 2);
        assert_true(kv_now_ns() < until_ns);
    } while (n_barriers > N); /* alone each batch takes two */
    kvbm_disk_close(disk);
    sem_destroy(&sem);
    free(data);
}

/* ---- many threads ---- */

struct worker {
    struct kvbm_disk *disk;
    uint32_t first;
    uint64_t random;
    unsigned wrong;
};

static void *hammer(void *arg)
{
    struct worker *w = arg;
    uint8_t *data = disk_pages(8192), *expected = disk_pages(8192);
    uint64_t keys[16] = {0};

    for (size_t i = unit_rounds(60); i > 0; i--) {
        uint32_t at = (uint32_t)unit_below(&w->random, 16), slot = w->first + at;

        if (keys[at] && unit_below(&w->random, 2)) {
            disk_fill(expected, 8192, keys[at]);
            w->wrong += disk_read(w->disk, slot, keys[at], data, 8192) != 0 ||
                        memcmp(data, expected, 8192) != 0;
            continue;
        }
        keys[at] = unit_random(&w->random) | 1;
        disk_fill(data, 8192, keys[at]);
        w->wrong += disk_write(w->disk, slot, keys[at], data, 8192) != 0;
        if (unit_below(&w->random, 8) == 0) {
            w->wrong += kvbm_disk_forget(w->disk, &slot, NULL, 1) != 0;
            keys[at] = 0;
        }
    }
    free(data);
    free(expected);
    return NULL;
}

static void test_many_threads(void **state)
{
    enum { N = 6 };
    struct kvbm_disk_opts opts = disk_opts(2, N * 16);
    struct kvbm_disk *disk = disk_open(&opts);
    struct worker workers[N];
    pthread_t threads[N];
    uint64_t seed = unit_seed();

    (void)state;
    for (uint32_t i = 0; i < N; i++) {
        workers[i] = (struct worker){.disk = disk, .first = i * 16, .random = seed + 2 * i};
        assert_int_equal(pthread_create(&threads[i], NULL, hammer, &workers[i]), 0);
    }
    for (uint32_t i = 0; i < N; i++) {
        pthread_join(threads[i], NULL);
        assert_int_equal(workers[i].wrong, 0);
    }
    kvbm_disk_close(disk);
}

/* ---- fork ---- */

static void test_fork(void **state)
{
    struct kvbm_disk_opts opts = disk_opts(1, 4);
    struct kvbm_disk *disk = disk_open(&opts);
    char data[10] = "abcdefghi";
    struct kvbm_disk_io io = {.key = "12345678", .data = data, .len = 10};
    struct kvbm_disk_batch batch = {.ios = &io, .n = 1, .done = disk_done};
    int status;
    pid_t pid = fork();

    (void)state;
    if (pid == 0) {
        bool good = kvbm_disk_submit(disk, &batch) == -ESHUTDOWN &&
                    kvbm_disk_forget(disk, (uint32_t[]){1}, NULL, 1) == -ESHUTDOWN;

        kvbm_disk_close(disk);
        _exit(!good);
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
    assert_int_equal(disk_write(disk, 0, 1, data, 10), 0);
    kvbm_disk_close(disk);
}

#define TEST(name) cmocka_unit_test_setup_teardown(name, disk_setup, disk_teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_model),
        TEST(test_model_volumes),
        TEST(test_model_volatile),
        TEST(test_model_files),
        TEST(test_model_files_volatile),
        TEST(test_refuses_nonsense),
        TEST(test_locked),
        TEST(test_no_room),
        TEST(test_another_model),
        TEST(test_another_starts),
        TEST(test_damage),
        TEST(test_truncated),
        TEST(test_truncated_while_open),
        TEST(test_removed),
        TEST(test_records_out_of_place),
        TEST(test_cancel_and_deadlines),
        TEST(test_priorities),
        TEST(test_full_queue_and_close),
        TEST(test_barriers_are_shared),
        TEST(test_many_threads),
        TEST(test_fork),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
