// SPDX-License-Identifier: Apache-2.0
#include "advisor/options.h"

#include <errno.h>
#include <stddef.h>
#include <string.h>

#include "advisor/index/policy.h"
#include "advisor/worth/curve.h"
#include "base/args/args.h"
#include "base/core/ascii.h"
#include "http/args.h"
#include "plane/etcd.h"
#include "tiered/config.h"

#define ROW(n, t, field) .name = (n), .type = (t), .offset = offsetof(struct kva_options, field)

static const struct kv_arg arguments[] = {
    {.name = "The store", .type = KV_ARG_GROUP},
    {ROW("store", KV_ARG_STR, store), .value = "URI",
     .help =
         "Required: the tiered store, tiered:/FILE, or FILE alone. Its members are the volumes."},
    {ROW("dry-run", KV_ARG_FLAG, dry_run),
     .help = "Move nothing: follow events, and tell by /plan what would be moved."},
    {ROW("policy", KV_ARG_CHOICE, policy), .value = "NAME",
     .help = "Which blobs the fast members keep: cost (default), lru, lfu, sieve or s3fifo.",
     .choices = "cost|lru|lfu|sieve|s3fifo"},
    {ROW("share", KV_ARG_U64, share), .value = "PERCENT",
     .help =
         "Share of each member's capacity that blobs may fill (default 90); the rest is room for "
         "puts, and for what moves.",
     .min = 1, .max = 100},
    {ROW("state", KV_ARG_STR, state), .value = "FILE",
     .help = "Keep what is known of the blobs' uses in FILE, over restarts (default: nowhere)."},
    {ROW("lock-folder", KV_ARG_STR, lock_folder), .value = "FOLDER",
     .help =
         "Lock members that are no folders by files in FOLDER, which all advisors of this machine "
         "share (default: such members aren't locked)."},
    {ROW("lock", KV_ARG_STR, lock), .value = "URL",
     .help = "Of all advisors with this lock, one at a time moves blobs; the others stand by. "
             "etcd://HOST:PORT[,HOST:PORT...][/NAME], or etcds:// (NAME: default: of the members' "
             "URIs), and credentials as ?user=NAME&password-file=FILE, ca=, cert=, key=FILE."},
    {ROW("lock-ttl", KV_ARG_TIME, lock_ttl_ms), .value = "TIME",
     .help = "Another advisor takes the lock so long after its holder has died (default 10s).",
     .min = 2000, .max = 3600000},
    {ROW("scan-interval", KV_ARG_TIME, scan_ms), .value = "TIME",
     .help = "List the members anew after so long (default 10m).", .min = 1000, .max = 86400000},
    {ROW("max-blobs", KV_ARG_U64, max_blobs), .value = "N",
     .help =
         "Blobs that are tracked, 62 bytes each; more stay where they are (default: 2 billion).",
     .min = 1, .max = UINT64_C(1) << 31},
    {ROW("half-life", KV_ARG_TIME, half_life_ms), .value = "TIME",
     .help = "Time in which a blob's heat halves (default 1h).", .min = 1000, .max = 2592000000},
    {.name = "Limits", .type = KV_ARG_GROUP},
    {ROW("bytes-per-second", KV_ARG_SIZE, bytes_per_s), .value = "SIZE",
     .help = "Copy at most so many bytes a second (default: no limit).", .min = 1},
    {ROW("requests-per-second", KV_ARG_U64, requests_per_s), .value = "N",
     .help = "Copy and remove at most so many blobs a second (default: no limit).", .min = 1},
    {ROW("quiet-hours", KV_ARG_STR, quiet_hours), .value = "FROM-TO",
     .help = "Move nothing between these times of the local day, 08:00-19:30 (default: none)."},
    {ROW("reclaim-after", KV_ARG_TIME, reclaim_ms), .value = "TIME",
     .help = "Delete a blob that every publisher that told of it has removed for so long (default: "
             "never; kvasir store gc deletes what nobody uses).",
     .min = 1000, .max = UINT64_C(315360000000)},
    {.name = "Packs", .type = KV_ARG_GROUP},
    {ROW("pack-after", KV_ARG_TIME, pack_after_ms), .value = "TIME",
     .help = "Pack blobs of the last member that weren't used for so long, those of a prompt side "
             "by side, and look after old packs (default: never).",
     .min = 1000, .max = UINT64_C(315360000000)},
    {ROW("pack-least", KV_ARG_SIZE, pack_least), .value = "SIZE",
     .help = "Bytes of a pack, at least; fewer stay single (default 8MiB).", .min = 1,
     .max = UINT64_C(32) << 20},
    {ROW("pack-most", KV_ARG_SIZE, pack_most), .value = "SIZE",
     .help = "Bytes of a pack, at most (default 64MiB).", .min = 4096, .max = UINT64_C(64) << 20},
    {ROW("pack-grace", KV_ARG_TIME, pack_grace_ms), .value = "TIME",
     .help = "Remove a half-written pack when nobody has finished it for so long (default 1h).",
     .min = 1000, .max = 2592000000},
    KH_ARG_MAX_CONNECTIONS(struct kva_options),
    KH_ARG_IDLE_TIMEOUT(struct kva_options),
    {.name = "Events", .type = KV_ARG_GROUP},
    {ROW("nats", KV_ARG_STR, nats), .value = "URL",
     .help =
         "Follow all block managers that publish on the NATS server at URL, nats://HOST:PORT or "
         "tls://; of a cluster several, with commas between. Without it only listings tell of "
         "uses."},
    {ROW("nats-cluster", KV_ARG_STR, nats_cluster), .value = "NAME",
     .help = "Only publishers of this cluster. Default: of all."},
    {ROW("nats-silence", KV_ARG_TIME, nats_silence_ms), .value = "TIME",
     .help = "Forget what a publisher has told when it is silent for so long; longer than the "
             "publishers' window (default 60s).",
     .min = 100, .max = 86400000},
    KVP_NATS_ARGS(struct kva_options, nats_args),
    {.name = "Advice on room (/advise)", .type = KV_ARG_GROUP},
    {ROW("samples", KV_ARG_U64, samples), .value = "N",
     .help = "Blobs that each curve follows (default 65536, about 4 MB).", .min = 64,
     .max = KVA_MAX_SAMPLES},
    {ROW("prefill", KV_ARG_U64, prefill), .value = "TOKENS",
     .help = "Prompt tokens that a GPU computes in a second (default 8000).", .min = 1,
     .max = UINT32_MAX},
    {ROW("block-tokens", KV_ARG_U64, block_tokens), .value = "TOKENS",
     .help = "Tokens of a block (default 16).", .min = 1, .max = 65536},
    {ROW("gpu-hour", KV_ARG_NANO, gpu_hour_nano), .value = "PRICE",
     .help = "Price of an hour of a GPU; without it nothing is told in money."},
    KH_ARGS_SERVING(struct kva_options, "8095"),
    KH_ARGS_PROTECTION(struct kva_options),
    KH_ARGS_LOGGING(struct kva_options),
};

static const char summary[] =
    "Follows the block events of LLM engines, and moves the blobs of a tiered store between\n"
    "its members: those in use to fast ones, cold ones to slow ones.";

static const char footer[] =
    "Examples:\n"
    "  kv-advisor --store tiered:/etc/kvasir/kv.conf --nats nats://10.0.0.5:4222\n"
    "      Place the blobs of a tiered store by the events of all block managers.\n"
    "  kv-advisor --store /etc/kvasir/kv.conf --dry-run\n"
    "      Move nothing; `curl localhost:8095/plan` tells what would be moved.\n"
    "  curl 'localhost:8095/explain?hash=0123456789abcdef0123456789abcdef'\n"
    "      Where a blob is, why, and what would move it.\n"
    "\n"
    "TIME is a number with ms, s, m, h or d, SIZE one with KiB, MiB, GiB, KB, MB or\n"
    "GB; a bare number is seconds, or bytes.\n"
    "Signals: SIGTERM and SIGINT end it after the copy in progress; SIGHUP reads token\n"
    "file and certificate again, and opens the access log anew. Under systemd\n"
    "(Type=notify) it reports when it is ready: when the members have been listed once.\n"
    "Exit status: 0 after a signal; 1 it can't run, or another advisor has a member; 2 usage.\n";

static const struct kv_args_program program = {
    .name = "kv-advisor",
    .usage = "--store URI [OPTION ...]",
    .brief = "move KV blobs between fast and slow storage by their use",
    .summary = summary,
    .footer = footer,
    .env = "KV_ADVISOR",
    .config = true,
    .args = arguments,
    .n_args = KV_COUNT(arguments),
};

struct kva_packing kva_options_packing(const struct kva_options *o)
{
    return (struct kva_packing){.idle_s = (uint32_t)(o->pack_after_ms / 1000),
                                .min_bytes = o->pack_least,
                                .max_bytes = o->pack_most,
                                .grace_ms = o->pack_grace_ms};
}

/* Read "HH:MM" at *@at as a minute of the day, and go behind it. Returns false: it is none. */
static bool take_minute(const char **at, uint32_t *ret)
{
    const char *p = *at;

    for (int i = 0; i < 5; i++)
        if (i == 2 ? p[i] != ':' : p[i] < '0' || p[i] > '9')
            return false;
    *ret = (uint32_t)((p[0] - '0') * 10 + p[1] - '0') * 60 +
           (uint32_t)((p[3] - '0') * 10 + p[4] - '0');
    *at = p + 5;
    return p[3] < '6' && *ret <= 24 * 60;
}

int kva_parse_hours(const char *text, uint32_t *ret_from, uint32_t *ret_to)
{
    return take_minute(&text, ret_from) && *text++ == '-' && take_minute(&text, ret_to) && !*text
               ? 0
               : -EINVAL;
}

static int check(struct kva_options *o, struct kv_error *error)
{
    if (!o->store)
        return kv_fail(error, -EINVAL, 0, "--store is required: tiered:/FILE");
    o->path = *o->store == '/' ? o->store : trd_config_path(o->store);
    if (!o->path)
        return kv_fail(error, -EINVAL, 0, "--store '%.80s': expected tiered:/FILE", o->store);
    if (o->quiet_hours && kva_parse_hours(o->quiet_hours, &o->quiet_from, &o->quiet_to) < 0)
        return kv_fail(error, -EINVAL, 0, "--quiet-hours '%.40s': expected HH:MM-HH:MM",
                       o->quiet_hours);
    if (o->lock && !kvp_etcd_url_is(o->lock))
        return kv_fail(error, -EINVAL, 0, "--lock '%.80s': expected etcd://HOST:PORT[/NAME]",
                       o->lock);
    return kh_args_check(o->tls_cert, o->tls_key, o->insecure, o->auth_token_file,
                         o->trace_id_header, error);
}

int kva_options_parse(int argc, char **argv, struct kva_options *ret, struct kv_error *error)
{
    struct kva_options options = {.policy = "cost",
                                  .share = 90,
                                  .lock_ttl_ms = 10000,
                                  .samples = 65536,
                                  .prefill = 8000,
                                  .block_tokens = 16,
                                  .scan_ms = 600000,
                                  .half_life_ms = 3600000,
                                  .nats_silence_ms = 60000,
                                  .host = "0.0.0.0",
                                  .port = 8095,
                                  .http_threads = 4,
                                  .max_connections = 4096,
                                  .idle_timeout_ms = 75000,
                                  .trace_id_header = "x-trace-id",
                                  .log_level = "info",
                                  .log_format = "text"};
    int rc = kv_args_parse(&program, argc, argv, &options, NULL, error);

    if (rc == 0)
        rc = check(&options, error);
    if (rc == 0)
        *ret = options;
    return rc;
}
