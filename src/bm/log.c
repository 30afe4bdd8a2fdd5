// SPDX-License-Identifier: Apache-2.0
/* The library's log hook. Each shared library has a copy of base, so each has a hook of its own. */
#include "kvbm_tokens.h"

#include "base/core/log.h"
#include "kvx_ext.h"

void kvbm_set_log(kv_log_fn fn, void *arg)
{
    kv_log_set_user(fn, arg);
    kvx_set_log(fn, arg);
}
