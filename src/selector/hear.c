// SPDX-License-Identifier: Apache-2.0
/* Apply to the books here the notices of a peer. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "selector/selector.h"

#define CLOCKS_APART 1000 /* two clocks differ by less than the 1000th part of a time */

/* Return a time of the peer's clock by the clock here, @now_ns at most. */
static uint64_t time_here(const struct ksel_peer *peer, uint64_t ns, uint64_t now_ns)
{
    int64_t age = (int64_t)(now_ns - (ns + peer->offset_ns));

    if (age < 0)
        return now_ns;
    return now_ns - KV_MIN((uint64_t)age, now_ns);
}

/*
 * Take the least delay between the peer's clock and the receipt here as the difference of the clocks: the
 * others came later than they could. One clock may be slower than the other, so the least one grows with time.
 */
static void measure_clock(struct ksel_peer *peer, uint64_t at_ns, uint64_t now_ns, bool first)
{
    uint64_t offset = now_ns - at_ns, growth = (now_ns - peer->measured_ns) / CLOCKS_APART;

    if (first || (int64_t)(offset - peer->offset_ns) < (int64_t)growth)
        peer->offset_ns = offset;
    else
        peer->offset_ns += growth;
    peer->measured_ns = now_ns;
}

/* Return true when @origin itself is followed, and has told all of its bookings. */
static bool speaks_for_itself(const struct ksel *s, uint64_t origin)
{
    for (const struct ksel_peer *p = s->peers.list; p; p = p->next)
        if (p->origin == origin && !p->in_snapshot)
            return true;
    return false;
}

/* -- bookings ------------------------------------------------------------------------------------ */

/*
 * Note how far a booking is that is in the books. When its first token came isn't known: at its creation, so
 * that no speed is learned.
 */
static void note_progress(struct ksel_fleet *fleet, const struct kvsel_booking *b,
                          const struct ksel_notice *n, uint64_t at_ns)
{
    uint64_t more = n->output > b->output ? n->output - b->output : 0;

    if (n->first_token && !b->first_token)
        (void)kvsel_first_token(fleet->books, n->id, n->id_len, b->created_ns);
    (void)kvsel_output(fleet->books, n->id, n->id_len, more, at_ns);
}

/*
 * Settle an id that two replicas have booked. Returns true when the peer's booking stays: the one here was
 * freed.
 */
static bool settle(struct ksel *s, struct ksel_fleet *fleet, const struct kvsel_booking *here,
                   const struct ksel_notice *n)
{
    char quoted[160], id[80];
    bool stays = n->origin < here->origin || (n->origin == here->origin && n->stamp > here->stamp);

    if (here->origin != n->origin) { /* else: the end of the first one wasn't heard */
        s->peers.conflicts++;
        (void)snprintf(id, sizeof(id), "%.*s", (int)KV_MIN(n->id_len, sizeof(id) - 1), n->id);
        kv_log_warn("peers", "two replicas have booked one id; one booking stays",
                    "id=%s worker=%" PRIu64, kv_log_quote(quoted, sizeof(quoted), id),
                    stays ? n->worker.worker : here->worker.worker);
    }
    if (stays)
        (void)kvsel_free(fleet->books, n->id, n->id_len, KVSEL_LOST, 0);
    return stays;
}

/* Enter a peer's booking into the books. */
static void enter(struct ksel *s, const struct ksel_peer *peer, const struct ksel_notice *n,
                  uint64_t now_ns)
{
    struct ksel_fleet *fleet = ksel_fleet_make(s, n->model, n->group, n->block_size);
    uint64_t created_ns = time_here(peer, n->created_ns, now_ns);
    uint64_t progress_ns = time_here(peer, n->progress_ns, now_ns);
    uint64_t *hashes = calloc(n->n_hashes * KSEL_LOG_STRIDE + 1, sizeof(*hashes));
    struct kvsel_request r = KVSEL_REQUEST_INIT;
    struct kvsel_choice c = KVSEL_CHOICE_INIT;
    struct kvsel_booking made = KVSEL_BOOKING_INIT;
    int rc = fleet && hashes ? 0 : -ENOMEM;

    r.tokens = n->tokens;
    r.hashes = hashes;
    r.n_hashes = KV_MIN(n->n_hashes * KSEL_LOG_STRIDE, n->tokens / n->block_size);
    r.lora = n->lora;
    r.session = n->session;
    r.origin = n->origin;
    r.stamp = n->stamp;
    c.worker = n->worker;
    c.prefill = n->prefill;
    c.paired = n->paired;
    c.uncovered = n->uncovered;
    for (size_t i = 0; hashes && i < n->n_hashes; i++) /* libkvselect reads none between these */
        hashes[(i + 1) * KSEL_LOG_STRIDE - 1] = n->hashes[i];
    if (rc == 0)
        rc = kvsel_book(fleet->books, n->id, n->id_len, &r, &c, created_ns);
    free(hashes);
    if (rc < 0) {
        kv_log_warn("peers", "a peer's booking isn't in the books here", "peer=%s error=%s",
                    peer->url, strerror(-rc));
        return;
    }
    made.created_ns = created_ns;
    note_progress(fleet, &made, n, progress_ns);
}

static void hear_booked(struct ksel *s, struct ksel_peer *peer, const struct ksel_notice *n,
                        uint64_t now_ns)
{
    struct kvsel_booking here = KVSEL_BOOKING_INIT;
    struct ksel_fleet *fleet;

    if (n->origin == peer->origin && peer->in_snapshot)
        kv_buf_append(&peer->seen, &n->stamp, sizeof(n->stamp));
    if (ksel_has_ended(s, n->origin, n->stamp))
        return;
    fleet = ksel_fleet_booked(s, n->id, n->id_len, &here);
    if (fleet && here.origin == n->origin && here.stamp == n->stamp) {
        note_progress(fleet, &here, n, time_here(peer, n->progress_ns, now_ns));
        return;
    }
    if (n->origin == s->peers.origin ||
        (n->origin != peer->origin && speaks_for_itself(s, n->origin)))
        return; /* its end was told, or will be, by its origin */
    if (!fleet || settle(s, fleet, &here, n))
        enter(s, peer, n, now_ns);
}

/*
 * Note progress or the end of a booking that was told as @n. An end that a third replica tells may come before
 * the booking, which its origin tells: it is remembered, or the booking would stay until it expires.
 */
static void hear_change(struct ksel *s, const struct ksel_peer *peer, const struct ksel_notice *n,
                        uint64_t now_ns)
{
    struct kvsel_booking b = KVSEL_BOOKING_INIT;
    struct ksel_fleet *fleet = ksel_fleet_booked(s, n->id, n->id_len, &b);
    uint64_t at_ns = time_here(peer, n->at_ns, now_ns);

    if (!fleet || b.origin != n->origin || b.stamp != n->stamp) {
        if (n->kind == KSEL_NOTICE_FREED && !peer->in_snapshot && n->origin != peer->origin &&
            n->origin != s->peers.origin && !ksel_has_ended(s, n->origin, n->stamp))
            ksel_remember_end(&s->peers, n->origin, n->stamp, n->id, n->id_len, n->lost);
        return;
    }
    if (n->kind == KSEL_NOTICE_FREED)
        (void)kvsel_free(fleet->books, n->id, n->id_len, n->lost ? KVSEL_LOST : KVSEL_DONE, at_ns);
    else if (n->kind == KSEL_NOTICE_FIRST_TOKEN)
        (void)kvsel_first_token(fleet->books, n->id, n->id_len, at_ns);
    else if (n->kind == KSEL_NOTICE_OUTPUT) /* what isn't known here is no progress */
        (void)kvsel_output(fleet->books, n->id, n->id_len,
                           n->output > b.output ? n->output - b.output : 0, at_ns);
}

/* -- snapshots ----------------------------------------------------------------------------------- */

static int by_number(const void *a, const void *b)
{
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;

    return (x > y) - (x < y);
}

/* Bookings of the peer that its snapshot lacks: of each its length and id. */
struct missing {
    const struct ksel_peer *peer;
    struct kv_buf ids;
};

static void note_missing(void *arg, const struct kvsel_booking *b)
{
    struct missing *m = arg;
    const struct kv_buf *seen = &m->peer->seen;

    if (b->origin != m->peer->origin || b->stamp > m->peer->snapshot_stamp ||
        (seen->len &&
         bsearch(&b->stamp, seen->data, seen->len / sizeof(uint64_t), sizeof(uint64_t), by_number)))
        return;
    kv_buf_append(&m->ids, &b->id_len, sizeof(b->id_len));
    kv_buf_append(&m->ids, b->id, b->id_len);
}

/* End the bookings of the peer that its snapshot lacks. */
static void hear_complete(struct ksel *s, struct ksel_peer *peer, uint64_t now_ns)
{
    struct missing missing = {.peer = peer};

    if (!peer->in_snapshot || peer->seen.error)
        return;
    if (peer->seen.len)
        qsort(peer->seen.data, peer->seen.len / sizeof(uint64_t), sizeof(uint64_t), by_number);
    for (struct ksel_fleet *f = s->fleets; f; f = f->next) {
        size_t len;

        kv_buf_clear(&missing.ids);
        (void)kvsel_each_booking(f->books, note_missing, &missing);
        for (size_t at = 0; at < missing.ids.len; at += sizeof(len) + len) {
            memcpy(&len, missing.ids.data + at, sizeof(len));
            (void)kvsel_free(f->books, missing.ids.data + at + sizeof(len), len, KVSEL_DONE,
                             now_ns);
        }
    }
    kv_buf_fini(&missing.ids);
    kv_buf_fini(&peer->seen);
    peer->in_snapshot = false;
    peer->failed = false;
    peer->tried = true;
    s->peers.snapshots++;
    kv_log_info("peers", "bookings of a peer are followed", "peer=%s", peer->url);
}

/* -- all of it ----------------------------------------------------------------------------------- */

static void hear_plain(struct ksel *s, struct ksel_peer *peer, const struct ksel_notice *n,
                       uint64_t now_ns)
{
    switch (n->kind) {
    case KSEL_NOTICE_HELLO:
        peer->origin = n->origin;
        peer->in_snapshot = true;
        break;
    case KSEL_NOTICE_SNAPSHOT:
        peer->snapshot_stamp = n->stamp;
        kv_buf_clear(&peer->seen);
        break;
    case KSEL_NOTICE_COMPLETE:
        hear_complete(s, peer, now_ns);
        break;
    default:
        break;
    }
}

void ksel_hear(struct ksel_peer *peer, const struct ksel_notice *n, uint64_t now_ns)
{
    struct ksel *s = peer->s;

    measure_clock(peer, n->at_ns, now_ns, n->kind == KSEL_NOTICE_HELLO);
    pthread_mutex_lock(&s->lock);
    s->peers.heard += n->id != NULL;
    if (!n->id)
        hear_plain(s, peer, n, now_ns);
    else if (n->kind == KSEL_NOTICE_BOOKED)
        hear_booked(s, peer, n, now_ns);
    else
        hear_change(s, peer, n, now_ns);
    pthread_mutex_unlock(&s->lock);
}
