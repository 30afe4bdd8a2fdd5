// SPDX-License-Identifier: Apache-2.0
/* Calls captured into CUDA graphs. The process's first call is in the strictest kind of capture: it
 * must not wait, allocate, or make a query that capture forbids. Replays use new data and slots,
 * while other threads call on streams of their own. KV_TEST_SCALE: percent of 1000 replays of a
 * chain, and of 1000 replays of the four kinds of layers together. */
#include <pthread.h>

#include "gpu.h"
#include "kvx/kvx_layers.h"

enum { LAYERS = 5, STEPS = 100, REPLAYS = 1000, BESIDE = 2 };

static int n_replays(int kinds)
{
    return (int)case_setting("KV_TEST_SCALE", 100) * (REPLAYS / kinds) / 100 + 1;
}

/* --------------------------------------------------------------------------------------------- */
/* Other streams, busy until beside_end() */

static struct {
    pthread_t thread[BESIDE];
    unsigned id[BESIDE];
    unsigned long calls[BESIDE];
    int stop;
} beside;

static void *call_beside(void *arg)
{
    unsigned id = *(unsigned *)arg;
    struct kvx_place_hooks hooks;
    cudaStream_t stream;

    GPU(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    hooks = gpu_thread_hooks(stream);
    do {
        MUST(layers_agree(&hooks, 1 + (unsigned)beside.calls[id] % 7, id % 4));
        beside.calls[id]++;
    } while (!__atomic_load_n(&beside.stop, __ATOMIC_RELAXED));
    GPU(cudaStreamDestroy(stream));
    return NULL;
}

/* Start after a capture: a strict one forbids other threads to allocate. */
static void beside_begin(void)
{
    memset(&beside, 0, sizeof(beside));
    for (unsigned i = 0; i < BESIDE; i++) {
        beside.id[i] = i;
        MUST(pthread_create(&beside.thread[i], NULL, call_beside, &beside.id[i]) == 0);
    }
}

static unsigned long beside_end(void)
{
    unsigned long calls = 0;

    __atomic_store_n(&beside.stop, 1, __ATOMIC_RELAXED);
    for (unsigned i = 0; i < BESIDE; i++) {
        MUST(pthread_join(beside.thread[i], NULL) == 0);
        calls += beside.calls[i];
    }
    return calls;
}

/* --------------------------------------------------------------------------------------------- */
/* Replays with new data and slots each time */

struct bench_memory {
    struct layers_memory layer[LAYERS];
    int64_t slots[LAYERS_TOKENS];
    int32_t table[LAYERS_SEQS * 2], lengths[LAYERS_SEQS];
    void *placed[3];
    struct layers_call host[LAYERS], device[LAYERS];
};

static cudaGraphExec_t instantiate(cudaGraph_t graph)
{
    cudaGraphExec_t exec;

#if CUDART_VERSION >= 12000
    GPU(cudaGraphInstantiate(&exec, graph, 0));
#else
    GPU(cudaGraphInstantiate(&exec, graph, NULL, NULL, 0));
#endif
    return exec;
}

static void make(struct bench_memory *m, const struct kvx_place_hooks *hooks, unsigned kind)
{
    struct dice d = {kind + 77};

    memcpy(m->table, (int32_t[]){2, 0, 1, 0}, sizeof(m->table));
    memcpy(m->lengths, (int32_t[]){9, 12}, sizeof(m->lengths));
    for (int i = 0; i < LAYERS_TOKENS; i++)
        m->slots[i] = i * 5 % (LAYERS_BLOCKS * LAYERS_SIZE);
    m->placed[0] = hooks->put(m->slots, sizeof(m->slots));
    m->placed[1] = hooks->put(m->table, sizeof(m->table));
    m->placed[2] = hooks->put(m->lengths, sizeof(m->lengths));
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (unsigned i = 0; i < 6; i++) {
            m->layer[l].host[i] = malloc(layers_bytes(kind, i));
            MUST(m->layer[l].host[i]);
            random_bytes(&d, m->layer[l].host[i], layers_bytes(kind, i));
            m->layer[l].placed[i] = hooks->put(m->layer[l].host[i], layers_bytes(kind, i));
        }
        layers_describe(&m->host[l], m->layer[l].host, KVX_MEMORY_HOST, kind, m->slots, m->table,
                        m->lengths);
        layers_describe(&m->device[l], m->layer[l].placed, KVX_MEMORY_DEVICE, kind, m->placed[0],
                        m->placed[1], m->placed[2]);
    }
}

/* New inputs and other slots, for both sides. */
static void shuffle(struct bench_memory *m, unsigned kind, struct dice *d, cudaStream_t stream)
{
    for (int i = 0; i < LAYERS_TOKENS; i++)
        m->slots[i] = (m->slots[i] + 7) % (LAYERS_BLOCKS * LAYERS_SIZE);
    GPU(cudaMemcpyAsync(m->placed[0], m->slots, sizeof(m->slots), cudaMemcpyDefault, stream));
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (unsigned i = 2; i < 4; i++) {
            random_bytes(d, m->layer[l].host[i], layers_bytes(kind, i));
            GPU(cudaMemcpyAsync(m->layer[l].placed[i], m->layer[l].host[i], layers_bytes(kind, i),
                                cudaMemcpyDefault, stream));
        }
    }
    GPU(cudaStreamSynchronize(stream));
}

static void check_same(const struct bench_memory *m, const struct kvx_place_hooks *hooks,
                       unsigned kind)
{
    for (uint32_t l = 0; l < LAYERS; l++) {
        for (unsigned i = 0; i < 6; i++) {
            char *found = malloc(layers_bytes(kind, i));

            MUST(found);
            hooks->get(found, m->layer[l].placed[i], layers_bytes(kind, i));
            MUST(memcmp(found, m->layer[l].host[i], layers_bytes(kind, i)) == 0);
            free(found);
        }
    }
}

static void test_replays(const struct kvx_place_hooks *hooks, unsigned kind)
{
    struct bench_memory *m = calloc(1, sizeof(*m));
    kvx_options_t options = {.size = sizeof(options), .flags = KVX_OPTION_ZERO_PADDING};
    cudaStream_t stream = hooks->stream;
    struct dice d = {99};
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    size_t n_nodes = 0;

    MUST(m);
    make(m, hooks, kind);
    GPU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    MUST(layers_run(m->device, LAYERS, true, &options, stream) == KVX_STATUS_OK);
    GPU(cudaStreamEndCapture(stream, &graph));
    GPU(cudaGraphGetNodes(graph, NULL, &n_nodes));
    MUST(n_nodes == 2); /* all layers in one launch: a write, a gather */
    exec = instantiate(graph);
    beside_begin();
    for (int replay = 0; replay < n_replays(4); replay++) {
        shuffle(m, kind, &d, stream);
        GPU(cudaGraphLaunch(exec, stream));
        MUST(layers_run(m->host, LAYERS, true, &options, NULL) == KVX_STATUS_OK);
        check_same(m, hooks, kind);
    }
    printf("graph, kind %u: 2 launches, %d replays agree, beside %lu calls on other streams\n",
           kind, n_replays(4), beside_end());
    GPU(cudaGraphExecDestroy(exec));
    GPU(cudaGraphDestroy(graph));
    free(m); /* the arenas go with the process */
}

/*
 * Small launches overlap (programmatic launches). Each step of this chain overwrites what the step
 * before wrote and reads it back, so any launch that starts moving too early leaves a trace.
 */
static void test_chain(const struct kvx_place_hooks *hooks)
{
    static struct layers_call step[STEPS];
    size_t in = layers_bytes(0, 2), out = layers_bytes(0, 4);
    struct bench_memory *m = calloc(1, sizeof(*m));
    char *inputs = malloc(STEPS * in), *found = malloc(out), *device_in, *device_out;
    cudaStream_t stream = hooks->stream;
    struct dice d = {5};
    cudaGraph_t graph;
    cudaGraphExec_t exec;
    unsigned long calls;

    MUST(m && inputs && found);
    make(m, hooks, 0);
    random_bytes(&d, inputs, STEPS * in);
    device_in = hooks->put(inputs, STEPS * in);
    GPU(cudaMalloc((void **)&device_out, STEPS * out));
    GPU(cudaMemset(device_out, 0, STEPS * out));
    GPU(cudaDeviceSynchronize());
    GPU(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < STEPS; i++) {
        step[i] = m->device[0];
        step[i].write.io.key.data = step[i].write.io.value.data = device_in + (size_t)i * in;
        step[i].gather.io.key.data = device_out + (size_t)i * out;
        MUST(kvx_write_kv(&step[i].cache, &step[i].write, stream) == KVX_STATUS_OK);
        MUST(kvx_gather_kv(&step[i].cache, &step[i].gather, stream) == KVX_STATUS_OK);
    }
    GPU(cudaStreamEndCapture(stream, &graph));
    exec = instantiate(graph);
    beside_begin();
    for (int replay = 0; replay < n_replays(1); replay++)
        GPU(cudaGraphLaunch(exec, stream));
    GPU(cudaStreamSynchronize(stream));
    calls = beside_end();
    memset(m->layer[0].host[4], 0, out); /* rows beyond the lengths stay as they are: zero */
    for (int i = 0; i < STEPS; i++) {
        memcpy(m->layer[0].host[2], inputs + (size_t)i * in, in);
        memcpy(m->layer[0].host[3], inputs + (size_t)i * in, in);
        MUST(kvx_write_kv(&m->host[0].cache, &m->host[0].write, NULL) == KVX_STATUS_OK);
        MUST(kvx_gather_kv(&m->host[0].cache, &m->host[0].gather, NULL) == KVX_STATUS_OK);
        hooks->get(found, device_out + (size_t)i * out, out);
        MUST(memcmp(found, m->layer[0].host[4], out) == 0);
    }
    printf("chain: %d dependent launches in a graph, %d replays agree, beside %lu calls on other "
           "streams\n",
           2 * STEPS, n_replays(1), calls);
    GPU(cudaGraphExecDestroy(exec));
    GPU(cudaGraphDestroy(graph));
    free(inputs);
    free(found);
    free(m);
}

int main(void)
{
    struct kvx_place_hooks hooks;

    gpu_need();
    hooks = gpu_hooks(KVX_MEMORY_DEVICE, 0);
    for (unsigned kind = 0; kind < 4; kind++)
        test_replays(&hooks, kind);
    test_chain(&hooks);
    MUST(cudaGetLastError() == cudaSuccess);
    return 0;
}
