// SPDX-License-Identifier: Apache-2.0
/*
 * libcuda.so.1 without a GPU: the calls that libkvbm makes, on memory of this process. Streams are threads that do
 * what was put on them later, in order and with pauses, so that who doesn't wait for an event reads too early. Device
 * memory is filled with rubbish first. Faults on demand, by the functions at the end.
 *
 * ABI: the driver API's public symbols.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define NOT_READY 600
#define UNKNOWN 999

enum { QUEUE = 4096 };

struct event {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t recorded, happened;
};

struct op {
    uint64_t to, from;
    size_t len;
    struct event *event; /* else a copy */
    uint64_t number;
};

struct stream {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    struct op ops[QUEUE];
    uint64_t put, done;
    bool stop;
};

static _Atomic int fail_copies, fail_events, delay_us, copies, streams_alive, events_alive;
static _Thread_local int depth; /* contexts pushed: who calls without one is wrong */

static void run_op(const struct op *op)
{
    if (!op->event) {
        if (delay_us)
            usleep((unsigned)delay_us);
        memcpy((void *)(uintptr_t)op->to, (const void *)(uintptr_t)op->from, op->len);
        return;
    }
    pthread_mutex_lock(&op->event->lock);
    op->event->happened = op->number;
    pthread_cond_broadcast(&op->event->changed);
    pthread_mutex_unlock(&op->event->lock);
}

static void *stream_thread(void *arg)
{
    struct stream *s = arg;

    pthread_mutex_lock(&s->lock);
    while (!s->stop || s->done < s->put) {
        struct op op;

        if (s->done == s->put) {
            pthread_cond_wait(&s->changed, &s->lock);
            continue;
        }
        op = s->ops[s->done % QUEUE];
        pthread_mutex_unlock(&s->lock);
        run_op(&op);
        pthread_mutex_lock(&s->lock);
        s->done++;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->lock);
    return NULL;
}

static void put(struct stream *s, struct op op)
{
    pthread_mutex_lock(&s->lock);
    while (s->put - s->done == QUEUE)
        pthread_cond_wait(&s->changed, &s->lock);
    s->ops[s->put++ % QUEUE] = op;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
}

/* ---- the driver's ---- */

EXPORT int cuInit(unsigned flags)
{
    return (int)flags;
}

EXPORT int cuDeviceGet(int *device, int ordinal)
{
    *device = ordinal;
    return ordinal < 2 ? 0 : 101;
}

EXPORT int cuDevicePrimaryCtxRetain(void **ret, int device)
{
    static int contexts[2];

    *ret = &contexts[device];
    return 0;
}

EXPORT int cuCtxPushCurrent_v2(void *context)
{
    depth++;
    return context ? 0 : UNKNOWN;
}

EXPORT int cuCtxPopCurrent_v2(void **ret)
{
    *ret = NULL;
    depth--;
    return 0;
}

EXPORT int cuMemAlloc_v2(uint64_t *ret, size_t len)
{
    void *memory = malloc(len);

    if (memory)
        memset(memory, 0xEE, len);
    *ret = (uintptr_t)memory;
    return memory && depth ? 0 : 2;
}

EXPORT int cuMemFree_v2(uint64_t addr)
{
    free((void *)(uintptr_t)addr);
    return 0;
}

EXPORT int cuMemHostRegister_v2(void *memory, size_t len, unsigned flags)
{
    return memory && len && flags == 1 ? 0 : UNKNOWN;
}

EXPORT int cuMemHostUnregister(void *memory)
{
    return memory ? 0 : UNKNOWN;
}

EXPORT int cuMemsetD8_v2(uint64_t addr, unsigned char value, size_t len)
{
    memset((void *)(uintptr_t)addr, value, len);
    return 0;
}

EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t len)
{
    memcpy((void *)(uintptr_t)to, from, len);
    return 0;
}

EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t len)
{
    memcpy(to, (const void *)(uintptr_t)from, len);
    return 0;
}

EXPORT int cuStreamCreate(void **ret, unsigned flags)
{
    struct stream *s = calloc(1, sizeof(*s));

    if (!s || flags != 1 || !depth)
        return UNKNOWN;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    pthread_create(&s->thread, NULL, stream_thread, s);
    streams_alive++;
    *ret = s;
    return 0;
}

EXPORT int cuStreamDestroy_v2(void *stream)
{
    struct stream *s = stream;

    pthread_mutex_lock(&s->lock);
    s->stop = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->lock);
    pthread_join(s->thread, NULL);
    free(s);
    streams_alive--;
    return 0;
}

EXPORT int cuStreamSynchronize(void *stream)
{
    struct stream *s = stream;

    if (!s)
        return 0;
    pthread_mutex_lock(&s->lock);
    while (s->done < s->put)
        pthread_cond_wait(&s->changed, &s->lock);
    pthread_mutex_unlock(&s->lock);
    return 0;
}

EXPORT int cuMemcpyAsync(uint64_t to, uint64_t from, size_t len, void *stream)
{
    copies++;
    if (fail_copies && --fail_copies == 0)
        return UNKNOWN;
    if (!depth)
        return UNKNOWN;
    put(stream, (struct op){.to = to, .from = from, .len = len});
    return 0;
}

EXPORT int cuEventCreate(void **ret, unsigned flags)
{
    struct event *event = calloc(1, sizeof(*event));

    (void)flags;
    if (!event)
        return 2;
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    events_alive++;
    *ret = event;
    return 0;
}

EXPORT int cuEventDestroy_v2(void *event)
{
    free(event);
    events_alive--;
    return 0;
}

EXPORT int cuEventRecord(void *event, void *stream)
{
    struct event *e = event;
    uint64_t number;

    if (fail_events && --fail_events == 0)
        return UNKNOWN;
    pthread_mutex_lock(&e->lock);
    number = ++e->recorded;
    pthread_mutex_unlock(&e->lock);
    if (stream) /* else it happens when the test says so */
        put(stream, (struct op){.event = e, .number = number});
    return 0;
}

EXPORT int cuEventQuery(void *event)
{
    struct event *e = event;
    bool happened;

    pthread_mutex_lock(&e->lock);
    happened = e->happened == e->recorded;
    pthread_mutex_unlock(&e->lock);
    return happened ? 0 : NOT_READY;
}

EXPORT int cuEventSynchronize(void *event)
{
    struct event *e = event;

    pthread_mutex_lock(&e->lock);
    while (e->happened != e->recorded)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
    return 0;
}

/* ---- the test's ---- */

/** The @copy-th copy from now on, and the @event-th record, fail (0: none); copies take so long at least. */
EXPORT void emulated_cuda_faults(int copy, int event, int us);
void emulated_cuda_faults(int copy, int event, int us)
{
    fail_copies = copy;
    fail_events = event;
    delay_us = us;
}

EXPORT int emulated_cuda_copies(void);
int emulated_cuda_copies(void)
{
    return atomic_exchange(&copies, 0);
}

/** Streams and events that nobody destroyed. */
EXPORT int emulated_cuda_alive(void);
int emulated_cuda_alive(void)
{
    return streams_alive + events_alive;
}

/** An event that was recorded without a stream happens. */
EXPORT void emulated_cuda_happen(void *event);
void emulated_cuda_happen(void *event)
{
    struct event *e = event;

    pthread_mutex_lock(&e->lock);
    e->happened = e->recorded;
    pthread_mutex_unlock(&e->lock);
}
