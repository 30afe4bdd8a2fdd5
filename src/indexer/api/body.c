// SPDX-License-Identifier: Apache-2.0
#include "indexer/api/body.h"

#include <inttypes.h>
#include <stdio.h>
#include <strings.h>

#include "base/args/instance.h"
#include "base/core/utf8.h"
#include "base/json/msgpack.h"
#include "indexer/api/body_groups.h"
#include "indexer/api/body_mm.h"
#include "indexer/api/body_msgpack.h"

enum type { U32, INSTANCE, BOOL, STRING, LONG_STRING, U32S, BITS64S, MM_OBJECTS, MM_INFOS, GROUPS };

static const struct field {
    const char *name;
    enum type type;
    uint32_t bit;
    size_t offset;
} fields[] = {
    /* The error names the first missing field in this order. */
    {"token_ids", U32S, KI_TOKEN_IDS, offsetof(struct ki_body, token_ids)},
    {"block_hashes", BITS64S, KI_BLOCK_HASHES, offsetof(struct ki_body, block_hashes)},
    {"sequence_hashes", BITS64S, KI_SEQUENCE_HASHES, offsetof(struct ki_body, block_hashes)},
    {"instance_id", INSTANCE, KI_INSTANCE_ID, offsetof(struct ki_body, instance_id)},
    {"endpoint", LONG_STRING, KI_ENDPOINT, offsetof(struct ki_body, endpoint)},
    {"model_name", STRING, KI_MODEL_NAME, offsetof(struct ki_body, model_name)},
    {"tenant_id", STRING, KI_TENANT_ID, offsetof(struct ki_body, tenant_id)},
    {"routing_group", STRING, KI_ROUTING_GROUP, offsetof(struct ki_body, routing_group)},
    {"block_size", U32, KI_BLOCK_SIZE, offsetof(struct ki_body, block_size)},
    {"num_blocks", U32, KI_NUM_BLOCKS, offsetof(struct ki_body, num_blocks)},
    {"dp_rank", U32, KI_DP_RANK, offsetof(struct ki_body, dp_rank)},
    {"replay_endpoint", LONG_STRING, KI_REPLAY_ENDPOINT, offsetof(struct ki_body, replay_endpoint)},
    {"lora_name", STRING, KI_LORA_NAME, offsetof(struct ki_body, lora_name)},
    {"cache_salt", STRING, KI_CACHE_SALT, offsetof(struct ki_body, cache_salt)},
    {"explain", BOOL, KI_EXPLAIN, offsetof(struct ki_body, explain)},
    {"mm_objects", MM_OBJECTS, KI_MM_OBJECTS, offsetof(struct ki_body, mm_objects)},
    {"block_mm_infos", MM_INFOS, KI_BLOCK_MM_INFOS, offsetof(struct ki_body, mm_objects)},
    {"hash_lookahead", U32, KI_HASH_LOOKAHEAD, offsetof(struct ki_body, hash_lookahead)},
    {"eagle_drop", BOOL, KI_EAGLE_DROP, offsetof(struct ki_body, eagle_drop)},
    {"eagle_groups", STRING, KI_EAGLE_GROUPS, offsetof(struct ki_body, eagle_groups)},
    {"groups", GROUPS, KI_GROUPS, offsetof(struct ki_body, groups)},
    {"silent_windows", BOOL, KI_SILENT_WINDOWS, offsetof(struct ki_body, silent_windows)},
    {"kv_cache_report_mode", STRING, KI_REPORT_MODE, offsetof(struct ki_body, report_mode)},
    {"url", LONG_STRING, KI_URL, offsetof(struct ki_body, url)},
};

/* State of reading one request, for both readers. */
struct reading {
    bool is_json;
    union {
        struct kv_json json;
        struct kv_msgpack msgpack;
    };
    struct ki_body *body;
    uint32_t wanted, required;
    struct kv_error *error;
};

void ki_body_fini(struct ki_body *body)
{
    kv_buf_fini(&body->token_ids);
    kv_buf_fini(&body->block_hashes);
    kv_buf_fini(&body->mm_objects);
    kv_buf_fini(&body->strings);
    kv_buf_fini(&body->unescaped);
}

enum ki_media ki_media_of(const char *content_type)
{
    static const char application[] = "application/";
    const char *subtype;
    size_t len;

    if (!content_type || strncasecmp(content_type, application, sizeof(application) - 1) != 0)
        return KI_MEDIA_OTHER;
    subtype = content_type + sizeof(application) - 1;
    len = strcspn(subtype, "; \t");
    if (len == 4 && strncasecmp(subtype, "json", 4) == 0)
        return KI_MEDIA_JSON;
    if (len > 5 && strncasecmp(subtype + len - 5, "+json", 5) == 0)
        return KI_MEDIA_JSON;
    if ((len == 7 && strncasecmp(subtype, "msgpack", 7) == 0) ||
        (len == 9 && strncasecmp(subtype, "x-msgpack", 9) == 0) ||
        (len == 11 && strncasecmp(subtype, "vnd.msgpack", 11) == 0))
        return KI_MEDIA_MSGPACK;
    return KI_MEDIA_OTHER;
}

/* -- what both formats share ------------------------------------------------------------------- */

static const struct field *find_field(const struct reading *r, struct kv_str key)
{
    for (size_t i = 0; i < KV_COUNT(fields); i++)
        if (kv_str_eq(key, fields[i].name))
            return fields[i].bit & r->wanted ? &fields[i] : NULL;
    return NULL;
}

static void *at(const struct reading *r, const struct field *field)
{
    return (char *)r->body + field->offset;
}

/* Copy a string. Pointers stay valid: room for all strings of a request was reserved. */
static const char *keep_string(struct ki_body *body, struct kv_str value)
{
    size_t start = body->strings.len;

    kv_buf_append(&body->strings, value.p, value.len);
    kv_buf_putc(&body->strings, '\0');
    return body->strings.data + start;
}

/* Return the reason why the string is refused, or NULL with the field set. */
static const char *set_string(struct reading *r, const struct field *field, struct kv_str value)
{
    const char **ret = at(r, field);

    if (value.len > (field->type == LONG_STRING ? 2 * KI_MAX_NAME : KI_MAX_NAME))
        return "string is too long";
    if (value.len && memchr(value.p, '\0', value.len))
        return "NUL in a string";
    *ret = keep_string(r->body, value);
    /* Answers and metrics are UTF-8: they would show other names as one. JSON's are by its reader. */
    return kv_utf8_valid(*ret) ? NULL : "not UTF-8";
}

/*
 * Refuse a body with a sentence for the client. Codes other than -EBADMSG and -ENOMEM name the
 * field.
 */
static int refuse(struct reading *r, const struct field *field, const char *format,
                  const struct kv_error *why)
{
    if (why->code == -ENOMEM)
        return kv_fail(r->error, -ENOMEM, 0, "out of memory");
    if (why->code == -EINVAL || why->code == -ERANGE)
        return kv_fail(r->error, -EINVAL, why->offset, "field '%s': %s (byte %zu)",
                       field ? field->name : "(top level)", why->text, why->offset);
    return kv_fail(r->error, -EBADMSG, why->offset, "malformed %s at byte %zu: %s", format,
                   why->offset, why->text);
}

static int check_required(struct reading *r)
{
    uint32_t missing = r->required & ~r->body->present;

    if (r->body->present & KI_SEQUENCE_HASHES)
        missing &= ~(uint32_t)KI_BLOCK_HASHES;
    for (size_t i = 0; missing && i < KV_COUNT(fields); i++)
        if (fields[i].bit & missing)
            return kv_fail(r->error, -EINVAL, 0, "missing field '%s'%s", fields[i].name,
                           fields[i].bit & KI_BLOCK_HASHES && r->wanted & KI_SEQUENCE_HASHES
                               ? " or 'sequence_hashes'"
                               : "");
    return 0;
}

/* -- fields, in either format ------------------------------------------------------------------ */

static void fail(struct reading *r, const char *text)
{
    if (r->is_json)
        kv_json_fail(&r->json, -EINVAL, text);
    else
        kv_msgpack_fail(&r->msgpack, -EINVAL, text);
}

static bool has_failed(const struct reading *r)
{
    return r->is_json ? kv_json_failed(&r->json) : kv_msgpack_failed(&r->msgpack);
}

static uint64_t read_uint(struct reading *r, uint64_t max)
{
    return r->is_json ? kv_json_u64(&r->json, max) : ki_msgpack_uint(&r->msgpack, max);
}

static struct kv_str read_text(struct reading *r)
{
    return r->is_json ? kv_json_str(&r->json, &r->body->unescaped) : ki_msgpack_str(&r->msgpack);
}

static bool is_string(struct reading *r)
{
    return r->is_json ? kv_json_peek(&r->json) == KV_JSON_STRING
                      : kv_msgpack_peek(&r->msgpack) == KV_MSGPACK_STR;
}

/* Read an instance id: a number, or a string that is one or a name. */
static void read_instance(struct reading *r)
{
    struct ki_body *body = r->body;
    const char *why = NULL;
    struct kv_str text;
    int kind;

    if (!is_string(r)) {
        body->instance_id = read_uint(r, UINT64_MAX);
        return;
    }
    text = read_text(r);
    if (has_failed(r))
        return;
    kind = kv_instance_parse(text.p, text.len, &body->instance_id, &why);
    if (kind < 0)
        fail(r, why);
    else if (kind == KV_INSTANCE_NAME)
        body->instance_name = keep_string(body, text);
}

static void read_string(struct reading *r, const struct field *field)
{
    struct kv_str value = read_text(r);
    const char *problem = has_failed(r) ? NULL : set_string(r, field, value);

    if (problem)
        fail(r, problem);
}

static void read_u32s(struct reading *r, struct kv_buf *ret)
{
    if (r->is_json)
        kv_json_u32_array(&r->json, ret);
    else
        ki_msgpack_u32s(ret, &r->msgpack);
}

static void read_bits64s(struct reading *r, struct kv_buf *ret)
{
    if (r->body->present & (KI_BLOCK_HASHES | KI_SEQUENCE_HASHES))
        fail(r, "block_hashes and sequence_hashes are given both");
    else if (r->is_json)
        kv_json_bits64_array(&r->json, ret);
    else
        ki_msgpack_bits64s(ret, &r->msgpack);
}

static void read_mm(struct reading *r, bool infos)
{
    struct ki_body *body = r->body;

    if (body->present & (KI_MM_OBJECTS | KI_BLOCK_MM_INFOS))
        fail(r, "mm_objects and block_mm_infos are given both");
    else if (r->is_json)
        ki_mm_read_json(&r->json, infos, &body->unescaped, &body->mm_objects);
    else
        ki_mm_read_msgpack(&r->msgpack, infos, &body->mm_objects);
}

/* Skip a null, which an optional field may be. Returns false when there is a value. */
static bool skip_null(struct reading *r, const struct field *field)
{
    if (field->bit & r->required)
        return false;
    return r->is_json ? kv_json_null(&r->json) : kv_msgpack_nil(&r->msgpack);
}

static void read_value(struct reading *r, const struct field *field)
{
    if (r->body->present & field->bit) {
        fail(r, "given twice");
        return;
    }
    if (skip_null(r, field))
        return;
    switch (field->type) {
    case U32:
        *(uint64_t *)at(r, field) = read_uint(r, UINT32_MAX);
        break;
    case INSTANCE:
        read_instance(r);
        break;
    case BOOL:
        *(bool *)at(r, field) = r->is_json ? kv_json_bool(&r->json) : ki_msgpack_bool(&r->msgpack);
        break;
    case STRING:
    case LONG_STRING:
        read_string(r, field);
        break;
    case U32S:
        read_u32s(r, at(r, field));
        break;
    case BITS64S:
        read_bits64s(r, at(r, field));
        break;
    case MM_OBJECTS:
    case MM_INFOS:
        read_mm(r, field->type == MM_INFOS);
        break;
    case GROUPS:
        if (r->is_json)
            ki_told_read_json(&r->json, &r->body->unescaped, at(r, field));
        else
            ki_told_read_msgpack(&r->msgpack, at(r, field));
        break;
    }
    r->body->present |= field->bit;
}

/* -- entry ------------------------------------------------------------------------------------- */

/*
 * Refuse an array in the place of the object. The original reads its elements as the fields in their
 * order: what is malformed before the first element of a wrong type counts, what follows doesn't.
 */
static int refuse_array(struct reading *r, struct kv_str text)
{
    const struct field *first = fields;
    struct kv_json *j = &r->json;
    bool empty = true;

    while (!(first->bit & r->required) && first < &fields[KV_COUNT(fields) - 1])
        first++;
    kv_json_array(j);
    for (; kv_json_next_item(j); empty = false) {
        if (empty)
            read_value(r, first);
        else
            kv_json_skip(j);
    }
    if (!kv_json_failed(j) && !empty)
        kv_json_finish(j);
    if (j->error.code != -EBADMSG && j->error.code != -E2BIG) {
        kv_json_init(j, text.p, text.len);
        kv_json_object(j); /* which fails */
    }
    return refuse(r, NULL, "JSON", &j->error);
}

static int parse_json(struct reading *r, struct kv_str text)
{
    const struct field *field = NULL;
    struct kv_json *j = &r->json;
    struct kv_str key;

    kv_json_init(j, text.p, text.len);
    if (kv_json_peek(j) == KV_JSON_ARRAY)
        return refuse_array(r, text);
    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        field = find_field(r, key);
        if (field)
            read_value(r, field);
        else
            kv_json_skip(j);
    }
    if (kv_json_finish(j) < 0)
        return refuse(r, field, "JSON", &j->error);
    return check_required(r);
}

static int parse_msgpack(struct reading *r, struct kv_str text)
{
    const struct field *field = NULL;
    struct kv_msgpack *m = &r->msgpack;
    uint32_t n = 0;

    kv_msgpack_init(m, text.p, text.len);
    if (ki_msgpack_expect(m, kv_msgpack_peek(m) == KV_MSGPACK_MAP, "expected a map"))
        n = kv_msgpack_map(m);
    for (uint32_t i = 0; i < n && !kv_msgpack_failed(m); i++) {
        field = NULL;
        if (kv_msgpack_peek(m) != KV_MSGPACK_STR)
            kv_msgpack_skip(m); /* a key of another type can't name a known field */
        else
            field = find_field(r, kv_msgpack_str(m));
        if (field)
            read_value(r, field);
        else
            kv_msgpack_skip(m);
    }
    if (!kv_msgpack_failed(m) && m->p != m->end)
        kv_msgpack_fail(m, -EPROTO, "bytes after the value");
    if (kv_msgpack_failed(m))
        return refuse(r, field, "msgpack", &m->error);
    return check_required(r);
}

static void reset(struct ki_body *body)
{
    struct kv_buf tokens = body->token_ids, hashes = body->block_hashes;
    struct kv_buf strings = body->strings, unescaped = body->unescaped, mm = body->mm_objects;

    memset(body, 0, sizeof(*body));
    kv_buf_clear(&tokens);
    kv_buf_clear(&hashes);
    kv_buf_clear(&strings);
    kv_buf_clear(&unescaped);
    kv_buf_clear(&mm);
    body->mm_objects = mm;
    body->token_ids = tokens;
    body->block_hashes = hashes;
    body->strings = strings;
    body->unescaped = unescaped;
}

int ki_body_parse(enum ki_media media, struct kv_str text, uint32_t required, uint32_t optional,
                  struct ki_body *ret, struct kv_error *error)
{
    struct reading r = {.is_json = media != KI_MEDIA_MSGPACK,
                        .body = ret,
                        .wanted = required | optional,
                        .required = required,
                        .error = error};
    int rc;

    if (r.wanted & KI_TENANT_ID)
        r.wanted |= KI_ROUTING_GROUP;
    reset(ret);
    if (kv_buf_reserve(&ret->strings, 16 * (KI_MAX_NAME + 1)) < 0)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    rc = r.is_json ? parse_json(&r, text) : parse_msgpack(&r, text);
    if (rc == 0 && (ret->token_ids.error || ret->block_hashes.error || ret->mm_objects.error))
        rc = kv_fail(error, -ENOMEM, 0, "out of memory");
    if (rc == 0 && ret->routing_group) {
        ret->tenant_id = ret->routing_group;
        ret->present = (ret->present | KI_TENANT_ID) & ~(uint32_t)KI_ROUTING_GROUP;
    }
    return rc;
}
