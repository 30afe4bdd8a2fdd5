// SPDX-License-Identifier: Apache-2.0
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/args/args.h"
#include "base/core/clock.h"
#include "cli/client/token.h"
#include "cli/commands.h"
#include "cli/doctor/doctor.h"
#include "cli/show/bar.h"
#include "indexer/zmq/place.h"

#define AT(field) offsetof(struct kc_doctor_opts, field)
#define STR(name_, field, value_, help_)                                             \
    {                                                                                \
        .name = (name_), .type = KV_ARG_STR, .offset = AT(field), .value = (value_), \
        .help = (help_)                                                              \
    }

static const struct kv_arg ARGS[] = {
    {.name = "kv-indexer", .type = KV_ARG_GROUP},
    STR("url", url, "URL", "The kv-indexer to ask. Default: http://127.0.0.1:8090."),
    STR("auth-token-file", auth_token_file, "FILE",
        "Send the first line of FILE to the indexer as bearer token."),
    STR("cacert", cacert, "FILE",
        "Trust the indexer, and the engine's HTTP server, by the PEM authorities in FILE instead "
        "of the system's."),
    {.name = "The engine", .type = KV_ARG_GROUP},
    STR("engine", engine, "ENDPOINT",
        "The engine's event endpoint: tcp://HOST:PORT or ipc://PATH. Default: that of the only "
        "registered worker."),
    STR("replay", replay, "ENDPOINT",
        "The engine's replay endpoint. Default: the one it is registered with."),
    STR("engine-url", engine_url, "URL",
        "The engine's HTTP server, for its /tokenize: http://HOST:8000."),
    STR("engine-token-file", engine_token_file, "FILE",
        "Send the first line of FILE to that server as bearer token."),
    STR("engine-model", engine_model, "NAME",
        "Name of the model on that server. Default: --model, or the registered name."),
    {.name = "What the router asks", .type = KV_ARG_GROUP},
    STR("model", model, "NAME", "The router's model_name. Default: that of the engine's worker."),
    STR("tenant", tenant, "NAME", "The router's tenant_id. Default: that of the engine's worker."),
    STR("lora-name", lora_name, "NAME", "The router's lora_name of the prompt."),
    STR("cache-salt", cache_salt, "SALT", "The router's cache_salt of the prompt."),
    STR("tokens", tokens, "FILE",
        "The prompt's token ids, as the router sends them: a JSON array, or an object with "
        "\"token_ids\". - reads standard input."),
    STR("text", text, "FILE",
        "The prompt's text, of which the engine's /tokenize makes tokens: compared with --tokens, "
        "or asked for in their place."),
    STR("chat", chat, "FILE",
        "The same, of a JSON array of messages, under the engine's template."),
    {.name = "The run", .type = KV_ARG_GROUP},
    {.name = "time",
     .type = KV_ARG_TIME,
     .offset = AT(time_ms),
     .value = "TIME",
     .min = 1,
     .help = "How long to listen to the engine's events. Default: 3s."},
    {.name = "timeout",
     .type = KV_ARG_TIME,
     .offset = AT(timeout_ms),
     .value = "TIME",
     .min = 100,
     .help = "Longest wait for one answer. Default: 5s."},
    {.name = "json",
     .type = KV_ARG_FLAG,
     .offset = AT(json),
     .help = "Print one JSON object instead of text."},
};

static const struct kv_args_program PROGRAM = {
    .name = "kvasir doctor",
    .usage = "[OPTION ...]",
    .brief = "ask a kv-indexer and an engine, and say what is wrong and what to do",
    .summary =
        "Asks a running kv-indexer and an engine, and says in words what is wrong and what to do:\n"
        "ports, versions, clocks, limits, block sizes, registrations, the event stream, replays, "
        "and\n"
        "whether the tokens that a router sends meet the blocks that the engine has cached. "
        "Changes\n"
        "nothing.",
    .footer = "  kvasir doctor --engine tcp://host1:5557 --replay tcp://host1:5558\n"
              "  kvasir doctor --engine tcp://host1:5557 --engine-url http://host1:8000 \\\n"
              "    --tokens prompt.json --text prompt.txt\n\n"
              "Exit status: 0 all is well; 1 findings; 2 a question couldn't be asked, or a wrong "
              "option;\n130 interrupted.",
    .env = "KVASIR_DOCTOR",
    .args = ARGS,
    .n_args = KV_COUNT(ARGS),
};

static int open_http(const char *url, const char *token_file, const char *cacert,
                     struct kc_http **ret, uint64_t timeout_ms, struct kv_error *error)
{
    char token[KC_TOKEN_MAX + 1] = "";
    int rc = token_file ? kc_token_read(token_file, token, error) : 0;

    if (rc < 0)
        return rc;
    rc = kc_http_create(url, token[0] ? token : NULL, ret);
    if (rc < 0)
        return kv_fail(error, rc, 0, "not a usable URL: %.150s", url);
    if (cacert)
        kc_http_set_cacert(*ret, cacert);
    kc_http_set_timeout(*ret, timeout_ms);
    return 0;
}

/* Read --tokens into doctor->prompt. */
static int read_tokens(struct kc_doctor *doctor, struct kv_error *error)
{
    const char *path = doctor->opts.tokens;
    struct kv_buf text = KV_BUF_INIT;
    FILE *file = strcmp(path, "-") == 0 ? stdin : fopen(path, "re");
    char chunk[16384];
    size_t n;
    int rc = 0;

    if (!file)
        return kv_fail(error, -errno, 0, "%.150s: %s", path, strerror(errno));
    text.limit = (size_t)64 << 20;
    while ((n = fread(chunk, 1, sizeof(chunk), file)) > 0)
        kv_buf_append(&text, chunk, n);
    if (file != stdin)
        fclose(file);
    if (text.error || kc_tokens_read(text.data ? text.data : "", text.len, &doctor->prompt) < 0)
        rc = kv_fail(error, -EINVAL, 0, "%.150s: not a JSON array of token ids", path);
    kv_buf_fini(&text);
    return rc;
}

static int check_endpoint(const char *option, const char *url, struct kv_error *error)
{
    struct ki_place place;
    const char *why = NULL;

    if (!url || ki_place_parse(url, &place, &why) == 0)
        return 0;
    return kv_fail(error, -EINVAL, 0, "--%s: not a usable endpoint: %.120s: %s", option, url, why);
}

static int prepare(struct kc_doctor *doctor, int argc, char **argv, struct kv_error *error)
{
    struct kc_doctor_opts *opts = &doctor->opts;
    int rc = kv_args_parse(&PROGRAM, argc, argv, opts, NULL, error);

    if (rc)
        return rc;
    rc = check_endpoint("engine", opts->engine, error);
    if (rc == 0)
        rc = check_endpoint("replay", opts->replay, error);
    if (rc == 0 && (opts->text || opts->chat) && !opts->engine_url)
        rc = kv_fail(error, -EINVAL, 0, "--text and --chat need --engine-url: its /tokenize");
    if (rc == 0 && opts->tokens)
        rc = read_tokens(doctor, error);
    if (rc == 0)
        rc = open_http(opts->url, opts->auth_token_file, opts->cacert, &doctor->http,
                       opts->timeout_ms, error);
    if (rc == 0 && opts->engine_url)
        rc = open_http(opts->engine_url, opts->engine_token_file, opts->cacert,
                       &doctor->engine_http, opts->timeout_ms, error);
    return rc;
}

/* Choose the engine: the one of --engine, or the only registered one that can be connected to. */
static void choose_engine(struct kc_doctor *doctor)
{
    const struct kc_listener *only = doctor->listeners.items;

    if (!doctor->opts.engine && doctor->listeners.n == 1 && only->endpoint[0] &&
        strncmp(only->endpoint, "bind:", 5) != 0) {
        memcpy(doctor->endpoint, only->endpoint, sizeof(doctor->endpoint));
        doctor->opts.engine = doctor->endpoint;
    }
    kc_find_registered(doctor);
    if (doctor->opts.replay)
        snprintf(doctor->replay, sizeof(doctor->replay), "%s", doctor->opts.replay);
    else if (doctor->registered)
        memcpy(doctor->replay, doctor->registered->replay_endpoint, sizeof(doctor->replay));
}

/* Read the registrations until kv-indexer has taken the engine's newest batch, or time is over. */
static int wait_for_batches(struct kc_doctor *doctor)
{
    uint64_t deadline_ns = kv_ns_after(kv_now_ns(), doctor->opts.timeout_ms);
    const struct timespec pause = {.tv_nsec = 50 * 1000 * 1000};
    int rc;

    for (;;) {
        rc = kc_read_listeners(doctor);
        kc_find_registered(doctor);
        if (rc < 0 || !doctor->registered || !doctor->engine.has_last ||
            !doctor->registered->connected || kv_now_ns() >= deadline_ns ||
            (doctor->registered->has_seq && doctor->registered->last_seq >= doctor->engine.last))
            return rc;
        nanosleep(&pause, NULL);
    }
}

static int examine(struct kc_doctor *doctor)
{
    int rc = kc_ask_indexer(doctor);

    if (rc < 0)
        return rc;
    choose_engine(doctor);
    if (!doctor->opts.engine)
        kc_well(&doctor->report, "no engine was asked: name one with --engine");
    else if (strncmp(doctor->opts.engine, "bind:", 5) == 0)
        kc_well(&doctor->report, "no engine was asked: engines connect to kv-indexer at %s",
                doctor->opts.engine);
    else
        rc = kc_ask_engine(doctor);
    if (rc == 0 && doctor->indexer_answers) {
        rc = wait_for_batches(doctor);
        if (rc == 0)
            rc = kc_check_registered(doctor);
        rc = rc == -EPROTO ? 0 : rc;
    }
    return rc < 0 ? rc : kc_check_agreement(doctor);
}

static int print(const struct kc_doctor *doctor)
{
    const char *term = getenv("TERM");
    bool color = isatty(STDOUT_FILENO) && !getenv("NO_COLOR") && term && strcmp(term, "dumb") != 0;
    struct kv_buf out = KV_BUF_INIT;
    int rc;

    if (doctor->opts.json)
        kc_report_json(doctor, &out);
    else
        kc_report_text(doctor, color, &out);
    rc = out.error;
    if (rc == 0 && (fwrite(out.data, 1, out.len, stdout) != out.len || fflush(stdout)))
        rc = -EIO;
    kv_buf_fini(&out);
    return rc;
}

static void free_doctor(struct kc_doctor *doctor)
{
    kc_http_destroy(doctor->http);
    kc_http_destroy(doctor->engine_http);
    kc_listeners_fini(&doctor->listeners);
    kv_buf_fini(&doctor->prompt);
    free(doctor->engine.first);
    free(doctor);
}

int kc_doctor_main(int argc, char **argv)
{
    struct kc_doctor *doctor = calloc(1, sizeof(*doctor));
    struct kv_error error = {0};
    int rc, status = 2;

    if (!doctor)
        return 2;
    doctor->opts = (struct kc_doctor_opts){
        .url = "http://127.0.0.1:8090", .time_ms = 3000, .timeout_ms = 5000};
    rc = prepare(doctor, argc, argv, &error);
    if (rc > 0)
        status = 0;
    if (rc == 0) {
        kc_bar_catch_signals();
        rc = examine(doctor);
        if (rc == 0)
            rc = print(doctor);
        if (rc == 0)
            status = kc_report_status(&doctor->report);
    }
    if (rc == -EINTR)
        status = 130;
    else if (rc < 0)
        fprintf(stderr, "kvasir doctor: %s\n", error.text[0] ? error.text : strerror(-rc));
    free_doctor(doctor);
    return status;
}
