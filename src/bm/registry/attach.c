// SPDX-License-Identifier: Apache-2.0
/* Values that callers attach to keys, and callbacks for uses of keys (touch). */
#include <errno.h>
#include <string.h>

#include "base/core/error.h"
#include "bm/registry/registry.h"

#define BATCH 16

/* ---- types ---- */

int kvbm_attachment_type(struct kvbm_registry *r, const char *name, bool multiple,
                         void (*destroy)(void *value), uint32_t *ret)
{
    int err = 0;
    uint32_t i;

    if (!r || !name || !*name || strlen(name) >= sizeof(r->types[0].name) || !ret)
        return -EINVAL;
    kvbm_lock(r);
    for (i = 0; i < r->n_types && strcmp(r->types[i].name, name) != 0; i++)
        ;
    if (i < r->n_types && r->types[i].multiple != multiple) {
        err = -EEXIST;
    } else if (i == KVBM_MAX_TYPES) {
        err = -ENOSPC;
    } else if (i == r->n_types) {
        strcpy(r->types[i].name, name);
        r->types[i].multiple = multiple;
        r->types[i].destroy = destroy;
        r->n_types++;
    }
    kvbm_unlock(r);
    if (err == 0)
        *ret = i;
    return err;
}

int kvbm_registry_on_touch(struct kvbm_registry *r, kvbm_touch_fn fn, void *arg)
{
    uint32_t n;
    int err = 0;

    if (!r || !fn)
        return -EINVAL;
    kvbm_lock(r);
    /* only written with the lock held */
    n = atomic_load_explicit(&r->n_touch, memory_order_relaxed);
    if (n == KVBM_MAX_TOUCH) {
        err = -ENOSPC;
    } else {
        r->touch[n].fn = fn;
        r->touch[n].arg = arg;
        atomic_store_explicit(&r->n_touch, n + 1, memory_order_release); /* pairs with touched() */
    }
    kvbm_unlock(r);
    return err;
}

/* ---- values ---- */

/* Find the entry of a key that is registered in some pool. The lock is held. */
static struct kvbm_entry *registered(struct kvbm_registry *r, uint32_t group, const void *key)
{
    uint32_t i = r->table ? kvbm_find(r, group, key, kvbm_tag(r, group, key)) : 0;

    return i && kvbm_entry(r, i)->tiers ? kvbm_entry(r, i) : NULL;
}

static uint32_t node_new(struct kvbm_registry *r)
{
    uint32_t i = r->free_attachment, capacity;
    struct kvbm_attachment *all;

    if (i) {
        r->free_attachment = r->attachments[i].next;
        return i;
    }
    if (r->n_attachments + 1 >= r->max_attachments) {
        capacity = r->max_attachments ? r->max_attachments * 2 : 64;
        all =
            capacity > r->max_attachments ? realloc(r->attachments, capacity * sizeof(*all)) : NULL;
        if (!all)
            return 0;
        r->attachments = all;
        r->max_attachments = capacity;
    }
    return ++r->n_attachments;
}

static void node_free(struct kvbm_registry *r, uint32_t i)
{
    r->attachments[i].next = r->free_attachment;
    r->free_attachment = i;
}

/* Return the node of a type that the entry has values of, else 0. */
static uint32_t type_of(const struct kvbm_registry *r, const struct kvbm_entry *e, uint32_t type)
{
    uint32_t i = e->link;

    while (i && r->attachments[i].type != type)
        i = r->attachments[i].next;
    return i;
}

/* Append a value behind the others of its type, whose node is @of. */
static void append(struct kvbm_registry *r, uint32_t of, uint32_t i, void *value)
{
    struct kvbm_attachment *list = &r->attachments[of], *one = &r->attachments[i];
    uint32_t last = list->last;

    *one = (struct kvbm_attachment){.next = i, .type = list->type, .value = value};
    if (last) {
        one->next = r->attachments[last].next;
        r->attachments[last].next = i;
    }
    list->last = i;
    list->n_values++;
}

static int attach(struct kvbm_registry *r, struct kvbm_entry *e, uint32_t type, void *value)
{
    uint32_t of = type_of(r, e, type), i;

    if (of && !r->types[type].multiple)
        return -EEXIST;
    i = node_new(r);
    if (!i)
        return -ENOMEM;
    if (!of) {
        of = node_new(r);
        if (!of) {
            node_free(r, i);
            return -ENOMEM;
        }
        r->attachments[of] = (struct kvbm_attachment){.next = e->link, .type = type};
        e->link = of;
    }
    append(r, of, i, value);
    return 0;
}

int kvbm_registry_attach(struct kvbm_registry *r, uint32_t group, const void *key, uint32_t type,
                         void *value)
{
    struct kvbm_entry *e;
    int err;

    if (!r || !key || group >= KVBM_MAX_GROUPS)
        return -EINVAL;
    kvbm_lock(r);
    e = registered(r, group, key);
    err = type >= r->n_types ? -EINVAL : !e ? -ENOENT : attach(r, e, type, value);
    kvbm_unlock(r);
    return err;
}

/* Copy at most @cap values of a type's node. Returns how many there are. */
static long copy_values(const struct kvbm_registry *r, uint32_t of, void **ret, size_t cap)
{
    const struct kvbm_attachment *list = &r->attachments[of], *one;
    size_t n = KV_MIN((size_t)list->n_values, cap);

    one = &r->attachments[list->last];
    for (size_t i = 0; i < n; i++) {
        one = &r->attachments[one->next];
        ret[i] = one->value;
    }
    return list->n_values;
}

long kvbm_registry_attachments(struct kvbm_registry *r, uint32_t group, const void *key,
                               uint32_t type, void **ret, size_t cap)
{
    struct kvbm_entry *e;
    uint32_t of;
    long n = 0;

    if (!r || !key || group >= KVBM_MAX_GROUPS || (cap && !ret))
        return -EINVAL;
    kvbm_lock(r);
    e = registered(r, group, key);
    if (type >= r->n_types)
        n = -EINVAL;
    else if (!e)
        n = -ENOENT;
    of = n == 0 ? type_of(r, e, type) : 0;
    if (of)
        n = copy_values(r, of, ret, cap);
    kvbm_unlock(r);
    return n;
}

/* ---- removal of a key ---- */

void kvbm_detach_all(struct kvbm_registry *r, struct kvbm_entry *e)
{
    uint32_t last = e->link;

    while (r->attachments[last].next)
        last = r->attachments[last].next;
    r->attachments[last].next = r->dead;
    r->dead = e->link;
    e->link = 0;
}

/* Take the oldest value out of the first type of a list. Removes the type with its last value. */
static void *take_value(struct kvbm_registry *r, uint32_t *dead)
{
    struct kvbm_attachment *list = &r->attachments[*dead];
    uint32_t oldest = r->attachments[list->last].next, next = list->next;
    void *value = r->attachments[oldest].value;

    r->attachments[list->last].next = r->attachments[oldest].next;
    node_free(r, oldest);
    if (--list->n_values == 0) {
        node_free(r, *dead);
        *dead = next;
    }
    return value;
}

void kvbm_destroy_dead(struct kvbm_registry *r, uint32_t dead)
{
    struct {
        void (*destroy)(void *value);
        void *value;
    } batch[BATCH];

    for (;;) {
        size_t n = 0;

        for (; dead && n < BATCH; n++) {
            batch[n].destroy = r->types[r->attachments[dead].type].destroy;
            batch[n].value = take_value(r, &dead);
        }
        pthread_mutex_unlock(&r->lock);
        for (size_t i = 0; i < n; i++) {
            if (batch[i].destroy)
                batch[i].destroy(batch[i].value);
        }
        if (!dead)
            return;
        kvbm_lock(r); /* this thread owns the rest of the list; the nodes' array may have moved */
    }
}
