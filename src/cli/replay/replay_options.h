// SPDX-License-Identifier: Apache-2.0
/** The command line of `kvasir replay`. */
#ifndef KV_CLI_REPLAY_REPLAY_OPTIONS_H
#define KV_CLI_REPLAY_REPLAY_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/core/error.h"
#include "cli/client/token.h"
#include "cli/replay/route.h"

struct kc_replay_opts {
    const char *trace;            /* NULL: generate a trace */
    const char *indexer;          /* NULL: find the program */
    const char *url;              /* NULL: start an indexer */
    const char *cacert;           /* NULL: the system's; only with url */
    const char *auth_token_file;  /* NULL: no token; only with url */
    char token[KC_TOKEN_MAX + 1]; /* first token of the file, "" without */
    const char *model;
    const char *policy_name;
    enum kc_policy policy;
    uint64_t workers;
    uint64_t blocks; /* per worker; 0: unlimited, UINT64_MAX: a default number of tokens */
    uint64_t block_size;
    uint64_t requests; /* 0: the whole trace once */
    uint64_t seconds;  /* 0: no limit */
    uint64_t rate;     /* multiple of the trace's own pace; 0: as fast as possible */
    uint64_t clients;
    uint64_t prefill; /* tokens per second and worker */
    uint64_t seed;
    uint64_t verify;
    uint64_t settle_ms;
    uint64_t buffer_batches;
    const char *json; /* NULL: no JSON; "-": stdout */
    bool msgpack;
    bool own_hashes;
    bool lockstep;
    bool check_hits;
    bool quiet;
};

/**
 * Parse the command line. Returns like kv_args_parse: 0, 1 (help was printed), -EINVAL with @error.
 */
int kc_replay_options(int argc, char **argv, struct kc_replay_opts *ret, struct kv_error *error);

#endif
