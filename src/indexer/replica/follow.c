// SPDX-License-Identifier: Apache-2.0
#include "indexer/replica/follow.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args/instance.h"
#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "indexer/api/body_groups.h"
#include "indexer/registry/removals.h"
#include "indexer/replica/fetch.h"

#define READ_BUFFER (64u << 10)
#define MAX_ENTRIES KI_MAX_REMOVED /* most registrations, and most removals, of a peer */
#define MAX_TEXT 2048              /* bytes of a name or an endpoint */
#define AGAIN_MS 30000             /* see ki_follow_opts */

/* -- the document ------------------------------------------------------------------------------ */

void ki_peer_document_fini(struct ki_peer_document *d)
{
    for (size_t i = 0; i < d->n; i++) {
        free((char *)d->entries[i].registration.name);
        free((char *)d->entries[i].registration.endpoint);
        free((char *)d->entries[i].registration.replay_endpoint);
        free((char *)d->entries[i].registration.model);
        free((char *)d->entries[i].registration.tenant);
    }
    free(d->entries);
}

static struct ki_peer_entry *add_entry(struct ki_peer_document *d, bool removed,
                                       struct kv_json *json)
{
    size_t capacity = d->capacity ? d->capacity * 2 : 64;
    struct ki_peer_entry *grown;

    if ((removed ? d->n_removed : d->n - d->n_removed) == MAX_ENTRIES) {
        kv_json_fail(json, -EFBIG, "too many registrations");
        return NULL;
    }
    if (d->n == d->capacity) {
        grown = realloc(d->entries, capacity * sizeof(*grown));
        if (!grown) {
            kv_json_fail(json, -ENOMEM, "out of memory");
            return NULL;
        }
        d->entries = grown;
        d->capacity = capacity;
    }
    d->n_removed += removed;
    memset(&d->entries[d->n], 0, sizeof(*d->entries));
    d->entries[d->n].removed = removed;
    return &d->entries[d->n++];
}

static void read_text(struct kv_json *json, const char **ret)
{
    struct kv_buf scratch = {.limit = MAX_TEXT};
    struct kv_str text = kv_json_str(json, &scratch);
    char *copy = NULL;

    if (!kv_json_failed(json) && !*ret && text.len < MAX_TEXT && !memchr(text.p, '\0', text.len))
        copy = strndup(text.p, text.len);
    if (!copy)
        kv_json_fail(json, -EPROTO, "an unusable text");
    *ret = copy ? copy : *ret;
    kv_buf_fini(&scratch);
}

/* Unknown modes count as KI_REPORTS_UNKNOWN. */
static void read_report_mode(struct kv_json *json, enum ki_report_mode *ret)
{
    struct kv_buf scratch = KV_BUF_INIT;
    struct kv_str text = kv_json_str(json, &scratch);

    if (!kv_json_failed(json))
        (void)ki_report_mode_parse(text.p, text.len, ret);
    kv_buf_fini(&scratch);
}

static void read_groups(struct kv_json *json, uint64_t *ret)
{
    struct kv_buf scratch = KV_BUF_INIT;
    struct kv_str text = kv_json_str(json, &scratch);

    if (!kv_json_failed(json) && ki_groups_parse(text.p, text.len, ret) < 0)
        kv_json_fail(json, -EPROTO, "unusable eagle_groups");
    kv_buf_fini(&scratch);
}

static void read_told_groups(struct kv_json *json, struct kve_told *ret)
{
    struct kv_buf scratch = KV_BUF_INIT;

    ki_told_read_json(json, &scratch, ret);
    kv_buf_fini(&scratch);
}

static void read_entry(struct ki_peer_document *d, struct kv_json *json, bool removed)
{
    struct ki_peer_entry *e = add_entry(d, removed, json);
    struct ki_registration *r;
    struct kv_str key;

    if (!e)
        return;
    r = &e->registration;
    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "instance_id"))
            r->instance = kv_json_u64(json, UINT64_MAX);
        else if (kv_str_eq(key, "instance_name"))
            read_text(json, &r->name);
        else if (kv_str_eq(key, "dp_rank"))
            r->rank = (uint32_t)kv_json_u64(json, UINT32_MAX);
        else if (kv_str_eq(key, "version"))
            r->version = kv_json_u64(json, UINT64_MAX);
        else if (kv_str_eq(key, "block_size"))
            r->block_size = (uint32_t)kv_json_u64(json, UINT32_MAX);
        else if (kv_str_eq(key, "num_blocks"))
            r->num_blocks = kv_json_u64(json, UINT64_MAX);
        else if (kv_str_eq(key, "eagle_drop"))
            r->habits.eagle_drop = kv_json_bool(json);
        else if (kv_str_eq(key, "eagle_groups"))
            read_groups(json, &r->habits.eagle_groups);
        else if (kv_str_eq(key, "groups"))
            read_told_groups(json, &r->habits.groups);
        else if (kv_str_eq(key, "silent_windows"))
            r->habits.silent_windows = kv_json_bool(json);
        else if (kv_str_eq(key, "kv_cache_report_mode"))
            read_report_mode(json, &r->habits.report_mode);
        else if (kv_str_eq(key, "model_name"))
            read_text(json, &r->model);
        else if (kv_str_eq(key, "tenant_id"))
            read_text(json, &r->tenant);
        else if (kv_str_eq(key, "endpoint"))
            read_text(json, &r->endpoint);
        else if (kv_str_eq(key, "replay_endpoint"))
            read_text(json, &r->replay_endpoint);
        else
            kv_json_skip(json);
    }
    if (!r->version || (!removed && (!r->model || !r->tenant || !r->endpoint)))
        kv_json_fail(json, -EPROTO, "a registration that lacks something");
    if (r->name && !kv_instance_is(r->instance, r->name, strlen(r->name)))
        kv_json_fail(json, -EPROTO, "an instance_name that isn't of its instance_id");
}

int ki_peer_document_read(struct ki_peer_document *d, struct kv_json *json)
{
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        bool removed = kv_str_eq(key, "removed");

        if (removed || kv_str_eq(key, "registrations")) {
            kv_json_array(json);
            while (kv_json_next_item(json))
                read_entry(d, json, removed);
        } else if (kv_str_eq(key, "id")) {
            d->id = kv_json_u64(json, UINT64_MAX);
        } else if (kv_str_eq(key, "revision")) {
            d->revision = kv_json_u64(json, UINT64_MAX);
        } else {
            kv_json_skip(json);
        }
    }
    return kv_json_finish(json);
}

/* Merge one registration. Returns true when it is refused for a reason that may pass. */
static bool merge_registration(struct ki_registry *registry, const struct ki_registration *r)
{
    static struct kv_log_rate rate;
    struct kv_error error;
    char text[400], worker[KV_INSTANCE_QUOTED], digits[KV_INSTANCE_DIGITS];
    int rc = ki_registry_merge(registry, r, &error);

    if (rc < 0 && kv_log_allowed(&rate, 3))
        kv_log_warn(
            "peers", "a peer's worker is not followed here", "worker=%s rank=%" PRIu32 " error=%s",
            kv_log_quote(worker, sizeof(worker), kv_instance_text(r->instance, r->name, digits)),
            r->rank, kv_log_quote(text, sizeof(text), error.text));
    return rc < 0 && rc != -EINVAL && rc != -EACCES; /* no other entry, nor time, mends those */
}

/*
 * Registrations of other models leave before any is made: an instance is of one model, and a model
 * of one block size. A registration is newer than the removal of the one before it, so removals
 * come in between: the same worker keeps its blocks. Returns true when a refusal may pass.
 */
static bool merge(struct ki_registry *registry, const struct ki_peer_document *d)
{
    bool refused = false;

    for (size_t i = 0; i < d->n; i++) {
        d->entries[i].registration.by_peer = true;
        if (!d->entries[i].removed)
            ki_registry_merge_known(registry, &d->entries[i].registration);
    }
    for (size_t i = 0; i < d->n; i++) {
        const struct ki_registration *r = &d->entries[i].registration;

        if (d->entries[i].removed)
            ki_registry_merge_removed(registry, r->instance, r->rank, r->version);
    }
    for (size_t i = 0; i < d->n; i++)
        if (!d->entries[i].removed)
            refused |= merge_registration(registry, &d->entries[i].registration);
    return refused;
}

int ki_follow_read(struct ki_registry *registry, struct kv_json *json, uint64_t *ret_id,
                   uint64_t *ret_revision)
{
    struct ki_peer_document d = {0};
    int rc = ki_peer_document_read(&d, json);

    if (rc == 0) {
        *ret_id = d.id;
        *ret_revision = d.revision;
        if (d.id != ki_registry_id(registry) && merge(registry, &d))
            rc = 1;
    }
    ki_peer_document_fini(&d);
    return rc;
}

/* -- asking ------------------------------------------------------------------------------------ */

int ki_follow_ask(struct ki_registry *registry, const char *peer, const char *token,
                  const char *ca_file, const _Atomic int *stop, uint64_t *id, uint64_t *revision,
                  struct kv_error *error)
{
    struct ki_fetch_opts opts = {.token = token,
                                 .ca_file = ca_file,
                                 .connect_ms = 2000,
                                 .stall_ms = 3000,
                                 .total_ms = 10000,
                                 .stop = stop};
    char path[96], *url, *buffer = malloc(READ_BUFFER);
    struct ki_fetch *fetch = NULL;
    struct kv_json json;
    int rc = -ENOMEM;

    snprintf(path, sizeof(path), "/registrations?id=%" PRIu64 "&revision=%" PRIu64, *id, *revision);
    url = ki_peer_url(peer, path);
    opts.url = url;
    if (url && buffer)
        rc = ki_fetch_open(&opts, &fetch);
    if (rc < 0) {
        kv_fail(error, rc, 0, "%s", strerror(-rc));
    } else {
        kv_json_init_stream(&json, buffer, READ_BUFFER, ki_fetch_read, fetch);
        rc = ki_follow_read(registry, &json, id, revision);
        if (rc < 0)
            kv_fail(error, rc, 0, "%s",
                    ki_fetch_error(fetch)[0] ? ki_fetch_error(fetch) : json.error.text);
    }
    ki_fetch_close(fetch);
    free(buffer);
    free(url);
    return rc;
}

/* -- again and again --------------------------------------------------------------------------- */

struct known_peer {
    char *url;
    uint64_t id, revision;
    uint64_t again_ns; /* time at which its whole list is read again; 0: when it changes */
    bool failing;
};

struct ki_follow {
    struct ki_follow_opts opts;
    pthread_t thread;
    struct kv_wake wake;
    _Atomic int stop;
    struct known_peer *known; /* used by the thread only */
    size_t n_known;           /* at most KI_MAX_PEERS */
};

static struct known_peer *known_peer(struct ki_follow *f, const char *url)
{
    struct known_peer *grown;
    char *copy;

    for (size_t i = 0; i < f->n_known; i++)
        if (strcmp(f->known[i].url, url) == 0)
            return &f->known[i];
    grown = realloc(f->known, (f->n_known + 1) * sizeof(*grown));
    copy = strdup(url);
    if (grown)
        f->known = grown;
    if (!grown || !copy) {
        free(copy);
        return NULL;
    }
    f->known[f->n_known] = (struct known_peer){.url = copy};
    return &f->known[f->n_known++];
}

/* Forget the peers that are no longer listed, so that the others are at most KI_MAX_PEERS. */
static void forget_unlisted(struct ki_follow *f, char *const *urls, long n)
{
    size_t kept = 0;

    for (size_t i = 0; i < f->n_known; i++) {
        long at = 0;

        while (at < n && strcmp(urls[at], f->known[i].url) != 0)
            at++;
        if (at < n)
            f->known[kept++] = f->known[i];
        else
            free(f->known[i].url);
    }
    f->n_known = kept;
}

static void ask(struct ki_follow *f, const char *url, const char *token)
{
    struct known_peer *peer = known_peer(f, url);
    struct kv_error error = {0};
    char text[400];
    int rc;

    if (!peer)
        return;
    if (peer->again_ns && kv_now_ns() >= peer->again_ns)
        peer->id = peer->revision = peer->again_ns = 0;
    rc = ki_follow_ask(f->opts.registry, url, token, f->opts.ca_file, &f->stop, &peer->id,
                       &peer->revision, &error);
    if (rc < 0 && !peer->failing && !f->stop)
        kv_log_warn("peers", "a peer doesn't list its registrations; asking again",
                    "peer=%s error=%s", url, kv_log_quote(text, sizeof(text), error.text));
    else if (rc >= 0 && peer->failing)
        kv_log_info("peers", "a peer lists its registrations again", "peer=%s", url);
    peer->failing = rc < 0;
    if (rc > 0)
        peer->again_ns = kv_now_ns() + f->opts.again_ms * KV_NS_PER_MS;
}

static void ask_all(struct ki_follow *f)
{
    char *token = kh_auth_first_token(f->opts.auth);
    char **urls = NULL;
    long n = ki_peers_list(f->opts.peers, &urls);

    if (n >= 0)
        forget_unlisted(f, urls, n);
    for (long i = 0; i < n && !f->stop; i++)
        ask(f, urls[i], token);
    if (n >= 0)
        ki_peers_free(urls, n);
    if (token)
        explicit_bzero(token, strlen(token));
    free(token);
}

static void *run(void *arg)
{
    struct ki_follow *f = arg;

    while (!f->stop) {
        struct pollfd pfd = {.fd = f->wake.fd, .events = POLLIN};

        poll(&pfd, 1, (int)f->opts.interval_ms);
        if (f->stop)
            break;
        ask_all(f);
        ki_registry_forget_unfollowed(f->opts.registry, f->opts.age_ms * KV_NS_PER_MS);
    }
    return NULL;
}

static void follow_free(struct ki_follow *f)
{
    for (size_t i = 0; i < f->n_known; i++)
        free(f->known[i].url);
    free(f->known);
    kv_wake_close(&f->wake);
    free(f);
}

int ki_follow_create(const struct ki_follow_opts *opts, struct ki_follow **ret)
{
    struct ki_follow *f = calloc(1, sizeof(*f));
    int rc;

    if (!f)
        return -ENOMEM;
    f->opts = *opts;
    if (!f->opts.again_ms)
        f->opts.again_ms = AGAIN_MS;
    rc = kv_wake_open(&f->wake);
    if (rc == 0)
        rc = kv_thread_start(&f->thread, "ki-peers", run, f);
    if (rc < 0) {
        follow_free(f);
        return rc;
    }
    *ret = f;
    return 0;
}

void ki_follow_destroy(struct ki_follow *follow)
{
    if (!follow)
        return;
    follow->stop = 1;
    kv_wake_signal(&follow->wake);
    pthread_join(follow->thread, NULL);
    follow_free(follow);
}
