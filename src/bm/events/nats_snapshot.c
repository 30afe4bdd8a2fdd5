// SPDX-License-Identifier: Apache-2.0
/* Answers to requests for a snapshot, on the thread of their subscription. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/le.h"
#include "base/core/log.h"
#include "bm/events/nats_sink.h"

#define SWEEP 4096   /* slots of chains that are looked at under the sink's lock */
#define PAUSE_US 500 /* between attempts while the queue is full */
/* Longest wait for room: registries can't be destroyed meanwhile, nor the client connect anew. */
#define STALL_NS (2 * KV_NS_PER_S)

struct snapshot {
    struct kvbm_nats_sink *sink;
    const char *reply;
    struct kvp_header header;
    struct kv_buf out, text;
    uint32_t n; /* records in the part */
    uint64_t end_ns;
    bool sweeps;   /* the walk shows which blocks of the sink's chains live */
    uint64_t lost; /* events, before the walk */
    struct kvbm_chain_of chains[KVBM_WALK]; /* of the blocks at hand */
};

/* Send the part being filled and begin the next one. Waits while the queue is full. */
static bool send_part(struct snapshot *snapshot, bool last)
{
    struct kvbm_nats_sink *sink = snapshot->sink;
    struct kvp_nats_msg msg = {.subject = snapshot->reply};
    const struct kv_buf *out = &snapshot->out;
    uint64_t end_ns = KV_MIN(snapshot->end_ns, kv_now_ns() + STALL_NS);
    int err;

    if (last) /* the only field that isn't known at the beginning */
        kvp_set_last(&snapshot->out);
    err = kvp_end(&snapshot->out, snapshot->n);
    if (err == 0 && sink->json) {
        err = kvp_to_json(snapshot->out.data, snapshot->out.len, &snapshot->text);
        out = &snapshot->text;
    }
    msg.data = out->data;
    msg.len = out->len;
    while (err == 0 && (err = kvp_nats_publish(sink->snapshots, &msg)) == -EAGAIN) {
        if (atomic_load_explicit(&sink->closing, memory_order_relaxed) || kv_now_ns() > end_ns)
            return false;
        usleep(PAUSE_US);
        err = 0;
    }
    snapshot->n = 0;
    snapshot->header.part++;
    kvp_begin(&snapshot->out, &snapshot->header);
    return err == 0;
}

/* Find what the sink remembers of the blocks. The slots of all are asked for before the first is
 * read: they lie anywhere in memory. */
static void find_chains(struct snapshot *snapshot, const struct kvbm_walked *blocks, size_t n)
{
    struct kvbm_nats_sink *sink = snapshot->sink;

    pthread_mutex_lock(&sink->lock);
    for (size_t i = 0; i < n; i++) {
        snapshot->chains[i].id = kvbm_chain_id(blocks[i].group, blocks[i].key, blocks[i].key_len);
        kvbm_chains_prefetch(&sink->chains, snapshot->chains[i].id);
    }
    for (size_t i = 0; i < n; i++) {
        const struct kvbm_chain_of *found = kvbm_chains_find(&sink->chains, snapshot->chains[i].id);

        if (found && snapshot->sweeps)
            kvbm_chains_see(&sink->chains, found->id);
        snapshot->chains[i] = found ? *found : (struct kvbm_chain_of){0};
    }
    pthread_mutex_unlock(&sink->lock);
}

/* Add a record for each tier of the blocks. */
static bool put_blocks(void *arg, const struct kvbm_walked *blocks, size_t n)
{
    struct snapshot *snapshot = arg;
    struct kvbm_nats_sink *sink = snapshot->sink;

    find_chains(snapshot, blocks, n);
    for (size_t i = 0; i < n; i++) {
        struct kvp_record record = {
            .event = KVP_STORE,
            .group = blocks[i].group,
            .key_len = blocks[i].key_len,
            .key = blocks[i].key,
            .parent = blocks[i].has_parent ? blocks[i].parent : NULL,
            .position = blocks[i].position,
        };

        for (unsigned tier = 0; tier < KV_N_TIERS; tier++) {
            if (!(blocks[i].tiers & 1u << tier))
                continue;
            record.tier = tier;
            kvbm_nats_describe(sink, &snapshot->chains[i], &record);
            kvp_put(&snapshot->out, &record);
            snapshot->n++;
        }
        if (snapshot->out.len + KV_N_TIERS * KVP_MAX_RECORD > KVBM_SNAPSHOT_PART &&
            !send_part(snapshot, false))
            return false;
    }
    return !atomic_load_explicit(&sink->closing, memory_order_relaxed);
}

/* Remove what the walk hasn't shown from the sink's chains. */
static void sweep_chains(const struct snapshot *snapshot)
{
    struct kvbm_nats_sink *sink = snapshot->sink;
    size_t at = 0;

    do {
        pthread_mutex_lock(&sink->lock);
        kvbm_chains_sweep(&sink->chains, &at, SWEEP);
        pthread_mutex_unlock(&sink->lock);
    } while (at && !atomic_load_explicit(&sink->closing, memory_order_relaxed));
}

void kvbm_nats_snapshot(void *arg, const struct kvp_nats_msg *msg)
{
    struct kvbm_nats_sink *sink = arg;
    struct snapshot snapshot = {
        .sink = sink, .reply = msg->reply, .end_ns = kv_ns_after(kv_now_ns(), KVBM_SNAPSHOT_MS)};
    bool walked, done;

    if (!msg->reply || msg->len != 8)
        return;
    pthread_mutex_lock(&sink->lock);
    snapshot.header = sink->header;
    snapshot.header.sequence = sink->sequence;
    snapshot.lost = sink->stats.lost;
    snapshot.sweeps = snapshot.lost != sink->tidy;
    if (snapshot.sweeps)
        kvbm_chains_begin_sweep(&sink->chains);
    pthread_mutex_unlock(&sink->lock);
    snapshot.header.kind = KVP_SNAPSHOT;
    snapshot.header.request = kv_get_le64(msg->data);
    snapshot.header.time_ns = kv_wall_ns();
    kvp_begin(&snapshot.out, &snapshot.header);
    walked = kvbm_events_walk(sink->events, put_blocks, &snapshot);
    done = walked && send_part(&snapshot, true);
    if (walked && snapshot.sweeps)
        sweep_chains(&snapshot);
    if (!done)
        kv_log_warn("kvbm", "a snapshot was given up", "part=%llu",
                    (unsigned long long)snapshot.header.part);
    pthread_mutex_lock(&sink->lock);
    sink->stats.snapshots += done;
    sink->stats.snapshots_failed += !done;
    if (walked)
        sink->tidy = snapshot.lost;
    pthread_mutex_unlock(&sink->lock);
    kv_buf_fini(&snapshot.out);
    kv_buf_fini(&snapshot.text);
}
