// SPDX-License-Identifier: Apache-2.0
/*
 * An engine. Its cache has a unit for each id of the workload: SIM_UNIT tokens of one content behind one
 * prefix. Units that no running request uses are in a list, those to evict first at its head:
 *
 *     head  tail of the oldest prompt, ..., its first unit, tail of the next one, ...
 *
 * Behind the workload's ids, each request has one for the blocks that no other will ask for: those of its
 * answer, and units that another request computed at the same time. They stay until they are evicted.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "sim/sim.h"

#define STEP_TOKENS 8192u
#define TOKEN_S 80e-6
#define TOKEN_CONTEXT 53000.0
#define DECODE_S 15e-3
#define DECODE_SEQUENCE_S 0.1e-3
#define DECODE_CONTEXT_S 35e-9
#define NO_UNIT UINT32_MAX

struct unit {
    uint32_t refs;
    uint32_t prev, next; /* in the list of unused units */
    bool held;
    uint32_t blocks;
    double since; /* held */
};

struct sequence {
    uint32_t request;
    uint32_t done;      /* prompt tokens computed or found */
    uint32_t chunk;     /* of them in the running step */
    uint32_t generated; /* tokens of output */
    uint32_t units;     /* of its prompt that are complete */
    uint32_t reserved;  /* blocks that are its own alone */
    bool *shared;       /* for each unit: it is the cache's, and referred to */
};

struct list {
    struct sequence *items;
    size_t n, capacity;
};

struct sim_engine {
    const struct sim_workload *workload;
    struct unit *units;
    uint32_t head, tail;                  /* unused units */
    uint32_t blocks, used, unused_blocks; /* used: with those unused but held */
    double slow, next, computed, found;
    double context;    /* tokens of decoding sequences */
    uint32_t *waiting; /* requests, from waiting_first on */
    size_t waiting_first, n_waiting, waiting_capacity;
    struct list prompts, decodes;
};

static void *grow(void *items, size_t n, size_t *capacity, size_t size)
{
    if (n < *capacity)
        return items;
    *capacity = *capacity ? *capacity * 2 : 16;
    items = realloc(items, *capacity * size);
    if (!items)
        abort();
    return items;
}

struct sim_engine *sim_engine_create(const struct sim_workload *workload, uint32_t blocks,
                                     double slow)
{
    struct sim_engine *e = calloc(1, sizeof(*e));

    if (!e)
        abort();
    *e = (struct sim_engine){.workload = workload,
                             .units = calloc(workload->n_ids + workload->n + 1, sizeof(*e->units)),
                             .head = NO_UNIT,
                             .tail = NO_UNIT,
                             .blocks = blocks,
                             .slow = slow,
                             .next = INFINITY};
    if (!e->units)
        abort();
    return e;
}

void sim_engine_destroy(struct sim_engine *e)
{
    for (size_t i = 0; i < e->prompts.n; i++)
        free(e->prompts.items[i].shared);
    for (size_t i = 0; i < e->decodes.n; i++)
        free(e->decodes.items[i].shared);
    free(e->prompts.items);
    free(e->decodes.items);
    free(e->waiting);
    free(e->units);
    free(e);
}

double sim_compute_s(double from, double to)
{
    return TOKEN_S * (to - from + (to * to - from * from) / 2 / TOKEN_CONTEXT);
}

static uint32_t id_of(const struct sim_engine *e, const struct sim_request *r, uint32_t i)
{
    return e->workload->ids[r->first + i];
}

/* Tokens of a prompt up to the end of its unit @i, and the blocks of that unit. */
static uint32_t end_of(const struct sim_request *r, uint32_t i)
{
    uint32_t end = (i + 1) * SIM_UNIT;

    return end < r->prompt ? end : r->prompt;
}

static uint32_t blocks_of(const struct sim_request *r, uint32_t i)
{
    return (end_of(r, i) - i * SIM_UNIT + SIM_BLOCK - 1) / SIM_BLOCK;
}

/* ---- the list of unused units ---- */

static void unlist(struct sim_engine *e, uint32_t id, uint32_t blocks)
{
    struct unit *unit = &e->units[id];

    if (unit->prev != NO_UNIT)
        e->units[unit->prev].next = unit->next;
    else
        e->head = unit->next;
    if (unit->next != NO_UNIT)
        e->units[unit->next].prev = unit->prev;
    else
        e->tail = unit->prev;
    e->unused_blocks -= blocks;
}

static void enlist(struct sim_engine *e, uint32_t id, uint32_t blocks)
{
    e->units[id].prev = e->tail;
    e->units[id].next = NO_UNIT;
    if (e->tail != NO_UNIT)
        e->units[e->tail].next = id;
    else
        e->head = id;
    e->tail = id;
    e->units[id].blocks = blocks;
    e->unused_blocks += blocks;
}

static uint32_t held_units(const struct sim_engine *e, const struct sim_request *r)
{
    uint32_t n = 0;

    while (n < r->n && e->units[id_of(e, r, n)].held)
        n++;
    return n;
}

uint32_t sim_engine_held(const struct sim_engine *e, uint32_t request, double until)
{
    const struct sim_request *r = &e->workload->requests[request];
    uint32_t n = 0;

    while (n < r->n && e->units[id_of(e, r, n)].held && e->units[id_of(e, r, n)].since <= until)
        n++;
    return n ? end_of(r, n - 1) / SIM_BLOCK * SIM_BLOCK : 0;
}

/* Evict the unit that was used longest ago. */
static void evict(struct sim_engine *e)
{
    uint32_t id = e->head, blocks = e->units[id].blocks;

    unlist(e, id, blocks);
    e->units[id].held = false;
    e->used -= blocks;
}

/* Start the first waiting request, if its prompt and its output have room. */
static bool admit(struct sim_engine *e)
{
    uint32_t number = e->waiting[e->waiting_first];
    const struct sim_request *r = &e->workload->requests[number];
    uint32_t n = held_units(e, r), need = (r->output + SIM_BLOCK - 1) / SIM_BLOCK;
    struct sequence s = {.request = number, .units = n};

    for (uint32_t i = n; i < r->n; i++)
        need += blocks_of(r, i);
    for (uint32_t i = 0; i < n; i++)
        if (e->units[id_of(e, r, i)].refs++ == 0)
            unlist(e, id_of(e, r, i), blocks_of(r, i));
    if (e->blocks - e->used + e->unused_blocks < need &&
        e->prompts.n + e->decodes.n > 0) { /* later: others will have ended */
        for (uint32_t i = n; i-- > 0;)
            if (--e->units[id_of(e, r, i)].refs == 0)
                enlist(e, id_of(e, r, i), blocks_of(r, i));
        return false;
    }
    while (e->blocks - e->used < need && e->head != NO_UNIT)
        evict(e);
    e->used += need;
    s.reserved = need;
    s.shared = calloc(r->n + 1, sizeof(bool));
    if (!s.shared)
        abort();
    memset(s.shared, true, n * sizeof(bool));
    s.done = n ? end_of(r, n - 1) / SIM_BLOCK * SIM_BLOCK : 0;
    if (s.done >= r->prompt) /* one token at least is computed */
        s.done = (r->prompt - 1) / SIM_BLOCK * SIM_BLOCK;
    e->found += s.done;
    e->computed += r->prompt - s.done;
    e->prompts.items =
        grow(e->prompts.items, e->prompts.n, &e->prompts.capacity, sizeof(struct sequence));
    e->prompts.items[e->prompts.n++] = s;
    e->waiting_first++;
    e->n_waiting--;
    return true;
}

/* Begin a step: decodes, then chunks of prompts in their order, then new prompts. */
static void begin(struct sim_engine *e, double now)
{
    uint32_t left = STEP_TOKENS;
    double seconds = 0;

    for (size_t i = 0; left > 0; i++) {
        struct sequence *s;
        uint32_t prompt;

        if (i == e->prompts.n && (e->n_waiting == 0 || !admit(e)))
            break;
        s = &e->prompts.items[i];
        prompt = e->workload->requests[s->request].prompt;
        s->chunk = prompt - s->done < left ? prompt - s->done : left;
        left -= s->chunk;
        seconds += sim_compute_s(s->done, s->done + s->chunk);
    }
    if (e->decodes.n > 0)
        seconds +=
            DECODE_S + DECODE_SEQUENCE_S * (double)e->decodes.n + DECODE_CONTEXT_S * e->context;
    e->next = e->prompts.n + e->decodes.n > 0 ? now + seconds * e->slow : INFINITY;
}

void sim_engine_add(struct sim_engine *e, uint32_t request, double now)
{
    if (e->waiting_first > 1024 && e->waiting_first > e->n_waiting) {
        memmove(e->waiting, e->waiting + e->waiting_first, e->n_waiting * sizeof(*e->waiting));
        e->waiting_first = 0;
    }
    e->waiting = grow(e->waiting, e->waiting_first + e->n_waiting, &e->waiting_capacity,
                      sizeof(*e->waiting));
    e->waiting[e->waiting_first + e->n_waiting++] = request;
    if (isinf(e->next))
        begin(e, now);
}

double sim_engine_next(const struct sim_engine *e)
{
    return e->next;
}

/* Put the units that a chunk has completed into the cache. */
static void complete(struct sim_engine *e, struct sequence *s)
{
    const struct sim_request *r = &e->workload->requests[s->request];

    for (; s->units < r->n && end_of(r, s->units) <= s->done; s->units++) {
        struct unit *unit = &e->units[id_of(e, r, s->units)];

        if (unit->held)
            continue; /* another request was first: this one's is private */
        unit->held = true;
        unit->since = e->next;
        unit->refs = 1;
        s->shared[s->units] = true;
        s->reserved -= blocks_of(r, s->units);
    }
}

static void finish(struct sim_engine *e, struct sequence *s)
{
    const struct sim_request *r = &e->workload->requests[s->request];

    if (s->reserved > 0)
        enlist(e, e->workload->n_ids + s->request, s->reserved);
    for (uint32_t i = r->n; i-- > 0;)
        if (s->shared[i] && --e->units[id_of(e, r, i)].refs == 0)
            enlist(e, id_of(e, r, i), blocks_of(r, i));
    free(s->shared);
    s->shared = NULL;
}

/* Move sequences whose prompts are computed to the decodes; some end with their first token. */
static void end_prompts(struct sim_engine *e, double now, sim_event_fn fn, void *arg)
{
    size_t kept = 0;

    for (size_t i = 0; i < e->prompts.n; i++) {
        struct sequence s = e->prompts.items[i];
        const struct sim_request *r = &e->workload->requests[s.request];

        s.done += s.chunk;
        s.chunk = 0;
        complete(e, &s);
        if (s.done < r->prompt) {
            e->prompts.items[kept++] = s;
            continue;
        }
        fn(arg, s.request, true, now);
        s.generated = 1;
        if (r->output <= 1) {
            finish(e, &s);
            fn(arg, s.request, false, now);
            continue;
        }
        e->decodes.items =
            grow(e->decodes.items, e->decodes.n, &e->decodes.capacity, sizeof(struct sequence));
        e->decodes.items[e->decodes.n++] = s;
        e->context += r->prompt + 1;
    }
    e->prompts.n = kept;
}

static void end_decodes(struct sim_engine *e, double now, sim_event_fn fn, void *arg)
{
    size_t kept = 0;

    for (size_t i = 0; i < e->decodes.n; i++) {
        struct sequence *s = &e->decodes.items[i];
        const struct sim_request *r = &e->workload->requests[s->request];

        e->context++;
        if (++s->generated < r->output) {
            e->decodes.items[kept++] = *s;
            continue;
        }
        e->context -= r->prompt + s->generated;
        finish(e, s);
        fn(arg, s->request, false, now);
    }
    e->decodes.n = kept;
}

void sim_engine_step(struct sim_engine *e, sim_event_fn fn, void *arg)
{
    double now = e->next;

    end_decodes(e, now, fn, arg);
    end_prompts(e, now, fn, arg);
    begin(e, now);
}

uint32_t sim_engine_waiting(const struct sim_engine *e)
{
    return (uint32_t)e->n_waiting;
}

double sim_engine_use(const struct sim_engine *e)
{
    return (double)(e->used - e->unused_blocks) / e->blocks;
}

void sim_engine_count(const struct sim_engine *e, double *computed, double *found)
{
    *computed = e->computed;
    *found = e->found;
}

/* ---- the oracle's forecast ---- */

/* A prompt in a forecast. */
struct ahead {
    double done, prompt;
};

/* Write the prompts before and with @request, in their order, as they are or will be once started. */
static size_t list_ahead(const struct sim_engine *e, uint32_t request, struct ahead *ret)
{
    size_t n = 0;

    for (size_t i = 0; i < e->prompts.n; i++) {
        const struct sequence *s = &e->prompts.items[i];

        ret[n++] = (struct ahead){s->done + s->chunk, e->workload->requests[s->request].prompt};
    }
    for (size_t i = 0; i <= e->n_waiting; i++) {
        uint32_t number = i < e->n_waiting ? e->waiting[e->waiting_first + i] : request;

        ret[n++] = (struct ahead){sim_engine_held(e, number, INFINITY),
                                  e->workload->requests[number].prompt};
    }
    return n;
}

double sim_engine_forecast(const struct sim_engine *e, uint32_t request, double now)
{
    struct ahead *all = calloc(e->prompts.n + e->n_waiting + 1, sizeof(*all));
    double at = isinf(e->next) ? now : e->next, decodes = (double)e->decodes.n;
    double context = e->context;
    size_t n, first = 0;

    if (!all)
        abort();
    n = list_ahead(e, request, all);
    while (first < n) {
        double left = STEP_TOKENS, seconds = 0;
        size_t done = first;

        for (size_t i = first; i < n && left > 0; i++) {
            double chunk = all[i].prompt - all[i].done < left ? all[i].prompt - all[i].done : left;

            seconds += sim_compute_s(all[i].done, all[i].done + chunk);
            all[i].done += chunk;
            left -= chunk;
            done += all[i].done >= all[i].prompt;
        }
        if (decodes > 0)
            seconds += DECODE_S + DECODE_SEQUENCE_S * decodes + DECODE_CONTEXT_S * context;
        at += seconds * e->slow;
        for (; first < done; first++) {
            decodes++;
            context += all[first].prompt;
        }
    }
    free(all);
    return at;
}
