// SPDX-License-Identifier: Apache-2.0
/**
 * Replies of a Redis server (RESP2), parsed as they arrive. Payloads are received directly into the
 * buffer that the caller gets: resp_direct names the place of the next bytes. All lengths of the
 * server are bounded, and memory grows with the bytes received, not with announced lengths (except
 * one payload's untouched pages). Not thread-safe.
 */
#ifndef KV_REDIS_RESP_H
#define KV_REDIS_RESP_H

#include <stddef.h>
#include <stdint.h>

#define RESP_MAX_DEPTH 4
#define RESP_MAX_LINE 4096
/* Limit for one payload and for all texts of a reply: a server's default limit. */
#define RESP_MAX_BULK ((size_t)512 << 20)
#define RESP_MAX_ITEMS ((size_t)1 << 20) /* of all arrays of one reply */

enum resp_type {
    RESP_NULL,
    RESP_STATUS,
    RESP_ERROR,
    RESP_INT,
    RESP_BULK,
    RESP_ARRAY,
    RESP_SKIPPED /* a payload without room: only its len is known */
};

struct resp_value {
    enum resp_type type;
    int64_t num;              /* RESP_INT */
    char *str;                /* STATUS, ERROR, BULK: malloc'd, len bytes and a NUL */
    size_t len;               /* of str */
    struct resp_value *items; /* RESP_ARRAY */
    size_t n;                 /* of items */
};

struct resp_frame {
    struct resp_value *array;
    size_t wanted, capacity;
};

struct resp_parser {
    struct resp_value root;
    struct resp_frame stack[RESP_MAX_DEPTH];
    unsigned depth;
    size_t n_items, n_bytes; /* of the reply so far */
    struct resp_value *bulk; /* value whose payload is arriving, or NULL */
    size_t bulk_got;         /* of its len + 2 bytes */
    size_t skip;             /* bytes left of a payload being skipped, with its line end */
    /* bytes that payloads may take, owned by the user; NULL: no limit. Reset after each reply */
    uint64_t *room;
    size_t line_len;
    char line[RESP_MAX_LINE];
};

void resp_init(struct resp_parser *parser);
void resp_fini(struct resp_parser *parser); /* frees a half-parsed reply; ready for use again */

/**
 * Parse up to @len bytes; *ret_used is the number consumed. Returns 1 when a reply is complete
 * (moved to *ret), 0 when more bytes are needed, or -EPROTO or -ENOMEM (close the connection then).
 */
int resp_feed(struct resp_parser *parser, const char *data, size_t len, size_t *ret_used,
              struct resp_value *ret);

/**
 * Return the place for the next bytes of a payload, and its size; 0 when no payload is arriving.
 */
size_t resp_direct(const struct resp_parser *parser, void **ret);

/** Note that @len bytes were written there. Returns as resp_feed. */
int resp_filled(struct resp_parser *parser, size_t len, struct resp_value *ret);

void resp_value_fini(struct resp_value *value);

#endif
