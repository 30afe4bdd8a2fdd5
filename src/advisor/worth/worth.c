// SPDX-License-Identifier: Apache-2.0
#include "advisor/worth/worth.h"

#include <math.h>

#include "base/core/error.h"

#define SIZES 400 /* that are tried for the best one, and for the knee */

static double hits_of(const struct kva_curve *curve, const struct kva_terms *terms, double bytes)
{
    return kva_curve_hits(curve, floor(bytes / terms->block_bytes));
}

/* Of a hit rate: tokens an hour, and GPU seconds. */
static double tokens_of(const struct kva_curve *curve, const struct kva_terms *terms, double hits)
{
    struct kva_curve_info info;

    kva_curve_get(curve, &info);
    return hits * (double)info.references * terms->block_tokens / terms->hours;
}

static double month_of(const struct kva_terms *terms, double gpu_seconds)
{
    return gpu_seconds / 3600 * KVA_MONTH_HOURS * terms->gpu_hour;
}

void kva_worth_of(const struct kva_curve *curve, const struct kva_terms *terms, double bytes,
                  struct kva_worth *ret)
{
    double step = KV_MAX(KV_MAX(KVA_GIB, bytes / 50), terms->block_bytes), more;

    *ret = (struct kva_worth){.bytes = bytes, .hits = hits_of(curve, terms, bytes)};
    ret->tokens = tokens_of(curve, terms, ret->hits);
    ret->gpu_seconds = ret->tokens / terms->prefill;
    more = hits_of(curve, terms, bytes + step) - ret->hits;
    ret->next_gpu_seconds = tokens_of(curve, terms, more) / terms->prefill / (step / KVA_GIB);
    ret->month = month_of(terms, ret->gpu_seconds);
}

double kva_worth_most(const struct kva_curve *curve, const struct kva_terms *terms)
{
    struct kva_curve_info info;

    kva_curve_get(curve, &info);
    return info.most * terms->block_bytes;
}

void kva_worth_of_tier(const struct kva_curve *curve, const struct kva_terms *terms, double before,
                       double bytes, double price, struct kva_tier_worth *ret)
{
    double most = KV_MAX(kva_worth_most(curve, terms) - before, 0.0);
    struct kva_worth faster;

    kva_worth_of(curve, terms, before, &faster);
    *ret =
        (struct kva_tier_worth){.bytes = bytes, .before = before, .cost = bytes / KVA_GIB * price};
    kva_worth_of(curve, terms, before + bytes, &ret->total);
    ret->hits = ret->total.hits - faster.hits;
    ret->gpu_seconds = ret->total.gpu_seconds - faster.gpu_seconds;
    ret->month = ret->total.month - faster.month;
    for (int i = 1; i <= SIZES; i++) {
        double size = most * i / SIZES, hits = hits_of(curve, terms, before + size) - faster.hits,
               gain = month_of(terms, tokens_of(curve, terms, hits) / terms->prefill) -
                      size / KVA_GIB * price;

        if (gain > ret->best_gain) {
            ret->best = size;
            ret->best_gain = gain;
        }
    }
}

double kva_worth_knee(const struct kva_curve *curve, const struct kva_terms *terms)
{
    double most = kva_worth_most(curve, terms), all = hits_of(curve, terms, most), knee = 0,
           farthest = 0;

    for (int i = 1; i < SIZES && all > 0; i++) {
        double size = most * i / SIZES, above = hits_of(curve, terms, size) / all - size / most;

        if (above > farthest) {
            farthest = above;
            knee = size;
        }
    }
    return knee;
}
