// SPDX-License-Identifier: Apache-2.0
/**
 * Parts of a publication: commit/commit.c runs its steps and explains why they are durable. All calls
 * are made under `commit`.
 */
#ifndef KV_STORE_FILE_COMMIT_H
#define KV_STORE_FILE_COMMIT_H

#include "store/file/file_impl.h"
#include "store/object/manifest.h"

/** A publication under way, with all chunks that it has to put into place. */
struct kvs_file_commit {
    struct kvs_file_pending **entries; /* busy ones: only this publication frees them */
    struct kvs_file_map named;         /* those of them that it names and that weren't pending */
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
    bool flush; /* there is no manifest: what it puts into place stays pending */
};

/* -- Files to sync (prepare.c) ------------------------------------------------------------------ */

/* -- What it is for (collect.c) ----------------------------------------------------------------- */

/**
 * Collect the chunks to put into place: pending ones, but those that earlier publications have put
 * there and that this one doesn't need; and what @m names. @m: the manifest, or NULL when its format
 * doesn't tell what it needs. @flush: there is no manifest.
 */
int kvs_file_commit_collect(kv_store_v1 *h, struct kvs_file_commit *c, const struct kvs_manifest *m,
                            bool flush);

/** True when the chunk is lost and the manifest doesn't need it. */
bool kvs_file_is_skipped(kv_store_v1 *h, const struct kvs_file_pending *e);
/** Note that a chunk's bytes are gone. */
void kvs_file_lose(kv_store_v1 *h, struct kvs_file_pending *e);
/**
 * List the files to sync. Writes files anew whose sync failed, and looks for copies of lost chunks.
 * Returns 0 or a negative errno, logged.
 */
int kvs_file_commit_prepare(kv_store_v1 *h, struct kvs_file_commit *c);

/* -- The end (end.c) ---------------------------------------------------------------------------- */

/**
 * Give chunks that stay pending after they were moved into place a link in tmp/, as hits have; with
 * @keep to all. After a flush leased hits get one, too, and their leases end.
 */
void kvs_file_commit_pin(kv_store_v1 *h, struct kvs_file_commit *c, bool keep);
/**
 * Release the pins of published chunks. Those that another save has put stay pinned for that save,
 * and all after a flush without a manifest.
 */
void kvs_file_commit_finish(kv_store_v1 *h, struct kvs_file_commit *c);
/**
 * Keep all entries pending after a failure, lost ones too: a later manifest may need any of them.
 * @suspect: a sync failed, so write the files anew; those in place were synced before.
 */
void kvs_file_commit_give_up(kv_store_v1 *h, struct kvs_file_commit *c, bool suspect);

#endif
