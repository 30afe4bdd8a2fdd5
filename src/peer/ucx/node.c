// SPDX-License-Identifier: Apache-2.0
/* Nodes: context, worker, the thread that drives it. */
#include "peer/ucx/node.h"

#include <poll.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucs/debug/log_def.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "kv_types.h"

#define SPIN_NS UINT64_C(50000) /* of a thread that waits for the end of requests */
#define NAP_NS UINT64_C(500000)

/* ---- UCX's log ---- */

static _Thread_local bool is_ours; /* a thread that calls UCX for this library */
static void (*_Atomic log_line)(bool error, const char *text);

/* Take lines of this library's threads; those of UCX's other users in the process go their way. */
KV_PRINTF(6, 0)
static ucs_log_func_rc_t take_line(const char *file, unsigned line, const char *function,
                                   ucs_log_level_t level,
                                   const ucs_log_component_config_t *component, const char *message,
                                   va_list args)
{
    void (*to)(bool error, const char *text) = atomic_load(&log_line);
    char text[400];

    (void)file, (void)line, (void)function, (void)component;
    if (!is_ours || !to || level > UCS_LOG_LEVEL_WARN)
        return UCS_LOG_FUNC_RC_CONTINUE;
    vsnprintf(text, sizeof(text), message, args);
    /* Options of ours that this version, or the transports of UCX_TLS, haven't. */
    if (strncmp(text, "invalid configuration", strlen("invalid configuration")) != 0)
        to(level <= UCS_LOG_LEVEL_ERROR, text);
    return UCS_LOG_FUNC_RC_STOP;
}

static void take_log(void)
{
    ucs_log_push_handler(take_line);
}

/* ---- commands ---- */

void kvbm_ucx_command(struct kvbm_carrier_node *node, struct kvbm_ucx_command *command,
                      void (*run)(struct kvbm_ucx_command *command))
{
    command->run = run;
    pthread_mutex_lock(&node->lock);
    TAILQ_INSERT_TAIL(&node->commands, command, list);
    pthread_mutex_unlock(&node->lock);
    if (!atomic_exchange(&node->kicked, true))
        kv_wake_signal(&node->wake);
}

/* Run what waits. Returns whether the thread is to go on. */
static bool run_commands(struct kvbm_carrier_node *node)
{
    struct kvbm_ucx_commands commands = TAILQ_HEAD_INITIALIZER(commands);
    struct kvbm_ucx_command *command;
    bool go_on;

    kv_wake_clear(&node->wake);
    atomic_store(&node->kicked, false);
    pthread_mutex_lock(&node->lock);
    TAILQ_CONCAT(&commands, &node->commands, list);
    go_on = !node->stopping || node->n_peers || node->n_busy;
    pthread_mutex_unlock(&node->lock);
    while ((command = TAILQ_FIRST(&commands))) {
        TAILQ_REMOVE(&commands, command, list);
        command->run(command);
        go_on = true;
    }
    return go_on;
}

/*
 * Sleep until UCX or a command has something to do. While requests are under way not for long: a
 * shared-memory peer that has made room tells nobody.
 */
static void sleep_on(struct kvbm_carrier_node *node, uint64_t at_most_ns)
{
    struct pollfd fds[] = {{.fd = node->event_fd, .events = POLLIN},
                           {.fd = node->wake.fd, .events = POLLIN}};
    const struct timespec time = kv_timespec(at_most_ns);

    if (ucp_worker_arm(node->worker) == UCS_OK) /* else something has happened meanwhile */
        (void)ppoll(fds, KV_COUNT(fds), at_most_ns ? &time : NULL, NULL);
}

/* Move what can be moved. Returns when nothing has, for longer while requests are under way. */
static void drive(struct kvbm_carrier_node *node)
{
    uint64_t still_ns = 0;

    while (!atomic_load(&node->kicked)) {
        uint64_t now;

        if (ucp_worker_progress(node->worker)) {
            still_ns = 0;
            continue;
        }
        if (!node->n_busy)
            return;
        now = kv_now_ns();
        if (!still_ns)
            still_ns = now;
        if (now - still_ns > SPIN_NS)
            return;
        (void)sched_yield();
    }
}

static void *node_main(void *arg)
{
    struct kvbm_carrier_node *node = arg;

    is_ours = true;
    while (run_commands(node)) {
        drive(node);
        if (!atomic_load(&node->kicked))
            sleep_on(node, node->n_busy ? NAP_NS : 0);
    }
    return NULL;
}

/* ---- endpoints ---- */

static void on_closed(void *request, ucs_status_t status, void *arg)
{
    struct kvbm_carrier_node *node = arg;

    (void)status;
    node->n_busy--;
    ucp_request_free(request);
}

void kvbm_ucx_close(struct kvbm_carrier_node *node, ucp_ep_h ep)
{
    const ucp_request_param_t param = {.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS |
                                                       UCP_OP_ATTR_FIELD_CALLBACK |
                                                       UCP_OP_ATTR_FIELD_USER_DATA,
                                       .flags = UCP_EP_CLOSE_FLAG_FORCE,
                                       .cb.send = on_closed,
                                       .user_data = node};
    ucs_status_ptr_t request;

    node->n_busy++;
    request = ucp_ep_close_nbx(ep, &param);
    if (!UCS_PTR_IS_PTR(request))
        node->n_busy--;
}

void *kvbm_ucx_pieces(const struct kvbm_carrier_message *message, ucp_dt_iov_t *list,
                      ucp_request_param_t *param, size_t *count)
{
    param->op_attr_mask |= UCP_OP_ATTR_FIELD_DATATYPE;
    if (message->n == 1) {
        param->datatype = ucp_dt_make_contig(1);
        *count = message->pieces[0].iov_len;
        return message->pieces[0].iov_base;
    }
    for (size_t i = 0; i < message->n; i++)
        list[i] = (ucp_dt_iov_t){message->pieces[i].iov_base, message->pieces[i].iov_len};
    param->datatype = UCP_DATATYPE_IOV;
    *count = message->n;
    return list;
}

/* ---- nodes ---- */

static int fail(char *why, size_t size, const char *what, ucs_status_t status)
{
    snprintf(why, size, "%s: %s", what, ucs_status_string(status));
    return status == UCS_ERR_NO_MEMORY ? -ENOMEM : -ENOTSUP;
}

static bool tcp_is_safe(void)
{
    unsigned major, minor, release;

    ucp_get_version(&major, &minor, &release);
    return major > 1 || minor >= 14;
}

/*
 * The transports unless UCX_TLS names others. A copy that a frozen peer has begun into this process's
 * memory (cma, knem, xpmem) can't be ended from here, so these are left out. So is TCP before 1.14: a
 * peer that dies while its connection is set up ends this process by an assertion of UCX
 * (ucp_request.c, "got REP message").
 */
static const char *transports(void)
{
    return tcp_is_safe() ? "^cma,knem,xpmem" : "^cma,knem,xpmem,tcp";
}

/* Tell whether a list of transports, as in UCX_TLS, has TCP: "tcp", "all", or a "^" and others. */
static bool has_tcp(const char *list)
{
    bool others = *list == '^', named = false;

    list += others;
    for (size_t len; *list && !named; list += len + (list[len] == ',')) {
        len = strcspn(list, ",");
        named = len == 3 && (strncmp(list, "tcp", 3) == 0 || strncmp(list, "all", 3) == 0);
    }
    return named != others;
}

/* Write a warning where the environment has UCX use what may end this process. */
static void warn_of_tcp(char *why, size_t size)
{
    const char *list = secure_getenv("UCX_TLS");

    if (list && has_tcp(list) && !tcp_is_safe())
        snprintf(why, size,
                 "UCX_TLS has tcp, and UCX %s ends the process when peers die or connect anew "
                 "fast: leave tcp out, or take UCX 1.14",
                 ucp_get_version_string());
}

/*
 * Read the configuration of the environment, and set what correctness needs. Shared-memory endpoints
 * refuse peers' failures without ERROR_HANDLING.
 */
static ucs_status_t configure(const struct kvbm_carrier_opts *opts, ucp_config_t *config)
{
    const struct {
        const char *name, *value;
        bool if_unset;
    } wanted[] = {{"MM_ERROR_HANDLING", "y", false}, /* of posix and sysv, up to UCX 1.13 */
                  {"POSIX_ERROR_HANDLING", "y", false},
                  {"SYSV_ERROR_HANDLING", "y", false},
                  {"KEEPALIVE_INTERVAL", "1s", false},
                  {"TLS", transports(), secure_getenv("UCX_TLS")},
                  {"NET_DEVICES", "lo", !opts->loopback || secure_getenv("UCX_NET_DEVICES")}};
    ucs_status_t status = UCS_OK;

    for (size_t i = 0; i < KV_COUNT(wanted) && status == UCS_OK; i++) {
        if (!wanted[i].if_unset)
            status = ucp_config_modify(config, wanted[i].name, wanted[i].value);
    }
    return status;
}

static int make_context(struct kvbm_carrier_node *node, const struct kvbm_carrier_opts *opts,
                        char *why, size_t why_size)
{
    const ucp_params_t params = {.field_mask = UCP_PARAM_FIELD_FEATURES,
                                 .features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP};
    ucp_config_t *config;
    ucs_status_t status = ucp_config_read(NULL, NULL, &config);

    if (status != UCS_OK)
        return fail(why, why_size, "configuration", status);
    status = configure(opts, config);
    if (status == UCS_OK)
        status = ucp_init(&params, config, &node->context);
    ucp_config_release(config);
    return status == UCS_OK ? 0 : fail(why, why_size, "no context", status);
}

static int make_worker(struct kvbm_carrier_node *node, char *why, size_t why_size)
{
    const ucp_worker_params_t params = {.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE,
                                        .thread_mode = UCS_THREAD_MODE_SERIALIZED};
    const ucp_am_handler_param_t handler = {.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID |
                                                          UCP_AM_HANDLER_PARAM_FIELD_CB |
                                                          UCP_AM_HANDLER_PARAM_FIELD_ARG,
                                            .id = KVBM_UCX_MESSAGE,
                                            .cb = kvbm_ucx_on_message,
                                            .arg = node};
    ucs_status_t status = ucp_worker_create(node->context, &params, &node->worker);

    if (status != UCS_OK)
        return fail(why, why_size, "no worker", status);
    status = ucp_worker_set_am_recv_handler(node->worker, &handler);
    if (status == UCS_OK)
        status = ucp_worker_get_efd(node->worker, &node->event_fd);
    if (status == UCS_OK)
        status = ucp_worker_get_address(node->worker, &node->address, &node->address_len);
    return status == UCS_OK ? 0 : fail(why, why_size, "no worker", status);
}

static void node_destroy(struct kvbm_carrier_node *node)
{
    bool was_ours = is_ours;

    is_ours = true;
    if (node->started) {
        pthread_mutex_lock(&node->lock);
        node->stopping = true;
        pthread_mutex_unlock(&node->lock);
        atomic_store(&node->kicked, true);
        kv_wake_signal(&node->wake);
        pthread_join(node->thread, NULL);
    }
    if (node->address)
        ucp_worker_release_address(node->worker, node->address);
    if (node->worker)
        ucp_worker_destroy(node->worker);
    if (node->context)
        ucp_cleanup(node->context);
    kv_wake_close(&node->wake);
    pthread_mutex_destroy(&node->lock);
    free(node);
    is_ours = was_ours;
}

static int node_create(const struct kvbm_carrier_opts *opts, struct kvbm_carrier_node **ret,
                       char *why, size_t why_size)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct kvbm_carrier_node *node = calloc(1, sizeof(*node));
    bool was_ours = is_ours;
    int err;

    if (!node)
        return -ENOMEM;
    pthread_mutex_init(&node->lock, NULL);
    TAILQ_INIT(&node->commands);
    atomic_store(&log_line, opts->log);
    (void)pthread_once(&once, take_log);
    is_ours = true;
    err = kv_wake_open(&node->wake);
    if (err == 0)
        err = make_context(node, opts, why, why_size);
    if (err == 0)
        err = make_worker(node, why, why_size);
    if (err == 0)
        err = kv_thread_start(&node->thread, "kvbm-ucx", node_main, node);
    is_ours = was_ours;
    node->started = err == 0;
    if (err < 0) {
        node_destroy(node);
        return err;
    }
    warn_of_tcp(why, why_size);
    *ret = node;
    return 0;
}

static void *node_address(struct kvbm_carrier_node *node, size_t *len)
{
    void *copy = malloc(node->address_len);

    *len = node->address_len;
    if (copy)
        memcpy(copy, node->address, node->address_len);
    return copy;
}

/* ---- the table ---- */

KV_API const struct kv_module_head *kvbm_ucx_get_abi(void);

const struct kv_module_head *kvbm_ucx_get_abi(void)
{
    static const struct kvbm_carrier_abi abi = {.head = {sizeof(abi), KVBM_CARRIER_ABI},
                                                .node_create = node_create,
                                                .node_destroy = node_destroy,
                                                .node_address = node_address,
                                                .peer_create = kvbm_ucx_peer_create,
                                                .peer_close = kvbm_ucx_peer_close,
                                                .send = kvbm_ucx_send,
                                                .receive_start = kvbm_ucx_receive_start,
                                                .receive_end = kvbm_ucx_receive_end};

    return &abi.head;
}
