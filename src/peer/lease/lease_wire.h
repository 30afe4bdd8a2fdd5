// SPDX-License-Identifier: Apache-2.0
/**
 * Bodies of the requests about blocks: lookup, lease, renew, release, read, memory
 * (docs/formats.md, "Requests about blocks"). Little-endian, fixed width; a reader of a body refuses
 * whatever a writer wouldn't write.
 *
 * Functions that read return 0 or -EPROTO, and point into the body.
 */
#ifndef KVBM_PEER_LEASE_LEASE_WIRE_H
#define KVBM_PEER_LEASE_LEASE_WIRE_H

#include "base/core/buf.h"
#include "base/hash/hash.h"
#include "kvbm_lease.h"

#define KVBM_MAX_ASKED 16384u /* keys of a request */
#define KVBM_SUM_BYTES 16

/** Keys of a set, to look up (time_ms 0) or to lease. */
struct kvbm_asked {
    uint32_t set, group, n, time_ms;
    uint64_t generation; /* of the set, as its reader knows it */
    const uint8_t *keys;
};

void kvbm_asked_write(struct kv_buf *to, const struct kvbm_asked *asked, uint32_t key_len);
int kvbm_asked_read(const void *body, size_t len, uint32_t key_len, struct kvbm_asked *ret);

/** Answer to a lease: for each key the block and its generation. */
struct kvbm_told {
    uint64_t id;
    uint32_t time_ms, n;
    const uint8_t *generations, *blocks; /* as on the wire */
};

/** Write the head of an answer; n generations (8 bytes each) and n blocks (4 bytes each) follow. */
void kvbm_told_write(struct kv_buf *to, uint64_t id, uint32_t time_ms, uint32_t n);
int kvbm_told_read(const void *body, size_t len, uint32_t n, struct kvbm_told *ret);

/** Renewal of a lease; its answer is the time alone, without an id. */
void kvbm_renewal_write(struct kv_buf *to, uint64_t id, uint32_t time_ms);
int kvbm_renewal_read(const void *body, size_t len, uint64_t *id, uint32_t *time_ms);

/** Number of one object: the lease to release (8 bytes), or the set whose memory is wanted. */
void kvbm_number_write(struct kv_buf *to, uint64_t number);
int kvbm_number_read(const void *body, size_t len, uint64_t *ret);

/** Blocks of a lease to send, by their places in it. */
struct kvbm_wanted {
    uint64_t id;
    bool sums; /* send the XXH3-128 of each block before the blocks */
    uint32_t n;
    const uint8_t *places;
};

void kvbm_wanted_write(struct kv_buf *to, uint64_t id, bool sums, const uint32_t *places,
                       uint32_t n);
int kvbm_wanted_read(const void *body, size_t len, struct kvbm_wanted *ret);

/** Blocks of a lease to send by a carrier: as kvbm_wanted, and the tag of their messages. */
void kvbm_pushed_write(struct kv_buf *to, uint64_t id, bool sums, uint64_t tag,
                       const uint32_t *places, uint32_t n);
int kvbm_pushed_read(const void *body, size_t len, struct kvbm_wanted *ret, uint64_t *tag);

static inline void kvbm_put32(struct kv_buf *to, uint32_t value)
{
    const uint8_t le[4] = {(uint8_t)value, (uint8_t)(value >> 8), (uint8_t)(value >> 16),
                           (uint8_t)(value >> 24)};

    kv_buf_append(to, le, sizeof(le));
}

#endif
