// SPDX-License-Identifier: Apache-2.0
/* Transfers of a group: handed to all ranks, done when all have answered, over when no call is open. */
#include <poll.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/le.h"
#include "base/core/log.h"
#include "bm/deadline.h"
#include "bm/ids.h"
#include "tier/group/leader.h"

/* ---- with the lock held ---- */

static struct kvbm_order *find(const struct kvbm_leader *leader, uint64_t id)
{
    struct kvbm_order *o = NULL;

    LIST_FOREACH(o, &leader->orders, list)
    {
        if (o->done.id == id)
            return o;
    }
    return NULL;
}

static void order_free(struct kvbm_order *o)
{
    if (!o)
        return;
    free(o->all_ok);
    free(o);
}

/* Free a transfer whose result was taken, once it is over. */
static void let_go(struct kvbm_leader *leader, struct kvbm_order *o)
{
    if (!o->taken || o->n_pending > 0)
        return;
    LIST_REMOVE(o, list);
    leader->n_orders--;
    pthread_cond_broadcast(&leader->changed);
    order_free(o);
}

static bool is_over(const struct kvbm_order *o)
{
    return o->ended && o->n_pending == 0;
}

bool kvbm_leader_is_idle(const struct kvbm_leader *leader)
{
    const struct kvbm_order *o = NULL;

    LIST_FOREACH(o, &leader->orders, list)
    {
        if (!is_over(o) || o->fn) /* its callback runs */
            return false;
    }
    return true;
}

void kvbm_leader_drop_results(struct kvbm_leader *leader)
{
    struct kvbm_order *o;

    while ((o = LIST_FIRST(&leader->orders)) != NULL) {
        LIST_REMOVE(o, list);
        order_free(o);
    }
}

static uint32_t n_bytes(const struct kvbm_order *o)
{
    return (o->done.n + 7) / 8;
}

static void note_failure(struct kvbm_order *o, uint32_t rank, int status)
{
    if (o->done.rank == UINT32_MAX) {
        o->done.rank = rank;
        o->done.status = status;
    }
}

/* Merge a rank's answer. Bits count only when all of them came. */
static void merge(struct kvbm_order *o, uint32_t rank, long rc, const struct kvbm_reply *reply)
{
    const uint8_t *ok = rc >= 0 ? reply->body : NULL;
    int status = rc < 0 ? (int)rc : reply->status;

    if (rc >= 0 && (reply->status > 0 || (reply->len && reply->len != n_bytes(o)) ||
                    (!reply->len && reply->status == 0))) {
        status = -EPROTO;
        ok = NULL;
    }
    for (uint32_t i = 0; i < n_bytes(o); i++)
        o->all_ok[i] &= ok ? ok[i] : 0;
    if (status < 0)
        note_failure(o, rank, status);
}

/* Take the answers that have come. */
static void take_answers(struct kvbm_leader *leader, struct kvbm_order *o)
{
    for (uint32_t i = 0; i < leader->n_ranks; i++) {
        struct kvbm_answer *a = &o->answers[i];
        struct kvbm_reply reply = {.fd = -1};
        long rc;

        if (!a->call || !atomic_load(&a->ended))
            continue;
        rc = kvbm_call_wait(KV_STEAL(a->call), 0, &reply);
        if (--o->n_pending == 0) /* kvbm_leader_over may wait, whether the result is taken or not */
            pthread_cond_broadcast(&leader->changed);
        if (!o->ended)
            merge(o, i, rc, &reply);
        kvbm_reply_fini(&reply);
    }
}

/* Make the result final. */
static void finish(struct kvbm_leader *leader, struct kvbm_order *o)
{
    o->ended = true;
    o->done.n_late = o->n_pending;
    o->done.run_ns = kv_now_ns() - o->begin_ns;
    for (uint32_t i = 0; i < leader->n_ranks; i++) {
        if (o->answers[i].call)
            note_failure(o, i, -ETIMEDOUT);
    }
    if (o->n_pending)
        memset(o->all_ok, 0, n_bytes(o));
    for (uint32_t i = 0; i < o->done.n; i++)
        o->done.n_ok += o->all_ok[i / 8] >> i % 8 & 1;
    if (o->done.status == 0 && o->done.n_ok < o->done.n) { /* a worker that contradicts itself */
        o->done.status = -EPROTO;
        o->done.rank = 0;
    }
    if (o->ok)
        memcpy(o->ok, o->all_ok, n_bytes(o));
    o->ok = NULL;
    pthread_cond_broadcast(&leader->changed);
}

/* ---- the leader's thread ---- */

/* Call back, without the lock. The order stays: it isn't taken yet. */
static void tell(struct kvbm_leader *leader, struct kvbm_order *o)
{
    const struct kvbm_group_done done = o->done;
    kvbm_group_done_fn fn = o->fn;
    void *arg = o->arg;

    pthread_mutex_unlock(&leader->lock);
    fn(arg, &done);
    pthread_mutex_lock(&leader->lock);
    o->taken = true;
}

/*
 * End one transfer that can be. Returns true when one was, and the list may be another now;
 * *@next_ns becomes the earliest deadline of the others.
 */
static bool end_one(struct kvbm_leader *leader, uint64_t *next_ns)
{
    struct kvbm_order *o = NULL;

    *next_ns = UINT64_MAX;
    LIST_FOREACH(o, &leader->orders, list)
    {
        bool late = o->deadline_ns && kv_now_ns() >= o->deadline_ns;

        take_answers(leader, o);
        if (!o->ended && (o->n_pending == 0 || late)) {
            finish(leader, o);
            if (o->fn)
                tell(leader, o);
            let_go(leader, o);
            return true;
        }
        if (o->ended && o->taken && o->n_pending == 0) {
            let_go(leader, o);
            return true;
        }
        if (!o->ended && o->deadline_ns)
            *next_ns = KV_MIN(*next_ns, o->deadline_ns);
    }
    return false;
}

/* Milliseconds until @at, for poll: rounded up, at most a minute. */
static int ms_until(uint64_t at_ns)
{
    uint64_t now = kv_now_ns();

    if (at_ns <= now)
        return 0;
    return (int)KV_MIN((at_ns - now + KV_NS_PER_MS - 1) / KV_NS_PER_MS, UINT64_C(60000));
}

void *kvbm_leader_run(void *arg)
{
    struct kvbm_leader *leader = arg;
    uint64_t next_ns;

    pthread_mutex_lock(&leader->lock);
    while (!leader->stop) {
        struct pollfd polled = {.fd = leader->wake.fd, .events = POLLIN};

        kv_wake_clear(&leader->wake);
        while (end_one(leader, &next_ns))
            ;
        pthread_mutex_unlock(&leader->lock);
        (void)poll(&polled, 1, ms_until(next_ns));
        pthread_mutex_lock(&leader->lock);
    }
    pthread_mutex_unlock(&leader->lock);
    return NULL;
}

/* ---- callers ---- */

/* With a session's lock held. */
static void answer_ended(void *arg)
{
    struct kvbm_answer *a = arg;
    struct kv_wake *wake = a->wake; /* the order may be freed once `ended` is seen */

    atomic_store(&a->ended, true);
    kv_wake_signal(wake);
}

static bool blocks_exist(const struct kvbm_leader *leader, uint32_t place, const uint32_t *blocks,
                         uint32_t n)
{
    const struct kvbm_place_facts *facts = kvbm_leader_place(leader, place);

    for (uint32_t i = 0; facts && i < n; i++) {
        if (blocks[i] >= facts->n_blocks)
            return false;
    }
    return facts;
}

static struct kvbm_order *order_create(const struct kvbm_leader *leader,
                                       const struct kvbm_group_transfer *t)
{
    struct kvbm_order *o = calloc(1, sizeof(*o) + leader->n_ranks * sizeof(o->answers[0]));

    if (!o)
        return NULL;
    o->done = (struct kvbm_group_done){.tag = t->tag, .rank = UINT32_MAX, .n = t->n};
    o->begin_ns = kv_now_ns();
    o->deadline_ns = t->deadline_ns;
    o->ok = t->ok;
    o->fn = t->done;
    o->arg = t->arg;
    o->all_ok = malloc(n_bytes(o));
    if (!o->all_ok) {
        order_free(o);
        return NULL;
    }
    memset(o->all_ok, 0xff, n_bytes(o));
    if (t->n % 8)
        o->all_ok[n_bytes(o) - 1] = (uint8_t)((1u << t->n % 8) - 1);
    return o;
}

/* Time that is left for the workers, as they are told it. */
static uint32_t time_left(const struct kvbm_order *o)
{
    uint64_t ms = (uint64_t)kv_ms_until(o->deadline_ns, kv_now_ns());

    return o->deadline_ns ? (uint32_t)KV_MIN(KV_MAX(ms, UINT64_C(1)), (uint64_t)UINT32_MAX) : 0;
}

/* Ask all ranks. One that can't be asked has failed; the others have the transfer. */
static void hand_out(struct kvbm_leader *leader, struct kvbm_order *o, const struct kv_buf *body)
{
    for (uint32_t i = 0; i < leader->n_ranks; i++) {
        struct kvbm_answer *a = &o->answers[i];
        int err = kvbm_call_start(leader->ranks[i].session, KVBM_GROUP_TRANSFER, body->data,
                                  body->len, -1, NULL, 0, &a->call);

        if (err < 0) {
            merge(o, i, err, NULL);
            continue;
        }
        a->wake = &leader->wake;
        o->n_pending++;
        kvbm_call_watch(a->call, answer_ended, a);
    }
}

static int check(struct kvbm_leader *leader, const struct kvbm_group_transfer *t)
{
    if (leader->started && (!blocks_exist(leader, t->from, t->src_blocks, t->n) ||
                            !blocks_exist(leader, t->to, t->dst_blocks, t->n)))
        return -EINVAL;
    if (!leader->started || kvbm_leader_lacks(leader) < leader->n_ranks)
        return -ENOTCONN;
    return leader->n_orders < leader->max_transfers ? 0 : -EAGAIN;
}

/* Hand a transfer out, with the lock held. */
static int64_t submit(struct kvbm_leader *leader, const struct kvbm_group_transfer *t)
{
    struct kv_buf body = KV_BUF_INIT;
    struct kvbm_order *o = NULL;
    int64_t id = check(leader, t);

    if (id < 0)
        return id;
    o = order_create(leader, t);
    if (!o)
        return -ENOMEM;
    id = (int64_t)(o->done.id = ++leader->next_id);
    kvbm_order_write(&body, o->done.id, time_left(o), t);
    if (body.error) {
        id = body.error;
        order_free(o);
    } else {
        hand_out(leader, o, &body);
        LIST_INSERT_HEAD(&leader->orders, o, list);
        leader->n_orders++;
    }
    kv_buf_fini(&body);
    return id;
}

/* Convert the caller's struct to this build's: fields that an older caller lacks are zero. */
static int read_transfer(const struct kvbm_group_transfer *from, struct kvbm_group_transfer *ret)
{
    *ret = (struct kvbm_group_transfer){0};
    if (!kv_sized(from, "kvbm_group_transfer") ||
        from->size < offsetof(struct kvbm_group_transfer, first_layer))
        return -EINVAL;
    memcpy(ret, from, KV_MIN(from->size, sizeof(*ret)));
    if (!ret->src_blocks || !ret->dst_blocks || ret->n == 0 || ret->n > KVBM_MAX_GROUP_BLOCKS ||
        (unsigned)ret->flow > KVBM_ONBOARD || kvbm_deadline_check(ret->deadline_ns) < 0)
        return -EINVAL;
    return kvbm_ids_check(ret->dst_blocks, ret->n, UINT64_MAX, KVBM_IDS_ONCE | KVBM_IDS_GAPS);
}

int64_t kvbm_leader_submit(struct kvbm_leader *leader, const struct kvbm_group_transfer *transfer)
{
    struct kvbm_group_transfer t;
    int64_t id = leader ? read_transfer(transfer, &t) : -EINVAL;

    if (id < 0)
        return id;
    pthread_mutex_lock(&leader->lock);
    id = submit(leader, &t);
    pthread_mutex_unlock(&leader->lock);
    if (id > 0)
        kv_wake_signal(&leader->wake); /* it may have ended already, or have the next deadline */
    return id;
}

int kvbm_leader_cancel(struct kvbm_leader *leader, uint64_t id)
{
    struct kvbm_order *o = NULL;
    uint8_t number[8];

    if (!leader)
        return -EINVAL;
    kv_put_le64(number, id);
    pthread_mutex_lock(&leader->lock);
    o = find(leader, id);
    for (uint32_t i = 0; o && i < leader->n_ranks; i++) {
        if (o->answers[i].call && leader->ranks[i].session)
            (void)kvbm_session_note(leader->ranks[i].session, KVBM_GROUP_CANCEL, number,
                                    sizeof(number));
    }
    pthread_mutex_unlock(&leader->lock);
    return o ? 0 : -ENOENT;
}

int kvbm_leader_wait(struct kvbm_leader *leader, uint64_t id, uint64_t timeout_ms,
                     struct kvbm_group_done *ret)
{
    uint64_t end = kv_ns_after(kv_now_ns(), timeout_ms);
    struct kvbm_order *o = NULL;
    int err = 0;

    if (!leader)
        return -EINVAL;
    pthread_mutex_lock(&leader->lock);
    while ((o = find(leader, id)) && !o->fn && !o->ended && err == 0)
        err = kv_cond_wait_until(&leader->changed, &leader->lock, end);
    if (!o || o->fn || o->taken) {
        err = -ENOENT;
    } else if (o->ended) {
        err = 0;
        if (ret)
            *ret = o->done;
        o->taken = true;
        let_go(leader, o);
    }
    pthread_mutex_unlock(&leader->lock);
    return err;
}

int kvbm_leader_over(struct kvbm_leader *leader, uint64_t id, uint64_t timeout_ms)
{
    uint64_t end = kv_ns_after(kv_now_ns(), timeout_ms);
    const struct kvbm_order *o;
    int err = 0;

    if (!leader)
        return -EINVAL;
    pthread_mutex_lock(&leader->lock);
    while ((o = find(leader, id)) && !is_over(o) && err == 0)
        err = kv_cond_wait_until(&leader->changed, &leader->lock, end);
    if (!o || is_over(o))
        err = 0;
    pthread_mutex_unlock(&leader->lock);
    return err;
}
