// SPDX-License-Identifier: Apache-2.0
/** The indexer as an engine model sees it: payloads in, the answer to a prompt out; and a tally. */
#ifndef KV_TESTS_MODELS_FOLLOW_H
#define KV_TESTS_MODELS_FOLLOW_H

#include "indexer/apply.h"
#include "indexer/lookup.h"
#include "models/prompts.h"

struct follower {
    struct kvi_index *index;
    struct ki_applier applier;
    struct ki_lookup lookup;
    uint32_t block_size;
    size_t asked, over, under;
};

static inline void follow_init(struct follower *f, uint32_t block_size)
{
    memset(f, 0, sizeof(*f));
    f->block_size = block_size;
    assert_int_equal(kvi_create(NULL, &f->index), 0);
    assert_int_equal(ki_applier_init(&f->applier, 7, 0, block_size, false), 0);
}

static inline void follow_fini(struct follower *f)
{
    ki_applier_fini(&f->applier);
    ki_lookup_fini(&f->lookup);
    kvi_destroy(f->index);
}

static inline void follow_apply(struct follower *f, struct kv_buf *payload)
{
    assert_int_equal(payload->error, 0);
    assert_int_not_equal(ki_applier_apply(&f->applier, f->index, payload->data, payload->len),
                         KI_APPLIED_PART);
    kv_buf_fini(payload);
}

static inline int follow_copy_run(void *arg, const struct kvi_dump_run *run)
{
    return kvi_store(arg, run->holder, run->tier, run->parent, run->blocks, run->n, NULL);
}

static inline int follow_copy_extra(void *arg, const struct kvi_extra *extra)
{
    return kvi_restore_extra(arg, extra);
}

/* Go on with what a replica has from a dump. */
static inline void follow_reload(struct follower *f)
{
    struct kvi_index *copy;

    assert_int_equal(kvi_create(NULL, &copy), 0);
    assert_int_equal(kvi_dump(f->index, follow_copy_run, copy), 0);
    assert_int_equal(kvi_dump_extras(f->index, follow_copy_extra, copy), 0);
    kvi_destroy(f->index);
    f->index = copy;
}

/* Blocks of @p that the indexer claims, in @tier or nearer. */
static inline size_t follow_ask(struct follower *f, const struct prompt *p, enum kv_tier tier)
{
    struct ki_mm_object object = {.start = p->image_start, .end = p->image_end};
    struct ki_prompt prompt = {.tokens = p->tokens,
                               .n = p->n,
                               .seed = prompt_seed(p),
                               .block_size = f->block_size,
                               .forms = f->applier.forms,
                               .objects = &object,
                               .n_objects = p->image > 0};

    if (p->image)
        object.identity =
            kve_mm_identity(prompt_images[p->image], prompt_len(prompt_images[p->image]));
    assert_int_equal(ki_lookup_prompt(&f->lookup, f->index, &prompt), 0);
    assert_true(f->lookup.matches.n <= 1);
    return f->lookup.matches.n ? f->lookup.matches.items[0].reach[tier] : 0;
}

static inline void follow_compare(struct follower *f, const struct prompt *p, enum kv_tier tier,
                                  size_t truth)
{
    size_t claimed = follow_ask(f, p, tier);

    f->asked++;
    f->over += claimed > truth;
    f->under += claimed < truth;
}

static inline void follow_report(const struct follower *f, const char *what)
{
    print_message("%-24s %6zu asked, %zu over, %zu under\n", what, f->asked, f->over, f->under);
}

#endif
