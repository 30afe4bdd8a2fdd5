// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/why.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "index/tree/facts.h"
#include "indexer/model/model.h"

static const struct ki_why_info infos[] = {
#define KI_WHY(id, name, text) {name, text},
#include "indexer/api/why.def"
#undef KI_WHY
};

const struct ki_why_info *ki_why_info(enum ki_why why)
{
    return &infos[why];
}

/* Names of why->elsewhere, by number. */
static const char *const namespaces[] = {"without lora_name", "without cache_salt",
                                         "without lora_name and cache_salt"};

static int compare_holders(const struct kv_holder *a, const struct kv_holder *b)
{
    if (a->worker != b->worker)
        return a->worker < b->worker ? -1 : 1;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

static int by_holder(const void *a, const void *b)
{
    return compare_holders(&((const struct kvi_stop *)a)->holder,
                           &((const struct kvi_stop *)b)->holder);
}

static const struct kvi_stop *find_stop(const struct ki_why_ask *why, struct kv_holder holder)
{
    const struct kvi_stop key = {.holder = holder};

    return why->n_stops ? bsearch(&key, why->stops, why->n_stops, sizeof(key), by_holder) : NULL;
}

static const struct kvi_match *find_match(const struct kvi_matches *matches,
                                          struct kv_holder holder)
{
    const struct kvi_match key = {.holder = holder};

    return matches->n ? bsearch(&key, matches->items, matches->n, sizeof(key), ki_by_holder) : NULL;
}

/* -- finding ----------------------------------------------------------------------------------- */

/* Keep of each holder the stop of the form of hashing in which it has most. */
static void merge_stops(struct ki_why_ask *why, struct kvi_stop *stops, size_t n)
{
    qsort(stops, n, sizeof(*stops), by_holder);
    for (size_t i = 0; i < n; i++) {
        struct kvi_stop *known = (struct kvi_stop *)find_stop(why, stops[i].holder);

        if (known && stops[i].reach > known->reach)
            *known = stops[i];
    }
    free(stops);
}

static int add_stops(struct ki_why_ask *why, const uint64_t *hashes, size_t n)
{
    struct kvi_stop *stops;
    long n_stops = kvi_find_stops(why->model->index, hashes, n, &stops);

    if (n_stops < 0)
        return (int)n_stops;
    if (why->stops) {
        merge_stops(why, stops, (size_t)n_stops);
        return 0;
    }
    qsort(stops, (size_t)n_stops, sizeof(*stops), by_holder);
    why->stops = stops;
    why->n_stops = (size_t)n_stops;
    return 0;
}

static int find_stops_of_prompt(struct ki_why_ask *why, const struct ki_prompt *prompt)
{
    struct kv_buf hashes = {0};
    uint64_t forms = ki_prompt_forms(prompt);
    int rc = 0;

    for (; forms && rc == 0; forms &= forms - 1) {
        rc = ki_prompt_hash(prompt, forms & -forms, &hashes);
        if (rc == 0)
            rc = add_stops(why, (const uint64_t *)(const void *)hashes.data,
                           hashes.len / sizeof(uint64_t));
    }
    kv_buf_fini(&hashes);
    return rc;
}

/* Sequence hashes: the prompt is the path to the deepest one that is known, and those behind it. */
static int find_stops_of_names(struct ki_why_ask *why)
{
    const struct ki_explain_ask *ask = why->ask;
    uint64_t *locals;
    size_t known = 0;
    long n = kvi_named_path(why->model->index, ask->hashes, ask->n, &locals, &known);
    int rc;

    if (n < 0)
        return (int)n;
    why->first = (size_t)n - KV_MIN(known, (size_t)n);
    why->n = why->first + ask->n;
    rc = add_stops(why, locals, (size_t)n);
    free(locals);
    return rc;
}

/* Look the first block up in the namespaces that a forgotten or superfluous name would lead to. */
static int find_elsewhere(struct ki_why_ask *why)
{
    const char *lora = why->ask->body->lora_name, *salt = why->ask->body->cache_salt;
    const bool wanted[] = {lora != NULL, salt != NULL, lora && salt};
    int rc = 0;

    for (size_t i = 0; i < KV_COUNT(wanted) && rc == 0; i++) {
        if (!wanted[i])
            continue;
        rc = ki_explain_first_block(why->model, why->ask, i == 1 ? lora : NULL,
                                    i == 0 ? salt : NULL, &why->elsewhere[i]);
        if (why->elsewhere[i].n)
            qsort(why->elsewhere[i].items, why->elsewhere[i].n, sizeof(why->elsewhere[i].items[0]),
                  ki_by_holder);
    }
    return rc;
}

int ki_why_find(struct ki_why_ask *why)
{
    const struct ki_explain_ask *ask = why->ask;
    int rc;

    why->n = ask->n;
    if (ask->prompt)
        rc = find_stops_of_prompt(why, ask->prompt);
    else if (ask->named)
        rc = find_stops_of_names(why);
    else
        rc = add_stops(why, ask->hashes, ask->n);
    if (rc == 0 && ask->prompt && ask->n)
        rc = find_elsewhere(why);
    ki_cut_find(&why->cut, why->model, ask);
    return rc;
}

void ki_why_fini(struct ki_why_ask *why)
{
    free(why->stops);
    ki_cut_fini(&why->cut);
    for (size_t i = 0; i < KV_COUNT(why->elsewhere); i++)
        kvi_matches_fini(&why->elsewhere[i]);
}

/* -- judging ----------------------------------------------------------------------------------- */

static struct kv_holder holder_of(const struct ki_worker_info *info)
{
    return (struct kv_holder){info->instance, info->rank};
}

uint32_t ki_why_reach(const struct ki_why_ask *why, const struct ki_worker_info *info)
{
    const struct kvi_match *match = find_match(why->matches, holder_of(info));

    return match ? match->reach[KV_N_TIERS - 1] : 0;
}

static const char *elsewhere(const struct ki_why_ask *why, const struct ki_worker_info *info)
{
    for (size_t i = 0; i < KV_COUNT(why->elsewhere); i++)
        if (find_match(&why->elsewhere[i], holder_of(info)))
            return namespaces[i];
    return NULL;
}

/* Say why a rank that has not even the first block has none. */
static enum ki_why why_nothing(const struct ki_why_ask *why, const struct ki_worker_info *info)
{
    if (elsewhere(why, info))
        return KI_WHY_OTHER_NAMESPACE;
    if (info->event_block_size)
        return KI_WHY_BLOCK_SIZE;
    if (info->held)
        return KI_WHY_OTHER_PROMPTS;
    if (info->batches == 0)
        return info->malformed    ? KI_WHY_MALFORMED
               : !info->connected ? KI_WHY_UNCONNECTED
                                  : KI_WHY_NO_EVENTS;
    return info->orphans ? KI_WHY_ORPHANS : KI_WHY_EMPTY;
}

/* Return true when the rank has the last block of its match under another hash than the request's. */
static bool has_other_names(const struct ki_why_ask *why, struct kv_holder holder, uint32_t reach)
{
    const struct ki_explain_ask *ask = why->ask;

    return ask->named && reach > why->first && reach - why->first <= ask->n &&
           !kvi_holds(why->model->index, holder, ask->hashes[reach - why->first - 1]);
}

static enum ki_why judge(const struct ki_why_ask *why, const struct ki_worker_info *info,
                         uint32_t reach, bool cut)
{
    const struct kvi_stop *stop = find_stop(why, holder_of(info));

    if (!why->n)
        return KI_WHY_NO_FULL_BLOCK;
    if (reach >= why->n)
        return KI_WHY_WHOLE;
    if (cut)
        return KI_WHY_CUT_BY_GROUP;
    if (stop && stop->reach > reach)
        return KI_WHY_GIVEN_UP;
    if (stop && stop->waits)
        return KI_WHY_WAITS;
    if (!reach)
        return why_nothing(why, info);
    if (has_other_names(why, holder_of(info), reach))
        return KI_WHY_OTHER_HASHES;
    return stop && stop->goes_on ? KI_WHY_OTHER_BLOCKS : KI_WHY_ENDS;
}

/* -- writing ----------------------------------------------------------------------------------- */

static void write_match(const struct ki_why_ask *why, const struct kvi_match *match,
                        struct kv_json_writer *w)
{
    static const char *const names[KV_N_TIERS] = {"gpu", "cpu", "disk", "external"};
    static const uint32_t none[KV_N_TIERS] = {0};
    const uint32_t *reach = match ? match->reach : none;

    kv_json_member_u64(w, "matched_tokens",
                       (uint64_t)reach[KV_N_TIERS - 1] * why->model->block_size);
    kv_json_key(w, "matched_blocks");
    kv_json_begin_object(w);
    for (int t = 0; t < KV_N_TIERS; t++)
        kv_json_member_u64(w, names[t], reach[t]);
    kv_json_end_object(w);
}

/* Count the ranks with the block at which this one stops. */
static uint64_t others_with(const struct ki_why_ask *why, uint32_t reach)
{
    uint64_t n = 0;

    for (size_t i = 0; i < why->n_stops; i++)
        n += why->stops[i].reach > reach;
    return n;
}

static void write_stop(const struct ki_why_ask *why, uint32_t reach, struct kv_json_writer *w)
{
    const struct ki_explain_ask *ask = why->ask;

    kv_json_member_u64(w, "stops_at", reach);
    if (reach >= why->first && reach - why->first < ask->n)
        kv_json_member_u64(w, "stops_at_hash", ask->hashes[reach - why->first]);
    kv_json_member_u64(w, "others_with_block", others_with(why, reach));
}

void ki_why_write(const struct ki_why_ask *why, const struct ki_worker_info *info,
                  struct kv_json_writer *w)
{
    const struct kvi_match *match = find_match(why->matches, holder_of(info));
    uint32_t reach = match ? match->reach[KV_N_TIERS - 1] : 0;
    enum ki_why reason;
    bool cut;

    kv_json_begin_object(w);
    if (info->name)
        kv_json_member_str(w, "instance_id", info->name);
    else
        kv_json_member_u64(w, "instance_id", info->instance);
    kv_json_member_u64(w, "dp_rank", info->rank);
    kv_json_member_str(w, "status", ki_listener_status_name(info->status));
    kv_json_member_bool(w, "partial", info->reasons != 0);
    if (info->reasons) {
        kv_json_key(w, "partial_reasons");
        ki_reasons_write(w, info->reasons);
    }
    kv_json_member_u64(w, "blocks", info->held);
    write_match(why, match, w);
    cut = ki_cut_write_one(&why->cut, info, why->model->block_size, w);
    reason = judge(why, info, reach, cut);
    kv_json_member_str(w, "reason", infos[reason].name);
    kv_json_member_str(w, "text", infos[reason].text);
    if (reason != KI_WHY_WHOLE && reason != KI_WHY_NO_FULL_BLOCK)
        write_stop(why, reach, w);
    if (reason == KI_WHY_OTHER_NAMESPACE)
        kv_json_member_str(w, "namespace", elsewhere(why, info));
    if (reason == KI_WHY_BLOCK_SIZE)
        kv_json_member_u64(w, "event_block_size", info->event_block_size);
    kv_json_end_object(w);
}
