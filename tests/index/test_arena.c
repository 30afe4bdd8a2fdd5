// SPDX-License-Identifier: Apache-2.0
/* The arena, and the pages below it, beside plain lists of the owners of slots and bytes. */
#include <errno.h>
#include <inttypes.h>
#include <string.h>

#include "base/unit.h"
#include "index/memory/arena.h"
#include "random.h"

#define N_PAGES 24u
#define N_EXTENTS 4000u
#define NOBODY 0u

struct extent {
    uint32_t pos, n; /* n: 0 when free */
};

struct world {
    struct kvi_mem mem;
    struct kv_limbo limbo;
    struct kvi_arena arena;
    struct rng rng;
    struct extent extent[N_EXTENTS];
    uint32_t owner[N_PAGES][KVI_PAGE_SLOTS]; /* number of the extent + 1 */
};

static void free_retired(void *arg, struct kv_retired *object, unsigned kind)
{
    (void)kind;
    kvi_mem_free(arg, object);
}

static void own(struct world *world, uint32_t pos, uint32_t n, uint32_t from, uint32_t to)
{
    assert_true(pos >> KVI_PAGE_SHIFT < N_PAGES && kvi_slot_of(pos) + n <= KVI_PAGE_SLOTS);
    for (uint32_t i = 0; i < n; i++) {
        uint32_t *owner = &world->owner[pos >> KVI_PAGE_SHIFT][kvi_slot_of(pos) + i];

        if (*owner != from)
            fail_msg("slot %u belongs to %u, not %u; seed %" PRIu64, pos + i, *owner, from,
                     test_seed());
        *owner = to;
    }
}

/* Words that an extent's owner wrote stay, including the half beside the header. */
static void write_words(struct world *world, uint32_t e)
{
    for (uint32_t i = 0; i < world->extent[e].n; i++) {
        *kvi_arena_locals(&world->arena, world->extent[e].pos + i) = (uint64_t)e << 32 | i;
        *kvi_arena_engines(&world->arena, world->extent[e].pos + i) = ~((uint64_t)e << 32 | i);
    }
}

static void check_extent(struct world *world, uint32_t e)
{
    const struct extent *extent = &world->extent[e];

    assert_int_equal(kvi_arena_size(&world->arena, extent->pos), extent->n);
    for (uint32_t i = 0; i < extent->n; i++) {
        assert_int_equal(kvi_arena_start(&world->arena, extent->pos + i), extent->pos);
        assert_true(*kvi_arena_locals(&world->arena, extent->pos + i) == ((uint64_t)e << 32 | i));
        assert_true(*kvi_arena_engines(&world->arena, extent->pos + i) == ~((uint64_t)e << 32 | i));
    }
}

static uint32_t size(struct rng *rng)
{
    return 2 + (rng_below(rng, 8) ? rng_below(rng, 66) : rng_below(rng, 256));
}

static void take(struct world *world, uint32_t e)
{
    struct extent *extent = &world->extent[e];

    extent->n = size(&world->rng);
    extent->pos = kvi_arena_alloc(&world->arena, extent->n);
    assert_int_not_equal(extent->pos, KVI_NO_POS);
    own(world, extent->pos, extent->n, NOBODY, e + 1);
    write_words(world, e);
}

static void give(struct world *world, uint32_t e)
{
    check_extent(world, e);
    own(world, world->extent[e].pos, world->extent[e].n, e + 1, NOBODY);
    kvi_arena_free(&world->arena, world->extent[e].pos);
    world->extent[e].n = 0;
}

/* Longer, if and only if the slots behind are free. */
static void extend(struct world *world, uint32_t e)
{
    struct extent *extent = &world->extent[e];
    uint32_t more = 1 + rng_below(&world->rng, 20), end = extent->pos + extent->n, n = 0;
    bool free_behind = kvi_slot_of(end) + more <= KVI_PAGE_SLOTS;

    for (; free_behind && n < more; n++)
        free_behind = !world->owner[end >> KVI_PAGE_SHIFT][kvi_slot_of(end) + n];
    assert_int_equal(kvi_arena_extend(&world->arena, end, more), free_behind);
    if (!free_behind)
        return;
    own(world, end, more, NOBODY, e + 1);
    extent->n += more;
    write_words(world, e);
}

/* Cut an extent in two; the end becomes extent @other. */
static void cut(struct world *world, uint32_t e, uint32_t other)
{
    struct extent *extent = &world->extent[e], *rest = &world->extent[other];
    uint32_t at = 1 + rng_below(&world->rng, extent->n - 1);

    *rest = (struct extent){extent->pos + at, extent->n - at};
    extent->n = at;
    kvi_arena_cut(&world->arena, rest->pos);
    own(world, rest->pos, rest->n, e + 1, other + 1);
    write_words(world, other);
}

static void test_arena(void **state)
{
    static struct world world;
    (void)state;

    print_message("seed %" PRIu64 "\n", test_seed());
    world = (struct world){.rng = {test_seed()}};
    kv_limbo_init(&world.limbo, 0, 1 << 20, free_retired, &world.mem);
    kvi_arena_init(&world.arena, &world.mem, &world.limbo, 0);
    for (uint32_t shrink = 10; shrink <= 90; shrink += 20) {
        uint32_t grow = 100 - shrink;

        for (long i = 0, n = test_rounds(40000); i < n; i++) {
            uint32_t e = rng_below(&world.rng, N_EXTENTS), other = rng_below(&world.rng, N_EXTENTS);

            if (!world.extent[e].n && rng_below(&world.rng, 100) < grow)
                take(&world, e);
            else if (world.extent[e].n && rng_below(&world.rng, 8) == 0)
                extend(&world, e);
            else if (world.extent[e].n > 1 && !world.extent[other].n && e != other &&
                     rng_below(&world.rng, 8) == 0)
                cut(&world, e, other);
            else if (world.extent[e].n && rng_below(&world.rng, 100) >= grow)
                give(&world, e);
            if (i % 64 == 0)
                kvi_arena_release(&world.arena, 1);
        }
        for (uint32_t e = 0; e < N_EXTENTS; e++)
            if (world.extent[e].n)
                check_extent(&world, e);
    }
    for (uint32_t e = 0; e < N_EXTENTS; e++)
        if (world.extent[e].n)
            give(&world, e);
    kvi_arena_release(&world.arena, 0);
    assert_int_equal(world.arena.n_empty, 0);
    assert_int_equal(world.arena.pages.n_live, 0);
    kv_limbo_fini(&world.limbo);
    kvi_arena_fini(&world.arena);
    assert_int_equal(world.mem.bytes, 0);
}

/* -- pages ------------------------------------------------------------------------------------- */

#define N_RUNS 300u
#define PAGE ((size_t)4096)

struct run {
    unsigned char *memory;
    size_t bytes;
};

static bool all(const struct run *run, unsigned char value)
{
    for (size_t i = 0; i < run->bytes; i += 64)
        if (run->memory[i] != value)
            return false;
    return run->memory[run->bytes - 1] == value;
}

static void map_one(struct kvi_mem *mem, struct rng *rng, struct run *run, unsigned char mark)
{
    static const size_t usual[] = {PAGE, 4 * PAGE, 64 * PAGE, 3 * PAGE, 17 * PAGE};
    size_t n = sizeof(usual) / sizeof(usual[0]), bytes = usual[rng_below(rng, (uint32_t)n)];

    run->bytes = bytes;
    run->memory = kvi_mem_map(mem, bytes);
    assert_non_null(run->memory);
    assert_true((uintptr_t)run->memory % ((bytes & (bytes - 1)) ? PAGE : bytes) == 0);
    if (!all(run, 0))
        fail_msg("a run that isn't zero; seed %" PRIu64, test_seed());
    memset(run->memory, mark, bytes);
}

static void unmap_one(struct kvi_mem *mem, struct run *run, unsigned char mark)
{
    if (!all(run, mark))
        fail_msg("somebody else wrote here; seed %" PRIu64, test_seed());
    kvi_mem_unmap(mem, run->memory, run->bytes);
    *run = (struct run){0};
}

static void test_pages(void **state)
{
    static struct run runs[N_RUNS];
    struct kvi_mem mem = {0};
    struct rng rng = {test_seed()};
    (void)state;

    for (uint32_t shrink = 20; shrink <= 80; shrink += 30) {
        uint32_t grow = 100 - shrink;

        for (long i = 0, n = test_rounds(8000); i < n; i++) {
            uint32_t r = rng_below(&rng, N_RUNS);
            size_t held = 0;

            if (!runs[r].memory && rng_below(&rng, 100) < grow)
                map_one(&mem, &rng, &runs[r], (unsigned char)(r % 255 + 1));
            else if (runs[r].memory && rng_below(&rng, 100) >= grow)
                unmap_one(&mem, &runs[r], (unsigned char)(r % 255 + 1));
            for (uint32_t k = 0; k < N_RUNS; k++)
                held += runs[k].bytes;
            assert_true(mem.bytes >= held);
        }
    }
    for (uint32_t r = 0; r < N_RUNS; r++)
        if (runs[r].memory)
            unmap_one(&mem, &runs[r], (unsigned char)(r % 255 + 1));
    assert_int_equal(mem.bytes, 0);
    assert_true(!mem.regions && !mem.full_regions);
}

static void test_refused(void **state)
{
    struct kvi_mem mem = {0};
    (void)state;

    kvi_mem_fail_at(1);
    assert_null(kvi_mem_map(&mem, PAGE));
    assert_true(kvi_mem_failed());
    kvi_mem_fail_at(0);
    assert_int_equal(mem.bytes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_pages),
        cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
