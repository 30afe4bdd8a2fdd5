// SPDX-License-Identifier: Apache-2.0
/*
 * One round: take the sets that have come, merge them to one list without doubles, walk along it and the
 * list of followed ranks (both are sorted), and call the registry. All ranks that leave or change do so
 * before others join: an instance is of one model, and a model of one block size.
 */
#include "indexer/discover/reconcile.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "indexer/model/lookup.h"

#define LOOK_NS KV_NS_PER_S        /* interval at which the registry's revision is compared */
#define RETRY_NS (2 * KV_NS_PER_S) /* pause before a refused rank is tried again */
#define LOG_LINES 20

/* A rank that the sources name. */
struct wanted {
    const struct ki_found *found;
    size_t source;
};

struct round {
    struct ki_discovery *d;
    uint64_t now_ns;
    struct wanted *wanted;
    size_t n_wanted;
    struct ki_followed *next; /* followed ranks after this round */
    size_t n_next;
};

/* -- calls to the registry --------------------------------------------------------------------- */

static void log_rank(enum kv_log_level level, const char *event, const struct ki_found *found,
                     const struct ki_source *source, const char *why)
{
    static struct kv_log_rate rate;
    const struct ki_registration *r = &found->registration;
    char worker[KV_INSTANCE_QUOTED], digits[KV_INSTANCE_DIGITS], name[200], reason[420];

    if (!kv_log_allowed(&rate, LOG_LINES))
        return;
    kv_log_quote(worker, sizeof(worker), kv_instance_text(r->instance, r->name, digits));
    kv_log_quote(name, sizeof(name), source->name);
    kv_log_(level, "discover", event, "worker=%s rank=%" PRIu32 " source=%s reason=%s", worker,
            r->rank, name, kv_log_quote(reason, sizeof(reason), why));
}

static struct ki_source *source_of(struct ki_discovery *d, const struct ki_followed *f)
{
    size_t at = f->source;

    return at == KI_SOURCE_GONE ? &d->gone : d->sources[at];
}

static void unregister(struct ki_discovery *d, const struct ki_followed *f)
{
    const struct ki_registration *r = &f->found.registration;
    struct kv_error why = {0};

    (void)ki_registry_unregister(d->registry, r->instance, r->model, r->tenant, &r->rank, &why);
}

/* Register a rank, or note when to try again. */
static void join(struct round *round, struct ki_followed *f)
{
    struct ki_discovery *d = round->d;
    const struct ki_registration *r = &f->found.registration;
    struct kv_error why = {0};
    int rc = ki_registry_register(d->registry, r, &why);

    if (rc == 0 && f->found.has_lookahead)
        ki_registry_note_forms(d->registry, r->model, r->tenant,
                               KI_FORM(f->found.lookahead, false));
    if (rc < 0 && f->state != KI_REFUSED)
        log_rank(KV_LOG_WARN, "a worker is not followed for now", &f->found, source_of(d, f),
                 why.text);
    f->state = rc == 0 ? KI_FOLLOWED : KI_REFUSED;
    f->until_ns = rc == 0 ? 0 : round->now_ns + RETRY_NS;
}

/* -- the list of what is wanted ---------------------------------------------------------------- */

static int compare_wanted(const void *a, const void *b)
{
    const struct wanted *x = a, *y = b;
    int order = ki_found_compare(x->found, y->found);

    return order ? order : (x->source > y->source) - (x->source < y->source);
}

/* Take the sets that have come. */
static void take_sets(struct ki_discovery *d)
{
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->n_sources; i++) {
        struct ki_source *s = d->sources[i];

        if (!s->has_incoming)
            continue;
        ki_found_set_fini(&s->set);
        s->set = s->incoming;
        s->incoming = (struct ki_found_set){0};
        s->has_incoming = false;
    }
    pthread_mutex_unlock(&d->lock);
}

/* Drop doubles: the first source counts. Counts those that tell otherwise. */
static void drop_doubles(struct round *round, uint64_t *conflicts)
{
    size_t kept = 0;

    for (size_t i = 0; i < round->n_wanted; i++) {
        struct wanted *w = &round->wanted[i];

        if (!kept || ki_found_compare(round->wanted[kept - 1].found, w->found) != 0)
            round->wanted[kept++] = *w;
        else
            conflicts[w->source] += !ki_found_equal(round->wanted[kept - 1].found, w->found);
    }
    round->n_wanted = kept;
}

/* List what all sources name. Returns false when out of memory. */
static bool list_wanted(struct round *round)
{
    struct ki_discovery *d = round->d;
    uint64_t *conflicts = calloc(d->n_sources, sizeof(*conflicts));
    size_t n = 0;

    for (size_t i = 0; i < d->n_sources; i++)
        n += d->sources[i]->set.n;
    round->wanted = calloc(n + 1, sizeof(*round->wanted));
    round->next = calloc(n + d->n_followed + 1, sizeof(*round->next));
    if (!round->wanted || !round->next || !conflicts) {
        free(conflicts);
        return false;
    }
    for (size_t i = 0; i < d->n_sources; i++)
        for (size_t k = 0; k < d->sources[i]->set.n; k++)
            round->wanted[round->n_wanted++] = (struct wanted){&d->sources[i]->set.items[k], i};
    qsort(round->wanted, round->n_wanted, sizeof(*round->wanted), compare_wanted);
    drop_doubles(round, conflicts);
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->n_sources; i++)
        d->sources[i]->conflicts = conflicts[i];
    pthread_mutex_unlock(&d->lock);
    free(conflicts);
    return true;
}

/* Find the first wanted rank of an instance, or NULL. */
static const struct wanted *wanted_of(const struct round *round, uint64_t instance)
{
    size_t low = 0, high = round->n_wanted;

    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (round->wanted[mid].found->registration.instance < instance)
            low = mid + 1;
        else
            high = mid;
    }
    return low < round->n_wanted && round->wanted[low].found->registration.instance == instance
               ? &round->wanted[low]
               : NULL;
}

/* -- what others have changed ------------------------------------------------------------------ */

static bool is_registered(const struct ki_followed *f)
{
    return f->state == KI_FOLLOWED || f->state == KI_GOING;
}

static const struct ki_worker_info *find_info(const struct ki_worker_info *infos, long n,
                                              const struct ki_registration *r)
{
    long low = 0, high = n;

    while (low < high) {
        long mid = low + (high - low) / 2;

        if (infos[mid].instance < r->instance ||
            (infos[mid].instance == r->instance && infos[mid].rank < r->rank))
            low = mid + 1;
        else
            high = mid;
    }
    return low < n && infos[low].instance == r->instance && infos[low].rank == r->rank ? &infos[low]
                                                                                       : NULL;
}

static bool removed_by_peer(const struct ki_removed *removed, long n,
                            const struct ki_registration *r)
{
    for (long i = 0; i < n; i++)
        if (removed[i].instance == r->instance && removed[i].rank == r->rank)
            return removed[i].by_peer;
    return false;
}

/* Return true when the rank is still registered as the source told of it. */
static bool is_ours(const struct ki_followed *f, const struct ki_worker_info *info)
{
    const struct ki_registration *r = &f->found.registration;

    return strcmp(info->endpoint, r->endpoint) == 0 && strcmp(info->model, r->model) == 0 &&
           strcmp(info->tenant, r->tenant) == 0 &&
           (f->state != KI_GOING || info->status == KI_WITHDRAWN);
}

/* Note that a rank is registered no more, or by a client. */
static void note_change(struct round *round, struct ki_followed *f,
                        const struct ki_worker_info *info, const struct ki_removed *removed, long n)
{
    if (info && is_ours(f, info))
        return;
    if (!info &&
        removed_by_peer(
            removed, n,
            &f->found.registration)) { /* its own sources count here: it is registered again */
        f->state = KI_REFUSED;
        f->until_ns = round->now_ns;
        return;
    }
    f->state = KI_LEFT_ALONE;
    log_rank(KV_LOG_INFO, "a worker is left to a client", &f->found, source_of(round->d, f),
             info ? "it was registered" : "it was unregistered");
}

/* Compare with the registry, if that has changed. */
static void look_at_registry(struct round *round)
{
    struct ki_discovery *d = round->d;
    uint64_t revision = ki_registry_revision(d->registry);
    struct ki_worker_info *infos = NULL;
    struct ki_removed *removed = NULL;
    long n, n_removed;

    if (revision == d->revision)
        return;
    n = ki_registry_workers(d->registry, &infos);
    n_removed = n >= 0 ? ki_registry_removed(d->registry, &removed) : -1;
    for (size_t i = 0; i < d->n_followed && n_removed >= 0; i++) {
        struct ki_followed *f = &d->followed[i];

        if (is_registered(f))
            note_change(round, f, find_info(infos, n, &f->found.registration), removed, n_removed);
    }
    if (n_removed >= 0)
        d->revision = revision;
    free(removed);
    if (n >= 0)
        ki_worker_infos_free(infos, n);
}

/* -- ranks that leave, stay or change ---------------------------------------------------------- */

/* Return true when the instance is another model's now, which waits for this rank to leave. */
static bool is_displaced(const struct round *round, const struct ki_followed *f)
{
    const struct ki_registration *r = &f->found.registration, *now;
    const struct wanted *w = wanted_of(round, r->instance);

    if (!w)
        return false;
    now = &w->found->registration;
    return strcmp(now->model, r->model) != 0 || strcmp(now->tenant, r->tenant) != 0;
}

/*
 * Return true for a rank whose source a reload has removed, while the first set of a new one is awaited: it
 * may name the rank, too.
 */
static bool awaits_source(const struct round *round, const struct ki_followed *f)
{
    struct ki_discovery *d = round->d;
    bool awaits = false;

    if (f->source != KI_SOURCE_GONE || round->now_ns >= d->hold_ns)
        return false;
    pthread_mutex_lock(&d->lock);
    for (size_t i = 0; i < d->n_sources; i++)
        awaits |= !d->sources[i]->sets;
    pthread_mutex_unlock(&d->lock);
    return awaits;
}

/* Go on with a followed rank that no source names. Returns false when it is over. */
static bool go(struct round *round, struct ki_followed *f)
{
    struct ki_discovery *d = round->d;
    const struct ki_source *source = source_of(d, f);
    const struct ki_registration *r = &f->found.registration;

    if (!is_registered(f))
        return false;
    if (awaits_source(round, f))
        return true;
    if (f->state == KI_FOLLOWED) {
        uint64_t grace_ns = source->ops->at_once ? 0 : d->grace_ns;

        f->state = KI_GOING;
        f->until_ns = round->now_ns + grace_ns;
        if (grace_ns && ki_registry_withdraw(d->registry, r->instance, r->rank, true) == 0)
            log_rank(KV_LOG_INFO, "a worker is withdrawn", &f->found, source,
                     "no source names it any more");
    }
    if (round->now_ns < f->until_ns && !is_displaced(round, f))
        return true;
    unregister(d, f);
    log_rank(KV_LOG_INFO, "a worker has left", &f->found, source, "no source names it any more");
    return false;
}

/* Go on with a followed rank that a source tells as before. */
static void stay(struct round *round, struct ki_followed *f, size_t source)
{
    struct ki_discovery *d = round->d;
    const struct ki_registration *r = &f->found.registration;

    f->source = source;
    if (f->state != KI_GOING)
        return;
    f->state = KI_FOLLOWED;
    f->until_ns = 0;
    if (ki_registry_withdraw(d->registry, r->instance, r->rank, false) == 0)
        log_rank(KV_LOG_INFO, "a worker is back", &f->found, source_of(d, f),
                 "a source names it again");
}

static void free_found(struct ki_found *found)
{
    struct ki_found_set set = {.items = malloc(sizeof(*found)), .n = 1};

    if (!set.items)
        return;
    *set.items = *found;
    ki_found_set_fini(&set);
}

/* Copy a wanted rank, which is registered afterwards. Returns false when out of memory. */
static bool take(const struct wanted *w, struct ki_followed *ret)
{
    struct ki_found_set set = {0};
    struct kv_error why = {0};

    if (ki_found_add(&set, w->found, &why) < 0)
        return false;
    *ret = (struct ki_followed){.found = set.items[0], .source = w->source};
    free(set.items);
    ret->state = KI_LEFT_ALONE;
    return true;
}

/*
 * Walk along both lists. Ranks that are to be registered get a bit of @joins. Followed ranks move to
 * round->next or are freed.
 */
static void walk(struct round *round, bool *joins)
{
    struct ki_discovery *d = round->d;
    size_t i = 0, k = 0;

    while (i < d->n_followed || k < round->n_wanted) {
        struct ki_followed *f = i < d->n_followed ? &d->followed[i] : NULL;
        const struct wanted *w = k < round->n_wanted ? &round->wanted[k] : NULL;
        int order = !f ? 1 : !w ? -1 : ki_found_compare(&f->found, w->found);
        bool kept = false;

        i += order <= 0;
        k += order >= 0;
        if (order == 0 && ki_found_equal(&f->found, w->found)) {
            stay(round, f, w->source);
            kept = true;
        } else if (order < 0) {
            kept = go(round, f);
        } else if (order == 0 && is_registered(f)) {
            unregister(d, f);
        }
        if (kept) {
            round->next[round->n_next++] = *f;
            continue;
        }
        if (f && order <= 0)
            free_found(&f->found);
        if (w && order >= 0 && take(w, &round->next[round->n_next]))
            joins[round->n_next++] = true;
    }
}

/* -- a round ----------------------------------------------------------------------------------- */

static bool is_current(struct ki_discovery *d, const struct ki_followed *f)
{
    bool current;

    pthread_mutex_lock(&d->lock);
    current = source_of(d, f)->current; /* a removed one never is */
    pthread_mutex_unlock(&d->lock);
    return current;
}

/* Register what is new, and what was refused and is due. */
static void join_all(struct round *round, const bool *joins)
{
    for (size_t i = 0; i < round->n_next; i++) {
        struct ki_followed *f = &round->next[i];

        if (joins[i] ||
            (f->state == KI_REFUSED && round->now_ns >= f->until_ns && is_current(round->d, f)))
            join(round, f);
    }
}

/* Publish the list, and count for the sources. */
static void finish(struct round *round)
{
    struct ki_discovery *d = round->d;
    struct ki_followed *old;

    pthread_mutex_lock(&d->lock);
    old = d->followed;
    d->followed = round->next;
    d->n_followed = round->n_next;
    for (size_t i = 0; i < d->n_sources; i++)
        d->sources[i]->withdrawn = d->sources[i]->refused = 0;
    for (size_t i = 0; i < d->n_followed; i++) {
        struct ki_source *s = source_of(d, &d->followed[i]);

        s->withdrawn += d->followed[i].state == KI_GOING;
        s->refused += d->followed[i].state == KI_REFUSED;
    }
    pthread_mutex_unlock(&d->lock);
    free(old); /* its items have moved, or are freed */
}

static void run_round(struct ki_discovery *d)
{
    struct round round = {.d = d, .now_ns = kv_now_ns()};
    bool *joins = NULL;

    take_sets(d);
    if (list_wanted(&round))
        joins = calloc(round.n_wanted + d->n_followed + 1, sizeof(*joins));
    if (joins) {
        look_at_registry(&round); /* first: what is a client's now isn't withdrawn */
        walk(&round, joins);
        join_all(&round, joins);
        finish(&round);
    } else {
        kv_log_error("discover", "out of memory: workers are not followed", NULL);
        free(round.next);
    }
    free(joins);
    free(round.wanted);
}

static uint64_t next_round_ns(const struct ki_discovery *d)
{
    uint64_t now_ns = kv_now_ns(), next_ns = now_ns + LOOK_NS;

    for (size_t i = 0; i < d->n_followed; i++)
        if (d->followed[i].state == KI_GOING)
            next_ns = KV_MIN(next_ns, d->followed[i].until_ns);
    return next_ns;
}

/* Return true when a round has something to do. Caller-locked. */
static bool is_due(const struct ki_discovery *d)
{
    for (size_t i = 0; i < d->n_sources; i++)
        if (d->sources[i]->has_incoming)
            return true;
    return false;
}

void *ki_reconcile_run(void *arg)
{
    struct ki_discovery *d = arg;

    pthread_mutex_lock(&d->lock);
    while (!d->stop) {
        uint64_t at_ns = next_round_ns(d);

        while (!d->stop && !is_due(d) && kv_now_ns() < at_ns)
            kv_cond_wait_until(&d->woken, &d->lock, at_ns);
        if (d->stop)
            break;
        pthread_mutex_unlock(&d->lock);
        run_round(d);
        pthread_mutex_lock(&d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    return NULL;
}

void ki_reconcile_fini(struct ki_discovery *d)
{
    for (size_t i = 0; i < d->n_followed; i++)
        free_found(&d->followed[i].found);
    free(d->followed);
}

long ki_discovery_source_of(struct ki_discovery *d, uint64_t instance, uint32_t rank)
{
    const struct ki_found key = {.registration = {.instance = instance, .rank = rank}};
    size_t low = 0, high;
    long found = -1;

    if (!d)
        return -1;
    pthread_mutex_lock(&d->lock);
    high = d->n_followed;
    while (low < high) {
        size_t mid = low + (high - low) / 2;

        if (ki_found_compare(&d->followed[mid].found, &key) < 0)
            low = mid + 1;
        else
            high = mid;
    }
    if (low < d->n_followed && ki_found_compare(&d->followed[low].found, &key) == 0 &&
        is_registered(&d->followed[low]))
        found = (long)d->followed[low].source; /* KI_SOURCE_GONE: -1 */
    pthread_mutex_unlock(&d->lock);
    return found;
}
