// SPDX-License-Identifier: Apache-2.0
#include "advisor/service.h"

#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <systemd/sd-daemon.h>
#include <unistd.h>

#include "advisor/advice.h"
#include "advisor/index/policy.h"
#include "advisor/plan.h"
#include "advisor/state.h"
#include "base/core/clock.h"
#include "base/core/log.h"

enum { TURN_MS = 100, SAVE_MS = 60000, JOIN_MS = 5000, DRAIN_MS = 5000, MAX_STREAMS = 4 };
#define BODIES_BYTES (64u << 20)

/* -- state ------------------------------------------------------------------------------------- */

/* Read what was saved. An unusable state is learned anew and replaced; only one of a later version is
 * left alone, and refused: -EPROTONOSUPPORT. */
static int load_state(struct kva_service *service)
{
    const struct kva_options *o = service->options;
    void *data = NULL;
    size_t len = 0;
    int rc;
    long n;

    if (!o->state)
        return 0;
    rc = kva_state_load(o->state, &data, &len);
    n = rc ? rc
           : kva_state_read(service->world.index, kva_volumes_id(&service->volumes), o->policy,
                            data, len);
    free(data);
    if (n >= 0)
        kv_log_info("advisor", "state read", "blobs=%ld", n);
    else if (n == -ENOENT)
        kv_log_info("advisor", "no state yet", NULL);
    else if (n == -EPROTONOSUPPORT)
        kv_log_error("advisor",
                     "the state is of a later version of kv-advisor: nothing is changed; use that "
                     "version, or delete the file",
                     "state=%s", o->state);
    else
        kv_log_warn("advisor", "the state can't be used; what it lacks is learned anew",
                    "reason=\"%s\"",
                    n == -ESTALE    ? "it is of other members"
                    : n == -EBADMSG ? "it is damaged"
                                    : strerror((int)-n));
    return n == -EPROTONOSUPPORT ? (int)n : 0;
}

static void save_state(struct kva_service *service)
{
    const struct kva_options *o = service->options;
    const struct kva_state_save save = {.index = service->world.index,
                                        .lock = &service->world.lock,
                                        .members = kva_volumes_id(&service->volumes),
                                        .policy = o->policy};
    uint64_t pause_ns;
    int rc;

    if (!o->state)
        return;
    rc = kva_state_save(o->state, &save, &pause_ns);
    if (rc < 0)
        kv_log_error("advisor", "the state can't be saved", "reason=\"%s\"", strerror(-rc));
    atomic_store(&service->pause_ns, pause_ns);
}

/* -- scans ------------------------------------------------------------------------------------- */

static void log_plan(struct kva_service *service)
{
    const struct kva_packing packing = kva_options_packing(service->options);
    uint64_t copies = 0, bytes = 0;
    struct kva_plan plan;

    kva_plan_make(&service->volumes, &service->world,
                  (uint32_t)(service->options->reclaim_ms / 1000), &packing, &plan);
    for (size_t from = 0; from < KVA_MEMBERS; from++)
        for (size_t to = 0; to < KVA_MEMBERS; to++) {
            copies += plan.copy[from][to].blobs;
            bytes += plan.copy[from][to].bytes;
        }
    kv_log_info("advisor", "members listed",
                "to_move=%" PRIu64 " bytes=%" PRIu64 " to_pack=%" PRIu64
                " dry_run=%d unlisted=%" PRIu64,
                copies, bytes, plan.packed, service->options->dry_run,
                atomic_load(&service->volumes.unlisted));
}

/* Save the state. Returns when to save it next: saving takes at most a twentieth of the time. */
static uint64_t save_now(struct kva_service *service)
{
    uint64_t start_ns = kv_now_ns(), took_ns;

    save_state(service);
    took_ns = kv_now_ns() - start_ns;
    return kv_now_ns() + KV_MAX(SAVE_MS * KV_NS_PER_MS, 20 * took_ns);
}

/* Wait until @until_ns, a scan that is asked for, or the end. Returns true for the latter two. */
static bool wait_scan(struct kva_service *service, uint64_t until_ns)
{
    bool now;

    pthread_mutex_lock(&service->lock);
    while (!service->scan_now && !atomic_load(&service->stop) && kv_now_ns() < until_ns)
        (void)kv_cond_wait_until(&service->woken, &service->lock, until_ns);
    now = service->scan_now || atomic_load(&service->stop);
    service->scan_now = false;
    pthread_mutex_unlock(&service->lock);
    return now;
}

static void *scan(void *arg)
{
    struct kva_service *service = arg;
    uint64_t save_ns = 0, next_ns, until_ns;
    size_t missing;

    while (!atomic_load(&service->stop)) {
        (void)kva_volumes_join(&service->volumes, &missing);
        if (kva_volumes_scan(&service->volumes, &service->world, &service->stop) >= 0) {
            log_plan(service);
            atomic_store(&service->ready, true);
        }
        next_ns = kv_now_ns() + service->options->scan_ms * KV_NS_PER_MS;
        do {
            if (atomic_load(&service->ready) && kv_now_ns() >= save_ns)
                save_ns = save_now(service);
            until_ns = KV_MIN(next_ns, save_ns ? save_ns : next_ns);
            if (missing)
                until_ns = KV_MIN(until_ns, kv_now_ns() + JOIN_MS * KV_NS_PER_MS);
        } while (!wait_scan(service, until_ns) && kv_now_ns() < next_ns &&
                 (!missing || !kva_volumes_join(&service->volumes, &missing)));
    }
    return NULL;
}

void kva_service_scan(struct kva_service *service)
{
    pthread_mutex_lock(&service->lock);
    service->scan_now = true;
    pthread_cond_broadcast(&service->woken);
    pthread_mutex_unlock(&service->lock);
}

/* -- HTTP -------------------------------------------------------------------------------------- */

static bool admit(void *arg, const struct kh_request *request, struct kh_reply *reply)
{
    return kh_auth_admit(((struct kva_service *)arg)->auth, request, reply);
}

static void observe(void *arg, const struct kh_request *request, unsigned status)
{
    struct kva_service *service = arg;
    struct kh_access access = {.method = request->method,
                               .path = request->route ? request->route->path : "unknown",
                               .status = status,
                               .duration_ns = kv_now_ns() - request->started_ns};

    if (service->access_log) {
        (void)kh_request_header(request, service->options->trace_id_header, &access.trace_id);
        kh_access_log_put(service->access_log, &access);
    }
    kv_log_debug("http", "request", "method=%.10s path=%s status=%u", request->method, access.path,
                 status);
}

static int start_http(struct kva_service *service, int fd, struct kv_error *error)
{
    const struct kva_options *o = service->options;
    struct kh_http_opts opts = {.threads = (uint32_t)o->http_threads,
                                .max_connections = (uint32_t)o->max_connections,
                                .idle_timeout_ms = o->idle_timeout_ms,
                                .bodies_bytes = BODIES_BYTES,
                                .max_streams = MAX_STREAMS,
                                .tls = o->tls_cert != NULL,
                                .admit = admit,
                                .observe = observe,
                                .arg = service};

    opts.routes = kva_routes(&opts.n_routes);
    return kh_http_start(fd, &opts, &service->http, error);
}

/* -- start and stop ---------------------------------------------------------------------------- */

static int make_index(struct kva_service *service, struct kv_error *error)
{
    const struct kva_options *o = service->options;
    struct kva_index_opts opts = {.policy = kva_policy_find(o->policy),
                                  .max_blocks = (uint32_t)o->max_blobs,
                                  .half_life_s = (uint32_t)(o->half_life_ms / 1000)};
    int rc;

    kva_volumes_index_opts(&service->volumes, (unsigned)o->share, &opts);
    rc = kva_index_create(&opts, &service->world.index);
    if (rc == 0)
        rc = kva_feed_create(service->world.index, &service->world.feed);
    if (rc == 0)
        rc = kva_advice_create((uint32_t)o->samples, &service->advice);
    if (rc == 0)
        kva_feed_set_advice(service->world.feed, service->advice);
    return rc == -EINVAL ? kv_fail(error, rc, 0, "no member may be written to")
           : rc < 0      ? kv_fail(error, rc, 0, "can't start: %s", strerror(-rc))
                         : 0;
}

static int open_parts(struct kva_service *service, struct kv_error *error)
{
    const struct kva_options *o = service->options;
    const struct kva_volumes_opts volumes = {.path = o->path,
                                             .lock_folder = o->lock_folder,
                                             .look_only = o->dry_run,
                                             .lock_later = o->lock != NULL};
    int rc = kh_auth_create(o->auth_token_file, o->insecure, &service->auth, error);

    if (rc == 0 && o->access_log)
        rc = kh_access_log_open(o->access_log, &service->access_log, error);
    if (rc == 0 && o->tls_cert)
        rc = kh_tls_create(o->tls_cert, o->tls_key, &service->tls, error);
    if (rc == 0)
        rc = kva_volumes_open(&volumes, &service->volumes, error);
    if (rc == 0)
        rc = make_index(service, error);
    if (rc < 0)
        return rc;
    rc = load_state(service);
    if (rc == 0 && o->lock && !o->dry_run)
        rc = kva_leader_open(o->lock, (uint32_t)(o->lock_ttl_ms / 1000),
                             kva_volumes_id(&service->volumes), &service->leader, error);
    if (rc < 0)
        return rc;
    return o->nats ? kva_follow_open(o, &service->world, &service->follow, error) : 0;
}

static void scan_now(void *arg)
{
    kva_service_scan(arg);
}

static int start_threads(struct kva_service *service, struct kv_error *error)
{
    const struct kva_options *o = service->options;
    const struct kva_mover_opts opts = {.volumes = &service->volumes,
                                        .world = &service->world,
                                        .leader = service->leader,
                                        .scan = scan_now,
                                        .scan_arg = service,
                                        .packing = kva_options_packing(o),
                                        .limits = {.bytes_per_s = o->bytes_per_s,
                                                   .requests_per_s = o->requests_per_s,
                                                   .quiet_from = o->quiet_from,
                                                   .quiet_to = o->quiet_to,
                                                   .left_s = (uint32_t)(o->reclaim_ms / 1000)}};
    int rc = kv_thread_start(&service->scanner, "kva-scan", scan, service);
    struct kva_mover *mover = NULL;

    service->has_scanner = rc == 0;
    if (rc == 0 && !o->dry_run)
        rc = kva_mover_create(&opts, &mover);
    if (rc == 0)
        atomic_store(&service->mover, mover);
    return rc < 0 ? kv_fail(error, rc, 0, "can't start: %s", strerror(-rc)) : 0;
}

static void stop_all(struct kva_service *service)
{
    kh_http_stop(service->http, DRAIN_MS);
    kh_tls_destroy(service->tls);
    kva_follow_close(service->follow);
    atomic_store(&service->stop, true);
    kva_service_scan(service);
    if (service->has_scanner)
        pthread_join(service->scanner, NULL);
    kva_mover_destroy(service->mover);
    kva_leader_close(service->leader);
    if (service->world.index && atomic_load(&service->ready))
        save_state(service);
    kva_feed_destroy(service->world.feed);
    kva_advice_destroy(service->advice);
    kva_index_destroy(service->world.index);
    kva_volumes_close(&service->volumes);
    kh_access_log_close(service->access_log);
    kh_auth_destroy(service->auth);
    pthread_cond_destroy(&service->woken);
    pthread_mutex_destroy(&service->lock);
    pthread_mutex_destroy(&service->world.lock);
}

/* -- the main thread --------------------------------------------------------------------------- */

static void reload(struct kva_service *service)
{
    struct kv_error error = {0};

    if (kh_auth_reload(service->auth, &error) < 0)
        kv_log_error("advisor", "the token file was not read again; the old tokens stay",
                     "reason=\"%s\"", error.text);
    if (service->tls && kh_tls_reload(service->tls, &error) < 0)
        kv_log_error("advisor", "the certificate was not read again; the old one stays",
                     "reason=\"%s\"", error.text);
    if (service->access_log && kh_access_log_reopen(service->access_log, &error) < 0)
        kv_log_error("advisor", "the access log was not opened again; lines go to the old file",
                     "reason=\"%s\"", error.text);
}

/* Serve until SIGTERM or SIGINT, which are blocked, as SIGHUP is. Returns the signal. */
static int serve(struct kva_service *service, const sigset_t *signals, uint16_t port)
{
    const struct timespec turn = kv_timespec(TURN_MS * KV_NS_PER_MS);
    bool told = false;

    for (;;) {
        int got = sigtimedwait(signals, NULL, &turn);

        if (got == SIGHUP)
            reload(service);
        else if (got > 0)
            return got;
        if (service->follow)
            kva_follow_tick(service->follow);
        if (!told && atomic_load(&service->ready)) {
            told = true;
            sd_notifyf(0, "READY=1\nSTATUS=serving on port %u", port);
        }
    }
}

static void block_signals(sigset_t *ret)
{
    const struct sigaction ignore = {.sa_handler = SIG_IGN};

    sigemptyset(ret);
    sigaddset(ret, SIGTERM);
    sigaddset(ret, SIGINT);
    sigaddset(ret, SIGHUP);
    pthread_sigmask(SIG_BLOCK, ret, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
}

int kva_service_run(const struct kva_options *options, struct kv_error *error)
{
    struct kva_service service = {.options = options};
    sigset_t signals;
    uint16_t port;
    int rc, fd;

    block_signals(&signals);
    pthread_mutex_init(&service.world.lock, NULL);
    pthread_mutex_init(&service.lock, NULL);
    kv_cond_init(&service.woken);
    rc = kh_http_bind(options->host, (uint16_t)options->port, &fd, &port, error);
    if (rc == 0) {
        rc = open_parts(&service, error);
        if (rc < 0)
            close(fd);
        else
            rc = start_http(&service, fd, error);
    }
    if (rc == 0)
        rc = start_threads(&service, error);
    if (rc == 0) {
        kv_log_info("advisor", "listening", "url=%s://%s:%u", options->tls_cert ? "https" : "http",
                    options->host, port);
        kv_log_info("advisor", "stopping", "signal=%d", serve(&service, &signals, port));
        sd_notify(0, "STOPPING=1");
    }
    stop_all(&service);
    return rc;
}
