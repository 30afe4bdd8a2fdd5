// SPDX-License-Identifier: Apache-2.0
/* Bookings: made by POST /reservations, told of by their ids, ended by DELETE. */
#include <errno.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "selector/ask.h"

static void reply_result(int rc, const struct kh_request *request, struct kh_reply *reply)
{
    if (rc < 0)
        kh_reply_error(reply, 404, "reservation %.*s not found",
                       (int)KV_MIN(request->id.len, (size_t)200), request->id.p);
    else
        ki_reply_ok(reply, 200);
}

/* -- progress ---------------------------------------------------------------------------------- */

int ksel_first_token(struct ksel *s, const char *id, size_t len)
{
    struct kvsel_booking b = KVSEL_BOOKING_INIT;
    struct ksel_fleet *fleet;

    pthread_mutex_lock(&s->lock);
    fleet = ksel_fleet_booked(s, id, len, &b);
    if (fleet) {
        ksel_tell(s, KSEL_NOTICE_FIRST_TOKEN, &b, 0, false);
        (void)kvsel_first_token(fleet->books, id, len, kv_now_ns());
    }
    pthread_mutex_unlock(&s->lock);
    if (!fleet)
        return -ENOENT;
    ksel_log_event(s->log, "first_token", id, len);
    return 0;
}

int ksel_output(struct ksel *s, const char *id, size_t len, uint64_t tokens)
{
    struct kvsel_booking b = KVSEL_BOOKING_INIT;
    struct ksel_fleet *fleet;

    pthread_mutex_lock(&s->lock);
    fleet = ksel_fleet_booked(s, id, len, &b);
    if (fleet) {
        tokens = tokens ? tokens : fleet->block_size;
        ksel_tell(s, KSEL_NOTICE_OUTPUT, &b, b.output + tokens, false);
        (void)kvsel_output(fleet->books, id, len, tokens, kv_now_ns());
    }
    pthread_mutex_unlock(&s->lock);
    return fleet ? 0 : -ENOENT;
}

int ksel_free(struct ksel *s, const char *id, size_t len, bool lost)
{
    struct kvsel_booking b = KVSEL_BOOKING_INIT;
    struct ksel_fleet *fleet;

    pthread_mutex_lock(&s->lock);
    fleet = ksel_fleet_booked(s, id, len, &b);
    if (fleet) {
        ksel_tell(s, KSEL_NOTICE_FREED, &b, 0, lost);
        (void)kvsel_free(fleet->books, id, len, lost ? KVSEL_LOST : KVSEL_DONE, kv_now_ns());
    }
    pthread_mutex_unlock(&s->lock);
    if (!fleet)
        return -ENOENT;
    ksel_log_event(s->log, lost ? "lost" : "free", id, len);
    return 0;
}

void ksel_api_prefill_complete(void *service, struct kh_request *request, struct kh_reply *reply)
{
    reply_result(ksel_first_token(ksel_of(service), request->id.p, request->id.len), request,
                 reply);
}

void ksel_api_free(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct kv_str outcome;
    bool lost = kh_request_param(request, "outcome", &outcome) && kv_str_eq(outcome, "lost");

    reply_result(ksel_free(ksel_of(service), request->id.p, request->id.len, lost), request, reply);
}

void ksel_api_output_block(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct ksel *s = ksel_of(service);
    struct ksel_scratch *scratch = ksel_scratch_take(s, reply);

    if (!scratch)
        return;
    if (ksel_read_body(request, reply, scratch)) {
        const struct ksel_body *body = &scratch->body;

        if (body->has_decay && !(body->decay >= 0 && body->decay <= 1))
            kh_reply_error(reply, 400, "decay_fraction is not from 0 to 1");
        else
            reply_result(ksel_output(s, request->id.p, request->id.len, body->tokens), request,
                         reply);
    }
    ksel_scratch_give(s, scratch);
}

/* -- booking ----------------------------------------------------------------------------------- */

int ksel_book(struct ksel *s, struct ksel_fleet *fleet, const char *id, size_t len,
              const struct kvsel_request *request, const struct kvsel_choice *choice,
              uint64_t now_ns)
{
    struct kvsel_booking booking = KVSEL_BOOKING_INIT;
    struct kvsel_request owned = *request;
    int rc;

    for (const struct ksel_fleet *f = s->fleets; f; f = f->next)
        if (f != fleet && kvsel_get_booking(f->books, id, len, &booking) == 0)
            return -EEXIST;
    owned.origin = s->peers.origin;
    owned.stamp = ++s->peers.stamp;
    rc = kvsel_book(fleet->books, id, len, &owned, choice, now_ns);
    if (rc == 0)
        ksel_tell_booked(s, fleet, id, len, &owned, choice, now_ns);
    return rc;
}

static void answer(struct ksel *s, const char *id, size_t id_len, struct kv_holder worker,
                   struct kh_reply *reply)
{
    struct kv_json_writer w;

    reply->status = 201;
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_key(&w, "selection_id");
    kv_json_put_strn(&w, id, id_len);
    kv_json_key(&w, "worker_id");
    ksel_put_worker(s, &w, worker.worker);
    kv_json_member_u64(&w, "dp_rank", worker.rank);
    kv_json_end_object(&w);
}

void ksel_refuse_booking(int rc, const char *id, struct kh_reply *reply)
{
    if (rc == -EEXIST)
        kh_reply_error(reply, 409, "selection_id %.200s is in use", id);
    else if (rc == -ENOENT)
        kh_reply_error(reply, 404, "no pending selection %.200s", id);
    else
        kh_reply_error(reply, 503, "%s",
                       rc == -ENOSPC ? "too many bookings (--max-bookings)" : "out of memory");
}

/* Return the fleet in which a kept choice can be booked; NULL: its worker has gone, or has other blocks. */
static struct ksel_fleet *fleet_of_kept(struct ksel *s, const struct ksel_kept *kept)
{
    struct ksel_fleet *fleet = ksel_fleet_find(s, kept->model, kept->group);

    return fleet && fleet->block_size == kept->block_size &&
                   ksel_fleet_member(fleet, kept->choice.worker)
               ? fleet
               : NULL;
}

/* Book what an earlier /select of this id chose. Returns 0 with the worker, or a negative errno. */
static int book_kept(struct ksel *s, const char *id, size_t len, struct kv_holder *ret)
{
    uint64_t now_ns = kv_now_ns();
    struct ksel_kept *kept;
    struct ksel_fleet *fleet;
    int rc = -ENOENT;

    pthread_mutex_lock(&s->lock);
    ksel_sync(s);
    kept = ksel_cache_take(&s->cache, id, len, now_ns);
    fleet = kept ? fleet_of_kept(s, kept) : NULL;
    if (fleet) {
        struct kvsel_request r = KVSEL_REQUEST_INIT;

        r.tokens = kept->tokens;
        r.hashes = kept->hashes;
        r.n_hashes = kept->n_hashes;
        r.lora = kept->lora;
        r.session = kept->session;
        if (kept->no_prefill)
            kept->choice.uncovered = 0;
        *ret = kept->choice.worker;
        rc = ksel_book(s, fleet, id, len, &r, &kept->choice, now_ns);
    }
    pthread_mutex_unlock(&s->lock);
    free(kept);
    return rc;
}

/* Book the worker that the body names. */
static void book_named(struct ksel *s, struct ksel_ask *ask, const char *id, size_t len,
                       struct kh_reply *reply)
{
    const struct ksel_body *body = &ask->scratch->body;
    struct kv_holder worker = {body->worker, body->rank};
    struct kvsel_choice choice = KVSEL_CHOICE_INIT;
    struct ksel_fleet *fleet;
    uint64_t now_ns;
    int rc;

    if (body->has_effective && body->effective > ask->request.tokens) {
        kh_reply_error(reply, 400, "effective_prefill_tokens is more than the prompt has");
        return;
    }
    fleet = ksel_ask_lock(s, ask, reply);
    if (!fleet)
        return;
    now_ns = kv_now_ns();
    if (!ksel_fleet_member(fleet, worker)) {
        pthread_mutex_unlock(&s->lock);
        kh_reply_error(reply, 404, "no worker has this worker_id and dp_rank");
        return;
    }
    rc = kvsel_reckon(fleet->books, &ask->request, worker, now_ns, &choice);
    if (body->has_effective)
        choice.uncovered = body->effective;
    if (body->no_prefill)
        choice.uncovered = 0;
    if (rc == 0)
        rc = ksel_book(s, fleet, id, len, &ask->request, &choice, now_ns);
    pthread_mutex_unlock(&s->lock);
    if (rc < 0)
        ksel_refuse_booking(rc, id, reply);
    else
        answer(s, id, len, worker, reply);
}

static void reserve(struct ksel *s, struct ksel_scratch *scratch, struct kh_reply *reply)
{
    const struct ksel_body *body = &scratch->body;
    const char *id = ksel_text_of(body, body->id);
    struct kv_holder worker;
    struct ksel_ask ask;
    int rc;

    if (!id) {
        kh_reply_error(reply, 422, "missing field 'selection_id'");
    } else if (body->has_worker) {
        if (ksel_ask_begin(s, scratch, &ask, reply))
            book_named(s, &ask, id, body->id_len, reply);
        ksel_ask_end(&ask);
    } else {
        rc = book_kept(s, id, body->id_len, &worker);
        if (rc < 0)
            ksel_refuse_booking(rc, id, reply);
        else
            answer(s, id, body->id_len, worker, reply);
    }
}

void ksel_api_reserve(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct ksel *s = ksel_of(service);
    struct ksel_scratch *scratch = ksel_scratch_take(s, reply);

    if (!scratch)
        return;
    if (ksel_read_body(request, reply, scratch))
        reserve(s, scratch, reply);
    ksel_scratch_give(s, scratch);
}

/* -- the list ---------------------------------------------------------------------------------- */

struct listing {
    struct ksel *s;
    struct kv_json_writer *w;
    const struct ksel_fleet *fleet;
    uint64_t left, now_ns;
};

static void write_booking(void *arg, const struct kvsel_booking *b)
{
    struct listing *l = arg;

    if (!l->left)
        return;
    l->left--;
    kv_json_begin_object(l->w);
    kv_json_key(l->w, "selection_id");
    kv_json_put_strn(l->w, b->id, b->id_len);
    kv_json_member_str(l->w, "model_name", l->fleet->model);
    kv_json_member_str(l->w, "routing_group", l->fleet->group);
    kv_json_key(l->w, "worker_id");
    ksel_put_worker(l->s, l->w, b->worker.worker);
    kv_json_member_u64(l->w, "dp_rank", b->worker.rank);
    kv_json_member_bool(l->w, "prefill_complete", b->first_token);
    kv_json_member_u64(l->w, "isl_tokens", b->tokens);
    kv_json_member_u64(l->w, "effective_prefill_tokens", b->uncovered);
    kv_json_member_u64(l->w, "output_tokens", b->output);
    kv_json_member_u64(l->w, "age_ms",
                       (l->now_ns - KV_MIN(b->created_ns, l->now_ns)) / KV_NS_PER_MS);
    kv_json_member_u64(l->w, "silent_ms",
                       (l->now_ns - KV_MIN(b->progress_ns, l->now_ns)) / KV_NS_PER_MS);
    kv_json_end_object(l->w);
}

void ksel_api_reservations(void *service, struct kh_request *request, struct kh_reply *reply)
{
    struct ksel *s = ksel_of(service);
    struct kv_json_writer w;
    struct listing listing = {.s = s, .w = &w, .left = 1000, .now_ns = kv_now_ns()};

    if (!kh_request_u64(request, "limit", &listing.left)) {
        kh_reply_error(reply, 400, "limit is no number");
        return;
    }
    listing.left = KV_MIN(listing.left, UINT64_C(10000));
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_array(&w);
    pthread_mutex_lock(&s->lock);
    for (const struct ksel_fleet *f = s->fleets; f && listing.left; f = f->next) {
        listing.fleet = f;
        (void)kvsel_each_booking(f->books, write_booking, &listing);
    }
    pthread_mutex_unlock(&s->lock);
    kv_json_end_array(&w);
}
