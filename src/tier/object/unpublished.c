// SPDX-License-Identifier: Apache-2.0
/*
 * Chunks that were put and not published. A store's handle says that it has them. But a publication
 * that fails, as on a full disk, leaves them to a later one, and a crash drops them. Whoever believed
 * the handle would count copies that no other handle finds: GET and EXISTS take them for missing.
 *
 *   no slot, or 0 ── put begins ──► PUTTING ──┬─ the store had it in place ──► 0
 *   published ── put begins ──► published ─────┴─ written, or failed ──► the next publication: a
 *                                                 success of that or of a later one includes it
 *
 * A chunk that was published may be put anew, where another process has swept it: only the put's
 * result tells. Until then, puts > 0 hides the chunk. A put that fails leaves a published chunk alone.
 *
 * Of several batches that put a chunk at once (SHARED), the later ones find what the first has put, not
 * what is in place.
 *
 * Invariant: a chunk that this tier put, and that no publication has included, has a slot with
 * need > published or puts > 0. Slots that are no longer needed go when the table grows.
 */
#include "tier/object/impl.h"

/* Values of need beside the numbers of publications, of which 1 is the first. */
#define UNKNOWN 0   /* the tier knows nothing of it: the store's word counts */
#define PUBLISHED 1 /* with some publication that succeeded */
#define SHARED (UINT64_MAX - 1)
#define PUTTING UINT64_MAX

struct kvbm_object_slot {
    uint64_t name; /* first bytes of the chunk's key, which is a hash; 0: the slot is free */
    uint64_t need;
    uint64_t puts; /* calls of the store that put it now */
};

static uint64_t name_of(const uint8_t *key)
{
    uint64_t name;

    memcpy(&name, key, sizeof(name));
    return name ? name : 1;
}

static bool is_hidden(const struct kvbm_object *o, const struct kvbm_object_slot *slot)
{
    return slot->name && (slot->need > o->published || slot->puts);
}

/* Return the slot of @name, or the free one where it belongs. There is one. */
static struct kvbm_object_slot *slot_of(const struct kvbm_object_unpublished *u, uint64_t name)
{
    size_t at = name & (u->capacity - 1);

    while (u->slots[at].name && u->slots[at].name != name)
        at = (at + 1) & (u->capacity - 1);
    return &u->slots[at];
}

/* Make a table for @more names beside those that are still unpublished: at least half is free. */
static int make_room(struct kvbm_object *o, size_t more)
{
    struct kvbm_object_unpublished *old = &o->unpublished, grown = {.capacity = 256};
    size_t kept = more;

    if (2 * (old->n + more) <= old->capacity)
        return 0;
    for (size_t i = 0; i < old->capacity; i++)
        kept += is_hidden(o, &old->slots[i]);
    while (grown.capacity < 4 * kept)
        grown.capacity *= 2;
    grown.slots = calloc(grown.capacity, sizeof(*grown.slots));
    if (!grown.slots)
        return -ENOMEM;
    for (size_t i = 0; i < old->capacity; i++) {
        if (is_hidden(o, &old->slots[i])) {
            *slot_of(&grown, old->slots[i].name) = old->slots[i];
            grown.n++;
        }
    }
    free(old->slots);
    *old = grown;
    return 0;
}

int kvbm_object_put_begins(struct kvbm_object_worker *w, uint32_t n)
{
    struct kvbm_object *o = w->object;
    uint64_t *names = reallocarray(w->putting, w->n_putting + n, sizeof(*names));
    int rc;

    if (!names)
        return -ENOMEM;
    w->putting = names;
    pthread_mutex_lock(&o->lock);
    rc = make_room(o, n);
    for (uint32_t i = 0; i < n && rc == 0; i++) {
        uint64_t name = name_of(w->keys[i]);
        struct kvbm_object_slot *slot = slot_of(&o->unpublished, name);

        w->fresh[i] = slot->need == UNKNOWN; /* a free slot's, too */
        o->unpublished.n += !slot->name;
        slot->name = name;
        slot->puts++;
        if (!w->fresh[i] && slot->need <= o->published)
            continue;
        slot->need = slot->need >= SHARED ? SHARED : PUTTING;
        w->putting[w->n_putting++] = name;
    }
    pthread_mutex_unlock(&o->lock);
    return rc;
}

void kvbm_object_put_found(struct kvbm_object_worker *w, uint32_t n)
{
    struct kvbm_object *o = w->object;

    pthread_mutex_lock(&o->lock);
    for (uint32_t i = 0; i < n; i++) {
        struct kvbm_object_slot *slot = slot_of(&o->unpublished, name_of(w->keys[i]));

        slot->puts--;
        if (w->rc[i] == 0)
            slot->need = o->publications + 1;
        else if (w->rc[i] == 1 && w->fresh[i] && slot->need == PUTTING)
            slot->need = UNKNOWN;
    }
    pthread_mutex_unlock(&o->lock);
}

void kvbm_object_put_ends(struct kvbm_object_worker *w, bool published)
{
    struct kvbm_object *o = w->object;

    pthread_mutex_lock(&o->lock);
    for (size_t i = 0; i < w->n_putting; i++) {
        struct kvbm_object_slot *slot = slot_of(&o->unpublished, w->putting[i]);

        if (slot->need >=
            SHARED) /* else in place, or written, or another batch has noted its end */
            slot->need = published ? PUBLISHED : o->publications + 1;
    }
    w->n_putting = 0;
    pthread_mutex_unlock(&o->lock);
}

void kvbm_object_deleted(struct kvbm_object_worker *w, uint32_t n)
{
    struct kvbm_object *o = w->object;

    pthread_mutex_lock(&o->lock);
    for (uint32_t i = 0; i < n && o->unpublished.n; i++) {
        struct kvbm_object_slot *slot = slot_of(&o->unpublished, name_of(w->keys[i]));

        if (slot->need <= o->published)
            slot->need = UNKNOWN;
    }
    pthread_mutex_unlock(&o->lock);
}

bool kvbm_object_is_unpublished(const struct kvbm_object *o, const uint8_t *key)
{
    return o->unpublished.n && is_hidden(o, slot_of(&o->unpublished, name_of(key)));
}
