// SPDX-License-Identifier: Apache-2.0
/**
 * Fetches: blocks of lower tiers and of peers come into a pin. A remote fetch (object store, peers)
 * fills host blocks within a share of the host tier; items beyond it are STARVED until a fetch
 * ends.
 */
#ifndef KVBM_TIER_MANAGER_FETCH_H
#define KVBM_TIER_MANAGER_FETCH_H

#include "tier/manager/state/manager.h"

/* fetch.c */
/** Start the fetches of a pin, as far as host blocks and queues have room. */
void kvbm_fetch_start(struct kvbm_pin *pin);
/** Cancel the running fetches of a pin. */
void kvbm_fetch_cancel(struct kvbm_pin *pin);
/** Cancel the running fetches of a pin, but those that other pins wait for. */
void kvbm_fetch_cancel_unneeded(struct kvbm_pin *pin);
/** Cancel the fetches that have outlived their pins' users and that no pin waits for any more. */
void kvbm_fetch_cancel_left(struct kvbm_manager *m);
/** Turn the items from @first on that STARVE into MISS. */
void kvbm_fetch_stop_starving(struct kvbm_pin *pin, uint32_t first);
/**
 * Note that the object store doesn't give item @i: a prompt can't use the items behind it. Items
 * before it are still fetched: some starve, or wait for another pin.
 */
void kvbm_fetch_ends_at(struct kvbm_pin *pin, uint32_t i);
/**
 * Return the item at which fetches of a prompt from @tier end. That is @end, which @tier lacks;
 * once another tier has given that item, the next one that @tier lacks.
 */
uint32_t kvbm_fetch_behind_gap(const struct kvbm_pin *pin, enum kv_tier tier, uint32_t end);
/**
 * True when another pin fetches or stores the key, so that item @i waits for that pin. A hold of a
 * peer doesn't wait for a fetch from peers: its item stays MISS, and no tier is tried.
 */
bool kvbm_fetch_left_to_others(struct kvbm_pin *pin, uint32_t i);
/** True when a hold of a peer must not wait for a key: this node gets it from peers. */
bool kvbm_fetch_is_circle(const struct kvbm_pin *pin, uint32_t i);
/**
 * Begin to fetch items from a tier that is remote, as many as the share of host blocks for such
 * fetches allows. The others starve.
 */
void kvbm_fetch_by_share(struct kvbm_pin *pin, enum kv_tier tier, const uint32_t *index,
                         uint32_t n);
/** Turn starving items into BUSY when no fetch is left whose end would continue them. */
void kvbm_fetch_nobody_feeds(struct kvbm_pin *pin);

/* fetch_io.c */
/** Begin to fetch the items of @index from @tier. Items without room become BUSY. */
void kvbm_fetch_some(struct kvbm_pin *pin, enum kv_tier tier, const uint32_t *index, uint32_t n);
/** Begin to ask peers for items, or (@leases) to lease them from the peer that has them. */
void kvbm_fetch_ask(struct kvbm_pin *pin, const uint32_t *index, uint32_t n, bool leases);
/** Note that a key is pending, or no longer (@change -1). */
void kvbm_fetch_count_pending(const struct kvbm_fetch *fetch, uint32_t i, int change);

/* fetch_end.c */
/** Take the results of a fetch; @all, unless 0: of all its items. */
void kvbm_fetch_end(struct kvbm_fetch *fetch, int all);
/** End a fetch whose batch has ended, and continue its pin and those that wait for it. */
void kvbm_fetch_done(struct kvbm_manager *m, void *operation);
/** Let the disk's block of an item go. */
void kvbm_fetch_source_released(struct kvbm_pin *pin, struct kvbm_item *item);

/* fetch_peers.c */
/** Ask peers for a pin's items, and fetch those that peers have. */
void kvbm_fetch_from_peers(struct kvbm_pin *pin);
/** True when item @i is left to peers for now: the object store isn't known to have it. */
bool kvbm_fetch_peers_first(const struct kvbm_pin *pin, uint32_t i);
/** Note that no peer had item @i, or that the one which had it didn't give it (@why). */
void kvbm_fetch_not_at_peer(struct kvbm_pin *pin, uint32_t i, bool asked, int why);

/* leased.c */
/** Return how many of items that one peer has may be leased now, to be copied from where they are. */
uint32_t kvbm_leased_room(const struct kvbm_pin *pin, const uint32_t *index, uint32_t n);
/** Make a place for a lease of @n blocks. NULL: no memory. */
struct kvbm_leased *kvbm_leased_new(struct kvbm_manager *m, uint32_t n);
/** Release a lease, and free its place. NULL is a no-op. */
void kvbm_leased_free(struct kvbm_manager *m, struct kvbm_leased *leased);
/** Make item @i LEASED: key @place of @lease. */
void kvbm_leased_add(struct kvbm_pin *pin, uint32_t i, const struct kvbm_lease *lease,
                     uint32_t place);
/** Tell where the bytes of a LEASED item are: a block of a layout, which lives as long as the pin. */
void kvbm_leased_source(const struct kvbm_item *item, const struct kvbm_layout **layout,
                        uint32_t *block);
/** True when what was copied from a LEASED item before this call is right. */
bool kvbm_leased_is_intact(const struct kvbm_item *item);
/**
 * Fetch the LEASED items whose leases have ended, as if the pin weren't in place. Returns true when
 * items are pending: the pin settles again, and starts its jobs then.
 */
bool kvbm_leased_renew(struct kvbm_pin *pin);

/* peers.c */
/** Open the tier of peers, if the options name any. */
int kvbm_manager_open_peers(struct kvbm_manager *m);
/** Close it, its directory and the manager's own agent. */
void kvbm_manager_close_peers(struct kvbm_manager *m);
/** Ask peers for those keys of [i, i + 64) of a chain that are set in @wanted. Returns 0 or an error. */
int kvbm_peers_look(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t i,
                    uint64_t wanted);
/** Find the peer that a hint names. Returns its worker; 0: no session with it. */
uint64_t kvbm_peers_hinted(struct kvbm_manager *m, const struct kvbm_hint *hint);

#endif
