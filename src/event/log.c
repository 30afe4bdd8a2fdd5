// SPDX-License-Identifier: Apache-2.0
/* The library's log hook. Each shared library has its own copy of base, hence its own hook. */
#include "kv_event.h"

#include "base/core/log.h"

void kve_set_log(kv_log_fn fn, void *arg)
{
    kv_log_set_user(fn, arg);
}
