// SPDX-License-Identifier: Apache-2.0
/* The cache of choices beside a list, and what a choice brings back. */
#include "base/unit.h"
#include "selector/cache.h"

enum { MAX = 8, IDS = 24, TIME = 40 };

/* The naive model: entries in the order of their ages. */
struct model {
    struct {
        unsigned id;
        uint64_t until, tokens;
    } items[MAX + 1];
    size_t n;
};

static void drop(struct model *m, size_t at)
{
    memmove(&m->items[at], &m->items[at + 1], (m->n - at - 1) * sizeof(m->items[0]));
    m->n--;
}

static size_t find(const struct model *m, unsigned id)
{
    size_t at = 0;

    while (at < m->n && m->items[at].id != id)
        at++;
    return at;
}

static void put(struct model *m, unsigned id, uint64_t until, uint64_t tokens, uint64_t now)
{
    size_t at = find(m, id);

    if (at < m->n)
        drop(m, at);
    while (m->n && (m->n >= MAX || m->items[0].until <= now))
        drop(m, 0);
    m->items[m->n].id = id;
    m->items[m->n].until = until;
    m->items[m->n++].tokens = tokens;
}

static void check_taken(const struct ksel_kept *kept, uint64_t tokens, const char *id)
{
    assert_int_equal(kept->tokens, tokens);
    assert_int_equal(kept->n_hashes, tokens % 5);
    for (size_t i = 0; i < kept->n_hashes; i++)
        assert_int_equal(kept->hashes[i], tokens + i);
    assert_string_equal(kept->id, id);
    assert_string_equal(kept->model, "model");
    assert_string_equal(kept->group, "");
    assert_null(kept->lora);
    assert_string_equal(kept->session, "s");
}

static void test_beside_a_list(void **state)
{
    struct ksel_cache cache = {.max = MAX};
    struct model model = {.n = 0};
    const size_t steps = unit_rounds(20000);
    uint64_t seed = unit_seed(), now = 1, tokens = 0;
    uint64_t hashes[5];
    char id[16];

    (void)state;
    for (size_t step = 0; step < steps; step++, now++) {
        unsigned number = (unsigned)(unit_below(&seed, IDS));
        int len = snprintf(id, sizeof(id), "id-%u", number);
        size_t at = find(&model, number);

        if (unit_below(&seed, 3)) {
            tokens++;
            for (size_t i = 0; i < 5; i++)
                hashes[i] = tokens + i;
            ksel_cache_put(&cache,
                           &(struct ksel_kept){.until_ns = now + TIME,
                                               .model = "model",
                                               .group = "",
                                               .session = "s",
                                               .tokens = tokens,
                                               .hashes = hashes,
                                               .n_hashes = tokens % 5,
                                               .id = id,
                                               .id_len = (size_t)len},
                           now);
            put(&model, number, now + TIME, tokens, now);
        } else {
            struct ksel_kept *kept = ksel_cache_take(&cache, id, (size_t)len, now);
            bool alive = at < model.n && model.items[at].until > now;

            assert_int_equal(kept != NULL, alive);
            if (kept)
                check_taken(kept, model.items[at].tokens, id);
            if (at < model.n)
                drop(&model, at);
            free(kept);
        }
        assert_int_equal(cache.n, model.n);
    }
    ksel_cache_fini(&cache);
    assert_int_equal(cache.n, 0);
    assert_int_equal(cache.bytes, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_beside_a_list)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
