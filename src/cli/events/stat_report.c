// SPDX-License-Identifier: Apache-2.0
#include <inttypes.h>
#include <stdio.h>

#include "cli/events/say.h"
#include "cli/events/stat.h"
#include "cli/show/format.h"
#include "event/router/router_event.h"

/* -- for people -------------------------------------------------------------------------------- */

static const char *const no_message =
    "  A publisher is there, and tells nothing. Engines publish only when a block enters or "
    "leaves\n"
    "  their cache:\n"
    "  - send a prompt that is longer than a block, and hasn't been sent before;\n"
    "  - vLLM: --enable-prefix-caching, and --kv-events-config with \"enable_kv_cache_events\": "
    "true\n"
    "    and \"publisher\": \"zmq\"; its \"endpoint\" is this URL, not its \"replay_endpoint\";\n"
    "  - SGLang: --kv-events-config with \"publisher\": \"zmq\"; its default publishes nothing;\n"
    "  - TensorRT-LLM: event_buffer_max_size above 0, and block reuse;\n"
    "  - with data parallelism, each rank publishes on a port of its own: port + rank.\n";

static const char *const no_nats_message =
    "  The server is there, and nobody publishes on that subject. Block managers publish on\n"
    "  kvasir.CLUSTER.MODEL.TENANT.WORKER once a block enters or leaves a tier; Dynamo's workers "
    "on\n"
    "  namespace.NS.component.COMP.endpoint.EP.kv-events, if their event plane is NATS: its "
    "default is\n"
    "  ZMQ.\n";

/* Say what nobody has said so far, and why. */
static void say_nothing(struct kv_buf *out, const struct kc_look *look)
{
    if (look->state.problem) {
        kv_buf_printf(out, "no message in %.0f s: %s\n", look->seconds, look->state.problem);
    } else if (look->state.connected) {
        kv_buf_printf(out, "no message in %.0f s\n%s", look->seconds,
                      look->state.nats ? no_nats_message : no_message);
    } else if (look->state.binds) {
        kv_buf_printf(
            out,
            "no publisher has connected in %.0f s: is the engine's endpoint this host and "
            "port, and no `*`?\n",
            look->seconds);
    } else {
        kv_buf_printf(out, "no connection in %.0f s\n", look->seconds);
    }
}

static void say_link(struct kv_buf *out, const struct kc_look *look)
{
    kv_buf_printf(out, "%s: ", look->url);
    if (look->state.binds)
        kv_buf_printf(out, "%u publisher%s connected\n", look->state.connected,
                      look->state.connected == 1 ? "" : "s");
    else
        kv_buf_printf(out, "%s\n", look->state.connected ? "connected" : "not connected");
}

static double per_second(uint64_t n, const struct kc_look *look)
{
    return look->seconds > 0 ? (double)n / look->seconds : 0;
}

static void say_forms(struct kv_buf *out, const struct kc_publisher *p)
{
    const char *before = "  ";

    for (unsigned i = 0; i < KC_N_FORMS; i++) {
        if (!(p->counts.forms & 1u << i))
            continue;
        kv_buf_printf(out, "%s%s", before, kc_form_name((enum kc_form)i));
        before = ", ";
    }
    if (p->block_size)
        kv_buf_printf(out, "%s%" PRIu32 " tokens a block", before, p->block_size);
    if (p->counts.forms || p->block_size)
        kv_buf_putc(out, '\n');
}

static void say_types(struct kv_buf *out, const struct kc_counts *c)
{
    const char *before = " (blocks: ";

    kv_buf_printf(out, "  events: stored %" PRIu64, c->types[KC_STORED]);
    for (unsigned i = 0; i <= KV_N_TIERS; i++) {
        if (!c->tiers[i])
            continue;
        kv_buf_printf(out, "%s%s %" PRIu64, before,
                      i < KV_N_TIERS ? kve_tier_name((enum kv_tier)i) : "unknown medium",
                      c->tiers[i]);
        before = ", ";
    }
    kv_buf_printf(out, "%s, removed %" PRIu64 ", cleared %" PRIu64 "\n",
                  before[0] == ',' ? ")" : "", c->types[KC_REMOVED], c->types[KC_CLEARED]);
}

/* Reasons that say something about the events alone, whatever block size is registered. */
static bool is_about_event(unsigned skip)
{
    return skip != KVE_SKIP_BLOCK_SIZE && skip != KVE_SKIP_NAMESPACE &&
           skip != KVE_SKIP_TOKEN_COUNT;
}

static void say_skipped(struct kv_buf *out, const struct kc_publisher *p)
{
    const struct kve_unknown_media *media = &p->reader->unknown_media;
    const char *before = "  kv-indexer would leave out: ";

    for (unsigned i = 0; i < KVE_N_SKIPS; i++) {
        if (!p->counts.skipped[i] || !is_about_event(i))
            continue;
        kv_buf_printf(out, "%s%s %" PRIu64, before, kve_skip_name((enum kve_skip)i),
                      p->counts.skipped[i]);
        if (i == KVE_SKIP_MEDIUM && media->n_items)
            kv_buf_printf(out, " (%s)", media->items[0].name);
        before = ", ";
    }
    if (before[0] == ',')
        kv_buf_puts(out, " events\n");
}

static void say_row(struct kv_buf *out, const struct kc_publisher *p, const struct kc_look *look)
{
    const struct kc_counts *c = &p->counts;
    double age = look->now_ns > p->last_ns ? (double)(look->now_ns - p->last_ns) / 1e9 : 0;

    kv_buf_printf(out, "%10s %8s %10s %10s %8s %10s %6s %8s %8s %7s  ", kc_count(c->batches).s,
                  kc_scaled(per_second(c->batches, look)).s, kc_count(c->events).s,
                  kc_count(c->blocks).s, kc_scaled(per_second(c->blocks, look)).s,
                  kc_bytes((double)c->bytes).s, kc_count(c->gaps).s, kc_count(c->missed).s,
                  kc_count(c->restarts).s, kc_span(age).s);
    kc_say_publisher(out, p);
    kv_buf_putc(out, '\n');
    say_forms(out, p);
    if (c->events)
        say_types(out, c);
    say_skipped(out, p);
    if (c->snapshots)
        kv_buf_printf(out, "  %" PRIu64 " parts of snapshots, which others have asked for\n",
                      c->snapshots);
    if (c->unreadable)
        kv_buf_printf(out, "  unreadable: %" PRIu64 " message%s, the last one: %s\n", c->unreadable,
                      c->unreadable == 1 ? "" : "s", p->why);
}

void kc_stat_text(struct kv_buf *out, const struct kc_follower *follower,
                  const struct kc_look *look)
{
    const struct kc_publisher *p;

    say_link(out, look);
    if (look->state.missed)
        kv_buf_printf(out, "%" PRIu64 " messages were dropped here: this program was too slow\n",
                      look->state.missed);
    if (!follower->n_messages) {
        say_nothing(out, look);
        return;
    }
    kv_buf_printf(out, "%10s %8s %10s %10s %8s %10s %6s %8s %8s %7s  %s\n", "BATCHES", "/s",
                  "EVENTS", "BLOCKS", "/s", "BYTES", "GAPS", "MISSED", "RESTARTS", "LAST",
                  "PUBLISHER");
    TAILQ_FOREACH(p, &follower->publishers, entry)
    say_row(out, p, look);
    if (follower->n_beyond)
        kv_buf_printf(out, "%" PRIu64 " messages of further publishers aren't counted\n",
                      follower->n_beyond);
}

/* -- for programs ------------------------------------------------------------------------------ */

static void write_forms(struct kv_json_writer *w, const struct kc_publisher *p)
{
    static const char *const names[KC_N_FORMS] = {"maps", "arrays", "envelopes", "records",
                                                  "unnumbered"};

    kv_json_key(w, "forms");
    kv_json_begin_array(w);
    for (unsigned i = 0; i < KC_N_FORMS; i++)
        if (p->counts.forms & 1u << i)
            kv_json_put_str(w, names[i]);
    kv_json_end_array(w);
}

static void write_tiers(struct kv_json_writer *w, const struct kc_counts *c)
{
    kv_json_key(w, "stored_blocks");
    kv_json_begin_object(w);
    for (unsigned i = 0; i <= KV_N_TIERS; i++)
        if (c->tiers[i])
            kv_json_member_u64(w, i < KV_N_TIERS ? kve_tier_name((enum kv_tier)i) : "unknown",
                               c->tiers[i]);
    kv_json_end_object(w);
}

static void write_skipped(struct kv_json_writer *w, const struct kc_counts *c)
{
    kv_json_key(w, "skipped");
    kv_json_begin_object(w);
    for (unsigned i = 0; i < KVE_N_SKIPS; i++)
        if (c->skipped[i] && is_about_event(i))
            kv_json_member_u64(w, kve_skip_name((enum kve_skip)i), c->skipped[i]);
    kv_json_end_object(w);
}

static void write_publisher(struct kv_json_writer *w, const struct kc_publisher *p,
                            const struct kc_look *look)
{
    const struct kc_counts *c = &p->counts;

    kv_json_begin_object(w);
    kv_json_member_str(w, "publisher", p->from);
    kv_json_key(w, "topic");
    kv_json_put_strn(w, p->topic.p, p->topic.len);
    if (p->has_id)
        kv_json_member_u64(w, "publisher_id", p->id);
    kv_json_member_u64(w, "batches", c->batches);
    kv_json_member_double(w, "batches_per_second", per_second(c->batches, look));
    kv_json_member_u64(w, "events", c->events);
    kv_json_member_u64(w, "blocks", c->blocks);
    kv_json_member_double(w, "blocks_per_second", per_second(c->blocks, look));
    kv_json_member_u64(w, "bytes", c->bytes);
    kv_json_member_u64(w, "stored", c->types[KC_STORED]);
    kv_json_member_u64(w, "removed", c->types[KC_REMOVED]);
    kv_json_member_u64(w, "cleared", c->types[KC_CLEARED]);
    write_tiers(w, c);
    kv_json_member_u64(w, "gaps", c->gaps);
    kv_json_member_u64(w, "missed_batches", c->missed);
    kv_json_member_u64(w, "restarts", c->restarts);
    if (p->numbered)
        kv_json_member_u64(w, "last_batch", p->last);
    if (p->block_size)
        kv_json_member_u64(w, "block_size", p->block_size);
    write_forms(w, p);
    write_skipped(w, c);
    kv_json_member_u64(w, "snapshot_parts", c->snapshots);
    kv_json_member_u64(w, "unreadable", c->unreadable);
    if (c->unreadable)
        kv_json_member_str(w, "why", p->why);
    kv_json_member_double(w, "last_message", (double)p->last_ns / 1e9);
    kv_json_end_object(w);
}

void kc_stat_json(struct kv_buf *out, const struct kc_follower *follower,
                  const struct kc_look *look)
{
    const struct kc_publisher *p;
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_str(&w, "url", look->url);
    kv_json_member_double(&w, "seconds", look->seconds);
    kv_json_member_u64(&w, "connections", look->state.connected);
    if (look->state.problem)
        kv_json_member_str(&w, "problem", look->state.problem);
    if (look->state.nats)
        kv_json_member_u64(&w, "missed_messages", look->state.missed);
    kv_json_member_u64(&w, "messages", follower->n_messages);
    kv_json_key(&w, "publishers");
    kv_json_begin_array(&w);
    TAILQ_FOREACH(p, &follower->publishers, entry)
    write_publisher(&w, p, look);
    kv_json_end_array(&w);
    kv_json_end_object(&w);
    kv_buf_putc(out, '\n');
}
