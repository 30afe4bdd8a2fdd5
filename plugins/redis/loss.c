// SPDX-License-Identifier: Apache-2.0
#include "redis/loss.h"

#include "base/core/clock.h"
#include "base/file/own_manifest.h"

#define STRANGERS_S 3600 /* a save takes no longer */

static bool is_over(const struct rds_loss *loss)
{
    return loss->dropped.n == 0 && !loss->many;
}

static bool was_told(const struct kv_buf *told, uint64_t thread)
{
    for (size_t at = 0; at < told->len; at += sizeof(thread))
        if (memcmp(told->data + at, &thread, sizeof(thread)) == 0)
            return true;
    return false;
}

void rds_loss_note(struct rds_loss *loss, const void *hash, size_t hash_len, uint64_t newest)
{
    bool noted =
        rds_table_find(&loss->dropped, hash, hash_len) ||
        (loss->dropped.n < RDS_MAX_DROPPED && rds_table_add(&loss->dropped, hash, hash_len));

    loss->many |= !noted;
    for (int kind = 0; kind < RDS_TOLD_KINDS; kind++)
        kv_buf_clear(&loss->told[kind]);
    loss->newest = newest;
    loss->since_s = kv_now_ns() / KV_NS_PER_S;
}

void rds_loss_deleted(struct rds_loss *loss, const void *hash, size_t hash_len)
{
    if (loss->deleted.n < RDS_MAX_DROPPED) /* without memory: not refused */
        (void)rds_table_add(&loss->deleted, hash, hash_len);
}

static void put_again(struct rds_table *table, const void *hash, size_t hash_len)
{
    if (table->n > 0 && rds_table_find(table, hash, hash_len))
        rds_table_remove(table, hash, hash_len);
}

void rds_loss_put(struct rds_loss *loss, const void *hash, size_t hash_len)
{
    put_again(&loss->dropped, hash, hash_len);
    put_again(&loss->deleted, hash, hash_len);
}

void rds_loss_told(struct rds_loss *loss, enum rds_told kind, uint64_t by)
{
    struct kv_buf *told = &loss->told[kind];

    if (is_over(loss) || was_told(told, by))
        return;
    told->error = 0; /* there may be memory again */
    kv_buf_append(told, &by, sizeof(by));
}

bool rds_loss_tell(struct rds_loss *loss, enum rds_told kind, uint64_t by)
{
    if (is_over(loss) || was_told(&loss->told[kind], by))
        return false;
    if (by > loss->newest && loss->since_s + STRANGERS_S < kv_now_ns() / KV_NS_PER_S)
        return false;
    rds_loss_told(loss, kind, by);
    return true;
}

static bool lists_any(const struct kv_own_chunks *chunks, const struct rds_table *table)
{
    for (size_t i = 0; i < chunks->n && table->n > 0; i++)
        if (rds_table_find(table, chunks->first + i * KV_OWN_CHUNK, KV_OWN_KEY))
            return true;
    return false;
}

bool rds_loss_refuses(struct rds_loss *loss, const void *manifest, size_t len, uint64_t by,
                      bool *ret_listed)
{
    struct kv_own_chunks chunks = {0};

    if (is_over(loss) && loss->deleted.n == 0)
        return false;
    if (!kv_own_manifest_chunks(manifest, len, &chunks) || chunks.n == 0)
        return rds_loss_tell(loss, RDS_PUBLICATION, by);
    *ret_listed = lists_any(&chunks, &loss->dropped) || lists_any(&chunks, &loss->deleted);
    return *ret_listed || (loss->many && rds_loss_tell(loss, RDS_PUBLICATION, by));
}

void rds_loss_fini(struct rds_loss *loss)
{
    rds_table_purge(&loss->dropped, NULL);
    rds_table_purge(&loss->deleted, NULL);
    for (int kind = 0; kind < RDS_TOLD_KINDS; kind++)
        kv_buf_fini(&loss->told[kind]);
}
