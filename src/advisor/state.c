// SPDX-License-Identifier: Apache-2.0
#include "advisor/state.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "advisor/index/policy.h"
#include "base/core/clock.h"
#include "base/core/le.h"
#include "base/core/xxh.h"
#include "base/file/sync_dir.h"
#include "base/file/write_all.h"

static const char magic[8] = "KVADVIS\n";
enum { VERSION = 1, POLICY = 16, AT_POLICY = 32, AT_MEMBERS = 48 };

/* -- writing ----------------------------------------------------------------------------------- */

/** Bytes on their way to a file, without a lock or malloc. */
struct sink {
    int fd, error;
    size_t len;
    XXH3_state_t sum;
    uint8_t bytes[65536];
};

static void flush(struct sink *sink)
{
    if (!sink->error)
        sink->error = kv_write_all(sink->fd, sink->bytes, sink->len);
    sink->len = 0;
}

static void put(struct sink *sink, const void *data, size_t len)
{
    if (sink->len + len > sizeof(sink->bytes))
        flush(sink);
    memcpy(sink->bytes + sink->len, data, len);
    sink->len += len;
    XXH3_64bits_update(&sink->sum, data, len);
}

struct writer {
    struct sink *sink;
    uint32_t clock;
};

static int write_block(void *arg, const struct kva_block *b)
{
    struct writer *w = arg;
    uint8_t to[KVA_STATE_BLOCK] = {0};

    memcpy(to, b->key, KVA_KEY);
    kv_put_le32(to + 16, b->chain);
    kv_put_le32(to + 20, b->units);
    kv_put_le32(to + 24, b->used_s);
    kv_put_le32(to + 28, w->clock - b->stamp);
    to[32] = b->heat;
    to[33] = b->gap;
    to[34] = b->want;
    to[35] = b->list;
    to[36] = b->count;
    to[37] = b->flags;
    put(w->sink, to, sizeof(to));
    return w->sink->error;
}

static int write_index(struct sink *sink, const struct kva_index *index, uint64_t members,
                       const char *policy)
{
    struct writer w = {.sink = sink, .clock = kva_clock(index)};
    uint8_t header[KVA_STATE_HEADER] = {0}, end[KVA_STATE_END];
    struct kva_index_stats stats;

    XXH3_64bits_reset(&sink->sum);
    kva_index_get_stats(index, &stats);
    memcpy(header, magic, sizeof(magic));
    kv_put_le32(header + 8, VERSION);
    kv_put_le32(header + 16, w.clock);
    kv_put_le64(header + 24, stats.blocks);
    memcpy(header + AT_POLICY, policy, KV_MIN(strlen(policy), (size_t)POLICY));
    kv_put_le64(header + AT_MEMBERS, members);
    put(sink, header, sizeof(header));
    (void)kva_index_each(index, write_block, &w);
    kv_put_le64(end, XXH3_64bits_digest(&sink->sum));
    put(sink, end, sizeof(end));
    flush(sink);
    return sink->error;
}

static struct sink *make_sink(int fd)
{
    struct sink *sink = aligned_alloc(64, (sizeof(*sink) + 63) / 64 * 64);

    if (!sink)
        return NULL;
    sink->fd = fd;
    sink->error = 0;
    sink->len = 0;
    return sink;
}

/* -- reading ----------------------------------------------------------------------------------- */

static int check(const uint8_t *data, size_t len, uint64_t members)
{
    if (len < KVA_STATE_HEADER + KVA_STATE_END || memcmp(data, magic, sizeof(magic)) != 0)
        return -EBADMSG;
    if (kv_get_le(data + 8, 4) != VERSION)
        return -EPROTONOSUPPORT;
    len -= KVA_STATE_END;
    if (kv_get_le64(data + 24) != (len - KVA_STATE_HEADER) / KVA_STATE_BLOCK ||
        (len - KVA_STATE_HEADER) % KVA_STATE_BLOCK ||
        kv_get_le64(data + len) != kv_xxh64(data, len, 0))
        return -EBADMSG;
    return kv_get_le64(data + AT_MEMBERS) == members ? 0 : -ESTALE;
}

static int read_block(struct kva_index *index, const uint8_t *from, uint32_t clock,
                      bool same_policy)
{
    struct kva_block b = {.chain = (uint32_t)kv_get_le(from + 16, 4),
                          .units = (uint32_t)kv_get_le(from + 20, 4),
                          .used_s = (uint32_t)kv_get_le(from + 24, 4),
                          .stamp = clock - (uint32_t)kv_get_le(from + 28, 4),
                          .heat = from[32],
                          .gap = from[33],
                          .want = from[34],
                          .list = same_policy ? from[35] : 0,
                          .count = from[36],
                          .flags = same_policy ? from[37] : 0};
    int rc;

    memcpy(b.key, from, KVA_KEY);
    rc = kva_index_restore(index, &b);
    return rc == -EINVAL || rc == -EEXIST ? -EBADMSG : rc;
}

long kva_state_read(struct kva_index *index, uint64_t members, const char *policy, const void *data,
                    size_t len)
{
    const uint8_t *at = data;
    char named[POLICY + 1] = "";
    uint32_t clock;
    bool same;
    size_t n;
    int rc = check(at, len, members);

    if (rc < 0)
        return rc;
    memcpy(named, at + AT_POLICY, POLICY);
    same = strcmp(named, policy) == 0;
    clock = (uint32_t)kv_get_le(at + 16, 4);
    n = (len - KVA_STATE_HEADER - KVA_STATE_END) / KVA_STATE_BLOCK;
    kva_index_set_clock(index, clock);
    at += KVA_STATE_HEADER;
    for (size_t i = 0; i < n && rc == 0; i++, at += KVA_STATE_BLOCK)
        rc = read_block(index, at, clock, same);
    return rc < 0 ? rc : (long)n;
}

/* -- files ------------------------------------------------------------------------------------- */

static int sync_folder(const char *path)
{
    static _Atomic bool told;
    char *copy = strdup(path);
    int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1, rc;

    rc = fd >= 0 ? kv_sync_dir(fd, &told, "advisor", path) : copy ? -errno : -ENOMEM;
    if (fd >= 0)
        close(fd);
    free(copy);
    return rc;
}

/* Write all to the file and end: a copy of the process, in which no other thread runs. */
static void write_and_exit(struct sink *sink, const struct kva_state_save *save)
{
    int rc;

    prctl(PR_SET_PDEATHSIG, SIGKILL); /* it has the parent's locks of files */
    rc = write_index(sink, save->index, save->members, save->policy);
    if (rc == 0 && fsync(sink->fd) < 0)
        rc = -errno;
    _exit(KV_MIN(-rc, 255));
}

static int wait_for(pid_t pid)
{
    int status;

    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -errno;
    return WIFEXITED(status) ? -WEXITSTATUS(status) : -EIO;
}

/* Write the index as of now. Its lock is held for as long as a copy of the process takes to make. */
static int write_file(struct sink *sink, const struct kva_state_save *save, uint64_t *ret_pause_ns)
{
    uint64_t begin_ns;
    pid_t pid;
    int rc = 0;

    pthread_mutex_lock(save->lock);
    begin_ns = kv_now_ns();
    pid = fork();
    if (pid == 0)
        write_and_exit(sink, save);
    if (pid < 0) /* no memory for a copy: the others wait until all is written */
        rc = write_index(sink, save->index, save->members, save->policy);
    *ret_pause_ns = kv_now_ns() - begin_ns;
    pthread_mutex_unlock(save->lock);
    if (pid > 0)
        return wait_for(pid);
    return rc == 0 && fsync(sink->fd) < 0 ? -errno : rc;
}

int kva_state_save(const char *path, const struct kva_state_save *save, uint64_t *ret_pause_ns)
{
    struct sink *sink;
    char *new;
    int fd, rc;

    *ret_pause_ns = 0;
    if (asprintf(&new, "%s.new", path) < 0)
        return -ENOMEM;
    fd = open(new, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600);
    rc = fd < 0 ? -errno : 0;
    sink = make_sink(fd);
    if (rc == 0)
        rc = sink ? write_file(sink, save, ret_pause_ns) : -ENOMEM;
    free(sink);
    if (fd >= 0)
        close(fd);
    if (rc == 0 && rename(new, path) < 0)
        rc = -errno;
    if (rc == 0)
        rc = sync_folder(path);
    free(new);
    return rc;
}

int kva_state_load(const char *path, void **ret, size_t *ret_len)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC), rc = 0;
    struct stat st;
    size_t done = 0;
    uint8_t *data;

    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) < 0 || !(data = malloc((size_t)st.st_size + 1))) {
        close(fd);
        return -ENOMEM;
    }
    while (rc == 0 && done < (size_t)st.st_size) {
        ssize_t n = read(fd, data + done, (size_t)st.st_size - done);

        rc = n < 0 && errno != EINTR ? -errno : n == 0 ? -EIO : 0;
        done += n > 0 ? (size_t)n : 0;
    }
    close(fd);
    if (rc < 0) {
        free(data);
        return rc;
    }
    *ret = data;
    *ret_len = done;
    return 0;
}
