// SPDX-License-Identifier: Apache-2.0
/* The library is closed while a thread that used it still runs: the thread's end must find its
 * code. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/unit.h"
#include "kv_index.h"

struct library {
    void *handle;
    int (*create)(const struct kvi_opts *opts, struct kvi_index **ret);
    void (*destroy)(struct kvi_index *index);
    int (*find)(struct kvi_index *index, const uint64_t *hashes, size_t n, struct kvi_matches *m);
    void (*fini)(struct kvi_matches *m);
    pthread_barrier_t used, closed;
};

static void *use(void *arg)
{
    struct library *lib = arg;
    struct kvi_matches matches = {0};
    struct kvi_index *ix = NULL;
    const uint64_t hash = 1;
    int rc = lib->create(NULL, &ix);

    if (!rc)
        rc = lib->find(ix, &hash, 1, &matches);
    lib->fini(&matches);
    lib->destroy(ix);
    pthread_barrier_wait(&lib->used);
    pthread_barrier_wait(&lib->closed);
    return rc ? arg : NULL;
}

static void test_thread_outlives_library(void **state)
{
    const char *build = getenv("KV_BUILD_DIR");
    struct library lib = {0};
    pthread_t thread;
    char path[4096];
    void *failed;
    (void)state;

    snprintf(path, sizeof(path), "%s/lib/libkvindex.so", build ? build : "build");
    lib.handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!lib.handle)
        fail_msg("%s", dlerror());
    *(void **)&lib.create = dlsym(lib.handle, "kvi_create");
    *(void **)&lib.destroy = dlsym(lib.handle, "kvi_destroy");
    *(void **)&lib.find = dlsym(lib.handle, "kvi_find");
    *(void **)&lib.fini = dlsym(lib.handle, "kvi_matches_fini");
    assert_true(lib.create && lib.destroy && lib.find && lib.fini);
    pthread_barrier_init(&lib.used, NULL, 2);
    pthread_barrier_init(&lib.closed, NULL, 2);
    assert_int_equal(pthread_create(&thread, NULL, use, &lib), 0);
    pthread_barrier_wait(&lib.used);
    assert_int_equal(dlclose(lib.handle), 0);
    pthread_barrier_wait(&lib.closed);
    pthread_join(thread, &failed);
    assert_null(failed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_thread_outlives_library),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
