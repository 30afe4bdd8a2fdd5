// SPDX-License-Identifier: Apache-2.0
/**
 * Chunks that a handle published lately, for manifests of unknown format that are still to come
 * (base/metrics/history.h). Each publication is a batch of records as refs/ has them. Under `commit`.
 */
#include "base/metrics/history.h"
#include "base/thread/thread.h"
#include "store/file/file_impl.h"

void kvs_file_history_thread(kv_store_v1 *h)
{
    uint64_t me = kv_thread_number(), first = 0;

    if (!atomic_compare_exchange_strong_explicit(&h->history.user, &first, me, memory_order_relaxed,
                                                 memory_order_relaxed) &&
        first != me)
        atomic_store_explicit(&h->history.shared, true, memory_order_relaxed);
}

static struct kvs_file_batch *batch_at(struct kvs_file_history *history, size_t i)
{
    return &history->batches[(history->oldest + i) % KV_HISTORY_PUBLICATIONS];
}

static void drop_oldest(struct kvs_file_history *history)
{
    struct kvs_file_batch *b = batch_at(history, 0);

    history->bytes -= b->records.len;
    kv_buf_fini(&b->records);
    history->oldest = (history->oldest + 1) % KV_HISTORY_PUBLICATIONS;
    history->n--;
}

void kvs_file_history_records(kv_store_v1 *h, struct kv_buf *ret)
{
    struct kvs_file_history *history = &h->history;
    struct kv_history_walk walk = {
        .shared = atomic_load_explicit(&history->shared, memory_order_relaxed)};

    for (size_t i = history->n; i-- > 0;) {
        struct kvs_file_batch *b = batch_at(history, i);

        if (!kv_history_counts(&walk, b->opaque && b->thread == kv_thread_number()))
            break;
        kv_buf_append(ret, b->records.data, b->records.len);
        if (b->records.error) /* memory ran out: a note that isn't whole would be worse than none */
            ret->error = b->records.error;
    }
}

void kvs_file_history_add(kv_store_v1 *h, struct kvs_file_pending *const *entries, size_t n,
                          bool noted)
{
    struct kvs_file_history *history = &h->history;
    bool shared = atomic_load_explicit(&history->shared, memory_order_relaxed);
    struct kvs_file_batch *b;

    for (size_t i = 0; noted && i < history->n; i++)
        batch_at(history, i)->noted = true;
    while (!shared && history->n && batch_at(history, 0)->noted)
        drop_oldest(history);
    if (!shared && (noted || n == 0))
        return;
    while (kv_history_is_full(history->n + 1, 0))
        drop_oldest(history);
    b = batch_at(history, history->n++);
    *b = (struct kvs_file_batch){.thread = kv_thread_number(), .noted = noted, .opaque = noted};
    for (size_t i = 0; i < n; i++)
        if (entries[i]->needed) /* others stay pending */
            kvs_file_add_record(&b->records, entries[i]->key, entries[i]->key_len);
    history->bytes += b->records.len;
    while (kv_history_is_full(history->n, history->bytes))
        drop_oldest(history);
}

void kvs_file_history_fini(kv_store_v1 *h)
{
    while (h->history.n)
        drop_oldest(&h->history);
}
