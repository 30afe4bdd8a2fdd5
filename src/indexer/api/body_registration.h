// SPDX-License-Identifier: Apache-2.0
/** From a parsed body to a registration: POST /register, and the records of discovery. */
#ifndef KV_INDEXER_API_BODY_REGISTRATION_H
#define KV_INDEXER_API_BODY_REGISTRATION_H

#include "indexer/api/body.h"
#include "indexer/stream/worker.h"

/** Fields of a registration but for instance_id, endpoint, model_name and block_size. */
#define KI_REGISTRATION_OPTIONAL                                                          \
    (KI_TENANT_ID | KI_DP_RANK | KI_REPLAY_ENDPOINT | KI_NUM_BLOCKS | KI_HASH_LOOKAHEAD | \
     KI_EAGLE_DROP | KI_EAGLE_GROUPS | KI_GROUPS | KI_SILENT_WINDOWS | KI_REPORT_MODE)

/**
 * Check the fields of @body that describe a worker, and write its registration: texts point into @body,
 * the tenant is "default" unless the body has one. Returns 0 or -EINVAL with @error's text.
 */
int ki_body_registration(const struct ki_body *body, struct ki_registration *ret,
                         struct kv_error *error);

#endif
