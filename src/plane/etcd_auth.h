// SPDX-License-Identifier: Apache-2.0
/** Credentials for etcd, as the URLs of --discover, --dynamo and --lock give them behind a question mark. */
#ifndef KV_PLANE_ETCD_AUTH_H
#define KV_PLANE_ETCD_AUTH_H

#include "base/core/error.h"

#define KVP_ETCD_PASSWORD 1024 /* bytes of a password, and its end */

/** Texts point into the URL's; NULL: not given. */
struct kvp_etcd_auth {
    const char *user, *password_file, *ca, *cert, *key;
    char password[KVP_ETCD_PASSWORD]; /* filled by kvp_etcd_auth_open */
};

/**
 * Cut "?NAME=VALUE&..." off @url, and read it: user and password-file, ca, cert and key (PEM files). The
 * texts in @ret point into @url. Returns 0, or -EINVAL with @error.
 */
int kvp_etcd_auth_cut(char *url, struct kvp_etcd_auth *ret, struct kv_error *error);

/** Read the first line of the password's file, if one is given. Returns 0, or an errno with @error. */
int kvp_etcd_auth_open(struct kvp_etcd_auth *auth, struct kv_error *error);

/** Forget the password. */
void kvp_etcd_auth_fini(struct kvp_etcd_auth *auth);

#endif
