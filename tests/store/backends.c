// SPDX-License-Identifier: Apache-2.0
#include "backends.h"
#include "support.h"

char backends_dir[128];

static void backends_quiet(void *arg, int level, const char *line)
{
    (void)arg, (void)level, (void)line;
}

int backends_set_up(void **state)
{
    (void)state;
    kvs_set_log(backends_quiet, NULL);
    return disk_dir(backends_dir, sizeof(backends_dir));
}

int backends_tear_down(void **state)
{
    (void)state;
    kvs_set_log(NULL, NULL);
    memory_forget_all();
    return remove_dir(backends_dir);
}

struct kvs_store *backends_open(enum backend which)
{
    static const char *const uris[] = {"files",          "zstd?zstd=1",  "sums?sums=files",
                                       "memory://parts", "memory://all", "memory://gets1",
                                       "memory://bare"};
    static kv_store_vtable table;
    static kv_store_ext ext;
    struct kvs_store *store;
    char uri[256];

    if (which <= SIDE_CARS) {
        snprintf(uri, sizeof(uri), "%s/%s", backends_dir, uris[which]);
        assert_int_equal(kvs_open(uri, &store), 0);
        return store;
    }
    table = *memory_vtable();
    ext = *memory_ext();
    if (which != PARTS) {
        ext.get_parts = NULL;
        ext.put_parts = NULL;
    }
    if (which == SINGLE) {
        ext.get_chunks = NULL;
        ext.put_chunks = NULL;
    }
    assert_int_equal(kvs_open_with(&table, which == BARE ? NULL : &ext, uris[which], false, &store),
                     0);
    return store;
}

void backends_key(uint8_t key[8], uint64_t n)
{
    for (int i = 0; i < 8; i++)
        key[i] = (uint8_t)((n + 1) * UINT64_C(0x9e3779b97f4a7c15) >> (56 - 8 * i));
}
