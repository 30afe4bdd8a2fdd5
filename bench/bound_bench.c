// SPDX-License-Identifier: Apache-2.0
/*
 * Bounds of any store in files: what the kernel and the device give to threads that only copy, with
 * and without our checksum of each piece.
 *
 *     bound_bench FOLDER [threads]
 *
 * Through the page cache: 64 files of 4 MiB, written new, read for the first time, written over, and
 * read again, in the pieces in which the store sums; new ones also by one write each. With O_DIRECT:
 * one file of 256 MiB in pieces of 2 MiB. The yardstick is a copy in memory by the same threads.
 * Medians of nine rounds, by the clock; which of the new files are first goes round.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/xxh.h"
#include "base/hash/hash.h"
#include "base/thread/thread.h"
#include "support.h"

enum { FILES = 64, ROUNDS = 9, THREADS_MAX = 64 };
#define FILE_BYTES (UINT64_C(4) << 20)
#define ALL_BYTES (FILES * FILE_BYTES)
#define DIRECT_PIECE (UINT64_C(2) << 20)

enum how { COPY, WRITE, READ };

/* One measurement: the threads take unit after unit. */
struct work {
    enum how how;
    bool sum;    /* compute our checksum of each piece, right behind its copy */
    int dir, fd; /* fd: of the file of all bytes; -1: each unit is a file in dir */
    uint32_t generation;
    uint64_t unit, piece;
    uint8_t *memory, *other;
    _Atomic uint64_t next;
    _Atomic int error;
};

static void name_of(char ret[32], uint32_t generation, uint64_t file)
{
    snprintf(ret, 32, "%u.%llu", generation, (unsigned long long)file);
}

/* Move the bytes [from, from + unit) of all. Returns 0 or a negative errno. */
static int move_unit(struct work *w, int fd, uint64_t from, uint64_t offset)
{
    XXH3_state_t state;

    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    for (uint64_t done = 0; done < w->unit; done += w->piece) {
        uint8_t *at = w->memory + from + done;
        ssize_t n = (ssize_t)w->piece;

        if (w->how == COPY)
            memcpy(at, w->other + from + done, w->piece);
        else
            n = w->how == WRITE ? pwrite(fd, at, w->piece, (off_t)(offset + done))
                                : pread(fd, at, w->piece, (off_t)(offset + done));
        if (n != (ssize_t)w->piece)
            return n < 0 ? -errno : -EIO;
        if (w->sum)
            kv_hash_update(&state, at, w->piece);
    }
    return 0;
}

static int run_unit(struct work *w, uint64_t unit)
{
    char name[32];
    int fd, rc;

    if (w->fd >= 0 || w->how == COPY)
        return move_unit(w, w->fd, unit * w->unit, unit * w->unit);
    name_of(name, w->generation, unit);
    fd = openat(w->dir, name, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return -errno;
    rc = move_unit(w, fd, unit * w->unit, 0);
    close(fd);
    return rc;
}

static void *run(void *arg)
{
    struct work *w = arg;
    uint64_t unit;

    while ((unit = atomic_fetch_add(&w->next, 1)) < ALL_BYTES / w->unit) {
        int rc = run_unit(w, unit);

        if (rc < 0)
            atomic_store(&w->error, rc);
    }
    return NULL;
}

/* Returns GB/s. */
static double once(struct work *w, unsigned n_threads)
{
    pthread_t threads[THREADS_MAX];
    uint64_t begin = kv_now_ns();

    atomic_store(&w->next, 0);
    for (unsigned i = 0; i < n_threads; i++)
        if (kv_thread_start(&threads[i], "bound", run, w) < 0)
            bench_die("no thread", -EAGAIN);
    for (unsigned i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    if (atomic_load(&w->error) < 0)
        bench_die("can't move bytes", atomic_load(&w->error));
    return (double)ALL_BYTES / (double)(kv_now_ns() - begin);
}

static void drop(const struct work *w)
{
    char name[32];

    for (uint64_t i = 0; i < FILES; i++) {
        name_of(name, w->generation, i);
        unlinkat(w->dir, name, 0);
    }
}

static void say(const char *figure, struct bench_samples *s, unsigned n_threads)
{
    double middle = bench_middle(s);

    bench_line("bound", "'figure':'%s','threads':%u,'gb_s':%.2f,'worst':%.2f,'best':%.2f", figure,
               n_threads, middle, s->of[0], s->of[s->n - 1]);
}

/* Touch memory that the host of a virtual machine may have taken back, or the first files pay. */
static void warm(void)
{
    void *memory = mmap(NULL, 4 * ALL_BYTES, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

    if (memory != MAP_FAILED)
        munmap(memory, 4 * ALL_BYTES);
}

/*
 * Measurements through the page cache. New files come first, and the first two of them are read
 * once: that costs the kernel more than later reads, on tmpfs most of all.
 */
enum { NEW = 3, FIRST = 2 };
static const struct figure {
    const char *name;
    enum how how;
    bool sum, whole; /* whole: each file by one call */
} figures[] = {{"new files", WRITE, false, false},
               {"new files, summed", WRITE, true, false},
               {"new files, one write each", WRITE, false, true},
               {"files that are there", WRITE, false, false},
               {"the same, summed", WRITE, true, false},
               {"read", READ, false, false},
               {"read, summed", READ, true, false},
               {"copy in memory", COPY, false, false}};
static const char *const firsts[FIRST] = {"read for the first time",
                                          "read for the first time, summed"};

static void cached(struct work *w, unsigned n_threads)
{
    struct bench_samples samples[KV_COUNT(figures)] = {0}, first[FIRST] = {0};

    w->unit = FILE_BYTES;
    for (unsigned round = 0; round < ROUNDS; round++) {
        for (unsigned i = 0; i < KV_COUNT(figures); i++) {
            unsigned k = i < NEW ? (i + round) % NEW : i;

            w->how = figures[k].how;
            w->sum = figures[k].sum;
            w->piece = figures[k].whole ? w->unit : kv_hash_piece();
            if (i < NEW) {
                drop(w);
                w->generation++;
                warm();
            }
            bench_sample(&samples[k], once(w, n_threads));
            if (k < FIRST) { /* summed as they were written */
                w->how = READ;
                bench_sample(&first[k], once(w, n_threads));
            }
        }
        drop(w);
    }
    for (size_t i = 0; i < KV_COUNT(figures); i++)
        say(figures[i].name, &samples[i], n_threads);
    for (size_t i = 0; i < FIRST; i++)
        say(firsts[i], &first[i], n_threads);
}

static void direct(struct work *w)
{
    struct bench_samples writes = {0}, again = {0},
                         reads = {0}, *const of[] = {&writes, &again, &reads};
    const unsigned n_threads = 16;

    w->sum = false;
    w->unit = w->piece = DIRECT_PIECE;
    for (int round = 0; round < ROUNDS; round++) {
        w->fd = openat(w->dir, "direct", O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
        if (w->fd < 0) {
            fprintf(stderr, "skipped: this file system refuses O_DIRECT\n");
            return;
        }
        if (posix_fallocate(w->fd, 0, (off_t)ALL_BYTES) != 0)
            bench_die("no room", -ENOSPC);
        for (size_t i = 0; i < KV_COUNT(of); i++) {
            w->how = i < 2 ? WRITE : READ;
            bench_sample(of[i], once(w, n_threads));
        }
        close(w->fd);
        unlinkat(w->dir, "direct", 0);
    }
    w->fd = -1;
    say("O_DIRECT, first write", &writes, n_threads);
    say("O_DIRECT, written over", &again, n_threads);
    say("O_DIRECT, read", &reads, n_threads);
}

static uint8_t *touched(int fill)
{
    uint8_t *memory =
        mmap(NULL, ALL_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    if (memory == MAP_FAILED)
        bench_die("no memory", -errno);
    memset(memory, fill, ALL_BYTES);
    return memory;
}

int main(int argc, char **argv)
{
    struct work w = {.fd = -1};
    char folder[4096];
    unsigned n_threads;

    bench_usage(argc, argv, "[FOLDER [threads]]");
    n_threads = (unsigned)bench_number(argc, argv, 2, 2);
    if (!n_threads || n_threads > THREADS_MAX)
        bench_die("1 to 64 threads", 0);
    w.memory = touched(1);
    w.other = touched(2);
    snprintf(folder, sizeof(folder), "%s/kvasir-bound-XXXXXX", argc > 1 ? argv[1] : "/tmp");
    if (!mkdtemp(folder) || (w.dir = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
        bench_die("no folder", -errno);
    cached(&w, n_threads);
    direct(&w);
    close(w.dir);
    rmdir(folder);
    return 0;
}
