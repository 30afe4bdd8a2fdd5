// SPDX-License-Identifier: Apache-2.0
/**
 * `kvasir store`: what include/kv_store.h does, for people and scripts. Internal to the room;
 * store_main.c parses and dispatches, the other store_*.c are the commands.
 */
#ifndef KV_CLI_STORE_H
#define KV_CLI_STORE_H

#include <stdio.h>

#include "base/args.h"
#include "base/buf.h"
#include "base/json.h"
#include "cli/bar.h"
#include "kv_store.h"

/** Exit statuses, as docs/man/kvasir-store.1 promises them. */
enum kc_store_status {
    KC_STORE_OK,
    KC_STORE_PROBLEMS, /* what is stored is damaged, or a check failed */
    KC_STORE_USAGE,
    KC_STORE_UNREACHABLE, /* the store can't be opened, or doesn't answer */
    KC_STORE_NOT_FOUND,
    KC_STORE_FAILED, /* anything else */
    KC_STORE_INTERRUPTED = 130
};

struct kc_store_opts {
    bool json, quiet;
    const char *format, *fingerprint;
    uint64_t chunk, chunk_tokens, total;
    bool verify_first;
    bool names, chunks;
    uint64_t grace_ms;
    bool no_grace, opaque_too, dry_run;
    uint64_t size, rounds;
    const char *yardstick;
};

/** One run of a command. */
struct kc_store_call {
    const char *command; /* "save" */
    struct kc_store_opts opts;
    const char *uri, *name, *file; /* what the command takes of them; else NULL */
    char label[512];               /* the URI without its secrets */
    bool data_on_stdout;           /* so that reports go to standard error */
    struct kvs_store *store;       /* NULL for conformance, which opens it itself */
    struct kc_bar bar;
    struct kv_buf out; /* JSON */
    bool printed;      /* all of it */
    struct kv_json_writer json;
};

/** Commands. Return an exit status. */
int kc_store_save(struct kc_store_call *call);
int kc_store_restore(struct kc_store_call *call);
int kc_store_ls(struct kc_store_call *call);
int kc_store_show(struct kc_store_call *call);
int kc_store_rm(struct kc_store_call *call);
int kc_store_verify(struct kc_store_call *call);
int kc_store_gc(struct kc_store_call *call);
int kc_store_stats(struct kc_store_call *call);
int kc_store_conformance(struct kc_store_call *call);
int kc_store_bench(struct kc_store_call *call);

/**
 * Say on standard error that @what (a name, a label) failed with @rc, with --json also in an object
 * of its own; returns the exit status for it.
 */
int kc_store_fail(struct kc_store_call *call, const char *what, int rc);
/** The same of a file of the user's: what is missing there is no missing object. */
int kc_store_fail_file(struct kc_store_call *call, const char *file, int rc);
/** The same in words. Returns @status. */
int kc_store_fail_as(struct kc_store_call *call, const char *text, int status);
/** The same of @what, a name. */
int kc_store_fail_of(struct kc_store_call *call, const char *what, const char *text, int status);

/** Print that the store can't be opened, and why. Returns the exit status. */
int kc_store_fail_open(struct kc_store_call *call, int rc);

/** @text as a terminal may see it: control characters and what isn't UTF-8 become \xNN. */
void kc_store_put_text(FILE *f, const char *text);

/** Whether the store deletes chunks for room: then a missing one is no damage. */
bool kc_store_is_limited(const struct kc_store_call *call);

/** Whether the backend tells why it fails; one without extensions tells nothing but that it did. */
bool kc_store_tells(const struct kc_store_call *call);

/** The JSON object that --json prints: begin it, put members with these, end it (prints). */
void kc_store_json_begin(struct kc_store_call *call);
void kc_store_json_str(struct kc_store_call *call, const char *key, const char *value);
void kc_store_json_u64(struct kc_store_call *call, const char *key, uint64_t value);
void kc_store_json_double(struct kc_store_call *call, const char *key, double value);
/** Writes to @f; returns the exit status, @status unless writing failed. */
int kc_store_json_end(struct kc_store_call *call, FILE *f, int status);

const char *kc_store_format_name(enum kvs_format format);

#endif
