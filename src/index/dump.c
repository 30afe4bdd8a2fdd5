// SPDX-License-Identifier: Apache-2.0
#include "index/tree.h"
int kvi_dump(struct kvi_index *index, kvi_dump_fn fn, void *arg)
{
    (void)index;
    (void)fn;
    (void)arg;
    return -ENOSYS;
}
