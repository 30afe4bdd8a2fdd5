// SPDX-License-Identifier: Apache-2.0
/*
 * Many blobs: the keys are split by member, and each member gets its part in one call. First those
 * whose place is known, then every member in order gets the keys that are still to be found.
 */
#include "base/core/clock.h"
#include "tiered/store.h"

enum { PASSES = 3 };

/* A part of a batch, for one member. */
struct part {
    struct kvs_store *store;
    struct trd_member *member;
    uint64_t linger_ns;
    uint8_t *hashes;
    size_t hash_len, n;
    const size_t *at; /* where the keys are in the batch */
    uint8_t *state;   /* to be set: KVS_MISSING, KVS_THERE, KVS_DAMAGED */
    bool known;       /* the keys were seen in this member */
    bool last;        /* no other member is left to be asked */
};

/* Ask a member for its part. Returns 0, or an error that leaves all of its keys unanswered. */
typedef int (*ask_fn)(struct part *part, void *arg);

struct batch {
    kv_store_v1 *self;
    const uint8_t *hashes;
    size_t hash_len, n;
    ask_fn ask;
    ask_fn ask_packs; /* asked first, of the member's packs */
    void *arg;
    uint8_t *state;   /* of each key */
    uint32_t *asked;  /* members that have answered, or failed, in this pass */
    bool *unanswered; /* a member that may have it failed in this pass */
    struct part part; /* room for any part */
    size_t *at;
};

static int begin(struct batch *b)
{
    size_t n = b->n + 1; /* of no keys, too */

    b->state = calloc(n, 1);
    b->asked = calloc(n, sizeof(*b->asked));
    b->unanswered = calloc(n, sizeof(*b->unanswered));
    b->at = calloc(n, sizeof(*b->at));
    b->part = (struct part){.hashes = malloc(n * b->hash_len), .state = malloc(n)};
    return b->state && b->asked && b->unanswered && b->at && b->part.hashes && b->part.state
               ? 0
               : -ENOMEM;
}

static void end(struct batch *b)
{
    free(b->state);
    free(b->asked);
    free(b->unanswered);
    free(b->at);
    free(b->part.hashes);
    free(b->part.state);
}

static const uint8_t *key_of(const struct batch *b, size_t i)
{
    return b->hashes + i * b->hash_len;
}

/* Choose what member @i is asked for: keys to be found that it hasn't been asked for, and with
 * @known only those that were seen there. */
static void choose(struct batch *b, unsigned i, bool known)
{
    struct part *part = &b->part;

    part->n = 0;
    for (size_t k = 0; k < b->n; k++) {
        if (b->state[k] == KVS_THERE || b->asked[k] >> i & 1 ||
            (known && trd_places_find(b->self->places, key_of(b, k), b->hash_len) != (int)i))
            continue;
        b->asked[k] |= UINT32_C(1) << i;
        memcpy(part->hashes + part->n * b->hash_len, key_of(b, k), b->hash_len);
        b->at[part->n++] = k;
    }
}

/* Take what the member's packs have, and leave the other keys in the part. */
static void take_packed(struct batch *b, unsigned i)
{
    struct part *part = &b->part;
    size_t left = 0;

    for (size_t k = 0; k < part->n; k++) {
        size_t at = b->at[k];

        if (part->state[k] == KVS_UNKNOWN) /* its pack can't be read: a single blob may be there */
            b->unanswered[at] = true;
        else if (part->state[k] != KVS_MISSING)
            b->state[at] = part->state[k];
        if (part->state[k] == KVS_THERE) {
            trd_places_note(b->self->places, key_of(b, at), b->hash_len, i);
            continue;
        }
        memmove(part->hashes + left * b->hash_len, part->hashes + k * b->hash_len, b->hash_len);
        b->at[left++] = at;
    }
    part->n = left;
}

static int take_answers(struct batch *b, unsigned i, int rc)
{
    const struct part *part = &b->part;

    if (rc == -ECHILD || rc == -EINVAL || rc == -ENOMEM)
        return rc;
    for (size_t k = 0; k < part->n; k++) {
        size_t at = b->at[k];

        if (rc < 0) {
            b->unanswered[at] = true;
        } else if (part->state[k] != KVS_MISSING) {
            b->state[at] = part->state[k];
            if (part->state[k] == KVS_THERE)
                trd_places_note(b->self->places, key_of(b, at), b->hash_len, i);
        }
    }
    return 0;
}

static int ask_member(struct batch *b, unsigned i, bool known)
{
    struct trd_member *member = &b->self->members[i];
    struct part *part = &b->part;
    struct trd_use use;
    int rc = -EHOSTDOWN;

    choose(b, i, known);
    if (part->n == 0)
        return 0;
    if (trd_enter(member, &use)) {
        part->store = use.store;
        part->member = member;
        rc = 0;
        part->hash_len = b->hash_len;
        part->at = b->at;
        part->known = known;
        part->last = !known && i + 1 == b->self->n_members;
        part->linger_ns = b->self->linger_ns;
        if (trd_may_have_packs(&member->catalog)) {
            rc = b->ask_packs(part, b->arg);
            if (rc == 0)
                take_packed(b, i);
        }
        memset(part->state, KVS_MISSING, part->n);
        if (rc == 0 && part->n)
            rc = b->ask(part, b->arg);
        trd_leave(member, use, rc);
    }
    return take_answers(b, i, rc);
}

static int ask_all(struct batch *b)
{
    int rc = 0;

    memset(b->asked, 0, b->n * sizeof(*b->asked));
    memset(b->unanswered, 0, b->n * sizeof(*b->unanswered));
    for (unsigned i = 0; i < b->self->n_members && rc == 0; i++)
        rc = ask_member(b, i, true);
    for (unsigned i = 0; i < b->self->n_members && rc == 0; i++)
        rc = ask_member(b, i, false);
    return rc;
}

/* Return 1 when some keys are missing, else 0. Keys without an answer are neither found nor missing. */
static int result(const struct batch *b)
{
    bool missing = false;

    for (size_t k = 0; k < b->n; k++)
        missing |= b->state[k] == KVS_MISSING && !b->unanswered[k];
    return missing;
}

/* Name the keys that a member may have which didn't answer. Returns their number. */
static size_t mark_unknown(struct batch *b)
{
    size_t n = 0;

    for (size_t k = 0; k < b->n; k++)
        if (b->state[k] != KVS_THERE && b->unanswered[k]) {
            b->state[k] = KVS_UNKNOWN;
            n++;
        }
    return n;
}

/* The packs of some member can't be looked at: keys that nobody has are without an answer. */
static void all_unsure(struct batch *b)
{
    for (size_t k = 0; k < b->n; k++)
        b->unanswered[k] |= b->state[k] == KVS_MISSING;
}

/* Ask the members until each key is found, certainly missing, or without an answer. Returns 0 or an error. */
static int find(struct batch *b)
{
    int rc = begin(b);

    for (int i = 0; i < PASSES && rc == 0; i++) {
        uint64_t start = kv_now_ns();
        bool changed = false;

        rc = ask_all(b);
        if (rc == 0)
            rc = result(b);
        if (rc <= 0)
            return rc;
        rc = 0;
        if (kv_now_ns() - start > b->self->linger_ns)
            continue;
        if (trd_packs_look_again(b->self, &changed) < 0)
            all_unsure(b);
        if (!changed)
            return 0;
    }
    return rc ? rc : -EIO;
}

static bool are_keys(const uint8_t *hashes, size_t hash_len, size_t n)
{
    return n == 0 || (hashes && hash_len > 0 && hash_len <= KVS_HASH_MAX);
}

/* -- exists, touch, prefetch ------------------------------------------------------------------- */

int trd_look(struct kvs_store *store, const uint8_t *hashes, size_t hash_len, size_t n,
             uint8_t *ret_state)
{
    int rc = kvs_look(store, hashes, hash_len, n, ret_state);

    if (rc != -ENOTSUP)
        return rc;
    for (size_t i = 0; i < n; i++) { /* its gets answer, at the price of the bytes */
        void *data;
        size_t len;

        rc = trd_get_chunk(store, hashes + i * hash_len, hash_len, &data, &len);
        if (trd_unanswered(rc))
            return rc;
        ret_state[i] = rc == 0 ? KVS_THERE : rc == -EBADMSG ? KVS_DAMAGED : KVS_MISSING;
        if (rc == 0)
            free(data);
    }
    return 0;
}

static int look_packs(struct part *part, void *arg)
{
    (void)arg;
    return trd_catalog_look(&part->member->catalog, part->store, part->linger_ns, part->hashes,
                            part->hash_len, part->n, part->state);
}

static int ask_look(struct part *part, void *arg)
{
    (void)arg;
    return trd_look(part->store, part->hashes, part->hash_len, part->n, part->state);
}

int trd_exists(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
               uint8_t *ret_present)
{
    struct batch b = {.self = self,
                      .hashes = hashes,
                      .hash_len = hash_len,
                      .n = n,
                      .ask = ask_look,
                      .ask_packs = look_packs};
    int rc;

    if (!are_keys(hashes, hash_len, n))
        return trd_done(self, -EINVAL);
    rc = find(&b);
    if (rc == 0 && mark_unknown(&b))
        trd_done(self, -EIO);
    if (rc == 0)
        memcpy(ret_present, b.state, n);
    end(&b);
    return trd_done(self, rc);
}

/* Move the keys that the member has to the front; returns their number. */
static size_t keep_there(struct part *part)
{
    size_t n = 0;

    for (size_t i = 0; i < part->n; i++)
        if (part->state[i] == KVS_THERE)
            memmove(part->hashes + n++ * part->hash_len, part->hashes + i * part->hash_len,
                    part->hash_len);
    return n;
}

static int touch_packs(struct part *part, void *arg)
{
    int rc = look_packs(part, NULL);

    if (rc == 0 && !part->member->config->read_only)
        rc = trd_catalog_touch(&part->member->catalog, part->store, part->hashes, part->hash_len,
                               part->n);
    for (size_t i = 0; rc == 0 && i < part->n; i++)
        *(int *)arg += part->state[i] == KVS_THERE;
    return rc;
}

static int ask_touch(struct part *part, void *arg)
{
    int rc = trd_look(part->store, part->hashes, part->hash_len, part->n, part->state);
    size_t n = rc < 0 ? 0 : keep_there(part);

    if (n && !part->member->config->read_only) {
        rc = kvs_touch(part->store, part->hashes, part->hash_len, n);
        *(int *)arg += KV_MAX(rc, 0);
    }
    return KV_MIN(rc, 0);
}

int trd_touch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    int marked = 0, rc;
    struct batch b = {.self = self,
                      .hashes = hashes,
                      .hash_len = hash_len,
                      .n = n,
                      .ask = ask_touch,
                      .ask_packs = touch_packs,
                      .arg = &marked};

    if (!are_keys(hashes, hash_len, n))
        return trd_done(self, -EINVAL);
    rc = find(&b);
    if (rc == 0 && mark_unknown(&b))
        rc = -EIO;
    end(&b);
    return rc == -EIO && marked ? marked : rc < 0 ? trd_done(self, rc) : marked;
}

/* Count blobs in packs of a member that isn't near. */
static int prefetch_packs(struct part *part, void *arg)
{
    int rc = look_packs(part, NULL);
    bool near = *part->member->config->uri == '/';

    for (size_t i = 0; rc == 0 && !near && i < part->n; i++)
        *(size_t *)arg += part->state[i] == KVS_THERE;
    return rc;
}

/* The last member fetches all that no other one has, without a look before. */
static int ask_prefetch(struct part *part, void *arg)
{
    size_t n = part->n;
    int rc = 0;

    (void)arg;
    if (part->known || part->last)
        memset(part->state, KVS_THERE, part->n);
    else
        rc = trd_look(part->store, part->hashes, part->hash_len, part->n, part->state);
    if (rc < 0)
        return rc;
    if (!part->known && !part->last)
        n = keep_there(part);
    if (n)
        kvs_prefetch(part->store, part->hashes, part->hash_len, n); /* a hint: it may fail */
    return 0;
}

int trd_prefetch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    size_t packed = 0;
    struct batch b = {.self = self,
                      .hashes = hashes,
                      .hash_len = hash_len,
                      .n = n,
                      .ask = ask_prefetch,
                      .ask_packs = prefetch_packs,
                      .arg = &packed};
    int rc = are_keys(hashes, hash_len, n) ? begin(&b) : -EINVAL;

    if (rc == 0)
        ask_all(&b);
    end(&b);
    /* Consumers whose prefetch fails get the window by a batch, which reads a pack's blobs together. */
    return rc == 0 && packed > 1 ? -ENOTSUP : trd_done(self, rc);
}

/* -- get --------------------------------------------------------------------------------------- */

struct values {
    uint8_t **data;
    size_t *len;
};

/* Hand out what a member gave. Returns the number of chunks, or -ENOMEM. */
static int ask_get(struct part *part, void *arg)
{
    struct values *to = arg;
    void **data = calloc(part->n, sizeof(*data));
    size_t *len = calloc(part->n, sizeof(*len));
    int rc = data && len ? 0 : -ENOMEM;

    if (rc == 0)
        rc = kvs_get_chunks(part->store, part->hashes, part->hash_len, part->n, data, len);
    for (size_t i = 0; rc >= 0 && i < part->n; i++) {
        if (data[i]) {
            part->state[i] = KVS_THERE;
            to->data[part->at[i]] = data[i];
            to->len[part->at[i]] = len[i];
        } else if (len[i] == KVS_LEN_BAD) {
            part->state[i] = KVS_DAMAGED;
        }
    }
    free(data);
    free(len);
    return KV_MIN(rc, 0);
}

static int get_packs(struct part *part, void *arg)
{
    struct values *to = arg;
    void **data = calloc(part->n, sizeof(*data));
    size_t *len = calloc(part->n, sizeof(*len));
    int rc = data && len ? 0 : -ENOMEM;

    if (rc == 0)
        rc = trd_catalog_get_many(&part->member->catalog, part->store, part->hashes, part->hash_len,
                                  part->n, data, len, part->state);
    for (size_t i = 0; rc == 0 && i < part->n; i++)
        if (part->state[i] == KVS_THERE) {
            to->data[part->at[i]] = data[i];
            to->len[part->at[i]] = len[i];
        }
    free(data);
    free(len);
    return rc;
}

/* As ask_get, from a backend without extensions: its misses need a proof each. */
static int ask_get_singly(struct part *part, void *arg)
{
    struct values *to = arg;
    int rc = 0;

    if (part->store->ext_table)
        return ask_get(part, arg);
    for (size_t i = 0; i < part->n && !trd_unanswered(rc); i++) {
        void *data;
        size_t len;

        rc = trd_get_chunk(part->store, part->hashes + i * part->hash_len, part->hash_len, &data,
                           &len);
        if (rc == 0) {
            part->state[i] = KVS_THERE;
            to->data[part->at[i]] = data;
            to->len[part->at[i]] = len;
        }
    }
    for (size_t i = 0; trd_unanswered(rc) && i < part->n; i++)
        free(KV_STEAL(to->data[part->at[i]]));
    return trd_unanswered(rc) ? rc : 0;
}

static int count_gets(kv_store_v1 *self, const struct batch *b, size_t unknown, uint8_t **data,
                      size_t *len)
{
    uint64_t bad = 0, found = 0;

    for (size_t i = 0; i < b->n; i++) {
        found += data[i] != NULL;
        bad += b->state[i] == KVS_DAMAGED;
        if (!data[i])
            len[i] = b->state[i] == KVS_DAMAGED   ? KV_STORE_LEN_BAD
                     : b->state[i] == KVS_UNKNOWN ? KV_STORE_LEN_UNKNOWN
                                                  : 0;
    }
    atomic_fetch_add_explicit(&self->gets, b->n, memory_order_relaxed);
    atomic_fetch_add_explicit(&self->bad_chunks, bad, memory_order_relaxed);
    atomic_fetch_add_explicit(&self->get_misses, b->n - found - bad - unknown,
                              memory_order_relaxed);
    return (int)found;
}

static bool has_unknown(const struct batch *b)
{
    return b->n && memchr(b->state, KVS_UNKNOWN, b->n);
}

int trd_get_many(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                 uint8_t **out_data, size_t *out_len)
{
    struct values to = {out_data, out_len};
    struct batch b = {.self = self,
                      .hashes = hashes,
                      .hash_len = hash_len,
                      .n = n,
                      .ask = ask_get_singly,
                      .ask_packs = get_packs,
                      .arg = &to};
    int rc;

    if (!are_keys(hashes, hash_len, n))
        return trd_done(self, -EINVAL);
    for (size_t i = 0; i < n; i++)
        out_data[i] = NULL;
    rc = find(&b);
    if (rc == 0)
        rc = count_gets(self, &b, mark_unknown(&b), out_data, out_len);
    if (rc >= 0 && (size_t)rc < n && has_unknown(&b))
        trd_done(self, -EIO);
    for (size_t i = 0; rc < 0 && i < n; i++) {
        free(out_data[i]);
        out_data[i] = NULL;
    }
    end(&b);
    return trd_done(self, rc);
}
