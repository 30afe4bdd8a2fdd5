// SPDX-License-Identifier: Apache-2.0
/** Parts of objects by HTTP ranges: get_ranges of kv_store_ext.h. */
#ifndef KV_PLUGINS_S3_RANGE_H
#define KV_PLUGINS_S3_RANGE_H

#include "kv_store_ext.h"

int s3_get_ranges(kv_store_v1 *self, kv_store_range *ranges, size_t n);

#endif
