// SPDX-License-Identifier: Apache-2.0
/* The stream rules in a random world: a publisher that restarts, a peer that has followed it, a
 * network that loses and repeats batches, and a failing replay service. The test checks invariants
 * instead of a second implementation: applied batches are of one process, in order, once, and
 * complete unless the view is called partial. Single cases: test_stream.c. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "indexer/streams.h"
#include "models/record.h"

static uint64_t random_state;

static uint64_t draw(uint64_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state % n;
}

#define QUEUE 4096

struct message {
    uint64_t process, sequence;
    uint32_t connection;
};

struct world {
    struct kh_stream s;
    uint64_t now;
    /* the publisher */
    uint64_t process, next, first, ring;
    uint32_t connection;
    bool router_alive, untimed;
    uint64_t router_loss; /* percent of replies */
    bool router_loses;    /* or has lost some */
    /* The router lives as long as the connection and loses nothing: what its ring has is never missed. */
    bool steady;
    /* what is on its way to the subscriber */
    struct message queue[QUEUE];
    size_t head, tail;
    /* the driver */
    uint32_t last_connection, told_connection;
    bool told;
    bool heard;     /* a batch has come over the connection */
    bool tail_lost; /* the last batch was lost to a subscriber that was there: nothing tells */
    bool holding;
    struct message held;
    struct message dropped; /* the last one that was dropped before its turn */
    bool requested;
    uint64_t request;
    bool overran; /* the answer under way begins behind the request */
    uint64_t missed;
    ki_reasons lost;
    /* what the index would have: batches of one process, in order */
    bool any, contiguous, mixed;
    uint64_t applied_process, applied_first, applied_last;
    uint64_t applied_total;
};

static void world_apply(struct world *w, const struct message *m)
{
    if (!w->any) {
        w->any = w->contiguous = true;
        w->mixed = false;
        w->applied_process = m->process;
        w->applied_first = m->sequence;
    } else {
        /*
         * Never two processes' blocks, but for what can't be known yet: the news of a restart is
         * still in the queue behind this batch, or nobody could be asked and the view is partial.
         */
        if (w->applied_process != m->process) {
            assert_true(is_partial(&w->s) || m->connection != w->connection);
            w->mixed = true;
        }
        assert_true(m->sequence > w->applied_last); /* once, and in order */
        w->contiguous &= m->sequence == w->applied_last + 1;
    }
    w->applied_last = m->sequence;
    w->applied_total++;
}

/* Record what the index would have: a query's answer depends on that alone. */
static void world_record(const struct world *w)
{
    uint64_t has = !w->any ? 0
                           : 1 + w->applied_process * 7 + w->applied_first * 5 +
                                 w->applied_last * 3 + w->contiguous * 64 + w->mixed * 128;

    record_answer(w->now / (SECOND / 100) + w->next, has, has, is_partial(&w->s));
}

static void world_check(struct world *w)
{
    world_record(w);
    if (!ki_stream_reasons(&w->s) &&
        w->dropped.sequence) /* it waits for a replay, and the view says so */
        assert_true(w->any ? w->dropped.process != w->applied_process ||
                                 w->dropped.sequence <= w->applied_last
                           : w->dropped.process != w->process);
    if (!w->any || is_partial(&w->s))
        return;
    assert_true(w->contiguous); /* whole, unless called partial */
    assert_int_equal(w->applied_first, w->first);
    assert_true(ki_stream_has_position(&w->s));
    assert_int_equal(w->s.position, w->applied_last);
}

/* Nothing counts as missed that the ring has: of the process that lives, and not a late batch 0. */
static void world_check_missed(struct world *w, const struct message *m)
{
    ki_reasons lost = w->s.reasons & KI_REASONS_LOST;

    if (w->steady && !w->overran && m && m->process == w->process && m->sequence > 0) {
        assert_int_equal(w->s.stats.missed, w->missed);
        assert_int_equal(lost & ~w->lost, 0);
    }
    w->missed = w->s.stats.missed;
    w->lost = lost;
}

static void world_do(struct world *w, unsigned steps, const struct message *m)
{
    if (steps & KI_STEP_PURGE)
        w->any = false;
    if (steps & KI_STEP_APPLY)
        world_apply(w, m);
    if (steps & KI_STEP_HOLD) {
        assert_false(w->holding);
        w->holding = true;
        w->held = *m;
    }
    if (steps & KI_STEP_REQUEST) {
        w->requested = true;
        w->request = w->s.request;
    }
    if (steps & KI_STEP_RESUME)
        w->requested = false;
    world_check(w);
    world_check_missed(w, m);
}

static struct ki_batch_id world_batch(const struct world *w, const struct message *m)
{
    struct ki_batch_id id = batch(m->process, m->sequence);

    if (w->untimed)
        id.timestamp = 0;
    return id;
}

static void world_live(struct world *w, const struct message *m)
{
    struct ki_batch_id id = world_batch(w, m);
    bool reconnected = w->last_connection != m->connection;
    unsigned steps;

    w->last_connection = m->connection;
    steps = ki_stream_live(&w->s, &id, reconnected, w->now);
    assert_int_equal(
        !!(steps & KI_STEP_APPLY) + !!(steps & KI_STEP_DROP) + !!(steps & KI_STEP_HOLD), 1);
    if (steps & KI_STEP_DROP &&
        !(w->any && w->applied_process == m->process && m->sequence <= w->applied_last))
        w->dropped = *m;
    world_do(w, steps, m);
}

static void world_resume(struct world *w, unsigned steps)
{
    struct message m = w->held;

    if (!(steps & KI_STEP_RESUME) || !w->holding)
        return;
    w->holding = false;
    world_live(w, &m);
}

/*
 * The answer to a request, as the publisher's process is now. @cut_after: the batch behind which the
 * connection to the service ends.
 */
static void world_answer(struct world *w, uint64_t cut_after)
{
    uint64_t start = w->next > w->ring + w->first ? w->next - w->ring : w->first;
    unsigned steps = 0;

    w->requested = false;
    w->overran = start > w->request && start > w->first;
    if (start < w->request)
        start = w->request;
    for (uint64_t i = start; i < w->next; i++) {
        struct message m = {w->process, i, w->connection};
        struct ki_batch_id id = world_batch(w, &m);

        /* A ROUTER drops what its queue doesn't hold: never the first. */
        if (i > start && draw(100) < w->router_loss)
            continue;
        steps = ki_stream_replayed(&w->s, &id, w->now);
        world_do(w, steps, &m);
        if (steps & (KI_STEP_RESUME | KI_STEP_REQUEST))
            break;
        if (i == cut_after)
            break;
    }
    if (!(steps & (KI_STEP_RESUME | KI_STEP_REQUEST)) && cut_after >= w->next) {
        steps = ki_stream_replay_end(&w->s, w->now);
        world_do(w, steps, NULL);
    }
    w->overran = false;
    world_resume(w, steps);
}

/* The stream hears of a connection when what the one before brought has been read, or waits. */
static void world_connect(struct world *w)
{
    bool anew = w->told || w->connection != 0;

    if (w->told && w->told_connection == w->connection)
        return;
    if (w->s.state != KI_STREAM_LIVE && draw(20) == 0)
        ki_stream_reachable(&w->s, w->now);
    if (w->s.state != KI_STREAM_LIVE ||
        (w->head < w->tail && w->queue[w->head % QUEUE].connection != w->connection))
        return;
    w->told = true;
    w->told_connection = w->connection;
    world_do(w, ki_stream_connected(&w->s, anew, w->now), NULL);
}

static void world_step(struct world *w)
{
    uint64_t deadline;
    unsigned steps;

    if (draw(3))
        world_connect(w);
    deadline = ki_stream_deadline(&w->s);

    w->now += SECOND / 100;
    if (deadline && w->now >= deadline) {
        steps = ki_stream_tick(&w->s, w->now);
        world_do(w, steps, NULL);
        world_resume(w, steps);
    }
    if (w->requested && w->router_alive)
        world_answer(w, UINT64_MAX);
    else if (!w->holding && w->head < w->tail)
        world_live(w, &w->queue[w->head++ % QUEUE]);
}

static void world_publish(struct world *w, bool lost)
{
    struct message m = {w->process, w->next++, w->connection};

    lost |= w->tail - w->head >= QUEUE - 1;
    w->tail_lost = lost && (w->heard || (w->told && w->told_connection == w->connection));
    if (lost)
        return;
    w->heard = true;
    w->queue[w->tail++ % QUEUE] = m;
    if (draw(20) == 0)
        w->queue[w->tail++ % QUEUE] = m; /* twice */
}

static void world_restart(struct world *w)
{
    if (draw(2))
        ki_stream_disconnected(&w->s, w->now);
    w->process++;
    w->connection++;
    w->heard = false;
    w->next = w->first; /* the same kind of publisher */
    for (uint64_t lost = draw(4) ? 0 : draw(30); lost; lost--)
        world_publish(w, true); /* before the subscriber is back */
}

/*
 * The publisher can't be reached for 6 s or 70 s, and may be another process afterwards. The driver
 * drops with the blocks what waits.
 */
static void world_vanish(struct world *w)
{
    bool forgets = draw(2);
    unsigned steps;

    if (w->requested && draw(2)) { /* the service vanishes, too, maybe while it answers */
        if (draw(2))
            world_answer(w, w->request + draw(30));
        w->requested = false;
    }
    ki_stream_disconnected(&w->s, w->now);
    w->now += (forgets ? 70 : 6) * SECOND;
    steps = ki_stream_tick_absence(&w->s, w->now);
    assert_true(!w->any || is_partial(&w->s));
    assert_true(!w->any || !forgets || (steps & KI_STEP_PURGE));
    world_do(w, steps, NULL);
    if (steps & KI_STEP_PURGE) {
        w->holding = w->requested = false;
        w->head = w->tail;
    }
    if (draw(3) == 0) {
        world_restart(w);
        return;
    }
    w->connection++;
    w->heard = false;
    for (uint64_t lost = draw(2) ? 0 : draw(30); lost; lost--)
        world_publish(w, true);
}

/* A peer has followed the first process for a while; it may be gone when the stream begins. */
static void world_recover(struct world *w, bool may_restart)
{
    uint64_t n = 1 + draw(30);

    w->any = w->contiguous = true;
    w->applied_first = w->first;
    w->applied_last = w->first + n - 1;
    w->next = w->first + n;
    ki_stream_seed(&w->s, w->applied_last, w->untimed ? 0 : batch(0, w->applied_last).timestamp,
                   false);
    if (may_restart && draw(2)) {
        world_restart(w);
        w->connection = 0; /* the first that this stream knows, older than the dump */
        w->s.reasons |= KI_BECAUSE(UNPROVED); /* the peer has lost its own, and says so */
    }
    for (uint64_t lost = draw(2) ? 0 : draw(60); may_restart && lost; lost--)
        world_publish(w, true); /* while we were connecting */
}

static void world_settle(struct world *w)
{
    for (int i = 0; i < 20000; i++) {
        if (w->head == w->tail && !w->holding && w->told && w->told_connection == w->connection &&
            !ki_stream_deadline(&w->s))
            return;
        world_step(w);
    }
}

/* The view is what the process has published, whether or not a batch of it came live. */
static void world_is_known(const struct world *w)
{
    /* Whether numbers begin with 1 is known only once another batch has come. */
    assert_true(!is_partial(&w->s) || (ki_stream_has(&w->s, KI_BECAUSE(BATCH_0)) && w->first == 1));
    assert_int_equal(w->any, w->next > w->first);
    if (!w->any)
        return;
    assert_int_equal(w->applied_process, w->process);
    assert_int_equal(w->applied_last, w->next - 1);
    assert_true(w->contiguous);
}

/* All that has arrived was offered, so a view that isn't partial is the publisher's. */
static void world_is_true(const struct world *w)
{
    if (is_partial(&w->s) || w->tail_lost || w->s.state != KI_STREAM_LIVE)
        return;
    assert_int_equal(w->any, w->next > w->first);
    assert_true(!w->any || (w->applied_process == w->process && w->contiguous));
    assert_true(!w->any || (w->applied_first == w->first && w->applied_last == w->next - 1));
}

/* @untimed: nobody restarts, or the connection breaks, and nothing may look as if. */
static void world_round(bool can_replay, bool untimed)
{
    static struct world w;
    uint64_t loss = draw(3) ? draw(10) : 0;

    memset(&w, 0, sizeof(w));
    ki_stream_init(&w.s, can_replay ? &with_replay : &without_replay);
    w.s.opts.stale_ns = 5 * SECOND;
    w.s.opts.forget_ns = 60 * SECOND;
    w.now = SECOND;
    w.untimed = untimed;
    w.ring = draw(2) ? 1000000 : 1 + draw(40);
    w.router_alive = draw(4) != 0;
    w.router_loss = draw(2) ? 0 : draw(20);
    w.router_loses = w.router_loss > 0;
    w.steady = can_replay && w.router_alive && !w.router_loses && draw(2);
    w.next = w.first = draw(2);
    if (draw(3) == 0)
        world_recover(&w, !untimed);
    ki_stream_start(&w.s, w.now);
    for (int i = 0; i < 600; i++) {
        if (draw(4))
            world_publish(&w, draw(100) < loss);
        if (!untimed && draw(150) == 0)
            world_restart(&w);
        if (!untimed && draw(200) == 0)
            w.connection++, w.heard = false;
        if (!untimed && draw(300) == 0)
            world_vanish(&w);
        if (!w.steady && draw(100) == 0)
            w.router_alive = !w.router_alive;
        if (w.tail - w.head > QUEUE - 100 || draw(3))
            world_step(&w);
    }
    /* Peace: what can be repaired must be. */
    w.router_alive = true;
    w.router_loss = 0;
    w.ring = can_replay ? w.ring : 0;
    world_settle(&w);
    world_is_true(&w);
    if (can_replay && w.ring == 1000000 && !w.router_loses && !w.tail_lost)
        world_is_known(&w); /* also what nobody heard live: an idle engine's */
    world_publish(&w, false);
    world_settle(&w);
    world_is_true(&w);
    assert_int_equal(w.head, w.tail);
    assert_false(w.holding);
    assert_int_equal(w.applied_last, w.next - 1);
    if (untimed)
        assert_int_equal(w.s.stats.restarts, 0);
    assert_true(w.mixed ? is_partial(&w.s) : w.applied_process == w.process);
    if (can_replay && w.ring == 1000000) {
        assert_true(w.any && w.contiguous);
        assert_int_equal(w.applied_first, w.first);
        for (int i = 0; i < 3 && is_partial(&w.s); i++) {
            assert_true(ki_stream_has(&w.s, KI_BECAUSE(BATCH_0)) && w.first == 1);
            world_publish(&w, false);
            world_settle(&w);
        }
        assert_false(is_partial(&w.s));
    }
}

static void random_worlds(void **state)
{
    const char *seed = getenv("KV_TEST_SEED"), *scale = getenv("KV_TEST_SCALE");
    uint64_t rounds = 4000 * (scale ? strtoull(scale, NULL, 10) : 100) / 100;

    (void)state;
    random_state = seed ? strtoull(seed, NULL, 10) : 20251120;
    print_message("seed %" PRIu64 ", %" PRIu64 " rounds\n", random_state, rounds);
    for (uint64_t i = 0; i < rounds; i++)
        world_round(i % 4 != 0, i % 5 == 0);
}

/* Nothing but noise: the machine must stay within its states and bounds. */
static void noise(void **state)
{
    struct kh_stream s;

    (void)state;
    random_state = 77;
    for (int round = 0; round < 300; round++) {
        bool holding = false;
        uint64_t now = 0;

        ki_stream_init(&s, round % 2 ? &with_replay : &without_replay);
        for (int i = 0; i < 2000; i++) {
            struct ki_batch_id id = {draw(4) ? draw(8) : UINT64_MAX - draw(3), draw(3),
                                     draw(2) ? 0 : (double)draw(5)};
            unsigned steps = 0;

            now += draw(SECOND);
            if (draw(3) == 0)
                steps = ki_stream_replayed(&s, &id, now);
            else if (draw(3) == 0)
                steps = draw(4) ? ki_stream_replay_end(&s, now) : ki_stream_replay_failed(&s, now);
            else if (draw(20) == 0)
                ki_stream_disconnected(&s, now);
            else if (draw(20) == 0)
                steps = ki_stream_tick_absence(&s, now);
            else if (draw(20) == 0)
                ki_stream_reachable(&s, now);
            else if (draw(20) == 0 && s.state == KI_STREAM_LIVE)
                steps = ki_stream_connected(&s, draw(2) == 0, now);
            else if (ki_stream_deadline(&s))
                steps = ki_stream_tick(&s, now);
            else if (!holding)
                steps = ki_stream_live(&s, &id, draw(10) == 0, now);
            holding |= (steps & KI_STEP_HOLD) != 0;
            if (steps & KI_STEP_RESUME)
                holding = false;
            assert_true(s.state != KI_STREAM_LIVE || !s.held);
            assert_true(s.opts.can_replay || s.state == KI_STREAM_LIVE);
            assert_int_equal(s.held != KI_HELD_NONE, holding);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_worlds),
        cmocka_unit_test(noise),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
