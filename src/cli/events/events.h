// SPDX-License-Identifier: Apache-2.0
/** `kvasir events`: what its commands share. */
#ifndef KV_CLI_EVENTS_EVENTS_H
#define KV_CLI_EVENTS_EVENTS_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/args/args.h"
#include "cli/events/follow.h"
#include "plane/nats.h"
#include "plane/nats_args.h"

/** Exit statuses. */
enum {
    KC_EVENTS_OK,
    KC_EVENTS_BAD, /* no batch came, or a message that is none */
    KC_EVENTS_USAGE,
    KC_EVENTS_UNREACHED, /* no connection */
    KC_EVENTS_FAILED = 5,
    KC_EVENTS_INTERRUPTED = 130
};

/** Values of the options of all commands. */
struct kc_events_opts {
    bool json, fast;
    const char *record, *to;
    uint64_t batches; /* messages after which to end; 0: no end */
    uint64_t time_ms; /* 0: no end */
    uint64_t from, timeout_ms;
    struct kvp_nats_args nats;
    struct kvp_nats_durable durable; /* of NATS; without a name: plain NATS */
};

/** One call of a command. */
struct kc_events_call {
    const char *command; /* "tail" */
    const char *url;
    struct kc_events_opts opts;
    struct kc_follower follower;
    FILE *record;      /* NULL: nothing is recorded */
    uint64_t recorded; /* messages */
};

/** Run a command; @call's follower is empty. Return an exit status. */
int kc_events_tail(struct kc_events_call *call);
int kc_events_stat(struct kc_events_call *call);
int kc_events_replay(struct kc_events_call *call);

struct kc_events_command {
    const char *name;
    int (*run)(struct kc_events_call *call);
    const char *takes; /* "URL" */
    const struct kv_arg *args;
    size_t n_args;
    const char *help, *summary;
};

enum { KC_EVENTS_COMMANDS = 3 };
extern const struct kc_events_command kc_events_commands[KC_EVENTS_COMMANDS];

/** Print a reason on standard error. Returns @status. */
int kc_events_fail(const struct kc_events_call *call, int status, const char *fmt, ...)
    KV_PRINTF(3, 4);

/** Hand all messages of a recording to @fn, which returns 0 or an exit status. Returns 0 or that. */
int kc_events_read_file(struct kc_events_call *call, FILE *file, kc_message_fn fn, void *arg);
/** Publish all messages of a recording to opts.to. Returns an exit status. */
int kc_events_play(struct kc_events_call *call, FILE *file);

/** Print why a source can't be opened. Returns the status for it. */
int kc_events_fail_open(const struct kc_events_call *call, const struct kv_error *error);

/** Begin to print, and to record where --record asks for it. Returns 0, or an exit status. */
int kc_events_begin(struct kc_events_call *call);
/** Print and record a message, as a kc_message_fn whose @arg is the call. Returns 0 or an exit status. */
int kc_events_take(void *arg, const struct kc_message *message);
/**
 * End what kc_events_begin began, after a run that returned @rc, an exit status or 0. Returns @rc, or the
 * status that follows from what came.
 */
int kc_events_end(struct kc_events_call *call, int rc);

#endif
