// SPDX-License-Identifier: Apache-2.0
/* Objects saved and restored: all bytes or an error, whatever the backend does. */
#include "base/unit.h"
#include "cutting.h"
#include "llama_state.h"
#include "memory_backend.h"

#define URI "memory://save"

static const struct kvs_save_opts small = {
    .size = sizeof(small), .chunk_bytes = 4096, .chunk_tokens = 16, .fingerprint = "llama f16"};

struct taken {
    struct kv_buf bytes;
    int fail; /* returned once fail_at bytes were taken */
    size_t fail_at;
};

static int take(void *arg, const void *data, size_t len)
{
    struct taken *t = arg;

    if (t->fail && t->bytes.len + len > t->fail_at)
        return t->fail;
    kv_buf_append(&t->bytes, data, len);
    return t->bytes.error;
}

static int save_bytes(struct kvs_store *store, const char *name, const void *data, size_t len,
                      struct kvs_result *ret)
{
    struct reading reading = {.data = data, .len = len};

    return kvs_save(store, name, read_some, &reading, &small, ret);
}

/* Whether what is under @name is exactly these bytes. */
static bool same(struct kvs_store *store, const char *name, const void *data, size_t len,
                 uint32_t window, bool verify_first)
{
    struct kvs_restore_opts opts = {
        .size = sizeof(opts), .window_bytes = window, .verify_first = verify_first};
    struct kvs_result result = {.size = sizeof(result)};
    struct taken t = {0};
    bool good = kvs_restore(store, name, take, &t, &opts, &result) == 0 && t.bytes.len == len &&
                (len == 0 || memcmp(t.bytes.data, data, len) == 0) && result.bytes == len;

    kv_buf_fini(&t.bytes);
    return good;
}

struct lines {
    size_t n;
    char last[512];
};

static void note(void *arg, const char *line)
{
    struct lines *lines = arg;

    lines->n++;
    snprintf(lines->last, sizeof(lines->last), "%s", line);
}

/* Log lines of the library, kept out of the tests' output. */
static struct lines log_lines;

static void note_log(void *arg, int level, const char *line)
{
    (void)arg;
    (void)level;
    note(&log_lines, line);
}

static int open_store(void **state)
{
    struct kvs_store *store;

    log_lines = (struct lines){0};
    kvs_set_log(note_log, NULL);
    assert_int_equal(memory_store(URI, &store), 0);
    *state = store;
    return 0;
}

static int close_store(void **state)
{
    kvs_close(*state);
    memory_forget_all();
    return 0;
}

static void make_object(struct rng *rng, struct kv_buf *b)
{
    struct llama_state s = {.version = 3,
                            .n_tokens = rng_below(rng, 200),
                            .n_layers = 1 + rng_below(rng, 4),
                            .k_row = 8 + rng_below(rng, 200),
                            .v_row = 2 * rng_below(rng, 100),
                            .v_trans = rng_below(rng, 2),
                            .seed = rng_below(rng, 3)};

    if (rng_below(rng, 2)) {
        llama_state_make(&s, b);
        return;
    }
    *b = (struct kv_buf)KV_BUF_INIT;
    for (uint32_t n = rng_below(rng, 2) * rng_below(rng, 50000); n > 0; n--)
        kv_buf_putc(b, (char)rng_next(rng));
}

/* Random edits: bytes changed, taken out, put in. */
static void edit(struct rng *rng, struct kv_buf *b)
{
    for (uint32_t n = rng_below(rng, 3); n > 0 && b->len > 0; n--) {
        size_t at = rng_below(rng, (uint32_t)b->len), len = rng_below(rng, 300);

        len = KV_MIN(len, b->len - at);
        if (rng_below(rng, 2)) {
            memmove(b->data + at, b->data + at + len, b->len - at - len);
            b->len -= len;
        } else {
            for (size_t i = 0; i < len; i++)
                b->data[at + i] = (char)rng_next(rng);
        }
    }
}

/* Beside a plain array of what was saved last under each name. */
static void test_model(void **state)
{
    enum { NAMES = 4 };
    struct rng rng = {test_seed()};
    struct kv_buf want[NAMES] = {0};
    struct kvs_store *store = *state;
    char name[] = "object-0";

    for (int i = 0; i < NAMES; i++) {
        name[7] = (char)('0' + i);
        make_object(&rng, &want[i]);
        assert_int_equal(save_bytes(store, name, want[i].data, want[i].len, NULL), 0);
    }
    for (long round = test_rounds(150); round > 0; round--) {
        uint32_t i = rng_below(&rng, NAMES), j = rng_below(&rng, NAMES);

        if (rng_below(&rng, 3) == 0) {
            kv_buf_fini(&want[i]);
            make_object(&rng, &want[i]);
        } else {
            edit(&rng, &want[i]);
        }
        name[7] = (char)('0' + i);
        assert_int_equal(save_bytes(store, name, want[i].data, want[i].len, NULL), 0);
        name[7] = (char)('0' + j);
        if (!same(store, name, want[j].data, want[j].len, rng_below(&rng, 30000),
                  rng_below(&rng, 2)))
            fail_msg("another object came back; seed %lu", (unsigned long)test_seed());
    }
    for (int i = 0; i < NAMES; i++)
        kv_buf_fini(&want[i]);
}

static void test_counts(void **state)
{
    struct llama_state s = {
        .version = 3, .n_tokens = 500, .n_layers = 4, .k_row = 512, .v_row = 512};
    struct kvs_result first = {.size = sizeof(first)}, second = first, part = {0};
    struct kvs_store *store = *state;
    struct kvs_manifest *m;
    struct kv_buf b;
    size_t n;

    llama_state_make(&s, &b);
    assert_int_equal(save_bytes(store, "a", b.data, b.len, &first), 0);
    assert_int_equal(first.bytes, b.len);
    assert_int_equal(first.new_bytes, b.len);
    assert_int_equal(first.new_chunks, first.n_chunks);
    assert_int_equal(first.format, KVS_FORMAT_LLAMA);
    assert_int_equal(save_bytes(store, "b", b.data, b.len, &second), 0);
    assert_int_equal(second.new_bytes, 0);
    assert_int_equal(second.n_chunks, first.n_chunks);
    assert_int_equal(kvs_manifest_get(store, "b", &m), 0);
    kvs_manifest_chunks(m, &n);
    assert_int_equal(n, first.n_chunks);
    assert_int_equal(kvs_manifest_bytes(m), b.len);
    assert_string_equal(kvs_manifest_fingerprint(m), "llama f16");
    assert_true(kvs_manifest_created_s(m) > 1700000000);
    kvs_manifest_free(m);
    kv_buf_fini(&b);
    s.n_tokens = 505;
    llama_state_make(&s, &b);
    assert_int_equal(save_bytes(store, "a", b.data, b.len, &second), 0);
    assert_true(second.new_bytes > 0 && second.new_bytes * 20 <= b.len);
    /* A caller built against a shorter result gets what it has room for. */
    part.size = offsetof(struct kvs_result, n_chunks);
    part.n_chunks = 77;
    assert_int_equal(save_bytes(store, "a", b.data, b.len, &part), 0);
    assert_int_equal(part.bytes, b.len);
    assert_int_equal(part.n_chunks, 77);
    kv_buf_fini(&b);
}

static int64_t read_failing(void *arg, void *buf, size_t cap)
{
    size_t *left = arg;

    if (!*left)
        return -EINTR;
    cap = KV_MIN(cap, *left);
    memset(buf, 'x', cap);
    *left -= cap;
    return (int64_t)cap;
}

static int stop_at(void *arg, uint64_t done, uint64_t total)
{
    uint64_t *at = arg;

    assert_true(total == 0 || total == 40000);
    return done >= *at;
}

/* A save fails at each call in turn: the old object is still there, and nothing else is. */
static void test_failed_saves(void **state)
{
    struct memory_space *space = memory_space(URI);
    struct kvs_store *store = *state;
    uint8_t old[9000], data[60000];
    struct reading reading = {.data = data, .len = sizeof(data)};
    struct kvs_save_opts opts = small;
    struct rng rng = {test_seed()};
    uint64_t stop = 10000;
    size_t left = 30000;
    char *long_print = calloc(1, 4098);

    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)rng_next(&rng);
    memset(old, 'o', sizeof(old));
    assert_int_equal(save_bytes(store, "a", old, sizeof(old), NULL), 0);
    assert_int_equal(kvs_save(store, "a", read_failing, &left, &small, NULL), -EINTR);
    space->fail_puts = -ENOSPC;
    space->fail_puts_after = 3;
    assert_true(save_bytes(store, "a", data, sizeof(data), NULL) < 0);
    space->fail_puts = 0;
    space->fail_manifests = -EIO;
    assert_true(save_bytes(store, "a", data, sizeof(data), NULL) < 0);
    assert_true(save_bytes(store, "new", data, sizeof(data), NULL) < 0);
    space->fail_manifests = 0;
    opts.progress = stop_at;
    opts.progress_arg = &stop;
    assert_int_equal(kvs_save(store, "a", read_some, &reading, &opts, NULL), -ECANCELED);
    memset(long_print, 'f', 4097);
    opts = small;
    opts.fingerprint = long_print;
    assert_int_equal(kvs_save(store, "a", read_some, &reading, &opts, NULL), -EINVAL);
    opts = small;
    opts.chunk_bytes = 1;
    assert_int_equal(kvs_save(store, "a", read_some, &reading, &opts, NULL), -EINVAL);
    assert_int_equal(kvs_save(store, "", read_some, &reading, &small, NULL), -EINVAL);
    free(long_print);
    assert_true(same(store, "a", old, sizeof(old), 0, true));
    assert_int_equal(kvs_restore(store, "new", take, &(struct taken){0}, NULL, NULL), -ENOENT);
}

static unsigned n_names_read;

static int long_names_refused(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *len)
{
    n_names_read++;
    return strlen(name) > 100 ? -ENAMETOOLONG : memory_get_manifest(self, name, ret, len);
}

/* A name that can't be is refused before anything of the object is read or stored. */
static void test_refused_names(void **state)
{
    kv_store_vtable table = *memory_vtable();
    struct reading reading = {.data = (const uint8_t *)"hello", .len = 5};
    struct kvs_store *store = *state, *picky;
    char name[200];

    assert_int_equal(kvs_save(store, "", read_some, &reading, &small, NULL), -EINVAL);
    assert_int_equal(reading.at, 0);
    assert_int_equal(log_lines.n, 1);
    memset(name, 'n', sizeof(name));
    name[sizeof(name) - 1] = '\0';
    table.get_manifest = long_names_refused;
    assert_int_equal(kvs_open_with(&table, memory_ext(), URI, false, &picky), 0);
    assert_int_equal(kvs_save(picky, name, read_some, &reading, &small, NULL), -ENAMETOOLONG);
    assert_int_equal(reading.at, 0);
    assert_int_equal(log_lines.n, 2);
    assert_null(memory_space(URI)->chunks);
    assert_int_equal(n_names_read, 1);
    assert_int_equal(kvs_save(picky, "model_7b.slot-0", read_some, &reading, &small, NULL), 0);
    assert_int_equal(n_names_read, 1); /* a plain name costs no round trip */
    kvs_close(picky);
    memory_space(URI)->fail_gets = -EIO; /* says nothing about the name */
    assert_int_equal(kvs_save(store, "a", read_some, &reading, &small, NULL), 0);
    memory_space(URI)->fail_gets = 0;
}

static int refuse(void *arg, uint64_t done, uint64_t total)
{
    uint64_t *seen = arg;

    assert_true(done <= total);
    *seen = total;
    return total == 5;
}

static void restore_is(struct kvs_store *store, const void *want, size_t len,
                       const struct kvs_restore_opts *opts)
{
    void *got = NULL;
    size_t n = 99;

    assert_int_equal(kvs_restore_buffer(store, "a", &got, &n, opts), 0);
    assert_non_null(got);
    assert_int_equal(n, len);
    assert_memory_equal(got, want, len);
    free(got);
}

static void test_buffer(void **state)
{
    enum { BIG = 5 << 20 };
    struct kvs_restore_opts opts = {.size = sizeof(opts), .verify_first = true};
    struct kvs_result result = {.size = sizeof(result)};
    struct kvs_store *store = *state;
    uint8_t *big = malloc(BIG);
    uint64_t seen = 0;
    void *got = store;
    size_t n = 99;

    assert_non_null(big);
    for (size_t i = 0; i < BIG; i++)
        big[i] = (uint8_t)(i * i >> 9);
    opts.progress = refuse;
    opts.progress_arg = &seen;
    assert_int_equal(kvs_restore_buffer(store, "none", &got, &n, NULL), -ENOENT);
    assert_int_equal(kvs_save_buffer(store, "a", NULL, 1, NULL, NULL), -EINVAL);
    assert_int_equal(kvs_save_buffer(store, "", "x", 1, NULL, NULL), -EINVAL);
    assert_int_equal(kvs_save_buffer(store, "a", NULL, 0, NULL, NULL), 0);
    restore_is(store, "", 0, NULL);
    assert_int_equal(kvs_save_buffer(store, "a", "hello", 5, NULL, NULL), 0);
    restore_is(store, "hello", 5, &opts); /* twice five to go, which isn't refused */
    assert_int_equal(seen, 10);
    opts.verify_first = false;
    assert_int_equal(kvs_restore_buffer(store, "a", &got, &n, &opts), -ECANCELED);
    assert_int_equal(kvs_save_buffer(store, "a", big, BIG, NULL, &result), 0);
    assert_int_equal(result.bytes, BIG);
    restore_is(store, big, BIG, &opts);
    opts.fingerprint = "other";
    assert_int_equal(kvs_restore_buffer(store, "a", &got, &n, &opts), -ESTALE);
    assert_ptr_equal(got, store); /* set on success only */
    assert_int_equal(n, 99);
    assert_int_equal(kvs_restore_buffer(store, "a", NULL, &n, NULL), -EINVAL);
    free(big);
}

static void test_fingerprint(void **state)
{
    struct kvs_restore_opts opts = {.size = sizeof(opts), .fingerprint = "other"};
    struct kvs_store *store = *state;
    struct taken t = {0};

    assert_int_equal(save_bytes(store, "a", "hello", 5, NULL), 0);
    assert_int_equal(kvs_restore(store, "a", take, &t, &opts, NULL), -ESTALE);
    assert_int_equal(t.bytes.len, 0);
    opts.fingerprint = "llama f16";
    assert_int_equal(kvs_restore(store, "a", take, &t, &opts, NULL), 0);
    assert_int_equal(t.bytes.len, 5);
    kv_buf_fini(&t.bytes);
}

static void test_failed_restores(void **state)
{
    struct kvs_restore_opts opts = {.size = sizeof(opts), .progress = stop_at};
    struct kvs_store *store = *state;
    struct taken t = {.fail = -ENOSPC, .fail_at = 12000};
    uint8_t data[40000];
    struct rng rng = {test_seed()};
    uint64_t stop = 1;

    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)rng_next(&rng);
    assert_int_equal(save_bytes(store, "a", data, sizeof(data), NULL), 0);
    assert_int_equal(kvs_restore(store, "a", take, &t, NULL, NULL), -ENOSPC);
    assert_memory_equal(t.bytes.data, data, t.bytes.len);
    t.fail = 0;
    opts.progress_arg = &stop;
    assert_int_equal(kvs_restore(store, "a", take, &t, &opts, NULL), -ECANCELED);
    assert_int_equal(kvs_put_manifest(store, "opaque", "{}", 2), 0);
    assert_int_equal(kvs_restore(store, "opaque", take, &t, NULL, NULL), -EMEDIUMTYPE);
    assert_int_equal(kvs_put_manifest(store, "empty", NULL, 0), 0);
    assert_int_equal(kvs_restore(store, "empty", take, &t, NULL, NULL), -EMEDIUMTYPE);
    assert_int_equal(kvs_restore(store, "none", take, &t, NULL, NULL), -ENOENT);
    kv_buf_fini(&t.bytes);
}

enum lie { FLIPPED, SHORTER, LONGER, EMPTY, MISSING, SWAPPED, LIES };

/* Make the space hold something else for a random chunk. */
static void tell_a_lie(struct memory_space *space, struct rng *rng, enum lie lie)
{
    struct memory_object *o, **at = &space->chunks;
    uint32_t n = 0;

    for (o = space->chunks; o; o = o->next)
        n++;
    for (n = rng_below(rng, n); n > 0; n--)
        at = &(*at)->next;
    o = *at;
    if (lie == FLIPPED) {
        o->data[rng_below(rng, (uint32_t)o->len)] ^= (uint8_t)(1u << rng_below(rng, 8));
    } else if (lie == SHORTER) {
        o->len -= 1 + rng_below(rng, (uint32_t)o->len);
    } else if (lie == LONGER) {
        o->data = realloc(o->data, o->len + 1);
        o->data[o->len++] = 0;
    } else if (lie == EMPTY) {
        o->len = 0;
    } else if (lie == MISSING) {
        memory_remove(at);
    } else {
        struct memory_object *other = o == space->chunks ? o->next : space->chunks;
        uint8_t *data = o->data;
        size_t len = o->len;

        o->data = other->data;
        o->len = other->len;
        other->data = data;
        other->len = len;
    }
}

/* Never a wrong byte: a part of the object, or, verified first, nothing. */
static void test_lying_backends(void **state)
{
    struct memory_space *space = memory_space(URI);
    struct kvs_store *store = *state;
    struct rng rng = {test_seed()};

    for (long round = test_rounds(100); round > 0; round--) {
        struct llama_state s = {.version = 3,
                                .n_tokens = 100,
                                .n_layers = 2,
                                .k_row = 64,
                                .v_row = 64,
                                .v_trans = round % 2,
                                .seed = (uint64_t)round};
        struct kvs_restore_opts opts = {.size = sizeof(opts), .verify_first = round % 3 == 0};
        enum lie lie = (enum lie)(round % LIES);
        struct kvs_verify_result found = {.size = sizeof(found)};
        struct taken t = {0};
        struct kv_buf b;
        size_t before;
        int rc;

        memory_free_list(space->chunks);
        space->chunks = NULL;
        llama_state_make(&s, &b);
        assert_int_equal(save_bytes(store, "a", b.data, b.len, NULL), 0);
        tell_a_lie(space, &rng, lie);
        before = log_lines.n;
        rc = kvs_restore(store, "a", take, &t, &opts, NULL);
        assert_int_equal(rc, lie == MISSING ? -ENOENT : -EBADMSG);
        assert_int_equal(log_lines.n, before + 1);
        assert_non_null(strstr(log_lines.last, "object=a chunk="));
        assert_non_null(
            strstr(log_lines.last, lie == MISSING ? "problem=missing" : "problem=damaged"));
        assert_true(t.bytes.len < b.len);
        assert_true(t.bytes.len == 0 || memcmp(t.bytes.data, b.data, t.bytes.len) == 0);
        assert_true(!opts.verify_first || t.bytes.len == 0);
        assert_int_equal(kvs_verify(store, "a", NULL, NULL, NULL, &found), 0);
        assert_true(found.missing_chunks + found.bad_chunks >= 1);
        assert_true((found.missing_chunks > 0) == (lie == MISSING));
        kv_buf_fini(&t.bytes);
        kv_buf_fini(&b);
    }
}

static void test_damaged_manifest(void **state)
{
    struct kvs_store *store = *state;
    struct taken t = {0};
    uint8_t *data;
    void *bytes;
    size_t len;

    assert_int_equal(save_bytes(store, "a", "hello", 5, NULL), 0);
    assert_int_equal(kvs_get_manifest(store, "a", &bytes, &len), 0);
    data = bytes;
    data[len - 20] ^= 4;
    assert_int_equal(kvs_put_manifest(store, "a", data, len), 0);
    assert_int_equal(kvs_restore(store, "a", take, &t, NULL, NULL), -EBADMSG);
    assert_int_equal(t.bytes.len, 0);
    free(bytes);
}

static void test_verify(void **state)
{
    struct memory_space *space = memory_space(URI);
    struct kvs_verify_result found = {.size = sizeof(found)};
    struct kvs_store *store = *state;
    struct lines lines = {0};
    uint8_t data[40000];
    struct rng rng = {test_seed()};
    uint64_t gets;

    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)rng_next(&rng);
    assert_int_equal(save_bytes(store, "a", data, sizeof(data), NULL), 0);
    assert_int_equal(save_bytes(store, "b", data, 5000, NULL), 0);
    assert_int_equal(kvs_put_manifest(store, "opaque", NULL, 0), 0);
    assert_int_equal(kvs_put_manifest(store, "bad", "KVS-OBJ\n", 8), 0);
    assert_int_equal(kvs_verify(store, NULL, note, NULL, &lines, &found), 0);
    assert_int_equal(found.manifests, 4);
    assert_int_equal(found.opaque_manifests, 1);
    assert_int_equal(found.bad_manifests, 1);
    assert_int_equal(found.missing_chunks + found.bad_chunks, 0);
    assert_int_equal(found.bytes, 45000);
    assert_int_equal(lines.n, 1);
    assert_non_null(strstr(lines.last, "object bad: its manifest is damaged"));
    /* The same again under another name: a chunk is read once, and missing from both. */
    assert_int_equal(save_bytes(store, "c", data, sizeof(data), NULL), 0);
    memory_remove(&space->chunks);
    gets = space->stats.gets;
    lines.n = 0;
    assert_int_equal(kvs_delete_manifest(store, "bad"), 0);
    assert_int_equal(kvs_delete_manifest(store, "b"), 0); /* may begin like a */
    assert_int_equal(kvs_verify(store, NULL, note, NULL, &lines, &found), 0);
    assert_int_equal(space->stats.gets, gets + found.chunks / 2);
    assert_int_equal(found.missing_chunks, 2);
    assert_int_equal(lines.n, 2);
    assert_int_equal(kvs_verify(store, "a", note, NULL, &lines, &found), 0);
    assert_int_equal(found.manifests, 1);
    assert_int_equal(found.missing_chunks, 1);
    assert_non_null(strstr(lines.last, "object a: chunk 0 of"));
    assert_non_null(strstr(lines.last, "is missing"));
    assert_int_equal(kvs_verify(store, "none", note, NULL, &lines, &found), -ENOENT);
}

static int count_progress(void *arg, uint64_t done, uint64_t total)
{
    uint64_t *calls = arg;

    assert_int_equal(total, 40000);
    assert_true(done <= total);
    return ++*calls > 3;
}

static int stop_progress(void *arg, uint64_t done, uint64_t total)
{
    (void)done, (void)total;
    return ++((struct lines *)arg)->n > 4;
}

/* Progress is told against the size of the one object; giving up keeps what was found. */
static void test_verify_gives_up(void **state)
{
    struct kvs_verify_result found = {.size = sizeof(found)};
    struct kvs_store *store = *state;
    struct lines lines = {0};
    uint8_t data[40000];
    struct rng rng = {test_seed()};
    uint64_t calls = 0;

    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)rng_next(&rng);
    assert_int_equal(save_bytes(store, "a", data, sizeof(data), NULL), 0);
    assert_int_equal(kvs_verify(store, "a", NULL, count_progress, &calls, &found), -ECANCELED);
    assert_int_equal(found.chunks, 4);
    assert_true(found.bytes > 0 && found.bytes < 40000);
    for (char name[2] = "b"; *name < 'k'; ++*name) /* where there is nothing to read, too */
        assert_int_equal(kvs_put_manifest(store, name, "opaque", 6), 0);
    assert_int_equal(kvs_delete_manifest(store, "a"), 0);
    assert_int_equal(kvs_verify(store, NULL, NULL, stop_progress, &lines, &found), -ECANCELED);
    assert_int_equal(found.opaque_manifests, 5);
}

/* Names come from whoever can save; a terminal must not obey them. */
static void test_verify_names(void **state)
{
    static const char evil[] = "\x1b[2J\xc2\x9b"
                               "31m\nobject good: all is well";
    struct kvs_verify_result found = {.size = sizeof(found)};
    struct kvs_store *store = *state;
    struct lines lines = {0};

    assert_int_equal(kvs_put_manifest(store, evil, "KVS-OBJ\n", 8), 0);
    assert_int_equal(kvs_verify(store, NULL, note, NULL, &lines, &found), 0);
    assert_int_equal(found.bad_manifests, 1);
    assert_int_equal(lines.n, 1);
    assert_non_null(strstr(lines.last, "object \"\\u001b[2J\\u009b31m\\nobject good"));
    for (const char *p = lines.last; *p; p++)
        assert_true((unsigned char)*p >= ' ' && *p != 0x7f);
    assert_int_equal(save_bytes(store, evil, "x", 1, NULL), 0);
    memory_remove(&memory_space(URI)->chunks);
    assert_int_equal(kvs_verify(store, NULL, note, NULL, &lines, &found), 0);
    assert_int_equal(lines.n, 2);
    assert_null(strchr(lines.last, '\x1b'));
}

static bool gone;
static uint64_t goes_after = 3; /* gets */

static int get_until_gone(kv_store_v1 *self, const char *name, uint8_t **ret, size_t *len)
{
    return gone ? -1 : memory_get_manifest(self, name, ret, len);
}

static int goes_away(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                     size_t *len)
{
    if (!gone && memory_space(URI)->stats.gets > goes_after)
        gone = true;
    return gone ? -1 : memory_get_chunk(self, hash, hash_len, ret, len);
}

/* Without extensions a failure looks like a miss; but an outage is no damage. */
static void test_outage_without_extensions(void **state)
{
    kv_store_vtable table = *memory_vtable();
    struct kvs_verify_result found = {.size = sizeof(found)};
    struct taken t = {0};
    struct kvs_store *store;
    uint8_t data[40000];
    struct rng rng = {test_seed()};
    (void)state;

    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)rng_next(&rng);
    table.get_chunk = goes_away;
    table.get_manifest = get_until_gone;
    assert_int_equal(kvs_open_with(&table, NULL, URI, false, &store), 0);
    assert_int_equal(save_bytes(store, "a", data, sizeof(data), NULL), 0);
    assert_int_equal(kvs_verify(store, "a", NULL, NULL, NULL, &found), -EIO);
    memory_space(URI)->stats.gets = 0;
    gone = false;
    assert_int_equal(kvs_restore(store, "a", take, &t, NULL, NULL), -EIO);
    memory_space(URI)->stats.gets = 0;
    gone = false;
    goes_after = UINT64_MAX;
    memory_remove(&memory_space(URI)->chunks); /* and a chunk that is missing is missing */
    assert_int_equal(kvs_restore(store, "a", take, &t, NULL, NULL), -ENOENT);
    assert_int_equal(kvs_verify(store, "a", NULL, NULL, NULL, &found), 0);
    assert_int_equal(found.missing_chunks, 1);
    kv_buf_fini(&t.bytes);
    kvs_close(store);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_model, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_counts, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_failed_saves, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_buffer, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_fingerprint, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_failed_restores, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_lying_backends, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_damaged_manifest, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_verify, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_refused_names, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_verify_gives_up, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_verify_names, open_store, close_store),
        cmocka_unit_test_setup_teardown(test_outage_without_extensions, open_store, close_store),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
