// SPDX-License-Identifier: Apache-2.0
#include "http/args.h"

#include <errno.h>

int kh_args_check(const char *tls_cert, const char *tls_key, bool insecure,
                  const char *auth_token_file, const char *trace_id_header, struct kv_error *error)
{
    if (!tls_cert != !tls_key)
        return kv_fail(error, -EINVAL, 0, "--tls-cert and --tls-key go together");
    if (insecure && auth_token_file)
        return kv_fail(error, -EINVAL, 0,
                       "--insecure and --auth-token-file exclude each other: choose one");
    if (!*trace_id_header)
        return kv_fail(error, -EINVAL, 0, "--trace-id-header must not be empty");
    return 0;
}
