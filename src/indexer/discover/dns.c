// SPDX-License-Identifier: Apache-2.0
/*
 * dns:NAME:PORT: each address of NAME (A and AAAA) is a worker. dns:_SERVICE._tcp.NAME: each SRV record
 * is one; its target's address is looked up, too. A TXT record of NAME that is a JSON object says what
 * they are registered with.
 *
 * Asked again when the answers have expired. A name server that fails changes nothing; a name that is
 * unknown, or has no records, has no workers.
 */
#include <arpa/inet.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/args/instance.h"
#include "indexer/discover/dns_ask.h"

#define MIN_TTL_S 1
#define MAX_TTL_S 30
#define MAX_PAUSE_S 5 /* after failures in a row */

struct place {
    char *text; /* owned; the others point into it */
    const char *name, *servers;
    uint64_t port, replay_port; /* 0: of SRV records; no replays */
};

struct dns {
    struct ki_dns ask;
    struct place place;
    struct ki_body body;
    struct ki_found_set last; /* as published */
    bool published;
    bool failed;    /* of this look: a question whose answer counts */
    char why[160];  /* of failed: the first one, and the reason */
    uint32_t ttl_s; /* of this look: the least of its answers */
};

/* -- the text of the source -------------------------------------------------------------------- */

static int read_option(struct place *p, const char *option, struct kv_error *error)
{
    const char *value = strchr(option, '=');

    if (value && strncmp(option, "server=", 7) == 0 && value[1])
        p->servers = value + 1;
    else if (!value || strncmp(option, "replay-port=", 12) != 0 ||
             kv_parse_u64(value + 1, &p->replay_port) < 0 || !p->replay_port ||
             p->replay_port > UINT16_MAX)
        return kv_fail(error, -EINVAL, 0,
                       "'%.40s': expected server=ADDRESS[:PORT],... or replay-port=PORT", option);
    return 0;
}

static int read_name(struct place *p, char *name, struct kv_error *error)
{
    char *colon = strrchr(name, ':');
    size_t len;

    p->name = name;
    if (*name == '_') {
        if (colon)
            return kv_fail(error, -EINVAL, 0, "SRV records have ports of their own");
    } else if (!colon || kv_parse_u64(colon + 1, &p->port) < 0 || !p->port ||
               p->port > UINT16_MAX) {
        return kv_fail(error, -EINVAL, 0, "expected NAME:PORT, or _SERVICE._tcp.NAME");
    }
    if (colon)
        *colon = '\0';
    len = strlen(name);
    if (len && name[len - 1] == '.')
        name[--len] = '\0';
    if (!len || len > 253)
        return kv_fail(error, -EINVAL, 0, "a name of 1 to 253 characters is expected");
    return 0;
}

static int read_place(const char *where, struct place *ret, struct kv_error *error)
{
    struct place p = {.text = strdup(where)};
    char *options, *save = NULL;
    int rc;

    if (!p.text)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    options = strchr(p.text, '?');
    if (options)
        *options++ = '\0';
    rc = read_name(&p, p.text, error);
    for (char *one = options ? strtok_r(options, "&", &save) : NULL; one && rc == 0;
         one = strtok_r(NULL, "&", &save))
        rc = read_option(&p, one, error);
    if (rc < 0)
        free(p.text);
    else
        *ret = p;
    return rc;
}

static int check(const char *where, struct kv_error *error)
{
    struct place place = {0};
    int rc = read_place(where, &place, error);

    if (rc == 0)
        free(place.text);
    return rc;
}

/* -- workers ----------------------------------------------------------------------------------- */

static const struct ki_dns_record *records_of(const struct ki_dns_question *q, size_t *ret_n)
{
    *ret_n = q->data.len / sizeof(struct ki_dns_record);
    return (const struct ki_dns_record *)(const void *)q->data.data;
}

/* Add the worker HOST:PORT, which is reached at @address. */
static void add_worker(struct dns *d, struct ki_found_set *set, const char *host, uint32_t port,
                       const char *address, const struct ki_dns_question *txt)
{
    char name[300], endpoint[96], replay[96];
    struct ki_found found = d->ask.source->base;
    bool v6 = strchr(address, ':') != NULL;
    struct kv_error why = {0};
    int rc;

    snprintf(name, sizeof(name), strchr(host, ':') ? "[%s]:%" PRIu32 : "%s:%" PRIu32, host, port);
    snprintf(endpoint, sizeof(endpoint), v6 ? "tcp://[%s]:%" PRIu32 : "tcp://%s:%" PRIu32, address,
             port);
    snprintf(replay, sizeof(replay), v6 ? "tcp://[%s]:%" PRIu64 : "tcp://%s:%" PRIu64, address,
             d->place.replay_port);
    if (kv_instance_parse(name, strlen(name), &found.registration.instance, NULL) < 0) {
        ki_found_leave_out(set, name, "its name is too long");
        return;
    }
    found.registration.name = name;
    found.registration.endpoint = endpoint;
    found.registration.replay_endpoint = d->place.replay_port ? replay : NULL;
    if (txt->data.len)
        rc = ki_found_add_json(set, (struct kv_str){txt->data.data, txt->data.len}, 0, &found,
                               &d->body, &why);
    else
        rc = ki_found_add(set, &found, &why);
    if (rc < 0)
        ki_found_leave_out(set, name, why.text);
}

/* Note how a question went. One that failed counts unless @other has answered with records. */
static void note(struct dns *d, const struct ki_dns_question *q,
                 const struct ki_dns_question *other)
{
    bool spared = other && !other->failed && other->data.len && !q->data.len;

    if (!q->failed) {
        d->ttl_s = KV_MIN(d->ttl_s, q->ttl_s);
    } else if (!spared) {
        if (!d->failed)
            snprintf(d->why, sizeof(d->why), "%.100s: %s", q->name, q->why);
        d->failed = true;
    }
}

static void add_addresses(struct dns *d, struct ki_found_set *set, const struct ki_dns_question *q,
                          const struct ki_dns_question *txt)
{
    size_t n;
    const struct ki_dns_record *records = records_of(q, &n);

    for (size_t i = 0; i < n; i++)
        add_worker(d, set, records[i].text, (uint32_t)d->place.port, records[i].text, txt);
}

/* Choose the address of a target: the one so far while it is there, else the least, of A first. */
static const char *choose(struct ki_dns_question *a, const struct ki_dns_question *aaaa)
{
    const struct ki_dns_question *both[] = {a, aaaa};
    const char *least = NULL;

    for (size_t k = 0; k < 2; k++) {
        const char *of_kind = NULL;
        size_t n;
        const struct ki_dns_record *records = records_of(both[k], &n);

        for (size_t i = 0; i < n; i++) {
            if (strcmp(records[i].text, a->chosen) == 0)
                return a->chosen;
            if (!of_kind || strcmp(records[i].text, of_kind) < 0)
                of_kind = records[i].text;
        }
        least = least ? least : of_kind;
    }
    if (least)
        snprintf(a->chosen, sizeof(a->chosen), "%.63s", least); /* an address has at most 45 */
    return least;
}

/* Ask for the addresses of the targets of @srv. Returns as ki_dns_ask. */
static int ask_targets(struct dns *d, const struct ki_dns_question *srv, const char **ret_why)
{
    size_t n;
    const struct ki_dns_record *records = records_of(srv, &n);

    for (size_t i = 0; i < n; i++)
        if (!ki_dns_want(&d->ask, records[i].text, KI_DNS_A) ||
            !ki_dns_want(&d->ask, records[i].text, KI_DNS_AAAA)) {
            *ret_why = "out of memory";
            return -ENOMEM;
        }
    return ki_dns_ask(&d->ask, ret_why);
}

static void add_targets(struct dns *d, struct ki_found_set *set, const struct ki_dns_question *srv,
                        const struct ki_dns_question *txt)
{
    size_t n;
    const struct ki_dns_record *records = records_of(srv, &n);

    for (size_t i = 0; i < n; i++) {
        struct ki_dns_question *a = ki_dns_want(&d->ask, records[i].text, KI_DNS_A);
        struct ki_dns_question *aaaa = ki_dns_want(&d->ask, records[i].text, KI_DNS_AAAA);
        const char *address = choose(a, aaaa);

        note(d, a, aaaa);
        note(d, aaaa, a);
        if (address)
            add_worker(d, set, records[i].text, records[i].port, address, txt);
        else
            ki_found_leave_out(set, records[i].text, "the target has no address");
    }
}

/* Publish, unless it is what was published last. */
static void publish(struct dns *d, struct ki_found_set *set)
{
    ki_found_sort(set);
    if (d->published && ki_found_sets_equal(set, &d->last)) {
        if (!d->failed)
            ki_source_confirm(d->ask.source);
        return;
    }
    ki_found_set_fini(&d->last);
    d->published = ki_found_set_copy(set, &d->last) == 0;
    ki_source_publish(d->ask.source, set);
}

/* Ask, and publish what is answered. Returns 0, or a negative errno: nothing was published. */
static int look(struct dns *d, const char **ret_why)
{
    struct ki_dns_question *txt = ki_dns_want(&d->ask, d->place.name, KI_DNS_TXT);
    bool service = *d->place.name == '_';
    struct ki_dns_question *first =
        ki_dns_want(&d->ask, d->place.name, service ? KI_DNS_SRV : KI_DNS_A);
    struct ki_dns_question *second =
        service ? first : ki_dns_want(&d->ask, d->place.name, KI_DNS_AAAA);
    struct ki_found_set set = {0};
    int rc = txt && first && second ? ki_dns_ask(&d->ask, ret_why) : -ENOMEM;

    if (rc == 0 && service)
        rc = ask_targets(d, first, ret_why);
    if (rc < 0)
        return rc;
    note(d, txt, NULL);
    note(d, first, second == first ? NULL : second);
    if (service) {
        add_targets(d, &set, first, txt);
    } else {
        note(d, second, first);
        add_addresses(d, &set, first, txt);
        add_addresses(d, &set, second, txt);
    }
    /* A failure without any answer so far says nothing of workers, or not with what to register them. */
    if (!d->failed || (txt->ttl_s && (first->data.len || second->data.len)))
        publish(d, &set);
    if (d->failed)
        ki_source_failed(d->ask.source, "%s", d->why);
    ki_found_set_fini(&set);
    return 0;
}

/* -- the thread -------------------------------------------------------------------------------- */

static void run(struct ki_source *source)
{
    struct dns *d = source->own;
    uint32_t failures = 0;

    while (!ki_source_is_stopped(source)) {
        const char *why = "out of memory";
        uint32_t wait_s;
        int rc;

        d->failed = false;
        d->ttl_s = MAX_TTL_S;
        ki_dns_begin(&d->ask);
        rc = look(d, &why);
        if (rc == 0)
            ki_dns_end(&d->ask);
        else if (rc != -ECANCELED)
            ki_source_failed(source, "%s", why);
        failures = rc < 0 || d->failed ? KV_MIN(failures + 1, 16u) : 0;
        wait_s = failures ? KV_MIN(1u << (failures - 1), (unsigned)MAX_PAUSE_S)
                          : KV_MAX(d->ttl_s, (uint32_t)MIN_TTL_S);
        ki_source_wait(source, -1, (int)wait_s * 1000);
    }
}

static int open_dns(struct ki_source *source, struct kv_error *error)
{
    struct dns *d = calloc(1, sizeof(*d));
    int rc;

    if (!d)
        return -ENOMEM;
    source->own = d;
    rc = read_place(source->where, &d->place, error);
    d->ask = (struct ki_dns){.source = source, .servers = d->place.servers};
    return rc;
}

static void close_dns(struct ki_source *source)
{
    struct dns *d = source->own;

    if (!d)
        return;
    ki_dns_fini(&d->ask);
    ki_found_set_fini(&d->last);
    ki_body_fini(&d->body);
    free(d->place.text);
    free(d);
}

const struct ki_source_ops ki_source_dns = {.scheme = "dns:",
                                            .form = "dns:NAME:PORT, dns:_SERVICE._tcp.NAME",
                                            .check = check,
                                            .open = open_dns,
                                            .run = run,
                                            .close = close_dns};
