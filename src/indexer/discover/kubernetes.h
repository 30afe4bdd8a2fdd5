// SPDX-License-Identifier: Apache-2.0
/**
 * Text of a source of pods, behind "kubernetes:":
 *
 *     [NAMESPACE]/SELECTOR[?server=URL][&account=FOLDER][&port=PORT][&replay-port=PORT]
 */
#ifndef KV_INDEXER_DISCOVER_KUBERNETES_H
#define KV_INDEXER_DISCOVER_KUBERNETES_H

#include "indexer/discover/pod.h"

struct ki_kube_place {
    char *text;           /* owned; the others point into it, or are constants */
    const char *space;    /* "": the account's; "*": all */
    const char *selector; /* of labels; "": every pod */
    const char *server;   /* NULL: the cluster's */
    const char *account;  /* folder of the token, authorities and namespace */
    const char *event_port, *replay_port;
};

/** Read. Returns 0, -EINVAL or -ENOMEM with @error's text. Free by ki_kube_place_fini. */
int ki_kube_place_read(const char *where, struct ki_kube_place *ret, struct kv_error *error);
void ki_kube_place_fini(struct ki_kube_place *place);

#endif
