// SPDX-License-Identifier: Apache-2.0
#include "selector/envoy.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/net/endpoint.h"
#include "extproc/extproc.h"
#include "selector/ask.h"

#define MAX_FALLBACKS 8 /* of --ext-proc-fallbacks */
#define GROUP "default"

_Static_assert((MAX_FALLBACKS + 1) * KSEL_ADDRESS <= KX_MAX_ENDPOINTS, "no address is cut");

struct ksel_envoy {
    struct kx_picker picker;
    struct kx_server *server;
    _Atomic uint64_t turn; /* of the workers that tokenize */
};

/* -- choosing ------------------------------------------------------------------------------------ */

static int compare_texts(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/*
 * Name the workers that may be chosen in scratch->body.allowed: those with an address, and among the
 * candidates. Returns false when out of memory.
 */
static bool admit(const struct ksel_fleet *fleet, const struct kx_ask *ask,
                  struct ksel_ask *question)
{
    struct ksel_scratch *scratch = question->scratch;
    struct kv_buf *allowed = &scratch->body.allowed, *sorted = &scratch->texts;
    bool all = !ask->limited;

    kv_buf_clear(allowed);
    kv_buf_clear(sorted);
    kv_buf_append(sorted, ask->candidates, ask->n_candidates * sizeof(*ask->candidates));
    if (sorted->len)
        qsort(sorted->data, ask->n_candidates, sizeof(*ask->candidates), compare_texts);
    for (size_t i = 0; i < fleet->n_members; i++) {
        const struct ksel_member *m = &fleet->members[i];
        const char *key = m->address;
        bool fits = *m->address;

        if (fits && ask->limited)
            fits = sorted->len && bsearch(&key, sorted->data, ask->n_candidates,
                                          sizeof(*ask->candidates), compare_texts);
        all &= fits;
        if (fits)
            kv_buf_append(allowed, &m->holder.worker, sizeof(m->holder.worker));
    }
    if (!all) {
        static const uint64_t nobody;

        question->request.n_allowed = allowed->len / sizeof(uint64_t);
        question->request.allowed =
            allowed->len ? (const uint64_t *)(const void *)allowed->data : &nobody;
    }
    return !allowed->error && !sorted->error;
}

static ksel_text add_text(struct ksel_body *body, const char *text)
{
    size_t at = body->strings.len;

    kv_buf_append(&body->strings, text, strlen(text) + 1);
    return body->strings.error ? 0 : (ksel_text)at + 1;
}

/*
 * Find the fleet for a model's name. One that isn't registered may be an adapter of --ext-proc-model, or of
 * the only model there is: *@ret_lora is true then, if it was named at all. The caller holds lock.
 */
static const struct ksel_fleet *find_fleet(struct ksel *s, const char *name, bool *ret_lora)
{
    const struct ksel_fleet *found = *name ? ksel_fleet_find(s, name, GROUP) : NULL;
    const char *base = s->options->ext_proc_model;

    *ret_lora = false;
    if (found && found->n_members)
        return found;
    if (strlen(name) > KI_MAX_NAME)
        return NULL; /* as no name of an adapter may be */
    *ret_lora = *name != '\0';
    if (base)
        return ksel_fleet_find(s, base, GROUP);
    found = NULL;
    for (const struct ksel_fleet *f = s->fleets; f; f = f->next) {
        if (!f->n_members || strcmp(f->group, GROUP) != 0)
            continue;
        if (found)
            return NULL; /* which one is meant isn't known */
        found = f;
    }
    return found;
}

/* Write the request to the scratch, as if it had come as JSON. Returns 0 or a negative errno. */
static int fill(struct ksel *s, struct ksel_scratch *scratch, const struct kx_ask *ask)
{
    struct ksel_body *body = &scratch->body;
    struct ki_body *prompt = &scratch->indexer->body;
    const struct ksel_fleet *fleet;
    bool lora;

    ksel_body_clear(prompt, body);
    pthread_mutex_lock(&s->lock);
    ksel_sync(s);
    fleet = find_fleet(s, ask->model, &lora);
    body->model = fleet ? add_text(body, fleet->model) : 0;
    pthread_mutex_unlock(&s->lock);
    if (!fleet)
        return -EHOSTUNREACH;
    body->group = add_text(body, GROUP);
    body->lora = lora ? add_text(body, ask->model) : 0;
    body->session = ask->session ? add_text(body, ask->session) : 0;
    if (ask->tokens)
        kv_buf_append(&prompt->token_ids, ask->tokens, ask->n_tokens * sizeof(*ask->tokens));
    if (body->strings.error || prompt->token_ids.error)
        return -ENOMEM;
    prompt->lora_name = ksel_text_of(body, body->lora);
    body->has_tokens = true;
    return 0;
}

/* Return true when @worker is among the first @n of @best. */
static bool is_among(const struct kvsel_candidate *const *best, size_t n, uint64_t worker)
{
    for (size_t k = 0; k < n; k++)
        if (best[k]->holder.worker == worker)
            return true;
    return false;
}

/* Return the candidate of least cost whose worker is neither @chosen nor among the first @n of @best. */
static const struct kvsel_candidate *next_best(const struct kvsel_candidate *c, size_t n_candidates,
                                               uint64_t chosen,
                                               const struct kvsel_candidate *const *best, size_t n)
{
    const struct kvsel_candidate *found = NULL;

    for (size_t i = 0; i < n_candidates; i++)
        if (c[i].reason == KVSEL_FITS && c[i].holder.worker != chosen &&
            (!found || c[i].cost < found->cost) && !is_among(best, n, c[i].holder.worker))
            found = &c[i];
    return found;
}

/* Append the addresses of the workers that cost least after the chosen one: --ext-proc-fallbacks of them. */
static void add_fallbacks(const struct ksel *s, const struct ksel_fleet *fleet,
                          const struct ksel_scratch *scratch, size_t n, struct kv_holder chosen,
                          char ret[KX_MAX_ENDPOINTS])
{
    const struct kvsel_candidate *c =
        (const struct kvsel_candidate *)(const void *)scratch->candidates.data;
    const struct kvsel_candidate *best[MAX_FALLBACKS];

    for (size_t k = 0; k < s->options->ext_proc_fallbacks; k++) {
        const struct ksel_member *member;
        size_t len = strlen(ret);

        best[k] = next_best(c, n, chosen.worker, best, k);
        if (!best[k])
            return;
        member = ksel_fleet_member(fleet, best[k]->holder);
        if (member && *member->address)
            (void)snprintf(ret + len, KX_MAX_ENDPOINTS - len, ",%s", member->address);
    }
}

/*
 * Decide and book, with the lock held. All workers, @ret_n of them, are told only where the log or
 * fallbacks need them. Returns 0 or a negative errno.
 */
static int decide(struct ksel *s, struct ksel_fleet *fleet, struct ksel_ask *question,
                  const struct kx_ask *ask, bool logged, struct kvsel_choice *choice, size_t *ret_n,
                  char ret[KX_MAX_ENDPOINTS])
{
    const struct ksel_member *member;
    uint64_t now_ns = kv_now_ns();
    int rc;

    if (!admit(fleet, ask, question))
        return -ENOMEM;
    rc = ksel_ask_choose(question, fleet, now_ns, logged || s->options->ext_proc_fallbacks, choice,
                         ret_n);
    s->shed += rc == -EAGAIN;
    if (rc < 0)
        return rc;
    member = ksel_fleet_member(fleet, choice->worker);
    if (!member || !*member->address)
        return -EHOSTUNREACH;
    (void)snprintf(ret, KX_MAX_ENDPOINTS, "%s", member->address);
    rc = ksel_book(s, fleet, ask->id, strlen(ask->id), &question->request, choice, now_ns);
    if (rc < 0)
        return rc == -ENOSPC ? -ENOBUFS : rc;
    add_fallbacks(s, fleet, question->scratch, *ret_n, choice->worker, ret);
    return 0;
}

static int choose_for(struct ksel *s, struct ksel_ask *question, const struct kx_ask *ask,
                      struct kh_reply *reply, char ret[KX_MAX_ENDPOINTS])
{
    struct ksel_fleet *fleet = ksel_ask_lock(s, question, reply);
    bool logged = ksel_log_wants(s->log, ask->id, strlen(ask->id));
    struct kvsel_choice choice;
    uint32_t block_size;
    size_t n;
    int rc;

    if (!fleet)
        return -EHOSTUNREACH;
    if (!ask->tokens)
        question->request.tokens = ask->n_tokens; /* a guess: of load, not of blocks */
    block_size = fleet->block_size;
    rc = decide(s, fleet, question, ask, logged, &choice, &n, ret);
    pthread_mutex_unlock(&s->lock);
    if (rc == 0 && logged) {
        struct ksel_decision decision =
            ksel_ask_decision(s, question, ask->id, strlen(ask->id), block_size, &choice, n);

        decision.booked = true;
        ksel_log_decision(s->log, &decision);
    }
    return rc;
}

static int choose(void *arg, const struct kx_ask *ask, char ret[KX_MAX_ENDPOINTS])
{
    struct ksel *s = arg;
    struct kh_reply reply = {0};
    struct ksel_scratch *scratch = ksel_scratch_take(s, &reply);
    int rc = scratch ? fill(s, scratch, ask) : -ENOMEM;
    struct ksel_ask question;

    if (rc == 0) {
        if (ksel_ask_begin(s, scratch, &question, &reply))
            rc = choose_for(s, &question, ask, &reply, ret);
        else
            rc = -EHOSTUNREACH;
        ksel_ask_end(&question);
    }
    if (scratch)
        ksel_scratch_give(s, scratch);
    kv_buf_fini(&reply.body);
    return rc;
}

/* -- what the response tells --------------------------------------------------------------------- */

static void first_token(void *arg, const char *id)
{
    (void)ksel_first_token(arg, id, strlen(id));
}

static void output(void *arg, const char *id, uint64_t n)
{
    (void)ksel_output(arg, id, strlen(id), n);
}

static void end(void *arg, const char *id, bool lost)
{
    (void)ksel_free(arg, id, strlen(id), lost);
}

static bool is_ready(void *arg)
{
    struct ksel *s = arg;
    uint64_t n;

    pthread_mutex_lock(&s->lock);
    ksel_sync(s);
    n = ksel_n_schedulable(s);
    pthread_mutex_unlock(&s->lock);
    return n > 0;
}

/* The workers tokenize by turns. */
static bool engine(void *arg, const char *model, char *ret, size_t size)
{
    struct ksel *s = arg;
    uint64_t turn = atomic_fetch_add_explicit(&s->envoy->turn, 1, memory_order_relaxed);
    const struct ksel_fleet *fleet;
    bool found = false, lora;

    pthread_mutex_lock(&s->lock);
    ksel_sync(s);
    fleet = find_fleet(s, model, &lora);
    for (size_t i = 0; fleet && i < fleet->n_members && !found; i++) {
        const struct ksel_member *m = &fleet->members[(turn + i) % fleet->n_members];
        const char *text = m->record ? m->record->endpoint : NULL;

        found = *m->address;
        if (found)
            (void)snprintf(ret, size, "%s://%s",
                           text && strncmp(text, "https://", 8) == 0 ? "https" : "http",
                           m->address);
    }
    pthread_mutex_unlock(&s->lock);
    return found;
}

/* -- start and stop ------------------------------------------------------------------------------ */

static int parse_place(const struct ksel_options *o, struct kv_endpoint *ret,
                       struct kv_error *error)
{
    char text[300];
    const char *why = "too long";
    int n = snprintf(text, sizeof(text), "tcp://%s", o->ext_proc);

    if (n < 0 || (size_t)n >= sizeof(text) || kv_endpoint_parse(text, ret, &why) < 0)
        return kv_fail(error, -EINVAL, 0, "--ext-proc: %s; HOST:PORT is wanted", why);
    if (ret->wildcard)
        (void)snprintf(ret->host, sizeof(ret->host), "0.0.0.0");
    if (strcmp(ret->host, "localhost") == 0)
        (void)snprintf(ret->host, sizeof(ret->host), "127.0.0.1");
    if (!o->ext_proc_insecure && strncmp(ret->host, "127.", 4) != 0 &&
        strcmp(ret->host, "::1") != 0)
        return kv_fail(
            error, -EINVAL, 0,
            "--ext-proc has neither TLS nor tokens: on other than loopback addresses give "
            "--ext-proc-insecure");
    return 0;
}

int ksel_envoy_check(const struct ksel_options *options, struct kv_error *error)
{
    struct kv_endpoint place;

    return options->ext_proc ? parse_place(options, &place, error) : 0;
}

int ksel_envoy_start(struct ksel *s, struct kv_error *error)
{
    const struct ksel_options *o = s->options;
    const char *tokenizer = o->ext_proc_tokenizer;
    struct kv_endpoint place = {0};
    struct kx_opts opts = {.host = place.host, .tokenize_ms = o->ext_proc_tokenize_ms};
    char quoted[300];
    int rc;

    if (!o->ext_proc)
        return 0;
    rc = parse_place(o, &place, error);
    if (rc < 0)
        return rc;
    s->envoy = calloc(1, sizeof(*s->envoy));
    if (!s->envoy)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    s->envoy->picker = (struct kx_picker){.arg = s,
                                          .choose = choose,
                                          .first_token = first_token,
                                          .output = output,
                                          .end = end,
                                          .ready = is_ready,
                                          .engine = engine};
    if (strcmp(tokenizer, "none") == 0)
        s->envoy->picker.engine = NULL;
    else if (strcmp(tokenizer, "workers") != 0)
        opts.tokenize = tokenizer;
    opts.port = place.port;
    opts.picker = &s->envoy->picker;
    rc = kx_server_start(&opts, &s->envoy->server, error);
    if (rc == 0)
        kv_log_info("selector", "external processing for Envoy", "host=%s port=%u",
                    kv_log_quote(quoted, sizeof(quoted), place.host),
                    (unsigned)kx_server_port(s->envoy->server));
    return rc;
}

void ksel_envoy_end(struct ksel *s)
{
    struct kx_server *server = NULL;

    pthread_mutex_lock(&s->admin); /* against ksel_envoy_render */
    if (s->envoy)
        server = KV_STEAL(s->envoy->server);
    pthread_mutex_unlock(&s->admin);
    if (server)
        kx_server_stop(server);
}

void ksel_envoy_stop(struct ksel *s)
{
    ksel_envoy_end(s);
    free(s->envoy);
    s->envoy = NULL;
}

void ksel_envoy_render(struct ksel *s, struct kv_buf *out)
{
    pthread_mutex_lock(&s->admin);
    if (s->envoy && s->envoy->server)
        kx_server_metrics(s->envoy->server, out);
    pthread_mutex_unlock(&s->admin);
}
