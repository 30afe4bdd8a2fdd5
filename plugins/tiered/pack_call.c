// SPDX-License-Identifier: Apache-2.0
/* pack_chunks: the steps of pack.h on stores of its own, so that no publication of the handle is part of
 * them. */
#include "base/core/clock.h"
#include "base/core/log.h"
#include "tiered/pack.h"
#include "tiered/store.h"

/* The rest of the caller's list. */
struct list {
    uint8_t *hashes;
    size_t hash_len, n;
    int *each;
};

static int find_member(const kv_store_v1 *self, const char *name)
{
    for (size_t i = 0; i < self->n_members; i++)
        if (strcmp(self->config.members[i].name, name) == 0)
            return self->config.members[i].read_only ? -EROFS : (int)i;
    return -ENOENT;
}

/* Leave out of the list what it has before: objects that begin alike name the same chunks. */
static int leave_twins(struct list *l)
{
    struct trd_keys seen = {0};
    size_t left = 0;
    int rc = 0;

    for (size_t i = 0; i < l->n && rc >= 0; i++) {
        const uint8_t *hash = l->hashes + i * l->hash_len;

        rc = trd_keys_add(&seen, hash, l->hash_len);
        if (rc > 0)
            memmove(l->hashes + left++ * l->hash_len, hash, l->hash_len);
    }
    trd_keys_fini(&seen);
    l->n = left;
    return KV_MIN(rc, 0);
}

/* -- chunks that are in use -------------------------------------------------------------------- */

struct idle {
    struct trd_keys keys;
    uint64_t before_s;
};

static int note_idle(void *arg, const kv_store_entry *entry)
{
    struct idle *idle = arg;

    if (!entry->used_s || entry->used_s > idle->before_s)
        return 0;
    return KV_MIN(trd_keys_add(&idle->keys, entry->hash, entry->hash_len), 0);
}

/* Leave out of the list what was used within @idle_s, and what isn't there. */
static int leave_used(struct list *l, struct kvs_store *from, uint64_t idle_s,
                      kv_store_packed *sums)
{
    uint64_t now_s = kv_wall_ns() / KV_NS_PER_S;
    struct idle idle = {.before_s = now_s - KV_MIN(idle_s, now_s)};
    size_t left = 0;
    int rc = idle_s ? kvs_list_chunks(from, note_idle, &idle) : 0;

    for (size_t i = 0; rc == 0 && idle_s && i < l->n; i++) {
        const uint8_t *hash = l->hashes + i * l->hash_len;

        if (trd_keys_has(&idle.keys, hash, l->hash_len))
            memmove(l->hashes + left++ * l->hash_len, hash, l->hash_len);
        else
            sums->in_use++;
    }
    if (rc == 0 && idle_s)
        l->n = left;
    trd_keys_fini(&idle.keys);
    return rc;
}

/* -- the steps --------------------------------------------------------------------------------- */

/* Count what happened to each, and keep in the list what is in packs now. */
static void keep_packed(struct list *l, kv_store_packed *sums)
{
    size_t left = 0;

    for (size_t i = 0; i < l->n; i++) {
        int rc = l->each[i];

        sums->packed += rc == 0;
        sums->missing += rc == -ENOENT;
        sums->left += rc == -EAGAIN || rc == -EMSGSIZE;
        sums->errors += rc < 0 && rc != -ENOENT && rc != -EAGAIN && rc != -EMSGSIZE;
        if (rc == 0)
            memmove(l->hashes + left++ * l->hash_len, l->hashes + i * l->hash_len, l->hash_len);
    }
    l->n = left;
}

static int pack(struct trd_packing *p, struct list *l, uint64_t linger_ns, kv_store_packed *sums)
{
    int rc = trd_pack_write(p, l->hashes, l->hash_len, l->n, l->each), dropped;

    keep_packed(l, sums);
    sums->packs = p->n_packs;
    sums->packed_bytes = p->n_bytes;
    if (l->n == 0)
        return KV_MIN(rc, 0);
    (void)trd_packing_wait(p, linger_ns);
    dropped = trd_pack_drop(p, l->hashes, l->hash_len, l->n, l->each);
    for (size_t i = 0; dropped >= 0 && i < l->n; i++) {
        sums->removed += l->each[i] == 1;
        sums->errors += l->each[i] < 0;
    }
    return rc < 0 ? rc : KV_MIN(dropped, 0);
}

static int pack_list(kv_store_v1 *self, const kv_store_pack_opts *opts, unsigned from, unsigned to,
                     struct list *l, kv_store_packed *sums)
{
    const struct trd_member_config *members = self->config.members;
    struct kvs_store *target = NULL, *source = NULL;
    struct trd_bound *bounds[2] = {NULL, NULL};
    struct trd_packing p;
    int rc = trd_open(members[to].uri, false, members[to].deadline_ms, &bounds[0], &target);

    if (rc == 0 && from != to)
        rc = trd_open(members[from].uri, false, members[from].deadline_ms, &bounds[1], &source);
    if (rc == 0) {
        kvs_publishes_by_hand(target);
        rc = trd_packing_init(&p, source ? source : target, target);
        p.min_bytes = KV_OPT(opts, min_bytes, 0);
        p.max_bytes = KV_OPT(opts, max_bytes, 0);
        if (rc == 0)
            rc = leave_used(l, p.from, KV_OPT(opts, idle_s, 0), sums);
        if (rc == 0)
            rc = pack(&p, l, self->linger_ns, sums);
        trd_packing_fini(&p);
    }
    kvs_close(source);
    kvs_close(target);
    trd_bound_destroy(bounds[1]);
    trd_bound_destroy(bounds[0]);
    return rc;
}

int trd_pack_chunks(kv_store_v1 *self, const kv_store_pack_opts *opts, const uint8_t *hashes,
                    size_t hash_len, size_t n, kv_store_packed *ret)
{
    struct list l = {.hash_len = hash_len, .n = n};
    kv_store_packed sums = {.size = ret->size};
    const char *from_name = KV_OPT(opts, from, NULL);
    int to, from, rc;

    if (!opts->to || (n && !hashes))
        return trd_done(self, -EINVAL);
    to = find_member(self, opts->to);
    from = from_name ? find_member(self, from_name) : to;
    rc = KV_MIN(KV_MIN(to, from), 0);
    l.hashes = malloc(n * hash_len + 1);
    l.each = calloc(n + 1, sizeof(*l.each));
    if (rc == 0)
        rc = l.hashes && l.each ? 0 : -ENOMEM;
    if (rc == 0) {
        memcpy(l.hashes, n ? (const void *)hashes : "", n * hash_len);
        rc = leave_twins(&l);
    }
    if (rc == 0)
        rc = pack_list(self, opts, (unsigned)from, (unsigned)to, &l, &sums);
    free(l.hashes);
    free(l.each);
    memcpy(ret, &sums, KV_MIN(ret->size, sizeof(sums)));
    return trd_done(self, rc);
}
