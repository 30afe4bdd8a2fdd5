// SPDX-License-Identifier: Apache-2.0
/**
 * A bounded pipe between a thread that produces bytes and an event loop that sends them.
 *
 *     producer thread ── ki_pipe_write ──►[ ring, `capacity` bytes ]── ki_pipe_read ──► event loop
 *       waits while full                                                never waits: parks and is
 * woken
 *
 * A slow reader delays its own producer and nothing else; a reader that goes away ends the
 * producer. One writer, one reader; cancel from any thread.
 */
#ifndef KV_INDEXER_PIPE_H
#define KV_INDEXER_PIPE_H

#include <stdbool.h>
#include <stddef.h>

struct ki_pipe;

/** @park is called (under the pipe's lock) when a read finds nothing, @wake when it is worth
 * another try. */
struct ki_pipe_reader {
    void (*park)(void *arg);
    void (*wake)(void *arg);
    void *arg;
};

int ki_pipe_create(size_t capacity, const struct ki_pipe_reader *reader, struct ki_pipe **ret);
void ki_pipe_destroy(struct ki_pipe *pipe); /* nobody uses it any more; NULL is a no-op */

/** Waits for room. Returns 0, or -EPIPE once the reader is gone. */
int ki_pipe_write(struct ki_pipe *pipe, const void *data, size_t len);
/** No more writes. @complete false: the reader gets -EIO after what is still in the pipe. */
void ki_pipe_end(struct ki_pipe *pipe, bool complete);

/** Returns the bytes read; 0 at the end; -EAGAIN: parked, wake will be called; -EIO: broken off. */
long ki_pipe_read(struct ki_pipe *pipe, void *data, size_t size);

/** The reader goes, or must go: the writer gets -EPIPE, a parked reader is woken to read -EIO. */
void ki_pipe_cancel(struct ki_pipe *pipe);

#endif
