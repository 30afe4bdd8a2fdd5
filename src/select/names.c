// SPDX-License-Identifier: Apache-2.0
#include "select/names.h"

#include "base/core/error.h"
#include "base/core/mix.h"
#include "base/core/xxh.h"

#define FIRST_BUCKETS 64

int kvsel_names_init(struct kvsel_names *names)
{
    *names = (struct kvsel_names){.buckets = calloc(FIRST_BUCKETS, sizeof(struct kvsel_name *)),
                                  .mask = FIRST_BUCKETS - 1};
    return names->buckets ? 0 : -ENOMEM;
}

void kvsel_names_fini(struct kvsel_names *names)
{
    free(names->buckets);
    names->buckets = NULL;
}

static uint64_t mix_of(const char *text, size_t len)
{
    return kv_mix(kv_xxh64(text, len, kv_mix_secret.flip));
}

struct kvsel_name *kvsel_names_find(const struct kvsel_names *names, const char *text, size_t len)
{
    uint64_t mix = mix_of(text, len);
    struct kvsel_name *at = names->buckets[mix & names->mask];

    while (at && (at->mix != mix || at->len != len || memcmp(at->text, text, len) != 0))
        at = at->next;
    return at;
}

/* Double the buckets. Without memory for them the chains get longer, and no more. */
static void grow(struct kvsel_names *names)
{
    size_t mask = names->mask * 2 + 1;
    struct kvsel_name **buckets = calloc(mask + 1, sizeof(struct kvsel_name *));

    if (!buckets)
        return;
    for (struct kvsel_name *at = names->oldest; at; at = at->newer) {
        at->next = buckets[at->mix & mask];
        buckets[at->mix & mask] = at;
    }
    free(names->buckets);
    names->buckets = buckets;
    names->mask = mask;
}

static void append(struct kvsel_names *names, struct kvsel_name *name)
{
    name->older = names->newest;
    name->newer = NULL;
    if (names->newest)
        names->newest->newer = name;
    else
        names->oldest = name;
    names->newest = name;
}

static void unlink_name(struct kvsel_names *names, struct kvsel_name *name)
{
    if (name->older)
        name->older->newer = name->newer;
    else
        names->oldest = name->newer;
    if (name->newer)
        name->newer->older = name->older;
    else
        names->newest = name->older;
}

void kvsel_names_add(struct kvsel_names *names, struct kvsel_name *name)
{
    if (names->n > names->mask)
        grow(names);
    name->mix = mix_of(name->text, name->len);
    name->next = names->buckets[name->mix & names->mask];
    names->buckets[name->mix & names->mask] = name;
    append(names, name);
    names->n++;
}

void kvsel_names_touch(struct kvsel_names *names, struct kvsel_name *name)
{
    if (names->newest == name)
        return;
    unlink_name(names, name);
    append(names, name);
}

void kvsel_names_remove(struct kvsel_names *names, struct kvsel_name *name)
{
    struct kvsel_name **at = &names->buckets[name->mix & names->mask];

    while (*at != name)
        at = &(*at)->next;
    *at = name->next;
    unlink_name(names, name);
    names->n--;
}
