// SPDX-License-Identifier: Apache-2.0
#include "indexer/apply.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"

void ki_applier_fini(struct ki_applier *a)
{
    kve_reader_destroy(a->reader);
    free(a->ranks);
    memset(a, 0, sizeof(*a));
}

bool ki_applier_note_rank(struct ki_applier *a, uint32_t rank)
{
    uint32_t at = 0, *grown;

    while (at < a->n_ranks && a->ranks[at] < rank)
        at++;
    if (at < a->n_ranks && a->ranks[at] == rank)
        return true;
    if (a->n_ranks == KI_MAX_RANKS)
        return false;
    grown = realloc(a->ranks, (a->n_ranks + 1) * sizeof(*grown));
    if (!grown)
        return false;
    a->ranks = grown;
    memmove(grown + at + 1, grown + at, (a->n_ranks - at) * sizeof(*grown));
    grown[at] = rank;
    a->n_ranks++;
    return true;
}

int ki_applier_init(struct ki_applier *a, uint64_t instance, uint32_t rank, uint32_t block_size)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = block_size, .rank = rank};
    int rc;

    memset(a, 0, sizeof(*a));
    a->instance = instance;
    if (!ki_applier_note_rank(a, rank))
        return -ENOMEM;
    rc = kve_reader_create(&opts, &a->reader);
    if (rc < 0)
        ki_applier_fini(a);
    return rc;
}

static int apply_store(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                       const struct kve_op *op)
{
    static struct kv_log_rate rate;
    struct kvi_stored stored = {0};
    int rc = kvi_store(index, holder, op->tier, op->has_parent ? &op->parent : NULL, op->blocks,
                       op->n, &stored);

    ki_event_counts_store(&a->counts, rc, op->n - stored.duplicate, op->n);
    if (rc == -ENOENT) {
        a->stats.orphans++;
        return 0; /* usual after a loss, which has been counted where it happened */
    }
    if (rc < 0) {
        a->stats.rejected++;
        if (kv_log_allowed(&rate, 3))
            kv_log_warn("indexer", "the index refused blocks",
                        "worker=%" PRIu64 " rank=%" PRIu32 " blocks=%zu error=\"%s\"",
                        holder.worker, holder.rank, op->n, strerror(-rc));
    }
    return rc == -EINVAL ? 0 : rc;
}

/*
 * How many of the @n operations from @ops on are stores of the same holder, each below the last block
 * of the one before. Some engines announce every block of a prompt in an event of its own.
 */
static size_t count_chained(const struct kve_op *ops, size_t n)
{
    size_t k = 1;

    if (ops->type != KVE_OP_STORE)
        return 1;
    for (; k < n; k++) {
        const struct kve_op *op = &ops[k], *above = &ops[k - 1];

        if (op->type != KVE_OP_STORE || op->rank != ops->rank || op->tier != ops->tier ||
            op->source != ops->source || op->lookahead != ops->lookahead || !above->n ||
            !op->has_parent || op->parent != above->blocks[above->n - 1].hash ||
            op->blocks != above->blocks + above->n)
            break;
    }
    return k;
}

/* All of the @n chained operations in one call of the index. False: none of them was applied. */
static bool apply_chained(struct ki_applier *a, struct kvi_index *index, const struct kve_op *ops,
                          size_t n)
{
    const struct kve_op *last = &ops[n - 1];
    struct kv_holder holder = {.worker = a->instance, .rank = ops->rank};
    size_t n_blocks = (size_t)(last->blocks - ops->blocks) + last->n;

    return kvi_store(index, holder, ops->tier, ops->has_parent ? &ops->parent : NULL, ops->blocks,
                     n_blocks, NULL) == 0;
}

static int apply_op(struct ki_applier *a, struct kvi_index *index, const struct kve_op *op)
{
    struct kv_holder holder = {.worker = a->instance, .rank = op->rank};
    long rc = 0;

    switch (op->type) {
    case KVE_OP_STORE:
        rc = apply_store(a, index, holder, op);
        break;
    case KVE_OP_STORE_KNOWN:
        rc = kvi_store_known(index, holder, op->tier, op->hashes, op->n);
        ki_event_counts_named(&a->counts, KI_EVENT_STORED, rc, op->n);
        break;
    case KVE_OP_REMOVE:
        rc = kvi_remove(index, holder, op->tier, op->hashes, op->n);
        ki_event_counts_named(&a->counts, KI_EVENT_REMOVED, rc, op->n);
        break;
    case KVE_OP_CLEAR:
        rc = kvi_clear(index, holder);
        ki_event_counts_clear(&a->counts);
        break;
    }
    return rc < 0 ? (int)rc : 0;
}

enum ki_applied ki_applier_apply(struct ki_applier *a, struct kvi_index *index, const void *payload,
                                 size_t len)
{
    enum ki_applied result = KI_APPLIED;
    size_t chained = 0; /* operations below this one have been tried as one store */
    struct kve_batch batch;

    if (kve_reader_decode(a->reader, payload, len, &batch) < 0) {
        a->stats.malformed++;
        return KI_APPLIED_PART;
    }
    for (size_t i = 0; i < batch.n_ops; i++) {
        const struct kve_op *op = &batch.ops[i];

        if (op->source) { /* the index keeps the publisher's main cache alone */
            a->stats.other_sources += op->n;
            continue;
        }
        if (!ki_applier_note_rank(a, op->rank)) {
            a->stats.rejected++;
            result = KI_APPLIED_PART;
            continue;
        }
        if (i >= chained) {
            size_t k = count_chained(op, batch.n_ops - i);

            chained = i + k;
            if (k > 1 && apply_chained(a, index, op, k)) {
                i += k - 1;
                continue;
            }
        }
        if (apply_op(a, index, op) < 0)
            result = KI_APPLIED_PART;
        else if (op->type == KVE_OP_CLEAR && a->n_ranks == 1)
            result = KI_APPLIED_CLEARED;
    }
    if (batch.skipped[KVE_SKIP_TOO_LARGE]) /* they may have been anything */
        result = KI_APPLIED_PART;
    ki_event_counts_add(&a->counts);
    memset(&a->counts, 0, sizeof(a->counts));
    a->stats.batches++;
    a->stats.events += batch.n_events;
    a->stats.blocks += batch.n_blocks;
    a->stats.bytes += len;
    for (size_t i = 0; i < KVE_N_SKIPS; i++)
        a->stats.skipped[i] += batch.skipped[i];
    return result;
}

void ki_applier_purge(struct ki_applier *a, struct kvi_index *index)
{
    for (uint32_t i = 0; i < a->n_ranks; i++)
        kvi_clear(index, (struct kv_holder){.worker = a->instance, .rank = a->ranks[i]});
}
