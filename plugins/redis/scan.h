// SPDX-License-Identifier: Apache-2.0
/**
 * The way through a listing of the server, page by page, to its end or to where it is clear that
 * there is none: cursors that come again (found by Brent's method, within three times the circle),
 * more pages than RDS_MAX_PAGES, or more time than RDS_MAX_LISTING_S.
 *
 * A cursor is a place in one process's table, whose order is its own: after a restart, a fail-over
 * or a slot's move the same number is another place, and names would be passed over. Nobody tells,
 * but none of them leaves the connection whole: on another one the listing begins again. Not
 * thread-safe.
 */
#ifndef KV_REDIS_SCAN_H
#define KV_REDIS_SCAN_H

#include <stdint.h>

#define RDS_MAX_PAGES ((uint64_t)1 << 20) /* of a thousand keys or more */
#define RDS_MAX_LISTING_S 3600
#define RDS_MAX_BEGINNINGS 16 /* of one listing */

struct rds_scan {
    char cursor[24]; /* to ask with */
    char seen[24];   /* one of those before */
    uint64_t n_pages, deadline_ns;
    uint64_t n_on_line, renew_at; /* pages since it last began; when to note another cursor */
    uint64_t line;                /* that the pages came over; 0: none yet */
    unsigned n_beginnings;
};

void rds_scan_begin(struct rds_scan *scan);

/**
 * The server answered with @cursor over connection @line. 1: that was the last page; 0: ask on,
 * maybe from the beginning; -EPROTO, -E2BIG, -ETIMEDOUT, -ECONNRESET: it had to begin again too
 * often.
 */
int rds_scan_next(struct rds_scan *scan, const char *cursor, uint64_t line);

#endif
