// SPDX-License-Identifier: Apache-2.0
/* Secrets: the token's file, certificates, and the library that can use them. */
#include "peer/session/auth.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/core/error.h"
#include "base/core/log.h"

/* ---- the library ---- */

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const struct kvbm_tls_abi *crypto; /* written once, before pthread_once returns */

static void load(void)
{
    static const struct kv_module module = {
        .component = "kvbm",
        .library = KVBM_TLS_LIBRARY,
        .variable = "KVBM_TLS_LIBRARY",
        .symbol = KVBM_TLS_SYMBOL,
        .missing = "tokens and TLS need " KVBM_TLS_LIBRARY,
        .head = {sizeof(*crypto), KVBM_TLS_ABI},
    };

    crypto = (const struct kvbm_tls_abi *)kv_module_open(&module);
}

const struct kvbm_tls_abi *kvbm_tls_get(void)
{
    pthread_once(&once, load);
    return crypto;
}

/* ---- the token ---- */

static int refuse_token(const char *path, int err, const char *why)
{
    char quoted[512];

    kv_log_error("kvbm", "a token file is refused", "file=%s why=\"%s\"",
                 kv_log_quote(quoted, sizeof(quoted), path), why);
    return err;
}

static int check_token(const char *path, const struct stat *st)
{
    if (!S_ISREG(st->st_mode))
        return refuse_token(path, -EINVAL, "not a regular file");
    if (st->st_mode & (S_IWGRP | S_IXGRP | S_IRWXO))
        return refuse_token(path, -EACCES, "other users may read or write it: chmod 600");
    if (st->st_uid != geteuid() && st->st_uid != 0)
        return refuse_token(path, -EACCES, "it belongs to another user");
    return 0;
}

/* Read up to a final newline, which editors add. */
static int read_token(struct kvbm_auth *auth, const char *path, int fd)
{
    ssize_t len;

    auth->token = malloc(KVBM_MAX_TOKEN + 2);
    if (!auth->token)
        return -ENOMEM;
    len = read(fd, auth->token, KVBM_MAX_TOKEN + 2);
    if (len < 0)
        return refuse_token(path, -errno, strerror(errno));
    if (len && auth->token[len - 1] == '\n')
        len--;
    auth->token_len = (size_t)len;
    if (len < KVBM_MIN_TOKEN || len > KVBM_MAX_TOKEN)
        return refuse_token(path, -EINVAL, "a token has 16 to 4096 bytes");
    return 0;
}

static int load_token(struct kvbm_auth *auth, const char *path)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK), err;
    struct stat st;

    if (fd < 0)
        return refuse_token(path, -errno, strerror(errno));
    err = fstat(fd, &st) < 0 ? -errno : check_token(path, &st);
    if (err == 0)
        err = read_token(auth, path, fd);
    close(fd);
    return err;
}

/* ---- all of it ---- */

static int load_certificates(struct kvbm_auth *auth, const struct kvbm_agent_opts *opts)
{
    const struct kvbm_tls_files files = {.cert = KV_OPT(opts, tls_cert, NULL),
                                         .key = KV_OPT(opts, tls_key, NULL),
                                         .ca = KV_OPT(opts, tls_ca, NULL)};
    char why[200] = "", quoted[400];
    int err;

    if (!files.cert || (!files.ca && !auth->token)) {
        kv_log_error("kvbm", "TLS needs tls_cert, and tls_ca or token_file", NULL);
        return -EINVAL;
    }
    err = auth->crypto->context_create(&files, &auth->tls, why, sizeof(why));
    if (err < 0)
        kv_log_error("kvbm", "certificates are refused", "cert=%s why=%s", files.cert,
                     kv_log_quote(quoted, sizeof(quoted), why));
    return err;
}

int kvbm_auth_init(struct kvbm_auth *auth, const struct kvbm_agent_opts *opts)
{
    const char *token = KV_OPT(opts, token_file, NULL);
    bool tls =
        KV_OPT(opts, tls_cert, NULL) || KV_OPT(opts, tls_key, NULL) || KV_OPT(opts, tls_ca, NULL);
    int err = 0;

    *auth = (struct kvbm_auth){0};
    if (!token && !tls)
        return 0;
    auth->crypto = kvbm_tls_get();
    if (!auth->crypto)
        return -ENOTSUP;
    if (token)
        err = load_token(auth, token);
    if (err == 0 && tls)
        err = load_certificates(auth, opts);
    return err; /* the agent's destructor frees what there is */
}

void kvbm_auth_fini(struct kvbm_auth *auth)
{
    if (auth->tls)
        auth->crypto->context_destroy(auth->tls);
    if (auth->token && auth->crypto)
        auth->crypto->wipe(auth->token, KVBM_MAX_TOKEN + 2);
    free(auth->token);
    *auth = (struct kvbm_auth){0};
}
