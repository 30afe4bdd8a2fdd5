// SPDX-License-Identifier: Apache-2.0
/**
 * The index in a file: what is known of blobs' uses, so that a restart doesn't begin with cold blobs. What
 * lies where isn't in it: listings tell that anew.
 *
 *     header   8 "KVADVIS\n"  4 version 1  4 members  4 clock  4 zero  8 blobs  16 policy's name
 *              8 number of the members: XXH3-64 of each URI, with that of those before as seed
 *     blobs    16 key  4 chain  4 units  4 used_s  4 age in references  1 heat  1 gap  1 want  1 list
 *              1 count  1 flags  2 zero
 *     end      8 XXH3-64 of all before
 *
 * Numbers are little-endian; blobs in the order of kva_index_each. Thread-confined, as the index is.
 */
#ifndef KV_ADVISOR_STATE_H
#define KV_ADVISOR_STATE_H

#include <pthread.h>

#include "advisor/index/index.h"
#include "base/core/error.h"

enum { KVA_STATE_HEADER = 56, KVA_STATE_BLOCK = 40, KVA_STATE_END = 8 };

/**
 * Put the blobs of a file into an empty index. Returns their number; -EBADMSG: damaged; -ESTALE: of other
 * members; -EPROTONOSUPPORT: a later version; -ENOMEM. After an error the index may hold some of them.
 */
long kva_state_read(struct kva_index *index, uint64_t members, const char *policy, const void *data,
                    size_t len);

struct kva_state_save {
    const struct kva_index *index;
    pthread_mutex_t *lock; /* of the index */
    uint64_t members;      /* their number: kva_volumes_id */
    const char *policy;
};
/**
 * Replace the file @path by the index, so that a power cut leaves the old one or the new. A forked copy of the
 * process writes it: the lock is held for *@ret_pause_ns, until the copy is made. Where the system has no
 * memory for one, until all is written. Returns 0 or an error.
 */
int kva_state_save(const char *path, const struct kva_state_save *save, uint64_t *ret_pause_ns);
/** Read a file, malloc'd into *@ret. Returns 0; -ENOENT; another error. */
int kva_state_load(const char *path, void **ret, size_t *ret_len);

#endif
