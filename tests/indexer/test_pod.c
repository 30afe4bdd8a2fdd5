// SPDX-License-Identifier: Apache-2.0
/* Pods as the API tells of them: which may be asked, and which workers they are. */
#include "indexer/discover/pod.h"

#include "base/unit.h"

#define META "\"metadata\":{\"name\":\"a\",\"namespace\":\"n\",\"uid\":\"u\""
#define PORTS \
    "\"spec\":{\"containers\":[{\"ports\":[{\"name\":\"kv-events\",\"containerPort\":9}]}]}"
#define READY "\"conditions\":[{\"type\":\"Ready\",\"status\":\"True\"}]"
#define RUNS "\"status\":{\"phase\":\"Running\",\"podIP\":\"10.0.0.1\"," READY "}"

static int read_pod(const char *text, struct ki_pod *pod)
{
    struct kv_json json;

    kv_json_init(&json, text, strlen(text));
    ki_pod_read(pod, &json);
    return kv_json_finish(&json);
}

static void absences(void **state)
{
    static const struct {
        const char *text, *why;
    } pods[] = {
        {"{" META "}," PORTS "," RUNS "}", NULL},
        {"{" RUNS "," PORTS "," META ",\"deletionTimestamp\":null}}", NULL},
        {"{" META ",\"deletionTimestamp\":\"2026-01-01T00:00:00Z\"}," RUNS "}",
         "it is being deleted"},
        {"{" META "},\"status\":{\"phase\":\"Pending\",\"podIP\":\"10.0.0.1\"," READY "}}",
         "it isn't running"},
        {"{" META "},\"status\":{\"phase\":\"Running\"," READY "}}", "it has no address"},
        {"{" META "},\"status\":{\"phase\":\"Running\",\"podIP\":\"10.0.0.1\",\"conditions\":[{"
         "\"status\":\"False\",\"type\":\"Ready\"}]}}",
         "it isn't ready"},
        {"{" META
         "},\"status\":{\"phase\":\"Running\",\"podIP\":\"10.0.0.1\",\"conditions\":null}}",
         "it isn't ready"},
        {"{" META "},\"status\":null}", "it isn't running"},
    };
    struct ki_pod pod = {0};

    (void)state;
    for (size_t i = 0; i < KV_COUNT(pods); i++) {
        const char *why;

        assert_int_equal(read_pod(pods[i].text, &pod), 0);
        why = ki_pod_absence(&pod);
        if (pods[i].why)
            assert_string_equal(why, pods[i].why);
        else
            assert_null(why);
    }
    ki_pod_fini(&pod);
}

/* A pod of another uid is another process, whatever else is the same. */
static void incarnations(void **state)
{
    static const struct ki_pod_rules rules = {"kv-events", "kv-replay", false};
    const struct ki_found base = {.registration = {.block_size = 16, .model = "m", .tenant = "t"}};
    const char *const texts[] = {"{" META "}," PORTS "," RUNS "}",
                                 "{\"metadata\":{\"name\":\"a\",\"uid\":\"v\"}," PORTS "," RUNS
                                 "}"};
    struct ki_found_set sets[2] = {{0}, {0}};
    struct ki_body body = {0};
    struct kv_error why = {0};
    struct ki_pod pod = {0};

    (void)state;
    for (int i = 0; i < 2; i++) {
        assert_int_equal(read_pod(texts[i], &pod), 0);
        assert_int_equal(ki_pod_workers(&pod, &rules, &base, &body, &sets[i], &why), 0);
        assert_string_equal(sets[i].items[0].registration.endpoint, "tcp://10.0.0.1:9");
        assert_true(ki_found_equal(&sets[i].items[0], &sets[i].items[0]));
    }
    assert_int_equal(ki_found_compare(&sets[0].items[0], &sets[1].items[0]), 0);
    assert_false(ki_found_equal(&sets[0].items[0], &sets[1].items[0]));
    for (int i = 0; i < 2; i++)
        ki_found_set_fini(&sets[i]);
    ki_body_fini(&body);
    ki_pod_fini(&pod);
}

static void errors_and_bookmarks(void **state)
{
    struct ki_pod pod = {0};

    (void)state;
    assert_int_equal(
        read_pod("{\"kind\":\"Status\",\"status\":\"Failure\",\"code\":410,\"message\":\"old\"}",
                 &pod),
        0);
    assert_int_equal(pod.code, 410);
    assert_string_equal(pod.message, "old");
    assert_int_equal(
        read_pod("{\"metadata\":{\"resourceVersion\":\"12\",\"creationTimestamp\":null},"
                 "\"spec\":{\"containers\":null},\"status\":{}}",
                 &pod),
        0);
    assert_string_equal(pod.version, "12");
    assert_int_equal(pod.code, 0);
    assert_string_equal(pod.name, "");
    ki_pod_fini(&pod);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(absences), cmocka_unit_test(incarnations),
                                       cmocka_unit_test(errors_and_bookmarks)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
