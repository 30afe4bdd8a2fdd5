// SPDX-License-Identifier: Apache-2.0
/* Opening, the functions of libllama, fingerprints of files. */
#include "llama/cache.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <unistd.h>

#include "base/core/log.h"
#include "base/hash/hash.h"

enum { FILE_STEP = 4 << 20 };

void kvl_set_log(kv_log_fn fn, void *arg)
{
    kv_log_set_user(fn, arg);
}

struct function {
    const char *name;
    size_t offset;
    bool may_lack; /* calls with a context do without it */
};

static const struct function functions[] = {
    {"llama_state_seq_get_size", offsetof(struct kvl_libllama, state_seq_get_size), false},
    {"llama_state_seq_get_data", offsetof(struct kvl_libllama, state_seq_get_data), false},
    {"llama_state_seq_set_data", offsetof(struct kvl_libllama, state_seq_set_data), false},
    {"llama_get_memory", offsetof(struct kvl_libllama, get_memory), false},
    {"llama_memory_seq_rm", offsetof(struct kvl_libllama, memory_seq_rm), false},
    {"llama_memory_seq_pos_max", offsetof(struct kvl_libllama, memory_seq_pos_max), false},
    {"llama_get_model", offsetof(struct kvl_libllama, get_model), true},
    {"llama_model_n_swa", offsetof(struct kvl_libllama, model_n_swa), true},
};

static void find_libllama(struct kvl_libllama *lib)
{
    for (size_t i = 0; i < KV_COUNT(functions); i++) {
        void *symbol = dlsym(RTLD_DEFAULT, functions[i].name);

        memcpy((char *)lib + functions[i].offset, &symbol, sizeof(symbol));
    }
}

bool kvl_has_libllama(const struct kvl_cache *c)
{
    for (size_t i = 0; i < KV_COUNT(functions); i++) {
        void *symbol;

        memcpy(&symbol, (const char *)&c->lib + functions[i].offset, sizeof(symbol));
        if (!symbol && !functions[i].may_lack) {
            kv_log_error("llama", "a function of libllama is missing", "name=%s",
                         functions[i].name);
            return false;
        }
    }
    return true;
}

int kvl_open(struct kvs_store *store, const struct kvl_opts *opts, struct kvl_cache **ret)
{
    struct kvl_cache *c;
    const struct kvl_libllama *lib;
    const char *fingerprint;
    uint32_t block_tokens;

    if (!store || !ret || !kv_sized(opts, "kvl_opts"))
        return -EINVAL;
    fingerprint = KV_OPT(opts, fingerprint, "");
    block_tokens = KV_OPT(opts, block_tokens, KVL_BLOCK_TOKENS);
    lib = KV_OPT(opts, libllama, NULL);
    if (!*fingerprint || strlen(fingerprint) > KVL_FINGERPRINT_MAX ||
        block_tokens > KVL_BLOCK_TOKENS_MAX || !kv_sized_or_null(lib, "kvl_libllama"))
        return -EINVAL;
    c = calloc(1, sizeof(*c));
    if (!c)
        return -ENOMEM;
    c->fingerprint = strdup(fingerprint);
    if (!c->fingerprint) {
        free(c);
        return -ENOMEM;
    }
    c->store = store;
    c->block_tokens = block_tokens;
    c->window = KV_OPT(opts, window, 0);
    if (lib)
        memcpy(&c->lib, lib, KV_MIN(lib->size, sizeof(c->lib)));
    else
        find_libllama(&c->lib);
    *ret = c;
    return 0;
}

void kvl_close(struct kvl_cache *cache)
{
    if (!cache)
        return;
    free(cache->fingerprint);
    free(cache);
}

int kvl_is_there(struct kvl_cache *c, const uint8_t key[KV_PREFIX_KEY])
{
    void *data = NULL;
    size_t len;
    int rc = kvs_get_chunk(c->store, key, KV_PREFIX_KEY, &data, &len);

    if (rc < 0)
        return rc == -ENOENT || rc == -EBADMSG ? 0 : rc;
    free(data);
    return 1;
}

void kvl_drop_damaged(struct kvl_cache *c, const uint8_t key[KV_PREFIX_KEY])
{
    static struct kv_log_rate rate;

    if (kv_log_allowed(&rate, 5))
        kv_log_warn("llama", "a damaged chunk counts as missing, and is deleted", "kind=%c",
                    key[3]);
    kvs_delete_chunk(c->store, key, KV_PREFIX_KEY);
}

int kvl_make_durable(struct kvl_cache *c, bool is_new)
{
    int rc;

    if (is_new)
        return kvs_save_buffer(c->store, KVL_OBJECT, NULL, 0, NULL, NULL);
    rc = kvs_flush(c->store);
    return rc == -ENOTSUP ? 0 : rc; /* a backend without flush keeps what it was given */
}

/* -- fingerprints of files --------------------------------------------------------------------- */

static int hash_file(int fd, XXH3_state_t *state)
{
    char *buf = malloc(FILE_STEP);
    ssize_t n;

    if (!buf)
        return -ENOMEM;
    for (;;) {
        n = read(fd, buf, FILE_STEP);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            break;
        kv_hash_update(state, buf, (size_t)n);
    }
    n = n < 0 ? -errno : 0;
    free(buf);
    return (int)n;
}

int kvl_fingerprint_file(const char *path, char ret[KVL_FILE_FINGERPRINT])
{
    XXH3_state_t state;
    uint8_t sum[16];
    int fd, rc;

    if (!path || !ret)
        return -EINVAL;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    XXH3_INITSTATE(&state);
    XXH3_128bits_reset(&state);
    rc = hash_file(fd, &state);
    close(fd);
    if (rc)
        return rc;
    kv_hash_done(&state, sum);
    for (size_t i = 0; i < sizeof(sum); i++)
        snprintf(ret + 2 * i, 3, "%02x", sum[i]);
    return 0;
}
