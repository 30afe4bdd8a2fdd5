// SPDX-License-Identifier: Apache-2.0
/* Follow the bookings of the service's peers: a thread for each, and one that watches their list. */
#include "selector/peers.h"

#include <errno.h>
#include <inttypes.h>
#include <poll.h>
#include <stdlib.h>

#include "base/core/clock.h"
#include "base/core/log.h"
#include "base/metrics/metric_text.h"
#include "indexer/replica/fetch.h"
#include "selector/selector.h"

#define LIST_MS 500          /* between two looks at the list of peers */
#define START_MS 1000        /* longest wait for peers' bookings at the start */
#define AGAIN_MS 50          /* first pause after a failure, doubled up to AGAIN_MAX_MS */
#define AGAIN_MAX_MS 1000    /* a peer that starts is followed within this time */
#define SELF_MS 30000        /* pause after this replica has met itself */
#define LINE_MAX (16u << 20) /* bytes of a notice */
#define PIECE (64u << 10)    /* bytes read at a time */

/* Wait for up to @ms, or until the wake is signalled. */
static void pause_for(const struct kv_wake *wake, uint64_t ms)
{
    struct pollfd pfd = {.fd = wake->fd, .events = POLLIN};

    (void)poll(&pfd, 1, (int)ms);
}

/* -- one peer ------------------------------------------------------------------------------------ */

/* Hear the whole lines of @text, and keep the rest of it. Returns 0 or a negative errno. */
static int hear_lines(struct ksel_peer *peer, struct ksel_notice_reader *reader,
                      struct kv_buf *text)
{
    size_t at = 0;
    int rc = 0;

    while (rc == 0) {
        const char *line = text->data + at;
        const char *end = at < text->len ? memchr(line, '\n', text->len - at) : NULL;
        struct ksel_notice notice;

        if (!end)
            break;
        rc = ksel_notice_read(reader, (struct kv_str){line, (size_t)(end - line)}, &notice);
        if (rc == 0 && notice.kind == KSEL_NOTICE_HELLO && notice.origin == peer->s->peers.origin)
            rc = -ELOOP;
        if (rc == 0)
            ksel_hear(peer, &notice, kv_now_ns());
        at = (size_t)(end + 1 - text->data);
    }
    if (at) {
        memmove(text->data, text->data + at, text->len - at);
        text->len -= at;
    }
    return rc;
}

/* Read the stream until it ends. Returns a negative errno, also at its end. */
static int read_stream(struct ksel_peer *peer, struct ki_fetch *fetch)
{
    struct ksel_notice_reader reader = {0};
    struct kv_buf text = {.limit = LINE_MAX};
    int rc = 0;

    while (rc == 0) {
        long n;

        rc = kv_buf_reserve(&text, PIECE);
        if (rc < 0)
            break;
        n = ki_fetch_read(fetch, text.data + text.len, PIECE);
        if (n <= 0) {
            rc = n < 0 ? (int)n : -EPIPE;
        } else {
            text.len += (size_t)n;
            rc = hear_lines(peer, &reader, &text);
        }
    }
    kv_buf_fini(&text);
    ksel_notice_reader_fini(&reader);
    return rc;
}

/* Note that the peer isn't followed now, and log it the first time. */
static void note_end(struct ksel_peer *peer, int rc, const char *why)
{
    struct ksel *s = peer->s;
    char quoted[400];
    bool told;

    pthread_mutex_lock(&s->lock);
    told = peer->failed;
    peer->origin = 0;
    peer->in_snapshot = false;
    peer->failed = peer->tried = true;
    pthread_mutex_unlock(&s->lock);
    if (rc != -ELOOP && !told && !peer->stop)
        kv_log_warn("peers", "bookings of a peer are not followed; asking again",
                    "peer=%s error=%s", peer->url,
                    kv_log_quote(quoted, sizeof(quoted), *why ? why : strerror(-rc)));
}

/* Follow the peer until its stream ends. Returns a negative errno. */
static int follow(struct ksel_peer *peer)
{
    struct ki_service *service = peer->s->service;
    char *token = kh_auth_first_token(service->auth);
    char *url = ki_peer_url(peer->url, "/bookings");
    const struct ki_fetch_opts opts = {.url = url,
                                       .token = token,
                                       .ca_file = service->options->cacert,
                                       .connect_ms = 2000,
                                       .stall_ms = 5000,
                                       .total_ms = UINT32_MAX,
                                       .trickles = true,
                                       .stop = &peer->stop};
    struct ki_fetch *fetch = NULL;
    int rc = url ? ki_fetch_open(&opts, &fetch) : -ENOMEM;

    if (rc == 0)
        rc = read_stream(peer, fetch);
    note_end(peer, rc, fetch ? ki_fetch_error(fetch) : "");
    ki_fetch_close(fetch);
    if (token)
        explicit_bzero(token, strlen(token));
    free(token);
    free(url);
    return rc;
}

static void *peer_main(void *arg)
{
    struct ksel_peer *peer = arg;
    uint64_t pause_ms = AGAIN_MS;

    while (!peer->stop) {
        uint64_t from_ns = kv_now_ns();
        int rc = follow(peer);

        pause_ms = kv_now_ns() - from_ns > AGAIN_MAX_MS * KV_NS_PER_MS
                       ? AGAIN_MS
                       : KV_MIN(2 * pause_ms, (uint64_t)AGAIN_MAX_MS);
        if (!peer->stop)
            pause_for(&peer->wake, rc == -ELOOP ? SELF_MS : pause_ms);
    }
    return NULL;
}

static void peer_free(struct ksel_peer *peer)
{
    kv_wake_close(&peer->wake);
    kv_buf_fini(&peer->seen);
    free(peer->url);
    free(peer);
}

static void peer_start(struct ksel *s, const char *url)
{
    struct ksel_peer *peer = calloc(1, sizeof(*peer));
    int rc = -ENOMEM;

    if (!peer)
        return; /* the next look at the list tries again */
    peer->s = s;
    peer->url = strdup(url);
    rc = kv_wake_open(&peer->wake);
    if (rc == 0 && peer->url) {
        pthread_mutex_lock(&s->lock);
        peer->next = s->peers.list;
        s->peers.list = peer;
        s->peers.active = true;
        rc = kv_thread_start(&peer->thread, "ksel-peer", peer_main, peer);
        if (rc < 0)
            s->peers.list = peer->next;
        pthread_mutex_unlock(&s->lock);
        if (rc == 0)
            return;
    }
    peer_free(peer);
}

/* End the peer at *@at, which then is the next one's place. */
static void peer_stop(struct ksel *s, struct ksel_peer **at)
{
    struct ksel_peer *peer = *at;

    peer->stop = 1;
    kv_wake_signal(&peer->wake);
    pthread_join(peer->thread, NULL);
    pthread_mutex_lock(&s->lock);
    *at = peer->next;
    pthread_mutex_unlock(&s->lock);
    peer_free(peer);
}

/* -- all of them --------------------------------------------------------------------------------- */

static bool is_listed(const char *url, char *const *urls, long n)
{
    long at = 0;

    while (at < n && strcmp(urls[at], url) != 0)
        at++;
    return at < n;
}

/* Follow those that are listed, and no others. The list is changed by this thread alone. */
static void look_at_list(struct ksel *s)
{
    struct ksel_peer **at = &s->peers.list;
    char **urls;
    long n = ki_peers_list(s->service->peers, &urls);

    if (n < 0)
        return;
    while (*at)
        if (is_listed((*at)->url, urls, n))
            at = &(*at)->next;
        else
            peer_stop(s, at);
    for (long i = 0; i < n; i++) {
        const struct ksel_peer *peer = s->peers.list;

        while (peer && strcmp(peer->url, urls[i]) != 0)
            peer = peer->next;
        if (!peer)
            peer_start(s, urls[i]);
    }
    ki_peers_free(urls, n);
}

static void *main_thread(void *arg)
{
    struct ksel *s = arg;

    while (!s->peers.stop) {
        look_at_list(s);
        pause_for(&s->peers.wake, LIST_MS);
    }
    return NULL;
}

/* Return true when each peer has told its bookings, or can't. */
static bool all_tried(struct ksel *s)
{
    bool all = true;

    pthread_mutex_lock(&s->lock);
    for (const struct ksel_peer *p = s->peers.list; p; p = p->next)
        all &= p->tried;
    pthread_mutex_unlock(&s->lock);
    return all;
}

int ksel_peers_start(struct ksel *s, struct kv_error *error)
{
    struct ksel_peers *p = &s->peers;
    uint64_t until_ns = kv_now_ns() + START_MS * KV_NS_PER_MS;
    int rc;

    p->origin = ki_registry_id(s->service->registry);
    rc = kv_wake_open(&p->wake);
    if (rc == 0) {
        look_at_list(s); /* before the thread that does so from now on */
        rc = kv_thread_start(&p->thread, "ksel-peers", main_thread, s);
    }
    if (rc < 0)
        return kv_fail(error, rc, 0, "can't follow peers: %s", strerror(-rc));
    p->running = true;
    while (!all_tried(s) && kv_now_ns() < until_ns)
        (void)poll(NULL, 0, 5);
    return 0;
}

void ksel_peers_end(struct ksel *s)
{
    ksel_notices_end(&s->peers.notices);
}

void ksel_peers_stop(struct ksel *s)
{
    struct ksel_peers *p = &s->peers;

    p->stop = 1;
    if (p->running) {
        kv_wake_signal(&p->wake);
        pthread_join(p->thread, NULL);
    }
    for (struct ksel_peer *peer = p->list; peer; peer = peer->next) {
        peer->stop = 1; /* all at once: each takes a moment to see it */
        kv_wake_signal(&peer->wake);
    }
    while (p->list)
        peer_stop(s, &p->list);
    kv_wake_close(&p->wake);
    for (size_t i = 0; p->ends && i < KSEL_ENDS; i++)
        free(p->ends[i].id);
    free(p->ends);
    kv_buf_fini(&p->line);
    ksel_notices_fini(&p->notices);
}

static void render_one(struct kv_buf *out, const char *name, const char *type, const char *help,
                       uint64_t value)
{
    kv_metric_head(out, name, type, help);
    kv_buf_printf(out, "%s %" PRIu64 "\n", name, value);
}

void ksel_peers_render(struct ksel *s, struct kv_buf *out)
{
    struct ksel_peers *p = &s->peers;
    uint64_t followed = 0, lost = 0, heard, snapshots, conflicts;

    pthread_mutex_lock(&s->lock);
    for (const struct ksel_peer *peer = p->list; peer; peer = peer->next) {
        followed += peer->origin && !peer->in_snapshot;
        lost += !peer->origin || peer->in_snapshot;
    }
    heard = p->heard;
    snapshots = p->snapshots;
    conflicts = p->conflicts;
    pthread_mutex_unlock(&s->lock);
    render_one(out, "kv_selector_peers_followed", "gauge", "Peers whose bookings are followed",
               followed);
    render_one(out, "kv_selector_peers_lost", "gauge", "Peers whose bookings aren't followed now",
               lost);
    render_one(out, "kv_selector_followers", "gauge", "Peers that follow the bookings here",
               ksel_notices_followers(&p->notices));
    render_one(out, "kv_selector_peer_notices_total", "counter",
               "Notices of bookings that peers have told", heard);
    render_one(out, "kv_selector_peer_snapshots_total", "counter",
               "Whole snapshots of peers' bookings", snapshots);
    render_one(out, "kv_selector_peer_conflicts_total", "counter",
               "Ids that two replicas had booked at once", conflicts);
}
