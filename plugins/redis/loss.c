// SPDX-License-Identifier: Apache-2.0
#include "redis/loss.h"

#include "base/clock.h"

#define STRANGERS_S 3600 /* a save takes no longer */

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
    loss->since_s = kv_now_ns() / KV_NS_PER_S;
}

/* True when thread @by, which had no number before the loss, needs none of the dropped chunks. */
static bool began_after(const struct rds_loss *loss, uint64_t by, bool puts)
{
    return by > loss->newest && (puts || loss->since_s + STRANGERS_S < kv_now_ns() / KV_NS_PER_S);
}

bool rds_loss_tell(struct rds_loss *loss, uint64_t by, bool puts)
{
    size_t i = find_loser(loss, by);
    bool lost = i < loss->n_losers;

    if (loss->n_losers == 0 && !loss->unknown)
        return false;
    if (!lost && loss->told.len > 0 && (began_after(loss, by, puts) || was_told(loss, by)))
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
