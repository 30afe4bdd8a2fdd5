// SPDX-License-Identifier: Apache-2.0
/* kv-indexer: follow KV cache events and answer which worker holds a prompt's prefix. */
#include <stdio.h>

#include "base/core/log.h"
#include "indexer/service.h"

int main(int argc, char **argv)
{
    struct ki_options options;
    struct kv_error error = {0};
    int rc = ki_options_parse(argc, argv, &options, &error);

    if (rc > 0)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "kv-indexer: %s\nTry kv-indexer --help.\n", error.text);
        return 2;
    }
    kv_log_set_level((enum kv_log_level)kv_log_parse_level(options.log_level));
    kv_log_set_format(strcmp(options.log_format, "json") == 0 ? KV_LOG_JSON : KV_LOG_LOGFMT);
    rc = ki_service_run(&options, NULL, &error);
    ki_options_fini(&options);
    if (rc < 0) {
        fprintf(stderr, "kv-indexer: %s\n", error.text);
        return 1;
    }
    return 0;
}
