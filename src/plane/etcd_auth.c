// SPDX-License-Identifier: Apache-2.0
#include "plane/etcd_auth.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <unistd.h>

#include "base/core/error.h"

/* Set the option that @text, NAME=VALUE, gives. Returns false for none of them. */
static bool set(struct kvp_etcd_auth *auth, char *text)
{
    const struct {
        const char *name;
        const char **ret;
    } options[] = {{"user=", &auth->user},
                   {"password-file=", &auth->password_file},
                   {"ca=", &auth->ca},
                   {"cert=", &auth->cert},
                   {"key=", &auth->key}};

    for (size_t i = 0; i < KV_COUNT(options); i++) {
        size_t len = strlen(options[i].name);

        if (strncmp(text, options[i].name, len) == 0 && text[len]) {
            *options[i].ret = text + len;
            return true;
        }
    }
    return false;
}

int kvp_etcd_auth_cut(char *url, struct kvp_etcd_auth *ret, struct kv_error *error)
{
    char *options = strchr(url, '?'), *save = NULL;

    *ret = (struct kvp_etcd_auth){.user = NULL};
    if (!options)
        return 0;
    *options++ = '\0';
    for (char *one = strtok_r(options, "&", &save); one; one = strtok_r(NULL, "&", &save))
        if (!set(ret, one))
            return kv_fail(error, -EINVAL, 0,
                           "'%.40s': expected user=NAME, password-file=FILE, ca=FILE, cert=FILE or "
                           "key=FILE",
                           one);
    if (!ret->user != !ret->password_file)
        return kv_fail(error, -EINVAL, 0, "user and password-file go together");
    if (!ret->cert != !ret->key)
        return kv_fail(error, -EINVAL, 0, "cert and key go together");
    return 0;
}

int kvp_etcd_auth_open(struct kvp_etcd_auth *auth, struct kv_error *error)
{
    ssize_t n;
    int fd, err;

    if (!auth->password_file)
        return 0;
    fd = open(auth->password_file, O_RDONLY | O_CLOEXEC);
    n = fd < 0 ? -1 : read(fd, auth->password, sizeof(auth->password) - 1);
    err = errno;
    if (fd >= 0)
        close(fd);
    if (n < 0)
        return kv_fail(error, -err, 0, "%.100s: %s", auth->password_file, strerror(err));
    auth->password[n] = '\0';
    auth->password[strcspn(auth->password, "\r\n")] = '\0';
    return 0;
}

void kvp_etcd_auth_fini(struct kvp_etcd_auth *auth)
{
    explicit_bzero(auth->password, sizeof(auth->password));
}
