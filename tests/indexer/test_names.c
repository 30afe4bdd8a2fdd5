// SPDX-License-Identifier: Apache-2.0
/* The table of names beside arrays: notes, finds, collisions, sweeps; and readers meanwhile. */
#include "base/unit.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>

#include "base/core/error.h"
#include "indexer/registry/names.h"
#include "starve.h"

#define NUMBERS 500

/* Numbers with their names, or "". */
struct model {
    char text[NUMBERS][24];
    size_t n;
};

static uint64_t number_of(size_t i)
{
    return KV_INSTANCE_NAMED | (uint64_t)i << 20; /* equal in the low bits */
}

static void check_all(struct ki_names *names, const struct model *model)
{
    ki_names_read(names);
    for (size_t i = 0; i < NUMBERS; i++) {
        const struct ki_name *found = ki_names_find(names, number_of(i));

        assert_int_equal(found != NULL, model->text[i][0] != '\0');
        if (found)
            assert_string_equal(found->text, model->text[i]);
    }
    ki_names_end(names);
    assert_int_equal(names->n, model->n);
}

static void sweep_random(struct ki_names *names, struct model *model, uint64_t *random)
{
    for (size_t i = 0; i < NUMBERS; i++) {
        if (unit_random(random) % 2)
            ki_names_mark(names, number_of(i)); /* also numbers without a name */
        else if (model->text[i][0])
            model->text[i][0] = '\0', model->n--;
    }
    ki_names_sweep(names);
    assert_false(ki_names_sweep_is_due(names));
}

static void test_beside_a_model(void **state)
{
    uint64_t random = unit_seed();
    struct model *model = calloc(1, sizeof(*model));
    struct ki_names names;

    (void)state;
    ki_names_init(&names);
    for (uint64_t round = unit_rounds(20000); round; round--) {
        size_t i = unit_random(&random) % NUMBERS;
        char text[24];
        int rc;

        snprintf(text, sizeof(text), "pod-%zu-%d", i, (int)(unit_random(&random) % 8 == 0));
        rc = ki_names_note(&names, number_of(i), text);
        if (!model->text[i][0]) {
            assert_int_equal(rc, 1);
            strcpy(model->text[i], text);
            model->n++;
        } else {
            assert_int_equal(rc, strcmp(model->text[i], text) == 0 ? 0 : -EEXIST);
        }
        if (unit_random(&random) % 1000 == 0)
            sweep_random(&names, model, &random);
        if (round % 500 == 0)
            check_all(&names, model);
    }
    check_all(&names, model);
    ki_names_fini(&names);
    free(model);
}

/* The key is as JSON has it. */
static void test_keys(void **state)
{
    static const char *const cases[][2] = {
        {"pod-a", "\"pod-a\":"}, {"a\"b\\c", "\"a\\\"b\\\\c\":"}, {"\u00e9", "\"\u00e9\":"}};
    struct ki_names names;

    (void)state;
    ki_names_init(&names);
    assert_null(ki_names_find(&names, 7));
    for (size_t i = 0; i < KV_COUNT(cases); i++) {
        const struct ki_name *name;

        assert_int_equal(ki_names_note(&names, i, cases[i][0]), 1);
        name = ki_names_find(&names, i);
        assert_int_equal(name->key_len, strlen(cases[i][1]));
        assert_memory_equal(name->key, cases[i][1], name->key_len);
    }
    ki_names_fini(&names);
}

/* With a sweep whenever one is due, unneeded names never outnumber the needed ones by much. */
static void test_bound(void **state)
{
    struct ki_names names;

    (void)state;
    ki_names_init(&names);
    for (uint64_t i = 0; i < 10000; i++) {
        if (ki_names_sweep_is_due(&names)) {
            for (uint64_t k = 0; k < 100; k++)
                ki_names_mark(&names, number_of(k));
            ki_names_sweep(&names);
        }
        ki_names_note(&names, number_of(i), "x");
        assert_in_range(names.n, 1, 2 * 100 + KI_NAMES_SPARE);
    }
    for (uint64_t k = 0; k < 100; k++)
        assert_non_null(ki_names_find(&names, number_of(k)));
    ki_names_fini(&names);
}

static void test_without_memory(void **state)
{
    struct ki_names names;
    size_t n = 0;

    (void)state;
    ki_names_init(&names);
    for (uint64_t i = 0; i < 200; i++) {
        for (long at = 1;; at++) {
            int rc;

            starve_at(at);
            rc = ki_names_note(&names, number_of(i), "pod");
            if (!starved()) {
                assert_int_equal(rc, 1);
                break;
            }
            assert_int_equal(rc, -ENOMEM);
            assert_int_equal(names.n, n);
            assert_null(ki_names_find(&names, number_of(i)));
        }
        starve_at(0);
        n++;
    }
    starve_at(1);
    ki_names_sweep(&names); /* later */
    assert_true(starved());
    starve_at(0);
    assert_int_equal(names.n, n);
    assert_true(ki_names_sweep_is_due(&names));
    ki_names_fini(&names);
}

struct shared {
    struct ki_names names;
    atomic_bool over;
};

static void *read_all(void *arg)
{
    struct shared *s = arg;
    size_t found = 0;

    while (!atomic_load(&s->over)) {
        ki_names_read(&s->names);
        for (uint64_t i = 0; i < 64; i++) {
            const struct ki_name *name = ki_names_find(&s->names, number_of(i));

            if (name && (name->number != number_of(i) || strncmp(name->text, "pod-", 4) != 0))
                abort();
            found += name != NULL;
        }
        ki_names_end(&s->names);
    }
    return (void *)(uintptr_t)found;
}

static void test_readers(void **state)
{
    struct shared *s = calloc(1, sizeof(*s));
    pthread_t threads[2];

    (void)state;
    ki_names_init(&s->names);
    for (size_t i = 0; i < 2; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, read_all, s), 0);
    for (uint64_t round = 0; round < 200; round++) {
        char text[24];

        for (uint64_t i = 0; i < 64; i++) {
            snprintf(text, sizeof(text), "pod-%d", (int)i);
            assert_in_range(ki_names_note(&s->names, number_of(i), text), 0, 1);
            if ((i + round) % 3)
                ki_names_mark(&s->names, number_of(i));
        }
        ki_names_sweep(&s->names);
    }
    atomic_store(&s->over, true);
    for (size_t i = 0; i < 2; i++)
        pthread_join(threads[i], NULL);
    ki_names_fini(&s->names);
    free(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_beside_a_model), cmocka_unit_test(test_keys),
        cmocka_unit_test(test_bound),          cmocka_unit_test(test_without_memory),
        cmocka_unit_test(test_readers),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
