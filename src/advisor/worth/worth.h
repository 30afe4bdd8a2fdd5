// SPDX-License-Identifier: Apache-2.0
/**
 * The worth of room: prompt tokens that a cache saves, the GPU time to compute them, and money.
 *
 * With H(c) the hit rate of c bytes (curve.h), R the prompt tokens of an hour of traffic, and P the
 * tokens that a GPU computes in a second:
 *
 *     tokens saved an hour       H(c) R
 *     GPU seconds saved an hour  H(c) R / P
 *     saved a month              H(c) R / P / 3600 * 730 * price of a GPU hour
 *
 * Loading a block from a slow tier isn't free; it counts as free here. Caches are in LRU order, each a
 * part of the next one: a tier of b bytes behind others of a bytes has what is between a and a + b.
 */
#ifndef KV_ADVISOR_WORTH_H
#define KV_ADVISOR_WORTH_H

#include "advisor/worth/curve.h"

#define KVA_GIB 1073741824.0
#define KVA_MONTH_HOURS 730.0 /* a twelfth of a year */

struct kva_terms {
    double block_bytes, block_tokens; /* of one key of the curve */
    double hours;                     /* of traffic */
    double prefill;                   /* prompt tokens that a GPU computes in a second */
    double gpu_hour;                  /* price; 0: unknown */
};

/** Room of @bytes. Rates are those of an hour of traffic. */
struct kva_worth {
    double bytes;
    double hits; /* hit rate, 0 to 1 */
    double tokens, gpu_seconds;
    double
        next_gpu_seconds; /* that the next GiB would save, of the next 1 GiB or 2 % of the room */
    double month;         /* money saved in a month of such traffic */
};
void kva_worth_of(const struct kva_curve *curve, const struct kva_terms *terms, double bytes,
                  struct kva_worth *ret);

/** A tier of @bytes behind faster ones of @before; @price of a GiB in a month. */
struct kva_tier_worth {
    double bytes, before;
    struct kva_worth total;   /* of this tier and all before */
    double hits, gpu_seconds; /* of this tier alone */
    double cost, month;       /* a month: price of its bytes; what it alone saves */
    /* Bytes from 0 on that would save most beyond their price, if no tier were behind. */
    double best, best_gain;
};
void kva_worth_of_tier(const struct kva_curve *curve, const struct kva_terms *terms, double before,
                       double bytes, double price, struct kva_tier_worth *ret);

/** Bytes of a cache that finds all that any finds. */
double kva_worth_most(const struct kva_curve *curve, const struct kva_terms *terms);

/**
 * The knee of the curve: the room from which on each further byte brings less than the average one of
 * all, where H(c) is farthest above the straight line to its end.
 */
double kva_worth_knee(const struct kva_curve *curve, const struct kva_terms *terms);

#endif
