// SPDX-License-Identifier: Apache-2.0
/* The end of a dump: positions of streams, and the copies of blocks at them. */
#include <errno.h>
#include <stdlib.h>

#include "indexer/registry/tables.h"

/* Facts about one stream's ranks, copied while the stream is held. */
struct facts {
    struct kv_buf items;   /* struct kvi_extra */
    struct kv_buf sources; /* struct kvi_source_copies of the items, one after the other */
    struct kv_buf doubts;  /* struct ki_unsure_told */
};

static int keep(void *arg, const struct kvi_extra *extra)
{
    struct facts *facts = arg;

    kv_buf_append(&facts->items, extra, sizeof(*extra));
    if (extra->n_sources)
        kv_buf_append(&facts->sources, extra->sources, extra->n_sources * sizeof(*extra->sources));
    return facts->items.error ? facts->items.error : facts->sources.error;
}

static int tell(const struct facts *facts, kvi_extra_fn fn, void *arg)
{
    const struct kvi_extra *items = (const struct kvi_extra *)(const void *)facts->items.data;
    const struct kvi_source_copies *sources =
        (const struct kvi_source_copies *)(const void *)facts->sources.data;
    int rc = 0;

    for (size_t i = 0; i < facts->items.len / sizeof(*items) && !rc; i++) {
        struct kvi_extra extra = items[i];

        extra.sources = sources;
        sources += extra.n_sources;
        rc = fn(arg, &extra);
    }
    return rc;
}

static int tell_doubts(const struct facts *facts, ki_doubt_fn fn, void *arg)
{
    const struct ki_unsure_told *told =
        (const struct ki_unsure_told *)(const void *)facts->doubts.data;
    int rc = facts->doubts.error;

    for (size_t i = 0; i < facts->doubts.len / sizeof(*told) && !rc; i++)
        rc = fn(arg, &told[i]);
    return rc;
}

static int end_of(struct ki_listener *l, const struct ki_model *model, struct kv_buf *marks,
                  kvi_extra_fn fn, ki_doubt_fn doubt_fn, void *arg)
{
    struct facts facts = {KV_BUF_INIT, KV_BUF_INIT, KV_BUF_INIT};
    int rc = 0;

    if (ki_listener_feeds(l, model))
        rc = ki_listener_end(l, model->index, marks, &facts.doubts, keep, &facts);
    if (!rc)
        rc = tell(&facts, fn, arg);
    if (!rc)
        rc = tell_doubts(&facts, doubt_fn, arg);
    kv_buf_fini(&facts.items);
    kv_buf_fini(&facts.sources);
    kv_buf_fini(&facts.doubts);
    return rc;
}

int ki_registry_ends(struct ki_registry *registry, const struct ki_model *model,
                     struct kv_buf *marks, kvi_extra_fn fn, ki_doubt_fn doubt_fn, void *arg)
{
    struct ki_listener **listeners;
    int rc = 0;
    long n;

    ki_registry_kept_marks(registry, model, marks); /* first: one may become a listener */
    n = ki_tables_snapshot(registry, &listeners);
    if (n < 0)
        return (int)n;
    for (long i = 0; i < n && !rc; i++)
        rc = end_of(listeners[i], model, marks, fn, doubt_fn, arg);
    ki_tables_snapshot_free(listeners, n);
    return rc ? rc : marks->error;
}
