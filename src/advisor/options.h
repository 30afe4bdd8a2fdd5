// SPDX-License-Identifier: Apache-2.0
/** Options of kv-advisor: its command line, environment and configuration file. */
#ifndef KV_ADVISOR_OPTIONS_H
#define KV_ADVISOR_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "advisor/packer.h"
#include "base/core/error.h"
#include "plane/nats_args.h"

struct kva_options {
    const char *store; /* "tiered:/FILE", or the file's path */
    const char *path;  /* of that file */
    bool dry_run;
    const char *state, *lock_folder, *lock; /* NULL: none */
    uint64_t lock_ttl_ms, samples, prefill, gpu_hour_nano, block_tokens;
    const char *policy;
    uint64_t share, bytes_per_s, requests_per_s, reclaim_ms, scan_ms, max_blobs, half_life_ms;
    uint64_t pack_after_ms, pack_least, pack_most, pack_grace_ms; /* pack_after_ms 0: no packs */
    const char *quiet_hours;                                      /* NULL: none */
    uint32_t quiet_from, quiet_to;
    const char *nats, *nats_cluster; /* NULL: none */
    uint64_t nats_silence_ms;
    struct kvp_nats_args nats_args;
    /* http/args.h */
    const char *host, *tls_cert, *tls_key, *auth_token_file, *access_log, *trace_id_header,
        *log_level, *log_format;
    uint64_t port, http_threads, max_connections, idle_timeout_ms;
    bool insecure;
};

/** Read all options. Returns as kv_args_parse does. */
int kva_options_parse(int argc, char **argv, struct kva_options *ret, struct kv_error *error);

/** Return what is packed, and when. */
struct kva_packing kva_options_packing(const struct kva_options *options);

/** Read "22:00-06:30" as minutes of the day. Returns 0; -EINVAL. */
int kva_parse_hours(const char *text, uint32_t *ret_from, uint32_t *ret_to);

#endif
