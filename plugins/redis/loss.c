// SPDX-License-Identifier: Apache-2.0
#include "redis/loss.h"

static size_t find_loser(const struct rds_loss *loss, uint64_t thread)
{
    size_t i = 0;

    while (i < loss->n_losers && loss->losers[i] != thread)
        i++;
    return i;
}

static bool was_told(const struct rds_loss *loss, uint64_t thread)
{
    for (size_t at = 0; at < loss->told.len; at += sizeof(thread))
        if (memcmp(loss->told.data + at, &thread, sizeof(thread)) == 0)
            return true;
    return false;
}

void rds_loss_note(struct rds_loss *loss, uint64_t by, uint64_t newest)
{
    size_t i = find_loser(loss, by);

    loss->unknown |= by == 0 || i == RDS_MAX_LOSERS;
    if (by != 0 && i == loss->n_losers && i < RDS_MAX_LOSERS)
        loss->losers[loss->n_losers++] = by;
    kv_buf_clear(&loss->told);
    loss->newest = newest;
}

bool rds_loss_tell(struct rds_loss *loss, uint64_t by)
{
    size_t i = find_loser(loss, by);
    bool lost = i < loss->n_losers;

    if (loss->n_losers == 0 && !loss->unknown)
        return false;
    if (!lost && loss->told.len > 0 && (by > loss->newest || was_told(loss, by)))
        return false;
    if (lost)
        loss->losers[i] = loss->losers[--loss->n_losers];
    if (loss->n_losers == 0 && !loss->unknown) {
        kv_buf_clear(&loss->told);
        return true;
    }
    loss->told.error = 0; /* there may be memory again */
    kv_buf_append(&loss->told, &by, sizeof(by));
    return true;
}

void rds_loss_fini(struct rds_loss *loss)
{
    kv_buf_fini(&loss->told);
}
