// SPDX-License-Identifier: Apache-2.0
/**
 * Pins: a list of keys, some with a host block, which the pin keeps from eviction (pin.c); how
 * loads bring the others (load.c). A pin settles when none of its keys is on its way any more.
 */
#ifndef KVBM_TIER_MANAGER_PIN_H
#define KVBM_TIER_MANAGER_PIN_H

#include "tier/manager/state/manager.h"

static inline uint8_t *kvbm_pin_key(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->keys + (size_t)i * pin->manager->key_len;
}

/** Return the address of item @i's bytes: its host block, or its block of a direct job's cache. */
static inline void *kvbm_pin_data(const struct kvbm_pin *pin, uint32_t i)
{
    if (!pin->direct)
        return kvbm_host_address(pin->manager, pin->items[i].host.block);
    return (void *)(uintptr_t)(pin->direct->base + // NOLINT(performance-no-int-to-ptr)
                               pin->blocks[i] * pin->direct->stride);
}

static inline uint64_t kvbm_pin_hash(const struct kvbm_pin *pin, uint32_t i)
{
    return kvbm_key_hash(pin->manager, pin->group, kvbm_pin_key(pin, i));
}

/** Return the key of the block before item @i; NULL: the item is the first of its sequence. */
static inline const uint8_t *kvbm_pin_parent(const struct kvbm_pin *pin, uint32_t i)
{
    return !pin->scattered && (i || pin->has_parent) ? kvbm_pin_key(pin, i) - pin->manager->key_len
                                                     : NULL;
}

static inline uint32_t kvbm_pin_position(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->scattered ? 0 : pin->position + i;
}

static inline const uint32_t *kvbm_pin_tokens(const struct kvbm_pin *pin, uint32_t i)
{
    return pin->tokens ? pin->tokens + (size_t)i * pin->manager->block_tokens : NULL;
}

static inline struct kvbm_chain kvbm_pin_chain(const struct kvbm_pin *pin, uint32_t i)
{
    return (struct kvbm_chain){.size = sizeof(struct kvbm_chain),
                               .group = pin->group,
                               .keys = kvbm_pin_key(pin, i),
                               .parent = kvbm_pin_parent(pin, i),
                               .position = kvbm_pin_position(pin, i),
                               .tokens = kvbm_pin_tokens(pin, i),
                               .scattered = pin->scattered};
}

/** True when a missing key makes those behind it useless: the keys of a prompt. */
static inline bool kvbm_pin_is_prefix(const struct kvbm_pin *pin)
{
    return !pin->likes && !pin->scattered;
}

/* pin.c */
/** Make a pin of a chain with one reference. Returns 0, -EINVAL or -ENOMEM. */
int kvbm_pin_new(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n, bool store,
                 struct kvbm_pin **ret);
/** True when a line about a caller's keys may be logged now: one a second. */
bool kvbm_pin_tells(struct kvbm_manager *m);
/** True when a key of @chain, or its parent, is known at another position. The log says which. */
bool kvbm_pin_misplaced(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n);
/**
 * Cancel the fetches of a pin that is released and that no job but the caller's needs, unless other
 * pins wait for them. Let go what the pin holds already: a fetch that hangs holds only the blocks
 * that it fills.
 */
void kvbm_pin_unwanted(struct kvbm_pin *pin);
/** Drop a reference; the last one frees the pin and its blocks. */
void kvbm_pin_put(struct kvbm_pin *pin);
/** Give back the host block of item @i, held or reserved. The item becomes a MISS. */
void kvbm_pin_let_go(struct kvbm_pin *pin, uint32_t i);
/** Number of keys from the first on that are READY, or (@ready false) at least PENDING. */
long kvbm_pin_prefix(const struct kvbm_pin *pin, bool ready);

/** Allocate up to @n blocks of @pool, as many as there are. Returns their number. */
uint32_t kvbm_take_blocks(struct kvbm_pool *pool, struct kvbm_mutable *ret, uint32_t n);
/**
 * Register the host blocks of items [i, i + n), all FETCHED or RESERVED with their bytes. Blocks
 * that can't be registered (their key is known at another position) are given back and MISS.
 * Returns the number HELD.
 */
uint32_t kvbm_pin_register(struct kvbm_pin *pin, uint32_t i, uint32_t n);

/* load.c */
/** Hold the blocks of a pin that the host tier has. */
void kvbm_pin_hold(struct kvbm_pin *pin);
/** Begin to load a new pin. Returns as kvbm_manager_prepare_load. */
long kvbm_pin_load(struct kvbm_pin *pin, const struct kvbm_pin_opts *opts);
/** As kvbm_manager_prepare_load, for a hold of a peer: it asks no peer, and waits for none. */
long kvbm_pin_lend(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                   const struct kvbm_pin_opts *opts, struct kvbm_pin **ret);
/** STEP_LOOK: look the items up again that WAIT for another pin, and fetch those still missing. */
void kvbm_pins_look(struct kvbm_manager *m);
/** When no item is pending any more: have the jobs of the pin begin, and wake its waiters. */
void kvbm_pin_settle(struct kvbm_pin *pin);
/**
 * Turn the items that wait for another pin, or for their share, into MISS. Cancels fetches that
 * only these waited for.
 */
void kvbm_pin_stop_waiting(struct kvbm_pin *pin);
/** End the waiting of pins past their deadline. Returns the next deadline, or UINT64_MAX. */
uint64_t kvbm_pin_late(struct kvbm_manager *m);

/** Count an item that found no room. */
static inline void kvbm_pin_drop(struct kvbm_pin *pin)
{
    pin->n_dropped++;
    pin->manager->stats.host.dropped++;
}

#endif
