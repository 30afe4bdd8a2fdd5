// SPDX-License-Identifier: Apache-2.0
/* Tell the peers of bookings: notices as they come about, and snapshots. */
#include <errno.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/mix.h"
#include "selector/selector.h"

#define ALIVE_NS (250 * KV_NS_PER_MS) /* longest silence of a stream */
#define PIECE (64u << 10)             /* bytes handed to a stream at a time */
#define CHUNK 64                      /* bookings of a snapshot that are read with the lock held */

/* -- ends that peers may not have heard of ------------------------------------------------------- */

/* Return the number of the chain of a booking's end. */
static size_t chain_of(uint64_t origin, uint64_t stamp)
{
    return kv_mix(origin ^ kv_mix(stamp)) % KSEL_ENDS;
}

/* Free the place, if it is taken. */
static void forget_end(struct ksel_end *ends, size_t at)
{
    struct ksel_end *end = &ends[at];
    uint32_t *link = &ends[chain_of(end->origin, end->stamp)].first;

    if (!end->id)
        return;
    while (*link != at + 1)
        link = &ends[*link - 1].next;
    *link = end->next;
    free(end->id);
}

void ksel_remember_end(struct ksel_peers *p, uint64_t origin, uint64_t stamp, const char *id,
                       size_t len, bool lost)
{
    struct ksel_end end = {.origin = origin,
                           .stamp = stamp,
                           .at_ns = kv_now_ns(),
                           .id = malloc(len + 1),
                           .id_len = len,
                           .lost = lost};
    uint32_t *first;

    if (!p->ends)
        p->ends = calloc(KSEL_ENDS, sizeof(*p->ends));
    if (!p->ends || !end.id) {
        free(end.id); /* the end is only told */
        return;
    }
    memcpy(end.id, id, len);
    forget_end(p->ends, p->next_end);
    first = &p->ends[chain_of(origin, stamp)].first;
    end.next = *first;
    *first = (uint32_t)p->next_end + 1;
    end.first = p->ends[p->next_end].first;
    p->ends[p->next_end] = end;
    p->next_end = (p->next_end + 1) % KSEL_ENDS;
}

bool ksel_has_ended(const struct ksel *s, uint64_t origin, uint64_t stamp)
{
    const struct ksel_end *ends = s->peers.ends;
    uint32_t at = ends ? ends[chain_of(origin, stamp)].first : 0;

    while (at && (ends[at - 1].stamp != stamp || ends[at - 1].origin != origin))
        at = ends[at - 1].next;
    return at != 0;
}

/* -- notices ------------------------------------------------------------------------------------- */

static void add(struct ksel *s, const struct ksel_notice *notice)
{
    struct kv_buf *line = &s->peers.line;

    kv_buf_clear(line);
    ksel_notice_write(notice, line);
    if (!line->error)
        ksel_notices_add(&s->peers.notices, line->data, line->len);
}

void ksel_tell_booked(struct ksel *s, const struct ksel_fleet *fleet, const char *id, size_t len,
                      const struct kvsel_request *request, const struct kvsel_choice *choice,
                      uint64_t now_ns)
{
    const struct ksel_notice notice = {
        .kind = KSEL_NOTICE_BOOKED,
        .at_ns = now_ns,
        .origin = request->origin,
        .stamp = request->stamp,
        .id = id,
        .id_len = len,
        .model = fleet->model,
        .group = fleet->group,
        .lora = request->lora,
        .session = request->session,
        .block_size = fleet->block_size,
        .worker = choice->worker,
        .prefill = choice->prefill,
        .paired = choice->paired,
        .tokens = request->tokens,
        .uncovered = choice->uncovered,
        .created_ns = now_ns,
        .progress_ns = now_ns,
        .hashes = request->hashes,
        .n_hashes = request->n_hashes / KSEL_LOG_STRIDE,
        .stride = KSEL_LOG_STRIDE,
    };

    if (s->peers.active)
        add(s, &notice);
}

void ksel_tell(struct ksel *s, enum ksel_notice_kind kind, const struct kvsel_booking *booking,
               uint64_t output, bool lost)
{
    const struct ksel_notice notice = {
        .kind = kind,
        .at_ns = kv_now_ns(),
        .origin = booking->origin,
        .stamp = booking->stamp,
        .id = booking->id,
        .id_len = booking->id_len,
        .output = output,
        .lost = lost,
    };

    if (!s->peers.active)
        return;
    add(s, &notice);
    if (kind == KSEL_NOTICE_FREED && booking->origin != s->peers.origin)
        ksel_remember_end(&s->peers, booking->origin, booking->stamp, booking->id, booking->id_len,
                          lost);
}

/* -- a stream ------------------------------------------------------------------------------------ */

struct stream {
    struct ksel *s;
    struct ksel_follower follower;
    struct kv_buf out;
    struct kv_buf ids; /* of the snapshot: a size_t and the bytes, each */
    size_t at;         /* of ids: the next one */
};

static int flush(struct stream *t)
{
    int rc = t->out.error;

    if (rc == 0 && t->out.len)
        rc = kh_pipe_write(t->follower.pipe, t->out.data, t->out.len);
    kv_buf_clear(&t->out);
    return rc;
}

static void note_plain(struct stream *t, enum ksel_notice_kind kind, uint64_t stamp)
{
    const struct ksel_notice notice = {
        .kind = kind, .at_ns = kv_now_ns(), .origin = t->s->peers.origin, .stamp = stamp};

    ksel_notice_write(&notice, &t->out);
}

static void collect_id(void *arg, const struct kvsel_booking *booking)
{
    struct stream *t = arg;

    kv_buf_append(&t->ids, &booking->id_len, sizeof(booking->id_len));
    kv_buf_append(&t->ids, booking->id, booking->id_len);
}

/* Write the ends that peers may not have heard of. The caller holds the lock. */
static void note_ends(struct stream *t)
{
    const struct ksel_end *ends = t->s->peers.ends;
    uint64_t now_ns = kv_now_ns(), age_ns = t->s->options->booking_expiry_ms * KV_NS_PER_MS;

    for (size_t i = 0; ends && i < KSEL_ENDS && ends[i].id; i++) {
        const struct ksel_end *e = &ends[i];
        const struct ksel_notice notice = {.kind = KSEL_NOTICE_FREED,
                                           .at_ns = now_ns,
                                           .origin = e->origin,
                                           .stamp = e->stamp,
                                           .id = e->id,
                                           .id_len = e->id_len,
                                           .lost = e->lost};

        if (now_ns - e->at_ns < age_ns) /* else all have let it expire */
            ksel_notice_write(&notice, &t->out);
    }
}

/* Join the followers, and note what there is at this moment. */
static int begin(struct stream *t)
{
    struct ksel *s = t->s;
    int rc;

    pthread_mutex_lock(&s->lock);
    rc = ksel_notices_join(&s->peers.notices, &t->follower);
    if (rc == 0) {
        s->peers.active = true;
        note_plain(t, KSEL_NOTICE_HELLO, 0);
        note_plain(t, KSEL_NOTICE_SNAPSHOT, s->peers.stamp);
        for (const struct ksel_fleet *f = s->fleets; f; f = f->next)
            (void)kvsel_each_booking(f->books, collect_id, t);
        note_ends(t);
    }
    pthread_mutex_unlock(&s->lock);
    if (rc == 0 && t->ids.error) {
        ksel_notices_leave(&s->peers.notices, &t->follower);
        rc = -ENOMEM;
    }
    return rc;
}

/* Write the booking of an id, if it is still there. The caller holds the lock. */
static void note_booking(struct stream *t, const char *id, size_t len)
{
    struct kvsel_booking b = KVSEL_BOOKING_INIT;
    const struct ksel_fleet *fleet = ksel_fleet_booked(t->s, id, len, &b);
    const struct ksel_notice notice = {
        .kind = KSEL_NOTICE_BOOKED,
        .at_ns = kv_now_ns(),
        .origin = b.origin,
        .stamp = b.stamp,
        .id = id,
        .id_len = len,
        .model = fleet ? fleet->model : NULL,
        .group = fleet ? fleet->group : NULL,
        .block_size = fleet ? fleet->block_size : 0,
        .worker = b.worker,
        .prefill = b.prefill,
        .paired = b.paired,
        .first_token = b.first_token,
        .tokens = b.tokens,
        .uncovered = b.uncovered,
        .output = b.output,
        .created_ns = b.created_ns,
        .progress_ns = b.progress_ns,
        .hashes = b.hashes,
        .n_hashes = b.n_hashes,
    };

    if (fleet)
        ksel_notice_write(&notice, &t->out);
}

static int write_snapshot(struct stream *t)
{
    int rc = flush(t);

    while (rc == 0 && t->at < t->ids.len) {
        pthread_mutex_lock(&t->s->lock);
        for (int i = 0; i < CHUNK && t->at < t->ids.len; i++) {
            size_t len;

            memcpy(&len, t->ids.data + t->at, sizeof(len));
            note_booking(t, t->ids.data + t->at + sizeof(len), len);
            t->at += sizeof(len) + len;
        }
        pthread_mutex_unlock(&t->s->lock);
        rc = flush(t);
    }
    kv_buf_fini(&t->ids);
    note_plain(t, KSEL_NOTICE_COMPLETE, 0);
    return rc == 0 ? flush(t) : rc;
}

/* Write notices until the follower leaves, lags too far behind, or the service ends. */
static int write_notices(struct stream *t)
{
    int rc = 0;

    while (rc == 0) {
        long n = ksel_notices_take(&t->s->peers.notices, &t->follower, &t->out, PIECE);

        if (n == -EPIPE)
            return 0;
        if (n < 0)
            return (int)n;
        if (n == 0) {
            uint64_t until_ns = kv_now_ns() + ALIVE_NS;

            rc = kh_pipe_wait(t->follower.pipe, until_ns);
            if (kv_now_ns() >= until_ns)
                note_plain(t, KSEL_NOTICE_ALIVE, 0);
        }
        if (rc == 0)
            rc = flush(t);
    }
    return rc;
}

static int produce(void *arg, struct kh_pipe *pipe)
{
    struct stream t = {.s = arg, .follower = {.pipe = pipe}};
    int rc = begin(&t);

    if (rc == 0) {
        rc = write_snapshot(&t);
        if (rc == 0)
            rc = write_notices(&t);
        ksel_notices_leave(&t.s->peers.notices, &t.follower);
    }
    kv_buf_fini(&t.ids);
    kv_buf_fini(&t.out);
    return rc;
}

void ksel_api_bookings(void *service, struct kh_request *request, struct kh_reply *reply)
{
    (void)request;
    reply->content_type = "application/x-ndjson";
    reply->produce = produce;
    reply->produce_arg = ksel_of(service);
    reply->endless = true;
}
