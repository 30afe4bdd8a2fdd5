// SPDX-License-Identifier: Apache-2.0
/*
 * Snapshots: states that can't be cut at tokens, whole. A head under the key of exactly these tokens
 * names the parts, which are chunks under the hashes of their bytes.
 */
#include "base/core/le.h"
#include "base/core/log.h"
#include "base/hash/hash.h"
#include "llama/cache.h"

enum { PART_BYTES = KV_PREFIX_PART_MAX, WINDOW_PARTS = 16, FIRST_SLICE = 64, SLICE_MAX = 4096 };

/* Hash the tokens [0, n): from @at (root, or the hash of the tokens before @from) to @at. */
static void chain(uint8_t at[KV_PREFIX_HASH], const int32_t *tokens, size_t from, size_t n)
{
    uint8_t text[KV_PREFIX_HASH + 4];

    memcpy(text, at, KV_PREFIX_HASH);
    for (size_t i = from; i < n; i++) {
        kvl_put_token(text + KV_PREFIX_HASH, tokens[i]);
        kv_prefix_sum(text, sizeof(text), text);
    }
    memcpy(at, text, KV_PREFIX_HASH);
}

static void head_key(const uint8_t root[KV_PREFIX_HASH], const int32_t *tokens, size_t n,
                     uint8_t ret[KV_PREFIX_KEY])
{
    uint8_t hash[KV_PREFIX_HASH];

    memcpy(hash, root, sizeof(hash));
    chain(hash, tokens, 0, n);
    kv_prefix_key(KV_PREFIX_SNAPSHOT, hash, ret);
}

/* -- find -------------------------------------------------------------------------------------- */

/* Find the longest snapshot by reading its head: a get for each token, from the last one down. */
static int64_t find_by_gets(struct kvl_cache *c, const uint8_t *keys, size_t n)
{
    for (size_t i = n; i > 0; i--) {
        int rc = kvl_is_there(c, keys + (i - 1) * KV_PREFIX_KEY);

        if (rc)
            return rc < 0 ? rc : (int64_t)i;
    }
    return 0;
}

int64_t kvl_snapshot_find(struct kvl_cache *c, const uint8_t root[KV_PREFIX_HASH],
                          const int32_t *tokens, size_t n)
{
    uint8_t *keys = malloc(KV_MAX(n * (KV_PREFIX_KEY + 1), (size_t)1));
    uint8_t *present = keys ? keys + n * KV_PREFIX_KEY : NULL, hash[KV_PREFIX_HASH];
    const struct kv_cache_group states = kvl_group_of_states();
    size_t slice = FIRST_SLICE;
    int64_t found = 0;

    if (!keys)
        return -ENOMEM;
    memcpy(hash, root, sizeof(hash));
    for (size_t i = 0; i < n; i++) {
        chain(hash, tokens, i, i + 1);
        kv_prefix_key(KV_PREFIX_SNAPSHOT, hash, keys + i * KV_PREFIX_KEY);
    }
    /* From the longest down, in growing slices: a conversation's last turn ends near its end. */
    for (size_t left = n; left && !found; slice = KV_MIN(2 * slice, (size_t)SLICE_MAX)) {
        size_t from = left > slice ? left - slice : 0;
        int rc =
            kvs_exists(c->store, keys + from * KV_PREFIX_KEY, KV_PREFIX_KEY, left - from, present);

        if (rc == -ENOTSUP) {
            found = find_by_gets(c, keys, n);
            break;
        }
        if (rc < 0)
            found = rc;
        else
            found = (int64_t)kv_cache_group_longest(&states, present, left - from);
        found += found > 0 ? (int64_t)from : 0;
        left = from;
    }
    free(keys);
    return found;
}

/* -- save -------------------------------------------------------------------------------------- */

static size_t n_parts_of(size_t len)
{
    return len / PART_BYTES + (len % PART_BYTES != 0);
}

static size_t part_len(size_t len, size_t i)
{
    return KV_MIN((size_t)PART_BYTES, len - i * PART_BYTES);
}

/* Put the parts of a state, and write their references to @refs. */
static int put_parts(struct kvl_cache *c, const uint8_t *state, size_t len, uint8_t *refs,
                     struct kvl_result *ret)
{
    size_t n = n_parts_of(len);
    int rc = 0;

    for (size_t i = 0; i < n && rc >= 0; i++) {
        uint8_t key[KV_PREFIX_KEY], *ref = refs + i * KV_PREFIX_PART_REF, size[8];

        kv_prefix_sum(state + i * PART_BYTES, part_len(len, i), ref);
        kv_put_le64(size, part_len(len, i));
        memcpy(ref + KV_PREFIX_HASH, size, 4);
        kv_prefix_key(KV_PREFIX_PART, ref, key);
        rc = kvs_put_chunk(c->store, key, sizeof(key), state + i * PART_BYTES, part_len(len, i));
        ret->new_bytes += rc == 0 ? part_len(len, i) : 0;
    }
    return KV_MIN(rc, 0);
}

/* Mark a snapshot and its parts as used. Returns 1; 0 when the head is missing or damaged. */
static int touch(struct kvl_cache *c, const uint8_t key[KV_PREFIX_KEY])
{
    struct kv_prefix_parts parts;
    size_t len;
    void *head;
    int rc = kvs_get_chunk(c->store, key, KV_PREFIX_KEY, &head, &len);

    if (rc == -ENOENT || rc == -EBADMSG)
        return 0;
    if (rc < 0)
        return rc;
    rc = kv_prefix_check(key, head, len) == 0 && kv_prefix_parts(head, len, &parts) == 0;
    for (size_t i = 0; rc && i < parts.n; i++) {
        uint8_t part[KV_PREFIX_KEY];

        kv_prefix_key(KV_PREFIX_PART, parts.first + i * KV_PREFIX_PART_REF, part);
        rc = kvs_touch(c->store, part, sizeof(part), 1) != 0; /* 0: evicted */
    }
    if (rc)
        kvs_touch(c->store, key, KV_PREFIX_KEY, 1);
    free(head);
    return rc;
}

static int put_head(struct kvl_cache *c, const uint8_t key[KV_PREFIX_KEY],
                    const uint8_t root[KV_PREFIX_HASH], const int32_t *tokens, size_t n,
                    const uint8_t *state, size_t len, struct kvl_result *ret)
{
    size_t payload = 8 + n_parts_of(len) * KV_PREFIX_PART_REF;
    size_t header = kv_prefix_header_bytes((uint32_t)n);
    uint8_t *head = malloc(header + payload);
    struct kv_prefix_header h = {.n_tokens = (uint32_t)n, .payload_bytes = payload};
    int rc;

    if (!head)
        return -ENOMEM;
    kv_put_le64(head + header, len);
    rc = put_parts(c, state, len, head + header + 8, ret);
    memcpy(h.key, key, sizeof(h.key));
    memcpy(h.parent, root, sizeof(h.parent));
    kv_prefix_sum(head + header, payload, h.payload_sum);
    kv_prefix_encode(&h, tokens, head);
    if (!rc) {
        kvs_delete_chunk(c->store, key, KV_PREFIX_KEY); /* of one that lost parts */
        rc = kvs_put_chunk(c->store, key, KV_PREFIX_KEY, head, header + payload);
    }
    if (rc >= 0) {
        ret->new_blocks++;
        ret->new_bytes += header + payload;
    }
    free(head);
    return KV_MIN(rc, 0);
}

int kvl_snapshot_discard(struct kvl_cache *c, const uint8_t root[KV_PREFIX_HASH],
                         const int32_t *tokens, size_t n)
{
    uint8_t key[KV_PREFIX_KEY];
    struct kv_prefix_parts parts;
    size_t len;
    void *head;
    int rc;

    head_key(root, tokens, n, key);
    rc = kvs_get_chunk(c->store, key, sizeof(key), &head, &len);
    if (rc < 0)
        return rc == -ENOENT ? 0 : rc;
    rc = kvs_delete_chunk(c->store, key, sizeof(key)); /* first: readers don't find it any more */
    if (rc >= 0 && (kv_prefix_check(key, head, len) < 0 || kv_prefix_parts(head, len, &parts) < 0))
        parts.n = 0; /* damaged */
    for (size_t i = 0; rc >= 0 && i < parts.n; i++) {
        uint8_t part[KV_PREFIX_KEY];

        kv_prefix_key(KV_PREFIX_PART, parts.first + i * KV_PREFIX_PART_REF, part);
        rc = kvs_delete_chunk(c->store, part, sizeof(part));
    }
    free(head);
    return rc < 0 ? rc : 1;
}

int64_t kvl_snapshot_save(struct kvl_cache *c, const struct kvl_layout *layout,
                          const int32_t *tokens, size_t n, const uint8_t *state, size_t len,
                          struct kvl_result *ret)
{
    uint8_t key[KV_PREFIX_KEY], present = 0;
    int rc;

    head_key(layout->root, tokens, n, key);
    rc = kvs_exists(c->store, key, sizeof(key), 1, &present);
    if (rc == -ENOTSUP)
        rc = present = 0; /* the puts tell what is there */
    if (rc >= 0 && present)
        rc = present = (uint8_t)(touch(c, key) == 1);
    if (rc >= 0 && !present)
        rc = put_head(c, key, layout->root, tokens, n, state, len, ret);
    if (rc >= 0) /* a layout may have been put, also for a snapshot that was there */
        rc = kvl_make_durable(c, layout->is_new || !present);
    if (rc < 0)
        return rc;
    ret->blocks = 1;
    ret->snapshot = true;
    return (int64_t)n;
}

/* -- load -------------------------------------------------------------------------------------- */

/* Read parts [first, first + n) to their places. Returns 1; 0: missing or damaged; an error. */
static int get_parts(struct kvl_cache *c, const struct kv_prefix_parts *parts, size_t first,
                     size_t n, uint8_t **at)
{
    uint8_t keys[WINDOW_PARTS * KV_PREFIX_KEY] = {0}, sum[KV_PREFIX_HASH];
    struct iovec places[WINDOW_PARTS] = {{0}};
    int64_t got[WINDOW_PARTS];
    int rc;

    for (size_t i = 0; i < n; i++) {
        const uint8_t *ref = parts->first + (first + i) * KV_PREFIX_PART_REF;

        kv_prefix_key(KV_PREFIX_PART, ref, keys + i * KV_PREFIX_KEY);
        places[i] = (struct iovec){*at, (size_t)kv_get_le(ref + KV_PREFIX_HASH, 4)};
        *at += places[i].iov_len;
    }
    rc = kvs_get_chunks_into(c->store, keys, KV_PREFIX_KEY, n, places, NULL, got);
    for (size_t i = 0; i < n && rc >= 0; i++) {
        if (got[i] == -ENOENT)
            return 0;
        if (got[i] < 0 && got[i] != -EBADMSG && got[i] != -EMSGSIZE)
            return (int)got[i];
        if (got[i] == (int64_t)places[i].iov_len) {
            kv_prefix_sum(places[i].iov_base, places[i].iov_len, sum);
            if (!memcmp(sum, keys + i * KV_PREFIX_KEY + KV_PREFIX_TAG, sizeof(sum)))
                continue;
        }
        kvl_drop_damaged(c, keys + i * KV_PREFIX_KEY);
        return 0;
    }
    return rc < 0 ? rc : 1;
}

/* Check that a head is of these tokens. */
static bool is_head(const uint8_t key[KV_PREFIX_KEY], const void *head, size_t len,
                    const int32_t *tokens, size_t n)
{
    struct kv_prefix_header h;

    if (kv_prefix_check(key, head, len) < 0 || kv_prefix_decode(key, head, len, &h) < 0 ||
        h.n_tokens != n)
        return false;
    for (size_t i = 0; i < n; i++)
        if (kv_prefix_token(head, i) != tokens[i])
            return false;
    return true;
}

/* Read all parts of a checked head. */
static int get_state(struct kvl_cache *c, const void *head, size_t len, uint8_t **ret,
                     size_t *ret_len)
{
    struct kv_prefix_parts parts;
    uint8_t *state, *at;
    int rc = kv_prefix_parts(head, len, &parts) == 0;

    /* Each part is at most KV_PREFIX_PART_MAX, so a small head can't ask for much memory. */
    if (!rc || parts.state_bytes > SIZE_MAX / 2)
        return 0;
    at = state = malloc(KV_MAX((size_t)parts.state_bytes, (size_t)1));
    if (!state)
        return -ENOMEM;
    for (size_t i = 0; i < parts.n && rc == 1; i += WINDOW_PARTS)
        rc = get_parts(c, &parts, i, KV_MIN((size_t)WINDOW_PARTS, parts.n - i), &at);
    if (rc != 1) {
        free(state);
        return rc;
    }
    *ret = state;
    *ret_len = (size_t)parts.state_bytes;
    return 1;
}

int kvl_snapshot_load(struct kvl_cache *c, const uint8_t root[KV_PREFIX_HASH],
                      const int32_t *tokens, size_t n, uint8_t **ret, size_t *ret_len)
{
    uint8_t key[KV_PREFIX_KEY];
    void *head = NULL;
    size_t len;
    int rc;

    head_key(root, tokens, n, key);
    rc = kvs_get_chunk(c->store, key, sizeof(key), &head, &len);
    if (rc == -ENOENT)
        return 0;
    if (rc == -EBADMSG || (!rc && !is_head(key, head, len, tokens, n))) {
        kvl_drop_damaged(c, key);
        rc = 0;
    } else if (!rc) {
        rc = get_state(c, head, len, ret, ret_len);
        if (rc == 1)
            touch(c, key);
        else if (!rc) /* a head without its parts is of no use */
            kvs_delete_chunk(c->store, key, sizeof(key));
    }
    free(head);
    return rc;
}
