// SPDX-License-Identifier: Apache-2.0
/**
 * The indexer for engine models: payloads in, answers to prompts out; and a count of differences.
 */
#ifndef KV_TESTS_MODELS_FOLLOW_H
#define KV_TESTS_MODELS_FOLLOW_H

#include "event/reader/reader.h"
#include "indexer/model/lookup.h"
#include "indexer/view/apply.h"
#include "models/prompts.h"
#include "models/record.h"

struct follower {
    struct kvi_index *index;
    struct ki_applier applier;
    struct ki_lookup lookup;
    uint32_t block_size;
    size_t asked, over, under;
    size_t unsure, unsure_under, unsure_over; /* asked while the view was partial; of these wrong */
    size_t unsure_before_main;                /* of these before the main group has shown a block */
    bool unshown;                             /* the engine sends reports, which nobody told us */
    size_t unshown_wrong;                     /* copies were trusted before it has shown one */
    bool keeps;         /* batches, to read them again when the view becomes partial */
    struct kv_buf past; /* length and payload of each */
    size_t healed;
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
    kv_buf_fini(&f->past);
    kvi_destroy(f->index);
}

/* Read all batches again, as a replay from the beginning does. */
static inline void follow_heal(struct follower *f)
{
    size_t len;

    f->healed++;
    ki_applier_purge(&f->applier, f->index, true);
    kve_reader_renew(f->applier.reader);
    for (size_t at = 0; at < f->past.len; at += len) {
        memcpy(&len, f->past.data + at, sizeof(len));
        at += sizeof(len);
        assert_int_not_equal(ki_applier_apply(&f->applier, f->index, f->past.data + at, len),
                             KI_APPLIED_PART);
    }
}

static inline void follow_apply(struct follower *f, struct kv_buf *payload)
{
    enum ki_applied applied;

    assert_int_equal(payload->error, 0);
    if (f->keeps) {
        kv_buf_append(&f->past, &payload->len, sizeof(payload->len));
        kv_buf_append(&f->past, payload->data, payload->len);
        assert_int_equal(f->past.error, 0);
    }
    applied = ki_applier_apply(&f->applier, f->index, payload->data, payload->len);
    if (applied == KI_APPLIED_PART && f->keeps)
        follow_heal(f);
    else
        assert_int_not_equal(applied, KI_APPLIED_PART);
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

/* A value by which to tell @p from other prompts. */
static inline uint64_t prompt_check(const struct prompt *p)
{
    uint64_t sum = p->n + 31 * p->lora + 37 * p->salt + 41 * p->image;

    for (size_t i = 0; i < p->n; i++)
        sum = 3 * sum + p->tokens[i];
    return sum;
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

    record_answer(prompt_check(p) + tier, claimed, truth, ki_applier_reasons(&f->applier));
    f->asked++;
    if (f->unshown && f->applier.reports.trusted && !ki_reports_are_on(&f->applier.reports)) {
        f->unshown_wrong += claimed != truth;
        return;
    }
    if (ki_applier_reasons(&f->applier)) {
        f->unsure++;
        f->unsure_before_main += !kve_reader_has_main(f->applier.reader, f->applier.rank);
        f->unsure_under += claimed < truth;
        f->unsure_over += claimed > truth;
        return;
    }
    f->over += claimed > truth;
    f->under += claimed < truth;
}

/* Add the tally of one history to that of all. */
static inline void follow_tally(struct follower *all, const struct follower *f)
{
    all->asked += f->asked;
    all->over += f->over;
    all->under += f->under;
    all->unsure += f->unsure;
    all->unsure_before_main += f->unsure_before_main;
    all->unsure_under += f->unsure_under;
    all->unsure_over += f->unsure_over;
    all->unshown_wrong += f->unshown_wrong;
    all->healed += f->healed;
}

static inline void follow_report(const struct follower *f, const char *what)
{
    print_message("%-24s %6zu asked, %zu over, %zu under", what, f->asked, f->over, f->under);
    if (f->unsure)
        print_message("; %zu while partial, %zu of them over, %zu under", f->unsure, f->unsure_over,
                      f->unsure_under);
    if (f->unshown_wrong)
        print_message("; %zu wrong, as copies were trusted before the first report",
                      f->unshown_wrong);
    print_message("\n");
}

#endif
