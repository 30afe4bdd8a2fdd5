// SPDX-License-Identifier: Apache-2.0
/** host.h: execute a plan whose memory is all HOST. Returns when all rows have moved. */
#ifndef KVX_HOST_H
#define KVX_HOST_H

#include "kvx/plan.h"

void kvx_host_run(const struct kvx_plan *plan);

#endif
