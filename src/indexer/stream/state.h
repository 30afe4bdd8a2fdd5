// SPDX-License-Identifier: Apache-2.0
/**
 * State of a stream at one batch, as a dump tells it: a replica that takes it over continues behind that
 * batch, and later batches then mean the same there.
 *
 * One more fact of this kind is a field or a row here, its line in docs/formats.md, and a test.
 *
 * ki_state_take and ki_state_give are caller-locked, by the listener's lock.
 */
#ifndef KV_INDEXER_STREAM_STATE_H
#define KV_INDEXER_STREAM_STATE_H

#include <stdbool.h>
#include <stdint.h>

#include "base/json/json.h"
#include "indexer/view/habits.h"
#include "indexer/view/reasons.h"

struct ki_listener;

/** Yes-or-no facts, bits of a set; state.c has their names and where they lie in a listener. */
enum ki_fact {
    KI_FACT_WINDOWS = 1, /* there were cache groups beside the main one */
    KI_FACT_HEALED =
        2, /* a clear has ended a loss, but leaves some tiers alone: struct kh_stream */
    KI_FACT_REPORTS = 4,  /* the stream has shown a report of held blocks */
    KI_FACT_SUSPECTS = 8, /* there were events that may have been reports */
    KI_FACT_TRUSTED = 16, /* it has shown so many copies that such events count as copies */
    KI_FACT_RETAINS = 32, /* some group has kept none of an event's blocks */
    KI_FACT_ADRIFT = 64,  /* no connection tells whether the process of the position still lives */
    KI_FACT_BEHIND = 128  /* batches behind the position are missing, or wait */
};

struct ki_state {
    uint64_t sequence;               /* of the last batch applied */
    double timestamp;                /* the publisher's, of that batch; 0: none */
    ki_reasons reasons;              /* for which a replica that goes on from here is partial */
    unsigned facts;                  /* enum ki_fact */
    enum ki_report_mode report_mode; /* as registered, or as the stream has shown */
    uint32_t n_real;                 /* see struct ki_ranges */
};

/** Copy @l's state at its position. */
void ki_state_take(const struct ki_listener *l, struct ki_state *ret);
/**
 * Let @l, which was seeded with this position, go on with the facts of the state. n_real belongs to the
 * ranges: it comes with these (struct ki_snapshot). A registered report mode stays.
 */
void ki_state_give(const struct ki_state *state, struct ki_listener *l);

/** Write the state as members of the object that @w is in. */
void ki_state_write(const struct ki_state *state, struct kv_json_writer *w);
/**
 * Read member @key, if it is one of a state. Returns false when it isn't: nothing is read. Members that
 * don't come leave *@state as it is.
 */
bool ki_state_read(struct ki_state *state, struct kv_json *json, struct kv_str key);

#endif
