// SPDX-License-Identifier: Apache-2.0
/**
 * Shared by the tests of the reader: one reader, batches as text, and their expected operations.
 */
#ifndef KV_TESTS_EVENT_READER_UNIT_H
#define KV_TESTS_EVENT_READER_UNIT_H

#include "event/pack.h"
#include "kv_event.h"

extern struct kve_reader *reader;
extern struct kve_batch batch;
extern const uint32_t one_to_8[9]; /* 1 to 9 */

void use_reader(const struct kve_reader_opts *opts);

int set_up(void **state);

int tear_down(void **state);

int decode_bytes(const void *data, size_t len);

int decode(const char *text);

/** Decode a batch of this one event. */
KV_PRINTF(1, 2)
void event(const char *fmt, ...);

uint64_t local(const char *lora, const char *salt, size_t block);

void expect_skip(enum kve_skip skip);

void expect_none(enum kve_skip skip);

const struct kve_op *expect_op(enum kve_op_type type, enum kv_tier tier, size_t n);

/** The event was stored as one block with this local hash. */
void expect_block(uint64_t hash, uint64_t tokens_hash);

#define STORED_1 "['BlockStored', [1], nil, [1,2,3,4], 4"
#define MAP_1 "{'type': 'BlockStored', 'block_hashes': [1], 'token_ids': [1,2,3,4], 'block_size': 4"
#define T(name) cmocka_unit_test_setup_teardown(name, set_up, tear_down)

#endif
