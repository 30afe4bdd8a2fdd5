// SPDX-License-Identifier: Apache-2.0
/** Pods of the Kubernetes API (v1.Pod): what discovery reads of them, and the workers that they are. */
#ifndef KV_INDEXER_DISCOVER_POD_H
#define KV_INDEXER_DISCOVER_POD_H

#include "indexer/discover/found.h"

#define KI_POD_PORTS 64     /* named container ports that are looked at */
#define KI_POD_RANKS 1024   /* most ranks of a pod */
#define KI_POD_WORKER 65536 /* bytes of the annotation kvasir/worker */

struct ki_pod_port {
    char name[16]; /* at most 15 characters, by the API */
    uint32_t number;
};

/** Fields of a pod; also of the objects of bookmarks and errors. Thread-confined. */
struct ki_pod {
    char name[254], space[64], uid[64];
    char version[64]; /* resourceVersion */
    char ip[64], phase[16];
    bool deleting, ready;
    struct ki_pod_port ports[KI_POD_PORTS];
    size_t n_ports;
    char event_port[16], replay_port[16], dp_rank[16], dp_size[16]; /* annotations kvasir/...; "" */
    struct kv_buf worker;                                           /* kvasir/worker */
    uint32_t code;                                                  /* of a Status */
    char message[128];
    struct kv_buf scratch;
};
void ki_pod_fini(struct ki_pod *pod);

/** Read the object at which @json is. Errors stick to @json. What the object lacks is empty. */
void ki_pod_read(struct ki_pod *pod, struct kv_json *json);

/** Return NULL when requests may go to the pod, or a phrase why not. */
const char *ki_pod_absence(const struct ki_pod *pod);

struct ki_pod_rules {
    const char *event_port, *replay_port; /* names or numbers of ports without an annotation */
    bool qualified;                       /* instances are called NAMESPACE/NAME */
};

/**
 * Add the pod's ranks to @set; @base has what it doesn't say. Returns 0, or a negative errno with
 * @error's text.
 */
int ki_pod_workers(const struct ki_pod *pod, const struct ki_pod_rules *rules,
                   const struct ki_found *base, struct ki_body *body, struct ki_found_set *set,
                   struct kv_error *error);

#endif
