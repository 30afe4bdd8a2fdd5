// SPDX-License-Identifier: Apache-2.0
/* POST, PATCH and DELETE of workers, and their members of GET /workers. */
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>

#include "base/core/log.h"
#include "selector/selector.h"

#define SAME(a, b) ((a) == (b) || ((a) && (b) && strcmp(a, b) == 0))

/* -- records in the table; the caller holds admin ------------------------------------------------ */

/* Bring the fleets up to the table, which has changed. Members point to records: without memory there are none. */
static void resync(struct ksel *s)
{
    s->dirty = true;
    ksel_sync(s);
    for (struct ksel_fleet *f = s->fleets; s->dirty && f; f = f->next)
        f->n_members = f->n_odd = 0;
}

/* Put @record, which the table owns from here on, in place of the worker's old one. Returns 0 or -ENOMEM. */
static int put_record(struct ksel *s, struct ksel_record *record)
{
    size_t at = ksel_record_place(s, record->worker);
    struct ksel_record **records;
    int rc = 0;

    pthread_mutex_lock(&s->lock);
    if (at < s->n_records && s->records[at]->worker == record->worker) {
        ksel_record_destroy(s->records[at]);
        s->records[at] = record;
    } else {
        records = realloc(s->records, (s->n_records + 1) * sizeof(struct ksel_record *));
        if (records) {
            memmove(&records[at + 1], &records[at],
                    (s->n_records - at) * sizeof(struct ksel_record *));
            records[at] = record;
            s->records = records;
            s->n_records++;
        } else {
            rc = -ENOMEM;
        }
    }
    resync(s);
    pthread_mutex_unlock(&s->lock);
    return rc;
}

static void remove_record(struct ksel *s, uint64_t worker)
{
    size_t at = ksel_record_place(s, worker);

    pthread_mutex_lock(&s->lock);
    if (at < s->n_records && s->records[at]->worker == worker) {
        struct ksel_record *record = s->records[at];

        memmove(&s->records[at], &s->records[at + 1],
                (s->n_records - at - 1) * sizeof(struct ksel_record *));
        s->n_records--;
        resync(s);
        ksel_record_destroy(record);
    }
    pthread_mutex_unlock(&s->lock);
}

/* -- the registry -------------------------------------------------------------------------------- */

/* Return true when the registered rank is as the record has it. */
static bool is_wanted(const struct ksel_record *r, const struct ki_worker_info *info)
{
    return r->block_size == info->block_size && strcmp(r->model, info->model) == 0 &&
           strcmp(r->group, info->tenant) == 0 &&
           SAME(ksel_record_stream(r, info->rank), info->endpoint) &&
           SAME(r->replay_endpoint, info->replay_endpoint);
}

static void note_refusal(struct ksel_record *r, const struct kv_error *error)
{
    if (!r->refused)
        r->refused = strdup(error->text);
}

static bool is_registered(const struct ki_worker_info *infos, long n,
                          const struct ksel_record *record, uint32_t rank)
{
    for (long i = 0; i < n; i++)
        if (infos[i].instance == record->worker && infos[i].rank == rank &&
            is_wanted(record, &infos[i]))
            return true;
    return false;
}

static void register_ranks(struct ksel *s, struct ksel_record *r,
                           const struct ki_worker_info *infos, long n)
{
    for (uint32_t i = 0; i < r->n_ranks && r->block_size; i++) {
        const struct ki_registration registration = {
            .instance = r->worker,
            .name = r->name,
            .rank = r->start_rank + i,
            .block_size = r->block_size,
            .endpoint = ksel_record_stream(r, r->start_rank + i),
            .replay_endpoint = r->replay_endpoint,
            .model = r->model,
            .tenant = r->group,
            .num_blocks = r->total_blocks,
        };
        struct kv_error error = {0};

        if (!registration.endpoint || is_registered(infos, n, r, registration.rank))
            continue;
        if (ki_registry_register(s->service->registry, &registration, &error) < 0)
            note_refusal(r, &error);
    }
}

/*
 * Register the ranks of the record, and unregister those that it has otherwise or no more. Waits for blocks to
 * leave. Bookings stay: books are libkvselect's.
 */
static void reconcile(struct ksel *s, struct ksel_record *r)
{
    struct ki_registry *registry = s->service->registry;
    struct ki_worker_info *infos;
    struct kv_error error = {0};
    long n = ki_registry_workers(registry, &infos);

    free(r->refused);
    r->refused = NULL;
    if (n < 0) {
        r->refused = strdup("out of memory");
        return;
    }
    for (long i = 0; i < n; i++)
        if (infos[i].instance == r->worker && !is_wanted(r, &infos[i]) &&
            ki_registry_unregister(registry, r->worker, infos[i].model, infos[i].tenant,
                                   &infos[i].rank, &error) < 0)
            kv_log_warn("selector", "a rank was not unregistered", "reason=\"%s\"", error.text);
    register_ranks(s, r, infos, n);
    ki_worker_infos_free(infos, n);
}

/* Make a record of a worker that has none, from its registrations. NULL: there are none, or no memory. */
static struct ksel_record *record_of(struct ksel *s, uint64_t worker)
{
    struct ksel_record *r = ksel_record_create();
    struct ki_worker_info *infos;
    long n = ki_registry_workers(s->service->registry, &infos);
    bool found = false;

    for (long i = 0; r && i < n; i++) {
        if (infos[i].instance != worker)
            continue;
        if (!found) {
            free(r->model);
            free(r->group);
            r->worker = worker;
            r->adopted = true;
            r->model = strdup(infos[i].model);
            r->group = strdup(infos[i].tenant);
            r->name = infos[i].name ? strdup(infos[i].name) : NULL;
            r->replay_endpoint = infos[i].replay_endpoint ? strdup(infos[i].replay_endpoint) : NULL;
            r->block_size = infos[i].block_size;
            r->start_rank = infos[i].rank;
            r->total_blocks = infos[i].num_blocks;
        }
        found = true;
        r->n_ranks = KV_MIN(infos[i].rank - r->start_rank + 1, (uint32_t)KSEL_MAX_RANKS);
        if (ksel_record_add_stream(r, infos[i].rank, infos[i].endpoint) < 0)
            found = false;
    }
    if (n >= 0)
        ki_worker_infos_free(infos, n);
    if (r && found && r->model && r->group)
        return r;
    ksel_record_destroy(r);
    return NULL;
}

/* -- answers ------------------------------------------------------------------------------------- */

static void write_record(const struct ksel_record *r, enum ksel_lifecycle lifecycle,
                         struct kv_json_writer *w)
{
    kv_json_begin_object(w);
    kv_json_key(w, "worker_id");
    ksel_write_worker(w, r->worker, r->name);
    kv_json_member_str(w, "model_name", r->model);
    kv_json_member_str(w, "routing_group", r->group);
    kv_json_key(w, "block_size");
    if (r->block_size)
        kv_json_put_u64(w, r->block_size);
    else
        kv_json_put_null(w);
    ksel_record_write(r, lifecycle, w);
    kv_json_end_object(w);
}

static void answer(const struct ksel_record *r, enum ksel_lifecycle lifecycle, unsigned status,
                   struct kh_reply *reply)
{
    struct kv_json_writer w;

    reply->status = status;
    kv_json_writer_init(&w, &reply->body);
    write_record(r, lifecycle, &w);
}

/* Change the registry and the table to @record, which is taken over, and answer. Holds admin. */
static void apply(struct ksel *s, struct ksel_record *record, unsigned status,
                  struct kh_reply *reply)
{
    reconcile(s, record);
    answer(record, ksel_record_lifecycle(record), status, reply);
    if (put_record(s, record) == 0)
        return;
    ksel_record_destroy(record);
    kh_reply_error(reply, 503, "out of memory");
}

static bool may_go_on(struct kh_request *request, struct kh_reply *reply, bool body)
{
    if (body && !ksel_is_json(request, reply))
        return false;
    reply->rerun = !request->may_wait; /* blocks may have to leave, which takes seconds */
    return request->may_wait;
}

static bool parse(struct kh_request *request, bool create, struct ksel_record *record,
                  struct kh_reply *reply)
{
    struct kv_error error = {0};

    return ksel_is_read(ksel_record_parse(request->body, create, record, &error), &error, reply);
}

void ksel_api_add_worker(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct ksel *s = ksel_of(service);
    struct ksel_record *record;

    if (!may_go_on(request, reply, true))
        return;
    record = ksel_record_create();
    if (!record) {
        kh_reply_error(reply, 503, "out of memory");
        return;
    }
    if (!parse(request, true, record, reply)) {
        ksel_record_destroy(record);
        return;
    }
    pthread_mutex_lock(&s->admin);
    apply(s, record, 201, reply);
    pthread_mutex_unlock(&s->admin);
}

/* Read the worker id of the path. Returns false when @reply has the plain 400. */
static bool read_id(const struct kh_request *request, struct kh_reply *reply, uint64_t *ret)
{
    const char *why = "";

    if (kv_instance_parse(request->id.p, request->id.len, ret, &why) >= 0)
        return true;
    reply->status = 400;
    reply->content_type = "text/plain";
    kv_buf_printf(&reply->body, "Invalid worker id: %s", why);
    return false;
}

static void not_found(const struct kh_request *request, struct kh_reply *reply)
{
    kh_reply_error(reply, 404, "worker %.*s not found", (int)KV_MIN(request->id.len, (size_t)200),
                   request->id.p);
}

/*
 * Copy the worker's record, or make one of its registrations. Ranks that the registry told may have moved since.
 * Holds admin.
 */
static struct ksel_record *take_record(struct ksel *s, uint64_t worker)
{
    const struct ksel_record *record = ksel_record_find(s, worker);
    struct ksel_record *now = !record || record->adopted ? record_of(s, worker) : NULL, *copy;

    if (!record)
        return now;
    copy = ksel_record_copy(record);
    if (copy && now)
        ksel_record_move_streams(now, copy);
    ksel_record_destroy(now);
    return copy;
}

void ksel_api_patch_worker(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct ksel *s = ksel_of(service);
    struct ksel_record *record;
    uint64_t worker;

    if (!read_id(request, reply, &worker) || !may_go_on(request, reply, true))
        return;
    pthread_mutex_lock(&s->admin);
    record = take_record(s, worker);
    if (!record)
        not_found(request, reply);
    else if (parse(request, false, record, reply))
        apply(s, record, 200, reply);
    else
        ksel_record_destroy(record);
    pthread_mutex_unlock(&s->admin);
}

/* Unregister all ranks, of any model. */
static void unregister(struct ksel *s, uint64_t worker)
{
    struct ki_worker_info *infos;
    long n = ki_registry_workers(s->service->registry, &infos);

    for (long i = 0; i < n; i++) {
        struct kv_error error = {0};

        if (infos[i].instance == worker && (i == 0 || infos[i - 1].instance != worker) &&
            ki_registry_unregister(s->service->registry, worker, infos[i].model, NULL, NULL,
                                   &error) < 0)
            kv_log_warn("selector", "a worker was not unregistered", "reason=\"%s\"", error.text);
    }
    if (n >= 0)
        ki_worker_infos_free(infos, n);
}

void ksel_api_delete_worker(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct ksel *s = ksel_of(service);
    struct ksel_record *record;
    uint64_t worker;

    if (!read_id(request, reply, &worker) || !may_go_on(request, reply, false))
        return;
    pthread_mutex_lock(&s->admin);
    record = take_record(s, worker);
    if (record) {
        unregister(s, worker);
        remove_record(s, worker);
        answer(record, KSEL_UNSCHEDULABLE, 200, reply);
        ksel_record_destroy(record);
    } else {
        not_found(request, reply);
    }
    pthread_mutex_unlock(&s->admin);
}

/* -- GET /workers -------------------------------------------------------------------------------- */

void ksel_write_one(struct ki_service *service, const struct ki_worker_info *infos, long n,
                    struct kv_json_writer *w)
{
    struct ksel *s = ksel_of(service);
    const struct ksel_record *record;

    (void)n;
    kv_json_key(w, "worker_id");
    ksel_write_worker(w, infos->instance, infos->name);
    pthread_mutex_lock(&s->lock);
    record = ksel_record_find(s, infos->instance);
    if (record) {
        ksel_record_write(record, ksel_record_lifecycle(record), w);
    } else {
        bool withdrawn = infos->status == KI_WITHDRAWN;

        kv_json_member_str(w, "lifecycle",
                           ksel_lifecycle_name(withdrawn ? KSEL_UNSCHEDULABLE : KSEL_SCHEDULABLE));
        kv_json_key(w, "not_schedulable_reasons");
        kv_json_begin_array(w);
        if (withdrawn)
            kv_json_put_str(w, "no source names it any more");
        kv_json_end_array(w);
        kv_json_key(w, "endpoint");
        kv_json_put_null(w);
    }
    pthread_mutex_unlock(&s->lock);
}

static bool is_sought(const struct kh_request *request)
{
    struct kv_str text;

    return (kh_request_param(request, "search", &text) && text.len) ||
           (kh_request_param(request, "only", &text) && text.len);
}

void ksel_write_others(struct ki_service *service, const struct kh_request *request,
                       const struct ki_worker_info *infos, long n, struct kv_json_writer *w)
{
    struct ksel *s = ksel_of(service);

    if (is_sought(request))
        return;
    pthread_mutex_lock(&s->lock);
    for (size_t i = 0; i < s->n_records; i++) {
        const struct ksel_record *r = s->records[i];
        bool registered = false;

        for (long k = 0; k < n && !registered; k++)
            registered = infos[k].instance == r->worker;
        if (!registered && kh_request_passes(request, "model_name", r->model) &&
            kh_request_passes(request, "routing_group", r->group))
            /* Complete, and yet without a stream: a client or a peer has unregistered it. */
            write_record(r,
                         ksel_record_lifecycle(r) == KSEL_INCOMPLETE ? KSEL_INCOMPLETE
                                                                     : KSEL_UNSCHEDULABLE,
                         w);
    }
    pthread_mutex_unlock(&s->lock);
}
