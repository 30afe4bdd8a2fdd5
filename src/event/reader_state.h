// SPDX-License-Identifier: Apache-2.0
/**
 * State that a reader keeps between batches, for a replica that goes on where another indexer's reader
 * stood (docs/formats.md): cache groups, sources with their numbers, and salts of chains.
 *
 * A copy of the reader carries it: taken at one moment, written without hurry. Reading fills a fresh
 * reader. Caller-locked.
 */
#ifndef KV_EVENT_READER_STATE_H
#define KV_EVENT_READER_STATE_H

#include "base/json.h"
#include "kv_event.h"

/** A reader that remembers the same, for nothing but the calls below. NULL: no memory. */
struct kve_reader *kve_reader_copy(const struct kve_reader *reader);

/** Write the members of the object that @w is in, all but the salts. */
void kve_reader_write(const struct kve_reader *reader, struct kv_json_writer *w);
/**
 * Write some salts from number *@at on, which begins with 0, as items of the array that @w is in.
 * Returns whether there are more.
 */
bool kve_reader_write_salts(const struct kve_reader *reader, size_t *at, struct kv_json_writer *w);

/**
 * Read member @key of that object into a fresh @reader, salts included. Returns 1; 0: it is none of
 * them, and nothing is read; -EPROTO: read, but no reader of this version is in such a state, and
 * @reader is of no use. Text that isn't of this form is @json's error.
 */
int kve_reader_read(struct kve_reader *reader, struct kv_json *json, struct kv_str key);
/** Bytes that the reader's memory of salts takes. */
size_t kve_reader_salt_bytes(const struct kve_reader *reader);

/** @reader remembers what @from does, instead of what it did; @from is as after its creation. */
void kve_reader_take_over(struct kve_reader *reader, struct kve_reader *from);

#endif
