// SPDX-License-Identifier: Apache-2.0
#include "index/tree/missed.h"

#include "index/tree/tree.h"

#define MAX_MISSED ((size_t)1 << 20)

static void note(struct kvi_index *ix, struct kvi_holder *holder,
                 const struct kvi_missed_block *block)
{
    struct kvi_missed *missed = &ix->missed;

    if (missed->n == MAX_MISSED ||
        kvi_mem_grow(&ix->mem, (void **)&missed->items, &missed->capacity, missed->n + 1,
                     sizeof(missed->items[0])))
        holder->turns++;
    else
        missed->items[missed->n++] = *block;
}

void kvi_missed_moved(struct kvi_index *ix, struct kvi_holder *holder, uint64_t parent,
                      struct kv_block block, uint32_t mask)
{
    if (ix->copies.keepers && !holder->main)
        note(ix, holder,
             &(struct kvi_missed_block){.hash = block.hash,
                                        .parent = parent,
                                        .local = block.tokens_hash,
                                        .holder = holder->id,
                                        .mask = (uint8_t)mask,
                                        .is_placed = true});
}

void kvi_missed_gone(struct kvi_index *ix, struct kvi_holder *holder, enum kv_tier tier,
                     uint32_t source, uint64_t hash)
{
    if (ix->copies.keepers)
        note(ix, holder,
             &(struct kvi_missed_block){.hash = hash,
                                        .holder = holder->id,
                                        .source = (uint16_t)source,
                                        .mask = (uint8_t)(1u << tier)});
}

void kvi_missed_clear(struct kvi_index *ix)
{
    kvi_mem_free(&ix->mem, ix->missed.items);
    ix->missed = (struct kvi_missed){.n = 0};
}
