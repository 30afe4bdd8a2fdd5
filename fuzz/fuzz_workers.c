// SPDX-License-Identifier: Apache-2.0
/* Lists of the command line: --workers and --peers. An accepted list reads the same when written
 * again. */
#include <inttypes.h>

#include "base/args/instance.h"
#include "base/core/buf.h"
#include "indexer/options.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void require(bool ok)
{
    if (!ok)
        abort();
}

static void workers(const char *text)
{
    struct ki_worker_spec *specs, *again;
    struct kv_buf out = KV_BUF_INIT;
    struct kv_error error = {0};
    char digits[KV_INSTANCE_DIGITS];
    long n = ki_worker_specs_parse(&(struct kv_arg_list){{text}, 1}, &specs, &error);

    if (n < 0) {
        require(n == -EINVAL && error.text[0]);
        return;
    }
    for (long i = 0; i < n; i++)
        kv_buf_printf(&out, "%s%s:%" PRIu32 "=%s%s%s", i ? "," : "",
                      kv_instance_text(specs[i].instance, specs[i].name, digits), specs[i].rank,
                      specs[i].endpoint, specs[i].replay_endpoint ? "+" : "",
                      specs[i].replay_endpoint ? specs[i].replay_endpoint : "");
    require(ki_worker_specs_parse(&(struct kv_arg_list){{kv_buf_cstr(&out)}, 1}, &again, &error) ==
            n);
    for (long i = 0; i < n; i++) {
        require(specs[i].instance == again[i].instance && specs[i].rank == again[i].rank);
        require(!specs[i].name == !again[i].name);
        require(!specs[i].name || strcmp(specs[i].name, again[i].name) == 0);
        require(strcmp(specs[i].endpoint, again[i].endpoint) == 0);
    }
    ki_worker_specs_free(specs, n);
    ki_worker_specs_free(again, n);
    kv_buf_fini(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    char *text = strndup((const char *)data, size);
    struct kv_error error = {0};
    char **urls;
    long n;

    require(text != NULL);
    workers(text);
    n = ki_urls_parse(&(struct kv_arg_list){{text}, 1}, &urls, &error);
    if (n >= 0)
        ki_urls_free(urls, n);
    free(text);
    return 0;
}
