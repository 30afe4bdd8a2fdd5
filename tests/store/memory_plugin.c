// SPDX-License-Identifier: Apache-2.0
/* memory://NAME keeps all in this process: the contract, but for what another process sees. */
#include "store/memory_backend.h"

const kv_store_vtable *kv_store_get_vtable(void)
{
    return memory_vtable();
}

const kv_store_ext *kv_store_get_ext(void)
{
    return memory_ext();
}
