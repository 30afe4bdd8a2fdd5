// SPDX-License-Identifier: Apache-2.0
/**
 * kvbm.h: the block manager. A guide is in docs/kvbm.md, a whole engine loop in
 * examples/kvbm_minimal.c.
 *
 *   kvbm_tokens.h   tokens to blocks to sequence hashes: the names of blocks
 *   kvbm_layout.h   storages and layouts: where the bytes of blocks lie
 *   kvbm_pool.h     registry, pools and handles: hold, find and evict blocks
 *   kvbm_events.h   changes of the tiers, published to callbacks, rings and kv-indexer
 *   kvbm_transfer.h copies between layouts: memory, files, GPUs, in the background
 *   kvbm_group.h    one transfer for all tensor-parallel ranks
 *   kvbm_manager.h  tiers: host, disk and object store behind one handle (docs/kvbm-tiers.md)
 *   kvbm_hit.h      the longest hit of a prompt in a model of several cache groups
 *   kvbm_remote.h   blocks of other nodes: agents and block sets (docs/kvbm-remote.md)
 *   kvbm_directory.h which nodes there are: a directory of peers, followed
 *   kvbm_lease.h    their bytes: shared memory, sources and leases
 *   kvbm_plan.h     which bytes, between tensor-parallel groups of unlike sizes
 *   kvbm_volume.h   blocks in one named place: files, a store, or a peer's
 */
#ifndef KVBM_H
#define KVBM_H

#include "kvbm_directory.h"
#include "kvbm_events.h"
#include "kvbm_group.h"
#include "kvbm_hit.h"
#include "kvbm_layout.h"
#include "kvbm_lease.h"
#include "kvbm_manager.h"
#include "kvbm_plan.h"
#include "kvbm_pool.h"
#include "kvbm_remote.h"
#include "kvbm_tokens.h"
#include "kvbm_transfer.h"
#include "kvbm_volume.h"

#endif
