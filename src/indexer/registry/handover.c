// SPDX-License-Identifier: Apache-2.0
#include "indexer/registry/handover.h"

#include <errno.h>
#include <stdlib.h>

#include "event/reader/reader_state.h"
#include "indexer/registry/tables.h"

int ki_handover_create(struct ki_handover **ret)
{
    struct kve_reader_opts opts = {.size = sizeof(opts), .block_size = 1};
    struct ki_handover *h = calloc(1, sizeof(*h));

    if (!h)
        return -ENOMEM;
    if (kve_reader_create(&opts, &h->reader) < 0) {
        free(h);
        return -ENOMEM;
    }
    h->state.facts = KI_FACT_SUSPECTS; /* assume so until the text says otherwise */
    h->state.reasons = KI_BECAUSE(PEER);
    *ret = h;
    return 0;
}

void ki_handover_free(struct ki_handover *h)
{
    if (!h)
        return;
    kve_reader_destroy(h->reader);
    kv_buf_fini(&h->ends);
    kv_buf_fini(&h->doubts.items);
    free(h);
}

int ki_handover_copy(const struct ki_handover *h, struct ki_handover **ret)
{
    struct ki_handover *copy = calloc(1, sizeof(*copy));

    if (!copy)
        return -ENOMEM;
    *copy = *h;
    copy->has_ends = false;
    copy->ends = (struct kv_buf)KV_BUF_INIT;
    copy->doubts = (struct ki_end_doubts){.known = false};
    copy->reader = kve_reader_copy(h->reader);
    if (!copy->reader) {
        free(copy);
        return -ENOMEM;
    }
    *ret = copy;
    return 0;
}

int ki_handover_take(struct ki_listener *l, struct ki_handover **ret)
{
    struct ki_handover h = {.instance = l->instance, .rank = l->rank};
    int rc = -ENODATA;

    pthread_mutex_lock(&l->lock);
    if (ki_stream_has_position(&l->stream) && !l->gone) {
        ki_state_take(l, &h.state);
        h.reader = l->applier.reader;
        rc = ki_handover_copy(&h, ret);
    }
    ki_listener_unlock(l);
    return rc;
}

static void give_ends(struct ki_handover *h, struct ki_applier *a)
{
    ki_overlap_set(&a->overlap, (struct ki_end_copies *)(void *)h->ends.data,
                   h->ends.len / sizeof(struct ki_end_copies));
    h->ends = (struct kv_buf)KV_BUF_INIT;
    h->has_ends = false;
    kv_buf_fini(&a->overlap.doubts.items);
    a->overlap.doubts = h->doubts;
    h->doubts = (struct ki_end_doubts){.known = false};
}

void ki_handover_give(struct ki_handover *h, struct ki_listener *l)
{
    pthread_mutex_lock(&l->lock);
    if (!l->started && l->stream.base == KI_BASE_PEER && l->stream.position == h->state.sequence) {
        ki_state_give(&h->state, l);
        if (h->has_ends)
            give_ends(h, &l->applier);
        if (kve_reader_take_over(l->applier.reader, h->reader) < 0)
            ki_stream_seed_torn(&l->stream);
    } else if (l->stream.base == KI_BASE_PEER || l->stream.base == KI_BASE_UNPLACED) {
        ki_stream_seed_torn(&l->stream);
    }
    ki_listener_unlock(l);
}

/* -- in dumps ---------------------------------------------------------------------------------- */

void ki_handover_write(const struct ki_handover *h, struct kv_json_writer *w)
{
    kv_json_member_u64(w, "worker_id", h->instance);
    kv_json_member_u64(w, "dp_rank", h->rank);
    ki_state_write(&h->state, w);
    kve_reader_write(h->reader, w);
}

void ki_handover_read(struct ki_handover *h, struct kv_json *json)
{
    struct kv_str key;
    int rc;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "worker_id"))
            h->instance = kv_json_u64(json, UINT64_MAX);
        else if (kv_str_eq(key, "dp_rank"))
            h->rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
        else if (ki_state_read(&h->state, json, key))
            continue;
        else if ((rc = kve_reader_read(h->reader, json, key)) < 0)
            h->unusable = true;
        else if (!rc)
            kv_json_skip(json);
    }
}

int ki_handover_compare(const void *a, const void *b)
{
    const struct ki_handover *x = *(struct ki_handover *const *)a;
    const struct ki_handover *y = *(struct ki_handover *const *)b;

    if (x->instance != y->instance)
        return x->instance < y->instance ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* Compare like ki_handover_compare; order the handovers of one stream by age. */
static int compare_age(const void *a, const void *b)
{
    const struct ki_handover *x = *(struct ki_handover *const *)a;
    const struct ki_handover *y = *(struct ki_handover *const *)b;
    int order = ki_handover_compare(a, b);

    if (order)
        return order;
    return (x->state.sequence > y->state.sequence) - (x->state.sequence < y->state.sequence);
}

/*
 * Sort, and keep the newest of each stream. A stream that was registered during the dump is written
 * twice.
 */
static size_t drop_older(struct ki_handover **handovers, size_t n)
{
    size_t kept = 0;

    if (n)
        qsort(handovers, n, sizeof(handovers[0]), compare_age);
    for (size_t i = 0; i < n; i++) {
        if (i + 1 < n && ki_handover_compare(&handovers[i], &handovers[i + 1]) == 0)
            ki_handover_free(handovers[i]);
        else
            handovers[kept++] = handovers[i];
    }
    return kept;
}

size_t ki_handover_note(struct ki_handover **handovers, size_t n, struct ki_mark *marks,
                        size_t n_marks)
{
    n = drop_older(handovers, n);
    for (size_t i = 0; n && i < n_marks; i++) {
        struct ki_handover key = {.instance = marks[i].holder.worker, .rank = marks[i].stream_rank};
        const struct ki_handover *wanted = &key;
        struct ki_handover **found;

        if (!marks[i].has_position)
            continue;
        found = bsearch(&wanted, handovers, n, sizeof(handovers[0]), ki_handover_compare);
        if (!found)
            continue;
        if ((*found)->unusable || (*found)->state.sequence < marks[i].at.sequence) {
            (*found)->unusable = marks[i].torn = true;
        } else if ((*found)->state.sequence > marks[i].at.sequence) {
            marks[i].at.sequence = (*found)->state.sequence;
            marks[i].at.timestamp = (*found)->state.timestamp;
            marks[i].at.reasons |= (*found)->state.reasons;
        }
    }
    return n;
}

/* -- the registry's ---------------------------------------------------------------------------- */

/*
 * List workers that no listener follows here, with blocks from a peer's dump in @model. Returns
 * their number.
 */
static long kept_holders(struct ki_registry *r, const struct ki_model *model,
                         struct kv_holder **ret)
{
    struct kv_buf holders = KV_BUF_INIT;
    const struct ki_position *p = NULL;

    pthread_mutex_lock(&r->admin);
    if (r->positions.buckets) {
        TAILQ_FOREACH(p, &r->positions.with_blocks, age)
        {
            if (p->handover && kvi_holder_blocks(model->index, p->mark.holder))
                kv_buf_append(&holders, &p->mark.holder, sizeof(p->mark.holder));
        }
    }
    pthread_mutex_unlock(&r->admin);
    if (holders.error) {
        kv_buf_fini(&holders);
        return -ENOMEM;
    }
    *ret = (struct kv_holder *)(void *)holders.data;
    return (long)(holders.len / sizeof(**ret));
}

/*
 * Copy the state kept for @holder and pass it on. A holder registered since then is among the
 * listeners.
 */
static int tell_kept(struct ki_registry *r, struct kv_holder holder, ki_handover_fn fn, void *arg)
{
    const struct ki_position *p = NULL;
    struct ki_handover *copy = NULL;
    int rc = 0;

    pthread_mutex_lock(&r->admin);
    do {
        p = ki_positions_next(&r->positions, holder.worker, p);
    } while (p && p->mark.holder.rank != holder.rank);
    if (p && p->handover && p->has_blocks)
        rc = ki_handover_copy(p->handover, &copy);
    pthread_mutex_unlock(&r->admin);
    if (copy)
        rc = fn(arg, copy);
    ki_handover_free(copy);
    return rc;
}

static int tell_listener(struct ki_listener *l, const struct ki_model *model, ki_handover_fn fn,
                         void *arg)
{
    struct ki_handover *h;
    int rc = ki_listener_feeds(l, model) ? ki_handover_take(l, &h) : -ENODATA;

    if (rc)
        return rc == -ENODATA ? 0 : rc;
    rc = fn(arg, h);
    ki_handover_free(h);
    return rc;
}

int ki_registry_handovers(struct ki_registry *registry, const struct ki_model *model,
                          ki_handover_fn fn, void *arg)
{
    struct ki_listener **listeners;
    struct kv_holder *kept = NULL;
    long n = kept_holders(registry, model, &kept); /* first: one of these may become a listener */
    int rc = (int)KV_MIN(n, 0);

    for (long i = 0; i < n && !rc; i++)
        rc = tell_kept(registry, kept[i], fn, arg);
    free(kept);
    if (rc)
        return rc;
    n = ki_tables_snapshot(registry, &listeners);
    if (n < 0)
        return (int)n;
    for (long i = 0; i < n && !rc; i++)
        rc = tell_listener(listeners[i], model, fn, arg);
    ki_tables_snapshot_free(listeners, n);
    return rc;
}

void ki_registry_hand_over(struct ki_registry *registry, const char *name, const char *tenant,
                           struct ki_handover **handovers, size_t n)
{
    const struct ki_model *model;

    pthread_mutex_lock(&registry->admin);
    model = ki_model_find(registry, name, tenant);
    for (size_t i = 0; model && i < n; i++) {
        struct kv_holder holder = {handovers[i]->instance, handovers[i]->rank};
        struct ki_listener *l = ki_listener_find(registry, holder.worker, holder.rank);

        if (handovers[i]->unusable)
            continue;
        if (l && l->model == model)
            ki_handover_give(handovers[i], l);
        else if (!l && ki_positions_keep(&registry->positions, holder, handovers[i]))
            handovers[i] = NULL;
    }
    pthread_mutex_unlock(&registry->admin);
}
