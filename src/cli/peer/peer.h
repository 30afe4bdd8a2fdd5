// SPDX-License-Identifier: Apache-2.0
/**
 * `kvasir peer`: blocks of other nodes for people (docs/peers.md). Internal to the room.
 *
 *   peer_main.c    parses and dispatches; peer_options.c has the commands and their options
 *   peer_owner.c   tiers and an agent that lends their blocks
 *   peer_share.c   share
 *   peer_session.c a session with an owner
 *   peer_keys.c    keys of an owner: told by share, or from a file
 *   peer_look.c    look
 *   peer_lease.c   lease
 *   peer_read.c    read; bench_peers.c measures with it
 *   peer_say.c     failures in words, made-up blocks
 */
#ifndef KV_CLI_PEER_PEER_H
#define KV_CLI_PEER_PEER_H

#include "base/args/args.h"
#include "base/core/buf.h"
#include "base/json/json.h"
#include "kvbm.h"

/** Exit statuses, as the commands' --help promises them. */
enum kc_peer_status {
    KC_PEER_OK,
    KC_PEER_MISSES, /* a block didn't come, or came with wrong bytes */
    KC_PEER_USAGE,
    KC_PEER_REFUSED, /* no session: nobody there, or refused */
    KC_PEER_FAILED = 5,
    KC_PEER_INTERRUPTED = 130
};

#define KC_PEER_DEMO "kvasir peer demo" /* fingerprint of made-up blocks */
#define KC_PEER_BATCH 32u
#define KC_PEER_SET 1u /* by custom the set of host blocks */

/** Options of all commands; zero means the default. */
struct kc_peer_opts {
    bool json;
    /* of agents */
    const char *name, *fingerprint, *token, *tls_cert, *tls_key, *tls_ca, *tls_name;
    uint64_t key_len;
    /* share */
    struct kv_arg_list listen;
    const char *dir, *dtype, *order;
    bool unprotected;
    uint64_t demo, host, block, layers, parts, page, heads, lease_share;
    /* look, lease, read */
    const char *keys;
    uint64_t set, group, blocks, time_ms, timeout_ms;
    /* read */
    uint64_t batch, passes, data;
    bool no_shared, no_checksums;
};

/** Say "kvasir peer COMMAND: ..." on standard error. Returns @status. */
int kc_peer_fail(const char *command, int status, const char *fmt, ...) KV_PRINTF(3, 4);

/** Write a JSON object and free it. Returns the exit status: @status unless writing failed. */
int kc_peer_json_end(struct kv_json_writer *json, struct kv_buf *out, int status);

/** Word of a tier: "device", "host", "disk", "object store". */
const char *kc_peer_tier(unsigned tier);

/** Fill a made-up block, or tell whether @data is the one of @key. @len: a multiple of 8. */
void kc_peer_fill(uint64_t key, void *data, size_t len);
bool kc_peer_is_filled(uint64_t key, const void *data, size_t len);

/* ---- owners ---- */

/** Tiers, and an agent that lends their blocks. */
struct kc_owner {
    struct kvbm_layout_config block;
    uint32_t key_len;
    struct kvbm_manager *manager;
    struct kvbm_agent *agent;
    struct kvbm_blockset *set;
};

/** Make tiers of @opts, fill them with @opts->demo blocks, and lend them. Returns an exit status. */
int kc_owner_open(const char *command, const struct kc_peer_opts *opts, struct kc_owner *ret);

/** End all leases and free it. */
void kc_owner_close(struct kc_owner *owner);

/* ---- keys of an owner: a request of this program's own (docs/formats.md) ---- */

/** Answer a reader's question for the keys of all tiers. Returns 0 or an error. */
int kc_keys_serve(struct kc_owner *owner);

/**
 * Ask a peer for its keys, at most @max (0: all). They are appended to @ret, packed. Returns their
 * number; -EOPNOTSUPP: the peer is no `kvasir peer share`; or an error of the session.
 */
long kc_keys_ask(struct kvbm_session *session, uint32_t group, uint32_t key_len, uint64_t max,
                 uint64_t timeout_ms, struct kv_buf *ret);

/** Read keys of @key_len bytes in hexadecimal from a file. Returns their number, or an error. */
long kc_keys_read(const char *path, uint32_t key_len, struct kv_buf *ret, struct kv_error *error);

/** Text of a key: one of 8 bytes as a number in 16 digits, others byte for byte. */
const char *kc_key_text(const void *key, uint32_t len, char ret[2 * KVBM_MAX_KEY + 1]);

/* ---- readers ---- */

/** A session with an owner, and what a command needs of it. */
struct kc_reader {
    const char *command, *endpoint;
    const struct kc_peer_opts *opts;
    struct kvbm_agent *agent;
    struct kvbm_session *session;
    struct kvbm_session_info info;
    uint64_t opened_ns; /* how long the session took */
    uint32_t key_len, set, group;
    struct kvbm_layout_config layout; /* of the set; num_blocks 0: the peer has no such set */
    uint64_t block_bytes;
    struct kv_buf keys; /* packed */
    size_t n_keys;
    bool lists;     /* the peer has told its keys */
    uint8_t *tiers; /* [n_keys] as kvbm_session_lookup */
};

/** Open a session. Returns an exit status; with one that isn't 0 nothing is left. */
int kc_reader_open(const char *command, const char *endpoint, const struct kc_peer_opts *opts,
                   struct kc_reader *ret);
void kc_reader_close(struct kc_reader *reader);

/** Get keys from --keys, or from the peer, and look them up. Returns an exit status. */
int kc_reader_find(struct kc_reader *reader);

/** Now plus --timeout. */
uint64_t kc_reader_deadline(const struct kc_reader *reader);

/** Way of the session in words: "shared memory", "a socket", "a TLS socket". */
const char *kc_reader_way(const struct kc_reader *reader, bool shared);

/** Figures of reading all keys of a reader, --passes times. */
struct kc_reading {
    uint64_t blocks, bytes;                /* right ones */
    uint64_t absent, gone, refused, lost;  /* misses, by reason */
    uint64_t wrong;                        /* of demo blocks: other bytes */
    uint64_t copy_ns, lease_ns, n_batches; /* of kvbm_lease_read; of kvbm_session_lease */
    uint64_t longest_ns;                   /* batch: lease and copy */
    bool shared;
    int err; /* of the session that ended, or of the first lease that failed */
};

/** Lease and copy all keys in batches. Returns 0 or -ENOMEM; everything else is in @ret. */
int kc_reader_read(struct kc_reader *reader, struct kc_reading *ret);

/* ---- commands: @endpoint is NULL for share. Return an exit status. ---- */

int kc_peer_share(const struct kc_peer_opts *opts, const char *endpoint);
int kc_peer_look(const struct kc_peer_opts *opts, const char *endpoint);
int kc_peer_lease(const struct kc_peer_opts *opts, const char *endpoint);
int kc_peer_read(const struct kc_peer_opts *opts, const char *endpoint);

/** A command, its options and its help. */
struct kc_peer_command {
    const char *name;
    int (*run)(const struct kc_peer_opts *opts, const char *endpoint);
    const char *takes;
    const struct kv_arg *args;
    size_t n_args;
    const char *help, *summary;
};

#define KC_PEER_COMMANDS 4
extern const struct kc_peer_command kc_peer_commands[KC_PEER_COMMANDS];

/** Options that all commands take: whose blocks, and who may come in. */
#define KC_PEER_COMMON_ARGS 8
extern const struct kv_arg kc_peer_common_args[KC_PEER_COMMON_ARGS];

#endif
