// SPDX-License-Identifier: Apache-2.0
/*
 * Read messages from sockets and backlog for the stream.
 *
 *     SUB ─────► take_live ─┬─ may be offered ────────────────────────────► stream
 *                           └─ must wait ─► backlog ─ the wait is over ───► stream
 *     DEALER ──► read_replay ─────────────────────────────────────────────► stream
 *
 * Invariants: live batches reach the stream in the order of their coming, so a new one waits behind
 * the backlog. And no message is trusted: what can't be parsed is counted, and passed over.
 */
#include <inttypes.h>
#include <string.h>

#include "base/core/log.h"
#include "base/core/xxh.h"
#include "base/json/msgpack.h"
#include "indexer/stream/listener_impl.h"
#include "indexer/zmq/socket.h"

/*
 * Messages and bytes per turn: long enough to pay for the turn, short enough that no stream starves
 * others, for messages of any size.
 */
#define TURN 512
#define TURN_BYTES (1u << 20)
#define BACKLOG_TURN 64u /* batches of the backlog that are offered together */
#define MAX_KEYS 4u      /* keys of a map batch among which its timestamp is looked for */

/* -- what a message is ------------------------------------------------------------------------- */

/*
 * Go to the timestamp of a batch: the first element of an array, "ts" among the first keys of a map,
 * or "published_at" among those of an envelope, with its unit in *@ret_unit. Behind a map's events it
 * isn't found: to pass over them takes as long as to decode them.
 */
static bool find_timestamp(struct kv_msgpack *m, double *ret_unit)
{
    enum kv_msgpack_type type = kv_msgpack_peek(m);
    struct kv_str bytes;
    uint32_t n;

    *ret_unit = 1;
    if (type == KV_MSGPACK_BIN) { /* the batch is packed as bytes */
        bytes = kv_msgpack_bin(m);
        kv_msgpack_init(m, bytes.p, bytes.len);
        type = kv_msgpack_peek(m);
    }

    if (type == KV_MSGPACK_ARRAY)
        return kv_msgpack_array(m) > 0;
    n = type == KV_MSGPACK_MAP ? kv_msgpack_map(m) : 0;
    for (n = KV_MIN(n, MAX_KEYS); n && kv_msgpack_peek(m) == KV_MSGPACK_STR; n--) {
        struct kv_str key = kv_msgpack_str(m);

        if (kv_str_eq(key, "published_at"))
            *ret_unit = 1e-3;
        if (kv_str_eq(key, "published_at") || kv_str_eq(key, "ts"))
            return true;
        type = kv_msgpack_peek(m);
        if (type == KV_MSGPACK_ARRAY || type == KV_MSGPACK_MAP)
            return false;
        kv_msgpack_skip(m);
    }
    return false;
}

/*
 * Read the publisher's clock. An engine's batch that has milliseconds is left as it is: the stream takes
 * that for a publisher that numbers from 1 (stream_first.c).
 */
static double peek_timestamp(const void *payload, size_t len)
{
    enum kv_msgpack_type type;
    struct kv_msgpack m;
    double unit;

    kv_msgpack_init(&m, payload, len);
    if (!find_timestamp(&m, &unit))
        return 0;
    type = kv_msgpack_peek(&m);
    return type == KV_MSGPACK_FLOAT || type == KV_MSGPACK_UINT ? kv_msgpack_double(&m) * unit : 0;
}

struct ki_batch_id ki_listener_identify(const struct kve_message *message)
{
    return (struct ki_batch_id){
        .sequence = message->sequence,
        .digest = kv_xxh64(message->payload.data, message->payload.len, 0),
        .timestamp = peek_timestamp(message->payload.data, message->payload.len),
    };
}

/* @frames: of a live message; 0: something else. */
static void count_malformed(struct ki_listener *l, const char *what, size_t frames)
{
    static struct kv_log_rate rate;

    pthread_mutex_lock(&l->lock);
    l->applier.stats.malformed++;
    l->odd_frames = frames ? (uint32_t)frames : l->odd_frames;
    ki_listener_unlock(l);
    if (kv_log_allowed(&rate, 3))
        kv_log_warn("indexer", what, "worker=%s rank=%" PRIu32 " endpoint=%s", l->who, l->rank,
                    l->endpoint);
}

/* -- live messages ----------------------------------------------------------------------------- */

static bool must_wait(const struct ki_listener *l)
{
    return !l->started || l->holding || l->copying || !STAILQ_EMPTY(&l->backlog.items);
}

static void put_off(struct ki_listener *l, struct ki_live *batch)
{
    static struct kv_log_rate rate;
    size_t len = batch->payload.len;
    int rc = ki_backlog_put(&l->backlog, &l->env->backlog, &batch->id, batch->reconnected,
                            batch->payload.data, len);

    if (rc < 0 && kv_log_allowed(&rate, 3))
        kv_log_warn("indexer", "the replay backlog is full: a batch was dropped",
                    "worker=%s rank=%" PRIu32 " bytes=%zu waiting=%" PRIu64, l->who, l->rank, len,
                    l->backlog.bytes);
}

/* Offer batches to the stream, or put those that must wait into the backlog. */
static void offer(struct ki_listener *l, struct ki_live *batches, size_t n, uint64_t now_ns)
{
    size_t done = 0;

    while (done < n) {
        if (must_wait(l))
            put_off(l, &batches[done++]);
        else
            done += ki_listener_offer_live(l, batches + done, n - done, now_ns);
    }
}

/* Return true for a message that another worker's registration is for. */
static bool is_of_other_topic(const struct ki_listener *l, const struct kve_message *message)
{
    const char *topic = l->target.place.topic;

    return *topic && (strlen(topic) != message->topic.len ||
                      memcmp(topic, message->topic.data, message->topic.len) != 0);
}

/* Return true for a message of another publisher than the registration's. */
static bool is_of_other_publisher(const struct ki_listener *l, const struct kve_message *message)
{
    return l->has_publisher && (!message->has_publisher || message->publisher != l->publisher);
}

/*
 * Read a message without a number, and number it: from 0 on over each connection, as an engine that
 * restarts does, since nothing tells whether it has.
 */
static bool take_short(struct ki_listener *l, const struct kve_span *frames, size_t n,
                       struct kve_message *ret)
{
    bool numbered;

    if (kve_message_parse_short(frames, n, ret, &numbered) < 0)
        return false;
    if (numbered || is_of_other_topic(l, ret))
        return true;
    ret->sequence = l->unnumbered++;
    pthread_mutex_lock(&l->lock);
    l->applier.unnumbered = true;
    ki_listener_unlock(l);
    return true;
}

/*
 * Take a live message that has been read. Returns 1 with *@ret, whose payload is valid until more
 * is read; 0 for an invalid message; -EAGAIN when there is none. *@ret_first: the first of its
 * connection.
 */
static int take_live(struct ki_listener *l, struct ki_live *ret, bool *ret_first, uint64_t now_ns)
{
    struct ki_zmtp_message whole;
    struct kve_message message;

    if (!ki_sub_next(&l->sub, &whole, now_ns))
        return -EAGAIN;
    if (l->ups_of_batch != l->sub.ups)
        l->unnumbered = 0;
    if (whole.n_frames > KVE_MAX_FRAMES ||
        (kve_message_parse_live(whole.spans, whole.n_frames, &message) < 0 &&
         !take_short(l, whole.spans, whole.n_frames, &message))) {
        count_malformed(l, "a message that is no batch was passed over", whole.n_frames);
        return 0;
    }
    if (is_of_other_topic(l, &message))
        return 0;
    if (is_of_other_publisher(l, &message)) {
        count_malformed(l, "a message of another publisher was passed over", 0);
        return 0;
    }
    ret->id = ki_listener_identify(&message);
    ret->payload = message.payload;
    *ret_first = l->ups_of_batch != l->sub.ups;
    ret->reconnected = *ret_first && l->sub.ups > 1;
    l->ups_of_batch = l->sub.ups;
    return 1;
}

/* Read bytes. Returns false when there are none for now. */
static bool fill(struct ki_listener *l, uint64_t now_ns)
{
    size_t n = ki_sub_fill(&l->sub, now_ns);

    l->turn_bytes += n;
    if (l->sub.changed)
        ki_listener_note_link(l, now_ns);
    l->sub_ready = n > 0;
    return n > 0;
}

/*
 * Read up to @max live messages, but no more bytes once the turn is over, and offer them together:
 * one lock of the stream, and one store of what belongs together. The stream hears of a connection
 * with its first batch, after the batches before. Returns the number of messages.
 */
static size_t read_live(struct ki_listener *l, size_t max, uint64_t now_ns)
{
    struct ki_live batches[TURN];
    size_t n = 0, n_read = 0;

    while (n_read < max) {
        bool first = false;
        int rc = take_live(l, &batches[n], &first, now_ns);

        if (rc == -EAGAIN) {
            offer(l, batches, n, now_ns); /* reading more overwrites them */
            n = 0;
            if (n_read >= TURN || l->turn_bytes >= TURN_BYTES || !fill(l, now_ns))
                break;
            continue;
        }
        n_read++;
        n += (size_t)rc;
        if (first && l->sub.ups == l->ups_told + 1)
            ki_listener_note_told(l);
        if (n == TURN) {
            offer(l, batches, n, now_ns);
            n = 0;
        }
    }
    offer(l, batches, n, now_ns);
    return n_read;
}

/*
 * Offer the oldest batches of the backlog together: one by one they would take longer than live ones,
 * and a busy stream would never catch up. Returns the number of finished batches.
 */
static size_t read_backlog(struct ki_listener *l, uint64_t now_ns)
{
    struct ki_live batches[BACKLOG_TURN];
    struct ki_backlog_item *item;
    size_t n = 0, bytes = 0, done;

    STAILQ_FOREACH(item, &l->backlog.items, next)
    {
        batches[n++] = (struct ki_live){
            .id = item->id, .reconnected = item->reconnected, .payload = {item->data, item->len}};
        bytes += item->len;
        if (n == BACKLOG_TURN || bytes >= TURN_BYTES)
            break;
    }
    done = ki_listener_offer_live(l, batches, n, now_ns);
    for (size_t i = 0; i < done && (item = ki_backlog_take(&l->backlog)); i++) {
        l->turn_bytes += item->len;
        ki_backlog_free(&l->backlog, &l->env->backlog, item);
    }
    return done;
}

/* -- replays ----------------------------------------------------------------------------------- */

/* Read one message of a replay. Returns false when there is none. */
static bool read_replay(struct ki_listener *l, uint64_t now_ns)
{
    struct kve_message message;
    struct ki_batch_id id = {0};
    struct ki_envelope e;
    int rc = ki_socket_receive(l->dealer, &e);
    bool sound;

    if (rc == -EAGAIN)
        return false;
    sound = rc == 0 && kve_message_parse_replay(e.spans, e.n, &message) == 0;
    if (!sound)
        count_malformed(l, "an answer to a replay request makes no sense", 0);
    else if (!message.is_end)
        id = ki_listener_identify(&message);
    for (size_t i = 0; i < e.n; i++)
        l->turn_bytes += e.spans[i].len;
    ki_listener_offer_replayed(l, &id, sound ? &message : NULL, now_ns);
    ki_envelope_fini(&e);
    return true;
}

/* -- a turn ------------------------------------------------------------------------------------ */

/* Returns true when there may be more. */
static bool read_turn(struct ki_listener *l, uint64_t now_ns)
{
    size_t n = 0;

    while (n < TURN && l->turn_bytes < TURN_BYTES) {
        size_t n_live = 0;
        bool more = false;

        if (l->dealer && l->dealer_ready && !l->copying)
            more = l->dealer_ready = read_replay(l, now_ns) && l->dealer;
        /* Read live messages during a replay, too: the publisher drops what isn't read. */
        if (ki_listener_has_backlog(l))
            n_live = read_backlog(l, now_ns);
        else if (l->sub_ready)
            n_live = read_live(l, l->dealer ? 1 : SIZE_MAX, now_ns);
        n += KV_MAX(n_live, (size_t)1);
        if (!more && !l->sub_ready && !ki_listener_has_backlog(l))
            return false;
    }
    return true;
}

bool ki_listener_read(struct ki_listener *l, uint64_t now_ns)
{
    bool more;

    l->turn_bytes = 0;
    if (!ki_listener_is_open(l) || l->detached)
        return false; /* sub_ready stays set for later */
    ki_sub_begin(&l->sub, l->room);
    more = read_turn(l, now_ns);
    ki_sub_end(&l->sub, now_ns);
    return more;
}
