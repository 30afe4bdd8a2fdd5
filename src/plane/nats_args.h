// SPDX-License-Identifier: Apache-2.0
/** Options of command lines for a connection to NATS: rows of their tables, and what becomes of them. */
#ifndef KV_PLANE_NATS_ARGS_H
#define KV_PLANE_NATS_ARGS_H

#include "base/args/args.h"
#include "kv_plane.h"

/** Values of the options; NULL: not given. */
struct kvp_nats_args {
    const char *user, *password_file, *token_file, *nkey, *creds, *ca, *cert, *key;
};

#define KVP_NATS_ROW_(type_, member, field, name_, value_, help_)                  \
    {                                                                              \
        .name = "nats-" name_, .type = KV_ARG_STR,                                 \
        .offset = offsetof(type_, member) + offsetof(struct kvp_nats_args, field), \
        .value = (value_), .help = (help_)                                         \
    }
/** Rows for a table whose values are a @type with a struct kvp_nats_args @member. */
#define KVP_NATS_ARGS(type, member)                                                               \
    KVP_NATS_ROW_(type, member, user, "user", "NAME", "NATS: user. Needs --nats-password-file."), \
        KVP_NATS_ROW_(type, member, password_file, "password-file", "FILE",                       \
                      "NATS: file whose first line is the user's password."),                     \
        KVP_NATS_ROW_(type, member, token_file, "token-file", "FILE",                             \
                      "NATS: file whose first line is a token."),                                 \
        KVP_NATS_ROW_(type, member, nkey, "nkey", "FILE",                                         \
                      "NATS: file with the seed of a user's nkey."),                              \
        KVP_NATS_ROW_(type, member, creds, "creds", "FILE",                                       \
                      "NATS: file with a user's JWT and seed, as nsc writes it."),                \
        KVP_NATS_ROW_(type, member, ca, "ca", "FILE",                                             \
                      "NATS: demand TLS, and trust the server by the PEM authorities in FILE."),  \
        KVP_NATS_ROW_(type, member, cert, "cert", "FILE",                                         \
                      "NATS: certificate of this program (PEM), for servers that ask for one."),  \
        KVP_NATS_ROW_(type, member, key, "key", "FILE", "NATS: its key.")

/** Longest password or token, in bytes. */
#define KVP_NATS_SECRET 4096

/** Secrets that were read from files, which @opts point to. */
struct kvp_nats_secrets {
    char password[KVP_NATS_SECRET + 1], token[KVP_NATS_SECRET + 1];
};

/**
 * Set @ret's credentials. Reads the files of a password and a token; the others are read at each
 * connection. Returns 0, or an errno with @error: a file that can't be read, or with an empty or too
 * long first line.
 */
int kvp_nats_args_read(const struct kvp_nats_args *args, struct kvp_nats_secrets *secrets,
                       struct kvp_nats_opts *ret, struct kv_error *error);

#endif
