// SPDX-License-Identifier: Apache-2.0
/* Log lines of the library, handed to whoever embeds it. */
#include "base/log.h"
#include "kv_store.h"

static struct {
    kvs_log_fn fn;
    void *arg;
} user;

static void forward(void *arg, enum kv_log_level level, const char *line, size_t len)
{
    char text[KV_LOG_MAX_LINE + 1];
    (void)arg;

    len = KV_MIN(len, sizeof(text) - 1);
    memcpy(text, line, len);
    text[len] = '\0';
    user.fn(user.arg, KV_MIN((int)level, (int)KV_LOG_DEBUG), text);
}

void kvs_set_log(kvs_log_fn fn, void *arg)
{
    user.fn = fn;
    user.arg = arg;
    kv_log_set_sink(fn ? forward : NULL, NULL);
    kv_log_set_level(fn ? KV_LOG_DEBUG : KV_LOG_WARN);
}
