// SPDX-License-Identifier: Apache-2.0
#include "kvx/check.h"

static kvx_status_t check_slots(const struct kvx_plan *p)
{
    /* Scan in one pass without an exit: it vectorises, and valid input has no early end. */
    uint64_t bad = 0;

    for (uint32_t i = 0; i < p->n_tokens; i++) {
        int64_t slot = kvx_index_at(p->slots, p->slots_wide, i);

        bad |= (uint64_t)(slot >= 0 && slot != p->invalid_slot && (uint64_t)slot >= p->n_slots);
    }
    return bad ? KVX_STATUS_OUT_OF_RANGE : KVX_STATUS_OK;
}

static kvx_status_t check_indptr(const struct kvx_plan *p)
{
    int64_t last = kvx_index_at(p->indptr, p->indptr_wide, 0);

    if (last != 0)
        return KVX_STATUS_INVALID_ARGUMENT;
    for (uint32_t s = 0; s < p->n_sequences; s++) {
        int64_t end = kvx_index_at(p->indptr, p->indptr_wide, (uint64_t)s + 1);

        if (end < last)
            return KVX_STATUS_INVALID_ARGUMENT;
        last = end;
    }
    return last == (int64_t)p->n_indices ? KVX_STATUS_OK : KVX_STATUS_INVALID_ARGUMENT;
}

static kvx_status_t check_lengths(const struct kvx_plan *p)
{
    for (uint32_t s = 0; s < p->n_sequences; s++) {
        if (kvx_index_at(p->lengths, p->lengths_wide, s) < 0)
            return KVX_STATUS_INVALID_ARGUMENT;
    }
    return KVX_STATUS_OK;
}

/*
 * Check every position of one row of the output. A block's positions share an id except in RAGGED.
 */
static int row_in_range(const struct kvx_plan *p, uint32_t s, uint32_t w)
{
    uint32_t stride = p->format == KVX_BLOCK_TABLE_RAGGED ? 1 : p->block_size.value;
    uint32_t n_tables = p->format == KVX_BLOCK_TABLE_KV_OFFSETS ? 2 : 1;
    struct kvx_place place;
    uint64_t start;
    uint32_t length = kvx_sequence_length(p, s, &start);
    int64_t said = kvx_index_at(p->lengths, p->lengths_wide, s);

    if (length < p->max_seq_len && said > (int64_t)length)
        return 0; /* RAGGED: fewer indices than the length requires */
    for (uint64_t pos = 0; pos < length; pos += stride) {
        for (uint32_t kv = 0; kv < n_tables; kv++) {
            if (kvx_table_place(p, kv, s, w, (uint32_t)pos, start, &place) == KVX_ROW_DROP)
                return 0;
        }
    }
    return 1;
}

static kvx_status_t check_table(const struct kvx_plan *p)
{
    for (uint32_t s = 0; s < p->n_sequences; s++) {
        for (uint32_t w = 0; w < p->n_beams; w++) {
            if (!row_in_range(p, s, w))
                return KVX_STATUS_OUT_OF_RANGE;
        }
    }
    return KVX_STATUS_OK;
}

static kvx_status_t check_pairs(const struct kvx_plan *p)
{
    for (uint32_t i = 0; i < p->n_pairs; i++) {
        int64_t src, dst;

        if (kvx_pair_place(p, i, &src, &dst) == KVX_ROW_DROP)
            return KVX_STATUS_OUT_OF_RANGE;
    }
    return KVX_STATUS_OK;
}

kvx_status_t kvx_check_arrays(const struct kvx_plan *plan, int drop)
{
    kvx_status_t status = KVX_STATUS_OK;

    switch (plan->op) {
    case KVX_OP_WRITE:
        return drop ? KVX_STATUS_OK : check_slots(plan);
    case KVX_OP_COPY:
        return drop ? KVX_STATUS_OK : check_pairs(plan);
    default:
        break;
    }
    status = check_lengths(plan);
    if (status == KVX_STATUS_OK && plan->format == KVX_BLOCK_TABLE_RAGGED)
        status = check_indptr(plan);
    if (status != KVX_STATUS_OK || drop)
        return status;
    return check_table(plan);
}
