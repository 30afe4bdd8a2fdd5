// SPDX-License-Identifier: Apache-2.0
/* Records of Dynamo's discovery: what was read is written, and read again as the same; a table takes a
 * record under its own name alone. Names of files come back as they were. */
#include <string.h>

#include "plane/discovery/impl.h"
#include "require.h"

static void check_name(const uint8_t *data, size_t size)
{
    struct kv_buf file = KV_BUF_INIT, again = KV_BUF_INIT;

    if (memchr(data, '\0', size))
        return;
    kvp_dynamo_file_name(&file, (const char *)data, size);
    REQUIRE(kvp_dynamo_from_file_name(&again, kv_buf_cstr(&file)) == 0);
    REQUIRE(again.len == size && (!size || memcmp(again.data, data, size) == 0));
    kv_buf_fini(&file);
    kv_buf_fini(&again);
}

static void put(enum kvp_bucket bucket, const struct kvp_dynamo_endpoint *of, uint64_t publisher,
                const uint8_t *data, size_t size)
{
    struct kvp_table t = {.n = 0};
    struct kv_buf name = KV_BUF_INIT;

    kvp_dynamo_put_name(&name, of, publisher);
    REQUIRE(kvp_table_put(&t, bucket, kv_buf_cstr(&name), data, size));
    kv_buf_putc(&name, '0');
    REQUIRE(!kvp_table_put(&t, bucket, kv_buf_cstr(&name), data, size));
    REQUIRE(t.n == 1 && t.left_out == 1);
    kvp_table_fini(&t);
    kv_buf_fini(&name);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kvp_dynamo_source source, source2;
    struct kvp_dynamo_channel channel, channel2;
    struct kvp_dynamo_endpoint of;
    struct kv_buf out = KV_BUF_INIT;
    char text[512];

    if (kvp_dynamo_read_source(data, size, &source) == 0) {
        kvp_dynamo_write_source(&out, &source);
        REQUIRE(kvp_dynamo_read_source(out.data, out.len, &source2) == 0);
        REQUIRE(source2.worker == source.worker && source2.rank == source.rank &&
                source2.publisher == source.publisher && !strcmp(source2.of.ns, source.of.ns));
        put(KVP_SOURCES, &source.of, source.publisher, data, size);
    }
    kv_buf_clear(&out);
    if (kvp_dynamo_read_channel(data, size, &channel) == 0) {
        put(KVP_CHANNELS, &channel.of, channel.publisher, data, size);
        kvp_dynamo_write_channel(&out, &channel);
        if (*channel.address) {
            REQUIRE(kvp_dynamo_read_channel(out.data, out.len, &channel2) == 0);
            REQUIRE(!strcmp(channel2.address, channel.address));
        }
    }
    kv_buf_fini(&out);
    check_name(data, size);
    if (size < sizeof(text)) {
        memcpy(text, data, size);
        text[size] = '\0';
        (void)kvp_dynamo_endpoint_parse(text, &of);
        (void)kvp_discovery_check(text, NULL);
    }
    return 0;
}
