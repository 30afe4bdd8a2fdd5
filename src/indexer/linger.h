// SPDX-License-Identifier: Apache-2.0
/**
 * Lingering close. When a request is refused before its body was read, the client is still sending.
 * To close the socket then makes the kernel answer with a reset, and many clients report that
 * instead of the reply they were sent ("413, limit is ..."). So such a socket is kept a little,
 * what comes is thrown away, and it is closed when the client has finished.
 */
#ifndef KV_INDEXER_LINGER_H
#define KV_INDEXER_LINGER_H

struct ki_linger;

/** Starts a thread. Returns 0 or a negative errno. */
int ki_linger_create(struct ki_linger **ret);
/** Closes what still lingers. NULL is a no-op. */
void ki_linger_destroy(struct ki_linger *linger);

/** Keep a duplicate of @fd, nothing more is sent on it. Beyond 64 at a time: not kept. Thread-safe.
 */
void ki_linger_add(struct ki_linger *linger, int fd);

#endif
