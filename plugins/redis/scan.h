// SPDX-License-Identifier: Apache-2.0
/**
 * Progress of a listing, page by page. A listing that can't end is given up: cursors that repeat
 * (found by Brent's method, within three times the cycle), more than RDS_MAX_PAGES pages, or more
 * than RDS_MAX_LISTING_S seconds.
 *
 * A cursor is a position in one process's table, in that table's own order. After a restart, a
 * fail-over or a slot's move the same number is another position, and names would be missed. The
 * server doesn't report these events, but each of them breaks the connection. So on a new
 * connection the listing begins again. Not thread-safe.
 */
#ifndef KV_REDIS_SCAN_H
#define KV_REDIS_SCAN_H

#include <stdint.h>

#define RDS_MAX_PAGES ((uint64_t)1 << 20) /* of a thousand keys or more */
#define RDS_MAX_LISTING_S 3600
#define RDS_MAX_BEGINNINGS 16 /* of one listing */

struct rds_scan {
    char cursor[24]; /* to send next */
    char seen[24];   /* an earlier one, to detect repetition */
    uint64_t n_pages, deadline_ns;
    /* pages since the last begin; number of pages at which `seen` is renewed */
    uint64_t n_on_line, renew_at;
    uint64_t line; /* connection of the pages; 0: none yet */
    unsigned n_beginnings;
};

void rds_scan_begin(struct rds_scan *scan);

/**
 * Continue after the server answered @cursor over connection @line. Returns 1: that was the last
 * page; 0: ask again, possibly from the beginning; -EPROTO, -E2BIG, -ETIMEDOUT; -ECONNRESET: the
 * listing had to begin again too often.
 */
int rds_scan_next(struct rds_scan *scan, const char *cursor, uint64_t line);

#endif
