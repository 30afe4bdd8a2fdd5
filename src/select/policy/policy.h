// SPDX-License-Identifier: Apache-2.0
/**
 * The one interface of all policies: a function that gives each worker a cost for a request.
 *
 * The least cost wins; ties are drawn. A policy sees workers as columns, one element a slot, so that
 * its loop is a few vector instructions a worker. Slots that are left out have costs, too; nobody
 * reads these. Loads are sums of whole tokens in doubles, hence exact.
 */
#ifndef KV_SELECT_POLICY_H
#define KV_SELECT_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_select.h"

/** Input of a policy. Columns have n elements; NULL: all zero. */
struct kvsel_view {
    size_t n;
    double tokens;                     /* of the prompt */
    double block_size;                 /* tokens */
    double busy;                       /* share of workers with waiting tokens, smoothed: 0 to 1 */
    double missing;                    /* share of prompts' tokens to compute, smoothed: 0 to 1 */
    uint64_t turn;                     /* slot behind the one chosen last */
    const struct kvsel_params *params; /* every number final: defaults in, negatives 0 */
    /* For the request: */
    const double *uncovered; /* tokens to compute, loads from tiers weighed */
    const double *held;      /* tokens held or predicted, any tier */
    const double *shared; /* blocks of the prompt that running requests have, too; policy.shared */
    const double *extra;  /* tokens charged for an adapter, labels, a domain */
    const double *lora;   /* 1: adapter loaded or none asked for, .8: room for it, 0 */
    /* Of the workers: */
    const double *waiting;  /* tokens to compute of requests without a first token */
    const double *context;  /* tokens of running requests */
    const double *requests; /* running */
    const double *queued;   /* of them: without a first token */
    const double *blocks;   /* distinct ones of running requests */
    const double *capacity; /* tokens of the cache; 0: unknown */
    const double *factor;   /* cost of a token to compute beside other workers' */
    const uint8_t *reason;  /* enum kvsel_reason: KVSEL_FITS are weighed */
};

/** Write each slot's cost to @cost. */
typedef void (*kvsel_cost_fn)(const struct kvsel_view *view, double *cost);

struct kvsel_policy {
    const char *name;
    kvsel_cost_fn cost;
    bool shared; /* needs view.shared */
};

/** Return the policy named @name, or NULL. */
const struct kvsel_policy *kvsel_policy_find(const char *name);

/** Return element @i of a column. */
static inline double kvsel_of(const double *column, size_t i)
{
    return column ? column[i] : 0;
}

#endif
