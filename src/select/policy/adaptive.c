// SPDX-License-Identifier: Apache-2.0
#include "select/policy/adaptive.h"

static double weight_of(const struct kvsel_view *view)
{
    double max = view->params->max_own_weight, own = view->params->own_weight;
    double spare = (1 - view->busy) * view->missing;

    if (own > 0)
        return own;
    if (view->busy > (max - 1) * spare)
        return max;
    return spare > 0 ? 1 + view->busy / spare : 1;
}

void kvsel_adaptive(const struct kvsel_view *view, double *cost)
{
    const double *restrict waiting = view->waiting, *restrict uncovered = view->uncovered;
    const double *restrict context = view->context, *restrict factor = view->factor;
    double weight = weight_of(view), beta = view->params->context_weight;

    for (size_t i = 0; i < view->n; i++)
        cost[i] = factor[i] * (waiting[i] + weight * uncovered[i]) + beta * context[i];
    for (size_t i = 0; view->extra && i < view->n; i++)
        cost[i] += factor[i] * view->extra[i];
}
