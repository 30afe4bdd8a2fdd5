// SPDX-License-Identifier: Apache-2.0
/* Bodies of the selection API: of choices and bookings, and of workers. The first byte chooses. */
#include "base/args/instance.h"
#include "require.h"
#include "selector/body.h"
#include "selector/record.h"

/* Every text of an accepted body ends within the buffer. */
static void check_text(const struct ksel_body *b, ksel_text text)
{
    const char *p = ksel_text_of(b, text);

    REQUIRE(!p || memchr(p, '\0', b->strings.len - (text - 1)) != NULL);
}

static void check_body(const struct ksel_body *b)
{
    const ksel_text *required = (const ksel_text *)(const void *)b->required.data;
    const struct ksel_preference *preferred =
        (const struct ksel_preference *)(const void *)b->preferred.data;

    check_text(b, b->model);
    check_text(b, b->id);
    check_text(b, b->session);
    check_text(b, b->policy);
    REQUIRE(!b->id || strlen(ksel_text_of(b, b->id)) == b->id_len);
    REQUIRE(b->id_len <= KSEL_ID_MAX);
    for (size_t i = 0; i < b->required.len / sizeof(*required); i++)
        check_text(b, required[i]);
    for (size_t i = 0; i < b->preferred.len / sizeof(*preferred); i++) {
        check_text(b, preferred[i].label);
        REQUIRE(preferred[i].weight >= 0);
    }
}

static void choice(struct kv_str text)
{
    static struct ki_body prompt;
    static struct ksel_body body; /* used again, as the service does */
    struct kv_error error = {0};
    int rc = ksel_body_parse(text, &prompt, &body, &error);

    REQUIRE(rc == 0 || ((rc == -EBADMSG || rc == -EINVAL) && error.code == rc && error.text[0]));
    if (rc == 0)
        check_body(&body);
}

/* A record that is written is read again as the same. */
static void worker(struct kv_str text)
{
    struct ksel_record *record = ksel_record_create(), *again = ksel_record_create(), *copy;
    struct kv_buf first = KV_BUF_INIT, second = KV_BUF_INIT;
    struct kv_error error = {0};
    struct kv_json_writer w;
    int rc;

    REQUIRE(record && again);
    rc = ksel_record_parse(text, true, record, &error);
    REQUIRE(rc == 0 || ((rc == -EBADMSG || rc == -EINVAL) && error.code == rc && error.text[0]));
    if (rc == 0) {
        copy = ksel_record_copy(record);
        REQUIRE(copy != NULL);
        kv_json_writer_init(&w, &first);
        kv_json_begin_object(&w);
        ksel_record_write(record, ksel_record_lifecycle(record), &w);
        kv_json_end_object(&w);
        REQUIRE(ksel_record_parse((struct kv_str){first.data, first.len}, false, again, &error) ==
                0);
        again->block_size = copy->block_size;
        kv_json_writer_init(&w, &second);
        kv_json_begin_object(&w);
        ksel_record_write(copy, ksel_record_lifecycle(copy), &w);
        kv_json_end_object(&w);
        REQUIRE(first.len == second.len && memcmp(first.data, second.data, first.len) == 0);
        REQUIRE(ksel_record_lifecycle(again) == ksel_record_lifecycle(copy));
        ksel_record_destroy(copy);
    }
    ksel_record_destroy(record);
    ksel_record_destroy(again);
    kv_buf_fini(&first);
    kv_buf_fini(&second);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    if (size == 0)
        return 0;
    (data[0] & 1 ? worker : choice)((struct kv_str){(const char *)data + 1, size - 1});
    return 0;
}
