// SPDX-License-Identifier: Apache-2.0
#include "plane/nats_opts.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/error.h"
#include "base/core/log.h"

#define QUEUE_BYTES ((uint64_t)64 << 20)
#define RECONNECT_MS 1000
#define TIMEOUT_MS 2000

static int refuse(const char *why)
{
    char quoted[200];

    kv_log_error("nats", "options of NATS are refused", "reason=%s",
                 kv_log_quote(quoted, sizeof(quoted), why));
    return -EINVAL;
}

static bool is_server(const char *url, size_t len)
{
    return (len > 7 && !strncmp(url, "nats://", 7)) || (len > 6 && !strncmp(url, "tls://", 6));
}

/* Check each URL of a list with commas between. */
static bool are_servers(const char *urls)
{
    for (;;) {
        size_t len = strcspn(urls, ",");

        if (!is_server(urls, len))
            return false;
        if (!urls[len])
            return true;
        urls += len + 1;
    }
}

static int check(const struct kvp_nats_opts *opts)
{
    const char *user = KV_OPT(opts, user, NULL), *password = KV_OPT(opts, password, NULL);
    const char *url = KV_OPT(opts, url, NULL);
    int n = !!user + !!KV_OPT(opts, token, NULL) + !!KV_OPT(opts, nkey_file, NULL) +
            !!KV_OPT(opts, creds_file, NULL);

    if (!kv_sized(opts, "kvp_nats_opts"))
        return -EINVAL;
    if (!url)
        return refuse("no URL");
    if (!are_servers(url))
        return refuse("a URL is neither nats:// nor tls://");
    if (!user != !password)
        return refuse("user and password come together");
    if (n > 1)
        return refuse("more than one credential");
    if (!KV_OPT(opts, tls_cert, NULL) != !KV_OPT(opts, tls_key, NULL))
        return refuse("tls_cert and tls_key come together");
    return 0;
}

static int copy(const char *text, const char **ret)
{
    *ret = text ? strdup(text) : NULL;
    return text && !*ret ? -ENOMEM : 0;
}

#define COPY(field) (err = err < 0 ? err : copy(KV_OPT(opts, field, NULL), &ret->field))

int kvp_nats_opts_copy(const struct kvp_nats_opts *opts, struct kvp_nats_opts *ret)
{
    int err = opts ? check(opts) : -EINVAL;

    if (err < 0)
        return err;
    *ret = (struct kvp_nats_opts)KVP_NATS_OPTS_INIT;
    COPY(url);
    COPY(user);
    COPY(password);
    COPY(token);
    COPY(nkey_file);
    COPY(creds_file);
    COPY(tls_ca);
    COPY(tls_cert);
    COPY(tls_key);
    err = err < 0 ? err : copy(KV_OPT(opts, name, "kvasir"), &ret->name);
    ret->queue_bytes = KV_OPT(opts, queue_bytes, QUEUE_BYTES);
    ret->reconnect_ms = KV_OPT(opts, reconnect_ms, RECONNECT_MS);
    ret->timeout_ms = KV_OPT(opts, timeout_ms, TIMEOUT_MS);
    if (err < 0)
        kvp_nats_opts_fini(ret);
    return err;
}

static void wipe(const char **text)
{
    if (*text)
        explicit_bzero((char *)*text, strlen(*text));
    free((char *)*text);
    *text = NULL;
}

void kvp_nats_opts_fini(struct kvp_nats_opts *opts)
{
    const char **texts[] = {&opts->url,        &opts->name,      &opts->user,   &opts->password,
                            &opts->token,      &opts->nkey_file, &opts->tls_ca, &opts->tls_cert,
                            &opts->creds_file, &opts->tls_key};

    for (size_t i = 0; i < KV_COUNT(texts); i++)
        wipe(texts[i]);
}
