// SPDX-License-Identifier: Apache-2.0
#include "selector/body.h"

#include <math.h>

#include "base/args/instance.h"
#include "indexer/api/body_mm.h"

/* State of a parse. */
struct reading {
    struct kv_json json;
    struct ki_body *prompt;
    struct ksel_body *body;
};

void ksel_body_fini(struct ksel_body *body)
{
    kv_buf_fini(&body->sequence);
    kv_buf_fini(&body->allowed);
    kv_buf_fini(&body->avoided);
    kv_buf_fini(&body->required);
    kv_buf_fini(&body->preferred);
    kv_buf_fini(&body->strings);
    kv_buf_fini(&body->unescaped);
}

const char *ksel_text_of(const struct ksel_body *body, ksel_text text)
{
    return text ? body->strings.data + text - 1 : NULL;
}

/* -- values ------------------------------------------------------------------------------------ */

static ksel_text read_text(struct reading *r, size_t max, uint32_t *ret_len)
{
    struct ksel_body *b = r->body;
    struct kv_str text = kv_json_str(&r->json, &b->unescaped);
    size_t start = b->strings.len;

    if (text.len > max) {
        kv_json_fail(&r->json, -EINVAL, "string is too long");
        return 0;
    }
    kv_buf_append(&b->strings, text.p, text.len);
    kv_buf_putc(&b->strings, '\0');
    if (b->strings.error) {
        kv_json_fail(&r->json, -ENOMEM, "out of memory");
        return 0;
    }
    if (ret_len)
        *ret_len = (uint32_t)text.len;
    return (ksel_text)start + 1;
}

static double read_number(struct reading *r, double min, double max)
{
    double value = kv_json_double(&r->json);

    if (!(value >= min && value <= max)) {
        kv_json_fail(&r->json, -ERANGE, "number out of range");
        return 0;
    }
    return value;
}

uint64_t ksel_read_worker(struct kv_json *json, struct kv_buf *unescaped, struct kv_str *ret_name)
{
    const char *why = "not a worker id";
    struct kv_str text;
    uint64_t number = 0;
    int kind;

    if (ret_name)
        *ret_name = (struct kv_str){NULL, 0};
    if (kv_json_peek(json) != KV_JSON_STRING)
        return kv_json_u64(json, UINT64_MAX);
    text = kv_json_str(json, unescaped);
    if (kv_json_failed(json))
        return 0;
    kind = kv_instance_parse(text.p, text.len, &number, &why);
    if (kind < 0)
        kv_json_fail(json, -EINVAL, why);
    else if (kind == KV_INSTANCE_NAME && ret_name)
        *ret_name = text;
    return number;
}

static void read_workers(struct reading *r, struct kv_buf *ret)
{
    kv_json_array(&r->json);
    while (kv_json_next_item(&r->json)) {
        uint64_t worker = ksel_read_worker(&r->json, &r->body->unescaped, NULL);

        kv_buf_append(ret, &worker, sizeof(worker));
    }
}

static void read_pin(struct reading *r)
{
    struct ksel_body *b = r->body;
    bool has_worker = false;
    struct kv_str key;

    kv_json_object(&r->json);
    while (kv_json_next_key(&r->json, &key)) {
        if (kv_str_eq(key, "worker_id")) {
            b->pin = ksel_read_worker(&r->json, &b->unescaped, NULL);
            has_worker = true;
        } else if (kv_str_eq(key, "dp_rank") && !kv_json_null(&r->json)) {
            b->pin_rank = (uint32_t)kv_json_u64(&r->json, UINT32_MAX);
            b->has_pin_rank = true;
        } else if (!kv_str_eq(key, "dp_rank")) {
            kv_json_skip(&r->json);
        }
    }
    b->has_pin = true;
    if (!has_worker && !kv_json_failed(&r->json))
        kv_json_fail(&r->json, -EINVAL, "missing worker_id");
}

/* Each label is looked for at each worker: check that one more may follow. */
static void check_labels(struct reading *r, const struct kv_buf *labels, size_t size)
{
    if (labels->len / size >= KSEL_MAX_LABELS)
        kv_json_fail(&r->json, -EINVAL, "too many labels");
}

/* Read ["a"], or {"a": 2.5} with weights. */
static void read_labels(struct reading *r, bool weighted)
{
    struct ksel_body *b = r->body;
    struct ksel_preference preference = {.weight = 1};
    struct kv_str key;

    if (weighted && kv_json_peek(&r->json) == KV_JSON_OBJECT) {
        kv_json_object(&r->json);
        while (kv_json_next_key(&r->json, &key)) {
            check_labels(r, &b->preferred, sizeof(preference));
            preference.label = (ksel_text)b->strings.len + 1;
            kv_buf_append(&b->strings, key.p, key.len);
            kv_buf_putc(&b->strings, '\0');
            preference.weight = read_number(r, 0, 1e12);
            kv_buf_append(&b->preferred, &preference, sizeof(preference));
        }
        return;
    }
    kv_json_array(&r->json);
    while (kv_json_next_item(&r->json)) {
        check_labels(r, weighted ? &b->preferred : &b->required,
                     weighted ? sizeof(preference) : sizeof(preference.label));
        preference.label = read_text(r, KI_MAX_NAME, NULL);
        if (weighted)
            kv_buf_append(&b->preferred, &preference, sizeof(preference));
        else
            kv_buf_append(&b->required, &preference.label, sizeof(preference.label));
    }
}

static void read_constraints(struct reading *r)
{
    struct kv_str key;

    kv_json_object(&r->json);
    while (kv_json_next_key(&r->json, &key)) {
        bool required = kv_str_eq(key, "required_taints");

        if (kv_json_null(&r->json))
            continue;
        if (required || kv_str_eq(key, "preferred_taints"))
            read_labels(r, !required);
        else
            kv_json_skip(&r->json);
    }
}

static void read_override(struct reading *r)
{
    struct ksel_body *b = r->body;
    struct kv_str key;

    kv_json_object(&r->json);
    while (kv_json_next_key(&r->json, &key)) {
        if (kv_json_null(&r->json))
            continue;
        if (kv_str_eq(key, "overlap_score_credit") || kv_str_eq(key, "overlap_score_weight")) {
            b->credit = read_number(r, 0, 1e6);
            b->has_credit = true;
        } else if (kv_str_eq(key, "prefill_load_scale")) {
            b->scale = read_number(r, 0, 1e6);
            b->has_scale = true;
        } else if (kv_str_eq(key, "router_temperature")) {
            b->temperature = read_number(r, 0, 1e6);
            b->has_temperature = true;
        } else if (kv_str_eq(key, "track_prefill_tokens")) {
            b->no_prefill = !kv_json_bool(&r->json);
        } else {
            kv_json_skip(&r->json);
        }
    }
}

/* -- fields ------------------------------------------------------------------------------------ */

static bool read_prompt(struct reading *r, struct kv_str key)
{
    struct ksel_body *b = r->body;
    struct kv_json *j = &r->json;

    if (kv_str_eq(key, "token_ids")) {
        kv_buf_clear(&r->prompt->token_ids);
        kv_json_u32_array(j, &r->prompt->token_ids);
        b->has_tokens = true;
    } else if (kv_str_eq(key, "block_hashes")) {
        kv_buf_clear(&r->prompt->block_hashes);
        kv_json_bits64_array(j, &r->prompt->block_hashes);
        b->has_blocks = true;
    } else if (kv_str_eq(key, "sequence_hashes")) {
        kv_buf_clear(&b->sequence);
        kv_json_bits64_array(j, &b->sequence);
        b->has_sequence = true;
    } else if (kv_str_eq(key, "isl_tokens")) {
        b->isl_tokens = kv_json_u64(j, UINT64_C(1) << 40);
        b->has_isl = true;
    } else if (kv_str_eq(key, "block_mm_infos") || kv_str_eq(key, "mm_objects")) {
        kv_buf_clear(&r->prompt->mm_objects);
        ki_mm_read_json(j, kv_str_eq(key, "block_mm_infos"), &b->unescaped, &r->prompt->mm_objects);
    } else {
        return false;
    }
    return true;
}

static const struct {
    const char *name;
    size_t offset;
} texts[] = {
    {"model_name", offsetof(struct ksel_body, model)},
    {"routing_group", offsetof(struct ksel_body, group)},
    {"tenant_id", offsetof(struct ksel_body, tenant)},
    {"lora_name", offsetof(struct ksel_body, lora)},
    {"cache_salt", offsetof(struct ksel_body, salt)},
    {"session_id", offsetof(struct ksel_body, session)},
    {"policy", offsetof(struct ksel_body, policy)},
};

static bool read_named(struct reading *r, struct kv_str key)
{
    if (kv_str_eq(key, "selection_id")) {
        r->body->id = read_text(r, KSEL_ID_MAX, &r->body->id_len);
        if (!r->body->id_len && !kv_json_failed(&r->json)) /* no path could name it */
            kv_json_fail(&r->json, -EINVAL, "string is empty");
        return true;
    }
    for (size_t i = 0; i < KV_COUNT(texts); i++) {
        ksel_text value;

        if (!kv_str_eq(key, texts[i].name))
            continue;
        value = read_text(r, KI_MAX_NAME, NULL);
        memcpy((char *)r->body + texts[i].offset, &value, sizeof(value));
        return true;
    }
    return false;
}

static bool read_wish(struct reading *r, struct kv_str key)
{
    struct ksel_body *b = r->body;
    struct kv_json *j = &r->json;

    if (kv_str_eq(key, "router_config_override")) {
        read_override(r);
    } else if (kv_str_eq(key, "pinned_worker")) {
        read_pin(r);
    } else if (kv_str_eq(key, "allowed_worker_ids")) {
        read_workers(r, &b->allowed);
        b->has_allowed = true;
    } else if (kv_str_eq(key, "avoided_worker_ids")) {
        read_workers(r, &b->avoided);
    } else if (kv_str_eq(key, "routing_constraints")) {
        read_constraints(r);
    } else if (kv_str_eq(key, "expected_output_tokens")) {
        b->expected_output = kv_json_u64(j, UINT32_MAX);
    } else if (kv_str_eq(key, "priority_jump")) {
        b->priority_jump = read_number(r, -1e12, 1e12);
    } else if (kv_str_eq(key, "strict_priority")) {
        b->strict_priority = kv_json_u64(j, UINT32_MAX);
    } else if (kv_str_eq(key, "advisory")) {
        b->advisory = kv_json_bool(j);
    } else if (kv_str_eq(key, "explain")) {
        b->explain = kv_json_bool(j);
    } else {
        return false;
    }
    return true;
}

static bool read_booking(struct reading *r, struct kv_str key)
{
    struct ksel_body *b = r->body;
    struct kv_json *j = &r->json;

    if (kv_str_eq(key, "worker_id")) {
        b->worker = ksel_read_worker(j, &b->unescaped, NULL);
        b->has_worker = true;
    } else if (kv_str_eq(key, "dp_rank")) {
        b->rank = (uint32_t)kv_json_u64(j, UINT32_MAX);
    } else if (kv_str_eq(key, "effective_prefill_tokens")) {
        b->effective = kv_json_u64(j, UINT64_C(1) << 40);
        b->has_effective = true;
    } else if (kv_str_eq(key, "track_prefill_tokens")) {
        b->no_prefill = !kv_json_bool(j);
    } else if (kv_str_eq(key, "decay_fraction")) {
        b->decay = kv_json_double(j);
        b->has_decay = true;
    } else if (kv_str_eq(key, "tokens")) {
        b->tokens = kv_json_u64(j, UINT32_MAX);
    } else {
        return false;
    }
    return true;
}

/* -- the body ---------------------------------------------------------------------------------- */

void ksel_body_clear(struct ki_body *prompt, struct ksel_body *b)
{
    memset(b, 0, offsetof(struct ksel_body, sequence));
    kv_buf_clear(&b->sequence);
    kv_buf_clear(&b->allowed);
    kv_buf_clear(&b->avoided);
    kv_buf_clear(&b->required);
    kv_buf_clear(&b->preferred);
    kv_buf_clear(&b->strings);
    kv_buf_clear(&b->unescaped);
    kv_buf_clear(&prompt->token_ids);
    kv_buf_clear(&prompt->block_hashes);
    kv_buf_clear(&prompt->mm_objects);
    prompt->present = 0;
    prompt->explain = false;
    prompt->lora_name = prompt->cache_salt = NULL;
}

int ksel_refuse(const struct kv_json *json, const char *field, struct kv_error *error)
{
    const struct kv_error *why = &json->error;

    if (why->code == -ENOMEM)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    if (why->code == -EINVAL || why->code == -ERANGE)
        return kv_fail(error, -EINVAL, why->offset, "field '%.60s': %s (byte %zu)", field,
                       why->text, why->offset);
    return kv_fail(error, -EBADMSG, why->offset, "malformed JSON at byte %zu: %s", why->offset,
                   why->text);
}

int ksel_body_parse(struct kv_str text, struct ki_body *prompt, struct ksel_body *ret,
                    struct kv_error *error)
{
    struct reading r = {.prompt = prompt, .body = ret};
    char field[64] = "(top level)";
    struct kv_str key;

    ksel_body_clear(prompt, ret);
    kv_json_init(&r.json, text.p, text.len);
    kv_json_object(&r.json);
    while (kv_json_next_key(&r.json, &key)) {
        size_t len = KV_MIN(key.len, sizeof(field) - 1);

        memcpy(field, key.p, len);
        field[len] = '\0';
        key = (struct kv_str){field, key.len < sizeof(field) ? len : 0};
        if (kv_json_null(&r.json))
            continue;
        if (!read_prompt(&r, key) && !read_named(&r, key) && !read_wish(&r, key) &&
            !read_booking(&r, key))
            kv_json_skip(&r.json);
        if (kv_json_failed(&r.json))
            break;
    }
    if (kv_json_finish(&r.json) < 0)
        return ksel_refuse(&r.json, field, error);
    if (ret->allowed.error || ret->avoided.error || ret->required.error || ret->preferred.error ||
        ret->strings.error)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    prompt->lora_name = ksel_text_of(ret, ret->lora);
    prompt->cache_salt = ksel_text_of(ret, ret->salt);
    return 0;
}
