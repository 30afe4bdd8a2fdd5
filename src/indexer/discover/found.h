// SPDX-License-Identifier: Apache-2.0
/**
 * Workers that a source of discovery has found: what each would be registered with.
 *
 * A set is one look at a source: all ranks that the source names at that time. Zero-initialise. One
 * thread at a time.
 */
#ifndef KV_INDEXER_DISCOVER_FOUND_H
#define KV_INDEXER_DISCOVER_FOUND_H

#include "base/core/error.h"
#include "base/json/json.h"
#include "indexer/api/body.h"
#include "indexer/options.h"
#include "indexer/stream/worker.h"

#define KI_MAX_FOUND 65536 /* ranks of a set */

struct ki_found {
    struct ki_registration registration; /* in a set, its texts are owned */
    bool has_lookahead;                  /* hash_lookahead is told */
    uint32_t lookahead;
    uint64_t incarnation; /* another number: another process of the same name; 0: not told */
};

struct ki_found_set {
    struct ki_found *items; /* sorted by (instance, rank) once ki_found_sort was called */
    size_t n, capacity;
    size_t left_out; /* workers that can't be registered as they are told */
    char why[160];   /* the first of these: which one, and why */
};

void ki_found_set_fini(struct ki_found_set *set);

/** Write what the options, or a section, say of all their workers. Returns 0 or -EINVAL with @error. */
int ki_found_defaults(const struct ki_options *options, struct ki_found *ret,
                      struct kv_error *error);

/** Copy @found into the set. Returns 0, -EINVAL (no block size), -ENOSPC or -ENOMEM, with @error. */
int ki_found_add(struct ki_found_set *set, const struct ki_found *found, struct kv_error *error);

/**
 * Add the worker that the JSON object @text tells, with the fields of POST /register; @base has the
 * fields that @text lacks. @required: fields that it must have. @body is used for reading. Returns 0, or
 * as ki_found_add, or -EBADMSG (no JSON).
 */
int ki_found_add_json(struct ki_found_set *set, struct kv_str text, uint32_t required,
                      const struct ki_found *base, struct ki_body *body, struct kv_error *error);

/** Add the workers of a list as in --workers. Returns as ki_found_add, or -EINVAL. */
int ki_found_add_line(struct ki_found_set *set, const char *line, const struct ki_found *base,
                      struct kv_error *error);

/** Count a worker as left out. @who names it. */
void ki_found_leave_out(struct ki_found_set *set, const char *who, const char *why);

/** Sort. Of several entries of one rank the first one stays, the others count as left out. */
void ki_found_sort(struct ki_found_set *set);

/** Compare by (instance, rank). */
int ki_found_compare(const struct ki_found *a, const struct ki_found *b);
/** Return true when a registration of @a serves @b, too. */
bool ki_found_equal(const struct ki_found *a, const struct ki_found *b);

/** Return true when both have the same ranks in the same order, and leave out the same. */
bool ki_found_sets_equal(const struct ki_found_set *a, const struct ki_found_set *b);
/** Copy a set into an empty one. Returns 0 or -ENOMEM; *@ret is empty then. */
int ki_found_set_copy(const struct ki_found_set *set, struct ki_found_set *ret);

/**
 * Read a file of workers: JSON, an array of registrations or {"workers": [...]}; or lines as --workers
 * lists, `#` begins a comment. One entry that is wrong refuses the whole: -EINVAL or -EBADMSG, or
 * -ENOMEM, with @error.
 */
int ki_found_read(struct ki_found_set *set, struct kv_str text, const struct ki_found *base,
                  struct kv_error *error);

#endif
