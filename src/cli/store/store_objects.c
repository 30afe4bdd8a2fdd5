// SPDX-License-Identifier: Apache-2.0
/* save, ls, show, rm. */
#include <fcntl.h>
#include <inttypes.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/show/format.h"
#include "cli/store/store.h"

/* -- save -------------------------------------------------------------------------------------- */

static int64_t read_fd(void *arg, void *buf, size_t cap)
{
    const int *fd = arg;
    ssize_t n;

    do
        n = read(*fd, buf, cap);
    while (n < 0 && errno == EINTR && !kc_bar_interrupted());
    return n < 0 ? (errno == EINTR ? -ECANCELED : -errno) : n;
}

static int open_input(const char *file, uint64_t *total)
{
    struct stat st = {0};
    int fd = strcmp(file, "-") == 0 ? dup(STDIN_FILENO) : open(file, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return -errno;
    if (fstat(fd, &st) == 0 && S_ISDIR(st.st_mode)) {
        close(fd);
        return -EISDIR;
    }
    if (S_ISREG(st.st_mode))
        *total = (uint64_t)st.st_size;
    return fd;
}

static enum kvs_format format_of(const char *name)
{
    return !name || strcmp(name, "auto") == 0 ? KVS_FORMAT_AUTO
           : strcmp(name, "llama") == 0       ? KVS_FORMAT_LLAMA
                                              : KVS_FORMAT_BYTES;
}

static int print_saved(struct kc_store_call *call, const struct kvs_result *r, double seconds)
{
    if (!call->opts.json) {
        kc_store_put_text(stdout, call->name);
        printf(": %s in %s chunks (%s), %s new in %s chunks; %s\n", kc_bytes((double)r->bytes).s,
               kc_count(r->n_chunks).s, kc_store_format_name(r->format),
               kc_bytes((double)r->new_bytes).s, kc_count(r->new_chunks).s,
               kc_duration((uint64_t)(seconds * 1e9)).s);
        return KC_STORE_OK;
    }
    kc_store_json_begin(call);
    kc_store_json_u64(call, "bytes", r->bytes);
    kc_store_json_u64(call, "chunks", r->n_chunks);
    kc_store_json_u64(call, "new_chunks", r->new_chunks);
    kc_store_json_u64(call, "new_bytes", r->new_bytes);
    kc_store_json_u64(call, "manifest_bytes", r->manifest_bytes);
    kc_store_json_str(call, "format", kc_store_format_name(r->format));
    kc_store_json_u64(call, "parsed_bytes", r->parsed_bytes);
    kc_store_json_double(call, "seconds", seconds);
    return kc_store_json_end(call, stdout, KC_STORE_OK);
}

int kc_store_save(struct kc_store_call *call)
{
    struct kvs_save_opts opts = {.size = sizeof(opts),
                                 .format = format_of(call->opts.format),
                                 .chunk_bytes = (uint32_t)call->opts.chunk,
                                 .chunk_tokens = (uint32_t)call->opts.chunk_tokens,
                                 .total_bytes = call->opts.total,
                                 .fingerprint = call->opts.fingerprint,
                                 .progress = kc_bar_progress,
                                 .progress_arg = &call->bar,
                                 .verify = call->opts.verify};
    struct kvs_result result = {.size = sizeof(result)};
    uint64_t start_ns = kv_now_ns();
    int fd = open_input(call->file, &opts.total_bytes), rc;

    if (fd < 0)
        return kc_store_fail_file(call, call->file, fd);
    rc = kvs_save(call->store, call->name, read_fd, &fd, &opts, &result);
    close(fd);
    kc_bar_finish(&call->bar);
    if (rc == -EINVAL && !*call->name)
        return kc_store_fail_as(call, "a name can't be empty", KC_STORE_FAILED);
    if (rc < 0) {
        rc = kc_store_fail(call, call->name, rc);
        return rc == KC_STORE_NOT_FOUND ? KC_STORE_FAILED : rc;
    }
    return print_saved(call, &result, (double)(kv_now_ns() - start_ns) / 1e9);
}

/* -- ls ---------------------------------------------------------------------------------------- */

struct listing {
    char **names;
    size_t n;
};

static int note_name(void *arg, const kv_store_entry *entry)
{
    struct listing *l = arg;
    char **names = realloc(l->names, (l->n + 1) * sizeof(*names));

    if (!names)
        return -ENOMEM;
    l->names = names;
    names[l->n] = strdup(entry->name ? entry->name : "");
    if (!names[l->n])
        return -ENOMEM;
    l->n++;
    return 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

/* Format a time: "2026-01-02 03:04". */
static struct kc_text day(uint64_t seconds)
{
    time_t t = (time_t)seconds;
    struct kc_text text = {"-"};
    struct tm tm;

    if (seconds && localtime_r(&t, &tm))
        strftime(text.s, sizeof(text.s), "%Y-%m-%d %H:%M", &tm);
    return text;
}

static void print_name(const char *name)
{
    kc_store_put_text(stdout, name);
    putchar('\n');
}

static void list_json(struct kc_store_call *call, const char *name, int rc,
                      const struct kvs_manifest *m)
{
    size_t n;

    kv_json_begin_object(&call->json);
    kc_store_json_str(call, "name", name);
    if (!call->opts.names) {
        kc_store_json_str(call, "format",
                          m                    ? kc_store_format_name(kvs_manifest_format(m))
                          : rc == -EMEDIUMTYPE ? "opaque"
                                               : "damaged");
        if (m) {
            kvs_manifest_chunks(m, &n);
            kc_store_json_u64(call, "bytes", kvs_manifest_bytes(m));
            kc_store_json_u64(call, "chunks", n);
            kc_store_json_u64(call, "created_s", kvs_manifest_created_s(m));
        }
    }
    kv_json_end_object(&call->json);
}

static void list_text(const struct kc_store_call *call, const char *name, int rc,
                      const struct kvs_manifest *m)
{
    if (!call->opts.names && m)
        printf("%10s  %-16s  %-7s  ", kc_bytes((double)kvs_manifest_bytes(m)).s,
               day(kvs_manifest_created_s(m)).s, kc_store_format_name(kvs_manifest_format(m)));
    else if (!call->opts.names)
        printf("%10s  %-16s  %-7s  ", "-", "-", rc == -EMEDIUMTYPE ? "opaque" : "damaged");
    print_name(name);
}

/*
 * List one object. Returns 1 when it is damaged, 0 when whole or removed meanwhile, else the
 * backend's error.
 */
static int list_one(struct kc_store_call *call, const char *name)
{
    struct kvs_manifest *m = NULL;
    int rc = call->opts.names ? 0 : kvs_manifest_get(call->store, name, &m);

    if (kc_bar_interrupted()) {
        kvs_manifest_free(m);
        return -ECANCELED;
    }
    if (rc == -ENOENT) /* removed since the listing */
        return 0;
    if (rc < 0 && rc != -EMEDIUMTYPE && rc != -EBADMSG)
        return rc;
    if (call->opts.json)
        list_json(call, name, rc, m);
    else
        list_text(call, name, rc, m);
    kvs_manifest_free(m);
    return rc == -EBADMSG;
}

int kc_store_ls(struct kc_store_call *call)
{
    struct listing l = {0};
    int rc =
            kvs_list_prefix(call->store, call->opts.prefix ? call->opts.prefix : "", note_name, &l),
        status = KC_STORE_OK;

    kc_store_json_begin(call);
    kv_json_key(&call->json, "objects");
    kv_json_begin_array(&call->json);
    if (rc >= 0 && l.n)
        qsort(l.names, l.n, sizeof(*l.names), by_name);
    for (size_t i = 0; i < l.n && rc >= 0; i++) {
        rc = list_one(call, l.names[i]);
        if (rc > 0)
            status = KC_STORE_PROBLEMS;
    }
    kv_json_end_array(&call->json);
    for (size_t i = 0; i < l.n; i++)
        free(l.names[i]);
    free(l.names);
    if (rc < 0)
        return kc_store_fail(call, call->label, rc);
    return call->opts.json ? kc_store_json_end(call, stdout, status) : status;
}

/* -- show, rm ---------------------------------------------------------------------------------- */

static void hex(const uint8_t key[16], char text[33])
{
    for (size_t i = 0; i < 16; i++)
        snprintf(text + 2 * i, 3, "%02x", key[i]);
}

static int show_json(struct kc_store_call *call, const struct kvs_manifest *m,
                     const struct kvs_chunk_ref *chunks, size_t n)
{
    char key[33];

    kc_store_json_begin(call);
    kc_store_json_str(call, "format", kc_store_format_name(kvs_manifest_format(m)));
    kc_store_json_u64(call, "bytes", kvs_manifest_bytes(m));
    kc_store_json_u64(call, "chunks", n);
    kc_store_json_u64(call, "created_s", kvs_manifest_created_s(m));
    kc_store_json_str(call, "fingerprint", kvs_manifest_fingerprint(m));
    if (call->opts.chunks) {
        kv_json_key(&call->json, "chunk_list");
        kv_json_begin_array(&call->json);
        for (size_t i = 0; i < n; i++) {
            hex(chunks[i].key, key);
            kv_json_begin_object(&call->json);
            kc_store_json_str(call, "key", key);
            kc_store_json_u64(call, "bytes", chunks[i].len);
            kv_json_end_object(&call->json);
        }
        kv_json_end_array(&call->json);
    }
    return kc_store_json_end(call, stdout, KC_STORE_OK);
}

static void show_text(const struct kc_store_call *call, const struct kvs_manifest *m,
                      const struct kvs_chunk_ref *chunks, size_t n)
{
    char key[33];

    printf("name         ");
    print_name(call->name);
    printf("format       %s\n", kc_store_format_name(kvs_manifest_format(m)));
    printf("bytes        %s (%s)\n", kc_count(kvs_manifest_bytes(m)).s,
           kc_bytes((double)kvs_manifest_bytes(m)).s);
    printf("chunks       %s\n", kc_count(n).s);
    printf("saved        %s\n", day(kvs_manifest_created_s(m)).s);
    printf("fingerprint  ");
    print_name(*kvs_manifest_fingerprint(m) ? kvs_manifest_fingerprint(m) : "-");
    for (size_t i = 0; call->opts.chunks && i < n; i++) {
        hex(chunks[i].key, key);
        printf("%s %10" PRIu32 "\n", key, chunks[i].len);
    }
}

int kc_store_show(struct kc_store_call *call)
{
    struct kvs_manifest *m;
    const struct kvs_chunk_ref *chunks;
    size_t n;
    int rc = kvs_manifest_get(call->store, call->name, &m), status = KC_STORE_OK;

    if (rc < 0)
        return kc_store_fail(call, call->name, rc);
    chunks = kvs_manifest_chunks(m, &n);
    if (call->opts.json)
        status = show_json(call, m, chunks, n);
    else
        show_text(call, m, chunks, n);
    kvs_manifest_free(m);
    return status;
}

/*
 * Remove an object, also one whose manifest is damaged. A backend without extensions doesn't say
 * why a manifest can't be read: there, remove it in any case.
 */
int kc_store_rm(struct kc_store_call *call)
{
    bool tells = kc_store_tells(call);
    void *manifest = NULL;
    size_t len;
    int rc = kvs_get_manifest(call->store, call->name, &manifest, &len), removed = 0;

    free(manifest);
    if (rc == 0 || rc == -EBADMSG || !tells)
        removed = kvs_delete_manifest(call->store, call->name);
    if (removed < 0 || (rc < 0 && rc != -EBADMSG))
        return kc_store_fail(call, call->name, removed < 0 ? removed : rc);
    if (!call->opts.json)
        return KC_STORE_OK;
    kc_store_json_begin(call);
    return kc_store_json_end(call, stdout, KC_STORE_OK);
}
