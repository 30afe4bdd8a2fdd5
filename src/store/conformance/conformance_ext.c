// SPDX-License-Identifier: Apache-2.0
/* Checks of the optional table of kv_store_ext.h. Functions that a backend doesn't offer are
 * skipped. */
#include <stdio.h>

#include "store/conformance/conformance.h"

#define NEED(c, field, cost)                               \
    do {                                                   \
        if (!KVS_CONF_HAS(c, field))                       \
            return kvs_conf_skip(c, "not offered: " cost); \
    } while (0)

static enum kvs_verdict check_table(struct kvs_conf *c)
{
    if (!c->ext)
        return kvs_conf_skip(c, "not offered: no batches, no listing, no collection of garbage");
    if (c->ext->size < offsetof(kv_store_ext, exists_chunks))
        return kvs_conf_fail(c, "size is %zu", c->ext->size);
    if (c->ext->version != KV_STORE_EXT_VERSION)
        return kvs_conf_fail(c, "version is %u", c->ext->version);
    return KVS_PASS;
}

/* Fill @n keys of 16 bytes, one after the other. Put and publish the chunks with odd indices. */
static enum kvs_verdict put_odd(struct kvs_conf *c, uint8_t (*flat)[16], size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++) {
        struct kvs_conf_key key = kvs_conf_key(c, 16);

        memcpy(flat[i], key.bytes, 16);
        if (i % 2)
            KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, &i, sizeof(i), 0));
    }
    return kvs_conf_publish(c, c->h, name, "m", 1);
}

static enum kvs_verdict check_exists(struct kvs_conf *c)
{
    enum { N = 10 };
    uint8_t keys[N][16], present[N];
    struct kvs_conf_key own;
    int rc;

    NEED(c, exists_chunks, "a save puts every chunk again to learn which are there");
    KVS_CONF_TRY(put_odd(c, keys, N, kvs_conf_name(c, "")));
    memset(present, 7, N);
    rc = c->ext->exists_chunks(c->h, keys[0], 16, N, present);
    for (size_t i = 0; i < N; i++)
        if (rc < 0 || present[i] != i % 2)
            return kvs_conf_fail(c, "returned %d, and %u for a chunk that is %s", rc, present[i],
                                 i % 2 ? "there" : "missing");
    own = kvs_conf_key(c, 16);
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &own, "x", 1, 0));
    rc = c->ext->exists_chunks(c->h, own.bytes, 16, 1, present);
    if (rc < 0 || present[0] != 1)
        return kvs_conf_fail(c, "buffered puts of the handle do not count");
    return c->ext->exists_chunks(c->h, keys[0], 16, 0, present) < 0
               ? kvs_conf_fail(c, "failed for no keys")
               : KVS_PASS;
}

static enum kvs_verdict check_get_many(struct kvs_conf *c)
{
    enum { N = 10 };
    uint8_t keys[N][16], *data[N] = {0};
    size_t lens[N] = {0};
    enum kvs_verdict verdict = KVS_PASS;
    int rc;

    NEED(c, get_chunks, "chunks are got one by one, a round trip each");
    KVS_CONF_TRY(put_odd(c, keys, N, kvs_conf_name(c, "")));
    rc = c->ext->get_chunks(c->h, keys[0], 16, N, data, lens);
    if (rc != N / 2)
        verdict = kvs_conf_fail(c, "returned %d, not the number found", rc);
    for (size_t i = 0; i < N; i++) {
        bool is = data[i] && lens[i] == sizeof(i) && memcmp(data[i], &i, sizeof(i)) == 0;

        if (verdict == KVS_PASS && (i % 2 ? !is : data[i] != NULL))
            verdict = kvs_conf_fail(c, "wrong for a chunk that is %s", i % 2 ? "there" : "missing");
        free(data[i]);
    }
    return verdict;
}

struct streamed {
    uint8_t data[5000];
    size_t len, n; /* n: pieces */
    bool gap;
    int stop;
};

static int take_piece(void *arg, uint64_t offset, const uint8_t *piece, size_t len)
{
    struct streamed *s = arg;

    if (offset == 0)
        s->len = s->n = 0;
    s->n++;
    s->gap |= offset != s->len || len > sizeof(s->data) - s->len;
    if (!s->gap) {
        memcpy(s->data + s->len, piece, len);
        s->len += len;
    }
    return s->gap ? -EPROTO : s->stop;
}

static enum kvs_verdict check_empty_stream(struct kvs_conf *c, const struct kvs_conf_key *empty)
{
    struct streamed s = {.len = 0};
    uint8_t buf[8];
    int rc = c->ext->stream_chunk(c->h, empty->bytes, 16, buf, sizeof(buf), take_piece, &s);

    if (rc != 0 || s.gap || s.n != 1 || s.len != 0)
        return kvs_conf_fail(c, "returned %d and gave %zu pieces for an empty chunk, not 0 and 1",
                             rc, s.n);
    return KVS_PASS;
}

static enum kvs_verdict check_stream(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 16), other = kvs_conf_key(c, 16);
    struct kvs_conf_key empty = kvs_conf_key(c, 16);
    struct streamed s = {.len = 0};
    uint8_t data[sizeof(s.data)], buf[700];
    int rc;

    NEED(c, stream_chunk, "a restore reads chunks as a whole before it hands them on");
    for (size_t i = 0; i < sizeof(data); i++)
        data[i] = (uint8_t)(i * 7 + i / 256);
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, sizeof(data), 0));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &empty, "", 0, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(check_empty_stream(c, &empty));
    rc = c->ext->stream_chunk(c->h, key.bytes, 16, buf, sizeof(buf), take_piece, &s);
    if (rc != 0 || s.gap || s.len != sizeof(data) || memcmp(s.data, data, sizeof(data)) != 0)
        return kvs_conf_fail(c, "returned %d, and other pieces than were put", rc);
    s.stop = 77;
    rc = c->ext->stream_chunk(c->h, key.bytes, 16, buf, sizeof(buf), take_piece, &s);
    if (rc != 77)
        return kvs_conf_fail(c, "returned %d, not what ended it", rc);
    rc = c->ext->stream_chunk(c->h, other.bytes, 16, buf, sizeof(buf), take_piece, &s);
    return rc == -ENOENT ? KVS_PASS : kvs_conf_fail(c, "returned %d for a missing chunk", rc);
}

/* Three parts, the middle one empty, with room for @room of the @len bytes put. */
static enum kvs_verdict check_into(struct kvs_conf *c, const struct kvs_conf_key *key, size_t room,
                                   const uint8_t *want, size_t len)
{
    uint8_t memory[6000];
    const struct iovec parts[] = {{memory + 8, 100}, {NULL, 0}, {memory + 116, room - 100}};
    int rc, expected = room < len ? -EMSGSIZE : 0;
    size_t got = 0;

    memset(memory, 0xa5, sizeof(memory));
    rc = c->ext->get_parts(c->h, key->bytes, key->len, parts, 3, &got);
    if (rc != expected || got != len)
        return kvs_conf_fail(c, "returned %d and length %zu, not %d and %zu", rc, got, expected,
                             len);
    if (rc == 0 &&
        (memcmp(memory + 8, want, 100) != 0 || memcmp(memory + 116, want + 100, len - 100) != 0))
        return kvs_conf_fail(c, "other bytes than were put");
    for (size_t i = 0; i < sizeof(memory); i++)
        if ((i < 8 || (i >= 108 && i < 116) || i >= 16 + room) && memory[i] != 0xa5)
            return kvs_conf_fail(c, "byte %zu outside of the parts was written", i);
    return KVS_PASS;
}

static enum kvs_verdict check_get_parts(struct kvs_conf *c)
{
    struct kvs_conf_key key, other;
    uint8_t bytes[5000];
    struct iovec part = {bytes, sizeof(bytes)};
    size_t len = 0;
    int rc;

    NEED(c, get_parts, "a chunk is copied once more on its way into the caller's memory");
    for (size_t i = 0; i < sizeof(bytes); i++)
        bytes[i] = (uint8_t)(i * 7);
    key = kvs_conf_key(c, 16);
    other = kvs_conf_key(c, 16);
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, bytes, sizeof(bytes), 0));
    for (unsigned i = 0; i < 2; i++) { /* before it is published, and after */
        KVS_CONF_TRY(check_into(c, &key, sizeof(bytes), bytes, sizeof(bytes)));
        KVS_CONF_TRY(check_into(c, &key, sizeof(bytes) + 500, bytes, sizeof(bytes)));
        KVS_CONF_TRY(check_into(c, &key, sizeof(bytes) - 1, bytes, sizeof(bytes)));
        KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    }
    rc = c->ext->get_parts(c->h, other.bytes, 16, &part, 1, &len);
    return rc == -ENOENT ? KVS_PASS : kvs_conf_fail(c, "returned %d for a missing chunk", rc);
}

static enum kvs_verdict check_put_parts(struct kvs_conf *c)
{
    struct kvs_conf_key key;
    char bytes[] = "one two three";
    const struct iovec parts[] = {{bytes, 4}, {NULL, 0}, {bytes + 4, 4}, {bytes + 8, 5}};
    int rc;

    NEED(c, put_parts, "parts of a chunk are joined by a copy before they are put");
    key = kvs_conf_key(c, 16);
    rc = c->ext->put_parts(c->h, key.bytes, key.len, parts, KV_COUNT(parts));
    if (rc != 0)
        return kvs_conf_fail(c, "returned %d for a new chunk", rc);
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, bytes, 13));
    rc = c->ext->put_parts(c->h, key.bytes, key.len, parts, KV_COUNT(parts));
    if (rc != 1)
        return kvs_conf_fail(c, "returned %d for a chunk that is there", rc);
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key, bytes, 13);
}

static enum kvs_verdict check_put_many(struct kvs_conf *c)
{
    enum { N = 6 };
    uint8_t keys[N][16];
    const uint8_t *data[N];
    size_t lens[N], values[N];
    int each[N];
    struct kvs_conf_key key[N];

    NEED(c, put_chunks, "chunks are put one by one, a round trip each");
    for (size_t i = 0; i < N; i++) {
        key[i] = kvs_conf_key(c, 16);
        memcpy(keys[i], key[i == N - 1 ? 0 : i].bytes, 16); /* the last repeats the first */
        values[i] = i == N - 1 ? 0 : i;
        data[i] = (const uint8_t *)&values[i];
        lens[i] = sizeof(values[i]);
        each[i] = 7;
    }
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key[2], &values[2], lens[2], 0));
    if (c->ext->put_chunks(c->h, keys[0], 16, N, data, lens, each) < 0)
        return kvs_conf_fail(c, "put_chunks failed");
    for (size_t i = 0; i < N; i++)
        if (each[i] != (i == 2 || i == N - 1))
            return kvs_conf_fail(c, "chunk %zu: said %d, not what put_chunk would", i, each[i]);
    if (c->ext->put_chunks(c->h, keys[0], 16, N, data, lens, NULL) < 0)
        return kvs_conf_fail(c, "put_chunks without ret_each failed");
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (size_t i = 0; i < N - 1; i++)
        KVS_CONF_TRY(kvs_conf_get(c, c->h, &key[i], &values[i], lens[i]));
    return KVS_PASS;
}

static enum kvs_verdict check_delete_chunk(struct kvs_conf *c)
{
    struct kvs_conf_key key, stays;

    NEED(c, delete_chunk, "damaged chunks stay: no save can replace them");
    key = kvs_conf_key(c, 16);
    stays = kvs_conf_key(c, 16);
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "x", 1, 0));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &stays, "y", 1, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    for (unsigned i = 0; i < 2; i++) /* the second call finds nothing and must succeed */
        if (c->ext->delete_chunk(c->h, key.bytes, key.len) != 0)
            return kvs_conf_fail(c, "delete_chunk failed");
    KVS_CONF_TRY(kvs_conf_get_none(c, c->h, &key));
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &stays, "y", 1));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "z", 1, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key, "z", 1);
}

static enum kvs_verdict delete_if(struct kvs_conf *c, const struct kvs_conf_key *key,
                                  const char *data, int want)
{
    int rc = c->ext->delete_chunk_if(c->h, key->bytes, key->len, (const uint8_t *)data, 1);

    return rc == want ? KVS_PASS
                      : kvs_conf_fail(c, "delete_chunk_if returned %d, not %d", rc, want);
}

static enum kvs_verdict check_delete_chunk_if(struct kvs_conf *c)
{
    struct kvs_conf_key key, none, unseen;
    kv_store_v1 *other;

    NEED(c, delete_chunk_if, "a damaged chunk is replaced by delete_chunk, if at all");
    key = kvs_conf_key(c, 16);
    none = kvs_conf_key(c, 16);
    unseen = kvs_conf_key(c, 16);
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    KVS_CONF_TRY(kvs_conf_put(c, other, &unseen, "x", 1, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, other, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(delete_if(c, &unseen, "x", 1)); /* this handle knows nothing of the chunk */
    KVS_CONF_TRY(kvs_conf_get_none(c, c->h, &unseen));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "x", 1, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(delete_if(c, &none, "x", 0));
    KVS_CONF_TRY(delete_if(c, &key, "y", 0));
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, "x", 1));
    KVS_CONF_TRY(delete_if(c, &key, "x", 1));
    KVS_CONF_TRY(kvs_conf_get_none(c, c->h, &key));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "z", 1, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return kvs_conf_get(c, c->h, &key, "z", 1);
}

/* Tell whether the handle says of a chunk that its publication found the chunk missing. */
static enum kvs_verdict new_is(struct kvs_conf *c, const struct kvs_conf_key *key, uint8_t expected)
{
    uint8_t is_new = 9;
    int rc = c->ext->new_chunks(c->h, key->bytes, key->len, 1, &is_new);

    if (rc == 0 && is_new == expected)
        return KVS_PASS;
    return kvs_conf_fail(c, "%s chunk: returned %d and %u, not %u",
                         expected ? "a missing" : "an existing", rc, is_new, expected);
}

static enum kvs_verdict check_new_chunks(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 16);
    int rc;

    NEED(c, new_chunks, "a save may count chunks as new that were there");
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "x", 1, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(new_is(c, &key, 1));
    kvs_conf_close(c, c->h);
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    rc = c->vt->put_chunk(c->h, key.bytes, key.len, (const uint8_t *)"x", 1);
    if (rc < 0)
        return kvs_conf_fail(c, "a second put returned %d", rc);
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return rc == 1 ? KVS_PASS : new_is(c, &key, 0); /* 1: put_chunk has said it */
}

/* Counts how often a listing names the entry that the check looks for. */
struct seek {
    const char *name;
    const struct kvs_conf_key *key;
    uint64_t len;
    unsigned found, wrong, stop_at, seen;
};

static int seek(void *arg, const kv_store_entry *entry)
{
    struct seek *s = arg;
    bool is = s->name ? entry->name && strcmp(entry->name, s->name) == 0
                      : entry->hash && entry->hash_len == s->key->len &&
                            memcmp(entry->hash, s->key->bytes, s->key->len) == 0;

    s->seen++;
    if (is) {
        s->found++;
        s->wrong += entry->len != s->len && entry->len != UINT64_MAX;
    }
    s->wrong += (s->name ? entry->hash != NULL : entry->name != NULL) || entry->size == 0;
    return s->stop_at && s->seen >= s->stop_at ? 42 : 0;
}

typedef int (*list_fn)(kv_store_v1 *self, kv_store_each_fn each, void *arg);

static enum kvs_verdict check_listing(struct kvs_conf *c, list_fn list, struct seek s)
{
    struct seek early = s;
    int rc = list(c->h, seek, &s);

    if (rc < 0)
        return kvs_conf_fail(c, "returned %d", rc);
    if (s.found != 1)
        return kvs_conf_fail(c, "listed an existing entry %u times, not once", s.found);
    if (s.wrong)
        return kvs_conf_fail(c, "gave a wrong length or kind of an entry");
    early.stop_at = 1;
    rc = list(c->h, seek, &early);
    if (rc != 42 || early.seen != 1)
        return kvs_conf_fail(c, "a callback that ends the listing after 1: %u came, returned %d",
                             early.seen, rc);
    return KVS_PASS;
}

static enum kvs_verdict check_list_manifests(struct kvs_conf *c)
{
    const char *name = kvs_conf_name(c, "list me");
    struct seek s = {.name = name, .len = 5};

    NEED(c, list_manifests, "kvasir store ls and gc can't run");
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    /* the backend refuses blanks in names */
    if (c->vt->put_manifest(c->h, name, (const uint8_t *)"12345", 5) != 0) {
        s.name = kvs_conf_name(c, "listed");
        KVS_CONF_TRY(kvs_conf_publish(c, c->h, s.name, "12345", 5));
    }
    KVS_CONF_TRY(check_listing(c, c->ext->list_manifests, s));
    KVS_CONF_TRY(kvs_conf_delete(c, c->h, s.name));
    c->ext->list_manifests(c->h, seek, &s);
    return s.found == 0 ? KVS_PASS : kvs_conf_fail(c, "listed a deleted manifest");
}

static enum kvs_verdict check_list_chunks(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 32), other = kvs_conf_key(c, 8);
    struct seek s = {.key = &key, .len = 3};

    NEED(c, list_chunks, "kvasir store gc and verify find no chunk that no manifest names");
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "abc", 3, 0));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &other, "abc", 3, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    return check_listing(c, c->ext->list_chunks, s);
}

static enum kvs_verdict check_refs(struct kvs_conf *c)
{
    struct kvs_conf_key fresh = kvs_conf_key(c, 16), hit = kvs_conf_key(c, 16);
    const char *name = kvs_conf_name(c, ""), *none = kvs_conf_name(c, "");
    struct seek first = {.key = &fresh, .len = 5}, second = {.key = &hit, .len = 3};
    int rc;

    NEED(c, list_refs, "gc keeps every chunk while there is a manifest of another format");
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &hit, "hit", 3, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    kvs_conf_close(c, c->h);
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &fresh, "fresh", 5, 0));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &hit, "hit", 3, -1));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, name, "m", 1));
    rc = c->ext->list_refs(c->h, name, seek, &first);
    if (rc < 0 || c->ext->list_refs(c->h, name, seek, &second) < 0)
        return kvs_conf_fail(c, "returned %d", rc);
    if (!first.found || !second.found)
        return kvs_conf_fail(c, "forgot a chunk that was %s", first.found ? "hit" : "put");
    rc = c->ext->list_refs(c->h, none, seek, &first);
    return rc == -ENOENT ? KVS_PASS : kvs_conf_fail(c, "no such manifest: returned %d", rc);
}

static enum kvs_verdict check_touch(struct kvs_conf *c)
{
    enum { N = 10 };
    uint8_t keys[N][16];
    int rc;

    NEED(c, touch_chunks, "chunks that a save reuses may look unused to gc");
    KVS_CONF_TRY(put_odd(c, keys, N, kvs_conf_name(c, "")));
    rc = c->ext->touch_chunks(c->h, keys[0], 16, N);
    return rc == N / 2 ? KVS_PASS : kvs_conf_fail(c, "returned %d, not how many are there", rc);
}

static enum kvs_verdict check_flush(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 16);
    kv_store_v1 *other;

    NEED(c, flush, "puts are durable only with the next manifest");
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "x", 1, 0));
    if (c->ext->flush(c->h) != 0)
        return kvs_conf_fail(c, "flush failed");
    KVS_CONF_TRY(kvs_conf_open(c, &other));
    return kvs_conf_get(c, other, &key, "x", 1);
}

/* Liveness callback of the sweep: only @victim is dead, so that a shared store keeps all other
 * chunks. */
static int all_but(void *arg, const uint8_t *hash, size_t hash_len)
{
    const struct kvs_conf_key *victim = arg;

    return !(hash_len == victim->len && memcmp(hash, victim->bytes, hash_len) == 0);
}

static enum kvs_verdict check_sweep(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 16), stays = kvs_conf_key(c, 16);
    kv_store_swept swept = {.size = sizeof(swept)};
    int rc;

    NEED(c, sweep_chunks, "kvasir store gc deletes nothing");
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "xy", 2, 0));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &stays, "z", 1, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    kvs_conf_close(c, c->h); /* a live handle may protect what it put */
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    rc = c->ext->sweep_chunks(c->h, 86400, all_but, &key, &swept);
    if (rc < 0)
        return kvs_conf_fail(c, "returned %d", rc);
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, "xy", 2)); /* too young */
    kvs_conf_close(c, c->h);
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    swept = (kv_store_swept){.size = sizeof(swept)};
    rc = c->ext->sweep_chunks(c->h, 0, all_but, &key, &swept);
    if (rc < 0 || swept.deleted != 1)
        return kvs_conf_fail(c, "of one dead chunk: returned %d, deleted %llu", rc,
                             (unsigned long long)swept.deleted);
    KVS_CONF_TRY(kvs_conf_get_none(c, c->h, &key));
    return kvs_conf_get(c, c->h, &stays, "z", 1);
}

static enum kvs_verdict check_stats(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 16), none = kvs_conf_key(c, 16);
    kv_store_stats before = {.size = sizeof(before)}, after = {.size = sizeof(after)};

    NEED(c, stats, "kvasir store stats has no sizes and counters");
    if (c->ext->stats(c->h, &before) < 0)
        return kvs_conf_fail(c, "stats failed");
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "xy", 2, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, "xy", 2, -1));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    KVS_CONF_TRY(kvs_conf_get(c, c->h, &key, "xy", 2));
    KVS_CONF_TRY(kvs_conf_get_none(c, c->h, &none));
    if (c->ext->stats(c->h, &after) < 0)
        return kvs_conf_fail(c, "stats failed");
    if (after.puts != before.puts + 1 || after.put_hits != before.put_hits + 1 ||
        after.gets <= before.gets || after.get_misses != before.get_misses + 1)
        return kvs_conf_advise(c, "one put, one hit, one get, one miss were counted otherwise");
    return KVS_PASS;
}

/* -- parts ------------------------------------------------------------------------------------- */

enum { RANGES_LEN = 300000 };

/* Read one part with the version @tag ("": any), which becomes that of the answer. */
static int read_range(struct kvs_conf *c, const struct kvs_conf_key *key, uint64_t offset,
                      size_t len, uint8_t *buf, char tag[KV_STORE_TAG_MAX])
{
    /* three parts, one of them empty */
    struct iovec parts[3] = {{buf, len / 3}, {NULL, 0}, {buf + len / 3, len - len / 3}};
    kv_store_range range = {.hash = key->bytes,
                            .hash_len = key->len,
                            .offset = offset,
                            .len = len,
                            .parts = parts,
                            .n_parts = 3};
    int rc;

    memcpy(range.tag, tag, sizeof(range.tag));
    range.rc = -EIO;
    rc = c->ext->get_ranges(c->h, &range, 1);
    memcpy(tag, range.tag, sizeof(range.tag));
    return rc < 0 ? rc : rc == (range.rc == 0) ? range.rc : -EPROTO;
}

static enum kvs_verdict range_is(struct kvs_conf *c, const struct kvs_conf_key *key,
                                 uint64_t offset, size_t len, const uint8_t *whole,
                                 char tag[KV_STORE_TAG_MAX])
{
    uint8_t *buf = kvs_conf_alloc(c, len + 1);
    int rc;

    buf[len] = 0xa5;
    rc = read_range(c, key, offset, len, buf, tag);
    if (rc != 0)
        return kvs_conf_fail(c, "%zu bytes at %llu: %d", len, (unsigned long long)offset, rc);
    if (memcmp(buf, whole + offset, len) != 0)
        return kvs_conf_fail(c, "%zu bytes at %llu: other bytes", len, (unsigned long long)offset);
    return buf[len] == 0xa5 ? KVS_PASS : kvs_conf_fail(c, "wrote behind the consumer's memory");
}

/* Bytes of another object under the key must not be taken for the version of before. */
static enum kvs_verdict check_replaced(struct kvs_conf *c, const struct kvs_conf_key *key,
                                       char tag[KV_STORE_TAG_MAX])
{
    uint8_t *other = kvs_conf_data(c, RANGES_LEN, 77), buf[10];
    char fresh[KV_STORE_TAG_MAX] = "";
    int rc;

    if (!KVS_CONF_HAS(c, delete_chunk))
        return KVS_PASS;
    if (c->ext->delete_chunk(c->h, key->bytes, key->len) != 0)
        return kvs_conf_fail(c, "delete_chunk failed");
    KVS_CONF_TRY(kvs_conf_put(c, c->h, key, other, RANGES_LEN, -1));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    rc = read_range(c, key, 1000, sizeof(buf), buf, tag);
    if (rc != -ESTALE)
        return kvs_conf_fail(c, "the chunk was replaced, and the version of before asked for: %d",
                             rc);
    return range_is(c, key, 1000, 10, other, fresh);
}

static enum kvs_verdict check_get_ranges(struct kvs_conf *c)
{
    struct kvs_conf_key key = kvs_conf_key(c, 24), none = kvs_conf_key(c, 24);
    uint8_t *data = kvs_conf_data(c, RANGES_LEN, 5), buf[10];
    char tag[KV_STORE_TAG_MAX] = "", other[KV_STORE_TAG_MAX] = "\"no-such-version\"";
    int rc;

    NEED(c, get_ranges, "a tiered store keeps no packs there: each blob is read by a call");
    KVS_CONF_TRY(kvs_conf_put(c, c->h, &key, data, RANGES_LEN, 0));
    KVS_CONF_TRY(kvs_conf_publish(c, c->h, kvs_conf_name(c, ""), "m", 1));
    kvs_conf_close(c, c->h);
    KVS_CONF_TRY(kvs_conf_open(c, &c->h));
    KVS_CONF_TRY(range_is(c, &key, 0, 1, data, tag));
    if (!tag[0])
        return kvs_conf_fail(c, "told no version");
    KVS_CONF_TRY(range_is(c, &key, 0, RANGES_LEN, data, tag));
    KVS_CONF_TRY(range_is(c, &key, 4097, 130000, data, tag));
    KVS_CONF_TRY(range_is(c, &key, RANGES_LEN - 7, 7, data, tag));
    rc = read_range(c, &key, RANGES_LEN - 7, 8, buf, tag);
    if (rc != -ERANGE)
        return kvs_conf_fail(c, "a part that ends behind the chunk: %d", rc);
    rc = read_range(c, &key, RANGES_LEN + 10, 8, buf, tag);
    if (rc != -ERANGE)
        return kvs_conf_fail(c, "a part that begins behind the chunk: %d", rc);
    rc = read_range(c, &key, 0, 8, buf, other);
    if (rc != -ESTALE)
        return kvs_conf_fail(c, "a version that isn't there: %d", rc);
    other[0] = '\0';
    rc = read_range(c, &none, 0, 8, buf, other);
    if (rc != -ENOENT)
        return kvs_conf_fail(c, "of a missing chunk: %d", rc);
    return check_replaced(c, &key, tag);
}

const struct kvs_conf_check KVS_CONF_EXT[] = {
    {"ext: table has a size and version 1", check_table},
    {"ext: exists_chunks", check_exists},
    {"ext: get_chunks", check_get_many},
    {"ext: put_chunks", check_put_many},
    {"ext: delete_chunk", check_delete_chunk},
    {"ext: list_manifests", check_list_manifests},
    {"ext: list_chunks", check_list_chunks},
    {"ext: list_refs", check_refs},
    {"ext: touch_chunks", check_touch},
    {"ext: flush", check_flush},
    {"ext: sweep_chunks", check_sweep},
    {"ext: stats", check_stats},
    {"ext: stream_chunk", check_stream},
    {"ext: get_parts", check_get_parts},
    {"ext: put_parts", check_put_parts},
    {"ext: delete_chunk_if", check_delete_chunk_if},
    {"ext: new_chunks", check_new_chunks},
    {"ext: get_ranges", check_get_ranges},
    {NULL, NULL},
};
