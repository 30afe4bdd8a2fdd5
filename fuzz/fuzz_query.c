// SPDX-License-Identifier: Apache-2.0
/* Request bodies as the handlers read them. The first byte chooses the format and the endpoint. An
 * accepted body has every required field, and means the same when written again as msgpack. */
#include "base/json/msgpack.h"
#include "indexer/api/body.h"
#include "indexer/api/body_mm.h"
#include "indexer/model/lookup.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const struct {
    uint32_t required, optional;
} endpoints[] = {
    {KI_TOKEN_IDS | KI_MODEL_NAME,
     KI_TENANT_ID | KI_LORA_NAME | KI_CACHE_SALT | KI_EXPLAIN | KI_MM_OBJECTS | KI_BLOCK_MM_INFOS},
    {KI_BLOCK_HASHES | KI_MODEL_NAME,
     KI_SEQUENCE_HASHES | KI_TENANT_ID | KI_CACHE_SALT | KI_EXPLAIN},
    {KI_INSTANCE_ID | KI_ENDPOINT | KI_MODEL_NAME | KI_BLOCK_SIZE,
     KI_TENANT_ID | KI_DP_RANK | KI_REPLAY_ENDPOINT | KI_HASH_LOOKAHEAD | KI_NUM_BLOCKS |
         KI_GROUPS},
    {KI_INSTANCE_ID | KI_MODEL_NAME, KI_TENANT_ID | KI_DP_RANK},
    {KI_URL, 0},
    {KI_INSTANCE_ID, KI_DP_RANK},
};

static void require(bool ok)
{
    if (!ok)
        abort();
}

static void put(struct kv_buf *out, uint32_t *n, const char *key, const char *value)
{
    if (!value)
        return;
    (*n)++;
    kv_msgpack_put_str(out, key);
    kv_msgpack_put_str(out, value);
}

static void put_number(struct kv_buf *out, uint32_t *n, const char *key, uint64_t value)
{
    (*n)++;
    kv_msgpack_put_str(out, key);
    kv_msgpack_put_u64(out, value);
}

/* Write cache groups; a kind that nobody knows as no kind. */
static void put_groups(const struct ki_body *body, struct kv_buf *out, uint32_t *n)
{
    if (!(body->present & KI_GROUPS))
        return;
    (*n)++;
    kv_msgpack_put_str(out, "groups");
    kv_msgpack_put_array(out, body->groups.n);
    for (uint32_t i = 0; i < body->groups.n; i++) {
        const struct kve_told_group *g = &body->groups.items[i];
        const char *kind = kve_kind_name((enum kve_kind)g->kind);
        uint32_t members = 0;

        kv_msgpack_put_map(out, 3 + (g->group != KVE_ANY_GROUP) + (kind != NULL));
        put_number(out, &members, "window", g->window);
        put_number(out, &members, "chunk", g->chunk);
        put_number(out, &members, "block_size", g->block_size);
        if (g->group != KVE_ANY_GROUP)
            put_number(out, &members, "group", g->group);
        put(out, &members, "kind", kind);
    }
}

/* Write objects into the field from which they came. */
static void put_objects(const struct ki_body *body, struct kv_buf *out, uint32_t *n)
{
    const struct ki_mm_object *o = (const struct ki_mm_object *)(const void *)body->mm_objects.data;
    size_t n_objects = body->mm_objects.len / sizeof(*o);
    bool infos = body->present & KI_BLOCK_MM_INFOS;
    uint64_t blocks = n_objects ? o[n_objects - 1].start + 1 : 0; /* objects are sorted */

    if (!(body->present & (KI_MM_OBJECTS | KI_BLOCK_MM_INFOS)))
        return;
    (*n)++;
    kv_msgpack_put_str(out, infos ? "block_mm_infos" : "mm_objects");
    kv_msgpack_put_array(out, (uint32_t)(infos ? blocks : n_objects));
    for (size_t i = 0; !infos && i < n_objects; i++) {
        kv_msgpack_put_map(out, 3);
        kv_msgpack_put_str(out, "mm_hash");
        kv_msgpack_put_u64(out, o[i].identity);
        kv_msgpack_put_str(out, "offset");
        kv_msgpack_put_u64(out, o[i].start);
        kv_msgpack_put_str(out, "length");
        kv_msgpack_put_u64(out, o[i].end - o[i].start);
    }
    for (uint64_t block = 0, i = 0; infos && block < blocks; block++) {
        uint64_t first = i;

        while (i < n_objects && o[i].start == block)
            i++;
        kv_msgpack_put_map(out, 1);
        kv_msgpack_put_str(out, "mm_objects");
        kv_msgpack_put_array(out, (uint32_t)(i - first));
        for (; first < i; first++) {
            kv_msgpack_put_map(out, 2);
            kv_msgpack_put_str(out, "mm_hash");
            kv_msgpack_put_u64(out, o[first].identity);
            kv_msgpack_put_str(out, "offsets");
            kv_msgpack_put_array(out, 1);
            kv_msgpack_put_array(out, 2);
            kv_msgpack_put_u64(out, o[first].from);
            kv_msgpack_put_u64(out, o[first].to);
        }
    }
}

/* @body as msgpack, arrays as packed integers. */
static void write_again(const struct ki_body *body, struct kv_buf *out)
{
    struct kv_buf fields = KV_BUF_INIT;
    uint32_t n = 0;

    put(&fields, &n, "model_name", body->model_name);
    put(&fields, &n, "tenant_id", body->tenant_id);
    put(&fields, &n, "lora_name", body->lora_name);
    put(&fields, &n, "cache_salt", body->cache_salt);
    put(&fields, &n, "endpoint", body->endpoint);
    put(&fields, &n, "replay_endpoint", body->replay_endpoint);
    put(&fields, &n, "url", body->url);
    if (body->instance_name)
        put(&fields, &n, "instance_id", body->instance_name);
    else if (body->present & KI_INSTANCE_ID)
        put_number(&fields, &n, "instance_id", body->instance_id);
    if (body->present & KI_BLOCK_SIZE)
        put_number(&fields, &n, "block_size", body->block_size);
    if (body->present & KI_DP_RANK)
        put_number(&fields, &n, "dp_rank", body->dp_rank);
    if (body->present & KI_TOKEN_IDS) {
        n++;
        kv_msgpack_put_str(&fields, "token_ids");
        kv_msgpack_put_bin(&fields, body->token_ids.data, body->token_ids.len);
    }
    if (body->present & (KI_BLOCK_HASHES | KI_SEQUENCE_HASHES)) {
        n++;
        kv_msgpack_put_str(&fields,
                           body->present & KI_BLOCK_HASHES ? "block_hashes" : "sequence_hashes");
        kv_msgpack_put_bin(&fields, body->block_hashes.data, body->block_hashes.len);
    }
    if (body->present & KI_NUM_BLOCKS)
        put_number(&fields, &n, "num_blocks", body->num_blocks);
    if (body->present & KI_HASH_LOOKAHEAD)
        put_number(&fields, &n, "hash_lookahead", body->hash_lookahead);
    put_objects(body, &fields, &n);
    put_groups(body, &fields, &n);
    if (body->present & KI_EXPLAIN) {
        n++;
        kv_msgpack_put_str(&fields, "explain");
        kv_msgpack_put_bool(&fields, body->explain);
    }
    kv_msgpack_put_map(out, n);
    kv_buf_append(out, fields.data, fields.len);
    kv_buf_fini(&fields);
}

static void same_string(const char *a, const char *b)
{
    require(!a == !b);
    require(!a || strcmp(a, b) == 0);
}

static void same_array(const struct kv_buf *a, const struct kv_buf *b)
{
    require(a->len == b->len);
    require(a->len == 0 || memcmp(a->data, b->data, a->len) == 0);
}

static void same(const struct ki_body *a, const struct ki_body *b)
{
    require(a->present == b->present && a->explain == b->explain);
    require(a->instance_id == b->instance_id && a->block_size == b->block_size &&
            a->num_blocks == b->num_blocks && a->dp_rank == b->dp_rank &&
            a->hash_lookahead == b->hash_lookahead);
    same_string(a->instance_name, b->instance_name);
    same_string(a->model_name, b->model_name);
    same_string(a->tenant_id, b->tenant_id);
    same_string(a->lora_name, b->lora_name);
    same_string(a->cache_salt, b->cache_salt);
    same_string(a->endpoint, b->endpoint);
    same_string(a->replay_endpoint, b->replay_endpoint);
    same_string(a->url, b->url);
    same_array(&a->token_ids, &b->token_ids);
    same_array(&a->block_hashes, &b->block_hashes);
    same_array(&a->mm_objects, &b->mm_objects);
    require(memcmp(&a->groups, &b->groups, sizeof(a->groups)) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct ki_body body = {0}, again = {0};
    struct kv_error error = {0};
    struct kv_buf text = KV_BUF_INIT;
    enum ki_media media;
    size_t e;
    int rc;

    if (size == 0)
        return 0;
    media = data[0] & 0x20 ? KI_MEDIA_MSGPACK : KI_MEDIA_JSON;
    e = (data[0] & 0x0f) % KV_COUNT(endpoints);
    rc = ki_body_parse(media, (struct kv_str){(const char *)data + 1, size - 1},
                       endpoints[e].required, endpoints[e].optional, &body, &error);
    if (rc == 0) {
        uint32_t missing = endpoints[e].required & ~body.present;

        require(missing == 0 || (missing == KI_BLOCK_HASHES && body.present & KI_SEQUENCE_HASHES));
        write_again(&body, &text);
        require(ki_body_parse(KI_MEDIA_MSGPACK, (struct kv_str){text.data, text.len},
                              endpoints[e].required, endpoints[e].optional, &again, &error) == 0);
        same(&body, &again);
        ki_mm_sort(&body.mm_objects, body.token_ids.len / sizeof(uint32_t), 16);
    } else {
        require(rc == -EBADMSG || rc == -EINVAL);
        require(error.code == rc && error.text[0]);
    }
    kv_buf_fini(&text);
    ki_body_fini(&body);
    ki_body_fini(&again);
    return 0;
}
