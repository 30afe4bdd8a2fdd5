// SPDX-License-Identifier: Apache-2.0
/* The object tier over a disk that fails to sync and drops the bytes: a put's status is true. */
#include "tier/object_unit.h"

#include <dirent.h>
#include <fcntl.h>

static _Atomic int lose; /* so many more syncs of chunks fail, and their files' bytes are gone */
static _Atomic bool hold, held; /* syncs of chunks wait, and then succeed */

#define REAL(ret, name, params) ((ret(*) params)(uintptr_t)dlsym(RTLD_NEXT, #name))

static bool is_chunk(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= BLOCK;
}

static void drop_bytes(int fd)
{
    static const uint8_t garbage[BLOCK];
    char path[64];
    int again;

    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    again = open(path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(again, garbage, sizeof(garbage), 0), sizeof(garbage));
    close(again);
}

int fsync(int fd)
{
    if (is_chunk(fd)) {
        bool waits = hold;

        held = waits;
        while (hold)
            usleep(1000);
        if (!waits && lose > 0 && atomic_fetch_sub(&lose, 1) > 0) {
            drop_bytes(fd);
            errno = EIO;
            return -1;
        }
    }
    return REAL(int, fsync, (int))(fd);
}

static struct kvbm_object *open_on_files(void)
{
    struct kvbm_object_opts opts = default_opts(shaky_uri);

    snprintf(shaky_uri, sizeof(shaky_uri), "%s?sync=files", folder);
    opts.breaker_failures = 1000;
    opts.timeout_ms = 60000;
    opts.n_threads = 5;
    return open_with(&opts);
}

/* The put after the one that failed stores the block. */
static void test_put_again(void **state)
{
    struct kvbm_object *o = open_on_files();
    (void)state;

    lose = 1;
    expect(o, KVBM_OBJECT_PUT, 0, 1, -EIO);
    expect(o, KVBM_OBJECT_EXISTS, 0, 1, -ENOENT);
    expect(o, KVBM_OBJECT_PUT, 0, 1, 0);
    expect(o, KVBM_OBJECT_GET, 0, 1, 0);
    kvbm_object_close(o);
}

/* One lost block fails the batches that put it, not those to come. */
static void test_others_go_on(void **state)
{
    struct kvbm_object *o = open_on_files();
    (void)state;

    lose = 1;
    expect(o, KVBM_OBJECT_PUT, 0, 4, -EIO);
    expect(o, KVBM_OBJECT_PUT, 10, 4, 0);
    expect(o, KVBM_OBJECT_GET, 10, 4, 0);
    expect(o, KVBM_OBJECT_GET, 0, 4, -ENOENT);
    kvbm_object_close(o);
}

static int n_waiting(void)
{
    char path[200];
    struct dirent *e;
    int n = 0;
    DIR *dir;

    snprintf(path, sizeof(path), "%s/.kvasir/tmp", folder);
    dir = opendir(path);
    assert_non_null(dir);
    while ((e = readdir(dir))) {
        struct stat st;

        n += fstatat(dirfd(dir), e->d_name, &st, 0) == 0 && st.st_size >= BLOCK;
    }
    closedir(dir);
    return n;
}

/* Batches whose shared publication loses their blocks: none is told that its block is stored. */
static void test_shared_loss(void **state)
{
    struct kvbm_object *o = open_on_files();
    struct job *first, *jobs[3];
    int failed = 0;
    (void)state;

    held = false;
    hold = true;
    first = submit(o, KVBM_OBJECT_PUT, 100, 1, 0);
    wait_until(held);
    for (uint64_t i = 0; i < 3; i++)
        jobs[i] = submit(o, KVBM_OBJECT_PUT, i, 1, 0);
    wait_until(n_waiting() == 4);
    usleep(20000); /* until they wait for their turn */
    lose = 3;
    hold = false;
    ends(first, 0);
    for (uint64_t i = 0; i < 3; i++) {
        int told;

        job_wait(jobs[i]);
        told = jobs[i]->ios[0].status;
        failed += told < 0;
        job_free(jobs[i]);
        expect(o, KVBM_OBJECT_GET, i, 1, told == 0 ? 0 : -ENOENT);
    }
    assert_true(failed > 0);
    for (uint64_t i = 0; i < 3; i++)
        expect(o, KVBM_OBJECT_PUT, i, 1, 0);
    for (uint64_t i = 0; i < 3; i++)
        expect(o, KVBM_OBJECT_GET, i, 1, 0);
    kvbm_object_close(o);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(test_put_again, fresh_folder),
        cmocka_unit_test_setup(test_others_go_on, fresh_folder),
        cmocka_unit_test_setup(test_shared_loss, fresh_folder),
    };

    return cmocka_run_group_tests(tests, NULL, remove_folder);
}
