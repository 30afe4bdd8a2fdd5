// SPDX-License-Identifier: Apache-2.0
/**
 * Parts of a publication: file_commit.c runs its steps and explains why they are durable. All calls
 * are made under `commit`.
 */
#ifndef KV_STORE_FILE_COMMIT_H
#define KV_STORE_FILE_COMMIT_H

#include "store/file_impl.h"

/** A publication under way, with all chunks that were pending when it began. */
struct kvs_file_commit {
    struct kvs_file_pending **entries; /* busy ones: only this publication frees them */
    int *fds;                          /* descriptors of the files to sync (n_fds) */
    uint64_t *tmps;
    size_t n, n_sync;
    uint64_t bytes, placed;        /* bytes to sync; bytes of new chunk files put into place */
    bool fans[KVS_FILE_FANS];      /* fan-outs with a chunk of this publication */
    bool sync_fans[KVS_FILE_FANS]; /* fan-outs with names that may not be durable */
    bool whole_fs;                 /* sync the whole file system instead of single files */
    int refs_fd;                   /* refs/ file with this publication's notes, to sync; -1 */
    /* the manifest's format isn't ours: note which chunks it may need */
    bool opaque;
    bool noted; /* noting has begun */
};

/* -- Files to sync (file_commit_prepare.c) ----------------------------------------------------- */

/** True when the chunk is lost and the manifest doesn't need it. */
bool kvs_file_is_skipped(kv_store_v1 *h, const struct kvs_file_pending *e);
/** Note that a chunk's bytes are gone. */
void kvs_file_lose(kv_store_v1 *h, struct kvs_file_pending *e);
/**
 * List the files to sync. Writes files anew whose sync failed, and looks for copies of lost chunks.
 * Returns 0 or a negative errno, logged.
 */
int kvs_file_commit_prepare(kv_store_v1 *h, struct kvs_file_commit *c);

/* -- The end (file_commit_end.c) --------------------------------------------------------------- */

/**
 * Give chunks that stay pending after they were moved into place a link in tmp/, as hits have:
 * those put once more during the publication, and with @keep all.
 */
void kvs_file_commit_pin(kv_store_v1 *h, struct kvs_file_commit *c, bool keep);
/**
 * Release the pins of published chunks. Chunks that another save has put meanwhile stay pinned for
 * that save. @keep, after a flush without a manifest: all stay pinned, for the manifest that
 * follows.
 */
void kvs_file_commit_finish(kv_store_v1 *h, struct kvs_file_commit *c, bool keep);
/**
 * Keep all entries pending after a failure, lost ones too: a later manifest may need any of them.
 * @suspect: a sync failed, so write the files anew; those in place were synced before.
 */
void kvs_file_commit_give_up(kv_store_v1 *h, struct kvs_file_commit *c, bool suspect);

#endif
