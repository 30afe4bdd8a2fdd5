// SPDX-License-Identifier: Apache-2.0
/*
 * Publishers of ingest_bench and indexer_bench: batches encoded beforehand, as kve_publisher and
 * vLLM encode them (tagged maps, ids below 200000), sent as fast as the socket takes them.
 */
#ifndef KV_BENCH_PUBLISH_LOAD_H
#define KV_BENCH_PUBLISH_LOAD_H

#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <zmq.h>

#include "base/core/buf.h"
#include "base/core/clock.h"
#include "base/json/msgpack.h"
#include "event/wire/frames.h"
#include "publish_wire.h"

enum { BLOCK_TOKENS = 16 };

static inline void publish_require(bool ok, const char *what)
{
    if (ok)
        return;
    fprintf(stderr, "publisher: %s failed (%s)\n", what, zmq_strerror(zmq_errno()));
    exit(1);
}

/* -- batches ----------------------------------------------------------------------------------- */

/* Return the engine's hash of block @number. */
static inline uint64_t block_hash(uint64_t number)
{
    return number * UINT64_C(0x9e3779b97f4a7c15);
}

static inline void put_hashes(struct kv_buf *out, uint64_t first, uint32_t n)
{
    kv_msgpack_put_str(out, "block_hashes");
    kv_msgpack_put_array(out, n);
    for (uint64_t i = 0; i < n; i++)
        kv_msgpack_put_u64(out, block_hash(first + i));
}

/* Write a stored event: blocks @first to @first + n - 1, below block @first - 1 or the first of a
 * prompt (@root). */
static inline void put_store(struct kv_buf *out, uint64_t first, uint32_t n, bool root,
                             const uint32_t *tokens)
{
    kv_msgpack_put_map(out, 8);
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockStored");
    put_hashes(out, first, n);
    kv_msgpack_put_str(out, "parent_block_hash");
    if (root)
        kv_msgpack_put_nil(out);
    else
        kv_msgpack_put_u64(out, block_hash(first - 1));
    kv_msgpack_put_str(out, "token_ids");
    kv_msgpack_put_array(out, n * BLOCK_TOKENS);
    for (size_t i = 0; i < (size_t)n * BLOCK_TOKENS; i++)
        kv_msgpack_put_u64(out, tokens[i]);
    kv_msgpack_put_str(out, "block_size");
    kv_msgpack_put_u64(out, BLOCK_TOKENS);
    kv_msgpack_put_str(out, "lora_id");
    kv_msgpack_put_nil(out);
    kv_msgpack_put_str(out, "medium");
    kv_msgpack_put_str(out, "GPU");
    kv_msgpack_put_str(out, "lora_name");
    kv_msgpack_put_nil(out);
}

/* Write a removed event: blocks @first to @first + n - 1, the last first, as engines evict. */
static inline void put_remove(struct kv_buf *out, uint64_t first, uint32_t n)
{
    kv_msgpack_put_map(out, 3);
    kv_msgpack_put_str(out, "type");
    kv_msgpack_put_str(out, "BlockRemoved");
    kv_msgpack_put_str(out, "block_hashes");
    kv_msgpack_put_array(out, n);
    while (n)
        kv_msgpack_put_u64(out, block_hash(first + --n));
    kv_msgpack_put_str(out, "medium");
    kv_msgpack_put_str(out, "GPU");
}

struct batches {
    struct kv_buf payloads;
    size_t *offsets; /* n + 1 used, n_max + 1 allocated */
    size_t n;
};

static inline void batches_init(struct batches *b, size_t n_max)
{
    memset(b, 0, sizeof(*b));
    b->offsets = calloc(n_max + 1, sizeof(*b->offsets));
    publish_require(b->offsets != NULL, "malloc");
}

static inline void batches_fini(struct batches *b)
{
    kv_buf_fini(&b->payloads);
    free(b->offsets);
}

/* Begin a batch of @n_events; the events follow, then batch_end. */
static inline void batch_begin(struct batches *b, uint32_t n_events)
{
    kv_msgpack_put_array(&b->payloads, 3);
    kv_msgpack_put_double(&b->payloads, 1757500000.25 + (double)b->n);
    kv_msgpack_put_array(&b->payloads, n_events);
}

static inline void batch_end(struct batches *b)
{
    kv_msgpack_put_nil(&b->payloads);
    publish_require(!b->payloads.error, "malloc");
    b->offsets[++b->n] = b->payloads.len;
}

/* -- sockets ----------------------------------------------------------------------------------- */

enum { MAX_SUBSCRIBERS = 8 };

struct publisher {
    void *socket; /* NULL: frames are written into the subscribers' connections */
    int server, subscribers[MAX_SUBSCRIBERS];
    size_t n_subscribers;
    char endpoint[128];
    const struct batches *batches;
    uint64_t started_ns;
    pthread_t thread;
};

/* @zmq NULL: without libzmq, at a free port of this host. */
static inline void publisher_open(struct publisher *p, void *zmq, const char *where)
{
    size_t size = sizeof(p->endpoint);
    int none = 0, on = 1;

    memset(p, 0, sizeof(*p));
    if (!zmq) {
        publish_require(wire_listen(&p->server, p->endpoint), "listen");
        return;
    }
    p->socket = zmq_socket(zmq, ZMQ_XPUB);
    publish_require(p->socket != NULL, "socket");
    zmq_setsockopt(p->socket, ZMQ_SNDHWM, &none, sizeof(none)); /* drop nothing */
    zmq_setsockopt(p->socket, ZMQ_LINGER, &none, sizeof(none));
    zmq_setsockopt(p->socket, ZMQ_XPUB_VERBOSE, &on, sizeof(on)); /* report each subscriber */
    publish_require(zmq_bind(p->socket, where) == 0 &&
                        zmq_getsockopt(p->socket, ZMQ_LAST_ENDPOINT, p->endpoint, &size) == 0,
                    "bind");
}

static inline void publisher_await(struct publisher *p, size_t n_subscribers)
{
    char byte;

    publish_require(n_subscribers <= MAX_SUBSCRIBERS, "few subscribers");
    for (size_t i = 0; i < n_subscribers && p->socket; i++)
        publish_require(zmq_recv(p->socket, &byte, 1, 0) >= 0, "a subscription");
    for (; !p->socket && p->n_subscribers < n_subscribers; p->n_subscribers++) {
        p->subscribers[p->n_subscribers] = wire_accept(p->server);
        publish_require(p->subscribers[p->n_subscribers] >= 0, "a subscription");
    }
}

static inline void publisher_write(struct publisher *p)
{
    const struct batches *b = p->batches;

    for (size_t i = 0, n = 0; i < b->n; i += n)
        for (size_t s = 0; s < p->n_subscribers; s++) {
            n = wire_send(p->subscribers[s], (const uint8_t *)b->payloads.data, b->offsets, b->n,
                          i);
            publish_require(n > 0, "send");
        }
}

static inline void *publisher_main(void *arg)
{
    struct publisher *p = arg;
    uint8_t seq[KVE_SEQUENCE_BYTES];

    p->started_ns = kv_now_ns();
    if (!p->socket) {
        publisher_write(p);
        return NULL;
    }
    for (size_t i = 0; i < p->batches->n; i++) {
        const size_t *at = &p->batches->offsets[i];
        zmq_msg_t payload;

        kve_sequence_put(seq, i);
        /* No copy: the publisher should use little CPU. */
        zmq_msg_init_data(&payload, p->batches->payloads.data + at[0], at[1] - at[0], NULL, NULL);
        publish_require(zmq_send(p->socket, "", 0, ZMQ_SNDMORE) >= 0 &&
                            zmq_send(p->socket, seq, sizeof(seq), ZMQ_SNDMORE) >= 0 &&
                            zmq_msg_send(&payload, p->socket, 0) >= 0,
                        "send");
    }
    return NULL;
}

/* Send @batches, which must outlive the publisher. */
static inline void publisher_start(struct publisher *p, const struct batches *batches)
{
    p->batches = batches;
    publish_require(pthread_create(&p->thread, NULL, publisher_main, p) == 0, "thread");
}

static inline void publisher_close(struct publisher *p)
{
    if (p->batches)
        pthread_join(p->thread, NULL);
    if (p->socket) {
        zmq_close(p->socket);
        return;
    }
    for (size_t i = 0; i < p->n_subscribers; i++)
        close(p->subscribers[i]);
    close(p->server);
}

#endif
