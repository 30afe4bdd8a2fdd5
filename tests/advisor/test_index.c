// SPDX-License-Identifier: Apache-2.0
/* The index beside a naive model of placement: LRU in two limited members and a sink, every operation at
 * random; every policy's books; scans, duplicated and lost events; limits that change. */
#include <errno.h>

#include "advisor/index/index.h"
#include "advisor/index/policy.h"
#include "base/core/error.h"
#include "base/unit.h"

enum { MEMBERS = 3, KEYS = 300, TELLERS = 3 };

static void key_of(unsigned i, uint8_t ret[KVA_KEY])
{
    memset(ret, 0, KVA_KEY);
    memcpy(ret, &i, sizeof(i));
}

static uint64_t bytes_of(unsigned i)
{
    return KVA_UNIT * (1 + i % 3);
}

/* -- the model: each member's blobs in an array, the newest first ------------------------------- */

struct model {
    unsigned order[MEMBERS][KEYS];
    unsigned n[MEMBERS];
    uint64_t limit[MEMBERS];
    struct {
        bool known;
        unsigned want, have, told;
    } of[KEYS];
};

static void model_take(struct model *m, unsigned key)
{
    unsigned w = m->of[key].want, i = 0;

    while (m->order[w][i] != key)
        i++;
    memmove(&m->order[w][i], &m->order[w][i + 1], (m->n[w] - i - 1) * sizeof(unsigned));
    m->n[w]--;
}

static void model_put(struct model *m, unsigned key, unsigned w, bool old);

static void model_overflow(struct model *m, unsigned w)
{
    for (;;) {
        uint64_t units = 0;
        unsigned last;

        for (unsigned i = 0; i < m->n[w]; i++)
            units += bytes_of(m->order[w][i]) / KVA_UNIT;
        if (w == MEMBERS - 1 || units <= m->limit[w] / KVA_UNIT)
            return;
        last = m->order[w][m->n[w] - 1];
        model_take(m, last);
        model_put(m, last, w + 1, false);
    }
}

static void model_put(struct model *m, unsigned key, unsigned w, bool old)
{
    if (old) {
        m->order[w][m->n[w]] = key;
    } else {
        memmove(&m->order[w][1], &m->order[w][0], m->n[w] * sizeof(unsigned));
        m->order[w][0] = key;
    }
    m->n[w]++;
    m->of[key].want = w;
    m->of[key].known = true;
    model_overflow(m, w);
}

static void model_use(struct model *m, unsigned key)
{
    if (m->of[key].known)
        model_take(m, key);
    model_put(m, key, 0, false);
}

static void model_drop(struct model *m, unsigned key)
{
    if (!m->of[key].known || m->of[key].have || m->of[key].told)
        return;
    model_take(m, key);
    m->of[key].known = false;
}

/* -- comparison -------------------------------------------------------------------------------- */

static void compare(const struct kva_index *index, const struct model *m)
{
    struct kva_index_stats stats;
    uint64_t have[MEMBERS] = {0}, blocks = 0;

    kva_index_get_stats(index, &stats);
    for (unsigned i = 0; i < KEYS; i++) {
        const struct kva_block *b;
        uint8_t key[KVA_KEY];

        key_of(i, key);
        b = kva_index_find(index, key);
        assert_int_equal(b != NULL, m->of[i].known);
        blocks += m->of[i].known;
        if (!b)
            continue;
        assert_int_equal(b->want, m->of[i].want);
        assert_int_equal(b->have, m->of[i].have);
        assert_int_equal(b->told, m->of[i].told);
        for (unsigned w = 0; w < MEMBERS; w++)
            have[w] += (m->of[i].have >> w & 1) * bytes_of(i);
    }
    assert_int_equal(stats.blocks, blocks);
    for (unsigned w = 0; w < MEMBERS; w++) {
        assert_int_equal(stats.members[w].want, m->n[w]);
        assert_int_equal(stats.members[w].have_bytes, have[w]);
    }
}

static struct kva_index *make(const char *policy, uint64_t first, uint64_t second)
{
    const struct kva_index_opts opts = {.n_members = MEMBERS,
                                        .limit = {first, second, UINT64_MAX},
                                        .policy = kva_policy_find(policy)};
    struct kva_index *index;

    assert_int_equal(kva_index_create(&opts, &index), 0);
    return index;
}

static void tell(struct kva_index *index, unsigned i, uint8_t teller, bool known)
{
    uint8_t key[KVA_KEY];
    const struct kva_told told = {
        .key = key, .bytes = bytes_of(i), .teller = teller, .known = known, .now_s = 1};

    key_of(i, key);
    assert_true(kva_index_tell(index, &told) >= 0);
}

static void model_tell(struct model *m, unsigned i, unsigned teller, bool known)
{
    if (!m->of[i].known || (!(m->of[i].told >> teller & 1) && !known))
        model_use(m, i);
    m->of[i].told |= 1u << teller;
}

static void step(struct kva_index *index, struct model *m, uint64_t *seed)
{
    unsigned i = (unsigned)unit_below(seed, KEYS), w = (unsigned)unit_below(seed, MEMBERS);
    uint8_t key[KVA_KEY], teller = (uint8_t)unit_below(seed, TELLERS);
    bool known = unit_below(seed, 4) == 0;

    key_of(i, key);
    switch (unit_below(seed, 24)) {
    case 0: /* a publisher dies */
        kva_index_forget(index, teller);
        for (unsigned k = 0; k < KEYS; k++)
            if (m->of[k].told >> teller & 1) {
                m->of[k].told &= ~(1u << teller);
                model_drop(m, k);
            }
        break;
    case 1 ... 6:
        tell(index, i, teller, known);
        model_tell(m, i, teller, known);
        break;
    case 7 ... 9:
        kva_index_untell(index, key, teller, 1);
        if (m->of[i].known && m->of[i].told >> teller & 1) {
            m->of[i].told &= ~(1u << teller);
            model_drop(m, i);
        }
        break;
    case 10 ... 16:
        assert_int_equal(kva_index_use(index, key, 1), m->of[i].known);
        if (m->of[i].known)
            model_use(m, i);
        break;
    case 17 ... 20:
        assert_int_equal(kva_index_found(index, w, key, bytes_of(i), 0), 0);
        if (!m->of[i].known)
            model_put(m, i, w, true);
        m->of[i].have |= 1u << w;
        break;
    default:
        kva_index_gone(index, w, key);
        if (m->of[i].known) {
            m->of[i].have &= ~(1u << w);
            model_drop(m, i);
        }
    }
}

static void test_model(void **state)
{
    uint64_t seed = unit_seed();

    (void)state;
    for (size_t round = 0; round < unit_rounds(20); round++) {
        struct model m = {.limit = {KVA_UNIT * 50, KVA_UNIT * 100}};
        struct kva_index *index = make("lru", m.limit[0], m.limit[1]);

        for (int i = 0; i < 1500; i++) {
            step(index, &m, &seed);
            if (i % 100 == 0)
                compare(index, &m);
        }
        compare(index, &m);
        kva_index_destroy(index);
    }
}

/* -- policies ---------------------------------------------------------------------------------- */

/* Under each policy limits hold, and no blob is lost. */
static void check_books(const char *policy, uint64_t *seed)
{
    struct kva_index *index = make(policy, KVA_UNIT * 40, KVA_UNIT * 80);
    struct kva_index_stats stats;
    bool told[KEYS] = {false};
    uint64_t n = 0;

    for (int i = 0; i < 20000; i++) {
        unsigned k = (unsigned)(unit_below(seed, KEYS) * unit_below(seed, KEYS) / KEYS);
        uint8_t key[KVA_KEY];

        key_of(k, key);
        if (unit_below(seed, 50) == 0 && told[k]) {
            kva_index_untell(index, key, 0, 1);
            told[k] = false;
            n--;
        } else if (!kva_index_use(index, key, 1)) {
            tell(index, k, 0, false);
            n += !told[k];
            told[k] = true;
        }
        kva_index_get_stats(index, &stats);
        assert_int_equal(stats.blocks, n);
        assert_int_equal(stats.members[0].want + stats.members[1].want + stats.members[2].want, n);
        assert_true(stats.members[0].want_bytes <= KVA_UNIT * 40);
        assert_true(stats.members[1].want_bytes <= KVA_UNIT * 80);
    }
    kva_index_destroy(index);
}

static void test_policies(void **state)
{
    static const char *const names[] = {"cost", "lru", "lfu", "sieve", "s3fifo"};
    uint64_t seed = unit_seed();

    (void)state;
    for (size_t i = 0; i < KV_COUNT(names); i++)
        check_books(names[i], &seed);
    assert_null(kva_policy_find("fifo"));
}

/* A blob that no request uses again leaves before one that many do, under every policy but plain LRU. */
static void test_a_scan_spares_what_is_hot(void **state)
{
    static const char *const names[] = {"lfu", "s3fifo"};

    (void)state;
    for (size_t n = 0; n < KV_COUNT(names); n++) {
        struct kva_index *index = make(names[n], KVA_UNIT * 30, 0);
        uint8_t key[KVA_KEY];

        key_of(0, key);
        tell(index, 0, 0, false);
        for (int i = 0; i < 5; i++)
            kva_index_use(index, key, 1);
        for (unsigned i = 3; i < KEYS; i += 3) /* of one unit each */
            tell(index, i, 0, false);
        assert_int_equal(kva_index_find(index, key)->want, 0);
        kva_index_destroy(index);
    }
}

/* -- scans ------------------------------------------------------------------------------------- */

static void found(struct kva_index *index, unsigned member, unsigned i)
{
    uint8_t key[KVA_KEY];

    key_of(i, key);
    assert_int_equal(kva_index_found(index, member, key, bytes_of(i), 0), 0);
}

static const struct kva_block *get(struct kva_index *index, unsigned i)
{
    uint8_t key[KVA_KEY];

    key_of(i, key);
    return kva_index_find(index, key);
}

static void test_scan(void **state)
{
    struct kva_index *index = make("lru", KVA_UNIT * 50, KVA_UNIT * 100);

    (void)state;
    found(index, 0, 1);
    found(index, 2, 1);
    found(index, 1, 2);
    tell(index, 3, 0, false); /* told, and nowhere */
    tell(index, 4, 0, false);
    assert_int_equal(kva_index_scan_begin(index), 0);
    found(index, 2, 1);
    found(index, 0, 5);
    tell(index, 6, 0, false);           /* came meanwhile: a listing may have missed it */
    kva_index_scan_end(index, 1u | 4u); /* member 1 didn't answer */
    assert_int_equal(get(index, 1)->have, 4);
    assert_int_equal(get(index, 2)->have, 2);
    assert_non_null(get(index, 3));
    assert_int_equal(get(index, 5)->have, 1);
    assert_non_null(get(index, 6));
    assert_int_equal(kva_index_scan_begin(index), 0);
    found(index, 2, 1);
    kva_index_scan_end(index, 7);
    assert_null(get(index, 2));
    assert_null(get(index, 3));
    assert_null(get(index, 4));
    assert_null(get(index, 5));
    assert_null(get(index, 6));
    kva_index_destroy(index);
}

/* Blobs that nobody tells of leave the fast member before those that are used. */
/* A listing that tells another size than the publisher did leaves the blob its place in the order. */
static void test_size_is_no_age(void **state)
{
    struct kva_index *index = make("lru", 10 * KVA_UNIT, UINT64_MAX);
    uint8_t key[KVA_KEY];
    (void)state;

    for (unsigned i = 0; i < 3; i++) {
        const struct kva_told told = {.key = key, .bytes = 3 * KVA_UNIT, .now_s = 1};

        key_of(i, key);
        assert_int_equal(kva_index_tell(index, &told), 1);
    }
    for (unsigned i = 0; i < 3; i++) {
        key_of(2 - i, key);
        assert_int_equal(kva_index_found(index, 2, key, 4 * KVA_UNIT, 0), 0);
    }
    for (unsigned i = 0; i < 3; i++) {
        key_of(i, key);
        assert_int_equal(kva_index_find(index, key)->want, i == 0);
    }
    kva_index_destroy(index);
}

static void test_untold_leave_first(void **state)
{
    struct kva_index *index = make("cost", KVA_UNIT * 10, 0);

    (void)state;
    for (unsigned i = 3; i < 33; i += 3)
        found(index, 0, i);
    for (unsigned i = 33; i < 63; i += 3)
        tell(index, i, 0, false);
    for (unsigned i = 3; i < 33; i += 3)
        assert_int_equal(get(index, i)->want, 2);
    for (unsigned i = 33; i < 63; i += 3)
        assert_int_equal(get(index, i)->want, 0);
    kva_index_destroy(index);
}

/* More foreign bytes than the limit leave no room, and never less than none. */
static void test_reserved(void **state)
{
    struct kva_index *index = make("lru", KVA_UNIT * 10, UINT64_MAX);
    struct kva_index_stats stats;

    (void)state;
    tell(index, 3, 0, false);
    kva_index_reserve(index, 0, KVA_UNIT * 1000);
    kva_index_get_stats(index, &stats);
    assert_int_equal(stats.members[0].limit, 0);
    assert_int_equal(get(index, 3)->want, 1);
    kva_index_reserve(index, 0, 0);
    kva_index_get_stats(index, &stats);
    assert_int_equal(stats.members[0].limit, KVA_UNIT * 10);
    kva_index_destroy(index);
}

/* -- moves ------------------------------------------------------------------------------------- */

static struct kva_move move_of(struct kva_index *index, uint32_t left_s)
{
    struct kva_move moves[4];
    uint32_t at = 0;

    assert_int_equal(kva_index_moves(index, &at, 100, left_s, moves, 4), 1);
    assert_int_equal(at, 0);
    return moves[0];
}

static void test_moves(void **state)
{
    struct kva_index *index = make("lru", KVA_UNIT * 2, 0);
    struct kva_move move;
    uint8_t key[KVA_KEY];
    uint32_t at = 0;

    (void)state;
    key_of(3, key);
    tell(index, 3, 0, false);
    assert_int_equal(move_of(index, 0).kind, KVA_LOOK);
    found(index, 2, 3);
    move = move_of(index, 0);
    assert_int_equal(move.kind, KVA_COPY);
    assert_int_equal(move.from, 2);
    assert_int_equal(move.to, 0);
    found(index, 0, 3);
    move = move_of(index, 0);
    assert_int_equal(move.kind, KVA_REMOVE);
    assert_int_equal(move.from, 2);
    kva_index_linger(index, key, true);
    assert_int_equal(kva_index_moves(index, &at, 100, 0, &move, 1), 0);
    kva_index_linger(index, key, false);
    kva_index_gone(index, 2, key);
    assert_int_equal(kva_index_moves(index, &at, 100, 0, &move, 1), 0);
    kva_index_untell(index, key, 0, 50);
    assert_int_equal(kva_index_moves(index, &at, 100, 60, &move, 1), 0); /* not long ago */
    assert_int_equal(move_of(index, 50).kind, KVA_DELETE);
    tell(index, 3, 1, false); /* another publisher has it */
    assert_int_equal(kva_index_moves(index, &at, 200, 50, &move, 1), 0);
    kva_index_destroy(index);
}

/* A read-only member's copy stays, and is as good as one in the slowest member. */
static void test_fixed(void **state)
{
    struct kva_index_opts opts = {.n_members = 3,
                                  .fixed = 2,
                                  .limit = {KVA_UNIT, UINT64_MAX, UINT64_MAX},
                                  .policy = kva_policy_find("lru")};
    struct kva_index *index;
    struct kva_move move;
    uint8_t key[KVA_KEY];
    uint32_t at = 0;

    (void)state;
    assert_int_equal(kva_index_create(&opts, &index), 0);
    found(index, 1, 3);
    assert_int_equal(kva_index_moves(index, &at, 1, 0, &move, 1), 0);
    tell(index, 3, 0, false);
    move = move_of(index, 0);
    assert_int_equal(move.kind, KVA_COPY);
    assert_int_equal(move.from, 1);
    assert_int_equal(move.to, 0);
    found(index, 0, 3);
    assert_int_equal(kva_index_moves(index, &at, 1, 0, &move, 1), 0);
    tell(index, 6, 0, false);
    assert_int_equal(get(index, 3)->want, 2);
    found(index, 0, 6);
    move = move_of(index, 0);
    assert_int_equal(move.kind, KVA_REMOVE);
    assert_int_equal(move.from, 0);
    assert_int_equal(move.to, 1);
    key_of(3, key);
    kva_index_untell(index, key, 0, 1);
    at = 0;
    assert_int_equal(kva_index_moves(index, &at, 9, 1, &move, 1), 1);
    assert_int_equal(move.kind, KVA_DELETE);
    kva_index_gone(index, 0, key);
    at = 0; /* what the read-only member has stays, and isn't deleted for ever */
    assert_int_equal(kva_index_moves(index, &at, 9, 1, &move, 1), 0);
    kva_index_destroy(index);
    opts.fixed = 7;
    assert_int_equal(kva_index_create(&opts, &index), -EINVAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),
        cmocka_unit_test(test_policies),
        cmocka_unit_test(test_a_scan_spares_what_is_hot),
        cmocka_unit_test(test_scan),
        cmocka_unit_test(test_size_is_no_age),
        cmocka_unit_test(test_untold_leave_first),
        cmocka_unit_test(test_reserved),
        cmocka_unit_test(test_moves),
        cmocka_unit_test(test_fixed),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
