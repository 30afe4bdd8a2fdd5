// SPDX-License-Identifier: Apache-2.0
/**
 * `kvasir doctor`: asks a kv-indexer and an engine, and says in words what is wrong.
 *
 *     ask_indexer.c   /, /ready, /metrics, /workers: versions, clock, limits, connections
 *     ask_engine.c    its ports, events and replays: block size, losses, clock; its first blocks
 *     registered.c    does the registration fit that engine?
 *     agree.c         would the router's prompt meet the engine's blocks?
 *     show.c          text and JSON
 *
 * findings.def has all that can be found; port.h tells who listens at a port; answers.h reads JSON.
 */
#ifndef KV_CLI_DOCTOR_DOCTOR_H
#define KV_CLI_DOCTOR_DOCTOR_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

#include "base/core/buf.h"
#include "cli/client/http.h"
#include "cli/doctor/answers.h"
#include "cli/doctor/findings.h"

struct kc_doctor_opts {
    const char *url, *auth_token_file, *cacert;
    const char *model, *tenant, *lora_name, *cache_salt;
    const char *engine, *replay, *engine_url, *engine_token_file, *engine_model;
    const char *tokens, *text, *chat; /* files */
    uint64_t time_ms, timeout_ms;
    bool json;
};

/** Clocks that differ by more seconds than this are a finding. */
#define KC_CLOCK_SECONDS 5.0

enum { KC_FIRST_BLOCKS = 256, KC_FIRST_TOKENS = 1024 };

/** A block at the beginning of a prompt, that the engine has stored and not removed. */
struct kc_first_block {
    uint64_t name; /* the engine's hash */
    uint32_t tokens[KC_FIRST_TOKENS];
    uint32_t n_tokens;
    bool is_plain; /* its hash is that of its tokens alone: no images, no tokens behind the block */
    char lora[128], salt[128]; /* "": none; cut */
};

/** The state of an engine, as its ports and events tell it. */
struct kc_engine {
    bool asked;          /* an engine was named */
    bool heard;          /* there was a connection to its events */
    bool replay_ok;      /* its replay endpoint answered */
    uint64_t batches;    /* readable ones */
    uint64_t block_size; /* of the last event that names one; 0: none has */
    bool has_last;
    uint64_t last;                /* number of its newest batch */
    struct kc_first_block *first; /* KC_FIRST_BLOCKS of them, the newest ones */
    size_t n_first;
};

struct kc_doctor {
    struct kc_doctor_opts opts;
    struct kc_report report;
    struct kc_http *http;        /* to kv-indexer */
    struct kc_http *engine_http; /* NULL: no --engine-url */
    bool indexer_answers;
    char version[32];
    struct kc_listeners listeners;
    const struct kc_listener *registered; /* the engine's; NULL: none is known */
    char endpoint[320], replay[320];      /* the engine's; "": none */
    struct kc_engine engine;
    struct kv_buf prompt; /* u32 tokens of the router; empty: none */
};

/** Each asks, and notes what it finds. Returns 0, -ENOMEM, or -EINTR. */
int kc_ask_indexer(struct kc_doctor *doctor);
int kc_ask_engine(struct kc_doctor *doctor);
int kc_check_registered(struct kc_doctor *doctor);
/** Asks only with a kv-indexer that answers. */
int kc_check_agreement(struct kc_doctor *doctor);
/** Read GET /workers again. Returns 0, or -EPROTO when kv-indexer stopped to answer. */
int kc_read_listeners(struct kc_doctor *doctor);
/** Find the registration of the engine, by its endpoint. */
void kc_find_registered(struct kc_doctor *doctor);
/** Ask @http's engine for the tokens of --text or --chat. Returns 0; -EPROTO: it was noted why not. */
int kc_ask_tokenize(struct kc_doctor *doctor, struct kv_buf *ret);

/** Write the report, as text or as one line of JSON. @color: with colours of a terminal. */
void kc_report_text(const struct kc_doctor *doctor, bool color, struct kv_buf *out);
void kc_report_json(const struct kc_doctor *doctor, struct kv_buf *out);

#endif
