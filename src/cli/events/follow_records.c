// SPDX-License-Identifier: Apache-2.0
/*
 * KVEvent records, as block managers publish them over NATS (kv_plane.h): [subject] [message].
 *
 *     EVENTS    number n: news; n is compared with the one before
 *     ALIVE     number of the next message: shows that n - 1 is missing
 *     SNAPSHOT  all that the publisher has, for the one that asked: counted, no news
 */
#include <errno.h>
#include <stdio.h>
#include <string.h>

#include "cli/events/follow_impl.h"
#include "kv_plane.h"

bool kc_are_records(const struct kc_message *message)
{
    const struct kve_span *data = &message->frames[1];

    return message->n_frames == 2 && data->len >= 4 &&
           (memcmp(data->data, "KVEV", 4) == 0 || *(const char *)data->data == '{');
}

static void see_record(void *arg, const struct kvp_header *header, const struct kvp_record *r)
{
    struct kc_follower *follower = arg;
    struct kc_counts *counts = &follower->publisher->counts;
    uint64_t hash = kvp_key_number(r->key, r->key_len);
    struct kc_event event = {
        .type = r->event == KVP_STORE ? KC_STORED : KC_REMOVED,
        .tier = r->tier,
        .hashes = &hash,
        .n_hashes = 1,
        .has_parent = r->parent != NULL,
        .parent = r->parent ? kvp_key_number(r->parent, r->key_len) : 0,
        .group = r->group,
        .has_group = true,
        .is_record = true,
        .has_prefix = r->has_prefix,
        .has_tokens_hash = r->has_tokens_hash,
        .position = r->position,
        .prefix = r->prefix,
        .tokens_hash = r->tokens_hash,
        .block_bytes = r->block_bytes,
        .volume = r->volume,
    };

    if (header->kind != KVP_EVENTS)
        return;
    counts->types[event.type]++;
    counts->blocks++;
    if (event.type == KC_STORED)
        counts->tiers[event.tier]++;
    kc_write_news(follower, &(struct kc_news){.what = KC_NEWS_EVENT, .event = &event});
}

/* A publisher that starts anew numbers from 0 and has another incarnation. */
static void check_incarnation(struct kc_follower *follower, const struct kvp_header *header)
{
    struct kc_publisher *p = follower->publisher;
    bool other = p->incarnation && p->incarnation != header->incarnation;

    p->incarnation = header->incarnation;
    if (!other || !p->numbered)
        return;
    p->counts.restarts++;
    p->numbered = false;
    kc_write_news(follower, &(struct kc_news){.what = KC_NEWS_RESTART, .last = p->last});
}

/* Check the number of a message. ALIVE has that of the next one: all before it should have come. */
static void check_sequence(struct kc_follower *follower, const struct kvp_header *header)
{
    struct kc_publisher *p = follower->publisher;

    follower->batch = header->sequence;
    check_incarnation(follower, header);
    if (header->kind == KVP_EVENTS) {
        kc_check_number(follower);
        return;
    }
    if (p->numbered && header->sequence > p->last + 1)
        kc_note_gap(follower, p->last + 1, header->sequence - 1);
    p->numbered = header->sequence > 0;
    p->last = header->sequence - p->numbered;
}

int kc_read_records(struct kc_follower *follower, const struct kve_message *m, size_t bytes)
{
    struct kvp_header header = KVP_HEADER_INIT;
    struct kc_publisher *p = follower->publisher;
    int rc = kvp_read(m->payload.data, m->payload.len, &header, NULL, NULL);

    follower->numbered = rc == 0;
    if (rc < 0) {
        snprintf(p->why, sizeof(p->why), "%s",
                 rc == -EPROTONOSUPPORT ? "KVEvent records of a newer version"
                                        : "neither KVEvent records nor a batch, or damaged");
        kc_note_unreadable(follower, bytes);
        return 0;
    }
    p->counts.forms |= 1u << KC_FORM_RECORDS;
    if (header.kind == KVP_SNAPSHOT) {
        p->counts.snapshots++;
        return 0;
    }
    check_sequence(follower, &header);
    p->counts.batches++;
    p->counts.events += header.n_records;
    (void)kvp_read(m->payload.data, m->payload.len, NULL, see_record, follower);
    return 0;
}
