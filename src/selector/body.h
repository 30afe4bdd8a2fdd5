// SPDX-License-Identifier: Apache-2.0
/**
 * JSON bodies of the selection API. One table of fields serves all endpoints: a field that an endpoint
 * doesn't use is checked and ignored, an unknown one is passed over, null counts as absent.
 */
#ifndef KV_SELECTOR_BODY_H
#define KV_SELECTOR_BODY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/core/buf.h"
#include "base/core/error.h"
#include "base/json/json.h"
#include "indexer/api/body.h"

#define KSEL_ID_MAX 8192    /* bytes of a booking's id, which isn't empty */
#define KSEL_MAX_LABELS 256 /* of a request, each of required and preferred ones */

/** A text of the body: offset of its bytes, plus 1, in ksel_body.strings; 0: absent. */
typedef uint32_t ksel_text;

/** A label and how much the request prefers it. */
struct ksel_preference {
    ksel_text label;
    double weight;
};

/** A parsed body, used again. Zero-initialise. Thread-confined. */
struct ksel_body {
    /* Prompt. token_ids, block_hashes and mm_objects are in the struct ki_body given to ksel_body_parse. */
    bool has_tokens, has_blocks, has_sequence, has_isl;
    uint64_t isl_tokens;
    ksel_text model, group, tenant, lora, salt;
    /* Request. */
    ksel_text id; /* selection_id */
    uint32_t id_len;
    ksel_text session, policy;
    bool has_credit, has_scale, has_temperature;
    double credit, scale, temperature;
    bool no_prefill; /* track_prefill_tokens: false */
    double priority_jump;
    uint64_t strict_priority, expected_output;
    bool advisory, explain;
    bool has_pin, has_pin_rank, has_allowed;
    uint64_t pin;
    uint32_t pin_rank;
    /* Booking. */
    bool has_worker, has_effective;
    uint64_t worker, effective;
    uint32_t rank;
    /* output_block */
    bool has_decay;
    double decay;
    uint64_t tokens; /* 0: a block */
    /* Buffers, from here on: their memory is used again. */
    struct kv_buf sequence;         /* raw uint64_t */
    struct kv_buf allowed, avoided; /* raw uint64_t: worker ids */
    struct kv_buf required;         /* raw ksel_text */
    struct kv_buf preferred;        /* raw struct ksel_preference */
    struct kv_buf strings, unescaped;
};
void ksel_body_fini(struct ksel_body *body);

/** Make both as read from an empty object. Their memory is used again. */
void ksel_body_clear(struct ki_body *prompt, struct ksel_body *body);

/** Return a text, valid until the next parse; NULL: absent. */
const char *ksel_text_of(const struct ksel_body *body, ksel_text text);

/**
 * Read @text. Returns 0; -EBADMSG: malformed, @error has the offset; -EINVAL: a field of the wrong type,
 * range or length, @error names it; -ENOMEM.
 */
int ksel_body_parse(struct kv_str text, struct ki_body *prompt, struct ksel_body *ret,
                    struct kv_error *error);

/** Read a worker id, a number or a name. Its text goes to @ret_name (may be NULL), where it is a name. */
uint64_t ksel_read_worker(struct kv_json *json, struct kv_buf *unescaped, struct kv_str *ret_name);

/** Fill @error for a failed reader, as the two functions above return it. Returns the code. */
int ksel_refuse(const struct kv_json *json, const char *field, struct kv_error *error);

#endif
