// SPDX-License-Identifier: Apache-2.0
/*
 * `kvasir bench peers`: copy blocks of a second process through shared memory, a unix socket and
 * tcp, beside memcpy of blocks as scattered. Every block that comes is compared.
 */
#include <errno.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "cli/commands.h"
#include "cli/peer/peer.h"
#include "cli/show/bar.h"
#include "cli/show/format.h"

#define AT(field) offsetof(struct kc_peer_opts, field)

static const struct kv_arg ARGS[] = {
    {.name = "block",
     .type = KV_ARG_SIZE,
     .offset = AT(block),
     .value = "SIZE",
     .min = 4096,
     .max = 64 << 20,
     .help = "Bytes of a block: a multiple of 4KiB. Default: 2MiB."},
    {.name = "blocks",
     .type = KV_ARG_U64,
     .offset = AT(blocks),
     .value = "N",
     .min = 1,
     .max = 1 << 20,
     .help = "Number of blocks. Default: 128."},
    {.name = "batch",
     .type = KV_ARG_U64,
     .offset = AT(batch),
     .value = "N",
     .min = 1,
     .max = 1024,
     .help = "Blocks of a lease. Default: 32."},
    {.name = "passes",
     .type = KV_ARG_U64,
     .offset = AT(passes),
     .value = "N",
     .min = 1,
     .max = 1000,
     .help = "Read all blocks so often. Default: 3."},
    {.name = "connections",
     .type = KV_ARG_U64,
     .offset = AT(data),
     .value = "N",
     .max = 8,
     .help = "Further connections for bulk data. Default: 0."},
    {.name = "json", .type = KV_ARG_FLAG, .offset = AT(json), .help = "One JSON object."},
};

static const struct kv_args_program PROGRAM = {
    .name = "kvasir bench peers",
    .usage = "[OPTION ...]",
    .brief = "copy blocks of another process, and time it",
    .summary =
        "Starts a second process that lends made-up blocks, and copies them through shared\n"
        "memory, a unix socket and tcp over the loopback, beside memcpy. Between two machines:\n"
        "`kvasir peer share` on one, `kvasir peer read` on the other.",
    .footer =
        "Exit status: 0; 1 when a block came with other bytes, or not at all; 2 usage; 5 else.",
    .args = ARGS,
    .n_args = KV_COUNT(ARGS),
};

/* Ways to a block, in the order in which they are shown. */
static const struct way {
    const char *name, *words;
    unsigned endpoint; /* 0: unix, 1: tcp */
    bool no_shared, no_checksums;
} WAYS[] = {
    {"shared_memory", "shared memory", 0, false, false},
    {"unix", "unix socket, checksums", 0, true, false},
    {"unix_no_checksums", "unix socket", 0, true, true},
    {"tcp", "tcp, checksums", 1, true, false},
    {"tcp_no_checksums", "tcp", 1, true, true},
};

#define N_WAYS KV_COUNT(WAYS)

struct bench {
    struct kc_peer_opts opts;
    char endpoints[2][128];
    double memcpy_s; /* of as many bytes */
    struct kc_reading figures[N_WAYS];
    uint64_t wrong, missing;
};

/* ---- the process that lends ---- */

/* Lend until the parent closes its end of @until. @ready gets the endpoints. */
static _Noreturn void own(const struct bench *b, int ready, int until)
{
    struct kc_peer_opts opts = b->opts;
    char endpoints[2][128] = {{0}}, byte;
    struct kc_owner owner;
    int status;

    (void)prctl(PR_SET_PDEATHSIG, SIGTERM);
    snprintf(endpoints[0], sizeof(endpoints[0]), "unix:/tmp/kvasir-bench-%d", (int)getpid());
    opts.listen.items[0] = endpoints[0];
    opts.listen.items[1] = "tcp:127.0.0.1:0";
    opts.listen.n = 2;
    opts.fingerprint = KC_PEER_DEMO;
    opts.demo = b->opts.blocks;
    opts.layers = 2;
    opts.lease_share = 100;
    status = kc_owner_open("bench peers", &opts, &owner);
    if (status == KC_PEER_OK)
        (void)kvbm_agent_endpoint(owner.agent, 1, endpoints[1], sizeof(endpoints[1]), NULL);
    if (status == KC_PEER_OK && write(ready, endpoints, sizeof(endpoints)) > 0)
        while (read(until, &byte, 1) < 0 && !kc_bar_interrupted())
            ;
    if (status == KC_PEER_OK)
        kc_owner_close(&owner);
    _exit(status);
}

/* Start it and wait until it lends. Returns its process id, or an error. */
static pid_t start_owner(struct bench *b, int *until)
{
    int ready[2], end[2];
    pid_t pid;
    long n;

    if (pipe(ready) < 0 || pipe(end) < 0)
        return -errno;
    pid = fork();
    if (pid == 0) {
        close(end[1]);
        close(ready[0]);
        own(b, ready[1], end[0]);
    }
    close(ready[1]);
    close(end[0]);
    n = pid < 0 ? -1 : read(ready[0], b->endpoints, sizeof(b->endpoints));
    close(ready[0]);
    *until = end[1];
    if (n == (long)sizeof(b->endpoints))
        return pid;
    close(end[1]);
    if (pid > 0)
        (void)waitpid(pid, NULL, 0);
    return pid < 0 ? -EAGAIN : -ECHILD;
}

/* ---- reading ---- */

/* Time memcpy of as many blocks, from scattered places. */
static void yardstick(struct bench *b)
{
    size_t len = b->opts.block, n = b->opts.blocks, batch = KV_MIN(b->opts.batch, b->opts.blocks);
    char *from = malloc(len * n), *to = malloc(len * batch);
    uint64_t start_ns;

    if (from && to) {
        memset(from, 1, len * n);
        memset(to, 2, len * batch);
        start_ns = kv_now_ns();
        for (uint64_t pass = 0; pass < b->opts.passes; pass++)
            for (size_t i = 0; i < n; i++)
                memcpy(to + i % batch * len, from + i * 7919 % n * len, len);
        b->memcpy_s = (double)(kv_now_ns() - start_ns) / 1e9;
    }
    free(from);
    free(to);
}

static int read_by(struct bench *b, size_t i)
{
    struct kc_peer_opts opts = b->opts;
    struct kc_reader r;
    int status, rc;

    opts.no_shared = WAYS[i].no_shared;
    opts.no_checksums = WAYS[i].no_checksums;
    opts.set = KC_PEER_SET;
    status = kc_reader_open("bench peers", b->endpoints[WAYS[i].endpoint], &opts, &r);
    if (status != KC_PEER_OK)
        return status;
    status = kc_reader_find(&r);
    rc = status == KC_PEER_OK ? kc_reader_read(&r, &b->figures[i]) : 0;
    b->wrong += b->figures[i].wrong;
    b->missing += b->opts.passes * b->opts.blocks - b->figures[i].blocks;
    kc_reader_close(&r);
    return rc < 0 ? kc_peer_fail("bench peers", KC_PEER_FAILED, "%s", strerror(-rc)) : status;
}

/* ---- reporting ---- */

static double seconds(const struct kc_reading *f)
{
    return (double)(f->lease_ns + f->copy_ns) / 1e9;
}

static double speed(const struct kc_reading *f)
{
    return f->bytes ? (double)f->bytes / seconds(f) : 0;
}

static double all_bytes(const struct bench *b)
{
    return (double)b->opts.block * (double)b->opts.blocks * (double)b->opts.passes;
}

static void print(const struct bench *b)
{
    double yard = b->memcpy_s > 0 ? all_bytes(b) / b->memcpy_s : 0;

    printf("%" PRIu64 " blocks of %s, %" PRIu64 " of them a lease, %" PRIu64 " times:\n\n",
           b->opts.blocks, kc_bytes((double)b->opts.block).s, b->opts.batch, b->opts.passes);
    printf("  %-24s %10s/s\n", "memcpy, one thread", kc_bytes(yard).s);
    for (size_t i = 0; i < N_WAYS; i++) {
        const struct kc_reading *f = &b->figures[i];

        printf("  %-24s %10s/s  %.2f times memcpy's speed  a lease %s\n", WAYS[i].words,
               kc_bytes(speed(f)).s, yard > 0 ? speed(f) / yard : 0,
               kc_duration(f->n_batches ? f->lease_ns / f->n_batches : 0).s);
    }
    if (b->wrong || b->missing)
        printf("\n%" PRIu64 " blocks had other bytes, %" PRIu64 " didn't come.\n", b->wrong,
               b->missing);
}

static int print_json(const struct bench *b, int status)
{
    struct kv_json_writer json;
    struct kv_buf out = {0};

    kv_json_writer_init(&json, &out);
    kv_json_begin_object(&json);
    kv_json_member_u64(&json, "block_bytes", b->opts.block);
    kv_json_member_u64(&json, "blocks", b->opts.blocks);
    kv_json_member_u64(&json, "wrong", b->wrong);
    kv_json_member_u64(&json, "missing", b->missing);
    kv_json_key(&json, "memcpy");
    kv_json_begin_object(&json);
    kv_json_member_double(&json, "gb_per_s",
                          b->memcpy_s > 0 ? all_bytes(b) / b->memcpy_s / 1e9 : 0);
    kv_json_end_object(&json);
    for (size_t i = 0; i < N_WAYS; i++) {
        const struct kc_reading *f = &b->figures[i];

        kv_json_key(&json, WAYS[i].name);
        kv_json_begin_object(&json);
        kv_json_member_double(&json, "gb_per_s", speed(f) / 1e9);
        kv_json_member_bool(&json, "shared", f->shared);
        kv_json_member_double(&json, "lease_us",
                              f->n_batches ? (double)f->lease_ns / (double)f->n_batches / 1e3 : 0);
        kv_json_end_object(&json);
    }
    return kc_peer_json_end(&json, &out, status);
}

static int run(struct bench *b)
{
    int until = -1, status = KC_PEER_OK;
    pid_t owner = start_owner(b, &until);

    if (owner < 0)
        return kc_peer_fail("bench peers", KC_PEER_FAILED, "no second process: %s",
                            strerror((int)-owner));
    yardstick(b);
    for (size_t i = 0; i < N_WAYS && status == KC_PEER_OK && !kc_bar_interrupted(); i++)
        status = read_by(b, i);
    close(until);
    (void)waitpid(owner, NULL, 0);
    if (kc_bar_interrupted())
        return KC_PEER_INTERRUPTED;
    if (status != KC_PEER_OK)
        return status;
    status = b->wrong || b->missing ? KC_PEER_MISSES : KC_PEER_OK;
    if (b->opts.json)
        return print_json(b, status);
    print(b);
    return status;
}

int kc_bench_peers_main(int argc, char **argv)
{
    struct bench b = {
        .opts = {.blocks = 128, .block = 2 << 20, .batch = KC_PEER_BATCH, .passes = 3}};
    struct kv_error error = {0};
    int rc = kv_args_parse(&PROGRAM, argc, argv, &b.opts, NULL, &error);

    if (rc == 0 && b.opts.block % 4096)
        rc = kv_fail(&error, -EINVAL, 0, "--block must be a multiple of 4KiB");
    if (rc < 0)
        return kc_peer_fail("bench peers", KC_PEER_USAGE, "%s", error.text);
    if (rc > 0)
        return KC_PEER_OK;
    kc_bar_catch_signals();
    return run(&b);
}
