// SPDX-License-Identifier: Apache-2.0
/** Read what a kv-indexer and an engine's HTTP server answer. Names that are too long are cut. */
#ifndef KV_CLI_DOCTOR_ANSWERS_H
#define KV_CLI_DOCTOR_ANSWERS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"

/** GET /. */
struct kc_about {
    char service[32], version[32];
};

/** A listener of GET /workers, with what its worker has. */
struct kc_listener {
    char instance[128], model[128], tenant[128];
    char endpoint[320], replay_endpoint[320]; /* replay_endpoint "": none */
    char status[16], last_error[160];
    char reasons[160]; /* why the view is partial, with commas between */
    uint64_t rank, block_size, event_block_size, malformed, batches;
    uint64_t last_seq;
    bool connected, partial, has_seq;
};

struct kc_listeners {
    struct kc_listener *items;
    size_t n, capacity;
};

/** POST /query with "explain": true. */
struct kc_match {
    char reason[48], text[300];
    uint64_t first_hash, block_size, full_blocks, holders;
    bool has_hash,
        asked_holds; /* asked_holds: the instance that was asked about holds the first block */
};

/** Each returns 0, -ENOMEM, or -EPROTO: the text is not such an answer. */
int kc_about_read(const char *text, size_t len, struct kc_about *ret);
/** Frees nothing on failure: kc_listeners_fini does. @ret is zeroed before the first call. */
int kc_listeners_read(const char *text, size_t len, struct kc_listeners *ret);
void kc_listeners_fini(struct kc_listeners *listeners);
/** @instance: that of `asked_holds`; NULL: none. Reads the 404 of an unknown model, too. */
int kc_match_read(const char *text, size_t len, const char *instance, struct kc_match *ret);
/** Append the token ids of {"tokens": [...]}, or of an array, to @ret as u32. */
int kc_tokens_read(const char *text, size_t len, struct kv_buf *ret);
/** Read the time at the head of a batch in msgpack, in seconds since the epoch; 0: it has none. */
double kc_batch_time(const void *payload, size_t len);

#endif
