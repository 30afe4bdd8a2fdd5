// SPDX-License-Identifier: Apache-2.0
/* Dumps beside a writer whose blocks move to where the dump has passed, or go before it tells their source. */
#include "base/unit.h"
#include "fixture.h"

#define OTHER 1u /* a second source */

struct dumped {
    struct fixture copy;
    bool at_end;
    size_t gone; /* blocks told as gone, with the source of their last copy */
};

static int copy_run(void *arg, const struct kvi_dump_run *run)
{
    struct dumped *d = arg;

    return kvi_store(d->copy.ix, run->holder, run->tier, run->parent, run->blocks, run->n, NULL);
}

static int copy_extra(void *arg, const struct kvi_extra *extra)
{
    struct dumped *d = arg;

    d->gone += d->at_end && extra->kind == KVI_EXTRA_COPIES && !extra->sources[0].copies;
    return kvi_restore_extra(d->copy.ix, extra);
}

static void begin(struct fixture *f, struct dumped *d)
{
    *d = (struct dumped){.at_end = false};
    assert_int_equal(kvi_create(NULL, &d->copy.ix), 0);
    kvi_keep_copies(f->ix, true);
    assert_int_equal(kvi_dump_parked(f->ix, copy_extra, d), 0);
}

static void end(struct fixture *f, struct dumped *d)
{
    assert_int_equal(kvi_dump_extras(f->ix, copy_extra, d), 0);
    d->at_end = true;
    assert_int_equal(kvi_dump_copies(f->ix, W0, copy_extra, d), 0);
    kvi_keep_copies(f->ix, false);
    assert_null(kvi_check(d->copy.ix));
}

static void finish(struct fixture *f, struct dumped *d)
{
    assert_null(kvi_check(f->ix));
    kvi_matches_fini(&d->copy.matches);
    kvi_destroy(d->copy.ix);
}

static bool has(struct kvi_index *ix, enum kv_tier tier, uint64_t hash)
{
    struct kvi_block_info info = KVI_BLOCK_INFO_INIT;

    return kvi_get_block(ix, W0, tier, hash, &info) == 0;
}

/* A host block loses its parent before the dump passes, and finds it again before the parked blocks. */
static void a_block_that_moves_away_and_back(void **state)
{
    static const uint64_t path[] = {1, 2, 3};
    struct fixture *f = *state;
    uint64_t hash = path_hash(path, 3);
    struct dumped d;

    for (int again = 0; again < 2; again++) { /* stored again itself, or only its parent */
        store(f, W0, path, 2);
        assert_int_equal(store_part(f, W0, KV_TIER_HOST, path, 2, 3, NULL), 0);
        begin(f, &d);
        assert_int_equal(remove_block(f, W0, path, 2), 1);
        assert_int_equal(kvi_dump(f->ix, copy_run, &d), 0);
        store(f, W0, path, again ? 3 : 2);
        assert_true(has(f->ix, KV_TIER_HOST, hash));
        end(f, &d);
        (void)remove_block(&d.copy, W0, path, 2); /* the stream comes again */
        store(&d.copy, W0, path, again ? 3 : 2);
        assert_true(has(d.copy.ix, KV_TIER_HOST, hash));
        finish(f, &d);
        assert_int_equal(kvi_clear(f->ix, W0), 0);
    }
}

static void add(struct kvi_index *ix, uint32_t source, uint64_t local)
{
    struct kv_block block = {path_hash(&local, 1), local};

    assert_int_equal(kvi_add(ix, W0, KV_TIER_HOST, source, NULL, &block, 1, NULL), 0);
}

static long take(struct kvi_index *ix, uint32_t source, uint64_t local)
{
    uint64_t hash = path_hash(&local, 1);

    return kvi_take(ix, W0, KV_TIER_HOST, source, &hash, NULL, 1);
}

/* A block of another source than its tier's first one leaves before the dump tells its source. */
static void a_block_that_leaves_before_its_source_is_told(void **state)
{
    struct fixture *f = *state;
    struct dumped d;

    for (uint32_t first = 0; first < 2; first++) {
        uint32_t second = OTHER - first;

        add(f->ix, first, 1);
        add(f->ix, second, 2);
        begin(f, &d);
        assert_int_equal(kvi_dump(f->ix, copy_run, &d), 0);
        assert_int_equal(take(f->ix, second, 2), 1);
        end(f, &d);
        assert_int_equal(d.gone, 1);
        assert_int_equal(take(d.copy.ix, second, 2), 1); /* the stream comes again */
        assert_false(has(d.copy.ix, KV_TIER_HOST, path_hash(&(uint64_t){2}, 1)));
        assert_true(has(d.copy.ix, KV_TIER_HOST, path_hash(&(uint64_t){1}, 1)));
        finish(f, &d);
        assert_int_equal(kvi_clear(f->ix, W0), 0);
    }
}

/* Nothing is noted without a dump. */
static void the_notes_end_with_the_dump(void **state)
{
    struct fixture *f = *state;
    struct dumped d;

    add(f->ix, 0, 1);
    add(f->ix, OTHER, 2);
    begin(f, &d);
    assert_int_equal(take(f->ix, OTHER, 2), 1);
    assert_int_equal(f->ix->missed.n, 1);
    end(f, &d);
    assert_int_equal(f->ix->missed.n, 0);
    add(f->ix, OTHER, 2);
    assert_int_equal(take(f->ix, OTHER, 2), 1);
    assert_int_equal(f->ix->missed.n, 0);
    finish(f, &d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        T(a_block_that_moves_away_and_back),
        T(a_block_that_leaves_before_its_source_is_told),
        T(the_notes_end_with_the_dump),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
