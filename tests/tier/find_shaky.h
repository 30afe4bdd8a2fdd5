// SPDX-License-Identifier: Apache-2.0
/** Where tests find the controls of shaky_plugin.c (shaky.h). */
#ifndef KV_TEST_FIND_SHAKY_H
#define KV_TEST_FIND_SHAKY_H

#include "tier/shaky.h"

extern struct shaky *shaky;

/** Let stores find the plugin, load it and set `shaky`. Ends the program if there is none. */
void find_shaky(void);

#endif
