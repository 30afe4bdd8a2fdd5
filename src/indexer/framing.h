// SPDX-License-Identifier: Apache-2.0
/**
 * Judges a request header by what it says about the body's length. Whatever two HTTP
 * implementations in a row may read differently is refused (RFC 9112 6.3): that is how requests are
 * smuggled.
 */
#ifndef KV_INDEXER_FRAMING_H
#define KV_INDEXER_FRAMING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * Framing facts of the header lines read so far. Zero-initialise; strings point into the header.
 */
struct ki_framing {
    uint64_t content_length;
    unsigned n_lengths, n_encodings, n_hosts;
    bool malformed;
    bool gap;     /* bytes of the header are in none of its lines */
    bool expects; /* there is an Expect: the body isn't sent before an answer */
    const char *content_type, *authorization;
    const char *host, *origin; /* NULL: not given; origin is "" when given twice */
    const char *next, *end; /* where the next line must begin, and the header end; NULL: unknown */
};

/**
 * The header's bytes are still where they were received, @len of them from @start (the method),
 * with NUL in the place of blanks and line ends; @version ends the request line. Call it before the
 * lines are taken in: what the reader of the wire skipped or cut off then shows as a gap between
 * them (a line that ends in a bare LF, a NUL, a folded line).
 */
void ki_framing_expect_whole(struct ki_framing *framing, const char *start, size_t len,
                             const char *version);

/** Take one header line in. @value is NUL-terminated. */
void ki_framing_header(struct ki_framing *framing, const char *name, size_t name_len,
                       const char *value, size_t value_len);

/** After all lines: what is wrong, or NULL. @version is "HTTP/1.0", "HTTP/1.1". */
const char *ki_framing_problem(const struct ki_framing *framing, const char *version);

static inline bool ki_framing_chunked(const struct ki_framing *framing)
{
    return framing->n_encodings > 0;
}

#endif
