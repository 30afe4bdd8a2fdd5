// SPDX-License-Identifier: Apache-2.0
/**
 * Leases: protect the chunks that a save hit until the save is published, without a link for each.
 *
 * A writer that has such hits sets the mtime of its file in writers/ to the time of the first one;
 * 0 means no lease. Each hit then gets a time of use that is not earlier. Deleters (sweep,
 * eviction) keep every chunk that was used since the oldest lease of a living writer began:
 *
 *     saver     lease (mtime of writers/ID)     flock the fan-out shared, set the chunk's time
 *     sweep     flock the fan-out exclusive     read leases, then each chunk's time, delete
 *     eviction  read each chunk's time          read leases, flock, delete what has that time still
 *
 * A saver never waits for the flock: where a deleter holds it, and where times can't be set, the
 * hit gets a link in tmp/ instead (commit/commit.c). Other handles ignore a lease after
 * KVS_FILE_LEASE_S, so that a handle that never publishes can't stop eviction. Hits in the second
 * half of that time, or later, get links, since the lease would end too soon. So do the leased ones
 * at a flush, since nobody knows when their publication comes. A hit that is deleted nevertheless,
 * by hand or after its lease, makes the publication fail.
 */
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "store/file/file_impl.h"

static int64_t now_ns(void)
{
    return (int64_t)kv_wall_ns();
}

static int set_time(int dir, const char *name, int64_t ns)
{
    const struct timespec at = kv_timespec((uint64_t)ns), times[2] = {at, at};

    return utimensat(dir, name, times, AT_SYMLINK_NOFOLLOW) < 0 ? -errno : 0;
}

void kvs_file_lease_none(kv_store_v1 *h)
{
    set_time(h->writers, h->writer, 0);
}

/* Begin the lease; under lease_lock. */
static int begin(kv_store_v1 *h)
{
    int64_t ns = now_ns();
    int rc = 0;

    if (h->leases && ns - h->lease_ns >= KVS_FILE_LEASE_S / 2 * (int64_t)KV_NS_PER_S)
        return -ETIME;
    if (h->leases == 0) {
        rc = set_time(h->writers, h->writer, ns);
        h->lease_ns = ns;
    }
    if (rc == 0)
        h->leases++;
    return rc == -ENOENT ? -ESTALE : rc; /* the writer's own file is missing, not the chunk */
}

/* End the leases of @n hits; under lease_lock. */
static void end(kv_store_v1 *h, size_t n)
{
    h->leases -= n;
    if (h->leases == 0)
        kvs_file_lease_none(h);
}

/* Lock the fan-out through a descriptor of its own: a flock on fan[] belongs to a publication. */
static int lock_fan(kv_store_v1 *h, int fan)
{
    if (h->lease_fan[fan] < 0)
        h->lease_fan[fan] = openat(h->fan[fan], ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (h->lease_fan[fan] < 0)
        return -errno;
    return flock(h->lease_fan[fan], LOCK_SH | LOCK_NB) < 0 ? -errno : 0;
}

int kvs_file_lease(kv_store_v1 *h, struct kvs_file_pending *e, const char *hex)
{
    int fan = kvs_file_fan(e->key), rc;
    int64_t ns = 0;

    if (atomic_load_explicit(&h->side_car, memory_order_relaxed))
        return -ENOTSUP; /* with side-cars, publications hold these flocks exclusively */
    pthread_mutex_lock(&h->lease_lock);
    rc = begin(h);
    if (rc == 0) {
        rc = lock_fan(h, fan);
        if (rc == 0) {
            ns = KV_MAX(now_ns(), h->lease_ns); /* the clock may have been set back */
            rc = set_time(h->fan[fan], hex, ns);
            flock(h->lease_fan[fan], LOCK_UN);
        }
        if (rc < 0)
            end(h, 1);
    }
    pthread_mutex_unlock(&h->lease_lock);
    if (rc < 0)
        return rc;
    e->seen.mtime_ns = ns;
    e->leased = true;
    return 0;
}

void kvs_file_lease_end(kv_store_v1 *h, struct kvs_file_pending *e)
{
    if (!e->leased)
        return;
    e->leased = false;
    kvs_file_leases_end(h, 1);
}

void kvs_file_leases_end(kv_store_v1 *h, size_t n)
{
    if (n == 0)
        return;
    pthread_mutex_lock(&h->lease_lock);
    end(h, n);
    pthread_mutex_unlock(&h->lease_lock);
}

/* Begin of writer @name's lease in ns: INT64_MAX without one, INT64_MIN when it can't be read. */
static int64_t lease_of(kv_store_v1 *h, const char *name, int64_t expired)
{
    struct stat st;
    int64_t ns;

    if (!kvs_file_is_writer(name))
        return INT64_MAX;
    if (fstatat(h->writers, name, &st, AT_SYMLINK_NOFOLLOW) < 0)
        return errno == ENOENT ? INT64_MAX : INT64_MIN;
    ns = kvs_file_see(&st).mtime_ns;
    if (!S_ISREG(st.st_mode) || st.st_size != 0 || ns <= expired)
        return INT64_MAX;
    return strcmp(name, h->writer) != 0 && kvs_file_writer_dead(h, name) ? INT64_MAX : ns;
}

int64_t kvs_file_leased_since(kv_store_v1 *h)
{
    int64_t expired = now_ns() - KVS_FILE_LEASE_S * (int64_t)KV_NS_PER_S, oldest = INT64_MAX;
    int64_t lease;
    struct dirent *e;
    DIR *dir;

    if (h->writers < 0) /* the directory holds no store */
        return INT64_MAX;
    dir = kvs_file_dir(h->writers);
    if (!dir)
        return INT64_MIN;
    do {
        errno = 0;
        e = readdir(dir);
        lease = e ? lease_of(h, e->d_name, expired) : errno ? INT64_MIN : INT64_MAX;
        oldest = KV_MIN(oldest, lease);
    } while (e);
    closedir(dir);
    return oldest;
}
