// SPDX-License-Identifier: Apache-2.0
/**
 * One barrier for all files of a publication: one fsync each, from a few threads so that a journal
 * can put them into one commit; or one syncfs. syncfs is cheaper for many files but also waits for
 * the dirty data of other programs. So "auto" uses it only while there is little of that.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/thread/thread.h"
#include "store/file/file_impl.h"

enum {
    THREADS = 8,
    FEW = 16,                  /* up to this many files fsync is as quick */
    OTHERS = 256 * 1024 * 1024 /* dirty bytes of other programs that we accept to wait for */
};

struct job {
    kv_store_v1 *h;
    const int *fds;
    const uint64_t *tmps;
    size_t n;
    _Atomic size_t next;
    _Atomic int error;
};

static int sync_one(kv_store_v1 *h, int fd, uint64_t tmp)
{
    char name[KVS_FILE_TMP];
    int own = -1, rc;

    if (fd < 0) {
        kvs_file_tmp_name(h, name, tmp);
        fd = own = openat(h->tmp, name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK);
        if (fd < 0) /* a publication that failed later has moved the file into place */
            return errno == ENOENT ? 0 : -errno;
    }
    do
        rc = fsync(fd) < 0 ? -errno : 0;
    while (rc == -EINTR);
    if (own >= 0)
        close(own);
    return rc;
}

static void *run(void *arg)
{
    struct job *job = arg;
    size_t i;

    while ((i = atomic_fetch_add(&job->next, 1)) < job->n) {
        int rc = sync_one(job->h, job->fds[i], job->tmps[i]), none = 0;

        if (rc < 0)
            atomic_compare_exchange_strong(&job->error, &none, rc);
    }
    return NULL;
}

static int sync_files(kv_store_v1 *h, const int *fds, const uint64_t *tmps, size_t n)
{
    struct job job = {.h = h, .fds = fds, .tmps = tmps, .n = n};
    pthread_t threads[THREADS];
    size_t n_threads = 0, want = n > 2 ? KV_MIN(n, (size_t)THREADS) - 1 : 0;

    while (n_threads < want && kv_thread_start(&threads[n_threads], "kvs-sync", run, &job) == 0)
        n_threads++;
    run(&job);
    for (size_t i = 0; i < n_threads; i++)
        pthread_join(threads[i], NULL);
    return atomic_load(&job.error);
}

static uint64_t kib_of(const char *line, const char *field)
{
    size_t len = strlen(field);

    return strncmp(line, field, len) == 0 ? strtoull(line + len, NULL, 10) : 0;
}

/* Number of bytes that the whole machine has not yet written. */
static uint64_t dirty_bytes(void)
{
    FILE *file = fopen("/proc/meminfo", "re");
    uint64_t total = 0;
    char line[128];

    if (!file)
        return UINT64_MAX;
    while (fgets(line, sizeof(line), file))
        total += (kib_of(line, "Dirty:") + kib_of(line, "Writeback:")) * 1024;
    fclose(file);
    return total;
}

static bool whole_fs(kv_store_v1 *h, size_t n, uint64_t bytes)
{
    if (h->opts.sync == KVS_FILE_SYNC_FILES || !h->syncfs_tells)
        return false;
    if (h->opts.sync == KVS_FILE_SYNC_FS)
        return true;
    return n > FEW && dirty_bytes() <= bytes + OTHERS;
}

int kvs_file_barrier(kv_store_v1 *h, const int *fds, const uint64_t *tmps, size_t n, uint64_t bytes,
                     bool *ret_whole)
{
    *ret_whole = false;
    if (n == 0)
        return 0;
    *ret_whole = whole_fs(h, n, bytes);
    if (!*ret_whole)
        return sync_files(h, fds, tmps, n);
    return syncfs(h->root) < 0 ? -errno : 0;
}
