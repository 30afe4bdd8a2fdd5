// SPDX-License-Identifier: Apache-2.0
/* Sources: their threads, what they publish, and their state. reconcile.c does the rest. */
#include "indexer/discover/discovery.h"

#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "indexer/discover/reconcile.h"

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

    if (!d || at >= d->n_sources)
        return false;
    s = &d->sources[at];
    pthread_mutex_lock(&d->lock);
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
    pthread_mutex_unlock(&d->lock);
    return true;
}

/* -- life -------------------------------------------------------------------------------------- */

static void *run_source(void *arg)
{
    struct ki_source *source = arg;

    source->ops->run(source);
    return NULL;
}

static int add_source(struct ki_discovery *d, const struct ki_source_ops *ops, const char *name,
                      const struct ki_options *options, struct kv_error *error)
{
    struct ki_source *s = &d->sources[d->n_sources];
    struct kv_error why = {0};
    int rc;

    *s = (struct ki_source){.ops = ops,
                            .of = d,
                            .name = name,
                            .where = name + strlen(ops->scheme),
                            .options = options,
                            .wake = {-1}};
    d->n_sources++;
    rc = ki_found_defaults(options, &s->base, error);
    if (rc < 0)
        return rc;
    rc = kv_wake_open(&s->wake);
    if (rc == 0 && ops->open)
        rc = ops->open(s, &why);
    return rc < 0
               ? kv_fail(error, rc, 0, "%.60s: %.120s", name, *why.text ? why.text : strerror(-rc))
               : 0;
}

static int add_sources(struct ki_discovery *d, struct kv_error *error)
{
    int rc = 0;

    for (const struct ki_options *o = d->options; o && rc == 0; o = o->next)
        for (size_t i = 0; i < o->discover.n && rc == 0; i++)
            rc = add_source(d, kind_of(o->discover.items[i]), o->discover.items[i], o, error);
    for (const struct ki_options *o = d->options; o && rc == 0; o = o->next)
        if (o->dynamo)
            rc = add_source(d, &ki_source_dynamo, o->dynamo, o, error);
    return rc;
}

static int start_threads(struct ki_discovery *d, struct kv_error *error)
{
    int rc = kv_thread_start(&d->thread, "ki-discover", ki_reconcile_run, d);

    d->has_thread = rc == 0;
    for (size_t i = 0; i < d->n_sources && rc == 0; i++) {
        rc = kv_thread_start(&d->sources[i].thread, "ki-source", run_source, &d->sources[i]);
        d->sources[i].has_thread = rc == 0;
    }
    return rc < 0 ? kv_fail(error, rc, 0, "--discover: %s", strerror(-rc)) : 0;
}

static size_t count(const struct ki_options *options)
{
    size_t n = 0;

    for (const struct ki_options *o = options; o; o = o->next)
        n += o->discover.n + (o->dynamo != NULL);
    return n;
}

int ki_discovery_start(const struct ki_options *options, struct ki_registry *registry,
                       struct ki_discovery **ret, struct kv_error *error)
{
    size_t n = count(options);
    struct ki_discovery *d;
    int rc;

    *ret = NULL;
    if (!n)
        return 0;
    d = calloc(1, sizeof(*d));
    if (!d)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    d->options = options;
    d->registry = registry;
    d->grace_ns = options->discover_grace_ms * KV_NS_PER_MS;
    pthread_mutex_init(&d->lock, NULL);
    kv_cond_init(&d->woken);
    d->sources = calloc(n, sizeof(*d->sources));
    rc = d->sources ? add_sources(d, error) : kv_fail(error, -ENOMEM, 0, "out of memory");
    if (rc == 0)
        rc = start_threads(d, error);
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
    for (size_t i = 0; i < d->n_sources; i++) {
        atomic_store_explicit(&d->sources[i].stop, true, memory_order_release);
        kv_wake_signal(&d->sources[i].wake);
    }
    pthread_mutex_lock(&d->lock);
    d->stop = true;
    pthread_cond_signal(&d->woken);
    pthread_mutex_unlock(&d->lock);
    for (size_t i = 0; i < d->n_sources; i++)
        if (d->sources[i].has_thread)
            pthread_join(d->sources[i].thread, NULL);
    if (d->has_thread)
        pthread_join(d->thread, NULL);
    for (size_t i = 0; i < d->n_sources; i++) {
        if (d->sources[i].ops->close)
            d->sources[i].ops->close(&d->sources[i]);
        kv_wake_close(&d->sources[i].wake);
        ki_found_set_fini(&d->sources[i].incoming);
        ki_found_set_fini(&d->sources[i].set);
    }
    ki_reconcile_fini(d);
    free(d->sources);
    pthread_cond_destroy(&d->woken);
    pthread_mutex_destroy(&d->lock);
    free(d);
}
