// SPDX-License-Identifier: Apache-2.0
/**
 * Notes about the chunks that a manifest of unknown format may need: those put or hit on the handle
 * since the previous publication. A collector keeps them. S3 can't append, and handles must not
 * overwrite each other's notes, so each handle writes objects of its own
 *
 *     PREFIX/r/NAME/HANDLE-N     the notes about manifest NAME are the union of all of them
 *
 * A handle writes its last object again, with more keys in it, until that has 1 MiB. It does so for
 * the names it published lately (1024 of them, 64 MiB), and begins another object for other names.
 * Notes only grow, since consumers publish the same empty manifest again and again. They are
 * deleted with the manifest.
 *
 * Publications of other threads and snapshots on the same handle may take chunks that a manifest
 * needs. The handle remembers its last publications, and notes more keys rather than too few.
 *
 * Body: for each chunk the length of its key (1 byte, not 0) and the key. A length of 0 means that
 * not all keys could be noted: readers then ignore the notes. Thread-safe.
 */
#ifndef KV_PLUGINS_S3_REFS_H
#define KV_PLUGINS_S3_REFS_H

#include "kv_store_ext.h"
#include "s3/object.h"

struct s3_refs;
struct s3_refs *s3_refs_create(struct s3_client *client, const struct s3_config *config);
void s3_refs_destroy(struct s3_refs *refs);

/**
 * Note a chunk that was put or hit. Always counts: when out of memory, the notes become incomplete.
 */
void s3_refs_add(struct s3_refs *refs, const uint8_t *hash, size_t hash_len);

/** One publication, from s3_refs_begin to s3_refs_end; the caller's memory. */
struct s3_noting {
    struct s3_ref_segment *segment; /* NULL: nothing to note */
    struct s3_ref_keys *taken;
    struct s3_request request;
    struct s3_put_try put;
    bool sent, opaque;
    bool lost; /* the handle's notes were incomplete */
    int error;
};

/**
 * Begin to store the notes for @name. Not @opaque: the manifest names its chunks, so no note is
 * stored. Where nothing was put or hit, notes without a chunk are stored for an @empty manifest, and
 * none for another: its chunks aren't known here, so collection must delete nothing.
 */
void s3_refs_begin(struct s3_refs *refs, const char *name, bool opaque, bool empty,
                   struct s3_noting *ret);
/** Wait until the notes are stored; store the manifest only then. */
int s3_refs_wait(struct s3_refs *refs, struct s3_noting *noting);
/**
 * End. @published: the manifest is stored; otherwise the next publication notes the same chunks.
 */
void s3_refs_end(struct s3_refs *refs, struct s3_noting *noting, bool published);

/**
 * List the noted chunks as in kv_store_ext.h, and their number. -EBADMSG: damaged notes. Without one,
 * notes are complete for an empty manifest alone.
 */
int s3_refs_list(struct s3_refs *refs, const char *name, kv_store_each_fn each, void *arg,
                 size_t *ret_n);
/** Delete a deleted manifest's notes. */
int s3_refs_forget(struct s3_refs *refs, const char *name);

#endif
