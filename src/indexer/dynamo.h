// SPDX-License-Identifier: Apache-2.0
/**
 * Follow the workers of a Dynamo deployment (--dynamo): a registration for each rank whose publisher is in
 * the deployment's discovery, made and removed as publishers appear and leave.
 */
#ifndef KV_INDEXER_DYNAMO_H
#define KV_INDEXER_DYNAMO_H

#include "indexer/service.h"

/** Followers of the options' deployments, one for each --dynamo. */
struct ki_dynamo;

/**
 * Start to follow. *@ret is NULL when no --dynamo is given. The registry must outlive it. Returns 0, or a
 * negative errno with @error.
 */
int ki_dynamo_start(const struct ki_options *options, struct ki_registry *registry,
                    struct ki_dynamo **ret, struct kv_error *error);

/** Stop following. Registrations stay. NULL is a no-op. */
void ki_dynamo_stop(struct ki_dynamo *dynamo);

#endif
