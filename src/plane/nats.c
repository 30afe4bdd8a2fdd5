// SPDX-License-Identifier: Apache-2.0
#include "plane/nats.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "plane/nats_abi.h"
#include "plane/nats_opts.h"

#define LOG "nats"
#define PENDING_BYTES ((size_t)64 << 20)

struct message {
    STAILQ_ENTRY(message) list;
    uint64_t number; /* of its place in the queue since the start */
    size_t bytes;
    struct kvp_nats_msg msg; /* points behind this struct */
};
STAILQ_HEAD(messages, message);

struct kvp_nats_sub {
    LIST_ENTRY(kvp_nats_sub) list;
    struct kvp_nats *nats;
    char *subject;
    char *stream, *durable; /* NULL: plain NATS */
    size_t pending_bytes;
    kvp_nats_fn fn;
    void *arg;
    _Atomic uint64_t received;
    struct kvp_link_sub *link; /* NULL: not subscribed on the connection of now */
    bool ending, ended;
};
LIST_HEAD(subs, kvp_nats_sub);

struct kvp_nats {
    const struct kvp_nats_abi *abi;
    struct kvp_nats_opts opts; /* with copies of the strings */
    kvp_nats_state_fn state;
    void *arg;
    pthread_t thread;
    struct kvp_link *link; /* the thread's */
    uint64_t retry_ns;     /* earliest time of the next attempt to connect; the thread's */
    uint64_t pause_ns;     /* no message is published before; 0: none failed; the thread's */
    uint64_t again_ns;     /* when to subscribe once more; 0: nothing failed; the thread's */

    pthread_mutex_t lock;
    pthread_cond_t work;  /* signals the thread */
    pthread_cond_t ended; /* a subscription has ended, a flush is over */
    struct messages queue;
    uint64_t queued; /* number of the newest message */
    uint64_t flush,
        flushed;       /* number that somebody waits for, and up to which the server has all */
    uint64_t flush_ns; /* nobody waits for it any longer */
    struct subs subs;
    bool subs_changed;
    bool up, closed; /* as the link told */
    uint64_t told;   /* number of calls of its hook */
    bool moved;      /* another server may be connected */
    bool stop;
    struct kvp_nats_stats stats; /* received and missed: of subscriptions that are gone */
};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct kvp_nats_abi *loaded; /* written once, before pthread_once returns */

static void load(void)
{
    static const struct kv_module module = {
        .component = LOG,
        .library = KVP_NATS_LIBRARY,
        .variable = "KV_NATS_LIBRARY",
        .symbol = KVP_NATS_SYMBOL,
        .missing = "NATS needs " KVP_NATS_LIBRARY,
        .head = {sizeof(*loaded), KVP_NATS_ABI},
    };

    loaded = (const struct kvp_nats_abi *)kv_module_open(&module);
}

const struct kvp_nats_abi *kvp_nats_load(void)
{
    pthread_once(&once, load);
    return loaded;
}

/* ---- what the link tells ---- */

static void tell_error(void *arg, const char *text)
{
    static struct kv_log_rate rate;
    struct kvp_nats *nats = arg;
    char quoted[400], name[200];
    bool news;

    pthread_mutex_lock(&nats->lock);
    news = strncmp(nats->stats.error, text, sizeof(nats->stats.error) - 1) != 0;
    snprintf(nats->stats.error, sizeof(nats->stats.error), "%s", text);
    pthread_mutex_unlock(&nats->lock);
    if (news && kv_log_allowed(&rate, 5))
        kv_log_warn(LOG, "NATS reports an error", "name=%s reason=%s",
                    kv_log_quote(name, sizeof(name), nats->opts.name),
                    kv_log_quote(quoted, sizeof(quoted), text));
}

static void on_state(void *arg, enum kvp_link_state state)
{
    struct kvp_nats *nats = arg;
    char name[200];
    bool changed;

    pthread_mutex_lock(&nats->lock);
    nats->told++;
    changed = nats->up != (state == KVP_LINK_UP) && !nats->stop;
    nats->up = nats->stats.connected = state == KVP_LINK_UP;
    nats->stats.connections += state == KVP_LINK_UP;
    nats->moved |= state == KVP_LINK_UP;
    if (state == KVP_LINK_CLOSED)
        nats->closed = true;
    pthread_cond_signal(&nats->work);
    pthread_mutex_unlock(&nats->lock);
    if (!changed)
        return;
    kv_log_quote(name, sizeof(name), nats->opts.name);
    if (state == KVP_LINK_UP)
        kv_log_info(LOG, "connected to NATS", "name=%s", name);
    else
        kv_log_warn(LOG, "the connection to NATS is gone", "name=%s", name);
    if (nats->state)
        nats->state(nats->arg, state == KVP_LINK_UP);
}

static void on_message(void *arg, const struct kvp_nats_msg *msg)
{
    struct kvp_nats_sub *sub = arg;

    atomic_fetch_add_explicit(&sub->received, 1, memory_order_relaxed); /* statistics only */
    sub->fn(sub->arg, msg);
}

/* ---- the thread ---- */

static void connect_once(struct kvp_nats *nats)
{
    struct kvp_link_hooks hooks = {.state = on_state, .error = tell_error, .arg = nats};
    uint64_t told;
    char why[160];
    bool news;
    int err;

    pthread_mutex_lock(&nats->lock);
    nats->closed = false;
    nats->subs_changed = true;
    told = nats->told;
    pthread_mutex_unlock(&nats->lock);
    err = nats->abi->open(&nats->opts, &hooks, &nats->link, why, sizeof(why));
    nats->retry_ns = kv_ns_after(kv_now_ns(), nats->opts.reconnect_ms);
    if (err < 0) {
        tell_error(nats, why);
        return;
    }
    pthread_mutex_lock(&nats->lock);
    news = nats->told == told; /* else it has broken meanwhile */
    pthread_mutex_unlock(&nats->lock);
    if (news)
        on_state(nats, KVP_LINK_UP);
}

static void end_link_subs(struct kvp_nats *nats)
{
    struct kvp_nats_sub *sub = NULL;

    LIST_FOREACH(sub, &nats->subs, list)
    {
        struct kvp_link_sub *link = sub->link;

        if (!link)
            continue;
        nats->stats.missed += nats->abi->missed(link);
        sub->link = NULL;
        pthread_mutex_unlock(&nats->lock);
        nats->abi->unsubscribe(link);
        pthread_mutex_lock(&nats->lock);
    }
}

/* Close the link, whose subscriptions go with it. Called without the lock. */
static void disconnect(struct kvp_nats *nats)
{
    if (!nats->link)
        return;
    pthread_mutex_lock(&nats->lock);
    end_link_subs(nats);
    pthread_mutex_unlock(&nats->lock);
    nats->abi->close(nats->link);
    nats->link = NULL;
}

static const char *explain_sub(int err)
{
    switch (err) {
    case -ENOMEM:
        return "no memory for a subscription";
    case -ENOENT:
        return "no such stream, or no JetStream";
    case -EBUSY:
        return "another subscriber has the durable consumer";
    case -ETIMEDOUT:
        return "JetStream doesn't answer";
    default:
        return "a subject can't be subscribed to";
    }
}

static int subscribe(struct kvp_nats *nats, struct kvp_nats_sub *sub, struct kvp_link_sub **ret)
{
    const struct kvp_nats_durable durable = {sub->stream, sub->durable};

    return nats->abi->subscribe(nats->link, sub->subject, sub->durable ? &durable : NULL,
                                sub->pending_bytes, on_message, sub, ret);
}

/* Bring one subscription to the state that is asked for. The lock is held, and released between. */
static void settle_sub(struct kvp_nats *nats, struct kvp_nats_sub *sub)
{
    struct kvp_link_sub *link = sub->link;
    bool ending = sub->ending;
    int err = 0;

    if (ending) {
        sub->link = NULL;
        nats->stats.missed += link ? nats->abi->missed(link) : 0;
    } else if (link || !nats->link) {
        return;
    }
    pthread_mutex_unlock(&nats->lock);
    if (!ending)
        err = subscribe(nats, sub, &link);
    else if (link)
        nats->abi->unsubscribe(link);
    if (err < 0)
        tell_error(nats, explain_sub(err));
    if (err < 0 && err != -EINVAL) /* the server may never be lost: it has to be tried again */
        nats->again_ns = kv_ns_after(kv_now_ns(), nats->opts.reconnect_ms);
    pthread_mutex_lock(&nats->lock);
    if (!ending) {
        sub->link = err < 0 ? NULL : link;
        return;
    }
    LIST_REMOVE(sub, list);
    nats->stats.received += atomic_load_explicit(&sub->received, memory_order_relaxed);
    sub->ended = true;
    pthread_cond_broadcast(&nats->ended);
}

/* The lock is held, and released between. */
static void settle_subs(struct kvp_nats *nats)
{
    struct kvp_nats_sub *sub = LIST_FIRST(&nats->subs), *next;

    nats->subs_changed = false;
    for (; sub; sub = next) {
        next = LIST_NEXT(sub, list); /* others add at the front only, and this thread removes */
        settle_sub(nats, sub);
    }
}

/* The oldest message has left the queue, or can't. The lock is held. */
static void leave_queue(struct kvp_nats *nats, struct message *message, bool published)
{
    STAILQ_REMOVE_HEAD(&nats->queue, list);
    nats->stats.queued_bytes -= message->bytes;
    if (published) {
        nats->stats.published++;
        nats->stats.published_bytes += message->msg.len;
    } else {
        nats->stats.refused++;
    }
}

static const char *explain(int err)
{
    switch (err) {
    case -EMSGSIZE:
        return "a message is larger than the server takes";
    case -EINVAL:
        return "a message has no valid subject";
    case -ENOENT:
        return "no JetStream stream has the subject";
    case -ETIMEDOUT:
        return "JetStream doesn't acknowledge a message";
    default:
        return strerror(
            -err); /* NOLINT(concurrency-mt-unsafe): glibc's is safe for known numbers */
    }
}

/* Publish the oldest message. The lock is held, and released between. */
static void publish_one(struct kvp_nats *nats)
{
    struct message *message = STAILQ_FIRST(&nats->queue);
    bool refused;
    int err;

    pthread_mutex_unlock(&nats->lock);
    err = nats->abi->publish(nats->link, &message->msg);
    refused = err == -EMSGSIZE || err == -EINVAL;
    if (err < 0 && err != -EAGAIN)
        tell_error(nats, explain(err));
    if (err < 0 && !refused)
        nats->pause_ns = kv_ns_after(kv_now_ns(), nats->opts.reconnect_ms);
    if (err == -EPIPE || err == -EIO)
        disconnect(nats);
    pthread_mutex_lock(&nats->lock);
    if (err < 0 && !refused)
        return;
    leave_queue(nats, message, !refused);
    pthread_mutex_unlock(&nats->lock);
    free(message);
    pthread_mutex_lock(&nats->lock);
}

/* Note who the server is. The lock is held, and released between. */
static void learn_server(struct kvp_nats *nats)
{
    char url[sizeof(nats->stats.url)];
    uint64_t max_payload;

    nats->moved = false;
    pthread_mutex_unlock(&nats->lock);
    max_payload = nats->abi->server(nats->link, url, sizeof(url));
    pthread_mutex_lock(&nats->lock);
    memcpy(nats->stats.url, url, sizeof(url));
    nats->stats.max_payload = max_payload;
}

/*
 * Let the server confirm what was published, for no longer than somebody waits. The lock is held, and
 * released between.
 */
static void flush_link(struct kvp_nats *nats)
{
    uint64_t up_to = nats->flush, now_ns = kv_now_ns();
    uint64_t left_ms = nats->flush_ns > now_ns ? (nats->flush_ns - now_ns) / KV_NS_PER_MS + 1 : 0;
    int err = -ETIMEDOUT;

    pthread_mutex_unlock(&nats->lock);
    if (left_ms)
        err = nats->abi->flush(nats->link, (uint32_t)KV_MIN(left_ms, nats->opts.timeout_ms));
    pthread_mutex_lock(&nats->lock);
    now_ns = kv_now_ns();
    if (err == 0) {
        nats->flushed = up_to;
        pthread_cond_broadcast(&nats->ended);
    } else if (now_ns >= nats->flush_ns) {
        nats->flush = nats->flushed;
    } else {
        nats->pause_ns = kv_ns_after(now_ns, nats->opts.reconnect_ms);
    }
}

/* Wait for work. The lock is held. @until_ns 0: for ever, or until subscriptions are tried again. */
static void wait_for_work(struct kvp_nats *nats, uint64_t until_ns)
{
    if (nats->again_ns)
        until_ns = until_ns ? KV_MIN(until_ns, nats->again_ns) : nats->again_ns;
    if (until_ns)
        (void)kv_cond_wait_until(&nats->work, &nats->lock, until_ns);
    else
        pthread_cond_wait(&nats->work, &nats->lock);
}

/* Do one thing, or wait for one. The lock is held, and released between. */
static void step(struct kvp_nats *nats)
{
    const struct message *first = STAILQ_FIRST(&nats->queue);
    bool lost = nats->link && nats->closed;
    bool ready = nats->link && nats->up && !lost && !nats->pause_ns;

    if (nats->subs_changed && !lost) {
        settle_subs(nats);
    } else if (lost || (!nats->link && nats->retry_ns <= kv_now_ns())) {
        pthread_mutex_unlock(&nats->lock);
        if (lost)
            disconnect(nats);
        else
            connect_once(nats);
        pthread_mutex_lock(&nats->lock);
    } else if (ready && nats->moved) {
        learn_server(nats);
    } else if (ready && nats->flush > nats->flushed && (!first || first->number > nats->flush)) {
        flush_link(nats);
    } else if (ready && first) {
        publish_one(nats);
    } else {
        wait_for_work(nats, nats->link ? nats->pause_ns : nats->retry_ns);
    }
}

/* End pauses that are over. The lock is held. */
static void end_pauses(struct kvp_nats *nats)
{
    uint64_t now_ns = nats->pause_ns || nats->again_ns ? kv_now_ns() : 0;

    if (nats->pause_ns && nats->pause_ns <= now_ns)
        nats->pause_ns = 0;
    if (nats->again_ns && nats->again_ns <= now_ns) {
        nats->again_ns = 0;
        nats->subs_changed = true;
    }
}

static void *run(void *arg)
{
    struct kvp_nats *nats = arg;

    pthread_mutex_lock(&nats->lock);
    while (!nats->stop) {
        end_pauses(nats);
        step(nats);
    }
    pthread_mutex_unlock(&nats->lock);
    disconnect(nats);
    return NULL;
}

/* ---- creation and destruction ---- */

static void nats_free(struct kvp_nats *nats)
{
    struct message *message;

    while ((message = STAILQ_FIRST(&nats->queue)) != NULL) {
        STAILQ_REMOVE_HEAD(&nats->queue, list);
        free(message);
    }
    kvp_nats_opts_fini(&nats->opts);
    pthread_cond_destroy(&nats->work);
    pthread_cond_destroy(&nats->ended);
    pthread_mutex_destroy(&nats->lock);
    free(nats);
}

int kvp_nats_open(const struct kvp_nats_opts *opts, kvp_nats_state_fn state, void *arg,
                  struct kvp_nats **ret)
{
    struct kvp_nats *nats;
    int err;

    nats = calloc(1, sizeof(*nats));
    if (!nats)
        return -ENOMEM;
    STAILQ_INIT(&nats->queue);
    LIST_INIT(&nats->subs);
    pthread_mutex_init(&nats->lock, NULL);
    kv_cond_init(&nats->work);
    kv_cond_init(&nats->ended);
    nats->state = state;
    nats->arg = arg;
    err = kvp_nats_opts_copy(opts, &nats->opts);
    if (err < 0)
        goto fail;
    nats->abi = kvp_nats_load();
    err = nats->abi ? kv_thread_start(&nats->thread, "kv-nats", run, nats) : -ENOTSUP;
    if (err < 0)
        goto fail;
    *ret = nats;
    return 0;

fail:
    nats_free(nats);
    return err;
}

void kvp_nats_close(struct kvp_nats *nats, uint32_t timeout_ms)
{
    bool connected;

    if (!nats)
        return;
    pthread_mutex_lock(&nats->lock);
    connected = nats->up;
    pthread_mutex_unlock(&nats->lock);
    if (timeout_ms && connected)
        (void)kvp_nats_flush(nats, timeout_ms);
    pthread_mutex_lock(&nats->lock);
    nats->stop = true;
    pthread_cond_signal(&nats->work);
    pthread_mutex_unlock(&nats->lock);
    pthread_join(nats->thread, NULL);
    nats_free(nats);
}

/* ---- messages ---- */

static const char *copy_text(char **at, const char *text)
{
    const char *copy = *at;

    if (!text)
        return NULL;
    *at = stpcpy(*at, text) + 1;
    return copy;
}

static size_t text_bytes(const char *text)
{
    return text ? strlen(text) + 1 : 0;
}

static struct message *copy_message(const struct kvp_nats_msg *msg)
{
    size_t texts = text_bytes(msg->subject) + text_bytes(msg->reply) + text_bytes(msg->id);
    struct message *copy = malloc(sizeof(*copy) + msg->len + texts);
    char *at;

    if (!copy)
        return NULL;
    copy->bytes = sizeof(*copy) + msg->len + texts;
    at = (char *)(copy + 1) + msg->len;
    if (msg->len)
        memcpy(copy + 1, msg->data, msg->len);
    copy->msg = (struct kvp_nats_msg){.subject = copy_text(&at, msg->subject),
                                      .reply = copy_text(&at, msg->reply),
                                      .id = copy_text(&at, msg->id),
                                      .data = copy + 1,
                                      .len = msg->len};
    return copy;
}

/* True for a subject that the server reads as one: libnats writes it between spaces, as it is. */
static bool is_subject(const char *text)
{
    return *text && !text[strcspn(text, " \t\r\n")];
}

int kvp_nats_publish(struct kvp_nats *nats, const struct kvp_nats_msg *msg)
{
    struct message *message;
    int err = 0;

    if (!msg->subject || !is_subject(msg->subject) || (msg->reply && !is_subject(msg->reply)))
        return -EINVAL;
    message = copy_message(msg);
    pthread_mutex_lock(&nats->lock);
    if (!message) {
        err = -ENOMEM;
    } else if (nats->stats.queued_bytes + message->bytes > nats->opts.queue_bytes) {
        err = -EAGAIN;
    } else {
        message->number = ++nats->queued;
        nats->stats.queued_bytes += message->bytes;
        if (STAILQ_EMPTY(&nats->queue))
            pthread_cond_signal(&nats->work);
        STAILQ_INSERT_TAIL(&nats->queue, message, list);
    }
    nats->stats.dropped += err < 0;
    pthread_mutex_unlock(&nats->lock);
    if (err < 0)
        free(message);
    return err;
}

int kvp_nats_flush(struct kvp_nats *nats, uint32_t timeout_ms)
{
    uint64_t due = kv_ns_after(kv_now_ns(), timeout_ms);
    uint64_t up_to;
    int err = 0;

    pthread_mutex_lock(&nats->lock);
    up_to = nats->queued + 1; /* a place of its own: also what follows the last flush counts */
    nats->flush_ns = nats->flush > nats->flushed ? KV_MAX(nats->flush_ns, due) : due;
    nats->queued = nats->flush = up_to;
    pthread_cond_signal(&nats->work);
    while (nats->flushed < up_to && err == 0)
        err = kv_cond_wait_until(&nats->ended, &nats->lock, due);
    err = nats->flushed >= up_to ? 0 : -ETIMEDOUT;
    pthread_mutex_unlock(&nats->lock);
    return err;
}

/* ---- subscriptions ---- */

static void sub_free(struct kvp_nats_sub *sub)
{
    free(sub->subject);
    free(sub->stream);
    free(sub->durable);
    free(sub);
}

/* Make a subscription, and let the thread make it known to the server. */
static int add_sub(struct kvp_nats *nats, const struct kvp_nats_sub *like,
                   struct kvp_nats_sub **ret)
{
    struct kvp_nats_sub *sub = calloc(1, sizeof(*sub));

    if (!sub)
        return -ENOMEM;
    sub->nats = nats;
    sub->subject = strdup(like->subject);
    sub->stream = like->stream ? strdup(like->stream) : NULL;
    sub->durable = like->durable ? strdup(like->durable) : NULL;
    if (!sub->subject || !sub->stream != !like->stream || !sub->durable != !like->durable) {
        sub_free(sub);
        return -ENOMEM;
    }
    sub->pending_bytes = like->pending_bytes ? like->pending_bytes : PENDING_BYTES;
    sub->fn = like->fn;
    sub->arg = like->arg;
    pthread_mutex_lock(&nats->lock);
    LIST_INSERT_HEAD(&nats->subs, sub, list);
    nats->subs_changed = true;
    pthread_cond_signal(&nats->work);
    pthread_mutex_unlock(&nats->lock);
    *ret = sub;
    return 0;
}

int kvp_nats_subscribe(struct kvp_nats *nats, const char *subject, size_t pending_bytes,
                       kvp_nats_fn fn, void *arg, struct kvp_nats_sub **ret)
{
    struct kvp_nats_sub like = {.subject = (char *)(uintptr_t)subject,
                                .pending_bytes = pending_bytes,
                                .fn = fn,
                                .arg = arg};

    return subject && *subject ? add_sub(nats, &like, ret) : -EINVAL;
}

/* True for a name that stands in subjects of JetStream's requests. */
static bool is_name(const char *text)
{
    return text && is_subject(text) && !text[strcspn(text, ".*>/\\")];
}

int kvp_nats_subscribe_durable(struct kvp_nats *nats, const char *subject,
                               const struct kvp_nats_durable *durable, kvp_nats_fn fn, void *arg,
                               struct kvp_nats_sub **ret)
{
    struct kvp_nats_sub like = {.subject = (char *)(uintptr_t)subject,
                                .stream = (char *)(uintptr_t)durable->stream,
                                .durable = (char *)(uintptr_t)durable->name,
                                .fn = fn,
                                .arg = arg};

    if (!subject || !is_subject(subject) || !is_name(durable->stream) || !is_name(durable->name))
        return -EINVAL;
    return add_sub(nats, &like, ret);
}

void kvp_nats_unsubscribe(struct kvp_nats_sub *sub)
{
    struct kvp_nats *nats;

    if (!sub)
        return;
    nats = sub->nats;
    pthread_mutex_lock(&nats->lock);
    sub->ending = true;
    nats->subs_changed = true;
    pthread_cond_signal(&nats->work);
    while (!sub->ended)
        pthread_cond_wait(&nats->ended, &nats->lock);
    pthread_mutex_unlock(&nats->lock);
    sub_free(sub);
}

void kvp_nats_get_stats(struct kvp_nats *nats, struct kvp_nats_stats *ret)
{
    struct kvp_nats_sub *sub = NULL;

    pthread_mutex_lock(&nats->lock);
    *ret = nats->stats;
    if (!ret->connected)
        *ret->url = '\0';
    LIST_FOREACH(sub, &nats->subs, list)
    {
        ret->missed += sub->link ? nats->abi->missed(sub->link) : 0;
        ret->received += atomic_load_explicit(&sub->received, memory_order_relaxed);
    }
    pthread_mutex_unlock(&nats->lock);
}
