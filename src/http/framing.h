// SPDX-License-Identifier: Apache-2.0
/**
 * Judge what a request header says about the body's length. Refuse whatever two HTTP programs in a
 * row may read differently (RFC 9112 6.3): request smuggling lives on such differences.
 */
#ifndef KV_HTTP_FRAMING_H
#define KV_HTTP_FRAMING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Framing facts of the header lines read so far. Zero-initialise; strings point into the header.
 */
struct kh_framing {
    uint64_t content_length;
    unsigned n_lengths, n_encodings, n_hosts;
    bool malformed;
    bool gap;     /* some bytes of the header belong to no line */
    bool expects; /* the client sends the body only after an answer to Expect */
    const char *content_type, *authorization;
    const char *host, *origin; /* NULL: not given; origin is "" when given twice */
    /* Expected begin of the next line, and end of the header; NULL: unknown. */
    const char *next, *end;
};

/**
 * Note that the header's bytes are still where they were received: @len of them from @start (the
 * method), with NUL in place of blanks and line ends. @version ends the request line. Call this
 * before kh_framing_header. Bytes that the HTTP library skipped or cut off then show as a gap
 * between lines (a bare LF, a NUL, a folded line).
 */
void kh_framing_expect_whole(struct kh_framing *framing, const char *start, size_t len,
                             const char *version);

/** Judge one header line. @value is NUL-terminated. */
void kh_framing_header(struct kh_framing *framing, const char *name, size_t name_len,
                       const char *value, size_t value_len);

/**
 * Return the fault of the header after its last line, or NULL. @version is "HTTP/1.0" or
 * "HTTP/1.1".
 */
const char *kh_framing_problem(const struct kh_framing *framing, const char *version);

static inline bool kh_framing_chunked(const struct kh_framing *framing)
{
    return framing->n_encodings > 0;
}

#endif
