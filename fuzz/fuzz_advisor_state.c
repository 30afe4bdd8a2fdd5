// SPDX-License-Identifier: Apache-2.0
/* The advisor's state file, whose checksum is repaired first so that its contents are looked at; and what
 * clients and the command line give it: keys, hours. */
#include <stdlib.h>
#include <string.h>

#include "advisor/explain.h"
#include "advisor/index/policy.h"
#include "advisor/options.h"
#include "advisor/state.h"
#include "base/core/le.h"
#include "base/core/xxh.h"
#include "require.h"

static void read_state(uint8_t *data, size_t size)
{
    const struct kva_index_opts opts = {
        .n_members = 3, .limit = {4096, 8192, UINT64_MAX}, .policy = kva_policy_find("s3fifo")};
    struct kva_index_stats stats;
    struct kva_index *index;
    uint64_t members = 0, n = 0;
    long rc;

    REQUIRE(kva_index_create(&opts, &index) == 0);
    if (size >= KVA_STATE_HEADER + KVA_STATE_END) {
        members = kv_get_le64(data + 48);
        kv_put_le64(data + size - KVA_STATE_END, kv_xxh64(data, size - KVA_STATE_END, 0));
    }
    rc = kva_state_read(index, members, "s3fifo", data, size);
    kva_index_get_stats(index, &stats);
    REQUIRE(rc < 0 || (uint64_t)rc == stats.blocks);
    for (int m = 0; m < 3; m++)
        n += stats.members[m].want;
    REQUIRE(n == stats.blocks);
    kva_index_reserve(index, 0, 1000); /* pass on what exceeds the limits */
    kva_index_reserve(index, 1, 1000);
    kva_index_get_stats(index, &stats);
    REQUIRE(stats.members[0].want_bytes <= 4096 - 1000);
    kva_index_destroy(index);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size + 1), key[KVA_KEY];
    uint32_t from, to;

    if (!copy)
        return 0;
    memcpy(copy, data, size);
    copy[size] = '\0';
    (void)kva_parse_key((struct kv_str){(const char *)copy, size}, key);
    if (kva_parse_hours((const char *)copy, &from, &to) == 0)
        REQUIRE(from <= 1440 && to <= 1440);
    read_state(copy, size);
    free(copy);
    return 0;
}
