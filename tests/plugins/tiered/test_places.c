// SPDX-License-Identifier: Apache-2.0
/* Memory of places beside a naive model: what was noted last for a key, or nothing, is what it says. */
#include "../../base/unit.h"

#include "tiered/places.h"

enum { KEYS = 4000, ROUNDS = 200000, MEMBERS = 16 };

static uint64_t random_state;

static uint64_t draw(uint64_t n)
{
    return unit_below(&random_state, n);
}

static void test_model(void **state)
{
    static int model[KEYS]; /* member + 1; 0: none */
    struct trd_places *places;
    uint64_t seed = unit_seed(), wrong = 0, unknown = 0, known = 0;
    (void)state;

    random_state = seed;
    assert_int_equal(trd_places_create(1024, &places), 0); /* far fewer than keys */
    for (size_t i = 0; i < ROUNDS; i++) {
        uint64_t key = draw(KEYS);
        int place = trd_places_find(places, &key, sizeof(key));

        if (place >= 0 && place + 1 != model[key])
            wrong++;
        known += place >= 0;
        unknown += place < 0 && model[key];
        if (draw(4) == 0) {
            trd_places_forget(places, &key, sizeof(key));
            model[key] = 0;
            assert_int_equal(trd_places_find(places, &key, sizeof(key)), -1);
        } else if (draw(2)) {
            model[key] = 1 + (int)draw(MEMBERS);
            trd_places_note(places, &key, sizeof(key), (unsigned)model[key] - 1);
            assert_int_equal(trd_places_find(places, &key, sizeof(key)), model[key] - 1);
        }
    }
    assert_int_equal(wrong, 0);
    assert_true(known > 0 && unknown > 0); /* both happen, or the test shows nothing */
    trd_places_destroy(places);
    trd_places_destroy(NULL);
}

static void test_keeps_what_fits(void **state)
{
    struct trd_places *places;
    size_t found = 0;
    (void)state;

    assert_int_equal(trd_places_create(8000, &places), 0);
    for (uint64_t key = 0; key < 4000; key++)
        trd_places_note(places, &key, sizeof(key), key % MEMBERS);
    for (uint64_t key = 0; key < 4000; key++)
        found += trd_places_find(places, &key, sizeof(key)) == (int)(key % MEMBERS);
    assert_true(found > 3900); /* a bucket may overflow here and there */
    trd_places_destroy(places);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_model),
                                       cmocka_unit_test(test_keeps_what_fits)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
