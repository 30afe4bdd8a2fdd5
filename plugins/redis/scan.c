// SPDX-License-Identifier: Apache-2.0
#include "redis/scan.h"

#include "base/core/clock.h"
#include "base/core/error.h"

static void restart(struct rds_scan *scan)
{
    memcpy(scan->cursor, "0", 2);
    scan->seen[0] = '\0';
    scan->n_on_line = 0;
    scan->renew_at = 1;
}

void rds_scan_begin(struct rds_scan *scan)
{
    *scan = (struct rds_scan){.n_beginnings = 1};
    restart(scan);
    scan->deadline_ns = kv_now_ns() + RDS_MAX_LISTING_S * KV_NS_PER_S;
}

/* End a page that isn't the last. */
static int go_on(struct rds_scan *scan)
{
    if (++scan->n_pages >= RDS_MAX_PAGES)
        return -E2BIG;
    return kv_now_ns() < scan->deadline_ns ? 0 : -ETIMEDOUT;
}

int rds_scan_next(struct rds_scan *scan, const char *cursor, uint64_t line)
{
    size_t len = strlen(cursor);

    if (scan->line != line && scan->line != 0) {
        scan->line = line;
        restart(scan);
        return ++scan->n_beginnings > RDS_MAX_BEGINNINGS ? -ECONNRESET : go_on(scan);
    }
    scan->line = line;
    if (strcmp(cursor, "0") == 0)
        return 1;
    if (len == 0 || len >= sizeof(scan->cursor) || strcmp(cursor, scan->seen) == 0)
        return -EPROTO;
    memcpy(scan->cursor, cursor, len + 1);
    if (++scan->n_on_line == scan->renew_at) {
        memcpy(scan->seen, cursor, len + 1);
        scan->renew_at *= 2;
    }
    return go_on(scan);
}
