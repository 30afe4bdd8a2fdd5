// SPDX-License-Identifier: Apache-2.0
/* Bodies of /query_by_hash and their answers (docs/kv-indexer.md). */
#include <errno.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/error.h"
#include "base/core/xxh.h"
#include "base/json/json.h"
#include "kv_plane.h"
#include "peer/directory/indexer.h"

/* ---- the request ---- */

void kvbm_indexer_write(struct kv_buf *out, const char *model, const char *tenant, const void *keys,
                        uint32_t key_len, size_t n)
{
    const uint8_t *key = keys;
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "model_name", model);
    if (tenant)
        kv_json_member_str(&w, "tenant_id", tenant);
    kv_json_key(&w, "sequence_hashes");
    kv_json_begin_array(&w);
    for (size_t i = 0; i < n; i++, key += key_len)
        kv_json_put_u64(&w, kvp_key_number(key, key_len));
    kv_json_end_array(&w);
    kv_json_end_object(&w);
}

/* ---- the answer ---- */

/* Workers read so far: the first n of ret, in their order. */
struct reading {
    struct kv_json j;
    struct kvbm_holding *ret;
    size_t n, max;
    uint64_t salt;
};

/* Return true when @a comes before @b. */
static bool before(const struct reading *r, const struct kvbm_holding *a,
                   const struct kvbm_holding *b)
{
    uint64_t x = kv_xxh64(&a->worker, sizeof(a->worker), r->salt);
    uint64_t y = kv_xxh64(&b->worker, sizeof(b->worker), r->salt);

    if (a->tokens != b->tokens)
        return a->tokens > b->tokens;
    return x != y ? x < y : a->worker < b->worker;
}

/* Keep a worker if it is among the first. */
static void keep(struct reading *r, const struct kvbm_holding *holding)
{
    size_t i = 0;

    while (i < r->n && before(r, &r->ret[i], holding))
        i++;
    if (i == r->max)
        return;
    r->n = KV_MIN(r->n + 1, r->max);
    memmove(&r->ret[i + 1], &r->ret[i], (r->n - 1 - i) * sizeof(*r->ret));
    r->ret[i] = *holding;
}

/* Read a worker's number, or that of its name: the key of a member. */
static uint64_t read_worker(struct kv_json *j, struct kv_str key)
{
    const char *why = NULL;
    uint64_t worker = 0;

    if (kv_instance_parse(key.p, key.len, &worker, &why) < 0)
        kv_json_fail(j, -EINVAL, why);
    return worker;
}

static void read_instances(struct reading *r)
{
    struct kv_str key;

    r->n = 0; /* of equal keys the last counts */
    kv_json_object(&r->j);
    while (kv_json_next_key(&r->j, &key)) {
        struct kvbm_holding holding = {.worker = read_worker(&r->j, key)};
        struct kv_str name;

        kv_json_object(&r->j);
        while (kv_json_next_key(&r->j, &name)) {
            if (kv_str_eq(name, "longest_matched"))
                holding.tokens = kv_json_u64(&r->j, UINT64_MAX);
            else
                kv_json_skip(&r->j);
        }
        if (!kv_json_failed(&r->j) && holding.tokens)
            keep(r, &holding);
    }
}

long kvbm_indexer_read(const void *json, size_t len, uint64_t salt, struct kvbm_holding *ret,
                       size_t max)
{
    struct reading r = {.ret = ret, .max = max, .salt = salt};
    bool found = false;
    struct kv_str key;
    int err;

    kv_json_init(&r.j, json, len);
    kv_json_object(&r.j);
    while (kv_json_next_key(&r.j, &key)) {
        if (kv_str_eq(key, "instances")) {
            read_instances(&r);
            found = true;
        } else {
            kv_json_skip(&r.j);
        }
    }
    err = kv_json_finish_foreign(&r.j);
    if (err < 0)
        return err;
    return found ? (long)r.n : -EPROTO;
}
