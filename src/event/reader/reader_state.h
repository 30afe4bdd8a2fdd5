// SPDX-License-Identifier: Apache-2.0
/**
 * Dump and restore the state that a reader keeps between batches (docs/formats.md): cache groups,
 * sources with their numbers, and salts of chains. A replica continues with it where another
 * indexer's reader stood.
 *
 * Writing works on a copy of the reader, taken at one moment and written at leisure. Reading fills
 * a fresh reader. The caller locks.
 */
#ifndef KV_EVENT_READER_READER_STATE_H
#define KV_EVENT_READER_READER_STATE_H

#include "base/json/json.h"
#include "kv_event.h"

/** Copy the reader's state, for the functions below only. NULL: out of memory. */
struct kve_reader *kve_reader_copy(const struct kve_reader *reader);

/** Write the state except the salts, as members of the object that @w is in. */
void kve_reader_write(const struct kve_reader *reader, struct kv_json_writer *w);
/**
 * Write some salts as items of the array that @w is in, from number *@at on (0 at first). Returns
 * true when more follow.
 */
bool kve_reader_write_salts(const struct kve_reader *reader, size_t *at, struct kv_json_writer *w);

/**
 * Read member @key of that object, salts included, into a fresh @reader. Returns 1; 0 for an
 * unknown member, which isn't read; -EPROTO for a state that no reader of this version has (@reader
 * is useless then). Malformed text sets @json's error.
 */
int kve_reader_read(struct kve_reader *reader, struct kv_json *json, struct kv_str key);
/** Return the bytes that the reader's table of salts takes. */
size_t kve_reader_salt_bytes(const struct kve_reader *reader);

/**
 * Replace @reader's state by that of @from, which becomes as new. Returns 0; -EPROTO when groups of
 * @from have no whole number of blocks in one of @reader's block size (nothing changes then).
 */
int kve_reader_take_over(struct kve_reader *reader, struct kve_reader *from);

#endif
