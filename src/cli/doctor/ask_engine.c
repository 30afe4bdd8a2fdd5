// SPDX-License-Identifier: Apache-2.0
/*
 * The engine's ports, and what it publishes. Subscribe first, ask for the replay, then listen: no batch
 * falls between the two. Batches that both bring count once.
 */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/core/clock.h"
#include "base/net/endpoint.h"
#include "cli/doctor/doctor.h"
#include "cli/doctor/port.h"
#include "cli/events/ask.h"
#include "cli/events/follow.h"
#include "cli/events/source.h"
#include "cli/show/bar.h"
#include "event/wire/extra_keys.h"
#include "indexer/zmq/place.h"

#define REPLAY_TIMES 4u /* a replay may take so many times --timeout */

/* Two followers, since numbers of the two sources begin anew; one reader for the blocks of both. */
struct ear {
    struct kc_doctor *doctor;
    struct kc_follower live, replayed;
    struct kve_reader *reader;
    bool replaying;
    uint64_t replay_until_ns; /* a replay that goes on so long is left */
    double
        skew; /* of the live batch with the smallest one, in seconds: engine minus this machine */
    bool has_skew;
    uint64_t live_batches, replay_batches;
};

/* -- first blocks ------------------------------------------------------------------------------ */

static void forget(struct kc_engine *engine, const uint64_t *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        for (size_t k = 0; k < engine->n_first; k++)
            if (engine->first[k].name == names[i]) {
                engine->first[k] = engine->first[--engine->n_first];
                break;
            }
}

static void copy_name(struct kv_str s, char *ret, size_t size)
{
    s.len = KV_MIN(s.len, size - 1);
    if (s.len)
        memcpy(ret, s.p, s.len);
    ret[s.len] = '\0';
}

static void remember(struct kc_engine *engine, const struct kve_raw_event *ev, uint64_t name,
                     const uint32_t *tokens)
{
    struct kve_extra_walk walk;
    uint64_t objects[KVE_MAX_MM];
    struct kc_first_block *block;

    forget(engine, &name, 1);
    if (engine->n_first == KC_FIRST_BLOCKS)
        memmove(engine->first, engine->first + 1,
                --engine->n_first * sizeof(*engine->first)); /* the oldest */
    block = &engine->first[engine->n_first++];
    block->name = name;
    block->n_tokens = (uint32_t)ev->block_size;
    memcpy(block->tokens, tokens, ev->block_size * sizeof(*tokens));
    copy_name(kve_extra_adapter(ev), block->lora, sizeof(block->lora));
    copy_name(kve_extra_salt(ev), block->salt, sizeof(block->salt));
    kve_extra_walk_init(&walk, ev);
    block->is_plain = kve_extra_walk_next(&walk, objects) == 0 && !ev->pairs && !ev->lookahead.p;
}

static void see_event(void *arg, const struct kve_seen *seen)
{
    struct ear *ear = arg;
    struct kc_engine *engine = &ear->doctor->engine;
    const struct kve_raw_event *ev = seen->ev;
    const struct kve_medium *medium = kve_medium_find(ev->medium);
    bool device = !ev->medium.len || (medium && medium->tier == KV_TIER_DEVICE);

    if (ev->type == KVE_RAW_CLEARED && device)
        engine->n_first = 0;
    else if (ev->type == KVE_RAW_REMOVED && device)
        forget(engine, seen->hashes, ev->n_hashes);
    if (ev->type != KVE_RAW_STORED || (ev->has_group && ev->group))
        return;
    if (ev->has_block_size && ev->block_size)
        engine->block_size = ev->block_size;
    if (device && !ev->has_parent && ev->n_hashes && ev->block_size &&
        ev->block_size <= KC_FIRST_TOKENS && ev->n_tokens >= ev->block_size)
        remember(engine, ev, seen->hashes[0], ear->reader->scratch.tokens);
}

/* -- messages ---------------------------------------------------------------------------------- */

static void note_time(struct ear *ear, const struct kc_message *message,
                      const struct kve_message *m)
{
    double time = kc_batch_time(m->payload.data, m->payload.len), skew;

    if (time <= 0)
        return;
    skew = time - (double)message->time_ns / 1e9;
    if (!ear->has_skew || fabs(skew) < fabs(ear->skew))
        ear->skew = skew;
    ear->has_skew = true;
}

static int take(void *arg, const struct kc_message *message)
{
    struct ear *ear = arg;
    struct kc_engine *engine = &ear->doctor->engine;
    struct kve_batch batch;
    struct kve_message m;
    bool numbered = true;

    if (ear->replaying && kv_now_ns() > ear->replay_until_ns)
        return -EOVERFLOW;
    if (kc_follower_take(ear->replaying ? &ear->replayed : &ear->live, message) < 0)
        return -ENOMEM;
    if (message->n_frames > KVE_MAX_FRAMES ||
        (kve_message_parse_live(message->frames, message->n_frames, &m) < 0 &&
         kve_message_parse_short(message->frames, message->n_frames, &m, &numbered) < 0))
        return 0;
    if (!ear->replaying && numbered && engine->has_last && ear->replay_batches &&
        m.sequence <= engine->last && engine->last - m.sequence < ear->replay_batches)
        return 0; /* the replay brought it */
    if (kve_reader_decode(ear->reader, m.payload.data, m.payload.len, &batch) < 0)
        return 0;
    engine->batches++;
    if (ear->replaying)
        ear->replay_batches++;
    else
        ear->live_batches++;
    if (numbered) {
        engine->last = m.sequence;
        engine->has_last = true;
    }
    if (!ear->replaying)
        note_time(ear, message, &m);
    return 0;
}

/* -- ports ------------------------------------------------------------------------------------- */

struct port_findings {
    enum kc_finding name, refused, hangs_up, other, swapped;
    const char *types; /* socket types that fit, with spaces around each */
};

static const struct port_findings EVENTS = {KC_FINDING_events_name,     KC_FINDING_events_refused,
                                            KC_FINDING_events_hangs_up, KC_FINDING_events_other,
                                            KC_FINDING_events_swapped,  " PUB XPUB "};
static const struct port_findings REPLAY = {KC_FINDING_replay_name,     KC_FINDING_replay_refused,
                                            KC_FINDING_replay_hangs_up, KC_FINDING_replay_other,
                                            KC_FINDING_replay_swapped,  " ROUTER REP "};

static bool fits(const char *types, const char *type)
{
    char word[20];

    snprintf(word, sizeof(word), " %s ", type);
    return !type[0] || strstr(types, word);
}

/* Ask a port who it is. Returns whether the right kind of socket listens there. */
static bool ask_port(struct kc_doctor *doctor, const char *url,
                     const struct port_findings *findings)
{
    struct kc_report *report = &doctor->report;
    struct kc_port_answer answer = {.what = KC_PORT_REFUSED};
    enum kc_finding finding = findings->swapped;
    struct ki_place place;
    const char *why;

    if (ki_place_parse(url, &place, &why) < 0)
        return false;
    kc_port_ask(&place.endpoint, doctor->opts.timeout_ms, &answer);
    switch (answer.what) {
    case KC_PORT_NAME:
        finding = findings->name;
        break;
    case KC_PORT_REFUSED:
        finding = findings->refused;
        break;
    case KC_PORT_HANGS_UP:
        finding = findings->hangs_up;
        break;
    case KC_PORT_OTHER:
        finding = findings->other;
        break;
    default:
        if (fits(findings->types, answer.type)) {
            kc_well(report, "%s: %s", url, answer.said);
            return true;
        }
    }
    kc_found(report, finding, "%s: %s", url, answer.said);
    return false;
}

/* -- judging ----------------------------------------------------------------------------------- */

static void add_skipped(const struct kc_counts *counts, char *ret, size_t size)
{
    size_t len = strlen(ret);

    for (unsigned i = 0; i < KVE_N_SKIPS; i++) {
        bool of_registration = i == KVE_SKIP_BLOCK_SIZE || i == KVE_SKIP_NAMESPACE ||
                               i == KVE_SKIP_TOKEN_COUNT; /* what a registration decides */

        if (counts->skipped[i] && !of_registration && len + 40 < size)
            len += (size_t)snprintf(ret + len, size - len, "%s%s %" PRIu64, len ? ", " : "",
                                    kve_skip_name((enum kve_skip)i), counts->skipped[i]);
    }
}

/* Note the engine's generation, as far as the form of its batches shows it. */
static void note_forms(struct kc_report *report, const struct kc_counts *counts)
{
    for (unsigned i = 0; i < KC_FORM_UNNUMBERED; i++)
        if (counts->forms & 1u << i)
            kc_well(report, "the engine publishes %s", kc_form_name((enum kc_form)i));
}

static void judge_publishers(struct ear *ear, const struct kc_follower *follower, bool live)
{
    struct kc_report *report = &ear->doctor->report;
    const char *how = live ? "live" : "replayed";
    char skipped[200] = "";
    struct kc_publisher *p = NULL;

    TAILQ_FOREACH(p, &follower->publishers, entry)
    {
        const struct kc_counts *c = &p->counts;

        if (c->unreadable)
            kc_found(report, KC_FINDING_malformed, "%" PRIu64 " of %" PRIu64 " messages, %s: %s",
                     c->unreadable, c->unreadable + c->batches, how, p->why);
        if (c->forms & 1u << KC_FORM_UNNUMBERED)
            kc_found(report, KC_FINDING_unnumbered, "%" PRIu64 " batches came without a number",
                     c->batches);
        if (live && c->gaps)
            kc_found(report, KC_FINDING_events_lost,
                     "%" PRIu64 " of %" PRIu64 " batch numbers never came while doctor listened",
                     c->missed, c->missed + c->batches);
        add_skipped(c, skipped, sizeof(skipped));
        note_forms(report, c);
    }
    if (skipped[0])
        kc_found(report, KC_FINDING_events_left_out, "%s: %s", how, skipped);
}

static void judge(struct ear *ear, double seconds)
{
    struct kc_doctor *doctor = ear->doctor;
    struct kc_engine *engine = &doctor->engine;
    struct kc_report *report = &doctor->report;

    judge_publishers(ear, &ear->live, true);
    judge_publishers(ear, &ear->replayed, false);
    if (!engine->batches && engine->heard && !report->times[KC_FINDING_malformed] &&
        !(doctor->registered && doctor->registered->batches)) /* kv-indexer has heard it */
        kc_found(report, KC_FINDING_no_events, "connected, and no batch in %.1f s%s", seconds,
                 engine->replay_ok ? "; its replay is empty, too" : "");
    if (engine->batches)
        kc_well(report,
                "%" PRIu64 " batch%s in %.1f s, and %" PRIu64 " from the replay, with %zu blocks "
                "that begin a prompt, of %" PRIu64 " tokens",
                ear->live_batches, ear->live_batches == 1 ? "" : "es", seconds, ear->replay_batches,
                engine->n_first, engine->block_size);
    if (!ear->has_skew)
        return;
    if (fabs(ear->skew) > KC_CLOCK_SECONDS)
        kc_found(report, KC_FINDING_engine_clock, "its newest batches are stamped %.0f s %s",
                 fabs(ear->skew), ear->skew > 0 ? "in the future" : "in the past");
    else
        kc_well(report, "the engine's clock agrees within %.0f s", KC_CLOCK_SECONDS);
}

/* -- listening --------------------------------------------------------------------------------- */

static int ask_replay(struct ear *ear)
{
    struct kc_doctor *doctor = ear->doctor;
    struct kv_error error = {0};
    int rc;

    if (!doctor->replay[0]) {
        kc_found(&doctor->report, KC_FINDING_replay_missing, "%s",
                 doctor->registered ? "the registration has none, and --replay wasn't given"
                                    : "--replay wasn't given");
        return 0;
    }
    if (!ask_port(doctor, doctor->replay, &REPLAY))
        return 0;
    ear->replaying = true;
    ear->replay_until_ns = kv_ns_after(kv_now_ns(), REPLAY_TIMES * doctor->opts.timeout_ms);
    rc = kc_ask_replays(doctor->replay, 0, doctor->opts.timeout_ms, take, ear, &error);
    ear->replaying = false;
    if (rc == 0)
        doctor->engine.replay_ok = true;
    else if (rc == -EOVERFLOW)
        kc_found(&doctor->report, KC_FINDING_replay_long, "%" PRIu64 " batches in %.1f s, and more",
                 ear->replay_batches, (double)(REPLAY_TIMES * doctor->opts.timeout_ms) / 1e3);
    else if (rc != -ENOMEM && rc != -EINTR)
        kc_found(&doctor->report, KC_FINDING_replay_silent, "no answer in %.1f s",
                 (double)doctor->opts.timeout_ms / 1e3);
    else
        return rc;
    if (rc == 0)
        kc_well(&doctor->report, "the replay endpoint answers, with %" PRIu64 " batch%s",
                ear->replay_batches, ear->replay_batches == 1 ? "" : "es");
    return 0;
}

static int hear(struct ear *ear)
{
    struct kc_doctor *doctor = ear->doctor;
    const struct kvp_nats_args nats = {.user = NULL};
    struct kc_source_state state = {.connected = 0};
    uint64_t start_ns = kv_now_ns(), now_ns;
    struct kc_source *source;
    struct kv_error error = {0};
    int rc;

    rc = kc_source_open(doctor->opts.engine, &nats, NULL, &source, &error);
    if (rc < 0)
        return rc == -ENOMEM ? rc : 0; /* the port's answer has said why */
    do {
        rc = kc_source_run(source, kv_ns_after(kv_now_ns(), 50), take, ear);
        kc_source_state(source, &state);
        now_ns = kv_now_ns();
    } while (rc == 0 && !state.connected &&
             now_ns < kv_ns_after(start_ns, doctor->opts.timeout_ms) && !kc_bar_interrupted());
    if (rc == 0)
        rc = ask_replay(ear);
    now_ns = kv_now_ns();
    if (rc == 0)
        rc = kc_source_run(source, kv_ns_after(now_ns, doctor->opts.time_ms), take, ear);
    kc_source_state(source, &state);
    doctor->engine.heard = state.ever;
    kc_source_close(source);
    if (rc == 0)
        judge(ear, (double)(kv_now_ns() - now_ns) / 1e9);
    return rc < 0 ? rc : kc_bar_interrupted() ? -EINTR : 0;
}

int kc_ask_engine(struct kc_doctor *doctor)
{
    struct kve_reader_opts opts = KVE_READER_OPTS_INIT;
    struct ear ear = {.doctor = doctor};
    int rc;

    doctor->engine.asked = true;
    doctor->engine.first = calloc(KC_FIRST_BLOCKS, sizeof(*doctor->engine.first));
    opts.block_size = 1;
    if (!doctor->engine.first || kve_reader_create(&opts, &ear.reader) < 0)
        return -ENOMEM;
    ear.reader->watch = see_event;
    ear.reader->watch_arg = &ear;
    kc_follower_init(&ear.live, NULL);
    kc_follower_init(&ear.replayed, NULL);
    if (ask_port(doctor, doctor->opts.engine, &EVENTS))
        rc = hear(&ear);
    else
        rc = ask_replay(&ear);
    kc_follower_fini(&ear.live);
    kc_follower_fini(&ear.replayed);
    kve_reader_destroy(ear.reader);
    return rc;
}
