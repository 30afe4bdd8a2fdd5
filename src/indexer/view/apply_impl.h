// SPDX-License-Identifier: Apache-2.0
/** Parts of the applier (apply.h) that its files share. */
#ifndef KV_INDEXER_VIEW_APPLY_IMPL_H
#define KV_INDEXER_VIEW_APPLY_IMPL_H

#include <stdbool.h>
#include <stdint.h>

#include "base/core/error.h"
#include "event/reader/reader.h"
#include "indexer/view/apply.h"

_Static_assert(KI_MAX_RANKS <= KVE_MAX_GROUP_RANKS, "the reader learns the groups of every rank");

/** The windows of a holder. */
struct ki_windows {
    struct kvi_window items[KVI_MAX_WINDOWS];
    int n;
};

void ki_windows_get(struct kvi_index *index, struct kv_holder holder, struct ki_windows *ret);

static inline uint32_t ki_window_parts(const struct kvi_window *window)
{
    return KV_MAX(window->parts, 1u);
}

/**
 * How the blocks of a group are followed. Which of them a match can need decides:
 *
 *     form      blocks of the group                        windows of the index   small.h has
 *     BLOCKS    of the registered size, or larger          1                      -
 *     NAMES     smaller, and a match needs one of them,    1: what ends with      -
 *               at its end: a state                        a registered block
 *     TAIL      more than KVI_MAX_WINDOW_PARTS in one,     1: blocks with all     the last `need`
 *               and a match needs the last few             of their tails         parts
 *     PARTS     smaller                                    1 for each part        all parts
 */
enum ki_form { KI_FORM_BLOCKS, KI_FORM_NAMES, KI_FORM_TAIL, KI_FORM_PARTS };

enum ki_form ki_form_of(const struct ki_applier *a, const struct kve_source *source);

/**
 * Find the source's group among the windows. Returns 0; -ENOENT when it isn't there, or has blocks
 * of another size, or of more parts than @ret can name.
 */
int ki_windows_find(const struct ki_applier *a, const struct ki_windows *windows,
                    const struct kve_source *source, struct ki_small_group *ret);
/** The same, whatever size the source's blocks have. */
int ki_windows_find_size(const struct ki_applier *a, const struct ki_windows *windows,
                         const struct kve_source *source, struct ki_small_group *ret);

/** Whether an operation shows the size of a group's blocks: offloaded ones may have another. */
bool ki_shows_size(const struct kve_op *op, const struct kve_source *source);

/** Note that an operation may change what the index lacks of @rank. */
void ki_applier_touch(struct ki_applier *a, uint32_t rank);

/** Apply a clear. Another owner's empties its copies of windows, too. Returns 0 or a negative errno. */
int ki_applier_clear(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                     const struct kve_op *op);

/** Note a clear that may be of two pools, or what operation @at tells of the last one. */
void ki_applier_look_for_pool(struct ki_applier *a, const struct kve_batch *batch, size_t at);

/** The owner of a source in doubts. */
uint64_t ki_owner_id(const struct kve_source *source);

/** Whether the operation is about a window; *@ret describes it. */
static inline bool ki_applier_is_window(const struct ki_applier *a, const struct kve_op *op,
                                        struct kve_source *ret)
{
    return op->source && kve_reader_source(a->reader, op->source, ret) == 0 &&
           ret->kind == KVE_SOURCE_WINDOW;
}

/**
 * Tell the index which groups give up the last matched block. Each time: the holder, or the index,
 * may be a new one.
 */
int ki_applier_declare_drops(const struct ki_applier *a, struct kvi_index *index, uint32_t rank);

/**
 * Whether block drop leaves open what a prompt has. Where windows alone give up a block, they may have
 * the one behind the match, which full attention hasn't; where full attention has groups of several
 * sizes, each gives up a block of its own.
 */
bool ki_applier_drops_beyond_main(const struct ki_applier *a, const struct ki_windows *windows,
                                  uint32_t rank);

/**
 * Declare the batch's windows before their blocks are stored. Otherwise matches would ignore the
 * windows for a moment. Returns 0; -EEXIST when a group has blocks of another size than before: it
 * is another engine's, and the blocks of the one before are forgotten; or another error.
 */
int ki_applier_declare_windows(struct ki_applier *a, struct kvi_index *index,
                               const struct kve_batch *batch);

/** Store blocks in a cache. Returns 0, -ENOMEM or another error of kvi_store: something is lost. */
int ki_applier_store(struct ki_applier *a, struct kvi_index *index, const struct kvi_cache *cache,
                     const struct kve_op *op, enum ki_verdict verdict);
/** Take copies from a cache. Returns as kvi_take. */
long ki_applier_take(struct ki_applier *a, struct kvi_index *index, const struct kvi_cache *cache,
                     const struct kve_op *op);
/**
 * Note whether the blocks of an operation lack a component. Removed ones lack none any more: the
 * engine has nothing of them.
 */
void ki_applier_note_complete(struct ki_applier *a, const struct kve_op *op);
/** Store the waiting events and end the run. Returns a negative errno when one is lost. */
int ki_applier_end_run(struct ki_applier *a, struct kvi_index *index);

/**
 * Between batches, let the reader forget the salts of blocks that the index doesn't have, when that is
 * due. Returns 0, or a negative errno when a store that waited is lost.
 */
int ki_applier_sweep_salts(struct ki_applier *a, struct kvi_index *index);

/** With block drop the main group's blocks keep what is known of their parts. */
int ki_applier_forget_parts(struct ki_applier *a, struct kvi_index *index, struct kv_holder holder,
                            const struct kve_op *op);
/** Apply an operation on a window of @source. */
int ki_applier_apply_window(struct ki_applier *a, struct kvi_index *index, const struct kve_op *op,
                            const struct kve_source *source, enum ki_verdict verdict);

#endif
