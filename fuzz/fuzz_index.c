// SPDX-License-Identifier: Apache-2.0
/* Bytes as operations on a prefix index and on the naive model of it. There are only 4 holders, 4
 * token hashes, 32 engine hashes and 2 sources. So a few bytes reach splits, moves, renames, copies
 * and parked blocks. */
#include <stdint.h>

#include "../tests/index/model.h"
#include "index/tree/tree.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
    const uint8_t *p, *end;
};

static uint8_t take(struct input *in)
{
    return in->p < in->end ? *in->p++ : 0;
}

struct both {
    struct kvi_index *ix;
    struct model *model;
    struct kvi_matches matches;
    struct kvi_index *windowed; /* without a model here: tests/index/test_windows.c has one */
};

static void must(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "fuzz_index: %s\n", what);
    abort();
}

static void do_store(struct both *both, struct input *in, struct kv_holder key, enum kv_tier tier,
                     bool counted)
{
    uint8_t shape = take(in), n = 1 + shape % 8;
    uint64_t parent = shape >> 3 & 31;
    uint8_t more = take(in);
    bool has_parent = more & 1;
    uint32_t source = counted ? more >> 1 & 1 : 0;
    struct kvi_stored got = {0}, want = {0};
    struct kv_block blocks[8];
    int rc, expected;

    for (uint8_t i = 0; i < n; i++) {
        uint8_t byte = take(in);

        blocks[i] = (struct kv_block){byte >> 2 & 31, byte & 3};
    }
    expected = model_add(both->model, key, tier, source, counted, has_parent ? &parent : NULL,
                         blocks, n, &want);
    rc = counted ? kvi_add(both->ix, kvi_cache_of(key, tier, source), has_parent ? &parent : NULL,
                           blocks, n, &got)
                 : kvi_store(both->ix, key, tier, has_parent ? &parent : NULL, blocks, n, &got);
    must(rc == expected, "store");
    must(rc || memcmp(&got, &want, sizeof(got)) == 0, "what was stored");
}

static void do_hashes(struct both *both, struct input *in, struct kv_holder key, enum kv_tier tier,
                      bool removing, bool counted)
{
    uint8_t shape = take(in), n = 1 + shape % 6;
    uint32_t source = counted ? shape >> 7 : 0;
    const struct kvi_cache cache = kvi_cache_of(key, tier, source);
    uint64_t hashes[6];
    long got, want;

    for (uint8_t i = 0; i < n; i++)
        hashes[i] = take(in) & 31;
    got = removing  ? kvi_take(both->ix, cache, hashes, NULL, n)
          : counted ? kvi_add_known(both->ix, cache, hashes, n)
                    : kvi_store_known(both->ix, cache, hashes, n);
    want = removing ? model_take(both->model, key, tier, source, hashes, NULL, n)
                    : model_add_known(both->model, key, tier, source, counted, hashes, n);
    must(got == want, removing ? "remove" : "store known");
}

/* Clear a whole holder, or one source in some tiers. */
static void do_clear(struct both *both, struct input *in, struct kv_holder key, bool counted)
{
    uint8_t which = counted ? take(in) : 0;

    if (counted) {
        model_clear_tiers(both->model, key, which & 15, which >> 4 & 1);
        must(kvi_clear_tiers(both->ix, key, which & 15, which >> 4 & 1) == 0, "clear tiers");
    } else {
        model_clear(both->model, key);
        must(kvi_clear(both->ix, key) == 0, "clear");
    }
}

static void do_find(struct both *both, struct input *in)
{
    uint8_t n = take(in) % 16;
    uint64_t hashes[16];
    const char *wrong;

    for (uint8_t i = 0; i < n; i++)
        hashes[i] = take(in) & 3;
    wrong = model_compare_find(both->model, both->ix, &both->matches, hashes, n);
    must(!wrong, wrong);
}

/* Add and remove a holder's window blocks: with and without positions, beside a main group or
 * not. */
static void do_window(struct kvi_index *ix, struct input *in, struct kv_holder key,
                      struct kvi_matches *matches)
{
    uint8_t op = take(in), shape = take(in), number = shape & 3, n = 1 + (shape >> 2) % 6;
    uint32_t parts = 1 + (shape >> 2 & 3);
    struct kvi_window window = {.group = number,
                                .need = 1 + (op >> 3 & 3),
                                .stride = 1 + (op >> 5 & 1),
                                .needs = (enum kv_needs)(op >> 6),
                                .part = shape >> 6,
                                .parts = op >> 5 & 1 ? 1 : parts};
    enum kv_tier tier = (enum kv_tier)(op >> 6);
    const struct kvi_cache main = kvi_cache_of(key, tier, shape >> 7);
    const struct kvi_cache cache = kvi_window_of(key, tier, shape >> 7, number);
    uint64_t hashes[6], locals[6], parent = take(in) & 31;
    struct kv_block blocks[6];
    int rc;

    for (uint8_t i = 0; i < n; i++) {
        uint8_t byte = take(in);

        hashes[i] = byte >> 2 & 31;
        locals[i] = byte & 3;
        blocks[i] = (struct kv_block){hashes[i], locals[i]};
    }
    switch (op & 7) {
    case 0:
        rc = kvi_set_window(ix, key, &window);
        must(rc >= 0 || window.part >= window.parts || rc == -EEXIST, "set window");
        break;
    case 1:
        (void)(op >> 5 & 1 ? kvi_add_known(ix, cache, hashes, n)
                           : kvi_store_known(ix, cache, hashes, n));
        break;
    case 2:
        (void)kvi_take(ix, cache, hashes, NULL, n);
        break;
    case 3:
        (void)kvi_add(ix, cache, op >> 5 & 1 ? &parent : NULL, blocks, n, NULL);
        break;
    case 4:
        rc = op >> 5 & 1 ? kvi_set_alone(ix, key, op >> 6 & 1)
                         : kvi_set_keeps(ix, key, shape >> 7, op >> 6 & 1 ? shape : 0);
        must(rc == 0, "rule");
        break;
    case 5:
        (void)kvi_add(ix, main, op >> 5 & 1 ? &parent : NULL, blocks, n, NULL);
        break;
    case 6:
        if (shape & 1)
            (void)kvi_take(ix, main, hashes, NULL, n);
        else if (shape & 2)
            (void)kvi_clear_tiers(ix, key, shape >> 2 & 15, shape >> 7);
        else
            (void)(op >> 5 & 1 ? kvi_clear(ix, key) : kvi_remove_holder(ix, key));
        break;
    default:
        must(kvi_find(ix, locals, n, matches) == 0, "find");
        for (size_t i = 0; i < matches->n; i++)
            must(matches->items[i].reach[KV_N_TIERS - 1] <= n && matches->items[i].reach[0] <= n,
                 "a reach beyond the prompt");
    }
}

static void do_one(struct both *both, struct input *in)
{
    uint8_t op = take(in);
    struct kv_holder key = {op >> 3 & 1, op >> 4 & 1};
    enum kv_tier tier = (enum kv_tier)(op >> 5 & 3);
    bool counted = op >> 7;

    switch (op & 7) {
    case 0:
    case 1:
    case 2:
        do_store(both, in, key, tier, counted);
        break;
    case 3:
        do_hashes(both, in, key, tier, true, counted);
        break;
    case 4:
        do_hashes(both, in, key, tier, false, counted);
        break;
    case 5:
        do_clear(both, in, key, counted);
        break;
    case 6:
        must(kvi_remove_holder(both->ix, key) ==
                 model_remove_holders(both->model, key.worker, &key.rank),
             "remove holder");
        break;
    default:
        if (counted)
            do_window(both->windowed, in, key, &both->matches);
        else
            do_find(both, in);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + KV_MIN(size, (size_t)2048)};
    struct both both = {.model = model_new()};
    const char *wrong;

    must(kvi_create(NULL, &both.ix) == 0 && kvi_create(NULL, &both.windowed) == 0, "create");
    while (in.p < in.end)
        do_one(&both, &in);
    wrong = kvi_check(both.ix);
    must(!wrong, wrong);
    wrong = model_compare_stats(both.model, both.ix);
    must(!wrong, wrong);
    wrong = kvi_check(both.windowed);
    must(!wrong, wrong);
    kvi_matches_fini(&both.matches);
    kvi_destroy(both.windowed);
    kvi_destroy(both.ix);
    model_free(both.model);
    return 0;
}
