// SPDX-License-Identifier: Apache-2.0
#include "kvx/isa.h"

bool kvx_isa_avx2(struct kvx_isa *isa)
{
    (void)isa;
    return false;
}
