// SPDX-License-Identifier: Apache-2.0
/* Random operations on the pools of a registry and on its model. Each operation consists of a few
 * numbers, so that a failing list can be reduced to the few operations that matter, and printed.
 * Keys have several lengths, in two groups; only one kind of operation moves the clock. */
#include "base/unit.h"
#include "index/random.h"
#include "model_run.h"

/* ---- operations ---- */

static bool allocate(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_shortage shortage = {0, 0};
    struct kvbm_mutable blocks[MAX_CHAIN];
    size_t available = (size_t)(pool->n_free + m_n_inactive(pool)), n = op->n;
    int rc;

    if (run->mutable.n + (int)n > MAX_HELD)
        return true;
    rc = kvbm_pool_allocate(run->pools[op->pool], n, blocks, &shortage);
    if (n > available) {
        MUST(rc == -ENOSPC && shortage.requested == n && shortage.available == available);
        return true;
    }
    MUST(rc == 0);
    if (n > (size_t)pool->n_free)
        m_expire(&run->model, op->pool, fake_ns);
    for (size_t i = 0; i < n; i++) {
        if (!m_take(&run->model, op->pool, (int)blocks[i].handle.block))
            return WRONG("block %u was not the one to take", blocks[i].handle.block);
        push(&run->mutable, blocks[i].handle, op->pool, 0);
    }
    return true;
}

/* Model of kvbm_pool_complete: the value to return, and the effect on the blocks. */
static int complete_model(struct run *run, const struct op *op, const int *blocks, const int *keys,
                          int n, int parent, uint32_t position)
{
    if (!is_served(run, op))
        return -EINVAL;
    for (int i = 0; i < n; i++) {
        if (run->model.pools[op->pool].blocks[blocks[i]].fill >= 0)
            return -EBADFD;
    }
    return m_complete(&run->model, op->pool, blocks, keys, n, parent, position);
}

/* Complete and register in one call, into the memory of the handles given. */
static bool register_at_once(struct run *run, const struct op *op, struct kvbm_mutable *in, int n,
                             const struct kvbm_chain *chain, const int *blocks, int *ret)
{
    struct kvbm_immutable *out = (struct kvbm_immutable *)in;

    *ret = kvbm_pool_register_chain(run->pools[op->pool], in, (size_t)n, chain, out);
    for (int i = 0; i < n; i++) {
        struct m_block *b = &run->model.pools[op->pool].blocks[blocks[i]];

        if (*ret < 0) {
            push(&run->mutable, in[i].handle, op->pool, 0);
            continue;
        }
        b->tokens = chain->tokens != NULL;
        MUST((int)out[i].handle.block == m_register(&run->model, op->pool, blocks[i]));
        push(&run->immutable, out[i].handle, op->pool, 0);
    }
    return true;
}

static bool complete(struct run *run, const struct op *op)
{
    struct held held[MAX_CHAIN];
    int keys[MAX_CHAIN], blocks[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys), rc, want;
    uint32_t tokens[MAX_CHAIN * BM_BLOCK];
    struct kvbm_mutable in[MAX_CHAIN];
    struct kvbm_complete out[MAX_CHAIN];
    struct names names;
    int parent;
    struct kvbm_chain chain = {.size = sizeof(chain), .group = group_of(op)};

    n = pull(&run->mutable, op->pool, n, op->how, held);
    if (!n)
        return true;
    parent = parent_of(keys[0]);
    chain.position = depth_of(keys[0]);
    if (op->how % 10 == 0) { /* somebody is confused */
        parent = m_group((int)op->what) * M_GROUP + (int)(op->how / 10 % M_GROUP);
        chain.position = op->how % 20 ? depth_of(parent) + 1 : 1 + op->how / 1000 % 4;
    } else if (op->how % 10 == 5) {
        keys[n - 1] = keys[0];
    }
    chain.parent = parent < 0 ? NULL : run->names[parent];
    chain.keys = names_of(run, keys, n, &names);
    for (int i = 0; i < n; i++) {
        in[i].handle = held[i].handle;
        blocks[i] = (int)held[i].handle.block;
        tokens_of(keys[i], tokens + i * BM_BLOCK);
    }
    chain.tokens = op->how / 10 % 2 ? tokens : NULL;
    want = complete_model(run, op, blocks, keys, n, parent, chain.position);
    if (op->how / 20 % 2 && run->immutable.n + MAX_CHAIN <= MAX_HELD)
        return register_at_once(run, op, in, n, &chain, blocks, &rc) &&
               (rc == want || WRONG("register_chain: %d, not %d", rc, want));
    rc = kvbm_pool_complete(run->pools[op->pool], in, (size_t)n, &chain, out);
    for (int i = 0; i < n; i++) {
        push(rc < 0 ? &run->mutable : &run->complete, rc < 0 ? in[i].handle : out[i].handle,
             op->pool, 0);
        run->model.pools[op->pool].blocks[blocks[i]].tokens = chain.tokens != NULL;
    }
    if (rc != want)
        return WRONG("complete: %d, not %d", rc, want);
    return true;
}

/* ---- token by token ---- */

static bool start(struct run *run, const struct op *op, const struct kvbm_mutable *block,
                  struct m_block *b)
{
    struct kvbm_block_start start = {.size = sizeof(start),
                                     .group = group_of(op),
                                     .salt_hash = SALT,
                                     .chain = KVBM_CHAIN_SEED_SALT};
    uint64_t parent = 0;

    if (parent_of((int)op->what) >= 0) {
        memcpy(&parent, run->names[parent_of((int)op->what)], 8);
        start.parent = &parent;
        start.position = depth_of((int)op->what) + (op->how % 10 == 0); /* or thinks so */
    }
    if (!run->setup->hashed || !is_served(run, op)) {
        MUST(kvbm_mutable_init_sequence(block, &start) == (run->setup->key_len != 8 ? -ENOTSUP
                                                           : is_served(run, op)     ? 0
                                                                                    : -EINVAL));
        MUST(!is_served(run, op) || run->setup->key_len != 8 || kvbm_mutable_reset(block) == 0);
        return true;
    }
    MUST(kvbm_mutable_init_sequence(block, &start) == 0);
    b->fill = 0;
    b->filling = (int)op->what;
    b->position = start.position;
    return true;
}

static bool add(struct run *run, const struct op *op, const struct kvbm_mutable *block,
                struct m_block *b)
{
    uint32_t tokens[BM_BLOCK + MAX_CHAIN] = {0};
    int some = KV_MIN((int)op->n, BM_BLOCK - b->fill);

    tokens_of(b->filling, tokens);
    if (op->n == 1) {
        MUST(kvbm_mutable_add_token(block, tokens[b->fill]) == (some ? 0 : -ENOSPC));
    } else {
        MUST(kvbm_mutable_add_tokens(block, tokens + b->fill, op->n) == some);
    }
    b->fill += some;
    return true;
}

static bool take_off(struct run *run, const struct op *op, const struct kvbm_mutable *block,
                     struct m_block *b)
{
    bool enough = b->fill >= (int)op->n;

    MUST(kvbm_mutable_pop_tokens(block, op->n) == (enough ? 0 : -ENODATA));
    b->fill -= enough ? (int)op->n : 0;
    return true;
}

/* In state Partial: does it hold what it was given? */
static bool same_fill(struct run *run, const struct kvbm_mutable *block, const struct m_block *b)
{
    uint32_t tokens[BM_BLOCK], want[BM_BLOCK];
    struct kvbm_fill is;

    MUST(kvbm_mutable_fill(block, &is, tokens, BM_BLOCK) == 0);
    MUST(is.state == (b->fill < 0 ? KVBM_RESET : KVBM_PARTIAL));
    MUST(is.len == (uint32_t)KV_MAX(b->fill, 0));
    MUST(is.remaining == (b->fill < 0 ? 0 : BM_BLOCK - is.len));
    if (b->fill > 0) {
        tokens_of(b->filling, want);
        MUST(!memcmp(tokens, want, is.len * sizeof(*want)));
    }
    return true;
}

static bool commit(struct run *run, const struct op *op, struct kvbm_mutable *block,
                   struct m_block *b)
{
    int n = (int)block->handle.block, key = b->filling, want = -ENODATA, rc;
    struct kvbm_complete out;

    rc = kvbm_mutable_commit(block, &out);
    if (b->fill == BM_BLOCK)
        want = m_complete(&run->model, op->pool, &n, &key, 1, parent_of(key), b->position);
    if (rc != want)
        return WRONG("commit: %d, not %d", rc, want);
    if (rc < 0)
        return true;
    MUST(!block->handle.pool);
    b->fill = -1;
    b->tokens = true;
    push(&run->complete, out.handle, op->pool, 0);
    return true;
}

static bool fill(struct run *run, const struct op *op)
{
    struct kvbm_mutable block;
    struct m_block *b;
    struct held held;
    bool ok;

    if (!pull(&run->mutable, op->pool, 1, op->how, &held))
        return true;
    block.handle = held.handle;
    b = &run->model.pools[op->pool].blocks[held.handle.block];
    if (b->fill < 0) {
        ok = start(run, op, &block, b);
    } else if (op->how % 16 == 1) {
        ok = kvbm_mutable_reset(&block) == 0;
        b->fill = -1;
    } else if (op->how % 8 == 2) {
        ok = take_off(run, op, &block, b);
    } else if (b->fill == BM_BLOCK || op->how % 8 == 3) {
        ok = commit(run, op, &block, b);
    } else {
        ok = add(run, op, &block, b);
    }
    if (!block.handle.pool)
        return ok;
    push(&run->mutable, block.handle, op->pool, 0);
    return ok && same_fill(run, &block, b);
}

static bool register_some(struct run *run, const struct op *op)
{
    struct held held[MAX_CHAIN];
    struct kvbm_complete in[MAX_CHAIN];
    struct kvbm_immutable out[MAX_CHAIN];
    int n = 0;

    if (run->immutable.n + MAX_CHAIN <= MAX_HELD)
        n = pull(&run->complete, op->pool, (int)op->n, op->how, held);
    for (int i = 0; i < n; i++)
        in[i].handle = held[i].handle;
    if (!n)
        return true;
    MUST(kvbm_pool_register(run->pools[op->pool], in, (size_t)n, out) == 0);
    for (int i = 0; i < n; i++) {
        int block = m_register(&run->model, op->pool, (int)held[i].handle.block);

        MUST(out[i].handle.block == (uint32_t)block);
        push(&run->immutable, out[i].handle, op->pool, 0);
    }
    return true;
}

static bool unstage(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_complete block;
    struct kvbm_mutable back;
    struct held held;

    if (!pull(&run->complete, op->pool, 1, op->how, &held))
        return true;
    block.handle = held.handle;
    if (op->n % 2) {
        MUST(kvbm_complete_release(&block) == 0);
        m_free(pool, (int)held.handle.block);
    } else {
        MUST(kvbm_complete_reset(&block, &back) == 0);
        pool->blocks[held.handle.block] = m_blank();
        pool->blocks[held.handle.block].state = M_MUTABLE;
        pool->blocks[held.handle.block].refs = 1;
        push(&run->mutable, back.handle, op->pool, 0);
    }
    return true;
}

static bool give_back(struct run *run, const struct op *op)
{
    struct kvbm_mutable blocks[MAX_CHAIN];
    struct held held[MAX_CHAIN];
    int n = pull(&run->mutable, op->pool, (int)op->n, op->how, held);

    for (int i = 0; i < n; i++) {
        blocks[i].handle = held[i].handle;
        m_free(&run->model.pools[op->pool], (int)held[i].handle.block);
    }
    MUST(kvbm_pool_release_mutable(run->pools[op->pool], blocks, (size_t)n) == 0);
    return true;
}

/* A match took key's block, as the model sees it. */
static bool found(struct run *run, const struct op *op, int key, struct kvbm_handle handle,
                  bool touch)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    int block = m_find(pool, key);

    MUST(block >= 0 && handle.block == (uint32_t)block);
    pool->blocks[block].refs++;
    if (touch)
        m_use(&run->model, pool, key);
    push(&run->immutable, handle, op->pool, 0);
    return true;
}

static bool match(struct run *run, const struct op *op)
{
    int keys[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys), there = 0;
    const struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_immutable out[MAX_CHAIN];
    struct names buffer;
    const void *names = names_of(run, keys, n, &buffer);

    if (!is_served(run, op))
        return refused(run, op);
    if (run->immutable.n + n > MAX_HELD)
        return true;
    while (there < n && m_find(pool, keys[there]) >= 0)
        there++;
    MUST(kvbm_pool_probe(run->pools[op->pool], group_of(op), names, (size_t)n) == there);
    MUST(kvbm_pool_match(run->pools[op->pool], group_of(op), names, (size_t)n, op->how % 2, out) ==
         there);
    for (int i = 0; i < there; i++) {
        if (!found(run, op, keys[i], out[i].handle, op->how % 2 == 0))
            return false;
    }
    return true;
}

static bool scattered(struct run *run, const struct op *op)
{
    int keys[MAX_CHAIN], base = m_group((int)op->what) * M_GROUP;
    struct kvbm_immutable out[MAX_CHAIN];
    struct names names;
    long n = 0, rc;

    if (!is_served(run, op))
        return refused(run, op);
    if (run->immutable.n + MAX_CHAIN > MAX_HELD)
        return true;
    for (uint32_t i = 0; i < op->n; i++)
        keys[i] = base + (int)((op->what + i * op->how % 7) % M_GROUP);
    rc =
        kvbm_pool_match_scattered(run->pools[op->pool], group_of(op),
                                  names_of(run, keys, (int)op->n, &names), op->n, op->how % 2, out);
    for (uint32_t i = 0; i < op->n; i++) {
        if (m_find(&run->model.pools[op->pool], keys[i]) < 0) {
            MUST(!out[i].handle.pool);
            continue;
        }
        n++;
        if (!found(run, op, keys[i], out[i].handle, op->how % 2 == 0))
            return false;
    }
    MUST(rc == n);
    return true;
}

/* If that was the block's last handle, none like it opens the block ever again. */
static void forget_handle(struct run *run, const struct op *op, struct kvbm_handle handle)
{
    if (run->model.pools[op->pool].blocks[handle.block].refs)
        return;
    if (run->gone.n == MAX_HELD)
        run->gone.n = 0;
    push(&run->gone, handle, op->pool, 0);
}

static bool stale(struct run *run, const struct op *op)
{
    struct kvbm_immutable block, out;
    (void)op;

    for (int i = 0; i < run->gone.n; i++) {
        block.handle = run->gone.all[i].handle;
        MUST(kvbm_immutable_clone(&block, &out) == -ESTALE);
        run->n_stale[run->gone.all[i].pool]++;
    }
    return true;
}

static bool release(struct run *run, const struct op *op)
{
    struct kvbm_immutable blocks[MAX_CHAIN];
    struct held held[MAX_CHAIN];
    int n = pull(&run->immutable, op->pool, (int)op->n, op->how, held);

    for (int i = 0; i < n; i++)
        blocks[i].handle = held[i].handle;
    MUST(kvbm_pool_release(run->pools[op->pool], blocks, (size_t)n) == 0);
    for (int i = n; i-- > 0;) {
        m_release(&run->model, op->pool, (int)held[i].handle.block);
        forget_handle(run, op, held[i].handle);
    }
    return true;
}

static bool clone_one(struct run *run, const struct op *op)
{
    struct kvbm_immutable block, out;
    struct held held;

    if (run->immutable.n + 1 > MAX_HELD || !pull(&run->immutable, op->pool, 1, op->how, &held))
        return true;
    block.handle = held.handle;
    MUST(kvbm_immutable_clone(&block, &out) == 0);
    run->model.pools[op->pool].blocks[held.handle.block].refs++;
    push(&run->immutable, held.handle, op->pool, 0);
    push(&run->immutable, out.handle, op->pool, 0);
    return true;
}

static bool try_return(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_immutable block;
    struct held held;
    int rc, i;

    if (!pull(&run->immutable, op->pool, 1, op->how, &held))
        return true;
    block.handle = held.handle;
    i = (int)held.handle.block;
    rc = kvbm_immutable_try_return(&block);
    if (pool->blocks[i].refs == 1 && !m_leaners(pool, i)) {
        MUST(rc == 0);
        m_release(&run->model, op->pool, i);
    } else {
        MUST(rc == -EBUSY);
        push(&run->immutable, held.handle, op->pool, 0);
    }
    return true;
}

static bool weaken(struct run *run, const struct op *op)
{
    const struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_immutable block;
    struct kvbm_weak weak;
    struct held held;
    int i;

    if (!pull(&run->immutable, op->pool, 1, op->how, &held))
        return true;
    push(&run->immutable, held.handle, op->pool, 0);
    block.handle = held.handle;
    MUST(kvbm_immutable_downgrade(&block, &weak) == 0);
    i = (int)held.handle.block;
    if (pool->blocks[i].primary >= 0)
        i = pool->blocks[i].primary;
    MUST(weak.handle.block == (uint32_t)i);
    if (run->weak.n == MAX_HELD)
        run->weak.n = 0;
    push(&run->weak, weak.handle, op->pool, pool->blocks[i].life);
    return true;
}

static bool upgrade(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_immutable out;
    struct kvbm_weak weak;
    struct m_block *b;
    struct held held;
    int rc;

    if (run->immutable.n + 1 > MAX_HELD || !pull(&run->weak, op->pool, 1, op->how, &held))
        return true;
    weak.handle = held.handle;
    b = &pool->blocks[held.handle.block];
    rc = kvbm_weak_upgrade(&weak, &out);
    if (b->state != M_REGISTERED || b->life != held.life) {
        MUST(rc == -ESTALE);
        return true;
    }
    MUST(rc == 0 && out.handle.block == held.handle.block);
    b->refs++;
    push(&run->immutable, out.handle, op->pool, 0);
    push(&run->weak, held.handle, op->pool, held.life);
    return true;
}

static bool touch(struct run *run, const struct op *op)
{
    int keys[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys), there = 0;
    struct m_pool *pool = &run->model.pools[op->pool];
    struct names names;

    if (!is_served(run, op))
        return refused(run, op);
    while (there < n && m_find(pool, keys[there]) >= 0)
        there++;
    MUST(kvbm_pool_touch(run->pools[op->pool], group_of(op), names_of(run, keys, n, &names),
                         (size_t)n) == there);
    for (int i = there; i-- > 0;) {
        int block = m_find(pool, keys[i]);

        m_use(&run->model, pool, keys[i]);
        if (m_inactive(pool, block))
            m_latest(&run->model, pool, block);
    }
    return true;
}

static bool retain(struct run *run, const struct op *op)
{
    static const uint32_t priorities[] = {0, 34, 35, 35, 35, 36, 63, 64, 100};
    int keys[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys), there = 0;
    uint32_t priority = priorities[op->how % KV_COUNT(priorities)];
    uint64_t ttl_ms = op->how % 3 == 0   ? 0
                      : op->how % 3 == 1 ? 3600000 + op->how % 50 * 10
                                         : 1 + op->how / 3 % 1000;
    uint64_t until = ttl_ms ? fake_ns + ttl_ms * KV_NS_PER_MS : 0;
    struct names names;

    if (!is_served(run, op))
        return refused(run, op);
    for (int i = 0; i < n; i++)
        there += m_find(&run->model.pools[op->pool], keys[i]) >= 0;
    MUST(kvbm_pool_retain(run->pools[op->pool], group_of(op), names_of(run, keys, n, &names),
                          (size_t)n, priority, ttl_ms) == there);
    for (int i = n; i-- > 0;) /* the end of a prompt goes first */
        m_retain(&run->model, op->pool, keys[i], priority, until);
    return true;
}

static bool move_clock(struct run *run, const struct op *op)
{
    const struct m_pool *pool = &run->model.pools[op->pool];

    for (int i = 0; op->how % 3 == 0 && i < pool->n_blocks; i++) {
        if (pool->blocks[i].until > fake_ns) {
            fake_ns = pool->blocks[i].until; /* the very moment */
            return true;
        }
    }
    fake_ns += (op->how % 7 ? op->how % 300 : op->how % 4000) * KV_NS_PER_MS;
    return true;
}

static bool reset_keys(struct run *run, const struct op *op)
{
    int keys[MAX_CHAIN], n = path_to((int)op->what, (int)op->n, keys);
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_reset_result is, want = {0};
    struct names names;

    if (!is_served(run, op))
        return refused(run, op);
    if (op->how % 4 == 0)
        keys[n - 1] = keys[0];
    MUST(kvbm_pool_reset_keys(run->pools[op->pool], group_of(op), names_of(run, keys, n, &names),
                              (size_t)n, &is) == 0);
    for (int i = 0; i < n; i++) {
        int block = m_find(pool, keys[i]);

        if (block < 0) {
            want.not_found++;
        } else if (!m_inactive(pool, block)) {
            want.held++;
        } else {
            want.reset++;
            m_forget(&run->model, op->pool, block);
        }
    }
    MUST(is.reset == want.reset && is.held == want.held && is.not_found == want.not_found);
    return true;
}

/* Taken in the order of eviction: it shows in the free blocks. */
static bool reset_inactive(struct run *run, const struct op *op)
{
    struct m_pool *pool = &run->model.pools[op->pool];
    struct kvbm_pool *real = run->pools[op->pool];
    int n = m_n_inactive(pool), was_free = pool->n_free;

    MUST(kvbm_pool_reset_inactive(real) == n);
    MUST(real->n_free == (uint32_t)(was_free + n));
    pool->n_free = 0; /* so that m_take looks at the inactive ones */
    for (int i = 0; i < n; i++) {
        uint32_t at = (real->free_head + (uint32_t)(was_free + i)) % real->n_blocks;

        MUST(m_take(&run->model, op->pool, (int)real->free[at] - 1));
    }
    pool->evictions -= (uint64_t)n;
    for (int i = 0; i < was_free + n; i++) {
        uint32_t at = (real->free_head + (uint32_t)i) % real->n_blocks;
        int block = (int)real->free[at] - 1;

        MUST(i >= was_free || pool->free[i] == block);
        pool->n_free = i;
        m_free(pool, block);
    }
    return true;
}

static bool locate(struct run *run, const struct op *op)
{
    int keys[M_GROUP], base = m_group((int)op->what) * M_GROUP;
    uint8_t tiers[M_GROUP];
    struct names names;

    for (int i = 0; i < M_GROUP; i++)
        keys[i] = base + i;
    MUST(kvbm_registry_locate(run->bm.registry, group_of(op), names_of(run, keys, M_GROUP, &names),
                              M_GROUP, tiers) == 0);
    for (int i = 0; i < M_GROUP; i++)
        MUST(tiers[i] == m_tiers(&run->model, base + i));
    return true;
}

static bool info(struct run *run, const struct op *op)
{
    const struct m_pool *pool = &run->model.pools[op->pool];
    const struct m_block *b;
    struct kvbm_immutable block;
    struct kvbm_block_info is = {.size = sizeof(is)};
    struct held held;

    if (!pull(&run->immutable, op->pool, 1, op->how, &held))
        return true;
    push(&run->immutable, held.handle, op->pool, 0);
    block.handle = held.handle;
    b = &pool->blocks[held.handle.block];
    MUST(kvbm_immutable_info(&block, &is) == 0);
    m_expire_one(&run->model, op->pool, b->primary >= 0 ? b->primary : (int)held.handle.block,
                 fake_ns);
    MUST(!memcmp(is.key, run->names[b->key], run->setup->key_len));
    MUST(is.group == (uint32_t)m_group(b->key));
    MUST(is.handles == b->refs);
    MUST(is.duplicate == (b->primary >= 0));
    MUST(is.primary == (b->primary >= 0 ? (uint32_t)b->primary : held.handle.block));
    MUST(is.position == run->model.keys[b->key].position);
    MUST(is.tiers == m_tiers(&run->model, b->key));
    MUST(is.priority == pool->blocks[is.primary].priority);
    return true;
}

/* The block that has the priority of block @i's key, when one that is over has ended. */
static struct m_block *prioritised(struct run *run, int p, int i)
{
    struct m_pool *pool = &run->model.pools[p];

    if (pool->blocks[i].primary >= 0)
        i = pool->blocks[i].primary;
    m_expire_one(&run->model, p, i, fake_ns);
    return &pool->blocks[i];
}

/* Model of kvbm_pool_adopt from blocks held in pool @from: the value to return, and the effect. */
static int adopt_model(struct run *run, const struct op *op, int from, struct held *fresh,
                       const struct held *like, int n)
{
    struct m_pool *pool = &run->model.pools[op->pool], *source = &run->model.pools[from];

    for (int i = 0; i < n; i++) {
        if (!m_serves(pool, source->blocks[like[i].handle.block].key))
            return -EINVAL;
    }
    for (int i = 0; i < n; i++) {
        if (pool->blocks[fresh[i].handle.block].fill >= 0)
            return -EBADFD;
    }
    for (int i = 0; i < n; i++) {
        int first = (int)like[i].handle.block, block = (int)fresh[i].handle.block;
        struct m_block *ours, *theirs;

        pool->blocks[block].key = source->blocks[first].key;
        pool->blocks[block].state = M_COMPLETE;
        pool->blocks[block].tokens = false;
        block = m_register(&run->model, op->pool, block);
        ours = prioritised(run, op->pool, block);
        theirs = prioritised(run, from, first);
        if (ours->priority == KVBM_PRIORITY_DEFAULT && theirs->priority != KVBM_PRIORITY_DEFAULT) {
            ours->priority = theirs->priority;
            ours->until = theirs->until;
        }
        fresh[i].handle.block = (uint32_t)block;
    }
    return 0;
}

static bool adopt(struct run *run, const struct op *op)
{
    int from = (int)(op->how / 16 % (uint32_t)run->model.n_pools), n, n_like, rc, want;
    struct held fresh[MAX_CHAIN], like[MAX_CHAIN];
    struct kvbm_mutable in[MAX_CHAIN];
    struct kvbm_immutable source[MAX_CHAIN], out[MAX_CHAIN];

    if (run->immutable.n + MAX_CHAIN > MAX_HELD)
        return true;
    n_like = pull(&run->immutable, from, (int)op->n, op->how, like);
    for (int i = 0; i < n_like; i++) {
        push(&run->immutable, like[i].handle, from, 0);
        source[i].handle = like[i].handle;
    }
    n = pull(&run->mutable, op->pool, n_like, op->how, fresh);
    for (int i = 0; i < n; i++)
        in[i].handle = fresh[i].handle;
    rc = kvbm_pool_adopt(run->pools[op->pool], in, (size_t)n, source, out);
    want = adopt_model(run, op, from, fresh, like, n);
    if (rc != want)
        return WRONG("adopt: %d, not %d", rc, want);
    for (int i = 0; i < n; i++) {
        MUST(rc < 0 || out[i].handle.block == fresh[i].handle.block);
        push(rc < 0 ? &run->mutable : &run->immutable, rc < 0 ? in[i].handle : out[i].handle,
             op->pool, 0);
    }
    return true;
}

static bool (*const ops[N_KINDS])(struct run *run, const struct op *op) = {
    allocate,       complete,  fill,       register_some, unstage,    give_back, match,  scattered,
    release,        clone_one, try_return, weaken,        upgrade,    touch,     retain, reset_keys,
    reset_inactive, locate,    info,       stale,         move_clock, adopt};

/* ---- judging ---- */

static bool same_counts(struct run *run, int p)
{
    const struct m_pool *pool = &run->model.pools[p];
    struct kvbm_pool_stats is = {.size = sizeof(is)};
    int inactive = m_n_inactive(pool),
        mutable = m_count(pool, M_MUTABLE) + m_count(pool, M_COMPLETE);

    kvbm_pool_get_stats(run->pools[p], &is);
    MUST(is.reset_pool_size == (uint64_t)pool->n_free);
    MUST(is.inflight_mutable == (uint64_t) mutable);
    MUST(is.inactive_pool_size == (uint64_t)inactive);
    MUST(is.inflight_immutable == (uint64_t)(m_count(pool, M_REGISTERED) - inactive));
    MUST(is.evictions == pool->evictions);
    MUST(is.registrations == pool->registrations);
    MUST(is.duplicate_blocks == pool->duplicates);
    MUST(is.stale_handles == run->n_stale[p]);
    return true;
}

static bool same_event(const struct m_event *a, const struct m_event *b)
{
    return a->type == b->type && a->tier == b->tier && a->key == b->key && a->parent == b->parent &&
           a->position == b->position && a->end == b->end && a->tokens == b->tokens;
}

static bool same_events(struct run *run)
{
    const struct model *m = &run->model;

    MUST(kvbm_events_flush(run->bm.events, 60000) == 0);
    if (run->told.n != m->n_events)
        return WRONG("%zu events, not %zu", run->told.n, m->n_events);
    for (size_t i = 0; i < m->n_events; i++) {
        if (!same_event(&run->told.all[i], &m->events[i]))
            return WRONG("event %zu is another", i);
    }
    return true;
}

static bool judge(struct run *run)
{
    for (int p = 0; p < run->model.n_pools; p++) {
        if (!same_counts(run, p))
            return false;
    }
    MUST(kvbm_registry_check(run->bm.registry) == 0);
    return true;
}

/* All handles go, then all blocks; what was stored is removed. */
static bool wind_up(struct run *run)
{
    int balance = 0;

    for (int p = 0; p < run->model.n_pools; p++) {
        struct op op = {.pool = (uint8_t)p, .n = 1};

        for (int i = 0; i < MAX_HELD + MAX_CHAIN; i++)
            MUST(give_back(run, &op) && unstage(run, &op) && release(run, &op));
        MUST(reset_inactive(run, &op));
    }
    MUST(!run->mutable.n && !run->complete.n && !run->immutable.n);
    if (!judge(run) || !same_events(run))
        return false;
    for (size_t i = 0; i < run->told.n; i++)
        balance += run->told.all[i].type == KVBM_EVENT_STORED ? 1 : -1;
    MUST(balance == 0 && run->bm.registry->live_entries == 0);
    return true;
}

/* ---- playing ---- */

/* Play a list; the number of the operation that went wrong, or -1. A broken world is left
 * behind. */
static long play(const struct setup *setup, const struct op *list, size_t n, char *wrong)
{
    struct run *run = begin(setup);
    size_t i = 0;
    bool ok = true;

    for (; i < n && ok; i++) {
        struct op op = list[i];

        op.pool = (uint8_t)(op.pool % run->model.n_pools);
        ok = ops[op.kind](run, &op) && judge(run) && (i % 97 || same_events(run));
    }
    if (ok && wind_up(run)) {
        end(run);
        return -1;
    }
    strcpy(wrong, run->wrong);
    return (long)(ok ? n : i - 1);
}

static struct op random_op(struct rng *rng)
{
    struct op op = {.pool = (uint8_t)rng_below(rng, 6), /* of 2 or of 3 */
                    .n = rng_below(rng, MAX_CHAIN) + 1,
                    .what = rng_below(rng, M_KEYS),
                    .how = rng_below(rng, 1u << 20)};
    uint32_t total = 0, at;

    for (int i = 0; i < N_KINDS; i++)
        total += weights[i];
    at = rng_below(rng, total);
    while (at >= weights[op.kind])
        at -= weights[op.kind++];
    return op;
}

/* Leave out what the failure doesn't need: halves, quarters, ... single operations. */
static size_t shrink(const struct setup *setup, struct op *list, size_t n, char *wrong)
{
    struct op *fewer = malloc(n * sizeof(*fewer));

    for (size_t chunk = n / 2; chunk > 0; chunk /= 2) {
        for (size_t at = 0; at + chunk <= n;) {
            memcpy(fewer, list, at * sizeof(*list));
            memcpy(fewer + at, list + at + chunk, (n - at - chunk) * sizeof(*list));
            if (play(setup, fewer, n - chunk, wrong) >= 0)
                memcpy(list, fewer, (n -= chunk) * sizeof(*list));
            else
                at += chunk;
        }
    }
    free(fewer);
    play(setup, list, n, wrong);
    return n;
}

static void play_random(const struct setup *setup)
{
    size_t n = setup->n_ops;
    struct rng rng = {test_seed() ^ n ^ setup->key_len << 20};
    struct op *list = malloc(n * sizeof(*list));
    long rounds = test_rounds(12);
    char wrong[200] = "";

    print_message("%s: KV_TEST_SEED=%llu, %ld lists of %zu\n", setup->name,
                  (unsigned long long)test_seed(), rounds, n);
    for (long round = 0; round < rounds; round++) {
        long bad;

        for (size_t i = 0; i < n; i++)
            list[i] = random_op(&rng);
        bad = play(setup, list, n, wrong);
        if (bad < 0)
            continue;
        print_message("list %ld, operation %ld: %s\n", round, bad, wrong);
        n = shrink(setup, list, KV_MIN(n, (size_t)bad + 1), wrong);
        for (size_t i = 0; i < n; i++)
            print_message("    {%s, %u, %u, %u, %u}\n", kind_names[list[i].kind], list[i].pool,
                          list[i].n, list[i].what, list[i].how);
        fail_msg("%s", wrong);
    }
    free(list);
}

static void test_lru(void **state)
{
    (void)state;
    play_random(&(struct setup){"lru, lru",
                                4,
                                false,
                                1500,
                                {{.n_blocks = 12}, {.tier = KV_TIER_HOST, .n_blocks = M_BLOCKS}}});
}

static void test_lfu(void **state)
{
    (void)state;
    play_random(
        &(struct setup){"lfu, lru that rejects, filled by tokens",
                        8,
                        true,
                        1500,
                        {{.n_blocks = 14, .eviction = KVBM_EVICT_LFU},
                         {.tier = KV_TIER_HOST, .n_blocks = 10, .reject_duplicates = true}}});
}

static void test_lineage(void **state)
{
    (void)state;
    play_random(&(struct setup){"lineage, lineage that rejects",
                                16,
                                false,
                                1500,
                                {{.n_blocks = 16, .eviction = KVBM_EVICT_LINEAGE},
                                 {.tier = KV_TIER_HOST,
                                  .n_blocks = 9,
                                  .eviction = KVBM_EVICT_LINEAGE,
                                  .reject_duplicates = true}}});
}

/* More releases than there are age classes. */
static void test_lineage_long(void **state)
{
    (void)state;
    play_random(&(struct setup){"lineage, nothing inactive",
                                32,
                                false,
                                12000,
                                {{.n_blocks = M_BLOCKS, .eviction = KVBM_EVICT_LINEAGE},
                                 {.tier = KV_TIER_HOST,
                                  .n_blocks = 9,
                                  .eviction = KVBM_EVICT_LINEAGE,
                                  .reset_on_release = true}}});
}

/* Two groups apart in the first tier, together in the second. */
static void test_groups(void **state)
{
    (void)state;
    play_random(&(struct setup){
        "a pool for each group, lfu for both",
        64,
        false,
        1500,
        {{.n_blocks = 14, .groups = 1, .eviction = KVBM_EVICT_LINEAGE},
         {.n_blocks = 9, .groups = 2, .reject_duplicates = true},
         {.tier = KV_TIER_DISK, .n_blocks = M_BLOCKS, .groups = 3, .eviction = KVBM_EVICT_LFU}}});
}

static void test_three_tiers(void **state)
{
    (void)state;
    play_random(&(struct setup){
        "three tiers, filled by tokens",
        8,
        true,
        1500,
        {{.n_blocks = M_BLOCKS, .eviction = KVBM_EVICT_LINEAGE},
         {.tier = KV_TIER_HOST, .n_blocks = 12, .groups = 2, .eviction = KVBM_EVICT_LFU},
         {.tier = KV_TIER_EXTERNAL, .n_blocks = 8, .reset_on_release = true}}});
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lru),     cmocka_unit_test(test_lfu),
        cmocka_unit_test(test_lineage), cmocka_unit_test(test_lineage_long),
        cmocka_unit_test(test_groups),  cmocka_unit_test(test_three_tiers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
