// SPDX-License-Identifier: Apache-2.0
/**
 * A simulated fleet: engines with prefix caches, requests of a workload, and libkvselect between.
 *
 * Engine. Continuous batching with chunked prefill, first come first served, STEP_TOKENS prompt tokens
 * a step. A prompt token at context c takes 80 us * (1 + c / 53,000); a step with decodes takes 15 ms,
 * 0.1 ms a sequence and 35 ns a token of context more (a 70B model on four H100). The cache has blocks
 * of 16 tokens, answers included, and evicts what was used longest ago, tails first. A request starts
 * when its prompt and its answer have room.
 *
 * All is deterministic: the same workload, settings and seeds give the same figures everywhere.
 *
 * The model leaves out preemption, several ranks, adapters, cancelled requests, lost events and
 * outputs that later prompts reuse. Ratios of figures carry over to real fleets, not seconds.
 */
#ifndef KV_BENCH_SIM_H
#define KV_BENCH_SIM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kv_select.h"

#define SIM_BLOCK 16  /* tokens of an engine's block */
#define SIM_UNIT 512u /* prompt tokens that one id names */
#define SIM_UNIT_BLOCKS (SIM_UNIT / SIM_BLOCK)
#define SIM_MAX_WORKERS 64

/* ---- workloads ---- */

struct sim_request {
    double at;               /* seconds, scaled by the load */
    uint32_t prompt, output; /* tokens */
    uint32_t first, n;       /* its ids in the workload's: one for each SIM_UNIT tokens begun */
};

struct sim_workload {
    struct sim_request *requests; /* by time */
    size_t n, capacity;
    uint32_t
        *ids; /* from 0 to n_ids - 1; equal ones at the start of two prompts are an equal prefix */
    size_t n_id_uses, id_capacity;
    uint32_t n_ids;
};

/**
 * Read a trace (kc_trace) and spread requests of one timestamp over the gap to the next. Returns 0 or a
 * negative errno.
 */
int sim_read_trace(const char *path, uint64_t seed, struct sim_workload *ret);

/**
 * Make @families bursts: 2 to 16 siblings within 2 s behind a fresh prefix of 4096 tokens. Each has 64
 * to 256 tokens of its own, and 50 to 400 of output.
 */
void sim_make_fanout(size_t families, uint64_t seed, struct sim_workload *ret);

/**
 * Make @sessions of agents: one of 8 system prompts of 1024 to 8192 tokens, then 4 to 40 turns. Each
 * turn appends 100 to 4000 tokens; its answer has 30 to 600. Tools take 0.5 to 15 s; one pause in ten
 * is a person's or a build's, 60 to 600 s.
 */
void sim_make_agents(size_t sessions, uint64_t seed, struct sim_workload *ret);

void sim_workload_fini(struct sim_workload *workload);

/* ---- an engine ---- */

struct sim_engine;

/** Receives the end of a prompt (first token) or of an answer. */
typedef void (*sim_event_fn)(void *arg, uint32_t request, bool first_token, double now);

/** Make an engine with @blocks. @slow: its times are so many times as long. Aborts without memory. */
struct sim_engine *sim_engine_create(const struct sim_workload *workload, uint32_t blocks,
                                     double slow);
void sim_engine_destroy(struct sim_engine *engine);
/** Give it a request. */
void sim_engine_add(struct sim_engine *engine, uint32_t request, double now);
/** Return when its step ends; INFINITY: it is idle. */
double sim_engine_next(const struct sim_engine *engine);
/** End the step; call @fn for each first token and each end; begin the next step. */
void sim_engine_step(struct sim_engine *engine, sim_event_fn fn, void *arg);
/** Return how many leading tokens of a request's prompt it holds, and got before @until. */
uint32_t sim_engine_held(const struct sim_engine *engine, uint32_t request, double until);
/** Return the requests that have not started, and the share of its blocks that running ones have. */
uint32_t sim_engine_waiting(const struct sim_engine *engine);
double sim_engine_use(const struct sim_engine *engine);
/** Return the prompt tokens that it has computed and those that it found in its cache, so far. */
void sim_engine_count(const struct sim_engine *engine, double *computed, double *found);
/**
 * Return when the first token of a request would come that were given to it now. Later requests are not
 * known; those that it has wait for their turn, and for the room that answers leave.
 */
double sim_engine_forecast(const struct sim_engine *engine, uint32_t request, double now);
/** Return the seconds to compute tokens @from to @to of a prompt. */
double sim_compute_s(double from, double to);

/* ---- a run ---- */

struct sim_settings {
    /* libkvselect's, or one of the simulator's own: order, product; llm-d, with the engines' queues and
     * cache use as of the last 50 ms; smg, with a tree of what each worker was sent; oracle, with forecasts
     * of all engines; oracle3, these with 3 times the own time to compute. */
    const char *policy;
    const struct kvsel_params *params;
    uint32_t workers, blocks;
    uint32_t slow;          /* number of workers that have half the speed */
    double rate;            /* requests a second; 0: 48 requests a worker in flight all the time */
    uint64_t seed;          /* of ties */
    bool predict;           /* predictions of 2 s */
    bool learn;             /* speeds */
    uint32_t replicas;      /* selectors that take requests by turns; 0: one */
    double delay_s;         /* until a replica's bookings are known to the others */
    double late_s;          /* until events are known */
    uint64_t queue_waiting; /* hold requests while all workers have so many waiting tokens */
    enum kvsel_order order;
};

struct sim_result {
    double ttft, ttft_p99, over, over_p99; /* seconds; over: beyond the least possible */
    double token_s;                        /* mean time of an output token */
    double hits;                           /* share of prompt tokens found in caches */
    double busiest;                        /* most computed tokens of a worker / mean */
    double rate;                           /* requests a second */
    double decision_s;                     /* CPU time of a decision with its booking */
};

/** Run a workload. The first tenth of the requests isn't counted. Aborts without memory. */
void sim_run(const struct sim_workload *workload, const struct sim_settings *settings,
             struct sim_result *ret);

#endif
