// SPDX-License-Identifier: Apache-2.0
/*
 * Chunks that were put and not published. A store's handle says that it has them. But a publication
 * that fails, as on a full disk, leaves them to a later one, and a crash drops them. Whoever believed
 * the handle would count copies that no other handle finds: GET and EXISTS take them for missing.
 *
 *   put begins ──► need = PUTTING ──┬─ found in place, or published ──► need = 0
 *                                   └─ failed ─────► need = the next publication: a success of that
 *                                                    or of a later one includes the chunk
 *
 * Invariant: a chunk that this tier put, and that no publication has included, has a slot with
 * need > published. Slots that are no longer needed go when the table grows.
 */
#include "tier/object/impl.h"

#define PUTTING UINT64_MAX

struct kvbm_object_slot {
    uint64_t name; /* first bytes of the chunk's key, which is a hash; 0: the slot is free */
    uint64_t need;
};

static uint64_t name_of(const uint8_t *key)
{
    uint64_t name;

    memcpy(&name, key, sizeof(name));
    return name ? name : 1;
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
        kept += old->slots[i].name && old->slots[i].need > o->published;
    while (grown.capacity < 4 * kept)
        grown.capacity *= 2;
    grown.slots = calloc(grown.capacity, sizeof(*grown.slots));
    if (!grown.slots)
        return -ENOMEM;
    for (size_t i = 0; i < old->capacity; i++) {
        if (old->slots[i].name && old->slots[i].need > o->published) {
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

        w->fresh[i] = !slot->name;
        if (slot->name && slot->need <= o->published)
            continue; /* it was published: a put of it changes nothing */
        o->unpublished.n += w->fresh[i];
        *slot = (struct kvbm_object_slot){.name = name, .need = PUTTING};
        w->putting[w->n_putting++] = name;
    }
    pthread_mutex_unlock(&o->lock);
    return rc;
}

void kvbm_object_put_found(struct kvbm_object_worker *w, uint32_t n)
{
    struct kvbm_object *o = w->object;

    pthread_mutex_lock(&o->lock);
    for (uint32_t i = 0; i < n; i++)
        if (w->rc[i] == 1 && w->fresh[i])
            slot_of(&o->unpublished, name_of(w->keys[i]))->need = 0;
    pthread_mutex_unlock(&o->lock);
}

void kvbm_object_put_ends(struct kvbm_object_worker *w, bool published)
{
    struct kvbm_object *o = w->object;

    pthread_mutex_lock(&o->lock);
    for (size_t i = 0; i < w->n_putting; i++) {
        struct kvbm_object_slot *slot = slot_of(&o->unpublished, w->putting[i]);

        if (slot->name && published)
            slot->need = 0;
        else if (slot->name && slot->need == PUTTING) /* else found in place, or another batch's */
            slot->need = o->publications + 1;
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

        if (slot->name && slot->need <= o->published)
            slot->need = o->publications + 1; /* a put of it is a new one */
    }
    pthread_mutex_unlock(&o->lock);
}

bool kvbm_object_is_unpublished(const struct kvbm_object *o, const uint8_t *key)
{
    return o->unpublished.n && slot_of(&o->unpublished, name_of(key))->need > o->published;
}
