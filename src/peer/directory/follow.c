// SPDX-License-Identifier: Apache-2.0
/*
 * Followers: the directory's thread notes who is there. The follower's thread finds the entries that
 * need a session, openers open it, several at a time and in turn: a few peers that don't answer delay
 * no other, and many leave each its turn.
 *
 *   due ──► opener takes it: busy ──► session, or a pause until try_ns
 *
 * Only the follower's thread takes entries out of the list, and none that is busy. Openers are
 * started when all others are at work.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "peer/directory/directory.h"
#include "peer/lease/ask.h"
#include "peer/session/net.h"

#define LOOK_NS (250 * KV_NS_PER_MS) /* how often sessions are looked at */
#define FIRST_PAUSE_NS (50 * KV_NS_PER_MS)
#define MAX_OPENERS 8
#define LONG_PAUSE 8 /* times retry_ms: peers that don't answer, or don't fit */

struct followed {
    struct followed *next;
    struct kvbm_directory_peer peer;
    bool renewed;                 /* the directory has told of it since the last attempt began */
    struct kvbm_session *session; /* the follower's; NULL: none */
    uint64_t try_ns, pause_ns;
    bool left; /* the directory names it no longer */
    bool self;
    bool due, busy; /* for an opener; an opener has it */
};

struct kvbm_follower {
    struct kvbm_agent *agent;
    struct kvbm_directory *directory;
    kvbm_directory_fn changed;
    void *arg;
    uint64_t open_ms, retry_ns;
    uint32_t n_data;
    pthread_t thread;

    pthread_mutex_t lock;      /* all below */
    pthread_cond_t news, work; /* of the thread; of the openers */
    pthread_t openers[MAX_OPENERS];
    uint32_t n_openers, n_idle;
    struct followed *peers;
    bool stopping;
    uint64_t opened, failed;
};

/* ---- the directory's thread ---- */

static bool same_peer(const struct kvbm_directory_peer *a, const struct kvbm_directory_peer *b)
{
    if (a->name[0] || b->name[0])
        return strcmp(a->name, b->name) == 0 && a->worker == b->worker &&
               a->incarnation == b->incarnation;
    return strcmp(a->endpoints[0], b->endpoints[0]) == 0;
}

static void add(struct kvbm_follower *f, const struct kvbm_directory_peer *peer)
{
    struct followed *one = calloc(1, sizeof(*one));

    if (!one)
        return; /* the log of the directory counts it; the next change may bring it */
    memcpy(&one->peer, peer, KV_MIN(peer->size, sizeof(one->peer)));
    one->next = f->peers;
    f->peers = one;
}

static void changed(void *arg, const struct kvbm_directory_peer *peer, bool there)
{
    struct kvbm_follower *f = arg;
    struct followed *one;

    pthread_mutex_lock(&f->lock);
    one = f->peers;
    while (one && (one->left || !same_peer(&one->peer, peer)))
        one = one->next;
    if (!there && one) {
        one->left = true;
    } else if (there && one) {
        memcpy(&one->peer, peer, KV_MIN(peer->size, sizeof(one->peer)));
        one->try_ns = 0;
        one->renewed = true;
    } else if (there) {
        add(f, peer);
    }
    pthread_cond_broadcast(&f->news);
    pthread_mutex_unlock(&f->lock);
    if (f->changed)
        f->changed(f->arg, peer, there);
}

/* ---- sessions ---- */

/* Tell whether a session is with the agent that the directory names. */
static bool is_named(const struct kvbm_session *session, const struct kvbm_directory_peer *peer)
{
    const struct kvbm_identity *who = kvbm_session_peer(session);

    return !peer->name[0] || (strcmp(who->name, peer->name) == 0 && who->worker == peer->worker);
}

static int open_at(const struct kvbm_follower *f, const struct kvbm_directory_peer *peer,
                   const char *endpoint, struct kvbm_session **ret)
{
    const struct kvbm_session_opts opts = {
        .size = sizeof(opts), .timeout_ms = f->open_ms, .n_data = f->n_data};
    int err = kvbm_session_open(f->agent, endpoint, &opts, ret);

    if (err < 0 || is_named(*ret, peer))
        return err;
    (void)kvbm_session_close(KV_STEAL(*ret)); /* another machine's path, or a reused port */
    return -EEXIST;
}

static bool is_stopping(struct kvbm_follower *f)
{
    bool stopping;

    pthread_mutex_lock(&f->lock);
    stopping = f->stopping;
    pthread_mutex_unlock(&f->lock);
    return stopping;
}

/* True for an endpoint of the agent itself: a list of all agents is the same on each node. */
static bool is_own(const struct kvbm_agent *agent, const char *endpoint)
{
    char own[KVBM_MAX_PEER_ENDPOINT + 1];

    for (uint32_t i = 0;; i++) {
        long rc = kvbm_agent_endpoint(agent, i, own, sizeof(own), NULL);

        if (rc == -ENOENT)
            return false;
        if (rc > 0 && strcmp(own, endpoint) == 0)
            return true;
    }
}

/* Open a session with a peer: by shared memory's way (unix:) if there is one, else by tcp:. */
static int open_peer(struct kvbm_follower *f, const struct kvbm_directory_peer *peer,
                     struct kvbm_session **ret)
{
    int err = -ENOENT;

    for (int tcp = 0; tcp < 2; tcp++) {
        for (uint32_t i = 0; i < peer->n_endpoints; i++) {
            if ((strncmp(peer->endpoints[i], "unix:", 5) != 0) != tcp)
                continue;
            if (is_stopping(f))
                return -ECANCELED;
            err = is_own(f->agent, peer->endpoints[i]) ? -ELOOP
                                                       : open_at(f, peer, peer->endpoints[i], ret);
            if (err == -ELOOP && peer->name[0] && strcmp(peer->name, f->agent->name) != 0)
                err = -EEXIST; /* another machine's path, which this agent has on its own */
            if (err == 0 || err == -ELOOP)
                return err;
        }
    }
    return err;
}

/* Note the result of an attempt, with the lock held. */
static void note_attempt(struct kvbm_follower *f, struct followed *one, int err)
{
    bool deaf =
        err == -ETIMEDOUT || err == -EMEDIUMTYPE || err == -EPROTONOSUPPORT || err == -EACCES;
    uint64_t most = deaf ? LONG_PAUSE * f->retry_ns : f->retry_ns;

    one->self = err == -ELOOP;
    if (err == 0) {
        one->pause_ns = 0;
        f->opened++;
        return;
    }
    f->failed += !one->self;
    one->pause_ns = deaf ? most : KV_MIN(KV_MAX(2 * one->pause_ns, FIRST_PAUSE_NS), most);
    one->try_ns = one->renewed ? 0 : kv_now_ns() + one->pause_ns;
}

/* Close a session whose handle the list doesn't have any more. Called and returns with the lock. */
static void close_session(struct kvbm_follower *f, struct kvbm_session *session)
{
    if (!session)
        return;
    pthread_mutex_unlock(&f->lock);
    (void)kvbm_session_close(session);
    pthread_mutex_lock(&f->lock);
}

/* Open a session with a peer, or close one that has ended. Called and returns with the lock. */
static void look_at(struct kvbm_follower *f, struct followed *one)
{
    struct kvbm_directory_peer peer;
    struct kvbm_session *session = NULL;
    int err;

    if (one->session && !kvbm_session_is_open(one->session))
        close_session(f, KV_STEAL(one->session));
    if (one->session || one->self || kv_now_ns() < one->try_ns)
        return;
    peer = one->peer;
    one->renewed = false;
    pthread_mutex_unlock(&f->lock);
    err = open_peer(f, &peer, &session);
    pthread_mutex_lock(&f->lock);
    one->session = session;
    note_attempt(f, one, err);
}

/* ---- openers ---- */

/* Take the entry that has been due for longest, so that each has its turn. NULL: there is none. */
static struct followed *take_due(struct kvbm_follower *f)
{
    struct followed *first = NULL;

    for (struct followed *one = f->peers; one; one = one->next) {
        if (one->due && !one->busy && (!first || one->try_ns < first->try_ns))
            first = one;
    }
    if (!first)
        return NULL;
    first->due = false;
    first->busy = true;
    return first;
}

static void *open_sessions(void *arg)
{
    struct kvbm_follower *f = arg;

    pthread_mutex_lock(&f->lock);
    while (!f->stopping) {
        struct followed *one = take_due(f);

        if (!one) {
            f->n_idle++;
            pthread_cond_wait(&f->work, &f->lock);
            f->n_idle--;
            continue;
        }
        look_at(f, one);
        one->busy = false;
        pthread_cond_signal(&f->news);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

/* Start an opener. Without a thread, those at work take the entry later. */
static int add_opener(struct kvbm_follower *f)
{
    int err = kv_thread_start(&f->openers[f->n_openers], "kvbm-open", open_sessions, f);

    f->n_openers += err == 0;
    return err;
}

static bool needs_opener(const struct followed *one, uint64_t now)
{
    if (one->busy || one->left)
        return false;
    return one->session ? !kvbm_session_is_open(one->session) : !one->self && now >= one->try_ns;
}

/* Leave what is due to openers. Returns when the next entry is due. */
static uint64_t hand_out(struct kvbm_follower *f)
{
    uint64_t now = kv_now_ns(), next = now + LOOK_NS;
    uint32_t n_due = 0;

    for (struct followed *one = f->peers; one; one = one->next) {
        one->due = needs_opener(one, now);
        n_due += one->due;
        if (!one->busy && !one->due && !one->session && !one->self)
            next = KV_MIN(next, one->try_ns);
    }
    for (uint32_t n = f->n_idle; n < n_due && f->n_openers < MAX_OPENERS && add_opener(f) == 0; n++)
        ;
    if (n_due)
        pthread_cond_broadcast(&f->work);
    return next;
}

/* ---- the thread ---- */

/* Take entries out of the list that have left, or all. Called and returns with the lock. */
static void take_out(struct kvbm_follower *f, bool all)
{
    struct followed **at = &f->peers;

    while (*at) {
        struct followed *one = *at;

        if ((!one->left && !all) || one->busy) {
            at = &one->next;
            continue;
        }
        *at = one->next;
        close_session(f, one->session);
        free(one);
        at = &f->peers; /* the directory may have added some */
    }
}

static void *follow(void *arg)
{
    struct kvbm_follower *f = arg;

    pthread_mutex_lock(&f->lock);
    while (!f->stopping) {
        uint64_t next;

        take_out(f, false);
        next = hand_out(f);
        if (!f->stopping && !f->peers)
            pthread_cond_wait(&f->news, &f->lock);
        else if (!f->stopping)
            (void)kv_cond_wait_until(&f->news, &f->lock, next);
    }
    pthread_mutex_unlock(&f->lock);
    return NULL;
}

/* ---- who is where ---- */

static bool names(const struct kvbm_directory_peer *peer, const char *endpoint)
{
    for (uint32_t i = 0; i < peer->n_endpoints; i++) {
        if (strcmp(peer->endpoints[i], endpoint) == 0)
            return true;
    }
    return false;
}

uint64_t kvbm_follower_worker_at(struct kvbm_follower *f, const char *endpoint)
{
    uint64_t worker = 0;

    if (!f)
        return 0;
    pthread_mutex_lock(&f->lock);
    for (const struct followed *one = f->peers; one && !worker; one = one->next) {
        if (one->session && names(&one->peer, endpoint))
            worker = kvbm_session_peer(one->session)->worker;
    }
    pthread_mutex_unlock(&f->lock);
    return worker;
}

/* ---- public ---- */

static void follower_free(struct kvbm_follower *f)
{
    pthread_mutex_destroy(&f->lock);
    pthread_cond_destroy(&f->news);
    pthread_cond_destroy(&f->work);
    free(f);
}

static void stop(struct kvbm_follower *f)
{
    pthread_mutex_lock(&f->lock);
    f->stopping = true;
    pthread_cond_broadcast(&f->news);
    pthread_cond_broadcast(&f->work);
    pthread_mutex_unlock(&f->lock);
    pthread_join(f->thread, NULL); /* first: it starts openers */
    for (uint32_t i = 0; i < f->n_openers; i++)
        pthread_join(f->openers[i], NULL);
    pthread_mutex_lock(&f->lock);
    take_out(f, true);
    pthread_mutex_unlock(&f->lock);
}

/* Open the directory once the thread is there. */
static int open_directory(struct kvbm_follower *f, const struct kvbm_directory_opts *opts)
{
    struct kvbm_directory_opts own = KVBM_DIRECTORY_OPTS_INIT;

    memcpy(&own, opts, KV_MIN(opts->size, sizeof(own)));
    own.size = sizeof(own);
    f->changed = own.changed;
    f->arg = own.arg;
    own.changed = changed;
    own.arg = f;
    return kvbm_directory_open(&own, &f->directory);
}

int kvbm_agent_follow(struct kvbm_agent *agent, const struct kvbm_follow_opts *opts,
                      struct kvbm_follower **ret)
{
    const struct kvbm_directory_opts *directory;
    struct kvbm_follower *f;
    int err;

    if (!agent || !ret || !kv_sized(opts, "kvbm_follow_opts"))
        return -EINVAL;
    directory = KV_OPT(opts, directory, NULL);
    if (!directory || !kv_sized(directory, "kvbm_directory_opts") ||
        KV_OPT(opts, n_data, 0) > KVBM_MAX_DATA)
        return -EINVAL;
    f = calloc(1, sizeof(*f));
    if (!f)
        return -ENOMEM;
    f->agent = agent;
    f->open_ms = KV_OPT(opts, open_ms, 1000);
    f->retry_ns = KV_OPT(opts, retry_ms, 2000) * KV_NS_PER_MS;
    f->n_data = KV_OPT(opts, n_data, 0);
    pthread_mutex_init(&f->lock, NULL);
    kv_cond_init(&f->news);
    kv_cond_init(&f->work);
    err = kv_thread_start(&f->thread, "kvbm-follow", follow, f);
    if (err < 0) {
        follower_free(f);
        return err;
    }
    err = open_directory(f, directory);
    if (err < 0) {
        stop(f);
        follower_free(f);
        return err;
    }
    *ret = f;
    return 0;
}

int kvbm_follower_close(struct kvbm_follower *f)
{
    if (!f)
        return 0;
    if (kvbm_on_event_thread(f->agent->net) || directory_is_own_thread(f->directory))
        return -EDEADLK;
    kvbm_directory_close(f->directory);
    stop(f);
    follower_free(f);
    return 0;
}

int kvbm_follower_get_info(struct kvbm_follower *f, struct kvbm_follower_info *ret)
{
    struct kvbm_follower_info info = KVBM_FOLLOWER_INFO_INIT;

    if (!f || !kv_sized(ret, "kvbm_follower_info"))
        return -EINVAL;
    pthread_mutex_lock(&f->lock);
    for (struct followed *one = f->peers; one; one = one->next) {
        info.n_peers += !one->self && !one->left;
        info.n_open += one->session && kvbm_session_is_open(one->session);
    }
    info.opened = f->opened;
    info.failed = f->failed;
    pthread_mutex_unlock(&f->lock);
    KV_GIVE(ret, &info);
    return 0;
}
