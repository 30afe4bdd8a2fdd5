// SPDX-License-Identifier: Apache-2.0
#include "plane/follow.h"

#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/le.h"
#include "base/core/log.h"
#include "base/core/xxh.h"
#include "base/thread/thread.h"
#include "plane/record.h"

#define BUFFER_BYTES ((uint64_t)256 << 20)
#define MAX_PUBLISHERS 4096
#define RETRY_MS 2000
#define BUCKETS 1024
#define MAX_DOUBLED 4 /* times that a pause is doubled */
#define N_FORMER 4

/* A live message that waits for a snapshot. */
struct kept {
    STAILQ_ENTRY(kept) list;
    uint64_t sequence;
    size_t len;
    uint8_t data[];
};
STAILQ_HEAD(kept_list, kept);

struct publisher {
    LIST_ENTRY(publisher) list;
    char subject[KVP_MAX_SUBJECT];
    uint64_t incarnation;
    uint64_t former[N_FORMER]; /* incarnations before; a ring */
    unsigned n_former;
    unsigned twins; /* times in a row that a former one came back: two publish under this subject */
    uint64_t next;  /* number of the message to come */
    uint64_t told;  /* messages below this number came behind the request: none may be missing */
    bool whole;
    bool wanted;       /* a request is to be sent when the pause is over; no answer counts */
    unsigned in_row;   /* requests since it was whole last */
    uint64_t pause_ns; /* from heard_ns to the next request, at least */
    uint64_t request;  /* number of the last request; 0: none */
    uint64_t oldest;   /* first request whose answer counts: later ones repeat it */
    uint64_t answer;   /* request whose answer is being read; 0: none */
    uint64_t part;     /* part to come */
    uint64_t heard_ns; /* time of the request, or of the last part */
    struct kept_list kept;
    uint64_t kept_bytes;
};
LIST_HEAD(publishers, publisher);

struct kvp_follow {
    struct kvp_follow_ops ops;
    void *arg;
    uint64_t buffer_bytes, retry_ns;
    uint32_t max_publishers;
    struct kvp_nats *nats;
    struct kvp_nats_sub *live, *answers;
    char inbox[KVP_INBOX];

    pthread_t thread; /* sends requests whose pause is over */
    bool has_thread;

    pthread_mutex_t lock; /* held during callbacks; guards from here */
    pthread_cond_t work;
    bool stop;
    uint64_t due_ns; /* of the first request that waits for its pause */
    struct publishers publishers[BUCKETS];
    uint64_t request; /* number of the newest request */
    struct kvp_follow_stats stats;
};

/* ---- publishers ---- */

static struct publishers *bucket_of(struct kvp_follow *follow, const char *subject)
{
    return &follow->publishers[kv_xxh64(subject, strlen(subject), 0) % BUCKETS];
}

static struct publisher *find(struct kvp_follow *follow, const char *subject)
{
    struct publisher *publisher = NULL;

    LIST_FOREACH(publisher, bucket_of(follow, subject), list)
    {
        if (strcmp(publisher->subject, subject) == 0)
            break;
    }
    return publisher;
}

static void refuse(struct kvp_follow *follow, const char *subject, const char *why)
{
    static struct kv_log_rate rate;

    follow->stats.refused++;
    if (kv_log_allowed(&rate, 1))
        kv_log_warn("nats", "a publisher isn't followed",
                    "subject=%s reason=\"%s\" publishers=%u messages=%llu", subject, why,
                    follow->stats.publishers, (unsigned long long)follow->stats.refused);
}

/* Begin to know a publisher. Returns NULL when there is no place, or the owner doesn't want it. */
static struct publisher *add(struct kvp_follow *follow, const char *subject)
{
    struct publisher *publisher;

    if (follow->stats.publishers >= follow->max_publishers) {
        refuse(follow, subject, "too many publishers");
        return NULL;
    }
    if (follow->ops.heard && !follow->ops.heard(follow->arg, subject, true)) {
        follow->stats.unwanted++;
        return NULL;
    }
    publisher = calloc(1, sizeof(*publisher));
    if (!publisher) {
        refuse(follow, subject, "no memory");
        return NULL;
    }
    snprintf(publisher->subject, sizeof(publisher->subject), "%s", subject);
    STAILQ_INIT(&publisher->kept);
    LIST_INSERT_HEAD(bucket_of(follow, subject), publisher, list);
    follow->stats.publishers++;
    return publisher;
}

static void set_whole(struct kvp_follow *follow, struct publisher *publisher, bool whole)
{
    if (publisher->whole == whole)
        return;
    publisher->whole = whole;
    follow->stats.whole += whole ? 1 : -1u;
    follow->ops.whole(follow->arg, publisher->subject, whole);
}

static void drop_first(struct kvp_follow *follow, struct publisher *publisher)
{
    struct kept *kept = STAILQ_FIRST(&publisher->kept);

    STAILQ_REMOVE_HEAD(&publisher->kept, list);
    follow->stats.buffered_bytes -= kept->len;
    publisher->kept_bytes -= kept->len;
    free(kept);
}

static void drop_kept(struct kvp_follow *follow, struct publisher *publisher)
{
    while (!STAILQ_EMPTY(&publisher->kept))
        drop_first(follow, publisher);
}

/* ---- snapshots ---- */

uint64_t kvp_follow_pause(uint64_t retry_ns, unsigned n, uint64_t random)
{
    uint64_t pause_ns = retry_ns << KV_MIN(n, (unsigned)MAX_DOUBLED);

    return pause_ns + random % (pause_ns / 2 + 1);
}

static uint64_t pause_behind(const struct kvp_follow *follow, unsigned n)
{
    /* the inbox is random, so followers differ */
    return kvp_follow_pause(follow->retry_ns, n,
                            kv_xxh64(follow->inbox, strlen(follow->inbox), follow->request));
}

/*
 * Ask for all that a publisher has. One that is lost is repeated by on_waiting: any of the answers will
 * do then, since publishers answer one after the other, and may be slower than we repeat.
 */
static void ask(struct kvp_follow *follow, struct publisher *publisher)
{
    char subject[KVP_MAX_SUBJECT + 16];
    uint8_t request[8];

    publisher->request = ++follow->request;
    if (publisher->wanted) {
        publisher->oldest = publisher->request;
        publisher->told = 0;
    }
    publisher->wanted = false;
    publisher->heard_ns = kv_now_ns();
    publisher->pause_ns = pause_behind(follow, publisher->in_row++);
    follow->stats.asked++;
    snprintf(subject, sizeof(subject), "%s.snapshot", publisher->subject);
    kv_put_le64(request, publisher->request);
    (void)kvp_nats_publish(follow->nats, &(struct kvp_nats_msg){.subject = subject,
                                                                .reply = follow->inbox,
                                                                .data = request,
                                                                .len = sizeof(request)});
}

static bool pause_is_over(const struct publisher *publisher)
{
    return kv_now_ns() >= publisher->heard_ns + publisher->pause_ns;
}

/*
 * The publisher's blocks aren't known any more: ask for them, now or when the pause behind the last
 * request, or its answer, is over. Messages until then are in the snapshot.
 */
static void want(struct kvp_follow *follow, struct publisher *publisher)
{
    set_whole(follow, publisher, false);
    drop_kept(follow, publisher);
    publisher->wanted = true;
    publisher->answer = publisher->part = 0;
    publisher->oldest = UINT64_MAX;
    if (pause_is_over(publisher)) {
        ask(follow, publisher);
    } else if (publisher->heard_ns + publisher->pause_ns < follow->due_ns) {
        follow->due_ns = publisher->heard_ns + publisher->pause_ns;
        pthread_cond_signal(&follow->work);
    }
}

/* Send the requests whose pause is over, and note when the next one is due. */
static void ask_due(struct kvp_follow *follow)
{
    struct publisher *publisher = NULL;

    follow->due_ns = UINT64_MAX;
    for (size_t i = 0; i < BUCKETS; i++) {
        LIST_FOREACH(publisher, &follow->publishers[i], list)
        {
            if (publisher->wanted && pause_is_over(publisher))
                ask(follow, publisher);
            else if (publisher->wanted)
                follow->due_ns = KV_MIN(follow->due_ns, publisher->heard_ns + publisher->pause_ns);
        }
    }
}

static void *run(void *arg)
{
    struct kvp_follow *follow = arg;

    pthread_mutex_lock(&follow->lock);
    while (!follow->stop) {
        if (follow->due_ns <= kv_now_ns())
            ask_due(follow);
        else
            (void)kv_cond_wait_until(&follow->work, &follow->lock, follow->due_ns);
    }
    pthread_mutex_unlock(&follow->lock);
    return NULL;
}

static void take_record(void *arg, const struct kvp_header *header, const struct kvp_record *record)
{
    struct kvp_follow *follow = arg;

    follow->stats.records++;
    follow->ops.record(follow->arg, header, record);
}

/* Apply the kept messages behind a snapshot. Returns false when one is missing. */
static bool apply_kept(struct kvp_follow *follow, struct publisher *publisher)
{
    while (!STAILQ_EMPTY(&publisher->kept)) {
        const struct kept *kept = STAILQ_FIRST(&publisher->kept);

        if (kept->sequence > publisher->next)
            return false;
        if (kept->sequence == publisher->next) {
            (void)kvp_read(kept->data, kept->len, NULL, take_record, follow); /* was read before */
            publisher->next++;
        }
        drop_first(follow, publisher);
    }
    return true;
}

static bool is_awaited(const struct publisher *publisher, const struct kvp_header *header)
{
    if (header->kind != KVP_SNAPSHOT || publisher->whole ||
        header->incarnation != publisher->incarnation)
        return false;
    if (header->part == 0) /* also in the middle of an answer of which a part was lost */
        return header->request >= publisher->oldest && header->request <= publisher->request &&
               header->request > publisher->answer;
    return header->request == publisher->answer && header->part == publisher->part;
}

static void take_part(struct kvp_follow *follow, struct publisher *publisher,
                      const struct kvp_header *header, const struct kvp_nats_msg *msg)
{
    if (header->part == 0) {
        publisher->answer = header->request;
        publisher->part = 0;
        follow->ops.reset(follow->arg, publisher->subject);
    }
    if (kvp_read(msg->data, msg->len, NULL, take_record, follow) < 0) {
        follow->stats.bad++; /* as if it were lost */
        return;
    }
    publisher->part++;
    publisher->heard_ns = kv_now_ns();
    if (!header->last)
        return;
    follow->stats.snapshots++;
    publisher->next = header->sequence;
    if (!apply_kept(follow, publisher) || publisher->next < publisher->told) {
        want(follow, publisher);
        return;
    }
    publisher->in_row = 0;
    publisher->pause_ns = pause_behind(follow, 0);
    set_whole(follow, publisher, true);
}

static void on_part(void *arg, const struct kvp_nats_msg *msg)
{
    struct kvp_header header = KVP_HEADER_INIT;
    struct kvp_follow *follow = arg;
    struct publisher *publisher;

    if (msg->nobody || kvp_peek(msg->data, msg->len, &header) < 0)
        return;
    pthread_mutex_lock(&follow->lock);
    publisher = find(follow, header.publisher);
    if (publisher && is_awaited(publisher, &header))
        take_part(follow, publisher, &header, msg);
    pthread_mutex_unlock(&follow->lock);
}

/* ---- live messages ---- */

/* The publisher of which most is kept; some is. */
static struct publisher *fullest_publisher(struct kvp_follow *follow)
{
    struct publisher *most = NULL;

    for (size_t i = 0; i < BUCKETS; i++) {
        for (struct publisher *publisher = LIST_FIRST(&follow->publishers[i]); publisher;
             publisher = LIST_NEXT(publisher, list)) {
            if (!most || publisher->kept_bytes > most->kept_bytes)
                most = publisher;
        }
    }
    return most;
}

/*
 * Make room for a message: drop what waits for the publisher that has most. Else one that never answers
 * would keep the buffer full, and nobody else would become whole.
 */
static void make_room(struct kvp_follow *follow, size_t len)
{
    while (follow->stats.buffered_bytes &&
           follow->stats.buffered_bytes + len > follow->buffer_bytes) {
        follow->stats.overflows++;
        drop_kept(follow, fullest_publisher(follow));
    }
}

/* Keep a message until the snapshot has come. */
static void keep(struct kvp_follow *follow, struct publisher *publisher, uint64_t sequence,
                 const struct kvp_nats_msg *msg)
{
    struct kept *kept = NULL;

    make_room(follow, msg->len);
    if (follow->stats.buffered_bytes + msg->len <= follow->buffer_bytes)
        kept = malloc(sizeof(*kept) + msg->len);
    if (!kept) { /* the gap that this leaves asks for another snapshot */
        follow->stats.overflows++;
        drop_kept(follow, publisher);
        return;
    }
    kept->sequence = sequence;
    kept->len = msg->len;
    memcpy(kept->data, msg->data, msg->len);
    STAILQ_INSERT_TAIL(&publisher->kept, kept, list);
    follow->stats.buffered_bytes += msg->len;
    publisher->kept_bytes += msg->len;
}

static void on_whole(struct kvp_follow *follow, struct publisher *publisher,
                     const struct kvp_header *header, const struct kvp_nats_msg *msg)
{
    if (header->sequence < publisher->next)
        return; /* it came twice */
    if (header->sequence > publisher->next) {
        follow->stats.gaps++;
        want(follow, publisher);
    } else if (header->kind == KVP_EVENTS) {
        if (kvp_read(msg->data, msg->len, NULL, take_record, follow) == 0)
            publisher->next++;
        else
            follow->stats.bad++; /* as if it were lost: the next one shows a gap */
    }
}

static void on_waiting(struct kvp_follow *follow, struct publisher *publisher,
                       const struct kvp_header *header, const struct kvp_nats_msg *msg)
{
    publisher->told = KV_MAX(publisher->told, header->sequence + (header->kind == KVP_EVENTS));
    if (header->kind == KVP_EVENTS && !publisher->wanted)
        keep(follow, publisher, header->sequence, msg);
    if (pause_is_over(publisher))
        ask(follow, publisher);
}

/* True when a start that came before another one is back: both live. */
static bool is_back(const struct publisher *publisher, uint64_t incarnation)
{
    for (unsigned i = 0; i < KV_MIN(publisher->n_former, (unsigned)N_FORMER); i++) {
        if (publisher->former[i] == incarnation)
            return true;
    }
    return false;
}

/* Two publishers of one subject take turns: make the pause longer with each, and tell. */
static void note_twin(struct kvp_follow *follow, struct publisher *publisher)
{
    static struct kv_log_rate rate;
    uint64_t pause_ns = pause_behind(follow, ++publisher->twins);

    publisher->pause_ns = KV_MAX(publisher->pause_ns, pause_ns);
    follow->stats.twins++;
    if (publisher->twins == 3 && kv_log_allowed(&rate, 1)) /* one may be a late message */
        kv_log_warn("nats", "two publishers have one name: neither can be followed", "subject=%s",
                    publisher->subject);
}

/* A message of another start of the publisher, or of its first that is seen. */
static void begin(struct kvp_follow *follow, struct publisher *publisher, uint64_t incarnation)
{
    follow->stats.restarts += publisher->request != 0;
    if (is_back(publisher, incarnation))
        note_twin(follow, publisher);
    else
        publisher->twins = 0;
    if (publisher->request)
        publisher->former[publisher->n_former++ % N_FORMER] = publisher->incarnation;
    publisher->incarnation = incarnation;
    want(follow, publisher);
}

static void forget(struct kvp_follow *follow, struct publisher *publisher)
{
    follow->stats.publishers--;
    follow->stats.whole -= publisher->whole;
    LIST_REMOVE(publisher, list);
    drop_kept(follow, publisher);
    free(publisher);
}

static void on_live(void *arg, const struct kvp_nats_msg *msg)
{
    struct kvp_header header = KVP_HEADER_INIT;
    struct kvp_follow *follow = arg;
    struct publisher *publisher;
    int err = kvp_peek(msg->data, msg->len, &header);

    pthread_mutex_lock(&follow->lock);
    if (err < 0 || header.kind == KVP_SNAPSHOT || strcmp(header.publisher, msg->subject) != 0) {
        follow->stats.bad++;
        goto out;
    }
    publisher = find(follow, header.publisher);
    /* the next message of a whole publisher is checked as it is applied */
    if ((!publisher || !publisher->whole || publisher->incarnation != header.incarnation ||
         header.sequence != publisher->next || header.kind != KVP_EVENTS) &&
        kvp_read(msg->data, msg->len, NULL, NULL, NULL) < 0) {
        follow->stats.bad++;
        goto out;
    }
    if (!publisher) {
        publisher = add(follow, header.publisher);
    } else if (follow->ops.heard && !follow->ops.heard(follow->arg, publisher->subject, false)) {
        forget(follow, publisher);
        publisher = NULL;
    }
    if (!publisher)
        goto out;
    if (!publisher->request || publisher->incarnation != header.incarnation)
        begin(follow, publisher, header.incarnation);
    if (publisher->whole)
        on_whole(follow, publisher, &header, msg);
    else
        on_waiting(follow, publisher, &header, msg);
out:
    pthread_mutex_unlock(&follow->lock);
}

void kvp_follow_forget(struct kvp_follow *follow, const char *subject)
{
    struct publisher *publisher;

    pthread_mutex_lock(&follow->lock);
    publisher = find(follow, subject);
    if (publisher)
        forget(follow, publisher);
    pthread_mutex_unlock(&follow->lock);
}

/* ---- creation and destruction ---- */

void kvp_follow_close(struct kvp_follow *follow)
{
    struct publisher *publisher;

    if (!follow)
        return;
    pthread_mutex_lock(&follow->lock);
    follow->stop = true;
    pthread_cond_signal(&follow->work);
    pthread_mutex_unlock(&follow->lock);
    if (follow->has_thread)
        pthread_join(follow->thread, NULL);
    kvp_nats_unsubscribe(follow->live);
    kvp_nats_unsubscribe(follow->answers);
    kvp_nats_close(follow->nats, 0);
    for (size_t i = 0; i < BUCKETS; i++) {
        while ((publisher = LIST_FIRST(&follow->publishers[i])) != NULL)
            forget(follow, publisher);
    }
    pthread_cond_destroy(&follow->work);
    pthread_mutex_destroy(&follow->lock);
    free(follow);
}

int kvp_follow_open(const struct kvp_follow_opts *opts, const struct kvp_follow_ops *ops, void *arg,
                    struct kvp_follow **ret)
{
    struct kvp_follow *follow = calloc(1, sizeof(*follow));
    int err;

    if (!follow)
        return -ENOMEM;
    pthread_mutex_init(&follow->lock, NULL);
    kv_cond_init(&follow->work);
    follow->due_ns = UINT64_MAX;
    follow->ops = *ops;
    follow->arg = arg;
    follow->buffer_bytes = opts->buffer_bytes ? opts->buffer_bytes : BUFFER_BYTES;
    follow->max_publishers = opts->max_publishers ? opts->max_publishers : MAX_PUBLISHERS;
    follow->retry_ns = (opts->retry_ms ? opts->retry_ms : RETRY_MS) * KV_NS_PER_MS;
    err = kvp_nats_inbox(follow->inbox);
    if (err == 0)
        err = kvp_nats_open(opts->server, NULL, NULL, &follow->nats);
    if (err == 0)
        err = kvp_nats_subscribe(follow->nats, follow->inbox, 0, on_part, follow, &follow->answers);
    if (err == 0)
        err = kvp_nats_subscribe(follow->nats, opts->subject ? opts->subject : "kvasir.*.*.*.*", 0,
                                 on_live, follow, &follow->live);
    if (err == 0) {
        err = kv_thread_start(&follow->thread, "kv-follow", run, follow);
        follow->has_thread = err == 0;
    }
    if (err < 0)
        kvp_follow_close(follow);
    else
        *ret = follow;
    return err;
}

void kvp_follow_get_stats(struct kvp_follow *follow, struct kvp_follow_stats *ret)
{
    pthread_mutex_lock(&follow->lock);
    *ret = follow->stats;
    pthread_mutex_unlock(&follow->lock);
    kvp_nats_get_stats(follow->nats, &ret->nats);
}
