// SPDX-License-Identifier: Apache-2.0
/* kv.fetch hints. An accepted one, written back as a router writes it, parses to the same. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/core/buf.h"
#include "kvbm_remote.h"
#include "require.h"

#define CAP 64

static void write_hint(const struct kvbm_hint *hint, const uint64_t *hashes, size_t n,
                       struct kv_buf *out)
{
    bool v6 = strchr(hint->host, ':') != NULL;

    kv_buf_puts(out, "{\"protocol_version\":\"0.1\",\"actions\":[{\"payload\":{");
    if (*hint->host)
        kv_buf_printf(out, "\"source_control_endpoint\":\"tcp://%s%s%s:%u\",", v6 ? "[" : "",
                      hint->host, v6 ? "]" : "", (unsigned)hint->port);
    kv_buf_printf(out, "\"mode\":\"%s\",\"no_retain\":%s,\"block_hashes\":[",
                  hint->move ? "move" : "copy", hint->no_retain ? "true" : "false");
    for (size_t i = 0; i < n; i++)
        kv_buf_printf(out, i % 2 ? "%s%" PRIu64 : "%s\"%016" PRIx64 "\"", i ? "," : "", hashes[i]);
    kv_buf_puts(out, "]},\"action_type\":\"kv.fetch\",\"action_version\":\"1.0\"}]}");
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvbm_hint hint = KVBM_HINT_INIT, again = KVBM_HINT_INIT;
    uint64_t hashes[CAP], hashes_again[CAP];
    struct kv_buf out = KV_BUF_INIT;
    long n = kvbm_hint_parse(data, size, &hint, hashes, CAP);
    size_t kept = n > CAP ? CAP : (size_t)n;

    REQUIRE(n != 0);
    if (n < 0)
        return 0;
    REQUIRE((size_t)n <= size && (hint.port != 0) == (*hint.host != '\0'));
    write_hint(&hint, hashes, kept, &out);
    REQUIRE(kvbm_hint_parse(out.data, out.len, &again, hashes_again, CAP) == (long)kept);
    REQUIRE(memcmp(hashes, hashes_again, kept * sizeof(*hashes)) == 0);
    REQUIRE(strcmp(hint.host, again.host) == 0 && hint.port == again.port);
    REQUIRE(hint.move == again.move && hint.no_retain == again.no_retain);
    kv_buf_fini(&out);
    return 0;
}
