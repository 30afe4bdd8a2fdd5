// SPDX-License-Identifier: Apache-2.0
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "cli/commands.h"
#include "cli/replay/generate.h"
#include "cli/whole/whole.h"
#include "cli/whole/worker.h"

#define SAMPLES 240
#define SAMPLE_MS 250

static atomic_int signals; /* number of SIGINT and SIGTERM received */

static void on_signal(int number)
{
    (void)number;
    if (atomic_fetch_add(&signals, 1) >= 2)
        _exit(130); /* children and the directory end with this process */
}

bool kc_whole_interrupted(void)
{
    return atomic_load_explicit(&signals, memory_order_relaxed) > 0;
}

static uint32_t blocks_of(uint64_t bytes, uint64_t block_bytes)
{
    uint64_t n = bytes / block_bytes;

    return (uint32_t)KV_MIN(n, (uint64_t)1 << 20);
}

static int make_plan(struct kc_whole *w, struct kv_error *error)
{
    const struct kc_whole_opts *o = &w->opts;
    struct kc_plan *p = &w->plan;
    uint64_t bytes;
    uint32_t longest;

    p->shape = *kc_shape_find(o->model);
    bytes = (kc_shape_block_bytes(&p->shape) + 4095) / 4096 * 4096;
    p->n_workers = (uint32_t)o->workers;
    p->per_id = (uint32_t)o->per_id;
    p->g1_blocks = blocks_of(o->g1, bytes);
    p->g2_blocks = blocks_of(o->g2, bytes);
    p->g3_blocks = blocks_of(o->g3, bytes);
    p->steps = (uint32_t)o->steps;
    p->seed = o->seed;
    p->carrier = strcmp(o->peers_name, "shm") == 0   ? KC_CARRIER_SHM
                 : strcmp(o->peers_name, "tcp") == 0 ? KC_CARRIER_TCP
                                                     : KC_CARRIER_OFF;
    p->flip = !o->flip_name                           ? KC_FLIP_NONE
              : strcmp(o->flip_name, "gathered") == 0 ? KC_FLIP_GATHERED
                                                      : KC_FLIP_HOST;
    if (p->g1_blocks < 4 || p->g2_blocks < 4)
        return kv_fail(error, -EINVAL, 0, "--g1 and --g2 must hold 4 blocks of %.1f MiB at least",
                       (double)bytes / (1 << 20));
    longest = p->g1_blocks / kc_shape_groups(&p->shape) - 1; /* and each group's tail */
    longest = KV_MIN(longest, (uint32_t)KC_PLAN_BLOCKS) * p->shape.page_size;
    w->opts.max_tokens = KV_MIN(o->max_tokens, (uint64_t)longest);
    w->opts.max_tokens = KV_MIN(w->opts.max_tokens, (uint64_t)KC_PLAN_IDS * p->per_id);
    if (w->opts.max_tokens < p->per_id)
        return kv_fail(error, -EINVAL, 0, "--g1 is too small for one id of the trace");
    return 0;
}

static int load_trace(struct kc_whole *w, struct kv_error *error)
{
    const struct kc_generate_opts generate = {.seed = w->opts.seed,
                                              .n_requests = KC_GENERATE_REQUESTS};
    int rc = w->opts.trace ? kc_trace_read(w->opts.trace, &w->trace, error)
                           : kc_generate(&generate, &w->trace);

    if (rc == -ENOMEM)
        return kv_fail(error, rc, 0, "out of memory");
    if (rc == 0 && w->trace.n_requests == 0)
        return kv_fail(error, -ENODATA, 0, "the trace has no requests");
    w->limit = w->opts.requests * w->opts.rounds;
    return rc;
}

static int allocate(struct kc_whole *w, struct kv_error *error)
{
    w->sample_capacity = SAMPLES;
    w->sample_every_ns = SAMPLE_MS * KV_NS_PER_MS;
    w->samples = calloc(SAMPLES, sizeof(*w->samples));
    w->beliefs = calloc(w->opts.workers, sizeof(*w->beliefs));
    w->message = calloc(1, sizeof(*w->message));
    w->tokens = calloc((size_t)KC_PLAN_BLOCKS * w->plan.shape.page_size, sizeof(*w->tokens));
    return w->samples && w->beliefs && w->message && w->tokens
               ? 0
               : kv_fail(error, -ENOMEM, 0, "out of memory");
}

static int direct(struct kc_whole *w, struct kv_error *error)
{
    int rc;

    kc_small_disk_enter(w);
    rc = kc_dir_make(w, error);

    rc = rc == 0 ? allocate(w, error) : rc;
    w->memory_rate = kc_memory_rate();
    rc = rc == 0 ? kc_servers_start(w, error) : rc;
    rc = rc == 0 ? kc_crew_start(w, error) : rc;
    rc = rc == 0 ? kc_probe_start(w, error) : rc;
    w->start_ns = kv_now_ns();
    rc = rc == 0 ? kc_run(w, error) : rc;
    kc_probe_stop(w);
    w->memory_rate = KV_MAX(w->memory_rate, kc_memory_rate());
    if (rc == 0 && !w->interrupted)
        rc = kc_books_compare(w, error);
    return rc == 0 ? kc_whole_report(w, error) : rc;
}

/* Returns false when a worker ended with an error. */
static bool fini(struct kc_whole *w)
{
    bool clean;

    kc_probe_stop(w);
    clean = kc_crew_stop(w);
    kc_dir_remove(w);
    kc_trace_fini(&w->trace);
    free(w->samples);
    free(w->beliefs);
    free(w->message);
    free(w->tokens);
    free(w);
    return clean;
}

static int status_of(const struct kc_whole *w)
{
    return w->interrupted ? 130 : kc_whole_passed(w) ? 0 : 1;
}

static int whole_main(int argc, char **argv)
{
    struct sigaction action = {.sa_handler = on_signal};
    struct kc_whole *w = calloc(1, sizeof(*w));
    struct kv_error error = {0};
    int rc, status;

    if (!w)
        return 1;
    rc = kc_whole_options(argc, argv, &w->opts, &error);
    if (rc == 0)
        rc = make_plan(w, &error);
    if (rc != 0) {
        if (rc < 0)
            fprintf(stderr, "kvasir replay: %s\n", error.text);
        free(w);
        return rc < 0 ? 2 : 0;
    }
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    w->janitor_fd = -1;
    rc = load_trace(w, &error);
    rc = rc == 0 ? direct(w, &error) : rc;
    if (rc < 0)
        fprintf(stderr, "kvasir replay: %s\n", error.text);
    status = rc < 0 ? 1 : status_of(w);
    if (!fini(w) && status == 0) {
        fputs("kvasir replay: a worker ended with an error; see its log (--dir)\n", stderr);
        status = 1;
    }
    return status;
}

/* Find `--only index`, take it out of the arguments, and run that replay. */
int kc_replay_main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "--worker") == 0)
        return kc_worker_main(3);
    for (int i = 1; i < argc; i++) {
        bool joined = strcmp(argv[i], "--only=index") == 0;
        int n = joined ? 1 : 2;

        if (!joined &&
            (strcmp(argv[i], "--only") != 0 || i + 1 == argc || strcmp(argv[i + 1], "index") != 0))
            continue;
        memmove(&argv[i], &argv[i + n], (size_t)(argc - i - n + 1) * sizeof(*argv));
        return kc_replay_index_main(argc - n, argv);
    }
    return whole_main(argc, argv);
}
