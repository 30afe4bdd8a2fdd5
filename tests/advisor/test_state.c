// SPDX-License-Identifier: Apache-2.0
/* The advisor's state: round trips beside the index itself, each damaged byte, other members and policies;
 * quiet hours and keys as text. */
#include <errno.h>
#include <unistd.h>

#include "advisor/explain.h"
#include "advisor/index/policy.h"
#include "advisor/mover.h"
#include "advisor/options.h"
#include "advisor/state.h"
#include "base/core/le.h"
#include "base/core/xxh.h"
#include "base/unit.h"

enum { KEYS = 200, MEMBERS = 77 };

static struct kva_index *make(const char *policy)
{
    const struct kva_index_opts opts = {.n_members = 3,
                                        .limit = {KVA_UNIT * 30, KVA_UNIT * 60, UINT64_MAX},
                                        .policy = kva_policy_find(policy)};
    struct kva_index *index;

    assert_int_equal(kva_index_create(&opts, &index), 0);
    return index;
}

static void key_of(unsigned i, uint8_t ret[KVA_KEY])
{
    memset(ret, 0, KVA_KEY);
    memcpy(ret, &i, sizeof(i));
}

static void use_some(struct kva_index *index, uint64_t *seed, int n)
{
    while (n-- > 0) {
        uint8_t key[KVA_KEY];
        const struct kva_told told = {.key = key, .bytes = 1, .now_s = (uint32_t)(1000 + n)};

        key_of((unsigned)unit_below(seed, KEYS), key);
        if (!kva_index_use(index, key, told.now_s))
            assert_true(kva_index_tell(index, &told) >= 0);
    }
}

static void equal(const struct kva_index *a, const struct kva_index *b, unsigned n)
{
    for (unsigned i = 0; i < n; i++) {
        const struct kva_block *x, *y;
        uint8_t key[KVA_KEY];

        key_of(i, key);
        x = kva_index_find(a, key);
        y = kva_index_find(b, key);
        assert_int_equal(x != NULL, y != NULL);
        if (!x || !y)
            continue;
        assert_int_equal(x->want, y->want);
        if (x->want < 2)
            assert_int_equal(x->list, y->list);
        assert_int_equal(x->count, y->count);
        assert_int_equal(x->heat, y->heat);
        assert_int_equal(kva_clock(a) - x->stamp, kva_clock(b) - y->stamp);
        assert_int_equal(y->have | y->told, 0);
    }
}

/* Return the bytes of an index's file, for free. */
static uint8_t *save(const struct kva_index *index, const char *policy, size_t *ret_len)
{
    char path[] = "/tmp/kv-advisor-state-XXXXXX";
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    const struct kva_state_save save = {
        .index = index, .lock = &lock, .members = MEMBERS, .policy = policy};
    uint64_t pause_ns = 0;
    void *data = NULL;
    int fd = mkstemp(path);

    assert_true(fd >= 0);
    close(fd);
    assert_int_equal(kva_state_save(path, &save, &pause_ns), 0);
    assert_true(pause_ns > 0);
    assert_int_equal(pthread_mutex_trylock(&lock), 0); /* given back */
    pthread_mutex_unlock(&lock);
    assert_int_equal(kva_state_load(path, &data, ret_len), 0);
    unlink(path);
    assert_int_equal(kva_state_load(path, &data, ret_len), -ENOENT);
    return data;
}

/* Restored, the order is the same: the same uses from there on have the same effect. */
static void test_round_trip(void **state)
{
    static const char *const names[] = {"lru", "lfu", "s3fifo"};
    uint64_t seed = unit_seed();

    (void)state;
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        struct kva_index *index = make(names[i]), *again = make(names[i]);
        struct kva_index_stats stats;
        uint64_t from;
        uint8_t *data;
        size_t len;

        use_some(index, &seed, 2000);
        kva_index_get_stats(index, &stats);
        data = save(index, names[i], &len);
        assert_int_equal(kva_state_read(again, MEMBERS, names[i], data, len), stats.blocks);
        equal(index, again, KEYS);
        from = seed;
        use_some(index, &from, i ? 0 : 500);
        from = seed;
        use_some(again, &from, i ? 0 : 500);
        for (unsigned k = 0; k < KEYS && !i; k++) {
            uint8_t key[KVA_KEY];

            key_of(k, key);
            if (kva_index_find(index, key))
                assert_int_equal(kva_index_find(index, key)->want,
                                 kva_index_find(again, key)->want);
        }
        kva_index_destroy(index);
        kva_index_destroy(again);
        free(data);
    }
}

static void test_damage(void **state)
{
    uint64_t seed = unit_seed();
    struct kva_index *index = make("cost");
    uint8_t *data;
    size_t len;

    (void)state;
    use_some(index, &seed, 20);
    data = save(index, "cost", &len);
    for (size_t i = 0; i < len; i++) {
        struct kva_index *again = make("cost");

        data[i] ^= 1;
        assert_true(kva_state_read(again, MEMBERS, "cost", data, len) < 0);
        data[i] ^= 1;
        assert_true(kva_state_read(again, MEMBERS, "cost", data, i) < 0);
        kva_index_destroy(again);
    }
    kva_index_destroy(index);
    index = make("lru");
    assert_int_equal(kva_state_read(index, MEMBERS + 1, "cost", data, len), -ESTALE);
    assert_true(kva_state_read(index, MEMBERS, "lru", data, len) > 0); /* another policy */
    kva_index_destroy(index);
    free(data);
}

/* A list that the policy doesn't have would hold blobs that nobody takes out: a full member without a victim. */
static void test_list_of_no_policy(void **state)
{
    static const struct {
        const char *policy;
        uint8_t lists;
    } cases[] = {{"cost", 2}, {"lru", 1}, {"lfu", KVA_LISTS}, {"sieve", 1}, {"s3fifo", 2}};
    const size_t at_list = KVA_STATE_HEADER + KVA_STATE_BLOCK * 2 + 35;
    uint64_t seed = unit_seed();

    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const char *policy = cases[i].policy;
        struct kva_index *index = make(policy);
        uint8_t *data;
        size_t len;

        use_some(index, &seed, 200);
        data = save(index, policy, &len);
        kva_index_destroy(index);
        for (unsigned list = 0; list <= cases[i].lists; list++) {
            size_t sum = len - KVA_STATE_END;
            long rc;

            index = make(policy);
            data[at_list] = (uint8_t)list;
            kv_put_le64(data + sum, kv_xxh64(data, sum, 0));
            rc = kva_state_read(index, MEMBERS, policy, data, len);
            if (list < cases[i].lists)
                assert_true(rc > 0);
            else
                assert_int_equal(rc, -EBADMSG);
            kva_index_reserve(index, 0, KVA_UNIT * 30); /* all leave the first member */
            kva_index_destroy(index);
        }
        free(data);
    }
}

static void test_files(void **state)
{
    enum { MANY = 5000 }; /* written in several pieces */
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    struct kva_index *index = make("lru"), *again = make("lru");
    const struct kva_state_save to = {
        .index = index, .lock = &lock, .members = MEMBERS, .policy = "lru"};
    uint64_t pause_ns = 0;
    uint8_t *data;
    size_t len;

    (void)state;
    for (unsigned i = 0; i < MANY; i++) {
        uint8_t key[KVA_KEY];
        const struct kva_told told = {.key = key, .bytes = 1, .now_s = 1000};

        key_of(i, key);
        assert_int_equal(kva_index_tell(index, &told), 1);
    }
    data = save(index, "lru", &len);
    assert_int_equal(len, KVA_STATE_HEADER + MANY * KVA_STATE_BLOCK + KVA_STATE_END);
    assert_int_equal(kva_state_read(again, MEMBERS, "lru", data, len), MANY);
    equal(index, again, MANY);
    free(data);
    assert_true(kva_state_save("/nosuch/folder/state", &to, &pause_ns) < 0);
    assert_int_equal(kva_state_save("/dev/full/state", &to, &pause_ns), -ENOTDIR);
    kva_index_destroy(index);
    kva_index_destroy(again);
}

static void test_hours(void **state)
{
    static const char *const bad[] = {"",
                                      "8:00-9:00",
                                      "08:00",
                                      "08:00-24:01",
                                      "08:60-09:00",
                                      "08:00-09:00x",
                                      "08-00-09:00",
                                      "-08:00-09:00"};
    uint32_t from, to;

    (void)state;
    assert_int_equal(kva_parse_hours("22:30-06:05", &from, &to), 0);
    assert_int_equal(from, 22 * 60 + 30);
    assert_int_equal(to, 365);
    assert_true(kva_is_quiet(from, to, 23 * 60));
    assert_true(kva_is_quiet(from, to, 0));
    assert_false(kva_is_quiet(from, to, 365));
    assert_false(kva_is_quiet(from, to, 12 * 60));
    assert_true(kva_is_quiet(60, 120, 60));
    assert_false(kva_is_quiet(60, 120, 120));
    assert_false(kva_is_quiet(0, 0, 0));
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++)
        assert_int_equal(kva_parse_hours(bad[i], &from, &to), -EINVAL);
}

static void test_keys(void **state)
{
    uint8_t key[KVA_KEY];

    (void)state;
    assert_true(kva_parse_key((struct kv_str){"000102030405060708090A0b0c0d0e0f", 32}, key));
    for (unsigned i = 0; i < KVA_KEY; i++)
        assert_int_equal(key[i], i);
    assert_false(kva_parse_key((struct kv_str){"000102030405060708090A0b0c0d0e0", 31}, key));
    assert_false(kva_parse_key((struct kv_str){"000102030405060708090A0b0c0d0e0g", 32}, key));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_damage),
        cmocka_unit_test(test_list_of_no_policy),
        cmocka_unit_test(test_files),
        cmocka_unit_test(test_hours),
        cmocka_unit_test(test_keys),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
