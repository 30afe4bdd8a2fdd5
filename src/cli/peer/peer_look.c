// SPDX-License-Identifier: Apache-2.0
/* `kvasir peer look`: who a peer is, and what it lends. */
#include <errno.h>
#include <inttypes.h>
#include <stdio.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "cli/peer/peer.h"
#include "cli/show/format.h"
#include "peer/lease/lend.h"

#define TRIPS 9

/* The facts shown of a peer. */
struct view {
    struct kc_reader *r;
    struct kvbm_remote_set_info set;
    uint64_t trip_ns; /* fastest of TRIPS; 0: no answer */
    uint64_t keys[KV_N_TIERS];
    uint64_t absent;
};

static const char *transport_word(uint32_t transport)
{
    static const char *const words[] = {[KVBM_TRANSPORT_SHM] = "shared memory",
                                        [KVBM_TRANSPORT_TCP] = "tcp",
                                        [KVBM_TRANSPORT_UCX] = "UCX",
                                        [KVBM_TRANSPORT_NIXL] = "NIXL"};

    return transport < KV_COUNT(words) && words[transport] ? words[transport] : "another way";
}

/* Time a question without an effect: to give back a lease that isn't there. */
static void time_trips(struct view *v)
{
    static const uint8_t none[8];

    for (int i = 0; i < TRIPS; i++) {
        uint64_t start_ns = kv_now_ns(), ns;
        struct kvbm_reply reply;

        if (kvbm_session_call(v->r->session, KVBM_ASK_RELEASE, none, sizeof(none), -1,
                              kc_reader_deadline(v->r), &reply) < 0)
            return;
        ns = kv_now_ns() - start_ns;
        kvbm_reply_fini(&reply);
        v->trip_ns = v->trip_ns ? KV_MIN(v->trip_ns, ns) : ns;
    }
}

static void look_at_set(struct view *v)
{
    struct kvbm_remote_set *set;

    v->set.size = sizeof(v->set);
    if (kvbm_remote_set_find(v->r->agent, v->r->info.worker, v->r->set, &set) < 0)
        return;
    (void)kvbm_remote_set_get_info(set, &v->set);
    kvbm_remote_set_release(set);
}

static void count_tiers(struct view *v)
{
    for (size_t i = 0; i < v->r->n_keys; i++) {
        if (v->r->tiers[i] < KV_N_TIERS)
            v->keys[v->r->tiers[i]]++;
        else
            v->absent++;
    }
}

/* ---- text ---- */

static void print_set(const struct view *v)
{
    const struct kvbm_layout_config *c = &v->r->layout;
    const struct kvbm_shard *shard = &v->set.shard;

    printf("set %" PRIu32 "    room for %" PRIu64 " blocks of %s, generation %" PRIu64 "%s\n",
           v->r->set, c->num_blocks, kc_bytes((double)v->r->block_bytes).s, v->set.generation,
           v->set.writable ? ", writable" : "");
    printf("         %" PRIu32 " layers, %s, %" PRIu32 " tokens of %" PRIu32 " elements of %" PRIu32
           " bytes",
           c->num_layers, c->outer_dim == 2 ? "K and V" : "K and V together", c->page_size,
           c->inner_dim, c->dtype_width_bytes);
    if (c->num_heads)
        printf(", %" PRIu32 " heads", c->num_heads);
    printf(", %s\n", c->order == KVBM_ORDER_HND ? "hnd" : "nhd");
    if (shard->n_ranks > 1)
        printf("         rank %" PRIu32 " of %" PRIu32 ", heads from %" PRIu32 " of %" PRIu32 "\n",
               shard->rank, shard->n_ranks, shard->first_head, shard->total_heads);
    printf("ways     session");
    for (uint32_t i = 0; i < KV_MIN(v->set.n_transports, (uint32_t)KVBM_MAX_TRANSPORTS); i++)
        printf(", %s%s", transport_word(v->set.transports[i]),
               v->set.transports[i] == KVBM_TRANSPORT_SHM &&
                       strncmp(v->r->endpoint, "unix:", 5) != 0
                   ? " (through its unix endpoint only)"
                   : "");
    putchar('\n');
}

static void print_keys(const struct view *v)
{
    const struct kc_reader *r = v->r;
    char text[2 * KVBM_MAX_KEY + 1];
    const char *before = "keys     ";

    if (!r->opts->keys && !r->lists) {
        printf("keys     %s doesn't tell them, as only `kvasir peer share` does: name some with "
               "--keys\n",
               r->info.agent);
        return;
    }
    for (unsigned tier = 0; tier < KV_N_TIERS; tier++) {
        if (!v->keys[tier])
            continue;
        printf("%s%s in the %s tier, %s", before, kc_count(v->keys[tier]).s, kc_peer_tier(tier),
               kc_bytes((double)v->keys[tier] * (double)r->block_bytes).s);
        before = "; ";
    }
    if (v->absent || !r->n_keys)
        printf("%s%s in no tier", before, kc_count(v->absent).s);
    putchar('\n');
    for (size_t i = 0; i < KV_MIN(r->n_keys, (size_t)3); i++)
        printf("         %s %s\n",
               kc_key_text(r->keys.data + i * (size_t)r->key_len, r->key_len, text),
               kc_peer_tier(r->tiers[i]));
    if (r->n_keys > 3)
        printf("         ...\n");
}

static void print(const struct view *v)
{
    const struct kc_reader *r = v->r;

    printf("agent    %s, worker %016" PRIx64 ", incarnation %016" PRIx64 "\n", r->info.agent,
           r->info.worker, r->info.incarnation);
    printf("session  %s%s, open after %s; a question and its answer take %s\n", r->endpoint,
           r->info.tls ? ", TLS" : "", kc_duration(r->opened_ns).s, kc_duration(v->trip_ns).s);
    if (!r->layout.num_blocks) {
        printf("set %" PRIu32 "    not exported\n", r->set);
        return;
    }
    print_set(v);
    print_keys(v);
}

/* ---- JSON ---- */

static void json_set(const struct view *v, struct kv_json_writer *json)
{
    const struct kvbm_layout_config *c = &v->r->layout;

    kv_json_key(json, "set");
    kv_json_begin_object(json);
    kv_json_member_u64(json, "id", v->r->set);
    kv_json_member_u64(json, "generation", v->set.generation);
    kv_json_member_bool(json, "writable", v->set.writable);
    kv_json_member_u64(json, "blocks", c->num_blocks);
    kv_json_member_u64(json, "block_bytes", v->r->block_bytes);
    kv_json_member_u64(json, "layers", c->num_layers);
    kv_json_member_u64(json, "parts", c->outer_dim);
    kv_json_member_u64(json, "tokens", c->page_size);
    kv_json_member_u64(json, "elements", c->inner_dim);
    kv_json_member_u64(json, "element_bytes", c->dtype_width_bytes);
    kv_json_member_u64(json, "heads", c->num_heads);
    kv_json_key(json, "ways");
    kv_json_begin_array(json);
    kv_json_put_str(json, "session");
    for (uint32_t i = 0; i < KV_MIN(v->set.n_transports, (uint32_t)KVBM_MAX_TRANSPORTS); i++)
        kv_json_put_str(json, transport_word(v->set.transports[i]));
    kv_json_end_array(json);
    kv_json_end_object(json);
}

static void json_keys(const struct view *v, struct kv_json_writer *json)
{
    kv_json_key(json, "keys");
    kv_json_begin_object(json);
    kv_json_member_bool(json, "listed", v->r->lists);
    for (unsigned tier = 0; tier < KV_N_TIERS; tier++)
        if (v->keys[tier])
            kv_json_member_u64(json, kc_peer_tier(tier), v->keys[tier]);
    kv_json_member_u64(json, "absent", v->absent);
    kv_json_end_object(json);
}

static int print_json(const struct view *v)
{
    const struct kc_reader *r = v->r;
    struct kv_json_writer json;
    struct kv_buf out = {0};

    kv_json_writer_init(&json, &out);
    kv_json_begin_object(&json);
    kv_json_member_str(&json, "agent", r->info.agent);
    kv_json_member_u64(&json, "worker", r->info.worker);
    kv_json_member_u64(&json, "incarnation", r->info.incarnation);
    kv_json_member_bool(&json, "tls", r->info.tls);
    kv_json_member_double(&json, "open_ms", (double)r->opened_ns / 1e6);
    kv_json_member_double(&json, "trip_us", (double)v->trip_ns / 1e3);
    if (r->layout.num_blocks) {
        json_set(v, &json);
        json_keys(v, &json);
    }
    return kc_peer_json_end(&json, &out, KC_PEER_OK);
}

int kc_peer_look(const struct kc_peer_opts *opts, const char *endpoint)
{
    struct kc_reader r;
    struct view v = {.r = &r};
    int status = kc_reader_open("look", endpoint, opts, &r);

    if (status != KC_PEER_OK)
        return status;
    if (r.layout.num_blocks) {
        look_at_set(&v);
        status = kc_reader_find(&r);
    }
    time_trips(&v);
    if (status == KC_PEER_OK) {
        count_tiers(&v);
        if (opts->json)
            status = print_json(&v);
        else
            print(&v);
    }
    kc_reader_close(&r);
    return status;
}
