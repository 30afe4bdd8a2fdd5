// SPDX-License-Identifier: Apache-2.0
/* The commands of `kvasir peer` and their options. */
#include "cli/peer/peer.h"

#define AT(field) offsetof(struct kc_peer_opts, field)

const struct kv_arg kc_peer_common_args[KC_PEER_COMMON_ARGS] = {
    {.name = "fingerprint",
     .type = KV_ARG_STR,
     .offset = AT(fingerprint),
     .value = "TEXT",
     .help = "Model and all else that makes blocks differ. Both sides must have the same. "
             "Default: that of made-up blocks, \"" KC_PEER_DEMO "\"."},
    {.name = "name",
     .type = KV_ARG_STR,
     .offset = AT(name),
     .value = "NAME",
     .help = "Name among the peers: A-Z a-z 0-9 . _ -. Default: the command and its process id."},
    {.name = "token-file",
     .type = KV_ARG_STR,
     .offset = AT(token),
     .value = "FILE",
     .help =
         "File with a secret of 16 to 4096 bytes, which no other user may read. Both sides prove "
         "that they know it; it never travels."},
    {.name = "tls-cert",
     .type = KV_ARG_STR,
     .offset = AT(tls_cert),
     .value = "FILE",
     .help = "Certificate of this side (PEM): tcp endpoints then use TLS 1.3."},
    {.name = "tls-key",
     .type = KV_ARG_STR,
     .offset = AT(tls_key),
     .value = "FILE",
     .help = "Its key. Default: in --tls-cert."},
    {.name = "tls-ca",
     .type = KV_ARG_STR,
     .offset = AT(tls_ca),
     .value = "FILE",
     .help =
         "Authority that the other side's certificate must be of. Without it, --token-file says "
         "who is who."},
    {.name = "key-bytes",
     .type = KV_ARG_U64,
     .offset = AT(key_len),
     .value = "N",
     .min = 4,
     .max = KVBM_MAX_KEY,
     .help = "Bytes of a block's key. Default: 8; of share --dir, as the directory says."},
    {.name = "json",
     .type = KV_ARG_FLAG,
     .offset = AT(json),
     .help = "Print JSON objects, one a line, instead of text."},
};

static const struct kv_arg SHARE_ARGS[] = {
    {.name = "demo",
     .type = KV_ARG_U64,
     .offset = AT(demo),
     .value = "N",
     .min = 1,
     .max = 1 << 20,
     .help =
         "Share N made-up blocks of the host tier, whose bytes readers can check. Their keys are "
         "1 to N. Default, without --dir: 256."},
    {.name = "dir",
     .type = KV_ARG_STR,
     .offset = AT(dir),
     .value = "DIR[:DIR...]",
     .help = "Share the disk tier in DIR, of an engine that isn't running. Needs --fingerprint and "
             "the form of its blocks, as the engine has them."},
    {.name = "listen",
     .type = KV_ARG_LIST,
     .offset = AT(listen),
     .value = "ENDPOINT",
     .help = "unix:/PATH or tcp:HOST:PORT (port 0: any). May be given 8 times. Default: "
             "unix:/tmp/kvasir-peer-UID, or kvasir-peer in $XDG_RUNTIME_DIR."},
    {.name = "unprotected",
     .type = KV_ARG_FLAG,
     .offset = AT(unprotected),
     .help = "Listen beyond this machine's loopback without token or --tls-ca: anybody who reaches "
             "the port reads the blocks."},
    {.name = "host",
     .type = KV_ARG_SIZE,
     .offset = AT(host),
     .value = "SIZE",
     .help =
         "Host tier, from which blocks are lent; those on disk are read into it first. Default: "
         "room for all made-up blocks; 512MiB with --dir."},
    {.name = "lease-share",
     .type = KV_ARG_U64,
     .offset = AT(lease_share),
     .value = "PERCENT",
     .min = 1,
     .max = 100,
     .help = "Part of the host tier that readers may hold at a time. Default: 25."},
    {.name = "block",
     .type = KV_ARG_SIZE,
     .offset = AT(block),
     .value = "SIZE",
     .min = 256,
     .max = 1 << 30,
     .help = "Bytes of a block. Default: 2MiB."},
    {.name = "layers",
     .type = KV_ARG_U64,
     .offset = AT(layers),
     .value = "N",
     .min = 1,
     .max = KVBM_MAX_LAYERS,
     .help = "Layers of a block. Default: 32."},
    {.name = "parts",
     .type = KV_ARG_U64,
     .offset = AT(parts),
     .value = "1|2",
     .min = 1,
     .max = 2,
     .help = "2: K and V apart; 1: together (MLA). Default: 2."},
    {.name = "page",
     .type = KV_ARG_U64,
     .offset = AT(page),
     .value = "N",
     .min = 1,
     .max = 65536,
     .help = "Tokens of a block. Default: 16."},
    {.name = "heads",
     .type = KV_ARG_U64,
     .offset = AT(heads),
     .value = "N",
     .min = 1,
     .max = 65536,
     .help = "K/V heads. Default: as many as have 128 elements each, or 1."},
    {.name = "dtype",
     .type = KV_ARG_CHOICE,
     .offset = AT(dtype),
     .value = "TYPE",
     .choices = "bf16|f16|f32|fp8_e4m3|fp8_e5m2|u8",
     .help = "Type of the elements. Default: bf16."},
    {.name = "order",
     .type = KV_ARG_CHOICE,
     .offset = AT(order),
     .value = "nhd|hnd",
     .choices = "nhd|hnd",
     .help = "Order of tokens and heads in the host tier. Default: nhd."},
};

/* Options that look, lease and read take. */
#define READER_ARGS                                                                          \
    {.name = "keys",                                                                         \
     .type = KV_ARG_STR,                                                                     \
     .offset = AT(keys),                                                                     \
     .value = "FILE",                                                                        \
     .help = "Keys in hexadecimal, one a line; # begins a comment. A key of 8 bytes is a "   \
             "number. Default: all keys, which only `kvasir peer share` tells."},            \
        {.name = "blocks",                                                                   \
         .type = KV_ARG_U64,                                                                 \
         .offset = AT(blocks),                                                               \
         .value = "N",                                                                       \
         .min = 1,                                                                           \
         .help = "Only the first N keys. Default: all."},                                    \
        {.name = "set",                                                                      \
         .type = KV_ARG_U64,                                                                 \
         .offset = AT(set),                                                                  \
         .value = "ID",                                                                      \
         .max = UINT32_MAX,                                                                  \
         .help = "Block set of the peer. Default: 1, by custom its host tier."},             \
        {.name = "group",                                                                    \
         .type = KV_ARG_U64,                                                                 \
         .offset = AT(group),                                                                \
         .value = "N",                                                                       \
         .max = 63,                                                                          \
         .help = "Cache group of the keys. Default: 0."},                                    \
        {.name = "timeout",                                                                  \
         .type = KV_ARG_TIME,                                                                \
         .offset = AT(timeout_ms),                                                           \
         .value = "TIME",                                                                    \
         .min = 1,                                                                           \
         .help = "Longest wait for the session, and for each answer. Default: 5s."},         \
    {                                                                                        \
        .name = "tls-name", .type = KV_ARG_STR, .offset = AT(tls_name), .value = "NAME",     \
        .help = "Name that the peer's certificate must have. Default: the host of ENDPOINT." \
    }

static const struct kv_arg LOOK_ARGS[] = {READER_ARGS};

static const struct kv_arg LEASE_ARGS[] = {
    {.name = "time",
     .type = KV_ARG_TIME,
     .offset = AT(time_ms),
     .value = "TIME",
     .min = 1,
     .max = 86400000,
     .help = "How long to hold the blocks. Leases are renewed meanwhile. Default: 10s."},
    READER_ARGS,
};

static const struct kv_arg READ_ARGS[] = {
    {.name = "passes",
     .type = KV_ARG_U64,
     .offset = AT(passes),
     .value = "N",
     .min = 1,
     .help = "Read all keys so often. Default: 1."},
    {.name = "batch",
     .type = KV_ARG_U64,
     .offset = AT(batch),
     .value = "N",
     .min = 1,
     .max = 1024,
     .help = "Blocks of a lease. Default: 32."},
    {.name = "connections",
     .type = KV_ARG_U64,
     .offset = AT(data),
     .value = "N",
     .max = 8,
     .help = "Further connections for bulk data. Default: 0."},
    {.name = "no-shared",
     .type = KV_ARG_FLAG,
     .offset = AT(no_shared),
     .help = "Copy through the socket, though there is shared memory."},
    {.name = "no-checksums",
     .type = KV_ARG_FLAG,
     .offset = AT(no_checksums),
     .help = "Through a socket: trust it, and compare no checksums."},
    READER_ARGS,
};

const struct kc_peer_command kc_peer_commands[KC_PEER_COMMANDS] = {
    {"share", kc_peer_share, "[--dir DIR | --demo N]", SHARE_ARGS, KV_COUNT(SHARE_ARGS),
     "lend the blocks of a directory, or made-up ones, to other programs",
     "Lends blocks to readers until ^C: those of a disk tier's directory, or made-up ones. "
     "Readers\n"
     "are `kvasir peer` on this machine or another one, and engines with a block manager."},
    {"look", kc_peer_look, "ENDPOINT", LOOK_ARGS, KV_COUNT(LOOK_ARGS),
     "print what a peer lends: sets, sizes, keys and their tiers",
     "Opens a session with the agent at ENDPOINT and prints who it is, the form of its blocks, "
     "the\n"
     "ways to their bytes, and how many keys each of its tiers has. When the session is refused,\n"
     "prints why."},
    {"lease", kc_peer_lease, "ENDPOINT", LEASE_ARGS, KV_COUNT(LEASE_ARGS),
     "hold blocks of a peer for a time, without reading them",
     "Leases as many of the keys as the peer grants, renews the leases, and gives the blocks back\n"
     "after --time or at ^C."},
    {"read", kc_peer_read, "ENDPOINT", READ_ARGS, KV_COUNT(READ_ARGS),
     "copy blocks of a peer, check them, and time it",
     "Leases the keys in batches and copies their blocks into memory: from shared memory where "
     "the\n"
     "peer is on this machine and ENDPOINT is a unix socket, else through the session. Misses are\n"
     "counted by their reasons."},
};
