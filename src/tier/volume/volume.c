// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "bm/deadline.h"
#include "bm/ids.h"
#include "peer/set/blockset.h"
#include "tier/manager/jobs/turn.h"
#include "tier/volume/volume.h"

#define DEFAULT_MS 10000
#define LENT_BLOCKS 64

/* ---- registering ---- */

static const char *fault_of(const struct kvbm_volume_opts *o)
{
    const char *name = o->name, *peer = o->peer;
    const char *fingerprint = o->fingerprint;
    bool is_file = o->files != NULL, is_store = o->store != NULL;

    if (!name || !kvbm_agent_name_is_valid(name, strnlen(name, KVBM_MAX_AGENT_NAME + 1)))
        return "a volume's name has 1 to 63 of A-Z a-z 0-9 . _ -";
    if (!o->block)
        return "a volume needs the form of its blocks";
    if (is_file + is_store + (peer != NULL) != 1)
        return "a volume is in files, in a store or at a peer: exactly one";
    if (is_file && !o->file_bytes)
        return "a volume in files needs file_bytes";
    if (!peer && (!fingerprint || !*fingerprint))
        return "a volume in files or a store needs a fingerprint of the model";
    if (peer && o->lend)
        return "a peer's volume can't be lent on";
    if ((peer || o->lend) && !o->agent)
        return "a peer's volume, and one that is lent, need an agent";
    if (peer && !kvbm_agent_name_is_valid(peer, strnlen(peer, KVBM_MAX_AGENT_NAME + 1)))
        return "a peer's name has 1 to 63 of A-Z a-z 0-9 . _ -";
    return o->key_len < 4 || o->key_len > KVBM_MAX_KEY ? "a key has 4 to 64 bytes" : NULL;
}

/* Make the tier of a volume in files or a store. */
static int make_tier(struct kvbm_volume *v, const struct kvbm_volume_opts *o, uint64_t stride)
{
    uint64_t lent = o->lend_bytes ? o->lend_bytes : LENT_BLOCKS * stride;
    const struct kvbm_manager_opts opts = {.size = sizeof(opts),
                                           .block = o->block,
                                           .fingerprint = o->fingerprint,
                                           .key_len = v->key_len,
                                           .host_bytes = o->lend ? lent : 0,
                                           .host_shared = o->lend,
                                           .disk = o->files,
                                           .disk_bytes = o->file_bytes,
                                           .disk_policy.policy = KVBM_POLICY_PRESENCE,
                                           .object = o->store,
                                           .object_policy.policy = KVBM_POLICY_PRESENCE,
                                           .object_write_through = true};

    return kvbm_manager_create(&opts, &v->manager);
}

static int lend(struct kvbm_volume *v)
{
    struct kvbm_block_source source = kvbm_manager_source(v->manager);
    const struct kvbm_blockset_opts what = {.size = sizeof(what),
                                            .id = v->set,
                                            .layout = kvbm_manager_host_layout(v->manager),
                                            .source = &source,
                                            .shared = kvbm_manager_shared(v->manager)};

    return kvbm_blockset_export(v->agent, &what, &v->lent);
}

/* Make a layout of one block: the form that a peer's blocks must have. */
static int make_like(struct kvbm_volume *v, const struct kvbm_layout_config *block)
{
    const struct kvbm_storage_opts memory = {.size = sizeof(memory), .kind = KVBM_STORAGE_NULL};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);

    return kvbm_layout_allocate(block, &allocator, &v->like);
}

static uint32_t count_files(const char *list)
{
    uint32_t n = 0;

    for (const char *at = list; at && *at; at += strcspn(at, ":"), at += *at == ':')
        n += *at != ':';
    return n;
}

static int open_volume(struct kvbm_volume *v, const struct kvbm_volume_opts *o)
{
    struct kvbm_layout_config block = {0};
    struct kvbm_layout_shape shape;
    int rc;

    memcpy(&block, o->block, KV_MIN(o->block->size, sizeof(block)));
    block.size = sizeof(block);
    block.kind = KVBM_FULLY_CONTIGUOUS;
    block.num_blocks = 1;
    block.alignment = 4096;
    memset(block.tensor_shape, 0, sizeof(block.tensor_shape));
    rc = kvbm_layout_compute(&block, &shape);
    if (rc < 0)
        return rc;
    v->block_bytes = shape.natural_block_bytes;
    if (v->peer[0])
        return make_like(v, &block);
    rc = make_tier(v, o, shape.block_stride);
    return rc == 0 && o->lend ? lend(v) : rc;
}

int kvbm_volume_register(const struct kvbm_volume_opts *opts, struct kvbm_volume **ret)
{
    struct kvbm_volume_opts all = {0}; /* also where the caller's struct is of an older version */
    struct kvbm_volume *v;
    const char *fault;
    int rc;

    if (!ret || !kv_sized(opts, "kvbm_volume_opts"))
        return -EINVAL;
    memcpy(&all, opts, KV_MIN(opts->size, sizeof(all)));
    all.key_len = all.key_len ? all.key_len : 8;
    fault = fault_of(&all);
    if (fault) {
        kv_log_error("kvbm", "a volume is refused", "why=\"%s\"", fault);
        return -EINVAL;
    }
    v = calloc(1, sizeof(*v));
    if (!v)
        return -ENOMEM;
    snprintf(v->name, sizeof(v->name), "%s", all.name);
    snprintf(v->peer, sizeof(v->peer), "%s", all.peer ? all.peer : "");
    v->set = all.set ? all.set : 1;
    v->key_len = all.key_len;
    v->agent = all.agent;
    v->on_disk = all.files != NULL;
    v->n_files = count_files(all.files);
    rc = open_volume(v, &all);
    if (rc < 0) {
        (void)kvbm_volume_unregister(v, DEFAULT_MS);
        return rc;
    }
    *ret = v;
    return 0;
}

int kvbm_volume_unregister(struct kvbm_volume *volume, uint32_t timeout_ms)
{
    int rc;

    if (!volume)
        return 0;
    kvbm_blockset_destroy(KV_STEAL(volume->lent));
    rc = kvbm_manager_destroy(volume->manager, timeout_ms);
    if (rc < 0)
        return rc;
    kvbm_layout_destroy(volume->like);
    free(volume);
    return 0;
}

/* ---- get and put ---- */

/* Keys @first to @first + @n of a call, as a chain of its own. */
static struct kvbm_chain piece(const struct kvbm_volume *v, const struct kvbm_chain *whole,
                               uint32_t first)
{
    struct kvbm_chain chain = {0};
    const uint8_t *keys = whole->keys;

    memcpy(&chain, whole, KV_MIN(whole->size, sizeof(chain)));
    chain.size = sizeof(chain);
    chain.tokens = NULL;
    if (first) {
        chain.keys = keys + (size_t)first * v->key_len;
        chain.parent = chain.scattered ? NULL : keys + (size_t)(first - 1) * v->key_len;
        chain.position = chain.scattered ? 0 : chain.position + first;
    }
    return chain;
}

static uint32_t ms_until(uint64_t deadline_ns)
{
    uint64_t now = kv_now_ns();

    return deadline_ns <= now
               ? 0
               : (uint32_t)KV_MIN((deadline_ns - now) / KV_NS_PER_MS + 1, (uint64_t)INT32_MAX);
}

/* Wait for a job; at its deadline cancel it, after which it ends. */
static void wait_job(struct kvbm_manager *m, uint64_t id, uint64_t deadline_ns)
{
    if (kvbm_manager_wait(m, id, ms_until(deadline_ns), NULL) == -ETIMEDOUT) {
        (void)kvbm_manager_cancel(m, id);
        while (kvbm_manager_wait(m, id, DEFAULT_MS, NULL) == -ETIMEDOUT)
            ;
    }
}

/* Get keys [first, first + n) of a part. state says where each of them was in the end. */
static int get_run(struct kvbm_volume *v, struct kvbm_cache *cache, struct kvbm_volume_part *part,
                   uint32_t first, uint32_t n)
{
    const struct kvbm_pin_opts opts = {.size = sizeof(opts), .deadline_ns = part->deadline_ns};
    const struct kvbm_chain chain = piece(v, &part->chain, first);
    uint8_t ok[KVBM_VOLUME_BATCH / 8] = {0};
    struct kvbm_job job = {.size = sizeof(job),
                           .cache = cache,
                           .blocks = part->blocks + first,
                           .deadline_ns = part->deadline_ns,
                           .ok = ok};
    long rc = kvbm_manager_prepare_load(v->manager, &chain, n, &opts, &job.pin);
    int64_t id;

    if (rc < 0)
        return (int)rc;
    id = kvbm_manager_submit(v->manager, &job);
    if (id > 0) {
        wait_job(v->manager, (uint64_t)id, part->deadline_ns);
        (void)kvbm_pin_state(job.pin, part->state + first);
    }
    kvbm_pin_release(job.pin);
    for (uint32_t i = 0; i < n; i++)
        part->ok[(first + i) / 8] |= (uint8_t)((ok[i / 8] >> (i % 8) & 1) << ((first + i) % 8));
    return id < 0 ? (int)id : 0;
}

/* Find the first keys of a part in a row that found no room to be fetched into. Returns their
 * number. */
static uint32_t busy_run(const struct kvbm_volume_part *part, uint32_t *first)
{
    uint32_t n = 0;

    for (*first = 0; *first < part->n && part->state[*first] != KVBM_BUSY;)
        ++*first;
    while (*first + n < part->n && part->state[*first + n] == KVBM_BUSY)
        n++;
    return n;
}

/* Get a part: first all keys, then again those that found no room. Without those between them, whose
 * blocks would take the room. */
static int get_from_tier(struct kvbm_volume *v, struct kvbm_cache *cache,
                         struct kvbm_volume_part *part)
{
    struct kvbm_turn turn = {.waits = false};
    uint32_t first = 0, n = part->n;
    int rc = kvbm_turn_give_way(v->manager, &turn, part->chain.group, part->chain.keys,
                                part->deadline_ns);

    while (rc == 0 && n) {
        uint32_t before = first, more;

        rc = get_run(v, cache, part, first, n);
        more = busy_run(part, &first);
        if (rc == 0 && more == n && first == before) /* none of them found room */
            rc = ms_until(part->deadline_ns) ? kvbm_turn_wait(v->manager, &turn, part->deadline_ns)
                                             : -ETIMEDOUT;
        else
            kvbm_turn_end(v->manager, &turn);
        n = more;
    }
    kvbm_turn_end(v->manager, &turn);
    return rc == -ETIMEDOUT || rc == -ESHUTDOWN ? 0 : rc;
}

/* Copy what the caller wants, with defaults filled in. Returns 0; -EINVAL (something is missing, or a
 * block is out of range or a target twice); -ENOMEM. */
static int take_io(const struct kvbm_volume *v, const struct kvbm_volume_io *io, bool get,
                   struct kvbm_volume_io *ret)
{
    int rc;

    if (!v || !kv_sized(io, "kvbm_volume_io"))
        return -EINVAL;
    *ret = (struct kvbm_volume_io){0};
    memcpy(ret, io, KV_MIN(io->size, sizeof(*ret)));
    if (!ret->deadline_ns)
        ret->deadline_ns = kv_now_ns() + DEFAULT_MS * KV_NS_PER_MS;
    if (!ret->n || !ret->layout || !ret->blocks || !kv_sized(ret->chain, "kvbm_chain") ||
        !ret->chain->keys || kvbm_deadline_check(ret->deadline_ns) < 0)
        return -EINVAL;
    rc = kvbm_ids_check(ret->blocks, ret->n, kvbm_layout_get_config(ret->layout)->num_blocks,
                        get ? KVBM_IDS_ONCE : 0);
    if (rc == 0 && ret->ok)
        memset(ret->ok, 0, (ret->n + 7) / 8);
    return rc == -ERANGE ? -EINVAL : rc;
}

static int attach(struct kvbm_volume *v, const struct kvbm_layout *layout, struct kvbm_cache **ret)
{
    const struct kvbm_cache_opts opts = {.size = sizeof(opts), .layout = layout};

    *ret = NULL;
    return v->manager ? kvbm_cache_attach(v->manager, &opts, ret) : 0;
}

/* Get a part, and note it in ok. Returns the number of blocks that came, or an error. */
static long get_part(struct kvbm_volume *v, const struct kvbm_volume_io *io,
                     struct kvbm_cache *cache, uint32_t first)
{
    struct kvbm_volume_part part = {.chain = piece(v, io->chain, first),
                                    .n = KV_MIN(io->n - first, KVBM_VOLUME_BATCH),
                                    .layout = io->layout,
                                    .blocks = io->blocks + first,
                                    .deadline_ns = io->deadline_ns};
    int rc = v->manager ? get_from_tier(v, cache, &part) : kvbm_volume_get_from_peer(v, &part);
    long came = 0;

    if (rc < 0)
        return rc;
    for (uint32_t i = 0; i < part.n; i++)
        came += part.ok[i / 8] >> (i % 8) & 1;
    if (io->ok)
        memcpy(io->ok + first / 8, part.ok, (part.n + 7) / 8);
    return came;
}

long kvbm_volume_get(struct kvbm_volume *volume, const struct kvbm_volume_io *io)
{
    struct kvbm_volume_io all;
    struct kvbm_cache *cache;
    long came = 0, rc = take_io(volume, io, true, &all);

    if (rc < 0)
        return rc;
    rc = attach(volume, all.layout, &cache);
    if (rc < 0)
        return rc;
    for (uint32_t at = 0; at < all.n && rc >= 0; at += KVBM_VOLUME_BATCH) {
        rc = get_part(volume, &all, cache, at);
        came += rc > 0 ? rc : 0;
    }
    if (cache)
        (void)kvbm_cache_detach(cache);
    atomic_fetch_add(&volume->gets, all.n);
    atomic_fetch_add(&volume->hits, (uint64_t)came);
    return rc == -EINVAL || rc == -ENOMEM ? rc : came;
}

/* Put a piece. Returns how many of its keys, from the first on, are durable, or an error. */
static long put_part(struct kvbm_volume *v, const struct kvbm_volume_io *io,
                     struct kvbm_cache *cache, uint32_t first)
{
    const struct kvbm_chain chain = piece(v, io->chain, first);
    const struct kvbm_store_opts opts = {
        .size = sizeof(opts), .timeout_ms = ms_until(io->deadline_ns), .durable = true};

    return kvbm_cache_store_with(cache, &chain, KV_MIN(io->n - first, KVBM_VOLUME_BATCH),
                                 io->blocks + first, &opts);
}

long kvbm_volume_put(struct kvbm_volume *volume, const struct kvbm_volume_io *io)
{
    struct kvbm_volume_io all;
    struct kvbm_cache *cache;
    long kept = 0, rc = take_io(volume, io, false, &all);

    if (rc < 0)
        return rc;
    if (!volume->manager)
        return -EROFS;
    rc = attach(volume, all.layout, &cache);
    if (rc < 0)
        return rc;
    for (uint32_t at = 0; at < all.n && kept == (long)at; at += KVBM_VOLUME_BATCH) {
        rc = put_part(volume, &all, cache, at);
        kept += rc > 0 ? rc : 0;
    }
    (void)kvbm_cache_detach(cache);
    for (long i = 0; all.ok && i < kept; i++)
        all.ok[i / 8] |= (uint8_t)(1u << (i % 8));
    atomic_fetch_add(&volume->puts, all.n);
    atomic_fetch_add(&volume->kept, (uint64_t)kept);
    return rc == -EINVAL || rc == -ENOMEM ? rc : kept;
}

/* ---- state ---- */

static void tell_tier(struct kvbm_volume *v, struct kvbm_volume_info *info)
{
    struct kvbm_manager_stats stats = KVBM_MANAGER_STATS_INIT;

    (void)kvbm_manager_get_stats(v->manager, &stats);
    info->capacity = v->on_disk ? stats.disk.capacity : 0;
    info->used = v->on_disk ? stats.disk.used : stats.object.used;
    info->writable = true;
    if (!v->on_disk)
        info->health = stats.object_down ? KVBM_VOLUME_DOWN : KVBM_VOLUME_UP;
    else
        info->health = !stats.volumes_down               ? KVBM_VOLUME_UP
                       : stats.volumes_down < v->n_files ? KVBM_VOLUME_DEGRADED
                                                         : KVBM_VOLUME_DOWN;
}

int kvbm_volume_get_info(struct kvbm_volume *volume, struct kvbm_volume_info *ret)
{
    struct kvbm_volume_info info = {.size = 0};

    if (!volume || !kv_sized(ret, "kvbm_volume_info"))
        return -EINVAL;
    info.size = ret->size;
    snprintf(info.name, sizeof(info.name), "%s", volume->name);
    info.block_bytes = volume->block_bytes;
    if (volume->manager) {
        tell_tier(volume, &info);
    } else {
        info.capacity = kvbm_volume_peer_capacity(volume);
        info.health = info.capacity ? KVBM_VOLUME_UP : KVBM_VOLUME_DOWN;
    }
    info.gets = atomic_load(&volume->gets);
    info.hits = atomic_load(&volume->hits);
    info.puts = atomic_load(&volume->puts);
    info.kept = atomic_load(&volume->kept);
    memcpy(ret, &info, KV_MIN(ret->size, sizeof(info)));
    return 0;
}
