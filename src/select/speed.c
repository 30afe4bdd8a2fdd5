// SPDX-License-Identifier: Apache-2.0
#include "select/speed.h"

#include <stddef.h>

#include "base/core/error.h"

#define FLEET_STEP 1.02
#define EQUAL 1.25
#define EXTREME 4.0

static double median_of(const float *samples, uint32_t n)
{
    float sorted[KVSEL_SPEED_SAMPLES] = {0};

    for (uint32_t i = 0; i < n; i++) {
        uint32_t at = i;

        for (; at > 0 && sorted[at - 1] > samples[i]; at--)
            sorted[at] = sorted[at - 1];
        sorted[at] = samples[i];
    }
    return (double)sorted[n / 2];
}

int kvsel_speed_sample(struct kvsel_speed *speed, double tokens, double seconds, double *fleet)
{
    double sample;

    if (tokens < KVSEL_SPEED_TOKENS || !(seconds > 0))
        return 0;
    sample = tokens / seconds;
    speed->samples[speed->n++ % KVSEL_SPEED_SAMPLES] = (float)sample;
    if (speed->n >= 2 * KVSEL_SPEED_SAMPLES)
        speed->n -= KVSEL_SPEED_SAMPLES; /* keeps both its rest and that the samples are full */
    if (speed->n >= KVSEL_SPEED_ENOUGH)
        speed->learned = median_of(speed->samples, KV_MIN(speed->n, KVSEL_SPEED_SAMPLES));
    if (*fleet <= 0)
        *fleet = sample;
    else if (sample > *fleet)
        *fleet = KV_MIN(*fleet * FLEET_STEP, sample);
    else
        *fleet = KV_MAX(*fleet / FLEET_STEP, sample);
    return 1;
}

double kvsel_speed_of(const struct kvsel_speed *speed)
{
    return speed->stated > 0 ? speed->stated : speed->learned;
}

double kvsel_speed_factor(const struct kvsel_speed *speed, double fleet)
{
    double own = kvsel_speed_of(speed), factor;

    if (own <= 0 || fleet <= 0)
        return 1;
    factor = fleet / own;
    if (factor < EQUAL && factor > 1 / EQUAL)
        return 1;
    return KV_MIN(KV_MAX(factor, 1 / EXTREME), EXTREME);
}
