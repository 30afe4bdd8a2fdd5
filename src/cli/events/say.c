// SPDX-License-Identifier: Apache-2.0
#include "cli/events/say.h"

#include <inttypes.h>
#include <time.h>

#include "base/core/clock.h"
#include "cli/show/plain.h"
#include "event/router/router_event.h"

/* -- for people -------------------------------------------------------------------------------- */

const char kc_say_head[] = "TIME          BATCH  RANK  TYPE     TIER         BLOCKS  "
                           "FIRST              TOKENS  PUBLISHER\n";

void kc_say_publisher(struct kv_buf *out, const struct kc_publisher *publisher)
{
    kc_put_plain(out, publisher->from, strlen(publisher->from));
    if (publisher->topic.len)
        kv_buf_putc(out, ' ');
    kc_put_plain(out, publisher->topic.p, publisher->topic.len);
    if (publisher->has_id)
        kv_buf_printf(out, " publisher=%016" PRIx64, publisher->id);
}

static void say_time(struct kv_buf *out, uint64_t time_ns)
{
    time_t seconds = (time_t)(time_ns / KV_NS_PER_S);
    struct tm tm;
    char text[16];

    localtime_r(&seconds, &tm);
    strftime(text, sizeof(text), "%H:%M:%S", &tm);
    kv_buf_printf(out, "%s.%03u", text, (unsigned)(time_ns % KV_NS_PER_S / KV_NS_PER_MS));
}

static void say_member(struct kv_buf *out, const char *name, struct kv_str value)
{
    if (!value.len)
        return;
    kv_buf_printf(out, " %s=", name);
    kc_put_plain(out, value.p, value.len);
}

static void say_event(struct kv_buf *out, const struct kc_news *news)
{
    const struct kc_event *e = news->event;

    if (news->numbered)
        kv_buf_printf(out, " %6" PRIu64, news->batch);
    else
        kv_buf_printf(out, " %6s", "-");
    kv_buf_printf(out, " %5" PRIu32 "  %-7s  %-11s %7zu  ", e->rank, kc_type_name(e->type),
                  e->tier < KV_N_TIERS ? kve_tier_name(e->tier) : "?", e->n_hashes);
    if (e->n_hashes)
        kv_buf_printf(out, "%016" PRIx64, e->hashes[0]);
    else
        kv_buf_printf(out, "%-16s", "-");
    kv_buf_printf(out, "  %7zu  ", e->n_tokens);
    kc_say_publisher(out, news->publisher);
    if (e->has_worker)
        kv_buf_printf(out, " worker=%" PRIu64, e->worker);
    if (e->has_parent)
        kv_buf_printf(out, " parent=%016" PRIx64, e->parent);
    if (e->has_group)
        kv_buf_printf(out, " group=%" PRIu64, e->group);
    if (e->is_record)
        kv_buf_printf(out, " position=%" PRIu64 " bytes=%" PRIu64, e->position, e->block_bytes);
    if (e->tier == KV_N_TIERS)
        say_member(out, "medium", e->medium);
    say_member(out, "lora", e->lora_name);
    say_member(out, "salt", e->cache_salt);
    say_member(out, "kind", e->kind);
    say_member(out, "locality", e->locality);
    say_member(out, "owner", e->owner);
}

static void say_gap(struct kv_buf *out, const struct kc_news *news)
{
    if (news->first == news->last)
        kv_buf_printf(out, "  batch %" PRIu64 " is missing  ", news->first);
    else
        kv_buf_printf(out, "  batches %" PRIu64 " to %" PRIu64 " are missing  ", news->first,
                      news->last);
    kc_say_publisher(out, news->publisher);
}

void kc_say_text(struct kv_buf *out, const struct kc_news *news)
{
    say_time(out, news->time_ns);
    switch (news->what) {
    case KC_NEWS_EVENT:
        say_event(out, news);
        break;
    case KC_NEWS_GAP:
        say_gap(out, news);
        break;
    case KC_NEWS_RESTART:
        kv_buf_printf(out,
                      "  batch %" PRIu64 " after %" PRIu64
                      ": the publisher has restarted, or another one has the same topic  ",
                      news->batch, news->last);
        kc_say_publisher(out, news->publisher);
        break;
    case KC_NEWS_UNREADABLE:
        kv_buf_printf(out, "  unreadable, %zu bytes: %s  ", news->bytes, news->publisher->why);
        kc_say_publisher(out, news->publisher);
        break;
    }
    kv_buf_putc(out, '\n');
}

/* -- for programs ------------------------------------------------------------------------------ */

static void write_str(struct kv_json_writer *w, const char *key, struct kv_str value)
{
    if (!value.len)
        return;
    kv_json_key(w, key);
    kv_json_put_strn(w, value.p, value.len);
}

static void write_number(struct kv_json_writer *w, const char *key, bool given, uint64_t value)
{
    if (given)
        kv_json_member_u64(w, key, value);
}

static void write_batch(struct kv_json_writer *w, const struct kc_news *news)
{
    kv_json_key(w, "batch");
    if (news->numbered)
        kv_json_put_u64(w, news->batch);
    else
        kv_json_put_null(w);
}

static void write_event(struct kv_json_writer *w, const struct kc_news *news)
{
    const struct kc_event *e = news->event;

    write_batch(w, news);
    kv_json_member_u64(w, "rank", e->rank);
    kv_json_member_str(w, "type", kc_type_name(e->type));
    kv_json_key(w, "tier");
    if (e->tier < KV_N_TIERS)
        kv_json_put_str(w, kve_tier_name(e->tier));
    else
        kv_json_put_null(w);
    kv_json_member_u64(w, "blocks", e->n_hashes);
    kv_json_member_u64(w, "tokens", e->n_tokens);
    kv_json_key(w, "block_hashes");
    kv_json_begin_array(w);
    for (size_t i = 0; i < e->n_hashes; i++)
        kv_json_put_u64(w, e->hashes[i]);
    kv_json_end_array(w);
    write_number(w, "worker_id", e->has_worker, e->worker);
    write_number(w, "block_size", e->has_block_size, e->block_size);
    write_number(w, "parent_hash", e->has_parent, e->parent);
    write_number(w, "group", e->has_group, e->group);
    write_number(w, "position", e->is_record, e->position);
    write_number(w, "prefix_hash", e->has_prefix, e->prefix);
    write_number(w, "tokens_hash", e->has_tokens_hash, e->tokens_hash);
    write_number(w, "block_bytes", e->is_record, e->block_bytes);
    write_number(w, "storage_location", e->is_record, e->volume);
    write_str(w, "medium", e->medium);
    write_str(w, "lora_name", e->lora_name);
    write_str(w, "cache_salt", e->cache_salt);
    write_str(w, "kind", e->kind);
    write_str(w, "locality", e->locality);
    write_str(w, "owner", e->owner);
}

void kc_say_json(struct kv_buf *out, const struct kc_news *news)
{
    static const char *const whats[] = {[KC_NEWS_EVENT] = "event",
                                        [KC_NEWS_GAP] = "gap",
                                        [KC_NEWS_RESTART] = "restart",
                                        [KC_NEWS_UNREADABLE] = "unreadable"};
    struct kv_json_writer w;

    kv_json_writer_init(&w, out);
    kv_json_begin_object(&w);
    kv_json_member_double(&w, "time", (double)news->time_ns / 1e9);
    kv_json_member_str(&w, "publisher", news->publisher->from);
    kv_json_key(&w, "topic");
    kv_json_put_strn(&w, news->publisher->topic.p, news->publisher->topic.len);
    write_number(&w, "publisher_id", news->publisher->has_id, news->publisher->id);
    kv_json_member_str(&w, "what", whats[news->what]);
    if (news->what == KC_NEWS_EVENT)
        write_event(&w, news);
    if (news->what == KC_NEWS_GAP)
        kv_json_member_u64(&w, "first", news->first);
    if (news->what == KC_NEWS_RESTART)
        write_batch(&w, news);
    if (news->what == KC_NEWS_GAP || news->what == KC_NEWS_RESTART)
        kv_json_member_u64(&w, "last", news->last);
    if (news->what == KC_NEWS_UNREADABLE) {
        kv_json_member_str(&w, "why", news->publisher->why);
        kv_json_member_u64(&w, "bytes", news->bytes);
    }
    kv_json_end_object(&w);
    kv_buf_putc(out, '\n');
}
