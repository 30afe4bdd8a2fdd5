// SPDX-License-Identifier: Apache-2.0
/* The ring of the latest events against a model: a queue limited in bytes. */
#include "base/unit.h"

#include <errno.h>

#include "bm/bm.h"
#include "bm/events/event_record.h"
#include "bm/events/events.h"

static struct kvbm_events *events;
static struct kvbm_event_ring *ring;

static void open_ring(uint64_t bytes, enum kvbm_event_scope scope)
{
    struct kvbm_events_opts opts = {.size = sizeof(opts), .window_us = 1};

    assert_int_equal(kvbm_events_create(&opts, &events), 0);
    assert_true(kvbm_events_add_ring(events, scope, bytes, &ring) > 0);
}

/* An event of @n_tokens tokens; all that it holds is derived from @number. */
static struct kvbm_event make(uint64_t number, uint32_t n_tokens, uint64_t *key, uint64_t *parent,
                              uint32_t *tokens)
{
    *key = number * 7;
    *parent = number * 3;
    for (uint32_t i = 0; i < n_tokens; i++)
        tokens[i] = (uint32_t)number + i;
    return (struct kvbm_event){
        .type = number % 2 ? KVBM_EVENT_STORED : KVBM_EVENT_REMOVED,
        .tier = (enum kv_tier)(number % KV_N_TIERS),
        .first = number % 3 == 0,
        .last = number % 5 == 0,
        .group = number % 64,
        .key_len = 8,
        .key = key,
        .parent = number % 4 ? parent : NULL,
        .position = (uint32_t)number,
        .n_tokens = n_tokens,
        .tokens = tokens,
    };
}

static size_t put(uint64_t number, uint32_t n_tokens)
{
    uint64_t key, parent;
    uint32_t tokens[64];
    struct kvbm_event event = make(number, n_tokens, &key, &parent, tokens);

    kvbm_events_begin(events);
    kvbm_events_put(events, &event);
    kvbm_events_end(events);
    return kvbm_record_bytes(&event);
}

static void flush(void)
{
    assert_int_equal(kvbm_events_flush(events, 60000), 0);
}

static void check(const struct kvbm_event *got, uint64_t number, uint32_t n_tokens)
{
    uint64_t key, parent;
    uint32_t tokens[64];
    struct kvbm_event want = make(number, n_tokens, &key, &parent, tokens);

    assert_int_equal(got->sequence, number);
    assert_int_equal(got->type, want.type);
    assert_int_equal(got->tier, want.tier);
    assert_int_equal(got->first, want.first);
    assert_int_equal(got->last, want.last);
    assert_int_equal(got->group, want.group);
    assert_int_equal(got->key_len, 8);
    assert_int_equal(got->position, want.position);
    assert_int_equal(got->n_tokens, n_tokens);
    assert_memory_equal(got->key, &key, 8);
    assert_int_equal(got->parent != NULL, want.parent != NULL);
    if (want.parent)
        assert_memory_equal(got->parent, &parent, 8);
    if (n_tokens)
        assert_memory_equal(got->tokens, tokens, n_tokens * sizeof(*tokens));
}

static void test_overwriting(void **state)
{
    struct kvbm_event got[8];
    uint64_t lost = 9, bytes;

    (void)state;
    open_ring(4 * 64, KVBM_EVENTS_PER_TIER);
    assert_int_equal(kvbm_event_ring_drain(ring, got, 8, &lost), 0);
    assert_int_equal(lost, 0);
    bytes = put(0, 0);
    assert_true(bytes <= 64);
    flush();
    assert_int_equal(kvbm_event_ring_drain(ring, got, 8, &lost), 1);
    check(&got[0], 0, 0);
    for (uint64_t i = 1; i < 100; i++)
        put(i, 0);
    flush();
    assert_int_equal(kvbm_event_ring_drain(ring, got, 2, &lost), 2);
    assert_true(lost >= 99 - 4 * 64 / bytes && lost <= 99 - 4);
    check(&got[0], lost + 1, 0);
    check(&got[1], lost + 2, 0);
    assert_int_equal(kvbm_event_ring_drain(ring, got, 8, &bytes), 97 - lost);
    assert_int_equal(bytes, 0);
    check(&got[96 - lost], 99, 0);
    /* one that can't ever fit */
    put(100, 64);
    put(101, 0);
    flush();
    assert_int_equal(kvbm_event_ring_drain(ring, got, 8, &lost), 1);
    assert_int_equal(lost, 1);
    check(&got[0], 101, 0);
    assert_int_equal(kvbm_event_ring_drain(ring, NULL, 1, NULL), -EINVAL);
    assert_int_equal(kvbm_event_ring_drain(NULL, got, 1, NULL), -EINVAL);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/* Lost is what gave way in the ring and what the queue had dropped, each once, and counted afresh by each drain. */
static void test_lost(void **state)
{
    struct kvbm_events_opts opts = {.size = sizeof(opts), .queue_bytes = 10 * (uint64_t)64};
    struct kvbm_event got[8];
    uint64_t lost = 0;

    (void)state;
    assert_int_equal(kvbm_events_create(&opts, &events), 0);
    assert_true(kvbm_events_add_ring(events, KVBM_EVENTS_PER_TIER, 3 * (uint64_t)64, &ring) > 0);
    for (int i = 0; i < 2; i++)
        assert_int_equal(put(1, 2), 64);
    flush();
    assert_int_equal(kvbm_event_ring_drain(ring, got, 8, NULL), 2);
    kvbm_events_begin(events);
    for (uint64_t i = 0; i < 25; i++) { /* ten fit into the queue, three into the ring */
        uint64_t key, parent;
        uint32_t tokens[2];
        struct kvbm_event event = make(4 * i + 1, 2, &key, &parent, tokens);

        kvbm_events_put(events, &event);
    }
    kvbm_events_end(events);
    flush();
    assert_int_equal(kvbm_event_ring_drain(ring, got, 0, &lost), 0);
    assert_int_equal(lost, 7 + 15);
    assert_int_equal(kvbm_event_ring_drain(ring, got, 8, &lost), 3);
    assert_int_equal(lost, 0); /* it was told */
    for (uint64_t i = 0; i < 3; i++)
        assert_int_equal(got[i].sequence, 2 + 7 + i);
    put(1, 2);
    put(1, 60); /* never fits */
    flush();
    assert_int_equal(kvbm_event_ring_drain(ring, got, 8, &lost), 1);
    assert_int_equal(got[0].sequence, 27);
    assert_int_equal(lost, 1);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

static void test_scope(void **state)
{
    struct kvbm_event got[64];
    uint64_t lost;
    long n;

    (void)state;
    open_ring(0, KVBM_EVENTS_CONSOLIDATED);
    for (uint64_t i = 0; i < 60; i++)
        put(i, 1);
    flush();
    n = kvbm_event_ring_drain(ring, got, 64, &lost);
    assert_int_equal(n, 28); /* of 60, those that 3 or 5 divides */
    for (long i = 0; i < n; i++)
        assert_true(got[i].sequence % 3 == 0 || got[i].sequence % 5 == 0);
    assert_int_equal(lost, 0);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

/*
 * Naive: all that was put, and which of it may still be there. The ring must hold the latest ones,
 * without holes, and at least as many as fit into its bytes less what the turn at its end costs:
 * one record.
 */
static void random_ring(uint64_t *random)
{
    enum { MOST = 400 };
    uint64_t capacity = 64 + unit_below(random, 3000) / 8 * 8, lost, all_lost = 0, next = 0;
    uint32_t sizes[MOST] = {0};
    size_t bytes[MOST] = {0}, drained_to = 0, biggest = 0, taken = 0;

    open_ring(capacity, KVBM_EVENTS_PER_TIER);
    for (size_t n = 0; n < MOST;) {
        size_t some = 1 + unit_below(random, 30), max = unit_below(random, 40), kept = 0;
        struct kvbm_event got[40];
        long count;

        for (; some && n < MOST; some--, n++) {
            sizes[n] = (uint32_t)unit_below(random, 2) * (uint32_t)unit_below(random, 64);
            bytes[n] = put(n, sizes[n]);
            biggest = bytes[n] > biggest && bytes[n] <= capacity ? bytes[n] : biggest;
        }
        flush();
        count = kvbm_event_ring_drain(ring, got, max, &lost);
        assert_true(count >= 0 && (size_t)count <= max);
        all_lost += lost;
        taken += (size_t)count;
        for (long i = 0; i < count; i++) {
            uint64_t at = got[i].sequence;

            assert_true(at >= next && at < n && bytes[at] <= capacity);
            if (i > 0)
                for (uint64_t gap = next; gap < at; gap++)
                    assert_true(bytes[gap] > capacity); /* a hole: it never fitted */
            check(&got[i], at, sizes[at]);
            next = at + 1;
        }
        if (count == 0)
            continue;
        /* what was overwritten really had to be: it and all behind it don't fit at once */
        for (size_t i = drained_to; i < got[0].sequence; i++) {
            if (bytes[i] > capacity)
                continue;
            kept = 0;
            for (size_t k = i; k < n; k++)
                kept += bytes[k] <= capacity ? bytes[k] : 0;
            assert_true(kept + biggest > capacity);
        }
        drained_to = next;
    }
    {
        struct kvbm_event got[MOST];
        long count = kvbm_event_ring_drain(ring, got, MOST, &lost);

        assert_true(count >= 0);
        if (count)
            assert_true(got[count - 1].sequence == MOST - 1 || bytes[MOST - 1] > capacity);
        all_lost += lost;
        taken += (size_t)count;
        for (long i = 0; i < count; i++)
            check(&got[i], got[i].sequence, sizes[got[i].sequence]);
    }
    assert_int_equal(taken + all_lost, MOST);
    assert_int_equal(kvbm_events_destroy(events), 0);
}

static void test_random(void **state)
{
    uint64_t random = unit_seed();

    (void)state;
    for (size_t i = 0; i < unit_rounds(200); i++)
        random_ring(&random);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_overwriting),
        cmocka_unit_test(test_lost),
        cmocka_unit_test(test_scope),
        cmocka_unit_test(test_random),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
