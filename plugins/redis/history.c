// SPDX-License-Identifier: Apache-2.0
#include "redis/history.h"

#include "base/error.h"

/* The @i-th of those that are remembered, the oldest first. */
static size_t place(const struct rds_history *history, size_t i)
{
    return (history->first + i) % RDS_MAX_HISTORY;
}

static void drop_oldest(struct rds_history *history)
{
    struct rds_published *oldest = &history->of[history->first];

    history->bytes -= oldest->keys.len;
    kv_buf_fini(&oldest->keys);
    history->first = place(history, 1);
    history->n--;
}

void rds_history_note(struct rds_history *history, struct rds_entry *const *refs, size_t n,
                      bool opaque)
{
    struct rds_published *item;

    while (history->n > 0 &&
           (history->n == RDS_MAX_HISTORY || history->bytes > RDS_MAX_HISTORY_BYTES))
        drop_oldest(history);
    item = &history->of[place(history, history->n++)];
    *item = (struct rds_published){pthread_self(), opaque, KV_BUF_INIT};
    for (size_t i = 0; i < n; i++) {
        kv_buf_putc(&item->keys, (char)refs[i]->hash_len);
        kv_buf_append(&item->keys, refs[i]->hash, refs[i]->hash_len);
    }
    if (item->keys.error)
        kv_buf_fini(&item->keys);
    history->bytes += item->keys.len;
}

void rds_history_needed(const struct rds_history *history, struct kv_buf *ret)
{
    size_t from = history->n;
    bool shared = false;

    for (size_t i = 0; i < history->n; i++)
        shared |= !pthread_equal(history->of[place(history, i)].by, pthread_self());
    while (from > 0) {
        const struct rds_published *before = &history->of[place(history, from - 1)];

        if (before->opaque && pthread_equal(before->by, pthread_self()) &&
            (!shared || history->n - from >= RDS_TAKEN_ANYWAY))
            break;
        from--;
    }
    for (size_t i = from; i < history->n; i++) {
        const struct kv_buf *keys = &history->of[place(history, i)].keys;

        kv_buf_append(ret, keys->data, keys->len);
    }
}

void rds_history_fini(struct rds_history *history)
{
    while (history->n > 0)
        drop_oldest(history);
}
