// SPDX-License-Identifier: Apache-2.0
/* The kinds of backends that batch calls treat differently, for tests that run on each: file stores
 * in a folder of the test, and memory backends with ever smaller extension tables. */
#ifndef TESTS_STORE_BACKENDS_H
#define TESTS_STORE_BACKENDS_H

#include <unistd.h>

#include "kv_store.h"
#include "memory_backend.h"
#include "support.h"

enum backend { FILES, ZSTD, SIDE_CARS, PARTS, BATCHES, SINGLE, BARE, N_BACKENDS };

extern char backends_dir[128];

int backends_set_up(void **state);

int backends_tear_down(void **state);

/** Open a store of that kind; a second one has the same chunks. */
struct kvs_store *backends_open(enum backend which);

/** A key of 8 bytes, spread over the file store's folders. */
void backends_key(uint8_t key[8], uint64_t n);

#endif
