// SPDX-License-Identifier: Apache-2.0
/**
 * The format of a pack (docs/formats.md): many blobs in one chunk of a member, with an index at its end.
 *
 *     head │ blob │ blob │ ... │ entry │ entry │ ... │ trailer
 *     32 B                       └────── the tail ───────┘
 *
 * An entry has a blob's key, place, length and XXH3-128; the trailer has the number of entries and the
 * XXH3-128 of the tail. The name of the pack's manifest tells the pack's length and the tail's, so
 * a listing of manifests tells where each index is.
 */
#ifndef KV_TIERED_PACK_FORMAT_H
#define KV_TIERED_PACK_FORMAT_H

#include <stdbool.h>

#include "base/core/buf.h"

enum { TRD_PACK_ID = 16, TRD_PACK_KEY = 24, TRD_PACK_HEAD = 32, TRD_PACK_TRAILER = 72 };
enum { TRD_PACK_NAME = 80 }; /* room for names of manifests */

#define TRD_PACK_MAX ((uint64_t)128 << 20)     /* bytes of a pack; a longer one isn't read */
#define TRD_PACK_TAIL_MAX ((uint32_t)32 << 20) /* bytes of its tail */
#define TRD_PACK_BLOB_MAX ((uint32_t)16 << 20) /* bytes of a blob in a pack */

/** A pack as the name of its manifest tells it. */
struct trd_pack_name {
    uint8_t id[TRD_PACK_ID];
    uint64_t len;      /* of all of it */
    uint32_t tail_len; /* of entries and trailer */
};

/** Write the key of the pack's chunk. */
void trd_pack_key(const uint8_t id[TRD_PACK_ID], uint8_t ret[TRD_PACK_KEY]);
/** True for keys of packs, which no blob may have. */
bool trd_is_pack_key(const void *hash, size_t hash_len);

/** Write, or read, the name of a pack's manifest. */
void trd_pack_write_name(const struct trd_pack_name *pack, char ret[TRD_PACK_NAME]);
bool trd_pack_read_name(const char *name, struct trd_pack_name *ret);
/** Write, or read, the name of the manifest that says: entry @entry of a pack is deleted. */
void trd_gone_write_name(const uint8_t id[TRD_PACK_ID], uint32_t entry, char ret[TRD_PACK_NAME]);
bool trd_gone_read_name(const char *name, uint8_t ret_id[TRD_PACK_ID], uint32_t *ret_entry);

struct trd_pack_entry {
    uint64_t offset; /* in the pack */
    uint32_t len;
    uint32_t at; /* of the entry in the tail */
};

/** An index that was read. */
struct trd_pack_index {
    uint8_t *tail; /* owned */
    struct trd_pack_entry *entries;
    uint32_t n;
    uint64_t created_s; /* by the clock of the program that packed */
};

/**
 * Read a pack's tail, of pack->tail_len bytes; takes @tail. Nothing of it is believed before its
 * checksum, and all of its entries lie between head and tail, one behind the other. Returns 0; -EBADMSG: damaged,
 * or of another pack; -EPROTO: of a later version; -ENOMEM.
 */
int trd_pack_index_read(const struct trd_pack_name *pack, uint8_t *tail,
                        struct trd_pack_index *ret);
void trd_pack_index_fini(struct trd_pack_index *index);

/** The key of entry @i, of *@ret_len bytes. */
const uint8_t *trd_pack_entry_key(const struct trd_pack_index *index, uint32_t i, size_t *ret_len);
/** True when @data are the bytes of entry @i. */
bool trd_pack_entry_is(const struct trd_pack_index *index, uint32_t i, const void *data);
/** True when two entries have one checksum. */
bool trd_pack_entries_equal(const struct trd_pack_index *a, uint32_t i,
                            const struct trd_pack_index *b, uint32_t k);

/** A pack that is being made, in memory. */
struct trd_pack_builder {
    struct kv_buf bytes, entries;
    uint32_t n;
    struct trd_pack_name name; /* id from the beginning, lengths after trd_pack_end */
};

int trd_pack_begin(struct trd_pack_builder *b); /* with a new id; -ENOMEM, -EIO */
/** True when its tail has no room for another entry: of many small blobs it is as long as they are. */
bool trd_pack_is_full(const struct trd_pack_builder *b, size_t hash_len);
void trd_pack_add(struct trd_pack_builder *b, const void *hash, size_t hash_len, const void *data,
                  size_t len);
/** Append the tail. Returns 0 or -ENOMEM; b->bytes is the pack. */
int trd_pack_end(struct trd_pack_builder *b, uint64_t created_s);
void trd_pack_builder_fini(struct trd_pack_builder *b);

#endif
