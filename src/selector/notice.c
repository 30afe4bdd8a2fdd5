// SPDX-License-Identifier: Apache-2.0
#include "selector/notice.h"

#include <errno.h>

#include "base/core/error.h"

#define HASHES_MAX 32768 /* of a notice: the longest line is a part of the log (notices.h) */

static const char *const kinds[] = {
    [KSEL_NOTICE_OTHER] = "other",       [KSEL_NOTICE_HELLO] = "hello",
    [KSEL_NOTICE_ALIVE] = "alive",       [KSEL_NOTICE_SNAPSHOT] = "snapshot",
    [KSEL_NOTICE_COMPLETE] = "complete", [KSEL_NOTICE_BOOKED] = "booked",
    [KSEL_NOTICE_FREED] = "freed",       [KSEL_NOTICE_FIRST_TOKEN] = "first_token",
    [KSEL_NOTICE_OUTPUT] = "output",
};

/* -- writing ----------------------------------------------------------------------------------- */

static void write_holder(struct kv_json_writer *w, const char *worker, const char *rank,
                         struct kv_holder holder)
{
    kv_json_member_u64(w, worker, holder.worker);
    kv_json_member_u64(w, rank, holder.rank);
}

static void write_booking(struct kv_json_writer *w, const struct ksel_notice *n)
{
    size_t stride = n->stride ? n->stride : 1;

    kv_json_member_str(w, "model_name", n->model);
    kv_json_member_str(w, "routing_group", n->group);
    kv_json_member_u64(w, "block_size", n->block_size);
    write_holder(w, "worker", "rank", n->worker);
    if (n->paired)
        write_holder(w, "prefill_worker", "prefill_rank", n->prefill);
    kv_json_member_u64(w, "tokens", n->tokens);
    kv_json_member_u64(w, "uncovered", n->uncovered);
    kv_json_member_u64(w, "created", n->created_ns);
    kv_json_member_u64(w, "progress", n->progress_ns);
    if (n->lora)
        kv_json_member_str(w, "lora_name", n->lora);
    if (n->session)
        kv_json_member_str(w, "session_id", n->session);
    if (n->first_token)
        kv_json_member_bool(w, "first_token", true);
    kv_json_key(w, "hashes");
    kv_json_begin_array(w);
    for (size_t i = 0; i < n->n_hashes && i < HASHES_MAX; i++)
        kv_json_put_u64(w, n->hashes[i * stride + stride - 1]);
    kv_json_end_array(w);
}

void ksel_notice_write(const struct ksel_notice *n, struct kv_buf *out)
{
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "kind", kinds[n->kind]);
    kv_json_member_u64(&w, "at", n->at_ns);
    kv_json_member_u64(&w, "origin", n->origin);
    kv_json_member_u64(&w, "stamp", n->stamp);
    if (n->id) {
        kv_json_key(&w, "id");
        kv_json_put_strn(&w, n->id, n->id_len);
    }
    if (n->kind == KSEL_NOTICE_BOOKED)
        write_booking(&w, n);
    if (n->output)
        kv_json_member_u64(&w, "output", n->output);
    if (n->lost)
        kv_json_member_bool(&w, "lost", true);
    kv_json_end_object(&w);
    kv_buf_putc(out, '\n');
}

/* -- reading ----------------------------------------------------------------------------------- */

/* Places of texts in reader->texts, plus 1; 0: absent. */
struct places {
    size_t id, model, group, lora, session;
};

void ksel_notice_reader_fini(struct ksel_notice_reader *reader)
{
    kv_buf_fini(&reader->texts);
    kv_buf_fini(&reader->hashes);
    kv_buf_fini(&reader->scratch);
}

static void read_text(struct ksel_notice_reader *r, struct kv_json *json, size_t *place,
                      size_t *len)
{
    struct kv_str text = kv_json_str(json, &r->scratch);

    if (kv_json_failed(json))
        return;
    *place = r->texts.len + 1;
    if (len)
        *len = text.len;
    kv_buf_append(&r->texts, text.p, text.len);
    kv_buf_putc(&r->texts, '\0');
}

static enum ksel_notice_kind read_kind(struct ksel_notice_reader *r, struct kv_json *json)
{
    struct kv_str text = kv_json_str(json, &r->scratch);

    for (size_t i = 0; !kv_json_failed(json) && i < KV_COUNT(kinds); i++)
        if (kv_str_eq(text, kinds[i]))
            return (enum ksel_notice_kind)i;
    return KSEL_NOTICE_OTHER;
}

static bool read_text_member(struct ksel_notice_reader *r, struct kv_json *json, struct kv_str key,
                             struct ksel_notice *n, struct places *places)
{
    if (kv_str_eq(key, "kind"))
        n->kind = read_kind(r, json);
    else if (kv_str_eq(key, "id"))
        read_text(r, json, &places->id, &n->id_len);
    else if (kv_str_eq(key, "model_name"))
        read_text(r, json, &places->model, NULL);
    else if (kv_str_eq(key, "routing_group"))
        read_text(r, json, &places->group, NULL);
    else if (kv_str_eq(key, "lora_name"))
        read_text(r, json, &places->lora, NULL);
    else if (kv_str_eq(key, "session_id"))
        read_text(r, json, &places->session, NULL);
    else
        return false;
    return true;
}

static bool read_number(struct kv_json *json, struct kv_str key, struct ksel_notice *n)
{
    struct {
        const char *name;
        uint64_t *value;
    } const members[] = {
        {"at", &n->at_ns},
        {"origin", &n->origin},
        {"stamp", &n->stamp},
        {"worker", &n->worker.worker},
        {"tokens", &n->tokens},
        {"uncovered", &n->uncovered},
        {"output", &n->output},
        {"created", &n->created_ns},
        {"progress", &n->progress_ns},
    };

    for (size_t i = 0; i < KV_COUNT(members); i++)
        if (kv_str_eq(key, members[i].name)) {
            *members[i].value = kv_json_u64(json, UINT64_MAX);
            return true;
        }
    return false;
}

static bool read_other(struct ksel_notice_reader *r, struct kv_json *json, struct kv_str key,
                       struct ksel_notice *n)
{
    if (kv_str_eq(key, "block_size")) {
        n->block_size = (uint32_t)kv_json_u64(json, 1 << 20);
    } else if (kv_str_eq(key, "rank")) {
        n->worker.rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "prefill_worker")) {
        n->prefill.worker = kv_json_u64(json, UINT64_MAX);
        n->paired = true;
    } else if (kv_str_eq(key, "prefill_rank")) {
        n->prefill.rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
    } else if (kv_str_eq(key, "first_token")) {
        n->first_token = kv_json_bool(json);
    } else if (kv_str_eq(key, "lost")) {
        n->lost = kv_json_bool(json);
    } else if (kv_str_eq(key, "hashes")) {
        kv_buf_clear(&r->hashes);
        kv_json_bits64_array(json, &r->hashes);
    } else {
        return false;
    }
    return true;
}

static const char *text_at(const struct ksel_notice_reader *r, size_t place)
{
    return place ? r->texts.data + place - 1 : NULL;
}

static bool is_whole(const struct ksel_notice *n)
{
    switch (n->kind) {
    case KSEL_NOTICE_BOOKED:
        return n->id && n->origin && n->model && n->group && n->block_size;
    case KSEL_NOTICE_FIRST_TOKEN:
    case KSEL_NOTICE_OUTPUT:
    case KSEL_NOTICE_FREED:
        return n->id && n->origin;
    case KSEL_NOTICE_HELLO:
        return n->origin;
    default:
        return true;
    }
}

int ksel_notice_read(struct ksel_notice_reader *r, struct kv_str line, struct ksel_notice *ret)
{
    struct ksel_notice n = {0};
    struct places places = {0};
    struct kv_json json;
    struct kv_str key;

    kv_buf_clear(&r->texts);
    kv_buf_clear(&r->hashes);
    kv_json_init(&json, line.p, line.len);
    kv_json_object(&json);
    while (kv_json_next_key(&json, &key))
        if (!read_text_member(r, &json, key, &n, &places) && !read_number(&json, key, &n) &&
            !read_other(r, &json, key, &n))
            kv_json_skip(&json);
    if (r->texts.error || r->hashes.error || r->scratch.error)
        return -ENOMEM;
    n.id = text_at(r, places.id);
    n.model = text_at(r, places.model);
    n.group = text_at(r, places.group);
    n.lora = text_at(r, places.lora);
    n.session = text_at(r, places.session);
    n.hashes = (const uint64_t *)(const void *)r->hashes.data;
    n.n_hashes = r->hashes.len / sizeof(uint64_t);
    if (kv_json_finish(&json) < 0 || !is_whole(&n))
        return -EPROTO;
    *ret = n;
    return 0;
}
