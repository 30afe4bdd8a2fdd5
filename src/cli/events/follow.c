// SPDX-License-Identifier: Apache-2.0
#include "cli/events/follow_impl.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "event/router/envelope.h"

/* Salts remembered of each publisher: enough to judge its events, and little memory. */
#define MAX_SALTED 65536

const char *kc_type_name(enum kc_type type)
{
    static const char *const names[KC_N_TYPES] = {"stored", "removed", "cleared"};

    return names[type];
}

const char *kc_form_name(enum kc_form form)
{
    static const char *const names[KC_N_FORMS] = {
        [KC_FORM_MAPS] = "events as maps (vLLM 0.24 and later)",
        [KC_FORM_ARRAYS] = "events as arrays (SGLang, vLLM before 0.24)",
        [KC_FORM_ENVELOPES] = "envelopes of Dynamo's event plane",
        [KC_FORM_RECORDS] = "KVEvent records of block managers",
        [KC_FORM_UNNUMBERED] = "batches without numbers: losses can't be seen",
    };

    return names[form];
}

/* -- publishers -------------------------------------------------------------------------------- */

void kc_follower_init(struct kc_follower *follower, kc_write_fn write)
{
    memset(follower, 0, sizeof(*follower));
    TAILQ_INIT(&follower->publishers);
    follower->write = write;
}

void kc_follower_fini(struct kc_follower *follower)
{
    struct kc_publisher *p;

    while ((p = TAILQ_FIRST(&follower->publishers))) {
        TAILQ_REMOVE(&follower->publishers, p, entry);
        kve_reader_destroy(p->reader);
        free(p->from);
        free(p);
    }
    kv_buf_fini(&follower->out);
}

/* Count and write an event that the reader has come to. */
static void see_event(void *arg, const struct kve_seen *seen);

static struct kc_publisher *add_publisher(struct kc_follower *follower, struct kv_str from,
                                          struct kv_str topic)
{
    struct kve_reader_opts opts = KVE_READER_OPTS_INIT;
    struct kc_publisher *p = calloc(1, sizeof(*p));

    if (!p)
        return NULL;
    opts.block_size = 1; /* until an event tells */
    opts.max_salted = MAX_SALTED;
    p->from = malloc(from.len + 1 + topic.len);
    if (!p->from || kve_reader_create(&opts, &p->reader) < 0) {
        free(p->from);
        free(p);
        return NULL;
    }
    memcpy(p->from, from.p, from.len);
    p->from[from.len] = '\0';
    if (topic.len)
        memcpy(p->from + from.len + 1, topic.p, topic.len);
    p->topic = (struct kv_str){p->from + from.len + 1, topic.len};
    p->reader->watch = see_event;
    p->reader->watch_arg = follower;
    TAILQ_INSERT_TAIL(&follower->publishers, p, entry);
    follower->n_publishers++;
    return p;
}

static bool is_from(const struct kc_publisher *p, struct kv_str from, struct kv_str topic,
                    const struct kve_message *m)
{
    return p->topic.len == topic.len &&
           (!topic.len || memcmp(p->topic.p, topic.p, topic.len) == 0) &&
           p->has_id == m->has_publisher && p->id == m->publisher && kv_str_eq(from, p->from);
}

/* Find the publisher of a message, or make it. Returns 0, -ENOMEM, or -ENOSPC: there are too many. */
static int find_publisher(struct kc_follower *follower, const struct kc_message *message,
                          const struct kve_message *m)
{
    struct kv_str topic = {m->topic.data, KV_MIN(m->topic.len, (size_t)KC_MAX_TOPIC)};
    struct kc_publisher *p = NULL;

    TAILQ_FOREACH(p, &follower->publishers, entry)
    {
        if (is_from(p, message->from, topic, m))
            break;
    }
    follower->publisher = p;
    if (p)
        return 0;
    if (follower->n_publishers == KC_MAX_PUBLISHERS)
        return -ENOSPC;
    p = follower->publisher = add_publisher(follower, message->from, topic);
    if (!p)
        return -ENOMEM;
    p->has_id = m->has_publisher;
    p->id = m->publisher;
    return 0;
}

/* -- events ------------------------------------------------------------------------------------ */

void kc_write_news(struct kc_follower *follower, struct kc_news *news)
{
    news->publisher = follower->publisher;
    news->time_ns = follower->message->time_ns;
    news->numbered = follower->numbered;
    news->batch = follower->batch;
    if (follower->write)
        follower->write(&follower->out, news);
}

static void see_event(void *arg, const struct kve_seen *seen)
{
    const struct kve_raw_event *ev = seen->ev;
    static const enum kc_type types[] = {[KVE_RAW_STORED] = KC_STORED,
                                         [KVE_RAW_REMOVED] = KC_REMOVED,
                                         [KVE_RAW_CLEARED] = KC_CLEARED};
    const struct kve_medium *medium = kve_medium_find(ev->medium);
    struct kc_follower *follower = arg;
    struct kc_publisher *p = follower->publisher;
    struct kc_event event = {
        .rank = seen->rank,
        .has_worker = seen->has_worker,
        .worker = seen->worker,
        .tier = medium ? medium->tier : KV_N_TIERS,
        .hashes = seen->hashes,
        .n_hashes = ev->n_hashes,
        .n_tokens = ev->n_tokens,
        .block_size = ev->block_size,
        .parent = ev->parent,
        .group = ev->group,
        .has_block_size = ev->has_block_size && ev->block_size,
        .has_parent = ev->has_parent,
        .has_group = ev->has_group,
        .medium = ev->medium,
        .lora_name = ev->lora_name,
        .cache_salt = ev->cache_salt,
        .kind = ev->kind,
        .locality = ev->locality,
        .owner = ev->ownership,
    };

    p->counts.forms |= 1u << (seen->has_worker ? KC_FORM_ENVELOPES
                              : ev->is_map     ? KC_FORM_MAPS
                                               : KC_FORM_ARRAYS);
    if (ev->type != KVE_RAW_STORED && ev->type != KVE_RAW_REMOVED && ev->type != KVE_RAW_CLEARED)
        return;
    if (event.has_block_size && ev->block_size <= UINT32_MAX)
        p->reader->block_size = p->block_size = (uint32_t)ev->block_size;
    event.type = types[ev->type];
    p->counts.types[event.type]++;
    p->counts.blocks += event.n_hashes;
    if (event.type == KC_STORED)
        p->counts.tiers[event.tier] += event.n_hashes;
    kc_write_news(follower, &(struct kc_news){.what = KC_NEWS_EVENT, .event = &event});
}

/* -- messages ---------------------------------------------------------------------------------- */

void kc_note_gap(struct kc_follower *follower, uint64_t first, uint64_t last)
{
    struct kc_counts *counts = &follower->publisher->counts;

    counts->gaps++;
    counts->missed += last - first + 1;
    kc_write_news(follower, &(struct kc_news){.what = KC_NEWS_GAP, .first = first, .last = last});
}

void kc_check_number(struct kc_follower *follower)
{
    struct kc_publisher *p = follower->publisher;
    uint64_t batch = follower->batch;

    if (p->numbered && batch <= p->last) {
        p->counts.restarts++;
        kve_reader_reset(p->reader);
        kc_write_news(follower, &(struct kc_news){.what = KC_NEWS_RESTART, .last = p->last});
    } else if (p->numbered && batch - p->last > 1) {
        kc_note_gap(follower, p->last + 1, batch - 1);
    }
    p->numbered = true;
    p->last = batch;
}

void kc_note_unreadable(struct kc_follower *follower, size_t bytes)
{
    follower->publisher->counts.unreadable++;
    kc_write_news(follower, &(struct kc_news){.what = KC_NEWS_UNREADABLE, .bytes = bytes});
}

/* Write what the beginning of a payload that is no batch looks like. */
static void describe(struct kc_publisher *p, const struct kve_span *payload)
{
    const uint8_t *bytes = payload->data;
    struct kv_msgpack m;

    if (!payload->len) {
        snprintf(p->why, sizeof(p->why), "an empty payload");
        return;
    }
    if (bytes[0] == '{' || bytes[0] == '[') {
        snprintf(p->why, sizeof(p->why), "JSON? batches are msgpack");
        return;
    }
    kv_msgpack_init(&m, bytes, payload->len);
    kv_msgpack_skip(&m);
    if (kv_msgpack_failed(&m) || m.p != m.end)
        snprintf(p->why, sizeof(p->why), "no msgpack, or cut short: begins with %02x", bytes[0]);
    else
        snprintf(p->why, sizeof(p->why), "msgpack, but no batch of events: begins with %02x",
                 bytes[0]);
}

/* Decode a batch, whose number was checked. Returns 0 or -ENOMEM. */
static int read_batch(struct kc_follower *follower, const struct kve_message *m, size_t bytes)
{
    struct kc_publisher *p = follower->publisher;
    struct kc_counts before = p->counts;
    size_t written = follower->out.len;
    struct kve_batch batch;
    int rc = kve_reader_decode(p->reader, m->payload.data, m->payload.len, &batch);

    if (rc < 0) { /* a batch counts as a whole */
        p->counts = before;
        follower->out.len = written;
        describe(p, &m->payload);
        kc_note_unreadable(follower, bytes);
        return rc == -ENOMEM ? rc : 0;
    }
    p->counts.batches++;
    p->counts.events += batch.n_events;
    if (!follower->numbered)
        p->counts.forms |= 1u << KC_FORM_UNNUMBERED;
    for (size_t i = 0; i < KVE_N_SKIPS; i++)
        p->counts.skipped[i] += batch.skipped[i];
    return 0;
}

/* An envelope names its publisher and its number, whatever carries it. */
static void open_envelope(struct kve_message *m, bool *numbered)
{
    struct kve_envelope envelope;

    if (!kve_envelope_is_likely(m->payload.data, m->payload.len) ||
        kve_envelope_read(m->payload.data, m->payload.len, &envelope) < 0)
        return;
    m->has_publisher = *numbered = true;
    m->publisher = envelope.publisher;
    m->sequence = envelope.sequence;
}

/* Take a message's frames apart. Returns 0 or -EPROTO. */
static int parse(struct kc_follower *follower, const struct kc_message *message,
                 struct kve_message *ret)
{
    bool *numbered = &follower->numbered;

    *numbered = true;
    /* The first of several frames of no known form may be the topic of a publisher known already. */
    *ret = (struct kve_message){.topic = {"", 0}};
    if (message->n_frames > 1)
        ret->topic = message->frames[0];
    if (message->n_frames > KVE_MAX_FRAMES)
        return -EPROTO;
    if (kc_are_records(message)) {
        ret->payload = message->frames[1];
        return 0;
    }
    if (kve_message_parse_live(message->frames, message->n_frames, ret) < 0 &&
        kve_message_parse_short(message->frames, message->n_frames, ret, numbered) < 0)
        return -EPROTO;
    open_envelope(ret, numbered);
    return 0;
}

static size_t bytes_of(const struct kc_message *message)
{
    size_t n = 0;

    for (size_t i = 0; i < KV_MIN(message->n_frames, (size_t)KVE_MAX_FRAMES); i++)
        n += message->frames[i].len;
    return n;
}

int kc_follower_take(struct kc_follower *follower, const struct kc_message *message)
{
    size_t bytes = bytes_of(message);
    struct kve_message m;
    int parsed = parse(follower, message, &m), rc;

    follower->message = message;
    follower->n_messages++;
    rc = find_publisher(follower, message, &m);
    if (rc == -ENOSPC)
        follower->n_beyond++;
    if (rc < 0)
        return rc == -ENOSPC ? 0 : rc;
    follower->publisher->last_ns = message->time_ns;
    follower->publisher->counts.bytes += bytes;
    if (parsed < 0) {
        snprintf(follower->publisher->why, sizeof(follower->publisher->why),
                 "%zu frame%s, not [topic] [number of 8 bytes] [batch]", message->n_frames,
                 message->n_frames == 1 ? "" : "s");
        follower->numbered = false;
        kc_note_unreadable(follower, bytes);
        return 0;
    }
    if (kc_are_records(message))
        return kc_read_records(follower, &m, bytes);
    follower->batch = m.sequence;
    if (follower->numbered)
        kc_check_number(follower);
    return read_batch(follower, &m, bytes);
}
