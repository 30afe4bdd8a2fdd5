// SPDX-License-Identifier: Apache-2.0
/*
 * A directory in etcd, by its JSON gateway. The directory's thread does, with one server at a time:
 *
 *   settle   log in; register under a lease (keep the one that lives); look at all peers; watch from
 *            the revision of that look
 *   live     every third of the lease: keep it alive (or ask for something small); apply what the
 *            watch tells
 *
 * A failure (of a request, the watch, a deadline, or an answer that makes no sense) ends both and
 * starts them anew: with the next server, and after a pause once all have failed. Every start looks at all peers, so a watch never
 * continues across a gap, and compaction of the revisions between loses nothing.
 */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/core/log.h"
#include "peer/directory/etcd_wire.h"
#include "peer/module/http_abi.h"

#define MAX_MESSAGE (8u << 20) /* bytes of a watch's message */
#define MIN_PAUSE_MS 100
#define MAX_PAUSE_MS 2000
#define STEADY_MS 5000 /* after so long a failure is a new one */
#define LOOK_MS 300000 /* a watch that says nothing may have been forgotten by its server */
#define GOODBYE_MS 1000

enum { CALL, WATCH }; /* slots */
enum watch { WATCH_OVER, WATCH_ASKED, WATCH_ON };

struct etcd {
    struct kvbm_directory *d;
    struct kvbm_http *http;
    size_t host; /* index of the server in use */
    char token[512];
    char key[KVBM_MAX_PEER_KEY + 1]; /* this agent's; "": not to be registered */
    uint64_t lease;                  /* 0: none */
    bool closing;
    /* the last look, and the watch since */
    bool self_there;
    enum watch watch;
    uint64_t left_out;
    struct kv_buf message;
    /* the request under way */
    struct kv_buf body;
    bool ended;
    unsigned status;
    char why[128];
};

static bool stopped(const struct etcd *e)
{
    return atomic_load_explicit(&e->d->stop, memory_order_acquire);
}

static int fail(struct etcd *e, const char *what, const char *why)
{
    if (!stopped(e))
        directory_failed(e->d, what, why);
    return -EIO;
}

/* ---- what the client calls ---- */

/* Apply what a look or the watch says about a key. */
static void on_peer(void *arg, const char *key, const struct kvbm_directory_peer *peer,
                    bool deleted)
{
    struct etcd *e = arg;

    if (strcmp(key, e->key) == 0) {
        e->self_there = !deleted;
        return;
    }
    if (peer) {
        (void)peer_list_put(&e->d->peers, key, peer); /* counts those that don't fit */
        return;
    }
    e->left_out += !deleted;
    peer_list_remove(&e->d->peers, key);
}

static bool end_watch(struct etcd *e, const char *why)
{
    e->watch = WATCH_OVER;
    fail(e, "watch", why);
    return false;
}

/* Apply a message of the watch. Returns false when the watch is over. */
static bool on_message(struct etcd *e, const char *json, size_t len)
{
    struct etcd_answer answer;
    int err = etcd_read(json, len, e->d->etcd.prefix, &answer, on_peer, e);

    if (err < 0)
        return end_watch(e, "an answer that makes no sense");
    if (answer.canceled || *answer.error)
        return end_watch(e, *answer.error ? answer.error : "cancelled by the server");
    if (answer.created)
        e->watch = WATCH_ON;
    return true;
}

static bool on_watch(struct etcd *e, const char *data, size_t len)
{
    while (len) {
        const char *newline = memchr(data, '\n', len);
        size_t n = newline ? (size_t)(newline - data) : len;
        bool ok;

        e->message.limit = MAX_MESSAGE;
        kv_buf_append(&e->message, data, n);
        if (e->message.error)
            return end_watch(e, "a message beyond the limit");
        if (!newline)
            return true;
        ok = !e->message.len || on_message(e, e->message.data, e->message.len);
        kv_buf_clear(&e->message);
        if (!ok)
            return false;
        data += n + 1;
        len -= n + 1;
    }
    return true;
}

static bool on_data(void *arg, unsigned slot, const void *data, size_t len)
{
    struct etcd *e = arg;

    if (slot == WATCH)
        return on_watch(e, data, len);
    kv_buf_append(&e->body, data, len);
    return !e->body.error;
}

static void on_end(void *arg, unsigned slot, unsigned status, const char *why)
{
    struct etcd *e = arg;

    if (slot == WATCH) {
        if (e->watch != WATCH_OVER)
            end_watch(e, status ? "ended by the server" : why);
        return;
    }
    e->ended = true;
    e->status = status;
    snprintf(e->why, sizeof(e->why), "%s", why);
}

/* ---- requests ---- */

static uint32_t timeout_ms(const struct etcd *e)
{
    uint32_t third = e->d->etcd.ttl_s * 1000 / 3;

    return e->closing ? GOODBYE_MS : KV_MIN(e->d->etcd.timeout_ms, third);
}

static int post(struct etcd *e, unsigned slot, const char *path, struct kv_buf *request)
{
    char url[512];
    struct kvbm_http_post p = {.url = url,
                               .authorization = *e->token ? e->token : NULL,
                               .body = request->data,
                               .len = request->len,
                               .connect_ms = timeout_ms(e),
                               .timeout_ms = slot == WATCH ? 0 : timeout_ms(e)};
    int err = request->error;

    snprintf(url, sizeof(url), "%s/v3/%s", e->d->etcd.hosts[e->host], path);
    if (err == 0)
        err = e->d->etcd.http->post(e->http, slot, &p);
    kv_buf_fini(request);
    return err < 0 ? fail(e, path, "no memory") : 0;
}

/* Send a request, free it, and wait for the answer. Peers in it go to on_peer when @peers. */
static int call(struct etcd *e, const char *path, struct kv_buf *request, struct etcd_answer *ret,
                bool peers)
{
    uint64_t deadline = kv_now_ns() + (timeout_ms(e) + 500) * KV_NS_PER_MS;
    char text[32];
    int err;

    kv_buf_clear(&e->body);
    e->body.limit = (size_t)e->d->peers.max * (2 * ETCD_MAX_VALUE) + 65536;
    e->ended = false;
    err = post(e, CALL, path, request);
    while (err == 0 && !e->ended && (!stopped(e) || e->closing) && kv_now_ns() < deadline)
        e->d->etcd.http->poll(e->http, e->closing ? -1 : e->d->wake.fd, 50);
    if (err < 0)
        return err;
    e->d->etcd.http->cancel(e->http, CALL);
    if (!e->ended)
        return fail(e, path, "no answer in time");
    if (e->body.error)
        return fail(e, path, "an answer beyond the limit");
    if (!e->status)
        return fail(e, path, e->why);
    err = etcd_read(e->body.data, e->body.len, e->d->etcd.prefix, ret, peers ? on_peer : NULL, e);
    if (err == 0 && *ret->error)
        return fail(e, path, ret->error);
    snprintf(text, sizeof(text), "HTTP status %u", e->status);
    if (e->status != 200)
        return fail(e, path, text);
    return err < 0 ? fail(e, path, "an answer that makes no sense") : 0;
}

static int login(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};
    int err;

    *e->token = '\0';
    if (!e->d->etcd.user)
        return 0;
    etcd_write_login(&request, e->d->etcd.user, e->d->etcd.password);
    err = call(e, "auth/authenticate", &request, &answer, false);
    if (err == 0 && (!*answer.token || strpbrk(answer.token, "\r\n")))
        err = fail(e, "auth/authenticate", "no token");
    if (err == 0)
        snprintf(e->token, sizeof(e->token), "%s", answer.token);
    return err;
}

/* Keep the lease alive. It becomes 0 when the server doesn't know it any more. */
static int keep_alive(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};
    int err;

    etcd_write_lease(&request, e->lease);
    err = call(e, "lease/keepalive", &request, &answer, false);
    if (err == 0 && !answer.ttl)
        e->lease = 0;
    return err;
}

/* Put this agent under a lease that lives. */
static int enter(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};
    int err = 0;

    if (e->lease)
        err = keep_alive(e);
    if (err == 0 && !e->lease) {
        etcd_write_grant(&request, e->d->etcd.ttl_s);
        err = call(e, "lease/grant", &request, &answer, false);
        if (err == 0 && !answer.id)
            err = fail(e, "lease/grant", "no lease");
        if (err == 0)
            e->lease = answer.id;
    }
    if (err == 0) {
        etcd_write_put(&request, e->d->etcd.prefix, &e->d->self, e->lease);
        err = call(e, "kv/put", &request, &answer, false);
    }
    return err;
}

static int wait_for_watch(struct etcd *e)
{
    uint64_t deadline = kv_now_ns() + timeout_ms(e) * KV_NS_PER_MS;

    while (e->watch == WATCH_ASKED && !stopped(e) && kv_now_ns() < deadline)
        e->d->etcd.http->poll(e->http, e->d->wake.fd, 50);
    if (e->watch == WATCH_ON)
        return 0;
    return e->watch == WATCH_ASKED ? fail(e, "watch", "no answer in time") : -EIO;
}

/* Look at all peers, and watch from there on. */
static int look(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};
    int err;

    e->d->etcd.http->cancel(e->http, WATCH);
    kv_buf_clear(&e->message);
    e->self_there = false;
    e->left_out = 0;
    peer_list_begin(&e->d->peers);
    /* one for this agent, and one to know that there are too many */
    etcd_write_range(&request, e->d->etcd.prefix, (uint32_t)e->d->peers.max + 2);
    err = call(e, "kv/range", &request, &answer, true);
    if (err < 0)
        return err;
    peer_list_end(&e->d->peers);
    etcd_write_watch(&request, e->d->etcd.prefix, answer.revision + 1);
    e->watch = WATCH_ASKED;
    err = post(e, WATCH, "watch", &request);
    return err < 0 ? err : wait_for_watch(e);
}

static int settle(struct etcd *e)
{
    int err = login(e);

    if (err == 0 && *e->key)
        err = enter(e);
    return err < 0 ? err : look(e);
}

/* Show that this client and the server live. */
static int tick(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};
    int err;

    if (!*e->key) {
        etcd_write_range(&request, e->d->etcd.prefix, 1);
        return call(e, "kv/range", &request, &answer, false);
    }
    err = keep_alive(e);
    return err == 0 && !e->lease ? enter(e) : err;
}

static void publish(struct etcd *e, bool current)
{
    directory_is(e->d, current, current && *e->key, e->d->peers.left_out + e->left_out);
}

/* True when peers were left out for want of room, and others have gone since. */
static bool has_room(const struct etcd *e)
{
    return e->d->peers.left_out && e->d->peers.n < e->d->peers.max;
}

/* Stay with a server until something fails. */
static void live(struct etcd *e)
{
    uint64_t third = e->d->etcd.ttl_s * KV_NS_PER_S / 3, now = kv_now_ns();
    uint64_t tick_at = now + third, look_at = now + LOOK_MS * KV_NS_PER_MS;
    int err = 0;

    while (err == 0 && !stopped(e)) {
        publish(e, true);
        now = kv_now_ns();
        if (now < tick_at)
            e->d->etcd.http->poll(e->http, e->d->wake.fd,
                                  (uint32_t)((tick_at - now) / KV_NS_PER_MS + 1));
        if (e->watch != WATCH_ON)
            return;
        now = kv_now_ns();
        if (now >= tick_at) {
            err = tick(e);
            tick_at = now + third;
        }
        if (err == 0 && *e->key && !e->self_there) { /* somebody has removed it */
            e->self_there = true;
            err = enter(e);
        }
        if (err == 0 && (now >= look_at || has_room(e))) {
            err = look(e);
            look_at = now + LOOK_MS * KV_NS_PER_MS;
        }
    }
}

/* Wait, but not longer than until the directory is closed. */
static void pause_ms(struct etcd *e, uint64_t ms)
{
    uint64_t deadline = kv_now_ns() + ms * KV_NS_PER_MS, now;

    while ((now = kv_now_ns()) < deadline && !stopped(e))
        e->d->etcd.http->poll(e->http, e->d->wake.fd,
                              (uint32_t)((deadline - now) / KV_NS_PER_MS + 1));
}

static void leave(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};

    e->closing = true;
    e->d->etcd.http->cancel(e->http, WATCH);
    if (!e->lease)
        return;
    etcd_write_lease(&request, e->lease);
    (void)call(e, "lease/revoke", &request, &answer, false);
}

void etcd_run(struct kvbm_directory *d)
{
    struct etcd e = {.d = d};
    struct kvbm_http_opts opts = {.ca = d->etcd.tls_ca,
                                  .cert = d->etcd.tls_cert,
                                  .key = d->etcd.tls_key,
                                  .data = on_data,
                                  .end = on_end,
                                  .arg = &e};
    uint64_t ms = MIN_PAUSE_MS;
    size_t failed = 0; /* servers, one after the other */

    if (d->has_self)
        etcd_key(&d->self, e.key);
    if (d->etcd.http->open(&opts, &e.http) < 0) {
        fail(&e, "libkvbm_http", "no memory");
        return;
    }
    while (!stopped(&e)) {
        uint64_t began = kv_now_ns();

        if (settle(&e) == 0)
            live(&e);
        publish(&e, false);
        if (stopped(&e))
            break; /* the lease is given back to the same server */
        if (kv_now_ns() - began > STEADY_MS * KV_NS_PER_MS)
            ms = MIN_PAUSE_MS;
        e.host = (e.host + 1) % d->etcd.n_hosts;
        if (++failed % d->etcd.n_hosts == 0) {
            pause_ms(&e, ms);
            ms = KV_MIN(ms * 2, (uint64_t)MAX_PAUSE_MS);
        }
    }
    leave(&e);
    d->etcd.http->close(e.http);
    kv_buf_fini(&e.body);
    kv_buf_fini(&e.message);
}
