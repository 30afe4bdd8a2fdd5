// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/replay/replay.h"
#include "cli/show/bar.h"
#include "cli/show/format.h"

/* Return the fraction of the run that is done, by requests or by time, whichever is further. */
static double fraction(const struct kc_replay *replay, uint64_t served, double seconds)
{
    double by_count = replay->limit == UINT64_MAX ? 0 : (double)served / (double)replay->limit;
    double by_time = replay->opts.seconds ? seconds / (double)replay->opts.seconds : 0;
    double x = by_count > by_time ? by_count : by_time;

    return x > 1 ? 1 : x;
}

static void draw(struct kc_replay *replay, FILE *out)
{
    uint64_t served = atomic_load_explicit(&replay->served, memory_order_relaxed);
    uint64_t asked = atomic_load_explicit(&replay->asked_blocks, memory_order_relaxed);
    uint64_t found = atomic_load_explicit(&replay->found_blocks, memory_order_relaxed);
    double seconds = (double)(kv_now_ns() - replay->start_ns) / 1e9;
    double done = fraction(replay, served, seconds);

    fprintf(out, "%s %3.0f %%  %s requests  %.0f/s  found %.3f", kc_bar_text(done).s, done * 100,
            kc_count(served).s, (double)served / (seconds > 0 ? seconds : 1),
            asked > 0 ? (double)found / (double)asked : 0);
    if (done > 0.02 && done < 1)
        fprintf(out, "  %s left", kc_span(seconds / done * (1 - done)).s);
}

void kc_progress(struct kc_replay *replay, bool final)
{
    static uint64_t next_ns; /* only one thread draws */

    if (isatty(STDERR_FILENO)) {
        kc_bar_clear();
        if (!final)
            draw(replay, stderr);
        fflush(stderr);
        return;
    }
    if (final || !kc_bar_is_due(&next_ns))
        return;
    draw(replay, stderr);
    kc_bar_end();
}
