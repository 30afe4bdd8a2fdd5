// SPDX-License-Identifier: Apache-2.0
#include "select/claims.h"

#include "base/core/error.h"
#include "base/core/mix.h"

#define FIRST 256 /* nodes, claims and buckets */

static uint32_t node_bucket(const struct kvsel_claims *c, uint64_t hash)
{
    return (uint32_t)kv_mix(hash) & c->node_mask;
}

static uint32_t pair_bucket(const struct kvsel_claims *c, uint64_t hash, uint32_t slot)
{
    return (uint32_t)kv_mix(hash ^ (uint64_t)slot << 32 ^ slot) & c->claim_mask;
}

int kvsel_claims_init(struct kvsel_claims *c)
{
    *c = (struct kvsel_claims){.claims = malloc((FIRST + 1) * sizeof(*c->claims)),
                               .nodes = malloc((FIRST + 1) * sizeof(*c->nodes)),
                               .pairs = calloc(FIRST, sizeof(*c->pairs)),
                               .heads = calloc(FIRST, sizeof(*c->heads)),
                               .max_claims = FIRST,
                               .max_nodes = FIRST,
                               .claim_mask = FIRST - 1,
                               .node_mask = FIRST - 1};
    return c->claims && c->nodes && c->pairs && c->heads ? 0 : -ENOMEM;
}

void kvsel_claims_fini(struct kvsel_claims *c)
{
    free(c->claims);
    free(c->nodes);
    free(c->pairs);
    free(c->heads);
}

/* Return the size of a table, a power of two, for @n more than @live entries; 0: too many. */
static size_t size_for(uint32_t max, uint32_t live, size_t n)
{
    size_t size = max;

    if (n > UINT32_MAX / 4 - live)
        return 0;
    while (size < live + n)
        size *= 2;
    return size;
}

static int grow_claims(struct kvsel_claims *c, size_t n)
{
    size_t size = size_for(c->max_claims, c->live_claims, n);
    struct kvsel_claim *claims;
    uint32_t *pairs;

    if (size == c->max_claims)
        return 0;
    pairs = size ? calloc(size, sizeof(*pairs)) : NULL;
    claims = pairs ? realloc(c->claims, (size + 1) * sizeof(*claims)) : NULL;
    if (!claims) {
        free(pairs);
        return -ENOMEM;
    }
    c->claims = claims;
    free(c->pairs);
    c->pairs = pairs;
    c->max_claims = (uint32_t)size;
    c->claim_mask = (uint32_t)size - 1;
    for (uint32_t i = 1; i <= c->n_claims; i++) {
        uint32_t *head = &pairs[pair_bucket(c, claims[i].hash, claims[i].slot)];

        if (!claims[i].running && !claims[i].soon)
            continue; /* free */
        claims[i].pair_next = *head;
        *head = i;
    }
    return 0;
}

static int grow_nodes(struct kvsel_claims *c, size_t n)
{
    size_t size = size_for(c->max_nodes, c->live_nodes, n);
    struct kvsel_node *nodes;
    uint32_t *heads;

    if (size == c->max_nodes)
        return 0;
    heads = size ? calloc(size, sizeof(*heads)) : NULL;
    nodes = heads ? realloc(c->nodes, (size + 1) * sizeof(*nodes)) : NULL;
    if (!nodes) {
        free(heads);
        return -ENOMEM;
    }
    c->nodes = nodes;
    free(c->heads);
    c->heads = heads;
    c->max_nodes = (uint32_t)size;
    c->node_mask = (uint32_t)size - 1;
    for (uint32_t i = 1; i <= c->n_nodes; i++) {
        uint32_t *head = &heads[node_bucket(c, nodes[i].hash)];

        if (!nodes[i].first)
            continue; /* free */
        nodes[i].next = *head;
        *head = i;
    }
    return 0;
}

int kvsel_claims_reserve(struct kvsel_claims *c, size_t n)
{
    int rc = grow_claims(c, n);

    return rc < 0 ? rc : grow_nodes(c, n);
}

static uint32_t find_node(const struct kvsel_claims *c, uint64_t hash)
{
    uint32_t at = c->heads[node_bucket(c, hash)];

    while (at && c->nodes[at].hash != hash)
        at = c->nodes[at].next;
    return at;
}

static uint32_t find_claim(const struct kvsel_claims *c, uint64_t hash, uint32_t slot)
{
    uint32_t at = c->pairs[pair_bucket(c, hash, slot)];

    while (at && (c->claims[at].hash != hash || c->claims[at].slot != slot))
        at = c->claims[at].pair_next;
    return at;
}

static uint32_t make_node(struct kvsel_claims *c, uint64_t hash, uint32_t depth)
{
    uint32_t *head = &c->heads[node_bucket(c, hash)], at = c->free_node;

    if (at)
        c->free_node = c->nodes[at].next;
    else
        at = ++c->n_nodes;
    c->nodes[at] = (struct kvsel_node){.hash = hash, .depth = depth, .next = *head};
    *head = at;
    c->live_nodes++;
    return at;
}

static uint32_t make_claim(struct kvsel_claims *c, uint64_t hash, uint32_t slot, uint32_t node)
{
    uint32_t *head = &c->pairs[pair_bucket(c, hash, slot)], at = c->free_claim;
    uint32_t first = c->nodes[node].first;

    if (at)
        c->free_claim = c->claims[at].pair_next;
    else
        at = ++c->n_claims;
    c->claims[at] = (struct kvsel_claim){
        .hash = hash, .slot = slot, .node = node, .next = first, .pair_next = *head};
    *head = at;
    if (first)
        c->claims[first].prev = at;
    c->nodes[node].first = at;
    c->live_claims++;
    return at;
}

static void free_node(struct kvsel_claims *c, uint32_t node)
{
    uint32_t *at = &c->heads[node_bucket(c, c->nodes[node].hash)];

    while (*at != node)
        at = &c->nodes[*at].next;
    *at = c->nodes[node].next;
    c->nodes[node].next = c->free_node;
    c->free_node = node;
    c->live_nodes--;
}

static void free_claim(struct kvsel_claims *c, uint32_t number)
{
    struct kvsel_claim *claim = &c->claims[number];
    uint32_t *at = &c->pairs[pair_bucket(c, claim->hash, claim->slot)];

    while (*at != number)
        at = &c->claims[*at].pair_next;
    *at = claim->pair_next;
    if (claim->prev)
        c->claims[claim->prev].next = claim->next;
    else
        c->nodes[claim->node].first = claim->next;
    if (claim->next)
        c->claims[claim->next].prev = claim->prev;
    if (!c->nodes[claim->node].first)
        free_node(c, claim->node);
    claim->pair_next = c->free_claim;
    c->free_claim = number;
    c->live_claims--;
}

size_t kvsel_claims_add(struct kvsel_claims *c, enum kvsel_claim_kind kind, uint32_t slot,
                        const uint64_t *hashes, size_t n)
{
    size_t fresh = 0;

    for (size_t i = 0; i < n; i++) {
        uint32_t at = find_claim(c, hashes[i], slot);
        uint32_t *count;

        if (!at) {
            uint32_t node = find_node(c, hashes[i]);

            at = make_claim(c, hashes[i], slot, node ? node : make_node(c, hashes[i], (uint32_t)i));
        }
        count = kind == KVSEL_RUNNING ? &c->claims[at].running : &c->claims[at].soon;
        if ((*count)++ == 0) {
            struct kvsel_node *node = &c->nodes[c->claims[at].node];

            (*(kind == KVSEL_RUNNING ? &node->n_running : &node->n_soon))++;
            fresh++;
        }
    }
    return fresh;
}

size_t kvsel_claims_take(struct kvsel_claims *c, enum kvsel_claim_kind kind, uint32_t slot,
                         const uint64_t *hashes, size_t n)
{
    size_t last = 0;

    for (size_t i = 0; i < n; i++) {
        uint32_t at = find_claim(c, hashes[i], slot);
        struct kvsel_claim *claim = &c->claims[at];
        uint32_t *count = kind == KVSEL_RUNNING ? &claim->running : &claim->soon;

        if (--*count == 0) {
            struct kvsel_node *node = &c->nodes[claim->node];

            (*(kind == KVSEL_RUNNING ? &node->n_running : &node->n_soon))--;
            last++;
        }
        if (!claim->running && !claim->soon)
            free_claim(c, at);
    }
    return last;
}

/* Return how many leading hashes of the prompt have a node. */
static size_t depth_of(const struct kvsel_claims *c, const uint64_t *hashes, size_t n)
{
    size_t low = 0;

    while (low < n) {
        size_t middle = low + (n - low) / 2;

        if (find_node(c, hashes[middle]))
            low = middle + 1;
        else
            n = middle;
    }
    return low;
}

size_t kvsel_claims_find(const struct kvsel_claims *c, enum kvsel_claim_kind kind,
                         const uint64_t *hashes, size_t n, uint8_t *seen, struct kvsel_found *ret)
{
    size_t depth, all, found = 0;
    uint32_t first = n ? find_node(c, hashes[0]) : 0;

    if (!first)
        return 0;
    all = kind == KVSEL_RUNNING ? c->nodes[first].n_running : c->nodes[first].n_soon;
    depth = all ? depth_of(c, hashes, n) : 0;
    for (size_t i = depth; i-- > 0 && found < all;) {
        uint32_t node = find_node(c, hashes[i]);

        for (uint32_t at = node ? c->nodes[node].first : 0; at && found < all;
             at = c->claims[at].next) {
            const struct kvsel_claim *claim = &c->claims[at];

            if (!(kind == KVSEL_RUNNING ? claim->running : claim->soon) || seen[claim->slot])
                continue;
            seen[claim->slot] = 1;
            ret[found++] = (struct kvsel_found){claim->slot, (uint32_t)i + 1};
        }
    }
    for (size_t i = 0; i < found; i++)
        seen[ret[i].slot] = 0;
    return found;
}

uint32_t kvsel_claims_depth(const struct kvsel_claims *c, uint32_t slot, uint64_t hash)
{
    uint32_t at = find_claim(c, hash, slot);

    return at && c->claims[at].soon ? 1 + c->nodes[c->claims[at].node].depth : 0;
}
