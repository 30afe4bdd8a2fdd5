// SPDX-License-Identifier: Apache-2.0
#include "advisor/follow.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/log.h"

struct kva_follow {
    const struct kva_options *options;
    struct kva_world *world;
    struct kvp_follow *follow;
    struct kvp_nats_secrets secrets;
    bool connected; /* of the ticking thread */
};

static bool on_heard(void *arg, const char *publisher, bool first)
{
    struct kva_follow *f = arg;

    (void)first;
    pthread_mutex_lock(&f->world->lock);
    kva_feed_heard(f->world->feed, publisher, kv_now_ns());
    pthread_mutex_unlock(&f->world->lock);
    return true;
}

static void on_reset(void *arg, const char *publisher)
{
    struct kva_follow *f = arg;

    pthread_mutex_lock(&f->world->lock);
    kva_feed_reset(f->world->feed, publisher);
    pthread_mutex_unlock(&f->world->lock);
}

/* The record counts as of now: publishers' clocks differ from this machine's. */
static void on_record(void *arg, const struct kvp_header *header, const struct kvp_record *record)
{
    struct kva_follow *f = arg;
    struct kvp_header now = *header;

    now.time_ns = kv_wall_ns();
    pthread_mutex_lock(&f->world->lock);
    kva_feed_take(f->world->feed, &now, record);
    pthread_mutex_unlock(&f->world->lock);
}

static void on_whole(void *arg, const char *publisher, bool whole)
{
    struct kva_follow *f = arg;

    pthread_mutex_lock(&f->world->lock);
    kva_feed_whole(f->world->feed, publisher, whole);
    pthread_mutex_unlock(&f->world->lock);
}

/* Write the subject of all publishers, or of those of one cluster. Returns false: too long a name. */
static bool write_subject(const char *cluster, char ret[KVP_MAX_SUBJECT + 8])
{
    char one[KVP_MAX_SUBJECT];

    if (!cluster) {
        strcpy(ret, "kvasir.*.*.*.*");
        return true;
    }
    if (kvp_subject(cluster, "m", "t", "w", one) < 0)
        return false;
    one[strlen(one) - strlen(".m.t.w")] = '\0';
    snprintf(ret, KVP_MAX_SUBJECT + 8, "%s.*.*.*", one);
    return true;
}

int kva_follow_open(const struct kva_options *options, struct kva_world *world,
                    struct kva_follow **ret, struct kv_error *error)
{
    static const struct kvp_follow_ops ops = {
        .heard = on_heard, .reset = on_reset, .record = on_record, .whole = on_whole};
    struct kva_follow *f = calloc(1, sizeof(*f));
    struct kvp_nats_opts server = KVP_NATS_OPTS_INIT;
    char subject[KVP_MAX_SUBJECT + 8];
    struct kvp_follow_opts opts = {.server = &server, .subject = subject};
    int rc;

    if (!f)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    rc = kvp_nats_args_read(&options->nats_args, &f->secrets, &server, error);
    if (rc == 0 && !write_subject(options->nats_cluster, subject))
        rc = kv_fail(error, -EINVAL, 0, "--nats-cluster: too long");
    if (rc == 0) {
        f->options = options;
        f->world = world;
        server.url = options->nats;
        server.name = "kv-advisor";
        rc = kvp_follow_open(&opts, &ops, f, &f->follow);
        if (rc < 0)
            kv_fail(error, rc, 0, "--nats: %s",
                    rc == -ENOTSUP ? "needs libkv_nats and libnats" : strerror(-rc));
    }
    if (rc < 0) {
        free(f);
        return rc;
    }
    *ret = f;
    return 0;
}

void kva_follow_close(struct kva_follow *follow)
{
    if (!follow)
        return;
    kvp_follow_close(follow->follow);
    explicit_bzero(&follow->secrets, sizeof(follow->secrets));
    free(follow);
}

void kva_follow_tick(struct kva_follow *f)
{
    uint64_t now_ns = kv_now_ns(), silence_ns = f->options->nats_silence_ms * KV_NS_PER_MS;
    char silent[KVP_MAX_SUBJECT];
    struct kvp_follow_stats stats;
    bool any = false;

    kvp_follow_get_stats(f->follow, &stats);
    pthread_mutex_lock(&f->world->lock);
    kva_feed_flush(f->world->feed);
    if (!stats.nats.connected || !f->connected) /* nobody is silent while the server is away */
        kva_feed_all_heard(f->world->feed, now_ns);
    else
        any = kva_feed_silent(f->world->feed, now_ns, silence_ns, silent);
    pthread_mutex_unlock(&f->world->lock);
    f->connected = stats.nats.connected;
    if (!any)
        return;
    kv_log_info("advisor", "a publisher is silent: what it told is forgotten", "subject=%s",
                silent);
    kvp_follow_forget(f->follow, silent);
}

void kva_follow_get_stats(struct kva_follow *follow, struct kvp_follow_stats *ret)
{
    kvp_follow_get_stats(follow->follow, ret);
}
