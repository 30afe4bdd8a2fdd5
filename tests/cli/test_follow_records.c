// SPDX-License-Identifier: Apache-2.0
/* KVEvent records as `kvasir events` reads them: events, gaps, restarts, snapshots, damage. */
#include "base/unit.h"
#include "cli/events/follow.h"
#include "cli/events/say.h"
#include "plane/record.h"

static const char subject[] = "kvasir.c.m.t.w";

/* Feed a message of @n records, each about the block of its place, to a follower. */
static void feed(struct kc_follower *follower, enum kvp_kind kind, uint64_t incarnation,
                 uint64_t sequence, uint32_t n, bool damaged)
{
    struct kvp_header header = {.size = sizeof(header),
                                .kind = kind,
                                .incarnation = incarnation,
                                .sequence = sequence,
                                .last = kind == KVP_SNAPSHOT};
    struct kc_message message = {.from = {"nats://x", 8}, .n_frames = 2};
    struct kv_buf out = KV_BUF_INIT;

    strcpy(header.publisher, subject);
    kvp_begin(&out, &header);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t key = 100 + i, parent = 99 + i;
        struct kvp_record record = {.event = i % 2 ? KVP_REMOVE : KVP_STORE,
                                    .tier = i % 2 ? KV_TIER_HOST : KV_TIER_DEVICE,
                                    .key_len = 8,
                                    .key = &key,
                                    .parent = i % 2 ? NULL : &parent,
                                    .position = (uint32_t)i,
                                    .has_prefix = true,
                                    .prefix = 100,
                                    .has_tokens_hash = i % 2 == 0,
                                    .tokens_hash = i % 2 ? 0 : 7,
                                    .block_bytes = 4096};

        kvp_put(&out, &record);
    }
    assert_int_equal(kvp_end(&out, n), 0);
    if (damaged)
        out.data[out.len - 1] ^= 1;
    message.frames[0] = (struct kve_span){subject, strlen(subject)};
    message.frames[1] = (struct kve_span){out.data, out.len};
    assert_int_equal(kc_follower_take(follower, &message), 0);
    kv_buf_fini(&out);
}

static const struct kc_counts *counts_of(const struct kc_follower *follower)
{
    assert_int_equal(follower->n_publishers, 1);
    return &TAILQ_FIRST(&follower->publishers)->counts;
}

static size_t lines_with(struct kc_follower *follower, const char *text)
{
    const char *at = kv_buf_cstr(&follower->out);
    size_t n = 0;

    for (; (at = strstr(at, text)); at++)
        n++;
    return n;
}

static void test_events(void **state)
{
    struct kc_follower follower;

    (void)state;
    kc_follower_init(&follower, kc_say_json);
    feed(&follower, KVP_EVENTS, 1, 0, 3, false);
    assert_int_equal(counts_of(&follower)->batches, 1);
    assert_int_equal(counts_of(&follower)->types[KC_STORED], 2);
    assert_int_equal(counts_of(&follower)->types[KC_REMOVED], 1);
    assert_int_equal(counts_of(&follower)->tiers[KV_TIER_DEVICE], 2);
    assert_int_equal(lines_with(&follower, "\"block_hashes\":[100]"), 1);
    assert_int_equal(lines_with(&follower, "\"parent_hash\":101"), 1);
    assert_int_equal(lines_with(&follower, "\"tokens_hash\":7"), 2);
    assert_int_equal(lines_with(&follower, "\"prefix_hash\":100"), 3);
    assert_int_equal(lines_with(&follower, "\"block_bytes\":4096"), 3);
    assert_int_equal(lines_with(&follower, subject), 3);
    kc_follower_fini(&follower);
}

/* ALIVE tells of messages that are missing, once, and is no message of its own number. */
static void test_gaps(void **state)
{
    struct kc_follower follower;

    (void)state;
    kc_follower_init(&follower, kc_say_text);
    feed(&follower, KVP_ALIVE, 1, 0, 0, false);
    feed(&follower, KVP_EVENTS, 1, 0, 1, false);
    feed(&follower, KVP_ALIVE, 1, 1, 0, false);
    feed(&follower, KVP_EVENTS, 1, 1, 1, false);
    assert_int_equal(counts_of(&follower)->gaps, 0);
    feed(&follower, KVP_EVENTS, 1, 4, 1, false);
    assert_int_equal(counts_of(&follower)->missed, 2);
    assert_int_equal(lines_with(&follower, "batches 2 to 3 are missing"), 1);
    feed(&follower, KVP_ALIVE, 1, 6, 0, false);
    feed(&follower, KVP_ALIVE, 1, 6, 0, false);
    assert_int_equal(counts_of(&follower)->missed, 3);
    assert_int_equal(lines_with(&follower, "batch 5 is missing"), 1);
    feed(&follower, KVP_EVENTS, 1, 6, 1, false);
    assert_int_equal(counts_of(&follower)->gaps, 2);
    assert_int_equal(counts_of(&follower)->restarts, 0);
    kc_follower_fini(&follower);
}

static void test_restarts(void **state)
{
    struct kc_follower follower;

    (void)state;
    kc_follower_init(&follower, kc_say_text);
    feed(&follower, KVP_EVENTS, 1, 7, 1, false);
    feed(&follower, KVP_EVENTS, 2, 8, 1, false); /* the next number, of another process */
    assert_int_equal(counts_of(&follower)->restarts, 1);
    feed(&follower, KVP_ALIVE, 3, 0, 0, false);
    feed(&follower, KVP_EVENTS, 3, 0, 1, false);
    assert_int_equal(counts_of(&follower)->restarts, 2);
    assert_int_equal(counts_of(&follower)->gaps, 0);
    kc_follower_fini(&follower);
}

static void test_snapshots_and_damage(void **state)
{
    struct kc_follower follower;

    (void)state;
    kc_follower_init(&follower, kc_say_text);
    feed(&follower, KVP_EVENTS, 1, 7, 1, false);
    feed(&follower, KVP_SNAPSHOT, 1, 20, 3, false);
    feed(&follower, KVP_EVENTS, 1, 8, 1, false);
    assert_int_equal(counts_of(&follower)->snapshots, 1);
    assert_int_equal(counts_of(&follower)->gaps, 0);
    assert_int_equal(counts_of(&follower)->types[KC_STORED], 2);
    feed(&follower, KVP_EVENTS, 1, 9, 5, true);
    assert_int_equal(counts_of(&follower)->unreadable, 1);
    assert_int_equal(counts_of(&follower)->types[KC_STORED], 2);
    feed(&follower, KVP_EVENTS, 1, 10, 1,
         false); /* number 9 counts as missing: nothing proved it */
    assert_int_equal(counts_of(&follower)->missed, 1);
    assert_int_equal(lines_with(&follower, "unreadable"), 1);
    kc_follower_fini(&follower);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_events),
        cmocka_unit_test(test_gaps),
        cmocka_unit_test(test_restarts),
        cmocka_unit_test(test_snapshots_and_damage),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
