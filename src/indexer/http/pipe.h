// SPDX-License-Identifier: Apache-2.0
/**
 * A bounded pipe between a thread that produces bytes and an event loop that sends them.
 *
 *     producer thread ── ki_pipe_write ──►[ ring, `capacity` bytes ]── ki_pipe_read ──► event loop
 *       waits while full                                                  parks instead of waiting
 *
 * A slow reader delays only its own producer; a reader that leaves ends the producer. One writer,
 * one reader; any thread may cancel.
 */
#ifndef KV_INDEXER_HTTP_PIPE_H
#define KV_INDEXER_HTTP_PIPE_H

#include <stdbool.h>
#include <stddef.h>

struct ki_pipe;

/**
 * Callbacks for the reader. @park is called (under the pipe's lock) when a read finds no byte,
 * @wake when another try is worth it.
 */
struct ki_pipe_reader {
    void (*park)(void *arg);
    void (*wake)(void *arg);
    void *arg;
};

int ki_pipe_create(size_t capacity, const struct ki_pipe_reader *reader, struct ki_pipe **ret);
void ki_pipe_destroy(struct ki_pipe *pipe); /* after both sides have finished; NULL is a no-op */

/** Write @len bytes; waits for room. Returns 0, or -EPIPE when the reader has gone. */
int ki_pipe_write(struct ki_pipe *pipe, const void *data, size_t len);
/** End the writing. @complete false: the reader gets -EIO after the bytes still in the pipe. */
void ki_pipe_end(struct ki_pipe *pipe, bool complete);

/**
 * Return the number of bytes read; 0 at the end; -EAGAIN: parked, wake will be called; -EIO: broken
 * off.
 */
long ki_pipe_read(struct ki_pipe *pipe, void *data, size_t size);

/** Cancel the pipe: the writer gets -EPIPE, a parked reader is woken to read -EIO. */
void ki_pipe_cancel(struct ki_pipe *pipe);

#endif
