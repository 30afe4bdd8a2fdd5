// SPDX-License-Identifier: Apache-2.0
/* Statistics of a pool: as a struct and as Prometheus text. dump.c writes them for people. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/buf.h"
#include "base/core/error.h"
#include "base/core/utf8.h"
#include "base/metrics/metric_text.h"
#include "bm/pool/pool.h"

static uint64_t metadata_bytes(const struct kvbm_pool *pool)
{
    const struct kvbm_registry *r = pool->registry;
    uint64_t per_entry = r->entry_bytes + r->kept_tokens * sizeof(*r->tokens) +
                         (pool->evict.children ? sizeof(uint32_t) : 0);
    uint64_t table = (sizeof(struct kvbm_bucket) / KVBM_BUCKET << r->table_bits) + r->old.mapped;

    return (uint64_t)pool->n_blocks * (sizeof(struct kvbm_slot) + sizeof(uint32_t)) +
           (uint64_t)pool->sketch.n_lines * 64 +
           (pool->acquired ? pool->n_blocks * sizeof(void *) : 0) +
           (pool->retained.place ? pool->n_blocks * sizeof(uint32_t) : 0) +
           (table + r->n_entries * per_entry) * pool->n_blocks / KV_MAX(r->n_blocks, UINT64_C(1));
}

static struct kvbm_pool_stats stats_of(const struct kvbm_pool *pool)
{
    struct kvbm_pool_stats stats = pool->stats;

    stats.total_blocks = pool->n_blocks;
    stats.reset_pool_size = pool->n_free;
    stats.inflight_mutable = pool->n_mutable;
    stats.inflight_immutable = pool->n_immutable;
    stats.inactive_pool_size = pool->n_inactive;
    stats.metadata_bytes = metadata_bytes(pool);
    return stats;
}

int kvbm_pool_get_stats(struct kvbm_pool *pool, struct kvbm_pool_stats *ret)
{
    struct kvbm_pool_stats stats;

    if (!pool || !kv_sized(ret, "kvbm_pool_stats"))
        return -EINVAL;
    kvbm_lock(pool->registry);
    stats = stats_of(pool);
    kvbm_unlock(pool->registry);
    KV_GIVE(ret, &stats);
    return 0;
}

/* ---- Prometheus ---- */

static const struct kv_metric_field families[] = {
#define COUNTER(field, help)                                                              \
    {                                                                                     \
        "kvbm_" #field "_total", "counter", help, offsetof(struct kvbm_pool_stats, field) \
    }
#define GAUGE(field, help)                                                     \
    {                                                                          \
        "kvbm_" #field, "gauge", help, offsetof(struct kvbm_pool_stats, field) \
    }
    COUNTER(allocations, "Blocks allocated."),
    COUNTER(allocations_from_reset, "Blocks allocated that held nothing."),
    COUNTER(allocation_failures, "Allocations refused for want of blocks."),
    COUNTER(evictions, "Registered blocks that gave way to an allocation."),
    COUNTER(registrations, "Keys registered that this pool did not have."),
    COUNTER(duplicate_blocks, "Blocks kept as duplicates of a registered one."),
    COUNTER(registration_dedup, "Registrations of keys that this pool had."),
    COUNTER(stagings, "Blocks completed."),
    COUNTER(match_hashes_requested, "Keys asked for by prefix."),
    COUNTER(match_blocks_returned, "Blocks found by prefix."),
    COUNTER(scan_hashes_requested, "Keys asked for one by one."),
    COUNTER(scan_blocks_returned, "Blocks found one by one."),
    COUNTER(stale_handles, "Handles refused because they had been released."),
    GAUGE(total_blocks, "Blocks of the pool."),
    GAUGE(inflight_mutable, "Blocks held by mutable and complete handles."),
    GAUGE(inflight_immutable, "Registered blocks that somebody holds."),
    GAUGE(reset_pool_size, "Blocks that hold nothing."),
    GAUGE(inactive_pool_size, "Registered blocks that nobody holds."),
    GAUGE(metadata_bytes, "Memory of the pool's bookkeeping."),
#undef COUNTER
#undef GAUGE
};

/* One pool of a registry. A registry's rows are taken at the same moment. */
struct row {
    const char *registry; /* NULL: a single registry without a name */
    char pool[sizeof(((struct kvbm_pool *)0)->name)];
    struct kvbm_pool_stats stats;
};

static void put_rows(struct kv_buf *rows, struct kvbm_registry *r, const char *name)
{
    kvbm_lock(r);
    for (const struct kvbm_pool *pool = r->pools; pool; pool = pool->next) {
        struct row row = {.registry = name, .stats = stats_of(pool)};

        memcpy(row.pool, pool->name, sizeof(row.pool));
        kv_buf_append(rows, &row, sizeof(row));
    }
    kvbm_unlock(r);
}

static void render(const struct row *rows, size_t n, struct kv_buf *out)
{
    for (size_t f = 0; f < KV_COUNT(families); f++) {
        kv_metric_head(out, families[f].name, families[f].type, families[f].help);
        for (size_t i = 0; i < n; i++) {
            kv_buf_printf(out, "%s{", families[f].name);
            if (rows[i].registry) {
                kv_metric_label(out, "registry", rows[i].registry);
                kv_buf_putc(out, ',');
            }
            kv_metric_label(out, "pool", rows[i].pool);
            kv_buf_printf(out, "} %" PRIu64 "\n", kv_metric_value(&families[f], &rows[i].stats));
        }
    }
}

/* Copy as much of the rows' text as fits. Returns the length of the whole text. */
static long render_to(const struct kv_buf *rows, char *to, size_t cap)
{
    struct kv_buf out = {0};

    if (rows->error)
        return rows->error;
    render((const struct row *)(const void *)rows->data, rows->len / sizeof(struct row), &out);
    return kv_metric_give(&out, to, cap);
}

long kvbm_registry_metrics(struct kvbm_registry *r, char *to, size_t cap)
{
    struct kv_buf rows = {0};
    long len;

    if (!r || (cap && !to))
        return -EINVAL;
    put_rows(&rows, r, NULL);
    len = render_to(&rows, to, cap);
    kv_buf_fini(&rows);
    return len;
}

/* True when all registries have different names: two of one name would be one series with two
 * values. */
static bool all_named(const struct kvbm_named_registry *all, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (!all[i].registry || !all[i].name || !kv_utf8_valid(all[i].name))
            return false;
        for (size_t k = 0; k < i; k++) {
            if (!strcmp(all[i].name, all[k].name))
                return false;
        }
    }
    return true;
}

long kvbm_metrics(const struct kvbm_named_registry *registries, size_t n, char *to, size_t cap)
{
    struct kv_buf rows = {0};
    long len;

    if ((n && !registries) || (cap && !to) || !all_named(registries, n))
        return -EINVAL;
    for (size_t i = 0; i < n; i++)
        put_rows(&rows, registries[i].registry, registries[i].name);
    len = render_to(&rows, to, cap);
    kv_buf_fini(&rows);
    return len;
}
