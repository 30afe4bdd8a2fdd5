// SPDX-License-Identifier: Apache-2.0
/* Checks of the ABI's seven functions (eight in version 2), by one thread. */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "store/conformance.h"

static enum kvs_verdict check_table(struct kvs_conf *c)
{
    const kv_store_vtable *vt = c->vt;

    if (vt->version < KV_STORE_VERSION_1)
        return kvs_conf_fail(c, "version is %u", vt->version);
    if (!vt->open || !vt->close || !vt->put_chunk || !vt->get_chunk || !vt->put_manifest ||
        !vt->get_manifest || !vt->delete_manifest)
        return kvs_conf_fail(c, "a function of version 1 is NULL");
    return KVS_PASS;
}

static enum kvs_verdict check_version(struct kvs_conf *c)
{
    /* A table of version 1 may end before the field, so don't read it. */
    if (c->vt->version > KV_STORE_VERSION_2)
        return kvs_conf_advise(c, "version is %u; 2 is the highest that is known", c->vt->version);
    if (c->vt->version == KV_STORE_VERSION_2 && !c->vt->prefetch_chunks)
        return kvs_conf_fail(c, "version is 2, but prefetch_chunks is NULL");
    return KVS_PASS;
}

static enum kvs_verdict check_exports(struct kvs_conf *c)
{
    char others[160];
    int n;

    if (!c->library)
        return kvs_conf_skip(c, "built in: no library to look at");
    n = kvs_conf_exports(c->library, others, sizeof(others));
    if (n < 0)
        return kvs_conf_skip(c, "can't read the symbols of %.150s", c->library);
    return n == 0 ? KVS_PASS
                  : kvs_conf_advise(c, "%d more, which may meet the engine's own: %s", n, others);
}

/* Close NULL in a child process: a crash fails this check and the other checks still run. */
static enum kvs_verdict check_close_null(struct kvs_conf *c)
{
    int status = 0;
    pid_t pid = fork();

    if (pid == 0) {
        for (int i = 1; i < NSIG; i++) /* a sanitizer, or the host, may have handlers */
            signal(i, SIG_DFL);
        alarm(10);
        c->vt->close(NULL);
        _exit(0);
    }
    if (pid < 0)
        return kvs_conf_skip(c, "can't fork");
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return kvs_conf_skip(c, "can't wait for a child");
    if (WIFSIGNALED(status))
        return kvs_conf_fail(c, "it died of signal %d", WTERMSIG(status));
    return WEXITSTATUS(status) == 0 ? KVS_PASS : kvs_conf_fail(c, "it ended the process");
}

/* Count the descriptors that this process has open; 0 when /proc can't be read. */
static size_t count_fds(void)
{
    DIR *dir = opendir("/proc/self/fd");
    size_t n = 0;

    if (!dir)
        return 0;
    while (readdir(dir))
        n++;
    closedir(dir);
    return n;
}

static enum kvs_verdict check_open_close(struct kvs_conf *c)
{
    size_t before, after;
    kv_store_v1 *h;

    /* warm up: descriptors that a backend opens once and keeps are no leak */
    for (unsigned i = 0; i < 2; i++) {
        KVS_CONF_TRY(kvs_conf_open(c, &h));
        kvs_conf_close(c, h);
    }
    before = count_fds();
    for (unsigned i = 0; i < 16; i++) {
        KVS_CONF_TRY(kvs_conf_open(c, &h));
        kvs_conf_close(c, h);
    }
    after = count_fds();
    if (after >= before + 16)
        return kvs_conf_fail(c, "16 times open and close left %zu descriptors", after - before);
    return KVS_PASS;
}

static enum kvs_verdict check_signals(struct kvs_conf *c)
{
    static const int SIGNALS[] = {SIGPIPE, SIGINT, SIGTERM, SIGALRM, SIGUSR1, SIGCHLD};
    struct sigaction before[KV_COUNT(SIGNALS)], after;
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    kv_store_v1 *h;

    for (size_t i = 0; i < KV_COUNT(SIGNALS); i++)
        sigaction(SIGNALS[i], NULL, &before[i]);
    KVS_CONF_TRY(kvs_conf_open(c, &h));
    KVS_CONF_TRY(kvs_conf_put(c, h, &key, "x", 1, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, h, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < KV_COUNT(SIGNALS); i++) {
        sigaction(SIGNALS[i], NULL, &after);
        if (after.sa_handler != before[i].sa_handler)
            return kvs_conf_advise(c, "changed the host's handler of signal %d", SIGNALS[i]);
    }
    return KVS_PASS;
}

static enum kvs_verdict check_sizes(struct kvs_conf *c)
{
    static const size_t SIZES[] = {0,    1,    2,     7,     255,   256,           4095,
                                   4096, 4097, 65535, 65536, 65537, (1 << 20) - 1, 16 << 20};
    struct kvs_conf_key keys[KV_COUNT(SIZES)];
    const char *name = kvs_conf_name(c, "");
    uint8_t *data = kvs_conf_data(c, 16 << 20, c->run);
    kv_store_v1 *other;

    for (size_t i = 0; i < KV_COUNT(SIZES); i++) {
        keys[i] = kvs_conf_key(c, 8);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], data + i, SIZES[i] - KV_MIN(SIZES[i], i), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "sizes", 5));
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    for (size_t i = 0; i < KV_COUNT(SIZES); i++) {
        size_t len = SIZES[i] - KV_MIN(SIZES[i], i);

        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], data + i, len));
        KVS_CONF_TRY(kvs_conf_get(c, other, &keys[i], data + i, len));
    }
    return KVS_PASS;
}

/* Zeros (as after a lost write), text that compresses well, noise. */
static enum kvs_verdict check_contents(struct kvs_conf *c)
{
    const size_t len = 1 << 20;
    uint8_t *data[3] = {kvs_conf_alloc(c, len), kvs_conf_alloc(c, len), kvs_conf_data(c, len, 7)};
    struct kvs_conf_key keys[3];

    for (size_t i = 0; i < len; i++)
        data[1][i] = (uint8_t) "KV state. "[i % 10];
    for (size_t i = 0; i < 3; i++) {
        keys[i] = kvs_conf_key(c, 16);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], data[i], len, 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < 3; i++)
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], data[i], len));
    return KVS_PASS;
}

static enum kvs_verdict check_empty(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 32);
    const char *name = kvs_conf_name(c, "");

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "", 0, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "", 0));
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, "", 0));
    KVS_CONF_TRY(kvs_conf_read(c, c->h, name, "", 0));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "", 0, -1));
    return KVS_PASS;
}

/* True when puts wait for the manifest: until then another handle doesn't see them. */
static bool is_buffering(struct kvs_conf *c, kv_store_v1 *other)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *got;
    size_t len;

    if (c->vt->put_chunk(c->h, key.bytes, key.len, (const uint8_t *)"x", 1) != 0)
        return false;
    if (c->vt->get_chunk(other, key.bytes, key.len, &got, &len) < 0)
        return true;
    free(got);
    return false;
}

/* A backend may look for duplicates only when it writes, at put_manifest (the specification allows
 * it). One that writes at once must report the duplicate at put_chunk. */
static enum kvs_verdict check_duplicates(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *data = kvs_conf_data(c, 1000, 1);
    kv_store_v1 *other;
    int rc;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 1000, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    rc = c->vt->put_chunk(other, key.bytes, key.len, data, 1000);
    if (rc == 0 && !is_buffering(c, other))
        return kvs_conf_fail(c, "put_chunk returned 0, although it writes at once");
    if (rc != 0 && rc != 1)
        return kvs_conf_fail(c, "put_chunk returned %d", rc);
    KVS_CONF_TRY(kvs_conf_publish(c, other, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(kvs_conf_get(c, other, &key, data, 1000));
    return rc == 1 ? KVS_PASS : kvs_conf_skip(c, "buffers: looks only at put_manifest");
}

/* Put a chunk twice before the manifest. A backend that writes at once must call the second put a
 * hit; for one that buffers, an advice is recorded. */
static enum kvs_verdict check_duplicate_buffered(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *data = kvs_conf_data(c, 1000, 1);
    kv_store_v1 *other;
    int rc;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 1000, 0));
    rc = c->vt->put_chunk(c->h, key.bytes, key.len, data, 1000);
    if (rc != 0 && rc != 1)
        return kvs_conf_fail(c, "put_chunk returned %d", rc);
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    if (rc == 0 && !is_buffering(c, other))
        return kvs_conf_fail(c, "put_chunk returned 0, although it writes at once");
    if (rc == 0)
        kvs_conf_advise(c, "the second put returned 0: consumers count it as new");
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key, data, 1000);
}

static enum kvs_verdict check_immutable(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *first = kvs_conf_data(c, 500, 1), *second = kvs_conf_data(c, 500, 2);

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, first, 500, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    c->vt->put_chunk(c->h, key.bytes, key.len, second, 500); /* a hit or refused, never stored */
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key, first, 500);
}

/* Each get hands out memory of its own, which the caller may change and frees. */
static enum kvs_verdict check_outputs(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *data = kvs_conf_data(c, 300, 1), *a = NULL, *b = NULL;
    const char *name = kvs_conf_name(c, "");
    size_t len;
    int rc;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 300, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data, 300));
    for (unsigned manifest = 0; manifest < 2; manifest++) {
        rc = manifest ? c->vt->get_manifest(c->h, name, &a, &len)
                      : c->vt->get_chunk(c->h, key.bytes, key.len, &a, &len);
        if (rc != 0 || !a || len != 300)
            return kvs_conf_fail(c, "the first get returned %d", rc);
        memset(a, 0, len);
        rc = manifest ? c->vt->get_manifest(c->h, name, &b, &len)
                      : c->vt->get_chunk(c->h, key.bytes, key.len, &b, &len);
        if (rc == 0 && a == b)
            /* a shared buffer: freeing it could crash */
            return kvs_conf_fail(c, "two gets gave the same memory");
        free(a);
        if (rc != 0 || !b || len != 300)
            return kvs_conf_fail(c, "the second get returned %d", rc);
        rc = memcmp(b, data, len);
        free(b);
        if (rc != 0)
            return kvs_conf_fail(c, "writing to an output changed what is stored");
    }
    return KVS_PASS;
}

/* Inputs are valid during the call only, and may lie at any address. */
static enum kvs_verdict check_inputs(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *good = kvs_conf_data(c, 70000, 1), *data = kvs_conf_alloc(c, 70001) + 1;
    uint8_t *hash = kvs_conf_alloc(c, 9) + 1;
    const char *name = kvs_conf_name(c, "");
    char *lent = (char *)kvs_conf_alloc(c, 100) + 1;

    memcpy(hash, key.bytes, key.len);
    memcpy(data, good, 70000);
    snprintf(lent, 99, "%s", name);
    if (c->vt->put_chunk(c->h, hash, key.len, data, 70000) != 0)
        return kvs_conf_fail(c, "put_chunk from odd addresses failed");
    memset(hash, 0xee, key.len);
    memset(data, 0xee, 70000);
    memcpy(data, good, 50);
    if (c->vt->put_manifest(c->h, lent, data, 50) != 0)
        return kvs_conf_fail(c, "put_manifest from odd addresses failed");
    memset(data, 0xee, 50);
    memset(lent, 'e', 20);
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, good, 70000));
    return kvs_conf_read(c, c->h, name, good, 50);
}

static enum kvs_verdict check_key_lengths(struct kvs_conf *c)
{
    static const size_t LENS[] = {8, 16, 20, 32};
    struct kvs_conf_key key = kvs_conf_key(c, 32), keys[KV_COUNT(LENS)];

    for (size_t i = 0; i < KV_COUNT(LENS); i++) { /* each a prefix of the next */
        keys[i] = key;
        keys[i].len = LENS[i];
        kvs_conf_forget_key(c, &keys[i]);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], &LENS[i], sizeof(LENS[i]), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < KV_COUNT(LENS); i++)
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], &LENS[i], sizeof(LENS[i])));
    key.len = 24;
    return kvs_conf_get_none(c, c->h, &key);
}

/* Keys are bytes, not text: NUL, '/', line ends and high bytes count as any other. */
static enum kvs_verdict check_key_bytes(struct kvs_conf *c)
{
    static const uint8_t BYTES[] = {0x00, 0x01, '\n', '\r', ' ', '%',
                                    '*',  '/',  '{',  'A',  'a', 0xff};
    struct kvs_conf_key keys[2 * KV_COUNT(BYTES)], base = kvs_conf_key(c, 8);

    for (size_t i = 0; i < KV_COUNT(keys); i++) {
        keys[i] = base;
        keys[i].bytes[i % 2 ? 7 : 3] = BYTES[i / 2];
        if (i % 2)
            keys[i].bytes[3] = 0x00; /* bytes behind a NUL count, too */
        else
            keys[i].bytes[7] = 0x5c;
        kvs_conf_forget_key(c, &keys[i]);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], &i, sizeof(i), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < KV_COUNT(keys); i++)
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], &i, sizeof(i)));
    return KVS_PASS;
}

static enum kvs_verdict check_missing_chunk(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8), wide = kvs_conf_key(c, 32);

    KVS_CONF_TRY(kvs_conf_get_none(c, c->h, &key));
    KVS_CONF_TRY(kvs_conf_get_none(c, c->h, &wide));
    /* the backend must not remember the miss */
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "late", 4, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key, "late", 4);
}

static enum kvs_verdict check_missing_manifest(struct kvs_conf *c)
{
    const char *name = kvs_conf_name(c, "");

    KVS_CONF_TRY(kvs_conf_read_none(c, c->h, name));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "late", 4));
    return kvs_conf_read(c, c->h, name, "late", 4);
}

static enum kvs_verdict check_manifest_sizes(struct kvs_conf *c)
{
    static const size_t SIZES[] = {1, 100, 4096, 65537, 4 << 20};
    uint8_t *data = kvs_conf_data(c, 4 << 20, 3);
    kv_store_v1 *other;

    KVS_CONF_TRY(kvs_conf_open(c, &other));
    for (size_t i = 0; i < KV_COUNT(SIZES); i++) {
        const char *name = kvs_conf_name(c, "");

        KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data, SIZES[i]));
        KVS_CONF_TRY(kvs_conf_read(c, other, name, data, SIZES[i]));
    }
    return KVS_PASS;
}

static enum kvs_verdict check_manifest_replace(struct kvs_conf *c)
{
    const char *name = kvs_conf_name(c, "");
    uint8_t *data = kvs_conf_data(c, 100000, 3);
    kv_store_v1 *other;

    KVS_CONF_TRY(kvs_conf_open(c, &other));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data, 100000));
    KVS_CONF_TRY(kvs_conf_read(c, other, name, data, 100000));
    /* nothing of the longer manifest remains */
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data + 1, 10));
    KVS_CONF_TRY(kvs_conf_read(c, other, name, data + 1, 10));
    /* replaced through another handle as well */
    KVS_CONF_TRY(kvs_conf_publish(c, other, name, data + 2, 5000));
    KVS_CONF_TRY(kvs_conf_read(c, other, name, data + 2, 5000));
    return kvs_conf_read(c, c->h, name, data + 2, 5000);
}

static enum kvs_verdict check_delete(struct kvs_conf *c)
{
    const char *name = kvs_conf_name(c, "");
    char *sibling = (char *)kvs_conf_alloc(c, 200);
    kv_store_v1 *other;

    snprintf(sibling, 200, "%s-sibling", name);
    kvs_conf_forget_name(c, sibling);
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, name)); /* deleting a missing manifest succeeds */
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "one", 3));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, sibling, "two", 3));
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, name));
    KVS_CONF_TRY(kvs_conf_read_none(c, c->h, name));
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    KVS_CONF_TRY(kvs_conf_read_none(c, other, name));
    KVS_CONF_TRY(kvs_conf_read(c, other, sibling, "two", 3));
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, name));
    KVS_CONF_TRY(kvs_conf_publish(c, other, name, "again", 5));
    return kvs_conf_read(c, c->h, name, "again", 5);
}

/* Delete one of two manifests that share a chunk. The second was published after the first and its
 * saver put the chunk again. The specification leaves open whether delete removes chunks, so a loss
 * is an advice only. */
static enum kvs_verdict check_delete_shared(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    const char *one = kvs_conf_name(c, ""), *two = kvs_conf_name(c, "");
    uint8_t *got = NULL;
    size_t len;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "shared", 6, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, one, "m", 1));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "shared", 6, -1));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, two, "m", 1));
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, one));
    if (c->vt->get_chunk(c->h, key.bytes, key.len, &got, &len) < 0)
        return kvs_conf_advise(c, "a chunk went although another object needs it: a later restore "
                                  "of that is a miss");
    free(got);
    return kvs_conf_get(c, c->h, &key, "shared", 6);
}

static enum kvs_verdict check_visible(struct kvs_conf *c)
{
    enum { N = 64 };
    struct kvs_conf_key keys[N];
    const char *name = kvs_conf_name(c, "");
    kv_store_v1 *other;

    /* opened before the change, so the handle must not answer from memory */
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    for (size_t i = 0; i < N; i++) {
        keys[i] = kvs_conf_key(c, i % 2 ? 8 : 32);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], &i, sizeof(i), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "m", 1));
    KVS_CONF_TRY(kvs_conf_read(c, other, name, "m", 1));
    for (size_t i = 0; i < N; i++) {
        KVS_CONF_TRY(kvs_conf_get(c, other, &keys[i], &i, sizeof(i)));
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], &i, sizeof(i)));
    }
    return KVS_PASS;
}

/* Get a handle's own puts before the manifest. The specification leaves open whether a handle sees
 * them; wrong bytes are a failure. */
static enum kvs_verdict check_own_puts(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    uint8_t *data = kvs_conf_data(c, 5000, 1), *got = NULL;
    size_t len = 0;
    int rc;

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 5000, 0));
    rc = c->vt->get_chunk(c->h, key.bytes, key.len, &got, &len);
    if (rc < 0)
        return kvs_conf_advise(c, "not before put_manifest (%d); some consumers expect it", rc);
    if (!got || len != 5000 || memcmp(got, data, len) != 0)
        rc = -1;
    free(got);
    return rc == 0 ? KVS_PASS : kvs_conf_fail(c, "gave other bytes than were put");
}

static enum kvs_verdict check_many(struct kvs_conf *c)
{
    enum { N = 1000 };
    struct kvs_conf_key *keys = (struct kvs_conf_key *)kvs_conf_alloc(c, N * sizeof(*keys));

    for (uint64_t i = 0; i < N; i++) {
        keys[i] = kvs_conf_key(c, 8);
        KVS_CONF_TRY(kvs_conf_put(c, c->h, &keys[i], &i, sizeof(i), 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (uint64_t i = 0; i < N; i++)
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &keys[i], &i, sizeof(i)));
    return KVS_PASS;
}

static enum kvs_verdict check_reopen(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 8);
    const char *name = kvs_conf_name(c, "");
    uint8_t *data = kvs_conf_data(c, 100000, 1);

    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, 100000, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, data, 99));
    kvs_conf_close(c, c->h); /* the only handle */
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    KVS_CONF_TRY(kvs_conf_read(c, c->h, name, data, 99));
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, data, 100000));
    return kvs_conf_put(c, c->h, &key, data, 100000, -1);
}

/* Prefetch, whatever it returns, must not change what gets return. */
static enum kvs_verdict check_prefetch(struct kvs_conf *c)
{
    enum { N = 20 };
    uint8_t keys[N][32], *data = kvs_conf_data(c, 3000, 1);
    struct kvs_conf_key key[N];

    if (c->vt->version < KV_STORE_VERSION_2 || !c->vt->prefetch_chunks)
        return kvs_conf_skip(c, "version 1");
    for (size_t i = 0; i < N; i++) {
        key[i] = kvs_conf_key(c, 32);
        memcpy(keys[i], key[i].bytes, 32);
        if (i % 2)
            KVS_CONF_TRY(kvs_conf_put(c, c->h, &key[i], data + i, 2000 + i, 0));
    }
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    kvs_conf_close(c, c->h);
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    if (c->vt->prefetch_chunks(c->h, keys[0], 32, N) > 0)
        return kvs_conf_fail(c, "returned more than 0");
    c->vt->prefetch_chunks(c->h, keys[0], 32, 0);
    /* twice: prefetched chunks can be got more than once */
    for (size_t round = 0; round < 2; round++)
        for (size_t i = 0; i < N; i++)
            KVS_CONF_TRY(i % 2 ? kvs_conf_get(c, c->h, &key[i], data + i, 2000 + i)
                               : kvs_conf_get_none(c, c->h, &key[i]));
    /* missing at the prefetch, put after it */
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key[0], data, 10, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key[0], data, 10);
}

const struct kvs_conf_check KVS_CONF_ABI[] = {
    {"table: version 1 or more, no function NULL", check_table}, /* first: see run_check */
    {"table: the version says what there is", check_version},
    {"library: exports nothing but its tables", check_exports},
    {"close: NULL is a no-op", check_close_null},
    {"open, close: leave no descriptors open", check_open_close},
    {"open: leaves the host's signals alone", check_signals},
    {"chunks: 0 B to 16 MiB come back as put", check_sizes},
    {"chunks: zeros, text and noise come back", check_contents},
    {"chunks, manifests: empty ones exist", check_empty},
    {"chunks: a duplicate returns 1", check_duplicates},
    {"chunks: a buffered duplicate returns 1", check_duplicate_buffered},
    {"chunks: never change", check_immutable},
    {"chunks: 8- to 32-byte keys coexist", check_key_lengths},
    {"chunks: keys are bytes, not text", check_key_bytes},
    {"chunks: a missing one is an error", check_missing_chunk},
    {"chunks: a handle sees its own puts", check_own_puts},
    {"chunks: 1000 in one save", check_many},
    {"outputs: malloc'd, the caller's own", check_outputs},
    {"inputs: borrowed for the call only", check_inputs},
    {"manifests: up to 4 MiB come back", check_manifest_sizes},
    {"manifests: replaced whole, on all handles", check_manifest_replace},
    {"manifests: a missing one is an error", check_missing_manifest},
    {"delete: gone everywhere; missing is fine", check_delete},
    {"delete: takes no chunk of another object", check_delete_shared},
    {"publish: all chunks visible to others", check_visible},
    {"publish: everything is there after re-open", check_reopen},
    {"prefetch: a hint that changes nothing", check_prefetch},
    {NULL, NULL},
};
