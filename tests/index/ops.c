// SPDX-License-Identifier: Apache-2.0
#include "ops.h"
#include "base/unit.h"
#include "index/tree/copies.h"

enum { OPS_CHAINS = 3 }; /* of a call, at most */

/* Before each try of a call: refuse its @n-th allocation. */
static void ops_before(const struct ops *ops, long n)
{
    kvi_mem_fail_at(ops->starve ? n : 0);
}

/* After it: whether to try again, having failed for want of memory and changed nothing. */
static bool ops_again(struct ops *ops, long rc, const char **wrong)
{
    bool failed = ops->starve && kvi_mem_failed();

    kvi_mem_fail_at(0);
    if (!failed || rc != -ENOMEM)
        return false;
    ops->n_starved++;
    *wrong = ops_check(ops); /* the model hasn't been told yet */
    return !*wrong;
}

static struct kv_holder ops_holder(struct ops *ops)
{
    return (struct kv_holder){1 + rng_below(&ops->rng, ops->profile->n_workers),
                              rng_below(&ops->rng, ops->profile->n_ranks)};
}

static enum kv_tier ops_tier(struct ops *ops)
{
    return rng_below(&ops->rng, 3) ? KV_TIER_DEVICE
                                   : (enum kv_tier)rng_below(&ops->rng, ops->profile->n_tiers);
}

/* Tokens hash at a depth: mostly the trunk's. */
static uint64_t ops_local(struct ops *ops, uint32_t depth)
{
    if (rng_below(&ops->rng, 100) < ops->profile->diverge)
        return 1 + rng_below(&ops->rng, ops->profile->n_locals);
    return 1 + depth % ops->profile->n_locals;
}

/* Choose the name that an engine gives a place, sometimes an invalid one. */
static uint64_t ops_name(struct ops *ops, struct kv_holder holder, uint32_t place)
{
    if (rng_below(&ops->rng, 100) < ops->profile->chaos)
        return 1 + rng_below(&ops->rng, ops->profile->n_hashes);
    return (place + UINT64_C(1)) * UINT64_C(0xff51afd7ed558ccd) +
           (holder.worker % ops->profile->n_hash_seeds) * 77;
}

static uint32_t ops_depth(const struct model *m, uint32_t place)
{
    uint32_t depth = 0;

    for (; place; place = m->places[place].parent)
        depth++;
    return depth;
}

/* Mostly the main cache. */
static uint32_t ops_source(struct ops *ops)
{
    if (!ops->profile->copies || rng_below(&ops->rng, 5))
        return 0;
    return rng_below(&ops->rng, MODEL_SOURCES);
}

/* Cut the first @n blocks into chains of one holder, each of which continues the one before. */
static size_t ops_cut(struct ops *ops, struct kv_holder key, const uint64_t *parent, uint32_t n,
                      struct kvi_new_chain chains[OPS_CHAINS])
{
    size_t n_chains = 0;

    for (uint32_t i = 0, len; i < n; i += len) {
        len = n_chains + 1 < OPS_CHAINS ? 1 + rng_below(&ops->rng, n - i) : n - i;
        chains[n_chains++] = (struct kvi_new_chain){.holder = key,
                                                    .has_parent = parent != NULL,
                                                    .parent = parent ? *parent : 0,
                                                    .blocks = &ops->blocks[i],
                                                    .n = len};
        parent = &ops->blocks[i + len - 1].hash;
    }
    return n_chains;
}

/* The model's side of a chain that was stored: each of its blocks is new. */
static const char *ops_added(struct ops *ops, const struct kvi_new_chain *chain)
{
    uint64_t parent = chain->parent;

    for (size_t i = 0; i < chain->n; i++) {
        struct kvi_stored stored;
        int rc = model_add(ops->model, chain->holder, KV_TIER_DEVICE, 0, true,
                           i || chain->has_parent ? &parent : NULL, &chain->blocks[i], 1, &stored);

        if (rc || stored.added != 1 || stored.renamed || stored.parked)
            return MODEL_DIFFERS("a chain was new, its block %zu isn't: %d", i, rc);
        parent = chain->blocks[i].hash;
    }
    return NULL;
}

/* Store the first @n blocks as chains, until one isn't new. *@ret_n is the number of blocks stored. */
static const char *ops_add_chains(struct ops *ops, struct kv_holder key, const uint64_t *parent,
                                  uint32_t n, uint32_t *ret_n)
{
    struct kvi_new_chain chains[OPS_CHAINS];
    size_t n_chains = ops_cut(ops, key, parent, n, chains), done = 0;
    const char *wrong = NULL, *differs = NULL;
    long try = 0;
    int rc;

    *ret_n = 0;
    do {
        size_t more;

        ops_before(ops, ++try);
        more = kvi_add_chains(ops->ix, chains + done, n_chains - done, NULL, &rc);
        for (; more && !differs; more--, done++) {
            differs = ops_added(ops, &chains[done]);
            *ret_n += (uint32_t)chains[done].n;
        }
    } while (!differs && ops_again(ops, rc, &wrong));
    if (differs || wrong)
        return differs ? differs : wrong;
    return (rc == 0) == (done == n_chains)
               ? NULL
               : MODEL_DIFFERS("%zu of %zu chains stored, but %d", done, n_chains, rc);
}

static const char *ops_store(struct ops *ops)
{
    struct kv_holder key = ops_holder(ops);
    const struct model_holder *h = model_holder(ops->model, key, false);
    uint32_t n = 1 + rng_below(&ops->rng, ops->profile->max_blocks), place = 0, depth, first = 0;
    const struct kv_block *blocks = ops->blocks;
    uint64_t parent = rng_next(&ops->rng) % 64;
    bool has_parent = rng_below(&ops->rng, 3) != 0;
    struct kvi_stored got, want;
    enum kv_tier tier = ops->whole ? KV_TIER_DEVICE : ops_tier(ops);
    const char *wrong = NULL;
    uint32_t source = ops_source(ops);
    bool counted = ops->profile->copies && rng_below(&ops->rng, 4);
    long try = 0;
    int rc, expected;

    if (has_parent && h && h->n && rng_below(&ops->rng, 16)) {
        const struct model_block *b = &h->blocks[rng_below(&ops->rng, (uint32_t)h->n)];

        parent = b->name;
        place = b->parked ? model_child(ops->model, 0, parent) : b->place;
    }
    depth = ops_depth(ops->model, place);
    if (depth > 3 * ops->profile->max_blocks)
        return NULL;
    for (uint32_t i = 0; i < n; i++) {
        ops->blocks[i].tokens_hash = ops_local(ops, depth + i);
        place = model_child(ops->model, place, ops->blocks[i].tokens_hash);
        ops->blocks[i].hash = ops_name(ops, key, place);
    }
    if (tier == KV_TIER_DEVICE && !source && !ops->one_call && rng_below(&ops->rng, 2)) {
        wrong = ops_add_chains(ops, key, has_parent ? &parent : NULL, n, &first);
        if (wrong || first == n)
            return wrong;
    }
    blocks += first;
    n -= first;
    if (first) {
        has_parent = true;
        parent = blocks[-1].hash;
    }
    do {
        ops_before(ops, ++try);
        rc = counted ? kvi_add(ops->ix, kvi_cache_of(key, tier, source),
                               has_parent ? &parent : NULL, blocks, n, &got)
                     : kvi_store(ops->ix, key, tier, has_parent ? &parent : NULL, blocks, n, &got);
    } while (ops_again(ops, rc, &wrong));
    if (wrong)
        return wrong;
    expected = model_add(ops->model, key, tier, counted ? source : 0, counted,
                         has_parent ? &parent : NULL, blocks, n, &want);
    if (rc != expected)
        return MODEL_DIFFERS("store of %u returned %d, model %d", n, rc, expected);
    if (!rc && memcmp(&got, &want, sizeof(got)) != 0)
        return MODEL_DIFFERS("stored %zu %zu %zu %zu, model %zu %zu %zu %zu", got.added,
                             got.duplicate, got.renamed, got.parked, want.added, want.duplicate,
                             want.renamed, want.parked);
    return NULL;
}

/* Names that the holder knows, mostly in a row. */
static uint32_t ops_pick(struct ops *ops, const struct model_holder *h)
{
    uint32_t n = 1 + rng_below(&ops->rng, KV_MIN(ops->profile->max_blocks, 40u));
    uint32_t at = h && h->n ? rng_below(&ops->rng, (uint32_t)h->n) : 0;
    bool back = rng_below(&ops->rng, 2);

    if (ops->one_hash)
        n = 1;

    for (uint32_t i = 0; i < n; i++) {
        if (h && h->n && rng_below(&ops->rng, 10))
            ops->hashes[i] = h->blocks[(back ? at + (uint32_t)h->n * 64 - i : at + i) % h->n].name;
        else
            ops->hashes[i] = 1 + rng_below(&ops->rng, ops->profile->n_hashes);
        if (rng_below(&ops->rng, 8) == 0 && h && h->n)
            at = rng_below(&ops->rng, (uint32_t)h->n);
    }
    return n;
}

static const char *ops_by_hash(struct ops *ops, bool removing)
{
    struct kv_holder key = ops_holder(ops);
    uint32_t n = ops_pick(ops, model_holder(ops->model, key, false));
    enum kv_tier tier = ops_tier(ops);
    const char *wrong = NULL;
    uint32_t left[OPS_MAX_BLOCKS], source = ops_source(ops);
    bool told = ops->profile->copies && !rng_below(&ops->rng, 8);
    bool counted = ops->profile->copies && rng_below(&ops->rng, 4);
    long got, want, try = 0;

    for (uint32_t i = 0; i < n; i++)
        left[i] = rng_below(&ops->rng, 3);
    do {
        ops_before(ops, ++try);
        got = removing  ? kvi_take(ops->ix, kvi_cache_of(key, tier, source), ops->hashes,
                                  told ? left : NULL, n)
              : counted ? kvi_add_known(ops->ix, kvi_cache_of(key, tier, source), ops->hashes, n)
                        : kvi_store_known(ops->ix, kvi_cache_of(key, tier, 0), ops->hashes, n);
    } while (ops_again(ops, got, &wrong));
    if (wrong)
        return wrong;
    want = removing ? model_take(ops->model, key, tier, source, ops->hashes, told ? left : NULL, n)
                    : model_add_known(ops->model, key, tier, counted ? source : 0, counted,
                                      ops->hashes, n);
    return got == want ? NULL : MODEL_DIFFERS("by hash: %ld, model %ld", got, want);
}

static const char *ops_wide(struct ops *ops)
{
    struct kv_holder key = ops_holder(ops);
    int got = 0, want = 0;

    if (ops->profile->copies && rng_below(&ops->rng, 2)) {
        uint32_t tiers = rng_below(&ops->rng, 1u << KV_N_TIERS), source = ops_source(ops);

        model_clear_tiers(ops->model, key, tiers, source);
        got = kvi_clear_tiers(ops->ix, key, tiers, source);
        return got ? MODEL_DIFFERS("kvi_clear_tiers: %d", got) : NULL;
    }
    switch (rng_below(&ops->rng, 3)) {
    case 0:
        model_clear(ops->model, key);
        got = kvi_clear(ops->ix, key);
        break;
    case 1:
        want = model_remove_holders(ops->model, key.worker, &key.rank);
        got = kvi_remove_holder(ops->ix, key);
        break;
    default:
        want = model_remove_holders(ops->model, key.worker, NULL);
        got = kvi_remove_worker(ops->ix, key.worker);
    }
    return got == want ? NULL : MODEL_DIFFERS("clear or remove: %d, model %d", got, want);
}

const char *ops_one(struct ops *ops)
{
    uint32_t dice = rng_below(&ops->rng, 1000);

    if (dice < ops->profile->grow * 10)
        return ops_store(ops);
    if (dice < 993)
        return ops_by_hash(ops, rng_below(&ops->rng, 4) != 0);
    return ops_wide(ops);
}

const char *ops_query(struct ops *ops)
{
    uint32_t n = rng_below(&ops->rng, OPS_MAX_BLOCKS), depth = 0;

    if (ops->model->n_holders && rng_below(&ops->rng, 8)) {
        const struct model_holder *h =
            &ops->model->holders[rng_below(&ops->rng, (uint32_t)ops->model->n_holders)];
        const struct model_block *b =
            h->n ? &h->blocks[rng_below(&ops->rng, (uint32_t)h->n)] : NULL;
        uint32_t place = b && !b->parked ? b->place : 0, i;

        depth = KV_MIN(ops_depth(ops->model, place), (uint32_t)OPS_MAX_BLOCKS);
        for (i = ops_depth(ops->model, place); place; place = ops->model->places[place].parent)
            if (--i < depth)
                ops->prompt[i] = ops->model->places[place].local;
    }
    n = KV_MIN(depth + n % 8, (uint32_t)OPS_MAX_BLOCKS);
    for (; depth < n; depth++)
        ops->prompt[depth] = ops_local(ops, depth);
    ops->prompt_len = n;
    return model_compare_find(ops->model, ops->ix, &ops->matches, ops->prompt, n);
}

/* Every copy, and every parked block. */
static const char *ops_compare_blocks(const struct ops *ops)
{
    for (size_t i = 0; i < ops->model->n_holders; i++) {
        const struct model_holder *h = &ops->model->holders[i];
        const struct kvi_holder *holder = kvi_holder_find(ops->ix, h->key);

        if (holder && kvi_copies_doubted(holder) != model_doubted(h))
            return MODEL_DIFFERS("doubted tiers: %" PRIu64 ", model %" PRIu64,
                                 kvi_copies_doubted(holder), model_doubted(h));
        for (size_t k = 0; k < h->n; k++) {
            const struct model_block *b = &h->blocks[k];
            const struct kvi_parked *parked = kvi_parked_find(ops->ix, holder, b->name);

            if (b->parked && (!parked || parked->mask != b->mask || parked->parent != b->parent ||
                              parked->local != b->local))
                return MODEL_DIFFERS("a parked block differs");
            for (uint32_t c = 0; c < KV_N_TIERS * MODEL_SOURCES; c++) {
                uint32_t tier = c / MODEL_SOURCES, source = c % MODEL_SOURCES, got;

                if (!(b->mask >> tier & 1))
                    continue;
                got = kvi_copies_count(ops->ix, holder, (enum kv_tier)tier, source, b->name);
                if (got != b->copies[tier][source])
                    return MODEL_DIFFERS("holder %zu tier %u source %u: %u copies, model %u", i,
                                         tier, source, got, b->copies[tier][source]);
            }
        }
    }
    return NULL;
}

const char *ops_check(struct ops *ops)
{
    const char *wrong = kvi_check(ops->ix);

    if (!wrong)
        wrong = ops_compare_blocks(ops);

    if (!wrong)
        wrong = model_compare_stats(ops->model, ops->ix);
    for (int i = 0; !wrong && i < 4; i++)
        wrong = ops_query(ops);
    return wrong;
}

struct ops_copy {
    struct kvi_index *to;
    const char *wrong;
    struct kv_holder holder;
};

static int ops_copy_run(void *arg, const struct kvi_dump_run *run)
{
    struct ops_copy *copy = arg;
    struct kvi_stored stored;
    int rc = kvi_store(copy->to, run->holder, run->tier, run->parent, run->blocks, run->n, &stored);

    if (rc)
        copy->wrong = MODEL_DIFFERS("a run of the dump can't be stored: %d", rc);
    else if (stored.duplicate || stored.renamed || stored.added != run->n)
        copy->wrong = MODEL_DIFFERS("a run of the dump tells what was told: %zu %zu %zu of %zu",
                                    stored.added, stored.duplicate, stored.renamed, run->n);
    return copy->wrong != NULL;
}

static int ops_copy_extra(void *arg, const struct kvi_extra *extra)
{
    struct ops_copy *copy = arg;
    int rc = kvi_restore_extra(copy->to, extra);

    if (rc)
        copy->wrong = MODEL_DIFFERS("a fact of kind %d can't be restored: %d", extra->kind, rc);
    return rc != 0;
}

const char *ops_reload(struct ops *ops)
{
    struct ops_copy copy = {0};
    const struct kv_block block = {1, 1};

    if (kvi_create(NULL, &copy.to))
        return "kvi_create failed";
    copy.to->parking.max_holder = ops->ix->parking.max_holder;
    /* Holders that hold nothing aren't part of a dump. */
    for (size_t i = 0; i < ops->model->n_holders; i++) {
        (void)kvi_store(copy.to, ops->model->holders[i].key, KV_TIER_DEVICE, NULL, &block, 1, NULL);
        (void)kvi_clear(copy.to, ops->model->holders[i].key);
    }
    if (rng_below(&ops->rng, 2)) {
        for (size_t i = 0; i < ops->model->n_holders && !copy.wrong; i++)
            if (kvi_dump_holders(ops->ix, &ops->model->holders[i].key, 1, ops_copy_run,
                                 ops_copy_extra, &copy) != (copy.wrong != NULL))
                return "kvi_dump_holders failed";
        kvi_destroy(ops->ix);
        ops->ix = copy.to;
        return copy.wrong;
    }
    if (kvi_dump(ops->ix, ops_copy_run, &copy) != (copy.wrong != NULL))
        return "kvi_dump failed";
    if (!copy.wrong && kvi_dump_extras(ops->ix, ops_copy_extra, &copy) != (copy.wrong != NULL))
        return "kvi_dump_extras failed";
    kvi_destroy(ops->ix);
    ops->ix = copy.to;
    return copy.wrong;
}

/* -- playing ----------------------------------------------------------------------------------- */

struct ops *ops_new(const struct ops_profile *profile)
{
    struct ops *ops = calloc(1, sizeof(*ops));

    assert_non_null(ops);
    ops->profile = profile;
    ops->rng.state = test_seed();
    return ops;
}

void ops_begin(struct ops *ops)
{
    kvi_destroy(ops->ix);
    if (ops->model)
        model_free(ops->model);
    ops->model = model_new();
    assert_int_equal(kvi_create(NULL, &ops->ix), 0);
    ops->model->forgets = ops->profile->forgets;
    if (ops->profile->forgets)
        ops->ix->parking.max_holder = 0;
}

void ops_judge(const struct ops *ops, long i, const char *wrong)
{
    if (wrong)
        fail_msg("%s, operation %ld, seed %" PRIu64 ": %s", ops->profile->name, i, test_seed(),
                 wrong);
}

void ops_free(struct ops *ops)
{
    kvi_matches_fini(&ops->matches);
    kvi_destroy(ops->ix);
    model_free(ops->model);
    free(ops);
}
