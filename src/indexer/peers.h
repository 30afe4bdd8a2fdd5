// SPDX-License-Identifier: Apache-2.0
/**
 * The list of peer indexers, used for recovery at start. In order of registration, no duplicates,
 * bounded. Thread-safe.
 */
#ifndef KV_INDEXER_PEERS_H
#define KV_INDEXER_PEERS_H

#include <stddef.h>

#define KI_MAX_PEERS 1024
#define KI_MAX_PEER_URL 2048 /* bytes */

struct ki_peers;

int ki_peers_create(struct ki_peers **ret);
void ki_peers_destroy(struct ki_peers *peers);

/** Known already is fine. Returns 0, -ENOSPC, -EMSGSIZE (URL too long), -ENOMEM. */
int ki_peers_add(struct ki_peers *peers, const char *url);
/** Returns 0 or -ENOENT. */
int ki_peers_remove(struct ki_peers *peers, const char *url);

/** {peer}@path, whether or not the peer was given with a slash at its end; free it. NULL: no memory. */
char *ki_peer_url(const char *peer, const char *path);

/** A copy of the list; release with ki_peers_free. Returns the number of URLs or -ENOMEM. */
long ki_peers_list(struct ki_peers *peers, char ***ret);
void ki_peers_free(char **urls, long n);

#endif
