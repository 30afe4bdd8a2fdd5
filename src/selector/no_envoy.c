// SPDX-License-Identifier: Apache-2.0
/* --ext-proc of a build without libnghttp2 or protobuf-c. */
#include "selector/envoy.h"
#include "selector/options.h"

int ksel_envoy_check(const struct ksel_options *options, struct kv_error *error)
{
    if (!options->ext_proc)
        return 0;
    return kv_fail(error, -EINVAL, 0,
                   "--ext-proc: this kv-selector was built without libnghttp2 and protobuf-c");
}

int ksel_envoy_start(struct ksel *s, struct kv_error *error)
{
    (void)s, (void)error;
    return 0;
}

void ksel_envoy_end(struct ksel *s)
{
    (void)s;
}

void ksel_envoy_stop(struct ksel *s)
{
    (void)s;
}

void ksel_envoy_render(struct ksel *s, struct kv_buf *out)
{
    (void)s, (void)out;
}
