// SPDX-License-Identifier: Apache-2.0
#include "indexer/service.h"

#include <inttypes.h>
#include <stdio.h>
#include <strings.h>
#include <sys/resource.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "http/tls.h"
#include "indexer/configured.h"
#include "indexer/main_loop.h"
#include "indexer/replica/recovery.h"

#define BODIES_BYTES (256u << 20)
#define MAX_STREAMS 4
#define DRAIN_MS 5000
#define FDS_PER_REGISTRATION 3 /* the connection; a replay's DEALER and its connection */
#define FDS_OF_ITS_OWN 96      /* event and HTTP threads, ZMQ's own, the log, peers, dumps */

/* -- limits ------------------------------------------------------------------------------------ */

/*
 * Share out the descriptors before the first socket opens, because a process without free
 * descriptors can't even log. The process keeps some, HTTP connections get up to half of the rest,
 * listeners the remainder. Beyond its share each side refuses: connections make room, /register
 * answers 503.
 */
static int share_descriptors(const struct ki_options *options, uint32_t *ret_connections,
                             uint32_t *ret_registrations, struct kv_error *error)
{
    struct rlimit limit = {RLIM_INFINITY, RLIM_INFINITY};
    uint64_t room, connections, registrations;

    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur < limit.rlim_max) {
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
        getrlimit(RLIMIT_NOFILE, &limit);
    }
    if (limit.rlim_cur < FDS_OF_ITS_OWN + 32)
        return kv_fail(error, -EMFILE, 0,
                       "%" PRIu64 " file descriptors are too few: allow at least %d (ulimit -n)",
                       (uint64_t)limit.rlim_cur, FDS_OF_ITS_OWN + 32);
    room = (uint64_t)limit.rlim_cur - FDS_OF_ITS_OWN;
    connections = KV_MIN(room / 2, options->max_connections);
    registrations = KV_MIN((room - connections) / FDS_PER_REGISTRATION, options->max_registrations);
    if (connections < options->max_connections || registrations < options->max_registrations)
        kv_log_info("service", "limits lowered: the descriptor limit is too low",
                    "nofile=%" PRIu64 " connections=%" PRIu64 " registrations=%" PRIu64,
                    (uint64_t)limit.rlim_cur, connections, registrations);
    *ret_connections = (uint32_t)connections;
    *ret_registrations = (uint32_t)registrations;
    return 0;
}

/* -- start ------------------------------------------------------------------------------------- */

static void log_recovery(int rc, const struct ki_recovery_result *result)
{
    char quoted[300];

    if (rc < 0)
        kv_log_warn("service", "no peer could be recovered from; starting empty", NULL);
    else
        kv_log_info("service", "recovered from a peer",
                    "peer=%s models=%" PRIu64 " events=%" PRIu64 " blocks=%" PRIu64
                    " torn_ranks=%" PRIu64 " seconds=%.3f",
                    kv_log_quote(quoted, sizeof(quoted), result->peer), result->models,
                    result->events, result->blocks, result->torn, result->seconds);
}

static int follow_peers(struct ki_service *service, struct kv_error *error)
{
    const struct ki_options *o = service->options;
    const struct ki_follow_opts opts = {
        .registry = service->registry,
        .peers = service->peers,
        .auth = service->auth,
        .ca_file = o->cacert,
        .interval_ms = o->peer_interval_ms,
        .age_ms = o->unfollowed_age_ms,
    };
    int rc = ki_follow_create(&opts, &service->follow);

    return rc < 0 ? kv_fail(error, rc, 0, "can't start: %s", strerror(-rc)) : 0;
}

/* Recover from a peer. The event streams are applied afterwards, whatever the result. */
static int recover(struct ki_service *service, struct kv_error *error)
{
    const struct ki_options *o = service->options;
    char *token = kh_auth_first_token(service->auth);
    struct ki_recovery_opts opts = {.size = sizeof(opts),
                                    .token = token,
                                    .ca_file = o->cacert,
                                    .max_bytes = o->recovery_memory,
                                    .max_blocks = o->max_blocks,
                                    .stop = &ki_signals.stop};
    struct ki_recovery_result result = {0};
    char **urls = NULL;
    long n = ki_urls_parse(&o->peers, &urls, error);
    int rc = 0;

    if (n > 0) {
        log_recovery(
            ki_recover(service->registry, (const char *const *)urls, (size_t)n, &opts, &result),
            &result);
        for (long i = 0; i < n && rc == 0; i++)
            rc = ki_peers_add(service->peers, urls[i]);
        if (rc < 0)
            kv_fail(error, rc, 0, "--peers: too many, or too long");
    }
    if (n >= 0)
        ki_urls_free(urls, n);
    if (token)
        explicit_bzero(token, strlen(token));
    free(token);
    if (n < 0)
        return (int)n;
    ki_registry_go(service->registry);
    return rc < 0 ? rc : follow_peers(service, error);
}

static bool test_endpoints_wanted(void)
{
    static const char *const names[] = {"KV_INDEXER_TEST_ENDPOINTS",
                                        "DYN_KV_INDEXER_TEST_ENDPOINTS"};
    static const char *const yes[] = {"1", "true", "yes", "on"};

    for (size_t i = 0; i < KV_COUNT(names); i++) {
        const char *value = getenv(names[i]);

        for (size_t k = 0; value && k < KV_COUNT(yes); k++)
            if (strcasecmp(value, yes[k]) == 0)
                return true;
    }
    return false;
}

static bool admit(void *arg, const struct kh_request *request, struct kh_reply *reply)
{
    return kh_auth_admit(((struct ki_service *)arg)->auth, request, reply);
}

static void log_access(struct ki_service *service, const struct kh_request *request,
                       unsigned status)
{
    struct kh_access access = {
        .method = request->method,
        .path = request->route ? request->route->path : "unknown",
        .model = request->model[0] ? request->model : NULL,
        .status = status,
        .duration_ns = kv_now_ns() - request->started_ns,
    };

    (void)kh_request_header(request, service->options->trace_id_header, &access.trace_id);
    kh_access_log_put(service->access_log, &access);
}

static void observe(void *arg, const struct kh_request *request, unsigned status)
{
    struct ki_service *service = arg;
    char path[128];

    if (service->access_log)
        log_access(service, request, status);

    ki_telemetry_request(service->telemetry, request, status);
    kv_log_debug("http", "request", "method=%.10s path=%s status=%u bytes=%zu ms=%.3f",
                 request->method, kv_log_quote(path, sizeof(path), request->path), status,
                 request->body.len, (double)(kv_now_ns() - request->started_ns) / 1e6);
}

static void log_listening(const struct ki_options *o, uint16_t port)
{
    bool v6 = strchr(o->host, ':') != NULL;

    kv_log_info("service", "listening", "url=%s://%s%s%s:%u admits=%s",
                o->tls_cert ? "https" : "http", v6 ? "[" : "", o->host, v6 ? "]" : "", port,
                o->auth_token_file ? "tokens"
                : o->insecure      ? "everybody"
                                   : "this-machine");
}

static int start_http(struct ki_service *service, int fd, struct kv_error *error)
{
    const struct ki_options *o = service->options;
    struct kh_http_opts opts = {
        .threads = (uint32_t)o->http_threads,
        .max_connections = service->max_connections,
        .idle_timeout_ms = o->idle_timeout_ms,
        .bodies_bytes = KV_MAX((size_t)BODIES_BYTES, (size_t)(8 * o->max_body)),
        .max_streams = MAX_STREAMS + (service->addition ? service->addition->streams : 0),
        .tls = o->tls_cert != NULL,
        .routes = service->routes,
        .n_routes = service->n_routes,
        .admit = admit,
        .observe = observe,
        .arg = service,
    };
    struct kh_http *http = NULL;
    int rc = kh_http_start(fd, &opts, &http, error);

    if (rc == 0)
        atomic_store_explicit(&service->http, http, memory_order_release);
    return rc;
}

bool ki_service_is_ready(struct ki_service *service)
{
    struct ki_worker_info *infos;
    uint64_t instances = 0;
    long n;

    if (!service->options->min_initial_workers ||
        atomic_load_explicit(&service->ready, memory_order_relaxed))
        return true;
    n = ki_registry_workers(service->registry, &infos);
    for (long i = 0; i < n; i++)
        instances += i == 0 || infos[i].instance != infos[i - 1].instance;
    if (n >= 0)
        ki_worker_infos_free(infos, n);
    if (instances < service->options->min_initial_workers)
        return false;
    atomic_store_explicit(&service->ready, true, memory_order_relaxed);
    return true;
}

static int create_parts(struct ki_service *service, struct kv_error *error)
{
    const struct ki_options *o = service->options;
    struct ki_registry_opts opts = {
        .threads = (uint32_t)o->threads,
        .allow = &o->allow_endpoint,
        .replay_timeout_ms = o->replay_timeout_ms,
        .stale_after_ms = o->stale_after_ms,
        .forget_after_ms = o->forget_after_ms,
        .backlog_bytes = o->backlog_memory,
        .worker_blocks = o->worker_blocks,
        .max_blocks = o->max_blocks,
        .ignore_mm_keys = o->ignore_mm_keys,
        .ignore_mm_offsets = o->ignore_mm_offsets,
        .start_held = true,
        .drained = &ki_signals.wake,
    };
    int rc = share_descriptors(o, &service->max_connections, &service->max_registrations, error);

    opts.max_registrations = service->max_registrations;
    if (rc == 0)
        rc = kh_auth_create(o->auth_token_file, o->insecure, &service->auth, error);
    if (rc == 0 && o->access_log)
        rc = kh_access_log_open(o->access_log, &service->access_log, error);
    if (rc == 0 && o->tls_cert)
        rc = kh_tls_create(o->tls_cert, o->tls_key, &service->tls, error);
    if (rc < 0)
        return rc;
    rc = ki_routes(service, test_endpoints_wanted());
    if (rc == 0)
        rc = ki_telemetry_create(service->routes, service->n_routes, &service->telemetry);
    if (rc == 0)
        rc = ki_history_create(o->history_interval_ms, &service->history);
    if (rc == 0)
        rc = ki_peers_create(&service->peers);
    if (rc == 0)
        rc = ki_registry_create(&opts, &service->registry);
    return rc < 0 ? kv_fail(error, rc, 0, "can't start: %s", strerror(-rc)) : 0;
}

/* -- stop -------------------------------------------------------------------------------------- */

static void destroy_parts(struct ki_service *service)
{
    if (service->addition && service->added)
        service->addition->end(service);
    kh_http_stop(atomic_load_explicit(&service->http, memory_order_acquire), DRAIN_MS);
    kh_tls_destroy(service->tls);
    if (service->addition)
        service->addition->stop(service);
    ki_discovery_stop(service->discovery);
    ki_nats_stop(service->nats);
    ki_follow_destroy(service->follow);
    ki_registry_destroy(service->registry);
    ki_peers_destroy(service->peers);
    ki_history_destroy(service->history);
    ki_telemetry_destroy(service->telemetry);
    kh_access_log_close(service->access_log);
    kh_auth_destroy(service->auth);
    while (service->scratch) {
        struct ki_scratch *scratch = service->scratch;

        service->scratch = scratch->next;
        ki_body_fini(&scratch->body);
        ki_lookup_fini(&scratch->lookup);
        kv_buf_fini(&scratch->views);
        kv_buf_fini(&scratch->names);
        free(scratch);
    }
    ki_configured_free(service);
    free(service->routes);
    pthread_mutex_destroy(&service->lock);
}

/* Run from the reserved port to the end. Takes @fd over. */
static int serve(struct ki_service *service, int fd, uint16_t port, struct kv_error *error)
{
    const struct ki_options *o = service->options;
    int rc = create_parts(service, error);

    if (rc == 0)
        rc = ki_configured_register(service, error);
    if (rc == 0)
        rc = recover(service, error);
    if (rc == 0)
        rc = ki_discovery_start(o, service->registry, &service->discovery, error);
    if (rc == 0)
        rc = ki_nats_start(o, service->registry, &service->nats, error);
    if (rc == 0 && service->addition)
        rc = service->addition->start(service, error);
    if (rc < 0 || ki_signals.stop) {
        close(fd);
        return rc;
    }
    rc = start_http(service, fd, error);
    if (rc < 0)
        return rc;
    log_listening(o, port);
    ki_main_loop(service, port);
    sd_notify(0, "STOPPING=1");
    kv_log_info("service", "stopping", "signal=%d", ki_signals.stop);
    return 0;
}

/* Run until a signal ends it. Returns 0 or a negative errno with @error. */
static int run(const struct ki_options *options, const struct ki_addition *addition,
               struct kv_error *error)
{
    struct ki_service service = {
        .options = options, .addition = addition, .started_wall_ns = kv_wall_ns()};
    uint16_t port;
    int rc, fd;

    pthread_mutex_init(&service.lock, NULL);
    rc = ki_signals_catch();
    if (rc < 0)
        return kv_fail(error, rc, 0, "can't start: %s", strerror(-rc));
    rc = kh_http_bind(options->host, (uint16_t)options->port, &fd, &port, error);
    if (rc == 0)
        rc = serve(&service, fd, port, error);
    destroy_parts(&service);
    kv_wake_close(&ki_signals.wake);
    if (rc == 0)
        kv_log_info("service", "stopped", NULL);
    return rc;
}

int ki_main(const struct ki_program *program, const struct ki_addition *addition, int argc,
            char **argv, struct ki_options *options)
{
    struct kv_error error = {0};
    int rc = ki_options_parse(program, argc, argv, options, &error);
    const char *name = ki_options_program(options);

    if (rc > 0)
        return 0;
    if (rc < 0) {
        fprintf(stderr, "%s: %s\nTry %s --help.\n", name, error.text, name);
        return 2;
    }
    kv_log_set_level((enum kv_log_level)kv_log_parse_level(options->log_level));
    kv_log_set_format(strcmp(options->log_format, "json") == 0 ? KV_LOG_JSON : KV_LOG_LOGFMT);
    rc = run(options, addition, &error);
    ki_options_fini(options);
    if (rc < 0)
        fprintf(stderr, "%s: %s\n", name, error.text);
    return rc < 0;
}
