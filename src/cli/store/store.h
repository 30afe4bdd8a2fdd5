// SPDX-License-Identifier: Apache-2.0
/**
 * `kvasir store`: the functions of include/kv_store.h for people and scripts. Internal to the room.
 * store_main.c parses and dispatches, store_commands.c has the table of commands, store_say.c errors
 * and JSON; the other store_*.c are the commands.
 */
#ifndef KV_CLI_STORE_STORE_H
#define KV_CLI_STORE_STORE_H

#include <stdio.h>

#include "base/args/args.h"
#include "base/core/buf.h"
#include "base/json/json.h"
#include "cli/show/bar.h"
#include "kv_store.h"

/** Exit statuses, as docs/man/kvasir-store.1 promises them. */
enum kc_store_status {
    KC_STORE_OK,
    KC_STORE_PROBLEMS, /* stored bytes are damaged, or a check failed */
    KC_STORE_USAGE,
    KC_STORE_UNREACHABLE, /* the store can't be opened, or doesn't answer */
    KC_STORE_NOT_FOUND,
    KC_STORE_FAILED, /* any other failure */
    KC_STORE_INTERRUPTED = 130
};

struct kc_store_opts {
    bool json, quiet;
    const char *format, *fingerprint;
    uint64_t chunk, chunk_tokens, total;
    bool verify_first, verify;
    uint64_t offset, length;
    bool names, chunks;
    const char *prefix;
    uint64_t grace_ms, prefix_age_ms;
    bool no_grace, opaque_too, dry_run;
    uint64_t size, rounds;
    const char *yardstick;
    const char *to, *from, *keys;
    uint64_t least, most, idle_ms;
};

/** One run of a command. */
struct kc_store_call {
    const char *command; /* "save" */
    struct kc_store_opts opts;
    const char *uri, *name, *file; /* the command's arguments; NULL when it takes none */
    char label[512];               /* the URI without its secrets */
    bool data_on_stdout;           /* reports must go to standard error */
    struct kvs_store *store;       /* NULL for conformance, which opens it itself */
    struct kc_bar bar;
    struct kv_buf out; /* JSON */
    bool printed;      /* all of it is printed */
    struct kv_json_writer json;
};

/** Run a command. Return an exit status. */
int kc_store_save(struct kc_store_call *call);
int kc_store_restore(struct kc_store_call *call);
int kc_store_ls(struct kc_store_call *call);
int kc_store_show(struct kc_store_call *call);
int kc_store_rm(struct kc_store_call *call);
int kc_store_verify(struct kc_store_call *call);
int kc_store_gc(struct kc_store_call *call);
int kc_store_stats(struct kc_store_call *call);
int kc_store_pack(struct kc_store_call *call);
int kc_store_conformance(struct kc_store_call *call);
int kc_store_bench(struct kc_store_call *call);

/**
 * Print on standard error that @what (a name, a label) failed with @rc; with --json, print an
 * object of its own, too. Returns the exit status.
 */
int kc_store_fail(struct kc_store_call *call, const char *what, int rc);
/**
 * Report the failure of a file of the user's: a missing file is no missing object. Returns the exit
 * status.
 */
int kc_store_fail_file(struct kc_store_call *call, const char *file, int rc);
/** Report a failure in words. Returns @status. */
int kc_store_fail_as(struct kc_store_call *call, const char *text, int status);
/** Report the failure of @what, an object's name. Returns the exit status. */
int kc_store_fail_of(struct kc_store_call *call, const char *what, const char *text, int status);

/** Print that the store can't be opened, and why. Returns the exit status. */
int kc_store_fail_open(struct kc_store_call *call, int rc);

/** Print @text safely for a terminal: control characters and invalid UTF-8 become \xNN. */
void kc_store_put_text(FILE *f, const char *text);

/** Return true when the store deletes chunks for room: a missing chunk is then no damage. */
bool kc_store_is_limited(const struct kc_store_call *call);

/** Return true when the backend gives reasons for failures; one without extensions doesn't. */
bool kc_store_tells(const struct kc_store_call *call);

/**
 * Begin the JSON object of --json. Members follow with the kv_json functions, then
 * kc_store_json_end.
 */
void kc_store_json_begin(struct kc_store_call *call);
void kc_store_json_str(struct kc_store_call *call, const char *key, const char *value);
void kc_store_json_u64(struct kc_store_call *call, const char *key, uint64_t value);
void kc_store_json_double(struct kc_store_call *call, const char *key, double value);
/** Write the object to @f. Returns the exit status: @status unless writing failed. */
int kc_store_json_end(struct kc_store_call *call, FILE *f, int status);

const char *kc_store_format_name(enum kvs_format format);

#endif
