// SPDX-License-Identifier: Apache-2.0
/* The ranks of a group: who has joined, and what they have in common. */
#include <stdio.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "tier/group/leader.h"

#define DEFAULT_TRANSFERS 64
#define MAX_TRANSFERS 4096

/* ---- with the lock held ---- */

static bool is_there(const struct kvbm_rank *rank)
{
    return rank->session && kvbm_session_is_open(rank->session);
}

uint32_t kvbm_leader_lacks(struct kvbm_leader *leader)
{
    uint32_t i = 0;

    while (i < leader->n_ranks && is_there(&leader->ranks[i]) && !leader->ranks[i].request)
        i++;
    return i;
}

const struct kvbm_place_facts *kvbm_leader_place(const struct kvbm_leader *leader, uint32_t id)
{
    for (uint32_t i = 0; i < leader->common.n_places; i++) {
        if (leader->common.places[i].id == id)
            return &leader->common.places[i];
    }
    return NULL;
}

static const struct kvbm_place_facts *place_of(const struct kvbm_joining *joining, uint32_t id)
{
    for (uint32_t i = 0; i < joining->n_places; i++) {
        if (joining->places[i].id == id)
            return &joining->places[i];
    }
    return NULL;
}

/* Compare a newcomer's places with the group's. */
static int compare_places(const struct kvbm_leader *leader, const struct kvbm_joining *joining,
                          char why[KVBM_MAX_WHY])
{
    const struct kvbm_joining *group = &leader->common;

    if (group->n_places && joining->n_places != group->n_places) {
        snprintf(why, KVBM_MAX_WHY, "the group's ranks have %u places, not %u", group->n_places,
                 joining->n_places);
        return -EMEDIUMTYPE;
    }
    for (uint32_t i = 0; i < group->n_places; i++) {
        const struct kvbm_place_facts *ours = &group->places[i], *its = place_of(joining, ours->id);

        if (!its) {
            snprintf(why, KVBM_MAX_WHY, "place %u is missing", ours->id);
            return -EMEDIUMTYPE;
        }
        if (its->n_layers != ours->n_layers || its->outer != ours->outer ||
            its->page_size != ours->page_size) {
            snprintf(why, KVBM_MAX_WHY,
                     "blocks of place %u have %u layers of %u parts and %u tokens here, "
                     "the group's %u of %u and %u",
                     ours->id, its->n_layers, its->outer, its->page_size, ours->n_layers,
                     ours->outer, ours->page_size);
            return -EMEDIUMTYPE;
        }
        if (leader->started && its->n_blocks < ours->n_blocks) {
            snprintf(why, KVBM_MAX_WHY, "place %u has %u blocks here, the running group %u",
                     ours->id, its->n_blocks, ours->n_blocks);
            return -EMEDIUMTYPE;
        }
    }
    return 0;
}

/* Tell whether a newcomer fits. */
static int admit(const struct kvbm_leader *leader, const struct kvbm_joining *joining,
                 char why[KVBM_MAX_WHY])
{
    if (joining->n_ranks != leader->n_ranks) {
        snprintf(why, KVBM_MAX_WHY, "the leader has %u ranks, the worker %u", leader->n_ranks,
                 joining->n_ranks);
        return -EINVAL;
    }
    if (is_there(&leader->ranks[joining->rank])) {
        snprintf(why, KVBM_MAX_WHY, "agent %s has rank %u",
                 kvbm_session_peer(leader->ranks[joining->rank].session)->name, joining->rank);
        return -EEXIST;
    }
    return compare_places(leader, joining, why);
}

static void clear_rank(struct kvbm_rank *rank)
{
    kvbm_session_put(rank->session);
    *rank = (struct kvbm_rank){0};
}

/* The group's places are those that its living ranks have in common, until it has started. */
static void find_common(struct kvbm_leader *leader)
{
    leader->common.n_places = 0;
    for (uint32_t r = 0; r < leader->n_ranks; r++) {
        const struct kvbm_joining *told = &leader->ranks[r].told;

        if (!is_there(&leader->ranks[r]))
            continue;
        if (leader->common.n_places == 0)
            leader->common = *told;
        for (uint32_t i = 0; i < leader->common.n_places; i++) {
            struct kvbm_place_facts *ours = &leader->common.places[i];
            const struct kvbm_place_facts *its = place_of(told, ours->id);

            if (its)
                ours->n_blocks = KV_MIN(ours->n_blocks, its->n_blocks);
        }
    }
}

/* Answer a rank's join: the group is there. */
static void welcome(struct kvbm_leader *leader, struct kvbm_rank *rank)
{
    uint32_t n_blocks[KVBM_MAX_PLACES];
    struct kv_buf body = KV_BUF_INIT;
    int err;

    for (uint32_t i = 0; i < rank->told.n_places; i++)
        n_blocks[i] = kvbm_leader_place(leader, rank->told.places[i].id)->n_blocks;
    kvbm_joined_write(&body, n_blocks, rank->told.n_places);
    err = kvbm_session_reply(rank->session, rank->request, body.error, body.data, body.len, -1);
    if (err == 0)
        err = body.error;
    rank->request = 0;
    if (err < 0) /* it has given up, or has ended */
        clear_rank(rank);
    kv_buf_fini(&body);
}

/* Begin when all ranks are there. */
static void start_group(struct kvbm_leader *leader)
{
    for (uint32_t i = 0; i < leader->n_ranks; i++) {
        if (!is_there(&leader->ranks[i]))
            return;
    }
    leader->started = true;
    for (uint32_t i = 0; i < leader->n_ranks; i++) {
        if (leader->ranks[i].request)
            welcome(leader, &leader->ranks[i]);
    }
    pthread_cond_broadcast(&leader->changed);
}

/* Forget the rank of a session. Its join, if it waits, is answered @err. */
static void drop_session(struct kvbm_leader *leader, struct kvbm_session *session, int err)
{
    for (uint32_t i = 0; i < leader->n_ranks; i++) {
        struct kvbm_rank *rank = &leader->ranks[i];

        if (rank->session != session)
            continue;
        if (rank->request)
            (void)kvbm_session_reply(session, rank->request, err, NULL, 0, -1);
        clear_rank(rank);
    }
}

/* ---- requests, on the event thread ---- */

static void serve_join(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_leader *leader = arg;
    struct kvbm_joining joining;
    char why[KVBM_MAX_WHY] = "the request makes no sense";
    int err = kvbm_joining_read(request->body, request->len, &joining);

    if (!request->id)
        return;
    pthread_mutex_lock(&leader->lock);
    drop_session(leader, session, -ECANCELED); /* its earlier join was given up */
    if (err == 0 && !leader->started)
        find_common(leader); /* ranks may have gone */
    if (err == 0)
        err = admit(leader, &joining, why);
    if (err == 0) {
        struct kvbm_rank *rank = &leader->ranks[joining.rank];

        clear_rank(rank); /* of a session that has ended */
        *rank = (struct kvbm_rank){
            .session = kvbm_session_get(session), .request = request->id, .told = joining};
        if (!leader->started)
            find_common(leader);
        start_group(leader);
    }
    pthread_mutex_unlock(&leader->lock);
    if (err == 0)
        return;
    kv_log_warn("kvbm", "a worker was refused", "agent=%s why=\"%s\"",
                kvbm_session_peer(session)->name, why);
    (void)kvbm_session_reply(session, request->id, err, why, strlen(why), -1);
}

static void serve_leave(void *arg, struct kvbm_session *session, struct kvbm_request *request)
{
    struct kvbm_leader *leader = arg;

    if (request->id) {
        (void)kvbm_session_reply(session, request->id, -EPROTO, NULL, 0, -1);
        return;
    }
    pthread_mutex_lock(&leader->lock);
    drop_session(leader, session, -EPIPE);
    pthread_mutex_unlock(&leader->lock);
}

/* ---- the leader ---- */

static int serve(struct kvbm_leader *leader)
{
    int err = kvbm_agent_serve(leader->agent, KVBM_GROUP_JOIN, serve_join, leader);

    if (err < 0)
        return err;
    err = kvbm_agent_serve(leader->agent, KVBM_GROUP_LEAVE, serve_leave, leader);
    if (err < 0)
        (void)kvbm_agent_serve(leader->agent, KVBM_GROUP_JOIN, NULL, NULL);
    return err;
}

static void leader_free(struct kvbm_leader *leader)
{
    for (uint32_t i = 0; i < leader->n_ranks; i++)
        kvbm_session_put(leader->ranks[i].session);
    kvbm_leader_drop_results(leader);
    kv_wake_close(&leader->wake);
    pthread_cond_destroy(&leader->changed);
    pthread_mutex_destroy(&leader->lock);
    free(leader);
}

static void stop_thread(struct kvbm_leader *leader)
{
    pthread_mutex_lock(&leader->lock);
    leader->stop = true;
    pthread_mutex_unlock(&leader->lock);
    kv_wake_signal(&leader->wake);
    pthread_join(leader->thread, NULL);
}

int kvbm_leader_create(struct kvbm_agent *agent, const struct kvbm_leader_opts *opts,
                       struct kvbm_leader **ret)
{
    uint32_t max_transfers = KV_OPT(opts, max_transfers, DEFAULT_TRANSFERS);
    struct kvbm_leader *leader;
    int err;

    if (!agent || !ret || !kv_sized(opts, "kvbm_leader_opts") || KV_OPT(opts, n_ranks, 0) == 0 ||
        opts->n_ranks > KVBM_MAX_RANKS || max_transfers > MAX_TRANSFERS)
        return -EINVAL;
    leader = calloc(1, sizeof(*leader) + opts->n_ranks * sizeof(leader->ranks[0]));
    if (!leader)
        return -ENOMEM;
    leader->agent = agent;
    leader->n_ranks = opts->n_ranks;
    leader->max_transfers = max_transfers;
    LIST_INIT(&leader->orders);
    pthread_mutex_init(&leader->lock, NULL);
    kv_cond_init(&leader->changed);
    err = kv_wake_open(&leader->wake);
    if (err == 0)
        err = kv_thread_start(&leader->thread, "kvbm-leader", kvbm_leader_run, leader);
    if (err == 0) {
        err = serve(leader);
        if (err < 0)
            stop_thread(leader);
    }
    if (err < 0)
        leader_free(leader);
    else
        *ret = leader;
    return err;
}

int kvbm_leader_destroy(struct kvbm_leader *leader)
{
    bool busy;

    if (!leader)
        return 0;
    pthread_mutex_lock(&leader->lock);
    busy = !kvbm_leader_is_idle(leader);
    pthread_mutex_unlock(&leader->lock);
    if (busy)
        return -EBUSY;
    (void)kvbm_agent_serve(leader->agent, KVBM_GROUP_JOIN, NULL, NULL);
    (void)kvbm_agent_serve(leader->agent, KVBM_GROUP_LEAVE, NULL, NULL);
    stop_thread(leader);
    for (uint32_t i = 0; i < leader->n_ranks; i++) {
        const struct kvbm_rank *rank = &leader->ranks[i];

        if (rank->request) /* still waiting for the others */
            (void)kvbm_session_reply(rank->session, rank->request, -EPIPE, NULL, 0, -1);
    }
    leader_free(leader);
    return 0;
}

/* Write the ranks that aren't there. With the lock held. */
static void name_missing(const struct kvbm_leader *leader, char *why, size_t size)
{
    size_t len = (size_t)snprintf(why, size, "of %u ranks these are missing:", leader->n_ranks);

    for (uint32_t i = 0; i < leader->n_ranks && len < size; i++) {
        if (!is_there(&leader->ranks[i]))
            len += (size_t)snprintf(why + len, size - len, " %u", i);
    }
}

int kvbm_leader_ready(struct kvbm_leader *leader, uint64_t timeout_ms, char *why, size_t why_size)
{
    uint64_t end = kv_ns_after(kv_now_ns(), timeout_ms);
    int err = 0;

    if (!leader)
        return -EINVAL;
    pthread_mutex_lock(&leader->lock);
    while (kvbm_leader_lacks(leader) < leader->n_ranks && err == 0)
        err = kv_cond_wait_until(&leader->changed, &leader->lock, end);
    if (kvbm_leader_lacks(leader) == leader->n_ranks)
        err = 0;
    else if (why && why_size)
        name_missing(leader, why, why_size);
    pthread_mutex_unlock(&leader->lock);
    return err;
}

int64_t kvbm_leader_blocks(struct kvbm_leader *leader, uint32_t id)
{
    const struct kvbm_place_facts *place;
    int64_t n;

    if (!leader)
        return -EINVAL;
    pthread_mutex_lock(&leader->lock);
    place = kvbm_leader_place(leader, id);
    n = !leader->started ? -ENOTCONN : place ? (int64_t)place->n_blocks : -ENOENT;
    pthread_mutex_unlock(&leader->lock);
    return n;
}
