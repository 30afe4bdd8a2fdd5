// SPDX-License-Identifier: Apache-2.0
#include "cli/doctor/answers.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/json/json.h"
#include "base/json/msgpack.h"

/* Copy a string, cut to @size. Another type than string is passed over. */
static void copy(struct kv_json *j, char *ret, size_t size)
{
    struct kv_buf scratch = KV_BUF_INIT;
    struct kv_str s;

    if (kv_json_peek(j) != KV_JSON_STRING) {
        kv_json_skip(j);
        return;
    }
    s = kv_json_str(j, &scratch);
    s.len = KV_MIN(s.len, size - 1);
    if (s.len)
        memcpy(ret, s.p, s.len);
    ret[s.len] = '\0';
    kv_buf_fini(&scratch);
}

static uint64_t number(struct kv_json *j)
{
    return kv_json_bits64(j);
}

static int finish(struct kv_json *j)
{
    return kv_json_finish_foreign(j);
}

int kc_about_read(const char *text, size_t len, struct kc_about *ret)
{
    struct kv_json j;
    struct kv_str key;

    *ret = (struct kc_about){.service = ""};
    kv_json_init(&j, text, len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        if (kv_str_eq(key, "service"))
            copy(&j, ret->service, sizeof(ret->service));
        else if (kv_str_eq(key, "version"))
            copy(&j, ret->version, sizeof(ret->version));
        else
            kv_json_skip(&j);
    }
    return finish(&j);
}

/* -- workers ----------------------------------------------------------------------------------- */

/* Copy names of an array, or keys of an object, with commas between. */
static void copy_names(struct kv_json *j, char *ret, size_t size)
{
    struct kv_buf scratch = KV_BUF_INIT;
    size_t len = 0;

    ret[0] = '\0';
    if (kv_json_peek(j) != KV_JSON_ARRAY) {
        kv_json_skip(j);
        return;
    }
    kv_json_array(j);
    while (kv_json_next_item(j)) {
        struct kv_str s = kv_json_str(j, &scratch);

        if (s.len && len + s.len + 3 < size)
            len +=
                (size_t)snprintf(ret + len, size - len, "%s%.*s", len ? ", " : "", (int)s.len, s.p);
    }
    kv_buf_fini(&scratch);
}

static void read_listener(struct kv_json *j, struct kc_listener *l)
{
    struct kv_str key;

    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        if (kv_str_eq(key, "endpoint"))
            copy(j, l->endpoint, sizeof(l->endpoint));
        else if (kv_str_eq(key, "replay_endpoint"))
            copy(j, l->replay_endpoint, sizeof(l->replay_endpoint));
        else if (kv_str_eq(key, "status"))
            copy(j, l->status, sizeof(l->status));
        else if (kv_str_eq(key, "last_error"))
            copy(j, l->last_error, sizeof(l->last_error));
        else if (kv_str_eq(key, "connected"))
            l->connected = kv_json_bool(j);
        else if (kv_str_eq(key, "partial"))
            l->partial = kv_json_bool(j);
        else if (kv_str_eq(key, "partial_reasons"))
            copy_names(j, l->reasons, sizeof(l->reasons));
        else if (kv_str_eq(key, "batches"))
            l->batches = number(j);
        else if (kv_str_eq(key, "malformed"))
            l->malformed = number(j);
        else if (kv_str_eq(key, "event_block_size"))
            l->event_block_size = number(j);
        else if (kv_str_eq(key, "last_seq")) {
            l->last_seq = number(j);
            l->has_seq = true;
        } else {
            kv_json_skip(j);
        }
    }
}

static struct kc_listener *add(struct kc_listeners *list)
{
    if (list->n == list->capacity) {
        size_t capacity = list->capacity ? 2 * list->capacity : 8;
        struct kc_listener *items = realloc(list->items, capacity * sizeof(*items));

        if (!items)
            return NULL;
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->n] = (struct kc_listener){.rank = 0};
    return &list->items[list->n++];
}

static uint64_t rank_of(struct kv_str key)
{
    char text[24] = "";
    uint64_t rank = 0;

    memcpy(text, key.p, KV_MIN(key.len, sizeof(text) - 1));
    for (const char *p = text; *p >= '0' && *p <= '9'; p++)
        rank = rank * 10 + (uint64_t)(*p - '0');
    return rank;
}

static int read_listeners(struct kv_json *j, struct kc_listeners *list)
{
    struct kv_str key;

    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        struct kc_listener *l = add(list);

        if (!l)
            return -ENOMEM;
        l->rank = rank_of(key);
        read_listener(j, l);
    }
    return 0;
}

static void read_instance(struct kv_json *j, struct kc_listener *worker)
{
    if (kv_json_peek(j) == KV_JSON_NUMBER)
        snprintf(worker->instance, sizeof(worker->instance), "%" PRIu64, number(j));
    else
        copy(j, worker->instance, sizeof(worker->instance));
}

static int read_worker(struct kv_json *j, struct kc_listeners *list)
{
    struct kc_listener worker = {.rank = 0};
    size_t first = list->n;
    struct kv_str key;
    int rc = 0;

    kv_json_object(j);
    while (rc == 0 && kv_json_next_key(j, &key)) {
        if (kv_str_eq(key, "instance_id"))
            read_instance(j, &worker);
        else if (kv_str_eq(key, "model_name"))
            copy(j, worker.model, sizeof(worker.model));
        else if (kv_str_eq(key, "tenant_id"))
            copy(j, worker.tenant, sizeof(worker.tenant));
        else if (kv_str_eq(key, "block_size"))
            worker.block_size = number(j);
        else if (kv_str_eq(key, "listeners"))
            rc = read_listeners(j, list);
        else
            kv_json_skip(j);
    }
    for (size_t i = first; i < list->n; i++) {
        struct kc_listener *l = &list->items[i];

        memcpy(l->instance, worker.instance, sizeof(l->instance));
        memcpy(l->model, worker.model, sizeof(l->model));
        memcpy(l->tenant, worker.tenant, sizeof(l->tenant));
        l->block_size = worker.block_size;
    }
    return rc;
}

int kc_listeners_read(const char *text, size_t len, struct kc_listeners *ret)
{
    struct kv_json j;
    int rc = 0;

    ret->n = 0;
    kv_json_init(&j, text, len);
    kv_json_array(&j);
    while (rc == 0 && kv_json_next_item(&j))
        rc = read_worker(&j, ret);
    return rc < 0 ? rc : finish(&j);
}

void kc_listeners_fini(struct kc_listeners *listeners)
{
    free(listeners->items);
    *listeners = (struct kc_listeners){.n = 0};
}

/* -- queries ----------------------------------------------------------------------------------- */

static void read_explain(struct kv_json *j, struct kc_match *ret)
{
    struct kv_str key;

    kv_json_object(j);
    while (kv_json_next_key(j, &key)) {
        if (kv_str_eq(key, "reason"))
            copy(j, ret->reason, sizeof(ret->reason));
        else if (kv_str_eq(key, "text"))
            copy(j, ret->text, sizeof(ret->text));
        else if (kv_str_eq(key, "block_size"))
            ret->block_size = number(j);
        else if (kv_str_eq(key, "full_blocks"))
            ret->full_blocks = number(j);
        else if (kv_str_eq(key, "holders_matched"))
            ret->holders = number(j);
        else if (kv_str_eq(key, "first_block_hash")) {
            ret->first_hash = number(j);
            ret->has_hash = true;
        } else {
            kv_json_skip(j);
        }
    }
}

int kc_match_read(const char *text, size_t len, const char *instance, struct kc_match *ret)
{
    struct kv_json j;
    struct kv_str key;

    *ret = (struct kc_match){.holders = 0};
    kv_json_init(&j, text, len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        if (kv_str_eq(key, "explain")) {
            read_explain(&j, ret);
        } else if (kv_str_eq(key, "instances") && kv_json_peek(&j) == KV_JSON_OBJECT) {
            kv_json_object(&j);
            while (kv_json_next_key(&j, &key)) {
                ret->asked_holds |= instance && kv_str_eq(key, instance);
                kv_json_skip(&j);
            }
        } else {
            kv_json_skip(&j);
        }
    }
    return kv_json_failed(&j) || ret->reason[0] ? finish(&j) : -EPROTO;
}

/* -- engines ----------------------------------------------------------------------------------- */

int kc_tokens_read(const char *text, size_t len, struct kv_buf *ret)
{
    struct kv_json j;
    struct kv_str key;
    bool found = false;

    kv_json_init(&j, text, len);
    if (kv_json_peek(&j) == KV_JSON_ARRAY) {
        kv_json_u32_array(&j, ret);
        return finish(&j);
    }
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        if (!found && (kv_str_eq(key, "tokens") || kv_str_eq(key, "token_ids")) &&
            kv_json_peek(&j) == KV_JSON_ARRAY) {
            kv_json_u32_array(&j, ret);
            found = true;
        } else {
            kv_json_skip(&j);
        }
    }
    return finish(&j) < 0 || found ? finish(&j) : -EPROTO;
}

double kc_batch_time(const void *payload, size_t len)
{
    struct kv_msgpack m;
    enum kv_msgpack_type type;
    double time;

    kv_msgpack_init(&m, payload, len);
    if (kv_msgpack_peek(&m) != KV_MSGPACK_ARRAY || kv_msgpack_array(&m) < 2)
        return 0;
    type = kv_msgpack_peek(&m);
    if (type != KV_MSGPACK_FLOAT && type != KV_MSGPACK_UINT)
        return 0;
    time = kv_msgpack_double(&m);
    if (time > 1e11) /* whole milliseconds */
        time /= 1e3;
    return time > 1e8 && time < 1e11 ? time : 0; /* others count from another beginning */
}
