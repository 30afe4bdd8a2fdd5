// SPDX-License-Identifier: Apache-2.0
/* Headers and records. A record's checksum is seeded with the volume's uuid and its slot, so a
 * record of another file, or in another place, is invalid. Numbers are little-endian. */
#include "tier/disk/format.h"

#include <endian.h>
#include <errno.h>
#include <string.h>

#include "base/core/xxh.h"
#include "base/hash/hash.h"

enum {
    VERSION = 1,
    VERSION_TOKENS = 2, /* records have room for tokens; the newest */
    /* header */
    H_VERSION = 8,
    H_BYTES = 12,
    H_KEY_LEN = 16,
    H_RECORD_BYTES = 20,
    H_SLOT_BYTES = 24,
    H_FINGERPRINT = 32,
    H_UUID = 48,
    H_BLOCK_TOKENS = 64, /* version 2 */
    H_SUM = KVBM_DISK_PAGE - 16,
    /* record */
    R_CHECK = 0,
    R_COMMIT = 8,
    R_SUM = 16,
    R_LEN = 32,
    R_POSITION = 40,
    R_GROUP = 44,
    R_FLAGS = 45,
    R_MARK = 46,
    R_KEY = 48,
    MARK = 0x524b, /* "KR" */
    /* flags */
    HAS_PARENT = 1,
    HAS_TOKENS = 2
};

static void put32(uint8_t *at, uint32_t value)
{
    value = htole32(value);
    memcpy(at, &value, sizeof(value));
}

static void put64(uint8_t *at, uint64_t value)
{
    value = htole64(value);
    memcpy(at, &value, sizeof(value));
}

static uint32_t get32(const uint8_t *at)
{
    uint32_t value;

    memcpy(&value, at, sizeof(value));
    return le32toh(value);
}

static uint64_t get64(const uint8_t *at)
{
    uint64_t value;

    memcpy(&value, at, sizeof(value));
    return le64toh(value);
}

void kvbm_disk_sum(const void *data, size_t len, uint8_t ret[16])
{
    kv_hash(data, len, ret);
}

uint32_t kvbm_disk_record_bytes(uint32_t key_len, uint32_t block_tokens)
{
    uint32_t bytes = 64;

    while (bytes < R_KEY + 2 * key_len + 4 * block_tokens)
        bytes *= 2;
    return bytes;
}

uint32_t kvbm_disk_room_for_tokens(uint32_t key_len, uint32_t block_tokens)
{
    return block_tokens <= (KVBM_DISK_MAX_RECORD - R_KEY - 2 * key_len) / 4 ? block_tokens : 0;
}

/* ---- header ---- */

static const char *magic_of(enum kvbm_disk_file file)
{
    return file == KVBM_DISK_SLOTS ? "KVBMSLT\n" : "KVBMIDX\n";
}

void kvbm_disk_header_write(const struct kvbm_disk_header *header, enum kvbm_disk_file file,
                            uint8_t page[KVBM_DISK_PAGE])
{
    memset(page, 0, KVBM_DISK_PAGE);
    memcpy(page, magic_of(file), 8);
    put32(page + H_VERSION, header->block_tokens ? VERSION_TOKENS : VERSION);
    put32(page + H_BYTES, KVBM_DISK_PAGE);
    put32(page + H_KEY_LEN, header->key_len);
    put32(page + H_RECORD_BYTES, header->record_bytes);
    put64(page + H_SLOT_BYTES, header->slot_bytes);
    memcpy(page + H_FINGERPRINT, header->fingerprint, 16);
    memcpy(page + H_UUID, header->uuid, 16);
    put32(page + H_BLOCK_TOKENS, header->block_tokens);
    kvbm_disk_sum(page, H_SUM, page + H_SUM);
}

int kvbm_disk_header_read(const uint8_t page[KVBM_DISK_PAGE], enum kvbm_disk_file file,
                          struct kvbm_disk_header *ret)
{
    struct kvbm_disk_header header;
    uint32_t version;
    uint8_t sum[16];

    kvbm_disk_sum(page, H_SUM, sum);
    if (memcmp(page, magic_of(file), 8) != 0 || memcmp(sum, page + H_SUM, 16) != 0)
        return -EBADMSG;
    version = get32(page + H_VERSION);
    if (version > VERSION_TOKENS) {
        *ret = (struct kvbm_disk_header){.version = version};
        return -EPROTONOSUPPORT;
    }
    if (version < VERSION)
        return -EBADMSG;
    header.version = version;
    header.block_tokens = version == VERSION_TOKENS ? get32(page + H_BLOCK_TOKENS) : 0;
    header.key_len = get32(page + H_KEY_LEN);
    header.record_bytes = get32(page + H_RECORD_BYTES);
    header.slot_bytes = get64(page + H_SLOT_BYTES);
    memcpy(header.fingerprint, page + H_FINGERPRINT, 16);
    memcpy(header.uuid, page + H_UUID, 16);
    if (get32(page + H_BYTES) != KVBM_DISK_PAGE || header.key_len < 1 ||
        header.key_len > KVBM_MAX_KEY || !header.slot_bytes)
        return -EBADMSG;
    if ((version == VERSION_TOKENS &&
         !kvbm_disk_room_for_tokens(header.key_len, header.block_tokens)) ||
        header.record_bytes != kvbm_disk_record_bytes(header.key_len, header.block_tokens))
        return -EBADMSG;
    *ret = header;
    return 0;
}

/* ---- records ---- */

static uint64_t check_of(const struct kvbm_disk_header *header, uint32_t slot,
                         const uint8_t *record)
{
    return kv_xxh64(record + R_COMMIT, header->record_bytes - R_COMMIT,
                    get64(header->uuid) + slot * UINT64_C(0x9e3779b97f4a7c15));
}

void kvbm_disk_record_write(const struct kvbm_disk_header *header, uint32_t slot,
                            const struct kvbm_disk_entry *entry, uint8_t *record)
{
    const uint8_t *tokens = header->block_tokens ? entry->tokens : NULL;
    uint32_t token;

    memset(record, 0, header->record_bytes);
    put64(record + R_COMMIT, entry->commit);
    memcpy(record + R_SUM, entry->sum, 16);
    put64(record + R_LEN, entry->len);
    put32(record + R_POSITION, entry->position);
    record[R_GROUP] = (uint8_t)entry->group;
    record[R_FLAGS] = (uint8_t)((entry->has_parent ? HAS_PARENT : 0) | (tokens ? HAS_TOKENS : 0));
    record[R_MARK] = MARK & 0xff;
    record[R_MARK + 1] = MARK >> 8;
    memcpy(record + R_KEY, entry->key, header->key_len);
    if (entry->has_parent)
        memcpy(record + R_KEY + header->key_len, entry->parent, header->key_len);
    for (uint32_t i = 0; tokens && i < header->block_tokens; i++) {
        memcpy(&token, tokens + 4 * (size_t)i, sizeof(token));
        put32(record + R_KEY + 2 * header->key_len + 4 * (size_t)i, token);
    }
    put64(record + R_CHECK, check_of(header, slot, record));
}

bool kvbm_disk_record_read(const struct kvbm_disk_header *header, uint32_t slot,
                           const uint8_t *record, struct kvbm_disk_entry *ret)
{
    if (record[R_MARK] != (MARK & 0xff) || record[R_MARK + 1] != MARK >> 8 ||
        get64(record + R_CHECK) != check_of(header, slot, record))
        return false;
    ret->commit = get64(record + R_COMMIT);
    memcpy(ret->sum, record + R_SUM, 16);
    ret->len = get64(record + R_LEN);
    ret->position = get32(record + R_POSITION);
    ret->group = record[R_GROUP];
    ret->has_parent = record[R_FLAGS] & HAS_PARENT;
    ret->key = record + R_KEY;
    ret->parent = ret->has_parent ? ret->key + header->key_len : NULL;
    ret->tokens = record[R_FLAGS] & HAS_TOKENS ? ret->key + 2 * (size_t)header->key_len : NULL;
    return ret->commit && ret->len && ret->len <= header->slot_bytes &&
           ret->group < KVBM_MAX_GROUPS && !(record[R_FLAGS] & ~(HAS_PARENT | HAS_TOKENS)) &&
           (!ret->tokens || header->block_tokens);
}

void kvbm_disk_tokens(const void *tokens, uint32_t n, uint32_t *ret)
{
    for (uint32_t i = 0; i < n; i++)
        ret[i] = get32((const uint8_t *)tokens + 4 * (size_t)i);
}

const uint8_t *kvbm_disk_record_key(const uint8_t *record, uint32_t group)
{
    return record[R_MARK] == (MARK & 0xff) && record[R_MARK + 1] == MARK >> 8 &&
                   record[R_GROUP] == group
               ? record + R_KEY
               : NULL;
}
