// SPDX-License-Identifier: Apache-2.0
#include "cli/whole/worker.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/core/error.h"
#include "kv_event.h"

#define SETTLE_MS 60000
#define STOP_MS 10000
#define RING_BATCHES 200000

static int add_sinks(struct kc_worker *w)
{
    const struct kve_publisher_opts socket = {.size = sizeof(socket),
                                              .endpoint = "tcp://127.0.0.1:*",
                                              .replay_endpoint = "tcp://127.0.0.1:*",
                                              .buffer_batches = RING_BATCHES};
    const struct kvbm_zmq_opts zmq = {
        .size = sizeof(zmq), .publisher = &socket, .block_size = w->plan->shape.page_size};
    struct kvp_nats_opts server = {
        .size = sizeof(server), .url = w->plan->nats, .reconnect_ms = 100};
    char name[24];
    struct kvbm_nats_opts nats = {.size = sizeof(nats),
                                  .server = &server,
                                  .cluster = "replay",
                                  .model = KC_PLAN_MODEL,
                                  .tenant = KC_PLAN_NATS_TENANT,
                                  .worker = name,
                                  .window_ms = 100};
    int rc = kvbm_events_add_zmq(w->events, &zmq, &w->publisher);

    snprintf(name, sizeof(name), "%u", KC_PLAN_FIRST_ON_NATS + w->number);
    if (rc > 0 && w->plan->nats[0])
        rc = kvbm_events_add_nats(w->events, &nats, NULL);
    return rc < 0 ? rc : 0;
}

static int make_agent(struct kc_worker *w)
{
    char at[KC_PLAN_PATH + 32], name[24];
    const char *listen = at;
    const struct kvbm_agent_opts who = {.size = sizeof(who),
                                        .name = name,
                                        .worker = KC_PLAN_FIRST_INSTANCE + w->number,
                                        .fingerprint = KC_PLAN_FINGERPRINT,
                                        .listen = &listen,
                                        .n_listen = 1};

    snprintf(name, sizeof(name), "worker-%u", w->number);
    if (w->plan->carrier == KC_CARRIER_SHM)
        snprintf(at, sizeof(at), "unix:%s/worker-%u.sock", w->plan->dir, w->number);
    else
        snprintf(at, sizeof(at), "tcp:127.0.0.1:0");
    return w->plan->carrier == KC_CARRIER_OFF ? 0 : kvbm_agent_create(&who, &w->agent);
}

int kc_worker_open(struct kc_worker *w, struct kc_message *ret_ready)
{
    int rc = kvbm_events_create(
        &(struct kvbm_events_opts){.size = sizeof(struct kvbm_events_opts), .window_us = 2000},
        &w->events);

    rc = rc == 0 ? add_sinks(w) : rc;
    rc = rc == 0 ? make_agent(w) : rc;
    if (rc < 0)
        return rc;
    ret_ready->kind = KC_MESSAGE_READY;
    snprintf(ret_ready->ready.events, sizeof(ret_ready->ready.events), "%s",
             kve_publisher_endpoint(w->publisher));
    snprintf(ret_ready->ready.replay, sizeof(ret_ready->ready.replay), "%s",
             kve_publisher_replay_endpoint(w->publisher));
    if (w->agent && kvbm_agent_endpoint(w->agent, 0, ret_ready->ready.agent,
                                        sizeof(ret_ready->ready.agent), NULL) < 0)
        return -EIO;
    return 0;
}

/* ---- tiers ---- */

static int make_manager(struct kc_worker *w)
{
    const struct kc_plan *p = w->plan;
    struct kvbm_layout_config block = kc_shape_layout(&p->shape, 1, false);
    uint64_t stride = (kc_shape_block_bytes(&p->shape) + 4095) / 4096 * 4096;
    char disk[KC_PLAN_PATH + 32], peers[KC_PLAN_PATH + 32];
    struct kvbm_manager_opts opts = {.size = sizeof(opts),
                                     .block = &block,
                                     .fingerprint = KC_PLAN_FINGERPRINT,
                                     .events = w->events,
                                     .host_bytes = p->g2_blocks * stride,
                                     .disk_buffered = true,
                                     .disk_volatile = true,
                                     .copy_threads = 1,
                                     .agent = w->agent};
    int rc;

    snprintf(disk, sizeof(disk), "%s/disk-%u", p->dir, w->number);
    snprintf(peers, sizeof(peers), "file:%s/peers", p->dir);
    if (p->g3_blocks) {
        opts.disk = disk;
        opts.disk_bytes = p->g3_blocks * stride;
    }
    if (p->store[0])
        opts.object = p->store;
    if (w->agent) {
        opts.host_shared = p->carrier == KC_CARRIER_SHM;
        opts.peers = peers;
        opts.indexer = p->indexer;
        opts.indexer_model = KC_PLAN_MODEL;
    }
    rc = kvbm_manager_create(&opts, &w->manager);
    if (rc == -ENOTSUP && opts.indexer) { /* no libkvbm_http: ask all peers */
        opts.indexer = NULL;
        rc = kvbm_manager_create(&opts, &w->manager);
    }
    return rc;
}

static int make_g1(struct kc_worker *w)
{
    const struct kvbm_storage_opts memory = {.size = sizeof(memory),
                                             .kind = KVBM_STORAGE_SYSTEM,
                                             .bytes = 1,
                                             .huge_pages = true,
                                             .touch_threads = 1};
    const struct kvbm_allocator allocator = kvbm_allocator_of(&memory);
    struct kvbm_layout_config config = kc_shape_layout(&w->plan->shape, w->plan->g1_blocks, true);
    struct kvbm_pool_opts pool = {.size = sizeof(pool),
                                  .tier = KV_TIER_DEVICE,
                                  .groups = w->plan->shape.window ? 3 : 1,
                                  .n_blocks = w->plan->g1_blocks,
                                  .block_size = w->plan->shape.page_size,
                                  .eviction = KVBM_EVICT_LINEAGE,
                                  .reject_duplicates = true};
    struct kvbm_cache_opts cache = {.size = sizeof(cache)};
    int rc = kvbm_layout_allocate(&config, &allocator, &w->layout);

    for (uint32_t i = 0; i < w->plan->shape.layers && rc == 0; i++)
        rc = kvbm_layout_to_kvx(w->layout, i, &w->layers[i]);
    pool.layout = cache.layout = w->layout;
    if (rc == 0)
        rc = kvbm_pool_create(kvbm_manager_registry(w->manager), &pool, &w->pool);
    cache.pool = w->pool;
    return rc < 0 ? rc : kvbm_cache_attach(w->manager, &cache, &w->cache);
}

static int lend(struct kc_worker *w)
{
    struct kvbm_block_source source = kvbm_manager_source(w->manager);
    const struct kvbm_blockset_opts what = {.size = sizeof(what),
                                            .id = 1,
                                            .layout = kvbm_manager_host_layout(w->manager),
                                            .source = &source,
                                            .shared = kvbm_manager_shared(w->manager)};

    return w->agent ? kvbm_blockset_export(w->agent, &what, &w->set) : 0;
}

static int make_buffers(struct kc_worker *w)
{
    const struct kc_shape *s = &w->plan->shape;
    size_t rows = (size_t)8 * s->page_size * kc_shape_row_bytes(s);

    w->layers = calloc(s->layers, sizeof(*w->layers));
    w->tokens = calloc((size_t)KC_PLAN_BLOCKS * s->page_size, sizeof(*w->tokens));
    w->keys = calloc(KC_PLAN_BLOCKS, sizeof(*w->keys));
    w->blocks[0] = calloc(KC_PLAN_BLOCKS, sizeof(*w->blocks[0]));
    w->blocks[1] = calloc(KC_PLAN_BLOCKS, sizeof(*w->blocks[1]));
    w->fresh = calloc(KC_PLAN_BLOCKS, sizeof(*w->fresh));
    w->rows[0] = aligned_alloc(64, rows);
    w->rows[1] = aligned_alloc(64, rows);
    return w->layers && w->tokens && w->keys && w->blocks[0] && w->blocks[1] && w->fresh &&
                   w->rows[0] && w->rows[1]
               ? 0
               : -ENOMEM;
}

int kc_worker_go(struct kc_worker *w)
{
    int rc = make_buffers(w);

    rc = rc == 0 ? make_manager(w) : rc;
    rc = rc == 0 ? make_g1(w) : rc;
    return rc == 0 ? lend(w) : rc;
}

void kc_worker_close(struct kc_worker *w)
{
    kc_stage_enter(w->stage, KC_STAGE_END, 0);
    kvbm_blockset_destroy(w->set);
    kvbm_cache_detach(w->cache);
    kvbm_pool_destroy(w->pool);
    kvbm_manager_destroy(w->manager, STOP_MS);
    kvbm_agent_destroy(w->agent);
    kvbm_events_destroy(w->events);
    kvbm_layout_destroy(w->layout);
    free(w->layers);
    free(w->tokens);
    free(w->keys);
    free(w->blocks[0]);
    free(w->blocks[1]);
    free(w->fresh);
    free(w->rows[0]);
    free(w->rows[1]);
    kc_stage_close(w->stage);
}

/* ---- the process ---- */

/* Register a block that no request asks for, and forget it: two events. */
static int nudge(struct kc_worker *w)
{
    const uint64_t key = UINT64_C(0x6e75646765) << 8 | w->number;
    const uint32_t tokens[64] = {w->number};
    struct kvbm_chain chain = {.size = sizeof(chain), .keys = &key, .tokens = tokens};
    struct kvbm_mutable fresh = {0};
    struct kvbm_immutable block = {0};
    int rc = kvbm_pool_allocate(w->pool, 1, &fresh, NULL);

    if (rc == 0)
        rc = kvbm_pool_register_chain(w->pool, &fresh, 1, &chain, &block);
    kvbm_mutable_release(&fresh);
    kvbm_immutable_release(&block);
    kvbm_pool_reset_keys(w->pool, 0, &key, 1, NULL);
    return rc;
}

/* Finish what goes to the tiers below, hand out all events, and check the registry. */
static int settle(struct kc_worker *w)
{
    int rc = kvbm_manager_drain(w->manager, SETTLE_MS);

    if (rc == 0)
        rc = kvbm_events_flush(w->events, SETTLE_MS);
    return rc < 0 ? rc : kvbm_registry_check(kvbm_manager_registry(w->manager));
}

static void answer_done(struct kc_worker *w, int rc, struct kc_message *message)
{
    w->done.status = rc;
    message->kind = KC_MESSAGE_DONE;
    message->done = w->done;
}

/* Do what a message asks, and turn it into the answer. */
static void obey(struct kc_worker *w, struct kc_message *message)
{
    uint8_t places[KC_PLAN_IDS];

    switch ((enum kc_message_kind)message->kind) {
    case KC_MESSAGE_GO:
        kc_stage_enter(w->stage, KC_STAGE_TIERS, 0);
        answer_done(w, kc_worker_go(w), message);
        return;
    case KC_MESSAGE_SERVE:
        kc_worker_serve(w, &message->serve);
        answer_done(w, w->done.status, message);
        return;
    case KC_MESSAGE_SETTLE:
        kc_stage_enter(w->stage, KC_STAGE_SETTLE, 0);
        answer_done(w, settle(w), message);
        return;
    case KC_MESSAGE_NUDGE:
        answer_done(w, nudge(w), message);
        return;
    case KC_MESSAGE_LOCATE:
        kc_stage_enter(w->stage, KC_STAGE_BOOKS, 0);
        kvbm_registry_locate(kvbm_manager_registry(w->manager), message->group, message->keys,
                             message->n, places);
        memcpy(message->places, places, message->n);
        message->kind = KC_MESSAGE_PLACES;
        return;
    default:
        message->kind = KC_MESSAGE_FAILED;
        snprintf(message->failed, sizeof(message->failed), "an unknown message");
    }
}

static void talk(struct kc_worker *w, int fd, struct kc_message *message)
{
    int rc = kc_stage_open(w->plan->dir, w->number, &w->stage);

    kc_stage_enter(w->stage, KC_STAGE_OPEN, 0);
    rc = rc == 0 ? kc_worker_open(w, message) : rc;

    if (rc < 0) {
        message->kind = KC_MESSAGE_FAILED;
        snprintf(message->failed, sizeof(message->failed), "worker %u can't start: %s", w->number,
                 strerror(-rc));
    }
    message->n = w->number;
    rc = kc_message_send(fd, message);
    while (rc == 0) {
        kc_stage_enter(w->stage, KC_STAGE_WAIT, 0);
        rc = kc_message_receive(fd, message);
        if (rc < 0 || message->kind == KC_MESSAGE_END)
            break;
        obey(w, message);
        rc = kc_message_send(fd, message);
    }
}

int kc_worker_main(int fd)
{
    struct kc_message *message = calloc(1, sizeof(*message));
    struct kc_plan *plan = calloc(1, sizeof(*plan));
    struct kc_worker *worker = calloc(1, sizeof(*worker));
    int status = 1;

    signal(SIGXFSZ, SIG_IGN); /* --full-disk: a write fails, and the worker lives */
    if (message && plan && worker && kc_message_receive(fd, message) == 0 &&
        message->kind == KC_MESSAGE_PLAN) {
        *plan = message->plan;
        worker->plan = plan;
        worker->number = message->n;
        talk(worker, fd, message);
        kc_worker_close(worker);
        status = 0;
    }
    close(fd);
    free(message);
    free(plan);
    free(worker);
    return status;
}
