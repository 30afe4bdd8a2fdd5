// SPDX-License-Identifier: Apache-2.0
/**
 * threads.h: a few helper threads for large host calls.
 *
 *     caller: kvx_parallel ──────────► takes chunks until none is left, waits for helpers
 *     helper: (asleep) ── woken ─────► takes chunks until none is left, sleeps
 *
 * One job at a time: a caller that finds the helpers busy does all its chunks alone, so no caller
 * waits for another's copy.
 */
#ifndef KVX_THREADS_H
#define KVX_THREADS_H

#include <stdint.h>

/** Process chunk @chunk. Several threads call this at once. */
typedef void (*kvx_chunk_fn)(void *arg, uint64_t chunk);

/** Run @fn for every chunk below @n_chunks, with helpers when @bytes is large enough. */
void kvx_parallel(kvx_chunk_fn fn, void *arg, uint64_t n_chunks, uint64_t bytes);

#endif
