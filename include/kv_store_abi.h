// SPDX-License-Identifier: Apache-2.0
/**
 * kv_store_abi.h: the contract between an inference engine (the consumer) and a storage backend (a
 * plugin), as the public specification kv_store_v1 fixes it. The specification defines struct
 * layout and semantics; docs/kv-store.md says how Kvasir decides where it leaves a choice.
 *
 * A backend is a shared object named libkv_store_<scheme>.so that exports kv_store_get_vtable and
 * nothing else (kv_store_ext.h adds one optional symbol). Functions return 0 on success and a
 * negative value on failure; put_chunk may also return 1. None may throw or unwind.
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

/** Versions of the table. New versions add fields at its end only. */
#define KV_STORE_VERSION_1 1u
#define KV_STORE_VERSION_2 2u /* prefetch_chunks */

/** An open backend. Only the backend knows its contents. */
typedef struct kv_store_v1 kv_store_v1;

/**
 * Functions of a backend.
 *
 * Threads: all but open and close may run on several threads at once with one handle.
 * Memory: inputs are borrowed for the call. The backend allocates outputs with malloc, the consumer
 * frees them with free. On failure the consumer ignores outputs; set them on success only.
 */
typedef struct {
    uint32_t version; /* highest version implemented: 1, or 2 with prefetch_chunks */

    /** Open @uri, exactly as the user gave it. Returns NULL on failure, with a line on stderr. */
    kv_store_v1 *(*open)(const char *uri);

    /** Release the handle and all its resources. NULL is a no-op. */
    void (*close)(kv_store_v1 *self);

    /**
     * Store @data_len bytes under a key of @hash_len raw bytes that the consumer chose (8 and 32
     * are in use; a key need not be a hash of the bytes). Chunks are immutable. The backend may
     * buffer them until the next put_manifest.
     * Returns 0 when stored; 1 when the key was already there; negative on failure.
     */
    int (*put_chunk)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                     size_t data_len);

    /**
     * Get the bytes under a key, exactly as put. Returns 0; negative when missing or on failure.
     */
    int (*get_chunk)(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
                     size_t *out_len);

    /**
     * Publish a manifest under @name and replace the one there. Readers see the old or the new one,
     * never a mixture. After a return of 0, every chunk put before on this handle is readable.
     */
    int (*put_manifest)(kv_store_v1 *self, const char *name, const uint8_t *data, size_t data_len);

    /** Get the manifest under @name. Returns 0; negative when missing or on failure. */
    int (*get_manifest)(kv_store_v1 *self, const char *name, uint8_t **out_data, size_t *out_len);

    /** Remove the manifest. Returns 0 also when there is none. Its chunks may stay. */
    int (*delete_manifest)(kv_store_v1 *self, const char *name);

    /**
     * Version 2, may be NULL: announce that the consumer will get these @n_hashes chunks (keys of
     * @hash_len bytes, one after the other). A hint: failure changes nothing.
     */
    int (*prefetch_chunks)(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len,
                           size_t n_hashes);
} kv_store_vtable;

/** Exported by every backend. The table is valid as long as the library is loaded. */
#if defined(__GNUC__)
__attribute__((visibility("default")))
#endif
const kv_store_vtable *
kv_store_get_vtable(void);

#ifdef __cplusplus
}
#endif

#endif
