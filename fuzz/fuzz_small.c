// SPDX-License-Identifier: Apache-2.0
/*
 * Bytes as the events of an engine with windows of smaller blocks, through the whole path: decode,
 * apply, query, dump, restore. There are 2 ranks, 3 groups, 16 hashes and 2 tokens, so that events
 * contradict one another after a few bytes. A restored index answers as the first one does. Facts
 * from the input's bytes stand for the dump of a hostile peer.
 */
#include <string.h>

#include "base/json/msgpack.h"
#include "event/reader/reader_state.h"
#include "indexer/view/apply.h"
#include "require.h"

#define BLOCK 16u /* more than KVI_MAX_WINDOW_PARTS blocks of one token */
#define RANKS 2u
#define PROMPT 5u /* blocks */

struct input {
    const uint8_t *p, *end;
};

static uint8_t take(struct input *in)
{
    return in->p < in->end ? *in->p++ : 0;
}

/* -- events ------------------------------------------------------------------------------------ */

static void put_stored(struct kv_buf *out, struct input *in)
{
    static const uint32_t sizes[] = {BLOCK, BLOCK / 2, BLOCK / 4, 1, 2 * BLOCK, 3, 0, BLOCK / 2};
    static const char *const kinds[] = {"full_attention", "sliding_window", "mamba", "",
                                        "chunked_local_attention"};
    uint8_t shape = take(in), more = take(in), first = take(in);
    uint32_t size = sizes[shape & 7], n_hashes = 1 + (shape >> 3 & 7), n_tokens;

    n_tokens = more & 1 ? (uint32_t)(more >> 1 & 7) * BLOCK : n_hashes * size;
    kv_msgpack_put_map(out, 9);
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockStored");
    kv_msgpack_put_str(out, "block_hashes");
    kv_msgpack_put_array(out, n_hashes);
    for (uint32_t i = 0; i < n_hashes; i++)
        kv_msgpack_put_u64(out, first & 128 ? 1 + ((first + i) & 15) : 1 + (take(in) & 15));
    kv_msgpack_put_str(out, "parent_block_hash");
    if (first & 64)
        kv_msgpack_put_u64(out, 1 + (first >> 2 & 15));
    else
        kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "token_ids");
    kv_msgpack_put_array(out, n_tokens);
    for (uint32_t i = 0; i < n_tokens; i++)
        kv_msgpack_put_u64(out, i / BLOCK & 1);
    kv_msgpack_put_str(out, "block_size");
    kv_msgpack_put_u64(out, size);
    kv_msgpack_put_str(out, "medium");
    kv_msgpack_put_str(out, (more & 0x70) == 0x70 ? "CPU" : "GPU");
    kv_msgpack_put_str(out, "group_idx");
    kv_msgpack_put_u64(out, shape >> 6);
    kv_msgpack_put_str(out, "kv_cache_spec_kind");
    kv_msgpack_put_str(out, more & 128 ? "" : kinds[shape >> 6 ? 1 + (first & 3) : 0]);
    kv_msgpack_put_str(out, "kv_cache_spec_sliding_window");
    kv_msgpack_put_u64(out, 1 + (first & 3) * 3u);
}

static void put_removed(struct kv_buf *out, struct input *in)
{
    uint8_t shape = take(in);
    uint32_t n = 1 + (shape >> 4 & 3);

    kv_msgpack_put_map(out, 4);
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockRemoved");
    kv_msgpack_put_str(out, "block_hashes");
    kv_msgpack_put_array(out, n);
    for (uint32_t i = 0; i < n; i++)
        kv_msgpack_put_u64(out, 1 + (take(in) & 15));
    kv_msgpack_put_str(out, "medium");
    kv_msgpack_put_str(out, (shape & 12) == 12 ? "CPU" : "GPU");
    kv_msgpack_put_str(out, "group_idx");
    kv_msgpack_put_u64(out, shape & 3);
}

/* A batch of one to four events. */
static void put_batch(struct kv_buf *out, struct input *in, uint8_t op)
{
    uint32_t n = 1 + (op >> 4 & 3);

    kv_msgpack_put_array(out, 3);
    kv_msgpack_put_double(out, 1.5);
    kv_msgpack_put_array(out, n);
    for (uint32_t i = 0; i < n; i++) {
        uint8_t what = take(in);

        if ((what & 31) == 31) {
            kv_msgpack_put_map(out, 1);
            kv_msgpack_put_str(out, "type");
            kv_msgpack_put_str(out, "AllBlocksCleared");
        } else if (what & 1) {
            put_removed(out, in);
        } else {
            put_stored(out, in);
        }
    }
    kv_msgpack_put_u64(out, op >> 6 & 1);
}

/* -- queries, dumps ---------------------------------------------------------------------------- */

struct world {
    struct kvi_index *index;
    struct ki_applier applier;
    struct kvi_matches matches, others;
};

/* Local hashes of a prompt of blocks of zeros and ones, as the events' tokens are. */
static void prompt_of(uint64_t locals[PROMPT], uint8_t from)
{
    uint32_t tokens[BLOCK];

    for (uint32_t i = 0; i < PROMPT; i++) {
        for (uint32_t k = 0; k < BLOCK; k++)
            tokens[k] = (i + from) & 1;
        locals[i] = kve_hash_block(kve_seed(NULL, 0, NULL, 0), tokens, BLOCK, NULL, 0);
    }
}

static void ask(struct world *w, struct kvi_index *other)
{
    uint64_t locals[PROMPT];

    for (uint8_t from = 0; from < 2; from++) {
        prompt_of(locals, from);
        REQUIRE(kvi_find(w->index, locals, PROMPT, &w->matches) == 0);
        REQUIRE(w->matches.n <= RANKS);
        for (size_t i = 0; i < w->matches.n; i++)
            REQUIRE(w->matches.items[i].reach[KV_N_TIERS - 1] <= PROMPT);
        if (!other)
            continue;
        REQUIRE(kvi_find(other, locals, PROMPT, &w->others) == 0);
        REQUIRE(w->others.n == w->matches.n);
        for (size_t i = 0; i < w->matches.n; i++)
            for (size_t k = 0; k < w->others.n; k++)
                REQUIRE(w->matches.items[i].holder.rank != w->others.items[k].holder.rank ||
                        memcmp(w->matches.items[i].reach, w->others.items[k].reach,
                               sizeof(w->matches.items[i].reach)) == 0);
    }
}

static int copy_run(void *arg, const struct kvi_dump_run *run)
{
    return kvi_store(arg, run->holder, run->tier, run->parent, run->blocks, run->n, NULL);
}

static int copy_extra(void *arg, const struct kvi_extra *extra)
{
    return kvi_restore_extra(arg, extra);
}

/* A fact about windows that a peer's dump tells. */
static void restore_fact(struct world *w, struct input *in)
{
    static const enum kvi_extra_kind kinds[] = {
        KVI_EXTRA_WINDOW, KVI_EXTRA_WINDOW,       KVI_EXTRA_RULE,   KVI_EXTRA_PLACE,
        KVI_EXTRA_TIER,   KVI_EXTRA_WINDOW_BLOCK, KVI_EXTRA_COPIES, KVI_EXTRA_BLOCK};
    static const uint32_t numbers[] = {0, 1, 2, 3, 4, 8, 9, 24, 25, 255, 65536, UINT32_MAX};
    uint8_t what = take(in), sizes = take(in), part = take(in), more = take(in);
    struct kvi_source_copies copies = {more & 3, more >> 6, more >> 2 & 1};
    struct kvi_extra extra = {
        .holder = {7, what >> 3 & 1},
        .kind = kinds[what & 7],
        .hash = 1 + (part & 15),
        .parent = 1 + (part >> 4),
        .tokens_hash = sizes,
        .tiers = more & 15,
        .tier = more >> 4 & 3,
        .copies = more >> 6,
        .has_parent = sizes & 1,
        .alone = more & 1,
        .drops = more & 2,
        .main_keeps = more & 4,
        .kept_groups = sizes,
        .window = {.group = what >> 4 & 3,
                   .window = 1 + (more & 15),
                   .need = more >> 4,
                   .stride = numbers[(sizes & 15) % KV_COUNT(numbers)],
                   .part = numbers[(part & 15) % KV_COUNT(numbers)],
                   .parts = numbers[(sizes >> 4) % KV_COUNT(numbers)],
                   .needs = (enum kv_needs)(what >> 6 & 1)},
        .in_window = what >> 7 & 1,
        .implied = sizes & 3,
        .counting = sizes >> 2 & 3,
        .sources = &copies,
        .n_sources = sizes >> 4 & 1,
    };

    (void)kvi_restore_extra(w->index, &extra);
}

static void start(struct ki_applier *applier, uint8_t habits)
{
    REQUIRE(ki_applier_init(applier, 7, 0, BLOCK, KI_MM_PLACED) == 0);
    static const struct kve_told_group chunks = {
        .group = KVE_ANY_GROUP, .kind = KVE_KIND_CHUNKED, .chunk = 2 * BLOCK};
    struct ki_habits told = {.eagle_drop = habits & 1, .eagle_groups = habits >> 1 & 7};

    if (habits & 16)
        REQUIRE(!kve_told_add(&told.groups, &chunks));
    ki_applier_set_habits(applier, &told);
}

/* Go on with the state of the reader that a dump tells. */
static void restart(struct world *w, uint8_t habits)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 1};
    struct kv_buf text = KV_BUF_INIT;
    struct ki_applier next;
    struct kve_reader *told;
    struct kv_json_writer out;
    struct kv_json json;
    struct kv_str key;

    kv_json_writer_init(&out, &text);
    kv_json_begin_object(&out);
    kve_reader_write(w->applier.reader, &out);
    kv_json_end_object(&out);
    REQUIRE(kve_reader_create(&opts, &told) == 0);
    kv_json_init(&json, text.data, text.len);
    kv_json_object(&json);
    while (kv_json_next_key(&json, &key))
        REQUIRE(kve_reader_read(told, &json, key) == 1);
    REQUIRE(kv_json_finish(&json) == 0);
    start(&next, habits);
    REQUIRE(kve_reader_take_over(next.reader, told) == 0);
    for (uint32_t i = 0; i < w->applier.n_ranks; i++)
        REQUIRE(ki_applier_note_rank(&next, w->applier.ranks[i]));
    kve_reader_destroy(told);
    ki_applier_fini(&w->applier);
    w->applier = next;
    kv_buf_fini(&text);
}

static void reload(struct world *w, uint8_t habits)
{
    struct kvi_index *copy;

    REQUIRE(kvi_create(NULL, &copy) == 0);
    REQUIRE(kvi_dump(w->index, copy_run, copy) == 0);
    REQUIRE(kvi_dump_extras(w->index, copy_extra, copy) == 0);
    ask(w, copy);
    kvi_destroy(w->index);
    w->index = copy;
    restart(w, habits);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct input in = {data, data + size};
    struct world w = {0};
    uint8_t habits = take(&in);

    REQUIRE(kvi_create(NULL, &w.index) == 0);
    start(&w.applier, habits);
    while (in.p < in.end) {
        struct kv_buf payload = KV_BUF_INIT;
        uint8_t op = take(&in);

        if ((op & 15) == 15) {
            reload(&w, habits);
            continue;
        }
        if ((op & 15) == 14) {
            restore_fact(&w, &in);
            ask(&w, NULL);
            continue;
        }
        put_batch(&payload, &in, op);
        (void)ki_applier_apply(&w.applier, w.index, payload.data, payload.len);
        kv_buf_fini(&payload);
        (void)ki_applier_reasons(&w.applier);
        ask(&w, NULL);
    }
    ki_applier_purge(&w.applier, w.index, true);
    ki_applier_fini(&w.applier);
    kvi_matches_fini(&w.matches);
    kvi_matches_fini(&w.others);
    kvi_destroy(w.index);
    return 0;
}
