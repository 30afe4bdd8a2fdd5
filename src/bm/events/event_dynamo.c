// SPDX-License-Identifier: Apache-2.0
/*
 * Sink for Dynamo's event plane: RouterEvents in envelopes, over ZMQ or NATS.
 *
 *   changes ─► runs ─► RouterEvents, up to 64 KiB ─► envelope ─► PUB socket, or queue of NATS
 *
 * All of it happens on the event manager's thread, which owns the socket. A message that NATS's queue
 * has no room for is taken back: its numbers go to the next one. So numbers never have a gap by our
 * doing, and "cleared" alone tells of a loss. A gap would cost more: Dynamo's router forgets the rank's
 * blocks, and drops the events that showed the gap.
 *
 * A message names each stored block by the hash of its tokens. Copies in further tiers come without
 * tokens, so the sink remembers the hashes of blocks that are in some tier. A block that entered its
 * first tier without tokens is told when these are known: the registry writes it again (told.c).
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <zmq.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "base/core/utf8.h"
#include "bm/events/chains.h"
#include "bm/events/events.h"
#include "event/router/envelope.h"
#include "event/router/router_msgpack.h"
#include "event/wire/frames.h"
#include "plane/discovery/discovery.h"
#include "plane/nats.h"

#define MAX_MESSAGE 65536u       /* bytes of events in an envelope, and one event more */
#define MAX_RUN 512u             /* blocks of an event */
#define MAX_BLOCK (4u << 20)     /* tokens of a block */
#define SUBSCRIBER_MESSAGES 4096 /* that wait for a ZMQ subscriber: 256 MiB at most */
#define LINGER_MS 1000
#define MEND_MS 1000      /* longest wait for room to publish a loss */
#define PUBLISHER_BITS 53 /* of a publisher's number: Dynamo's have no more */
/* Blocks whose tokens are remembered. Beyond these, copies of others in further tiers are left out. */
#define MAX_PLACED ((size_t)1 << 24)

struct kvbm_dynamo {
    enum kvbm_event_scope scope;
    uint32_t block_size;
    uint64_t seed; /* of tokens' hashes */
    struct kvp_dynamo_source source;
    char subject[512]; /* NATS */
    struct kvp_nats *nats;
    void *zmq, *socket; /* ZMQ */
    struct kvp_discovery *discovery;

    /* the events' thread only */
    uint64_t sequence, event_id; /* of the next message; of the last event */
    uint64_t lost;               /* changes lost, and not yet told */
    bool told_left_out;
    struct kv_buf events, message;
    uint32_t n_events;
    uint64_t n_changes; /* of these events */
    /* Blocks in some tier that were told since the last loss, and the hashes of their tokens. */
    struct kvbm_chains placed;
    struct kv_block blocks[MAX_RUN]; /* of the event being built: STORED */
    uint64_t hashes[MAX_RUN];

    pthread_mutex_t lock; /* of stats */
    struct kvbm_dynamo_stats stats;
};

/* -- messages ---------------------------------------------------------------------------------- */

static int send_zmq(struct kvbm_dynamo *d)
{
    uint8_t publisher[8], sequence[8], head[KVE_DIRECT_HEAD];
    struct kv_buf last = KV_BUF_INIT;
    int rc;

    kve_sequence_put(publisher, d->source.publisher);
    kve_sequence_put(sequence, d->sequence);
    kve_direct_head_put(head, d->message.len);
    kv_buf_append(&last, head, sizeof(head));
    kv_buf_append(&last, d->message.data, d->message.len);
    rc = last.error;
    if (rc == 0 && (zmq_send(d->socket, KVE_ENVELOPE_TOPIC, strlen(KVE_ENVELOPE_TOPIC),
                             ZMQ_SNDMORE | ZMQ_DONTWAIT) < 0 ||
                    zmq_send(d->socket, publisher, sizeof(publisher), ZMQ_SNDMORE) < 0 ||
                    zmq_send(d->socket, sequence, sizeof(sequence), ZMQ_SNDMORE) < 0 ||
                    zmq_send(d->socket, last.data, last.len, ZMQ_DONTWAIT) < 0))
        rc = -errno;
    kv_buf_fini(&last);
    return rc;
}

static int send_nats(struct kvbm_dynamo *d)
{
    const struct kvp_nats_msg msg = {
        .subject = d->subject, .data = d->message.data, .len = d->message.len};

    return kvp_nats_publish(d->nats, &msg);
}

/* Forget the events that were packed. */
static void begin_events(struct kvbm_dynamo *d)
{
    kv_buf_clear(&d->events);
    d->n_events = 0;
    d->n_changes = 0;
}

static int write_message(struct kvbm_dynamo *d)
{
    struct kve_envelope envelope = {
        .publisher = d->source.publisher,
        .sequence = d->sequence,
        .published_ms = kv_wall_ns() / KV_NS_PER_MS,
        .topic = {KVE_ENVELOPE_TOPIC, strlen(KVE_ENVELOPE_TOPIC)},
    };
    struct kv_buf payload = KV_BUF_INIT;

    kv_msgpack_put_array(&payload, d->n_events);
    kv_buf_append(&payload, d->events.data, d->events.len);
    envelope.payload = (struct kv_str){payload.data, payload.len};
    kv_buf_clear(&d->message);
    kve_envelope_write(&d->message, &envelope);
    if (payload.error || d->events.error)
        d->message.error = -ENOMEM;
    kv_buf_fini(&payload);
    return d->message.error;
}

/* Send the events that were packed. On an error their numbers are free again. */
static int flush(struct kvbm_dynamo *d)
{
    int err;

    if (!d->n_events)
        return 0;
    err = write_message(d);
    if (err == 0)
        err = d->nats ? send_nats(d) : send_zmq(d);
    if (err < 0) {
        d->event_id -= d->n_events;
        begin_events(d);
        return err;
    }
    d->sequence++;
    pthread_mutex_lock(&d->lock);
    d->stats.messages++;
    d->stats.events += d->n_events;
    d->stats.bytes += d->message.len;
    pthread_mutex_unlock(&d->lock);
    begin_events(d);
    return 0;
}

static void put(struct kvbm_dynamo *d, struct kve_router_event *event)
{
    event->holder = (struct kv_holder){d->source.worker, d->source.rank};
    event->event_id = ++d->event_id;
    kve_router_event_pack(&d->events, event);
    d->n_events++;
}

/* -- changes ----------------------------------------------------------------------------------- */

/* Note that @n changes are lost, and forget which blocks were told: followers forget them, too. */
static void lose(struct kvbm_dynamo *d, uint64_t n)
{
    d->lost += n;
    kvbm_chains_clear(&d->placed);
}

/* Publish a loss. Wait for room first, since the next event may be far off. */
static int mend(struct kvbm_dynamo *d)
{
    struct kve_router_event cleared = {.type = KVE_OP_CLEAR};
    int err;

    if (!d->lost)
        return 0;
    if (d->nats)
        (void)kvp_nats_flush(d->nats, MEND_MS);
    put(d, &cleared);
    err = flush(d);
    if (err < 0)
        return err;
    d->lost = 0;
    pthread_mutex_lock(&d->lock);
    d->stats.losses++;
    pthread_mutex_unlock(&d->lock);
    return 0;
}

/* Count a block that can't be told: of another group than 0, of which Dynamo knows nothing; stored
 * without tokens that are known, or with another number of them. */
static void leave_out(struct kvbm_dynamo *d, const struct kvbm_event *event)
{
    if (!d->told_left_out)
        kv_log_warn("kvbm", "blocks without tokens, of another size or group, aren't published",
                    "group=%u tokens=%u published=%u", event->group, event->n_tokens,
                    d->block_size);
    d->told_left_out = true;
    pthread_mutex_lock(&d->lock);
    d->stats.left_out++;
    pthread_mutex_unlock(&d->lock);
}

/* Find the hash of a stored block's tokens. *@told: followers know the block already. Returns false when
 * the hash isn't known. */
static bool find_tokens(const struct kvbm_dynamo *d, const struct kvbm_event *event, uint64_t id,
                        uint64_t *hash, bool *told)
{
    const struct kvbm_chain_of *block;

    if (event->n_tokens && event->n_tokens != d->block_size)
        return false;
    block = kvbm_chains_find(&d->placed, id);
    *told = block || (!event->first && d->placed.n >= d->placed.max);
    if (event->n_tokens)
        *hash = kve_hash_block(d->seed, event->tokens, d->block_size, NULL, 0);
    else if (block)
        *hash = block->tokens_hash;
    return event->n_tokens || block;
}

/* Tell whether followers get a change. *@hash becomes that of a stored block's tokens. */
static bool is_told(struct kvbm_dynamo *d, const struct kvbm_event *event, uint64_t id,
                    uint64_t *hash)
{
    bool consolidated = d->scope == KVBM_EVENTS_CONSOLIDATED, told = false;

    if (event->type == KVBM_EVENT_REMOVED) {
        if (event->group && (event->last || !consolidated))
            leave_out(d, event);
        return !event->group && (event->last || !consolidated);
    }
    if (event->group || !find_tokens(d, event, id, hash, &told)) {
        if (event->first || !consolidated)
            leave_out(d, event);
        return false;
    }
    return !consolidated || !told;
}

/* Remember a change that followers get. @hash: of a stored block's tokens. */
static void note(struct kvbm_dynamo *d, const struct kvbm_event *event, uint64_t id, uint64_t hash)
{
    struct kvbm_chain_of *block, was;

    if (event->type == KVBM_EVENT_REMOVED) {
        if (event->last)
            (void)kvbm_chains_take(&d->placed, id, &was);
        return;
    }
    block = kvbm_chains_enter(&d->placed, id);
    if (block)
        block->tokens_hash = hash;
}

/* Pack an event of the @n changes from @run on, whose blocks are in d->blocks and d->hashes. */
static void put_run(struct kvbm_dynamo *d, const struct kvbm_event *run, size_t n)
{
    bool stored = run->type == KVBM_EVENT_STORED;
    struct kve_router_event event = {
        .type = stored ? KVE_OP_STORE : KVE_OP_REMOVE,
        /* consolidated: followers know one tier, as in the ZMQ sink */
        .tier = d->scope == KVBM_EVENTS_PER_TIER ? run->tier : KV_TIER_DEVICE,
        .has_parent = stored && run->parent,
        .parent = stored && run->parent ? kvp_key_number(run->parent, run->key_len) : 0,
        .blocks = d->blocks,
        .hashes = d->hashes,
        .n = n,
    };

    put(d, &event);
    d->n_changes += n;
}

/* Send the events that were packed. Their changes are lost where that fails. */
static void flush_changes(struct kvbm_dynamo *d)
{
    uint64_t n = d->n_changes;

    if (flush(d) < 0)
        lose(d, n);
}

/* Publish a run of changes, behind a loss that isn't published yet. Returns false, and the run is lost,
 * when the loss can't be: one wait a batch is enough, since other sinks wait for this one. */
static bool end_run(struct kvbm_dynamo *d, const struct kvbm_event *run, size_t n)
{
    if (!n)
        return true;
    if (d->lost && mend(d) < 0) {
        lose(d, n);
        return false;
    }
    put_run(d, run, n);
    if (d->events.len >= MAX_MESSAGE)
        flush_changes(d);
    return true;
}

static void publish(void *arg, const struct kvbm_event *events, size_t n, uint64_t lost)
{
    const struct kvbm_event *run = NULL, *last = NULL;
    struct kvbm_dynamo *d = arg;
    size_t len = 0;

    if (lost)
        lose(d, lost);
    for (const struct kvbm_event *event = events; event < events + n; event++) {
        uint64_t id = kvbm_chain_id(event->group, event->key, event->key_len), hash = 0;

        if (!is_told(d, event, id, &hash))
            continue;
        if (len == MAX_RUN || (len && !kvbm_event_follows(last, event))) {
            if (!end_run(d, run, len)) {
                lose(d, (uint64_t)(events + n - event));
                return;
            }
            len = 0;
        }
        note(d, event, id, hash); /* behind a loss that the run before may be */
        d->hashes[len] = kvp_key_number(event->key, event->key_len);
        d->blocks[len] = (struct kv_block){d->hashes[len], hash};
        run = len++ ? run : event;
        last = event;
    }
    if (!end_run(d, run, len))
        return;
    flush_changes(d);
    (void)mend(d);
}

/* -- life -------------------------------------------------------------------------------------- */

static void dynamo_free(void *arg)
{
    struct kvbm_dynamo *d = arg;

    kvp_discovery_close(d->discovery);
    kvp_nats_close(d->nats, LINGER_MS);
    if (d->socket)
        zmq_close(d->socket);
    if (d->zmq)
        zmq_ctx_term(d->zmq);
    kv_buf_fini(&d->events);
    kv_buf_fini(&d->message);
    kvbm_chains_fini(&d->placed);
    pthread_mutex_destroy(&d->lock);
    free(d);
}

static int refuse(const char *why)
{
    kv_log_error("kvbm", "the options of a sink for Dynamo are refused", "why=\"%s\"", why);
    return -EINVAL;
}

static int choose_publisher(struct kvbm_dynamo *d)
{
    uint64_t number = 0;

    while (!number) {
        if (getrandom(&number, sizeof(number), 0) != sizeof(number))
            return -EIO;
        number >>= 64 - PUBLISHER_BITS;
    }
    d->source.publisher = d->stats.publisher = number;
    return 0;
}

/* Bind, and write the address that the discovery tells. */
static int open_zmq(struct kvbm_dynamo *d, const char *address, const char *advertise, char *ret,
                    size_t size)
{
    int linger = LINGER_MS, hwm = SUBSCRIBER_MESSAGES;
    char bound[256];
    size_t len = sizeof(bound);
    const char *port;

    d->zmq = zmq_ctx_new();
    d->socket = d->zmq ? zmq_socket(d->zmq, ZMQ_PUB) : NULL;
    if (!d->socket)
        return -errno;
    (void)zmq_setsockopt(d->socket, ZMQ_LINGER, &linger, sizeof(linger));
    (void)zmq_setsockopt(d->socket, ZMQ_SNDHWM, &hwm, sizeof(hwm));
    if (zmq_bind(d->socket, address) < 0 ||
        zmq_getsockopt(d->socket, ZMQ_LAST_ENDPOINT, bound, &len) < 0)
        return -errno;
    port = strrchr(bound, ':');
    if (!advertise)
        snprintf(ret, size, "%s", bound);
    else if (snprintf(ret, size, "tcp://%s%s", advertise, port ? port : "") >= (int)size)
        return refuse("advertise is too long");
    return 0;
}

static bool is_wildcard(const char *address)
{
    return strstr(address, "//*") || strstr(address, "//0.0.0.0:") || strstr(address, "//[::]:");
}

static int read_opts(struct kvbm_dynamo *d, const struct kvbm_dynamo_opts *o)
{
    const char *endpoint = KV_OPT(o, endpoint, NULL), *address = KV_OPT(o, address, NULL);
    const char *lora = KV_OPT(o, lora_name, NULL), *salt = KV_OPT(o, cache_salt, NULL);

    if ((lora && !kv_utf8_valid(lora)) || (salt && !kv_utf8_valid(salt)))
        return refuse("lora_name and cache_salt are UTF-8");
    if (!endpoint || kvp_dynamo_endpoint_parse(endpoint, &d->source.of) < 0)
        return refuse("endpoint is NAMESPACE.COMPONENT.ENDPOINT");
    if (!KV_OPT(o, nats, NULL) == !address)
        return refuse("give either nats or address");
    if (address && strncmp(address, "tcp://", 6) != 0)
        return refuse("address is tcp://HOST:PORT");
    if (address && is_wildcard(address) && !KV_OPT(o, advertise, NULL))
        return refuse("address has no host: advertise one");
    d->scope = KV_OPT(o, scope, KVBM_EVENTS_PER_TIER);
    if ((unsigned)d->scope > KVBM_EVENTS_CONSOLIDATED)
        return refuse("no such scope");
    d->block_size = o->block_size;
    d->source.worker = o->worker;
    d->source.rank = o->rank;
    d->seed = kve_seed(lora, lora ? strlen(lora) : 0, salt, salt ? strlen(salt) : 0);
    snprintf(d->subject, sizeof(d->subject), "namespace.%s.component.%s.endpoint.%s.%s",
             d->source.of.ns, d->source.of.component, d->source.of.name, KVE_ENVELOPE_TOPIC);
    return 0;
}

static int announce(struct kvbm_dynamo *d, const struct kvbm_dynamo_opts *o)
{
    const struct kvp_discovery_opts opts = {
        .where = o->discovery,
        .user = KV_OPT(o, user, NULL),
        .password = KV_OPT(o, password, NULL),
        .tls_ca = KV_OPT(o, tls_ca, NULL),
        .tls_cert = KV_OPT(o, tls_cert, NULL),
        .tls_key = KV_OPT(o, tls_key, NULL),
        .ttl_s = KV_OPT(o, ttl_s, 0),
    };
    struct kvp_dynamo_channel channel = {.of = d->source.of, .publisher = d->source.publisher};
    struct kv_error error = {0};
    int err;

    snprintf(channel.address, sizeof(channel.address), "%s", d->stats.address);
    err = kvp_discovery_announce(&opts, &d->source, d->socket ? &channel : NULL, &d->discovery,
                                 &error);
    return err == -EINVAL && *error.text ? refuse(error.text) : err;
}

int kvbm_events_add_dynamo(struct kvbm_events *events, const struct kvbm_dynamo_opts *o,
                           struct kvbm_dynamo **ret)
{
    static const struct kvbm_sink_ops ops = {.fn = publish, .again = true, .close = dynamo_free};
    struct kvbm_dynamo *d;
    int err;

    if (!events || !kv_sized(o, "kvbm_dynamo_opts") ||
        o->size < offsetof(struct kvbm_dynamo_opts, advertise) || !o->discovery || !o->endpoint ||
        !o->worker || !o->block_size || o->block_size > MAX_BLOCK)
        return -EINVAL;
    d = calloc(1, sizeof(*d));
    if (!d)
        return -ENOMEM;
    pthread_mutex_init(&d->lock, NULL);
    d->placed.max = MAX_PLACED;
    err = read_opts(d, o);
    if (err == 0)
        err = choose_publisher(d);
    if (err == 0 && KV_OPT(o, nats, NULL))
        err = kvp_nats_open(o->nats, NULL, NULL, &d->nats);
    else if (err == 0)
        err = open_zmq(d, o->address, KV_OPT(o, advertise, NULL), d->stats.address,
                       sizeof(d->stats.address));
    if (err == 0)
        err = announce(d, o);
    if (err == 0)
        err = kvbm_events_add_sink(events, KVBM_EVENTS_PER_TIER, &ops, d);
    if (err < 0)
        dynamo_free(d);
    else if (ret)
        *ret = d;
    return err;
}

int kvbm_dynamo_get_stats(struct kvbm_dynamo *d, struct kvbm_dynamo_stats *ret)
{
    struct kvp_discovery_info info;
    struct kvbm_dynamo_stats stats;

    if (!d || !kv_sized(ret, "kvbm_dynamo_stats"))
        return -EINVAL;
    kvp_discovery_get_info(d->discovery, &info);
    pthread_mutex_lock(&d->lock);
    stats = d->stats;
    pthread_mutex_unlock(&d->lock);
    stats.announced = info.current;
    stats.discovery_failures = info.failures;
    KV_GIVE(ret, &stats);
    return 0;
}
