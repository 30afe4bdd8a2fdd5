// SPDX-License-Identifier: Apache-2.0
/*
 * Direct jobs: the disk and the object store read and write a cache's own memory. No host block and
 * no staging buffer is in between, so a block is copied by its device only.
 *
 *   load    pin without host blocks ─► fetches into the cache ─► pin settles ─► job ends
 *   store   pin without host blocks ─► offloads from the cache, one a tier ─► the last ends the job
 *
 * kvbm_pin_data gives the address of such a pin's item: its block in the cache. A direct job ends
 * through STEP_END as others do: a load when its pin settles, a store when its last offload ends.
 */
#include <errno.h>
#include <stdlib.h>

#include "bm/deadline.h"
#include "bm/ids.h"
#include "bm/storage/layout.h"
#include "tier/manager/jobs/job.h"
#include "tier/manager/offload/offload.h"
#include "tier/manager/pins/fetch.h"
#include "tier/manager/pins/pin.h"
#include "tier/manager/state/manager.h"

/* ---- caches ---- */

bool kvbm_direct_fits(const struct kvbm_manager *m, const struct kvbm_layout *layout)
{
    const struct kvbm_layout_config *host = kvbm_layout_get_config(m->layout);
    const struct kvbm_layout_config *own = &layout->config;
    const struct kvbm_place *place = &layout->places[0];

    /* Without a layout of its own in memory, whole pages, and the host blocks' order of bytes, a
     * block has to be copied. */
    return kvbm_staging(m) && layout->shape.kind == KVBM_FULLY_CONTIGUOUS &&
           (place->kind == KVBM_STORAGE_SYSTEM || place->kind == KVBM_STORAGE_PINNED) &&
           own->inner_dim == host->inner_dim && own->order == host->order &&
           own->num_heads == host->num_heads && own->dtype_width_bytes == host->dtype_width_bytes &&
           layout->shape.natural_block_bytes == m->stride && place->addr % KVBM_HOST_ALIGN == 0 &&
           layout->shape.block_stride % KVBM_HOST_ALIGN == 0;
}

static int check(const struct kvbm_manager *m, size_t n, bool store, const struct kvbm_job *job)
{
    if (job->pin || !job->cache || job->cache->manager != m || (n && !job->blocks) ||
        job->first_layer || job->n_layers || job->ready_fd > 0 || job->ready_event ||
        kvbm_deadline_check(job->deadline_ns) < 0)
        return -EINVAL;
    if (!job->cache->direct || job->cache->partial)
        return -ENOTSUP;
    /* Two keys that are read into one block would spoil each other's checksums: good records would
     * be removed as damaged. */
    return kvbm_cache_check(job->cache, job->blocks, n, store ? 0 : KVBM_IDS_ONCE);
}

/* ---- the end ---- */

static void set_ok(struct kvbm_job_ *job, uint32_t i)
{
    job->ok[i / 8] |= (uint8_t)(1u << (i % 8));
}

/* Note the keys of a store that a tier below has all the same: they were there, or came by another
 * job, or by the same key at another place of this one. */
static void note_those_there(struct kvbm_job_ *job)
{
    const struct kvbm_pin *pin = job->pin;
    uint8_t tiers;

    for (uint32_t i = 0; i < pin->n; i++) {
        if (job->ok[i / 8] >> (i % 8) & 1)
            continue;
        kvbm_registry_locate(pin->manager->registry, pin->group, kvbm_pin_key(pin, i), 1, &tiers);
        if (tiers >> KV_TIER_DISK & 1 || tiers >> KV_TIER_EXTERNAL & 1)
            set_ok(job, i);
    }
}

void kvbm_direct_count(struct kvbm_job_ *job)
{
    struct kvbm_pin *pin = job->pin;
    struct kvbm_manager *m = pin->manager;
    struct kvbm_done *done = &job->done;

    if (pin->store)
        note_those_there(job);
    for (uint32_t i = 0; i < pin->n; i++)
        done->n_ok += job->ok[i / 8] >> (i % 8) & 1;
    done->n = pin->n;
    done->bytes = done->n_ok * m->block_bytes;
    done->run_ns = kv_now_ns() - job->submit_ns;
    /* blocks that arrived count, also of a cancelled job */
    if (job->cancelled && done->n_ok < done->n)
        done->status = -ECANCELED;
    else if (pin->store)
        done->status = done->n_ok < done->n ? -EREMOTEIO : 0;
    else
        done->status = done->n && !done->n_ok ? -ENOENT : 0;
    *(pin->store ? &m->stats.cache.blocks_out : &m->stats.cache.blocks_in) += done->n_ok;
    *(pin->store ? &m->stats.cache.bytes_out : &m->stats.cache.bytes_in) += done->bytes;
    if (job->user_ok)
        memcpy(job->user_ok, job->ok, (pin->n + 7) / 8);
}

/* ---- loads ---- */

void kvbm_direct_settled(struct kvbm_job_ *job)
{
    for (uint32_t i = 0; i < job->pin->n; i++) {
        if (job->pin->items[i].state == ITEM_STAGED)
            set_ok(job, i);
    }
    kvbm_job_is_over(job->pin->manager, job);
}

static void load(struct kvbm_pin *pin, struct kvbm_job_ *job)
{
    const struct kvbm_pin_opts opts = {
        .size = sizeof(opts), .deadline_ns = job->deadline_ns, .priority = job->priority};

    pin->jobs = job;
    kvbm_pin_load(pin, &opts);
}

/* ---- stores ---- */

/* Reserve and commit at once: the blocks have their bytes, in the cache. Offloads read
 * them there. */
static void store(struct kvbm_pin *pin, struct kvbm_job_ *job)
{
    kvbm_pin_reserve(pin);
    kvbm_pin_commit_locked(pin, NULL, job);
    job->copied = true;
    if (!job->n_through)
        kvbm_job_is_over(pin->manager, job);
    else if (job->deadline_ns)
        pthread_cond_signal(&pin->manager->work); /* the mover watches the deadline */
}

/* ---- calls ---- */

void kvbm_direct_cancel(struct kvbm_job_ *job)
{
    struct kvbm_pin *pin = job->pin;

    if (pin->store) {
        kvbm_queue_drop_of(job);
        return;
    }
    /* fetches under way write into the cache: the pin settles, and the job ends, when they have
     * ended */
    pin->no_fetch = true;
    kvbm_fetch_cancel(pin);
    kvbm_pin_stop_waiting(pin);
    kvbm_pin_settle(pin);
}

uint64_t kvbm_direct_late(struct kvbm_manager *m, uint64_t now)
{
    uint64_t next = UINT64_MAX;

    for (struct kvbm_job_ *job = m->jobs.first; job; job = job->next) {
        if (!job->pin->direct || !job->pin->store || !job->n_through || !job->deadline_ns ||
            job->late)
            continue;
        if (job->deadline_ns > now) {
            next = KV_MIN(next, job->deadline_ns);
            continue;
        }
        job->late = true; /* moves under way go on */
        kvbm_queue_drop_of(job);
    }
    return next;
}

static int64_t begin(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n, bool stores,
                     struct kvbm_job *in)
{
    struct kvbm_job_ *job;
    struct kvbm_pin *pin;
    int64_t id = kvbm_job_room(m);

    if (id < 0)
        return id;
    id = kvbm_pin_new(m, chain, n, stores, &pin);
    if (id < 0)
        return id;
    in->pin = pin;
    pin->direct = in->cache;
    id = kvbm_job_new(m, in, &job);
    if (id == 0) {
        pin->blocks = job->blocks; /* the job's copy of the numbers: the caller's array may go */
        id = (int64_t)job->done.id;
        if (stores)
            store(pin, job);
        else
            load(pin, job);
    }
    pin->released = true;
    kvbm_pin_put(pin);
    return id;
}

int64_t kvbm_manager_submit_keys(struct kvbm_manager *m, const struct kvbm_chain *chain, size_t n,
                                 bool store, const struct kvbm_job *in)
{
    struct kvbm_job job = {0};
    int64_t id = kvbm_manager_usable(m);

    if (id < 0)
        return id;
    if (!kv_sized(in, "kvbm_job") || in->size < offsetof(struct kvbm_job, first_layer) ||
        n > KVBM_MAX_PIN)
        return -EINVAL;
    memcpy(&job, in, KV_MIN(in->size, sizeof(job)));
    id = check(m, n, store, &job);
    if (id < 0)
        return id;
    kvbm_manager_enter(m);
    id = begin(m, chain, n, store, &job);
    kvbm_manager_leave(m);
    return id;
}
