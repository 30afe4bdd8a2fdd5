// SPDX-License-Identifier: Apache-2.0
/* Headers and records of the disk tier. The first byte chooses. Bit 0: a header, with its own
 * checksum and with a correct one; an accepted header encodes to the same bytes. Otherwise a
 * record, behind the key length: an accepted record is within its limits and encodes to the same
 * bytes. */
#include <errno.h>
#include <string.h>

#include "base/core/xxh.h"
#include "require.h"
#include "tier/disk/format.h"

static void take_header(const uint8_t *page, enum kvbm_disk_file file)
{
    struct kvbm_disk_header header, again;
    uint8_t back[KVBM_DISK_PAGE];
    int rc = kvbm_disk_header_read(page, file, &header);

    REQUIRE(rc == 0 || rc == -EBADMSG || rc == -EPROTONOSUPPORT);
    if (rc < 0)
        return;
    REQUIRE(header.key_len >= 1 && header.key_len <= KVBM_MAX_KEY);
    REQUIRE(header.record_bytes <= KVBM_DISK_MAX_RECORD &&
            KVBM_DISK_PAGE % header.record_bytes == 0);
    kvbm_disk_header_write(&header, file, back);
    REQUIRE(kvbm_disk_header_read(back, file, &again) == 0);
    REQUIRE(again.slot_bytes == header.slot_bytes && memcmp(again.uuid, header.uuid, 16) == 0);
}

static void take_record(const struct kvbm_disk_header *header, uint32_t slot, const uint8_t *record)
{
    struct kvbm_disk_entry entry, again;
    uint8_t back[KVBM_DISK_MAX_RECORD];

    if (!kvbm_disk_record_read(header, slot, record, &entry))
        return;
    REQUIRE(entry.commit && entry.len && entry.len <= header->slot_bytes);
    REQUIRE(entry.group < KVBM_MAX_GROUPS);
    REQUIRE(entry.key + header->key_len <= record + header->record_bytes);
    REQUIRE(!entry.parent || entry.parent + header->key_len <= record + header->record_bytes);
    kvbm_disk_record_write(header, slot, &entry, back);
    REQUIRE(kvbm_disk_record_read(header, slot, back, &again));
    REQUIRE(
        !entry.tokens == !again.tokens &&
        (!entry.tokens || !memcmp(entry.tokens, again.tokens, 4 * (size_t)header->block_tokens)));
    REQUIRE(again.commit == entry.commit && again.position == entry.position &&
            memcmp(again.key, entry.key, header->key_len) == 0);
    REQUIRE(!kvbm_disk_record_read(header, slot + 1, back, &again)); /* invalid in another slot */
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    uint8_t page[KVBM_DISK_PAGE] = {0}, record[KVBM_DISK_MAX_RECORD] = {0};
    struct kvbm_disk_header header = {.slot_bytes = 1 << 20};
    uint64_t sum;

    if (size < 2)
        return 0;
    if (data[0] & 1) {
        memcpy(page, data + 1, size - 1 < sizeof(page) ? size - 1 : sizeof(page));
        take_header(page, KVBM_DISK_SLOTS);
        kvbm_disk_sum(page, sizeof(page) - 16, page + sizeof(page) - 16);
        take_header(page, KVBM_DISK_SLOTS);
        take_header(page, KVBM_DISK_INDEX);
        return 0;
    }
    header.key_len = 1 + data[1] % KVBM_MAX_KEY;
    header.block_tokens = data[1] & 0x80 ? 16 : 0;
    header.record_bytes = kvbm_disk_record_bytes(header.key_len, header.block_tokens);
    memcpy(record, data + 2, size - 2 < sizeof(record) ? size - 2 : sizeof(record));
    take_record(&header, 0, record);
    record[46] = 'K';
    record[47] = 'R';
    sum = kv_xxh64(record + 8, header.record_bytes - 8, 0); /* uuid and slot are 0 */
    memcpy(record, &sum, sizeof(sum));
    take_record(&header, 0, record);
    return 0;
}
