// SPDX-License-Identifier: Apache-2.0
#include "advisor/packer.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "tiered/pack_sweep.h"

enum { COLD = 65536, A_DROP = 256 };
#define INTERVAL_NS (60 * KV_NS_PER_S) /* between two gatherings that find nothing */
#define LARGEST (UINT64_C(4) << 20)    /* a longer blob gains nothing from a pack */
#define GRACE_NS (3600 * KV_NS_PER_S)

enum phase { IDLE, WRITING, DROPPING };

struct kva_packer {
    struct kva_packer_opts opts;
    unsigned member;
    enum phase phase;
    uint64_t next_ns;  /* IDLE: when to gather next; DROPPING: when the single blobs may go */
    uint64_t gathered; /* scans, when it gathered last */
    uint64_t cared;    /* scans, when it looked after old packs last */
    bool nothing;      /* that gathering found nothing */
    uint32_t part;
    struct kva_cold *cold; /* COLD */
    uint32_t *order;       /* of the blobs gathered */
    size_t n, at;          /* at: the next of the order to be packed */
    size_t n_doubled;      /* first in the order: a pack has them already */
    uint8_t *keys;         /* of one pack */
    int *each;
    uint8_t *drop; /* keys of blobs in packs, whose single ones go */
    size_t n_drop, dropped;
    pthread_mutex_t lock; /* guards stats */
    struct kva_packer_stats stats;
};

static uint32_t now_s(void)
{
    return (uint32_t)(kv_wall_ns() / KV_NS_PER_S);
}

unsigned kva_pack_member(const struct kva_volumes *volumes)
{
    unsigned m = (unsigned)volumes->config.n_members - 1;

    while (m > 0 && volumes->config.members[m].read_only)
        m--;
    return m;
}

struct kva_cold_opts kva_cold_opts(const struct kva_packing *packing, uint32_t now)
{
    uint64_t most = packing->max_bytes ? packing->max_bytes : TRD_PACK_MAX_BYTES;

    return (struct kva_cold_opts){.before_s = now - KV_MIN(now, packing->idle_s),
                                  .max_bytes = KV_MIN(LARGEST, most / 2),
                                  .parts = 1};
}

int kva_packer_create(const struct kva_packer_opts *opts, struct kva_packer **ret)
{
    struct kva_packer *p = calloc(1, sizeof(*p));

    if (!p)
        return -ENOMEM;
    pthread_mutex_init(&p->lock, NULL);
    p->opts = *opts;
    p->member = kva_pack_member(opts->volumes);
    if (!p->opts.packing.min_bytes)
        p->opts.packing.min_bytes = TRD_PACK_MIN_BYTES;
    if (!p->opts.packing.max_bytes)
        p->opts.packing.max_bytes = TRD_PACK_MAX_BYTES;
    /* a pack ends before the blob that it has no room for: it must be enough then */
    p->opts.packing.min_bytes = KV_MIN(p->opts.packing.min_bytes, p->opts.packing.max_bytes / 2);
    if (opts->packing.idle_s) {
        p->cold = calloc(COLD, sizeof(*p->cold));
        p->order = calloc(COLD, sizeof(*p->order));
        p->keys = calloc(COLD, KVA_KEY);
        p->drop = calloc(COLD, KVA_KEY);
        p->each = calloc(COLD, sizeof(*p->each));
    }
    if (opts->packing.idle_s && (!p->cold || !p->order || !p->keys || !p->drop || !p->each)) {
        kva_packer_destroy(p);
        return -ENOMEM;
    }
    *ret = p;
    return 0;
}

void kva_packer_destroy(struct kva_packer *p)
{
    if (!p)
        return;
    pthread_mutex_destroy(&p->lock);
    free(p->cold);
    free(p->order);
    free(p->keys);
    free(p->drop);
    free(p->each);
    free(p);
}

void kva_packer_reset(struct kva_packer *p)
{
    p->phase = IDLE;
    p->next_ns = 0;
    p->n = p->at = p->n_drop = 0;
    p->gathered = p->cared = 0;
}

void kva_packer_get_stats(struct kva_packer *p, struct kva_packer_stats *ret)
{
    pthread_mutex_lock(&p->lock);
    *ret = p->stats;
    pthread_mutex_unlock(&p->lock);
}

static void count(struct kva_packer *p, uint64_t *of, uint64_t n)
{
    pthread_mutex_lock(&p->lock);
    *of += n;
    pthread_mutex_unlock(&p->lock);
}

/* -- calls ------------------------------------------------------------------------------------- */

static bool hook_may(void *arg)
{
    struct kva_packer *p = arg;

    return kva_leader_is(p->opts.leader) && p->opts.wait(p->opts.arg, 0);
}

static bool hook_wait(void *arg, uint64_t ns)
{
    struct kva_packer *p = arg;

    return p->opts.wait(p->opts.arg, kv_now_ns() + ns);
}

static bool hook_pay(void *arg, uint64_t blobs, uint64_t bytes)
{
    struct kva_packer *p = arg;

    return p->opts.pay(p->opts.arg, blobs, bytes) && hook_may(p);
}

static struct kvs_store *store_of(struct kva_packer *p)
{
    return p->opts.volumes->stores[p->member];
}

/* Begin calls of tiered/pack.h. */
static int begin(struct kva_packer *p, struct trd_packing *ret)
{
    int rc = trd_packing_init(ret, store_of(p), store_of(p));

    ret->catalog = &p->opts.volumes->packs[p->member];
    ret->min_bytes = p->opts.packing.min_bytes;
    ret->max_bytes = p->opts.packing.max_bytes;
    ret->may = hook_may;
    ret->wait = hook_wait;
    ret->pay = hook_pay;
    ret->arg = p;
    return rc;
}

static void say_failed(struct kva_packer *p, const char *what, int rc)
{
    static struct kv_log_rate rate;

    count(p, &p->stats.failed, 1);
    p->next_ns = kv_now_ns() + INTERVAL_NS;
    if (kv_log_allowed(&rate, 10))
        kv_log_warn("advisor", "packing has failed; it is tried again",
                    "member=%s what=%s reason=\"%s\"",
                    p->opts.volumes->config.members[p->member].name, what, strerror(-rc));
}

/* -- order ------------------------------------------------------------------------------------- */

/* Trees of blobs, by their numbers. */
struct trees {
    const struct kva_cold *cold;
    size_t n;
    uint32_t *up, *child, *sibling;
};

static uint32_t find_record(const struct trees *t, uint32_t record)
{
    size_t from = 0, to = t->n;

    while (from < to) {
        size_t mid = (from + to) / 2;

        if (t->cold[mid].at < record)
            from = mid + 1;
        else
            to = mid;
    }
    return from < t->n && t->cold[from].at == record ? (uint32_t)from : KVA_NONE;
}

static void grow(struct trees *t)
{
    for (size_t i = 0; i < t->n; i++)
        t->child[i] = KVA_NONE;
    for (size_t i = t->n; i-- > 0;) { /* so that older siblings come first */
        uint32_t up = t->cold[i].parent == KVA_NONE ? KVA_NONE : find_record(t, t->cold[i].parent);

        t->up[i] = up;
        t->sibling[i] = KVA_NONE;
        if (up == KVA_NONE)
            continue;
        t->sibling[i] = t->child[up];
        t->child[up] = (uint32_t)i;
    }
}

/* Write a tree, each blob behind its parent and before its siblings. */
static size_t walk(const struct trees *t, uint32_t root, bool *seen, uint32_t *ret)
{
    uint32_t i = root;
    size_t n = 0;

    for (;;) {
        seen[i] = true;
        ret[n++] = i;
        if (t->child[i] != KVA_NONE) {
            i = t->child[i];
            continue;
        }
        while (i != root && t->sibling[i] == KVA_NONE)
            i = t->up[i];
        if (i == root)
            return n;
        i = t->sibling[i];
    }
}

static int by_chain(const void *a, const void *b)
{
    const struct kva_cold *x = *(const struct kva_cold *const *)a;
    const struct kva_cold *y = *(const struct kva_cold *const *)b;

    return x->chain != y->chain ? (x->chain > y->chain) - (x->chain < y->chain)
                                : (x->at > y->at) - (x->at < y->at);
}

int kva_order_cold(const struct kva_cold *cold, size_t n, uint32_t *ret)
{
    uint32_t *links = calloc(3 * n + 1, sizeof(*links));
    const struct kva_cold **roots = calloc(n + 1, sizeof(*roots));
    bool *seen = calloc(n + 1, sizeof(*seen));
    struct trees t = {.cold = cold, .n = n};
    size_t n_roots = 0, m = 0;
    int rc = links && roots && seen ? 0 : -ENOMEM;

    if (rc == 0) {
        t.up = links;
        t.child = links + n;
        t.sibling = links + 2 * n;
        grow(&t);
        for (size_t i = 0; i < n; i++)
            if (t.up[i] == KVA_NONE)
                roots[n_roots++] = &cold[i];
        qsort(roots, n_roots, sizeof(*roots), by_chain);
        for (size_t i = 0; i < n_roots; i++)
            m += walk(&t, (uint32_t)(roots[i] - cold), seen, ret + m);
        for (size_t i = 0; i < n; i++) /* links of records that were used anew may form a ring */
            if (!seen[i])
                ret[m++] = (uint32_t)i;
    }
    free(links);
    free(roots);
    free(seen);
    return rc;
}

/* -- gathering --------------------------------------------------------------------------------- */

/* Copy the cold blobs of one part, or count those of all (@into false). */
static size_t take_cold(struct kva_packer *p, const struct kva_cold_opts *opts, bool into)
{
    struct kva_world *world = p->opts.world;
    uint32_t at = 0;
    size_t n = 0;

    do {
        size_t found;

        pthread_mutex_lock(&world->lock);
        found = kva_index_cold(world->index, &at, opts, p->cold + (into ? n : 0),
                               into ? COLD - n : COLD);
        pthread_mutex_unlock(&world->lock);
        n += found;
    } while (at && !(into && n == COLD));
    return n;
}

/* Put those first that a pack has already: a packer died before it removed the single blobs. */
static void doubled_first(struct kva_packer *p)
{
    struct trd_packs *packs = trd_catalog_hold(&p->opts.volumes->packs[p->member]);
    uint32_t *order = (uint32_t *)(void *)p->each; /* of no use now, and as long */
    size_t n = 0;

    p->n_doubled = 0;
    for (int doubled = 1; packs && doubled >= 0; doubled--) {
        for (size_t i = 0; i < p->n; i++) {
            struct trd_packed place;
            size_t at = 0;

            if (trd_packs_next(packs, p->cold[p->order[i]].key, KVA_KEY, &at, &place) == doubled)
                order[n++] = p->order[i];
        }
        if (doubled)
            p->n_doubled = n;
    }
    if (packs)
        memcpy(p->order, order, p->n * sizeof(*order));
    trd_packs_release(packs);
}

/* Gather cold blobs. Returns whether they make a pack. */
static bool gather(struct kva_packer *p)
{
    struct kva_cold_opts opts = kva_cold_opts(&p->opts.packing, now_s());
    uint64_t bytes = 0;
    int rc;

    opts.parts = (uint32_t)(take_cold(p, &opts, false) / (COLD / 2) + 1);
    opts.part = p->part++ % opts.parts;
    p->n = take_cold(p, &opts, true);
    p->at = p->n_drop = p->dropped = 0;
    rc = kva_order_cold(p->cold, p->n, p->order);
    if (rc < 0) {
        say_failed(p, "order", rc);
        return false;
    }
    doubled_first(p);
    for (size_t i = p->n_doubled; i < p->n; i++)
        bytes += p->cold[p->order[i]].bytes - KVA_UNIT;
    return p->n_doubled || bytes >= p->opts.packing.min_bytes;
}

/* -- writing ----------------------------------------------------------------------------------- */

/* Take the keys of the next pack, as far as they are still cold. Returns their number, and that of bytes. */
static size_t next_pack(struct kva_packer *p, uint64_t *ret_bytes)
{
    struct kva_cold_opts opts = kva_cold_opts(&p->opts.packing, now_s());
    size_t end = p->at < p->n_doubled ? p->n_doubled : p->n, n = 0;
    struct kva_world *world = p->opts.world;

    *ret_bytes = 0;
    pthread_mutex_lock(&world->lock);
    for (; p->at < end; p->at++) {
        const struct kva_cold *cold = &p->cold[p->order[p->at]];

        if (!kva_index_is_cold(world->index, cold->key, &opts) ||
            p->opts.rests(p->opts.arg, cold->key))
            continue;
        if (n && *ret_bytes + cold->bytes > p->opts.packing.max_bytes)
            break;
        memcpy(p->keys + n++ * KVA_KEY, cold->key, KVA_KEY);
        *ret_bytes += cold->bytes;
    }
    pthread_mutex_unlock(&world->lock);
    return n;
}

/* Note how each blob of a pack ended. */
static void note_written(struct kva_packer *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint8_t *key = p->keys + i * KVA_KEY;

        if (p->each[i] == 0) {
            memcpy(p->drop + p->n_drop++ * KVA_KEY, key, KVA_KEY);
            continue;
        }
        if (p->each[i] == -ENOENT &&
            kva_volumes_look(p->opts.volumes, p->member, key) == KVS_MISSING) {
            pthread_mutex_lock(&p->opts.world->lock);
            kva_index_gone(p->opts.world->index, p->member, key);
            pthread_mutex_unlock(&p->opts.world->lock);
        } else {
            p->opts.rest(p->opts.arg, key);
        }
    }
}

/* The blobs are packed, as far as they could be. */
static void end_writing(struct kva_packer *p)
{
    p->phase = p->n_drop ? DROPPING : IDLE;
    p->nothing = !p->n_drop;
    p->next_ns =
        kv_now_ns() + (p->n_drop ? p->opts.volumes->config.linger_ms * KV_NS_PER_MS : INTERVAL_NS);
}

/* Write the next pack. Returns false: not now. */
static bool write_next(struct kva_packer *p)
{
    size_t before = p->at, n;
    bool doubled = before < p->n_doubled;
    struct trd_packing packing;
    uint64_t bytes;
    int rc;

    n = next_pack(p, &bytes);
    if (!n || (!doubled && bytes - n * KVA_UNIT < p->opts.packing.min_bytes)) {
        if (!doubled)
            end_writing(p);
        return true;
    }
    if (!hook_pay(p, n, 2 * bytes)) {
        p->at = before;
        return false;
    }
    rc = begin(p, &packing);
    if (doubled)
        packing.min_bytes = 1;
    if (rc == 0)
        rc = trd_pack_write(&packing, p->keys, KVA_KEY, n, p->each);
    count(p, &p->stats.packs, packing.n_packs);
    count(p, &p->stats.bytes, packing.n_bytes);
    if (rc >= 0) {
        count(p, &p->stats.blobs, (uint64_t)rc);
        note_written(p, n);
        rc = trd_catalog_read(packing.catalog, packing.to, 0, NULL);
    }
    trd_packing_fini(&packing);
    if (rc < 0) {
        end_writing(p);
        say_failed(p, "write", rc);
    }
    return true;
}

/* -- removing single blobs --------------------------------------------------------------------- */

static void note_dropped(struct kva_packer *p, const uint8_t *keys, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const uint8_t *key = keys + i * KVA_KEY;
        uint8_t single = KVS_MISSING;

        if (p->each[i] != 1 && kvs_look(store_of(p), key, KVA_KEY, 1, &single) < 0)
            single = KVS_UNKNOWN;
        if (single != KVS_MISSING) {
            p->opts.rest(p->opts.arg, key);
            continue;
        }
        pthread_mutex_lock(&p->opts.world->lock);
        kva_index_packed(p->opts.world->index, p->member, key);
        pthread_mutex_unlock(&p->opts.world->lock);
        count(p, &p->stats.dropped, p->each[i] == 1);
    }
}

/* Remove the next single blobs that packs have. Returns false: not now. */
static bool drop_next(struct kva_packer *p)
{
    const uint8_t *keys = p->drop + p->dropped * KVA_KEY;
    size_t n = KV_MIN(p->n_drop - p->dropped, (size_t)A_DROP);
    struct trd_packing packing;
    int rc;

    if (kv_now_ns() < p->next_ns || !hook_pay(p, n, 0))
        return false;
    if (kva_leader_begin(p->opts.leader, keys, n) < 0)
        return false;
    rc = begin(p, &packing);
    if (rc == 0)
        rc = trd_pack_drop(&packing, keys, KVA_KEY, n, p->each);
    kva_leader_end(p->opts.leader);
    trd_packing_fini(&packing);
    p->dropped += n;
    if (rc >= 0)
        note_dropped(p, keys, n);
    if (p->dropped == p->n_drop || rc < 0) {
        p->phase = IDLE;
        p->next_ns = 0;
    }
    if (rc < 0 && rc != -ECANCELED)
        say_failed(p, "drop", rc);
    return true;
}

/* -- old packs --------------------------------------------------------------------------------- */

/* Remove packs that nobody has published for the grace time, as this process has seen: no clock tells that. */
static int remove_strays(struct kva_packer *p)
{
    struct kva_volumes *v = p->opts.volumes;
    uint64_t grace_ns =
        p->opts.packing.grace_ms ? p->opts.packing.grace_ms * KV_NS_PER_MS : GRACE_NS;
    struct kva_stray old[KVA_STRAYS];
    struct trd_keys published = {0};
    size_t n = 0;
    int rc;

    pthread_mutex_lock(&p->opts.world->lock);
    for (size_t i = 0; i < v->strays[p->member].n; i++)
        if (kv_now_ns() - v->strays[p->member].of[i].since_ns >= grace_ns)
            old[n++] = v->strays[p->member].of[i];
    pthread_mutex_unlock(&p->opts.world->lock);
    rc = n ? trd_published_packs(store_of(p), &published) : 0;
    for (size_t i = 0; i < n && rc >= 0 && hook_may(p); i++) {
        if (trd_keys_has(&published, old[i].key, TRD_PACK_KEY))
            continue;
        rc = kvs_delete_chunk(store_of(p), old[i].key, TRD_PACK_KEY);
        count(p, &p->stats.strays, rc >= 0);
    }
    trd_keys_fini(&published);
    return KV_MIN(rc, 0);
}

static int rewrite_poor(struct kva_packer *p)
{
    struct trd_packs *packs = trd_catalog_hold(&p->opts.volumes->packs[p->member]);
    kv_store_swept swept = {.size = sizeof(swept)};
    struct trd_weight weight;
    struct trd_packing packing;
    int rc;

    trd_weigh_packs(packs, &weight);
    trd_packs_release(packs);
    if (!weight.poor)
        return 0;
    rc = begin(p, &packing);
    if (rc == 0)
        rc = trd_rewrite_packs(&packing, p->opts.volumes->config.linger_ms * KV_NS_PER_MS, &swept);
    if (rc == 0) {
        count(p, &p->stats.rewritten, weight.poor);
        rc = swept.errors ? -EIO : trd_catalog_read(packing.catalog, packing.to, 0, NULL);
    }
    trd_packing_fini(&packing);
    return rc;
}

/* Look after old packs, once after each scan. */
static void care(struct kva_packer *p, uint64_t scans)
{
    int rc = remove_strays(p);

    if (rc == 0)
        rc = rewrite_poor(p);
    if (rc == -ECANCELED)
        return; /* later */
    if (rc < 0)
        say_failed(p, "old packs", rc);
    p->cared = scans;
}

/* -- turns ------------------------------------------------------------------------------------- */

static bool gather_next(struct kva_packer *p)
{
    uint64_t scans = atomic_load(&p->opts.volumes->scans);

    if (kv_now_ns() < p->next_ns && scans == p->gathered)
        return false;
    if (scans != p->cared)
        care(p, scans);
    p->nothing = !gather(p);
    p->gathered = scans;
    p->phase = p->nothing ? IDLE : WRITING;
    p->next_ns = kv_now_ns() + INTERVAL_NS;
    return !p->nothing;
}

bool kva_packer_turn(struct kva_packer *p)
{
    struct kva_volumes *v = p->opts.volumes;

    if (!p->opts.packing.idle_s || !atomic_load(&v->usable[p->member]) ||
        !atomic_load(&v->listed[p->member]) || atomic_load(&v->packs[p->member].state) == TRD_CANT)
        return false;
    switch (p->phase) {
    case IDLE:
        return gather_next(p);
    case WRITING:
        return write_next(p);
    case DROPPING:
        return drop_next(p);
    }
    return false;
}

bool kva_packer_is_idle(const struct kva_packer *p)
{
    struct kva_volumes *v = p->opts.volumes;

    if (!p->opts.packing.idle_s || atomic_load(&v->packs[p->member].state) == TRD_CANT)
        return true;
    return p->phase == IDLE && p->nothing && p->gathered == atomic_load(&v->scans);
}
