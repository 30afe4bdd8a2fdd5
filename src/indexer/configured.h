// SPDX-License-Identifier: Apache-2.0
/** Workers of the command line and the configuration file: registered at the start, and again. */
#ifndef KV_INDEXER_CONFIGURED_H
#define KV_INDEXER_CONFIGURED_H

#include "indexer/service.h"

/** Register the workers of service->options. Returns 0 or an error of the first that is refused. */
int ki_configured_register(struct ki_service *service, struct kv_error *error);

/**
 * Read environment and configuration file again, with the same command line. Workers that are new or
 * told otherwise are registered anew, those that are told no more are unregistered; what clients have
 * registered stays. The log level is taken over. The log names what has changed, and which options
 * need a restart. On an error nothing changes. Main thread.
 */
void ki_configured_reload(struct ki_service *service);

/**
 * Read what the options, or a section, say of all their workers. Returns 0 or -EINVAL with @error's text.
 */
int ki_configured_habits(const struct ki_options *options, struct ki_habits *ret,
                         struct kv_error *error);

/** Free what the last ki_configured_reload has read. */
void ki_configured_free(struct ki_service *service);

#endif
