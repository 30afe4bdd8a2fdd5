// SPDX-License-Identifier: Apache-2.0
/* Messages of the event plane: what is read can be written, and is read again as the same, in both
 * forms. */
#include <string.h>

#include "base/core/le.h"
#include "plane/record.h"
#include "require.h"

static void put(void *arg, const struct kvp_header *header, const struct kvp_record *record)
{
    (void)header;
    REQUIRE(kvp_record_is_valid(record));
    kvp_put(arg, record);
}

/* Read a message and write it anew. Returns kvp_read's result. */
static int rewrite(const void *data, size_t size, struct kv_buf *out)
{
    struct kvp_header header = KVP_HEADER_INIT;
    int err = kvp_read(data, size, &header, NULL, NULL);

    if (err < 0)
        return err;
    kvp_begin(out, &header);
    REQUIRE(kvp_read(data, size, NULL, put, out) == 0);
    REQUIRE(kvp_end(out, header.n_records) == 0);
    return 0;
}

static void try_message(const void *data, size_t size)
{
    struct kv_buf once = KV_BUF_INIT, twice = KV_BUF_INIT, json = KV_BUF_INIT;

    if (rewrite(data, size, &once) == 0) {
        bool is_json = *(const char *)data == '{';

        REQUIRE(is_json || (once.len == size && memcmp(once.data, data, size) == 0));
        REQUIRE(kvp_to_json(once.data, once.len, &json) == 0);
        REQUIRE(rewrite(json.data, json.len, &twice) == 0);
        REQUIRE(twice.len == once.len);
    }
    kv_buf_fini(&once);
    kv_buf_fini(&twice);
    kv_buf_fini(&json);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct kv_buf summed = KV_BUF_INIT;

    try_message(data, size);
    if (size < KVP_FIXED)
        return 0;
    kv_buf_append(&summed, data, size); /* the same with the checksum that it should have */
    REQUIRE(kvp_end(&summed, kv_get_le32(data + 16)) == 0);
    try_message(summed.data, summed.len);
    kv_buf_fini(&summed);
    return 0;
}
