// SPDX-License-Identifier: Apache-2.0
/*
 * One epoch counter G for the process, one slot per thread.
 *
 *   reader   e = G; slot = e (seq_cst); again until G is still e        ... reads ...   slot = 0
 *   writer   unlink; stamp = fetch_add(G, 0)                                 (release)
 *   advance  every slot is 0 or G  ->  CAS G to G + 1                        (acquire, release)
 *   free     when G >= stamp + 2
 *
 * Why a reader at epoch e can't hold anything stamped s < e: the writer's read-modify-write of G
 * comes before the CAS that made s + 1 in G's modification order, all of them are
 * read-modify-writes, so the reader's load of G = e synchronises with it: the unlink happened
 * before the reader's first step.
 *
 * Why nothing it can hold (s >= e) is freed while it reads: G passes e + 1 only through an advance
 * from e + 1, whose scan comes after G became e + 1, hence (total order of seq_cst operations)
 * after the reader saw G = e, hence after it wrote its slot: the scan sees e, not e + 1, and
 * refuses. So G <= e + 1 < s + 2. Leaving is a release that the scan acquires: the reads happen
 * before the free.
 */
#include "base/thread/epoch.h"

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>

#include "base/core/error.h"

/*
 * Slot of one thread, in a cache line of its own so that readers don't disturb one another. Slots
 * are reused, never freed: their number is the largest number of threads that read at the same
 * time.
 */
struct slot {
    _Alignas(64) _Atomic uint64_t epoch; /* epoch at which the thread reads; 0: not reading */
    _Atomic bool taken;
    unsigned depth; /* nesting depth; only the owner uses it */
    struct slot *next;
};

static _Atomic uint64_t global_epoch = 1;
static struct slot *_Atomic slots;
static pthread_key_t exit_key;
static pthread_once_t exit_once = PTHREAD_ONCE_INIT;
static int exit_error;
static _Thread_local struct slot *own __attribute__((tls_model("initial-exec")));

static void release_slot(void *arg)
{
    struct slot *slot = arg;

    own = NULL;
    atomic_store_explicit(&slot->epoch, 0, memory_order_release);
    atomic_store_explicit(&slot->taken, false, memory_order_release);
}

static void make_key(void)
{
    exit_error = pthread_key_create(&exit_key, release_slot);
}

static struct slot *reuse_slot(void)
{
    struct slot *slot = atomic_load_explicit(&slots, memory_order_acquire);

    for (; slot; slot = slot->next) {
        bool free_slot = false;

        if (atomic_compare_exchange_strong_explicit(&slot->taken, &free_slot, true,
                                                    memory_order_acquire, memory_order_relaxed))
            return slot;
    }
    return NULL;
}

static struct slot *new_slot(void)
{
    struct slot *slot = aligned_alloc(64, sizeof(*slot));

    if (!slot)
        return NULL;
    atomic_init(&slot->epoch, 0);
    atomic_init(&slot->taken, true);
    slot->depth = 0;
    slot->next = atomic_load_explicit(&slots, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(&slots, &slot->next, slot, memory_order_seq_cst,
                                                  memory_order_relaxed))
        ;
    return slot;
}

/* Give the calling thread a slot. Returns NULL with *ret_error on failure. */
static struct slot *register_thread(int *ret_error)
{
    struct slot *slot;

    pthread_once(&exit_once, make_key);
    *ret_error = exit_error ? -exit_error : -ENOMEM;
    if (exit_error)
        return NULL;
    slot = reuse_slot();
    if (!slot)
        slot = new_slot();
    if (!slot)
        return NULL;
    slot->depth = 0;
    if (pthread_setspecific(exit_key, slot)) {
        release_slot(slot);
        return NULL;
    }
    own = slot;
    return slot;
}

int kv_epoch_enter(void)
{
    struct slot *slot = own;
    uint64_t epoch;

    if (KV_UNLIKELY(!slot)) {
        int rc;

        slot = register_thread(&rc);
        if (!slot)
            return rc;
    }
    if (slot->depth++)
        return 0;
    do {
        epoch = atomic_load_explicit(&global_epoch, memory_order_seq_cst);
        atomic_store_explicit(&slot->epoch, epoch, memory_order_seq_cst);
    } while (atomic_load_explicit(&global_epoch, memory_order_seq_cst) != epoch);
    return 0;
}

void kv_epoch_exit(void)
{
    if (--own->depth == 0)
        atomic_store_explicit(&own->epoch, 0, memory_order_release);
}

/* Return true when the epoch moved, by this thread or another one. */
static bool try_advance(void)
{
    uint64_t epoch = atomic_load_explicit(&global_epoch, memory_order_seq_cst);
    struct slot *slot = atomic_load_explicit(&slots, memory_order_seq_cst);

    for (; slot; slot = slot->next) {
        uint64_t at = atomic_load_explicit(&slot->epoch, memory_order_seq_cst);

        if (at && at != epoch)
            return false;
    }
    atomic_compare_exchange_strong_explicit(&global_epoch, &epoch, epoch + 1, memory_order_seq_cst,
                                            memory_order_seq_cst);
    return true;
}

/* -- limbo ------------------------------------------------------------------------------------- */

#define KIND_MASK ((uintptr_t)7)

void kv_limbo_init(struct kv_limbo *limbo, size_t soft, size_t hard, kv_retired_free_fn free_fn,
                   void *arg)
{
    *limbo = (struct kv_limbo){.soft = soft, .hard = hard, .free_fn = free_fn, .arg = arg};
}

static void empty_bag(struct kv_limbo *limbo, struct kv_limbo_bag *bag)
{
    struct kv_retired *object = bag->head;

    limbo->bytes -= bag->bytes;
    *bag = (struct kv_limbo_bag){0};
    while (object) {
        uintptr_t word = object->word;

        limbo->free_fn(limbo->arg, object, (unsigned)(word & KIND_MASK));
        object = (struct kv_retired *)(word & ~KIND_MASK);
    }
}

void kv_limbo_fini(struct kv_limbo *limbo)
{
    empty_bag(limbo, &limbo->fresh);
    for (size_t i = 0; i < KV_COUNT(limbo->bags); i++)
        empty_bag(limbo, &limbo->bags[i]);
}

void kv_limbo_retire(struct kv_limbo *limbo, struct kv_retired *object, unsigned kind, size_t bytes)
{
    object->word = (uintptr_t)limbo->fresh.head | kind;
    limbo->fresh.head = object;
    limbo->fresh.bytes += bytes;
    limbo->bytes += bytes;
}

/*
 * Stamp the objects retired since the last seal. A bag that is pushed out is at least three epochs
 * old.
 */
static void seal(struct kv_limbo *limbo)
{
    uint64_t stamp = atomic_fetch_add_explicit(&global_epoch, 0, memory_order_seq_cst);
    struct kv_limbo_bag *bag = &limbo->bags[stamp % 3];
    struct kv_retired *last = limbo->fresh.head;

    if (bag->stamp != stamp)
        empty_bag(limbo, bag);
    while (last->word & ~KIND_MASK)
        last = (struct kv_retired *)(last->word & ~KIND_MASK);
    last->word |= (uintptr_t)bag->head;
    bag->head = limbo->fresh.head;
    bag->bytes += limbo->fresh.bytes;
    bag->stamp = stamp;
    limbo->fresh = (struct kv_limbo_bag){0};
}

static void free_old(struct kv_limbo *limbo)
{
    uint64_t now = atomic_load_explicit(&global_epoch, memory_order_seq_cst);

    for (size_t i = 0; i < KV_COUNT(limbo->bags); i++)
        if (limbo->bags[i].head && limbo->bags[i].stamp + 2 <= now)
            empty_bag(limbo, &limbo->bags[i]);
}

/*
 * Return true inside a read section of the calling thread: waiting for readers would wait for
 * itself.
 */
static bool is_reading(void)
{
    return own && own->depth > 0;
}

/*
 * Return true after a large removal. Collect its garbage now, since the next write may never come.
 */
static bool is_much(const struct kv_limbo *limbo)
{
    return limbo->bytes / 16 > limbo->soft;
}

void kv_limbo_collect(struct kv_limbo *limbo, int eager)
{
    if (limbo->fresh.head)
        seal(limbo);
    for (int i = 0; i < 3 && limbo->bytes && (eager || limbo->bytes > limbo->soft); i++) {
        if (!try_advance())
            break;
        free_old(limbo);
        if (!eager && !is_much(limbo))
            break;
    }
    while (limbo->bytes > limbo->hard && !is_reading()) {
        if (!try_advance())
            sched_yield();
        free_old(limbo);
    }
}
