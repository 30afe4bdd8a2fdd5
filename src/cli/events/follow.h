// SPDX-License-Identifier: Apache-2.0
/**
 * Follow publishers: messages in, events and losses out, and counts by publisher.
 *
 *     message ──► its publisher (address, topic, id) ──► number: gap? restart? ──► batch ──► events
 *                                                                     └─► no batch: unreadable
 *
 * Each event has the form of an event, no more: kv-indexer's rules (block size, groups, salts) leave
 * some out. What its reader would leave out whatever the registration says is counted by reason.
 * Thread-confined.
 */
#ifndef KV_CLI_EVENTS_FOLLOW_H
#define KV_CLI_EVENTS_FOLLOW_H

#include <stdbool.h>
#include <sys/queue.h>

#include "cli/events/message.h"
#include "event/reader/reader.h"

/** Publishers told apart, and the bytes of a topic that tell them apart. */
#define KC_MAX_PUBLISHERS 1024
#define KC_MAX_TOPIC 256

enum kc_type { KC_STORED, KC_REMOVED, KC_CLEARED, KC_N_TYPES };

/** Forms in which batches came: a bit each. */
enum kc_form {
    KC_FORM_MAPS,       /* events as maps: vLLM from 0.24 on */
    KC_FORM_ARRAYS,     /* events as arrays: SGLang, vLLM before 0.24 */
    KC_FORM_ENVELOPES,  /* envelopes of Dynamo's event plane */
    KC_FORM_RECORDS,    /* KVEvent records of block managers */
    KC_FORM_UNNUMBERED, /* messages without a batch number */
    KC_N_FORMS
};

/** Counts of one publisher since its first message. */
struct kc_counts {
    uint64_t batches, bytes; /* bytes: of all frames, of unreadable messages, too */
    uint64_t events, blocks; /* blocks: stored and removed */
    uint64_t types[KC_N_TYPES];
    uint64_t tiers[KV_N_TIERS + 1]; /* stored blocks by tier; the last: of unknown media */
    uint64_t gaps, missed, restarts;
    uint64_t unreadable; /* messages */
    uint64_t
        snapshots; /* messages that are parts of one: not numbered, and not in types and blocks */
    uint64_t skipped[KVE_N_SKIPS];
    uint32_t forms; /* bit 1 << kc_form */
};

struct kc_publisher {
    TAILQ_ENTRY(kc_publisher) entry;
    char *from; /* the address; the topic behind it in the same memory */
    struct kv_str topic;
    bool has_id; /* messages name their publisher */
    uint64_t id;
    struct kve_reader *reader;
    uint64_t incarnation; /* of KVEvent records; 0: none came */
    bool numbered;        /* it has sent a number: the last one is @last */
    uint64_t last;        /* number of the last batch */
    uint64_t last_ns;     /* time of the last message since the epoch */
    uint32_t block_size;  /* of the last event that names one; 0: none has */
    char why[96];         /* why the last unreadable message was none */
    struct kc_counts counts;
};

/** An event; pointers are valid during the call. */
struct kc_event {
    enum kc_type type;
    uint32_t rank;
    bool has_worker; /* the event names its worker */
    uint64_t worker;
    enum kv_tier tier; /* KV_N_TIERS: the medium is unknown */
    const uint64_t *hashes;
    size_t n_hashes, n_tokens;
    uint64_t block_size, parent, group;
    bool has_block_size, has_parent, has_group;
    /* Of KVEvent records: the block's place and its bytes. */
    bool is_record, has_prefix, has_tokens_hash;
    uint64_t position, prefix, tokens_hash, block_bytes, volume;
    struct kv_str medium, lora_name, cache_salt, kind, locality, owner; /* empty: none */
};

/** One thing that a message told. */
struct kc_news {
    enum { KC_NEWS_EVENT, KC_NEWS_GAP, KC_NEWS_RESTART, KC_NEWS_UNREADABLE } what;
    const struct kc_publisher *publisher;
    uint64_t time_ns; /* since the epoch */
    bool numbered;
    uint64_t batch;               /* EVENT, RESTART */
    uint64_t first, last;         /* GAP: missing numbers; RESTART: last, the number before */
    size_t bytes;                 /* UNREADABLE */
    const struct kc_event *event; /* EVENT */
};

/** Append @news to @out, in some form. */
typedef void (*kc_write_fn)(struct kv_buf *out, const struct kc_news *news);

struct kc_follower {
    TAILQ_HEAD(kc_publishers, kc_publisher) publishers; /* in the order in which they came */
    size_t n_publishers;
    uint64_t n_messages, n_beyond; /* beyond: of publishers above KC_MAX_PUBLISHERS */
    kc_write_fn write;             /* NULL: counts only */
    struct kv_buf out;             /* what was written; the caller empties it */
    /* The message being read. */
    const struct kc_message *message;
    struct kc_publisher *publisher;
    bool numbered;
    uint64_t batch;
};

void kc_follower_init(struct kc_follower *follower, kc_write_fn write);
void kc_follower_fini(struct kc_follower *follower);

/**
 * Read a message. One that can't be read leaves no event behind. Returns 0 or -ENOMEM.
 */
int kc_follower_take(struct kc_follower *follower, const struct kc_message *message);

/** Return "stored", "removed" or "cleared". */
const char *kc_type_name(enum kc_type type);
/** Return a phrase for people. */
const char *kc_form_name(enum kc_form form);

#endif
