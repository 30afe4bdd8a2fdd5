// SPDX-License-Identifier: Apache-2.0
/* The conformance kit: a right backend passes every check, and for each check there is a wrong
 * backend that it catches: the right one with one function replaced by a broken one. */
#include <ctype.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/unit.h"
#include "store/conformance.h"
#include "store/memory_backend.h"

#define URI "memory://conformance"

/* The backend under test: the right one's tables, changed. */
static kv_store_vtable vt;
static kv_store_ext ext;
static const char *library;

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

/* -- The table of mutations -------------------------------------------------------------------- */

#define SET(what) static void mutate_##what(void)

SET(version_0)
{
    vt.version = 0;
}
SET(no_function)
{
    vt.get_manifest = NULL;
}
SET(version_9)
{
    vt.version = 9;
}
SET(no_prefetch)
{
    vt.prefetch_chunks = NULL;
}
SET(loud)
{
    Dl_info info;

    assert_int_not_equal(dladdr((void *)(uintptr_t)_assert_true, &info), 0);
    library = info.dli_fname; /* cmocka exports a lot */
}
SET(own_puts)
{
    vt.put_chunk = put_marks_dirty, vt.get_chunk = get_half_written;
}
SET(put_lazy)
{
    vt.put_chunk = put_lazy, vt.get_chunk = get_lazy, vt.put_manifest = manifest_lazy;
}
SET(own_late)
{
    vt.put_chunk = put_lazy, vt.get_chunk = get_late, vt.put_manifest = manifest_lazy;
}
SET(short_keys)
{
    vt.put_chunk = put_short_keys, vt.get_chunk = get_short_keys;
}
SET(text_keys)
{
    vt.put_chunk = put_text_keys, vt.get_chunk = get_text_keys;
}
SET(keeps_input)
{
    vt.put_chunk = put_keeps_input, vt.get_chunk = get_kept_input;
}
SET(own_only)
{
    vt.put_chunk = put_notes_owner, vt.get_chunk = get_own_only;
}
SET(negative_cache)
{
    vt.prefetch_chunks = prefetch_notes, vt.put_chunk = put_after_prefetch_is_lost;
}
SET(lower_case)
{
    vt.put_manifest = put_lower, vt.get_manifest = get_lower;
}
SET(cut_names)
{
    vt.put_manifest = put_255, vt.get_manifest = get_255;
}
SET(ext_size)
{
    ext.size = 4;
}
SET(ext_version)
{
    ext.version = 9;
}

/* One function of a table replaced. */
#define ONE(table, field, fn)     \
    static void mutate_##fn(void) \
    {                             \
        table.field = fn;         \
    }
ONE(vt, open, open_leaks)
ONE(vt, open, open_takes_signals)
ONE(vt, close, close_loses_all)
ONE(vt, close, close_takes_puts)
ONE(vt, get_chunk, get_cuts)
ONE(vt, get_chunk, get_fears_zeros)
ONE(vt, get_chunk, get_empty_is_null)
ONE(vt, get_chunk, get_finds_all)
ONE(vt, get_chunk, get_spoils_outputs)
ONE(vt, get_chunk, get_keeps_output)
ONE(vt, put_chunk, put_never_hits)
ONE(vt, put_chunk, put_wants_bytes)
ONE(vt, put_chunk, put_replaces)
ONE(vt, put_chunk, put_forgets_after_500)
ONE(vt, put_chunk, put_one_thread)
ONE(vt, put_manifest, manifest_cuts)
ONE(vt, put_manifest, manifest_leaves_tail)
ONE(vt, put_manifest, names_without_dots)
ONE(vt, put_manifest, refuses_most_names)
ONE(vt, put_manifest, manifest_gone_between)
ONE(vt, put_manifest, manifest_torn)
ONE(vt, put_manifest, manifest_not_empty)
ONE(vt, get_manifest, manifest_found_always)
ONE(vt, get_manifest, get_no_slash)
ONE(vt, delete_manifest, delete_wants_one)
ONE(vt, delete_manifest, delete_does_nothing)
ONE(vt, delete_manifest, delete_by_prefix)
ONE(vt, delete_manifest, delete_takes_chunks)
ONE(vt, delete_manifest, delete_chunk_of_name)
ONE(vt, prefetch_chunks, prefetch_returns_count)
ONE(vt, prefetch_chunks, prefetch_drops)
ONE(ext, exists_chunks, exists_all)
ONE(ext, get_chunks, get_many_counts_all)
ONE(ext, put_chunks, put_many_no_hits)
ONE(ext, get_parts, get_parts_short)
ONE(ext, put_parts, put_parts_first)
ONE(ext, stream_chunk, stream_goes_on)
ONE(ext, stream_chunk, stream_nothing_of_empty)
ONE(ext, delete_chunk, delete_nothing)
ONE(ext, delete_chunk_if, delete_anyway)
ONE(ext, list_manifests, list_twice)
ONE(ext, list_chunks, list_stubborn)
ONE(ext, list_refs, refs_none)
ONE(ext, touch_chunks, touch_all)
ONE(ext, flush, flush_fails)
ONE(ext, sweep_chunks, sweep_ageless)
ONE(ext, sweep_chunks, sweep_merciless)
ONE(ext, stats, stats_none)

#define CLOSE_NULL "close: NULL is a no-op"
static const struct mutation {
    void (*mutate)(void);
    const char *caught_by;
    enum kvs_verdict verdict; /* advice: the specification allows it */
} MUTATIONS[] = {
    {mutate_version_0, "table: version 1 or more, no function NULL", KVS_FAIL},
    {mutate_no_function, "table: version 1 or more, no function NULL", KVS_FAIL},
    {mutate_version_9, "table: the version says what there is", KVS_ADVICE},
    {mutate_no_prefetch, "table: the version says what there is", KVS_FAIL},
    {mutate_loud, "library: exports nothing but its tables", KVS_ADVICE},
    {mutate_open_leaks, "open, close: leave no descriptors open", KVS_FAIL},
    {mutate_open_takes_signals, "open: leaves the host's signals alone", KVS_ADVICE},
    {mutate_get_cuts, "chunks: 0 B to 16 MiB come back as put", KVS_FAIL},
    {mutate_get_fears_zeros, "chunks: zeros, text and noise come back", KVS_FAIL},
    {mutate_get_empty_is_null, "chunks, manifests: empty ones exist", KVS_ADVICE},
    {mutate_put_wants_bytes, "chunks, manifests: empty ones exist", KVS_FAIL},
    {mutate_put_never_hits, "chunks: a duplicate returns 1", KVS_FAIL},
    {mutate_put_never_hits, "chunks: a buffered duplicate returns 1", KVS_FAIL},
    {mutate_put_lazy, "chunks: a buffered duplicate returns 1", KVS_ADVICE},
    {mutate_own_late, "chunks: a handle sees its own puts", KVS_ADVICE},
    {mutate_put_replaces, "chunks: never change", KVS_FAIL},
    {mutate_short_keys, "chunks: 8- to 32-byte keys coexist", KVS_FAIL},
    {mutate_text_keys, "chunks: keys are bytes, not text", KVS_FAIL},
    {mutate_get_finds_all, "chunks: a missing one is an error", KVS_FAIL},
    {mutate_get_spoils_outputs, "chunks: a missing one is an error", KVS_ADVICE},
    {mutate_own_puts, "chunks: a handle sees its own puts", KVS_FAIL},
    {mutate_put_forgets_after_500, "chunks: 1000 in one save", KVS_FAIL},
    {mutate_get_keeps_output, "outputs: malloc'd, the caller's own", KVS_FAIL},
    {mutate_keeps_input, "inputs: borrowed for the call only", KVS_FAIL},
    {mutate_manifest_cuts, "manifests: up to 4 MiB come back", KVS_FAIL},
    {mutate_manifest_leaves_tail, "manifests: replaced whole, on all handles", KVS_FAIL},
    {mutate_manifest_found_always, "manifests: a missing one is an error", KVS_FAIL},
    {mutate_delete_wants_one, "delete: gone everywhere; missing is fine", KVS_FAIL},
    {mutate_delete_does_nothing, "delete: gone everywhere; missing is fine", KVS_FAIL},
    {mutate_delete_by_prefix, "delete: gone everywhere; missing is fine", KVS_FAIL},
    {mutate_delete_takes_chunks, "delete: takes no chunk of another object", KVS_ADVICE},
    {mutate_own_only, "publish: all chunks visible to others", KVS_FAIL},
    {mutate_close_loses_all, "publish: everything is there after re-open", KVS_FAIL},
    {mutate_prefetch_returns_count, "prefetch: a hint that changes nothing", KVS_FAIL},
    {mutate_prefetch_drops, "prefetch: a hint that changes nothing", KVS_FAIL},
    {mutate_negative_cache, "prefetch: a hint that changes nothing", KVS_FAIL},
    {mutate_names_without_dots, "names: plain ones are taken", KVS_FAIL},
    {mutate_lower_case, "names: odd ones refused or kept, never mixed up", KVS_FAIL},
    {mutate_cut_names, "names: odd ones refused or kept, never mixed up", KVS_FAIL},
    {mutate_get_no_slash, "names: odd ones refused or kept, never mixed up", KVS_FAIL},
    {mutate_delete_chunk_of_name, "names: no clash with keys of chunks", KVS_FAIL},
    {mutate_put_one_thread, "threads: savers on one handle", KVS_FAIL},
    {mutate_manifest_gone_between, "threads: a manifest is the old or the new one", KVS_FAIL},
    {mutate_manifest_torn, "threads: a manifest is the old or the new one", KVS_FAIL},
    {mutate_manifest_not_empty, "threads: gets beside a writer, 32-byte keys, empty sentinel",
     KVS_FAIL},
    {mutate_close_takes_puts, "handles: the same chunks saved twice", KVS_FAIL},
    {mutate_ext_size, "ext: table has a size and version 1", KVS_FAIL},
    {mutate_ext_version, "ext: table has a size and version 1", KVS_FAIL},
    {mutate_exists_all, "ext: exists_chunks", KVS_FAIL},
    {mutate_get_many_counts_all, "ext: get_chunks", KVS_FAIL},
    {mutate_put_many_no_hits, "ext: put_chunks", KVS_FAIL},
    {mutate_stream_goes_on, "ext: stream_chunk", KVS_FAIL},
    {mutate_stream_nothing_of_empty, "ext: stream_chunk", KVS_FAIL},
    {mutate_get_parts_short, "ext: get_parts", KVS_FAIL},
    {mutate_put_parts_first, "ext: put_parts", KVS_FAIL},
    {mutate_delete_nothing, "ext: delete_chunk", KVS_FAIL},
    {mutate_delete_anyway, "ext: delete_chunk_if", KVS_FAIL},
    {mutate_list_twice, "ext: list_manifests", KVS_FAIL},
    {mutate_list_stubborn, "ext: list_chunks", KVS_FAIL},
    {mutate_refs_none, "ext: list_refs", KVS_FAIL},
    {mutate_touch_all, "ext: touch_chunks", KVS_FAIL},
    {mutate_flush_fails, "ext: flush", KVS_FAIL},
    {mutate_sweep_ageless, "ext: sweep_chunks", KVS_FAIL},
    {mutate_sweep_merciless, "ext: sweep_chunks", KVS_FAIL},
    {mutate_stats_none, "ext: stats", KVS_ADVICE},
};

/* -- Tests ------------------------------------------------------------------------------------- */

struct seen {
    const char *check; /* the one that we wait for; NULL: print all that don't pass */
    enum kvs_verdict verdict;
    char detail[256];
    unsigned n, n_pass, n_skip;
};

static void note(void *arg, const char *check, enum kvs_verdict verdict, const char *detail)
{
    struct seen *seen = arg;

    seen->n++;
    seen->n_pass += verdict == KVS_PASS;
    seen->n_skip += verdict == KVS_SKIP;
    if (!seen->check && verdict != KVS_PASS)
        print_message("%s %s: %s\n", verdict == KVS_FAIL ? "FAIL" : "skip", check, detail);
    if (seen->check && strcmp(seen->check, check) == 0) {
        seen->verdict = verdict;
        snprintf(seen->detail, sizeof(seen->detail), "%s", detail);
    }
}

static void reset(void)
{
    vt = *memory_vtable();
    ext = *memory_ext();
    library = NULL;
    for (unsigned i = 0; i < m.n_fds; i++)
        close(m.fds[i]);
    free(m.kept);
    memset(&m, 0, sizeof(m));
    memory_forget_all();
    signal(SIGPIPE, SIG_DFL);
}

static void test_right_backend_passes(void **state)
{
    struct seen seen = {0};

    (void)state;
    reset();
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL, NULL, note, &seen), 0);
    assert_in_range(seen.n, 40, 100);
    assert_int_equal(seen.n_skip, 1); /* there is no library to look at */
    assert_int_equal(seen.n_pass, seen.n - 1);
    assert_null(memory_space(URI)->manifests); /* nothing is left behind */
    assert_null(memory_space(URI)->chunks);
    assert_int_equal(memory_space(URI)->opens, 0);
}

static void test_version_1_passes(void **state)
{
    struct seen seen = {0};

    (void)state;
    reset();
    vt.version = 1;
    vt.prefetch_chunks = NULL;
    assert_int_equal(kvs_conf_run(&vt, NULL, URI, NULL, NULL, note, &seen), 0);
    assert_in_range(seen.n_skip, 12, 18); /* prefetch, the library, the extensions */
}

static void test_every_mutation_is_caught(void **state)
{
    (void)state;
    for (size_t i = 0; i < KV_COUNT(MUTATIONS); i++) {
        struct seen seen = {.check = MUTATIONS[i].caught_by, .verdict = KVS_SKIP};
        int rc;

        reset();
        MUTATIONS[i].mutate();
        rc = kvs_conf_run(&vt, &ext, URI, library, MUTATIONS[i].caught_by, note, &seen);
        if (rc != (MUTATIONS[i].verdict == KVS_FAIL) || !seen.detail[0] ||
            seen.verdict != MUTATIONS[i].verdict)
            fail_msg("mutation %zu wasn't caught by \"%s\": %d, verdict %d %s", i,
                     MUTATIONS[i].caught_by, rc, seen.verdict, seen.detail);
    }
    reset();
}

/* A backend that takes only some names is right, too. */
static void test_refusing_names_is_right(void **state)
{
    struct seen seen = {0};

    (void)state;
    reset();
    mutate_refuses_most_names();
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL,
                                  "names: odd ones refused or kept, never mixed up", note, &seen),
                     0);
}

/* A backend that buffers passes, too: put_chunk can't know what put_manifest will find. */
static void test_buffering_is_right(void **state)
{
    struct seen seen = {.check = "chunks: a duplicate returns 1", .verdict = KVS_PASS};

    (void)state;
    reset();
    vt.put_chunk = put_lazy;
    vt.get_chunk = get_lazy;
    vt.put_manifest = manifest_lazy;
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL, seen.check, note, &seen), 0);
    assert_int_equal(seen.verdict, KVS_SKIP);
}

/* A crash in close(NULL) fails that check, not the others. */
static void test_crash_at_close_null(void **state)
{
    struct seen seen = {.check = CLOSE_NULL, .verdict = KVS_PASS};

    (void)state;
    reset();
    vt.close = close_null_crashes;
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL, CLOSE_NULL, note, &seen), 1);
    assert_int_equal(seen.verdict, KVS_FAIL);
    assert_non_null(strstr(seen.detail, "signal"));
    vt.close = close_null_ends_all;
    assert_int_equal(kvs_conf_run(&vt, &ext, URI, NULL, CLOSE_NULL, note, &seen), 1);
    assert_int_equal(seen.verdict, KVS_FAIL);
}

/* No check is without a mutation, so that none can't fail. */
static void test_every_check_has_a_mutation(void **state)
{
    static const struct kvs_conf_check *const LISTS[] = {KVS_CONF_ABI,       KVS_CONF_CHUNKS,
                                                         KVS_CONF_MANIFESTS, KVS_CONF_NAMES,
                                                         KVS_CONF_THREADS,   KVS_CONF_EXT};

    (void)state;
    for (size_t l = 0; l < KV_COUNT(LISTS); l++)
        for (const struct kvs_conf_check *check = LISTS[l]; check->name; check++) {
            bool found = strcmp(check->name, CLOSE_NULL) == 0; /* the test above */

            for (size_t i = 0; i < KV_COUNT(MUTATIONS); i++)
                found = found || strcmp(check->name, MUTATIONS[i].caught_by) == 0;
            if (!found)
                fail_msg("no mutation fails \"%s\"", check->name);
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_right_backend_passes),
        cmocka_unit_test(test_version_1_passes),
        cmocka_unit_test(test_every_mutation_is_caught),
        cmocka_unit_test(test_refusing_names_is_right),
        cmocka_unit_test(test_buffering_is_right),
        cmocka_unit_test(test_crash_at_close_null),
        cmocka_unit_test(test_every_check_has_a_mutation),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
