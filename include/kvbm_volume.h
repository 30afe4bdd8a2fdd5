// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm_volume.h: logical volumes, the specification's registerVolume, unregisterVolume, get and put
 * (docs/kvbm-tiers.md, "Volumes"). A volume has a name and keeps blocks of one form under their keys:
 * in files, in a kv_store, or at a peer that lends them.
 *
 *   kvbm_volume_register ─► kvbm_volume_put ─► kvbm_volume_get ─► kvbm_volume_unregister
 *           │
 *           └ lend: peers of `agent` find the volume under the agent's name, and register it with
 *             `peer` on their side
 *
 * A manager (kvbm_manager.h) decides by itself which block lies in which tier. A volume is for
 * programs that decide so themselves: it has one place, and nothing is evicted to another one.
 *
 * Errors are negative errno values, with the reason in the log. A NULL pointer that must not be NULL
 * is -EINVAL. Threads: any function from any thread; nothing may use a volume while another thread
 * unregisters it.
 */
#ifndef KVBM_VOLUME_H
#define KVBM_VOLUME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"
#include "kvbm_layout.h"
#include "kvbm_pool.h"
#include "kvbm_remote.h"

#ifdef __cplusplus
extern "C" {
#endif

/** A registered volume. */
struct kvbm_volume;

/** Descriptor of a volume; set size to sizeof(struct kvbm_volume_opts), zero means the default. */
struct kvbm_volume_opts {
    size_t size;
    const char *name; /* required: 1 to KVBM_MAX_AGENT_NAME of A-Z a-z 0-9 . _ - */
    /* Required: form of a block, as kvbm_manager_opts.block. */
    const struct kvbm_layout_config *block;
    /* Model, revision and parallel rank: required with files and store; of a peer, its agent's. */
    const char *fingerprint;
    uint32_t key_len; /* bytes, 4 to 64; 0: 8 */

    /* ---- where the blocks are: exactly one of files, store, peer ---- */
    const char *files;   /* directories, separated by ':' (the disk tier's format) */
    uint64_t file_bytes; /* with files: required */
    const char *store;   /* kv_store URI (the object tier's format) */
    /* Name of the agent that lends the volume: one with which `agent` has a session, or gets one by
     * following a directory (kvbm_agent_follow). Such a volume is read-only. */
    const char *peer;
    uint32_t set; /* block set of the peer, or of lend; 0: 1 */

    /* ---- peers: the agent outlives the volume ---- */
    struct kvbm_agent *agent; /* required with peer and lend */
    /* Let peers of agent get blocks, too: they are read into lend_bytes of memory, of which peers of
     * this machine copy without this process. Not with peer. */
    bool lend;
    uint64_t lend_bytes; /* 0: 64 blocks */
};
#define KVBM_VOLUME_OPTS_INIT KV_INIT_(kvbm_volume_opts)

/**
 * Register a volume: open its files or its store; blocks that are there are found at once. Of a peer
 * nothing is opened: the volume is down until there is a session. The caller frees *@ret with
 * kvbm_volume_unregister. Returns 0, or
 *   -EINVAL  the descriptor (the log says what)
 *   -EBUSY   another process has the files
 *   -EEXIST  lend: the agent exports such a set
 *   -ENOSPC, -ENOMEM, or another error of the files or the store
 */
KV_API int kvbm_volume_register(const struct kvbm_volume_opts *opts, struct kvbm_volume **ret);

/**
 * Withdraw a volume from peers, write what was put, close its files or store, and free it; the blocks
 * stay. NULL is a no-op. Returns 0; -ETIMEDOUT (a disk still uses memory after @timeout_ms: call
 * again later, nothing is freed).
 */
KV_API int kvbm_volume_unregister(struct kvbm_volume *volume, uint32_t timeout_ms);

/** Blocks of a get or put; set size to sizeof(struct kvbm_volume_io), zero means the default. */
struct kvbm_volume_io {
    size_t size;
    const struct kvbm_chain *chain;   /* required: the keys; tokens are ignored */
    uint32_t n;                       /* keys; required */
    const struct kvbm_layout *layout; /* required: blocks in memory that the CPU can address */
    /* Required: [n] the layout's block of each key; of a get each once */
    const uint32_t *blocks;
    uint64_t deadline_ns; /* CLOCK_MONOTONIC; 0: 10 s from now */
    uint8_t *ok;          /* [(n + 7) / 8] bit i: block i was got, or is kept; may be NULL */
};
#define KVBM_VOLUME_IO_INIT KV_INIT_(kvbm_volume_io)

/**
 * Copy the blocks of keys into memory, and wait for it. A block whose bit in ok is 0 is a miss: its
 * bytes are undefined. Every block is verified: by its checksum, or at a peer of this machine by its
 * generation. A peer that lends no more just now (lease_share) gives misses, too. A block that finds
 * all buffers in use waits for one until deadline_ns. Nothing writes into the blocks after the return.
 * Returns the number of blocks that came, 0 and more, also when the volume is down; -EINVAL; -ENOMEM.
 */
KV_API long kvbm_volume_get(struct kvbm_volume *volume, const struct kvbm_volume_io *io);

/**
 * Keep blocks, and wait until they are durable. A key that the volume has already costs a lookup. A
 * full volume drops the blocks that were used longest ago. Nothing reads the memory after the return.
 * Returns the number of keys, from the first on, that the volume has now: less than n when the time
 * was over or the volume failed; -EROFS (a peer's volume); -EINVAL; -ENOMEM.
 */
KV_API long kvbm_volume_put(struct kvbm_volume *volume, const struct kvbm_volume_io *io);

/** Health of a volume. */
enum kvbm_volume_health {
    KVBM_VOLUME_UP = 0,
    KVBM_VOLUME_DEGRADED, /* some of its directories are out of use: blocks there are misses */
    KVBM_VOLUME_DOWN      /* nothing can be got or put: all directories, the store, or no session */
};

/** State of a volume. */
struct kvbm_volume_info {
    size_t size; /* the caller's */
    char name[KVBM_MAX_AGENT_NAME + 1];
    enum kvbm_volume_health health;
    bool writable;
    uint64_t block_bytes;
    /* Blocks that have room, and that are there as far as known. Capacity 0: no limit that is known
     * (stores), or no session. Used 0 of a peer: it doesn't tell. */
    uint64_t capacity, used;
    uint64_t gets, hits; /* keys asked for; of these, blocks that came */
    uint64_t puts, kept; /* keys handed over; of these, blocks that were kept */
};
#define KVBM_VOLUME_INFO_INIT KV_INIT_(kvbm_volume_info)

/** Read the state. Returns 0; -EINVAL (NULL, or ret->size). */
KV_API int kvbm_volume_get_info(struct kvbm_volume *volume, struct kvbm_volume_info *ret);

#ifdef __cplusplus
}
#endif
#endif
