// SPDX-License-Identifier: Apache-2.0
/* Workloads: traces, bursts of siblings, sessions of agents. */
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/replay/trace.h"
#include "sim/sim.h"

/* ---- random numbers ---- */

static uint64_t draw(uint64_t *state)
{
    uint64_t z = *state += UINT64_C(0x9e3779b97f4a7c15);

    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

static double draw_unit(uint64_t *state)
{
    return (double)(draw(state) >> 11) / (double)(UINT64_C(1) << 53);
}

static uint32_t draw_range(uint64_t *state, uint32_t from, uint32_t to)
{
    return from + (uint32_t)(draw(state) % (to - from + 1));
}

/* ---- building ---- */

static void *grow(void *items, size_t n, size_t *capacity, size_t size)
{
    if (n <= *capacity)
        return items;
    *capacity = n * 2;
    items = realloc(items, *capacity * size);
    if (!items)
        abort();
    return items;
}

/* Add a request with room for its ids. */
static uint32_t *add(struct sim_workload *w, double at, uint32_t prompt, uint32_t output)
{
    uint32_t n = (prompt + SIM_UNIT - 1) / SIM_UNIT;

    w->requests = grow(w->requests, w->n + 1, &w->capacity, sizeof(*w->requests));
    w->ids = grow(w->ids, w->n_id_uses + n, &w->id_capacity, sizeof(*w->ids));
    w->requests[w->n++] = (struct sim_request){
        .at = at, .prompt = prompt, .output = output, .first = (uint32_t)w->n_id_uses, .n = n};
    w->n_id_uses += n;
    return w->ids + w->n_id_uses - n;
}

static int by_time(const void *a, const void *b)
{
    const struct sim_request *x = a, *y = b;

    if (x->at != y->at)
        return x->at < y->at ? -1 : 1;
    return (x->first > y->first) - (x->first < y->first);
}

static void finish(struct sim_workload *w)
{
    if (w->n)
        qsort(w->requests, w->n, sizeof(*w->requests), by_time);
}

/* Spread the requests of one timestamp over the gap to the next one. */
static void spread(struct sim_workload *w, uint64_t *state)
{
    double gap = 1;

    for (size_t i = 0, end; i < w->n; i = end) {
        for (end = i; end < w->n && w->requests[end].at == w->requests[i].at; end++)
            ;
        if (end < w->n)
            gap = w->requests[end].at - w->requests[i].at;
        for (size_t k = i + 1; k < end; k++)
            w->requests[k].at += gap * draw_unit(state);
    }
}

int sim_read_trace(const char *path, uint64_t seed, struct sim_workload *ret)
{
    struct kc_trace trace = {0};
    struct kv_error error = {0};
    struct sim_workload w = {0};
    int rc = kc_trace_read(path, &trace, &error);

    for (size_t i = 0; rc == 0 && i < trace.n_requests; i++) {
        const struct kc_request *r = &trace.requests[i];
        uint32_t *ids = add(&w, (double)r->timestamp_ms / 1000, r->input_length,
                            r->output_length ? r->output_length : 1);

        if ((r->input_length + SIM_UNIT - 1) / SIM_UNIT != r->n)
            rc = -EPROTO;
        for (uint32_t k = 0; rc == 0 && k < r->n; k++) {
            ids[k] = (uint32_t)trace.ids[r->first + k];
            if (trace.ids[r->first + k] >= UINT32_MAX / 2)
                rc = -EPROTO;
            else if (ids[k] >= w.n_ids)
                w.n_ids = ids[k] + 1;
        }
    }
    kc_trace_fini(&trace);
    if (rc < 0) {
        sim_workload_fini(&w);
        return rc;
    }
    spread(&w, &seed);
    finish(&w);
    *ret = w;
    return 0;
}

void sim_make_fanout(size_t families, uint64_t seed, struct sim_workload *ret)
{
    struct sim_workload w = {0};
    double at = 0;

    for (size_t f = 0; f < families; f++) {
        uint32_t siblings = draw_range(&seed, 2, 16), base = w.n_ids;

        w.n_ids += 4096 / SIM_UNIT;
        at -= log(1 - draw_unit(&seed)) * 2;
        for (uint32_t k = 0; k < siblings; k++) {
            uint32_t own = draw_range(&seed, 64, 256), output = draw_range(&seed, 50, 400);
            uint32_t *ids = add(&w, at + 2 * draw_unit(&seed), 4096 + own, output);

            for (uint32_t i = 0; i < w.requests[w.n - 1].n; i++)
                ids[i] = i < 4096 / SIM_UNIT ? base + i : w.n_ids++;
        }
    }
    finish(&w);
    *ret = w;
}

/*
 * One session: its prompt grows from turn to turn. A prompt's last id, where it is begun only, names
 * other content than the same place of the next turn.
 */
static void add_session(struct sim_workload *w, uint64_t *state, double at, uint32_t kind)
{
    static const uint32_t system_units[8] = {2, 4, 4, 8, 8, 12, 16, 16};
    uint32_t turns = draw_range(state, 4, 40), n = system_units[kind], tokens = n * SIM_UNIT;
    uint32_t units[512];

    for (uint32_t i = 0; i < n; i++)
        units[i] = kind * 16 + i;
    for (uint32_t turn = 0; turn < turns; turn++) {
        uint32_t more = draw_range(state, 100, draw(state) % 4 ? 1200 : 4000);
        uint32_t output = draw_range(state, 30, 600);
        uint32_t *ids;

        tokens += more;
        if (tokens / SIM_UNIT + 2 > sizeof(units) / sizeof(*units))
            return;
        while (n < tokens / SIM_UNIT)
            units[n++] = w->n_ids++;
        ids = add(w, at, tokens, output);
        for (uint32_t i = 0; i < w->requests[w->n - 1].n; i++)
            ids[i] = i < n ? units[i] : w->n_ids++;
        at += 0.025 * output + 2;
        at += draw(state) % 10 ? 0.5 + 14.5 * draw_unit(state) : 60 + 540 * draw_unit(state);
        tokens += output;
    }
}

void sim_make_agents(size_t sessions, uint64_t seed, struct sim_workload *ret)
{
    struct sim_workload w = {.n_ids = 8 * 16};
    double at = 0;

    for (size_t i = 0; i < sessions; i++) {
        at -= log(1 - draw_unit(&seed)) * 10;
        add_session(&w, &seed, at, (uint32_t)(draw(&seed) % 8));
    }
    finish(&w);
    *ret = w;
}

void sim_workload_fini(struct sim_workload *w)
{
    free(w->requests);
    free(w->ids);
}
