// SPDX-License-Identifier: Apache-2.0
/**
 * Chunks that a handle published lately, for manifests of unknown format that are still to come.
 *
 * A publication takes all that is pending, whoever put it: a snapshot of ours between the puts of
 * another consumer, or a second thread's object. So an opaque manifest may need more chunks than it
 * finds pending:
 *
 *     thread 1   put a                put b     publish M: a, b (and c, which does no harm)
 *     thread 2          put c  publish N: a, c
 *
 *  - chunks that no opaque publication has noted yet, and
 *  - on a handle that several threads use: chunks published since the same thread's previous
 *    publication (its save began after that), and those of the last LATELY publications in any
 *    case, as a save may move between threads.
 *
 * Each publication is kept as a batch of records in the format of refs/; at most KVS_FILE_BATCHES
 * and MAX_BYTES. Under `commit`.
 */
#include <unistd.h>

#include "store/file_impl.h"

enum { LATELY = 16, MAX_BYTES = 4 << 20 };

static pid_t this_thread(void)
{
    static _Thread_local pid_t id;

    if (!id)
        id = gettid();
    return id;
}

void kvs_file_history_thread(kv_store_v1 *h)
{
    pid_t me = this_thread(), first = 0;

    if (!atomic_compare_exchange_strong_explicit(&h->history.user, &first, me, memory_order_relaxed,
                                                 memory_order_relaxed) &&
        first != me)
        atomic_store_explicit(&h->history.shared, true, memory_order_relaxed);
}

static struct kvs_file_batch *batch_at(struct kvs_file_history *history, size_t i)
{
    return &history->batches[(history->oldest + i) % KVS_FILE_BATCHES];
}

static void drop_oldest(struct kvs_file_history *history)
{
    struct kvs_file_batch *b = batch_at(history, 0);

    history->bytes -= b->records.len;
    kv_buf_fini(&b->records);
    history->oldest = (history->oldest + 1) % KVS_FILE_BATCHES;
    history->n--;
}

void kvs_file_history_records(kv_store_v1 *h, struct kv_buf *ret)
{
    struct kvs_file_history *history = &h->history;
    bool shared = atomic_load_explicit(&history->shared, memory_order_relaxed);
    size_t since = 0; /* index behind this thread's previous batch; 0: none */

    for (size_t i = 0; i < history->n; i++) {
        if (batch_at(history, i)->thread == this_thread())
            since = i + 1;
    }
    for (size_t i = 0; i < history->n; i++) {
        struct kvs_file_batch *b = batch_at(history, i);

        if (b->noted && !(shared && (i >= since || history->n - i <= LATELY)))
            continue;
        kv_buf_append(ret, b->records.data, b->records.len);
        if (b->records.error) /* out of memory: an incomplete note would be worse than none */
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
    if (history->n == KVS_FILE_BATCHES)
        drop_oldest(history);
    b = batch_at(history, history->n++);
    *b = (struct kvs_file_batch){.thread = this_thread(), .noted = noted};
    for (size_t i = 0; i < n; i++)
        kvs_file_add_record(&b->records, entries[i]->key, entries[i]->key_len);
    history->bytes += b->records.len;
    while (history->bytes > MAX_BYTES)
        drop_oldest(history);
}

void kvs_file_history_fini(kv_store_v1 *h)
{
    while (h->history.n)
        drop_oldest(&h->history);
}
