// SPDX-License-Identifier: Apache-2.0
/*
 * Manifests lie in one member. Before one is published there, each other member that got chunks makes
 * them durable: it publishes a companion, a manifest of its own beside, for which its backend notes
 * the chunks that were put or met there.
 *
 *     put a ──► fast      put_manifest M:  1. fast:   kv-tiered-HASH(M), needs a
 *     put b ──► cold                       2. cold:   kv-tiered-HASH(M), needs b
 *                                          3. manifests' member: M
 *
 * A manifest isn't published while chunks wait in a member that is down, with two exceptions: another
 * member got them since, or the manifest lists its chunks and none of these.
 *
 * A backend may refuse a manifest of Kvasir's format whose chunks it lacks. So one that lists chunks of
 * other members is wrapped: it stands behind a line that makes it a manifest of unknown format.
 */
#include <stdio.h>

#include "base/file/own_manifest.h"
#include "base/hash/hash.h"
#include "tiered/store.h"

#define FLUSHED TRD_OWN_NAMES "flush"
#define COMPANION "KV-TIERED\n"
#define WRAPPED "KV-TIERED MANIFEST\n" /* docs/formats.md */

/* A mover may take chunks again between two tries, of other keys each time. */
enum { COMPANION_NAME = sizeof(TRD_OWN_NAMES) + 32, MENDS = 8 };

/* A publication on all members. */
struct round {
    kv_store_v1 *self;
    const char *name; /* NULL: a flush */
    const uint8_t *data;
    size_t len;
    char companion[COMPANION_NAME];
    struct trd_pending taken[TRD_MEMBERS_MAX]; /* chunks that a member has made durable */
    int rc[TRD_MEMBERS_MAX];
};

static struct trd_member *home_of(kv_store_v1 *self)
{
    return &self->members[self->config.manifests];
}

static bool is_own_name(const char *name)
{
    return strncmp(name, TRD_OWN_NAMES, strlen(TRD_OWN_NAMES)) == 0;
}

static int check_name(const char *name)
{
    return name && *name && !is_own_name(name) ? 0 : -EINVAL;
}

static void name_companion(const char *name, char ret[COMPANION_NAME])
{
    uint8_t hash[16];
    size_t at = strlen(TRD_OWN_NAMES);

    kv_hash(name, strlen(name), hash);
    memcpy(ret, TRD_OWN_NAMES, at);
    for (size_t i = 0; i < sizeof(hash); i++)
        snprintf(ret + at + 2 * i, 3, "%02x", hash[i]);
}

/* -- one member -------------------------------------------------------------------------------- */

static int put_companion(struct kvs_store *store, const struct round *r)
{
    struct kv_buf text = KV_BUF_INIT;
    int rc;

    kv_buf_puts(&text, COMPANION);
    kv_buf_puts(&text, r->name);
    rc = text.error ? -ENOMEM : kvs_put_manifest(store, r->companion, text.data, text.len);
    kv_buf_fini(&text);
    return rc;
}

static bool is_wrapped(const void *data, size_t len)
{
    return len >= strlen(WRAPPED) && memcmp(data, WRAPPED, strlen(WRAPPED)) == 0;
}

/* True when the manifest can't be stored as it is: it lists chunks that weren't put to the manifests'
 * member, or looks wrapped. */
static bool needs_wrap(const struct round *r)
{
    const struct trd_keys *here = &r->taken[r->self->config.manifests].set;
    struct kv_own_chunks own;

    if (!kv_own_manifest_chunks(r->data, r->len, &own))
        return is_wrapped(r->data, r->len);
    for (size_t i = 0; i < own.n; i++)
        if (!trd_keys_has(here, own.first + i * KV_OWN_CHUNK, KV_OWN_KEY))
            return true;
    return false;
}

static int put_manifest(struct kvs_store *store, const struct round *r)
{
    struct kv_buf text = KV_BUF_INIT;
    int rc;

    if (!needs_wrap(r))
        return kvs_put_manifest(store, r->name, r->data, r->len);
    kv_buf_puts(&text, WRAPPED);
    kv_buf_append(&text, r->data, r->len);
    rc = text.error ? -ENOMEM : kvs_put_manifest(store, r->name, text.data, text.len);
    kv_buf_fini(&text);
    return rc;
}

static int publish_in(struct kvs_store *store, const struct round *r, bool is_home)
{
    if (!r->name) /* a backend without flush makes chunks durable by a manifest alone */
        return store->ext.flush ? kvs_flush(store) : kvs_put_manifest(store, FLUSHED, "", 0);
    return is_home ? put_manifest(store, r) : put_companion(store, r);
}

/*
 * Put again, from other members, the chunks that member @i has lost: its puts met them there, and a
 * mover has taken them away since. Returns true when that mended something.
 */
static bool mend(kv_store_v1 *self, unsigned i, struct kvs_store *store,
                 const struct trd_pending *pending)
{
    bool mended = false;
    const uint8_t *hash;
    size_t at = 0, hash_len;

    while (trd_pending_next(pending, &at, &hash, &hash_len)) {
        uint8_t state = KVS_THERE;
        void *data;
        size_t len;

        if (trd_look(store, hash, hash_len, 1, &state) < 0 || state == KVS_THERE ||
            trd_get_elsewhere(self, hash, hash_len, (int)i, &data, &len) < 0)
            continue;
        mended |= kvs_put_chunk_of_save(store, hash, hash_len, data, len) >= 0;
        free(data);
    }
    return mended;
}

/* Publish in member @i what waits there. Without chunks only the manifests' member gets something. */
static int publish_at(struct round *r, unsigned i)
{
    struct trd_member *member = &r->self->members[i];
    bool is_home = r->name && i == r->self->config.manifests, owed;
    struct trd_use use;
    int rc = -EHOSTDOWN;

    pthread_mutex_lock(&member->commit);
    pthread_mutex_lock(&member->lock);
    r->taken[i] = member->pending;
    member->pending = (struct trd_pending){0};
    owed = r->name && member->owed;
    pthread_mutex_unlock(&member->lock);
    if (!is_home && !owed && !trd_pending_any(&r->taken[i])) {
        pthread_mutex_unlock(&member->commit);
        return 0;
    }
    if (trd_enter(member, &use)) {
        rc = publish_in(use.store, r, is_home);
        for (int k = 0; k < MENDS && rc == -EIO && mend(r->self, i, use.store, &r->taken[i]); k++)
            rc = publish_in(use.store, r, is_home);
        trd_leave(member, use, rc);
    }
    pthread_mutex_lock(&member->lock);
    if (rc < 0) {
        trd_pending_merge(&member->pending, &r->taken[i]);
        trd_pending_fini(&r->taken[i]);
    } else {
        member->owed = !r->name && (member->owed || r->taken[i].set.n > 0);
    }
    pthread_mutex_unlock(&member->lock);
    pthread_mutex_unlock(&member->commit);
    return rc;
}

/* -- all members ------------------------------------------------------------------------------- */

/* True when another member has made the chunk durable, or is about to, in this publication. */
static bool is_covered(struct round *r, const uint8_t *hash, size_t hash_len)
{
    struct trd_member *home = home_of(r->self);
    bool found = false;

    for (size_t i = 0; i < r->self->n_members && !found; i++)
        found = trd_keys_has(&r->taken[i].set, hash, hash_len);
    if (!found && r->name && !r->rc[r->self->config.manifests]) {
        pthread_mutex_lock(&home->lock);
        found = trd_keys_has(&home->pending.set, hash, hash_len);
        pthread_mutex_unlock(&home->lock);
    }
    return found;
}

/* True when the publication may need a chunk that waits in @member, which failed. */
static bool is_needed(struct round *r, struct trd_member *member)
{
    struct kv_own_chunks own = {0};
    bool lists = r->name && kv_own_manifest_chunks(r->data, r->len, &own), needed;
    struct trd_pending waits = {0};
    const uint8_t *hash;
    size_t at = 0, len;

    pthread_mutex_lock(&member->lock);
    trd_pending_merge(&waits, &member->pending);
    pthread_mutex_unlock(&member->lock);
    needed = waits.many;
    for (size_t i = 0; lists && !needed && i < own.n; i++) {
        hash = own.first + i * KV_OWN_CHUNK;
        needed = trd_keys_has(&waits.set, hash, KV_OWN_KEY) && !is_covered(r, hash, KV_OWN_KEY);
    }
    while (!lists && !needed && trd_pending_next(&waits, &at, &hash, &len))
        needed = !is_covered(r, hash, len);
    trd_pending_fini(&waits);
    return needed;
}

/* Chunks that are durable elsewhere now no longer wait in members that failed. */
static void forget_covered(struct round *r)
{
    for (size_t i = 0; i < r->self->n_members; i++) {
        struct trd_member *member = &r->self->members[i];

        if (r->rc[i] >= 0)
            continue;
        pthread_mutex_lock(&member->lock);
        for (size_t k = 0; k < r->self->n_members; k++)
            if (k != i && r->taken[k].set.n)
                trd_pending_subtract(&member->pending, &r->taken[k]);
        pthread_mutex_unlock(&member->lock);
    }
}

static int publish(struct round *r)
{
    unsigned home = r->self->config.manifests;
    int rc = 0;

    for (unsigned i = 0; i < r->self->n_members; i++)
        if (!r->name || i != home)
            r->rc[i] = publish_at(r, i);
    for (unsigned i = 0; i < r->self->n_members && rc == 0; i++)
        if (r->rc[i] < 0 && is_needed(r, &r->self->members[i]))
            rc = r->rc[i];
    if (rc == 0 && r->name)
        rc = r->rc[home] = publish_at(r, home);
    forget_covered(r);
    for (unsigned i = 0; i < r->self->n_members; i++)
        trd_pending_fini(&r->taken[i]);
    return trd_done(r->self, rc);
}

/* Delete the companions of a manifest. A member that fails keeps its own, which does no harm. */
static void delete_companions(kv_store_v1 *self, const char *name)
{
    char companion[COMPANION_NAME];

    name_companion(name, companion);
    for (unsigned i = 0; i < self->n_members; i++) {
        struct trd_member *member = &self->members[i];
        struct trd_use use;

        if (i != self->config.manifests && !member->config->read_only && trd_enter(member, &use))
            trd_leave(member, use, kvs_delete_manifest(use.store, companion));
    }
}

int trd_put_manifest(kv_store_v1 *self, const char *name, const uint8_t *data, size_t data_len)
{
    struct round r = {.self = self, .name = name, .data = data, .len = data_len};
    int rc = check_name(name);

    if (rc == 0 && home_of(self)->config->read_only)
        rc = -EROFS;
    if (rc)
        return trd_done(self, rc);
    /* A copy by a handle that put nothing: the notes of the manifest before say nothing about it. */
    if (!self->ever_put && data_len > 0 && !kv_is_own_manifest(data, data_len))
        delete_companions(self, name);
    name_companion(name, r.companion);
    return publish(&r);
}

int trd_flush(kv_store_v1 *self)
{
    struct round r = {.self = self};

    return publish(&r);
}

/* -- reading and deleting manifests ------------------------------------------------------------ */

int trd_get_manifest(kv_store_v1 *self, const char *name, uint8_t **out_data, size_t *out_len)
{
    struct trd_member *home = home_of(self);
    struct trd_use use;
    int rc = check_name(name);
    void *data = NULL;
    size_t len = 0;

    if (rc == 0 && !trd_enter(home, &use))
        rc = -EHOSTDOWN;
    else if (rc == 0)
        rc = trd_leave(home, use, kvs_get_manifest(use.store, name, &data, &len));
    if (rc)
        return trd_done(self, rc);
    if (is_wrapped(data, len)) {
        len -= strlen(WRAPPED);
        memmove(data, (char *)data + strlen(WRAPPED), len);
    }
    *out_data = data;
    *out_len = len;
    return 0;
}

int trd_delete_manifest(kv_store_v1 *self, const char *name)
{
    struct trd_member *home = home_of(self);
    struct trd_use use;
    int rc = check_name(name);

    if (rc == 0 && home->config->read_only)
        rc = -EROFS;
    if (rc == 0 && !trd_enter(home, &use))
        rc = -EHOSTDOWN;
    else if (rc == 0)
        rc = trd_leave(home, use, kvs_delete_manifest(use.store, name));
    if (rc == 0)
        delete_companions(self, name);
    return trd_done(self, rc);
}

struct refs {
    kv_store_each_fn each;
    void *arg;
    int stopped;
};

static int give_ref(void *arg, const kv_store_entry *entry)
{
    struct refs *refs = arg;

    return refs->stopped = refs->each(refs->arg, entry);
}

/* List what a member noted for the manifest or its companion. -ENOENT: it noted nothing. */
static int list_noted(struct trd_member *member, const char *name, struct refs *refs)
{
    struct trd_use use;
    int rc;

    if (!trd_enter(member, &use))
        return -EIO;
    rc = use.store->ext.list_refs
             ? use.store->ext.list_refs(use.store->backend, name, give_ref, refs)
             : -ENOENT;
    trd_leave(member, use, refs->stopped ? 0 : rc);
    return refs->stopped ? refs->stopped : rc;
}

/* Returns 0 when the member has the companion, -ENOENT when not. */
static int look_for_companion(struct trd_member *member, const char *companion)
{
    struct trd_use use;
    void *data;
    size_t len;
    int rc;

    if (!trd_enter(member, &use))
        return -EIO;
    rc = trd_leave(member, use, kvs_get_manifest(use.store, companion, &data, &len));
    if (rc == 0)
        free(data);
    return rc;
}

int trd_list_refs(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg)
{
    struct refs refs = {each, arg, 0};
    char companion[COMPANION_NAME];
    int rc = check_name(name), any = 0;

    if (rc)
        return trd_done(self, rc);
    name_companion(name, companion);
    rc = list_noted(home_of(self), name, &refs);
    for (unsigned i = 0; (rc == 0 || rc == -ENOENT) && i < self->n_members; i++) {
        int found;

        if (i == self->config.manifests)
            continue;
        found = look_for_companion(&self->members[i], companion);
        if (found == 0) {
            found = list_noted(&self->members[i], companion, &refs);
            if (found) /* a companion without notes: any chunk may be needed */
                return refs.stopped ? refs.stopped : trd_done(self, found);
            any++;
        } else if (found != -ENOENT) {
            return trd_done(self, found);
        }
    }
    return refs.stopped ? refs.stopped : rc == -ENOENT && any ? 0 : trd_done(self, rc);
}
