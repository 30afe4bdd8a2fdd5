// SPDX-License-Identifier: Apache-2.0
#include "plane/nats_args.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>

/* Read the first line of a file, without its end. */
static int read_secret(const char *path, char ret[KVP_NATS_SECRET + 1], struct kv_error *error)
{
    char line[KVP_NATS_SECRET + 2];
    FILE *file = fopen(path, "re");
    bool read;

    if (!file)
        return kv_fail(error, -errno, 0, "%.150s: %s", path, strerror(errno));
    read = fgets(line, sizeof(line), file) != NULL;
    fclose(file);
    if (read)
        line[strcspn(line, "\r\n")] = '\0';
    if (!read || !*line || strlen(line) > KVP_NATS_SECRET)
        return kv_fail(error, -EINVAL, 0, "%.150s: no secret of 1 to %d bytes in its first line",
                       path, KVP_NATS_SECRET);
    memcpy(ret, line, strlen(line) + 1);
    return 0;
}

int kvp_nats_args_read(const struct kvp_nats_args *args, struct kvp_nats_secrets *secrets,
                       struct kvp_nats_opts *ret, struct kv_error *error)
{
    int rc = 0;

    if (!args->user != !args->password_file)
        return kv_fail(error, -EINVAL, 0, "--nats-user and --nats-password-file go together");
    if (args->password_file)
        rc = read_secret(args->password_file, secrets->password, error);
    if (rc == 0 && args->token_file)
        rc = read_secret(args->token_file, secrets->token, error);
    if (rc < 0)
        return rc;
    ret->user = args->user;
    ret->password = args->password_file ? secrets->password : NULL;
    ret->token = args->token_file ? secrets->token : NULL;
    ret->nkey_file = args->nkey;
    ret->creds_file = args->creds;
    ret->tls_ca = args->ca;
    ret->tls_cert = args->cert;
    ret->tls_key = args->key;
    return 0;
}
