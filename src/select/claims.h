// SPDX-License-Identifier: Apache-2.0
/**
 * Blocks that workers claim: those of prompts that run on a worker, and those of prompts that it was
 * sent just now, whose events haven't come.
 *
 * A claim is a (hash, slot) pair with two counts: running requests and predictions. A node has the
 * claims of one hash:
 *
 *     nodes  [hash] --> node { depth } --> claim {slot 3} <-> claim {slot 7}
 *     pairs  [hash, slot] ------------------^
 *
 * Hashes are sequence hashes, each of which stands for the whole prompt up to its block, and every
 * prompt is added and taken as a whole. So the nodes of a prompt that exist are its first ones:
 * a search halves, then walks from the deepest node up, until each slot that has a claim on the
 * first node has been seen.
 */
#ifndef KV_SELECT_CLAIMS_H
#define KV_SELECT_CLAIMS_H

#include <stddef.h>
#include <stdint.h>

struct kvsel_claim {
    uint64_t hash;
    uint32_t slot;
    uint32_t node;
    uint32_t running, soon; /* counts; a claim without either is freed */
    uint32_t prev, next;    /* of the node's claims */
    uint32_t pair_next;     /* in its bucket of pairs; of free claims: the next free one */
};

struct kvsel_node {
    uint64_t hash;
    uint32_t first;             /* claim */
    uint32_t n_running, n_soon; /* slots that have some */
    uint32_t depth;             /* place in the prompts that have it, from 0 */
    uint32_t next;              /* in its bucket; of free nodes: the next free one */
};

/** Numbers of nodes and claims begin at 1; 0: none. */
struct kvsel_claims {
    struct kvsel_claim *claims;
    struct kvsel_node *nodes;
    uint32_t *pairs, *heads; /* buckets, claim_mask + 1 and node_mask + 1 of them */
    uint32_t n_claims, max_claims, free_claim, live_claims;
    uint32_t n_nodes, max_nodes, free_node, live_nodes;
    uint32_t claim_mask, node_mask;
};

int kvsel_claims_init(struct kvsel_claims *claims);
void kvsel_claims_fini(struct kvsel_claims *claims);

/** Make sure that kvsel_claims_add of @n hashes finds its memory. Returns 0 or -ENOMEM. */
int kvsel_claims_reserve(struct kvsel_claims *claims, size_t n);

/** Which counts a call means. */
enum kvsel_claim_kind { KVSEL_RUNNING, KVSEL_SOON };

/**
 * Add a prompt of @n hashes at @slot. Room must have been reserved. Returns how many of the hashes the
 * slot had no claim of this kind for.
 */
size_t kvsel_claims_add(struct kvsel_claims *claims, enum kvsel_claim_kind kind, uint32_t slot,
                        const uint64_t *hashes, size_t n);

/** Take a prompt that was added. Returns for how many hashes it was the slot's last claim of the kind. */
size_t kvsel_claims_take(struct kvsel_claims *claims, enum kvsel_claim_kind kind, uint32_t slot,
                         const uint64_t *hashes, size_t n);

/** Receives a slot and how many leading hashes of the prompt it claims; each slot once. */
struct kvsel_found {
    uint32_t slot, n;
};

/**
 * Write to @ret, which has room for all slots, how many leading hashes of a prompt each slot claims.
 * @seen: a zero for each slot, and again afterwards. Returns the number of slots with any.
 */
size_t kvsel_claims_find(const struct kvsel_claims *claims, enum kvsel_claim_kind kind,
                         const uint64_t *hashes, size_t n, uint8_t *seen, struct kvsel_found *ret);

/** Return a prediction's depth at @slot: 1 + the place of @hash in its prompts; 0: there is none. */
uint32_t kvsel_claims_depth(const struct kvsel_claims *claims, uint32_t slot, uint64_t hash);

#endif
