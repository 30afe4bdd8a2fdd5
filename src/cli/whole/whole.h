// SPDX-License-Identifier: Apache-2.0
/**
 * The director of a run of the whole system (docs/replay.md): it starts the processes, routes the
 * requests of a trace, injects faults, compares the books at the end, and reports.
 */
#ifndef KV_CLI_WHOLE_WHOLE_H
#define KV_CLI_WHOLE_WHOLE_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "cli/client/client.h"
#include "cli/replay/child.h"
#include "cli/replay/hist.h"
#include "cli/replay/trace.h"
#include "cli/whole/message.h"

/** Faults that a run can inject; bits of a mask. */
enum kc_fault {
    KC_FAULT_KILL_WORKER,
    KC_FAULT_KILL_INDEXER,
    KC_FAULT_KILL_STORE,
    KC_FAULT_KILL_NATS,
    KC_FAULT_FREEZE_WORKER,
    KC_FAULT_FREEZE_INDEXER,
    KC_FAULT_FULL_DISK,
    KC_N_FAULTS
};
extern const char *const kc_fault_names[KC_N_FAULTS];

enum kc_route { KC_ROUTE_MATCH, KC_ROUTE_ROUND_ROBIN, KC_ROUTE_LEAST };

struct kc_whole_opts {
    const char *trace; /* NULL: generate one */
    const char *model, *policy_name, *peers_name, *kill, *freeze, *flip_name;
    const char *indexer; /* NULL: find the program */
    const char *only;    /* parsed for --help alone: kc_replay_main looks for it first */
    const char *dir;     /* NULL: a temporary one */
    const char *store;   /* NULL: a file store in dir; "redis": a server of the run's own; "none" */
    const char *json, *html;
    uint64_t requests, rounds, duration_ms, workers, g1, g2, g3, per_id, max_tokens, steps, prefill,
        seed;
    uint64_t settle_ms, times, freeze_ms, watchdog_ms;
    enum kc_route policy;
    uint32_t faults; /* 1 << enum kc_fault */
    bool nats, full_disk, quiet;
};

/** Parse the command line. Returns as kv_args_parse. */
int kc_whole_options(int argc, char **argv, struct kc_whole_opts *ret, struct kv_error *error);

/* ---- processes ---- */

enum { KC_QUEUE = 2 }; /* requests that a worker has at a time */

/** A worker as the director sees it. */
struct kc_member {
    pid_t pid; /* 0: none runs */
    int fd;
    uint32_t starts;
    bool killed;              /* by a fault, and not started again yet */
    uint64_t queue[KC_QUEUE]; /* numbers of the requests that it has, oldest first */
    uint32_t n_queued;
    uint64_t queued_blocks;
    uint64_t since_ns; /* when its oldest request was sent, or its last answer came; n_queued > 0 */
    struct kc_done_message last; /* counters of the present process */
    char agent[160];
    char events[96], replay[96];
    char hung[130]; /* what it did when the watchdog ended it; "": it didn't */
};

/** A server that a run starts beside the indexer: nats-server or redis-server. */
struct kc_server {
    pid_t pid; /* 0: none runs */
    uint32_t port;
    const char *const *programs; /* names of its program, NULL at the end: the first that exists */
    const char *const *argv;
};

/** Figures at one moment; all but gauges since the start. */
struct kc_sample {
    double seconds;
    uint64_t requests, blocks[KC_N_SOURCES], path_bytes[KC_N_PATHS], checked;
    double saved_seconds; /* TTFT saved, summed over requests */
    double lag_ms;        /* gauge: mean of the probes since the sample before; < 0: none */
    double query_us;      /* gauge: mean of the queries since the sample before; < 0: none */
    uint64_t worker_bytes, indexer_bytes; /* gauges: resident memory, all workers together */
};

/** Sums over all workers and all of their processes. */
struct kc_totals {
    uint64_t requests, again, failed, blocks[KC_N_SOURCES], n_blocks, checked, rows_wrong;
    uint64_t path_bytes[KC_N_PATHS], phase_ns[KC_N_PHASES], bad[3], dropped[3], events_dropped;
    uint64_t cpu_ns, onboard_ns, hit_tokens, tokens;
    uint64_t loaded_tokens,
        load_ns; /* hits outside of G1; onboard time of the requests that had any */
    uint64_t queries, unanswered;
    uint64_t slow_loads; /* requests whose loads took longer than their prefill would */
    double saved_seconds;
    char wrong[120];
};

/** The books at the end. */
struct kc_books {
    bool done, equal;
    uint64_t keys, copies; /* distinct keys; (worker, key, tier) that the workers have */
    uint64_t indexer_lacks, indexer_extra; /* of these */
    uint64_t nats_lacks, nats_extra;
    uint64_t loose; /* copies that the indexer doesn't show: the worker lacks a block before them */
    uint64_t window_copies; /* of group 1: compared with the store alone */
    bool nats;              /* compared with the view by NATS as well */
    bool store;             /* compared */
    uint64_t stored;        /* keys that the store has, by lookups */
    uint64_t chunks;        /* chunks that the store lists */
    uint64_t store_lacks;   /* keys that a worker believes there, and the store lacks */
    uint64_t settle_ms;
    char first[200]; /* the first difference */
};

struct kc_probe; /* of the event lag */

struct kc_whole {
    struct kc_whole_opts opts;
    struct kc_plan plan;
    struct kc_trace trace;
    struct kc_trace_stats trace_stats;
    bool new_dir;   /* it was made for this run: what lies in it is this run's */
    int janitor_fd; /* closed: the janitor removes the directory */
    pid_t janitor;
    struct {
        uint64_t bytes; /* of a tmpfs over the folder, for --full-disk; 0: there is none */
        char why[80];   /* why not */
    } small;

    struct kc_member members[KC_PLAN_WORKERS];
    struct kc_child *child;
    uint32_t indexer_port;
    struct kc_server redis, nats;
    struct kc_client *client;
    struct kc_belief *beliefs;
    struct kc_probe *probe;
    struct kc_message *message; /* for the director's thread */
    uint32_t *tokens;           /* [KC_PLAN_BLOCKS * page_size] of a request being routed */

    uint64_t start_ns, end_ns, limit;
    uint64_t next; /* number of the next request */
    uint64_t again[KC_PLAN_WORKERS * KC_QUEUE];
    size_t n_again;
    uint64_t routed;
    uint64_t away_until_ns; /* the indexer didn't answer: ask again then */

    struct kc_totals totals;
    struct kc_hist latency; /* of /query */
    struct kc_hist lag;     /* of events */
    _Atomic uint64_t lag_sum_ns, lag_n;
    uint64_t query_sum_ns, query_n;
    struct kc_sample *samples;
    size_t n_samples, sample_capacity;
    uint64_t sample_every_ns, next_sample_ns;
    struct kc_sample base; /* gauges' sums at the last sample */

    uint32_t n_faults_done, faults_injected[KC_N_FAULTS];
    uint64_t next_fault_ns;
    pid_t frozen; /* process that has been stopped; 0: none */
    uint64_t thaw_ns;
    bool disk_full;

    struct kc_books books;
    double memory_rate; /* bytes read + written a second by memcpy on all cores, measured first */
    bool interrupted;
};

/* crew.c */
int kc_crew_start(struct kc_whole *whole, struct kv_error *error);
/** Stop all processes. Returns false when a worker ended with an error. */
bool kc_crew_stop(struct kc_whole *whole);
/** Start a worker's process anew, after its end. */
int kc_crew_restart(struct kc_whole *whole, uint32_t number, struct kv_error *error);
/** Fail when a worker has had a request for longer than the watchdog's time, and end that worker. */
int kc_crew_watch(struct kc_whole *whole, struct kv_error *error);
/** Start the indexer, at the port that it had, and register all workers. */
int kc_crew_start_indexer(struct kc_whole *whole, struct kv_error *error);
/**
 * Send a message to a worker and wait for the answer, up to the watchdog's time. Returns 0 or a negative
 * errno; -ETIMEDOUT: the worker hung, and has been ended.
 */
int kc_crew_ask(struct kc_whole *whole, uint32_t number, struct kc_message *message);

/* servers.c */
int kc_servers_start(struct kc_whole *whole, struct kv_error *error);
int kc_server_run(struct kc_server *server, const char *dir, struct kv_error *error);
void kc_server_stop(struct kc_server *server);
/** Make the run's directory, and the janitor that removes it however this process ends. */
int kc_dir_make(struct kc_whole *whole, struct kv_error *error);
void kc_dir_remove(struct kc_whole *whole);

/* small_disk.c */
/** For --full-disk: enter namespaces of the run's own. Call before another thread or process exists. */
void kc_small_disk_enter(struct kc_whole *whole);
/** Mount a tmpfs over the run's folder, where that is possible. */
void kc_small_disk_mount(struct kc_whole *whole);
/** Fill the tmpfs, or make room again. Returns false when there is none. */
bool kc_small_disk_fill(struct kc_whole *whole, bool full);

/* run.c */
int kc_run(struct kc_whole *whole, struct kv_error *error);
/** Take the answers that workers have sent, waiting for @ms. */
int kc_run_collect(struct kc_whole *whole, int ms, struct kv_error *error);
/** Write tokens of request @number, counted over rounds, to whole->tokens. Returns their number. */
uint32_t kc_run_tokens(struct kc_whole *whole, uint64_t number, struct kc_request_message *ret);

/* fault.c */
int kc_fault_tick(struct kc_whole *whole, struct kv_error *error);
/** Return true while the options name faults that haven't been injected. */
bool kc_fault_left(const struct kc_whole *whole);
/** End what lasts: thaw, give the disk room. */
void kc_fault_end(struct kc_whole *whole);

/* probe.c */
int kc_probe_start(struct kc_whole *whole, struct kv_error *error);
void kc_probe_stop(struct kc_whole *whole);
/** Measure when the indexer shows a request's blocks that @worker registered at @since_ns. */
void kc_probe_offer(struct kc_whole *whole, uint64_t number, uint32_t worker, uint64_t since_ns);

/* books.c, audit.c */
int kc_books_compare(struct kc_whole *whole, struct kv_error *error);
/** Ask the store itself which of @n keys of a group it has (ret[i]), and list all its chunks. */
int kc_audit_store(struct kc_whole *whole, uint32_t group, const uint64_t *keys, size_t n,
                   bool *ret, uint64_t *ret_chunks);

/* sample.c */
void kc_sample_tick(struct kc_whole *whole, bool last);
void kc_sample_show(struct kc_whole *whole, bool final);
/** Measure the rate of memcpy on all cores, in bytes read and written a second. */
double kc_memory_rate(void);

/* report.c, html.c */
int kc_whole_report(struct kc_whole *whole, struct kv_error *error);
bool kc_whole_passed(const struct kc_whole *whole);
struct kv_buf;
void kc_whole_html(const struct kc_whole *whole, const struct kv_buf *json, struct kv_buf *out);

bool kc_whole_interrupted(void);

#endif
