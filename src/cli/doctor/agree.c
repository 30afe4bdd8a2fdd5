// SPDX-License-Identifier: Apache-2.0
/*
 * Would the router's prompt meet the engine's blocks? kv-indexer finds a block by the hash of its tokens,
 * adapter and salt, so both sides must make the same tokens of the same text.
 *
 *     engine's first block ──► its hash, here ──► is that kv-indexer's? does it know the block?
 *     router's prompt      ──► kv-indexer: does it match? ──no──► which of the engine's blocks is near?
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/json/json.h"
#include "cli/doctor/doctor.h"
#include "kv_hash.h"

/* Tokens that two prompts must share in a row before one counts as the other, moved. */
enum { NEAR = 4 };

/* Tokens by which a prompt may be moved: each place may cost a look at all of it. */
enum { MOST_SHIFTED = 2048 };

/* -- asking kv-indexer ------------------------------------------------------------------------- */

static const char *model_of(const struct kc_doctor *doctor)
{
    if (doctor->opts.model)
        return doctor->opts.model;
    if (doctor->registered)
        return doctor->registered->model;
    return doctor->listeners.n ? doctor->listeners.items[0].model : "default";
}

static const char *tenant_of(const struct kc_doctor *doctor)
{
    if (doctor->opts.tenant)
        return doctor->opts.tenant;
    return doctor->registered ? doctor->registered->tenant : "default";
}

static int query(struct kc_doctor *doctor, const uint32_t *tokens, size_t n, const char *lora,
                 const char *salt, struct kc_match *ret)
{
    struct kv_buf body = KV_BUF_INIT;
    const struct kv_buf *answer = NULL;
    struct kv_error error = {0};
    struct kv_json_writer w;
    int rc;

    *ret = (struct kc_match){.holders = 0};
    kv_json_writer_init(&w, &body);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "model_name", model_of(doctor));
    kv_json_member_str(&w, "tenant_id", tenant_of(doctor));
    if (lora && lora[0])
        kv_json_member_str(&w, "lora_name", lora);
    if (salt && salt[0])
        kv_json_member_str(&w, "cache_salt", salt);
    kv_json_member_bool(&w, "explain", true);
    kv_json_key(&w, "token_ids");
    kv_json_begin_array(&w);
    for (size_t i = 0; i < n; i++)
        kv_json_put_u64(&w, tokens[i]);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    rc = body.error ? body.error
                    : kc_http_request(doctor->http, "/query", KC_BODY_JSON, body.data, body.len,
                                      &answer, &error);
    kv_buf_fini(&body);
    if (rc < 0 || !answer)
        return rc < 0 ? rc : -EPROTO;
    rc = kc_match_read(answer->data, answer->len,
                       doctor->registered ? doctor->registered->instance : NULL, ret);
    return rc;
}

/* Note kv-indexer's reason as the finding of that name. Returns whether there is one of that name. */
static bool note_reason(struct kc_doctor *doctor, const struct kc_match *match, const char *whose)
{
    enum kc_finding finding = kc_finding_named(match->reason, strlen(match->reason));

    if (finding == KC_N_FINDINGS || strcmp(match->reason, "matched") == 0)
        return false;
    if (!doctor->report.times[finding])
        kc_found(&doctor->report, finding, "/query with %s: %s", whose, match->text);
    return true;
}

/* -- the engine's first block ------------------------------------------------------------------ */

static uint64_t hash_of(const struct kc_first_block *block)
{
    return kve_hash_block(
        kve_seed(block->lora, strlen(block->lora), block->salt, strlen(block->salt)), block->tokens,
        block->n_tokens, NULL, 0);
}

/* The newest first block whose hash its tokens alone tell. */
static const struct kc_first_block *plain_block(const struct kc_engine *engine)
{
    for (size_t i = engine->n_first; i-- > 0;)
        if (engine->first[i].is_plain)
            return &engine->first[i];
    return NULL;
}

/*
 * Does kv-indexer know the engine's block by the hash of its tokens? Not asked where another finding says
 * why it can't.
 */
static int check_block(struct kc_doctor *doctor)
{
    const struct kc_first_block *block = plain_block(&doctor->engine);
    const unsigned *times = doctor->report.times;
    struct kc_match match;
    uint64_t hash;
    int rc;

    if (!block || !doctor->registered || times[KC_FINDING_block_size] ||
        times[KC_FINDING_disconnected] || times[KC_FINDING_behind] ||
        times[KC_FINDING_blocks_left_out])
        return 0;
    hash = hash_of(block);
    rc = query(doctor, block->tokens, block->n_tokens, block->lora, block->salt, &match);
    if (rc < 0)
        return rc == -ENOMEM ? rc : 0;
    if (match.has_hash && match.block_size == block->n_tokens && match.first_hash != hash)
        kc_found(&doctor->report, KC_FINDING_hash,
                 "of %u tokens that the engine has cached, kv-indexer makes %016" PRIx64
                 ", kv_hash.h %016" PRIx64,
                 block->n_tokens, match.first_hash, hash);
    else if (strcmp(match.reason, "matched") == 0 && match.asked_holds)
        kc_well(&doctor->report,
                "hash agreement: the engine's newest first block, %u tokens from %u on, is "
                "%016" PRIx64 " here, and kv-indexer finds it with worker %s",
                block->n_tokens, block->tokens[0], hash, doctor->registered->instance);
    else
        note_reason(doctor, &match, "the tokens of the engine's newest first block");
    return 0;
}

/* -- the router's prompt ----------------------------------------------------------------------- */

static size_t common(const uint32_t *a, size_t n_a, const uint32_t *b, size_t n_b)
{
    size_t i = 0;

    while (i < n_a && i < n_b && a[i] == b[i])
        i++;
    return i;
}

/* Where @b's beginning lies in @a behind its first token: both go on alike to the end of one. 0: nowhere. */
static size_t shift_of(const uint32_t *a, size_t n_a, const uint32_t *b, size_t n_b)
{
    for (size_t at = 1; at + NEAR <= n_a && n_b >= NEAR && at <= MOST_SHIFTED; at++)
        if (common(a + at, n_a - at, b, n_b) == KV_MIN(n_a - at, n_b))
            return at;
    return 0;
}

/* Note the difference of two beginnings of a prompt. Returns whether one is near the other: it was noted. */
static bool compare(struct kc_doctor *doctor, const uint32_t *router, size_t n_router,
                    const uint32_t *engine, size_t n_engine, const char *whose)
{
    size_t same = common(router, n_router, engine, n_engine);
    size_t more = shift_of(engine, n_engine, router, n_router);
    size_t fewer = shift_of(router, n_router, engine, n_engine);

    if (more)
        kc_found(&doctor->report, KC_FINDING_template,
                 "%s has %zu token%s, %u first, before the router's first token, %u", whose, more,
                 more == 1 ? "" : "s", engine[0], router[0]);
    else if (fewer)
        kc_found(&doctor->report, KC_FINDING_template,
                 "the router sends %zu token%s, %u first, before the first one of %s, %u", fewer,
                 fewer == 1 ? "" : "s", router[0], whose, engine[0]);
    else if (same && same < n_engine && same < n_router)
        kc_found(&doctor->report, KC_FINDING_tokenizer,
                 "%zu token%s alike, then the router sends %u, and %s has %u", same,
                 same == 1 ? " is" : "s are", router[same], whose, engine[same]);
    else
        return false;
    return true;
}

static const char *or_none(const char *text)
{
    return text && text[0] ? text : "none";
}

/* Is there a block of these tokens under another adapter or salt? Returns whether it was noted. */
static bool compare_names(struct kc_doctor *doctor, const struct kc_first_block *block)
{
    const char *lora = doctor->opts.lora_name ? doctor->opts.lora_name : "";
    const char *salt = doctor->opts.cache_salt ? doctor->opts.cache_salt : "";
    bool noted = false;

    if (strcmp(block->lora, lora) != 0) {
        kc_found(&doctor->report, KC_FINDING_adapter, "the engine's: %s; the router's: %s",
                 or_none(block->lora), or_none(lora));
        noted = true;
    }
    if (strcmp(block->salt, salt) != 0) { /* salts are secrets of tenants: not shown */
        kc_found(&doctor->report, KC_FINDING_salt, "the engine's block has %s, the query %s",
                 block->salt[0] ? "one" : "none", salt[0] ? "another one" : "none");
        noted = true;
    }
    return noted;
}

/* Find what keeps the router's prompt from the engine's blocks. Returns whether it was noted. */
static bool find_near(struct kc_doctor *doctor)
{
    const uint32_t *router = (const uint32_t *)(const void *)doctor->prompt.data;
    size_t n = doctor->prompt.len / sizeof(*router), best = 0;
    const struct kc_engine *engine = &doctor->engine;
    const struct kc_first_block *nearest = NULL;

    for (size_t i = engine->n_first; i-- > 0;) {
        const struct kc_first_block *block = &engine->first[i];
        size_t same = common(router, n, block->tokens, block->n_tokens);

        if (same == block->n_tokens)
            return compare_names(doctor, block);
        if (same >= best && (same >= NEAR || shift_of(block->tokens, block->n_tokens, router, n) ||
                             shift_of(router, n, block->tokens, block->n_tokens))) {
            best = same;
            nearest = block;
        }
    }
    return nearest && compare(doctor, router, n, nearest->tokens, nearest->n_tokens,
                              "the engine's cached block");
}

static int check_prompt(struct kc_doctor *doctor)
{
    const uint32_t *tokens = (const uint32_t *)(const void *)doctor->prompt.data;
    size_t n = doctor->prompt.len / sizeof(*tokens);
    struct kc_match match;
    int rc = query(doctor, tokens, n, doctor->opts.lora_name, doctor->opts.cache_salt, &match);

    if (rc < 0)
        return rc == -ENOMEM ? rc : 0;
    if (strcmp(match.reason, "matched") == 0) {
        kc_well(&doctor->report,
                "the router's prompt of %zu tokens matches: %" PRIu64 " worker%s its first block",
                n, match.holders, match.holders == 1 ? " holds" : "s hold");
        return 0;
    }
    if (strncmp(match.reason, "unknown_first_block", 19) == 0 && find_near(doctor))
        return 0;
    note_reason(doctor, &match, "the router's prompt");
    return 0;
}

/* Compare the router's tokens with those that the engine makes of the same text. */
static int check_text(struct kc_doctor *doctor)
{
    const uint32_t *router = (const uint32_t *)(const void *)doctor->prompt.data, *engine;
    size_t n = doctor->prompt.len / sizeof(*router), n_engine;
    struct kv_buf tokens = KV_BUF_INIT;
    int rc = kc_ask_tokenize(doctor, &tokens);

    if (rc == 0) {
        engine = (const uint32_t *)(const void *)tokens.data;
        n_engine = tokens.len / sizeof(*engine);
        if (!n)
            kv_buf_append(&doctor->prompt, tokens.data,
                          tokens.len); /* the router asks the engine */
        else if (n == n_engine && common(router, n, engine, n_engine) == n)
            kc_well(&doctor->report, "router and engine make the same %zu tokens of the text", n);
        else if (!compare(doctor, router, n, engine, n_engine, "the engine's /tokenize"))
            kc_found(&doctor->report, KC_FINDING_tokenizer,
                     "the router sends %zu tokens, the engine's /tokenize makes %zu others", n,
                     n_engine);
    }
    kv_buf_fini(&tokens);
    return rc == -ENOMEM ? rc : 0;
}

int kc_check_agreement(struct kc_doctor *doctor)
{
    int rc =
        doctor->engine_http && (doctor->opts.text || doctor->opts.chat) ? check_text(doctor) : 0;

    if (rc == 0 && doctor->indexer_answers)
        rc = check_block(doctor);
    if (rc == 0 && doctor->indexer_answers && doctor->prompt.len)
        rc = check_prompt(doctor);
    return rc;
}
