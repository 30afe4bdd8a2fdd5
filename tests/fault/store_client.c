// SPDX-License-Identifier: Apache-2.0
/*
 * Client of the store's fault tests, which kill it, starve it and cut its power. Another process
 * can check the stored objects later: a chunk's bytes follow from its number, and a manifest from
 * its writer, name and version.
 *
 *   store_client write URI WRITER OBJECTS NAMES CHUNKS BYTES FIRST
 *       saves OBJECTS objects one after the other under NAMES names, versions FIRST, FIRST + 1, ...
 *       (OBJECTS 0: for ever), each of CHUNKS chunks of about BYTES bytes, a third of them shared
 *       by all writers (who must agree on BYTES). Says `ACK WRITER NAME VERSION` once put_manifest returned 0, and
 *       `ERR WRITER NAME VERSION CODE` otherwise. Exit: 0 all saved, 1 some failed, 3 no store.
 *   store_client check URI STATE
 *       STATE has such lines. Every acknowledged version, or a later one, must be there; everything
 *       that is visible must be complete and byte-exact. Says `BAD ...` per problem; exit 0 or 1.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/buf.h"
#include "kv_store.h"

enum { MAX_WRITERS = 64, MAX_NAMES = 64, N_SHARED = 96 };

struct object {
    uint64_t writer, name, version, n_chunks, bytes;
};

static uint64_t mix(uint64_t x)
{
    x += UINT64_C(0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *format, ...)
{
    char line[512];
    va_list ap;
    int len;

    va_start(ap, format);
    len = vsnprintf(line, sizeof(line), format, ap);
    va_end(ap);
    if (write(STDOUT_FILENO, line, (size_t)len) != len) /* one write: never half a line of two */
        _exit(4);
}

/* -- What is stored ---------------------------------------------------------------------------- */

static uint64_t chunk_number(const struct object *o, uint64_t i)
{
    uint64_t own = mix(mix(o->writer * MAX_NAMES + o->name) ^ mix(o->version)) + i;

    if (i % 3 == 0)
        return mix(o->name * 1000 + i + o->version) % N_SHARED;
    return mix(own) | 1ull << 40;
}

/* 8 or 32 bytes, as the consumers in use have. */
static size_t chunk_key(uint64_t number, uint8_t key[32])
{
    for (int i = 0; i < 4; i++) {
        uint64_t word = mix(number * 4 + (uint64_t)i);

        memcpy(key + 8 * i, &word, sizeof(word));
    }
    return number % 2 ? 8 : 32;
}

static void chunk_bytes(uint64_t number, uint64_t about, struct kv_buf *out)
{
    uint64_t len = about / 2 + mix(number ^ 77) % (about + 1), state = mix(number);

    kv_buf_clear(out);
    for (uint64_t at = 0; at < len; at += sizeof(state)) {
        state = state * UINT64_C(6364136223846793005) + 1442695040888963407u;
        kv_buf_append(out, &state, len - at < sizeof(state) ? len - at : sizeof(state));
    }
}

static void object_name(const struct object *o, char name[64])
{
    snprintf(name, 64, "w%" PRIu64 "-%" PRIu64, o->writer, o->name);
}

static void manifest_bytes(const struct object *o, struct kv_buf *out)
{
    char line[160];

    kv_buf_clear(out);
    snprintf(line, sizeof(line),
             "kvfault %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", o->writer,
             o->name, o->version, o->n_chunks, o->bytes);
    kv_buf_puts(out, line);
    for (uint64_t i = 0; i < o->n_chunks; i++) {
        kv_buf_put_u64(out, chunk_number(o, i));
        kv_buf_puts(out, "\n");
    }
}

/* -- write --------------------------------------------------------------------------------------- */

static int put_chunk(struct kvs_store *store, uint64_t number, uint64_t about, struct kv_buf *buf)
{
    uint8_t key[32];
    size_t key_len = chunk_key(number, key);

    chunk_bytes(number, about, buf);
    return kvs_put_chunk(store, key, key_len, buf->data, buf->len);
}

static int save(struct kvs_store *store, const struct object *o, struct kv_buf *buf)
{
    char name[64];
    int rc = 0;

    for (uint64_t i = 0; i < o->n_chunks && rc >= 0; i++)
        rc = put_chunk(store, chunk_number(o, i), o->bytes, buf);
    if (rc < 0)
        return rc;
    object_name(o, name);
    manifest_bytes(o, buf);
    return kvs_put_manifest(store, name, buf->data, buf->len);
}

static int write_objects(struct kvs_store *store, char **args)
{
    uint64_t writer = strtoull(args[0], NULL, 10), n_objects = strtoull(args[1], NULL, 10);
    uint64_t n_names = strtoull(args[2], NULL, 10), first = strtoull(args[5], NULL, 10);
    struct kv_buf buf = {0};
    int failed = 0;

    if (writer >= MAX_WRITERS || !n_names || n_names > MAX_NAMES)
        return 2;
    for (uint64_t i = 0; !n_objects || i < n_objects; i++) {
        struct object o = {.writer = writer,
                           .name = mix(writer ^ (first + i)) % n_names,
                           .version = first + i,
                           .n_chunks = strtoull(args[3], NULL, 10),
                           .bytes = strtoull(args[4], NULL, 10)};
        int rc = save(store, &o, &buf);

        failed |= rc < 0;
        if (rc < 0) {
            say("ERR %" PRIu64 " %" PRIu64 " %" PRIu64 " %d\n", writer, o.name, o.version, -rc);
        } else {
            say("ACK %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", writer, o.name, o.version);
        }
    }
    kv_buf_fini(&buf);
    return failed;
}

/* -- check --------------------------------------------------------------------------------------- */

struct checker {
    struct kvs_store *store;
    uint64_t acked[MAX_WRITERS][MAX_NAMES]; /* highest acknowledged version + 1 */
    uint64_t n_objects, n_chunks, n_bad;
    struct kv_buf want, names;
};

static void bad(struct checker *c, const char *name, const char *what, uint64_t number)
{
    c->n_bad++;
    say("BAD %s: %s (%" PRIu64 ")\n", name, what, number);
}

static void check_chunk(struct checker *c, const char *name, const struct object *o, uint64_t i)
{
    uint64_t number = chunk_number(o, i);
    uint8_t key[32];
    size_t key_len = chunk_key(number, key), len = 0;
    void *got = NULL;
    int rc = kvs_get_chunk(c->store, key, key_len, &got, &len);

    c->n_chunks++;
    chunk_bytes(number, o->bytes, &c->want);
    if (rc < 0) {
        bad(c, name, strerror(-rc), i);
    } else if (len != c->want.len || memcmp(got, c->want.data, len) != 0) {
        bad(c, name, "WRONG BYTES of a chunk", i);
    }
    if (rc >= 0)
        free(got);
}

/* One visible manifest: what it says is what its writer wrote, and all it needs is there. */
static void check_object(struct checker *c, const char *name, uint64_t min_version)
{
    struct object o = {0};
    char text[161] = "", own_name[64];
    void *got = NULL;
    size_t len = 0;
    int rc = kvs_get_manifest(c->store, name, &got, &len);

    if (rc < 0) {
        bad(c, name, strerror(-rc), min_version);
        return;
    }
    c->n_objects++;
    memcpy(text, got, len < sizeof(text) - 1 ? len : sizeof(text) - 1);
    if (sscanf(text, "kvfault %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64 " %" SCNu64, &o.writer,
               &o.name, &o.version, &o.n_chunks, &o.bytes) != 5 ||
        o.n_chunks > 100000 || o.bytes > 1u << 30) {
        bad(c, name, "WRONG BYTES of a manifest", len);
        free(got);
        return;
    }
    manifest_bytes(&o, &c->want);
    object_name(&o, own_name);
    if (len != c->want.len || memcmp(got, c->want.data, len) != 0 || strcmp(own_name, name) != 0) {
        bad(c, name, "WRONG BYTES of a manifest", o.version);
    } else if (o.version < min_version) {
        bad(c, name, "an older version than was acknowledged", o.version);
    } else {
        for (uint64_t i = 0; i < o.n_chunks; i++)
            check_chunk(c, name, &o, i);
    }
    free(got);
}

static int note_name(void *arg, const kv_store_entry *entry)
{
    struct checker *c = arg;

    if (!strncmp(entry->name, "w", 1))
        kv_buf_append(&c->names, entry->name, strlen(entry->name) + 1);
    return 0;
}

static int read_state(struct checker *c, const char *path)
{
    FILE *f = fopen(path, "re");
    char line[256];

    if (!f)
        return -errno;
    while (fgets(line, sizeof(line), f)) {
        uint64_t writer, name, version;

        if (!strchr(line, '\n')) /* the last one may be cut off: then nobody has seen it */
            break;
        if (sscanf(line, "ACK %" SCNu64 " %" SCNu64 " %" SCNu64, &writer, &name, &version) == 3 &&
            writer < MAX_WRITERS && name < MAX_NAMES && version + 1 > c->acked[writer][name])
            c->acked[writer][name] = version + 1;
    }
    fclose(f);
    return 0;
}

static int check_objects(struct kvs_store *store, const char *state)
{
    static struct checker c;
    uint64_t n_acked = 0;
    int rc;

    c.store = store;
    rc = read_state(&c, state);
    if (rc < 0) {
        say("BAD %s: %s\n", state, strerror(-rc));
        return 2;
    }
    for (uint64_t w = 0; w < MAX_WRITERS; w++) {
        for (uint64_t n = 0; n < MAX_NAMES; n++) {
            char name[64];

            if (!c.acked[w][n])
                continue;
            n_acked++;
            object_name(&(struct object){.writer = w, .name = n}, name);
            check_object(&c, name, c.acked[w][n] - 1);
        }
    }
    rc = kvs_list(store, note_name, &c);
    if (rc < 0 && rc != -ENOTSUP)
        bad(&c, "list", strerror(-rc), 0);
    for (size_t at = 0; at < c.names.len; at += strlen((char *)c.names.data + at) + 1)
        check_object(&c, (char *)c.names.data + at, 0);
    say("%s acknowledged=%" PRIu64 " objects=%" PRIu64 " chunks=%" PRIu64 " bad=%" PRIu64 "\n",
        c.n_bad ? "FAILED" : "OK", n_acked, c.n_objects, c.n_chunks, c.n_bad);
    kv_buf_fini(&c.want);
    kv_buf_fini(&c.names);
    return c.n_bad != 0;
}

int main(int argc, char **argv)
{
    struct kvs_store *store;
    int rc;

    signal(SIGXFSZ, SIG_IGN); /* RLIMIT_FSIZE is to be an error of the store */
    if (!(argc == 9 && !strcmp(argv[1], "write")) && !(argc == 4 && !strcmp(argv[1], "check"))) {
        fprintf(stderr, "usage: store_client write URI WRITER OBJECTS NAMES CHUNKS BYTES FIRST\n"
                        "       store_client check URI STATE\n");
        return 2;
    }
    rc = kvs_open(argv[2], &store);
    if (rc < 0) {
        say("ERR open %d\n", -rc);
        return 3;
    }
    rc = argc == 4 ? check_objects(store, argv[3]) : write_objects(store, argv + 3);
    kvs_close(store);
    return rc;
}
