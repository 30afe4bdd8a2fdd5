// SPDX-License-Identifier: Apache-2.0
#include "redis/scan.h"

#include "base/clock.h"
#include "base/error.h"

void rds_scan_begin(struct rds_scan *scan)
{
    *scan = (struct rds_scan){.cursor = "0", .renew_at = 1};
    scan->deadline_ns = kv_now_ns() + RDS_MAX_LISTING_S * KV_NS_PER_S;
}

int rds_scan_next(struct rds_scan *scan, const char *cursor)
{
    size_t len = strlen(cursor);

    if (strcmp(cursor, "0") == 0)
        return 1;
    if (len == 0 || len >= sizeof(scan->cursor) || strcmp(cursor, scan->seen) == 0)
        return -EPROTO;
    memcpy(scan->cursor, cursor, len + 1);
    if (++scan->n_pages == scan->renew_at) {
        memcpy(scan->seen, cursor, len + 1);
        scan->renew_at *= 2;
    }
    if (scan->n_pages >= RDS_MAX_PAGES)
        return -E2BIG;
    return kv_now_ns() < scan->deadline_ns ? 0 : -ETIMEDOUT;
}
