// SPDX-License-Identifier: Apache-2.0
/* The table of leases; lease.h has the drawing. */
#include "peer/lease/lease.h"

#include "base/core/error.h"

#define MAX_LEASES (1u << 16)        /* of all sessions */
#define MAX_LEASES_OF_ONE (1u << 12) /* of one session */
#define PLACE_BITS 20                /* an id is a number that no other lease has, and its place */

/* ---- heap: the lease that ends next is at 0 ---- */

static void put_at(struct kvbm_leases *leases, uint32_t at, struct kvbm_granted *lease)
{
    leases->heap[at] = lease;
    lease->heap_at = at;
}

static void sift_up(struct kvbm_leases *leases, uint32_t at)
{
    struct kvbm_granted *lease = leases->heap[at];

    while (at && leases->heap[(at - 1) / 2]->expires_ns > lease->expires_ns) {
        put_at(leases, at, leases->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    put_at(leases, at, lease);
}

static void sift_down(struct kvbm_leases *leases, uint32_t at)
{
    struct kvbm_granted *lease = leases->heap[at];

    for (uint32_t kid = 2 * at + 1; kid < leases->n_leases; kid = 2 * at + 1) {
        if (kid + 1 < leases->n_leases &&
            leases->heap[kid + 1]->expires_ns < leases->heap[kid]->expires_ns)
            kid++;
        if (leases->heap[kid]->expires_ns >= lease->expires_ns)
            break;
        put_at(leases, at, leases->heap[kid]);
        at = kid;
    }
    put_at(leases, at, lease);
}

static void heap_remove(struct kvbm_leases *leases, const struct kvbm_granted *lease)
{
    struct kvbm_granted *last = leases->heap[--leases->n_leases];

    if (last == lease)
        return;
    put_at(leases, lease->heap_at, last);
    sift_up(leases, last->heap_at);
    sift_down(leases, last->heap_at);
}

/* ---- the table ---- */

int kvbm_leases_init(struct kvbm_leases *leases, uint32_t n_blocks, uint32_t max_blocks,
                     kvbm_generation_t *table)
{
    *leases = (struct kvbm_leases){.n_blocks = n_blocks,
                                   .max_blocks = max_blocks,
                                   .table = table,
                                   .held = calloc(n_blocks, sizeof(*leases->held)),
                                   .free = KVBM_NO_BLOCK};
    return leases->held ? 0 : -ENOMEM;
}

void kvbm_leases_fini(struct kvbm_leases *leases)
{
    free(leases->held);
    free(leases->places);
    free(leases->heap);
    memset(leases, 0, sizeof(*leases));
}

/* Make a free place and room in the heap. */
static int make_room(struct kvbm_leases *leases)
{
    uint32_t more = KV_MAX(leases->n_places * 2, 16u);
    struct kvbm_lease_place *places;
    struct kvbm_granted **heap;

    if (leases->free != KVBM_NO_BLOCK)
        return 0;
    heap = realloc(leases->heap, more * sizeof(struct kvbm_granted *));
    if (!heap)
        return -ENOMEM;
    leases->heap = heap;
    places = realloc(leases->places, more * sizeof(*places));
    if (!places)
        return -ENOMEM;
    leases->places = places;
    for (uint32_t i = leases->n_places; i < more; i++)
        places[i] = (struct kvbm_lease_place){.next_free = i + 1 < more ? i + 1 : KVBM_NO_BLOCK};
    leases->free = leases->n_places;
    leases->n_places = more;
    return 0;
}

uint32_t kvbm_leases_reserve(struct kvbm_leases *leases, struct kvbm_lessee *lessee, uint32_t n)
{
    uint32_t used = leases->n_held + leases->n_reserved;
    uint32_t left = used < leases->max_blocks ? leases->max_blocks - used : 0;

    /* A block that several sessions lease counts once in held, and once in each session. */
    n = KV_MIN(n, left);
    left =
        lessee->n_references < leases->max_blocks ? leases->max_blocks - lessee->n_references : 0;
    n = KV_MIN(n, left);
    if (leases->n_leases + leases->n_ended >= MAX_LEASES || lessee->n_leases >= MAX_LEASES_OF_ONE)
        return 0;
    leases->n_reserved += n;
    lessee->n_references += n;
    return n;
}

void kvbm_leases_unreserve(struct kvbm_leases *leases, struct kvbm_lessee *lessee, uint32_t n)
{
    leases->n_reserved -= n;
    lessee->n_references -= n;
}

/* Return an id. Tables share the numbers, so that a session's leases of all sets differ. */
static uint64_t new_id(uint32_t place)
{
    static _Atomic uint64_t last;

    return (atomic_fetch_add_explicit(&last, 1, memory_order_relaxed) + 1) << PLACE_BITS | place;
}

static void link_lease(struct kvbm_leases *leases, struct kvbm_lessee *lessee,
                       struct kvbm_granted *lease)
{
    uint32_t at = leases->free;
    struct kvbm_lease_place *place = &leases->places[at];

    leases->free = place->next_free;
    place->lease = lease;
    lease->id = new_id(at);
    lease->lessee = lessee;
    lease->next = lessee->leases;
    if (lease->next)
        lease->next->prev = lease;
    lessee->leases = lease;
    lessee->n_leases++;
    put_at(leases, leases->n_leases++, lease);
    sift_up(leases, lease->heap_at);
}

int kvbm_leases_grant(struct kvbm_leases *leases, struct kvbm_lessee *lessee,
                      const uint32_t *blocks, uint32_t n, void *hold, uint64_t expires_ns,
                      struct kvbm_granted **ret)
{
    struct kvbm_granted *lease = malloc(sizeof(*lease) + n * sizeof(lease->blocks[0]));

    if (!lease || make_room(leases) < 0) {
        free(lease);
        return -ENOMEM;
    }
    *lease = (struct kvbm_granted){.expires_ns = expires_ns, .hold = hold, .n = n};
    leases->n_reserved -= n;
    for (uint32_t i = 0; i < n; i++) {
        lease->blocks[i] = blocks[i];
        if (blocks[i] != KVBM_NO_BLOCK && leases->held[blocks[i]]++ == 0)
            leases->n_held++;
    }
    link_lease(leases, lessee, lease);
    *ret = lease;
    return 0;
}

struct kvbm_granted *kvbm_leases_find(const struct kvbm_leases *leases,
                                      const struct kvbm_lessee *lessee, uint64_t id)
{
    uint32_t at = id & ((1u << PLACE_BITS) - 1);
    const struct kvbm_lease_place *place = at < leases->n_places ? &leases->places[at] : NULL;

    return place && place->lease && place->lease->id == id && place->lease->lessee == lessee
               ? place->lease
               : NULL;
}

void kvbm_leases_renew(struct kvbm_leases *leases, struct kvbm_granted *lease, uint64_t expires_ns)
{
    lease->expires_ns = expires_ns;
    sift_up(leases, lease->heap_at);
    sift_down(leases, lease->heap_at);
}

struct kvbm_granted *kvbm_leases_first(const struct kvbm_leases *leases)
{
    return leases->n_leases ? leases->heap[0] : NULL;
}

/* ---- ends ---- */

/* Let the blocks of an ended, unused lease go: their generations change before anyone may write. */
static void drop_blocks(struct kvbm_leases *leases, const struct kvbm_granted *lease)
{
    for (uint32_t i = 0; i < lease->n; i++) {
        uint32_t block = lease->blocks[i];

        if (block == KVBM_NO_BLOCK || --leases->held[block] > 0)
            continue;
        leases->n_held--;
        atomic_fetch_add_explicit(&leases->table[block], 1, memory_order_relaxed);
    }
    /* Pairs with the acquire fence behind a reader's copy: whoever saw a byte that is written from
     * here on sees the new generation. */
    atomic_thread_fence(memory_order_release);
}

void kvbm_leases_use(struct kvbm_granted *lease)
{
    lease->n_uses++;
}

struct kvbm_granted *kvbm_leases_unuse(struct kvbm_leases *leases, struct kvbm_granted *lease)
{
    if (--lease->n_uses || lease->lessee)
        return NULL;
    leases->n_ended--;
    drop_blocks(leases, lease);
    return lease;
}

struct kvbm_granted *kvbm_leases_end(struct kvbm_leases *leases, struct kvbm_granted *lease)
{
    uint32_t at = lease->id & ((1u << PLACE_BITS) - 1);
    struct kvbm_lease_place *place = &leases->places[at];
    struct kvbm_lessee *lessee = lease->lessee;

    heap_remove(leases, lease);
    place->lease = NULL;
    place->next_free = leases->free;
    leases->free = at;
    if (lease->next)
        lease->next->prev = lease->prev;
    if (lease->prev)
        lease->prev->next = lease->next;
    else
        lessee->leases = lease->next;
    lease->next = lease->prev = NULL;
    lease->lessee = NULL;
    lessee->n_references -= lease->n;
    lessee->n_leases--;
    if (lease->n_uses) {
        leases->n_ended++;
        return NULL;
    }
    drop_blocks(leases, lease);
    return lease;
}
