// SPDX-License-Identifier: Apache-2.0
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

#include "base/args/args.h"
#include "base/core/clock.h"
#include "cli/client/http.h"
#include "cli/client/token.h"
#include "cli/commands.h"
#include "cli/top/top.h"

struct options {
    const char *url;
    const char *auth_token_file;
    const char *cacert;
    uint64_t interval_ms;
    uint64_t timeout_ms;
    bool once, json;
};

static const struct kv_arg ARGS[] = {
    {.name = "url",
     .type = KV_ARG_STR,
     .offset = offsetof(struct options, url),
     .value = "URL",
     .help = "The kv-indexer to watch. Default: http://127.0.0.1:8090."},
    {.name = "auth-token-file",
     .type = KV_ARG_STR,
     .offset = offsetof(struct options, auth_token_file),
     .value = "FILE",
     .help = "Send the first line of FILE to the indexer as bearer token."},
    {.name = "cacert",
     .type = KV_ARG_STR,
     .offset = offsetof(struct options, cacert),
     .value = "FILE",
     .help = "Trust the indexer by the PEM authorities in FILE instead of the system's."},
    {.name = "interval",
     .type = KV_ARG_TIME,
     .offset = offsetof(struct options, interval_ms),
     .value = "TIME",
     .min = 100,
     .help = "Time between two looks. Default: 1s."},
    {.name = "timeout",
     .type = KV_ARG_TIME,
     .offset = offsetof(struct options, timeout_ms),
     .value = "TIME",
     .min = 100,
     .help = "Longest wait for the answers of one look. Default: 5s."},
    {.name = "once",
     .type = KV_ARG_FLAG,
     .offset = offsetof(struct options, once),
     .help = "Look once and end."},
    {.name = "json",
     .type = KV_ARG_FLAG,
     .offset = offsetof(struct options, json),
     .help = "One JSON object a line for each look."},
};

static const struct kv_args_program PROGRAM = {
    .name = "kvasir top",
    .usage = "[URL] [--once] [--json]",
    .brief = "watch a running kv-indexer: its workers, streams and index",
    .summary = "Shows the workers of a running kv-indexer, how their event streams do, and the\n"
               "size of the index, every second until q or ^C. URL alone is --url URL.",
    .env = "KVASIR_TOP",
    .args = ARGS,
    .n_args = KV_COUNT(ARGS),
};

static atomic_bool stop;

static void on_signal(int number)
{
    (void)number;
    atomic_store(&stop, true);
}

static int get(struct kc_http *http, const char *path, struct kv_buf *ret, struct kv_error *error)
{
    const struct kv_buf *body;
    int status = kc_http_request(http, path, KC_BODY_NONE, NULL, 0, &body, error);

    if (status < 0)
        return status;
    if (status != 200)
        return kv_fail(error, -EPROTO, 0, "GET %s: status %d%s", path, status,
                       status == 404 ? "; is that server a kv-indexer?"
                                     : kc_http_advice(http, status));
    kv_buf_clear(ret);
    kv_buf_append(ret, body->data, body->len);
    return ret->error ? kv_fail(error, ret->error, 0, "out of memory") : 0;
}

/* Set the request's timeout to the time left until @deadline_ns. */
static void limit(struct kc_http *http, uint64_t deadline_ns)
{
    kc_http_set_timeout(http, (uint64_t)kv_ms_until(deadline_ns, kv_now_ns()));
}

static int look(struct kc_http *http, uint64_t timeout_ms, struct kc_top *top,
                struct kv_error *error)
{
    struct kv_buf workers = KV_BUF_INIT, metrics = KV_BUF_INIT;
    uint64_t deadline_ns = kv_now_ns() + timeout_ms * KV_NS_PER_MS;
    int rc;

    limit(http, deadline_ns);
    rc = get(http, "/workers", &workers, error);
    limit(http, deadline_ns);
    if (rc == 0)
        rc = get(http, "/metrics?detail=true", &metrics, error);
    if (rc == 0)
        rc = kc_top_read(&workers, &metrics, top, error);
    top->at_ns = kv_now_ns();
    kv_buf_fini(&workers);
    kv_buf_fini(&metrics);
    return rc;
}

/* Return the number of rows that fit below the head on this terminal, and its width. */
static size_t rows_that_fit(size_t *ret_columns)
{
    struct winsize size;

    *ret_columns = SIZE_MAX;
    if (!isatty(STDOUT_FILENO) || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) < 0)
        return SIZE_MAX;
    if (size.ws_col)
        *ret_columns = size.ws_col;
    return size.ws_row < 10 ? SIZE_MAX : size.ws_row - 7U;
}

/* Return true when q was pressed. Waits up to 50 ms for a key. */
static bool q_is_pressed(bool keys)
{
    struct pollfd input = {.fd = STDIN_FILENO, .events = POLLIN};
    char key;

    if (poll(&input, keys ? 1 : 0, 50) <= 0 || read(STDIN_FILENO, &key, 1) != 1)
        return false;
    return key == 'q' || key == 'Q';
}

static void wait_ms(uint64_t ms, bool keys)
{
    uint64_t deadline_ns = kv_now_ns() + ms * KV_NS_PER_MS;

    while (!atomic_load(&stop) && kv_now_ns() < deadline_ns)
        if (q_is_pressed(keys))
            atomic_store(&stop, true);
}

/* Read keys one by one without echo. Returns false when standard input is no terminal. */
static bool begin_keys(struct termios *ret_before)
{
    struct termios now;

    if (!isatty(STDIN_FILENO) || tcgetattr(STDIN_FILENO, ret_before) < 0)
        return false;
    now = *ret_before;
    now.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    return tcsetattr(STDIN_FILENO, TCSANOW, &now) == 0;
}

/* Print the table, or @error's text when @rc is a failure. */
static void show(const struct options *options, const struct kc_top *now,
                 const struct kc_top *before, const char *url, int rc, const char *error)
{
    struct kv_buf text = KV_BUF_INIT;
    size_t columns, rows = rows_that_fit(&columns);

    if (before && !before->at_ns)
        before = NULL;
    if (rc < 0 && !options->json)
        printf("%s\n", error);
    else if (rc < 0)
        fprintf(stderr, "kvasir top: %s\n", error);
    else if (!options->json)
        kc_top_print(now, before, url, rows, columns, stdout);
    else
        kc_top_write_json(now, before, &text);
    if (text.len)
        fwrite(text.data, 1, text.len, stdout);
    kv_buf_fini(&text);
}

static int watch(struct kc_http *http, const struct options *options, struct kv_error *error)
{
    struct kc_top tops[2] = {{0}, {0}};
    bool tty = isatty(STDOUT_FILENO) && !options->once && !options->json, keys;
    struct termios terminal;
    int rc = 0;

    keys = tty && begin_keys(&terminal);

    for (unsigned i = 0; !atomic_load(&stop); i++) {
        struct kc_top *now = &tops[i % 2], *before = &tops[(i + 1) % 2];

        rc = look(http, options->timeout_ms, now, error);
        /*
         * Go on when an indexer that answered before goes away; give up on one that never answered.
         */
        if (rc < 0 && (i == 0 || (rc != -ECONNREFUSED && rc != -ETIMEDOUT)))
            break;
        if (tty)
            fputs("\033[H\033[J", stdout);
        show(options, now, before, kc_http_url(http), rc, error->text);
        rc = 0;
        if (!tty && !options->once && !options->json)
            putchar('\n');
        if (fflush(stdout) != 0)
            rc = kv_fail(error, -EIO, 0, "can't write standard output");
        if (rc < 0 || options->once)
            break;
        wait_ms(options->interval_ms, keys);
    }
    if (keys)
        tcsetattr(STDIN_FILENO, TCSANOW, &terminal);
    kc_top_fini(&tops[0]);
    kc_top_fini(&tops[1]);
    return rc;
}

int kc_top_main(int argc, char **argv)
{
    struct options options = {
        .url = "http://127.0.0.1:8090", .interval_ms = 1000, .timeout_ms = 5000};
    const struct sigaction action = {.sa_handler = on_signal};
    struct kc_http *http = NULL;
    struct kv_error error = {0};
    char token[KC_TOKEN_MAX + 1] = "";
    struct kv_arg_list rest = {.n = 0};
    int rc = kv_args_parse(&PROGRAM, argc, argv, &options, &rest, &error);

    if (rc == 0 && rest.n > 1)
        rc = kv_fail(&error, -EINVAL, 0, "one URL at a time, not %zu", rest.n);
    if (rc == 0 && rest.n)
        options.url = rest.items[0];
    if (rc == 0 && options.auth_token_file)
        rc = kc_token_read(options.auth_token_file, token, &error);
    if (rc != 0) {
        if (rc < 0)
            fprintf(stderr, "kvasir top: %s\n", error.text);
        return rc < 0 ? 2 : 0;
    }
    sigaction(SIGINT, &action, NULL);
    sigaction(SIGTERM, &action, NULL);
    rc = kc_http_create(options.url, token[0] ? token : NULL, &http);
    if (rc < 0)
        kv_fail(&error, rc, 0, "not a usable URL: %.150s", options.url);
    else if (options.cacert)
        kc_http_set_cacert(http, options.cacert);
    if (rc == 0)
        rc = watch(http, &options, &error);
    if (rc < 0)
        fprintf(stderr, "kvasir top: %s%s\n", error.text,
                rc == -ECONNREFUSED ? "; is a kv-indexer running there? --url names another" : "");
    kc_http_destroy(http);
    return rc < 0 ? 1 : 0;
}
