// SPDX-License-Identifier: Apache-2.0
/*
 * Keep a buffer in a store and get it back:
 *
 *     store_snapshot                     in a folder of its own, removed afterwards
 *     store_snapshot redis://localhost   in any store there is a plugin for
 *
 * The second save is of the same buffer, changed a little: it writes only the changed chunks.
 *
 *     cc -std=gnu11 store_snapshot.c $(pkg-config --cflags --libs kvstore)
 */
#define _XOPEN_SOURCE 700 /* for nftw */
#include <ftw.h>
#include <kv_store.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct buffer {
    unsigned char *data;
    size_t len, at;
};

static int64_t read_buffer(void *arg, void *buf, size_t cap)
{
    struct buffer *b = arg;
    size_t n = b->len - b->at < cap ? b->len - b->at : cap;

    memcpy(buf, b->data + b->at, n);
    b->at += n;
    return (int64_t)n;
}

static int write_buffer(void *arg, const void *data, size_t len)
{
    struct buffer *b = arg;

    if (len > b->len - b->at)
        return -1;
    memcpy(b->data + b->at, data, len);
    b->at += len;
    return 0;
}

static int save(struct kvs_store *store, struct buffer *state)
{
    struct kvs_save_opts opts = {.size = sizeof(opts), .fingerprint = "my-model f16"};
    struct kvs_result result = {.size = sizeof(result)};
    int rc;

    state->at = 0;
    rc = kvs_save(store, "session-1", read_buffer, state, &opts, &result);
    if (rc == 0)
        printf("saved %llu bytes in %llu chunks, %llu bytes of them new\n",
               (unsigned long long)result.bytes, (unsigned long long)result.n_chunks,
               (unsigned long long)result.new_bytes);
    return rc;
}

static int run(struct kvs_store *store)
{
    struct buffer state = {.len = 16u << 20}, back = {.len = 16u << 20};
    struct kvs_restore_opts opts = {.size = sizeof(opts), .fingerprint = "my-model f16"};
    unsigned long long x = 1;
    int rc = -1;

    state.data = malloc(state.len);
    back.data = malloc(back.len);
    for (size_t i = 0; state.data && i < state.len; i++) {
        x = x * 6364136223846793005ull + 1442695040888963407ull;
        state.data[i] = (unsigned char)(x >> 56);
    }
    if (state.data && back.data)
        rc = save(store, &state);
    if (rc == 0) {
        memset(state.data + 5000000, 0, 1000);
        rc = save(store, &state);
    }
    if (rc == 0)
        rc = kvs_restore(store, "session-1", write_buffer, &back, &opts, NULL);
    if (rc == 0)
        rc = back.at == state.len && memcmp(back.data, state.data, state.len) == 0 ? 0 : -1;
    printf("%s\n", rc == 0 ? "restored, every byte" : "failed");
    free(state.data);
    free(back.data);
    return rc;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    return remove(path);
}

int main(int argc, char **argv)
{
    char folder[] = "/tmp/store_snapshot.XXXXXX";
    const char *uri = argc > 1 ? argv[1] : mkdtemp(folder);
    struct kvs_store *store;
    int rc;

    if (!uri || kvs_open(uri, &store) != 0)
        return 1;
    rc = run(store);
    kvs_close(store);
    if (argc < 2)
        nftw(folder, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    return rc ? 1 : 0;
}
