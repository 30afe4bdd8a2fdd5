// SPDX-License-Identifier: Apache-2.0
/*
 * The owner's table of leases, beside a naive model: lists that are searched from end to end. Every
 * step compares the blocks held, their generations, the next expiry, and the leases that ended.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/unit.h"
#include "index/random.h"
#include "peer/lease/lease.h"
#include "starve.h"

#define BLOCKS 40
#define SHARE 20
#define SESSIONS 4
#define MAX_MODEL 256
#define MOST 12

/* ---- the model ---- */

struct model_lease {
    bool there, ended;
    int session;
    uint64_t id, expires;
    uint32_t n, blocks[MOST];
    uint32_t uses;
    struct kvbm_granted *real;
};

static struct {
    struct kvbm_leases table;
    struct kvbm_lessee sessions[SESSIONS];
    kvbm_generation_t generations[BLOCKS];
    struct model_lease leases[MAX_MODEL];
    uint64_t expected[BLOCKS]; /* generations */
    uint64_t now;
    uint32_t reserved[SESSIONS];
} t;

static uint32_t held_by_model(uint32_t block)
{
    uint32_t n = 0;

    for (int i = 0; i < MAX_MODEL; i++) {
        for (uint32_t k = 0; t.leases[i].there && k < t.leases[i].n; k++)
            n += t.leases[i].blocks[k] == block;
    }
    return n;
}

/* A lease of the model is gone for good: blocks that nobody else has change. */
static void model_drop(struct model_lease *lease)
{
    uint32_t before[BLOCKS];

    for (uint32_t b = 0; b < BLOCKS; b++)
        before[b] = held_by_model(b);
    lease->there = false;
    for (uint32_t b = 0; b < BLOCKS; b++)
        t.expected[b] += before[b] && !held_by_model(b);
}

static uint32_t model_references(int session)
{
    uint32_t n = t.reserved[session];

    for (int i = 0; i < MAX_MODEL; i++)
        n += t.leases[i].there && !t.leases[i].ended && t.leases[i].session == session
                 ? t.leases[i].n
                 : 0;
    return n;
}

static uint32_t model_left(int session)
{
    uint32_t used = 0, references = model_references(session);

    for (uint32_t b = 0; b < BLOCKS; b++)
        used += held_by_model(b) > 0;
    for (int s = 0; s < SESSIONS; s++)
        used += t.reserved[s];
    used = used < SHARE ? SHARE - used : 0;
    references = references < SHARE ? SHARE - references : 0;
    return KV_MIN(used, references);
}

static void compare(void)
{
    uint32_t n = 0, n_held = 0;
    uint64_t next = UINT64_MAX;

    for (int i = 0; i < MAX_MODEL; i++) {
        const struct model_lease *lease = &t.leases[i];

        if (!lease->there || lease->ended)
            continue;
        n++;
        next = KV_MIN(next, lease->expires);
        for (int s = 0; s < SESSIONS; s++)
            assert_ptr_equal(kvbm_leases_find(&t.table, &t.sessions[s], lease->id),
                             s == lease->session ? lease->real : NULL);
    }
    assert_int_equal(t.table.n_leases, n);
    assert_true(n ? kvbm_leases_first(&t.table)->expires_ns == next
                  : kvbm_leases_first(&t.table) == NULL);
    for (uint32_t b = 0; b < BLOCKS; b++) {
        assert_int_equal(t.table.held[b], held_by_model(b));
        n_held += held_by_model(b) > 0;
        assert_int_equal(t.generations[b], t.expected[b]);
    }
    assert_int_equal(t.table.n_held, n_held);
    assert_true(n_held <= SHARE);
}

/* ---- steps ---- */

static void grant(struct rng *rng)
{
    int session = (int)rng_below(rng, SESSIONS);
    uint32_t want = 1 + rng_below(rng, MOST), got;
    struct model_lease *to = NULL;
    uint32_t left = model_left(session);

    for (int i = 0; i < MAX_MODEL && !to; i++)
        to = t.leases[i].there ? NULL : &t.leases[i];
    assert_non_null(to);
    got = kvbm_leases_reserve(&t.table, &t.sessions[session], want);
    assert_int_equal(got, KV_MIN(want, left));
    t.reserved[session] += got;
    compare();
    if (!got)
        return;
    t.reserved[session] -= got;
    if (rng_below(rng, 5) == 0) { /* the source had nothing */
        kvbm_leases_unreserve(&t.table, &t.sessions[session], got);
        return;
    }
    *to = (struct model_lease){
        .there = true, .session = session, .n = got, .expires = t.now + 1 + rng_below(rng, 50)};
    for (uint32_t i = 0; i < got; i++)
        to->blocks[i] = rng_below(rng, 6) ? rng_below(rng, BLOCKS) : KVBM_NO_BLOCK;
    assert_int_equal(kvbm_leases_grant(&t.table, &t.sessions[session], to->blocks, got, to,
                                       to->expires, &to->real),
                     0);
    to->id = to->real->id;
}

/* End leases of the model together; then their blocks change unless others have them. */
static void end_together(bool (*is_over)(const struct model_lease *lease, uint64_t arg),
                         uint64_t arg)
{
    bool before[BLOCKS];

    for (uint32_t b = 0; b < BLOCKS; b++)
        before[b] = held_by_model(b) > 0;
    for (int i = 0; i < MAX_MODEL; i++) {
        struct model_lease *lease = &t.leases[i];
        struct kvbm_granted *over;

        if (!lease->there || lease->ended || !is_over(lease, arg))
            continue;
        over = kvbm_leases_end(&t.table, lease->real);
        lease->ended = true;
        assert_ptr_equal(over, lease->uses ? NULL : lease->real);
        assert_true(!over || (over->hold == lease && over->n == lease->n));
        lease->there = lease->uses > 0;
        free(over);
    }
    for (uint32_t b = 0; b < BLOCKS; b++)
        t.expected[b] += before[b] && !held_by_model(b);
}

/* End what is late, as an owner does. */
static void expire(void)
{
    bool before[BLOCKS];
    struct kvbm_granted *real;

    for (uint32_t b = 0; b < BLOCKS; b++)
        before[b] = held_by_model(b) > 0;
    while ((real = kvbm_leases_first(&t.table)) != NULL && real->expires_ns <= t.now) {
        struct model_lease *lease = real->hold;
        struct kvbm_granted *over = kvbm_leases_end(&t.table, real);

        assert_true(lease->there && !lease->ended && lease->expires <= t.now);
        lease->ended = true;
        lease->there = lease->uses > 0;
        free(over);
    }
    for (int i = 0; i < MAX_MODEL; i++)
        assert_true(!t.leases[i].there || t.leases[i].ended || t.leases[i].expires > t.now);
    for (uint32_t b = 0; b < BLOCKS; b++)
        t.expected[b] += before[b] && !held_by_model(b);
}

static bool is_this(const struct model_lease *lease, uint64_t arg)
{
    return lease->id == arg;
}

static bool is_of(const struct model_lease *lease, uint64_t arg)
{
    return lease->session == (int)arg;
}

static struct model_lease *any_lease(struct rng *rng)
{
    for (uint32_t from = rng_below(rng, MAX_MODEL), i = 0; i < MAX_MODEL; i++) {
        struct model_lease *lease = &t.leases[(from + i) % MAX_MODEL];

        if (lease->there)
            return lease;
    }
    return NULL;
}

static void change_one(struct rng *rng)
{
    struct model_lease *lease = any_lease(rng);
    struct kvbm_granted *over;

    if (!lease)
        return;
    switch (rng_below(rng, 4)) {
    case 0:
        if (lease->ended)
            return;
        end_together(is_this, lease->id);
        return;
    case 1:
        if (lease->ended)
            return;
        lease->expires = t.now + 1 + rng_below(rng, 80);
        kvbm_leases_renew(&t.table, lease->real, lease->expires);
        return;
    case 2:
        if (lease->ended || lease->uses > 3)
            return;
        lease->uses++;
        kvbm_leases_use(lease->real);
        return;
    default:
        if (!lease->uses)
            return;
        lease->uses--;
        over = kvbm_leases_unuse(&t.table, lease->real);
        assert_true((over != NULL) == (lease->ended && !lease->uses));
        if (over)
            model_drop(lease);
        free(over);
    }
}

static void end_everything(void)
{
    for (int i = 0; i < MAX_MODEL; i++) {
        while (t.leases[i].there && t.leases[i].uses) {
            struct kvbm_granted *over = kvbm_leases_unuse(&t.table, t.leases[i].real);

            t.leases[i].uses--;
            if (over)
                model_drop(&t.leases[i]);
            free(over);
        }
    }
    for (int s = 0; s < SESSIONS; s++)
        end_together(is_of, (uint64_t)s);
    compare();
    assert_int_equal(t.table.n_held, 0);
    assert_int_equal(t.table.n_ended, 0);
    for (int s = 0; s < SESSIONS; s++) {
        assert_int_equal(t.sessions[s].n_references, 0);
        assert_int_equal(t.sessions[s].n_leases, 0);
        assert_null(t.sessions[s].leases);
    }
}

static void begin(void)
{
    memset(&t, 0, sizeof(t));
    t.now = 1000;
    for (uint32_t b = 0; b < BLOCKS; b++)
        t.generations[b] = t.expected[b] = 7;
    assert_int_equal(kvbm_leases_init(&t.table, BLOCKS, SHARE, t.generations), 0);
}

static void test_beside_a_model(void **state)
{
    struct rng rng = {test_seed()};

    (void)state;
    print_message("KV_TEST_SEED=%llu\n", (unsigned long long)rng.state);
    begin();
    for (long i = 0; i < test_rounds(10000); i++) {
        uint32_t what = rng_below(&rng, 20);

        if (what < 7) {
            grant(&rng);
        } else if (what < 17) {
            change_one(&rng);
        } else if (what < 19) {
            t.now += rng_below(&rng, 12);
            expire();
        } else {
            uint64_t session = rng_below(&rng, SESSIONS);

            end_together(is_of, session);
        }
        compare();
    }
    end_everything();
    kvbm_leases_fini(&t.table);
}

/* ---- single facts ---- */

static struct kvbm_granted *lease_of(int session, uint32_t block, uint64_t expires)
{
    struct kvbm_granted *lease = NULL;

    assert_int_equal(kvbm_leases_reserve(&t.table, &t.sessions[session], 1), 1);
    assert_int_equal(
        kvbm_leases_grant(&t.table, &t.sessions[session], &block, 1, NULL, expires, &lease), 0);
    return lease;
}

/* Ids aren't used twice: a replayed release of an ended lease ends no other. */
static void test_ids_end_with_their_lease(void **state)
{
    struct kvbm_granted *lease;
    uint64_t first;

    (void)state;
    begin();
    lease = lease_of(0, 3, 2000);
    first = lease->id;
    free(kvbm_leases_end(&t.table, lease));
    lease = lease_of(0, 3, 2000);
    assert_true(lease->id != first);
    assert_null(kvbm_leases_find(&t.table, &t.sessions[0], first));
    assert_null(kvbm_leases_find(&t.table, &t.sessions[0], UINT64_MAX));
    assert_null(kvbm_leases_find(&t.table, &t.sessions[1], lease->id));
    assert_ptr_equal(kvbm_leases_find(&t.table, &t.sessions[0], lease->id), lease);
    free(kvbm_leases_end(&t.table, lease));
    kvbm_leases_fini(&t.table);
}

/* A reclaimed lease doesn't disturb another one of the block, and still counts at that one's end. */
static void test_generation_changes_with_the_last(void **state)
{
    struct kvbm_granted *slow, *other;

    (void)state;
    begin();
    slow = lease_of(0, 5, 1100);
    other = lease_of(1, 5, 9000);
    assert_ptr_equal(kvbm_leases_first(&t.table), slow);
    free(kvbm_leases_end(&t.table, slow));
    assert_int_equal(t.generations[5], 7); /* other's copies stay good */
    free(kvbm_leases_end(&t.table, other));
    assert_int_equal(t.generations[5], 8); /* slow's copies are old from here on */
    kvbm_leases_fini(&t.table);
}

/* One session can neither fill memory with leases of one block, nor take more than the share. */
static void test_bounds(void **state)
{
    struct kvbm_granted *leases[SHARE];

    (void)state;
    begin();
    for (uint32_t i = 0; i < SHARE; i++)
        leases[i] = lease_of(0, 1, 5000);
    assert_int_equal(t.table.n_held, 1);
    assert_int_equal(kvbm_leases_reserve(&t.table, &t.sessions[0], 1), 0);
    assert_int_equal(kvbm_leases_reserve(&t.table, &t.sessions[1], 1000), SHARE - 1);
    assert_int_equal(kvbm_leases_reserve(&t.table, &t.sessions[2], 1), 0);
    kvbm_leases_unreserve(&t.table, &t.sessions[1], SHARE - 1);
    for (uint32_t i = 0; i < SHARE; i++)
        free(kvbm_leases_end(&t.table, leases[i]));
    kvbm_leases_fini(&t.table);
}

static void test_out_of_memory(void **state)
{
    struct kvbm_granted *lease = NULL;
    uint32_t block = 2;
    int rc = -ENOMEM;

    (void)state;
    starve_at(1);
    assert_int_equal(kvbm_leases_init(&t.table, BLOCKS, SHARE, t.generations), -ENOMEM);
    starve_at(0);
    begin();
    assert_int_equal(kvbm_leases_reserve(&t.table, &t.sessions[0], 1), 1);
    for (long n = 1; rc == -ENOMEM; n++) {
        starve_at(n);
        rc = kvbm_leases_grant(&t.table, &t.sessions[0], &block, 1, NULL, 5000, &lease);
        assert_true(rc == 0 || starved());
        assert_int_equal(t.table.n_held, rc == 0);
    }
    starve_at(0);
    assert_int_equal(rc, 0);
    free(kvbm_leases_end(&t.table, lease));
    kvbm_leases_fini(&t.table);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beside_a_model),
        cmocka_unit_test(test_ids_end_with_their_lease),
        cmocka_unit_test(test_generation_changes_with_the_last),
        cmocka_unit_test(test_bounds),
        cmocka_unit_test(test_out_of_memory),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
