// SPDX-License-Identifier: Apache-2.0
/**
 * A worker's speed, learned from first tokens: tokens that it had to compute up to then, a second.
 *
 * The speed of a worker is the median of its last samples, so that a few first tokens that came late
 * or early change nothing. The fleet's is a median, too, that each sample moves by 2 % at most. A
 * worker within 25 % of the fleet counts as equal: the speed depends on what else it decodes.
 */
#ifndef KV_SELECT_SPEED_H
#define KV_SELECT_SPEED_H

#include <stdint.h>

#define KVSEL_SPEED_SAMPLES 15u
#define KVSEL_SPEED_ENOUGH 7u     /* samples before a speed counts */
#define KVSEL_SPEED_TOKENS 1024.0 /* fewer tokens measure latency, not speed */

struct kvsel_speed {
    double stated; /* 0: none */
    float samples[KVSEL_SPEED_SAMPLES];
    uint32_t n;     /* samples so far */
    double learned; /* median; 0: not enough samples */
};

/** Take a sample of @tokens in @seconds. Moves *@fleet. Returns 1 when it counted. */
int kvsel_speed_sample(struct kvsel_speed *speed, double tokens, double seconds, double *fleet);

/** Return what a token costs at this worker beside the fleet: 1, or 0.25 to 4. */
double kvsel_speed_factor(const struct kvsel_speed *speed, double fleet);

/** Return the stated or learned speed; 0: not known. */
double kvsel_speed_of(const struct kvsel_speed *speed);

#endif
