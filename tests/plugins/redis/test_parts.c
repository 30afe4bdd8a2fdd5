// SPDX-License-Identifier: Apache-2.0
/* URIs, slots, requests on the wire, sealed values, the table of chunks. */
#include <errno.h>
#include <stdio.h>

#include "base/file/own_manifest.h"
#include "base/unit.h"
#include "redis/batch.h"
#include "redis/entry.h"
#include "redis/loss.h"
#include "redis/nodes.h"
#include "redis/scan.h"
#include "redis/uri.h"

static void test_uri(void **state)
{
    struct rds_uri uri;
    struct kv_error error;

    (void)state;
    assert_int_equal(
        rds_uri_parse("redis://cache.svc:6380/3?prefix=a%3a&timeout_ms=250&buffer=1MiB", &uri,
                      &error),
        0);
    assert_string_equal(uri.seeds[0].host, "cache.svc");
    assert_int_equal(uri.seeds[0].port, 6380);
    assert_int_equal(uri.db, 3);
    assert_string_equal(uri.prefix, "a:");
    assert_int_equal(uri.timeout_ms, 250);
    assert_int_equal(uri.buffer_bytes, 1 << 20);
    assert_false(uri.tls || uri.cluster);
    assert_int_equal(rds_uri_parse("rediss://us%20er@[::1]", &uri, &error), 0);
    assert_string_equal(uri.user, "us er");
    assert_string_equal(uri.seeds[0].host, "::1");
    assert_int_equal(uri.seeds[0].port, 6379);
    assert_true(uri.tls);
    assert_int_equal(rds_uri_parse("redis+cluster://a,b:7000,[::2]:7001/", &uri, &error), 0);
    assert_int_equal(uri.n_seeds, 3);
    assert_int_equal(uri.seeds[2].port, 7001);
    assert_int_equal(rds_uri_parse("redis+unix:///run/my%20redis?db=2", &uri, &error), 0);
    assert_string_equal(uri.path, "/run/my redis");
    assert_int_equal(uri.db, 2);
}

static void test_uri_refused(void **state)
{
    static const char *const cases[] = {
        "",
        "redis:/host",
        "http://host",
        "redis://",
        "redis://:6379",
        "redis://host:0",
        "redis://host:65536",
        "redis://host:1x",
        "redis://[::1",
        "redis://[::1]x",
        "redis://a,b",
        "redis://user:password@host",
        "redis://host/x",
        "redis://host/-1",
        "redis://host?password=x",
        "redis://host?db",
        "redis://host?db=x",
        "redis://host?timeout_ms=0",
        "redis://host?buffer=0",
        "redis://host?what=1",
        "redis://host?prefix=%zz",
        "redis://host?prefix=%00",
        "redis://ho%",
        "redis+unix://relative",
        "redis+unix://",
        "redis+cluster://host/1",
    };
    struct rds_uri uri;
    struct kv_error error;
    char text[2000] = "redis://";

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        error.text[0] = '\0';
        assert_int_equal(rds_uri_parse(cases[i], &uri, &error), -EINVAL);
        assert_true(error.text[0] != '\0');
    }
    memset(text + 8, 'h', sizeof(text) - 9);
    assert_int_equal(rds_uri_parse(text, &uri, &error), -EINVAL);
}

/* The first two from the public specification of Redis Cluster. */
static void test_slots(void **state)
{
    (void)state;
    assert_int_equal(rds_key_slot("123456789", 9), 0x31C3);
    assert_int_equal(rds_key_slot("foo{hash_tag}", 13), rds_key_slot("hash_tag", 8));
    assert_int_equal(rds_key_slot("{a}{b}", 6), rds_key_slot("a", 1));
    assert_int_not_equal(rds_key_slot("{}a", 3), rds_key_slot("{}b", 3));
    assert_int_equal(rds_key_slot("", 0), 0);
}

static void test_wire(void **state)
{
    static const char wanted[] = "*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\nvalue\r\n";
    static const char asked[] =
        "*1\r\n$6\r\nASKING\r\n*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$5\r\nvalue\r\n";
    struct rds_batch batch = {0};

    (void)state;
    rds_batch_begin(&batch, 3);
    rds_batch_word(&batch, "SET");
    rds_batch_key(&batch, "k", 1);
    rds_batch_payload(&batch, "value", 5);
    assert_int_equal(batch.error, 0);
    for (int asking = 0; asking < 2; asking++) {
        const char *text = asking ? asked : wanted;
        size_t len = strlen(text);

        batch.cmds[0].asking = asking;
        assert_int_equal(rds_batch_wire_len(&batch, 0), len);
        for (size_t offset = 0; offset <= len; offset++) {
            struct iovec iov[4];
            int n = rds_batch_pieces(&batch, 0, offset, iov, 4);
            size_t at = offset;

            for (int i = 0; i < n; i++) {
                assert_memory_equal(iov[i].iov_base, text + at, iov[i].iov_len);
                at += iov[i].iov_len;
            }
            assert_int_equal(at, len);
        }
    }
    rds_batch_fini(&batch);
}

static void test_seal(void **state)
{
    uint64_t seed = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(200); round++) {
        bool chunk = round % 2 == 0;
        size_t len = unit_below(&seed, 100), all = len + (chunk ? RDS_CHUNK_TRAILER : RDS_TRAILER);
        size_t got = 0, bit, stamp;
        bool (*verify)(const char *, size_t, const void *, size_t, size_t *) =
            chunk ? rds_verify_chunk : rds_verify;
        bool (*other)(const char *, size_t, const void *, size_t, size_t *) =
            chunk ? rds_verify : rds_verify_chunk;
        char *value = malloc(all);

        assert_non_null(value);
        for (size_t i = 0; i < len; i++)
            value[i] = (char)unit_random(&seed);
        if (chunk)
            rds_seal_chunk(value, len, "name", 4);
        else
            rds_seal(value, len, "name", 4);
        assert_true(verify(value, all, "name", 4, &got));
        assert_int_equal(got, len);
        assert_false(verify(value, all, "nama", 4, &got));
        assert_false(other(value, all, "name", 4, &got));
        for (size_t cut = 0; cut < all; cut++)
            assert_false(verify(value, cut, "name", 4, &got));
        bit = unit_below(&seed, 8 * all);
        value[bit / 8] = (char)(value[bit / 8] ^ 1 << bit % 8);
        stamp = bit / 8 - len; /* which says when, not what */
        assert_true(verify(value, all, "name", 4, &got) == (chunk && stamp < RDS_STAMP));
        free(value);
    }
}

static void test_stamp(void **state)
{
    char value[3 + RDS_CHUNK_TRAILER];
    uint64_t seconds = 1;
    size_t got;

    (void)state;
    memcpy(value, "abc", 3);
    rds_seal(value, 3, "k", 1);
    assert_false(rds_ends_like_ours(value, 3 + RDS_TRAILER)); /* a manifest */
    rds_seal_chunk(value, 3, "k", 1);
    assert_true(rds_stamp_of(value, sizeof(value), &seconds));
    assert_int_equal(seconds, 0);
    rds_stamp(value, sizeof(value), 0x6553f1a0);
    assert_memory_equal(value + 3, "6553f1a0", 8);
    assert_true(rds_stamp_of(value + 3, RDS_CHUNK_TRAILER, &seconds)); /* the end is enough */
    assert_int_equal(seconds, 0x6553f1a0);
    assert_true(rds_verify_chunk(value, sizeof(value), "k", 1, &got));
    assert_false(rds_stamp_of(value + 4, RDS_CHUNK_TRAILER - 1, &seconds));
    value[5] = 'G';
    assert_false(rds_stamp_of(value, sizeof(value), &seconds));
}

static int scan_all(uint64_t (*next)(uint64_t), uint64_t *ret_pages)
{
    struct rds_scan scan;
    char cursor[32];
    uint64_t at = 0;
    int rc;

    rds_scan_begin(&scan);
    do {
        at = next(at);
        snprintf(cursor, sizeof(cursor), "%llu", (unsigned long long)at);
        rc = rds_scan_next(&scan, cursor, 1);
        if (rc == 0)
            assert_string_equal(scan.cursor, cursor);
    } while (rc == 0);
    *ret_pages = scan.n_pages;
    return rc;
}

static uint64_t to_an_end(uint64_t at)
{
    return (at + 1) % 5000;
}

static uint64_t around(uint64_t at)
{
    return at >= 1700 ? 701 : at + 1;
}

static uint64_t nowhere(uint64_t at)
{
    return at + 1;
}

/* The listing of a server that means ill ends, too. */
static void test_scan(void **state)
{
    struct rds_scan scan;
    uint64_t pages;

    (void)state;
    assert_int_equal(scan_all(to_an_end, &pages), 1);
    assert_int_equal(pages, 4999);
    assert_int_equal(scan_all(around, &pages), -EPROTO);
    assert_true(pages < 3 * 1700);
    assert_int_equal(scan_all(nowhere, &pages), -E2BIG);
    assert_int_equal(pages, RDS_MAX_PAGES);
    rds_scan_begin(&scan);
    scan.deadline_ns = 1;
    assert_int_equal(rds_scan_next(&scan, "1", 1), -ETIMEDOUT);
    rds_scan_begin(&scan);
    assert_int_equal(rds_scan_next(&scan, "", 1), -EPROTO);
    assert_int_equal(rds_scan_next(&scan, "123456789012345678901234", 1), -EPROTO);
    assert_int_equal(rds_scan_next(&scan, "0", 1), 1);
}

/* Over another connection a cursor means another place, and an end is none. */
static void test_scan_begins_again(void **state)
{
    struct rds_scan scan;

    (void)state;
    rds_scan_begin(&scan);
    assert_int_equal(rds_scan_next(&scan, "5", 7), 0);
    assert_int_equal(rds_scan_next(&scan, "6", 7), 0);
    assert_int_equal(rds_scan_next(&scan, "0", 8), 0);
    assert_string_equal(scan.cursor, "0");
    assert_int_equal(rds_scan_next(&scan, "5", 8), 0); /* seen before: that counts no more */
    assert_string_equal(scan.cursor, "5");
    assert_int_equal(rds_scan_next(&scan, "0", 8), 1);
    rds_scan_begin(&scan);
    for (uint64_t line = 1; line <= RDS_MAX_BEGINNINGS; line++)
        assert_int_equal(rds_scan_next(&scan, "5", line), 0);
    assert_int_equal(rds_scan_next(&scan, "5", RDS_MAX_BEGINNINGS + 1), -ECONNRESET);
}

static bool odd(const struct rds_entry *entry)
{
    return entry->hash[0] & 1;
}

static void test_table(void **state)
{
    struct rds_table table = {0};
    uint8_t hash[8] = {0};

    (void)state;
    assert_null(rds_table_find(&table, hash, 8));
    rds_table_remove(&table, hash, 8);
    for (int i = 0; i < 256; i++) {
        hash[0] = (uint8_t)i;
        assert_non_null(rds_table_add(&table, hash, 8));
        assert_ptr_equal(rds_table_add(&table, hash, 8), rds_table_find(&table, hash, 8));
        assert_null(rds_table_find(&table, hash, 7)); /* another length, another key */
    }
    assert_int_equal(table.n, 256);
    rds_table_purge(&table, odd);
    assert_int_equal(table.n, 128);
    hash[0] = 4;
    rds_table_remove(&table, hash, 8);
    assert_null(rds_table_find(&table, hash, 8));
    hash[0] = 6;
    assert_non_null(rds_table_find(&table, hash, 8));
    rds_table_purge(&table, NULL);
    assert_int_equal(table.n, 0);
}

enum { THREADS = 10, KEYS = 6 };

/* Write a manifest of ours that lists the keys whose bits are set. */
static size_t list_keys(unsigned keys, uint8_t *ret)
{
    size_t n = 0;

    memset(ret, 0, KV_OWN_HEADER);
    memcpy(ret, KV_OWN_MAGIC "\1", KV_OWN_MAGIC_LEN + 1);
    ret[12] = KV_OWN_HEADER;
    for (int key = 0; key < KEYS; key++)
        if (keys >> key & 1)
            memset(ret + KV_OWN_HEADER + n++ * KV_OWN_CHUNK, key, KV_OWN_CHUNK);
    ret[32] = (uint8_t)n;
    return KV_OWN_HEADER + n * KV_OWN_CHUNK + KV_OWN_SUM;
}

static void drop_key(struct rds_loss *loss, int key, uint64_t newest)
{
    uint8_t hash[KV_OWN_KEY];

    memset(hash, key, sizeof(hash));
    rds_loss_note(loss, hash, sizeof(hash), newest);
}

static void put_key(struct rds_loss *loss, int key)
{
    uint8_t hash[KV_OWN_KEY];

    memset(hash, key, sizeof(hash));
    rds_loss_put(loss, hash, sizeof(hash));
}

static bool refuses(struct rds_loss *loss, unsigned keys, uint64_t by)
{
    uint8_t manifest[KV_OWN_HEADER + KEYS * KV_OWN_CHUNK + KV_OWN_SUM];
    bool listed = false, refused;

    refused = rds_loss_refuses(loss, manifest, list_keys(keys, manifest), by, &listed);
    assert_true(refused || !listed);
    return refused;
}

/* Random drops, puts, publications and flushes of ten threads, beside a set of keys and one of the
 * threads that had their failure. */
static void test_loss(void **state)
{
    bool told[RDS_TOLD_KINDS][THREADS] = {{false}};
    struct rds_loss loss = {0};
    uint64_t seed = unit_seed();
    unsigned dropped = 0;
    bool listed = false;

    (void)state;
    for (size_t step = 0; step < unit_rounds(20000); step++) {
        uint64_t by = unit_below(&seed, THREADS);
        unsigned keys = (unsigned)unit_below(&seed, 1 << KEYS);
        int key = (int)unit_below(&seed, KEYS), kind = RDS_PUBLICATION;

        switch (unit_below(&seed, 5)) {
        case 0:
            if (unit_below(&seed, 4) == 0) {
                drop_key(&loss, key, 5);
                dropped |= 1U << key;
                memset(told, 0, sizeof(told));
            }
            break;
        case 1:
            put_key(&loss, key);
            dropped &= ~(1U << key);
            break;
        case 2:
            if (keys > 0) {
                assert_int_equal(refuses(&loss, keys, by), (keys & dropped) > 0);
                break;
            }
            assert_int_equal(refuses(&loss, 0, by), dropped > 0 && !told[kind][by]);
            told[kind][by] |= dropped > 0;
            break;
        case 3:
            assert_int_equal(rds_loss_refuses(&loss, "opaque", 6, by, &listed),
                             dropped > 0 && !told[kind][by]);
            assert_false(listed);
            told[kind][by] |= dropped > 0;
            break;
        default:
            kind = RDS_FLUSH;
            assert_int_equal(rds_loss_tell(&loss, kind, by), dropped > 0 && !told[kind][by]);
            told[kind][by] |= dropped > 0;
        }
    }
    rds_loss_fini(&loss);
}

/* More keys than are remembered: every thread is told, and the loss never ends. */
static void test_loss_of_many(void **state)
{
    struct rds_loss loss = {0};
    uint64_t hash[2] = {0};

    (void)state;
    for (hash[0] = 0; hash[0] <= RDS_MAX_DROPPED; hash[0]++)
        rds_loss_note(&loss, hash, sizeof(hash), 1);
    assert_int_equal(loss.dropped.n, RDS_MAX_DROPPED);
    for (hash[0] = 0; hash[0] <= RDS_MAX_DROPPED; hash[0]++)
        rds_loss_put(&loss, hash, sizeof(hash));
    for (uint64_t by = 1; by <= 100; by++) {
        assert_true(by % 2 ? refuses(&loss, 1, by) : rds_loss_tell(&loss, RDS_PUBLICATION, by));
        assert_false(refuses(&loss, 1, by));
    }
    rds_loss_fini(&loss);
}

/* Threads that came after the loss are told for an hour, others without end. */
static void test_loss_and_strangers(void **state)
{
    struct rds_loss loss = {0};

    (void)state;
    drop_key(&loss, 1, 2);
    assert_true(rds_loss_tell(&loss, RDS_PUBLICATION, 3));
    assert_false(rds_loss_tell(&loss, RDS_PUBLICATION, 3));
    rds_loss_told(&loss, RDS_PUBLICATION, 4);
    assert_false(rds_loss_tell(&loss, RDS_PUBLICATION, 4));
    assert_true(rds_loss_tell(&loss, RDS_FLUSH, 4));
    loss.since_s -= 3601;
    assert_false(rds_loss_tell(&loss, RDS_PUBLICATION, 5));
    assert_true(refuses(&loss, 2, 5)); /* it lists the chunk */
    assert_true(rds_loss_tell(&loss, RDS_PUBLICATION, 2));
    assert_true(rds_loss_tell(&loss, RDS_PUBLICATION, 1));
    put_key(&loss, 1);
    assert_false(refuses(&loss, 2, 5));
    assert_false(rds_loss_tell(&loss, RDS_FLUSH, 1));
    rds_loss_fini(&loss);
}

static void test_arena(void **state)
{
    struct rds_arena arena = {0};
    struct rds_slab *slabs[100], *large = NULL;
    char *values[100], *first;

    (void)state;
    for (int i = 0; i < 100; i++) { /* of several pieces */
        values[i] = rds_arena_take(&arena, 1000000, &slabs[i]);
        assert_non_null(values[i]);
        memset(values[i], i, 1000000);
    }
    first = rds_arena_take(&arena, (size_t)64 << 20, &large); /* larger than a piece */
    assert_non_null(first);
    first[((size_t)64 << 20) - 1] = 1;
    for (int i = 0; i < 100; i++)
        assert_true(values[i][0] == (char)i && values[i][999999] == (char)i);
    for (int i = 0; i < 100; i++)
        rds_arena_give(&arena, slabs[i * 37 % 100]);
    rds_arena_give(&arena, large);
    assert_null(arena.slabs); /* none of the usual size was in front */
    first = rds_arena_take(&arena, 10, &large);
    rds_arena_give(&arena, large);
    assert_ptr_equal(rds_arena_take(&arena, 20, &large), first); /* one is kept */
    rds_arena_fini(&arena);
}

static void test_words_of_a_refusal(void **state)
{
    static const struct {
        const char *text, *word;
        bool is;
    } cases[] = {
        {"READONLY You can't write against a read only replica.", "READONLY", true},
        {"ERR Error running script (call to f_0a): @user_script:1: @user_script: 1: -READONLY You "
         "can't write against a read only replica.",
         "READONLY", true},
        {"ERR Error running script (call to f_0a): @user_script:1: @user_script: 1: -OOM command "
         "not allowed when used memory > 'maxmemory'.",
         "OOM", true},
        {"ERR Error running script (call to f_0a): @user_script:1: READONLY", "READONLY", false},
        {"ERR READONLY", "READONLY", false},
        {"", "READONLY", false},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        struct resp_value reply = {.type = RESP_ERROR, .str = (char *)cases[i].text};

        assert_int_equal(rds_reply_is(&reply, cases[i].word), cases[i].is);
        reply.type = RESP_BULK;
        assert_false(rds_reply_is(&reply, cases[i].word));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_uri),
        cmocka_unit_test(test_uri_refused),
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_wire),
        cmocka_unit_test(test_seal),
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_loss),
        cmocka_unit_test(test_loss_of_many),
        cmocka_unit_test(test_loss_and_strangers),
        cmocka_unit_test(test_arena),
        cmocka_unit_test(test_stamp),
        cmocka_unit_test(test_scan),
        cmocka_unit_test(test_scan_begins_again),
        cmocka_unit_test(test_words_of_a_refusal),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
