// SPDX-License-Identifier: Apache-2.0
/*
 * A block manager whose cache lies on a GPU, when things go wrong. Needs the whole tree: the build
 * of the kvx room alone leaves this program out.
 *
 *   gpu_faults [DIR]           kill processes in mid-transfer, then inject an illegal address
 *   gpu_faults store DIR       store and load blocks until killed
 *   gpu_faults check DIR       load every block that the disk tier has and compare its bytes
 *   gpu_faults illegal DIR     a kernel of the process writes to an address that isn't mapped; from
 *                              then on each call of CUDA fails, and the manager must give up cleanly
 *
 * Exit: 0; 1 something was wrong; 77 no GPU.
 */
#include <dlfcn.h>
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kvbm.h"
#include "kvbm_transfer.h"

enum { BLOCKS = 256, CHAIN = 16, CHAINS = BLOCKS / CHAIN, LAYERS = 16, WAIT_MS = 60000, KILLS = 4 };
#define BLOCK_BYTES ((size_t)LAYERS * 2 * 16 * 512 * 2) /* 512 KiB */

#define MUST(condition)                                                             \
    do {                                                                            \
        if (!(condition)) {                                                         \
            fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                                \
        }                                                                           \
    } while (0)

static double seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* --------------------------------------------------------------------------------------------- */
/* The manager, its cache on the GPU, and host memory to make and compare blocks in */

static struct {
    struct kvbm_layout_config block;
    struct kvbm_manager *manager;
    struct kvbm_layout *layout, *image;
    struct kvbm_copier *copier;
    struct kvbm_cache *cache;
    uint64_t keys[BLOCKS];
    uint32_t numbers[BLOCKS];
    uint8_t ok[CHAINS][2];
} w;

static struct kvbm_layout *layout_of(enum kvbm_storage_kind memory, enum kvbm_layout_kind kind)
{
    struct kvbm_storage_opts opts = {.size = sizeof(opts), .kind = memory, .bytes = 1};
    struct kvbm_allocator allocator = kvbm_allocator_of(&opts);
    struct kvbm_layout_config config = w.block;
    struct kvbm_layout *layout = NULL;

    config.kind = kind;
    config.num_blocks = BLOCKS;
    MUST(kvbm_layout_allocate(&config, &allocator, &layout) == 0);
    return layout;
}

static void open_world(const char *directory)
{
    struct kvbm_manager_opts opts = {.size = sizeof(opts),
                                     .block = &w.block,
                                     .fingerprint = "gpu_faults",
                                     .host_bytes = BLOCKS * BLOCK_BYTES,
                                     .host_pinned = true,
                                     .disk = directory,
                                     .disk_bytes = BLOCKS / 4 * 5 * BLOCK_BYTES};
    struct kvbm_cache_opts cache = {.size = sizeof(cache)};

    w.block = (struct kvbm_layout_config){.size = sizeof(w.block),
                                          .kind = KVBM_FULLY_CONTIGUOUS,
                                          .num_layers = LAYERS,
                                          .outer_dim = 2,
                                          .page_size = 16,
                                          .inner_dim = 512,
                                          .num_heads = 4,
                                          .dtype_width_bytes = 2,
                                          .dtype = KVX_DTYPE_BF16};
    MUST(kvbm_manager_create(&opts, &w.manager) == 0);
    w.layout = layout_of(KVBM_STORAGE_DEVICE, KVBM_LAYER_SEPARATE_BLOCK_CONTIGUOUS);
    w.image = layout_of(KVBM_STORAGE_PINNED, KVBM_FULLY_CONTIGUOUS);
    cache.layout = w.layout;
    MUST(kvbm_cache_attach(w.manager, &cache, &w.cache) == 0);
    MUST(kvbm_copier_create(NULL, &w.copier) == 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        w.keys[i] = (i + 1) * UINT64_C(0x9e3779b97f4a7c15);
        w.numbers[i] = i;
    }
}

static void close_world(void)
{
    kvbm_cache_detach(w.cache);
    MUST(kvbm_manager_destroy(w.manager, WAIT_MS) == 0);
    kvbm_copier_destroy(w.copier);
    kvbm_layout_destroy(w.layout);
    kvbm_layout_destroy(w.image);
}

static uint64_t *words_of(uint32_t i)
{
    struct kvbm_view view;

    MUST(kvbm_layout_block(w.image, i, &view) == 0);
    return (uint64_t *)(uintptr_t)view.addr; // NOLINT(performance-no-int-to-ptr)
}

/* The words that a key stands for; @fill: write them, else compare. */
static bool words_agree(uint32_t i, bool fill)
{
    uint64_t *words = words_of(i), x = w.keys[i];
    bool same = true;

    for (size_t k = 0; k < BLOCK_BYTES / 8; k++) {
        x ^= x << 13, x ^= x >> 7, x ^= x << 17;
        if (fill)
            words[k] = x;
        else
            same = same && words[k] == x;
    }
    return same;
}

/* Copy all blocks between the GPU and the image. */
static int mirror(bool to_gpu)
{
    struct kvbm_transfer t = {.size = sizeof(t),
                              .src = to_gpu ? w.image : w.layout,
                              .dst = to_gpu ? w.layout : w.image,
                              .src_blocks = w.numbers,
                              .dst_blocks = w.numbers,
                              .n = BLOCKS};
    struct kvbm_done done = {0};
    int64_t id = kvbm_copier_submit(w.copier, &t);
    int rc = id < 0 ? (int)id : kvbm_copier_wait(w.copier, (uint64_t)id, WAIT_MS, &done);

    return rc < 0 ? rc : done.status;
}

/* Begin a job of one chain. Returns its id, 0: no block to load, or an error. */
static int64_t begin(uint32_t chain, bool store)
{
    struct kvbm_chain keys = {.size = sizeof(keys), .keys = w.keys + (size_t)chain * CHAIN};
    struct kvbm_job job = {.size = sizeof(job),
                           .cache = w.cache,
                           .blocks = w.numbers + (size_t)chain * CHAIN,
                           .ok = w.ok[chain]};
    long n = store ? kvbm_manager_prepare_store(w.manager, &keys, CHAIN, &job.pin)
                   : kvbm_manager_prepare_load(w.manager, &keys, CHAIN, NULL, &job.pin);
    int64_t id = 0;

    memset(w.ok[chain], 0, sizeof(w.ok[chain]));
    if (n < 0)
        return n;
    if (n > 0)
        id = kvbm_manager_submit(w.manager, &job);
    kvbm_pin_release(job.pin);
    return id;
}

/* Run the first @n chains at once. Returns the number of jobs that failed; each must end in time. */
static uint32_t run(uint32_t n, bool store)
{
    int64_t ids[CHAINS];
    uint32_t failed = 0;

    for (uint32_t c = 0; c < n; c++)
        ids[c] = begin(c, store);
    for (uint32_t c = 0; c < n; c++) {
        struct kvbm_done done = {0};
        int rc = ids[c] <= 0 ? (int)ids[c] /* refused, or no block to move */
                             : kvbm_manager_wait(w.manager, (uint64_t)ids[c], WAIT_MS, &done);

        MUST(rc != -ETIMEDOUT);
        failed += rc < 0 || done.status < 0;
    }
    return failed;
}

static void fill_gpu(void)
{
    for (uint32_t i = 0; i < BLOCKS; i++)
        words_agree(i, true);
    MUST(mirror(true) == 0);
}

/* --------------------------------------------------------------------------------------------- */
/* Modes */

_Noreturn static void store_until_killed(const char *directory)
{
    open_world(directory);
    fill_gpu();
    printf("ready\n");
    fflush(stdout);
    for (;;) {
        run(CHAINS, true);
        kvbm_pool_reset_inactive(kvbm_manager_pool(w.manager, KV_TIER_HOST));
        run(CHAINS, false);
    }
}

static int check(const char *directory)
{
    uint32_t found = 0;

    open_world(directory);
    for (uint32_t i = 0; i < BLOCKS; i++)
        memset(words_of(i), 0, BLOCK_BYTES);
    MUST(mirror(true) == 0);
    MUST(run(CHAINS, false) == 0);
    MUST(mirror(false) == 0);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        if (!(w.ok[i / CHAIN][i % CHAIN / 8] >> (i % 8) & 1))
            continue;
        MUST(words_agree(i, false));
        found++;
    }
    printf("check: %u of %d blocks found, all right\n", found, BLOCKS);
    close_world();
    return 0;
}

/* One store to an address that isn't mapped, as text that the driver compiles. */
static const char illegal_kernel[] = ".version 6.0\n.target sm_50\n.address_size 64\n"
                                     ".visible .entry crash() {\n"
                                     ".reg .u64 %a;\n.reg .u32 %b;\n"
                                     "mov.u64 %a, 64;\nmov.u32 %b, 1;\n"
                                     "st.global.u32 [%a], %b;\nret;\n}\n";

/* Functions of the driver that the injection calls. */
static struct {
    int (*retain)(void **ret, int device);
    int (*push)(void *context);
    int (*load)(void **ret, const void *image);
    int (*find)(void **ret, void *module, const char *name);
    int (*launch)(void *function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  unsigned, void *stream, void **arguments, void **extra);
    int (*synchronize)(void);
} cuda;

static void find_symbol(void *library, const char *name, void *slot)
{
    void *symbol = dlsym(library, name);

    MUST(symbol);
    memcpy(slot, &symbol, sizeof(symbol));
}

static void load_cuda(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);

    MUST(library);
    find_symbol(library, "cuDevicePrimaryCtxRetain", &cuda.retain);
    find_symbol(library, "cuCtxPushCurrent_v2", &cuda.push);
    find_symbol(library, "cuModuleLoadData", &cuda.load);
    find_symbol(library, "cuModuleGetFunction", &cuda.find);
    find_symbol(library, "cuLaunchKernel", &cuda.launch);
    find_symbol(library, "cuCtxSynchronize", &cuda.synchronize);
}

static void inject(void)
{
    void *context, *module, *function;

    load_cuda();
    MUST(cuda.retain(&context, 0) == 0 && cuda.push(context) == 0);
    MUST(cuda.load(&module, illegal_kernel) == 0 && cuda.find(&function, module, "crash") == 0);
    for (uint32_t c = 0; c < CHAINS / 2; c++) /* under way when the kernel runs */
        MUST(begin(c, false) > 0);
    MUST(cuda.launch(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL) == 0);
    printf("illegal: the driver says %d\n", cuda.synchronize());
}

/* Half of the chains are stored before the injection, and all of them should be afterwards. */
static int illegal(const char *directory)
{
    uint32_t loads, stores;
    double start;

    open_world(directory);
    fill_gpu();
    MUST(run(CHAINS / 2, true) == 0);
    MUST(kvbm_manager_drain(w.manager, WAIT_MS) == 0);
    kvbm_pool_reset_inactive(kvbm_manager_pool(w.manager, KV_TIER_HOST)); /* load from the disk */
    inject();
    start = seconds();
    loads = run(CHAINS / 2, false);
    stores = run(CHAINS, true);
    printf("illegal: %u of %d loads and %u of %d new stores failed, in %.3f s\n", loads, CHAINS / 2,
           stores, CHAINS / 2, seconds() - start);
    MUST(loads == CHAINS / 2 && stores == CHAINS / 2 && seconds() - start < 5);
    MUST(kvbm_manager_drain(w.manager, WAIT_MS) == 0);
    start = seconds();
    close_world();
    printf("illegal: closed in %.3f s\n", seconds() - start);
    MUST(seconds() - start < 5);
    return 0;
}

/* --------------------------------------------------------------------------------------------- */
/* All of it, in processes of their own */

static pid_t spawn(const char *mode, const char *directory, int *ret_output)
{
    int ends[2];
    pid_t pid;

    MUST(pipe(ends) == 0);
    pid = fork();
    MUST(pid >= 0);
    if (pid == 0) {
        if (ret_output)
            dup2(ends[1], STDOUT_FILENO);
        close(ends[0]);
        close(ends[1]);
        execl("/proc/self/exe", "gpu_faults", mode, directory, (char *)NULL);
        _exit(127);
    }
    close(ends[1]);
    if (ret_output)
        *ret_output = ends[0];
    else
        close(ends[0]);
    return pid;
}

static int result_of(pid_t pid)
{
    int status;

    MUST(waitpid(pid, &status, 0) == pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void run_mode(const char *mode, const char *directory)
{
    int rc = result_of(spawn(mode, directory, NULL));

    if (rc)
        fprintf(stderr, "gpu_faults %s: exit %d\n", mode, rc);
    MUST(rc == 0);
}

static void kill_one(const char *directory, unsigned round)
{
    int output;
    char ready[6];
    pid_t pid = spawn("store", directory, &output);

    MUST(read(output, ready, sizeof(ready)) == sizeof(ready));
    nanosleep(&(struct timespec){.tv_nsec = (long)(20 + 70 * round) * 1000000}, NULL);
    kill(pid, SIGKILL);
    MUST(result_of(pid) == 128 + SIGKILL);
    close(output);
    run_mode("check", directory);
}

static bool has_gpu(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    int (*init)(unsigned) = NULL, (*count)(int *) = NULL, n = 0;

    if (!library)
        return false;
    find_symbol(library, "cuInit", &init);
    find_symbol(library, "cuDeviceGetCount", &count);
    return init(0) == 0 && count(&n) == 0 && n > 0;
}

int main(int argc, char **argv)
{
    char own[] = "/tmp/gpu_faults.XXXXXX", command[64], other[4096];
    const char *directory = argc == 2 ? argv[1] : own;

    if (argc == 3 && !strcmp(argv[1], "store"))
        store_until_killed(argv[2]);
    if (argc == 3)
        return !strcmp(argv[1], "check")     ? check(argv[2])
               : !strcmp(argv[1], "illegal") ? illegal(argv[2])
                                             : 2;
    if (!has_gpu()) {
        printf("skipped: no CUDA device\n");
        return 77;
    }
    if (argc < 2)
        MUST(mkdtemp(own));
    for (unsigned round = 0; round < KILLS; round++)
        kill_one(directory, round);
    snprintf(other, sizeof(other), "%s/illegal", directory);
    MUST(mkdir(other, 0700) == 0);
    run_mode("illegal", other);
    run_mode("check", other);
    if (argc < 2) {
        snprintf(command, sizeof(command), "rm -rf %s", own);
        MUST(system(command) == 0); // NOLINT(cert-env33-c)
    }
    return 0;
}
