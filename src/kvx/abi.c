// SPDX-License-Identifier: Apache-2.0
/* Entry points: compile, check all that host memory allows to check, run. */
#include <stdbool.h>
#include <stddef.h>
#include <string.h>

#include "kvx/backend.h"
#include "kvx/check.h"
#include "kvx/compile.h"
#include "kvx/host.h"
#include "kvx/validate.h"

#define PATCH 0

/* A call over layers. Of writes, gathers and copies two are NULL; targets belong to copies. */
struct call {
    const kvx_cache_desc_t *const *caches, *const *targets;
    const kvx_write_desc_t *const *writes;
    const kvx_gather_desc_t *const *gathers;
    const kvx_block_copy_t *const *copies;
    uint32_t n_layers;
    kvx_options_t options;
};

static kvx_status_t compile_layer(const struct call *call, uint32_t layer, struct kvx_plan *ret)
{
    if (call->writes)
        return kvx_compile_write(call->caches[layer], call->writes[layer], &call->options, ret);
    if (call->copies)
        return kvx_compile_copy(call->caches[layer], call->targets[layer], call->copies[layer],
                                &call->options, ret);
    return kvx_compile_gather(call->caches[layer], call->gathers[layer], &call->options, layer,
                              ret);
}

static kvx_status_t check_plan(const struct kvx_plan *plan, const kvx_options_t *options)
{
    if (kvx_plan_is_empty(plan)) /* needs no backend */
        return KVX_STATUS_OK;
    if (plan->device)
        return kvx_backend_get() ? KVX_STATUS_OK : KVX_STATUS_UNSUPPORTED;
    return kvx_check_arrays(plan, (options->flags & KVX_OPTION_DROP_OUT_OF_RANGE) != 0);
}

static kvx_status_t run_plan(const struct kvx_plan *plan, void *stream)
{
    if (kvx_plan_is_empty(plan)) /* needs no backend */
        return KVX_STATUS_OK;
    if (plan->device)
        return kvx_backend_get()->run(plan, stream);
    kvx_host_run(plan);
    return KVX_STATUS_OK;
}

static bool same_slots(const struct kvx_plan *a, const struct kvx_plan *b)
{
    return a->slots == b->slots && a->slots_wide == b->slots_wide && a->n_tokens == b->n_tokens &&
           a->n_slots == b->n_slots && a->invalid_slot == b->invalid_slot;
}

static bool same_table(const struct kvx_plan *a, const struct kvx_plan *b)
{
    return a->format == b->format && a->indices == b->indices &&
           a->indices_wide == b->indices_wide && a->n_indices == b->n_indices &&
           a->indptr == b->indptr && a->indptr_wide == b->indptr_wide && a->lengths == b->lengths &&
           a->lengths_wide == b->lengths_wide && a->n_sequences == b->n_sequences &&
           a->n_beams == b->n_beams && a->max_seq_len == b->max_seq_len &&
           a->max_blocks == b->max_blocks &&
           memcmp(a->pool_blocks, b->pool_blocks, sizeof(a->pool_blocks)) == 0;
}

static bool same_pairs(const struct kvx_plan *a, const struct kvx_plan *b)
{
    return a->src_blocks == b->src_blocks && a->dst_blocks == b->dst_blocks &&
           a->pairs_wide == b->pairs_wide && a->n_pairs == b->n_pairs &&
           a->n_dst_blocks == b->n_dst_blocks;
}

/*
 * Return true when both plans leave out the same tokens, since they use the same slots, table or
 * pairs, and caches of the same size: these are counted with the first plan. Fields of another
 * operation are 0 in both.
 */
static bool same_tokens(const struct kvx_plan *a, const struct kvx_plan *b)
{
    return same_slots(a, b) && same_table(a, b) && same_pairs(a, b) &&
           a->block_size.value == b->block_size.value && a->n_src_blocks == b->n_src_blocks;
}

/* Join all layers into one plan, which is the rule. *@ret_joined: false if there must be more. */
static kvx_status_t join_all(const struct call *call, struct kvx_plan *plan, bool *ret_joined)
{
    kvx_status_t status = compile_layer(call, 0, plan);

    *ret_joined = true;
    for (uint32_t i = 1; status == KVX_STATUS_OK && *ret_joined && i < call->n_layers; i++) {
        struct kvx_plan layer;

        status = compile_layer(call, i, &layer);
        if (status == KVX_STATUS_OK)
            *ret_joined = kvx_plan_merge(plan, &layer);
    }
    return status;
}

/* Join the layers into as few plans as possible, and check or run each plan. */
static kvx_status_t each_plan(const struct call *call, bool run, void *stream)
{
    struct kvx_plan plan, layer;
    kvx_status_t status = compile_layer(call, 0, &plan);

    for (uint32_t i = 1; status == KVX_STATUS_OK && i <= call->n_layers; i++) {
        if (i < call->n_layers) {
            status = compile_layer(call, i, &layer);
            if (status != KVX_STATUS_OK)
                return status;
            /* One of the plans could fail after the other has run. */
            if (layer.device != plan.device)
                return KVX_STATUS_UNSUPPORTED;
            if (kvx_plan_merge(&plan, &layer))
                continue;
            status = compile_layer(call, i, &layer);
            if (status == KVX_STATUS_OK && same_tokens(&plan, &layer))
                layer.dropped = NULL;
        }
        if (status == KVX_STATUS_OK)
            status = run ? run_plan(&plan, stream) : check_plan(&plan, &call->options);
        if (i < call->n_layers)
            memcpy(&plan, &layer, offsetof(struct kvx_plan, layer) + sizeof(layer.layer[0]));
    }
    return status;
}

static kvx_status_t each_layer(struct call *call, const kvx_options_t *options, void *stream)
{
    struct kvx_plan plan;
    kvx_status_t status = kvx_read_options(options, &call->options);
    bool joined;

    if (status != KVX_STATUS_OK)
        return status;
    if (call->n_layers == 0)
        return KVX_STATUS_OK;
    if (!call->caches || (!call->writes && !call->gathers && !(call->copies && call->targets)))
        return KVX_STATUS_INVALID_ARGUMENT;
    status = join_all(call, &plan, &joined);
    if (status != KVX_STATUS_OK)
        return status;
    status = joined ? check_plan(&plan, &call->options) : each_plan(call, false, stream);
    if (status != KVX_STATUS_OK)
        return status;
    return joined ? run_plan(&plan, stream) : each_plan(call, true, stream);
}

kvx_status_t kvx_get_version(kvx_version_t *out_version)
{
    if (!out_version)
        return KVX_STATUS_INVALID_ARGUMENT;
    *out_version =
        (kvx_version_t){sizeof(*out_version), KVX_ABI_VERSION_MAJOR, KVX_ABI_VERSION_MINOR, PATCH};
    return KVX_STATUS_OK;
}

kvx_status_t kvx_validate_cache_desc(const kvx_cache_desc_t *cache)
{
    struct kvx_hull hulls[2];

    return kvx_check_cache(cache, hulls);
}

kvx_status_t kvx_write_kv_layers(const kvx_cache_desc_t *const *caches,
                                 const kvx_write_desc_t *const *writes, uint32_t n_layers,
                                 const kvx_options_t *options, void *stream)
{
    struct call call = {.caches = caches, .writes = writes, .n_layers = n_layers};

    return each_layer(&call, options, stream);
}

kvx_status_t kvx_gather_kv_layers(const kvx_cache_desc_t *const *caches,
                                  const kvx_gather_desc_t *const *gathers, uint32_t n_layers,
                                  const kvx_options_t *options, void *stream)
{
    struct call call = {.caches = caches, .gathers = gathers, .n_layers = n_layers};

    return each_layer(&call, options, stream);
}

/* A single layer needs no second pass over the descriptors. */
static kvx_status_t check_and_run(const struct kvx_plan *plan, const kvx_options_t *options,
                                  void *stream)
{
    kvx_status_t status = check_plan(plan, options);

    return status == KVX_STATUS_OK ? run_plan(plan, stream) : status;
}

kvx_status_t kvx_write_kv(const kvx_cache_desc_t *cache, const kvx_write_desc_t *write,
                          void *stream)
{
    const kvx_options_t options = {.size = sizeof(options)};
    struct kvx_plan plan;
    kvx_status_t status = kvx_compile_write(cache, write, &options, &plan);

    return status == KVX_STATUS_OK ? check_and_run(&plan, &options, stream) : status;
}

kvx_status_t kvx_gather_kv(const kvx_cache_desc_t *cache, const kvx_gather_desc_t *gather,
                           void *stream)
{
    const kvx_options_t options = {.size = sizeof(options)};
    struct kvx_plan plan;
    kvx_status_t status = kvx_compile_gather(cache, gather, &options, 0, &plan);

    return status == KVX_STATUS_OK ? check_and_run(&plan, &options, stream) : status;
}

kvx_status_t kvx_copy_blocks(const kvx_cache_desc_t *src, const kvx_cache_desc_t *dst,
                             const kvx_block_copy_t *copy, const kvx_options_t *options,
                             void *stream)
{
    return kvx_copy_blocks_layers(&src, &dst, &copy, 1, options, stream);
}

kvx_status_t kvx_copy_blocks_layers(const kvx_cache_desc_t *const *srcs,
                                    const kvx_cache_desc_t *const *dsts,
                                    const kvx_block_copy_t *const *copies, uint32_t n_layers,
                                    const kvx_options_t *options, void *stream)
{
    struct call call = {.caches = srcs, .targets = dsts, .copies = copies, .n_layers = n_layers};

    return each_layer(&call, options, stream);
}

uint32_t kvx_dtype_size(kvx_dtype_t dtype)
{
    switch (dtype) {
    case KVX_DTYPE_U8:
        return 1;
    case KVX_DTYPE_S32:
    case KVX_DTYPE_U32:
        return 4;
    case KVX_DTYPE_S64:
    case KVX_DTYPE_U64:
        return 8;
    default:
        return kvx_float_size(dtype);
    }
}

const char *kvx_status_name(kvx_status_t status)
{
    static const char *const names[] = {"OK",           "INVALID_ARGUMENT", "UNSUPPORTED",
                                        "OUT_OF_RANGE", "INCOMPATIBLE",     "INTERNAL_ERROR"};

    return (unsigned)status < sizeof(names) / sizeof(names[0]) ? names[status] : "UNKNOWN";
}
