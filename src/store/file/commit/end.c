// SPDX-License-Identifier: Apache-2.0
/** After a publication: release pins and leases, or keep all chunks pending when it failed. */
#include <unistd.h>

#include "store/file/commit/commit.h"

/* Take what a publication has released from the puts of a chunk. */
static void release(kv_store_v1 *h, struct kvs_file_pending *e)
{
    struct kvs_file_pending *counted = e;

    if (e->gone && e->taken) /* a later put has replaced it, and counts its puts too */
        counted = kvs_file_map_find(&h->map, e->key, e->key_len);
    if (counted)
        counted->puts -= KV_MIN(counted->puts, e->taken);
}

/* Release an entry, under `lock`. It leaves the map unless puts of it wait for another manifest. */
static void let_go(kv_store_v1 *h, struct kvs_file_pending **at)
{
    struct kvs_file_pending *e = *at;

    e->busy = false;
    e->taken = 0;
    if (e->gone)
        return; /* freed by the caller */
    if (e->puts)
        *at = NULL;
    else
        kvs_file_map_remove(&h->map, e);
}

static void free_entries(kv_store_v1 *h, struct kvs_file_commit *c)
{
    for (size_t i = 0; i < c->n; i++)
        kvs_file_pending_free(h, c->entries[i]);
}

/* True, under `lock`, when nothing but its age keeps a chunk that stays pending. What a flush made
 * durable stays for as long as the handle likes, which no lease lasts. */
static bool wants_pin(const struct kvs_file_commit *c, const struct kvs_file_pending *e, bool keep)
{
    return !e->pinned && (!e->leased || c->flush) && !e->tried && !e->gone &&
           e->state != KVS_FILE_LOST && (e->puts > e->taken || keep);
}

/* Choose a chunk to pin, whose name in tmp/ is *@ret_tmp. A leased hit had none. */
static bool begin_pin(kv_store_v1 *h, const struct kvs_file_commit *c, struct kvs_file_pending *e,
                      bool keep, uint64_t *ret_tmp)
{
    bool wanted;

    pthread_mutex_lock(&h->lock);
    wanted = wants_pin(c, e, keep);
    e->tried |= wanted;
    if (wanted && e->leased)
        e->tmp = atomic_fetch_add_explicit(&h->next_tmp, 1, memory_order_relaxed);
    *ret_tmp = e->tmp;
    pthread_mutex_unlock(&h->lock);
    return wanted;
}

static void end_pin(kv_store_v1 *h, struct kvs_file_pending *e)
{
    bool leased;

    pthread_mutex_lock(&h->lock);
    leased = e->leased;
    e->leased = false;
    e->pinned = true;
    /* the file was synced */
    e->state = e->state == KVS_FILE_LOST ? KVS_FILE_LOST : KVS_FILE_HIT;
    pthread_mutex_unlock(&h->lock);
    kvs_file_leases_end(h, leased);
}

void kvs_file_commit_pin(kv_store_v1 *h, struct kvs_file_commit *c, bool keep)
{
    for (size_t i = 0; i < c->n; i++) {
        struct kvs_file_pending *e = c->entries[i];
        char tmp[KVS_FILE_TMP], hex[KVS_FILE_HEX];
        uint64_t n;

        if (!begin_pin(h, c, e, keep, &n))
            continue;
        kvs_file_tmp_name(h, tmp, n);
        kvs_file_hex(hex, e->key, e->key_len);
        /* unpinned: if the chunk vanishes, the next publication fails and says so */
        if (linkat(h->fan[kvs_file_fan(e->key)], hex, h->tmp, tmp, 0) == 0)
            end_pin(h, e);
    }
}

/* Take `lock` at a moment when every chunk that stays pending has a pin; other threads put chunks
 * meanwhile. */
static void lock_pinned(kv_store_v1 *h, struct kvs_file_commit *c)
{
    for (bool wanted = true; wanted;) {
        wanted = false;
        pthread_mutex_lock(&h->lock);
        for (size_t i = 0; i < c->n; i++)
            wanted |= wants_pin(c, c->entries[i], false);
        if (wanted) {
            pthread_mutex_unlock(&h->lock);
            kvs_file_commit_pin(h, c, false);
        }
    }
}

/* End, under `lock`, the lease of an entry that is lost. Returns how many leases ended. */
static size_t take_lease(struct kvs_file_pending *e)
{
    bool leased = e->leased && e->state == KVS_FILE_LOST;

    if (leased)
        e->leased = false;
    return leased;
}

void kvs_file_commit_finish(kv_store_v1 *h, struct kvs_file_commit *c)
{
    struct kvs_file_note *notes = malloc((c->n + 1) * sizeof(*notes));
    size_t n = 0, n_leases = 0;

    lock_pinned(h, c);
    for (size_t i = 0; i < c->n; i++) {
        struct kvs_file_pending *e = c->entries[i];
        bool lost = e->state == KVS_FILE_LOST;

        n_leases += take_lease(e);
        if (!lost) {
            e->state = KVS_FILE_HIT;
            release(h, e);
        }
        e->settled = !lost && (e->pinned || e->leased);
        let_go(h, &c->entries[i]);
        if (notes && !lost && e->sure && c->entries[i])
            notes[n++] = (struct kvs_file_note){e->key, e->key_len, e->seen};
    }
    pthread_mutex_unlock(&h->lock);
    kvs_file_leases_end(h, n_leases);
    /* pins go first: unlinking them changes the chunk's ctime */
    for (size_t i = 0; i < c->n; i++) {
        if (c->entries[i])
            kvs_file_unpin(h, c->entries[i]);
    }
    if (n)
        kvs_file_remember(h, notes, n);
    free_entries(h, c);
    free(notes);
}

void kvs_file_commit_give_up(kv_store_v1 *h, struct kvs_file_commit *c, bool suspect)
{
    size_t n_leases = 0;

    pthread_mutex_lock(&h->lock);
    for (size_t i = 0; i < c->n; i++) {
        struct kvs_file_pending *e = c->entries[i];

        if (suspect && e->state == KVS_FILE_PUT && e->pinned)
            e->state = KVS_FILE_SUSPECT;
        n_leases += take_lease(e);
        let_go(h, &c->entries[i]);
    }
    pthread_mutex_unlock(&h->lock);
    kvs_file_leases_end(h, n_leases);
    free_entries(h, c);
}
