// SPDX-License-Identifier: Apache-2.0
/* Trace lines, one after another into one trace, as from a file; then the trace's statistics. */
#include <stdlib.h>
#include <string.h>

#include "cli/replay/trace.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const char *p = (const char *)data, *end = p + size;
    struct kc_trace trace = {0};
    struct kc_trace_stats stats;
    struct kv_error error;

    while (p < end) {
        const char *newline = memchr(p, '\n', (size_t)(end - p));
        size_t len = (size_t)((newline ? newline : end) - p), before = trace.n_requests;

        if (kc_trace_parse_line(&trace, p, len, &error) < 0 && trace.n_requests != before)
            abort();
        p += len + 1;
    }
    if (kc_trace_measure(&trace, &stats) == 0 && (stats.distinct > stats.ids || stats.reuse > 1))
        abort();
    kc_trace_fini(&trace);
    return 0;
}
