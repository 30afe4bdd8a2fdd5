// SPDX-License-Identifier: Apache-2.0
#include "extproc/prompt.h"

#include "base/json/json.h"

/* Members of a body that go to /tokenize as they are. */
enum member {
    MODEL,
    PROMPT,
    MESSAGES,
    TOOLS,
    GENERATION,
    CONTINUE,
    SPECIAL,
    TEMPLATE,
    TEMPLATE_ARGS,
    MM_ARGS,
    N_MEMBERS
};
static const char *const names[N_MEMBERS] = {
    [MODEL] = "model",
    [PROMPT] = "prompt",
    [MESSAGES] = "messages",
    [TOOLS] = "tools",
    [GENERATION] = "add_generation_prompt",
    [CONTINUE] = "continue_final_message",
    [SPECIAL] = "add_special_tokens",
    [TEMPLATE] = "chat_template",
    [TEMPLATE_ARGS] = "chat_template_kwargs",
    [MM_ARGS] = "mm_processor_kwargs",
};

void kx_prompt_fini(struct kx_prompt *prompt)
{
    kv_buf_fini(&prompt->model);
    kv_buf_fini(&prompt->tokens);
    kv_buf_fini(&prompt->request);
}

static struct kv_str skip_value(struct kv_json *j)
{
    struct kv_str value = {0};

    if (kv_json_peek(j) == KV_JSON_NULL) { /* as if it weren't there */
        kv_json_skip(j);
        return value;
    }
    value.p = j->p;
    kv_json_skip(j);
    value.len = kv_json_failed(j) ? 0 : (size_t)(j->p - value.p);
    return value;
}

/* Returns false when @body is no JSON object. */
static bool find_members(const void *body, size_t len, struct kv_str found[N_MEMBERS])
{
    struct kv_json j;
    struct kv_str key;

    kv_json_init(&j, body, len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        size_t i = 0;

        while (i < N_MEMBERS && !kv_str_eq(key, names[i]))
            i++;
        if (i < N_MEMBERS)
            found[i] = skip_value(&j);
        else
            kv_json_skip(&j);
    }
    return kv_json_finish(&j) == 0;
}

static int copy_model(struct kx_prompt *prompt, struct kv_str value)
{
    struct kv_buf scratch = KV_BUF_INIT;
    struct kv_json j;
    struct kv_str text;

    kv_json_init(&j, value.p, value.len);
    text = kv_json_str(&j, &scratch);
    if (kv_json_finish(&j) == 0)
        kv_buf_append(&prompt->model, text.p, text.len);
    kv_buf_fini(&scratch);
    return prompt->model.error ? -ENOMEM : 0;
}

static int write_request(struct kx_prompt *prompt, const struct kv_str found[N_MEMBERS],
                         enum member text)
{
    struct kv_json_writer w;

    kv_json_writer_init(&w, &prompt->request);
    kv_json_begin_object(&w);
    for (enum member i = 0; i < N_MEMBERS; i++) {
        bool wanted = text == MESSAGES ? i != PROMPT : (i == MODEL || i == PROMPT || i == SPECIAL);

        if (!wanted || !found[i].len)
            continue;
        kv_json_key(&w, names[i]);
        kv_json_put_raw(&w, found[i].p, found[i].len);
    }
    kv_json_end_object(&w);
    prompt->kind = KX_PROMPT_TEXT;
    return prompt->request.error ? -ENOMEM : 0;
}

static int read_ids(struct kx_prompt *prompt, struct kv_str value)
{
    struct kv_json j;
    size_t n;

    kv_json_init(&j, value.p, value.len);
    n = kv_json_u32_array(&j, &prompt->tokens);
    if (prompt->tokens.error)
        return -ENOMEM;
    if (kv_json_finish(&j) == 0 && n > 0) {
        prompt->kind = KX_PROMPT_TOKENS;
        prompt->guess = n;
    }
    return 0; /* else several prompts in one request */
}

int kx_prompt_read(struct kx_prompt *prompt, const void *body, size_t len)
{
    struct kv_str found[N_MEMBERS] = {{0}};
    bool ok = find_members(body, len, found);
    enum member text = found[MESSAGES].len ? MESSAGES : PROMPT;
    int rc;

    prompt->kind = KX_PROMPT_NONE;
    prompt->guess = len / 4;
    kv_buf_clear(&prompt->model);
    kv_buf_clear(&prompt->tokens);
    kv_buf_clear(&prompt->request);
    if (!ok)
        return 0;
    if (found[MODEL].len) {
        rc = copy_model(prompt, found[MODEL]);
        if (rc < 0)
            return rc;
    }
    if (!found[text].len)
        return 0;
    prompt->guess = found[text].len / 4;
    char first = found[text].p[0];

    if (text == PROMPT && first == '[')
        return read_ids(prompt, found[text]);
    return first == (text == PROMPT ? '"' : '[') ? write_request(prompt, found, text) : 0;
}

int kx_tokens_read(const void *answer, size_t len, struct kv_buf *ret)
{
    struct kv_json j;
    struct kv_str key;
    bool have = false;

    kv_json_init(&j, answer, len);
    kv_json_object(&j);
    while (kv_json_next_key(&j, &key)) {
        if (!have && kv_str_eq(key, "tokens") && kv_json_peek(&j) == KV_JSON_ARRAY) {
            kv_json_u32_array(&j, ret);
            have = true;
        } else {
            kv_json_skip(&j);
        }
    }
    if (ret->error)
        return -ENOMEM;
    return kv_json_finish(&j) == 0 && have ? 0 : -EPROTO;
}
