// SPDX-License-Identifier: Apache-2.0
/*
 * Reasons by their names, for people, dumps and metrics. reasons.def is the only list: a reason
 * that is added there has its bit, its name and its row of documentation, or a test fails.
 */
#include "indexer/view/reasons.h"

#include "base/core/error.h"

static const struct ki_reason_info infos[] = {
#define KI_REASON(id, name, told, set_by, ended_by) {name, KI_TOLD_##told, set_by, ended_by},
#include "indexer/view/reasons.def"
#undef KI_REASON
};

_Static_assert(KI_N_REASONS <= 56, "a listener packs its reasons and its status into one word");

const struct ki_reason_info *ki_reason_info(enum ki_reason reason)
{
    return &infos[reason];
}

ki_reasons ki_reasons_told(ki_reasons reasons, enum ki_told told)
{
    ki_reasons of_kind = 0;

    for (unsigned i = 0; i < KI_N_REASONS; i++)
        of_kind |= (ki_reasons)(infos[i].told == told) << i;
    return reasons & of_kind;
}

void ki_reasons_write(struct kv_json_writer *w, ki_reasons reasons)
{
    kv_json_begin_array(w);
    for (; reasons; reasons &= reasons - 1)
        kv_json_put_str(w, infos[__builtin_ctzll(reasons)].name);
    kv_json_end_array(w);
}

/* A reason of a newer peer: passing over it would make a partial view whole. */
static ki_reasons by_name(struct kv_str name)
{
    for (unsigned i = 0; i < KI_N_REASONS; i++)
        if (kv_str_eq(name, infos[i].name))
            return UINT64_C(1) << i;
    return KI_BECAUSE(PEER);
}

ki_reasons ki_reasons_read(struct kv_json *json)
{
    struct kv_buf scratch = {.limit = 64};
    ki_reasons reasons = 0;

    kv_json_array(json);
    while (kv_json_next_item(json)) {
        kv_buf_clear(&scratch);
        reasons |= by_name(kv_json_str(json, &scratch));
    }
    kv_buf_fini(&scratch);
    return reasons;
}
