// SPDX-License-Identifier: Apache-2.0
/* GET /dump (docs/formats.md): all indexes as one JSON document, which a thread writes. */
#include <stdlib.h>
#include <string.h>

#include "indexer/registry/tables.h"
#include "indexer/replica/dump_reader.h"
#include "indexer/replica/dump_writer.h"
#include "indexer/service.h"

static int compare_model(const void *key, const void *item)
{
    const struct ki_model *wanted = key, *model = *(struct ki_model *const *)item;

    return -ki_model_compare(model, wanted->name, wanted->tenant);
}

/*
 * True when another model, with a shorter name and the rest of ours in its tenant, has the same
 * "name:tenant". The other model keeps the key: the original splits it at the first colon.
 */
static bool is_key_taken(struct ki_model *const *models, long n, const struct ki_model *model)
{
    struct kv_buf text = KV_BUF_INIT;
    bool taken = false;

    for (const char *p = strchr(model->name, ':'); p && !taken; p = strchr(p + 1, ':')) {
        struct ki_model other = {.name = NULL};
        size_t len = (size_t)(p - model->name);

        kv_buf_clear(&text);
        kv_buf_append(&text, model->name, len + 1);
        kv_buf_puts(&text, p + 1);
        kv_buf_putc(&text, ':');
        kv_buf_puts(&text, model->tenant);
        if (!kv_buf_cstr(&text))
            break;
        text.data[len] = '\0';
        other.name = text.data;
        other.tenant = text.data + len + 1;
        taken = bsearch(&other, models, (size_t)n, sizeof(struct ki_model *), compare_model);
    }
    kv_buf_fini(&text);
    return taken;
}

static int produce_all(struct ki_service *service, struct ki_dump_writer *d)
{
    struct ki_model **models;
    long n = ki_registry_models(service->registry, &models);
    int rc = 0;

    if (n < 0)
        return (int)n;
    kv_json_writer_init(&d->w, &d->buf);
    kv_json_begin_object(&d->w);
    for (long i = 0; i < n; i++) {
        if (rc == 0)
            rc = ki_dump_write_model(service->registry, d, models[i],
                                     is_key_taken(models, n, models[i]));
    }
    for (long i = 0; i < n; i++)
        ki_model_release(models[i]);
    free(models);
    kv_json_end_object(&d->w);
    if (rc == 0)
        rc = ki_dump_flush(d, 0);
    kv_buf_fini(&d->buf);
    return rc;
}

static int produce(void *arg, struct kh_pipe *pipe)
{
    struct ki_dump_writer d = {.pipe = pipe, .form = KI_DUMP_FLAT};

    return produce_all(arg, &d);
}

static int produce_json(void *arg, struct kh_pipe *pipe)
{
    struct ki_dump_writer d = {.pipe = pipe, .form = KI_DUMP_JSON};

    return produce_all(arg, &d);
}

static int produce_packed(void *arg, struct kh_pipe *pipe)
{
    struct kve_packed packed = {.n = 0};
    struct ki_dump_writer d = {.pipe = pipe, .form = KI_DUMP_PACKED, .packed = &packed};

    return produce_all(arg, &d);
}

void ki_api_dump(void *arg, struct kh_request *request, struct kh_reply *reply)
{
    struct kv_str accept;

    reply->produce = produce;
    reply->produce_arg = arg;
    if (!kh_request_header(request, "Accept", &accept))
        return;
    if (kv_str_eq(accept, KI_DUMP_PACKED_TYPE)) {
        reply->produce = produce_packed;
        reply->content_type = KI_DUMP_PACKED_TYPE;
    } else if (kv_str_eq(accept, KI_DUMP_JSON_TYPE)) {
        reply->produce = produce_json;
        reply->content_type = KI_DUMP_JSON_TYPE;
    }
}
