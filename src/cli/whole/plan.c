// SPDX-License-Identifier: Apache-2.0
#include "cli/whole/plan.h"

#include <string.h>

#include "cli/replay/prompt.h"
#include "cli/replay/random.h"

/* Shapes as the models' published configurations have them, two bytes an element. */
static const struct kc_shape SHAPES[] = {
    {"llama-3-8b", 32, 8, 128, 2, 16, 0, 0},
    {"llama-3-70b", 80, 8, 128, 2, 16, 0, 0},
    {"deepseek-v3", 61, 1, 576, 1, 16, 0, 0}, /* MLA: 512 latent elements and 64 of position */
    {"qwen3-8b", 36, 8, 128, 2, 16, 1, 0},
    {"gpt-oss-20b", 12, 8, 64, 2, 16, 0, 128}, /* 24 layers: every other has a window */
    {"tiny", 2, 2, 32, 2, 16, 0, 0},
    {"tiny-window", 1, 2, 32, 2, 16, 0, 128}, /* of the form of gpt-oss, for tests */
};

const struct kc_shape *kc_shape_find(const char *name)
{
    for (size_t i = 0; i < KV_COUNT(SHAPES); i++)
        if (strcmp(SHAPES[i].name, name) == 0)
            return &SHAPES[i];
    return NULL;
}

uint64_t kc_shape_token_bytes(const struct kc_shape *shape)
{
    return (uint64_t)shape->layers * shape->parts * kc_shape_row_bytes(shape);
}

uint64_t kc_shape_block_bytes(const struct kc_shape *shape)
{
    return kc_shape_token_bytes(shape) * shape->page_size;
}

struct kvbm_layout_config kc_shape_layout(const struct kc_shape *shape, uint32_t n_blocks,
                                          bool device)
{
    return (struct kvbm_layout_config){
        .size = sizeof(struct kvbm_layout_config),
        .kind = KVBM_FULLY_CONTIGUOUS,
        .num_blocks = n_blocks,
        .num_layers = shape->layers,
        .outer_dim = shape->parts,
        .page_size = shape->page_size,
        .inner_dim = shape->heads * shape->head_dim,
        .dtype_width_bytes = 2,
        .num_heads = shape->heads,
        .dtype = KVX_DTYPE_BF16,
        .order = device && shape->hnd ? KVBM_ORDER_HND : KVBM_ORDER_NHD,
    };
}

uint32_t kc_plan_tokens(const struct kc_plan *plan, const uint64_t *ids, uint32_t n, uint64_t pass,
                        uint32_t *ret)
{
    for (uint32_t i = 0; i < n; i++) {
        struct kc_rng rng = {.state = kc_mix(ids[i] + 1) + kc_mix(pass)};

        for (uint32_t t = 0; t < plan->per_id; t++)
            ret[i * plan->per_id + t] = kc_rng_below(&rng, KC_VOCABULARY);
    }
    return n * plan->per_id;
}
