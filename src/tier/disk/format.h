// SPDX-License-Identifier: Apache-2.0
/**
 * The bytes of the disk tier's headers and records (docs/formats.md, "Disk tier"). No I/O, no
 * state.
 */
#ifndef KVBM_TIER_DISK_FORMAT_H
#define KVBM_TIER_DISK_FORMAT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvbm_pool.h"

#define KVBM_DISK_PAGE 4096       /* bytes of a header; also the alignment of slots */
#define KVBM_DISK_MAX_RECORD 4096 /* and a page of an index holds whole records */

enum kvbm_disk_file { KVBM_DISK_SLOTS, KVBM_DISK_INDEX };

struct kvbm_disk_header {
    uint32_t version; /* read only: the writer's follows from block_tokens */
    uint32_t key_len, record_bytes;
    uint32_t block_tokens; /* tokens that a record has room for; 0: none, version 1 */
    uint64_t slot_bytes;
    uint8_t fingerprint[16]; /* XXH3-128 of the fingerprint, canonical */
    uint8_t uuid[16];        /* identity of the volume */
};

/**
 * Bytes of a record for keys of this length and blocks of this many tokens: the power of two that holds
 * it, so that no record of up to 512 bytes crosses a sector.
 */
uint32_t kvbm_disk_record_bytes(uint32_t key_len, uint32_t block_tokens);
/** Return @block_tokens, or 0 when a record with so many would be longer than KVBM_DISK_MAX_RECORD. */
uint32_t kvbm_disk_room_for_tokens(uint32_t key_len, uint32_t block_tokens);
void kvbm_disk_header_write(const struct kvbm_disk_header *header, enum kvbm_disk_file file,
                            uint8_t page[KVBM_DISK_PAGE]);
/**
 * Decode a header. Returns 0; -EBADMSG unless it is a whole header of such a file; -EPROTONOSUPPORT: of
 * a later version, of which it gives the number alone. Every version has its first bytes, its version
 * and its checksum in the same place.
 */
int kvbm_disk_header_read(const uint8_t page[KVBM_DISK_PAGE], enum kvbm_disk_file file,
                          struct kvbm_disk_header *ret);

struct kvbm_disk_entry {
    uint64_t commit; /* number of the commit, not 0 */
    uint64_t len;
    uint32_t position, group;
    bool has_parent;
    uint8_t sum[16];             /* XXH3-128 of the block's bytes, canonical */
    const uint8_t *key, *parent; /* point into the record */
    /* header->block_tokens numbers of 4 bytes; NULL: not known. Write: of this machine. Read: as in the
     * record, for kvbm_disk_tokens */
    const void *tokens;
};

/** Encode a record into @record (header->record_bytes). @slot: its number in the volume. */
void kvbm_disk_record_write(const struct kvbm_disk_header *header, uint32_t slot,
                            const struct kvbm_disk_entry *entry, uint8_t *record);
/** Decode a record. Returns false when it doesn't verify, as a record of zeros. */
bool kvbm_disk_record_read(const struct kvbm_disk_header *header, uint32_t slot,
                           const uint8_t *record, struct kvbm_disk_entry *ret);
/** Decode @n tokens of a record that was read. */
void kvbm_disk_tokens(const void *tokens, uint32_t n, uint32_t *ret);
/**
 * Return the key of a record that was valid when read or written, or NULL: zeros, or another group.
 * Cheap: verifies nothing.
 */
const uint8_t *kvbm_disk_record_key(const uint8_t *record, uint32_t group);
void kvbm_disk_sum(const void *data, size_t len, uint8_t ret[16]);

#endif
