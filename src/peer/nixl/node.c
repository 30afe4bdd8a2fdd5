// SPDX-License-Identifier: Apache-2.0
/* Nodes: the NIXL agent and its replacement, the arena, the thread. */
#include "peer/nixl/node.h"

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/core/le.h"
#include "base/core/log.h"
#include "base/module/module.h"
#include "base/thread/thread.h"

#define NAP_NS UINT64_C(20000)                    /* between looks while something moves */
#define SLOW_NAP_NS (UINT64_C(50) * KV_NS_PER_MS) /* while only what was given up does */
#define SLACK_NS 1000ul                           /* of the thread's timers */

/* ---- the arena ---- */

static bool is_free(const struct kvbm_carrier_node *node, uint32_t first, uint32_t n)
{
    for (uint32_t i = first; i < first + n; i++) {
        if (node->used[i])
            return false;
    }
    return true;
}

bool kvbm_nixl_take(struct kvbm_carrier_node *node, size_t bytes, struct kvbm_nixl_run *ret)
{
    size_t n = (bytes + KVBM_NIXL_CHUNK - 1) / KVBM_NIXL_CHUNK;

    if (!n || n > KVBM_NIXL_CHUNKS)
        return false;
    for (uint32_t first = 0; first + n <= KVBM_NIXL_CHUNKS; first++) {
        if (!is_free(node, first, (uint32_t)n))
            continue;
        memset(node->used + first, 1, n);
        node->n_used += (uint32_t)n;
        *ret = (struct kvbm_nixl_run){first, (uint32_t)n};
        return true;
    }
    node->stuck = node->kicked = true;
    pthread_cond_broadcast(&node->changed);
    return false;
}

void kvbm_nixl_give(struct kvbm_carrier_node *node, const struct kvbm_nixl_run *run)
{
    memset(node->used + run->first, 0, run->n);
    node->n_used -= run->n;
    pthread_cond_broadcast(&node->changed);
}

/* ---- NIXL's agent ---- */

static int fail(char *why, size_t size, const char *what, int status)
{
    snprintf(why, size, "%s: NIXL's error %d", what, status);
    return -ENOTSUP;
}

/* Load the UCX backend. */
static int make_backend(struct kvbm_carrier_node *node)
{
    void *params;
    int status = kvbm_nixl.create_params(&params);

    if (status < 0)
        return status;
    status = kvbm_nixl.create_backend(node->agent, "UCX", params, &node->backend);
    (void)kvbm_nixl.destroy_params(params);
    if (status == KVBM_NIXL_DONE)
        status = kvbm_nixl.create_opt_args(&node->args);
    if (status == KVBM_NIXL_DONE)
        status = kvbm_nixl.opt_args_add_backend(node->args, node->backend);
    return status == KVBM_NIXL_DONE ? kvbm_nixl.create_notif_map(&node->notes) : status;
}

static int register_arena(const struct kvbm_carrier_node *node)
{
    void *list;
    int status = kvbm_nixl.create_reg_dlist(KVBM_NIXL_DRAM, &list);

    if (status < 0)
        return status;
    status = kvbm_nixl.reg_dlist_add_desc(list, (uintptr_t)node->arena, KVBM_NIXL_ARENA, 0, "", 0);
    if (status == KVBM_NIXL_DONE)
        status = kvbm_nixl.register_mem(node->agent, list, node->args);
    (void)kvbm_nixl.destroy_reg_dlist(list);
    return status;
}

/* Write the address of the agent. Returns 0 or a negative errno. */
static int make_address(struct kvbm_carrier_node *node, int *status)
{
    void *data = NULL;
    uint8_t *address;
    size_t len = 0;

    *status = kvbm_nixl.get_local_md(node->agent, &data, &len);
    if (*status != KVBM_NIXL_DONE)
        return -ENOTSUP;
    address = malloc(KVBM_NIXL_HEAD + len);
    if (address) {
        kv_put_le64(address, (uintptr_t)node->arena);
        kv_put_le64(address + 8, KVBM_NIXL_ARENA);
        memcpy(address + KVBM_NIXL_HEAD, data, len);
    }
    free(data);
    if (!address)
        return -ENOMEM;
    pthread_mutex_lock(&node->lock);
    free(node->address);
    node->address = address;
    node->address_len = KVBM_NIXL_HEAD + len;
    pthread_mutex_unlock(&node->lock);
    return 0;
}

static void destroy_agent(struct kvbm_carrier_node *node)
{
    if (node->notes)
        (void)kvbm_nixl.destroy_notif_map(KV_STEAL(node->notes));
    if (node->args)
        (void)kvbm_nixl.destroy_opt_args(KV_STEAL(node->args));
    if (node->backend)
        (void)kvbm_nixl.destroy_backend(KV_STEAL(node->backend));
    if (node->agent)
        (void)kvbm_nixl.destroy_agent(KV_STEAL(node->agent));
}

/* Make a NIXL agent of a name that no earlier one had. */
static int make_agent(struct kvbm_carrier_node *node, char *why, size_t why_size)
{
    const struct kvbm_nixl_config config = {.n_workers = 1};
    struct kv_signals signals;
    char name[KVBM_NIXL_NAME];
    int status, err = 0;

    snprintf(name, sizeof(name), "%s.%u", node->base_name, node->turn);
    kv_signals_note(&signals); /* its UCX is loaded now */
    status = kvbm_nixl.create_configured_agent(name, &config, &node->agent);
    if (status != KVBM_NIXL_DONE)
        err = fail(why, why_size, "no agent", status);
    else if ((status = make_backend(node)) != KVBM_NIXL_DONE)
        err = fail(why, why_size, "no UCX backend", status);
    else if ((status = register_arena(node)) != KVBM_NIXL_DONE)
        err = fail(why, why_size, "no memory is registered", status);
    else if ((err = make_address(node, &status)) == -ENOTSUP)
        err = fail(why, why_size, "no metadata", status);
    kv_signals_restore(&signals);
    if (err < 0)
        destroy_agent(node);
    return err;
}

/* ---- the thread ---- */

/* Replace the agent: all that it may still move is lost. Called and returns with the lock held. */
static void replace(struct kvbm_carrier_node *node)
{
    char why[200] = "", quoted[400];
    int err;

    node->replacing = true;
    node->turn++;
    pthread_mutex_unlock(&node->lock);
    kv_log_info("kvbm", "NIXL is begun anew: transfers that were given up hold its memory",
                "agent=%s bytes=%zu", node->base_name, (size_t)node->n_lost * KVBM_NIXL_CHUNK);
    kvbm_nixl_drop_sends(node);
    destroy_agent(node);
    err = make_agent(node, why, sizeof(why));
    if (err < 0)
        kv_log_error("kvbm", "NIXL can't be used any more", "agent=%s why=%s", node->base_name,
                     kv_log_quote(quoted, sizeof(quoted), why));
    pthread_mutex_lock(&node->lock);
    if (err < 0)
        free(KV_STEAL(node->address));
    kvbm_nixl_drop_receives(node);
    memset(node->used, 0, sizeof(node->used));
    node->n_used = node->n_lost = 0;
    node->replacing = node->stuck = false;
}

/* Tell whether the agent is to be replaced, with the lock held: lost memory is missed, and all idle. */
static bool is_worn(const struct kvbm_carrier_node *node)
{
    return node->n_lost && node->n_lost == node->n_used && LIST_EMPTY(&node->receives) &&
           (node->n_lost > KVBM_NIXL_CHUNKS / 2 || node->stuck);
}

static void nap(uint64_t ns)
{
    const struct timespec time = kv_timespec(ns);

    (void)nanosleep(&time, NULL);
}

/* Look at all that moves, without the lock. */
static void look(struct kvbm_carrier_node *node, bool receives)
{
    kvbm_nixl_run_sends(node);
    if (receives && node->agent) {
        (void)kvbm_nixl.get_notifs(node->agent, node->notes, NULL); /* it drives UCX */
        (void)kvbm_nixl.notif_map_clear(node->notes);
    }
}

static void *node_main(void *arg)
{
    struct kvbm_carrier_node *node = arg;

    (void)prctl(PR_SET_TIMERSLACK, SLACK_NS);
    pthread_mutex_lock(&node->lock);
    for (;;) {
        bool receives = !LIST_EMPTY(&node->receives);
        bool moves = receives || node->n_used > node->n_lost;

        if (node->stopping && TAILQ_EMPTY(&node->waiting) && !moves)
            break;
        if (is_worn(node) && !node->stopping) {
            replace(node);
            continue;
        }
        pthread_mutex_unlock(&node->lock);
        look(node, receives);
        if (moves)
            nap(NAP_NS);
        pthread_mutex_lock(&node->lock);
        moves = !LIST_EMPTY(&node->receives) || node->n_used > node->n_lost || node->stopping ||
                node->kicked || is_worn(node);
        node->kicked = false;
        if (moves)
            continue;
        if (TAILQ_EMPTY(&node->running))
            pthread_cond_wait(&node->changed, &node->lock);
        else
            (void)kv_cond_wait_until(&node->changed, &node->lock, kv_now_ns() + SLOW_NAP_NS);
    }
    pthread_mutex_unlock(&node->lock);
    return NULL;
}

/* ---- nodes ---- */

void kvbm_nixl_node_destroy(struct kvbm_carrier_node *node)
{
    if (node->started) {
        pthread_mutex_lock(&node->lock);
        node->stopping = true;
        pthread_cond_broadcast(&node->changed);
        pthread_mutex_unlock(&node->lock);
        pthread_join(node->thread, NULL);
    }
    kvbm_nixl_drop_sends(node);
    destroy_agent(node);
    kvbm_nixl_drop_receives(node);
    if (node->arena)
        (void)munmap(node->arena, KVBM_NIXL_ARENA);
    pthread_cond_destroy(&node->changed);
    pthread_mutex_destroy(&node->lock);
    free(node->address);
    free(node);
}

int kvbm_nixl_node_create(const struct kvbm_carrier_opts *opts, struct kvbm_carrier_node **ret,
                          char *why, size_t why_size)
{
    struct kvbm_carrier_node *node = calloc(1, sizeof(*node));
    void *arena;
    int err;

    if (opts->loopback && !secure_getenv("UCX_NET_DEVICES")) { /* NIXL can't be told another way */
        snprintf(why, why_size,
                 "it listens beyond this machine: set UCX_NET_DEVICES=lo, "
                 "token_file, tls_ca or unprotected");
        free(node);
        return -ENOTSUP;
    }
    if (!node)
        return -ENOMEM;
    pthread_mutex_init(&node->lock, NULL);
    kv_cond_init(&node->changed);
    TAILQ_INIT(&node->running);
    TAILQ_INIT(&node->waiting);
    snprintf(node->base_name, sizeof(node->base_name), "%s", opts->name);
    arena = mmap(NULL, KVBM_NIXL_ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    err = arena == MAP_FAILED ? -ENOMEM : 0;
    if (err == 0)
        node->arena = arena;
    if (err == 0)
        err = make_agent(node, why, why_size);
    if (err == 0)
        err = kv_thread_start(&node->thread, "kvbm-nixl", node_main, node);
    node->started = err == 0;
    if (err < 0)
        kvbm_nixl_node_destroy(node);
    else
        *ret = node;
    return err;
}

void *kvbm_nixl_node_address(struct kvbm_carrier_node *node, size_t *len)
{
    void *copy;

    pthread_mutex_lock(&node->lock);
    *len = node->address_len;
    copy = node->address ? malloc(*len) : NULL;
    if (copy)
        memcpy(copy, node->address, *len);
    pthread_mutex_unlock(&node->lock);
    return copy;
}
