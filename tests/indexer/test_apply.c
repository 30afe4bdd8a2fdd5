// SPDX-License-Identifier: Apache-2.0
/*
 * Events of a batch that continue each other are stored together. The index and the counters must
 * be as if every event had come in a batch of its own.
 */
#include "indexer/apply.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/buf.h"
#include "base/error.h"
#include "base/msgpack.h"
#include "base/unit.h"

enum { BLOCK_SIZE = 4, MAX_EVENTS = 12, HASHES = 40 };

static uint64_t seed;

static void put_store(struct kv_buf *out, const uint64_t *hashes, uint32_t n, uint64_t parent,
                      const char *medium)
{
    kv_msgpack_put_map(out, 6);
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockStored");
    kv_msgpack_put_str(out, "block_hashes");
    kv_msgpack_put_array(out, n);
    kv_msgpack_put_u64s(out, hashes, n);
    kv_msgpack_put_str(out, "parent_block_hash");
    if (parent)
        kv_msgpack_put_u64(out, parent);
    else
        kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "token_ids");
    kv_msgpack_put_array(out, n * BLOCK_SIZE);
    for (uint32_t i = 0; i < n * BLOCK_SIZE; i++)
        kv_msgpack_put_u64(out, hashes[i / BLOCK_SIZE]);
    kv_msgpack_put_str(out, "block_size");
    kv_msgpack_put_u64(out, BLOCK_SIZE);
    kv_msgpack_put_str(out, "medium");
    kv_msgpack_put_str(out, medium);
}

static void put_remove(struct kv_buf *out, uint64_t hash)
{
    kv_msgpack_put_map(out, 2);
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockRemoved");
    kv_msgpack_put_str(out, "block_hashes");
    kv_msgpack_put_array(out, 1);
    kv_msgpack_put_u64(out, hash);
}

/* Mostly a prompt in pieces; sometimes a jump, an unknown parent, a hash again, a removal. */
static void put_random_event(struct kv_buf *out, uint64_t *last)
{
    uint64_t hashes[3];
    uint32_t n = (uint32_t)unit_below(&seed, 4);

    if (unit_below(&seed, 8) == 0) {
        put_remove(out, 1 + unit_below(&seed, HASHES));
        return;
    }
    if (unit_below(&seed, 6) == 0)
        *last = unit_below(&seed, HASHES);
    for (uint32_t i = 0; i < n; i++)
        hashes[i] = unit_below(&seed, 5) ? (*last + i) % HASHES + 1 : 1 + unit_below(&seed, HASHES);
    put_store(out, hashes, n, *last, unit_below(&seed, 10) ? "GPU" : "CPU");
    if (n)
        *last = hashes[n - 1];
}

static void begin_batch(struct kv_buf *out, uint32_t n)
{
    kv_buf_clear(out);
    kv_msgpack_put_array(out, 3);
    kv_msgpack_put_double(out, 1.5);
    kv_msgpack_put_array(out, n);
}

static int print_run(void *arg, const struct kvi_dump_run *run)
{
    kv_buf_printf(arg, "%d %d %" PRIx64 ":", (int)run->holder.rank, (int)run->tier,
                  run->parent ? *run->parent : 0);
    for (size_t i = 0; i < run->n; i++)
        kv_buf_printf(arg, " %" PRIx64 "/%" PRIx64, run->blocks[i].hash,
                      run->blocks[i].tokens_hash);
    kv_buf_putc(arg, '\n');
    return 0;
}

struct side {
    struct kvi_index *index;
    struct ki_applier applier;
    struct kv_buf dump;
};

static void side_init(struct side *side)
{
    memset(side, 0, sizeof(*side));
    assert_int_equal(kvi_create(NULL, &side->index), 0);
    assert_int_equal(ki_applier_init(&side->applier, 7, 0, BLOCK_SIZE, false), 0);
}

static void side_fini(struct side *side)
{
    ki_applier_fini(&side->applier);
    kvi_destroy(side->index);
    kv_buf_fini(&side->dump);
}

static void side_apply(struct side *side, struct kv_buf *batch)
{
    kv_msgpack_put_nil(batch);
    assert_int_equal(ki_applier_apply(&side->applier, side->index, batch->data, batch->len),
                     KI_APPLIED);
}

static void compare(struct side *a, struct side *b)
{
    kv_buf_clear(&a->dump);
    kv_buf_clear(&b->dump);
    assert_int_equal(kvi_dump(a->index, print_run, &a->dump), 0);
    assert_int_equal(kvi_dump(b->index, print_run, &b->dump), 0);
    assert_string_equal(kv_buf_cstr(&a->dump), kv_buf_cstr(&b->dump));
    assert_int_equal(a->applier.stats.orphans, b->applier.stats.orphans);
    assert_int_equal(a->applier.stats.rejected, b->applier.stats.rejected);
    assert_int_equal(a->applier.stats.blocks, b->applier.stats.blocks);
}

static void together_as_apart(void **state)
{
    struct kv_buf events[MAX_EVENTS] = {{0}}, batch = KV_BUF_INIT;
    struct side together, apart;
    uint64_t last = 0;

    (void)state;
    seed = unit_seed();
    side_init(&together);
    side_init(&apart);
    for (size_t round = 0; round < unit_rounds(4000); round++) {
        uint32_t n = 1 + (uint32_t)unit_below(&seed, MAX_EVENTS);

        begin_batch(&batch, n);
        for (uint32_t i = 0; i < n; i++) {
            kv_buf_clear(&events[i]);
            put_random_event(&events[i], &last);
            kv_buf_append(&batch, events[i].data, events[i].len);
        }
        side_apply(&together, &batch);
        for (uint32_t i = 0; i < n; i++) {
            begin_batch(&batch, 1);
            kv_buf_append(&batch, events[i].data, events[i].len);
            side_apply(&apart, &batch);
        }
        compare(&together, &apart);
    }
    side_fini(&together);
    side_fini(&apart);
    kv_buf_fini(&batch);
    for (size_t i = 0; i < MAX_EVENTS; i++)
        kv_buf_fini(&events[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(together_as_apart)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
