// SPDX-License-Identifier: Apache-2.0
/* Listings, and sweeps on top of them. */
#include <stdlib.h>
#include <string.h>

#include "base/core/log.h"
#include "s3/list.h"
#include "s3/store.h"

/* -- Listings -------------------------------------------------------------------------------- */

struct listing {
    kv_store_v1 *self;
    kv_store_each_fn each;
    void *arg;
    bool stopped; /* by the caller, whose value is returned */
};

/* Convert a time of the server's clock to ours, by which callers compare. */
static uint64_t by_our_clock(kv_store_v1 *self, int64_t modified_s)
{
    int64_t offset_s = s3_client_offset_s(self->client);

    if (llabs(offset_s) <= 2) /* times have whole seconds */
        offset_s = 0;
    return modified_s > offset_s ? (uint64_t)(modified_s - offset_s) : 0;
}

static int on_manifest(void *arg, const struct s3_listed *object)
{
    struct listing *listing = arg;
    struct s3_listed copy = *object;
    kv_store_entry entry = {.size = sizeof(entry),
                            .name = copy.key,
                            .len = object->len,
                            .used_s = by_our_clock(listing->self, object->modified_s)};
    int ret;

    if (!s3_name_of_key(copy.key))
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
                            .used_s = by_our_clock(listing->self, object->modified_s)};
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
    struct listing listing = {self, each, arg, false};
    int ret;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (!each)
        return -EINVAL;
    s3_pending_flush(self->pending, false);
    ret = s3_list(self->client, &self->config, folder, S3_PAGE, on, &listing);
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

/* Return 1 when the manifest has no bytes, or is gone; 0 when it has; or an error. */
static int is_empty(kv_store_v1 *self, const char *name)
{
    uint8_t *data = NULL;
    size_t len = 0;
    int rc = s3_get(self->client, s3_manifest_path(&self->config, name), &data, &len);

    free(data);
    return rc == -ENOENT ? 1 : rc < 0 ? rc : len == 0;
}

int s3_list_refs(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg)
{
    size_t n;
    int rc;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (s3_bad_name(name) || !each)
        return -EINVAL;
    rc = s3_refs_list(self->refs, name, each, arg, &n);
    if (rc < 0 || n)
        return rc;
    /* Behind the notes: a manifest with bytes that has replaced an empty one may need any chunk. */
    rc = is_empty(self, name);
    return rc < 0 ? rc : rc ? 0 : -ENOENT;
}

/* -- Sweeping -------------------------------------------------------------------------------- */

struct sweep {
    kv_store_v1 *self;
    kv_store_live_fn live;
    void *arg;
    int64_t before_s; /* objects modified before may be deleted */
    kv_store_swept swept;
};

/* Delete one chunk. Ask for its age again right before: a save may have renewed it since it was
 * listed. */
static int sweep_one(struct sweep *sweep, const uint8_t *hash, size_t hash_len)
{
    kv_store_v1 *self = sweep->self;
    struct s3_request head = {.method = "HEAD"};
    int error;

    if (s3_pending_has(self->pending, hash, hash_len))
        return 0; /* its deletion would drop the put, which a publication may need */
    head.path = s3_chunk_path(&self->config, hash, hash_len);
    error = head.path ? s3_run(self->client, &head) : -ENOMEM;
    if (!error && (!head.modified_s || head.modified_s >= sweep->before_s)) {
        s3_request_fini(&head);
        return 0;
    }
    s3_request_fini(&head);
    if (!error)
        error = s3_delete_chunk(self, hash, hash_len);
    return error ? error : 1;
}

static int on_sweep(void *arg, const struct s3_listed *object)
{
    struct sweep *sweep = arg;
    uint8_t hash[S3_MAX_HASH];
    size_t hash_len = s3_chunk_of_key(object->key, hash);
    int ret = 0;

    if (hash_len == 0)
        return 0;
    if (object->modified_s && object->modified_s < sweep->before_s &&
        !sweep->live(sweep->arg, hash, hash_len))
        ret = sweep_one(sweep, hash, hash_len);
    if (ret < 0) {
        sweep->swept.errors += ret != -ENOENT;
    } else if (ret == 0) {
        sweep->swept.kept++;
    } else {
        sweep->swept.deleted++;
        sweep->swept.deleted_bytes += object->len == UINT64_MAX ? 0 : object->len;
    }
    return 0;
}

/* Compute the cutoff by the server's clock, which sets all ages, once: chunks put during the sweep
 * are young however long it takes. */
static int set_cutoff(kv_store_v1 *self, uint64_t min_age_s, int64_t *ret)
{
    int64_t now_s;
    int error;

    *ret = min_age_s ? 0 : INT64_MAX;
    if (min_age_s == 0)
        return 0;
    error = s3_server_time(self->client, &self->config, &now_s);
    if (error == -ENOTSUP)
        kv_log_error("s3", "nothing is deleted: the server sends no Date", NULL);
    if (!error && (uint64_t)now_s > min_age_s)
        *ret = now_s - (int64_t)min_age_s;
    return error;
}

int s3_sweep_chunks(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                    kv_store_swept *ret)
{
    struct sweep sweep = {self, live, arg, 0, {.size = sizeof(kv_store_swept)}};
    int error;

    if (s3_in_child(self))
        return s3_failed(self, -ECHILD);
    if (!live || !ret || ret->size < sizeof(size_t))
        return -EINVAL;
    error = set_cutoff(self, min_age_s, &sweep.before_s);
    if (!error) {
        s3_pending_flush(self->pending, false);
        error = s3_list(self->client, &self->config, "c/", S3_PAGE, on_sweep, &sweep);
    }
    sweep.swept.size = KV_MIN(ret->size, sizeof(sweep.swept));
    memcpy(ret, &sweep.swept, sweep.swept.size);
    return s3_failed(self, error);
}
