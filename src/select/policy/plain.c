// SPDX-License-Identifier: Apache-2.0
#include "select/policy/plain.h"

#include <string.h>

/* A second criterion must not outweigh one token of the first: this many requests are one token. */
#define REQUESTS_A_TOKEN 1048576.0

void kvsel_least(const struct kvsel_view *view, double *cost)
{
    if (view->n) /* else both may be NULL */
        memcpy(cost, view->requests, view->n * sizeof(*cost));
}

void kvsel_round_robin(const struct kvsel_view *view, double *cost)
{
    size_t turn = view->n ? (size_t)(view->turn % view->n) : 0;

    for (size_t i = 0; i < view->n; i++)
        cost[i] = (double)(i >= turn ? i - turn : i + view->n - turn);
}

void kvsel_prefix(const struct kvsel_view *view, double *cost)
{
    for (size_t i = 0; i < view->n; i++)
        cost[i] = view->requests[i] / REQUESTS_A_TOKEN - kvsel_of(view->held, i);
}

void kvsel_cache_aware(const struct kvsel_view *view, double *cost)
{
    const struct kvsel_params *params = view->params;
    double least = -1, most = 0, longest = 0;

    for (size_t i = 0; i < view->n; i++) {
        double requests = view->requests[i], held = kvsel_of(view->held, i);

        if (view->reason[i] != KVSEL_FITS)
            continue;
        least = least < 0 || requests < least ? requests : least;
        most = requests > most ? requests : most;
        longest = held > longest ? held : longest;
    }
    if (most - least > params->balance_absolute && most > params->balance_relative * least) {
        kvsel_least(view, cost);
    } else if (longest > params->match_threshold * view->tokens) {
        kvsel_prefix(view, cost);
    } else {
        for (size_t i = 0; i < view->n; i++)
            cost[i] = view->context[i] + view->requests[i] / REQUESTS_A_TOKEN;
    }
}
