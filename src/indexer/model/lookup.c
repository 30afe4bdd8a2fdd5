// SPDX-License-Identifier: Apache-2.0
#include "indexer/model/lookup.h"

#include <errno.h>
#include <stdlib.h>

#include "kv_event.h"

#define MAX_MM 256 /* objects of one block, the same limit as in events */

void ki_lookup_fini(struct ki_lookup *lookup)
{
    kv_buf_fini(&lookup->hashes);
    kv_buf_fini(&lookup->other_hashes);
    kvi_matches_fini(&lookup->matches);
    kvi_matches_fini(&lookup->others);
}

/* One form of hashing, taken from a set of form bits. */
struct form {
    uint32_t lookahead;
    bool placed;
};

static struct form next_form(uint64_t *forms)
{
    uint32_t bit = (uint32_t)__builtin_ctzll(*forms);

    *forms &= *forms - 1;
    return (struct form){bit % 32, bit >= 32};
}

/* -- hashing ----------------------------------------------------------------------------------- */

static bool is_over(const struct ki_mm_object *object, uint64_t block, uint64_t start)
{
    return object->end ? object->end <= start : object->start < block;
}

static bool is_in(const struct ki_mm_object *object, uint64_t block, uint64_t end)
{
    return object->end ? object->start < end : object->start == block;
}

/* Hash the object's place. Returns false when the place is not known. */
static bool put_place(const struct ki_mm_object *object, uint64_t start, uint64_t *identity)
{
    if (!object->end && !object->to)
        return false;
    *identity = kve_mm_placed(object->identity,
                              object->end ? (int64_t)(object->start - start) : object->place);
    return true;
}

/*
 * Hash blocks with objects again, objects included. Objects are in order, so one pass is enough.
 * *@n is cut where the form needs an object's place that is not known.
 */
static int hash_objects(const struct ki_prompt *prompt, struct form form, size_t *n,
                        uint64_t *hashes)
{
    const uint32_t lookahead = form.lookahead;
    uint64_t ids[MAX_MM];
    size_t first = 0;

    for (size_t i = 0; i < *n && first < prompt->n_objects; i++) {
        uint64_t start = i * prompt->block_size, end = start + prompt->block_size + lookahead;
        size_t n_ids = 0;

        while (first < prompt->n_objects && is_over(&prompt->objects[first], i, start))
            first++;
        for (size_t k = first; k < prompt->n_objects && is_in(&prompt->objects[k], i, end); k++) {
            if (n_ids == MAX_MM)
                return -E2BIG;
            ids[n_ids] = prompt->objects[k].identity;
            if (form.placed && !put_place(&prompt->objects[k], start, &ids[n_ids])) {
                *n = i;
                return 0;
            }
            n_ids++;
        }
        if (n_ids)
            hashes[i] = kve_hash_block(prompt->seed, prompt->tokens + start,
                                       prompt->block_size + lookahead, ids, n_ids);
    }
    return 0;
}

static int hash_form(const struct ki_prompt *prompt, struct form form, struct kv_buf *ret)
{
    uint64_t *hashes;
    size_t n;
    int rc;

    kv_buf_clear(ret);
    if (kv_buf_reserve(ret, (prompt->n / prompt->block_size + 1) * sizeof(uint64_t)) < 0)
        return -ENOMEM;
    hashes = (uint64_t *)(void *)ret->data;
    n = kve_hash_tokens(prompt->seed, prompt->tokens, prompt->n, prompt->block_size, form.lookahead,
                        hashes);
    rc = prompt->n_objects ? hash_objects(prompt, form, &n, hashes) : 0;
    ret->len = n * sizeof(uint64_t);
    return rc;
}

/* -- merging ----------------------------------------------------------------------------------- */

int ki_by_holder(const void *a, const void *b)
{
    const struct kv_holder *x = &((const struct kvi_match *)a)->holder;
    const struct kv_holder *y = &((const struct kvi_match *)b)->holder;

    if (x->worker != y->worker)
        return x->worker < y->worker ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

static int append(struct kvi_matches *to, const struct kvi_matches *from)
{
    struct kvi_match *grown;

    if (to->n + from->n > to->capacity) {
        size_t capacity = 2 * (to->n + from->n);

        grown = realloc(to->items, capacity * sizeof(*grown));
        if (!grown)
            return -ENOMEM;
        to->items = grown;
        to->capacity = capacity;
    }
    for (size_t i = 0; i < from->n; i++)
        to->items[to->n++] = from->items[i];
    return 0;
}

/*
 * Merge a holder's two matches. A holder that changed its form is in both while its old blocks are
 * known: the longer match counts.
 */
static void merge_neighbours(struct kvi_matches *matches)
{
    size_t n = 0;

    if (matches->n > 1)
        qsort(matches->items, matches->n, sizeof(matches->items[0]), ki_by_holder);
    for (size_t i = 0; i < matches->n; i++) {
        struct kvi_match *last = n ? &matches->items[n - 1] : NULL;

        if (!last || ki_by_holder(last, &matches->items[i]) != 0) {
            matches->items[n++] = matches->items[i];
            continue;
        }
        for (int t = 0; t < KV_N_TIERS; t++)
            last->reach[t] = KV_MAX(last->reach[t], matches->items[i].reach[t]);
    }
    matches->n = n;
}

static int ask_other(struct ki_lookup *lookup, struct kvi_index *index,
                     const struct ki_prompt *prompt, struct form form)
{
    int rc = hash_form(prompt, form, &lookup->other_hashes);

    if (rc == 0)
        rc = kvi_find_groups(index, (const uint64_t *)(const void *)lookup->other_hashes.data,
                             lookup->other_hashes.len / sizeof(uint64_t), &lookup->others,
                             lookup->groups);
    return rc < 0 ? rc : append(&lookup->matches, &lookup->others);
}

uint64_t ki_prompt_forms(const struct ki_prompt *prompt)
{
    uint64_t forms = prompt->forms ? prompt->forms : 1;

    if (!prompt->n_objects) /* a prompt without objects has no places */
        forms = (forms | forms >> 32) & UINT32_MAX;
    return forms;
}

int ki_prompt_hash(const struct ki_prompt *prompt, uint64_t form, struct kv_buf *ret)
{
    return hash_form(prompt, next_form(&form), ret);
}

int ki_lookup_prompt(struct ki_lookup *lookup, struct kvi_index *index,
                     const struct ki_prompt *prompt)
{
    uint64_t forms = ki_prompt_forms(prompt);
    struct form form;
    int rc;

    form = next_form(&forms);
    rc = hash_form(prompt, form, &lookup->hashes);
    if (rc < 0)
        return rc;
    lookup->n_blocks = lookup->hashes.len / sizeof(uint64_t);
    rc = kvi_find_groups(index, (const uint64_t *)(const void *)lookup->hashes.data,
                         lookup->n_blocks, &lookup->matches, lookup->groups);
    if (rc < 0 || !forms)
        return rc;
    while (forms && rc == 0)
        rc = ask_other(lookup, index, prompt, next_form(&forms));
    merge_neighbours(&lookup->matches);
    return rc;
}
