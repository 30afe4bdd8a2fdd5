// SPDX-License-Identifier: Apache-2.0
/* Linked into every unit test: hash tables look the same in every run, so that failures repeat. */
#include "base/core/mix.h"

struct kv_mix_secret drawn_secret; /* for tests/base/test_mix.c */

__attribute__((constructor)) static void fix_secret(void)
{
    drawn_secret = kv_mix_secret;
    kv_mix_secret =
        (struct kv_mix_secret){UINT64_C(0x1c6bf1e3b2a7d905), UINT64_C(0x8f5c28f1d6a39e47)};
}
