// SPDX-License-Identifier: Apache-2.0
/*
 * The directory of a file store, after somebody with write permission was there. The input's first
 * byte chooses the store's options, the rest is a list of edits of a store with two objects: an
 * operation, a place, a length, and as many bytes. The store is opened, listed, read, verified,
 * collected and saved to. Whatever it finds:
 *
 *  - nothing outside changes;
 *  - an object that can be restored has the bytes of one that was saved;
 *  - a save that succeeds can be restored, also after a collection.
 *
 * After a forged checksum (SEAL) only the first holds: checksums tell damage, not ill will.
 */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/xattr.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"
#include "kv_store.h"
#include "require.h"
#include "store/file/file_impl.h"

enum { MAX_PLACES = 64, MAX_EDITS = 16, OBJECT = 20000, CHUNK = 4096 };

/* Effects of an edit on the file at its place. */
enum edit {
    WRITE,  /* its bytes instead of the content */
    XOR,    /* its bytes over the content, from an offset (2 bytes) on */
    CUT,    /* to a length (2 bytes) */
    REMOVE, /* a folder with all in it */
    LINK,
    HARD_LINK,
    PIPE,
    FOLDER,
    RENAME, /* to another place */
    SEAL,   /* give the content a checksum of the store's, so that it counts as whole */
    N_EDITS
};

static const char *const forms[] = {
    ".kvasir",
    ".kvasir/writers",
    ".kvasir/writers/0123456789abcdef",
    ".kvasir/tmp",
    ".kvasir/tmp/0123456789abcdef.1",
    ".kvasir/tmp/0123456789abcdef.1.s",
    ".kvasir/refs",
    ".kvasir/refs/other",
    ".kvasir/refs/chat",
    ".kvasir/bad",
    ".kvasir/sums",
    ".kvasir/sums/m-chat",
    ".kvasir/sums/0123456789abcdef0123456789abcdef",
    ".kvasir/verified",
    ".kvasir/used",
    ".kvasir/odd",
    "chunks",
    "chunks/0",
    "chunks/0/0123456789abcdef0123456789abcdef",
    "chunks/odd",
    "chat",
    "more",
    "other",
    "odd%2Fname",
};

static const char *const options[] = {"", "?limit=1M", "?sums=files", "?sync=files"};

static char root[256], victim[280], dir[280];
static char places[MAX_PLACES][400];
static size_t n_places;
static bool sealed;

/* ---- files ---- */

static void note_place(const char *path)
{
    if (n_places < MAX_PLACES)
        snprintf(places[n_places++], sizeof(places[0]), "%s", path);
}

/* Note a chunk's file. Chunks' names follow from their bytes, so that each run has the same. */
static int note_chunk(void *arg, const kv_store_entry *entry)
{
    char hex[KVS_FILE_HEX], path[300];

    (void)arg;
    kvs_file_hex(hex, entry->hash, entry->hash_len);
    snprintf(path, sizeof(path), "chunks/%x/%s", kvs_file_fan(entry->hash), hex);
    note_place(path);
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at)
{
    (void)st, (void)type, (void)at;
    return remove(path) < 0 && errno != ENOENT ? -1 : 0;
}

static void remove_all(const char *path)
{
    struct stat st;

    if (lstat(path, &st) == 0 && S_ISDIR(st.st_mode))
        nftw(path, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    else
        unlink(path);
}

static void write_file(const char *path, const void *data, size_t len)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);

    if (fd < 0)
        return;
    while (len) {
        ssize_t n = write(fd, data, len);

        if (n <= 0)
            break;
        data = (const char *)data + n;
        len -= (size_t)n;
    }
    close(fd);
}

static size_t read_file(const char *path, uint8_t *ret, size_t max)
{
    int fd = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, ret, max);

    if (fd >= 0)
        close(fd);
    return n > 0 ? (size_t)n : 0;
}

static void xor_file(const char *path, const uint8_t *data, size_t len)
{
    static uint8_t content[1 << 16];
    size_t n = read_file(path, content, sizeof(content)), from;
    struct stat st;

    if (len < 2 || lstat(path, &st) < 0 || !S_ISREG(st.st_mode) || st.st_nlink > 1)
        return;
    from = (size_t)data[0] | (size_t)data[1] << 8;
    for (size_t i = 2; i < len && from + i - 2 < n; i++)
        content[from + i - 2] ^= data[i];
    write_file(path, content, n);
}

/* Set the checksum that the content at @place has under its name. */
static void seal(const char *place, const char *path)
{
    static uint8_t content[1 << 16];
    size_t n = read_file(path, content, sizeof(content)), len;
    const char *name = strrchr(place, '/');
    uint8_t out[KVS_FILE_SUM_BYTES], key[KVS_FILE_KEY_MAX];
    struct kvs_file_sum sum;
    int key_len = 0;

    name = name ? name + 1 : place;
    len = strlen(name);
    if (!strncmp(place, "chunks/", 7) && kvs_file_chunk_name(key, &key_len, name) >= 0)
        kvs_file_sum_make(&sum, kvs_file_owner(key, (size_t)key_len, false), content, n);
    else
        kvs_file_sum_make(&sum, kvs_file_owner(name, len, true), content, n);
    kvs_file_sum_encode(out, &sum);
    sealed |= lsetxattr(path, "user.kvasir.chunk", out, sizeof(out), 0) == 0;
}

/* ---- edits ---- */

static void replace(enum edit edit, const char *path)
{
    char target[320];

    remove_all(path);
    snprintf(target, sizeof(target), "%s/letter", victim);
    if (edit == LINK && symlink(path[strlen(path) - 1] & 1 ? victim : target, path) < 0)
        return;
    if (edit == HARD_LINK && link(target, path) < 0)
        return;
    if (edit == PIPE && mkfifo(path, 0600) < 0)
        return;
    if (edit == FOLDER)
        (void)mkdir(path, 0700);
}

static void apply(enum edit edit, const char *place, const uint8_t *data, size_t len)
{
    char path[700], other[700];
    struct stat st;

    snprintf(path, sizeof(path), "%s/%s", dir, place);
    /* a hard link is somebody else's file: editing it would change the victim */
    if (lstat(path, &st) == 0 && S_ISREG(st.st_mode) && st.st_nlink > 1 &&
        (edit < REMOVE || edit == SEAL))
        return;
    if (edit == WRITE) {
        write_file(path, data, len);
    } else if (edit == XOR) {
        xor_file(path, data, len);
    } else if (edit == CUT) {
        if (len >= 2 && lstat(path, &st) == 0 && S_ISREG(st.st_mode))
            (void)!truncate(path, (off_t)data[0] | (off_t)data[1] << 8);
    } else if (edit == RENAME) {
        snprintf(other, sizeof(other), "%s/%s", dir, places[(len ? data[0] : 0) % n_places]);
        (void)rename(path, other);
    } else if (edit == SEAL) {
        seal(place, path);
    } else {
        replace(edit, path);
    }
}

/* Tell whether a folder on the way to a place is a link, so that the edit would be of the victim. */
static bool leads_out(const char *place)
{
    char path[700];
    struct stat st;
    const char *slash = place;

    while ((slash = strchr(slash, '/'))) {
        snprintf(path, sizeof(path), "%s/%.*s", dir, (int)(slash - place), place);
        if (lstat(path, &st) == 0 && !S_ISDIR(st.st_mode))
            return true;
        slash++;
    }
    return false;
}

static void edit_all(const uint8_t *data, size_t size)
{
    for (int i = 0; i < MAX_EDITS && size >= 3; i++) {
        enum edit edit = (enum edit)(data[0] % N_EDITS);
        const char *place = places[data[1] % n_places];
        size_t len = data[2] < size - 3 ? data[2] : size - 3;
        const char *to = places[(len ? data[3] : 0) % n_places];

        if (!leads_out(place) && (edit != RENAME || !leads_out(to)))
            apply(edit, place, data + 3, len);
        data += 3 + len;
        size -= 3 + len;
    }
}

/* ---- the store ---- */

static void fill(uint8_t *data, size_t len, uint32_t seed)
{
    for (size_t i = 0; i < len; i++) {
        seed = seed * 1664525 + 1013904223;
        data[i] = (uint8_t)(seed >> 24);
    }
}

static struct kvs_store *open_store(const char *with)
{
    struct kvs_store *store = NULL;
    char uri[400];

    snprintf(uri, sizeof(uri), "%s%s", dir, with);
    return kvs_open(uri, &store) == 0 ? store : NULL;
}

static int save(struct kvs_store *store, const char *name, uint32_t seed)
{
    struct kvs_save_opts opts = {
        .size = sizeof(opts), .format = KVS_FORMAT_BYTES, .chunk_bytes = CHUNK};
    uint8_t data[OBJECT];

    fill(data, sizeof(data), seed);
    return kvs_save_buffer(store, name, data, sizeof(data), &opts, NULL);
}

/* Tell whether the bytes are those of one of the objects. Without a checksum beside it, as another
 * program leaves it, a manifest may have been renamed. */
static bool is_one_of_ours(const void *data, size_t len)
{
    uint8_t expected[OBJECT];

    for (uint32_t seed = 1; seed <= 3; seed++) {
        fill(expected, sizeof(expected), seed);
        if (len == OBJECT && memcmp(data, expected, OBJECT) == 0)
            return true;
    }
    return false;
}

/* Restore an object. @seed: of its bytes; 0: of any. After a forged checksum it may have others. */
static int restore(struct kvs_store *store, const char *name, uint32_t seed)
{
    uint8_t expected[OBJECT];
    void *data = NULL;
    size_t len = 0;
    int rc = kvs_restore_buffer(store, name, &data, &len, NULL);

    fill(expected, sizeof(expected), seed);
    if (rc == 0 && !sealed)
        REQUIRE(seed ? len == OBJECT && memcmp(data, expected, OBJECT) == 0
                     : is_one_of_ours(data, len));
    free(data);
    return sealed ? 0 : rc;
}

static int read_chunk(void *arg, const kv_store_entry *entry)
{
    void *data = NULL;
    size_t len = 0;

    if (kvs_get_chunk(arg, entry->hash, entry->hash_len, &data, &len) == 0)
        free(data);
    return 0;
}

static int ignore_name(void *arg, const kv_store_entry *entry)
{
    (void)arg, (void)entry;
    return 0;
}

static void use(struct kvs_store *store)
{
    struct kvs_gc_opts gc = {.size = sizeof(gc), .grace_s = KVS_GC_NO_GRACE};
    struct kvs_verify_result verified = KVS_VERIFY_RESULT_INIT;
    kv_store_stats stats = {.size = sizeof(stats)};

    kvs_list(store, ignore_name, NULL);
    kvs_list_chunks(store, read_chunk, store);
    restore(store, "chat", 0);
    restore(store, "more", 0);
    kvs_verify(store, NULL, NULL, NULL, NULL, &verified);
    kvs_stats(store, &stats);
    if (save(store, "fresh", 3) == 0)
        REQUIRE(restore(store, "fresh", 3) == 0);
    if (save(store, "chat", 1) == 0) {
        REQUIRE(restore(store, "chat", 1) == 0);
        kvs_gc(store, &gc, NULL);
        REQUIRE(restore(store, "chat", 1) == 0);
    }
    kvs_delete_manifest(store, "more");
    kvs_gc(store, &gc, NULL);
}

/* ---- one input ---- */

static void make_victim(void)
{
    char path[320];

    mkdir(victim, 0700);
    snprintf(path, sizeof(path), "%s/letter", victim);
    write_file(path, "Dear", 4);
}

static void require_victim(void)
{
    char path[320];
    uint8_t text[16];
    DIR *d = opendir(victim);
    int n = 0;

    REQUIRE(d);
    while (readdir(d))
        n++;
    closedir(d);
    REQUIRE(n == 3); /* with . and .. */
    snprintf(path, sizeof(path), "%s/letter", victim);
    REQUIRE(read_file(path, text, sizeof(text)) == 4 && memcmp(text, "Dear", 4) == 0);
}

static void quiet(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    (void)arg, (void)level, (void)line, (void)len;
}

static void remove_root(void)
{
    remove_all(root);
}

static void make_root(void)
{
    const char *base = getenv("TMPDIR");

    if (!base)
        base = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : "/tmp";
    snprintf(root, sizeof(root), "%s/fuzz-store-XXXXXX", base);
    REQUIRE(mkdtemp(root));
    snprintf(victim, sizeof(victim), "%s/victim", root);
    snprintf(dir, sizeof(dir), "%s/store", root);
    make_victim();
    kv_log_set_sink(quiet, NULL);
    atexit(remove_root);
}

static void make_store(const char *with)
{
    struct kvs_store *store = open_store(with);

    REQUIRE(store);
    REQUIRE(save(store, "chat", 1) == 0 && save(store, "more", 2) == 0);
    REQUIRE(kvs_put_manifest(store, "other", "theirs", 6) == 0);
    n_places = 0;
    for (size_t i = 0; i < KV_COUNT(forms); i++)
        note_place(forms[i]);
    kvs_list_chunks(store, note_chunk, NULL);
    kvs_close(store);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvs_store *store;
    const char *with;

    if (size < 1)
        return 0;
    if (!root[0])
        make_root();
    with = options[data[0] % KV_COUNT(options)];
    sealed = false;
    make_store(with);
    edit_all(data + 1, size - 1);
    store = open_store(with);
    if (store)
        use(store);
    kvs_close(store);
    require_victim();
    remove_all(dir);
    return 0;
}
