// SPDX-License-Identifier: Apache-2.0
/* slow://PATH is the file store in PATH with a pause of $SLOW_MS before each chunk that is read or
 * looked for, so that a test can act in between. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kv_store_abi.h"
#include "kv_store_ext.h"
#include "store/backend/file.h"

static void wait_a_little(void)
{
    const char *ms = getenv("SLOW_MS");

    usleep((ms ? (unsigned)atoi(ms) : 20) * 1000);
}

static kv_store_v1 *open_slow(const char *uri)
{
    return kvs_file_vtable()->open(uri + strlen("slow://"));
}

static int get_slow(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **ret,
                    size_t *len)
{
    wait_a_little();
    return kvs_file_vtable()->get_chunk(self, hash, hash_len, ret, len);
}

struct sweep {
    kv_store_live_fn live;
    void *arg;
};

static int live_slow(void *arg, const uint8_t *hash, size_t hash_len)
{
    const struct sweep *sweep = arg;

    wait_a_little();
    return sweep->live(sweep->arg, hash, hash_len);
}

static int sweep_slow(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                      kv_store_swept *ret)
{
    struct sweep sweep = {live, arg};

    return kvs_file_ext()->sweep_chunks(self, min_age_s, live_slow, &sweep, ret);
}

const kv_store_vtable *kv_store_get_vtable(void)
{
    static kv_store_vtable table;

    table = *kvs_file_vtable();
    table.open = open_slow;
    table.get_chunk = get_slow;
    return &table;
}

const kv_store_ext *kv_store_get_ext(void)
{
    static kv_store_ext table;

    table = *kvs_file_ext();
    table.sweep_chunks = sweep_slow;
    table.get_chunks = NULL; /* each chunk by get_chunk: these don't wait */
    table.get_parts = NULL;
    table.stream_chunk = NULL;
    return &table;
}
