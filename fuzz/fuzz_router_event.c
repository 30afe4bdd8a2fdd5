// SPDX-License-Identifier: Apache-2.0
/* RouterEvent JSON: events that were read can be written, and read again as the same. */

#include "event/router/router_event.h"
#include "require.h"

static void write_event(struct kv_buf *out, const struct kve_router_event *event)
{
    struct kv_json_writer writer;

    kv_json_writer_init(&writer, out);
    kve_router_event_write(&writer, event);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kve_router_scratch scratch = {0}, scratch2 = {0};
    struct kv_buf once = KV_BUF_INIT, twice = KV_BUF_INIT;
    struct kve_router_event event, again;
    struct kv_json json;

    scratch.items.limit = 4096;
    kv_json_init(&json, data, size);
    if (kve_router_event_read(&json, &scratch, &event) == 0) {
        write_event(&once, &event);
        kv_json_init(&json, once.data, once.len);
        REQUIRE(kve_router_event_read(&json, &scratch2, &again) == 0 && kv_json_finish(&json) == 0);
        REQUIRE(again.type == event.type && again.n == event.n);
        REQUIRE(again.holder.worker == event.holder.worker &&
                again.holder.rank == event.holder.rank);
        write_event(&twice, &again);
        REQUIRE(twice.len == once.len && memcmp(twice.data, once.data, once.len) == 0);
    } else {
        REQUIRE(kv_json_failed(&json));
    }
    kve_router_scratch_fini(&scratch);
    kve_router_scratch_fini(&scratch2);
    kv_buf_fini(&once);
    kv_buf_fini(&twice);
    return 0;
}
