// SPDX-License-Identifier: Apache-2.0
/**
 * kv_store_abi.h: the contract between an inference engine (the consumer) and a storage backend (a
 * plugin), as the public specification kv_store_v1 fixes it. Struct layout and semantics are the
 * specification's; what it leaves open and how Kvasir decides is in docs/kv-store.md.
 *
 * A backend is a shared object named libkv_store_<scheme>.so that exports kv_store_get_vtable and
 * nothing else (kv_store_ext.h adds one optional symbol). Everything returns 0 on success and a
 * negative value on failure; put_chunk also 1. Nothing may throw or unwind through these calls.
 */
#ifndef KV_STORE_ABI_H
#define KV_STORE_ABI_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The one symbol that a backend must export, and the prefix of its file name. */
#define KV_STORE_VTABLE_SYMBOL "kv_store_get_vtable"
#define KV_STORE_LIBRARY_PREFIX "libkv_store_"

/** Versions of the table. Fields are only ever added at its end. */
#define KV_STORE_VERSION_1 1u
#define KV_STORE_VERSION_2 2u /* prefetch_chunks */

/** An open backend; only the backend knows what is in it. */
typedef struct kv_store_v1 kv_store_v1;

/**
 * What a backend can do. All functions but open and close may be called from several threads at
 * once on one handle. Input pointers are borrowed for the call. Outputs are allocated by the
 * backend with malloc and freed by the consumer with free. On failure the consumer doesn't look at
 * them; set them on success only all the same, for the sake of consumers that do.
 */
typedef struct {
    uint32_t version; /* highest version implemented: 1, or 2 with prefetch_chunks */

    /** A handle for @uri, exactly as the user gave it; NULL on failure, with a line on stderr. */
    kv_store_v1 *(*open)(const char *uri);

    /** Release everything. NULL is a no-op. */
    void (*close)(kv_store_v1 *self);

    /**
     * Store @data_len bytes under a key of @hash_len raw bytes that the consumer chose (8 and 32
     * are in use; a key need not be a hash of the bytes). Chunks are immutable: returns 0 when
     * stored, 1 when the key was already there. May be buffered until the next put_manifest.
     */
    int (*put_chunk)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                     size_t data_len);

    /** The bytes under a key, exactly as put; negative when missing. */
    int (*get_chunk)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
                     size_t *out_len);

    /**
     * Publish a manifest under @name, replacing what was there: readers see the old or the new one,
     * never a mixture. When this returned 0, every chunk put before on this handle is readable.
     */
    int (*put_manifest)(kv_store_v1 *self, const char *name, const uint8_t *data, size_t data_len);

    /** The manifest under @name; negative when missing. */
    int (*get_manifest)(kv_store_v1 *self, const char *name, uint8_t **out_data, size_t *out_len);

    /** Remove the manifest; success when there is none. Its chunks may stay. */
    int (*delete_manifest)(kv_store_v1 *self, const char *name);

    /**
     * Version 2, may be NULL: the consumer is about to get these @n_hashes chunks (keys of
     * @hash_len bytes, one after the other). A hint: failure changes nothing.
     */
    int (*prefetch_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len,
                           size_t n_hashes);
} kv_store_vtable;

/** What a backend exports. The table lives as long as the library is loaded. */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const kv_store_vtable *
kv_store_get_vtable(void);

#ifdef __cplusplus
}
#endif

#endif
