// SPDX-License-Identifier: Apache-2.0
/* Replaces the copier's file executor, which needs more packages than a GPU machine has. */
#include <errno.h>

#include "tier/transfer/transfer.h"

int tier_file_open(struct kvbm_copier *copier, struct tier_file **ret)
{
    (void)copier, (void)ret;
    return -ENOTSUP;
}

void tier_file_close(struct tier_file *file)
{
    (void)file;
}
