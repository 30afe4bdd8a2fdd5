// SPDX-License-Identifier: Apache-2.0
/**
 * A bounded pipe between a thread that produces bytes and an event loop that sends them.
 *
 *     producer thread ── kh_pipe_write ──►[ ring, `capacity` bytes ]── kh_pipe_read ──► event loop
 *       waits while full                                                  parks instead of waiting
 *
 * A slow reader delays only its own producer; a reader that leaves ends the producer. One writer,
 * one reader; any thread may cancel.
 */
#ifndef KV_HTTP_PIPE_H
#define KV_HTTP_PIPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct kh_pipe;

/**
 * Callbacks for the reader. @park is called (under the pipe's lock) when a read finds no byte,
 * @wake when another try is worth it.
 */
struct kh_pipe_reader {
    void (*park)(void *arg);
    void (*wake)(void *arg);
    void *arg;
};

int kh_pipe_create(size_t capacity, const struct kh_pipe_reader *reader, struct kh_pipe **ret);
void kh_pipe_destroy(struct kh_pipe *pipe); /* after both sides have finished; NULL is a no-op */

/** Write @len bytes; waits for room. Returns 0, or -EPIPE when the reader has gone. */
int kh_pipe_write(struct kh_pipe *pipe, const void *data, size_t len);
/**
 * Wait, with nothing to write, for kh_pipe_nudge or until @deadline_ns (kv_now_ns). Returns 0, or -EPIPE when
 * the reader has gone.
 */
int kh_pipe_wait(struct kh_pipe *pipe, uint64_t deadline_ns);
/** Wake the producer from kh_pipe_wait, or the next call of it. Any thread. */
void kh_pipe_nudge(struct kh_pipe *pipe);
/** End the writing. @complete false: the reader gets -EIO after the bytes still in the pipe. */
void kh_pipe_end(struct kh_pipe *pipe, bool complete);

/**
 * Return the number of bytes read; 0 at the end; -EAGAIN: parked, wake will be called; -EIO: broken
 * off.
 */
long kh_pipe_read(struct kh_pipe *pipe, void *data, size_t size);

/** Cancel the pipe: the writer gets -EPIPE, a parked reader is woken to read -EIO. */
void kh_pipe_cancel(struct kh_pipe *pipe);

#endif
