// SPDX-License-Identifier: Apache-2.0
/*
 * Bytes as operations on a prefix index and on the naive model of it. The universe is tiny (4 holders,
 * 4 tokens hashes, 32 engine hashes), so that a few bytes reach splits, moves, renames and cascades.
 */
#include <stdint.h>

#include "../tests/index/model.h"
#include "index/tree.h"

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
};

static void must(bool holds, const char *what)
{
    if (holds)
        return;
    fprintf(stderr, "fuzz_index: %s\n", what);
    abort();
}

static void do_store(struct both *both, struct input *in, struct kv_holder key, enum kv_tier tier)
{
    uint8_t shape = take(in), n = 1 + shape % 8;
    uint64_t parent = shape >> 3 & 31;
    bool has_parent = take(in) & 1;
    struct kvi_stored got = {0}, want = {0};
    struct kv_block blocks[8];
    int rc, expected;

    for (uint8_t i = 0; i < n; i++) {
        uint8_t byte = take(in);

        blocks[i] = (struct kv_block){byte >> 2 & 31, byte & 3};
    }
    expected = model_store(both->model, key, tier, has_parent ? &parent : NULL, blocks, n, &want);
    rc = kvi_store(both->ix, key, tier, has_parent ? &parent : NULL, blocks, n, &got);
    must(rc == expected, "store");
    must(rc || memcmp(&got, &want, sizeof(got)) == 0, "what was stored");
}

static void do_hashes(struct both *both, struct input *in, struct kv_holder key, enum kv_tier tier,
                      bool removing)
{
    uint8_t n = 1 + take(in) % 6;
    uint64_t hashes[6];
    long got, want;

    for (uint8_t i = 0; i < n; i++)
        hashes[i] = take(in) & 31;
    got = removing ? kvi_remove(both->ix, key, tier, hashes, n)
                   : kvi_store_known(both->ix, key, tier, hashes, n);
    want = removing ? model_remove(both->model, key, tier, hashes, n)
                    : model_store_known(both->model, key, tier, hashes, n);
    must(got == want, removing ? "remove" : "store known");
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

static void do_one(struct both *both, struct input *in)
{
    uint8_t op = take(in);
    struct kv_holder key = {op >> 3 & 1, op >> 4 & 1};
    enum kv_tier tier = (enum kv_tier)(op >> 5 & 3);

    switch (op & 7) {
    case 0:
    case 1:
    case 2:
        do_store(both, in, key, tier);
        break;
    case 3:
        do_hashes(both, in, key, tier, true);
        break;
    case 4:
        do_hashes(both, in, key, tier, false);
        break;
    case 5:
        model_clear(both->model, key);
        must(kvi_clear(both->ix, key) == 0, "clear");
        break;
    case 6:
        must(kvi_remove_holder(both->ix, key) ==
                 model_remove_holders(both->model, key.worker, &key.rank),
             "remove holder");
        break;
    default:
        do_find(both, in);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + KV_MIN(size, (size_t)2048)};
    struct both both = {.model = model_new()};
    const char *wrong;

    must(kvi_create(NULL, &both.ix) == 0, "create");
    while (in.p < in.end)
        do_one(&both, &in);
    wrong = kvi_check(both.ix);
    must(!wrong, wrong);
    wrong = model_compare_stats(both.model, both.ix);
    must(!wrong, wrong);
    kvi_matches_fini(&both.matches);
    kvi_destroy(both.ix);
    model_free(both.model);
    return 0;
}
