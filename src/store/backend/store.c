// SPDX-License-Identifier: Apache-2.0
/* Opening a store, and the calls of the vtable with every returned value checked. */
#include "store/backend/store.h"

#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "store/backend/check.h"
#include "store/backend/file.h"
#include "store/backend/plugin.h"
#include "store/backend/uri.h"

enum { LABEL_MAX = 512 };

/* -- opening ----------------------------------------------------------------------------------- */

static int refuse(int rc, const char *uri, const char *why)
{
    char label[LABEL_MAX], quoted[LABEL_MAX], reason[LABEL_MAX];

    kvs_uri_redact(uri ? uri : "", label, sizeof(label));
    kv_log_error("store", "can't open the store", "store=%s reason=%s",
                 kv_log_quote(quoted, sizeof(quoted), label),
                 kv_log_quote(reason, sizeof(reason), why));
    return rc;
}

static void read_ext(struct kvs_store *store, const kv_store_ext *ext)
{
    const char *wrong = ext ? kvs_plugin_check_ext(ext, &store->ext) : NULL;

    if (wrong)
        kv_log_warn("store", "the backend's extensions are not used", "store=%s reason=\"%s\"",
                    store->label, wrong);
    else
        store->ext_table = ext;
}

/* Leave aside the calls that an open handle gains nothing by (kv_store_ext.h). */
static void choose_calls(struct kvs_store *store)
{
    if (!store->ext.is_near)
        return;
    if (store->ext.is_near(store->backend)) {
        store->batches = false;
        return;
    }
    store->ext.stream_chunk = NULL;
    store->ext.get_parts = NULL;
    store->ext.put_parts = NULL;
}

int kvs_open_with(const kv_store_vtable *table, const kv_store_ext *ext, const char *uri,
                  bool built_in, struct kvs_store **ret)
{
    struct kvs_store *store = calloc(1, sizeof(*store));
    char label[LABEL_MAX], quoted[LABEL_MAX];
    const char *wrong;
    int rc;

    if (!store)
        return -ENOMEM;
    wrong = kvs_plugin_check(table, &store->calls);
    if (wrong) {
        rc = refuse(-EPROTO, uri, wrong);
        goto fail;
    }
    kvs_uri_redact(uri, label, sizeof(label));
    store->label = strdup(kv_log_quote(quoted, sizeof(quoted), label));
    rc = -ENOMEM;
    if (!store->label)
        goto fail;
    store->table = table;
    read_ext(store, ext);
    /* the file store gains nothing: it writes files one by one */
    store->batches = store->ext.put_chunks && !built_in;
    errno = 0;
    store->backend = store->calls.open(uri);
    if (!store->backend) {
        rc = (built_in || ext) && errno > 0 ? -errno : -EIO;
        if (!built_in)
            refuse(rc, uri, "its plugin refused it, and says why on stderr");
        goto fail;
    }
    choose_calls(store);
    store->pid = getpid();
    *ret = store;
    return 0;

fail:
    kvs_close(store);
    return rc;
}

int kvs_find_backend(const char *uri, struct kvs_plugin *ret)
{
    struct kvs_uri parts;
    const char *why;
    int rc = kvs_uri_parse(uri, &parts, &why);

    if (rc)
        return refuse(rc, uri, why);
    if (!parts.path)
        return kvs_plugin_load(parts.scheme, ret);
    *ret = (struct kvs_plugin){.table = kvs_file_vtable(), .ext = kvs_file_ext()};
    return 0;
}

int kvs_open(const char *uri, struct kvs_store **ret)
{
    struct kvs_plugin plugin;
    int rc = kvs_find_backend(uri, &plugin);

    if (rc)
        return rc;
    rc = kvs_open_with(plugin.table, plugin.ext, uri, !plugin.library, ret);
    if (rc)
        kvs_plugin_unload(&plugin);
    else
        (*ret)->library = plugin.library;
    return rc;
}

int kvs_open_existing(const char *uri, struct kvs_store **ret)
{
    struct kvs_uri parts;
    const char *why, *mark;
    char *path;
    int rc;

    if (kvs_uri_parse(uri, &parts, &why) != 0 || !parts.path)
        return kvs_open(uri, ret);
    mark = strrchr(uri, '?');
    if (asprintf(&path, "%s%screate=no", uri, mark && strchr(mark, '=') ? "&" : "?") < 0)
        return -ENOMEM;
    rc = kvs_open(path, ret);
    free(path);
    return rc;
}

/* Flush what was put and not published, or log how much is dropped. */
static void flush_rest(struct kvs_store *store)
{
    uint64_t n = atomic_load_explicit(&store->unflushed, memory_order_relaxed);
    int rc;

    if (!n || store->by_hand || store->pid != getpid())
        return;
    if (!store->ext.flush) {
        kv_log_warn("store", "the backend has no flush: chunks without a manifest may be dropped",
                    "store=%s chunks=%" PRIu64, store->label, n);
        return;
    }
    rc = kvs_flush(store);
    if (rc < 0)
        kv_log_error("store", "chunks are lost: they could not be flushed at close",
                     "store=%s chunks=%" PRIu64 " error=\"%s\"", store->label, n, strerror(-rc));
}

void kvs_close(struct kvs_store *store)
{
    struct kvs_plugin plugin;

    if (!store)
        return;
    if (store->backend)
        flush_rest(store);
    if (store->backend)
        store->calls.close(store->backend);
    plugin = (struct kvs_plugin){.library = store->library};
    kvs_plugin_unload(&plugin);
    free(store->label);
    free(store);
}

kv_store_v1 *kvs_backend(struct kvs_store *store, const kv_store_vtable **ret_vtable,
                         const kv_store_ext **ret_ext)
{
    if (ret_vtable)
        *ret_vtable = store->table;
    if (ret_ext)
        *ret_ext = store->ext_table ? &store->ext : NULL;
    return store->backend;
}

/* -- checking a backend's results -------------------------------------------------------------- */

int kvs_broken(const struct kvs_store *store, const char *call, const char *what)
{
    kv_log_error("store", "the backend broke its contract", "store=%s call=%s reason=\"%s\"",
                 store->label, call, what);
    return -EPROTO;
}

int kvs_check_rc(const struct kvs_store *store, const char *call, int rc, int max)
{
    if (rc > max)
        return kvs_broken(store, call, "unknown return value");
    if (rc >= 0)
        return rc;
    /* The ABI leaves the values open; backends with extension tables promise errno. */
    return store->ext_table && rc >= -4095 ? rc : -EIO;
}

/* True when malloc_usable_size belongs to the malloc in use, which a program may have replaced. */
static bool usable_size_known(void)
{
    void *probe = malloc(100);
    size_t usable = probe ? malloc_usable_size(probe) : 0;

    free(probe);
    return usable >= 100 && usable <= 4096;
}

const char *kvs_check_value(void **data, size_t len)
{
    if (!*data && len == 0)
        *data = malloc(1); /* tolerated: some backends return NULL for empty values */
    if (!*data)
        return "a value without bytes";
    if (len > KVS_VALUE_MAX)
        return "a value's length is above every limit";
    if (len > malloc_usable_size(*data) && usable_size_known())
        return "a value is longer than its buffer";
    return NULL;
}

/* Check the result of a get: the backend returned @rc and left @data and @len. */
static int take_value(const struct kvs_store *store, const char *call, int rc, uint8_t *data,
                      size_t len, void **ret, size_t *ret_len)
{
    void *value = data;
    const char *wrong;

    if (rc > 0)
        return kvs_broken(store, call, "unknown return value");
    /* without ext, a miss and a failure look alike; the backend's own log has the reason */
    if (rc < 0)
        return store->ext_table ? kvs_check_rc(store, call, rc, 0) : -ENOENT;
    wrong = kvs_check_value(&value, len);
    if (wrong) {
        free(value);
        return kvs_broken(store, call, wrong);
    }
    *ret = value;
    *ret_len = len;
    return 0;
}

/* -- chunks and manifests ---------------------------------------------------------------------- */

bool kvs_hashes_ok(const void *hashes, size_t hash_len, size_t n)
{
    return n == 0 ||
           (hashes && hash_len > 0 && hash_len <= KVS_HASH_MAX && n <= SIZE_MAX / hash_len);
}

static bool name_ok(const char *name)
{
    return name && *name;
}

/* Return a pointer that isn't NULL: backends need not know that memcpy from NULL is undefined even
 * for no bytes. */
static const uint8_t *bytes_of(const void *data)
{
    return data ? data : (const uint8_t *)"";
}

int kvs_put_chunk_of_save(struct kvs_store *store, const void *hash, size_t hash_len,
                          const void *data, size_t len)
{
    int rc;

    if (!kvs_hashes_ok(hash, hash_len, 1) || (!data && len > 0) || len > KVS_VALUE_MAX)
        return -EINVAL;
    rc = store->calls.put_chunk(store->backend, hash, hash_len, bytes_of(data), len);
    return kvs_check_rc(store, "put_chunk", rc, 1);
}

int kvs_put_chunk(struct kvs_store *store, const void *hash, size_t hash_len, const void *data,
                  size_t len)
{
    int rc = kvs_put_chunk_of_save(store, hash, hash_len, data, len);

    kvs_note_put(store, rc);
    return rc;
}

int kvs_get_chunk(struct kvs_store *store, const void *hash, size_t hash_len, void **ret,
                  size_t *ret_len)
{
    uint8_t *data = NULL;
    size_t len = 0;
    int rc;

    if (!kvs_hashes_ok(hash, hash_len, 1))
        return -EINVAL;
    rc = store->calls.get_chunk(store->backend, hash, hash_len, &data, &len);
    return take_value(store, "get_chunk", rc, data, len, ret, ret_len);
}

int kvs_put_manifest(struct kvs_store *store, const char *name, const void *data, size_t len)
{
    struct kvs_unflushed before;
    int rc;

    if (!name_ok(name) || (!data && len > 0) || len > KVS_VALUE_MAX)
        return -EINVAL;
    before = kvs_take_unflushed(store);
    rc = store->calls.put_manifest(store->backend, name, bytes_of(data), len);
    rc = kvs_check_rc(store, "put_manifest", rc, 0);
    if (rc < 0)
        kvs_give_unflushed(store, before);
    return rc;
}

int kvs_get_manifest(struct kvs_store *store, const char *name, void **ret, size_t *ret_len)
{
    uint8_t *data = NULL;
    size_t len = 0;
    int rc;

    if (!name_ok(name))
        return -EINVAL;
    rc = store->calls.get_manifest(store->backend, name, &data, &len);
    return take_value(store, "get_manifest", rc, data, len, ret, ret_len);
}

int kvs_delete_manifest(struct kvs_store *store, const char *name)
{
    int rc;

    if (!name_ok(name))
        return -EINVAL;
    rc = store->calls.delete_manifest(store->backend, name);
    rc = kvs_check_rc(store, "delete_manifest", rc, 0);
    return rc == -ENOENT ? 0 : rc; /* a missing manifest is success for every backend */
}

int kvs_prefetch(struct kvs_store *store, const void *hashes, size_t hash_len, size_t n)
{
    int rc;

    if (!kvs_hashes_ok(hashes, hash_len, n))
        return -EINVAL;
    if (n == 0 || !store->calls.prefetch_chunks)
        return 0;
    rc = store->calls.prefetch_chunks(store->backend, hashes, hash_len, n);
    return kvs_check_rc(store, "prefetch_chunks", rc, 0);
}
