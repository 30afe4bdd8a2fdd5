// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/net/endpoint.h"
#include "plane/etcd.h"

#define PLAIN "etcd://"
#define TLS "etcds://"

bool kvp_etcd_url_is(const char *url)
{
    return strncmp(url, PLAIN, strlen(PLAIN)) == 0 || strncmp(url, TLS, strlen(TLS)) == 0;
}

void kvp_etcd_url_fini(struct kvp_etcd_url *url)
{
    for (size_t i = 0; i < url->n_hosts; i++)
        free(url->hosts[i]);
    url->n_hosts = 0;
}

static int refuse(const char **why, const char *text)
{
    *why = text;
    return -EINVAL;
}

static int add_host(struct kvp_etcd_url *url, bool tls, const char *text, size_t len,
                    const char **why)
{
    struct kv_endpoint endpoint;
    char uri[300], host[320];

    if (url->n_hosts == ETCD_MAX_HOSTS)
        return refuse(why, "more than 8 servers");
    if (snprintf(uri, sizeof(uri), "tcp://%.*s", (int)len, text) >= (int)sizeof(uri))
        return refuse(why, "a server's name is too long");
    if (kv_endpoint_parse(uri, &endpoint, why) < 0)
        return -EINVAL;
    if (endpoint.wildcard || endpoint.any_port)
        return refuse(why, "nobody can connect to a server's address");
    snprintf(host, sizeof(host), "%s%s", tls ? "https" : "http", uri + strlen("tcp"));
    url->hosts[url->n_hosts] = strdup(host);
    if (!url->hosts[url->n_hosts])
        return -ENOMEM;
    url->n_hosts++;
    return 0;
}

int kvp_etcd_url_parse(const char *text, struct kvp_etcd_url *ret, const char **why)
{
    bool tls = strncmp(text, TLS, strlen(TLS)) == 0;
    const char *p = text + (tls ? strlen(TLS) : strlen(PLAIN)), *end;
    int err = 0;

    *ret = (struct kvp_etcd_url){.n_hosts = 0};
    if (!kvp_etcd_url_is(text))
        return refuse(why, "not etcd://HOST:PORT");
    end = p + strcspn(p, "/");
    ret->path = end;
    while (err == 0 && p <= end) {
        size_t n = strcspn(p, ",/");

        err = add_host(ret, tls, p, n, why);
        p += n + 1;
    }
    return err;
}
