// SPDX-License-Identifier: Apache-2.0
/**
 * The list of peer indexers for recovery at start: in order of registration, without duplicates,
 * bounded. Thread-safe.
 */
#ifndef KV_INDEXER_REPLICA_PEERS_H
#define KV_INDEXER_REPLICA_PEERS_H

#include <stdbool.h>
#include <stddef.h>

#define KI_MAX_PEERS 1024
#define KI_MAX_PEER_URL 2048 /* bytes */

struct ki_peers;

int ki_peers_create(struct ki_peers **ret);
void ki_peers_destroy(struct ki_peers *peers);

/** The form of a peer's URL, for error messages. */
#define KI_PEER_URL_FORM "http://HOST:PORT or https://HOST:PORT"

/** Return true when @url is one that libcurl can ask: http or https, with a host. */
bool ki_peer_url_is_valid(const char *url);

/**
 * Add a URL, unless it is known. Returns 0, -EINVAL (ki_peer_url_is_valid), -ENOSPC, -EMSGSIZE (URL
 * too long), -ENOMEM.
 */
int ki_peers_add(struct ki_peers *peers, const char *url);
/** Remove a URL. Returns 0 or -ENOENT. */
int ki_peers_remove(struct ki_peers *peers, const char *url);

/**
 * Return {peer}@path, whether or not the peer ends with a slash; the caller frees it. NULL: out of
 * memory.
 */
char *ki_peer_url(const char *peer, const char *path);

/** Copy the list; release with ki_peers_free. Returns the number of URLs or -ENOMEM. */
long ki_peers_list(struct ki_peers *peers, char ***ret);
void ki_peers_free(char **urls, long n);

#endif
