// SPDX-License-Identifier: Apache-2.0
/* Names of instances in the registry, beside arrays: who has one, for how long, and what peers hear. */
#include "base/unit.h"

#include <errno.h>

#include "indexer/registry/tables.h"

#define INSTANCES 12

static struct ki_registry *open_registry(void)
{
    struct ki_registry_opts opts = {.start_held = true, .threads = 1, .max_registrations = 64};
    struct ki_registry *r;

    assert_int_equal(ki_registry_create(&opts, &r), 0);
    return r;
}

static struct ki_registration of(uint64_t instance, const char *name, uint32_t rank)
{
    return (struct ki_registration){.instance = instance,
                                    .name = name,
                                    .rank = rank,
                                    .block_size = 4,
                                    .endpoint = "ipc:///nobody/listens",
                                    .model = "m",
                                    .tenant = "default"};
}

static int put(struct ki_registry *r, uint64_t instance, const char *name, uint32_t rank,
               struct kv_error *error)
{
    struct ki_registration reg = of(instance, name, rank);

    return ki_registry_register(r, &reg, error);
}

static const char *said(struct ki_registry *r, uint64_t instance)
{
    static char text[KI_INSTANCE_TEXT];

    return ki_registry_instance_text(r, instance, text);
}

/* Which instances are registered, with which ranks, and their names: "" for numbers. */
struct model {
    uint32_t ranks[INSTANCES];
    char name[INSTANCES][16];
};

static void check_all(struct ki_registry *r, const struct model *model)
{
    struct ki_worker_info *infos;
    long n = ki_registry_workers(r, &infos), wanted = 0;

    for (size_t i = 0; i < INSTANCES; i++)
        wanted += __builtin_popcount(model->ranks[i]);
    assert_int_equal(n, wanted);
    for (long i = 0; i < n; i++) {
        const char *name = model->name[infos[i].instance];

        assert_true(model->ranks[infos[i].instance] & 1u << infos[i].rank);
        assert_int_equal(infos[i].name != NULL, name[0] != '\0');
        if (infos[i].name)
            assert_string_equal(infos[i].name, name);
    }
    ki_worker_infos_free(infos, n);
}

/*
 * Instances register by number or by one of two names, which share a number as if they collided. A
 * removal is remembered for an hour, so that a name once noted stays.
 */
static void registered_at_random(void **state)
{
    uint64_t random = unit_seed();
    struct ki_registry *r = open_registry();
    struct model model = {0};

    (void)state;
    for (size_t round = unit_rounds(3000); round; round--) {
        uint64_t i = unit_below(&random, INSTANCES), way = unit_below(&random, 3);
        uint32_t rank = (uint32_t)unit_below(&random, 3);
        struct kv_error error = {0};
        char name[16];
        int rc;

        if (unit_below(&random, 2)) {
            rc = ki_registry_unregister(r, i, "m", "default", &rank, &error);
            assert_int_equal(rc, model.ranks[i] & 1u << rank ? 0 : -ENOENT);
            if (rc == -ENOENT && model.name[i][0])
                assert_non_null(strstr(error.text, model.name[i]));
            model.ranks[i] &= ~(1u << rank);
            continue;
        }
        snprintf(name, sizeof(name), "pod-%d-%d", (int)i, way == 1 ? 1 : 2);
        rc = put(r, i, way ? name : NULL, rank, &error);
        if (model.ranks[i] & 1u << rank) {
            assert_int_equal(rc, -EEXIST);
        } else if (way && model.name[i][0] && strcmp(model.name[i], name) != 0) {
            assert_int_equal(rc, -EEXIST);
            assert_non_null(strstr(error.text, "rename one"));
        } else {
            assert_int_equal(rc, 0);
            model.ranks[i] |= 1u << rank;
            if (way)
                strcpy(model.name[i], name);
        }
        if (round % 100 == 0)
            check_all(r, &model);
    }
    check_all(r, &model);
    ki_registry_destroy(r);
}

/* A name goes when nothing needs it: neither registration, nor removal note, nor blocks of a dump. */
static void names_that_nothing_needs_go(void **state)
{
    struct ki_registry *r = open_registry();
    struct kv_error error;

    (void)state;
    assert_int_equal(put(r, 1, "registered", 0, &error), 0);
    assert_int_equal(put(r, 2, "removed", 0, &error), 0);
    assert_int_equal(ki_registry_unregister(r, 2, "m", NULL, NULL, &error), 0);
    for (uint64_t i = 0; i < 1000; i++) { /* asked about, and never registered */
        char name[24];

        snprintf(name, sizeof(name), "stranger-%d", (int)i);
        assert_int_equal(ki_registry_name_instance(r, 100 + i, name, &error), 0);
        assert_string_equal(said(r, 100 + i), name);
        assert_int_equal(ki_registry_unregister(r, 100 + i, "m", NULL, NULL, &error), -ENOENT);
        assert_non_null(strstr(error.text, name));
        assert_in_range(r->names.n, 2, 2 * 3 + KI_NAMES_SPARE);
    }
    assert_string_equal(said(r, 1), "registered");
    assert_string_equal(said(r, 2), "removed");
    assert_string_equal(said(r, 100), "100");
    /* One that nothing needs makes way for another of its number; a needed one doesn't. */
    assert_int_equal(ki_registry_name_instance(r, 1099, "other", &error), 0);
    assert_int_equal(ki_registry_name_instance(r, 1, "other", &error), -EEXIST);
    assert_int_equal(ki_registry_name_instance(r, 2, "other", &error), -EEXIST);
    ki_registry_destroy(r);
}

/* A peer that knows no names passes numbers on; the name comes later, and changes the revision. */
static void a_name_is_learned_later(void **state)
{
    struct ki_registry *r = open_registry();
    struct ki_registration reg = of(5, NULL, 0);
    struct kv_error error;
    uint64_t revision;

    (void)state;
    reg.version = ki_registry_next_version(r);
    reg.by_peer = true;
    assert_int_equal(ki_registry_merge(r, &reg, &error), 0);
    assert_string_equal(said(r, 5), "5");
    revision = ki_registry_revision(r);
    reg.name = "pod"; /* of the same version */
    assert_int_equal(ki_registry_merge(r, &reg, &error), 0);
    assert_string_equal(said(r, 5), "pod");
    assert_int_not_equal(ki_registry_revision(r), revision);
    revision = ki_registry_revision(r);
    assert_int_equal(ki_registry_merge(r, &reg, &error), 0);
    assert_int_equal(ki_registry_revision(r), revision);
    reg.name = "another";
    assert_int_equal(ki_registry_merge(r, &reg, &error), -EEXIST);
    reg.version++;
    assert_int_equal(ki_registry_merge(r, &reg, &error), -EEXIST);
    assert_string_equal(said(r, 5), "pod");
    /* The client takes over what a peer registered, by the name. */
    assert_int_equal(put(r, 5, "pod", 0, &error), 0);
    assert_int_equal(put(r, 5, "pod", 0, &error), -EEXIST);
    ki_registry_destroy(r);
}

/* Blocks of a dump keep their names for the dumps of others; each model has its own. */
static void names_of_a_dump(void **state)
{
    struct ki_registry *r = open_registry();
    struct ki_mark marks[3] = {
        {.holder = {7, 0}, .has_position = true, .sequence = 1},
        {.holder = {7, 1}, .has_position = true, .stream_rank = 1, .sequence = 1},
        {.holder = {8, 0}}};
    struct kv_block block = {1, 1};
    struct ki_instance_name *names;
    struct kvi_opts opts = {.size = sizeof(opts)};
    struct kvi_index *index;
    struct ki_model *model;
    struct kv_error error;

    (void)state;
    assert_int_equal(kvi_create(&opts, &index), 0);
    for (size_t i = 0; i < 3; i++)
        assert_int_equal(kvi_store(index, marks[i].holder, KV_TIER_DEVICE, NULL, &block, 1, NULL),
                         0);
    assert_int_equal(put(r, 9, "pod-9", 0, &error), 0);
    assert_int_equal(ki_registry_adopt(r, "m", "default", 4, index, marks, 3, NULL, 0, &error), 0);
    ki_registry_adopt_name(r, 7, "pod-7");
    ki_registry_adopt_name(r, 8, "pod-8");
    ki_registry_adopt_name(r, 6, "nobody");
    assert_string_equal(said(r, 6), "6");
    model = ki_registry_model(r, "m", "default");
    assert_int_equal(ki_registry_names_of(r, model, &names), 3);
    for (size_t i = 0; i < 3; i++) {
        char wanted[8];

        snprintf(wanted, sizeof(wanted), "pod-%d", 7 + (int)i);
        assert_int_equal(names[i].instance, 7 + i);
        assert_string_equal(names[i].name, wanted);
    }
    ki_instance_names_free(names, 3);
    assert_int_equal(ki_registry_unregister(r, 8, "m", NULL, NULL, &error), 0);
    assert_int_equal(ki_registry_names_of(r, model, &names), 2);
    ki_instance_names_free(names, 2);
    ki_model_release(model);
    assert_int_equal(ki_model_create("other", "default", 4, NULL, &model), 0);
    assert_int_equal(ki_registry_names_of(r, model, &names), 0);
    ki_instance_names_free(names, 0);
    ki_model_release(model);
    ki_registry_destroy(r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(registered_at_random),
        cmocka_unit_test(names_that_nothing_needs_go),
        cmocka_unit_test(a_name_is_learned_later),
        cmocka_unit_test(names_of_a_dump),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
