// SPDX-License-Identifier: Apache-2.0
/* The library's log hook. Each shared library has a copy of base, so each has a hook of its own. */
#include "kv_store.h"

#include "base/core/log.h"

void kvs_set_log(kv_log_fn fn, void *arg)
{
    kv_log_set_user(fn, arg);
}
