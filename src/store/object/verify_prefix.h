// SPDX-License-Identifier: Apache-2.0
/** The chunks of prefix caches (base/hash/prefix_block.h), as kvs_verify reads them. */
#ifndef KVS_OBJECT_VERIFY_PREFIX_H
#define KVS_OBJECT_VERIFY_PREFIX_H

#include "kv_store.h"

/**
 * Check all chunks of prefix caches; @report gets a line for each problem. Counts in @ret. @progress
 * is called as kvs_verify says, with @arg. Returns 0, also when the backend can't list chunks;
 * -ECANCELED; -ENOMEM; an error of the store. Sets *@ret_denied to the error when this user may not
 * read all chunks; the others are checked.
 */
int kvs_verify_prefixes(struct kvs_store *store, kvs_report_fn report, kvs_progress_fn progress,
                        void *arg, struct kvs_verify_result *ret, int *ret_denied);

#endif
