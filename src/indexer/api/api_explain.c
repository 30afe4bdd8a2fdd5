// SPDX-License-Identifier: Apache-2.0
/* POST /explain: where the match of a prompt ends on each rank, and why. For people, not for routers. */
#include <stdlib.h>

#include "base/json/json.h"
#include "indexer/api/ask.h"
#include "indexer/api/page.h"
#include "indexer/api/why.h"
#include "indexer/fleet.h"

#define DEFAULT_LIMIT 100u
#define MOST_HASHES 256u /* block hashes in an answer */

struct rank {
    const struct ki_worker_info *info;
    uint32_t reach;
};

/* Longest match first, then by instance and rank. */
static int by_reach(const void *a, const void *b)
{
    const struct rank *x = a, *y = b;

    if (x->reach != y->reach)
        return x->reach > y->reach ? -1 : 1;
    if (x->info->instance != y->info->instance)
        return ki_compare_instances(x->info, y->info);
    return (x->info->rank > y->info->rank) - (x->info->rank < y->info->rank);
}

/* List the model's ranks in @ret, which has room for @n. Returns their number. */
static size_t list_ranks(const struct ki_why_ask *why, const struct ki_worker_info *infos, long n,
                         struct rank *ret)
{
    size_t found = 0;

    for (long i = 0; i < n; i++)
        if (strcmp(infos[i].model, why->model->name) == 0 &&
            strcmp(infos[i].tenant, why->model->tenant) == 0)
            ret[found++] = (struct rank){&infos[i], ki_why_reach(why, &infos[i])};
    qsort(ret, found, sizeof(*ret), by_reach);
    return found;
}

/* Write the ranks of the page, and how many there are in all. */
static void write_ranks(struct ki_service *service, const struct ki_why_ask *why,
                        struct ki_page *page, struct kv_json_writer *w)
{
    struct ki_worker_info *infos;
    long n = ki_registry_workers(service->registry, &infos);
    struct rank *ranks = n < 0 ? NULL : calloc((size_t)n + 1, sizeof(*ranks));

    if (!ranks) {
        w->out->error = -ENOMEM;
        if (n >= 0)
            ki_worker_infos_free(infos, n);
        return;
    }
    page->total = list_ranks(why, infos, n, ranks);
    kv_json_key(w, "ranks");
    kv_json_begin_array(w);
    for (uint64_t i = page->offset; i < page->total && ki_page_has(page, i); i++)
        ki_why_write(why, ranks[i].info, w);
    kv_json_end_array(w);
    ki_page_write(page, w);
    free(ranks);
    ki_worker_infos_free(infos, n);
}

static void write_hashes(const struct ki_explain_ask *ask, struct kv_json_writer *w)
{
    kv_json_key(w, "block_hashes");
    kv_json_begin_array(w);
    for (size_t i = 0; i < KV_MIN(ask->n, (size_t)MOST_HASHES); i++)
        kv_json_put_u64(w, ask->hashes[i]);
    kv_json_end_array(w);
}

static void answer(struct ki_service *service, const struct ki_model *model,
                   const struct ki_scratch *scratch, const struct ki_explain_ask *ask,
                   struct ki_page *page, struct kh_reply *reply)
{
    struct kvi_matches matches = scratch->lookup.matches;
    struct ki_why_ask why = {.model = model, .ask = ask, .matches = &matches};
    struct kv_json_writer w;
    int rc;

    if (matches.n)
        qsort(matches.items, matches.n, sizeof(matches.items[0]), ki_by_holder);
    rc = ki_why_find(&why);
    if (rc == 0) {
        kv_json_writer_init(&w, &reply->body);
        kv_json_begin_object(&w);
        ki_explain(service, model, ask, &matches, &w);
        kv_json_member_u64(&w, "prompt_blocks", why.n);
        if (ask->named)
            kv_json_member_u64(&w, "first_named_block", why.first);
        else
            write_hashes(ask, &w);
        write_ranks(service, &why, page, &w);
        kv_json_end_object(&w);
    } else {
        kh_reply_error(reply, 503, "out of memory");
    }
    ki_why_fini(&why);
}

/* Look up whichever of the three forms of a prompt the body has. */
static void explain(struct ki_service *service, struct ki_scratch *scratch, struct ki_page *page,
                    struct kh_reply *reply)
{
    struct ki_body *body = &scratch->body;
    bool tokens = body->present & KI_TOKEN_IDS;
    bool hashes = body->present & (KI_BLOCK_HASHES | KI_SEQUENCE_HASHES);
    struct ki_prompt prompt;
    struct ki_explain_ask ask;
    struct ki_model *model;

    if (tokens == hashes) {
        kh_reply_error(reply, 422,
                       "one of the fields 'token_ids', 'block_hashes' and 'sequence_hashes' is "
                       "required");
        return;
    }
    body->explain = true;
    model = ki_ask_model(service, body, reply);
    if (!model)
        return;
    if (tokens ? ki_ask_tokens(model, scratch, &prompt, &ask, reply)
               : ki_ask_hashes(model, scratch, &ask, reply))
        answer(service, model, scratch, &ask, page, reply);
    ki_model_release(model);
}

void ki_api_explain(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct ki_service *service = arg;
    struct ki_scratch *scratch;
    struct ki_page page;

    if (!request->may_wait) { /* thousands of ranks, and long prompts, take milliseconds */
        reply->rerun = true;
        return;
    }
    if (!ki_page_of(request, reply, &page))
        return;
    if (page.limit == UINT64_MAX)
        page.limit = DEFAULT_LIMIT;
    scratch = ki_scratch_take(service, reply);
    if (!scratch)
        return;
    if (ki_read_body(request, reply, KI_MODEL_NAME,
                     KI_TOKEN_IDS | KI_BLOCK_HASHES | KI_SEQUENCE_HASHES | KI_TENANT_ID |
                         KI_LORA_NAME | KI_CACHE_SALT | KI_MM_OBJECTS | KI_BLOCK_MM_INFOS,
                     scratch))
        explain(service, scratch, &page, reply);
    ki_scratch_give(service, scratch);
}
