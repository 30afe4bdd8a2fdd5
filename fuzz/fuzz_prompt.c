// SPDX-License-Identifier: Apache-2.0
/*
 * Request bodies of completions, and answers of /tokenize. What goes to /tokenize is JSON, and reads as the same
 * prompt.
 */
#include "base/json/json.h"
#include "extproc/prompt.h"
#include "require.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kx_prompt first = {0}, again = {0};
    struct kv_buf tokens = KV_BUF_INIT;

    REQUIRE(kx_prompt_read(&first, data, size) == 0);
    if (first.kind == KX_PROMPT_TEXT) {
        REQUIRE(kx_prompt_read(&again, first.request.data, first.request.len) == 0);
        REQUIRE(again.kind == KX_PROMPT_TEXT && again.request.len == first.request.len);
        REQUIRE(memcmp(again.request.data, first.request.data, first.request.len) == 0);
    }
    REQUIRE((first.kind == KX_PROMPT_TOKENS) == (first.tokens.len > 0) ||
            first.kind == KX_PROMPT_NONE);
    if (kx_tokens_read(data, size, &tokens) == 0)
        REQUIRE(tokens.len % sizeof(uint32_t) == 0);
    kv_buf_fini(&tokens);
    kx_prompt_fini(&first);
    kx_prompt_fini(&again);
    return 0;
}
