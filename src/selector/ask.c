// SPDX-License-Identifier: Apache-2.0
#include "selector/ask.h"

#include <errno.h>
#include <stdlib.h>

#include "indexer/api/ask.h"
#include "kv_hash.h"

#define SESSION_MAX 256

void ksel_no_workers(const char *name, const char *group, struct kh_reply *reply)
{
    kh_reply_error(reply, 503, "no schedulable workers for model=%.200s routing_group=%.200s", name,
                   group);
}

/* -- the prompt -------------------------------------------------------------------------------- */

static bool ask_tokens(struct ksel_ask *ask, struct kh_reply *reply)
{
    struct ksel_scratch *scratch = ask->scratch;
    struct ki_explain_ask found;
    struct ki_prompt prompt;
    size_t bytes;

    if (!ki_ask_tokens(ask->model, scratch->indexer, &prompt, &found, reply))
        return false;
    bytes = found.n * sizeof(uint64_t);
    kv_buf_clear(&scratch->sequence);
    if (bytes && kv_buf_reserve(&scratch->sequence, bytes) < 0) {
        kh_reply_error(reply, 503, "out of memory");
        return false;
    }
    if (bytes)
        kve_sequence_hashes(found.hashes, found.n, (uint64_t *)(void *)scratch->sequence.data);
    scratch->sequence.len = bytes;
    ask->request.tokens = prompt.n;
    ask->request.hashes = (const uint64_t *)(const void *)scratch->sequence.data;
    ask->request.n_hashes = found.n;
    return true;
}

static bool ask_hashes(struct ksel_ask *ask, struct kh_reply *reply)
{
    const struct ksel_body *body = &ask->scratch->body;
    struct ki_body *prompt = &ask->scratch->indexer->body;
    struct ki_explain_ask found;
    uint64_t n = prompt->block_hashes.len / sizeof(uint64_t);

    if (prompt->block_hashes.len != body->sequence.len) {
        kh_reply_error(reply, 400, "block_hashes and sequence_hashes differ in length");
        return false;
    }
    if (n * ask->model->block_size > body->isl_tokens) {
        kh_reply_error(reply, 400, "isl_tokens is less than the blocks have");
        return false;
    }
    if (!ki_ask_hashes(ask->model, ask->scratch->indexer, &found, reply))
        return false;
    ask->request.tokens = body->isl_tokens;
    ask->request.hashes = (const uint64_t *)(const void *)body->sequence.data;
    ask->request.n_hashes = n;
    return true;
}

/* Check that the body has a prompt in one of its two forms. */
static bool has_prompt(const struct ksel_body *body, struct kh_reply *reply)
{
    if (body->has_tokens)
        return true;
    if (!body->has_blocks && !body->has_sequence)
        kh_reply_error(reply, 422, "missing field 'token_ids'");
    else if (!body->has_blocks || !body->has_sequence || !body->has_isl)
        kh_reply_error(reply, 422,
                       "block_hashes, sequence_hashes and isl_tokens are given together");
    return body->has_blocks && body->has_sequence && body->has_isl;
}

/* -- wishes ------------------------------------------------------------------------------------ */

static void override(struct ksel_ask *ask)
{
    const struct ksel_body *body = &ask->scratch->body;

    if (!body->has_credit && !body->has_scale && !body->has_temperature)
        return;
    /* In kvsel_params 0 means the default, and a negative number 0. */
    ask->params = (struct kvsel_params)KVSEL_PARAMS_INIT;
    if (body->has_credit)
        ask->params.overlap_credit = body->credit > 0 ? body->credit : -1;
    if (body->has_scale)
        ask->params.prefill_scale = body->scale > 0 ? body->scale : -1;
    if (body->has_temperature)
        ask->params.temperature = body->temperature > 0 ? body->temperature : -1;
    ask->request.params = &ask->params;
}

/* Turn offsets of texts into pointers. Returns false when out of memory. */
static bool constrain(struct ksel_ask *ask)
{
    struct ksel_scratch *scratch = ask->scratch;
    const struct ksel_body *body = &scratch->body;
    const ksel_text *required = (const ksel_text *)(const void *)body->required.data;
    const struct ksel_preference *p =
        (const struct ksel_preference *)(const void *)body->preferred.data;
    struct kvsel_request *r = &ask->request;

    kv_buf_clear(&scratch->texts);
    kv_buf_clear(&scratch->preferred);
    r->n_required = body->required.len / sizeof(*required);
    for (size_t i = 0; i < r->n_required; i++) {
        const char *text = ksel_text_of(body, required[i]);

        kv_buf_append(&scratch->texts, &text, sizeof(text));
    }
    r->n_preferred = body->preferred.len / sizeof(*p);
    for (size_t i = 0; i < r->n_preferred; i++) {
        struct kvsel_preference preferred = {ksel_text_of(body, p[i].label), p[i].weight};

        kv_buf_append(&scratch->preferred, &preferred, sizeof(preferred));
    }
    r->required = (const char *const *)(const void *)scratch->texts.data;
    r->preferred = (const struct kvsel_preference *)(const void *)scratch->preferred.data;
    return !scratch->texts.error && !scratch->preferred.error;
}

/* Name the workers that may be chosen. A pin without a rank admits all of its worker's. */
static void admit(struct ksel_ask *ask)
{
    const struct ksel_body *body = &ask->scratch->body;
    struct kvsel_request *r = &ask->request;

    if (body->has_pin && body->has_pin_rank) {
        ask->pinned = (struct kv_holder){body->pin, body->pin_rank};
        r->pinned = &ask->pinned;
    } else if (body->has_pin) {
        r->allowed = &body->pin;
        r->n_allowed = 1;
    } else if (body->has_allowed) {
        r->allowed = body->allowed.len ? (const uint64_t *)(const void *)body->allowed.data
                                       : &body->pin; /* of which none counts */
        r->n_allowed = body->allowed.len / sizeof(uint64_t);
    }
}

static bool read_wishes(struct ksel_ask *ask, struct kh_reply *reply)
{
    const struct ksel_body *body = &ask->scratch->body;
    struct kvsel_request *r = &ask->request;
    const char *session = ksel_text_of(body, body->session);

    r->lora = ksel_text_of(body, body->lora);
    r->policy = ksel_text_of(body, body->policy);
    r->session = session && *session ? session : NULL;
    r->priority = (uint32_t)body->strict_priority;
    if (session && strlen(session) > SESSION_MAX) {
        kh_reply_error(reply, 400, "session_id is longer than %d bytes", SESSION_MAX);
        return false;
    }
    for (size_t i = 0; r->policy; i++) {
        if (!kvsel_policy_name(i)) {
            kh_reply_error(reply, 400, "no policy is called '%.60s'", r->policy);
            return false;
        }
        if (strcmp(kvsel_policy_name(i), r->policy) == 0)
            break;
    }
    override(ask);
    admit(ask);
    if (constrain(ask))
        return true;
    kh_reply_error(reply, 503, "out of memory");
    return false;
}

/* -- all of it --------------------------------------------------------------------------------- */

bool ksel_ask_begin(struct ksel *s, struct ksel_scratch *scratch, struct ksel_ask *ret,
                    struct kh_reply *reply)
{
    const struct ksel_body *body = &scratch->body;
    const char *model = ksel_text_of(body, body->model), *group = ksel_text_of(body, body->group);

    *ret = (struct ksel_ask){.scratch = scratch, .request = KVSEL_REQUEST_INIT};
    if (!group)
        group = ksel_text_of(body, body->tenant);
    ret->name = model ? model : "default";
    ret->group = group ? group : "default";
    if (!has_prompt(body, reply) || !read_wishes(ret, reply))
        return false;
    ret->model = ki_registry_model(s->service->registry, ret->name, ret->group);
    if (!ret->model) {
        ksel_no_workers(ret->name, ret->group, reply);
        return false;
    }
    if (!(body->has_tokens ? ask_tokens : ask_hashes)(ret, reply))
        return false;
    ret->request.matches = scratch->indexer->lookup.matches.items;
    ret->request.n_matches = scratch->indexer->lookup.matches.n;
    return true;
}

void ksel_ask_end(struct ksel_ask *ask)
{
    if (ask->model)
        ki_model_release(ask->model);
}

static int by_number(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* Name as avoided all ranks of the workers, in order, that have failed the request. */
static bool avoid(struct ksel_ask *ask, const struct ksel_fleet *fleet)
{
    struct ksel_scratch *scratch = ask->scratch;
    const struct kv_buf *workers = &scratch->body.avoided;
    size_t n = workers->len / sizeof(uint64_t);

    kv_buf_clear(&scratch->avoided);
    for (size_t i = 0; i < fleet->n_members && n; i++)
        if (bsearch(&fleet->members[i].holder.worker, workers->data, n, sizeof(uint64_t),
                    by_number))
            kv_buf_append(&scratch->avoided, &fleet->members[i].holder, sizeof(struct kv_holder));
    ask->request.avoided = (const struct kv_holder *)(const void *)scratch->avoided.data;
    ask->request.n_avoided = scratch->avoided.len / sizeof(struct kv_holder);
    return !scratch->avoided.error;
}

struct ksel_fleet *ksel_ask_lock(struct ksel *s, struct ksel_ask *ask, struct kh_reply *reply)
{
    struct kv_buf *views = &ask->scratch->indexer->views;
    struct kv_buf *avoided = &ask->scratch->body.avoided;
    struct ksel_fleet *fleet;

    if (avoided->len) /* there may be many: not with the lock held */
        qsort(avoided->data, avoided->len / sizeof(uint64_t), sizeof(uint64_t), by_number);
    kv_buf_clear(views);
    ki_registry_views(s->service->registry, ask->model, views);
    pthread_mutex_lock(&s->lock);
    ksel_sync(s);
    fleet = ksel_fleet_find(s, ask->name, ask->group);
    if (fleet && fleet->n_members && fleet->block_size == ask->model->block_size &&
        avoid(ask, fleet)) {
        ksel_fleet_trust(s, fleet, views);
        return fleet;
    }
    pthread_mutex_unlock(&s->lock);
    ksel_no_workers(ask->name, ask->group, reply);
    return NULL;
}

bool ksel_ask_is_partial(const struct ksel_ask *ask, struct kv_holder holder)
{
    const struct kv_buf *views = &ask->scratch->indexer->views;
    const struct ki_view *v = (const struct ki_view *)(const void *)views->data;

    for (size_t i = 0; i < views->len / sizeof(*v); i++)
        if (v[i].holder.worker == holder.worker && v[i].holder.rank == holder.rank && v[i].reasons)
            return true;
    return false;
}

/* Make room in scratch->candidates for all workers. Returns NULL when out of memory. */
static struct kvsel_candidate *candidates_for(struct ksel_ask *ask, const struct ksel_fleet *fleet,
                                              size_t *ret_max)
{
    struct kv_buf *candidates = &ask->scratch->candidates;
    struct kvsel_stats stats = KVSEL_STATS_INIT;

    (void)kvsel_get_stats(fleet->books, &stats);
    *ret_max = stats.workers + 1;
    kv_buf_clear(candidates);
    if (kv_buf_reserve(candidates, *ret_max * sizeof(struct kvsel_candidate)) < 0)
        return NULL;
    return (struct kvsel_candidate *)(void *)candidates->data;
}

int ksel_ask_choose(struct ksel_ask *ask, struct ksel_fleet *fleet, uint64_t now_ns, bool explain,
                    struct kvsel_choice *ret, size_t *ret_n)
{
    struct kvsel_candidate *c;
    size_t max;
    long n;

    *ret = (struct kvsel_choice)KVSEL_CHOICE_INIT;
    *ret_n = 0;
    if (!explain)
        return kvsel_select(fleet->books, &ask->request, now_ns, ret);
    c = candidates_for(ask, fleet, &max);
    n = c ? kvsel_explain(fleet->books, &ask->request, now_ns, ret, c, max) : -ENOMEM;
    if (n < 0)
        return (int)n;
    *ret_n = KV_MIN((size_t)n, max);
    return ret->candidates ? 0 : -EHOSTUNREACH;
}

long ksel_ask_look(struct ksel_ask *ask, struct ksel_fleet *fleet, uint64_t now_ns)
{
    size_t max;
    struct kvsel_candidate *c = candidates_for(ask, fleet, &max);
    long n = c ? kvsel_look(fleet->books, &ask->request, now_ns, c, max) : -ENOMEM;

    return KV_MIN(n, (long)max);
}

static void put_worker(void *arg, struct kv_json_writer *w, uint64_t worker)
{
    ksel_put_worker(arg, w, worker);
}

struct ksel_decision ksel_ask_decision(struct ksel *s, const struct ksel_ask *ask, const char *id,
                                       size_t id_len, uint32_t block_size,
                                       const struct kvsel_choice *choice, size_t n)
{
    return (struct ksel_decision){
        .id = id,
        .id_len = id_len,
        .model = ask->name,
        .group = ask->group,
        .block_size = block_size,
        .request = &ask->request,
        .choice = choice,
        .candidates = (const struct kvsel_candidate *)(const void *)ask->scratch->candidates.data,
        .n_candidates = n,
        .put_worker = put_worker,
        .arg = s,
    };
}
