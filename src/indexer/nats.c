// SPDX-License-Identifier: Apache-2.0
/*
 * Records of publishers on NATS, into the listeners of their registrations.
 *
 *     kvp_follow: gaps, snapshots ──► records ──► run of operations ──► ki_listener_feed
 *                └─ whole or not ────────────────────────────────────► ki_listener_feed_whole
 *
 * The follower's callbacks run under its lock, one at a time. A thread of this file feeds runs that aren't
 * full, and looks for publishers that are silent. Locks: the follower's before this one's.
 */
#include "indexer/nats.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "indexer/stream/listener.h"
#include "indexer/unplaced.h"

#define MAX_RUN 512                  /* blocks and operations that wait to be fed together */
#define FEED_NS (20 * KV_NS_PER_MS)  /* longest wait of a run that isn't full */
#define LOOK_NS (500 * KV_NS_PER_MS) /* between two looks at the server and at silent publishers */
#define RETRY_NS (30 * KV_NS_PER_S)  /* between two attempts to register a worker */
#define MAX_NAME (KV_INSTANCE_NAME_MAX + 1)

/* A publisher, and the registration that it feeds. */
struct worker {
    LIST_ENTRY(worker) entry;
    char subject[KVP_MAX_SUBJECT];
    char name[MAX_NAME], model[MAX_NAME], tenant[MAX_NAME];
    uint64_t instance;
    struct ki_listener *listener; /* NULL: not registered */
    uint64_t heard_ns;
    bool leaving;      /* being unregistered: its publisher isn't followed meanwhile */
    bool refused;      /* the registry didn't take it */
    uint64_t retry_ns; /* when to try that again */
    bool followed;     /* the follower has all records since a snapshot */
    bool told_whole;   /* what the listener knows */
    struct ki_unplaced unplaced;
    bool up; /* the listener knows that the publisher is heard of */
    /* The run: operations on blocks[] and hashes[], which are set when it is fed. */
    size_t n_ops, n_blocks, n_hashes;
    uint32_t lost_tiers;
    struct kve_op ops[MAX_RUN];
    struct kv_block blocks[MAX_RUN];
    uint64_t hashes[MAX_RUN];
};

struct ki_nats {
    const struct ki_options *options;
    struct ki_registry *registry;
    struct kvp_follow *follow;
    struct kvp_nats_secrets secrets;
    pthread_t thread;
    bool has_thread;
    pthread_mutex_t lock; /* guards from here.. */
    pthread_cond_t woken;
    bool stop, connected;
    LIST_HEAD(workers, worker) workers;
    struct worker *last; /* that was looked for; NULL: none */
    /* ..to here. */
};

/* -- names ------------------------------------------------------------------------------------- */

static int digit_of(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

/* Read the token at *@at of a subject, and go behind its dot. Returns false: too long, or no token. */
static bool take_token(const char **at, char ret[MAX_NAME])
{
    size_t n = 0, len = strcspn(*at, ".");
    const char *p = *at, *end = *at + len;

    *at = *end ? end + 1 : end;
    if (len == 1 && *p == '%') { /* an empty name */
        *ret = '\0';
        return true;
    }
    while (p < end && n + 1 < MAX_NAME) {
        if (*p != '%') {
            ret[n++] = *p++;
            continue;
        }
        if (end - p < 3 || digit_of(p[1]) < 0 || digit_of(p[2]) < 0)
            return false;
        ret[n++] = (char)(digit_of(p[1]) * 16 + digit_of(p[2]));
        p += 3;
    }
    ret[n] = '\0';
    return len > 0 && p == end && strlen(ret) == n;
}

/* Take the subject apart: kvasir.CLUSTER.MODEL.TENANT.WORKER. */
static bool read_names(struct ki_nats *nats, struct worker *w)
{
    const char *at = w->subject;
    char prefix[MAX_NAME], cluster[MAX_NAME];

    if (!take_token(&at, prefix) || !take_token(&at, cluster) || !take_token(&at, w->model) ||
        !take_token(&at, w->tenant) || !take_token(&at, w->name) || *at ||
        kv_instance_parse(w->name, strlen(w->name), &w->instance, NULL) < 0)
        return false;
    if (!*w->model)
        snprintf(w->model, sizeof(w->model), "%s", nats->options->model_name);
    if (!*w->tenant)
        snprintf(w->tenant, sizeof(w->tenant), "%s", nats->options->tenant_id);
    return true;
}

/* -- registrations ----------------------------------------------------------------------------- */

/* Records of one publisher come in a row: look at the last one first. */
static struct worker *find(struct ki_nats *nats, const char *subject)
{
    struct worker *w = nats->last;

    if (w && strcmp(w->subject, subject) == 0)
        return w;
    LIST_FOREACH(w, &nats->workers, entry)
    if (strcmp(w->subject, subject) == 0)
        break;
    nats->last = w;
    return w;
}

static struct worker *find_followed(struct ki_nats *nats, const char *subject)
{
    struct worker *w = find(nats, subject);

    return w && !w->leaving ? w : NULL;
}

static void drop_run(struct worker *w)
{
    w->n_ops = w->n_blocks = w->n_hashes = 0;
    w->lost_tiers = 0;
}

/* Register the worker, unless it is. Returns false when it can't be fed. */
static bool join(struct ki_nats *nats, struct worker *w)
{
    const struct ki_registration registration = {
        .instance = w->instance,
        .name = (w->instance & KV_INSTANCE_NAMED) ? w->name : NULL,
        .block_size = (uint32_t)nats->options->block_size,
        .endpoint = w->subject,
        .fed = true,
        .model = w->model,
        .tenant = w->tenant,
    };
    static struct kv_log_rate rate;
    struct kv_error why = {0};
    char quoted[400];

    if (w->listener)
        return true;
    if (ki_registry_register(nats->registry, &registration, &why) == 0)
        w->listener = ki_registry_listener(nats->registry, w->instance, 0);
    w->refused = !w->listener;
    w->retry_ns = kv_now_ns() + RETRY_NS;
    if (!w->listener && kv_log_allowed(&rate, 5))
        kv_log_warn("nats", "a publisher can't be followed", "subject=%s reason=%s", w->subject,
                    kv_log_quote(quoted, sizeof(quoted), why.text));
    return w->listener != NULL;
}

/* The registration was removed here: leave the rest to the publisher's next snapshot. */
static void note_fed(struct worker *w, int rc)
{
    if (rc != -ENOENT)
        return;
    ki_listener_release(w->listener);
    w->listener = NULL;
    w->up = false;
}

/* Tell the listener that its publisher is heard of, or (@problem) why it isn't, once. */
static void set_link(struct worker *w, const char *problem)
{
    if (!w->listener || w->up == !problem)
        return;
    w->up = !problem;
    note_fed(w, ki_listener_feed_link(w->listener, problem));
}

static struct worker *find_or_add(struct ki_nats *nats, const char *subject)
{
    static struct kv_log_rate rate;
    struct worker *w = find(nats, subject);

    if (w)
        return w->leaving ? NULL : w;
    w = calloc(1, sizeof(*w));
    if (!w)
        return NULL;
    snprintf(w->subject, sizeof(w->subject), "%s", subject);
    if (!read_names(nats, w)) {
        if (kv_log_allowed(&rate, 1))
            kv_log_warn("nats", "a subject names no worker", "subject=%s", subject);
        free(w);
        return NULL;
    }
    w->heard_ns = kv_now_ns();
    LIST_INSERT_HEAD(&nats->workers, w, entry);
    return w;
}

/* Tell the listener whether it has been told all that the publisher has, and where it lies. */
static void set_whole(struct worker *w)
{
    bool whole = w->followed && !w->unplaced.n;

    if (!w->listener || w->told_whole == whole)
        return;
    w->told_whole = whole;
    note_fed(w, ki_listener_feed_whole(w->listener, whole));
}

/* -- runs -------------------------------------------------------------------------------------- */

static void feed(struct worker *w)
{
    struct kve_batch batch = {.ops = w->ops, .n_ops = w->n_ops, .n_events = w->n_ops};
    size_t block = 0, hash = 0;

    for (size_t i = 0; i < w->n_ops; i++) {
        struct kve_op *op = &w->ops[i];

        if (op->type == KVE_OP_STORE) {
            op->blocks = w->blocks + block;
            block += op->n;
        } else {
            op->hashes = w->hashes + hash;
            hash += op->n;
        }
    }
    batch.n_blocks = block + hash;
    if (w->listener && (w->n_ops || w->lost_tiers))
        note_fed(w, ki_listener_feed(w->listener, &batch, w->lost_tiers));
    drop_run(w);
    set_whole(w);
}

/* Return the operation that the record goes on with, or a new one. */
static struct kve_op *op_for(struct worker *w, enum kve_op_type type,
                             const struct kvp_record *record)
{
    struct kve_op *op = w->n_ops ? &w->ops[w->n_ops - 1] : NULL;
    bool goes_on = op && op->type == type && op->tier == record->tier;
    uint64_t parent = record->parent ? kvp_key_number(record->parent, record->key_len) : 0;

    if (goes_on && type == KVE_OP_STORE)
        goes_on = record->parent && w->blocks[w->n_blocks - 1].hash == parent;
    if (goes_on)
        return op;
    op = &w->ops[w->n_ops++];
    *op = (struct kve_op){.type = type,
                          .tier = record->tier,
                          .has_parent = type == KVE_OP_STORE && record->parent,
                          .parent = parent,
                          .single = true};
    return op;
}

static void feed_full(struct worker *w)
{
    if (w->n_ops == MAX_RUN || w->n_blocks == MAX_RUN || w->n_hashes == MAX_RUN)
        feed(w);
}

/* Store a block whose place is told, also in the tiers in which it was known without one. */
static void put_stored(struct worker *w, const struct kvp_record *record, uint64_t hash)
{
    uint32_t tiers = ki_unplaced_take(&w->unplaced, hash, UINT32_MAX) | 1u << record->tier;
    struct kvp_record in_tier = *record;

    for (unsigned tier = 0; tier < KV_N_TIERS; tier++) {
        if (!(tiers & 1u << tier))
            continue;
        in_tier.tier = (enum kv_tier)tier;
        op_for(w, KVE_OP_STORE, &in_tier)->n++;
        w->blocks[w->n_blocks++] =
            (struct kv_block){.hash = hash, .tokens_hash = record->tokens_hash};
        feed_full(w);
    }
}

/*
 * Only group 0 is followed. A stored block whose tokens aren't told has no place: it waits for a record
 * that tells them, and the view is partial meanwhile.
 */
static void put(struct worker *w, const struct kvp_record *record)
{
    uint64_t hash = kvp_key_number(record->key, record->key_len);

    if (record->group) {
        w->lost_tiers |= 1u << record->tier;
    } else if (record->event == KVP_REMOVE) {
        if (ki_unplaced_take(&w->unplaced, hash, 1u << record->tier))
            return;
        op_for(w, KVE_OP_REMOVE, record)->n++;
        w->hashes[w->n_hashes++] = hash;
        feed_full(w);
    } else if (record->has_tokens_hash && (record->parent || !record->position)) {
        put_stored(w, record, hash);
    } else if (!ki_unplaced_add(&w->unplaced, hash, record->tier)) {
        w->lost_tiers |= 1u << record->tier;
    }
}

/* -- the follower's callbacks ------------------------------------------------------------------ */

/* Publishers without a worker here take no place of the follower. */
static bool on_heard(void *arg, const char *publisher, bool first)
{
    struct ki_nats *nats = arg;
    struct worker *w;

    pthread_mutex_lock(&nats->lock);
    w = first ? find_or_add(nats, publisher) : find_followed(nats, publisher);
    if (w) {
        w->heard_ns = kv_now_ns();
        set_link(w, NULL);
    }
    pthread_mutex_unlock(&nats->lock);
    return w != NULL;
}

static void on_reset(void *arg, const char *publisher)
{
    struct ki_nats *nats = arg;
    struct worker *w;

    pthread_mutex_lock(&nats->lock);
    w = find_followed(nats, publisher);
    if (w) {
        drop_run(w);
        ki_unplaced_clear(&w->unplaced);
        w->followed = w->told_whole = false;
        w->heard_ns = kv_now_ns();
    }
    if (w && join(nats, w)) {
        set_link(w, NULL);
        note_fed(w, ki_listener_feed_anew(w->listener));
    }
    pthread_mutex_unlock(&nats->lock);
}

static void on_record(void *arg, const struct kvp_header *header, const struct kvp_record *record)
{
    struct ki_nats *nats = arg;
    struct worker *w;

    pthread_mutex_lock(&nats->lock);
    w = find_followed(nats, header->publisher);
    if (w && w->listener)
        put(w, record);
    pthread_mutex_unlock(&nats->lock);
}

static void on_whole(void *arg, const char *publisher, bool whole)
{
    struct ki_nats *nats = arg;
    struct worker *w;

    pthread_mutex_lock(&nats->lock);
    w = find_followed(nats, publisher);
    if (w) {
        w->followed = whole;
        feed(w);
    }
    pthread_mutex_unlock(&nats->lock);
}

/* -- the thread -------------------------------------------------------------------------------- */

static void free_worker(struct worker *w)
{
    ki_listener_release(w->listener);
    free(w);
}

/* Unregister a worker. A publisher that comes back meanwhile is followed when this has ended. */
static void leave(struct ki_nats *nats, struct worker *w)
{
    struct kv_error why = {0};
    uint32_t rank = 0;

    kv_log_info("nats", "a publisher is silent: its worker is unregistered", "subject=%s",
                w->subject);
    if (w->listener)
        (void)ki_registry_unregister(nats->registry, w->instance, w->model, w->tenant, &rank, &why);
    pthread_mutex_lock(&nats->lock);
    LIST_REMOVE(w, entry);
    nats->last = NULL;
    pthread_mutex_unlock(&nats->lock);
    free_worker(w);
}

/* Take a publisher that has been silent for too long; it leaves. */
static struct worker *take_silent(struct ki_nats *nats, uint64_t now_ns)
{
    uint64_t silence_ns = nats->options->nats_silence_ms * KV_NS_PER_MS;
    struct worker *w = NULL;

    pthread_mutex_lock(&nats->lock);
    if (nats->connected)
        LIST_FOREACH(w, &nats->workers, entry)
    if (now_ns > w->heard_ns + silence_ns)
        break;
    if (w)
        w->leaving = true;
    pthread_mutex_unlock(&nats->lock);
    return w;
}

/* Note that the server is there again, or is gone: nobody is silent meanwhile. */
static void look_at_server(struct ki_nats *nats, uint64_t now_ns)
{
    struct kvp_follow_stats stats;
    struct worker *w;

    kvp_follow_get_stats(nats->follow, &stats);
    pthread_mutex_lock(&nats->lock);
    LIST_FOREACH(w, &nats->workers, entry)
    {
        if (!nats->connected)
            w->heard_ns = now_ns;
        if (!stats.nats.connected)
            set_link(w, "no answer of the NATS server");
    }
    nats->connected = stats.nats.connected;
    pthread_mutex_unlock(&nats->lock);
}

/* Write the subject of a refused worker, whose next message shall bring another snapshot and attempt. */
static bool take_refused(struct ki_nats *nats, uint64_t now_ns, char ret[KVP_MAX_SUBJECT])
{
    struct worker *w = NULL;

    pthread_mutex_lock(&nats->lock);
    LIST_FOREACH(w, &nats->workers, entry)
    if (w->refused && now_ns >= w->retry_ns)
        break;
    if (w) {
        w->retry_ns = now_ns + RETRY_NS;
        memcpy(ret, w->subject, sizeof(w->subject));
    }
    pthread_mutex_unlock(&nats->lock);
    return w != NULL;
}

static void look(struct ki_nats *nats)
{
    uint64_t now_ns = kv_now_ns();
    char subject[KVP_MAX_SUBJECT];
    struct worker *w;

    look_at_server(nats, now_ns);
    while ((w = take_silent(nats, now_ns))) {
        memcpy(subject, w->subject, sizeof(subject));
        leave(nats, w);
        kvp_follow_forget(nats->follow, subject);
    }
    while (take_refused(nats, now_ns, subject))
        kvp_follow_forget(nats->follow, subject);
}

static void *run(void *arg)
{
    struct ki_nats *nats = arg;
    uint64_t look_ns = 0;
    struct worker *w;

    pthread_mutex_lock(&nats->lock);
    while (!nats->stop) {
        LIST_FOREACH(w, &nats->workers, entry)
        feed(w);
        if (kv_now_ns() >= look_ns) {
            pthread_mutex_unlock(&nats->lock);
            look(nats);
            look_ns = kv_now_ns() + LOOK_NS;
            pthread_mutex_lock(&nats->lock);
            continue;
        }
        kv_cond_wait_until(&nats->woken, &nats->lock, kv_now_ns() + FEED_NS);
    }
    pthread_mutex_unlock(&nats->lock);
    return NULL;
}

/* -- life -------------------------------------------------------------------------------------- */

void ki_nats_get_stats(struct ki_nats *nats, struct kvp_follow_stats *ret)
{
    kvp_follow_get_stats(nats->follow, ret);
}

void ki_nats_stop(struct ki_nats *nats)
{
    struct worker *w;

    if (!nats)
        return;
    pthread_mutex_lock(&nats->lock);
    nats->stop = true;
    pthread_cond_signal(&nats->woken);
    pthread_mutex_unlock(&nats->lock);
    if (nats->has_thread)
        pthread_join(nats->thread, NULL);
    kvp_follow_close(nats->follow);
    while ((w = LIST_FIRST(&nats->workers))) {
        LIST_REMOVE(w, entry);
        free_worker(w);
    }
    explicit_bzero(&nats->secrets, sizeof(nats->secrets));
    pthread_cond_destroy(&nats->woken);
    pthread_mutex_destroy(&nats->lock);
    free(nats);
}

/* Write the subject of all publishers of --nats-cluster. Returns false: too long a name. */
static bool write_subject(const struct ki_options *o, char ret[KVP_MAX_SUBJECT + 8])
{
    static const char others[] = ".a.a.a";
    char one[KVP_MAX_SUBJECT];
    long len;

    if (!o->nats_cluster) {
        strcpy(ret, "kvasir.*.*.*.*");
        return true;
    }
    len = kvp_subject(o->nats_cluster, "a", "a", "a", one);
    if (len < 0)
        return false;
    one[len - (long)strlen(others)] = '\0';
    snprintf(ret, KVP_MAX_SUBJECT + 8, "%s.*.*.*", one);
    return true;
}

static int open_follow(struct ki_nats *nats, struct kv_error *error)
{
    static const struct kvp_follow_ops ops = {
        .heard = on_heard, .reset = on_reset, .record = on_record, .whole = on_whole};
    const struct ki_options *o = nats->options;
    struct kvp_nats_opts server = KVP_NATS_OPTS_INIT;
    char subject[KVP_MAX_SUBJECT + 8];
    struct kvp_follow_opts opts = {.server = &server, .subject = subject};
    int rc = kvp_nats_args_read(&o->nats_args, &nats->secrets, &server, error);

    if (rc < 0)
        return rc;
    if (!write_subject(o, subject))
        return kv_fail(error, -EINVAL, 0, "--nats-cluster: too long");
    server.url = o->nats;
    server.name = "kv-indexer";
    rc = kvp_follow_open(&opts, &ops, nats, &nats->follow);
    if (rc < 0)
        return kv_fail(error, rc, 0, "--nats: %s",
                       rc == -ENOTSUP ? "needs libkv_nats and libnats" : strerror(-rc));
    return 0;
}

int ki_nats_start(const struct ki_options *options, struct ki_registry *registry,
                  struct ki_nats **ret, struct kv_error *error)
{
    struct ki_nats *nats;
    int rc;

    *ret = NULL;
    if (!options->nats)
        return 0;
    if (!options->block_size)
        return kv_fail(error, -EINVAL, 0, "--nats needs --block-size");
    nats = calloc(1, sizeof(*nats));
    if (!nats)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    nats->options = options;
    nats->registry = registry;
    LIST_INIT(&nats->workers);
    pthread_mutex_init(&nats->lock, NULL);
    kv_cond_init(&nats->woken);
    rc = open_follow(nats, error);
    if (rc == 0) {
        rc = kv_thread_start(&nats->thread, "kvi-nats", run, nats);
        nats->has_thread = rc == 0;
        if (rc < 0)
            kv_fail(error, rc, 0, "--nats: %s", strerror(-rc));
    }
    if (rc < 0) {
        ki_nats_stop(nats);
        return rc;
    }
    *ret = nats;
    return 0;
}
