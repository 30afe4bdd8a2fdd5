// SPDX-License-Identifier: Apache-2.0
#include "tiered/member.h"

#include <inttypes.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "store/backend/plugin.h"
#include "store/object/fetch.h"

/* Of the breaker, and how long a look at a member's bytes counts. */
enum { MAX_FAILURES = 3, FIRST_WAIT_MS = 1000, MAX_WAIT_MS = 30000, LOOK_MS = 1000 };

/* Manifest by which a backend without extensions proves that it works. */
#define ALIVE TRD_OWN_NAMES "alive"

/* -- open and close ---------------------------------------------------------------------------- */

/* A backend without extensions gets the manifest that trd_get_chunk asks for. */
static int prepare(struct kvs_store *store, bool read_only)
{
    if (store->ext_table)
        return 0;
    if (read_only) {
        kv_log_error("tiered",
                     "a read-only member's plugin must have kv_store_get_ext: without, a "
                     "miss looks like a failure",
                     "store=%s", store->label);
        return -EPROTO;
    }
    return kvs_put_manifest(store, ALIVE, "", 0);
}

static int open_store(struct trd_member *member)
{
    const struct trd_member_config *config = member->config;
    struct kvs_store *store = NULL;
    int rc = trd_open(config->uri, config->read_only, config->deadline_ms, &member->bound, &store);

    if (rc)
        return rc;
    kvs_publishes_by_hand(store);
    rc = prepare(store, config->read_only);
    if (rc) {
        kvs_close(store);
        return rc;
    }
    atomic_store_explicit(&member->store, store, memory_order_release); /* with trd_enter's load */
    return 0;
}

int trd_member_init(struct trd_member *member, const struct trd_member_config *config)
{
    struct trd_use use;
    struct kvs_plugin plugin;
    int rc;

    member->config = config;
    pthread_mutex_init(&member->lock, NULL);
    pthread_mutex_init(&member->commit, NULL);
    trd_catalog_init(&member->catalog);
    member->breaker = (struct kv_breaker){.max_failures = 1,
                                          .first_wait_ns = FIRST_WAIT_MS * KV_NS_PER_MS,
                                          .max_wait_ns = MAX_WAIT_MS * KV_NS_PER_MS};
    rc = kvs_find_backend(config->uri, &plugin); /* its errors stay, however long one waits */
    if (rc)
        return rc;
    kvs_plugin_unload(&plugin);
    rc = open_store(member);
    if (rc == -EINVAL || rc == -EPROTO)
        return rc;
    use = (struct trd_use){.probe = true};
    trd_leave(member, use, rc == -ENOENT ? -EHOSTDOWN : rc);
    member->breaker.max_failures = MAX_FAILURES;
    return 0;
}

void trd_member_fini(struct trd_member *member)
{
    if (!member->config)
        return;
    kvs_close(atomic_load(&member->store));
    trd_bound_destroy(member->bound);
    trd_pending_fini(&member->pending);
    trd_catalog_fini(&member->catalog);
    pthread_mutex_destroy(&member->lock);
    pthread_mutex_destroy(&member->commit);
}

/* -- calls ------------------------------------------------------------------------------------- */

bool trd_enter(struct trd_member *member, struct trd_use *ret)
{
    struct kvs_store *store = atomic_load_explicit(&member->store, memory_order_acquire);
    enum kv_gate gate;
    int rc;

    *ret = (struct trd_use){.store = store};
    if (KV_LIKELY(store && !atomic_load_explicit(&member->down, memory_order_relaxed)))
        return true;
    pthread_mutex_lock(&member->lock);
    gate = kv_breaker_ask(&member->breaker, kv_now_ns());
    pthread_mutex_unlock(&member->lock);
    ret->probe = gate == KV_GATE_PROBE;
    if (gate == KV_GATE_REFUSE)
        return false;
    if (store)
        return true;
    rc = ret->probe ? open_store(member) : -EHOSTDOWN; /* no other thread is the probe */
    if (rc) {
        trd_leave(member, *ret, rc == -ENOENT ? -EHOSTDOWN : rc);
        return false;
    }
    ret->store = atomic_load_explicit(&member->store, memory_order_acquire);
    return true;
}

/* Log a change of the member's state once. With the lock held. */
static void say(struct trd_member *member, int rc)
{
    bool open = member->breaker.open;

    if (open && !member->said_down)
        kv_log_warn("tiered", "a member fails: its blobs can't be had until it answers",
                    "member=%s error=\"%s\" retry_ms=%" PRIu64, member->config->name, strerror(-rc),
                    member->breaker.wait_ns / KV_NS_PER_MS);
    if (!open && member->said_down)
        kv_log_warn("tiered", "a member answers again", "member=%s failures=%" PRIu64,
                    member->config->name, member->n_failures);
    if (!open)
        member->n_failures = 0;
    member->said_down = open;
}

int trd_leave(struct trd_member *member, struct trd_use use, int rc)
{
    bool failed = kv_breaker_counts(rc) && rc != -ECHILD;

    if (KV_LIKELY(!failed && !atomic_load_explicit(&member->failures, memory_order_relaxed)))
        return rc;
    if (rc == -ECHILD && !use.probe)
        return rc; /* a forked child says nothing about the member */
    pthread_mutex_lock(&member->lock);
    member->n_failures += failed;
    if (kvs_is_outage(rc)) /* its backend has tried long enough */
        member->breaker.failures = KV_MAX(member->breaker.failures, MAX_FAILURES - 1u);
    kv_breaker_tell(&member->breaker, !failed, use.probe, kv_now_ns());
    atomic_store_explicit(&member->failures, failed, memory_order_relaxed);
    atomic_store_explicit(&member->down, member->breaker.open, memory_order_relaxed);
    say(member, rc);
    pthread_mutex_unlock(&member->lock);
    return rc;
}

bool trd_is_full(struct trd_member *member)
{
    uint64_t now = kv_now_ns();
    kv_store_stats stats = {.size = sizeof(stats)};
    struct trd_use use;
    bool full, look;

    if (member->config->capacity == UINT64_MAX)
        return false;
    pthread_mutex_lock(&member->lock);
    look = !member->looked_ns || now - member->looked_ns >= LOOK_MS * KV_NS_PER_MS;
    full = member->full;
    if (look)
        member->looked_ns = now;
    pthread_mutex_unlock(&member->lock);
    if (!look || !trd_enter(member, &use))
        return full;
    if (trd_leave(member, use, kvs_stats(use.store, &stats)) < 0)
        return full;
    full = stats.bytes != UINT64_MAX && stats.bytes >= member->config->capacity;
    pthread_mutex_lock(&member->lock);
    member->full = full;
    pthread_mutex_unlock(&member->lock);
    return full;
}

void trd_note_put(struct trd_member *member, const void *hash, size_t hash_len)
{
    pthread_mutex_lock(&member->lock);
    trd_pending_add(&member->pending, hash, hash_len);
    pthread_mutex_unlock(&member->lock);
}

int trd_get_chunk(struct kvs_store *store, const void *hash, size_t hash_len, void **ret,
                  size_t *ret_len)
{
    int rc = kvs_get_chunk(store, hash, hash_len, ret, ret_len);
    void *proof;
    size_t len;

    if (KV_LIKELY(rc != -ENOENT || store->ext_table))
        return rc;
    if (kvs_get_manifest(store, ALIVE, &proof, &len) < 0)
        return -EIO;
    free(proof);
    return rc;
}
