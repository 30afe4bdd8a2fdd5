// SPDX-License-Identifier: Apache-2.0
/* Plugins: where the library looks for them, and its answers to those that break the contract. */
#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "memory_backend.h"
#include "skip.h"
#include "store/backend/plugin.h"
#include "support.h"

static struct {
    int n;
    char last[4200];
} lines;

static char folder[64];
static char plugins[4096]; /* where the build put broken_plugin.c and silent_plugin.c */

static void collect(void *arg, int level, const char *line)
{
    (void)arg;
    if (level > 1)
        return;
    lines.n++;
    snprintf(lines.last, sizeof(lines.last), "%s", line);
}

static int set_up(void **state)
{
    const char *build = getenv("KV_BUILD_DIR");
    (void)state;

    snprintf(plugins, sizeof(plugins), "%s/tests/plugins", build ? build : "build");
    if (temp_dir(folder, sizeof(folder)) < 0)
        return -1;
    setenv("KV_STORE_LIBRARY_PATH", folder, 1);
    unsetenv("BROKEN_TABLE");
    unsetenv("BROKEN_EXT");
    lines.n = 0;
    kvs_set_log(collect, NULL);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    kvs_set_log(NULL, NULL);
    memory_forget_all();
    return remove_dir(folder);
}

/* One call that must fail with one line that has @part in it. */
static void refused(const char *uri, int rc, const char *part)
{
    struct kvs_store *store = (struct kvs_store *)&lines;
    int before = lines.n;

    assert_int_equal(kvs_open(uri, &store), rc);
    assert_ptr_equal(store, &lines);
    assert_int_equal(lines.n, before + 1);
    if (!strstr(lines.last, part))
        fail_msg("no \"%s\" in: %s", part, lines.last);
}

static struct kvs_store *opened(const char *uri)
{
    struct kvs_store *store = NULL;

    if (kvs_open(uri, &store))
        fail_msg("%s: %s", uri, lines.last);
    return store;
}

static void put_file(const char *name, const char *content)
{
    char path[4096];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", folder, name);
    file = fopen(path, "w");
    assert_non_null(file);
    fputs(content, file);
    fclose(file);
}

static void link_plugin(const char *from, const char *to)
{
    char source[4200], target[4200];

    snprintf(source, sizeof(source), "%s/%s", plugins, from);
    snprintf(target, sizeof(target), "%s/%s", folder, to);
    assert_int_equal(access(source, R_OK), 0);
    assert_int_equal(symlink(source, target), 0);
}

/* -- URIs -------------------------------------------------------------------------------------- */

static void test_uris(void **state)
{
    (void)state;
    refused(NULL, -EINVAL, "empty");
    refused("", -EINVAL, "empty");
    refused("://x", -EINVAL, "invalid scheme");
    refused("Broken://x", -EINVAL, "invalid scheme");
    refused("1broken://x", -EINVAL, "invalid scheme");
    refused("bro/ken://x", -EINVAL, "invalid scheme");
    refused("bro ken://x", -EINVAL, "invalid scheme");
    refused("abcdefghijklmnopqrstuvwxyzabcdefghijklm://x", -EINVAL, "too long");
    refused("broken://a\nb", -EINVAL, "control character");
    refused("file:/tmp/x", -EINVAL, "neither");
    refused("file:///tmp/x", -EINVAL, "a directory is named by its path, without file://");
    refused("redis:6379", -EINVAL, "store=redis:6379 reason=\"neither");
    refused("redis:user:geheim@host/0", -EINVAL, "store=redis:***@host/0 reason=\"neither");
    refused("redis:/user:geh/eim@host/0", -EINVAL, "store=redis:/***@host/0 reason=\"neither");
    refused("tiered:kv.conf", -EINVAL, "neither"); /* by its absolute path, or not at all */
    refused("tiered:./kv.conf", -EINVAL, "neither");
    refused("tier:/kv.conf", -EINVAL, "neither");
    refused("tiered:/nosuch/kv.conf", -EIO, "store=tiered:/nosuch/kv.conf");
    refused("nosuch://x", -ENOENT, "libkv_store_nosuch.so");
    refused("broken://user:geheim@host/0", -EINVAL, "password");
    assert_null(strstr(lines.last, "geheim"));
    refused("broken://host/refuse?password=geheim", -EIO, "broken://host/refuse");
    assert_null(strstr(lines.last, "geheim"));
    refused("broken://geheim@host/refuse#geheim", -EIO, "broken://***@host/refuse");
    assert_null(strstr(lines.last, "geheim"));
    /* Passwords as people choose them. */
    refused("broken://user:gehe/im@host/0", -EINVAL, "password");
    assert_null(strstr(lines.last, "gehe"));
    assert_null(strstr(lines.last, "im@"));
    refused("broken://user:gehe?im@host/0", -EINVAL, "password");
    assert_null(strstr(lines.last, "gehe"));
    refused("broken://user:gehe#im@host", -EINVAL, "password");
    assert_null(strstr(lines.last, "gehe"));
    refused("broken://user:ge@he/im@host/0", -EINVAL, "store=broken://***@host/0");
    refused("broken://us@er:geheim@host/0", -EINVAL, "store=broken://***@host/0");
    refused("broken://us@er:geh/eim@host/0", -EINVAL, "store=broken://***@host/0");
    refused("broken://[us:]@:geheim@host/0", -EINVAL, "store=broken://***@host/0");
    refused("broken://:12/geheim@host/refuse", -EIO, "store=broken://***@host/refuse");
    refused("broken://[::1]:6379/refuse", -EIO, "store=broken://[::1]:6379/refuse");
    refused("broken://host:1/refuse?a=geheim@b", -EIO, "store=broken://***");
    assert_null(strstr(lines.last, "geheim"));
    refused("broken://host/re@fuse/refuse", -EIO, "store=broken://host/re@fuse/refuse");
    refused("", -EINVAL, "reason=empty"); /* a line ends where it ends, after longer ones */
    assert_string_equal(strstr(lines.last, "reason="), "reason=empty");
}

/* A path needs no plugin; what is wrong with it is the system's own answer. */
static void test_paths(void **state)
{
    char path[128];
    void *data;
    size_t len;
    (void)state;

    snprintf(path, sizeof(path), "%s/a://b?limit=1073741824", folder);
    for (int i = 0; i < 2; i++) {
        struct kvs_store *store = opened(path);

        assert_int_equal(kvs_put_manifest(store, "name", "x", 1), 0);
        assert_int_equal(kvs_get_manifest(store, "name", &data, &len), 0);
        free(data);
        kvs_close(store);
    }
    *strchr(path, '?') = '\0';
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(lines.n, 0);
    refused("/dev/null/store", -ENOTDIR, "dir=/dev/null/store error=");
    refused("/tmp/x?limit=much", -EINVAL, "option=limit value=much wanted=\"a size");
    refused("/tmp/x?zstd=99", -EINVAL, "option=zstd value=99 wanted=\"0 to 19\"");
    refused("/tmp/x?zstd=1&sync", -EINVAL, "option=sync value=\"\" wanted=\"auto, files or fs\"");
    refused("/tmp/x?sums=no", -EINVAL, "option=sums value=no wanted=\"auto or files\"");
    refused("/tmp/x?create=1", -EINVAL, "option=create value=1 wanted=\"yes or no\"");
    refused("/tmp/x?bogus=1", -EINVAL, "option=bogus known=\"limit, zstd, sync, sums, create\"");
    refused("?limit=1", -EINVAL, "path");
}

/* The backend gets the URI byte for byte as the user wrote it. */
static void test_uri_unchanged(void **state)
{
    static const char *const uris[] = {"broken://", "broken://Host:1/a b//", "broken://u@h/?x=@:#y",
                                       "broken:///tmp/sock", "broken+tls://h/%2F/"};
    (void)state;

    link_plugin("libkv_store_broken.so", "libkv_store_broken.so");
    for (size_t i = 0; i < sizeof(uris) / sizeof(*uris); i++) {
        struct kvs_store *store = opened(uris[i]);
        void *data;
        size_t len;

        assert_int_equal(kvs_get_manifest(store, "uri", &data, &len), 0);
        assert_int_equal(len, strlen(uris[i]));
        assert_memory_equal(data, uris[i], len);
        free(data);
        kvs_close(store);
    }
}

/* -- where plugins are looked for -------------------------------------------------------------- */

static void test_search(void **state)
{
    (void)state;
    /* Not in the folder, nor without one: where the loader looks (this program's RPATH). */
    kvs_close(opened("broken://x"));
    unsetenv("KV_STORE_LIBRARY_PATH");
    kvs_close(opened("broken://x"));
    setenv("KV_STORE_LIBRARY_PATH", "", 1);
    kvs_close(opened("broken://x"));
    setenv("KV_STORE_LIBRARY_PATH", "/nonexistent", 1);
    kvs_close(opened("broken://x"));
    /* A file in the folder is used first, good or bad. */
    setenv("KV_STORE_LIBRARY_PATH", folder, 1);
    put_file("libkv_store_broken.so", "not a library");
    refused("broken://x", -EPROTO, folder);
    refused("broken+tls://x", -EPROTO, folder);
    /* A library of the very name comes before what the scheme is an alias of. */
    link_plugin("libkv_store_broken.so", "libkv_store_broken+tls.so");
    kvs_close(opened("broken+tls://x"));
    /* rediss is redis with TLS, wherever the plugin comes from. */
    link_plugin("libkv_store_broken.so", "libkv_store_redis.so");
    kvs_close(opened("rediss://x"));
    kvs_close(opened("redis+cluster://x"));
    kvs_close(opened("rediss+cluster://x"));
    assert_int_equal(lines.n, 2);
}

/* A link to nothing is a broken file, not a missing one. */
static void test_dangling_link(void **state)
{
    char path[4200];

    (void)state;
    snprintf(path, sizeof(path), "%s/libkv_store_broken.so", folder);
    assert_int_equal(symlink("/nonexistent", path), 0);
    refused("broken://x", -EPROTO, folder);
    assert_int_equal(unlink(path), 0);
    assert_int_equal(symlink("libkv_store_broken.so", path), 0); /* to itself */
    refused("broken://x", -EPROTO, folder);
}

/* Open a store by the library under another path; returns the error. Ends in folder/other. */
static int open_by(const char *path)
{
    int (*open)(const char *uri, struct kvs_store **ret);
    void (*set_log)(void (*log)(void *arg, int level, const char *line), void *arg);
    struct kvs_store *store = NULL;
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    int rc;

    if (!handle)
        fail_msg("%s", dlerror());
    assert_int_equal(chdir("other"), 0);
    *(void **)&open = dlsym(handle, "kvs_open");
    *(void **)&set_log = dlsym(handle, "kvs_set_log");
    set_log(collect, NULL);
    rc = open("nosuch://x", &store);
    set_log(NULL, NULL);
    dlclose(handle);
    assert_int_equal(chdir(".."), 0);
    return rc;
}

/* Beside the library nothing is loaded from the current folder, when it was opened by a relative
 * path, nor from a folder that everybody can write to. */
static void test_beside_the_library(void **state)
{
    char library[PATH_MAX], cwd[PATH_MAX], path[4200], command[3 * PATH_MAX];

    (void)state;
    snprintf(path, sizeof(path), "%s/../../lib/libkvstore.so", plugins);
    if (!realpath(path, library))
        skip_because("%s isn't built", path);
    snprintf(path, sizeof(path), "%s/two.so", folder);
    snprintf(command, sizeof(command), "cp '%s' %s/one.so && cp '%s' %s/two.so", library, folder,
             library, folder); /* two libraries to the loader */
    assert_int_equal(system(command), 0);
    assert_non_null(getcwd(cwd, sizeof(cwd)));
    assert_int_equal(chdir(folder), 0);
    assert_int_equal(mkdir("other", 0700), 0);
    put_file("other/libkv_store_nosuch.so", "not a library");
    unsetenv("KV_STORE_LIBRARY_PATH");
    assert_int_equal(open_by("./one.so"), -ENOENT);
    put_file("libkv_store_nosuch.so", "not a library");
    assert_int_equal(open_by(path), -EPROTO);
    assert_int_equal(chmod(folder, 0777), 0);
    assert_int_equal(open_by(path), -ENOENT);
    assert_int_equal(chdir(cwd), 0);
}

/* Nor from a folder of another user, unless that user is the owner of the library, too. */
static void test_beside_the_library_of_others(void **state)
{
    enum { STRANGER = 12345 };
    char library[PATH_MAX], cwd[PATH_MAX], path[4200], command[3 * PATH_MAX];

    (void)state;
    snprintf(path, sizeof(path), "%s/../../lib/libkvstore.so", plugins);
    if (!realpath(path, library))
        skip_because("%s isn't built", path);
    if (geteuid() != 0)
        skip_because("only root can give a folder away");
    snprintf(path, sizeof(path), "%s/three.so", folder);
    snprintf(command, sizeof(command), "cp '%s' %s", library, path);
    assert_int_equal(system(command), 0);
    assert_non_null(getcwd(cwd, sizeof(cwd)));
    assert_int_equal(chdir(folder), 0);
    assert_int_equal(mkdir("other", 0700), 0);
    put_file("libkv_store_nosuch.so", "not a library");
    unsetenv("KV_STORE_LIBRARY_PATH");
    assert_int_equal(open_by(path), -EPROTO); /* of root */
    assert_int_equal(chown(folder, STRANGER, STRANGER), 0);
    assert_int_equal(open_by(path), -ENOENT);
    assert_int_equal(chown(path, STRANGER, STRANGER), 0);
    assert_int_equal(open_by(path), -EPROTO);
    assert_int_equal(chmod(folder, 0707), 0);
    assert_int_equal(open_by(path), -ENOENT);
    assert_int_equal(chown(folder, 0, 0), 0);
    assert_int_equal(chdir(cwd), 0);
}

/* Plugins built, or installed, with a program need no variable: here build/lib beside build/tests. */
static void test_beside_the_program(void **state)
{
    struct kvs_plugin plugin = {0};
    char wanted[PATH_MAX], got[PATH_MAX];
    struct link_map *map;
    (void)state;

    assert_non_null(realpath(plugins, wanted));
    strcpy(strstr(wanted, "/tests/plugins"), "/lib/libkv_store_s3.so");
    if (access(wanted, F_OK) != 0)
        skip_because("%s isn't built", wanted);
    unsetenv("KV_STORE_LIBRARY_PATH");
    assert_int_equal(kvs_plugin_load("s3", &plugin), 0);
    assert_int_equal(dlinfo(plugin.library, RTLD_DI_LINKMAP, &map), 0);
    assert_non_null(realpath(map->l_name, got));
    assert_string_equal(got, wanted);
    kvs_plugin_unload(&plugin);
    put_file("libkv_store_s3.so", "not a library"); /* the variable's folder comes first */
    setenv("KV_STORE_LIBRARY_PATH", folder, 1);
    assert_int_equal(kvs_plugin_load("s3", &plugin), -EPROTO);
}

/* A broken library in the loader's path is refused like one in the folder, not taken for
 * missing. */
static void test_broken_in_the_loaders_path(void **state)
{
    char path[4200];
    FILE *file;
    (void)state;

    snprintf(path, sizeof(path), "%s/libkv_store_ruin.so", plugins); /* in this program's RPATH */
    file = fopen(path, "w");
    assert_non_null(file);
    fputs("not a library", file);
    fclose(file);
    setenv("KV_STORE_LIBRARY_PATH", "/nonexistent", 1);
    refused("ruin://x", -EPROTO, "libkv_store_ruin.so");
    refused("ruin+tls://x", -EPROTO, "libkv_store_ruin.so");
    unlink(path);
    refused("ruin://x", -ENOENT, "libkv_store_ruin.so");
}

static void test_no_plugin(void **state)
{
    (void)state;
    put_file("libkv_store_text.so", "not a library");
    refused("text://x", -EPROTO, "libkv_store_text.so");
    put_file("libkv_store_empty.so", "");
    refused("empty://x", -EPROTO, "libkv_store_empty.so");
    link_plugin("libkv_store_silent.so", "libkv_store_silent.so");
    refused("silent://x", -EPROTO, "kv_store_get_vtable");
}

/* -- tables ------------------------------------------------------------------------------------ */

static void test_tables(void **state)
{
    char hole[16];
    (void)state;

    setenv("BROKEN_TABLE", "null", 1);
    refused("broken://x", -EPROTO, "NULL");
    setenv("BROKEN_TABLE", "v0", 1);
    refused("broken://x", -EPROTO, "version 0");
    for (int i = 0; i < 7; i++) {
        snprintf(hole, sizeof(hole), "hole%d", i);
        setenv("BROKEN_TABLE", hole, 1);
        refused("broken://x", -EPROTO, "required function");
    }
    setenv("BROKEN_TABLE", "hole7", 1); /* prefetch_chunks, which may be missing */
    kvs_close(opened("broken://x"));
    setenv("BROKEN_TABLE", "v99", 1); /* newer: begins with what is known */
    kvs_close(opened("broken://x"));
    unsetenv("BROKEN_TABLE");
    refused("broken://refuse", -EIO, "refused");
}

/* The fields after a table's end aren't read: the sanitizer would see it. */
static void test_short_tables(void **state)
{
    const size_t v1 = offsetof(kv_store_vtable, prefetch_chunks);
    const size_t two = offsetof(kv_store_ext, put_chunks);
    kv_store_vtable whole = *memory_vtable();
    kv_store_ext whole_ext = *memory_ext();
    const kv_store_vtable *table;
    const kv_store_ext *ext;
    const kv_store_ext *seen;
    struct kvs_store *store;
    (void)state;

    whole.version = KV_STORE_VERSION_1;
    whole_ext.size = two + 4; /* with half of the next pointer */
    table = (const void *)memory_copy(&whole, v1);
    ext = (const void *)memory_copy(&whole_ext, two + 4);
    assert_int_equal(kvs_open_with(table, ext, "memory://short", false, &store), 0);
    assert_int_equal(kvs_prefetch(store, "12345678", 8, 1), 0);
    assert_int_equal(memory_space("memory://short")->prefetched, 0);
    kvs_backend(store, NULL, &seen);
    assert_ptr_equal(seen->exists_chunks, memory_exists_chunks);
    assert_ptr_equal(seen->get_chunks, memory_get_chunks);
    assert_null(seen->put_chunks);
    assert_null(seen->stats);
    assert_int_equal(kvs_delete_chunk(store, "12345678", 8), -ENOTSUP);
    kvs_close(store);
    free((void *)ext);
    free((void *)table);
}

static void test_version_1(void **state)
{
    struct kvs_store *store;
    (void)state;

    store = opened("broken://rc7");
    assert_int_equal(kvs_prefetch(store, "12345678", 8, 1), -EPROTO);
    kvs_close(store);
    setenv("BROKEN_TABLE", "v1", 1);
    store = opened("broken://rc7");
    assert_int_equal(kvs_prefetch(store, "12345678", 8, 1), 0); /* not called */
    kvs_close(store);
}

static void test_ext_tables(void **state)
{
    static const char *const bad[] = {"short", "v9"};
    const kv_store_ext *ext;
    struct kvs_store *store;
    (void)state;

    for (int i = 0; i < 2; i++) {
        setenv("BROKEN_EXT", bad[i], 1);
        store = opened("broken://x"); /* it works without */
        assert_int_equal(lines.n, i + 1);
        assert_non_null(strstr(lines.last, "extension"));
        kvs_backend(store, NULL, &ext);
        assert_null(ext);
        assert_int_equal(kvs_flush(store), 0);
        kvs_close(store);
    }
}

/* -- what functions return --------------------------------------------------------------------- */

static void check_get(const char *uri, int rc, int n_lines)
{
    struct kvs_store *store = opened(uri);
    void *data = &lines;
    size_t len = 77;

    for (int i = 0; i < 2; i++) {
        int before = lines.n;
        int got = i == 0 ? kvs_get_chunk(store, "12345678", 8, &data, &len)
                         : kvs_get_manifest(store, "name", &data, &len);

        assert_int_equal(got, rc);
        assert_ptr_equal(data, &lines); /* outputs on success only */
        assert_int_equal(len, 77);
        assert_int_equal(lines.n, before + n_lines);
    }
    kvs_close(store);
}

static void check_put(const char *uri, int rc, int n_lines)
{
    struct kvs_store *store = opened(uri);
    int before = lines.n;

    assert_int_equal(kvs_put_chunk(store, "12345678", 8, "x", 1), rc);
    assert_int_equal(kvs_put_manifest(store, "name", "x", 1), rc);
    assert_int_equal(kvs_delete_manifest(store, "name"), rc);
    assert_int_equal(lines.n, before + 3 * n_lines);
    kvs_close(store);
}

static void test_results(void **state)
{
    struct kvs_store *store;
    void *data;
    size_t len;
    (void)state;

    check_put("broken://rc7", -EPROTO, 1);
    check_put("broken://fail", -EIO, 0);
    check_put("broken://wild", -EIO, 0);
    check_get("broken://rc7", -EPROTO, 1);
    check_get("broken://fail", -ENOENT, 0);
    check_get("broken://wild", -ENOENT, 0);
    check_get("broken://huge", -EPROTO, 1);
    assert_non_null(strstr(lines.last, "above every limit"));
    check_get("broken://huge-null", -EPROTO, 1);
    check_get("broken://null", -EPROTO, 1);
    check_get("broken://long", -EPROTO, 1);
    /* "Nothing, of length 0" is what some answer for an empty value: it can be dereferenced. */
    store = opened("broken://nothing");
    assert_int_equal(kvs_get_chunk(store, "12345678", 8, &data, &len), 0);
    assert_int_equal(len, 0);
    assert_non_null(data);
    free(data);
    /* And nothing, of length 0, reaches the backend as a pointer. */
    assert_int_equal(kvs_put_chunk(store, "12345678", 8, NULL, 0), 0);
    assert_int_equal(kvs_put_manifest(store, "name", NULL, 0), 0);
    kvs_close(store);
    /* With an extension table, negative values are errno, within reason. */
    setenv("BROKEN_EXT", "good", 1);
    check_get("broken://fail", -EPERM, 0);
    check_get("broken://wild", -EIO, 0);
    check_get("broken://gone", -ENOENT, 0);
    store = opened("broken://gone");
    assert_int_equal(kvs_put_manifest(store, "name", "x", 1), -ENOENT);
    assert_int_equal(kvs_delete_manifest(store, "name"), 0); /* gone is what was wanted */
    kvs_close(store);
}

/* -- what extensions return -------------------------------------------------------------------- */

static int lying_exists(kv_store_v1 *s, const uint8_t *h, size_t l, size_t n, uint8_t *ret)
{
    (void)s, (void)h, (void)l;
    memset(ret, KV_STORE_PRESENT_UNKNOWN + 1, n);
    return 0;
}

static int looking(kv_store_v1 *s, const uint8_t *h, size_t l, size_t n, uint8_t *ret)
{
    (void)s, (void)h, (void)l;
    for (size_t i = 0; i < n; i++)
        ret[i] = (uint8_t)(i % 4);
    return 0;
}

static int lying_get(kv_store_v1 *s, const uint8_t *h, size_t l, size_t n, uint8_t **data,
                     size_t *len)
{
    (void)s;
    for (size_t i = 0; i + 1 < n; i++) {
        data[i] = malloc(8);
        len[i] = h[l] == 'x' ? 8 : 1 << 20; /* more than there is, or one chunk too few */
    }
    return (int)n;
}

static int lying_put(kv_store_v1 *s, const uint8_t *h, size_t l, size_t n,
                     const uint8_t *const *data, const size_t *len, int *each)
{
    (void)s, (void)h, (void)l, (void)data, (void)len;
    for (size_t i = 0; each && i < n; i++)
        each[i] = 5;
    return 0;
}

static int lying_touch(kv_store_v1 *s, const uint8_t *h, size_t l, size_t n)
{
    (void)s, (void)h, (void)l;
    return (int)n + 1;
}

static int lying_manifests(kv_store_v1 *s, kv_store_each_fn each, void *arg)
{
    kv_store_entry entry = {.size = sizeof(entry)};
    (void)s;

    return each(arg, &entry);
}

static int lying_chunks(kv_store_v1 *s, kv_store_each_fn each, void *arg)
{
    kv_store_entry entry = {.size = sizeof(entry), .hash = (const uint8_t *)"12345678"};
    (void)s;

    entry.hash_len = 8;
    each(arg, &entry); /* goes on although it is told to stop, and calls it a success */
    each(arg, &entry);
    return 0;
}

static int lying_stream(kv_store_v1 *s, const uint8_t *h, size_t l, uint8_t *buf, size_t room,
                        kv_store_piece_fn each, void *arg)
{
    (void)s, (void)l;
    memset(buf, 'x', room);
    each(arg, 0, buf, room);
    each(arg, h[0] == 'o' ? 1 : room, buf, room); /* out of order, or in spite of a stop */
    return 0;
}

static int take_piece(void *arg, uint64_t offset, const uint8_t *piece, size_t len)
{
    (void)offset, (void)piece, (void)len;
    return --*(int *)arg == 0 ? 42 : 0;
}

/* Pieces are in order, and none comes after a stop; a backend without streams is asked for all. */
static void test_streams(void **state)
{
    kv_store_ext ext = *memory_ext();
    struct kvs_store *store;
    char buf[8];
    int left = 9;
    (void)state;

    ext.stream_chunk = lying_stream;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://lies", false, &store), 0);
    assert_int_equal(kvs_stream_chunk(store, "order", 5, buf, 8, take_piece, &left), -EPROTO);
    assert_int_equal(left, 8);
    assert_int_equal(kvs_stream_chunk(store, "right", 5, buf, 8, take_piece, &left), 0);
    assert_int_equal(left, 6);
    left = 1;
    assert_int_equal(kvs_stream_chunk(store, "right", 5, buf, 8, take_piece, &left), 42);
    assert_int_equal(left, 0);
    assert_int_equal(kvs_stream_chunk(store, "right", 5, buf, 0, take_piece, &left), -EINVAL);
    assert_int_equal(kvs_stream_chunk(store, "right", 5, NULL, 8, take_piece, &left), -EINVAL);
    assert_int_equal(kvs_stream_chunk(store, "right", 5, buf, 8, NULL, &left), -EINVAL);
    kvs_close(store);
    ext.stream_chunk = NULL;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://plain", false, &store), 0);
    assert_int_equal(kvs_put_chunk(store, "right", 5, "0123456789", 10), 0);
    left = 9;
    assert_int_equal(kvs_stream_chunk(store, "right", 5, buf, 8, take_piece, &left), 0);
    assert_int_equal(left, 8);
    assert_int_equal(kvs_stream_chunk(store, "wrong", 5, buf, 8, take_piece, &left), -ENOENT);
    kvs_close(store);
}

static int stop(void *arg, const kv_store_entry *entry)
{
    (void)entry;
    ++*(int *)arg;
    return 42;
}

static void test_lying_extensions(void **state)
{
    kv_store_ext ext = *memory_ext();
    const void *data[2] = {"a", "b"};
    const size_t lens[2] = {1, 1};
    struct kvs_store *store;
    uint8_t present[2], states[4];
    void *got[2];
    size_t got_len[2];
    int each[2], n = 0;
    (void)state;

    ext.exists_chunks = lying_exists;
    ext.get_chunks = lying_get;
    ext.put_chunks = lying_put;
    ext.touch_chunks = lying_touch;
    ext.list_manifests = lying_manifests;
    ext.list_chunks = lying_chunks;
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://lies", false, &store), 0);
    assert_int_equal(kvs_exists(store, "12345678", 4, 2, present), -EPROTO);
    assert_int_equal(kvs_get_chunks(store, "1234x678", 4, 2, got, got_len), -EPROTO);
    assert_true(!got[0] && !got[1]);
    assert_int_equal(kvs_get_chunks(store, "12345678", 4, 2, got, got_len), -EPROTO);
    assert_true(!got[0] && !got[1]);
    assert_int_equal(kvs_put_chunks(store, "12345678", 4, 2, data, lens, each), -EPROTO);
    assert_int_equal(each[0], -EPROTO);
    assert_int_equal(kvs_touch(store, "12345678", 4, 2), -EPROTO);
    assert_int_equal(kvs_list(store, stop, &n), -EPROTO);
    assert_int_equal(n, 0);
    assert_int_equal(kvs_list_chunks(store, stop, &n), 42);
    assert_int_equal(n, 1);
    kvs_close(store);
    ext.exists_chunks = looking; /* a damaged chunk is missing, but for kvs_look */
    assert_int_equal(kvs_open_with(memory_vtable(), &ext, "memory://looks", false, &store), 0);
    assert_int_equal(kvs_look(store, "123456789abc", 4, 3, states), 0);
    assert_memory_equal(states, ((uint8_t[]){KVS_MISSING, KVS_THERE, KVS_DAMAGED}), 3);
    assert_int_equal(kvs_exists(store, "123456789abc", 4, 3, states), 0);
    assert_memory_equal(states, ((uint8_t[]){0, 1, 0}), 3);
    assert_int_equal(kvs_look(store, "123456789abcdefg", 4, 4, states),
                     -EIO); /* one has no answer */
    assert_int_equal(states[3], KV_STORE_PRESENT_UNKNOWN);
    kvs_close(store);
}

#define TEST(fn) cmocka_unit_test_setup_teardown(fn, set_up, tear_down)

int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(test_uris),
        TEST(test_paths),
        TEST(test_uri_unchanged),
        TEST(test_search),
        TEST(test_dangling_link),
        TEST(test_beside_the_library),
        TEST(test_beside_the_library_of_others),
        TEST(test_beside_the_program),
        TEST(test_broken_in_the_loaders_path),
        TEST(test_no_plugin),
        TEST(test_tables),
        TEST(test_short_tables),
        TEST(test_version_1),
        TEST(test_ext_tables),
        TEST(test_results),
        TEST(test_lying_extensions),
        TEST(test_streams),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
