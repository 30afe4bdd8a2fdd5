// SPDX-License-Identifier: Apache-2.0
#include "indexer/registry/names.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/mix.h"

#define FIRST_SLOTS 64

void ki_names_init(struct ki_names *names)
{
    pthread_rwlockattr_t attr;

    memset(names, 0, sizeof(*names));
    /* Queries come all the time: a writer that waited for a moment without any would starve. */
    pthread_rwlockattr_init(&attr);
    pthread_rwlockattr_setkind_np(&attr, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&names->lock, &attr);
    pthread_rwlockattr_destroy(&attr);
    names->sweep_at = KI_NAMES_SPARE;
}

void ki_names_fini(struct ki_names *names)
{
    for (size_t i = 0; i < names->n_slots; i++)
        free(names->slots[i]);
    free(names->slots);
    pthread_rwlock_destroy(&names->lock);
    memset(names, 0, sizeof(*names));
}

void ki_names_read(struct ki_names *names)
{
    pthread_rwlock_rdlock(&names->lock);
}

void ki_names_end(struct ki_names *names)
{
    pthread_rwlock_unlock(&names->lock);
}

/* Return the slot of @number, or the free one where it belongs. There is a free one. */
static struct ki_name **slot_of(const struct ki_names *names, uint64_t number)
{
    size_t mask = names->n_slots - 1, at = kv_mix(number) & mask;

    while (names->slots[at] && names->slots[at]->number != number)
        at = (at + 1) & mask;
    return &names->slots[at];
}

const struct ki_name *ki_names_find(const struct ki_names *names, uint64_t number)
{
    return names->n_slots ? *slot_of(names, number) : NULL;
}

/* Write @name as the key of a JSON member. It has no control characters. Returns its length. */
static size_t put_key(char *out, const char *name)
{
    char *p = out;

    *p++ = '"';
    for (; *name; name++) {
        if (*name == '"' || *name == '\\')
            *p++ = '\\';
        *p++ = *name;
    }
    *p++ = '"';
    *p++ = ':';
    return (size_t)(p - out);
}

static struct ki_name *make_name(uint64_t number, const char *text)
{
    size_t len = strlen(text), key_len = len + 3;
    struct ki_name *name;

    for (const char *p = text; *p; p++)
        key_len += *p == '"' || *p == '\\';
    name = malloc(sizeof(*name) + len + 1 + key_len);
    if (!name)
        return NULL;
    *name = (struct ki_name){.number = number, .key_len = (uint32_t)key_len};
    memcpy(name->text, text, len + 1);
    name->key = name->text + len + 1;
    put_key(name->text + len + 1, text);
    return name;
}

/* Put all names into @n_slots new slots, under the write lock. Returns false without memory. */
static bool move_to(struct ki_names *names, size_t n_slots)
{
    struct ki_name **old = names->slots, **slots = calloc(n_slots, sizeof(*slots));
    size_t n_old = names->n_slots;

    if (!slots)
        return false;
    names->slots = slots;
    names->n_slots = n_slots;
    for (size_t i = 0; i < n_old; i++)
        if (old[i])
            *slot_of(names, old[i]->number) = old[i];
    free(old);
    return true;
}

int ki_names_note(struct ki_names *names, uint64_t number, const char *name)
{
    const struct ki_name *known = ki_names_find(names, number);
    struct ki_name *fresh;
    int rc = 1;

    if (known)
        return strcmp(known->text, name) == 0 ? 0 : -EEXIST;
    fresh = make_name(number, name);
    if (!fresh)
        return -ENOMEM;
    pthread_rwlock_wrlock(&names->lock);
    if (2 * (names->n + 1) >= names->n_slots &&
        !move_to(names, KV_MAX(2 * names->n_slots, (size_t)FIRST_SLOTS)))
        rc = -ENOMEM;
    else
        *slot_of(names, number) = fresh;
    names->n += rc == 1;
    pthread_rwlock_unlock(&names->lock);
    if (rc < 0)
        free(fresh);
    return rc;
}

bool ki_names_sweep_is_due(const struct ki_names *names)
{
    return names->n >= names->sweep_at;
}

void ki_names_mark(struct ki_names *names, uint64_t number)
{
    struct ki_name *name = names->n_slots ? *slot_of(names, number) : NULL;

    if (name)
        name->needed = true;
}

void ki_names_sweep(struct ki_names *names)
{
    struct ki_name **slots = calloc(names->n_slots, sizeof(*slots)), **old = names->slots;

    if (!slots)
        return; /* it stays due */
    pthread_rwlock_wrlock(&names->lock);
    names->slots = slots;
    names->n = 0;
    for (size_t i = 0; i < names->n_slots; i++) {
        if (!old[i])
            continue;
        if (old[i]->needed) {
            old[i]->needed = false;
            *slot_of(names, old[i]->number) = old[i];
            names->n++;
        } else {
            free(old[i]);
        }
    }
    pthread_rwlock_unlock(&names->lock);
    free(old);
    names->sweep_at = 2 * names->n + KI_NAMES_SPARE;
}
