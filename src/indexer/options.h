// SPDX-License-Identifier: Apache-2.0
/**
 * The command line of kv-indexer: one struct, and one table (options.c) for parsing, environment
 * variables and --help.
 */
#ifndef KV_INDEXER_OPTIONS_H
#define KV_INDEXER_OPTIONS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/args/args.h"
#include "base/core/error.h"
#include "plane/nats_args.h"

/** Most tokens in a block of --workers and /register. */
#define KI_MAX_BLOCK_SIZE (1 << 20)

struct ki_options;

/** A program that serves with these options and some of its own: kv-selector. */
struct ki_program {
    const char *name, *brief, *summary, *footer;
    const char *env;  /* prefix of environment variables */
    const char *port; /* the default, as text */
    const struct kv_arg *args;
    size_t n_args;
    size_t size; /* of its struct, which begins with a struct ki_options */
    void (*defaults)(struct ki_options *options);
    int (*check)(const struct ki_options *options, struct kv_error *error);
};

struct ki_options {
    const struct ki_program *program; /* NULL: kv-indexer */
    const char *host;
    uint64_t port;
    uint64_t threads;
    uint64_t block_size; /* 0: not given */
    struct kv_arg_list workers;
    struct kv_arg_list discover; /* sources of workers (discover/discovery.h) */
    uint64_t discover_grace_ms;  /* time from a worker's end in its sources to its own */
    const char *dynamo;          /* discovery whose workers to follow; NULL: none */
    const char *dynamo_nats;     /* server of those that publish on NATS; NULL: none */
    const char *nats;            /* NULL: not given */
    const char *nats_cluster;
    uint64_t nats_silence_ms;
    struct kvp_nats_args nats_args;
    uint64_t hash_lookahead;
    bool eagle_drop;          /* of those workers */
    const char *eagle_groups; /* of those workers; NULL: all */
    const char *groups;       /* of those workers, as in registrations; NULL: not told */
    bool silent_windows;
    const char *report_mode; /* NULL: not told */
    const char *model_name;
    const char *tenant_id;     /* --routing-group overrides it */
    const char *routing_group; /* NULL: not given */
    struct kv_arg_list peers;
    const char *log_level;
    const char *log_format;
    const char *auth_token_file;
    bool insecure;
    const char *cacert;
    const char *tls_cert;
    const char *tls_key;
    struct kv_arg_list allow_endpoint;
    uint64_t max_registrations;
    uint64_t max_connections;
    uint64_t max_body;
    uint64_t http_threads;
    uint64_t replay_timeout_ms;
    uint64_t stale_after_ms;  /* 0: never */
    uint64_t forget_after_ms; /* 0: never */
    uint64_t worker_blocks;
    uint64_t max_blocks;
    uint64_t backlog_memory;
    uint64_t peer_interval_ms;
    uint64_t history_interval_ms; /* 0: no history */
    uint64_t unfollowed_age_ms;
    bool ignore_mm_keys;
    bool ignore_mm_offsets;
    uint64_t recovery_memory; /* 0: half of the machine's */
    uint64_t idle_timeout_ms;
    uint64_t min_initial_workers;
    const char *access_log; /* NULL: none */
    const char *trace_id_header;
    /* Sections of the configuration file: of these only what is said of workers counts. Owned. */
    struct ki_options *next;
    bool in_section; /* it is one of them */
    int argc;        /* the command line, to read all again */
    char **argv;
};

/**
 * Read the command line, the environment and the configuration file of @program, whose struct of
 * program->size bytes begins with @ret; NULL: of kv-indexer. Free the sections in @ret by ki_options_fini.
 * Returns like kv_args_parse: 0, 1 (help was printed), -EINVAL.
 */
int ki_options_parse(const struct ki_program *program, int argc, char **argv,
                     struct ki_options *ret, struct kv_error *error);

/** Return the name of the program. */
const char *ki_options_program(const struct ki_options *options);

/** Free the sections. */
void ki_options_fini(struct ki_options *options);

/** Call @fn with each option outside of sections whose value differs, but for those of workers. */
void ki_options_compare(const struct ki_options *before, const struct ki_options *after,
                        void (*fn)(void *arg, const char *name), void *arg);

/** Return true when --workers lists any. */
bool ki_options_have_workers(const struct ki_options *options);

/** One entry of --workers. */
struct ki_worker_spec {
    uint64_t instance;
    char *name; /* of the instance, owned; NULL: its number */
    uint32_t rank;
    char *endpoint;        /* owned */
    char *replay_endpoint; /* owned, or NULL */
};

/**
 * Parse @lists, each `instance_id[:dp_rank]=endpoint[+replay_endpoint],...`. An instance id is a
 * number or a name (base/args/instance.h); the last colon before the = begins the rank. Blanks around
 * entries and empty text are allowed. Returns the number of entries with *@ret for ki_worker_specs_free, or -EINVAL,
 * -ENOMEM with an @error that names the entry.
 */
long ki_worker_specs_parse(const struct kv_arg_list *lists, struct ki_worker_spec **ret,
                           struct kv_error *error);
void ki_worker_specs_free(struct ki_worker_spec *specs, long n);

/**
 * Parse comma-separated URLs. Trims them and removes trailing slashes. Returns their number,
 * -EINVAL or -ENOMEM with @error; the caller frees each URL and the array.
 */
long ki_urls_parse(const struct kv_arg_list *lists, char ***ret, struct kv_error *error);
void ki_urls_free(char **urls, long n);

#endif
