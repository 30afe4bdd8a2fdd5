// SPDX-License-Identifier: Apache-2.0
#include "selector/selector.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/core/mix.h"
#include "base/net/endpoint.h"
#include "indexer/registry/names.h"
#include "selector/envoy.h"

#define TICK_MS 500
#define DRAIN_MS 4000 /* of running requests at a stop; the streams to peers get a second more */
#define NOTES_BYTES ((size_t)16 << 20) /* of bookings that expire in one tick */

struct ksel *ksel_of(void *service)
{
    return ((struct ki_service *)service)->added;
}

/* -- buffers ----------------------------------------------------------------------------------- */

static void scratch_free(struct ksel_scratch *scratch)
{
    ksel_body_fini(&scratch->body);
    kv_buf_fini(&scratch->sequence);
    kv_buf_fini(&scratch->texts);
    kv_buf_fini(&scratch->preferred);
    kv_buf_fini(&scratch->candidates);
    kv_buf_fini(&scratch->avoided);
    free(scratch);
}

struct ksel_scratch *ksel_scratch_take(struct ksel *s, struct kh_reply *reply)
{
    struct ki_scratch *indexer = ki_scratch_take(s->service, reply);
    struct ksel_scratch *scratch;

    if (!indexer)
        return NULL;
    pthread_mutex_lock(&s->lock);
    scratch = s->scratch;
    if (scratch)
        s->scratch = scratch->next;
    pthread_mutex_unlock(&s->lock);
    if (!scratch)
        scratch = calloc(1, sizeof(*scratch));
    if (scratch) {
        scratch->indexer = indexer;
        return scratch;
    }
    ki_scratch_give(s->service, indexer);
    kh_reply_error(reply, 503, "out of memory");
    return NULL;
}

void ksel_scratch_give(struct ksel *s, struct ksel_scratch *scratch)
{
    ki_scratch_give(s->service, scratch->indexer);
    if (scratch->body.strings.capacity + scratch->body.sequence.capacity +
            scratch->candidates.capacity >
        (4u << 20)) {
        scratch_free(scratch);
        return;
    }
    pthread_mutex_lock(&s->lock);
    scratch->next = s->scratch;
    s->scratch = scratch;
    pthread_mutex_unlock(&s->lock);
}

bool ksel_is_json(const struct kh_request *request, struct kh_reply *reply)
{
    if (ki_media_of(request->content_type) == KI_MEDIA_JSON)
        return true;
    kh_reply_error(reply, 415, "expected the header Content-Type: application/json");
    return false;
}

bool ksel_is_read(int rc, const struct kv_error *error, struct kh_reply *reply)
{
    if (rc < 0)
        kh_reply_error(reply, rc == -EINVAL ? 422 : rc == -ENOMEM ? 503 : 400, "%s", error->text);
    return rc == 0;
}

bool ksel_read_body(struct kh_request *request, struct kh_reply *reply,
                    struct ksel_scratch *scratch)
{
    struct kv_error error = {0};
    const char *model;

    if (!ksel_is_json(request, reply) ||
        !ksel_is_read(
            ksel_body_parse(request->body, &scratch->indexer->body, &scratch->body, &error), &error,
            reply))
        return false;
    model = ksel_text_of(&scratch->body, scratch->body.model);
    if (model)
        (void)snprintf(request->model, sizeof(request->model), "%s", model);
    return true;
}

/* -- fleets ------------------------------------------------------------------------------------ */

static int by_holder(const struct kv_holder *a, const struct kv_holder *b)
{
    if (a->worker != b->worker)
        return a->worker < b->worker ? -1 : 1;
    return (a->rank > b->rank) - (a->rank < b->rank);
}

static int compare_members(const void *a, const void *b)
{
    return by_holder(&((const struct ksel_member *)a)->holder,
                     &((const struct ksel_member *)b)->holder);
}

struct ksel_member *ksel_fleet_member(const struct ksel_fleet *fleet, struct kv_holder holder)
{
    const struct ksel_member key = {.holder = holder};

    if (!fleet->n_members)
        return NULL;
    return bsearch(&key, fleet->members, fleet->n_members, sizeof(key), compare_members);
}

static void fleet_destroy(struct ksel_fleet *fleet)
{
    kvsel_destroy(fleet->books);
    free(fleet->members);
    free(fleet->model);
    free(fleet->group);
    free(fleet);
}

static struct ksel_fleet *fleet_create(struct ksel *s, const char *model, const char *group,
                                       uint32_t block_size)
{
    const struct ksel_options *o = s->options;
    struct kvsel_opts opts = KVSEL_OPTS_INIT;
    struct ksel_fleet *fleet = calloc(1, sizeof(*fleet));

    if (!fleet)
        return NULL;
    opts.policy = o->policy;
    opts.seed = kv_secret();
    opts.block_size = block_size;
    opts.predict_ns = o->predict_ms ? o->predict_ms * KV_NS_PER_MS : UINT64_MAX;
    opts.expiry_ns = o->booking_expiry_ms * KV_NS_PER_MS;
    opts.max_bookings = o->max_bookings;
    opts.queue_waiting = o->max_waiting; /* kvsel_select then has -EAGAIN: nothing is queued */
    opts.session_ns = o->session_ms * KV_NS_PER_MS;
    fleet->block_size = block_size;
    fleet->model = strdup(model);
    fleet->group = strdup(group);
    if (fleet->model && fleet->group && kvsel_create(&opts, &fleet->books) == 0)
        return fleet;
    fleet_destroy(fleet);
    return NULL;
}

static bool is_fleet(const struct ksel_fleet *fleet, const char *model, const char *group)
{
    return strcmp(fleet->model, model) == 0 && strcmp(fleet->group, group) == 0;
}

/* The fleet with members; else any, whose bookings may still end. */
struct ksel_fleet *ksel_fleet_find(struct ksel *s, const char *model, const char *group)
{
    struct ksel_fleet *found = NULL;

    for (struct ksel_fleet *f = s->fleets; f; f = f->next)
        if (is_fleet(f, model, group) && (!found || f->n_members))
            found = f;
    return found;
}

struct ksel_fleet *ksel_fleet_booked(struct ksel *s, const char *id, size_t len,
                                     struct kvsel_booking *ret)
{
    struct ksel_fleet *f = s->fleets;

    while (f && kvsel_get_booking(f->books, id, len, ret) < 0)
        f = f->next;
    return f;
}

struct ksel_fleet *ksel_fleet_make(struct ksel *s, const char *model, const char *group,
                                   uint32_t block_size)
{
    struct ksel_fleet *f = s->fleets;

    while (f && (!is_fleet(f, model, group) || f->block_size != block_size))
        f = f->next;
    if (f)
        return f;
    f = fleet_create(s, model, group, block_size);
    if (f) {
        f->next = s->fleets;
        s->fleets = f;
    }
    return f;
}

/* Tell the books of a worker. Returns 0 or a negative errno. */
static int set_worker(struct ksel_fleet *fleet, const struct ki_worker_info *info,
                      const struct ksel_record *record)
{
    struct kvsel_worker worker = KVSEL_WORKER_INIT;
    const char **labels = NULL;
    size_t n = record ? record->taints.n + record->domains.n : 0;
    int rc;

    worker.holder = (struct kv_holder){info->instance, info->rank};
    worker.capacity = info->num_blocks * info->block_size;
    if (n) {
        labels = malloc(n * sizeof(*labels));
        if (!labels)
            return -ENOMEM;
        for (size_t i = 0; i < record->taints.n; i++)
            labels[i] = record->taints.items[i];
        for (size_t i = 0; i < record->domains.n; i++)
            labels[record->taints.n + i] = record->domains.items[i];
    }
    if (record) {
        worker.draining = record->draining;
        if (record->total_blocks)
            worker.capacity = record->total_blocks * info->block_size;
    }
    worker.labels = labels;
    worker.n_labels = n;
    rc = kvsel_set_worker(fleet->books, &worker);
    free(labels);
    return rc;
}

/*
 * Note where Envoy reaches the member: its record's endpoint, if that is a host and a port; without one the
 * host of its event stream, if that is an address (Envoy resolves no names), with --ext-proc-target-port.
 */
static void note_address(const struct ksel *s, struct ksel_member *member, const char *stream)
{
    const char *endpoint = member->record ? member->record->endpoint : NULL, *scheme, *why;
    unsigned port = (unsigned)s->options->ext_proc_target_port;
    struct kv_endpoint parsed;
    char text[sizeof("tcp://") + KSEL_ADDRESS];
    uint8_t address[16];
    size_t len;

    if (endpoint) {
        scheme = strstr(endpoint, "://");
        if (scheme)
            endpoint = scheme + 3;
        len = strcspn(endpoint, "/");
        (void)snprintf(text, sizeof(text), "tcp://%.*s", (int)KV_MIN(len, sizeof(text)), endpoint);
        if (len < KSEL_ADDRESS && kv_endpoint_parse_peer(text, &parsed, &why) == 0)
            memcpy(member->address, endpoint, len);
    } else if (port && kv_endpoint_parse(stream, &parsed, &why) == 0 &&
               parsed.scheme == KV_SCHEME_TCP && kv_endpoint_address(&parsed, address)) {
        (void)snprintf(member->address, KSEL_ADDRESS,
                       strchr(parsed.host, ':') ? "[%.64s]:%u" : "%.64s:%u", parsed.host, port);
    }
}

/* Add the rank of @info, if it may be chosen. */
static void join(struct ksel *s, const struct ki_worker_info *info)
{
    const struct ksel_record *record = ksel_record_find(s, info->instance);
    struct ksel_fleet *fleet;
    struct ksel_member *members;

    if (record && ksel_record_lifecycle(record) == KSEL_INCOMPLETE)
        return;
    fleet = ksel_fleet_make(s, info->model, info->tenant, info->block_size);
    members = fleet ? realloc(fleet->members, (fleet->n_members + 1) * sizeof(*members)) : NULL;
    if (!members || set_worker(fleet, info, record) < 0) {
        if (members)
            fleet->members = members;
        kv_log_error("selector", "no memory: a worker can't be chosen", NULL);
        return;
    }
    fleet->members = members;
    members[fleet->n_members++] =
        (struct ksel_member){.holder = {info->instance, info->rank}, .record = record};
    note_address(s, &members[fleet->n_members - 1], info->endpoint);
}

/* Remove from the books those members from before the sync that are none any more. */
static void leave(struct ksel_fleet *fleet)
{
    for (size_t i = 0; i < fleet->n_before; i++) {
        const struct ksel_member *m = &fleet->before[i];

        if (!ksel_fleet_member(fleet, m->holder))
            (void)kvsel_remove_worker(fleet->books, m->holder);
        else if (m->odd) /* the views say it again */
            (void)kvsel_fail_worker(fleet->books, m->holder, 0);
    }
    free(fleet->before);
    fleet->before = NULL;
    fleet->n_before = 0;
}

void ksel_sync(struct ksel *s)
{
    uint64_t revision = ki_registry_revision(s->service->registry);
    struct ki_worker_info *infos;
    long n;

    if (KV_LIKELY(revision == s->revision && !s->dirty))
        return;
    n = ki_registry_workers(s->service->registry, &infos);
    if (n < 0)
        return;
    for (struct ksel_fleet *f = s->fleets; f; f = f->next) {
        f->before = KV_STEAL(f->members);
        f->n_before = f->n_members;
        f->n_members = f->n_odd = 0;
    }
    for (long i = 0; i < n; i++)
        join(s, &infos[i]); /* they come in the order of holders */
    for (struct ksel_fleet *f = s->fleets; f; f = f->next)
        leave(f);
    ki_worker_infos_free(infos, n);
    s->revision = revision;
    s->dirty = false;
}

/* Forget fleets without workers and bookings. The caller holds lock. */
static void sweep_fleets(struct ksel *s)
{
    struct ksel_fleet **at = &s->fleets;

    while (*at) {
        struct kvsel_stats stats = KVSEL_STATS_INIT;
        struct ksel_fleet *f = *at;

        (void)kvsel_get_stats(f->books, &stats);
        if (f->n_members || stats.bookings) {
            at = &f->next;
            continue;
        }
        *at = f->next;
        fleet_destroy(f);
    }
}

/* -- trust ------------------------------------------------------------------------------------- */

/* Return true when a view's stream isn't live: its claims are old, or nobody follows them. */
static bool is_stale(const struct ki_view *view)
{
    return view->reasons & (KI_BECAUSE(STALE) | KI_BECAUSE(UNFOLLOWED));
}

void ksel_fleet_trust(struct ksel *s, struct ksel_fleet *fleet, const struct kv_buf *views)
{
    const struct ki_view *v = (const struct ki_view *)(const void *)views->data;
    const struct ki_view *end = v + views->len / sizeof(*v);
    double partial = (double)s->options->partial_trust / 1e9;

    if (KV_LIKELY(v == end && !fleet->n_odd))
        return;
    for (size_t i = 0; i < fleet->n_members && fleet->n_odd; i++) {
        struct ksel_member *m = &fleet->members[i];

        if (!m->odd)
            continue;
        (void)kvsel_trust_worker(fleet->books, m->holder, 1);
        (void)kvsel_fail_worker(fleet->books, m->holder, 0);
        m->odd = false;
        fleet->n_odd--;
    }
    for (; v < end; v++) {
        struct ksel_member *m = ksel_fleet_member(fleet, v->holder);

        if (!m || (v->status != KI_WITHDRAWN && !is_stale(v)))
            continue;
        fleet->n_odd += !m->odd;
        m->odd = true;
        if (v->status == KI_WITHDRAWN)
            (void)kvsel_fail_worker(fleet->books, m->holder, UINT64_MAX);
        else
            (void)kvsel_trust_worker(fleet->books, m->holder, partial);
    }
}

/* -- workers ----------------------------------------------------------------------------------- */

size_t ksel_record_place(const struct ksel *s, uint64_t worker)
{
    size_t from = 0, to = s->n_records;

    while (from < to) {
        size_t at = from + (to - from) / 2;

        if (s->records[at]->worker < worker)
            from = at + 1;
        else
            to = at;
    }
    return from;
}

struct ksel_record *ksel_record_find(const struct ksel *s, uint64_t worker)
{
    size_t at = ksel_record_place(s, worker);

    return at < s->n_records && s->records[at]->worker == worker ? s->records[at] : NULL;
}

uint64_t ksel_n_schedulable(const struct ksel *s)
{
    uint64_t n = 0;

    for (const struct ksel_fleet *f = s->fleets; f; f = f->next)
        for (size_t i = 0; i < f->n_members; i++)
            n += (i == 0 || f->members[i].holder.worker != f->members[i - 1].holder.worker) &&
                 !(f->members[i].record && f->members[i].record->draining);
    return n;
}

void ksel_put_worker(struct ksel *s, struct kv_json_writer *w, uint64_t worker)
{
    struct ki_names *names;
    const struct ki_name *name;

    if (KV_LIKELY(!(worker & KV_INSTANCE_NAMED))) {
        kv_json_put_u64(w, worker);
        return;
    }
    names = ki_registry_names(s->service->registry);
    ki_names_read(names);
    name = ki_names_find(names, worker);
    ksel_write_worker(w, worker, name ? name->text : NULL);
    ki_names_end(names);
}

/* -- the service's calls ------------------------------------------------------------------------- */

/* Argument of note_expired. */
struct expiring {
    struct ksel *s;
    const struct ksel_fleet *fleet;
    struct kv_buf notes; /* of each booking: the struct, its id, its model with a NUL */
};

static void log_expired(struct ksel *s, const struct kvsel_booking *booking, const char *model)
{
    char id[80], quoted[160], quoted_model[160];
    size_t len = KV_MIN(booking->id_len, sizeof(id) - 1);

    memcpy(id, booking->id, len);
    id[len] = '\0';
    ksel_log_event(s->log, "expired", booking->id, booking->id_len);
    kv_log_warn("selector", "a booking without progress was freed",
                "id=%s model=%s worker=%" PRIu64 " rank=%" PRIu32 " tokens=%" PRIu64
                " first_token=%s",
                kv_log_quote(quoted, sizeof(quoted), id),
                kv_log_quote(quoted_model, sizeof(quoted_model), model), booking->worker.worker,
                booking->worker.rank, booking->tokens, booking->first_token ? "yes" : "no");
}

/* Note a booking for log_notes; without room log it at once. */
static void note_expired(void *arg, const struct kvsel_booking *booking)
{
    struct expiring *expiring = arg;
    struct kv_buf *notes = &expiring->notes;
    const char *model = expiring->fleet->model;
    size_t model_size = strlen(model) + 1;

    if (kv_buf_reserve(notes, sizeof(*booking) + booking->id_len + model_size) < 0) {
        log_expired(expiring->s, booking, model);
        return;
    }
    kv_buf_append(notes, booking, sizeof(*booking));
    kv_buf_append(notes, booking->id, booking->id_len);
    kv_buf_append(notes, model, model_size);
}

static void log_notes(struct ksel *s, const struct kv_buf *notes)
{
    struct kvsel_booking booking;

    for (size_t at = 0; at < notes->len;) {
        const char *model;

        memcpy(&booking, notes->data + at, sizeof(booking));
        booking.id = notes->data + at + sizeof(booking);
        model = booking.id + booking.id_len;
        log_expired(s, &booking, model);
        at = (size_t)(model + strlen(model) + 1 - notes->data);
    }
}

static uint64_t tick(struct ki_service *service, uint64_t now_ns)
{
    struct ksel *s = ksel_of(service);
    struct expiring expiring = {.s = s, .notes = {.limit = NOTES_BYTES}};
    uint64_t expiry_ms;

    pthread_mutex_lock(&s->lock);
    ksel_sync(s);
    for (struct ksel_fleet *f = s->fleets; f; f = f->next) {
        expiring.fleet = f;
        (void)kvsel_expire(f->books, now_ns, note_expired, &expiring);
    }
    sweep_fleets(s);
    pthread_mutex_unlock(&s->lock);
    log_notes(s, &expiring.notes); /* writing may wait for a disk */
    kv_buf_fini(&expiring.notes);
    expiry_ms = KV_MAX(s->options->booking_expiry_ms / 4, UINT64_C(10));
    return now_ns + KV_MIN(expiry_ms, (uint64_t)TICK_MS) * KV_NS_PER_MS;
}

static int start(struct ki_service *service, struct kv_error *error)
{
    struct ksel *s = calloc(1, sizeof(*s));
    int rc;

    if (!s)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    service->added = s;
    s->service = service;
    s->options = (const struct ksel_options *)service->options;
    s->cache.max = (size_t)s->options->cache_entries;
    s->dirty = true;
    pthread_mutex_init(&s->admin, NULL);
    pthread_mutex_init(&s->lock, NULL);
    ksel_notices_init(&s->peers.notices, KSEL_NOTICES_BYTES);
    s->peers.wake.fd = -1;
    if (s->options->decision_log) {
        rc = ksel_log_open(s->options->decision_log, s->options->decision_sample, &s->log, error);
        if (rc < 0)
            return rc;
    }
    rc = ksel_peers_start(s, error);
    return rc < 0 ? rc : ksel_envoy_start(s, error);
}

/* Envoy's streams free their bookings as they end, and requests tell of theirs: the peers hear of it, too. */
static void end(struct ki_service *service)
{
    struct ksel *s = ksel_of(service);

    ksel_envoy_end(s);
    kh_http_drain(atomic_load_explicit(&service->http, memory_order_acquire), DRAIN_MS);
    ksel_peers_end(s);
}

static void stop(struct ki_service *service)
{
    struct ksel *s = ksel_of(service);

    if (!s)
        return;
    ksel_envoy_stop(s);
    ksel_peers_stop(s);
    while (s->fleets) {
        struct ksel_fleet *f = s->fleets;

        s->fleets = f->next;
        fleet_destroy(f);
    }
    while (s->scratch) {
        struct ksel_scratch *scratch = s->scratch;

        s->scratch = scratch->next;
        scratch_free(scratch);
    }
    for (size_t i = 0; i < s->n_records; i++)
        ksel_record_destroy(s->records[i]);
    free(s->records);
    ksel_cache_fini(&s->cache);
    ksel_log_close(s->log);
    pthread_mutex_destroy(&s->admin);
    pthread_mutex_destroy(&s->lock);
    free(s);
    service->added = NULL;
}

static int reopen(struct ki_service *service, struct kv_error *error)
{
    struct ksel *s = ksel_of(service);

    return s->log ? ksel_log_reopen(s->log, error) : 0;
}

#define SMALL_BODY (64u << 10)
#define WORKER_BODY (2u << 20)

static const struct kh_route routes[] = {
    {"POST", "/select_and_reserve", ksel_api_select_and_reserve, SIZE_MAX, 0},
    {"POST", "/select", ksel_api_select, SIZE_MAX, 0},
    {"POST", "/reservations/{id}/prefill_complete", ksel_api_prefill_complete, SMALL_BODY, 0},
    {"DELETE", "/reservations/{id}", ksel_api_free, SMALL_BODY, 0},
    {"POST", "/reservations/{id}/output_block", ksel_api_output_block, SMALL_BODY, 0},
    {"POST", "/reservations", ksel_api_reserve, SIZE_MAX, 0},
    {"GET", "/reservations", ksel_api_reservations, 0, 0},
    {"GET", "/bookings", ksel_api_bookings, 0, KH_ROUTE_UNMEASURED},
    {"GET", "/loads", ksel_api_loads, 0, 0},
    {"POST", "/potential_loads", ksel_api_potential_loads, SIZE_MAX, 0},
    {"POST", "/overlap_scores", ksel_api_overlap_scores, SIZE_MAX, 0},
    {"POST", "/workers", ksel_api_add_worker, WORKER_BODY, 0},
    {"PATCH", "/workers/{id}", ksel_api_patch_worker, WORKER_BODY, 0},
    {"DELETE", "/workers/{id}", ksel_api_delete_worker, SMALL_BODY, 0},
    {"GET", "/health", ksel_api_health, 0, KH_ROUTE_OPEN},
    {"GET", "/ready", ksel_api_ready, 0, KH_ROUTE_OPEN},
    {"POST", "/replica_sync/register_peer", ksel_api_replica_sync, SMALL_BODY, 0},
    {"POST", "/replica_sync/deregister_peer", ksel_api_replica_sync, SMALL_BODY, 0},
    {"GET", "/replica_sync/peers", ki_api_peers, 0, 0},
};

const struct ki_addition ksel_addition = {
    .routes = routes,
    .n_routes = KV_COUNT(routes),
    .start = start,
    .streams = KSEL_FOLLOWERS_MAX,
    .end = end,
    .stop = stop,
    .tick = tick,
    .render = ksel_render,
    .reopen = reopen,
    .write_worker = ksel_write_one,
    .write_others = ksel_write_others,
};
