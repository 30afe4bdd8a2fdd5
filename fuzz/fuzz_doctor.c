// SPDX-License-Identifier: Apache-2.0
/*
 * Parse all that `kvasir doctor` reads of others: the first bytes of a port, and answers of HTTP
 * servers. The first byte chooses. Texts end within their room, and a port's bytes always tell
 * something in the end.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cli/doctor/answers.h"
#include "cli/doctor/port.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

#define REQUIRE_END(text)                     \
    do {                                      \
        if (!memchr((text), 0, sizeof(text))) \
            abort();                          \
    } while (0)

static void read_port(const uint8_t *data, size_t size)
{
    static const struct kc_port_answer none = {.what = KC_PORT_REFUSED};
    uint8_t full[KC_PORT_BYTES] = {0};
    struct kc_port_answer answer = none, again = none;
    int rc = kc_port_read(data, size, &answer);

    REQUIRE_END(answer.type);
    REQUIRE_END(answer.said);
    if (rc && answer.what != KC_PORT_ZMTP && answer.what != KC_PORT_OTHER)
        abort();
    if (!size || size > sizeof(full))
        return;
    memcpy(full, data, size);
    if (!kc_port_read(full, sizeof(full), &again))
        abort();
    if (rc && answer.what == KC_PORT_ZMTP && strcmp(answer.type, again.type) != 0)
        abort();
}

static void read_workers(const char *text, size_t size)
{
    struct kc_listeners listeners = {.n = 0};

    (void)kc_listeners_read(text, size, &listeners);
    for (size_t i = 0; i < listeners.n; i++) {
        REQUIRE_END(listeners.items[i].instance);
        REQUIRE_END(listeners.items[i].endpoint);
        REQUIRE_END(listeners.items[i].reasons);
        REQUIRE_END(listeners.items[i].last_error);
    }
    kc_listeners_fini(&listeners);
}

static void read_match(const char *text, size_t size)
{
    struct kc_match match;

    if (kc_match_read(text, size, "1", &match) == 0 && !match.reason[0])
        abort();
    REQUIRE_END(match.reason);
    REQUIRE_END(match.text);
}

static void read_tokens(const char *text, size_t size)
{
    struct kv_buf tokens = KV_BUF_INIT;

    (void)kc_tokens_read(text, size, &tokens);
    if (tokens.len % sizeof(uint32_t))
        abort();
    kv_buf_fini(&tokens);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *text = (const char *)data + 1;
    struct kc_about about;
    double time;

    if (size == 0)
        return 0;
    size--;
    switch (data[0]) {
    case 'p':
        read_port(data + 1, size);
        break;
    case 'w':
        read_workers(text, size);
        break;
    case 'm':
        read_match(text, size);
        break;
    case 't':
        read_tokens(text, size);
        break;
    case 'b':
        time = kc_batch_time(text, size);
        if (time != 0 && !(time > 1e8 && time < 1e11))
            abort();
        break;
    default:
        (void)kc_about_read(text, size, &about);
        REQUIRE_END(about.service);
        REQUIRE_END(about.version);
    }
    return 0;
}
