// SPDX-License-Identifier: Apache-2.0
/** For tests of a manager whose object store hangs, fails, is slow and lies (shaky.h). */
#ifndef KV_TEST_MANAGER_SHAKY_H
#define KV_TEST_MANAGER_SHAKY_H

#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "manager_world.h"
#include "tier/find_shaky.h"

#define EXPECT_SOON(condition)                                             \
    do {                                                                   \
        uint64_t until_ = kv_now_ns() + 60 * KV_NS_PER_S;                  \
        bool holds_;                                                       \
        while (!(holds_ = (condition)) && kv_now_ns() < until_) /* once */ \
            usleep(500);                                                   \
        assert_true(holds_);                                               \
    } while (0)

/* A manager with a shaky store, which has nothing yet. */
static inline void shaky_start(struct world *w, uint32_t host_blocks)
{
    memset(shaky, 0, sizeof(*shaky));
    world_init(w, host_blocks);
    snprintf(w->object, sizeof(w->object), "shaky://%s/object", w->dir);
    w->opts.object = w->object;
    w->opts.object_timeout_ms = 100000; /* so that nothing that ends earlier waited for it */
    world_start(w);
    world_attach(w, false);
}

#endif
