// SPDX-License-Identifier: Apache-2.0
/**
 * Broken functions of a backend for test_conformance.c, each wrong in one way. They call the right
 * backend through `vt` and `ext`. Included by that test only.
 */
#ifndef KV_TESTS_STORE_BROKEN_FUNCTIONS_H
#define KV_TESTS_STORE_BROKEN_FUNCTIONS_H

#include <ctype.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/unit.h"
#include "store/backend/file.h"
#include "store/conformance/conformance.h"
#include "store/memory_backend.h"

#define URI "memory://conformance"

/* The backend under test: the right one's tables, changed. */
static kv_store_vtable vt;
static kv_store_ext ext;
static const char *library, *where;

/* State of the broken functions. */
static struct {
    _Atomic unsigned puts;
    _Atomic bool dirty, fetched, threaded;
    pthread_t thread;
    uint8_t *kept;
    size_t kept_len;
    struct {
        uint8_t hash[8];
        const uint8_t *data;
        size_t len;
    } lent;
    kv_store_v1 *owner;
    int fds[64];
    unsigned n_fds;
    struct {
        char *name; /* manifests */
        uint8_t key[32], *data;
        size_t key_len, len;
    } later[8];
    unsigned n_later;
} m;

/* -- Broken functions -------------------------------------------------------------------------- */

static void close_null_crashes(kv_store_v1 *self)
{
    if (!self)
        abort();
    memory_close(self);
}

static void close_null_ends_all(kv_store_v1 *self)
{
    if (!self)
        _exit(3);
    memory_close(self);
}

static kv_store_v1 *open_leaks(const char *uri)
{
    if (m.n_fds < KV_COUNT(m.fds))
        m.fds[m.n_fds++] = open("/dev/null", O_RDONLY | O_CLOEXEC);
    return memory_open(uri);
}

static kv_store_v1 *open_takes_signals(const char *uri)
{
    static unsigned n;

    signal(SIGPIPE, n++ % 2 ? SIG_IGN : SIG_DFL);
    return memory_open(uri);
}

static int get_cuts(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                    size_t *len)
{
    int rc = memory_get_chunk(self, hash, hash_len, ret, len);

    if (rc == 0 && *len > 8 << 20)
        *len = 8 << 20;
    return rc;
}

static int get_fears_zeros(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                           size_t *len)
{
    uint8_t *data = NULL;
    size_t n = 0, i = 0;
    int rc = memory_get_chunk(self, hash, hash_len, &data, &n);

    if (rc)
        return rc;
    while (i < n && data[i] == 0)
        i++;
    if (n && i == n) {
        free(data);
        return -EBADMSG;
    }
    *ret = data;
    *len = n;
    return 0;
}

static int get_empty_is_null(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                             size_t *len)
{
    int rc = memory_get_chunk(self, hash, hash_len, ret, len);

    if (rc == 0 && *len == 0) {
        free(*ret);
        *ret = NULL;
    }
    return rc;
}

static int put_wants_bytes(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const uint8_t *data, size_t len)
{
    return len ? memory_put_chunk(self, hash, hash_len, data, len) : -EINVAL;
}

static int put_never_hits(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                          const uint8_t *data, size_t len)
{
    int rc = memory_put_chunk(self, hash, hash_len, data, len);

    return rc < 0 ? rc : 0;
}

/* Buffers, and looks for duplicates only when it writes: allowed. */
static int put_lazy(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                    size_t len)
{
    m.dirty = true;
    m.owner = self;
    return KV_MIN(memory_put_chunk(self, hash, hash_len, data, len), 0);
}

static int get_lazy(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                    size_t *len)
{
    return m.dirty && self != m.owner ? -ENOENT : memory_get_chunk(self, hash, hash_len, ret, len);
}

/* Not even the one who put them gets them before put_manifest: allowed. */
static int get_late(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                    size_t *len)
{
    return m.dirty ? -ENOENT : memory_get_chunk(self, hash, hash_len, ret, len);
}

static int manifest_lazy(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    m.dirty = false;
    return memory_put_manifest(self, name, data, len);
}

static int put_replaces(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                        const uint8_t *data, size_t len)
{
    int rc = memory_put_chunk(self, hash, hash_len, data, len);

    if (rc == 1) {
        memory_delete_chunk(self, hash, hash_len);
        memory_put_chunk(self, hash, hash_len, data, len);
    }
    return rc;
}

static int put_short_keys(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                          const uint8_t *data, size_t len)
{
    return memory_put_chunk(self, hash, KV_MIN(hash_len, 8U), data, len);
}

static int get_short_keys(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                          size_t *len)
{
    return memory_get_chunk(self, hash, KV_MIN(hash_len, 8U), ret, len);
}

/* Keys as C strings. */
static size_t text_len(const uint8_t *hash, size_t hash_len)
{
    return strnlen((const char *)hash, hash_len - 1) + 1;
}

static int put_text_keys(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                         const uint8_t *data, size_t len)
{
    return memory_put_chunk(self, hash, text_len(hash, hash_len), data, len);
}

static int get_text_keys(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                         size_t *len)
{
    return memory_get_chunk(self, hash, text_len(hash, hash_len), ret, len);
}

static int get_finds_all(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                         size_t *len)
{
    if (memory_get_chunk(self, hash, hash_len, ret, len) < 0) {
        *ret = calloc(1, 1);
        *len = 0;
    }
    return 0;
}

static int get_spoils_outputs(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                              uint8_t **ret, size_t *len)
{
    int rc = memory_get_chunk(self, hash, hash_len, ret, len);

    if (rc < 0)
        *ret = NULL;
    return rc;
}

static int put_marks_dirty(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const uint8_t *data, size_t len)
{
    m.dirty = true;
    return memory_put_chunk(self, hash, hash_len, data, len);
}

static int get_half_written(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                            size_t *len)
{
    int rc = memory_get_chunk(self, hash, hash_len, ret, len);

    if (rc == 0 && m.dirty && *len)
        memset(*ret + *len / 2, 0, *len - *len / 2);
    return rc;
}

static int put_forgets_after_500(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                                 const uint8_t *data, size_t len)
{
    return ++m.puts > 500 ? 0 : memory_put_chunk(self, hash, hash_len, data, len);
}

static int get_keeps_output(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                            size_t *len)
{
    int rc = m.kept ? 0 : memory_get_chunk(self, hash, hash_len, &m.kept, &m.kept_len);

    if (rc == 0) {
        *ret = m.kept;
        *len = m.kept_len;
    }
    return rc;
}

static int put_keeps_input(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const uint8_t *data, size_t len)
{
    memcpy(m.lent.hash, hash, KV_MIN(hash_len, sizeof(m.lent.hash)));
    m.lent.data = data;
    m.lent.len = len;
    return memory_put_chunk(self, hash, hash_len, data, len);
}

static int get_kept_input(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                          size_t *len)
{
    (void)self;
    (void)hash;
    (void)hash_len;
    *ret = memory_copy(m.lent.data, m.lent.len);
    *len = m.lent.len;
    return 0;
}

static int manifest_cuts(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    return memory_put_manifest(self, name, data, KV_MIN(len, 1U << 20));
}

static int manifest_leaves_tail(kv_store_v1 *self, const char *name, const uint8_t *data,
                                size_t len)
{
    uint8_t *old = NULL;
    size_t old_len = 0;
    int rc;

    if (memory_get_manifest(self, name, &old, &old_len) < 0)
        return memory_put_manifest(self, name, data, len);
    memcpy(old, data, KV_MIN(len, old_len));
    rc = len < old_len ? memory_put_manifest(self, name, old, old_len)
                       : memory_put_manifest(self, name, data, len);
    free(old);
    return rc;
}

static int manifest_found_always(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *len)
{
    if (memory_get_manifest(self, name, ret, len) < 0) {
        *ret = calloc(1, 1);
        *len = 0;
    }
    return 0;
}

static int delete_wants_one(kv_store_v1 *self, const char *name)
{
    uint8_t *data = NULL;
    size_t len;

    if (memory_get_manifest(self, name, &data, &len) < 0)
        return -ENOENT;
    free(data);
    return memory_delete_manifest(self, name);
}

static int delete_does_nothing(kv_store_v1 *self, const char *name)
{
    (void)self;
    (void)name;
    return 0;
}

static int delete_by_prefix(kv_store_v1 *self, const char *name)
{
    struct memory_object **o = &self->space->manifests;

    while (*o)
        if (strncmp((*o)->name, name, strlen(name)) == 0)
            memory_remove(o);
        else
            o = &(*o)->next;
    return 0;
}

static int delete_takes_chunks(kv_store_v1 *self, const char *name)
{
    while (self->space->chunks)
        memory_remove(&self->space->chunks);
    return memory_delete_manifest(self, name);
}

static int put_notes_owner(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const uint8_t *data, size_t len)
{
    m.owner = self;
    return memory_put_chunk(self, hash, hash_len, data, len);
}

static int get_own_only(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                        size_t *len)
{
    return self == m.owner ? memory_get_chunk(self, hash, hash_len, ret, len) : -ENOENT;
}

static void close_loses_all(kv_store_v1 *self)
{
    if (self && self->space->opens == 1)
        while (self->space->chunks)
            memory_remove(&self->space->chunks);
    memory_close(self);
}

static int prefetch_returns_count(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len,
                                  size_t n)
{
    memory_prefetch_chunks(self, hashes, hash_len, n);
    return (int)n;
}

static int prefetch_notes(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    m.fetched = true;
    return memory_prefetch_chunks(self, hashes, hash_len, n);
}

/* A miss that was prefetched stays one. */
static int put_after_prefetch_is_lost(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                                      const uint8_t *data, size_t len)
{
    return m.fetched ? 0 : memory_put_chunk(self, hash, hash_len, data, len);
}

static int prefetch_drops(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    return n ? memory_delete_chunk(self, hashes + hash_len, hash_len) : 0;
}

static int delete_anyway(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                         const uint8_t *data, size_t len)
{
    (void)data, (void)len;
    memory_delete_chunk(self, hash, hash_len);
    return 1;
}

static int new_none(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                    uint8_t *ret_new)
{
    (void)self, (void)hashes, (void)hash_len;
    memset(ret_new, 0, n);
    return 0;
}

static int names_without_dots(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    return strchr(name, '.') ? -EINVAL : memory_put_manifest(self, name, data, len);
}

/* Ways in which a broken backend confuses two names: case; the first 255 bytes. */
static const char *lower(const char *name)
{
    static _Thread_local char text[8192];
    size_t i = 0;

    for (; name[i] && i < sizeof(text) - 1; i++)
        text[i] = (char)tolower((unsigned char)name[i]);
    text[i] = '\0';
    return text;
}

static int put_lower(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    return memory_put_manifest(self, lower(name), data, len);
}

static int get_lower(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *len)
{
    return memory_get_manifest(self, lower(name), ret, len);
}

static int put_255(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    char text[256];

    snprintf(text, sizeof(text), "%s", name);
    return memory_put_manifest(self, text, data, len);
}

static int get_255(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *len)
{
    char text[256];

    snprintf(text, sizeof(text), "%s", name);
    return memory_get_manifest(self, text, ret, len);
}

/* Can't read what another process has saved, and doesn't say that it isn't there. */
static int get_manifest_fails(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *len)
{
    int rc = memory_get_manifest(self, name, ret, len);

    return rc == -ENOENT ? -EIO : rc;
}

/* Takes names with '/', and can't find them again. */
static int get_no_slash(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *len)
{
    return strchr(name, '/') ? -ENOENT : memory_get_manifest(self, name, ret, len);
}

static int refuses_most_names(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    return strlen(name) < 48 && strncmp(name, "kvs", 3) == 0 && !strpbrk(name, "/ %")
               ? memory_put_manifest(self, name, data, len)
               : -EINVAL;
}

/* Manifests and chunks in one space of names. */
static int delete_chunk_of_name(kv_store_v1 *self, const char *name)
{
    uint8_t hash[64];
    size_t n = 0;
    unsigned byte;

    while (n < sizeof(hash) && sscanf(name + 2 * n, "%2x", &byte) == 1)
        hash[n++] = (uint8_t)byte;
    memory_delete_chunk(self, hash, n);
    return memory_delete_manifest(self, name);
}

static int put_one_thread(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                          const uint8_t *data, size_t len)
{
    if (!atomic_exchange(&m.threaded, true))
        m.thread = pthread_self();
    else if (!pthread_equal(m.thread, pthread_self()))
        return -EBUSY;
    return memory_put_chunk(self, hash, hash_len, data, len);
}

/* Long enough for any reader to look in between. */
static void linger(void)
{
    usleep(2000);
}

static int manifest_gone_between(kv_store_v1 *self, const char *name, const uint8_t *data,
                                 size_t len)
{
    memory_delete_manifest(self, name);
    linger();
    return memory_put_manifest(self, name, data, len);
}

static int manifest_torn(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    memory_put_manifest(self, name, data, len / 2);
    linger();
    return memory_put_manifest(self, name, data, len);
}

static int manifest_not_empty(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    return len ? memory_put_manifest(self, name, data, len) : -EINVAL;
}

static void close_takes_puts(kv_store_v1 *self)
{
    for (size_t i = 0; self && i < self->n_refs; i++)
        memory_delete_chunk(self, self->refs + i * self->ref_len, self->ref_len);
    memory_close(self);
}

static int exists_all(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                      uint8_t *ret)
{
    (void)self;
    (void)hashes;
    (void)hash_len;
    memset(ret, 1, n);
    return 0;
}

static int get_many_counts_all(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                               uint8_t **data, size_t *len)
{
    int rc = memory_get_chunks(self, hashes, hash_len, n, data, len);

    return rc < 0 ? rc : (int)n;
}

static int stream_goes_on(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t *buf,
                          size_t room, kv_store_piece_fn each, void *arg)
{
    int rc = memory_stream_chunk(self, hash, hash_len, buf, room, each, arg);

    return rc > 0 ? 0 : rc;
}

static int stream_nothing_of_empty(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                                   uint8_t *buf, size_t room, kv_store_piece_fn each, void *arg)
{
    uint8_t *data;
    size_t len;
    int rc = memory_get_chunk(self, hash, hash_len, &data, &len);

    if (rc == 0)
        free(data);
    return rc == 0 && len > 0 ? memory_stream_chunk(self, hash, hash_len, buf, room, each, arg)
                              : rc;
}

/* Writes as far as the parts reach, and says that it was all. */
static int get_parts_short(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const struct iovec *parts, size_t n_parts, size_t *len)
{
    int rc = memory_get_parts(self, hash, hash_len, parts, n_parts, len);

    return rc == -EMSGSIZE ? 0 : rc;
}

/* Takes what it finds for the version asked for. */
static int ranges_of_any_version(kv_store_v1 *self, kv_store_range *ranges, size_t n)
{
    for (size_t i = 0; i < n; i++)
        ranges[i].tag[0] = '\0';
    return memory_get_ranges(self, ranges, n);
}

/* Fills with zeros what lies behind the end. */
static int ranges_beyond_the_end(kv_store_v1 *self, kv_store_range *ranges, size_t n)
{
    int found = memory_get_ranges(self, ranges, n);

    for (size_t i = 0; i < n; i++)
        if (ranges[i].rc == -ERANGE) {
            for (size_t k = 0; k < ranges[i].n_parts; k++)
                if (ranges[i].parts[k].iov_len > 0)
                    memset(ranges[i].parts[k].iov_base, 0, ranges[i].parts[k].iov_len);
            ranges[i].rc = 0;
            found++;
        }
    return found;
}

static int put_parts_first(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const struct iovec *parts, size_t n_parts)
{
    return memory_put_parts(self, hash, hash_len, parts, n_parts ? 1 : 0);
}

static int put_many_no_hits(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                            const uint8_t *const *data, const size_t *len, int *ret)
{
    int rc = memory_put_chunks(self, hashes, hash_len, n, data, len, NULL);

    if (ret)
        memset(ret, 0, n * sizeof(*ret));
    return rc;
}

static int delete_nothing(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    (void)self;
    (void)hash;
    (void)hash_len;
    return 0;
}

static int list_twice(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    int rc = memory_list_manifests(self, each, arg);

    return rc ? rc : memory_list_manifests(self, each, arg);
}

struct stubborn {
    kv_store_each_fn each;
    void *arg;
};

static int go_on(void *arg, const kv_store_entry *entry)
{
    struct stubborn *s = arg;

    s->each(s->arg, entry);
    return 0;
}

static int list_stubborn(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    struct stubborn s = {each, arg};

    return memory_list_chunks(self, go_on, &s);
}

static int refs_none(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg)
{
    (void)each;
    (void)arg;
    (void)self;
    (void)name;
    return 0;
}

static int touch_all(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    memory_touch_chunks(self, hashes, hash_len, n);
    return (int)n;
}

static int flush_fails(kv_store_v1 *self)
{
    (void)self;
    return -EIO;
}

static int sweep_ageless(kv_store_v1 *self, uint64_t age_s, kv_store_live_fn live, void *arg,
                         kv_store_swept *ret)
{
    (void)age_s;
    return memory_sweep_chunks(self, 0, live, arg, ret);
}

static int none_lives(void *arg, const uint8_t *hash, size_t hash_len)
{
    (void)arg;
    (void)hash;
    (void)hash_len;
    return 0;
}

static int sweep_merciless(kv_store_v1 *self, uint64_t age_s, kv_store_live_fn live, void *arg,
                           kv_store_swept *ret)
{
    (void)live;
    return memory_sweep_chunks(self, age_s, none_lives, arg, ret);
}

static int stats_none(kv_store_v1 *self, kv_store_stats *ret)
{
    (void)self;
    *ret = (kv_store_stats){.size = sizeof(*ret)};
    return 0;
}

/* -- Broken functions over the file store, for checks that need several processes -------------- */

/* Keep a copy of what will be stored later, if the process lives. */
static void note_later(const char *name, const uint8_t *key, size_t key_len, const uint8_t *data,
                       size_t len)
{
    assert_in_range(m.n_later, 0, KV_COUNT(m.later) - 1);
    m.later[m.n_later].name = name ? strdup(name) : NULL;
    m.later[m.n_later].key_len = key_len;
    m.later[m.n_later].data = memory_copy(data, len);
    m.later[m.n_later].len = len;
    if (key)
        memcpy(m.later[m.n_later].key, key, key_len);
    m.n_later++;
}

static void forget_later(void)
{
    for (unsigned i = 0; i < m.n_later; i++) {
        free(m.later[i].name);
        free(m.later[i].data);
    }
    m.n_later = 0;
}

static int file_manifest_late(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    (void)self;
    note_later(name, NULL, 0, data, len);
    return 0;
}

static void file_close_publishes(kv_store_v1 *self)
{
    for (unsigned i = 0; self && i < m.n_later; i++)
        kvs_file_vtable()->put_manifest(self, m.later[i].name, m.later[i].data, m.later[i].len);
    if (self)
        forget_later();
    kvs_file_vtable()->close(self);
}

/* Put half a chunk, and the whole of it with the manifest. */
static int file_put_half(kv_store_v1 *self, const uint8_t *key, size_t key_len, const uint8_t *data,
                         size_t len)
{
    int rc = kvs_file_vtable()->put_chunk(self, key, key_len, data, len / 2);

    if (rc == 0)
        note_later(NULL, key, key_len, data, len);
    return rc == 0 ? kvs_file_ext()->flush(self) : rc;
}

static int file_manifest_mends(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    for (unsigned i = 0; i < m.n_later; i++) {
        kvs_file_ext()->delete_chunk(self, m.later[i].key, m.later[i].key_len);
        kvs_file_vtable()->put_chunk(self, m.later[i].key, m.later[i].key_len, m.later[i].data,
                                     m.later[i].len);
    }
    forget_later();
    return kvs_file_vtable()->put_manifest(self, name, data, len);
}

static int file_flush_nothing(kv_store_v1 *self)
{
    (void)self;
    return 0;
}

#endif
