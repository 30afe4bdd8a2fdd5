// SPDX-License-Identifier: Apache-2.0
#include "indexer/main_loop.h"

#include <errno.h>
#include <malloc.h>
#include <poll.h>
#include <signal.h>
#include <systemd/sd-daemon.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "http/tls.h"
#include "indexer/configured.h"

#define TRIM_INTERVAL_MS 10000
#define READY_INTERVAL_MS 100 /* interval until the service is ready */
#define TRIM_DELAY_MS 100     /* delay after a burst of events */
#define TRIM_LEAST_MS 500     /* least time between two trims */

/* -- signals: handlers only set flags and wake the main thread --------------------------------- */

struct ki_signals ki_signals = {.wake = {-1}};

static void on_signal(int number)
{
    int saved = errno;

    if (number == SIGHUP)
        ki_signals.reload = 1;
    else
        ki_signals.stop = number;
    kv_wake_signal(&ki_signals.wake);
    errno = saved;
}

int ki_signals_catch(void)
{
    struct sigaction catch = {.sa_handler = on_signal}, ignore = {.sa_handler = SIG_IGN};
    int rc = kv_wake_open(&ki_signals.wake);

    if (rc < 0)
        return rc;
    sigaction(SIGTERM, &catch, NULL);
    sigaction(SIGINT, &catch, NULL);
    sigaction(SIGHUP, &catch, NULL);
    sigaction(SIGPIPE, &ignore, NULL);
    return 0;
}

/* -- memory ------------------------------------------------------------------------------------ */

/* When to return memory to the system. */
struct trim {
    uint64_t last_ns, due_ns;
};

/*
 * Return free memory to the system. A burst of events waits in ZMQ's queues in tens of thousands of
 * pieces, and glibc keeps their memory (measured: 316 MiB, of which this returns 217 MiB).
 */
static void return_memory(struct trim *trim, uint64_t now_ns)
{
#ifdef __GLIBC__
    malloc_trim(0);
#endif
    trim->last_ns = now_ns;
    trim->due_ns = now_ns + TRIM_INTERVAL_MS * KV_NS_PER_MS;
}

/* Schedule a trim when an event thread has drained its streams. */
static void return_memory_soon(struct trim *trim, uint64_t now_ns)
{
    uint64_t due_ns =
        KV_MAX(now_ns + TRIM_DELAY_MS * KV_NS_PER_MS, trim->last_ns + TRIM_LEAST_MS * KV_NS_PER_MS);

    trim->due_ns = KV_MIN(trim->due_ns, due_ns);
}

/* -- the loop ---------------------------------------------------------------------------------- */

/* Reload on SIGHUP the files that may have changed. */
static void reload(struct ki_service *service)
{
    struct kv_error error = {0};

    ki_configured_reload(service);
    if (kh_auth_reload(service->auth, &error) < 0)
        kv_log_error("service", "the token file was not read again; the old tokens stay",
                     "reason=\"%s\"", error.text);
    else if (service->options->auth_token_file)
        kv_log_info("service", "token file read again", NULL);
    if (service->tls && kh_tls_reload(service->tls, &error) < 0)
        kv_log_error("service", "the certificate was not read again; the old one stays",
                     "reason=\"%s\"", error.text);
    else if (service->tls)
        kv_log_info("service", "certificate read again", NULL);
    if (service->access_log && kh_access_log_reopen(service->access_log, &error) < 0)
        kv_log_error("service", "the access log was not opened again; lines go to the old file",
                     "reason=\"%s\"", error.text);
    if (service->addition && service->addition->reopen(service, &error) < 0)
        kv_log_error("service", "a log file was not opened again", "reason=\"%s\"", error.text);
}

void ki_main_loop(struct ki_service *service, uint16_t port)
{
    uint64_t history_due_ns = 0, added_due_ns = service->addition ? 0 : UINT64_MAX;
    struct trim trim = {0};
    bool told = false;

    return_memory(&trim, kv_now_ns());
    while (!ki_signals.stop) {
        struct pollfd pfd = {.fd = ki_signals.wake.fd, .events = POLLIN};
        int64_t wait_ms;
        int rc;

        if (kv_now_ns() >= history_due_ns)
            history_due_ns = ki_history_tick(service->history, service->telemetry,
                                             service->registry, kv_now_ns());
        if (service->addition && kv_now_ns() >= added_due_ns)
            added_due_ns = service->addition->tick(service, kv_now_ns());
        wait_ms =
            kv_ms_until(KV_MIN(KV_MIN(trim.due_ns, history_due_ns), added_due_ns), kv_now_ns());

        if (!told && ki_service_is_ready(service)) {
            told = true;
            sd_notifyf(0, "READY=1\nSTATUS=serving on port %u", port);
        }
        rc = poll(&pfd, 1, (int)(told ? wait_ms : KV_MIN(wait_ms, READY_INTERVAL_MS)));
        if (rc > 0)
            kv_wake_clear(&ki_signals.wake);
        if (kv_now_ns() >= trim.due_ns)
            return_memory(&trim, kv_now_ns());
        else if (rc > 0 && !ki_signals.reload)
            return_memory_soon(&trim, kv_now_ns());
        if (!ki_signals.reload)
            continue;
        ki_signals.reload = 0;
        reload(service);
    }
}
