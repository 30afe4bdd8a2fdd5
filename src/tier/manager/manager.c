// SPDX-License-Identifier: Apache-2.0
/*
 * Create a manager: check its options, set defaults, open its tiers (tiers.c).
 *
 *   jobs ──► offload ──► pins ──► state        advance.c takes the steps of all of them
 *   mover.c     ends of operations, deadlines     end.c       destruction
 *   where.c     which tier has each key           remove.c    keys removed from every tier
 *   source.c    blocks that peers lease           stats.c     figures
 *   config.c    options from a file               taken.c     callers' memory as host tiers
 *
 * A manager isn't usable in a child after fork: its threads and locks are the parent's.
 */
#include <errno.h>
#include <stdlib.h>

#include "base/core/log.h"
#include "peer/lease/ask.h"
#include "peer/set/blockset.h"
#include "tier/manager/state/manager.h"

#define MAX_FINGERPRINT 3800 /* bytes; tiers.c appends the layout, within 4096 */

/* ---- forks ---- */

/* Forks of this process. A child counts one more than its copy of a manager did at creation. */

static _Atomic uint32_t forks;

static void count_fork(void)
{
    atomic_fetch_add(&forks, 1);
}

static void watch_forks(void)
{
    pthread_atfork(NULL, NULL, count_fork);
}

int kvbm_manager_usable(const struct kvbm_manager *m)
{
    if (!m)
        return -EINVAL;
    return m->forks == atomic_load(&forks) ? 0 : -ECHILD;
}

/* ---- options ---- */

static bool shard_fits(const struct kvbm_manager_opts *o)
{
    struct kvbm_layout_config block = {0};

    memcpy(&block, o->block, KV_MIN(o->block->size, sizeof(block)));
    return kvbm_shard_fits(&o->shard, &block);
}

/* Say what is wrong with options; NULL: nothing. All of it is checked before anything is opened: a
 * manager that fails half-way would have made files and threads. */
static const char *what_is_wrong(const struct kvbm_manager_opts *o)
{
    if (!kv_sized(o->block, "kvbm_layout_config"))
        return "no block layout";
    if (!shard_fits(o))
        return "the shard contradicts the block's layout";
    if (o->key_len && (o->key_len < 4 || o->key_len > KVBM_MAX_KEY))
        return "a key has 4 to 64 bytes";
    if ((o->disk || o->object) && (!o->fingerprint || !*o->fingerprint))
        return "a disk or object tier needs a fingerprint of the model";
    if (o->fingerprint && strnlen(o->fingerprint, MAX_FINGERPRINT + 1) > MAX_FINGERPRINT)
        return "a fingerprint has at most 3800 bytes";
    if (o->disk && !o->disk_bytes)
        return "a disk tier needs a size";
    if (!o->host_bytes && !o->disk && !o->object && !o->peers && !o->agent)
        return "no tier";
    if (o->agent && kvbm_agent_key_len(o->agent) != (o->key_len ? o->key_len : 8))
        return "the agent's keys have another length";
    if (o->peers && !o->agent && o->fingerprint &&
        strnlen(o->fingerprint, KVBM_MAX_FINGERPRINT + 1) > KVBM_MAX_FINGERPRINT)
        return "peers without an agent need a fingerprint of at most 255 bytes";
    if (o->indexer && !o->peers && !o->agent)
        return "an indexer needs peers or an agent";
    if (o->indexer && (!o->indexer_model || !*o->indexer_model))
        return "an indexer needs indexer_model";
    if (o->host_memory && (!o->host_bytes || (uintptr_t)o->host_memory % KVBM_HOST_ALIGN))
        return "host_memory needs host_bytes and an address that is a multiple of 4096";
    if (o->host_memory && (o->host_pinned || o->huge_pages))
        return "host_pinned and huge_pages are for a host tier that the manager allocates";
    if (o->host_shared && (!o->host_bytes || o->host_memory || o->host_pinned))
        return "host_shared needs host_bytes, and neither host_memory nor host_pinned";
    if (o->host_policy.policy > KVBM_POLICY_NEVER || o->disk_policy.policy > KVBM_POLICY_NEVER ||
        o->object_policy.policy > KVBM_POLICY_NEVER)
        return "no such policy";
    if (o->host_policy.threshold > KVBM_SKETCH_MAX || o->disk_policy.threshold > KVBM_SKETCH_MAX ||
        o->object_policy.threshold > KVBM_SKETCH_MAX)
        return "a threshold must be 1 to 15";
    if (o->host_policy.min_priority > KVBM_PRIORITY_MAX ||
        o->disk_policy.min_priority > KVBM_PRIORITY_MAX ||
        o->object_policy.min_priority > KVBM_PRIORITY_MAX)
        return "a min_priority is at most 100";
    if ((unsigned)o->host_eviction > KVBM_EVICT_LINEAGE ||
        (unsigned)o->disk_eviction > KVBM_EVICT_LINEAGE)
        return "no such eviction policy";
    if (o->object_when_evicted && (o->object_write_through || (!o->host_bytes && !o->disk)))
        return "object_when_evicted needs a host or disk tier, and no object_write_through";
    return NULL;
}

/* Choose what a caller left at 0: every block passes, and for frequency two offers are enough. */
static void set_policy(struct kvbm_tier_policy *policy)
{
    if (policy->policy == KVBM_POLICY_DEFAULT)
        policy->policy = KVBM_POLICY_PRESENCE;
    if (!policy->threshold)
        policy->threshold = 2;
}

/* Choose LRU of leaves (lineage) by default. A prompt's blocks enter a tier and are released in any
 * order: by moves that overtake each other, from an index at restart, or one by one as they are
 * fetched. LRU of leaves still evicts a prompt's end before its beginning. */
static void set_eviction(enum kvbm_eviction *eviction)
{
    if (*eviction == KVBM_EVICT_DEFAULT)
        *eviction = KVBM_EVICT_LINEAGE;
}

static void set_defaults(struct kvbm_manager_opts *o)
{
    set_eviction(&o->host_eviction);
    set_eviction(&o->disk_eviction);
    o->key_len = o->key_len ? o->key_len : 8;
    o->staging_blocks = o->staging_blocks ? o->staging_blocks : 64;
    o->object_blocks = o->object_blocks ? o->object_blocks : 100000;
    o->object_timeout_ms = o->object_timeout_ms ? o->object_timeout_ms : 10000;
    o->max_offload = o->max_offload ? o->max_offload : 16384;
    o->max_jobs = o->max_jobs ? o->max_jobs : 1024;
    set_policy(&o->host_policy);
    set_policy(&o->disk_policy);
    set_policy(&o->object_policy);
}

/* ---- create ---- */

/* Copy the options' strings: the caller's may go after this call. */
static int copy_strings(struct kvbm_manager *m)
{
    const char **texts[] = {&m->opts.fingerprint,
                            &m->opts.disk,
                            &m->opts.object,
                            &m->opts.peers,
                            &m->opts.peer_token_file,
                            &m->opts.indexer,
                            &m->opts.indexer_model,
                            &m->opts.indexer_tenant,
                            &m->opts.indexer_token_file,
                            &m->opts.indexer_ca};
    size_t len = 0;
    char *at;

    for (size_t i = 0; i < KV_COUNT(texts); i++)
        len += *texts[i] ? strlen(*texts[i]) + 1 : 0;
    at = m->strings = malloc(len + 1);
    for (size_t i = 0; at && i < KV_COUNT(texts); i++) {
        if (!*texts[i])
            continue;
        len = strlen(*texts[i]) + 1;
        *texts[i] = memcpy(at, *texts[i], len);
        at += len;
    }
    return at ? 0 : -ENOMEM;
}

/*
 * Make a manager without tiers. kvbm_manager_free finds each part made or zero, at any failure from
 * here on.
 */
static struct kvbm_manager *manager_new(void)
{
    struct kvbm_manager *m = calloc(1, sizeof(*m));

    if (!m)
        return NULL;
    pthread_mutex_init(&m->lock, NULL);
    kv_cond_init(&m->work);
    kv_cond_init(&m->changed);
    m->jobs.done_wake.fd = -1;
    m->jobs.done_tail = &m->jobs.done;
    m->jobs.over_tail = &m->jobs.over;
    TAILQ_INIT(&m->pins.turns);
    TAILQ_INIT(&m->pins.ready);
    return m;
}

static int refuse(const char *reason)
{
    kv_log_warn("kvbm", "manager not created", "reason=\"%s\"", reason);
    return -EINVAL;
}

int kvbm_manager_create(const struct kvbm_manager_opts *opts, struct kvbm_manager **ret)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct kvbm_manager *m;
    const char *wrong;
    int rc;

    if (!kv_sized(opts, "kvbm_manager_opts"))
        return -EINVAL;
    if (!ret || opts->size < offsetof(struct kvbm_manager_opts, host_eviction))
        return refuse(!ret ? "nowhere to return the manager" : "size of an unknown version");
    pthread_once(&once, watch_forks);
    m = manager_new();
    if (!m)
        return -ENOMEM;
    m->forks = atomic_load(&forks);
    /* a caller of an older version has a shorter struct: the rest stays 0, the default */
    memcpy(&m->opts, opts, KV_MIN(opts->size, sizeof(m->opts)));
    wrong = what_is_wrong(&m->opts);
    set_defaults(&m->opts);
    m->key_len = m->opts.key_len;
    rc = wrong ? refuse(wrong) : copy_strings(m);
    if (rc == 0)
        rc = kvbm_tiers_open(m);
    /* also after a failure: kvbm_manager_free doesn't read it */
    m->opts.block = NULL; /* points to the caller's memory */
    if (rc < 0) {
        kvbm_manager_free(m, kv_now_ns() + KVBM_LET_GO_NS);
        return rc;
    }
    *ret = m;
    return 0;
}

/* ---- accessors ---- */

struct kvbm_registry *kvbm_manager_registry(struct kvbm_manager *m)
{
    return m ? m->registry : NULL;
}

struct kvbm_pool *kvbm_manager_pool(struct kvbm_manager *m, enum kv_tier tier)
{
    if (!m)
        return NULL;
    return tier == KV_TIER_HOST       ? (kvbm_staging(m) ? NULL : m->host)
           : tier == KV_TIER_DISK     ? m->disk
           : tier == KV_TIER_EXTERNAL ? m->object
                                      : NULL;
}

const struct kvbm_layout *kvbm_manager_host_layout(struct kvbm_manager *m)
{
    return m ? m->layout : NULL;
}

const struct kvbm_shared *kvbm_manager_shared(struct kvbm_manager *m)
{
    return m ? m->shared : NULL;
}
