// SPDX-License-Identifier: Apache-2.0
/* Files of workers for --discover: what is read, what is refused, and what a worker inherits. */
#include "indexer/discover/found.h"

#include "base/unit.h"

static const struct ki_found base = {
    .registration = {.block_size = 16, .model = "llama", .tenant = "default"}};

static int read_text(struct ki_found_set *set, const char *text, struct kv_error *why)
{
    int rc = ki_found_read(set, (struct kv_str){text, strlen(text)}, &base, why);

    ki_found_sort(set);
    return rc;
}

static void forms(void **state)
{
    static const char *const same[] = {
        "[{\"instance_id\":\"a\",\"endpoint\":\"tcp://h:1\"},"
        "{\"endpoint\":\"tcp://h:2\",\"instance_id\":7,\"dp_rank\":3,\"replay_endpoint\":\"tcp://"
        "h:3\"}]",
        " {\"x\":[1],\"workers\":[{\"instance_id\":\"7\",\"dp_rank\":3,\"endpoint\":\"tcp://h:2\","
        "\"replay_endpoint\":\"tcp://h:3\"}, "
        "{\"instance_id\":\"a\",\"endpoint\":\"tcp://h:1\"}]}\n",
        "# two workers\n7:3=tcp://h:2+tcp://h:3\n\ta=tcp://h:1 # the last\n",
        "a=tcp://h:1,7:3=tcp://h:2+tcp://h:3\n"};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(same); i++) {
        struct ki_found_set set = {0};
        struct kv_error why = {0};

        assert_int_equal(read_text(&set, same[i], &why), 0);
        assert_int_equal(set.n, 2);
        assert_int_equal(set.items[0].registration.instance, 7);
        assert_int_equal(set.items[0].registration.rank, 3);
        assert_string_equal(set.items[0].registration.replay_endpoint, "tcp://h:3");
        assert_string_equal(set.items[1].registration.name, "a");
        assert_string_equal(set.items[1].registration.endpoint, "tcp://h:1");
        assert_string_equal(set.items[1].registration.model, "llama");
        assert_int_equal(set.items[1].registration.block_size, 16);
        ki_found_set_fini(&set);
    }
}

static void none(void **state)
{
    static const char *const empty[] = {"[]", "{\"workers\":[]}", "# nobody\n"};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(empty); i++) {
        struct ki_found_set set = {0};
        struct kv_error why = {0};

        assert_int_equal(read_text(&set, empty[i], &why), 0);
        assert_int_equal(set.n, 0);
        ki_found_set_fini(&set);
    }
}

static void refused(void **state)
{
    static const struct {
        const char *text, *why;
    } bad[] = {
        {"", "it is empty"},
        {" \n", "it is empty"},
        {"[", "no JSON"},
        {"[{}]", "worker 1: missing field 'instance_id'"},
        {"[{\"instance_id\":1,\"endpoint\":\"tcp://h:1\"},{\"instance_id\":1}]",
         "worker 2: missing"},
        {"[{\"instance_id\":1,\"endpoint\":\"tcp://h:1\"}]x", "no JSON"},
        {"{\"workers\":[],\"workers\":[]}", "twice"},
        {"[{\"instance_id\":1,\"endpoint\":\"tcp://h:1\",\"block_size\":2097152}]", "block_size"},
        {"[{\"instance_id\":1,\"endpoint\":\"tcp://h:1\",\"eagle_groups\":\"0\"}]", "eagle_drop"},
        {"a=tcp://h:1\nb\n", "line 2"},
        {"a=tcp://h:1", "doesn't end"},
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        struct ki_found_set set = {0};
        struct kv_error why = {0};

        assert_true(read_text(&set, bad[i].text, &why) < 0);
        assert_non_null(strstr(why.text, bad[i].why));
        ki_found_set_fini(&set);
    }
}

/* An entry's fields count, others are inherited; and without a block size there is no worker. */
static void inherits(void **state)
{
    struct ki_found from = base;
    struct ki_found_set set = {0};
    struct ki_body body = {0};
    struct kv_error why = {0};
    const char *text = "{\"model_name\":\"m\",\"report\":1,\"num_blocks\":9,\"hash_lookahead\":1}";

    (void)state;
    from.registration.instance = 5;
    from.registration.endpoint = "tcp://h:1";
    from.registration.rank = 2;
    from.registration.habits.eagle_drop = true;
    assert_int_equal(
        ki_found_add_json(&set, (struct kv_str){text, strlen(text)}, 0, &from, &body, &why), 0);
    assert_string_equal(set.items[0].registration.model, "m");
    assert_int_equal(set.items[0].registration.num_blocks, 9);
    assert_int_equal(set.items[0].registration.instance, 5);
    assert_int_equal(set.items[0].registration.rank, 2);
    assert_true(set.items[0].registration.habits.eagle_drop);
    assert_true(set.items[0].has_lookahead && set.items[0].lookahead == 1);
    from.registration.block_size = 0;
    assert_int_equal(
        ki_found_add_json(&set, (struct kv_str){text, strlen(text)}, 0, &from, &body, &why),
        -EINVAL);
    assert_non_null(strstr(why.text, "block_size"));
    assert_int_equal(set.n, 1);
    ki_body_fini(&body);
    ki_found_set_fini(&set);
}

/* The first entry of a rank stays, and the other one is told of. */
static void doubles(void **state)
{
    struct ki_found_set set = {0};
    struct kv_error why = {0};

    (void)state;
    assert_int_equal(
        read_text(&set, "b=tcp://h:9\na=tcp://h:1\na:1=tcp://h:2\na=tcp://h:3\n", &why), 0);
    assert_int_equal(set.n, 3);
    assert_int_equal(set.left_out, 1);
    assert_string_equal(set.why, "a: this rank is named twice");
    for (size_t i = 0; i < set.n; i++)
        assert_string_not_equal(set.items[i].registration.endpoint, "tcp://h:3");
    ki_found_set_fini(&set);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(forms),    cmocka_unit_test(none),    cmocka_unit_test(refused),
        cmocka_unit_test(inherits), cmocka_unit_test(doubles),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
