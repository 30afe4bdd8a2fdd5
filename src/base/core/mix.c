// SPDX-License-Identifier: Apache-2.0
#include "base/core/mix.h"

#include <sys/random.h>

struct kv_mix_secret kv_mix_secret;

uint64_t kv_secret(void)
{
    uint64_t secret;

    if (getrandom(&secret, sizeof(secret), GRND_NONBLOCK) != sizeof(secret))
        secret = UINT64_C(0x9e3779b97f4a7c15);
    return secret | 1;
}

/*
 * At load and not at first use: kv_mix then needs no check, and no thread can run yet. 101 is the
 * first of all constructors.
 */
__attribute__((constructor(101))) static void draw_secret(void)
{
    kv_mix_secret = (struct kv_mix_secret){.flip = kv_secret(), .factor = kv_secret()};
}
