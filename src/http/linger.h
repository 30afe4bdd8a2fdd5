// SPDX-License-Identifier: Apache-2.0
/**
 * Lingering close. When a request is refused before its body was read, the client is still sending.
 * Closing the socket then makes the kernel answer with a reset, which many clients report instead
 * of the reply ("413, limit is ..."). A lingering socket stays open for a while, its received bytes
 * are thrown away, and it is closed when the client has finished.
 */
#ifndef KV_HTTP_LINGER_H
#define KV_HTTP_LINGER_H

struct kh_linger;

/** Start a thread. Returns 0 or a negative errno. */
int kh_linger_create(struct kh_linger **ret);
/** Close all lingering sockets. NULL is a no-op. */
void kh_linger_destroy(struct kh_linger *linger);

/**
 * Keep a duplicate of @fd open, on which nothing more is sent. Beyond 64 at a time: not kept.
 * Thread-safe.
 */
void kh_linger_add(struct kh_linger *linger, int fd);

#endif
