// SPDX-License-Identifier: Apache-2.0
/*
 * Statistics of the tiers: as a struct and as Prometheus text.
 *
 * Counters live in m->stats and are counted under the manager's lock, where the event happens.
 * Gauges are read when they are asked for, from the pools, the queues and the executors: they can't
 * drift from what they describe.
 *
 *   m->stats, under the lock ──┐
 *   pools, queues, executors ──┴─► stats_of ─┬─► kvbm_manager_get_stats    the struct
 *                                            └─► kvbm_manager_metrics      its text, and the pools'
 *
 * Both show one snapshot, so a sum of its figures adds up. Of a row of `families` follow a metric's
 * name, type and help, in one order for every tier.
 */
#include <errno.h>
#include <inttypes.h>

#include "base/core/buf.h"
#include "base/metrics/metric_text.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/state/manager.h"

/*
 * Fill in the gauges of a tier: blocks waiting for it, and the blocks of its pool. Entries aside
 * wait, too, for a move of their key. Used blocks are those that a key finds, held or not.
 */
static void fill_pool(struct kvbm_tier_stats *stats, struct kvbm_pool *pool, uint64_t block_bytes,
                      const struct kvbm_queue *queue)
{
    struct kvbm_pool_stats now = {.size = sizeof(now)};

    stats->queued = queue->n + queue->n_aside;
    stats->block_bytes = block_bytes;
    if (!pool)
        return;
    kvbm_pool_get_stats(pool, &now);
    stats->capacity = now.total_blocks;
    stats->used = now.inactive_pool_size + now.inflight_immutable;
}

/* Copy the counters and read the gauges. With the lock, so that they are of one moment. */
static struct kvbm_manager_stats stats_of(struct kvbm_manager *m)
{
    struct kvbm_manager_stats stats = m->stats;
    struct kvbm_object_stats object;
    struct kvbm_disk_stats disk;
    struct kvbm_peers_stats peers;

    /* Staging buffers are no tier: no key finds a block there. */
    fill_pool(&stats.host, kvbm_staging(m) ? NULL : m->host, m->block_bytes,
              &m->offload.queues[KV_TIER_HOST]);
    fill_pool(&stats.disk, m->disk, m->block_bytes, &m->offload.queues[KV_TIER_DISK]);
    fill_pool(&stats.object, m->object, m->block_bytes, &m->offload.queues[KV_TIER_EXTERNAL]);
    stats.cache.block_bytes = m->block_bytes;
    /* Blocks evicted before write-back queued them: the pools count these where they evict. */
    stats.object.dropped += kvbm_write_back_lost(m);
    stats.pins_now = m->pins.n;
    stats.jobs_now = m->jobs.n;
    if (m->object_store) {
        kvbm_object_get_stats(m->object_store, &object);
        stats.object_down = object.open;
    }
    stats.peer.block_bytes = m->peers ? m->block_bytes : 0;
    if (m->peers) {
        kvbm_peers_get_stats(m->peers, &peers);
        stats.peers_now = peers.sessions;
        stats.peers_down = peers.down;
        stats.peer_asked = peers.asked;
        stats.indexer_asked = peers.indexer_asked;
        stats.indexer_failed = peers.indexer_failed;
        stats.indexer_named = peers.named;
        stats.indexer_down = peers.indexer_down;
    }
    if (m->disk_store) {
        kvbm_disk_get_stats(m->disk_store, &disk);
        stats.volumes_down = disk.volumes_down;
        stats.registered_bytes = disk.registered_bytes;
    }
    return stats;
}

int kvbm_manager_get_stats(struct kvbm_manager *m, struct kvbm_manager_stats *ret)
{
    int rc = kv_sized(ret, "kvbm_manager_stats") ? kvbm_manager_usable(m) : -EINVAL;
    struct kvbm_manager_stats stats;

    if (rc < 0)
        return rc;
    kvbm_manager_enter(m);
    stats = stats_of(m);
    kvbm_manager_leave(m);
    KV_GIVE(ret, &stats);
    return 0;
}

/* ---- Prometheus ---- */

static const struct kv_metric_field families[] = {
#define FAMILY(name, type, field, help)                                        \
    {                                                                          \
        "kvbm_tier_" name, type, help, offsetof(struct kvbm_tier_stats, field) \
    }
    FAMILY("capacity_blocks", "gauge", capacity, "Blocks that fit into the tier."),
    FAMILY("used_blocks", "gauge", used, "Blocks of the tier that can be found."),
    FAMILY("queued_blocks", "gauge", queued, "Blocks that wait to go into the tier."),
    FAMILY("hits_total", "counter", hits, "Keys asked for and found in the tier."),
    FAMILY("misses_total", "counter", misses, "Keys asked for and not found in the tier."),
    FAMILY("blocks_in_total", "counter", blocks_in, "Blocks moved into the tier."),
    FAMILY("bytes_in_total", "counter", bytes_in, "Bytes moved into the tier."),
    FAMILY("blocks_out_total", "counter", blocks_out, "Blocks read from the tier."),
    FAMILY("bytes_out_total", "counter", bytes_out, "Bytes read from the tier."),
    FAMILY("dropped_blocks_total", "counter", dropped, "Blocks not kept for want of room or time."),
    FAMILY("filtered_blocks_total", "counter", filtered, "Blocks not kept by the tier's policy."),
    FAMILY("bad_blocks_total", "counter", bad, "Blocks whose bytes did not verify."),
    FAMILY("failed_blocks_total", "counter", failed, "Blocks that could not be read or written."),
#undef FAMILY
};

struct named {
    const char *name;
    const struct kvbm_tier_stats *stats;
};

/* Write one family for all tiers: Prometheus wants the lines of a name together. */
static void put_families(struct kv_buf *out, const struct named *tiers, size_t n)
{
    for (size_t f = 0; f < KV_COUNT(families); f++) {
        kv_metric_head(out, families[f].name, families[f].type, families[f].help);
        for (size_t t = 0; t < n; t++)
            kv_buf_printf(out, "%s{tier=\"%s\"} %" PRIu64 "\n", families[f].name, tiers[t].name,
                          kv_metric_value(&families[f], tiers[t].stats));
    }
}

/* Write the histograms of fetches. Their buckets count up, as the format wants; ours are apart. */
static void put_latencies(struct kv_buf *out, const struct named *tiers, size_t n)
{
    static const char name[] = "kvbm_tier_fetch_seconds";

    kv_metric_head(out, name, "histogram", "Time to read a batch of blocks from the tier.");
    for (size_t t = 0; t < n; t++) {
        const uint64_t *buckets = tiers[t].stats->latency_us;
        uint64_t sum = 0;

        for (unsigned i = 0; i + 1 < KV_COUNT(tiers[t].stats->latency_us); i++) {
            sum += buckets[i];
            kv_buf_printf(out, "%s_bucket{tier=\"%s\",le=\"%g\"} %" PRIu64 "\n", name,
                          tiers[t].name, (double)(UINT64_C(1) << i) / 1e6, sum);
        }
        sum += buckets[KV_COUNT(tiers[t].stats->latency_us) - 1];
        kv_buf_printf(out, "%s_bucket{tier=\"%s\",le=\"+Inf\"} %" PRIu64 "\n", name, tiers[t].name,
                      sum);
        kv_buf_printf(out, "%s_sum{tier=\"%s\"} %g\n%s_count{tier=\"%s\"} %" PRIu64 "\n", name,
                      tiers[t].name, (double)tiers[t].stats->latency_sum_us / 1e6, name,
                      tiers[t].name, sum);
    }
}

static void put_one(struct kv_buf *out, const char *name, const char *type, const char *help,
                    uint64_t value)
{
    kv_metric_head(out, name, type, help);
    kv_buf_printf(out, "%s %" PRIu64 "\n", name, value);
}

/*
 * Write all metrics of a manager. Tiers that it lacks have no lines: a 0 would look like an idle
 * tier. Only tiers below the host are fetched from, so only these have a histogram.
 */
static void render(const struct kvbm_manager *m, const struct kvbm_manager_stats *stats,
                   struct kv_buf *out)
{
    struct named tiers[5] = {{"device", &stats->cache}, {"host", &stats->host}};
    struct named below[3];
    size_t n = 2, n_below = 0;

    if (m->disk)
        below[n_below++] = tiers[n++] = (struct named){"disk", &stats->disk};
    if (m->object)
        below[n_below++] = tiers[n++] = (struct named){"external", &stats->object};
    if (m->peers)
        below[n_below++] = tiers[n++] = (struct named){"peer", &stats->peer};
    put_families(out, tiers, n);
    put_latencies(out, below, n_below);
    put_one(out, "kvbm_jobs_total", "counter", "Store and load jobs that ended.", stats->jobs);
    put_one(out, "kvbm_jobs_failed_total", "counter", "Of these, not all blocks were copied.",
            stats->jobs_failed);
    put_one(out, "kvbm_jobs_cancelled_total", "counter", "Of these, cancelled.",
            stats->jobs_cancelled);
    put_one(out, "kvbm_jobs", "gauge", "Jobs that wait or run.", stats->jobs_now);
    put_one(out, "kvbm_pins", "gauge", "Pins that are held.", stats->pins_now);
    put_one(out, "kvbm_object_down", "gauge", "1: calls to the object store fail and are withheld.",
            stats->object_down);
    put_one(out, "kvbm_object_unanswered_total", "counter",
            "Keys that were a miss because the object store could not be asked or did not answer.",
            stats->object_unanswered);
    put_one(out, "kvbm_peers", "gauge", "Peers with an open session.", stats->peers_now);
    put_one(out, "kvbm_peers_down", "gauge", "Peers that didn't answer: nothing is asked of them.",
            stats->peers_down);
    put_one(out, "kvbm_peer_asked_total", "counter", "Keys that peers were asked for.",
            stats->peer_asked);
    put_one(out, "kvbm_indexer_asked_total", "counter", "Requests to kv-indexer.",
            stats->indexer_asked);
    put_one(out, "kvbm_indexer_failed_total", "counter",
            "Of these, without an answer in time, or with one that made no sense.",
            stats->indexer_failed);
    put_one(out, "kvbm_indexer_named_total", "counter",
            "Keys that a peer has which kv-indexer named.", stats->indexer_named);
    put_one(out, "kvbm_indexer_down", "gauge", "1: kv-indexer doesn't answer and isn't asked.",
            stats->indexer_down);
    put_one(out, "kvbm_disk_volumes_down", "gauge", "Volumes no longer used after too many errors.",
            stats->volumes_down);
    put_one(out, "kvbm_disk_registered_bytes", "gauge", "Memory registered with io_uring.",
            stats->registered_bytes);
}

long kvbm_manager_metrics(struct kvbm_manager *m, char *to, size_t cap)
{
    struct kvbm_manager_stats stats = {.size = sizeof(stats)};
    struct kv_buf out = {0};
    long len = cap && !to ? -EINVAL : kvbm_manager_get_stats(m, &stats), pools;

    if (len < 0)
        return len;
    render(m, &stats, &out);
    len = kv_metric_give(&out, to, cap);
    if (len < 0)
        return len;
    /* the pools' own metrics follow: without room only their length is counted */
    pools = kvbm_registry_metrics(m->registry, (size_t)len < cap ? to + len : NULL,
                                  (size_t)len < cap ? cap - (size_t)len : 0);
    return pools < 0 ? pools : len + pools;
}
