// SPDX-License-Identifier: Apache-2.0
#include "select/policy/dynamo.h"

#include <math.h>

void kvsel_dynamo(const struct kvsel_view *view, double *cost)
{
    const struct kvsel_params *params = view->params;
    double all = ceil(view->tokens / view->block_size);
    double scale = params->prefill_scale / view->block_size;

    for (size_t i = 0; i < view->n; i++) {
        double lost = (1 - params->overlap_credit) * (view->tokens - view->uncovered[i]);
        double prefill = view->waiting[i] + view->uncovered[i] + lost + kvsel_of(view->extra, i);
        double decode = view->blocks[i] + all - kvsel_of(view->shared, i);

        cost[i] = scale * (prefill > 0 ? prefill : 0) + decode +
                  params->request_weight * view->requests[i];
    }
}
