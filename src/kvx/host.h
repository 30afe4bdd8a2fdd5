// SPDX-License-Identifier: Apache-2.0
/** host.h: executes a plan whose memory is all HOST; returns when everything is done. */
#ifndef KVX_HOST_H
#define KVX_HOST_H

#include "kvx/plan.h"

void kvx_host_run(const struct kvx_plan *plan);

#endif
