// SPDX-License-Identifier: Apache-2.0
/* POST /query and /query_by_hash: parse, hash, look up, answer. No allocation per block. */
#include <inttypes.h>

#include "base/json/json.h"
#include "indexer/api/ask.h"
#include "indexer/api/body_mm.h"
#include "indexer/api/explain.h"
#include "indexer/model/chunks.h"
#include "indexer/model/model.h"
#include "indexer/registry/names.h"
#include "indexer/service.h"
#include "kv_event.h"

/* Sort by insertion: workers that registered one after the other already come in that order. */
static void sort(struct kvi_matches *matches)
{
    for (size_t i = 1; i < matches->n; i++)
        if (ki_by_holder(&matches->items[i - 1], &matches->items[i]) > 0) {
            qsort(matches->items, matches->n, sizeof(matches->items[0]), ki_by_holder);
            return;
        }
}

/* -- the answer: written as text, as it has some thirty pieces for each holder ------------------ */

#define LITERAL(p, text) ((char *)memcpy(p, text, sizeof(text) - 1) + sizeof(text) - 1)
/*
 * Room for one holder's part of scores or tree_sizes, and of instances: names, and three or seven
 * numbers.
 */
#define NESTED_MAX (3 * KV_U64_TEXT_MAX + 16)
#define INSTANCE_MAX (7 * KV_U64_TEXT_MAX + 80)

static char *put_key(char *p, uint64_t number)
{
    *p++ = '"';
    p += kv_u64_text(p, number);
    return LITERAL(p, "\":");
}

/* Matches of an answer, and the names of their workers. */
struct told {
    const struct kvi_match *items; /* sorted, so that each worker's ranks are neighbours */
    size_t n;
    const struct ki_name *const *names; /* [n] of each item's worker; NULL: of none */
    size_t name_bytes;                  /* of the keys of all names */
    uint64_t block_size;
};

/* Write the key of a worker: its @name, or (NULL) its number. */
static char *put_worker(char *p, const struct ki_name *name, uint64_t worker)
{
    if (KV_LIKELY(!name))
        return put_key(p, worker);
    return (char *)memcpy(p, name->key, name->key_len) + name->key_len;
}

/*
 * Write {"7":{"0":32,"1":16},"9":{...}} for the holders with a match in device memory: scores and
 * tree_sizes.
 */
static char *put_nested(char *p, const struct told *told, bool sizes)
{
    /* Copies: the text could overlap *told, as far as the compiler knows. */
    const struct ki_name *const *names = told->names;
    const struct kvi_match *const items = told->items, *before = NULL;
    const size_t n = told->n;
    const uint64_t block_size = told->block_size;

    *p++ = '{';
    for (size_t i = 0; i < n; i++) {
        const struct kvi_match *m = &items[i];

        if (m->reach[KV_TIER_DEVICE] == 0)
            continue;
        if (before && before->holder.worker == m->holder.worker) {
            *p++ = ',';
        } else {
            if (before)
                p = LITERAL(p, "},");
            p = put_worker(p, names ? names[i] : NULL, m->holder.worker);
            *p++ = '{';
        }
        before = m;
        p = put_key(p, m->holder.rank);
        p += kv_u64_text(p, sizes ? m->blocks : m->reach[KV_TIER_DEVICE] * block_size);
    }
    if (before)
        *p++ = '}';
    *p++ = '}';
    return p;
}

static void write_nested(struct kv_json_writer *w, const char *key, const struct told *told,
                         bool sizes)
{
    char *p;

    kv_json_key(w, key);
    p = kv_json_raw_begin(w, 2 + told->n * NESTED_MAX + told->name_bytes);
    if (p)
        kv_json_raw_end(w, put_nested(p, told, sizes));
}

/*
 * Write one instance: its @n matches, one a rank. Numbers are tokens. Each tier includes the blocks
 * of nearer tiers.
 */
static char *put_instance(char *p, const struct kvi_match *m, size_t n, uint64_t block_size)
{
    uint64_t best[KV_N_TIERS] = {0};
    bool comma = false;

    for (size_t i = 0; i < n; i++)
        for (int t = 0; t < KV_N_TIERS; t++)
            best[t] = KV_MAX(best[t], m[i].reach[t] * block_size);
    p = LITERAL(p, "{\"longest_matched\":");
    p += kv_u64_text(p, best[KV_TIER_EXTERNAL]);
    p = LITERAL(p, ",\"gpu\":");
    p += kv_u64_text(p, best[KV_TIER_DEVICE]);
    p = LITERAL(p, ",\"dp\":{");
    for (size_t i = 0; i < n; i++) {
        *p = ',';
        p = put_key(p + comma, m[i].holder.rank);
        p += kv_u64_text(p, m[i].reach[KV_TIER_DEVICE] * block_size);
        comma = true;
    }
    p = LITERAL(p, "},\"cpu\":");
    p += kv_u64_text(p, best[KV_TIER_HOST]);
    p = LITERAL(p, ",\"disk\":");
    p += kv_u64_text(p, best[KV_TIER_EXTERNAL]);
    *p++ = '}';
    return p;
}

static void write_instances(struct kv_json_writer *w, const struct told *told)
{
    const struct ki_name *const *names = told->names;
    const struct kvi_match *items = told->items;
    const uint64_t block_size = told->block_size;
    const size_t n = told->n;
    char *p;

    kv_json_key(w, "instances");
    p = kv_json_raw_begin(w, 2 + told->n * INSTANCE_MAX + told->name_bytes);
    if (!p)
        return;
    *p++ = '{';
    for (size_t i = 0, end; i < n; i = end) {
        end = i + 1;
        while (end < n && items[end].holder.worker == items[i].holder.worker)
            end++;
        if (i)
            *p++ = ',';
        p = put_worker(p, names ? names[i] : NULL, items[i].holder.worker);
        p = put_instance(p, &items[i], end - i, block_size);
    }
    *p++ = '}';
    kv_json_raw_end(w, p);
}

static void write_worker_key(struct kv_json_writer *w, const struct ki_names *names,
                             uint64_t worker)
{
    const struct ki_name *name = names ? ki_names_find(names, worker) : NULL;

    if (name)
        kv_json_key(w, name->text);
    else
        kv_json_key_u64(w, worker);
}

/*
 * Write {"7":{"0":{"status":"failed","partial":true}}}: the ranks of the model whose numbers may be
 * wrong, or whose stream isn't active. All others are active and whole.
 */
static void write_views(struct kv_json_writer *w, const struct kv_buf *views,
                        const struct ki_names *names)
{
    const struct ki_view *v = (const struct ki_view *)(const void *)views->data;
    const struct ki_view *end = v + views->len / sizeof(*v), *before = NULL;

    kv_json_key(w, "views");
    kv_json_begin_object(w);
    for (; v < end; v++) {
        bool same = before && before->holder.worker == v->holder.worker;

        if (same && before->holder.rank == v->holder.rank)
            continue;
        if (before && !same)
            kv_json_end_object(w);
        if (!same) {
            write_worker_key(w, names, v->holder.worker);
            kv_json_begin_object(w);
        }
        kv_json_key_u64(w, v->holder.rank);
        kv_json_begin_object(w);
        kv_json_member_str(w, "status", ki_listener_status_name(v->status));
        kv_json_member_bool(w, "partial", v->reasons != 0);
        kv_json_end_object(w);
        before = v;
    }
    if (before)
        kv_json_end_object(w);
    kv_json_end_object(w);
}

static uint32_t longest(const struct kvi_matches *matches)
{
    uint32_t n = 0;

    for (size_t i = 0; i < matches->n; i++)
        n = KV_MAX(n, matches->items[i].reach[KV_N_TIERS - 1]);
    return n;
}

/* Return true when a worker among the matches and views may have a name. */
static bool may_be_named(const struct kvi_matches *matches, const struct kv_buf *views)
{
    const struct ki_view *v = (const struct ki_view *)(const void *)views->data;
    uint64_t any = 0;

    for (size_t i = 0; i < matches->n; i++)
        any |= matches->items[i].holder.worker;
    for (size_t i = 0; i < views->len / sizeof(*v); i++)
        any |= v[i].holder.worker;
    return any & KV_INSTANCE_NAMED;
}

/* Find the names of the matches' workers. Returns false when out of memory. */
static bool find_names(const struct ki_names *names, struct kv_buf *found, struct told *told)
{
    const struct ki_name **each;

    kv_buf_clear(found);
    if (kv_buf_reserve(found, told->n * sizeof(struct ki_name *)) < 0)
        return false;
    each = (const struct ki_name **)(void *)found->data;
    for (size_t i = 0; i < told->n; i++) {
        const struct kvi_match *m = &told->items[i];

        if (i && m[-1].holder.worker == m->holder.worker)
            each[i] = each[i - 1];
        else
            each[i] = ki_names_find(names, m->holder.worker);
        told->name_bytes += each[i] ? each[i]->key_len : 0;
    }
    told->names = each;
    return true;
}

/* Write scores, sizes, tiers and views. */
static void write_matches(struct ki_service *service, const struct ki_model *model,
                          struct ki_scratch *scratch, struct kv_json_writer *w)
{
    const struct kvi_matches *matches = &scratch->lookup.matches;
    struct told told = {matches->items, matches->n, NULL, 0, model->block_size};
    struct ki_names *names = NULL;

    if (may_be_named(matches, &scratch->views)) {
        names = ki_registry_names(service->registry);
        ki_names_read(names);
        if (!find_names(names, &scratch->names, &told))
            w->out->error = -ENOMEM;
    }
    write_nested(w, "scores", &told, false);
    kv_json_key(w, "frequencies"); /* the original keeps no usage window here: always empty */
    kv_json_begin_array(w);
    kv_json_end_array(w);
    write_nested(w, "tree_sizes", &told, true);
    write_instances(w, &told);
    write_views(w, &scratch->views, names);
    if (names)
        ki_names_end(names);
}

/*
 * Drop the matches of withdrawn ranks. Matches and views are sorted by holder, but not strictly: a holder
 * may have two views.
 */
static void drop_withdrawn(struct kvi_matches *matches, const struct kv_buf *views)
{
    const struct ki_view *v = (const struct ki_view *)(const void *)views->data;
    const struct ki_view *end = v + views->len / sizeof(*v);
    size_t kept = 0;

    while (v < end && v->status != KI_WITHDRAWN)
        v++;
    if (KV_LIKELY(v == end))
        return;
    for (size_t i = 0; i < matches->n; i++) {
        const struct kv_holder *h = &matches->items[i].holder;

        while (v < end && (v->status != KI_WITHDRAWN || v->holder.worker < h->worker ||
                           (v->holder.worker == h->worker && v->holder.rank < h->rank)))
            v++;
        if (v == end || v->holder.worker != h->worker || v->holder.rank != h->rank)
            matches->items[kept++] = matches->items[i];
    }
    matches->n = kept;
}

/* Write the answer from the matches in scratch->lookup. explain reads @ask. */
static void answer(struct ki_service *service, const struct ki_model *model,
                   struct ki_scratch *scratch, const struct ki_explain_ask *ask,
                   struct kh_reply *reply)
{
    struct kvi_matches *matches = &scratch->lookup.matches;
    struct kv_json_writer w;

    sort(matches);
    kv_buf_clear(&scratch->views);
    ki_registry_views(service->registry, model, &scratch->views);
    drop_withdrawn(matches, &scratch->views);
    /* sequence hashes may begin within the prompt, whose start counts in matches */
    ki_telemetry_query(service->telemetry, ask->n, KV_MIN(ask->n, (size_t)longest(matches)));
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    write_matches(service, model, scratch, &w);
    if (scratch->body.explain)
        ki_explain(service, model, ask, matches, &w);
    kv_json_end_object(&w);
}

struct ki_model *ki_ask_model(struct ki_service *service, struct ki_body *body,
                              struct kh_reply *reply)
{
    struct ki_model *model;

    if (!body->tenant_id)
        body->tenant_id = "default";
    model = ki_registry_model(service->registry, body->model_name, body->tenant_id);
    if (!model) {
        ki_explain_unknown(service, body->model_name, body->tenant_id, body->explain, reply);
    }
    return model;
}

/* Return true for a query with "explain" on a thread that answers others, too: it looks at all ranks. */
static bool defers(const struct ki_body *body, const struct kh_request *request,
                   struct kh_reply *reply)
{
    reply->rerun |= body->explain && !request->may_wait;
    return reply->rerun;
}

static uint64_t seed_of(const struct ki_body *body)
{
    return kve_seed(body->lora_name, body->lora_name ? strlen(body->lora_name) : 0,
                    body->cache_salt, body->cache_salt ? strlen(body->cache_salt) : 0);
}

bool ki_ask_tokens(const struct ki_model *model, struct ki_scratch *scratch,
                   struct ki_prompt *prompt, struct ki_explain_ask *ask, struct kh_reply *reply)
{
    struct ki_lookup *lookup = &scratch->lookup;
    struct kv_buf *objects = &scratch->body.mm_objects;
    const char *problem;
    int rc;

    *prompt = (struct ki_prompt){
        .tokens = (const uint32_t *)(const void *)scratch->body.token_ids.data,
        .n = scratch->body.token_ids.len / sizeof(uint32_t),
        .seed = seed_of(&scratch->body),
        .block_size = model->block_size,
        .forms = ki_model_forms(model),
    };
    problem = objects->len ? ki_mm_sort(objects, prompt->n, prompt->block_size) : NULL;
    if (problem) {
        kh_reply_error(reply, 422, "%s", problem);
        return false;
    }
    prompt->objects = (const struct ki_mm_object *)(const void *)objects->data;
    prompt->n_objects = objects->len / sizeof(struct ki_mm_object);
    rc = ki_lookup_prompt(lookup, model->index, prompt);
    ki_chunks_cut(model->chunks, &lookup->matches);
    if (rc < 0) {
        if (rc == -E2BIG)
            kh_reply_error(reply, 422, "more than 256 multimodal objects in one block");
        else
            kh_reply_error(reply, 503, "out of memory");
        return false;
    }
    *ask = (struct ki_explain_ask){
        .prompt = prompt,
        .body = &scratch->body,
        .hashes = (const uint64_t *)(const void *)lookup->hashes.data,
        .n = lookup->n_blocks,
    };
    return true;
}

static void query_tokens(struct ki_service *service, const struct ki_model *model,
                         struct ki_scratch *scratch, struct kh_reply *reply)
{
    struct ki_prompt prompt;
    struct ki_explain_ask ask;

    if (ki_ask_tokens(model, scratch, &prompt, &ask, reply))
        answer(service, model, scratch, &ask, reply);
}

void ki_api_query(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_scratch *scratch = ki_scratch_take(service, reply);
    struct ki_model *model;

    if (!scratch)
        return;
    if (ki_read_body(request, reply, KI_TOKEN_IDS | KI_MODEL_NAME,
                     KI_TENANT_ID | KI_LORA_NAME | KI_CACHE_SALT | KI_EXPLAIN | KI_MM_OBJECTS |
                         KI_BLOCK_MM_INFOS,
                     scratch) &&
        !defers(&scratch->body, request, reply)) {
        model = ki_ask_model(service, &scratch->body, reply);
        if (model) {
            query_tokens(service, model, scratch, reply);
            ki_model_release(model);
        }
    }
    ki_scratch_give(service, scratch);
}

bool ki_ask_hashes(const struct ki_model *model, struct ki_scratch *scratch,
                   struct ki_explain_ask *ask, struct kh_reply *reply)
{
    struct ki_body *body = &scratch->body;
    bool named = body->present & KI_SEQUENCE_HASHES;

    *ask = (struct ki_explain_ask){
        .hashes = (const uint64_t *)(const void *)body->block_hashes.data,
        .n = body->block_hashes.len / sizeof(uint64_t),
        .body = body,
        .named = named,
    };
    if ((named ? kvi_find_named : kvi_find)(model->index, ask->hashes, ask->n,
                                            &scratch->lookup.matches) < 0) {
        kh_reply_error(reply, 500, "out of memory");
        return false;
    }
    ki_chunks_cut(model->chunks, &scratch->lookup.matches);
    return true;
}

static void query_hashes(struct ki_service *service, struct ki_scratch *scratch,
                         struct kh_reply *reply)
{
    struct ki_body *body = &scratch->body;
    struct ki_explain_ask ask;
    struct ki_model *model;

    if (body->present & KI_CACHE_SALT) {
        kh_reply_error(reply, 400,
                       "cache_salt is not accepted by /query_by_hash; block_hashes must already "
                       "include the intended cache salt");
        return;
    }
    model = ki_ask_model(service, body, reply);
    if (!model)
        return;
    if (ki_ask_hashes(model, scratch, &ask, reply))
        answer(service, model, scratch, &ask, reply);
    ki_model_release(model);
}

void ki_api_query_by_hash(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_scratch *scratch = ki_scratch_take(service, reply);

    if (!scratch)
        return;
    if (ki_read_body(request, reply, KI_BLOCK_HASHES | KI_MODEL_NAME,
                     KI_SEQUENCE_HASHES | KI_TENANT_ID | KI_CACHE_SALT | KI_EXPLAIN, scratch) &&
        !defers(&scratch->body, request, reply))
        query_hashes(service, scratch, reply);
    ki_scratch_give(service, scratch);
}
