// SPDX-License-Identifier: Apache-2.0
/*
 * Priorities that end: a heap of when, looked at only when a block is to be evicted. An entry whose block was
 * given another priority or life meanwhile is passed over when its time comes.
 */
#ifndef KVBM_BM_RETAIN_H
#define KVBM_BM_RETAIN_H

#include <stddef.h>
#include <stdint.h>

struct kvbm_pool;

struct kvbm_retained_one {
    uint32_t when; /* 10 ms since the pool's creation */
    uint32_t slot;
    uint32_t life;
};

struct kvbm_retained {
    struct kvbm_retained_one *heap;
    size_t n, capacity;
};

/** Room for @n more; stale ones make room first. Returns 0 or -ENOMEM. */
int kvbm_retain_reserve(struct kvbm_pool *pool, size_t n);
void kvbm_retain_add(struct kvbm_pool *pool, uint32_t slot, uint32_t when);
/** The end of @ttl_ms from now, at least one unit away, never 0. */
uint32_t kvbm_retain_when(const struct kvbm_pool *pool, uint64_t ttl_ms);
/** Blocks whose time is over get the default priority. */
void kvbm_retain_expire(struct kvbm_pool *pool);
void kvbm_retain_fini(struct kvbm_retained *retained);

#endif
