// SPDX-License-Identifier: Apache-2.0
/* POST /select, /select_and_reserve, /potential_loads and /overlap_scores. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <sys/random.h>

#include "base/core/clock.h"
#include "selector/ask.h"

#define UUID_TEXT 37
#define ENDPOINT_TEXT 2049

/* A choice that was made, for the answer. */
struct made {
    struct kvsel_choice choice;
    struct kvsel_load load; /* of the chosen worker, before this request */
    uint32_t block_size;
    const char *id;
    size_t id_len;
    char uuid[UUID_TEXT];
    char endpoint[ENDPOINT_TEXT]; /* empty: not told */
    size_t n_candidates;          /* in scratch->candidates; 0: not explained */
};

/* Write a random UUID (RFC 9562, version 4). */
static void make_uuid(char ret[UUID_TEXT])
{
    static const char digits[] = "0123456789abcdef";
    uint8_t raw[16];
    size_t at = 0;

    if (getrandom(raw, sizeof(raw), 0) != (ssize_t)sizeof(raw))
        memset(raw, 0, sizeof(raw)); /* never: the kernel fills so few bytes at once */
    raw[6] = (uint8_t)((raw[6] & 0x0f) | 0x40);
    raw[8] = (uint8_t)((raw[8] & 0x3f) | 0x80);
    for (size_t i = 0; i < sizeof(raw); i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            ret[at++] = '-';
        ret[at++] = digits[raw[i] >> 4];
        ret[at++] = digits[raw[i] & 15];
    }
    ret[at] = '\0';
}

static void name_request(const struct ksel_body *body, struct made *made)
{
    made->id = ksel_text_of(body, body->id);
    made->id_len = body->id_len;
    if (made->id)
        return;
    make_uuid(made->uuid);
    made->id = made->uuid;
    made->id_len = UUID_TEXT - 1;
}

/* -- deciding, with the lock held ---------------------------------------------------------------- */

static int book(struct ksel *s, struct ksel_fleet *fleet, struct ksel_ask *ask, uint64_t now_ns,
                struct made *made)
{
    struct kvsel_choice booked = made->choice;

    if (ask->scratch->body.no_prefill)
        booked.uncovered = 0;
    return ksel_book(s, fleet, made->id, made->id_len, &ask->request, &booked, now_ns);
}

/* Keep the choice for POST /reservations. */
static void keep(struct ksel *s, const struct ksel_ask *ask, uint64_t now_ns,
                 const struct made *made)
{
    const struct ksel_kept kept = {
        .until_ns = now_ns + s->options->cache_ms * KV_NS_PER_MS,
        .choice = made->choice,
        .model = ask->name,
        .group = ask->group,
        .lora = ask->request.lora,
        .session = ask->request.session,
        .tokens = ask->request.tokens,
        .block_size = made->block_size,
        .hashes = (uint64_t *)(uintptr_t)ask->request.hashes,
        .n_hashes = ask->request.n_hashes,
        .no_prefill = ask->scratch->body.no_prefill,
        .id = (char *)(uintptr_t)made->id,
        .id_len = made->id_len,
    };

    if (s->options->cache_ms)
        ksel_cache_put(&s->cache, &kept, now_ns);
}

static void note_worker(const struct ksel_fleet *fleet, struct made *made)
{
    const struct ksel_member *member = ksel_fleet_member(fleet, made->choice.worker);

    made->endpoint[0] = '\0';
    if (member && member->record && member->record->endpoint)
        (void)snprintf(made->endpoint, sizeof(made->endpoint), "%s", member->record->endpoint);
    made->load = (struct kvsel_load){0};
    (void)kvsel_get_load(fleet->books, made->choice.worker, &made->load);
}

/* -- the answer ---------------------------------------------------------------------------------- */

static struct ksel_decision decision_of(struct ksel *s, const struct ksel_ask *ask,
                                        const struct made *made, bool booked)
{
    struct ksel_decision decision = ksel_ask_decision(
        s, ask, made->id, made->id_len, made->block_size, &made->choice, made->n_candidates);

    decision.booked = booked;
    return decision;
}

/* Write what the chosen worker holds, in tokens: as /query's instances. */
static void write_overlap(struct kv_json_writer *w, const struct ksel_ask *ask,
                          const struct made *made)
{
    const struct kvsel_request *r = &ask->request;
    const uint64_t *held = made->choice.held;

    kv_json_key(w, "overlap");
    kv_json_begin_object(w);
    kv_json_member_u64(w, "longest_matched", held[KV_TIER_EXTERNAL]);
    kv_json_member_u64(w, "gpu", held[KV_TIER_DEVICE]);
    kv_json_key(w, "dp");
    kv_json_begin_object(w);
    for (size_t i = 0; i < r->n_matches; i++)
        if (r->matches[i].holder.worker == made->choice.worker.worker) {
            kv_json_key_u64(w, r->matches[i].holder.rank);
            kv_json_put_u64(w, (uint64_t)r->matches[i].reach[KV_TIER_DEVICE] * made->block_size);
        }
    kv_json_end_object(w);
    kv_json_member_u64(w, "cpu", held[KV_TIER_HOST]);
    kv_json_member_u64(w, "disk", held[KV_TIER_EXTERNAL]);
    kv_json_end_object(w);
}

/* Write hashes as signed numbers, as requests bring them. */
static char *put_hashes(char *p, const uint64_t *hashes, size_t n)
{
    *p++ = '[';
    for (size_t i = 0; i < n; i++) {
        bool negative = hashes[i] >> 63;

        if (i)
            *p++ = ',';
        if (negative)
            *p++ = '-';
        p += kv_u64_text(p, negative ? -hashes[i] : hashes[i]);
    }
    *p++ = ']';
    return p;
}

static void write_replay(struct kv_json_writer *w, const struct ksel_ask *ask)
{
    const struct kvsel_request *r = &ask->request;
    char *p;

    kv_json_member_u64(w, "isl_tokens", r->tokens);
    kv_json_member_bool(w, "track_prefill_tokens", !ask->scratch->body.no_prefill);
    kv_json_key(w, "sequence_hashes");
    p = kv_json_raw_begin(w, 2 + r->n_hashes * (KV_U64_TEXT_MAX + 2));
    if (p)
        kv_json_raw_end(w, put_hashes(p, r->hashes, r->n_hashes));
}

static void write_load(struct kv_json_writer *w, const struct kvsel_load *load)
{
    kv_json_key(w, "worker_load");
    kv_json_begin_object(w);
    kv_json_member_u64(w, "active_prefill_tokens", load->waiting);
    kv_json_member_u64(w, "active_decode_blocks", load->blocks);
    kv_json_member_u64(w, "active_requests", load->requests);
    kv_json_end_object(w);
}

static void write_decision(const struct ksel_decision *decision, struct kv_json_writer *w)
{
    kv_json_key(w, "decision");
    kv_json_begin_object(w);
    ksel_decision_write(decision, w);
    kv_json_end_object(w);
}

static void answer(struct ksel *s, const struct ksel_ask *ask, const struct made *made, bool booked,
                   struct kh_reply *reply)
{
    const struct kvsel_choice *choice = &made->choice;
    struct kv_json_writer w;

    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_key(&w, "selection_id");
    kv_json_put_strn(&w, made->id, made->id_len);
    kv_json_key(&w, "worker_id");
    ksel_put_worker(s, &w, choice->worker.worker);
    kv_json_member_u64(&w, "dp_rank", choice->worker.rank);
    kv_json_key(&w, "endpoint");
    if (*made->endpoint)
        kv_json_put_str(&w, made->endpoint);
    else
        kv_json_put_null(&w);
    kv_json_member_u64(&w, "block_size", made->block_size);
    write_overlap(&w, ask, made);
    kv_json_member_u64(&w, "effective_prefill_tokens", choice->uncovered);
    kv_json_member_u64(&w, "potential_decode_blocks", choice->blocks);
    kv_json_member_str(&w, "policy", choice->policy);
    kv_json_member_str(&w, "why", kvsel_why_name(choice->why));
    kv_json_member_bool(&w, "partial", ksel_ask_is_partial(ask, choice->worker));
    if (booked)
        write_replay(&w, ask);
    if (ask->scratch->body.advisory)
        write_load(&w, &made->load);
    if (ask->scratch->body.explain) {
        const struct ksel_decision decision = decision_of(s, ask, made, booked);

        write_decision(&decision, &w);
    }
    kv_json_end_object(&w);
}

static void refuse(int rc, const struct ksel_ask *ask, const struct made *made, struct ksel *s,
                   struct kh_reply *reply)
{
    static const char unfit[] = "no endpoints available to route work";
    struct ksel_decision decision;
    struct kv_json_writer w;

    if (rc == -EINVAL) {
        kh_reply_error(reply, 400, "bad request");
        return;
    }
    if (rc == -EAGAIN) {
        kh_reply_error(reply, 429,
                       "all workers that fit have %" PRIu64 " tokens waiting (--max-waiting)",
                       s->options->max_waiting);
        kh_reply_header(reply, "Retry-After", "1");
        return;
    }
    if (rc != -EHOSTUNREACH) {
        ksel_refuse_booking(rc, made->id, reply);
        return;
    }
    kh_reply_error(reply, 503, "%s", unfit);
    if (!made->n_candidates || !ask->scratch->body.explain)
        return;
    decision = decision_of(s, ask, made, false);
    kv_buf_clear(&reply->body);
    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "error", unfit);
    write_decision(&decision, &w);
    kv_json_end_object(&w);
}

static void select_for(struct ksel *s, struct ksel_ask *ask, bool booked, struct kh_reply *reply)
{
    const struct ksel_body *body = &ask->scratch->body;
    struct ksel_fleet *fleet;
    struct made made;
    bool logged;
    uint64_t now_ns;
    int rc;

    made.n_candidates = 0;
    name_request(body, &made);
    logged = ksel_log_wants(s->log, made.id, made.id_len);
    fleet = ksel_ask_lock(s, ask, reply);
    if (!fleet)
        return;
    made.block_size = fleet->block_size;
    ask->request.released = !booked && body->advisory; /* asked for the choice alone: never shed */
    now_ns = kv_now_ns();
    rc = ksel_ask_choose(ask, fleet, now_ns, logged || body->explain, &made.choice,
                         &made.n_candidates);
    s->shed += rc == -EAGAIN;
    if (rc == 0)
        note_worker(fleet, &made);
    if (rc == 0 && booked)
        rc = book(s, fleet, ask, now_ns, &made);
    else if (rc == 0 && !body->advisory)
        keep(s, ask, now_ns, &made);
    pthread_mutex_unlock(&s->lock);
    if (logged && made.n_candidates && (rc == 0 || rc == -EHOSTUNREACH)) {
        struct ksel_decision decision = decision_of(s, ask, &made, booked && rc == 0);

        ksel_log_decision(s->log, &decision);
    }
    if (rc == 0)
        answer(s, ask, &made, booked, reply);
    else
        refuse(rc, ask, &made, s, reply);
}

static void select_only(struct ksel *s, struct ksel_ask *ask, struct kh_reply *reply)
{
    select_for(s, ask, false, reply);
}

static void select_and_reserve(struct ksel *s, struct ksel_ask *ask, struct kh_reply *reply)
{
    select_for(s, ask, true, reply);
}

/* -- questions that choose nothing -------------------------------------------------------------- */

static void write_potential(struct ksel *s, const struct ksel_ask *ask, long n,
                            struct kv_json_writer *w)
{
    const struct kvsel_candidate *c =
        (const struct kvsel_candidate *)(const void *)ask->scratch->candidates.data;

    kv_json_begin_array(w);
    for (long i = 0; i < n; i++) {
        if (c[i].reason == KVSEL_GONE)
            continue;
        kv_json_begin_object(w);
        kv_json_key(w, "worker_id");
        ksel_put_worker(s, w, c[i].holder.worker);
        kv_json_member_u64(w, "dp_rank", c[i].holder.rank);
        kv_json_member_u64(w, "potential_prefill_tokens",
                           (uint64_t)(c[i].waiting + c[i].uncovered + 0.5));
        kv_json_member_u64(w, "potential_decode_blocks", (uint64_t)c[i].blocks);
        kv_json_member_u64(w, "active_requests", (uint64_t)c[i].requests);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

static void potential_loads(struct ksel *s, struct ksel_ask *ask, struct kh_reply *reply)
{
    struct ksel_fleet *fleet = ksel_ask_lock(s, ask, reply);
    struct made made = {.n_candidates = 0};
    struct kv_json_writer w;
    long n;

    if (!fleet)
        return;
    n = ksel_ask_look(ask, fleet, kv_now_ns());
    pthread_mutex_unlock(&s->lock);
    if (n < 0) {
        refuse((int)n, ask, &made, s, reply);
        return;
    }
    kv_json_writer_init(&w, &reply->body);
    write_potential(s, ask, n, &w);
}

static void write_scores(struct ksel *s, const struct ksel_ask *ask, struct kv_json_writer *w)
{
    const struct kvsel_request *r = &ask->request;

    kv_json_begin_array(w);
    for (size_t i = 0; i < r->n_matches; i++) {
        const uint32_t *reach = r->matches[i].reach;

        kv_json_begin_object(w);
        kv_json_key(w, "worker_id");
        ksel_put_worker(s, w, r->matches[i].holder.worker);
        kv_json_member_u64(w, "dp_rank", r->matches[i].holder.rank);
        kv_json_member_u64(w, "device_blocks", reach[KV_TIER_DEVICE]);
        kv_json_member_u64(w, "host_pinned_blocks", reach[KV_TIER_HOST]);
        kv_json_member_u64(w, "disk_blocks", reach[KV_TIER_EXTERNAL]);
        kv_json_member_u64(w, "host_pinned_extension_blocks",
                           reach[KV_TIER_HOST] - reach[KV_TIER_DEVICE]);
        kv_json_member_u64(w, "disk_extension_blocks",
                           reach[KV_TIER_EXTERNAL] - reach[KV_TIER_HOST]);
        kv_json_member_u64(w, "shared_beyond_device_blocks", 0);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

static void overlap_scores(struct ksel *s, struct ksel_ask *ask, struct kh_reply *reply)
{
    struct kv_json_writer w;

    kv_json_writer_init(&w, &reply->body);
    kv_json_begin_object(&w);
    kv_json_member_u64(&w, "block_size", ask->model->block_size);
    kv_json_member_u64(&w, "num_blocks", ask->request.n_hashes);
    kv_json_key(&w, "workers");
    write_scores(s, ask, &w);
    kv_json_key(&w, "shared_cache");
    kv_json_put_null(&w);
    kv_json_end_object(&w);
}

/* -- the handlers --------------------------------------------------------------------------------- */

static void ask_about(struct ksel *s, struct kh_request *request, struct kh_reply *reply,
                      void (*fn)(struct ksel *s, struct ksel_ask *ask, struct kh_reply *reply))
{
    struct ksel_scratch *scratch = ksel_scratch_take(s, reply);
    struct ksel_ask ask;

    if (!scratch)
        return;
    if (ksel_read_body(request, reply, scratch)) {
        if (ksel_ask_begin(s, scratch, &ask, reply))
            fn(s, &ask, reply);
        ksel_ask_end(&ask);
    }
    ksel_scratch_give(s, scratch);
}

void ksel_api_select(void *service, struct kh_request *request, struct kh_reply *reply)
{
    ask_about(ksel_of(service), request, reply, select_only);
}

void ksel_api_select_and_reserve(void *service, struct kh_request *request, struct kh_reply *reply)
{
    ask_about(ksel_of(service), request, reply, select_and_reserve);
}

void ksel_api_potential_loads(void *service, struct kh_request *request, struct kh_reply *reply)
{
    ask_about(ksel_of(service), request, reply, potential_loads);
}

void ksel_api_overlap_scores(void *service, struct kh_request *request, struct kh_reply *reply)
{
    ask_about(ksel_of(service), request, reply, overlap_scores);
}
