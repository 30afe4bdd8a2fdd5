// SPDX-License-Identifier: Apache-2.0
#include "selector/cache.h"

#include <stdlib.h>
#include <string.h>

#include "base/core/mix.h"
#include "base/core/xxh.h"

static size_t bucket_of(const struct ksel_cache *c, const char *id, size_t len)
{
    return (size_t)kv_mix(kv_xxh64(id, len, kv_mix_secret.flip)) & (c->n_buckets - 1);
}

static size_t size_of(const struct ksel_kept *k)
{
    return sizeof(*k) + k->n_hashes * sizeof(*k->hashes) + k->id_len + strlen(k->model) +
           strlen(k->group) + (k->lora ? strlen(k->lora) : 0) +
           (k->session ? strlen(k->session) : 0) + 5;
}

/* Take @k out of all lists. */
static void unlink_kept(struct ksel_cache *c, struct ksel_kept *k)
{
    struct ksel_kept **at = &c->buckets[bucket_of(c, k->id, k->id_len)];

    while (*at != k)
        at = &(*at)->next;
    *at = k->next;
    *(k->older ? &k->older->newer : &c->oldest) = k->newer;
    *(k->newer ? &k->newer->older : &c->newest) = k->older;
    c->n--;
    c->bytes -= size_of(k);
}

static void drop(struct ksel_cache *c, struct ksel_kept *k)
{
    unlink_kept(c, k);
    free(k);
}

static struct ksel_kept *find(const struct ksel_cache *c, const char *id, size_t len)
{
    struct ksel_kept *k = c->n_buckets ? c->buckets[bucket_of(c, id, len)] : NULL;

    while (k && (k->id_len != len || memcmp(k->id, id, len) != 0))
        k = k->next;
    return k;
}

void ksel_cache_fini(struct ksel_cache *c)
{
    while (c->oldest)
        drop(c, c->oldest);
    free(c->buckets);
    c->buckets = NULL;
    c->n_buckets = 0;
}

/* Copy a text with its NUL to *@p, which moves behind it. NULL stays NULL. */
static const char *place(char **p, const char *text, size_t len)
{
    char *start = *p;

    if (!text)
        return NULL;
    memcpy(start, text, len);
    start[len] = '\0';
    *p += len + 1;
    return start;
}

static const char *place_text(char **p, const char *text)
{
    return place(p, text, text ? strlen(text) : 0);
}

/* Copy @from and all it points to into one piece of memory. */
static struct ksel_kept *copy(const struct ksel_kept *from)
{
    struct ksel_kept *k = malloc(size_of(from));
    char *p;

    if (!k)
        return NULL;
    *k = *from;
    k->hashes = (uint64_t *)(k + 1);
    if (k->n_hashes)
        memcpy(k->hashes, from->hashes, k->n_hashes * sizeof(*k->hashes));
    p = (char *)(k->hashes + k->n_hashes);
    k->id = p;
    (void)place(&p, from->id, from->id_len);
    k->model = place_text(&p, from->model);
    k->group = place_text(&p, from->group);
    k->lora = place_text(&p, from->lora);
    k->session = place_text(&p, from->session);
    return k;
}

static bool make_buckets(struct ksel_cache *c)
{
    size_t n = 64;

    while (n < c->max)
        n *= 2;
    if (!c->buckets)
        c->buckets = calloc(n, sizeof(*c->buckets));
    c->n_buckets = c->buckets ? n : 0;
    return c->buckets;
}

void ksel_cache_put(struct ksel_cache *c, const struct ksel_kept *kept, uint64_t now_ns)
{
    struct ksel_kept *k, *old = find(c, kept->id, kept->id_len), **bucket;

    if (old)
        drop(c, old);
    if (size_of(kept) > KSEL_CACHE_BYTES || !make_buckets(c))
        return;
    while (c->oldest && (c->n >= c->max || c->bytes > KSEL_CACHE_BYTES - size_of(kept) ||
                         c->oldest->until_ns <= now_ns))
        drop(c, c->oldest);
    k = copy(kept);
    if (!k)
        return;
    bucket = &c->buckets[bucket_of(c, k->id, k->id_len)];
    k->next = *bucket;
    *bucket = k;
    k->older = c->newest;
    k->newer = NULL;
    *(c->newest ? &c->newest->newer : &c->oldest) = k;
    c->newest = k;
    c->n++;
    c->bytes += size_of(k);
}

struct ksel_kept *ksel_cache_take(struct ksel_cache *c, const char *id, size_t len, uint64_t now_ns)
{
    struct ksel_kept *k = find(c, id, len);

    if (!k)
        return NULL;
    unlink_kept(c, k);
    if (k->until_ns > now_ns)
        return k;
    free(k);
    return NULL;
}
