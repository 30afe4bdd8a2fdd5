// SPDX-License-Identifier: Apache-2.0
/*
 * A client of etcd, by its JSON gateway. The caller's thread does, with one server at a time:
 *
 *   settle   log in; put the records under a lease (keep the one that lives); look at all keys of the
 *            prefix; watch from the revision of that look
 *   live     every third of the lease: keep it alive (or ask for something small); tell what the
 *            watch tells
 *
 * A failure (of a request, the watch, a deadline, or an answer that makes no sense) ends both and
 * starts them anew: with the next server, and after a pause once all have failed. Every start looks
 * at all keys, so a watch never continues across a gap, and compaction of the revisions between loses
 * nothing.
 */
#include "plane/etcd.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "plane/etcd_wire.h"

#define MAX_MESSAGE (8u << 20) /* bytes of a watch's message */
#define MIN_PAUSE_MS 100
#define MAX_PAUSE_MS 2000
#define STEADY_MS 5000 /* after so long a failure is a new one */
#define LOOK_MS 300000 /* a watch that says nothing may have been forgotten by its server */
#define GOODBYE_MS 1000

enum { CALL, WATCH }; /* slots */
enum watch { WATCH_OVER, WATCH_ASKED, WATCH_ON };

struct etcd {
    const struct kvp_etcd_opts *o;
    struct kvbm_http *http;
    size_t host; /* index of the server in use */
    char token[512];
    uint64_t lease; /* 0: none */
    bool closing;
    /* the last look, and the watch since */
    uint32_t there; /* bit per record that the server has */
    enum watch watch;
    struct kv_buf message;
    /* the request under way */
    struct kv_buf body;
    bool ended;
    unsigned status;
    char why[128];
};

static bool stopped(const struct etcd *e)
{
    return atomic_load_explicit(e->o->stop, memory_order_acquire);
}

static int fail(struct etcd *e, const char *what, const char *why)
{
    if (!stopped(e))
        e->o->failed(e->o->arg, what, why);
    return -EIO;
}

/* ---- what the client calls ---- */

/* Return the bit of the record @key; 0: it is none. */
static uint32_t bit_of(const struct etcd *e, struct kv_str key)
{
    for (size_t i = 0; i < e->o->n_records; i++)
        if (kv_str_eq(key, e->o->records[i].key))
            return 1u << i;
    return 0;
}

/* Tell what a look or the watch says about a key. */
static void on_key(void *arg, struct kv_str key, struct kv_str value, bool deleted)
{
    struct etcd *e = arg;
    uint32_t bit = bit_of(e, key);

    e->there = deleted ? e->there & ~bit : e->there | bit;
    if (!bit && key.len > strlen(e->o->prefix) &&
        memcmp(key.p, e->o->prefix, strlen(e->o->prefix)) == 0)
        e->o->key(e->o->arg, key, value, deleted);
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
    int err = etcd_read(json, len, &e->o->limits, &answer, on_key, e);

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
    uint32_t third = e->o->ttl_s * 1000 / 3;

    return e->closing ? GOODBYE_MS : KV_MIN(e->o->timeout_ms, third);
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

    snprintf(url, sizeof(url), "%s/v3/%s", e->o->hosts[e->host], path);
    if (err == 0)
        err = e->o->http->post(e->http, slot, &p);
    kv_buf_fini(request);
    return err < 0 ? fail(e, path, "no memory") : 0;
}

/* Send a request, free it, and wait for the answer. Its keys are told when @keys. */
static int call(struct etcd *e, const char *path, struct kv_buf *request, struct etcd_answer *ret,
                bool keys)
{
    uint64_t deadline = kv_now_ns() + (timeout_ms(e) + 500) * KV_NS_PER_MS;
    char text[32];
    int err;

    kv_buf_clear(&e->body);
    e->body.limit = e->o->max_answer;
    e->ended = false;
    err = post(e, CALL, path, request);
    while (err == 0 && !e->ended && (!stopped(e) || e->closing) && kv_now_ns() < deadline)
        e->o->http->poll(e->http, e->closing ? -1 : e->o->wake_fd, 50);
    if (err < 0)
        return err;
    e->o->http->cancel(e->http, CALL);
    if (!e->ended)
        return fail(e, path, "no answer in time");
    if (e->body.error)
        return fail(e, path, "an answer beyond the limit");
    if (!e->status)
        return fail(e, path, e->why);
    err = etcd_read(e->body.data, e->body.len, &e->o->limits, ret, keys ? on_key : NULL, e);
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
    if (!e->o->user)
        return 0;
    etcd_write_login(&request, e->o->user, e->o->password);
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

/* Put the records under a lease that lives. */
static int enter(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};
    int err = 0;

    if (e->lease)
        err = keep_alive(e);
    if (err == 0 && !e->lease) {
        etcd_write_grant(&request, e->o->ttl_s);
        err = call(e, "lease/grant", &request, &answer, false);
        if (err == 0 && !answer.id)
            err = fail(e, "lease/grant", "no lease");
        if (err == 0)
            e->lease = answer.id;
    }
    for (size_t i = 0; i < e->o->n_records && err == 0; i++) {
        const struct kvp_etcd_record *record = &e->o->records[i];

        etcd_write_put(&request, record->key, record->value, record->len, e->lease);
        err = call(e, "kv/put", &request, &answer, false);
    }
    return err;
}

static int wait_for_watch(struct etcd *e)
{
    uint64_t deadline = kv_now_ns() + timeout_ms(e) * KV_NS_PER_MS;

    while (e->watch == WATCH_ASKED && !stopped(e) && kv_now_ns() < deadline)
        e->o->http->poll(e->http, e->o->wake_fd, 50);
    if (e->watch == WATCH_ON)
        return 0;
    return e->watch == WATCH_ASKED ? fail(e, "watch", "no answer in time") : -EIO;
}

/* Look at all keys, and watch from there on. */
static int look(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};
    int err;

    e->o->http->cancel(e->http, WATCH);
    kv_buf_clear(&e->message);
    e->there = 0;
    e->o->look(e->o->arg, true);
    /* the records, and one to know that there are too many */
    etcd_write_range(&request, e->o->prefix, e->o->max_keys + (uint32_t)e->o->n_records + 1);
    err = call(e, "kv/range", &request, &answer, true);
    if (err < 0)
        return err;
    e->o->look(e->o->arg, false);
    etcd_write_watch(&request, e->o->prefix, answer.revision + 1);
    e->watch = WATCH_ASKED;
    err = post(e, WATCH, "watch", &request);
    return err < 0 ? err : wait_for_watch(e);
}

static int settle(struct etcd *e)
{
    int err = login(e);

    if (err == 0 && e->o->n_records)
        err = enter(e);
    return err < 0 || !e->o->prefix ? err : look(e);
}

/* Show that this client and the server live. Without a watch nothing tells that a record was removed. */
static int tick(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};
    int err;

    if (!e->o->n_records) {
        etcd_write_range(&request, e->o->prefix, 1);
        return call(e, "kv/range", &request, &answer, false);
    }
    if (!e->o->prefix)
        return enter(e);
    err = keep_alive(e);
    return err == 0 && !e->lease ? enter(e) : err;
}

static void publish(struct etcd *e, bool current)
{
    e->o->state(e->o->arg, current);
}

/* Return true when the server has lost a record. */
static bool lacks_record(const struct etcd *e)
{
    return e->o->prefix && e->there != (1u << e->o->n_records) - 1;
}

/* Stay with a server until something fails. */
static void live(struct etcd *e)
{
    uint64_t third = e->o->ttl_s * KV_NS_PER_S / 3, now = kv_now_ns();
    uint64_t tick_at = now + third, look_at = now + LOOK_MS * KV_NS_PER_MS;
    int err = 0;

    while (err == 0 && !stopped(e)) {
        publish(e, true);
        now = kv_now_ns();
        if (now < tick_at)
            e->o->http->poll(e->http, e->o->wake_fd,
                             (uint32_t)((tick_at - now) / KV_NS_PER_MS + 1));
        if (e->o->prefix && e->watch != WATCH_ON)
            return;
        now = kv_now_ns();
        if (now >= tick_at) {
            err = tick(e);
            tick_at = now + third;
        }
        if (err == 0 && lacks_record(e)) { /* somebody has removed it */
            e->there = (1u << e->o->n_records) - 1;
            err = enter(e);
        }
        if (err == 0 && e->o->prefix && (now >= look_at || e->o->wants_look(e->o->arg))) {
            err = look(e);
            look_at = now + LOOK_MS * KV_NS_PER_MS;
        }
    }
}

/* Wait, but not longer than until the stop. */
static void pause_ms(struct etcd *e, uint64_t ms)
{
    uint64_t deadline = kv_now_ns() + ms * KV_NS_PER_MS, now;

    while ((now = kv_now_ns()) < deadline && !stopped(e))
        e->o->http->poll(e->http, e->o->wake_fd, (uint32_t)((deadline - now) / KV_NS_PER_MS + 1));
}

static void leave(struct etcd *e)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer = {0};

    e->closing = true;
    e->o->http->cancel(e->http, WATCH);
    if (!e->lease)
        return;
    etcd_write_lease(&request, e->lease);
    (void)call(e, "lease/revoke", &request, &answer, false);
}

void kvp_etcd_run(const struct kvp_etcd_opts *o)
{
    struct etcd e = {.o = o};
    struct kvbm_http_opts opts = {.ca = o->tls_ca,
                                  .cert = o->tls_cert,
                                  .key = o->tls_key,
                                  .data = on_data,
                                  .end = on_end,
                                  .arg = &e};
    uint64_t ms = MIN_PAUSE_MS;
    size_t failed = 0; /* servers, one after the other */

    if (o->http->open(&opts, &e.http) < 0) {
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
        e.host = (e.host + 1) % o->n_hosts;
        if (++failed % o->n_hosts == 0) {
            pause_ms(&e, ms);
            ms = KV_MIN(ms * 2, (uint64_t)MAX_PAUSE_MS);
        }
    }
    leave(&e);
    o->http->close(e.http);
    kv_buf_fini(&e.body);
    kv_buf_fini(&e.message);
}
