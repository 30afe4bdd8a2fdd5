// SPDX-License-Identifier: Apache-2.0
/**
 * kv_llama.h: a prefix cache for llama.cpp in any kv_store backend.
 *
 * One chunk of the store (a block) holds K and V of all layers for a fixed number of tokens. Its key
 * is a chained hash of the caller's fingerprint, the layout of the memory and all tokens up to the
 * end of the block. Sequences that begin alike share their blocks, whatever slot computed them, and
 * any stored prefix loads. Memory with sliding windows has blocks of both its caches; where the
 * window's beginning is gone, also a tail: the window before exactly the last saved token. Memory that
 * can't be cut at tokens (recurrent and hybrid models) is stored as a whole snapshot per prefix.
 *
 *     n = kvl_load(cache, ctx, seq, tokens, n_tokens - 1, NULL);  (restores tokens [0, n))
 *     ...llama_decode tokens [n, n_tokens), generate...
 *     kvl_save(cache, ctx, seq, tokens, n_tokens, NULL);
 *
 * The library needs no llama.h and links no libllama: it calls the few functions of struct
 * kvl_libllama, which it finds by dlsym or which the caller gives. It links libkvstore.
 *
 * A negative token (LLAMA_TOKEN_NULL, as images and other media have) ends the tokens of every call:
 * nothing says which image it was, so no K and V from there on is stored or loaded.
 *
 * Chunks of the store are checked against the requested tokens and two checksums. A missing or
 * damaged block ends the prefix before it; it never becomes K or V.
 *
 * Errors are negative errno values:
 *   -EINVAL   arguments
 *   -ENOSYS   a function of libllama is missing
 *   -ENOMEM   no memory
 *   an error of the store (kv_store.h)
 * The library logs the reason in one line (to stderr, or to the function that kvl_set_log set).
 *
 * Threads: any function from any thread. llama.cpp's own rule stays the caller's duty: one thread at
 * a time uses a llama_context, also through this library.
 */
#ifndef KV_LLAMA_H
#define KV_LLAMA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_types.h"

#ifdef __cplusplus
extern "C" {
#endif

struct kvs_store;
struct llama_context;
struct llama_memory_i;
struct llama_model;

/** A prefix cache over a store. Any thread. */
struct kvl_cache;

/**
 * Send all log lines of libkvasir_llama to @fn; NULL: errors and warnings to stderr. Call this
 * before any other function of the library.
 */
KV_API void kvl_set_log(kv_log_fn fn, void *arg);

/**
 * Functions of libllama, as llama.h declares them under the same names with the prefix llama_. Set
 * size to sizeof(struct kvl_libllama). Calls with a context need all but the last two.
 */
struct kvl_libllama {
    size_t size;
    size_t (*state_seq_get_size)(struct llama_context *ctx, int32_t seq);
    size_t (*state_seq_get_data)(struct llama_context *ctx, uint8_t *dst, size_t len, int32_t seq);
    size_t (*state_seq_set_data)(struct llama_context *ctx, const uint8_t *src, size_t len,
                                 int32_t seq);
    struct llama_memory_i *(*get_memory)(const struct llama_context *ctx);
    bool (*memory_seq_rm)(struct llama_memory_i *memory, int32_t seq, int32_t p0, int32_t p1);
    int32_t (*memory_seq_pos_max)(struct llama_memory_i *memory, int32_t seq);
    /* May be NULL: then kvl_opts.window tells the sliding window. */
    const struct llama_model *(*get_model)(const struct llama_context *ctx);
    int32_t (*model_n_swa)(const struct llama_model *model);
};
#define KVL_LIBLLAMA_INIT KV_INIT_(kvl_libllama)

/** Tokens per block, unless kvl_opts says otherwise, and the most that it may say. */
#define KVL_BLOCK_TOKENS 64
#define KVL_BLOCK_TOKENS_MAX 4096
/** Bytes of a fingerprint, at most. */
#define KVL_FINGERPRINT_MAX 4096
/** Tokens of a sequence, at most. Calls with more are -EINVAL. */
#define KVL_TOKENS_MAX (1u << 20)

/** Options of kvl_open; set size to sizeof(struct kvl_opts), zero means the default. */
struct kvl_opts {
    size_t size;
    /* All that decides K and V of given tokens beside the layout of the memory: the model file
     * (kvl_fingerprint_file), LoRA adapters, control vectors, RoPE settings. Required, not empty. */
    const char *fingerprint;
    uint32_t block_tokens;               /* tokens per block; 0: KVL_BLOCK_TOKENS */
    const struct kvl_libllama *libllama; /* copied; NULL: dlsym in the program and its libraries */
    /* Tokens of the model's sliding window (llama_model_n_swa). 0: kvl_save asks libllama, and states
     * that kvl_save_state gets are saved as snapshots where the model has one. */
    uint32_t window;
};
#define KVL_OPTS_INIT KV_INIT_(kvl_opts)

/** Result of loads and saves. */
struct kvl_result {
    size_t size;
    uint64_t n_tokens;    /* load: tokens restored; save: tokens that a load would restore now */
    uint64_t blocks;      /* blocks of those tokens; 1 for a snapshot or a tail */
    uint64_t new_blocks;  /* save: blocks that the store did not have */
    uint64_t new_bytes;   /* save: bytes put, headers included */
    uint64_t state_bytes; /* bytes of the state that libllama gave or took */
    bool snapshot;        /* true: a snapshot or a tail, which is good for exactly its tokens */
};
#define KVL_RESULT_INIT KV_INIT_(kvl_result)

/**
 * Open a prefix cache over @store, which stays the caller's and must stay open until kvl_close.
 * The caller owns *@ret and closes it with kvl_close. Caches of one store with other fingerprints or
 * block sizes don't disturb each other.
 *
 * When @opts has no table and the program has no libllama, *@ret works with the functions that take
 * a state; those that take a context return -ENOSYS. Returns 0; -EINVAL (arguments, no fingerprint);
 * -ENOMEM.
 */
KV_API int kvl_open(struct kvs_store *store, const struct kvl_opts *opts, struct kvl_cache **ret);

/** Close a cache. No other call may use it any more. The store stays open. NULL is a no-op. */
KV_API void kvl_close(struct kvl_cache *cache);

/**
 * Find the longest stored prefix of @n tokens: asks the store for keys, reads no block.
 *
 * Returns the number of tokens, 0 when none are stored. A load may restore fewer, when blocks are
 * damaged or evicted meanwhile. An error of the store, or -EINVAL.
 */
KV_API int64_t kvl_find(struct kvl_cache *cache, const int32_t *tokens, size_t n);

/**
 * Restore the longest stored prefix of @n tokens into sequence @seq of @ctx, in place of all that
 * the sequence holds. Give n - 1 of n tokens of a prompt: one has to be decoded to get logits.
 *
 * llama.cpp checks the layout (types of K and V, flash attention, layers); blocks of another one
 * aren't restored. Memory: the state of the restored tokens, once. @ret may be NULL.
 * Returns the number of tokens restored: positions [0, n) of the sequence. 0: nothing was stored, or
 * all of it was damaged or of another layout, and the sequence is empty. Errors: -ENOSYS; -EINVAL;
 * -ENOMEM; an error of the store. After an error the sequence is empty or as it was.
 */
KV_API int64_t kvl_load(struct kvl_cache *cache, struct llama_context *ctx, int32_t seq,
                        const int32_t *tokens, size_t n, struct kvl_result *ret);

/**
 * Save sequence @seq of @ctx, which holds K and V of the first of the @n tokens (all, or all but
 * those that were not decoded yet). The bytes are durable on return.
 *
 * Only whole blocks are stored; the rest of at most block_tokens - 1 tokens is computed again after
 * a load. Snapshots and tails hold all tokens. Blocks that the store has are marked as used. Don't save a sequence after a
 * context shift: its K and V aren't those of its tokens any more. Nor one with a sliding window whose
 * end was removed: cells that the window needs again are gone, and nothing tells. @ret may be NULL.
 * Returns the number of tokens that a load would restore now; 0 for an empty sequence, and for one
 * that @tokens don't describe: a snapshot of more tokens; cells that aren't one for each position
 * from 0 (removed from the middle, images with M-RoPE). Errors as kvl_load; the store may then have
 * some of the blocks.
 */
KV_API int64_t kvl_save(struct kvl_cache *cache, struct llama_context *ctx, int32_t seq,
                        const int32_t *tokens, size_t n, struct kvl_result *ret);

/** Form of a state in memory. */
enum kvl_form {
    KVL_FORM_SEQUENCE, /* of llama_state_seq_get_data */
    KVL_FORM_CONTEXT   /* of llama_state_get_data, of a context with one sequence */
};

/**
 * Save a state of @len bytes that the caller got from libllama: kvl_save without a context. @data
 * stays the caller's. A state that can't be cut is stored as a snapshot of as many tokens as it has
 * cells; one without cells (recurrent, or no state at all) as a snapshot of exactly @n tokens.
 * Returns what kvl_save returns.
 */
KV_API int64_t kvl_save_state(struct kvl_cache *cache, const int32_t *tokens, size_t n,
                              enum kvl_form form, const void *data, size_t len,
                              struct kvl_result *ret);

/**
 * Make the state of the longest stored prefix of @n tokens in memory: kvl_load without a context.
 * Nothing checks that the layout is that of the caller's context, beyond what libllama does with the
 * state; so let the fingerprint name the context's settings too.
 *
 * Returns the number of tokens; *@ret (malloc'd, the caller frees it) and *@ret_len are set when the
 * number is above 0. Errors as kvl_load. @result may be NULL.
 */
KV_API int64_t kvl_load_state(struct kvl_cache *cache, const int32_t *tokens, size_t n,
                              enum kvl_form form, void **ret, size_t *ret_len,
                              struct kvl_result *result);

/**
 * Delete the snapshot or tail of exactly @n tokens, for callers that replace it by a longer one. Blocks of
 * memory that can be cut are left alone: other sequences share them. The parts of the snapshot go,
 * also those that other snapshots have in common with it (parts are named by their bytes): these
 * snapshots are then misses, and their next save stores the parts anew.
 * Returns 1; 0 when there is no such snapshot; -EINVAL; -ENOMEM; -ENOTSUP (the backend can't delete);
 * another error of the store.
 */
KV_API int64_t kvl_discard(struct kvl_cache *cache, const int32_t *tokens, size_t n,
                           enum kvl_form form);

/** Bytes of kvl_fingerprint_file's text, with its NUL. */
#define KVL_FILE_FINGERPRINT 40

/**
 * Compute the fingerprint of a model file: XXH3-128 of all its bytes, as 32 hex digits. Reads the
 * whole file, about 1 s per 4 GiB from the page cache. Of a model in several files, join the
 * fingerprints. Returns 0; an error of open or read; -EINVAL.
 */
KV_API int kvl_fingerprint_file(const char *path, char ret[KVL_FILE_FINGERPRINT]);

#ifdef __cplusplus
}
#endif
#endif
