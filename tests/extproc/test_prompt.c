// SPDX-License-Identifier: Apache-2.0
/* Prompts of request bodies, answers of /tokenize, and the memory of a message. */
#include "extproc/prompt.h"

#include "base/unit.h"
#include "extproc/arena.h"

static struct kx_prompt prompt;

static enum kx_prompt_kind read_text(const char *body)
{
    assert_int_equal(kx_prompt_read(&prompt, body, strlen(body)), 0);
    return prompt.kind;
}

static void test_token_ids(void **state)
{
    const uint32_t wanted[] = {1, 2, UINT32_MAX};

    (void)state;
    assert_int_equal(read_text(" {\"prompt\": [1, 2,4294967295], \"model\":\"a\\u0062\"} "),
                     KX_PROMPT_TOKENS);
    assert_int_equal(prompt.tokens.len, sizeof(wanted));
    assert_memory_equal(prompt.tokens.data, wanted, sizeof(wanted));
    assert_string_equal(kv_buf_cstr(&prompt.model), "ab");
    assert_int_equal(prompt.guess, 3);
}

static void test_text(void **state)
{
    (void)state;
    assert_int_equal(read_text("{\"model\" : \"m\",\"prompt\" : \"x\\n\",\"n\":2,\"tools\":[],"
                               "\"add_special_tokens\":false}"),
                     KX_PROMPT_TEXT);
    assert_string_equal(kv_buf_cstr(&prompt.request),
                        "{\"model\":\"m\",\"prompt\":\"x\\n\",\"add_special_tokens\":false}");
    assert_int_equal(read_text("{\"messages\":[{\"role\" : \"user\"}],\"prompt\":\"x\",\"top_p\":1,"
                               "\"chat_template_kwargs\":{\"a\":1},\"tools\":null}"),
                     KX_PROMPT_TEXT);
    assert_string_equal(
        kv_buf_cstr(&prompt.request),
        "{\"messages\":[{\"role\" : \"user\"}],\"chat_template_kwargs\":{\"a\":1}}");
    assert_string_equal(kv_buf_cstr(&prompt.model), "");
}

/* Nothing that one engine prompt could be made of; a model that is named is read where JSON is whole. */
static void test_none(void **state)
{
    static const char *const bodies[] = {
        "",
        "x",
        "[]",
        "{",
        "{}",
        "{\"prompt\":null}",
        "{\"prompt\":5}",
        "{\"prompt\":[]}",
        "{\"prompt\":[\"a\",\"b\"]}",
        "{\"prompt\":[[1],[2]]}",
        "{\"prompt\":[1,-2]}",
        "{\"prompt\":[1.5]}",
        "{\"messages\":\"text\"}",
        "{\"messages\":{}}",
        "{\"prompt\":\"cut",
        "{\"prompt\":\"x\"} y",
    };

    (void)state;
    for (size_t i = 0; i < KV_COUNT(bodies); i++)
        assert_int_equal(read_text(bodies[i]), KX_PROMPT_NONE);
    assert_int_equal(read_text("{\"model\":\"q\"}"), KX_PROMPT_NONE);
    assert_string_equal(kv_buf_cstr(&prompt.model), "q");
    assert_int_equal(read_text("{\"model\":7,\"prompt\":[3]}"), KX_PROMPT_TOKENS);
    assert_string_equal(kv_buf_cstr(&prompt.model), "");
}

static void test_answers(void **state)
{
    static const char *const bad[] = {"",
                                      "[]",
                                      "{}",
                                      "{\"tokens\":5}",
                                      "{\"tokens\":[1,\"a\"]}",
                                      "{\"tokens\":[1]",
                                      "{\"tokens\":[-1]}"};
    const char good[] = "{\"count\":2,\"tokens\":[7,9],\"token_strs\":null}";
    const uint32_t wanted[] = {7, 9};
    struct kv_buf tokens = KV_BUF_INIT;

    (void)state;
    assert_int_equal(kx_tokens_read(good, strlen(good), &tokens), 0);
    assert_int_equal(tokens.len, sizeof(wanted));
    assert_memory_equal(tokens.data, wanted, sizeof(wanted));
    for (size_t i = 0; i < KV_COUNT(bad); i++) {
        kv_buf_clear(&tokens);
        assert_int_equal(kx_tokens_read(bad[i], strlen(bad[i]), &tokens), -EPROTO);
    }
    kv_buf_fini(&tokens);
}

static void *take(struct kx_arena *arena, size_t size)
{
    return arena->allocator.alloc(arena->allocator.allocator_data, size);
}

static void test_arena(void **state)
{
    uint64_t seed = unit_seed();
    struct kx_arena arena = {0};

    (void)state;
    kx_arena_init(&arena);
    for (int round = 0; round < 50; round++) {
        size_t total = 0;

        for (;;) {
            size_t size = unit_below(&seed, unit_below(&seed, 10) ? 200 : 1 << 20);
            uint8_t *p = take(&arena, size);

            if (!p)
                break;
            assert_int_equal((uintptr_t)p % 16, 0);
            memset(p, 0xA5, size); /* overlaps and overruns are the sanitizer's to find */
            total += size;
            assert_true(total <= KX_ARENA_LIMIT);
        }
        assert_true(total > KX_ARENA_LIMIT / 2); /* rests of blocks are the only waste */
        kx_arena_reset(&arena);
        assert_true(arena.total <= KX_ARENA_KEEP);
    }
    assert_null(take(&arena, KX_ARENA_LIMIT + 1));
    assert_null(take(&arena, SIZE_MAX));
    kx_arena_fini(&arena);
}

static int fini(void **state)
{
    (void)state;
    kx_prompt_fini(&prompt);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_token_ids), cmocka_unit_test(test_text),  cmocka_unit_test(test_none),
        cmocka_unit_test(test_answers),   cmocka_unit_test(test_arena),
    };

    return cmocka_run_group_tests(tests, NULL, fini);
}
