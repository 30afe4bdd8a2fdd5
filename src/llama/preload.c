// SPDX-License-Identifier: Apache-2.0
/*
 * libkvasir_llama_preload.so: llama-server's slot files in a store, without a change to the server.
 *
 *     KV_LLAMA_STORE=/var/lib/kv LD_PRELOAD=libkvasir_llama_preload.so llama-server ...
 *
 * Takes the place of llama_state_seq_save_file and _load_file. libllama's own functions write and
 * read a file in memory (memfd), so every version of its format works; the store has the bytes as a
 * deduplicated object under the file's name. A load verifies the whole object before libllama sees
 * its first byte. A question for the number of tokens, for which the caller has too little room,
 * reads the object's head only. Failures are what libllama says of a file that it can't open: 0, and a log line.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/le.h"
#include "base/core/log.h"
#include "kv_store.h"

struct llama_context;

typedef size_t (*save_fn)(struct llama_context *ctx, const char *path, int32_t seq,
                          const int32_t *tokens, size_t n);
typedef size_t (*load_fn)(struct llama_context *ctx, const char *path, int32_t seq, int32_t *tokens,
                          size_t room, size_t *ret_n);

KV_API size_t llama_state_seq_save_file(struct llama_context *ctx, const char *path, int32_t seq,
                                        const int32_t *tokens, size_t n);
KV_API size_t llama_state_seq_load_file(struct llama_context *ctx, const char *path, int32_t seq,
                                        int32_t *tokens, size_t room, size_t *ret_n);

static struct kvs_store *store_; /* stays open until the process ends */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* Find libllama's own function: the next in the search order, or that of the caller's library. */
static void *own_function(const char *name, void *caller)
{
    void *found = dlsym(RTLD_NEXT, name), *library;
    Dl_info info;

    if (found || !dladdr(caller, &info) || !info.dli_fname)
        return found;
    library = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    if (!library)
        return NULL;
    found = dlsym(library, name);
    dlclose(library); /* the caller's, so it stays */
    return found;
}

/* The store of KV_LLAMA_STORE. NULL: not set, or it can't be opened (logged; tried again). */
static struct kvs_store *the_store(bool *ret_wanted)
{
    const char *uri = getenv("KV_LLAMA_STORE");
    struct kvs_store *store;
    int rc = 0;

    *ret_wanted = uri && *uri;
    if (!*ret_wanted)
        return NULL;
    pthread_mutex_lock(&lock);
    if (!store_)
        rc = kvs_open(uri, &store_);
    store = store_;
    pthread_mutex_unlock(&lock);
    if (rc)
        kv_log_error("llama", "the store of KV_LLAMA_STORE can't be opened", "error=\"%s\"",
                     strerror(-rc));
    return store;
}

static const char *name_of(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash ? slash + 1 : path;
}

static void log_failure(const char *what, const char *path, int rc)
{
    char quoted[400];

    kv_log_error("llama", what, "name=%s error=\"%s\"",
                 kv_log_quote(quoted, sizeof(quoted), name_of(path)), strerror(-rc));
}

/* A file in memory, and a path under which libllama opens it. */
struct scratch {
    int fd;
    char path[40];
};

static int scratch_open(struct scratch *s)
{
    s->fd = memfd_create("kvasir-llama-slot", MFD_CLOEXEC);
    if (s->fd < 0)
        return -errno;
    snprintf(s->path, sizeof(s->path), "/proc/self/fd/%d", s->fd);
    return 0;
}

static int64_t read_scratch(void *arg, void *buf, size_t cap)
{
    const struct scratch *s = arg;
    ssize_t n;

    do
        n = read(s->fd, buf, cap);
    while (n < 0 && errno == EINTR);
    return n < 0 ? -errno : n;
}

static int write_scratch(void *arg, const void *data, size_t len)
{
    const struct scratch *s = arg;

    for (const char *at = data; len;) {
        ssize_t n = write(s->fd, at, len);

        if (n < 0 && errno != EINTR)
            return -errno;
        at += n < 0 ? 0 : n;
        len -= n < 0 ? 0 : (size_t)n;
    }
    return 0;
}

static size_t save(struct kvs_store *store, save_fn own, struct llama_context *ctx,
                   const char *path, int32_t seq, const int32_t *tokens, size_t n)
{
    const struct kvs_save_opts opts = {.size = sizeof(opts),
                                       .format = KVS_FORMAT_LLAMA,
                                       .fingerprint = getenv("KV_LLAMA_FINGERPRINT")};
    struct scratch s;
    size_t written = 0;
    int rc = scratch_open(&s);

    if (!rc) {
        written = own(ctx, s.path, seq, tokens, n);
        if (written)
            rc = kvs_save(store, name_of(path), read_scratch, &s, &opts, NULL);
        close(s.fd);
    }
    if (rc)
        log_failure("a slot wasn't saved", path, rc);
    return rc ? 0 : written;
}

/* The first bytes of a slot file: magic, version, number of tokens; the tokens follow. */
enum { HEAD = 12, SEQUENCE_MAGIC = 0x67677371 };

struct head {
    uint8_t bytes[HEAD];
    size_t len;
};

static int keep_head(void *arg, const void *data, size_t len)
{
    struct head *head = arg;
    size_t n = KV_MIN(len, sizeof(head->bytes) - head->len);

    memcpy(head->bytes + head->len, data, n);
    head->len += n;
    return 0;
}

/* Length of what libllama reads of a slot file that has more tokens than @room, which it refuses then:
 * callers ask so for their number before they load. 0: all of the file. */
static uint64_t needed_bytes(struct kvs_store *store, const char *path, size_t room)
{
    const struct kvs_restore_opts opts = {.size = sizeof(opts), .length = HEAD};
    struct head head = {.len = 0};
    uint64_t n_tokens;

    if (kvs_restore(store, name_of(path), keep_head, &head, &opts, NULL) < 0 || head.len < HEAD ||
        kv_get_le(head.bytes, 4) != SEQUENCE_MAGIC)
        return 0;
    n_tokens = kv_get_le(head.bytes + 8, 4);
    return n_tokens > room ? HEAD + n_tokens * sizeof(int32_t) : 0;
}

static size_t load(struct kvs_store *store, load_fn own, struct llama_context *ctx,
                   const char *path, int32_t seq, int32_t *tokens, size_t room, size_t *ret_n)
{
    const struct kvs_restore_opts opts = {.size = sizeof(opts),
                                          .fingerprint = getenv("KV_LLAMA_FINGERPRINT"),
                                          .length = needed_bytes(store, path, room)};
    struct scratch s;
    size_t got = 0;
    int rc = scratch_open(&s);

    if (!rc) { /* libllama sees the file when all of it has verified */
        rc = kvs_restore(store, name_of(path), write_scratch, &s, &opts, NULL);
        if (!rc)
            got = own(ctx, s.path, seq, tokens, room, ret_n);
        close(s.fd);
    }
    if (rc)
        log_failure("a slot wasn't restored", path, rc);
    return got;
}

size_t llama_state_seq_save_file(struct llama_context *ctx, const char *path, int32_t seq,
                                 const int32_t *tokens, size_t n)
{
    save_fn own;
    bool wanted;
    struct kvs_store *store = the_store(&wanted);
    void *found = own_function("llama_state_seq_save_file", __builtin_return_address(0));

    memcpy(&own, &found, sizeof(own));
    if (!own || (wanted && !store))
        return 0;
    return store ? save(store, own, ctx, path, seq, tokens, n) : own(ctx, path, seq, tokens, n);
}

size_t llama_state_seq_load_file(struct llama_context *ctx, const char *path, int32_t seq,
                                 int32_t *tokens, size_t room, size_t *ret_n)
{
    load_fn own;
    bool wanted;
    struct kvs_store *store = the_store(&wanted);
    void *found = own_function("llama_state_seq_load_file", __builtin_return_address(0));

    memcpy(&own, &found, sizeof(own));
    if (!own || (wanted && !store))
        return 0;
    return store ? load(store, own, ctx, path, seq, tokens, room, ret_n)
                 : own(ctx, path, seq, tokens, room, ret_n);
}
