// SPDX-License-Identifier: Apache-2.0
#include "plane/etcd_lock.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/thread/thread.h"
#include "plane/etcd_auth.h"

enum { KEY_LEN = 320, NAME_LEN = 100, MAX_NOTES = 256, MAX_ANSWER = 4 << 20, MIN_TTL_S = 2 };
static const struct etcd_limits limits = {.key = KEY_LEN, .value = 8192};

/** Requests to the servers, one at a time. */
struct caller {
    const struct kvbm_http_abi *abi;
    const struct kvp_etcd_url *url;
    const struct kvp_etcd_auth *auth;
    struct kvbm_http *http;
    char token[512]; /* of the user's login; empty: none */
    size_t host;
    uint32_t timeout_ms;
    struct kv_buf body;
    bool ended;
    unsigned status;
};

struct kvp_etcd_lock {
    char *text; /* of the URL, which url and auth point into */
    struct kvp_etcd_url url;
    struct kvp_etcd_auth auth;
    char prefix[KEY_LEN], key[KEY_LEN];
    uint64_t ttl_ns;
    uint32_t ttl_s;
    struct caller own, notes; /* of the thread; of who notes */
    struct kv_wake wake;
    pthread_t thread;
    bool has_thread;
    _Atomic bool stop;
    pthread_mutex_t lock;     /* guards token and until_ns */
    uint64_t token, until_ns; /* by boot_ns */
    bool said;                /* a failure was logged, of the thread */
};

/* The clock of leases runs while the machine sleeps. */
static uint64_t boot_ns(void)
{
    struct timespec t;

    clock_gettime(CLOCK_BOOTTIME, &t);
    return (uint64_t)t.tv_sec * KV_NS_PER_S + (uint64_t)t.tv_nsec;
}

/* -- requests ---------------------------------------------------------------------------------- */

static bool on_data(void *arg, unsigned slot, const void *data, size_t len)
{
    struct caller *c = arg;

    (void)slot;
    kv_buf_append(&c->body, data, len);
    return !c->body.error;
}

static void on_end(void *arg, unsigned slot, unsigned status, const char *why)
{
    struct caller *c = arg;

    (void)slot;
    (void)why;
    c->ended = true;
    c->status = status;
}

static int caller_open(struct caller *c, const struct kvbm_http_abi *abi,
                       const struct kvp_etcd_url *url, const struct kvp_etcd_auth *auth,
                       uint32_t timeout_ms)
{
    const struct kvbm_http_opts opts = {.ca = auth->ca,
                                        .cert = auth->cert,
                                        .key = auth->key,
                                        .data = on_data,
                                        .end = on_end,
                                        .arg = c};

    *c = (struct caller){.abi = abi, .url = url, .auth = auth, .timeout_ms = timeout_ms};
    return abi->open(&opts, &c->http);
}

static void caller_close(struct caller *c)
{
    if (c->http)
        c->abi->close(c->http);
    kv_buf_fini(&c->body);
}

/* Send a request once, and read the answer. Returns 0 or an error. */
static int send_once(struct caller *c, const char *path, const struct kv_buf *request,
                     struct etcd_answer *ret, etcd_key_fn fn, void *arg)
{
    uint64_t deadline = kv_now_ns() + (c->timeout_ms + 500) * KV_NS_PER_MS;
    char url[512];
    struct kvbm_http_post p = {.url = url,
                               .authorization = *c->token ? c->token : NULL,
                               .body = request->data,
                               .len = request->len,
                               .connect_ms = c->timeout_ms,
                               .timeout_ms = c->timeout_ms};
    int rc = request->error;

    *ret = (struct etcd_answer){0};
    snprintf(url, sizeof(url), "%s/v3/%s", c->url->hosts[c->host], path);
    kv_buf_clear(&c->body);
    c->body.limit = MAX_ANSWER;
    c->ended = false;
    c->status = 0;
    if (rc == 0)
        rc = c->abi->post(c->http, 0, &p);
    while (rc == 0 && !c->ended && kv_now_ns() < deadline)
        c->abi->poll(c->http, -1, 50);
    c->abi->cancel(c->http, 0);
    if (rc == 0 && (!c->ended || c->status != 200 || c->body.error ||
                    etcd_read(c->body.data, c->body.len, &limits, ret, fn, arg) < 0 || *ret->error))
        rc = -EIO;
    return rc;
}

/* Log in, where a user is given: its token comes with all requests from here on. */
static int login(struct caller *c)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer;
    int rc;

    *c->token = '\0';
    if (!c->auth->user)
        return 0;
    etcd_write_login(&request, c->auth->user, c->auth->password);
    rc = send_once(c, "auth/authenticate", &request, &answer, NULL, NULL);
    if (rc == 0 && (!*answer.token || strpbrk(answer.token, "\r\n")))
        rc = -EIO;
    if (rc == 0)
        snprintf(c->token, sizeof(c->token), "%s", answer.token);
    kv_buf_fini(&request);
    return rc;
}

/*
 * Send a request, free it, and read the answer. A token that the server refuses is as good as none: they expire.
 * Returns 0; -EIO: the next request goes to the next server.
 */
static int call(struct caller *c, const char *path, struct kv_buf *request, struct etcd_answer *ret,
                etcd_key_fn fn, void *arg)
{
    bool had = *c->token;
    int rc = had ? 0 : login(c);

    if (rc == 0)
        rc = send_once(c, path, request, ret, fn, arg);
    if (rc && had && c->status && c->status != 200) {
        rc = login(c);
        if (rc == 0)
            rc = send_once(c, path, request, ret, fn, arg);
    }
    kv_buf_fini(request);
    if (rc)
        c->host = (c->host + 1) % c->url->n_hosts;
    return rc ? -EIO : 0;
}

/* -- the lock ---------------------------------------------------------------------------------- */

static void believe(struct kvp_etcd_lock *lock, uint64_t token, uint64_t asked_ns)
{
    /* a tenth of the lease for clocks that run at other speeds */
    pthread_mutex_lock(&lock->lock);
    lock->until_ns = asked_ns + lock->ttl_ns - lock->ttl_ns / 10;
    lock->token = token;
    pthread_mutex_unlock(&lock->lock);
}

uint64_t kvp_etcd_lock_token(struct kvp_etcd_lock *lock)
{
    uint64_t token;

    pthread_mutex_lock(&lock->lock);
    token = lock->token && boot_ns() < lock->until_ns ? lock->token : 0;
    pthread_mutex_unlock(&lock->lock);
    return token;
}

static bool stopped(const struct kvp_etcd_lock *lock)
{
    return atomic_load(&lock->stop);
}

static void pause_ns(struct kvp_etcd_lock *lock, uint64_t ns)
{
    uint64_t until = kv_now_ns() + ns, now;

    while (!stopped(lock) && (now = kv_now_ns()) < until)
        lock->own.abi->poll(lock->own.http, lock->wake.fd,
                            (uint32_t)((until - now) / KV_NS_PER_MS + 1));
}

static void say(struct kvp_etcd_lock *lock, int rc)
{
    if (rc < 0 && !lock->said)
        kv_log_warn("etcd", "the lock's server doesn't answer", "key=%s", lock->key);
    lock->said = rc < 0;
}

static void give_back(struct kvp_etcd_lock *lock, uint64_t lease)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer;

    etcd_write_lease(&request, lease);
    (void)call(&lock->own, "lease/revoke", &request, &answer, NULL, NULL);
}

/*
 * Ask for the lock once, by a lease of its own: after an answer that was lost nobody has the lock once that lease
 * is over. Returns the token with *@ret_lease; 0: another one has it, or no answer.
 */
static uint64_t acquire(struct kvp_etcd_lock *lock, uint64_t *ret_lease)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer lease, answer;
    uint64_t asked_ns = boot_ns();
    int rc;

    etcd_write_grant(&request, lock->ttl_s);
    rc = call(&lock->own, "lease/grant", &request, &lease, NULL, NULL);
    say(lock, rc);
    if (rc < 0 || !lease.id)
        return 0;
    etcd_write_put_if(&request, lock->key, 0, lock->key, "", 0, lease.id);
    rc = call(&lock->own, "kv/txn", &request, &answer, NULL, NULL);
    if (rc < 0 || !answer.succeeded || !answer.revision) {
        give_back(lock, lease.id);
        return 0;
    }
    *ret_lease = lease.id;
    believe(lock, answer.revision, asked_ns);
    return answer.revision;
}

/* Keep the lease alive, and look whether the key is still there. Returns 0; -ESTALE: lost; -EIO. */
static int keep(struct kvp_etcd_lock *lock, uint64_t token, uint64_t lease)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer;
    uint64_t asked_ns = boot_ns();
    int rc;

    etcd_write_lease(&request, lease);
    rc = call(&lock->own, "lease/keepalive", &request, &answer, NULL, NULL);
    if (rc == 0 && !answer.ttl)
        return -ESTALE;
    etcd_write_put_if(&request, lock->key, token, NULL, NULL, 0, 0);
    if (rc == 0)
        rc = call(&lock->own, "kv/txn", &request, &answer, NULL, NULL);
    else
        kv_buf_fini(&request);
    if (rc == 0 && !answer.succeeded)
        return -ESTALE;
    if (rc == 0)
        believe(lock, token, asked_ns);
    say(lock, rc);
    return rc;
}

static void *hold(void *arg)
{
    struct kvp_etcd_lock *lock = arg;
    uint64_t third = lock->ttl_ns / 3, lease = 0, token;

    while (!stopped(lock)) {
        token = acquire(lock, &lease);
        if (!token) {
            pause_ns(lock, third);
            continue;
        }
        do {
            pause_ns(lock, third);
        } while (!stopped(lock) && keep(lock, token, lease) != -ESTALE &&
                 kvp_etcd_lock_token(lock) == token);
        believe(lock, 0, 0);
        give_back(lock, lease);
    }
    return NULL;
}

/* -- notes ------------------------------------------------------------------------------------- */

static void name_note(const struct kvp_etcd_lock *lock, uint64_t token, char ret[KEY_LEN])
{
    snprintf(ret, KEY_LEN, "%.260s/notes/%020" PRIu64, lock->prefix, token);
}

int kvp_etcd_lock_note(struct kvp_etcd_lock *lock, uint64_t token, const void *data, size_t len)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer;
    char key[KEY_LEN];
    int rc;

    name_note(lock, token, key);
    etcd_write_put_if(&request, lock->key, token, key, data, len, 0);
    rc = call(&lock->notes, "kv/txn", &request, &answer, NULL, NULL);
    return rc < 0 ? rc : answer.succeeded ? 0 : -ESTALE;
}

int kvp_etcd_lock_unnote(struct kvp_etcd_lock *lock, uint64_t token)
{
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer;
    char key[KEY_LEN];

    name_note(lock, token, key);
    etcd_write_delete(&request, key);
    return call(&lock->notes, "kv/deleterange", &request, &answer, NULL, NULL);
}

struct reading {
    size_t skip; /* bytes of the keys before the token */
    kvp_etcd_note_fn fn;
    void *arg;
};

static void take_note(void *arg, struct kv_str key, struct kv_str value, bool deleted)
{
    const struct reading *r = arg;
    char digits[24] = "";

    if (deleted || key.len <= r->skip || key.len - r->skip >= sizeof(digits))
        return;
    memcpy(digits, key.p + r->skip, key.len - r->skip);
    r->fn(r->arg, strtoull(digits, NULL, 10), value.p, value.len);
}

int kvp_etcd_lock_notes(struct kvp_etcd_lock *lock, kvp_etcd_note_fn fn, void *arg)
{
    struct reading r = {.fn = fn, .arg = arg};
    struct kv_buf request = KV_BUF_INIT;
    struct etcd_answer answer;
    char prefix[ETCD_MAX_PREFIX + 1];
    int rc;

    r.skip = (size_t)snprintf(prefix, sizeof(prefix), "%.240s/notes/", lock->prefix);
    etcd_write_range(&request, prefix, MAX_NOTES);
    rc = call(&lock->notes, "kv/range", &request, &answer, take_note, &r);
    return rc < 0 ? rc : answer.more ? -EIO : 0;
}

/* -- life -------------------------------------------------------------------------------------- */

static int name_keys(struct kvp_etcd_lock *lock, const struct kvp_etcd_lock_opts *o,
                     struct kv_error *error)
{
    const char *name = lock->url.path[0] == '/' && lock->url.path[1] ? lock->url.path + 1 : o->name;

    if (strlen(o->prefix) > NAME_LEN || strlen(name) > NAME_LEN || strchr(name, '/'))
        return kv_fail(error, -EINVAL, 0, "a lock's name is at most 100 bytes without a slash");
    snprintf(lock->prefix, sizeof(lock->prefix), "%s/%s", o->prefix, name);
    snprintf(lock->key, sizeof(lock->key), "%.260s/lock", lock->prefix);
    return 0;
}

static int open_parts(struct kvp_etcd_lock *lock, const struct kvp_etcd_lock_opts *o,
                      struct kv_error *error)
{
    const struct kvbm_http_abi *http;
    const char *why = "out of memory";
    uint32_t timeout_ms = o->ttl_s * 1000 / 6;
    int rc;

    lock->text = strdup(o->url);
    if (!lock->text)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    rc = kvp_etcd_auth_cut(lock->text, &lock->auth, error);
    rc = rc < 0 ? rc : kvp_etcd_auth_open(&lock->auth, error);
    if (rc < 0)
        return rc;
    rc = kvp_etcd_url_parse(lock->text, &lock->url, &why);
    if (rc < 0)
        return kv_fail(error, rc, 0, "%s", why);
    if (o->ttl_s < MIN_TTL_S)
        return kv_fail(error, -EINVAL, 0, "a lease lasts 2 s at least");
    rc = name_keys(lock, o, error);
    if (rc < 0)
        return rc;
    http = kvbm_http_load();
    if (!http)
        return kv_fail(error, -ENOTSUP, 0, "etcd needs libkvbm_http");
    lock->ttl_s = o->ttl_s;
    lock->ttl_ns = o->ttl_s * KV_NS_PER_S;
    rc = caller_open(&lock->own, http, &lock->url, &lock->auth, timeout_ms);
    if (rc == 0)
        rc = caller_open(&lock->notes, http, &lock->url, &lock->auth, timeout_ms);
    if (rc == 0)
        rc = kv_wake_open(&lock->wake);
    if (rc == 0)
        rc = kv_thread_start(&lock->thread, "kvp-lock", hold, lock);
    lock->has_thread = rc == 0;
    return rc < 0 ? kv_fail(error, rc, 0, "can't start: %s", strerror(-rc)) : 0;
}

int kvp_etcd_lock_open(const struct kvp_etcd_lock_opts *opts, struct kvp_etcd_lock **ret,
                       struct kv_error *error)
{
    struct kvp_etcd_lock *lock = calloc(1, sizeof(*lock));
    int rc;

    if (!lock)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    lock->wake.fd = -1;
    pthread_mutex_init(&lock->lock, NULL);
    rc = open_parts(lock, opts, error);
    if (rc < 0)
        kvp_etcd_lock_close(lock);
    else
        *ret = lock;
    return rc;
}

void kvp_etcd_lock_close(struct kvp_etcd_lock *lock)
{
    if (!lock)
        return;
    atomic_store(&lock->stop, true);
    if (lock->has_thread) {
        kv_wake_signal(&lock->wake);
        pthread_join(lock->thread, NULL);
    }
    if (lock->wake.fd >= 0)
        kv_wake_close(&lock->wake);
    caller_close(&lock->own);
    caller_close(&lock->notes);
    kvp_etcd_url_fini(&lock->url);
    kvp_etcd_auth_fini(&lock->auth);
    free(lock->text);
    pthread_mutex_destroy(&lock->lock);
    free(lock);
}
