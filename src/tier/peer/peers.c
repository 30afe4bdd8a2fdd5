// SPDX-License-Identifier: Apache-2.0
/* The peer tier: queue, threads, deadlines. peer.h says what it does. */
#include <errno.h>

#include "base/thread/thread.h"
#include "tier/peer/impl.h"

#define ANY_NS (10 * KV_NS_PER_MS) /* with many peers it takes long to count them */
/* Of a peer's blocks, an eighth: half of the quarter that a peer lends by default. */
#define LENDABLE_SHARE 8

/* ---- the queue; with the lock held ---- */

static void unlink_batch(struct kvbm_peers *peers, const struct kvbm_peer_batch *batch)
{
    struct kvbm_peer_batch **at = &peers->queue;

    while (*at && *at != batch)
        at = &(*at)->next_;
    if (!*at)
        return;
    *at = batch->next_;
    peers->n_queued--;
}

static uint64_t crowd_of(const struct kvbm_peer_batch *batch)
{
    return batch->op == KVBM_PEER_ASK ? 0 : batch->worker;
}

/* Tell whether half of the threads work for the same peer, or ask. */
static bool is_crowded(const struct kvbm_peers *peers, const struct kvbm_peer_batch *batch)
{
    uint32_t n = 0, most = KV_MAX(peers->opts.n_threads / 2, 1u);

    for (uint32_t i = 0; i < peers->opts.n_threads; i++)
        n += peers->slots[i].batch && crowd_of(peers->slots[i].batch) == crowd_of(batch);
    return n >= most;
}

/* Take the batch to run next: of the highest priority the oldest. NULL: none may run. */
static struct kvbm_peer_batch *take(struct kvbm_peers *peers)
{
    struct kvbm_peer_batch *best = NULL;

    for (struct kvbm_peer_batch *batch = peers->queue; batch; batch = batch->next_) {
        if ((!best || batch->priority > best->priority) && !is_crowded(peers, batch))
            best = batch;
    }
    if (best)
        unlink_batch(peers, best);
    return best;
}

/* ---- threads ---- */

/* End a batch that hasn't run. Without the lock. */
static void end_with(struct kvbm_peers *peers, struct kvbm_peer_batch *batch, int status)
{
    pthread_mutex_lock(&peers->lock);
    for (uint32_t i = 0; i < batch->n && batch->op == KVBM_PEER_ASK; i++)
        kvbm_known_unask(peers, batch->ios[i].hash, batch->until_);
    pthread_mutex_unlock(&peers->lock);
    for (uint32_t i = 0; i < batch->n; i++)
        batch->ios[i].status = status;
    batch->done(batch);
}

static struct kvbm_peer_slot *free_slot(struct kvbm_peers *peers)
{
    struct kvbm_peer_slot *slot = peers->slots;

    while (slot->batch)
        slot++;
    return slot;
}

static void *work(void *arg)
{
    struct kvbm_peers *peers = arg;

    pthread_mutex_lock(&peers->lock);
    while (!peers->stopping) {
        struct kvbm_peer_batch *batch = peers->ending ? NULL : take(peers);
        struct kvbm_peer_slot *slot;

        if (!batch) {
            pthread_cond_wait(&peers->work, &peers->lock);
            continue;
        }
        slot = free_slot(peers);
        slot->batch = batch;
        pthread_mutex_unlock(&peers->lock);
        kvbm_peers_run(peers, slot, batch);
        pthread_mutex_lock(&peers->lock);
        slot->batch = NULL;
        pthread_cond_signal(&peers->work); /* a crowd may have room now */
        pthread_mutex_unlock(&peers->lock);
        batch->done(batch);
        pthread_mutex_lock(&peers->lock);
    }
    pthread_mutex_unlock(&peers->lock);
    return NULL;
}

/* Find a queued batch that has ended. *@next becomes the next deadline. */
static struct kvbm_peer_batch *find_ended(const struct kvbm_peers *peers, uint64_t now,
                                          uint64_t *next)
{
    *next = UINT64_MAX;
    for (struct kvbm_peer_batch *batch = peers->queue; batch; batch = batch->next_) {
        if (peers->ending || batch->cancelled_ || batch->until_ <= now)
            return batch;
        *next = KV_MIN(*next, batch->until_);
    }
    return NULL;
}

/* End queued batches that were cancelled, or whose deadline has passed. */
static void *watch(void *arg)
{
    struct kvbm_peers *peers = arg;

    pthread_mutex_lock(&peers->lock);
    while (!peers->stopping || peers->queue) {
        uint64_t next;
        struct kvbm_peer_batch *batch = find_ended(peers, kv_now_ns(), &next);

        if (batch) {
            int status = peers->ending || batch->cancelled_ ? -ECANCELED : -ETIMEDOUT;

            unlink_batch(peers, batch);
            pthread_mutex_unlock(&peers->lock);
            end_with(peers, batch, status);
            pthread_mutex_lock(&peers->lock);
        } else if (next == UINT64_MAX) {
            pthread_cond_wait(&peers->late, &peers->lock);
        } else {
            (void)kv_cond_wait_until(&peers->late, &peers->lock, next);
        }
    }
    pthread_mutex_unlock(&peers->lock);
    return NULL;
}

/* ---- calls ---- */

static bool is_complete(const struct kvbm_peers *peers, const struct kvbm_peer_batch *batch)
{
    uint32_t most = batch->op == KVBM_PEER_ASK ? KVBM_PEER_ASKED : KVBM_PEER_BATCH;

    return batch->n && batch->n <= most && batch->done && batch->ios &&
           (batch->op != KVBM_PEER_GET || batch->to) &&
           (batch->op == KVBM_PEER_ASK || batch->worker) && peers->opts.key_len <= 64;
}

/* Queue a batch, with the lock held. */
static void push(struct kvbm_peers *peers, struct kvbm_peer_batch *batch)
{
    struct kvbm_peer_batch **at = &peers->queue;

    while (*at)
        at = &(*at)->next_;
    *at = batch;
    batch->next_ = NULL;
    peers->n_queued++;
    for (uint32_t i = 0; i < batch->n && batch->op == KVBM_PEER_ASK; i++)
        kvbm_known_set(peers, batch->ios[i].hash, KVBM_KNOWN_ASKED, 0, batch->until_);
    pthread_cond_signal(&peers->work);
    pthread_cond_signal(&peers->late);
}

int kvbm_peers_submit(struct kvbm_peers *peers, struct kvbm_peer_batch *batch)
{
    uint64_t until = kv_now_ns() + peers->opts.timeout_ms * KV_NS_PER_MS;
    int err = 0;

    if (!is_complete(peers, batch))
        return -EINVAL;
    batch->until_ = batch->deadline_ns ? KV_MIN(batch->deadline_ns, until) : until;
    batch->cancelled_ = false;
    batch->lease = NULL;
    pthread_mutex_lock(&peers->lock);
    if (peers->ending)
        err = -ESHUTDOWN;
    else if (peers->n_queued >= peers->opts.max_queue)
        err = -EAGAIN;
    else
        push(peers, batch);
    pthread_mutex_unlock(&peers->lock);
    return err;
}

void kvbm_peers_cancel(struct kvbm_peers *peers, struct kvbm_peer_batch *batch)
{
    pthread_mutex_lock(&peers->lock);
    batch->cancelled_ = true;
    pthread_cond_signal(&peers->late);
    pthread_mutex_unlock(&peers->lock);
}

void kvbm_peers_cancel_all(struct kvbm_peers *peers)
{
    if (!peers)
        return;
    pthread_mutex_lock(&peers->lock);
    peers->ending = true;
    kvbm_indexer_interrupt(peers->indexer, true);
    for (uint32_t i = 0; i < peers->opts.n_threads; i++) {
        if (peers->slots[i].session)
            kvbm_session_abort(peers->slots[i].session, -ECANCELED, "its reader ends");
    }
    pthread_cond_broadcast(&peers->late);
    pthread_cond_broadcast(&peers->work);
    pthread_mutex_unlock(&peers->lock);
}

void kvbm_peers_resume(struct kvbm_peers *peers)
{
    if (!peers)
        return;
    pthread_mutex_lock(&peers->lock);
    peers->ending = false;
    kvbm_indexer_interrupt(peers->indexer, false);
    pthread_cond_broadcast(&peers->work);
    pthread_mutex_unlock(&peers->lock);
}

/* Count peers whose blocks fit, and of these such that may be asked now. */
static uint32_t count_peers(struct kvbm_peers *peers, uint32_t *askable)
{
    struct kvbm_session *sessions[1024];
    size_t n = kvbm_sessions_list(peers->opts.agent, sessions, KV_COUNT(sessions));
    uint64_t now = kv_now_ns();
    uint32_t fit = 0;

    *askable = 0;
    for (size_t i = 0; i < n; i++) {
        bool fits = kvbm_peers_fit(peers, sessions[i]);

        pthread_mutex_lock(&peers->lock);
        *askable +=
            fits && kvbm_gate_would_pass(peers, kvbm_session_peer(sessions[i])->worker, now);
        pthread_mutex_unlock(&peers->lock);
        fit += fits;
        kvbm_session_put(sessions[i]);
    }
    return fit;
}

bool kvbm_peers_any(struct kvbm_peers *peers)
{
    uint64_t now = kv_now_ns();
    uint32_t askable;

    if (now < atomic_load_explicit(&peers->any_until_ns, memory_order_relaxed))
        return true;
    (void)count_peers(peers, &askable);
    if (askable)
        atomic_store_explicit(&peers->any_until_ns, now + ANY_NS, memory_order_relaxed);
    return askable;
}

uint64_t kvbm_peers_lendable(struct kvbm_peers *peers, uint64_t worker)
{
    struct kvbm_session *session = kvbm_session_find(peers->opts.agent, worker);
    uint64_t n = session ? kvbm_session_shares(session, peers->opts.set) / LENDABLE_SHARE : 0;

    kvbm_session_put(session);
    return n;
}

void kvbm_peers_get_stats(struct kvbm_peers *peers, struct kvbm_peers_stats *ret)
{
    uint32_t askable, fit = count_peers(peers, &askable);
    struct kvbm_indexer_stats indexer = {0};

    if (peers->indexer)
        kvbm_indexer_get_stats(peers->indexer, &indexer);
    pthread_mutex_lock(&peers->lock);
    *ret = peers->stats;
    ret->indexer_asked = indexer.asked;
    ret->indexer_failed = indexer.failed;
    ret->indexer_down = indexer.down;
    ret->sessions = fit;
    ret->down = 0;
    for (uint32_t i = 0; i < peers->n_gates; i++)
        ret->down += peers->gates[i].open;
    pthread_mutex_unlock(&peers->lock);
}

/* ---- open and close ---- */

static int start(struct kvbm_peers *peers)
{
    int err = 0;

    for (uint32_t i = 0; err == 0 && i <= peers->opts.n_threads; i++) {
        bool last = i == peers->opts.n_threads;

        err = kv_thread_start(&peers->threads[i], last ? "kvbm-peer-late" : "kvbm-peer",
                              last ? watch : work, peers);
        peers->n_started += err == 0;
    }
    return err;
}

int kvbm_peers_open(const struct kvbm_peers_opts *opts, struct kvbm_peers **ret)
{
    struct kvbm_peers *peers;
    int err;

    if (!opts->agent || !opts->like || opts->key_len > 64)
        return -EINVAL;
    peers = calloc(1, sizeof(*peers));
    if (!peers)
        return -ENOMEM;
    peers->opts = *opts;
    peers->opts.set = opts->set ? opts->set : 1;
    peers->opts.n_threads = opts->n_threads ? opts->n_threads : 8;
    peers->opts.max_queue = opts->max_queue ? opts->max_queue : 1024;
    peers->opts.timeout_ms = opts->timeout_ms ? opts->timeout_ms : 2000;
    peers->opts.ask_ms = opts->ask_ms ? opts->ask_ms : 250;
    peers->opts.max_asked =
        opts->max_asked ? KV_MIN(opts->max_asked, KVBM_MAX_ASKED_PEERS) : KVBM_MAX_ASKED_PEERS;
    pthread_mutex_init(&peers->lock, NULL);
    kv_cond_init(&peers->work);
    kv_cond_init(&peers->late);
    peers->threads = calloc(peers->opts.n_threads + 1, sizeof(*peers->threads));
    peers->slots = calloc(peers->opts.n_threads, sizeof(*peers->slots));
    err = peers->threads && peers->slots ? 0 : -ENOMEM;
    if (err == 0 && opts->indexer)
        err = kvbm_indexer_open(opts->indexer, &peers->indexer);
    if (err == 0)
        err = start(peers);
    peers->hears =
        err == 0 && kvbm_agent_serve(opts->agent, KVBM_TELL_GONE, kvbm_known_gone, peers) == 0;
    if (err < 0) {
        kvbm_peers_close(peers);
        return err;
    }
    *ret = peers;
    return 0;
}

void kvbm_peers_close(struct kvbm_peers *peers)
{
    if (!peers)
        return;
    if (peers->hears)
        (void)kvbm_agent_serve(peers->opts.agent, KVBM_TELL_GONE, NULL, NULL);
    if (peers->slots)
        kvbm_peers_cancel_all(peers);
    pthread_mutex_lock(&peers->lock);
    peers->stopping = true;
    pthread_cond_broadcast(&peers->work);
    pthread_cond_broadcast(&peers->late);
    pthread_mutex_unlock(&peers->lock);
    for (uint32_t i = 0; i < peers->n_started; i++)
        pthread_join(peers->threads[i], NULL);
    pthread_cond_destroy(&peers->work);
    pthread_cond_destroy(&peers->late);
    pthread_mutex_destroy(&peers->lock);
    kvbm_indexer_close(peers->indexer);
    free(peers->threads);
    free(peers->slots);
    free(peers);
}
