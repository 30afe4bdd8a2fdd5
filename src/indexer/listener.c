// SPDX-License-Identifier: Apache-2.0
#include "indexer/listener.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/msgpack.h"
#include "base/xxh.h"
#include "indexer/model.h"
#include "indexer/pump.h"
#include "indexer/socket.h"

/* Messages and bytes per turn: long enough to pay for the turn, short enough that no stream starves
 * others, whatever the size of its messages. */
#define TURN 64
#define TURN_BYTES (1u << 20)
#define CONNECT_RETRY_NS (5 * KV_NS_PER_S)
#define RESOLVE_POLL_NS (50 * KV_NS_PER_MS) /* while a host name is being looked up */
#define SILENT_NS (5 * KV_NS_PER_S)
#define LINK_LINES 20                 /* a second, of all workers */
#define LOYALTY_NS (30 * KV_NS_PER_S) /* to an address that answered: it may be coming back */
#define RESOLVED_AGE_MS 5000          /* a name's address may be so old to connect to it */
#define REPLAY_AGE_MS 60000           /* ... for a replay, from an engine that was there */

static struct ki_stream_opts stream_opts(const struct ki_listener_env *env, bool can_replay)
{
    return (struct ki_stream_opts){.can_replay = can_replay,
                                   .max_attempts = 3,
                                   .timeout_ns = env->replay_timeout_ms * KV_NS_PER_MS,
                                   .retry_delay_ns = 100 * KV_NS_PER_MS,
                                   .cooldown_ns = 30 * KV_NS_PER_S,
                                   .resync_ns = 3600 * KV_NS_PER_S,
                                   .idle_ns = 5 * KV_NS_PER_S};
}

uint64_t ki_listener_new_generation(struct ki_listener_env *env)
{
    return atomic_fetch_add_explicit(&env->generations, 1, memory_order_relaxed) + 1;
}

int ki_listener_create(struct ki_listener_env *env, const struct ki_registration *registration,
                       struct ki_model *model, struct ki_listener **ret)
{
    struct ki_listener *l = calloc(1, sizeof(*l));
    struct ki_stream_opts opts = stream_opts(env, registration->replay_endpoint != NULL);
    int rc = -ENOMEM;

    if (!l)
        return -ENOMEM;
    pthread_mutex_init(&l->lock, NULL);
    atomic_init(&l->refs, 1);
    l->env = env;
    l->instance = registration->instance;
    l->rank = registration->rank;
    l->epoll_fd = -1;
    l->version = registration->version;
    l->by_peer = registration->by_peer;
    l->num_blocks = registration->num_blocks ? registration->num_blocks : env->worker_blocks;
    l->told_blocks = registration->num_blocks;
    ki_backlog_init(&l->backlog);
    l->generation = ki_listener_new_generation(env);
    l->endpoint = strdup(registration->endpoint);
    if (!l->endpoint)
        goto fail;
    if (registration->replay_endpoint) {
        l->replay_endpoint = strdup(registration->replay_endpoint);
        if (!l->replay_endpoint)
            goto fail;
    }
    ki_target_init(&l->target, l->endpoint);
    ki_target_init(&l->replay_target, l->replay_endpoint);
    ki_stream_init(&l->stream, &opts);
    rc = ki_applier_init(&l->applier, l->instance, l->rank, model->block_size, l->env->mm_keys);
    l->applier.eagle_drop = registration->eagle_drop;
    if (rc < 0)
        goto fail;
    l->model = model;
    *ret = l;
    return 0;
fail:
    ki_listener_release(l);
    return rc;
}

struct ki_listener *ki_listener_acquire(struct ki_listener *l)
{
    atomic_fetch_add_explicit(&l->refs, 1, memory_order_relaxed);
    return l;
}

void ki_listener_release(struct ki_listener *l)
{
    /* Release pairs with the acquire of whoever drops the last reference. */
    if (!l || atomic_fetch_sub_explicit(&l->refs, 1, memory_order_acq_rel) != 1)
        return;
    ki_applier_fini(&l->applier);
    ki_model_release(l->model);
    free(l->endpoint);
    free(l->replay_endpoint);
    pthread_mutex_destroy(&l->lock);
    free(l);
}

/* -- any thread -------------------------------------------------------------------------------- */

bool ki_mark_is_of(const struct ki_watermark *mark, const struct ki_listener *l)
{
    return !mark->no_position && (!mark->has_stream || mark->stream_rank == l->rank);
}

void ki_listener_seed(struct ki_listener *l, const struct ki_watermark *mark)
{
    pthread_mutex_lock(&l->lock);
    ki_stream_seed(&l->stream, mark->sequence, mark->timestamp, mark->partial);
    if (mark->torn)
        ki_stream_seed_torn(&l->stream);
    if (mark->generation)
        l->generation = mark->generation;
    pthread_mutex_unlock(&l->lock);
}

void ki_listener_adopt_rank(struct ki_listener *l, const struct ki_watermark *mark)
{
    pthread_mutex_lock(&l->lock);
    if (!ki_applier_note_rank(&l->applier, mark->holder.rank)) {
        kvi_remove_holder(l->model->index, mark->holder);
        ki_stream_mark_partial(&l->stream, kv_now_ns());
    } else if (mark->torn) {
        ki_stream_seed_torn(&l->stream);
    }
    pthread_mutex_unlock(&l->lock);
}

bool ki_listener_brings(struct ki_listener *l, uint32_t rank)
{
    bool brings = false;

    pthread_mutex_lock(&l->lock);
    for (uint32_t i = 0; i < l->applier.n_ranks && !brings; i++)
        brings = l->applier.ranks[i] == rank;
    pthread_mutex_unlock(&l->lock);
    return brings;
}

bool ki_listener_retire(struct ki_listener *l, struct ki_watermark *ret_position)
{
    const struct ki_stream *s = &l->stream;
    bool known;

    pthread_mutex_lock(&l->lock);
    l->gone = true;
    known = s->has_position || s->has_before;
    memset(ret_position, 0, sizeof(*ret_position));
    ret_position->holder = (struct kv_holder){.worker = l->instance, .rank = l->rank};
    ret_position->sequence = s->has_position ? s->position : s->before;
    ret_position->timestamp = s->has_position ? s->timestamp : 0;
    ret_position->partial = ki_stream_is_partial(s);
    ret_position->has_stream = true;
    ret_position->stream_rank = l->rank;
    ret_position->generation = l->generation;
    pthread_mutex_unlock(&l->lock);
    return known;
}

int ki_listener_set_paused(struct ki_listener *l, bool paused)
{
    int rc = 0;

    pthread_mutex_lock(&l->lock);
    if (l->paused == paused)
        rc = -EALREADY;
    l->paused = paused;
    pthread_mutex_unlock(&l->lock);
    return rc;
}

bool ki_listener_feeds(struct ki_listener *l, const struct ki_model *model)
{
    bool feeds;

    pthread_mutex_lock(&l->lock);
    feeds = l->model == model;
    pthread_mutex_unlock(&l->lock);
    return feeds;
}

static enum ki_listener_status status_of(const struct ki_listener *l)
{
    if (l->paused)
        return KI_PAUSED;
    if (!l->connected)
        return l->last_error[0] ? KI_FAILED : KI_PENDING;
    if (!l->started)
        return KI_PENDING;
    return l->stream.state == KI_STREAM_LIVE ? KI_ACTIVE : KI_REPLAYING;
}

void ki_listener_info(struct ki_listener *l, struct ki_worker_info *ret)
{
    const struct ki_stream *s = &l->stream;
    const struct ki_apply_stats *a = &l->applier.stats;

    pthread_mutex_lock(&l->lock);
    *ret = (struct ki_worker_info){
        .instance = l->instance,
        .rank = l->rank,
        .version = l->version,
        .num_blocks = l->told_blocks,
        .eagle_drop = l->applier.eagle_drop,
        .block_size = l->model->block_size,
        .endpoint = strdup(l->endpoint),
        .replay_endpoint = l->replay_endpoint ? strdup(l->replay_endpoint) : NULL,
        .model = strdup(l->model->name),
        .tenant = strdup(l->model->tenant),
        .status = status_of(l),
        .connected = l->connected,
        .last_error = l->last_error[0] ? strdup(l->last_error) : NULL,
        .has_sequence = s->has_position,
        .last_sequence = s->position,
        .last_event_ns = l->last_event_ns,
        .batches = a->batches,
        .events = a->events,
        .blocks = a->blocks,
        .bytes = a->bytes,
        .gaps = s->stats.gaps,
        .missed_batches = s->stats.missed,
        .replays = s->stats.replays,
        .failed_replays = s->stats.failed_replays,
        .replayed_batches = s->stats.replayed,
        .overruns = s->stats.overruns,
        .restarts = s->stats.restarts,
        .resyncs = s->stats.resyncs,
        .reopened = l->reopened,
        .duplicates = s->stats.duplicates,
        .malformed = a->malformed,
        .orphans = a->orphans,
        .rejected = a->rejected,
        .partial = ki_stream_is_partial(s),
    };
    memcpy(ret->skipped, a->skipped, sizeof(ret->skipped));
    pthread_mutex_unlock(&l->lock);
}

bool ki_marks_reserve(struct ki_watermark **items, size_t n, size_t *capacity)
{
    size_t more = *capacity ? *capacity * 2 : 64;
    struct ki_watermark *grown;

    if (n < *capacity)
        return true;
    grown = realloc(*items, more * sizeof(*grown));
    if (!grown)
        return false;
    *items = grown;
    *capacity = more;
    return true;
}

bool ki_listener_watermarks(struct ki_listener *l, struct ki_watermark **items, size_t *n,
                            size_t *capacity)
{
    bool ok = true;

    pthread_mutex_lock(&l->lock);
    for (uint32_t i = 0; l->stream.has_position && ok && i < l->applier.n_ranks; i++) {
        ok = ki_marks_reserve(items, *n, capacity);
        if (!ok)
            break;
        (*items)[(*n)++] = (struct ki_watermark){
            .holder = {.worker = l->instance, .rank = l->applier.ranks[i]},
            .sequence = l->stream.position,
            .timestamp = l->stream.timestamp,
            .partial = ki_stream_is_partial(&l->stream),
            .has_stream = true,
            .stream_rank = l->rank,
            .generation = l->generation,
        };
    }
    pthread_mutex_unlock(&l->lock);
    return ok;
}

/* -- telling the operator ---------------------------------------------------------------------- */

static void report(const struct ki_listener *l, const struct ki_stream_stats *before,
                   unsigned steps)
{
    static struct kv_log_rate rate;
    const struct ki_stream_stats *now = &l->stream.stats;
    const char *what = NULL;

    if (now->restarts != before->restarts)
        what = "the engine started over: its blocks are forgotten";
    else if (now->overruns != before->overruns)
        what = "the engine no longer has the missed batches: its blocks are forgotten";
    else if (now->resyncs != before->resyncs)
        what = "too many blocks can't be real after losses: they are forgotten and learnt anew";
    else if (now->failed_replays != before->failed_replays)
        what = "no useful answer to replay requests: going on without";
    else if (now->missed != before->missed)
        what = "batches are missing and can't be replayed: the view is partial";
    else if (steps & KI_STEP_REQUEST)
        what = "asking for a replay";
    if (what && kv_log_allowed(&rate, 20))
        kv_log_warn("indexer", what,
                    "worker=%" PRIu64 " rank=%" PRIu32 " endpoint=%s position=%" PRIu64
                    " missed=%" PRIu64 " replay_from=%" PRIu64,
                    l->instance, l->rank, l->endpoint, l->stream.position,
                    now->missed - before->missed, l->stream.request);
}

/* -- the event thread: carrying out what the stream decides ------------------------------------ */

/* Forget all that the stream has brought; with @restarted, what the last process said of itself, too. */
static void purge(struct ki_listener *l, bool restarted)
{
    l->generation = ki_listener_new_generation(l->env); /* before: a dump sees it if it's hurt */
    ki_applier_purge(&l->applier, l->model->index, restarted);
}

/* Whether the batch just applied shows that too many of the blocks can't be real. */
static void judge(struct ki_listener *l, uint64_t now_ns)
{
    const struct ki_applier *a = &l->applier;
    struct ki_evidence e = {
        .unknown = a->last.unknown, .full = a->last.full, .capacity = l->num_blocks * a->n_ranks};

    struct kvi_holder_info info;

    for (uint32_t i = 0; l->stream.lossy && i < a->n_ranks; i++)
        if (kvi_get_holder(l->model->index, (struct kv_holder){l->instance, a->ranks[i]}, &info) ==
            0)
            e.held += info.blocks + info.parked;
    if (ki_stream_judge(&l->stream, &e, now_ns) & KI_STEP_PURGE)
        purge(l, false);
}

/* The part that touches the index. Under the lock. */
static void write_index(struct ki_listener *l, unsigned steps, const void *payload, size_t len,
                        uint64_t now_ns)
{
    if (steps & KI_STEP_PURGE)
        purge(l, steps & KI_STEP_RESET);
    if (steps & KI_STEP_RESET)
        kve_reader_reset(l->applier.reader);
    if (!(steps & KI_STEP_APPLY))
        return;
    l->last_event_ns = kv_wall_ns();
    switch (ki_applier_apply(&l->applier, l->model->index, payload, len)) {
    case KI_APPLIED:
        break;
    case KI_APPLIED_PART:
        ki_stream_mark_partial(&l->stream, now_ns);
        break;
    case KI_APPLIED_CLEARED:
        ki_stream_mark_whole(&l->stream);
        break;
    }
    ki_model_note_forms(l->model, l->applier.forms);
    judge(l, now_ns);
}

static void fail_connect(struct ki_listener *l, const char *why, uint64_t now_ns)
{
    static struct kv_log_rate rate;

    pthread_mutex_lock(&l->lock);
    snprintf(l->last_error, sizeof(l->last_error), "%.70s: %s", l->endpoint, why);
    pthread_mutex_unlock(&l->lock);
    if (kv_log_allowed(&rate, 5))
        kv_log_warn("indexer", "can't connect; trying again in 5 s",
                    "worker=%" PRIu64 " rank=%" PRIu32 " error=\"%s\"", l->instance, l->rank,
                    l->last_error);
    l->retry_at_ns = now_ns + CONNECT_RETRY_NS;
}

static void close_replay(struct ki_listener *l)
{
    l->replay_again_ns = 0;
    ki_socket_close(l->dealer, l->epoll_fd);
    l->dealer = NULL;
    l->dealer_ready = false;
}

/* A new socket for each request: nothing of an older answer can come through it. */
static void open_replay(struct ki_listener *l, uint64_t now_ns)
{
    int rc;

    close_replay(l);
    rc = ki_target_find(&l->replay_target, l->env->resolver, REPLAY_AGE_MS);
    if (rc == -EINPROGRESS) { /* at most until the request's deadline */
        l->replay_again_ns = now_ns + RESOLVE_POLL_NS;
        return;
    }
    if (rc == 0)
        rc = ki_socket_open(l->env->zmq, ZMQ_DEALER, l->replay_target.where, KI_REPLAY_QUEUE,
                            KI_MAX_MESSAGE, l->epoll_fd, KI_PUMP_DEALER(l), &l->dealer);
    if (rc == 0)
        rc = ki_socket_connect(l->dealer, l->replay_target.where);
    if (rc == 0)
        rc = ki_socket_request(l->dealer, l->stream.request);
    if (rc < 0) { /* the request's deadline will end the attempt */
        kv_log_warn("indexer", "can't ask for a replay", "worker=%" PRIu64 " error=\"%s\"",
                    l->instance, zmq_strerror(-rc));
        close_replay(l);
        return;
    }
    l->dealer_ready = true;
}

static void offer_live(struct ki_listener *l, const struct ki_batch_id *id, zmq_msg_t *payload,
                       bool reconnected, uint64_t now_ns);

/* The part that touches sockets. */
static void work_sockets(struct ki_listener *l, unsigned steps, uint64_t now_ns)
{
    zmq_msg_t held;

    if (steps & KI_STEP_REQUEST)
        open_replay(l, now_ns);
    if (!(steps & KI_STEP_RESUME))
        return;
    close_replay(l);
    if (!l->holding)
        return;
    zmq_msg_init(&held);
    zmq_msg_move(&held, &l->held);
    zmq_msg_close(&l->held);
    l->holding = false;
    offer_live(l, &l->held_id, &held, false, now_ns);
    zmq_msg_close(&held);
}

static void offer_live(struct ki_listener *l, const struct ki_batch_id *id, zmq_msg_t *payload,
                       bool reconnected, uint64_t now_ns)
{
    struct ki_batch_id copy = *id; /* may be held_id, which a new hold overwrites */
    struct ki_stream_stats before;
    unsigned steps = 0;

    pthread_mutex_lock(&l->lock);
    if (!l->gone) {
        before = l->stream.stats;
        steps = ki_stream_live(&l->stream, &copy, reconnected, now_ns);
        write_index(l, steps, zmq_msg_data(payload), zmq_msg_size(payload), now_ns);
        if (KV_UNLIKELY(steps != KI_STEP_APPLY))
            report(l, &before, steps);
        else if (KV_UNLIKELY(before.missed != l->stream.stats.missed ||
                             before.resyncs != l->stream.stats.resyncs))
            report(l, &before, steps);
    }
    pthread_mutex_unlock(&l->lock);
    if (steps & KI_STEP_HOLD) {
        zmq_msg_init(&l->held);
        zmq_msg_move(&l->held, payload);
        l->held_id = copy;
        l->holding = true;
    }
    if (steps & (KI_STEP_REQUEST | KI_STEP_RESUME))
        work_sockets(l, steps, now_ns);
}

/* -- the event thread: messages ---------------------------------------------------------------- */

/* The publisher's clock: the first element of a batch that is an array. */
static double peek_timestamp(const void *payload, size_t len)
{
    enum kv_msgpack_type type;
    struct kv_msgpack m;

    kv_msgpack_init(&m, payload, len);
    if (kv_msgpack_peek(&m) != KV_MSGPACK_ARRAY || kv_msgpack_array(&m) == 0)
        return 0;
    type = kv_msgpack_peek(&m);
    return type == KV_MSGPACK_FLOAT || type == KV_MSGPACK_UINT ? kv_msgpack_double(&m) : 0;
}

static struct ki_batch_id identify(const struct kve_message *message)
{
    return (struct ki_batch_id){
        .sequence = message->sequence,
        .digest = kv_xxh64(message->payload.data, message->payload.len, 0),
        .timestamp = peek_timestamp(message->payload.data, message->payload.len),
    };
}

/*
 * Whether this message came over another connection than the one before. libzmq keeps one set of
 * properties per connection, shared by its messages: the same address means the same connection, as
 * long as a message of it is kept so that the address isn't used again.
 */
static bool is_new_connection(struct ki_listener *l, zmq_msg_t *frame)
{
    const char *property = zmq_msg_gets(frame, "Socket-Type");

    if (!property) /* inproc has none */
        return false;
    if (!l->has_connection) {
        zmq_msg_init(&l->connection);
        l->has_connection = zmq_msg_copy(&l->connection, frame) == 0;
        l->connection_property = property;
        return false;
    }
    if (l->connection_property == property)
        return false;
    zmq_msg_copy(&l->connection, frame);
    l->connection_property = property;
    return true;
}

static void count_malformed(struct ki_listener *l, const char *what)
{
    static struct kv_log_rate rate;

    pthread_mutex_lock(&l->lock);
    l->applier.stats.malformed++;
    pthread_mutex_unlock(&l->lock);
    if (kv_log_allowed(&rate, 3))
        kv_log_warn("indexer", what, "worker=%" PRIu64 " rank=%" PRIu32 " endpoint=%s", l->instance,
                    l->rank, l->endpoint);
}

/* Publish the state of the connection in /workers, and tell the stream about it. */
static void show_link(struct ki_listener *l, uint64_t now_ns)
{
    const char *problem = l->link.problem;

    pthread_mutex_lock(&l->lock);
    l->connected = l->link.state == KI_LINK_UP;
    if (l->connected && l->ups_told != l->link.ups) {
        l->sub_ready = true; /* read what came over the last connection first */
        ki_stream_reachable(&l->stream, now_ns);
    }
    if (!l->connected)
        ki_stream_disconnected(&l->stream);
    if (problem || l->connected)
        snprintf(l->last_error, sizeof(l->last_error), "%s", problem ? problem : "");
    pthread_mutex_unlock(&l->lock);
}

/*
 * A connection's first message: the stream hears of the connection with the batch itself. libzmq
 * tells of a connection before it delivers; of several, the message may be an earlier one's.
 */
static void note_heard(struct ki_listener *l, uint64_t now_ns)
{
    if (ki_link_read(&l->link, now_ns))
        show_link(l, now_ns);
    if (l->link.ups == l->ups_told + 1)
        l->ups_told = l->link.ups;
}

static bool must_wait(const struct ki_listener *l)
{
    return !l->started || l->holding || !STAILQ_EMPTY(&l->backlog.items);
}

static void put_off(struct ki_listener *l, const struct ki_batch_id *id, bool reconnected,
                    const struct kve_message *message)
{
    static struct kv_log_rate rate;
    int rc = ki_backlog_put(&l->backlog, &l->env->backlog, id, reconnected, message->payload.data,
                            message->payload.len);

    if (rc < 0 && kv_log_allowed(&rate, 3))
        kv_log_warn("indexer", "the replay backlog is full: a batch was dropped",
                    "worker=%" PRIu64 " rank=%" PRIu32 " bytes=%zu waiting=%" PRIu64, l->instance,
                    l->rank, message->payload.len, l->backlog.bytes);
}

/* One live message. False: there is none. */
static bool read_live(struct ki_listener *l, uint64_t now_ns)
{
    bool first = !l->has_connection, anew;
    struct kve_message message;
    struct ki_envelope e;
    struct ki_batch_id id;
    int rc = ki_socket_receive(l->sub, &e);

    if (rc == -EAGAIN)
        return false;
    if (ki_link_is_well(&l->link, now_ns))
        show_link(l, now_ns);
    if (rc < 0 || kve_message_parse_live(e.spans, e.n, &message) < 0) {
        count_malformed(l, "a message that is no batch was passed over");
        ki_envelope_fini(&e);
        return rc == 0 || rc == -EPROTO;
    }
    id = identify(&message);
    l->turn_bytes += message.payload.len;
    anew = is_new_connection(l, &e.frames[e.n - 2]);
    if (first || anew)
        note_heard(l, now_ns);
    if (must_wait(l))
        put_off(l, &id, anew, &message);
    else
        offer_live(l, &id, &e.frames[e.n - 1], anew, now_ns);
    ki_envelope_fini(&e);
    return true;
}

/* The oldest batch of the backlog. */
static void read_backlog(struct ki_listener *l, uint64_t now_ns)
{
    struct ki_backlog_item *item = ki_backlog_take(&l->backlog);

    l->turn_bytes += zmq_msg_size(&item->payload);
    offer_live(l, &item->id, &item->payload, item->reconnected, now_ns);
    ki_backlog_free(&l->backlog, &l->env->backlog, item);
}

/* @message NULL: one that makes no sense. */
static unsigned offer_replayed(struct ki_listener *l, const struct kve_message *message,
                               uint64_t now_ns)
{
    struct ki_stream_stats before;
    struct ki_batch_id id;
    unsigned steps = 0;

    if (message && !message->is_end)
        id = identify(message);
    pthread_mutex_lock(&l->lock);
    if (!l->gone) {
        before = l->stream.stats;
        if (message && !message->is_end) {
            steps = ki_stream_replayed(&l->stream, &id, now_ns);
            write_index(l, steps, message->payload.data, message->payload.len, now_ns);
        } else {
            steps = message ? ki_stream_replay_end(&l->stream, now_ns)
                            : ki_stream_replay_failed(&l->stream, now_ns);
            write_index(l, steps, NULL, 0, now_ns);
        }
        report(l, &before, steps);
    }
    pthread_mutex_unlock(&l->lock);
    return steps;
}

/* One message of a replay. False: there is none. */
static bool read_replay(struct ki_listener *l, uint64_t now_ns)
{
    struct kve_message message;
    struct ki_envelope e;
    unsigned steps;
    int rc = ki_socket_receive(l->dealer, &e);

    if (rc == -EAGAIN)
        return false;
    if (rc < 0 || kve_message_parse_replay(e.spans, e.n, &message) < 0) {
        count_malformed(l, "an answer to a replay request makes no sense");
        steps = offer_replayed(l, NULL, now_ns);
    } else {
        steps = offer_replayed(l, &message, now_ns);
    }
    for (size_t i = 0; i < e.n; i++)
        l->turn_bytes += e.spans[i].len;
    ki_envelope_fini(&e);
    work_sockets(l, steps, now_ns);
    return true;
}

/* The earlier of two times, of which 0 is never. */
static uint64_t earlier(uint64_t a_ns, uint64_t b_ns)
{
    return !a_ns || (b_ns && b_ns < a_ns) ? b_ns : a_ns;
}

/* When a tick is wanted; 0: never. */
static uint64_t next_deadline(const struct ki_listener *l)
{
    uint64_t deadline_ns = l->started ? ki_stream_deadline(&l->stream) : 0;

    if (l->detached)
        return 0;
    if (!l->sub)
        return l->retry_at_ns;
    deadline_ns = earlier(deadline_ns, l->replay_again_ns);
    if (l->link.state == KI_LINK_LOST)
        deadline_ns = earlier(deadline_ns, l->link.dead_at_ns);
    if (l->target.named)
        deadline_ns = earlier(deadline_ns, l->look_again_ns);
    if (l->link_told == KI_TOLD_NOTHING)
        deadline_ns = earlier(deadline_ns, l->silent_ns);
    return deadline_ns;
}

/* A batch of the backlog may be offered. */
static bool has_work(const struct ki_listener *l)
{
    return l->started && !l->holding && !STAILQ_EMPTY(&l->backlog.items);
}

static bool read_messages(struct ki_listener *l, uint64_t now_ns)
{
    l->turn_bytes = 0;
    if (!l->sub || l->detached)
        return false; /* sub_ready keeps what was noticed for later */
    for (int i = 0; i < TURN && l->turn_bytes < TURN_BYTES; i++) {
        bool more = false;

        if (l->dealer && l->dealer_ready)
            more = l->dealer_ready = read_replay(l, now_ns) && l->dealer;
        /* Also while a replay runs: what libzmq reads ahead isn't bounded in bytes. */
        if (has_work(l))
            read_backlog(l, now_ns);
        else if (l->sub_ready)
            l->sub_ready = read_live(l, now_ns);
        if (!more && !l->sub_ready && !has_work(l))
            return false;
    }
    return true;
}

/* A new connection, once all that came over earlier ones has been read and no replay runs. */
static void tell_connection(struct ki_listener *l, uint64_t now_ns)
{
    unsigned steps = 0;

    /* All batches published during the peer's dump have been read. */
    if (l->started && !l->sub_ready && !has_work(l) && !l->holding && l->applier.overlaps) {
        pthread_mutex_lock(&l->lock);
        l->applier.overlaps = false;
        pthread_mutex_unlock(&l->lock);
    }

    if (!l->started || l->sub_ready || has_work(l) || l->link.state != KI_LINK_UP ||
        l->ups_told == l->link.ups)
        return;
    pthread_mutex_lock(&l->lock);
    if (!l->gone && l->stream.state == KI_STREAM_LIVE) {
        /* The first one, made before recovery, is older than the peer's dump. */
        bool anew = l->ups_at_start != 1 || l->link.ups != 1;

        steps = ki_stream_connected(&l->stream, anew, now_ns);
        l->ups_told = l->link.ups;
    }
    pthread_mutex_unlock(&l->lock);
    work_sockets(l, steps, now_ns);
}

/* Log once each time that a connection comes or goes, and when there is none SILENT_NS after the start. */
static void log_link(struct ki_listener *l, uint64_t now_ns)
{
    static struct kv_log_rate rate;
    bool up = l->link.state == KI_LINK_UP;
    const char *said = "connected to a worker";
    char quoted[120];

    if (l->link_told == (up ? KI_TOLD_UP : KI_TOLD_DOWN))
        return;
    if (!up && l->link_told == KI_TOLD_NOTHING) {
        if (!l->silent_ns)
            l->silent_ns = now_ns + SILENT_NS;
        if (now_ns < l->silent_ns)
            return;
    }
    if (!up)
        said = l->link_told == KI_TOLD_UP ? "lost a worker's connection; trying again and again"
                                          : "a worker does not answer; trying again and again";
    kv_log_quote(quoted, sizeof(quoted), up || !l->link.problem ? "" : l->link.problem);
    if (kv_log_allowed(&rate, LINK_LINES))
        kv_log_(up ? KV_LOG_INFO : KV_LOG_WARN, "indexer", said,
                "worker=%" PRIu64 " rank=%" PRIu32 " endpoint=%s reason=%s", l->instance, l->rank,
                l->endpoint, quoted);
    l->link_told = up ? KI_TOLD_UP : KI_TOLD_DOWN;
}

/* Keep the times that look_again goes by, and the log. */
static void note_link(struct ki_listener *l, uint64_t now_ns)
{
    log_link(l, now_ns);
    if (l->link.state == KI_LINK_UP) {
        l->was_up = true;
        l->look_again_ns = 0;
    } else if (!l->look_again_ns) {
        l->lost_ns = now_ns;
        l->look_again_ns = now_ns + KV_NS_PER_S;
    }
}

bool ki_listener_service(struct ki_listener *l, uint64_t now_ns)
{
    bool more;

    if (l->link_ready && ki_link_read(&l->link, now_ns))
        show_link(l, now_ns);
    l->link_ready = false;
    if (l->sub)
        note_link(l, now_ns);
    more = read_messages(l, now_ns);
    tell_connection(l, now_ns);
    l->deadline_ns = next_deadline(l);
    return more;
}

/* -- the event thread: what is due ------------------------------------------------------------- */

static void drop_held(struct ki_listener *l)
{
    if (l->holding)
        zmq_msg_close(&l->held);
    l->holding = false;
    ki_backlog_clear(&l->backlog, &l->env->backlog);
}

static void close_sub(struct ki_listener *l)
{
    ki_link_close(&l->link, l->sub, l->epoll_fd);
    ki_socket_close(l->sub, l->epoll_fd);
    l->sub = NULL;
    l->sub_ready = l->link_ready = false;
}

static void detach(struct ki_listener *l)
{
    close_replay(l);
    close_sub(l);
    l->link_told = KI_TOLD_NOTHING; /* closed, not lost */
    l->silent_ns = 0;
    drop_held(l);
    pthread_mutex_lock(&l->lock);
    l->connected = false;
    ki_stream_detach(&l->stream);
    pthread_mutex_unlock(&l->lock);
}

/* Connect to l->target.where. */
static int open_sub(struct ki_listener *l)
{
    int rc = ki_socket_open(l->env->zmq, ZMQ_SUB, l->target.where, KI_RECEIVE_QUEUE, KI_MAX_MESSAGE,
                            l->epoll_fd, KI_PUMP_SUB(l), &l->sub);

    if (rc == 0)
        rc = ki_link_open(&l->link, l->env->zmq, l->sub, l->epoll_fd, KI_PUMP_LINK(l));
    if (rc == 0)
        rc = ki_socket_connect(l->sub, l->target.where);
    if (rc < 0)
        close_sub(l);
    return rc;
}

static void attach(struct ki_listener *l, uint64_t now_ns)
{
    int rc = ki_target_find(&l->target, l->env->resolver, RESOLVED_AGE_MS);

    if (l->replay_endpoint) /* so that it is known when it is needed */
        (void)ki_target_find(&l->replay_target, l->env->resolver, RESOLVED_AGE_MS);
    if (rc == -EINPROGRESS) {
        l->retry_at_ns = now_ns + RESOLVE_POLL_NS;
        return;
    }
    if (rc < 0) {
        fail_connect(l, kv_resolver_strerror(rc), now_ns);
        return;
    }
    rc = open_sub(l);
    if (rc < 0) {
        fail_connect(l, zmq_strerror(-rc), now_ns);
        return;
    }
    l->sub_ready = l->link_ready = true; /* connecting may have swallowed a notice */
    l->retry_at_ns = 0;
    l->lost_ns = now_ns;
    l->look_again_ns = now_ns + CONNECT_RETRY_NS;
    pthread_mutex_lock(&l->lock);
    l->last_error[0] = '\0';
    pthread_mutex_unlock(&l->lock);
}

/* Without a connection, the name may have moved, or have another address that answers. What the
 * last connection brought is read first. */
static void look_again(struct ki_listener *l, uint64_t now_ns)
{
    int rc;

    note_link(l, now_ns);
    if (!l->target.named || !l->look_again_ns || now_ns < l->look_again_ns)
        return;
    l->look_again_ns = now_ns + RESOLVE_POLL_NS;
    if (l->sub_ready || l->holding)
        return;
    rc = ki_target_turn(&l->target, l->env->resolver, 1000,
                        !l->was_up || now_ns - l->lost_ns > LOYALTY_NS);
    if (rc == -EINPROGRESS)
        return;
    l->look_again_ns = now_ns + CONNECT_RETRY_NS;
    if (rc <= 0)
        return;
    l->was_up = false;
    close_sub(l);
    attach(l, now_ns);
}

/*
 * libzmq has given the connection up. What it brought is read first: closing the socket would lose
 * it. A replay that runs goes on; what is missed meanwhile shows as a gap.
 */
static void reopen(struct ki_listener *l, uint64_t now_ns)
{
    static struct kv_log_rate rate;

    if (l->sub_ready) {
        l->link.dead_at_ns = now_ns + l->link.delay_ns;
        return;
    }
    if (kv_log_allowed(&rate, 5))
        kv_log_warn("indexer", "the publisher broke the protocol or sent too much: connecting anew",
                    "worker=%" PRIu64 " rank=%" PRIu32 " endpoint=%s limit=%" PRId64, l->instance,
                    l->rank, l->endpoint, KI_MAX_MESSAGE);
    close_sub(l);
    ki_link_back_off(&l->link);
    pthread_mutex_lock(&l->lock);
    l->reopened++;
    pthread_mutex_unlock(&l->lock);
    attach(l, now_ns);
}

static void start(struct ki_listener *l, uint64_t now_ns)
{
    pthread_mutex_lock(&l->lock);
    l->started = true;
    l->applier.overlaps = l->stream.seeded || l->stream.cursorless;
    l->ups_at_start = l->link.ups;
    ki_stream_start(&l->stream, now_ns);
    pthread_mutex_unlock(&l->lock);
}

static unsigned tick_stream(struct ki_listener *l, uint64_t now_ns)
{
    struct ki_stream_stats before;
    unsigned steps = 0;

    pthread_mutex_lock(&l->lock);
    if (!l->gone) {
        before = l->stream.stats;
        steps = ki_stream_tick(&l->stream, now_ns);
        report(l, &before, steps);
    }
    pthread_mutex_unlock(&l->lock);
    return steps;
}

bool ki_listener_tick(struct ki_listener *l, uint64_t now_ns)
{
    bool gone, paused;

    pthread_mutex_lock(&l->lock);
    gone = l->gone;
    paused = l->paused;
    pthread_mutex_unlock(&l->lock);
    if (gone)
        return false;
    if (paused != l->detached) {
        l->detached = paused;
        if (paused)
            detach(l);
    }
    if (!l->detached && !l->sub && now_ns >= l->retry_at_ns)
        attach(l, now_ns);
    else if (ki_link_is_dead(&l->link, now_ns))
        reopen(l, now_ns);
    else if (l->sub)
        look_again(l, now_ns);
    if (!l->sub) {
        l->deadline_ns = next_deadline(l);
        return true;
    }
    /* Acquire pairs with ki_registry_go: what recovery adopted is seen by whoever sees this. */
    if (!l->started && !atomic_load_explicit(&l->env->held, memory_order_acquire))
        start(l, now_ns);
    if (l->replay_again_ns && now_ns >= l->replay_again_ns)
        open_replay(l, now_ns);
    if (l->started)
        work_sockets(l, tick_stream(l, now_ns), now_ns);
    tell_connection(l, now_ns);
    l->deadline_ns = next_deadline(l);
    return true;
}

void ki_listener_close(struct ki_listener *l)
{
    detach(l);
    if (l->has_connection)
        zmq_msg_close(&l->connection);
    l->has_connection = false;
}
