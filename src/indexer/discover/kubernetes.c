// SPDX-License-Identifier: Apache-2.0
/*
 * kubernetes:[NAMESPACE]/SELECTOR: pods, by list and watch.
 *
 *     list ──► all pods, and the version of that list ──► watch from there ──► events ──┐
 *      ▲                                                    ▲      │                    │ version of each
 *      │ 410: the versions since are forgotten              └──────┴── ended, broken ◄──┘
 *      └────────────────────────────────────────────────────────────
 *
 * Watches end again and again by themselves; the next one begins at the last version that was seen, so
 * nothing is lost between. Bookmarks bring newer versions where pods are quiet. The token is read again
 * for each request, since it changes every hour.
 */
#include "indexer/discover/kubernetes.h"

#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "indexer/discover/get.h"
#include "indexer/discover/table.h"

#define ACCOUNT "/var/run/secrets/kubernetes.io/serviceaccount"
#define PAGE 500                     /* pods of a page of the list */
#define MAX_PAGES 1000               /* of a list */
#define MAX_PAGE ((size_t)256 << 20) /* bytes of a page */
#define MAX_EVENT ((size_t)16 << 20) /* bytes of an event */
#define MAX_VERSION 64
#define CONNECT_MS 5000
#define LIST_SILENCE_MS 30000
#define LIST_PAGE_MS 120000 /* longest time for a page */
#define WATCH_S 300         /* after so long the server ends a watch */
#define WATCH_SILENCE_MS ((WATCH_S + 30) * 1000)
#define MIN_PAUSE_MS 100
#define MAX_PAUSE_MS 5000
#define STEADY_NS (5 * KV_NS_PER_S) /* a watch that lasted so long has been a good one */
#define WATCH_TRIES 3 /* watches in a row that fail at once, before the list is asked for again */

struct kube {
    struct ki_source *source;
    struct ki_kube_place place;
    char *server;
    struct ki_found base;
    struct ki_table pods; /* by "namespace/name" */
    char version[MAX_VERSION];
    /* The request under way: */
    struct kv_buf page, refusal, token;
    bool gone;            /* the server has forgotten the version */
    unsigned gone_in_row; /* how often, without a watch that lasted between */
    bool heard;           /* the watch has begun, or told something */
    bool broken;          /* it has told what makes no sense */
    char why[160];
    struct ki_pod pod;
    struct ki_body body;
};

/* -- the text of the source -------------------------------------------------------------------- */

static bool set_option(struct ki_kube_place *p, const char *name, size_t len, char *value)
{
    const struct {
        const char *name;
        const char **ret;
    } options[] = {{"server", &p->server},
                   {"account", &p->account},
                   {"port", &p->event_port},
                   {"replay-port", &p->replay_port}};

    for (size_t i = 0; i < KV_COUNT(options); i++)
        if (strlen(options[i].name) == len && memcmp(options[i].name, name, len) == 0 && *value) {
            *options[i].ret = value;
            return true;
        }
    return false;
}

static int read_options(struct ki_kube_place *p, char *text, struct kv_error *error)
{
    char *save = NULL;

    for (char *one = strtok_r(text, "&", &save); one; one = strtok_r(NULL, "&", &save)) {
        size_t len = strcspn(one, "=");

        if (!one[len] || !set_option(p, one, len, one + len + 1))
            return kv_fail(error, -EINVAL, 0,
                           "'%.40s': expected server=URL, account=FOLDER, port=PORT or "
                           "replay-port=PORT",
                           one);
    }
    return 0;
}

/* The source is shown as given, in logs and to all who ask: it may have no password. */
static int check_server(const char *url, struct kv_error *error)
{
    if (strncmp(url, "http://", 7) != 0 && strncmp(url, "https://", 8) != 0)
        return kv_fail(error, -EINVAL, 0, "server is no http:// or https:// URL");
    if (memchr(strchr(url, ':') + 3, '@', strcspn(strchr(url, ':') + 3, "/?#")))
        return kv_fail(error, -EINVAL, 0,
                       "server may have no user or password: the token of the account is sent");
    return 0;
}

void ki_kube_place_fini(struct ki_kube_place *place)
{
    free(place->text);
}

int ki_kube_place_read(const char *where, struct ki_kube_place *ret, struct kv_error *error)
{
    struct ki_kube_place p = {.text = strdup(where),
                              .account = ACCOUNT,
                              .event_port = "kv-events",
                              .replay_port = "kv-replay"};
    char *options, *slash;
    int rc = 0;

    if (!p.text)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    options = strchr(p.text, '?');
    if (options)
        *options++ = '\0';
    slash = strchr(p.text, '/');
    if (!slash)
        rc = kv_fail(error, -EINVAL, 0, "expected [NAMESPACE]/SELECTOR");
    else
        *slash++ = '\0';
    p.space = p.text;
    p.selector = slash;
    if (rc == 0 && strspn(p.space, "abcdefghijklmnopqrstuvwxyz0123456789-") != strlen(p.space) &&
        strcmp(p.space, "*") != 0)
        rc = kv_fail(error, -EINVAL, 0, "no namespace: '%.60s'", p.space);
    if (rc == 0 && options)
        rc = read_options(&p, options, error);
    if (rc == 0 && p.server)
        rc = check_server(p.server, error);
    if (rc < 0)
        ki_kube_place_fini(&p);
    else
        *ret = p;
    return rc;
}

static int check(const char *where, struct kv_error *error)
{
    struct ki_kube_place place = {0};
    int rc = ki_kube_place_read(where, &place, error);

    if (rc == 0)
        ki_kube_place_fini(&place);
    return rc;
}

/* -- pods --------------------------------------------------------------------------------------- */

/* Note what a pod is now: k->pod, or @wrong: why it can't be read. Returns 0 or a negative errno. */
static int put(struct kube *k, const char *key, const char *wrong)
{
    const struct ki_pod_rules rules = {.event_port = k->place.event_port,
                                       .replay_port = k->place.replay_port,
                                       .qualified = strcmp(k->place.space, "*") == 0};
    struct ki_found_set set = {0};
    struct kv_error why = {0};

    if (wrong) {
        ki_found_leave_out(&set, key, wrong);
    } else if (ki_pod_absence(&k->pod)) {
        ki_table_remove(&k->pods, key);
        return 0;
    } else if (ki_pod_workers(&k->pod, &rules, &k->base, &k->body, &set, &why) < 0) {
        ki_found_set_fini(&set);
        ki_found_leave_out(&set, key, why.text);
    }
    return ki_table_put(&k->pods, key, &set);
}

/* -- requests ---------------------------------------------------------------------------------- */

/* Read the first line of a small file of the account. Returns 0 or a negative errno. */
static int read_account(const struct kube *k, const char *name, struct kv_buf *ret)
{
    char path[4096];
    ssize_t n = -1;
    int fd;

    snprintf(path, sizeof(path), "%s/%s", k->place.account, name);
    kv_buf_clear(ret);
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    if (kv_buf_reserve(ret, 16384) == 0)
        n = read(fd, ret->data, 16000);
    close(fd);
    if (n < 0)
        return -EIO;
    ret->len = (size_t)n;
    ret->len = strcspn(kv_buf_cstr(ret), "\r\n");
    return 0;
}

static void put_escaped(struct kv_buf *url, const char *text)
{
    for (; *text; text++) {
        if (isalnum((unsigned char)*text) || strchr("-._~", *text))
            kv_buf_putc(url, *text);
        else
            kv_buf_printf(url, "%%%02X", (unsigned char)*text);
    }
}

/* Write the URL of the pods, up to further parameters. Returns 0 or a negative errno, with a report. */
static int put_url(struct kube *k, struct kv_buf *url)
{
    struct kv_buf space = KV_BUF_INIT;
    int rc = 0;

    kv_buf_printf(url, "%s/api/v1", k->server);
    if (!*k->place.space) {
        rc = read_account(k, "namespace", &space);
        if (rc < 0)
            ki_source_failed(k->source, "%s/namespace: %s", k->place.account, strerror(-rc));
    }
    if (rc == 0 && strcmp(k->place.space, "*") != 0) {
        kv_buf_puts(url, "/namespaces/");
        put_escaped(url, *k->place.space ? k->place.space : kv_buf_cstr(&space));
    }
    kv_buf_puts(url, "/pods?labelSelector=");
    put_escaped(url, k->place.selector);
    kv_buf_fini(&space);
    return rc;
}

/* Report a refusal: the status, and the message of the Status object that came with it. */
static void report_status(struct kube *k, const char *what, int status)
{
    struct kv_json json;

    kv_json_init(&json, k->refusal.data, k->refusal.len);
    ki_pod_read(&k->pod, &json);
    if (kv_json_failed(&json))
        k->pod.message[0] = '\0';
    ki_source_failed(k->source, "%s: HTTP status %d%s%.100s", what, status,
                     *k->pod.message ? ": " : "", k->pod.message);
}

/* Run a GET and report its failure. Returns 0 for a 200, else a negative errno; k->gone is set by a 410. */
static int get(struct kube *k, const char *what, struct kv_buf *url, const struct ki_get *request)
{
    struct ki_get g = *request;
    struct kv_error why = {0};
    char ca[4096];
    bool tls = strncmp(k->server, "https:", 6) == 0;
    int rc = read_account(k, "token", &k->token);

    snprintf(ca, sizeof(ca), "%s/ca.crt", k->place.account);
    if (rc < 0 && tls) {
        ki_source_failed(k->source, "%s/token: %s", k->place.account, strerror(-rc));
        return rc;
    }
    g.url = kv_buf_cstr(url);
    g.token = tls ? kv_buf_cstr(&k->token) : NULL; /* never in the clear */
    g.ca_file = tls && access(ca, R_OK) == 0 ? ca : NULL;
    g.connect_ms = CONNECT_MS;
    g.arg = k;
    k->gone = false;
    rc = ki_get_run(k->source, &g, &k->refusal, &why);
    if (k->token.data)
        explicit_bzero(k->token.data, k->token.capacity);
    if (rc == 200)
        return 0;
    k->gone |= rc == 410; /* or an ERROR event has said so */
    if (rc > 0 && !(rc == 410 && strcmp(what, "watch") == 0))
        report_status(k, what, rc);
    else if (rc < 0 && rc != -ECANCELED)
        ki_source_failed(k->source, "%s: %s", what, why.text);
    return rc < 0 ? rc : -EIO;
}

/* -- the list ---------------------------------------------------------------------------------- */

static bool on_page(void *arg, const char *data, size_t len)
{
    struct kube *k = arg;

    kv_buf_append(&k->page, data, len);
    return !k->page.error;
}

/* Put the pod of this text: one that makes no sense is left out. Returns 0 or a negative errno. */
static int put_item(struct kube *k, struct kv_str text)
{
    char key[sizeof(k->pod.space) + sizeof(k->pod.name) + 1];
    struct kv_json json;

    kv_json_init(&json, text.p, text.len);
    ki_pod_read(&k->pod, &json);
    snprintf(key, sizeof(key), "%s/%s", k->pod.space, k->pod.name);
    if (!*k->pod.name)
        return 0;
    return put(k, key, kv_json_finish(&json) < 0 ? json.error.text : NULL);
}

static void read_items(struct kube *k, struct kv_json *json)
{
    int rc = 0;

    if (kv_json_null(json))
        return;
    kv_json_array(json);
    while (kv_json_next_item(json)) {
        struct kv_str text;

        (void)kv_json_peek(json);
        text.p = json->p;
        kv_json_skip(json);
        text.len = (size_t)(json->p - text.p);
        if (ki_source_is_stopped(k->source))
            kv_json_fail(json, -ECANCELED, "stopped");
        if (!kv_json_failed(json))
            rc = put_item(k, text);
        if (rc < 0)
            kv_json_fail(json, rc, ki_table_fault(&k->pods));
    }
}

static void read_list_metadata(struct kube *k, struct kv_json *json, struct kv_buf *ret_continue)
{
    struct kv_buf scratch = KV_BUF_INIT;
    struct kv_str key;

    kv_json_object(json);
    while (kv_json_next_key(json, &key)) {
        if (kv_str_eq(key, "resourceVersion")) {
            kv_json_copy_str(json, &scratch, k->version, sizeof(k->version));
        } else if (kv_str_eq(key, "continue") && !kv_json_null(json)) {
            struct kv_str text = kv_json_str(json, &scratch);

            kv_buf_append(ret_continue, text.p, text.len);
        } else if (!kv_str_eq(key, "continue")) {
            kv_json_skip(json);
        }
    }
    kv_buf_fini(&scratch);
}

static int read_page(struct kube *k, struct kv_buf *ret_continue)
{
    struct kv_json json;
    struct kv_str key;

    kv_buf_clear(ret_continue);
    kv_json_init(&json, k->page.data, k->page.len);
    kv_json_object(&json);
    while (kv_json_next_key(&json, &key)) {
        if (kv_str_eq(key, "metadata"))
            read_list_metadata(k, &json, ret_continue);
        else if (kv_str_eq(key, "items"))
            read_items(k, &json);
        else
            kv_json_skip(&json);
    }
    if (kv_json_finish(&json) == 0)
        return ret_continue->error;
    ki_source_failed(k->source, "list: no list of pods: %.100s", json.error.text);
    return -EPROTO;
}

/* Read the whole list, page by page, and publish it. Returns 0 or a negative errno. */
static int list(struct kube *k)
{
    const struct ki_get request = {
        .silence_ms = LIST_SILENCE_MS, .whole_ms = LIST_PAGE_MS, .data = on_page};
    struct kv_buf more = KV_BUF_INIT;
    unsigned pages = 0;
    int rc;

    ki_table_begin(&k->pods);
    do {
        struct kv_buf url = KV_BUF_INIT;

        rc = put_url(k, &url);
        kv_buf_printf(&url, "&limit=%d", PAGE);
        if (more.len) {
            kv_buf_puts(&url, "&continue=");
            put_escaped(&url, kv_buf_cstr(&more));
        }
        kv_buf_clear(&k->page);
        k->page.limit = MAX_PAGE;
        if (rc == 0)
            rc = get(k, "list", &url, &request);
        if (k->page.error)
            ki_source_failed(k->source, "list: a page of more than %zu MiB", MAX_PAGE >> 20);
        if (rc == 0)
            rc = read_page(k, &more);
        kv_buf_fini(&url);
    } while (rc == 0 && more.len && ++pages < MAX_PAGES);
    if (rc == 0 && more.len) {
        ki_source_failed(k->source, "list: more than %d pages", MAX_PAGES);
        rc = -EMSGSIZE;
    }
    kv_buf_fini(&more);
    kv_buf_fini(&k->page);
    if (rc == 0) {
        ki_table_end(&k->pods);
        ki_table_publish(&k->pods, k->source);
    }
    return rc;
}

/* -- the watch --------------------------------------------------------------------------------- */

static bool break_off(struct kube *k, const char *why)
{
    k->broken = true;
    snprintf(k->why, sizeof(k->why), "%s", why);
    return false;
}

/* Apply an event. Returns false when the watch is over. */
static bool apply(struct kube *k, const char *type, struct kv_str object)
{
    char key[sizeof(k->pod.space) + sizeof(k->pod.name) + 1];
    struct kv_json json;

    kv_json_init(&json, object.p, object.len);
    ki_pod_read(&k->pod, &json);
    if (strcmp(type, "ERROR") == 0) {
        k->gone = k->pod.code == 410;
        return k->gone ? false : break_off(k, *k->pod.message ? k->pod.message : "an error");
    }
    snprintf(key, sizeof(key), "%s/%s", k->pod.space, k->pod.name);
    if (strcmp(type, "DELETED") == 0) {
        ki_table_remove(&k->pods, key);
    } else if (strcmp(type, "ADDED") == 0 || strcmp(type, "MODIFIED") == 0) {
        if (put_item(k, object) < 0)
            return break_off(k, ki_table_fault(&k->pods));
    }
    if (*k->pod.version)
        memcpy(k->version, k->pod.version, sizeof(k->version));
    return true;
}

static bool on_line(struct kube *k, const char *line, size_t len)
{
    struct kv_buf scratch = KV_BUF_INIT;
    struct kv_str object = {NULL, 0}, key;
    char type[16] = "";
    struct kv_json json;

    kv_json_init(&json, line, len);
    kv_json_object(&json);
    while (kv_json_next_key(&json, &key)) {
        if (kv_str_eq(key, "type")) {
            kv_json_copy_str(&json, &scratch, type, sizeof(type));
        } else if (kv_str_eq(key, "object")) {
            (void)kv_json_peek(&json);
            object.p = json.p;
            kv_json_skip(&json);
            object.len = (size_t)(json.p - object.p);
        } else {
            kv_json_skip(&json);
        }
    }
    kv_buf_fini(&scratch);
    if (kv_json_finish(&json) < 0 || !object.p)
        return break_off(k, "an event that makes no sense");
    return apply(k, type, object);
}

/* Apply the events whose lines have ended, then publish once for all of them. */
static bool on_watch(void *arg, const char *data, size_t len)
{
    struct kube *k = arg;
    bool goes_on = true;

    while (len && goes_on) {
        const char *newline = memchr(data, '\n', len);
        size_t n = newline ? (size_t)(newline - data) : len;

        kv_buf_append(&k->page, data, n);
        if (k->page.error)
            return break_off(k, "an event beyond the limit");
        data += n;
        len -= n;
        if (!newline)
            break;
        data++;
        len--;
        goes_on = !k->page.len || on_line(k, k->page.data, k->page.len);
        kv_buf_clear(&k->page);
    }
    ki_table_publish(&k->pods, k->source);
    return goes_on;
}

static void on_begin(void *arg)
{
    struct kube *k = arg;

    k->heard = true;
    ki_source_confirm(k->source);
}

/* Watch until the watch ends. Returns 0 when the next one may begin at once, else a negative errno. */
static int watch(struct kube *k)
{
    const struct ki_get request = {
        .silence_ms = WATCH_SILENCE_MS, .data = on_watch, .begins = on_begin};
    struct kv_buf url = KV_BUF_INIT;
    int rc = put_url(k, &url);

    kv_buf_printf(&url,
                  "&watch=1&allowWatchBookmarks=true&timeoutSeconds=%d&resourceVersion=", WATCH_S);
    put_escaped(&url, k->version);
    kv_buf_clear(&k->page);
    k->page.limit = MAX_EVENT;
    k->heard = k->broken = false;
    if (rc == 0)
        rc = get(k, "watch", &url, &request);
    if (k->broken)
        ki_source_failed(k->source, "watch: %s", k->why);
    kv_buf_fini(&url);
    kv_buf_fini(&k->page);
    return rc;
}

/* -- the thread -------------------------------------------------------------------------------- */

/* Wait before the next attempt: longer with each failure in a row. */
static void pause_ms(struct kube *k, unsigned failures)
{
    unsigned ms = (unsigned)MIN_PAUSE_MS << KV_MIN(failures, 6u);

    ki_source_wait(k->source, -1, (int)KV_MIN(ms, (unsigned)MAX_PAUSE_MS));
}

/* Watch again and again, until the list is needed. Returns the number of failures in a row. */
static unsigned follow(struct kube *k)
{
    unsigned failures = 0;

    while (!ki_source_is_stopped(k->source) && failures < WATCH_TRIES) {
        uint64_t begun_ns = kv_now_ns();
        int rc = watch(k);

        if (kv_now_ns() - begun_ns > STEADY_NS)
            k->gone_in_row = 0;
        if (k->pods.fault < 0) /* a pod isn't known: only a list can tell of all */
            return failures + 1;
        if (k->gone) /* usual once, but not right behind a list */
            return k->gone_in_row++;
        failures = rc == 0 || k->heard ? 0 : failures + 1;
        if (rc < 0 && k->heard && !k->broken)
            ki_source_wait(k->source, -1, MIN_PAUSE_MS); /* it has begun, and broken off */
        else if (k->broken || rc < 0)
            pause_ms(k, KV_MAX(failures, 1u));
        else if (kv_now_ns() - begun_ns < MIN_PAUSE_MS * KV_NS_PER_MS)
            ki_source_wait(k->source, -1, MIN_PAUSE_MS);
    }
    return failures;
}

static void run(struct ki_source *source)
{
    struct kube *k = source->own;
    unsigned failures = 0;

    while (!ki_source_is_stopped(source)) {
        if (list(k) == 0)
            failures = follow(k);
        else
            failures++;
        if (failures && !ki_source_is_stopped(source))
            pause_ms(k, failures);
    }
}

/* -- life -------------------------------------------------------------------------------------- */

/* Return the URL of the API server, by the variables that each pod has. NULL: there are none. */
static char *server_of_cluster(void)
{
    const char *host = getenv("KUBERNETES_SERVICE_HOST");
    const char *port = getenv("KUBERNETES_SERVICE_PORT_HTTPS");
    struct kv_buf url = KV_BUF_INIT;

    if (!host || !*host)
        return NULL;
    if (!port || !*port)
        port = getenv("KUBERNETES_SERVICE_PORT");
    kv_buf_printf(&url, strchr(host, ':') ? "https://[%s]:%s" : "https://%s:%s", host,
                  port && *port ? port : "443");
    kv_buf_putc(&url, '\0');
    return url.error ? NULL : url.data;
}

static void close_kube(struct ki_source *source)
{
    struct kube *k = source->own;

    if (!k)
        return;
    ki_table_fini(&k->pods);
    kv_buf_fini(&k->page);
    kv_buf_fini(&k->refusal);
    kv_buf_fini(&k->token);
    ki_pod_fini(&k->pod);
    ki_body_fini(&k->body);
    ki_kube_place_fini(&k->place);
    free(k->server);
    free(k);
}

static int open_kube(struct ki_source *source, struct kv_error *error)
{
    struct kube *k = calloc(1, sizeof(*k));
    size_t len;
    int rc;

    if (!k)
        return -ENOMEM;
    source->own = k;
    k->source = source;
    k->base = source->base;
    k->pods.changed = true; /* also that there is none */
    rc = ki_kube_place_read(source->where, &k->place, error);
    if (rc < 0)
        return rc;
    k->server = k->place.server ? strdup(k->place.server) : server_of_cluster();
    if (!k->server)
        return kv_fail(
            error, -EINVAL, 0,
            "no API server: KUBERNETES_SERVICE_HOST isn't set, and there is no ?server=");
    for (len = strlen(k->server); len && k->server[len - 1] == '/'; len--)
        k->server[len - 1] = '\0';
    return 0;
}

const struct ki_source_ops ki_source_kubernetes = {.scheme = "kubernetes:",
                                                   .form = "kubernetes:[NAMESPACE]/SELECTOR",
                                                   .check = check,
                                                   .open = open_kube,
                                                   .run = run,
                                                   .close = close_kube};
