// SPDX-License-Identifier: Apache-2.0
/* The commands of `kvasir store` and their options. */
#include "cli/store/store_commands.h"

#define AT(field) offsetof(struct kc_store_opts, field)

const struct kv_arg kc_store_common_args[KC_STORE_COMMON_ARGS] = {
    {.name = "json",
     .type = KV_ARG_FLAG,
     .offset = AT(json),
     .help = "Print one JSON object instead of text."},
    {.name = "quiet", .type = KV_ARG_FLAG, .offset = AT(quiet), .help = "No progress bar."},
};

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
     .help = "Read the chunks that the store has already, and store damaged ones again. For stores "
             "where other programs may change them: Redis, buckets."},
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
     .help = "Keep what was used within TIME, such as 90m (a bare number is seconds). It must be "
             "longer than any save takes. Default: 24h."},
    {.name = "no-grace",
     .type = KV_ARG_FLAG,
     .offset = AT(no_grace),
     .help = "Delete recent chunks, too. Only while no program saves to the store."},
    {.name = "opaque-too",
     .type = KV_ARG_FLAG,
     .offset = AT(opaque_too),
     .help = "Also delete what only manifests of other programs may need."},
    {.name = "prefix-age",
     .type = KV_ARG_TIME,
     .offset = AT(prefix_age_ms),
     .value = "TIME",
     .min = 1000,
     .help = "Delete chunks of prefix caches (llama.cpp) that nobody used for TIME. Default: 30d. "
             "--grace doesn't apply to them."},
    {.name = "dry-run",
     .type = KV_ARG_FLAG,
     .offset = AT(dry_run),
     .help = "Delete nothing; print what would be deleted."},
};

static const struct kv_arg PACK_ARGS[] = {
    {.name = "to",
     .type = KV_ARG_STR,
     .offset = AT(to),
     .value = "MEMBER",
     .help = "Member that gets the packs, by its name in the store's file. Required."},
    {.name = "from",
     .type = KV_ARG_STR,
     .offset = AT(from),
     .value = "MEMBER",
     .help = "Member whose chunks are packed. Default: that of --to."},
    {.name = "prefix",
     .type = KV_ARG_STR,
     .offset = AT(prefix),
     .value = "TEXT",
     .help = "Only chunks of objects whose names begin with TEXT."},
    {.name = "keys",
     .type = KV_ARG_STR,
     .offset = AT(keys),
     .value = "FILE",
     .help = "Pack the chunks of these keys in place of objects': one a line, hexadecimal, in the "
             "order in which they are read (- is standard input)."},
    {.name = "idle",
     .type = KV_ARG_TIME,
     .offset = AT(idle_ms),
     .value = "TIME",
     .min = 1000,
     .help = "Leave chunks alone that were used within TIME."},
    {.name = "least",
     .type = KV_ARG_SIZE,
     .offset = AT(least),
     .value = "SIZE",
     .min = 1,
     .max = 64 << 20,
     .help = "Chunks of a pack have SIZE at least; fewer stay as they are. Default: 8MiB."},
    {.name = "most",
     .type = KV_ARG_SIZE,
     .offset = AT(most),
     .value = "SIZE",
     .min = 4096,
     .max = 64 << 20,
     .help = "Chunks of a pack have SIZE at most. Default: 64MiB."},
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
     .help = "Number of runs; their medians are shown. Default: 3."},
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

const struct kc_store_command kc_store_commands[KC_STORE_COMMANDS] = {
    {"save", kc_store_save, "URI NAME FILE", 2, 2, SAVE_ARGS, KV_COUNT(SAVE_ARGS),
     "keep a file under a name",
     "Saves FILE (- is standard input) under NAME. Chunks that the store has already are not\n"
     "written again. After status 0 the object can be restored, even if the power fails (Redis: "
     "as\n"
     "durable as the server is). After any other status an older object under NAME is still "
     "there.\n"
     "In a directory store, chunks that changed since the last save are read and verified; in\n"
     "Redis and buckets, only with --verify."},
    {"restore", kc_store_restore, "URI NAME FILE", 2, 2, RESTORE_ARGS, KV_COUNT(RESTORE_ARGS),
     "write what is under a name to a file",
     "Writes the object under NAME to FILE (- is standard output). Every chunk is verified before\n"
     "it is written. FILE appears complete or not at all; symbolic links, pipes and devices\n"
     "are written to."},
    {"ls", kc_store_ls, "URI", 0, 0, LS_ARGS, KV_COUNT(LS_ARGS), "list the objects",
     "Lists the objects with their sizes. \"opaque\" ones were saved by other programs."},
    {"show", kc_store_show, "URI NAME", 1, 1, SHOW_ARGS, KV_COUNT(SHOW_ARGS),
     "print what the manifest of an object says", "Shows what the manifest under NAME says."},
    {"verify", kc_store_verify, "URI [NAME]", 0, 1, NULL, 0, "read and check all, or one object",
     "Reads every chunk that an object needs, and compares it with its checksum. Status 1 and a\n"
     "line per problem when there are any."},
    {"gc", kc_store_gc, "URI", 0, 0, GC_ARGS, KV_COUNT(GC_ARGS),
     "delete chunks that no object needs",
     "Deletes the chunks that no manifest needs. Safe while others save, as long as no save takes\n"
     "longer than the grace time. A damaged manifest stops it."},
    {"pack", kc_store_pack, "URI", 0, 0, PACK_ARGS, KV_COUNT(PACK_ARGS),
     "put cold chunks of a tiered store together",
     "Rewrites chunks of a member of a tiered store into packs of 8 to 64 MiB, in the order of\n"
     "their objects, and removes the single ones. Others read them all the time. A batch then\n"
     "reads neighbours by one request. Stopped at any moment, the same command goes on."},
    {"rm", kc_store_rm, "URI NAME", 1, 1, NULL, 0, "remove an object",
     "Removes the object under NAME. Its chunks go with the next `kvasir store gc`."},
    {"stats", kc_store_stats, "URI", 0, 0, NULL, 0, "number and size of objects and chunks",
     "Shows the figures that the store keeps of itself."},
    {"bench", kc_store_bench, "URI", 0, 0, BENCH_ARGS, KV_COUNT(BENCH_ARGS),
     "time save and restore, beside a plain file",
     "Saves an object of noise (cold), saves it again (warm) and restores it, next to the same\n"
     "bytes written to a plain file with fdatasync and read back. Cleans up after itself."},
    {"conformance", kc_store_conformance, "URI", 0, 0, NULL, 0, "check a backend, or a plugin",
     "Runs the vendor checklist of kv_store_v1, and more, against the backend that URI names:\n"
     "its library is found in $KV_STORE_LIBRARY_PATH, with Kvasir's own libraries, or where the\n"
     "dynamic loader looks. The checks write and delete objects of their own. Status 1 when a\n"
     "check fails; a note is advice."},
};
