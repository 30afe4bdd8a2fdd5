// SPDX-License-Identifier: Apache-2.0
/* libkvx_cuda as built: it fits libkvx, exports no other symbols, and returns UNSUPPORTED without a
 * GPU instead of crashing. Exits with 77 where it wasn't built; for machines with a GPU see
 * gpu-check.sh. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <dlfcn.h>

#include "kvx/backend.h"
#include "kvx/kvx_sample.h"
#include "skip.h"

static char path[4096], driver_path[4096];

static void test_table(void **state)
{
    const struct kvx_backend *backend = kvx_backend_get();

    (void)state;
    assert_non_null(backend);
    assert_string_equal(backend->name, "cuda");
    assert_int_equal(backend->plan_size, sizeof(struct kvx_plan));
}

/* A second CUDA runtime in a process must not meet the first. */
static void test_exports(void **state)
{
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);

    (void)state;
    assert_non_null(library);
    assert_non_null(dlsym(library, "kvx_backend_v1"));
    assert_null(dlsym(library, "cudaGetDevice"));
    assert_null(dlsym(library, "cudaLaunchKernelExC"));
    dlclose(library);
}

static void to_device(kvx_tensor_desc_t *t)
{
    t->memory = KVX_MEMORY_DEVICE;
}

static void test_without_gpu(void **state)
{
    struct sample s;

    (void)state;
    if (access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0)
        skip_because("there is a GPU, and these pointers are none of its");
    sample_init(&s);
    to_device(&s.cache.k);
    to_device(&s.cache.v);
    to_device(&s.write.io.key);
    to_device(&s.write.io.value);
    assert_int_equal(kvx_write_kv(&s.cache, &s.write, NULL), KVX_STATUS_UNSUPPORTED);
    to_device(&s.gather.io.key);
    to_device(&s.gather.io.value);
    assert_int_equal(kvx_gather_kv(&s.cache, &s.gather, NULL), KVX_STATUS_UNSUPPORTED);
    assert_int_equal(kvx_write_kv(&s.cache, &s.write, NULL), KVX_STATUS_UNSUPPORTED);
}

/* Call on @stream under a driver of @version, captured or not. Returns asked * 4 + pushed * 2 + left. */
static int call_under(int version, int captures, void *stream)
{
    void *driver = dlopen(driver_path, RTLD_NOW | RTLD_GLOBAL); /* later found by its name */
    struct sample s;

    if (!driver)
        return 100;
    *(int *)dlsym(driver, "driver_version") = version;
    *(int *)dlsym(driver, "driver_captures") = captures;
    sample_init(&s);
    to_device(&s.cache.k);
    to_device(&s.cache.v);
    to_device(&s.write.io.key);
    to_device(&s.write.io.value);
    if (kvx_write_kv(&s.cache, &s.write, stream) == KVX_STATUS_OK)
        return 101;
    return *(int *)dlsym(driver, "driver_asked") * 4 + *(int *)dlsym(driver, "driver_pushed") * 2 +
           (*(int *)dlsym(driver, "driver_depth") == 0);
}

static int in_child(int version, int captures, void *stream)
{
    int status = 0;
    pid_t pid = fork();

    assert_true(pid >= 0);
    if (pid == 0)
        _exit(call_under(version, captures, stream));
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_true(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/*
 * A call makes the stream's context current and leaves it, also when it fails. Drivers before 12.5
 * end a capture whose stream's context is asked for, so there the current one has to do.
 */
static void test_contexts(void **state)
{
    static int stream;

    (void)state;
    assert_int_equal(in_child(13000, 0, &stream), 4 + 2 + 1);
    assert_int_equal(in_child(13000, 1, &stream), 4 + 2 + 1);
    assert_int_equal(in_child(12040, 0, &stream), 4 + 2 + 1);
    assert_int_equal(in_child(12040, 1, &stream), 1);
    assert_int_equal(in_child(13000, 0, NULL), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_table),
        cmocka_unit_test(test_exports),
        cmocka_unit_test(test_contexts), /* before this process has a driver */
        cmocka_unit_test(test_without_gpu),
    };
    const char *build = getenv("KV_BUILD_DIR");

    (void)snprintf(path, sizeof(path), "%s/lib/libkvx_cuda.so.0", build ? build : "build");
    (void)snprintf(driver_path, sizeof(driver_path), "%s/tests/cuda_contexts/libcuda.so.1",
                   build ? build : "build");
    if (access(path, R_OK) != 0) {
        printf("skipped: %s was not built (no nvcc, or an instrumented build)\n", path);
        return 77;
    }
    setenv("KVX_CUDA_LIBRARY", path, 1);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
