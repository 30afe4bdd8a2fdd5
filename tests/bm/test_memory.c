// SPDX-License-Identifier: Apache-2.0
/* Available memory, computed from files as the kernel has them; larger requests are refused. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "bm/storage/memory.h"
#include "kvbm.h"
#include "skip.h"
#include "support.h"

#define GIB (UINT64_C(1) << 30)
#define V1 "sys/fs/cgroup/memory"
#define V2 "sys/fs/cgroup"

static char root[64]; /* of a tree of files, each test's own */

static int make_root(void **state)
{
    (void)state;
    return temp_dir(root, sizeof(root));
}

static int drop_root(void **state)
{
    (void)state;
    return remove_dir(root);
}

/* A file in the tree, and its folders. */
static void put(const char *name, const char *text)
{
    char path[256];
    FILE *file;

    snprintf(path, sizeof(path), "%s/%s", root, name);
    for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')) != NULL; *at++ = '/') {
        *at = 0;
        assert_true(mkdir(path, 0700) == 0 || errno == EEXIST);
    }
    file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

static void put_machine(void)
{
    put("proc/meminfo", "MemTotal:       33554432 kB\nMemFree:         1000000 kB\n"
                        "MemAvailable:   20971520 kB\nSwapTotal:       4194304 kB\n"
                        "SwapCached:            0 kB\nSwapFree:        1048576 kB\n");
}

static void test_machine(void **state)
{
    (void)state;
    assert_int_equal(kvbm_memory_available(root), UINT64_MAX); /* nothing can be read */
    put_machine();
    assert_int_equal(kvbm_memory_available(root), 21 * GIB);
    put("proc/self/cgroup", "");
    assert_int_equal(kvbm_memory_available(root), 21 * GIB);
    put("proc/self/cgroup", "nonsense\n:\n0:\n7:memory\n0::\n3::/\n");
    assert_int_equal(kvbm_memory_available(root), 21 * GIB);
    put("proc/meminfo", "MemTotal: 100 kB\nSwapFree: 100 kB\n"); /* an old kernel */
    assert_int_equal(kvbm_memory_available(root), UINT64_MAX);
    put("proc/meminfo", "MemAvailable: 18446744073709551615 kB\n");
    assert_int_equal(kvbm_memory_available(root), UINT64_MAX);
}

static void test_v2(void **state)
{
    (void)state;
    put_machine();
    put("proc/self/cgroup", "0::/kubepods/pod1\n");
    put(V2 "/kubepods/pod1/memory.max", "max\n");
    put(V2 "/kubepods/pod1/memory.current", "999999999999\n");
    put(V2 "/kubepods/memory.max", "max\n");
    assert_int_equal(kvbm_memory_available(root), 21 * GIB);
    put(V2 "/kubepods/memory.max", "12884901888\n"); /* the group above limits */
    put(V2 "/kubepods/memory.current", "4294967296\n");
    assert_int_equal(kvbm_memory_available(root), 8 * GIB);
    put(V2 "/kubepods/memory.stat", "anon 1\nfile 3000000000\nshmem 5\ninactive_file 1073741824\n"
                                    "active_file 1073741824\nworkingset_refault_file 77\n");
    assert_int_equal(kvbm_memory_available(root), 10 * GIB);
    put(V2 "/kubepods/pod1/memory.max", "3221225472\n"); /* and the nearer one more */
    put(V2 "/kubepods/pod1/memory.current", "1073741824\n");
    assert_int_equal(kvbm_memory_available(root), 2 * GIB);
    put(V2 "/kubepods/pod1/memory.current", "9221225472\n"); /* lowered since */
    assert_int_equal(kvbm_memory_available(root), 0);
    put(V2 "/kubepods/pod1/memory.max", "99221225472\n"); /* more than the machine has */
    put(V2 "/kubepods/memory.max", "max\n");
    assert_int_equal(kvbm_memory_available(root), 21 * GIB);
}

/* In a container: what is mounted is its own group, whatever its name is outside. */
static void test_container(void **state)
{
    (void)state;
    put_machine();
    put("proc/self/cgroup", "0::/\n");
    put(V2 "/memory.max", "6442450944\n");
    put(V2 "/memory.current", "1073741824\n");
    assert_int_equal(kvbm_memory_available(root), 5 * GIB);
    put("proc/self/cgroup", "12:cpu,cpuacct:/\n4:hugetlb,memory:/docker/0123\n1:name=systemd:/x\n");
    put(V1 "/memory.limit_in_bytes", "4294967296\n");
    put(V1 "/memory.usage_in_bytes", "3221225472\n");
    put(V1 "/memory.stat", "cache 8\ninactive_file 4294967296\ntotal_inactive_file 1073741824\n"
                           "total_active_file 0\n");
    assert_int_equal(kvbm_memory_available(root), 2 * GIB);
    put(V1 "/docker/0123/memory.limit_in_bytes", "1073741824\n");
    put(V1 "/docker/0123/memory.usage_in_bytes", "0\n");
    assert_int_equal(kvbm_memory_available(root), GIB);
    put(V1 "/docker/0123/memory.limit_in_bytes", "9223372036854771712\n"); /* v1's "none" */
    assert_int_equal(kvbm_memory_available(root), 2 * GIB);
    put("proc/self/cgroup", "5:memoryless:/docker/0123\n");
    assert_int_equal(kvbm_memory_available(root), 21 * GIB);
}

static const char *const small_node = "Node 0 MemTotal:       16777216 kB\n"
                                      "Node 0 MemFree:           16384 kB\n"
                                      "Node 0 MemUsed:        16760832 kB\n"
                                      "Node 0 Active:            99999 kB\n"
                                      "Node 0 Active(anon):      99999 kB\n"
                                      "Node 0 Active(file):      16384 kB\n"
                                      "Node 0 Inactive(file):     8192 kB\n"
                                      "Node 0 FilePages:        999999 kB\n"
                                      "Node 0 SReclaimable:       8192 kB\n";

/* Free and reclaimable memory of a NUMA node; a process bound to the node may be swapped out,
 * too. */
static void test_node(void **state)
{
    (void)state;
    assert_int_equal(kvbm_node_available(root, 0), UINT64_MAX);
    put("sys/devices/system/node/node0/meminfo", small_node);
    put("sys/devices/system/node/node12/meminfo", "Node 12 MemFree: 2097152 kB\n");
    assert_int_equal(kvbm_node_available(root, 0), 48 << 20);
    assert_int_equal(kvbm_node_available(root, 12), 2 * GIB);
    assert_int_equal(kvbm_node_available(root, 1), UINT64_MAX);
    put_machine();
    assert_int_equal(kvbm_node_available(root, 0), GIB + (48 << 20));
    put("sys/devices/system/node/node1/meminfo", "Node\nNode 1\nNode 1 \nNode 1 : 7\n");
    assert_int_equal(kvbm_node_available(root, 1), UINT64_MAX);
}

/* Instead of the C library's: machines whose first node is nearly full are rare. */
FILE *fopen(const char *path, const char *mode)
{
    bool writes = *mode == 'w';
    char fake[128];
    int fd;

    snprintf(fake, sizeof(fake), "%s%s", root, path);
    if (!writes && *path == '/' && access(fake, R_OK) == 0)
        path = fake;
    fd = open(path, writes ? O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC : O_RDONLY | O_CLOEXEC, 0600);
    return fd < 0 ? NULL : fdopen(fd, writes ? "w" : "r");
}

/* Bound to a node, memory that only others have would end the process just as well. */
static void test_node_refuses(void **state)
{
    struct kvbm_storage_opts opts = {.size = sizeof(opts),
                                     .kind = KVBM_STORAGE_SYSTEM,
                                     .bytes = (uint64_t)100 << 20,
                                     .use_numa = true};
    struct kvbm_storage *storage;
    (void)state;

    put("sys/devices/system/node/node0/meminfo", small_node);
    put("proc/meminfo", "MemAvailable: 20971520 kB\nSwapFree: 0 kB\n");
    assert_int_equal(kvbm_storage_create(&opts, &storage), -ENOMEM);
    opts.use_numa = false;
    assert_int_equal(kvbm_storage_create(&opts, &storage), 0);
    kvbm_storage_destroy(storage);
    opts.use_numa = true;
    opts.bytes = (uint64_t)40 << 20;
    assert_int_equal(kvbm_storage_create(&opts, &storage), 0);
    kvbm_storage_destroy(storage);
}

/* In a child that the alarm ends, should it begin to fill memory. Returns its exit status, -1 when
 * it was killed. */
static int in_child(int (*call)(void))
{
    pid_t pid = fork();
    int status;

    assert_true(pid >= 0);
    if (pid == 0) {
        alarm(3);
        _exit(-call());
    }
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static int create_large_pool(void)
{
    struct kvbm_pool_opts opts = {
        .size = sizeof(opts), .n_blocks = INT32_MAX - 1, .block_size = 16};
    struct kvbm_registry *registry;
    struct kvbm_pool *pool;
    int err = kvbm_registry_create(NULL, &registry);

    return err < 0 ? err : kvbm_pool_create(registry, &opts, &pool);
}

static int create_large_storage(void)
{
    uint64_t there = kvbm_memory_available("");
    struct kvbm_storage_opts opts = {.size = sizeof(opts),
                                     .kind = KVBM_STORAGE_SYSTEM,
                                     .bytes = there + there / 4,
                                     .touch_threads = 1};
    struct kvbm_storage *storage;

    return kvbm_storage_create(&opts, &storage);
}

/* Memory that would be touched at once is compared with the memory available first. */
static void test_refused(void **state)
{
    uint64_t there = kvbm_memory_available("");
    (void)state;

    if (there > 200 * GIB)
        skip_because("the machine has enough for the largest pool there is");
    assert_int_equal(in_child(create_large_pool), ENOMEM);
    assert_int_equal(in_child(create_large_storage), ENOMEM);
    assert_true(kvbm_memory_is_there(there / 2, "a test"));
    assert_false(kvbm_memory_is_there(there + there / 4, "a test"));
    assert_true(kvbm_memory_is_there(1 << 20, "what is little is never asked for"));
}

#define in_own_root(test) cmocka_unit_test_setup_teardown(test, make_root, drop_root)

int main(void)
{
    const struct CMUnitTest tests[] = {
        in_own_root(test_machine), in_own_root(test_v2),           in_own_root(test_container),
        in_own_root(test_node),    in_own_root(test_node_refuses), cmocka_unit_test(test_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
