// SPDX-License-Identifier: Apache-2.0
/* `kvasir peer lease`: hold blocks of a peer for a time. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "cli/peer/peer.h"
#include "cli/show/bar.h"
#include "cli/show/format.h"

#define HOLD_MS 10000
#define RENEW_MS 3000

/* Leases held, one a batch. */
struct held {
    struct kc_reader *r;
    struct kvbm_lease **leases;
    size_t n;
    uint64_t time_ms, blocks, ended;
    int err; /* of the first lease that wasn't granted */
};

static uint64_t blocks_of(const struct kvbm_lease *lease)
{
    struct kvbm_block_at place;
    uint64_t n = 0;

    for (size_t i = 0; i < kvbm_lease_count(lease); i++)
        n += kvbm_lease_block(lease, i, &place) == 0;
    return n;
}

static void take(struct held *h)
{
    struct kc_reader *r = h->r;
    uint32_t time_ms = (uint32_t)KV_MIN(h->time_ms, (uint64_t)HOLD_MS);

    for (size_t at = 0; at < r->n_keys;) {
        size_t n = KV_MIN(r->n_keys - at, (size_t)KC_PEER_BATCH);
        int rc =
            kvbm_session_lease(r->session, r->set, r->group, r->keys.data + at * (size_t)r->key_len,
                               n, time_ms, kc_reader_deadline(r), &h->leases[h->n]);

        if (rc == -ENOENT) { /* none of these; others may be there */
            at += n;
            continue;
        }
        h->err = rc;
        if (rc < 0)
            return;
        h->blocks += blocks_of(h->leases[h->n]);
        at += KV_MAX(kvbm_lease_count(h->leases[h->n]), (size_t)1);
        h->n++;
    }
}

/* Hold until the time is over or ^C, and renew meanwhile. */
static void hold(struct held *h)
{
    uint64_t end_ns = kv_now_ns() + h->time_ms * KV_NS_PER_MS, renew_ns;

    renew_ns = kv_now_ns() + KV_MIN(h->time_ms / 3 + 1, (uint64_t)RENEW_MS) * KV_NS_PER_MS;
    while (kv_now_ns() < end_ns && !kc_bar_interrupted()) {
        (void)poll(NULL, 0, 20);
        if (kv_now_ns() < renew_ns)
            continue;
        renew_ns = kv_now_ns() + RENEW_MS * KV_NS_PER_MS;
        for (size_t i = 0; i < h->n; i++) {
            if (!h->leases[i] ||
                kvbm_lease_renew(h->leases[i], HOLD_MS, kc_reader_deadline(h->r)) == 0)
                continue;
            h->ended += blocks_of(h->leases[i]);
            kvbm_lease_release(h->leases[i]);
            h->leases[i] = NULL;
        }
    }
}

static int print_json(const struct held *h, int status)
{
    struct kv_json_writer json;
    struct kv_buf out = {0};

    kv_json_writer_init(&json, &out);
    kv_json_begin_object(&json);
    kv_json_member_str(&json, "agent", h->r->info.agent);
    kv_json_member_u64(&json, "keys", h->r->n_keys);
    kv_json_member_u64(&json, "leased", h->blocks);
    kv_json_member_bool(&json, "not_lent", h->err == -ENOSPC);
    kv_json_member_u64(&json, "ended", h->ended);
    return kc_peer_json_end(&json, &out, status);
}

/* Say what was granted: at once, so that a person can try what other readers get meanwhile. */
static void say_granted(const struct held *h)
{
    printf("%llu of %zu blocks are leased from %s for %s\n", (unsigned long long)h->blocks,
           h->r->n_keys, h->r->info.agent, kc_duration(h->time_ms * KV_NS_PER_MS).s);
    if (h->err == -ENOSPC)
        printf(
            "  the others aren't lent: readers hold as many blocks as %s lends (--lease-share)\n",
            h->r->info.agent);
    (void)fflush(stdout);
}

static int run(struct held *h)
{
    const struct kc_peer_opts *opts = h->r->opts;
    int status;

    h->leases = calloc(h->r->n_keys + 1, sizeof(*h->leases));
    if (!h->leases)
        return kc_peer_fail("lease", KC_PEER_FAILED, "no memory");
    h->time_ms = opts->time_ms ? opts->time_ms : HOLD_MS;
    take(h);
    if (!opts->json)
        say_granted(h);
    if (h->err < 0 && h->err != -ENOSPC)
        (void)kc_peer_fail("lease", 0, "a lease failed: %s", strerror(-h->err));
    hold(h);
    for (size_t i = 0; i < h->n; i++)
        kvbm_lease_release(h->leases[i]);
    free(h->leases);
    status = kc_bar_interrupted()                         ? KC_PEER_INTERRUPTED
             : h->blocks == h->r->n_keys && h->ended == 0 ? KC_PEER_OK
                                                          : KC_PEER_MISSES;
    if (opts->json)
        return print_json(h, status);
    if (h->ended)
        printf("  %llu of them ended before their time\n", (unsigned long long)h->ended);
    printf("  given back\n");
    return status;
}

int kc_peer_lease(const struct kc_peer_opts *opts, const char *endpoint)
{
    struct kc_reader r;
    struct held h = {.r = &r};
    int status = kc_reader_open("lease", endpoint, opts, &r);

    if (status != KC_PEER_OK)
        return status;
    status = kc_reader_find(&r);
    if (status == KC_PEER_OK && !r.n_keys)
        status = kc_peer_fail("lease", KC_PEER_MISSES, "no keys: %s, name some with --keys",
                              r.lists ? "the peer has none" : "the peer doesn't tell its own");
    if (status == KC_PEER_OK)
        status = run(&h);
    kc_reader_close(&r);
    return status;
}
