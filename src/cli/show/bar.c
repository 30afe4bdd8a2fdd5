// SPDX-License-Identifier: Apache-2.0
#include "cli/show/bar.h"

#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/show/format.h"

#define PLAIN_EVERY_NS (10 * KV_NS_PER_S)
#define DRAW_EVERY_NS (100 * KV_NS_PER_MS)

static atomic_bool interrupted;

struct kc_bar_text kc_bar_text(double fraction)
{
    struct kc_bar_text bar = {"["};
    double inside = fraction < 0 ? 0 : fraction > 1 ? 1 : fraction;

    memset(bar.s + 1, '.', KC_BAR_WIDTH);
    memset(bar.s + 1, '#', (size_t)(inside * KC_BAR_WIDTH));
    bar.s[KC_BAR_WIDTH + 1] = ']';
    return bar;
}

bool kc_bar_is_due(uint64_t *next_ns)
{
    uint64_t now_ns = kv_now_ns(), every = isatty(STDERR_FILENO) ? DRAW_EVERY_NS : PLAIN_EVERY_NS;

    if (*next_ns == 0)
        *next_ns = now_ns + every;
    if (now_ns < *next_ns)
        return false;
    *next_ns = now_ns + every;
    return true;
}

void kc_bar_begin(void)
{
    kc_bar_clear();
}

void kc_bar_end(void)
{
    if (!isatty(STDERR_FILENO))
        fputc('\n', stderr);
    fflush(stderr);
}

void kc_bar_clear(void)
{
    if (isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
    fflush(stderr);
}

static struct kc_text amount(const struct kc_bar *bar, double n)
{
    struct kc_text text;

    if (!bar->unit)
        return kc_bytes(n);
    snprintf(text.s, sizeof(text.s), "%.16s %.24s", kc_scaled(n).s, bar->unit);
    return text;
}

int kc_bar_progress(void *arg, uint64_t done, uint64_t total)
{
    struct kc_bar *bar = arg;
    double seconds, rate;

    if (kc_bar_interrupted())
        return 1;
    if (bar->start_ns == 0)
        bar->start_ns = kv_now_ns();
    if (bar->quiet || !kc_bar_is_due(&bar->next_ns))
        return 0;
    seconds = (double)(kv_now_ns() - bar->start_ns) / 1e9;
    rate = (double)done / (seconds > 0 ? seconds : 1);
    kc_bar_begin();
    if (total)
        fprintf(stderr, "%s %s %3.0f %%  ", bar->label, kc_bar_text((double)done / (double)total).s,
                100.0 * (double)done / (double)total);
    else
        fprintf(stderr, "%s  ", bar->label);
    fprintf(stderr, "%s  %s/s", amount(bar, (double)done).s, amount(bar, rate).s);
    if (total > done && rate > 0 && done > total / 50)
        fprintf(stderr, "  %s left", kc_span((double)(total - done) / rate).s);
    kc_bar_end();
    bar->drawn = true;
    return 0;
}

void kc_bar_finish(struct kc_bar *bar)
{
    if (bar->drawn)
        kc_bar_clear();
    bar->drawn = false;
}

static void on_signal(int number)
{
    (void)number;
    atomic_store(&interrupted, true);
}

void kc_bar_catch_signals(void)
{
    const struct sigaction action = {.sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND};

    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
}

bool kc_bar_interrupted(void)
{
    return atomic_load(&interrupted);
}
