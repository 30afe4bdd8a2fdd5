// SPDX-License-Identifier: Apache-2.0
/*
 * A program that saves and loads slots with functions of a shared library, as llama-server does with
 * libllama's: tests/e2e/test_llama_preload.py puts libkvasir_llama_preload.so before it.
 *
 *     toy-server save PATH SEED LENGTH | toy-server load PATH | toy-server ask PATH
 *
 * The file is laid out as libllama's: magic, version, number of tokens, tokens, state. A file with
 * more tokens than there is room for is refused after its number is told.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SHARED __attribute__((visibility("default")))

struct llama_context {
    uint64_t seed;
    size_t len;
};

SHARED size_t llama_state_seq_save_file(struct llama_context *ctx, const char *path, int32_t seq,
                                        const int32_t *tokens, size_t n);
SHARED size_t llama_state_seq_load_file(struct llama_context *ctx, const char *path, int32_t seq,
                                        int32_t *tokens, size_t room, size_t *ret_n);

#ifdef TOY_LIBRARY
enum { MAGIC = 0x67677371, VERSION = 2, HEAD = 3 * sizeof(uint32_t) };

size_t llama_state_seq_save_file(struct llama_context *ctx, const char *path, int32_t seq,
                                 const int32_t *tokens, size_t n)
{
    FILE *file = fopen(path, "wb");
    uint64_t value = ctx->seed;
    uint32_t head[] = {MAGIC, VERSION, (uint32_t)n};
    size_t written = HEAD + n * sizeof(*tokens);

    if (!file || seq != 3)
        return 0;
    fwrite(head, HEAD, 1, file);
    fwrite(tokens, sizeof(*tokens), n, file);
    for (; written < ctx->len; written += sizeof(value)) {
        value = value * UINT64_C(6364136223846793005) + 1;
        fwrite(&value, sizeof(value), 1, file);
    }
    return fclose(file) ? 0 : written;
}

size_t llama_state_seq_load_file(struct llama_context *ctx, const char *path, int32_t seq,
                                 int32_t *tokens, size_t room, size_t *ret_n)
{
    FILE *file = fopen(path, "rb");
    uint32_t head[3];
    uint64_t value;
    size_t got;

    if (!file || seq != 3 || fread(head, HEAD, 1, file) != 1 || head[0] != MAGIC)
        return 0;
    *ret_n = head[2];
    if (*ret_n > room || fread(tokens, sizeof(*tokens), *ret_n, file) != *ret_n) {
        fclose(file);
        return 0;
    }
    got = HEAD + *ret_n * sizeof(*tokens);
    for (; fread(&value, sizeof(value), 1, file) == 1; got += sizeof(value))
        ctx->seed = ctx->seed * 31 + value;
    fclose(file);
    return got;
}
#else
int main(int argc, char **argv)
{
    struct llama_context ctx = {0, 0};
    int32_t tokens[] = {7, 8, 9, 10};
    size_t n = 0, bytes;

    if (argc > 4 && !strcmp(argv[1], "save")) {
        ctx = (struct llama_context){strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10)};
        printf("%zu\n", llama_state_seq_save_file(&ctx, argv[2], 3, tokens, 4));
        return 0;
    }
    if (argc < 3)
        return 2;
    if (!strcmp(argv[1], "ask")) {
        bytes = llama_state_seq_load_file(&ctx, argv[2], 3, NULL, 0, &n);
        printf("%zu %zu\n", bytes, n);
        return 0;
    }
    memset(tokens, 0, sizeof(tokens));
    bytes = llama_state_seq_load_file(&ctx, argv[2], 3, tokens, 4, &n);
    printf("%zu %zu %d %" PRIx64 "\n", bytes, n, tokens[3], ctx.seed);
    return 0;
}
#endif
