// SPDX-License-Identifier: Apache-2.0
/* `kvasir peer share`: lend blocks until ^C. */
#include <inttypes.h>
#include <poll.h>
#include <stdio.h>

#include "base/core/error.h"
#include "cli/peer/peer.h"
#include "cli/show/bar.h"
#include "cli/show/format.h"
#include "peer/lease/lend.h"
#include "peer/session/agent.h"

#define DEMO_BLOCKS 256

static uint64_t registered(const struct kc_owner *o, enum kv_tier tier)
{
    struct kvbm_manager_stats stats = KVBM_MANAGER_STATS_INIT;

    (void)kvbm_manager_get_stats(o->manager, &stats);
    return tier == KV_TIER_HOST ? stats.host.used : stats.disk.used;
}

static uint64_t block_bytes(const struct kc_owner *o)
{
    struct kvbm_manager_stats stats = KVBM_MANAGER_STATS_INIT;

    (void)kvbm_manager_get_stats(o->manager, &stats);
    return stats.host.block_bytes;
}

static void say(const struct kc_owner *o, const struct kc_peer_opts *opts)
{
    enum kv_tier tier = opts->dir ? KV_TIER_DISK : KV_TIER_HOST;
    uint64_t n = registered(o, tier);
    char endpoint[128];

    printf("%s blocks of %s, %s in all, %s\n", kc_count(n).s, kc_bytes((double)block_bytes(o)).s,
           kc_bytes((double)n * (double)block_bytes(o)).s,
           opts->dir ? "on disk" : "made up, in memory");
    for (uint32_t i = 0; kvbm_agent_endpoint(o->agent, i, endpoint, sizeof(endpoint), NULL) > 0;
         i++)
        printf("  kvasir peer read %s\n", endpoint);
    printf("are shared until ^C\n");
    (void)fflush(stdout);
}

static int json_begun(const struct kc_owner *o)
{
    struct kv_json_writer json;
    struct kv_buf out = {0};
    char endpoint[128];

    kv_json_writer_init(&json, &out);
    kv_json_begin_object(&json);
    kv_json_member_str(&json, "agent", o->agent->name);
    kv_json_key(&json, "endpoints");
    kv_json_begin_array(&json);
    for (uint32_t i = 0; kvbm_agent_endpoint(o->agent, i, endpoint, sizeof(endpoint), NULL) > 0;
         i++)
        kv_json_put_str(&json, endpoint);
    kv_json_end_array(&json);
    kv_json_member_u64(&json, "block_bytes", block_bytes(o));
    kv_json_member_u64(&json, "host", registered(o, KV_TIER_HOST));
    kv_json_member_u64(&json, "disk", registered(o, KV_TIER_DISK));
    return kc_peer_json_end(&json, &out, KC_PEER_OK);
}

/* Print counters of the leases. Bytes that readers copied from shared memory are not known here. */
static int say_end(const struct kc_owner *o, bool as_json)
{
    struct kvbm_lender_stats lent;
    struct kv_json_writer json;
    struct kv_buf out = {0};

    kvbm_lender_get_stats(o->agent->lender, &lent);
    if (!as_json) {
        printf("%s leases granted, %s refused, %s ended by their time; %s sent through sockets\n",
               kc_count(lent.leases).s, kc_count(lent.refused).s, kc_count(lent.reclaimed).s,
               kc_bytes((double)lent.read_bytes).s);
        return KC_PEER_OK;
    }
    kv_json_writer_init(&json, &out);
    kv_json_begin_object(&json);
    kv_json_member_u64(&json, "leases", lent.leases);
    kv_json_member_u64(&json, "leases_now", lent.leases_now);
    kv_json_member_u64(&json, "refused", lent.refused);
    kv_json_member_u64(&json, "reclaimed", lent.reclaimed);
    kv_json_member_u64(&json, "sent_bytes", lent.read_bytes);
    return kc_peer_json_end(&json, &out, KC_PEER_OK);
}

int kc_peer_share(const struct kc_peer_opts *opts, const char *endpoint)
{
    struct kc_peer_opts all = *opts;
    struct kc_owner owner;
    int status;

    (void)endpoint;
    if (all.dir && all.demo)
        return kc_peer_fail("share", KC_PEER_USAGE, "--dir or --demo, not both");
    if (all.dir && !all.fingerprint)
        return kc_peer_fail(
            "share", KC_PEER_USAGE,
            "--dir needs --fingerprint: the one that the engine has given its blocks");
    if (!all.dir && all.key_len && all.key_len != 8)
        return kc_peer_fail("share", KC_PEER_USAGE, "keys of made-up blocks have 8 bytes");
    all.fingerprint = all.fingerprint ? all.fingerprint : KC_PEER_DEMO;
    all.demo = all.dir || all.demo ? all.demo : DEMO_BLOCKS;
    status = kc_owner_open("share", &all, &owner);
    if (status != KC_PEER_OK)
        return status;
    if (all.json)
        status = json_begun(&owner);
    else
        say(&owner, &all);
    while (status == KC_PEER_OK && !kc_bar_interrupted())
        (void)poll(NULL, 0, 200);
    if (status == KC_PEER_OK)
        status = say_end(&owner, all.json);
    kc_owner_close(&owner);
    return status;
}
