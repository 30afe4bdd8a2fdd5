// SPDX-License-Identifier: Apache-2.0
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "cli/replay.h"
#include "cli/store.h"
#include "store/store.h"
#include "store/uri.h"

#define AT(field) offsetof(struct kc_store_opts, field)

static const struct kv_arg JSON_ROW = {.name = "json",
                                       .type = KV_ARG_FLAG,
                                       .offset = AT(json),
                                       .help = "Print one JSON object instead of text."};

/* Options of each command. parse() adds --json and --quiet. */
static const struct kv_arg SAVE_ARGS[] = {
    {.name = "format",
     .type = KV_ARG_CHOICE,
     .offset = AT(format),
     .value = "FORMAT",
     .choices = "auto|bytes|llama",
     .help = "How to cut it into chunks: llama for llama.cpp states, bytes for anything. "
             "Default: auto, by its first bytes."},
    {.name = "chunk",
     .type = KV_ARG_SIZE,
     .offset = AT(chunk),
     .value = "SIZE",
     .min = 4096,
     .max = 16 << 20,
     .help = "Average chunk. Default: 1MiB."},
    {.name = "chunk-tokens",
     .type = KV_ARG_U64,
     .offset = AT(chunk_tokens),
     .value = "N",
     .min = 1,
     .max = 65536,
     .help = "Tokens per chunk of a llama.cpp state. Default: 128."},
    {.name = "fingerprint",
     .type = KV_ARG_STR,
     .offset = AT(fingerprint),
     .value = "TEXT",
     .help = "Name of the model that the state belongs to; restore --fingerprint compares it."},
    {.name = "total",
     .type = KV_ARG_SIZE,
     .offset = AT(total),
     .value = "SIZE",
     .help = "Bytes that standard input will bring; for the progress bar only."},
    {.name = "verify",
     .type = KV_ARG_FLAG,
     .offset = AT(verify),
     .help = "Read all chunks back and compare them; save FILE again when some are damaged. For "
             "stores where other programs may change them: Redis, buckets."},
};

static const struct kv_arg RESTORE_ARGS[] = {
    {.name = "fingerprint",
     .type = KV_ARG_STR,
     .offset = AT(fingerprint),
     .value = "TEXT",
     .help = "Refuse an object that was saved with another fingerprint."},
    {.name = "verify-first",
     .type = KV_ARG_FLAG,
     .offset = AT(verify_first),
     .help = "Verify all chunks before the first byte is written: reads everything twice, but a "
             "pipe then gets the whole object or nothing."},
    {.name = "offset",
     .type = KV_ARG_SIZE,
     .offset = AT(offset),
     .value = "SIZE",
     .max = INT64_MAX,
     .help = "Write only the object's bytes from this one on."},
    {.name = "length",
     .type = KV_ARG_SIZE,
     .offset = AT(length),
     .value = "SIZE",
     .min = 1,
     .max = INT64_MAX,
     .help = "Write only so many bytes; only chunks that hold some of them are read."},
};

static const struct kv_arg LS_ARGS[] = {{.name = "names",
                                         .type = KV_ARG_FLAG,
                                         .offset = AT(names),
                                         .help = "Only the names: reads no manifest."},
                                        {.name = "prefix",
                                         .type = KV_ARG_STR,
                                         .offset = AT(prefix),
                                         .value = "TEXT",
                                         .help = "Only names that begin with TEXT."}};

static const struct kv_arg SHOW_ARGS[] = {{.name = "chunks",
                                           .type = KV_ARG_FLAG,
                                           .offset = AT(chunks),
                                           .help = "Also each chunk's key and length."}};

static const struct kv_arg GC_ARGS[] = {
    {.name = "grace",
     .type = KV_ARG_TIME,
     .offset = AT(grace_ms),
     .value = "TIME",
     .min = 1000,
     .help = "Keep what was used within TIME. It must be longer than any save takes. Default: 24 "
             "hours."},
    {.name = "no-grace",
     .type = KV_ARG_FLAG,
     .offset = AT(no_grace),
     .help = "Keep nothing for its youth. Only when nobody saves to the store meanwhile."},
    {.name = "opaque-too",
     .type = KV_ARG_FLAG,
     .offset = AT(opaque_too),
     .help = "Also delete what only manifests of other programs may need."},
    {.name = "prefix-age",
     .type = KV_ARG_TIME,
     .offset = AT(prefix_age_ms),
     .value = "TIME",
     .min = 1000,
     .help = "Delete chunks of prefix caches (llama.cpp) that nobody used for TIME. Default: 30 "
             "days. --grace is not about them."},
    {.name = "dry-run",
     .type = KV_ARG_FLAG,
     .offset = AT(dry_run),
     .help = "Delete nothing, say how much it would be."},
};

static const struct kv_arg BENCH_ARGS[] = {
    {.name = "size",
     .type = KV_ARG_SIZE,
     .offset = AT(size),
     .value = "SIZE",
     .min = 1 << 20,
     .max = UINT64_C(16) << 30,
     .help = "Of the object that is saved; held in memory. Default: 96MiB."},
    {.name = "rounds",
     .type = KV_ARG_U64,
     .offset = AT(rounds),
     .value = "N",
     .min = 1,
     .max = 99,
     .help = "How often; medians are shown. Default: 3."},
    {.name = "chunk",
     .type = KV_ARG_SIZE,
     .offset = AT(chunk),
     .value = "SIZE",
     .min = 1024,
     .max = 64 << 20,
     .help = "Average chunk. Default: 1MiB."},
    {.name = "yardstick",
     .type = KV_ARG_STR,
     .offset = AT(yardstick),
     .value = "DIR",
     .help = "Where the plain file is written that figures are compared with. Default: beside a "
             "store that is a path, else $TMPDIR or /tmp."},
};

static const struct command {
    const char *name;
    int (*run)(struct kc_store_call *call);
    const char *takes; /* names of the positional arguments */
    unsigned min, max; /* least and most of them, after URI */
    const struct kv_arg *args;
    size_t n_args;
    const char *help;
    const char *summary;
} COMMANDS[] = {
    {"save", kc_store_save, "URI NAME FILE", 2, 2, SAVE_ARGS, KV_COUNT(SAVE_ARGS),
     "keep a file under a name",
     "Saves FILE (- is standard input) under NAME. Chunks that the store has already are not\n"
     "written again. After status 0 the object can be restored, even if the power fails (Redis: "
     "as\n"
     "durable as the server is). A path's chunks are read and verified if they changed since the\n"
     "last time; chunks that Redis or a bucket have already are not, without --verify. After any\n"
     "other status an older object under NAME is still there, or with --verify a damaged one."},
    {"restore", kc_store_restore, "URI NAME FILE", 2, 2, RESTORE_ARGS, KV_COUNT(RESTORE_ARGS),
     "write what is under a name to a file",
     "Writes the object under NAME to FILE (- is standard output). Every chunk is verified before\n"
     "it is written. FILE appears when all of it is there, or not at all; symbolic links, pipes\n"
     "and devices are written to."},
    {"ls", kc_store_ls, "URI", 0, 0, LS_ARGS, KV_COUNT(LS_ARGS), "list the objects",
     "Lists the objects with their sizes. \"opaque\" ones were saved by other programs."},
    {"show", kc_store_show, "URI NAME", 1, 1, SHOW_ARGS, KV_COUNT(SHOW_ARGS),
     "what the manifest of an object says", "Shows what the manifest under NAME says."},
    {"verify", kc_store_verify, "URI [NAME]", 0, 1, NULL, 0, "read and check all, or one object",
     "Reads every chunk that an object needs, and compares it with its checksum. Status 1 and a\n"
     "line per problem when there are any."},
    {"gc", kc_store_gc, "URI", 0, 0, GC_ARGS, KV_COUNT(GC_ARGS),
     "delete chunks that no object needs",
     "Deletes the chunks that no manifest needs. Safe while others save, as long as no save takes\n"
     "longer than the grace time. A damaged manifest stops it."},
    {"rm", kc_store_rm, "URI NAME", 1, 1, NULL, 0, "remove an object",
     "Removes the object under NAME. Its chunks go with the next `kvasir store gc`."},
    {"stats", kc_store_stats, "URI", 0, 0, NULL, 0, "number and size of objects and chunks",
     "Shows the figures that the store keeps of itself."},
    {"bench", kc_store_bench, "URI", 0, 0, BENCH_ARGS, KV_COUNT(BENCH_ARGS),
     "speed, beside that of a plain file",
     "Saves an object of noise (cold), saves it again (warm) and restores it, next to the same\n"
     "bytes written to a plain file with fdatasync and read back. Cleans up after itself."},
    {"conformance", kc_store_conformance, "URI", 0, 0, NULL, 0, "check a backend, or a plugin",
     "Runs the vendor checklist of kv_store_v1, and more, against the backend that URI names:\n"
     "its library is found in $KV_STORE_LIBRARY_PATH, with Kvasir's own libraries, or where the\n"
     "dynamic loader looks. The checks write and delete objects of their own. Status 1 when a\n"
     "check fails; a note is advice."},
};

static const char FOOTER[] =
    "URI is a directory, or SCHEME://... of a plugin libkv_store_SCHEME.so.\n\n"
    "Exit status: 0 done; 1 damage found, or a check failed; 2 usage; 3 the store can't be\n"
    "opened or doesn't answer; 4 no such object; 5 another failure; 130 interrupted.";

static void usage(FILE *out)
{
    fputs("usage: kvasir store COMMAND URI [ARGUMENT ...] [OPTION ...]\n\n", out);
    for (size_t i = 0; i < KV_COUNT(COMMANDS); i++)
        fprintf(out, "  %-11s %-14s %s\n", COMMANDS[i].name, COMMANDS[i].takes, COMMANDS[i].help);
    fprintf(out,
            "\n%s\n\n"
            "  kvasir store save ~/kv chat-42 slot0.bin\n"
            "  kvasir store restore ~/kv chat-42 slot0.bin\n"
            "  tar c cache | kvasir store save s3://bucket/kv nightly -\n"
            "  kvasir store gc ~/kv --dry-run\n\n"
            "`kvasir store COMMAND --help` says more, and so does kvasir-store(1).\n",
            FOOTER);
}

/* -- telling ----------------------------------------------------------------------------------- */

void kc_store_put_text(FILE *f, const char *text)
{
    const char *end = text + strlen(text);

    while (text < end) {
        unsigned char c = (unsigned char)*text;
        int n = kv_utf8_sequence(text, end);
        bool control = c < 0x20 || c == 0x7f || (n == 2 && c == 0xc2 && (text[1] & 0xe0) == 0x80);

        if (n <= 0)
            n = 1;
        else if (!control) {
            fwrite(text, 1, (size_t)n, f);
            text += n;
            continue;
        }
        for (; n > 0; n--)
            fprintf(f, "\\x%02x", (unsigned char)*text++);
    }
}

bool kc_store_tells(const struct kc_store_call *call)
{
    const kv_store_ext *ext = NULL;

    if (call->store)
        kvs_backend(call->store, NULL, &ext);
    return ext || !call->store;
}

bool kc_store_is_limited(const struct kc_store_call *call)
{
    kv_store_stats stats = {.size = sizeof(stats)};

    return call->store && kvs_stats(call->store, &stats) == 0 && stats.limit_bytes > 0 &&
           stats.limit_bytes != UINT64_MAX;
}

static bool is_outage(int rc)
{
    return rc == -ECONNREFUSED || rc == -ECONNRESET || rc == -ETIMEDOUT || rc == -EHOSTUNREACH ||
           rc == -ENETUNREACH || rc == -ENOTCONN || rc == -EHOSTDOWN || rc == -EPIPE;
}

static const char *words(const struct kc_store_call *call, int rc)
{
    switch (-rc) {
    case ENOTSUP:
        return strcmp(call->command, "stats") == 0
                   ? "the backend doesn't offer this: it has no stats"
               : strcmp(call->command, "gc") == 0
                   ? "the backend doesn't offer this: it can't list its objects and delete chunks"
                   : "the backend doesn't offer this: it can't list its objects";
    case EMEDIUMTYPE:
        return "not an object of this program's";
    case ERANGE:
        return "the object doesn't have these bytes";
    case ESTALE:
        return "saved with another fingerprint";
    case EBADMSG:
        return "damaged";
    case ENOENT:
        return kc_store_tells(call) ? "no such object"
                                    : "no such object, or the backend failed (it doesn't tell)";
    case EIO:
        return kc_store_tells(call) ? strerror(EIO) : "the backend failed (it doesn't tell why)";
    case EPROTO:
        return "the plugin broke its contract";
    case ECANCELED:
        return "interrupted";
    default:
        return strerror(-rc);
    }
}

/* Report an error, as JSON where the caller asked for JSON. */
static void tell(struct kc_store_call *call, const char *what, const char *why)
{
    FILE *f = call->data_on_stdout ? stderr : stdout;

    fprintf(stderr, "kvasir store %s: ", call->command);
    if (what) {
        kc_store_put_text(stderr, what);
        fputs(": ", stderr);
    }
    fprintf(stderr, "%s\n", why);
    if (!call->opts.json || call->printed)
        return;
    call->printed = true;
    kv_buf_fini(&call->out);
    kc_store_json_begin(call);
    kc_store_json_str(call, "error", why);
    kv_json_end_object(&call->json);
    fprintf(f, "%s\n", kv_buf_cstr(&call->out));
}

int kc_store_fail(struct kc_store_call *call, const char *what, int rc)
{
    tell(call, what, words(call, rc));
    if (rc == -EBADMSG || rc == -ESTALE)
        return KC_STORE_PROBLEMS;
    if (rc == -ENOENT)
        return KC_STORE_NOT_FOUND;
    if (is_outage(rc))
        return KC_STORE_UNREACHABLE;
    return rc == -ECANCELED ? KC_STORE_INTERRUPTED : KC_STORE_FAILED;
}

int kc_store_fail_file(struct kc_store_call *call, const char *file, int rc)
{
    tell(call, file, rc == -ECANCELED ? "interrupted" : strerror(-rc));
    return rc == -ECANCELED ? KC_STORE_INTERRUPTED : KC_STORE_FAILED;
}

int kc_store_fail_of(struct kc_store_call *call, const char *what, const char *text, int status)
{
    tell(call, what, text);
    return status;
}

int kc_store_fail_as(struct kc_store_call *call, const char *text, int status)
{
    tell(call, NULL, text);
    return status;
}

void kc_store_json_begin(struct kc_store_call *call)
{
    kv_json_writer_init(&call->json, &call->out);
    kv_json_begin_object(&call->json);
    if (call->name)
        kc_store_json_str(call, "name", call->name);
}

void kc_store_json_str(struct kc_store_call *call, const char *key, const char *value)
{
    kv_json_member_str(&call->json, key, value);
}

void kc_store_json_u64(struct kc_store_call *call, const char *key, uint64_t value)
{
    kv_json_member_u64(&call->json, key, value);
}

void kc_store_json_double(struct kc_store_call *call, const char *key, double value)
{
    kv_json_member_double(&call->json, key, value);
}

int kc_store_json_end(struct kc_store_call *call, FILE *f, int status)
{
    kv_json_end_object(&call->json);
    kv_buf_putc(&call->out, '\n');
    call->printed = true;
    if (call->out.error || fwrite(call->out.data, 1, call->out.len, f) != call->out.len ||
        fflush(f) != 0)
        return kc_store_fail(call, "writing JSON", call->out.error ? call->out.error : -EIO);
    return status;
}

const char *kc_store_format_name(enum kvs_format format)
{
    return format == KVS_FORMAT_LLAMA ? "llama" : format == KVS_FORMAT_BYTES ? "bytes" : "auto";
}

/* Parse the options of all commands and @command's own. */
static int parse(const struct command *command, int argc, char **argv, struct kc_store_call *call,
                 struct kv_arg_list *rest, struct kv_error *error)
{
    struct kv_arg args[16];
    char name[64], takes[64];
    struct kv_args_program program = {.name = name,
                                      .usage = takes,
                                      .brief = command->help,
                                      .summary = command->summary,
                                      .footer = FOOTER,
                                      .args = args};

    snprintf(name, sizeof(name), "kvasir store %s", command->name);
    snprintf(takes, sizeof(takes), "%s [OPTION ...]", command->takes);
    for (size_t i = 0; i < command->n_args; i++)
        args[program.n_args++] = command->args[i];
    args[program.n_args++] = JSON_ROW;
    args[program.n_args++] = (struct kv_arg){
        .name = "quiet", .type = KV_ARG_FLAG, .offset = AT(quiet), .help = "No progress bar."};
    return kv_args_parse(&program, argc, argv, &call->opts, rest, error);
}

/* Report a failed open with advice. The library has logged the exact reason. */
int kc_store_fail_open(struct kc_store_call *call, int rc)
{
    const char *sep = strstr(call->uri, "://");
    bool plugin = sep && *call->uri != '/' && *call->uri != '.';
    char text[400];

    if (rc == -ENOENT && plugin)
        snprintf(text, sizeof(text),
                 "no plugin libkv_store_%.*s.so: not in $KV_STORE_LIBRARY_PATH, nor with Kvasir's "
                 "libraries, nor where the loader looks",
                 (int)KV_MIN(sep - call->uri, 64), call->uri);
    else
        snprintf(text, sizeof(text), "can't open the store: %s",
                 rc == -EPROTO          ? "its plugin can't be used"
                 : rc == -EINVAL        ? "its URI can't be used"
                 : rc == -EIO && plugin ? "its plugin refused it"
                                        : strerror(-rc));
    return kc_store_fail_as(call, text, KC_STORE_UNREACHABLE);
}

/* True for commands that may create a store. Others must not make one of a mistyped path. */
static bool makes_store(const struct command *command)
{
    return command->run == kc_store_save || command->run == kc_store_bench;
}

static int run(const struct command *command, struct kc_store_call *call)
{
    int rc = 0, status;

    if (command->run != kc_store_conformance)
        rc = makes_store(command) ? kvs_open(call->uri, &call->store)
                                  : kvs_open_existing(call->uri, &call->store);
    if (rc < 0)
        return kc_store_fail_open(call, rc);
    kc_bar_catch_signals();
    status = command->run(call);
    if (fflush(stdout) != 0 && status == KC_STORE_OK)
        status = KC_STORE_FAILED;
    kvs_close(call->store);
    return status;
}

static int start(const struct command *command, int argc, char **argv)
{
    struct kc_store_call call = {.command = command->name, .bar.label = command->name};
    struct kv_arg_list rest = {.n = 0};
    struct kv_error error = {0};
    int rc = parse(command, argc, argv, &call, &rest, &error), status;

    if (rc == 0 && (rest.n < command->min + 1 || rest.n > command->max + 1))
        rc = kv_fail(&error, -EINVAL, 0, "wants %s; --help says more", command->takes);
    if (rc < 0)
        fprintf(stderr, "kvasir store %s: %s\n", command->name, error.text);
    if (rc != 0)
        return rc < 0 ? KC_STORE_USAGE : KC_STORE_OK;
    call.bar.quiet = call.opts.quiet;
    call.uri = rest.items[0];
    call.name = rest.n > 1 ? rest.items[1] : NULL;
    call.file = rest.n > 2 ? rest.items[2] : NULL;
    kvs_uri_redact(call.uri, call.label, sizeof(call.label));
    status = run(command, &call);
    kv_buf_fini(&call.out);
    return status;
}

static int unknown_command(const char *name)
{
    const char *names[KV_COUNT(COMMANDS)];

    for (size_t i = 0; i < KV_COUNT(COMMANDS); i++)
        names[i] = COMMANDS[i].name;
    kv_args_no_command("kvasir store", name, names, KV_COUNT(COMMANDS));
    usage(stderr);
    return KC_STORE_USAGE;
}

int kc_store_main(int argc, char **argv)
{
    if (argc < 2 || strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        usage(stdout);
        return KC_STORE_OK;
    }
    if (strcmp(argv[1], "--help-options") == 0) {
        for (size_t i = 0; i < KV_COUNT(COMMANDS); i++)
            puts(COMMANDS[i].name);
        return KC_STORE_OK;
    }
    for (size_t i = 0; i < KV_COUNT(COMMANDS); i++)
        if (strcmp(argv[1], COMMANDS[i].name) == 0)
            return start(&COMMANDS[i], argc - 1, argv + 1);
    return unknown_command(argv[1]);
}
