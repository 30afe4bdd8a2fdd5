// SPDX-License-Identifier: Apache-2.0
/*
 * Files of recorded messages: what is read lies in the file, and, written again, is the same. Checks of
 * records are mended first, so that what stands behind them is reached.
 */
#include <stdio.h>
#include <string.h>

#include "base/core/le.h"
#include "base/core/xxh.h"
#include "cli/events/follow.h"
#include "cli/events/record.h"
#include "cli/events/say.h"
#include "require.h"

static void mend_checks(uint8_t *data, size_t size)
{
    size_t at = KC_RECORD_HEADER;

    while (at + 8 <= size) {
        size_t n = kv_get_le(data + at, 4);
        uint32_t check;

        if (n > size - at - 8)
            break;
        check = (uint32_t)kv_xxh64(data + at + 8, n, 0);
        for (int i = 0; i < 4; i++)
            data[at + 4 + (size_t)i] = (uint8_t)(check >> 8 * i);
        at += 8 + n;
    }
}

static void write_again(const struct kc_message *message, const uint8_t *record, size_t len)
{
    char *text = NULL;
    size_t text_len = 0;
    FILE *file = open_memstream(&text, &text_len);

    REQUIRE(file && kc_record_write(file, message) == 0 && fclose(file) == 0);
    REQUIRE(text_len == len && memcmp(text, record, len) == 0);
    free(text);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + 1);
    struct kc_follower text, json;
    struct kc_message message;
    const char *why = NULL;
    size_t at = KC_RECORD_HEADER;
    long n = 0;

    REQUIRE(copy);
    memcpy(copy, data, size);
    mend_checks(copy, size);
    kc_follower_init(&text, kc_say_text);
    kc_follower_init(&json, kc_say_json);
    if (kc_record_check(copy, size, &why) == 0)
        while ((n = kc_record_read(copy + at, size - at, &message, &why)) > 0) {
            REQUIRE((size_t)n <= size - at);
            write_again(&message, copy + at, (size_t)n);
            REQUIRE(kc_follower_take(&text, &message) == 0);
            REQUIRE(kc_follower_take(&json, &message) == 0);
            for (size_t i = 0; i < text.out.len; i++)
                REQUIRE((uint8_t)text.out.data[i] >= ' ' || text.out.data[i] == '\n');
            kv_buf_clear(&text.out);
            kv_buf_clear(&json.out);
            at += (size_t)n;
        }
    REQUIRE(n <= 0 && (n == 0 || why));
    kc_follower_fini(&text);
    kc_follower_fini(&json);
    free(copy);
    return 0;
}
