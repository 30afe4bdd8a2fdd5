// SPDX-License-Identifier: Apache-2.0
/* The calls of a bounded store, and the tables by which libkvstore makes them. */
#include "tiered/bound_call.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/core/clock.h"
#include "base/core/error.h"
#include "base/thread/thread.h"
#include "store/backend/parts.h"

/* -- calls ------------------------------------------------------------------------------------- */

struct trd_call *trd_call_make(enum trd_op op, const void *hashes, size_t hash_len, size_t n)
{
    struct trd_call *call = calloc(1, sizeof(*call));

    if (!call)
        return NULL;
    *call = (struct trd_call){.op = op, .hash_len = hash_len, .n = n};
    call->hashes = malloc(n * hash_len + 1);
    call->data = calloc(n + 1, sizeof(*call->data));
    call->len = calloc(n + 1, sizeof(*call->len));
    call->state = calloc(n + 1, 1);
    call->each = calloc(n + 1, sizeof(*call->each));
    pthread_mutex_init(&call->lock, NULL);
    kv_cond_init(&call->ended);
    if (!call->hashes || !call->data || !call->len || !call->state || !call->each) {
        trd_call_free(call);
        return NULL;
    }
    if (n && hashes)
        memcpy(call->hashes, hashes, n * hash_len);
    return call;
}

void trd_call_free(struct trd_call *call)
{
    if (!call)
        return;
    for (size_t i = 0; call->data && i < call->n; i++)
        free(call->data[i]);
    for (size_t i = 0; call->parts && i < call->n; i++)
        free(call->parts[i].iov_base);
    free(call->parts);
    free(call->ranges);
    free(call->hashes);
    free(call->data);
    free(call->len);
    free(call->state);
    free(call->each);
    free(call->name);
    pthread_mutex_destroy(&call->lock);
    pthread_cond_destroy(&call->ended);
    free(call);
}

/* Copy value @i into the call. */
static int copy_value(struct trd_call *call, size_t i, const void *data, size_t len)
{
    call->data[i] = malloc(len + 1);
    if (!call->data[i])
        return -ENOMEM;
    if (len)
        memcpy(call->data[i], data, len);
    call->len[i] = len;
    return 0;
}

/* -- callbacks, on a worker's thread ----------------------------------------------------------- */

static int call_each(void *arg, const kv_store_entry *entry)
{
    struct trd_call *call = arg;
    int rc = -ECANCELED;

    pthread_mutex_lock(&call->lock);
    if (!call->given_up) {
        rc = call->fn(call->arg, entry);
        call->progress_ns = kv_now_ns();
    }
    pthread_mutex_unlock(&call->lock);
    return rc;
}

/* Nobody is left to ask after a sweep was given up: all chunks stay. */
static int call_live(void *arg, const uint8_t *hash, size_t hash_len)
{
    struct trd_call *call = arg;
    int live = 1;

    pthread_mutex_lock(&call->lock);
    if (!call->given_up) {
        live = call->live(call->arg, hash, hash_len);
        call->progress_ns = kv_now_ns();
    }
    pthread_mutex_unlock(&call->lock);
    return live;
}

/* -- what a worker does ------------------------------------------------------------------------ */

static int do_chunks(struct trd_call *c, struct kvs_store *store)
{
    switch (c->op) {
    case TRD_PUT:
        return kvs_put_chunk_of_save(store, c->hashes, c->hash_len, c->data[0], c->len[0]);
    case TRD_GET:
        return kvs_get_chunk(store, c->hashes, c->hash_len, &c->data[0], &c->len[0]);
    case TRD_PREFETCH:
        return kvs_prefetch(store, c->hashes, c->hash_len, c->n);
    case TRD_EXISTS:
        return kvs_look_each(store, c->hashes, c->hash_len, c->n, c->state);
    case TRD_GET_MANY:
        return kvs_get_chunks_each(store, c->hashes, c->hash_len, c->n, c->data, c->len);
    case TRD_PUT_MANY:
        return kvs_put_chunks_of_save(store, c->hashes, c->hash_len, c->n,
                                      (const void *const *)c->data, c->len, c->each);
    case TRD_DELETE:
        return kvs_delete_chunk(store, c->hashes, c->hash_len);
    case TRD_DELETE_IF:
        return kvs_delete_chunk_if(store, c->hashes, c->hash_len, c->data[0], c->len[0]);
    case TRD_TOUCH:
        return kvs_touch(store, c->hashes, c->hash_len, c->n);
    case TRD_NEW:
        return kvs_new_chunks(store, c->hashes, c->hash_len, c->n, c->state);
    default:
        return kvs_get_ranges(store, c->ranges, c->n);
    }
}

int trd_call_do(struct trd_call *c, struct kvs_store *store, const char *uri, bool existing)
{
    switch (c->op) {
    case TRD_OPEN:
        return existing ? kvs_open_existing(uri, &c->opened) : kvs_open(uri, &c->opened);
    case TRD_PUT_MANIFEST:
        return kvs_put_manifest(store, c->name, c->data[0], c->len[0]);
    case TRD_GET_MANIFEST:
        return kvs_get_manifest(store, c->name, &c->data[0], &c->len[0]);
    case TRD_DELETE_MANIFEST:
        return kvs_delete_manifest(store, c->name);
    case TRD_LIST_MANIFESTS:
        return kvs_list(store, call_each, c);
    case TRD_LIST_CHUNKS:
        return kvs_list_chunks(store, call_each, c);
    case TRD_LIST_REFS:
        return store->ext.list_refs(store->backend, c->name, call_each, c);
    case TRD_FLUSH:
        return kvs_flush(store);
    case TRD_SWEEP:
        return store->ext.sweep_chunks(store->backend, c->min_age_s, call_live, c, &c->swept);
    case TRD_STATS:
        return kvs_stats(store, &c->stats);
    case TRD_CLOSE:
        kvs_close(store);
        return 0;
    default:
        return do_chunks(c, store);
    }
}

/* -- the tables, on callers' threads ----------------------------------------------------------- */

/* The handle of a bounded store. Its type is the tiered store's own: the ABI has one for both. */
static struct trd_bound *bound_of(kv_store_v1 *self)
{
    return (struct trd_bound *)(void *)self;
}

/* Run a call without results, and free it. */
static int run_plain(kv_store_v1 *self, struct trd_call *call)
{
    int rc = trd_bound_run(bound_of(self), &call);

    trd_call_free(call);
    return rc;
}

/* Make a call about a manifest. NULL: no memory. */
static struct trd_call *make_named(enum trd_op op, const char *name, const void *data, size_t len)
{
    struct trd_call *call = trd_call_make(op, NULL, 0, 1);

    if (!call)
        return NULL;
    call->name = strdup(name);
    if (!call->name || (op == TRD_PUT_MANIFEST && copy_value(call, 0, data, len) < 0)) {
        trd_call_free(call);
        return NULL;
    }
    return call;
}

/* Make a call about one chunk and its bytes. NULL: no memory. */
static struct trd_call *make_valued(enum trd_op op, const uint8_t *hash, size_t hash_len,
                                    const void *data, size_t len)
{
    struct trd_call *call = trd_call_make(op, hash, hash_len, 1);

    if (call && copy_value(call, 0, data, len) < 0) {
        trd_call_free(call);
        return NULL;
    }
    return call;
}

static void bound_close(kv_store_v1 *self)
{
    (void)self; /* trd_bound_destroy ends it */
}

static int bound_put(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, const uint8_t *data,
                     size_t len)
{
    return run_plain(self, make_valued(TRD_PUT, hash, hash_len, data, len));
}

/* Run a call that brings one value. */
static int run_value(kv_store_v1 *self, struct trd_call *call, uint8_t **out_data, size_t *out_len)
{
    int rc = trd_bound_run(bound_of(self), &call);

    if (rc == 0) {
        *out_data = KV_STEAL(call->data[0]);
        *out_len = call->len[0];
    }
    trd_call_free(call);
    return rc;
}

static int bound_get(kv_store_v1 *self, const uint8_t *hash, size_t hash_len, uint8_t **out_data,
                     size_t *out_len)
{
    return run_value(self, trd_call_make(TRD_GET, hash, hash_len, 1), out_data, out_len);
}

static int bound_put_manifest(kv_store_v1 *self, const char *name, const uint8_t *data, size_t len)
{
    return run_plain(self, make_named(TRD_PUT_MANIFEST, name, data, len));
}

static int bound_get_manifest(kv_store_v1 *self, const char *name, uint8_t **out_data,
                              size_t *out_len)
{
    return run_value(self, make_named(TRD_GET_MANIFEST, name, NULL, 0), out_data, out_len);
}

static int bound_delete_manifest(kv_store_v1 *self, const char *name)
{
    return run_plain(self, make_named(TRD_DELETE_MANIFEST, name, NULL, 0));
}

static int bound_prefetch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    return run_plain(self, trd_call_make(TRD_PREFETCH, hashes, hash_len, n));
}

static int run_states(kv_store_v1 *self, enum trd_op op, const uint8_t *hashes, size_t hash_len,
                      size_t n, uint8_t *ret)
{
    struct trd_call *call = trd_call_make(op, hashes, hash_len, n);
    int rc = trd_bound_run(bound_of(self), &call);

    if (rc >= 0 && n)
        memcpy(ret, call->state, n);
    trd_call_free(call);
    return rc;
}

static int bound_exists(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                        uint8_t *ret_present)
{
    return run_states(self, TRD_EXISTS, hashes, hash_len, n, ret_present);
}

static int bound_new(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                     uint8_t *ret_new)
{
    return run_states(self, TRD_NEW, hashes, hash_len, n, ret_new);
}

static int bound_get_many(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                          uint8_t **out_data, size_t *out_len)
{
    struct trd_call *call = trd_call_make(TRD_GET_MANY, hashes, hash_len, n);
    int rc = trd_bound_run(bound_of(self), &call);

    for (size_t i = 0; rc >= 0 && i < n; i++) {
        out_data[i] = KV_STEAL(call->data[i]);
        out_len[i] = call->len[i];
    }
    trd_call_free(call);
    return rc;
}

static int bound_put_many(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n,
                          const uint8_t *const *data, const size_t *data_len, int *ret_each)
{
    struct trd_call *call = trd_call_make(TRD_PUT_MANY, hashes, hash_len, n);
    int rc = call ? 0 : -ENOMEM;

    for (size_t i = 0; i < n && rc == 0; i++)
        rc = copy_value(call, i, data[i], data_len[i]);
    if (rc == 0)
        rc = trd_bound_run(bound_of(self), &call);
    /* each has an answer of its own when the call has ended */
    for (size_t i = 0; ret_each && i < n; i++)
        ret_each[i] = call && call->done ? call->each[i] : rc;
    trd_call_free(call);
    return rc;
}

static int bound_delete(kv_store_v1 *self, const uint8_t *hash, size_t hash_len)
{
    return run_plain(self, trd_call_make(TRD_DELETE, hash, hash_len, 1));
}

static int bound_delete_if(kv_store_v1 *self, const uint8_t *hash, size_t hash_len,
                           const uint8_t *data, size_t len)
{
    return run_plain(self, make_valued(TRD_DELETE_IF, hash, hash_len, data, len));
}

static int run_list(kv_store_v1 *self, struct trd_call *call, kv_store_each_fn each, void *arg)
{
    if (!call)
        return -ENOMEM;
    call->fn = each;
    call->arg = arg;
    return run_plain(self, call);
}

static int bound_list_manifests(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    return run_list(self, trd_call_make(TRD_LIST_MANIFESTS, NULL, 0, 0), each, arg);
}

static int bound_list_chunks(kv_store_v1 *self, kv_store_each_fn each, void *arg)
{
    return run_list(self, trd_call_make(TRD_LIST_CHUNKS, NULL, 0, 0), each, arg);
}

static int bound_list_refs(kv_store_v1 *self, const char *name, kv_store_each_fn each, void *arg)
{
    return run_list(self, make_named(TRD_LIST_REFS, name, NULL, 0), each, arg);
}

static int bound_touch(kv_store_v1 *self, const uint8_t *hashes, size_t hash_len, size_t n)
{
    return run_plain(self, trd_call_make(TRD_TOUCH, hashes, hash_len, n));
}

static int bound_flush(kv_store_v1 *self)
{
    return run_plain(self, trd_call_make(TRD_FLUSH, NULL, 0, 0));
}

static int bound_sweep(kv_store_v1 *self, uint64_t min_age_s, kv_store_live_fn live, void *arg,
                       kv_store_swept *ret)
{
    struct trd_call *call = trd_call_make(TRD_SWEEP, NULL, 0, 0);
    int rc;

    if (!call)
        return -ENOMEM;
    call->live = live;
    call->arg = arg;
    call->min_age_s = min_age_s;
    call->swept.size = KV_MIN(ret->size, sizeof(call->swept));
    rc = trd_bound_run(bound_of(self), &call);
    if (rc == 0)
        memcpy(ret, &call->swept, call->swept.size);
    trd_call_free(call);
    return rc;
}

static int bound_stats(kv_store_v1 *self, kv_store_stats *ret)
{
    struct trd_call *call = trd_call_make(TRD_STATS, NULL, 0, 0);
    int rc;

    if (!call)
        return -ENOMEM;
    call->stats.size = KV_MIN(ret->size, sizeof(call->stats));
    rc = trd_bound_run(bound_of(self), &call);
    if (rc == 0)
        memcpy(ret, &call->stats, call->stats.size);
    trd_call_free(call);
    return rc;
}

/* Copy the ranges, each with one part in memory of the call. */
static int copy_ranges(struct trd_call *call, const kv_store_range *ranges, size_t n)
{
    call->ranges = calloc(n + 1, sizeof(*call->ranges));
    call->parts = calloc(n + 1, sizeof(*call->parts));
    if (!call->ranges || !call->parts)
        return -ENOMEM;
    for (size_t i = 0; i < n; i++) {
        int rc = copy_value(call, i, ranges[i].hash, ranges[i].hash_len);

        call->parts[i] = (struct iovec){malloc(ranges[i].len), ranges[i].len};
        if (rc < 0 || !call->parts[i].iov_base)
            return -ENOMEM;
        call->ranges[i] = ranges[i];
        call->ranges[i].hash = call->data[i];
        call->ranges[i].parts = &call->parts[i];
        call->ranges[i].n_parts = 1;
    }
    return 0;
}

static int bound_get_ranges(kv_store_v1 *self, kv_store_range *ranges, size_t n)
{
    struct trd_call *call = trd_call_make(TRD_RANGES, NULL, 0, n);
    int rc = call ? copy_ranges(call, ranges, n) : -ENOMEM;

    if (rc == 0)
        rc = trd_bound_run(bound_of(self), &call);
    for (size_t i = 0; rc >= 0 && i < n; i++) {
        struct kvs_cursor at = {0};

        ranges[i].rc = call->ranges[i].rc;
        memcpy(ranges[i].tag, call->ranges[i].tag, sizeof(ranges[i].tag));
        if (ranges[i].rc == 0)
            kvs_parts_scatter(ranges[i].parts, ranges[i].n_parts, &at, call->parts[i].iov_base,
                              ranges[i].len);
    }
    trd_call_free(call);
    return rc;
}

/* -- the store --------------------------------------------------------------------------------- */

static const kv_store_vtable calls = {
    .version = KV_STORE_VERSION_2,
    .close = bound_close,
    .put_chunk = bound_put,
    .get_chunk = bound_get,
    .put_manifest = bound_put_manifest,
    .get_manifest = bound_get_manifest,
    .delete_manifest = bound_delete_manifest,
    .prefetch_chunks = bound_prefetch,
};

/* Offer what the backend has. */
static kv_store_ext extensions_of(const kv_store_ext *has)
{
    return (kv_store_ext){
        .size = sizeof(kv_store_ext),
        .version = KV_STORE_EXT_VERSION,
        .exists_chunks = has->exists_chunks ? bound_exists : NULL,
        .get_chunks = has->get_chunks ? bound_get_many : NULL,
        .put_chunks = has->put_chunks ? bound_put_many : NULL,
        .delete_chunk = has->delete_chunk ? bound_delete : NULL,
        .list_manifests = has->list_manifests ? bound_list_manifests : NULL,
        .list_chunks = has->list_chunks ? bound_list_chunks : NULL,
        .list_refs = has->list_refs ? bound_list_refs : NULL,
        .touch_chunks = has->touch_chunks ? bound_touch : NULL,
        .flush = has->flush ? bound_flush : NULL,
        .sweep_chunks = has->sweep_chunks ? bound_sweep : NULL,
        .stats = has->stats ? bound_stats : NULL,
        .delete_chunk_if = has->delete_chunk_if ? bound_delete_if : NULL,
        .new_chunks = has->new_chunks ? bound_new : NULL,
        .get_ranges = has->get_ranges ? bound_get_ranges : NULL,
    };
}

int trd_bound_wrap(struct trd_bound *bound, const struct kvs_store *inner, struct kvs_store **ret)
{
    struct kvs_store *store = calloc(1, sizeof(*store));

    if (!store)
        return -ENOMEM;
    store->label = strdup(inner->label);
    if (!store->label) {
        free(store);
        return -ENOMEM;
    }
    store->backend = (kv_store_v1 *)(void *)bound;
    store->table = &calls;
    store->ext_table = inner->ext_table;
    store->calls = calls;
    if (!inner->calls.prefetch_chunks)
        store->calls.prefetch_chunks = NULL;
    if (inner->ext_table)
        store->ext = extensions_of(&inner->ext);
    store->batches = inner->batches;
    store->pid = getpid();
    *ret = store;
    return 0;
}
