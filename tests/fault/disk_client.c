// SPDX-License-Identifier: Apache-2.0
/*
 * Client of the fault tests of the disk tier, which kill it, starve it and cut its power.
 *
 *   disk_client write DIR[,DIR...] SLOTS VERSION ROUNDS THREADS
 *       Each thread writes batches to slots of its own, ROUNDS of them (0: until it is killed).
 *       Lines: "BEGIN slot version" before the store hears of it, "ACK slot version", "ERR slot
 *       version errno", "OPEN"
 *   disk_client resize DIR[,DIR...] SLOTS VERSION ROUNDS THREADS
 *       Open, write ROUNDS and close, again and again, with SLOTS or fewer each time: the files grow and
 *       shrink. "BEGIN slot 0" before an open that drops the slot
 *   disk_client check DIR[,DIR...] SLOTS STATE [damaged]
 *       STATE: lines of all writers. Each slot whose last line is an ACK must be there (not when
 *       damaged); what is there, listed or read, must be right and of a version that was begun. "OK
 *       ..." or "FAILED ..."
 *
 * KVD_IO: threads, uring. KVD_BUFFERED, KVD_VOLATILE: set. Exit: 0, 1 a check failed, 2 usage, 3
 * not opened.
 */
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/error.h"
#include "say.h"
#include "tier/disk/disk.h"

enum { BYTES = 20000, BATCH = 6, MAX_SLOTS = 4096, MAX_THREADS = 16 };

static struct kvbm_disk *disk;
static uint32_t n_slots, n_threads;
static long n_rounds;
static _Atomic uint64_t next_version;

static uint64_t key_of(uint32_t slot, uint64_t version)
{
    return version << 16 | slot;
}

static uint64_t len_of(uint64_t key)
{
    return key * UINT64_C(0x9e3779b97f4a7c15) >> 32 & 1 ? 16384 : 1 + key * 7919 % BYTES;
}

static void fill(uint8_t *data, uint64_t key)
{
    uint64_t x = key;

    for (uint64_t i = 0; i < len_of(key); i++) {
        x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        data[i] = (uint8_t)(x >> 56);
    }
}

static int open_disk(const char *list, uint32_t slots)
{
    const char *directories[KVBM_MAX_VOLUMES], *io = getenv("KVD_IO"), *files = getenv("KVD_FILES");
    struct kvbm_disk_opts opts = {.size = sizeof(opts),
                                  .directories = directories,
                                  .name = "fault",
                                  .fingerprint = "fault",
                                  .key_len = 8,
                                  .slot_bytes = BYTES,
                                  .buffered = getenv("KVD_BUFFERED") != NULL,
                                  .n_files = (uint32_t)atoi(files ? files : "1"),
                                  .volatile_ = getenv("KVD_VOLATILE") != NULL};
    char copy[4096], *save = NULL;

    snprintf(copy, sizeof(copy), "%s", list);
    if (io)
        opts.io = strcmp(io, "threads") == 0 ? KVBM_IO_THREADS : KVBM_IO_URING;
    for (char *at = strtok_r(copy, ",", &save); at && opts.n_directories < KVBM_MAX_VOLUMES;
         at = strtok_r(NULL, ",", &save))
        directories[opts.n_directories++] = at;
    n_slots = opts.n_slots = slots;
    if (n_slots > MAX_SLOTS)
        return -EINVAL;
    return kvbm_disk_open(&opts, &disk);
}

static void done(struct kvbm_disk_batch *batch)
{
    sem_post(batch->arg);
}

static void run(bool writing, struct kvbm_disk_io *ios, uint32_t n)
{
    sem_t sem;
    struct kvbm_disk_batch batch = {
        .write = writing, .ios = ios, .n = n, .done = done, .arg = &sem};

    sem_init(&sem, 0, 0);
    if (kvbm_disk_submit(disk, &batch) < 0)
        exit(2);
    while (sem_wait(&sem) < 0)
        ;
    sem_destroy(&sem);
}

/* ---- write ---- */

static void *writer(void *arg)
{
    uint32_t number = (uint32_t)(uintptr_t)arg;
    uint64_t random = next_version * 977 + number * 131 + 1;
    uint8_t *memory = NULL;

    if (posix_memalign((void **)&memory, 4096, BATCH * 32768L) != 0)
        exit(2);
    for (long round = 0; !n_rounds || round < n_rounds; round++) {
        struct kvbm_disk_io ios[BATCH];
        uint64_t keys[BATCH];
        char text[BATCH * 64];
        int len = 0;
        uint32_t own = (n_slots - number + n_threads - 1) / n_threads,
                 n = KV_MIN((uint32_t)BATCH, own);

        random = random * UINT64_C(6364136223846793005) + 1442695040888963407;
        for (uint32_t i = 0; i < n; i++) {
            uint32_t slot = (uint32_t)((random >> 33) + i) % own * n_threads + number;
            uint64_t version = next_version++;

            keys[i] = key_of(slot, version);
            fill(memory + i * 32768L, keys[i]);
            ios[i] = (struct kvbm_disk_io){.slot = slot,
                                           .position = slot,
                                           .key = &keys[i],
                                           .data = memory + i * 32768L,
                                           .len = len_of(keys[i])};
            len += snprintf(text + len, sizeof(text) - (size_t)len, "BEGIN %u %llu\n", slot,
                            (unsigned long long)version);
        }
        say(text, (size_t)len);
        run(true, ios, n);
        len = 0;
        for (uint32_t i = 0; i < n; i++) {
            unsigned long long version = keys[i] >> 16;

            if (ios[i].status == 0)
                len += snprintf(text + len, sizeof(text) - (size_t)len, "ACK %u %llu\n",
                                ios[i].slot, version);
            else
                len += snprintf(text + len, sizeof(text) - (size_t)len, "ERR %u %llu %d\n",
                                ios[i].slot, version, -ios[i].status);
        }
        say(text, (size_t)len);
    }
    free(memory);
    return NULL;
}

static int run_writers(void)
{
    pthread_t threads[MAX_THREADS];

    for (uint32_t i = 0; i < n_threads; i++)
        if (pthread_create(&threads[i], NULL, writer, (void *)(uintptr_t)i) != 0)
            return 2;
    for (uint32_t i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    return 0;
}

static int write_all(char **argv)
{
    next_version = strtoull(argv[4], NULL, 10);
    n_rounds = atol(argv[5]);
    n_threads = (uint32_t)atol(argv[6]);
    if (!n_threads || n_threads > MAX_THREADS || n_threads > n_slots)
        return 2;
    say("OPEN\n", 5);
    return run_writers();
}

/* Readers of the lines no longer expect these slots: the next open may cut them off. */
static void say_dropped(uint32_t from, uint32_t to)
{
    char line[64];

    for (uint32_t slot = from; slot < to; slot++)
        say(line, (size_t)snprintf(line, sizeof(line), "BEGIN %u 0\n", slot));
}

static int resize_all(char **argv)
{
    static const uint32_t percents[] = {100, 50, 80, 20, 60};
    uint32_t most = n_slots;
    int rc = write_all(argv);

    for (unsigned i = 1; rc == 0; i++) {
        uint32_t slots = most * percents[i % KV_COUNT(percents)] / 100;

        kvbm_disk_close(disk);
        disk = NULL;
        say_dropped(slots, most);
        rc = open_disk(argv[2], slots) < 0 ? 3 : run_writers();
    }
    return rc;
}

/* ---- check ---- */

static struct {
    uint64_t acked, greatest; /* the last line's version when it was an ACK; of all begun */
} slots[MAX_SLOTS];
static unsigned failures, listed;

static void fail(const char *what, uint32_t slot, uint64_t version)
{
    printf("BAD %s: slot %u version %llu (acknowledged %llu)\n", what, slot,
           (unsigned long long)version, (unsigned long long)slots[slot].acked);
    failures++;
}

static int read_state(const char *path)
{
    FILE *file = fopen(path, "r");
    char line[200], word[16];
    unsigned slot;
    unsigned long long version;

    if (!file)
        return -errno;
    while (fgets(line, sizeof(line), file)) {
        if (!strchr(line, '\n') || sscanf(line, "%15s %u %llu", word, &slot, &version) != 3 ||
            slot >= MAX_SLOTS)
            continue; /* cut by a kill */
        slots[slot].acked = strcmp(word, "ACK") == 0 ? version : 0;
        slots[slot].greatest = KV_MAX(slots[slot].greatest, version);
    }
    fclose(file);
    return 0;
}

/* Returns what the store says; wrong bytes are a failure. */
static int read_slot(uint32_t slot, uint64_t version)
{
    static uint8_t expected[BYTES + 1], got[BYTES + 1];
    uint64_t key = key_of(slot, version);
    struct kvbm_disk_io io = {.slot = slot, .key = &key, .data = got, .len = len_of(key)};

    memset(got, 0xa5, sizeof(got));
    run(false, &io, 1);
    fill(expected, key);
    if (io.status == 0 && memcmp(got, expected, io.len) != 0)
        fail("wrong bytes", slot, version);
    return io.status;
}

static int check_record(void *arg, const struct kvbm_disk_record *record)
{
    const bool *damaged = arg;
    uint64_t key, version;
    int rc;

    memcpy(&key, record->key, sizeof(key));
    version = key >> 16;
    listed++;
    if ((key & 0xffff) != record->slot || version > slots[record->slot].greatest ||
        record->position != record->slot || record->len != len_of(key))
        fail("a record that nobody wrote", record->slot, version);
    rc = read_slot(record->slot, version);
    if (rc < 0 && !*damaged && slots[record->slot].acked)
        fail("listed, acknowledged and not read", record->slot, version);
    return 0;
}

static int check_all(char **argv, bool damaged)
{
    unsigned acked = 0, found = 0;

    if (read_state(argv[4]) < 0)
        return 2;
    if (kvbm_disk_each(disk, check_record, &damaged) < 0)
        failures++;
    for (uint32_t slot = 0; slot < n_slots; slot++) {
        if (!slots[slot].acked)
            continue;
        acked++;
        if (read_slot(slot, slots[slot].acked) == 0)
            found++;
        else if (!damaged)
            fail("lost", slot, slots[slot].acked);
    }
    printf("%s acknowledged=%u found=%u listed=%u\n", failures ? "FAILED" : "OK", acked, found,
           listed);
    return failures > 0;
}

int main(int argc, char **argv)
{
    int rc = argc < 5 ? -EINVAL : open_disk(argv[2], (uint32_t)atol(argv[3]));

    if (rc < 0) {
        printf("FAILED open: %s\n", strerror(-rc));
        return 3;
    }
    if (strcmp(argv[1], "write") == 0 && argc == 7)
        rc = write_all(argv);
    else if (strcmp(argv[1], "resize") == 0 && argc == 7)
        rc = resize_all(argv);
    else if (strcmp(argv[1], "check") == 0)
        rc = check_all(argv, argc > 5 && strcmp(argv[5], "damaged") == 0);
    else
        rc = 2;
    if (disk)
        kvbm_disk_close(disk);
    return rc;
}
