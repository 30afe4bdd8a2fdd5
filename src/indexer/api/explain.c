// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/explain.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "indexer/api/cut.h"
#include "indexer/service.h"
#include "kv_event.h"

#define TEXT_BYTES 512

/* Sums over the workers of one model. */
struct view {
    size_t ranks, active, partial, disconnected;
    size_t with_reason[KI_N_REASONS]; /* ranks whose view is partial for it */
    uint64_t batches, orphans, missed, blocks, malformed;
    uint64_t skipped[KVE_N_SKIPS];
    uint64_t event_block_size; /* of events that were left out for it; 0: none */
    uint32_t odd_frames;       /* frames of a message that was no batch; 0: none */
    struct kve_unknown_media unknown_media;
    uint64_t last_event_ns;
};

static void add_media(struct kve_unknown_media *sum, const struct kve_unknown_media *media)
{
    for (uint32_t i = 0; i < media->n_items; i++)
        kve_unknown_media_count(sum,
                                (struct kv_str){media->items[i].name, strlen(media->items[i].name)},
                                media->items[i].n);
    sum->n_others += media->n_others;
}

static void add_partial(struct view *view, ki_reasons reasons, size_t ranks)
{
    view->partial += reasons ? ranks : 0;
    for (; reasons; reasons &= reasons - 1)
        view->with_reason[__builtin_ctzll(reasons)] += ranks;
}

static void look_at_workers(struct ki_service *service, const struct ki_model *model,
                            const struct ki_worker_info *infos, long n, struct view *view)
{
    memset(view, 0, sizeof(*view));
    for (long i = 0; i < n; i++) {
        const struct ki_worker_info *info = &infos[i];

        if (strcmp(info->model, model->name) != 0 || strcmp(info->tenant, model->tenant) != 0)
            continue;
        view->ranks++;
        view->active += info->status == KI_ACTIVE;
        add_partial(view, info->reasons, 1);
        view->disconnected += info->stale;
        view->batches += info->batches;
        view->orphans += info->orphans;
        view->missed += info->missed_batches;
        view->malformed += info->malformed;
        if (info->odd_frames)
            view->odd_frames = info->odd_frames;
        if (info->event_block_size)
            view->event_block_size = info->event_block_size;
        add_media(&view->unknown_media, &info->unknown_media);
        view->last_event_ns = KV_MAX(view->last_event_ns, info->last_event_ns);
        for (int s = 0; s < KVE_N_SKIPS; s++)
            view->skipped[s] += info->skipped[s];
    }
    add_partial(view, KI_BECAUSE(UNFOLLOWED), ki_registry_unfollowed(service->registry, model));
}

int ki_explain_first_block(const struct ki_model *model, const struct ki_explain_ask *ask,
                           const char *lora, const char *salt, struct kvi_matches *ret)
{
    struct ki_prompt prompt = *ask->prompt;
    struct ki_lookup lookup = {0};
    int rc;

    prompt.seed = kve_seed(lora, lora ? strlen(lora) : 0, salt, salt ? strlen(salt) : 0);
    prompt.n = KV_MIN(prompt.n, (size_t)prompt.block_size + KI_MAX_LOOKAHEAD);
    rc = ki_lookup_prompt(&lookup, model->index, &prompt);
    if (rc == 0) {
        kvi_matches_fini(ret);
        *ret = lookup.matches;
        lookup.matches = (struct kvi_matches){0};
    }
    ki_lookup_fini(&lookup);
    return rc;
}

/*
 * Return true when the first block matches in another namespace: a forgotten or superfluous adapter
 * or salt.
 */
static bool first_block_matches(const struct ki_model *model, const struct ki_explain_ask *ask,
                                const char *lora, const char *salt)
{
    struct kvi_matches matches = {0};
    bool found = ki_explain_first_block(model, ask, lora, salt, &matches) == 0 && matches.n > 0;

    kvi_matches_fini(&matches);
    return found;
}

static const char *other_namespace(const struct ki_model *model, const struct ki_explain_ask *ask)
{
    const char *lora = ask->body->lora_name, *salt = ask->body->cache_salt;

    if (!ask->prompt || ask->n == 0)
        return NULL;
    if (lora && first_block_matches(model, ask, NULL, salt))
        return "the first block is known without lora_name: did the worker publish this adapter's "
               "name?";
    if (salt && first_block_matches(model, ask, lora, NULL))
        return "the first block is known without cache_salt: the worker cached this prompt "
               "unsalted";
    if (lora && salt && first_block_matches(model, ask, NULL, NULL))
        return "the first block is known without lora_name and cache_salt: the worker cached this "
               "prompt with neither";
    return NULL;
}

static const char disconnected[] =
    "no worker is known to hold the first block, but one has had no connection for longer than "
    "--stale-after: see /workers. Its blocks are forgotten after --forget-after";

/* A text with numbers, valid until the next one. */
static KV_PRINTF(2, 3) const char *print(char text[TEXT_BYTES], const char *fmt, ...)
{
    va_list args;

    va_start(args, fmt);
    vsnprintf(text, TEXT_BYTES, fmt, args);
    va_end(args);
    return text;
}

/* Name what keeps a model's events from counting when none does. NULL: they count. */
static const char *cause_of_silence(const struct view *view, char text[TEXT_BYTES],
                                    const char **ret_text)
{
    if (view->batches > 0)
        return NULL;
    if (view->malformed > 0) {
        *ret_text =
            view->odd_frames
                ? print(
                      text,
                      "messages arrive that are no batches; the last had %" PRIu32
                      " frame%s. Three are expected: topic, sequence number (8 bytes, big-endian), "
                      "payload (msgpack). Without a number: topic and payload, or the payload",
                      view->odd_frames, view->odd_frames == 1 ? "" : "s")
                : "messages arrive whose payload is no batch of KV events in msgpack";
        return "malformed";
    }
    *ret_text = view->active == 0
                    ? "no worker's event stream is active; see /workers for the last error"
                    : "no event has arrived yet: does the engine publish KV events on "
                      "the registered endpoint?";
    return "no_events";
}

/* Name what keeps blocks of any prompt from matching. NULL: nothing does. */
static const char *cause_of_all(const struct ki_model *model, const struct view *view,
                                const struct kvi_stats *stats, char text[TEXT_BYTES],
                                const char **ret_text)
{
    const char *silence;

    if (view->ranks == 0) {
        *ret_text = "no worker is registered for this model and tenant";
        return "no_workers";
    }
    if (stats->blocks == 0 && view->skipped[KVE_SKIP_BLOCK_SIZE] > 0) {
        *ret_text = print(text,
                          "events were left out because their block_size is %" PRIu64
                          ", not the registered %" PRIu32
                          ": register the workers with the size of the events' blocks",
                          view->event_block_size, model->block_size);
        return "block_size";
    }
    if (stats->blocks == 0 && view->disconnected > 0 && view->batches > 0) {
        *ret_text = disconnected;
        return "disconnected";
    }
    silence = cause_of_silence(view, text, ret_text);
    if (silence)
        return silence;
    if (stats->blocks == 0 && view->orphans > 0) {
        *ret_text = print(text,
                          "blocks wait for parents that no event has stored (orphans: %" PRIu64
                          "): the indexer came later than they, or events were lost",
                          view->orphans);
        return "orphans";
    }
    if (stats->blocks == 0) {
        *ret_text =
            "the index is empty: all blocks were removed, or their events were left out (see "
            "skipped)";
        return "empty_index";
    }
    return NULL;
}

/* Name the most likely cause: a word for programs, a sentence for people. */
static const char *cause(const struct ki_model *model, const struct ki_explain_ask *ask,
                         const struct view *view, const struct kvi_stats *stats,
                         const struct kvi_matches *matches, const struct ki_cut *cut,
                         char text[TEXT_BYTES], const char **ret_text)
{
    const char *hint, *of_all;

    if (matches->n > 0) {
        *ret_text = "at least one worker holds the first block";
        return "matched";
    }
    if (ki_cut_is_all(cut)) {
        *ret_text = "a worker holds the first block, but its cache groups allow no match: see cut";
        return "cut_by_group";
    }
    if (ask->n == 0) {
        *ret_text = ask->prompt
                        ? "the prompt is shorter than one block: only full blocks are cached"
                        : "no block hashes were given";
        return "no_full_block";
    }
    hint = other_namespace(model, ask);
    if (hint) {
        *ret_text = hint;
        return "other_namespace";
    }
    of_all = cause_of_all(model, view, stats, text, ret_text);
    if (of_all)
        return of_all;
    if (view->disconnected > 0) {
        *ret_text = disconnected;
        return "disconnected";
    }
    *ret_text =
        view->partial > 0
            ? "no worker is known to hold the first block, but a view is partial: events were "
              "missed or left out, or none has come yet"
            : "no worker holds the first block: another prompt start (chat template, BOS), "
              "block size, lora_name or cache_salt, or it was evicted";
    return view->partial > 0 ? "unknown_first_block_partial_view" : "unknown_first_block";
}

void ki_explain_skipped(struct kv_json_writer *w, const uint64_t skipped[KVE_N_SKIPS],
                        const struct kve_unknown_media *media)
{
    kv_json_key(w, "skipped");
    kv_json_begin_object(w);
    for (int s = 0; s < KVE_N_SKIPS; s++)
        if (skipped[s])
            kv_json_member_u64(w, kve_skip_name((enum kve_skip)s), skipped[s]);
    kv_json_end_object(w);
    if (!media->n_items)
        return;
    kv_json_key(w, "unknown_media");
    kv_json_begin_object(w);
    for (uint32_t i = 0; i < media->n_items; i++)
        kv_json_member_u64(w, media->items[i].name, media->items[i].n);
    if (media->n_others)
        kv_json_member_u64(w, "(others)", media->n_others);
    kv_json_end_object(w);
}

/* Write {"missed_batches": 2}: ranks with a partial view, by reason. */
static void write_reasons(struct kv_json_writer *w, const struct view *view)
{
    if (!view->partial)
        return;
    kv_json_key(w, "partial_reasons");
    kv_json_begin_object(w);
    for (int i = 0; i < KI_N_REASONS; i++)
        if (view->with_reason[i])
            kv_json_member_u64(w, ki_reason_info((enum ki_reason)i)->name, view->with_reason[i]);
    kv_json_end_object(w);
}

void ki_explain(struct ki_service *service, const struct ki_model *model,
                const struct ki_explain_ask *ask, const struct kvi_matches *matches,
                struct kv_json_writer *w)
{
    char buffer[TEXT_BYTES];
    const char *word, *text;
    struct kvi_stats stats = {.size = sizeof(stats)};
    struct ki_worker_info *infos;
    long n = ki_registry_workers(service->registry, &infos);
    struct ki_cut cut = {0};
    struct view view;

    look_at_workers(service, model, infos, n, &view);
    ki_cut_find(&cut, model, ask);
    kvi_get_stats(model->index, &stats);
    word = cause(model, ask, &view, &stats, matches, &cut, buffer, &text);
    kv_json_key(w, "explain");
    kv_json_begin_object(w);
    kv_json_member_str(w, "reason", word);
    kv_json_member_str(w, "text", text);
    kv_json_member_u64(w, "block_size", model->block_size);
    if (ask->prompt)
        kv_json_member_u64(w, "tokens", ask->prompt->n);
    kv_json_member_u64(w, "full_blocks", ask->n);
    if (ask->n)
        kv_json_member_u64(w, "first_block_hash", ask->hashes[0]);
    kv_json_member_u64(w, "holders_matched", matches->n);
    kv_json_member_u64(w, "registered_ranks", view.ranks);
    kv_json_member_u64(w, "active_ranks", view.active);
    kv_json_member_u64(w, "partial_ranks", view.partial);
    write_reasons(w, &view);
    ki_cut_write(&cut, model, infos, n, w);
    if (view.with_reason[KI_REASON_UNKNOWN_GROUP])
        kv_json_member_str(w, "hint",
                           "a cache group is not followed: see groups in /workers. Of "
                           "chunked_local_attention no event has the chunk's length: tell it as "
                           "groups of the registration");
    kv_json_member_u64(w, "disconnected_ranks", view.disconnected);
    kv_json_member_u64(w, "indexed_blocks", stats.blocks);
    kv_json_member_u64(w, "batches", view.batches);
    kv_json_member_u64(w, "missed_batches", view.missed);
    kv_json_member_u64(w, "orphans", view.orphans);
    if (view.malformed)
        kv_json_member_u64(w, "malformed", view.malformed);
    if (view.event_block_size)
        kv_json_member_u64(w, "event_block_size", view.event_block_size);
    ki_explain_skipped(w, view.skipped, &view.unknown_media);
    if (view.last_event_ns) {
        uint64_t now = kv_wall_ns();

        kv_json_member_u64(w, "last_event_age_ms",
                           now > view.last_event_ns ? (now - view.last_event_ns) / KV_NS_PER_MS
                                                    : 0);
    }
    kv_json_end_object(w);
    ki_cut_fini(&cut);
    if (n >= 0)
        ki_worker_infos_free(infos, n);
}

#define MOST_NAMED 16u /* models in the answer to a query of an unknown one */

static void write_known(struct kv_json_writer *w, struct ki_model **models, long n)
{
    kv_json_key(w, "known");
    kv_json_begin_array(w);
    for (long i = 0; i < KV_MIN(n, (long)MOST_NAMED); i++) {
        kv_json_begin_object(w);
        kv_json_member_str(w, "model_name", models[i]->name);
        kv_json_member_str(w, "tenant_id", models[i]->tenant);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

void ki_explain_unknown(struct ki_service *service, const char *model, const char *tenant,
                        bool explain, struct kh_reply *reply)
{
    struct ki_model **models;
    struct kv_json_writer w;
    long n = ki_registry_models(service->registry, &models);
    const char *reason, *text;
    bool other = false;
    char error[512];

    for (long i = 0; i < n; i++)
        other |= strcmp(models[i]->name, model) == 0;
    reason = n <= 0 ? "no_workers" : other ? "unknown_tenant" : "unknown_model";
    text = n <= 0 ? "no worker has been registered yet (POST /register)"
           : other
               ? "the model is indexed, but not for this tenant_id"
               : "no worker is registered under this model_name; GET /workers lists those that are";
    snprintf(error, sizeof(error), "no indexer for model=%.200s tenant=%.200s", model, tenant);
    reply->status = 404;
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "error", error);
    kv_json_member_str(&w, "hint", text);
    write_known(&w, models, n);
    if (explain) {
        kv_json_key(&w, "explain");
        kv_json_begin_object(&w);
        kv_json_member_str(&w, "reason", reason);
        kv_json_member_str(&w, "text", text);
        kv_json_end_object(&w);
    }
    kv_json_end_object(&w);
    for (long i = 0; i < n; i++)
        ki_model_release(models[i]);
    if (n >= 0)
        free(models);
}
