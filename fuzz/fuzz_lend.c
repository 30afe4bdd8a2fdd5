// SPDX-License-Identifier: Apache-2.0
/* Bodies of requests about blocks, and of their answers, as a peer may send them. Whatever is accepted
 * lies within its body, and is written alike. */
#include "peer/lease/lease_wire.h"

#include "base/core/le.h"
#include "require.h"

#define KEY_LEN 8

static void same(struct kv_buf *again, const uint8_t *data, size_t len)
{
    REQUIRE(!again->error && again->len == len && memcmp(again->data, data, len) == 0);
    kv_buf_fini(again);
}

static void read_asked(const uint8_t *data, size_t len)
{
    struct kv_buf again = KV_BUF_INIT;
    struct kvbm_asked asked;

    if (kvbm_asked_read(data, len, KEY_LEN, &asked) != 0)
        return;
    REQUIRE(asked.n && asked.n <= KVBM_MAX_ASKED && asked.group < KVBM_MAX_GROUPS);
    REQUIRE(asked.keys + (size_t)asked.n * KEY_LEN == data + len);
    kvbm_asked_write(&again, &asked, KEY_LEN);
    same(&again, data, len);
}

static void read_told(const uint8_t *data, size_t len)
{
    struct kvbm_told told;

    if (kvbm_told_read(data, len, 1000, &told) != 0)
        return;
    REQUIRE(told.n <= 1000 && told.time_ms);
    REQUIRE(told.blocks == told.generations + (size_t)told.n * 8);
    REQUIRE(told.blocks + (size_t)told.n * 4 == data + len);
}

static void read_wanted(const uint8_t *data, size_t len)
{
    static uint32_t places[KVBM_MAX_ASKED];
    struct kv_buf again = KV_BUF_INIT;
    struct kvbm_wanted wanted;

    if (kvbm_wanted_read(data, len, &wanted) != 0)
        return;
    REQUIRE(wanted.n && wanted.n <= KVBM_MAX_ASKED);
    REQUIRE(wanted.places + (size_t)wanted.n * 4 == data + len);
    for (uint32_t i = 0; i < wanted.n; i++)
        places[i] = (uint32_t)kv_get_le(wanted.places + (size_t)i * 4, 4);
    kvbm_wanted_write(&again, wanted.id, wanted.sums, places, wanted.n);
    same(&again, data, len);
}

static void read_small(const uint8_t *data, size_t len)
{
    struct kv_buf again = KV_BUF_INIT;
    uint32_t time_ms;
    uint64_t id;

    if (kvbm_renewal_read(data, len, &id, &time_ms) == 0) {
        kvbm_renewal_write(&again, id, time_ms);
        same(&again, data, len);
    }
    if (kvbm_number_read(data, len, &id) == 0) {
        kvbm_number_write(&again, id);
        same(&again, data, len);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    read_asked(data, size);
    read_told(data, size);
    read_wanted(data, size);
    read_small(data, size);
    return 0;
}
