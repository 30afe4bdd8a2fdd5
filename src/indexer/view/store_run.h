// SPDX-License-Identifier: Apache-2.0
/**
 * Stores that wait, to enter the index together: under one lock, and merged where they continue
 * each other.
 *
 * An engine announces a prompt in several events, and the blocks that it decodes one by one: each
 * event stores blocks below those of the one before. Alone, such a store costs the index three
 * times a block of a long one, most of it to find the place again. And each write takes the index's
 * lock: several event threads would hand it, and the memory that goes with it, to each other with
 * every event. Stores therefore wait here, as long as no other event comes, as a list of chains:
 *
 *     store a, b at the root    begins a chain
 *     store c below b           continues the chain: a, b, c
 *     store x below w           begins another one
 *     remove y                  first all chains enter the index, then y is removed
 *
 * A store that can't wait enters the index at once. The next one may continue it.
 *
 * Bounded by the constants below. Thread-confined or caller-locked.
 */
#ifndef KV_INDEXER_VIEW_STORE_RUN_H
#define KV_INDEXER_VIEW_STORE_RUN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "index/tree/facts.h"
#include "kv_event.h"

#define KI_RUN_CHAINS 64
#define KI_RUN_EVENTS 512
#define KI_RUN_BLOCKS 1024u

/** Memory of the waiting stores. */
struct ki_run_room {
    struct kvi_new_chain chains[KI_RUN_CHAINS];
    uint32_t chain_ends[KI_RUN_CHAINS]; /* end of each chain, in events */
    uint32_t event_ends[KI_RUN_EVENTS]; /* end of each event, in blocks */
    struct kv_block blocks[KI_RUN_BLOCKS];
};

/** The waiting stores of a stream. Zero-initialise. */
struct ki_store_run {
    bool off;    /* for tests: nothing waits */
    bool open;   /* the next store may continue the last one, which may be in the index already */
    bool single; /* the waiting stores mean one copy of each block, however often told */
    struct kv_holder holder;  /* of the last store */
    uint64_t last;            /* hash of its last block */
    struct ki_run_room *room; /* NULL: nothing waits */
    size_t n_chains, n_events, n_blocks;
};

void ki_store_run_fini(struct ki_store_run *run);

/**
 * Note that @holder has stored blocks up to @last at once (parked or not), @single as the operation says.
 * Nothing waits.
 */
void ki_store_run_begin(struct ki_store_run *run, struct kv_holder holder, uint64_t last,
                        bool single);

/** Let the store @op wait. Returns false when it doesn't continue the last, or there is no room. */
bool ki_store_run_append(struct ki_store_run *run, struct kv_holder holder,
                         const struct kve_op *op);

/** Let the store @op of new copies in the device's source 0 wait. Returns false without room. */
bool ki_store_run_start(struct ki_store_run *run, struct kv_holder holder, const struct kve_op *op);

/**
 * Return true when the waiting stores may give the holder a block at the root with the tokens of
 * @first: a chain there begins with them, or a chain elsewhere has @first, which a broken stream
 * stores in two places.
 */
bool ki_store_run_has_root(const struct ki_store_run *run, const struct kv_block *first);

/** Return the first event of chain @i; *@ret_end is the end of its events. */
static inline size_t ki_store_run_events(const struct ki_store_run *run, size_t i, size_t *ret_end)
{
    *ret_end = run->room->chain_ends[i];
    return i ? run->room->chain_ends[i - 1] : 0;
}

/** Return the first block of event @i; *@ret_n is their number. */
static inline size_t ki_store_run_blocks(const struct ki_store_run *run, size_t i, size_t *ret_n)
{
    size_t first = i ? run->room->event_ends[i - 1] : 0;

    *ret_n = run->room->event_ends[i] - first;
    return first;
}

#endif
