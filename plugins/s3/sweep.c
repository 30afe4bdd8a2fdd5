// SPDX-License-Identifier: Apache-2.0
/* Listings, and sweeping on top of them. */
#include <string.h>

#include "base/clock.h"
#include "s3/store.h"

#define PAGE 1000

/* -- Listings -------------------------------------------------------------------------------- */

struct listing {
    kv_store_each_fn each;
    void *arg;
    bool stopped; /* by the caller, whose value is then the answer */
};

static int on_manifest(void *arg, const struct s3_listed *object)
{
    struct listing *listing = arg;
    struct s3_listed copy = *object;
    kv_store_entry entry = {.size = sizeof(entry),
                            .name = copy.key,
                            .len = object->len,
                            .used_s = (uint64_t)object->modified_s};
    int ret;

    if (!s3_decode(copy.key))
        return 0;
    ret = listing->each(listing->arg, &entry);
    listing->stopped = ret != 0;
    return ret;
}

static int on_chunk(void *arg, const struct s3_listed *object)
{
    struct listing *listing = arg;
    uint8_t hash[S3_MAX_HASH];
    kv_store_entry entry = {.size = sizeof(entry),
                            .hash = hash,
                            .hash_len = s3_chunk_of_key(object->key, hash),
                            .len = object->len,
                            .used_s = (uint64_t)object->modified_s};
    int ret;

    if (entry.hash_len == 0)
        return 0;
    ret = listing->each(listing->arg, &entry);
    listing->stopped = ret != 0;
    return ret;
}

static int list(kv_store_v1 *self, const char *folder, s3_listed_fn on, kv_store_each_fn each,
                void *arg)
{
    struct listing listing = {each, arg, false};
    int ret;

    if (!each)
        return -EINVAL;
    s3_pending_flush(self->pending, false);
    ret = s3_list(self->client, &self->config, folder, PAGE, on, &listing);
    return listing.stopped ? ret : s3_failed(self, ret);
}

int s3_list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    return list(self, "m/", on_manifest, each, arg);
}

int s3_list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    return list(self, "c/", on_chunk, each, arg);
}

/* -- Sweeping -------------------------------------------------------------------------------- */

struct sweep {
    kv_store_v1 *self;
    kv_store_live_fn live;
    void *arg;
    uint64_t before_s;
    kv_store_swept swept;
};

/* The age is asked again right before: a save may have renewed the chunk since it was listed. */
static int sweep_one(struct sweep *sweep, const kv_store_entry *entry)
{
    kv_store_v1 *self = sweep->self;
    struct s3_request head = {.method = "HEAD"};
    int error;

    head.path = s3_chunk_path(&self->config, entry->hash, entry->hash_len);
    error = head.path ? s3_run(self->client, &head) : -ENOMEM;
    if (!error && (!head.modified_s || (uint64_t)head.modified_s >= sweep->before_s)) {
        s3_request_fini(&head);
        return 0;
    }
    s3_request_fini(&head);
    if (!error)
        error = s3_delete_chunk(self, entry->hash, entry->hash_len);
    return error ? error : 1;
}

static int on_sweep(void *arg, const kv_store_entry *entry)
{
    struct sweep *sweep = arg;
    int ret = 0;

    if (entry->used_s && entry->used_s < sweep->before_s &&
        !sweep->live(sweep->arg, entry->hash, entry->hash_len))
        ret = sweep_one(sweep, entry);
    if (ret < 0) {
        sweep->swept.errors += ret != -ENOENT;
    } else if (ret == 0) {
        sweep->swept.kept++;
    } else {
        sweep->swept.deleted++;
        sweep->swept.deleted_bytes += entry->len == UINT64_MAX ? 0 : entry->len;
    }
    return 0;
}

int s3_sweep_chunks(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                    kv_store_swept *ret)
{
    uint64_t now_s = kv_wall_ns() / KV_NS_PER_S + 1; /* times have whole seconds */
    struct sweep sweep = {self,
                          live,
                          arg,
                          min_age_s < now_s ? now_s - min_age_s : 0,
                          {.size = sizeof(kv_store_swept)}};
    int error;

    if (!live || !ret || ret->size < sizeof(size_t))
        return -EINVAL;
    error = s3_list_chunks(self, on_sweep, &sweep);
    sweep.swept.size = KV_MIN(ret->size, sizeof(sweep.swept));
    memcpy(ret, &sweep.swept, sweep.swept.size);
    return error;
}
