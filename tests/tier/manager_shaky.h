// SPDX-License-Identifier: Apache-2.0
/** For tests of a manager whose object store hangs, fails, is slow and lies (shaky.h). */
#ifndef KV_TEST_MANAGER_SHAKY_H
#define KV_TEST_MANAGER_SHAKY_H

#include <stdio.h>
#include <stdlib.h>

#include "base/clock.h"
#include "manager_world.h"
#include "tier/find_shaky.h"

#define EXPECT_SOON(condition)                            \
    do {                                                  \
        uint64_t until_ = kv_now_ns() + 20 * KV_NS_PER_S; \
        while (!(condition) && kv_now_ns() < until_)      \
            usleep(500);                                  \
        assert_true(condition);                           \
    } while (0)

/* A manager with a shaky store, which has nothing yet. */
static inline void shaky_start(struct world *w, uint32_t host_blocks)
{
    memset(shaky, 0, sizeof(*shaky));
    world_init(w, host_blocks);
    snprintf(w->object, sizeof(w->object), "shaky://%s/object", w->dir);
    w->opts.object = w->object;
    world_start(w);
    world_attach(w, false);
}

#endif
