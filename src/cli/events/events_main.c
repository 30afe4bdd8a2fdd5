// SPDX-License-Identifier: Apache-2.0
/* `kvasir events`: parse and dispatch. */
#include "cli/events/events.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>

#include "cli/commands.h"
#include "cli/events/record.h"
#include "cli/events/say.h"
#include "cli/show/bar.h"

#define AT(field) offsetof(struct kc_events_opts, field)

#define JSON_ARG                                                   \
    {                                                              \
        .name = "json", .type = KV_ARG_FLAG, .offset = AT(json),   \
        .help = "Print JSON objects, one a line, instead of text." \
    }
#define RECORD_ARG                                                                   \
    {                                                                                \
        .name = "record", .type = KV_ARG_STR, .offset = AT(record), .value = "FILE", \
        .help = "Write all messages, as they come, to FILE, which must not exist."   \
    }

#define DURABLE_ARGS                                                                            \
    {.name = "stream",                                                                          \
     .type = KV_ARG_STR,                                                                        \
     .offset = AT(durable.stream),                                                              \
     .value = "NAME",                                                                           \
     .help = "With --durable: the JetStream stream."},                                          \
    {                                                                                           \
        .name = "durable", .type = KV_ARG_STR, .offset = AT(durable.name), .value = "NAME",     \
        .help =                                                                                 \
            "Of a JetStream stream: take the messages that no command of this NAME has taken, " \
            "from the stream's first one on, each at least once."                               \
    }

static const struct kv_arg TAIL_ARGS[] = {
    {.name = "batches",
     .type = KV_ARG_U64,
     .offset = AT(batches),
     .value = "N",
     .min = 1,
     .help = "End after N messages. Default: at ^C."},
    {.name = "time",
     .type = KV_ARG_TIME,
     .offset = AT(time_ms),
     .value = "TIME",
     .min = 1,
     .help = "End after that time. Default: at ^C."},
    RECORD_ARG,
    JSON_ARG,
    DURABLE_ARGS,
    KVP_NATS_ARGS(struct kc_events_opts, nats),
};

static const struct kv_arg STAT_ARGS[] = {
    {.name = "batches",
     .type = KV_ARG_U64,
     .offset = AT(batches),
     .value = "N",
     .min = 1,
     .help = "End after N messages, if they come before --time is over."},
    {.name = "time",
     .type = KV_ARG_TIME,
     .offset = AT(time_ms),
     .value = "TIME",
     .min = 1,
     .help = "How long to listen. Default: 10s."},
    JSON_ARG,
    KVP_NATS_ARGS(struct kc_events_opts, nats),
};

static const struct kv_arg REPLAY_ARGS[] = {
    {.name = "to",
     .type = KV_ARG_STR,
     .offset = AT(to),
     .value = "URL",
     .help =
         "Of a file: bind a publisher to URL (tcp://ADDRESS:PORT or ipc://PATH), wait for the "
         "first subscriber, and send it all messages. Or publish messages that came over NATS to "
         "their subjects on the server at URL (nats://HOST:PORT). Default: print them."},
    {.name = "fast",
     .type = KV_ARG_FLAG,
     .offset = AT(fast),
     .help = "With --to: without the pauses that were between the messages."},
    {.name = "from",
     .type = KV_ARG_U64,
     .offset = AT(from),
     .value = "N",
     .help = "Of a replay endpoint: the first batch to ask for. Default: 0."},
    {.name = "timeout",
     .type = KV_ARG_TIME,
     .offset = AT(timeout_ms),
     .value = "TIME",
     .min = 1,
     .help = "Of a replay endpoint: longest wait for the next answer. Default: 10s."},
    RECORD_ARG,
    JSON_ARG,
    KVP_NATS_ARGS(struct kc_events_opts, nats),
};

const struct kc_events_command kc_events_commands[KC_EVENTS_COMMANDS] = {
    {"tail", kc_events_tail, "URL", TAIL_ARGS, KV_COUNT(TAIL_ARGS),
     "print each event of a publisher as it comes",
     "Subscribes to the KV events at URL and prints a line for each event, for each gap in the\n"
     "batch numbers, and for each message that is no batch."},
    {"stat", kc_events_stat, "URL", STAT_ARGS, KV_COUNT(STAT_ARGS),
     "listen for a while, and say who publishes what",
     "Subscribes to the KV events at URL and counts what comes: batches, events, blocks, bytes,\n"
     "gaps, encodings, and what can't be read, by publisher. When nothing comes, says how far it\n"
     "got and what to look at. On a terminal it shows the counts every second."},
    {"replay", kc_events_replay, "FILE|URL", REPLAY_ARGS, KV_COUNT(REPLAY_ARGS),
     "print or publish recorded events, or ask an engine for those it has kept",
     "Prints the messages of a FILE that --record wrote, or publishes them again. Of a URL\n"
     "(tcp://HOST:PORT or ipc://PATH of an engine's replay endpoint), asks for the batches that "
     "the\n"
     "engine still has, and prints them."},
};

static const char FOOTER[] =
    "URL is tcp://HOST:PORT, ipc://PATH, or bind:tcp://*:PORT for engines that connect; with\n"
    "#TOPIC behind it only messages of this topic count. Or nats://HOST:PORT/SUBJECT (tls://), "
    "whose\n"
    "subject is kvasir.> if left out.\n\n"
    "Exit status: 0 done; 1 no batch came, or a message that is none; 2 usage; 3 no connection, "
    "or\n"
    "no answer; 5 another failure; 130 interrupted before the end.";

static void usage(FILE *out)
{
    fputs("usage: kvasir events COMMAND URL [OPTION ...]\n\n", out);
    for (size_t i = 0; i < KC_EVENTS_COMMANDS; i++)
        fprintf(out, "  %-7s %-9s %s\n", kc_events_commands[i].name, kc_events_commands[i].takes,
                kc_events_commands[i].help);
    fprintf(out,
            "\n%s\n\n"
            "  kvasir events stat tcp://127.0.0.1:5557\n"
            "  kvasir events tail tcp://127.0.0.1:5557 --record monday.kve\n"
            "  kvasir events replay monday.kve --to tcp://127.0.0.1:5557\n\n"
            "`kvasir events COMMAND --help` says more.\n",
            FOOTER);
}

int kc_events_fail(const struct kc_events_call *call, int status, const char *fmt, ...)
{
    va_list args;

    fprintf(stderr, "kvasir events %s: ", call->command);
    va_start(args, fmt);
    vfprintf(stderr, fmt, args);
    va_end(args);
    fputc('\n', stderr);
    return status;
}

int kc_events_fail_open(const struct kc_events_call *call, const struct kv_error *error)
{
    int status = error->code == -EINVAL                                        ? KC_EVENTS_USAGE
                 : error->code == -EADDRINUSE || error->code == -EADDRNOTAVAIL ? KC_EVENTS_UNREACHED
                                                                               : KC_EVENTS_FAILED;

    return kc_events_fail(call, status, "%s", error->text);
}

/* -- messages ---------------------------------------------------------------------------------- */

int kc_events_begin(struct kc_events_call *call)
{
    int rc = 0;

    call->follower.write = call->opts.json ? kc_say_json : kc_say_text;
    if (call->opts.record) {
        call->record = fopen(call->opts.record, "wxe");
        rc = call->record ? kc_record_begin(call->record) : -errno;
    }
    if (rc < 0)
        return kc_events_fail(call, KC_EVENTS_FAILED, "%s: %s", call->opts.record, strerror(-rc));
    if (!call->opts.json)
        fputs(kc_say_head, stdout);
    fflush(stdout);
    return 0;
}

int kc_events_take(void *arg, const struct kc_message *message)
{
    struct kc_events_call *call = arg;
    struct kv_buf *out = &call->follower.out;
    int rc = call->record ? kc_record_write(call->record, message) : 0;

    if (rc < 0)
        return kc_events_fail(call, KC_EVENTS_FAILED, "%s: %s", call->opts.record, strerror(-rc));
    call->recorded++;
    if (call->record && call->opts.durable.name &&
        fflush(call->record)) /* before it counts as taken */
        return kc_events_fail(call, KC_EVENTS_FAILED, "%s: %s", call->opts.record, strerror(errno));
    rc = kc_follower_take(&call->follower, message);
    if (rc < 0 || out->error)
        return kc_events_fail(call, KC_EVENTS_FAILED, "out of memory");
    if (out->len)
        fwrite(out->data, 1, out->len, stdout);
    kv_buf_clear(out);
    return fflush(stdout) ? kc_events_fail(call, KC_EVENTS_FAILED, "can't write standard output")
                          : 0;
}

/* Return the status that follows from what came. */
static int judge(const struct kc_events_call *call)
{
    uint64_t batches = 0, unreadable = 0;
    struct kc_publisher *p = NULL;

    TAILQ_FOREACH(p, &call->follower.publishers, entry)
    {
        batches += p->counts.batches;
        unreadable += p->counts.unreadable;
    }
    return batches && !unreadable ? KC_EVENTS_OK : KC_EVENTS_BAD;
}

int kc_events_end(struct kc_events_call *call, int rc)
{
    if (call->record && fclose(call->record) != 0 && rc == 0)
        rc = kc_events_fail(call, KC_EVENTS_FAILED, "%s: %s", call->opts.record, strerror(errno));
    call->record = NULL;
    return rc ? rc : judge(call);
}

/* -- the command line -------------------------------------------------------------------------- */

static int start(const struct kc_events_command *command, int argc, char **argv)
{
    char name[64], takes[64];
    const struct kv_args_program program = {.name = name,
                                            .usage = takes,
                                            .brief = command->help,
                                            .summary = command->summary,
                                            .footer = FOOTER,
                                            .args = command->args,
                                            .n_args = command->n_args};
    struct kc_events_call call = {.command = command->name, .opts.timeout_ms = 10000};
    struct kv_arg_list rest = {.n = 0};
    struct kv_error error = {0};
    int rc;

    snprintf(name, sizeof(name), "kvasir events %s", command->name);
    snprintf(takes, sizeof(takes), "%s [OPTION ...]", command->takes);
    rc = kv_args_parse(&program, argc, argv, &call.opts, &rest, &error);
    if (rc == 0 && rest.n != 1)
        rc = kv_fail(&error, -EINVAL, 0, "wants %s; --help says more", command->takes);
    if (rc < 0)
        return kc_events_fail(&call, KC_EVENTS_USAGE, "%s", error.text);
    if (rc > 0)
        return KC_EVENTS_OK;
    call.url = rest.items[0];
    kc_bar_catch_signals();
    kc_follower_init(&call.follower, NULL);
    rc = command->run(&call);
    kc_follower_fini(&call.follower);
    if (fflush(stdout) != 0 && rc == KC_EVENTS_OK)
        rc = KC_EVENTS_FAILED;
    return rc;
}

int kc_events_main(int argc, char **argv)
{
    static const struct kc_group group = {"kvasir events", kc_events_commands, KC_EVENTS_COMMANDS,
                                          sizeof(kc_events_commands[0]), usage};
    int status;
    long found = kc_find_command(&group, argc, argv, &status);

    return found < 0 ? status : start(&kc_events_commands[found], argc - 1, argv + 1);
}
