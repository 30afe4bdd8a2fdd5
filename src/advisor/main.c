// SPDX-License-Identifier: Apache-2.0
/* kv-advisor: move the blobs of a tiered store to where their use says. */
#include <stdio.h>
#include <string.h>

#include "advisor/service.h"
#include "base/core/log.h"

int main(int argc, char **argv)
{
    struct kva_options options;
    struct kv_error error = {0};
    int rc = kva_options_parse(argc, argv, &options, &error);

    if (rc > 0)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "kv-advisor: %s\nTry kv-advisor --help.\n", error.text);
        return 2;
    }
    kv_log_set_level((enum kv_log_level)kv_log_parse_level(options.log_level));
    kv_log_set_format(strcmp(options.log_format, "json") == 0 ? KV_LOG_JSON : KV_LOG_LOGFMT);
    rc = kva_service_run(&options, &error);
    if (rc < 0)
        fprintf(stderr, "kv-advisor: %s\n", error.text);
    return rc < 0;
}
