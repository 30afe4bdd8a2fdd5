// SPDX-License-Identifier: Apache-2.0
/* A page of metrics as `kvasir top` reads it: samples lie in the page, labels fit their room. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "cli/client/prom.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_within(struct kv_str part, const char *page, size_t size)
{
    if (part.p < page || part.len > size || part.p + part.len > page + size)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const char *const names[] = {"model", "instance", "dp_rank", "x"};
    const char *page = (const char *)data;
    struct kc_sample sample;
    struct kc_prom prom;
    char value[8];

    kc_prom_init(&prom, page, size);
    while (kc_prom_next(&prom, &sample)) {
        if (sample.name.len == 0)
            abort();
        check_within(sample.name, page, size);
        check_within(sample.labels, page, size);
        for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++)
            if (kc_sample_label(&sample, names[i], value, sizeof(value)) &&
                !memchr(value, '\0', sizeof(value)))
                abort();
    }
    return 0;
}
