// SPDX-License-Identifier: Apache-2.0
#include "advisor/plan.h"

#include <inttypes.h>
#include <string.h>

#include "base/core/clock.h"

enum { STEPS = 1024 };
#define GIB 1073741824.0

static void add(const struct kva_volumes *v, struct kva_plan *plan, const struct kva_move *step)
{
    const struct trd_member_config *from = &v->config.members[step->from],
                                   *to = &v->config.members[step->to];
    double gib = (double)step->bytes / GIB;

    switch (step->kind) {
    case KVA_COPY:
        plan->copy[step->from][step->to].blobs++;
        plan->copy[step->from][step->to].bytes += step->bytes;
        plan->request_cost += ((double)from->request_nano + (double)to->request_nano) / 1e9;
        plan->month_cost += gib * (double)to->gib_month_nano / 1e9;
        if (!from->read_only)
            plan->month_cost -= gib * (double)from->gib_month_nano / 1e9;
        break;
    case KVA_REMOVE:
        plan->remove[step->from].blobs++;
        plan->remove[step->from].bytes += step->bytes;
        plan->month_cost -= gib * (double)from->gib_month_nano / 1e9;
        break;
    case KVA_DELETE:
        plan->deleted++;
        plan->deleted_bytes += step->bytes;
        break;
    case KVA_LOOK:
        plan->unfound++;
        break;
    }
}

/* Add up what packing would do, where it is switched on. */
static void add_packs(struct kva_volumes *volumes, struct kva_world *world,
                      const struct kva_packing *packing, struct kva_plan *plan)
{
    struct kva_cold_opts opts = kva_cold_opts(packing, (uint32_t)(kv_wall_ns() / KV_NS_PER_S));
    struct kva_cold cold[STEPS];
    uint32_t at = 0;

    for (size_t m = 0; m < volumes->config.n_members; m++) {
        struct trd_packs *packs = trd_catalog_hold(&volumes->packs[m]);

        trd_weigh_packs(packs, &plan->packs[m]);
        trd_packs_release(packs);
    }
    if (!packing->idle_s)
        return;
    do {
        size_t n;

        pthread_mutex_lock(&world->lock);
        n = kva_index_cold(world->index, &at, &opts, cold, STEPS);
        pthread_mutex_unlock(&world->lock);
        plan->packed += n;
        for (size_t i = 0; i < n; i++)
            plan->packed_bytes += cold[i].bytes;
    } while (at);
}

void kva_plan_make(struct kva_volumes *volumes, struct kva_world *world, uint32_t left_s,
                   const struct kva_packing *packing, struct kva_plan *ret)
{
    struct kva_move steps[STEPS];
    uint32_t at = 0;

    memset(ret, 0, sizeof(*ret));
    do {
        size_t n;

        pthread_mutex_lock(&world->lock);
        n = kva_index_moves(world->index, &at, (uint32_t)(kv_wall_ns() / KV_NS_PER_S), left_s,
                            steps, STEPS);
        pthread_mutex_unlock(&world->lock);
        for (size_t i = 0; i < n; i++)
            add(volumes, ret, &steps[i]);
    } while (at);
    add_packs(volumes, world, packing, ret);
}

/* -- JSON -------------------------------------------------------------------------------------- */

static void put_limit(struct kv_json_writer *w, const char *key, uint64_t bytes)
{
    kv_json_key(w, key);
    if (bytes == UINT64_MAX)
        kv_json_put_null(w);
    else
        kv_json_put_u64(w, bytes);
}

static void put_members(const struct kva_volumes *v, const struct kva_index_stats *stats,
                        const struct kva_plan *plan, struct kv_json_writer *w)
{
    kv_json_key(w, "members");
    kv_json_begin_array(w);
    for (size_t m = 0; m < v->config.n_members; m++) {
        kv_json_begin_object(w);
        kv_json_member_str(w, "name", v->config.members[m].name);
        kv_json_member_bool(w, "open", v->stores[m] != NULL);
        kv_json_member_bool(w, "read_only", v->config.members[m].read_only);
        kv_json_member_u64(w, "blobs", stats->members[m].have);
        kv_json_member_u64(w, "bytes", stats->members[m].have_bytes);
        kv_json_member_u64(w, "wanted_blobs", stats->members[m].want);
        kv_json_member_u64(w, "wanted_bytes", stats->members[m].want_bytes);
        put_limit(w, "limit_bytes", stats->members[m].limit);
        kv_json_member_u64(w, "other_bytes", stats->members[m].reserved);
        kv_json_member_u64(w, "uses", stats->members[m].hits);
        kv_json_member_u64(w, "packs", plan->packs[m].packs);
        kv_json_member_u64(w, "packed_blobs", plan->packs[m].blobs);
        kv_json_member_u64(w, "packs_to_rewrite", plan->packs[m].poor);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

static void put_copies(const struct kva_volumes *v, const struct kva_plan *plan,
                       struct kv_json_writer *w)
{
    kv_json_key(w, "copies");
    kv_json_begin_array(w);
    for (size_t from = 0; from < v->config.n_members; from++)
        for (size_t to = 0; to < v->config.n_members; to++) {
            if (!plan->copy[from][to].blobs)
                continue;
            kv_json_begin_object(w);
            kv_json_member_str(w, "from", v->config.members[from].name);
            kv_json_member_str(w, "to", v->config.members[to].name);
            kv_json_member_u64(w, "blobs", plan->copy[from][to].blobs);
            kv_json_member_u64(w, "bytes", plan->copy[from][to].bytes);
            kv_json_end_object(w);
        }
    kv_json_end_array(w);
    kv_json_key(w, "removals");
    kv_json_begin_array(w);
    for (size_t from = 0; from < v->config.n_members; from++) {
        if (!plan->remove[from].blobs)
            continue;
        kv_json_begin_object(w);
        kv_json_member_str(w, "from", v->config.members[from].name);
        kv_json_member_u64(w, "blobs", plan->remove[from].blobs);
        kv_json_member_u64(w, "bytes", plan->remove[from].bytes);
        kv_json_end_object(w);
    }
    kv_json_end_array(w);
}

void kva_plan_json(const struct kva_volumes *volumes, const struct kva_index_stats *stats,
                   const struct kva_plan *plan, struct kv_json_writer *w)
{
    put_members(volumes, stats, plan, w);
    put_copies(volumes, plan, w);
    kv_json_member_u64(w, "deletions", plan->deleted);
    kv_json_member_u64(w, "deleted_bytes", plan->deleted_bytes);
    kv_json_member_u64(w, "blobs_to_pack", plan->packed);
    kv_json_member_u64(w, "bytes_to_pack", plan->packed_bytes);
    kv_json_member_u64(w, "told_and_not_found", plan->unfound);
    kv_json_member_double(w, "request_cost", plan->request_cost);
    kv_json_member_double(w, "month_cost", plan->month_cost);
}

/* -- text -------------------------------------------------------------------------------------- */

struct size_text {
    char s[32];
};

static struct size_text size_of(uint64_t bytes)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
    double value = (double)bytes;
    struct size_text ret;
    struct kv_buf buf = KV_BUF_INIT;
    unsigned unit = 0;

    while (value >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        value /= 1024;
        unit++;
    }
    kv_buf_printf(&buf, unit ? "%.1f %s" : "%.0f %s", value, units[unit]);
    memset(ret.s, 0, sizeof(ret.s));
    memcpy(ret.s, buf.data ? buf.data : "", buf.len < sizeof(ret.s) ? buf.len : sizeof(ret.s) - 1);
    kv_buf_fini(&buf);
    return ret;
}

static void members_text(const struct kva_volumes *v, const struct kva_index_stats *stats,
                         struct kv_buf *out)
{
    kv_buf_printf(out, "%-20s %12s %12s %12s %12s %12s\n", "member", "blobs", "bytes", "wanted",
                  "bytes", "limit");
    for (size_t m = 0; m < v->config.n_members; m++)
        kv_buf_printf(out, "%-20s %12" PRIu64 " %12s %12" PRIu64 " %12s %12s%s%s\n",
                      v->config.members[m].name, stats->members[m].have,
                      size_of(stats->members[m].have_bytes).s, stats->members[m].want,
                      size_of(stats->members[m].want_bytes).s,
                      stats->members[m].limit == UINT64_MAX ? "-"
                                                            : size_of(stats->members[m].limit).s,
                      v->config.members[m].read_only ? "  read-only" : "",
                      v->stores[m] ? "" : "  can't be opened");
}

void kva_plan_text(const struct kva_volumes *volumes, const struct kva_index_stats *stats,
                   const struct kva_plan *plan, struct kv_buf *out)
{
    const struct trd_member_config *members = volumes->config.members;
    size_t n = volumes->config.n_members, steps = 0;

    members_text(volumes, stats, out);
    kv_buf_puts(out, "\n");
    for (size_t from = 0; from < n; from++)
        for (size_t to = 0; to < n; to++) {
            if (!plan->copy[from][to].blobs)
                continue;
            steps++;
            kv_buf_printf(out, "move    %12" PRIu64 " blobs, %s, from %s to %s\n",
                          plan->copy[from][to].blobs, size_of(plan->copy[from][to].bytes).s,
                          members[from].name, members[to].name);
        }
    for (size_t from = 0; from < n; from++) {
        if (!plan->remove[from].blobs)
            continue;
        steps++;
        kv_buf_printf(out, "remove  %12" PRIu64 " second copies, %s, from %s\n",
                      plan->remove[from].blobs, size_of(plan->remove[from].bytes).s,
                      members[from].name);
    }
    if (plan->deleted) {
        steps++;
        kv_buf_printf(out, "delete  %12" PRIu64 " blobs, %s\n", plan->deleted,
                      size_of(plan->deleted_bytes).s);
    }
    if (plan->packed) {
        steps++;
        kv_buf_printf(out, "pack    %12" PRIu64 " blobs, %s, in %s\n", plan->packed,
                      size_of(plan->packed_bytes).s, members[kva_pack_member(volumes)].name);
    }
    for (size_t m = 0; m < n; m++)
        if (plan->packs[m].packs)
            kv_buf_printf(out,
                          "%s has %" PRIu64 " blobs, %s, in %" PRIu64 " packs; %" PRIu64
                          " packs are to be rewritten\n",
                          members[m].name, plan->packs[m].blobs, size_of(plan->packs[m].bytes).s,
                          plan->packs[m].packs, plan->packs[m].poor);
    if (!steps)
        kv_buf_puts(out, "Nothing to move.\n");
    if (plan->unfound)
        kv_buf_printf(out, "%" PRIu64 " blobs are told of and in no member.\n", plan->unfound);
    if (plan->request_cost > 0 || plan->month_cost > 0 || plan->month_cost < 0)
        kv_buf_printf(out, "Requests cost %.6f; storage then costs %+.6f a month.\n",
                      plan->request_cost, plan->month_cost);
}
