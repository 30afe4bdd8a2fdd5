// SPDX-License-Identifier: Apache-2.0
/* Look for the beginning of a prompt among stored states of llama.cpp:
 *     cc -std=gnu11 llama_prefix.c $(pkg-config --cflags --libs kvasir_llama kvstore) */
#include <kv_llama.h>
#include <kv_store.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    const struct kvl_opts opts = {.size = sizeof(opts), .fingerprint = "model.gguf, f16"};
    const int32_t prompt[] = {1, 15043, 3186};
    struct kvs_store *store;
    struct kvl_cache *cache;
    int64_t n;

    if (kvs_open(argc > 1 ? argv[1] : "./llama_prefix.kv", &store) ||
        kvl_open(store, &opts, &cache))
        return 1;
    n = kvl_find(cache, prompt, 3); /* with a llama_context: kvl_load, decode the rest, kvl_save */
    printf("%ld of 3 tokens are stored\n", (long)n);
    kvl_close(cache);
    kvs_close(store);
    return n < 0;
}
