// SPDX-License-Identifier: Apache-2.0
/*
 * The books at the end: what the workers' registries have, what the indexer's dump says, and what the
 * store has. A copy is a key in one tier of one worker.
 *
 *     workers ── LOCATE ──► copies ◄── must be equal ──► /dump of the indexer
 *                             └─ in G4 ── must be there ──► the store itself
 */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "cli/whole/whole.h"
#include "event/router/router_event.h"
#include "kvbm_tokens.h"

#define NUDGE_NS KV_NS_PER_S
#define PAUSE_NS (50 * KV_NS_PER_MS)

/* A key that a worker has, with the bits of its tiers. */
struct copy {
    uint64_t key;
    uint32_t worker;
    uint8_t tiers;
    bool loose; /* the worker lacks a block before it: no prompt finds it, and no dump shows it */
};

struct copies {
    struct copy *list; /* by key, then worker; each pair once after sort_copies */
    size_t n, capacity;
    int rc; /* -ENOMEM sticks */
};

static void add(struct copies *c, struct copy copy)
{
    if (c->n == c->capacity) {
        size_t capacity = c->capacity ? 2 * c->capacity : 4096;
        struct copy *list = realloc(c->list, capacity * sizeof(*list));

        if (!list) {
            c->rc = -ENOMEM;
            return;
        }
        c->list = list;
        c->capacity = capacity;
    }
    c->list[c->n++] = copy;
}

static int by_key(const void *a, const void *b)
{
    const struct copy *x = a, *y = b;

    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return x->worker < y->worker ? -1 : x->worker > y->worker;
}

/* Sort, and join the tiers of equal pairs. */
static void sort_copies(struct copies *c)
{
    size_t n = 0;

    if (c->n > 0)
        qsort(c->list, c->n, sizeof(*c->list), by_key);
    for (size_t i = 0; i < c->n; i++) {
        if (n > 0 && by_key(&c->list[n - 1], &c->list[i]) == 0)
            c->list[n - 1].tiers |= c->list[i].tiers;
        else
            c->list[n++] = c->list[i];
    }
    c->n = n;
}

static void fini(struct copies *c)
{
    free(c->list);
    *c = (struct copies){0};
}

/* ---- keys ---- */

/* A key with the block before it in its prompt. */
struct key {
    uint64_t key, parent;
    uint32_t position; /* 0: no parent; UINT32_MAX: unknown, of an earlier run's disk tier */
};

struct keys {
    struct key *list; /* [n] distinct, by key */
    uint32_t *order;  /* [n] their numbers by position */
    size_t n;
};

static void keys_fini(struct keys *k)
{
    free(k->list);
    free(k->order);
    *k = (struct keys){0};
}

static int by_key_and_position(const void *a, const void *b)
{
    const struct key *x = a, *y = b;

    if (x->key != y->key)
        return x->key < y->key ? -1 : 1;
    return x->position < y->position ? -1 : x->position > y->position;
}

static long find(const struct keys *k, uint64_t key)
{
    size_t low = 0, high = k->n;

    while (low < high) {
        size_t middle = (low + high) / 2;

        if (k->list[middle].key < key)
            low = middle + 1;
        else
            high = middle;
    }
    return low < k->n && k->list[low].key == key ? (long)low : -1;
}

static void make_distinct(struct keys *k)
{
    size_t n = 0;

    if (k->n > 0)
        qsort(k->list, k->n, sizeof(*k->list), by_key_and_position);
    for (size_t i = 0; i < k->n; i++)
        if (n == 0 || k->list[n - 1].key != k->list[i].key)
            k->list[n++] = k->list[i];
    k->n = n;
}

/* Number the keys by their position: a counting sort. */
static int make_order(struct keys *k)
{
    uint32_t at = 0;

    k->order = malloc((k->n + 1) * sizeof(*k->order));
    for (uint32_t position = 0; k->order && position <= KC_PLAN_BLOCKS; position++)
        for (size_t i = 0; i < k->n; i++)
            if (KV_MIN(k->list[i].position, (uint32_t)KC_PLAN_BLOCKS) == position)
                k->order[at++] = (uint32_t)i;
    return k->order ? 0 : -ENOMEM;
}

static void add_prompt(struct kc_whole *w, uint64_t number, struct kc_request_message *request,
                       struct keys *ret)
{
    uint64_t hashes[KC_PLAN_BLOCKS];
    uint32_t n_tokens = kc_run_tokens(w, number, request);
    size_t n = kvbm_hash_tokens(w->tokens, n_tokens, w->plan.shape.page_size, 0,
                                KVBM_CHAIN_SEED_ZERO, NULL, NULL, hashes);

    for (size_t i = 0; i < n; i++)
        ret->list[ret->n++] = (struct key){hashes[i], i ? hashes[i - 1] : 0, (uint32_t)i};
}

/* Collect the keys of the first @n_requests requests, and those that a dump names (of an earlier run's disk tier). */
static int collect_keys(struct kc_whole *w, uint64_t n_requests, const struct copies *dump,
                        struct keys *ret)
{
    uint32_t most = (uint32_t)(w->opts.max_tokens / w->plan.shape.page_size) + 1;
    struct kc_request_message *request = calloc(1, sizeof(*request));

    *ret = (struct keys){.list = malloc((n_requests * most + dump->n + 1) * sizeof(*ret->list))};
    if (!ret->list || !request) {
        free(request);
        return -ENOMEM;
    }
    for (uint64_t i = 0; i < n_requests; i++)
        add_prompt(w, i, request, ret);
    for (size_t i = 0; i < dump->n; i++)
        ret->list[ret->n++] = (struct key){dump->list[i].key, 0, UINT32_MAX};
    make_distinct(ret);
    free(request);
    return make_order(ret);
}

/* ---- the workers' books ---- */

/* Ask a worker which of its tiers have each key. */
static int ask_places(struct kc_whole *w, uint32_t worker, uint32_t group, const struct keys *keys,
                      uint8_t *tiers)
{
    struct kc_message *message = w->message;
    int rc = 0;

    for (size_t at = 0, n; at < keys->n && rc == 0; at += n) {
        n = KV_MIN(keys->n - at, (size_t)KC_PLAN_IDS);
        message->kind = KC_MESSAGE_LOCATE;
        message->n = (uint32_t)n;
        message->group = group;
        for (size_t i = 0; i < n; i++)
            message->keys[i] = keys->list[at + i].key;
        rc = kc_crew_ask(w, worker, message);
        if (rc == 0)
            memcpy(tiers + at, message->places, n);
    }
    return rc;
}

/* Mark the keys that a worker has without a block before them: the indexer can't place them. */
static void mark_loose(const struct keys *keys, const uint8_t *tiers, bool *loose)
{
    for (size_t k = 0; k < keys->n; k++) {
        uint32_t i = keys->order[k];
        const struct key *key = &keys->list[i];
        long before = key->position && key->position != UINT32_MAX ? find(keys, key->parent) : -1;

        loose[i] = before >= 0 && (!tiers[before] || loose[before]);
    }
}

static int locate(struct kc_whole *w, uint32_t worker, uint32_t group, const struct keys *keys,
                  struct copies *ret)
{
    uint8_t *tiers = calloc(keys->n + 1, 1);
    bool *loose = calloc(keys->n + 1, sizeof(*loose));
    int rc = tiers && loose ? ask_places(w, worker, group, keys, tiers) : -ENOMEM;

    if (rc == 0)
        mark_loose(keys, tiers, loose);
    for (size_t i = 0; i < keys->n && rc == 0; i++)
        if (tiers[i])
            add(ret, (struct copy){keys->list[i].key, worker, tiers[i], loose[i]});
    free(tiers);
    free(loose);
    return rc < 0 ? rc : ret->rc;
}

static int tell_all(struct kc_whole *w, enum kc_message_kind kind, struct kv_error *error)
{
    for (uint32_t i = 0; i < w->plan.n_workers; i++) {
        int rc;

        w->message->kind = kind;
        rc = kc_crew_ask(w, i, w->message);
        rc = rc < 0 ? rc : w->message->done.status;
        if (rc < 0)
            return kv_fail(error, rc, 0, "worker %u doesn't %s: %s", i,
                           kind == KC_MESSAGE_SETTLE ? "settle" : "publish", strerror(-rc));
    }
    return 0;
}

/* ---- the indexer's books ---- */

static void read_events(struct kv_json *j, uint32_t first, struct copies *ret)
{
    struct kve_router_scratch scratch = {0};
    struct kve_router_event event;

    kv_json_array(j);
    while (kv_json_next_item(j) && kve_router_event_read(j, &scratch, &event) == 0) {
        uint32_t worker = (uint32_t)event.holder.worker - first;

        for (size_t i = 0; event.type == KVE_OP_STORE && i < event.n; i++)
            add(ret,
                (struct copy){event.blocks[i].hash, worker, (uint8_t)(1u << event.tier), false});
    }
    kve_router_scratch_fini(&scratch);
}

/* Read the copies of one tenant, whose instances begin with @first, in the indexer's dump. */
static int read_dump(struct kc_whole *w, const char *tenant, uint32_t first, struct copies *ret,
                     struct kv_error *error)
{
    const struct kv_buf *body;
    struct kv_json j;
    struct kv_str key;
    char name[64];
    int status =
        kc_http_request(kc_client_http(w->client), "/dump", KC_BODY_NONE, NULL, 0, &body, error);

    if (status != 200)
        return status < 0 ? status : kv_fail(error, -EPROTO, 0, "/dump: status %d", status);
    snprintf(name, sizeof(name), KC_PLAN_MODEL ":%s", tenant);
    kv_json_init(&j, body->data, body->len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        bool ours = kv_str_eq(key, name);

        kv_json_object(&j);
        while (kv_json_next_key(&j, &key)) {
            if (ours && kv_str_eq(key, "events"))
                read_events(&j, first, ret);
            else
                kv_json_skip(&j);
        }
    }
    if (kv_json_finish(&j) < 0)
        return kv_fail(error, -EPROTO, j.error.offset, "/dump: %.100s", j.error.text);
    sort_copies(ret);
    return ret->rc;
}

/* ---- comparing ---- */

static uint64_t count_bits(const struct copies *c)
{
    uint64_t n = 0;

    for (size_t i = 0; i < c->n; i++)
        n += (uint64_t)__builtin_popcount(c->list[i].tiers);
    return n;
}

static void note(struct kc_books *b, const struct copy *at, uint8_t worker_says, uint8_t other_says,
                 const char *other)
{
    if (!b->first[0])
        snprintf(b->first, sizeof(b->first),
                 "key %016" PRIx64
                 " of worker %u: tiers %x at the worker, %x by %s (bits: 1 G1, 2 G2, "
                 "4 G3, 8 G4)",
                 at->key, at->worker, worker_says, other_says, other);
}

static uint32_t bits(unsigned tiers)
{
    return (uint32_t)__builtin_popcount(tiers);
}

/* Copies that another's books lack of the workers', and have beyond them. */
struct difference {
    const char *name; /* of those books */
    uint64_t lacks, extra;
    uint64_t loose; /* copies that they rightly lack */
};

/* Compare a worker's copies of a key, or NULL, with another's, or NULL. */
static void compare_one(struct kc_whole *w, const struct copy *mine, const struct copy *theirs,
                        struct difference *ret)
{
    struct kc_books *b = &w->books;
    uint8_t here = mine ? mine->tiers : 0, there = theirs ? theirs->tiers : 0;
    uint8_t missing = here & (uint8_t)~there;

    if (missing && mine && mine->loose) {
        ret->loose += bits(missing);
        here &= there;
    }
    if (here != there)
        note(b, mine ? mine : theirs, here, there, ret->name);
    ret->lacks += bits(here & (uint8_t)~there);
    ret->extra += bits(there & (uint8_t)~here);
}

/* Compare two sorted lists. */
static void compare(struct kc_whole *w, const struct copies *mine, const struct copies *theirs,
                    struct difference *ret)
{
    size_t i = 0, k = 0;

    while (i < mine->n || k < theirs->n) {
        const struct copy *one = i < mine->n ? &mine->list[i] : NULL;
        const struct copy *other = k < theirs->n ? &theirs->list[k] : NULL;
        int order = !one ? 1 : !other ? -1 : by_key(one, other);

        compare_one(w, order <= 0 ? one : NULL, order >= 0 ? other : NULL, ret);
        i += order <= 0;
        k += order >= 0;
    }
}

static int compare_views(struct kc_whole *w, const struct copies *mine, const struct copies *dump,
                         struct kv_error *error)
{
    struct kc_books *b = &w->books;
    struct difference zmq = {.name = "the indexer"}, nats = {.name = "the indexer over NATS"};
    struct copies by_nats = {0};
    int rc = 0;

    b->copies = count_bits(mine);
    compare(w, mine, dump, &zmq);
    b->indexer_lacks = zmq.lacks;
    b->indexer_extra = zmq.extra;
    b->loose = zmq.loose;
    if (w->opts.nats) {
        rc = read_dump(w, KC_PLAN_NATS_TENANT, KC_PLAN_FIRST_ON_NATS, &by_nats, error);
        compare(w, mine, &by_nats, &nats);
        b->nats_lacks = nats.lacks;
        b->nats_extra = nats.extra;
        b->nats = true;
    }
    fini(&by_nats);
    return rc;
}

/* Compare what the workers believe of the store with what it says itself. */
static int compare_store(struct kc_whole *w, uint32_t group, const struct copies *mine,
                         const struct keys *keys)
{
    struct kc_books *b = &w->books;
    bool *there = calloc(keys->n + 1, sizeof(*there));
    uint64_t *list = malloc((keys->n + 1) * sizeof(*list));
    int rc = there && list ? 0 : -ENOMEM;
    size_t k = 0;

    for (size_t i = 0; i < keys->n && rc == 0; i++)
        list[i] = keys->list[i].key;
    rc = rc == 0 ? kc_audit_store(w, group, list, keys->n, there, &b->chunks) : rc;

    for (size_t i = 0; i < keys->n && rc == 0; i++)
        b->stored += there[i];
    for (size_t i = 0; i < mine->n && rc == 0; i++) {
        while (keys->list[k].key != mine->list[i].key)
            k++;
        if (!(mine->list[i].tiers & 1u << KV_TIER_EXTERNAL) || there[k])
            continue;
        b->store_lacks++;
        note(b, &mine->list[i], mine->list[i].tiers, 0, "the store");
    }
    b->store = rc == 0;
    free(there);
    free(list);
    return rc;
}

/* Compare with the store the copies of each group: @mine are those of group 0. The indexer leaves out
 * other groups. */
static int compare_stores(struct kc_whole *w, const struct copies *mine, const struct keys *keys)
{
    struct copies window = {0};
    int rc;

    w->books.stored = w->books.store_lacks = 0;
    rc = compare_store(w, 0, mine, keys);
    for (uint32_t i = 0; w->plan.shape.window && i < w->plan.n_workers && rc == 0; i++)
        rc = locate(w, i, 1, keys, &window);
    sort_copies(&window);
    w->books.window_copies = count_bits(&window);
    if (w->plan.shape.window && rc == 0)
        rc = compare_store(w, 1, &window, keys);
    fini(&window);
    return rc;
}

static bool views_equal(const struct kc_books *b)
{
    return b->indexer_lacks + b->indexer_extra + b->nats_lacks + b->nats_extra == 0;
}

/* Compare once. @ret_mine are the workers' copies, for the store. */
static int compare_once(struct kc_whole *w, struct keys *keys, struct copies *mine,
                        struct kv_error *error)
{
    struct copies dump = {0};
    int rc = read_dump(w, KC_PLAN_TENANT, KC_PLAN_FIRST_INSTANCE, &dump, error);

    w->books.first[0] = '\0';
    keys_fini(keys);
    mine->n = 0;
    if (rc == 0)
        rc = collect_keys(w, KV_MIN(w->next, w->opts.requests), &dump, keys);
    for (uint32_t i = 0; i < w->plan.n_workers && rc == 0; i++)
        rc = locate(w, i, 0, keys, mine);
    sort_copies(mine);
    w->books.keys = keys->n;
    rc = rc == 0 ? compare_views(w, mine, &dump, error) : rc;
    fini(&dump);
    return rc;
}

static int settle(struct kc_whole *w, struct keys *keys, struct copies *mine,
                  struct kv_error *error)
{
    const struct timespec pause = kv_timespec(PAUSE_NS);
    uint64_t begun, nudged;
    int rc = tell_all(w, KC_MESSAGE_SETTLE, error);

    begun = nudged = kv_now_ns();
    while (rc == 0 && !kc_whole_interrupted()) {
        rc = compare_once(w, keys, mine, error);
        w->books.settle_ms = (kv_now_ns() - begun) / KV_NS_PER_MS;
        if (views_equal(&w->books) || w->books.settle_ms > w->opts.settle_ms)
            break;
        if (kv_now_ns() > nudged + NUDGE_NS && rc == 0) {
            rc = tell_all(w, KC_MESSAGE_NUDGE, error);
            nudged = kv_now_ns();
        }
        nanosleep(&pause, NULL);
    }
    return rc;
}

int kc_books_compare(struct kc_whole *w, struct kv_error *error)
{
    struct kc_books *b = &w->books;
    struct keys keys = {0};
    struct copies mine = {0};
    int rc;

    kc_http_set_timeout(kc_client_http(w->client), 20000);
    rc = settle(w, &keys, &mine, error);
    if (rc == 0 && w->plan.store[0] && !kc_whole_interrupted())
        rc = compare_stores(w, &mine, &keys);
    w->interrupted = kc_whole_interrupted();
    b->done = rc == 0 && !w->interrupted;
    b->equal = b->done && views_equal(b) && b->store_lacks == 0 &&
               (w->opts.store || b->stored == b->chunks ||
                (!w->new_dir && b->stored < b->chunks)); /* of earlier runs with other prompts */
    if (b->done && !b->equal && !b->first[0])
        snprintf(b->first, sizeof(b->first), "%" PRIu64 " chunks in the store for %" PRIu64 " keys",
                 b->chunks, b->stored);
    keys_fini(&keys);
    fini(&mine);
    return rc == 0 || error->code ? rc : kv_fail(error, rc, 0, "the books: %s", strerror(-rc));
}
