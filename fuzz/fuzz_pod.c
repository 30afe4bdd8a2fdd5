// SPDX-License-Identifier: Apache-2.0
/* A pod of the Kubernetes API, and the workers that it is. */
#include <stdint.h>
#include <stdlib.h>

#include "indexer/discover/pod.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const struct ki_pod_rules rules = {"kv-events", "kv-replay", true};
    const struct ki_found base = {
        .registration = {.block_size = 16, .model = "llama", .tenant = "default"}};
    struct ki_found_set set = {0};
    struct ki_body body = {0};
    struct kv_error why = {0};
    struct ki_pod pod = {0};
    struct kv_json json;
    int rc;

    kv_json_init(&json, data, size);
    ki_pod_read(&pod, &json);
    if (kv_json_finish(&json) == 0) {
        (void)ki_pod_absence(&pod);
        rc = ki_pod_workers(&pod, &rules, &base, &body, &set, &why);
        require(rc == 0 || why.text[0]);
        require(rc < 0 || (set.n >= 1 && set.n <= KI_POD_RANKS));
        ki_found_sort(&set);
    }
    ki_found_set_fini(&set);
    ki_body_fini(&body);
    ki_pod_fini(&pod);
    return 0;
}
