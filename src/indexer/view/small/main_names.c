// SPDX-License-Identifier: Apache-2.0
/*
 * The first question of a batch makes the list, since most batches have no smaller blocks and get no
 * question. The list is sorted: a question is a binary search.
 *
 * Invariant: while `made` is true, the list has the main blocks that `batch` stores, and no others.
 */
#include "indexer/view/small/main_names.h"

#include <stdlib.h>
#include <string.h>

void ki_main_names_begin(struct ki_main_names *names, const struct kve_batch *batch)
{
    names->batch = batch;
    names->n = 0;
    names->made = false;
}

void ki_main_names_fini(struct ki_main_names *names)
{
    free(names->items);
    memset(names, 0, sizeof(*names));
}

/* One number for the block of a rank; two blocks share one as seldom as two hashes are equal. */
static uint64_t key_of(uint32_t rank, uint64_t hash)
{
    return hash ^ rank * UINT64_C(0x9e3779b97f4a7c15);
}

static int compare(const void *a, const void *b)
{
    uint64_t x, y;

    memcpy(&x, a, sizeof(x));
    memcpy(&y, b, sizeof(y));
    return (x > y) - (x < y);
}

static bool is_main_store(const struct kve_op *op)
{
    return op->type == KVE_OP_STORE && !op->source && op->tier == KV_TIER_DEVICE;
}

static bool make_room(struct ki_main_names *names, size_t n)
{
    uint64_t *items;

    if (n <= names->capacity)
        return true;
    items = realloc(names->items, n * sizeof(*items));
    if (!items)
        return false;
    names->items = items;
    names->capacity = n;
    return true;
}

static void make(struct ki_main_names *names)
{
    size_t n = 0;

    names->made = true;
    for (size_t i = 0; i < names->batch->n_ops; i++)
        n += is_main_store(&names->batch->ops[i]) ? names->batch->ops[i].n : 0;
    if (!n || !make_room(names, n))
        return;
    for (size_t i = 0; i < names->batch->n_ops; i++) {
        const struct kve_op *op = &names->batch->ops[i];

        for (size_t k = 0; is_main_store(op) && k < op->n; k++)
            names->items[names->n++] = key_of(op->rank, op->blocks[k].hash);
    }
    qsort(names->items, names->n, sizeof(*names->items), compare);
}

bool ki_main_names_has(struct ki_main_names *names, uint32_t rank, uint64_t hash)
{
    uint64_t key = key_of(rank, hash);

    if (!names->batch)
        return false;
    if (!names->made)
        make(names);
    return names->n && bsearch(&key, names->items, names->n, sizeof(key), compare);
}
