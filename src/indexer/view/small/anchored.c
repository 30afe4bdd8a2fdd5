// SPDX-License-Identifier: Apache-2.0
/*
 * Stores of groups with smaller blocks (small.h), placed by the main group's blocks of the same step.
 *
 *     tokens      | H0            | H1            | H2            |     registered blocks
 *     blocks        .   .   .   .   .   .   B   H1  .   .   C   H2      kept: 2 of 4 parts each
 *     the event   hashes [B, H1, C, H2], tokens of all
 *
 * An engine keeps the last blocks before a place where a request can resume, and such a place is the end
 * of a registered block. So the hashes fall into runs, each of which ends with a hash that the main group
 * has, too: its anchor. What stands before an anchor are the parts before it. vLLM names a block by the
 * hash of the chain at its last token, whatever the size of the group's blocks.
 *
 * Invariant: a run is placed from its anchor back, and only within the anchor's block. An event that ends
 * without an anchor, or has more blocks before one than it has parts, contradicts that: -ENOENT. Of a
 * group that is followed by its tails, the blocks before a tail are passed over.
 */
#include "indexer/view/small/impl.h"

#include <errno.h>
#include <string.h>

#include "base/core/error.h"

static bool is_anchor(const struct ki_small_work *w, uint64_t hash)
{
    return ki_whole_find(w->parts, hash) != KI_NO_PART || ki_small_main_has(w, hash) ||
           ki_main_names_has(w->group->names, w->holder.rank, hash);
}

/*
 * Whether the parts of a registered block are known that a match needs. Where matches need more than one
 * block and no whole number of them, a run begins inside of a block, whose first parts the group may have
 * from another prompt that goes on otherwise: nothing tells.
 */
static bool knows_parts(const struct ki_small_work *w, uint32_t whole)
{
    const struct ki_parts *p = w->parts;
    uint32_t n = w->group->parts, from = n - KV_MIN(n, w->group->need);

    for (uint32_t i = from; i < ki_small_last(w); i++)
        if (p->slots[ki_whole_slot(p, whole) + i].part == KI_NO_PART)
            return false;
    return true;
}

/*
 * Store the run that ends with block @end, an anchor. Returns 0 and *@ret, its first block, or an error;
 * the block before it, if any, is an anchor.
 */
static int store_run(struct ki_small_work *w, const struct kve_op *op, size_t end, size_t *ret)
{
    uint32_t parts[KVE_MAX_PARTS], part = ki_small_last(w), whole;
    size_t i = end;
    bool more = i && !is_anchor(w, op->hashes[i - 1]);
    int rc = ki_small_gain_whole(w, op->hashes[end], &whole);

    memset(parts, 0xff, sizeof(parts));
    while (!rc && more) {
        if (!part && !w->group->tail)
            return -ENOENT;
        i--;
        more = i && !is_anchor(w, op->hashes[i - 1]);
        if (!part) /* before the tail */
            continue;
        part--;
        rc = ki_small_gain_part(w, op->hashes[i], part && more ? op->hashes[i - 1] : 0, part,
                                &parts[part]);
    }
    *ret = i;
    rc = rc ? rc : ki_small_link_parts(w, parts, whole);
    return rc || knows_parts(w, whole) ? rc : -ENOENT;
}

int ki_small_store_anchored(struct ki_small_work *w, const struct kve_op *op)
{
    size_t end = op->n;
    int rc = ki_small_open_table(w, true);

    if (!rc && end && !is_anchor(w, op->hashes[end - 1]))
        return -ENOENT;
    while (!rc && end)
        rc = store_run(w, op, end - 1, &end);
    return rc;
}
