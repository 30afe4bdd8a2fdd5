// SPDX-License-Identifier: Apache-2.0
#include "advisor/feed.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/queue.h>

#include "advisor/advice.h"
#include "base/core/clock.h"
#include "base/core/error.h"
#include "tier/object/impl.h"

struct publisher {
    LIST_ENTRY(publisher) entry;
    char subject[KVP_MAX_SUBJECT];
    uint64_t heard_ns;
    uint8_t teller; /* KVA_TELLERS: shared with others */
    uint8_t group;  /* of kva_advice */
    bool whole;
    bool missed; /* the server has been away since it was heard */
};

/* A change of the index that a record asks for. */
struct change {
    enum { TELL, USE, UNTELL } kind;
    uint8_t key[KVBM_OBJECT_CHUNK_KEY], parent[KVBM_OBJECT_CHUNK_KEY];
    struct kva_told told; /* its keys are set when it is applied */
    bool has_parent;
    uint8_t group;
};

/* Changes that wait: at most WAIT, and records are fetched HALF before they are needed. */
enum { WAIT = 16, HALF = 8 };

struct kva_feed {
    struct kva_index *index;
    struct change changes[WAIT];
    uint32_t n_come, n_done; /* changes so far: a ring */
    LIST_HEAD(publishers, publisher) publishers;
    struct publisher *last;    /* that was looked for; NULL: none */
    uint32_t tellers;          /* bits in use */
    struct kva_advice *advice; /* NULL: none */
    struct kva_feed_stats stats;
};

int kva_feed_create(struct kva_index *index, struct kva_feed **ret)
{
    struct kva_feed *feed = calloc(1, sizeof(*feed));

    if (!feed)
        return -ENOMEM;
    feed->index = index;
    LIST_INIT(&feed->publishers);
    *ret = feed;
    return 0;
}

void kva_feed_set_advice(struct kva_feed *feed, struct kva_advice *advice)
{
    feed->advice = advice;
}

void kva_feed_destroy(struct kva_feed *feed)
{
    struct publisher *p;

    while (feed && (p = LIST_FIRST(&feed->publishers))) {
        LIST_REMOVE(p, entry);
        free(p);
    }
    free(feed);
}

/* -- publishers -------------------------------------------------------------------------------- */

/* Records of one publisher come in a row: look at the last one first. */
static struct publisher *find(struct kva_feed *feed, const char *subject)
{
    struct publisher *p = feed->last;

    if (p && strcmp(p->subject, subject) == 0)
        return p;
    LIST_FOREACH(p, &feed->publishers, entry)
    if (strcmp(p->subject, subject) == 0)
        break;
    feed->last = p;
    return p;
}

static uint8_t take_teller(struct kva_feed *feed)
{
    for (unsigned i = 0; i < KVA_TELLERS; i++)
        if (!(feed->tellers >> i & 1)) {
            feed->tellers |= UINT32_C(1) << i;
            return (uint8_t)i;
        }
    return KVA_TELLERS;
}

static struct publisher *find_or_add(struct kva_feed *feed, const char *subject)
{
    struct publisher *p = find(feed, subject);

    if (p)
        return p;
    p = calloc(1, sizeof(*p));
    if (!p)
        return NULL;
    strncpy(p->subject, subject, sizeof(p->subject) - 1);
    p->heard_ns = kv_now_ns();
    p->teller = take_teller(feed);
    p->group = feed->advice ? kva_advice_group(feed->advice, subject) : 0;
    LIST_INSERT_HEAD(&feed->publishers, p, entry);
    feed->last = p;
    return p;
}

/* Forget the blobs that a publisher told of; of those that share a bit, when none of them is left. */
static void forget_told(struct kva_feed *feed, const struct publisher *gone)
{
    struct publisher *p;

    if (gone->teller == KVA_TELLERS)
        LIST_FOREACH(p, &feed->publishers, entry)
    if (p != gone && p->teller == KVA_TELLERS)
        return;
    kva_index_forget(feed->index, gone->teller);
}

void kva_feed_heard(struct kva_feed *feed, const char *publisher, uint64_t now_ns)
{
    struct publisher *p = find_or_add(feed, publisher);

    if (p) {
        p->heard_ns = now_ns;
        p->missed = false;
    }
}

void kva_feed_reset(struct kva_feed *feed, const char *publisher)
{
    struct publisher *p = find_or_add(feed, publisher);

    if (!p)
        return;
    kva_feed_flush(feed);
    p->whole = false;
    forget_told(feed, p);
}

void kva_feed_whole(struct kva_feed *feed, const char *publisher, bool whole)
{
    struct publisher *p = find_or_add(feed, publisher);

    kva_feed_flush(feed);
    if (p)
        p->whole = whole;
}

static struct publisher *find_silent(struct kva_feed *feed, uint64_t now_ns, uint64_t silence_ns)
{
    struct publisher *p;

    LIST_FOREACH(p, &feed->publishers, entry)
    if (now_ns > p->heard_ns && now_ns - p->heard_ns > silence_ns)
        return p;
    return NULL;
}

bool kva_feed_silent(struct kva_feed *feed, uint64_t now_ns, uint64_t silence_ns,
                     char ret[KVP_MAX_SUBJECT])
{
    struct publisher *p;

    kva_feed_flush(feed);
    p = find_silent(feed, now_ns, silence_ns);
    if (!p)
        return false;
    memcpy(ret, p->subject, sizeof(p->subject));
    forget_told(feed, p);
    LIST_REMOVE(p, entry);
    if (p->teller < KVA_TELLERS)
        feed->tellers &= ~(UINT32_C(1) << p->teller);
    feed->last = NULL;
    free(p);
    return true;
}

void kva_feed_all_heard(struct kva_feed *feed, uint64_t now_ns)
{
    struct publisher *p;

    LIST_FOREACH(p, &feed->publishers, entry)
    {
        p->heard_ns = now_ns;
        p->missed = true;
    }
}

bool kva_feed_is_whole(const struct kva_feed *feed)
{
    const struct publisher *p;

    LIST_FOREACH(p, &feed->publishers, entry)
    if (!p->whole || p->missed)
        return false;
    return true;
}

/* -- records ----------------------------------------------------------------------------------- */

static bool has_blob(const struct kvp_header *header, const struct kvp_record *record)
{
    static const uint8_t none[sizeof(header->fingerprint)];

    return record->block_bytes && record->block_bytes <= UINT64_C(1) << 36 &&
           memcmp(header->fingerprint, none, sizeof(none)) != 0;
}

static void advise(struct kva_feed *feed, const struct change *c)
{
    uint64_t key;

    if (!feed->advice)
        return;
    memcpy(&key, c->key, sizeof(key));
    kva_advice_use(feed->advice, c->group, key, c->told.bytes, c->told.now_s);
}

static void apply(struct kva_feed *feed, struct change *c)
{
    c->told.key = c->key;
    c->told.parent = c->has_parent ? c->parent : NULL;
    switch (c->kind) {
    case TELL:
        feed->stats.stores++;
        if (kva_index_tell(feed->index, &c->told) &&
            !c->told.known) /* a refusal is in its statistics */
            advise(feed, c);
        break;
    case USE:
        feed->stats.uses += (uint64_t)kva_index_use(feed->index, c->key, c->told.now_s);
        advise(feed, c);
        break;
    case UNTELL:
        feed->stats.removals++;
        kva_index_untell(feed->index, c->key, c->told.teller, c->told.now_s);
        break;
    }
}

void kva_feed_flush(struct kva_feed *feed)
{
    while (feed->n_done != feed->n_come)
        apply(feed, &feed->changes[feed->n_done++ % WAIT]);
}

static void queue(struct kva_feed *feed)
{
    const struct change *c = &feed->changes[feed->n_come++ % WAIT];

    kva_index_prefetch(feed->index, c->key, false);
    if (c->has_parent)
        kva_index_prefetch(feed->index, c->parent, false);
    if (feed->n_come - feed->n_done > HALF) {
        c = &feed->changes[(feed->n_come - HALF) % WAIT];
        kva_index_prefetch(feed->index, c->key, true);
        if (c->has_parent)
            kva_index_prefetch(feed->index, c->parent, true);
    }
    if (feed->n_come - feed->n_done == WAIT)
        apply(feed, &feed->changes[feed->n_done++ % WAIT]);
}

/* Find out what a record asks for. Returns false: nothing. */
static bool read_change(const struct publisher *p, const struct kvp_header *header,
                        const struct kvp_record *record, struct change *ret)
{
    struct kvbm_object_format format = {.key_len = record->key_len,
                                        .block_bytes = record->block_bytes};
    bool external = record->tier == KV_TIER_EXTERNAL, known = header->kind == KVP_SNAPSHOT;

    if (!external && (record->event != KVP_STORE || record->first || known))
        return false;
    memcpy(format.fingerprint, header->fingerprint, sizeof(format.fingerprint));
    ret->group = p->group;
    ret->kind = !external ? USE : record->event == KVP_STORE ? TELL : UNTELL;
    ret->told = (struct kva_told){.bytes = record->block_bytes + KVBM_OBJECT_HEADER,
                                  .chain = record->has_prefix ? (uint32_t)record->prefix : 0,
                                  .teller = p->teller,
                                  .known = known,
                                  .now_s = (uint32_t)(header->time_ns / KV_NS_PER_S)};
    kvbm_object_chunk_key(&format, record->group, record->key, ret->key);
    ret->has_parent = ret->kind == TELL && record->parent;
    if (ret->has_parent)
        kvbm_object_chunk_key(&format, record->group, record->parent, ret->parent);
    return true;
}

void kva_feed_take(struct kva_feed *feed, const struct kvp_header *header,
                   const struct kvp_record *record)
{
    const struct publisher *p = find_or_add(feed, header->publisher);

    feed->stats.records++;
    if (!p)
        return;
    if (!has_blob(header, record))
        feed->stats.unsized++;
    else if (read_change(p, header, record, &feed->changes[feed->n_come % WAIT]))
        queue(feed);
}

void kva_feed_get_stats(const struct kva_feed *feed, struct kva_feed_stats *ret)
{
    *ret = feed->stats;
    for (const struct publisher *p = LIST_FIRST(&feed->publishers); p; p = LIST_NEXT(p, entry)) {
        ret->publishers++;
        ret->whole += p->whole;
    }
}
