// SPDX-License-Identifier: Apache-2.0
/* Advice from live events: a curve of all, and of each model and tenant; figures of a cycle that is known by heart. */
#include "advisor/advice.h"
#include "base/unit.h"

static void subject_of(int i, char ret[64])
{
    snprintf(ret, 64, "kvasir.c.model%d.tenant.worker", i);
}

static void test_groups(void **state)
{
    struct kva_advice *advice;
    char subject[64];
    (void)state;

    assert_int_equal(kva_advice_create(64, &advice), 0);
    assert_int_equal(kva_advice_group(advice, "kvasir"), KVA_ALL);
    assert_int_equal(kva_advice_group(advice, "kvasir.c"), KVA_ALL);
    for (int i = 1; i < 2 * KVA_CURVES; i++) {
        subject_of(i, subject);
        assert_int_equal(kva_advice_group(advice, subject), i < KVA_CURVES ? i : KVA_ALL);
    }
    assert_int_equal(kva_advice_group(advice, "kvasir.other.model3.tenant.worker9"), 3);
    kva_advice_destroy(advice);
}

/* Append what /advise says, with one tier of @room blobs. */
static void write_advice(struct kva_advice *advice, uint64_t room, struct kv_buf *out)
{
    const struct kva_advice_terms terms = {
        .prefill = 1000, .gpu_hour = 2, .block_tokens = 100, .share = 50};
    struct kva_volumes volumes = {.config = {.n_members = 2}};
    struct kva_advice *copy;
    struct kv_json_writer w;

    volumes.config.members[0] =
        (struct trd_member_config){.name = "fast", .capacity = room * 1000 * 2};
    volumes.config.members[1] = (struct trd_member_config){.name = "cold", .capacity = UINT64_MAX};
    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    assert_int_equal(kva_advice_copy(advice, &copy), 0);
    kva_advice_json(copy, &volumes, &terms, &w);
    kva_advice_destroy(copy);
    kv_json_end_object(&w);
    kv_buf_putc(out, '\0');
    assert_int_equal(out->error, 0);
}

static void has(const struct kv_buf *out, const char *text)
{
    if (!strstr(out->data, text))
        fail_msg("no %s in %s", text, out->data);
}

/* 10 blobs, used one after the other, 11 times: room for 10 finds 100 of 110, less finds none. */
static void test_figures(void **state)
{
    struct kva_advice *advice;
    struct kv_buf out = KV_BUF_INIT;
    uint8_t group;
    (void)state;

    assert_int_equal(kva_advice_create(4096, &advice), 0);
    write_advice(advice, 10, &out);
    has(&out, "\"advice\":[]");
    group = kva_advice_group(advice, "kvasir.c.m.t.w");
    for (uint64_t i = 0; i < 110; i++)
        kva_advice_use(advice, group, i % 10 + 1, 1000, 1 + i * 3600 / 109);
    kv_buf_clear(&out);
    write_advice(advice, 10, &out);
    has(&out, "\"of\":\"all\",\"references\":110,\"seconds\":3600");
    has(&out, "\"bytes_a_blob\":1000");
    has(&out, "\"member\":\"fast\",\"hit_rate_alone\":0.909");
    has(&out, "\"gpu_seconds_saved_an_hour\":10,");  /* 100 blobs of 100 tokens, 1000 a second */
    assert_null(strstr(out.data, "\"of\":\"m.t\"")); /* it is all */
    kv_buf_clear(&out);
    write_advice(advice, 9, &out);
    has(&out, "\"member\":\"fast\",\"hit_rate_alone\":0,");
    kva_advice_use(advice, kva_advice_group(advice, "kvasir.c.n.t.w"), 77, 1000, 4000);
    kva_advice_use(advice, group, 1, 1000, 4000);
    kv_buf_clear(&out);
    write_advice(advice, 10, &out);
    has(&out, "\"of\":\"all\",\"references\":112,");
    has(&out, "\"of\":\"m.t\",\"references\":1,");
    has(&out, "\"of\":\"n.t\",\"references\":1,");
    kva_advice_destroy(advice);
    kv_buf_fini(&out);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_groups),
                                       cmocka_unit_test(test_figures)};

    return cmocka_run_group_tests(tests, NULL, NULL);
}
