// SPDX-License-Identifier: Apache-2.0
/* Slots of workers. The table of holders is open-addressed, at most half full; removing moves later
 * entries back, so that it has no tombstones. */
#include <math.h>

#include "base/core/mix.h"
#include "select/impl.h"

#define FIRST_SLOTS 16

static uint32_t bucket_of(const struct kvsel *s, struct kv_holder holder)
{
    return (uint32_t)kv_mix(holder.worker ^ (uint64_t)holder.rank << 40) & s->table_mask;
}

static bool same(struct kv_holder a, struct kv_holder b)
{
    return a.worker == b.worker && a.rank == b.rank;
}

uint32_t kvsel_slot_find(const struct kvsel *s, struct kv_holder holder)
{
    if (!s->table)
        return KVSEL_NO_SLOT;
    for (uint32_t at = bucket_of(s, holder); s->table[at]; at = (at + 1) & s->table_mask)
        if (same(s->slots[s->table[at] - 1].holder, holder))
            return s->table[at] - 1;
    return KVSEL_NO_SLOT;
}

static void table_add(struct kvsel *s, uint32_t slot)
{
    uint32_t at = bucket_of(s, s->slots[slot].holder);

    while (s->table[at])
        at = (at + 1) & s->table_mask;
    s->table[at] = slot + 1;
}

static void table_remove(struct kvsel *s, uint32_t slot)
{
    uint32_t at = bucket_of(s, s->slots[slot].holder), next;

    while (s->table[at] != slot + 1)
        at = (at + 1) & s->table_mask;
    for (next = (at + 1) & s->table_mask; s->table[next]; next = (next + 1) & s->table_mask) {
        uint32_t home = bucket_of(s, s->slots[s->table[next] - 1].holder);

        if (((next - home) & s->table_mask) < ((next - at) & s->table_mask))
            continue; /* its search doesn't pass the hole */
        s->table[at] = s->table[next];
        at = next;
    }
    s->table[at] = 0;
}

/* Make room for another slot. What has grown before memory ran out stays, and is used later. */
static int grow(struct kvsel *s)
{
    uint32_t max = s->max_slots ? s->max_slots * 2 : FIRST_SLOTS;
    uint32_t *table;

#define GROW(column)                                                \
    do {                                                            \
        void *grown = realloc(s->column, max * sizeof(*s->column)); \
        if (!grown)                                                 \
            return -ENOMEM;                                         \
        s->column = grown;                                          \
    } while (0)
    GROW(slots);
    GROW(waiting);
    GROW(context);
    GROW(requests);
    GROW(queued);
    GROW(blocks);
    GROW(capacity);
    GROW(factor);
    GROW(state);
    GROW(uncovered);
    GROW(held);
    GROW(shared);
    GROW(extra);
    GROW(lora);
    GROW(cost);
    GROW(match);
    GROW(reason);
    GROW(seen);
    GROW(found);
#undef GROW
    table = calloc(max * 2, sizeof(*table));
    if (!table)
        return -ENOMEM;
    memset(s->seen + s->max_slots, 0, (max - s->max_slots) * sizeof(*s->seen));
    memset(s->shared + s->max_slots, 0, (max - s->max_slots) * sizeof(*s->shared));
    free(s->table);
    s->table = table;
    s->table_mask = max * 2 - 1;
    s->max_slots = max;
    for (uint32_t i = 0; i < s->n_slots; i++)
        if (s->slots[i].used)
            table_add(s, i);
    return 0;
}

int kvsel_slot_make(struct kvsel *s, struct kv_holder holder, uint32_t *ret)
{
    uint32_t slot = kvsel_slot_find(s, holder);

    if (slot != KVSEL_NO_SLOT) {
        *ret = slot;
        return 0;
    }
    if (s->n_used >= s->opts.max_workers)
        return -ENOSPC;
    if (s->free_slot == KVSEL_NO_SLOT && s->n_slots == s->max_slots && grow(s) < 0)
        return -ENOMEM;
    slot = s->free_slot;
    if (slot != KVSEL_NO_SLOT)
        s->free_slot = s->slots[slot].next_free;
    else
        slot = s->n_slots++;
    s->slots[slot] = (struct kvsel_slot){.holder = holder, .used = true, .trust = 1};
    s->waiting[slot] = s->context[slot] = s->requests[slot] = s->queued[slot] = 0;
    s->blocks[slot] = s->capacity[slot] = 0;
    s->factor[slot] = 1;
    s->state[slot] = KVSEL_GONE;
    s->n_used++;
    table_add(s, slot);
    *ret = slot;
    return 0;
}

static void texts_fini(struct kvsel_texts *texts)
{
    for (size_t i = 0; i < texts->n; i++)
        free(texts->items[i]);
    free(texts->items);
    *texts = (struct kvsel_texts){0};
}

static int texts_copy(struct kvsel_texts *texts, const char *const *items, size_t n)
{
    *texts = (struct kvsel_texts){.items = n ? calloc(n, sizeof(char *)) : NULL};
    if (n && !texts->items)
        return -ENOMEM;
    for (; texts->n < n; texts->n++) {
        texts->items[texts->n] = items[texts->n] ? strdup(items[texts->n]) : NULL;
        if (!texts->items[texts->n]) {
            int rc = items[texts->n] ? -ENOMEM : -EINVAL;

            texts_fini(texts);
            return rc;
        }
    }
    return 0;
}

bool kvsel_texts_have(const struct kvsel_texts *texts, const char *text)
{
    for (size_t i = 0; i < texts->n; i++)
        if (strcmp(texts->items[i], text) == 0)
            return true;
    return false;
}

void kvsel_slot_drop(struct kvsel *s, uint32_t slot)
{
    struct kvsel_slot *at = &s->slots[slot];

    if (at->known || at->n_bookings > 0)
        return;
    kvsel_soon_end_slot(s, slot);
    table_remove(s, slot);
    texts_fini(&at->labels);
    texts_fini(&at->loras);
    at->used = false;
    at->next_free = s->free_slot;
    s->free_slot = slot;
    s->n_used--;
}

/* Set a slot's state, and count it. */
static void set_state(struct kvsel *s, uint32_t slot, enum kvsel_reason state)
{
    bool was_up = s->state[slot] == KVSEL_FITS, up = state == KVSEL_FITS;

    s->n_failed += (state == KVSEL_FAILED) - (s->state[slot] == KVSEL_FAILED);
    s->state[slot] = (uint8_t)state;
    s->n_up += up - was_up;
    s->n_busy += (uint32_t)((up - was_up) * (s->waiting[slot] > 0));
}

static void update_state(struct kvsel *s, uint32_t slot)
{
    const struct kvsel_slot *at = &s->slots[slot];

    set_state(s, slot,
              !at->known            ? KVSEL_GONE
              : at->draining        ? KVSEL_DRAINING
              : at->failed_until_ns ? KVSEL_FAILED
                                    : KVSEL_FITS);
}

void kvsel_slot_wait(struct kvsel *s, uint32_t slot, double tokens)
{
    bool was = s->waiting[slot] > 0;

    s->waiting[slot] += tokens;
    if (s->state[slot] == KVSEL_FITS)
        s->n_busy += (uint32_t)((s->waiting[slot] > 0) - was);
}

/* Count a known slot's limits, with @by 1, or no longer, with -1. */
static void count_limits(struct kvsel *s, uint32_t slot, int by)
{
    const struct kvsel_slot *at = &s->slots[slot];

    s->n_known += (uint32_t)by;
    s->n_limited += (uint32_t)(by * (at->max_requests > 0));
    s->n_partial += (uint32_t)(by * (at->roles != KVSEL_BOTH));
}

int kvsel_set_worker(struct kvsel *s, const struct kvsel_worker *worker)
{
    struct kvsel_worker w = {0};
    struct kvsel_texts labels = {0}, loras = {0};
    struct kvsel_slot *at;
    uint32_t slot = 0;
    int rc;

    if (!kv_sized(worker, "kvsel_worker"))
        return -EINVAL;
    KVSEL_READ(&w, worker);
    if ((w.roles & ~KVSEL_BOTH) || w.trust > 1 || w.trust != w.trust || !isfinite(w.speed) ||
        (w.n_labels && !w.labels) || (w.n_loras && !w.loras))
        return -EINVAL;
    rc = texts_copy(&labels, w.labels, w.n_labels);
    if (rc == 0)
        rc = texts_copy(&loras, w.loras, w.n_loras);
    if (rc == 0)
        rc = kvsel_slot_make(s, w.holder, &slot);
    if (rc < 0) {
        texts_fini(&labels);
        texts_fini(&loras);
        return rc;
    }
    at = &s->slots[slot];
    if (at->known)
        count_limits(s, slot, -1);
    texts_fini(&at->labels);
    texts_fini(&at->loras);
    at->labels = labels;
    at->loras = loras;
    at->known = true;
    at->draining = w.draining;
    at->roles = w.roles ? w.roles : KVSEL_BOTH;
    at->max_requests = w.max_requests;
    at->max_loras = w.max_loras;
    at->trust = w.trust == 0 ? 1 : KV_MAX(w.trust, 0);
    at->speed.stated = KV_MAX(w.speed, 0);
    s->capacity[slot] = (double)w.capacity;
    s->factor[slot] = kvsel_speed_factor(&at->speed, s->fleet_speed);
    count_limits(s, slot, 1);
    update_state(s, slot);
    return 0;
}

int kvsel_remove_worker(struct kvsel *s, struct kv_holder holder)
{
    uint32_t slot = kvsel_slot_find(s, holder);

    if (slot == KVSEL_NO_SLOT || !s->slots[slot].known)
        return -ENOENT;
    count_limits(s, slot, -1);
    s->slots[slot].known = false;
    s->slots[slot].failed_until_ns = 0;
    update_state(s, slot);
    kvsel_soon_end_slot(s, slot);
    kvsel_slot_drop(s, slot);
    return 0;
}

int kvsel_fail_worker(struct kvsel *s, struct kv_holder holder, uint64_t until_ns)
{
    uint32_t slot = kvsel_slot_find(s, holder);

    if (slot == KVSEL_NO_SLOT || !s->slots[slot].known)
        return -ENOENT;
    s->slots[slot].failed_until_ns = until_ns;
    update_state(s, slot);
    if (until_ns)
        kvsel_soon_end_slot(s, slot);
    return 0;
}

void kvsel_slots_heal(struct kvsel *s, uint64_t now_ns)
{
    for (uint32_t i = 0; i < s->n_slots && s->n_failed > 0; i++) {
        if (!s->slots[i].used || s->state[i] != KVSEL_FAILED ||
            s->slots[i].failed_until_ns > now_ns)
            continue;
        s->slots[i].failed_until_ns = 0;
        update_state(s, i);
    }
}

int kvsel_trust_worker(struct kvsel *s, struct kv_holder holder, double trust)
{
    uint32_t slot = kvsel_slot_find(s, holder);

    if (!(trust >= 0 && trust <= 1))
        return -EINVAL;
    if (slot == KVSEL_NO_SLOT || !s->slots[slot].known)
        return -ENOENT;
    s->slots[slot].trust = trust;
    return 0;
}

static void lora_remove(struct kvsel_texts *loras, size_t i)
{
    free(loras->items[i]);
    memmove(&loras->items[i], &loras->items[i + 1], (loras->n - i - 1) * sizeof(char *));
    loras->n--;
}

int kvsel_lora_use(struct kvsel *s, uint32_t slot, const char *lora)
{
    struct kvsel_texts *loras = &s->slots[slot].loras;
    uint32_t limit = s->slots[slot].max_loras, max = limit ? limit : KVSEL_KEPT_LORAS;
    char **items, *name;

    for (size_t i = 0; i < loras->n; i++) {
        if (strcmp(loras->items[i], lora) != 0)
            continue;
        name = loras->items[i];
        memmove(&loras->items[i], &loras->items[i + 1], (loras->n - i - 1) * sizeof(char *));
        loras->items[loras->n - 1] = name;
        return 0;
    }
    name = strdup(lora);
    items = name ? realloc(loras->items, (loras->n + 1) * sizeof(char *)) : NULL;
    if (!items) {
        free(name);
        return -ENOMEM;
    }
    loras->items = items;
    items[loras->n++] = name;
    if (loras->n > max)
        lora_remove(loras, 0);
    return 0;
}

int kvsel_set_lora(struct kvsel *s, struct kv_holder holder, const char *lora, bool loaded)
{
    uint32_t slot = kvsel_slot_find(s, holder);

    if (!lora)
        return -EINVAL;
    if (slot == KVSEL_NO_SLOT || !s->slots[slot].known)
        return -ENOENT;
    if (loaded)
        return kvsel_lora_use(s, slot, lora);
    for (size_t i = 0; i < s->slots[slot].loras.n; i++) {
        if (strcmp(s->slots[slot].loras.items[i], lora) == 0) {
            lora_remove(&s->slots[slot].loras, i);
            break;
        }
    }
    return 0;
}

static struct kvsel_load load_of(const struct kvsel *s, uint32_t slot)
{
    return (struct kvsel_load){.holder = s->slots[slot].holder,
                               .waiting = (uint64_t)(s->waiting[slot] + 0.5),
                               .context = (uint64_t)s->context[slot],
                               .blocks = (uint64_t)s->blocks[slot],
                               .requests = (uint32_t)s->requests[slot],
                               .queued = (uint32_t)s->queued[slot],
                               .speed = kvsel_speed_of(&s->slots[slot].speed),
                               .factor = s->factor[slot],
                               .known = s->slots[slot].known};
}

int kvsel_get_load(const struct kvsel *s, struct kv_holder holder, struct kvsel_load *ret)
{
    uint32_t slot = kvsel_slot_find(s, holder);

    if (slot == KVSEL_NO_SLOT)
        return -ENOENT;
    *ret = load_of(s, slot);
    return 0;
}

size_t kvsel_get_loads(const struct kvsel *s, struct kvsel_load *ret, size_t max)
{
    size_t n = 0;

    for (uint32_t i = 0; i < s->n_slots; i++) {
        if (!s->slots[i].used)
            continue;
        if (n < max)
            ret[n] = load_of(s, i);
        n++;
    }
    return n;
}

void kvsel_workers_fini(struct kvsel *s)
{
    for (uint32_t i = 0; i < s->n_slots; i++) {
        if (!s->slots[i].used)
            continue;
        texts_fini(&s->slots[i].labels);
        texts_fini(&s->slots[i].loras);
    }
    free(s->slots);
    free(s->table);
    double *columns[] = {s->waiting,  s->context, s->requests,  s->queued, s->blocks,
                         s->capacity, s->factor,  s->uncovered, s->held,   s->shared,
                         s->extra,    s->lora,    s->cost};
    for (size_t i = 0; i < KV_COUNT(columns); i++)
        free(columns[i]);
    free(s->state);
    free(s->match);
    free(s->reason);
    free(s->seen);
    free(s->found);
    free(s->strided);
}
