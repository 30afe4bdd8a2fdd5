// SPDX-License-Identifier: Apache-2.0
#include "select/policy/scored.h"

#include <math.h>

void kvsel_scored(const struct kvsel_view *view, double *cost)
{
    const struct kvsel_params *params = view->params;
    double blocks = ceil(view->tokens / view->block_size), least = INFINITY, most = 0;

    for (size_t i = 0; i < view->n; i++) {
        if (view->reason[i] != KVSEL_FITS)
            continue;
        least = fmin(least, view->queued[i]);
        most = fmax(most, view->queued[i]);
    }
    for (size_t i = 0; i < view->n; i++) {
        double held = floor(kvsel_of(view->held, i) / view->block_size);
        double capacity = view->capacity[i];
        double prefix = blocks > 0 ? held / blocks : 0;
        double queue = most > least ? (most - view->queued[i]) / (most - least) : 1;
        double use = capacity > 0 ? fmin(1, view->context[i] / capacity) : 0;

        cost[i] = -(params->prefix_weight * prefix + params->queue_weight * queue +
                    params->use_weight * (1 - use) + params->lora_weight * kvsel_of(view->lora, i));
    }
}
