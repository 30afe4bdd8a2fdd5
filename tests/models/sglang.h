// SPDX-License-Identifier: Apache-2.0
/**
 * A model of SGLang's radix cache with its host tier (HiCache), as in sglang/srt/mem_cache
 * (radix_cache.py, events.py) of 0.5.23.
 *
 * - The tree has nodes of whole pages. A prompt that ends or branches within a node splits it.
 * - A finished request inserts its full pages; pages that are there already stay as they are, so no
 *   hash has two copies. Consecutive pages are one event, from the first missing page on.
 * - Leaf nodes that nobody uses are evicted, least recently used first, all pages of the node in one
 *   event, the first page first.
 * - With EAGLE the tree's keys are pairs of tokens: a page covers one token more.
 * - Nodes that were copied to the host leave the device alone when they are evicted, and leave the
 *   host later. A prompt that finds them there loads them back.
 * - A flush empties both tiers.
 *
 * Every page is an entry here; pages of one node share its number.
 */
#ifndef KV_TESTS_MODELS_SGLANG_H
#define KV_TESTS_MODELS_SGLANG_H

#include "base/core/xxh.h"
#include "base/json/msgpack.h"
#include "models/prompts.h"

#define SGLANG_PAGE 4
#define SGLANG_MAX_PAGES 512
#define SGLANG_MAX_CHAIN (PROMPT_MAX / SGLANG_PAGE)
#define SGLANG_MAX_REQUESTS 3
#define SGLANG_ROOT UINT16_MAX

struct sglang_opts {
    size_t device_pages, host_pages; /* host 0: none */
    bool eagle;
};

struct sglang_page {
    bool used, device, host;
    uint64_t hash;
    uint16_t parent;
    uint32_t node;
    uint32_t tokens[SGLANG_PAGE + 1];
    unsigned salt, lora, locks;
    uint64_t touched;
};

struct sglang_request {
    bool used;
    struct prompt prompt;
    uint16_t path[SGLANG_MAX_CHAIN];
    size_t n_path;
};

struct sglang {
    struct sglang_opts opts;
    struct sglang_page pages[SGLANG_MAX_PAGES];
    struct sglang_request requests[SGLANG_MAX_REQUESTS];
    uint64_t clock;
    uint32_t nodes;
    struct kv_buf events;
    uint32_t n_events;
};

static inline void sglang_init(struct sglang *s, const struct sglang_opts *opts)
{
    memset(s, 0, sizeof(*s));
    s->opts = *opts;
}

static inline void sglang_fini(struct sglang *s)
{
    kv_buf_fini(&s->events);
}

/* -- events ------------------------------------------------------------------------------------ */

static inline void sglang_put_text(struct kv_buf *out, const char *key, const char *value)
{
    kv_msgpack_put_str(out, key);
    kv_msgpack_put_str(out, value);
}

static inline void sglang_put_hashes(struct sglang *s, const uint16_t *pages, size_t n)
{
    kv_msgpack_put_str(&s->events, "block_hashes");
    kv_msgpack_put_array(&s->events, (uint32_t)n);
    for (size_t i = 0; i < n; i++)
        kv_msgpack_put_i64(&s->events, (int64_t)s->pages[pages[i]].hash);
}

static inline void sglang_put_tokens(struct sglang *s, const uint16_t *pages, size_t n)
{
    kv_msgpack_put_str(&s->events, "token_ids");
    kv_msgpack_put_array(&s->events, (uint32_t)(n * SGLANG_PAGE));
    for (size_t i = 0; i < n; i++) {
        const uint32_t *tokens = s->pages[pages[i]].tokens;

        for (size_t k = 0; k < SGLANG_PAGE; k++) {
            if (s->opts.eagle)
                kv_msgpack_put_array(&s->events, 2);
            kv_msgpack_put_u32s(&s->events, tokens + k, s->opts.eagle ? 2 : 1);
        }
    }
}

/* @pages follow one another in the tree. Members that are None are left out. */
static inline void sglang_stored(struct sglang *s, const uint16_t *pages, size_t n, bool host)
{
    const struct sglang_page *first = &s->pages[pages[0]];

    kv_msgpack_put_map(&s->events, 7 + (first->salt > 0) + (first->lora > 0));
    sglang_put_text(&s->events, "type", "BlockStored");
    sglang_put_hashes(s, pages, n);
    kv_msgpack_put_str(&s->events, "parent_block_hash");
    if (first->parent == SGLANG_ROOT)
        kv_msgpack_put_nil(&s->events);
    else
        kv_msgpack_put_i64(&s->events, (int64_t)s->pages[first->parent].hash);
    sglang_put_tokens(s, pages, n);
    kv_msgpack_put_str(&s->events, "block_size");
    kv_msgpack_put_u64(&s->events, SGLANG_PAGE);
    kv_msgpack_put_str(&s->events, "lora_id");
    kv_msgpack_put_nil(&s->events);
    sglang_put_text(&s->events, "medium", host ? "CPU_PINNED" : "GPU");
    if (first->salt)
        sglang_put_text(&s->events, "cache_salt", prompt_salts[first->salt]);
    if (first->lora)
        sglang_put_text(&s->events, "lora_name", prompt_loras[first->lora]);
    s->n_events++;
}

static inline void sglang_removed(struct sglang *s, const uint16_t *pages, size_t n, bool host)
{
    kv_msgpack_put_map(&s->events, 3);
    sglang_put_text(&s->events, "type", "BlockRemoved");
    sglang_put_hashes(s, pages, n);
    sglang_put_text(&s->events, "medium", host ? "CPU_PINNED" : "GPU");
    s->n_events++;
}

/* The batch so far; the next one begins. The caller's to free. */
static inline struct kv_buf sglang_take(struct sglang *s)
{
    struct kv_buf payload = KV_BUF_INIT;

    kv_msgpack_put_array(&payload, 3);
    kv_msgpack_put_double(&payload, 1.5);
    kv_msgpack_put_array(&payload, s->n_events);
    if (s->events.len)
        kv_buf_append(&payload, s->events.data, s->events.len);
    kv_msgpack_put_u64(&payload, 0);
    kv_buf_clear(&s->events);
    s->n_events = 0;
    return payload;
}

/* -- the tree ---------------------------------------------------------------------------------- */

static inline size_t sglang_n_pages(const struct sglang *s, const struct prompt *p)
{
    return p->n < s->opts.eagle ? 0 : (p->n - s->opts.eagle) / SGLANG_PAGE;
}

static inline uint16_t sglang_child(const struct sglang *s, uint16_t parent, const struct prompt *p,
                                    size_t i)
{
    size_t n = SGLANG_PAGE + s->opts.eagle;

    for (uint16_t k = 0; k < SGLANG_MAX_PAGES; k++) {
        const struct sglang_page *page = &s->pages[k];

        if (page->used && page->parent == parent && page->salt == p->salt &&
            page->lora == p->lora &&
            memcmp(page->tokens, p->tokens + i * SGLANG_PAGE, n * sizeof(uint32_t)) == 0)
            return k;
    }
    return SGLANG_ROOT;
}

/* The pages of @p that are in the tree, in any tier. */
static inline size_t sglang_path(const struct sglang *s, const struct prompt *p, uint16_t *ret)
{
    size_t n = sglang_n_pages(s, p), i = 0;

    for (uint16_t at = SGLANG_ROOT; i < n; i++) {
        at = sglang_child(s, at, p, i);
        if (at == SGLANG_ROOT)
            break;
        ret[i] = at;
    }
    return i;
}

/* The truth: pages of @p that are on the device; with @host, or can be loaded to it. */
static inline size_t sglang_lookup(const struct sglang *s, const struct prompt *p, bool host)
{
    uint16_t path[SGLANG_MAX_CHAIN];
    size_t n = sglang_path(s, p, path), i = 0;

    while (i < n && s->pages[path[i]].device)
        i++;
    while (host && i < n && s->pages[path[i]].host)
        i++;
    return i;
}

/* Where a prompt ends or branches within a node, the rest becomes a node of its own. */
static inline void sglang_split(struct sglang *s, const uint16_t *path, size_t n)
{
    uint32_t node = n ? s->pages[path[n - 1]].node : 0;
    bool below[SGLANG_MAX_PAGES] = {false};

    if (!n)
        return;
    below[path[n - 1]] = true;
    s->nodes++;
    for (size_t i = 0; i < SGLANG_MAX_CHAIN; i++) {
        for (uint16_t k = 0; k < SGLANG_MAX_PAGES; k++) {
            struct sglang_page *page = &s->pages[k];

            if (!page->used || page->parent == SGLANG_ROOT || !below[page->parent] || below[k] ||
                page->node != node)
                continue;
            below[k] = true;
            page->node = s->nodes;
        }
    }
}

static inline size_t sglang_count(const struct sglang *s, bool host)
{
    size_t n = 0;

    for (size_t k = 0; k < SGLANG_MAX_PAGES; k++)
        n += s->pages[k].used && (host ? s->pages[k].host : s->pages[k].device);
    return n;
}

/* All pages of @node, the first one first. */
static inline size_t sglang_node(const struct sglang *s, uint32_t node, uint16_t *ret)
{
    size_t n = 0;

    for (uint16_t k = 0; k < SGLANG_MAX_PAGES; k++) {
        const struct sglang_page *page = &s->pages[k];

        if (page->used && page->node == node &&
            (page->parent == SGLANG_ROOT || s->pages[page->parent].node != node))
            ret[n++] = k;
    }
    for (size_t i = 0; n && i < n; i++) {
        for (uint16_t k = 0; k < SGLANG_MAX_PAGES; k++) {
            if (s->pages[k].used && s->pages[k].node == node && s->pages[k].parent == ret[i])
                ret[n++] = k;
        }
    }
    return n;
}

/* Whether @page may be the last of a node to evict: in the tier, unused, and no child is in it. */
static inline bool sglang_is_leaf(const struct sglang *s, uint16_t page, bool host)
{
    const struct sglang_page *p = &s->pages[page];

    if (!p->used || p->locks || (host ? !p->host || p->device : !p->device))
        return false;
    for (uint16_t k = 0; k < SGLANG_MAX_PAGES; k++) {
        if (s->pages[k].used && s->pages[k].parent == page && (host || s->pages[k].device))
            return false;
    }
    return true;
}

/* Evict the least recently used leaf node of a tier. False: there is none. */
static inline bool sglang_evict(struct sglang *s, bool host)
{
    uint16_t victim = SGLANG_ROOT, pages[SGLANG_MAX_PAGES];
    size_t n;

    for (uint16_t k = 0; k < SGLANG_MAX_PAGES; k++) {
        if (sglang_is_leaf(s, k, host) &&
            (victim == SGLANG_ROOT || s->pages[k].touched < s->pages[victim].touched))
            victim = k;
    }
    if (victim == SGLANG_ROOT)
        return false;
    n = sglang_node(s, s->pages[victim].node, pages);
    sglang_removed(s, pages, n, host);
    for (size_t i = 0; i < n; i++) {
        struct sglang_page *page = &s->pages[pages[i]];

        page->device = host && page->device;
        page->host = !host && page->host;
        page->used = page->device || page->host;
    }
    return true;
}

static inline bool sglang_make_room(struct sglang *s, size_t n, bool host)
{
    size_t limit = host ? s->opts.host_pages : s->opts.device_pages;

    while (sglang_count(s, host) + n > limit) {
        if (!sglang_evict(s, host))
            return false;
    }
    return true;
}

/* -- requests ---------------------------------------------------------------------------------- */

static inline void sglang_lock(struct sglang *s, const uint16_t *path, size_t n, int by)
{
    for (size_t i = 0; i < n; i++) {
        s->pages[path[i]].locks += (unsigned)by;
        s->pages[path[i]].touched = s->clock;
    }
}

/* Pages of a path that only the host has come back to the device. */
static inline void sglang_load(struct sglang *s, const uint16_t *path, size_t n)
{
    size_t from = 0;

    while (from < n && s->pages[path[from]].device)
        from++;
    if (from == n || !sglang_make_room(s, n - from, false))
        return;
    for (size_t i = from; i < n; i++)
        s->pages[path[i]].device = true;
    sglang_stored(s, path + from, n - from, false);
}

static inline struct sglang_request *sglang_start(struct sglang *s, const struct prompt *p)
{
    struct sglang_request *r = s->requests;

    while (r < s->requests + SGLANG_MAX_REQUESTS && r->used)
        r++;
    if (r == s->requests + SGLANG_MAX_REQUESTS)
        return NULL;
    s->clock++;
    *r = (struct sglang_request){.used = true, .prompt = *p};
    r->n_path = sglang_path(s, p, r->path);
    sglang_split(s, r->path, r->n_path);
    sglang_lock(s, r->path, r->n_path, 1);
    sglang_load(s, r->path, r->n_path);
    return r;
}

/* Insert the request's full pages and let go of it. */
static inline void sglang_finish(struct sglang *s, struct sglang_request *r)
{
    uint16_t path[SGLANG_MAX_CHAIN];
    size_t n = sglang_n_pages(s, &r->prompt), had = sglang_path(s, &r->prompt, path), to = had;
    size_t window = SGLANG_PAGE + s->opts.eagle;
    bool whole = sglang_lookup(s, &r->prompt, false) == had;

    s->clock++;
    sglang_split(s, path, had);
    sglang_lock(s, path, had, 1);
    if (whole && sglang_make_room(s, n - had, false)) {
        s->nodes++;
        for (uint16_t k = 0; k < SGLANG_MAX_PAGES && to < n; k++) {
            struct sglang_page *page = &s->pages[k];
            uint64_t extra[3] = {to ? s->pages[path[to - 1]].hash : 0, r->prompt.salt,
                                 r->prompt.lora};

            if (page->used)
                continue;
            *page = (struct sglang_page){.used = true,
                                         .device = true,
                                         .parent = to ? path[to - 1] : SGLANG_ROOT,
                                         .node = s->nodes,
                                         .salt = r->prompt.salt,
                                         .lora = r->prompt.lora,
                                         .touched = s->clock};
            memcpy(page->tokens, r->prompt.tokens + to * SGLANG_PAGE, window * sizeof(uint32_t));
            page->hash = kv_xxh64(page->tokens, window * sizeof(uint32_t),
                                  kv_xxh64(extra, sizeof(extra), 2));
            path[to++] = k;
        }
        if (to > had)
            sglang_stored(s, path + had, to - had, false);
    }
    sglang_lock(s, path, had, -1);
    sglang_lock(s, r->path, r->n_path, -1);
    r->used = false;
}

/* Copy the nodes of a prompt to the host, each after the one above it. */
static inline void sglang_back_up(struct sglang *s, const struct prompt *p)
{
    uint16_t path[SGLANG_MAX_CHAIN];
    size_t n = sglang_path(s, p, path);

    sglang_split(s, path, n);
    for (size_t i = 0, end; i < n; i = end) {
        for (end = i + 1; end < n && s->pages[path[end]].node == s->pages[path[i]].node; end++)
            ;
        if (s->pages[path[i]].host)
            continue;
        if (!s->pages[path[i]].device || !sglang_make_room(s, end - i, true))
            return;
        sglang_stored(s, path + i, end - i, true);
        for (size_t k = i; k < end; k++)
            s->pages[path[k]].host = true;
    }
}

static inline void sglang_flush(struct sglang *s)
{
    memset(s->pages, 0, sizeof(s->pages));
    memset(s->requests, 0, sizeof(s->requests));
    kv_msgpack_put_map(&s->events, 1);
    sglang_put_text(&s->events, "type", "AllBlocksCleared");
    s->n_events++;
}

#endif
