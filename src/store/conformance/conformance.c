// SPDX-License-Identifier: Apache-2.0
#include "store/conformance/conformance.h"

#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/xxh.h"
#include "store/backend/plugin.h"
#include "store/backend/store.h"

enum kvs_verdict kvs_conf_fail(struct kvs_conf *c, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(c->detail, sizeof(c->detail), fmt, args);
    va_end(args);
    return KVS_FAIL;
}

enum kvs_verdict kvs_conf_skip(struct kvs_conf *c, const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(c->detail, sizeof(c->detail), fmt, args);
    va_end(args);
    return KVS_SKIP;
}

enum kvs_verdict kvs_conf_advise(struct kvs_conf *c, const char *fmt, ...)
{
    va_list args;

    if (c->advice[0])
        return KVS_PASS; /* one at a time */
    va_start(args, fmt);
    vsnprintf(c->advice, sizeof(c->advice), fmt, args);
    va_end(args);
    return KVS_PASS;
}

/* Allocate or abort: the test kit can't report a check that ran out of memory. */
static void *or_die(void *memory)
{
    if (!memory)
        abort();
    return memory;
}

/* Append to one of the lists of struct kvs_conf. */
#define REMEMBER(list, n, item)                                        \
    do {                                                               \
        (list) = or_die(realloc((list), ((n) + 1) * sizeof(*(list)))); \
        (list)[(n)++] = (item);                                        \
    } while (0)

uint8_t *kvs_conf_alloc(struct kvs_conf *c, size_t len)
{
    uint8_t *block = or_die(calloc(1, len ? len : 1));

    REMEMBER(c->blocks, c->n_blocks, block);
    return block;
}

void kvs_conf_fill(uint8_t *data, size_t len, uint64_t seed)
{
    uint64_t state = seed * 2 + 1;

    for (size_t i = 0; i < len; i += sizeof(state)) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        memcpy(data + i, &state, KV_MIN(sizeof(state), len - i));
    }
}

uint8_t *kvs_conf_data(struct kvs_conf *c, size_t len, uint64_t seed)
{
    uint8_t *data = kvs_conf_alloc(c, len);

    kvs_conf_fill(data, len, seed);
    return data;
}

void kvs_conf_forget_key(struct kvs_conf *c, const struct kvs_conf_key *key)
{
    REMEMBER(c->keys, c->n_keys, *key);
}

void kvs_conf_forget_name(struct kvs_conf *c, const char *name)
{
    char *copy = or_die(strdup(name));

    REMEMBER(c->names, c->n_names, copy);
}

struct kvs_conf_key kvs_conf_key(struct kvs_conf *c, size_t len)
{
    struct kvs_conf_key key = {.len = len};
    uint64_t number = ++c->n_made;

    for (size_t i = 0; i < len; i += 8) {
        uint64_t part = kv_xxh64(&number, sizeof(number), c->run + i);

        memcpy(key.bytes + i, &part, KV_MIN(sizeof(part), len - i));
    }
    kvs_conf_forget_key(c, &key);
    return key;
}

const char *kvs_conf_name(struct kvs_conf *c, const char *suffix)
{
    size_t size = strlen(suffix) + 64;
    char *name = (char *)kvs_conf_alloc(c, size);

    snprintf(name, size, KVS_CONF_PREFIX "%016llx-%llu%s", (unsigned long long)c->run,
             (unsigned long long)++c->n_made, suffix);
    kvs_conf_forget_name(c, name);
    return name;
}

enum kvs_verdict kvs_conf_open(struct kvs_conf *c, kv_store_v1 **ret)
{
    kv_store_v1 *handle = c->vt->open(c->uri);

    if (!handle)
        return kvs_conf_fail(c, "open returned NULL");
    REMEMBER(c->handles, c->n_handles, handle);
    *ret = handle;
    return KVS_PASS;
}

void kvs_conf_close(struct kvs_conf *c, kv_store_v1 *handle)
{
    for (size_t i = 0; i < c->n_handles; i++)
        if (c->handles[i] == handle) {
            c->handles[i] = c->handles[--c->n_handles];
            c->vt->close(handle);
            break;
        }
    if (handle == c->h)
        c->h = NULL;
}

/* -- Calls, checked ---------------------------------------------------------------------------- */

enum kvs_verdict kvs_conf_put(struct kvs_conf *c, kv_store_v1 *h, const struct kvs_conf_key *key,
                              const void *data, size_t len, int want)
{
    int rc = c->vt->put_chunk(h, key->bytes, key->len, data, len);

    if (want < 0 ? rc != 0 && rc != 1 : rc != want)
        return kvs_conf_fail(c, "put_chunk (%zu bytes, key of %zu) returned %d, not %s", len,
                             key->len, rc,
                             want < 0 ? "0 or 1"
                             : want   ? "1"
                                      : "0");
    return KVS_PASS;
}

/* Compare the value that a get handed out with @data, and free it. */
static enum kvs_verdict compare(struct kvs_conf *c, const char *call, uint8_t *got, size_t got_len,
                                const void *data, size_t len)
{
    enum kvs_verdict verdict = KVS_PASS;

    if (!got && got_len == 0 && len == 0)
        return kvs_conf_advise(c, "%s of an empty value gave NULL: some consumers read from it",
                               call);
    if (!got)
        return kvs_conf_fail(c, "%s of %zu bytes gave a NULL pointer", call, len);
    if (got_len != len)
        verdict = kvs_conf_fail(c, "%s gave %zu bytes, not %zu", call, got_len, len);
    else if (len && memcmp(got, data, len) != 0)
        verdict = kvs_conf_fail(c, "%s of %zu bytes gave other bytes than were put", call, len);
    free(got);
    return verdict;
}

/* Check that a get failed. A backend should then leave the outputs unchanged. */
static enum kvs_verdict refused(struct kvs_conf *c, const char *call, int rc, uint8_t *out,
                                size_t len, const uint8_t *before)
{
    if (rc == 0 && out != before)
        free(out);
    if (rc >= 0)
        return kvs_conf_fail(c, "%s of a missing key returned %d, not an error", call, rc);
    if (out != before || len != 77)
        return kvs_conf_advise(c, "%s failed, but changed its outputs: some consumers free them",
                               call);
    return KVS_PASS;
}

enum kvs_verdict kvs_conf_get(struct kvs_conf *c, kv_store_v1 *h, const struct kvs_conf_key *key,
                              const void *data, size_t len)
{
    uint8_t *got = NULL;
    size_t got_len = SIZE_MAX;
    int rc = c->vt->get_chunk(h, key->bytes, key->len, &got, &got_len);

    if (rc != 0)
        return kvs_conf_fail(c, "get_chunk (%zu bytes, key of %zu) returned %d", len, key->len, rc);
    return compare(c, "get_chunk", got, got_len, data, len);
}

enum kvs_verdict kvs_conf_get_none(struct kvs_conf *c, kv_store_v1 *h,
                                   const struct kvs_conf_key *key)
{
    uint8_t mark, *out = &mark;
    size_t len = 77;
    int rc = c->vt->get_chunk(h, key->bytes, key->len, &out, &len);

    return refused(c, "get_chunk", rc, out, len, &mark);
}

enum kvs_verdict kvs_conf_publish(struct kvs_conf *c, kv_store_v1 *h, const char *name,
                                  const void *data, size_t len)
{
    int rc = c->vt->put_manifest(h, name, data, len);

    return rc == 0 ? KVS_PASS
                   : kvs_conf_fail(c, "put_manifest (%zu bytes) returned %d, not 0", len, rc);
}

enum kvs_verdict kvs_conf_read(struct kvs_conf *c, kv_store_v1 *h, const char *name,
                               const void *data, size_t len)
{
    uint8_t *got = NULL;
    size_t got_len = SIZE_MAX;
    int rc = c->vt->get_manifest(h, name, &got, &got_len);

    if (rc != 0)
        return kvs_conf_fail(c, "get_manifest (%zu bytes) returned %d", len, rc);
    return compare(c, "get_manifest", got, got_len, data, len);
}

enum kvs_verdict kvs_conf_read_none(struct kvs_conf *c, kv_store_v1 *h, const char *name)
{
    uint8_t mark, *out = &mark;
    size_t len = 77;
    int rc = c->vt->get_manifest(h, name, &out, &len);

    return refused(c, "get_manifest", rc, out, len, &mark);
}

enum kvs_verdict kvs_conf_delete(struct kvs_conf *c, kv_store_v1 *h, const char *name)
{
    int rc = c->vt->delete_manifest(h, name);

    return rc == 0 ? KVS_PASS : kvs_conf_fail(c, "delete_manifest returned %d, not 0", rc);
}

/* -- The run ----------------------------------------------------------------------------------- */

/* Remove, through a handle of its own, all objects that the check made. */
static void clean_up(struct kvs_conf *c)
{
    kv_store_v1 *h = c->n_names || c->n_keys ? c->vt->open(c->uri) : NULL;

    for (size_t i = 0; i < c->n_names; i++) {
        if (h)
            c->vt->delete_manifest(h, c->names[i]);
        free(c->names[i]);
    }
    if (h && KVS_CONF_HAS(c, delete_chunk))
        for (size_t i = 0; i < c->n_keys; i++)
            c->ext->delete_chunk(h, c->keys[i].bytes, c->keys[i].len);
    if (h)
        c->vt->close(h);
    for (size_t i = 0; i < c->n_handles; i++)
        c->vt->close(c->handles[i]);
    for (size_t i = 0; i < c->n_blocks; i++)
        free(c->blocks[i]);
    c->n_handles = c->n_blocks = c->n_names = c->n_keys = 0;
}

/* Run one check and report its verdict. Returns 1 when the check failed. */
static int run_check(struct kvs_conf *c, const struct kvs_conf_check *check, kvs_check_fn each,
                     void *arg)
{
    /* the first ABI check looks at the table, before any call */
    bool needs_handle = check != KVS_CONF_ABI;
    enum kvs_verdict verdict;

    c->detail[0] = c->advice[0] = '\0';
    verdict = needs_handle ? kvs_conf_open(c, &c->h) : KVS_PASS;
    if (verdict == KVS_PASS)
        verdict = check->run(c);
    clean_up(c);
    if (verdict == KVS_PASS) {
        memcpy(c->detail, c->advice, sizeof(c->detail));
        verdict = c->advice[0] ? KVS_ADVICE : KVS_PASS;
    }
    if (each)
        each(arg, check->name, verdict, c->detail);
    return verdict == KVS_FAIL;
}

const struct kvs_conf_check *const KVS_CONF_LISTS[KVS_CONF_N_LISTS] = {
    KVS_CONF_ABI,     KVS_CONF_CHUNKS, KVS_CONF_MANIFESTS, KVS_CONF_NAMES,
    KVS_CONF_THREADS, KVS_CONF_KILL,   KVS_CONF_EXT};

/* Run all checks but that of the table, or the one named @only. Returns the number that failed. */
static int run_lists(struct kvs_conf *c, const char *only, kvs_check_fn each, void *arg)
{
    uint64_t seed[2] = {kv_wall_ns(), (uint64_t)getpid()};
    int failed = 0;

    c->run = kv_xxh64(seed, sizeof(seed), 0);
    for (size_t i = 0; i < KVS_CONF_N_LISTS; i++)
        for (const struct kvs_conf_check *check = KVS_CONF_LISTS[i]; check->name; check++)
            if (check != KVS_CONF_ABI && (!only || strcmp(only, check->name) == 0))
                failed += run_check(c, check, each, arg);
    return failed;
}

static void fini(struct kvs_conf *c)
{
    kvs_conf_end_nursery(c);
    free(c->handles);
    free(c->blocks);
    free(c->names);
    free(c->keys);
}

/* Return true when the backend opens, closed again. */
static bool opens(const struct kvs_conf *c)
{
    kv_store_v1 *h = c->vt->open(c->uri);

    if (h)
        c->vt->close(h);
    return h;
}

int kvs_conf_run(const kv_store_vtable *vt, const kv_store_ext *ext, const char *uri,
                 const char *library, const char *only, kvs_check_fn each, void *arg)
{
    struct kvs_conf c = {.vt = vt, .ext = ext, .uri = uri, .library = library};
    int rc;

    kvs_conf_start_nursery(&c);
    rc = run_check(&c, KVS_CONF_ABI, each, arg);
    if (!rc) /* otherwise the other checks would crash */
        rc = opens(&c) ? run_lists(&c, only, each, arg) : -EIO;
    fini(&c);
    return rc;
}

/* Return the file of the plugin whose table this is; NULL: the backend is built in. */
static const char *library_of(const kv_store_vtable *vt)
{
    const char *base;
    Dl_info info;

    if (!dladdr(vt, &info) || !info.dli_fname)
        return NULL;
    base = strrchr(info.dli_fname, '/');
    base = base ? base + 1 : info.dli_fname;
    return strncmp(base, KV_STORE_LIBRARY_PREFIX, strlen(KV_STORE_LIBRARY_PREFIX)) == 0
               ? info.dli_fname
               : NULL;
}

int kvs_conformance(const char *uri, kvs_check_fn each, void *arg)
{
    struct kvs_conf c = {.uri = uri};
    struct kvs_plugin plugin; /* stays loaded until the end */
    struct kvs_store *store;
    kv_store_ext checked;
    int rc = kvs_find_backend(uri, &plugin);

    if (rc < 0)
        return rc;
    c.vt = plugin.table;
    if (plugin.ext && !kvs_plugin_check_ext(plugin.ext, &checked))
        c.ext = &checked;
    c.library = library_of(c.vt);
    kvs_conf_start_nursery(&c);
    /* Open it as users do, which logs why a table is refused, or why open fails. */
    rc = kvs_open_with(plugin.table, plugin.ext, uri, !plugin.library, &store);
    if (rc == 0) {
        kvs_close(store);
        rc = run_check(&c, KVS_CONF_ABI, each, arg);
    }
    if (rc == 0)
        rc = run_lists(&c, NULL, each, arg);
    fini(&c);
    kvs_plugin_unload(&plugin);
    return rc;
}
