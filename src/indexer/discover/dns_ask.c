// SPDX-License-Identifier: Apache-2.0
#define CARES_NO_DEPRECATED
#include "indexer/discover/dns_ask.h"

#include <ares.h>
#include <arpa/inet.h>
#include <netdb.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TIMEOUT_MS 500 /* of the first try; c-ares doubles it */
#define TRIES 4
#define MAX_RECORDS 4096
#define MAX_UNDER_WAY 64 /* questions at a time */
#define NO_TTL_S 5       /* of an answer whose message has no records at all */

/* -- messages ---------------------------------------------------------------------------------- */

static uint32_t read_u16(const unsigned char *p)
{
    return (uint32_t)p[0] << 8 | p[1];
}

/* Return the offset behind the name at @at; 0: it doesn't end within the message. */
static size_t skip_name(const unsigned char *message, size_t len, size_t at)
{
    while (at < len) {
        if (message[at] == 0)
            return at + 1;
        if ((message[at] & 0xc0) == 0xc0)
            return at + 2 <= len ? at + 2 : 0;
        at += 1u + message[at];
    }
    return 0;
}

uint32_t ki_dns_ttl(const unsigned char *message, size_t len, uint32_t fallback)
{
    uint32_t n_questions, n, ttl = UINT32_MAX;
    size_t at = 12;

    if (len < 12)
        return fallback;
    n_questions = read_u16(message + 4);
    n = read_u16(message + 6);
    n = n ? n : read_u16(message + 8); /* of the authority */
    for (uint32_t i = 0; i < n_questions; i++) {
        at = skip_name(message, len, at);
        if (!at)
            return fallback;
        at += 4;
    }
    for (uint32_t i = 0; i < n; i++) {
        at = at < len ? skip_name(message, len, at) : 0;
        if (!at || at + 10 > len)
            return fallback;
        ttl = KV_MIN(ttl, read_u16(message + at + 4) << 16 | read_u16(message + at + 6));
        at += 10 + read_u16(message + at + 8);
    }
    return n ? ttl : fallback;
}

/* -- answers ----------------------------------------------------------------------------------- */

static void add_record(struct ki_dns_question *q, const char *text, uint32_t port)
{
    struct ki_dns_record record = {.port = port};

    if (q->data.len / sizeof(record) >= MAX_RECORDS)
        return;
    snprintf(record.text, sizeof(record.text), "%s", text);
    kv_buf_append(&q->data, &record, sizeof(record));
}

static int take_a(struct ki_dns_question *q, const unsigned char *message, int len)
{
    struct ares_addrttl addresses[256];
    int n = KV_COUNT(addresses), rc = ares_parse_a_reply(message, len, NULL, addresses, &n);
    char text[INET6_ADDRSTRLEN];

    for (int i = 0; rc == ARES_SUCCESS && i < n; i++)
        add_record(q, inet_ntop(AF_INET, &addresses[i].ipaddr, text, sizeof(text)), 0);
    return rc;
}

static int take_aaaa(struct ki_dns_question *q, const unsigned char *message, int len)
{
    struct ares_addr6ttl addresses[256];
    int n = KV_COUNT(addresses), rc = ares_parse_aaaa_reply(message, len, NULL, addresses, &n);
    char text[INET6_ADDRSTRLEN];

    for (int i = 0; rc == ARES_SUCCESS && i < n; i++)
        add_record(q, inet_ntop(AF_INET6, &addresses[i].ip6addr, text, sizeof(text)), 0);
    return rc;
}

static int take_srv(struct ki_dns_question *q, const unsigned char *message, int len)
{
    struct ares_srv_reply *first = NULL;
    int rc = ares_parse_srv_reply(message, len, &first);

    for (const struct ares_srv_reply *r = first; rc == ARES_SUCCESS && r; r = r->next)
        if (*r->host && strcmp(r->host, ".") != 0 && r->port) /* "." is: no such service */
            add_record(q, r->host, r->port);
    ares_free_data(first);
    return rc;
}

/* Take the first text that is an object, its strings joined. */
static int take_txt(struct ki_dns_question *q, const unsigned char *message, int len)
{
    struct ares_txt_ext *first = NULL;
    int rc = ares_parse_txt_reply_ext(message, len, &first);
    bool within = false;

    for (const struct ares_txt_ext *t = first; rc == ARES_SUCCESS && t; t = t->next) {
        if (t->record_start && within)
            break;
        if (t->record_start)
            within = t->length && t->txt[0] == '{';
        if (within)
            kv_buf_append(&q->data, t->txt, t->length);
    }
    ares_free_data(first);
    return rc;
}

static int take(struct ki_dns_question *q, const unsigned char *message, int len)
{
    switch (q->type) {
    case KI_DNS_A:
        return take_a(q, message, len);
    case KI_DNS_AAAA:
        return take_aaaa(q, message, len);
    case KI_DNS_SRV:
        return take_srv(q, message, len);
    case KI_DNS_TXT:
        return take_txt(q, message, len);
    }
    return ARES_EBADRESP;
}

static bool is_absence(int status)
{
    return status == ARES_ENODATA || status == ARES_ENOTFOUND;
}

static void on_answer(void *arg, int status, int timeouts, unsigned char *message, int len)
{
    struct ki_dns_question *q = arg;
    struct kv_buf before = q->data;

    (void)timeouts;
    q->pending = false;
    q->data = (struct kv_buf){0};
    if (status == ARES_SUCCESS)
        status = take(q, message, len);
    if ((status == ARES_SUCCESS || is_absence(status)) && !q->data.error) {
        q->ttl_s = message && len > 0 ? ki_dns_ttl(message, (size_t)len, NO_TTL_S) : NO_TTL_S;
        q->ttl_s = KV_MAX(q->ttl_s, 1u);
        kv_buf_fini(&before);
        return;
    }
    kv_buf_fini(&q->data);
    q->data = before;
    q->failed = true;
    /* c-ares says so, too, when the last server has answered SERVFAIL or REFUSED. */
    q->why = status == ARES_ECONNREFUSED ? "no name server answers, or all fail or refuse"
                                         : ares_strerror(status);
}

/* -- asking ------------------------------------------------------------------------------------ */

void ki_dns_begin(struct ki_dns *dns)
{
    for (struct ki_dns_question *q = dns->questions; q; q = q->next)
        q->wanted = q->pending = q->failed = false;
}

static void free_question(struct ki_dns_question *q)
{
    kv_buf_fini(&q->data);
    free(q);
}

void ki_dns_end(struct ki_dns *dns)
{
    for (struct ki_dns_question **at = &dns->questions; *at;) {
        struct ki_dns_question *q = *at;

        if (q->wanted) {
            at = &q->next;
        } else {
            *at = q->next;
            free_question(q);
        }
    }
}

void ki_dns_fini(struct ki_dns *dns)
{
    ki_dns_begin(dns);
    ki_dns_end(dns);
}

struct ki_dns_question *ki_dns_want(struct ki_dns *dns, const char *name, enum ki_dns_type type)
{
    struct ki_dns_question *q = dns->questions;

    while (q && (q->type != type || strcmp(q->name, name) != 0))
        q = q->next;
    if (!q) {
        q = calloc(1, sizeof(*q));
        if (!q)
            return NULL;
        snprintf(q->name, sizeof(q->name), "%s", name);
        q->type = type;
        q->next = dns->questions;
        dns->questions = q;
    }
    q->pending |= !q->wanted;
    q->wanted = true;
    return q;
}

/* Wait for something to happen on the channel's sockets, and let c-ares work. */
static void work(struct ki_source *source, ares_channel channel)
{
    ares_socket_t sockets[ARES_GETSOCK_MAXNUM];
    struct pollfd fds[ARES_GETSOCK_MAXNUM + 1] = {{.fd = source->wake.fd, .events = POLLIN}};
    struct timeval most = {.tv_sec = 1}, tv;
    const struct timeval *wait = ares_timeout(channel, &most, &tv);
    unsigned bits = (unsigned)ares_getsock(channel, sockets, ARES_GETSOCK_MAXNUM);
    nfds_t n = 1;

    for (unsigned i = 0; i < ARES_GETSOCK_MAXNUM; i++) {
        /* c-ares's own macros shift a bit into the sign. */
        short events =
            (short)((bits & 1u << i ? POLLIN : 0) | (bits & 1u << (i + 16) ? POLLOUT : 0));

        if (events)
            fds[n++] = (struct pollfd){.fd = sockets[i], .events = events};
    }
    (void)poll(fds, n, (int)(wait->tv_sec * 1000 + wait->tv_usec / 1000 + 1));
    for (nfds_t i = 1; i < n; i++)
        ares_process_fd(channel,
                        fds[i].revents & (POLLIN | POLLERR | POLLHUP) ? fds[i].fd : ARES_SOCKET_BAD,
                        fds[i].revents & POLLOUT ? fds[i].fd : ARES_SOCKET_BAD);
    ares_process_fd(channel, ARES_SOCKET_BAD, ARES_SOCKET_BAD); /* what has timed out */
}

static size_t count_pending(const struct ki_dns *dns)
{
    size_t n = 0;

    for (const struct ki_dns_question *q = dns->questions; q; q = q->next)
        n += q->wanted && q->pending;
    return n;
}

/* Ask the wanted questions, some at a time. */
static int ask_all(struct ki_dns *dns, ares_channel channel)
{
    struct ki_dns_question *next = dns->questions;
    size_t left = count_pending(dns), unasked = left;

    while (left && !ki_source_is_stopped(dns->source)) {
        while (next && left - unasked < MAX_UNDER_WAY) {
            if (next->wanted && next->pending) {
                unasked--;
                ares_query(channel, next->name, 1, (int)next->type, on_answer, next);
            }
            next = next->next;
        }
        work(dns->source, channel);
        left = count_pending(dns);
    }
    return left ? -ECANCELED : 0;
}

int ki_dns_ask(struct ki_dns *dns, const char **ret_why)
{
    struct ares_options options = {
        .flags = ARES_FLAG_NOALIASES, .timeout = TIMEOUT_MS, .tries = TRIES};
    ares_channel channel;
    int rc =
        ares_init_options(&channel, &options, ARES_OPT_FLAGS | ARES_OPT_TIMEOUTMS | ARES_OPT_TRIES);

    if (rc == ARES_SUCCESS && dns->servers) {
        rc = ares_set_servers_ports_csv(channel, dns->servers);
        if (rc != ARES_SUCCESS)
            ares_destroy(channel);
    }
    if (rc != ARES_SUCCESS) {
        *ret_why = ares_strerror(rc);
        return -EIO;
    }
    rc = ask_all(dns, channel);
    ares_destroy(channel); /* calls on_answer for those that are left */
    return rc;
}
