// SPDX-License-Identifier: Apache-2.0
#include "base/net/resolve.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netdb.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>
#include <sys/socket.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/xxh.h"
#include "base/thread/thread.h"

#define BUCKETS 256u
#define IDLE_S 10 /* a thread without work ends after this time */

enum state { IDLE, QUEUED, RUNNING };

struct name {
    TAILQ_ENTRY(name) queue, age;
    struct name *next; /* next name in the same bucket */
    enum state state;
    uint64_t asked_ns; /* when the lookup was asked for; QUEUED and RUNNING only */
    /* End of the last lookup, and of the last successful one; 0: none */
    uint64_t done_ns, good_ns;
    int rc;                   /* result of the last lookup */
    struct kv_addresses good; /* addresses from the last successful lookup */
    char host[];
};

TAILQ_HEAD(names, name);

struct kv_resolver {
    struct kv_resolver_opts opts;
    pthread_mutex_t lock; /* guards all fields below */
    pthread_cond_t work, done;
    struct name *buckets[BUCKETS];
    struct names age; /* all names, the longest unasked first */
    /* Names to look up; the second queue holds those whose last lookup failed */
    struct names queues[2];
    uint32_t n_names, n_queued, n_threads, n_idle;
    uint32_t n_doubtful; /* threads that look up names of the second queue */
    uint32_t refs;       /* one of the owner, one of each thread */
    bool stop;
};

/* -- life -------------------------------------------------------------------------------------- */

int kv_resolver_create(const struct kv_resolver_opts *opts, struct kv_resolver **ret)
{
    struct kv_resolver *r = calloc(1, sizeof(*r));

    if (!r)
        return -ENOMEM;
    if (opts)
        r->opts = *opts;
    r->opts.threads = r->opts.threads ? r->opts.threads : 64;
    r->opts.max_names = r->opts.max_names ? r->opts.max_names : 4096;
    r->opts.deadline_ms = r->opts.deadline_ms ? r->opts.deadline_ms : 5000;
    r->opts.failed_ms = r->opts.failed_ms ? r->opts.failed_ms : 1000;
    r->opts.lookup = r->opts.lookup ? r->opts.lookup : kv_lookup_system;
    pthread_mutex_init(&r->lock, NULL);
    kv_cond_init(&r->work);
    kv_cond_init(&r->done);
    TAILQ_INIT(&r->age);
    TAILQ_INIT(&r->queues[0]);
    TAILQ_INIT(&r->queues[1]);
    r->refs = 1;
    *ret = r;
    return 0;
}

/* Drop a reference and unlock. The last reference frees the resolver with its lock. */
static void drop_and_unlock(struct kv_resolver *r)
{
    bool last = --r->refs == 0;
    struct name *name;

    pthread_mutex_unlock(&r->lock);
    if (!last)
        return;
    while ((name = TAILQ_FIRST(&r->age)) != NULL) {
        TAILQ_REMOVE(&r->age, name, age);
        free(name);
    }
    pthread_cond_destroy(&r->work);
    pthread_cond_destroy(&r->done);
    pthread_mutex_destroy(&r->lock);
    free(r);
}

void kv_resolver_destroy(struct kv_resolver *resolver)
{
    if (!resolver)
        return;
    pthread_mutex_lock(&resolver->lock);
    resolver->stop = true;
    pthread_cond_broadcast(&resolver->work);
    drop_and_unlock(resolver);
}

static struct kv_resolver *shared;

static void make_shared(void)
{
    (void)kv_resolver_create(NULL, &shared);
}

struct kv_resolver *kv_resolver_shared(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;

    pthread_once(&once, make_shared);
    return shared;
}

/* -- the threads ------------------------------------------------------------------------------- */

static bool is_doubtful(const struct name *name)
{
    return name->rc < 0;
}

/*
 * Take the next name to look up. A quarter of the threads serves only names that may well resolve.
 */
static struct name *next_name(struct kv_resolver *r)
{
    struct name *name = TAILQ_FIRST(&r->queues[0]);

    if (!name && r->n_doubtful < r->opts.threads - r->opts.threads / 4)
        name = TAILQ_FIRST(&r->queues[1]);
    return name;
}

/*
 * Look @name up. Takes the lock held, releases it during the lookup. Only IDLE names are ever
 * freed.
 */
static void look_up(struct kv_resolver *r, struct name *name)
{
    struct kv_addresses found = {0};
    bool doubtful = is_doubtful(name);
    int rc;

    TAILQ_REMOVE(&r->queues[doubtful], name, queue);
    r->n_queued--;
    name->state = RUNNING;
    r->n_doubtful += doubtful;
    pthread_mutex_unlock(&r->lock);
    rc = r->opts.lookup(r->opts.lookup_arg, name->host, &found);
    pthread_mutex_lock(&r->lock);
    r->n_doubtful -= doubtful;
    name->state = IDLE;
    name->done_ns = kv_now_ns();
    name->rc = rc;
    if (rc == 0) {
        name->good = found;
        name->good_ns = name->done_ns;
    }
    pthread_cond_broadcast(&r->done);
    if (doubtful && !TAILQ_EMPTY(&r->queues[1]))
        pthread_cond_signal(&r->work);
}

static void *resolve_main(void *arg)
{
    struct kv_resolver *r = arg;
    bool idle_for_long = false;

    pthread_mutex_lock(&r->lock);
    while (!r->stop) {
        struct name *name = next_name(r);

        if (name) {
            look_up(r, name);
            idle_for_long = false;
            continue;
        }
        if (idle_for_long)
            break;
        r->n_idle++;
        idle_for_long = kv_cond_wait_until(&r->work, &r->lock,
                                           kv_now_ns() + IDLE_S * KV_NS_PER_S) == -ETIMEDOUT;
        r->n_idle--;
    }
    r->n_threads--;
    drop_and_unlock(r);
    return NULL;
}

/*
 * Make sure that a thread will take the name just queued. A woken idle thread counts as idle until
 * it runs. Returns false when no thread exists and none can be started.
 */
static bool find_thread(struct kv_resolver *r)
{
    pthread_t thread;

    if (r->n_idle)
        pthread_cond_signal(&r->work);
    if (r->n_queued <= r->n_idle)
        return true;
    if (r->n_threads == r->opts.threads)
        return true;
    if (kv_thread_start(&thread, "resolve", resolve_main, r) < 0)
        return r->n_threads > 0;
    pthread_detach(thread); /* no caller may wait for the thread: see resolve.h */
    r->n_threads++;
    r->refs++;
    return true;
}

/* -- names ------------------------------------------------------------------------------------- */

static struct name **bucket_of(struct kv_resolver *r, const char *host)
{
    return &r->buckets[kv_xxh64(host, strlen(host), 0) % BUCKETS];
}

static void forget(struct kv_resolver *r, struct name *name)
{
    struct name **link = bucket_of(r, name->host);

    while (*link != name)
        link = &(*link)->next;
    *link = name->next;
    TAILQ_REMOVE(&r->age, name, age);
    r->n_names--;
    free(name);
}

/* Make room for one more name: drop the longest unasked one that isn't being looked up. */
static bool make_room(struct kv_resolver *r)
{
    struct name *name;

    if (r->n_names < r->opts.max_names)
        return true;
    name = TAILQ_FIRST(&r->age);
    while (name && name->state != IDLE)
        name = TAILQ_NEXT(name, age);
    if (name)
        forget(r, name);
    return name != NULL;
}

static int find_name(struct kv_resolver *r, const char *host, struct name **ret)
{
    struct name **bucket = bucket_of(r, host), *name = *bucket;
    size_t len = strlen(host) + 1;

    while (name && strcmp(name->host, host) != 0)
        name = name->next;
    if (name) {
        TAILQ_REMOVE(&r->age, name, age);
        TAILQ_INSERT_TAIL(&r->age, name, age);
        *ret = name;
        return 0;
    }
    if (!make_room(r))
        return -ENOSPC;
    name = calloc(1, sizeof(*name) + len);
    if (!name)
        return -ENOMEM;
    memcpy(name->host, host, len);
    name->next = *bucket;
    *bucket = name;
    TAILQ_INSERT_TAIL(&r->age, name, age);
    r->n_names++;
    *ret = name;
    return 0;
}

static bool is_older(uint64_t then_ns, uint64_t age_ms, uint64_t now_ns)
{
    return !then_ns || now_ns - then_ns > age_ms * KV_NS_PER_MS;
}

static void enqueue(struct kv_resolver *r, struct name *name, uint64_t now_ns)
{
    TAILQ_INSERT_TAIL(&r->queues[is_doubtful(name)], name, queue);
    r->n_queued++;
    name->state = QUEUED;
    name->asked_ns = now_ns;
    if (find_thread(r))
        return;
    TAILQ_REMOVE(&r->queues[is_doubtful(name)], name, queue);
    r->n_queued--;
    name->state = IDLE;
    name->done_ns = now_ns;
    name->rc = -EAGAIN;
}

/*
 * Return the addresses known for @name now. When the name servers are silent, their last answer
 * stays valid.
 */
static int answer(const struct kv_resolver *r, const struct name *name, uint64_t max_age_ms,
                  uint64_t now_ns)
{
    int rc = name->rc;

    if (!is_older(name->good_ns, max_age_ms, now_ns))
        return 0;
    if (name->state != IDLE) {
        if (now_ns < name->asked_ns + r->opts.deadline_ms * KV_NS_PER_MS)
            return -EINPROGRESS;
        rc = -ETIMEDOUT;
    }
    return rc != -ENOENT && name->good.n ? 0 : rc;
}

#define YOUNG_MS 1000u /* milliseconds; every caller accepts an answer of this age */

static int ask_locked(struct kv_resolver *r, const char *host, uint64_t max_age_ms,
                      struct kv_addresses *ret)
{
    uint64_t now_ns = kv_now_ns();
    struct name *name;
    int rc = find_name(r, host, &name);

    if (rc < 0)
        return rc;
    max_age_ms = KV_MAX(max_age_ms, YOUNG_MS);
    if (name->state == IDLE && is_older(name->good_ns, max_age_ms, now_ns) &&
        (name->rc == 0 || is_older(name->done_ns, r->opts.failed_ms, now_ns)))
        enqueue(r, name, now_ns);
    rc = answer(r, name, max_age_ms, now_ns);
    if (rc == 0)
        *ret = name->good;
    return rc;
}

static bool is_numeric(const char *host, struct kv_addresses *ret)
{
    uint8_t address[16];
    int family = strchr(host, ':') ? AF_INET6 : AF_INET;

    if (inet_pton(family, host, address) != 1)
        return false;
    ret->n = 1;
    ret->items[0].family = family;
    snprintf(ret->items[0].text, sizeof(ret->items[0].text), "%s", host);
    return true;
}

int kv_resolver_ask(struct kv_resolver *resolver, const char *host, uint64_t max_age_ms,
                    struct kv_addresses *ret)
{
    int rc;

    if (is_numeric(host, ret))
        return 0;
    pthread_mutex_lock(&resolver->lock);
    rc = ask_locked(resolver, host, max_age_ms, ret);
    pthread_mutex_unlock(&resolver->lock);
    return rc;
}

int kv_resolver_wait(struct kv_resolver *resolver, const char *host, uint64_t max_age_ms,
                     uint64_t deadline_ns, struct kv_addresses *ret)
{
    int rc;

    if (is_numeric(host, ret))
        return 0;
    pthread_mutex_lock(&resolver->lock);
    while ((rc = ask_locked(resolver, host, max_age_ms, ret)) == -EINPROGRESS) {
        /* The deadline of a lookup passes without a signal. */
        uint64_t until_ns =
            KV_MIN(deadline_ns, kv_now_ns() + resolver->opts.deadline_ms * KV_NS_PER_MS);

        if (kv_now_ns() >= deadline_ns) {
            rc = -ETIMEDOUT;
            break;
        }
        kv_cond_wait_until(&resolver->done, &resolver->lock, until_ns);
    }
    pthread_mutex_unlock(&resolver->lock);
    return rc;
}

const char *kv_resolver_strerror(int rc)
{
    switch (rc) {
    case -EINPROGRESS:
        return "the host name is being looked up";
    case -ENOENT:
        return "the host name does not resolve: there is no such name";
    case -ETIMEDOUT:
        return "the host name was not resolved in time: no answer from the name server";
    case -EAGAIN:
        return "the host name can't be resolved now: the name server failed";
    case -ENOSPC:
        return "too many host names";
    default:
        return strerror(-rc);
    }
}

/* -- the system's resolver --------------------------------------------------------------------- */

static int errno_of(int rc)
{
    switch (rc) {
    case EAI_NONAME:
    case EAI_NODATA:
    case EAI_ADDRFAMILY:
        return -ENOENT;
    case EAI_MEMORY:
        return -ENOMEM;
    case EAI_SYSTEM:
        return errno ? -errno : -EIO;
    default:
        return -EAGAIN;
    }
}

static void add_family(const struct addrinfo *list, int family, struct kv_addresses *ret)
{
    for (; list && ret->n < KV_RESOLVE_MAX; list = list->ai_next) {
        struct kv_address *address = &ret->items[ret->n];

        if (list->ai_family != family ||
            getnameinfo(list->ai_addr, list->ai_addrlen, address->text, sizeof(address->text), NULL,
                        0, NI_NUMERICHOST) != 0)
            continue;
        address->family = family;
        ret->n++;
    }
}

int kv_lookup_system(void *arg, const char *host, struct kv_addresses *ret)
{
    const struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG};
    struct addrinfo *list = NULL;
    int rc;

    (void)arg;
    errno = 0;
    rc = getaddrinfo(host, NULL, &hints, &list);
    if (rc != 0)
        return errno_of(rc);
    ret->n = 0;
    add_family(list, AF_INET, ret);
    add_family(list, AF_INET6, ret);
    freeaddrinfo(list);
    return ret->n ? 0 : -ENOENT;
}
