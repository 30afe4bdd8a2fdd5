// SPDX-License-Identifier: Apache-2.0
#include "selector/record.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/args/args.h"
#include "selector/body.h"

#define ENDPOINT_MAX (2 * KI_MAX_NAME)

const char *ksel_lifecycle_name(enum ksel_lifecycle lifecycle)
{
    static const char *const names[] = {"incomplete", "schedulable", "draining", "unschedulable"};

    return names[lifecycle];
}

static void texts_fini(struct ksel_texts *texts)
{
    for (size_t i = 0; i < texts->n; i++)
        free(texts->items[i]);
    free(texts->items);
    *texts = (struct ksel_texts){0};
}

static void streams_fini(struct ksel_record *r)
{
    for (size_t i = 0; i < r->n_streams; i++)
        free(r->streams[i].endpoint);
    free(r->streams);
    r->streams = NULL;
    r->n_streams = 0;
}

struct ksel_record *ksel_record_create(void)
{
    struct ksel_record *r = calloc(1, sizeof(*r));

    if (!r)
        return NULL;
    r->n_ranks = 1;
    r->model = strdup("default");
    r->group = strdup("default");
    if (r->model && r->group)
        return r;
    ksel_record_destroy(r);
    return NULL;
}

void ksel_record_destroy(struct ksel_record *r)
{
    if (!r)
        return;
    streams_fini(r);
    texts_fini(&r->taints);
    texts_fini(&r->domains);
    free(r->name);
    free(r->model);
    free(r->group);
    free(r->endpoint);
    free(r->replay_endpoint);
    free(r->stable_routing_id);
    free(r->transfer_domain);
    free(r->transfer_enforcement);
    free(r->refused);
    free(r);
}

/* Append a copy of @text. Returns 0 or -ENOMEM. */
static int texts_add(struct ksel_texts *texts, const char *text, size_t len)
{
    char **items = realloc(texts->items, (texts->n + 1) * sizeof(*items));

    if (!items)
        return -ENOMEM;
    texts->items = items;
    items[texts->n] = strndup(text, len);
    if (!items[texts->n])
        return -ENOMEM;
    texts->n++;
    return 0;
}

static int streams_add(struct ksel_record *r, uint32_t rank, const char *text, size_t len)
{
    struct ksel_stream *streams = realloc(r->streams, (r->n_streams + 1) * sizeof(*streams));

    if (!streams)
        return -ENOMEM;
    r->streams = streams;
    streams[r->n_streams] = (struct ksel_stream){rank, strndup(text, len)};
    if (!streams[r->n_streams].endpoint)
        return -ENOMEM;
    r->n_streams++;
    return 0;
}

/* Copy a text; NULL stays NULL. Returns false when out of memory. */
static bool copy(char **ret, const char *text)
{
    *ret = text ? strdup(text) : NULL;
    return !text || *ret;
}

static bool copy_texts(struct ksel_texts *ret, const struct ksel_texts *texts)
{
    bool ok = true;

    *ret = (struct ksel_texts){0};
    for (size_t i = 0; i < texts->n && ok; i++)
        ok = texts_add(ret, texts->items[i], strlen(texts->items[i])) == 0;
    return ok;
}

struct ksel_record *ksel_record_copy(const struct ksel_record *from)
{
    struct ksel_record *r = malloc(sizeof(*r));
    bool ok;

    if (!r)
        return NULL;
    *r = *from;
    r->streams = NULL;
    r->n_streams = 0;
    r->refused = NULL;
    ok = copy(&r->name, from->name);
    ok &= copy(&r->model, from->model);
    ok &= copy(&r->group, from->group);
    ok &= copy(&r->endpoint, from->endpoint);
    ok &= copy(&r->replay_endpoint, from->replay_endpoint);
    ok &= copy(&r->stable_routing_id, from->stable_routing_id);
    ok &= copy(&r->transfer_domain, from->transfer_domain);
    ok &= copy(&r->transfer_enforcement, from->transfer_enforcement);
    ok &= copy_texts(&r->taints, &from->taints);
    ok &= copy_texts(&r->domains, &from->domains);
    for (size_t i = 0; i < from->n_streams && ok; i++)
        ok = streams_add(r, from->streams[i].rank, from->streams[i].endpoint,
                         strlen(from->streams[i].endpoint)) == 0;
    if (ok)
        return r;
    ksel_record_destroy(r);
    return NULL;
}

void ksel_record_move_streams(struct ksel_record *from, struct ksel_record *to)
{
    streams_fini(to);
    to->streams = KV_STEAL(from->streams);
    to->n_streams = from->n_streams;
    from->n_streams = 0;
    to->one_stream = from->one_stream;
    to->start_rank = from->start_rank;
    to->n_ranks = from->n_ranks;
}

/* -- reading ----------------------------------------------------------------------------------- */

struct reading {
    struct kv_json json;
    struct kv_buf unescaped;
    struct ksel_record *record;
    bool has_worker;
};

static void check_memory(struct reading *r, int rc)
{
    if (rc < 0)
        kv_json_fail(&r->json, -ENOMEM, "out of memory");
}

/* Read a text that isn't empty in place of *@ret. */
static void read_text(struct reading *r, char **ret, size_t max)
{
    struct kv_str text = kv_json_str(&r->json, &r->unescaped);
    char *taken;

    if (kv_json_failed(&r->json))
        return;
    if (text.len > max || text.len == 0) {
        kv_json_fail(&r->json, -EINVAL, text.len ? "string is too long" : "string is empty");
        return;
    }
    taken = strndup(text.p, text.len);
    check_memory(r, taken ? 0 : -ENOMEM);
    if (!taken)
        return;
    free(*ret);
    *ret = taken;
}

static void read_stream(struct reading *r, uint32_t rank)
{
    struct kv_str text = kv_json_str(&r->json, &r->unescaped);

    if (text.len > ENDPOINT_MAX)
        kv_json_fail(&r->json, -EINVAL, "string is too long");
    if (r->record->n_streams == KSEL_MAX_RANKS)
        kv_json_fail(&r->json, -EINVAL, "too many ranks");
    if (!kv_json_failed(&r->json))
        check_memory(r, streams_add(r->record, rank, text.p, text.len));
}

static void read_streams(struct reading *r)
{
    char digits[KV_U64_TEXT_MAX + 1];
    struct kv_str key;

    streams_fini(r->record);
    r->record->one_stream = r->record->adopted = false;
    kv_json_object(&r->json);
    while (kv_json_next_key(&r->json, &key)) {
        uint64_t rank = UINT64_MAX;

        if (key.len < sizeof(digits)) {
            memcpy(digits, key.p, key.len);
            digits[key.len] = '\0';
            if (kv_parse_u64(digits, &rank) < 0)
                rank = UINT64_MAX;
        }
        if (rank > UINT32_MAX)
            kv_json_fail(&r->json, -EINVAL, "a key is no dp_rank");
        read_stream(r, (uint32_t)rank);
    }
}

static void read_taints(struct reading *r)
{
    texts_fini(&r->record->taints);
    kv_json_array(&r->json);
    while (kv_json_next_item(&r->json)) {
        struct kv_str text = kv_json_str(&r->json, &r->unescaped);

        check_memory(r, texts_add(&r->record->taints, text.p ? text.p : "", text.len));
    }
}

static void read_domains(struct reading *r)
{
    struct kv_buf pair = KV_BUF_INIT;
    struct kv_str key, value;

    texts_fini(&r->record->domains);
    kv_json_object(&r->json);
    while (kv_json_next_key(&r->json, &key)) {
        kv_buf_clear(&pair);
        kv_buf_append(&pair, key.p, key.len);
        kv_buf_putc(&pair, '=');
        value = kv_json_str(&r->json, &r->unescaped);
        kv_buf_append(&pair, value.p, value.len);
        check_memory(r, pair.error ? -ENOMEM : texts_add(&r->record->domains, pair.data, pair.len));
    }
    kv_buf_fini(&pair);
}

static bool read_listed(struct reading *r, struct kv_str key)
{
    if (kv_str_eq(key, "kv_events_endpoint")) {
        streams_fini(r->record);
        r->record->one_stream = true;
        r->record->adopted = false;
        read_stream(r, 0);
    } else if (kv_str_eq(key, "kv_events_endpoints")) {
        read_streams(r);
    } else if (kv_str_eq(key, "taints")) {
        read_taints(r);
    } else if (kv_str_eq(key, "topology_domains")) {
        read_domains(r);
    } else {
        return false;
    }
    return true;
}

static bool read_text_member(struct reading *r, struct kv_str key)
{
    struct ksel_record *record = r->record;
    struct {
        const char *name;
        char **text;
        size_t max;
    } const members[] = {
        {"model_name", &record->model, KI_MAX_NAME},
        {"routing_group", &record->group, KI_MAX_NAME},
        {"endpoint", &record->endpoint, ENDPOINT_MAX},
        {"replay_endpoint", &record->replay_endpoint, ENDPOINT_MAX},
        {"stable_routing_id", &record->stable_routing_id, KI_MAX_NAME},
        {"kv_transfer_domain", &record->transfer_domain, KI_MAX_NAME},
        {"kv_transfer_enforcement", &record->transfer_enforcement, KI_MAX_NAME},
    };

    for (size_t i = 0; i < KV_COUNT(members); i++)
        if (kv_str_eq(key, members[i].name)) {
            read_text(r, members[i].text, members[i].max);
            return true;
        }
    return false;
}

static bool read_number_member(struct reading *r, struct kv_str key)
{
    struct ksel_record *record = r->record;
    struct kv_json *j = &r->json;

    if (kv_str_eq(key, "block_size")) {
        record->block_size = (uint32_t)kv_json_u64(j, 1 << 20);
    } else if (kv_str_eq(key, "data_parallel_start_rank")) {
        record->start_rank = (uint32_t)kv_json_u64(j, UINT32_MAX - KSEL_MAX_RANKS);
        record->adopted = false;
    } else if (kv_str_eq(key, "data_parallel_size")) {
        record->n_ranks = (uint32_t)kv_json_u64(j, KSEL_MAX_RANKS);
        record->adopted = false;
        if (record->n_ranks == 0)
            kv_json_fail(j, -ERANGE, "at least 1");
    } else if (kv_str_eq(key, "max_num_batched_tokens")) {
        record->max_batched_tokens = kv_json_u64(j, UINT64_MAX);
    } else if (kv_str_eq(key, "total_kv_blocks")) {
        record->total_blocks = kv_json_u64(j, UINT32_MAX);
    } else if (kv_str_eq(key, "kv_transfer_preferred_weight")) {
        record->transfer_weight = kv_json_double(j);
        record->has_transfer_weight = true;
    } else if (kv_str_eq(key, "is_eagle")) {
        record->is_eagle = kv_json_bool(j);
    } else if (kv_str_eq(key, "draining")) {
        record->draining = kv_json_bool(j);
    } else {
        return false;
    }
    return true;
}

static void read_id(struct reading *r, bool create)
{
    struct ksel_record *record = r->record;
    struct kv_str name;
    uint64_t worker = ksel_read_worker(&r->json, &r->unescaped, &name);

    if (!create || kv_json_failed(&r->json))
        return;
    record->worker = worker;
    free(record->name);
    record->name = name.p ? strndup(name.p, name.len) : NULL;
    check_memory(r, name.p && !record->name ? -ENOMEM : 0);
    r->has_worker = true;
}

int ksel_record_parse(struct kv_str text, bool create, struct ksel_record *record,
                      struct kv_error *error)
{
    struct reading r = {.unescaped = KV_BUF_INIT, .record = record};
    char field[64] = "(top level)";
    struct kv_str key;
    int rc;

    kv_json_init(&r.json, text.p, text.len);
    kv_json_object(&r.json);
    while (kv_json_next_key(&r.json, &key)) {
        size_t len = KV_MIN(key.len, sizeof(field) - 1);

        memcpy(field, key.p, len);
        field[len] = '\0';
        key = (struct kv_str){field, key.len < sizeof(field) ? len : 0};
        if (kv_str_eq(key, "worker_id"))
            read_id(&r, create);
        else if (!kv_json_null(&r.json) && !read_listed(&r, key) && !read_text_member(&r, key) &&
                 !read_number_member(&r, key))
            kv_json_skip(&r.json);
        if (kv_json_failed(&r.json))
            break;
    }
    rc = kv_json_finish(&r.json) < 0 ? ksel_refuse(&r.json, field, error) : 0;
    kv_buf_fini(&r.unescaped);
    if (rc == 0 && create && !r.has_worker)
        rc = kv_fail(error, -EINVAL, 0, "missing field 'worker_id'");
    return rc;
}

int ksel_record_add_stream(struct ksel_record *r, uint32_t rank, const char *endpoint)
{
    return streams_add(r, rank, endpoint, strlen(endpoint));
}

/* -- what it means ------------------------------------------------------------------------------ */

const char *ksel_record_stream(const struct ksel_record *r, uint32_t rank)
{
    if (rank < r->start_rank || rank - r->start_rank >= r->n_ranks)
        return NULL;
    if (r->one_stream)
        return rank == r->start_rank && r->n_streams ? r->streams[0].endpoint : NULL;
    for (size_t i = 0; i < r->n_streams; i++)
        if (r->streams[i].rank == rank)
            return r->streams[i].endpoint;
    return NULL;
}

/*
 * Return the first rank without an event endpoint; start_rank + n_ranks: all have one. The registry's may have
 * gaps.
 */
static uint32_t rank_without_stream(const struct ksel_record *r)
{
    uint32_t rank = r->adopted ? r->start_rank + r->n_ranks : r->start_rank;

    while (rank < r->start_rank + r->n_ranks && ksel_record_stream(r, rank))
        rank++;
    return rank;
}

enum ksel_lifecycle ksel_record_lifecycle(const struct ksel_record *r)
{
    if (!r->endpoint || !r->block_size || rank_without_stream(r) < r->start_rank + r->n_ranks ||
        r->refused)
        return KSEL_INCOMPLETE;
    return r->draining ? KSEL_DRAINING : KSEL_SCHEDULABLE;
}

static void write_reasons(const struct ksel_record *r, struct kv_json_writer *w)
{
    uint32_t rank = rank_without_stream(r);
    char text[300];

    kv_json_key(w, "not_schedulable_reasons");
    kv_json_begin_array(w);
    if (!r->endpoint)
        kv_json_put_str(w, "missing endpoint");
    if (!r->block_size)
        kv_json_put_str(w, "missing block_size");
    if (rank < r->start_rank + r->n_ranks) {
        snprintf(text, sizeof(text), "missing kv_events_endpoint for dp_rank %" PRIu32, rank);
        kv_json_put_str(w, text);
    }
    if (r->refused) {
        snprintf(text, sizeof(text), "reconciliation failed: %s", r->refused);
        kv_json_put_str(w, text);
    }
    kv_json_end_array(w);
}

static void member_text(struct kv_json_writer *w, const char *key, const char *text)
{
    kv_json_key(w, key);
    if (text)
        kv_json_put_str(w, text);
    else
        kv_json_put_null(w);
}

static void member_number(struct kv_json_writer *w, const char *key, uint64_t value)
{
    kv_json_key(w, key);
    if (value)
        kv_json_put_u64(w, value);
    else
        kv_json_put_null(w);
}

static void write_labels(const struct ksel_record *r, struct kv_json_writer *w)
{
    kv_json_key(w, "taints");
    kv_json_begin_array(w);
    for (size_t i = 0; i < r->taints.n; i++)
        kv_json_put_str(w, r->taints.items[i]);
    kv_json_end_array(w);
    kv_json_key(w, "topology_domains");
    kv_json_begin_object(w);
    for (size_t i = 0; i < r->domains.n; i++) {
        char *pair = strdup(r->domains.items[i]), *value = pair ? strchr(pair, '=') : NULL;

        if (value) {
            *value = '\0';
            kv_json_member_str(w, pair, value + 1);
        }
        free(pair);
    }
    kv_json_end_object(w);
}

void ksel_write_worker(struct kv_json_writer *w, uint64_t worker, const char *name)
{
    if (name)
        kv_json_put_str(w, name);
    else
        kv_json_put_u64(w, worker);
}

void ksel_record_write(const struct ksel_record *r, enum ksel_lifecycle lifecycle,
                       struct kv_json_writer *w)
{
    kv_json_member_str(w, "lifecycle", ksel_lifecycle_name(lifecycle));
    write_reasons(r, w);
    member_text(w, "endpoint", r->endpoint);
    kv_json_key(w, "kv_events_endpoints");
    kv_json_begin_object(w);
    for (size_t i = 0; i < r->n_streams; i++) {
        kv_json_key_u64(w, r->one_stream ? r->start_rank : r->streams[i].rank);
        kv_json_put_str(w, r->streams[i].endpoint);
    }
    kv_json_end_object(w);
    member_text(w, "replay_endpoint", r->replay_endpoint);
    kv_json_member_u64(w, "data_parallel_start_rank", r->start_rank);
    kv_json_member_u64(w, "data_parallel_size", r->n_ranks);
    member_number(w, "max_num_batched_tokens", r->max_batched_tokens);
    member_number(w, "total_kv_blocks", r->total_blocks);
    member_text(w, "stable_routing_id", r->stable_routing_id);
    kv_json_member_bool(w, "is_eagle", r->is_eagle);
    kv_json_member_bool(w, "draining", r->draining);
    write_labels(r, w);
    member_text(w, "kv_transfer_domain", r->transfer_domain);
    member_text(w, "kv_transfer_enforcement", r->transfer_enforcement);
    kv_json_key(w, "kv_transfer_preferred_weight");
    if (r->has_transfer_weight)
        kv_json_put_double(w, r->transfer_weight);
    else
        kv_json_put_null(w);
}
