// SPDX-License-Identifier: Apache-2.0
#include "indexer/options.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/args/instance.h"
#include "base/core/ascii.h"
#include "base/core/utf8.h"
#include "http/args.h"
#include "indexer/discover/discovery.h"
#include "indexer/model/lookup.h"
#include "indexer/registry/registry.h"
#include "indexer/replica/peers.h"
#include "indexer/zmq/place.h"

#define AT(field) offsetof(struct ki_options, field)

static const struct kv_arg arguments[] = {
    KH_ARGS_SERVING(struct ki_options, "8090"),
    {.name = "Following workers", .type = KV_ARG_GROUP},
    {"workers", KV_ARG_LIST, AT(workers), "LIST",
     "Workers to register at start: instance_id[:dp_rank]=endpoint, separated by commas. "
     "An instance_id is a number or a name, such as a pod's. An entry may end in +ENDPOINT, the "
     "worker's replay endpoint. May be repeated: all lists "
     "count.",
     0, 0, NULL, false},
    {"discover", KV_ARG_LIST, AT(discover), "SOURCE",
     "Follow workers as they appear in SOURCE and leave it: kubernetes:[NAMESPACE]/SELECTOR (ready "
     "pods), dns:NAME:PORT (addresses), dns:_SERVICE._tcp.NAME (SRV records), "
     "etcd://HOST:PORT/PREFIX (keys), or file:PATH (JSON, or lines as in --workers). May be "
     "repeated: sources add up. What is said of the workers in --workers counts for them, too, "
     "unless the source says otherwise.",
     0, 0, NULL, false},
    {"discover-grace", KV_ARG_TIME, AT(discover_grace_ms), "TIME",
     "Unregister a worker that no source of --discover names any more after this time, and forget "
     "its blocks. Until then answers leave it out, and it comes back with what it had (default "
     "30s).",
     0, 86400000, NULL, false},
    {"dynamo", KV_ARG_STR, AT(dynamo), "URL",
     "Follow the workers of a Dynamo deployment as they appear and leave, by its discovery: "
     "etcd://HOST:PORT,.../NAMESPACE/COMPONENT/ENDPOINT (from the end on, the last three may be "
     "left out), etcds:// with TLS, or file:///FOLDER. Credentials of etcd follow a question mark: "
     "?user=NAME&password-file=FILE, ca=, cert=, key=FILE. What is said of the workers in "
     "--workers counts for them, too.",
     0, 0, NULL, false},
    {"dynamo-nats", KV_ARG_STR, AT(dynamo_nats), "URL",
     "Server of those workers of --dynamo that publish on NATS: nats://HOST:PORT or tls://; of a "
     "cluster several, with commas between. Credentials as for --nats. Default: they are not "
     "followed.",
     0, 0, NULL, false},
    {"nats", KV_ARG_STR, AT(nats), "URL",
     "Follow all block managers that publish on the NATS server at URL, nats://HOST:PORT or "
     "tls://; of "
     "a cluster several, with commas between. Workers appear and leave with their publishers.",
     0, 0, NULL, false},
    {"nats-cluster", KV_ARG_STR, AT(nats_cluster), "NAME",
     "Only publishers of this cluster. Default: of all.", 0, 0, NULL, false},
    {"nats-silence", KV_ARG_TIME, AT(nats_silence_ms), "TIME",
     "Unregister a worker whose publisher is silent for so long, and forget its blocks; longer "
     "than "
     "the publishers' window (default 60s).",
     100, 86400000, NULL, false},
    KVP_NATS_ARGS(struct ki_options, nats_args),
    {"block-size", KV_ARG_U64, AT(block_size), "TOKENS",
     "Tokens per block of the workers in --workers, --dynamo and --nats (required with each): 1 to "
     "1048576.",
     1, KI_MAX_BLOCK_SIZE, NULL, false},
    {"model-name", KV_ARG_STR, AT(model_name), "NAME",
     "Model of the workers in --workers (default \"default\").", 0, 0, NULL, false},
    {"tenant-id", KV_ARG_STR, AT(tenant_id), "NAME",
     "Tenant of the workers in --workers (default \"default\").", 0, 0, NULL, false},
    {"hash-lookahead", KV_ARG_U64, AT(hash_lookahead), "TOKENS",
     "Tokens after each block that the block hashes of the workers in --workers cover: 1 for "
     "SGLang with "
     "EAGLE or MTP, num_speculative_tokens at most for vLLM (default: learned from their events).",
     0, KI_MAX_LOOKAHEAD, NULL, false},
    {"routing-group", KV_ARG_STR, AT(routing_group), "NAME",
     "Another name for --tenant-id, which it outdoes.", 0, 0, NULL, true},
    {"eagle-drop", KV_ARG_FLAG, AT(eagle_drop), NULL,
     "The workers in --workers give up the last block that they find cached: vLLM does with "
     "EAGLE-like speculation and a KV connector.",
     0, 0, NULL, false},
    {"eagle-groups", KV_ARG_STR, AT(eagle_groups), "NUMBERS",
     "With --eagle-drop, the cache groups of the workers in --workers that do, separated by commas "
     "(default: all).",
     0, 0, NULL, false},
    {"groups", KV_ARG_STR, AT(groups), "JSON",
     "Cache groups of the workers in --workers, as the field groups of a registration: of chunked "
     "local attention (Llama 4) events don't tell the chunk.",
     0, 0, NULL, false},
    {"silent-windows", KV_ARG_FLAG, AT(silent_windows), NULL,
     "The workers in --workers evict from sliding windows or recurrent states without an event, as "
     "SGLang's hybrid models do: their views stay partial.",
     0, 0, NULL, false},
    {"kv-cache-report-mode", KV_ARG_CHOICE, AT(report_mode), "MODE",
     "Whether requests to the workers in --workers set kv_cache_report_mode to full "
     "(default: seen in their events).",
     0, 0, "full|incremental", false},
    {"threads", KV_ARG_U64, AT(threads), "N",
     "Threads that read event streams; streams are spread over them (default 4).", 1, 256, NULL,
     false},
    {"peers", KV_ARG_LIST, AT(peers), "URLS",
     "Other indexers, separated by commas; the first that answers provides the starting state, and "
     "the workers that are registered there are followed here as well.",
     0, 0, NULL, false},
    {"cacert", KV_ARG_STR, AT(cacert), "FILE",
     "Trust https peers by the PEM authorities in FILE instead of the system's.", 0, 0, NULL,
     false},
    {"peer-interval", KV_ARG_TIME, AT(peer_interval_ms), "TIME",
     "Interval at which peers are asked which workers they have registered and unregistered "
     "(default 2s).",
     100, 3600000, NULL, false},
    {"history-interval", KV_ARG_TIME, AT(history_interval_ms), "TIME",
     "Interval of the samples that GET /history and the web page show; the last 360 are kept, an "
     "hour "
     "of the default 10s. 0: none.",
     0, 3600000, NULL, false},
    {"unfollowed-age", KV_ARG_TIME, AT(unfollowed_age_ms), "TIME",
     "Forget blocks of a peer's dump whose worker is not registered here after this time "
     "(default 10m).",
     1000, 86400000, NULL, false},
    {"min-initial-workers", KV_ARG_U64, AT(min_initial_workers), "N",
     "Answer 503 on /health, and report no readiness to systemd, until N worker instances have "
     "been registered (default 0; also DYN_ROUTER_MIN_INITIAL_WORKERS).",
     0, 1 << 20, NULL, false},
    {"replay-timeout", KV_ARG_TIME, AT(replay_timeout_ms), "TIME",
     "Give up a replay that brings no batch for this time (default 5s).", 1, 3600000, NULL, false},
    {"stale-after", KV_ARG_TIME, AT(stale_after_ms), "TIME",
     "Call the view of a worker partial that has had no connection for this time (default 5s; "
     "0: never).",
     0, 86400000, NULL, false},
    {"forget-after", KV_ARG_TIME, AT(forget_after_ms), "TIME",
     "Forget the blocks of a worker that has had no connection for this time; they are learned "
     "anew when it is back (default 60s; 0: never).",
     0, 86400000, NULL, false},
    {"worker-blocks", KV_ARG_U64, AT(worker_blocks), "N",
     "Blocks that a worker rank has room for, in all tiers, where its registration doesn't say "
     "num_blocks; bounds what is believed after losses (default: unknown).",
     1, UINT32_MAX, NULL, false},
    {"max-blocks", KV_ARG_U64, AT(max_blocks), "N",
     "Distinct blocks in the index of a model; more are left out (default: 4 billion).", 1,
     UINT32_MAX, NULL, false},
    {"backlog-memory", KV_ARG_SIZE, AT(backlog_memory), "SIZE",
     "Events that wait for replays, of all streams; one may have a quarter (default 256MiB).",
     4u << 20, UINT64_MAX, NULL, false},
    {"ignore-mm-keys", KV_ARG_FLAG, AT(ignore_mm_keys), NULL,
     "Leave images that events name in extra_keys out of block hashes, as Dynamo 1.6 does. Prompts "
     "that differ in their images alone then match.",
     0, 0, NULL, false},
    {"ignore-mm-offsets", KV_ARG_FLAG, AT(ignore_mm_offsets), NULL,
     "Leave the places of images, which vLLM hashes, out of block hashes: for clients of "
     "/query_by_hash and block_mm_infos that don't know them.",
     0, 0, NULL, false},
    {"recovery-memory", KV_ARG_SIZE, AT(recovery_memory), "SIZE",
     "Skip a peer whose state takes more memory than this (default: half of the machine's).",
     1u << 20, UINT64_MAX, NULL, false},
    KH_ARGS_PROTECTION(struct ki_options),
    {"allow-endpoint", KV_ARG_LIST, AT(allow_endpoint), "RULE",
     "Connect only to these worker endpoints: tcp://10.0.0.0/16:5557, tcp://[fd00::/8], "
     "tcp://host:5557-5564, tcp://*.example.com, ipc:///run/engines/* (may be repeated; default: "
     "any). Networks admit addresses, not host names; without a port, all ports.",
     0, 0, NULL, false},
    {.name = "Limits", .type = KV_ARG_GROUP},
    {"max-registrations", KV_ARG_U64, AT(max_registrations), "N",
     "Refuse more registered (instance, dp_rank) pairs (default 4096).", 1, 1 << 20, NULL, false},
    KH_ARG_MAX_CONNECTIONS(struct ki_options),
    {"max-body", KV_ARG_SIZE, AT(max_body), "SIZE",
     "Largest body of /query and /query_by_hash (default 8MiB: a million tokens as JSON).", 1024,
     UINT64_C(1) << 30, NULL, false},
    KH_ARG_IDLE_TIMEOUT(struct ki_options),
    KH_ARGS_LOGGING(struct ki_options),
};

static const char summary[] =
    "Follows the KV cache events of LLM engines (vLLM, SGLang, ... over ZMQ) and\n"
    "answers over HTTP which worker holds how much of a prompt's prefix.";

static const char footer[] =
    "Examples:\n"
    "  kv-indexer\n"
    "      Start empty on port 8090; workers are added with POST /register.\n"
    "  kv-indexer --block-size 16 --model-name llama \\\n"
    "             --workers 1=tcp://w1:5557,2:1=tcp://w2:5558\n"
    "      Follow two workers from the start (the second one's events are of rank 1).\n"
    "  kv-indexer --port 8091 --peers http://localhost:8090 ...\n"
    "      A replica that takes its starting state from a running one.\n"
    "  kv-indexer --auth-token-file tokens --tls-cert c.pem --tls-key k.pem\n"
    "      Open to other machines, with tokens, over HTTPS.\n"
    "  curl localhost:8090/query -H 'Content-Type: application/json' \\\n"
    "       -d '{\"model_name\":\"llama\",\"token_ids\":[1,2,3],\"explain\":true}'\n"
    "      Ask, with an explanation when nothing matches.\n"
    "\n"
    "TIME is a number with ms, s, m, h or d, SIZE one with KiB, MiB, GiB, KB, MB or\n"
    "GB; a bare number is seconds, or bytes.\n"
    "File descriptors: a registration takes 1, or 3 during a replay; an HTTP\n"
    "connection 1. The soft limit is raised to the hard limit at start; for thousands\n"
    "of workers raise the hard one (ulimit -Hn, or LimitNOFILE= in a systemd unit).\n"
    "Memory: about 24 bytes for each block and worker that holds it. Bodies being\n"
    "read take at most 64 KiB for each connection and 256 MiB together; a client\n"
    "that takes more than others leave gets 503. /metrics shows\n"
    "kv_indexer_index_bytes. To bound the whole process use MemoryMax= or a\n"
    "container limit.\n"
    "Signals: SIGTERM and SIGINT end it after the requests in progress (5 s at\n"
    "most); SIGHUP reads token file, certificate and configuration again: workers,\n"
    "their sources and log level change, other options need a restart. Under systemd\n"
    "(Type=notify) it reports when it is ready.\n";

/* Options of workers, which may stand in sections; the section's name is their model's. */
static const char of_workers[] =
    "workers|discover|dynamo|dynamo-nats|block-size|tenant-id|routing-group|hash-lookahead|"
    "eagle-drop|eagle-groups|groups|silent-windows|kv-cache-report-mode";

static void *begin_section(void *values, const char *name)
{
    struct ki_options *section = calloc(1, sizeof(*section)),
                      **last = &((struct ki_options *)values)->next;

    if (!section)
        return NULL;
    section->model_name = name;
    section->tenant_id = "default";
    while (*last)
        last = &(*last)->next;
    *last = section;
    return section;
}

static const struct kv_args_program indexer_program = {
    .name = "kv-indexer",
    .usage = "[OPTION ...]",
    .brief = "tell routers which LLM worker holds how much of a prompt",
    .summary = summary,
    .footer = footer,
    .env = "KV_INDEXER",
    .config = true,
    .env_others = "TEST_ENDPOINTS",
    .section = begin_section,
    .in_sections = of_workers,
    .args = arguments,
    .n_args = KV_COUNT(arguments),
};

/* Put the rows of both into @ret, the program's own first. */
static void join_rows(const struct ki_program *program, struct kv_arg *ret, char *port_help,
                      size_t size)
{
    memcpy(ret, program->args, program->n_args * sizeof(*ret));
    memcpy(ret + program->n_args, arguments, sizeof(arguments));
    snprintf(port_help, size, "HTTP port (default %s; 0 picks a free one and logs it).",
             program->port);
    for (size_t i = 0; i < program->n_args + KV_COUNT(arguments); i++)
        if (ret[i].type != KV_ARG_GROUP && strcmp(ret[i].name, "port") == 0)
            ret[i].help = port_help;
}

static int parse_args(const struct ki_program *program, int argc, char **argv,
                      struct ki_options *ret, struct kv_error *error)
{
    struct kv_args_program joined = indexer_program;
    struct kv_arg *rows;
    char port_help[80];
    int rc;

    if (!program)
        return kv_args_parse(&indexer_program, argc, argv, ret, NULL, error);
    joined.n_args = program->n_args + KV_COUNT(arguments);
    rows = calloc(joined.n_args, sizeof(*rows));
    if (!rows)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    join_rows(program, rows, port_help, sizeof(port_help));
    joined.name = program->name;
    joined.brief = program->brief;
    joined.summary = program->summary;
    joined.footer = program->footer;
    joined.env = program->env;
    joined.args = rows;
    rc = kv_args_parse(&joined, argc, argv, ret, NULL, error);
    free(rows);
    return rc;
}

static bool is_blank(const char *text)
{
    return text[strspn(text, " \t\r\n,")] == '\0';
}

bool ki_options_have_workers(const struct ki_options *options)
{
    bool any = false;

    for (size_t i = 0; i < options->workers.n; i++)
        any |= !is_blank(options->workers.items[i]);
    return any;
}

static bool are_utf8(const struct kv_arg_list *list)
{
    bool valid = true;

    for (size_t i = 0; i < list->n; i++)
        valid &= kv_utf8_valid(list->items[i]);
    return valid;
}

/* Check what is said of workers: in the command line's part, or a section's. */
static int check_fleet(const struct ki_options *o, struct kv_error *error)
{
    struct kv_error why = {0};

    if (ki_options_have_workers(o) && !o->block_size)
        return kv_fail(error, -EINVAL, 0,
                       "%s%.60s%s--block-size is required when --workers is specified",
                       o->in_section ? "section [" : "", o->in_section ? o->model_name : "",
                       o->in_section ? "]: " : "");
    if (o->dynamo && !o->block_size)
        return kv_fail(error, -EINVAL, 0,
                       "%s%.60s%s--block-size is required when --dynamo is specified",
                       o->in_section ? "section [" : "", o->in_section ? o->model_name : "",
                       o->in_section ? "]: " : "");
    if (o->dynamo_nats && !o->dynamo)
        return kv_fail(error, -EINVAL, 0, "--dynamo-nats needs --dynamo");
    if (o->dynamo && ki_dynamo_check(o->dynamo, &why) < 0)
        return kv_fail(error, -EINVAL, 0, "--dynamo '%.80s': %.120s", o->dynamo, why.text);
    for (size_t i = 0; i < o->discover.n; i++)
        if (ki_discovery_check(o->discover.items[i], &why) < 0)
            return kv_fail(error, -EINVAL, 0, "--discover '%.80s': %.110s", o->discover.items[i],
                           why.text);
    if (!*o->model_name || !*o->tenant_id)
        return kv_fail(error, -EINVAL, 0, "--model-name and --tenant-id must not be empty");
    if (!kv_utf8_valid(o->model_name) || !kv_utf8_valid(o->tenant_id) || !are_utf8(&o->workers))
        return kv_fail(error, -EINVAL, 0, "--model-name, --tenant-id and --workers must be UTF-8");
    return 0;
}

static int check(const struct ki_options *o, struct kv_error *error)
{
    const char *why = "";

    for (size_t i = 0; i < o->allow_endpoint.n; i++)
        if (ki_place_check_rule(o->allow_endpoint.items[i], &why) < 0)
            return kv_fail(error, -EINVAL, 0, "--allow-endpoint '%.80s': %s",
                           o->allow_endpoint.items[i], why);
    return kh_args_check(o->tls_cert, o->tls_key, o->insecure, o->auth_token_file,
                         o->trace_id_header, error);
}

/* -- what has changed -------------------------------------------------------------------------- */

static bool same_list(const struct kv_arg_list *a, const struct kv_arg_list *b)
{
    bool same = a->n == b->n;

    for (size_t i = 0; same && i < a->n; i++)
        same = kv_same_text(a->items[i], b->items[i]);
    return same;
}

static bool same_value(const struct kv_arg *arg, const void *a, const void *b)
{
    switch (arg->type) {
    case KV_ARG_FLAG:
        return *(const bool *)a == *(const bool *)b;
    case KV_ARG_STR:
    case KV_ARG_CHOICE:
        return kv_same_text(*(const char *const *)a, *(const char *const *)b);
    case KV_ARG_LIST:
        return same_list(a, b);
    case KV_ARG_U64:
    case KV_ARG_SIZE:
    case KV_ARG_TIME:
    case KV_ARG_NANO:
        return *(const uint64_t *)a == *(const uint64_t *)b;
    case KV_ARG_GROUP:
        break;
    }
    return true;
}

/* Return true for an option whose change counts without a restart. */
static bool is_of_workers(const char *name)
{
    return kv_args_is_choice(of_workers, name) || strcmp(name, "model-name") == 0;
}

/* Return true for an option that workers of --nats take from the start's. */
static bool is_of_nats(const struct ki_options *o, const char *name)
{
    return o->nats && kv_args_is_choice("block-size|model-name|tenant-id|routing-group", name);
}

static void compare_rows(const struct kv_arg *rows, size_t n, const struct ki_options *before,
                         const struct ki_options *after, void (*fn)(void *arg, const char *name),
                         void *arg)
{
    for (size_t i = 0; i < n; i++) {
        const struct kv_arg *row = &rows[i];

        if ((!is_of_workers(row->name) || is_of_nats(before, row->name)) &&
            !same_value(row, (const char *)before + row->offset, (const char *)after + row->offset))
            fn(arg, row->name);
    }
}

void ki_options_compare(const struct ki_options *before, const struct ki_options *after,
                        void (*fn)(void *arg, const char *name), void *arg)
{
    compare_rows(arguments, KV_COUNT(arguments), before, after, fn, arg);
    if (before->program)
        compare_rows(before->program->args, before->program->n_args, before, after, fn, arg);
}

/* -- parsing ----------------------------------------------------------------------------------- */

static const struct ki_options defaults = {
    .host = "0.0.0.0",
    .port = 8090,
    .threads = 4,
    .model_name = "default",
    .tenant_id = "default",
    .log_level = "info",
    .log_format = "text",
    .max_registrations = 4096,
    .max_connections = 4096,
    .max_body = 8 << 20,
    .http_threads = 4,
    .replay_timeout_ms = 5000,
    .stale_after_ms = 5000,
    .forget_after_ms = 60000,
    .peer_interval_ms = 2000,
    .history_interval_ms = 10000,
    .unfollowed_age_ms = 600000,
    .nats_silence_ms = 60000,
    .discover_grace_ms = 30000,
    .idle_timeout_ms = 75000,
    .trace_id_header = "x-trace-id",
};

/* Read DYN_ROUTER_MIN_INITIAL_WORKERS, the original's variable; ours overrides it. */
static int read_initial(struct ki_options *ret, struct kv_error *error)
{
    const char *initial = getenv("DYN_ROUTER_MIN_INITIAL_WORKERS");

    if (initial && *initial &&
        (kv_parse_u64(initial, &ret->min_initial_workers) < 0 ||
         ret->min_initial_workers > 1 << 20))
        return kv_fail(error, -EINVAL, 0, "DYN_ROUTER_MIN_INITIAL_WORKERS: expected a number");
    return 0;
}

int ki_options_parse(const struct ki_program *program, int argc, char **argv,
                     struct ki_options *ret, struct kv_error *error)
{
    int rc;

    if (program)
        memset(ret, 0, program->size);
    *ret = defaults;
    ret->program = program;
    if (program)
        program->defaults(ret);
    rc = read_initial(ret, error);
    if (rc == 0)
        rc = parse_args(program, argc, argv, ret, error);
    if (rc == 0)
        rc = check(ret, error);
    if (rc == 0 && program)
        rc = program->check(ret, error);
    for (struct ki_options *o = ret; o && rc == 0; o = o->next) {
        if (o->routing_group)
            o->tenant_id = o->routing_group;
        o->in_section = o != ret;
        rc = check_fleet(o, error);
    }
    if (rc != 0)
        ki_options_fini(ret);
    ret->argc = argc;
    ret->argv = argv;
    return rc;
}

const char *ki_options_program(const struct ki_options *options)
{
    return options->program ? options->program->name : indexer_program.name;
}

void ki_options_fini(struct ki_options *options)
{
    while (options->next) {
        struct ki_options *section = options->next;

        options->next = section->next;
        free(section);
    }
}

/* -- lists ------------------------------------------------------------------------------------- */

/*
 * Return the next entry of a comma-separated list, trimmed; false at the end. Moves *@p behind it.
 */
static bool next_entry(const char **p, const char **ret, size_t *ret_len)
{
    const char *start = *p, *end;

    if (!start)
        return false;
    end = strchrnul(start, ',');
    *p = *end ? end + 1 : NULL;
    while (start < end && isspace((unsigned char)*start))
        start++;
    while (end > start && isspace((unsigned char)end[-1]))
        end--;
    *ret = start;
    *ret_len = (size_t)(end - start);
    return true;
}

static size_t count_entries(const char *text)
{
    size_t n = 1;

    for (; *text; text++)
        n += *text == ',';
    return n;
}

/* Find the replay endpoint of an entry: behind a '+' that is followed by a scheme like "tcp://". */
static char *find_replay(char *endpoint)
{
    for (char *p = strchr(endpoint, '+'); p; p = strchr(p + 1, '+')) {
        size_t scheme = strspn(p + 1, "abcdefghijklmnopqrstuvwxyz");

        if (scheme && strncmp(p + 1 + scheme, "://", 3) == 0)
            return p;
    }
    return NULL;
}

static int check_endpoint(const char *entry, const char *endpoint, struct kv_error *error)
{
    struct ki_place parsed;
    const char *why = "";

    if (ki_place_parse(endpoint, &parsed, &why) < 0)
        return kv_fail(error, -EINVAL, 0, "--workers entry '%.60s': invalid ZMQ endpoint: %s",
                       entry, why);
    return 0;
}

static int parse_ids(char *ids, const char *entry, struct ki_worker_spec *spec,
                     struct kv_error *error)
{
    char *colon = strrchr(ids, ':');
    const char *why = NULL;
    uint64_t rank = 0;
    int kind;

    if (colon)
        *colon = '\0';
    kind = kv_instance_parse(ids, strlen(ids), &spec->instance, &why);
    if (kind < 0)
        return kv_fail(error, -EINVAL, 0, "--workers entry '%.60s': instance id: %s", entry, why);
    if (colon && (kv_parse_u64(colon + 1, &rank) < 0 || rank > UINT32_MAX))
        return kv_fail(error, -EINVAL, 0,
                       "--workers entry '%.60s': the dp_rank must be a number below 2^32", entry);
    spec->rank = (uint32_t)rank;
    spec->name = kind == KV_INSTANCE_NAME ? strdup(ids) : NULL;
    if (kind == KV_INSTANCE_NAME && !spec->name)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    return 0;
}

/* Parse an entry. @entry is NUL-terminated, for messages; @ids is a copy that is cut up. */
static int parse_worker(const char *entry, char *ids, struct ki_worker_spec *spec,
                        struct kv_error *error)
{
    char *equals = strchr(ids, '='), *replay;
    int rc;

    if (!equals)
        return kv_fail(error, -EINVAL, 0,
                       "--workers entry '%.60s': expected instance_id[:dp_rank]=endpoint", entry);
    *equals = '\0';
    rc = parse_ids(ids, entry, spec, error);
    if (rc < 0)
        return rc;
    replay = find_replay(equals + 1);
    if (replay)
        *replay++ = '\0';
    rc = check_endpoint(entry, equals + 1, error);
    if (rc == 0 && replay)
        rc = check_endpoint(entry, replay, error);
    if (rc < 0)
        return rc;
    spec->endpoint = strdup(equals + 1);
    spec->replay_endpoint = replay ? strdup(replay) : NULL;
    if (!spec->endpoint || (replay && !spec->replay_endpoint))
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    return 0;
}

/* Count the entries of all lists, at least 1. */
static size_t count_all(const struct kv_arg_list *lists)
{
    size_t n = 1;

    for (size_t i = 0; i < lists->n; i++)
        n += count_entries(lists->items[i]);
    return n;
}

/* Parse the entries of one list behind the *@n that are there. */
static int parse_workers(const char *text, struct ki_worker_spec *specs, long *n,
                         struct kv_error *error)
{
    const char *entry;
    size_t len;
    int rc = 0;

    if (is_blank(text))
        return 0;
    while (rc == 0 && next_entry(&text, &entry, &len)) {
        char *name = strndup(entry, len), *copy = strndup(entry, len);

        if (!name || !copy)
            rc = kv_fail(error, -ENOMEM, 0, "out of memory");
        else
            rc = parse_worker(name, copy, &specs[(*n)++], error);
        free(name);
        free(copy);
    }
    return rc;
}

long ki_worker_specs_parse(const struct kv_arg_list *lists, struct ki_worker_spec **ret,
                           struct kv_error *error)
{
    struct ki_worker_spec *specs = calloc(count_all(lists), sizeof(*specs));
    long n = 0;
    int rc = 0;

    if (!specs)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    for (size_t i = 0; i < lists->n && rc == 0; i++)
        rc = parse_workers(lists->items[i], specs, &n, error);
    if (rc < 0) {
        ki_worker_specs_free(specs, n);
        return rc;
    }
    *ret = specs;
    return n;
}

void ki_worker_specs_free(struct ki_worker_spec *specs, long n)
{
    for (long i = 0; i < n; i++) {
        free(specs[i].name);
        free(specs[i].endpoint);
        free(specs[i].replay_endpoint);
    }
    free(specs);
}

static int parse_urls(const char *text, char **urls, long *n, struct kv_error *error)
{
    const char *entry;
    size_t len;

    while (next_entry(&text, &entry, &len)) {
        while (len && entry[len - 1] == '/')
            len--;
        if (len == 0)
            continue;
        urls[*n] = strndup(entry, len);
        if (!urls[*n])
            return kv_fail(error, -ENOMEM, 0, "out of memory");
        if (!ki_peer_url_is_valid(urls[(*n)++]))
            return kv_fail(error, -EINVAL, 0, "--peers entry '%.*s': expected " KI_PEER_URL_FORM,
                           (int)KV_MIN(len, (size_t)60), entry);
    }
    return 0;
}

long ki_urls_parse(const struct kv_arg_list *lists, char ***ret, struct kv_error *error)
{
    char **urls = calloc(count_all(lists), sizeof(*urls));
    long n = 0;
    int rc = 0;

    if (!urls)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    for (size_t i = 0; i < lists->n && rc == 0; i++)
        rc = parse_urls(lists->items[i], urls, &n, error);
    if (rc < 0) {
        ki_urls_free(urls, n);
        return rc;
    }
    *ret = urls;
    return n;
}

void ki_urls_free(char **urls, long n)
{
    for (long i = 0; i < n; i++)
        free(urls[i]);
    free(urls);
}
