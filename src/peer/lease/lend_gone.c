// SPDX-License-Identifier: Apache-2.0
/* Keys that are gone: queued by whoever drops them, told to peers by the lender's thread. */
#include "base/core/le.h"
#include "peer/lease/lease_wire.h"
#include "peer/lease/lend_impl.h"
#include "peer/session/agent.h"

#define MAX_GONE_BYTES (1u << 20) /* queued of a set; more aren't told, and peers find out */
#define MAX_NOTE_KEYS 8192u

static void queue(struct kvbm_offer *offer, uint32_t group, const uint8_t *keys, size_t n)
{
    uint32_t len = offer->facts->key_len;

    for (size_t i = 0; i < n && offer->gone.len + 4 + len <= MAX_GONE_BYTES; i++) {
        kvbm_put32(&offer->gone, group);
        kv_buf_append(&offer->gone, keys + i * len, len);
    }
}

int kvbm_lender_gone(struct kvbm_lender *lender, uint32_t set, uint32_t group, const void *keys,
                     size_t n)
{
    struct kvbm_offer *offer;
    bool there;

    pthread_mutex_lock(&lender->lock);
    offer = kvbm_offer_find(lender, set);
    there = offer && offer->has_source;
    if (there && offer->lessees) {
        queue(offer, group, keys, n);
        kvbm_lender_wake(lender);
    }
    pthread_mutex_unlock(&lender->lock);
    return there ? 0 : -ENOENT; /* the offer may be freed by now */
}

void kvbm_lender_gone_from(struct kvbm_lender *lender, const struct kvbm_registry *registry,
                           uint32_t group, const void *key)
{
    pthread_mutex_lock(&lender->lock);
    for (struct kvbm_offer *offer = lender->offers; offer; offer = offer->next) {
        if (!offer->tells || offer->source.registry != registry || !offer->lessees)
            continue;
        queue(offer, group, key, 1);
        kvbm_lender_wake(lender);
    }
    pthread_mutex_unlock(&lender->lock);
}

int kvbm_blockset_gone(struct kvbm_blockset *set, uint32_t group, const void *keys, size_t n)
{
    if (!set || group >= KVBM_MAX_GROUPS || (n && !keys))
        return -EINVAL;
    return kvbm_lender_gone(set->agent->lender, set->id, group, keys, n);
}

/* List the sessions that have asked about a set, with references. Returns their number. */
static size_t listeners(const struct kvbm_offer *offer, struct kvbm_session ***ret)
{
    struct kvbm_session **sessions;
    size_t n = 0;

    for (const struct kvbm_lessee_of *one = offer->lessees; one; one = one->next_of_offer)
        n += one->asked && !one->borrower->gone;
    sessions = n ? calloc(n, sizeof(struct kvbm_session *)) : NULL;
    n = 0;
    for (const struct kvbm_lessee_of *one = offer->lessees; one && sessions;
         one = one->next_of_offer) {
        if (one->asked && !one->borrower->gone)
            sessions[n++] = kvbm_session_get(one->borrower->session);
    }
    *ret = sessions;
    return n;
}

/* Send notes of one group's keys each. Returns the number of keys. */
static uint64_t send(struct kvbm_session *session, struct kvbm_asked note,
                     const struct kv_buf *gone, uint32_t key_len)
{
    size_t step = 4 + (size_t)key_len, n = gone->len / step, at = 0;
    uint8_t *keys = malloc(KV_MIN(n, (size_t)MAX_NOTE_KEYS) * key_len);

    while (keys && at < n) {
        struct kv_buf body = KV_BUF_INIT;

        note.group = (uint32_t)kv_get_le((const uint8_t *)gone->data + at * step, 4);
        for (note.n = 0; at < n && note.n < MAX_NOTE_KEYS; at++, note.n++) {
            const uint8_t *one = (const uint8_t *)gone->data + at * step;

            if ((uint32_t)kv_get_le(one, 4) != note.group)
                break;
            memcpy(keys + (size_t)note.n * key_len, one + 4, key_len);
        }
        note.keys = keys;
        kvbm_asked_write(&body, &note, key_len);
        if (!body.error)
            (void)kvbm_session_note(session, KVBM_TELL_GONE, body.data, body.len);
        kv_buf_fini(&body);
    }
    free(keys);
    return at;
}

bool kvbm_lender_tell_gone(struct kvbm_lender *lender)
{
    struct kvbm_offer *offer = lender->offers;
    struct kvbm_session **sessions;
    struct kvbm_asked note;
    struct kv_buf gone;
    uint32_t key_len;
    uint64_t told = 0;
    size_t n;

    while (offer && !offer->gone.len)
        offer = offer->next;
    if (!offer)
        return false;
    gone = offer->gone;
    offer->gone = (struct kv_buf)KV_BUF_INIT;
    note = (struct kvbm_asked){.set = offer->facts->id, .generation = offer->facts->generation};
    key_len = offer->facts->key_len;
    n = listeners(offer, &sessions);
    pthread_mutex_unlock(&lender->lock);
    for (size_t i = 0; i < n; i++) {
        told = send(sessions[i], note, &gone, key_len);
        kvbm_session_put(sessions[i]);
    }
    free(sessions);
    kv_buf_fini(&gone);
    pthread_mutex_lock(&lender->lock);
    lender->stats.gone += told;
    return true;
}
