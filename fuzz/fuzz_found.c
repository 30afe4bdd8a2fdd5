// SPDX-License-Identifier: Apache-2.0
/* A file of workers for --discover. One that is refused says why; one that is read has whole workers. */
#include <stdint.h>
#include <stdlib.h>

#include "indexer/discover/found.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const struct ki_found base = {
        .registration = {.block_size = 16, .model = "llama", .tenant = "default"}};
    struct ki_found_set set = {0};
    struct kv_error why = {0};
    int rc = ki_found_read(&set, (struct kv_str){(const char *)data, size}, &base, &why);

    require(rc == 0 || (rc < 0 && why.text[0]));
    ki_found_sort(&set);
    for (size_t i = 0; i < set.n; i++) {
        const struct ki_registration *r = &set.items[i].registration;

        require(r->endpoint && r->model && r->tenant && r->block_size);
        require(i == 0 || ki_found_compare(&set.items[i - 1], &set.items[i]) < 0);
        require(ki_found_equal(&set.items[i], &set.items[i]));
    }
    ki_found_set_fini(&set);
    return 0;
}
