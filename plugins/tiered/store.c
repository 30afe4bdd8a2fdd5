// SPDX-License-Identifier: Apache-2.0
#include "tiered/store.h"

#include "base/core/clock.h"
#include "base/core/log.h"

int trd_done(kv_store_v1 *self, int rc)
{
    if (KV_UNLIKELY(rc < 0 && rc != -ENOENT && rc != -EBADMSG && rc != -EMSGSIZE))
        atomic_fetch_add_explicit(&self->errors, 1, memory_order_relaxed);
    return rc;
}

static void store_close(kv_store_v1 *self)
{
    if (!self)
        return;
    for (size_t i = 0; i < self->n_members; i++)
        trd_member_fini(&self->members[i]);
    trd_places_destroy(self->places);
    trd_config_fini(&self->config);
    free(self);
}

static int open_members(kv_store_v1 *self)
{
    bool any = false;
    int rc = 0;

    self->near = true;
    for (size_t i = 0; i < self->config.n_members && rc == 0; i++) {
        self->n_members++;
        self->near &= *self->config.members[i].uri == '/' && !self->config.members[i].deadline_ms;
        rc = trd_member_init(&self->members[i], &self->config.members[i]);
        any |= atomic_load(&self->members[i].store) != NULL;
    }
    return rc ? rc : any ? 0 : -EHOSTDOWN;
}

static int read_config(kv_store_v1 *self, const char *uri)
{
    const char *path = uri ? trd_config_path(uri) : NULL;
    struct kv_error error = {0};
    char quoted[400];
    int rc = path ? trd_config_read(path, &self->config, &error)
                  : kv_fail(&error, -EINVAL, 0, "the URI is tiered:/FILE, an absolute path");

    if (rc)
        kv_log_error("tiered", "the configuration can't be used", "reason=%s",
                     kv_log_quote(quoted, sizeof(quoted), error.text));
    return rc;
}

static kv_store_v1 *store_open(const char *uri)
{
    kv_store_v1 *self = calloc(1, sizeof(*self));
    int rc = self ? read_config(self, uri) : -ENOMEM;

    if (rc == 0)
        rc = trd_places_create(self->config.places, &self->places);
    if (rc == 0)
        rc = open_members(self);
    if (rc == 0) {
        self->linger_ns = self->config.linger_ms * KV_NS_PER_MS;
        return self;
    }
    store_close(self);
    errno = rc == -ENOENT ? EIO : -rc; /* ENOENT would say that this plugin is missing */
    return NULL;
}

static int is_near(kv_store_v1 *self)
{
    return self->near;
}

const kv_store_vtable *kv_store_get_vtable(void)
{
    static const kv_store_vtable table = {
        .version = KV_STORE_VERSION_2,
        .open = store_open,
        .close = store_close,
        .put_chunk = trd_put,
        .get_chunk = trd_get,
        .put_manifest = trd_put_manifest,
        .get_manifest = trd_get_manifest,
        .delete_manifest = trd_delete_manifest,
        .prefetch_chunks = trd_prefetch,
    };

    return &table;
}

const kv_store_ext *kv_store_get_ext(void)
{
    static const kv_store_ext table = {
        .size = sizeof(table),
        .version = KV_STORE_EXT_VERSION,
        .exists_chunks = trd_exists,
        .get_chunks = trd_get_many,
        .put_chunks = trd_put_many,
        .delete_chunk = trd_delete,
        .list_manifests = trd_list_manifests,
        .list_chunks = trd_list_chunks,
        .list_refs = trd_list_refs,
        .touch_chunks = trd_touch,
        .flush = trd_flush,
        .sweep_chunks = trd_sweep,
        .stats = trd_stats,
        .stream_chunk = trd_stream,
        .get_parts = trd_get_parts,
        .put_parts = trd_put_parts,
        .delete_chunk_if = trd_delete_if,
        .new_chunks = trd_new_chunks,
        .is_near = is_near,
        .pack_chunks = trd_pack_chunks,
    };

    return &table;
}
