// SPDX-License-Identifier: Apache-2.0
/*
 * Save a buffer and restore it, in the store of the first argument or in a folder here:
 *     cc -std=gnu11 store_buffer.c $(pkg-config --cflags --libs kvstore)
 */
#include <kv_store.h>
#include <stdio.h>
#include <stdlib.h>

int main(int argc, char **argv)
{
    char state[] = "keys and values";
    struct kvs_store *store;
    void *back = NULL;
    size_t len = 0;

    if (kvs_open(argc > 1 ? argv[1] : "./store_buffer.kv", &store) != 0)
        return 1;
    if (kvs_save_buffer(store, "session-1", state, sizeof(state), NULL, NULL) == 0 &&
        kvs_restore_buffer(store, "session-1", &back, &len, NULL) == 0)
        printf("restored %zu bytes: %s\n", len, (char *)back);
    kvs_close(store);
    free(back);
    return back ? 0 : 1;
}
