// SPDX-License-Identifier: Apache-2.0
/**
 * The way through a listing of the server, page by page, to its end or to where it is clear that
 * there is none: cursors that come again (found by Brent's method, within three times the circle),
 * more pages than RDS_MAX_PAGES, or more time than RDS_MAX_LISTING_S. Not thread-safe.
 */
#ifndef KV_REDIS_SCAN_H
#define KV_REDIS_SCAN_H

#include <stdint.h>

#define RDS_MAX_PAGES ((uint64_t)1 << 20) /* of a thousand keys or more */
#define RDS_MAX_LISTING_S 3600

struct rds_scan {
    char cursor[24]; /* to ask with */
    char seen[24];   /* one of those before */
    uint64_t n_pages, renew_at, deadline_ns;
};

void rds_scan_begin(struct rds_scan *scan);

/** The server answered with @cursor. 1: that was the last page; 0: ask on; -EPROTO, -E2BIG, -ETIMEDOUT. */
int rds_scan_next(struct rds_scan *scan, const char *cursor);

#endif
