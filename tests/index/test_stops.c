// SPDX-License-Identifier: Apache-2.0
/* Where each holder's part of a prompt ends, against the naive model, and the path that names tell. */
#include "base/unit.h"
#include "fixture.h"
#include "ops.h"

/* The number of the holder's leading blocks of the prompt, and the place of the last one. */
static uint32_t reach_of(struct model *m, const struct model_holder *h, const uint64_t *prompt,
                         size_t n, uint32_t *ret_place)
{
    uint32_t place = 0, reach = 0;

    for (bool found = true; found && reach < n;) {
        uint32_t next = model_child(m, place, prompt[reach]);

        found = false;
        for (size_t i = 0; i < h->n; i++)
            found |= !h->blocks[i].parked && h->blocks[i].place == next;
        if (found) {
            place = next;
            reach++;
        }
    }
    *ret_place = place;
    return reach;
}

static struct kvi_stop model_stop(struct model *m, const struct model_holder *h,
                                  const uint64_t *prompt, size_t n)
{
    uint32_t place;
    struct kvi_stop stop = {.holder = h->key, .reach = reach_of(m, h, prompt, n, &place)};

    for (size_t i = 0; i < h->n; i++) {
        const struct model_block *b = &h->blocks[i];

        if (!b->parked)
            stop.goes_on |= m->places[b->place].parent == place;
        else if (stop.reach + 1 < n)
            stop.waits |= b->local == prompt[stop.reach + 1];
    }
    return stop;
}

static const struct kvi_stop *find_stop(const struct kvi_stop *stops, long n, struct kv_holder key)
{
    for (long i = 0; i < n; i++)
        if (stops[i].holder.worker == key.worker && stops[i].holder.rank == key.rank)
            return &stops[i];
    return NULL;
}

/* Compare the answers about the prompt that was just asked for. Returns how many stops had something. */
static size_t compare(struct ops *ops)
{
    struct model *m = ops->model;
    struct kvi_stop *stops;
    long n = kvi_find_stops(ops->ix, ops->prompt, ops->prompt_len, &stops);
    size_t interesting = 0;

    assert_true(n >= 0);
    for (size_t i = 0; i < m->n_holders; i++) {
        struct kvi_stop wanted = model_stop(m, &m->holders[i], ops->prompt, ops->prompt_len);
        const struct kvi_stop *got = find_stop(stops, n, m->holders[i].key);

        interesting += wanted.reach && (wanted.goes_on || wanted.waits);
        if (!got)
            got = &(struct kvi_stop){0};
        assert_int_equal(got->reach, wanted.reach);
        assert_int_equal(got->goes_on, wanted.goes_on);
        assert_int_equal(got->waits, wanted.waits);
    }
    free(stops);
    return interesting;
}

static void play(const struct ops_profile *profile, long rounds)
{
    struct ops *ops = ops_new(profile);
    size_t interesting = 0;

    print_message("%s: KV_TEST_SEED=%" PRIu64 "\n", profile->name, test_seed());
    for (long i = 0; i < rounds; i++) {
        if (i % 500 == 0)
            ops_begin(ops);
        ops_judge(ops, i, ops_one(ops));
        ops_judge(ops, i, ops_query(ops));
        interesting += compare(ops);
    }
    assert_true(interesting > 0);
    ops_free(ops);
}

static void test_against_the_model(void **state)
{
    static const struct ops_profile small = {.name = "small",
                                             .n_workers = 4,
                                             .n_ranks = 2,
                                             .n_locals = 3,
                                             .n_hashes = 60,
                                             .max_blocks = 8,
                                             .n_hash_seeds = 2,
                                             .chaos = 2,
                                             .diverge = 20,
                                             .grow = 55,
                                             .n_tiers = 3},
                                    long_chains = {.name = "long",
                                                   .n_workers = 3,
                                                   .n_ranks = 1,
                                                   .n_locals = 1000,
                                                   .n_hashes = 1000,
                                                   .max_blocks = 600,
                                                   .n_hash_seeds = 1,
                                                   .diverge = 1,
                                                   .grow = 40,
                                                   .n_tiers = 2};

    (void)state;
    play(&small, test_rounds(20000));
    play(&long_chains, test_rounds(300));
}

/* Overlays of windows are no holders of their own; a holder that only has others' prompts goes on at 0. */
static void test_windows_and_others(void **state)
{
    static const struct kvi_window window = {
        .group = 1, .window = 16, .need = 1, .stride = 1, .needs = KV_NEEDS_RUN};
    struct fixture *f = *state;
    struct kvi_stop *stops;
    long n;

    assert_int_equal(kvi_set_window(f->ix, W0, &window), 0);
    store(f, W0, LOCALS(1, 2, 3));
    store(f, W1, LOCALS(7));
    n = kvi_find_stops(f->ix, LOCALS(1, 2, 9), &stops);
    assert_int_equal(n, 2);
    assert_int_equal(find_stop(stops, n, W0)->reach, 2);
    assert_true(find_stop(stops, n, W0)->goes_on);
    assert_int_equal(find_stop(stops, n, W1)->reach, 0);
    assert_true(find_stop(stops, n, W1)->goes_on);
    free(stops);
    assert_int_equal(kvi_find_stops(f->ix, NULL, 0, &stops), 2);
    free(stops);
}

static void test_path_of_names(void **state)
{
    const uint64_t *locals = sequence(20, 20, 0);
    struct fixture *f = *state;
    uint64_t names[21], *path;
    size_t known;

    for (size_t i = 0; i < 20; i++)
        names[i] = path_hash(locals, i + 1);
    names[20] = 12345;
    assert_int_equal(kvi_named_path(f->ix, names, 20, &path, &known), 0);
    assert_int_equal(known, 0);
    store(f, W0, locals, 12);
    assert_int_equal(kvi_named_path(f->ix, names + 5, 15, &path, &known), 12);
    assert_int_equal(known, 7);
    assert_memory_equal(path, locals, 12 * sizeof(*path));
    free(path);
    assert_int_equal(kvi_named_path(f->ix, names + 15, 6, &path, &known), 0);
    assert_int_equal(known, 0);
    free(path);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_the_model),
        T(test_windows_and_others),
        T(test_path_of_names),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
