// SPDX-License-Identifier: Apache-2.0
/*
 * libcuda.so.1 without a GPU: the calls that libkvbm makes, on memory of this process. Streams are
 * threads that run their work later, in order and with pauses, so that a caller that doesn't wait
 * for an event reads too early. Device memory is filled with garbage first. The library refuses
 * like a real driver: handles of another context than the current one, wrong flags, waiting during
 * a capture. The functions at the end inject faults.
 *
 * ABI: the driver API's public symbols. EMULATED_CUDA: the driver's version.
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
#define NO_DEVICE 101
#define BAD_CONTEXT 201
#define BAD_HANDLE 400
#define NOT_READY 600
#define ILLEGAL_ADDRESS 700
#define CAPTURING 900
#define UNKNOWN 999
#define CAPTURE_RELAXED 2
#ifndef EMULATED_CUDA
#define EMULATED_CUDA 13
#endif

enum { QUEUE = 4096, DEVICES = 2, NESTED = 4 };

struct event {
    void *context; /* NULL: the test's own */
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
    void *context;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    pthread_t thread;
    struct op ops[QUEUE];
    uint64_t put, done;
    bool stop;
};

static _Atomic int fail_copies, fail_events, delay_us, copies, streams_alive, events_alive;
static _Atomic int fail_batch_with, batches, capturing, broken, retained[DEVICES];
static _Thread_local void *current[NESTED]; /* contexts pushed: who calls without one is wrong */
static _Thread_local int depth, capture_mode;

/*
 * A kernel's illegal access ends the process's use of CUDA: nothing moves any more, and each call
 * fails from then on. Streams read the lock around each operation, so that none is half done.
 */
static pthread_rwlock_t illegal_lock = PTHREAD_RWLOCK_INITIALIZER;
static _Atomic bool illegal;

/* True when the call is allowed now: while a thread captures, only threads that exempted
 * themselves. */
static bool allowed(void)
{
    if (!capturing || capture_mode == CAPTURE_RELAXED)
        return true;
    broken++;
    return false;
}

static bool here(const void *context)
{
    return depth > 0 && current[depth - 1] == context;
}

/* Memory that the driver knows: its own, and locked memory. Other memory is copied one piece a
 * call. */
enum { RANGES = 4096, LOCKED = 1, OWN = 2 };
static struct range {
    uint64_t at;
    size_t len;
    int kind;
} ranges[RANGES];
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

static bool remember(uint64_t at, size_t len, int kind)
{
    bool kept = false;

    pthread_mutex_lock(&ranges_lock);
    for (int i = 0; i < RANGES && !kept; i++) {
        if (ranges[i].kind)
            continue;
        ranges[i] = (struct range){at, len, kind};
        kept = true;
    }
    pthread_mutex_unlock(&ranges_lock);
    return kept;
}

static bool forget(uint64_t at, int kind)
{
    bool found = false;

    pthread_mutex_lock(&ranges_lock);
    for (int i = 0; i < RANGES && !found; i++) {
        if (ranges[i].kind != kind || ranges[i].at != at)
            continue;
        ranges[i].kind = 0;
        found = true;
    }
    pthread_mutex_unlock(&ranges_lock);
    return found;
}

static int kind_of(uint64_t at, size_t len)
{
    int kind = 0;

    pthread_mutex_lock(&ranges_lock);
    for (int i = 0; i < RANGES && !kind; i++) {
        if (ranges[i].kind && at >= ranges[i].at && at + len <= ranges[i].at + ranges[i].len)
            kind = ranges[i].kind;
    }
    pthread_mutex_unlock(&ranges_lock);
    return kind;
}

static void run_op(const struct op *op)
{
    if (!op->event) {
        if (delay_us)
            usleep((unsigned)delay_us);
        pthread_rwlock_rdlock(&illegal_lock);
        if (!illegal)
            memcpy((void *)(uintptr_t)op->to, (const void *)(uintptr_t)op->from, op->len);
        pthread_rwlock_unlock(&illegal_lock);
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
    return ordinal < DEVICES ? 0 : NO_DEVICE;
}

EXPORT int cuDeviceGetCount(int *ret)
{
    *ret = DEVICES;
    return 0;
}

EXPORT int cuDevicePrimaryCtxRetain(void **ret, int device)
{
    static int contexts[DEVICES];

    *ret = &contexts[device];
    retained[device]++;
    return 0;
}

EXPORT int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active)
{
    *flags = 0;
    *active = retained[device] > 0;
    return 0;
}

EXPORT int cuThreadExchangeStreamCaptureMode(int *mode)
{
    int before = capture_mode;

    capture_mode = *mode;
    *mode = before;
    return 0;
}

EXPORT int cuCtxPushCurrent_v2(void *context)
{
    if (!context || depth == NESTED)
        return BAD_CONTEXT;
    current[depth++] = context;
    return 0;
}

EXPORT int cuCtxPopCurrent_v2(void **ret)
{
    if (!ret || !depth)
        return BAD_CONTEXT;
    *ret = current[--depth];
    return 0;
}

EXPORT int cuMemAlloc_v2(uint64_t *ret, size_t len)
{
    void *memory;

    if (illegal)
        return ILLEGAL_ADDRESS;
    if (!depth || !allowed())
        return depth ? CAPTURING : BAD_CONTEXT;
    memory = malloc(len);
    if (!memory)
        return 2;
    memset(memory, 0xEE, len);
    *ret = (uintptr_t)memory;
    return remember(*ret, len, OWN) ? 0 : UNKNOWN;
}

EXPORT int cuMemFree_v2(uint64_t addr)
{
    if (illegal)
        return ILLEGAL_ADDRESS;
    if (!allowed() || !forget(addr, OWN))
        return allowed() ? 1 : CAPTURING;
    free((void *)(uintptr_t)addr);
    return 0;
}

/* Portable, because other contexts copy it, and mapped, because kernels read and write it. */
EXPORT int cuMemHostRegister_v2(void *memory, size_t len, unsigned flags)
{
    if (illegal)
        return ILLEGAL_ADDRESS;
    if (!allowed())
        return CAPTURING;
    return memory && len && flags == 3 && depth && remember((uintptr_t)memory, len, LOCKED)
               ? 0
               : UNKNOWN;
}

EXPORT int cuMemHostUnregister(void *memory)
{
    if (illegal)
        return ILLEGAL_ADDRESS;
    if (!allowed())
        return CAPTURING;
    return depth && forget((uintptr_t)memory, LOCKED) ? 0 : UNKNOWN;
}

EXPORT int cuMemsetD8_v2(uint64_t addr, unsigned char value, size_t len)
{
    if (illegal)
        return ILLEGAL_ADDRESS;
    memset((void *)(uintptr_t)addr, value, len);
    return 0;
}

EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t len)
{
    if (illegal)
        return ILLEGAL_ADDRESS;
    memcpy((void *)(uintptr_t)to, from, len);
    return 0;
}

EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t len)
{
    if (illegal)
        return ILLEGAL_ADDRESS;
    memcpy(to, (const void *)(uintptr_t)from, len);
    return 0;
}

EXPORT int cuStreamCreate(void **ret, unsigned flags)
{
    struct stream *s = calloc(1, sizeof(*s));

    if (illegal)
        return ILLEGAL_ADDRESS;
    if (!s || flags != 1 || !depth)
        return UNKNOWN;
    pthread_mutex_init(&s->lock, NULL);
    pthread_cond_init(&s->changed, NULL);
    s->context = current[depth - 1];
    pthread_create(&s->thread, NULL, stream_thread, s);
    streams_alive++;
    *ret = s;
    return 0;
}

/* Frees the stream even when it then reports an error, as the driver does. */
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
    return illegal ? ILLEGAL_ADDRESS : 0;
}

EXPORT int cuStreamSynchronize(void *stream)
{
    struct stream *s = stream;

    if (illegal)
        return ILLEGAL_ADDRESS;
    if (!depth || !allowed())
        return depth ? CAPTURING : BAD_CONTEXT;
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
    struct stream *s = stream;

    if (illegal)
        return ILLEGAL_ADDRESS;
    copies++;
    if (fail_copies && --fail_copies == 0)
        return UNKNOWN;
    if (!depth || !here(s->context))
        return BAD_CONTEXT;
    put(s, (struct op){.to = to, .from = from, .len = len});
    return 0;
}

#if EMULATED_CUDA >= 12
struct attributes {
    int order, from_type, from_id, to_type, to_id;
    unsigned flags;
};

/* In no order; a failing one stops in the middle. */
static int batch(const uint64_t *to, const uint64_t *from, const size_t *len, size_t n,
                 const struct attributes *a, const size_t *first, size_t n_attributes, void *stream)
{
    struct stream *s = stream;
    size_t end = fail_batch_with ? n / 2 : n;

    if (illegal)
        return ILLEGAL_ADDRESS;
    batches++;
    if (!s || !n || n_attributes != 1 || *first != 0 || a->order != 1 || a->flags)
        return 1;
    if (!here(s->context))
        return BAD_CONTEXT;
    for (size_t i = 0; i < n; i++) {
        if (!kind_of(to[i], len[i]) || !kind_of(from[i], len[i]))
            return 1;
    }
    for (size_t i = end; i-- > 0;)
        put(s, (struct op){.to = to[i], .from = from[i], .len = len[i]});
    return atomic_exchange(&fail_batch_with, 0);
}

EXPORT int cuMemcpyBatchAsync(const uint64_t *to, const uint64_t *from, const size_t *len, size_t n,
                              const struct attributes *a, const size_t *first, size_t n_attributes,
                              size_t *failed, void *stream)
{
    int code = batch(to, from, len, n, a, first, n_attributes, stream);

    *failed = n / 2;
    return EMULATED_CUDA > 12 ? UNKNOWN : code; /* for old programs; we are to call the other */
}
#endif

#if EMULATED_CUDA >= 13
EXPORT int cuMemcpyBatchAsync_v2(const uint64_t *to, const uint64_t *from, const size_t *len,
                                 size_t n, const struct attributes *a, const size_t *first,
                                 size_t n_attributes, void *stream)
{
    return batch(to, from, len, n, a, first, n_attributes, stream);
}
#endif

EXPORT int cuEventCreate(void **ret, unsigned flags)
{
    struct event *event = calloc(1, sizeof(*event));

    if (illegal)
        return ILLEGAL_ADDRESS;
    (void)flags;
    if (!event)
        return 2;
    event->context = depth ? current[depth - 1] : NULL;
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
    return illegal ? ILLEGAL_ADDRESS : 0;
}

EXPORT int cuEventRecord(void *event, void *stream)
{
    struct event *e = event;
    struct stream *s = stream;
    uint64_t number;

    if (illegal)
        return ILLEGAL_ADDRESS;
    if (fail_events && --fail_events == 0)
        return UNKNOWN;
    if (s && (s->context != e->context || !here(s->context)))
        return BAD_HANDLE;
    pthread_mutex_lock(&e->lock);
    number = ++e->recorded;
    pthread_mutex_unlock(&e->lock);
    if (s) /* else it happens when the test says so */
        put(s, (struct op){.event = e, .number = number});
    return 0;
}

EXPORT int cuEventQuery(void *event)
{
    struct event *e = event;
    bool happened;

    if (illegal)
        return ILLEGAL_ADDRESS;
    if (!depth || !allowed())
        return depth ? CAPTURING : BAD_CONTEXT;
    pthread_mutex_lock(&e->lock);
    happened = e->happened == e->recorded;
    pthread_mutex_unlock(&e->lock);
    return happened ? 0 : NOT_READY;
}

EXPORT int cuEventSynchronize(void *event)
{
    struct event *e = event;

    if (illegal)
        return ILLEGAL_ADDRESS;
    if (!depth || !allowed())
        return depth ? CAPTURING : BAD_CONTEXT;
    pthread_mutex_lock(&e->lock);
    while (e->happened != e->recorded)
        pthread_cond_wait(&e->changed, &e->lock);
    pthread_mutex_unlock(&e->lock);
    return 0;
}

/* ---- kernels: the one there is accesses an illegal address ---- */

EXPORT int cuModuleLoadData(void **ret, const void *image)
{
    static int module;

    *ret = &module;
    return image && depth ? 0 : UNKNOWN;
}

EXPORT int cuModuleGetFunction(void **ret, void *module, const char *name)
{
    *ret = module;
    return strcmp(name, "crash") == 0 ? 0 : UNKNOWN;
}

EXPORT int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned shared,
                          void *stream, void **arguments, void **extra)
{
    (void)grid_x, (void)grid_y, (void)grid_z, (void)block_x, (void)block_y, (void)block_z;
    (void)shared, (void)stream, (void)arguments, (void)extra;
    if (!function || !depth)
        return UNKNOWN;
    pthread_rwlock_wrlock(&illegal_lock);
    illegal = true;
    pthread_rwlock_unlock(&illegal_lock);
    return 0;
}

EXPORT int cuCtxSynchronize(void)
{
    return illegal ? ILLEGAL_ADDRESS : 0;
}

/* ---- the test's ---- */

/**
 * The @copy-th copy from now on, and the @event-th record, fail (0: none); copies take so long at
 * least.
 */
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

EXPORT int emulated_cuda_batches(void);
int emulated_cuda_batches(void)
{
    return atomic_exchange(&batches, 0);
}

/** The next batch queues its first half and returns this. */
EXPORT void emulated_cuda_fail_batch(int code);
void emulated_cuda_fail_batch(int code)
{
    fail_batch_with = code;
}

/** Somebody captures a graph, from now on or no more. Returns how often others have broken it. */
EXPORT int emulated_cuda_capture(int on);
int emulated_cuda_capture(int on)
{
    capturing = on;
    return atomic_exchange(&broken, 0);
}

/** How often a device's context was asked for. */
EXPORT int emulated_cuda_contexts(int device);
int emulated_cuda_contexts(int device)
{
    return retained[device];
}

/** 2: memory of the driver's, 1: locked, 0: the driver doesn't know it. */
EXPORT int emulated_cuda_kind(uint64_t addr);
int emulated_cuda_kind(uint64_t addr)
{
    return kind_of(addr, 1);
}

/** Streams, events and memory that nobody gave back. */
EXPORT int emulated_cuda_alive(void);
int emulated_cuda_alive(void)
{
    int n = streams_alive + events_alive;

    for (int i = 0; i < RANGES; i++)
        n += ranges[i].kind != 0;
    return n;
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
