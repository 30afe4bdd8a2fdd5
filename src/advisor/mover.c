// SPDX-License-Identifier: Apache-2.0
#include "advisor/mover.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "tiered/move.h"

enum { STEPS = 512, COPY_BLOBS = 256, RESTING = 4096, WAITING = 65536 };
#define COPY_BYTES (UINT64_C(16) << 20)
#define INTERVAL_MS 200
#define IDLE_TIMES UINT64_C(20) /* a pass that finds nothing takes at most this part of the time */
#define REST_NS (60 * KV_NS_PER_S) /* of a blob; longest of a pair */
#define LOOK_REST_NS (5 * KV_NS_PER_S)

/* A removal that waits for the store's linger. */
struct waiting {
    uint8_t key[KVA_KEY];
    uint8_t from, to;
    uint64_t due_ns;
};

/* Two members that a call has failed between. */
struct pair {
    uint64_t until_ns, rest_ns;
};

struct kva_mover {
    struct kva_mover_opts opts;
    struct kva_packer *packer;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock; /* guards stop and stats */
    pthread_cond_t woken;
    bool stop;
    struct kva_mover_stats stats;
    /* of the thread: */
    uint64_t scans;     /* with a leader: moves begin with more scans than so many */
    uint32_t at;        /* record that the pass has come to */
    bool any;           /* the pass has found a step to take */
    uint64_t looked_ns; /* time that the pass has spent in the index so far */
    uint64_t free_ns;   /* when the limits let the next step begin */
    struct pair pairs[KVA_MEMBERS][KVA_MEMBERS];
    struct {
        uint8_t key[KVA_KEY];
        uint64_t until_ns;
    } resting[RESTING];      /* blobs, each at the place that its key names */
    struct waiting *waiting; /* a ring */
    size_t first, n_waiting;
    struct kva_move steps[STEPS];
    uint8_t keys[COPY_BLOBS * KVA_KEY];
    int each[COPY_BLOBS];
};

static uint32_t now_s(void)
{
    return (uint32_t)(kv_wall_ns() / KV_NS_PER_S);
}

/* -- waiting ----------------------------------------------------------------------------------- */

/* Wait until @until_ns. Returns false when the thread is to end. */
static bool rest_until(struct kva_mover *mover, uint64_t until_ns)
{
    bool stop;

    pthread_mutex_lock(&mover->lock);
    while (!mover->stop && kv_now_ns() < until_ns)
        (void)kv_cond_wait_until(&mover->woken, &mover->lock, until_ns);
    stop = mover->stop;
    pthread_mutex_unlock(&mover->lock);
    return !stop;
}

bool kva_is_quiet(uint32_t from, uint32_t to, uint32_t at)
{
    return from <= to ? at >= from && at < to : at >= from || at < to;
}

static bool is_quiet_now(struct kva_mover *mover)
{
    const struct kva_limits *l = &mover->opts.limits;
    time_t now = time(NULL);
    struct tm tm;
    bool quiet = localtime_r(&now, &tm) &&
                 kva_is_quiet(l->quiet_from, l->quiet_to, (uint32_t)(tm.tm_hour * 60 + tm.tm_min));

    pthread_mutex_lock(&mover->lock);
    mover->stats.quiet = quiet;
    pthread_mutex_unlock(&mover->lock);
    return quiet;
}

/* Wait for the limits to allow @n requests and @bytes, and count them. False: end, or quiet hours. */
static bool pay(struct kva_mover *mover, uint64_t n, uint64_t bytes)
{
    const struct kva_limits *l = &mover->opts.limits;
    double seconds = 0, requests = l->requests_per_s ? (double)n / (double)l->requests_per_s : 0;

    if (!rest_until(mover, mover->free_ns) || is_quiet_now(mover))
        return false;
    if (l->bytes_per_s)
        seconds = (double)bytes / (double)l->bytes_per_s;
    seconds = KV_MIN(KV_MAX(seconds, requests), 3600.0);
    mover->free_ns = KV_MAX(mover->free_ns, kv_now_ns()) + (uint64_t)(seconds * 1e9);
    return true;
}

/* -- what rests -------------------------------------------------------------------------------- */

static size_t resting_at(const uint8_t *key)
{
    return (key[0] | (size_t)key[1] << 8) % RESTING;
}

static void rest_blob(struct kva_mover *mover, const uint8_t *key, uint64_t ns)
{
    size_t at = resting_at(key);

    memcpy(mover->resting[at].key, key, KVA_KEY);
    mover->resting[at].until_ns = kv_now_ns() + ns;
}

static bool rests(const struct kva_mover *mover, const uint8_t *key, uint64_t now_ns)
{
    size_t at = resting_at(key);

    return kva_leader_doubts(mover->opts.leader, key) ||
           (now_ns < mover->resting[at].until_ns &&
            memcmp(mover->resting[at].key, key, KVA_KEY) == 0);
}

static void count_failed(struct kva_mover *mover, uint64_t n)
{
    pthread_mutex_lock(&mover->lock);
    mover->stats.failed += n;
    pthread_mutex_unlock(&mover->lock);
}

/* Note how a call between two members ended. */
static void note_pair(struct kva_mover *mover, unsigned from, unsigned to, int rc)
{
    struct pair *p = &mover->pairs[from][to];
    const struct trd_config *config = &mover->opts.volumes->config;

    if (rc >= 0) {
        if (p->rest_ns)
            kv_log_info("advisor", "moves go on", "from=%s to=%s", config->members[from].name,
                        config->members[to].name);
        p->rest_ns = 0;
        return;
    }
    if (!p->rest_ns)
        kv_log_warn("advisor", "a move has failed; its members rest", "from=%s to=%s reason=\"%s\"",
                    config->members[from].name, config->members[to].name, strerror(-rc));
    p->rest_ns = p->rest_ns ? KV_MIN(2 * p->rest_ns, REST_NS) : KV_NS_PER_S;
    p->until_ns = kv_now_ns() + p->rest_ns;
    count_failed(mover, 1);
}

/* A member that couldn't be listed yet may be full. */
static bool may_move(const struct kva_mover *mover, unsigned from, unsigned to, uint64_t now_ns)
{
    const struct kva_volumes *v = mover->opts.volumes;

    return atomic_load(&v->usable[from]) && atomic_load(&v->usable[to]) &&
           atomic_load(&v->listed[to]) && now_ns >= mover->pairs[from][to].until_ns;
}

/* -- removal behind linger --------------------------------------------------------------------- */

static void set_lingering(struct kva_mover *mover)
{
    pthread_mutex_lock(&mover->lock);
    mover->stats.lingering = mover->n_waiting;
    pthread_mutex_unlock(&mover->lock);
}

static bool add_waiting(struct kva_mover *mover, const uint8_t *key, unsigned from, unsigned to)
{
    struct waiting *w = &mover->waiting[(mover->first + mover->n_waiting) % WAITING];

    if (mover->n_waiting == WAITING)
        return false;
    memcpy(w->key, key, KVA_KEY);
    w->from = (uint8_t)from;
    w->to = (uint8_t)to;
    w->due_ns = kv_now_ns() + mover->opts.volumes->config.linger_ms * KV_NS_PER_MS;
    mover->n_waiting++;
    pthread_mutex_lock(&mover->opts.world->lock);
    kva_index_linger(mover->opts.world->index, key, true);
    pthread_mutex_unlock(&mover->opts.world->lock);
    set_lingering(mover);
    return true;
}

/* True when the removal is still wanted: another use may have changed the blob's place. Then it adds the
 * blob's bytes to @ret_bytes. */
static bool still_wanted(struct kva_mover *mover, const struct waiting *w, uint64_t *ret_bytes)
{
    const struct kva_block *b;
    bool wanted;

    pthread_mutex_lock(&mover->opts.world->lock);
    b = kva_index_find(mover->opts.world->index, w->key);
    wanted = b && !kva_leader_doubts(mover->opts.leader, w->key) && b->want != w->from &&
             b->have >> w->from & 1 && b->have >> w->to & 1;
    *ret_bytes += wanted ? (uint64_t)b->units * KVA_UNIT : 0;
    kva_index_linger(mover->opts.world->index, w->key, false);
    pthread_mutex_unlock(&mover->opts.world->lock);
    return wanted;
}

/* Note in the index how the removal of a blob ended. */
static void note_removed(struct kva_mover *mover, const uint8_t *key, unsigned from, unsigned to,
                         int rc)
{
    uint8_t state = KVS_THERE;

    if (rc == 0)
        state = kva_volumes_look(mover->opts.volumes, from, key);
    pthread_mutex_lock(&mover->opts.world->lock);
    if (rc == 1 || state == KVS_MISSING)
        kva_index_gone(mover->opts.world->index, from, key);
    else if (rc == -ENOENT || rc == -EBADMSG)
        kva_index_gone(mover->opts.world->index, to, key);
    pthread_mutex_unlock(&mover->opts.world->lock);
    if (rc != 1 && state != KVS_MISSING) {
        rest_blob(mover, key, REST_NS);
        count_failed(mover, 1);
    }
    pthread_mutex_lock(&mover->lock);
    mover->stats.removed[from] += rc == 1;
    pthread_mutex_unlock(&mover->lock);
}

/* Take a run of removals that are due, between the same two members: as their copies are read, of few
 * bytes. Returns their number in keys. */
static size_t take_due(struct kva_mover *mover, uint64_t now_ns, unsigned *ret_from,
                       unsigned *ret_to)
{
    uint64_t bytes = 0;
    size_t n = 0;

    while (mover->n_waiting && n < COPY_BLOBS && bytes < COPY_BYTES) {
        const struct waiting *w = &mover->waiting[mover->first];

        if (w->due_ns > now_ns || (n && (w->from != *ret_from || w->to != *ret_to)))
            break;
        if (still_wanted(mover, w, &bytes)) {
            *ret_from = w->from;
            *ret_to = w->to;
            memcpy(&mover->keys[n++ * KVA_KEY], w->key, KVA_KEY);
        }
        mover->first = (mover->first + 1) % WAITING;
        mover->n_waiting--;
    }
    set_lingering(mover);
    return n;
}

static bool may_remove(void *arg)
{
    return kva_leader_is(arg);
}

/* Remove @n blobs that have lingered. False: another advisor may move blobs now. */
static bool remove_run(struct kva_mover *mover, unsigned from, unsigned to, size_t n)
{
    struct kva_volumes *v = mover->opts.volumes;
    struct kva_leader *leader = mover->opts.leader;
    int rc = kva_leader_begin(leader, mover->keys, n);

    if (rc < 0)
        return false; /* a later pass finds them again */
    rc = trd_move_remove(kva_volumes_place(v, from), kva_volumes_place(v, to), mover->keys, KVA_KEY,
                         n, mover->each, may_remove, leader);
    kva_leader_end(leader);
    note_pair(mover, from, to, rc);
    for (size_t i = 0; rc >= 0 && i < n; i++)
        if (mover->each[i] != -ECANCELED)
            note_removed(mover, &mover->keys[i * KVA_KEY], from, to, mover->each[i]);
    return kva_leader_is(leader);
}

/* Remove what has lingered. Returns false when pay does; what is left then is found by a later pass. */
static bool remove_due(struct kva_mover *mover)
{
    unsigned from = 0, to = 0;
    size_t n;

    while (mover->n_waiting && mover->waiting[mover->first].due_ns <= kv_now_ns()) {
        n = take_due(mover, kv_now_ns(), &from, &to);
        if (!n || !may_move(mover, from, to, kv_now_ns()))
            continue; /* a later pass finds them again */
        if (!pay(mover, n, 0) || !remove_run(mover, from, to, n))
            return false;
    }
    return true;
}

/* -- copies ------------------------------------------------------------------------------------ */

static void note_copied(struct kva_mover *mover, const struct kva_move *step, int rc)
{
    struct kva_index *index = mover->opts.world->index;

    pthread_mutex_lock(&mover->opts.world->lock);
    if (rc == 0 && kva_index_find(index, step->key))
        (void)kva_index_found(index, step->to, step->key, UINT64_MAX, 0);
    else if (rc == -ENOENT)
        kva_index_gone(index, step->from, step->key);
    pthread_mutex_unlock(&mover->opts.world->lock);
    pthread_mutex_lock(&mover->lock);
    mover->stats.copied[step->to] += rc == 0;
    mover->stats.copied_bytes[step->to] += rc == 0 ? step->bytes : 0;
    mover->stats.bad += rc == -EBADMSG;
    mover->stats.failed += rc < 0 && rc != -ENOENT;
    pthread_mutex_unlock(&mover->lock);
    if (rc == 0)
        (void)add_waiting(mover, step->key, step->from, step->to);
    else if (rc != -ENOENT)
        rest_blob(mover, step->key, REST_NS);
}

/* Bytes that a member has room for. */
static uint64_t room_of(struct kva_mover *mover, unsigned member)
{
    uint64_t capacity = mover->opts.volumes->config.members[member].capacity, has;
    struct kva_index_stats stats;

    if (capacity == UINT64_MAX)
        return UINT64_MAX;
    pthread_mutex_lock(&mover->opts.world->lock);
    kva_index_get_stats(mover->opts.world->index, &stats);
    pthread_mutex_unlock(&mover->opts.world->lock);
    has = stats.members[member].have_bytes + stats.members[member].reserved;
    return capacity > has ? capacity - has : 0;
}

static bool is_full(int rc)
{
    return rc == -ENOSPC || rc == -EDQUOT;
}

/* Copy the @n steps, all between the same members. False: as pay. */
static bool copy_run(struct kva_mover *mover, const struct kva_move *const *run, size_t n,
                     uint64_t bytes)
{
    struct kva_volumes *v = mover->opts.volumes;
    unsigned from = run[0]->from, to = run[0]->to;
    int rc, full = 0;

    if (!pay(mover, n, bytes) || !kva_leader_is(mover->opts.leader))
        return false;
    for (size_t i = 0; i < n; i++)
        memcpy(&mover->keys[i * KVA_KEY], run[i]->key, KVA_KEY);
    rc = trd_move_copy(kva_volumes_place(v, from), kva_volumes_place(v, to), mover->keys, KVA_KEY,
                       n, mover->each);
    for (size_t i = 0; rc >= 0 && i < n; i++) {
        note_copied(mover, run[i], mover->each[i]);
        full = is_full(mover->each[i]) ? mover->each[i] : full;
    }
    note_pair(mover, from, to, full ? full : rc);
    return true;
}

/* Copy what the steps ask for, run by run. False: as pay. */
static bool copy(struct kva_mover *mover, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        const struct kva_move *first = &mover->steps[i], *run[COPY_BLOBS];
        uint64_t bytes = 0, room;
        size_t n_run = 0;

        if (first->kind != KVA_COPY || !may_move(mover, first->from, first->to, kv_now_ns()))
            continue;
        room = room_of(mover, first->to);
        for (size_t k = i; k < n && n_run < COPY_BLOBS; k++) {
            struct kva_move *step = &mover->steps[k];

            if (step->kind != KVA_COPY || step->from != first->from || step->to != first->to ||
                rests(mover, step->key, kv_now_ns()) || bytes + step->bytes > room ||
                (n_run && bytes + step->bytes > COPY_BYTES))
                continue;
            bytes += step->bytes;
            step->kind = KVA_LOOK; /* done: a look at it does nothing below */
            run[n_run++] = step;
        }
        if (!n_run || mover->n_waiting + n_run > WAITING)
            continue;
        mover->any = true;
        if (!copy_run(mover, run, n_run, bytes) || !remove_due(mover))
            return false;
        i--; /* the same members may have more of it */
    }
    return true;
}

/* -- looks and deletions ----------------------------------------------------------------------- */

static void look(struct kva_mover *mover, const struct kva_move *step)
{
    struct kva_volumes *v = mover->opts.volumes;
    struct kva_index *index = mover->opts.world->index;
    bool found = false;

    for (unsigned m = 0; m < v->config.n_members; m++) {
        if (!v->stores[m] || kva_volumes_look(v, m, step->key) != KVS_THERE)
            continue;
        pthread_mutex_lock(&mover->opts.world->lock);
        if (kva_index_find(index, step->key))
            (void)kva_index_found(index, m, step->key, UINT64_MAX, 0);
        pthread_mutex_unlock(&mover->opts.world->lock);
        found = true;
    }
    if (!found)
        rest_blob(mover, step->key, LOOK_REST_NS);
}

/* True when no publisher has the blob: one may have told of it since the step was found. */
static bool is_left(struct kva_mover *mover, const struct kva_move *step)
{
    struct kva_world *world = mover->opts.world;
    const struct kva_block *b;
    bool left;

    pthread_mutex_lock(&world->lock);
    if (world->feed)
        kva_feed_flush(world->feed);
    b = kva_index_find(world->index, step->key);
    left = b && kva_index_is_left(b, now_s(), mover->opts.limits.left_s) &&
           (!world->feed || kva_feed_is_whole(world->feed));
    pthread_mutex_unlock(&world->lock);
    return left;
}

/* Delete a blob in one member, by the bytes that it has there. -ENOENT: it has none. */
static int delete_in(struct kva_volumes *v, unsigned m, const uint8_t *key)
{
    void *data = NULL;
    size_t len = 0;
    int rc = kvs_get_chunk(v->stores[m], key, KVA_KEY, &data, &len);

    if (rc == 0)
        rc = kvs_delete_chunk_if(v->stores[m], key, KVA_KEY, data, len) == 1 ? -ENOENT : -EIO;
    free(data);
    if (rc == -ENOENT) {
        rc = trd_catalog_delete(&v->packs[m], v->stores[m], key, KVA_KEY, NULL, 0);
        rc = rc < 0 ? rc : -ENOENT;
    }
    return rc;
}

/* Remove a blob from every member. */
static void delete (struct kva_mover *mover, const struct kva_move *step)
{
    struct kva_volumes *v = mover->opts.volumes;
    bool all = true;

    if (!is_left(mover, step) || kva_leader_begin(mover->opts.leader, step->key, 1) < 0)
        return;
    for (unsigned m = 0; m < v->config.n_members; m++) {
        int rc;

        if (!v->stores[m] || v->config.members[m].read_only)
            continue;
        if (!atomic_load(&v->usable[m]) || !kva_leader_is(mover->opts.leader)) {
            all = false;
            continue;
        }
        rc = delete_in(v, m, step->key);
        all &= rc == -ENOENT;
        if (rc != -ENOENT)
            continue;
        pthread_mutex_lock(&mover->opts.world->lock);
        kva_index_gone(mover->opts.world->index, m, step->key);
        pthread_mutex_unlock(&mover->opts.world->lock);
    }
    kva_leader_end(mover->opts.leader);
    if (!all)
        rest_blob(mover, step->key, REST_NS);
    pthread_mutex_lock(&mover->lock);
    mover->stats.deleted += all;
    mover->stats.failed += !all;
    pthread_mutex_unlock(&mover->lock);
}

static bool others(struct kva_mover *mover, size_t n)
{
    bool whole;

    pthread_mutex_lock(&mover->opts.world->lock);
    whole = !mover->opts.world->feed || kva_feed_is_whole(mover->opts.world->feed);
    pthread_mutex_unlock(&mover->opts.world->lock);
    for (size_t i = 0; i < n; i++) {
        const struct kva_move *step = &mover->steps[i];

        if (rests(mover, step->key, kv_now_ns()))
            continue;
        if (step->kind == KVA_LOOK) {
            look(mover, step);
        } else if (step->kind == KVA_REMOVE && may_move(mover, step->from, step->to, kv_now_ns())) {
            mover->any |= add_waiting(mover, step->key, step->from, step->to);
        } else if (step->kind == KVA_DELETE && whole) { /* else one of them may have it yet */
            mover->any = true;
            if (!pay(mover, 1, 0))
                return false;
            delete (mover, step);
        }
    }
    return true;
}

/* -- the thread -------------------------------------------------------------------------------- */

/* Return when to wake: the next removal, or the next pass. */
static uint64_t next_turn(const struct kva_mover *mover)
{
    uint64_t wait_ns =
                 KV_MAX(mover->opts.interval_ms * KV_NS_PER_MS, IDLE_TIMES * mover->looked_ns),
             next_ns = kv_now_ns() + wait_ns;

    return mover->n_waiting ? KV_MIN(next_ns, mover->waiting[mover->first].due_ns) : next_ns;
}

/* Take the steps of the next records. */
static void turn(struct kva_mover *mover)
{
    uint64_t begin_ns = kv_now_ns();
    bool packed = false;
    size_t n;

    pthread_mutex_lock(&mover->opts.world->lock);
    n = kva_index_moves(mover->opts.world->index, &mover->at, now_s(), mover->opts.limits.left_s,
                        mover->steps, STEPS);
    pthread_mutex_unlock(&mover->opts.world->lock);
    mover->looked_ns += kv_now_ns() - begin_ns;
    if (!remove_due(mover) || !others(mover, n) || !copy(mover, n) || mover->at)
        return;
    if (!mover->any && !mover->n_waiting)
        packed = kva_packer_turn(mover->packer);
    pthread_mutex_lock(&mover->lock);
    mover->stats.passes +=
        !mover->any && !mover->n_waiting && !packed && kva_packer_is_idle(mover->packer);
    pthread_mutex_unlock(&mover->lock);
    if (!mover->any && !packed)
        (void)rest_until(mover, next_turn(mover));
    mover->any = false;
    mover->looked_ns = 0;
}

/* Forget the removals that wait: another advisor may have changed the places since. */
static void drop_waiting(struct kva_mover *mover)
{
    pthread_mutex_lock(&mover->opts.world->lock);
    for (size_t i = 0; i < mover->n_waiting; i++)
        kva_index_linger(mover->opts.world->index, mover->waiting[(mover->first + i) % WAITING].key,
                         false);
    pthread_mutex_unlock(&mover->opts.world->lock);
    mover->n_waiting = 0;
    set_lingering(mover);
}

/* Whether this advisor may move blobs now. Where it may anew, what it knows of places is old: first comes a scan. */
static bool leads(struct kva_mover *mover)
{
    struct kva_volumes *v = mover->opts.volumes;
    bool fresh, may = kva_leader_may_move(mover->opts.leader, &fresh);

    if (!mover->opts.leader)
        return true;
    if (!may) {
        if (mover->n_waiting)
            drop_waiting(mover);
        kva_packer_reset(mover->packer);
        kva_volumes_unlock(v);
        return false;
    }
    if (fresh) {
        mover->scans = atomic_load(&v->scans) + 1; /* one may be under way */
        mover->at = 0;
        kva_packer_reset(mover->packer);
    }
    kva_volumes_lock(v);
    may = atomic_load(&v->scans) > mover->scans;
    if (!may && mover->opts.scan)
        mover->opts.scan(mover->opts.scan_arg);
    return may;
}

static void *run(void *arg)
{
    struct kva_mover *mover = arg;
    uint64_t interval_ns = mover->opts.interval_ms * KV_NS_PER_MS;

    while (rest_until(mover, 0)) {
        if (!atomic_load(&mover->opts.volumes->scans) || is_quiet_now(mover) || !leads(mover))
            (void)rest_until(mover, kv_now_ns() + KV_MIN(interval_ns, 100 * KV_NS_PER_MS));
        else
            turn(mover);
    }
    return NULL;
}

/* -- the packer's calls ------------------------------------------------------------------------ */

static bool packer_pay(void *arg, uint64_t n, uint64_t bytes)
{
    return pay(arg, n, bytes);
}

static bool packer_wait(void *arg, uint64_t until_ns)
{
    return rest_until(arg, until_ns);
}

static bool packer_rests(void *arg, const uint8_t *key)
{
    return rests(arg, key, kv_now_ns());
}

static void packer_rest(void *arg, const uint8_t *key)
{
    rest_blob(arg, key, REST_NS);
}

static int make_packer(struct kva_mover *mover)
{
    const struct kva_packer_opts opts = {.volumes = mover->opts.volumes,
                                         .world = mover->opts.world,
                                         .leader = mover->opts.leader,
                                         .packing = mover->opts.packing,
                                         .pay = packer_pay,
                                         .wait = packer_wait,
                                         .rests = packer_rests,
                                         .rest = packer_rest,
                                         .arg = mover};

    return kva_packer_create(&opts, &mover->packer);
}

int kva_mover_create(const struct kva_mover_opts *opts, struct kva_mover **ret)
{
    struct kva_mover *mover = calloc(1, sizeof(*mover));
    int rc;

    if (!mover)
        return -ENOMEM;
    mover->opts = *opts;
    if (!mover->opts.interval_ms)
        mover->opts.interval_ms = INTERVAL_MS;
    pthread_mutex_init(&mover->lock, NULL);
    kv_cond_init(&mover->woken);
    mover->waiting = calloc(WAITING, sizeof(*mover->waiting));
    rc = mover->waiting ? make_packer(mover) : -ENOMEM;
    rc = rc < 0 ? rc : kv_thread_start(&mover->thread, "kva-mover", run, mover);
    mover->has_thread = rc == 0;
    if (rc < 0) {
        kva_mover_destroy(mover);
        return rc;
    }
    *ret = mover;
    return 0;
}

void kva_mover_destroy(struct kva_mover *mover)
{
    if (!mover)
        return;
    pthread_mutex_lock(&mover->lock);
    mover->stop = true;
    pthread_cond_broadcast(&mover->woken);
    pthread_mutex_unlock(&mover->lock);
    if (mover->has_thread)
        pthread_join(mover->thread, NULL);
    kva_leader_end(mover->opts.leader);
    kva_packer_destroy(mover->packer);
    pthread_cond_destroy(&mover->woken);
    pthread_mutex_destroy(&mover->lock);
    free(mover->waiting);
    free(mover);
}

void kva_mover_get_stats(struct kva_mover *mover, struct kva_mover_stats *ret)
{
    pthread_mutex_lock(&mover->lock);
    *ret = mover->stats;
    kva_packer_get_stats(mover->packer, &ret->packer);
    pthread_mutex_unlock(&mover->lock);
}
