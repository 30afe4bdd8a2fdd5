// SPDX-License-Identifier: Apache-2.0
#include "indexer/replica/peers.h"

#include <curl/curl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/core/error.h"

struct ki_peers {
    pthread_mutex_t lock;
    char *urls[KI_MAX_PEERS];
    size_t n;
};

int ki_peers_create(struct ki_peers **ret)
{
    struct ki_peers *p = calloc(1, sizeof(*p));

    if (!p)
        return -ENOMEM;
    pthread_mutex_init(&p->lock, NULL);
    *ret = p;
    return 0;
}

void ki_peers_destroy(struct ki_peers *peers)
{
    if (!peers)
        return;
    for (size_t i = 0; i < peers->n; i++)
        free(peers->urls[i]);
    pthread_mutex_destroy(&peers->lock);
    free(peers);
}

static size_t find(const struct ki_peers *peers, const char *url)
{
    size_t at = 0;

    while (at < peers->n && strcmp(peers->urls[at], url) != 0)
        at++;
    return at;
}

bool ki_peer_url_is_valid(const char *url)
{
    CURLU *parsed;
    bool valid;

    /* libcurl's parser guesses a missing scheme. */
    if (strncasecmp(url, "http://", 7) != 0 && strncasecmp(url, "https://", 8) != 0)
        return false;
    parsed = curl_url();
    valid = parsed && curl_url_set(parsed, CURLUPART_URL, url, 0) == CURLUE_OK;
    curl_url_cleanup(parsed);
    return valid;
}

int ki_peers_add(struct ki_peers *peers, const char *url)
{
    char *copy;
    int rc = 0;

    if (strlen(url) > KI_MAX_PEER_URL)
        return -EMSGSIZE;
    if (!ki_peer_url_is_valid(url))
        return -EINVAL;
    copy = strdup(url);
    if (!copy)
        return -ENOMEM;
    pthread_mutex_lock(&peers->lock);
    if (find(peers, url) == peers->n) {
        if (peers->n == KI_MAX_PEERS)
            rc = -ENOSPC;
        else
            peers->urls[peers->n++] = KV_STEAL(copy);
    }
    pthread_mutex_unlock(&peers->lock);
    free(copy);
    return rc;
}

int ki_peers_remove(struct ki_peers *peers, const char *url)
{
    int rc = -ENOENT;
    size_t at;

    pthread_mutex_lock(&peers->lock);
    at = find(peers, url);
    if (at < peers->n) {
        free(peers->urls[at]);
        memmove(peers->urls + at, peers->urls + at + 1, (peers->n - at - 1) * sizeof(*peers->urls));
        peers->n--;
        rc = 0;
    }
    pthread_mutex_unlock(&peers->lock);
    return rc;
}

char *ki_peer_url(const char *peer, const char *path)
{
    size_t len = strlen(peer), path_size = strlen(path) + 1;
    char *url;

    while (len && peer[len - 1] == '/')
        len--;
    url = malloc(len + path_size);
    if (url) {
        memcpy(url, peer, len);
        memcpy(url + len, path, path_size);
    }
    return url;
}

long ki_peers_list(struct ki_peers *peers, char ***ret)
{
    char **urls;
    size_t n = 0;

    pthread_mutex_lock(&peers->lock);
    urls = calloc(peers->n + 1, sizeof(*urls));
    while (urls && n < peers->n && (urls[n] = strdup(peers->urls[n])) != NULL)
        n++;
    if (urls && n < peers->n) {
        ki_peers_free(urls, (long)n);
        urls = NULL;
    }
    pthread_mutex_unlock(&peers->lock);
    if (!urls)
        return -ENOMEM;
    *ret = urls;
    return (long)n;
}

void ki_peers_free(char **urls, long n)
{
    for (long i = 0; i < n; i++)
        free(urls[i]);
    free(urls);
}
