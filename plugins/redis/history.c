// SPDX-License-Identifier: Apache-2.0
#include "redis/history.h"

#include "base/core/error.h"
#include "base/thread/thread.h"

/* Return the index of the @i-th publication remembered, the oldest first. */
static size_t place(const struct rds_history *history, size_t i)
{
    return (history->first + i) % KV_HISTORY_PUBLICATIONS;
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

    while (kv_history_is_full(history->n + 1, 0))
        drop_oldest(history);
    item = &history->of[place(history, history->n++)];
    *item = (struct rds_published){kv_thread_number(), opaque, KV_BUF_INIT};
    for (size_t i = 0; i < n; i++) {
        kv_buf_putc(&item->keys, (char)refs[i]->hash_len);
        kv_buf_append(&item->keys, refs[i]->hash, refs[i]->hash_len);
    }
    if (item->keys.error)
        kv_buf_fini(&item->keys);
    history->bytes += item->keys.len;
    while (kv_history_is_full(history->n, history->bytes))
        drop_oldest(history);
}

void rds_history_needed(const struct rds_history *history, struct kv_buf *ret)
{
    struct kv_history_walk walk = {0};

    for (size_t i = 0; i < history->n; i++)
        walk.shared |= history->of[place(history, i)].by != kv_thread_number();
    for (size_t i = history->n; i-- > 0;) {
        const struct rds_published *item = &history->of[place(history, i)];

        if (!kv_history_counts(&walk, item->opaque && item->by == kv_thread_number()))
            break;
        kv_buf_append(ret, item->keys.data, item->keys.len);
    }
}

void rds_history_fini(struct rds_history *history)
{
    while (history->n > 0)
        drop_oldest(history);
}
