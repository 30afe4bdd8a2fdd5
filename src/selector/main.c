// SPDX-License-Identifier: Apache-2.0
/* kv-selector: choose the worker for each prompt, and book it. */
#include <stdio.h>

#include "base/core/log.h"
#include "selector/selector.h"

int main(int argc, char **argv)
{
    struct ksel_options options;
    const struct ki_options *o = &options.indexer;
    struct kv_error error = {0};
    int rc = ki_options_parse_as(&ksel_program, argc, argv, &options.indexer, &error);

    if (rc > 0)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "kv-selector: %s\nTry kv-selector --help.\n", error.text);
        return 2;
    }
    kv_log_set_level((enum kv_log_level)kv_log_parse_level(o->log_level));
    kv_log_set_format(strcmp(o->log_format, "json") == 0 ? KV_LOG_JSON : KV_LOG_LOGFMT);
    rc = ki_service_run(o, &ksel_addition, &error);
    ki_options_fini(&options.indexer);
    if (rc < 0) {
        fprintf(stderr, "kv-selector: %s\n", error.text);
        return 1;
    }
    return 0;
}
