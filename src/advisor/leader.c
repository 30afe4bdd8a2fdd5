// SPDX-License-Identifier: Apache-2.0
#include "advisor/leader.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/core/buf.h"
#include "base/core/clock.h"
#include "base/core/le.h"
#include "base/core/log.h"

enum { TIME = 8, READ_S = 2, FORGET_S = 86400 };

struct kva_leader {
    struct kvp_etcd_lock *lock;
    struct kv_buf note;   /* time, seconds since the epoch; keys */
    struct kv_buf doubts; /* keys of others' notes */
    struct kv_buf old;    /* tokens whose notes are to be removed */
    uint64_t token;       /* that the notes were read with; 0: none */
    uint64_t noted;       /* token of this process's note; 0: none */
    uint64_t read_ns;     /* when the notes are to be read again */
    bool has;
};

int kva_leader_open(const char *url, uint32_t ttl_s, uint64_t id, struct kva_leader **ret,
                    struct kv_error *error)
{
    char name[24];
    const struct kvp_etcd_lock_opts opts = {
        .url = url, .prefix = "/kvasir/advisor", .name = name, .ttl_s = ttl_s};
    struct kva_leader *leader = calloc(1, sizeof(*leader));
    int rc;

    if (!leader)
        return kv_fail(error, -ENOMEM, 0, "out of memory");
    snprintf(name, sizeof(name), "%016" PRIx64, id);
    rc = kvp_etcd_lock_open(&opts, &leader->lock, error);
    if (rc < 0)
        free(leader);
    else
        *ret = leader;
    return rc;
}

void kva_leader_close(struct kva_leader *leader)
{
    if (!leader)
        return;
    kva_leader_end(leader);
    kvp_etcd_lock_close(leader->lock);
    kv_buf_fini(&leader->note);
    kv_buf_fini(&leader->doubts);
    kv_buf_fini(&leader->old);
    free(leader);
}

bool kva_leader_is(struct kva_leader *leader)
{
    return !leader || kvp_etcd_lock_token(leader->lock);
}

/* -- notes of others --------------------------------------------------------------------------- */

static void take_note(void *arg, uint64_t token, const void *data, size_t len)
{
    struct kva_leader *leader = arg;
    uint64_t now_s = kv_wall_ns() / KV_NS_PER_S, time_s;

    if (token == leader->token)
        return;
    time_s = len >= TIME ? kv_get_le64(data) : 0;
    if (len < TIME || (len - TIME) % KVA_KEY || (now_s > time_s && now_s - time_s > FORGET_S))
        kv_buf_append(&leader->old, &token, sizeof(token));
    else
        kv_buf_append(&leader->doubts, (const uint8_t *)data + TIME, len - TIME);
}

static int by_key(const void *a, const void *b)
{
    return memcmp(a, b, KVA_KEY);
}

/* Read the notes of other holders. Returns 0; without all of them an error. */
static int read_notes(struct kva_leader *leader)
{
    int rc;

    kv_buf_clear(&leader->doubts);
    kv_buf_clear(&leader->old);
    rc = kvp_etcd_lock_notes(leader->lock, take_note, leader);
    if (rc == 0 && (leader->doubts.error || leader->old.error))
        rc = -ENOMEM;
    if (rc < 0)
        return rc;
    if (leader->doubts.len)
        qsort(leader->doubts.data, leader->doubts.len / KVA_KEY, KVA_KEY, by_key);
    for (size_t i = 0; i + sizeof(uint64_t) <= leader->old.len; i += sizeof(uint64_t)) {
        uint64_t token;

        memcpy(&token, leader->old.data + i, sizeof(token));
        (void)kvp_etcd_lock_unnote(leader->lock, token);
    }
    leader->read_ns = kv_now_ns() + READ_S * KV_NS_PER_S;
    return 0;
}

bool kva_leader_doubts(const struct kva_leader *leader, const uint8_t *key)
{
    return leader && leader->doubts.len &&
           bsearch(key, leader->doubts.data, leader->doubts.len / KVA_KEY, KVA_KEY, by_key);
}

bool kva_leader_may_move(struct kva_leader *leader, bool *ret_new)
{
    uint64_t token = leader ? kvp_etcd_lock_token(leader->lock) : 0;

    *ret_new = false;
    if (!leader)
        return true;
    if (leader->has && token != leader->token)
        kv_log_warn("advisor", "the lock is lost: another advisor may move blobs now",
                    "token=%" PRIu64, leader->token);
    if (!token || token != leader->token) {
        leader->has = false;
        kva_leader_end(leader); /* all its calls have ended: nothing of it is under way */
    }
    if (!token)
        return false;
    if (!leader->has || kv_now_ns() >= leader->read_ns) {
        leader->token = token;
        if (read_notes(leader) < 0)
            return false;
        *ret_new = !leader->has;
        if (*ret_new)
            kv_log_info("advisor", "this advisor has the lock", "token=%" PRIu64 " left_alone=%zu",
                        token, leader->doubts.len / KVA_KEY);
        leader->has = true;
    }
    return true;
}

/* -- this process's removals ------------------------------------------------------------------- */

int kva_leader_begin(struct kva_leader *leader, const uint8_t *keys, size_t n)
{
    uint8_t time[TIME];
    int rc;

    if (!leader)
        return 0;
    kv_put_le64(time, kv_wall_ns() / KV_NS_PER_S);
    kv_buf_clear(&leader->note);
    kv_buf_append(&leader->note, time, sizeof(time));
    kv_buf_append(&leader->note, keys, n * KVA_KEY);
    if (leader->note.error)
        return -ENOMEM;
    leader->noted = leader->token; /* also where no answer tells that it is there */
    rc = kvp_etcd_lock_note(leader->lock, leader->token, leader->note.data, leader->note.len);
    if (rc == 0 && kvp_etcd_lock_token(leader->lock) != leader->token)
        rc = -ESTALE;
    return rc;
}

void kva_leader_end(struct kva_leader *leader)
{
    if (leader && leader->noted && kvp_etcd_lock_unnote(leader->lock, leader->noted) == 0)
        leader->noted = 0;
}
