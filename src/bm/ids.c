// SPDX-License-Identifier: Apache-2.0
#include "bm/ids.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/log.h"

#define EMPTY UINT32_MAX

size_t kvbm_ids_slots(size_t n)
{
    size_t slots = 4;

    while (slots < n * 2)
        slots *= 2;
    return slots;
}

void kvbm_ids_clear(uint32_t *table, size_t slots)
{
    memset(table, 0xff, slots * sizeof(*table));
}

/* Find the slot of @id, or the empty one where it belongs. */
static size_t find(const uint32_t *table, size_t slots, uint32_t id)
{
    size_t at = (id * UINT32_C(2654435761)) & (slots - 1);

    while (table[at] != EMPTY && table[at] != id)
        at = (at + 1) & (slots - 1);
    return at;
}

bool kvbm_ids_add(uint32_t *table, size_t slots, uint32_t id)
{
    size_t at = find(table, slots, id);

    if (id == EMPTY || table[at] == id)
        return id == EMPTY;
    table[at] = id;
    return true;
}

bool kvbm_ids_has(const uint32_t *table, size_t slots, uint32_t id)
{
    return id != EMPTY && table[find(table, slots, id)] == id;
}

/* True when each number is larger than the one before: most calls name blocks in order. */
static bool rises(const uint32_t *ids, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        if (ids[i] <= ids[i - 1])
            return false;
    }
    return true;
}

static int check_once(const uint32_t *ids, size_t n)
{
    size_t slots;
    uint32_t *table;
    int err = 0;

    if (rises(ids, n))
        return 0;
    slots = kvbm_ids_slots(n);
    table = malloc(slots * sizeof(*table));
    if (!table)
        return -ENOMEM;
    kvbm_ids_clear(table, slots);
    for (size_t i = 0; i < n && err == 0; i++) {
        if (kvbm_ids_add(table, slots, ids[i]))
            continue;
        kv_log_warn("kvbm", "blocks refused", "reason=\"a target twice\" block=%" PRIu32, ids[i]);
        err = -EINVAL;
    }
    free(table);
    return err;
}

int kvbm_ids_check(const uint32_t *ids, size_t n, uint64_t num_blocks, unsigned flags)
{
    for (size_t i = 0; i < n; i++) {
        if (ids[i] == EMPTY ? flags & KVBM_IDS_GAPS : ids[i] < num_blocks)
            continue;
        kv_log_warn("kvbm", "blocks refused",
                    "reason=\"block out of range\" block=%" PRIu32 " blocks=%" PRIu64, ids[i],
                    num_blocks);
        return -ERANGE;
    }
    return flags & KVBM_IDS_ONCE ? check_once(ids, n) : 0;
}
