// SPDX-License-Identifier: Apache-2.0
/*
 * Tails of packs, and names of their manifests. The first byte of the input says whether the checksum is
 * made right first, so that the entries behind it are reached. An index that is accepted has entries in
 * the pack, one behind the other, with keys of 1 to 120 bytes.
 */
#include <stdlib.h>

#include "base/hash/hash.h"
#include "require.h"
#include "tiered/pack_format.h"

static void check(const struct trd_pack_name *pack, const struct trd_pack_index *index)
{
    uint64_t from = TRD_PACK_HEAD;
    size_t len;

    for (uint32_t i = 0; i < index->n; i++) {
        const struct trd_pack_entry *entry = &index->entries[i];

        REQUIRE(entry->offset >= from && entry->len <= TRD_PACK_BLOB_MAX);
        from = entry->offset + entry->len;
        REQUIRE(from <= pack->len - pack->tail_len);
        REQUIRE(trd_pack_entry_key(index, i, &len) > index->tail && len > 0 && len <= 120);
    }
}

static void read_names(const uint8_t *data, size_t size)
{
    char name[200], again[TRD_PACK_NAME];
    struct trd_pack_name pack;
    uint8_t id[TRD_PACK_ID];
    uint32_t entry;

    if (size >= sizeof(name))
        return;
    memcpy(name, data, size);
    name[size] = '\0';
    if (trd_pack_read_name(name, &pack)) {
        trd_pack_write_name(&pack, again);
        REQUIRE(strcmp(name, again) == 0);
    }
    if (trd_gone_read_name(name, id, &entry)) {
        trd_gone_write_name(id, entry, again);
        REQUIRE(strcmp(name, again) == 0);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct trd_pack_name pack = {.len = 1 << 20};
    struct trd_pack_index index;
    uint8_t *tail;
    int rc;

    read_names(data, size);
    if (size < 1 + TRD_PACK_TRAILER || size > 100000)
        return 0;
    pack.tail_len = (uint32_t)size - 1;
    tail = malloc(size);
    memcpy(tail, data + 1, size - 1);
    if (*data & 1) {
        uint8_t *trailer = tail + pack.tail_len - TRD_PACK_TRAILER;
        uint64_t at = pack.len - pack.tail_len;

        memcpy(trailer, "KV-PEND\n\1\0\0\0", 12);
        memcpy(trailer + 16, &at, 8);
        memcpy(trailer + 24, &pack.len, 8);
        memset(trailer + 40, 0, TRD_PACK_ID);
        kv_hash(tail, pack.tail_len - 16, tail + pack.tail_len - 16);
    }
    rc = trd_pack_index_read(&pack, tail, &index);
    REQUIRE(rc == 0 || rc == -EBADMSG || rc == -EPROTO || rc == -ENOMEM);
    if (rc == 0) {
        check(&pack, &index);
        trd_pack_index_fini(&index);
    }
    return 0;
}
