// SPDX-License-Identifier: Apache-2.0
/*
 * Sources: their threads, what they publish, and their state. reconcile.c does the rest.
 *
 * A reload lists the sources that the options name now. One that would do the same as before is the same,
 * and goes on; others are made, or end. Followed ranks keep their places, and no stream is interrupted.
 */
#include "indexer/discover/discovery.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/ascii.h"
#include "base/core/clock.h"
#include "base/core/log.h"
#include "indexer/discover/reconcile.h"

#define HOLD_NS (10 * KV_NS_PER_S) /* longest wait of a reload for the first sets of new sources */

static const struct ki_source_ops *const kinds[] = {
    &ki_source_file, &ki_source_kubernetes, &ki_source_dns, &ki_source_etcd, &ki_source_etcds};

/* Find the kind of a source. */
static const struct ki_source_ops *kind_of(const char *text)
{
    for (size_t i = 0; i < KV_COUNT(kinds); i++)
        if (strncmp(text, kinds[i]->scheme, strlen(kinds[i]->scheme)) == 0)
            return kinds[i];
    return NULL;
}

int ki_discovery_check(const char *text, struct kv_error *error)
{
    const struct ki_source_ops *ops = kind_of(text);
    char forms[200] = "";
    size_t len = 0;

    if (ops)
        return ops->check(text + strlen(ops->scheme), error);
    for (size_t i = 0; i < KV_COUNT(kinds); i++)
        len += (size_t)snprintf(forms + len, sizeof(forms) - len, "%s%s", i ? ", " : "",
                                kinds[i]->form);
    return kv_fail(error, -EINVAL, 0, "no source of discovery: expected %.150s", forms);
}

/* -- what sources call ------------------------------------------------------------------------- */

void ki_source_wait(struct ki_source *source, int fd, int ms)
{
    struct pollfd fds[] = {{.fd = source->wake.fd, .events = POLLIN}, {.fd = fd, .events = POLLIN}};

    (void)poll(fds, fd < 0 ? 1 : 2, ms);
}

/* Note a look that succeeded. Caller-locked. Returns true when the one before it had failed. */
static bool note_current(struct ki_source *source)
{
    bool again = *source->error && source->current_ns;

    source->current = true;
    source->current_ns = kv_now_ns();
    source->error[0] = '\0';
    return again;
}

static void log_again(const struct ki_source *source)
{
    char name[200];

    kv_log_info("discover", "a source can be read again", "source=%s",
                kv_log_quote(name, sizeof(name), source->name));
}

static void log_left_out(const struct ki_source *source, size_t n, const char *why)
{
    char name[200], reason[400];

    kv_log_warn("discover", "workers of a source can't be followed",
                "source=%s workers=%zu first=%s", kv_log_quote(name, sizeof(name), source->name), n,
                kv_log_quote(reason, sizeof(reason), why));
}

void ki_source_publish(struct ki_source *source, struct ki_found_set *set)
{
    struct ki_discovery *d = source->of;
    bool again, news;

    ki_found_sort(set);
    pthread_mutex_lock(&d->lock);
    again = note_current(source);
    news = set->left_out && strcmp(set->why, source->why_left) != 0;
    source->sets++;
    source->workers = set->n;
    source->left_out = set->left_out;
    memcpy(source->why_left, set->why, sizeof(source->why_left));
    ki_found_set_fini(&source->incoming);
    source->incoming = *set;
    source->has_incoming = true;
    pthread_cond_signal(&d->woken);
    pthread_mutex_unlock(&d->lock);
    if (again)
        log_again(source);
    if (news)
        log_left_out(source, set->left_out, set->why);
    *set = (struct ki_found_set){0};
}

void ki_source_confirm(struct ki_source *source)
{
    bool again;

    pthread_mutex_lock(&source->of->lock);
    again = note_current(source);
    pthread_mutex_unlock(&source->of->lock);
    if (again)
        log_again(source);
}

void ki_source_failed(struct ki_source *source, const char *fmt, ...)
{
    char words[sizeof(source->error)], name[200], quoted[2 * sizeof(words)];
    bool news;
    va_list args;

    va_start(args, fmt);
    vsnprintf(words, sizeof(words), fmt, args);
    va_end(args);
    pthread_mutex_lock(&source->of->lock);
    news = strcmp(words, source->error) != 0;
    memcpy(source->error, words, sizeof(words));
    source->current = false;
    source->failures++;
    pthread_mutex_unlock(&source->of->lock);
    if (news && !ki_source_is_stopped(source))
        kv_log_warn("discover", "a source can't be read; what it told last stays",
                    "source=%s reason=%s", kv_log_quote(name, sizeof(name), source->name),
                    kv_log_quote(quoted, sizeof(quoted), words));
}

/* -- what others ask --------------------------------------------------------------------------- */

bool ki_discovery_info(struct ki_discovery *d, size_t at, struct ki_source_info *ret)
{
    const struct ki_source *s;
    bool found;

    if (!d)
        return false;
    pthread_mutex_lock(&d->lock);
    found = at < d->n_sources;
    if (found) {
        s = d->sources[at];
        *ret = (struct ki_source_info){
            .name = s->name,
            .current = s->current,
            .age_ms = s->current_ns ? (kv_now_ns() - s->current_ns) / KV_NS_PER_MS : UINT64_MAX,
            .sets = s->sets,
            .failures = s->failures,
            .workers = s->workers,
            .left_out = s->left_out,
            .conflicts = s->conflicts,
            .withdrawn = s->withdrawn,
            .refused = s->refused,
        };
        memcpy(ret->error, s->error, sizeof(ret->error));
        memcpy(ret->why_left, s->why_left, sizeof(ret->why_left));
    }
    pthread_mutex_unlock(&d->lock);
    return found;
}

bool ki_discovery_nats(struct ki_discovery *d, size_t *at, const char **ret_name,
                       struct ki_dynamo_nats_stats *ret)
{
    bool found = false;

    pthread_mutex_lock(&d->lock);
    while (!found && *at < d->n_sources) {
        const struct ki_source *s = d->sources[(*at)++];

        found = s->ops->nats_stats && s->ops->nats_stats(s, ret);
        *ret_name = s->name;
    }
    pthread_mutex_unlock(&d->lock);
    return found;
}

/* -- a source's life --------------------------------------------------------------------------- */

static void *run_source(void *arg)
{
    struct ki_source *source = arg;

    source->ops->run(source);
    return NULL;
}

/* Free a source whose thread has ended, or that had none. */
static void source_free(struct ki_source *s)
{
    if (!s)
        return;
    if (s->ops->close)
        s->ops->close(s);
    kv_wake_close(&s->wake);
    ki_found_set_fini(&s->incoming);
    ki_found_set_fini(&s->set);
    free(s);
}

static void ask_to_stop(struct ki_source *s)
{
    atomic_store_explicit(&s->stop, true, memory_order_release);
    kv_wake_signal(&s->wake);
}

/* Make a source, without its thread. */
static int make_source(struct ki_discovery *d, const struct ki_source_ops *ops, const char *name,
                       const struct ki_options *options, const struct ki_options *all,
                       struct ki_source **ret, struct kv_error *error)
{
    struct ki_source *s = calloc(1, sizeof(*s));
    struct kv_error why = {0};
    int rc;

    if (!s)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    s->ops = ops;
    s->of = d;
    s->name = name;
    s->where = name + strlen(ops->scheme);
    s->options = *options;
    s->options.nats_args = all->nats_args;
    s->wake.fd = -1;
    rc = ki_found_defaults(options, &s->base, error);
    if (rc < 0)
        goto fail;
    rc = kv_wake_open(&s->wake);
    if (rc == 0 && ops->open)
        rc = ops->open(s, &why);
    if (rc < 0) {
        kv_fail(error, rc, 0, "%.60s: %.120s", name, *why.text ? why.text : strerror(-rc));
        goto fail;
    }
    *ret = s;
    return 0;

fail:
    source_free(s);
    return rc;
}

static void start_source(struct ki_source *s)
{
    int rc;

    if (s->has_thread)
        return;
    rc = kv_thread_start(&s->thread, "ki-source", run_source, s);
    s->has_thread = rc == 0;
    if (rc < 0)
        ki_source_failed(s, "no thread: %s", strerror(-rc));
}

/* -- lists of sources -------------------------------------------------------------------------- */

struct sources {
    struct ki_source **items;
    size_t n;
};

static size_t count(const struct ki_options *options)
{
    size_t n = 0;

    for (const struct ki_options *o = options; o; o = o->next)
        n += o->discover.n + (o->dynamo != NULL);
    return n;
}

/* Return true when both name the same NATS credentials. */
static bool same_args(const struct kvp_nats_args *a, const struct kvp_nats_args *b)
{
    return kv_same_text(a->user, b->user) && kv_same_text(a->password_file, b->password_file) &&
           kv_same_text(a->token_file, b->token_file) && kv_same_text(a->nkey, b->nkey) &&
           kv_same_text(a->creds, b->creds) && kv_same_text(a->ca, b->ca) &&
           kv_same_text(a->cert, b->cert) && kv_same_text(a->key, b->key);
}

/* Return true when a source that @options give in this way would do what @s does. */
static bool is_same(const struct ki_source *s, const struct ki_source_ops *ops, const char *name,
                    const struct ki_options *options, const struct ki_options *all)
{
    struct ki_found base;
    struct kv_error why = {0};

    return s->ops == ops && strcmp(s->name, name) == 0 &&
           ki_found_defaults(options, &base, &why) == 0 && ki_found_equal(&s->base, &base) &&
           kv_same_text(s->options.cacert, options->cacert) &&
           kv_same_text(s->options.dynamo_nats, options->dynamo_nats) &&
           (!options->dynamo_nats || same_args(&s->options.nats_args, &all->nats_args));
}

static bool has(const struct sources *list, const struct ki_source *s)
{
    bool found = false;

    for (size_t i = 0; i < list->n && !found; i++)
        found = list->items[i] == s;
    return found;
}

/* Add a source to @list: one of the discovery's that goes on, or a new one. */
static int add_source(struct ki_discovery *d, const struct ki_source_ops *ops, const char *name,
                      const struct ki_options *options, const struct ki_options *all,
                      struct sources *list, struct kv_error *error)
{
    struct ki_source *s = NULL;
    int rc = 0;

    for (size_t i = 0; i < d->n_sources && !s; i++)
        if (!has(list, d->sources[i]) && is_same(d->sources[i], ops, name, options, all))
            s = d->sources[i];
    if (!s)
        rc = make_source(d, ops, name, options, all, &s, error);
    if (rc == 0)
        list->items[list->n++] = s;
    return rc;
}

/* Free the sources of @from that @but doesn't have. Their threads end first, all at the same time. */
static void free_others(const struct sources *from, const struct sources *but)
{
    for (size_t i = 0; i < from->n; i++)
        if (!has(but, from->items[i]))
            ask_to_stop(from->items[i]);
    for (size_t i = 0; i < from->n; i++) {
        if (has(but, from->items[i]))
            continue;
        if (from->items[i]->has_thread)
            pthread_join(from->items[i]->thread, NULL);
        source_free(from->items[i]);
    }
}

/* List the sources of @all and its sections. On an error nothing has changed. */
static int list_sources(struct ki_discovery *d, const struct ki_options *all, struct sources *ret,
                        struct kv_error *error)
{
    const struct sources before = {d->sources, d->n_sources};
    int rc = 0;

    *ret = (struct sources){calloc(count(all) + 1, sizeof(struct ki_source *)), 0};
    if (!ret->items)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    for (const struct ki_options *o = all; o && rc == 0; o = o->next)
        for (size_t i = 0; i < o->discover.n && rc == 0; i++)
            rc = add_source(d, kind_of(o->discover.items[i]), o->discover.items[i], o, all, ret,
                            error);
    for (const struct ki_options *o = all; o && rc == 0; o = o->next)
        if (o->dynamo)
            rc = add_source(d, &ki_source_dynamo, o->dynamo, o, all, ret, error);
    if (rc < 0) {
        free_others(ret, &before);
        free(ret->items);
    }
    return rc;
}

/* -- life -------------------------------------------------------------------------------------- */

static void stop_reconciler(struct ki_discovery *d)
{
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    pthread_cond_signal(&d->woken);
    pthread_mutex_unlock(&d->lock);
    if (d->has_thread)
        pthread_join(d->thread, NULL);
    d->has_thread = false;
    d->stop = false;
}

/* Number the sources of followed ranks anew. Caller-locked. */
static void renumber(struct ki_discovery *d, const struct sources *to)
{
    for (size_t i = 0; i < d->n_followed; i++) {
        size_t before = d->followed[i].source, after = 0;

        if (before == KI_SOURCE_GONE)
            continue;
        while (after < to->n && to->items[after] != d->sources[before])
            after++;
        d->followed[i].source = after < to->n ? after : KI_SOURCE_GONE;
    }
}

/* Let the threads run: those of sources that have none, and the reconciler's. */
static int start_threads(struct ki_discovery *d)
{
    bool wanted = d->n_sources || d->n_followed; /* the thread writes n_followed */
    int rc = wanted ? kv_thread_start(&d->thread, "ki-discover", ki_reconcile_run, d) : 0;

    d->has_thread = wanted && rc == 0;
    for (size_t i = 0; i < d->n_sources && rc == 0; i++)
        start_source(d->sources[i]);
    return rc;
}

int ki_discovery_reload(struct ki_discovery *d, const struct ki_options *options,
                        struct kv_error *error)
{
    struct sources before, after;
    int rc = list_sources(d, options, &after, error);

    if (rc < 0)
        return rc;
    stop_reconciler(d);
    pthread_mutex_lock(&d->lock);
    before = (struct sources){d->sources, d->n_sources};
    renumber(d, &after);
    d->sources = after.items;
    d->n_sources = after.n;
    d->hold_ns = kv_now_ns() + HOLD_NS;
    pthread_mutex_unlock(&d->lock);
    free_others(&before, &after);
    free(KV_STEAL(before.items));
    rc = start_threads(d);
    return rc < 0 ? kv_fail(error, rc, 0, "--discover: %s", strerror(-rc)) : 0;
}

int ki_discovery_start(const struct ki_options *options, struct ki_registry *registry,
                       struct ki_discovery **ret, struct kv_error *error)
{
    struct ki_discovery *d = calloc(1, sizeof(*d));
    int rc;

    *ret = NULL;
    if (!d)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    d->registry = registry;
    d->grace_ns = options->discover_grace_ms * KV_NS_PER_MS;
    d->gone.ops = &ki_source_file;
    d->gone.name = "a source of before";
    pthread_mutex_init(&d->lock, NULL);
    kv_cond_init(&d->woken);
    rc = ki_discovery_reload(d, options, error);
    if (rc < 0)
        ki_discovery_stop(d);
    else
        *ret = d;
    return rc;
}

void ki_discovery_stop(struct ki_discovery *d)
{
    if (!d)
        return;
    for (size_t i = 0; i < d->n_sources; i++)
        ask_to_stop(d->sources[i]);
    stop_reconciler(d);
    free_others(&(struct sources){d->sources, d->n_sources}, &(struct sources){NULL, 0});
    ki_reconcile_fini(d);
    free(KV_STEAL(d->sources));
    pthread_cond_destroy(&d->woken);
    pthread_mutex_destroy(&d->lock);
    free(d);
}
