// SPDX-License-Identifier: Apache-2.0
/* Copies between memory. The copier's threads make them, and also call all done callbacks; threads
 * in kvbm_copier_wait help. */
#include <string.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "base/core/clock.h"
#include "base/core/error.h"
#include "tier/transfer/transfer.h"

/* Smallest copy that bypasses the CPU's cache. Such stores need not read the target's lines first,
 * which saves a third of the traffic. libc does so only for copies larger than the cache, which a
 * block rarely is; but many blocks follow each other, and are not read soon. With pieces of 2 MiB:
 * 1.6 times memcpy. */
#define STREAM_BYTES ((size_t)32 << 10)

#if defined(__x86_64__)
static void stream(char *to, const char *from, size_t len)
{
    size_t head = -(uintptr_t)to & 63;

    memcpy(to, from, head);
    for (to += head, from += head, len -= head; len >= 64; to += 64, from += 64, len -= 64) {
        const __m128i *s = (const __m128i *)(const void *)from;
        __m128i *d = (__m128i *)(void *)to;
        __m128i a, b, c, e;

        _mm_prefetch(from + 512, _MM_HINT_NTA); /* may lie behind the end: a prefetch is a hint */
        a = _mm_loadu_si128(s);
        b = _mm_loadu_si128(s + 1);
        c = _mm_loadu_si128(s + 2);
        e = _mm_loadu_si128(s + 3);
        _mm_stream_si128(d, a);
        _mm_stream_si128(d + 1, b);
        _mm_stream_si128(d + 2, c);
        _mm_stream_si128(d + 3, e);
    }
    memcpy(to, from, len);
    _mm_sfence(); /* orders the stores before other threads learn of the copy */
}
#else
static void stream(char *to, const char *from, size_t len)
{
    memcpy(to, from, len);
}
#endif

void tier_copy(void *to, const void *from, size_t len)
{
    if (len >= STREAM_BYTES)
        stream(to, from, len);
    else
        memcpy(to, from, len);
}

static int convert(struct tier_chunk *chunk)
{
    const struct tier_job *job = chunk->job;

    chunk->pieces += (uint64_t)chunk->n * chunk->n_layers;
    return tier_convert_layers(&job->plan, chunk->first_layer, chunk->n_layers,
                               job->src + chunk->first, job->dst + chunk->first, chunk->n, NULL);
}

static void run(struct tier_chunk *chunk)
{
    struct tier_walk walk;
    struct tier_piece piece;

    if (chunk->job->plan.grain == TIER_CONVERT) {
        chunk->err = convert(chunk);
        return;
    }
    tier_walk_begin(&walk, chunk, 0);
    while (tier_walk_next(&walk, &piece)) {
        chunk->pieces++;
        if (chunk->job->plan.grain != TIER_NOTHING)
            tier_copy((void *)(uintptr_t)piece.dst, (const void *)(uintptr_t)piece.src,
                      (size_t)piece.len);
    }
}

/* Copy a chunk. Call with the lock, which is released during the copy. */
static void do_chunk(struct kvbm_copier *copier, struct tier_chunk *chunk)
{
    pthread_mutex_unlock(&copier->lock);
    run(chunk);
    pthread_mutex_lock(&copier->lock);
    tier_chunk_done(copier, chunk);
}

void *tier_memory_thread(void *arg)
{
    struct kvbm_copier *copier = arg;
    struct tier_chunk chunk;

    pthread_mutex_lock(&copier->lock);
    for (;;) {
        if (tier_call_one(copier))
            continue;
        if (tier_take(copier, TIER_MEMORY, &chunk)) {
            do_chunk(copier, &chunk);
            continue;
        }
        if (copier->calls.first) /* tier_take has ended a late job */
            continue;
        if (copier->stopping && !copier->n_live)
            break;
        pthread_cond_wait(&copier->work[TIER_MEMORY], &copier->lock);
    }
    pthread_mutex_unlock(&copier->lock);
    return NULL;
}

void tier_help_locked(struct kvbm_copier *copier, uint64_t id, uint64_t until_ns)
{
    struct tier_job *job;
    struct tier_chunk chunk;

    while ((job = tier_find(copier, id)) && job->plan.lane == TIER_MEMORY &&
           kv_now_ns() < until_ns && tier_take_of(copier, job, &chunk)) {
        do_chunk(copier, &chunk);
        if (job->state == TIER_ENDED && job->done)
            tier_call(copier, job);
    }
}

void tier_help(struct kvbm_copier *copier, uint64_t id, uint64_t until_ns)
{
    pthread_mutex_lock(&copier->lock);
    tier_help_locked(copier, id, until_ns);
    pthread_mutex_unlock(&copier->lock);
}
