// SPDX-License-Identifier: Apache-2.0
/* The part of the tiers' benchmark that needs no disk: tier_copy.h. One JSON line per figure. */
#include "tier_copy.h"

int main(void)
{
    tier_copy_bench();
    return 0;
}
