// SPDX-License-Identifier: Apache-2.0
/**
 * Notices: what a replica of kv-selector tells its peers of bookings, a JSON object a line.
 *
 * The origin of a booking is the replica that made it. Origin and stamp name one booking; its id may be used
 * again after its end, or at two replicas at once. Times are of the teller's monotonic clock, in ns.
 */
#ifndef KV_SELECTOR_NOTICE_H
#define KV_SELECTOR_NOTICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/json/json.h"
#include "kv_select.h"

enum ksel_notice_kind {
    KSEL_NOTICE_OTHER = 0,       /* of a kind that this version doesn't know */
    KSEL_NOTICE_HELLO = 1,       /* first line: origin is the teller */
    KSEL_NOTICE_ALIVE = 2,       /* nothing else to tell */
    KSEL_NOTICE_SNAPSHOT = 3,    /* all live bookings follow; stamp: the teller's last one */
    KSEL_NOTICE_COMPLETE = 4,    /* the snapshot ends */
    KSEL_NOTICE_BOOKED = 5,      /* with first_token and output as they are now */
    KSEL_NOTICE_FIRST_TOKEN = 6, /* the prompt is computed */
    KSEL_NOTICE_OUTPUT = 7,      /* output: tokens so far */
    KSEL_NOTICE_FREED = 8        /* the request is over */
};

struct ksel_notice {
    enum ksel_notice_kind kind;
    uint64_t at_ns;
    uint64_t origin, stamp;
    const char *id;
    size_t id_len;
    /* Of a booking: */
    const char *model, *group, *lora, *session; /* lora, session: or NULL */
    uint32_t block_size;
    struct kv_holder worker, prefill;
    bool paired, first_token;
    bool lost; /* of the end: the worker didn't compute the prompt */
    uint64_t tokens, uncovered, output;
    uint64_t created_ns, progress_ns;
    const uint64_t *hashes; /* every KSEL_LOG_STRIDE-th sequence hash */
    size_t n_hashes;
    size_t stride; /* for ksel_notice_write: distance of those hashes in @hashes; 0: 1 */
};

/** Append the notice, with its newline. */
void ksel_notice_write(const struct ksel_notice *notice, struct kv_buf *out);

/** Buffers of ksel_notice_read. Zero-initialise. */
struct ksel_notice_reader {
    struct kv_buf texts, hashes, scratch;
};
void ksel_notice_reader_fini(struct ksel_notice_reader *reader);

/**
 * Read a line. *@ret is valid until the reader's next call. Returns 0; -EPROTO: it is none; -ENOMEM.
 */
int ksel_notice_read(struct ksel_notice_reader *reader, struct kv_str line,
                     struct ksel_notice *ret);

#endif
